// How scaled_groups.cu's tiles lie in shared memory, and who fills them: the copy engine, and two warps for the weights.
#pragma once

#include "gpu/nvidia/sm90/group_jobs.h"
#include "gpu/nvidia/sm90/group_rows.h"
#include "gpu/nvidia/sm90/pipe/operand.h"
#include "gpu/nvidia/sm90/scales.h"
#include "gpu/nvidia/sm90/pipe/wgmma.h"
#include "scaled_grouped.h"

namespace pydet {
namespace {

constexpr int kStageK = kScaleGroup;  // of k in a stage, 128 bytes
constexpr int kAhead = 8;             // chunks of one turn of the main loop, at whose end nothing is in flight
constexpr int kWeighers = 64;         // threads

// The k and chunk of `groups` count stages. In b_scale the first batch stride is that from group to group.
struct ScaledGroupsProblem {
  GroupedProblem groups;
  CUtensorMap whole_a;  // a by boxes of a tile's rows, beside those of kGroupedTokenBox
  DeviceScale a_scale, b_scale;
  bool along_k, chain_from_out;  // chain_from_out: the one chain starts from out, not D
};

// How the additions find time beside the tensor cores: each warpgroup issues its products as it comes, or the next
// chunk's before it adds the last's, which takes accumulators for both.
enum class Way { at_will, ahead };

// `stored`: the types of out.
template <int rows_a_warpgroup, Way how, Type a, Type b, uint32_t stored> struct Shape {
  static constexpr Type a_type = a, b_type = b;
  static constexpr uint32_t results = stored;
  static constexpr bool stores_f32 = (results & bit(Type::f32)) != 0;
  static constexpr bool ahead = how == Way::ahead, depth = false, stores_by_tma = false;
  static constexpr int consumers = 2, blocks = rows_a_warpgroup / 64;  // of 64 rows
  static constexpr int m = consumers * rows_a_warpgroup, n = 128, registers = n / 2;
  // Else there are registers for the chain of one stage, and for one weight a row, alone.
  static constexpr bool long_chunks = blocks == 1 && !ahead, by_column = long_chunks;
  // Of a launch. With 256 rows the boundaries of fewer leave room for a fourth stage.
  static constexpr int most_groups = blocks == 1 ? kGroupedMostGroups : kGroupedMostGroups / 2;
  static constexpr int table_bytes = table_ints(most_groups) * 4;
  static constexpr int threads = kWarpgroup * (1 + consumers);
  static constexpr int a_boxes = m / kGroupedTokenBox, a_box_bytes = kGroupedTokenBox * kRowBytes;
  static constexpr int a_bytes = m * kRowBytes, b_bytes = n * kRowBytes;
  static constexpr int weight_bytes = (m + (by_column ? n : 0)) * 4;  // of a stage: its rows', its columns'
  static constexpr int stage_bytes = a_bytes + b_bytes, staging_bytes = kBlockBytes;
  static constexpr int stages =
      (kMostSharedBytes - consumers * staging_bytes - table_bytes - 512) / (stage_bytes + weight_bytes);
  static constexpr int staging_at = stages * stage_bytes, weights_at = staging_at + consumers * staging_bytes;
  static constexpr int table_at = weights_at + stages * weight_bytes, barriers_at = table_at + table_bytes;
  static constexpr int slots_at = barriers_at + stages * 16;
  static constexpr int shared_bytes = slots_at + kSlots * (16 + int(sizeof(Spot)));
  static_assert(stages >= 3 && shared_bytes <= kMostSharedBytes, "the ring must fit");
};

// The ring, and beside each stage its weights.
template <class S> struct WeightedRing : Ring<S> {
  __device__ __forceinline__ uint32_t weights() const {
    return this->shared + S::weights_at + this->stage * S::weight_bytes;
  }
  // A warp of a consumer has read the stage: tells both blocks, either of which may write into it.
  __device__ __forceinline__ void release() const {
    if (int(threadIdx.x) % 32 < kCluster) barrier_arrive(this->empty(), int(threadIdx.x) % 32);
  }
};

// ---- Loads -------------------------------------------------------------------------------------------------------

// One thread: the operands. Of what the two blocks share each brings half, for both. Boxes take the thread its time, so a
// tile with many rows of its group is brought as one, which may have others'.
template <class S>
__device__ __forceinline__ void produce(const ScaledGroupsProblem &problem, const Groups &groups, SpotSlots slots,
                                        uint32_t shared, int rank) {
  const GroupedProblem &p = problem.groups;
  constexpr int kHalf = S::n / 2;
  WeightedRing<S> ring = {{shared}};
  for (int index = int(blockIdx.x) / kCluster; index < groups.jobs; index += int(gridDim.x) / kCluster) {
    const Spot at = spot_of<S>(p, groups, index, rank);
    slots.put(at);
    const int boxes = min(S::a_boxes, divide_up_int(at.end - at.row, kGroupedTokenBox));
    // Of every stage: load(its barrier, where it lies, its first k).
    const auto each_stage = [&](int a_bytes, auto load) {
#pragma unroll 1
      for (int i = 0; i < at.depth; ++i) {
        ring.wait_empty();
        barrier_expect(ring.full(), a_bytes + S::b_bytes);
        load(ring.full(), ring.a(), i * kStageK);
        ring.next();
      }
    };
    const auto load_half_of_b = [&](uint32_t full, uint32_t stage, int k) {
      const int first = rank * kHalf;
      load_box<3, true>(stage + S::a_bytes + first * kRowBytes, &p.b, full, {k, at.column + first, {at.group}}, kBoth);
    };
    if (at.strip) {
      each_stage(boxes * S::a_box_bytes, [&](uint32_t full, uint32_t stage, int k) {
#pragma unroll 1
        for (int box = rank; box < boxes; box += kCluster)
          load_box<2, true>(stage + box * S::a_box_bytes, &p.a, full, {k, at.row + box * kGroupedTokenBox, {}}, kBoth);
#pragma unroll
        for (int first = 0; first < S::n; first += kHalf)
          load_box<3, false>(stage + S::a_bytes + first * kRowBytes, &p.b, full, {k, at.column + first, {at.group}},
                             kBoth);
      });
    } else if (boxes > 2) {
      each_stage(S::a_bytes, [&](uint32_t full, uint32_t stage, int k) {
        load_box<2, false>(stage, &problem.whole_a, full, {k, at.row, {}}, kBoth);
        load_half_of_b(full, stage, k);
      });
    } else {
      each_stage(boxes * S::a_box_bytes, [&](uint32_t full, uint32_t stage, int k) {
        load_box<2, false>(stage, &p.a, full, {k, at.row, {}}, kBoth);
        if (boxes == 2)
          load_box<2, false>(stage + S::a_box_bytes, &p.a, full, {k, at.row + kGroupedTokenBox, {}}, kBoth);
        load_half_of_b(full, stage, k);
      });
    }
  }
  Spot none = {};
  none.group = kNoGroup;
  slots.put(none);
  ring.end();
}

// kWeighers threads: the weights of each stage, where scales vary along k. By column they are a's scales alone, and b's
// stand behind them.
template <class S>
__device__ __forceinline__ void weigh(const ScaledGroupsProblem &problem, SpotSlots slots, uint32_t shared,
                                      int thread) {
  constexpr int each = S::m / kWeighers, each_column = S::n / kWeighers;
  const GroupedProblem &p = problem.groups;
  const DeviceScale &a_scale = problem.a_scale, &b_scale = problem.b_scale;
  const bool by_column = S::by_column && by_columns(b_scale);
  WeightedRing<S> ring = {{shared}};
  for (Spot at = slots.take(); at.group != kNoGroup; at = slots.take()) {
    int64_t a_at[each], b_at[1], column_at[each_column];
#pragma unroll
    for (int j = 0; j < each; ++j) a_at[j] = min(at.row + thread + j * kWeighers, p.tokens - 1) * a_scale.stride;
    const int64_t of_group = at.group * b_scale.batch_stride[0];
    b_at[0] = of_group + (b_scale.blocks ? min(at.column, p.n - 1) / kScaleGroup * b_scale.stride : 0);
#pragma unroll
    for (int j = 0; j < each_column; ++j)
      column_at[j] = of_group + min(at.column + thread + j * kWeighers, p.n - 1) * b_scale.stride;
    // Of stages whose scales are on their way: one alone took longer from the L2 than a stage of 128 rows multiplies.
    constexpr int ahead = S::by_column ? 1 : 8 / each;
    float a[ahead][each], b[ahead][1], column[each_column];
    auto load = [&](int slot) {
      load_scales(a_scale, a_at, a[slot]);
      if (by_column) load_scales(b_scale, column_at, column);
      else load_scales(b_scale, b_at, b[slot]);
#pragma unroll
      for (int j = 0; j < each; ++j) a_at[j] += a_scale.chunk_stride;
      b_at[0] += b_scale.chunk_stride;
#pragma unroll
      for (int j = 0; j < each_column; ++j) column_at[j] += b_scale.chunk_stride;
    };
#pragma unroll
    for (int j = 0; j < ahead; ++j)
      if (j < at.depth) load(j);
    for (int first = 0; first < at.depth; first += ahead) {
#pragma unroll
      for (int slot = 0; slot < ahead; ++slot) {
        if (first + slot >= at.depth) break;
        const uint32_t to = ring.weights() + thread * 4;
        ring.wait_empty();
#pragma unroll
        for (int j = 0; j < each; ++j)
          store_word(to + j * kWeighers * 4, by_column ? a[slot][j] : a[slot][j] * b[slot][0]);
        if (by_column)
#pragma unroll
          for (int j = 0; j < each_column; ++j) store_word(to + (S::m + j * kWeighers) * 4, column[j]);
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(ring.full());
        if (first + slot + ahead < at.depth) load(slot);
        ring.next();
      }
    }
  }
}

}  // namespace
}  // namespace pydet
