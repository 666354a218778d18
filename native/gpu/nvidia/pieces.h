// Rows that begin anywhere, read and written by whole vectors of memory.
//
// Vector i of memory, W elements, holds elements W i - shift to W i - shift + W - 1 of a row: shift is what the row lies
// behind a whole vector. A thread takes such a vector, and with the one behind it makes elements W i to W i + W - 1 of
// them, whose lanes of a sum along the row are its own. At a row's ends a vector of memory has elements that are another
// row's: they are read and left alone, and what is written is written one by one. Before the first row and behind the
// last, elements are read one by one too. A row may also wait in shared memory, copied by the pieces of 16 bytes of memory
// in which it lies: StagedRow.
#pragma once

#include "gpu/any/rows.h"

namespace pydet {
namespace {

// Whether each row of `rows` is as far behind a whole vector of `bytes` as that of `other` (an absent operand has no
// say).
inline bool rows_agree(const Rows &rows, const Rows &other, int64_t bytes) {
  if (!rows.data || !other.data) return true;
  const int64_t size = size_of(rows.type);
  auto agree = [&](int64_t one, int64_t two) { return (one - two) % bytes == 0; };
  return agree(int64_t(reinterpret_cast<uintptr_t>(rows.data)), int64_t(reinterpret_cast<uintptr_t>(other.data))) &&
         agree(rows.outer_stride * size, other.outer_stride * size) &&
         agree(rows.inner_stride * size, other.inner_stride * size);
}

template <Type type, int W> __device__ __forceinline__ int shift_of(const char *row) {
  return int(reinterpret_cast<uintptr_t>(row) / size_of(type) % W);
}

// Whether rows lie behind each other without a common byte, each at least a vector long: so that there is memory of
// theirs before each row but the first, and behind each but the last.
inline bool rows_ascend(const Rows &rows, int64_t inner, int64_t count, int64_t n) {
  if (!rows.data) return true;
  return n >= kVector && (count == 1 || inner == 1 || rows.inner_stride >= n) &&
         (inner >= count || rows.outer_stride >= (inner == 1 ? n : inner * rows.inner_stride));
}

// Whether a gradient's rows are as far behind a whole vector in the places of all operands, and ascend.
template <class P> bool all_rows_agree(const P &p) {
  const int64_t bytes = kVector * size_of(p.x.type);
  return rows_agree(p.dy, p.x, bytes) && rows_agree(p.dresidual, p.x, bytes) && rows_agree(p.dx, p.x, bytes) &&
         rows_ascend(p.x, p.inner, p.rows, p.n) && rows_ascend(p.dy, p.inner, p.rows, p.n) &&
         rows_ascend(p.dresidual, p.inner, p.rows, p.n);
}

// Elements first .. first + W - 1 of a row of n, a vector of memory. Those that are not the row's are anything where
// `before` and `behind` say that there is memory, else +0.
template <Type type, int W>
__device__ __forceinline__ Packed<type, W> load_piece(const char *row, int first, int n, bool before = false,
                                                      bool behind = false) {
  Packed<type, W> packed = {};
  if (first <= -W || first >= n) return packed;
  if ((before || first >= 0) && (behind || first + W <= n)) return load_packed<type, W>(row + first * size_of(type));
#pragma unroll
  for (int e = 0; e < W; ++e) {
    const int j = first + e;
    if (j < 0 || j >= n) continue;
    if constexpr (type == Type::f32) packed.word[e] = reinterpret_cast<const uint32_t *>(row)[j];
    else packed.word[e / 2] |= uint32_t(reinterpret_cast<const uint16_t *>(row)[j]) << e % 2 * 16;
  }
  return packed;
}

template <Type type, int W>
__device__ __forceinline__ void store_piece(char *row, int first, int n, const Packed<type, W> &packed) {
  if (first >= 0 && first + W <= n) {
    *reinterpret_cast<Packed<type, W> *>(row + first * size_of(type)) = packed;
    return;
  }
#pragma unroll
  for (int e = 0; e < W; ++e) {
    const int j = first + e;
    if (j < 0 || j >= n) continue;
    if constexpr (type == Type::f32) reinterpret_cast<uint32_t *>(row)[j] = packed.word[e];
    else reinterpret_cast<uint16_t *>(row)[j] = uint16_t(packed.word[e / 2] >> e % 2 * 16);
  }
}

template <int step, int count> __device__ __forceinline__ void move_words(uint32_t (&word)[count], bool moved) {
#pragma unroll
  for (int i = 0; i < count - step; ++i) word[i] = moved ? word[i + step] : word[i];
}

// Elements shift .. shift + W - 1 of two vectors behind each other, 0 <= shift < W.
template <Type type, int W>
__device__ __forceinline__ Packed<type, W> window(const Packed<type, W> &own, const Packed<type, W> &next, int shift) {
  constexpr int kWords = W * size_of(type) / 4, kOfWord = 4 / size_of(type);  // elements of a word
  uint32_t word[2 * kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    word[i] = own.word[i];
    word[kWords + i] = next.word[i];
  }
  if constexpr (kWords >= 8) move_words<4>(word, shift & 4 * kOfWord);
  if constexpr (kWords >= 4) move_words<2>(word, shift & 2 * kOfWord);
  move_words<1>(word, shift & kOfWord);
  static_assert(kWords == 2 || kWords == 4 || kWords == 8);
  Packed<type, W> result;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (kOfWord == 1) result.word[i] = word[i];
    else result.word[i] = __funnelshift_r(word[i], word[i + 1], shift % 2 * 16);
  }
  return result;
}

// Elements first .. first + W - 1 of a vector of n that begins with a whole vector of memory, plus `offset`; `absent`
// where there is none. What is not the vector's is +0 plus `offset`.
template <int W>
__device__ __forceinline__ void load_scales_of(const Vector &weight, float offset, float absent, int first, int n,
                                               float (&scale)[W]) {
  const int behind = first & (W - 1), whole = first - behind;
  if (!weight.data) {
#pragma unroll
    for (int e = 0; e < W; ++e) scale[e] = absent;
  } else if (weight.type == Type::f32) {
    unpack(window<Type::f32, W>(load_piece<Type::f32, W>(weight.data, whole, n),
                                load_piece<Type::f32, W>(weight.data, whole + W, n), behind),
           scale);
  } else {
    unpack_halves(window<Type::f16, W>(load_piece<Type::f16, W>(weight.data, whole, n),
                                       load_piece<Type::f16, W>(weight.data, whole + W, n), behind),
                  weight.type, scale);
  }
#pragma unroll
  for (int e = 0; e < W; ++e) scale[e] += offset;
}

// ---- A row in the shared memory of its block ---------------------------------------------------------------------

// Of shared memory for a row of n: one piece before it and some behind it are room.
inline int64_t bytes_of_staged(int64_t n, Type type) { return (n * size_of(type) / 16 + 8) * 16; }

// `shifted`: not all of its rows are whole vectors of memory, or not those that are written.
template <Type type, bool shifted> struct StagedRow {
  static constexpr int T = kMaxTeam, W = kVector, kSize = size_of(type), kOfPiece = 16 / kSize;

  char *staged;
  int n, shift;

  // Elements that a row lies behind a whole piece.
  __device__ __forceinline__ static int behind_whole(const char *row) {
    return shifted ? int(reinterpret_cast<uintptr_t>(row) % 16) / kSize : 0;
  }

  // Copies the row; all threads of the block call it. `before`, `behind`: whether there are rows to read there.
  __device__ __forceinline__ void fetch(char *shared, const char *row, int64_t columns, bool before, bool behind) {
    staged = shared + 16;
    n = int(columns);
    shift = behind_whole(row);
    for (int i = int(threadIdx.x), j; j = i * kOfPiece - shift, j < n; i += T) {
      if (!shifted || ((before || j >= 0) && (behind || j + kOfPiece <= n))) {
        copy_async_16(staged + 16 * i, row + j * kSize, 16);
      } else {
        using Bits = typename Element<type>::Bits;
#pragma unroll
        for (int e = 0; e < kOfPiece; ++e)
          if (j + e >= 0 && j + e < n)
            reinterpret_cast<Bits *>(staged)[j + e + shift] = reinterpret_cast<const Bits *>(row)[j + e];
      }
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();
  }

  // Calls body(j, x) for the thread's vectors, as they lie in a row that is `behind` elements behind a whole piece: 0
  // for those of the lanes. What is not the row's is `other`.
  template <class F> __device__ __forceinline__ void turns(int behind, float other, const F &body) const {
    const int apart = (shift - behind) & (kOfPiece - 1);
#pragma unroll 2
    for (int j = W * int(threadIdx.x) - behind; j < n; j += kRowLanes) {
      const char *const from = staged + (j + shift - apart) * kSize;
      auto packed = load_packed<type, W>(from);
      if constexpr (shifted) packed = window<type, W>(packed, load_packed<type, W>(from + W * kSize), apart);
      float x[W];
      unpack(packed, x);
      if (shifted && (j < 0 || j + W > n)) {
#pragma unroll
        for (int e = 0; e < W; ++e) x[e] = j + e >= 0 && j + e < n ? x[e] : other;
      }
      body(j, x);
    }
  }

  // Adds x y, of a vector of the lanes that begins at j.
  template <class Y>
  __device__ __forceinline__ void add(Lanes<T, W, 1> &lanes, int j, const float (&x)[W], const Y &y) const {
    if (!shifted || j + W <= n) lanes.add(0, true, x, y);
    else lanes.add_left(0, n - j, x, y);
  }
  __device__ __forceinline__ void store(char *row, int j, const float (&x)[W]) const {
    if constexpr (shifted) store_piece<type, W>(row, j, n, pack<type>(x));
    else store_packed<type>(row + j * kSize, x);
  }
};

}  // namespace
}  // namespace pydet
