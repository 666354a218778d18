// Rows that are passed over in pieces, each by one thread, and their largest element.
#pragma once

#include <new>

#include "cpu/parallel.h"
#include "cpu/piece.h"

namespace pydet {
namespace {

// A NaN has no say in the maximum: it shows in the sum.
inline float row_max(Type type, const char *x, int64_t n, Piece &piece) {
  float most[kPiece];
  for (float &m : most) m = -INFINITY;
  pieces(n, [&](int64_t j, int64_t count) {
    piece.load(type, x, j, count);
    if (count == kPiece)
      for (int i = 0; i < kPiece; ++i) most[i] = piece.x[i] > most[i] ? piece.x[i] : most[i];
    else
      for (int i = 0; i < count; ++i) most[i] = piece.x[i] > most[i] ? piece.x[i] : most[i];
  });
  for (int half = kPiece / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) most[i] = most[i + half] > most[i] ? most[i + half] : most[i];
  return most[0] + 0.0f;  // which zero is the largest would depend on the order
}

// Calls row(r, lanes) for every row, a few at a time.
template <class Row> void each_row(int64_t rows, int64_t n, const Row &row) {
  constexpr double kElementWork = 32, kWorthAThread = 1 << 20;  // operations
  const int64_t threads = threads_for(double(rows) * double(n) * kElementWork, kWorthAThread);
  const int64_t at_once = 1 + 4096 / n;
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) {
    parallel(divide_up(rows, at_once), threads, scratch, [&](int64_t i, Scratch &own) {
      RowSum &lanes = *new (own.data) RowSum;
      for (int64_t r = i * at_once; r < rows && r < (i + 1) * at_once; ++r) row(r, lanes);
    });
  });
}

}  // namespace
}  // namespace pydet
