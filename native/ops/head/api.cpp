// The log-probability of a column under a linear layer, and its gradients.

#include "core/launch.h"
#include "ops/head/check.h"
#include "ops/head/run.h"

namespace pydet {
namespace {

// Never parts of their callers, whose stack is what a kernel has beside its own.
__attribute__((noinline)) pydet_status read_forward(const char *op, void *stream, const HeadTensors &tensors,
                                                    const pydet_tensor *log_prob_tensor,
                                                    const pydet_linear_log_prob_options &options, LinearLogProb *p) {
  HeadViews views = {};
  AskedViews asked = {};
  View log_prob;
  PYDET_TRY(read_head(op, stream, tensors, options, &views, p));
  PYDET_TRY(read_of_rows(views.given, "log_prob", log_prob_tensor, &log_prob, &p->log_prob));
  PYDET_TRY(read_asked(views.given, options, &asked, &p->asked));
  const View *inputs[] = {&views.given, &views.w, &views.bias, &views.index},
             *outputs[] = {&log_prob, &asked.entropy, &asked.lse, &asked.mean, &asked.greedy};
  PYDET_TRY(outputs_apart(inputs, outputs));
  PYDET_TRY(workspace_apart(inputs, options.workspace, options.workspace_size));
  return workspace_apart(outputs, options.workspace, options.workspace_size);
}

__attribute__((noinline)) pydet_status read_backward(const char *op, void *stream, const HeadTensors &tensors,
                                                     const pydet_tensor *dlog_prob_tensor,
                                                     const pydet_tensor *log_prob_tensor,
                                                     const GradientTensors &gradients,
                                                     const pydet_linear_log_prob_options &options, LinearLogProb *p) {
  HeadViews views = {};
  AskedViews asked = {};
  GradientViews made = {};
  View dlog_prob, log_prob = {};
  PYDET_TRY(check_flag(op, "accumulate", options.accumulate));
  if (options.greedy) return fail(PYDET_INVALID_VALUE, "%s: greedy is given, want NULL: it has no gradient", op);
  PYDET_TRY(read_head(op, stream, tensors, options, &views, p));
  PYDET_TRY(read_of_rows(views.given, "dlog_prob", dlog_prob_tensor, &dlog_prob, &p->dlog_prob));
  if (log_prob_tensor) PYDET_TRY(read_of_rows(views.given, "log_prob", log_prob_tensor, &log_prob, &p->log_prob));
  PYDET_TRY(read_gradients(views, gradients, options.accumulate != 0, &made));
  PYDET_TRY(read_asked(views.given, options, &asked, &p->asked));
  const View *inputs[] = {&views.given, &views.w,       &views.bias, &views.index,
                          &dlog_prob,   &asked.entropy, &asked.lse,  &asked.mean},
             *outputs[] = {&log_prob, &made.dx, &made.dw, &made.dbias};
  PYDET_TRY(outputs_apart(inputs, outputs));
  PYDET_TRY(workspace_apart(inputs, options.workspace, options.workspace_size));
  PYDET_TRY(workspace_apart(outputs, options.workspace, options.workspace_size));
  return set_gradients(made, options.accumulate != 0, p);
}

}  // namespace
}  // namespace pydet

using namespace pydet;

pydet_status pydet_linear_log_prob(void *stream, const pydet_tensor *x, const pydet_tensor *w, const pydet_tensor *bias,
                                   const pydet_tensor *index, const pydet_tensor *log_prob,
                                   const pydet_linear_log_prob_options *given) {
  const char *op = "linear_log_prob";
  pydet_linear_log_prob_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  if (options.accumulate)
    return fail(PYDET_INVALID_VALUE, "%s: options.accumulate is %d, want 0: it is of the gradients", op,
                int(options.accumulate));
  LinearLogProb p = {};
  PYDET_TRY(read_forward(op, stream, {x, w, bias, index, "index"}, log_prob, options, &p));
  return run_head(op, p);
}

pydet_status pydet_linear_log_prob_backward(void *stream, const pydet_tensor *dlog_prob, const pydet_tensor *x,
                                            const pydet_tensor *w, const pydet_tensor *bias, const pydet_tensor *index,
                                            const pydet_tensor *log_prob, const pydet_tensor *dx,
                                            const pydet_tensor *dw, const pydet_tensor *dbias,
                                            const pydet_linear_log_prob_options *given) {
  const char *op = "linear_log_prob_backward";
  pydet_linear_log_prob_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  LinearLogProb p = {};
  PYDET_TRY(read_backward(op, stream, {x, w, bias, index, "index"}, dlog_prob, log_prob, {dx, dw, dbias}, options, &p));
  return run_head(op, p);
}

pydet_status pydet_linear_log_prob_workspace(int64_t rows, int64_t n, int64_t k, pydet_dtype type, int32_t backward,
                                             uint64_t most, const pydet_linear_log_prob_options *given,
                                             uint64_t *bytes) {
  const char *op = "linear_log_prob_workspace";
  pydet_linear_log_prob_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  return head_workspace(op, rows, n, k, type, backward, most, options, bytes);
}
