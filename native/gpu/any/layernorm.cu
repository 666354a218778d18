// LayerNorm, in fp32 (NUMERICS.md, "LayerNorm"): the CPU's bits.
//
//   x = round(x + residual), mean = rowsum(x, 1) / n, d = x - mean, rstd = 1 / sqrt(rowsum(d, d) / n + eps)
//   y = round(fmaf(d rstd, w + weight_offset, bias)), or round((d rstd) (w + weight_offset))
//
// Rows up to 8192, on CUDA 16384, are held in registers by their team (rmsnorm_rows.h), one or two at a time, a warp's
// where that is enough: then no barrier stands between the two sums, and as many rows are on their way as registers
// allow. Few rows have wide teams and their weights ahead of the sums, since nothing else hides the memory's latency.
// Longer or misaligned rows are passed over three times, by single elements.

#include <type_traits>

#include "gpu/kernels.h"
#include "gpu/any/rmsnorm_rows.h"

namespace pydet {
namespace {

template <int T> constexpr int kBlock = T < 128 ? 128 : T;  // several small teams share one

// Vectors whose weights are loaded together: of few rows all, of many one, whose wait others hide.
template <int V, bool few> constexpr int kTogether = few ? V : 1;

template <Type type, int T, int V, int R, bool few>
__global__ void __launch_bounds__(kBlock<T>) layernorm_kernel(const __grid_constant__ LayerNorm p) {
  constexpr int W = kVector, kBytes = size_of(type), kVectorStep = T * W * kBytes, kTeams = kBlock<T> / T;
  constexpr int kRoom = kTeams * kExchange<T, R> + 1, kWhole = V <= 1 ? 1 : V <= 2 ? 2 : V <= 4 ? 4 : 8;
  using Sums = Lanes<T, W, kWhole>;  // groups are joined by halves
  __shared__ __align__(16) float of_mean[kRoom], of_squares[kRoom];
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

  auto load = [&](const Rows &rows, Packed<type, W>(&to)[R][V]) {
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const char *row = row_at(rows, kBytes, index[k]) + t * W * kBytes;
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (there[k] && inside[v]) to[k][v] = load_packed<type, W>(row + v * kVectorStep);
    }
  };
  Packed<type, W> x[R][V] = {};
  load(p.x, x);
  if (p.residual.data) {
    Packed<type, W> added[R][V] = {};
    load(p.residual, added);
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

  constexpr int G = kTogether<V, few>;
  constexpr bool kEarly = few && V <= 2;  // else they would take registers of the row
  struct Weights {
    Scale<W> scale[G], shift[G];
  };
  auto load_weights = [&](int v0, Weights &to) {
#pragma unroll
    for (int v = v0; v < v0 + G && v < V; ++v) {
      if (!inside[v]) continue;
      to.scale[v - v0].load(p.weight, W * (t + T * v));
      to.shift[v - v0].load(p.bias, W * (t + T * v));
    }
  };
  Weights early;
  if constexpr (kEarly) load_weights(0, early);

  Sums lanes[R], squares[R];
  float mean[R], rstd[R];
#pragma unroll
  for (int k = 0; k < R; ++k)
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float one[W];
      unpack(x[k][v], one);
      float(&lane)[W] = lanes[k].lane[v % Sums::kSlots];
#pragma unroll
      for (int e = 0; e < W; ++e) lane[e] = v < Sums::kSlots ? one[e] : lane[e] + one[e];
    }
  // Every lane begins with +0: that changes -0 alone, and once is enough. Past the row's end x is +0.
  join(lanes, of_mean + team * kExchange<T, R>, [&](float sum) { return (sum + 0.0f) / float(p.n); }, mean);
#pragma unroll
  for (int k = 0; k < R; ++k)
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if constexpr (!few) keep_packed(x[k][v]);
      const float middle = inside[v] ? mean[k] : 0.0f;  // past the row's end d is +0 so, which no square notices
      float d[W];
      unpack(x[k][v], d);
#pragma unroll
      for (int e = 0; e < W; ++e) d[e] -= middle;
      squares[k].add(v, true, d, d);
      if constexpr (!few) keep_packed(x[k][v]);
    }
  join(squares, of_squares + team * kExchange<T, R>, [&](float sum) { return rstd_of(sum, p.n, p.eps); }, rstd);
  if (t == 0)
#pragma unroll
    for (int k = 0; k < R; ++k)
      if (there[k]) {
        store_of_row(p.mean, first + k, mean[k]);
        store_of_row(p.rstd, first + k, rstd[k]);
      }

  constexpr float kNothing = -0.0f;  // which changes no number that it is added to
  char *y_row[R];
#pragma unroll
  for (int k = 0; k < R; ++k) y_row[k] = row_at(p.y, kBytes, index[k]) + t * W * kBytes;
#pragma unroll
  for (int v0 = 0; v0 < V; v0 += G) {
    if (G == 1 && !inside[v0]) continue;
    Weights weights;
    if constexpr (kEarly) weights = early;
    else load_weights(v0, weights);
#pragma unroll
    for (int v = v0; v < v0 + G && v < V; ++v) {
      if (!inside[v]) continue;
      float scale[W], shift[W];
      weights.scale[v - v0].unpack(p.weight, p.weight_offset, scale);
      weights.shift[v - v0].unpack(p.bias, kNothing, shift);
#pragma unroll
      for (int k = 0; k < R; ++k) {
        float y[W];
        unpack(x[k][v], y);
#pragma unroll
        for (int e = 0; e < W; ++e) {
          const float xhat = (y[e] - mean[k]) * rstd[k];
          y[e] = p.bias.data ? fmaf(xhat, scale[e], shift[e]) : xhat * scale[e];
        }
        if (there[k]) store_packed<type>(y_row[k] + v * kVectorStep, y);
      }
    }
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

template <int T, int V, int R, bool few>
struct LayerShape : RowShape<T, kVector, V, R>, std::bool_constant<few> {};

// Whether so many rows leave much of the device idle. On an H100, us: 64x4096 2.6, and 3.1 with the shape of many rows,
// 1000x1024 3.7 and 4.0, 64x8192 4.0 and 4.3; but 1000x1536 5.7 and 5.1, 2000x640 5.1 and 4.6, 512x6144 9.1 and 7.6,
// 256x16384 13.9 and 11.7.
[[maybe_unused]] bool few_rows(int64_t rows, int64_t n) {
  return n <= 8192 && rows <= (n <= 1024 ? 1024 : 512) && rows * n <= 2'000'000;
}

// Calls f with a team that holds a row of n: on CUDA, where that was timed, of many rows few threads with much to do each.
template <class F> pydet_status with_shape(int64_t rows, int64_t n, const F &f) {
  if constexpr (kGpuDeviceType != PYDET_CUDA) {
    if (n <= 32 * 8) return f(LayerShape<32, 1, 1, true>{});
    if (n <= 128 * 16) return f(LayerShape<128, 2, 1, false>{});
    return f(LayerShape<256, 4, 1, false>{});
  } else if (few_rows(rows, n)) {
    if (n <= 16 * 8) return f(LayerShape<16, 1, 1, true>{});
    if (n <= 32 * 8) return f(LayerShape<32, 1, 1, true>{});
    if (n <= 64 * 8) return f(LayerShape<64, 1, 1, true>{});
    if (n <= 128 * 8) return f(LayerShape<128, 1, 1, true>{});
    if (n <= 128 * 16) return f(LayerShape<128, 2, 1, true>{});
    if (n <= 256 * 16) return f(LayerShape<256, 2, 1, true>{});
    return f(LayerShape<256, 4, 1, true>{});
  } else {
    if (n <= 8 * 8) return f(LayerShape<8, 1, 2, false>{});
    if (n <= 16 * 8) return f(LayerShape<16, 1, 2, false>{});
    if (n <= 32 * 8) return f(LayerShape<32, 1, 2, false>{});
    if (n <= 32 * 16) return f(LayerShape<32, 2, 2, false>{});
    // 2600x640 5.3 us, by the next one 6.2, 6000x640 8.6 and 9.2; but 4096x768 8.0 and 7.3.
    const bool in_time = (rows > 2400 && rows <= 3600) || rows > 4500;
    if (n <= 32 * 24 && in_time) return f(LayerShape<32, 3, 2, false>{});
    if (n <= 64 * 16) return f(LayerShape<64, 2, 2, false>{});
    // 2300x1408 7.8 us, by the one after 7.1; 1300x1408 5.5 and 6.3, 4096x1536 13.1 and 12.1.
    const bool wide = (rows > 1400 && rows <= 2400) || (n > 64 * 22 && rows > 3200 && rows <= 6000);
    if (n <= 64 * 24 && !wide) return f(LayerShape<64, 3, 1, false>{});
    if (n <= 128 * 16) return f(LayerShape<128, 2, 2, false>{});
    if (n <= 128 * 24) return f(LayerShape<128, 3, 1, false>{});
    if (n <= 128 * 32) return f(LayerShape<128, 4, 1, false>{});
    if (n <= 256 * 24) return f(LayerShape<256, 3, 1, false>{});
    if (n <= 256 * 32) return f(LayerShape<256, 4, 1, false>{});
    if (n <= 256 * 40) return f(LayerShape<256, 5, 1, false>{});
    if (n <= 256 * 48) return f(LayerShape<256, 6, 1, false>{});
    return f(LayerShape<256, 8, 1, false>{});
  }
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
    return with_shape(p.rows, p.n, [&](auto shape) {
      constexpr int T = shape.T, R = type == Type::f32 ? 1 : shape.R, kRows = kBlock<T> / T * R;  // as much in bytes
      Launch where = {"layernorm_held", static_cast<gpu_stream>(p.stream), grid_of(divide_up(p.rows, kRows), kBlock<T>),
                      dim3(kBlock<T>)};
      where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
      return launch(where, layernorm_kernel<type, T, shape.V, R, shape.value>, p);
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
