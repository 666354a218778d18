// What XLA asks of activations and their gradients: buffers of elements, whatever their dimensions.

#include "core/operations.h"
#include "entry/xla_call.h"

namespace pydet {
namespace {

// The elements of a buffer like `like`, a row each: what lies in one piece is walked as one row.
pydet_tensor as_elements(Call &call, const char *name, const pydet_xla_buffer &buffer, const pydet_xla_buffer &like,
                         Shape *shape) {
  call.expect_shape(name, buffer, like.dims, like.rank);
  *shape = {{product(call, buffer.dims, buffer.rank), 1}, {1, 1}};
  return call.tensor(buffer, shape, 2);
}

pydet_activation_options activation_options(Call &call) {
  pydet_activation_options options = {};
  options.struct_size = sizeof options;
  options.kind = call.number("kind");
  options.kernel = call.kernel();
  return options;
}

// Operands: x, up if has_up; y.
void activation(Call &call) {
  const pydet_activation_options options = activation_options(call);
  const bool gated = call.flag("has_up");
  const pydet_xla_buffer &like = call.argument(0);
  Shape s[3];
  const pydet_tensor x = as_elements(call, "x", like, like, &s[0]);
  const pydet_tensor up = gated ? as_elements(call, "up", call.argument(1), like, &s[1]) : pydet_tensor{};
  const pydet_tensor y = as_elements(call, "y", call.result(0), like, &s[2]);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_activation(stream, &x, gated ? &up : nullptr, &y, &options));
}

// Operands: dy, x, up if has_up; dx, dup if has_up.
void activation_backward(Call &call) {
  const pydet_activation_options options = activation_options(call);
  const bool gated = call.flag("has_up");
  const pydet_xla_buffer &given = call.argument(0), &like = call.argument(1);
  Shape s[5];
  const pydet_tensor dy = as_elements(call, "dy", given, like, &s[0]), x = as_elements(call, "x", like, like, &s[1]);
  const pydet_tensor dx = as_elements(call, "dx", call.result(0), like, &s[2]);
  pydet_tensor up = {}, dup = {};
  if (gated) {
    up = as_elements(call, "up", call.argument(2), like, &s[3]);
    dup = as_elements(call, "dup", call.result(1), like, &s[4]);
  }
  void *stream = call.stream();
  if (!call.failed())
    call.check(
        pydet_activation_backward(stream, &dy, &x, gated ? &up : nullptr, &dx, gated ? &dup : nullptr, &options));
}

constexpr char kActivation[] = "activation";
constexpr char kActivationBackward[] = "activation_backward";
constexpr pydet_xla_handler kHandlers[] = {
    handler<kActivation, activation>(),
    handler<kActivationBackward, activation_backward>(),
};

}  // namespace

Items<pydet_xla_handler> Operation<Activation>::xla() { return kHandlers; }

}  // namespace pydet
