// Argument checks of embeddings, over those of the softmax family.
#pragma once

#include "ops/softmax/check.h"

namespace pydet {

// Of tokens, and of rows of a table whose gradient is made.
constexpr int64_t kMostCounted = (int64_t(1) << 31) - 1;

// A table [rows, n] whose rows have adjacent elements, beside tokens [..., n] of them.
inline pydet_status check_table(const View &table, const View &tokens) {
  PYDET_TRY(same_device(tokens, table));
  if (table.ndim != 2 || table.cols() != tokens.cols() || table.cols() < 1)
    return fail(PYDET_INVALID_SHAPE,
                "%s: %s is %s, want 2 dimensions, the last of them %" PRId64 " (1 or more) as %s has", table.op,
                table.name, shape_text(table).text, tokens.cols(), tokens.name);
  return unit_last_stride(table);
}

inline Matrix table_of(const View &table) {
  return {table.data, table.type, table.rows(), table.cols(), table.stride[0], 1};
}

// The CPU looks at each id before anything is written. On a GPU nobody can without waiting for it.
inline pydet_status check_ids(const char *op, const Device &device, const Columns &ids, int64_t tokens, int64_t rows) {
  if (device.type != PYDET_CPU) return PYDET_OK;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t id = ids.wide ? static_cast<const int64_t *>(ids.data)[t] : static_cast<const int32_t *>(ids.data)[t];
    if (id < 0 || id >= rows)
      return fail(PYDET_INVALID_VALUE,
                  "%s: ids has %" PRId64 " at %" PRId64 ", want numbers of the table's %" PRId64 " rows, from 0", op,
                  id, t, rows);
  }
  return PYDET_OK;
}

inline pydet_status check_counts(const char *op, int64_t tokens, int64_t rows) {
  if (tokens >= 0 && tokens <= kMostCounted && rows >= 0 && rows <= kMostCounted) return PYDET_OK;
  return fail(PYDET_INVALID_SHAPE, "%s: tokens are %" PRId64 " and rows %" PRId64 ", want 0 to %" PRId64 " of each", op,
              tokens, rows, kMostCounted);
}

}  // namespace pydet
