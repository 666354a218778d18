// The activations of one fp32 number and their slopes as formulas, the same bits on every backend (NUMERICS.md,
// "Activations"). Every step is an fmaf, a sum, a product, a division, a choice or a move of bits, so that a compiler may
// make vectors of them.
#pragma once

#include "contract/elementary.h"
#include "ops/activation/problem.h"

namespace pydet {

struct Activated {
  float value, slope;  // f(x), f'(x)
};

// 1 / d rounded as a division, for d from 1 to 16. On NVIDIA's it is what a division does there, without asking whether it
// is there (all such d on an H100: 0 differ).
PYDET_HD float reciprocal_f32(float d) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  return fmaf(fmaf(-d, r, 1.0f), r, r);
#else
  return 1.0f / d;
#endif
}

// -|x|, from `low` up. NaN for NaN.
PYDET_HD float down_from(float x, float low) {
  const float down = -fabsf(x);
  return down < low ? low : down;
}
// e^x from here up to 0 is 2^-64 of a normal number; below, whatever it is multiplied with here rounds to 0.
constexpr float kLowestLogistic = -112.0f;

// The logistic function 1 / (1 + e^-t) at t = -down and, less than half, at t = down.
struct Logistic {
  float scaled, e;  // 2^64 e^down, e^down
  float upper;      // 1 / (1 + e)
};
PYDET_HD Logistic logistic(float down) {
  const float scaled = scaled_exp_f32(down), e = scaled * 0x1p-64f;
  return {scaled, e, reciprocal_f32(1.0f + e)};
}
// What was made with `scaled` where x is below 0, and with 1 elsewhere.
PYDET_HD float unscaled(float x, float y) { return x < 0.0f ? y * 0x1p-64f : y; }
// s(x), and s(x) (1 - s(x)) times a power of two.
PYDET_HD float logistic_value(float x, const Logistic &l) {
  const float value = unscaled(x, (x < 0.0f ? l.scaled : 1.0f) * l.upper);
  return x == x ? value : x;
}
PYDET_HD float logistic_slope(float x, const Logistic &l, float times) {
  const float slope = l.scaled * l.upper * l.upper * (0x1p-64f * times);
  return x == x ? slope : x;
}

// log(1 + e) for e from 0 to 1.
PYDET_HD float log1p_f32(float e) {
  float p = -0x1.a92c84p-9f;
  p = fmaf(p, e, 0x1.453d86p-6f);
  p = fmaf(p, e, -0x1.d29deap-5f);
  p = fmaf(p, e, 0x1.b2557ap-4f);
  p = fmaf(p, e, -0x1.39768cp-3f);
  p = fmaf(p, e, 0x1.92f73ap-3f);
  p = fmaf(p, e, -0x1.ff0fb6p-3f);
  p = fmaf(p, e, 0x1.554c82p-2f);
  p = fmaf(p, e, -0x1.ffffbep-2f);
  return fmaf(p * e, e, e);
}

// The normal distribution's P(below -z) = e^(-z^2/2) w q(w) with w = 1 / (1 + 11/32 z), and its density, both times 2^64.
struct Normal {
  float below, density;
};
PYDET_HD Normal normal_f32(float z) {
  const float square = z * z, rest = fmaf(z, z, -square), c = -0.5f * square;
  float e = scaled_exp_f32(c);
  e = fmaf(e, -0.5f * rest, e);
  const float w = reciprocal_f32(fmaf(z, 0.34375f, 1.0f));
  float q = -0x1.b9afe8p-6f;
  q = fmaf(q, w, 0x1.1e95a0p-3f);
  q = fmaf(q, w, -0x1.0e719ep-2f);
  q = fmaf(q, w, 0x1.765c18p-3f);
  q = fmaf(q, w, -0x1.176496p-5f);
  q = fmaf(q, w, 0x1.c51d44p-4f);
  q = fmaf(q, w, 0x1.e01b68p-4f);
  q = fmaf(q, w, 0x1.19907cp-3f);
  q = fmaf(q, w, 0x1.18d3d4p-3f);
  return {e * (w * q), e * 0x1.988454p-2f};
}

// x s(t(x)), whose slope is s (1 + x t'(x) (1 - s)); t is odd. Below -bound it rounds to 0, and above bound 1 - s does.
template <ActivationKind kind> struct Swish;
template <> struct Swish<ActivationKind::silu> {
  static constexpr float kBound = 112.0f;
  static PYDET_INLINE float t(float x) { return x; }
  static PYDET_INLINE float times_slope(float x) { return x; }  // x t'(x)
};
template <> struct Swish<ActivationKind::quick_gelu> {
  static constexpr float kBound = 65.0f;
  static PYDET_INLINE float t(float x) { return x * 0x1.b3b646p+0f; }  // 1.702
  static PYDET_INLINE float times_slope(float x) { return t(x); }
};
template <> struct Swish<ActivationKind::gelu_tanh> {  // (1 + tanh u) / 2 = s(2 u)
  static constexpr float kBound = 11.0f;
  static constexpr float kFirst = 0x1.988454p+0f, kThird = 0x1.2444f2p-4f;  // 2 sqrt(2 / pi), that times 0.044715
  static PYDET_INLINE float t(float x) { return x * fmaf(x * x, kThird, kFirst); }
  static PYDET_INLINE float times_slope(float x) { return x * fmaf(x * x, 3.0f * kThird, kFirst); }
};

// tanh(x) by the logistic function at 2 x, near 0 by the polynomial of tanh_f32.
PYDET_HD float tanh_value(float x, const Logistic &l) {
  const float far = fmaf(-2.0f * l.e, l.upper, 1.0f), near = near_tanh_f32(x);
  return copysignf(fabsf(x) > 0.625f ? far : near, x);  // of -0 the polynomial makes +0
}

template <ActivationKind kind> PYDET_HD Activated activated(float x) {
  using Kind = ActivationKind;
  const bool falls = x < 0.0f;
  if constexpr (kind == Kind::sigmoid) {
    const Logistic l = logistic(down_from(x, kLowestLogistic));
    return {logistic_value(x, l), logistic_slope(x, l, 1.0f)};
  } else if constexpr (kind == Kind::tanh) {
    const Logistic l = logistic(2.0f * down_from(x, 0.5f * kLowestLogistic));
    return {tanh_value(x, l), logistic_slope(x, l, 4.0f)};
  } else if constexpr (kind == Kind::softplus) {
    const Logistic l = logistic(down_from(x, kLowestLogistic));
    return {(falls ? 0.0f : x) + log1p_f32(l.e), logistic_value(x, l)};
  } else if constexpr (kind == Kind::exp) {
    const float e = exp_f32(x);
    return {e, e};
  } else if constexpr (kind == Kind::gelu) {
    const float down = down_from(x, -14.875f);  // from there down f(x) is 0
    const Normal normal = normal_f32(-down);
    const float upper = fmaf(normal.below, -0x1p-64f, 1.0f), density = normal.density * 0x1p-64f;
    return {unscaled(x, falls ? down * normal.below : x * upper),
            falls ? fmaf(down, normal.density, normal.below) * 0x1p-64f : fmaf(-down, density, upper)};
  } else {
    using F = Swish<kind>;
    const float down = down_from(x, -F::kBound), times = F::times_slope(down);
    const Logistic l = logistic(F::t(down));
    const float rest = falls ? times * l.upper : -times * (l.e * l.upper);
    return {unscaled(x, (falls ? down * l.scaled : x) * l.upper),
            unscaled(x, (falls ? l.scaled : 1.0f) * l.upper * (1.0f + rest))};
  }
}

}  // namespace pydet
