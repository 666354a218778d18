// The readers of attention: queries, and blocks of keys and of values, from dense tensors, packs of sequences or
// pages, by TMA's boxes.
#pragma once

#include "gpu/nvidia/sm90/attention/jobs.h"
#include "gpu/nvidia/sm90/pipe/operand.h"

namespace pydet {
namespace {

// The queries of a warpgroup's rows: row i pack + h is head h of query i.
__device__ __forceinline__ Place place_of_queries(const AttentionPlan &p, const Job &job, int warpgroup) {
  const int group = job.head / p.group_heads, first = job.query + warpgroup * p.warpgroup_queries;
  return {0, job.head - group * p.group_heads, {job.q_first + first, group, p.sequence_moves_q ? job.sequence : 0}};
}
// To the L2.
template <class S>
__device__ __forceinline__ void ask_for_queries(const AttentionPlan &p, const Job &job, int warpgroup) {
  const Place at = place_of_queries(p, job, warpgroup);
#pragma unroll
  for (int i = 0; i < S::chunks; ++i)
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(&p.q),
                 "r"(i * kBlockK), "r"(at.y), "r"(at.batch[0]), "r"(at.batch[1]), "r"(at.batch[2])
                 : "memory");
}
template <class S>
__device__ __forceinline__ void load_queries(const AttentionPlan &p, const Job &job, int warpgroup, uint32_t to,
                                             uint32_t barrier) {
  const Place at = place_of_queries(p, job, warpgroup);
  barrier_expect(barrier, p.warpgroup_queries * p.pack * kRowBytes * S::chunks);
#pragma unroll
  for (int i = 0; i < S::chunks; ++i)
    load_box<5, false>(to + i * S::q_box_bytes, &p.q, barrier,
                       Place{i * kBlockK, at.y, {at.batch[0], at.batch[1], at.batch[2]}}, 0);
}

// Where the lanes' boxes of a block lie: lane i has keys i box_keys to (i + 1) box_keys of it. What is past the last
// key reads as zeros; the rest of a box that holds it may be anything.
struct Boxes {
  int token, sequence;  // or page, as the table has it
};
template <class S>
__device__ __forceinline__ Boxes boxes_of(const AttentionPlan &p, const Job &job, int block) {
  const int key = block * S::n + int(threadIdx.x % 32) * p.box_keys;
  if (key >= job.keys) return {-S::n, 0};
  if (!p.pages) return {job.k_first + key, job.sequence};
  const int page = key / p.page_size;
  return {key - page * p.page_size, p.pages[job.sequence * p.pages_stride + page]};
}

// Those that hold `keys` keys from lane `first` on, one after another: load(key, token, sequence), by one lane, which the
// compiler knows to be one, so that operands come to uniform registers without a loop over lanes. All lanes of the warp.
template <int keys, class Load>
__device__ __forceinline__ void each_box(const AttentionPlan &p, const Boxes &at, int first, const Load &load) {
  const int sequence = p.pages ? clamped(at.sequence, 0, p.page_count - 1) : at.sequence;
#pragma unroll 1
  for (int key = 0, lane = first; key < keys; key += p.box_keys, ++lane) {
    const int token = __shfl_sync(0xFFFFFFFFu, at.token, lane), of = __shfl_sync(0xFFFFFFFFu, sequence, lane);
    if (elected()) load(key, token, of);
  }
}

// All lanes of the warp.
template <class S>
__device__ __forceinline__ void load_block(const AttentionPlan &p, const CUtensorMap *map, bool sequence_moves,
                                           bool group_moves, const Boxes &at, int group, uint32_t to,
                                           uint32_t barrier) {
  constexpr int of_keys = S::n / S::sharers;
  const int rank = S::sharers > 1 ? int(blockIdx.x) % S::sharers : 0;
  if (elected()) barrier_expect(barrier, S::stage_bytes);
  __syncwarp();
  each_box<of_keys>(p, at, S::sharers > 1 ? rank * (of_keys / p.box_keys) : 0, [&](int key, int token, int sequence) {
    const Place place = {0, token, {group_moves ? group : 0, sequence_moves ? sequence : 0, 0}};
#pragma unroll
    for (int i = 0; i < S::chunks; ++i)
      load_box<5, (S::sharers > 1)>(to + i * S::box_bytes + (rank * of_keys + key) * kRowBytes, map, barrier,
                                    Place{i * kBlockK, place.y, {place.batch[0], place.batch[1], place.batch[2]}},
                                    uint16_t((1 << S::sharers) - 1));
  });
}

}  // namespace
}  // namespace pydet
