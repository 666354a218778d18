// A row element by element, wherever it begins: thread t of a team of T has elements t, t + T, ... of it.
//
// Neighbours read and write neighbours, and no element moves to another thread. Element j of a sum along a row is in lane
// (g, e) with e = j mod 8 = t mod 8 (rows.h): so e is joined over threads. Of eight lanes, half of the threads go on with
// half of them, three times.
#pragma once

#include <type_traits>

#include "gpu/any/rows.h"

namespace pydet {
namespace {

// Elements as they lie in memory: both types of 16 bits share kernels.
template <int size> using ElementBits = std::conditional_t<size == 4, uint32_t, uint16_t>;

template <int size, int V>
__device__ __forceinline__ void floats_of(Type type, const ElementBits<size> (&bits)[V], float (&x)[V]) {
  if constexpr (size == 4) {
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = float_of(bits[i]);
  } else if (type == Type::bf16) {
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = f32_from_bf16(bits[i]);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = f32_from_f16(bits[i]);
  }
}

template <Type type, int V>
__device__ __forceinline__ void round_to(const float (&x)[V], ElementBits<size_of(type)> (&bits)[V]) {
  static_assert(V % 2 == 0);
#pragma unroll
  for (int i = 0; i < V; i += 2) {
    if constexpr (type == Type::f32) {
      bits[i] = bits_of(canonical(x[i])), bits[i + 1] = bits_of(canonical(x[i + 1]));
    } else {
      const uint32_t pair = rounded_pair<type>(x[i], x[i + 1]);
      bits[i] = uint16_t(pair), bits[i + 1] = uint16_t(pair >> 16);
    }
  }
}
template <int size, int V>
__device__ __forceinline__ void rounded(Type type, const float (&x)[V], ElementBits<size> (&bits)[V]) {
  if constexpr (size == 4) round_to<Type::f32>(x, bits);
  else if (type == Type::bf16) round_to<Type::bf16>(x, bits);
  else round_to<Type::f16>(x, bits);
}

// A thread's V elements of a row of n, of which the first F are always the row's.
template <int size, int T, int V, int F> struct Strided {
  int t, n;

  __device__ __forceinline__ int column(int i) const { return t + T * i; }
  __device__ __forceinline__ bool inside(int i) const { return i < F || column(i) < n; }

  // Past the end the last element once more.
  __device__ __forceinline__ void load(const char *row, ElementBits<size> (&bits)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i)
      bits[i] = reinterpret_cast<const ElementBits<size> *>(row)[inside(i) ? column(i) : n - 1];
  }
  __device__ __forceinline__ void store(char *row, const ElementBits<size> (&bits)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (inside(i)) reinterpret_cast<ElementBits<size> *>(row)[column(i)] = bits[i];
  }
  // Elements of weights of any type, plus `offset`; 1 where there are none.
  __device__ __forceinline__ void load_scale(const Vector &weight, float offset, float (&scale)[V]) const {
    if (!weight.data) {
#pragma unroll
      for (int i = 0; i < V; ++i) scale[i] = 1.0f;
    } else if (weight.type == Type::f32) {
      ElementBits<4> bits[V];
      Strided<4, T, V, F>{t, n}.load(weight.data, bits);
      floats_of<4>(Type::f32, bits, scale);
    } else {
      ElementBits<2> bits[V];
      Strided<2, T, V, F>{t, n}.load(weight.data, bits);
      floats_of<2>(weight.type, bits, scale);
    }
#pragma unroll
    for (int i = 0; i < V; ++i) scale[i] += offset;
  }
};

// Joins the lanes e of a group, partners 4, 2 and 1 apart (NUMERICS.md, "RMSNorm"). Of eight neighbouring threads each
// has lane e of S groups, s[0] to s[S - 1], e being its number among them. In a step it gives its partner half of its
// groups and keeps the other half. Thread e ends with the sum of group e S / 8.
template <int S> __device__ __forceinline__ float joined_over_e(float (&s)[S]) {
  static_assert(S == 8 || S == 4 || S == 2);
  int left = S;
#pragma unroll
  for (int apart = 4; apart > 0; apart /= 2) {
    if (left > 1) {
      left /= 2;
      const bool upper = threadIdx.x & apart;
#pragma unroll
      for (int k = 0; k < left; ++k) {
        const float keep = upper ? s[k + left] : s[k], give = upper ? s[k] : s[k + left];
        s[k] = keep + gpu_shfl_xor(give, apart, kLogicalWarp);
      }
    } else {
      s[0] += gpu_shfl_xor(s[0], apart, kLogicalWarp);
    }
  }
  return s[0];
}

// The lanes of one thread.
template <int T, int V> struct StridedLanes {
  static constexpr int kOfThread = kRowLanes / T, kUsed = kOfThread < V ? kOfThread : V;
  static constexpr int S = kUsed <= 2 ? 2 : kUsed <= 4 ? 4 : 8, kParts = (kUsed + S - 1) / S;
  static_assert((T == 8 || T == 16 || T % kLogicalWarp == 0) && kParts <= 8);
  float lane[kParts * S] = {};

  __device__ __forceinline__ void add(int i, bool inside, float x, float y) {
    float &s = lane[i % kUsed];
    s = inside ? fmaf(x, y, s) : s;
  }
  // The sum of the groups of eight neighbouring threads, which all of them get.
  __device__ __forceinline__ float own_sum() {
    float part[kParts];
#pragma unroll
    for (int b = 0; b < kParts; ++b) {
      float s[S];
#pragma unroll
      for (int i = 0; i < S; ++i) s[i] = lane[b * S + i];
      part[b] = joined_over_e(s);
    }
    // Parts lie S T / 8 groups apart: by halves. What is absent is +0, which changes -0 alone, and once.
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2)
#pragma unroll
      for (int b = 0; b < apart && b + apart < kParts; ++b) part[b] += part[b + apart];
    float sum = part[0];
    if constexpr (kUsed < kOfThread) sum += 0.0f;
#pragma unroll
    for (int apart = 4; apart >= 8 / S; apart /= 2) sum += gpu_shfl_xor(sum, apart, kLogicalWarp);
    return sum;
  }
};

// Floats of shared memory that a team needs to join R sums.
template <int T, int R> constexpr int kStridedExchange = T > kLogicalWarp ? R *T / 8 : 0;

// Joins the lanes of R sums over the team: every thread gets finish(sum) of each. All threads of the block call it.
template <int T, int V, int R, class F>
__device__ __forceinline__ void join_strided(StridedLanes<T, V> (&lanes)[R], float *exchange, const F &finish,
                                             float (&result)[R]) {
  constexpr int kGroups = T / 8, kWidth = kGroups < kLogicalWarp ? kGroups : kLogicalWarp, kParts = kGroups / kWidth;
  const int t = int(threadIdx.x) % T;
#pragma unroll
  for (int k = 0; k < R; ++k) result[k] = lanes[k].own_sum();
  if constexpr (T > kLogicalWarp) {
#pragma unroll
    for (int k = 0; k < R; ++k)
      if (t % 8 == 0) exchange[k * kGroups + t / 8] = result[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < R; ++k) {
      float part[kParts];
#pragma unroll
      for (int i = 0; i < kParts; ++i) part[i] = exchange[k * kGroups + i * kWidth + t % kWidth];
#pragma unroll
      for (int apart = kParts / 2; apart > 0; apart /= 2)
#pragma unroll
        for (int i = 0; i < apart; ++i) part[i] += part[i + apart];
      result[k] = part[0];
#pragma unroll
      for (int apart = kWidth / 2; apart > 0; apart /= 2) result[k] += gpu_shfl_xor(result[k], apart, kLogicalWarp);
    }
  } else {
#pragma unroll
    for (int k = 0; k < R; ++k)
#pragma unroll
      for (int apart = T / 2; apart >= 8; apart /= 2) result[k] += gpu_shfl_xor(result[k], apart, kLogicalWarp);
  }
#pragma unroll
  for (int k = 0; k < R; ++k) result[k] = finish(result[k]);
}

// dx of a row of RMSNorm (one sum along it: c) or LayerNorm (and a), from xhat and g, in whose place it is made.
template <class P, int size, int T, int V, int F, int R>
__device__ __forceinline__ void store_dx(const P &p, const RowIndex &row, const Strided<size, T, V, F> &columns,
                                         float rstd, const float (&xhat)[V], const float (&sums)[R], float (&g)[V]) {
  ElementBits<size> bits[V];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    g[i] = fmaf(-xhat[i], sums[0], g[i]);
    if constexpr (R == 2) g[i] -= sums[1];
  }
  if (p.dresidual.data) {
    float dresidual[V];
    columns.load(row_at(p.dresidual, size, row), bits);
    floats_of<size>(p.x.type, bits, dresidual);
#pragma unroll
    for (int i = 0; i < V; ++i) g[i] = fmaf(rstd, g[i], dresidual[i]);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) g[i] *= rstd;
  }
  rounded<size>(p.x.type, g, bits);
  columns.store(row_at(p.dx, size, row), bits);
}

// A team of T threads with V elements each, of which the first F are always the row's.
template <int team, int elements, int full> struct Singles {
  static constexpr int T = team, V = elements, F = full;
  static constexpr int holds() { return T * V; }
};

// Calls f with a team that holds a row of n.
constexpr int64_t kLongestOfShapes = 1024 * 12;
template <class F> pydet_status with_strided_shape(int64_t n, const F &f) {
  return with_first<Singles<32, 4, 0>, Singles<32, 8, 4>, Singles<64, 8, 4>, Singles<128, 8, 4>, Singles<256, 6, 4>,
                    Singles<256, 8, 6>, Singles<256, 12, 8>, Singles<512, 8, 6>, Singles<512, 12, 8>,
                    Singles<512, 16, 12>, Singles<1024, 12, 8>>(n, f);
}

// ---- Rows that lie one behind the other --------------------------------------------------------------------------

// A warp brings some rows of 16-bit elements to shared memory as the pieces of 16 bytes that they lie in, works on single
// elements there, in place, and stores pieces. Odd rows begin in other banks.

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
  // Past the row's end there is +0: what lies there is another row's, or nothing.
  __device__ __forceinline__ void load(const char *row, uint16_t (&bits)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      bits[i] = reinterpret_cast<const uint16_t *>(row)[t + T * i];
      if (!inside(i)) bits[i] = 0;
    }
  }
  // N columns from the i-th on.
  template <int N> __device__ __forceinline__ void store_some(char *row, int i, const uint16_t (&bits)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (inside(i + k)) reinterpret_cast<uint16_t *>(row)[t + T * (i + k)] = bits[k];
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
  static_assert((T == 4 || T == 8 || T == 16 || T == 32) && V * T <= kRowLanes && kChunks <= 8);
  float left[kChunks];

  // Elements from the i-th on; what is none of the row's is +0.
  __device__ __forceinline__ void add(int i, const float (&x)[kChunk]) {
    float s[kChunk];
#pragma unroll
    for (int g = 0; g < kThreads; ++g) {
      if constexpr (kSame == 1) s[g] = x[g];
      else s[g] = x[2 * g] + x[2 * g + 1];
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

// Whether a problem's rows, if it has them, lie one behind the other, at the same place in a piece as those of `like`.
template <class P> bool rows_adjacent(const P &p, const Rows &rows, const Rows &like) {
  if (!rows.data) return true;
  auto place = [](const Rows &of) { return reinterpret_cast<uintptr_t>(of.data) % 16; };
  return (p.rows <= 1 || (rows.inner_stride == p.n && (p.rows <= p.inner || rows.outer_stride == p.inner * p.n))) &&
         place(rows) == place(like);
}

}  // namespace
}  // namespace pydet
