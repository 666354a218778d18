// How the CPU kernels get scratch memory and threads. However work is cut into tasks, one task owns the whole chain of
// an element, so the number of threads never shows in bits.
#pragma once

#include "cpu/pool.h"
#include "cpu/scratch.h"

namespace pydet {
namespace {

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

// How many threads are worth waking for so much work, where each needs `worth` of it.
inline int64_t threads_for(double work, double worth) {
  if (work < 2 * worth) return 1;
  const double threads = work / worth, most = thread_count();
  return int64_t(threads < most ? threads : most);
}

// Calls task(i, scratch) once for each i < count, on up to so many threads.
template <class Task> void parallel(int64_t count, int64_t threads, Scratch &scratch, const Task &task) {
  auto call = [](const void *context, int64_t i, Scratch &own) { (*static_cast<const Task *>(context))(i, own); };
  share(count, scratch.large() ? threads : 1, scratch, call, &task);
}

}  // namespace
}  // namespace pydet
