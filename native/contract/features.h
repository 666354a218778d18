// What a problem may need of the kernel that computes it, beyond types and arithmetic.
#pragma once

#include <cstdint>

namespace pydet {

// A row of a kernel table names what its kernel does and refuses what it does not name: a new
// field of a problem that changes its result gets a feature here and a term in needs(), and every kernel refuses it until
// its row says otherwise. What may be ignored without changing a promised bit (fast, weights_constant, skinny, workspace)
// is no need.
enum Feature : uint64_t {
  kBatch = 1 << 0,  // leading dimensions
  kBias = 1 << 1,
  kAccumulate = 1 << 2,
  kChunks = 1 << 3,    // k_chunk
  kAlongM = 1 << 4,    // neighbours in a are along m; without it along k
  kAlongN = 1 << 5,    // neighbours in b are along n; without it along k
  kResidual = 1 << 6,  // of a norm: residual and sum, or dresidual
  kWeight = 1 << 7,
  kWeightOffset = 1 << 8,
  kRstd = 1 << 9,             // is stored
  kTwoStrides = 1 << 10,      // to walk the rows
  kRowGradient = 1 << 11,     // dx
  kWeightGradient = 1 << 12,  // dweight
  kLogarithm = 1 << 13,       // of a softmax
  kColumn = 1 << 14,          // one column of a softmax row, or its gradient
  kOutAlongM = 1 << 15,       // neighbours in out are along m; of the products whose problem is not turned over
  kBrokenChunks = 1 << 16,    // a k_chunk that is no multiple of 128
  kColumnScales = 1 << 17,    // along k, one for each column
  kGivenScales = 1 << 18,
  kRowScales = 1 << 19,  // found
  kGroupScales = 1 << 20,
  kBlockScales = 1 << 21,
  kTensorScale = 1 << 22,
  kTransposedCopy = 1 << 23,
  kDepth = 1 << 24,  // groups of tokens that are summed over
  kTree = 1 << 25,   // the order of a fold
  kMean = 1 << 26,   // is stored
  kBiasGradient = 1 << 27,
  kPeers = 1 << 28,         // of a fold: other ranks' parts
  kHeads = 1 << 29,         // of a norm: weights of each head, or rows of three strides
  kWideSum = 1 << 30,       // of a norm: x + residual in fp32, y (or dy) of another type
  kBlockSums = 1ull << 31,  // of a norm's gradient: a dweight (or dbias) for each block of rows
  kLogSumExp = 1ull << 32,  // of attention, as all from here on: lse is stored
  kPacked = 1ull << 33,     // sequences of one pack, of queries or of keys
  kLengths = 1ull << 34,    // of the keys of each sequence
  kFirstKey = 1ull << 35,
  kPages = 1ull << 36,
  kWindow = 1ull << 37,
  kMask = 1ull << 38,
  kSinks = 1ull << 39,
  kSoftcap = 1ull << 40,
  kGate = 1ull << 41,          // of an activation: another factor
  kFilters = 1ull << 42,       // of sampling: top_k, top_p or min_p
  kLogProbs = 1ull << 43,      // beside a token, or beside the gradient of one
  kPadding = 1ull << 44,       // of an embedding's gradient: an id that does not count
  kInitialState = 1ull << 45,  // of a scan, as all from here on
  kFinalState = 1ull << 46,
  kEachState = 1ull << 47,        // a decay for each state
  kSkip = 1ull << 48,             // d
  kNeighbours = 1ull << 49,       // of rotary embeddings: pairs of elements next to each other
  kInitialGradient = 1ull << 50,  // of a scan's gradient, as the next one
  kFinalGradient = 1ull << 51,
  kSlabs = 1ull << 52,  // of a softmax: columns in slabs of memory
  kMaster = 1ull << 53  // of AdamW: a parameter that is the rounding of an fp32 one
};
struct FeatureRow {
  Feature feature;
  const char *name;  // in sentences
};
constexpr FeatureRow kFeatures[] = {
    {kBatch, "a batch"},
    {kBias, "a bias"},
    {kAccumulate, "accumulate"},
    {kChunks, "k_chunk"},
    {kAlongM, "a left operand along M"},
    {kAlongN, "a right operand along N"},
    {kResidual, "a residual"},
    {kWeight, "a weight"},
    {kWeightOffset, "a weight offset"},
    {kRstd, "rstd"},
    {kTwoStrides, "rows of two strides"},
    {kRowGradient, "dx"},
    {kWeightGradient, "dweight"},
    {kLogarithm, "the logarithm"},
    {kColumn, "one column of a row"},
    {kOutAlongM, "an out along M"},
    {kBrokenChunks, "a k_chunk that is no multiple of 128"},
    {kColumnScales, "a scale for each column along k"},
    {kGivenScales, "given scales"},
    {kRowScales, "scales of rows"},
    {kGroupScales, "scales of groups"},
    {kBlockScales, "scales of blocks"},
    {kTensorScale, "the scale of a tensor"},
    {kTransposedCopy, "a transposed copy"},
    {kDepth, "groups along K"},
    {kTree, "the order tree"},
    {kMean, "the mean"},
    {kBiasGradient, "dbias"},
    {kPeers, "peers"},
    {kHeads, "weights of heads, or rows of three strides"},
    {kWideSum, "a sum in float32 beside another type"},
    {kBlockSums, "sums of blocks"},
    {kLogSumExp, "lse"},
    {kPacked, "packed sequences"},
    {kLengths, "lengths of the keys"},
    {kFirstKey, "a first key"},
    {kPages, "pages"},
    {kWindow, "a window"},
    {kMask, "a mask"},
    {kSinks, "sinks"},
    {kSoftcap, "a softcap"},
    {kGate, "another factor beside the gate"},
    {kFilters, "top_k, top_p or min_p"},
    {kLogProbs, "log-probabilities"},
    {kPadding, "a padding id"},
    {kInitialState, "an initial state"},
    {kFinalState, "a final state"},
    {kEachState, "a decay for each state"},
    {kSkip, "d"},
    {kNeighbours, "pairs of neighbours"},
    {kInitialGradient, "dinitial"},
    {kFinalGradient, "dfinal"},
    {kSlabs, "columns in slabs"},
    {kMaster, "masters"},
};

constexpr uint64_t when(bool needed, Feature feature) { return needed ? uint64_t(feature) : 0; }

}  // namespace pydet
