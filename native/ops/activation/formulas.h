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

// exp(c) from here up to 0 is 2^-64 of a normal number; below, whatever it is multiplied with here rounds to 0.
constexpr float kLowestScaledExp = -112.0f;

// 1 / (1 + e^-t) in parts: it is near r scale; 1 less it is far r. Of a NaN they hold anything.
struct Logistic {
  float near, far, scale, r;
  float scaled;  // 2^64 e^-|t|
};
PYDET_HD Logistic logistic(float t) {
  const bool falls = t < 0.0f;
  const float down = falls ? t : -t;
  const float scaled = scaled_exp_f32(down < kLowestScaledExp ? kLowestScaledExp : down), e = scaled * 0x1p-64f;
  return {falls ? scaled : 1.0f, falls ? 1.0f : e, falls ? 0x1p-64f : 1.0f, 1.0f / (1.0f + e), scaled};
}
// Of the logistic function itself: s, and s (1 - s) times `times`, a power of two.
PYDET_HD float logistic_value(float x, const Logistic &l) { return x == x ? l.near * l.r * l.scale : x; }
PYDET_HD float logistic_slope(float x, const Logistic &l, float times) {
  return x == x ? l.scaled * l.r * l.r * (0x1p-64f * times) : x;
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

// The normal distribution's P(below -z) = e^(-z^2/2) w q(w) with w = 1 / (1 + 11/32 z), and its density, both times 2^64, for
// z from 0 to 14.9; further out they are too small to show.
struct Normal {
  float below, density;
};
PYDET_HD Normal normal_f32(float z) {
  const float square = z * z, rest = fmaf(z, z, -square), c = -0.5f * square;
  float e = scaled_exp_f32(c < kLowestScaledExp ? kLowestScaledExp : c);
  e = fmaf(e, -0.5f * rest, e);
  const float w = 1.0f / fmaf(z, 0.34375f, 1.0f);
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

// x s(t(x)), whose slope is s (1 + x t'(x) (1 - s)). Below -bound it rounds to 0, and above bound 1 - s does.
template <ActivationKind kind> struct Swish;
template <> struct Swish<ActivationKind::silu> {
  static constexpr float kBound = 112.0f;
  static PYDET_INLINE float t(float x) { return x; }
  static PYDET_INLINE float times_slope(float x) { return x; }  // x t'(x)
};
template <> struct Swish<ActivationKind::quick_gelu> {
  static constexpr float kBound = 66.0f;
  static PYDET_INLINE float t(float x) { return x * 0x1.b3b646p+0f; }  // 1.702
  static PYDET_INLINE float times_slope(float x) { return t(x); }
};
template <> struct Swish<ActivationKind::gelu_tanh> {  // (1 + tanh u) / 2 = s(2 u)
  static constexpr float kBound = 16.0f;
  static constexpr float kFirst = 0x1.988454p+0f, kThird = 0x1.2444f2p-4f;  // 2 sqrt(2 / pi), that times 0.044715
  static PYDET_INLINE float t(float x) { return x * fmaf(x * x, kThird, kFirst); }
  static PYDET_INLINE float times_slope(float x) { return x * fmaf(x * x, 3.0f * kThird, kFirst); }
};

template <ActivationKind kind> PYDET_HD Activated activated(float x) {
  using Kind = ActivationKind;
  if constexpr (kind == Kind::sigmoid) {
    const Logistic l = logistic(x);
    return {logistic_value(x, l), logistic_slope(x, l, 1.0f)};
  } else if constexpr (kind == Kind::tanh) {  // its slope is 4 s (1 - s) at 2 x
    return {x == 0.0f ? x : tanh_f32(x), logistic_slope(x, logistic(2.0f * x), 4.0f)};
  } else if constexpr (kind == Kind::softplus) {
    const Logistic l = logistic(x);
    return {(x < 0.0f ? 0.0f : x) + log1p_f32(l.scaled * 0x1p-64f), logistic_value(x, l)};
  } else if constexpr (kind == Kind::exp) {
    const float e = exp_f32(x);
    return {e, e};
  } else if constexpr (kind == Kind::gelu) {
    constexpr float kBound = 16.0f;
    const bool falls = x < 0.0f;
    const float low = x < -kBound ? -kBound : x, inside = low > kBound ? kBound : low;
    const Normal normal = normal_f32(falls ? -inside : inside);
    const float upper = fmaf(normal.below, -0x1p-64f, 1.0f);
    return {falls ? low * normal.below * 0x1p-64f : low * upper,
            falls ? fmaf(inside, normal.density, normal.below) * 0x1p-64f
                  : fmaf(inside, normal.density * 0x1p-64f, upper)};
  } else {
    using F = Swish<kind>;
    const float low = x < -F::kBound ? -F::kBound : x, inside = low > F::kBound ? F::kBound : low;
    const Logistic l = logistic(F::t(low));
    return {low * l.near * l.r * l.scale, l.near * l.r * fmaf(F::times_slope(inside), l.far * l.r, 1.0f) * l.scale};
  }
}

}  // namespace pydet
