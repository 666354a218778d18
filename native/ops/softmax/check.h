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

// What goes with each row of x [..., N]: `vector` [...] in fp32, and the column numbers, [...] in int32 or int64, apart
// from `written`.
inline pydet_status columns_of(const View &x, const pydet_tensor *index, const View &vector, const View &written,
                               Columns *columns) {
  const int ndim = x.ndim - 1;
  PYDET_TRY(same_device(x, vector));
  PYDET_TRY(want_shape(vector, x.shape, ndim));
  PYDET_TRY(contiguous(vector));
  if (vector.type != Type::f32)
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want float32", x.op, vector.name, type_name(vector.type));
  if (!index) return fail(PYDET_NULL_POINTER, "%s: index is NULL, want a tensor", x.op);
  const bool integers = index->dtype.code == PYDET_INT && index->dtype.lanes == 1;
  if (!integers || (index->dtype.bits != 32 && index->dtype.bits != 64))
    return fail(PYDET_INVALID_DTYPE, "%s: index is %s, want int32 or int64", x.op, dtype_text(index->dtype).text);
  if (index->ndim != ndim || (ndim > 0 && !index->shape))
    return fail(PYDET_INVALID_SHAPE, "%s: index has %d dimensions, want %d, one less than x", x.op, int(index->ndim),
                ndim);
  for (int i = 0; i < ndim; ++i)
    if (index->shape[i] != x.shape[i])
      return fail(PYDET_INVALID_SHAPE, "%s: index is %s, want %s", x.op, shape_text(index->shape, ndim).text,
                  shape_text(x.shape, ndim).text);
  // Checked as the words of 4 bytes that it is made of, which lie along one dimension more.
  const int64_t words = index->dtype.bits / 32;
  int64_t shape[kMaxDims], stride[kMaxDims];
  for (int i = 0; i < ndim; ++i) {
    shape[i] = index->shape[i];
    if (index->strides && __builtin_mul_overflow(index->strides[i], words, &stride[i]))
      return fail(PYDET_OVERFLOW, "%s: index has stride %" PRId64 " in dimension %d, which reaches past 2^63 - 1 bytes",
                  x.op, index->strides[i], i);
  }
  shape[ndim] = words;
  stride[ndim] = 1;
  pydet_tensor as_words = {index->data,          index->device, ndim + 1,
                           {PYDET_FLOAT, 32, 1}, shape,         index->strides ? stride : nullptr,
                           index->byte_offset};
  View view;
  PYDET_TRY(read(x.op, "index", kNormVector, &as_words, 1, &view));
  PYDET_TRY(same_device(x, view));
  PYDET_TRY(contiguous(view));
  PYDET_TRY(disjoint(written, view));
  if (reinterpret_cast<uintptr_t>(view.data) % uintptr_t(4 * words))
    return fail(PYDET_MISALIGNED, "%s: index has data at %p, want a multiple of %d bytes", x.op,
                static_cast<void *>(view.data), int(4 * words));
  *columns = {view.data, words == 2};
  return PYDET_OK;
}

}  // namespace pydet
