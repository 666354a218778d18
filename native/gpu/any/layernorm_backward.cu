// Gradients of LayerNorm, in fp32 (NUMERICS.md, "LayerNorm"): the CPU's bits.
//
//   xhat = (x - mean) rstd,   g = dy (w + weight_offset)
//   a = rowsum(g, 1) / n,   c = rowsum(g, xhat) / n,   t = fmaf(-xhat, c, g) - a
//   dx = round(rstd t), or round(fmaf(rstd, t, dresidual))
//   dweight, dbias: chains of 16 rows of dy xhat and of dy, which rmsnorm_dweight.cu joins
//
// Rows up to 8192, on CUDA 16384, are held in registers by their team (rmsnorm_rows.h). Longer or misaligned rows are
// passed over twice, by single elements. The sums over rows pass over x and dy once more: a thread takes one or two
// columns of a chain.

#include "gpu/kernels.h"
#include "gpu/any/rmsnorm_partials.h"
#include "gpu/any/rmsnorm_rows.h"

namespace pydet {
namespace {

template <int T> constexpr int kBlock = T < 128 ? 128 : T;  // several small teams share one

// ---- dx ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float dx_of(float xhat, float g, float rstd, float a, float c, bool added, float dresidual) {
  const float t = fmaf(-xhat, c, g) - a;
  return added ? fmaf(rstd, t, dresidual) : rstd * t;
}

template <Type type, int T, int V>
__global__ void __launch_bounds__(kBlock<T>) layernorm_dx_kernel(const __grid_constant__ LayerNormBackward p) {
  constexpr int W = kVector, kBytes = size_of(type), kVectorStep = T * W * kBytes, kTeams = kBlock<T> / T;
  __shared__ __align__(16) float exchange[kTeams * kExchange<T, 2> + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T, n = int(p.n);
  const int64_t r = block_number() * kTeams + team, last = p.rows - 1;
  const RowIndex where = row_index(p.inner, r <= last ? r : last);
  const float mean = of_row(p.mean, r <= last ? r : last), rstd = of_row(p.rstd, r <= last ? r : last);
  const char *dy_row = row_at(p.dy, kBytes, where) + t * W * kBytes,
             *x_row = row_at(p.x, kBytes, where) + t * W * kBytes;
  Packed<type, W> dy[V] = {}, x[V] = {};
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (W * (t + T * v) < n) {
      dy[v] = load_packed<type, W>(dy_row + v * kVectorStep);
      x[v] = load_packed<type, W>(x_row + v * kVectorStep);
    }

  auto load_xhat_and_g = [&](int v, float(&xhat)[W], float(&g)[W]) {
    Scale<W> weight;
    float scale[W];
    if (W * (t + T * v) < n) weight.load(p.weight, W * (t + T * v));
    weight.unpack(p.weight, p.weight_offset, scale);
    unpack(x[v], xhat);
    unpack(dy[v], g);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      xhat[e] = (xhat[e] - mean) * rstd;
      g[e] *= scale[e];
    }
  };
  Lanes<T, W, V> lanes[2];
  float ones[W], sums[2];  // c and a
#pragma unroll
  for (int e = 0; e < W; ++e) ones[e] = 1.0f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float xhat[W], g[W];
    load_xhat_and_g(v, xhat, g);
    lanes[0].add(v, W * (t + T * v) < n, g, xhat);
    lanes[1].add(v, W * (t + T * v) < n, g, ones);
  }
  join(lanes, exchange + team * kExchange<T, 2>, [&](float sum) { return sum / float(p.n); }, sums);
  if (r > last) return;

  char *dx_row = row_at(p.dx, kBytes, where) + t * W * kBytes;
  const char *dresidual_row = row_at(p.dresidual, kBytes, where) + t * W * kBytes;  // read if there is one
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (W * (t + T * v) >= n) continue;
    float xhat[W], g[W], dresidual[W] = {};
    load_xhat_and_g(v, xhat, g);
    if (p.dresidual.data) unpack(load_packed<type, W>(dresidual_row + v * kVectorStep), dresidual);
#pragma unroll
    for (int e = 0; e < W; ++e) g[e] = dx_of(xhat[e], g[e], rstd, sums[1], sums[0], p.dresidual.data, dresidual[e]);
    store_packed<type>(dx_row + v * kVectorStep, g);
  }
}

// Blocks a multiprocessor is to hold, 0: as the compiler likes. Where it likes more of them than registers allow, it
// spills, and is told how many.
#if defined(__CUDA_ARCH__)
constexpr int kLongBlocks = __CUDA_ARCH__ < 900 ? 2 : 0, kChainBlocks = __CUDA_ARCH__ >= 1200 ? 4 : 0;
#else
constexpr int kLongBlocks = 0, kChainBlocks = 0;
#endif

template <Type type>
__global__ void __launch_bounds__(kMaxTeam, kLongBlocks)
    layernorm_dx_long_kernel(const __grid_constant__ LayerNormBackward p) {
  __shared__ __align__(16) float exchange[2][2 * kMaxTeam];
  int turn = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x, ++turn) {
    const float mean = of_row(p.mean, r), rstd = of_row(p.rstd, r);
    auto load_xhat_and_g = [&](int64_t j, float(&xhat)[kVector], float(&g)[kVector]) {
      float scale[kVector];
      load_elements<type>(row_at(p.x, size_of(type), p.inner, r), j, p.n, xhat);
      load_elements<type>(row_at(p.dy, size_of(type), p.inner, r), j, p.n, g);
      load_scale(p.weight, p.weight_offset, j, p.n, scale);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        xhat[e] = (xhat[e] - mean) * rstd;
        g[e] *= scale[e];
      }
    };
    Lanes<kMaxTeam, kVector, 1> lanes[2];
    float xhat[kVector], g[kVector], ones[kVector], sums[2];  // c and a
#pragma unroll
    for (int e = 0; e < kVector; ++e) ones[e] = 1.0f;
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      load_xhat_and_g(j, xhat, g);
      lanes[0].add_left(p.n - j, g, xhat);
      lanes[1].add_left(p.n - j, g, ones);
    }
    join(lanes, exchange[turn % 2], [&](float sum) { return sum / float(p.n); }, sums);
    char *dx_row = row_at(p.dx, size_of(type), p.inner, r);
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      float dresidual[kVector] = {};
      load_xhat_and_g(j, xhat, g);
      if (p.dresidual.data) load_elements<type>(row_at(p.dresidual, size_of(type), p.inner, r), j, p.n, dresidual);
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        g[e] = dx_of(xhat[e], g[e], rstd, sums[1], sums[0], p.dresidual.data, dresidual[e]);
      store_elements<type>(dx_row, j, p.n, g);
    }
  }
}

// ---- The chains of dweight and dbias -------------------------------------------------------------------------------

constexpr int kChainThreads = 128;

// `columns` adjacent elements of a row, 1 or 2.
template <Type type, int columns> __device__ __forceinline__ void load_columns(const char *at, float (&x)[columns]) {
  if constexpr (columns == 1) {
    x[0] = load_f32(at, type, 0);
  } else if constexpr (type == Type::f32) {
    const float2 pair = *reinterpret_cast<const float2 *>(at);
    x[0] = pair.x;
    x[1] = pair.y;
  } else {
    const uint32_t pair = *reinterpret_cast<const uint32_t *>(at);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint16_t half = uint16_t(pair >> 16 * e);
      x[e] = Element<type>::to_f32(half);
    }
  }
}

// A thread takes one or two columns of the 16 rows of a chain, and then another until all are done.
template <Type type, int columns>
__global__ void __launch_bounds__(kChainThreads, kChainBlocks)
    layernorm_chains_kernel(const __grid_constant__ LayerNormBackward p) {
  const int64_t jobs_of_chain = p.n / columns, last = p.rows - 1;
  const int64_t chains = (p.rows + kDweightChainRows - 1) / kDweightChainRows;
  float *of_weight = static_cast<float *>(p.workspace), *of_bias = of_weight + chains * p.n;
  for (int64_t job = int64_t(blockIdx.x) * kChainThreads + threadIdx.x; job < jobs_of_chain * chains;
       job += int64_t(gridDim.x) * kChainThreads) {
    const int64_t chain = job / jobs_of_chain, j = (job - chain * jobs_of_chain) * columns;
    const int64_t first = chain * kDweightChainRows;
    float x[kDweightChainRows][columns], dy[kDweightChainRows][columns], weight[columns] = {}, bias[columns] = {};
#pragma unroll
    for (int i = 0; i < kDweightChainRows; ++i) {
      const RowIndex row = row_index(p.inner, first + i <= last ? first + i : last);
      load_columns<type>(row_at(p.x, size_of(type), row) + j * size_of(type), x[i]);
      load_columns<type>(row_at(p.dy, size_of(type), row) + j * size_of(type), dy[i]);
    }
#pragma unroll
    for (int i = 0; i < kDweightChainRows; ++i) {
      if (first + i > last) continue;
      const float mean = of_row(p.mean, first + i), rstd = of_row(p.rstd, first + i);
#pragma unroll
      for (int e = 0; e < columns; ++e) {
        weight[e] = fmaf(dy[i][e], (x[i][e] - mean) * rstd, weight[e]);
        bias[e] = dy[i][e] + bias[e];
      }
    }
#pragma unroll
    for (int e = 0; e < columns; ++e) {
      if (p.dweight.data) of_weight[chain * p.n + j + e] = weight[e];
      if (p.dbias.data) of_bias[chain * p.n + j + e] = bias[e];
    }
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

// Calls f with a team that holds a row of n.
template <class F> pydet_status with_shape(int64_t n, const F &f) {
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

// dx by launch_dx, and then the sums. All that is launched is loaded first.
template <class F> pydet_status backward(const char *name, const LayerNormBackward &p, const F &launch_dx) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  const bool sums = p.dweight.data || p.dbias.data;
  const int64_t chains = divide_up(p.rows, kDweightChainRows);
  const RmsNormBackward joined = sums_over_rows(p);
  if (const pydet_status ready = ready_to_join(joined); ready != PYDET_OK) return ready;
  const bool aligned = p.n % kVector == 0 && rows_aligned(p.dy) && rows_aligned(p.x);
  const pydet_status status = with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    auto kernel = aligned ? layernorm_chains_kernel<type, 2> : layernorm_chains_kernel<type, 1>;
    if (sums)
      if (const pydet_status ready = load("layernorm_chains", kernel); ready != PYDET_OK) return ready;
    if (p.dx.data && p.rows > 0)
      if (const pydet_status launched = launch_dx(type); launched != PYDET_OK) return launched;
    if (!sums || p.rows == 0) return pydet_status(PYDET_OK);
    const int64_t threads = chains * (aligned ? p.n / 2 : p.n);
    Launch where = {"layernorm_chains", static_cast<gpu_stream>(p.stream),
                    dim3(limited(divide_up(threads, kChainThreads))), dim3(kChainThreads)};
    return launch(where, kernel, p);
  });
  return status == PYDET_OK ? join_partials(joined, 1) : status;
}

}  // namespace

bool layernorm_backward_held_takes(const LayerNormBackward &p) {
  return holds(p.n) && rows_aligned(p.dy) && rows_aligned(p.x) && rows_aligned(p.dresidual) && rows_aligned(p.dx) &&
         vector_aligned(p.weight);
}

pydet_status layernorm_backward_held(const LayerNormBackward &p) {
  return backward("layernorm_backward_held", p, [&](auto type) {
    return with_shape(p.n, [&](auto shape) {
      constexpr int T = shape.T, kTeams = kBlock<T> / T;
      Launch where = {"layernorm_dx", static_cast<gpu_stream>(p.stream), grid_of(divide_up(p.rows, kTeams), kBlock<T>),
                      dim3(kBlock<T>)};
      where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
      return launch(where, layernorm_dx_kernel<type, T, shape.V>, p);
    });
  });
}

pydet_status layernorm_backward_long(const LayerNormBackward &p) {
  return backward("layernorm_backward_long", p, [&](auto type) {
    Launch where = {"layernorm_dx_long", static_cast<gpu_stream>(p.stream), dim3(limited(p.rows)), dim3(kMaxTeam)};
    return launch(where, layernorm_dx_long_kernel<type>, p);
  });
}

}  // namespace pydet
