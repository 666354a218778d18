// The CPU kernels of products of groups, scaled or not: those of GEMM and of scaled GEMM.
#pragma once

#include "cpu/scaled_kernels.h"
#include "ops/scaled_grouped/problem.h"

namespace pydet {

inline void move(Matrix &matrix, int64_t elements) {
  if (matrix.data) matrix.data += elements * size_of(matrix.type);
}
inline void move(Scale &scale, int64_t elements) {
  if (scale.data) scale.data += elements * size_of(scale.type);
}

// By a kernel of GEMM, the product of each group in turn.
template <pydet_status (*gemm)(const Gemm &)> pydet_status each_group(const GroupedGemm &problem) {
  GroupWalk group;
  for (int64_t i = 0; i < problem.groups; ++i) {
    group.next(problem);
    Gemm one = problem;
    (problem.depth ? one.k : one.m) = group.last - group.first;
    if (one.m == 0) continue;
    const BatchOffsets at = group_offsets(problem, group);
    move(one.a, at.a), move(one.b, at.b), move(one.bias, at.bias), move(one.out, at.out);
    // A column-major out is the row-major out of the transposed product.
    if (one.out.col_stride != 1) one = transposed(one);
    const pydet_status status = gemm(one);
    if (status != PYDET_OK) return status;
  }
  return PYDET_OK;
}

// By a kernel of scaled GEMM, likewise.
template <pydet_status (*gemm)(const ScaledGemm &)> pydet_status each_scaled_group(const ScaledGroupedGemm &problem) {
  GroupWalk group;
  for (int64_t i = 0; i < problem.groups; ++i) {
    group.next(problem);
    ScaledGemm one = problem;
    one.m = group.last - group.first;
    if (one.m == 0) continue;
    int64_t at[ScaledGemm::kOperands];
    group_offsets(problem, group, at);
    move(one.a, at[one.kA]), move(one.b, at[one.kB]), move(one.bias, at[one.kBias]), move(one.out, at[one.kOut]);
    move(one.a_scale, at[one.kAScale]), move(one.b_scale, at[one.kBScale]);
    const pydet_status status = gemm(one);
    if (status != PYDET_OK) return status;
  }
  return PYDET_OK;
}

}  // namespace pydet
