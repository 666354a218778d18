// exp, exp2, log and tanh of one fp32 number as formulas: the same bits on every backend (NUMERICS.md, "exp and log"). Every step is
// an fmaf, a sum, a product or a move of bits, so that a compiler may make vectors of them.
#pragma once

#include <math.h>

#include "contract/numerics.h"

namespace pydet {

// ln 2 in two parts. The first has 15 bits: its product with a whole number below 512 is exact.
constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;

// 2^e for e from -126 to 127.
PYDET_HD float power_of_two(int e) { return float_of(uint32_t(e + 127) << 23); }

struct ExpParts {
  float e;           // e^x = 2^k e
  uint32_t shifted;  // k, and what the shift has over kExpShift, in its low bits
};
constexpr float kExpShift = 0x1.8p+23f;  // what is added to it is rounded to a whole number
PYDET_HD ExpParts exp_parts(float x, float shift = kExpShift) {
  float shifted = fmaf(x, 0x1.715476p+0f, shift), n = shifted - shift;
  float high = fmaf(-n, kLn2High, x), r = fmaf(-n, kLn2Low, high), l = fmaf(-n, kLn2Low, high - r);
  float p = 0x1.6a4d14p-10f;
  p = fmaf(p, r, 0x1.12398ap-7f);
  p = fmaf(p, r, 0x1.5558b0p-5f);
  p = fmaf(p, r, 0x1.555492p-3f);
  p = fmaf(p, r, 0x1.fffffcp-2f);
  return {fmaf(r * r, p, l) + r + 1.0f, bits_of(shifted)};
}
// At most 0.88 ulp from e^x, subnormal results included. +0 from -104 down, Inf from 88.73 up, NaN for NaN.
//   n = x / ln 2 to the nearest whole number,   r + l = x - n ln 2,   e^x = 2^n (1 + (r + (l + r^2 p(r))))
PYDET_HD float exp_f32(float x) {
  ExpParts parts = exp_parts(x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x);
  int k = int(parts.shifted - bits_of(kExpShift)), half = k >> 1;  // 2^k itself may be no fp32 number
  return parts.e * power_of_two(half) * power_of_two(k - half);
}

// The same where x is from -69 to 0, so that the result is from 2^-100 to 1: k is added to the exponent of e.
constexpr float kLowestNormalExp = -69.0f;
PYDET_HD float normal_exp_f32(float x) {
  ExpParts parts = exp_parts(x);
  return float_of(bits_of(parts.e) + (parts.shifted << 23));
}

// 2^64 e^x for x from -130 to 0, which is no subnormal. Of a NaN it makes anything.
PYDET_HD float scaled_exp_f32(float x) {
  ExpParts parts = exp_parts(x, kExpShift + 64.0f);
  return float_of(bits_of(parts.e) + (parts.shifted << 23));
}
// exp_f32 for any x up to 0, all of them by one way: 2^-64 of what is no subnormal is rounded once. Of a NaN it makes +0.
PYDET_HD float falling_exp_f32(float x) { return scaled_exp_f32(fmaxf(x, -104.0f)) * 0x1p-64f; }

// a / b rounded as a division, for b from 1 to 2^64, a from 2^-100 to 1, and its reciprocal 1 / b rounded so: the first
// step leaves an error below a unit in the last place, and from there one step is exact (Markstein).
constexpr float kLeastDividend = 0x1p-100f;
PYDET_HD float quotient_f32(float a, float b, float reciprocal) {
  float q = a * reciprocal;
  q = fmaf(fmaf(-b, q, a), reciprocal, q);
  return fmaf(fmaf(-b, q, a), reciprocal, q);
}

// x as 2^whole (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2), for x above 0 and finite.
struct LogParts {
  float f, whole;
};
PYDET_HD LogParts log_parts(float x) {
  constexpr uint32_t kRootHalf = 0x3F3504F3u;
  bool small = x < 0x1p-126f;
  uint32_t u = bits_of(small ? x * 0x1p23f : x);
  int k = int(u - kRootHalf) >> 23;
  return {float_of(u - (uint32_t(k) << 23)) - 1.0f, float(small ? k - 23 : k)};
}
//   ln x = whole ln 2 + f - f^2 / 2 + f^3 q(f)
PYDET_HD float log_of(LogParts parts) {
  float f = parts.f, square = f * f;
  float q = 0x1.14733ep-4f;
  q = fmaf(q, f, -0x1.de01dcp-4f);
  q = fmaf(q, f, 0x1.e6c00ap-4f);
  q = fmaf(q, f, -0x1.fc28cap-4f);
  q = fmaf(q, f, 0x1.233ba2p-3f);
  q = fmaf(q, f, -0x1.555c44p-3f);
  q = fmaf(q, f, 0x1.99a476p-3f);
  q = fmaf(q, f, -0x1.000006p-2f);
  q = fmaf(q, f, 0x1.555548p-2f);
  float low = fmaf(square, -0.5f, fmaf(parts.whole, kLn2Low, square * f * q)) + f;
  return fmaf(parts.whole, kLn2High, low);
}
// At most 0.81 ulp from ln x. -Inf for 0, NaN for what is negative, Inf and NaN for themselves.
PYDET_HD float log_f32(float x) {
  float result = log_of(log_parts(x));
  return !(x > 0.0f) ? (x == 0.0f ? -INFINITY : float_of(kNanF32)) : x > 0x1.fffffep+127f ? x : result;
}

// ---- exp2 and tanh, for attention --------------------------------------------------------------------------------------

constexpr float kLog2e = 0x1.715476p+0f, kLn2 = 0x1.62e430p-1f;

// 2^t = power 2^f. t is taken as 127 above that and as -120 below; there the functions below are +0.
struct Exp2Parts {
  float f, power;
};
constexpr float kLowestExp2 = -120.0f;
PYDET_HD Exp2Parts exp2_parts(float t) {
  float within = t < kLowestExp2 ? kLowestExp2 : t > 127.0f ? 127.0f : t;  // a NaN is neither
  float shifted = within + kExpShift, n = shifted - kExpShift;
  return {within - n, float_of((bits_of(shifted) << 23) + 0x3F800000u)};
}
// At most 1.0 ulp from 2^t for t from -120 to 127. NaN for NaN. 2^0 is 1.
PYDET_HD float exp2_f32(float t) {
  Exp2Parts parts = exp2_parts(t);
  float f = parts.f, p = 0x1.470b48p-13f;
  p = fmaf(p, f, 0x1.5f7276p-10f);
  p = fmaf(p, f, 0x1.3b270ep-7f);
  p = fmaf(p, f, 0x1.c6ae72p-5f);
  p = fmaf(p, f, 0x1.ebfbe2p-3f);
  p = fmaf(p, f, 0x1.62e432p-1f);
  p = fmaf(p, f, 1.0f);
  return t < kLowestExp2 ? 0.0f : p * parts.power;
}
// The same to 1.02e-4, for what is then rounded to 16 bits.
PYDET_HD float coarse_exp2_f32(float t) {
  Exp2Parts parts = exp2_parts(t);
  float p = fmaf(fmaf(fmaf(0x1.c2a218p-5f, parts.f, 0x1.f00c4ep-3f), parts.f, 0x1.62f5fap-1f), parts.f, 1.0f);
  return t < kLowestExp2 ? 0.0f : p * parts.power;
}

// tanh x for x from -0.625 to 0.625.
PYDET_HD float near_tanh_f32(float x) {
  float square = x * x, p = -0x1.76ac1cp-8f;
  p = fmaf(p, square, 0x1.5256d8p-6f);
  p = fmaf(p, square, -0x1.b84448p-5f);
  p = fmaf(p, square, 0x1.110768p-3f);
  p = fmaf(p, square, -0x1.555534p-2f);
  return fmaf(x * square, p, x);
}
// At most 1.3 ulp from tanh x. NaN for NaN, 1 from 10 on.
PYDET_HD float tanh_f32(float x) {
  float size = x < 0.0f ? -x : x, near = near_tanh_f32(x);
  float far = fmaf(-2.0f, 1.0f / (exp_f32(2.0f * (size > 10.0f ? 10.0f : size)) + 1.0f), 1.0f);
  far = size > 10.0f ? 1.0f : far;
  return size > 0.625f ? (x < 0.0f ? -far : far) : near;
}

}  // namespace pydet
