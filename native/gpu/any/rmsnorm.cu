// RMSNorm, in fp32 (NUMERICS.md, "RMSNorm"): the CPU's bits.
//
//   x    = round(x + residual), stored in sum          only with a residual
//   rstd = 1 / sqrt(rowsum(x, x) / n + eps)
//   y    = round((x rstd) (w + weight_offset))
//
// Rows up to 16384 are held in registers by their team (rmsnorm_rows.h), one or two at a time; a block ends with them,
// and enough blocks share a multiprocessor to keep the memory busy. Longer or misaligned rows are read twice, by single
// elements.

#include "gpu/kernels.h"
#include "gpu/any/rmsnorm_rows.h"

namespace pydet {
namespace {

template <int T> constexpr int kBlock = T < 128 ? 128 : T;  // several small teams share one

template <Type type, int T, int W, int V, int R, bool residual>
__global__ void __launch_bounds__(kBlock<T>) rmsnorm_kernel(const __grid_constant__ RmsNorm p) {
  constexpr int kBytes = size_of(type), kVectorStep = T * W * kBytes, kTeams = kBlock<T> / T;
  __shared__ float exchange[kTeams * kExchange<T, R> + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T, n = int(p.n);
  const int64_t first = (block_number() * kTeams + team) * R;
  bool inside[V], there[R];
  RowIndex index[R];
#pragma unroll
  for (int v = 0; v < V; ++v) inside[v] = W * (t + T * v) < n;
#pragma unroll
  for (int k = 0; k < R; ++k) {
    there[k] = first + k < p.rows;
    index[k] = row_index(p.inner, first + k);
  }

  Packed<type, W> x[R][V] = {};
#pragma unroll
  for (int k = 0; k < R; ++k) {
    const char *row = row_at(p.x, kBytes, index[k]) + t * W * kBytes;
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (there[k] && inside[v]) x[k][v] = load_packed<type, W>(row + v * kVectorStep);
  }
  if constexpr (residual) {
    Packed<type, W> added[R][V] = {};
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const char *row = row_at(p.residual, kBytes, index[k]) + t * W * kBytes;
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (there[k] && inside[v]) added[k][v] = load_packed<type, W>(row + v * kVectorStep);
    }
#pragma unroll
    for (int k = 0; k < R; ++k) {
      char *row = row_at(p.sum, kBytes, index[k]) + t * W * kBytes;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float one[W], other[W];
        unpack(x[k][v], one);
        unpack(added[k][v], other);
#pragma unroll
        for (int e = 0; e < W; ++e) one[e] += other[e];
        x[k][v] = pack<type>(one);
        if (there[k] && inside[v]) *reinterpret_cast<Packed<type, W> *>(row + v * kVectorStep) = x[k][v];
      }
    }
  }
  Scale<W> weight[V];
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (inside[v]) weight[v].load(p.weight, W * (t + T * v));

  Lanes<T, W, V> lanes[R];
#pragma unroll
  for (int k = 0; k < R; ++k)
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float one[W];
      unpack(x[k][v], one);
      lanes[k].add(v, true, one, one);  // past the row's end +0: no lane is ever -0 here
    }
  float rstd[R];
  join(lanes, exchange + team * kExchange<T, R>, [&](float sum) { return rstd_of(sum, p.n, p.eps); }, rstd);
  if (p.rstd.data && t == 0)
#pragma unroll
    for (int k = 0; k < R; ++k)
      if (there[k]) reinterpret_cast<float *>(p.rstd.data)[first + k] = canonical(rstd[k]);
  char *y_row[R];
#pragma unroll
  for (int k = 0; k < R; ++k) y_row[k] = row_at(p.y, kBytes, index[k]) + t * W * kBytes;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float scale[W];
    weight[v].unpack(p.weight, p.weight_offset, scale);
#pragma unroll
    for (int k = 0; k < R; ++k) {
      float y[W];
      unpack(x[k][v], y);
#pragma unroll
      for (int e = 0; e < W; ++e) y[e] = y[e] * rstd[k] * scale[e];
      if (there[k] && inside[v]) store_packed<type>(y_row[k] + v * kVectorStep, y);
    }
  }
}

template <Type type>
__global__ void __launch_bounds__(kMaxTeam, 2) rmsnorm_long_kernel(const __grid_constant__ RmsNorm p) {
  constexpr int T = kMaxTeam;
  __shared__ float exchange[2 * T];
  int i = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x, ++i) {
    char *x_row = row_at(p.residual.data ? p.sum : p.x, size_of(type), p.inner, r);
    char *y_row = row_at(p.y, size_of(type), p.inner, r);
    Lanes<T, kVector, 1> lanes[1];
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      float x[kVector];
      if (p.residual.data) {
        float residual[kVector];
        load_elements<type>(row_at(p.x, size_of(type), p.inner, r), j, p.n, x);
        load_elements<type>(row_at(p.residual, size_of(type), p.inner, r), j, p.n, residual);
#pragma unroll
        for (int e = 0; e < kVector; ++e) x[e] += residual[e];
        store_elements<type>(x_row, j, p.n, x);
      }
      load_elements<type>(x_row, j, p.n, x);
      lanes[0].add_left(p.n - j, x, x);
    }
    float rstd[1];
    join(lanes, exchange + i % 2 * T, [&](float sum) { return rstd_of(sum, p.n, p.eps); }, rstd);
    if (p.rstd.data && threadIdx.x == 0) reinterpret_cast<float *>(p.rstd.data)[r] = canonical(rstd[0]);
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      float x[kVector], scale[kVector];
      load_elements<type>(x_row, j, p.n, x);
      load_scale(p.weight, p.weight_offset, j, p.n, scale);
#pragma unroll
      for (int e = 0; e < kVector; ++e) x[e] = x[e] * rstd[0] * scale[e];
      store_elements<type>(y_row, j, p.n, x);
    }
  }
}

// Calls f with a team that holds a row of n: few threads with much to do each, and some rows more where a row is short.
template <class F> pydet_status with_shape(int64_t n, const F &f) {
  if (n <= 8 * 8) return f(RowShape<8, 8, 1, 2>{});
  if (n <= 16 * 8) return f(RowShape<16, 8, 1, 2>{});
  if (n <= 32 * 8) return f(RowShape<32, 8, 1, 1>{});
  if (n <= 32 * 16) return f(RowShape<32, 8, 2, 2>{});
  if (n <= 64 * 16) return f(RowShape<64, 8, 2, 2>{});
  if (n <= 128 * 16) return f(RowShape<128, 8, 2, 1>{});
  if (n <= 128 * 32) return f(RowShape<128, 8, 4, 1>{});
  if (n <= 256 * 32) return f(RowShape<256, 8, 4, 1>{});
  return f(RowShape<256, 8, 8, 1>{});
}

}  // namespace

bool rmsnorm_held_takes(const RmsNorm &p) {
  return p.n % kVector == 0 && p.n <= kLongestHeldRow && rows_aligned(p.x) && rows_aligned(p.residual) &&
         rows_aligned(p.y) && rows_aligned(p.sum) && vector_aligned(p.weight);
}

pydet_status rmsnorm_held(const RmsNorm &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_held", guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return with_shape(p.n, [&](auto shape) {
      constexpr int T = shape.T, W = shape.W, V = shape.V, R = shape.R, kRows = kBlock<T> / T * R;
      auto kernel = p.residual.data ? rmsnorm_kernel<type, T, W, V, R, true> : rmsnorm_kernel<type, T, W, V, R, false>;
      Launch where = {"rmsnorm_held", static_cast<gpu_stream>(p.stream), grid_of(divide_up(p.rows, kRows), kBlock<T>),
                      dim3(kBlock<T>)};
      where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
      return launch(where, kernel, p);
    });
  });
}

pydet_status rmsnorm_long(const RmsNorm &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_long", guard.error());
  constexpr int64_t kMostBlocks = 1 << 20;  // more rows are walked in turns
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    Launch where = {"rmsnorm_long", static_cast<gpu_stream>(p.stream),
                    dim3(unsigned(p.rows < kMostBlocks ? p.rows : kMostBlocks)), dim3(kMaxTeam)};
    return launch(where, rmsnorm_long_kernel<type>, p);
  });
}

}  // namespace pydet
