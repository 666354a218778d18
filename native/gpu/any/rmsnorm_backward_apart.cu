// Gradients of RMSNorm, dx and dweight apart, in fp32 (NUMERICS.md, "RMSNorm"): the CPU's bits. The formulas are those
// of rmsnorm_backward.cu.
//
// dweight needs no sum along a row: rstd is given. So some blocks of the one launch go down columns and others along
// rows, and nobody waits for anybody. A block of columns takes a slice of them down all rows: each worker, a few lanes
// of 2 or 8 columns each, takes a chain of 16 rows, and the chains' sums are joined in shared memory, 16 of them a block
// of rows. There are no partial sums in the workspace and there is no second kernel; x and dy are read twice, the second
// time from the L2. The other blocks' teams hold a row each in registers (rmsnorm_rows.h): dx.

#include "gpu/kernels.h"
#include "gpu/any/rmsnorm_partials.h"
#include "gpu/any/rmsnorm_rows.h"

namespace pydet {
namespace {

constexpr int kThreads = 256;

// Columns of a block: `lanes` threads with W columns each stand side by side, `workers` such rows of threads one below
// the other. At once: rows whose elements are on their way.
template <int lanes_, int elements, int at_once> struct Slice {
  static constexpr int kLanes = lanes_, W = elements, kAtOnce = at_once, kColumns = kLanes * W;
  static constexpr int kWorkers = kThreads / kLanes;
  static_assert(kWorkers * kDweightChainRows >= kDweightBlockRows, "a turn takes whole blocks of rows");
};

template <Type type, class S>
__device__ __forceinline__ void go_down(const RmsNormBackward &p, int workers, float *sums, float *blocks) {
  constexpr int W = S::W, Q = S::kAtOnce, kBytes = size_of(type), kBlockChains = kDweightBlockRows / kDweightChainRows;
  const int thread = int(threadIdx.x), row_of_threads = thread / S::kLanes, worker = row_of_threads % workers;
  const int slice = row_of_threads / workers, slices = S::kWorkers / workers, columns = slices * S::kColumns;
  const int64_t first_column = int64_t(blockIdx.x) * columns;
  const int64_t column = first_column + slice * S::kColumns + thread % S::kLanes * W;
  const bool inside = column < p.n;
  const int block_workers = workers < kBlockChains ? workers : kBlockChains;
  const int blocks_a_turn = (workers + kBlockChains - 1) / kBlockChains;
  const int64_t chains = (p.rows + kDweightChainRows - 1) / kDweightChainRows;
  const int64_t block_count = (p.rows + kDweightBlockRows - 1) / kDweightBlockRows;
  const float *rstds = reinterpret_cast<const float *>(p.rstd.data);
  const bool owner = thread < columns && first_column + thread < p.n;
  float total = owner && p.accumulate ? reinterpret_cast<const float *>(p.dweight.data)[first_column + thread] : 0.0f;
  for (int64_t chain0 = 0; chain0 < chains; chain0 += workers) {
    const int64_t first = (chain0 + worker) * kDweightChainRows, last = p.rows - 1;
    float chain[W] = {};
#pragma unroll 1
    for (int q = 0; q < kDweightChainRows; q += Q) {
      uint32_t x[Q][W * kBytes / 4], dy[Q][W * kBytes / 4];
      float rstd[Q];
#pragma unroll
      for (int i = 0; i < Q; ++i) {
        const int64_t r = first + q + i;
        const bool there = r <= last;
        const RowIndex row = row_index(p.inner, there ? r : last);
        const char *x_at = row_at(p.x, kBytes, row) + column * kBytes;
        const char *dy_at = row_at(p.dy, kBytes, row) + column * kBytes;
        rstd[i] = there ? rstds[r] : -0.0f;  // and x = dy = +0: adds (+0)(-0) to a chain, which changes nothing
        constexpr int kPiece = W * kBytes < 16 ? W * kBytes : 16;
        struct alignas(kPiece) Piece {
          uint32_t word[kPiece / 4];
        };
#pragma unroll
        for (int k = 0; k < W * kBytes / kPiece; ++k) {
          Piece one = {}, other = {};
          if (there && inside) {
            one = *reinterpret_cast<const Piece *>(x_at + k * kPiece);
            other = *reinterpret_cast<const Piece *>(dy_at + k * kPiece);
          }
#pragma unroll
          for (int w = 0; w < kPiece / 4; ++w) {
            x[i][k * (kPiece / 4) + w] = one.word[w];
            dy[i][k * (kPiece / 4) + w] = other.word[w];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < Q; ++i)
#pragma unroll
        for (int e = 0; e < W; ++e) {
          auto element = [&](const uint32_t *words) {
            if constexpr (type == Type::f32) {
              return float_of(words[e]);
            } else {
              const uint16_t half = uint16_t(e % 2 ? words[e / 2] >> 16 : words[e / 2]);
              return Element<type>::to_f32(half);
            }
          };
          chain[e] = fmaf(element(dy[i]), element(x[i]) * rstd[i], chain[e]);
        }
    }
    float *mine = sums + row_of_threads * S::kColumns + thread % S::kLanes * W;
#pragma unroll
    for (int e = 0; e < W; e += W < 4 ? 2 : 4) {
      if constexpr (W < 4) *reinterpret_cast<float2 *>(mine + e) = make_float2(chain[e], chain[e + 1]);
      else *reinterpret_cast<float4 *>(mine + e) = make_float4(chain[e], chain[e + 1], chain[e + 2], chain[e + 3]);
    }
    __syncthreads();
    for (int i = thread; i < columns * blocks_a_turn; i += kThreads) {
      const int c = i % columns, b = i / columns;
      const float *chain_sums = sums + (c / S::kColumns * workers + b * kBlockChains) * S::kColumns + c % S::kColumns;
      float block = 0.0f;
      for (int g = 0; g < block_workers; g += kGroupChains) {
        float group = 0.0f;
#pragma unroll
        for (int k = 0; k < kGroupChains; ++k) group += chain_sums[(g + k) * S::kColumns];
        block += group;
      }
      blocks[i] = block;
    }
    __syncthreads();
    if (owner)
      for (int b = 0; b < blocks_a_turn && chain0 / kBlockChains + b < block_count; ++b)
        total += blocks[b * columns + thread];
  }
  if (owner) store_rounded(p.dweight.data, p.dweight.type, first_column + thread, total);
}

template <Type type, int T, int V>
__device__ __forceinline__ void go_along(const RmsNormBackward &p, int64_t block, float *exchange) {
  constexpr int W = kVector, kBytes = size_of(type), kVectorStep = T * W * kBytes, kTeams = kThreads / T;
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T, n = int(p.n);
  const int64_t r = block * kTeams + team, last = p.rows - 1;
  const RowIndex where = row_index(p.inner, r <= last ? r : last);
  const float rstd = reinterpret_cast<const float *>(p.rstd.data)[r <= last ? r : last];
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
      xhat[e] *= rstd;
      g[e] *= scale[e];
    }
  };
  Lanes<T, W, V> lanes[1];
  float c[1];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float xhat[W], g[W];
    load_xhat_and_g(v, xhat, g);
    lanes[0].add(v, W * (t + T * v) < n, g, xhat);
  }
  join(lanes, exchange + team * kExchange<T, 1>, [&](float sum) { return sum / float(p.n); }, c);
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
    for (int e = 0; e < W; ++e) {
      const float d = fmaf(-xhat[e], c[0], g[e]);
      g[e] = p.dresidual.data ? fmaf(rstd, d, dresidual[e]) : rstd * d;
    }
    store_packed<type>(dx_row + v * kVectorStep, g);
  }
}

// The first `column_blocks` go down columns, with so many chains at once; the others along rows.
template <Type type, int T, int V, class S>
__global__ void __launch_bounds__(kThreads, V <= 4 ? 2 : 1)
    rmsnorm_backward_apart_kernel(const __grid_constant__ RmsNormBackward p, int column_blocks, int workers) {
  __shared__ __align__(16) float sums[S::kWorkers * S::kColumns], blocks[kThreads];
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (int(blockIdx.x) < column_blocks) go_down<type, S>(p, workers, sums, blocks);
  else go_along<type, T, V>(p, int64_t(blockIdx.x) - column_blocks, sums);
}

// Calls f with a team that holds a row of n.
template <class F> pydet_status with_shape(int64_t n, const F &f) {
  if (n <= 32 * 8) return f(RowShape<32, 8, 1, 1>{});
  if (n <= 128 * 8) return f(RowShape<128, 8, 1, 1>{});
  if (n <= 256 * 8) return f(RowShape<256, 8, 1, 1>{});
  if (n <= 256 * 16) return f(RowShape<256, 8, 2, 1>{});
  if (n <= 256 * 32) return f(RowShape<256, 8, 4, 1>{});
  return f(RowShape<256, 8, 8, 1>{});
}

template <class S, Type type> pydet_status launch_apart(const RmsNormBackward &p) {
  return with_shape(p.n, [&](auto shape) {
    int workers = S::W < kGroupChains ? kGroupChains : S::W;  // whole groups, and at most a column a thread in the end
    const int64_t chains = divide_up(p.rows, kDweightChainRows);
    while (workers < S::kWorkers && workers < chains) workers *= 2;
    const int columns = S::kWorkers / workers * S::kColumns;
    const int64_t column_blocks = p.dweight.data ? divide_up(p.n, columns) : 0;
    const int64_t row_blocks = p.dx.data ? divide_up(p.rows, kThreads / shape.T) : 0;
    if (column_blocks + row_blocks == 0) return pydet_status(PYDET_OK);
    Launch where = {"rmsnorm_backward_apart", static_cast<gpu_stream>(p.stream),
                    dim3(unsigned(column_blocks + row_blocks)), dim3(kThreads)};
    where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
    return launch(where, rmsnorm_backward_apart_kernel<type, shape.T, shape.V, S>, p, int(column_blocks), workers);
  });
}

}  // namespace

bool rmsnorm_backward_apart_takes(const RmsNormBackward &p) {
  return p.n % kVector == 0 && p.n <= kLongestHeldRow && rows_aligned(p.x) && rows_aligned(p.dy) &&
         rows_aligned(p.dx) && rows_aligned(p.dresidual) && vector_aligned(p.weight) &&
         p.rows <= most_blocks(kThreads) - p.n;
}

// Of few rows. More of them go down a column one after the other, and what is read twice falls out of the L2.
bool rmsnorm_backward_apart_prefers(const RmsNormBackward &p) {
  constexpr int64_t kMostRows = 1024, kMostBytes = 12 << 20;  // of x
  return p.rows <= kMostRows && (!p.dweight.data || p.rows * p.n * size_of(p.x.type) <= kMostBytes);
}

pydet_status rmsnorm_backward_apart(const RmsNormBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_backward_apart", guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    // Up to a block of rows all of them at once, by narrow columns; then by wide ones.
    if (p.rows <= kDweightBlockRows) return launch_apart<Slice<16, 2, 16>, type>(p);
    return launch_apart<Slice<4, 8, type == Type::f32 ? 4 : 8>, type>(p);
  });
}

}  // namespace pydet
