// From an fp32 accumulator to an element of out: the type is known at run time, the rounding is that of types.h.
#pragma once

#include "gpu/device.h"

namespace pydet {

__device__ __forceinline__ float load_f32(const void *data, Type type, int64_t index) {
  if (type == Type::f32) return static_cast<const float *>(data)[index];
  return f32_from_half(type, static_cast<const uint16_t *>(data)[index]);
}

__device__ __forceinline__ void store_rounded(void *data, Type type, int64_t index, float x) {
  if (type == Type::f32) static_cast<float *>(data)[index] = canonical(x);
  else static_cast<uint16_t *>(data)[index] = half_from_f32(type, x);
}

}  // namespace pydet
