// Words that devices write to each other, and words that the launches of one device share: each holds what its writer did
// before, for the reader who sees it.
#pragma once

#include "gpu/gpu.h"

namespace pydet {
namespace {

// Between devices, the host among them.
__device__ __forceinline__ void put_signal(uint64_t *to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t get_signal(const uint64_t *from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// Between launches of this device: sets bits and gives what was there before; looks alone; ends what taking began.
__device__ __forceinline__ uint64_t take_word(uint64_t *word, uint64_t bits) {
  uint64_t before;
  asm volatile("atom.acquire.gpu.global.or.b64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(bits) : "memory");
  return before;
}
__device__ __forceinline__ uint64_t see_word(const uint64_t *word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void give_word(uint64_t *word, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Between warps of a block: what its lanes did before they met is there for whoever sees the count.
__device__ __forceinline__ void count_up(uint32_t *count) {
  __threadfence_block();
  atomicAdd(count, 1u);
}
__device__ __forceinline__ uint32_t see_count(const uint32_t *count) {
  const uint32_t value = *const_cast<const volatile uint32_t *>(count);
  __threadfence_block();
  return value;
}
// Returns once it holds, which other warps see to.
template <class Done> __device__ __forceinline__ void wait_for_warps(const Done &done) {
  while (!done()) {}
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time)::"memory");
  return time;
}
// The context of this process is lost.
__device__ __forceinline__ void lose_device() { __trap(); }

}  // namespace
}  // namespace pydet
