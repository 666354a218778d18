// How many threads the process was given for a call.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <initializer_list>
#include <sched.h>
#include <unistd.h>

#include "cpu/pool.h"

namespace pydet {
namespace {

constexpr int kMost = 1024;

// The number that a variable begins with, as in "4" or "4,2"; 0 if there is none, or one that makes no sense.
int from_environment(const char *name) {
  const char *text = getenv(name);
  if (!text) return 0;
  char *end = nullptr;
  const long value = strtol(text, &end, 10);
  while (*end == ' ') ++end;
  if (end == text || (*end && *end != ',') || value < 1) return 0;
  return int(value < kMost ? value : kMost);
}

int from_affinity() {
  unsigned long set[1024 / sizeof(long)] = {};  // 8192 CPUs
  if (sched_getaffinity(0, sizeof set, (cpu_set_t *)set) != 0) return 1;
  int count = 0;
  for (unsigned long word : set) count += __builtin_popcountl(word);
  return count > 1 ? count : 1;
}

// The start of a file, as text; "" if it cannot be read.
template <int size> struct Text {
  char text[size];
  explicit Text(const char *path) {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t length = file < 0 ? 0 : read(file, text, size - 1);
    text[length > 0 ? length : 0] = 0;
    if (file >= 0) close(file);
  }
};

// CPUs that a folder of a cgroup hierarchy grants, rounded up; kMost where it does not say.
int from_folder(const char *folder) {
  char path[640], *end = nullptr;
  snprintf(path, sizeof path, "%s/cpu.max", folder);  // version 2: "max 100000", or "150000 100000"
  const Text<64> limit(path);
  long long quota = strtoll(limit.text, &end, 10), period = strtoll(end, nullptr, 10);
  if (!limit.text[0]) {
    snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);  // version 1: -1 where there is none
    quota = strtoll(Text<64>(path).text, nullptr, 10);
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
    period = strtoll(Text<64>(path).text, nullptr, 10);
  }
  if (quota <= 0 || period <= 0) return kMost;
  const long long cpus = (quota + period - 1) / period;
  return int(cpus < kMost ? cpus : kMost);
}

std::atomic<int> set_by_caller{0}, given{0};

}  // namespace

int cgroup_cpus(const char *membership, const char *mount) {
  int least = kMost;
  const Text<4096> groups(membership);
  for (const char *line = groups.text; *line;) {  // "0::/path", or "1:cpu,cpuacct:/path"
    const int length = int(strcspn(line, "\n"));
    const char *end = line + length, *controllers = (const char *)memchr(line, ':', size_t(length));
    const char *path = nullptr;
    if (controllers && ++controllers < end) path = (const char *)memchr(controllers, ':', size_t(end - controllers));
    if (path) {
      const int name_length = int(path - controllers);
      char name[64], folder[560];
      snprintf(name, sizeof name, ",%.*s,", name_length, controllers);
      if (name_length == 0 || strstr(name, ",cpu,")) {
        const char *separator = name_length ? "/" : "";
        const int root = snprintf(folder, sizeof folder, "%s%s%.*s", mount, separator, name_length, controllers);
        snprintf(folder + root, sizeof folder - size_t(root), "%.*s", int(end - path - 1), path + 1);
        for (char *last = folder; last >= folder + root || last == folder; last = strrchr(folder, '/')) {
          if (last != folder) *last = 0;  // a group, then each that holds it
          const int cpus = from_folder(folder);
          least = cpus < least ? cpus : least;
        }
      }
    }
    line = *end ? end + 1 : end;
  }
  return least;
}

void set_thread_count(int count) { set_by_caller = count < kMost ? count : kMost; }

int thread_count() {
  if (const int count = set_by_caller.load(std::memory_order_relaxed)) return count;
  int count = given.load(std::memory_order_relaxed);
  if (count) return count;
  for (const char *name : {"PYDET_NUM_THREADS", "OMP_NUM_THREADS"})
    if (!count) count = from_environment(name);
  if (!count) {
    const int affinity = from_affinity(), quota = cgroup_cpus("/proc/self/cgroup", "/sys/fs/cgroup");
    count = affinity < quota ? affinity : quota;
  }
  given = count;
  return count;
}

}  // namespace pydet
