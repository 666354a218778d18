// Products of groups of tokens whose factors are fp8 with scales: what a checked call asks for (NUMERICS.md, "Scaled
// grouped GEMM").
#pragma once

#include "ops/grouped/problem.h"
#include "ops/scaled/problem.h"

namespace pydet {

// out[t, :] = the scaled product of a[t, :] and b[g], plus bias[g, :], for the tokens t of group g
// As a ScaledGemm it is the product of group 0, of a group that has all tokens: m is `tokens`, there is no batch.
struct ScaledGroupedGemm : ScaledGemm {
  int64_t groups, tokens;
  const int32_t *start, *end;                     // on the device; start NULL: the end before
  int64_t b_stride, b_scale_stride, bias_stride;  // from group to group, in elements
};

template <> struct Operation<ScaledGroupedGemm> : AsAsked {
  static constexpr const char *name = "scaled_grouped_gemm";
  static Type input(const ScaledGroupedGemm &g) { return g.a.type; }
  template <class Show> static void memory(const ScaledGroupedGemm &g, Show show) {
    show(g.a.data, g.a_scale.data, g.b.data, g.b_scale.data, g.bias.data, g.out.data, g.start, g.end);
  }
  using Functions = FunctionList<pydet_scaled_grouped_gemm>;
  static Items<pydet_exchange_method> python();
};

// Where a group's operands begin, in elements.
PYDET_HD void group_offsets(const ScaledGroupedGemm &g, const GroupWalk &group, int64_t (&at)[ScaledGemm::kOperands]) {
  at[g.kA] = group.first * g.a.row_stride, at[g.kB] = group.index * g.b_stride;
  at[g.kAScale] = group.first * g.a_scale.stride, at[g.kBScale] = group.index * g.b_scale_stride;
  at[g.kBias] = group.index * g.bias_stride, at[g.kOut] = group.first * g.out.row_stride;
}

constexpr uint64_t kScaledGroupedGemmFeatures = kScaledGemmFeatures & ~uint64_t(kBatch);  // all

}  // namespace pydet
