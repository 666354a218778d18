// Recurrences over tokens.
#include "entry/python/methods.h"

namespace pydet {
namespace {

struct SelectiveScanArguments {
  PYDET_ARGUMENTS(x, dt, a, b, c, d,                       // positional; d may be None
                  initial, cu_seqlens, out, final, state,  // state: whether to make a final one
                  kernel, stream);
};
struct GatedDeltaArguments {
  PYDET_ARGUMENTS(q, k, v, g, beta,  // positional
                  initial, cu_seqlens, out, final, state, kernel, stream);
};
struct CausalConv1dArguments {
  PYDET_ARGUMENTS(x, w, bias,  // positional; bias may be None
                  initial, cu_seqlens, out, kernel, stream);
};

// The last state, where one is asked for and none is given: [sequences, heads, ., .] in fp32.
bool make_state(PythonCall &call, int32_t asked, const pydet_tensor &x, const Operand *cu_seqlens, int64_t rows,
                int64_t columns, Operand **final) {
  if (!asked || (*final)->present || !sound(x, 4)) return true;
  int64_t sequences = x.shape[0];
  if (cu_seqlens->present) sequences = cu_seqlens->tensor.ndim == 1 ? cu_seqlens->tensor.shape[0] - 1 : 0;
  const int64_t shape[] = {sequences < 0 ? 0 : sequences, x.shape[2], rows, columns};
  return (*final = call.make(4, shape, int(Type::f32))) != nullptr;
}
int64_t last_extent(const pydet_tensor &tensor) { return sound(tensor, 1) ? tensor.shape[tensor.ndim - 1] : 0; }

// -> y, final or None
Object *call_selective_scan(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("selective_scan");
  SelectiveScanArguments given;
  if (!call.arguments(names_of<SelectiveScanArguments>, 6, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);
  Operand *dt = x ? call.read("dt", given.dt) : nullptr;
  Operand *a = dt ? call.read("a", given.a) : nullptr;
  Operand *b = a ? call.read("b", given.b) : nullptr;
  Operand *c = b ? call.read("c", given.c) : nullptr;
  Operand *d = c ? call.read_optional("d", given.d) : nullptr;
  Operand *initial = d ? call.read_optional("initial", given.initial) : nullptr;
  Operand *starts = initial ? call.read_optional("cu_seqlens", given.cu_seqlens) : nullptr;
  Operand *y = starts ? call.read_optional("out", given.out, true) : nullptr;
  Operand *final = y ? call.read_optional("final", given.final, true) : nullptr;
  if (!final) return nullptr;
  pydet_scan_options options = {};
  options.struct_size = sizeof options;
  int32_t state = 0;
  if (!call.flag_of("return_final", given.state, &state)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  const pydet_tensor &like = x->tensor;
  if (!make_like(call, like, like.ndim, type_index(like.dtype), &y)) return nullptr;
  const int64_t width = sound(like, 4) ? like.shape[3] : 0;
  if (!make_state(call, state, like, starts, width, last_extent(b->tensor), &final)) return nullptr;
  const bool done = call.run(kGilWork, [&](void *stream) {
    return call.library().call<pydet_selective_scan>(stream, tensor_of(x), tensor_of(dt), tensor_of(a), tensor_of(b),
                                                     tensor_of(c), tensor_of(d), tensor_of(initial), tensor_of(starts),
                                                     tensor_of(y), tensor_of(final), &options);
  });
  Operand *results[] = {y, final};
  return done ? call.results(results, 2) : nullptr;
}

// -> o, final or None
Object *call_gated_delta(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("gated_delta");
  GatedDeltaArguments given;
  if (!call.arguments(names_of<GatedDeltaArguments>, 5, args, count, keywords, &given)) return nullptr;
  Operand *q = call.read("q", given.q);
  Operand *k = q ? call.read("k", given.k) : nullptr;
  Operand *v = k ? call.read("v", given.v) : nullptr;
  Operand *g = v ? call.read("g", given.g) : nullptr;
  Operand *beta = g ? call.read("beta", given.beta) : nullptr;
  Operand *initial = beta ? call.read_optional("initial", given.initial) : nullptr;
  Operand *starts = initial ? call.read_optional("cu_seqlens", given.cu_seqlens) : nullptr;
  Operand *o = starts ? call.read_optional("out", given.out, true) : nullptr;
  Operand *final = o ? call.read_optional("final", given.final, true) : nullptr;
  if (!final) return nullptr;
  pydet_scan_options options = {};
  options.struct_size = sizeof options;
  int32_t state = 0;
  if (!call.flag_of("return_final", given.state, &state)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  const pydet_tensor &like = v->tensor;
  if (!make_like(call, like, like.ndim, type_index(like.dtype), &o)) return nullptr;
  if (!make_state(call, state, like, starts, last_extent(k->tensor), last_extent(like), &final)) return nullptr;
  const bool done = call.run(kGilWork, [&](void *stream) {
    return call.library().call<pydet_gated_delta>(stream, tensor_of(q), tensor_of(k), tensor_of(v), tensor_of(g),
                                                  tensor_of(beta), tensor_of(initial), tensor_of(starts), tensor_of(o),
                                                  tensor_of(final), &options);
  });
  Operand *results[] = {o, final};
  return done ? call.results(results, 2) : nullptr;
}

// -> y
Object *call_causal_conv1d(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("causal_conv1d");
  CausalConv1dArguments given;
  if (!call.arguments(names_of<CausalConv1dArguments>, 3, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);
  Operand *w = x ? call.read("w", given.w) : nullptr;
  Operand *bias = w ? call.read_optional("bias", given.bias) : nullptr;
  Operand *initial = bias ? call.read_optional("initial", given.initial) : nullptr;
  Operand *starts = initial ? call.read_optional("cu_seqlens", given.cu_seqlens) : nullptr;
  Operand *y = starts ? call.read_optional("out", given.out, true) : nullptr;
  if (!y) return nullptr;
  pydet_scan_options options = {};
  options.struct_size = sizeof options;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  const pydet_tensor &like = x->tensor;
  if (!make_like(call, like, like.ndim, type_index(like.dtype), &y)) return nullptr;
  const bool done = call.run(elements(like), [&](void *stream) {
    return call.library().call<pydet_causal_conv1d>(stream, tensor_of(x), tensor_of(w), tensor_of(bias),
                                                    tensor_of(initial), tensor_of(starts), tensor_of(y), &options);
  });
  return done ? call.result(y) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<SelectiveScanArguments>("selective_scan", call_selective_scan),
    method<GatedDeltaArguments>("gated_delta", call_gated_delta),
    method<CausalConv1dArguments>("causal_conv1d", call_causal_conv1d),
};

}  // namespace

Items<pydet_exchange_method> Operation<SelectiveScan>::python() { return kMethods; }

}  // namespace pydet
