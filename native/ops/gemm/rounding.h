// A product whose sums begin at a tensor of their own: a pass over its elements brings them to where they are computed, and
// another rounds them from there.
#pragma once

#include "ops/gemm/problem.h"

namespace pydet {

// to[m, n] = round(from[m, n] + bias[m, n]); without a bias nothing is added. from is fp32, to row-major; they may be one
// place. The batch has the strides of `from` as a's and those of `to` as out's. Extents as in Gemm, none of them 0.
struct Rounding {
  Device device;
  void *stream;
  Matrix from, bias, to;
  Batch batch;
  int64_t m, n;
};

// No operation of its own, and no table.
template <> struct Operation<Rounding> {
  template <class Show> static void memory(const Rounding &r, Show show) { show(r.from.data, r.bias.data, r.to.data); }
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
    Rounding pass = {sums.device, sums.stream, from, {}, sums.out, sums.batch, sums.m, sums.n};
    dense_strides(sums.batch, sums.m, sums.n, pass.batch.a);
    return pass;
  }
  Rounding after(const Gemm &sums) const {
    Rounding pass = {sums.device, sums.stream, sums.out, bias, out, sums.batch, sums.m, sums.n};
    for (int i = 0; i < sums.batch.dims; ++i) {
      pass.batch.a[i] = sums.batch.out[i];
      pass.batch.bias[i] = bias_strides[i];
      pass.batch.out[i] = out_strides[i];
    }
    return pass;
  }
};

}  // namespace pydet
