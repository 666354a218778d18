// Activations, alone or as the gate of another factor, and their gradients, in fp32 (NUMERICS.md, "Activations"). The bits
// are those of every other backend.
//
//   y = round(f(x)), or with the other factor round(round(f(x)) up)
//   dx = round(g f'(x)),  g = dy, or with the other factor round(dy up);   dup = round(dy round(f(x)))

#include "cpu/parallel.h"
#include "cpu/piece.h"
#include "ops/activation/formulas.h"

namespace pydet {
namespace {

// To the number type and back. In fp32 there is nothing to round, and a NaN need not be canonical before it is stored.
template <class T> void round_all(Piece &piece) {
  if constexpr (!std::is_same_v<T, Number<Type::f32>>)
    for (int i = 0; i < kPiece; i += kWidth) {
      typename T::Stored stored[kWidth];
      T::store(stored, load(piece.x + i));
      store(piece.x + i, T::load(stored));
    }
}

template <class T, ActivationKind kind> struct Forward {
  static void run(const Activation &p, int64_t r, int64_t begin, int64_t end) {
    const auto *x = row<T>(p.x, p.inner, r), *up = row<T>(p.up, p.inner, r);
    auto *y = row<T>(p.y, p.inner, r);
    Piece value, factor;
    pieces(end - begin, [&](int64_t j, int64_t count) {
      j += begin;
      value.load<T>(x + j, count);
      for (float &v : value.x) v = activated<kind>(v).value;
      if (up) {
        round_all<T>(value);
        factor.load<T>(up + j, count);
        for (int i = 0; i < kPiece; ++i) value.x[i] = value.x[i] * factor.x[i];
      }
      value.store<T>(y + j, count);
    });
  }
};

template <class T, ActivationKind kind> struct Backward {
  static void run(const ActivationBackward &p, int64_t r, int64_t begin, int64_t end) {
    const auto *dy = row<T>(p.dy, p.inner, r), *x = row<T>(p.x, p.inner, r), *up = row<T>(p.up, p.inner, r);
    auto *dx = row<T>(p.dx, p.inner, r), *dup = row<T>(p.dup, p.inner, r);
    Piece given, value, slope, factor;
    pieces(end - begin, [&](int64_t j, int64_t count) {
      j += begin;
      given.load<T>(dy + j, count);
      value.load<T>(x + j, count);
      for (int i = 0; i < kPiece; ++i) {
        const Activated of = activated<kind>(value.x[i]);
        value.x[i] = of.value, slope.x[i] = of.slope;
      }
      if (up) factor.load<T>(up + j, count);  // before anything is written, which may be there
      if (dup) {
        round_all<T>(value);
        for (int i = 0; i < kPiece; ++i) value.x[i] = given.x[i] * value.x[i];
        value.store<T>(dup + j, count);
      }
      if (!dx) return;
      if (up) {
        for (int i = 0; i < kPiece; ++i) given.x[i] = given.x[i] * factor.x[i];
        round_all<T>(given);
      }
      for (int i = 0; i < kPiece; ++i) given.x[i] = given.x[i] * slope.x[i];
      given.store<T>(dx + j, count);
    });
  }
};

// Calls Pass::run for all elements of all rows, a few rows or a part of one at a time.
template <template <class, ActivationKind> class Pass, class Problem> void each_part(const Problem &p) {
  constexpr int64_t kPart = 8192;            // elements
  constexpr double kWorthAThread = 1 << 15;  // elements
  const int64_t threads = threads_for(double(p.rows) * double(p.n), kWorthAThread);
  const int64_t parts = divide_up(p.n, kPart), at_once = parts > 1 ? 1 : 1 + kPart / p.n;
  Scratch scratch;  // not worked in: where there is none, one thread computes
  dispatch(p.x.type, [&](auto number) {
    with_kind(p.kind, [&](auto kind) {
      parallel(divide_up(p.rows, at_once) * parts, threads, scratch, [&](int64_t i, Scratch &) {
        const int64_t begin = i % parts * kPart, end = p.n - begin < kPart ? p.n : begin + kPart;
        for (int64_t r = i / parts * at_once; r < p.rows && r < (i / parts + 1) * at_once; ++r)
          Pass<decltype(number), kind>::run(p, r, begin, end);
      });
    });
  });
}

}  // namespace

template <> pydet_status activation<Isa>(const Activation &problem) {
  each_part<Forward>(problem);
  return PYDET_OK;
}

template <> pydet_status activation_backward<Isa>(const ActivationBackward &problem) {
  each_part<Backward>(problem);
  return PYDET_OK;
}

}  // namespace pydet
