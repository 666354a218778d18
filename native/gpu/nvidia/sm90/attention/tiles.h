// The sizes of a tile of attention on Hopper, and where its parts lie in shared memory.
#pragma once

#include "gpu/gpu.h"
#include "gpu/nvidia/sm90/attention/plan.h"
#include "gpu/nvidia/sm90/pipe/shape.h"

namespace pydet {

// d: 64, 128 or 256, elements of a head with the zeros that fill it up. `warpgroups` of 64 rows each take turns on the
// tensor cores. The ring has `stages` of a block's keys or values.
template <Type type_, int d_, int warpgroups_, int stages_, bool one_ = false, int sharers_ = 1>
struct AttentionShape {
  static constexpr int sharers = sharers_;  // blocks that have each key and value once, half of them loaded by each
  static constexpr Type type = type_;
  static constexpr bool one = one_;  // segment has all keys of a job: no O beside o
  static constexpr int d = d_, warpgroups = warpgroups_, stages = stages_;
  static constexpr int n = block_keys(d), chunks = d / kBlockK, rows = warpgroups * kAttentionWarpgroupRows;
  static constexpr int consumer_warps = warpgroups * kWarpgroup / 32;
  static constexpr int slot_warps = consumer_warps + 1;  // that look at jobs
  // Short keys gain little by turns.
  static constexpr bool turns = warpgroups > 1 && !(one && d != 128);
  // One warp loads. Beside several warpgroups it is one of four, since registers are moved by warpgroups.
  static constexpr bool moves_registers = warpgroups > 1;
  // Whether the loop over blocks that all rows see runs through the ends of segments.
  static constexpr bool through = d != 128 && warpgroups > 1 && !one;
  // Whether a block of which no row sees the upper half of the keys is made of the lower alone; d = 256 and one warpgroup
  // have too few registers for another way of starting.
  static constexpr bool halves = d <= 128 && warpgroups > 1;
  // One more finds jobs.
  static constexpr int threads = warpgroups * kWarpgroup + (moves_registers ? kWarpgroup : 64);
  static constexpr int producer_registers = warpgroups == 2 ? 40 : 32, consumer_registers = warpgroups == 2 ? 232 : 160;

  // Eighths of a block's weights that are made before the products beside them are waited for: the rest then runs
  // beside sums and rounding. Of d = 64, whose products are the shorter, all of them (4 to 7 % faster or slower the
  // other way).
  static constexpr int ahead = d == 64 ? 8 : 4;

  // Whether a block's values are waited for once its scores are under way; at d = 256 before (1 % the other way).
  static constexpr bool late_values = d <= 128;

  static constexpr int q_box_bytes = kAttentionWarpgroupRows * kRowBytes, q_bytes = chunks * q_box_bytes;
  static constexpr int box_bytes = n * kRowBytes, stage_bytes = chunks * box_bytes;
  // O so far of keys longer than a segment: of a thread's d / 8 fours so many lie in shared memory, the rest in the L2.
  static constexpr int held = one ? 0 : warpgroups * d < 512 ? d / 8 : 8;
  static constexpr int running_bytes = kAttentionWarpgroupRows * d * 4;  // of a warpgroup, in all
  // Of a warp: 16 rows of 64 results on their way out, in place of its O where that is here.
  static constexpr int out_bytes = kWarpRows * kRowBytes;

  static constexpr int q_at = 0, ring_at = q_at + warpgroups * q_bytes, out_at = ring_at + stages * stage_bytes,
                       out_warp_bytes = held ? held * 512 : out_bytes,
                       totals_at = out_at + consumer_warps * out_warp_bytes, slots_at = totals_at + rows * 16,
                       kSlots = 4, kSlotBytes = 48, barriers_at = slots_at + kSlots * kSlotBytes,
                       q_full_at = barriers_at, q_empty_at = q_full_at + warpgroups * 8,
                       full_at = q_empty_at + warpgroups * 8, empty_at = full_at + stages * 8,
                       slot_full_at = empty_at + stages * 8, slot_empty_at = slot_full_at + kSlots * 8,
                       late_at = slot_empty_at + kSlots * 8, shared_bytes = late_at + 8;
  static_assert(out_warp_bytes >= out_bytes, "a warp's O makes room for its results");
  static_assert(shared_bytes <= kMostSharedBytes, "one block an SM");
};

// By d and whether queries fill more than one warpgroup.
template <Type type, int d, bool wide, int sharers = 1>
using AttentionTile = AttentionShape<type, d,
                                     !wide     ? 1
                                     : d == 64 ? 3
                                               : 2,
                                     d == 64             ? (wide ? 8 : 12)
                                     : d == 128 && !wide ? 5
                                                         : 4,
                                     false, sharers>;

// Wide, where one segment has all keys: what O would take has more stages.
template <Type type, int d, int sharers = 1>
using AttentionTileOfOne = AttentionShape<type, d, d == 64 ? 3 : 2,
                                          d == 64    ? 10
                                          : d == 128 ? 5
                                                     : 4,
                                          true, sharers>;

}  // namespace pydet
