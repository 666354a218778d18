// How scaled_tiles.cu's tiles lie in shared memory, and who fills them: the copy engine, and two warps for the weights.
// These lie beside each stage, or in a ring of their own, four chunks a round, so that no product waits for them: the
// tiles that are a chunk ahead are up to a fifth faster so, and those at will, whose stages take longer, slower.
#pragma once

#include <algorithm>

#include "gpu/nvidia/sm90/rows.h"
#include "gpu/nvidia/sm90/scales.h"

namespace pydet {
namespace {

constexpr int kStageK = kScaleGroup;  // of k in a stage, 128 bytes
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kAhead = 8;                     // chunks of one turn of the main loop, at whose end nothing is in flight
constexpr int kWeighers = 64;                 // threads
constexpr int kRound = 4;                     // chunks whose weights come together
constexpr int kRounds = 3;                    // of weights in shared memory
constexpr int kPieceColumns = kRowBytes / 2;  // of a piece of out, of 16 bits
constexpr int kSharedBytes = 227 << 10;       // the most a block may have
// Named barriers: scales that do not vary along k are there, have been read, and the first of those by which the
// warpgroups take turns.
constexpr int kScalesReady = 1, kScalesRead = 2, kTurn = 4;
constexpr int kScalesThreads = kConsumers * kWarpgroup + kWeighers;

struct ScaledProblem {
  Sm90Problem rows;     // where tiles and out lie; its k and chunk count stages
  CUtensorMap out_map;  // where the copy engine stores it
  DeviceScale a_scale, b_scale;
  bool a_by_fours, b_by_fours;   // four scales of a row (a column), from a multiple of four on, are 16 aligned bytes
  bool along_k, chain_from_out;  // chain_from_out: the one chain starts from out, not D
  bool out_mapped;
};

// How the additions find time beside the tensor cores: the two warpgroups take turns to issue their products, or each
// issues them as it comes, or the next chunk's before it adds the last's, which takes accumulators for both.
enum class Way { in_turn, at_will, ahead };

// `f32`: out may be of it, not of 16-bit types alone. `weights`: chunks may have them; else they are added as they are.
// `boxes`: the copy engine may store results of 16 bits.
template <int rows_a_warpgroup, int columns, int blocks_m, int blocks_n, Way how, Type a, Type b, bool f32,
          bool weights, bool boxes = true>
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
  static constexpr bool long_chunks = turns, by_column = long_chunks;
  // Tiles of some widths lie in two blocks of scales, of which every so many columns lie in one.
  static constexpr int of_one = n % kScaleGroup % 64 == 0 ? 64 : n % 32 == 0 ? 32 : 16;
  static constexpr bool crosses = kScaleGroup % n != 0;
  // Weights come by rounds of four chunks in a ring of their own, or each chunk's beside its stage.
  static constexpr bool by_rounds = ahead;
  static constexpr int weight_bytes = (m + (by_column ? n : crosses ? m : 0)) * 4;  // of a chunk, its rows' first
  static constexpr int round_bytes = kRound * weight_bytes;
  // Accumulators of the multiplying threads leave those that weigh more registers or fewer.
  static constexpr bool full = registers * (blocks + 1 + ahead) >= 192;
  static constexpr int weigher_registers = full ? 56 : 72, consumer_registers = full ? 224 : 216;
  // A warp's pieces of out: of 16 bits all of a tile's, which the copy engine stores while the next tile's products
  // begin, or one, which the warp stores.
  static constexpr bool stores_boxes = boxes && !turns && (blocks == 1 || n != 128 || !stores_f32);
  static constexpr int block_pieces = stores_boxes ? (n + kPieceColumns - 1) / kPieceColumns : 0;
  static constexpr int warp_pieces = std::max(1, block_pieces *blocks);
  static constexpr int staging_bytes = kConsumers * 4 * warp_pieces * kPieceBytes, scale_bytes = (n + m) * 4;
  static constexpr int stages =
      std::min(8, (kSharedBytes - staging_bytes - scale_bytes - 256 - (by_rounds ? kRounds * round_bytes : 0)) /
                      (a_bytes + b_bytes + (by_rounds ? 0 : weight_bytes)));
  static constexpr int all_weights_bytes = by_rounds ? kRounds * round_bytes : stages * weight_bytes;
  static constexpr int weights_at = stages * (a_bytes + b_bytes), staging_at = weights_at + all_weights_bytes;
  static constexpr int scales_at = staging_at + staging_bytes, barriers_at = scales_at + scale_bytes;
  static constexpr int shared_bytes = barriers_at + (stages + kRounds) * 16;
  static_assert(staging_at % 1024 == 0, "the copy engine's swizzle goes by addresses");
  static_assert(cluster_m == 1 || cluster_n == 1, "all blocks of a cluster share stages");
  static_assert(stages >= 3 && shared_bytes <= kSharedBytes, "the ring must fit");
};

__device__ __forceinline__ int64_t batch_offset(const DeviceScale &scale, const Tile &tile) {
  int64_t offset = 0;
  for (int d = 0; d < kSm90MaxBatch; ++d) offset += tile.batch[d] * scale.batch_stride[d];
  return offset;
}

// Where a ring stands.
template <int stages> struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};
template <class S> using Cursor = Ring<S::stages>;
using Round = Ring<kRounds>;
template <class S> __device__ __forceinline__ uint32_t full_barrier(uint32_t shared, int stage) {
  return shared + S::barriers_at + stage * 8;
}
template <class S> __device__ __forceinline__ uint32_t empty_barrier(uint32_t shared, int stage) {
  return shared + S::barriers_at + (S::stages + stage) * 8;
}

template <class S> __device__ __forceinline__ uint32_t weighed_barrier(uint32_t shared, int round) {
  return shared + S::barriers_at + (2 * S::stages + round) * 8;
}
template <class S> __device__ __forceinline__ uint32_t read_barrier(uint32_t shared, int round) {
  return shared + S::barriers_at + (2 * S::stages + kRounds + round) * 8;
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

// Where b's scales of a tile begin: of the block of them that it begins in, or of the `next`.
__device__ __forceinline__ int64_t b_offset_of(const DeviceScale &scale, const Sm90Problem &p, const Tile &tile,
                                               int next) {
  if (!scale.blocks) return batch_offset(scale, tile);
  const int last = (p.n - 1) / kScaleGroup, block = min(tile.column, p.n - 1) / kScaleGroup;
  return batch_offset(scale, tile) + min(block + next, last) * scale.stride;
}

// The scales of four chunks from `first` on, of `chunks`; past these the last one's.
__device__ __forceinline__ void load_round(const DeviceScale &scale, bool by_fours, int64_t at, int first, int chunks,
                                           float (&to)[kRound]) {
  static_assert(kRound == 4, "16 bytes");
  if (by_fours && first + kRound <= chunks) {
    const float4 four = __ldg(reinterpret_cast<const float4 *>(scale.data + (at + first) * 4));
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    return;
  }
  int64_t each[kRound] = {at + first * scale.chunk_stride};
#pragma unroll
  for (int i = 1; i < kRound; ++i) each[i] = each[i - 1] + (first + i < chunks ? scale.chunk_stride : 0);
  load_scales(scale, each, to);
}

// kWeighers threads: the weights of each chunk, where scales vary along k, from those of four chunks loaded at once. What
// is written past the end of k is not read.
template <class S>
__device__ __forceinline__ void weigh_fours(const ScaledProblem &problem, uint32_t shared, int rank, int thread) {
  constexpr int each = S::m / kWeighers;
  const Sm90Problem &p = problem.rows;
  const DeviceScale &a_scale = problem.a_scale, &b_scale = problem.b_scale;
  Cursor<S> ring;
  Round round;
  for (int index = int(blockIdx.x) / S::cluster; index < p.tiles; index += int(gridDim.x) / S::cluster) {
    const Tile tile = tile_of<S>(p, index, rank);
    const int64_t a_offset = batch_offset(a_scale, tile);
    const int64_t b_offset = b_offset_of(b_scale, p, tile, 0), b_next = b_offset_of(b_scale, p, tile, 1);
    float a[each][kRound], b[1 + S::crosses][kRound];
    auto load = [&](int first) {
#pragma unroll
      for (int j = 0; j < each; ++j) {
        const int64_t row = min(tile.row + thread + j * kWeighers, p.m - 1);
        load_round(a_scale, !S::by_rounds || problem.a_by_fours, a_offset + row * a_scale.stride, first, p.k, a[j]);
      }
      load_round(b_scale, problem.b_by_fours, b_offset, first, p.k, b[0]);
      if (S::crosses) load_round(b_scale, problem.b_by_fours, b_next, first, p.k, b[S::crosses]);
    };
    if (p.k) load(0);
    for (int first = 0; first < p.k; first += kRound) {
#pragma unroll
      for (int i = 0; i < kRound; ++i) {
        if (!S::by_rounds && first + i >= p.k) break;
        if (!S::by_rounds) barrier_wait(empty_barrier<S>(shared, ring.stage), ring.parity ^ 1);
        else if (i == 0) barrier_wait(read_barrier<S>(shared, round.stage), round.parity ^ 1);
        const uint32_t to = shared + S::weights_at + thread * 4 +
                            (S::by_rounds ? round.stage * kRound + i : ring.stage) * S::weight_bytes;
#pragma unroll
        for (int j = 0; j < each; ++j) {
          store_word(to + j * kWeighers * 4, a[j][i] * b[0][i]);
          if (S::crosses) store_word(to + (S::m + j * kWeighers) * 4, a[j][i] * b[S::crosses][i]);
        }
        if (S::by_rounds && i + 1 < kRound) continue;
        __syncwarp();
        if (thread % 32 == 0)
          barrier_arrive(S::by_rounds ? weighed_barrier<S>(shared, round.stage) : full_barrier<S>(shared, ring.stage));
        ring.next();
      }
      round.next();
      if (first + kRound < p.k) load(first + kRound);
    }
  }
}

// The same beside each stage, where four of a's scales are not adjacent: those of two chunks are on their way, and each
// that is written makes room for the next. By column the weights are a's scales alone, and b's stand behind them.
template <class S>
__device__ __forceinline__ void weigh_chunks(const ScaledProblem &problem, uint32_t shared, int rank, int thread) {
  constexpr int each = S::m / kWeighers, each_column = S::by_column ? S::n / kWeighers : 1, on_their_way = 2;
  const Sm90Problem &p = problem.rows;
  const DeviceScale &a_scale = problem.a_scale, &b_scale = problem.b_scale;
  const bool by_column = S::by_column && by_columns(b_scale);
  Cursor<S> ring;
  for (int index = int(blockIdx.x) / S::cluster; index < p.tiles; index += int(gridDim.x) / S::cluster) {
    const Tile tile = tile_of<S>(p, index, rank);
    int64_t a_at[each], b_at[1 + S::crosses], column_at[each_column];
#pragma unroll
    for (int j = 0; j < each; ++j)
      a_at[j] = batch_offset(a_scale, tile) + min(tile.row + thread + j * kWeighers, p.m - 1) * a_scale.stride;
#pragma unroll
    for (int j = 0; j < 1 + S::crosses; ++j) b_at[j] = b_offset_of(b_scale, p, tile, j);
#pragma unroll
    for (int j = 0; j < each_column; ++j)
      column_at[j] = b_at[0] + min(tile.column + thread + j * kWeighers, p.n - 1) * b_scale.stride;
    float a[on_their_way][each], b[on_their_way][1 + S::crosses], column[on_their_way][each_column];
    auto load = [&](int i) {
      auto next = [](const DeviceScale &scale, auto &at, auto &to) {
        load_scales(scale, at, to);
        for (int64_t &x : at) x += scale.chunk_stride;
      };
      next(a_scale, a_at, a[i]);
      if (!by_column) next(b_scale, b_at, b[i]);
      else next(b_scale, column_at, column[i]);
    };
#pragma unroll
    for (int i = 0; i < on_their_way; ++i)
      if (i < p.k) load(i);
    for (int first = 0; first < p.k; first += on_their_way) {
#pragma unroll
      for (int i = 0; i < on_their_way; ++i) {
        if (first + i >= p.k) break;
        barrier_wait(empty_barrier<S>(shared, ring.stage), ring.parity ^ 1);
        const uint32_t to = shared + S::weights_at + thread * 4 + ring.stage * S::weight_bytes;
#pragma unroll
        for (int j = 0; j < each; ++j) {
          store_word(to + j * kWeighers * 4, by_column ? a[i][j] : a[i][j] * b[i][0]);
          if (S::crosses) store_word(to + (S::m + j * kWeighers) * 4, a[i][j] * b[i][S::crosses]);
        }
#pragma unroll
        for (int j = 0; j < each_column; ++j)
          if (by_column) store_word(to + (S::m + j * kWeighers) * 4, column[i][j]);
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(full_barrier<S>(shared, ring.stage));
        ring.next();
        if (first + i + on_their_way < p.k) load(i);
      }
    }
  }
}

}  // namespace
}  // namespace pydet
