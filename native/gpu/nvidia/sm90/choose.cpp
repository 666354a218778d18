// Which tile of gemm.cu a problem is computed by, and of scaled_tiles.cu (at the end): the one whose predicted time is
// the least. The bits do not depend on it.
//
// The clusters that fit on the device take their tiles in waves. A stage of 64 k takes what the tensor cores need for
// it, or longer where all blocks together draw more from the L2 than that gives (5 to 6 TB/s), which clusters lower: a
// block reads its rows and columns, and the blocks beside and under it bring their shares. Both are a tile's own, and
// grow with how full a wave is; so each tile has its rates (rates.h), which a fit to measured times finds. Where rows of
// an operand begin between the L2's lines, as with K = 4304, it gives less (line_of), and clusters are worth more.

#include <algorithm>
#include <array>
#include <cstring>

#include "gpu/nvidia/sm90/choose.h"
#include "gpu/nvidia/sm90/gemm.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/rates.h"
#include "ops/scaled/problem.h"

namespace pydet {
namespace {

constexpr bool equal(const char *x, const char *y) {
  while (*x && *x == *y) ++x, ++y;
  return *x == *y;
}

constexpr std::array<Sm90Rate, kSm90TileCount> rates_by_tile() {
  std::array<Sm90Rate, kSm90TileCount> found = {};
  for (int tile = 0; tile < kSm90TileCount; ++tile)
    for (const Sm90Rate &rate : kSm90Rates)
      if (equal(rate.tile, kSm90Tiles[tile].name)) found[tile] = rate;
  return found;
}
constexpr std::array<Sm90Rate, kSm90TileCount> kRates = rates_by_tile();

constexpr bool every_tile_has_rates() {
  for (const Sm90Rate &rate : kRates)
    if (!rate.tile) return false;
  return true;
}
static_assert(every_tile_has_rates() && sizeof kSm90Rates / sizeof *kSm90Rates == kSm90TileCount, "one row a tile");

constexpr bool tiles_take_every_layout() {
  for (bool chunked : {false, true})
    for (uint32_t layout = 1; layout <= kAnyLayout; layout *= 2) {
      bool taken = false;
      for (const Sm90Tile &tile : kSm90Tiles) taken |= !tile.swapped && (tile.layouts_of(chunked) & layout);
      if (!taken) return false;
    }
  return true;
}
static_assert(tiles_take_every_layout(), "what one tile refuses another takes");

// What the choice reads of a problem.
struct Extents {
  int m, n, k, chunk;  // chunk = 0 where there is none
  double batches;
  bool a_k_adjacent, b_k_adjacent;
  double a_line, b_line;  // line_of, or 0 of both where neither operand's lines are cut
};

// What a block waits for a row of 64 k of an operand, in nanoseconds, where all blocks ask the L2 at once: longer where
// rows do not begin at its lines of 128 bytes, so that each of these is in two of them. An H100, of 44 tiles at K = 4288,
// 4320 and 4304; 4312 as it is since the L2 asks for no neighbours there (tensor_map.h), on an H200.
double line_of(const Sm90Operand &operand) {
  const int64_t bytes = operand.rows == 1 ? 0 : 2 * operand.row_stride;
  return bytes % 128 == 0 ? 1.75 : bytes % 64 == 0 ? 2.2 : bytes % 32 == 0 ? 2.45 : 2.9;
}

// Products of many waves run at the card's power limit, where time is energy. A warpgroup that makes n columns reads 64 + n
// rows of shared memory for 64 n products: so much longer than at n = 256 does a full wave take. Of an H200, 22 products
// of 513 to 7,353 rows, each of up to nine tiles repeated for 0.1 s.
double heat_of(const Sm90Tile &tile) {
  constexpr double kHeat = 6, kCool = 256;
  return 1 + kHeat * (1.0 / tile.n - 1 / kCool);
}

// Of the problem as the tile sees it, in nanoseconds. tools/sm90_fit.py has the same terms.
double time_of(const Sm90Tile &tile, const Sm90Rate &rate, const Extents &e, int clusters, double multiprocessors) {
  constexpr int kFew = 96;
  const double tiles =
      double(divide_up(e.m, tile.m * tile.cluster_m)) * divide_up(e.n, tile.n * tile.cluster_n) * e.batches;
  const double before = double(int64_t((tiles - 1) / clusters)), waves = before + 1;
  const double full = tile.hands_over ? tiles / clusters - 1 : before;
  const double filled = tile.hands_over ? 1 : (tiles - before * clusters) / clusters;
  const double stages = e.chunk ? double(divide_up(e.chunk, kBlockK)) * e.k / e.chunk : double(divide_up(e.k, kBlockK));
  const double memory = (double(e.m) * e.k + double(e.n) * e.k + double(e.m) * e.n) * e.batches / 1024;
  const double blocks = double(divide_up(e.m, tile.m)) * divide_up(e.n, tile.n) * e.batches;
  double time =
      stages * (full * rate.full * heat_of(tile) + rate.stage + filled * rate.filled) + waves * rate.wave + rate.once;
  double element_rate = rate.memory + rate.idle * (1 - blocks / (tiles * tile.cluster()));
  if (blocks < multiprocessors) element_rate += rate.unfilled * (1 - blocks / multiprocessors);
  if (e.m <= kFew || e.n <= kFew) time += stages * rate.few_stage + rate.few_once, element_rate += rate.few_memory;
  if (!e.b_k_adjacent) time += waves * stages * (e.a_k_adjacent ? rate.turned_b : rate.both_turned);
  else if (!e.a_k_adjacent) time += waves * stages * rate.turned_a;
  if (e.chunk) time += waves * divide_up(e.k, e.chunk) * rate.chunk;
  if (e.a_line > 0) {
    const double loads = e.a_line * tile.m / tile.cluster_n + e.b_line * tile.n / tile.cluster_m;
    time += stages * (full * std::max(0.0, loads - rate.full) +
                      std::max(0.0, filled * loads - (rate.stage + filled * rate.filled)));
  }
  return time + memory * element_rate;
}

using Clusters = int[9];  // by their size, how many a device runs at once

// The tile for a product of which hands_over(tile) says whether it can be handed over.
template <class F> int fastest_tile(const Extents &own, bool chunked, const Clusters &clusters, F hands_over) {
  const Extents swapped = {own.n,      own.m,     own.k, own.chunk, own.batches, own.b_k_adjacent, own.a_k_adjacent,
                           own.b_line, own.a_line};
  const double multiprocessors = 2.0 * clusters[2];
  int best = 0;
  double least = -1;
  for (int i = 0; i < kSm90TileCount; ++i) {
    const Sm90Tile &tile = kSm90Tiles[i];
    const Extents &e = tile.swapped ? swapped : own;
    if (!(sm90_layouts(i, chunked) & layout_bit(e.a_k_adjacent, e.b_k_adjacent))) continue;
    if (tile.hands_over && !hands_over(i)) continue;
    const double time = time_of(tile, kRates[i], e, clusters[tile.cluster()], multiprocessors);
    if (least < 0 || time < least) best = i, least = time;
  }
  return best;
}

constexpr int tile_named(const char *name) {
  int tile = 0;
  while (!equal(kSm90Tiles[tile].name, name)) ++tile;
  return tile;
}

// Of few rows that begin between the L2's lines, whose times the rates do not foretell; -1: they may. 96x4608x4312 takes
// 15.8 us by the first, 19.5 by the next best, 48x8192x4312 22.0 by the second (an H200, cuBLAS 15.1, 21.7). By the first
// too 78x18944x3592 55.1, 60.4 as the rates have it, 99x8192x3696 25.5 and 29.6 (an H100, cuBLAS 58.0, 25.5).
int few_rows_tile(const Gemm &g, const Sm90Operands &operands) {
  constexpr int kFewest = 33, kMost = 128;
  constexpr int64_t kLeastN = 2304, kMostN = 4800;  // of one wave
  constexpr int64_t kManyN = 6144, kMostOfMany = 112;
  if (g.m < kFewest || g.m > kMost || g.n < kLeastN || g.batch.count > 1 || g.k_chunk) return -1;
  if (!operands.a.k_adjacent || !operands.b.k_adjacent) return -1;
  const bool many = g.m > kMost / 2 && g.m <= kMostOfMany && g.n >= kManyN;
  if (g.n <= kMostN || many) return tile_named("cuda_gemm_sm90_64x80_2x4");
  return g.m <= kMost / 2 ? tile_named("cuda_gemm_sm90_64x128_wide") : -1;
}

// Whether the choice hands over, in one of the layouts, on a device of 132 multiprocessors.
bool may_hand_over(int m, int n, int k) {
  constexpr Clusters clusters = {0, 0, 66, 0, 30, 0, 0, 0, 15};
  for (bool a_k_adjacent : {true, false})
    for (bool b_k_adjacent : {true, false}) {
      const int tile = fastest_tile({m, n, k, 0, 1, a_k_adjacent, b_k_adjacent, 0, 0}, false, clusters, [&](int i) {
        return sm90_shares_out(kSm90Tiles[i], m, n, clusters[kSm90Tiles[i].cluster()]);
      });
      if (kSm90Tiles[tile].hands_over) return true;
    }
  return false;
}

}  // namespace

int sm90_fastest_tile(const Gemm &g, const Sm90Operands &operands) {
  const double a_line = line_of(operands.a), b_line = line_of(operands.b), whole = line_of({});
  const bool cut = a_line > whole || b_line > whole;
  if (const int tile = cut ? few_rows_tile(g, operands) : -1; tile >= 0) return tile;
  const Extents own = {int(g.m),
                       int(g.n),
                       int(g.k),
                       Chunk{g.k_chunk}.one_chain(g.k) ? 0 : int(g.k_chunk),
                       double(g.batch.count),
                       operands.a.k_adjacent,
                       operands.b.k_adjacent,
                       cut ? a_line : 0,
                       cut ? b_line : 0};
  Clusters clusters = {};
  for (int size : {2, 4, 8}) clusters[size] = sm90_clusters(g.device.id, size);
  return fastest_tile(own, g.k_chunk != 0, clusters, [&](int i) { return sm90_hands_over(g, i); });
}

uint64_t gemm_sm90_workspace(int64_t m, int64_t n, int64_t k, int64_t k_chunk, Arithmetic arithmetic,
                             const char *kernel) {
  constexpr int64_t kMost = int64_t(1) << 30;
  const bool tensor_cores = arithmetic == Arithmetic::automatic || arithmetic == Arithmetic::sm90;
  const uint64_t bytes = sm90_handover_bytes(m, n, k, k_chunk);
  if (!tensor_cores || bytes == 0 || m > kMost || n > kMost) return 0;
  if (kernel) {
    for (const Sm90Tile &tile : kSm90Tiles)
      if (tile.hands_over && !strcmp(tile.name, kernel)) return bytes;
    return 0;
  }
  // The layers of a model ask in turn.
  struct Answer {
    int64_t m, n, k;
    bool hands_over;
  };
  constexpr int kAnswers = 16;
  thread_local Answer answers[kAnswers];
  Answer &known = answers[(m / 8 + n / 16 + 5 * (n / 256) + k / 64) % kAnswers];
  if (known.m != m || known.n != n || known.k != k) known = {m, n, k, may_hand_over(int(m), int(n), int(k))};
  return known.hands_over ? bytes : 0;
}

// ---- fp8 ---------------------------------------------------------------------------------------------------------

bool scaled_whole_lines(const ScaledGemm &g) {
  constexpr int64_t kLine = 128;  // bytes
  return (g.m == 1 || g.a.row_stride % kLine == 0) && g.b.col_stride % kLine == 0;
}

bool scaled_tile_takes(const ScaledGemm &g, int tile) {
  const Fp8Tile &its = kFp8Tiles[tile];
  return (its.types & bit(g.a.type)) && (its.types & bit(g.b.type)) && its.takes(g.along_k);
}

int fastest_scaled_tile(const ScaledGemm &g) {
  const int64_t stages = divide_up(g.k, kScaleGroup);
  auto time_of = [&](const Fp8Tile &tile) {
    const int64_t tiles =
        divide_up(g.m, tile.m * tile.cluster_m) * divide_up(g.n, tile.n * tile.cluster_n) * g.batch.count;
    const Fp8Cost &cost = tile.cost(g.along_k);
    const double stage = cost.stage * (scaled_whole_lines(g) ? 1 : tile.unaligned);
    return double(divide_up(tiles, sm90_clusters(g.device.id, tile.cluster()))) * (stage * double(stages) + cost.rest);
  };
  int best = 0;
  double least = time_of(kFp8Tiles[best]);
  for (int i = 1; i < kFp8TileCount; ++i) {
    const Fp8Tile &tile = kFp8Tiles[i];
    if (!scaled_tile_takes(g, i) || g.m <= tile.too_few_rows) continue;
    if (tile.cluster_m > 1 && g.m <= tile.m)
      continue;  // half of its blocks have no rows: 72x11264x3328 1.4 times as long
    const double time = time_of(tile);
    if (time < least) best = i, least = time;
  }
  return best;
}

}  // namespace pydet
