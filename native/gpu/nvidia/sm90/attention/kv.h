// The readers of attention: queries, and blocks of keys and of values, from dense tensors, packs of sequences or
// pages, by TMA's boxes.
#pragma once

#include "gpu/nvidia/sm90/attention/jobs.h"
#include "gpu/nvidia/sm90/pipe/operand.h"

namespace pydet {
namespace {

// The queries of a warpgroup's rows: row i pack + h is head h of query i.
template <class S>
__device__ __forceinline__ void load_queries(const AttentionPlan &p, const Job &job, int warpgroup, uint32_t to,
                                             uint32_t barrier) {
  const int group = job.head / p.group_heads, first = job.query + warpgroup * p.warpgroup_queries;
  const Place at = {
      0, job.head - group * p.group_heads, {job.q_first + first, group, p.sequence_moves_q ? job.sequence : 0}};
  barrier_expect(barrier, p.warpgroup_queries * p.pack * kRowBytes * S::chunks);
#pragma unroll
  for (int i = 0; i < S::chunks; ++i)
    load_box<5, false>(to + i * S::q_box_bytes, &p.q, barrier,
                       Place{i * kBlockK, at.y, {at.batch[0], at.batch[1], at.batch[2]}}, 0);
}

// Where the lanes' boxes of a block lie: lane i has keys i box_keys to (i + 1) box_keys of it. What is past the last
// key reads as zeros; the rest of a box that holds it may be anything.
struct Boxes {
  int token, sequence;  // or page
};
template <class S>
__device__ __forceinline__ Boxes boxes_of(const AttentionPlan &p, const Job &job, int block) {
  const int key = block * S::n + int(threadIdx.x % 32) * p.box_keys;
  if (key >= job.keys) return {-S::n, 0};
  if (!p.pages) return {job.k_first + key, job.sequence};
  const int page = key / p.page_size;
  return {key - page * p.page_size, clamped(p.pages[job.sequence * p.pages_stride + page], 0, p.page_count - 1)};
}

// All lanes of the warp.
template <class S>
__device__ __forceinline__ void load_block(const AttentionPlan &p, const CUtensorMap *map, bool sequence_moves,
                                           bool group_moves, const Boxes &at, int group, uint32_t to,
                                           uint32_t barrier) {
  const int lane = int(threadIdx.x % 32);
  if (lane == 0) barrier_expect(barrier, S::stage_bytes);
  __syncwarp();
  if (lane * p.box_keys < S::n) {
    const Place place = {0, at.token, {group_moves ? group : 0, sequence_moves ? at.sequence : 0, 0}};
#pragma unroll
    for (int i = 0; i < S::chunks; ++i)
      load_box<5, false>(to + i * S::box_bytes + lane * p.box_keys * kRowBytes, map, barrier,
                         Place{i * kBlockK, place.y, {place.batch[0], place.batch[1], place.batch[2]}}, 0);
  }
}

}  // namespace
}  // namespace pydet
