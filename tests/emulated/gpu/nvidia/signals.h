// native/gpu/nvidia/signals.h on a CPU: the ranks are threads of the system, which a rank that waits lets run.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdlib>

#include "gpu/device.h"

namespace pydet {
namespace {

inline void put_signal(uint64_t *to, uint64_t value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
inline uint64_t get_signal(const uint64_t *from) {
  sched_yield();
  emulated::let_others();
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
inline uint64_t take_word(uint64_t *word, uint64_t bits) { return __atomic_fetch_or(word, bits, __ATOMIC_ACQUIRE); }
inline uint64_t see_word(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline void give_word(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
inline void count_up(uint32_t *count) { ++*count; }
inline uint32_t see_count(const uint32_t *count) { return *count; }
template <class Done> void wait_for_warps(const Done &done) { emulated::wait_until(done); }
inline uint64_t nanoseconds() {
  return uint64_t(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}
inline void lose_device() { abort(); }

}  // namespace
}  // namespace pydet
