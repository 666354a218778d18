// Rows of 16-bit elements that lie one behind the other, wherever they begin: a warp brings some of them to shared
// memory as the pieces of 16 bytes that they lie in, works on single elements there, in place, and stores pieces.
//
// Thread t of a team of T has columns t, t + T, ... of a row: neighbours read neighbours, and odd rows begin in other
// banks.
#pragma once

#include "gpu/nvidia/strided_row.h"

namespace pydet {
namespace {

// The rows of a tensor that some threads share: `bytes` from `at` on, which is `lead` behind the begin of a piece.
template <int threads> struct Share {
  char *at;
  int bytes, lead;
  __device__ __forceinline__ Share(char *first, int bytes_of_share)
      : at(first), bytes(bytes_of_share), lead(int(reinterpret_cast<uintptr_t>(first) % 16)) {}
  // Sets out to bring it to `to`, where it begins at `lead`. `before`, `after`: whether the tensor has rows there; none
  // but the tensor's elements are read.
  __device__ __forceinline__ void bring(char *to, bool before, bool after) const {
    const char *const pieces = at - lead;
    const int end = lead + bytes, readable = after ? end + 16 : end;
    for (int i = int(threadIdx.x) % threads * 16; i < end; i += 16 * threads) {
      if (i >= lead || before) {
        copy_async_16(to + i, pieces + i, readable - i < 16 ? readable - i : 16);
      } else {
#pragma unroll 1
        for (int j = lead; j < 16 && j < end; j += 2)
          *reinterpret_cast<uint16_t *>(to + j) = *reinterpret_cast<const uint16_t *>(pieces + j);
      }
    }
  }
  // Stores what lies in `from` as bring() left it. Of pieces that are others' too, the share's elements.
  __device__ __forceinline__ void store(const char *from) const {
    char *const pieces = at - lead;
    const int end = lead + bytes;
    for (int i = int(threadIdx.x) % threads * 16; i < end; i += 16 * threads) {
      if (i >= lead && i + 16 <= end) {
        *reinterpret_cast<uint4 *>(pieces + i) = *reinterpret_cast<const uint4 *>(from + i);
      } else {
#pragma unroll 1
        for (int j = i < lead ? lead : i; j < i + 16 && j < end; j += 2)
          *reinterpret_cast<uint16_t *>(pieces + j) = *reinterpret_cast<const uint16_t *>(from + j);
      }
    }
  }
};

// A thread's columns of a row in shared memory, of which the first F are always the row's.
template <int T, int V, int F> struct SharedRow {
  int t, n;

  __device__ __forceinline__ bool inside(int i) const { return i < V && (i < F || t + T * i < n); }
  // Past the row's end there is `outside`: what lies there is another row's, or nothing.
  __device__ __forceinline__ void load(const char *row, uint16_t outside, uint16_t (&bits)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      bits[i] = reinterpret_cast<const uint16_t *>(row)[t + T * i];
      if (!inside(i)) bits[i] = outside;
    }
  }
  // The same of N columns from the i-th on, with anything past the end.
  template <int N> __device__ __forceinline__ void load_some(const char *row, int i, uint16_t (&bits)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) bits[k] = i + k < V ? reinterpret_cast<const uint16_t *>(row)[t + T * (i + k)] : 0;
  }
  template <int N> __device__ __forceinline__ void store_some(char *row, int i, const uint32_t (&pairs)[N]) const {
#pragma unroll
    for (int k = 0; k < 2 * N; ++k)
      if (inside(i + k)) reinterpret_cast<uint16_t *>(row)[t + T * (i + k)] = uint16_t(pairs[k / 2] >> k % 2 * 16);
  }
};

// Bytes of shared memory for a share of `rows` rows of n, and what is read past its end.
template <int T, int V> PYDET_HD constexpr int share_bytes(int rows, int n) {
  return (16 + (rows * n + T * V - n) * 2 + 15) / 16 * 16;
}

// Of `groups` sums, half of the threads go on with every other one, until a thread has one: with threads 1, ...,
// `apart` apart.
template <int apart, int groups, int N> __device__ __forceinline__ void share_groups(float (&s)[N]) {
  const bool upper = threadIdx.x & apart;
#pragma unroll
  for (int k = 0; k < groups / 2; ++k) {
    const float keep = upper ? s[2 * k + 1] : s[2 * k], give = upper ? s[2 * k] : s[2 * k + 1];
    s[k] = keep + gpu_shfl_xor(give, apart, kLogicalWarp);
  }
  if constexpr (apart > 1) share_groups<apart / 2, groups / 2>(s);
}

// rowsum over a row whose lanes have one element at most: that of column t + T i is element i of a thread. Eight
// elements at a time are joined over e, which leaves the sum of one group, so that few are in registers.
constexpr int kChunk = 8;
template <int T, int V> struct SumOfLanes {
  static constexpr int kThreads = T < 8 ? T : 8, kSame = 8 / kThreads;  // of a group: threads, and elements of a thread
  static constexpr int kChunks = (V + kChunk - 1) / kChunk;
  static_assert((T == 2 || T == 4 || T == 8 || T == 16 || T == 32) && V * T <= kRowLanes && kChunks <= 8);
  float left[kChunks];

  // Elements from the i-th on; what is none of the row's is +0.
  __device__ __forceinline__ void add(int i, const float (&x)[kChunk]) {
    float s[kChunk];
#pragma unroll
    for (int g = 0; g < kThreads; ++g) {
      if constexpr (kSame == 1) s[g] = x[g];
      else if constexpr (kSame == 2) s[g] = x[2 * g] + x[2 * g + 1];
      else s[g] = (x[4 * g] + x[4 * g + 2]) + (x[4 * g + 1] + x[4 * g + 3]);
    }
    share_groups<kThreads / 2, kThreads>(s);
    left[i / kChunk] = s[0];
  }
  // To all threads of the team.
  __device__ __forceinline__ float total() {
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2)
#pragma unroll
      for (int k = 0; k < apart && k + apart < kChunks; ++k) left[k] += left[k + apart];
    float sum = left[0] + 0.0f;  // lanes without elements
#pragma unroll
    for (int apart = 1; apart < kThreads; apart *= 2) sum += gpu_shfl_xor(sum, apart, kLogicalWarp);
#pragma unroll
    for (int apart = T / 2; apart >= 8; apart /= 2) sum += gpu_shfl_xor(sum, apart, kLogicalWarp);
    return sum;
  }
};

// Blocks of 128 threads that a multiprocessor is to hold, for 64 to 80 registers a thread. Blackwell's code would
// spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
template <int V> constexpr int kBlocks = 2;
#else
template <int V> constexpr int kBlocks = V <= 24 ? 8 : V <= 32 ? 7 : 6;
#endif

// A team of T threads with V elements each, of which the first F are always the row's.
template <int team, int elements, int full> struct AdjacentShape {
  static constexpr int T = team, V = elements, F = full;
};

// Elements of weights of any type; `absent` where there are none, anything past the end.
template <int T, int V, int F, int N>
__device__ __forceinline__ void load_vector(const SharedRow<T, V, F> &columns, const Vector &vector, int i,
                                            float absent, float (&x)[N]) {
  if (!vector.data) {
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = absent;
  } else if (vector.type == Type::f32) {
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (columns.inside(i + k)) x[k] = reinterpret_cast<const float *>(vector.data)[columns.t + T * (i + k)];
  } else {
    uint16_t bits[N] = {};
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (columns.inside(i + k)) bits[k] = reinterpret_cast<const uint16_t *>(vector.data)[columns.t + T * (i + k)];
    floats_of<2>(vector.type, bits, x);
  }
}

template <int N> __device__ __forceinline__ void pairs_of(Type type, const float (&x)[2 * N], uint32_t (&pairs)[N]) {
  if (type == Type::bf16) {
#pragma unroll
    for (int i = 0; i < N; ++i) pairs[i] = rounded_pair<Type::bf16>(x[2 * i], x[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) pairs[i] = rounded_pair<Type::f16>(x[2 * i], x[2 * i + 1]);
  }
}

// Whether a problem's rows, if it has them, lie one behind the other, at the same place in a piece as those of `like`.
template <class P> bool rows_adjacent(const P &p, const Rows &rows, const Rows &like) {
  if (!rows.data) return true;
  auto place = [](const Rows &of) { return reinterpret_cast<uintptr_t>(of.data) % 16; };
  return (p.rows <= 1 || (rows.inner_stride == p.n && (p.rows <= p.inner || rows.outer_stride == p.inner * p.n))) &&
         place(rows) == place(like);
}

}  // namespace
}  // namespace pydet
