// What a kernel's blocks have to do, one job after another. A thread of the warpgroup that fills the ring takes them,
// and tells the consumers.
#pragma once

#include "gpu/nvidia/sm90/pipe/ring.h"

namespace pydet {

// a / b of 0 <= a and 0 < b. `quick`: by a reciprocal, one off at most below 2^22, and counted to the end beyond: a
// division takes some 150 cycles.
template <bool quick> __device__ __forceinline__ int quotient_of(int a, int b) {
  if constexpr (!quick) {
    return a / b;
  } else {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(float(b)));
    int quotient = int(float(a) * reciprocal);
    while (quotient * b > a) --quotient;
    while ((quotient + 1) * b <= a) ++quotient;
    return quotient;
  }
}

// The jobs that the producer has begun, for the consumers, which would stand still while they worked them out: `count`
// slots of shared memory, in a ring. `turn` counts jobs. Each warp that reads a slot gives it back.
template <int count, class Turn> struct Slots {
  uint32_t barriers;
  __device__ __forceinline__ uint32_t full(Turn turn) const { return barriers + turn % count * 8; }
  __device__ __forceinline__ uint32_t empty(Turn turn) const { return full(turn) + count * 8; }
  __device__ __forceinline__ void wait_full(Turn turn) const { barrier_wait(full(turn), turn / count & 1); }
  __device__ __forceinline__ void wait_empty(Turn turn) const { barrier_wait(empty(turn), (turn / count & 1) ^ 1); }
  __device__ __forceinline__ void give_back(Turn turn) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(turn));
  }
};

}  // namespace pydet
