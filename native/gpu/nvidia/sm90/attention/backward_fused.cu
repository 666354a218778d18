// All three gradients of attention in one pass of the tensor cores: five products where backward_keys.cu and
// backward_queries.cu make seven.
//
//   As backward_keys.cu: a block has a tile of 128 keys, walks the queries that see them, upward, and makes dk and dv. Its
//   gradients of scores are left in shared memory as well, and their product with the tile's keys is what these keys add
//   to dq. NUMERICS.md's order of dq is that in which tiles meet a query: of a tile of 64 queries and a head, the last keys
//   first. So the sums so far lie in memory, and a word says which keys have been added last. A warp waits for it, and
//   another writes it when this block has added.
//   The L2 adds, without an answer. It flushes subnormals; so where any of what a warp adds is that small, and from there
//   on, the threads add. What is added is nothing or from 2^-102 on: then sums are whole 2^-125, or nothing.
//   Blocks take tiles in turn from a counter, the last keys of a sequence first, so whom one waits for has begun before it.
//   Under a causal mask those are the tiles that have the least to do, and the blocks would not end together. There, where
//   so many blocks have begun that each tile of a few sequences and groups will have one, the first keys come first: all
//   these tiles will be worked at, whatever comes behind.
//   Behind the tiles of keys come those of 128 queries of a head, whose dq is rounded: so blocks that have no keys any more
//   do that beside those that have.
//
// The order of every sum is NUMERICS.md's, "Attention, backward".

#include <algorithm>
#include <type_traits>

#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/backward_steps.h"

namespace pydet {
namespace {

// A word: twice (the block of keys that has added last, and 1), and whether its sums are the threads' from here on.
// Of a turn, for the warps that add: whether it is, or this is the first of all; whether it will be; where the sums are.
constexpr int kAnswers = 1, kFirstOfAll = 2, kTurns = 4, kTurnBytes = 16;

struct FusedTile {
  KeyTile keys;
  int block;         // of the sequence's keys, which is what its word says
  int others_begin;  // tiles of queries from here on the block of keys behind has added to
  int queries;       // a tile of queries, if not of keys: its number, and 1
};

// ahead: eighths of a step's exponentials that are made before the sums of dq are waited for.
template <Type type_, int d_, int ahead_ = 2> struct FusedShape {
  static constexpr int ahead = ahead_;
  static constexpr Type type = type_;
  static constexpr int d = d_, chunks = d / kBlockK, warpgroups = 2, consumer_warps = warpgroups * 4;
  static constexpr int consumers = warpgroups * kWarpgroup, threads = consumers + kWarpgroup;
  static constexpr int producer_registers = 24, consumer_registers = 240;
  static constexpr int keys = kFusedKeys, sum = d / warpgroups;  // columns of dq that a warpgroup makes
  static constexpr int k_box_bytes = keys * kRowBytes, k_bytes = chunks * k_box_bytes;
  static constexpr int q_box_bytes = kBackwardQueries * kRowBytes, q_bytes = chunks * q_box_bytes;
  static constexpr int stages = d == 64 ? 8 : 4, stage_bytes = 2 * q_bytes;
  static constexpr int gradients_bytes = keys * kRowBytes;  // of scores: 64 queries by 128 keys
  static constexpr int ring_at = 2 * k_bytes, gradients_at = ring_at + stages * stage_bytes,
                       rows_at = gradients_at + 2 * gradients_bytes, rows_bytes = kRowPieceBytes + 16,
                       keys_full_at = rows_at + stages * rows_bytes, full_at = keys_full_at + 8,
                       empty_at = full_at + stages * 8, turn_at = empty_at + stages * 8, done_at = turn_at + kTurns * 8,
                       told_at = done_at + kTurns * 8, tile_full_at = told_at + kTurns * 8,
                       tile_done_at = tile_full_at + 8, turns_at = divide_up(tile_done_at + 8, 16) * 16,
                       tiles_at = turns_at + kTurns * kTurnBytes, shared_bytes = tiles_at + 2 * int(sizeof(FusedTile));
  static_assert((stages & (stages - 1)) == 0, "a step's stage by bits of its number");
  static_assert(shared_bytes <= kMostSharedBytes, "one block an SM");
  static PYDET_HD constexpr int row(int warpgroup) { return warpgroup * 64; }
};

// ---- What blocks tell each other ---------------------------------------------------------------------------------

__device__ __forceinline__ int load_acquired(const int *from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void store_relaxed(int *to, int x) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void store_int(uint32_t address, int x) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// A tile of 64 queries among those of all heads, as row_piece counts them.
__device__ __forceinline__ int64_t query_tile_at(const AttentionBackwardPlan &p, int sequence, int head,
                                                 const Lengths &x, int tile) {
  return (row_piece(p, sequence, head, x, tile * kBackwardQueries) - p.rows) / kRowPieceFloats;
}

// ---- Which tile a block has --------------------------------------------------------------------------------------

// Whether the first keys of a section come first: what the first block says that takes one of its tiles.
__device__ __forceinline__ bool ascends(const AttentionBackwardPlan &p, int section, int tiles) {
  if (!p.may_ascend) return false;
  int said = 0;
  if (threadIdx.x % 32 == 0) {
    said = load_acquired(p.said + section);
    if (said == 0) {
      const int mine = load_acquired(p.begun) >= tiles ? 2 : 1, before = atomicCAS(p.said + section, 0, mine);
      said = before ? before : mine;
    }
  }
  return __shfl_sync(0xFFFFFFFFu, said, 0) == 2;
}

// Tile `number` in the order in which blocks take them; false where there are fewer. All lanes of a warp.
__device__ __forceinline__ bool fused_tile_of(const AttentionBackwardPlan &p, int number, FusedTile *to) {
  BackwardTile tile;
  const int groups = p.a.heads / p.a.group_heads;
  if (p.a.uniform) {
    const int pairs = p.a.sequences * groups, tiles = (p.a.keys + kFusedKeys - 1) / kFusedKeys,
              section = number / (p.section * tiles), first = section * p.section;
    if (first >= pairs) return false;
    const int here = min(p.section, pairs - first), rest = number - first * tiles, down = rest / here,
              pair = first + rest - down * here;
    const bool up = ascends(p, section, here * tiles);
    tile.sequence = pair / groups, tile.head = pair - tile.sequence * groups;
    tile.tile = up ? down : tiles - 1 - down;
    tile.x = lengths_of(p.a, tile.sequence);
  } else {
    const auto tiles = [&](const Lengths &x) {
      return ((p.a.k_start ? x.keys : p.a.keys) + kFusedKeys - 1) / kFusedKeys;
    };
    if (!tile_of<true>(p.a, number, groups, tiles, &tile)) return false;
  }
  KeyTile &keys = to->keys;
  describe_keys<kFusedKeys>(p, tile, &keys);
  const TilesOfQueries behind = queries_that_see(p, keys.x, keys.key + kFusedKeys, kFusedKeys);
  to->block = same_in_warp(tile.tile);
  to->others_begin = same_in_warp(behind.begin == behind.end ? keys.end : behind.begin);
  return true;
}

// The tiles of a block, one after the other, for each of its warps. One warp takes them: the next when all products of
// the one before are made, and what they had to add has been added.
template <class S> struct Tiles {
  uint32_t base;
  int count = 0;
  __device__ __forceinline__ uint32_t slot() const { return base + S::tiles_at + count % 2 * int(sizeof(FusedTile)); }
  // All lanes of that warp. False: there are no more, which the others then see, too.
  __device__ __forceinline__ bool take(const AttentionBackwardPlan &p) const {
    if (count > 0) barrier_wait(base + S::tile_done_at, (count - 1) % 2);
    FusedTile tile = {};
    int number = 0;
    do {
      if (threadIdx.x % 32 == 0) number = atomicAdd(p.taken, 1);
      number = __shfl_sync(0xFFFFFFFFu, number, 0);
    } while (number < p.numbers && !fused_tile_of(p, number, &tile));
    if (number >= p.numbers) {
      tile = {};
      tile.queries = number - p.numbers + 1;
      if (tile.queries > p.query_numbers) tile.block = -1;
    }
    if (threadIdx.x % 32 == 0) {
      store_struct(slot(), tile);
      barrier_arrive(base + S::tile_full_at);
    }
    return tile.block >= 0;
  }
  // The others.
  __device__ __forceinline__ FusedTile wait() const {
    barrier_wait(base + S::tile_full_at, count % 2);
    return look();
  }
  __device__ __forceinline__ FusedTile look() const { return load_struct<FusedTile>(slot()); }
  __device__ __forceinline__ void done() const { barrier_arrive(base + S::tile_done_at); }
};

// ---- The warps beside those that multiply ------------------------------------------------------------------------

template <class S> __device__ __forceinline__ void load_tile(const AttentionBackwardPlan &p, uint32_t base,
                                                             const KeyTile &tile, Cursor<S::stages> &ring) {
  if (tile.begin == tile.end) barrier_arrive(base + S::keys_full_at);
  load_steps<S, true>(p, base, tile, ring);
}

// Before each step's sums are added: waits until the keys behind have been.
template <class S>
__device__ __forceinline__ void wait_for_turns(const AttentionBackwardPlan &p, uint32_t base, const FusedTile &tile,
                                               Cursor<kTurns> &turn) {
  const int steps = (tile.keys.end - tile.keys.begin) * p.a.group_heads;
  QuerySteps step(tile.keys, p.a.group_heads);
  for (int i = 0; i < steps; ++i, step.next(), turn.next()) {
    const int head = tile.keys.group * p.a.group_heads + step.head;
    const int64_t at = query_tile_at(p, tile.keys.sequence, head, tile.keys.x, step.tile);
    int word = kFirstOfAll;
    if (step.tile >= tile.others_begin) {
      const int *from = p.words + at;
      while ((word = load_acquired(from)) / 2 != tile.block + 2) __nanosleep(20);
      word &= kAnswers;
    }
    barrier_wait(base + S::told_at + turn.stage * 8, turn.parity ^ 1);
    const uint64_t sums = uint64_t(p.sums + at * kBackwardQueries * S::d);
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(base + S::turns_at + turn.stage * kTurnBytes),
                 "r"(word), "r"(word & kAnswers), "r"(int(sums)), "r"(int(sums >> 32))
                 : "memory");
    barrier_arrive(base + S::turn_at + turn.stage * 8);
  }
}

// And when they have been, says so: of all steps at once that have been added by then, since a fence takes as long as a
// step.
template <class S>
__device__ __forceinline__ void tell_others(const AttentionBackwardPlan &p, uint32_t base, const FusedTile &tile,
                                            Cursor<kTurns> &turn) {
  const int steps = (tile.keys.end - tile.keys.begin) * p.a.group_heads;
  QuerySteps step(tile.keys, p.a.group_heads);
  for (int i = 0; i < steps;) {
    uint32_t small = 0;
    int here = 0;
    do {
      barrier_wait(base + S::done_at + turn.stage * 8, turn.parity);
      small |= uint32_t(load_int(base + S::turns_at + turn.stage * kTurnBytes + 4)) << here;
      barrier_arrive(base + S::told_at + turn.stage * 8);
      turn.next();
    } while (++here < kTurns && i + here < steps && barrier_ready(base + S::done_at + turn.stage * 8, turn.parity));
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    for (int k = 0; k < here; ++k, step.next()) {
      const int head = tile.keys.group * p.a.group_heads + step.head;
      store_relaxed(p.words + query_tile_at(p, tile.keys.sequence, head, tile.keys.x, step.tile),
                    (tile.block + 1) * 2 + int(small >> k & 1));
    }
    i += here;
  }
}

// ---- The warpgroups that multiply --------------------------------------------------------------------------------

// 0 to 7, each as a type.
template <class Run> __device__ __forceinline__ void for_eights(Run run) {
  run(std::integral_constant<int, 0>()), run(std::integral_constant<int, 1>());
  run(std::integral_constant<int, 2>()), run(std::integral_constant<int, 3>());
  run(std::integral_constant<int, 4>()), run(std::integral_constant<int, 5>());
  run(std::integral_constant<int, 6>()), run(std::integral_constant<int, 7>());
}

// What a step adds to dq, in the block's turn. An SM sends 64 bytes a cycle, so a warp would wait with each of its adds:
// beside(0) to beside(7) run between them. They stay there for the branch of a wait that is over, and
// since an address is made with them, though a weight has no sign: ptxas puts all adds together.
template <class S, class Beside>
__device__ __forceinline__ void add_to_queries(const float (&sums)[S::sum / 2], uint32_t base,
                                               const Cursor<kTurns> &turn, Beside beside) {
  constexpr int fours = S::sum / 8;
  uint32_t least = 0xFFFFFFFFu;  // twice the smallest that is not nothing, less 1
#pragma unroll
  for (int i = 0; i < S::sum / 2; ++i) least = min(least, __float_as_uint(sums[i]) * 2 - 1);
  const bool small = __any_sync(0xFFFFFFFFu, least < (uint32_t(127 - 102) << 24) - 1);
  barrier_wait(base + S::turn_at + turn.stage * 8, turn.parity);
  const uint4 of_turn = load_16_bytes(base + S::turns_at + turn.stage * kTurnBytes);
  const int word = int(of_turn.x);
  float4 *to = reinterpret_cast<float4 *>(of_turn.z | uint64_t(of_turn.w) << 32) +
               (thread_number() / 32 * fours * 32 + thread_number() % 32);
  if (word == 0 && !small) {
    uint32_t none = 0;
    for_eights([&](auto eight) {
      constexpr int i = decltype(eight)::value;
      if constexpr (i % 2 == 0 && i > 0) barrier_wait(base + S::turn_at + turn.stage * 8, turn.parity);
      none |= beside(eight);
      if constexpr (i % 2) {
        to += none >> 31;
#pragma unroll
        for (int k = i / 2 * fours / 4; k < (i / 2 + 1) * fours / 4; ++k)
          asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + k * 32), "f"(sums[4 * k]),
                       "f"(sums[4 * k + 1]), "f"(sums[4 * k + 2]), "f"(sums[4 * k + 3])
                       : "memory");
      }
    });
  } else {
    if (word & kFirstOfAll) {
#pragma unroll
      for (int i = 0; i < fours; ++i)
        __stcg(to + i * 32, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
    } else {
#pragma unroll 1
      for (int one = 0; one < fours; ++one)  // there are no registers for more
#pragma unroll
        for (int i = 0; i < fours; ++i)
          if (i == one) {
            const float4 x = __ldcg(to + i * 32);
            __stcg(to + i * 32,
                   make_float4(x.x + sums[4 * i], x.y + sums[4 * i + 1], x.z + sums[4 * i + 2], x.w + sums[4 * i + 3]));
          }
    }
    for_eights(beside);
  }
  __syncwarp();
  if (thread_number() % 32 == 0) {
    if (small) store_int(base + S::turns_at + turn.stage * kTurnBytes + 4, kAnswers);
    barrier_arrive(base + S::done_at + turn.stage * 8);
  }
}

template <bool first, class A, class B> __device__ __forceinline__ auto &one_of(A &a, B &b) {
  if constexpr (first) return a;
  else return b;
}

// A tile. i: steps that the block has made so far.
template <class S>
__device__ __forceinline__ void multiply_fused(const AttentionBackwardPlan &p, uint32_t base, int warpgroup,
                                               const Tiles<S> &tiles, int &i) {
  const bool first_lane = threadIdx.x % 32 == 0;
  float dk[S::d / 2], dv[S::d / 2];
  int end;
  {
    const auto tile = tiles.look();
    end = i + same_in_warp((tile.keys.end - tile.keys.begin) * p.a.group_heads);
    begin_sums(dk, p, p.dk, tile.keys, S::row(warpgroup), p.a.d);
    begin_sums(dv, p, p.dv, tile.keys, S::row(warpgroup), p.a.e);
  }

  float s[kBackwardQueries / 2], g[kBackwardQueries / 2];
  uint32_t p16[kBackwardQueries / 16][4], ds16[kBackwardQueries / 16][4];
  // Where a step stands in the ring is worked out from its number: there are no registers to keep it in.
  // What descriptors are made of, likewise.
  const auto keys = [&] {
    uint32_t at = base + S::row(warpgroup) * kRowBytes;
    make_opaque(at);
    return uint32_t(same_in_warp(int(at)));
  };
  const auto stage = [&](int step) { return base + S::ring_at + uint32_t(step) % S::stages * S::stage_bytes; };
  const auto rows = [&](int step) { return base + S::rows_at + uint32_t(step) % S::stages * S::rows_bytes; };
  const auto full = [&](int step) { return base + S::full_at + uint32_t(step) % S::stages * 8; };
  const auto empty = [&](int step) { return base + S::empty_at + uint32_t(step) % S::stages * 8; };
  const auto gradients = [&](int step) { return base + S::gradients_at + uint32_t(step) % 2 * S::gradients_bytes; };
  const auto round_weights_of_step = [&] {
#pragma unroll
    for (int i = 0; i < kBackwardQueries / 8; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        p16[i / 2][i % 2 * 2 + h] = rounded_pair<S::type>(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]);
  };
  // Products of dout and v become gradients of scores, in registers and in a buffer.
  const auto derive = [&](int step) {
    const uint32_t numbers = rows(step) + kBackwardQueries * 4 + thread_number() % 4 * 8;
    const int lane = thread_number() % 32, row = thread_number() / 32 * kWarpRows + lane % 16;
    const uint32_t to = gradients(step) + row * kRowBytes;
#pragma unroll
    for (int i = 0; i < kBackwardQueries / 8; ++i) {
      const float2 delta = load_pair(numbers + 32 * i);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        ds16[i / 2][i % 2 * 2 + h] =
            rounded_pair<S::type>(s[4 * i + 2 * h] * fmaf(g[4 * i + 2 * h], p.scale, -delta.x),
                                  s[4 * i + 2 * h + 1] * fmaf(g[4 * i + 2 * h + 1], p.scale, -delta.y));
      if (i % 2) store_matrices(to + ((i - 1 + lane / 16) ^ (row % 8)) * 16, ds16[i / 2]);
    }
    fence_stores();
  };
  // Of d = 128 what is added to dq takes the place of the products of dout and v.
  float apart[S::d == 64 ? S::sum / 2 : 1];
  auto &sums = one_of < S::d == 64 > (apart, g);
  const auto start_queries = [&](int step) {
    named_sync(1, S::consumers);  // all have left their gradients, and have had their sums of the step before
    const uint64_t x = wgmma_descriptor<false>(gradients(step)),
                   y = wgmma_descriptor<false>(base + warpgroup * S::sum / kBlockK * S::k_box_bytes +
                                               warpgroup * S::sum % kBlockK * 2);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::keys / kStep; ++i)
      wgmma<S::type, false, false>(sums, x + (i * kStep * kRowBytes >> 4), y + (i * kStep * kRowBytes >> 4), i > 0);
    wgmma_commit();
  };
  const auto add = [&](int step, auto beside) {
    Cursor<kTurns> turn;
    turn.stage = uint32_t(step) % kTurns, turn.parity = uint32_t(step) / kTurns % 2;
    add_to_queries<S>(sums, base, turn, beside);
  };
  if (i < end) {
    barrier_wait(base + S::keys_full_at, tiles.count % 2);
    barrier_wait(full(i), uint32_t(i) / S::stages % 2);
    start_products<S>(s, keys(), stage(i));
    start_products<S>(g, keys() + S::k_bytes, stage(i) + S::q_bytes);
    wgmma_wait<1>();
    weigh_step<true>(p, s, rows(i), warpgroup, S::row(warpgroup));
    round_weights_of_step();
    start_sums<S>(dv, p16, stage(i) + S::q_bytes);
    wgmma_wait<0>();
    derive(i);
#pragma unroll 1
    for (++i; i < end; ++i) {
      barrier_wait(full(i), uint32_t(i) / S::stages % 2);
      start_products<S>(s, keys(), stage(i));
      start_queries(i - 1);
      start_sums<S>(dk, ds16, stage(i - 1));
      wgmma_wait<2>();
      const bool masked = weigh_step<true, S::ahead>(p, s, rows(i), warpgroup, S::row(warpgroup));
      wait_apart<1>(masked);
      add(i - 1, [&](auto eight) {
        constexpr int first = decltype(eight)::value;
        uint32_t all = 0;
        if constexpr (first >= S::ahead) {
          weigh_eights<first, first + 1, true>(p, s, rows(i));
#pragma unroll
          for (int k = 0; k < 4; ++k) all |= __float_as_uint(s[4 * first + k]);
        }
        return all;
      });
      start_products<S>(g, keys() + S::k_bytes, stage(i) + S::q_bytes);
      wgmma_wait<1>();
      if (first_lane) barrier_arrive(empty(i - 1));
      round_weights_of_step();
      start_sums<S>(dv, p16, stage(i) + S::q_bytes);
      wgmma_wait<0>();
      derive(i);
    }
    start_sums<S>(dk, ds16, stage(i - 1));
    start_queries(i - 1);
    wgmma_wait<0>();
    if (first_lane) barrier_arrive(empty(i - 1));
    add(i - 1, [](auto) { return 0u; });
  }
  const auto tile = tiles.look();  // again: not kept through the loop
  if (first_lane) tiles.done();
  uint32_t again[2];  // lanes whose row is not finite
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = S::row(warpgroup) + row_of(thread_number()) + 8 * h, key = tile.keys.key + row,
              place = tile.keys.place + row;
    const bool own = key >= 0 && key < tile.keys.x.keys, finite = row_is_finite(dk, h) && row_is_finite(dv, h);
    const bool stores = place < tile.keys.end_place && (own ? finite : !p.accumulate);
    store_row<S::type>(dk, h, stores, vector_at(p.dk, tile.keys.sequence, tile.keys.group, place), p.dk.type, own,
                       p.a.d);
    store_row<S::type>(dv, h, stores, vector_at(p.dv, tile.keys.sequence, tile.keys.group, place), p.dv.type, own,
                       p.a.e);
    again[h] = __ballot_sync(0xFFFFFFFFu, own && !finite && thread_number() % 4 == 0);
  }
  repair_keys<S>(p, tile.keys, again, S::row(warpgroup), true, true);
}

// ---- dq ----------------------------------------------------------------------------------------------------------

// Rounds the sums of 128 queries of a head, when all keys have been added: a warp has 16.
template <class S>
__device__ __forceinline__ void round_queries(const AttentionBackwardPlan &p, int number) {
  BackwardTile tile;
  const auto tiles = [](const Lengths &x) { return backward_tiles(x.queries); };
  if (!tile_of<false>(p.a, number, p.a.heads, tiles, &tile)) return;
  constexpr int kFours = S::sum / 8;  // of a thread of either warpgroup
  const int thread = thread_number(), lane = thread % 32,
            first = tile.tile * kBackwardTile + thread / 32 * kWarpRows + lane / 4;
  const Lengths seen = from_first_query(p.a, tile.x);
  float dq[S::d / 2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first + 8 * h + seen.queries - tile.x.queries, of = row / kBackwardQueries;
    bool there = row >= 0 && row < seen.queries;
    int64_t at = 0;
    if (there) {  // the keys that are added last, if any are
      const int block = max(of * kBackwardQueries - (seen.queries - seen.keys) - p.a.left, 0) / kFusedKeys;
      const TilesOfQueries by = queries_that_see(p, seen, block * kFusedKeys, kFusedKeys);
      there = of >= by.begin && of < by.end;
      at = query_tile_at(p, tile.sequence, tile.head, seen, of);
      if (there)
        while (load_acquired(p.words + at) / 2 != block + 1) __nanosleep(100);
    }
    const float *from = p.sums + at * kBackwardQueries * S::d + row % kBackwardQueries / kWarpRows * kFours * 128 +
                        (row % 8 * 4 + lane % 4) * 4 + row % kWarpRows / 8 * 2;
#pragma unroll
    for (int i = 0; i < S::d / 8; ++i) {
      float2 x = make_float2(0, 0);
      if (there) x = __ldcg(reinterpret_cast<const float2 *>(from + (i / kFours * 4 * kFours + i % kFours) * 128));
      dq[4 * i + 2 * h] = x.x, dq[4 * i + 2 * h + 1] = x.y;
    }
  }
  __syncwarp();
  store_queries<S::type>(p, dq, tile.x, tile.sequence, tile.head, first, S::keys);
}

template <class S>
__global__ void __launch_bounds__(S::threads, 1)
    attention_backward_fused_kernel(const __grid_constant__ AttentionBackwardPlan p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int warp = same_in_warp(int(threadIdx.x) / 32);
  if (threadIdx.x == S::consumers) {
    barrier_init(base + S::keys_full_at, 1), barrier_init(base + S::tile_full_at, 1);
    barrier_init(base + S::tile_done_at, S::consumer_warps + 3);
    for (int i = 0; i < S::stages; ++i)
      barrier_init(base + S::full_at + i * 8, 1), barrier_init(base + S::empty_at + i * 8, S::consumer_warps);
    for (int i = 0; i < kTurns; ++i)
      barrier_init(base + S::turn_at + i * 8, 1), barrier_init(base + S::done_at + i * 8, S::consumer_warps),
          barrier_init(base + S::told_at + i * 8, 1);
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  Tiles<S> tiles{base};
  if (warp >= S::consumer_warps) {
    registers_down<S::producer_registers>();
    if (warp == S::consumer_warps + 3) {
      if (threadIdx.x % 32 == 0) atomicAdd(p.begun, 1);
      if (p.may_ascend)  // all begin at once: so wait for a while, but not for ever
        for (int i = 0; i < 50 && load_acquired(p.begun) < int(gridDim.x); ++i) __nanosleep(100);
      while (tiles.take(p)) ++tiles.count;
    } else if (threadIdx.x % 32 == 0) {
      Cursor<S::stages> ring;
      Cursor<kTurns> turn;
      for (;; ++tiles.count) {
        const FusedTile tile = tiles.wait();
        if (tile.block < 0) break;
        tiles.done();
        if (warp == S::consumer_warps) load_tile<S>(p, base, tile.keys, ring);
        else if (warp == S::consumer_warps + 1) wait_for_turns<S>(p, base, tile, turn);
        else tell_others<S>(p, base, tile, turn);
      }
    }
  } else {
    registers_up<S::consumer_registers>();
    int steps = 0;
    for (;; ++tiles.count) {
      const FusedTile tile = tiles.wait();
      if (tile.block < 0) break;
      if (tile.queries == 0) {
        multiply_fused<S>(p, base, warp / 4, tiles, steps);
      } else {
        if (threadIdx.x % 32 == 0) tiles.done();
        round_queries<S>(p, tile.queries - 1);
      }
    }
  }
}

template <Type type, class Function> pydet_status with_shape(const AttentionBackwardPlan &plan, Function function) {
  return std::max(plan.a.d, plan.a.e) <= 64 ? function(FusedShape<type, 64>()) : function(FusedShape<type, 128>());
}

}  // namespace

#ifndef PYDET_ATTENTION_TYPE
#error "one object a type: 1 bf16, 2 fp16"
#endif
template <Type type> pydet_status attention_backward_fused(const Launch &launch, const AttentionBackwardPlan &plan) {
  return with_shape<type>(plan, [&](auto shape) {
    using S = decltype(shape);
    Launch one = launch;
    one.grid = dim3(unsigned(plan.blocks)), one.block = dim3(S::threads);
    one.shared_bytes = S::shared_bytes;
    one.loaded = true;
    return pydet::launch(one, attention_backward_fused_kernel<S>, plan);
  });
}
template <Type type> pydet_status load_attention_backward_fused(const char *name, const AttentionBackwardPlan &plan) {
  return with_shape<type>(plan, [&](auto shape) {
    using S = decltype(shape);
    return load(name, attention_backward_fused_kernel<S>, S::shared_bytes);
  });
}

template pydet_status attention_backward_fused<Type(PYDET_ATTENTION_TYPE)>(const Launch &,
                                                                           const AttentionBackwardPlan &);
template pydet_status load_attention_backward_fused<Type(PYDET_ATTENTION_TYPE)>(const char *,
                                                                                const AttentionBackwardPlan &);

}  // namespace pydet
