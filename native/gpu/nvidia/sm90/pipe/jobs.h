// What a kernel's blocks have to do, one job after another.
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

}  // namespace pydet
