// Numbers of up to a group to fp8 by their scale (NUMERICS.md, "Quantisation"), on the CPU.
#pragma once

#include "cpu/simd.h"
#include "ops/scaled/problem.h"

namespace pydet {
namespace {

constexpr int kSide = kScaleGroup;

struct Fp8Bytes {  // of a row (rows.h)
  using Stored = uint8_t;
};

inline uint32_t magnitude(float x) { return bits_of(x) & 0x7FFFFFFFu; }
inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

inline float read_scale(const Matrix &scale, int64_t at) {
  return scale.type == Type::f32 ? ((const float *)scale.data)[at] : f32_from_e8m0(((const uint8_t *)scale.data)[at]);
}
inline void write_scale(const Matrix &scale, int64_t at, float s) {
  if (scale.type == Type::f32) ((float *)scale.data)[at] = s;
  else ((uint8_t *)scale.data)[at] = s == s ? uint8_t(bits_of(s) >> 23) : uint8_t(0xFF);
}

// The q of one row by the scales of its elements, or by one.
template <Type type> void round_row(const float *values, int cols, const float *scales, float scale, uint8_t *to,
                                    int64_t stride) {
  uint8_t bytes[kSide];
  constexpr float kMost = largest_of(type);
  if (scales)
    for (int j = 0; j < cols; ++j) bytes[j] = Element<type>::from_f32(clamped(values[j] / scales[j], kMost));
  else
    for (int j = 0; j < cols; ++j) bytes[j] = Element<type>::from_f32(clamped(values[j] / scale, kMost));
  if (stride == 1) memcpy(to, bytes, size_t(cols));
  else
    for (int j = 0; j < cols; ++j) to[j * stride] = bytes[j];
}
inline void round_row(Type type, const float *values, int cols, const float *scales, float scale, uint8_t *to,
                      int64_t stride) {
  if (type == Type::e4m3) round_row<Type::e4m3>(values, cols, scales, scale, to, stride);
  else round_row<Type::e5m2>(values, cols, scales, scale, to, stride);
}

}  // namespace
}  // namespace pydet
