// What kernels of every maker do in instructions of their own: lanes, copies into shared memory, matrix cores, caches.
#pragma once

#include "gpu/gpu.h"

#if defined(__CUDACC__) || defined(__HIPCC__)  // headers of either half reach the host's compiler

namespace pydet {

#if !defined(__HIP_PLATFORM_AMD__)
// As PTX takes it.
__device__ __forceinline__ uint32_t shared_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }
#endif

// Of a grid that grid_of made.
__device__ __forceinline__ int64_t block_number() {
#if defined(__HIP_PLATFORM_AMD__)
  return int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
#else
  return blockIdx.x;
#endif
}

// A value that all lanes of a warp (wave) share, which the compiler then knows.
__device__ __forceinline__ int same_in_warp(int value) {
#if defined(__HIP_PLATFORM_AMD__)
  return __builtin_amdgcn_readfirstlane(value);
#else
  return __shfl_sync(0xFFFFFFFFu, value, 0);
#endif
}

// The value of lane `lane ^ mask` among each `width` neighbouring lanes, all of which call it. width <= 32.
__device__ __forceinline__ float gpu_shfl_xor(float value, int mask, int width) {
#if defined(__HIP_PLATFORM_AMD__)
  return __shfl_xor(value, mask, width);
#else
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask, width);
#endif
}

// The value of lane `lane` of each `width` neighbouring lanes, all of which call it. width <= 32.
__device__ __forceinline__ float gpu_shfl(float value, int lane, int width) {
#if defined(__HIP_PLATFORM_AMD__)
  return __shfl(value, lane, width);
#else
  return __shfl_sync(0xFFFFFFFFu, value, lane, width);
#endif
}

// Of which lanes it holds, of 32 neighbouring ones: those of them that call it.
__device__ __forceinline__ uint32_t gpu_ballot(bool holds) {
#if defined(__HIP_PLATFORM_AMD__)
  return uint32_t(__ballot(holds) >> (threadIdx.x % warpSize / 32 * 32));
#else
  return __ballot_sync(0xFFFFFFFFu, holds);
#endif
}

// The larger of two numbers. A NaN is, but on AMD's, where it has no say.
__device__ __forceinline__ float larger(float a, float b) {
#if defined(__HIP_PLATFORM_AMD__)
  return fmaxf(a, b);
#else
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
#endif
}
#if !defined(__HIP_PLATFORM_AMD__)
// The same of two elements of 16 bits each, as they lie in memory.
template <Type type> __device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b) {
  uint32_t most;
  if constexpr (is_bf16<type>()) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}
#endif

// c[i] = fmaf(a, b[i], c[i]) of two neighbours, which AMD does by one instruction.
__device__ __forceinline__ void fma_pair(float a, const float *b, float *c) {
#if defined(__HIP_PLATFORM_AMD__)
  using Pair = float __attribute__((ext_vector_type(2)));
  Pair sum = __builtin_elementwise_fma(Pair{a, a}, Pair{b[0], b[1]}, Pair{c[0], c[1]});
  asm volatile("" : "+v"(sum));  // else the compiler may move all of a loop's behind what follows in it
  c[0] = sum[0], c[1] = sum[1];
#else
  c[0] = fmaf(a, b[0], c[0]), c[1] = fmaf(a, b[1], c[1]);
#endif
}

// Two elements of 16 bits as they lie in memory, rounded by one instruction where there is one.
template <Type type> __device__ __forceinline__ uint32_t rounded_pair(float first, float second) {
#if defined(__HIP_PLATFORM_AMD__)
  return is_bf16<type>() ? bf16_from_f32(first) | uint32_t(bf16_from_f32(second)) << 16
                         : f16_from_f32(first) | uint32_t(f16_from_f32(second)) << 16;
#else
  uint32_t pair;
  if constexpr (is_bf16<type>()) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#endif
}

#if defined(__HIP_PLATFORM_AMD__)

// ---- AMD's matrix cores: a wave of 64 multiplies rows x k by k x rows ----

// A lane holds four consecutive k, as they lie in memory, of row lane % rows of a, or column lane % rows of b, from
// k = 4 (lane / rows) on. Element i of its accumulators is column lane % rows of row mfma_row(lane, i).
constexpr int kWave = 64;
#if defined(__gfx90a__) || defined(__gfx942__)
constexpr bool kHasMfma = true;
#else
constexpr bool kHasMfma = false;  // kernels for them are then empty, and never launched
#endif

template <int rows> struct Mfma {
  static_assert(rows == 16 || rows == 32);
  static constexpr int kStep = 256 / rows;  // k of one instruction: 16 or 8
  static constexpr int kCount = rows * rows / kWave;
  using Accumulators = float __attribute__((ext_vector_type(kCount)));
};

template <int rows> __device__ __forceinline__ int mfma_row(int lane, int i) {
  return i % 4 + i / 4 * Mfma<rows>::kStep + lane / rows * 4;
}

template <int rows, Type type>
__device__ __forceinline__ void mfma([[maybe_unused]] typename Mfma<rows>::Accumulators &c, [[maybe_unused]] uint2 a,
                                     [[maybe_unused]] uint2 b) {
#if defined(__gfx90a__) || defined(__gfx942__)
  using Bits = std::conditional_t<is_bf16<type>(), short, _Float16> __attribute__((ext_vector_type(4)));
  Bits a_bits, b_bits;
  memcpy(&a_bits, &a, sizeof a_bits);
  memcpy(&b_bits, &b, sizeof b_bits);
  if constexpr (rows == 16 && is_bf16<type>())
    c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a_bits, b_bits, c, 0, 0, 0);
  else if constexpr (rows == 16) c = __builtin_amdgcn_mfma_f32_16x16x16f16(a_bits, b_bits, c, 0, 0, 0);
  else if constexpr (is_bf16<type>()) c = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a_bits, b_bits, c, 0, 0, 0);
  else c = __builtin_amdgcn_mfma_f32_32x32x8f16(a_bits, b_bits, c, 0, 0, 0);
#endif
}

#endif

// Copies 16 bytes into shared memory without a register: the first `valid` are read, the rest become zero. A thread
// waits for its own copies with wait_copies<n>, which leaves its n latest commits in flight; others need a barrier too.
__device__ __forceinline__ void copy_async_16(void *shared, const void *global, int valid) {
#if defined(__HIP_PLATFORM_AMD__)
  if (valid == 16) {
    *static_cast<uint4 *>(shared) = *static_cast<const uint4 *>(global);
  } else {
    for (int i = 0; i < 16; ++i) static_cast<char *>(shared)[i] = i < valid ? static_cast<const char *>(global)[i] : 0;
  }
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid)
               : "memory");
#endif
}

// The compiler forgets what it knows of the value.
#if !defined(__HIP_PLATFORM_AMD__)
__device__ __forceinline__ void make_opaque(int &value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void make_opaque(uint32_t &value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void make_opaque(int64_t &value) { asm volatile("" : "+l"(value)); }
#else
__device__ __forceinline__ void make_opaque(int &value) { asm volatile("" : "+v"(value)); }
// And again in each turn of a loop, so that what follows from it is not computed before and kept in registers.
__device__ __forceinline__ void make_opaque(int &value, int64_t turn) { asm("" : "+v"(value) : "s"(int(turn))); }
#endif
// For code that is unrolled widely: AMD's compiler keeps what it computed for all elements, without registers for it.
__device__ __forceinline__ void recompute_on_amd([[maybe_unused]] int &value) {
#if defined(__HIP_PLATFORM_AMD__)
  make_opaque(value);
#endif
}
// AMD's compiler, which does not know which loads a loop's first turn meets, would wait for all in every turn.
__device__ __forceinline__ void wait_for_loads_on_amd() {
#if defined(__HIP_DEVICE_COMPILE__)
  __builtin_amdgcn_s_waitcnt(0);
#endif
}
__device__ __forceinline__ void make_opaque(const float *&pointer) {
#if defined(__HIP_PLATFORM_AMD__)
  asm volatile("" : "+v"(pointer));
#else
  asm volatile("" : "+l"(pointer));
#endif
}

// The same of one fp32 element, all of it.
__device__ __forceinline__ void copy_async_4(float *shared, const float *global) {
#if defined(__HIP_PLATFORM_AMD__)
  *shared = *global;
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
#endif
}

// The same for a piece of 8 or 4 bytes, as copy_async_16: the first `valid` are read, the rest become zero.
template <int bytes> __device__ __forceinline__ void copy_async_part(void *shared, const void *global, int valid) {
  static_assert(bytes == 8 || bytes == 4);
#if defined(__HIP_PLATFORM_AMD__)
  for (int i = 0; i < bytes; ++i) static_cast<char *>(shared)[i] = i < valid ? static_cast<const char *>(global)[i] : 0;
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global), "n"(bytes),
               "r"(valid)
               : "memory");
#endif
}

// The same for a piece of 16 or 8 bytes that is read whole or not at all.
template <int bytes> __device__ __forceinline__ void copy_async_piece(void *shared, const void *global, bool there) {
  static_assert(bytes == 16 || bytes == 8);
#if defined(__HIP_PLATFORM_AMD__)
  using Piece = std::conditional_t<bytes == 16, uint4, uint2>;
  *static_cast<Piece *>(shared) = there ? *static_cast<const Piece *>(global) : Piece{};
#else
  if constexpr (bytes == 16) {
    copy_async_16(shared, global, there ? 16 : 0);
  } else {
    copy_async_part<8>(shared, global, there ? 8 : 0);
  }
#endif
}

__device__ __forceinline__ void commit_copies() {
#if !defined(__HIP_PLATFORM_AMD__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int in_flight> __device__ __forceinline__ void wait_copies() {
#if !defined(__HIP_PLATFORM_AMD__)
  asm volatile("cp.async.wait_group %0;" ::"n"(in_flight) : "memory");
#endif
}

// Stores four floats, 16-byte aligned, that the next kernel will read: the L2 is asked to keep them until then.
__device__ __forceinline__ void store_kept(float *to, float4 x) {
#if defined(__HIP_PLATFORM_AMD__)
  *reinterpret_cast<float4 *>(to) = x;
#else
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, policy;\n}" ::"l"(to),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
      : "memory");
#endif
}

// The same of two, 8-byte aligned.
__device__ __forceinline__ void store_kept(float *to, float2 x) {
#if defined(__HIP_PLATFORM_AMD__)
  *reinterpret_cast<float2 *>(to) = x;
#else
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "st.global.L2::cache_hint.v2.f32 [%0], {%1, %2}, policy;\n}" ::"l"(to),
      "f"(x.x), "f"(x.y)
      : "memory");
#endif
}

// From here on a kernel launched with overlaps_previous may take the places that this one's blocks leave.
__device__ __forceinline__ void let_next_kernel_start() {
#if !defined(__HIP_PLATFORM_AMD__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In a kernel launched with overlaps_previous: returns when the kernel ahead has ended and its writes are seen.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if !defined(__HIP_PLATFORM_AMD__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace pydet

#endif
