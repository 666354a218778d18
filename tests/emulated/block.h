// CUDA's words on a CPU: a file of kernels is compiled as C++ behind this header, its threads are fibers (block.cpp).
// The headers beside it stand in for those of native/gpu/ that speak in instructions of the GPU.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __CUDACC__ 1
#undef __shared__
#define __shared__ thread_local  // blocks of a cluster are threads of the system
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __forceinline__
#define __forceinline__ inline
#undef __noinline__
#define __noinline__
#define launch launch_emulated  // its instances are not nvcc's, with which the linker would merge them
#define cudaLaunchKernelExC(config, function, pointers) emulated::launch(*config, [&] { kernel(arguments...); })

extern thread_local uint3 threadIdx, blockIdx;
extern thread_local dim3 blockDim, gridDim;

namespace emulated {

constexpr int kWarp = 32;

// A copy that its thread has started: it is made when the thread waits for it, and not before.
struct Copy {
  void *to;
  const void *from;
  int valid, bytes, group;
};
struct Copies {
  std::vector<Copy> pending;
  int groups = 0;
};
Copies &copies();
void wait_copies(int in_flight);

// Returns once all threads of the warp, or of the block, have called it; those that have ended are not waited for.
// Of a warp: the values that its lanes gave. Lane `from` must be among them.
const uint32_t *meet_warp(uint32_t mine, int from);
void sync_warp();
void meet_block();
void meet_some(int id, int count);  // `count` of the block's threads, at one of its 16 barriers
bool all_of_block(bool holds);
char *shared_begin();  // of the block's dynamic shared memory
// Returns once it holds, which other threads see to.
void wait_until(const std::function<bool()> &holds);

// The other threads of the block go on meanwhile.
void let_others();

// Of a cluster: its blocks, how often all of this block's threads have arrived, and the place of block `rank` for this.
int cluster_blocks();
void arrive_at_cluster();
void meet_cluster();
void *in_block(int rank, void *mine);

// Runs all blocks. Threads that wait for each other are an error, and so is reading a lane that has ended.
cudaError_t launch(const cudaLaunchConfig_t &config, const std::function<void()> &kernel);

template <class T> T from_lane(T value, int from) {
  uint32_t bits;
  static_assert(sizeof value == sizeof bits);
  memcpy(&bits, &value, sizeof bits);
  memcpy(&value, meet_warp(bits, from) + from, sizeof bits);
  return value;
}

}  // namespace emulated

inline void __syncthreads() { emulated::meet_block(); }
inline int __syncthreads_and(int holds) { return emulated::all_of_block(holds != 0); }
inline int __syncthreads_or(int holds) { return !emulated::all_of_block(holds == 0); }
inline void __syncwarp() { emulated::sync_warp(); }
template <class T> T __shfl_sync(unsigned, T value, int lane, int width = emulated::kWarp) {
  const int me = int(threadIdx.x) % emulated::kWarp;
  return emulated::from_lane(value, me / width * width + lane % width);
}
template <class T> T __shfl_xor_sync(unsigned, T value, int mask, int width = emulated::kWarp) {
  const int me = int(threadIdx.x) % emulated::kWarp, from = me ^ mask;
  return emulated::from_lane(value, from / width == me / width ? from : me);
}
template <class T> T __shfl_up_sync(unsigned, T value, int by) {
  const int me = int(threadIdx.x) % emulated::kWarp;
  return emulated::from_lane(value, me < by ? me : me - by);
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t value) {
  const uint32_t *values = emulated::meet_warp(value, -1);
  for (int lane = 0; lane < emulated::kWarp; ++lane) value |= values[lane];
  return value;
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  const uint32_t *values = emulated::meet_warp(value, -1);
  for (int lane = 0; lane < emulated::kWarp; ++lane) value = values[lane] > value ? values[lane] : value;
  return value;
}
inline int __reduce_min_sync(unsigned, int value) {
  const uint32_t *values = emulated::meet_warp(uint32_t(value), -1);
  for (int lane = 0; lane < emulated::kWarp; ++lane) value = int(values[lane]) < value ? int(values[lane]) : value;
  return value;
}
inline uint32_t __ballot_sync(unsigned, bool holds) {
  const uint32_t *values = emulated::meet_warp(holds, -1);
  uint32_t lanes = 0;
  for (int lane = 0; lane < emulated::kWarp; ++lane) lanes |= (values[lane] & 1) << lane;
  return lanes;
}
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(unsigned(bits)) : 32; }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return uint32_t((uint64_t(high) << 32 | low) >> (shift % 32));
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  const uint32_t high = (a > b ? a : b) & 0xFFFF0000u, low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
  return high | low;
}
inline uint32_t __vminu2(uint32_t a, uint32_t b) {
  const uint32_t high = (a < b ? a : b) & 0xFFFF0000u, low = (a & 0xFFFF) < (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
  return high | low;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
template <class T> T __ldg(const T *from) { return *from; }
template <class T> T atomicAdd(T *to, T value) {
  const T before = *to;
  *to = before + value;
  return before;
}
template <class T> T atomicMax(T *to, T value) {
  const T before = *to;
  *to = before < value ? value : before;
  return before;
}
using std::max, std::min;
