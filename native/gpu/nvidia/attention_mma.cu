// Attention on tensor cores through mma.sync, for every layout, option and width: the general kernel of sm90 and sm80
// (attention_mma_tile.h).
//
// A block of four warps makes 64 rows: with all columns of their result where the problem is a common one, else 64 of them.
// With a workspace a block makes one segment, where few would run otherwise, and attention_combine.cu folds them; or
// blocks keep there what segments are folded into, and then each makes tiles in turn. Measured: bench/README.md.

#include <cinttypes>

#include "gpu/kernels.h"
#include "gpu/nvidia/attention_mma.h"
#include "gpu/nvidia/attention_mma_tile.h"

#if !defined(PYDET_MMA_TYPE)
#error "compiled once a type of kMmaTypes: PYDET_MMA_TYPE is its place there (Makefile)"
#endif

namespace pydet {
namespace {

// For vectors that begin at multiples of 16 bytes, without mask, softcap and bias.
template <int block, int parts, int columns, int depth, int blocks> struct Fast {
  static constexpr TileShape shape = {4, block, parts, columns, depth, blocks, true, false};
  static constexpr bool takes_all = false;
};
using Narrow = Fast<128, 1, 64, 64, 3>;   // heads of up to 64
using Usual = Fast<128, 1, 128, 128, 2>;  // of up to 128
using Small = Fast<128, 2, 128, 128, 2>;  // the same, where shared memory is short
using Deep = Fast<64, 1, 128, 192, 2>;    // of up to 192 with values of up to 128
using Wide = Fast<64, 1, 256, 256, 2>;    // of up to 256

// For everything.
template <int block, bool aligned, bool adjusts> struct Any {
  static constexpr TileShape shape = {4, block, 1, 64, 0, 2, aligned, adjusts};
  static constexpr bool takes_all = true;
};

// For what a fast tile could not, in no more shared memory.
template <class S> struct Careful {
  static constexpr TileShape shape = {4, S::shape.block, S::shape.parts, 64, S::shape.depth, 2, true, false};
  static constexpr bool takes_all = true;
};

// How a launch shares tiles out. Tiles: slices of columns, groups and sequences beside each other, then rows from the
// last, which see most keys where attention is causal, then segments where they are apart.
struct Sharing {
  uint32_t count, slices, tiles;  // of all, of columns, and of a group's rows
  uint32_t blocks;                // that make them in turn
  bool split;
  char *running;  // of each block, where segments are folded; NULL: in its shared memory
};

// One of them.
struct Place {
  int rows, sequence, group, column0, only;  // only: the segment, -1 for all
};
template <Type type, class S> __device__ __forceinline__ bool find_tile(const Attention &p, const Sharing &sharing,
                                                                        uint32_t turn, Place *place) {
  // Every other turn the other way round, since tiles become smaller.
  uint32_t number = turn * sharing.blocks + (turn % 2 ? sharing.blocks - 1 - blockIdx.x : blockIdx.x);
  if (number >= sharing.count) return false;
  const auto next = [&](uint32_t count) {
    make_opaque(count);  // else its inverse is kept in a register
    const uint32_t at = number % count;
    number /= count;
    return int(at);
  };
  place->column0 = next(sharing.slices) * S::shape.columns;
  place->group = next(uint32_t(p.groups));
  place->sequence = next(uint32_t(p.sequences));
  place->rows = int(sharing.tiles) - 1 - next(sharing.tiles);
  place->only = sharing.split ? int(number) : -1;
  return true;
}

// Tiles that have a result which is not finite, row by row. turns: a bit each, the last for all from there on.
constexpr int kTurnBits = 32;
template <Type type, class S>
__device__ __noinline__ void make_again(const Attention &p, const ScoreScale &scale, const Sharing &sharing,
                                        char *shared, float4 *running, uint32_t turns) {
  using General = Tile<type, Careful<S>>;
#pragma unroll 1
  for (uint32_t turn = 0; turn * sharing.blocks < sharing.count; ++turn) {
    Place place;
    if (!(turns >> min(turn, kTurnBits - 1u) & 1) || !find_tile<type, S>(p, sharing, turn, &place)) continue;
    constexpr int kTimes = Tile<type, S>::kRows / General::kRows;
#pragma unroll 1
    for (int r = place.rows * kTimes; r < (place.rows + 1) * kTimes; ++r)
#pragma unroll 1
      for (int column0 = 0; column0 < p.e; column0 += General::s.columns) {
        General tile(p, scale, shared, running);
        if (!tile.begin(r, place.sequence, place.group, column0, place.only)) break;
        tile.walk(true);
        tile.store();
      }
  }
}

template <Type type, class S>
__global__ void __launch_bounds__(Tile<type, S>::kThreads, S::shape.blocks)
    attention_mma_kernel(const __grid_constant__ Attention p, const __grid_constant__ ScoreScale scale,
                         const __grid_constant__ Sharing sharing) {
  using OfShape = Tile<type, S>;
  extern __shared__ __align__(128) char shared[];
  const auto running = [&] {
    uint32_t block = blockIdx.x;
    make_opaque(block);
    char *of_block = sharing.running + uint64_t(block) * OfShape::kRunningBytes;
    return reinterpret_cast<float4 *>(sharing.running ? of_block : nullptr);
  };
  uint32_t astray = 0;
#pragma unroll 1
  for (uint32_t turn = 0; turn * sharing.blocks < sharing.count; ++turn) {
    OfShape tile(p, scale, shared, running());
    Place place;
    if (!find_tile<type, S>(p, sharing, turn, &place) ||
        !tile.begin(place.rows, place.sequence, place.group, place.column0, place.only))
      continue;
    bool careful = false;
    do tile.walk(careful);
    while (!careful && (careful = tile.astray()) && S::takes_all);
    if (!S::takes_all && careful) astray |= 1u << min(turn, kTurnBits - 1u);
    tile.store();
  }
  if constexpr (!S::takes_all)
    if (astray) make_again<type, S>(p, scale, sharing, shared, running(), astray);
}

constexpr const char *kName = "attention_mma";
constexpr int64_t kMostTiles = (int64_t(1) << 31) - 1;

template <Type type, class S> pydet_status run(const Attention &p) {
  using OfShape = Tile<type, S>;
  constexpr bool kTakesAll = S::takes_all;
  static_assert(kTakesAll || OfShape::kRunningBytes <= kAttentionRunningBytes);
  const int64_t tiles = divide_up(rows_of_group(p), OfShape::kRows),
                whole = tiles * divide_up(p.e, S::shape.columns) * p.groups * p.sequences;
  const bool split = splits_segments(p, whole), folds = !split && segments_of(p) > 1;
  int64_t blocks = split ? whole * segments_of(p) : whole;
  if (blocks > kMostTiles) return fail(PYDET_UNSUPPORTED, "%s: %" PRId64 " tiles are too many", kName, blocks);
  Sharing sharing = {uint32_t(blocks),
                     uint32_t(divide_up(p.e, S::shape.columns)),
                     uint32_t(tiles),
                     0,
                     split,
                     folds && !kTakesAll ? static_cast<char *>(p.workspace) : nullptr};
  if (sharing.running) {
    const int64_t most = int64_t(p.workspace_size / OfShape::kRunningBytes),
                  fits = int64_t(S::shape.blocks) * gpu_multiprocessors(p.device.id);
    blocks = blocks < most ? blocks : most;
    blocks = blocks < fits ? blocks : fits;
  }
  sharing.blocks = uint32_t(blocks);
  const Launch shape = {kName, static_cast<gpu_stream>(p.stream), grid_of(blocks, OfShape::kThreads),
                        dim3(OfShape::kThreads), OfShape::shared_bytes(p.d, folds && kTakesAll)};
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(kName, guard.error());
  pydet_status status = split ? load_combine(kName, p) : PYDET_OK;
  if (status == PYDET_OK) status = launch(shape, attention_mma_kernel<type, S>, p, score_scale(p), sharing);
  return status == PYDET_OK && split ? combine_segments(kName, p) : status;
}

// Whether vectors of eight elements begin at multiples of 16 bytes.
bool in_vectors(const Heads &x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.sequence_stride % kVector == 0 &&
         x.head_stride % kVector == 0 && x.token_stride % kVector == 0;
}

// Scores under a softcap or with a bias are rare: one kernel a block has them, for vectors that begin anywhere.
template <Type type, int block> pydet_status run_any(const Attention &p) {
  if (p.bias.data || p.softcap != 0.0f) return run<type, Any<block, false, true>>(p);
  if (!in_vectors(p.q) || !in_vectors(p.k) || !in_vectors(p.v)) return run<type, Any<block, false, false>>(p);
  return run<type, Any<block, true, false>>(p);
}

template <Type type> pydet_status run_type(const Attention &p) {
  const bool adjusts = p.bias.data || p.softcap != 0.0f,
             vectors = in_vectors(p.q) && in_vectors(p.k) && in_vectors(p.v) && in_vectors(p.out),
             room = segments_of(p) < 2 || p.workspace_size >= uint64_t(kAttentionRunningBytes);
  // Two blocks of Usual need 164.3 KB of a multiprocessor, its own share included: more than an Ampere has. One of Wide
  // needs 97 KB.
  const int bytes = gpu_shared_bytes(p.device.id);
  if (!adjusts && !p.allowed.data && vectors && room) {
    if (p.d <= 64 && p.e <= 64) return run<type, Narrow>(p);
    if (p.d <= 128 && p.e <= 128) return bytes < (200 << 10) ? run<type, Small>(p) : run<type, Usual>(p);
    if (p.d > 128 && p.d <= 192 && p.e <= 128) return run<type, Deep>(p);
    if (p.d > 128 && p.d <= 256 && p.e <= 256 && bytes >= (160 << 10)) return run<type, Wide>(p);
  }
  return block_keys(p.d) == kKeysBlock ? run_any<type, kKeysBlock>(p) : run_any<type, 64>(p);
}

}  // namespace

constexpr Type kType = kMmaTypes[PYDET_MMA_TYPE];  // of this object's kernels
template <> bool AttentionMma<kType>::takes(const Attention &p) {
  return Tile<kType, Any<64, true, false>>::shared_bytes(p.d, true) <= gpu_shared_bytes(p.device.id);
}
template <> pydet_status AttentionMma<kType>::run(const Attention &p) { return run_type<kType>(p); }

}  // namespace pydet
