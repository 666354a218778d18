// How gemm_ieee.cpp brings matrices into strips and panels, and sums from tiles into out.
#pragma once

#include "cpu/gemm_ieee_chains.h"

namespace pydet {
namespace {

constexpr int64_t kRun = 64, kLaneFloats = kRun + kWidth, kTurnFloats = kWidth * kLaneFloats;  // where lanes are turned

// kWidth lanes, each lane's steps of k adjacent, to[k * ld + lane], lanes past the last +0. First a few lines of each
// lane in turn go to a buffer: lanes a power of two apart, walked side by side, would evict each other from the L1.
template <class T>
void pack_transposed(const typename T::Stored *from, int64_t lane_stride, int64_t lanes, int64_t depth, float *to,
                     int64_t ld, float *buffer) {
  using Stored = typename T::Stored;
  const int64_t lane_floats = depth <= kWidth ? kWidth : kLaneFloats;
  for (int64_t begin = 0; begin < depth; begin += kRun) {
    const int64_t run = least(depth - begin, kRun);
    for (int64_t i = 0; i < kWidth; ++i) {
      const Stored *lane = from + i * lane_stride + begin;
      float *to_lane = buffer + i * lane_floats;
      if (i < lanes && run == kRun) {
#pragma GCC unroll 8
        for (int64_t k = 0; k < kRun; k += kWidth) store(to_lane + k, T::load(lane + k));
      } else {
        for (int64_t k = 0; k < run; k += kWidth) store(to_lane + k, i < lanes ? T::load(lane + k, run - k) : zero());
      }
    }
    for (int64_t k = 0; k < run; k += kWidth) {
      Floats t[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) {
        prefetch(from + i * lane_stride + begin + k);
        t[i] = load(buffer + i * lane_floats + k);
      }
      transpose(t);
      float *tile = to + (begin + k) * ld;
      if (run - k >= kWidth) {
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) store(tile + i * ld, t[i]);
      } else {
        for (int i = 0; i < run - k; ++i) store(tile + i * ld, t[i]);
      }
    }
  }
}

// Lanes by steps of k, as fp32: to[k * ld + lane], lanes past the last +0. Either stride is 1. ld is a multiple of
// kWidth, or less than that: then each step writes up to kWidth floats, the surplus overwritten by the next step's.
template <class T>
__attribute__((noinline)) void pack(const typename T::Stored *from, int64_t lane_stride, int64_t k_stride,
                                    int64_t lanes, int64_t depth, float *to, int64_t ld, float *buffer) {
  if (k_stride != 1) {
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t v = 0; v < ld; v += kWidth) {
        prefetch(from + k * k_stride + v);
        store(to + k * ld + v, T::load(from + k * k_stride + v, most(lanes - v, 0)));
      }
    }
  } else if (ld == 1) {  // one lane is a row of lanes
    pack<T>(from, 1, 0, depth, 1, to, depth, buffer);
  } else {
    for (int64_t v = 0; v < ld; v += kWidth) {
      pack_transposed<T>(from + v * lane_stride, lane_stride, lanes - v, depth, to + v, ld, buffer);
    }
  }
}

// Some rows of a row-major b into the panels of its columns, as pack() makes each: all that is read of a row at once.
template <class T>
__attribute__((noinline)) void pack_panels(const typename T::Stored *from, int64_t k_stride, int64_t columns,
                                           int64_t depth, float *to) {
  constexpr int64_t kRowsAhead = 8;
  const int64_t whole = columns / Tiles::kColumns;
  for (int64_t k = 0; k < depth; ++k, from += k_stride) {
    const typename T::Stored *row = from, *ahead = from + kRowsAhead * k_stride;
    float *at = to + k * Tiles::kColumns;
    for (int64_t panel = 0; panel < whole; ++panel, row += Tiles::kColumns, at += depth * Tiles::kColumns) {
      for (int v = 0; v < Tiles::kColumns; v += kWidth) {
        prefetch(ahead + panel * Tiles::kColumns + v, 0);
        store(at + v, T::load(row + v));
      }
    }
    const int64_t rest = columns - whole * Tiles::kColumns;
    if (rest) {
      for (int v = 0; v < Tiles::kColumns; v += kWidth) store(at + v, T::load(row + v, most(rest - v, 0)));
    }
  }
}

// One element's address; NULL where there is no matrix.
char *at(const Matrix &matrix, int64_t row, int64_t column) {
  if (!matrix.data) return nullptr;
  return matrix.data + (row * matrix.row_stride + column * matrix.col_stride) * size_of(matrix.type);
}

// tile = from, an fp32 matrix.
void fetch(const Matrix &from, Tile tile) {
  for (int64_t r = 0; r < from.rows; ++r) {
    const float *row = (const float *)at(from, r, 0);
    for (int64_t c = 0; c < from.cols; ++c) tile.p[r * tile.stride + c] = row[c * from.col_stride];
  }
}

// tile += bias, a matrix of T.
template <class T> __attribute__((noinline)) void add(const Matrix &bias, Tile tile) {
  using Stored = typename T::Stored;
  for (int64_t r = 0; r < bias.rows; ++r) {
    const Stored *row = (const Stored *)at(bias, r, 0);
    float *sum = tile.p + r * tile.stride;
    for (int64_t c = 0; c < bias.cols; c += kWidth) {
      int64_t count = least(bias.cols - c, kWidth);
      float terms[kWidth];
      Floats term;
      if (bias.col_stride == 1) {
        term = T::load(row + c, count);
      } else {
        for (int i = 0; i < kWidth; ++i) terms[i] = i < count ? T::get(row + (c + i) * bias.col_stride) : 0.0f;
        term = load(terms);
      }
      Number<Type::f32>::store(sum + c, load(sum + c, count) + term, count);
    }
  }
}

// to = round(tile), a matrix of T.
template <class T> __attribute__((noinline)) void round(Tile tile, const Matrix &to) {
  using Stored = typename T::Stored;
  for (int64_t r = 0; r < to.rows; ++r) {
    Stored *row = (Stored *)at(to, r, 0), rounded[kWidth];
    const float *sum = tile.p + r * tile.stride;
    for (int64_t c = 0; c < to.cols; c += kWidth) {
      int64_t count = least(to.cols - c, kWidth);
      if (to.col_stride == 1) {
        T::store(row + c, load(sum + c, count), count);
      } else {
        T::store(rounded, load(sum + c, count));
        for (int i = 0; i < count; ++i) row[(c + i) * to.col_stride] = rounded[i];
      }
    }
  }
}

Matrix part(const Matrix &matrix, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  return {at(matrix, row, column), matrix.type, rows, columns, matrix.row_stride, matrix.col_stride};
}

// The lines of matrices that will be packed next. They are asked for while the chains before are computed, one a step of
// k: down the rows, which lie apart, then the next line of each.
class Ahead {
 public:
  void add(const Matrix &matrix) {
    if (!matrix.rows || !matrix.cols) return;
    const bool by_rows = matrix.col_stride == 1;
    const int64_t size = size_of(matrix.type), run = (by_rows ? matrix.cols : matrix.rows) * size;
    const uintptr_t begin = uintptr_t(matrix.data) & ~uintptr_t(63);
    Lines &lines = lines_[count_++];
    lines.first = (const char *)begin;
    lines.rows = by_rows ? matrix.rows : matrix.cols;
    lines.step = (by_rows ? matrix.row_stride : matrix.col_stride) * size;
    lines.across = int64_t(uintptr_t(matrix.data) + uintptr_t(run) + 63 - begin) / 64;
  }
  // Calls of `depth` steps that it takes to ask for all.
  int64_t calls(int64_t depth) const {
    int64_t sum = 0;
    for (int i = 0; i < count_; ++i) sum += lines_[i].across * divide_up(lines_[i].rows, depth);
    return sum;
  }
  void ask(Steps &steps, int64_t depth) {
    if (at_ == count_) return;
    const Lines &lines = lines_[at_];
    const int64_t rows = least(depth, lines.rows - row_);
    steps.ask = lines.first + line_ * 64 + row_ * lines.step;
    steps.ask_step = lines.step;
    steps.ask_end = steps.ask + (rows - 1) * lines.step;
    row_ += rows;
    if (row_ == lines.rows) {
      row_ = 0;
      if (++line_ == lines.across) line_ = 0, ++at_;
    }
  }

 private:
  struct Lines {
    const char *first;
    int64_t rows, step, across;
  };
  Lines lines_[2];
  int count_ = 0, at_ = 0;
  int64_t line_ = 0, row_ = 0;
};

}  // namespace
}  // namespace pydet
