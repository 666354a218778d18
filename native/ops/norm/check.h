// Norms: how the rows of all operands are walked together, and what the operands ask of each other.
#pragma once

#include "core/options.h"
#include "ops/scaled/check.h"

namespace pydet {

// Two or three strides for the rows of all the tensors at once (absent ones have no say).
struct RowWalk {
  int64_t rows = 1, inner = 1, outer = 1;
  static constexpr int kMaxTensors = 6;
  int64_t outer_stride[kMaxTensors] = {}, inner_stride[kMaxTensors] = {}, far_stride[kMaxTensors] = {};
};

inline pydet_status walk_rows(const View *const *views, int count, RowWalk *walk, int most = 2) {
  const View &first = *views[0];
  if (first.empty()) {  // no rows, however vast the other extents
    walk->rows = 0;
    return PYDET_OK;
  }
  int groups = 0;
  int64_t extent[kMaxDims] = {}, stride[RowWalk::kMaxTensors][kMaxDims] = {};
  for (int i = 0; i < first.ndim - 1; ++i) {
    walk->rows *= first.shape[i];
    if (first.shape[i] == 1) continue;
    bool merges = groups > 0;
    for (int t = 0; t < count; ++t)
      merges = merges && (!views[t]->present() || stride[t][groups - 1] == views[t]->stride[i] * first.shape[i]);
    if (!merges) ++groups;
    extent[groups - 1] = merges ? extent[groups - 1] * first.shape[i] : first.shape[i];
    for (int t = 0; t < count; ++t) stride[t][groups - 1] = views[t]->present() ? views[t]->stride[i] : 0;
  }
  if (groups > most)
    return fail(PYDET_INVALID_STRIDE,
                "%s: the rows of %s need %d strides to walk, want at most %d after merging dimensions", first.op,
                first.name, groups, most);
  walk->inner = groups ? extent[groups - 1] : 1;
  walk->outer = groups > 1 ? extent[groups - 2] : 1;
  for (int t = 0; t < count; ++t) {
    walk->inner_stride[t] = groups ? stride[t][groups - 1] : 0;
    walk->outer_stride[t] = groups > 1 ? stride[t][groups - 2] : 0;
    walk->far_stride[t] = groups > 2 ? stride[t][groups - 3] : 0;
  }
  return PYDET_OK;
}

inline Rows rows_of(const View &view, const RowWalk &walk, int tensor) {
  if (!view.present()) return Rows{};
  return {view.data, view.type, walk.outer_stride[tensor], walk.inner_stride[tensor], walk.far_stride[tensor]};
}

inline Vector vector_of(const View &view) { return view.present() ? Vector{view.data, view.type} : Vector{}; }

// What x [..., N] asks of an operand beside it, which has its shape and adjacent elements. Its type too, unless `wide`:
// then one of the two may be fp32.
inline pydet_status check_like(const View &x, const View &other, const View *wide = nullptr) {
  if (!other.present()) return PYDET_OK;
  PYDET_TRY(same_device(x, other));
  if (other.type != x.type && (!wide || wide->type != Type::f32))
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want %s as x is%s", other.op, other.name, type_name(other.type),
                type_name(x.type), wide == &other && x.type != Type::f32 ? ", or float32" : "");
  PYDET_TRY(want_shape(other, x.shape, x.ndim));
  return unit_last_stride(other);
}

// Weights, biases and their gradients: all [N], or all [H, N] beside x [..., H, N].
template <size_t count>
pydet_status check_weights(const View &x, const View *const (&vectors)[count], int64_t *heads) {
  const View *first = nullptr;
  *heads = 1;
  for (const View *vector : vectors) {
    if (!vector->present()) continue;
    const int ndim = vector->ndim == 2 && x.ndim > 1 ? 2 : 1;
    PYDET_TRY(same_device(x, *vector));
    PYDET_TRY(want_shape(*vector, x.shape + x.ndim - ndim, ndim));
    if (!first) first = vector;
    PYDET_TRY(want_shape(*vector, first->shape, first->ndim));
    PYDET_TRY(unit_last_stride(*vector));
    PYDET_TRY(contiguous(*vector));
    if (ndim == 2 && !vector->empty()) *heads = vector->rows();
  }
  return PYDET_OK;
}

// What x [..., N] asks of the operands beside it: `like` have its shape, type and adjacent elements, vectors are [N] and
// rstd (or a mean) is [...] in fp32.
inline pydet_status check_norm(const View &x, const View *const *like, int like_count, const View &vector,
                               const View &rstd) {
  if (x.cols() == 0)
    return fail(PYDET_INVALID_SHAPE, "%s: x is %s, want a last dimension of 1 or more", x.op, shape_text(x).text);
  for (int i = 0; i < like_count; ++i) PYDET_TRY(check_like(x, *like[i]));
  PYDET_TRY(same_device(x, vector));
  if (vector.present()) {
    PYDET_TRY(want_shape(vector, x.shape + x.ndim - 1, 1));
    PYDET_TRY(unit_last_stride(vector));
  }
  if (!rstd.present()) return PYDET_OK;
  PYDET_TRY(same_device(x, rstd));
  PYDET_TRY(want_shape(rstd, x.shape, x.ndim - 1));
  if (rstd.type != Type::f32)
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want float32", rstd.op, rstd.name, type_name(rstd.type));
  return contiguous(rstd);
}

inline pydet_status both_or_neither(const char *op, const View &residual, const View &sum) {
  if (residual.present() == sum.present()) return PYDET_OK;
  return fail(PYDET_NULL_POINTER, "%s: %s is given without %s, want both or neither", op,
              residual.present() ? "residual" : "sum", residual.present() ? "sum" : "residual");
}

// What rmsnorm_quantize asks of its q and their scales, but for the walk.
inline pydet_status check_quantized(const View &x, const View &out, const View &scale,
                                    const pydet_rmsnorm_quantize_options &options, RmsNormQuantize *norm) {
  const char *op = x.op;
  if (options.granularity != PYDET_ROW && options.granularity != PYDET_GROUP && options.granularity != PYDET_TENSOR)
    return fail(PYDET_INVALID_VALUE, "%s: options.granularity is %d, want 0 (row), 1 (group) or 3 (tensor, given)", op,
                int(options.granularity));
  norm->granularity = Granularity(options.granularity);
  PYDET_TRY(check_flag(op, "power_of_two", options.power_of_two));
  if (norm->given() && options.power_of_two)
    return fail(PYDET_INVALID_VALUE, "%s: options.power_of_two is 1, want 0 where the scale is given", op);
  PYDET_TRY(same_device(x, out));
  PYDET_TRY(want_shape(out, x.shape, x.ndim));
  PYDET_TRY(unit_last_stride(out));
  PYDET_TRY(same_device(x, scale));
  int64_t want[kMaxDims];
  for (int i = 0; i < x.ndim; ++i) want[i] = x.shape[i];
  want[x.ndim - 1] = norm->granularity == Granularity::row ? 1 : groups_of(x.cols());
  PYDET_TRY(want_shape(scale, want, norm->given() ? 0 : x.ndim));
  norm->scale_stride = norm->given() ? 0 : scale.stride[scale.ndim - 1];
  norm->power_of_two = options.power_of_two != 0 || scale.type == Type::e8m0;
  return PYDET_OK;
}

// By the bits, since a thread that reads subnormals as zeros takes a negative one for 0.
inline pydet_status check_eps(const char *op, float eps) {
  if (bits_of(eps) < 0x7F800000u || bits_of(eps) == 0x80000000u) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: eps is %g, want a finite number, 0 or more", op, double(eps));
}

inline pydet_status check_weight_offset(const char *op, float offset) {
  if ((bits_of(offset) & 0x7FFFFFFFu) < 0x7F800000u) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: weight_offset is %g, want a finite number", op, double(offset));
}

}  // namespace pydet
