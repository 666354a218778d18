// Threads for the CPU kernels. However work is cut into tasks, one task owns the whole chain of an element, so the number of
// threads never shows in bits.
#pragma once

#include <cstdint>
#include <omp.h>

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

// Calls task(i) once for each i < count, on OpenMP's threads, or on this one where `work` (in operations or bytes, a
// rough count) would not pay for waking them.
template <class Task> void parallel(int64_t count, int64_t work, const Task &task) {
  constexpr int64_t kWorthThreads = 1 << 17;
  if (count <= 1 || work < kWorthThreads || omp_get_max_threads() == 1) {
    FloatEnvironment environment;
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
#pragma omp parallel
  {
    FloatEnvironment environment;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; ++i) task(i);
  }
}

}  // namespace
}  // namespace pydet
