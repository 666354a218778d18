// Scaled GEMM, and the quantisation that makes its operands.
#include "entry/python/methods.h"
#include "entry/python/results.h"
#include "scaled.h"

namespace pydet {
namespace {

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

// What follows the operands of a scaled product, and the library for them.
template <class Arguments, class Options>
bool read_scaled_options(PythonCall &call, const Arguments &given, const Operand &out, Options *options,
                         int64_t *type) {
  options->struct_size = sizeof *options;
  options->k_chunk = kScaleGroup;
  return read_sum_options(call, given, options, type) && call.text_of("kernel", given.kernel, &options->kernel) &&
         call.choose_library(given.stream) && type_agrees(call, "out", out, *type);
}

}  // namespace

Object *call_scaled_gemm(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("scaled_gemm");
  pydet_scaled_gemm_arguments given;
  if (!call.arguments(exchange->scaled_gemm_names, 2, args, count, keywords, &given)) return nullptr;
  Operand *a = call.read("a", given.a);
  Operand *b = a ? call.read("b", given.b) : nullptr;
  Operand *a_scale = b ? call.read_optional("a_scale", given.a_scale) : nullptr;
  Operand *b_scale = a_scale ? call.read_optional("b_scale", given.b_scale) : nullptr;
  Operand *bias = b_scale ? call.read_optional("bias", given.bias) : nullptr;
  Operand *out = bias ? call.read_optional("out", given.out, true) : nullptr;
  if (!out) return nullptr;
  pydet_scaled_gemm_options options = {};
  int64_t type = -1;
  if (!read_scaled_options(call, given, *out, &options, &type)) return nullptr;
  if (!out->present) {
    if (!starts_from_zero(call, "scaled_gemm", options.accumulate)) return nullptr;
    if (sound(a->tensor, 2) && sound(b->tensor, 2)) {
      int ndim;
      int64_t shape[kDims];
      product_shape(Product::gemm, a->tensor, b->tensor, &ndim, shape);
      if (!(out = call.make(ndim, shape, type < 0 ? int(Type::bf16) : int(type)))) return nullptr;
    }
  }
  const int64_t depth = sound(a->tensor, 1) ? a->tensor.shape[a->tensor.ndim - 1] : 0;
  const bool done = call.run(out->present ? product_work(out->tensor, depth) : 0, [&](void *stream) {
    return call.library().scaled_gemm(stream, tensor_of(a), tensor_of(a_scale), tensor_of(b), tensor_of(b_scale),
                                      tensor_of(bias), tensor_of(out), &options);
  });
  return done ? call.result(out) : nullptr;
}

Object *call_scaled_grouped_gemm(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("scaled_grouped_gemm");
  pydet_scaled_grouped_gemm_arguments given;
  if (!call.arguments(exchange->scaled_grouped_gemm_names, 3, args, count, keywords, &given)) return nullptr;
  Operand *a = call.read("a", given.a);
  Operand *b = a ? call.read("b", given.b) : nullptr;
  Operand *end = b ? call.read("group_end", given.group_end) : nullptr;
  Operand *start = end ? call.read_optional("group_start", given.group_start) : nullptr;
  Operand *a_scale = start ? call.read_optional("a_scale", given.a_scale) : nullptr;
  Operand *b_scale = a_scale ? call.read_optional("b_scale", given.b_scale) : nullptr;
  Operand *bias = b_scale ? call.read_optional("bias", given.bias) : nullptr;
  Operand *out = bias ? call.read_optional("out", given.out, true) : nullptr;
  if (!out) return nullptr;
  pydet_scaled_grouped_gemm_options options = {};
  int64_t type = -1;
  if (!read_scaled_options(call, given, *out, &options, &type)) return nullptr;
  const pydet_tensor &x = a->tensor, &y = b->tensor;
  const bool rows = x.ndim == 2 && y.ndim == 3 && sound(x, 2) && sound(y, 2);
  if (!out->present) {
    if (!starts_from_zero(call, "scaled_grouped_gemm", options.accumulate)) return nullptr;
    const int64_t shape[2] = {rows ? x.shape[0] : 0, rows ? y.shape[2] : 0};
    if (rows && !(out = call.make(2, shape, type < 0 ? int(Type::bf16) : int(type)))) return nullptr;
  }
  const bool done = call.run(rows ? product_work(x, y.shape[2]) : 0, [&](void *stream) {
    return call.library().scaled_grouped_gemm(stream, tensor_of(a), tensor_of(a_scale), tensor_of(b),
                                              tensor_of(b_scale), tensor_of(bias), tensor_of(start), tensor_of(end),
                                              tensor_of(out), &options);
  });
  return done ? call.result(out) : nullptr;
}

// -> (out, scale), and the transposed two where they are asked for
Object *call_quantize(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("quantize");
  pydet_quantize_arguments given;
  if (!call.arguments(exchange->quantize_names, 1, args, count, keywords, &given)) return nullptr;
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
  if (!call.integer_of("dtype", given.dtype, &type)) return nullptr;
  if (!call.integer_of("scale_dtype", given.scale_dtype, &scale_type)) return nullptr;
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
    return call.library().quantize(stream, tensor_of(x), tensor_of(out), tensor_of(scale), tensor_of(turned),
                                   tensor_of(turned_scale), &options);
  });
  Operand *results[] = {out, scale, turned, turned_scale};
  return done ? call.results(results, turned->present ? 4 : 2) : nullptr;
}

}  // namespace pydet
