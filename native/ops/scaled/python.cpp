// Scaled GEMM, and the quantisation that makes its operands.
#include "ops/scaled/python.h"

namespace pydet {
namespace {

struct ScaledGemmArguments {
  PYDET_ARGUMENTS(a, b,  // positional
                  a_scale, b_scale, bias, out,
                  out_dtype,  // a type index or None
                  accumulate, arithmetic,
                  k_chunk,  // None: 128
                  initial, kernel, stream);
};

struct QuantizeArguments {
  PYDET_ARGUMENTS(x,  // positional
                  granularity,
                  given,  // the scale to read, or None; the rest are outputs
                  out, scale, transposed, transposed_scale, dtype, scale_dtype,  // type indices
                  power_of_two,
                  turns,  // whether to make a transposed copy
                  kernel, stream);
};

// Makes the scale of x [m, k], dimension `m` of its last two, where it is not there.
bool make_scale(PythonCall &call, const pydet_tensor &x, bool turned, int32_t granularity, int type, Operand **scale) {
  if ((*scale)->present) return true;
  const int ndim = granularity == PYDET_TENSOR ? 0 : x.ndim;
  int64_t shape[kDims];
  for (int i = 0; i < ndim - 2; ++i) shape[i] = x.shape[i];
  if (ndim) {
    const int64_t m = x.shape[turned ? x.ndim - 1 : x.ndim - 2], k = x.shape[turned ? x.ndim - 2 : x.ndim - 1];
    auto groups = [](int64_t extent) { return extent / kScaleGroup + (extent % kScaleGroup != 0); };
    shape[ndim - 2] = granularity == PYDET_BLOCK ? groups(m) : m;
    shape[ndim - 1] = granularity == PYDET_ROW ? 1 : groups(k);
  }
  *scale = call.make(ndim, shape, type);
  return *scale != nullptr;
}

Object *call_scaled_gemm(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("scaled_gemm");
  ScaledGemmArguments given;
  ScaledCall<pydet_scaled_gemm_options> of;
  if (!call.arguments(names_of<ScaledGemmArguments>, 2, args, count, keywords, &given)) return nullptr;
  if (!of.read(call, given)) return nullptr;
  Operand *initial = call.read_optional("initial", given.initial);
  if (!initial) return nullptr;
  const pydet_tensor &a = of.a->tensor, &b = of.b->tensor;
  const bool matrices = sound(a, 2) && sound(b, 2);
  int ndim = 0;
  int64_t shape[kDims];
  if (matrices) product_shape(Product::gemm, a, b, &ndim, shape);
  if (!of.make_out(call, "scaled_gemm", matrices, ndim, shape)) return nullptr;
  const int64_t depth = sound(a, 1) ? a.shape[a.ndim - 1] : 0;
  of.options.initial = tensor_of(initial);
  if (initial->present && of.out->present && sound(of.out->tensor, 2) &&
      type_index(of.out->tensor.dtype) != int(Type::f32)) {
    const pydet_tensor &result = of.out->tensor;
    const int64_t n = result.shape[result.ndim - 1], m = result.shape[result.ndim - 2];
    const int64_t batch = m > 0 && n > 0 ? elements(result) / m / n : 0;
    uint64_t bytes = 0;
    if (call.library().call<pydet_scaled_gemm_workspace>(batch, m, n, depth, &of.options, &bytes) != PYDET_OK)
      bytes = 0;  // the operation will say it better
    if (!call.make_workspace(bytes, &of.options.workspace, &of.options.workspace_size)) return nullptr;
  }
  const bool done = call.run(of.out->present ? product_work(of.out->tensor, depth) : 0, [&](void *stream) {
    return call.library().call<pydet_scaled_gemm>(stream, tensor_of(of.a), tensor_of(of.a_scale), tensor_of(of.b),
                                                  tensor_of(of.b_scale), tensor_of(of.bias), tensor_of(of.out),
                                                  &of.options);
  });
  return done ? call.result(of.out) : nullptr;
}

// -> (out, scale), and the transposed two where they are asked for
Object *call_quantize(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("quantize");
  QuantizeArguments given;
  if (!call.arguments(names_of<QuantizeArguments>, 1, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);
  Operand *known = x ? call.read_optional("scale", given.given) : nullptr;
  Operand *out = known ? call.read_optional("out", given.out, true) : nullptr;
  Operand *scale = out ? call.read_optional("scale", given.scale, true) : nullptr;
  Operand *turned = scale ? call.read_optional("transposed", given.transposed, true) : nullptr;
  Operand *turned_scale = turned ? call.read_optional("transposed_scale", given.transposed_scale, true) : nullptr;
  if (!turned_scale) return nullptr;
  pydet_quantize_options options = {};
  options.struct_size = sizeof options;
  options.given = known->present;
  int64_t type = int64_t(Type::e4m3), scale_type = int64_t(Type::f32);
  int32_t turns = 0;
  if (!call.number_of("granularity", exchange->granularities, given.granularity, &options.granularity)) return nullptr;
  if (!call.type_of("dtype", given.dtype, &type)) return nullptr;
  if (!call.type_of("scale_dtype", given.scale_dtype, &scale_type)) return nullptr;
  if (!call.flag_of("power_of_two", given.power_of_two, &options.power_of_two)) return nullptr;
  if (!call.flag_of("transposed", given.turns, &turns)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel)) return nullptr;
  if (!call.choose_library(given.stream)) return nullptr;
  if (known->present) scale = known;

  if (sound(x->tensor, 2)) {
    const pydet_tensor &like = x->tensor;
    if (!out->present && !(out = call.make(like.ndim, like.shape, int(type)))) return nullptr;
    if (!make_scale(call, like, false, options.granularity, int(scale_type), &scale)) return nullptr;
    if (turns && !turned->present) {
      int64_t shape[kDims];
      for (int i = 0; i < like.ndim; ++i) shape[i] = like.shape[i];
      shape[like.ndim - 2] = like.shape[like.ndim - 1];
      shape[like.ndim - 1] = like.shape[like.ndim - 2];
      if (!(turned = call.make(like.ndim, shape, int(type)))) return nullptr;
    }
    if (turns && !make_scale(call, like, true, options.granularity, int(scale_type), &turned_scale)) return nullptr;
  }
  const bool done = call.run(elements(x->tensor), [&](void *stream) {
    return call.library().call<pydet_quantize>(stream, tensor_of(x), tensor_of(out), tensor_of(scale),
                                               tensor_of(turned), tensor_of(turned_scale), &options);
  });
  Operand *results[] = {out, scale, turned, turned_scale};
  return done ? call.results(results, turned->present ? 4 : 2) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<ScaledGemmArguments>("scaled_gemm", call_scaled_gemm),
    method<QuantizeArguments>("quantize", call_quantize),
};

}  // namespace

Items<pydet_exchange_method> Operation<ScaledGemm>::python() { return kMethods; }

}  // namespace pydet
