// GEMM, its two gradients, skinny GEMM.
#include "entry/python/methods.h"

namespace pydet {
namespace {

// In this order in every method: a and b, dc and b, a and dc, x and w. Tensors may be None but for these two.
struct ProductArguments {
  PYDET_ARGUMENTS(first, second,  // positional
                  bias, out,
                  out_dtype,  // a type index or None
                  accumulate, arithmetic,
                  k_chunk,  // or None
                  initial, mode, weights_constant,
                  kernel,   // or None
                  stream);  // an address or None
};

struct ProductWords {
  const char *op, *first, *second;
};
constexpr ProductWords kProductWords[] = {
    {"gemm", "a", "b"}, {"gemm_da", "dc", "b"}, {"gemm_db", "a", "dc"}, {"skinny_gemm", "x", "w"}};

// Whether a kernel might want a copy of the operand, which the library says for certain.
bool may_be_copied(const pydet_tensor &x) {
  constexpr int64_t kUnit = 16;  // bytes
  const int64_t size = x.dtype.bits / 8;
  if ((reinterpret_cast<uintptr_t>(x.data) + x.byte_offset) % kUnit) return true;
  int64_t dense = 1;
  bool adjacent = false;  // a dimension whose elements are
  for (int i = x.ndim - 1; i >= 0; dense *= x.shape[i--]) {
    const int64_t stride = x.strides ? x.strides[i] : dense;
    if (x.shape[i] <= 1) continue;
    if (stride == 1 && !adjacent) adjacent = true;
    else if (stride == 0 || stride * size % kUnit) return true;
  }
  return false;
}

uint64_t bytes_of_copy(const Library &library, const Operand &operand) {
  uint64_t bytes = 0;
  if (!operand.present || !may_be_copied(operand.tensor)) return 0;
  return library.call<pydet_gemm_copy_workspace>(&operand.tensor, &bytes) == PYDET_OK ? bytes : 0;
}

template <Product product> Object *call_product(Object *, Object *const *args, intptr_t count, Object *keywords) {
  constexpr ProductWords words = kProductWords[int(product)];
  constexpr bool skinny = product == Product::skinny_gemm;
  PythonCall call(words.op);
  ProductArguments given;
  if (!call.arguments(names_of<ProductArguments>, 2, args, count, keywords, &given)) return nullptr;
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
    pydet_status status = skinny ? library.call<pydet_skinny_gemm_workspace>(batch * m, n, depth, &options, &bytes)
                                 : library.call<pydet_gemm_workspace>(batch, m, n, depth, &plain, &bytes);
    if (status != PYDET_OK) bytes = 0;  // the operation will say it better
    else if (call.on_gpu() && call.can_allocate()) bytes += bytes_of_copy(library, *x) + bytes_of_copy(library, *y);
    if (!call.make_workspace(bytes, &options.workspace, &options.workspace_size)) return nullptr;
    plain.workspace = options.workspace;
    plain.workspace_size = options.workspace_size;
  }
  plain.initial = options.initial = tensor_of(initial);

  const pydet_tensor *px = tensor_of(x), *py = tensor_of(y), *pbias = tensor_of(bias), *pout = tensor_of(out);
  const bool done = call.run(work, [&](void *stream) {
    switch (product) {
      case Product::gemm: return library.call<pydet_gemm>(stream, px, py, pbias, pout, &plain);
      case Product::gemm_da: return library.call<pydet_gemm_da>(stream, px, py, pout, &plain);
      case Product::gemm_db: return library.call<pydet_gemm_db>(stream, px, py, pout, &plain);
      case Product::skinny_gemm: return library.call<pydet_skinny_gemm>(stream, px, py, pbias, pout, &options);
    }
    return pydet_status(PYDET_INVALID_VALUE);
  });
  return done ? call.result(out) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<ProductArguments>("gemm", call_product<Product::gemm>),
    method<ProductArguments>("gemm_da", call_product<Product::gemm_da>),
    method<ProductArguments>("gemm_db", call_product<Product::gemm_db>),
    method<ProductArguments>("skinny_gemm", call_product<Product::skinny_gemm>),
};

}  // namespace

Items<pydet_exchange_method> Operation<Gemm>::python() { return kMethods; }

}  // namespace pydet
