// Products of groups of tokens whose factors are fp8 with scales: what a checked call asks for (NUMERICS.md, "Scaled
// grouped GEMM").
#pragma once

#include "grouped.h"
#include "scaled.h"

namespace pydet {

// out[t, :] = the scaled product of a[t, :] and b[g], plus bias[g, :], for the tokens t of group g
// As a ScaledGemm it is the product of group 0, of a group that has all tokens: m is `tokens`, there is no batch.
struct ScaledGroupedGemm : ScaledGemm {
  int64_t groups, tokens;
  const int32_t *start, *end;                     // on the device; start NULL: the end before
  int64_t b_stride, b_scale_stride, bias_stride;  // from group to group, in elements
};

constexpr uint64_t kScaledGroupedGemmFeatures =
    kBias | kAccumulate | kChunks | kBrokenChunks | kAlongM | kAlongN | kOutAlongM | kColumnScales;  // all

}  // namespace pydet
