// Passes over a long row by a block, and the largest of a team's values. Shared by softmax.cu and sample.cu.
#pragma once

#include "gpu/any/softmax_row.h"

namespace pydet {
namespace {

// The largest of the team's values. All threads of the block call it.
template <int T> __device__ __forceinline__ float team_max(float largest, float *exchange) {
#pragma unroll
  for (int apart = (T < kLogicalWarp ? T : kLogicalWarp) / 2; apart > 0; apart /= 2)
    largest = larger(largest, gpu_shfl_xor(largest, apart, kLogicalWarp));
  if constexpr (T > kLogicalWarp) {
    if (threadIdx.x % kLogicalWarp == 0) exchange[threadIdx.x / kLogicalWarp] = largest;
    __syncthreads();
    const float *of_team = exchange + threadIdx.x / T * (T / kLogicalWarp);
#pragma unroll
    for (int i = 0; i < T / kLogicalWarp; ++i) largest = larger(largest, of_team[i]);
  }
  return largest + 0.0f;  // which zero is the largest would depend on the order
}

// A vector of a row that is not held: whole where rows are aligned, else element by element.
template <Type type, bool aligned>
__device__ __forceinline__ void load_vector(const char *row, int64_t j, int64_t n, float (&x)[kVector]) {
  if constexpr (aligned) unpack(load_packed<type, kVector>(row + j * size_of(type)), x);
  else load_elements<type>(row, j, n, x);
}
template <Type type, bool aligned>
__device__ __forceinline__ void store_vector(char *row, int64_t j, int64_t n, const float (&x)[kVector]) {
  if constexpr (aligned) store_packed<type>(row + j * size_of(type), x);
  else store_elements<type>(row, j, n, x);
}

// Passes over those columns of a row that the block has, a vector of every thread at a time: f(j, x). Of its `places`, in
// pieces of at least a vector, column(place) says where they are. Where rows are aligned, the loads of some set out
// together.
template <Type type, bool aligned, class Column, class F>
__device__ __forceinline__ void pass_over(const char *row, int64_t n, int64_t places, const Column &column,
                                          const F &f) {
  constexpr int kAtOnce = !aligned || type == Type::f32 || kGpuDeviceType != PYDET_CUDA ? 1 : 4;
  for (int64_t first = kVector * threadIdx.x; first < places; first += kAtOnce * kRowLanes) {
    float x[kVector];
    if constexpr (kAtOnce == 1) {
      const int64_t j = column(first);
      if (j >= n) continue;
      load_vector<type, aligned>(row, j, n, x);
      f(j, x);
    } else {
      Packed<type, kVector> packed[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t j = column(first + i * kRowLanes);
        if (first + i * kRowLanes < places && j < n) packed[i] = load_packed<type, kVector>(row + j * size_of(type));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t j = column(first + i * kRowLanes);
        if (first + i * kRowLanes >= places || j >= n) continue;
        unpack(packed[i], x);
        f(j, x);
      }
    }
  }
}
// The same of a block that has them all.
template <Type type, bool aligned, class F>
__device__ __forceinline__ void pass_over(const char *row, int64_t n, const F &f) {
  pass_over<type, aligned>(row, n, n, [](int64_t place) { return place; }, f);
}

}  // namespace
}  // namespace pydet
