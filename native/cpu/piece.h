// A piece of a row as floats on the stack: what is done to it is a loop over them, of which the compiler makes vectors.
#pragma once

#include "cpu/rows.h"

namespace pydet {
namespace {

constexpr int kPiece = 128;
static_assert(kRowLanes % kPiece == 0 && kPiece % kWidth == 0, "a piece lies in adjacent lanes");

// Elements of a row as floats. Those past the end, of which something is computed too, are zeros.
struct alignas(64) Piece {
  float x[kPiece];

  template <class T> using Stored = typename T::Stored;
  template <class T> void load(const typename T::Stored *from, int64_t count) {
    if (count < kPiece) memset(x, 0, sizeof x);
    along(count, [&](int64_t j, auto v) { set<Partial>(x + j, get<T>(from + j, v)); });
  }
  template <class T> void store(typename T::Stored *to, int64_t count) const {
    along(count, [&](int64_t j, auto v) { set<T>(to + j, get<Partial>(x + j, v)); });
  }

  // Elements j, j + 1, ... of a row of `type`, for code that is compiled once for all types.
  void load(Type type, const char *row, int64_t j, int64_t count) {
    dispatch(type, [&](auto number) { load<decltype(number)>((const Stored<decltype(number)> *)row + j, count); });
  }
  void store(Type type, char *row, int64_t j, int64_t count) const {
    dispatch(type, [&](auto number) { store<decltype(number)>((Stored<decltype(number)> *)row + j, count); });
  }
  void round(Type type) { round_all(type, x, kPiece); }
};

// Calls body(j, count) for the pieces of a row of n.
template <class Body> inline void pieces(int64_t n, const Body &body) {
  for (int64_t j = 0; j < n; j += kPiece) body(j, n - j < kPiece ? n - j : int64_t(kPiece));
}

}  // namespace
}  // namespace pydet
