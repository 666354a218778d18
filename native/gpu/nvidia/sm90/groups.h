// What grouped.cu's kernel is told of groups of tokens, and who works it out (groups.cpp, on the host).
#pragma once

#include <cuda.h>

#include "gpu/kernels.h"
#include "ops/grouped/problem.h"

namespace pydet {

constexpr int kGroupedMostGroups = 1024;  // that a block keeps the boundaries of: those of a launch
constexpr int kMostLaunches = 16;         // for more of them, each of which scans those before its own
constexpr int kGroupedTokenBox = 32;      // rows of a that TMA brings at once, where groups lie along rows

// Rows by columns of out that a block works on at a time.
struct GroupedTile {
  const char *name;
  int m, n;
  bool chunks;  // takes k_chunk, which needs twice the accumulators
};
constexpr GroupedTile kGroupedTiles[] = {
    {"cuda_grouped_gemm_sm90_128x256", 128, 256, false},
    {"cuda_grouped_gemm_sm90_128x128", 128, 128, true},
};
constexpr int kGroupedTileCount = int(sizeof kGroupedTiles / sizeof *kGroupedTiles);

// The part of a problem that the device sees. Strides are in elements.
struct GroupedProblem {
  CUtensorMap a, b, out_map;  // the latter two of three dimensions, the last of which is the group
  int m, n, k;                // m of depth, k of rows: the groups have the other
  int first_group, groups;    // of a launch
  int tokens;
  int columns;  // of tiles
  const int32_t *start, *end;
  bool accumulate;
  bool out_aligned;  // its rows begin at multiples of 16 bytes
  bool out_mapped;   // and it is of depth and of 16-bit elements
  Type out_type, bias_type;
  char *out;
  const char *bias;
  int64_t out_row_stride, out_stride, bias_stride, bias_column_stride;  // *_stride: from group to group
  int chunk;                                                            // of k or tokens; 0: none
};

// What TMA brings at once: rows of a along m, and of b along n, or, where b's neighbours are along n, of k.
struct GroupedBoxes {
  int a, b;
};

// Fills all of the problem but `columns` and what is of a launch. `b_k_adjacent`: b's neighbours are along k, not n. The device must be current.
pydet_status grouped_plan(const GroupedGemm &, bool b_k_adjacent, const char *kernel, const GroupedBoxes &,
                          GroupedProblem *);

// scaled_groups.cu: the first two where every chunk of K has 128 and scales of columns do not vary along k; the third,
// which takes the rest, says what it cannot read.
bool scaled_groups_takes(const ScaledGroupedGemm &);
bool scaled_groups_tall_prefers(const ScaledGroupedGemm &);
pydet_status scaled_groups_tall(const ScaledGroupedGemm &);
pydet_status scaled_groups_ahead(const ScaledGroupedGemm &);
pydet_status scaled_groups_any(const ScaledGroupedGemm &);

// How many clusters of so many blocks, one an SM, a device runs at once (clusters.cu).
int sm90_clusters(int device, int cluster);

}  // namespace pydet
