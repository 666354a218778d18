// How a problem is cut for skinny.cu: what skinny_choose.cpp finds and the launch receives.
#pragma once

#include <cstdint>

#include "ops/gemm/problem.h"

namespace pydet {

constexpr int kSkinnyWarpgroupRows = 64;     // of x
constexpr int kSkinnyNarrowRows = 32;        // of w: in wider tiles the memory is slower than the chain
constexpr int kHalfSharedBytes = 113 << 10;  // of a block that leaves room for another

// Rows of w a tile, whether x is split, shared memory for the rings, and when the next kernel may start.
struct SkinnyPlan {
  int rows;
  bool x_split;
  int shared_bytes;
  bool early;
  int parts = 1;       // of K, each in a block of its own
  int more_bytes = 0;  // of shared memory, at Layout::sums
};
struct SkinnyCut {
  SkinnyPlan plan;
  int64_t k_chunk;
};

// Whether a batch is the chunks of one product, side by side along k, whose sums are wanted apart, in fp32.
inline bool side_by_side(const Gemm &g) {
  return g.batch.dims == 1 && g.k % kChunkMultiple == 0 && g.batch.a[0] == g.k && g.batch.b[0] == g.k &&
         g.batch.out[0] != 0 && g.out.type == Type::f32 && g.k_chunk == 0 && !g.accumulate && !g.bias.data && !g.fast;
}
// That product; its batch says where the sums lie.
inline Gemm in_one(const Gemm &g) {
  Gemm one = g;
  if (g.batch.dims) one.k_chunk = g.k, one.k = g.k * g.batch.count;
  return one;
}

}  // namespace pydet
