// RMSNorm and its gradients where the other kernels do not go: weights of heads, biases, a sum in fp32 beside another
// type, rows of three strides (NUMERICS.md, "RMSNorm"). The CPU's bits.
//
//   forward    x    = round(x + residual), in the type of sum      only with a residual
//              rstd = 1 / sqrt(rowsum(x, x) / n + eps)
//              y    = round((x rstd) (w + weight_offset)), or round(fmaf(x rstd, w + weight_offset, bias))
//   backward   xhat = x rstd,   g = dy (w + weight_offset),   c = rowsum(g, xhat) / n,   t = fmaf(-xhat, c, g)
//              dx   = round(rstd t), or round(fmaf(rstd, t, dresidual))
//              dweight, dbias: chains of 16 rows of a head, of dy xhat and of dy, which rmsnorm_dweight.cu joins
//
// Row r is row r / heads of head r % heads. A team owns a row, which it holds in registers up to 8192, and reads twice
// from there on. Types are asked for at run time. The chains pass over x and dy once more: a thread takes one
// column of a chain, or eight.

#include "gpu/kernels.h"
#include "gpu/any/rmsnorm_partials.h"
#include "gpu/any/rmsnorm_rows.h"

namespace pydet {
namespace {

template <int T> constexpr int kBlock = T < 128 ? 128 : T;  // several small teams share one
constexpr int W = kVector;
// Blocks a multiprocessor is to hold, 0: as the compiler likes, which for rows that are read again spills registers.
template <int V> constexpr int kBlocks = V > 0 ? 0 : 2;

// ---- Where a row begins, and eight of its elements -----------------------------------------------------------------

struct Place {
  int64_t far, outer, inner;
};

// How often `part` goes into x. A division of 64 bits takes as long as a load.
__device__ __forceinline__ int64_t quotient(int64_t x, int64_t part) {
  if (x < part) return 0;
  return x >> 32 ? x / part : int64_t(uint32_t(x) / uint32_t(part));
}
template <class Problem> __device__ __forceinline__ Place place_of(const Problem &p, int64_t r) {
  const int64_t q = quotient(r, p.inner), far = quotient(q, p.outer);
  return {far, q - far * p.outer, r - q * p.inner};
}
__device__ __forceinline__ char *row_at(const Rows &rows, const Place &at) {
  return rows.data +
         (at.far * rows.far_stride + at.outer * rows.outer_stride + at.inner * rows.inner_stride) * size_of(rows.type);
}
__device__ __forceinline__ int64_t head_of(int64_t r, int64_t heads) { return r - quotient(r, heads) * heads; }

__device__ __forceinline__ float rounded(Type type, float x) {
  if (type == Type::f32) return x;
  return type == Type::bf16 ? f32_from_bf16(bf16_from_f32(x)) : f32_from_f16(f16_from_f32(x));
}

// Elements j .. j + 7 of a row of n, j < n; those past n read as +0. `whole`: as vectors, of which none passes n.
__device__ __forceinline__ void load_eight(const char *row, Type type, int64_t j, int64_t n, bool whole,
                                           float (&x)[W]) {
  if (!whole) {
#pragma unroll
    for (int e = 0; e < W; ++e) x[e] = j + e < n ? load_f32(row, type, j + e) : 0.0f;
  } else if (type == Type::f32) {
    unpack(load_packed<Type::f32, W>(row + j * 4), x);
  } else {
    const auto halves = load_packed<Type::f16, W>(row + j * 2);
    if (type == Type::f16) {
      unpack(halves, x);
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) x[e] = f32_from_bf16(uint16_t(halves.word[e / 2] >> e % 2 * 16));
    }
  }
}

__device__ __forceinline__ void store_eight(char *row, Type type, int64_t j, int64_t n, bool whole,
                                            const float (&x)[W]) {
  if (!whole) {
#pragma unroll
    for (int e = 0; e < W; ++e)
      if (j + e < n) store_rounded(row, type, j + e, x[e]);
  } else if (type == Type::f32) {
    store_packed<Type::f32>(row + j * 4, x);
  } else if (type == Type::bf16) {
    store_packed<Type::bf16>(row + j * 2, x);
  } else {
    store_packed<Type::f16>(row + j * 2, x);
  }
}

// w + weight_offset, of the head whose weights begin at element `first`.
__device__ __forceinline__ void load_scales(const Vector &weight, float offset, int64_t first, int64_t j, int64_t n,
                                            bool whole, float (&scale)[W]) {
  if (weight.data) load_eight(weight.data + first * size_of(weight.type), weight.type, j, n, whole, scale);
#pragma unroll
  for (int e = 0; e < W; ++e) scale[e] = (weight.data ? scale[e] : 1.0f) + offset;
}

// Vector v of a thread; an element past the row's end does not reach its lane.
template <int T, int V>
__device__ __forceinline__ void add(Lanes<T, W, V> &lanes, int v, int64_t left, const float (&x)[W],
                                    const float (&y)[W]) {
  float(&s)[W] = lanes.lane[v % Lanes<T, W, V>::kSlots];
#pragma unroll
  for (int e = 0; e < W; ++e) s[e] = e < left ? fmaf(x[e], y[e], s[e]) : s[e];
}

// ---- Rows ----------------------------------------------------------------------------------------------------------

// V vectors a thread hold the row; 0: it is of any length, and read again.
template <int T, int V>
__global__ void __launch_bounds__(kBlock<T>, kBlocks<V>)
    rmsnorm_general_kernel(const __grid_constant__ RmsNorm p, bool whole) {
  constexpr bool held = V > 0;
  constexpr int kTeams = kBlock<T> / T, kVectors = held ? V : 1;
  __shared__ float exchange[kTeams * kExchange<T, 1> + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T;
  const int64_t n = p.n, last = p.rows - 1, mine = block_number() * kTeams + team, r = mine < last ? mine : last;
  const Place at = place_of(p, r);
  const Rows &normed = p.residual.data ? p.sum : p.x;
  Lanes<T, W, kVectors> lanes[1];
  float x[kVectors][W] = {};
#pragma unroll kVectors
  for (int v = 0; held ? v < V : W * (t + int64_t(T) * v) < n; ++v) {
    const int64_t j = W * (t + int64_t(T) * v);
    if (j >= n) continue;
    float(&one)[W] = x[held ? v : 0];
    load_eight(row_at(p.x, at), p.x.type, j, n, whole, one);
    if (p.residual.data) {
      float other[W];
      load_eight(row_at(p.residual, at), p.residual.type, j, n, whole, other);
#pragma unroll
      for (int e = 0; e < W; ++e) one[e] = rounded(p.sum.type, one[e] + other[e]);
      if (mine <= last) store_eight(row_at(p.sum, at), p.sum.type, j, n, whole, one);
    }
    add(lanes[0], v, n - j, one, one);
  }
  float rstd[1];
  join(lanes, exchange + team * kExchange<T, 1>, [&](float sum) { return 1.0f / sqrtf(sum / float(n) + p.eps); }, rstd);
  if (mine > last) return;
  if (p.rstd.data && t == 0) reinterpret_cast<float *>(p.rstd.data)[r] = canonical(rstd[0]);
  const int64_t first = head_of(r, p.heads) * n;
#pragma unroll kVectors
  for (int v = 0; held ? v < V : W * (t + int64_t(T) * v) < n; ++v) {
    const int64_t j = W * (t + int64_t(T) * v);
    if (j >= n) continue;
    float(&y)[W] = x[held ? v : 0], scale[W], bias[W];
    if (!held) load_eight(row_at(normed, at), normed.type, j, n, whole, y);
    load_scales(p.weight, p.weight_offset, first, j, n, whole, scale);
    if (p.bias.data) load_eight(p.bias.data + first * size_of(p.bias.type), p.bias.type, j, n, whole, bias);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const float xhat = y[e] * rstd[0];
      y[e] = p.bias.data ? fmaf(xhat, scale[e], bias[e]) : xhat * scale[e];
    }
    store_eight(row_at(p.y, at), p.y.type, j, n, whole, y);
  }
}

template <int T, int V>
__global__ void __launch_bounds__(kBlock<T>, kBlocks<V>)
    rmsnorm_dx_general_kernel(const __grid_constant__ RmsNormBackward p, bool whole) {
  constexpr bool held = V > 0;
  constexpr int kTeams = kBlock<T> / T, kVectors = held ? V : 1;
  __shared__ float exchange[kTeams * kExchange<T, 1> + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T;
  const int64_t n = p.n, last = p.rows - 1, mine = block_number() * kTeams + team, r = mine < last ? mine : last;
  const Place at = place_of(p, r);
  const int64_t first = head_of(r, p.heads) * n;
  const float rstd = reinterpret_cast<const float *>(p.rstd.data)[r];
  auto load_xhat_and_g = [&](int64_t j, float(&xhat)[W], float(&g)[W]) {
    float scale[W];
    load_eight(row_at(p.x, at), p.x.type, j, n, whole, xhat);
    load_eight(row_at(p.dy, at), p.dy.type, j, n, whole, g);
    load_scales(p.weight, p.weight_offset, first, j, n, whole, scale);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      xhat[e] *= rstd;
      g[e] *= scale[e];
    }
  };
  Lanes<T, W, kVectors> lanes[1];
  float xhat[kVectors][W] = {}, g[kVectors][W] = {}, c[1];
#pragma unroll kVectors
  for (int v = 0; held ? v < V : W * (t + int64_t(T) * v) < n; ++v) {
    const int64_t j = W * (t + int64_t(T) * v);
    if (j >= n) continue;
    load_xhat_and_g(j, xhat[held ? v : 0], g[held ? v : 0]);
    add(lanes[0], v, n - j, g[held ? v : 0], xhat[held ? v : 0]);
  }
  join(lanes, exchange + team * kExchange<T, 1>, [&](float sum) { return sum / float(n); }, c);
  if (mine > last) return;
#pragma unroll kVectors
  for (int v = 0; held ? v < V : W * (t + int64_t(T) * v) < n; ++v) {
    const int64_t j = W * (t + int64_t(T) * v);
    if (j >= n) continue;
    float(&dx)[W] = g[held ? v : 0], added[W];
    if (!held) load_xhat_and_g(j, xhat[0], g[0]);
    if (p.dresidual.data) load_eight(row_at(p.dresidual, at), p.dresidual.type, j, n, whole, added);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const float left = fmaf(-xhat[held ? v : 0][e], c[0], dx[e]);
      dx[e] = p.dresidual.data ? fmaf(rstd, left, added[e]) : rstd * left;
    }
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
template <Type x_type, Type dy_type, int columns>
__global__ void __launch_bounds__(kChainThreads, kChainBlocks)
    rmsnorm_chains_general_kernel(const __grid_constant__ RmsNormBackward p, const __grid_constant__ Steps steps) {
  constexpr int kAtOnce = x_type == Type::f32 ? 4 : 8;  // rows whose loads are on their way together
  const int64_t width = p.heads * p.n, of_head = p.n / columns, jobs_of_chain = of_head * p.heads;
  const int64_t rows = quotient(p.rows, p.heads), last = rows - 1;  // of a head
  const int64_t chains = (rows + kDweightChainRows - 1) / kDweightChainRows;
  float *of_weight = static_cast<float *>(p.workspace), *of_bias = of_weight + chains * width;
  const float *rstds = reinterpret_cast<const float *>(p.rstd.data);
  for (int64_t job = int64_t(blockIdx.x) * kChainThreads + threadIdx.x; job < jobs_of_chain * chains;
       job += int64_t(gridDim.x) * kChainThreads) {
    const int64_t chain = quotient(job, jobs_of_chain), within = job - chain * jobs_of_chain;
    const int64_t head = quotient(within, of_head), j = (within - head * of_head) * columns;
    const int64_t first = chain * kDweightChainRows;
    float weight[columns] = {}, bias[columns] = {};
#pragma unroll
    for (int done = 0; done < kDweightChainRows; done += kAtOnce) {
      float rstd[kAtOnce], x[columns], dy[columns];
      const char *x_at[kAtOnce], *dy_at[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t own = first + done + i, row = own <= last ? own : last;
        rstd[i] = rstds[row * p.heads + head];
        if (steps.even) {
          x_at[i] = p.x.data + (row * steps.x_row + head * steps.x_head + j) * size_of(x_type);
          dy_at[i] = p.dy.data + (row * steps.dy_row + head * steps.dy_head + j) * size_of(dy_type);
        } else {
          const Place at = place_of(p, row * p.heads + head);
          x_at[i] = row_at(p.x, at) + j * size_of(x_type);
          dy_at[i] = row_at(p.dy, at) + j * size_of(dy_type);
        }
      }
      auto take = [&](int i) {
        if (first + done + i > last) return;
#pragma unroll
        for (int e = 0; e < columns; ++e) {
          weight[e] = fmaf(dy[e], x[e] * rstd[i], weight[e]);
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
Steps steps_of(const RmsNormBackward &p) {
  if (p.inner == p.rows)
    return {true, p.heads * p.x.inner_stride, p.x.inner_stride, p.heads * p.dy.inner_stride, p.dy.inner_stride};
  if (p.inner == p.heads && p.inner * p.outer == p.rows)
    return {true, p.x.outer_stride, p.x.inner_stride, p.dy.outer_stride, p.dy.inner_stride};
  return {};
}

// ---- Host ----------------------------------------------------------------------------------------------------------

// A team of T threads with V vectors each; 0: for rows of any length.
template <int team, int vectors> struct Team {
  static constexpr int T = team, V = vectors;
};
template <class F> pydet_status with_team(int64_t n, const F &f) {
  if (n <= 8 * 8) return f(Team<8, 1>{});
  if (n <= 16 * 8) return f(Team<16, 1>{});
  if (n <= 32 * 8) return f(Team<32, 1>{});
  if (n <= 128 * 16) return f(Team<128, 2>{});
  if (n <= 256 * 32) return f(Team<256, 4>{});
  return f(Team<256, 0>{});
}

// Calls f with the kernel of the chains for these types.
template <class F> pydet_status with_chains(const RmsNormBackward &p, bool eights, const F &f) {
  return with_type<kUnscaledTypes>(p.dy.type, [&](auto dy) {
    constexpr Type f32 = Type::f32;
    if (p.x.type == f32)
      return f(eights ? rmsnorm_chains_general_kernel<f32, dy, kVector> : rmsnorm_chains_general_kernel<f32, dy, 1>);
    return f(eights ? rmsnorm_chains_general_kernel<dy, dy, kVector> : rmsnorm_chains_general_kernel<dy, dy, 1>);
  });
}

// The sums over the rows of each head as rmsnorm_dweight.cu joins them: rows of the weights of all heads.
RmsNormBackward sums_of(const RmsNormBackward &p) {
  RmsNormBackward sums = p;
  sums.rows = p.rows / p.heads;
  sums.n = p.heads * p.n;
  return sums;
}

}  // namespace

pydet_status rmsnorm_general(const RmsNorm &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_general", guard.error());
  const bool whole = p.n % kVector == 0 && rows_aligned(p.x) && rows_aligned(p.residual) && rows_aligned(p.y) &&
                     rows_aligned(p.sum) && vector_aligned(p.weight) && vector_aligned(p.bias);
  return with_team(p.n, [&](auto team) {
    constexpr int T = team.T, kTeams = kBlock<T> / T;
    Launch where = {"rmsnorm_general", static_cast<gpu_stream>(p.stream), grid_of(divide_up(p.rows, kTeams), kBlock<T>),
                    dim3(kBlock<T>)};
    where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
    return launch(where, rmsnorm_general_kernel<T, team.V>, p, whole);
  });
}

// dx, and then the sums. All that is launched is loaded first.
pydet_status rmsnorm_backward_general(const RmsNormBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_backward_general", guard.error());
  const bool sums = p.dweight.data || p.dbias.data, of_x = p.dx.data && p.rows > 0;
  const int64_t chains = divide_up(p.rows / p.heads, kDweightChainRows);
  const RmsNormBackward joined = sums_of(p);
  if (const pydet_status ready = ready_to_join(joined); ready != PYDET_OK) return ready;
  const bool eights = p.n % kVector == 0 && rows_aligned(p.dy) && rows_aligned(p.x);
  const bool whole = eights && rows_aligned(p.dresidual) && rows_aligned(p.dx) && vector_aligned(p.weight);
  const pydet_status launched = with_chains(p, eights, [&](auto kernel) {
    if (sums)
      if (const pydet_status ready = load("rmsnorm_chains_general", kernel); ready != PYDET_OK) return ready;
    const pydet_status rows = !of_x ? pydet_status(PYDET_OK) : with_team(p.n, [&](auto team) {
      constexpr int T = team.T, kTeams = kBlock<T> / T;
      Launch where = {"rmsnorm_dx_general", static_cast<gpu_stream>(p.stream),
                      grid_of(divide_up(p.rows, kTeams), kBlock<T>), dim3(kBlock<T>)};
      where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
      return launch(where, rmsnorm_dx_general_kernel<T, team.V>, p, whole);
    });
    if (rows != PYDET_OK || !sums || p.rows == 0) return rows;
    constexpr int64_t kMostBlocks = 1 << 20;  // more are walked in turns
    const int64_t blocks = divide_up(chains * joined.n / (eights ? kVector : 1), kChainThreads);
    Launch where = {"rmsnorm_chains_general", static_cast<gpu_stream>(p.stream),
                    dim3(unsigned(blocks < kMostBlocks ? blocks : kMostBlocks)), dim3(kChainThreads)};
    return launch(where, kernel, p, steps_of(p));
  });
  return launched == PYDET_OK ? join_partials(joined, 1) : launched;
}

}  // namespace pydet
