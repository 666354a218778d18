// What the kernels for AMD's matrix cores do at the edges of a matrix, and with the compiler.
#pragma once

#include "gpu/any/epilogue.h"

namespace pydet {
namespace {

constexpr int kUnit = 4;  // k in the 8 bytes that a lane holds

// The compiler moves no instruction across: it would gather the loads of an unrolled loop at its start, and wait for all.
[[maybe_unused]] __device__ __forceinline__ void keep_order() {
#if defined(__HIP_DEVICE_COMPILE__)
  __builtin_amdgcn_sched_barrier(0);
#endif
}

// All loads are done: else the compiler, which does not know which of them a loop's first turn meets, waits for all in
// every turn.
[[maybe_unused]] __device__ __forceinline__ void wait_for_loads() {
#if defined(__HIP_DEVICE_COMPILE__)
  __builtin_amdgcn_s_waitcnt(0);
#endif
}

// The compiler loads this scalar here, not where it is used.
[[maybe_unused]] __device__ __forceinline__ void loaded_by_now([[maybe_unused]] int scalar) {
#if defined(__HIP_DEVICE_COMPILE__)
  asm volatile("" ::"s"(scalar));
#endif
}

// This scalar, from which the compiler works nothing out before, to keep it in registers.
[[maybe_unused]] __device__ __forceinline__ int decided_late(int scalar) {
#if defined(__HIP_DEVICE_COMPILE__)
  asm volatile("" : "+s"(scalar));
#endif
  return scalar;
}

// `count` elements from `from`, of which `valid` are there; the rest is 0.
template <int count>
__device__ __forceinline__ void read(uint32_t *words, const uint16_t *from, int valid, bool aligned) {
  if (aligned && valid == count) {
    using Vector = std::conditional_t<count == 8, uint4, uint2>;
    Vector all = *reinterpret_cast<const Vector *>(from);
    memcpy(words, &all, sizeof all);
    return;
  }
#pragma unroll
  for (int i = 0; i < count; i += 2) {
    uint32_t low = i < valid ? from[i] : 0, high = i + 1 < valid ? from[i + 1] : 0;
    words[i / 2] = low | high << 16;
  }
}

// The first `count` of four neighbours in a row of out, at once where they lie so.
[[maybe_unused]] __device__ __forceinline__ void store_four(void *data, Type out_type, int64_t index,
                                                            const float (&x)[4], int count) {
  with_type<kUnscaledTypes>(out_type, [&](auto type) {
    char *const to = static_cast<char *>(data) + index * size_of(type);
    if (count == 4 && reinterpret_cast<uintptr_t>(to) % unsigned(4 * size_of(type)) == 0) {
      if constexpr (type == Type::f32)
        *reinterpret_cast<float4 *>(to) =
            make_float4(canonical(x[0]), canonical(x[1]), canonical(x[2]), canonical(x[3]));
      else *reinterpret_cast<uint2 *>(to) = make_uint2(rounded_pair<type>(x[0], x[1]), rounded_pair<type>(x[2], x[3]));
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (e < count) store_rounded(data, type, index + e, x[e]);
  });
}

[[maybe_unused]] __device__ __forceinline__ int clamped(int64_t left, int most) {
  return left <= 0 ? 0 : left < most ? int(left) : most;
}

}  // namespace
}  // namespace pydet
