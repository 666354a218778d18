// Small products of gemm_ieee.cpp, whose operands are multiplied where they lie.
#pragma once

#include "cpu/gemm_ieee_pack.h"
#include "cpu/parallel.h"

namespace pydet {
namespace {

// A tile whose operands lie where they are, in the caches: a_row and a_step floats from row to row and from k to k.
struct InPlace {
  int64_t depth, columns;
  const float *a, *b;
  int64_t a_row, a_step, b_step;
  Tile out;
  bool accumulate;
};

template <int kRows, int kVectors> void chain_in_place(const InPlace &steps) {
  constexpr int kLast = kVectors - 1;
  const int64_t rest = steps.columns - kLast * kWidth;  // columns of the last vector
  constexpr int kPointers = (kRows + 2) / 3;            // one for three rows: more would not stay in registers
  const float *pointer[kPointers];
  const int64_t a_row = steps.a_row;
#pragma GCC unroll 16
  for (int i = 0; i < kPointers; ++i) pointer[i] = steps.a + 3 * i * a_row;
  Floats s[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const float *from = steps.out.p + r * steps.out.stride + v * kWidth;
      s[r][v] = !steps.accumulate ? zero() : v < kLast ? load(from) : load(from, rest);
    }
  }
  const float *b = steps.b;
  for (int64_t k = 0; k < steps.depth; ++k, b += steps.b_step) {
    Floats b_k[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) b_k[v] = v < kLast ? load(b + v * kWidth) : load(b + v * kWidth, rest);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      Floats a_k = broadcast(pointer[r / 3][r % 3 * a_row]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) s[r][v] = fma(a_k, b_k[v], s[r][v]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kPointers; ++i) pointer[i] += steps.a_step;
  }
  float *to = steps.out.p;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, to += steps.out.stride) {
#pragma GCC unroll 16
    for (int v = 0; v < kLast; ++v) store(to + v * kWidth, canonical(s[r][v]));
    if (rest == kWidth) store(to + kLast * kWidth, canonical(s[r][kLast]));
    else store(to + kLast * kWidth, canonical(s[r][kLast]), rest);
  }
}

// Vectors of a tile in place: few rows take more, so that enough chains run side by side.
constexpr int in_place_vectors(int64_t rows) { return rows == 1 ? 8 : rows == 2 ? 4 : Tiles::kColumns / kWidth; }

using InPlaceChain = void (*)(const InPlace &);
template <int kRows, int kVectors = in_place_vectors(kRows)> InPlaceChain in_place_chain(int64_t rows,
                                                                                         int64_t vectors) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return in_place_chain<kRows - 1>(rows, vectors);
  }
  if constexpr (kVectors > 1) {
    if (vectors < kVectors) return in_place_chain<kRows, kVectors - 1>(rows, vectors);
  }
  return chain_in_place<kRows, kVectors>;
}

constexpr int64_t kTurnedFloats = 48 * 1024;  // of a b that is not row-major, which is turned into scratch memory first

// Whether a and b are multiplied where they lie, since packing them would take as long: all is in the L2 and out is
// narrow in one direction; or b is small and a's rows are read once, along k.
bool is_small(const Gemm &gemm) {
  if (gemm.b.col_stride != 1 && (gemm.m <= Transposed::kRows || gemm.k * (gemm.n + kWidth) > kTurnedFloats))
    return false;
  const bool plain = gemm.a.type == Type::f32 && gemm.b.type == Type::f32 && gemm.out.type == Type::f32 &&
                     gemm.out.col_stride == 1 && gemm.batch.count == 1 && gemm.k_chunk == 0;
  constexpr int64_t kFloats = 400 * 1000;  // these numbers are by trial
  const bool all = gemm.k * (gemm.m + gemm.n) <= kFloats;
  const bool streams = gemm.a.col_stride == 1 && gemm.a.row_stride % 256 != 0 && gemm.k * gemm.n <= kFloats / 2;
  return plain && ((all && (gemm.n <= 200 || gemm.m <= 64)) || (streams && gemm.n <= 128));
}

// out, or a part of it with its rows of a and columns of b.
__attribute__((noinline)) void multiply_in_place(const Gemm &gemm, const Matrix &a, const Matrix &b, const Matrix &bias,
                                                 const Matrix &out) {
  for (int64_t row = 0; row < out.rows; row += Tiles::kRows) {
    const int64_t rows = least(Tiles::kRows, out.rows - row), tile_columns = in_place_vectors(rows) * kWidth;
    for (int64_t column = 0; column < out.cols; column += tile_columns) {
      InPlace steps;
      steps.depth = gemm.k, steps.columns = least(tile_columns, out.cols - column);
      steps.a = (const float *)at(a, row, 0), steps.b = (const float *)at(b, 0, column);
      steps.a_row = a.row_stride, steps.a_step = a.col_stride, steps.b_step = b.row_stride;
      steps.out = {(float *)at(out, row, column), out.row_stride};
      steps.accumulate = gemm.accumulate;
      in_place_chain<Tiles::kRows>(rows, divide_up(steps.columns, kWidth))(steps);
    }
  }
  if (bias.data) {
    dispatch(bias.type, [&](auto number) { add<decltype(number)>(bias, {(float *)out.data, out.row_stride}); });
  }
}

static_assert(kTurnedFloats + kTurnFloats <= Scratch::kLarge / 4, "both fit");

void compute_in_place(const Gemm &gemm, int64_t threads, Scratch &scratch) {
  const int64_t wanted = threads == 1 ? 1 : 4 * threads;  // tasks
  const int64_t rows = divide_up(divide_up(gemm.m, wanted), Tiles::kRows) * Tiles::kRows;
  const int64_t row_tasks = divide_up(gemm.m, rows), wanted_across = divide_up(wanted, row_tasks);
  const int64_t columns = divide_up(divide_up(gemm.n, wanted_across), Tiles::kColumns) * Tiles::kColumns;
  parallel(row_tasks * divide_up(gemm.n, columns), threads, scratch, [&](int64_t task, Scratch &own) {
    const int64_t row = task % row_tasks * rows, column = task / row_tasks * columns;
    const int64_t own_rows = least(rows, gemm.m - row), own_columns = least(columns, gemm.n - column);
    Matrix b = part(gemm.b, 0, gemm.k, column, own_columns);
    if (b.col_stride != 1) {
      float *turned = (float *)own.data, *turn = turned + kTurnedFloats;
      const int64_t ld = divide_up(own_columns, kWidth) * kWidth;
      pack<Number<Type::f32>>((const float *)b.data, b.col_stride, b.row_stride, own_columns, gemm.k, turned, ld, turn);
      b = {(char *)turned, Type::f32, gemm.k, own_columns, ld, 1};
    }
    multiply_in_place(gemm, part(gemm.a, row, own_rows, 0, gemm.k), b,
                      part(gemm.bias, row, own_rows, column, own_columns),
                      part(gemm.out, row, own_rows, column, own_columns));
  });
}

}  // namespace
}  // namespace pydet
