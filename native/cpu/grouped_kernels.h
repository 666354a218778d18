// The CPU kernels of grouped.h's problem: those of GEMM.
#pragma once

#include "cpu/kernels.h"
#include "grouped.h"

namespace pydet {

// By a kernel of GEMM, the product of each group in turn.
template <pydet_status (*gemm)(const Gemm &)> pydet_status each_group(const GroupedGemm &problem) {
  GroupWalk group;
  for (int64_t i = 0; i < problem.groups; ++i) {
    group.next(problem);
    Gemm one = problem;
    (problem.depth ? one.k : one.m) = group.last - group.first;
    if (one.m == 0) continue;
    const BatchOffsets at = group_offsets(problem, group);
    auto move = [](Matrix &matrix, int64_t elements) {
      if (matrix.data) matrix.data += elements * size_of(matrix.type);
    };
    move(one.a, at.a), move(one.b, at.b), move(one.bias, at.bias), move(one.out, at.out);
    // A column-major out is the row-major out of the transposed product.
    if (one.out.col_stride != 1) one = transposed(one);
    const pydet_status status = gemm(one);
    if (status != PYDET_OK) return status;
  }
  return PYDET_OK;
}

}  // namespace pydet
