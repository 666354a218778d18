// Argument checks of the softmax family, over those of the norms.
#pragma once

#include "ops/norm/check.h"

namespace pydet {

// x [..., N] and what is written like it, which may be absent; softmax->rows is 0 where there is nothing to write.
inline pydet_status softmax_of(void *stream, const View &x, const View &like_x, Softmax *softmax) {
  PYDET_TRY(unit_last_stride(x));
  const View *like[] = {&like_x};
  PYDET_TRY(check_norm(x, like, 1, View{}, View{}));
  PYDET_TRY(no_self_overlap(like_x));
  PYDET_TRY(disjoint(like_x, x));
  RowWalk walk;
  const View *walked[] = {&x, &like_x};
  PYDET_TRY(walk_rows(walked, 2, &walk));
  softmax->device = x.device;
  softmax->stream = stream;
  softmax->rows = walk.rows;
  softmax->inner = walk.inner;
  softmax->n = x.cols();
  softmax->x = rows_of(x, walk, 0);
  softmax->y = rows_of(like_x, walk, 1);
  return PYDET_OK;
}

// Whole numbers of x's device: int64, or int32 where they may be narrow. Of as many dimensions as x, or one less. They are
// seen as the words of 4 bytes that they are made of, which lie along one dimension more.
struct WholeNumbers {
  View words;
  bool wide;
};
inline pydet_status whole_numbers(const View &x, const char *name, const pydet_tensor *tensor, const int64_t *want,
                                  int ndim, bool may_be_narrow, WholeNumbers *numbers) {
  if (!tensor) return fail(PYDET_NULL_POINTER, "%s: %s is NULL, want a tensor", x.op, name);
  const bool integers = tensor->dtype.code == PYDET_INT && tensor->dtype.lanes == 1;
  if (!integers || !(tensor->dtype.bits == 64 || (may_be_narrow && tensor->dtype.bits == 32)))
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want %sint64", x.op, name, dtype_text(tensor->dtype).text,
                may_be_narrow ? "int32 or " : "");
  if (tensor->ndim != ndim || (ndim > 0 && !tensor->shape))
    return fail(PYDET_INVALID_SHAPE, "%s: %s has %d dimensions, want %d, %s %s%s", x.op, name, int(tensor->ndim), ndim,
                ndim < x.ndim ? "one less than" : "as", x.name, ndim < x.ndim ? "" : " has");
  for (int i = 0; i < ndim; ++i)
    if (tensor->shape[i] != want[i])
      return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want %s", x.op, name, shape_text(tensor->shape, ndim).text,
                  shape_text(want, ndim).text);
  const int64_t words = tensor->dtype.bits / 32;
  int64_t shape[kMaxDims], stride[kMaxDims];
  for (int i = 0; i < ndim; ++i) {
    shape[i] = tensor->shape[i];
    stride[i] = 0;
    if (tensor->strides && __builtin_mul_overflow(tensor->strides[i], words, &stride[i]))
      return fail(PYDET_OVERFLOW, "%s: %s has stride %" PRId64 " in dimension %d, which reaches past 2^63 - 1 bytes",
                  x.op, name, tensor->strides[i], i);
  }
  int dims = ndim;
  if (ndim == kMaxDims) {  // one more there may not be: they lie along the last
    if (__builtin_mul_overflow(shape[ndim - 1], words, &shape[ndim - 1]))
      return fail(PYDET_OVERFLOW, "%s: %s is %s, which reaches past 2^63 - 1 bytes", x.op, name,
                  shape_text(want, ndim).text);
    if (tensor->strides && (want[ndim - 1] <= 1 || tensor->strides[ndim - 1] == 1)) stride[ndim - 1] = 1;
  } else {
    shape[ndim] = words;
    stride[dims++] = 1;
  }
  pydet_tensor as_words = {tensor->data,         tensor->device, dims,
                           {PYDET_FLOAT, 32, 1}, shape,          tensor->strides ? stride : nullptr,
                           tensor->byte_offset};
  View &view = numbers->words;
  PYDET_TRY(read(x.op, name, kNormVector, &as_words, 1, &view));
  PYDET_TRY(same_device(x, view));
  PYDET_TRY(contiguous(view));
  if (reinterpret_cast<uintptr_t>(view.data) % uintptr_t(4 * words))
    return fail(PYDET_MISALIGNED, "%s: %s has data at %p, want a multiple of %d bytes", x.op, name,
                static_cast<void *>(view.data), int(4 * words));
  numbers->wide = words == 2;
  return PYDET_OK;
}

// One number a row of x [..., N], in fp32 and contiguous; it may be absent.
inline pydet_status one_a_row(const View &x, const View &vector) {
  if (!vector.present()) return PYDET_OK;
  PYDET_TRY(same_device(x, vector));
  PYDET_TRY(want_shape(vector, x.shape, x.ndim - 1));
  PYDET_TRY(contiguous(vector));
  if (vector.type == Type::f32) return PYDET_OK;
  return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want float32", x.op, vector.name, type_name(vector.type));
}

// What goes with each row of x [..., N]: `vector` [...] in fp32, and the column numbers, [...] in int32 or int64, apart
// from `written`.
inline pydet_status columns_of(const View &x, const pydet_tensor *index, const View &vector, const View &written,
                               Columns *columns) {
  PYDET_TRY(one_a_row(x, vector));
  WholeNumbers numbers = {};
  PYDET_TRY(whole_numbers(x, "index", index, x.shape, x.ndim - 1, true, &numbers));
  PYDET_TRY(disjoint(written, numbers.words));
  *columns = {numbers.words.data, numbers.wide};
  return PYDET_OK;
}

}  // namespace pydet
