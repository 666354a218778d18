// RMSNorm and LayerNorm of rows that are not whole pieces of 16 bytes, odd in length or in place, in fp32 (NUMERICS.md,
// "RMSNorm", "LayerNorm"): the CPU's bits. The formulas are those of norm.cu.
//
// Unaligned: a team holds a row of up to 12288 in registers, which it reads and writes element by element (elements.h).
// Adjacent: rows that lie one behind the other; a warp, or a block of 64 or 128 threads, has some of them in shared
// memory, and a team of T threads a row in registers. Staged: a row is in the shared memory of its block (pieces.h). The
// last two take no residual.

#include <type_traits>

#include "gpu/kernels.h"
#include "gpu/nvidia/elements.h"
#include "gpu/nvidia/pieces.h"

namespace pydet {
namespace {

constexpr float kNothing = -0.0f;  // which changes no number that it is added to

// ---- Unaligned -----------------------------------------------------------------------------------------------------

template <class P, int size, int T, int V, int F>
__global__ void __launch_bounds__(kBlock<T, 256>) norm_unaligned_kernel(const __grid_constant__ P p) {
  constexpr bool centred = kCentred<P>;
  constexpr int kTeams = kBlock<T, 256> / T, kRoom = kStridedExchange<T, 1>;
  __shared__ float of_mean[centred ? kTeams * kRoom + 1 : 1], of_squares[kTeams * kRoom + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T;
  const Strided<size, T, V, F> columns = {int(threadIdx.x) % T, int(p.n)};
  const int64_t r = block_number() * kTeams + team, last = p.rows - 1;
  const bool there = r <= last;
  const RowIndex where = row_index(p.inner, there ? r : last);
  ElementBits<size> bits[V];
  columns.load(row_at(p.x, size, where), bits);
  float x[V], scale[V], bias[V], mean[1] = {}, rstd[1];
  floats_of<size>(p.x.type, bits, x);
  if (p.residual.data) {
    float other[V];
    columns.load(row_at(p.residual, size, where), bits);
    floats_of<size>(p.x.type, bits, other);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] += other[i];
    rounded<size>(p.x.type, x, bits);
    if (there) columns.store(row_at(p.sum, size, where), bits);
    floats_of<size>(p.x.type, bits, x);
  }
  columns.load_scale(p.weight, p.weight_offset, scale);
  if constexpr (centred) columns.load_scale(p.bias, kNothing, bias);
  StridedLanes<T, V> squares[1];
  if constexpr (centred) {
    StridedLanes<T, V> lanes[1];
#pragma unroll
    for (int i = 0; i < V; ++i) lanes[0].add(i, columns.inside(i), x[i], 1.0f);
    join_strided(lanes, of_mean + team * kRoom, [&](float sum) { return sum / float(p.n); }, mean);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] -= mean[0];
  }
#pragma unroll
  for (int i = 0; i < V; ++i) squares[0].add(i, columns.inside(i), x[i], x[i]);
  join_strided(squares, of_squares + team * kRoom, [&](float sum) { return rstd_of(sum, p.n, p.eps); }, rstd);
  if (!there) return;
  if (columns.t == 0) {
    if constexpr (centred) store_of_row(p.mean, r, mean[0]);
    store_of_row(p.rstd, r, rstd[0]);
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    x[i] *= rstd[0];
    if (centred && p.bias.data) x[i] = fmaf(x[i], scale[i], bias[i]);
    else x[i] *= scale[i];
  }
  rounded<size>(p.x.type, x, bits);
  columns.store(row_at(p.y, size, where), bits);
}

template <class P> pydet_status norm_unaligned(const char *name, const P &p) {
  return on_device(name, p, [&] {
    return with_strided_shape(p.n, [&](auto shape) {
      constexpr int T = shape.T;
      return launch_rows(name, p, kBlock<T, 256> / T, kBlock<T, 256>,
                         p.x.type == Type::f32 ? norm_unaligned_kernel<P, 4, T, shape.V, shape.F>
                                               : norm_unaligned_kernel<P, 2, T, shape.V, shape.F>);
    });
  });
}

// ---- Adjacent ------------------------------------------------------------------------------------------------------

template <int T> constexpr int kBlockOfAdjacent = T <= kLogicalWarp ? 4 * kLogicalWarp : T;
// Rows of a warp's share, or a block's: for 8 threads a row twice those of its teams, so that it is whole pieces.
template <int T> constexpr int kOfShare = T > kLogicalWarp ? 1 : kLogicalWarp / T *(T == 8 ? 2 : 1);
// Blocks of 128 threads that a multiprocessor is to hold: fewer where warps join two sums over e.
template <int T, int V>
constexpr int kMost = T > kLogicalWarp || kBlocks<V> == 2 ? kBlocks<V> : kBlocks<V> - (T == 4 || V <= 24 ? 1 : 2);

// rowsum(u, v) of a row, to all of its team; u(i) and v(i) are elements. Every thread of a block of one team calls it.
template <int T, int V, class Columns, class U, class W>
__device__ __forceinline__ float row_sum(const Columns &columns, const U &u, const W &v, float *exchange) {
  if constexpr (T <= kLogicalWarp) {
    SumOfLanes<T, V> sum;
#pragma unroll
    for (int c = 0; c < sum.kChunks; ++c) {
      float s[kChunk];
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        const int i = c * kChunk + k, there = i < V ? i : 0;
        s[k] = columns.inside(i) ? fmaf(u(there), v(there), 0.0f) : 0.0f;
      }
      sum.add(c * kChunk, s);
    }
    return sum.total();
  } else {
    StridedLanes<T, V> lanes[1];
    float sum[1];
#pragma unroll
    for (int i = 0; i < V; ++i) lanes[0].add(i, columns.inside(i), u(i), v(i));
    join_strided(lanes, exchange, [](float s) { return s; }, sum);
    return sum[0];
  }
}

template <class P, int T, int V, int F>
__global__ void __launch_bounds__(kBlockOfAdjacent<T>, kMost<T, V> * 128 / kBlockOfAdjacent<T>)
    norm_adjacent_kernel(const __grid_constant__ P p) {
  constexpr bool centred = kCentred<P>;
  constexpr int kGroup = T < kLogicalWarp ? kLogicalWarp : T;  // threads that share rows
  constexpr int kAtOnce = kGroup / T, kRows = kOfShare<T>, kRoom = kStridedExchange<T, 1> + 1;
  extern __shared__ __align__(16) char shared[];
  __shared__ float of_mean[kRoom], of_squares[kRoom];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int thread = int(threadIdx.x) % kGroup, group = int(threadIdx.x) / kGroup, n = int(p.n);
  const int64_t first = (int64_t(blockIdx.x) * (kBlockOfAdjacent<T> / kGroup) + group) * kRows;
  if (first >= p.rows) return;
  const int rows = p.rows - first < kRows ? int(p.rows - first) : kRows;
  auto meet = [] {
    if constexpr (T <= kLogicalWarp) __syncwarp();
    else __syncthreads();
  };
  char *const of_group = shared + group * share_bytes<T, V>(kRows, n);
  const Share<kGroup> share(p.x.data + first * n * 2, rows * n * 2);
  share.bring(of_group, first > 0, first + rows < p.rows);
  commit_copies();
  wait_copies<0>();
  meet();

  const SharedRow<T, V, F> columns = {thread % T, n};
#pragma unroll 1
  for (int turn = 0; turn < kRows / kAtOnce && turn * kAtOnce < rows; ++turn) {
    const int mine = turn * kAtOnce + thread / T, r = mine < rows ? mine : rows - 1;
    char *const row = of_group + share.lead + r * n * 2;
    float x[V], mean = 0.0f;
    uint16_t bits[V];
    columns.load(row, bits);
    floats_of<2>(p.x.type, bits, x);
    if constexpr (centred) {
      mean = row_sum<T, V>(columns, [&](int i) { return x[i]; }, [](int) { return 1.0f; }, of_mean) / float(n);
#pragma unroll
      for (int i = 0; i < V; ++i) x[i] -= mean;
    }
    auto element = [&](int i) { return x[i]; };
    const float rstd = rstd_of(row_sum<T, V>(columns, element, element, of_squares), n, p.eps);
    if (mine >= rows) continue;
    if (columns.t == 0) {
      if constexpr (centred) store_of_row(p.mean, first + r, mean);
      store_of_row(p.rstd, first + r, rstd);
    }
#pragma unroll
    for (int i = 0; i < V; i += kChunk) {
      float scale[kChunk], bias[kChunk], y[kChunk];
      uint16_t some[kChunk];
      load_vector(columns, p.weight, i, 1.0f, scale);
      load_vector(columns, p.bias, i, 0.0f, bias);
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        y[k] = x[i + k < V ? i + k : 0] * rstd;
        scale[k] += p.weight_offset;
        if (centred && p.bias.data) y[k] = fmaf(y[k], scale[k], bias[k]);
        else y[k] *= scale[k];
      }
      rounded<2>(p.x.type, y, some);
      columns.store_some(row, i, some);
    }
  }
  meet();
  Share<kGroup>(p.y.data + first * n * 2, rows * n * 2).store(of_group);
}

constexpr int64_t kLongestAdjacent = 4096;

// Calls f with a team that holds a row of n.
template <class F> pydet_status with_adjacent_shape(int64_t n, const F &f) {
  return with_first<Singles<4, 16, 8>, Singles<4, 20, 16>, Singles<4, 24, 20>, Singles<4, 32, 24>, Singles<4, 40, 32>,
                    Singles<8, 24, 20>, Singles<8, 32, 24>, Singles<16, 20, 16>, Singles<16, 24, 20>,
                    Singles<16, 32, 24>, Singles<16, 40, 32>, Singles<32, 24, 20>, Singles<32, 32, 24>,
                    Singles<32, 40, 32>, Singles<64, 24, 20>, Singles<64, 32, 24>, Singles<64, 40, 32>,
                    Singles<128, 24, 20>, Singles<128, 32, 24>>(n, f);
}

template <class P> pydet_status norm_adjacent(const char *name, const P &p) {
  return on_device(name, p, [&] {
    return with_adjacent_shape(p.n, [&](auto shape) {
      constexpr int T = shape.T, V = shape.V, kThreads = kBlockOfAdjacent<T>;
      constexpr int kGroups = kThreads / (T < kLogicalWarp ? kLogicalWarp : T);
      return launch(blocks_of(name, p, unsigned(divide_up(p.rows, kGroups * kOfShare<T>)), kThreads,
                              kGroups * share_bytes<T, V>(kOfShare<T>, int(p.n))),
                    norm_adjacent_kernel<P, T, V, shape.F>, p);
    });
  });
}

template <class P> bool adjacent_takes(const P &p) {
  return p.n > 32 && p.n <= kLongestAdjacent && p.rows < int64_t(1) << 31 && !p.residual.data &&
         rows_adjacent(p, p.x, p.x) && rows_adjacent(p, p.y, p.x);
}

// From so many rows on this is faster than norm_unaligned on an H100 (tools/rows_sweep.py).
constexpr int64_t kNever = int64_t(1) << 62;
constexpr struct {
  int64_t longest, rmsnorm, layernorm;
} kFrom[] = {{64, 6'000, 6'000},    {80, 12'000, 12'000},  {128, 24'000, 16'000},
             {160, 32'000, 16'000}, {192, 48'000, 24'000}, {224, kNever, 100'000},
             {256, kNever, kNever}, {320, 12'000, 6'000},  {384, 12'000, 6'000},
             {512, kNever, 24'000}, {768, 8'000, 4'000},   {1024, 24'000, 12'000},
             {1536, 4'000, 4'000},  {2560, 6'000, 6'000},  {kLongestAdjacent, 4'000, 4'000}};
template <class P> bool adjacent_prefers(const P &p) {
  if (p.n % kRowLaneElements == 0 && rows_aligned(p.x)) return false;
  for (const auto &from : kFrom)
    if (p.n <= from.longest) return p.rows >= (kCentred<P> ? from.layernorm : from.rmsnorm);
  return false;
}

// ---- Staged --------------------------------------------------------------------------------------------------------

template <class P, Type type>
__global__ void __launch_bounds__(kMaxTeam, 4) norm_staged_kernel(const __grid_constant__ P p, bool ascend) {
  constexpr bool centred = kCentred<P>;
  constexpr int T = kMaxTeam, W = kVector;
  using Row = StagedRow<type, true>;
  extern __shared__ __align__(16) char shared[];
  __shared__ float of_mean[centred ? T : 1], of_squares[T];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t r = blockIdx.x;
  const RowIndex where = row_index(p.inner, r);
  Row row;
  row.fetch(shared, row_at(p.x, size_of(type), where), p.n, ascend && r > 0, ascend && r < p.rows - 1);

  Lanes<T, W, 1> lanes[1], squares[1];
  float mean[1] = {}, rstd[1];
  if constexpr (centred) {
    row.turns(0, 0.0f, [&](int j, const float(&x)[W]) { row.add(lanes[0], j, x, Ones()); });
    join(lanes, of_mean, [&](float sum) { return sum / float(p.n); }, mean);
  }
  row.turns(0, 0.0f, [&](int j, float(&x)[W]) {
    if constexpr (centred)
#pragma unroll
      for (int e = 0; e < W; ++e) x[e] -= mean[0];
    row.add(squares[0], j, x, x);
  });
  join(squares, of_squares, [&](float sum) { return rstd_of(sum, p.n, p.eps); }, rstd);
  if (threadIdx.x == 0) {
    if constexpr (centred) store_of_row(p.mean, r, mean[0]);
    store_of_row(p.rstd, r, rstd[0]);
  }

  char *const y_row = row_at(p.y, size_of(type), where);
  row.turns(Row::behind_whole(y_row), 0.0f, [&](int j, float(&y)[W]) {
    float scale[W], bias[W];
    load_scales_of(p.weight, p.weight_offset, 1.0f, j, row.n, scale);
    if constexpr (centred) load_scales_of(p.bias, kNothing, 0.0f, j, row.n, bias);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      if constexpr (centred) {
        const float xhat = (y[e] - mean[0]) * rstd[0];
        y[e] = p.bias.data ? fmaf(xhat, scale[e], bias[e]) : xhat * scale[e];
      } else {
        y[e] = y[e] * rstd[0] * scale[e];
      }
    }
    row.store(y_row, j, y);
  });
}

template <class P> bool staged_takes(const P &p) {
  constexpr int64_t kStatic = 4 << 10, kMostRows = int64_t(1) << 31;
  return !p.residual.data && p.rows < kMostRows && vector_aligned(p.weight) && vector_aligned(p.bias) &&
         bytes_of_staged(p.n, p.x.type) + kStatic <= gpu_shared_bytes(p.device.id);
}

template <class P> pydet_status norm_staged(const char *name, const P &p) {
  return by_type(name, p, p.x.type, [&](auto type) {
    return launch(blocks_of(name, p, unsigned(p.rows), kMaxTeam, int(bytes_of_staged(p.n, type))),
                  norm_staged_kernel<P, type>, p, rows_ascend(p.x, p.inner, p.rows, p.n));
  });
}

// Beside the same rows in registers (norm_unaligned), on an H100 (tools/rows_sweep.py).
bool staged_prefers(int64_t rows, int64_t n) { return rows > (n <= 8192 ? 1000 : n <= 12288 ? 200 : 0) && n > 4096; }

template <class P> bool unaligned_takes(const P &p) {
  constexpr int64_t kMostElements = int64_t(1) << 40;  // of all rows: their blocks are one grid
  return p.n <= kLongestOfShapes && p.rows <= most_blocks(256) / 2 && p.rows * p.n <= kMostElements;
}

}  // namespace

bool rmsnorm_unaligned_takes(const RmsNorm &p) { return unaligned_takes(p); }
pydet_status rmsnorm_unaligned(const RmsNorm &p) { return norm_unaligned("rmsnorm_unaligned", p); }
bool layernorm_unaligned_takes(const LayerNorm &p) { return unaligned_takes(p); }
pydet_status layernorm_unaligned(const LayerNorm &p) { return norm_unaligned("layernorm_unaligned", p); }

bool rmsnorm_adjacent_takes(const RmsNorm &p) { return adjacent_takes(p); }
bool rmsnorm_adjacent_prefers(const RmsNorm &p) { return adjacent_prefers(p); }
pydet_status rmsnorm_adjacent(const RmsNorm &p) { return norm_adjacent("rmsnorm_adjacent", p); }
bool layernorm_adjacent_takes(const LayerNorm &p) { return adjacent_takes(p); }
bool layernorm_adjacent_prefers(const LayerNorm &p) { return adjacent_prefers(p); }
pydet_status layernorm_adjacent(const LayerNorm &p) { return norm_adjacent("layernorm_adjacent", p); }

bool rmsnorm_staged_takes(const RmsNorm &p) { return staged_takes(p); }
bool rmsnorm_staged_prefers(const RmsNorm &p) { return staged_prefers(p.rows, p.n); }
pydet_status rmsnorm_staged(const RmsNorm &p) { return norm_staged("rmsnorm_staged", p); }
bool layernorm_staged_takes(const LayerNorm &p) { return staged_takes(p); }
bool layernorm_staged_prefers(const LayerNorm &p) { return staged_prefers(p.rows, p.n); }
pydet_status layernorm_staged(const LayerNorm &p) { return norm_staged("layernorm_staged", p); }

}  // namespace pydet
