// Grouped GEMM.

#include "core/launch.h"
#include "ops/grouped/check.h"

namespace pydet {
namespace {

// Apart from the call itself, so that the views are off the stack when a kernel runs; *work is false where there is none.
__attribute__((noinline)) pydet_status read_grouped_gemm(const pydet_tensor *a_tensor, const pydet_tensor *b_tensor,
                                                         const pydet_tensor *bias_tensor,
                                                         const pydet_tensor *group_start, const pydet_tensor *group_end,
                                                         const pydet_tensor *out_tensor,
                                                         const pydet_grouped_gemm_options &options,
                                                         GroupedGemm *problem, bool *work) {
  constexpr GemmWords kWords = {"grouped_gemm", "a", "b", "out", "M", "N", "K", false, false};
  const char *op = kWords.op;
  View a, b, bias, out;
  PYDET_TRY(read(op, "a", kFactor, a_tensor, 2, &a));
  PYDET_TRY(read(op, "b", kFactor, b_tensor, 2, &b));
  PYDET_TRY(layout_of(a, b, &problem->depth));
  PYDET_TRY(read_optional(op, "bias", kAddend, bias_tensor, 2, &bias));
  PYDET_TRY(read(op, "out", kResult, out_tensor, 2, &out));
  PYDET_TRY(grouped_gemm_of(a, b, bias, group_start, group_end, out, problem));
  PYDET_TRY(apply_gemm_options(kWords, options, out, problem));
  *work = !out.empty() && problem->groups != 0;
  return PYDET_OK;
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
  GroupedGemm problem = {};
  bool work = false;
  problem.stream = stream;
  PYDET_TRY(read_grouped_gemm(a, b, bias, group_start, group_end, out, options, &problem, &work));
  return work ? launch(op, problem, options.kernel) : nothing_to_write();
}
