// Gradients of RMSNorm and LayerNorm in one pass over x and dy, in fp32 (NUMERICS.md, "RMSNorm", "LayerNorm"): the CPU's
// bits. The formulas are those of rmsnorm_general.cu and layernorm.cu. Shared by rmsnorm_backward_rows.cu and
// layernorm_backward_rows.cu.
//
// A team takes a chain of 16 rows (of one head, where there are heads), R of them at a time in registers, and goes down
// its own columns of them as well: a thread's share of the chains of dweight and dbias is in registers too, and ends in
// the workspace, which rmsnorm_dweight.cu joins. `shifted`: rows begin anywhere, and lie in vectors of memory as
// norm_pieces.h says. Then sums are of a vector and the one behind it, and dx is made of the vector as it lies.
#pragma once

#include <type_traits>

#include "gpu/kernels.h"
#include "gpu/nvidia/norm_pieces.h"
#include "gpu/any/rmsnorm_partials.h"

namespace pydet {
namespace {

template <int T> constexpr int kBlock = T < 128 ? 128 : T;  // several small teams share one
// Whether the rows of the next turn are on their way while this one's sums are joined.
template <Type type, bool shifted> constexpr bool kAhead = !shifted && type != Type::f32;
// Blocks a multiprocessor is to hold, 0: as the compiler likes, which is more than registers allow.
template <Type type, int T, bool shifted>
constexpr int kBlocks = type == Type::f32 && !shifted ? 0
                                                      : (type == Type::f32    ? 256
                                                         : shifted && T < 256 ? 384
                                                                              : 512) /
                                                            kBlock<T>;

// How often `part` goes into x. A division of 64 bits takes as long as a load.
__device__ __forceinline__ int64_t quotient(int64_t x, int64_t part) {
  if (x < part) return 0;
  return x >> 32 ? x / part : int64_t(uint32_t(x) / uint32_t(part));
}

template <class P> __device__ __host__ __forceinline__ int64_t heads_of(const P &p) {
  if constexpr (kCentred<P>) return 1;
  else return p.heads;
}

// Row r of the problem: rows of three strides are those of heads.
struct Place {
  int64_t far, outer, inner;
};
template <class P, bool shifted> __device__ __forceinline__ Place place_of(const P &p, int64_t r) {
  const int64_t q = quotient(r, p.inner);
  if constexpr (kCentred<P> || shifted) {
    return {0, q, r - q * p.inner};
  } else {
    const int64_t far = quotient(q, p.outer);
    return {far, q - far * p.outer, r - q * p.inner};
  }
}
template <Type type> __device__ __forceinline__ char *row_at(const Rows &rows, const Place &at) {
  return rows.data +
         (at.far * rows.far_stride + at.outer * rows.outer_stride + at.inner * rows.inner_stride) * size_of(type);
}

template <class P, Type type, int T, int W, int V, int R, bool shifted>
__global__ void __launch_bounds__(kBlock<T>, kBlocks<type, T, shifted>)
    norm_backward_rows_kernel(const __grid_constant__ P p) {
  constexpr bool centred = kCentred<P>;
  constexpr int kTeams = kBlock<T> / T, kSums = centred ? 2 : 1;  // along a row: c and a
  constexpr int kRoom = kTeams * kExchange<T, R * kSums> + 4;
  constexpr int kSpread = shifted ? kBlock<T> * W : 4;  // chains on their way to the workspace
  __shared__ __align__(16) float exchange[2][kRoom], spread[kSpread];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T, n = int(p.n);
  const int64_t heads = heads_of(p), job = block_number() * kTeams + team;
  const int64_t chain_number = quotient(job, heads), head = job - chain_number * heads;
  const int64_t rows = quotient(p.rows, heads), first = chain_number * kDweightChainRows, left = rows - first;
  const int count = left < kDweightChainRows ? int(left) : kDweightChainRows;  // not positive: no rows
  const int column = int(head * n);                                            // of the weights, and of the sums
  const Vector weight = {p.weight.data ? p.weight.data + column * size_of(p.weight.type) : nullptr, p.weight.type};
  auto load = [&](const char *row, int j, int64_t r) {
    if constexpr (shifted) return load_piece<type, W>(row, j, n, r > 0, r + 1 < p.rows);
    else return j < n ? load_packed<type, W>(row + j * size_of(type)) : Packed<type, W>{};
  };

  auto row_of = [&](int i) { return (first + i) * heads + head; };  // row i of the chain

  float scale[V][W], of_weight[V][W] = {}, of_bias[centred || !shifted ? V : 1][W] = {};
#pragma unroll
  for (int v = 0; v < V; ++v) {
    Scale<W> loaded;
    const int j = W * (t + T * v);
    if constexpr (shifted) {
      load_scales_of(weight, p.weight_offset, 1.0f, j, n, scale[v]);
    } else {
      if (j < n) loaded.load(weight, j);
      loaded.unpack(weight, p.weight_offset, scale[v]);
    }
  }

  // Rows of a turn. One past the last has x = dy = +0; with -0 for its rstd it adds (+0)(-0) to a chain, which changes
  // nothing.
  struct Turn {
    Packed<type, W> x[R][V], dy[R][V];
    float mean[R], rstd[R];
  };
  auto place = [&](int i) { return place_of<P, shifted>(p, i < count ? row_of(i) : 0); };
  auto fetch = [&](int row0, Turn &turn) {
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const bool there = row0 + k < count;
      turn.rstd[k] = there ? of_row(p.rstd, row_of(row0 + k)) : -0.0f;
      turn.mean[k] = 0.0f;
      if constexpr (centred) turn.mean[k] = there ? of_row(p.mean, row_of(row0 + k)) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const Place at = place(row0 + k);
      const char *x_row = row_at<type>(p.x, at), *dy_row = row_at<type>(p.dy, at);
      const int shift = shifted ? shift_of<type, W>(x_row) : 0;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int j = W * (t + T * v) - shift;
        turn.x[k][v] = turn.dy[k][v] = {};
        if (row0 + k >= count) continue;
        turn.x[k][v] = load(x_row, j, row_of(row0 + k));
        turn.dy[k][v] = load(dy_row, j, row_of(row0 + k));
      }
    }
  };
  Turn next;
  if constexpr (kAhead<type, shifted>) fetch(0, next);

#pragma unroll 1
  for (int row0 = 0; row0 < kDweightChainRows; row0 += R) {
    Turn turn;
    if constexpr (kAhead<type, shifted>) {
      turn = next;
      if (row0 + R < kDweightChainRows) fetch(row0 + R, next);
    } else {
      fetch(row0, turn);
    }
    auto &[x, dy, mean, rstd] = turn;
    int shift[R];
    bool there[R];
#pragma unroll
    for (int k = 0; k < R; ++k) {
      there[k] = row0 + k < count;
      shift[k] = shifted ? shift_of<type, W>(row_at<type>(p.x, place(row0 + k))) : 0;
    }
    Lanes<T, W, V> lanes[R * kSums];
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const Place at = place(row0 + k);
      const char *x_row = row_at<type>(p.x, at), *dy_row = row_at<type>(p.dy, at);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int j = W * (t + T * v);
        if (shifted && !centred && j >= n) continue;
        float xhat[W], g[W], ones[W];
        if constexpr (shifted) {
          Packed<type, W> next_x = {}, next_dy = {};
          if (there[k]) {
            next_x = load(x_row, j - shift[k] + W, row_of(row0 + k));
            next_dy = load(dy_row, j - shift[k] + W, row_of(row0 + k));
          }
          unpack(window<type, W>(x[k][v], next_x, shift[k]), xhat);
          unpack(window<type, W>(dy[k][v], next_dy, shift[k]), g);
        } else {
          unpack(x[k][v], xhat);
          unpack(dy[k][v], g);
        }
#pragma unroll
        for (int e = 0; e < W; ++e) {
          ones[e] = 1.0f;
          xhat[e] = (centred ? xhat[e] - mean[k] : xhat[e]) * rstd[k];
          of_weight[v][e] = fmaf(g[e], xhat[e], of_weight[v][e]);
          if constexpr (centred || !shifted) of_bias[v][e] = there[k] ? g[e] + of_bias[v][e] : of_bias[v][e];
          g[e] *= scale[v][e];
        }
        add_left_of(lanes[k * kSums], v, n - j, g, xhat);
        if constexpr (centred) add_left_of(lanes[k * kSums + 1], v, n - j, g, ones);
      }
    }
    if (!p.dx.data) continue;
    if constexpr (kAhead<type, shifted>)
#pragma unroll
      for (int k = 0; k < R; ++k)
#pragma unroll
        for (int v = 0; v < V; ++v) keep_packed(x[k][v]), keep_packed(dy[k][v]);
    float sums[R * kSums];
    join(
        lanes, exchange[row0 / R % 2] + team * kExchange<T, R * kSums>, [&](float sum) { return sum / float(n); },
        sums);
#pragma unroll
    for (int k = 0; k < R; ++k) {
      if (!there[k]) continue;
      const Place at = place(row0 + k);
      char *dx_row = row_at<type>(p.dx, at);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int j = W * (t + T * v) - shift[k];
        if (j >= n) continue;
        float xhat[W], g[W], own[W], dresidual[W] = {};
        if constexpr (shifted) {
          load_scales_of(weight, p.weight_offset, 1.0f, j, n, own);
        } else {
#pragma unroll
          for (int e = 0; e < W; ++e) own[e] = scale[v][e];
        }
        unpack(x[k][v], xhat);
        unpack(dy[k][v], g);
        if (p.dresidual.data) unpack(load(row_at<type>(p.dresidual, at), j, row_of(row0 + k)), dresidual);
#pragma unroll
        for (int e = 0; e < W; ++e) {
          xhat[e] = (centred ? xhat[e] - mean[k] : xhat[e]) * rstd[k];
          float d = fmaf(-xhat[e], sums[k * kSums], g[e] * own[e]);
          if constexpr (centred) d -= sums[k * kSums + 1];
          g[e] = p.dresidual.data ? fmaf(rstd[k], d, dresidual[e]) : rstd[k] * d;
        }
        if constexpr (shifted) store_piece<type, W>(dx_row, j, n, pack<type>(g));
        else store_packed<type>(dx_row + j * size_of(type), g);
      }
    }
  }

  // ---- The chains ----
  const int64_t width = heads * p.n;
  auto store_chain = [&](const Vector &result, float *chains, float(&of)[W], int v) {
    if (!result.data) return;
    float *to = chains + chain_number * width + column;
    if constexpr (shifted) {  // by neighbouring threads: the workspace's rows begin anywhere too
      __syncthreads();
#pragma unroll
      for (int e = 0; e < W; e += 4)
        *reinterpret_cast<float4 *>(spread + threadIdx.x * W + e) = make_float4(of[e], of[e + 1], of[e + 2], of[e + 3]);
      __syncthreads();
      for (int i = t; i < T * W && count > 0; i += T)
        if (T * W * v + i < n) to[T * W * v + i] = spread[team * T * W + i];
    } else {
      const int j = W * (t + T * v);
      if (count <= 0 || j >= n) return;
#pragma unroll
      for (int e = 0; e < W; e += 4)
        *reinterpret_cast<float4 *>(to + j + e) = make_float4(of[e], of[e + 1], of[e + 2], of[e + 3]);
    }
  };
  float *const sums_at = static_cast<float *>(p.workspace);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    store_chain(p.dweight, sums_at, of_weight[v], v);
    if constexpr (centred || !shifted)
      store_chain(p.dbias, sums_at + divide_up(rows, kDweightChainRows) * width, of_bias[v], v);
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

// The kernel for rows of a shape, and the sums over its rows as rmsnorm_dweight.cu joins them.
template <class P, Type type, class Shape, bool shifted>
pydet_status launch_rows(const char *name, const P &p) {
  constexpr int T = Shape::T, kTeams = kBlock<T> / T;
  const int64_t jobs = divide_up(p.rows / heads_of(p), kDweightChainRows) * heads_of(p);
  Launch where = {name, static_cast<gpu_stream>(p.stream), grid_of(divide_up(jobs, kTeams), kBlock<T>),
                  dim3(kBlock<T>)};
  where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
  return launch(where, norm_backward_rows_kernel<P, type, T, Shape::W, Shape::V, Shape::R, shifted>, p);
}

}  // namespace
}  // namespace pydet
