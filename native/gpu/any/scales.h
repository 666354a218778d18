// The scale of a row or column of a scaled product, as its kernels on plain fp32 units read it.
#pragma once

#include "gpu/device.h"
#include "ops/scaled/problem.h"

namespace pydet {
namespace {

// As it lies in memory, to be waited for when it is used; 1 where there is none.
__device__ __forceinline__ uint32_t scale_bits_at(const pydet::Scale &scale, int64_t outer, int64_t chunk) {
  if (!scale.data) return bits_of(1.0f);
  const int64_t at = (scale.blocks ? outer / kScaleGroup : outer) * scale.stride + chunk * scale.chunk_stride;
  return scale.type == Type::f32 ? reinterpret_cast<const uint32_t *>(scale.data)[at] : uint8_t(scale.data[at]);
}
__device__ __forceinline__ float scale_of_bits(const pydet::Scale &scale, uint32_t bits) {
  return !scale.data || scale.type == Type::f32 ? float_of(bits) : f32_from_e8m0(uint8_t(bits));
}

__device__ __forceinline__ float scale_at(const pydet::Scale &scale, int64_t offset, int64_t outer, int64_t chunk) {
  if (!scale.data) return 1;
  const int64_t at = offset + (scale.blocks ? outer / kScaleGroup : outer) * scale.stride + chunk * scale.chunk_stride;
  return scale.type == Type::f32 ? reinterpret_cast<const float *>(scale.data)[at]
                                 : f32_from_e8m0(uint8_t(scale.data[at]));
}

}  // namespace
}  // namespace pydet
