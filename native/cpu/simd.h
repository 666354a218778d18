// One vector of floats, as wide as the instruction set this file is compiled for, and loads and stores of the three
// number types. Included by the kernels only; everything is internal to the including file, so that no code of a wider
// instruction set can be linked into a narrower one.
#pragma once

#include <math.h>

#include "contract/numerics.h"
#include "cpu/kernels.h"

#if defined(__AVX2__)
#include "cpu/intrinsics.h"
#endif

namespace pydet {
namespace {

#if defined(__AVX512F__)

using Isa = Avx512;
constexpr int kWidth = 16;
struct Floats {
  __m512 v;
};

inline Floats zero() { return {_mm512_setzero_ps()}; }
inline Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats root(Floats a) { return {_mm512_sqrt_ps(a.v)}; }
inline Floats where_equal(Floats a, Floats b, Floats x, Floats y) {  // a == b ? x : y
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ), y.v, x.v)};
}
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }    // a b + c
inline Floats fnma(Floats a, Floats b, Floats c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // -(a b) + c
inline Floats canonical(Floats a) {
  __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(int(kNanF32)));
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), a.v, nan)};
}
inline Floats load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline void store(float *p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats load_bf16(const uint16_t *p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16))};
}
inline Floats load_f16(const uint16_t *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))}; }
inline void store_bf16(uint16_t *p, Floats a) {
  __m512i u = _mm512_castps_si512(a.v);
  __m512i even = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, even), _mm512_set1_epi32(0x7FFF)), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  _mm256_storeu_si256((__m256i *)p,
                      _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(kNan16))));
}
inline void store_f16(uint16_t *p, Floats a) {
  __m256i h = _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  _mm256_storeu_si256((__m256i *)p, _mm256_mask_mov_epi16(h, nan, _mm256_set1_epi16(kNan16)));
}
inline __mmask16 first_lanes(int64_t count) { return __mmask16(count < kWidth ? (1u << count) - 1 : 0xFFFFu); }
inline Floats load(const float *p, int64_t count) { return {_mm512_maskz_loadu_ps(first_lanes(count), p)}; }
inline void store(float *p, Floats a, int64_t count) { _mm512_mask_storeu_ps(p, first_lanes(count), a.v); }
inline void load_words(uint16_t (&to)[kWidth], const uint16_t *from, int64_t count) {
  _mm256_storeu_si256((__m256i *)to, _mm256_maskz_loadu_epi16(first_lanes(count), from));
}
inline void store_words(uint16_t *to, const uint16_t (&from)[kWidth], int64_t count) {
  _mm256_mask_storeu_epi16(to, first_lanes(count), _mm256_loadu_si256((const __m256i *)from));
}
inline void transpose(Floats (&t)[kWidth]) {
  __m512 u[16];
  for (int i = 0; i < 16; i += 4) {  // 4x4 blocks of each 128-bit lane
    __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(t[i].v, t[i + 1].v));
    __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(t[i].v, t[i + 1].v));
    __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(t[i + 2].v, t[i + 3].v));
    __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(t[i + 2].v, t[i + 3].v));
    u[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    u[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    u[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    u[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  for (int i = 0; i < 4; ++i) {  // then the 4x4 of 128-bit lanes
    __m512 a = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88), b = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xDD);
    __m512 c = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88), d = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xDD);
    t[i].v = _mm512_shuffle_f32x4(a, c, 0x88);
    t[i + 4].v = _mm512_shuffle_f32x4(b, d, 0x88);
    t[i + 8].v = _mm512_shuffle_f32x4(a, c, 0xDD);
    t[i + 12].v = _mm512_shuffle_f32x4(b, d, 0xDD);
  }
}

#elif defined(__AVX2__)

using Isa = Avx2;
constexpr int kWidth = 8;
struct Floats {
  __m256 v;
};

inline Floats zero() { return {_mm256_setzero_ps()}; }
inline Floats broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Floats root(Floats a) { return {_mm256_sqrt_ps(a.v)}; }
inline Floats where_equal(Floats a, Floats b, Floats x, Floats y) {  // a == b ? x : y
  return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ))};
}
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats fnma(Floats a, Floats b, Floats c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
inline Floats canonical(Floats a) {
  __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(int(kNanF32)));
  return {_mm256_blendv_ps(a.v, nan, _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q))};
}
inline Floats load(const float *p) { return {_mm256_loadu_ps(p)}; }
inline void store(float *p, Floats a) { _mm256_storeu_ps(p, a.v); }
inline Floats load_bf16(const uint16_t *p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16))};
}
inline Floats load_f16(const uint16_t *p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p))}; }
inline void store_16(uint16_t *p, __m256i words, Floats a) {  // words: 16 bits in each 32
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  words = _mm256_blendv_epi8(words, _mm256_set1_epi32(kNan16), nan);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}
inline void store_bf16(uint16_t *p, Floats a) {
  __m256i u = _mm256_castps_si256(a.v);
  __m256i even = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  store_16(p, _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, even), _mm256_set1_epi32(0x7FFF)), 16), a);
}
inline void store_f16(uint16_t *p, Floats a) {
  store_16(p, _mm256_cvtepu16_epi32(_mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)), a);
}
inline __m256i first_lanes(int64_t count) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count < kWidth ? count : kWidth)), lane);
}
inline Floats load(const float *p, int64_t count) { return {_mm256_maskload_ps(p, first_lanes(count))}; }
inline void store(float *p, Floats a, int64_t count) { _mm256_maskstore_ps(p, first_lanes(count), a.v); }
inline void load_words(uint16_t (&to)[kWidth], const uint16_t *from, int64_t count) {
  for (int i = 0; i < kWidth; ++i) to[i] = i < count ? from[i] : uint16_t(0);
}
inline void store_words(uint16_t *to, const uint16_t (&from)[kWidth], int64_t count) {
  for (int i = 0; i < kWidth && i < count; ++i) to[i] = from[i];
}
inline void transpose(Floats (&t)[kWidth]) {
  __m256 u[8];
  for (int i = 0; i < 8; i += 4) {  // 4x4 blocks of each 128-bit lane
    __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(t[i].v, t[i + 1].v));
    __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(t[i].v, t[i + 1].v));
    __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(t[i + 2].v, t[i + 3].v));
    __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(t[i + 2].v, t[i + 3].v));
    u[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
    u[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    u[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
    u[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
  }
  for (int i = 0; i < 4; ++i) {  // then the 2x2 of 128-bit lanes
    t[i].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    t[i + 4].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

#else

using Isa = Scalar;
constexpr int kWidth = 1;
struct Floats {
  float v;
};

inline Floats zero() { return {0.0f}; }
inline Floats broadcast(float x) { return {x}; }
inline Floats operator+(Floats a, Floats b) { return {a.v + b.v}; }
inline Floats operator*(Floats a, Floats b) { return {a.v * b.v}; }
inline Floats operator-(Floats a, Floats b) { return {a.v - b.v}; }
inline Floats operator/(Floats a, Floats b) { return {a.v / b.v}; }
inline Floats root(Floats a) { return {sqrtf(a.v)}; }
inline Floats where_equal(Floats a, Floats b, Floats x, Floats y) { return a.v == b.v ? x : y; }
inline Floats fma(Floats a, Floats b, Floats c) { return {fmaf(a.v, b.v, c.v)}; }
inline Floats fnma(Floats a, Floats b, Floats c) { return {fmaf(-a.v, b.v, c.v)}; }
inline Floats canonical(Floats a) { return {pydet::canonical(a.v)}; }
inline Floats load(const float *p) { return {*p}; }
inline void store(float *p, Floats a) { *p = a.v; }
inline Floats load_bf16(const uint16_t *p) { return {f32_from_bf16(*p)}; }
inline Floats load_f16(const uint16_t *p) { return {f32_from_f16(*p)}; }
inline void store_bf16(uint16_t *p, Floats a) { *p = bf16_from_f32(a.v); }
inline void store_f16(uint16_t *p, Floats a) { *p = f16_from_f32(a.v); }
inline Floats load(const float *p, int64_t count) { return {count > 0 ? *p : 0.0f}; }
inline void store(float *p, Floats a, int64_t count) {
  if (count > 0) *p = a.v;
}
inline void load_words(uint16_t (&to)[1], const uint16_t *p, int64_t count) { to[0] = count > 0 ? *p : uint16_t(0); }
inline void store_words(uint16_t *to, const uint16_t (&from)[1], int64_t count) {
  if (count > 0) *to = from[0];
}
inline void transpose(Floats (&)[kWidth]) {}

#endif

// A number type at compile time: how its elements lie in memory, and how kWidth of them become Floats and back. With a
// count, 0 or more, only the first `count` of them are touched; the other lanes load as +0.
template <Type type> struct Number {  // of 16 bits
  static_assert(bit(type) & kHalfTypes);
  static constexpr bool kIsBf16 = type == Type::bf16;
  using Stored = uint16_t;
  static Floats load(const uint16_t *p) { return kIsBf16 ? load_bf16(p) : load_f16(p); }
  static void store(uint16_t *p, Floats a) { kIsBf16 ? store_bf16(p, a) : store_f16(p, a); }
  static Floats load(const uint16_t *p, int64_t count) {
    if (count >= kWidth) return load(p);
    uint16_t words[kWidth];
    load_words(words, p, count);
    return load(words);
  }
  static void store(uint16_t *p, Floats a, int64_t count) {
    if (count >= kWidth) return store(p, a);
    uint16_t words[kWidth];
    store(words, a);
    store_words(p, words, count);
  }
  static float get(const uint16_t *p) { return kIsBf16 ? f32_from_bf16(*p) : f32_from_f16(*p); }
  static void set(uint16_t *p, float x) { *p = kIsBf16 ? bf16_from_f32(x) : f16_from_f32(x); }
};
template <> struct Number<Type::f32> {
  using Stored = float;
  static Floats load(const float *p) { return pydet::load(p); }
  static void store(float *p, Floats a) { pydet::store(p, canonical(a)); }
  static Floats load(const float *p, int64_t count) { return pydet::load(p, count); }
  static void store(float *p, Floats a, int64_t count) { pydet::store(p, canonical(a), count); }
  static float get(const float *p) { return *p; }
  static void set(float *p, float x) { *p = pydet::canonical(x); }
};

// Calls f with the Number of a run-time type: dispatch(type, [&](auto number) { using T = decltype(number); ... }).
template <class F> auto dispatch(Type type, F f) {
  return with_type<kUnscaledTypes>(type, [&](auto constant) { return f(Number<constant>{}); });
}

}  // namespace
}  // namespace pydet
