// The gradient of queries on Hopper's tensor cores: dq = ds k, of one tile of 128 queries of one head after another.
//
//   A block is persistent. One warp takes the next tile, of all blocks', and one loads by TMA: the tile's queries and
//   their dout once, and through a ring the blocks of keys and of values that the tile sees, from the last to the first.
//   They run ahead: the first blocks of the next tile come while results leave. Two warpgroups have 64 queries each. A
//   step: scores and products of dout and v of a block of 128 keys, of which the gradients of scores are made in
//   registers, and their product with the block's keys, a sum of its own, which runs beside the next block's scores and
//   is then added to dq.
//
// The order of every sum is NUMERICS.md's, "Attention, backward".

#include <algorithm>

#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/backward_row.h"

namespace pydet {
namespace {

// A tile's queries, and the blocks of keys that any of them sees.
struct QueryTile {
  int sequence, head, query, begin, end;
  Lengths x;
};

template <Type type_, int d_> struct QueriesShape {
  static constexpr Type type = type_;
  static constexpr int d = d_, chunks = d / kBlockK, warpgroups = 2, consumer_warps = warpgroups * 4, n = block_keys(d);
  static constexpr int threads = (warpgroups + 1) * kWarpgroup, producer_registers = 24, consumer_registers = 240;
  static constexpr int q_box_bytes = 64 * kRowBytes, q_bytes = chunks * q_box_bytes;  // of a warpgroup
  static constexpr int box_bytes = n * kRowBytes, stage_bytes = chunks * box_bytes,
                       stages = d == 64    ? 8
                                : d == 128 ? 4
                                           : 3;
  static constexpr int sum = d == 64 ? 64 : n;  // columns of dq of which the sums of a block are made at a time
  static constexpr int dout_at = warpgroups * q_bytes, ring_at = 2 * dout_at, full_at = ring_at + stages * stage_bytes,
                       empty_at = full_at + stages * 8, queries_full_at = empty_at + stages * 8,
                       queries_empty_at = queries_full_at + 8, tile_full_at = queries_empty_at + 8,
                       tile_empty_at = tile_full_at + 16, tile_asked_at = tile_empty_at + 16,
                       tiles_at = tile_asked_at + 8, shared_bytes = tiles_at + 2 * int(sizeof(QueryTile));
  static_assert(shared_bytes <= kMostSharedBytes, "one block an SM");
};

__device__ __forceinline__ Job job_of_tile(const QueryTile &tile) {
  Job job = {};
  job.queries = tile.x.queries, job.keys = tile.x.keys;
  return job;
}

// All lanes of a warp. False: there are no more tiles.
template <class S>
__device__ __forceinline__ bool query_tile_of(const AttentionBackwardPlan &p, int number, QueryTile *to) {
  BackwardTile tile;
  const auto tiles = [](const Lengths &x) { return backward_tiles(x.queries); };
  if (!tile_of<true>(p.a, number, p.a.heads, tiles, &tile)) return false;
  to->sequence = tile.sequence, to->head = tile.head, to->query = tile.tile * kBackwardTile, to->x = tile.x;
  const Keys keys = keys_of(p.a, job_of_tile(*to), to->query, min(to->query + kBackwardTile, tile.x.queries) - 1);
  const bool none = keys.begin >= keys.end;
  to->begin = none ? 0 : keys.begin / S::n, to->end = none ? 0 : (keys.end + S::n - 1) / S::n;
  return true;
}

// loaded: tiles before it that had keys.
template <class S>
__device__ __forceinline__ void load_blocks(const AttentionBackwardPlan &p, uint32_t base, const QueryTile &tile,
                                            int loaded, Cursor<S::stages> &ring) {
  const int group = tile.head / p.a.group_heads;
  const auto load = [&](const CUtensorMap *map, bool group_moves, bool sequence_moves, int block) {
    const uint32_t full = base + S::full_at + ring.stage * 8;
    barrier_wait(base + S::empty_at + ring.stage * 8, ring.parity ^ 1);
    barrier_expect(full, S::stage_bytes);
    load_heads<S::chunks>(map, base + S::ring_at + ring.stage * S::stage_bytes, full, S::n,
                          tile.x.k_first + block * S::n, place_if(group_moves, group),
                          place_if(sequence_moves, tile.sequence));
    ring.next();
  };
  for (int block = tile.end - 1; block >= tile.begin; --block) {
    load(&p.a.k, p.a.group_moves_k, p.a.sequence_moves_k, block);
    if (block == tile.end - 1) {
      const uint32_t queries_full = base + S::queries_full_at;
      barrier_wait(base + S::queries_empty_at, loaded % 2 ^ 1);
      barrier_expect(queries_full, 2 * S::dout_at);
#pragma unroll
      for (int w = 0; w < S::warpgroups; ++w) {
        const int token = tile.x.q_first + tile.query + w * 64;
        load_heads<S::chunks>(&p.a.q, base + w * S::q_bytes, queries_full, 64, token,
                              place_if(p.head_moves_q, tile.head), place_if(p.a.sequence_moves_q, tile.sequence));
        load_heads<S::chunks>(&p.dout, base + S::dout_at + w * S::q_bytes, queries_full, 64, token,
                              place_if(p.head_moves_dout, tile.head), place_if(p.sequence_moves_dout, tile.sequence));
      }
    }
    load(&p.a.v, p.a.group_moves_v, p.a.sequence_moves_v, block);
  }
}

template <class S>
__device__ __forceinline__ void multiply_blocks(const AttentionBackwardPlan &p, uint32_t base, int warpgroup,
                                                const TileSlots<S, QueryTile> &tiles, int &loaded,
                                                Cursor<S::stages> &ring) {
  const bool first_lane = threadIdx.x % 32 == 0;
  float dq[S::d / 2], twos[2], delta[2];
  int block, begin, whole_begin, whole_end;
  {
    const auto tile = tiles.look();
    begin = same_in_warp(tile.begin), block = same_in_warp(tile.end) - 1;
    const Job job = job_of_tile(tile);
    const int last = tile.x.queries - 1, from = min(tile.query + warpgroup * 64, last), to = min(from + 63, last);
    whole_begin = same_in_warp(keys_of(p.a, job, to, to).begin);
    whole_end = same_in_warp(keys_of(p.a, job, from, from).end);
    const Lengths seen = from_first_query(p.a, tile.x);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = tile.query + warpgroup * 64 + row_of(int(threadIdx.x)) + 8 * h + seen.queries - tile.x.queries;
      twos[h] = INFINITY, delta[h] = 0;
      if (query < 0 || query >= seen.queries) continue;
      const float *at = row_piece(p, tile.sequence, tile.head, seen, query / kBackwardQueries * kBackwardQueries) +
                        query % kBackwardQueries;
      twos[h] = at[0], delta[h] = at[kBackwardQueries];
    }
  }
#pragma unroll
  for (int i = 0; i < S::d / 2; ++i) dq[i] = 0;

  // Of d = 128 and 256 the sums of a block take the places of its scores and products: there are no registers for more.
  float s[S::n / 2], g[S::n / 2];
  uint32_t ds16[S::n / 16][4];
  Cursor<S::stages> keys = ring, values = keys;
  values.next();
  const auto multiply = [&](float(&to)[S::n / 2], uint32_t queries, const Cursor<S::stages> &ring) {
    make_opaque(queries);  // else its descriptors are kept in registers
    const uint64_t x = wgmma_descriptor<true>(uint32_t(same_in_warp(int(queries)))),
                   y = wgmma_descriptor<true>(base + S::ring_at + ring.stage * S::stage_bytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::d / kStep; ++i)
      wgmma<S::type, true, true>(to, x + ((i / 4 * S::q_box_bytes + i % 4 * kStep * 2) >> 4),
                                 y + ((i / 4 * S::box_bytes + i % 4 * kStep * 2) >> 4), i > 0);
    wgmma_commit();
  };
  const auto wait = [&](const Cursor<S::stages> &ring) {
    barrier_wait(base + S::full_at + ring.stage * 8, ring.parity);
  };
  const auto release = [&](int stage) {
    if (first_lane) barrier_arrive(base + S::empty_at + stage * 8);
  };
  const auto start_scores = [&] {
    wait(keys);
    multiply(s, base + warpgroup * S::q_bytes, keys);
  };
  const auto start_products = [&] {
    wait(values);
    multiply(g, base + S::dout_at + warpgroup * S::q_bytes, values);
  };
  // Of s, and of g behind it, both on their way.
  const auto weigh = [&] {
    wgmma_wait<1>();
    const bool masked = block * S::n < whole_begin || (block + 1) * S::n > whole_end;
    if (masked) {
      const auto tile = tiles.look();
      const int thread = thread_number(), first = block * S::n + thread % 4 * 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int query = min(tile.query + warpgroup * 64 + row_of(thread) + 8 * h, tile.x.queries - 1);
        const Keys seen = keys_of(p.a, job_of_tile(tile), query, query);
        const int from = seen.begin - first, to = seen.end - first;
#pragma unroll
        for (int i = 0; i < S::n / 8; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (8 * i + e < from || 8 * i + e >= to) s[4 * i + 2 * h + e] = -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < S::n / 2; ++i) s[i] = ex2_f32(fmaf(s[i], p.a.c, -twos[i / 2 % 2]));
    wait_apart<0>(masked);
    release(values.stage);
#pragma unroll
    for (int i = 0; i < S::n / 2; i += 2) {
      const int h = i / 2 % 2;
      ds16[i / 8][i / 2 % 4] =
          rounded_pair<S::type>(s[i] * fmaf(g[i], p.scale, -delta[h]), s[i + 1] * fmaf(g[i + 1], p.scale, -delta[h]));
    }
  };
  const auto start_sum = [&](float(&sum)[S::sum / 2], int stage, int part) {
    const uint64_t k = wgmma_descriptor<false, 64, S::n>(base + S::ring_at + stage * S::stage_bytes +
                                                         part * (S::sum / kBlockK) * S::box_bytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::n / kStep; ++i)
      wgmma_from_registers<S::type, false>(sum, ds16[i], k + (i * kStep * kRowBytes >> 4), i > 0);
    wgmma_commit();
  };
  const auto add = [&](const float(&sum)[S::sum / 2], int part) {
#pragma unroll
    for (int i = 0; i < S::sum / 2; ++i) dq[part * (S::sum / 2) + i] = dq[part * (S::sum / 2) + i] + sum[i];
  };
  const auto add_block = [&](int stage, float(&last)[S::sum / 2], float(&other)[S::sum / 2]) {
    constexpr int parts = S::d / S::sum;
    start_sum(parts % 2 ? last : other, stage, 0);
#pragma unroll
    for (int part = 1; part < parts; ++part) {
      start_sum((parts - part) % 2 ? last : other, stage, part);
      wgmma_wait<1>();
      add((parts - part) % 2 ? other : last, part - 1);
    }
    wgmma_wait<0>();
    add(last, parts - 1);
  };

  if (block >= begin) {
    barrier_wait(base + S::queries_full_at, loaded % 2);
    start_scores();
    start_products();
    weigh();
#pragma unroll 1
    for (--block; block >= begin; --block) {
      const int behind = keys.stage;
      keys.next(), keys.next(), values.next(), values.next();
      if constexpr (S::d == 64) {  // of others there are no registers for both
        float sum[S::sum / 2];
        start_sum(sum, behind, 0);
        start_scores();
        wgmma_wait<1>();
        release(behind);
        add(sum, 0);
      } else {
        add_block(behind, g, s);
        release(behind);
        start_scores();
      }
      start_products();
      weigh();
    }
    if (first_lane) barrier_arrive(base + S::queries_empty_at);
    if constexpr (S::d == 64) {
      float sum[S::sum / 2];
      add_block(keys.stage, sum, sum);
    } else {
      add_block(keys.stage, g, s);
    }
    release(keys.stage);
    keys.next(), keys.next();
    ring = keys, ++loaded;
  }
  const auto tile = tiles.look();  // again: not kept through the loop
  store_queries<S::type>(p, dq, tile.x, tile.sequence, tile.head, tile.query + warpgroup * 64 + row_of(thread_number()),
                         S::n);
}

template <class S>
__global__ void __launch_bounds__(S::threads, 1)
    attention_backward_queries_kernel(const __grid_constant__ AttentionBackwardPlan p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int warp = same_in_warp(int(threadIdx.x) / 32);
  TileSlots<S, QueryTile> tiles{base};
  if (threadIdx.x == S::consumer_warps * 32) {
    barrier_init(base + S::queries_full_at, 1), barrier_init(base + S::queries_empty_at, S::consumer_warps);
    for (int i = 0; i < S::stages; ++i)
      barrier_init(base + S::full_at + i * 8, 1), barrier_init(base + S::empty_at + i * 8, S::consumer_warps);
    tiles.init();
    fence_barrier_init();
  }
  __syncthreads();
  // Behind the kernel of keys, which has begun in all of its blocks, the numbers of rows are there. This kernel must not
  // end first; for that one block waits.
  if (!p.behind_keys) wait_for_previous_kernel();
  let_next_kernel_start();
  if (warp >= S::consumer_warps) {
    registers_down<S::producer_registers>();
    if (warp == S::consumer_warps + 1) {
      tiles.take(p.taken, p.query_numbers, !p.behind_keys,
                 [&](int number, QueryTile *tile) { return query_tile_of<S>(p, number, tile); });
    } else if (warp == S::consumer_warps && threadIdx.x % 32 == 0) {
      int loaded = 0;
      Cursor<S::stages> ring;
      tiles.load_each([&](const QueryTile &tile) {
        if (tile.begin < tile.end) load_blocks<S>(p, base, tile, loaded++, ring);
      });
    }
    if (blockIdx.x == 0) wait_for_previous_kernel();
  } else {
    registers_up<S::consumer_registers>();
    int loaded = 0;
    Cursor<S::stages> ring;
    for (; tiles.wait(); ++tiles.turn) {
      multiply_blocks<S>(p, base, warp / 4, tiles, loaded, ring);
      tiles.give_back();
    }
  }
}

// Of a problem's width.
template <Type type, class Run> pydet_status with_shape(const AttentionBackwardPlan &plan, Run run) {
  const int most = std::max(plan.a.d, plan.a.e);
  return most <= 64    ? run(QueriesShape<type, 64>())
         : most <= 128 ? run(QueriesShape<type, 128>())
                       : run(QueriesShape<type, 256>());
}

}  // namespace

#ifndef PYDET_ATTENTION_TYPE
#error "one object a type: 1 bf16, 2 fp16"
#endif
template <Type type> pydet_status attention_backward_queries(const Launch &launch, const AttentionBackwardPlan &plan) {
  return with_shape<type>(plan, [&](auto shape) {
    using S = decltype(shape);
    Launch one = launch;
    one.grid = dim3(unsigned(plan.query_blocks)), one.block = dim3(S::threads);
    one.shared_bytes = S::shared_bytes;
    one.loaded = true;
    return pydet::launch(one, attention_backward_queries_kernel<S>, plan);
  });
}
template <Type type> pydet_status load_attention_backward_queries(const char *name, const AttentionBackwardPlan &plan) {
  return with_shape<type>(plan, [&](auto shape) {
    using S = decltype(shape);
    return load(name, attention_backward_queries_kernel<S>, S::shared_bytes);
  });
}

template pydet_status attention_backward_queries<Type(PYDET_ATTENTION_TYPE)>(const Launch &,
                                                                             const AttentionBackwardPlan &);
template pydet_status load_attention_backward_queries<Type(PYDET_ATTENTION_TYPE)>(const char *,
                                                                                  const AttentionBackwardPlan &);

}  // namespace pydet
