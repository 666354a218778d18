// How scaled_tiles.cu's tiles lie in shared memory, and who fills them: the copy engine, and two warps for the weights.
#pragma once

#include <algorithm>

#include "gpu/nvidia/sm90/rows.h"
#include "gpu/nvidia/sm90/scales.h"

namespace pydet {
namespace {

constexpr int kStageK = kScaleGroup;  // of k in a stage, 128 bytes
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kAhead = 8;                // chunks of one turn of the main loop, at whose end nothing is in flight
constexpr int kWeighers = 64;            // threads
constexpr int kSharedBytes = 227 << 10;  // the most a block may have
// Named barriers: scales that do not vary along k are there, have been read, and the first of those by which the
// warpgroups take turns.
constexpr int kScalesReady = 1, kScalesRead = 2, kTurn = 4;
constexpr int kScalesThreads = kConsumers * kWarpgroup + kWeighers;

struct ScaledProblem {
  Sm90Problem rows;  // where tiles and out lie; its k and chunk count stages
  DeviceScale a_scale, b_scale;
  bool along_k, chain_from_out;  // chain_from_out: the one chain starts from out, not D
};

// How the additions find time beside the tensor cores: the two warpgroups take turns to issue their products, or each
// issues them as it comes, or the next chunk's before it adds the last's, which takes accumulators for both.
enum class Way { in_turn, at_will, ahead };

// `f32`: out may be of it, not of 16-bit types alone. `weights`: chunks may have them; else they are added as they are.
template <int rows_a_warpgroup, int columns, int blocks_m, int blocks_n, Way how, Type a, Type b, bool f32,
          bool weights>
struct Shape {
  static constexpr Type a_type = a, b_type = b;
  static constexpr bool stores_f32 = f32, weighed = weights;
  static constexpr int unrolled = how == Way::at_will ? 4 : 1;  // stages of the main loop
  static constexpr bool turns = how == Way::in_turn, ahead = how == Way::ahead;
  static constexpr int blocks = rows_a_warpgroup / 64;  // of 64 rows
  static constexpr int m = kConsumers * rows_a_warpgroup, n = columns;
  static constexpr int cluster_m = blocks_m, cluster_n = blocks_n, cluster = cluster_m * cluster_n;
  static constexpr int threads = kWarpgroup * (1 + kConsumers), registers = n / 2;
  static constexpr int a_bytes = m * kRowBytes, b_bytes = n * kRowBytes;
  // Else there are registers for the chain of one stage, and for one weight a row, alone.
  static constexpr bool long_chunks = blocks == 1 && !ahead, by_column = long_chunks;
  static constexpr int weight_bytes = (m + (by_column ? n : 0)) * 4;  // of a stage: its rows', its columns'
  static constexpr int staging_bytes = kConsumers * 4 * kPieceBytes, scale_bytes = (n + m) * 4;
  static constexpr int stages =
      std::min(8, (kSharedBytes - staging_bytes - scale_bytes - 256) / (a_bytes + b_bytes + weight_bytes));
  static constexpr int weights_at = stages * (a_bytes + b_bytes), staging_at = weights_at + stages * weight_bytes;
  static constexpr int scales_at = staging_at + staging_bytes, barriers_at = scales_at + scale_bytes;
  static constexpr int shared_bytes = barriers_at + stages * 16;
  static_assert(cluster_m == 1 || cluster_n == 1, "all blocks of a cluster share stages");
  static_assert(stages >= 3 && shared_bytes <= kSharedBytes, "the ring must fit");
};

__device__ __forceinline__ int64_t batch_offset(const DeviceScale &scale, const Tile &tile) {
  int64_t offset = 0;
  for (int d = 0; d < kSm90MaxBatch; ++d) offset += tile.batch[d] * scale.batch_stride[d];
  return offset;
}

// Where a ring stands.
template <class S> struct Cursor {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == S::stages) stage = 0, parity ^= 1;
  }
};
template <class S> __device__ __forceinline__ uint32_t full_barrier(uint32_t shared, int stage) {
  return shared + S::barriers_at + stage * 8;
}
template <class S> __device__ __forceinline__ uint32_t empty_barrier(uint32_t shared, int stage) {
  return shared + S::barriers_at + (S::stages + stage) * 8;
}

// One thread: the operands.
template <class S> __device__ __forceinline__ void produce(const Sm90Problem &p, uint32_t shared, int rank) {
  constexpr int a_share = S::m / S::cluster_n, b_share = S::n / S::cluster_m;
  const int row_rank = rank % S::cluster_m, column_rank = rank / S::cluster_m;
  uint16_t a_mask = 0, b_mask = 0;
  for (int i = 0; i < S::cluster_n; ++i) a_mask |= uint16_t(1 << (row_rank + i * S::cluster_m));
  for (int i = 0; i < S::cluster_m; ++i) b_mask |= uint16_t(1 << (column_rank * S::cluster_m + i));
  Cursor<S> ring;
  for (int index = int(blockIdx.x) / S::cluster; index < p.tiles; index += int(gridDim.x) / S::cluster) {
    const Tile tile = tile_of<S>(p, index, rank);
    Place a_place = {}, b_place = {};
    for (int d = 0; d < kSm90MaxBatch; ++d) {
      a_place.batch[d] = p.a_moves[d] ? tile.batch[d] : 0;
      b_place.batch[d] = p.b_moves[d] ? tile.batch[d] : 0;
    }
    a_place.y = tile.row + column_rank * a_share, b_place.y = tile.column + row_rank * b_share;
    for (int i = 0; i < p.k; ++i) {
      const uint32_t full = full_barrier<S>(shared, ring.stage),
                     stage = shared + ring.stage * (S::a_bytes + S::b_bytes);
      const uint32_t a = stage + column_rank * a_share * kRowBytes,
                     b = stage + S::a_bytes + row_rank * b_share * kRowBytes;
      a_place.x = b_place.x = i * kStageK;
      barrier_wait(empty_barrier<S>(shared, ring.stage), ring.parity ^ 1);
      barrier_expect(full, S::a_bytes + S::b_bytes);
      if (p.batched) {
        load_box<5, (S::cluster_n > 1)>(a, &p.a, full, a_place, a_mask);
        load_box<5, (S::cluster_m > 1)>(b, &p.b, full, b_place, b_mask);
      } else {
        load_box<2, (S::cluster_n > 1)>(a, &p.a, full, a_place, a_mask);
        load_box<2, (S::cluster_m > 1)>(b, &p.b, full, b_place, b_mask);
      }
      ring.next();
    }
  }
  // The block may end when every arrival that the other owes it has come.
  for (int i = 0; i < S::stages; ++i) {
    barrier_wait(empty_barrier<S>(shared, ring.stage), ring.parity ^ 1);
    ring.next();
  }
}

__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// kWeighers threads: the scales of each tile, its columns' and then its rows', where they do not vary along k.
template <class S>
__device__ __forceinline__ void bring_scales(const ScaledProblem &problem, uint32_t shared, int rank, int thread) {
  constexpr int of_columns = (S::n + kWeighers - 1) / kWeighers, of_rows = S::m / kWeighers;
  const Sm90Problem &p = problem.rows;
  const DeviceScale &a_scale = problem.a_scale, &b_scale = problem.b_scale;
  const uint32_t to = shared + S::scales_at + thread * 4;
  const int first = int(blockIdx.x) / S::cluster;
  for (int index = first; index < p.tiles; index += int(gridDim.x) / S::cluster) {
    const Tile tile = tile_of<S>(p, index, rank);
    int64_t column_at[of_columns], row_at[of_rows];
    float column[of_columns], row[of_rows];
#pragma unroll
    for (int j = 0; j < of_columns; ++j)
      column_at[j] = batch_offset(b_scale, tile) + min(tile.column + thread + j * kWeighers, p.n - 1) * b_scale.stride;
#pragma unroll
    for (int j = 0; j < of_rows; ++j)
      row_at[j] = batch_offset(a_scale, tile) + min(tile.row + thread + j * kWeighers, p.m - 1) * a_scale.stride;
    load_scales(b_scale, column_at, column);
    load_scales(a_scale, row_at, row);
    if (index != first) named_sync(kScalesRead, kScalesThreads);
#pragma unroll
    for (int j = 0; j < of_columns; ++j)
      if (thread + j * kWeighers < S::n) store_word(to + j * kWeighers * 4, column[j]);
#pragma unroll
    for (int j = 0; j < of_rows; ++j) store_word(to + (S::n + j * kWeighers) * 4, row[j]);
    named_arrive(kScalesReady, kScalesThreads);
  }
}

// kWeighers threads: the weights of each stage, where scales vary along k. By column they are a's scales alone, and b's
// stand behind them.
template <class S>
__device__ __forceinline__ void weigh(const ScaledProblem &problem, uint32_t shared, int rank, int thread) {
  constexpr int each = S::m / kWeighers, each_column = S::n / kWeighers;
  const Sm90Problem &p = problem.rows;
  const DeviceScale &a_scale = problem.a_scale, &b_scale = problem.b_scale;
  const bool by_column = S::by_column && by_columns(b_scale);
  Cursor<S> ring;
  for (int index = int(blockIdx.x) / S::cluster; index < p.tiles; index += int(gridDim.x) / S::cluster) {
    const Tile tile = tile_of<S>(p, index, rank);
    int64_t a_at[each], b_at[1], column_at[each_column];
#pragma unroll
    for (int j = 0; j < each; ++j)
      a_at[j] = batch_offset(a_scale, tile) + min(tile.row + thread + j * kWeighers, p.m - 1) * a_scale.stride;
    b_at[0] =
        batch_offset(b_scale, tile) + (b_scale.blocks ? min(tile.column, p.n - 1) / kScaleGroup * b_scale.stride : 0);
#pragma unroll
    for (int j = 0; j < each_column; ++j)
      column_at[j] = b_at[0] + min(tile.column + thread + j * kWeighers, p.n - 1) * b_scale.stride;
    // Of stages whose scales are on their way: one alone took longer from the L2 than a stage of 128 rows multiplies.
    constexpr int ahead = S::by_column ? 1 : 8 / each;
    float a[ahead][each], b[ahead][1], column[each_column];
    auto load = [&](int slot) {
      load_scales(a_scale, a_at, a[slot]);
      if (by_column) load_scales(b_scale, column_at, column);
      else load_scales(b_scale, b_at, b[slot]);
#pragma unroll
      for (int j = 0; j < each; ++j) a_at[j] += a_scale.chunk_stride;
      b_at[0] += b_scale.chunk_stride;
#pragma unroll
      for (int j = 0; j < each_column; ++j) column_at[j] += b_scale.chunk_stride;
    };
#pragma unroll
    for (int j = 0; j < ahead; ++j)
      if (j < p.k) load(j);
    for (int first = 0; first < p.k; first += ahead) {
#pragma unroll
      for (int slot = 0; slot < ahead; ++slot) {
        if (first + slot >= p.k) break;
        const uint32_t to = shared + S::weights_at + ring.stage * S::weight_bytes + thread * 4;
        barrier_wait(empty_barrier<S>(shared, ring.stage), ring.parity ^ 1);
        if (by_column) {
#pragma unroll
          for (int j = 0; j < each; ++j) store_word(to + j * kWeighers * 4, a[slot][j]);
#pragma unroll
          for (int j = 0; j < each_column; ++j) store_word(to + (S::m + j * kWeighers) * 4, column[j]);
        } else {
#pragma unroll
          for (int j = 0; j < each; ++j) store_word(to + j * kWeighers * 4, a[slot][j] * b[slot][0]);
        }
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(full_barrier<S>(shared, ring.stage));
        if (first + slot + ahead < p.k) load(slot);
        ring.next();
      }
    }
  }
}

}  // namespace
}  // namespace pydet
