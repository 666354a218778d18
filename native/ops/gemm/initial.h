// A product whose sums begin at a tensor of their own: what that tensor must be, and the three steps that compute it.
#pragma once

#include "core/launch.h"
#include "ops/gemm/check.h"
#include "ops/gemm/rounding.h"

namespace pydet {

// options.initial, as it is beside `out` in the caller's own shape.
template <class Options>
pydet_status read_initial(const char *op, const Options &options, const View &out, View *initial) {
  PYDET_TRY(read_optional(op, "initial", kPart, options.initial, 0, initial));
  if (!initial->present()) return PYDET_OK;
  if (options.accumulate)
    return fail(PYDET_INVALID_VALUE, "%s: initial is given and options.accumulate is %d, want one of them", op,
                int(options.accumulate));
  PYDET_TRY(same_device(out, *initial));
  PYDET_TRY(want_shape(*initial, out.shape, out.ndim));
  PYDET_TRY(contiguous(*initial));
  return disjoint(out, *initial);
}

// Bytes of the sums, a multiple of 16.
inline pydet_status bytes_of_sums(const char *op, int64_t batch, int64_t m, int64_t n, uint64_t *bytes) {
  int64_t size = 0;
  if (m == 0 || n == 0 || batch == 0) return *bytes = 0, PYDET_OK;
  if (__builtin_mul_overflow(batch, m, &size) || __builtin_mul_overflow(size, n, &size) ||
      __builtin_mul_overflow(size, int64_t(sizeof(float)), &size) || uint64_t(size) > kMaxAddress - 4096)
    return fail(PYDET_OVERFLOW, "%s: the sums that begin at initial reach past 2^63 - 1 bytes", op);
  *bytes = (uint64_t(size) + 15) / 16 * 16;
  return PYDET_OK;
}

// `gemm` has been checked but for its sums, and becomes what computes them: under accumulate, in out if that is fp32, else in
// the workspace. `out` is as gemm_of took it. What is left to do before and after that goes to *steps.
inline pydet_status start_from(const GemmWords &words, const View &initial, const View &out, Gemm *gemm,
                               FromInitial *steps) {
  Matrix given = {};
  PYDET_TRY(matrix_of(out, &given));
  steps->from = {initial.data, Type::f32, out.rows(), out.cols(), out.cols(), 1};
  if (given.col_stride != 1) steps->from = transposed(steps->from);  // as gemm_of did
  steps->bias = gemm->bias, steps->out = gemm->out;
  const bool in_place = gemm->out.type == Type::f32;
  steps->ends = !in_place || gemm->bias.data;
  for (int i = 0; i < gemm->batch.dims; ++i) {
    steps->bias_strides[i] = gemm->batch.bias[i];
    steps->out_strides[i] = gemm->batch.out[i];
    gemm->batch.bias[i] = 0;
  }
  gemm->bias = {};
  gemm->accumulate = true;
  if (in_place) return PYDET_OK;
  uint64_t bytes = 0;
  PYDET_TRY(bytes_of_sums(words.op, gemm->batch.count, gemm->m, gemm->n, &bytes));
  if (gemm->workspace_size < bytes)
    return fail(PYDET_WORKSPACE_TOO_SMALL,
                "%s: workspace_size is %" PRIu64 ", want %" PRIu64 " for the sums of a %s %s", words.op,
                gemm->workspace_size, bytes, type_name(gemm->out.type), words.out);
  gemm->out = {static_cast<char *>(gemm->workspace), Type::f32, gemm->m, gemm->n, gemm->n, 1};
  dense_strides(gemm->batch, gemm->m, gemm->n, gemm->batch.out);
  gemm->workspace = gemm->out.data + bytes;
  gemm->workspace_size -= bytes;
  return PYDET_OK;
}

// The passes, each off the stack again when the product runs.
template <class Problem, class Steps>
__attribute__((noinline)) pydet_status check_reach_of_passes(const char *op, const Backend &backend,
                                                             const Problem &sums, const Steps &steps) {
  PYDET_TRY(check_reach(op, backend, steps.before(sums)));
  return check_reach(op, backend, steps.after(sums));
}
template <class Problem, class Steps>
__attribute__((noinline)) pydet_status begin_sums(const Backend &backend, const Problem &sums, const Steps &steps) {
  return backend.table<Gemm>().hooks->round_elements(steps.before(sums));
}
template <class Problem, class Steps>
__attribute__((noinline)) pydet_status end_sums(const Backend &backend, const Problem &sums, const Steps &steps) {
  return backend.table<Gemm>().hooks->round_elements(steps.after(sums));
}

// launch() of a product that computes the sums of a result that begins at a tensor of its own, and its passes.
template <class Problem, class Steps>
pydet_status launch_between_passes(const char *op, const Problem &sums, const Steps &steps, const char *forced) {
  const Backend &backend = *backend_for(sums.device.type);
  Choice choice;
  const Kernel<Problem> *row = nullptr;
  PYDET_TRY(find(op, sums, forced, &row, &choice));
  PYDET_TRY(check_reach_of_passes(op, backend, sums, steps));
  PYDET_TRY(begin_sums(backend, sums, steps));
  PYDET_TRY(row->launch(sums, choice));
  if (steps.ends) PYDET_TRY(end_sums(backend, sums, steps));
  last_kernel = row->name;
  return PYDET_OK;
}

}  // namespace pydet
