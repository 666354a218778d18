// The gradients of keys and values on Hopper's tensor cores: dk = ds^T q, dv = p^T dout, of one tile of 128 keys after
// another.
//
//   A block is persistent: one warp takes the next tile, of all blocks', and one loads by TMA: the tile's keys and values
//   once, and through a ring tiles of 64 queries with their dout and their rows' numbers, in the order of the sums: blocks
//   of 128 queries ascending, in a block the heads of the group. Two warpgroups have 64 keys each. A step: scores and
//   products of dout and v of the next 64 queries, k q^T and v dout^T, keys down and queries across, so that weights and
//   gradients of scores lie in registers as the left operands of what adds them to dv and dk. Those products run beside
//   the next step's exponentials.
//   Of d = 256 a tile has 64 keys, and the sums of one gradient fill a warpgroup's registers: one has the scores and dv,
//   the other the products of dout and v and dk, and takes the weights from shared memory. So it is below, too, where tiles
//   of 128 keys are too few; there are registers then for the keys, or values, as left operands.
//
// The order of every sum is NUMERICS.md's, "Attention, backward".

#include <algorithm>

#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/backward_steps.h"

namespace pydet {
namespace {

template <Type type_, int d_, bool shared_, int parts_ = 1> struct KeysShape {
  static constexpr Type type = type_;
  static constexpr int d = d_, chunks = d / kBlockK, warpgroups = 2, consumer_warps = warpgroups * 4;
  static constexpr int threads = (warpgroups + 1) * kWarpgroup, producer_registers = 24, consumer_registers = 240;
  static constexpr bool shared = shared_;  // both warpgroups have the same keys, and a gradient each
  static constexpr int parts = parts_;     // blocks that share a gradient's columns
  static constexpr int keys = shared ? 64 : 128, weights_bytes = shared ? 64 * kBackwardQueries * 4 : 0;
  static constexpr int k_box_bytes = keys * kRowBytes, k_bytes = chunks * k_box_bytes;
  static constexpr int q_box_bytes = kBackwardQueries * kRowBytes, q_bytes = chunks * q_box_bytes;
  static constexpr int stages = d == 64 ? 8 : d == 128 ? 4 : 2, stage_bytes = 2 * q_bytes;
  static constexpr int ring_at = 2 * k_bytes, weights_at = ring_at + stages * stage_bytes,
                       rows_at = weights_at + 2 * weights_bytes, rows_bytes = kRowPieceBytes + 16,
                       keys_full_at = rows_at + stages * rows_bytes, keys_empty_at = keys_full_at + 8,
                       full_at = keys_empty_at + 8, empty_at = full_at + stages * 8,
                       weights_full_at = empty_at + stages * 8, weights_empty_at = weights_full_at + 16,
                       tile_full_at = weights_empty_at + 16, tile_empty_at = tile_full_at + 16,
                       tile_asked_at = tile_empty_at + 16, tiles_at = tile_asked_at + 8,
                       shared_bytes = tiles_at + 2 * int(sizeof(KeyTile));
  static_assert(shared_bytes <= kMostSharedBytes, "one block an SM");
  // The first of a warpgroup's keys in the tile.
  static PYDET_HD constexpr int row(int warpgroup) { return shared ? 0 : warpgroup * 64; }
};

template <class S>
__device__ __forceinline__ void multiply_steps(const AttentionBackwardPlan &p, uint32_t base, int warpgroup,
                                               const TileSlots<S, KeyTile> &tiles, int &loaded,
                                               Cursor<S::stages> &next) {
  const bool first_lane = threadIdx.x % 32 == 0;

  float dk[S::d / 2], dv[S::d / 2];
  int steps;
  {
    const auto tile = tiles.look();
    steps = same_in_warp((tile.end - tile.begin) * p.a.group_heads);
    begin_sums(dk, p, p.dk, tile, S::row(warpgroup), p.a.d);
    begin_sums(dv, p, p.dv, tile, S::row(warpgroup), p.a.e);
  }

  float s[kBackwardQueries / 2], g[kBackwardQueries / 2];
  uint32_t p16[kBackwardQueries / 16][4], ds16[kBackwardQueries / 16][4];
  Cursor<S::stages> ring = next;
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
    barrier_wait(base + S::keys_full_at, loaded % 2);
    barrier_wait(base + S::full_at + ring.stage * 8, ring.parity);
    start_products<S>(s, keys, stage(ring.stage));
    start_products<S>(g, keys + S::k_bytes, stage(ring.stage) + S::q_bytes);
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
    if (first_lane) barrier_arrive(base + S::keys_empty_at);
    start_sums<S>(dk, ds16, stage(ring.stage));
    wgmma_wait<0>();
    if (first_lane) barrier_arrive(base + S::empty_at + ring.stage * 8);
    ring.next(), ++loaded;
    next = ring;
  }
  const auto tile = tiles.look();  // again: not kept through the loop
  uint32_t again[2];               // lanes whose row is not finite
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warpgroup * 64 + row_of(thread_number()) + 8 * h, key = tile.key + row, place = tile.place + row;
    const bool own = key >= 0 && key < tile.x.keys, finite = row_is_finite(dk, h) && row_is_finite(dv, h);
    const bool stores = place < tile.end_place && (own ? finite : !p.accumulate);
    store_row<S::type>(dk, h, stores, vector_at(p.dk, tile.sequence, tile.group, place), p.dk.type, own, p.a.d);
    store_row<S::type>(dv, h, stores, vector_at(p.dv, tile.sequence, tile.group, place), p.dv.type, own, p.a.e);
    again[h] = __ballot_sync(0xFFFFFFFFu, own && !finite && thread_number() % 4 == 0);
  }
  repair_keys<S>(p, tile, again, S::row(warpgroup), true, true);
}

// d = 256: this warpgroup's part of what both have the same keys for. The weights' buffers take turns.
template <class S, bool of_values>
__device__ __forceinline__ void multiply_shared(const AttentionBackwardPlan &p, uint32_t base,
                                                const TileSlots<S, KeyTile> &tiles, int &loaded,
                                                Cursor<S::stages> &next, Cursor<2> &next_buffer) {
  const bool first_lane = threadIdx.x % 32 == 0;
  // d <= 128: keys or values in registers, of d = 64 two steps a turn (3 to 5 % faster; of 128 no faster).
  constexpr bool keeps = S::d <= 128, pairs = S::d == 64;
  constexpr int columns = S::d / S::parts;
  const int first_column = S::parts == 1 ? 0 : same_in_warp(tiles.look().part) * columns;
  Heads heads = of_values ? p.dv : p.dk;
  heads.data += first_column * int(size_of(heads.type));
  const int extent = (of_values ? p.a.e : p.a.d) - first_column;
  float sums[columns / 2], x[kBackwardQueries / 2], y[pairs ? kBackwardQueries / 2 : 1];
  uint32_t rounded[kBackwardQueries / 16][4], kept[S::d / kStep][4];
  int steps;
  {
    const auto tile = tiles.look();
    steps = same_in_warp((tile.end - tile.begin) * p.a.group_heads);
    begin_sums(sums, p, heads, tile, 0, extent);
  }
  Cursor<S::stages> ring = next;
  Cursor<2> buffer = next_buffer;
  const auto stage = [&](int i) { return base + S::ring_at + i * S::stage_bytes; };
  using Step = float[kBackwardQueries / 2];
  // Scores, or products of dout and v.
  const auto start = [&](Step &x) {
    barrier_wait(base + S::full_at + ring.stage * 8, ring.parity);
    const uint32_t queries = stage(ring.stage) + (of_values ? 0 : S::q_bytes);
    if constexpr (keeps) start_products_of<S>(x, kept, queries);
    else start_products<S>(x, of_values ? base : base + S::k_bytes, queries);
  };
  // Become weights, which the other warpgroup gets, or by those gradients of scores.
  const auto make = [&](Step &x, int stage) {
    const uint32_t rows = base + S::rows_at + stage * S::rows_bytes;
    const uint32_t weights = base + S::weights_at + buffer.stage * S::weights_bytes + thread_number() % kWarpgroup * 16;
    const uint32_t full = base + S::weights_full_at + buffer.stage * 8,
                   empty = base + S::weights_empty_at + buffer.stage * 8;
    if constexpr (of_values) {
      weigh_step(p, x, rows, 0, 0);
      barrier_wait(empty, buffer.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kBackwardQueries / 8; ++i)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(weights + i * kWarpgroup * 16), "f"(x[4 * i]),
                     "f"(x[4 * i + 1]), "f"(x[4 * i + 2]), "f"(x[4 * i + 3])
                     : "memory");
      __syncwarp();
      if (first_lane) barrier_arrive(full);
    } else {
      const uint32_t numbers = rows + kBackwardQueries * 4 + thread_number() % 4 * 8;
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
  const auto round = [&](const Step &x) {
#pragma unroll
    for (int i = 0; i < kBackwardQueries / 8; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        rounded[i / 2][i % 2 * 2 + h] = rounded_pair<S::type>(x[4 * i + 2 * h], x[4 * i + 2 * h + 1]);
  };
  const auto add = [&](int i) {
    start_sums<S>(
        sums, rounded,
        stage(i) + (of_values ? S::q_bytes : 0) + first_column / kBlockK * S::q_box_bytes + first_column % kBlockK * 2);
  };

  const auto release = [&](int stage) {
    if (first_lane) barrier_arrive(base + S::empty_at + stage * 8);
  };

  if (steps > 0) {
    barrier_wait(base + S::keys_full_at, loaded % 2);
    if constexpr (keeps) keep_keys<S>(kept, of_values ? base : base + S::k_bytes);
    start(x);
    wgmma_wait<0>();
    make(x, ring.stage);
    round(x);
    int i = 1;
    if constexpr (pairs) {
#pragma unroll 1
      for (; i + 1 < steps; i += 2) {
        const int behind = ring.stage;
        ring.next();
        const int first = ring.stage;
        start(x);
        add(behind);
        ring.next();
        start(y);
        wgmma_wait<2>();
        make(x, first);
        wait_apart<1>(i % 4 == 1);
        release(behind);
        round(x);
        add(first);
        wgmma_wait<1>();
        make(y, ring.stage);
        wait_apart<0>(i % 4 == 1);
        release(first);
        round(y);
      }
    }
#pragma unroll 1
    for (; i < steps; ++i) {
      const int behind = ring.stage;
      ring.next();
      start(x);
      add(behind);
      wgmma_wait<1>();
      make(x, ring.stage);
      wait_apart<0>(i % 2);
      release(behind);
      round(x);
    }
    if (first_lane) barrier_arrive(base + S::keys_empty_at);
    add(ring.stage);
    wgmma_wait<0>();
    release(ring.stage);
    ring.next(), ++loaded;
    next = ring, next_buffer = buffer;
  }
  const auto tile = tiles.look();  // again: not kept through the loop
  uint32_t again[2];               // lanes whose row is not finite
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row_of(thread_number()) + 8 * h, key = tile.key + row, place = tile.place + row;
    const bool own = key >= 0 && key < tile.x.keys, finite = row_is_finite(sums, h);
    const bool stores = place < tile.end_place && (own ? finite : !p.accumulate);
    store_row<S::type>(sums, h, stores, vector_at(heads, tile.sequence, tile.group, place), heads.type, own, extent);
    again[h] = __ballot_sync(0xFFFFFFFFu, own && !finite && thread_number() % 4 == 0);
  }
  repair_keys<S>(p, tile, again, 0, !of_values, of_values, first_column, first_column + columns);
}

template <class S>
__global__ void __launch_bounds__(S::threads, 1)
    attention_backward_keys_kernel(const __grid_constant__ AttentionBackwardPlan p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int warp = same_in_warp(int(threadIdx.x) / 32);
  TileSlots<S, KeyTile> tiles{base};
  if (threadIdx.x == S::consumer_warps * 32) {
    barrier_init(base + S::keys_full_at, 1), barrier_init(base + S::keys_empty_at, S::consumer_warps);
    for (int i = 0; i < S::stages; ++i)
      barrier_init(base + S::full_at + i * 8, 1), barrier_init(base + S::empty_at + i * 8, S::consumer_warps);
    for (int i = 0; i < 2; ++i)
      barrier_init(base + S::weights_full_at + i * 8, 4), barrier_init(base + S::weights_empty_at + i * 8, 4);
    tiles.init();
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  int loaded = 0;
  Cursor<S::stages> ring;
  if (warp >= S::consumer_warps) {
    registers_down<S::producer_registers>();
    if (warp == S::consumer_warps + 1)
      tiles.take(p.taken + 1, p.key_numbers, true, [&](int number, KeyTile *tile) {
        const bool more = key_tile_of<S::keys>(p, number / S::parts, tile);
        tile->part = number % S::parts;
        return more;
      });
    else if (warp == S::consumer_warps && threadIdx.x % 32 == 0)
      tiles.load_each([&](const KeyTile &tile) {
        if (tile.begin == tile.end) return;
        barrier_wait(base + S::keys_empty_at, loaded++ % 2 ^ 1);
        load_steps<S>(p, base, tile, ring);
      });
  } else {
    registers_up<S::consumer_registers>();
    Cursor<2> buffer;
    for (; tiles.wait(); ++tiles.turn) {
      if constexpr (!S::shared) multiply_steps<S>(p, base, warp / 4, tiles, loaded, ring);
      else if (warp / 4 == 0) multiply_shared<S, true>(p, base, tiles, loaded, ring, buffer);
      else multiply_shared<S, false>(p, base, tiles, loaded, ring, buffer);
      tiles.give_back();
    }
  }
}

template <Type type, class Function> pydet_status with_shape(const AttentionBackwardPlan &plan, Function function) {
  const int most = std::max(plan.a.d, plan.a.e);
  if (most > 128) return function(KeysShape<type, 256, true>());
  if (most > 64)
    return plan.cut == kWideKeys     ? function(KeysShape<type, 128, false>())
           : plan.cut == kNarrowKeys ? function(KeysShape<type, 128, true>())
                                     : function(KeysShape<type, 128, true, 2>());
  return plan.cut == kWideKeys     ? function(KeysShape<type, 64, false>())
         : plan.cut == kNarrowKeys ? function(KeysShape<type, 64, true>())
                                   : function(KeysShape<type, 64, true, 2>());
}

}  // namespace

#ifndef PYDET_ATTENTION_TYPE
#error "one object a type: 1 bf16, 2 fp16"
#endif
template <Type type> pydet_status attention_backward_keys(const Launch &launch, const AttentionBackwardPlan &plan) {
  return with_shape<type>(plan, [&](auto shape) {
    using S = decltype(shape);
    Launch one = launch;
    one.grid = dim3(unsigned(plan.key_blocks)), one.block = dim3(S::threads);
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
