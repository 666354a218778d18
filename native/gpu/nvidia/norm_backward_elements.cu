// Gradients of RMSNorm and LayerNorm for rows that are not whole pieces of 16 bytes, odd in length or in place, in fp32
// (NUMERICS.md, "RMSNorm", "LayerNorm"): the CPU's bits. The formulas are those of norm_backward.cu, rows are read and
// written element by element (elements.h).
//
// Strided: a team takes a chain of 16 rows, one at a time in registers, and goes down its own columns of them as well: a
// thread's share of the chains of dweight and dbias is in registers too. `ahead`: the next row is on its way while this
// one's sum is joined. Unaligned: a team holds a row; blocks of the same launch go down columns, a thread one column of a
// chain, since dweight and dbias need no sum along a row: mean and rstd are given. Both leave the chains' sums in the
// workspace, which column_sums.cu joins.

#include "gpu/kernels.h"
#include "gpu/any/column_sums.h"
#include "gpu/nvidia/elements.h"
#include "gpu/nvidia/pieces.h"

// The kernel of rows in shared memory is empty on other machines: Blackwell's would spill.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ / 100 == 9
#define PYDET_HOPPER 1
#endif

namespace pydet {
namespace {

// A thread's share of the sums of a chain of dweight and, LayerNorm's, of dbias.
template <class P, int size, int T, int V, int F, int B>
__device__ __forceinline__ void store_chains(const P &p, const Strided<size, T, V, F> &columns, int64_t chain_number,
                                             const float (&of_weight)[V], const float (&of_bias)[B]) {
  float *const chains = static_cast<float *>(p.workspace) + chain_number * p.n;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (!columns.inside(i)) continue;
    if (p.dweight.data) chains[columns.column(i)] = of_weight[i];
    if constexpr (kCentred<P>)
      if (p.dbias.data) chains[divide_up(p.rows, kDweightChainRows) * p.n + columns.column(i)] = of_bias[i];
  }
}

// ---- Strided: in one pass ------------------------------------------------------------------------------------------

template <class P, int size, int T, int V, int F>
__global__ void __launch_bounds__(kBlock<T>, 512 / kBlock<T>)
    norm_backward_strided_kernel(const __grid_constant__ P p) {
  constexpr bool centred = kCentred<P>;
  constexpr int kTeams = kBlock<T> / T, kRoom = kStridedExchange<T, kSums<P>>;
  __shared__ float exchange[2][kTeams * kRoom + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, n = int(p.n);
  const Strided<size, T, V, F> columns = {int(threadIdx.x) % T, n};
  const int64_t chain_number = block_number() * kTeams + team, first = chain_number * kDweightChainRows;
  const int64_t left = p.rows - first;
  const int count = left < kDweightChainRows ? int(left) : kDweightChainRows;  // not positive: no rows
  float scale[V], of_weight[V] = {}, of_bias[centred ? V : 1] = {};
  columns.load_scale(p.weight, p.weight_offset, scale);

  ElementBits<size> x_bits[V], dy_bits[V];
  float next_mean, next_rstd;
  // A row past the last has x = dy = +0; with -0 for its rstd it adds (+0)(-0) to a chain, which changes nothing.
  auto fetch = [&](int i) {
    next_rstd = -0.0f, next_mean = 0.0f;
    if (i < count) {
      const RowIndex row = row_index(p.inner, first + i);
      next_rstd = of_row(p.rstd, first + i), next_mean = mean_of(p, first + i);
      columns.load(row_at(p.x, size, row), x_bits);
      columns.load(row_at(p.dy, size, row), dy_bits);
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) x_bits[v] = dy_bits[v] = 0;
    }
  };
  fetch(0);

#pragma unroll 1
  for (int i = 0; i < kDweightChainRows; ++i) {
    StridedLanes<T, V> lanes[kSums<P>];
    float xhat[V], g[V], sums[kSums<P>];
    const float mean = next_mean, rstd = next_rstd;
    floats_of<size>(p.x.type, x_bits, xhat);
    floats_of<size>(p.x.type, dy_bits, g);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      xhat[v] = (centred ? xhat[v] - mean : xhat[v]) * rstd;
      of_weight[v] = fmaf(g[v], xhat[v], of_weight[v]);
      if constexpr (centred) of_bias[v] = g[v] + of_bias[v];
      g[v] *= scale[v];
      lanes[0].add(v, columns.inside(v), g[v], xhat[v]);
      if constexpr (centred) lanes[1].add(v, columns.inside(v), g[v], 1.0f);
    }
    if (i + 1 < kDweightChainRows) fetch(i + 1);
    if (!p.dx.data) continue;
    join_strided(lanes, exchange[i % 2] + team * kRoom, [&](float sum) { return sum / float(n); }, sums);
    if (i < count) store_dx(p, row_index(p.inner, first + i), columns, rstd, xhat, sums, g);
  }

  if (count > 0) store_chains(p, columns, chain_number, of_weight, of_bias);
}

constexpr int64_t kLongestStrided = 512 * 10;

// Calls f with a team that holds a row of n.
template <class F> pydet_status with_shape_of_chains(int64_t n, const F &f) {
  return with_first<Singles<32, 4, 0>, Singles<32, 8, 4>, Singles<64, 8, 4>, Singles<128, 8, 4>, Singles<256, 6, 4>,
                    Singles<256, 8, 6>, Singles<512, 6, 4>, Singles<512, 8, 6>, Singles<512, 10, 8>>(n, f);
}

template <class P> pydet_status backward_strided(const char *name, const P &p) {
  return with_sums_over_rows(name, p, 1, [&] {
    return with_shape_of_chains(p.n, [&](auto shape) {
      constexpr int T = shape.T, V = shape.V, F = shape.F, kThreads = kBlock<T>;
      return launch_rows(name, p, kDweightChainRows * (kThreads / T), kThreads,
                         p.x.type == Type::f32 ? norm_backward_strided_kernel<P, 4, T, V, F>
                                               : norm_backward_strided_kernel<P, 2, T, V, F>);
    });
  });
}

// Many elements: few are faster by norm_backward_unaligned, which reads them twice. On an H100 (tools/rows_sweep.py)
// 81818x1163 takes 356 us and 540, 1100x6001 42 and 36.
bool many_elements(int64_t rows, int64_t n) { return rows * n > (n <= 5120 ? 4'000'000 : 8'000'000); }

// ---- Staged: in one pass, rows in shared memory --------------------------------------------------------------------

// Rows of a chain in shared memory: the one that is read, and those on their way.
constexpr int kStages = 3;
constexpr int kStagedThreads = 512;
template <int size, int V> constexpr int kRowBytes = kStagedThreads * V * size + 16;

template <class P, int size, int V>
__global__ void __launch_bounds__(kStagedThreads)
    norm_backward_staged_kernel(const __grid_constant__ P p, bool x_ascends, bool dy_ascends) {
#if defined(PYDET_HOPPER)
  constexpr bool centred = kCentred<P>;
  constexpr int T = kStagedThreads, N = 4;  // elements at once
  using Bits = ElementBits<size>;
  extern __shared__ __align__(16) char shared[];
  __shared__ float exchange[2][kStridedExchange<T, kSums<P>> + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int t = int(threadIdx.x), n = int(p.n);
  const Strided<size, T, V, 0> columns = {t, n};
  const int64_t chain_number = block_number(), first = chain_number * kDweightChainRows, left = p.rows - first;
  const int count = left < kDweightChainRows ? int(left) : kDweightChainRows;
  auto slot = [&](int i) { return shared + i % kStages * 2 * kRowBytes<size, V>; };
  auto fetch = [&](int i) {
    if (i < count) {
      const int64_t r = first + i;
      const RowIndex row = row_index(p.inner, r);
      const bool before = r > 0, after = r < p.rows - 1;
      Share<T>(row_at(p.x, size, row), n * size).bring(slot(i), x_ascends && before, x_ascends && after);
      Share<T>(row_at(p.dy, size, row), n * size)
          .bring(slot(i) + kRowBytes<size, V>, dy_ascends && before, dy_ascends && after);
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(i);

  float scale[V], of_weight[V] = {}, of_bias[centred ? V : 1] = {};
  columns.load_scale(p.weight, p.weight_offset, scale);
  float next_rstd = of_row(p.rstd, first), next_mean = mean_of(p, first);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const float rstd = next_rstd, mean = next_mean;
    const RowIndex row = row_index(p.inner, first + i);
    wait_copies<kStages - 2>();
    __syncthreads();
    fetch(i + kStages - 1);
    if (i + 1 < count) next_rstd = of_row(p.rstd, first + i + 1), next_mean = mean_of(p, first + i + 1);
    auto behind = [&](const Rows &rows) { return int(reinterpret_cast<uintptr_t>(row_at(rows, size, row)) % 16); };
    const Bits *const x_at = reinterpret_cast<const Bits *>(slot(i) + behind(p.x)) + t,
                      *const dy_at = reinterpret_cast<const Bits *>(slot(i) + kRowBytes<size, V> + behind(p.dy)) + t;
    auto load = [&](int v, float(&xhat)[N], float(&dy)[N]) {
      Bits x_bits[N], dy_bits[N];
#pragma unroll
      for (int k = 0; k < N; ++k) x_bits[k] = x_at[T * (v + k)], dy_bits[k] = dy_at[T * (v + k)];
      floats_of<size>(p.x.type, x_bits, xhat);
      floats_of<size>(p.x.type, dy_bits, dy);
#pragma unroll
      for (int k = 0; k < N; ++k) xhat[k] = (centred ? xhat[k] - mean : xhat[k]) * rstd;
    };
    StridedLanes<T, V> lanes[kSums<P>];
#pragma unroll
    for (int v = 0; v < V; v += N) {
      float xhat[N], dy[N];
      load(v, xhat, dy);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        of_weight[v + k] = fmaf(dy[k], xhat[k], of_weight[v + k]);
        if constexpr (centred) of_bias[v + k] = dy[k] + of_bias[v + k];
        const float g = dy[k] * scale[v + k];
        lanes[0].add(v + k, columns.inside(v + k), g, xhat[k]);
        if constexpr (centred) lanes[1].add(v + k, columns.inside(v + k), g, 1.0f);
      }
    }
    if (!p.dx.data) continue;
    float sums[kSums<P>];
    join_strided(lanes, exchange[i % 2], [&](float sum) { return sum / float(n); }, sums);
    Bits *const dx_at = reinterpret_cast<Bits *>(row_at(p.dx, size, row)) + t;
    const Bits *const dresidual_at = reinterpret_cast<const Bits *>(row_at(p.dresidual, size, row)) + t;
#pragma unroll
    for (int v = 0; v < V; v += N) {
      float xhat[N], d[N];
      Bits bits[N] = {};
      load(v, xhat, d);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        d[k] = fmaf(-xhat[k], sums[0], d[k] * scale[v + k]);
        if constexpr (centred) d[k] -= sums[1];
      }
      if (p.dresidual.data) {
        float dresidual[N];
#pragma unroll
        for (int k = 0; k < N; ++k)
          if (columns.inside(v + k)) bits[k] = dresidual_at[T * (v + k)];
        floats_of<size>(p.x.type, bits, dresidual);
#pragma unroll
        for (int k = 0; k < N; ++k) d[k] = fmaf(rstd, d[k], dresidual[k]);
      } else {
#pragma unroll
        for (int k = 0; k < N; ++k) d[k] *= rstd;
      }
      rounded<size>(p.x.type, d, bits);
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (columns.inside(v + k)) dx_at[T * (v + k)] = bits[k];
    }
  }

  store_chains(p, columns, chain_number, of_weight, of_bias);
#endif
}

// Calls f with the elements a thread that hold a row of n.
template <class F> pydet_status with_elements(int64_t n, const F &f) {
  if (n <= 512 * 12) return f(std::integral_constant<int, 12>{});
  if (n <= 512 * 16) return f(std::integral_constant<int, 16>{});
  return f(std::integral_constant<int, 24>{});
}

template <class P> pydet_status backward_staged(const char *name, const P &p) {
  return with_sums_over_rows(name, p, 1, [&] {
    return with_elements(p.n, [&](auto V) {
      auto run = [&](auto size, auto kernel) {
        return launch(blocks_of(name, p, unsigned(divide_up(p.rows, kDweightChainRows)), kStagedThreads,
                                kStages * 2 * kRowBytes<size, V>),
                      kernel, p, rows_ascend(p.x, p.inner, p.rows, p.n), rows_ascend(p.dy, p.inner, p.rows, p.n));
      };
      if constexpr (V <= 16)
        if (p.x.type == Type::f32) return run(std::integral_constant<int, 4>{}, norm_backward_staged_kernel<P, 4, V>);
      return run(std::integral_constant<int, 2>{}, norm_backward_staged_kernel<P, 2, V>);
    });
  });
}
template <class P> bool staged_takes(const P &p) {
  const bool wide = p.x.type == Type::f32;
  const int64_t longest = kStagedThreads * (wide ? 16 : 24), bytes = kStages * 2 * (size_of(p.x.type) * longest + 16);
  return compute_capability(p.device.id) == 90 && p.n > kLongestStrided && p.n <= longest &&
         bytes + (4 << 10) <= gpu_shared_bytes(p.device.id);
}

// ---- Unaligned: dx and the sums apart ------------------------------------------------------------------------------

// Rows of a column whose elements are on their way: as many as 1024 threads have registers for.
template <int T, int V> constexpr int kAtOnce = T <= 512 ? kDweightChainRows : V <= 12 ? 8 : 4;

// One column of one chain a thread.
template <class P, int size, int at_once> __device__ __forceinline__ void go_down(const P &p, int64_t job) {
  const int64_t chain_number = job / p.n, column = job - chain_number * p.n, first = chain_number * kDweightChainRows;
  if (first >= p.rows) return;
  const int64_t last = p.rows - 1;
  float chain[2] = {};
#pragma unroll 1
  for (int64_t row0 = first; row0 < first + kDweightChainRows; row0 += at_once) {
    ElementBits<size> x_bits[at_once], dy_bits[at_once];
    float x[at_once], dy[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const RowIndex row = row_index(p.inner, row0 + i <= last ? row0 + i : last);
      x_bits[i] = reinterpret_cast<const ElementBits<size> *>(row_at(p.x, size, row))[column];
      dy_bits[i] = reinterpret_cast<const ElementBits<size> *>(row_at(p.dy, size, row))[column];
    }
    floats_of<size>(p.x.type, x_bits, x);
    floats_of<size>(p.x.type, dy_bits, dy);
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (row0 + i > last) continue;
      const float d = kCentred<P> ? x[i] - mean_of(p, row0 + i) : x[i];
      chain[0] = fmaf(dy[i], d * of_row(p.rstd, row0 + i), chain[0]);
      chain[1] = dy[i] + chain[1];
    }
  }
  float *const chains = static_cast<float *>(p.workspace);
  if constexpr (kCentred<P>) {
    const int64_t all = (p.rows + kDweightChainRows - 1) / kDweightChainRows * p.n;
    if (p.dweight.data) chains[job] = chain[0];
    if (p.dbias.data) chains[all + job] = chain[1];
  } else {
    chains[job] = chain[0];
  }
}

// The first `column_blocks` go down columns, the others along rows.
template <class P, int size, int T, int V, int F>
__global__ void __launch_bounds__(kBlock<T, 256>)
    norm_backward_unaligned_kernel(const __grid_constant__ P p, int64_t column_blocks) {
  constexpr int kTeams = kBlock<T, 256> / T;
  __shared__ float exchange[kTeams * kStridedExchange<T, kSums<P>> + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (block_number() < column_blocks)
    return go_down<P, size, kAtOnce<T, V>>(p, block_number() * kBlock<T, 256> + threadIdx.x);
  const int team = int(threadIdx.x) / T;
  const Strided<size, T, V, F> columns = {int(threadIdx.x) % T, int(p.n)};
  const int64_t r = (block_number() - column_blocks) * kTeams + team, last = p.rows - 1;
  const RowIndex where = row_index(p.inner, r <= last ? r : last);
  const float rstd = of_row(p.rstd, r <= last ? r : last), mean = mean_of(p, r <= last ? r : last);
  ElementBits<size> x_bits[V], dy_bits[V];
  constexpr bool kTight = T * V > 1024 * 12;  // registers: x comes when the weights have gone
  if constexpr (!kTight) columns.load(row_at(p.x, size, where), x_bits);
  columns.load(row_at(p.dy, size, where), dy_bits);
  float xhat[V], g[V], scale[V], sums[kSums<P>];
  columns.load_scale(p.weight, p.weight_offset, scale);
  floats_of<size>(p.x.type, dy_bits, g);
#pragma unroll
  for (int i = 0; i < V; ++i) g[i] *= scale[i];
  if constexpr (kTight) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      uint32_t bits = bits_of(g[i]);
      asm volatile("" : "+r"(bits)::"memory");
      g[i] = float_of(bits);
    }
    columns.load(row_at(p.x, size, where), x_bits);
  }
  floats_of<size>(p.x.type, x_bits, xhat);
  StridedLanes<T, V> lanes[kSums<P>];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    xhat[i] = (kCentred<P> ? xhat[i] - mean : xhat[i]) * rstd;
    lanes[0].add(i, columns.inside(i), g[i], xhat[i]);
    if constexpr (kCentred<P>) lanes[1].add(i, columns.inside(i), g[i], 1.0f);
  }
  join_strided(
      lanes, exchange + team * kStridedExchange<T, kSums<P>>, [&](float sum) { return sum / float(p.n); }, sums);
  if (r <= last) store_dx(p, where, columns, rstd, xhat, sums, g);
}

template <class P> pydet_status backward_unaligned(const char *name, const P &p) {
  return with_sums_over_rows(name, p, 1, [&] {
    const int64_t jobs = p.dweight.data || p.dbias.data ? divide_up(p.rows, kDweightChainRows) * p.n : 0;
    if (!jobs && !p.dx.data) return pydet_status(PYDET_OK);
    auto run = [&](auto shape) {
      constexpr int T = shape.T, kThreads = kBlock<T, 256>;
      const int64_t column_blocks = divide_up(jobs, kThreads),
                    row_blocks = p.dx.data ? divide_up(p.rows, kThreads / T) : 0;
      return launch(blocks_of(name, p, grid_of(column_blocks + row_blocks, kThreads), kThreads),
                    p.x.type == Type::f32 ? norm_backward_unaligned_kernel<P, 4, T, shape.V, shape.F>
                                          : norm_backward_unaligned_kernel<P, 2, T, shape.V, shape.F>,
                    p, column_blocks);
    };
    return p.n > kLongestOfShapes ? run(Singles<1024, 16, 12>{}) : with_strided_shape(p.n, run);
  });
}

template <class P> bool unaligned_takes(const P &p) {
  constexpr int64_t kMostElements = int64_t(1) << 40;  // of all rows: their blocks are one grid
  return p.n <= 1024 * 16 && p.rows <= most_blocks(256) / 2 && p.rows * p.n <= kMostElements;
}

}  // namespace

bool rmsnorm_backward_strided_takes(const RmsNormBackward &p) { return p.n <= kLongestStrided; }
bool rmsnorm_backward_strided_prefers(const RmsNormBackward &p) { return many_elements(p.rows, p.n); }
pydet_status rmsnorm_backward_strided(const RmsNormBackward &p) {
  return backward_strided("rmsnorm_backward_strided", p);
}
bool layernorm_backward_strided_takes(const LayerNormBackward &p) { return p.n <= kLongestStrided; }
bool layernorm_backward_strided_prefers(const LayerNormBackward &p) {
  return !rows_whole(p) && many_elements(p.rows, p.n);
}
pydet_status layernorm_backward_strided(const LayerNormBackward &p) {
  return backward_strided("layernorm_backward_strided", p);
}

bool rmsnorm_backward_staged_takes(const RmsNormBackward &p) { return staged_takes(p); }
bool rmsnorm_backward_staged_prefers(const RmsNormBackward &p) { return many_elements(p.rows, p.n); }
pydet_status rmsnorm_backward_staged(const RmsNormBackward &p) { return backward_staged("rmsnorm_backward_staged", p); }
bool layernorm_backward_staged_takes(const LayerNormBackward &p) { return staged_takes(p); }
bool layernorm_backward_staged_prefers(const LayerNormBackward &p) {
  return (!rows_whole(p) || (p.n > 8192 && p.rows > 1400)) && many_elements(p.rows, p.n);
}
pydet_status layernorm_backward_staged(const LayerNormBackward &p) {
  return backward_staged("layernorm_backward_staged", p);
}

bool rmsnorm_backward_unaligned_takes(const RmsNormBackward &p) { return unaligned_takes(p); }
pydet_status rmsnorm_backward_unaligned(const RmsNormBackward &p) {
  return backward_unaligned("rmsnorm_backward_unaligned", p);
}
bool layernorm_backward_unaligned_takes(const LayerNormBackward &p) { return unaligned_takes(p); }
// Of few elements, as they are read twice: on an H100 (tools/rows_sweep.py) 1075x416 takes 7.7 us and by rows 10.9, but
// 4000x6001 142 and 95.
bool layernorm_backward_unaligned_prefers(const LayerNormBackward &p) {
  if (rows_whole(p)) return p.rows > 1024 && p.rows * p.n <= (p.n <= 1024 ? 1'200'000 : 1'500'000);
  const int64_t few = p.n <= 1800 || p.n > 8185 ? 16 : p.n <= 4500 ? 256 : 128;
  const int64_t most = p.n <= 5120 ? 4'000'000 : 8'000'000;
  return p.rows > few && (p.rows * p.n <= most || (p.n > kLongestStrided && !staged_takes(p)));
}
pydet_status layernorm_backward_unaligned(const LayerNormBackward &p) {
  return backward_unaligned("layernorm_backward_unaligned", p);
}

}  // namespace pydet
