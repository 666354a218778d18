// How a problem is cut for skinny.cu: what skinny_choose.cpp finds and the launch receives.
#pragma once

#include <cstdint>

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

}  // namespace pydet
