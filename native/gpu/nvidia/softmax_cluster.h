// A row of softmax by a block, or by the C blocks of a cluster: of each 2048 elements block c has those of 256 / C groups
// of lanes, and a thread W adjacent ones, a piece. The blocks send each other (cluster.h) the largest of theirs, then the
// sums of their groups. Shared by softmax_spread.cu, softmax_head.cu and softmax_staged.cu, whose threads have single
// elements.
#pragma once

#include "gpu/any/softmax_row.h"
#include "gpu/cluster.h"

namespace pydet {
namespace {

// What a block is sent by those of its cluster.
template <int C> struct alignas(16) Received {
  float sums[kRowLaneGroups];
  float2 most[C];
  uint64_t most_arrived, sums_arrived;
};

// Adjacent elements as they lie in memory.
template <Type type, int W> struct alignas(W *size_of(type) < 16 ? W * size_of(type) : 16) Adjacent {
  uint32_t word[W * size_of(type) / 4];
};

template <Type type, int W>
__device__ __forceinline__ void to_floats(const Adjacent<type, W> &adjacent, float (&x)[W]) {
#pragma unroll
  for (int i = 0; i < W; ++i) {
    if constexpr (type == Type::f32) x[i] = float_of(adjacent.word[i]);
    else x[i] = Element<type>::to_f32(uint16_t(i % 2 ? adjacent.word[i / 2] >> 16 : adjacent.word[i / 2]));
  }
}

// The sum of a group's eight lanes, of which a thread has W. Each of the 8 / W threads gets it.
template <int W> __device__ __forceinline__ float of_group(float (&s)[W]) {
  auto from = [](float x, int apart) { return __shfl_xor_sync(0xFFFFFFFFu, x, apart); };
  if constexpr (W == 1) {
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2) s[0] += from(s[0], apart);
    return s[0];
  } else if constexpr (W == 8) {
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2)
#pragma unroll
      for (int e = 0; e < apart; ++e) s[e] += s[e + apart];
    return s[0];
  } else if constexpr (W == 4) {  // the first of two threads goes on with lanes 0 and 2, the second with 1 and 3
    const bool second = threadIdx.x % 2;
    const float low = (second ? s[1] : s[0]) + from(second ? s[0] : s[1], 1);
    const float high = (second ? s[3] : s[2]) + from(second ? s[2] : s[3], 1);
    const float sum = low + high;
    return sum + from(sum, 1);
  } else {
    static_assert(W == 2);
    const bool upper = threadIdx.x & 2;
    float sum = (upper ? s[1] : s[0]) + from(upper ? s[0] : s[1], 2);
    sum += from(sum, 1);
    return sum + from(sum, 2);
  }
}

// A thread's pieces of a row, which begin at column `first` and lie 2048 apart. Past the row's end there is `outside`.
template <Type type, int W, int V, bool whole>
__device__ __forceinline__ void load_pieces(const char *row, int first, int n, uint32_t outside,
                                            Adjacent<type, W> (&x)[V]) {
  using Bits = typename Element<type>::Bits;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int j = first + kRowLanes * v;
#pragma unroll
    for (int i = 0; i < W * size_of(type) / 4; ++i) x[v].word[i] = outside;
    if constexpr (whole) {
      if (j < n) x[v] = *reinterpret_cast<const Adjacent<type, W> *>(row + int64_t(j) * size_of(type));
    } else {
      const Bits *const from = reinterpret_cast<const Bits *>(row);
#pragma unroll
      for (int e = 0; e < W; ++e) {
        const uint32_t one = j + e < n ? from[j + e] : Bits(outside);
        if constexpr (size_of(type) == 4) x[v].word[e] = one;
        else x[v].word[e / 2] = e % 2 ? x[v].word[e / 2] | one << 16 : one;
      }
    }
  }
}

// Past a row's end, in words of memory: the lowest number, twice where a word is a pair.
template <Type type>
constexpr uint32_t kLowestWord = type == Type::f32    ? 0xFF800000u
                                 : type == Type::bf16 ? 0xFF80FF80u
                                                      : 0xFC00FC00u;

// The largest of the W elements that lie at the same place of a thread's pieces.
template <Type type, int W, int V>
__device__ __forceinline__ void tops_of(const Adjacent<type, W> (&x)[V], float (&tops)[W]) {
  Adjacent<type, W> top = x[0];
#pragma unroll
  for (int v = 1; v < V; ++v)
#pragma unroll
    for (int i = 0; i < W * size_of(type) / 4; ++i) {
      if constexpr (type == Type::f32) top.word[i] = bits_of(larger(float_of(top.word[i]), float_of(x[v].word[i])));
      else top.word[i] = larger_pair<type>(top.word[i], x[v].word[i]);
    }
  to_floats(top, tops);
}

// Adds the exps of a row to a thread's lanes, some pieces' at a time: then keep(v, exps) has those of piece v.
template <int kAtOnce, Type type, int W, int V, class F>
__device__ __forceinline__ void add_exps(const Adjacent<type, W> (&x)[V], float max, int n, float (&lane)[W],
                                         const F &keep) {
#pragma unroll
  for (int v = 0; v < V; v += kAtOnce) {
    if (v > 0 && kRowLanes * v >= n) continue;
    float exps[kAtOnce][W];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      to_floats(x[v + i], exps[i]);
#pragma unroll
      for (int e = 0; e < W; ++e) exps[i][e] = falling_exp_f32(exps[i][e] - max);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int e = 0; e < W; ++e) lane[e] += exps[i][e];
      keep(v + i, exps[i]);
    }
  }
}

// Stores pieces from the v-th on.
template <Type type, int W, bool whole, int N>
__device__ __forceinline__ void store_pieces(char *row, int first, int n, int v, const Adjacent<type, N> &y) {
  using Bits = typename Element<type>::Bits;
  constexpr int kWords = W * size_of(type) / 4;
#pragma unroll
  for (int i = 0; i < N / W; ++i) {
    const int j = first + kRowLanes * (v + i);
    if constexpr (whole) {
      Adjacent<type, W> piece;
#pragma unroll
      for (int k = 0; k < kWords; ++k) piece.word[k] = y.word[i * kWords + k];
      if (j < n) *reinterpret_cast<Adjacent<type, W> *>(row + int64_t(j) * size_of(type)) = piece;
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) {
        const uint32_t word = y.word[(i * W + e) * size_of(type) / 4];
        if (j + e < n)
          reinterpret_cast<Bits *>(row)[j + e] = Bits(size_of(type) == 4 || e % 2 == 0 ? word : word >> 16);
      }
    }
  }
}

// The sum along a row from the lanes of the cluster's threads, which all get it.
template <int C, int W>
__device__ __forceinline__ float row_sum(float (&lane)[W], Received<C> &received, int rank) {
  const int t = int(threadIdx.x);
  const float group = of_group(lane);
  constexpr int kOfGroup = 8 / W;  // threads
  if constexpr (C > 1) {           // those of a pair of groups send both sums to a block each
    static_assert(2 * kOfGroup >= C);
    const float neighbour = __shfl_xor_sync(0xFFFFFFFFu, group, kOfGroup);
    const bool upper = t & kOfGroup;
    meet_cluster();
    if (t % (2 * kOfGroup) < C)
      send(&received.sums[kRowLaneGroups / C * rank + t / (2 * kOfGroup) * 2],
           make_float2(upper ? neighbour : group, upper ? group : neighbour), &received.sums_arrived,
           t % (2 * kOfGroup));
    wait_for_cluster(&received.sums_arrived);
  } else {
    if (t % kOfGroup == 0) received.sums[t / kOfGroup] = group;
    __syncthreads();
  }
  float part[kRowLaneGroups / kLogicalWarp];
#pragma unroll
  for (int i = 0; i < kRowLaneGroups / kLogicalWarp; ++i) part[i] = received.sums[kLogicalWarp * i + t % kLogicalWarp];
#pragma unroll
  for (int apart = kRowLaneGroups / kLogicalWarp / 2; apart > 0; apart /= 2)
#pragma unroll
    for (int i = 0; i < apart; ++i) part[i] += part[i + apart];
  float sum = part[0];
#pragma unroll
  for (int apart = kLogicalWarp / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, apart);
  return sum;
}

// The largest of the numbers that threads of the cluster bring, which all get. Whoever sends sums, later, has met this.
template <int C, int T>
__device__ __forceinline__ float row_max(float max, float *of_warps, Received<C> &received, int rank) {
  const int t = int(threadIdx.x);
#pragma unroll
  for (int apart = kLogicalWarp / 2; apart > 0; apart /= 2) max = larger(max, __shfl_xor_sync(0xFFFFFFFFu, max, apart));
  if (t % kLogicalWarp == 0) of_warps[t / kLogicalWarp] = max;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < T / kLogicalWarp; ++i) max = larger(max, of_warps[i]);
  if constexpr (C > 1) {
    if (t < C) send(&received.most[rank], make_float2(max, 0.0f), &received.most_arrived, t);
    wait_for_cluster(&received.most_arrived);
#pragma unroll
    for (int c = 0; c < C; ++c) max = larger(max, received.most[c].x);
  }
  return max + 0.0f;  // which zero is the largest would depend on the order
}

}  // namespace
}  // namespace pydet
