// What the two kernels for few rows on AMD's matrix cores have in common: one chain (skinny_mfma_chain.cu), and chunks
// (skinny_mfma.cu).
#pragma once

#include "gpu/amd/mfma.h"
#include "gpu/kernels.h"
#include "ops/gemm/problem.h"

namespace pydet {
namespace {

constexpr int kRows = 16, kMostTiles = 8;  // rows of x in a tile, and tiles
constexpr int kQuad = 4;                   // neighbours in y that a lane ends with
using M = Mfma<kRows>;
static_assert(M::kCount == kQuad, "a lane's accumulators are one quad");

[[maybe_unused]] __device__ __forceinline__ void add_bias(M::Accumulators &sum, const Gemm &problem, int64_t row,
                                                          int64_t n, int count) {
  with_type<kUnscaledTypes>(problem.bias.type, [&](auto type) {
#pragma unroll
    for (int e = 0; e < kQuad; ++e)
      if (e < count)
        sum[e] += load_f32(problem.bias.data, type, row * problem.bias.row_stride + (n + e) * problem.bias.col_stride);
  });
}

[[maybe_unused]] __device__ __forceinline__ void store_quad(const M::Accumulators &sum, const Gemm &problem,
                                                            int64_t row, int64_t n, int count) {
  const float four[kQuad] = {sum[0], sum[1], sum[2], sum[3]};
  store_four(problem.out.data, problem.out.type, row * problem.out.row_stride + n, four, count);
}

// ---- Launch ------------------------------------------------------------------------------------------------------

constexpr int64_t kMaxBlocks = 1 << 20;  // more rows of w than those of so many are walked in turns

// Rows of w for a wave: fewer where that gives more compute units work, but not fewer than half of what it reads of x.
[[maybe_unused]] int wave_rows(const Gemm &g, int64_t chunks) {
  const int64_t units = gpu_multiprocessors(g.device.id);
  int rows = kRows;
  while (rows > 4 && rows >= g.m && divide_up(g.n, rows / 2) * chunks <= units) rows /= 2;
  return rows;
}

// Calls f(type, tiles) for the kernel that this problem has.
template <class F> pydet_status with_tiles(const Gemm &g, const F &f) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error("skinny_gemm_mfma", guard.error());
  return with_type<kHalfTypes>(g.a.type, [&](auto type) {
    if (g.m <= kRows) return f(type, std::integral_constant<int, 1>{});
    if (g.m <= 2 * kRows) return f(type, std::integral_constant<int, 2>{});
    if (g.m <= 4 * kRows) return f(type, std::integral_constant<int, 4>{});
    return f(type, std::integral_constant<int, kMostTiles>{});
  });
}

}  // namespace
}  // namespace pydet
