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

  template <class T> void load(const typename T::Stored *from, int64_t count) {
    if (count < kPiece) memset(x, 0, sizeof x);
    along(count, [&](int64_t j, auto v) { set<Partial>(x + j, get<T>(from + j, v)); });
  }
  template <class T> void store(typename T::Stored *to, int64_t count) const {
    along(count, [&](int64_t j, auto v) { set<T>(to + j, get<Partial>(x + j, v)); });
  }
};

// Calls body(j, count) for the pieces of a row of n.
template <class Body> inline void pieces(int64_t n, const Body &body) {
  for (int64_t j = 0; j < n; j += kPiece) body(j, n - j < kPiece ? n - j : int64_t(kPiece));
}

}  // namespace
}  // namespace pydet
