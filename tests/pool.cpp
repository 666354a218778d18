// The pool of threads by itself, for every sanitizer.
//
//   pool stress ROUNDS        callers at once, each task once
//   pool many                 more than 2^32 tasks
//   pool cgroups FILE MOUNT   prints the CPUs that those cgroups grant

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu/pool.h"

using pydet::Scratch;

namespace {

template <class Task> void parallel(int64_t count, int64_t threads, const Task &task) {
  Scratch scratch;
  auto call = [](const void *context, int64_t i, Scratch &own) { (*static_cast<const Task *>(context))(i, own); };
  pydet::share(count, threads, scratch, call, &task);
}

// Tasks write what no lock guards, in `seen` and in their own scratch memory: a race is one that a sanitizer sees.
void stress(int rounds, unsigned seed) {
  std::vector<int> seen(300);
  for (int round = 0; round < rounds; ++round) {
    seed = seed * 1664525 + 1013904223;
    const int64_t count = 1 + (seed >> 8) % 300, threads = 1 + (seed >> 20) % 6;
    parallel(count, threads, [&](int64_t i, Scratch &own) {
      auto *words = static_cast<volatile int64_t *>(own.data);
      words[i % 8] = i;
      for (int turns = int(i % 50); turns > 0; --turns) words[8] = turns;
      if (words[i % 8] == i) ++seen[size_t(i)];
    });
    for (int64_t i = 0; i < 300; ++i)
      if (seen[size_t(i)] != (i < count)) {
        printf("task %d of %d on %d threads ran %d times\n", int(i), int(count), int(threads), seen[size_t(i)]);
        exit(1);
      }
    std::fill(seen.begin(), seen.end(), 0);
  }
}

void many() {
  constexpr int64_t kCount = (int64_t(1) << 32) + 5;
  struct Sum {  // in each thread's scratch memory, which is new and all zeros
    bool listed;
    uint64_t numbers, sum;
  };
  Sum *sums[3];
  int listed = 0;
  parallel(kCount, 3, [&](int64_t i, Scratch &own) {
    auto *mine = static_cast<Sum *>(own.data);
    if (!mine->listed) sums[__atomic_fetch_add(&listed, 1, __ATOMIC_RELAXED)] = mine, mine->listed = true;
    mine->numbers += 1, mine->sum += uint64_t(i);
  });
  uint64_t numbers = 0, sum = 0;
  for (int i = 0; i < listed; ++i) numbers += sums[i]->numbers, sum += sums[i]->sum;
  if (numbers != uint64_t(kCount) || sum != uint64_t(kCount - 1) / 2 * uint64_t(kCount)) {
    printf("%llu tasks ran, want %llu\n", (unsigned long long)numbers, (unsigned long long)kCount);
    exit(1);
  }
}

}  // namespace

int main(int count, char **arguments) {
  if (count == 3 && !strcmp(arguments[1], "stress")) {
    std::vector<std::thread> callers;
    for (unsigned seed = 0; seed < 4; ++seed) callers.emplace_back(stress, atoi(arguments[2]), seed);
    for (std::thread &caller : callers) caller.join();
  } else if (count == 2 && !strcmp(arguments[1], "many")) {
    many();
  } else if (count == 4 && !strcmp(arguments[1], "cgroups")) {
    printf("%d\n", pydet::cgroup_cpus(arguments[2], arguments[3]));
  } else {
    return 2;
  }
  return 0;
}
