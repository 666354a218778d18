// A product whose sums begin at a tensor of their own: a pass over its elements brings them to where they are computed, and
// another rounds them from there.
#pragma once

#include "ops/gemm/problem.h"

namespace pydet {

// Groups of tokens, as a product of groups has them (ops/grouped/problem.h); none where `end` is NULL.
struct RoundedGroups {
  int64_t count, tokens;
  const int32_t *start, *end;
  int64_t bias_stride;  // from group to group
};

// to[m, n] = round(from[m, n] + bias[m, n]); without a bias nothing is added. from is fp32, to row-major; they may be one
// place. The batch has the strides of `from` as a's and those of `to` as out's. Extents as in Gemm, none of them 0.
// Where there are groups, rows are tokens, of which those in no group are left as they are, and the others have their
// group's bias, of one row; there is no batch then, and `to` has a unit stride on either side.
struct Rounding {
  Device device;
  void *stream;
  Matrix from, bias, to;
  Batch batch;
  int64_t m, n;
  RoundedGroups groups = {};
};

// A pass over elements of `to`, as Rounding wants it: row-major.
inline Rounding upright(const Rounding &pass) {
  if (pass.to.col_stride == 1 || pass.groups.end) return pass;
  Rounding turned = pass;
  turned.from = transposed(pass.from), turned.to = transposed(pass.to);
  if (pass.bias.data) turned.bias = transposed(pass.bias);
  turned.m = pass.n, turned.n = pass.m;
  return turned;
}

// No operation of its own, and no table.
template <> struct Operation<Rounding> {
  template <class Show> static void memory(const Rounding &r, Show show) {
    show(r.from.data, r.bias.data, r.to.data, r.groups.start, r.groups.end);
  }
};

// The strides of matrices of m x n that lie one after the other.
inline void dense_strides(const Batch &batch, int64_t m, int64_t n, int64_t (&strides)[kMaxBatchDims]) {
  int64_t stride = m * n;
  for (int i = batch.dims - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= batch.shape[i];
  }
}

// What such a product writes in the end, while `sums`, the product itself, computes in fp32 under accumulate. Of a few
// words, since it is on the stack while the product runs: the passes are made when they are.
struct FromInitial {
  Matrix from, bias, out;  // from: what the sums begin at, dense
  int64_t bias_strides[kMaxBatchDims], out_strides[kMaxBatchDims];
  bool ends;  // else the sums are the result

  Rounding before(const Gemm &sums) const {
    Rounding pass = {sums.device, sums.stream, from, {}, sums.out, sums.batch, sums.m, sums.n, {}};
    dense_strides(sums.batch, sums.m, sums.n, pass.batch.a);
    return pass;
  }
  Rounding after(const Gemm &sums) const {
    Rounding pass = {sums.device, sums.stream, sums.out, bias, out, sums.batch, sums.m, sums.n, {}};
    for (int i = 0; i < sums.batch.dims; ++i) {
      pass.batch.a[i] = sums.batch.out[i];
      pass.batch.bias[i] = bias_strides[i];
      pass.batch.out[i] = out_strides[i];
    }
    return pass;
  }
};

}  // namespace pydet
