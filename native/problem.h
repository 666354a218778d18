// What a call asks for, once it is checked: api/ makes a problem of it, and the kernels take that.
#pragma once

#include "numerics.h"
#include "types.h"

namespace pydet {

// Writes the thread's error text, printf style, and returns the status. The one writer of error text (check/error.h).
__attribute__((format(printf, 2, 3))) pydet_status fail(pydet_status status, const char *format, ...);

enum class Arithmetic : int32_t {
  automatic = PYDET_AUTO,
  ieee = PYDET_IEEE,
  sm90 = PYDET_SM90,
  sm80 = PYDET_SM80,
  cdna3 = PYDET_CDNA3,
  cdna2 = PYDET_CDNA2,
};

// One row an arithmetic, at its number: its name, and the factors that it takes.
struct ArithmeticRow {
  Arithmetic arithmetic;
  const char *name;
  uint32_t factors;
};
constexpr ArithmeticRow kArithmetics[] = {
    {Arithmetic::automatic, "auto", kUnscaledTypes | kFp8Types},
    {Arithmetic::ieee, "ieee", kUnscaledTypes | kFp8Types},
    {Arithmetic::sm90, "sm90", kHalfTypes | kFp8Types},
    {Arithmetic::sm80, "sm80", kHalfTypes},
    {Arithmetic::cdna3, "cdna3", kHalfTypes},
    {Arithmetic::cdna2, "cdna2", kHalfTypes},
};
constexpr int kArithmeticCount = int(sizeof kArithmetics / sizeof *kArithmetics);
constexpr bool arithmetics_are_in_order() {
  for (int i = 0; i < kArithmeticCount; ++i)
    if (int(kArithmetics[i].arithmetic) != i) return false;
  return true;
}
static_assert(arithmetics_are_in_order(), "row i of kArithmetics is that of arithmetic i");

constexpr const char *arithmetic_name(Arithmetic arithmetic) { return kArithmetics[int(arithmetic)].name; }

constexpr bool is_arithmetic(int32_t asked) { return asked >= 0 && asked < kArithmeticCount; }

// ---- What a problem may need ---------------------------------------------------------------------------------------

// Beyond types and arithmetic. A row of a kernel table names what its kernel does and refuses what it does not name: a new
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
  kSoftcap = 1ull << 40
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
    {kTensorScale, "the scale of a tensor, which is to be given"},
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
};

constexpr uint64_t when(bool needed, Feature feature) { return needed ? uint64_t(feature) : 0; }

// ---- Operands ----------------------------------------------------------------------------------------------------

// A checked matrix: strides in elements, none negative; data is NULL only where there are no elements.
struct Matrix {
  char *data;
  Type type;
  int64_t rows, cols;
  int64_t row_stride, col_stride;
};

PYDET_HD Matrix transposed(const Matrix &x) { return {x.data, x.type, x.cols, x.rows, x.col_stride, x.row_stride}; }

constexpr int kMaxBatchDims = 6;

// Leading dimensions after merging all that can be: element strides are those of a, b, bias and out (0: broadcast).
// dims = 0 and count = 1 where there is no batch.
struct Batch {
  int dims;
  int64_t count;
  int64_t shape[kMaxBatchDims];
  int64_t a[kMaxBatchDims], b[kMaxBatchDims], bias[kMaxBatchDims], out[kMaxBatchDims];
};

// Where one matrix of the batch begins, in elements.
struct BatchOffsets {
  int64_t a, b, bias, out;
};

PYDET_HD BatchOffsets batch_offsets(const Batch &batch, int64_t index) {
  BatchOffsets at = {};
  for (int i = batch.dims - 1; i >= 0; --i) {
    int64_t along = index % batch.shape[i];
    index /= batch.shape[i];
    at.a += along * batch.a[i];
    at.b += along * batch.b[i];
    at.bias += along * batch.bias[i];
    at.out += along * batch.out[i];
  }
  return at;
}

// Row r of a tensor starts at data + ((r / inner) * outer_stride + (r % inner) * inner_stride) elements; its elements
// are adjacent. `inner` is the same for all tensors of a problem. Where it has an `outer`, r / inner is taken apart alike:
// (r / inner / outer) * far_stride + (r / inner % outer) * outer_stride. data is NULL where the operand is absent.
struct Rows {
  char *data;
  Type type;
  int64_t outer_stride, inner_stride, far_stride;
};

// Contiguous along n; data is NULL where absent.
struct Vector {
  char *data;
  Type type;
};

// One column number a row, contiguous; data is NULL where absent.
struct Columns {
  const void *data;
  bool wide;  // int64, else int32
};

struct Device {
  int32_t type;  // PYDET_CPU, PYDET_CUDA or PYDET_ROCM
  int32_t id;
};

// ---- Problems ----------------------------------------------------------------------------------------------------

// out[m, n] = round(chain_k(a[m, k], b[k, n]) + bias[m, n]). out is row-major: col_stride is 1. a and b have a unit
// stride each. bias.data is NULL where there is none; its strides may be 0. k may be 0; m, n and batch.count are not.
struct Gemm {
  Device device;
  void *stream;
  Matrix a, b, bias, out;
  Batch batch;
  int64_t m, n, k;
  Arithmetic arithmetic;  // resolved
  int64_t k_chunk;        // 0: none
  bool accumulate;
  bool skinny;  // called through pydet_skinny_gemm: a holds the few rows, b^T the weights
  bool fast;    // PYDET_FAST: bits may vary
  bool weights_constant;
  void *workspace;
  uint64_t workspace_size;

  uint64_t needs() const {
    return when(batch.dims > 0, kBatch) | when(bias.data, kBias) | when(accumulate, kAccumulate) |
           when(k_chunk != 0, kChunks) | when(a.col_stride != 1 && k > 1, kAlongM) |
           when(b.row_stride != 1 && k > 1, kAlongN);
  }
};

// out^T = b^T a^T: a product does not mind the order of its factors, so neither do the bits.
PYDET_HD Gemm transposed(const Gemm &g) {
  Gemm t = g;
  t.a = transposed(g.b), t.b = transposed(g.a);
  t.bias = transposed(g.bias), t.out = transposed(g.out);
  t.m = g.n, t.n = g.m;
  for (int i = 0; i < kMaxBatchDims; ++i) t.batch.a[i] = g.batch.b[i], t.batch.b[i] = g.batch.a[i];
  return t;
}

struct RmsNorm {
  Device device;
  void *stream;
  int64_t rows, inner, outer, n;
  int64_t heads;  // row r has the weights and biases from (r % heads) n on
  Rows x, residual, y, sum;
  Vector weight, bias, rstd;  // rstd: one per row
  float eps, weight_offset;

  uint64_t needs() const {
    return when(residual.data, kResidual) | when(weight.data, kWeight) | when(weight_offset != 0, kWeightOffset) |
           when(rstd.data, kRstd) | when(inner < rows, kTwoStrides) | when(heads > 1 || inner * outer < rows, kHeads) |
           when(bias.data, kBias) | when(residual.data && residual.type != x.type, kWideSum);
  }
};

struct RmsNormBackward {
  Device device;
  void *stream;
  int64_t rows, inner, outer, n;  // rows may be 0 (dweight and dbias are then +0, or kept)
  int64_t heads;                  // the sums of dweight and dbias are over rows r of one r % heads
  Rows dy, x, dresidual, dx;
  Vector weight, rstd, dweight, dbias;
  float weight_offset;
  bool accumulate;
  bool block_sums;  // dweight and dbias have a row of heads n columns for each block of rows, not one
  void *workspace;  // chains of dweight, heads n columns each; those of dbias are the second half
  uint64_t workspace_size;

  uint64_t needs() const {
    return when(dresidual.data, kResidual) | when(weight.data, kWeight) | when(weight_offset != 0, kWeightOffset) |
           when(inner < rows, kTwoStrides) | when(accumulate, kAccumulate) | when(dx.data, kRowGradient) |
           when(dweight.data, kWeightGradient) | when(dbias.data, kBiasGradient) |
           when(heads > 1 || inner * outer < rows, kHeads) | when(dy.type != x.type, kWideSum) |
           when(block_sums, kBlockSums);
  }
};

enum class SoftmaxKind : int32_t { softmax, log_softmax, log_prob, log_prob_backward };

struct Softmax {
  Device device;
  void *stream;
  int64_t rows, inner, n;
  SoftmaxKind kind;
  Rows x, y;                   // y: dx of log_prob_backward; absent of log_prob
  Columns index;               // of the last two kinds
  Vector log_prob, dlog_prob;  // one a row, fp32: the result of log_prob, an input of its gradient

  uint64_t needs() const {
    return when(inner < rows, kTwoStrides) | when(kind == SoftmaxKind::log_softmax, kLogarithm) |
           when(index.data, kColumn) | when(kind == SoftmaxKind::log_prob_backward, kRowGradient);
  }
};

struct SoftmaxBackward {
  Device device;
  void *stream;
  int64_t rows, inner, n;
  bool log;
  Rows dy, y, dx;

  uint64_t needs() const { return when(inner < rows, kTwoStrides) | when(log, kLogarithm); }
};

// The ranks of a fold across devices; none where `ranks` is 0.
struct Peers {
  int32_t ranks, rank;
  bool gathered, scatter;
  uint32_t timeout_ms;
  char *memory[PYDET_FOLD_RANKS];  // of each rank
  uint64_t memory_size;
};

// out[i] = round(D + bias[i % bias_period]), D the sum of the parts' element i. All contiguous, `size` elements of out.
struct Fold {
  Device device;
  void *stream;
  const float *parts[PYDET_FOLD_PARTS];
  int32_t count;
  bool tree, accumulate;
  int64_t size, bias_period;
  Vector bias, out;
  Peers peers;

  uint64_t needs() const {
    return when(bias.data, kBias) | when(accumulate, kAccumulate) | when(tree, kTree) | when(peers.ranks, kPeers);
  }
};

struct LayerNorm {
  Device device;
  void *stream;
  int64_t rows, inner, n;
  Rows x, residual, y, sum;
  Vector weight, bias, mean, rstd;  // mean and rstd: one per row
  float eps, weight_offset;

  uint64_t needs() const {
    return when(residual.data, kResidual) | when(weight.data, kWeight) | when(weight_offset != 0, kWeightOffset) |
           when(bias.data, kBias) | when(mean.data, kMean) | when(rstd.data, kRstd) | when(inner < rows, kTwoStrides);
  }
};

struct LayerNormBackward {
  Device device;
  void *stream;
  int64_t rows, inner, n;  // rows may be 0 (dweight and dbias are then +0, or kept)
  Rows dy, x, dresidual, dx;
  Vector weight, mean, rstd, dweight, dbias;
  float weight_offset;
  bool accumulate;
  void *workspace;  // for dweight or dbias: layernorm_backward_workspace, of which dbias has the second half
  uint64_t workspace_size;

  uint64_t needs() const {
    return when(dresidual.data, kResidual) | when(weight.data, kWeight) | when(weight_offset != 0, kWeightOffset) |
           when(inner < rows, kTwoStrides) | when(accumulate, kAccumulate) | when(dx.data, kRowGradient) |
           when(dweight.data, kWeightGradient) | when(dbias.data, kBiasGradient);
  }
};

}  // namespace pydet
