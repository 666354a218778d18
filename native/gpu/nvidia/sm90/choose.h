// Which tile a problem is computed by (choose.cpp).
#pragma once

#include "gpu/nvidia/sm90/gemm.h"

namespace pydet {

// The index in kSm90Tiles of the tile that is predicted to be the fastest, for a problem that one of them takes.
int sm90_fastest_tile(const Gemm &, const Sm90Operands &);

// The same of the kScaledTiles tiles of scaled_tiles.cu.
struct ScaledGemm;
int fastest_scaled_tile(const ScaledGemm &);

}  // namespace pydet
