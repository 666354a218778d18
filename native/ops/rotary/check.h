// Argument checks of rotary embeddings, over those of the softmax family.
#pragma once

#include "ops/softmax/check.h"

namespace pydet {

constexpr int64_t kMostFrequencies = int64_t(1) << 31;

// Positions, one a row of `rows` [..., C]: whole numbers, or others.
struct Positions {
  View view;
  bool are_whole, wide;
  Columns whole() const { return are_whole ? Columns{view.data, wide} : Columns{}; }
  Vector real() const { return are_whole ? Vector{} : vector_of(view); }
};
inline pydet_status positions_of(const View &rows, const pydet_tensor *tensor, Positions *positions) {
  const char *name = "positions";
  if (!tensor) return fail(PYDET_NULL_POINTER, "%s: %s is NULL, want a tensor", rows.op, name);
  positions->are_whole = tensor->dtype.code == PYDET_INT;
  if (positions->are_whole) {
    WholeNumbers numbers = {};
    PYDET_TRY(whole_numbers(rows, name, tensor, rows.shape, rows.ndim - 1, true, &numbers));
    positions->view = numbers.words;
    positions->wide = numbers.wide;
    return PYDET_OK;
  }
  PYDET_TRY(read(rows.op, name, kNormVector, tensor, 0, &positions->view));
  PYDET_TRY(same_device(rows, positions->view));
  PYDET_TRY(want_shape(positions->view, rows.shape, rows.ndim - 1));
  return contiguous(positions->view);
}

inline pydet_status check_scale(const char *op, float scale) {
  const uint32_t size = bits_of(scale) & 0x7FFFFFFFu;
  if (size != 0 && size < 0x7F800000u) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: scale is %g, want a finite number other than 0", op, double(scale));
}

// Heads [..., H, N] as rows [..., N], of which each is the first head of a token.
inline View first_heads(const View &heads) {
  View view = heads;
  if (!view.present()) return view;
  --view.ndim;
  view.shape[view.ndim - 1] = heads.cols();
  view.stride[view.ndim - 1] = heads.stride[heads.ndim - 1];
  return view;
}

// A table [..., C] beside tokens [..., N]: where it has an extent of 1, its row is that of all.
inline pydet_status spread_over(const View &tokens, View *table) {
  bool fits = table->ndim == tokens.ndim;
  for (int i = 0; fits && i < tokens.ndim - 1; ++i) fits = table->shape[i] == tokens.shape[i] || table->shape[i] == 1;
  if (!fits) {
    int64_t want[kMaxDims];
    for (int i = 0; i < tokens.ndim; ++i) want[i] = i < tokens.ndim - 1 ? tokens.shape[i] : table->cols();
    return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want %s as the tokens of q are, or extents of 1", table->op,
                table->name, shape_text(*table).text, shape_text(want, tokens.ndim).text);
  }
  for (int i = 0; i < tokens.ndim - 1; ++i) table->shape[i] = tokens.shape[i];
  return PYDET_OK;
}

inline pydet_status check_heads(const View &heads) {
  if (!heads.present() || heads.rows() > 0) return PYDET_OK;
  return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want 1 head or more", heads.op, heads.name, shape_text(heads).text);
}

// What k asks for beside q.
inline pydet_status check_beside(const View &q, const View &k) {
  if (!k.present()) return PYDET_OK;
  PYDET_TRY(same_device(q, k));
  PYDET_TRY(same_type(q, k));
  int64_t want[kMaxDims];
  for (int i = 0; i < q.ndim; ++i) want[i] = q.shape[i];
  if (k.ndim == q.ndim) want[q.ndim - 2] = k.rows();
  PYDET_TRY(want_shape(k, want, q.ndim));
  return unit_last_stride(k);
}

inline TurnedHeads heads_of(const View &x, const View &y, const View &x_first, const View &y_first, const RowWalk &walk,
                            int of_x, int of_y) {
  if (!x.present()) return TurnedHeads{};
  return {rows_of(x_first, walk, of_x), rows_of(y_first, walk, of_y), x.stride[x.ndim - 2], y.stride[y.ndim - 2],
          x.rows()};
}

}  // namespace pydet
