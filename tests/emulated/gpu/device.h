// native/gpu/device.h on a CPU. What only tells the compiler or the cache something does nothing here.
#pragma once

#include "gpu/gpu.h"

namespace pydet {

inline int64_t block_number() { return blockIdx.x; }
inline int same_in_warp(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }
inline float gpu_shfl_xor(float value, int mask, int width) { return __shfl_xor_sync(0xFFFFFFFFu, value, mask, width); }
inline float gpu_shfl(float value, int lane, int width) { return __shfl_sync(0xFFFFFFFFu, value, lane, width); }
inline uint32_t gpu_ballot(bool holds) { return __ballot_sync(0xFFFFFFFFu, holds); }
inline void fma_pair(float a, const float *b, float *c) { c[0] = fmaf(a, b[0], c[0]), c[1] = fmaf(a, b[1], c[1]); }
template <Type type> uint32_t rounded_pair(float first, float second) {
  return is_bf16<type>() ? bf16_from_f32(first) | uint32_t(bf16_from_f32(second)) << 16
                         : f16_from_f32(first) | uint32_t(f16_from_f32(second)) << 16;
}
inline float larger(float a, float b) { return a != a || b != b ? float_of(kNanF32) : fmaxf(a, b); }
template <Type type> uint32_t larger_pair(uint32_t a, uint32_t b) {
  auto of = [](uint32_t half) {
    return is_bf16<type>() ? f32_from_bf16(uint16_t(half)) : f32_from_f16(uint16_t(half));
  };
  return rounded_pair<type>(larger(of(a), of(b)), larger(of(a >> 16), of(b >> 16)));
}

// ---- Copies into shared memory -----------------------------------------------------------------------------------

inline void copy_async(void *shared, const void *global, int valid, int bytes) {
  emulated::Copies &copies = emulated::copies();
  copies.pending.push_back({shared, global, valid, bytes, copies.groups});
}
inline void copy_async_16(void *shared, const void *global, int valid) { copy_async(shared, global, valid, 16); }
inline void copy_async_4(float *shared, const float *global) { copy_async(shared, global, 4, 4); }
template <int bytes> void copy_async_part(void *shared, const void *global, int valid) {
  copy_async(shared, global, valid, bytes);
}
template <int bytes> void copy_async_piece(void *shared, const void *global, bool there) {
  copy_async(shared, global, there ? bytes : 0, bytes);
}
inline void commit_copies() { ++emulated::copies().groups; }
template <int in_flight> void wait_copies() { emulated::wait_copies(in_flight); }

// ---- For the compiler and the cache ------------------------------------------------------------------------------

template <class T> void make_opaque(T &) {}
inline void recompute_on_amd(int &) {}
inline void wait_for_loads_on_amd() {}
inline void store_kept(float *to, float4 x) { *reinterpret_cast<float4 *>(to) = x; }
inline void store_kept(float *to, float2 x) { *reinterpret_cast<float2 *>(to) = x; }
inline void let_next_kernel_start() {}
inline void wait_for_previous_kernel() {}

}  // namespace pydet
