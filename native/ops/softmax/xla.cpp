// What XLA asks of softmax, its logarithm, one column of that, and their gradients: buffers of rows, whatever their leading
// dimensions.

#include "core/operations.h"
#include "entry/xla_rows.h"

namespace pydet {
namespace {

pydet_softmax_options softmax_options(Call &call) {
  pydet_softmax_options options = {};
  options.struct_size = sizeof options;
  options.log = call.flag("log");
  options.kernel = call.kernel();
  return options;
}
pydet_log_prob_options log_prob_options(Call &call) {
  pydet_log_prob_options options = {};
  options.struct_size = sizeof options;
  options.kernel = call.kernel();
  return options;
}

// Operands: x; y. log.
void softmax(Call &call) {
  const pydet_softmax_options options = softmax_options(call);
  const pydet_xla_buffer &x_rows = call.argument(0), &y_rows = call.result(0);
  Shape s[2];
  const pydet_tensor x = as_rows(call, x_rows, &s[0]), y = as_rows(call, y_rows, &s[1]);
  call.expect_shape("y", y_rows, x_rows.dims, x_rows.rank);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_softmax(stream, &x, &y, &options));
}

// Operands: dy, y; dx. log.
void softmax_backward(Call &call) {
  const pydet_softmax_options options = softmax_options(call);
  const pydet_xla_buffer &dy_rows = call.argument(0), &y_rows = call.argument(1), &dx_rows = call.result(0);
  Shape s[3];
  const pydet_tensor dy = as_rows(call, dy_rows, &s[0]), y = as_rows(call, y_rows, &s[1]),
                     dx = as_rows(call, dx_rows, &s[2]);
  call.expect_shape("dy", dy_rows, y_rows.dims, y_rows.rank);
  call.expect_shape("dx", dx_rows, y_rows.dims, y_rows.rank);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_softmax_backward(stream, &dy, &y, &dx, &options));
}

// Operands: x, index (int32 or int64); the column of each row.
void log_prob(Call &call) {
  const pydet_log_prob_options options = log_prob_options(call);
  const pydet_xla_buffer &rows = call.argument(0);
  Shape s[3];
  const pydet_tensor x = as_rows(call, rows, &s[0]), index = as_values(call, "index", call.argument(1), rows, &s[1]),
                     found = as_values(call, "log_prob", call.result(0), rows, &s[2]);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_log_prob(stream, &x, &index, &found, &options));
}

// Operands: dlog_prob, x, index; dx.
void log_prob_backward(Call &call) {
  const pydet_log_prob_options options = log_prob_options(call);
  const pydet_xla_buffer &given_values = call.argument(0), &rows = call.argument(1), &dx_rows = call.result(0);
  Shape s[4];
  const pydet_tensor given = as_values(call, "dlog_prob", given_values, rows, &s[0]), x = as_rows(call, rows, &s[1]),
                     index = as_values(call, "index", call.argument(2), rows, &s[2]),
                     dx = as_rows(call, dx_rows, &s[3]);
  call.expect_shape("dx", dx_rows, rows.dims, rows.rank);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_log_prob_backward(stream, &given, &x, &index, &dx, &options));
}

constexpr char kSoftmax[] = "softmax";
constexpr char kSoftmaxBackward[] = "softmax_backward";
constexpr char kLogProb[] = "log_prob";
constexpr char kLogProbBackward[] = "log_prob_backward";
constexpr pydet_xla_handler kHandlers[] = {
    handler<kSoftmax, softmax>(),
    handler<kSoftmaxBackward, softmax_backward>(),
    handler<kLogProb, log_prob>(),
    handler<kLogProbBackward, log_prob_backward>(),
};

}  // namespace

Items<pydet_xla_handler> Operation<Softmax>::xla() { return kHandlers; }

}  // namespace pydet
