// LayerNorm, in fp32 (NUMERICS.md, "LayerNorm"): the CPU's bits.
//
//   x = round(x + residual), mean = rowsum(x, 1) / n, d = x - mean, rstd = 1 / sqrt(rowsum(d, d) / n + eps)
//   y = round(fmaf(d rstd, w + weight_offset, bias)), or round((d rstd) (w + weight_offset))
//
// Rows up to 8192, on CUDA 16384, are held in registers by their team (rmsnorm_rows.h). Longer or misaligned rows are
// passed over three times, by single elements.

#include "gpu/kernels.h"
#include "gpu/any/rmsnorm_rows.h"

namespace pydet {
namespace {

template <int T> constexpr int kBlock = T < 128 ? 128 : T;  // several small teams share one

template <Type type, int T, int V>
__global__ void __launch_bounds__(kBlock<T>) layernorm_kernel(const __grid_constant__ LayerNorm p) {
  constexpr int W = kVector, kBytes = size_of(type), kVectorStep = T * W * kBytes, kTeams = kBlock<T> / T;
  constexpr int kRoom = kTeams * kExchange<T, 1> + 1;
  __shared__ float of_mean[kRoom], of_squares[kRoom];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T, n = int(p.n);
  const int64_t r = block_number() * kTeams + team, last = p.rows - 1;
  const bool there = r <= last;
  const RowIndex where = row_index(p.inner, there ? r : last);

  Packed<type, W> x[V] = {};
  const char *x_row = row_at(p.x, kBytes, where) + t * W * kBytes;
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (W * (t + T * v) < n) x[v] = load_packed<type, W>(x_row + v * kVectorStep);
  if (p.residual.data) {
    const char *residual_row = row_at(p.residual, kBytes, where) + t * W * kBytes;
    char *sum_row = row_at(p.sum, kBytes, where) + t * W * kBytes;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (W * (t + T * v) >= n) continue;
      float one[W], other[W];
      unpack(x[v], one);
      unpack(load_packed<type, W>(residual_row + v * kVectorStep), other);
#pragma unroll
      for (int e = 0; e < W; ++e) one[e] += other[e];
      x[v] = pack<type>(one);
      if (there) *reinterpret_cast<Packed<type, W> *>(sum_row + v * kVectorStep) = x[v];
    }
  }

  constexpr bool kEarly = kGpuDeviceType == PYDET_CUDA && V <= 2;  // else they would take registers of the row
  Scale<W> weight[kEarly ? V : 1], bias[kEarly ? V : 1];
  if constexpr (kEarly)
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (W * (t + T * v) < n) {
        weight[v].load(p.weight, W * (t + T * v));
        bias[v].load(p.bias, W * (t + T * v));
      }
  Lanes<T, W, V> lanes[1], squares[1];
  float ones[W], mean[1], rstd[1];
#pragma unroll
  for (int e = 0; e < W; ++e) ones[e] = 1.0f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float one[W];
    unpack(x[v], one);
    lanes[0].add(v, W * (t + T * v) < n, one, ones);
  }
  join(lanes, of_mean + team * kExchange<T, 1>, [&](float sum) { return sum / float(p.n); }, mean);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float d[W];
    unpack(x[v], d);
#pragma unroll
    for (int e = 0; e < W; ++e) d[e] -= mean[0];
    squares[0].add(v, W * (t + T * v) < n, d, d);
  }
  join(squares, of_squares + team * kExchange<T, 1>, [&](float sum) { return rstd_of(sum, p.n, p.eps); }, rstd);
  if (!there) return;
  if (t == 0) {
    store_of_row(p.mean, r, mean[0]);
    store_of_row(p.rstd, r, rstd[0]);
  }

  constexpr float kNothing = -0.0f;  // which changes no number that it is added to
  char *y_row = row_at(p.y, kBytes, where) + t * W * kBytes;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int j = W * (t + T * v);
    if (j >= n) continue;
    const int early = kEarly ? v : 0;
    if constexpr (!kEarly) {
      weight[0] = bias[0] = {};
      weight[0].load(p.weight, j);
      bias[0].load(p.bias, j);
    }
    float y[W], scale[W], shift[W];
    unpack(x[v], y);
    weight[early].unpack(p.weight, p.weight_offset, scale);
    bias[early].unpack(p.bias, kNothing, shift);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const float xhat = (y[e] - mean[0]) * rstd[0];
      y[e] = p.bias.data ? fmaf(xhat, scale[e], shift[e]) : xhat * scale[e];
    }
    store_packed<type>(y_row + v * kVectorStep, y);
  }
}

template <Type type>
__global__ void __launch_bounds__(kMaxTeam, 2) layernorm_long_kernel(const __grid_constant__ LayerNorm p) {
  constexpr int T = kMaxTeam;
  __shared__ float exchange[2 * T];
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    char *x_row = row_at(p.residual.data ? p.sum : p.x, size_of(type), p.inner, r);
    char *y_row = row_at(p.y, size_of(type), p.inner, r);
    Lanes<T, kVector, 1> lanes[1], squares[1];
    float ones[kVector], mean[1], rstd[1];
#pragma unroll
    for (int e = 0; e < kVector; ++e) ones[e] = 1.0f;
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
      lanes[0].add_left(p.n - j, x, ones);
    }
    join(lanes, exchange, [&](float sum) { return sum / float(p.n); }, mean);
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      float d[kVector];
      load_elements<type>(x_row, j, p.n, d);
#pragma unroll
      for (int e = 0; e < kVector; ++e) d[e] -= mean[0];
      squares[0].add_left(p.n - j, d, d);
    }
    join(squares, exchange + T, [&](float sum) { return rstd_of(sum, p.n, p.eps); }, rstd);
    if (threadIdx.x == 0) {
      store_of_row(p.mean, r, mean[0]);
      store_of_row(p.rstd, r, rstd[0]);
    }
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      float x[kVector], scale[kVector];
      load_elements<type>(x_row, j, p.n, x);
      load_scale(p.weight, p.weight_offset, j, p.n, scale);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const float xhat = (x[e] - mean[0]) * rstd[0];
        const bool biased = p.bias.data && j + e < p.n;
        x[e] = biased ? fmaf(xhat, scale[e], load_f32(p.bias.data, p.bias.type, j + e)) : xhat * scale[e];
      }
      store_elements<type>(y_row, j, p.n, x);
    }
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

// Calls f with a team that holds a row of n; on CUDA, where that was timed, with one that it fills better.
template <class F> pydet_status with_shape(int64_t n, const F &f) {
  if constexpr (kGpuDeviceType == PYDET_CUDA) {
    if (n <= 16 * 8) return f(RowShape<16, 8, 1, 1>{});
    if (n > 32 * 8 && n <= 64 * 8) return f(RowShape<64, 8, 1, 1>{});
    if (n > 64 * 8 && n <= 128 * 8) return f(RowShape<128, 8, 1, 1>{});
    if (n > 128 * 16 && n <= 256 * 16) return f(RowShape<256, 8, 2, 1>{});
  }
  if (n <= 32 * 8) return f(RowShape<32, 8, 1, 1>{});
  if (n <= 128 * 16) return f(RowShape<128, 8, 2, 1>{});
  if constexpr (kGpuDeviceType == PYDET_CUDA)
    if (n > 256 * 32) return f(RowShape<256, 8, 8, 1>{});
  return f(RowShape<256, 8, 4, 1>{});
}

bool holds(int64_t n) {
  constexpr int64_t kLongest = kGpuDeviceType == PYDET_CUDA ? 256 * 64 : 256 * 32;
  return n % kVector == 0 && n <= kLongest;
}

constexpr int64_t kMostBlocks = 1 << 20;  // more are walked in turns
unsigned limited(int64_t blocks) { return unsigned(blocks < kMostBlocks ? blocks : kMostBlocks); }

}  // namespace

bool layernorm_held_takes(const LayerNorm &p) {
  return holds(p.n) && rows_aligned(p.x) && rows_aligned(p.residual) && rows_aligned(p.y) && rows_aligned(p.sum) &&
         vector_aligned(p.weight) && vector_aligned(p.bias);
}

pydet_status layernorm_held(const LayerNorm &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("layernorm_held", guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return with_shape(p.n, [&](auto shape) {
      constexpr int T = shape.T, kTeams = kBlock<T> / T;
      Launch where = {"layernorm_held", static_cast<gpu_stream>(p.stream),
                      grid_of(divide_up(p.rows, kTeams), kBlock<T>), dim3(kBlock<T>)};
      where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
      return launch(where, layernorm_kernel<type, T, shape.V>, p);
    });
  });
}

pydet_status layernorm_long(const LayerNorm &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("layernorm_long", guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    Launch where = {"layernorm_long", static_cast<gpu_stream>(p.stream), dim3(limited(p.rows)), dim3(kMaxTeam)};
    return launch(where, layernorm_long_kernel<type>, p);
  });
}

}  // namespace pydet
