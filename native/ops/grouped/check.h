// Grouped GEMM: Views become the problem.
#pragma once

#include "ops/gemm/check.h"
#include "ops/grouped/problem.h"

namespace pydet {

// int32 [groups] on the device of a, contiguous and apart from out. `boundary` stays NULL where there are no groups.
inline pydet_status boundary_of(const char *name, const pydet_tensor *tensor, const View &a, const View &out,
                                int64_t groups, const int32_t **boundary) {
  if (tensor->dtype.code != PYDET_INT || tensor->dtype.bits != 32 || tensor->dtype.lanes != 1)
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want int32", a.op, name, dtype_text(tensor->dtype).text);
  pydet_tensor as_words = *tensor;
  as_words.dtype = {PYDET_FLOAT, 32, 1};  // words of 4 bytes, which nothing here looks into
  View view;
  PYDET_TRY(read(a.op, name, kNormVector, &as_words, 1, &view));
  PYDET_TRY(same_device(a, view));
  PYDET_TRY(want_shape(view, &groups, 1));
  PYDET_TRY(contiguous(view));
  PYDET_TRY(disjoint(out, view));
  *boundary = reinterpret_cast<const int32_t *>(view.data);
  return PYDET_OK;
}

// What a and b alone say: whether the groups lie along the rows of a [T, K], with b [G, K, N], or along the depth of
// a [M, T] and b [T, N].
inline pydet_status layout_of(const View &a, const View &b, bool *depth) {
  if (a.ndim != 2) return fail(PYDET_INVALID_SHAPE, "%s: a is %s, want TxK or MxT", a.op, shape_text(a).text);
  if (b.ndim != 2 && b.ndim != 3)
    return fail(PYDET_INVALID_SHAPE, "%s: b is %s, want GxKxN, or TxN for groups along K", a.op, shape_text(b).text);
  *depth = b.ndim == 2;
  if (b.rows() == a.cols()) return PYDET_OK;
  return fail(PYDET_INVALID_SHAPE, "%s: b is %s, want %s%" PRId64 "xN", a.op, shape_text(b).text, *depth ? "" : "Gx",
              a.cols());
}

// After `layout_of`.
inline pydet_status grouped_gemm_of(const View &a, const View &b, const View &bias, const pydet_tensor *start,
                                    const pydet_tensor *end, const View &out, GroupedGemm *problem) {
  const bool depth = problem->depth;
  const int64_t m = a.rows(), k = a.cols(), n = b.cols();
  for (const View *other : {&b, &bias, &out}) PYDET_TRY(same_device(a, *other));
  PYDET_TRY(same_type(a, b));
  if (depth && (out.ndim != 3 || out.rows() != m || out.cols() != n))
    return fail(PYDET_INVALID_SHAPE, "%s: out is %s, want Gx%" PRId64 "x%" PRId64, a.op, shape_text(out).text, m, n);
  const int64_t groups = depth ? out.shape[0] : b.shape[0], wanted[] = {m, n}, wanted_bias[] = {groups, n};
  if (!depth) PYDET_TRY(want_shape(out, wanted, 2));
  if (bias.present()) PYDET_TRY(want_shape(bias, wanted_bias, 2));
  if (!end) return fail(PYDET_NULL_POINTER, "%s: group_end is NULL, want a tensor", a.op);
  if (start) PYDET_TRY(boundary_of("group_start", start, a, out, groups, &problem->start));
  PYDET_TRY(boundary_of("group_end", end, a, out, groups, &problem->end));
  PYDET_TRY(matrix_of(a, &problem->a));
  PYDET_TRY(matrix_of(b, &problem->b));
  PYDET_TRY(matrix_of(out, &problem->out));
  PYDET_TRY(no_self_overlap(out));
  for (const View *input : {&a, &b, &bias}) PYDET_TRY(disjoint(out, *input));
  if (bias.present()) problem->bias = {bias.data, bias.type, m, n, 0, bias.stride[1]};
  problem->batch.count = 1;
  problem->device = a.device;
  problem->m = m;
  problem->n = n;
  problem->k = k;
  problem->groups = groups;
  problem->tokens = depth ? k : m;
  problem->b_stride = depth ? 0 : b.stride[0];
  problem->bias_stride = bias.present() ? bias.stride[0] : 0;
  problem->out_stride = depth ? out.stride[0] : 0;
  return PYDET_OK;
}

}  // namespace pydet
