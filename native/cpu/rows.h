// Rows of elements on the CPU: vectors and single elements alike, and the sum along a row (NUMERICS.md, "RMSNorm").
#pragma once

#include "cpu/scratch.h"
#include "cpu/simd.h"

namespace pydet {
namespace {

// ---- Vectors and single elements, alike --------------------------------------------------------------------------

// Calls body(j, v) along j < n: v is a Floats while kWidth elements are left, then a float, one element at a time.
template <class Body> inline void along(int64_t n, const Body &body) {
  int64_t j = 0;
  for (; j + kWidth <= n; j += kWidth) body(j, Floats{});
  for (; j < n; ++j) body(j, float{});
}

inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
inline float fnma(float a, float b, float c) { return fmaf(-a, b, c); }
inline Floats all(float x, Floats) { return broadcast(x); }
inline float all(float x, float) { return x; }

// What the third argument says, from memory of number type T; and back, rounded, NaN canonical.
template <class T> inline Floats get(const typename T::Stored *p, Floats) { return T::load(p); }
template <class T> inline float get(const typename T::Stored *p, float) { return T::get(p); }
template <class T> inline void set(typename T::Stored *p, Floats a) { T::store(p, a); }
template <class T> inline void set(typename T::Stored *p, float a) { T::set(p, a); }

struct Partial {  // an unfinished sum: fp32, NaN as it comes
  using Stored = float;
  static Floats load(const float *p) { return pydet::load(p); }
  static void store(float *p, Floats a) { pydet::store(p, a); }
  static float get(const float *p) { return *p; }
  static void set(float *p, float x) { *p = x; }
};

// ---- Operands ----------------------------------------------------------------------------------------------------

// Row r of an operand whose elements are of number type T; NULL if the operand is absent.
template <class T> inline typename T::Stored *row(const Rows &rows, int64_t inner, int64_t r) {
  if (!rows.data) return nullptr;
  return (typename T::Stored *)rows.data + r / inner * rows.outer_stride + r % inner * rows.inner_stride;
}

// The same for what is not told the type.
inline char *row(const Rows &rows, int64_t inner, int64_t r) {
  return with_type<kUnscaledTypes>(rows.type, [&](auto type) { return (char *)row<Number<type>>(rows, inner, r); });
}

// fp32 numbers to `type` and back; count: a multiple of kWidth. In fp32 there is nothing to round, and a NaN need not be
// canonical before it is stored.
inline void round_all(Type type, float *x, int64_t count) {
  if (type == Type::f32) return;
  with_type<kHalfTypes>(type, [&](auto half) {
    for (int64_t i = 0; i < count; i += kWidth) {
      uint16_t words[kWidth];
      Number<half>::store(words, load(x + i));
      store(x + i, Number<half>::load(words));
    }
  });
}

// One element of a row of `type`.
inline float element(Type type, const char *row, int64_t j) {
  return dispatch(type, [&](auto number) {
    using T = decltype(number);
    return T::get((const typename T::Stored *)row + j);
  });
}

// The same where rows have three strides: its place is found once for all operands of a problem.
struct RowPlace {
  int64_t far, outer, inner;
};
template <class Problem> inline RowPlace place_of(const Problem &problem, int64_t r) {
  const int64_t q = r / problem.inner;
  return {q / problem.outer, q % problem.outer, r % problem.inner};
}
template <class T> inline typename T::Stored *row(const Rows &rows, const RowPlace &at) {
  if (!rows.data) return nullptr;
  return (typename T::Stored *)rows.data + at.far * rows.far_stride + at.outer * rows.outer_stride +
         at.inner * rows.inner_stride;
}

// Asks for the cache line of element j; `p` may be NULL.
template <class Stored> inline void prefetch(const Stored *p, int64_t j) {
  if (p) __builtin_prefetch(p + j);
}

// ---- The sum along a row -----------------------------------------------------------------------------------------

struct alignas(64) RowSum {
  float lane[kRowLanes];

  // Groups that hold elements of a row; what only meets +0 in empty ones is left out below.
  static int groups(int64_t n) { return n < kRowLanes ? int(divide_up(n, kRowLaneElements)) : kRowLaneGroups; }

  void clear(int64_t n) { memset(lane, 0, size_t(groups(n)) * kRowLaneElements * sizeof(float)); }

  template <class V> void add(int64_t j, V a, V b) {
    float *s = lane + (j & (kRowLanes - 1));  // kWidth divides kRowLanes: a vector does not wrap around
    set<Partial>(s, fma(a, b, get<Partial>(s, V{})));
  }

  float joined(int64_t n) const {
    const int used = groups(n);
    int width = 1;  // groups to join: a power of two
    while (width < used) width *= 2;
    alignas(64) float sum[kRowLaneGroups];
    int whole = 0;
    for (; whole + kWidth <= used; whole += kWidth) store(sum + whole, group_sums(lane + kRowLaneElements * whole));
    for (int g = whole; g < used; ++g) sum[g] = group_sum(lane + kRowLaneElements * g);
    for (int g = used; g < width; ++g) sum[g] = 0.0f;
    if (width < kRowLaneGroups) {
      for (int g = 0; g < used; ++g) sum[g] = sum[g] + 0.0f;  // the partners 128 ... width apart: -0 becomes +0
    }
    for (int h = width / 2; h > 0; h /= 2)
      for (int g = 0; g < h; ++g) sum[g] = sum[g] + sum[g + h];
    return sum[0];
  }
};
static_assert(sizeof(RowSum) <= Scratch::kSmall, "the least scratch memory holds the lanes of a row");
static_assert(kRowLaneElements == 8 && (kRowLanes & (kRowLanes - 1)) == 0,
              "joined() and add() are written for these lanes");

}  // namespace
}  // namespace pydet
