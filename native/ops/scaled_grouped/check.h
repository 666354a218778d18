// Argument checks of the scaled product of groups: Views become the problem.
#pragma once

#include "ops/grouped/check.h"
#include "ops/scaled/check.h"
#include "ops/scaled_grouped/problem.h"

namespace pydet {

// Groups along the rows of a [T, K], with b [G, K, N].
inline pydet_status rows_layout_of(const View &a, const View &b) {
  if (b.ndim == 2 && a.ndim == 2)
    return fail(PYDET_UNSUPPORTED, "%s: b is %s, want GxKxN: groups along K have no scales of their own", a.op,
                shape_text(b).text);
  if (a.ndim != 2) return fail(PYDET_INVALID_SHAPE, "%s: a is %s, want TxK", a.op, shape_text(a).text);
  if (b.ndim != 3) return fail(PYDET_INVALID_SHAPE, "%s: b is %s, want GxKxN", a.op, shape_text(b).text);
  if (b.rows() == a.cols()) return PYDET_OK;
  return fail(PYDET_INVALID_SHAPE, "%s: b is %s, want Gx%" PRId64 "xN", a.op, shape_text(b).text, a.cols());
}

// After `rows_layout_of`.
inline pydet_status scaled_grouped_gemm_of(const View &a, const View &a_scale, const View &b, const View &b_scale,
                                           const View &bias, const pydet_tensor *start, const pydet_tensor *end,
                                           const View &out, int64_t k_chunk, ScaledGroupedGemm *problem) {
  const int64_t tokens = a.rows(), k = a.cols(), n = b.cols(), groups = b.shape[0];
  const int64_t wanted[] = {tokens, n}, wanted_bias[] = {groups, n};
  for (const View *other : {&a_scale, &b, &b_scale, &bias, &out}) PYDET_TRY(same_device(a, *other));
  PYDET_TRY(want_shape(out, wanted, 2));
  if (bias.present()) PYDET_TRY(want_shape(bias, wanted_bias, 2));
  const int64_t chunks = groups_of(k, group_along_k(k_chunk));
  PYDET_TRY(scale_of_rows(a_scale, tokens, chunks, false, &problem->a_scale, &problem->along_k));
  PYDET_TRY(scale_of_rows(b_scale, n, chunks, true, &problem->b_scale, &problem->along_k));
  if (a_scale.present() && a_scale.ndim > 2)
    return fail(PYDET_INVALID_SHAPE, "%s: a_scale is %s, want no leading dimension", a.op, shape_text(a_scale).text);
  const bool of_groups = b_scale.present() && b_scale.ndim > 2;
  if (of_groups && (b_scale.ndim > 3 || (b_scale.shape[0] != groups && b_scale.shape[0] != 1)))
    return fail(PYDET_INVALID_SHAPE, "%s: b_scale is %s, want one leading dimension of %" PRId64 " at most", a.op,
                shape_text(b_scale).text, groups);
  if (!end) return fail(PYDET_NULL_POINTER, "%s: group_end is NULL, want a tensor", a.op);
  if (start) PYDET_TRY(boundary_of("group_start", start, a, out, groups, &problem->start));
  PYDET_TRY(boundary_of("group_end", end, a, out, groups, &problem->end));
  PYDET_TRY(matrix_of(a, &problem->a));
  PYDET_TRY(matrix_of(b, &problem->b));
  PYDET_TRY(matrix_of(out, &problem->out));
  PYDET_TRY(no_self_overlap(out));
  for (const View *input : {&a, &a_scale, &b, &b_scale, &bias}) PYDET_TRY(disjoint(out, *input));
  if (bias.present()) problem->bias = {bias.data, bias.type, tokens, n, 0, bias.stride[1]};
  problem->batch.count = 1;
  problem->device = a.device;
  problem->m = problem->tokens = tokens, problem->n = n, problem->k = k;
  problem->groups = groups;
  problem->b_stride = b.stride[0];
  problem->b_scale_stride = of_groups ? b_scale.stride[0] : 0;
  problem->bias_stride = bias.present() ? bias.stride[0] : 0;
  return PYDET_OK;
}

}  // namespace pydet
