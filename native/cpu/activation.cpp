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

// f of the elements of a piece, and its slopes: what is compiled for each kind.
template <ActivationKind kind> void values_of(Piece &x) {
  for (float &v : x.x) v = activated<kind>(v).value;
}
template <ActivationKind kind> void values_and_slopes_of(Piece &x, Piece &slope) {
  for (int i = 0; i < kPiece; ++i) {
    const Activated of = activated<kind>(x.x[i]);
    x.x[i] = of.value, slope.x[i] = of.slope;
  }
}
void multiply(Piece &x, const Piece &y) {
  for (int i = 0; i < kPiece; ++i) x.x[i] = x.x[i] * y.x[i];
}

struct Forward {
  explicit Forward(const Activation &p)
      : p(p), type(p.x.type), values(with_kind(p.kind, [](auto kind) { return &values_of<kind>; })) {}

  const Activation &p;
  Type type;
  void (*values)(Piece &);

  void run(int64_t r, int64_t begin, int64_t end) const {
    const char *x = row(p.x, p.inner, r), *up = row(p.up, p.inner, r);
    char *y = row(p.y, p.inner, r);
    Piece value, factor;
    pieces(end - begin, [&](int64_t j, int64_t count) {
      j += begin;
      value.load(type, x, j, count);
      values(value);
      if (up) {
        value.round(type);
        factor.load(type, up, j, count);
        multiply(value, factor);
      }
      value.store(type, y, j, count);
    });
  }
};

struct Backward {
  explicit Backward(const ActivationBackward &p)
      : p(p), type(p.x.type), both(with_kind(p.kind, [](auto kind) { return &values_and_slopes_of<kind>; })) {}

  const ActivationBackward &p;
  Type type;
  void (*both)(Piece &, Piece &);

  void run(int64_t r, int64_t begin, int64_t end) const {
    const char *dy = row(p.dy, p.inner, r), *x = row(p.x, p.inner, r), *up = row(p.up, p.inner, r);
    char *dx = row(p.dx, p.inner, r), *dup = row(p.dup, p.inner, r);
    Piece given, value, slope, factor;
    pieces(end - begin, [&](int64_t j, int64_t count) {
      j += begin;
      given.load(type, dy, j, count);
      value.load(type, x, j, count);
      both(value, slope);
      if (up) factor.load(type, up, j, count);  // before anything is written, which may be there
      if (dup) {
        value.round(type);
        multiply(value, given);
        value.store(type, dup, j, count);
      }
      if (!dx) return;
      if (up) {
        multiply(given, factor);
        given.round(type);
      }
      multiply(given, slope);
      given.store(type, dx, j, count);
    });
  }
};

// Calls pass.run for all elements of all rows, a few rows or a part of one at a time.
template <class Pass, class Problem> void each_part(const Problem &p) {
  constexpr int64_t kPart = 8192;            // elements
  constexpr double kWorthAThread = 1 << 15;  // elements
  const int64_t threads = threads_for(double(p.rows) * double(p.n), kWorthAThread);
  const int64_t parts = divide_up(p.n, kPart), at_once = parts > 1 ? 1 : 1 + kPart / p.n;
  Scratch scratch;  // not worked in: where there is none, one thread computes
  const Pass pass(p);
  parallel(divide_up(p.rows, at_once) * parts, threads, scratch, [&](int64_t i, Scratch &) {
    const int64_t begin = i % parts * kPart, end = p.n - begin < kPart ? p.n : begin + kPart;
    for (int64_t r = i / parts * at_once; r < p.rows && r < (i / parts + 1) * at_once; ++r) pass.run(r, begin, end);
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
