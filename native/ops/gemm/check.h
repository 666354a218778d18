// GEMM: Views become the problem, in the orientation that kernels take.
#pragma once

#include "core/options.h"

namespace pydet {

inline pydet_status check_arithmetic(const char *op, int32_t asked) {
  if (is_arithmetic(asked)) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: arithmetic is %d, want 0 (auto) to %d (%s)", op, int(asked),
              kArithmeticCount - 1, kArithmetics[kArithmeticCount - 1].name);
}

// What AUTO means for fp8 on a GPU: the arithmetic of its tensor cores where there are kernels for it, else ieee.
inline Arithmetic of_fp8(Device device) {
  const Table<ScaledGemm> &table = backend_for(device.type)->table<ScaledGemm>();
  for (int i = 0; i < table.count; ++i)
    if (table.rows[i].arithmetic != Arithmetic::ieee && table.rows[i].machine.has(device))
      return table.rows[i].arithmetic;
  return Arithmetic::ieee;
}

inline pydet_status resolve(const char *op, Device device, Type type, int32_t asked, Arithmetic *resolved) {
  if (!is_arithmetic(asked)) return check_arithmetic(op, asked);
  *resolved = Arithmetic(asked);
  const ArithmeticRow &row = kArithmetics[asked];
  if (!(row.factors & bit(type)))
    return fail(PYDET_INVALID_DTYPE, "%s: arithmetic %s takes %s inputs, got %s", op, row.name,
                type_list(row.factors & (bit(type) & kUnscaledTypes ? kUnscaledTypes : ~0u)).text, type_name(type));
  if (asked != PYDET_AUTO) return PYDET_OK;
  *resolved = Arithmetic::ieee;
  if (type == Type::f32 || device.type == PYDET_CPU) return PYDET_OK;
  *resolved = backend_for(device.type)->tensor_cores(device.id);
  if (*resolved != Arithmetic::automatic && (bit(type) & kFp8Types)) *resolved = of_fp8(device);
  return PYDET_OK;
}

// The same operation under four names: which letters its extents have, and which operands are read transposed.
struct GemmWords {
  const char *op, *a, *b, *out;
  const char *m, *n, *k;
  bool a_transposed, b_transposed;
};

// One unit stride, either side. A side of extent 1 has whichever stride is convenient: view strides are 0 there.
inline pydet_status matrix_of(const View &view, Matrix *matrix) {
  int64_t rows = view.rows(), cols = view.cols(), row = view.stride[view.ndim - 2], col = view.stride[view.ndim - 1];
  if (cols <= 1 && (rows <= 1 || row != 1)) col = 1;
  else if (rows <= 1 && col != 1) row = 1;
  if (rows <= 1 && col == 1) row = cols;
  if (cols <= 1 && row == 1 && col != 1) col = rows;
  if (row != 1 && col != 1 && !view.empty())
    return fail(PYDET_INVALID_STRIDE,
                "%s: %s has strides %" PRId64 " and %" PRId64
                " in its last two dimensions, want one of them 1, as a contiguous copy has",
                view.op, view.name, row, col);
  *matrix = {view.data, view.type, rows, cols, row, col};
  return PYDET_OK;
}

// Broadcasts the leading dimensions of a and b, wants out to have the result and bias to broadcast to it, and merges
// neighbours that all four operands walk as one.
inline pydet_status batch_of(const View &a, const View &b, const View &bias, const View &out, Batch *batch) {
  int na = a.ndim - 2, nb = b.ndim - 2, dims = na > nb ? na : nb;
  int64_t shape[kMaxDims], sa[kMaxDims], sb[kMaxDims], sbias[kMaxDims];
  for (int i = 0; i < dims; ++i) {
    int ia = i - (dims - na), ib = i - (dims - nb);
    int64_t ea = ia < 0 ? 1 : a.shape[ia], eb = ib < 0 ? 1 : b.shape[ib];
    if (ea != eb && ea != 1 && eb != 1)
      return fail(PYDET_INVALID_SHAPE,
                  "%s: %s has leading dimensions %s, want some that broadcast with those of %s, %s", b.op, b.name,
                  shape_text(b.shape, nb).text, a.name, shape_text(a.shape, na).text);
    shape[i] = ea == 1 ? eb : ea;
    sa[i] = ea == 1 ? 0 : a.stride[ia];
    sb[i] = eb == 1 ? 0 : b.stride[ib];
  }
  bool fits = out.ndim - 2 == dims;
  for (int i = 0; fits && i < dims; ++i) fits = out.shape[i] == shape[i];
  if (!fits)
    return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want leading dimensions %s", out.op, out.name, shape_text(out).text,
                shape_text(shape, dims).text);
  int nbias = bias.present() && bias.ndim > 2 ? bias.ndim - 2 : 0;
  for (int i = 0; i < dims; ++i) {
    int j = i - (dims - nbias);
    int64_t extent = j < 0 ? 1 : bias.shape[j];
    fits &= extent == 1 || extent == shape[i];
    sbias[i] = extent == 1 ? 0 : bias.stride[j];
  }
  if (!fits || nbias > dims)
    return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want one that broadcasts to %s", bias.op, bias.name,
                shape_text(bias).text, shape_text(out).text);

  *batch = Batch{};
  if (out.empty()) return PYDET_OK;  // count 0, however vast the other extents
  batch->count = 1;
  for (int i = 0; i < dims; ++i) {
    batch->count *= shape[i];
    if (shape[i] == 1) continue;
    int d = batch->dims;
    bool merges = d > 0 && batch->a[d - 1] == sa[i] * shape[i] && batch->b[d - 1] == sb[i] * shape[i] &&
                  batch->bias[d - 1] == sbias[i] * shape[i] && batch->out[d - 1] == out.stride[i] * shape[i];
    if (!merges) batch->dims = ++d;
    batch->shape[d - 1] = merges ? batch->shape[d - 1] * shape[i] : shape[i];
    batch->a[d - 1] = sa[i];
    batch->b[d - 1] = sb[i];
    batch->bias[d - 1] = sbias[i];
    batch->out[d - 1] = out.stride[i];
  }
  return PYDET_OK;
}

// A wanted shape in the caller's own orientation: "1024xN", or "Nx1024" where the operand is read transposed.
inline pydet_status want_inner(const View &b, int64_t k, const GemmWords &words) {
  if (b.rows() == k) return PYDET_OK;
  Text given = shape_text(words.b_transposed ? transposed(b) : b), want;
  if (words.b_transposed) snprintf(want.text, sizeof want.text, "%sx%" PRId64, words.n, k);
  else snprintf(want.text, sizeof want.text, "%" PRId64 "x%s", k, words.n);
  return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want %s", b.op, b.name, given.text, want.text);
}

// a [..., m, k] and b [..., k, n] are already in the orientation of the product.
inline pydet_status gemm_of(const GemmWords &words, const View &a, const View &b, const View &bias, const View &out,
                            Gemm *gemm) {
  int64_t m = a.rows(), k = a.cols(), n = b.cols();
  for (const View *other : {&b, &bias, &out}) PYDET_TRY(same_device(a, *other));
  PYDET_TRY(same_type(a, b));
  PYDET_TRY(want_inner(b, k, words));
  if (out.rows() != m || out.cols() != n)
    return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want %" PRId64 "x%" PRId64 "%s", words.op, words.out,
                shape_text(out).text, m, n, out.ndim > 2 ? " in its last two dimensions" : "");
  bool row_bias = bias.present() && bias.ndim >= 2;
  if (bias.present() && (bias.cols() != n || (row_bias && bias.rows() != m && bias.rows() != 1)))
    return fail(PYDET_INVALID_SHAPE, "%s: bias is %s, want %" PRId64 " or %" PRId64 "x%" PRId64, words.op,
                shape_text(bias).text, n, m, n);
  PYDET_TRY(batch_of(a, b, bias, out, &gemm->batch));
  PYDET_TRY(matrix_of(a, &gemm->a));
  PYDET_TRY(matrix_of(b, &gemm->b));
  PYDET_TRY(matrix_of(out, &gemm->out));
  PYDET_TRY(no_self_overlap(out));
  for (const View *input : {&a, &b, &bias}) PYDET_TRY(disjoint(out, *input));
  gemm->bias = {};
  if (bias.present())
    gemm->bias = {bias.data, bias.type, m, n, row_bias ? bias.stride[bias.ndim - 2] : 0, bias.stride[bias.ndim - 1]};
  gemm->device = a.device;
  gemm->m = m;
  gemm->n = n;
  gemm->k = k;
  // A column-major out is the row-major out of the transposed product.
  if (gemm->out.col_stride != 1) *gemm = transposed(*gemm);
  return PYDET_OK;
}

// The options that gemm, skinny_gemm and grouped_gemm share, after `gemm_of`.
template <class Options>
pydet_status apply_gemm_options(const GemmWords &words, const Options &options, const View &out, Gemm *gemm) {
  PYDET_TRY(resolve(words.op, gemm->device, gemm->a.type, options.arithmetic, &gemm->arithmetic));
  PYDET_TRY(check_chunk(words.op, options.k_chunk, kChunkMultiple));
  PYDET_TRY(check_flag(words.op, "accumulate", options.accumulate));
  if (options.accumulate && out.type != Type::f32)
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want float32 under accumulate", words.op, words.out,
                type_name(out.type));
  gemm->k_chunk = options.k_chunk;
  gemm->accumulate = options.accumulate != 0;
  if constexpr (!std::is_same_v<Options, pydet_grouped_gemm_options>) {  // which has no workspace
    PYDET_TRY(check_workspace(words.op, options.workspace, options.workspace_size));
    gemm->workspace = options.workspace;
    gemm->workspace_size = options.workspace_size;
  }
  return PYDET_OK;
}

// Of a product that begins at +0: +0 + s is s, since no chain of tensor cores gives -0 (NUMERICS.md).
inline bool one_chunk_is_one_chain(const Gemm &g) {
  return g.k_chunk >= g.k && !g.accumulate && !g.fast && g.arithmetic != Arithmetic::ieee;
}

// x [..., K] as a matrix [..., M, K]: M is the last leading dimension after merging, so that a call on [tokens, K], or on
// [batch, tokens, K] without gaps, is one matrix. The merge must hold for y and for a bias shaped like it.
inline void merge_rows(View *const *views, int count) {
  for (int t = 0; t < count; ++t)
    if (views[t]->ndim == 1) {  // one row
      views[t]->ndim = 2;
      views[t]->shape[1] = views[t]->shape[0];
      views[t]->stride[1] = views[t]->stride[0];
      views[t]->shape[0] = 1;
      views[t]->stride[0] = 0;
    }
  while (views[0]->ndim > 2) {
    int r = views[0]->ndim - 2;  // merge dimension r into r - 1
    for (int t = 0; t < count; ++t) {
      const View &v = *views[t];
      bool merges = v.shape[r] == 1 || v.shape[r - 1] == 1 || v.stride[r - 1] == v.stride[r] * v.shape[r];
      if (!merges) return;
    }
    for (int t = 0; t < count; ++t) {
      View &v = *views[t];
      v.stride[r - 1] = v.shape[r] == 1 ? v.stride[r - 1] : v.stride[r];
      v.shape[r - 1] *= v.shape[r];
      v.shape[r] = v.shape[r + 1];
      v.stride[r] = v.stride[r + 1];
      --v.ndim;
    }
  }
}

// Of a question about a workspace.
inline pydet_status check_extents(const char *op, int64_t batch, int64_t m, int64_t n, int64_t k,
                                  const uint64_t *bytes) {
  if (!bytes) return fail(PYDET_NULL_POINTER, "%s: bytes is NULL", op);
  if (batch < 0 || m < 0 || n < 0 || k < 0)
    return fail(PYDET_INVALID_SHAPE,
                "%s: an extent is negative (batch %" PRId64 ", M %" PRId64 ", N %" PRId64 ", K %" PRId64 ")", op, batch,
                m, n, k);
  return PYDET_OK;
}

}  // namespace pydet
