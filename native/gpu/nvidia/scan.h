// What recurrences over tokens and their gradients have in common on NVIDIA GPUs: elements of any type, the places of a
// team's states, the launch of blocks of columns.
#pragma once

#include "gpu/device.h"
#include "ops/scan/problem.h"

namespace pydet {
namespace {

constexpr int kColumns = 32, kThreads = kColumns * kScanLanes;
static_assert(kScanLanes == 8 && kScanLaneElements == 4, "a lane's elements are a vector");

__device__ __forceinline__ float element(const Strided &from, int64_t offset) {
  const char *at = from.at(offset);
  if (from.type == Type::f32) return *reinterpret_cast<const float *>(at);
  const uint16_t bits = *reinterpret_cast<const uint16_t *>(at);
  return from.type == Type::bf16 ? f32_from_bf16(bits) : f32_from_f16(bits);
}
__device__ __forceinline__ void put(const Strided &to, int64_t offset, float x) {
  char *at = to.at(offset);
  if (to.type == Type::f32) *reinterpret_cast<float *>(at) = canonical(x);
  else *reinterpret_cast<uint16_t *>(at) = to.type == Type::bf16 ? bf16_from_f32(x) : f16_from_f32(x);
}

__device__ __forceinline__ float join_lanes(float sum) {
#pragma unroll
  for (int h = kScanLanes / 2; h; h /= 2) sum = sum + gpu_shfl_xor(sum, h, kScanLanes);
  return sum;
}

// How many elements are from this lane's first one on: element i of round r is there if r * kScanRound + i is below.
__device__ __forceinline__ int left_of(int64_t states) {
  return int(states) - int(threadIdx.x) % kScanLanes * kScanLaneElements;
}
// Element i of round r of this thread's lane.
__device__ __forceinline__ int state_of(int r, int i) {
  return r * kScanRound + int(threadIdx.x) % kScanLanes * kScanLaneElements + i;
}
__device__ __forceinline__ float4 vector_of(const float *row, int r) {
  return *reinterpret_cast<const float4 *>(row + state_of(r, 0));
}
__device__ __forceinline__ float part(const float4 &v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

constexpr int64_t kMostBlocks = int64_t(1) << 24;  // more are walked in turns

// Its device must be current (DeviceGuard).
template <class Problem>
pydet_status launch_blocks(const char *name, const Problem &p, int64_t blocks, int threads,
                           void (*kernel)(Problem, int64_t)) {
  if (blocks == 0) return PYDET_OK;
  if (blocks > INT32_MAX)
    return fail(PYDET_UNSUPPORTED, "%s: %lld blocks of columns and tokens, want at most 2147483647", name,
                static_cast<long long>(blocks));
  const Launch where = {name, static_cast<gpu_stream>(p.stream),
                        dim3(unsigned(blocks < kMostBlocks ? blocks : kMostBlocks)), dim3(unsigned(threads))};
  return launch(where, kernel, p, blocks);
}

// f with the rounds that so many states fill as a compile-time constant: 1, 2, 4 and so on.
template <int rounds = 1, int64_t most = kMostStates, class F> pydet_status with_rounds(int64_t states, const F &f) {
  if constexpr (rounds * kScanRound >= most) {
    return f(std::integral_constant<int, rounds>());
  } else {
    if (states <= rounds * kScanRound) return f(std::integral_constant<int, rounds>());
    return with_rounds<2 * rounds, most>(states, f);
  }
}

}  // namespace
}  // namespace pydet
