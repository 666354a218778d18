// The inner loops of gemm_ieee.cpp: the fmaf chains of a tile, in three ways, all with the same bits.
//
// Many rows take a tile of registers, 14 by 32 with AVX-512, 6 by 16 with AVX2, which reuses what it loads. Few rows
// are bound by the memory b lies in, and read it once and in the order that memory likes: along its rows if it is
// row-major, else in squares that are transposed in registers.
#pragma once

#include "cpu/inner_loops.h"
#include "cpu/simd.h"

namespace pydet {
namespace {

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Asks for the line `bytes` on, whatever is there, before it is read. Into the caches, also where a line is read once:
// past them (locality 0), Intel's Xeons drop lines of rows 16 KiB apart before they are read, and take 3 times as long.
inline void prefetch(const void *p, int64_t bytes = 512) { __builtin_prefetch((const char *)p + bytes); }

inline Floats started(const Tile &tile, int64_t row, int64_t column) {
  return tile.p ? load(tile.p + row * tile.stride + column) : zero();
}

inline void finish(const Steps &steps, int64_t row, int64_t column, Floats s) {
  if (steps.fold) s = started(steps.base, row, column) + s;
  store(steps.to.p + row * steps.to.stride + column, canonical(s));  // a NaN stays one, so it may be canonical early
}

// Way::tiles: all chains of a tile of kRows by kVectors side by side in registers.
template <int kRows, int kVectors> void chain_tile(const Steps &steps) {
  Floats s[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) s[r][v] = started(steps.start, r, v * kWidth);
  }
  const float *a = steps.a, *b = (const float *)steps.b;
  const char *ask = steps.ask ? steps.ask : (const char *)a, *ask_end = steps.ask ? steps.ask_end : ask;
  auto step = [&] {
    prefetch(ask, 0);
    ask = ask == ask_end ? ask : ask + steps.ask_step;
    prefetch(a, 448);  // some steps ahead: of the strip, which lies in the L2
    Floats b_k[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) b_k[v] = load(b + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      Floats a_k = broadcast(a[r]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) s[r][v] = fma(a_k, b_k[v], s[r][v]);
    }
    a += kRows, b += steps.b_stride;
  };
  int64_t left = steps.depth;
  for (; left > kRows; --left) step();
  // Each of the last steps asks for a row of the tile that comes next.
  const Tile &next = steps.next.p ? steps.next : steps.to;
  for (const float *row = next.p; left > 0; --left, row += next.stride) {
    for (int v = 0; v <= kVectors; ++v) prefetch(row + v * kWidth - (v == kVectors), 0);
    step();
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) finish(steps, r, v * kWidth, s[r][v]);
  }
}

// Way::across: one vector of columns after the other, all its steps of k at once, b read where it is, elements of T. Each
// load then walks along one row of b, as the hardware's prefetcher expects, and the vectors' chains overlap.
constexpr int kStreamDepth = 8;  // rows of b that are walked at a time

// What is asked for comes into the L2 alone: rows that lie a power of two apart share a set of the L1, and evict there
// what is early.
inline void prefetch_into_l2(const void *p) { __builtin_prefetch(p, 0, 2); }

template <class T, int kRows> void chain_across(const Steps &steps) {
  using Stored = typename T::Stored;
  constexpr int64_t kAhead = 2048 / sizeof(Stored);
  const Stored *b = (const Stored *)steps.b;
  const int64_t stride = steps.b_stride, whole = steps.columns / kWidth * kWidth;
  int64_t c = 0;
  if (steps.depth == kStreamDepth) {
    // What is read next begins at `ask`: further on in the same rows, or the rows after them.
    const Stored *after = steps.ask ? (const Stored *)steps.ask - whole : b;
    constexpr bool kHeld = kStreamDepth * kRows <= (kWidth == 16 ? 24 : 8);  // the registers that are left for a
    const float *x = steps.a;
    Floats a[kStreamDepth][kRows];
    if (kHeld) {
#pragma GCC unroll 16
      for (int k = 0; k < kStreamDepth; ++k)
        for (int r = 0; r < kRows; ++r) a[k][r] = broadcast(x[k * kRows + r]);
    }
    for (; c < whole; c += kWidth) {
      const Stored *ahead = (c + kAhead < whole ? b : after) + c + kAhead;
      Floats s[kRows];
      for (int r = 0; r < kRows; ++r) s[r] = started(steps.start, r, c);
#pragma GCC unroll 16
      for (int k = 0; k < kStreamDepth; ++k) {
        prefetch_into_l2(ahead + k * stride);
        Floats b_k = T::load(b + k * stride + c);
        for (int r = 0; r < kRows; ++r) s[r] = fma(kHeld ? a[k][r] : broadcast(x[k * kRows + r]), b_k, s[r]);
      }
      for (int r = 0; r < kRows; ++r) finish(steps, r, c, s[r]);
    }
  }
  for (; c < steps.columns; c += kWidth) {
    Floats s[kRows];
    for (int r = 0; r < kRows; ++r) s[r] = started(steps.start, r, c);
    for (int64_t k = 0; k < steps.depth; ++k) {
      Floats b_k = T::load(b + k * stride + c, steps.columns - c);
      for (int r = 0; r < kRows; ++r) s[r] = fma(broadcast(steps.a[k * kRows + r]), b_k, s[r]);
    }
    for (int r = 0; r < kRows; ++r) finish(steps, r, c, s[r]);
  }
}

// Way::transposed: b is read where it is, elements of T adjacent along k, b_stride from column to column. A square of
// kWidth columns by kWidth steps is transposed in registers and used there.
template <class T, int kRows>
inline __attribute__((always_inline)) void transposed_steps(const typename T::Stored *b, int64_t b_stride,
                                                            const float *a, Floats (&s)[kRows]) {
  Floats t[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    prefetch_into_l2(b + i * b_stride + 1024 / int64_t(sizeof(typename T::Stored)));
    t[i] = T::load(b + i * b_stride);
  }
  transpose(t);
#pragma GCC unroll 16
  for (int k = 0; k < kWidth; ++k) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) s[r] = fma(broadcast(a[k * kRows + r]), t[k], s[r]);
  }
}

// A square at an edge: `columns` and `depth` of it are there. It goes to memory, so that its steps are few instructions.
template <class T>
__attribute__((noinline)) void transpose_edge(const typename T::Stored *b, int64_t b_stride, int64_t columns,
                                              int64_t depth, float *to) {
  Floats t[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) t[i] = i < columns ? T::load(b + i * b_stride, depth) : zero();
  transpose(t);
#pragma GCC unroll 16
  for (int k = 0; k < kWidth; ++k) store(to + k * kWidth, t[k]);
}

template <class T, int kRows> void chain_transposed(const Steps &steps) {
  using Stored = typename T::Stored;
  for (int64_t c = 0; c < steps.columns; c += kWidth) {
    const Stored *b = (const Stored *)steps.b + c * steps.b_stride;
    const int64_t columns = steps.columns - c;
    Floats s[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) s[r] = started(steps.start, r, c);
    // The first steps reach up to a multiple of the vector: later loads then do not straddle lines.
    int64_t count = kWidth - int64_t(uintptr_t(b) / sizeof(Stored) % kWidth);
    for (int64_t k = 0; k < steps.depth; k += count, count = kWidth) {
      const float *a = steps.a + k * kRows;
      if (count == kWidth && columns >= kWidth && steps.depth - k >= kWidth) {
        transposed_steps<T>(b + k, steps.b_stride, a, s);
      } else {
        float edge[kWidth * kWidth];
        count = least(count, steps.depth - k);
        transpose_edge<T>(b + k, steps.b_stride, columns, count, edge);
        for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) s[r] = fma(broadcast(a[i * kRows + r]), load(edge + i * kWidth), s[r]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) finish(steps, r, c, s[r]);
  }
}

// How a tile is walked, its strip's height, its panel's width, and the code for each number of rows up to that height.
enum class Way { tiles, across, transposed };

template <Way way, int rows, int vectors> struct Shape {
  static constexpr Way kWay = way;
  static constexpr int kRows = rows, kColumns = vectors * kWidth;
  template <class T, int row = rows> static Chain chain(int64_t count) {
    if constexpr (row > 1) {
      if (count < row) return chain<T, row - 1>(count);
    }
    if constexpr (way == Way::across) return chain_across<T, row>;
    if constexpr (way == Way::transposed) return chain_transposed<T, row>;
    return chain_tile<row, vectors>;
  }
};

using Tiles = Shape<Way::tiles, kWidth == 16 ? 14 : kWidth == 8 ? 6 : 4, kWidth == 1 ? 4 : 2>;
using Across = Shape<Way::across, 8, 2048 / kWidth>;
using Transposed = Shape<Way::transposed, kWidth == 16 ? 8 : 4, 16>;

}  // namespace
}  // namespace pydet
