// Argument checks of sampling, over those of the softmax family.
#pragma once

#include "ops/softmax/check.h"

namespace pydet {

// A number that is infinite or a NaN is none of these. By the bits, since a thread may read subnormals as zeros.
inline pydet_status check_temperature(const char *op, float temperature) {
  if (bits_of(temperature) < 0x7F800000u || bits_of(temperature) == 0x80000000u) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: temperature is %g, want a finite number, 0 (the largest logit) or more", op,
              double(temperature));
}
inline pydet_status check_part(const char *op, const char *name, float part) {
  if (bits_of(part) <= 0x3F800000u || bits_of(part) == 0x80000000u) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: %s is %g, want a number from 0 to 1", op, name, double(part));
}
inline pydet_status check_top_k(const char *op, int64_t top_k) {
  if (top_k >= 0) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: top_k is %" PRId64 ", want 0 (no such filter) or more", op, top_k);
}

inline pydet_status check_columns(const View &x, int64_t most) {
  if (x.cols() >= 1 && x.cols() <= most) return PYDET_OK;
  return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want a last dimension of 1 to %" PRId64, x.op, x.name,
              shape_text(x).text, most);
}

inline pydet_status whole_numbers_of_rows(const View &x, const char *name, const pydet_tensor *tensor,
                                          WholeNumbers *numbers, Columns *columns) {
  PYDET_TRY(whole_numbers(x, name, tensor, x.shape, x.ndim - 1, true, numbers));
  *columns = {numbers->words.data, numbers->wide};
  return PYDET_OK;
}

}  // namespace pydet
