// Buffers of rows, whatever their leading dimensions, and what there is one of for each row.
#pragma once

#include "entry/xla_call.h"

namespace pydet {

inline pydet_tensor as_rows(Call &call, const pydet_xla_buffer &buffer, Shape *shape) {
  if (buffer.rank < 1) {
    call.fail("want rows, got a scalar");
    return {};
  }
  const int64_t last = buffer.rank - 1;
  *shape = {{product(call, buffer.dims, last), buffer.dims[last]}, {buffer.dims[last], 1}};
  return call.tensor(buffer, shape, 2);
}
// One a row of `rows`.
inline pydet_tensor as_values(Call &call, const char *name, const pydet_xla_buffer &buffer,
                              const pydet_xla_buffer &rows, Shape *shape) {
  call.expect_shape(name, buffer, rows.dims, rows.rank ? rows.rank - 1 : 0);
  *shape = {{elements(buffer)}, {1}};
  return call.tensor(buffer, shape, 1);
}
// Whole numbers of 64 bits, laid out as `like`, whose dimensions are `dims`: XLA mostly knows 32 bits alone, and has their
// two words along one dimension more.
inline pydet_tensor as_words(Call &call, const char *name, const pydet_xla_buffer &buffer, const int64_t *dims,
                             int64_t rank, const pydet_tensor &like) {
  bool fits = buffer.dtype == PYDET_XLA_S32 && buffer.rank == rank + 1 && buffer.dims[rank] == 2;
  for (int64_t i = 0; fits && i < rank; ++i) fits = buffer.dims[i] == dims[i];
  if (!fits)
    call.fail("%s is %s, want int32 of %s and a last dimension of 2 words", name,
              ShapeWords(buffer.dims, buffer.rank).text, ShapeWords(dims, rank).text);
  pydet_tensor words = like;
  words.data = buffer.data;
  words.dtype = {PYDET_INT, 64, 1};
  return words;
}

// The bytes of a workspace that is a result.
template <class Options> void give_workspace(Call &call, const pydet_xla_buffer &buffer, Options *options) {
  if (buffer.dtype != PYDET_XLA_U8) call.fail("the workspace is no result of bytes (uint8)");
  options->workspace = buffer.data;
  options->workspace_size = uint64_t(elements(buffer));
}

}  // namespace pydet
