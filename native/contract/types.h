// Number types: one row a type, and how an element becomes fp32 and back, which every backend does to the bit.
//
// To add a type: its place in Type, its row in kTypes, its Element; then the rows of kernels that take it
// (CONTRIBUTING.md). What forks on a type does so by Element or by with_type, so that the compiler names each place that
// does not know the new one.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "pydet.h"

#if defined(__CUDACC__) || defined(__HIPCC__)
#define PYDET_INLINE __host__ __device__ __forceinline__
#define PYDET_HD PYDET_INLINE
#else
#define PYDET_INLINE inline __attribute__((always_inline, unused))
#define PYDET_HD static PYDET_INLINE  // each instruction set has its own
#endif

namespace pydet {

enum class Type : int32_t { f32, bf16, f16, e4m3, e5m2, e8m0 };

constexpr uint32_t bit(Type type) { return 1u << int(type); }

// Where an element may stand.
enum Use : uint32_t {
  kFactor = 1,         // a and b of a product
  kResult = 2,         // its out
  kAddend = 4,         // its bias
  kNormRow = 8,        // x of a norm, and what is like it
  kNormVector = 16,    // its weight, and what goes with a row
  kScaledFactor = 32,  // a and b of a product with scales, and what quantisation writes
  kScaling = 64,       // their scales
  kPart = 128          // of a fold
};
constexpr uint32_t kAnyUse = kFactor | kResult | kAddend | kNormRow | kNormVector;

struct TypeRow {
  Type type;
  uint8_t code, bits;        // DLPack's
  const char *name, *brief;  // in sentences and in Python; in the kernel table
  uint32_t uses;
};
constexpr TypeRow kTypes[] = {
    {Type::f32, PYDET_FLOAT, 32, "float32", "fp32", kAnyUse | kScaling | kPart},
    {Type::bf16, PYDET_BFLOAT, 16, "bfloat16", "bf16", kAnyUse},
    {Type::f16, PYDET_FLOAT, 16, "float16", "fp16", kAnyUse},
    {Type::e4m3, PYDET_FLOAT8_E4M3FN, 8, "float8_e4m3fn", "e4m3", kScaledFactor},
    {Type::e5m2, PYDET_FLOAT8_E5M2, 8, "float8_e5m2", "e5m2", kScaledFactor},
    {Type::e8m0, PYDET_FLOAT8_E8M0FNU, 8, "float8_e8m0fnu", "e8m0", kScaling},
};
constexpr int kTypeCount = int(sizeof kTypes / sizeof *kTypes);

constexpr bool types_are_in_order() {
  for (int i = 0; i < kTypeCount; ++i)
    if (int(kTypes[i].type) != i || kTypes[i].bits % 8) return false;
  return true;
}
static_assert(types_are_in_order(), "row i of kTypes is that of type i, of whole bytes");

// Sets of types, as rows of kernels name them.
constexpr uint32_t kHalfTypes = bit(Type::bf16) | bit(Type::f16);
constexpr uint32_t kUnscaledTypes = bit(Type::f32) | kHalfTypes;
constexpr uint32_t kFp8Types = bit(Type::e4m3) | bit(Type::e5m2);

constexpr uint32_t types_for(Use use) {
  uint32_t types = 0;
  for (const TypeRow &row : kTypes)
    if (row.uses & use) types |= bit(row.type);
  return types;
}
static_assert(types_for(kResult) == kUnscaledTypes && types_for(kAddend) == kUnscaledTypes,
              "what kernels store and add");
static_assert(types_for(kScaledFactor) == kFp8Types, "what scaled kernels multiply");
static_assert(types_for(kNormRow) == kUnscaledTypes && types_for(kNormVector) == kUnscaledTypes,
              "what norms read and write");

// False: none of ours.
constexpr bool type_of(pydet_dtype dtype, Type *type) {
  for (const TypeRow &row : kTypes)
    if (row.code == dtype.code && row.bits == dtype.bits && dtype.lanes == 1) return *type = row.type, true;
  return false;
}

// Also on a device, which cannot see the table.
PYDET_HD constexpr int size_of(Type type) {
  switch (type) {
    case Type::f32: return 4;
    case Type::bf16:
    case Type::f16: return 2;
    case Type::e4m3:
    case Type::e5m2:
    case Type::e8m0: return 1;
  }
  __builtin_unreachable();
}
constexpr bool sizes_are_those_of_the_table() {
  for (const TypeRow &row : kTypes)
    if (8 * size_of(row.type) != row.bits) return false;
  return true;
}
static_assert(sizes_are_those_of_the_table(), "size_of");

// ---- Conversions -------------------------------------------------------------------------------------------------

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
  if (magnitude < 0x38800000u) {                                  // below 2^-14: subnormal, a multiple of 2^-24
    float rounded = float_of(magnitude) + 0.5f;                   // ulp of [0.5, 1) is 2^-24
    return uint16_t(sign | (bits_of(rounded) - 0x3F000000u));
  }
  uint32_t even = (magnitude >> 13) & 1;
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xFFFu + even) >> 13));
#endif
}

// fp8, of 4 or 5 bits of exponent: the fields moved to those of fp32, and scaled; subnormals come out right by it.
PYDET_HD float f32_from_e4m3(uint8_t h) {
  uint32_t sign = uint32_t(h & 0x80) << 24, magnitude = h & 0x7Fu;
  float x = float_of(sign | magnitude << 20) * 0x1p120f;
  return magnitude == 0x7F ? float_of(kNanF32) : x;
}
PYDET_HD float f32_from_e5m2(uint8_t h) {
  uint32_t sign = uint32_t(h & 0x80) << 24, magnitude = h & 0x7Fu;
  float x = float_of(sign | magnitude << 21) * 0x1p112f;
  float infinite = float_of(magnitude == 0x7C ? sign | 0x7F800000u : kNanF32);
  return magnitude >= 0x7C ? infinite : x;
}
PYDET_HD float f32_from_e8m0(uint8_t h) {  // a power of two, or NaN
  return float_of(h == 0xFF ? kNanF32 : h == 0 ? 0x00400000u : uint32_t(h) << 23);
}

// To nearest even. Below the least normal number, 2^-6 or 2^-14, adding 2^14 or 2^7 rounds to its subnormal grid.
// e4m3 has no infinity: what is too large is NaN, as in ml_dtypes.
PYDET_HD uint8_t e4m3_from_f32(float x) {
  uint32_t u = bits_of(x), sign = u >> 24 & 0x80u, magnitude = u & 0x7FFFFFFFu;
  uint32_t normal = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1)) >> 20) - 960;
  uint32_t small = bits_of(float_of(magnitude) + 16384.0f) - 0x46800000u;
  uint32_t rounded = magnitude < 0x3C800000u ? small : normal;
  return uint8_t(magnitude > 0x43E80000u ? 0x7Fu : sign | rounded);  // 464, halfway to what 480 would be, is 448
}
PYDET_HD uint8_t e5m2_from_f32(float x) {
  uint32_t u = bits_of(x), sign = u >> 24 & 0x80u, magnitude = u & 0x7FFFFFFFu;
  uint32_t normal = ((magnitude + 0xFFFFFu + (magnitude >> 21 & 1)) >> 21) - 448;
  uint32_t small = bits_of(float_of(magnitude) + 128.0f) - 0x43000000u;
  uint32_t rounded = magnitude < 0x38800000u ? small : normal;
  rounded = magnitude >= 0x47700000u ? 0x7Cu : rounded;  // 61440 and above round to infinity
  return uint8_t(magnitude > 0x7F800000u ? 0x7Fu : sign | rounded);
}

// An element as it lies in memory, to fp32, exactly, and back, to nearest even with NaN canonical.
template <Type type> struct Element;
template <> struct Element<Type::f32> {
  using Bits = uint32_t;
  static PYDET_INLINE float to_f32(Bits bits) { return float_of(bits); }
  static PYDET_INLINE Bits from_f32(float x) { return bits_of(canonical(x)); }
};
template <> struct Element<Type::bf16> {
  using Bits = uint16_t;
  static PYDET_INLINE float to_f32(Bits bits) { return f32_from_bf16(bits); }
  static PYDET_INLINE Bits from_f32(float x) { return bf16_from_f32(x); }
};
template <> struct Element<Type::f16> {
  using Bits = uint16_t;
  static PYDET_INLINE float to_f32(Bits bits) { return f32_from_f16(bits); }
  static PYDET_INLINE Bits from_f32(float x) { return f16_from_f32(x); }
};
template <> struct Element<Type::e4m3> {
  using Bits = uint8_t;
  static PYDET_INLINE float to_f32(Bits bits) { return f32_from_e4m3(bits); }
  static PYDET_INLINE Bits from_f32(float x) { return e4m3_from_f32(x); }
};
template <> struct Element<Type::e5m2> {
  using Bits = uint8_t;
  static PYDET_INLINE float to_f32(Bits bits) { return f32_from_e5m2(bits); }
  static PYDET_INLINE Bits from_f32(float x) { return e5m2_from_f32(x); }
};

// For code that has instructions for either type of 16 bits and for no other: the compiler stops at it for one more.
template <Type type> PYDET_HD constexpr bool is_bf16() {
  static_assert(type == Type::bf16 || type == Type::f16, "a type that this place does not know");
  return type == Type::bf16;
}

template <Type type> using TypeConstant = std::integral_constant<Type, type>;

// Calls f with a run-time type as a compile-time constant, on the host or on the device. `types` are those that can be
// here: the table's row, or the check of the operand, has refused all others. The last of them is not tested for.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // a host's f makes it a host function
#endif
template <uint32_t types, int first = 0, class F> PYDET_HD auto with_type(Type type, F f) {
  static_assert(types >> first != 0 && types >> kTypeCount == 0, "a set of types, not empty");
  constexpr Type here = Type(first);
  if constexpr ((types >> first) == 1) {
    return f(TypeConstant<here>{});
  } else {
    if constexpr (types & bit(here))
      if (type == here) return f(TypeConstant<here>{});
    return with_type<types, first + 1>(type, f);
  }
}

}  // namespace pydet
