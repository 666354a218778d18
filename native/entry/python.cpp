// The Python entry (python.h): reads Python objects as descriptors, makes the results in the caller's framework,
// calls the operation, and hands the results back. Every check of shapes, types and devices stays the operation's own.
//
// Called with the GIL held, as any Python method; it is released around work that is large or goes to a GPU.
#include "entry/python_call.h"

#include "scaled.h"

namespace pydet {
namespace {

int64_t elements(const pydet_tensor &tensor) {
  int64_t count = 1;
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.ndim > kDims || __builtin_mul_overflow(count, tensor.shape[i], &count)) return kGilWork;
  return count;
}

// An output's type, asked for where the output is given too.
bool type_agrees(PythonCall &call, const char *name, const Operand &out, int64_t asked) {
  if (asked < 0 || !out.present) return true;
  const int have = type_index(out.tensor.dtype);
  if (asked == have) return true;
  char what[120];
  snprintf(what, sizeof what, "%s, and %s_dtype asks for %s", have < 0 ? "of another type" : kTypes[have].name, name,
           kTypes[asked].name);
  return call.refuse(name, what, PYDET_INVALID_DTYPE);
}

// ---- GEMM --------------------------------------------------------------------------------------------------------

enum class Product { gemm, gemm_da, gemm_db, skinny_gemm };

// The shape of the result, as far as the operands have one: where they do not fit, an empty tensor of the right rows
// and columns, which no operation accepts and which costs nothing.
void product_shape(Product product, const pydet_tensor &x, const pydet_tensor &y, int *ndim, int64_t *shape) {
  const bool skinny = product == Product::skinny_gemm;
  const int64_t *x_end = x.shape + x.ndim, *y_end = y.shape + y.ndim;
  if (skinny) {
    *ndim = x.ndim;
    for (int i = 0; i + 1 < x.ndim; ++i) shape[i] = x.shape[i];
    shape[x.ndim - 1] = y_end[-2];
    return;
  }
  *ndim = x.ndim > y.ndim ? x.ndim : y.ndim;
  const int64_t depth = product == Product::gemm_db ? x_end[-2] : x_end[-1];
  bool fits = depth == (product == Product::gemm_da ? y_end[-1] : y_end[-2]);
  for (int i = 0; i < *ndim - 2; ++i) {
    int ix = i - (*ndim - x.ndim), iy = i - (*ndim - y.ndim);
    int64_t ex = ix < 0 ? 1 : x.shape[ix], ey = iy < 0 ? 1 : y.shape[iy];
    fits = fits && (ex == ey || ex == 1 || ey == 1);
    shape[i] = ex == 1 ? ey : ex;
  }
  if (!fits) {
    *ndim = 3;
    shape[0] = 0;
  }
  shape[*ndim - 2] = product == Product::gemm_db ? x_end[-1] : x_end[-2];
  shape[*ndim - 1] = product == Product::gemm_da ? y_end[-2] : y_end[-1];
}

// Multiply-adds, or any large number where there are very many.
int64_t product_work(const pydet_tensor &out, int64_t depth) {
  int64_t work;
  return __builtin_mul_overflow(elements(out), depth, &work) ? kGilWork : work;
}

// What all products' options have; *type stays as it is where no type of the result is asked for.
template <class Given, class Options>
bool read_sum_options(PythonCall &call, const Given &given, Options *options, int64_t *type) {
  return call.integer_of("out_dtype", given.out_dtype, type) &&
         call.flag_of("accumulate", given.accumulate, &options->accumulate) &&
         call.number_of("arithmetic", exchange->arithmetics, given.arithmetic, &options->arithmetic) &&
         call.integer_of("k_chunk", given.k_chunk, &options->k_chunk);
}

// Where there is no out: accumulate would have nothing to continue from.
bool starts_from_zero(PythonCall &call, const char *op, int32_t accumulate) {
  if (!accumulate) return true;
  char sentence[160];
  snprintf(sentence, sizeof sentence, "%s: accumulate needs out, the float32 tensor to continue from", op);
  return call.fail(PYDET_INVALID_VALUE, sentence), false;
}

struct ProductWords {
  const char *op, *first, *second;
};
constexpr ProductWords kProductWords[] = {
    {"gemm", "a", "b"}, {"gemm_da", "dc", "b"}, {"gemm_db", "a", "dc"}, {"skinny_gemm", "x", "w"}};

template <Product product> Object *call_product(Object *, Object *const *args, intptr_t count, Object *keywords) {
  constexpr ProductWords words = kProductWords[int(product)];
  constexpr bool skinny = product == Product::skinny_gemm;
  PythonCall call(words.op);
  pydet_product_arguments given;
  if (!call.arguments(exchange->product_names, 2, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read(words.first, given.first);
  Operand *y = x ? call.read(words.second, given.second) : nullptr;
  Operand *bias = y ? call.read_optional("bias", given.bias) : nullptr;
  Operand *out = bias ? call.read_optional("out", given.out, true) : nullptr;
  if (!out) return nullptr;

  pydet_skinny_gemm_options options = {};  // holds what both kinds of options have
  options.struct_size = sizeof options;
  int64_t type = -1;
  if (!read_sum_options(call, given, &options, &type)) return nullptr;
  if (!call.number_of("mode", exchange->modes, given.mode, &options.mode)) return nullptr;
  if (!call.flag_of("weights_constant", given.weights_constant, &options.weights_constant)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel)) return nullptr;

  if (!call.choose_library(given.stream) || !type_agrees(call, "out", *out, type)) return nullptr;
  if (!out->present) {
    if (!starts_from_zero(call, words.op, options.accumulate)) return nullptr;
    if (sound(x->tensor, skinny ? 1 : 2) && sound(y->tensor, 2)) {
      int ndim;
      int64_t shape[kDims];
      product_shape(product, x->tensor, y->tensor, &ndim, shape);
      if (!(out = call.make(ndim, shape, type < 0 ? type_index(x->tensor.dtype) : int(type)))) return nullptr;
    }
  }
  const int inner = product == Product::gemm_db ? 2 : 1;  // which dimension of x, from the end, is summed over
  const int64_t depth = sound(x->tensor, inner) ? x->tensor.shape[x->tensor.ndim - inner] : 0;
  const int64_t work = out->present ? product_work(out->tensor, depth) : 0;

  const Library &library = call.library();
  pydet_gemm_options plain = {};
  plain.struct_size = sizeof plain;
  plain.arithmetic = options.arithmetic;
  plain.k_chunk = options.k_chunk;
  plain.accumulate = options.accumulate;
  plain.kernel = options.kernel;
  if (call.on_gpu() && call.can_allocate() && out->present && sound(out->tensor, skinny ? 1 : 2)) {
    const pydet_tensor &result = out->tensor;
    const int64_t n = result.shape[result.ndim - 1], m = result.ndim < 2 ? 1 : result.shape[result.ndim - 2];
    const int64_t batch = m > 0 && n > 0 ? elements(result) / m / n : 0;
    uint64_t bytes = 0;
    pydet_status status = skinny ? library.skinny_gemm_workspace(batch * m, n, depth, &options, &bytes)
                                 : library.gemm_workspace(batch, m, n, depth, &plain, &bytes);
    if (status != PYDET_OK) bytes = 0;  // the operation will say it better
    if (!call.make_workspace(bytes, &options.workspace, &options.workspace_size)) return nullptr;
    plain.workspace = options.workspace;
    plain.workspace_size = options.workspace_size;
  }

  const pydet_tensor *px = tensor_of(x), *py = tensor_of(y), *pbias = tensor_of(bias), *pout = tensor_of(out);
  const bool done = call.run(work, [&](void *stream) {
    switch (product) {
      case Product::gemm: return library.gemm(stream, px, py, pbias, pout, &plain);
      case Product::gemm_da: return library.gemm_da(stream, px, py, pout, &plain);
      case Product::gemm_db: return library.gemm_db(stream, px, py, pout, &plain);
      case Product::skinny_gemm: return library.skinny_gemm(stream, px, py, pbias, pout, &options);
    }
    return pydet_status(PYDET_INVALID_VALUE);
  });
  return done ? call.result(out) : nullptr;
}

// ---- Grouped GEMM ------------------------------------------------------------------------------------------------

Object *call_grouped_gemm(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("grouped_gemm");
  pydet_grouped_gemm_arguments given;
  if (!call.arguments(exchange->grouped_gemm_names, 3, args, count, keywords, &given)) return nullptr;
  Operand *a = call.read("a", given.a);
  Operand *b = a ? call.read("b", given.b) : nullptr;
  Operand *end = b ? call.read("group_end", given.group_end) : nullptr;
  Operand *start = end ? call.read_optional("group_start", given.group_start) : nullptr;
  Operand *bias = start ? call.read_optional("bias", given.bias) : nullptr;
  Operand *out = bias ? call.read_optional("out", given.out, true) : nullptr;
  if (!out) return nullptr;
  pydet_grouped_gemm_options options = {};
  options.struct_size = sizeof options;
  int64_t type = -1;
  if (!read_sum_options(call, given, &options, &type)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel)) return nullptr;
  if (!call.choose_library(given.stream) || !type_agrees(call, "out", *out, type)) return nullptr;
  const pydet_tensor &x = a->tensor, &y = b->tensor;
  if (!out->present) {
    if (!starts_from_zero(call, "grouped_gemm", options.accumulate)) return nullptr;
    const bool rows = y.ndim == 3, depth = y.ndim == 2 && end->tensor.ndim == 1;
    if (x.ndim == 2 && (rows || depth) && sound(x, 2) && sound(y, 2)) {
      const int64_t groups = depth ? end->tensor.shape[0] : 0;
      int64_t shape[3] = {rows ? x.shape[0] : groups, rows ? y.shape[2] : x.shape[0], y.shape[y.ndim - 1]};
      if (groups < 0) return call.refuse("group_end", "of a negative extent", PYDET_INVALID_SHAPE), nullptr;
      if (!(out = call.make(rows ? 2 : 3, shape, type < 0 ? type_index(x.dtype) : int(type)))) return nullptr;
    }
  }
  const int64_t most = sound(x, 2) && sound(y, 2) ? product_work(x, y.shape[y.ndim - 1]) : 0;  // of every token
  const bool done = call.run(most, [&](void *stream) {
    return call.library().grouped_gemm(stream, tensor_of(a), tensor_of(b), tensor_of(bias), tensor_of(start),
                                       tensor_of(end), tensor_of(out), &options);
  });
  return done ? call.result(out) : nullptr;
}

// ---- Scaled GEMM and quantisation --------------------------------------------------------------------------------

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
  options.struct_size = sizeof options;
  options.k_chunk = kScaleGroup;
  int64_t type = -1;
  if (!read_sum_options(call, given, &options, &type)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel)) return nullptr;
  if (!call.choose_library(given.stream) || !type_agrees(call, "out", *out, type)) return nullptr;
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

// ---- RMSNorm -----------------------------------------------------------------------------------------------------

// Makes what the caller did not give; an x that has no rows or is of another type is the operation's to refuse.
bool make_like(PythonCall &call, const pydet_tensor &x, int ndim, int type, Operand **operand) {
  if ((*operand)->present || !sound(x, 1)) return true;
  *operand = call.make(ndim, x.shape, type);
  return *operand != nullptr;
}

// -> (y, rstd), and sum where there is a residual
Object *call_rmsnorm(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("rmsnorm");
  pydet_rmsnorm_arguments given;
  if (!call.arguments(exchange->rmsnorm_names, 3, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);
  Operand *residual = x ? call.read_optional("residual", given.residual) : nullptr;
  Operand *weight = residual ? call.read_optional("weight", given.weight) : nullptr;
  Operand *y = weight ? call.read_optional("out", given.out, true) : nullptr;
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
  if (residual->present && !make_like(call, x->tensor, x->tensor.ndim, type, &sum)) return nullptr;

  const bool done = call.run(elements(x->tensor), [&](void *stream) {
    return call.library().rmsnorm(stream, tensor_of(x), tensor_of(residual), tensor_of(weight), tensor_of(y),
                                  tensor_of(rstd), tensor_of(sum), &options);
  });
  Operand *results[] = {y, rstd, sum};
  return done ? call.results(results, sum->present ? 3 : 2) : nullptr;
}

// -> (dx, dweight or None)
Object *call_rmsnorm_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("rmsnorm_backward");
  pydet_rmsnorm_backward_arguments given;
  if (!call.arguments(exchange->rmsnorm_backward_names, 4, args, count, keywords, &given)) return nullptr;
  Operand *dy = call.read("dy", given.dy);
  Operand *x = dy ? call.read("x", given.x) : nullptr;
  Operand *weight = x ? call.read_optional("weight", given.weight) : nullptr;
  Operand *rstd = weight ? call.read("rstd", given.rstd) : nullptr;
  Operand *dresidual = rstd ? call.read_optional("dresidual", given.dresidual) : nullptr;
  Operand *dx = dresidual ? call.read_optional("out", given.out, true) : nullptr;
  Operand *dweight = dx ? call.read_optional("dweight", given.dweight, true) : nullptr;
  if (!dweight) return nullptr;
  pydet_rmsnorm_backward_options options = {};
  options.struct_size = sizeof options;
  int64_t type = -1;
  if (!call.integer_of("dweight_dtype", given.dweight_dtype, &type)) return nullptr;
  if (!call.float_of("weight_offset", given.weight_offset, &options.weight_offset)) return nullptr;
  if (!call.flag_of("accumulate", given.accumulate, &options.accumulate)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel)) return nullptr;
  if (!call.choose_library(given.stream) || !type_agrees(call, "dweight", *dweight, type)) return nullptr;
  if (options.accumulate && !dweight->present)
    return call.fail(PYDET_INVALID_VALUE,
                     "rmsnorm_backward: accumulate needs dweight, the float32 tensor to continue from"),
           nullptr;
  if (!make_like(call, x->tensor, x->tensor.ndim, type_index(x->tensor.dtype), &dx)) return nullptr;
  if (!dweight->present && weight->present && sound(weight->tensor, 1) && weight->tensor.ndim == 1) {
    if (type < 0) type = type_index(weight->tensor.dtype);
    if (!(dweight = call.make(1, weight->tensor.shape, int(type)))) return nullptr;
  }
  const int64_t total = elements(x->tensor), n = sound(x->tensor, 1) ? x->tensor.shape[x->tensor.ndim - 1] : 0;
  if (dweight->present && n > 0) {
    uint64_t bytes = 0;
    if (call.library().rmsnorm_backward_workspace(total / n, n, &bytes) != PYDET_OK) bytes = 0;
    if (!call.make_workspace(bytes, &options.workspace, &options.workspace_size)) return nullptr;
  }

  const bool done = call.run(total, [&](void *stream) {
    return call.library().rmsnorm_backward(stream, tensor_of(dy), tensor_of(x), tensor_of(weight), tensor_of(rstd),
                                           tensor_of(dresidual), tensor_of(dx), tensor_of(dweight), &options);
  });
  Operand *results[] = {dx, dweight};
  return done ? call.results(results, 2) : nullptr;
}

// ---- LayerNorm ---------------------------------------------------------------------------------------------------

// -> (y, mean, rstd), and sum where there is a residual
Object *call_layernorm(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("layernorm");
  pydet_layernorm_arguments given;
  if (!call.arguments(exchange->layernorm_names, 4, args, count, keywords, &given)) return nullptr;
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
    return call.library().layernorm(stream, tensor_of(x), tensor_of(residual), tensor_of(weight), tensor_of(bias),
                                    tensor_of(y), tensor_of(mean), tensor_of(rstd), tensor_of(sum), &options);
  });
  Operand *results[] = {y, mean, rstd, sum};
  return done ? call.results(results, sum->present ? 4 : 3) : nullptr;
}

// -> (dx, dweight or None, dbias or None)
Object *call_layernorm_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("layernorm_backward");
  pydet_layernorm_backward_arguments given;
  if (!call.arguments(exchange->layernorm_backward_names, 5, args, count, keywords, &given)) return nullptr;
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
  if (!call.integer_of("dweight_dtype", given.dweight_dtype, &type)) return nullptr;
  if (!call.flag_of("has_bias", given.has_bias, &has_bias)) return nullptr;
  if (!call.float_of("weight_offset", given.weight_offset, &options.weight_offset)) return nullptr;
  if (!call.flag_of("accumulate", given.accumulate, &options.accumulate)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel)) return nullptr;
  if (!call.choose_library(given.stream) || !type_agrees(call, "dweight", *dweight, type)) return nullptr;
  if (options.accumulate && !dweight->present && !dbias->present)
    return call.fail(PYDET_INVALID_VALUE,
                     "layernorm_backward: accumulate needs dweight or dbias, the float32 tensors to continue from"),
           nullptr;
  if (!make_like(call, x->tensor, x->tensor.ndim, type_index(x->tensor.dtype), &dx)) return nullptr;
  if (!options.accumulate && weight->present && sound(weight->tensor, 1) && weight->tensor.ndim == 1) {
    if (type < 0) type = type_index(weight->tensor.dtype);
    if (!dweight->present && !(dweight = call.make(1, weight->tensor.shape, int(type)))) return nullptr;
    if (has_bias && !dbias->present && !(dbias = call.make(1, weight->tensor.shape, int(type)))) return nullptr;
  }
  const int64_t total = elements(x->tensor), n = sound(x->tensor, 1) ? x->tensor.shape[x->tensor.ndim - 1] : 0;
  if ((dweight->present || dbias->present) && n > 0) {
    uint64_t bytes = 0;
    if (call.library().layernorm_backward_workspace(total / n, n, &bytes) != PYDET_OK) bytes = 0;
    if (!call.make_workspace(bytes, &options.workspace, &options.workspace_size)) return nullptr;
  }

  const bool done = call.run(total, [&](void *stream) {
    return call.library().layernorm_backward(stream, tensor_of(dy), tensor_of(x), tensor_of(weight), tensor_of(mean),
                                             tensor_of(rstd), tensor_of(dresidual), tensor_of(dx), tensor_of(dweight),
                                             tensor_of(dbias), &options);
  });
  Operand *results[] = {dx, dweight, dbias};
  return done ? call.results(results, 3) : nullptr;
}

// ---- Softmax -----------------------------------------------------------------------------------------------------

// The arguments of the methods below: operands, then these three.
template <int count> struct RowArguments {
  Object *operands[count], *out, *kernel, *stream;
};
static_assert(sizeof(RowArguments<1>) == sizeof(pydet_softmax_arguments) &&
                  sizeof(RowArguments<2>) == sizeof(pydet_softmax_backward_arguments) &&
                  sizeof(RowArguments<2>) == sizeof(pydet_log_prob_arguments) &&
                  sizeof(RowArguments<3>) == sizeof(pydet_log_prob_backward_arguments),
              "as python.h has them");

// What they have of their own: the operands' names, which of them the result is like, and whether that has one number a
// row of it, in fp32.
template <int count> struct RowWords {
  const char *op, *operands[count];
  int like;
  bool one_a_row;
};

// -> the result, which operation(library, stream, descriptors of the operands, of the result) has filled in
template <int count, class Options, class Operation>
Object *call_rows(const RowWords<count> &words, Object *const *names, Options *options, const Operation &operation,
                  Object *const *args, intptr_t given_count, Object *keywords) {
  PythonCall call(words.op);
  RowArguments<count> given;
  if (!call.arguments(names, count, args, given_count, keywords, &given)) return nullptr;
  Operand *operands[count];
  for (int i = 0; i < count; ++i)
    if (!(operands[i] = call.read(words.operands[i], given.operands[i]))) return nullptr;
  Operand *out = call.read_optional("out", given.out, true);
  options->struct_size = sizeof *options;
  if (!out || !call.text_of("kernel", given.kernel, &options->kernel) || !call.choose_library(given.stream))
    return nullptr;
  const pydet_tensor &like = operands[words.like]->tensor;
  const int ndim = words.one_a_row ? (like.ndim < 1 ? 0 : like.ndim - 1) : like.ndim;
  if (!make_like(call, like, ndim, words.one_a_row ? int(Type::f32) : type_index(like.dtype), &out)) return nullptr;
  const pydet_tensor *tensors[count];
  for (int i = 0; i < count; ++i) tensors[i] = tensor_of(operands[i]);
  const bool done = call.run(elements(like),
                             [&](void *stream) { return operation(call.library(), stream, tensors, tensor_of(out)); });
  return done ? call.result(out) : nullptr;
}

using Tensors = const pydet_tensor *const *;

template <bool log> Object *call_softmax(Object *, Object *const *args, intptr_t count, Object *keywords) {
  pydet_softmax_options options = {};
  options.log = log;
  return call_rows<1>(
      {log ? "log_softmax" : "softmax", {"x"}, 0, false}, exchange->softmax_names, &options,
      [&](const Library &library, void *stream, Tensors in, const pydet_tensor *y) {
        return library.softmax(stream, in[0], y, &options);
      },
      args, count, keywords);
}

template <bool log> Object *call_softmax_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  pydet_softmax_options options = {};
  options.log = log;
  return call_rows<2>(
      {log ? "log_softmax_backward" : "softmax_backward", {"dy", "y"}, 1, false}, exchange->softmax_backward_names,
      &options,
      [&](const Library &library, void *stream, Tensors in, const pydet_tensor *dx) {
        return library.softmax_backward(stream, in[0], in[1], dx, &options);
      },
      args, count, keywords);
}

Object *call_log_prob(Object *, Object *const *args, intptr_t count, Object *keywords) {
  pydet_log_prob_options options = {};
  return call_rows<2>(
      {"log_prob", {"x", "index"}, 0, true}, exchange->log_prob_names, &options,
      [&](const Library &library, void *stream, Tensors in, const pydet_tensor *log_prob) {
        return library.log_prob(stream, in[0], in[1], log_prob, &options);
      },
      args, count, keywords);
}

Object *call_log_prob_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  pydet_log_prob_options options = {};
  return call_rows<3>(
      {"log_prob_backward", {"dlog_prob", "x", "index"}, 1, false}, exchange->log_prob_backward_names, &options,
      [&](const Library &library, void *stream, Tensors in, const pydet_tensor *dx) {
        return library.log_prob_backward(stream, in[0], in[1], in[2], dx, &options);
      },
      args, count, keywords);
}

// ---- Fold --------------------------------------------------------------------------------------------------------

// -> out
Object *call_fold(Object *, Object *const *args, intptr_t count, Object *keywords) {
  constexpr int kMost = PYDET_FOLD_PARTS;
  Operand room[kMost];
  PythonCall call("fold", room);
  pydet_fold_arguments given;
  if (!call.arguments(exchange->fold_names, 1, args, count, keywords, &given)) return nullptr;
  pydet_tensor slices[kMost];
  const pydet_tensor *parts[kMost];
  int32_t is_tuple = 0;
  if (!call.flag_of("is_tuple", given.is_tuple, &is_tuple)) return nullptr;
  const intptr_t length = is_tuple ? python().PyTuple_Size(given.parts) : 1;
  char sentence[120];
  snprintf(sentence, sizeof sentence, "a sequence of %lld, want 1 to %d parts", static_cast<long long>(length), kMost);
  if (length < 1 || length > kMost) return call.refuse("parts", sentence), nullptr;
  Operand *first = nullptr;
  for (int i = 0; i < length; ++i) {
    char name[24] = "parts";
    if (is_tuple) snprintf(name, sizeof name, "parts[%d]", i);
    Operand *part = call.read(name, is_tuple ? python().PyTuple_GetItem(given.parts, i) : given.parts);
    if (!part) return nullptr;
    if (i == 0) first = part;
    parts[i] = &part->tensor;
  }
  Operand *bias = call.read_optional("bias", given.bias);
  Operand *out = bias ? call.read_optional("out", given.out, true) : nullptr;
  if (!out) return nullptr;
  pydet_fold_options options = {};
  options.struct_size = sizeof options;
  int64_t type = -1;
  if (!call.integer_of("out_dtype", given.out_dtype, &type)) return nullptr;
  if (!call.number_of("order", exchange->orders, given.order, &options.order)) return nullptr;
  if (!call.flag_of("accumulate", given.accumulate, &options.accumulate)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel)) return nullptr;
  if (!call.choose_library(given.stream) || !type_agrees(call, "out", *out, type)) return nullptr;
  if (!out->present && !starts_from_zero(call, "fold", options.accumulate)) return nullptr;

  // The parts of one tensor lie along its first dimension.
  pydet_tensor like = first->tensor;
  int32_t used = int32_t(length);
  if (!is_tuple) {
    if (!sound(like, 1) || like.shape[0] < 1 || like.shape[0] > kMost) {
      snprintf(sentence, sizeof sentence, "no float tensor of 1 to %d parts along its first dimension", kMost);
      return call.refuse("parts", sentence), nullptr;
    }
    used = int32_t(like.shape[0]);
    int64_t step = 1;
    for (int d = 1; d < like.ndim; ++d)
      if (__builtin_mul_overflow(step, like.shape[d], &step)) step = 0;  // too large to lie anywhere: refused below
    if (like.strides) step = like.strides[0];
    if (step < 0 && used > 1) return call.refuse("parts", "a tensor whose first stride is negative"), nullptr;
    like.ndim -= 1, like.shape += 1;
    if (like.strides) like.strides += 1;
    const int64_t bytes = like.dtype.bits / 8;
    for (int32_t i = 0; i < used; ++i) {
      slices[i] = like;
      slices[i].byte_offset += uint64_t(i) * uint64_t(step) * uint64_t(bytes);
      parts[i] = &slices[i];
    }
  }
  if (!out->present && sound(like, 0) &&
      !(out = call.make(like.ndim, like.shape, type < 0 ? int(Type::f32) : int(type))))
    return nullptr;
  const int64_t work = elements(like);
  const bool done = call.run(work < kGilWork ? work * used : work, [&](void *stream) {
    return call.library().fold(stream, parts, used, tensor_of(bias), tensor_of(out), &options);
  });
  return done ? call.result(out) : nullptr;
}

const MethodDef kMethods[] = {
    {"gemm", call_product<Product::gemm>, kFastCallKeywords, nullptr},
    {"gemm_da", call_product<Product::gemm_da>, kFastCallKeywords, nullptr},
    {"gemm_db", call_product<Product::gemm_db>, kFastCallKeywords, nullptr},
    {"skinny_gemm", call_product<Product::skinny_gemm>, kFastCallKeywords, nullptr},
    {"scaled_gemm", call_scaled_gemm, kFastCallKeywords, nullptr},
    {"quantize", call_quantize, kFastCallKeywords, nullptr},
    {"rmsnorm", call_rmsnorm, kFastCallKeywords, nullptr},
    {"rmsnorm_backward", call_rmsnorm_backward, kFastCallKeywords, nullptr},
    {"layernorm", call_layernorm, kFastCallKeywords, nullptr},
    {"layernorm_backward", call_layernorm_backward, kFastCallKeywords, nullptr},
    {"softmax", call_softmax<false>, kFastCallKeywords, nullptr},
    {"log_softmax", call_softmax<true>, kFastCallKeywords, nullptr},
    {"softmax_backward", call_softmax_backward<false>, kFastCallKeywords, nullptr},
    {"log_softmax_backward", call_softmax_backward<true>, kFastCallKeywords, nullptr},
    {"log_prob", call_log_prob, kFastCallKeywords, nullptr},
    {"log_prob_backward", call_log_prob_backward, kFastCallKeywords, nullptr},
    {"grouped_gemm", call_grouped_gemm, kFastCallKeywords, nullptr},
    {"fold", call_fold, kFastCallKeywords, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace pydet

const void *pydet_exchange_methods(const pydet_exchange *exchange) {
  using namespace pydet;
  static int64_t owner = -1;  // the interpreter that may use the hooks
  if (exchange->struct_size != sizeof(pydet_exchange)) {
    fail(PYDET_UNSUPPORTED, "this library was built for another release of the Python package; build both anew");
    return nullptr;
  }
  int64_t none = -1;
  if (!__atomic_compare_exchange_n(&owner, &none, exchange->interpreter, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) &&
      none != exchange->interpreter) {
    fail(PYDET_UNSUPPORTED, "pydet is in use by another interpreter of this process; import it in one of them only");
    return nullptr;
  }
  pydet::exchange = exchange;
  return kMethods;
}

void pydet_exchange_forget_devices(void) {
  if (const pydet::Backend *gpu = pydet::gpu_backend()) gpu->forget();
}

const char *pydet_exchange_type(int32_t index, pydet_dtype *dtype) {
  if (index < 0 || index >= pydet::kTypeCount) return nullptr;
  *dtype = pydet::dtype_of(index);
  return pydet::kTypes[index].name;
}

int32_t pydet_exchange_last_library(void) { return pydet::last_library; }
