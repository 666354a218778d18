// What the handlers of products share.
#pragma once

#include "entry/xla_call.h"

namespace pydet {

inline pydet_tensor matrix(Call &call, const pydet_xla_buffer &buffer, bool transposed, Shape *shape) {
  const int rank = int(buffer.rank);
  if (rank < 2 || rank > kMaxRank) {
    call.fail("want matrices, with at most 6 leading dimensions");
    return {};
  }
  std::memcpy(shape->dims, buffer.dims, size_t(rank) * sizeof *buffer.dims);
  lay_out(shape, rank);
  if (transposed) {
    for (int64_t *values : {shape->dims, shape->strides}) {
      const int64_t last = values[rank - 1];
      values[rank - 1] = values[rank - 2];
      values[rank - 2] = last;
    }
  }
  return call.tensor(buffer, shape, rank);
}

}  // namespace pydet
