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
struct SelectiveScanBackwardArguments {
  PYDET_ARGUMENTS(dy, x, dt, a, b, c, d,                      // positional; d may be None
                  initial, cu_seqlens, dfinal, into_initial,  // into_initial: whether dinitial is made
                  kernel, stream);
};
struct GatedDeltaBackwardArguments {
  PYDET_ARGUMENTS(dout, q, k, v, g, beta,  // positional
                  initial, cu_seqlens, dfinal, into_initial, kernel, stream);
};
struct CausalConv1dBackwardArguments {
  PYDET_ARGUMENTS(dy, x, w,                                 // positional
                  initial, cu_seqlens, bias, into_initial,  // the last two: whether dbias and dinitial are made
                  kernel, stream);
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

// The sequences of x [batch, tokens, ...], as far as shapes say.
int64_t sequences_in(const pydet_tensor &x, const Operand *cu_seqlens) {
  const int64_t count = cu_seqlens->present ? (cu_seqlens->tensor.ndim == 1 ? cu_seqlens->tensor.shape[0] - 1 : 0)
                                            : (sound(x, 1) ? x.shape[0] : 0);
  return count < 0 ? 0 : count;
}

// Each result like an operand.
struct Like {
  Operand **result;
  const Operand *operand;
};
template <int count> bool make_alike(PythonCall &call, const Like (&pairs)[count]) {
  for (const Like &pair : pairs) {
    const pydet_tensor &like = pair.operand->tensor;
    if (!make_like(call, like, like.ndim, type_index(like.dtype), pair.result)) return false;
  }
  return true;
}

// What the library asks for, of operands whose shapes fit; else nothing.
template <auto workspace>
bool make_room(PythonCall &call, const pydet_tensor &x, const pydet_tensor &b, int64_t sequences,
               pydet_scan_backward_options *options) {
  uint64_t bytes = 0;
  if (!sound(x, 4) || !sound(b, 4) || x.ndim != 4 || b.ndim != 4) return true;
  int64_t tokens = 0;
  if (__builtin_mul_overflow(x.shape[0], x.shape[1], &tokens)) return true;
  if (call.library().call<workspace>(sequences, tokens, x.shape[2], x.shape[3], b.shape[2], b.shape[3], &bytes) !=
      PYDET_OK)
    bytes = 0;
  return call.make_workspace(bytes, &options->workspace, &options->workspace_size);
}

// -> dx, ddt, da, db, dc, dd or None, dinitial or None
Object *call_selective_scan_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  Operand more[5];  // ten operands, seven results, the workspace, and what is not there
  PythonCall call("selective_scan_backward", more);
  SelectiveScanBackwardArguments given;
  if (!call.arguments(names_of<SelectiveScanBackwardArguments>, 7, args, count, keywords, &given)) return nullptr;
  Operand *dy = call.read("dy", given.dy);
  Operand *x = dy ? call.read("x", given.x) : nullptr;
  Operand *dt = x ? call.read("dt", given.dt) : nullptr;
  Operand *a = dt ? call.read("a", given.a) : nullptr;
  Operand *b = a ? call.read("b", given.b) : nullptr;
  Operand *c = b ? call.read("c", given.c) : nullptr;
  Operand *d = c ? call.read_optional("d", given.d) : nullptr;
  Operand *initial = d ? call.read_optional("initial", given.initial) : nullptr;
  Operand *starts = initial ? call.read_optional("cu_seqlens", given.cu_seqlens) : nullptr;
  Operand *dfinal = starts ? call.read_optional("dfinal", given.dfinal) : nullptr;
  Operand *const absent = dfinal ? call.read_optional("out", nullptr) : nullptr;
  if (!absent) return nullptr;
  Operand *results[] = {absent, absent, absent, absent, absent, absent, absent};
  auto &[dx, ddt, da, db, dc, dd, dinitial] = results;
  pydet_scan_backward_options options = {};
  options.struct_size = sizeof options;
  int32_t into_initial = 0;
  if (!call.flag_of("return_initial", given.into_initial, &into_initial)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  const Like pairs[] = {{&dx, x}, {&ddt, dt}, {&db, b}, {&dc, c}};
  if (!make_alike(call, pairs)) return nullptr;
  const pydet_tensor &like = x->tensor;
  if (sound(like, 4) && sound(b->tensor, 4) && sound(a->tensor, 1)) {
    const int64_t sequences = sequences_in(like, starts), states = last_extent(b->tensor);
    const int64_t of_sums[] = {sequences, like.shape[2], states};
    if (!(da = call.make(a->tensor.ndim == 2 ? 3 : 2, of_sums, int(Type::f32)))) return nullptr;
    if (d->present && !(dd = call.make(2, of_sums, int(Type::f32)))) return nullptr;
    if (!make_state(call, into_initial, like, starts, like.shape[3], states, &dinitial)) return nullptr;
    if (!make_room<pydet_selective_scan_backward_workspace>(call, like, b->tensor, sequences, &options)) return nullptr;
  }
  const bool done = call.run(kGilWork, [&](void *stream) {
    return call.library().call<pydet_selective_scan_backward>(
        stream, tensor_of(dy), tensor_of(dfinal), tensor_of(x), tensor_of(dt), tensor_of(a), tensor_of(b), tensor_of(c),
        tensor_of(d), tensor_of(initial), tensor_of(starts), tensor_of(dx), tensor_of(ddt), tensor_of(da),
        tensor_of(db), tensor_of(dc), tensor_of(dd), tensor_of(dinitial), &options);
  });
  return done ? call.results(results, 7) : nullptr;
}

// -> dq, dk, dv, dg, dbeta, dinitial or None
Object *call_gated_delta_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  Operand more[3];
  PythonCall call("gated_delta_backward", more);
  GatedDeltaBackwardArguments given;
  if (!call.arguments(names_of<GatedDeltaBackwardArguments>, 6, args, count, keywords, &given)) return nullptr;
  Operand *dout = call.read("dout", given.dout);
  Operand *q = dout ? call.read("q", given.q) : nullptr;
  Operand *k = q ? call.read("k", given.k) : nullptr;
  Operand *v = k ? call.read("v", given.v) : nullptr;
  Operand *g = v ? call.read("g", given.g) : nullptr;
  Operand *beta = g ? call.read("beta", given.beta) : nullptr;
  Operand *initial = beta ? call.read_optional("initial", given.initial) : nullptr;
  Operand *starts = initial ? call.read_optional("cu_seqlens", given.cu_seqlens) : nullptr;
  Operand *dfinal = starts ? call.read_optional("dfinal", given.dfinal) : nullptr;
  Operand *const absent = dfinal ? call.read_optional("out", nullptr) : nullptr;
  if (!absent) return nullptr;
  Operand *results[] = {absent, absent, absent, absent, absent, absent};
  auto &[dq, dk, dv, dg, dbeta, dinitial] = results;
  pydet_scan_backward_options options = {};
  options.struct_size = sizeof options;
  int32_t into_initial = 0;
  if (!call.flag_of("return_initial", given.into_initial, &into_initial)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  const Like pairs[] = {{&dq, q}, {&dk, k}, {&dv, v}, {&dg, g}, {&dbeta, beta}};
  if (!make_alike(call, pairs)) return nullptr;
  const pydet_tensor &like = v->tensor;
  if (!make_state(call, into_initial, like, starts, last_extent(k->tensor), last_extent(like), &dinitial))
    return nullptr;
  if (!make_room<pydet_gated_delta_backward_workspace>(call, like, k->tensor, sequences_in(like, starts), &options))
    return nullptr;
  const bool done = call.run(kGilWork, [&](void *stream) {
    return call.library().call<pydet_gated_delta_backward>(
        stream, tensor_of(dout), tensor_of(dfinal), tensor_of(q), tensor_of(k), tensor_of(v), tensor_of(g),
        tensor_of(beta), tensor_of(initial), tensor_of(starts), tensor_of(dq), tensor_of(dk), tensor_of(dv),
        tensor_of(dg), tensor_of(dbeta), tensor_of(dinitial), &options);
  });
  return done ? call.results(results, 6) : nullptr;
}

// -> dx, dw, dbias or None, dinitial or None
Object *call_causal_conv1d_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("causal_conv1d_backward");
  CausalConv1dBackwardArguments given;
  if (!call.arguments(names_of<CausalConv1dBackwardArguments>, 3, args, count, keywords, &given)) return nullptr;
  Operand *dy = call.read("dy", given.dy);
  Operand *x = dy ? call.read("x", given.x) : nullptr;
  Operand *w = x ? call.read("w", given.w) : nullptr;
  Operand *initial = w ? call.read_optional("initial", given.initial) : nullptr;
  Operand *starts = initial ? call.read_optional("cu_seqlens", given.cu_seqlens) : nullptr;
  Operand *const absent = starts ? call.read_optional("out", nullptr) : nullptr;
  if (!absent) return nullptr;
  Operand *results[] = {absent, absent, absent, absent};
  auto &[dx, dw, dbias, dinitial] = results;
  pydet_scan_backward_options options = {};
  options.struct_size = sizeof options;
  int32_t bias = 0, into_initial = 0;
  if (!call.flag_of("bias", given.bias, &bias) || !call.flag_of("return_initial", given.into_initial, &into_initial))
    return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  const pydet_tensor &like = x->tensor;
  if (!make_like(call, like, like.ndim, type_index(like.dtype), &dx)) return nullptr;
  if (sound(like, 3) && sound(w->tensor, 2)) {
    const int64_t sequences = sequences_in(like, starts), channels = w->tensor.shape[0], taps = w->tensor.shape[1];
    const int64_t of_w[] = {sequences, channels, taps}, of_initial[] = {sequences, taps > 0 ? taps - 1 : 0, channels};
    if (!(dw = call.make(3, of_w, int(Type::f32)))) return nullptr;
    if (bias && !(dbias = call.make(2, of_w, int(Type::f32)))) return nullptr;
    if (into_initial && !(dinitial = call.make(3, of_initial, type_index(like.dtype)))) return nullptr;
  }
  const bool done = call.run(elements(like), [&](void *stream) {
    return call.library().call<pydet_causal_conv1d_backward>(
        stream, tensor_of(dy), tensor_of(x), tensor_of(w), tensor_of(initial), tensor_of(starts), tensor_of(dx),
        tensor_of(dw), tensor_of(dbias), tensor_of(dinitial), &options);
  });
  return done ? call.results(results, 4) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<SelectiveScanArguments>("selective_scan", call_selective_scan),
    method<GatedDeltaArguments>("gated_delta", call_gated_delta),
    method<CausalConv1dArguments>("causal_conv1d", call_causal_conv1d),
    method<SelectiveScanBackwardArguments>("selective_scan_backward", call_selective_scan_backward),
    method<GatedDeltaBackwardArguments>("gated_delta_backward", call_gated_delta_backward),
    method<CausalConv1dBackwardArguments>("causal_conv1d_backward", call_causal_conv1d_backward),
};

}  // namespace

Items<pydet_exchange_method> Operation<SelectiveScan>::python() { return kMethods; }

}  // namespace pydet
