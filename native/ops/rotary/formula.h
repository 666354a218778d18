// The cosine and the sine of an angle in fp32, and a pair turned by them (NUMERICS.md, "Rotary embeddings"): the text of
// every backend.
#pragma once

#include <cmath>

#include "ops/rotary/problem.h"

namespace pydet {

PYDET_HD float position_of(const RotaryTable &table, int64_t r) {
  if (table.whole.data)
    return table.whole.wide ? float(static_cast<const int64_t *>(table.whole.data)[r])
                            : float(static_cast<const int32_t *>(table.whole.data)[r]);
  return with_type<kUnscaledTypes>(table.real.type, [&](auto type) {
    using Known = Element<decltype(type)::value>;
    return Known::to_f32(reinterpret_cast<const typename Known::Bits *>(table.real.data)[r]);
  });
}

struct CosSin {
  float cos, sin;
};

// In fp64, each step rounded, nothing fused; then rounded to fp32.
//   n = 2 x / pi to the nearest whole number, ties to even;   r = ((x - n p_0) - n p_1) - n p_2
//   sine = r S(r r),  cosine = C(r r),  Taylor's to r^17 and r^16
PYDET_HD CosSin cos_sin(float angle) {
  constexpr double kSine[] = {1.0,
                              -0x1.5555555555555p-3,
                              0x1.1111111111111p-7,
                              -0x1.a01a01a01a01ap-13,
                              0x1.71de3a556c734p-19,
                              -0x1.ae64567f544e4p-26,
                              0x1.6124613a86d09p-33,
                              -0x1.ae7f3e733b81fp-41,
                              0x1.952c77030ad4ap-49};
  constexpr double kCosine[] = {1.0,
                                -0x1p-1,
                                0x1.5555555555555p-5,
                                -0x1.6c16c16c16c17p-10,
                                0x1.a01a01a01a01ap-16,
                                -0x1.27e4fb7789f5cp-22,
                                0x1.1eed8eff8d898p-29,
                                -0x1.93974a8c07c9dp-37,
                                0x1.ae7f3e733b81fp-45};
  const double x = angle, n = rint(x * 0x1.45f306dc9c883p-1);
  double r = x - n * 0x1.921fb544p+0;
  r = r - n * 0x1.0b4611a6p-34;
  r = r - n * 0x1.3198a2e037073p-69;
  const double square = r * r;
  double s = kSine[8], c = kCosine[8];
  for (int i = 7; i >= 0; --i) {
    s = s * square + kSine[i];
    c = c * square + kCosine[i];
  }
  s = r * s;
  const double quarter = n - 4.0 * floor(n * 0.25);
  const bool odd = quarter == 1.0 || quarter == 3.0;
  double of_cos = odd ? s : c, of_sin = odd ? c : s;
  if (quarter == 1.0 || quarter == 2.0) of_cos = -of_cos;
  if (quarter >= 2.0) of_sin = -of_sin;
  return {float(of_cos), float(of_sin)};
}

// To a type and back; a NaN need not be canonical before it is stored.
PYDET_HD float rounded_to(Type type, float x) {
  if (type == Type::f32) return x;
  return type == Type::bf16 ? f32_from_bf16(bf16_from_f32(x)) : f32_from_f16(f16_from_f32(x));
}

struct Pair {
  float first, second;
};
struct Turn {
  float cos_first, cos_second, sin_first, sin_second;
};

// (a cos - b sin, b cos + a sin), or transposed (a cos + b sin, b cos - a sin), where a sum of -0 is +0. Each product is
// rounded to `step`, and the sums are where they are stored.
PYDET_HD Pair turned(const Pair &x, const Turn &t, Type step, bool transposed) {
  const float a = rounded_to(step, x.first * t.cos_first), b = rounded_to(step, x.second * t.cos_second);
  const float c = rounded_to(step, x.second * (transposed ? t.sin_second : t.sin_first));
  const float d = rounded_to(step, x.first * (transposed ? t.sin_first : t.sin_second));
  if (transposed) return {(a + c) + 0.0f, (b - d) + 0.0f};
  return {a - c, b + d};
}

}  // namespace pydet
