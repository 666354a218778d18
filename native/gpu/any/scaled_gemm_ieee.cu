// Scaled GEMM of fp8 in arithmetic ieee on a GPU's plain fp32 units (NUMERICS.md, "Scaled GEMM"): the CPU's bits, in every
// layout, stride and alignment, with every k_chunk and all kinds of scales.
//
//   s_c: s = fmaf(a[m, k], b[k, n], s), k ascending over chunk c, from +0; one chain over all k may start from out
//   D = fmaf(fl(sa[m, c] sb[c, n]), s_c, D) or fl(D + s_c), c ascending;   then out = round(fl(fl(D sb[n]) sa[m]) + bias)
//
// Of one product, a batch of them, or groups of tokens (ops/scaled_grouped), whose boundaries the device alone knows.
//
// A block of 256 threads makes a tile of 64x64, 4x4 a thread. A stage is 32 k: of each operand a thread reads 8 bytes,
// neighbours in memory, and converts them to fp32 on their way to shared memory, k-major whatever the operand's layout;
// the next stage's are in flight during this one's products. Zero padding would turn a chain of -0 into +0, so the last
// stage is walked to K and no further.

#include <algorithm>

#include "gpu/any/epilogue.h"
#include "gpu/any/quads.h"
#include "gpu/any/scales.h"
#include "gpu/kernels.h"
#include "ops/scaled_grouped/problem.h"

namespace pydet {
namespace {

constexpr int kTile = 64, kThreads = 256;
constexpr int kThreadsN = 16;  // of a block along n
constexpr int kSide = 4;       // elements of out a thread along m and n
constexpr int kStageK = 32;
constexpr int kBytes = kTile * kStageK / kThreads;  // of one operand's stage a thread
constexpr int kPitch = kTile + 4;                   // floats from k to k: keeps 16-byte alignment
static_assert(kBytes == 8, "one load of 8 bytes");
static_assert(kFp8Step % kStageK == 0, "a chunk ends where a stage ends");

// This thread's 8 bytes of every stage of one operand: along k where it is adjacent in memory, else along m or n.
struct Reader {
  const char *data;  // of the tile's first row or column
  Type type;
  int64_t outer_stride, k_stride, k_extent;
  int outer_extent;  // rows or columns from the tile's first on, as many as the tile has at most
  int outer, k;      // of the first byte, in the tile and the stage

  __device__ Reader(const Matrix &matrix, int64_t offset, int64_t of_outer, int64_t of_k, int64_t outer_left,
                    int64_t k_left)
      : data(matrix.data + offset),
        type(matrix.type),
        outer_stride(of_outer),
        k_stride(of_k),
        k_extent(k_left),
        outer_extent(int(outer_left < kTile ? outer_left : kTile)),
        outer(of_k == 1 ? int(threadIdx.x) / (kStageK / kBytes) : int(threadIdx.x) % (kTile / kBytes) * kBytes),
        k(of_k == 1 ? int(threadIdx.x) % (kStageK / kBytes) * kBytes : int(threadIdx.x) / (kTile / kBytes)) {}

  // Those of the stage from k = `start` on, zeros past the extents.
  __device__ uint2 fetch(int64_t start) const {
    const int64_t along_k = k_extent - start - k;
    const int64_t along_outer = outer_extent - outer;
    const int64_t count = along_k <= 0 || along_outer <= 0 ? 0 : k_stride == 1 ? along_k : along_outer;
    const char *from = data + outer * outer_stride + (start + k) * k_stride;
    uint2 bytes = {0, 0};
    if (count >= kBytes && reinterpret_cast<uintptr_t>(from) % kBytes == 0) {
      bytes = *reinterpret_cast<const uint2 *>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kBytes; ++i)
        if (i < count) (i < 4 ? bytes.x : bytes.y) |= uint32_t(uint8_t(from[i])) << i % 4 * 8;
    }
    return bytes;
  }

  __device__ void deposit(float *stage, uint2 bytes) const {
    float *to = stage + k * kPitch + outer;
    const int step = k_stride == 1 ? kPitch : 1;
    with_type<kFp8Types>(type, [&](auto constant) {
#pragma unroll
      for (int i = 0; i < kBytes; ++i)
        to[i * step] = Element<decltype(constant)::value>::to_f32(uint8_t((i < 4 ? bytes.x : bytes.y) >> i % 4 * 8));
    });
  }
};

// A tile: its first row and column of its product, that product's rows, and where its operands begin.
struct Tile {
  int64_t m0, n0, m;
  int64_t at[ScaledGemm::kOperands];
};

// Those that this block makes: every gridDim.x-th of all.
template <class Problem> class Tiles;

template <> class Tiles<ScaledGemm> {
 public:
  __device__ explicit Tiles(const ScaledGemm &g)
      : g_(g), tiles_m_((g.m + kTile - 1) / kTile), tiles_n_((g.n + kTile - 1) / kTile), number_(blockIdx.x) {}
  __device__ bool more() { return number_ < tiles_m_ * tiles_n_ * g_.batch.count; }
  __device__ void advance() { number_ += gridDim.x; }
  __device__ Tile tile() const {
    Tile tile = {number_ % tiles_m_ * kTile, number_ / tiles_m_ % tiles_n_ * kTile, g_.m, {}};
    g_.batch.at(number_ / (tiles_m_ * tiles_n_), tile.at);
    return tile;
  }

 private:
  const ScaledGemm &g_;
  int64_t tiles_m_, tiles_n_, number_;
};

// A group's tiles are adjacent, so a block walks the boundaries once, as far as its last tile.
template <> class Tiles<ScaledGroupedGemm> {
 public:
  __device__ explicit Tiles(const ScaledGroupedGemm &g)
      : g_(g), tiles_n_((g.n + kTile - 1) / kTile), number_(blockIdx.x) {}
  __device__ bool more() {
    while (number_ >= tiles_m_ * tiles_n_) {
      if (group_.index + 1 == g_.groups) return false;
      number_ -= tiles_m_ * tiles_n_;
      group_.next(g_);
      tiles_m_ = (group_.last - group_.first + kTile - 1) / kTile;
    }
    return true;
  }
  __device__ void advance() { number_ += gridDim.x; }
  __device__ Tile tile() const {
    Tile tile = {number_ % tiles_m_ * kTile, number_ / tiles_m_ * kTile, group_.last - group_.first, {}};
    group_offsets(g_, group_, tile.at);
    return tile;
  }

 private:
  const ScaledGroupedGemm &g_;
  GroupWalk group_;
  int64_t tiles_n_, tiles_m_ = 0, number_;  // of this group, and among its tiles
};

template <class Problem>
__global__ void __launch_bounds__(kThreads) scaled_gemm_ieee_kernel(const __grid_constant__ Problem g) {
  __shared__ __align__(16) float a_stages[2][kStageK * kPitch], b_stages[2][kStageK * kPitch];
  const int thread_row = int(threadIdx.x) / kThreadsN, thread_column = int(threadIdx.x) % kThreadsN;
  const int64_t stage_count = (g.k + kStageK - 1) / kStageK;

  for (Tiles<Problem> tiles(g); tiles.more(); tiles.advance()) {
    const Tile tile = tiles.tile();
    const int64_t m0 = tile.m0, n0 = tile.n0;
    const Reader a(g.a, tile.at[g.kA] + m0 * g.a.row_stride, g.a.row_stride, g.a.col_stride, tile.m - m0, g.k);
    const Reader b(g.b, tile.at[g.kB] + n0 * g.b.col_stride, g.b.col_stride, g.b.row_stride, g.n - n0, g.k);
    auto row_of = [&](int i) { return m0 + thread_row * kSide + i; };
    auto column_of = [&](int j) { return n0 + thread_column * kSide + j; };
    // f(i, j, row, column) for every element of out that this thread holds.
    auto each = [&](auto f) {
#pragma unroll
      for (int i = 0; i < kSide; ++i)
#pragma unroll
        for (int j = 0; j < kSide; ++j)
          if (row_of(i) < tile.m && column_of(j) < g.n) f(i, j, row_of(i), column_of(j));
    };
    auto out_at = [&](int64_t row, int64_t column) {
      return tile.at[g.kOut] + row * g.out.row_stride + column * g.out.col_stride;
    };

    float chain[kSide][kSide] = {}, total[kSide][kSide] = {};
    if (g.accumulate)
      each([&](int i, int j, int64_t row, int64_t column) {
        const float start = reinterpret_cast<const float *>(g.out.data)[out_at(row, column)];
        if (g.k_chunk) total[i][j] = start;
        else chain[i][j] = start;
      });

    uint2 a_next = a.fetch(0), b_next = b.fetch(0);
    a.deposit(a_stages[0], a_next);
    b.deposit(b_stages[0], b_next);
    __syncthreads();
    int64_t chunk = 0, chunk_left = g.k_chunk;
    for (int64_t stage = 0; stage < stage_count; ++stage) {
      const bool last = stage + 1 == stage_count;
      if (!last) a_next = a.fetch((stage + 1) * kStageK), b_next = b.fetch((stage + 1) * kStageK);
      const float *a_stage = a_stages[stage % 2], *b_stage = b_stages[stage % 2];
      const int depth = last ? int(g.k - stage * kStageK) : kStageK;
#pragma unroll 4
      for (int k = 0; k < depth; ++k) {
        float a_values[kSide], b_values[kSide];
        load_quads(a_values, a_stage + k * kPitch, thread_row, kThreads / kThreadsN);
        load_quads(b_values, b_stage + k * kPitch, thread_column, kThreadsN);
#pragma unroll
        for (int i = 0; i < kSide; ++i)
#pragma unroll
          for (int j = 0; j < kSide; ++j) chain[i][j] = fmaf(a_values[i], b_values[j], chain[i][j]);
      }
      chunk_left -= kStageK;
      if (g.k_chunk && (chunk_left == 0 || last)) {
        float sa[kSide], sb[kSide];
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
          sa[i] = g.along_k && row_of(i) < tile.m ? scale_at(g.a_scale, tile.at[g.kAScale], row_of(i), chunk) : 1;
          sb[i] = g.along_k && column_of(i) < g.n ? scale_at(g.b_scale, tile.at[g.kBScale], column_of(i), chunk) : 1;
        }
#pragma unroll
        for (int i = 0; i < kSide; ++i)
#pragma unroll
          for (int j = 0; j < kSide; ++j) {
            total[i][j] = fmaf(sa[i] * sb[j], chain[i][j], total[i][j]);  // without scales 1: fl(D + s)
            chain[i][j] = 0;
          }
        ++chunk, chunk_left = g.k_chunk;
      }
      // Two stages: the one filled now was last read before the barrier that ended the fill before.
      if (!last) {
        a.deposit(a_stages[(stage + 1) % 2], a_next);
        b.deposit(b_stages[(stage + 1) % 2], b_next);
        __syncthreads();
      }
    }
    __syncthreads();  // the next tile's first stage overwrites one that may still be read

    each([&](int i, int j, int64_t row, int64_t column) {
      float x = g.k_chunk ? total[i][j] : chain[i][j];
      if (!g.along_k)
        x = x * scale_at(g.b_scale, tile.at[g.kBScale], column, 0) * scale_at(g.a_scale, tile.at[g.kAScale], row, 0);
      if (g.bias.data)
        x +=
            load_f32(g.bias.data, g.bias.type, tile.at[g.kBias] + row * g.bias.row_stride + column * g.bias.col_stride);
      store_rounded(g.out.data, g.out.type, out_at(row, column), x);
    });
  }
}

template <class Problem> pydet_status run(const char *name, const Problem &g, int64_t tiles) {
  constexpr int64_t kMostBlocks = 1 << 20;  // more tiles than that are walked in turns
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  Launch shape = {name, static_cast<gpu_stream>(g.stream), dim3(unsigned(std::min(tiles, kMostBlocks))),
                  dim3(kThreads)};
  return launch(shape, scaled_gemm_ieee_kernel<Problem>, g);
}

}  // namespace

pydet_status scaled_gemm_ieee_64x64(const ScaledGemm &g) {
  return run("scaled_gemm_ieee_64x64", g, divide_up(g.m, kTile) * divide_up(g.n, kTile) * g.batch.count);
}

// Blocks for as many tiles as the groups may have, if those are few: each may end with a tile that is not full.
pydet_status scaled_grouped_gemm_ieee_64x64(const ScaledGroupedGemm &g) {
  constexpr int kBlocksPerMultiprocessor = 16;
  const int64_t most = (divide_up(g.m, kTile) + std::min(g.groups, g.m)) * divide_up(g.n, kTile);
  const int64_t blocks = int64_t(kBlocksPerMultiprocessor) * gpu_multiprocessors(g.device.id);
  return run("scaled_grouped_gemm_ieee_64x64", g, std::min(most, blocks));
}

}  // namespace pydet
