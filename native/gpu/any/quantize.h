// What the kernels share that quantise (quantize.cu, quantize_packed.cu, norm_fp8.h): what they are told of a problem, and single formulas.
#pragma once

#include "gpu/device.h"
#include "gpu/kernels.h"
#include "ops/scaled/problem.h"

namespace pydet {
namespace {

constexpr int kSide = kScaleGroup;
constexpr int kUnit = 8;               // elements a thread loads at once
constexpr int kLanes = kSide / kUnit;  // threads side by side on a group
constexpr int kWarp = 32;              // threads, also where the hardware has more side by side

// The value of thread `this ^ apart` of a warp, all of which call it.
__device__ __forceinline__ uint32_t from_lane_across(uint32_t value, int apart) {
#if defined(__HIP_PLATFORM_AMD__)
  return __shfl_xor(value, apart, kWarp);
#else
  return __shfl_xor_sync(0xFFFFFFFFu, value, apart);
#endif
}

// The largest value of each `lanes` neighbouring threads of a warp, all of which call it.
template <int lanes> __device__ __forceinline__ uint32_t most_of_lanes(uint32_t value) {
#if !defined(__HIP_PLATFORM_AMD__)
  if constexpr (lanes == kWarp) value = __reduce_max_sync(0xFFFFFFFFu, value);
  else
#endif
#pragma unroll
    for (int apart = lanes / 2; apart > 0; apart /= 2) value = max(value, from_lane_across(value, apart));
  return value;
}

__device__ __forceinline__ uint32_t largest_of(const float (&v)[kUnit]) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) amax = max(amax, bits_of(v[i]) & 0x7FFFFFFFu);
  return amax;
}

// Two to bytes, clamped: the instruction's saturation is the clamp.
template <Type type> __device__ __forceinline__ uint32_t round_pair(float x, float y) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  if constexpr (type == Type::e4m3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(x), "f"(y));
  else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(x), "f"(y));
  return pair;
#else
  constexpr float kMost = pydet::largest_of(type);
  return Element<type>::from_f32(clamped(x, kMost)) | uint32_t(Element<type>::from_f32(clamped(y, kMost))) << 8;
#endif
}

__device__ __forceinline__ uint32_t round_pair(Type type, float x, float y) {
  return type == Type::e4m3 ? round_pair<Type::e4m3>(x, y) : round_pair<Type::e5m2>(x, y);
}

template <class Operand>  // a Matrix, or Rows
__device__ __forceinline__ float read_scale(const Operand &scale, int64_t at) {
  return scale.type == Type::f32 ? reinterpret_cast<const float *>(scale.data)[at]
                                 : f32_from_e8m0(reinterpret_cast<const uint8_t *>(scale.data)[at]);
}

template <class Operand> __device__ __forceinline__ void write_scale(const Operand &scale, int64_t at, float s) {
  if (scale.type == Type::f32) reinterpret_cast<float *>(scale.data)[at] = s;
  else reinterpret_cast<uint8_t *>(scale.data)[at] = s == s ? uint8_t(bits_of(s) >> 23) : uint8_t(0xFF);
}

// Whether every row of the operand begins at a multiple of `bytes`, and its elements are adjacent.
inline bool vectors(const Quantize &p, const Matrix &matrix, int operand, int bytes) {
  const int64_t unit = bytes / size_of(matrix.type);
  bool fits = reinterpret_cast<uintptr_t>(matrix.data) % uintptr_t(bytes) == 0 && matrix.col_stride == 1 &&
              (matrix.rows <= 1 || matrix.row_stride % unit == 0);
  for (int d = 0; d < p.batch.dims; ++d) fits = fits && p.batch.stride[operand][d] % unit == 0;
  return fits;
}

}  // namespace
}  // namespace pydet
