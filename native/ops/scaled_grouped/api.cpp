// Grouped GEMM of scaled fp8 factors.

#include "core/launch.h"
#include "ops/grouped/initial.h"
#include "ops/scaled_grouped/check.h"

namespace pydet {
namespace {

struct ScaledGroupedWork {
  ScaledGroupedGemm gemm;
  GroupedSteps steps;
  bool from_initial, none;  // none: no element of out
};

// Apart from the call itself, so that the views are off the stack when a kernel runs.
__attribute__((noinline)) pydet_status
read_scaled_grouped_gemm(const pydet_tensor *a_tensor, const pydet_tensor *a_scale_tensor, const pydet_tensor *b_tensor,
                         const pydet_tensor *b_scale_tensor, const pydet_tensor *bias_tensor,
                         const pydet_tensor *group_start, const pydet_tensor *group_end, const pydet_tensor *out_tensor,
                         const pydet_scaled_grouped_gemm_options &options, ScaledGroupedWork *work) {
  const char *op = "scaled_grouped_gemm";
  View a, a_scale, b, b_scale, bias, out, initial;
  ScaledGroupedGemm *const problem = &work->gemm;
  PYDET_TRY(read(op, "a", kScaledFactor, a_tensor, 2, &a));
  PYDET_TRY(read_optional(op, "a_scale", kScaling, a_scale_tensor, 0, &a_scale));
  PYDET_TRY(read(op, "b", kScaledFactor, b_tensor, 2, &b));
  PYDET_TRY(read_optional(op, "b_scale", kScaling, b_scale_tensor, 0, &b_scale));
  PYDET_TRY(rows_layout_of(a, b));
  PYDET_TRY(read_optional(op, "bias", kAddend, bias_tensor, 2, &bias));
  PYDET_TRY(read(op, "out", kResult, out_tensor, 2, &out));
  PYDET_TRY(
      scaled_grouped_gemm_of(a, a_scale, b, b_scale, bias, group_start, group_end, out, options.k_chunk, problem));
  PYDET_TRY(apply_scaled_options(op, a, a_scale, b_scale, out, options, problem));
  PYDET_TRY(check_workspace(op, options.workspace, options.workspace_size));
  PYDET_TRY(read_initial(op, options, out, &initial));
  work->none = out.empty() || problem->groups == 0;
  work->from_initial = initial.present() && !work->none;
  if (!initial.present()) return PYDET_OK;
  PYDET_TRY(want_scales_of_chunks(op, a_scale, b_scale, *problem, "with initial"));
  for (const View *view : {&a, &a_scale, &b, &b_scale, &bias, &out, &initial})
    PYDET_TRY(workspace_apart(*view, options.workspace, options.workspace_size));
  return work->none ? PYDET_OK : start_groups_from(op, initial, options, problem, &work->steps);
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
  ScaledGroupedWork work = {};
  work.gemm.stream = stream;
  PYDET_TRY(read_scaled_grouped_gemm(a, a_scale, b, b_scale, bias, group_start, group_end, out, options, &work));
  if (work.none) return nothing_to_write();
  return work.from_initial ? launch_between_passes(op, work.gemm, work.steps, options.kernel)
                           : launch(op, work.gemm, options.kernel);
}
