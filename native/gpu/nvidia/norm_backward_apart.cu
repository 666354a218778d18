// Gradients of RMSNorm and LayerNorm, dx and the sums over rows apart, in fp32 (NUMERICS.md, "RMSNorm", "LayerNorm"):
// the CPU's bits. The formulas are those of norm_backward.cu.
//
// dweight and dbias need no sum along a row: mean and rstd are given. So some blocks of the one launch go down columns
// and others along rows, and nobody waits for anybody. A block of columns takes a slice of them down all rows: each
// worker, a few lanes of 2 or 8 columns each, takes a chain of 16 rows, and the chains' sums are joined in shared
// memory, 16 of them a block of rows. There are no partial sums in the workspace and there is no second kernel; x and dy are
// read twice, the second time from the L2. The other blocks' teams hold a row each in registers (rows.h): dx.
// `shifted`: rows begin anywhere (pieces.h); what goes down columns reads them element by element.
#include <type_traits>

#include "gpu/kernels.h"
#include "gpu/nvidia/pieces.h"
#include "gpu/any/column_sums.h"

namespace pydet {
namespace {

// Blocks a multiprocessor is to hold.
template <class P, Type type, int T, int V, bool shifted>
constexpr int kBlocks = T <= 256 && V <= 4 && !((kCentred<P> || shifted) && type == Type::f32) ? 2 : 1;
// Columns of a block: `lanes` threads with W columns each stand side by side, `workers` such rows of threads one below
// the other. At once: rows whose elements are on their way.
template <int lanes_, int elements, int at_once, int threads = 256> struct Slice {
  static constexpr int kLanes = lanes_, W = elements, kAtOnce = at_once, kColumns = kLanes * W, kOfBlock = threads;
  static constexpr int kWorkers = threads / kLanes, kRoom = kWorkers * kColumns;
  static_assert(kWorkers * kDweightChainRows >= kDweightBlockRows, "a turn takes whole blocks of rows");
  // For blocks of 512 threads, with at most so many rows at once.
  template <int most> using Of512 = Slice<kLanes, W, (kAtOnce < most ? kAtOnce : most), 512>;
};

// W adjacent elements of a row, as words of memory; those past its end are +0.
template <Type type, int W, bool shifted>
__device__ __forceinline__ void load_columns(const char *at, int64_t left, uint32_t (&x)[W * size_of(type) / 4]) {
  constexpr int kBytes = size_of(type), kPiece = W * kBytes < 16 ? W * kBytes : 16;
#pragma unroll
  for (uint32_t &word : x) word = 0;
  if constexpr (shifted) {
#pragma unroll
    for (int e = 0; e < W; ++e) {
      if (e >= left) continue;
      if constexpr (type == Type::f32) x[e] = reinterpret_cast<const uint32_t *>(at)[e];
      else x[e / 2] |= uint32_t(reinterpret_cast<const uint16_t *>(at)[e]) << e % 2 * 16;
    }
  } else if (left > 0) {
    struct alignas(kPiece) Piece {
      uint32_t word[kPiece / 4];
    };
#pragma unroll
    for (int k = 0; k < W * kBytes / kPiece; ++k) {
      const Piece one = *reinterpret_cast<const Piece *>(at + k * kPiece);
#pragma unroll
      for (int w = 0; w < kPiece / 4; ++w) x[k * (kPiece / 4) + w] = one.word[w];
    }
  }
}

template <class P, Type type, class S, bool shifted>
__device__ __forceinline__ void go_down(const P &p, int workers, float *sums, float *blocks) {
  constexpr int W = S::W, Q = S::kAtOnce, kBytes = size_of(type), kBlockChains = kDweightBlockRows / kDweightChainRows;
  const int thread = int(threadIdx.x), row_of_threads = thread / S::kLanes, worker = row_of_threads % workers;
  const int slice = row_of_threads / workers, slices = S::kWorkers / workers, columns = slices * S::kColumns;
  const int64_t first_column = int64_t(blockIdx.x) * columns;
  const int64_t column = first_column + slice * S::kColumns + thread % S::kLanes * W, left = p.n - column;
  const int block_workers = workers < kBlockChains ? workers : kBlockChains;
  const int blocks_a_turn = (workers + kBlockChains - 1) / kBlockChains;
  const int64_t chains = (p.rows + kDweightChainRows - 1) / kDweightChainRows;
  const int64_t block_count = (p.rows + kDweightBlockRows - 1) / kDweightBlockRows;
  const bool owner = thread < columns && first_column + thread < p.n;
  const Vector results[2] = {p.dweight, p.dbias};
  float total[kSums<P>];
#pragma unroll
  for (int i = 0; i < kSums<P>; ++i)
    total[i] = owner && p.accumulate && results[i].data ? of_row(results[i], first_column + thread) : 0.0f;
  for (int64_t chain0 = 0; chain0 < chains; chain0 += workers) {
    const int64_t first = (chain0 + worker) * kDweightChainRows, last = p.rows - 1;
    float chain[kSums<P>][W] = {};
#pragma unroll 1
    for (int q = 0; q < kDweightChainRows; q += Q) {
      uint32_t x[Q][W * kBytes / 4], dy[Q][W * kBytes / 4];
      float rstd[Q], mean[Q];
#pragma unroll
      for (int i = 0; i < Q; ++i) {
        const int64_t r = first + q + i;
        const bool there = r <= last;
        const RowIndex row = row_index(p.inner, there ? r : last);
        rstd[i] =
            there ? of_row(p.rstd, r) : -0.0f;  // with x = dy = +0: adds (+0)(-0) to a chain, which changes nothing
        mean[i] = there ? mean_of(p, r) : 0.0f;
        load_columns<type, W, shifted>(row_at(p.x, kBytes, row) + column * kBytes, there ? left : 0, x[i]);
        load_columns<type, W, shifted>(row_at(p.dy, kBytes, row) + column * kBytes, there ? left : 0, dy[i]);
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
          const float d = kCentred<P> ? element(x[i]) - mean[i] : element(x[i]);
          chain[0][e] = fmaf(element(dy[i]), d * rstd[i], chain[0][e]);
          if constexpr (kCentred<P>) chain[1][e] = first + q + i <= last ? element(dy[i]) + chain[1][e] : chain[1][e];
        }
    }
#pragma unroll
    for (int s = 0; s < kSums<P>; ++s) {
      float *mine = sums + s * S::kRoom + row_of_threads * S::kColumns + thread % S::kLanes * W;
#pragma unroll
      for (int e = 0; e < W; e += W < 4 ? 2 : 4) {
        float(&of)[W] = chain[s];
        if constexpr (W < 4) *reinterpret_cast<float2 *>(mine + e) = make_float2(of[e], of[e + 1]);
        else *reinterpret_cast<float4 *>(mine + e) = make_float4(of[e], of[e + 1], of[e + 2], of[e + 3]);
      }
    }
    __syncthreads();
    for (int i = thread; i < columns * blocks_a_turn * kSums<P>; i += S::kOfBlock) {
      const int c = i % columns, b = i / columns % blocks_a_turn, s = i / columns / blocks_a_turn;
      const float *chain_sums =
          sums + s * S::kRoom + (c / S::kColumns * workers + b * kBlockChains) * S::kColumns + c % S::kColumns;
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
#pragma unroll
        for (int s = 0; s < kSums<P>; ++s) total[s] += blocks[(s * blocks_a_turn + b) * columns + thread];
  }
#pragma unroll
  for (int s = 0; s < kSums<P>; ++s)
    if (owner && results[s].data) store_rounded(results[s].data, results[s].type, first_column + thread, total[s]);
}

template <class P, Type type, int T, int W, int V, bool shifted>
__device__ __forceinline__ void go_along(const P &p, int64_t block, float *exchange) {
  constexpr int kBytes = size_of(type), kTeams = kBlock<T, 256> / T;
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T, n = int(p.n);
  const int64_t mine = block * kTeams + team, last = p.rows - 1, r = mine <= last ? mine : last;
  const RowIndex where = row_index(p.inner, r);
  const float rstd = of_row(p.rstd, r);
  const float mean = mean_of(p, r);
  const char *dy_row = row_at(p.dy, kBytes, where), *x_row = row_at(p.x, kBytes, where);
  const int shift = shifted ? shift_of<type, W>(x_row) : 0;
  auto load = [&](const char *row, int j) {
    if constexpr (shifted) return load_piece<type, W>(row, j, n, r > 0, r < last);
    else return j < n ? load_packed<type, W>(row + j * kBytes) : Packed<type, W>{};
  };
  // Weights are on their way with the row where registers allow it: one after the other, each would be waited for.
  constexpr bool early = !shifted && type != Type::f32;
  Packed<type, W> dy[V], x[V];
  Scale<W> weights[early ? V : 1];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    dy[v] = load(dy_row, W * (t + T * v) - shift);
    x[v] = load(x_row, W * (t + T * v) - shift);
    if constexpr (early)
      if (W * (t + T * v) < n) weights[v].load(p.weight, W * (t + T * v));
  }
  auto load_scale_of = [&](int v, int j, float(&scale)[W]) {
    if constexpr (shifted) {
      load_scales_of(p.weight, p.weight_offset, 1.0f, j, n, scale);
    } else {
      Scale<W> weight = weights[early ? v : 0];
      if (!early && j < n) weight.load(p.weight, j);
      weight.unpack(p.weight, p.weight_offset, scale);
    }
  };
  auto xhat_and_g = [&](const Packed<type, W> &of_x, const Packed<type, W> &of_dy, int v, int j, float(&xhat)[W],
                        float(&g)[W]) {
    float scale[W];
    load_scale_of(v, j, scale);
    unpack(of_x, xhat);
    unpack(of_dy, g);
    to_xhat_and_g<P>(mean, rstd, scale, xhat, g);
  };
  Lanes<T, W, V> lanes[kSums<P>];
  float of_row_sums[kSums<P>];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int j = W * (t + T * v);
    float xhat[W], g[W];
    if constexpr (shifted) {
      const auto of_x = window<type, W>(x[v], load(x_row, j - shift + W), shift);
      const auto of_dy = window<type, W>(dy[v], load(dy_row, j - shift + W), shift);
      xhat_and_g(of_x, of_dy, v, j, xhat, g);
    } else {
      xhat_and_g(x[v], dy[v], v, j, xhat, g);
    }
    auto add = [&](Lanes<T, W, V> &to, const auto &other) {
      if constexpr (shifted) to.add_left(v, n - j, g, other);
      else to.add(v, j < n, g, other);
    };
    add(lanes[0], xhat);
    if constexpr (kCentred<P>) add(lanes[1], Ones());
  }
  join(lanes, exchange + team * kExchange<T, kSums<P>>, [&](float sum) { return sum / float(p.n); }, of_row_sums);
  if (mine > last) return;
  char *dx_row = row_at(p.dx, kBytes, where);
  const char *dresidual_row = row_at(p.dresidual, kBytes, where);  // read if there is one
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int j = W * (t + T * v) - shift;
    if (j >= n) continue;
    float xhat[W], g[W], dresidual[W] = {};
    xhat_and_g(x[v], dy[v], v, j, xhat, g);
    if (p.dresidual.data) unpack(load(dresidual_row, j), dresidual);
#pragma unroll
    for (int e = 0; e < W; ++e) g[e] = dx_of<P>(xhat[e], g[e], rstd, of_row_sums, p.dresidual.data, dresidual[e]);
    if constexpr (shifted) store_piece<type, W>(dx_row, j, n, pack<type>(g));
    else store_packed<type>(dx_row + j * kBytes, g);
  }
}

// The first `column_blocks` go down columns, with so many chains at once; the others along rows.
template <class P, Type type, int T, int W, int V, class S, bool shifted>
__global__ void __launch_bounds__(kBlock<T, 256>, kBlocks<P, type, T, V, shifted>)
    norm_backward_apart_kernel(const __grid_constant__ P p, int column_blocks, int workers) {
  __shared__ __align__(16) float sums[kSums<P> * S::kRoom], blocks[kSums<P> * kBlock<T, 256>];
  static_assert(S::kOfBlock == kBlock<T, 256> && kBlock<T, 256> / T * kExchange<T, kSums<P>> <= kSums<P> * S::kRoom,
                "rows are joined there too");
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (int(blockIdx.x) < column_blocks) go_down<P, type, S, shifted>(p, workers, sums, blocks);
  else go_along<P, type, T, W, V, shifted>(p, int64_t(blockIdx.x) - column_blocks, sums);
}

// Calls f with a team that holds a row of n, or the vectors of memory that it may lie in.
template <class P, bool shifted, class F> pydet_status with_shape(int64_t n, const F &f) {
  const int64_t most = shifted ? n + kVector - 1 : n;
  if (most <= 32 * 8) return f(RowShape<32, 8, 1, 1>{});
  if constexpr (!shifted && !kCentred<P>)
    if (most <= 128 * 8) return f(RowShape<128, 8, 1, 1>{});
  if (most <= 256 * 8) return f(RowShape<256, 8, 1, 1>{});
  if constexpr (!shifted)
    if (most <= 256 * 16) return f(RowShape<256, 8, 2, 1>{});
  // Of LayerNorm's two sums, vectors of eight would leave no registers for the weights.
  if (most <= 256 * 32)
    return f(std::conditional_t < kCentred<P> && !shifted, RowShape<512, 4, 4, 1>, RowShape < 256, 8, 4, 1 >> {});
  return f(RowShape<512, 4, 8, 1>{});
}

template <class Columns, Type type, bool shifted, class Shape, class P>
pydet_status launch_apart(const char *name, const P &p, Shape) {
  constexpr int T = Shape::T, kOfBlock = kBlock<T, 256>;
  using S = std::conditional_t<kOfBlock == 512, typename Columns::template Of512<kCentred<P> ? 8 : 16>, Columns>;
  int workers = S::W < kGroupChains ? kGroupChains : S::W;  // whole groups, and at most a column a thread in the end
  const int64_t chains = divide_up(p.rows, kDweightChainRows);
  while (workers < S::kWorkers && workers < chains) workers *= 2;
  const int columns = S::kWorkers / workers * S::kColumns;
  const int64_t column_blocks = p.dweight.data || p.dbias.data ? divide_up(p.n, columns) : 0;
  const int64_t row_blocks = p.dx.data ? divide_up(p.rows, kOfBlock / T) : 0;
  if (column_blocks + row_blocks == 0) return PYDET_OK;
  return launch(blocks_of(name, p, unsigned(column_blocks + row_blocks), kOfBlock),
                norm_backward_apart_kernel<P, type, T, Shape::W, Shape::V, S, shifted>, p, int(column_blocks), workers);
}

// Up to a block of rows all of them at once, by narrow columns; then by wide ones.
template <class P> pydet_status backward_apart(const char *name, const P &p) {
  return by_type(name, p, p.x.type, [&](auto type) {
    constexpr bool wide = type == Type::f32;
    using Narrow = Slice<16, 2, 16>;
    using NarrowOfFew = Slice<16, 2, wide ? 8 : 16>;  // that leaves registers
    auto run = [&](auto columns, auto shifted) {
      return with_shape<P, shifted>(
          p.n, [&](auto shape) { return launch_apart<decltype(columns), type, shifted>(name, p, shape); });
    };
    if (!rows_whole(p)) return run(NarrowOfFew{}, std::true_type{});
    using OfFewRows = std::conditional_t<kCentred<P>, NarrowOfFew, Narrow>;
    constexpr std::false_type whole{};
    // Wide columns, so that few blocks of them leave multiprocessors to those of rows: on an H100 77x16384 takes 7.8 us,
    // LayerNorm's 8.9, with narrow ones 9.6 and 11.0; but 42x15960 7.0 and 5.8.
    if (p.rows > 64 && p.rows <= kDweightBlockRows && p.n > 512 * 16)
      return launch_apart<Slice<16, 8, 4, 512>, type, false>(name, p, RowShape<512, 4, 8, 1>{});
    if (p.rows <= kDweightBlockRows) return run(OfFewRows{}, whole);
    return run(Slice < 4, 8, kCentred<P> || wide ? 4 : 8 > {}, whole);
  });
}

template <class P> bool takes(const P &p) {
  const int64_t longest = kLongestHeldRow - (rows_whole(p) ? 0 : kVector - 1);
  return p.n <= longest && vector_aligned(p.weight) && (rows_whole(p) || all_rows_agree(p)) &&
         p.rows <= most_blocks(256) - p.n;
}

}  // namespace

bool rmsnorm_backward_apart_takes(const RmsNormBackward &p) { return takes(p); }

// Of few rows. More of them go down a column one after the other, and what is read twice falls out of the L2.
bool rmsnorm_backward_apart_prefers(const RmsNormBackward &p) {
  constexpr int64_t kMostRows = 1024, kMostBytes = 12 << 20;  // of x
  // Of other rows very few: rmsnorm_backward_unaligned takes 868x174 in 5.4 us, this kernel in 23.
  if (p.dweight.data && !rows_whole(p) && p.rows > (p.n >= 3072 && p.n <= 6144 ? 128 : 16)) return false;
  return p.rows <= kMostRows && (!p.dweight.data || p.rows * p.n * size_of(p.x.type) <= kMostBytes);
}
pydet_status rmsnorm_backward_apart(const RmsNormBackward &p) { return backward_apart("rmsnorm_backward_apart", p); }

bool layernorm_backward_apart_takes(const LayerNormBackward &p) { return takes(p); }

// Of few rows, as RMSNorm's; of whole ones more, where they are long: of over 8192 columns no ring has room for two sums (on
// an H200, tools/rows_sweep.py, 403x16160 takes 26 us and held in registers 44, 1382x12896 83 and 91, 2855x14696 180 and 176).
bool layernorm_backward_apart_prefers(const LayerNormBackward &p) {
  if (rows_whole(p) && p.n > 8192) return p.rows <= 1400;
  constexpr int64_t kMostBytes = 12 << 20;  // of x
  return p.rows <= (rows_whole(p) && p.n > 1024 ? 2048 : 1024) && p.rows * p.n * size_of(p.x.type) <= kMostBytes;
}
pydet_status layernorm_backward_apart(const LayerNormBackward &p) {
  return backward_apart("layernorm_backward_apart", p);
}

}  // namespace pydet
