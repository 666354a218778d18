// What the bit models compute with: vectors of fp32 numbers and of integers, exponents and powers of two, and operands on
// their way to be packed with their exponents.
#pragma once

#include "cpu/simd.h"

namespace pydet {
namespace {

constexpr int kLanes = kWidth > 1 ? kWidth : 4;

using F32s = float __attribute__((vector_size(4 * kLanes)));
using I32s = int32_t __attribute__((vector_size(4 * kLanes)));
using U32s = uint32_t __attribute__((vector_size(4 * kLanes)));

template <class V> inline V load_vector(const void *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> inline V larger(V a, V b) { return a > b ? a : b; }
inline F32s pow2(I32s e) { return (F32s)((U32s)(e + 127) << 23); }
inline double pow2(int e) {
  uint64_t u = uint64_t(e + 1023) << 52;
  double x;
  memcpy(&x, &u, 8);
  return x;
}
inline I32s truncate(F32s x) { return __builtin_convertvector(x, I32s); }
inline I32s exponent_of(F32s x) { return (I32s)((U32s)x << 1 >> 24) - 127; }  // zero and subnormals: -127

// Part `part` of a vector of short exponents, as long as one of kLanes.
template <class Part, class V> inline I32s widen(V e, int part) {
  return __builtin_convertvector(load_vector<Part>((const char *)&e + part * sizeof(Part)), I32s);
}

inline bool any(I32s mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  uint64_t halves[2];
  memcpy(halves, &mask, sizeof halves);
  return (halves[0] | halves[1]) != 0;
#endif
}

// 16 columns of 16 bytes: to[i apart + j] = from[i + j stride].
inline void transpose_bytes(const uint8_t *from, int64_t stride, uint8_t *to, int apart) {
  constexpr int kSide = 16;
  using Bytes = uint8_t __attribute__((vector_size(kSide)));
  Bytes x[kSide], y[kSide];
  for (int j = 0; j < kSide; ++j) x[j] = load_vector<Bytes>(from + j * stride);
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {  // each takes one bit of j from the vectors' number to the bytes'
#pragma GCC unroll 8
    for (int j = 0; j < kSide / 2; ++j) {
      const Bytes a = x[j], b = x[j + kSide / 2];
      y[2 * j] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      y[2 * j + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    memcpy(x, y, sizeof x);
  }
  for (int i = 0; i < kSide; ++i) memcpy(to + i * apart, &x[i], kSide);
}

// words[j / kPart][i][j mod kPart] = source[i outer_stride + j inner_stride], one of the strides being 1; zeros where
// there are fewer than padded_rows, or the last part is not full.
template <int kPart, class Word>
inline void gather(const Word *source, int64_t outer_stride, int64_t inner_stride, int rows, int cols, int padded_rows,
                   Word *words) {
  int parts = int(divide_up(cols, kPart)), full = inner_stride == 1 ? cols / kPart * kPart : 0;
  if (rows < padded_rows || cols < parts * kPart) memset(words, 0, size_t(parts) * padded_rows * kPart * sizeof(Word));
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < full; j += kPart)
      memcpy(words + (j / kPart * padded_rows + i) * kPart, source + i * outer_stride + j, kPart * sizeof(Word));
  int squares_i = 0, squares_j = full;  // where squares of bytes that are turned at once end
  if constexpr (sizeof(Word) == 1)
    if (outer_stride == 1) {
      constexpr int kSide = 16;
      static_assert(kPart % kSide == 0, "a square lies in one part");
      squares_i = rows / kSide * kSide, squares_j = cols / kSide * kSide;
      for (int j = full; j < squares_j; j += kSide)
        for (int i = 0; i < squares_i; i += kSide)
          transpose_bytes(source + i + j * inner_stride, inner_stride,
                          words + (j / kPart * padded_rows + i) * kPart + j % kPart, kPart);
    }
  for (int j = full; j < cols; ++j)
    for (int i = j < squares_j ? squares_i : 0; i < rows; ++i)
      words[(j / kPart * padded_rows + i) * kPart + j % kPart] = source[i * outer_stride + j * inner_stride];
}

}  // namespace
}  // namespace pydet
