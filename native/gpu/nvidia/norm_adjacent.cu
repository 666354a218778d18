// RMSNorm and LayerNorm of rows that lie one behind the other and begin anywhere: the CPU's bits. The formulas are
// those of rmsnorm.cu and layernorm.cu.
//
// A warp, or a block of 64 or 128 threads, has some rows in shared memory (adjacent_rows.h), and a team of T threads a
// row in registers.

#include <type_traits>

#include "gpu/kernels.h"
#include "gpu/nvidia/adjacent_rows.h"

namespace pydet {
namespace {

template <int T> constexpr int kBlock = T <= kLogicalWarp ? 4 * kLogicalWarp : T;
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
__global__ void __launch_bounds__(kBlock<T>, kMost<T, V> * 128 / kBlock<T>)
    norm_adjacent_kernel(const __grid_constant__ P p) {
  constexpr bool centred = std::is_same_v<P, LayerNorm>;
  constexpr int kGroup = T < kLogicalWarp ? kLogicalWarp : T;  // threads that share rows
  constexpr int kAtOnce = kGroup / T, kRows = kOfShare<T>, kRoom = kStridedExchange<T, 1> + 1;
  extern __shared__ __align__(16) char shared[];
  __shared__ float of_mean[kRoom], of_squares[kRoom];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int thread = int(threadIdx.x) % kGroup, group = int(threadIdx.x) / kGroup, n = int(p.n);
  const int64_t first = (int64_t(blockIdx.x) * (kBlock<T> / kGroup) + group) * kRows;
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
    columns.load(row, 0, bits);
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
      uint32_t pairs[kChunk / 2];
      load_vector(columns, p.weight, i, 1.0f, scale);
      load_vector(columns, p.bias, i, 0.0f, bias);
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        y[k] = x[i + k < V ? i + k : 0] * rstd;
        scale[k] += p.weight_offset;
        if (centred && p.bias.data) y[k] = fmaf(y[k], scale[k], bias[k]);
        else y[k] *= scale[k];
      }
      pairs_of(p.x.type, y, pairs);
      columns.store_some(row, i, pairs);
    }
  }
  meet();
  Share<kGroup>(p.y.data + first * n * 2, rows * n * 2).store(of_group);
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int64_t kLongest = 4096;

// Calls f with a team that holds a row of n.
template <class F> pydet_status with_shape(int64_t n, const F &f) {
  if (n <= 4 * 16) return f(AdjacentShape<4, 16, 8>{});
  if (n <= 4 * 20) return f(AdjacentShape<4, 20, 16>{});
  if (n <= 4 * 24) return f(AdjacentShape<4, 24, 20>{});
  if (n <= 4 * 32) return f(AdjacentShape<4, 32, 24>{});
  if (n <= 4 * 40) return f(AdjacentShape<4, 40, 32>{});
  if (n <= 8 * 24) return f(AdjacentShape<8, 24, 20>{});
  if (n <= 8 * 32) return f(AdjacentShape<8, 32, 24>{});
  if (n <= 16 * 20) return f(AdjacentShape<16, 20, 16>{});
  if (n <= 16 * 24) return f(AdjacentShape<16, 24, 20>{});
  if (n <= 16 * 32) return f(AdjacentShape<16, 32, 24>{});
  if (n <= 16 * 40) return f(AdjacentShape<16, 40, 32>{});
  if (n <= 32 * 24) return f(AdjacentShape<32, 24, 20>{});
  if (n <= 32 * 32) return f(AdjacentShape<32, 32, 24>{});
  if (n <= 32 * 40) return f(AdjacentShape<32, 40, 32>{});
  if (n <= 64 * 24) return f(AdjacentShape<64, 24, 20>{});
  if (n <= 64 * 32) return f(AdjacentShape<64, 32, 24>{});
  if (n <= 64 * 40) return f(AdjacentShape<64, 40, 32>{});
  if (n <= 128 * 24) return f(AdjacentShape<128, 24, 20>{});
  return f(AdjacentShape<128, 32, 24>{});
}

template <class P> pydet_status norm_adjacent(const char *name, const P &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  return with_shape(p.n, [&](auto shape) {
    constexpr int T = shape.T, V = shape.V, kGroups = T < kLogicalWarp ? kBlock<T> / kLogicalWarp : kBlock<T> / T;
    Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(divide_up(p.rows, kGroups * kOfShare<T>))),
                    dim3(kBlock<T>)};
    where.shared_bytes = kGroups * share_bytes<T, V>(kOfShare<T>, int(p.n));
    where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
    return launch(where, norm_adjacent_kernel<P, T, V, shape.F>, p);
  });
}

template <class P> bool takes(const P &p) {
  return p.n > 32 && p.n <= kLongest && p.rows < int64_t(1) << 31 && !p.residual.data && rows_adjacent(p, p.x, p.x) &&
         rows_adjacent(p, p.y, p.x);
}

// From so many rows on this is faster than norm_unaligned.cu. Measured on an H100, us, here and there: LayerNorm
// 192437x98 45 and 83 (a copy 34), 191379x2300 836 and 1153 (724), 64000x515 93 and 153, 16000x3501 113 and 181, but
// 16000x183 12.8 and 10.9, 64000x255 44 and 40; RMSNorm 192437x98 36 and 57, 191379x2300 654 and 767, 100000x225 43 and
// 42.
constexpr int64_t kNever = int64_t(1) << 62;
constexpr struct {
  int64_t longest, rmsnorm, layernorm;
} kFrom[] = {{64, 6'000, 6'000},    {80, 12'000, 12'000},   {128, 24'000, 16'000},   {160, 32'000, 16'000},
             {192, 48'000, 24'000}, {224, kNever, 100'000}, {256, kNever, kNever},   {320, 12'000, 6'000},
             {384, 12'000, 6'000},  {512, kNever, 24'000},  {768, 8'000, 4'000},     {1024, 24'000, 12'000},
             {1536, 4'000, 4'000},  {2560, 6'000, 6'000},   {kLongest, 4'000, 4'000}};
template <class P> bool prefers(const P &p) {
  if (p.n % kRowLaneElements == 0 && rows_aligned(p.x)) return false;
  for (const auto &from : kFrom)
    if (p.n <= from.longest) return p.rows >= (std::is_same_v<P, LayerNorm> ? from.layernorm : from.rmsnorm);
  return false;
}

}  // namespace

bool rmsnorm_adjacent_takes(const RmsNorm &p) { return takes(p); }
bool rmsnorm_adjacent_prefers(const RmsNorm &p) { return prefers(p); }
pydet_status rmsnorm_adjacent(const RmsNorm &p) { return norm_adjacent("rmsnorm_adjacent", p); }

bool layernorm_adjacent_takes(const LayerNorm &p) { return takes(p); }
bool layernorm_adjacent_prefers(const LayerNorm &p) { return prefers(p); }
pydet_status layernorm_adjacent(const LayerNorm &p) { return norm_adjacent("layernorm_adjacent", p); }

}  // namespace pydet
