// Argument checks of the scaled product and of quantisation: Views become the problems.
#pragma once

#include "ops/gemm/check.h"
#include "ops/scaled/problem.h"

namespace pydet {

constexpr int64_t groups_of(int64_t extent, int64_t group = kScaleGroup) {
  return extent / group + (extent % group != 0);
}
// Elements along k that share a scale, where any are to vary along it.
constexpr int64_t group_along_k(int64_t k_chunk) { return k_chunk == kFineGroup ? kFineGroup : kScaleGroup; }

// The leading dimensions of operands that walk an output of `shape` [dims] in step: those before the last `inner`, which
// are absent, 1 or the output's. Neighbours that all of them walk as one are merged. Views that are not present walk
// nothing.
template <int count>
pydet_status walk_of(const View *const (&views)[count], const int (&inner)[count], const int64_t *shape, int dims,
                     const View &out, Walk<count> *walk) {
  int64_t stride[count][kMaxDims];
  for (int t = 0; t < count; ++t) {
    const View &view = *views[t];
    const int own = view.present() && view.ndim > inner[t] ? view.ndim - inner[t] : 0;
    bool fits = own <= dims;
    for (int i = 0; fits && i < dims; ++i) {
      const int j = i - (dims - own);
      const int64_t extent = j < 0 ? 1 : view.shape[j];
      fits = extent == 1 || extent == shape[i];
      stride[t][i] = extent == 1 ? 0 : view.stride[j];
    }
    if (!fits)
      return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want leading dimensions that broadcast to those of %s, %s",
                  view.op, view.name, shape_text(view).text, out.name, shape_text(out).text);
  }
  *walk = {};
  if (out.empty()) return PYDET_OK;  // count 0, however vast the other extents
  walk->count = 1;
  for (int i = 0; i < dims; ++i) {
    walk->count *= shape[i];
    if (shape[i] == 1) continue;
    const int d = walk->dims;
    bool merges = d > 0;
    for (int t = 0; t < count; ++t) merges = merges && walk->stride[t][d - 1] == stride[t][i] * shape[i];
    if (!merges) ++walk->dims;
    const int at = walk->dims - 1;
    walk->shape[at] = merges ? walk->shape[at] * shape[i] : shape[i];
    for (int t = 0; t < count; ++t) walk->stride[t][at] = stride[t][i];
  }
  return PYDET_OK;
}

// ---- Scaled GEMM -------------------------------------------------------------------------------------------------

// The scale of a, or of b^T: one of `extent` rows, k along the second dimension, in so many chunks. `transposed`: the
// view is b's.
inline pydet_status scale_of_rows(const View &view, int64_t extent, int64_t chunks, bool transposed, Scale *scale,
                                  bool *along_k) {
  *scale = {};
  if (!view.present()) return PYDET_OK;
  scale->data = view.data;
  scale->type = view.type;
  if (view.ndim == 0) return PYDET_OK;
  const int rows = view.ndim - (transposed ? 1 : 2), cols = view.ndim - (transposed ? 2 : 1);
  bool fits = view.ndim >= 2;
  if (fits) {
    const bool chunked = view.shape[cols] == chunks;
    scale->blocks = transposed && chunked && view.shape[rows] != extent;
    fits = (chunked || view.shape[cols] == 1) && view.shape[rows] == (scale->blocks ? groups_of(extent) : extent);
    scale->stride = view.stride[rows];
    scale->chunk_stride = view.stride[cols];
    *along_k |= chunked;
  }
  if (fits) return PYDET_OK;
  if (transposed)
    return fail(PYDET_INVALID_SHAPE,
                "%s: %s is %s, want (), 1x%" PRId64 ", %" PRId64 "x%" PRId64 " or %" PRId64 "x%" PRId64
                " in its last two dimensions",
                view.op, view.name, shape_text(view).text, extent, chunks, extent, chunks, groups_of(extent));
  return fail(PYDET_INVALID_SHAPE,
              "%s: %s is %s, want (), %" PRId64 "x1 or %" PRId64 "x%" PRId64 " in its last two dimensions", view.op,
              view.name, shape_text(view).text, extent, extent, chunks);
}

// Of sums that begin at elements, to which no scale of the whole sum belongs.
inline pydet_status want_scales_of_chunks(const char *op, const View &a_scale, const View &b_scale,
                                          const ScaledGemm &gemm, const char *where) {
  if (gemm.along_k || (!a_scale.present() && !b_scale.present())) return PYDET_OK;
  return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want scales along k, or none, %s", op,
              a_scale.present() ? "a_scale" : "b_scale", shape_text(a_scale.present() ? a_scale : b_scale).text, where);
}

// The options that scaled_gemm and scaled_grouped_gemm share, once `along_k` is known.
template <class Options>
pydet_status apply_scaled_options(const char *op, const View &a, const View &a_scale, const View &b_scale,
                                  const View &out, const Options &options, ScaledGemm *gemm) {
  const int64_t k = a.cols();
  PYDET_TRY(resolve(op, a.device, a.type, options.arithmetic, &gemm->arithmetic));
  if (options.k_chunk < 0 || options.k_chunk % kFp8Step)
    return fail(PYDET_INVALID_VALUE, "%s: k_chunk is %" PRId64 ", want 0 or a positive multiple of %d", op,
                options.k_chunk, kFp8Step);
  const bool one_chunk = k <= kScaleGroup && (options.k_chunk == 0 || options.k_chunk > kScaleGroup);
  const int64_t group = group_along_k(options.k_chunk);
  if (gemm->along_k && options.k_chunk != group && !one_chunk)
    return fail(PYDET_INVALID_VALUE, "%s: k_chunk is %" PRId64 ", want %d or %d with scales along k", op,
                options.k_chunk, kScaleGroup, kFineGroup);
  gemm->k_chunk = gemm->along_k ? group : options.k_chunk;
  PYDET_TRY(check_flag(op, "accumulate", options.accumulate));
  if (options.accumulate && out.type != Type::f32)
    return fail(PYDET_INVALID_DTYPE, "%s: out is %s, want float32 under accumulate", op, type_name(out.type));
  if (options.accumulate) PYDET_TRY(want_scales_of_chunks(op, a_scale, b_scale, *gemm, "under accumulate"));
  gemm->accumulate = options.accumulate != 0;
  return PYDET_OK;
}

inline pydet_status scaled_gemm_of(const View &a, const View &a_scale, const View &b, const View &b_scale,
                                   const View &bias, const View &out, const pydet_scaled_gemm_options &options,
                                   ScaledGemm *gemm) {
  constexpr GemmWords words = {"scaled_gemm", "a", "b", "out", "M", "N", "K", false, false};
  const int64_t m = a.rows(), k = a.cols(), n = b.cols();
  for (const View *other : {&a_scale, &b, &b_scale, &bias, &out}) PYDET_TRY(same_device(a, *other));
  PYDET_TRY(want_inner(b, k, words));
  if (out.rows() != m || out.cols() != n)
    return fail(PYDET_INVALID_SHAPE, "%s: out is %s, want %" PRId64 "x%" PRId64 "%s", words.op, shape_text(out).text, m,
                n, out.ndim > 2 ? " in its last two dimensions" : "");
  const bool row_bias = bias.present() && bias.ndim >= 2;
  if (bias.present() && (bias.cols() != n || (row_bias && bias.rows() != m && bias.rows() != 1)))
    return fail(PYDET_INVALID_SHAPE, "%s: bias is %s, want %" PRId64 " or %" PRId64 "x%" PRId64, words.op,
                shape_text(bias).text, n, m, n);
  const int64_t chunks = groups_of(k, group_along_k(options.k_chunk));
  PYDET_TRY(scale_of_rows(a_scale, m, chunks, false, &gemm->a_scale, &gemm->along_k));
  PYDET_TRY(scale_of_rows(b_scale, n, chunks, true, &gemm->b_scale, &gemm->along_k));

  int64_t shape[kMaxDims];
  const int dims = a.ndim > b.ndim ? a.ndim - 2 : b.ndim - 2;
  for (int i = 0; i < dims; ++i) {
    const int ia = i - (dims - (a.ndim - 2)), ib = i - (dims - (b.ndim - 2));
    const int64_t ea = ia < 0 ? 1 : a.shape[ia], eb = ib < 0 ? 1 : b.shape[ib];
    if (ea != eb && ea != 1 && eb != 1)
      return fail(PYDET_INVALID_SHAPE, "%s: b is %s, want leading dimensions that broadcast with those of a, %s",
                  words.op, shape_text(b).text, shape_text(a).text);
    shape[i] = ea == 1 ? eb : ea;
  }
  bool same = out.ndim - 2 == dims;
  for (int i = 0; same && i < dims; ++i) same = out.shape[i] == shape[i];
  if (!same)
    return fail(PYDET_INVALID_SHAPE, "%s: out is %s, want leading dimensions %s", words.op, shape_text(out).text,
                shape_text(shape, dims).text);
  const View *const views[] = {&a, &b, &a_scale, &b_scale, &bias, &out};
  const int inner[] = {2, 2, 2, 2, 2, 2};
  PYDET_TRY(walk_of(views, inner, shape, dims, out, &gemm->batch));

  PYDET_TRY(matrix_of(a, &gemm->a));
  PYDET_TRY(matrix_of(b, &gemm->b));
  PYDET_TRY(matrix_of(out, &gemm->out));
  PYDET_TRY(no_self_overlap(out));
  for (const View *input : {&a, &a_scale, &b, &b_scale, &bias}) PYDET_TRY(disjoint(out, *input));
  gemm->bias = {};
  if (bias.present())
    gemm->bias = {bias.data, bias.type, m, n, row_bias ? bias.stride[bias.ndim - 2] : 0, bias.stride[bias.ndim - 1]};
  gemm->device = a.device;
  gemm->m = m, gemm->n = n, gemm->k = k;

  return apply_scaled_options(words.op, a, a_scale, b_scale, out, options, gemm);
}

// ---- Quantisation ------------------------------------------------------------------------------------------------

constexpr const char *kGranularityNames[] = {"row", "group", "block", "tensor"};

// The scale of x [m, k] as a matrix. `of`: the operand that it belongs to.
inline pydet_status scale_of_quantized(const View &view, const View &x, int64_t m, int64_t k, Granularity granularity,
                                       Matrix *matrix) {
  int64_t want[kMaxDims];
  const bool tensor = granularity == Granularity::tensor;
  const int ndim = tensor ? 0 : x.ndim;
  for (int i = 0; i < ndim - 2; ++i) want[i] = x.shape[i];
  if (!tensor) {
    want[ndim - 2] = granularity == Granularity::block ? groups_of(m) : m;
    want[ndim - 1] = granularity == Granularity::row ? 1 : groups_of(k);
  }
  PYDET_TRY(want_shape(view, want, ndim));
  *matrix = {view.data,
             view.type,
             tensor ? 1 : want[ndim - 2],
             tensor ? 1 : want[ndim - 1],
             tensor ? 0 : view.stride[ndim - 2],
             tensor ? 0 : view.stride[ndim - 1]};
  return PYDET_OK;
}

inline pydet_status quantize_of(const View &x, const View &out, const View &scale, const View &transposed_out,
                                const View &transposed_scale, const pydet_quantize_options &options,
                                Quantize *problem) {
  const char *op = "quantize";
  if (options.granularity < 0 || options.granularity > PYDET_TENSOR)
    return fail(PYDET_INVALID_VALUE, "%s: options.granularity is %d, want 0 (row) to 3 (tensor)", op,
                int(options.granularity));
  PYDET_TRY(check_flag(op, "power_of_two", options.power_of_two));
  PYDET_TRY(check_flag(op, "given", options.given));
  problem->granularity = Granularity(options.granularity);
  if (transposed_out.present() != transposed_scale.present())
    return fail(PYDET_NULL_POINTER, "%s: %s is given without %s, want both or neither", op,
                transposed_out.present() ? "transposed" : "transposed_scale",
                transposed_out.present() ? "transposed_scale" : "transposed");
  const bool squares = problem->granularity == Granularity::group || problem->granularity == Granularity::block;
  if (transposed_out.present() && (!squares || options.given))
    return fail(PYDET_INVALID_VALUE, "%s: transposed is given with granularity %s%s, want group or block%s", op,
                kGranularityNames[options.granularity], options.given ? " and a given scale" : "",
                options.given ? ", and scales that are found" : "");
  for (const View *other : {&out, &scale, &transposed_out, &transposed_scale}) PYDET_TRY(same_device(x, *other));
  const int64_t m = x.rows(), k = x.cols();
  PYDET_TRY(want_shape(out, x.shape, x.ndim));
  PYDET_TRY(scale_of_quantized(scale, x, m, k, problem->granularity, &problem->scale));
  if (transposed_out.present()) {
    const View turned = transposed(x);
    PYDET_TRY(want_shape(transposed_out, turned.shape, turned.ndim));
    PYDET_TRY(same_type(out, transposed_out));
    PYDET_TRY(same_type(scale, transposed_scale));
    PYDET_TRY(scale_of_quantized(transposed_scale, x, k, m, problem->granularity, &problem->transposed_scale));
    PYDET_TRY(matrix_of(transposed_out, &problem->transposed));
  }
  PYDET_TRY(matrix_of(x, &problem->x));
  PYDET_TRY(matrix_of(out, &problem->out));
  const View *const outputs[] = {&out, &scale, &transposed_out, &transposed_scale};
  for (int i = 0; i < 4; ++i) {
    const bool read = i == 1 && options.given;
    if (!read) PYDET_TRY(no_self_overlap(*outputs[i]));
    if (!read) PYDET_TRY(disjoint(*outputs[i], x));
    for (int j = 0; j < i; ++j) PYDET_TRY(disjoint(*outputs[j], *outputs[i]));
  }
  const View *const views[] = {&x, &out, &scale, &transposed_out, &transposed_scale};
  const int inner[] = {2, 2, 2, 2, 2};
  const View &written = problem->granularity == Granularity::row ? scale : out;  // rows of nothing have scales
  PYDET_TRY(walk_of(views, inner, x.shape, x.ndim - 2, written, &problem->batch));
  problem->device = x.device;
  problem->m = m, problem->k = k;
  problem->given = options.given != 0;
  problem->power_of_two = options.power_of_two != 0 || scale.type == Type::e8m0;
  return PYDET_OK;
}

}  // namespace pydet
