// The gradients of keys and values on Hopper's tensor cores: dk = ds^T q, dv = p^T dout, a block a tile of 128 keys.
//
//   One warp loads by TMA: the tile's keys and values once, then through a ring tiles of 64 queries with their dout and
//   their rows' numbers, in the order of the sums: blocks of 128 queries ascending, in a block the heads of the group. Two
//   warpgroups have 64 keys each. A step: scores and products of dout and v of the next 64 queries, k q^T and v dout^T,
//   keys down and queries across, so that weights and gradients of scores lie in registers as the left operands of what
//   adds them to dv and dk. Those products run beside the next step's exponentials.
//   Of d = 256 a tile has 64 keys, and the sums of one gradient fill a warpgroup's registers: one has the scores and dv,
//   the other the products of dout and v and dk, and takes the weights from shared memory.
//
// The order of every sum is NUMERICS.md's, "Attention, backward".

#include <algorithm>

#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/backward_row.h"

namespace pydet {
namespace {

// A tile's own keys, and the queries that see any of them.
struct KeyTile {
  int sequence, group;
  int key;               // the first, of the sequence's own; may be negative
  int place, end_place;  // of the first in its storage; where what the block writes ends
  int begin, end;        // tiles of 64 queries
  Lengths x;
};
template <Type type_, int d_, bool shared_> struct KeysShape {
  static constexpr Type type = type_;
  static constexpr int d = d_, chunks = d / kBlockK, warpgroups = 2, consumer_warps = warpgroups * 4;
  static constexpr int threads = (warpgroups + 1) * kWarpgroup, producer_registers = 24, consumer_registers = 240;
  static constexpr bool shared = shared_;  // both warpgroups have the same keys, and a gradient each
  static constexpr int keys = shared ? 64 : 128, weights_bytes = shared ? 64 * kBackwardQueries * 4 : 0;
  static constexpr int k_box_bytes = keys * kRowBytes, k_bytes = chunks * k_box_bytes;
  static constexpr int q_box_bytes = kBackwardQueries * kRowBytes, q_bytes = chunks * q_box_bytes;
  static constexpr int stages = d == 64 ? 8 : d == 128 ? 4 : 2, stage_bytes = 2 * q_bytes;
  static constexpr int ring_at = 2 * k_bytes, weights_at = ring_at + stages * stage_bytes,
                       rows_at = weights_at + 2 * weights_bytes, rows_bytes = kRowPieceBytes + 16,
                       keys_full_at = rows_at + stages * rows_bytes, full_at = keys_full_at + 8,
                       empty_at = full_at + stages * 8, weights_full_at = empty_at + stages * 8,
                       weights_empty_at = weights_full_at + 16, tile_at = weights_empty_at + 16,
                       shared_bytes = tile_at + int(sizeof(KeyTile));
  static_assert(shared_bytes <= kMostSharedBytes, "one block an SM");
  // The first of a warpgroup's keys in the tile.
  static PYDET_HD constexpr int row(int warpgroup) { return shared ? 0 : warpgroup * 64; }
};

template <int keys> __device__ __forceinline__ bool key_tile_of(const AttentionBackwardPlan &p, KeyTile *to) {
  BackwardTile tile;
  const bool packed = p.a.k_start != nullptr;
  const auto tiles = [&](const Lengths &x) { return ((packed ? x.keys : p.a.keys) + keys - 1) / keys; };
  if (!tile_of<false>(p.a, int(blockIdx.x), p.a.heads / p.a.group_heads, tiles, &tile)) return false;
  const Lengths x = from_first_query(p.a, tile.x);
  const int base = packed ? x.k_first : 0;
  to->sequence = same_in_warp(tile.sequence), to->group = same_in_warp(tile.head), to->x = x;
  to->place = same_in_warp(base + tile.tile * keys);
  to->end_place = same_in_warp(packed ? x.k_first + x.keys : p.a.keys);
  to->key = same_in_warp(to->place - x.k_first);
  const int first = max(to->key, 0), last = min(to->key + keys, x.keys) - 1, ahead = x.queries - x.keys;
  const int begin = clamped(first + ahead - p.a.right, 0, x.queries),
            end = clamped(last + ahead + p.a.left + 1, 0, x.queries);
  const bool none = first > last || begin >= end;
  to->begin = same_in_warp(none ? 0 : begin / kBackwardQueries);
  to->end = same_in_warp(none ? 0 : (end + kBackwardQueries - 1) / kBackwardQueries);
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

template <class S> __device__ __forceinline__ void load_steps(const AttentionBackwardPlan &p, uint32_t base,
                                                              const KeyTile &tile) {
  const int steps = (tile.end - tile.begin) * p.a.group_heads;
  if (steps == 0) return;
  barrier_expect(base + S::keys_full_at, 2 * S::k_bytes);
  load_heads<S::chunks>(&p.own_k, base, base + S::keys_full_at, S::keys, tile.place,
                        place_if(p.a.group_moves_k, tile.group), place_if(p.a.sequence_moves_k, tile.sequence));
  load_heads<S::chunks>(&p.own_v, base + S::k_bytes, base + S::keys_full_at, S::keys, tile.place,
                        place_if(p.a.group_moves_v, tile.group), place_if(p.a.sequence_moves_v, tile.sequence));
  Cursor<S::stages> ring;
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
    }
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %3};" ::"r"(rows + kRowPieceBytes), "r"(masked[0]),
                 "r"(masked[1]), "r"(query - sees)
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

// Scores of a step's queries become weights. rows: where the numbers of their rows lie, and what the step hides.
__device__ __forceinline__ bool weigh_step(const AttentionBackwardPlan &p, float (&s)[kBackwardQueries / 2],
                                           uint32_t rows, int warpgroup, int first_row) {
  const bool masked = __any_sync(0xFFFFFFFFu, load_int(rows + kRowPieceBytes + warpgroup * 4));
  if (masked) {
    const int thread = thread_number(), first = load_int(rows + kRowPieceBytes + 8) + thread % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int from = first_row + row_of(thread) + 8 * h - first, to = from + p.a.right + p.a.left + 1;
#pragma unroll
      for (int i = 0; i < kBackwardQueries / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * i + e < from || 8 * i + e >= to) s[4 * i + 2 * h + e] = -INFINITY;
    }
  }
  const uint32_t numbers = rows + thread_number() % 4 * 8;
#pragma unroll
  for (int i = 0; i < kBackwardQueries / 8; ++i) {
    const float2 twos = load_pair(numbers + 32 * i);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      s[4 * i + 2 * h] = ex2_f32(fmaf(s[4 * i + 2 * h], p.a.c, -twos.x));
      s[4 * i + 2 * h + 1] = ex2_f32(fmaf(s[4 * i + 2 * h + 1], p.a.c, -twos.y));
    }
  }
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

// sums += weights times a step's queries, or dout.
template <class S>
__device__ __forceinline__ void start_sums(float (&sums)[S::d / 2], const uint32_t (&weights)[kBackwardQueries / 16][4],
                                           uint32_t queries) {
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
                                            const uint32_t (&again)[2], int first_row, bool of_k, bool of_v) {
  if (!(again[0] | again[1])) return;
  const int first = tile.key + first_row + thread_number() % kWarpgroup / 32 * kWarpRows;
#pragma unroll 1
  for (int i = 0; i < kWarpRows; ++i)
    if ((i < 8 ? again[0] : again[1]) >> i % 8 * 4 & 1)
      careful_key<S::type>(p, tile.x, tile.sequence, tile.group, first + i, of_k, of_v);
}

template <class S>
__device__ __forceinline__ void multiply_steps(const AttentionBackwardPlan &p, uint32_t base, int warpgroup) {
  const bool first_lane = threadIdx.x % 32 == 0;

  float dk[S::d / 2], dv[S::d / 2];
  int steps;
  {
    const auto tile = load_struct<KeyTile>(base + S::tile_at);
    steps = same_in_warp((tile.end - tile.begin) * p.a.group_heads);
    begin_sums(dk, p, p.dk, tile, S::row(warpgroup), p.a.d);
    begin_sums(dv, p, p.dv, tile, S::row(warpgroup), p.a.e);
  }

  float s[kBackwardQueries / 2], g[kBackwardQueries / 2];
  uint32_t p16[kBackwardQueries / 16][4], ds16[kBackwardQueries / 16][4];
  Cursor<S::stages> ring;

  const uint32_t keys = base + S::row(warpgroup) * kRowBytes;
  const auto stage = [&](int i) { return base + S::ring_at + i * S::stage_bytes; };
  const auto rows = [&] { return base + S::rows_at + ring.stage * S::rows_bytes; };
  // They add to dv. Products of dout and v, which are on their way, become gradients of scores.
  const auto derive = [&] {
    const uint32_t numbers = rows() + kBackwardQueries * 4 + thread_number() % 4 * 8;
#pragma unroll
    for (int i = 0; i < kBackwardQueries / 8; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        p16[i / 2][i % 2 * 2 + h] = rounded_pair<S::type>(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]);
    start_sums<S>(dv, p16, stage(ring.stage) + S::q_bytes);
    wgmma_wait<S::d == 64>();
#pragma unroll
    for (int i = 0; i < kBackwardQueries / 8; ++i) {
      const float2 delta = load_pair(numbers + 32 * i);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        ds16[i / 2][i % 2 * 2 + h] =
            rounded_pair<S::type>(s[4 * i + 2 * h] * fmaf(g[4 * i + 2 * h], p.scale, -delta.x),
                                  s[4 * i + 2 * h + 1] * fmaf(g[4 * i + 2 * h + 1], p.scale, -delta.y));
    }
    wgmma_wait<0>();
  };

  if (steps > 0) {
    barrier_wait(base + S::keys_full_at, 0);
    barrier_wait(base + S::full_at, 0);
    start_products<S>(s, keys, stage(0));
    start_products<S>(g, keys + S::k_bytes, stage(0) + S::q_bytes);
    wgmma_wait<1>();
    weigh_step(p, s, rows(), warpgroup, S::row(warpgroup));
    derive();
#pragma unroll 1
    for (int i = 1; i < steps; ++i) {
      const int behind = ring.stage;
      ring.next();
      barrier_wait(base + S::full_at + ring.stage * 8, ring.parity);
      start_products<S>(s, keys, stage(ring.stage));
      start_sums<S>(dk, ds16, stage(behind));
      start_products<S>(g, keys + S::k_bytes, stage(ring.stage) + S::q_bytes);
      wgmma_wait<2>();
      const bool masked = weigh_step(p, s, rows(), warpgroup, S::row(warpgroup));
      wait_apart<1>(masked);
      if (first_lane) barrier_arrive(base + S::empty_at + behind * 8);
      derive();
    }
    start_sums<S>(dk, ds16, stage(ring.stage));
    wgmma_wait<0>();
  }
  const auto tile = load_struct<KeyTile>(base + S::tile_at);  // again: not kept through the loop
  uint32_t again[2];                                          // lanes whose row is not finite
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warpgroup * 64 + row_of(thread_number()) + 8 * h, key = tile.key + row, place = tile.place + row;
    const bool own = key >= 0 && key < tile.x.keys, finite = row_is_finite(dk, h) && row_is_finite(dv, h);
    if (place < tile.end_place && (own ? finite : !p.accumulate)) {
      store_row<S::type>(dk, h, vector_at(p.dk, tile.sequence, tile.group, place), p.dk.type, own, p.a.d);
      store_row<S::type>(dv, h, vector_at(p.dv, tile.sequence, tile.group, place), p.dv.type, own, p.a.e);
    }
    again[h] = __ballot_sync(0xFFFFFFFFu, own && !finite && thread_number() % 4 == 0);
  }
  repair_keys<S>(p, tile, again, S::row(warpgroup), true, true);
}

// d = 256: this warpgroup's part of what both have the same keys for. The weights' buffers take turns.
template <class S, bool of_values>
__device__ __forceinline__ void multiply_shared(const AttentionBackwardPlan &p, uint32_t base) {
  const bool first_lane = threadIdx.x % 32 == 0;
  const Heads &heads = of_values ? p.dv : p.dk;
  const int extent = of_values ? p.a.e : p.a.d;
  float sums[S::d / 2], x[kBackwardQueries / 2];
  uint32_t rounded[kBackwardQueries / 16][4];
  int steps;
  {
    const auto tile = load_struct<KeyTile>(base + S::tile_at);
    steps = same_in_warp((tile.end - tile.begin) * p.a.group_heads);
    begin_sums(sums, p, heads, tile, 0, extent);
  }
  Cursor<S::stages> ring;
  Cursor<2> buffer;
  const auto stage = [&](int i) { return base + S::ring_at + i * S::stage_bytes; };
  const auto rows = [&] { return base + S::rows_at + ring.stage * S::rows_bytes; };
  // Scores, or products of dout and v.
  const auto start = [&] {
    start_products<S>(x, of_values ? base : base + S::k_bytes, stage(ring.stage) + (of_values ? 0 : S::q_bytes));
  };
  // Become weights, which the other warpgroup gets, or by those gradients of scores.
  const auto make = [&] {
    const uint32_t weights = base + S::weights_at + buffer.stage * S::weights_bytes + thread_number() % kWarpgroup * 16;
    const uint32_t full = base + S::weights_full_at + buffer.stage * 8,
                   empty = base + S::weights_empty_at + buffer.stage * 8;
    if constexpr (of_values) {
      weigh_step(p, x, rows(), 0, 0);
      barrier_wait(empty, buffer.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kBackwardQueries / 8; ++i)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(weights + i * kWarpgroup * 16), "f"(x[4 * i]),
                     "f"(x[4 * i + 1]), "f"(x[4 * i + 2]), "f"(x[4 * i + 3])
                     : "memory");
      __syncwarp();
      if (first_lane) barrier_arrive(full);
    } else {
      const uint32_t numbers = rows() + kBackwardQueries * 4 + thread_number() % 4 * 8;
      barrier_wait(full, buffer.parity);
#pragma unroll
      for (int i = 0; i < kBackwardQueries / 8; ++i) {
        float4 w;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(w.x), "=f"(w.y), "=f"(w.z), "=f"(w.w)
                     : "r"(weights + i * kWarpgroup * 16)
                     : "memory");
        const float2 delta = load_pair(numbers + 32 * i);
        x[4 * i] = w.x * fmaf(x[4 * i], p.scale, -delta.x);
        x[4 * i + 1] = w.y * fmaf(x[4 * i + 1], p.scale, -delta.y);
        x[4 * i + 2] = w.z * fmaf(x[4 * i + 2], p.scale, -delta.x);
        x[4 * i + 3] = w.w * fmaf(x[4 * i + 3], p.scale, -delta.y);
      }
      __syncwarp();
      if (first_lane) barrier_arrive(empty);
    }
    buffer.next();
  };
  const auto round = [&] {
#pragma unroll
    for (int i = 0; i < kBackwardQueries / 8; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        rounded[i / 2][i % 2 * 2 + h] = rounded_pair<S::type>(x[4 * i + 2 * h], x[4 * i + 2 * h + 1]);
  };
  const auto add = [&](int i) { start_sums<S>(sums, rounded, stage(i) + (of_values ? S::q_bytes : 0)); };

  if (steps > 0) {
    barrier_wait(base + S::keys_full_at, 0);
    barrier_wait(base + S::full_at, 0);
    start();
    wgmma_wait<0>();
    make();
    round();
#pragma unroll 1
    for (int i = 1; i < steps; ++i) {
      const int behind = ring.stage;
      ring.next();
      barrier_wait(base + S::full_at + ring.stage * 8, ring.parity);
      start();
      add(behind);
      wgmma_wait<1>();
      make();
      wait_apart<0>(i % 2);
      if (first_lane) barrier_arrive(base + S::empty_at + behind * 8);
      round();
    }
    add(ring.stage);
    wgmma_wait<0>();
  }
  const auto tile = load_struct<KeyTile>(base + S::tile_at);  // again: not kept through the loop
  uint32_t again[2];                                          // lanes whose row is not finite
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row_of(thread_number()) + 8 * h, key = tile.key + row, place = tile.place + row;
    const bool own = key >= 0 && key < tile.x.keys, finite = row_is_finite(sums, h);
    if (place < tile.end_place && (own ? finite : !p.accumulate))
      store_row<S::type>(sums, h, vector_at(heads, tile.sequence, tile.group, place), heads.type, own, extent);
    again[h] = __ballot_sync(0xFFFFFFFFu, own && !finite && thread_number() % 4 == 0);
  }
  repair_keys<S>(p, tile, again, 0, !of_values, of_values);
}

template <class S>
__global__ void __launch_bounds__(S::threads, 1)
    attention_backward_keys_kernel(const __grid_constant__ AttentionBackwardPlan p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int warp = same_in_warp(int(threadIdx.x) / 32);
  if (threadIdx.x == S::consumer_warps * 32) {
    barrier_init(base + S::keys_full_at, 1);
    for (int i = 0; i < S::stages; ++i)
      barrier_init(base + S::full_at + i * 8, 1), barrier_init(base + S::empty_at + i * 8, S::consumer_warps);
    for (int i = 0; i < 2; ++i)
      barrier_init(base + S::weights_full_at + i * 8, 4), barrier_init(base + S::weights_empty_at + i * 8, 4);
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  {
    KeyTile tile;
    if (!key_tile_of<S::keys>(p, &tile)) return;
    if (threadIdx.x == 0) store_struct(base + S::tile_at, tile);
  }
  __syncthreads();
  if (warp >= S::consumer_warps) {
    registers_down<S::producer_registers>();
    if (warp == S::consumer_warps && threadIdx.x % 32 == 0)
      load_steps<S>(p, base, load_struct<KeyTile>(base + S::tile_at));
  } else {
    registers_up<S::consumer_registers>();
    if constexpr (!S::shared) multiply_steps<S>(p, base, warp / 4);
    else if (warp / 4 == 0) multiply_shared<S, true>(p, base);
    else multiply_shared<S, false>(p, base);
  }
}

template <Type type, class Function> pydet_status with_shape(const AttentionBackwardPlan &plan, Function function) {
  const int most = std::max(plan.a.d, plan.a.e);
  if (plan.narrow && most <= 128)
    return most <= 64 ? function(KeysShape<type, 64, true>()) : function(KeysShape<type, 128, true>());
  return most <= 64    ? function(KeysShape<type, 64, false>())
         : most <= 128 ? function(KeysShape<type, 128, false>())
                       : function(KeysShape<type, 256, true>());
}

}  // namespace

#ifndef PYDET_ATTENTION_TYPE
#error "one object a type: 1 bf16, 2 fp16"
#endif
template <Type type> pydet_status attention_backward_keys(const Launch &launch, const AttentionBackwardPlan &plan) {
  return with_shape<type>(plan, [&](auto shape) {
    using S = decltype(shape);
    Launch one = launch;
    one.block = dim3(S::threads);
    one.shared_bytes = S::shared_bytes;
    one.loaded = true;
    return pydet::launch(one, attention_backward_keys_kernel<S>, plan);
  });
}
template <Type type> pydet_status load_attention_backward_keys(const char *name, const AttentionBackwardPlan &plan) {
  return with_shape<type>(plan, [&](auto shape) {
    using S = decltype(shape);
    return load(name, attention_backward_keys_kernel<S>, S::shared_bytes);
  });
}

template pydet_status attention_backward_keys<Type(PYDET_ATTENTION_TYPE)>(const Launch &,
                                                                          const AttentionBackwardPlan &);
template pydet_status load_attention_backward_keys<Type(PYDET_ATTENTION_TYPE)>(const char *,
                                                                               const AttentionBackwardPlan &);

}  // namespace pydet
