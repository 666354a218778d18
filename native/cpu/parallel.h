// Threads for the CPU kernels. However work is cut into tasks, one task owns the whole chain of an element, so the number of
// threads never shows in bits.
#pragma once

#include <atomic>
#include <cstdint>
#include <omp.h>

#include "cpu/scratch.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace pydet {
namespace {

// Round to nearest even, subnormals kept, exceptions masked, while in scope, on this thread; then the caller's settings.
// Frameworks do set flush-to-zero on their threads.
class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }
#else
  FloatEnvironment() {
    fegetenv(&saved_);
    fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { fesetenv(&saved_); }
#endif
  FloatEnvironment(const FloatEnvironment &) = delete;
  FloatEnvironment &operator=(const FloatEnvironment &) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#else
  fenv_t saved_;
#endif
};

template <class F> __attribute__((noinline)) void with_small_scratch(const F &f) {
  alignas(64) char memory[Scratch::kSmall];
  Scratch scratch(memory);
  f(scratch);
}

// Calls f with this thread's scratch memory. f is compiled once if it is noinline.
template <class F> void with_scratch(const F &f) {
  Scratch scratch;
  if (scratch.large()) f(scratch);
  else with_small_scratch(f);
}

// Calls task(i, scratch) once for each i < count, on OpenMP's threads, or on this one where `work` (in operations or
// bytes, a rough count) would not pay for waking them. Where the caller's scratch memory is large, every thread's is.
template <class Task> void parallel(int64_t count, int64_t work, Scratch &callers, const Task &task) {
  constexpr int64_t kWorthThreads = 1 << 17;
  if (count <= 1 || work < kWorthThreads || omp_get_max_threads() == 1) {
    FloatEnvironment environment;
    for (int64_t i = 0; i < count; ++i) task(i, callers);
    return;
  }
  std::atomic<int64_t> next{0};
  auto claim_all = [&](Scratch &scratch) {
    FloatEnvironment environment;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i, scratch);
  };
#pragma omp parallel
  if (omp_get_thread_num() == 0) {
    claim_all(callers);
  } else {
    Scratch scratch;
    if (scratch.large() || !callers.large()) claim_all(scratch);
  }
}

}  // namespace
}  // namespace pydet
