// How scaled_tiles.cu's tiles lie in shared memory, and who fills them: the copy engine, and a warp or two for the
// scales, which copy them without passing registers, as many stages ahead as operands are. Through registers those of
// two or four chunks were on their way, and tiles of few rows waited for them: 512x2048x7168 took 20.8 us, now 17.7.
#pragma once

#include <algorithm>

#include "gpu/nvidia/sm90/fp8_tiles.h"
#include "gpu/nvidia/sm90/pipe/operand.h"
#include "gpu/nvidia/sm90/rows.h"
#include "gpu/nvidia/sm90/scales.h"

namespace pydet {
namespace {

constexpr int kStageK = kScaleGroup;          // of k in a stage, 128 bytes
constexpr int kAhead = 8;                     // chunks of one turn of the main loop, at whose end nothing is in flight
constexpr int kRound = 4;                     // chunks whose rows' scales lie together
constexpr int kPieceColumns = kRowBytes / 2;  // of a piece of out, of 16 bits
// Named barriers: scales that do not vary along k are there, have been read, and the first of those by which the
// warpgroups take turns.
constexpr int kScalesReady = 1, kScalesRead = 2, kTurn = 4;

// How scales that vary along k come to shared memory: through registers, or copied, which both must be of fp32 for; of
// a's each by itself, or four at once where these are 16 aligned bytes: a row's of a round, of which all are whole, or
// four rows' of a chunk.
enum class Bring { by_registers, by_words, by_rounds, by_fours };

struct ScaledProblem {
  Sm90Problem rows;     // where tiles and out lie; its k and chunk count stages
  CUtensorMap out_map;  // where the copy engine stores it
  // Boxes of as many rows of a, and columns of b, as are left where a block's share of a tile passes their end: the
  // copy engine would fill the rest with zeros, which takes longer than to bring it.
  CUtensorMap a_rest, b_rest;
  DeviceScale a_scale, b_scale;
  Bring bring;
  bool along_k, chain_from_out;  // chain_from_out: the one chain starts from out, not D
  bool out_mapped;
};

// A kernel of `Its::tile`, with Its::cluster_n blocks side by side. `f32`: out may be of it, not of 16-bit types alone.
// `weights`: chunks may have them; else they are added as they are. `boxes`: the copy engine may store 16-bit results.
template <class Its, Type a, Type b, bool f32, bool weights, bool boxes = true> struct Shape {
  static constexpr Fp8Tile tile = Its::tile;
  static constexpr Way how = tile.way;
  static constexpr int m = tile.m, n = tile.n, consumers = tile.warpgroups();
  static constexpr int cluster_m = tile.cluster_m, cluster_n = Its::cluster_n, cluster = cluster_m * cluster_n;
  static constexpr int bringing_threads = m > 128 ? 64 : 32;  // threads that bring scales
  static constexpr int scales_threads = consumers * kWarpgroup + bringing_threads;
  static constexpr Type a_type = a, b_type = b;
  static constexpr bool stores_f32 = f32, weighed = weights;
  // Products of e4m3 without weights have kernels of their own.
  static constexpr bool always_along_k = weights && !f32 && a == Type::e4m3 && b == Type::e4m3;
  static constexpr int unrolled = how == Way::at_will ? 4 : 1;  // stages of the main loop
  static constexpr bool turns = how == Way::in_turn, ahead = how == Way::ahead;
  static constexpr int blocks = m / 64 / consumers;  // of 64 rows
  static constexpr int threads = kWarpgroup * (1 + consumers), registers = n / 2;
  static constexpr int a_bytes = m * kRowBytes, b_bytes = n * kRowBytes, stage_bytes = a_bytes + b_bytes;
  // Chunks of more than one stage, and scales of single columns: kernels in which warpgroups take turns have the
  // registers for them, the others do not.
  static constexpr bool long_chunks = turns, by_column = long_chunks;
  // b has a scale for each block of 128 columns. A tile whose width does not divide 128 may lie in two of them; so many
  // columns, from a multiple of them on, are always of one.
  static constexpr int of_one = n % kScaleGroup % 64 == 0 ? 64 : n % 32 == 0 ? 32 : 16;
  static constexpr bool crosses = kScaleGroup % n != 0;
  // Scales along k: of a round's rows, and of a stage's columns, or of the one or two blocks that it lies in. There are
  // as many rounds as stages, so that a round of a single chunk is not written before it has been read.
  static constexpr int round_bytes = weighed ? m * kRound * 4 : 0, chunk_bytes = by_column ? n * 4 : 8;
  // The multiplying threads get the registers that their accumulators need, those that bring get what is left.
  static constexpr bool full = registers * (blocks + 1 + ahead) >= 192;
  static constexpr int producer_registers = full ? 56 : 72, consumer_registers = full ? 224 : 216;
  // A warp's pieces of out: of 16 bits all of a tile's, which the copy engine stores while the next tile's products
  // begin, or one, which the warp stores.
  static constexpr bool stores_boxes = boxes && !turns && (blocks == 1 || n != 128 || !stores_f32);
  static constexpr int block_pieces = stores_boxes ? (n + kPieceColumns - 1) / kPieceColumns : 0;
  static constexpr int warp_pieces = std::max(1, block_pieces *blocks);
  static constexpr int staging_bytes = consumers * 4 * warp_pieces * kPieceBytes, scale_bytes = (n + m) * 4;
  static constexpr int stages =
      std::min(consumers == 1 ? 12 : 8, (kMostSharedBytes - staging_bytes - scale_bytes - 16 * 8 - 1024) /
                                            (stage_bytes + round_bytes + chunk_bytes));
  static constexpr int rounds_at = stages * stage_bytes, rounds_bytes = stages * round_bytes;
  static constexpr int staging_at = (rounds_at + rounds_bytes + 1023) / 1024 * 1024;
  static constexpr int scales_at = staging_at + staging_bytes, chunks_at = scales_at + scale_bytes;
  static constexpr int barriers_at = chunks_at + stages * chunk_bytes;
  static constexpr int shared_bytes = barriers_at + stages * 16;
  static_assert(staging_at % 1024 == 0, "the copy engine's swizzle goes by addresses");
  static_assert(cluster_m == 1 || cluster_n == 1, "all blocks of a cluster share stages");
  static_assert(stages >= 3 && shared_bytes <= kMostSharedBytes, "the ring must fit");
};

__device__ __forceinline__ int64_t batch_offset(const DeviceScale &scale, const Tile &tile) {
  int64_t offset = 0;
  for (int d = 0; d < kSm90MaxBatch; ++d) offset += tile.batch[d] * scale.batch_stride[d];
  return offset;
}

// Where scales along k lie in shared memory: of the rows of chunk `i` of a round, and of a stage's columns or blocks of
// them. A row's of a round are adjacent where they are so in global memory, else a chunk's.
struct RoundPitch {
  int row, chunk;  // bytes
};
template <class S> __device__ __forceinline__ RoundPitch round_pitch(const ScaledProblem &problem) {
  return problem.bring == Bring::by_rounds ? RoundPitch{kRound * 4, 4} : RoundPitch{4, S::m * 4};
}
template <class S> __device__ __forceinline__ uint32_t row_scales(uint32_t shared, int round) {
  return shared + S::rounds_at + round * S::round_bytes;
}
template <class S> __device__ __forceinline__ uint32_t column_scales(uint32_t shared, int stage) {
  return shared + S::chunks_at + stage * S::chunk_bytes;
}

// One thread each: a, or b. Where one brought both, tiles of short stages waited for it. What a tile has past the end
// of an operand stays what it was in shared memory, and is not stored.
template <class S, bool of_b>
__device__ __forceinline__ void produce(const ScaledProblem &problem, uint32_t shared, int rank) {
  const Sm90Problem &p = problem.rows;
  // The blocks of a cluster that lie beside each other share a; those that lie under each other, b.
  constexpr int sharing = of_b ? S::cluster_m : S::cluster_n, extent = of_b ? S::n : S::m, share = extent / sharing;
  const int row_rank = rank % S::cluster_m, column_rank = rank / S::cluster_m, part = of_b ? row_rank : column_rank;
  uint16_t mask = 0;
  for (int i = 0; i < sharing; ++i)
    mask |= uint16_t(1 << (of_b ? column_rank * S::cluster_m + i : row_rank + i * S::cluster_m));
  Cursor<S::stages> ring;
  for (int index = int(blockIdx.x) / S::cluster; index < p.tiles; index += int(gridDim.x) / S::cluster) {
    const Tile tile = tile_of<S>(p, index, rank);
    const int end = of_b ? p.n : p.m, first = of_b ? tile.column : tile.row;
    Place place = {};
    for (int d = 0; d < kSm90MaxBatch; ++d) place.batch[d] = (of_b ? p.b_moves : p.a_moves)[d] ? tile.batch[d] : 0;
    place.y = first + part * share;
    const int bytes = max(0, min(extent, end - first)) * kRowBytes, inside = end - place.y;
    const CUtensorMap *map = of_b ? (inside < share ? &problem.b_rest : &p.b) : inside < share ? &problem.a_rest : &p.a;
    auto each_stage = [&](auto load) {
      for (int i = 0; i < p.k; ++i, ring.next()) {
        place.x = i * kStageK;
        const uint32_t full = Ring<S>::full_of(shared, ring.stage);
        barrier_wait(Ring<S>::empty_of(shared, ring.stage), ring.parity ^ 1);
        barrier_expect(full, bytes);
        load(shared + ring.stage * S::stage_bytes + (of_b ? S::a_bytes : 0) + part * share * kRowBytes, full);
      }
    };
    if (inside <= 0) each_stage([](uint32_t, uint32_t) {});
    else if (p.batched)
      each_stage([&](uint32_t to, uint32_t full) { load_box<5, (sharing > 1)>(to, map, full, place, mask); });
    else each_stage([&](uint32_t to, uint32_t full) { load_box<2, (sharing > 1)>(to, map, full, place, mask); });
  }
  // The block may end when every arrival that the other owes it has come.
  for (int i = 0; i < S::stages; ++i) {
    barrier_wait(Ring<S>::empty_of(shared, ring.stage), ring.parity ^ 1);
    ring.next();
  }
}

__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The bringing threads: the scales of each tile, its columns' and then its rows', where they do not vary along k.
template <class S>
__device__ __forceinline__ void bring_scales(const ScaledProblem &problem, uint32_t shared, int rank, int thread) {
  constexpr int of_columns = (S::n + S::bringing_threads - 1) / S::bringing_threads,
                of_rows = S::m / S::bringing_threads;
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
      column_at[j] =
          batch_offset(b_scale, tile) + min(tile.column + thread + j * S::bringing_threads, p.n - 1) * b_scale.stride;
#pragma unroll
    for (int j = 0; j < of_rows; ++j)
      row_at[j] =
          batch_offset(a_scale, tile) + min(tile.row + thread + j * S::bringing_threads, p.m - 1) * a_scale.stride;
    load_scales(b_scale, column_at, column);
    load_scales(a_scale, row_at, row);
    if (index != first) named_sync(kScalesRead, S::scales_threads);
#pragma unroll
    for (int j = 0; j < of_columns; ++j)
      if (thread + j * S::bringing_threads < S::n) store_word(to + j * S::bringing_threads * 4, column[j]);
#pragma unroll
    for (int j = 0; j < of_rows; ++j) store_word(to + (S::n + j * S::bringing_threads) * 4, row[j]);
    named_arrive(kScalesReady, S::scales_threads);
  }
}

// Where b's scales of a tile begin: of the block of them that it begins in, or of the `next`.
__device__ __forceinline__ int64_t b_offset_of(const DeviceScale &scale, const Sm90Problem &p, const Tile &tile,
                                               int next) {
  if (!scale.blocks) return batch_offset(scale, tile);
  const int last = (p.n - 1) / kScaleGroup, block = min(tile.column, p.n - 1) / kScaleGroup;
  return batch_offset(scale, tile) + min(block + next, last) * scale.stride;
}

// What a thread of those that bring scales has to do for a tile: rows (by fours, where those are copied at once), and
// columns or, by the first threads, one or two blocks of them. Rows that a does not have are not read: all blocks would
// ask one place of the L2 for the last one's, which doubled the time of 64 rows.
template <class S> struct Brought {
  static constexpr int each = S::m / S::bringing_threads, each_column = S::by_column ? S::n / S::bringing_threads : 1;
  const ScaledProblem &problem;
  int thread;
  int rows, columns;          // of the tile, that a and b have scales for
  int64_t row_at, column_at;  // the thread's first in global memory, in elements

  __device__ __forceinline__ bool by_column() const { return S::by_column && by_columns(problem.b_scale); }
  __device__ __forceinline__ void start(const Tile &tile) {
    const Sm90Problem &p = problem.rows;
    const DeviceScale &a_scale = problem.a_scale, &b_scale = problem.b_scale;
    rows = min(S::m, p.m - tile.row);
    row_at =
        batch_offset(a_scale, tile) + (tile.row + thread * (problem.bring == Bring::by_fours ? 4 : 1)) * a_scale.stride;
    columns = by_column() ? min(S::n, p.n - tile.column) : 1 + S::crosses;
    column_at = b_offset_of(b_scale, p, tile, by_column() ? 0 : min(thread, 1)) +
                (by_column() ? (tile.column + thread) * b_scale.stride : 0);
  }
  // Of chunk `i`, to where its rows' and its columns' scales lie.
  __device__ __forceinline__ void copy(int i, uint32_t of_rows, uint32_t of_columns) {
    const DeviceScale &a_scale = problem.a_scale, &b_scale = problem.b_scale;
    const char *from = a_scale.data + row_at * 4;
    row_at += a_scale.chunk_stride;
    if (problem.bring == Bring::by_fours) {
#pragma unroll
      for (int j = 0; j < (each + 3) / 4; ++j, from += S::bringing_threads * 16)
        if ((thread + j * S::bringing_threads) * 4 < rows)
          copy_four_words(of_rows + (thread + j * S::bringing_threads) * 16, from);
    } else if (problem.bring == Bring::by_words || i % kRound == 0) {
#pragma unroll
      for (int j = 0; j < each; ++j, from += S::bringing_threads * a_scale.stride * 4) {
        const int row = thread + j * S::bringing_threads;
        if (row >= rows) break;
        if (problem.bring == Bring::by_rounds) copy_four_words(of_rows + row * (kRound * 4), from);
        else copy_word(of_rows + row * 4, from);
      }
    }
    from = b_scale.data + column_at * 4;
    column_at += b_scale.chunk_stride;
#pragma unroll
    for (int j = 0; j < each_column; ++j, from += S::bringing_threads * b_scale.stride * 4)
      if (thread + j * S::bringing_threads < columns)
        copy_word(of_columns + (thread + j * S::bringing_threads) * 4, from);
  }
  // The next chunk's, those that cannot be copied, into registers. Past the last row or column the last one's again.
  __device__ __forceinline__ void load(float (&a)[each], float (&b)[each_column]) {
    int64_t a_from[each], b_from[each_column];
#pragma unroll
    for (int j = 0; j < each; ++j)
      a_from[j] = row_at + (min(thread + j * S::bringing_threads, rows - 1) - thread) * problem.a_scale.stride;
#pragma unroll
    for (int j = 0; j < each_column; ++j)
      b_from[j] =
          column_at +
          (by_column() ? (min(thread + j * S::bringing_threads, columns - 1) - thread) * problem.b_scale.stride : 0);
    load_scales(problem.a_scale, a_from, a), load_scales(problem.b_scale, b_from, b);
    row_at += problem.a_scale.chunk_stride, column_at += problem.b_scale.chunk_stride;
  }
  __device__ __forceinline__ void store(const float (&a)[each], const float (&b)[each_column], uint32_t of_rows,
                                        uint32_t of_columns) const {
#pragma unroll
    for (int j = 0; j < each; ++j) store_word(of_rows + (thread + j * S::bringing_threads) * 4, a[j]);
#pragma unroll
    for (int j = 0; j < each_column; ++j)
      if (thread + j * S::bringing_threads < columns)
        store_word(of_columns + (thread + j * S::bringing_threads) * 4, b[j]);
  }
};

// The bringing threads: the scales of each chunk, where they vary along k.
template <class S>
__device__ __forceinline__ void bring_chunks(const ScaledProblem &problem, uint32_t shared, int rank, int thread) {
  const Sm90Problem &p = problem.rows;
  const int pitch = round_pitch<S>(problem).chunk;
  Cursor<S::stages> ring, round;
  Brought<S> scales = {problem, thread};
  for (int index = int(blockIdx.x) / S::cluster; index < p.tiles; index += int(gridDim.x) / S::cluster) {
    scales.start(tile_of<S>(p, index, rank));
    // bring(where the rows' of chunk `i` go, where its columns' go, the barrier to be told) when its stage is free.
    auto into_stage = [&](int i, auto bring) {
      barrier_wait(Ring<S>::empty_of(shared, ring.stage), ring.parity ^ 1);
      bring(row_scales<S>(shared, round.stage) + i % kRound * pitch, column_scales<S>(shared, ring.stage),
            Ring<S>::full_of(shared, ring.stage));
      ring.next();
      if (i % kRound == kRound - 1) round.next();
    };
    if (problem.bring != Bring::by_registers) {
#pragma unroll 1
      for (int i = 0; i < p.k; ++i)
        into_stage(i, [&](uint32_t of_rows, uint32_t of_columns, uint32_t full) {
          scales.copy(i, of_rows, of_columns);
          arrive_with_words(full);
        });
    } else {
      constexpr int at_once = S::by_column ? 1 : 2;  // chunks that are loaded before the first of them is stored
#pragma unroll 1
      for (int i = 0; i < p.k; i += at_once) {
        float a[at_once][Brought<S>::each], b[at_once][Brought<S>::each_column];
#pragma unroll
        for (int j = 0; j < at_once; ++j)
          if (i + j < p.k) scales.load(a[j], b[j]);
#pragma unroll
        for (int j = 0; j < at_once; ++j)
          if (i + j < p.k)
            into_stage(i + j, [&](uint32_t of_rows, uint32_t of_columns, uint32_t full) {
              scales.store(a[j], b[j], of_rows, of_columns);
              barrier_arrive(full);
            });
      }
    }
    if (p.k % kRound) round.next();
  }
}

}  // namespace
}  // namespace pydet
