// Argument checks of activations, over those of the norms.
#pragma once

#include "ops/norm/check.h"

namespace pydet {

inline pydet_status check_kind(const char *op, int32_t kind) {
  if (kind >= 0 && kind < kActivationKinds) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: options.kind is %d, want 0 (silu) to %d (exp)", op, int(kind),
              kActivationKinds - 1);
}

// Each element is written after it was read: an output may be an input as it lies there.
inline pydet_status same_or_apart(const View &out, const View &in) {
  bool same = out.data == in.data;
  for (int i = 0; same && i < out.ndim; ++i) same = out.stride[i] == in.stride[i];
  return same ? PYDET_OK : disjoint(out, in);
}

// How the rows of all of them are walked: they have the shape of the first, x, and may be absent. What lies in one piece
// everywhere is one row.
template <size_t count> pydet_status walk_elements(const View *const (&views)[count], int64_t *n, RowWalk *walk) {
  const View &x = *views[0];
  PYDET_TRY(unit_last_stride(x));
  for (const View *view : views) PYDET_TRY(check_like(x, *view));
  PYDET_TRY(walk_rows(views, int(count), walk));
  *n = x.cols();
  bool dense = walk->rows > 0;
  for (size_t i = 0; i < count; ++i)
    dense = dense && (!views[i]->present() || ((walk->inner == 1 || walk->inner_stride[i] == *n) &&
                                               (walk->outer == 1 || walk->outer_stride[i] == walk->inner * *n)));
  if (dense) {
    *n *= walk->rows;
    walk->rows = walk->inner = 1;
  }
  return PYDET_OK;
}

}  // namespace pydet
