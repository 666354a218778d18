// Argument checks: DLPack-shaped descriptors become checked Views, Views become the problems of kernel.h. Every refusal
// is one sentence: operation, argument, got, want. Nothing here touches an element.
#pragma once

#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <initializer_list>
#include <limits>

#include "kernel.h"

namespace pydet {

inline thread_local char last_error[512] = "";

inline pydet_status fail(pydet_status status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return status;
}

// Returns early with any status but PYDET_OK.
#define PYDET_TRY(expression)                                                        \
  do {                                                                               \
    if (pydet_status status_ = (expression); status_ != PYDET_OK) return status_;    \
  } while (0)

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

// ---- Words -------------------------------------------------------------------------------------------------------

constexpr const char *type_name(Type type) { return kTypes[int(type)].name; }

struct Text {
  char text[200];
};

// "float32, bfloat16 or float16".
inline Text type_list(uint32_t types) {
  Text out = {""};
  size_t used = 0;
  for (const TypeRow &row : kTypes) {
    if (!(types & bit(row.type))) continue;
    const char *join = used == 0 ? "" : types >> (int(row.type) + 1) ? ", " : " or ";
    used += size_t(snprintf(out.text + used, sizeof out.text - used, "%s%s", join, row.name));
    if (used >= sizeof out.text) break;
  }
  return out;
}

// "4096x512"; a scalar's shape is "()".
inline Text shape_text(const int64_t *shape, int ndim) {
  Text out;
  size_t used = size_t(snprintf(out.text, sizeof out.text, "%s", ndim == 0 ? "()" : ""));
  for (int i = 0; i < ndim && used < sizeof out.text; ++i)
    used += size_t(snprintf(out.text + used, sizeof out.text - used, "%s%" PRId64, i ? "x" : "", shape[i]));
  return out;
}
inline Text shape_text(const View &view) { return shape_text(view.shape, view.ndim); }

inline Text device_text(int32_t type, int32_t id) {
  Text out;
  const char *name = type == PYDET_CPU ? "the CPU" : type == PYDET_CUDA ? "CUDA" : type == PYDET_ROCM ? "ROCm" : nullptr;
  if (type == PYDET_CPU) snprintf(out.text, sizeof out.text, "%s", name);
  else if (name) snprintf(out.text, sizeof out.text, "%s device %d", name, int(id));
  else snprintf(out.text, sizeof out.text, "a device of DLPack type %d", int(type));
  return out;
}

// ---- One operand -------------------------------------------------------------------------------------------------

// Memory that the CPU reads is the CPU's, whoever pinned it; managed memory is its GPU's.
inline Device normalized(pydet_device device) {
  switch (device.device_type) {
    case PYDET_CPU: case PYDET_CUDA_HOST: case PYDET_ROCM_HOST: return {PYDET_CPU, 0};
    case PYDET_CUDA_MANAGED: return {PYDET_CUDA, device.device_id};
    default: return {device.device_type, device.device_id};
  }
}

inline const Backend *backend_for(int32_t device_type) {
  if (device_type == PYDET_CPU) return &cpu_backend();
  const Backend *gpu = gpu_backend();
  return gpu && gpu->device_type == device_type ? gpu : nullptr;
}

// Reads a descriptor of `min_ndim` dimensions or more into *view, and checks all that can be checked alone.
inline pydet_status read(const char *op, const char *name, Use use, const pydet_tensor *tensor, int min_ndim, View *view) {
  if (!tensor) return fail(PYDET_NULL_POINTER, "%s: %s is NULL, want a tensor", op, name);
  int ndim = tensor->ndim;
  if (ndim < min_ndim || ndim > kMaxDims)
    return fail(PYDET_INVALID_SHAPE, "%s: %s has %d dimensions, want %d to %d", op, name, ndim, min_ndim, kMaxDims);
  if (ndim > 0 && !tensor->shape) return fail(PYDET_NULL_POINTER, "%s: %s has no shape", op, name);
  view->op = op;
  view->name = name;
  view->ndim = ndim;
  if (!type_of(tensor->dtype, &view->type))
    return fail(PYDET_INVALID_DTYPE, "%s: %s has DLPack dtype (code %d, bits %d, lanes %d), want %s", op, name,
                int(tensor->dtype.code), int(tensor->dtype.bits), int(tensor->dtype.lanes), type_list(types_for(use)).text);
  if (!(types_for(use) & bit(view->type)))
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want %s", op, name, type_name(view->type),
                type_list(types_for(use)).text);
  view->device = normalized(tensor->device);
  if (!backend_for(view->device.type))
    return fail(PYDET_INVALID_DEVICE, "%s: %s is on %s, this build serves the CPU%s%s", op, name,
                device_text(tensor->device.device_type, tensor->device.device_id).text, gpu_backend() ? " and " : " only",
                gpu_backend() ? gpu_backend()->name : "");

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
  if (view->empty()) return PYDET_OK;
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

// ---- Operands together -------------------------------------------------------------------------------------------

inline pydet_status same_device(const View &first, const View &other) {
  if (!other.present() || (other.device.type == first.device.type && other.device.id == first.device.id)) return PYDET_OK;
  return fail(PYDET_INVALID_DEVICE, "%s: %s is on %s, want %s as %s is", other.op, other.name,
              device_text(other.device.type, other.device.id).text, device_text(first.device.type, first.device.id).text,
              first.name);
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
      return fail(PYDET_INVALID_STRIDE, "%s: %s has stride %" PRId64 " in dimension %d, so its elements overlap", view.op,
                  view.name, view.stride[next], next);
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

inline pydet_status check_workspace(const char *op, const void *workspace, uint64_t size) {
  if (!workspace && size) return fail(PYDET_NULL_POINTER, "%s: workspace is NULL, workspace_size %" PRIu64, op, size);
  if (reinterpret_cast<uintptr_t>(workspace) % 16)
    return fail(PYDET_MISALIGNED, "%s: workspace is at %p, want a multiple of 16 bytes", op, workspace);
  uint64_t end = 0;
  if (__builtin_add_overflow(reinterpret_cast<uintptr_t>(workspace), size, &end) || end > kMaxAddress)
    return fail(PYDET_OVERFLOW, "%s: workspace at %p is %" PRIu64 " bytes, which reaches past 2^63 - 1", op, workspace, size);
  return PYDET_OK;
}

inline pydet_status workspace_apart(const View &view, const void *workspace, uint64_t size) {
  if (!view.present() || view.empty() || !workspace) return PYDET_OK;
  Footprint f = footprint(view);
  uintptr_t begin = reinterpret_cast<uintptr_t>(workspace);
  if (f.end <= begin || begin + size <= f.begin) return PYDET_OK;
  return fail(PYDET_OVERLAP, "%s: workspace shares memory with %s, want it apart", view.op, view.name);
}

inline pydet_status check_flag(const char *op, const char *name, int32_t value) {
  if (value == 0 || value == 1) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: options.%s is %d, want 0 or 1", op, name, int(value));
}

template <class Options> pydet_status read_options(const char *op, const Options *given, Options *options) {
  if (!given) return PYDET_OK;
  if (given->struct_size != sizeof(Options))
    return fail(PYDET_INVALID_VALUE, "%s: options.struct_size is %u, want %zu", op, unsigned(given->struct_size),
                sizeof(Options));
  *options = *given;
  if (options->reserved != 0)
    return fail(PYDET_INVALID_VALUE, "%s: options.reserved is %d, want 0", op, int(options->reserved));
  return PYDET_OK;
}

// ---- GEMM --------------------------------------------------------------------------------------------------------

// One row an arithmetic, at its number: its name, and the factors that it takes.
struct ArithmeticRow {
  Arithmetic arithmetic;
  const char *name;
  uint32_t factors;
};
constexpr ArithmeticRow kArithmetics[] = {
    {Arithmetic::automatic, "auto", kUnscaledTypes}, {Arithmetic::ieee, "ieee", kUnscaledTypes},
    {Arithmetic::sm90, "sm90", kHalfTypes},          {Arithmetic::sm80, "sm80", kHalfTypes},
    {Arithmetic::cdna3, "cdna3", kHalfTypes},        {Arithmetic::cdna2, "cdna2", kHalfTypes},
};
constexpr int kArithmeticCount = int(sizeof kArithmetics / sizeof *kArithmetics);
constexpr bool arithmetics_are_in_order() {
  for (int i = 0; i < kArithmeticCount; ++i)
    if (int(kArithmetics[i].arithmetic) != i) return false;
  return true;
}
static_assert(arithmetics_are_in_order(), "row i of kArithmetics is that of arithmetic i");

constexpr const char *arithmetic_name(Arithmetic arithmetic) { return kArithmetics[int(arithmetic)].name; }

constexpr bool is_arithmetic(int32_t asked) { return asked >= 0 && asked < kArithmeticCount; }

inline pydet_status check_arithmetic(const char *op, int32_t asked) {
  if (is_arithmetic(asked)) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: arithmetic is %d, want 0 (auto) to %d (%s)", op, int(asked),
              kArithmeticCount - 1, kArithmetics[kArithmeticCount - 1].name);
}

inline pydet_status resolve(const char *op, Device device, Type type, int32_t asked, Arithmetic *resolved) {
  if (!is_arithmetic(asked)) return check_arithmetic(op, asked);
  *resolved = Arithmetic(asked);
  const ArithmeticRow &row = kArithmetics[asked];
  if (!(row.factors & bit(type)))
    return fail(PYDET_INVALID_DTYPE, "%s: arithmetic %s takes %s inputs, got %s", op, row.name,
                type_list(row.factors).text, type_name(type));
  if (asked != PYDET_AUTO) return PYDET_OK;
  *resolved = type == Type::f32 || device.type == PYDET_CPU ? Arithmetic::ieee
                                                            : backend_for(device.type)->tensor_cores(device.id);
  return PYDET_OK;
}

// The same operation under four names: which letters its extents have, and which operands are read transposed.
struct GemmWords {
  const char *op, *a, *b, *out;
  const char *m, *n, *k;
  bool a_transposed, b_transposed;
};

inline View transposed(View view) {
  int r = view.ndim - 2, c = view.ndim - 1;
  int64_t shape = view.shape[r], stride = view.stride[r];
  view.shape[r] = view.shape[c];
  view.stride[r] = view.stride[c];
  view.shape[c] = shape;
  view.stride[c] = stride;
  return view;
}

// One unit stride, either side. A side of extent 1 has whichever stride is convenient: view strides are 0 there.
inline pydet_status matrix_of(const View &view, Matrix *matrix) {
  int64_t rows = view.rows(), cols = view.cols(), row = view.stride[view.ndim - 2], col = view.stride[view.ndim - 1];
  if (cols <= 1 && (rows <= 1 || row != 1)) col = 1;
  else if (rows <= 1 && col != 1) row = 1;
  if (rows <= 1 && col == 1) row = cols;
  if (cols <= 1 && row == 1 && col != 1) col = rows;
  if (row != 1 && col != 1 && !view.empty())
    return fail(PYDET_INVALID_STRIDE, "%s: %s has strides %" PRId64 " and %" PRId64 " in its last two dimensions, want one of them 1",
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
      return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want leading dimensions that broadcast with those of %s, %s", b.op,
                  b.name, shape_text(b).text, a.name, shape_text(a).text);
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
inline pydet_status gemm_of(const GemmWords &words, const View &a, const View &b, const View &bias, const View &out, Gemm *gemm) {
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
  if (gemm->out.col_stride != 1) {  // a column-major out is the row-major out of the transposed product: the same bits
    auto flip = [](Matrix x) { return Matrix{x.data, x.type, x.cols, x.rows, x.col_stride, x.row_stride}; };
    Matrix b_flipped = flip(gemm->b);
    gemm->b = flip(gemm->a);
    gemm->a = b_flipped;
    gemm->bias = flip(gemm->bias);
    gemm->out = flip(gemm->out);
    gemm->m = n;
    gemm->n = m;
    for (int i = 0; i < gemm->batch.dims; ++i) {
      int64_t stride = gemm->batch.a[i];
      gemm->batch.a[i] = gemm->batch.b[i];
      gemm->batch.b[i] = stride;
    }
  }
  return PYDET_OK;
}

// The options that gemm and skinny_gemm share, after `gemm_of`.
template <class Options>
pydet_status apply_gemm_options(const GemmWords &words, const Options &options, const View &out, Gemm *gemm) {
  PYDET_TRY(resolve(words.op, gemm->device, gemm->a.type, options.arithmetic, &gemm->arithmetic));
  if (options.k_chunk < 0 || options.k_chunk % kChunkMultiple)
    return fail(PYDET_INVALID_VALUE, "%s: k_chunk is %" PRId64 ", want 0 or a positive multiple of %d", words.op,
                options.k_chunk, kChunkMultiple);
  PYDET_TRY(check_flag(words.op, "accumulate", options.accumulate));
  if (options.accumulate && out.type != Type::f32)
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want float32 under accumulate", words.op, words.out,
                type_name(out.type));
  PYDET_TRY(check_workspace(words.op, options.workspace, options.workspace_size));
  gemm->k_chunk = options.k_chunk;
  gemm->accumulate = options.accumulate != 0;
  gemm->workspace = options.workspace;
  gemm->workspace_size = options.workspace_size;
  return PYDET_OK;
}

// ---- RMSNorm -----------------------------------------------------------------------------------------------------

// Two strides for the rows of all the tensors at once (absent ones have no say).
struct RowWalk {
  int64_t rows = 1, inner = 1;
  static constexpr int kMaxTensors = 4;
  int64_t outer_stride[kMaxTensors] = {}, inner_stride[kMaxTensors] = {};
};

inline pydet_status walk_rows(const View *const *views, int count, RowWalk *walk) {
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
  if (groups > 2)
    return fail(PYDET_INVALID_STRIDE, "%s: the rows of %s need %d strides to walk, want at most 2 after merging dimensions",
                first.op, first.name, groups);
  walk->inner = groups == 2 ? extent[1] : groups == 1 ? extent[0] : 1;
  for (int t = 0; t < count; ++t) {
    walk->inner_stride[t] = groups ? stride[t][groups - 1] : 0;
    walk->outer_stride[t] = groups == 2 ? stride[t][0] : 0;
  }
  return PYDET_OK;
}

inline pydet_status unit_last_stride(const View &view) {
  if (!view.present() || view.cols() <= 1 || view.stride[view.ndim - 1] == 1 || view.empty()) return PYDET_OK;
  return fail(PYDET_INVALID_STRIDE, "%s: %s has stride %" PRId64 " in its last dimension, want 1", view.op, view.name,
              view.stride[view.ndim - 1]);
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

// What x [..., N] asks of the operands beside it: `like` have its shape, type and adjacent elements, vectors are [N] and
// rstd is [...] in fp32.
inline pydet_status check_norm(const View &x, const View *const *like, int like_count, const View &vector,
                               const View &rstd) {
  if (x.cols() == 0) return fail(PYDET_INVALID_SHAPE, "%s: x is %s, want a last dimension of 1 or more", x.op, shape_text(x).text);
  for (int i = 0; i < like_count; ++i) {
    if (!like[i]->present()) continue;
    PYDET_TRY(same_device(x, *like[i]));
    PYDET_TRY(same_type(x, *like[i]));
    PYDET_TRY(want_shape(*like[i], x.shape, x.ndim));
    PYDET_TRY(unit_last_stride(*like[i]));
  }
  PYDET_TRY(same_device(x, vector));
  if (vector.present()) {
    PYDET_TRY(want_shape(vector, x.shape + x.ndim - 1, 1));
    PYDET_TRY(unit_last_stride(vector));
  }
  if (!rstd.present()) return PYDET_OK;
  PYDET_TRY(same_device(x, rstd));
  PYDET_TRY(want_shape(rstd, x.shape, x.ndim - 1));
  if (rstd.type != Type::f32)
    return fail(PYDET_INVALID_DTYPE, "%s: rstd is %s, want float32", rstd.op, type_name(rstd.type));
  return contiguous(rstd);
}

inline pydet_status check_weight_offset(const char *op, float offset) {
  if (offset - offset == 0) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: weight_offset is %g, want a finite number", op, double(offset));
}

}  // namespace pydet
