// One operand: a DLPack-shaped descriptor becomes a checked View; and what Views ask of each other. Nothing here touches
// an element.
#pragma once

#include <initializer_list>
#include <limits>

#include "core/backend.h"
#include "core/error.h"

namespace pydet {

constexpr int kMaxDims = kMaxBatchDims + 2;
constexpr uint64_t kMaxAddress = uint64_t(std::numeric_limits<int64_t>::max());

// One operand: its names for sentences, then what its descriptor says, checked on its own.
struct View {
  const char *op, *name;
  char *data;
  Type type;
  Device device;
  int ndim;
  int64_t shape[kMaxDims], stride[kMaxDims];  // strides in elements
  bool present() const { return name != nullptr; }
  int64_t rows() const { return shape[ndim - 2]; }
  int64_t cols() const { return shape[ndim - 1]; }
  bool empty() const {
    for (int i = 0; i < ndim; ++i)
      if (shape[i] == 0) return true;
    return false;
  }
};

inline Text shape_text(const View &view) { return shape_text(view.shape, view.ndim); }

// ---- From a descriptor -------------------------------------------------------------------------------------------

// Memory that the CPU reads is the CPU's, whoever pinned it; managed memory is its GPU's.
inline Device normalized(pydet_device device) {
  switch (device.device_type) {
    case PYDET_CPU:
    case PYDET_CUDA_HOST:
    case PYDET_ROCM_HOST: return {PYDET_CPU, 0};
    case PYDET_CUDA_MANAGED: return {PYDET_CUDA, device.device_id};
    default: return {device.device_type, device.device_id};
  }
}

// Reads a descriptor of `min_ndim` dimensions or more into *view, and checks all that can be checked alone.
inline pydet_status read(const char *op, const char *name, Use use, const pydet_tensor *tensor, int min_ndim,
                         View *view) {
  if (!tensor) return fail(PYDET_NULL_POINTER, "%s: %s is NULL, want a tensor", op, name);
  int ndim = tensor->ndim;
  if (ndim < min_ndim || ndim > kMaxDims)
    return fail(PYDET_INVALID_SHAPE, "%s: %s has %d dimensions, want %d to %d", op, name, ndim, min_ndim, kMaxDims);
  if (ndim > 0 && !tensor->shape) return fail(PYDET_NULL_POINTER, "%s: %s has no shape", op, name);
  view->op = op;
  view->name = name;
  view->ndim = ndim;
  if (!type_of(tensor->dtype, &view->type))
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want %s", op, name, dtype_text(tensor->dtype).text,
                type_list(types_for(use)).text);
  if (!(types_for(use) & bit(view->type)))
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want %s", op, name, type_name(view->type),
                type_list(types_for(use)).text);
  view->device = normalized(tensor->device);
  if (!backend_for(view->device.type))
    return fail(PYDET_INVALID_DEVICE, "%s: %s is on %s, this build serves the CPU%s%s", op, name,
                device_text(tensor->device.device_type, tensor->device.device_id).text,
                gpu_backend() ? " and " : " only", gpu_backend() ? gpu_backend()->name : "");

  int64_t dense = 1, last = 0;  // the stride of C order; the offset of the last element, in elements
  bool overflow = false;
  for (int i = ndim - 1; i >= 0; --i) {
    int64_t extent = tensor->shape[i], stride = tensor->strides ? tensor->strides[i] : dense;
    if (extent < 0)
      return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want no negative extent", op, name,
                  shape_text(tensor->shape, ndim).text);
    if (stride < 0 && extent > 1)
      return fail(PYDET_INVALID_STRIDE, "%s: %s has stride %" PRId64 " in dimension %d, want none negative", op, name,
                  stride, i);
    view->shape[i] = extent;
    view->stride[i] = extent > 1 ? stride : 0;
    int64_t reach = 0;
    overflow |= __builtin_mul_overflow(dense, extent > 0 ? extent : 1, &dense);
    overflow |= __builtin_mul_overflow(view->stride[i], extent > 0 ? extent - 1 : 0, &reach);
    overflow |= __builtin_add_overflow(last, reach, &last);
  }
  view->data = nullptr;
  if (view->empty()) {  // nothing is read or written, so no stride need make sense, and none is walked
    for (int i = 0; i < ndim; ++i) view->stride[i] = 0;
    return PYDET_OK;
  }
  uint64_t begin = 0, span = 0, end = 0, count = 0, size = uint64_t(size_of(view->type));
  overflow |= __builtin_add_overflow(uint64_t(last), 1, &span) || __builtin_mul_overflow(span, size, &span);
  overflow |= __builtin_add_overflow(reinterpret_cast<uintptr_t>(tensor->data), tensor->byte_offset, &begin);
  overflow |= __builtin_add_overflow(begin, span, &end) || end > kMaxAddress;
  overflow |= __builtin_mul_overflow(uint64_t(dense), size, &count) || count > kMaxAddress;
  if (overflow)
    return fail(PYDET_OVERFLOW, "%s: %s is %s, which reaches past 2^63 - 1 bytes", op, name, shape_text(*view).text);
  if (!tensor->data) return fail(PYDET_NULL_POINTER, "%s: %s has NULL data", op, name);
  view->data = reinterpret_cast<char *>(begin);
  if (reinterpret_cast<uintptr_t>(view->data) % unsigned(size_of(view->type)) != 0)
    return fail(PYDET_MISALIGNED, "%s: %s has data at %p, want a multiple of %d bytes", op, name,
                static_cast<void *>(view->data), size_of(view->type));
  return PYDET_OK;
}

inline pydet_status read_optional(const char *op, const char *name, Use use, const pydet_tensor *tensor, int min_ndim,
                                  View *view) {
  if (tensor) return read(op, name, use, tensor, min_ndim, view);
  *view = View{};
  return PYDET_OK;
}

// ---- Layouts -----------------------------------------------------------------------------------------------------

inline View transposed(View view) {
  int r = view.ndim - 2, c = view.ndim - 1;
  int64_t shape = view.shape[r], stride = view.stride[r];
  view.shape[r] = view.shape[c];
  view.stride[r] = view.stride[c];
  view.shape[c] = shape;
  view.stride[c] = stride;
  return view;
}

inline pydet_status unit_last_stride(const View &view) {
  if (!view.present() || view.cols() <= 1 || view.stride[view.ndim - 1] == 1 || view.empty()) return PYDET_OK;
  return fail(PYDET_INVALID_STRIDE,
              "%s: %s has stride %" PRId64 " in its last dimension, want 1, as a contiguous copy has", view.op,
              view.name, view.stride[view.ndim - 1]);
}

inline pydet_status contiguous(const View &view) {
  if (!view.present() || view.empty()) return PYDET_OK;
  int64_t dense = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    if (view.shape[i] > 1 && view.stride[i] != dense)
      return fail(PYDET_INVALID_STRIDE, "%s: %s has stride %" PRId64 " in dimension %d, want it contiguous", view.op,
                  view.name, view.stride[i], i);
    dense *= view.shape[i];
  }
  return PYDET_OK;
}

// ---- Operands together -------------------------------------------------------------------------------------------

inline pydet_status same_device(const View &first, const View &other) {
  if (!other.present() || (other.device.type == first.device.type && other.device.id == first.device.id))
    return PYDET_OK;
  return fail(PYDET_INVALID_DEVICE, "%s: %s is on %s, want %s as %s is", other.op, other.name,
              device_text(other.device.type, other.device.id).text,
              device_text(first.device.type, first.device.id).text, first.name);
}

inline pydet_status same_type(const View &first, const View &other) {
  if (!other.present() || other.type == first.type) return PYDET_OK;
  return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want %s as %s is", other.op, other.name, type_name(other.type),
              type_name(first.type), first.name);
}

inline pydet_status want_shape(const View &view, const int64_t *shape, int ndim) {
  bool same = view.ndim == ndim;
  for (int i = 0; same && i < ndim; ++i) same = view.shape[i] == shape[i];
  if (same) return PYDET_OK;
  return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want %s", view.op, view.name, shape_text(view).text,
              shape_text(shape, ndim).text);
}

// No two elements at one address: each stride steps over all that the smaller ones reach.
inline pydet_status no_self_overlap(const View &view) {
  if (!view.present() || view.empty()) return PYDET_OK;
  bool done[kMaxDims] = {};
  int64_t reach = 0;
  for (int round = 0; round < view.ndim; ++round) {
    int next = -1;
    for (int i = 0; i < view.ndim; ++i)
      if (!done[i] && (next < 0 || view.stride[i] < view.stride[next])) next = i;
    done[next] = true;
    if (view.shape[next] == 1) continue;
    if (view.stride[next] <= reach)
      return fail(PYDET_INVALID_STRIDE, "%s: %s has stride %" PRId64 " in dimension %d, so its elements overlap",
                  view.op, view.name, view.stride[next], next);
    reach += (view.shape[next] - 1) * view.stride[next];
  }
  return PYDET_OK;
}

// The bytes a view may touch: runs of `run` bytes at data + multiples of the other strides, all inside [data, end).
struct Footprint {
  uintptr_t begin, end;
  int64_t run, gcd;  // gcd of the strides between runs, in bytes; 0 where there is one run
};

inline int64_t gcd(int64_t a, int64_t b) {
  while (b) {
    int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

inline Footprint footprint(const View &view) {
  int64_t size = size_of(view.type), last = 0, run = size, strides = 0;
  for (int i = 0; i < view.ndim; ++i) {
    last += (view.shape[i] - 1) * view.stride[i] * size;
    if (view.shape[i] == 1) continue;
    if (view.stride[i] == 1) run += (view.shape[i] - 1) * size;
    else strides = gcd(strides, view.stride[i] * size);
  }
  uintptr_t begin = reinterpret_cast<uintptr_t>(view.data);
  return {begin, begin + uintptr_t(last + size), run, strides};
}

inline bool overlaps(const View &x, const View &y) {
  if (!x.present() || !y.present() || x.empty() || y.empty()) return false;
  Footprint f = footprint(x), g = footprint(y);
  if (f.end <= g.begin || g.end <= f.begin) return false;
  int64_t period = gcd(f.gcd, g.gcd);  // column slices of one buffer: disjoint modulo the row stride
  if (period == 0) return true;
  int64_t ahead = int64_t((g.begin - f.begin) % uintptr_t(period));
  if (g.begin < f.begin) ahead = (period - int64_t((f.begin - g.begin) % uintptr_t(period))) % period;
  return ahead < f.run || ahead + g.run > period;
}

inline pydet_status disjoint(const View &out, const View &other) {
  if (!overlaps(out, other)) return PYDET_OK;
  return fail(PYDET_OVERLAP, "%s: %s shares memory with %s, want it apart", out.op, out.name, other.name);
}

// No output shares memory with itself, an input or another output.
template <size_t in, size_t out>
pydet_status outputs_apart(const View *const (&inputs)[in], const View *const (&outputs)[out]) {
  for (size_t i = 0; i < out; ++i) {
    PYDET_TRY(no_self_overlap(*outputs[i]));
    for (const View *input : inputs) PYDET_TRY(disjoint(*outputs[i], *input));
    for (size_t j = 0; j < i; ++j) PYDET_TRY(disjoint(*outputs[i], *outputs[j]));
  }
  return PYDET_OK;
}

}  // namespace pydet
