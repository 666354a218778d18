// The main loop of 16-bit products: a warpgroup's chain of steps over the stages of a ring.
#pragma once

#include "gpu/nvidia/sm90/pipe/ring.h"
#include "gpu/nvidia/sm90/pipe/wgmma.h"

namespace pydet {

// Where in the ring a warpgroup reads, and the stage that its wgmma group in flight still reads. tell(stage) tells all
// blocks that write into a stage that it has been read; where that is negative, nothing.
template <class S, class Tell> struct Chain {
  Ring<S> ring;
  int warpgroup;
  Tell tell;
  int reading = -1;

  // Starts `steps` steps of 16 on the next stage, the first from +0 if `fresh`, and frees the stage before it. Whole
  // stages are unrolled.
  template <bool whole> __device__ __forceinline__ void advance(float (&d)[S::registers], int steps, bool fresh) {
    ring.wait_full();
    const uint64_t a = wgmma_descriptor<S::a_k_adjacent>(ring.a() + warpgroup * S::blocks * kBlockBytes);
    const uint64_t b = wgmma_descriptor<S::b_k_adjacent>(ring.b());
    wgmma_fence();
    auto step = [&](int i) {
#pragma unroll
      for (int block = 0; block < S::blocks; ++block)
        wgmma<S::type, S::a_k_adjacent, S::b_k_adjacent>(
            block_of<S>(d, block), a + i * kDescriptorStep<S::a_k_adjacent> + (block * kBlockBytes >> 4),
            b + i * kDescriptorStep<S::b_k_adjacent>, i || !fresh);
    };
    if constexpr (whole) {
#pragma unroll
      for (int i = 0; i < kBlockK / kStep; ++i) step(i);
    } else {
#pragma unroll 1
      for (int i = 0; i < steps; ++i) step(i);
    }
    wgmma_commit();
    wgmma_wait<1>();
    tell(reading);
    reading = ring.stage;
    ring.next();
  }

  // The accumulators may be read.
  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
    tell(reading);
    reading = -1;
  }

  // d = the chain over `depth` k, or the sum of its chunks, from d; a chain that is `fresh` from +0, whatever d is.
  template <bool fresh> __device__ __forceinline__ void run(float (&d)[S::registers], int depth, int chunk) {
    if constexpr (S::chunked) {
#pragma unroll 1
      for (int start = 0; start < depth; start += chunk) {
        float sum[S::registers];
        const int here = min(depth - start, chunk), whole = here / kBlockK;
        const int steps = (here % kBlockK + kStep - 1) / kStep;
#pragma unroll 1
        for (int i = 0; i < whole; ++i) advance<true>(sum, 0, i == 0);
        if (steps) advance<false>(sum, steps, whole == 0);
        finish();
#pragma unroll
        for (int i = 0; i < S::registers; ++i) d[i] = d[i] + sum[i];
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < depth; k += kBlockK) advance<true>(d, 0, fresh && k == 0);
      finish();
    }
  }
};

}  // namespace pydet
