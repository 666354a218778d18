// Activations, alone or as the gate of another factor, and their gradients.
#include "entry/python/methods.h"

namespace pydet {
namespace {

struct ActivationArguments {
  PYDET_ARGUMENTS(x,  // positional
                  up, out, kind, kernel, stream);
};
struct ActivationBackwardArguments {
  PYDET_ARGUMENTS(dy, x,                             // positional
                  up, dx, dup, wants_dx, wants_dup,  // flags: made where none is given
                  kind, kernel, stream);
};

// -> y
Object *call_activation(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("activation");
  ActivationArguments given;
  if (!call.arguments(names_of<ActivationArguments>, 1, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);
  Operand *up = x ? call.read_optional("up", given.up) : nullptr;
  Operand *y = up ? call.read_optional("out", given.out, true) : nullptr;
  if (!y) return nullptr;
  pydet_activation_options options = {};
  options.struct_size = sizeof options;
  if (!call.number_of("kind", exchange->kinds, given.kind, &options.kind)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  const pydet_tensor &like = x->tensor;
  if (!make_like(call, like, like.ndim, type_index(like.dtype), &y)) return nullptr;
  const bool done = call.run(elements(like), [&](void *stream) {
    return call.library().call<pydet_activation>(stream, tensor_of(x), tensor_of(up), tensor_of(y), &options);
  });
  return done ? call.result(y) : nullptr;
}

// -> (dx, dup), None for what is neither given nor wanted
Object *call_activation_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("activation_backward");
  ActivationBackwardArguments given;
  if (!call.arguments(names_of<ActivationBackwardArguments>, 2, args, count, keywords, &given)) return nullptr;
  Operand *dy = call.read("dy", given.dy);
  Operand *x = dy ? call.read("x", given.x) : nullptr;
  Operand *up = x ? call.read_optional("up", given.up) : nullptr;
  Operand *dx = up ? call.read_optional("dx", given.dx, true) : nullptr;
  Operand *dup = dx ? call.read_optional("dup", given.dup, true) : nullptr;
  if (!dup) return nullptr;
  pydet_activation_options options = {};
  options.struct_size = sizeof options;
  int32_t wants_dx = 0, wants_dup = 0;
  if (!call.flag_of("wants_dx", given.wants_dx, &wants_dx)) return nullptr;
  if (!call.flag_of("wants_dup", given.wants_dup, &wants_dup)) return nullptr;
  if (!call.number_of("kind", exchange->kinds, given.kind, &options.kind)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  const pydet_tensor &like = x->tensor;
  const int type = type_index(like.dtype);
  if (wants_dx && !make_like(call, like, like.ndim, type, &dx)) return nullptr;
  if (wants_dup && !make_like(call, like, like.ndim, type, &dup)) return nullptr;
  const bool done = call.run(elements(like), [&](void *stream) {
    return call.library().call<pydet_activation_backward>(stream, tensor_of(dy), tensor_of(x), tensor_of(up),
                                                          tensor_of(dx), tensor_of(dup), &options);
  });
  Operand *results[] = {dx, dup};
  return done ? call.results(results, 2) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<ActivationArguments>("activation", call_activation),
    method<ActivationBackwardArguments>("activation_backward", call_activation_backward),
};

}  // namespace

Items<pydet_exchange_method> Operation<Activation>::python() { return kMethods; }

}  // namespace pydet
