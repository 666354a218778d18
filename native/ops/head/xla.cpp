// What XLA asks of the log-probability of a column under a linear layer, and of its gradients.

#include "core/operations.h"
#include "entry/xla_rows.h"

namespace pydet {
namespace {

pydet_linear_log_prob_options head_options(Call &call) {
  pydet_linear_log_prob_options options = {};
  options.struct_size = sizeof options;
  options.arithmetic = call.number("arithmetic");
  options.k_chunk = call.integer("k_chunk");
  if (call.flag("wide_logits")) options.logits = {PYDET_FLOAT, 32, 1};
  options.softcap = call.real_or_none("softcap");
  options.temperature = call.real_or_none("temperature");
  return options;
}

// What else is asked of rows: buffers from the i-th on, those that has_entropy, has_lse and has_mean say.
struct Asked {
  pydet_tensor tensors[3];
  Shape shapes[3];

  template <class Buffer>
  int64_t read(Call &call, const pydet_xla_buffer &rows, int64_t i, const Buffer &buffer,
               pydet_linear_log_prob_options *options) {
    const struct {
      const char *name, *flag;
      const pydet_tensor **option;
    } all[] = {{"entropy", "has_entropy", &options->entropy},
               {"lse", "has_lse", &options->lse},
               {"mean", "has_mean", &options->mean}};
    for (int n = 0; n < 3; ++n) {
      if (!call.flag(all[n].flag)) continue;
      tensors[n] = as_values(call, all[n].name, buffer(i++), rows, &shapes[n]);
      *all[n].option = &tensors[n];
    }
    return i;
  }
};

pydet_tensor of_columns(Call &call, const char *name, const pydet_xla_buffer &buffer, const pydet_xla_buffer &w,
                        Shape *shape) {
  call.expect_shape(name, buffer, w.dims, 1);
  *shape = {{elements(buffer)}, {1}};
  return call.tensor(buffer, shape, 1);
}

pydet_tensor as_weight(Call &call, const char *name, const pydet_xla_buffer &buffer, Shape *shape) {
  if (buffer.rank != 2) {
    call.fail("%s is %s, want a matrix", name, ShapeWords(buffer.dims, buffer.rank).text);
    return {};
  }
  *shape = {{buffer.dims[0], buffer.dims[1]}, {buffer.dims[1], 1}};
  return call.tensor(buffer, shape, 2);
}

// Operands: x, w, index, a bias if has_bias; log_prob, what else is asked, and a workspace of bytes. wide_logits: rounded to
// fp32, not to the type of x.
void linear_log_prob(Call &call) {
  const bool has_bias = call.flag("has_bias");
  pydet_linear_log_prob_options options = head_options(call);
  const pydet_xla_buffer &rows = call.argument(0), &weight = call.argument(1), &numbers = call.argument(2);
  Shape s[5];
  const pydet_tensor x = as_rows(call, rows, &s[0]), w = as_weight(call, "w", weight, &s[1]),
                     index = as_values(call, "index", numbers, rows, &s[2]),
                     log_prob = as_values(call, "log_prob", call.result(0), rows, &s[3]);
  pydet_tensor bias = {};
  if (has_bias) bias = of_columns(call, "bias", call.argument(3), weight, &s[4]);
  Asked asked;
  const int64_t last =
      asked.read(call, rows, 1, [&](int64_t i) -> const pydet_xla_buffer & { return call.result(i); }, &options);
  give_workspace(call, call.result(last), &options);
  void *stream = call.stream();
  if (!call.failed())
    call.check(pydet_linear_log_prob(stream, &x, &w, has_bias ? &bias : nullptr, &index, &log_prob, &options));
}

// Operands: dlog_prob, x, w, index, a bias if has_bias, the gradients by what else is asked; dx, dw, dbias if has_bias, and a
// workspace of bytes.
void linear_log_prob_backward(Call &call) {
  const bool has_bias = call.flag("has_bias");
  pydet_linear_log_prob_options options = head_options(call);
  const pydet_xla_buffer &rows = call.argument(1), &weight = call.argument(2), &numbers = call.argument(3);
  Shape s[8];
  const pydet_tensor dlog_prob = as_values(call, "dlog_prob", call.argument(0), rows, &s[0]),
                     x = as_rows(call, rows, &s[1]), w = as_weight(call, "w", weight, &s[2]),
                     index = as_values(call, "index", numbers, rows, &s[3]), dx = as_rows(call, call.result(0), &s[4]),
                     dw = as_weight(call, "dw", call.result(1), &s[5]);
  pydet_tensor bias = {}, dbias = {};
  if (has_bias) {
    bias = of_columns(call, "bias", call.argument(4), weight, &s[6]);
    dbias = of_columns(call, "dbias", call.result(2), weight, &s[7]);
  }
  Asked asked;
  asked.read(
      call, rows, 4 + has_bias, [&](int64_t i) -> const pydet_xla_buffer & { return call.argument(i); }, &options);
  give_workspace(call, call.result(2 + has_bias), &options);
  void *stream = call.stream();
  if (!call.failed())
    call.check(pydet_linear_log_prob_backward(stream, &dlog_prob, &x, &w, has_bias ? &bias : nullptr, &index, nullptr,
                                              &dx, &dw, has_bias ? &dbias : nullptr, &options));
}

constexpr char kForward[] = "linear_log_prob";
constexpr char kBackward[] = "linear_log_prob_backward";
constexpr pydet_xla_handler kHandlers[] = {
    handler<kForward, linear_log_prob>(),
    handler<kBackward, linear_log_prob_backward>(),
};

}  // namespace

Items<pydet_xla_handler> Operation<LinearLogProb>::xla() { return kHandlers; }

}  // namespace pydet
