// Numbers that Python and XLA hand over in double precision.
#pragma once

#include "contract/types.h"

namespace pydet {

// To nearest even by its bits: the calling thread's rounding mode and flush-to-zero do not reach it, nor the NaN's payload.
inline float f32_from_f64(double x) {
  uint64_t u;
  memcpy(&u, &x, 8);
  const uint32_t sign = uint32_t(u >> 32) & 0x80000000u;
  const int exponent = int(u >> 52 & 0x7FF) - (1023 - 127);  // as fp32 writes it, where that has it
  const uint64_t fraction = u & 0xFFFFFFFFFFFFFu, significand = fraction | uint64_t(1) << 52;
  if (exponent == 0x7FF - (1023 - 127) && fraction) return float_of(kNanF32);
  if (exponent >= 255) return float_of(sign | 0x7F800000u);
  const int dropped = exponent > 0 ? 29 : 30 - exponent;  // more where it becomes subnormal
  if (dropped > 53) return float_of(sign);                // below half of the least
  const uint64_t kept = significand >> dropped, rest = significand & ((uint64_t(1) << dropped) - 1);
  const uint64_t half = uint64_t(1) << (dropped - 1);
  const uint32_t up = rest > half || (rest == half && (kept & 1));
  return float_of(sign | ((exponent > 0 ? uint32_t(exponent - 1) << 23 : 0u) + uint32_t(kept) + up));
}

}  // namespace pydet
