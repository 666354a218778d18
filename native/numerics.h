// What every backend must agree on to the bit: number types, their conversions and the shapes of the sums.
// NUMERICS.md explains; here are the constants.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define PYDET_HD __host__ __device__ __forceinline__
#else
#define PYDET_HD static inline __attribute__((always_inline, unused))
#endif

namespace pydet {

// ---- RMSNorm -----------------------------------------------------------------------------------------------------

// Element j of a row belongs to lane (g, e): e = j mod 8, g = (j div 8) mod 256. A lane walks its elements ascending.
// Then the 8 e of a group are joined, partners 4, 2, 1 apart, then the 256 groups, partners 128, 64, ..., 1 apart.
constexpr int kRowLaneElements = 8;
constexpr int kRowLaneGroups = 256;
constexpr int kRowLanes = kRowLaneElements * kRowLaneGroups;

// dweight: rows in chains of 16 from +0; 4 chains added ascending from +0 make a group of 64 rows, 4 groups added ascending
// from +0 a block of 256; blocks are added ascending, from +0 or from dweight.
constexpr int kDweightChainRows = 16;
constexpr int kDweightGroupRows = 64;
constexpr int kDweightBlockRows = 256;

// ---- GEMM --------------------------------------------------------------------------------------------------------

constexpr int kChunkMultiple = 16;  // k_chunk is a multiple of every arithmetic's step

// ---- Number types ------------------------------------------------------------------------------------------------

enum class Type : int32_t { f32, bf16, f16 };

PYDET_HD constexpr int size_of(Type type) { return type == Type::f32 ? 4 : 2; }

constexpr uint32_t kNanF32 = 0x7FFFFFFFu;  // the one NaN that is ever stored; NVIDIA's own canonical NaN
constexpr uint16_t kNan16 = 0x7FFFu;       // the same for bf16 and fp16

PYDET_HD uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

PYDET_HD float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

PYDET_HD float canonical(float x) { return x == x ? x : float_of(kNanF32); }

PYDET_HD float f32_from_bf16(uint16_t h) { return float_of(uint32_t(h) << 16); }

// CUDA has the conversions as instructions, the same to the bit; HIP those of fp16. There the compiler must not know that
// what it converts to fp16 is a product: it would fuse the two by an instruction that adds +0, which turns -0 into +0.

PYDET_HD uint16_t bf16_from_f32(float x) {  // to nearest even, NaN canonical
#if defined(__CUDA_ARCH__)
  uint16_t h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#else
  if (x != x) return kNan16;
  uint32_t u = bits_of(x);
  return uint16_t((u + 0x7FFFu + ((u >> 16) & 1)) >> 16);
#endif
}

PYDET_HD float f32_from_f16(uint16_t h) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
#elif defined(__HIP_DEVICE_COMPILE__)
  _Float16 x;
  memcpy(&x, &h, 2);
  return x;
#else
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3FF;
  if (exponent == 31) return float_of(sign | 0x7F800000u | (mantissa << 13));
  if (exponent == 0) {  // mantissa * 2^-24, exact
    float magnitude = float(mantissa) * 5.9604644775390625e-8f;
    return float_of(sign | bits_of(magnitude));
  }
  return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
#endif
}

PYDET_HD uint16_t f16_from_f32(float x) {  // to nearest even, NaN canonical
#if defined(__CUDA_ARCH__)
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#elif defined(__HIP_DEVICE_COMPILE__)
  asm("" : "+v"(x));
  _Float16 rounded = _Float16(x);
  uint16_t h;
  memcpy(&h, &rounded, 2);
  return x == x ? h : kNan16;
#else
  uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return kNan16;
  if (magnitude >= 0x477FF000u) return uint16_t(sign | 0x7C00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                                   // below 2^-14: subnormal, a multiple of 2^-24
    float rounded = float_of(magnitude) + 0.5f;                    // ulp of [0.5, 1) is 2^-24
    return uint16_t(sign | (bits_of(rounded) - 0x3F000000u));
  }
  uint32_t even = (magnitude >> 13) & 1;
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xFFFu + even) >> 13));
#endif
}

}  // namespace pydet
