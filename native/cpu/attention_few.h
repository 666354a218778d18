// The products of attention on the CPU for few rows, in ieee: as in decode, where all that counts is that keys and values
// are read once.
#pragma once

#include "cpu/attention_products.h"

namespace pydet {
namespace {

// s[r][j] of few rows, from the keys where they lie, kWidth keys by kWidth elements turned in registers: each is read
// once, and nothing is packed.
template <class T, int rows>
void scores_of(const float *q, const char *const *keys, int64_t count, int64_t d, float *s) {
  using Stored = typename T::Stored;
  for (int64_t j = 0; j < count; j += kWidth) {
    Floats sum[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sum[r] = zero();
    for (int64_t i = 0; i < d; i += kWidth) {
      Floats t[kWidth];
      const int64_t rest = d - i;
#pragma GCC unroll 16
      for (int lane = 0; lane < kWidth; ++lane) {
        const Stored *key = (const Stored *)keys[least(j + lane, count - 1)] + i;
        prefetch(key, 4096);
        t[lane] = rest >= kWidth ? T::load(key) : T::load(key, rest);
      }
      transpose(t);
      if (rest >= kWidth) {
#pragma GCC unroll 16
        for (int step = 0; step < kWidth; ++step) {
#pragma GCC unroll 8
          for (int r = 0; r < rows; ++r) sum[r] = fma(broadcast(q[(i + step) * rows + r]), t[step], sum[r]);
        }
      } else {
        for (int64_t step = 0; step < rest; ++step)
          for (int r = 0; r < rows; ++r) sum[r] = fma(broadcast(q[(i + step) * rows + r]), t[step], sum[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) store(s + r * kSide + j, sum[r]);
  }
}
template <class T, int rows = int(kFewRows)>
void scores_of_few(int64_t count_rows, const float *q, const char *const *keys, int64_t count, int64_t d, float *s) {
  if constexpr (rows > 0) {
    if (count_rows == rows) return scores_of<T, rows>(q, keys, count, d, s);
    if constexpr (rows > 1) return scores_of_few<T, rows - 1>(count_rows, q, keys, count, d, s);
  }
}

// o += weights and values of few rows, from the values where they lie: each is read once, for all rows.
template <class T, int rows, int vectors>
void weigh_columns(const float *s, const char *const *values, int64_t keys, int64_t at, int64_t e, float *o) {
  Floats sum[rows][vectors];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sum[r][v] = load(o + r * kSide + v * kWidth);
  }
  for (int64_t j = 0; j < keys; ++j) {
    const typename T::Stored *value = (const typename T::Stored *)values[j] + at;
    Floats row[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) row[v] = T::load(value + v * kWidth, vectors == 1 ? e - at : kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const Floats weight = broadcast(s[r * kSide + j]);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sum[r][v] = fma(weight, row[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) store(o + r * kSide + v * kWidth, canonical(sum[r][v]));
  }
}
template <class T, int rows>
void weigh_rows(const float *s, const char *const *values, int64_t keys, int64_t e, float *o, int64_t apart) {
  constexpr int kVectors = rows == 1 ? 8 : rows > 4 || kWidth < 16 ? 2 : 4, kColumns = kVectors * kWidth;
  static_assert(kSide % kColumns == 0, "columns of a vector lie together");
  int64_t c = 0;
  for (; c + kColumns <= e; c += kColumns)
    weigh_columns<T, rows, kVectors>(s, values, keys, c, e, o + c / kSide * apart + c % kSide);
  for (; c < e; c += kWidth) weigh_columns<T, rows, 1>(s, values, keys, c, e, o + c / kSide * apart + c % kSide);
}
template <class T, int rows = int(kFewRows)>
void weigh_few(int64_t count_rows, const float *s, const char *const *values, int64_t keys, int64_t e, float *o,
               int64_t apart) {
  if constexpr (rows > 0) {
    if (count_rows == rows) return weigh_rows<T, rows>(s, values, keys, e, o, apart);
    if constexpr (rows > 1) return weigh_few<T, rows - 1>(count_rows, s, values, keys, e, o, apart);
  }
}

}  // namespace
}  // namespace pydet
