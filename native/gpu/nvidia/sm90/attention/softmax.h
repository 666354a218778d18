// The softmax of attention over one block of keys, in the fragments that wgmma leaves (NUMERICS.md, "Attention").
#pragma once

#include "contract/ex2.h"
#include "gpu/device.h"

namespace pydet {
namespace {

// Of a thread's two rows: the largest score so far times c, and the sums of the weights of its keys, which are 2 of every
// 8: key j belongs to sum j mod 8.
struct RowSums {
  float m[2], l[2][2];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) m[h] = -INFINITY, l[h][0] = l[h][1] = 0;
  }
};

// The largest of what four lanes that share a row have.
__device__ __forceinline__ float largest_of_row(float x) {
  x = larger(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return larger(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}
// ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7))
__device__ __forceinline__ float sum_of_row(const float (&l)[2]) {
  float x = l[0] + l[1];
  x = x + __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

// Scores become weights. Returns whether the largest score of a row has grown; a[h] is what the sums before it, and O, are
// then worth.
template <int registers>
__device__ __forceinline__ bool softmax_block(float (&s)[registers], float (&reference)[2], float c, float (&a)[2]) {
  static_assert(registers % 8 == 0, "two chains of pairs a row");
  float most[2][2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int k = 0; k < 2; ++k) most[h][k] = larger(s[4 * k + 2 * h], s[4 * k + 2 * h + 1]);
#pragma unroll
  for (int i = 2; i < registers / 4; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) most[h][i % 2] = larger(most[h][i % 2], larger(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
  float m[2];
  bool moved = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) m[h] = largest_of_row(larger(most[h][0], most[h][1]));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float n = larger(reference[h], m[h] * c);
    moved |= n != reference[h];
    a[h] = n == -INFINITY ? 1.0f : ex2_f32(reference[h] - n);
    reference[h] = n;
    m[h] = n == -INFINITY ? 0.0f : n;  // nothing seen yet: all weights are 0
  }
#pragma unroll
  for (int i = 0; i < registers / 4; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float &x = s[4 * i + 2 * h + e];
        x = ex2_f32(fmaf(x, c, -m[h]));
      }
  return moved;
}

// The weights of a block join the sums, which are then worth a[h] of what they were.
template <int registers>
__device__ __forceinline__ void add_weights(const float (&s)[registers], float (&l)[2][2], const float (&a)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int e = 0; e < 2; ++e) l[h][e] = l[h][e] * a[h];
#pragma unroll
  for (int i = 0; i < registers / 4; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) l[h][e] = l[h][e] + s[4 * i + 2 * h + e];
}

// Of a thread's two rows, over the segments so far.
struct Totals {
  float m[2], l[2];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) m[h] = -INFINITY, l[h] = 0;
  }
};

// What a segment and those before it are worth beside each other: `now` and `past`; the totals become those of both. One
// without any key is left out.
__device__ __forceinline__ void weigh(Totals &totals, const RowSums &sums, float (&past)[2], float (&now)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float l = sum_of_row(sums.l[h]), n = larger(totals.m[h], sums.m[h]);
    past[h] = n == -INFINITY ? 1.0f : ex2_f32(totals.m[h] - n);
    now[h] = n == -INFINITY ? 1.0f : ex2_f32(sums.m[h] - n);
    totals.l[h] = totals.l[h] * past[h] + l * now[h];
    totals.m[h] = n;
  }
}

}  // namespace
}  // namespace pydet
