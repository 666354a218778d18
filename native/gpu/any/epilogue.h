// From an fp32 accumulator to an element of out: the type is known at run time, the rounding is that of types.h.
#pragma once

#include "gpu/device.h"

namespace pydet {

static_assert(kUnscaledTypes == (bit(Type::f32) | bit(Type::bf16) | bit(Type::f16)), "what the two below know");

__device__ __forceinline__ float load_f32(const void *data, Type type, int64_t index) {
  if (type == Type::f32) return static_cast<const float *>(data)[index];
  uint16_t half = static_cast<const uint16_t *>(data)[index];
  return type == Type::bf16 ? f32_from_bf16(half) : f32_from_f16(half);
}

__device__ __forceinline__ void store_rounded(void *data, Type type, int64_t index, float x) {
  if (type == Type::f32) static_cast<float *>(data)[index] = canonical(x);
  else static_cast<uint16_t *>(data)[index] = type == Type::bf16 ? bf16_from_f32(x) : f16_from_f32(x);
}

}  // namespace pydet
