// GEMM, its gradients and skinny GEMM, once a call is checked: one problem under four names.
#pragma once

#include "core/operation.h"

namespace pydet {

// out[m, n] = round(chain_k(a[m, k], b[k, n]) + bias[m, n]). out is row-major: col_stride is 1. a and b have a unit
// stride each. bias.data is NULL where there is none; its strides may be 0. k may be 0; m, n and batch.count are not.
struct Gemm {
  Device device;
  void *stream;
  Matrix a, b, bias, out;
  Batch batch;
  int64_t m, n, k;
  Arithmetic arithmetic;  // resolved
  int64_t k_chunk;        // 0: none
  bool accumulate;
  bool skinny;  // called through pydet_skinny_gemm: a holds the few rows, b^T the weights
  bool fast;    // PYDET_FAST: bits may vary
  bool weights_constant;
  void *workspace;
  uint64_t workspace_size;
  Matrix from;  // under accumulate, where there is one: what the sums begin at, in fp32, in place of out

  uint64_t needs() const {
    return when(batch.dims > 0, kBatch) | when(bias.data, kBias) | when(accumulate, kAccumulate) |
           when(k_chunk != 0, kChunks) | when(a.col_stride != 1 && k > 1, kAlongM) |
           when(b.row_stride != 1 && k > 1, kAlongN);
  }
};

template <> struct Operation<Gemm> : AsAsked {
  static constexpr const char *name = "gemm";
  static Type input(const Gemm &g) { return g.a.type; }
  template <class Show> static void memory(const Gemm &g, Show show) {
    show(g.a.data, g.b.data, g.bias.data, g.out.data, g.from.data);
  }
  static bool lay_well(Gemm &g) {
    for (Matrix *matrix : {&g.a, &g.b, &g.out}) give_room(matrix->data);
    g.a.row_stride = g.b.col_stride = with_room(g.k);
    g.a.col_stride = g.b.row_stride = 1;
    g.out.row_stride = with_room(g.n);
    for (int i = 0; i < g.batch.dims; ++i)
      for (int64_t *strides : {g.batch.a, g.batch.b, g.batch.out}) strides[i] = with_room(strides[i]);
    return true;
  }
  static bool drop_chunks(Gemm &g) { return g.k_chunk != 0 && (g.k_chunk = 0, true); }
  using Functions = FunctionList<pydet_gemm, pydet_gemm_da, pydet_gemm_db, pydet_gemm_workspace,
                                 pydet_gemm_copy_workspace, pydet_skinny_gemm, pydet_skinny_gemm_workspace>;
  static Items<pydet_exchange_method> python();
  static Items<pydet_xla_handler> xla();
};

struct Rounding;                        // ops/gemm/rounding.h
template <class Problem> struct Hooks;  // core/kernel.h
template <> struct Hooks<Gemm> {
  pydet_status (*round_elements)(const Rounding &);
  // Bytes that the kernel which is asked for by name, or else whichever may be chosen, uses for a product of one
  // matrix, whatever its device; NULL: no kernel wants any.
  uint64_t (*workspace)(int64_t m, int64_t n, int64_t k, int64_t k_chunk, Arithmetic asked, const char *kernel);
  // Whether the kernel that is asked for by name, or else the one that would be chosen, begins at `from` by itself; NULL:
  // none does.
  bool (*begins)(const Gemm &, const char *kernel);
  // Bytes of a copy of an operand that lies as the best kernels cannot read it, or 0; NULL: they read any.
  uint64_t (*copy)(const Device &, const Matrix &operand);
};

// out^T = b^T a^T: a product does not mind the order of its factors, so neither do the bits.
PYDET_HD Gemm transposed(const Gemm &g) {
  Gemm t = g;
  t.a = transposed(g.b), t.b = transposed(g.a);
  t.bias = transposed(g.bias), t.out = transposed(g.out), t.from = transposed(g.from);
  t.m = g.n, t.n = g.m;
  for (int i = 0; i < kMaxBatchDims; ++i) t.batch.a[i] = g.batch.b[i], t.batch.b[i] = g.batch.a[i];
  return t;
}

}  // namespace pydet
