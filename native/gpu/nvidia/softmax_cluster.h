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

// A thread's pieces of a row, which begin at column `first` and lie 2048 apart. Past the row's end there is `outside`.
template <Type type, int W, int V, bool whole>
__device__ __forceinline__ void load_pieces(const char *row, int first, int n, uint32_t outside,
                                            Packed<type, W> (&x)[V]) {
  using Bits = typename Element<type>::Bits;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int j = first + kRowLanes * v;
#pragma unroll
    for (int i = 0; i < W * size_of(type) / 4; ++i) x[v].word[i] = outside;
    if constexpr (whole) {
      if (j < n) x[v] = *reinterpret_cast<const Packed<type, W> *>(row + int64_t(j) * size_of(type));
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

// The numbers of N / W pieces, from the v-th on.
template <Type type, int W, int V, int N>
__device__ __forceinline__ void unpack_pieces(const Packed<type, W> (&x)[V], int v, float (&one)[N]) {
#pragma unroll
  for (int i = 0; i < N / W; ++i) {
    float of_piece[W];
    unpack(x[v + i], of_piece);
#pragma unroll
    for (int e = 0; e < W; ++e) one[i * W + e] = of_piece[e];
  }
}

// Past a row's end, in words of memory: the lowest number, twice where a word is a pair.
template <Type type>
constexpr uint32_t kLowestWord = type == Type::f32    ? 0xFF800000u
                                 : type == Type::bf16 ? 0xFF80FF80u
                                                      : 0xFC00FC00u;

// The largest of the W elements that lie at the same place of a thread's pieces.
template <Type type, int W, int V>
__device__ __forceinline__ void tops_of(const Packed<type, W> (&x)[V], float (&tops)[W]) {
  Packed<type, W> top = x[0];
#pragma unroll
  for (int v = 1; v < V; ++v)
#pragma unroll
    for (int i = 0; i < W * size_of(type) / 4; ++i) {
      if constexpr (type == Type::f32) top.word[i] = bits_of(larger(float_of(top.word[i]), float_of(x[v].word[i])));
      else top.word[i] = larger_pair<type>(top.word[i], x[v].word[i]);
    }
  unpack(top, tops);
}

// Adds the exps of a row to a thread's lanes, some pieces' at a time: then keep(v, exps) has those of piece v.
template <int kAtOnce, Type type, int W, int V, class F>
__device__ __forceinline__ void add_exps(const Packed<type, W> (&x)[V], float max, int n, float (&lane)[W],
                                         const F &keep) {
#pragma unroll
  for (int v = 0; v < V; v += kAtOnce) {
    if (v > 0 && kRowLanes * v >= n) continue;
    float exps[kAtOnce][W];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      unpack(x[v + i], exps[i]);
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
__device__ __forceinline__ void store_pieces(char *row, int first, int n, int v, const Packed<type, N> &y) {
  using Bits = typename Element<type>::Bits;
  constexpr int kWords = W * size_of(type) / 4;
#pragma unroll
  for (int i = 0; i < N / W; ++i) {
    const int j = first + kRowLanes * (v + i);
    if constexpr (whole) {
      Packed<type, W> piece;
#pragma unroll
      for (int k = 0; k < kWords; ++k) piece.word[k] = y.word[i * kWords + k];
      if (j < n) *reinterpret_cast<Packed<type, W> *>(row + int64_t(j) * size_of(type)) = piece;
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
