// From an fp32 accumulator to an element of out, by the rounding of types.h.
#pragma once

#include "gpu/device.h"

namespace pydet {

// Where the type is known at run time.
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

// Where it is known before: to the type and back. In fp32 there is nothing to round, and a NaN need not be canonical before it is stored.
template <Type type> __device__ __forceinline__ float rounded(float x) {
  if constexpr (type == Type::f32) return x;
  else return Element<type>::to_f32(Element<type>::from_f32(x));
}

}  // namespace pydet
