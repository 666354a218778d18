// Operands of a checked call, as kernels take them.
#pragma once

#include "contract/numerics.h"

namespace pydet {

// A checked matrix: strides in elements, none negative; data is NULL only where there are no elements.
struct Matrix {
  char *data;
  Type type;
  int64_t rows, cols;
  int64_t row_stride, col_stride;
};

PYDET_HD Matrix transposed(const Matrix &x) { return {x.data, x.type, x.cols, x.rows, x.col_stride, x.row_stride}; }

constexpr int kMaxBatchDims = 6;

// Leading dimensions after merging all that can be: element strides are those of a, b, bias and out (0: broadcast).
// dims = 0 and count = 1 where there is no batch.
struct Batch {
  int dims;
  int64_t count;
  int64_t shape[kMaxBatchDims];
  int64_t a[kMaxBatchDims], b[kMaxBatchDims], bias[kMaxBatchDims], out[kMaxBatchDims];
};

// Where one matrix of the batch begins, in elements.
struct BatchOffsets {
  int64_t a, b, bias, out;
};

PYDET_HD BatchOffsets batch_offsets(const Batch &batch, int64_t index) {
  BatchOffsets at = {};
  for (int i = batch.dims - 1; i >= 0; --i) {
    int64_t along = index % batch.shape[i];
    index /= batch.shape[i];
    at.a += along * batch.a[i];
    at.b += along * batch.b[i];
    at.bias += along * batch.bias[i];
    at.out += along * batch.out[i];
  }
  return at;
}

// Row r of a tensor starts at data + ((r / inner) * outer_stride + (r % inner) * inner_stride) elements; its elements
// are adjacent. `inner` is the same for all tensors of a problem. Where it has an `outer`, r / inner is taken apart alike:
// (r / inner / outer) * far_stride + (r / inner % outer) * outer_stride. data is NULL where the operand is absent.
struct Rows {
  char *data;
  Type type;
  int64_t outer_stride, inner_stride, far_stride;
};

// Contiguous along n; data is NULL where absent.
struct Vector {
  char *data;
  Type type;
};

// One column number a row, contiguous; data is NULL where absent.
struct Columns {
  const void *data;
  bool wide;  // int64, else int32
};

struct Device {
  int32_t type;  // PYDET_CPU, PYDET_CUDA or PYDET_ROCM
  int32_t id;
};

}  // namespace pydet
