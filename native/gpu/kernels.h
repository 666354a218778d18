// The GPU kernels as backend.cpp's table sees them: host functions, one .cu file below each comment.
#pragma once

#include "../kernel.h"

namespace pydet {

// gemm_sm90.cu. Rows by columns of out that one cluster-wide step of the pipeline works on, for each block. `cluster_m`
// blocks under each other share a load of b, `cluster_n` side by side share a load of a.
struct Sm90Tile {
  const char *name;
  int m, n, cluster_m, cluster_n;
  bool chunked;  // also takes k_chunk, which needs twice the accumulators
};
constexpr Sm90Tile kSm90Tiles[] = {
    {"cuda_gemm_sm90_128x256", 128, 256, 2, 1, false},
    {"cuda_gemm_sm90_128x192", 128, 192, 2, 1, true},
    {"cuda_gemm_sm90_128x128", 128, 128, 2, 1, true},
};
constexpr int kSm90TileCount = int(sizeof kSm90Tiles / sizeof *kSm90Tiles);

template <int tile> bool gemm_sm90_takes(const Gemm &);
template <int tile> bool gemm_sm90_prefers(const Gemm &);
template <int tile> pydet_status gemm_sm90(const Gemm &);

}  // namespace pydet
