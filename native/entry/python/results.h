// What results are where the caller gave none: their shapes and types, and what a product's options say of them.
#pragma once

#include "entry/python/call.h"

namespace pydet {

inline int64_t elements(const pydet_tensor &tensor) {
  int64_t count = 1;
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.ndim > kDims || __builtin_mul_overflow(count, tensor.shape[i], &count)) return kGilWork;
  return count;
}

// An output's type, asked for where the output is given too.
inline bool type_agrees(PythonCall &call, const char *name, const Operand &out, int64_t asked) {
  if (asked < 0 || !out.present) return true;
  const int have = type_index(out.tensor.dtype);
  if (asked == have) return true;
  char what[120];
  snprintf(what, sizeof what, "%s, and %s_dtype asks for %s", have < 0 ? "of another type" : kTypes[have].name, name,
           kTypes[asked].name);
  return call.refuse(name, what, PYDET_INVALID_DTYPE);
}

enum class Product { gemm, gemm_da, gemm_db, skinny_gemm };

// The shape of the result, as far as the operands have one: where they do not fit, an empty tensor of the right rows
// and columns, which no operation accepts and which costs nothing.
inline void product_shape(Product product, const pydet_tensor &x, const pydet_tensor &y, int *ndim, int64_t *shape) {
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
inline int64_t product_work(const pydet_tensor &out, int64_t depth) {
  int64_t work;
  return __builtin_mul_overflow(elements(out), depth, &work) ? kGilWork : work;
}

// What all products' options have; *type stays as it is where no type of the result is asked for.
template <class Given, class Options>
inline bool read_sum_options(PythonCall &call, const Given &given, Options *options, int64_t *type) {
  return call.type_of("out_dtype", given.out_dtype, type) &&
         call.flag_of("accumulate", given.accumulate, &options->accumulate) &&
         call.number_of("arithmetic", exchange->arithmetics, given.arithmetic, &options->arithmetic) &&
         call.integer_of("k_chunk", given.k_chunk, &options->k_chunk);
}

// Where there is no out: accumulate would have nothing to continue from.
inline bool starts_from_zero(PythonCall &call, const char *op, int32_t accumulate) {
  if (!accumulate) return true;
  char sentence[160];
  snprintf(sentence, sizeof sentence, "%s: accumulate needs out, the float32 tensor to continue from", op);
  return call.fail(PYDET_INVALID_VALUE, sentence), false;
}

// Room for the sums of a product that begins at `initial`, if out is not fp32.
template <class Options>
inline bool make_room_for_sums(PythonCall &call, const Operand &initial, const Operand &out, Options *options) {
  constexpr int64_t kMost = int64_t(1) << 58;  // beyond it the operation says what is wrong
  options->initial = tensor_of(&initial);
  if (!initial.present || !out.present || !sound(out.tensor, 2) || type_index(out.tensor.dtype) == int(Type::f32))
    return true;
  const int64_t count = elements(out.tensor);
  if (count > kMost) return true;
  return call.make_workspace((uint64_t(count) * 4 + 15) / 16 * 16, &options->workspace, &options->workspace_size);
}

// Makes what the caller did not give; an x that has no rows or is of another type is the operation's to refuse.
inline bool make_like(PythonCall &call, const pydet_tensor &x, int ndim, int type, Operand **operand) {
  if ((*operand)->present || !sound(x, 1)) return true;
  *operand = call.make(ndim, x.shape, type);
  return *operand != nullptr;
}

}  // namespace pydet
