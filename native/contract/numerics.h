// The shapes of the sums, which every backend must agree on to the bit. NUMERICS.md explains; here are the constants.
// How numbers become fp32 and back is types.h.
#pragma once

#include "contract/types.h"

namespace pydet {

// How many pieces of a size it takes to hold an extent.
PYDET_HD constexpr int64_t divide_up(int64_t extent, int64_t size) { return (extent + size - 1) / size; }

// ---- RMSNorm -----------------------------------------------------------------------------------------------------

// Element j of a row belongs to lane (g, e): e = j mod 8, g = (j div 8) mod 256. A lane walks its elements ascending.
// Then the 8 e of a group are joined, partners 4, 2, 1 apart, then the 256 groups, partners 128, 64, ..., 1 apart.
constexpr int kRowLaneElements = 8;
constexpr int kRowLaneGroups = 256;
constexpr int kRowLanes = kRowLaneElements * kRowLaneGroups;

// dweight: rows in chains of 16 from +0; 4 chains added ascending from +0 make a group of 64 rows, 4 groups added ascending
// from +0 a block of 256; blocks are added ascending, from +0 or from dweight.
constexpr int kDweightChainRows = 16;
constexpr int kDweightGroupRows = 64;
constexpr int kDweightBlockRows = 256;

// ---- Fold --------------------------------------------------------------------------------------------------------

// The tree of a fold: subtrees of 2^level parts that wait for their partner, at most one a level.
constexpr int kFoldLevels = 7;
static_assert((1 << (kFoldLevels - 1)) == PYDET_FOLD_PARTS, "a full tree is a subtree of the last level");

// ---- GEMM --------------------------------------------------------------------------------------------------------

constexpr int kChunkMultiple = 16;  // k_chunk is a multiple of every arithmetic's step

// k_chunk as a call gives it. A kernel that counts k in steps or stages is told how many one chain takes of them: those
// of a chunk; all of K where there is no k_chunk, or one that K does not fill.
struct Chunk {
  int64_t k_chunk;  // 0: none
  constexpr bool one_chain(int64_t k) const { return k_chunk == 0 || k_chunk >= k; }
  constexpr int64_t of_chain(int64_t k, int64_t unit = 1) const {
    return one_chain(k) ? divide_up(k, unit) : k_chunk / unit;
  }
};

}  // namespace pydet
