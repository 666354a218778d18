// The softmax of attention over one block of keys, in the fragments that wgmma leaves (NUMERICS.md, "Attention").
#pragma once

#include "contract/ex2.h"
#include "gpu/device.h"

namespace pydet {
namespace {

// Of a thread's two rows: the largest score so far times c, and the sums of the weights of its keys, which are 2 of
// every 8: key j belongs to sum j mod 8.
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

// Moves the references of a thread's rows on to what the scores of a block ask for. Returns whether one has moved;
// `worth` is what the sums so far, and O, then are, and `taken` what is taken off the block's scores.
struct Step {
  float worth[2], taken[2];
};
template <int registers>
__device__ __forceinline__ bool move_references(const float (&s)[registers], float (&reference)[2], float c,
                                                Step &step) {
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
    step.worth[h] = n == -INFINITY ? 1.0f : ex2_f32(reference[h] - n);
    step.taken[h] = n == -INFINITY ? 0.0f : n;  // nothing seen yet: all weights are 0
    reference[h] = n;
  }
  return moved;
}

// Scores become weights: those from `first` to `last`, in eighths of all.
template <int first, int last, int registers>
__device__ __forceinline__ void weigh_scores(float (&s)[registers], float c, const Step &step) {
#pragma unroll
  for (int i = registers / 8 * first; i < registers / 8 * last; ++i) {
    s[i] = ex2_f32(fmaf(s[i], c, -step.taken[i / 2 % 2]));
  }
}

// They join the sums of their rows.
template <int first, int last, int registers>
__device__ __forceinline__ void sum_weights(const float (&s)[registers], float (&l)[2][2]) {
#pragma unroll
  for (int i = registers / 8 * first; i < registers / 8 * last; ++i) l[i / 2 % 2][i % 2] = l[i / 2 % 2][i % 2] + s[i];
}
// And are rounded to what the tensor cores take.
template <Type type, int registers>
__device__ __forceinline__ void round_weights(const float (&s)[registers], uint32_t (&rounded)[registers / 8][4]) {
#pragma unroll
  for (int i = 0; i < registers; i += 2) rounded[i / 8][i / 2 % 4] = rounded_pair<type>(s[i], s[i + 1]);
}
template <Type type, int registers>
__device__ __forceinline__ void add_weights(const float (&s)[registers], float (&l)[2][2],
                                            uint32_t (&rounded)[registers / 8][4]) {
#pragma unroll
  for (int i = 0; i < registers; i += 2) {
    l[i / 2 % 2][0] = l[i / 2 % 2][0] + s[i];
    l[i / 2 % 2][1] = l[i / 2 % 2][1] + s[i + 1];
    rounded[i / 8][i / 2 % 4] = rounded_pair<type>(s[i], s[i + 1]);
  }
}
__device__ __forceinline__ void scale_sums(float (&l)[2][2], const Step &step) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int e = 0; e < 2; ++e) l[h][e] = l[h][e] * step.worth[h];
}

// Of a thread's two rows, over the segments so far.
struct Totals {
  float m[2], l[2];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) m[h] = -INFINITY, l[h] = 0;
  }
};

// What a segment and those before it are worth beside each other: `now` and `past`; the totals become those of both.
// One without any key is left out.
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
