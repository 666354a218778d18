// A pass over the elements of a product (ops/gemm/rounding.h): to = round(from + bias).
//
// A thread takes four neighbouring elements of a row, or one where something is not aligned for that.

#include "ops/gemm/rounding.h"
#include "ops/grouped/problem.h"

#include "gpu/any/fold.h"
#include "gpu/kernels.h"

namespace pydet {
namespace {

constexpr int kThreads = 256;

template <int W> __global__ void __launch_bounds__(kThreads) rounding_kernel(const __grid_constant__ Rounding p) {
  const int64_t i = (block_number() * kThreads + threadIdx.x) * W;
  if (i >= p.batch.count * p.m * p.n) return;
  const int64_t row = i / p.n, n = i - row * p.n, matrix = row / p.m, m = row - matrix * p.m;
  const BatchOffsets at = batch_offsets(p.batch, matrix);
  const int64_t from = at.a + m * p.from.row_stride + n * p.from.col_stride;
  const int64_t to = at.out + m * p.to.row_stride + n;
  Elements<W> x = load_elements<W>(reinterpret_cast<const float *>(p.from.data) + from);
  if (p.bias.data) {
    const int64_t bias = at.bias + m * p.bias.row_stride + n * p.bias.col_stride;
#pragma unroll
    for (int e = 0; e < W; ++e) x.x[e] = x.x[e] + load_f32(p.bias.data, p.bias.type, bias + e * p.bias.col_stride);
  }
  if constexpr (W == 4) {
    store_packed(p.to.data + to * size_of(p.to.type), p.to.type, packed(x, p.to.type));
  } else {
    store_rounded(p.to.data, p.to.type, to, x.x[0]);
  }
}

// Rows of groups: a block looks for the groups of its own, one after the other.
constexpr int kRows = 8;
template <int W> __global__ void __launch_bounds__(kThreads)
    grouped_rounding_kernel(const __grid_constant__ Rounding p) {
  const int64_t begin = block_number() * kRows, end = begin + kRows < p.m ? begin + kRows : p.m;
  struct {
    int64_t tokens;
    const int32_t *start, *end;
  } const groups = {p.groups.tokens, p.groups.start, p.groups.end};
  GroupWalk group;
  for (int64_t m = begin; m < end; ++m) {
    while (group.last <= m && group.index + 1 < p.groups.count) group.next(groups);
    if (m < group.first || m >= group.last) continue;
    for (int64_t n = int64_t(threadIdx.x) * W; n < p.n; n += kThreads * W) {
      const int64_t from = m * p.from.row_stride + n * p.from.col_stride;
      const int64_t to = m * p.to.row_stride + n * p.to.col_stride;
      Elements<W> x = load_elements<W>(reinterpret_cast<const float *>(p.from.data) + from);
      if (p.bias.data) {
        const int64_t bias = group.index * p.groups.bias_stride + n * p.bias.col_stride;
#pragma unroll
        for (int e = 0; e < W; ++e) x.x[e] = x.x[e] + load_f32(p.bias.data, p.bias.type, bias + e * p.bias.col_stride);
      }
      if constexpr (W == 4) {
        store_packed(p.to.data + to * size_of(p.to.type), p.to.type, packed(x, p.to.type));
      } else {
        store_rounded(p.to.data, p.to.type, to, x.x[0]);
      }
    }
  }
}

// Whether four neighbours of every row lie together, at a multiple of their size.
bool by_four(const Matrix &x, const Batch &batch, const int64_t (&strides)[kMaxBatchDims]) {
  bool whole = x.col_stride == 1 && x.cols % 4 == 0 && x.row_stride % 4 == 0 &&
               reinterpret_cast<uintptr_t>(x.data) % uintptr_t(4 * size_of(x.type)) == 0;
  for (int i = 0; i < batch.dims; ++i) whole = whole && strides[i] % 4 == 0;
  return whole;
}

template <int W> pydet_status launch_rounding(const Rounding &p) {
  if (p.groups.end) {
    Launch rows = {"rounding", static_cast<gpu_stream>(p.stream), grid_of(divide_up(p.m, kRows), kThreads),
                   dim3(kThreads)};
    return launch(rows, grouped_rounding_kernel<W>, p);
  }
  Launch where = {"rounding", static_cast<gpu_stream>(p.stream),
                  grid_of(divide_up(p.batch.count * p.m * p.n, kThreads * W), kThreads), dim3(kThreads)};
  return launch(where, rounding_kernel<W>, p);
}

}  // namespace

pydet_status round_elements(const Rounding &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rounding", guard.error());
  return by_four(p.from, p.batch, p.batch.a) && by_four(p.to, p.batch, p.batch.out) ? launch_rounding<4>(p)
                                                                                    : launch_rounding<1>(p);
}

}  // namespace pydet
