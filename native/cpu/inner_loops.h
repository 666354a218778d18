// Inner loops of GEMM in which attention multiplies too. Each instruction set has them once: gemm_ieee.cpp and
// gemm_tensorcore.cpp compile them.
#pragma once

#include "cpu/kernels.h"

namespace pydet {

// ---- ieee ----------------------------------------------------------------------------------------------------------

// Rows and columns of fp32, `stride` floats from row to row; p is NULL for all +0.
struct Tile {
  float *p;
  int64_t stride;
};

// Some steps of k of one tile's chains: s = start, then fmaf over `depth` steps, then base + s if `fold`, into `to`.
struct Steps {
  int64_t depth, columns;
  const float *a;  // a strip: its rows of one k are adjacent
  const void *b;   // a panel: fp32, b_stride from k to k, columns adjacent; but see Way::transposed
  int64_t b_stride;
  Tile start, base, to;
  bool fold;
  Tile next;                  // that of the call to come: its lines are asked for. May be none
  const char *ask, *ask_end;  // lines ask_step apart that are asked for meanwhile, one a step. May be none
  int64_t ask_step;
};
using Chain = void (*)(const Steps &);

// That of `rows` rows by a panel of Tiles::kColumns (gemm_ieee_chains.h).
template <class Isa> Chain tile_chain(int64_t rows);

// ---- Tensor cores --------------------------------------------------------------------------------------------------

// The steps of one arithmetic (tensorcore_steps.h).
struct TensorCoreLoops {
  // Chains of `rows` rows, kDepth apart in a, by the kTile columns of b, `depth` further along k. chain: [row][kCols].
  using Walk = void(const float *a, const int32_t *a_exponent, const float *b, const int16_t *b_exponent, int64_t rows,
                    int64_t depth, float *chain);
  Walk *walk;
  // One chain, number by number, `count` further, at most 16.
  float (*walk_one)(Type type, const float *a, const float *b, int64_t count, float c);
};
template <class Isa> const TensorCoreLoops &tensor_core_loops(Arithmetic arithmetic);

}  // namespace pydet
