// Grouped GEMM.

#include "core/launch.h"
#include "ops/grouped/check.h"
#include "ops/grouped/initial.h"

namespace pydet {
namespace {

struct GroupedWork {
  GroupedGemm gemm;
  GroupedSteps steps;
  bool from_initial, none;  // none: no element of out
};

// Apart from the call itself, so that the views are off the stack when a kernel runs.
__attribute__((noinline)) pydet_status read_grouped_gemm(const pydet_tensor *a_tensor, const pydet_tensor *b_tensor,
                                                         const pydet_tensor *bias_tensor,
                                                         const pydet_tensor *group_start, const pydet_tensor *group_end,
                                                         const pydet_tensor *out_tensor,
                                                         const pydet_grouped_gemm_options &options, GroupedWork *work) {
  constexpr GemmWords kWords = {"grouped_gemm", "a", "b", "out", "M", "N", "K", false, false};
  const char *op = kWords.op;
  View a, b, bias, out, initial;
  GroupedGemm *const problem = &work->gemm;
  PYDET_TRY(read(op, "a", kFactor, a_tensor, 2, &a));
  PYDET_TRY(read(op, "b", kFactor, b_tensor, 2, &b));
  PYDET_TRY(layout_of(a, b, &problem->depth));
  PYDET_TRY(read_optional(op, "bias", kAddend, bias_tensor, 2, &bias));
  PYDET_TRY(read(op, "out", kResult, out_tensor, 2, &out));
  PYDET_TRY(grouped_gemm_of(a, b, bias, group_start, group_end, out, problem));
  PYDET_TRY(apply_gemm_options(kWords, options, out, problem));
  PYDET_TRY(check_workspace(op, options.workspace, options.workspace_size));
  PYDET_TRY(read_initial(op, options, out, &initial));
  work->none = out.empty() || problem->groups == 0;
  work->from_initial = initial.present() && !work->none;
  if (!work->from_initial) return PYDET_OK;
  for (const View *view : {&a, &b, &bias, &out, &initial})
    PYDET_TRY(workspace_apart(*view, options.workspace, options.workspace_size));
  return start_groups_from(op, initial, options, problem, &work->steps);
}

}  // namespace
}  // namespace pydet

using namespace pydet;

pydet_status pydet_grouped_gemm(void *stream, const pydet_tensor *a, const pydet_tensor *b, const pydet_tensor *bias,
                                const pydet_tensor *group_start, const pydet_tensor *group_end, const pydet_tensor *out,
                                const pydet_grouped_gemm_options *given) {
  const char *op = "grouped_gemm";
  pydet_grouped_gemm_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  GroupedWork work = {};
  work.gemm.stream = stream;
  PYDET_TRY(read_grouped_gemm(a, b, bias, group_start, group_end, out, options, &work));
  if (work.none) return nothing_to_write();
  return work.from_initial ? launch_between_passes(op, work.gemm, work.steps, options.kernel)
                           : launch(op, work.gemm, options.kernel);
}
