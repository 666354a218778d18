// The threads of the CPU kernels: one pool for all instruction sets.
#pragma once

#include <cstdint>

#include "cpu/scratch.h"

namespace pydet {

// How many threads a call may use, its caller's among them: what was set, else PYDET_NUM_THREADS, else OMP_NUM_THREADS,
// else as many CPUs as the process's affinity and its cgroups' quotas grant.
int thread_count();
void set_thread_count(int count);  // 0: nothing

// CPUs that quotas grant to the cgroups of a /proc/self/cgroup, whose hierarchies are below `mount`; 1024 without any.
int cgroup_cpus(const char *membership, const char *mount);

// Calls task(context, i, scratch) once for each i < count, on this thread and up to threads - 1 of the pool, each with
// its own scratch memory; large, where threads is not 1. It waits only for calls that have begun: a thread of the pool
// that has no core, or cannot be made, is not waited for. Any number of threads may call it at once; a signal handler may.
void share(int64_t count, int64_t threads, Scratch &scratch, void (*task)(const void *context, int64_t i, Scratch &),
           const void *context);

}  // namespace pydet
