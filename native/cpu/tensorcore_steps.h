// The steps of tensor cores (NUMERICS.md, "GEMM"): bit models of NVIDIA's and AMD's matrix units.
//
//   D = step(a[0..n), b[0..n), c) for n consecutive k, ascending, the last step padded with +0; D is the next step's c.
//   p_i = a_i b_i, exact;  e_i = max(floor(log2|a_i|), emin) + max(floor(log2|b_i|), emin);  emin = -126 for bf16 and
//   -14 for fp16;  e_c = max(floor(log2|c|), -126).  Zeros have no exponent and join no maximum; a zero D is +0.
//   NaN, Inf * 0 and opposing Infs give NaN, other Infs give Inf.
//
//   sm90   n = 16, F = 25, floor = -133. Confirmed: recorded H100 results are reproduced without a difference.
//   sm80   n = 8, F = 24, floor = -132. A published model; we have not confirmed it on a chip.
//     E = max(floor, e_c, e_i),  q = 2^(E - F),  S = trunc(c / q) + sum_i trunc(p_i / q)
//     D = S q truncated toward zero to fp32; |S q| >= 2^128 is Inf
//   cdna3  n = 8. A published model, not confirmed.
//     E = max(e_i),  T = sum_i trunc(p_i / 2^(E - 24)),  F = max(E, e_c);  |p_i| >= 2^128 counts as Inf
//     D = floor(T 2^(E - 24) / 2^(F - 31)) 2^(F - 31) + floor(c / 2^(F - 24)) 2^(F - 24), rounded to nearest even
//   cdna2  n = 4. A published model, not confirmed. In fp32, flush(x) being +0 for a subnormal x:
//     p_i = flush(flush(a_i) flush(b_i)),  D = flush(flush(c) + flush(flush(p_0 + p_1) + flush(p_2 + p_3)))
//
// Tile: kHeight rows by two vectors of columns, accumulators in registers over kDepth of k; the operands are packed as fp32
// and as 16-bit exponents. Where exponents allow it, a product is exact in fp32 and its truncation is the conversion to
// int32; the lanes where they do not are done again, by the exact step in fp64.
#pragma once

#include "cpu/exponents.h"
#include "cpu/inner_loops.h"

namespace pydet {
namespace {

// ---- Vectors ------------------------------------------------------------------------------------------------------

constexpr int kTile = 2 * kLanes, kGroup = 2;  // columns and rows in registers

using I16s = int16_t __attribute__((vector_size(4 * kLanes)));
using HalfI16s = int16_t __attribute__((vector_size(2 * kLanes)));

// To fp32, toward zero. Without an instruction for it: to nearest, then one ulp back where that grew.
inline F32s to_float_toward_zero(I32s x) {
#if defined(__AVX512F__)
  return (F32s)_mm512_cvt_roundepi32_ps((__m512i)x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
#else
  F32s nearest = __builtin_convertvector(x, F32s);
  I32s half = truncate(nearest * 0.5f);
  U32s excess = ((U32s)(x < 0 ? -(U32s)x : (U32s)x) >> 1) - (U32s)(half < 0 ? -half : half);
  return (F32s)((I32s)nearest + ((I32s)excess >> 31));
#endif
}

// ---- Packed operands ----------------------------------------------------------------------------------------------

constexpr int kRows = 128, kCols = 128, kDepth = 128;  // of one block, at most
constexpr int kNone = -4000, kSpecial = 12000;         // for exponents of zeros, and of NaN and Inf
constexpr int kLowest = -1000, kHighest = 1000;        // a sum of two exponents beyond these has one of those

// A block's operands and chains, of at most `rows` x `cols`, `depth` of k at a time. They lie in scratch memory.
struct Panels {
  int rows, cols, depth;
  float (*a)[kDepth];
  int32_t (*a_exponent)[kDepth];  // the 16 bits twice, to be broadcast
  float (*b)[kTile];              // of strip s and k: [s * kDepth + k]
  int16_t (*b_exponent)[kTile];
  uint16_t *words;  // of a or b, on the way there
  float (*chain)[kCols], (*total)[kCols];
};

// Those of one strip, as the steps take them.
struct Operands {
  const float (*a)[kDepth];
  const int32_t (*a_exponent)[kDepth];
  const float (*b)[kTile];
  const int16_t (*b_exponent)[kTile];
};

// ---- The steps, exactly -------------------------------------------------------------------------------------------

// One row of A and one column of B at the first k of a step.
struct Terms {
  const float *a;
  const int32_t *a_exponent;
  const float *b;  // `apart` from k to k
  const int16_t *b_exponent;
  int apart;

  float product_f32(int k) const { return a[k] * b[k * apart]; }
  double product(int k) const { return double(a[k]) * double(b[k * apart]); }
  int exponent(int k) const { return int16_t(a_exponent[k]) + b_exponent[k * apart]; }
};

inline int exponent_of(float c) {  // of a finite c; far below all others for 0
  return bits_of(c) << 1 == 0 ? 2 * kNone : larger(int(bits_of(c) >> 23 & 255), 1) - 127;
}

// The IEEE sum of what is NaN or Inf among the products and c; 0 if nothing is.
template <int kStep> float special(const Terms &x, float c) {
  float sum = c - c == 0 ? 0.0f : c;
  for (int k = 0; k < kStep; ++k)
    if (x.exponent(k) > kHighest) sum += x.product_f32(k);
  return sum;
}

template <int kStep, int kFraction, int kFloor> float truncating_step(const Terms &x, float c) {
  float infinite = special<kStep>(x, c);
  if (!(infinite == 0)) return infinite;
  int top = larger(kFloor, exponent_of(c));
  for (int k = 0; k < kStep; ++k) top = larger(top, x.exponent(k));
  double per_q = pow2(kFraction - top);
  int64_t sum = int64_t(double(c) * per_q);
  for (int k = 0; k < kStep; ++k) sum += int64_t(x.product(k) * per_q);

  double exact = double(sum) * pow2(top - kFraction);
  float nearest = float(exact);
  if (__builtin_fabs(exact) >= 0x1p128) return nearest;
  if (__builtin_fabs(double(nearest)) > __builtin_fabs(exact)) nearest = float_of(bits_of(nearest) - 1);
  return nearest + 0.0f;  // -0 becomes +0
}

template <int kStep> float cdna3_step(const Terms &x, float c) {
  float infinite = special<kStep>(x, c);
  if (!(infinite == 0)) return infinite;
  int top = 2 * kNone;
  for (int k = 0; k < kStep; ++k) {
    top = larger(top, x.exponent(k));
    if (__builtin_fabs(x.product(k)) >= 0x1p128) infinite += x.product_f32(k);
  }
  if (!(infinite == 0)) return infinite;
  if (top < kLowest) return c + 0.0f;
  int64_t sum = 0;
  for (int k = 0; k < kStep; ++k) sum += int64_t(x.product(k) * pow2(24 - top));
  int joint = larger(top, exponent_of(c)), down = joint - top - 7;
  int64_t products = down < 0 ? sum * (1 << -down) : sum >> (down < 63 ? down : 63);
  double addend = double(c) * pow2(24 - joint);
  int64_t floored = int64_t(addend) - (double(int64_t(addend)) > addend);
  return float(double(products + floored * 128) * pow2(joint - 31)) + 0.0f;
}

// ---- The steps, in vectors ----------------------------------------------------------------------------------------

// `advance` gives D for one row and one vector of columns from the truncated sum of products. A lane is right where
// `top`, the largest exponent, lies in [kTopMin, kTopMax] (so all is finite, something not zero) and it is not `odd`.
//   top >= -100: a product that is not exact in fp32 lies below 2^-126 < q, and q and its inverse are normal.
//   top <= 125: no product overflows, and S q becomes Inf just where it should.
constexpr int kTopMin = -100, kTopMax = 125;

template <int kStep_, int kFraction_, int kFloor> struct Truncating {
  static constexpr int kStep = kStep_, kFraction = kFraction_;
  static float exact(const Terms &x, float c) { return truncating_step<kStep, kFraction, kFloor>(x, c); }
  static I32s top(I32s products, F32s c) { return larger(products, exponent_of(c)); }
  static F32s advance(U32s products, I32s top, F32s scale, F32s c, I32s &odd) {
    U32s addend = (U32s)truncate(c * scale);
    U32s sum = products + addend;
    odd |= (I32s)((sum ^ products) & (sum ^ addend)) >> 31;
    return to_float_toward_zero((I32s)sum) * pow2(top - kFraction);
  }
};
using Sm90 = Truncating<16, 25, -133>;
using Sm80 = Truncating<8, 24, -132>;

// Where e_c - E < 7, D is a sum of integers in units of 2^(E - 24). Elsewhere, in units of 2^(e_c - 31), |c| >= 2^31
// and the floored sum is below 2^29, so D has an ulp of 2^7 at least: the sum may be cut at 2^5 if its lowest bit then
// tells that more was there. That fits fp32, and one addition rounds right.
struct Cdna3 {
  static constexpr int kStep = 8, kFraction = 24;
  static float exact(const Terms &x, float c) { return cdna3_step<kStep>(x, c); }
  static I32s top(I32s products, F32s) { return products; }
  static F32s advance(U32s products, I32s top, F32s scale, F32s c, I32s &odd) {
    I32s c_exponent = exponent_of(c), lead = c_exponent - top;
    F32s quantum = pow2(top - kFraction);
    I32s toward_zero = truncate(c * scale);
    U32s addend = (U32s)toward_zero + (U32s)(__builtin_convertvector(toward_zero, F32s) * quantum > c);  // floor
    U32s sum = products + addend;
    F32s close = __builtin_convertvector((I32s)sum, F32s) * quantum;

    I32s down = lead - 7;
    down = down < 0 ? I32s{} : down > 31 ? I32s{} + 31 : down;
    I32s floored = (I32s)products >> down;
    I32s cut = floored >> 5 | (((floored & 31) != 0) & 1);
    F32s far = c + __builtin_convertvector(cut, F32s) * pow2(c_exponent - 26);

    I32s overflow = (I32s)((sum ^ products) & (sum ^ addend)) >> 31;
    odd |= (c_exponent == 128) | (overflow & (lead < 7));
    return lead < 7 ? close : far;
  }
};

struct Cdna2 {
  static constexpr int kStep = 4;
  static float exact(const Terms &x, float c) {
    auto flushed = [](float y) { return fabsf(y) < 0x1p-126f ? 0.0f : y; };
    float p[4];
    for (int k = 0; k < 4; ++k) p[k] = flushed(x.product_f32(k));
    return flushed(flushed(c) + flushed(flushed(p[0] + p[1]) + flushed(p[2] + p[3])));
  }
};

// The odd lanes again, exactly; but with nothing to add to an ordinary c (or 0) they were right.
template <class Model>
__attribute__((noinline, cold)) void repair(Terms x, I16s products, int half, I32s odd, F32s c, F32s &d) {
  for (int i = 0; i < kLanes; ++i) {
    int column = half * kLanes + i, c_exponent = exponent_of(c[i]);
    bool ordinary = c[i] == 0 || (c_exponent >= kTopMin && c_exponent <= kTopMax);
    if (!odd[i] || (products[column] < kLowest && ordinary)) continue;
    d[i] = Model::exact({x.a, x.a_exponent, x.b + column, x.b_exponent + column, kTile}, c[i]);
  }
}

template <class Model, int kHeight>
inline void step(const Operands &x, int row, int k0, F32s (&c)[kHeight][2]) {
  I16s products[kHeight];  // the largest of their exponents
  for (int r = 0; r < kHeight; ++r) products[r] = I16s{} + int16_t(2 * kNone);
#pragma GCC unroll 16
  for (int k = k0; k < k0 + Model::kStep; ++k) {
    I16s b = load_vector<I16s>(x.b_exponent[k]);
    for (int r = 0; r < kHeight; ++r)
      products[r] = larger(products[r], (I16s)(b + (I16s)(I32s{} + x.a_exponent[row + r][k])));
  }

  I32s top[kHeight][2], odd[kHeight][2], odd_anywhere{};
  F32s scale[kHeight][2], d[kHeight][2];
  U32s sum[kHeight][2];
  for (int r = 0; r < kHeight; ++r)
    for (int v = 0; v < 2; ++v) {
      top[r][v] = Model::top(widen<HalfI16s>(products[r], v), c[r][v]);
      odd[r][v] = (U32s)(top[r][v] - kTopMin) > uint32_t(kTopMax - kTopMin);
      top[r][v] = larger(top[r][v], I32s{} + kTopMin);
      scale[r][v] = pow2(Model::kFraction - top[r][v]);
      sum[r][v] = U32s{};
    }
#pragma GCC unroll 16
  for (int k = k0; k < k0 + Model::kStep; ++k)
    for (int v = 0; v < 2; ++v) {
      F32s b = load_vector<F32s>(x.b[k] + v * kLanes);
      for (int r = 0; r < kHeight; ++r) sum[r][v] += (U32s)truncate((x.a[row + r][k] * b) * scale[r][v]);
    }

  for (int r = 0; r < kHeight; ++r)
    for (int v = 0; v < 2; ++v) {
      d[r][v] = Model::advance(sum[r][v], top[r][v], scale[r][v], c[r][v], odd[r][v]);
      odd_anywhere |= odd[r][v];
    }
  if (__builtin_expect(any(odd_anywhere), 0))
    for (int r = 0; r < kHeight; ++r)
      for (int v = 0; v < 2; ++v) {
        F32s repaired = d[r][v];  // a copy, so that d stays in registers
        repair<Model>({x.a[row + r] + k0, x.a_exponent[row + r] + k0, x.b[k0], x.b_exponent[k0], kTile}, products[r], v,
                      odd[r][v], c[r][v], repaired);
        d[r][v] = repaired;
      }
  for (int r = 0; r < kHeight; ++r)
    for (int v = 0; v < 2; ++v) c[r][v] = d[r][v];
}

inline F32s flush(F32s x) { return (F32s)((I32s)x & (((I32s)x & 0x7F800000) != 0)); }

template <int kHeight> inline void step_cdna2(const Operands &x, int row, int k0, F32s (&c)[kHeight][2]) {
  for (int v = 0; v < 2; ++v)
    for (int r = 0; r < kHeight; ++r) {
      F32s p[4];
      for (int k = 0; k < 4; ++k)  // a and b were flushed when packed
        p[k] = flush(x.a[row + r][k0 + k] * load_vector<F32s>(x.b[k0 + k] + v * kLanes));
      c[r][v] = flush(flush(c[r][v]) + flush(flush(p[0] + p[1]) + flush(p[2] + p[3])));
    }
}

// The chains of kHeight rows by kTile columns, `depth` further along k. chain: [row][kCols].
template <class Model, int kHeight> void walk(const Operands &x, int row, int depth, float *chain) {
  F32s c[kHeight][2];
  for (int r = 0; r < kHeight; ++r)
    for (int v = 0; v < 2; ++v) c[r][v] = load_vector<F32s>(chain + r * kCols + v * kLanes);
  for (int k = 0; k < depth; k += Model::kStep) {
    if constexpr (__is_same(Model, Cdna2)) step_cdna2(x, row, k, c);
    else step<Model>(x, row, k, c);
  }
  for (int r = 0; r < kHeight; ++r)
    for (int v = 0; v < 2; ++v) memcpy(chain + r * kCols + v * kLanes, &c[r][v], sizeof(F32s));
}

// ---- Packing ------------------------------------------------------------------------------------------------------

// Numbers of 16 bits as fp32, with their exponents. count: a multiple of 16. flushes: as cdna2 does.
template <class T> void unpack(bool flushes, uint16_t *words, int count, float *values, int16_t *exponents) {
  constexpr bool kBf16 = __is_same(T, Number<Type::bf16>);
  constexpr int kMantissaBits = kBf16 ? 7 : 10, kFieldMax = kBf16 ? 255 : 31, kBias = kBf16 ? 127 : 15;
  if (flushes)
    for (int i = 0; i < count; ++i) words[i] = words[i] & kFieldMax << kMantissaBits ? words[i] : 0;
  for (int i = 0; i < count; i += kWidth) store(values + i, T::load(words + i));
  for (int i = 0; i < count; ++i) {
    int16_t field = words[i] >> kMantissaBits & kFieldMax;
    int16_t finite = int16_t((field > 1 ? field : 1) - kBias), nonzero = field == kFieldMax ? kSpecial : finite;
    exponents[i] = words[i] & 0x7FFF ? nonzero : kNone;
  }
}

// The same of what is fp32 already, with the values of a `type` of 16 bits.
inline void exponents_of(Type type, bool flushes, float *values, int64_t count, int16_t *exponents) {
  const int32_t least = type == Type::bf16 ? -126 : -14;
  if (flushes)
    for (int64_t i = 0; i < count; ++i)
      values[i] = (bits_of(values[i]) & 0x7FFFFFFFu) < uint32_t(least + 127) << 23 ? 0.0f : values[i];
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t size = bits_of(values[i]) & 0x7FFFFFFFu;
    const int32_t exponent = int32_t(size >> 23) - 127, finite = exponent < least ? least : exponent;
    exponents[i] = int16_t(size == 0 ? kNone : exponent == 128 ? kSpecial : finite);
  }
}

}  // namespace
}  // namespace pydet
