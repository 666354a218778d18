// A row in the shared memory of its block, copied by pieces of 16 bytes of memory wherever it begins. Shared by
// softmax_staged.cu and norm_staged.cu.
#pragma once

#include "gpu/nvidia/norm_pieces.h"

namespace pydet {
namespace {

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
  __device__ __forceinline__ void add(Lanes<T, W, 1> &lanes, int j, const float (&x)[W], const float (&y)[W]) const {
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
