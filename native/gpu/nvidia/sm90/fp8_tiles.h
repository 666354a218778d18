// The tiles of scaled_tiles.cu, one row each.
#pragma once

#include "contract/types.h"

namespace pydet {

// How the additions find time beside the tensor cores: the two warpgroups take turns to issue their products, or each
// issues them as it comes, or the next chunk's before it adds the last's, which takes accumulators for both.
enum class Way { in_turn, at_will, ahead };

// In us: of a stage of 128 k, and of what comes before and after. Measured on an H100, all tiles on the same problems,
// of 128 to 8192 rows.
struct Fp8Cost {
  double stage, rest;
};
constexpr Fp8Cost kNoKernel = {};

// Rows by columns of out that a block works on at a time, in clusters as in tiles.h; 64 rows are one warpgroup's, more
// are two's. A tile has kernels for types of a and b and, where it has a cost, for scales along k, for others, or both.
struct Fp8Tile {
  const char *name;
  int m, n, cluster_m, cluster_n;
  Way way;
  uint32_t types;
  Fp8Cost along_k, otherwise;
  // Blocks side by side where e4m3's rows of out all lie in one tile, unless that takes more waves.
  int cluster_n_of_one_row = cluster_n;
  // A stage takes `unaligned` times as long where the operands' rows do not begin at lines of the L2, 128 bytes: more
  // of them are read. Up to `too_few_rows` rows the tile is not chosen: its costs say that it is the fastest, and it
  // was measured not to be.
  double unaligned = 1;
  int too_few_rows = 0;
  constexpr int cluster() const { return cluster_m * cluster_n; }
  constexpr int warpgroups() const { return m == 64 ? 1 : 2; }
  constexpr const Fp8Cost &cost(bool scales_along_k) const { return scales_along_k ? along_k : otherwise; }
  constexpr bool takes(bool scales_along_k) const { return cost(scales_along_k).stage > 0; }
};

constexpr Fp8Tile kFp8Tiles[] = {
    {"cuda_scaled_gemm_sm90_256x128", 256, 128, 2, 1, Way::at_will, kFp8Types, {0.777, 2.0}, {0.725, 2.4}},
    {"cuda_scaled_gemm_sm90_128x128_ahead", 128, 128, 2, 1, Way::ahead, kFp8Types, {0.432, 1.0}, {0.399, 1.3}},
    {"cuda_scaled_gemm_sm90_128x64", 128, 64, 1, 2, Way::ahead, kFp8Types, {0.319, 0.6}, {0.291, 0.7}, 4},
    {"cuda_scaled_gemm_sm90_128x192", 128, 192, 2, 1, Way::at_will, kFp8Types, {0.553, 1.6}, {0.531, 2.1}},
    {"cuda_scaled_gemm_sm90_256x112", 256, 112, 2, 1, Way::at_will, kFp8Types, {0.758, 1.8}, {0.672, 2.1}},
    {"cuda_scaled_gemm_sm90_128x96", 128, 96, 2, 1, Way::ahead, bit(Type::e4m3), kNoKernel, {0.361, 1.1}},
    {"cuda_scaled_gemm_sm90_128x144", 128, 144, 2, 1, Way::at_will, bit(Type::e4m3), kNoKernel, {0.427, 1.8}},
    {"cuda_scaled_gemm_sm90_128x160", 128, 160, 2, 1, Way::at_will, bit(Type::e4m3), kNoKernel, {0.468, 1.8}},
    {"cuda_scaled_gemm_sm90_64x64", 64, 64, 1, 1, Way::ahead, bit(Type::e4m3), {0.242, 0.4}, kNoKernel},
    {"cuda_scaled_gemm_sm90_64x128", 64, 128, 1, 1, Way::ahead, bit(Type::e4m3), {0.292, 0.6}, kNoKernel, 1, 1.35, 128},
    // For an odd number of tiles under each other, of which a cluster of two has one without rows.
    {"cuda_scaled_gemm_sm90_128x128_wide", 128, 128, 1, 2, Way::ahead, bit(Type::e4m3), {0.432, 1.0}, {0.399, 1.3}},
};
constexpr int kFp8TileCount = int(sizeof kFp8Tiles / sizeof *kFp8Tiles);
// Of the kernel that takes the rest, chunks of any length and scales of columns along k, and is chosen by nothing else.
constexpr Fp8Tile kFp8Rest = {"cuda_scaled_gemm_sm90_128x128", 128, 128, 1, 2, Way::in_turn, kFp8Types, {}, {}};

constexpr bool fp8_shares_are_whole_atoms(const Fp8Tile &t) {
  return (t.cluster_m == 1 || t.cluster_n == 1) && t.m % (64 * t.warpgroups()) == 0 && t.m % (8 * t.cluster_n) == 0 &&
         t.n % (8 * t.cluster_m) == 0 && t.m % (8 * t.cluster_n_of_one_row) == 0;
}
// A block that adds a chunk while the next is multiplied has accumulators for up to 128 columns.
constexpr bool fp8_accumulators_fit(const Fp8Tile &t) {
  return t.way == Way::ahead ? t.m <= 128 && t.n <= 128 : t.m * t.n <= 256 * 128;
}
constexpr bool fp8_names_say_extents(const Fp8Tile &t) {
  const char *at = t.name;
  while (*at && !(at[0] == '9' && at[1] == '0' && at[2] == '_')) ++at;
  if (!*at) return false;
  int m = 0, n = 0;
  for (at += 3; *at >= '0' && *at <= '9'; ++at) m = 10 * m + (*at - '0');
  if (*at++ != 'x') return false;
  for (; *at >= '0' && *at <= '9'; ++at) n = 10 * n + (*at - '0');
  return m == t.m && n == t.n;
}
constexpr bool fp8_tiles_are_sound() {
  for (const Fp8Tile &t : kFp8Tiles)
    if (!fp8_shares_are_whole_atoms(t) || !fp8_accumulators_fit(t) || !fp8_names_say_extents(t) ||
        !(t.takes(true) || t.takes(false)))
      return false;
  return fp8_shares_are_whole_atoms(kFp8Rest) && fp8_accumulators_fit(kFp8Rest) && fp8_names_say_extents(kFp8Rest);
}
static_assert(fp8_tiles_are_sound(),
              "blocks load whole atoms of 8 rows, clusters share one operand, names are extents");
static_assert(kFp8Tiles[0].types == kFp8Types && kFp8Tiles[0].takes(true) && kFp8Tiles[0].takes(false),
              "the choice begins with a tile for every problem");

}  // namespace pydet
