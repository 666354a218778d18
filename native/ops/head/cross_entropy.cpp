// The cross-entropy of targets under a linear layer, and its gradients: what the head says of rows, and a pass over these
// numbers (loss.h), which lie in the workspace before the logits of some rows.
//
//   forward    the head;  the loss
//   backward   where lse must be known, or the mean for the loss, the head;  the gradients by what it said;
//              the head's gradients, and what else the loss is made of beside them;  the loss, if it is asked for

#include "contract/to_fp32.h"
#include "core/launch.h"
#include "ops/head/check.h"
#include "ops/head/chunks.h"
#include "ops/head/loss.h"
#include "ops/head/run.h"

namespace pydet {
namespace {

constexpr int64_t kIgnored = -100;  // where no ignore_index is given

using LossOptions = pydet_linear_cross_entropy_options;

pydet_linear_log_prob_options head_options(const LossOptions &o) {
  pydet_linear_log_prob_options options = {};
  options.struct_size = sizeof options;
  options.arithmetic = o.arithmetic, options.k_chunk = o.k_chunk, options.logits = o.logits;
  options.accumulate = o.accumulate;
  options.workspace = o.workspace, options.workspace_size = o.workspace_size;
  options.softcap = o.softcap, options.temperature = o.temperature;
  options.kernel = o.kernel;
  return options;
}

// Looked at by their bits, which of positive numbers are in order: a thread may be set to read subnormals as zeros.
uint64_t bits_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
bool is_zero(double x) { return bits_of(x) << 1 == 0; }
pydet_status check_part(const char *op, const char *name, double value, double most, const char *want) {
  if (bits_of(value) <= bits_of(most) || is_zero(value)) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: %s is %g, want %s", op, name, value, want);
}

// The rule, the reduction and what is ignored.
pydet_status read_rule(const char *op, const LossOptions &options, HeadLoss *loss) {
  constexpr double kMost = 0x1.fffffep127;  // of fp32
  PYDET_TRY(check_part(op, "label_smoothing", options.label_smoothing, 1, "a number from 0 to 1"));
  PYDET_TRY(check_part(op, "z_loss", options.z_loss, kMost, "a number from 0 up that float32 holds"));
  if (options.reduction < 0 || options.reduction >= kReductions)
    return fail(PYDET_INVALID_VALUE, "%s: options.reduction is %d, want 0 (mean), 1 (sum) or 2 (none)", op,
                int(options.reduction));
  PYDET_TRY(check_flag(op, "has_ignore_index", options.has_ignore_index));
  if (!options.has_ignore_index && options.ignore_index != 0 && options.ignore_index != kIgnored)
    return fail(PYDET_INVALID_VALUE, "%s: options.ignore_index is %" PRId64 " and has_ignore_index 0, want 1", op,
                options.ignore_index);
  loss->rule = {!is_zero(options.label_smoothing), !is_zero(options.z_loss), f32_from_f64(options.label_smoothing),
                f32_from_f64(1.0 - options.label_smoothing), f32_from_f64(options.z_loss)};
  loss->reduction = Reduction(options.reduction);
  loss->ignore_index = options.has_ignore_index ? options.ignore_index : kIgnored;
  return PYDET_OK;
}

// What a call has to know, and to keep a number a row of.
struct Needs {
  bool loss, gradients;  // are made
  bool lse, mean;        // are to be known
  bool has_lse;          // the caller has memory for it, where it is: known in backward, to be written in forward
  bool index;            // of the gradients is another than the target

  // Whether there is something to know before there are gradients.
  bool asks_first() const { return mean || (lse && !has_lse); }
};

Needs needs_of(const HeadLoss &loss, int64_t columns, bool makes_loss, bool makes_gradients, bool has_lse) {
  Needs needs = {};
  needs.loss = makes_loss, needs.gradients = makes_gradients, needs.has_lse = has_lse;
  needs.mean = makes_loss && loss.rule.smooths;
  needs.lse = loss.rule.adds_z || needs.mean;
  needs.index = makes_gradients && loss.ignore_index >= 0 && loss.ignore_index < columns;
  return needs;
}

// Sets what is kept of rows to places one behind the other from `begin` on, which may be NULL. -> the bytes that they take;
// kTooMuch where these pass 2^63.
uint64_t place(const Needs &needs, HeadLoss *loss, char *begin) {
  constexpr int64_t kMostRows = int64_t(1) << 56;
  if (loss->rows > kMostRows) return kTooMuch;
  uint64_t taken = 0;
  const auto room = [&](uint64_t size) {
    char *const at = reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(begin) + taken);
    taken += divide_up(uint64_t(loss->rows) * size, uint64_t(16)) * 16;
    return at;
  };
  const auto keep = [&](bool needed, Vector *vector) {
    if (needed) *vector = {room(4), Type::f32};
  };
  if (needs.loss && loss->reduction == Reduction::none) loss->log_prob = loss->loss;
  else keep(needs.loss, &loss->log_prob);
  keep(needs.lse && !needs.has_lse, &loss->lse);
  keep(needs.mean, &loss->mean);
  keep(needs.gradients, &loss->dlog_prob);
  keep(needs.gradients && (loss->rule.smooths || loss->rule.adds_z), &loss->dlse);
  keep(needs.gradients && loss->rule.smooths, &loss->dmean);
  if (needs.index) loss->index = room(loss->target.wide ? 8 : 4);
  return taken;
}

// ---- A call --------------------------------------------------------------------------------------------------------

struct Call {
  LinearLogProb head;  // the next of the head's steps
  HeadLoss loss;
  Needs needs;
  bool writes_lse, accumulate;
  char *dx, *dw, *dbias;
};

// One number, or where there is no reduction one a row.
pydet_status read_loss(const View &x, const char *name, const pydet_tensor *tensor, Reduction reduction, View *view,
                       Vector *data) {
  if (reduction == Reduction::none) return read_of_rows(x, name, tensor, view, data);
  PYDET_TRY(read(x.op, name, kNormVector, tensor, 0, view));
  PYDET_TRY(same_device(x, *view));
  PYDET_TRY(want_shape(*view, nullptr, 0));
  *data = vector_of(*view);
  if (view->type == Type::f32) return PYDET_OK;
  return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want float32", x.op, name, type_name(view->type));
}

// Has the workspace hold what is kept of rows, and the head take the rest.
pydet_status share_workspace(const char *op, Call *call) {
  LinearLogProb &head = call->head;
  HeadLoss &loss = call->loss;
  loss.device = head.device, loss.stream = head.stream, loss.rows = head.rows, loss.target = head.index;
  head.taken = place(call->needs, &loss, static_cast<char *>(head.workspace));
  if (head.taken == kTooMuch)
    return fail(PYDET_OVERFLOW, "%s: the numbers of %" PRId64 " rows reach past 2^63 - 1 bytes", op, head.rows);
  if (head.taken > head.workspace_size) return want_more_workspace(op, head, head.workspace_size);
  head.workspace = static_cast<char *>(head.workspace) + head.taken;
  head.workspace_size -= head.taken;
  return PYDET_OK;
}

// Never parts of their callers, whose stack is what a kernel has beside its own.
__attribute__((noinline)) pydet_status read_forward(const char *op, void *stream, const HeadTensors &tensors,
                                                    const pydet_tensor *loss_tensor, const LossOptions &given,
                                                    Call *call) {
  const pydet_linear_log_prob_options options = head_options(given);
  HeadViews views = {};
  AskedViews asked = {};
  View loss, lse = {};
  PYDET_TRY(read_rule(op, given, &call->loss));
  PYDET_TRY(read_head(op, stream, tensors, options, &views, &call->head));
  PYDET_TRY(read_loss(views.given, "loss", loss_tensor, call->loss.reduction, &loss, &call->loss.loss));
  if (given.lse) PYDET_TRY(read_of_rows(views.given, "lse", given.lse, &lse, &call->loss.lse));
  PYDET_TRY(read_asked(views.given, options, &asked, &call->head.asked));
  const View *inputs[] = {&views.given, &views.w, &views.bias, &views.index}, *outputs[] = {&loss, &lse};
  PYDET_TRY(outputs_apart(inputs, outputs));
  PYDET_TRY(workspace_apart(inputs, options.workspace, options.workspace_size));
  PYDET_TRY(workspace_apart(outputs, options.workspace, options.workspace_size));
  call->needs = needs_of(call->loss, call->head.n, true, false, given.lse);
  call->writes_lse = given.lse;
  return share_workspace(op, call);
}

__attribute__((noinline)) pydet_status read_backward(const char *op, void *stream, const HeadTensors &tensors,
                                                     const pydet_tensor *dloss_tensor, const pydet_tensor *loss_tensor,
                                                     const GradientTensors &gradients, const LossOptions &given,
                                                     Call *call) {
  const pydet_linear_log_prob_options options = head_options(given);
  HeadViews views = {};
  AskedViews asked = {};
  GradientViews made = {};
  View dloss = {}, loss = {}, lse = {};
  HeadLoss &rows = call->loss;
  PYDET_TRY(read_rule(op, given, &rows));
  PYDET_TRY(check_flag(op, "accumulate", options.accumulate));
  PYDET_TRY(read_head(op, stream, tensors, options, &views, &call->head));
  if (dloss_tensor) PYDET_TRY(read_loss(views.given, "dloss", dloss_tensor, rows.reduction, &dloss, &rows.dloss));
  if (loss_tensor) PYDET_TRY(read_loss(views.given, "loss", loss_tensor, rows.reduction, &loss, &rows.loss));
  PYDET_TRY(read_gradients(views, gradients, options.accumulate != 0, &made));
  if (given.lse) PYDET_TRY(read_of_rows(views.given, "lse", given.lse, &lse, &rows.lse));
  PYDET_TRY(read_asked(views.given, options, &asked, &call->head.asked));
  const View *inputs[] = {&views.given, &views.w, &views.bias, &views.index, &dloss, &lse},
             *outputs[] = {&loss, &made.dx, &made.dw, &made.dbias};
  PYDET_TRY(outputs_apart(inputs, outputs));
  PYDET_TRY(workspace_apart(inputs, options.workspace, options.workspace_size));
  PYDET_TRY(workspace_apart(outputs, options.workspace, options.workspace_size));
  PYDET_TRY(set_gradients(made, options.accumulate != 0, &call->head));
  call->accumulate = call->head.accumulate;
  call->dx = call->head.dx.data, call->dw = call->head.dw.data, call->dbias = call->head.dbias.data;
  const bool any = made.dx.present() || made.dw.present() || made.dbias.present();
  call->needs = needs_of(rows, call->head.n, loss_tensor, any, given.lse);
  return loss_tensor || any ? share_workspace(op, call) : PYDET_OK;
}

// ---- Its steps -----------------------------------------------------------------------------------------------------

// Has the call's head say all that is to be known, and an lse that the caller asks for. In its place: another problem would
// be on the stack beside a kernel.
void ask(Call *call) {
  LinearLogProb &head = call->head;
  const Needs &needs = call->needs;
  head.backward = head.accumulate = false;
  head.dx.data = head.dw.data = head.dbias.data = nullptr;
  head.index.data = call->loss.target.data;
  head.dlog_prob = {};
  head.log_prob = needs.loss ? call->loss.log_prob : Vector{};
  head.asked.lse = call->writes_lse || (needs.lse && !needs.has_lse) ? call->loss.lse : Vector{};
  head.asked.mean = needs.mean ? call->loss.mean : Vector{};
}

// Has it make its gradients by those of the loss; log_prob beside them, where it was not said before.
void differentiate(Call *call) {
  LinearLogProb &head = call->head;
  head.backward = true, head.accumulate = call->accumulate;
  head.dx.data = call->dx, head.dw.data = call->dw, head.dbias.data = call->dbias;
  if (call->needs.index) head.index.data = call->loss.index;
  head.dlog_prob = call->loss.dlog_prob;
  head.log_prob = call->needs.loss && !call->needs.asks_first() ? call->loss.log_prob : Vector{};
  head.asked.lse = call->loss.dlse, head.asked.mean = call->loss.dmean;
}

// The pass over numbers of rows: of the gradients, the loss, or both.
__attribute__((noinline)) pydet_status run_pass(const Call &call, bool makes_loss, bool makes_gradients) {
  HeadLoss loss = call.loss;
  if (!makes_loss) loss.loss = {};
  if (!makes_gradients) loss.dlog_prob = {};
  return backend_for(loss.device.type)->table<HeadRows>().hooks->loss(loss);
}

__attribute__((noinline)) pydet_status check_pass(const char *op, const Call &call) {
  const Backend &backend = *backend_for(call.head.device.type);
  if (backend.table<HeadRows>().hooks) return check_reach(op, backend, call.loss);
  return fail(PYDET_UNSUPPORTED, "%s: no kernel on %s makes the loss of rows; those of the CPU do", op,
              device_text(call.head.device.type, call.head.device.id).text);
}

pydet_status run_forward(const char *op, Call *call) {
  PYDET_TRY(check_pass(op, *call));
  ask(call);
  PYDET_TRY(check_head(op, call->head));
  PYDET_TRY(run_head(op, call->head));
  return run_pass(*call, true, false);
}

pydet_status run_backward(const char *op, Call *call) {
  const bool first = call->needs.asks_first(), makes_loss = call->needs.loss;
  if (!call->needs.gradients) return makes_loss ? run_forward(op, call) : nothing_to_write();
  PYDET_TRY(check_pass(op, *call));
  differentiate(call);
  PYDET_TRY(check_head(op, call->head));  // first: it wants the larger workspace, of which a refusal tells
  if (first) {
    ask(call);
    PYDET_TRY(check_head(op, call->head));
    PYDET_TRY(run_head(op, call->head));
    differentiate(call);
  }
  PYDET_TRY(run_pass(*call, makes_loss && first, true));
  PYDET_TRY(run_head(op, call->head));
  return makes_loss && !first ? run_pass(*call, true, false) : PYDET_OK;
}

}  // namespace
}  // namespace pydet

using namespace pydet;

pydet_status pydet_linear_cross_entropy(void *stream, const pydet_tensor *x, const pydet_tensor *w,
                                        const pydet_tensor *bias, const pydet_tensor *target, const pydet_tensor *loss,
                                        const pydet_linear_cross_entropy_options *given) {
  const char *op = "linear_cross_entropy";
  pydet_linear_cross_entropy_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  if (options.accumulate)
    return fail(PYDET_INVALID_VALUE, "%s: options.accumulate is %d, want 0: it is of the gradients", op,
                int(options.accumulate));
  Call call = {};
  PYDET_TRY(read_forward(op, stream, {x, w, bias, target, "target"}, loss, options, &call));
  return run_forward(op, &call);
}

pydet_status pydet_linear_cross_entropy_backward(void *stream, const pydet_tensor *dloss, const pydet_tensor *x,
                                                 const pydet_tensor *w, const pydet_tensor *bias,
                                                 const pydet_tensor *target, const pydet_tensor *loss,
                                                 const pydet_tensor *dx, const pydet_tensor *dw,
                                                 const pydet_tensor *dbias,
                                                 const pydet_linear_cross_entropy_options *given) {
  const char *op = "linear_cross_entropy_backward";
  pydet_linear_cross_entropy_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  Call call = {};
  PYDET_TRY(read_backward(op, stream, {x, w, bias, target, "target"}, dloss, loss, {dx, dw, dbias}, options, &call));
  return run_backward(op, &call);
}

pydet_status pydet_linear_cross_entropy_workspace(int64_t rows, int64_t n, int64_t k, pydet_dtype type,
                                                  int32_t backward, uint64_t most,
                                                  const pydet_linear_cross_entropy_options *given, uint64_t *bytes) {
  const char *op = "linear_cross_entropy_workspace";
  pydet_linear_cross_entropy_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  HeadLoss loss = {};
  PYDET_TRY(read_rule(op, options, &loss));
  PYDET_TRY(check_extents(op, 1, rows, n, k, bytes));
  loss.rows = rows, loss.target.wide = true;
  const uint64_t own = place(needs_of(loss, n, true, backward != 0, options.lse), &loss, nullptr);
  const uint64_t room = most ? most : kHeadWorkspace;
  if (own == kTooMuch)
    return fail(PYDET_OVERFLOW, "%s: the numbers of %" PRId64 " rows reach past 2^63 - 1 bytes", op, rows);
  PYDET_TRY(head_workspace(op, rows, n, k, type, backward, room > own ? room - own : 1, head_options(options), bytes));
  if (rows > 0 && n > 0) *bytes += own;
  return PYDET_OK;
}
