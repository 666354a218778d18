// What the kernels of attention's gradients share: which tile a block has, where a row's numbers lie, and its results.
#pragma once

#include "gpu/nvidia/sm90/attention/backward.h"
#include "gpu/nvidia/sm90/attention/jobs.h"
#include "gpu/nvidia/sm90/pipe/out.h"
#include "gpu/nvidia/sm90/pipe/wgmma.h"
#include "ops/attention/formulas.h"

namespace pydet {
namespace {

// A tile of 128 keys or queries of one head of one sequence.
struct BackwardTile {
  int sequence, head, tile;
  Lengths x;
};

// Tiles of all sequences come by levels: first those that have the most to do. `tiles(x)` of a sequence; where it
// `descends` the last tile has the most to do, else the first. Block `number` of those of `heads` heads each; false where
// there are fewer. All lanes of a warp.
template <bool descends, class Tiles>
__device__ __forceinline__ bool tile_of(const AttentionPlan &p, int number, int heads, Tiles tiles, BackwardTile *to) {
  const auto found = [&](int sequence, int rank, int level, const Lengths &x) {
    to->sequence = sequence, to->head = rank, to->x = x;
    to->tile = descends ? level : tiles(x) - 1 - level;
  };
  if (p.uniform) {
    const Lengths x = lengths_of(p, 0);
    const int per_level = p.sequences * heads, down = number / per_level, rest = number - down * per_level;
    const int level = tiles(x) - 1 - down, sequence = rest / heads;
    if (level < 0) return false;
    found(sequence, rest - sequence * heads, level, x);
    return true;
  }
  const auto count = [&](int i) {
    const int sequence = i + int(threadIdx.x % 32);
    return sequence < p.sequences ? tiles(lengths_of(p, sequence)) : 0;
  };
  int level = 0;
  for (int i = 0; i < p.sequences; i += 32) level = max(level, __reduce_max_sync(0xFFFFFFFFu, count(i)));
  int first = 0;
  while (--level >= 0) {
    int sequences = 0;
    for (int i = 0; i < p.sequences; i += 32) sequences += __popc(__ballot_sync(0xFFFFFFFFu, count(i) > level));
    if (number - first < sequences * heads) break;
    first += sequences * heads;
  }
  if (level < 0) return false;
  int rank = (number - first) / heads, i = 0;
  const int head = number - first - rank * heads;
  uint32_t who = __ballot_sync(0xFFFFFFFFu, count(0) > level);
  while (rank >= __popc(who)) rank -= __popc(who), i += 32, who = __ballot_sync(0xFFFFFFFFu, count(i) > level);
  for (; rank > 0; --rank) who &= who - 1;
  const int sequence = i + __ffs(int(who)) - 1;
  found(sequence, head, level, lengths_of(p, sequence));
  return true;
}

// Without the queries in front to which causal and window leave no key: blocks of queries are counted from the first that
// has one (first_query in formulas.h).
__device__ __forceinline__ Lengths from_first_query(const AttentionPlan &p, Lengths x) {
  const int first = clamped(x.queries - x.keys - p.right, 0, x.queries);
  x.q_first += first, x.queries -= first;
  return x;
}

__device__ __forceinline__ int backward_tiles(int extent) { return (extent + kBackwardTile - 1) / kBackwardTile; }

// The piece that holds row `query`, a multiple of 64, of a head; x: from its first query on. A packed sequence begins at a tile of its own: in front of
// it lie no more than its place in the pack and a tile for each sequence.
__device__ __forceinline__ float *row_piece(const AttentionBackwardPlan &p, int sequence, int head, const Lengths &x,
                                            int query) {
  const int64_t of_head = p.a.q_start ? head : int64_t(sequence) * p.a.heads + head;
  const int64_t tile = p.a.q_start ? x.q_first / kBackwardTile + sequence : 0;
  return p.rows + ((of_head * p.row_tiles + tile) * 2 + query / kBackwardQueries) * kRowPieceFloats;
}

// Tiles of 64 columns and `rows` rows, one for each 64 columns of a head.
template <int chunks>
__device__ __forceinline__ void load_heads(const CUtensorMap *map, uint32_t to, uint32_t barrier, int rows, int token,
                                           int head, int sequence) {
#pragma unroll
  for (int i = 0; i < chunks; ++i)
    load_box<5, false>(to + i * rows * kRowBytes, map, barrier, Place{i * kBlockK, token, {head, sequence, 0}}, 0);
}

// In a map along whose dimension all have one place, unless it moves.
__device__ __forceinline__ int place_if(bool moves, int x) { return moves ? x : 0; }

__device__ __forceinline__ void load_bytes(uint32_t to, const void *from, uint32_t barrier, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Waits in either branch, each worded in its own way: ptxas moves a wait to before the arithmetic that is to run beside the
// products, but not across a branch.
template <int groups> __device__ __forceinline__ void wait_apart(bool either) {
  if (either) asm volatile("wgmma.wait_group.sync.aligned %0;  // apart" ::"n"(groups) : "memory");
  else wgmma_wait<groups>();
}

__device__ __forceinline__ int load_int(uint32_t address) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// A struct of ints in shared memory, so that what is seldom looked at is not kept in registers.
template <class Ints> __device__ __forceinline__ void store_struct(uint32_t address, const Ints &x) {
  const int *words = reinterpret_cast<const int *>(&x);
#pragma unroll
  for (int i = 0; i < int(sizeof(Ints) / 4); ++i)
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(address + i * 4), "r"(words[i]) : "memory");
}
template <class Ints> __device__ __forceinline__ Ints load_struct(uint32_t address) {
  Ints x;
  int *words = reinterpret_cast<int *>(&x);
#pragma unroll
  for (int i = 0; i < int(sizeof(Ints) / 4); ++i) words[i] = load_int(address + i * 4);
  return x;
}

// The tiles of a persistent block, one after the other. One warp takes them, of all blocks', when the one that loads has
// asked for all of the tile before; of the last two that a block may have, when that is done, so that no tile waits for a
// block while another has nothing to do. A sequence below 0 follows the last.
template <class S, class Tile> struct TileSlots {
  uint32_t base;
  int turn = 0;
  __device__ __forceinline__ uint32_t slot() const { return base + S::tiles_at + turn % 2 * int(sizeof(Tile)); }
  __device__ __forceinline__ uint32_t full() const { return base + S::tile_full_at + turn % 2 * 8; }
  __device__ __forceinline__ uint32_t empty() const { return base + S::tile_empty_at + turn % 2 * 8; }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < 2; ++i)
      barrier_init(base + S::tile_full_at + i * 8, 1),
          barrier_init(base + S::tile_empty_at + i * 8, S::consumer_warps + 1);
    barrier_init(base + S::tile_asked_at, 1);
  }
  // All lanes of that warp. find(number, &tile) says whether there is one of `all`, at most. Where each can have a block of
  // its own, or where all blocks begin at once, a block's first is its own number.
  template <class Find> __device__ __forceinline__ void take(int *taken, int all, bool at_once, Find find) {
    const int blocks = int(gridDim.x);
    const bool one = all <= blocks;
    int number = int(blockIdx.x);
    for (bool more = true; more; ++turn) {
      if (turn > 0 && !one) {
        barrier_wait(base + S::tile_asked_at, (turn - 1) % 2);
        if (number + 2 * blocks >= all) barrier_wait(base + S::tile_empty_at + (turn - 1) % 2 * 8, (turn - 1) / 2 % 2);
      }
      if (!one && (turn > 0 || !at_once)) {
        if (threadIdx.x % 32 == 0) number = atomicAdd(taken, 1) + (at_once ? blocks : 0);
        number = __shfl_sync(0xFFFFFFFFu, number, 0);
      }
      Tile tile = {};
      more = (turn == 0 || !one) && find(number, &tile);
      if (!more) tile.sequence = -1;
      barrier_wait(empty(), turn / 2 % 2 ^ 1);
      if (threadIdx.x % 32 == 0) {
        store_struct(slot(), tile);
        barrier_arrive(full());
      }
    }
  }
  // The thread that loads.
  template <class Load> __device__ __forceinline__ void load_each(Load load) {
    for (;; ++turn) {
      barrier_wait(full(), turn / 2 % 2);
      const Tile tile = look();
      if (tile.sequence < 0) return;
      barrier_arrive(empty());
      load(tile);
      barrier_arrive(base + S::tile_asked_at);
    }
  }
  // The others.
  __device__ __forceinline__ bool wait() const {
    barrier_wait(full(), turn / 2 % 2);
    return same_in_warp(look().sequence) >= 0;
  }
  __device__ __forceinline__ Tile look() const { return load_struct<Tile>(slot()); }
  __device__ __forceinline__ void give_back() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty());
  }
};

__device__ __forceinline__ char *vector_at(const Heads &heads, int64_t sequence, int head, int64_t token) {
  return heads.data + size_of(heads.type) *
                          (sequence * heads.sequence_stride + head * heads.head_stride + token * heads.token_stride);
}

// Two neighbours of a gradient.
template <Type type> __device__ __forceinline__ void store_two(char *row, Type to, int column, float x, float y) {
  if (to == Type::f32) *reinterpret_cast<float2 *>(row + 4 * column) = make_float2(canonical(x), canonical(y));
  else *reinterpret_cast<uint32_t *>(row + 2 * column) = rounded_pair<type>(x, y);
}

// Whether the results of a thread's row h, and of the lanes beside it, are finite.
template <int registers> __device__ __forceinline__ bool row_is_finite(const float (&sums)[registers], int h) {
  float zero = 0;
#pragma unroll
  for (int i = 0; i < registers / 4; ++i)
    zero = fmaf(sums[4 * i + 2 * h], 0.0f, fmaf(sums[4 * i + 2 * h + 1], 0.0f, zero));
  zero = zero + __shfl_xor_sync(0xFFFFFFFFu, zero, 1);
  return zero + __shfl_xor_sync(0xFFFFFFFFu, zero, 2) == 0.0f;
}

// Word k of lane q of four goes to lane k, where it is word q.
__device__ __forceinline__ void turn_four(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool high = threadIdx.x & bit;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k & bit) continue;
      uint32_t &low_word = words[k], &high_word = words[k + bit];
      const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, high ? low_word : high_word, bit);
      if (high) low_word = got;
      else high_word = got;
    }
  }
}

// Stores a thread's row h, or zeros, where it `stores` any. All lanes of a warp: the four that share a row of two-byte
// elements turn what they have, so that each stores 16 bytes.
template <Type type, int registers>
__device__ __forceinline__ void store_row(const float (&sums)[registers], int h, bool stores, char *to, Type stored,
                                          bool own, int extent) {
  const int lane = int(threadIdx.x % 4);
  if (stored == Type::f32) {
    if (!stores) return;
#pragma unroll
    for (int i = 0; i < registers / 4; ++i) {
      const int column = 8 * i + lane * 2;
      if (column < extent)
        store_two<type>(to, stored, column, own ? settled(sums[4 * i + 2 * h]) : 0.0f,
                        own ? settled(sums[4 * i + 2 * h + 1]) : 0.0f);
    }
    return;
  }
  const bool whole = reinterpret_cast<uintptr_t>(to) % 16 == 0;
#pragma unroll
  for (int i = 0; i < registers / 4; i += 4) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int at = 4 * (i + k) + 2 * h;
      words[k] = own ? rounded_pair<type>(settled(sums[at]), settled(sums[at + 1])) : 0u;
    }
    turn_four(words);
    const int column = 8 * (i + lane);
    if (!stores || column >= extent) continue;
    uint32_t *at = reinterpret_cast<uint32_t *>(to + 2 * column);
    if (whole) {
      *reinterpret_cast<uint4 *>(at) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) at[k] = words[k];
    }
  }
}

}  // namespace
}  // namespace pydet
