// What the kernels that walk a tile of keys' queries share: its steps, what loads them, and their products.
#pragma once

#include "gpu/nvidia/sm90/attention/backward_row.h"

namespace pydet {
namespace {

// A tile's own keys, and the queries that see any of them.
struct KeyTile {
  int sequence, group;
  int key;               // the first, of the sequence's own; may be negative
  int place, end_place;  // of the first in its storage; where what the block writes ends
  int begin, end;        // tiles of 64 queries
  int part;              // of the gradients' columns
  Lengths x;
};

// Tiles of 64 queries that see any of `keys` keys from `key` on.
struct TilesOfQueries {
  int begin, end;
};
__device__ __forceinline__ TilesOfQueries queries_that_see(const AttentionBackwardPlan &p, const Lengths &x, int key,
                                                           int keys) {
  const int first = max(key, 0), last = min(key + keys, x.keys) - 1, ahead = x.queries - x.keys;
  const int begin = clamped(first + ahead - p.a.right, 0, x.queries),
            end = clamped(last + ahead + p.a.left + 1, 0, x.queries);
  if (first > last || begin >= end) return {0, 0};
  return {begin / kBackwardQueries, (end + kBackwardQueries - 1) / kBackwardQueries};
}

// What `tile`, one of so many keys of its sequence's storage, has to do.
template <int keys>
__device__ __forceinline__ void describe_keys(const AttentionBackwardPlan &p, const BackwardTile &tile, KeyTile *to) {
  const bool packed = p.a.k_start != nullptr;
  const Lengths x = from_first_query(p.a, tile.x);
  const int base = packed ? x.k_first : 0;
  to->sequence = same_in_warp(tile.sequence), to->group = same_in_warp(tile.head), to->x = x;
  to->place = same_in_warp(base + tile.tile * keys);
  to->end_place = same_in_warp(packed ? x.k_first + x.keys : p.a.keys);
  to->key = same_in_warp(to->place - x.k_first);
  const TilesOfQueries of = queries_that_see(p, x, to->key, keys);
  to->begin = same_in_warp(of.begin), to->end = same_in_warp(of.end), to->part = 0;
}

template <int keys>
__device__ __forceinline__ bool key_tile_of(const AttentionBackwardPlan &p, int number, KeyTile *to) {
  BackwardTile tile;
  const auto tiles = [&](const Lengths &x) { return ((p.a.k_start ? x.keys : p.a.keys) + keys - 1) / keys; };
  if (!tile_of<false>(p.a, number, p.a.heads / p.a.group_heads, tiles, &tile)) return false;
  describe_keys<keys>(p, tile, to);
  return true;
}

// The steps of a tile: of each block of 128 queries, of each head of the group, its tiles of 64.
struct QuerySteps {
  int begin, end, heads, tile, head = 0;
  __device__ __forceinline__ QuerySteps(const KeyTile &of, int group_heads)
      : begin(of.begin), end(of.end), heads(group_heads), tile(of.begin) {}
  __device__ __forceinline__ void next() {
    ++tile;
    if (tile % 2 == 0 || tile == end) {
      if (++head == heads) head = 0;
      else tile = max((tile - 1) / 2 * 2, begin);
    }
  }
};

// own: what else the tile holds is hidden from all queries, too. Without it a key past the sequence's last has gradients of
// its own, which nobody stores.
template <class S, bool own = false> __device__ __forceinline__ void load_steps(const AttentionBackwardPlan &p,
                                                                                uint32_t base, const KeyTile &tile,
                                                                                Cursor<S::stages> &ring) {
  const int steps = (tile.end - tile.begin) * p.a.group_heads;
  if (steps == 0) return;
  barrier_expect(base + S::keys_full_at, 2 * S::k_bytes);
  load_heads<S::chunks>(&p.own_k, base, base + S::keys_full_at, S::keys, tile.place,
                        place_if(p.a.group_moves_k, tile.group), place_if(p.a.sequence_moves_k, tile.sequence));
  load_heads<S::chunks>(&p.own_v, base + S::k_bytes, base + S::keys_full_at, S::keys, tile.place,
                        place_if(p.a.group_moves_v, tile.group), place_if(p.a.sequence_moves_v, tile.sequence));
  QuerySteps step(tile, p.a.group_heads);
  const int sees = tile.x.queries - tile.x.keys + tile.key - p.a.right;  // of the tile's first key, the first query
  for (int i = 0; i < steps; ++i, step.next(), ring.next()) {
    const int head = tile.group * p.a.group_heads + step.head, query = step.tile * kBackwardQueries;
    const uint32_t full = base + S::full_at + ring.stage * 8, to = base + S::ring_at + ring.stage * S::stage_bytes;
    barrier_wait(base + S::empty_at + ring.stage * 8, ring.parity ^ 1);
    const uint32_t rows = base + S::rows_at + ring.stage * S::rows_bytes;
    int masked[S::warpgroups];
    for (int w = 0; w < S::warpgroups; ++w) {
      const int first = sees + S::row(w);
      masked[w] = query < first + 63 || query + kBackwardQueries > first + p.a.right + p.a.left + 1;
      if (own) masked[w] |= tile.key + S::row(w) + 64 > tile.x.keys;
    }
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(rows + kRowPieceBytes), "r"(masked[0]),
                 "r"(masked[1]), "r"(query - sees), "r"(own ? tile.x.keys - tile.key : query - sees)
                 : "memory");
    barrier_expect(full, S::stage_bytes + kRowPieceBytes);
    load_heads<S::chunks>(&p.a.q, to, full, kBackwardQueries, tile.x.q_first + query, place_if(p.head_moves_q, head),
                          place_if(p.a.sequence_moves_q, tile.sequence));
    load_heads<S::chunks>(&p.dout, to + S::q_bytes, full, kBackwardQueries, tile.x.q_first + query,
                          place_if(p.head_moves_dout, head), place_if(p.sequence_moves_dout, tile.sequence));
    load_bytes(rows, row_piece(p, tile.sequence, head, tile.x, query), full, kRowPieceBytes);
  }
}

// What a sum begins with.
template <int registers>
__device__ __forceinline__ void begin_sums(float (&sums)[registers], const AttentionBackwardPlan &p, const Heads &heads,
                                           const KeyTile &tile, int first_row, int extent) {
  const int row = first_row + row_of(int(threadIdx.x));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool there = p.accumulate && tile.place + row + 8 * h < tile.end_place;
    const char *at = there ? vector_at(heads, tile.sequence, tile.group, tile.place + row + 8 * h) : nullptr;
#pragma unroll
    for (int i = 0; i < registers / 4; ++i) {
      const int column = 8 * i + int(threadIdx.x % 4) * 2;
      float2 x = make_float2(0, 0);
      if (there && column < extent) x = *reinterpret_cast<const float2 *>(at + 4 * column);
      sums[4 * i + 2 * h] = x.x, sums[4 * i + 2 * h + 1] = x.y;
    }
  }
}

// Eight by eight of a step's queries: scores become weights. rows: where the numbers of their rows lie, and what the step
// hides.
// pinned: where they stand.
__device__ __forceinline__ float ex2_pinned(float x) {
  asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
template <int first, int last, bool pinned = false>
__device__ __forceinline__ void weigh_eights(const AttentionBackwardPlan &p, float (&s)[kBackwardQueries / 2],
                                             uint32_t rows) {
  const uint32_t numbers = rows + thread_number() % 4 * 8;
#pragma unroll
  for (int i = first; i < last; ++i) {
    const float2 twos = load_pair(numbers + 32 * i);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float x = fmaf(s[4 * i + 2 * h], p.a.c, -twos.x), y = fmaf(s[4 * i + 2 * h + 1], p.a.c, -twos.y);
      s[4 * i + 2 * h] = pinned ? ex2_pinned(x) : ex2_f32(x);
      s[4 * i + 2 * h + 1] = pinned ? ex2_pinned(y) : ex2_f32(y);
    }
  }
}
// `ahead` eights of them, and all are masked.
template <bool own = false, int ahead = kBackwardQueries / 8>
__device__ __forceinline__ bool weigh_step(const AttentionBackwardPlan &p, float (&s)[kBackwardQueries / 2],
                                           uint32_t rows, int warpgroup, int first_row) {
  const bool masked = __any_sync(0xFFFFFFFFu, load_int(rows + kRowPieceBytes + warpgroup * 4));
  if (masked) {
    const int thread = thread_number(), first = load_int(rows + kRowPieceBytes + 8) + thread % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + row_of(thread) + 8 * h, from = row - first;
      int to = from + p.a.right + p.a.left + 1;
      if (own && row >= load_int(rows + kRowPieceBytes + 12)) to = from;
#pragma unroll
      for (int i = 0; i < kBackwardQueries / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * i + e < from || 8 * i + e >= to) s[4 * i + 2 * h + e] = -INFINITY;
    }
  }
  weigh_eights<0, ahead>(p, s, rows);
  return masked;
}

// to = x y^T of a warpgroup's 64 keys and a step's queries, or of values and dout.
template <class S>
__device__ __forceinline__ void start_products(float (&to)[kBackwardQueries / 2], uint32_t keys, uint32_t queries) {
  const uint64_t x = wgmma_descriptor<true>(keys), y = wgmma_descriptor<true>(queries);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < S::d / kStep; ++i)
    wgmma<S::type, true, true>(to, x + ((i / 4 * S::k_box_bytes + i % 4 * kStep * 2) >> 4),
                               y + ((i / 4 * S::q_box_bytes + i % 4 * kStep * 2) >> 4), i > 0);
  wgmma_commit();
}

// The same of keys in registers, or values: their step i of d.
template <class S>
__device__ __forceinline__ void start_products_of(float (&to)[kBackwardQueries / 2],
                                                  const uint32_t (&keys)[S::d / kStep][4], uint32_t queries) {
  const uint64_t y = wgmma_descriptor<true>(queries);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < S::d / kStep; ++i)
    wgmma_from_registers<S::type, true>(to, keys[i], y + ((i / 4 * S::q_box_bytes + i % 4 * kStep * 2) >> 4), i > 0);
  wgmma_commit();
}
// A warpgroup's 64 keys or values.
template <class S> __device__ __forceinline__ void keep_keys(uint32_t (&to)[S::d / kStep][4], uint32_t keys) {
  const int thread = thread_number() % kWarpgroup, row = thread / 32 * kWarpRows + thread % 16;
#pragma unroll
  for (int i = 0; i < S::d / kStep; ++i)
    load_matrices<false>(
        to[i], keys + i / 4 * S::k_box_bytes + row * kRowBytes + ((i % 4 * 2 + thread % 32 / 16) ^ (row % 8)) * 16);
}

// sums += weights times a step's queries, or dout.
template <class S, int registers>
__device__ __forceinline__ void start_sums(float (&sums)[registers],
                                           const uint32_t (&weights)[kBackwardQueries / 16][4], uint32_t queries) {
  const uint64_t vectors = wgmma_descriptor<false>(queries);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kBackwardQueries / kStep; ++i)
    wgmma_from_registers<S::type, false>(sums, weights[i], vectors + (i * kStep * kRowBytes >> 4), 1);
  wgmma_commit();
}

// Rows of a warp, as bits 4 i of [h], that are not finite: done again.
template <class S>
__device__ __forceinline__ void repair_keys(const AttentionBackwardPlan &p, const KeyTile &tile,
                                            const uint32_t (&again)[2], int first_row, bool of_k, bool of_v,
                                            int begin = 0, int end = S::d) {
  if (!(again[0] | again[1])) return;
  const int first = tile.key + first_row + thread_number() % kWarpgroup / 32 * kWarpRows;
#pragma unroll 1
  for (int i = 0; i < kWarpRows; ++i)
    if ((i < 8 ? again[0] : again[1]) >> i % 8 * 4 & 1)
      careful_key<S::type>(p, tile.x, tile.sequence, tile.group, first + i, of_k, of_v, begin, end);
}

}  // namespace
}  // namespace pydet
