// What XLA asks of softmax, its logarithm, one column of that, and their gradients: buffers of rows, whatever their
// leading dimensions.

#include "core/operations.h"
#include "entry/xla_call.h"

namespace pydet {
namespace {

pydet_tensor as_rows(Call &call, const pydet_xla_buffer &buffer, Shape *shape) {
  const int64_t n = buffer.rank ? buffer.dims[buffer.rank - 1] : 0;
  *shape = {{n ? elements(buffer) / n : 0, n}, {n, 1}};
  return call.tensor(buffer, shape, 2);
}
pydet_tensor as_values(Call &call, const pydet_xla_buffer &buffer, Shape *shape) {
  *shape = {{elements(buffer)}, {1}};
  pydet_tensor values = call.tensor(buffer, shape, 1);
  if (buffer.dtype == PYDET_XLA_S32) values.dtype = {PYDET_INT, 32, 1};
  if (buffer.dtype == PYDET_XLA_S64) values.dtype = {PYDET_INT, 64, 1};
  return values;
}

pydet_softmax_options softmax_options(Call &call) {
  pydet_softmax_options options = {};
  options.struct_size = sizeof options;
  options.log = int32_t(call.integer("log"));
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
  Shape s[2];
  const pydet_tensor x = as_rows(call, call.argument(0), &s[0]), y = as_rows(call, call.result(0), &s[1]);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_softmax(stream, &x, &y, &options));
}

// Operands: dy, y; dx. log.
void softmax_backward(Call &call) {
  const pydet_softmax_options options = softmax_options(call);
  Shape s[3];
  const pydet_tensor dy = as_rows(call, call.argument(0), &s[0]), y = as_rows(call, call.argument(1), &s[1]),
                     dx = as_rows(call, call.result(0), &s[2]);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_softmax_backward(stream, &dy, &y, &dx, &options));
}

// Operands: x, index (int32 or int64); the column of each row.
void log_prob(Call &call) {
  const pydet_log_prob_options options = log_prob_options(call);
  Shape s[3];
  const pydet_tensor x = as_rows(call, call.argument(0), &s[0]), index = as_values(call, call.argument(1), &s[1]),
                     found = as_values(call, call.result(0), &s[2]);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_log_prob(stream, &x, &index, &found, &options));
}

// Operands: dlog_prob, x, index; dx.
void log_prob_backward(Call &call) {
  const pydet_log_prob_options options = log_prob_options(call);
  Shape s[4];
  const pydet_tensor given = as_values(call, call.argument(0), &s[0]), x = as_rows(call, call.argument(1), &s[1]),
                     index = as_values(call, call.argument(2), &s[2]), dx = as_rows(call, call.result(0), &s[3]);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_log_prob_backward(stream, &given, &x, &index, &dx, &options));
}

constexpr pydet_xla_handler kHandlers[] = {
    handler<softmax>("softmax"),
    handler<softmax_backward>("softmax_backward"),
    handler<log_prob>("log_prob"),
    handler<log_prob_backward>("log_prob_backward"),
};

}  // namespace

Items<pydet_xla_handler> Operation<Softmax>::xla() { return kHandlers; }

}  // namespace pydet
