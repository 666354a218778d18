// The tiles of gemm.cu, one row each. What a tile costs stands in rates.h, under its name.
#pragma once

#include "ops/gemm/problem.h"

namespace pydet {

// Which of an operand's dimensions is adjacent in memory, as the kernel sees a (m by k) and b (k by n).
constexpr uint32_t layout_bit(bool a_k_adjacent, bool b_k_adjacent) { return 1u << (2 * a_k_adjacent + b_k_adjacent); }
constexpr uint32_t kAnyLayout = 15, kNoLayout = 0, kForward = layout_bit(true, true);
// Of the products of training, out = x w^T, dA = dy w and dB = dy^T x: as they are, and as a swapped tile sees them.
constexpr uint32_t kTurnedB = layout_bit(true, false), kTurnedA = layout_bit(false, true);
constexpr uint32_t kBothTurned = layout_bit(false, false);

// Rows by columns of out that a block works on at a time. `cluster_m` blocks under each other share their loads of b,
// `cluster_n` side by side those of a. A swapped tile is one of out^T = b^T a^T: the rows of out are its columns, which
// few rows of out fit better. It has kernels for some layouts, and for some with k_chunk, which takes twice the
// accumulators; tiles of one size share theirs (choose.h).
struct Sm90Tile {
  const char *name;
  int m, n, cluster_m, cluster_n;
  bool swapped;
  uint32_t layouts, chunked_layouts;
  bool hands_over = false;  // what does not fill the last wave is shared out (handover.h), in the workspace
  constexpr int cluster() const { return cluster_m * cluster_n; }
  constexpr uint32_t layouts_of(bool chunked) const { return chunked ? chunked_layouts : layouts; }
};

constexpr Sm90Tile kSm90Tiles[] = {
    {"cuda_gemm_sm90_128x256", 128, 256, 2, 1, false, kAnyLayout, kNoLayout},
    {"cuda_gemm_sm90_128x224", 128, 224, 2, 1, false, kForward | kTurnedB | kBothTurned, kNoLayout},
    {"cuda_gemm_sm90_128x192", 128, 192, 2, 1, false, kAnyLayout, kAnyLayout},
    {"cuda_gemm_sm90_128x160", 128, 160, 2, 1, false, kForward | kTurnedB | kBothTurned,
     kForward | kTurnedB | kBothTurned},
    {"cuda_gemm_sm90_128x128", 128, 128, 2, 1, false, kAnyLayout, kAnyLayout},
    {"cuda_gemm_sm90_128x128_wide", 128, 128, 1, 2, false, kForward | kTurnedB | kBothTurned,
     kForward | kTurnedB | kBothTurned},
    {"cuda_gemm_sm90_128x64", 128, 64, 2, 1, false, kForward | kTurnedB, kForward},
    {"cuda_gemm_sm90_64x160_wide", 64, 160, 1, 2, false, kForward | kTurnedB | kBothTurned, kForward},
    {"cuda_gemm_sm90_64x128_wide", 64, 128, 1, 2, false, kForward | kTurnedB | kBothTurned,
     kForward | kTurnedB | kBothTurned},
    {"cuda_gemm_sm90_64x64_wide", 64, 64, 1, 2, false, kAnyLayout, kAnyLayout},
    {"cuda_gemm_sm90_128x176", 128, 176, 2, 1, false, kForward | kTurnedB | kBothTurned, kForward | kTurnedB},
    {"cuda_gemm_sm90_128x112", 128, 112, 2, 1, false, kForward | kTurnedB | kBothTurned,
     kForward | kTurnedB | kBothTurned},
    {"cuda_gemm_sm90_256x160_wide", 256, 160, 1, 2, false, kForward | kTurnedB | kBothTurned, kNoLayout},
    {"cuda_gemm_sm90_128x192_wide", 128, 192, 1, 2, false, kForward | kTurnedB | kBothTurned,
     kForward | kTurnedB | kBothTurned},
    {"cuda_gemm_sm90_128x160_wide", 128, 160, 1, 2, false, kForward | kTurnedB | kBothTurned,
     kForward | kTurnedB | kBothTurned},
    {"cuda_gemm_sm90_128x192_wide_swapped", 128, 192, 1, 2, true, kForward | kTurnedA, kForward | kTurnedA},
    {"cuda_gemm_sm90_128x160_wide_swapped", 128, 160, 1, 2, true, kForward | kTurnedA | kBothTurned,
     kForward | kTurnedA},
    {"cuda_gemm_sm90_256x160_wide_swapped", 256, 160, 1, 2, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_128x112_swapped", 128, 112, 2, 1, true, kForward | kTurnedA, kForward},
    {"cuda_gemm_sm90_64x160_wide_swapped", 64, 160, 1, 2, true, kForward | kTurnedA, kForward | kTurnedA},
    {"cuda_gemm_sm90_64x128_wide_swapped", 64, 128, 1, 2, true, kForward | kTurnedA | kBothTurned, kForward | kTurnedA},
    {"cuda_gemm_sm90_64x64_wide_swapped", 64, 64, 1, 2, true, kForward | kTurnedA | kBothTurned, kForward | kTurnedA},
    {"cuda_gemm_sm90_64x128_4x2", 64, 128, 4, 2, false, kForward | kTurnedB | kBothTurned, kForward},
    {"cuda_gemm_sm90_128x80_2x2_swapped", 128, 80, 2, 2, true, kForward | kTurnedA, kForward},
    {"cuda_gemm_sm90_128x128_1x4", 128, 128, 1, 4, false, kForward | kTurnedB, kForward},
    {"cuda_gemm_sm90_128x208_wide_swapped", 128, 208, 1, 2, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_128x80", 128, 80, 2, 1, false, kForward | kTurnedB | kBothTurned, kForward},
    {"cuda_gemm_sm90_64x96_4x2", 64, 96, 4, 2, false, kForward | kTurnedB | kBothTurned, kForward},
    {"cuda_gemm_sm90_256x112_swapped", 256, 112, 2, 1, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_256x144_wide_swapped", 256, 144, 1, 2, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_128x144", 128, 144, 2, 1, false, kForward | kTurnedB | kBothTurned, kForward},
    {"cuda_gemm_sm90_192x128_wide", 192, 128, 1, 2, false, kForward | kTurnedB | kBothTurned, kNoLayout},
    {"cuda_gemm_sm90_192x192", 192, 192, 2, 1, false, kForward | kTurnedB | kBothTurned, kNoLayout},
    {"cuda_gemm_sm90_192x160_wide", 192, 160, 1, 2, false, kForward | kTurnedB | kBothTurned, kNoLayout},
    {"cuda_gemm_sm90_192x160_wide_swapped", 192, 160, 1, 2, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_192x112_wide_swapped", 192, 112, 1, 2, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_64x64_1x4", 64, 64, 1, 4, false, kForward, kNoLayout},
    {"cuda_gemm_sm90_64x64_4x1_swapped", 64, 64, 4, 1, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_64x128_4x1_swapped", 64, 128, 4, 1, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_128x96_4x1_swapped", 128, 96, 4, 1, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_192x96_4x1_swapped", 192, 96, 4, 1, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_192x128", 192, 128, 2, 1, false, kForward | kTurnedB | kBothTurned, kNoLayout},
    {"cuda_gemm_sm90_192x160_swapped", 192, 160, 2, 1, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_192x192_wide", 192, 192, 1, 2, false, kForward | kTurnedB, kNoLayout},
    {"cuda_gemm_sm90_256x160_swapped", 256, 160, 2, 1, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_256x144_swapped", 256, 144, 2, 1, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_256x112_wide_swapped", 256, 112, 1, 2, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_128x176_wide_swapped", 128, 176, 1, 2, true, kForward, kNoLayout},
    {"cuda_gemm_sm90_128x208_swapped", 128, 208, 2, 1, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_128x160_swapped", 128, 160, 2, 1, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_128x144_wide_swapped", 128, 144, 1, 2, true, kForward, kNoLayout},
    {"cuda_gemm_sm90_128x112_wide_swapped", 128, 112, 1, 2, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_128x256_wide", 128, 256, 1, 2, false, kForward | kTurnedB, kNoLayout},
    {"cuda_gemm_sm90_128x224_wide", 128, 224, 1, 2, false, kForward | kTurnedB, kNoLayout},
    {"cuda_gemm_sm90_128x176_wide", 128, 176, 1, 2, false, kForward | kTurnedB, kNoLayout},
    {"cuda_gemm_sm90_128x128_2x2", 128, 128, 2, 2, false, kForward | kTurnedB, kNoLayout},
    {"cuda_gemm_sm90_256x144", 256, 144, 2, 1, false, kForward, kNoLayout},
    {"cuda_gemm_sm90_192x112_wide", 192, 112, 1, 2, false, kForward, kNoLayout},
    {"cuda_gemm_sm90_64x32_wide_swapped", 64, 32, 1, 2, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_64x32_4x1_swapped", 64, 32, 4, 1, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_64x32_1x4_swapped", 64, 32, 1, 4, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_64x48_wide_swapped", 64, 48, 1, 2, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_64x48_2x2_swapped", 64, 48, 2, 2, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_64x48_1x4_swapped", 64, 48, 1, 4, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_64x80_2x4", 64, 80, 2, 4, false, kForward, kNoLayout},
    {"cuda_gemm_sm90_64x80_wide_swapped", 64, 80, 1, 2, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_64x80_1x4_swapped", 64, 80, 1, 4, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_64x96_wide_swapped", 64, 96, 1, 2, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_128x96_wide_swapped", 128, 96, 1, 2, true, kForward | kTurnedA, kNoLayout},
    {"cuda_gemm_sm90_128x80_wide", 128, 80, 1, 2, false, kForward | kTurnedB, kNoLayout},
    {"cuda_gemm_sm90_192x128_wide_handover", 192, 128, 1, 2, false, kForward | kTurnedB, kNoLayout, true},
    {"cuda_gemm_sm90_192x192_handover", 192, 192, 2, 1, false, kForward | kTurnedB, kNoLayout, true},
    {"cuda_gemm_sm90_192x192_wide_handover", 192, 192, 1, 2, false, kForward | kTurnedB, kNoLayout, true},
    {"cuda_gemm_sm90_128x160_wide_swapped_handover", 128, 160, 1, 2, true, kForward | kTurnedA, kNoLayout, true},
    {"cuda_gemm_sm90_128x256_handover", 128, 256, 2, 1, false, kForward | kTurnedB, kNoLayout, true},
    {"cuda_gemm_sm90_128x192_2x2", 128, 192, 2, 2, false, kForward | kTurnedB, kNoLayout},
    {"cuda_gemm_sm90_128x64_wide", 128, 64, 1, 2, false, kForward | kTurnedB, kNoLayout},
    {"cuda_gemm_sm90_64x64_2x2", 64, 64, 2, 2, false, kForward | kTurnedB, kNoLayout},
};
constexpr int kSm90TileCount = int(sizeof kSm90Tiles / sizeof *kSm90Tiles);

constexpr bool shares_are_whole_atoms() {
  for (const Sm90Tile &t : kSm90Tiles)
    if (t.m % (8 * t.cluster_n) || t.n % (8 * t.cluster_m) || (t.cluster() & (t.cluster() - 1))) return false;
  return true;
}
static_assert(shares_are_whole_atoms(), "a block of a cluster loads whole atoms of 8 rows; clusters are powers of two");

// The kernels of all tiles of one size, which are told at run time how the cluster lies and whether the tile is of out^T.
struct Sm90Size {
  int m, n;
  uint32_t layouts, chunked_layouts, handed_layouts;
  constexpr uint32_t layouts_of(bool chunked) const { return chunked ? chunked_layouts : layouts; }
};
struct Sm90Sizes {
  Sm90Size sizes[kSm90TileCount];
  int count, of_tile[kSm90TileCount];
};
constexpr Sm90Sizes sm90_sizes() {
  Sm90Sizes found = {};
  for (int tile = 0; tile < kSm90TileCount; ++tile) {
    const Sm90Tile &t = kSm90Tiles[tile];
    int i = 0;
    while (i < found.count && (found.sizes[i].m != t.m || found.sizes[i].n != t.n)) ++i;
    if (i == found.count) found.sizes[found.count++] = {t.m, t.n, 0, 0, 0};
    found.sizes[i].layouts |= t.layouts, found.sizes[i].chunked_layouts |= t.chunked_layouts;
    if (t.hands_over) found.sizes[i].handed_layouts |= t.layouts;
    found.of_tile[tile] = i;
  }
  return found;
}
constexpr Sm90Sizes kSm90Sizes = sm90_sizes();

// gemm.cu is compiled 2 kSm90SizeGroups times, side by side: in group g for kSm90GroupTypes[g % 2], sizes i with
// i % kSm90SizeGroups = g / 2.
constexpr int kSm90SizeGroups = 16;
constexpr Type kSm90GroupTypes[] = {Type::bf16, Type::f16};
static_assert((bit(kSm90GroupTypes[0]) | bit(kSm90GroupTypes[1])) == kHalfTypes,
              "the types of the rows in backend.cpp");
constexpr int sm90_group(int tile, Type type) {
  return kSm90Sizes.of_tile[tile] % kSm90SizeGroups * 2 + (type == kSm90GroupTypes[1]);
}

}  // namespace pydet
