// GEMM, its two gradients, skinny GEMM; grouped GEMM.
#include "entry/python/methods.h"
#include "entry/python/results.h"

namespace pydet {
namespace {

struct ProductWords {
  const char *op, *first, *second;
};
constexpr ProductWords kProductWords[] = {
    {"gemm", "a", "b"}, {"gemm_da", "dc", "b"}, {"gemm_db", "a", "dc"}, {"skinny_gemm", "x", "w"}};

}  // namespace

template <Product product> Object *call_product(Object *, Object *const *args, intptr_t count, Object *keywords) {
  constexpr ProductWords words = kProductWords[int(product)];
  constexpr bool skinny = product == Product::skinny_gemm;
  PythonCall call(words.op);
  pydet_product_arguments given;
  if (!call.arguments(exchange->product_names, 2, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read(words.first, given.first);
  Operand *y = x ? call.read(words.second, given.second) : nullptr;
  Operand *bias = y ? call.read_optional("bias", given.bias) : nullptr;
  Operand *initial = bias ? call.read_optional("initial", given.initial) : nullptr;
  Operand *out = initial ? call.read_optional("out", given.out, true) : nullptr;
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
  const bool apart = initial->present && out->present && type_index(out->tensor.dtype) != int(Type::f32);
  if (apart) plain.initial = options.initial = tensor_of(initial);  // so that the workspace has room for the sums
  if (((call.on_gpu() && call.can_allocate()) || apart) && out->present && sound(out->tensor, skinny ? 1 : 2)) {
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
  plain.initial = options.initial = tensor_of(initial);

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

template Object *call_product<Product::gemm>(Object *, Object *const *, intptr_t, Object *);
template Object *call_product<Product::gemm_da>(Object *, Object *const *, intptr_t, Object *);
template Object *call_product<Product::gemm_db>(Object *, Object *const *, intptr_t, Object *);
template Object *call_product<Product::skinny_gemm>(Object *, Object *const *, intptr_t, Object *);

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

}  // namespace pydet
