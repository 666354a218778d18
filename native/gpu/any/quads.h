// The elements of a thread's part of a tile in the kernels on plain fp32 units: quads along m and n, far apart, so that
// a warp's loads from shared memory are of neighbours.
#pragma once

#include "gpu/device.h"

namespace pydet {

constexpr int kQuad = 4;  // floats in one shared-memory load

// Element i of a thread's along m or n: its quads lie `threads` quads apart.
__device__ __forceinline__ int outer_of(int thread, int i, int threads) {
  return (i / kQuad * threads + thread) * kQuad + i % kQuad;
}

// A thread's elements of a row in shared memory.
template <int count>
__device__ __forceinline__ void load_quads(float (&values)[count], const float *row, int thread, int threads) {
#pragma unroll
  for (int i = 0; i < count; i += kQuad) {
    const float4 quad = *reinterpret_cast<const float4 *>(row + outer_of(thread, i, threads));
    values[i] = quad.x;
    values[i + 1] = quad.y;
    values[i + 2] = quad.z;
    values[i + 3] = quad.w;
  }
}

}  // namespace pydet
