// The GPU kernels as backend.cpp's table sees them: host functions, one .cu file below each comment.
#pragma once

#include "kernel.h"

namespace pydet {

// nvidia/sm90/gemm.cu. Rows by columns of out that a block works on at a time. `cluster_m` blocks under each other share their
// loads of b, `cluster_n` side by side those of a. A `swapped` tile is one of out^T = b^T a^T, where few rows of out fit
// its columns better: the kernels of the tile `kernels_of`, which store what they make transposed.
struct Sm90Tile {
  const char *name;
  int m, n, cluster_m, cluster_n;
  bool chunked;  // also takes k_chunk, which needs twice the accumulators
  int kernels_of = -1;
  constexpr bool swapped() const { return kernels_of >= 0; }
};
constexpr Sm90Tile kSm90Tiles[] = {
    {"cuda_gemm_sm90_128x256", 128, 256, 2, 1, false},
    {"cuda_gemm_sm90_128x224", 128, 224, 2, 1, false},
    {"cuda_gemm_sm90_128x192", 128, 192, 2, 1, true},
    {"cuda_gemm_sm90_128x160", 128, 160, 2, 1, true},
    {"cuda_gemm_sm90_128x128", 128, 128, 2, 1, true},
    {"cuda_gemm_sm90_128x128_wide", 128, 128, 1, 2, true},
    {"cuda_gemm_sm90_128x64", 128, 64, 2, 1, true},
    {"cuda_gemm_sm90_64x160_wide", 64, 160, 1, 2, true},
    {"cuda_gemm_sm90_64x128_wide", 64, 128, 1, 2, true},
    {"cuda_gemm_sm90_64x64_wide", 64, 64, 1, 2, true},
    {"cuda_gemm_sm90_128x176", 128, 176, 2, 1, true},
    {"cuda_gemm_sm90_128x112", 128, 112, 2, 1, true},
    {"cuda_gemm_sm90_256x160_wide", 256, 160, 1, 2, false},
    {"cuda_gemm_sm90_128x192_wide", 128, 192, 1, 2, true},
    {"cuda_gemm_sm90_128x160_wide", 128, 160, 1, 2, true},
    {"cuda_gemm_sm90_128x192_wide_swapped", 128, 192, 1, 2, true, 13},
    {"cuda_gemm_sm90_128x160_wide_swapped", 128, 160, 1, 2, true, 14},
    {"cuda_gemm_sm90_256x160_wide_swapped", 256, 160, 1, 2, false, 12},
    {"cuda_gemm_sm90_128x112_swapped", 128, 112, 2, 1, true, 11},
    {"cuda_gemm_sm90_64x160_wide_swapped", 64, 160, 1, 2, true, 7},
    {"cuda_gemm_sm90_64x128_wide_swapped", 64, 128, 1, 2, true, 8},
    {"cuda_gemm_sm90_64x64_wide_swapped", 64, 64, 1, 2, true, 9},
};
constexpr int kSm90TileCount = int(sizeof kSm90Tiles / sizeof *kSm90Tiles);

bool sm90_takes(const Gemm &, int tile);
bool sm90_prefers(const Gemm &, int tile);
template <int tile> pydet_status gemm_sm90(const Gemm &);

// nvidia/sm90/skinny.cu. Rows of the weights that a block works on at a time, for up to 128 rows of a.
template <int rows> struct SkinnySm90 {
  static bool takes(const Gemm &);
  static bool prefers(const Gemm &);
  static pydet_status launch(const Gemm &);
};

// any/skinny_ieee.cu
bool skinny_ieee_takes(const Gemm &);
pydet_status skinny_ieee(const Gemm &);

// nvidia/skinny_mma.cu
bool skinny_mma_takes(const Gemm &);
bool skinny_mma_prefers(const Gemm &);
pydet_status skinny_mma(const Gemm &);

// nvidia/gemm_mma.cu
pydet_status gemm_mma_64(const Gemm &);
bool gemm_mma_128_takes(const Gemm &);
pydet_status gemm_mma_128(const Gemm &);

// amd/gemm_mfma.cu
pydet_status gemm_mfma_64(const Gemm &);
pydet_status gemm_mfma_128(const Gemm &);

// amd/skinny_mfma.cu
bool skinny_mfma_takes(const Gemm &);
pydet_status skinny_mfma(const Gemm &);

// any/gemm_ieee.cu
pydet_status gemm_ieee_64x64(const Gemm &);
pydet_status gemm_ieee_128x128(const Gemm &);  // HIP

// nvidia/gemm_ieee_fp32.cu
bool gemm_ieee_128x256_takes(const Gemm &);
pydet_status gemm_ieee_128x256(const Gemm &);

// any/rmsnorm.cu
bool rmsnorm_held_takes(const RmsNorm &);
pydet_status rmsnorm_held(const RmsNorm &);
pydet_status rmsnorm_long(const RmsNorm &);

// any/rmsnorm_backward.cu
bool rmsnorm_backward_held_takes(const RmsNormBackward &);
bool rmsnorm_backward_chain_prefers(const RmsNormBackward &);
pydet_status rmsnorm_backward_chain(const RmsNormBackward &);
bool rmsnorm_backward_cluster_takes(const RmsNormBackward &);
bool rmsnorm_backward_cluster_prefers(const RmsNormBackward &);
pydet_status rmsnorm_backward_cluster(const RmsNormBackward &);
pydet_status rmsnorm_backward_group(const RmsNormBackward &);

// any/rmsnorm_backward_long.cu
pydet_status rmsnorm_backward_long(const RmsNormBackward &);

// any/rmsnorm_backward_short.cu
bool rmsnorm_backward_short_takes(const RmsNormBackward &);
bool rmsnorm_backward_short_chain_prefers(const RmsNormBackward &);
pydet_status rmsnorm_backward_short_chain(const RmsNormBackward &);
pydet_status rmsnorm_backward_short_cluster(const RmsNormBackward &);

}  // namespace pydet
