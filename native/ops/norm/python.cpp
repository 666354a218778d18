// RMSNorm and LayerNorm, with their gradients.
#include "entry/python/methods.h"

namespace pydet {
namespace {

struct RmsNormArguments {
  PYDET_ARGUMENTS(x, weight, eps,  // positional
                  bias, weight_offset, residual, out, rstd, sum, kernel, stream);
};

struct RmsNormQuantizeArguments {
  PYDET_ARGUMENTS(x, weight, eps,  // positional
                  weight_offset, residual, granularity,
                  given,                     // the scale to read, or None; the rest are outputs
                  out, scale, y, rstd, sum,  // the last three are written where they are given, the sum with a residual
                  dtype, scale_dtype,        // type indices
                  power_of_two, kernel, stream);
};

struct RmsNormBackwardArguments {
  PYDET_ARGUMENTS(dy, x, weight, rstd,  // positional
                  weight_offset, dresidual,
                  has_bias,  // whether dbias is made where it is not given
                  out, dweight, dbias,
                  dweight_dtype,  // of both; a type index or None
                  accumulate, block_sums, kernel, stream);
};

struct LayerNormArguments {
  PYDET_ARGUMENTS(x, weight, bias, eps,  // positional
                  weight_offset, residual, out, mean, rstd, sum, kernel, stream);
};

struct LayerNormBackwardArguments {
  PYDET_ARGUMENTS(dy, x, weight, mean, rstd,  // positional
                  weight_offset, dresidual,
                  has_bias,  // whether dbias is made where dweight is
                  out, dweight, dbias,
                  dweight_dtype,  // of both; a type index or None
                  accumulate, kernel, stream);
};

// The options of both gradients. dweight and dbias are read, and made later where they are not given.
template <class Arguments, class Options>
bool read_backward_options(PythonCall &call, const char *op, const Arguments &given, const Operand &dweight,
                           const Operand &dbias, Options *options, int64_t *type, int32_t *has_bias) {
  if (!call.type_of("dweight_dtype", given.dweight_dtype, type)) return false;
  if (!call.flag_of("has_bias", given.has_bias, has_bias)) return false;
  if (!call.float_of("weight_offset", given.weight_offset, &options->weight_offset)) return false;
  if (!call.flag_of("accumulate", given.accumulate, &options->accumulate)) return false;
  if (!call.text_of("kernel", given.kernel, &options->kernel)) return false;
  if (!call.choose_library(given.stream) || !type_agrees(call, "dweight", dweight, *type)) return false;
  if (!options->accumulate || dweight.present || dbias.present) return true;
  char sentence[120];
  snprintf(sentence, sizeof sentence, "%s: accumulate needs dweight or dbias, the float32 tensors to continue from",
           op);
  return call.fail(PYDET_INVALID_VALUE, sentence);
}

// -> (y, rstd), and sum where there is a residual
Object *call_rmsnorm(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("rmsnorm");
  RmsNormArguments given;
  if (!call.arguments(names_of<RmsNormArguments>, 3, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);
  Operand *residual = x ? call.read_optional("residual", given.residual) : nullptr;
  Operand *weight = residual ? call.read_optional("weight", given.weight) : nullptr;
  Operand *bias = weight ? call.read_optional("bias", given.bias) : nullptr;
  Operand *y = bias ? call.read_optional("out", given.out, true) : nullptr;
  Operand *rstd = y ? call.read_optional("rstd", given.rstd, true) : nullptr;
  Operand *sum = rstd ? call.read_optional("sum", given.sum, true) : nullptr;
  if (!sum) return nullptr;
  pydet_rmsnorm_options options = {};
  options.struct_size = sizeof options;
  if (!call.float_of("eps", given.eps, &options.eps)) return nullptr;
  if (!call.float_of("weight_offset", given.weight_offset, &options.weight_offset)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel)) return nullptr;
  if (!call.choose_library(given.stream)) return nullptr;

  const int type = type_index(x->tensor.dtype);
  if (!make_like(call, x->tensor, x->tensor.ndim, type, &y)) return nullptr;
  if (!make_like(call, x->tensor, x->tensor.ndim < 1 ? 0 : x->tensor.ndim - 1, int(Type::f32), &rstd)) return nullptr;
  const int sum_type = residual->present && sound(residual->tensor, 1) ? type_index(residual->tensor.dtype) : type;
  if (residual->present && !make_like(call, x->tensor, x->tensor.ndim, sum_type, &sum)) return nullptr;
  options.bias = tensor_of(bias);

  const bool done = call.run(elements(x->tensor), [&](void *stream) {
    return call.library().call<pydet_rmsnorm>(stream, tensor_of(x), tensor_of(residual), tensor_of(weight),
                                              tensor_of(y), tensor_of(rstd), tensor_of(sum), &options);
  });
  Operand *results[] = {y, rstd, sum};
  return done ? call.results(results, sum->present ? 3 : 2) : nullptr;
}

// -> (q, scale), and sum where there is a residual
Object *call_rmsnorm_quantize(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("rmsnorm_quantize");
  RmsNormQuantizeArguments given;
  if (!call.arguments(names_of<RmsNormQuantizeArguments>, 3, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);
  Operand *residual = x ? call.read_optional("residual", given.residual) : nullptr;
  Operand *weight = residual ? call.read_optional("weight", given.weight) : nullptr;
  Operand *known = weight ? call.read_optional("scale", given.given) : nullptr;
  Operand *out = known ? call.read_optional("out", given.out, true) : nullptr;
  Operand *scale = out ? call.read_optional("scale", given.scale, true) : nullptr;
  Operand *y = scale ? call.read_optional("y", given.y, true) : nullptr;
  Operand *rstd = y ? call.read_optional("rstd", given.rstd, true) : nullptr;
  Operand *sum = rstd ? call.read_optional("sum", given.sum, true) : nullptr;
  if (!sum) return nullptr;
  pydet_rmsnorm_quantize_options options = {};
  options.struct_size = sizeof options;
  int64_t type = int64_t(Type::e4m3), scale_type = int64_t(Type::f32);
  if (!call.float_of("eps", given.eps, &options.eps)) return nullptr;
  if (!call.float_of("weight_offset", given.weight_offset, &options.weight_offset)) return nullptr;
  if (!call.number_of("granularity", exchange->granularities, given.granularity, &options.granularity)) return nullptr;
  if (!call.type_of("dtype", given.dtype, &type)) return nullptr;
  if (!call.type_of("scale_dtype", given.scale_dtype, &scale_type)) return nullptr;
  if (!call.flag_of("power_of_two", given.power_of_two, &options.power_of_two)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel)) return nullptr;
  if (!call.choose_library(given.stream)) return nullptr;
  if (known->present) scale = known;

  const pydet_tensor &like = x->tensor;
  if (!make_like(call, like, like.ndim, int(type), &out)) return nullptr;
  if (!scale->present && sound(like, 1) && options.granularity != PYDET_TENSOR) {
    int64_t shape[kDims];
    for (int i = 0; i < like.ndim; ++i) shape[i] = like.shape[i];
    shape[like.ndim - 1] = options.granularity == PYDET_ROW ? 1 : divide_up(shape[like.ndim - 1], int64_t(kScaleGroup));
    if (!(scale = call.make(like.ndim, shape, int(scale_type)))) return nullptr;
  }
  const int sum_type =
      type_index(residual->present && sound(residual->tensor, 1) ? residual->tensor.dtype : like.dtype);
  if (residual->present && !make_like(call, like, like.ndim, sum_type, &sum)) return nullptr;

  const bool done = call.run(elements(like), [&](void *stream) {
    return call.library().call<pydet_rmsnorm_quantize>(stream, tensor_of(x), tensor_of(residual), tensor_of(weight),
                                                       tensor_of(out), tensor_of(scale), tensor_of(y), tensor_of(rstd),
                                                       tensor_of(sum), &options);
  });
  Operand *results[] = {out, scale, sum};
  return done ? call.results(results, sum->present ? 3 : 2) : nullptr;
}

// -> (dx, dweight or None), and dbias where there is one
Object *call_rmsnorm_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("rmsnorm_backward");
  RmsNormBackwardArguments given;
  if (!call.arguments(names_of<RmsNormBackwardArguments>, 4, args, count, keywords, &given)) return nullptr;
  Operand *dy = call.read("dy", given.dy);
  Operand *x = dy ? call.read("x", given.x) : nullptr;
  Operand *weight = x ? call.read_optional("weight", given.weight) : nullptr;
  Operand *rstd = weight ? call.read("rstd", given.rstd) : nullptr;
  Operand *dresidual = rstd ? call.read_optional("dresidual", given.dresidual) : nullptr;
  Operand *dx = dresidual ? call.read_optional("out", given.out, true) : nullptr;
  Operand *dweight = dx ? call.read_optional("dweight", given.dweight, true) : nullptr;
  Operand *dbias = dweight ? call.read_optional("dbias", given.dbias, true) : nullptr;
  if (!dbias) return nullptr;
  pydet_rmsnorm_backward_options options = {};
  options.struct_size = sizeof options;
  int64_t type = -1;
  int32_t has_bias = 0, block_sums = 0;
  if (!call.flag_of("block_sums", given.block_sums, &block_sums)) return nullptr;
  if (!read_backward_options(call, "rmsnorm_backward", given, *dweight, *dbias, &options, &type, &has_bias))
    return nullptr;
  options.block_sums = block_sums;
  if (!make_like(call, x->tensor, x->tensor.ndim, type_index(x->tensor.dtype), &dx)) return nullptr;
  // Gradients that are made are shaped like the weight, and where there is none like a weight of all rows.
  const pydet_tensor &sample = weight->present ? weight->tensor : x->tensor;
  const int64_t total = elements(x->tensor), n = sound(x->tensor, 1) ? x->tensor.shape[x->tensor.ndim - 1] : 0;
  if (!options.accumulate && sound(sample, 1) && (!weight->present || sample.ndim <= 2)) {
    const int of_one = weight->present ? sample.ndim : 1, ndim = of_one + block_sums;
    const int64_t *shape_of_one = sample.shape + sample.ndim - of_one;
    const int64_t heads = of_one == 2 && shape_of_one[0] > 0 ? shape_of_one[0] : 1;
    int64_t blocks[3] = {n > 0 ? divide_up(total / n / heads, int64_t(PYDET_DWEIGHT_ROWS)) : 0};
    for (int i = 0; i < of_one; ++i) blocks[1 + i] = shape_of_one[i];
    const int64_t *shape = block_sums ? blocks : shape_of_one;
    if (type < 0) type = block_sums ? int(Type::f32) : type_index(sample.dtype);
    if (weight->present && !dweight->present && !(dweight = call.make(ndim, shape, int(type)))) return nullptr;
    if (has_bias && !dbias->present && !(dbias = call.make(ndim, shape, int(type)))) return nullptr;
  }
  options.dbias = tensor_of(dbias);
  if ((dweight->present || dbias->present) && n > 0) {
    const pydet_tensor &sum = dweight->present ? dweight->tensor : dbias->tensor;
    const bool of_heads = sum.ndim == 2 + block_sums && sum.shape[block_sums] > 0;
    const int64_t heads = of_heads ? sum.shape[block_sums] : 1;
    int64_t columns = 0;
    uint64_t bytes = 0;
    if (__builtin_mul_overflow(heads, n, &columns) ||
        call.library().call<pydet_rmsnorm_backward_workspace>(total / n / heads, columns, &bytes) != PYDET_OK)
      bytes = 0;
    if (dbias->present) bytes *= 2;
    if (!call.make_workspace(bytes, &options.workspace, &options.workspace_size)) return nullptr;
  }

  const bool done = call.run(total, [&](void *stream) {
    return call.library().call<pydet_rmsnorm_backward>(stream, tensor_of(dy), tensor_of(x), tensor_of(weight),
                                                       tensor_of(rstd), tensor_of(dresidual), tensor_of(dx),
                                                       tensor_of(dweight), &options);
  });
  Operand *results[] = {dx, dweight, dbias};
  return done ? call.results(results, dbias->present ? 3 : 2) : nullptr;
}

// ---- LayerNorm ---------------------------------------------------------------------------------------------------

// -> (y, mean, rstd), and sum where there is a residual
Object *call_layernorm(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("layernorm");
  LayerNormArguments given;
  if (!call.arguments(names_of<LayerNormArguments>, 4, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);
  Operand *residual = x ? call.read_optional("residual", given.residual) : nullptr;
  Operand *weight = residual ? call.read_optional("weight", given.weight) : nullptr;
  Operand *bias = weight ? call.read_optional("bias", given.bias) : nullptr;
  Operand *y = bias ? call.read_optional("out", given.out, true) : nullptr;
  Operand *mean = y ? call.read_optional("mean", given.mean, true) : nullptr;
  Operand *rstd = mean ? call.read_optional("rstd", given.rstd, true) : nullptr;
  Operand *sum = rstd ? call.read_optional("sum", given.sum, true) : nullptr;
  if (!sum) return nullptr;
  pydet_layernorm_options options = {};
  options.struct_size = sizeof options;
  if (!call.float_of("eps", given.eps, &options.eps)) return nullptr;
  if (!call.float_of("weight_offset", given.weight_offset, &options.weight_offset)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel)) return nullptr;
  if (!call.choose_library(given.stream)) return nullptr;

  const int type = type_index(x->tensor.dtype), row_ndim = x->tensor.ndim < 1 ? 0 : x->tensor.ndim - 1;
  if (!make_like(call, x->tensor, x->tensor.ndim, type, &y)) return nullptr;
  if (!make_like(call, x->tensor, row_ndim, int(Type::f32), &mean)) return nullptr;
  if (!make_like(call, x->tensor, row_ndim, int(Type::f32), &rstd)) return nullptr;
  if (residual->present && !make_like(call, x->tensor, x->tensor.ndim, type, &sum)) return nullptr;

  const bool done = call.run(elements(x->tensor), [&](void *stream) {
    return call.library().call<pydet_layernorm>(stream, tensor_of(x), tensor_of(residual), tensor_of(weight),
                                                tensor_of(bias), tensor_of(y), tensor_of(mean), tensor_of(rstd),
                                                tensor_of(sum), &options);
  });
  Operand *results[] = {y, mean, rstd, sum};
  return done ? call.results(results, sum->present ? 4 : 3) : nullptr;
}

// -> (dx, dweight or None, dbias or None)
Object *call_layernorm_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("layernorm_backward");
  LayerNormBackwardArguments given;
  if (!call.arguments(names_of<LayerNormBackwardArguments>, 5, args, count, keywords, &given)) return nullptr;
  Operand *dy = call.read("dy", given.dy);
  Operand *x = dy ? call.read("x", given.x) : nullptr;
  Operand *weight = x ? call.read_optional("weight", given.weight) : nullptr;
  Operand *mean = weight ? call.read("mean", given.mean) : nullptr;
  Operand *rstd = mean ? call.read("rstd", given.rstd) : nullptr;
  Operand *dresidual = rstd ? call.read_optional("dresidual", given.dresidual) : nullptr;
  Operand *dx = dresidual ? call.read_optional("out", given.out, true) : nullptr;
  Operand *dweight = dx ? call.read_optional("dweight", given.dweight, true) : nullptr;
  Operand *dbias = dweight ? call.read_optional("dbias", given.dbias, true) : nullptr;
  if (!dbias) return nullptr;
  pydet_layernorm_backward_options options = {};
  options.struct_size = sizeof options;
  int64_t type = -1;
  int32_t has_bias = 1;
  if (!read_backward_options(call, "layernorm_backward", given, *dweight, *dbias, &options, &type, &has_bias))
    return nullptr;
  if (!make_like(call, x->tensor, x->tensor.ndim, type_index(x->tensor.dtype), &dx)) return nullptr;
  if (!options.accumulate && weight->present && sound(weight->tensor, 1) && weight->tensor.ndim == 1) {
    if (type < 0) type = type_index(weight->tensor.dtype);
    if (!dweight->present && !(dweight = call.make(1, weight->tensor.shape, int(type)))) return nullptr;
    if (has_bias && !dbias->present && !(dbias = call.make(1, weight->tensor.shape, int(type)))) return nullptr;
  }
  const int64_t total = elements(x->tensor), n = sound(x->tensor, 1) ? x->tensor.shape[x->tensor.ndim - 1] : 0;
  if ((dweight->present || dbias->present) && n > 0) {
    uint64_t bytes = 0;
    if (call.library().call<pydet_layernorm_backward_workspace>(total / n, n, &bytes) != PYDET_OK) bytes = 0;
    if (!call.make_workspace(bytes, &options.workspace, &options.workspace_size)) return nullptr;
  }

  const bool done = call.run(total, [&](void *stream) {
    return call.library().call<pydet_layernorm_backward>(stream, tensor_of(dy), tensor_of(x), tensor_of(weight),
                                                         tensor_of(mean), tensor_of(rstd), tensor_of(dresidual),
                                                         tensor_of(dx), tensor_of(dweight), tensor_of(dbias), &options);
  });
  Operand *results[] = {dx, dweight, dbias};
  return done ? call.results(results, 3) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<RmsNormArguments>("rmsnorm", call_rmsnorm),
    method<RmsNormBackwardArguments>("rmsnorm_backward", call_rmsnorm_backward),
    method<RmsNormQuantizeArguments>("rmsnorm_quantize", call_rmsnorm_quantize),
    method<LayerNormArguments>("layernorm", call_layernorm),
    method<LayerNormBackwardArguments>("layernorm_backward", call_layernorm_backward),
};

}  // namespace

Items<pydet_exchange_method> Operation<RmsNorm>::python() { return kMethods; }

}  // namespace pydet
