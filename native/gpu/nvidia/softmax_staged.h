// Rows of softmax by way of shared memory: rows that begin anywhere, and rows that a cluster holds. Shared by
// softmax_staged.cu and softmax_backward_staged.cu.
//
// A row is copied as it lies, by the pieces of 16 bytes of memory, and so is its result. In between an element is one
// thread's, by the lanes of the row's sum (rows.h): thread t of T has elements t + T q, whatever their place in
// memory. `C` blocks, a cluster, share a row: of each 2048 elements block c has those of 256 lanes, a thread one. The
// groups' sums and the maximum they send each other (cluster.h).
#pragma once

#include "gpu/any/softmax_row.h"
#include "gpu/cluster.h"

namespace pydet {
namespace {

constexpr int kRanks = 8;  // blocks that share a row

template <Type type, int T, int C> struct Stage {
  static_assert(T <= 512 && (C == 1 || (C == kRanks && T == kMaxTeam)));
  static constexpr int kBlock = T < 128 ? 128 : T, kTeams = kBlock / T;
  static constexpr int kLanes = kRowLanes / (T * C);  // of the sum, of a thread
  static constexpr int kSize = size_of(type), kPiece = 16 / kSize;
  // A block of a cluster has segments of a row, a whole one in each 2048 elements.
  static constexpr int kSegment = T, kSegmentRoom = kSegment + kPiece;
  using Bits = typename Element<type>::Bits;

  int t, rank, n;

  __device__ __forceinline__ explicit Stage(int64_t columns)
      : t(int(threadIdx.x) % T), rank(C == 1 ? 0 : int(blockIdx.x) % C), n(int(columns)) {}

  // Element q of the thread: its column, and its place behind those that `shift` makes room for.
  __device__ __forceinline__ int column(int q) const {
    return C == 1 ? t + T * q : kRowLanes * q + kSegment * rank + t;
  }
  __device__ __forceinline__ int place(int q) const { return C == 1 ? t + T * q : kSegmentRoom * q + t; }
  __device__ __forceinline__ static int shift_of(const char *row) {
    return int(reinterpret_cast<uintptr_t>(row) % 16) / kSize;
  }
  __device__ __forceinline__ static float load(const char *staged, int at) {
    return Element<type>::to_f32(reinterpret_cast<const Bits *>(staged)[at]);
  }
  // Rounds N elements of the thread and stores those of them that are the row's, from element q on.
  template <int N>
  __device__ __forceinline__ void store(char *staged, int shift, int q, const float (&x)[N]) const {
    Bits *to = reinterpret_cast<Bits *>(staged) + shift;
    if constexpr (type == Type::f32) {
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (column(q + i) < n) to[place(q + i)] = bits_of(canonical(x[i]));
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        const uint32_t pair = rounded_pair<type>(x[i], x[i + 1]);
        if (column(q + i) < n) to[place(q + i)] = Bits(pair);
        if (column(q + i + 1) < n) to[place(q + i + 1)] = Bits(pair >> 16);
      }
    }
  }

  // Calls whole(staged, memory) for the pieces of 16 bytes of the block's part of a row, `one` for the elements at its
  // ends. `cut`: segments end at their own elements; else they take the whole of a piece that they share.
  template <bool cut, class Whole, class One>
  __device__ __forceinline__ void pieces(char *staged, char *row, const Whole &whole, const One &one) const {
    const int shift = shift_of(row);
    char *const memory = row - shift * kSize;
    if constexpr (C == 1) {
      const int behind = (n + shift) / kPiece;  // the piece that ends the row, if any of it is left
      for (int i = t + (shift > 0); i < behind; i += T) whole(staged + 16 * i, memory + 16 * i);
      if (t < 2 * kPiece) {
        const int j = t % kPiece + (t < kPiece ? 0 : behind * kPiece) - shift;
        if (j >= 0 && j < n && (t < kPiece ? shift > 0 : behind > 0 || shift == 0))
          one(staged + (j + shift) * kSize, row + j * kSize);
      }
    } else {
      const int lane = int(threadIdx.x) % kLogicalWarp, pieces = kSegment / kPiece + (shift > 0);
      for (int q = int(threadIdx.x) / kLogicalWarp;; q += T / kLogicalWarp) {
        const int first = kRowLanes * q + kSegment * rank, left = n - first;
        if (left <= 0) break;
        const int low = cut ? 0 : -first, high = cut ? (left < kSegment ? left : kSegment) : left;
        char *const segment = staged + kSegmentRoom * q * kSize;
        for (int i = lane; i < pieces; i += kLogicalWarp) {
          const int j = i * kPiece - shift;  // of the segment
          if (j >= low && j + kPiece <= high) {
            whole(segment + 16 * i, row + (first + j) * kSize);
          } else {
#pragma unroll
            for (int e = 0; e < kPiece; ++e)
              if (j + e >= low && j + e < high) one(segment + (j + e + shift) * kSize, row + (first + j + e) * kSize);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void fetch(char *staged, const char *row) const {
    pieces<false>(
        staged, const_cast<char *>(row), [](char *to, const char *from) { copy_async_16(to, from, 16); },
        [](char *to, const char *from) { *reinterpret_cast<Bits *>(to) = *reinterpret_cast<const Bits *>(from); });
  }
  __device__ __forceinline__ void write(char *staged, char *row) const {
    pieces<true>(
        staged, row,
        [](const char *from, char *to) { *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from); },
        [](const char *from, char *to) { *reinterpret_cast<Bits *>(to) = *reinterpret_cast<const Bits *>(from); });
  }
  // Bytes of shared memory that a team's part of a row of n takes.
  static int bytes(int64_t n) {
    return C == 1 ? int(n / kPiece + 2) * 16 : int(divide_up(n, kRowLanes)) * kSegmentRoom * kSize;
  }

  __device__ __forceinline__ static void meet() {
    if constexpr (T == kLogicalWarp) __syncwarp();
    else __syncthreads();
  }
};

// Whether rows of `one` are elsewhere in a piece of memory than those of `other`.
inline bool rows_differ(const Rows &one, const Rows &other) {
  const int64_t size = size_of(one.type);
  auto differ = [](int64_t a, int64_t b) { return (a - b) % 16 != 0; };
  return differ(int64_t(reinterpret_cast<uintptr_t>(one.data)), int64_t(reinterpret_cast<uintptr_t>(other.data))) ||
         differ(one.outer_stride * size, other.outer_stride * size) ||
         differ(one.inner_stride * size, other.inner_stride * size);
}

// Whether the shared memory of a block holds `parts` rows of n of a team, one of `sharing` that share a row.
inline bool rows_fit(int parts, int64_t n, Type type, int sharing, int device) {
  constexpr int64_t kStatic = 4 << 10, kRoom = 16;  // of each 256 elements
  const int64_t elements = divide_up(n, kRowLanes) * kRowLanes / sharing;
  return parts * (elements * size_of(type) + elements / 256 * kRoom + 32) + kStatic <= gpu_shared_bytes(device);
}

// What blocks of a cluster send each other.
struct alignas(16) Exchange {
  float sums[kRanks][kLogicalWarp];
  float2 most[kRanks];
  uint64_t most_arrived, sums_arrived;
};

// The largest of the threads' values, of a team and of all blocks that share its row.
template <int T, int C> __device__ __forceinline__ float most_of(float most, float *exchange, Exchange *cluster) {
#pragma unroll
  for (int apart = kLogicalWarp / 2; apart > 0; apart /= 2)
    most = larger(most, __shfl_xor_sync(0xFFFFFFFFu, most, apart));
  if constexpr (T > kLogicalWarp) {
    if (threadIdx.x % kLogicalWarp == 0) exchange[threadIdx.x / kLogicalWarp] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < T / kLogicalWarp; ++i) most = larger(most, exchange[i]);
  }
  if constexpr (C > 1) {
    if (threadIdx.x < C)
      send(&cluster->most[blockIdx.x % C], make_float2(most, 0.0f), &cluster->most_arrived, int(threadIdx.x));
    wait_for_cluster(&cluster->most_arrived);
#pragma unroll
    for (int c = 0; c < C; ++c) most = larger(most, cluster->most[c].x);
  }
  return most + 0.0f;  // which zero is the largest would depend on the order
}

// The sum along a row from the thread's lanes, of which those past S are empty. All threads of the team get it.
template <int T, int C, int S> struct LaneSum {
  static constexpr int kLanes = kRowLanes / (T * C);
  static constexpr int kHalvings = S >= 8 ? 3 : S >= 4 ? 2 : S >= 2 ? 1 : 0;

  __device__ __forceinline__ static float joined(float (&lane)[S], float *exchange, Exchange *cluster) {
    // The elements of a group, 4, 2, 1 apart: a thread goes on with half of its lanes where it has more than one.
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int apart = 4 >> i;
      if (i < kHalvings) {
        const int half = S >> (i + 1);
        const bool upper = threadIdx.x & apart;
#pragma unroll
        for (int k = 0; k < S / 2; ++k) {
          if (k >= half) continue;
          const float keep = upper ? lane[k + half] : lane[k], give = upper ? lane[k] : lane[k + half];
          lane[k] = keep + __shfl_xor_sync(0xFFFFFFFFu, give, apart);
        }
      } else {
        lane[0] += __shfl_xor_sync(0xFFFFFFFFu, lane[0], apart);
      }
    }
    constexpr int kLeft = S >> kHalvings;
    if constexpr (C > 1) {  // threads of a group have its sum, and send it to a block each, in pairs
      const float neighbour = __shfl_xor_sync(0xFFFFFFFFu, lane[0], 8);
      const int group = int(threadIdx.x) / 8, to = int(threadIdx.x) % 8, rank = int(blockIdx.x) % C;
      meet_cluster();
      if (group % 2 == 0)
        send(&cluster->sums[rank][group], make_float2(lane[0], neighbour), &cluster->sums_arrived, to);
      wait_for_cluster(&cluster->sums_arrived);
      float part[C];
#pragma unroll
      for (int c = 0; c < C; ++c) part[c] = cluster->sums[c][threadIdx.x % kLogicalWarp];
#pragma unroll
      for (int apart = C / 2; apart > 0; apart /= 2)
#pragma unroll
        for (int c = 0; c < apart; ++c) part[c] += part[c + apart];
      return over<kLogicalWarp / 2, 1>(part[0]);
    } else {
      if constexpr (S < kLanes)  // empty lanes are +0: they change -0 alone, and once
#pragma unroll
        for (int k = 0; k < kLeft; ++k) lane[k] += 0.0f;
      // The thread's groups, the furthest apart first: those that other threads have, then its own.
#pragma unroll
      for (int i = 0; i < kHalvings; ++i)
#pragma unroll
        for (int k = 0; k < kLeft; ++k) lane[k] += __shfl_xor_sync(0xFFFFFFFFu, lane[k], 4 >> i);
#pragma unroll
      for (int apart = kLeft / 2; apart > 0; apart /= 2)
#pragma unroll
        for (int k = 0; k < apart; ++k) lane[k] += lane[k + apart];
      if constexpr (T == kLogicalWarp) {
        return over<16, 8>(lane[0]);
      } else {
        const int number = int(threadIdx.x) % kLogicalWarp;
        if (number % 8 == 0) exchange[threadIdx.x / 8] = lane[0];
        __syncthreads();
        constexpr int kGroups = T / 8, kApart = kGroups < kLogicalWarp ? kGroups : kLogicalWarp;
        float sum = exchange[number % kGroups];
        if constexpr (kGroups > kLogicalWarp) sum += exchange[number + kLogicalWarp];
        return over<kApart / 2, 1>(sum);
      }
    }
  }

 private:
  template <int first, int last> __device__ __forceinline__ static float over(float sum) {
#pragma unroll
    for (int apart = first; apart >= last; apart /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, apart);
    return sum;
  }
};

}  // namespace
}  // namespace pydet
