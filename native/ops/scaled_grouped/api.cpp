// Grouped GEMM of scaled fp8 factors.

#include "core/launch.h"
#include "ops/scaled_grouped/check.h"

namespace pydet {
namespace {

// Apart from the call itself, so that the views are off the stack when a kernel runs; *work is false where there is none.
__attribute__((noinline)) pydet_status
read_scaled_grouped_gemm(const pydet_tensor *a_tensor, const pydet_tensor *a_scale_tensor, const pydet_tensor *b_tensor,
                         const pydet_tensor *b_scale_tensor, const pydet_tensor *bias_tensor,
                         const pydet_tensor *group_start, const pydet_tensor *group_end, const pydet_tensor *out_tensor,
                         const pydet_scaled_grouped_gemm_options &options, ScaledGroupedGemm *problem, bool *work) {
  const char *op = "scaled_grouped_gemm";
  View a, a_scale, b, b_scale, bias, out;
  PYDET_TRY(read(op, "a", kScaledFactor, a_tensor, 2, &a));
  PYDET_TRY(read_optional(op, "a_scale", kScaling, a_scale_tensor, 0, &a_scale));
  PYDET_TRY(read(op, "b", kScaledFactor, b_tensor, 2, &b));
  PYDET_TRY(read_optional(op, "b_scale", kScaling, b_scale_tensor, 0, &b_scale));
  PYDET_TRY(rows_layout_of(a, b));
  PYDET_TRY(read_optional(op, "bias", kAddend, bias_tensor, 2, &bias));
  PYDET_TRY(read(op, "out", kResult, out_tensor, 2, &out));
  PYDET_TRY(scaled_grouped_gemm_of(a, a_scale, b, b_scale, bias, group_start, group_end, out, options.k_chunk, problem));
  PYDET_TRY(apply_scaled_options(op, a, a_scale, b_scale, out, options, problem));
  *work = !out.empty() && problem->groups != 0;
  return PYDET_OK;
}

}  // namespace
}  // namespace pydet

using namespace pydet;

pydet_status pydet_scaled_grouped_gemm(void *stream, const pydet_tensor *a, const pydet_tensor *a_scale,
                                       const pydet_tensor *b, const pydet_tensor *b_scale, const pydet_tensor *bias,
                                       const pydet_tensor *group_start, const pydet_tensor *group_end,
                                       const pydet_tensor *out, const pydet_scaled_grouped_gemm_options *given) {
  const char *op = "scaled_grouped_gemm";
  pydet_scaled_grouped_gemm_options options = {};
  options.k_chunk = kScaleGroup;
  PYDET_TRY(read_options(op, given, &options));
  ScaledGroupedGemm problem = {};
  bool work = false;
  problem.stream = stream;
  PYDET_TRY(
      read_scaled_grouped_gemm(a, a_scale, b, b_scale, bias, group_start, group_end, out, options, &problem, &work));
  return work ? launch(op, problem, options.kernel) : nothing_to_write();
}
