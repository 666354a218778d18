// Gradients of RMSNorm and LayerNorm, in fp32 (NUMERICS.md, "RMSNorm", "LayerNorm"): the CPU's bits.
//
//   xhat = x rstd, LayerNorm's (x - mean) rstd,   g = dy (w + weight_offset)
//   c = rowsum(g, xhat) / n,   t = fmaf(-xhat, c, g);   LayerNorm: a = rowsum(g, 1) / n,   t = fmaf(-xhat, c, g) - a
//   dx = round(rstd t), or round(fmaf(rstd, t, dresidual))
//   dweight, dbias: chains of 16 rows of dy xhat and of dy, which column_sums.cu joins
//
// General: rows of any length and place, weights of heads, biases, a sum in fp32 beside another type, three strides. A
// team owns a row, which it holds in registers up to 8192, and reads twice from there on. Types are asked for at run time.
// Held, LayerNorm's: whole vectors of one type, up to 16384, on HIP 8192. The sums over rows pass over x and dy once more:
// a thread takes one column of a chain, or eight.

#include "gpu/kernels.h"
#include "gpu/any/column_sums.h"
#include "gpu/any/rows.h"

namespace pydet {
namespace {

constexpr int W = kVector;
// Blocks a multiprocessor is to hold, 0: as the compiler likes, which for rows that are read again spills registers.
template <int V> constexpr int kBlocks = V > 0 ? 0 : 2;

// ---- dx ------------------------------------------------------------------------------------------------------------

template <Type type, int T, int V>
__global__ void __launch_bounds__(kBlock<T>) layernorm_dx_kernel(const __grid_constant__ LayerNormBackward p) {
  using P = LayerNormBackward;
  constexpr int kBytes = size_of(type), kVectorStep = T * W * kBytes, kTeams = kBlock<T> / T;
  __shared__ __align__(16) float exchange[kTeams * kExchange<T, 2> + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T, n = int(p.n);
  const int64_t r = block_number() * kTeams + team, last = p.rows - 1;
  const RowIndex where = row_index(p.inner, r <= last ? r : last);
  const float mean = mean_of(p, r <= last ? r : last), rstd = of_row(p.rstd, r <= last ? r : last);
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
    to_xhat_and_g<P>(mean, rstd, scale, xhat, g);
  };
  Lanes<T, W, V> lanes[2];
  float sums[2];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float xhat[W], g[W];
    load_xhat_and_g(v, xhat, g);
    lanes[0].add(v, W * (t + T * v) < n, g, xhat);
    lanes[1].add(v, W * (t + T * v) < n, g, Ones());
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
    for (int e = 0; e < W; ++e) g[e] = dx_of<P>(xhat[e], g[e], rstd, sums, p.dresidual.data, dresidual[e]);
    store_packed<type>(dx_row + v * kVectorStep, g);
  }
}

// V vectors a thread hold the row; 0: it is of any length, and read again.
template <class P, int T, int V>
__global__ void __launch_bounds__(kBlock<T>, kBlocks<V>)
    norm_dx_general_kernel(const __grid_constant__ P p, bool whole) {
  constexpr bool held = V > 0;
  constexpr int kTeams = kBlock<T> / T, kVectors = held ? V : 1;
  __shared__ __align__(16) float exchange[kTeams * kExchange<T, kSums<P>> + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T;
  const int64_t n = p.n, last = p.rows - 1, mine = block_number() * kTeams + team, r = mine < last ? mine : last;
  const Place at = place_of(p, r);
  const int64_t first = first_weight(p, r);
  const float rstd = of_row(p.rstd, r), mean = mean_of(p, r);
  auto load_xhat_and_g = [&](int64_t j, float(&xhat)[W], float(&g)[W]) {
    float scale[W];
    load_eight(row_at(p.x, at), p.x.type, j, n, whole, xhat);
    load_eight(row_at(p.dy, at), p.dy.type, j, n, whole, g);
    load_scales(p.weight, p.weight_offset, first, j, n, whole, scale);
    to_xhat_and_g<P>(mean, rstd, scale, xhat, g);
  };
  Lanes<T, W, kVectors> lanes[kSums<P>];
  float xhat[kVectors][W] = {}, g[kVectors][W] = {}, sums[kSums<P>];
#pragma unroll kVectors
  for (int v = 0; held ? v < V : W * (t + int64_t(T) * v) < n; ++v) {
    const int64_t j = W * (t + int64_t(T) * v);
    if (j >= n) continue;
    load_xhat_and_g(j, xhat[held ? v : 0], g[held ? v : 0]);
    lanes[0].add_left(v, n - j, g[held ? v : 0], xhat[held ? v : 0]);
    if constexpr (kCentred<P>) lanes[1].add_left(v, n - j, g[held ? v : 0], Ones());
  }
  join(lanes, exchange + team * kExchange<T, kSums<P>>, [&](float sum) { return sum / float(n); }, sums);
  if (mine > last) return;
#pragma unroll kVectors
  for (int v = 0; held ? v < V : W * (t + int64_t(T) * v) < n; ++v) {
    const int64_t j = W * (t + int64_t(T) * v);
    if (j >= n) continue;
    float(&dx)[W] = g[held ? v : 0], added[W];
    if (!held) load_xhat_and_g(j, xhat[0], g[0]);
    if (p.dresidual.data) load_eight(row_at(p.dresidual, at), p.dresidual.type, j, n, whole, added);
#pragma unroll
    for (int e = 0; e < W; ++e) dx[e] = dx_of<P>(xhat[held ? v : 0][e], dx[e], rstd, sums, p.dresidual.data, added[e]);
    store_eight(row_at(p.dx, at), p.dx.type, j, n, whole, dx);
  }
}

// ---- The chains of dweight and dbias -------------------------------------------------------------------------------

// Blocks a multiprocessor is to hold, as kBlocks: where the compiler likes more of them it spills.
#if defined(__CUDA_ARCH__)
constexpr int kChainThreads = 128, kChainBlocks = __CUDA_ARCH__ != 900 ? 4 : 0;
#else
constexpr int kChainThreads = 128, kChainBlocks = 0;
#endif

// How x and dy are walked where they are `even`: one stride leads from every row of a head to its next, and one from
// every head to the next. These strides, in elements. Else each row's place is worked out.
struct Steps {
  bool even;
  int64_t x_row, x_head, dy_row, dy_head;
};

// A thread takes one column, or eight, of the 16 rows of a head's chain, and then others until all are done.
template <class P, Type x_type, Type dy_type, int columns>
__global__ void __launch_bounds__(kChainThreads, kChainBlocks)
    norm_chains_kernel(const __grid_constant__ P p, const __grid_constant__ Steps steps) {
  constexpr int kAtOnce = x_type == Type::f32 ? 4 : 8;  // rows whose loads are on their way together
  const int64_t heads = heads_of(p), width = heads * p.n, of_head = p.n / columns, jobs_of_chain = of_head * heads;
  const int64_t rows = quotient(p.rows, heads), last = rows - 1;  // of a head
  const int64_t chains = (rows + kDweightChainRows - 1) / kDweightChainRows;
  float *of_weight = static_cast<float *>(p.workspace), *of_bias = of_weight + chains * width;
  for (int64_t job = int64_t(blockIdx.x) * kChainThreads + threadIdx.x; job < jobs_of_chain * chains;
       job += int64_t(gridDim.x) * kChainThreads) {
    const int64_t chain = quotient(job, jobs_of_chain), within = job - chain * jobs_of_chain;
    const int64_t head = quotient(within, of_head), j = (within - head * of_head) * columns;
    const int64_t first = chain * kDweightChainRows;
    float weight[columns] = {}, bias[columns] = {};
#pragma unroll
    for (int done = 0; done < kDweightChainRows; done += kAtOnce) {
      float rstd[kAtOnce], mean[kAtOnce], x[columns], dy[columns];
      const char *x_at[kAtOnce], *dy_at[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t own = first + done + i, row = own <= last ? own : last;
        rstd[i] = of_row(p.rstd, row * heads + head);
        mean[i] = mean_of(p, row * heads + head);
        if (steps.even) {
          x_at[i] = p.x.data + (row * steps.x_row + head * steps.x_head + j) * size_of(x_type);
          dy_at[i] = p.dy.data + (row * steps.dy_row + head * steps.dy_head + j) * size_of(dy_type);
        } else {
          const Place at = place_of(p, row * heads + head);
          x_at[i] = row_at(p.x, at) + j * size_of(x_type);
          dy_at[i] = row_at(p.dy, at) + j * size_of(dy_type);
        }
      }
      auto take = [&](int i) {
        if (first + done + i > last) return;
#pragma unroll
        for (int e = 0; e < columns; ++e) {
          weight[e] = fmaf(dy[e], (kCentred<P> ? x[e] - mean[i] : x[e]) * rstd[i], weight[e]);
          bias[e] = dy[e] + bias[e];
        }
      };
      if constexpr (columns == 1) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          x[0] = load_f32(x_at[i], x_type, 0);
          dy[0] = load_f32(dy_at[i], dy_type, 0);
          take(i);
        }
      } else {
        Packed<x_type, columns> packed_x[kAtOnce];
        Packed<dy_type, columns> packed_dy[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          packed_x[i] = load_packed<x_type, columns>(x_at[i]);
          packed_dy[i] = load_packed<dy_type, columns>(dy_at[i]);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          unpack(packed_x[i], x);
          unpack(packed_dy[i], dy);
          take(i);
        }
      }
    }
    const int64_t to = chain * width + head * p.n + j;
#pragma unroll
    for (int e = 0; e < columns; ++e) {
      if (p.dweight.data) of_weight[to + e] = weight[e];
      if (p.dbias.data) of_bias[to + e] = bias[e];
    }
  }
}

// The steps of rows that lie in one stride, or each token's heads in one and tokens in another.
template <class P> Steps steps_of(const P &p) {
  const int64_t heads = heads_of(p);
  if (p.inner >= p.rows)
    return {true, heads * p.x.inner_stride, p.x.inner_stride, heads * p.dy.inner_stride, p.dy.inner_stride};
  if constexpr (!kCentred<P>)
    if (p.inner == heads && p.inner * p.outer == p.rows)
      return {true, p.x.outer_stride, p.x.inner_stride, p.dy.outer_stride, p.dy.inner_stride};
  return {};
}

// ---- Host ----------------------------------------------------------------------------------------------------------

// Calls f with the kernel of the chains for these types.
template <class P, class F> pydet_status with_chains(const P &p, bool eights, const F &f) {
  return with_type<kUnscaledTypes>(p.dy.type, [&](auto dy) {
    if constexpr (!kCentred<P>) {  // a sum in fp32
      constexpr Type f32 = Type::f32;
      if (p.x.type == f32)
        return f(eights ? norm_chains_kernel<P, f32, dy, kVector> : norm_chains_kernel<P, f32, dy, 1>);
    }
    return f(eights ? norm_chains_kernel<P, dy, dy, kVector> : norm_chains_kernel<P, dy, dy, 1>);
  });
}

// dx by launch_dx, and then the sums. All that is launched is loaded first.
template <class P, class F> pydet_status backward(const char *name, const P &p, const F &launch_dx) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  const bool sums = p.dweight.data || p.dbias.data;
  const RmsNormBackward joined = sums_over_rows(p);
  const int64_t chains = divide_up(joined.rows, kDweightChainRows);
  if (const pydet_status ready = ready_to_join(joined); ready != PYDET_OK) return ready;
  const bool eights = p.n % kVector == 0 && rows_aligned(p.dy) && rows_aligned(p.x);
  const pydet_status launched = with_chains(p, eights, [&](auto kernel) {
    if (sums)
      if (const pydet_status ready = load("norm_chains", kernel); ready != PYDET_OK) return ready;
    if (p.dx.data && p.rows > 0)
      if (const pydet_status rows = launch_dx(); rows != PYDET_OK) return rows;
    if (!sums || p.rows == 0) return pydet_status(PYDET_OK);
    constexpr int64_t kMostBlocks = 1 << 20;  // more are walked in turns
    const int64_t blocks = divide_up(chains * joined.n / (eights ? kVector : 1), kChainThreads);
    Launch where = {"norm_chains", static_cast<gpu_stream>(p.stream),
                    dim3(unsigned(blocks < kMostBlocks ? blocks : kMostBlocks)), dim3(kChainThreads)};
    return launch(where, kernel, p, steps_of(p));
  });
  return launched == PYDET_OK ? join_partials(joined, 1) : launched;
}

template <class P> pydet_status backward_general(const char *name, const P &p) {
  return backward(name, p, [&] {
    return with_general_team(p.n, [&](auto team) {
      constexpr int T = team.T;
      return launch_rows("norm_dx_general", p, kBlock<T> / T, kBlock<T>, norm_dx_general_kernel<P, T, team.V>,
                         rows_whole(p) && vector_aligned(p.weight));
    });
  });
}

// Calls f with a team that holds a row of n. CUDA has other kernels for all but the longest.
template <class F> pydet_status with_shape(int64_t n, const F &f) {
  if constexpr (kGpuDeviceType == PYDET_CUDA) return f(RowShape<256, 8, 8, 1>{});
  else return with_first<RowShape<32, 8, 1, 1>, RowShape<128, 8, 2, 1>, RowShape<256, 8, 4, 1>>(n, f);
}

}  // namespace

pydet_status rmsnorm_backward_general(const RmsNormBackward &p) {
  return backward_general("rmsnorm_backward_general", p);
}
pydet_status layernorm_backward_general(const LayerNormBackward &p) {
  return backward_general("layernorm_backward_general", p);
}

bool layernorm_backward_held_takes(const LayerNormBackward &p) {
  return p.n <= kLongestHeldLayer && rows_whole(p) && vector_aligned(p.weight);
}
pydet_status layernorm_backward_held(const LayerNormBackward &p) {
  return backward("layernorm_backward_held", p, [&] {
    return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
      return with_shape(p.n, [&](auto shape) {
        constexpr int T = shape.T;
        return launch_rows("layernorm_dx", p, kBlock<T> / T, kBlock<T>, layernorm_dx_kernel<type, T, shape.V>);
      });
    });
  });
}

}  // namespace pydet
