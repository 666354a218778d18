// Which tile a problem is computed by (choose.cpp).
#pragma once

#include "gpu/nvidia/sm90/fp8_tiles.h"
#include "gpu/nvidia/sm90/gemm.h"

namespace pydet {

// The layouts that a tile takes: its own, and those of training (with k_chunk or swapped no dB) that another tile of its
// size has kernels for. What a tile costs in the rest was not measured, or by few problems.
constexpr uint32_t sm90_layouts(int tile, bool chunked) {
  const Sm90Tile &its = kSm90Tiles[tile];
  const uint32_t own = its.layouts_of(chunked), size = kSm90Sizes.sizes[kSm90Sizes.of_tile[tile]].layouts_of(chunked);
  if (its.hands_over) return own;
  return own | (size & (kForward | (its.swapped ? kTurnedA : kTurnedB) | (chunked || its.swapped ? 0 : kBothTurned)));
}

// The bytes with which tiles may be handed over (clusters.cu); 0 where the product is none for it.
uint64_t sm90_handover_bytes(int64_t m, int64_t n, int64_t k, int64_t k_chunk);

// Whether the last waves of so many rows and columns can be shared out among so many clusters.
bool sm90_shares_out(const Sm90Tile &, int64_t m, int64_t n, int clusters);

// The index in kSm90Tiles of the tile that is predicted to be the fastest, for a problem that one of them takes.
int sm90_fastest_tile(const Gemm &, const Sm90Operands &);

// The same of kFp8Tiles (fp8_tiles.h), of a problem of fp8.
struct ScaledGemm;
int fastest_scaled_tile(const ScaledGemm &);
// Whether each row of a's k, and column of b's, begins a line of the L2: else its boxes are of twice as many lines.
bool scaled_whole_lines(const ScaledGemm &);
bool scaled_tile_takes(const ScaledGemm &, int tile);

}  // namespace pydet
