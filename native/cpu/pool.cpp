// A call that wants threads posts a job. The pool's threads and the caller itself claim its tasks until none is left. A
// claim is one compare and swap on one word, which says how many tasks are left and how many threads may still join.
// Nothing else is read before a claim has succeeded, and a job does not end while a claimed task is unfinished: so
// whichever job a thread was looking for, what it claims is a task of the one that is there.
//
// Nothing here blocks but two futexes: where idle threads sleep, and where a caller waits for the last tasks of others.

#include "cpu/pool.h"

#include <atomic>
#include <ctime>
#include <initializer_list>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/float_environment.h"

namespace pydet {
namespace {

// ---- The machine -------------------------------------------------------------------------------------------------

using Futex = std::atomic<uint32_t>;
static_assert(sizeof(Futex) == 4, "the kernel's futex is the atomic's own word");

void sleep_while(Futex &at, uint32_t value) { syscall(SYS_futex, &at, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0); }
void wake(Futex &at, int count) { syscall(SYS_futex, &at, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0); }

// Moves this thread off a CPU where it may run on another; then it may run where it could before.
void leave(int cpu) {
  cpu_set_t all, others;
  if (sched_getaffinity(0, sizeof all, &all) != 0) return;  // the machine has more than the set holds
  others = all;
  CPU_CLR(unsigned(cpu), &others);
  if (CPU_COUNT(&others) && sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof all, &all);
}

int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits for `ready` as long as waking a sleeper would take; false if it did not come.
template <class Ready> bool spin(const Ready &ready) {
  constexpr int64_t kNanoseconds = 30000;
  const int64_t until = nanoseconds() + kNanoseconds;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (nanoseconds() < until);
  return false;
}

// ---- Jobs --------------------------------------------------------------------------------------------------------

constexpr int64_t kMostUnits = 1 << 24;  // of more tasks, some are claimed at once
constexpr uint64_t kSeat = uint64_t(1) << 32, kUnits = kSeat - 1;

struct Work {
  int64_t count, units, tasks_a_unit;
  void (*task)(const void *, int64_t, Scratch &);
  const void *context;
};

struct alignas(64) Job {
  std::atomic<uint64_t> open{0};       // threads that may still join, and units (of some tasks each) to be claimed
  std::atomic<int64_t> unfinished{0};  // units; a thread reports all of its own at once
  Futex finished{0};                   // counts jobs of which the caller did not finish the last unit
  Work work;                           // read under a claim, written while there is nothing to claim
};

constexpr int kJobs = 32;
Job jobs[kJobs];
std::atomic<uint32_t> owned{0}, posted{0};  // a bit for each job: taken by a caller; may have units left

constexpr int kMostThreads = 1024;
std::atomic<int> workers{0};
std::atomic<bool> making_threads{false};
std::atomic<int64_t> next_attempt{0};  // when threads may be made again after that failed
Futex posts{0};                        // counts jobs; idle threads sleep on it
std::atomic<int> sleepers{0};
std::atomic<int> cpu_of_caller{-1};  // the latest one's

// A unit of the job, for one more thread (`cost` is kSeat + 1) or for one that has joined (1). Returns how many were left.
uint64_t claim(Job &job, uint64_t cost) {
  uint64_t open = job.open.load(std::memory_order_relaxed);
  do {
    if (!(open & kUnits) || open < cost) return 0;
  } while (!job.open.compare_exchange_weak(open, open - cost, std::memory_order_acquire, std::memory_order_relaxed));
  return open & kUnits;
}

// Computes the unit that was claimed with `left` to go, and all others that it can claim; how many.
int64_t compute(Job &job, uint64_t left, Scratch &scratch) {
  if (!left) return 0;
  FloatEnvironment environment;
  const Work work = job.work;
  int64_t done = 0;
  do {
    const int64_t first = (work.units - int64_t(left)) * work.tasks_a_unit;
    const int64_t last = work.count - first < work.tasks_a_unit ? work.count : first + work.tasks_a_unit;
    for (int64_t i = first; i < last; ++i) work.task(work.context, i, scratch);
    ++done;
  } while ((left = claim(job, 1)));
  return done;
}

// Whether the units that were done were the last ones. Then the job may already be another's.
bool report(Job &job, int64_t done) { return job.unfinished.fetch_sub(done, std::memory_order_acq_rel) == done; }

// Wakes two idle threads if there are any; each of them wakes two more while there are units and seats.
void wake_some(uint64_t open) {
  if ((open & kUnits) && open >= kSeat && sleepers.load(std::memory_order_seq_cst) > 0) wake(posts, 2);
}

// ---- The pool's threads ------------------------------------------------------------------------------------------

// Joins a job that has room; false if there is none.
bool join_any(Scratch &scratch) {
  for (uint32_t set = posted.load(std::memory_order_acquire); set; set &= set - 1) {
    Job &job = jobs[__builtin_ctz(set)];
    const uint64_t left = claim(job, kSeat + 1);
    if (!left) continue;
    wake_some(job.open.load(std::memory_order_relaxed));
    if (report(job, compute(job, left, scratch))) {
      job.finished.fetch_add(1, std::memory_order_release);
      wake(job.finished, 1);
    }
    return true;
  }
  return false;
}

void put_off() { next_attempt.store(nanoseconds() + 1000000000, std::memory_order_relaxed); }

void *run_worker(void *) {
  Scratch scratch;
  if (!scratch.large()) {
    workers.fetch_sub(1);
    put_off();
    return nullptr;
  }
  for (;;) {
    const uint32_t seen = posts.load(std::memory_order_acquire);
    if (join_any(scratch) || spin([seen] { return posts.load(std::memory_order_relaxed) != seen; })) continue;
    sleepers.fetch_add(1, std::memory_order_seq_cst);  // before the futex reads `posts`: see share()
    sleep_while(posts, seen);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
    // Where threads of others spin on all other CPUs, as OpenBLAS's do after a call, Linux wakes a thread on its caller's.
    const int cpu = cpu_of_caller.load(std::memory_order_relaxed);
    if (cpu >= 0 && sched_getcpu() == cpu) leave(cpu);
  }
}

// Makes threads until there are `wanted`. Where one cannot be made, none is tried for a second.
void make_threads(int64_t wanted) {
  if (workers.load(std::memory_order_relaxed) >= wanted) return;
  if (nanoseconds() < next_attempt.load(std::memory_order_relaxed)) return;
  if (making_threads.exchange(true, std::memory_order_acquire)) return;
  // Signals are the application's threads' to handle, but for those of an instruction that fails.
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS}) sigdelset(&blocked, signal);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, 1 << 20);  // thread-local variables of the whole process take some of it
  while (workers.load(std::memory_order_relaxed) < wanted) {
    pthread_t thread;
    workers.fetch_add(1);
    if (pthread_create(&thread, &attributes, run_worker, nullptr) != 0) {
      workers.fetch_sub(1);
      put_off();
      break;
    }
  }
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  making_threads.store(false, std::memory_order_release);
}

// ---- fork --------------------------------------------------------------------------------------------------------

// A child has the memory of its parent and none of its threads: what those held is free.
void begin_again() {
  for (Job &job : jobs) {
    job.open = 0;
    job.unfinished = 0;
  }
  owned = 0, posted = 0, workers = 0, sleepers = 0;
  making_threads = false;
  next_attempt = 0;
  Scratch::free_all();
}

__attribute__((constructor)) void watch_forks() { pthread_atfork(nullptr, nullptr, begin_again); }

Job *take_job() {
  uint32_t set = owned.load(std::memory_order_relaxed);
  do {
    if (set == UINT32_MAX) return nullptr;
  } while (!owned.compare_exchange_weak(set, set | (set + 1), std::memory_order_acquire, std::memory_order_relaxed));
  return &jobs[__builtin_ctz(~set)];
}

}  // namespace

void share(int64_t count, int64_t threads, Scratch &scratch, void (*task)(const void *, int64_t, Scratch &),
           const void *context) {
  if (threads > count) threads = count;
  if (threads > kMostThreads) threads = kMostThreads;
  if (threads > 1) make_threads(threads - 1);
  Job *job = threads > 1 && workers.load(std::memory_order_relaxed) > 0 ? take_job() : nullptr;
  if (!job) {
    FloatEnvironment environment;
    for (int64_t i = 0; i < count; ++i) task(context, i, scratch);
    return;
  }
  const uint32_t bit = uint32_t(1) << (job - jobs);
  const int64_t tasks_a_unit = 1 + (count - 1) / kMostUnits, units = 1 + (count - 1) / tasks_a_unit;
  job->work = {count, units, tasks_a_unit, task, context};
  job->unfinished.store(units, std::memory_order_relaxed);
  const uint64_t open = uint64_t(threads - 1) * kSeat + uint64_t(units);
  job->open.store(open, std::memory_order_release);
  posted.fetch_or(bit, std::memory_order_release);
  cpu_of_caller.store(sched_getcpu(), std::memory_order_relaxed);
  posts.fetch_add(1, std::memory_order_seq_cst);  // then `sleepers` is read: one of the two sides sees the other
  wake_some(open);

  const int64_t done = compute(*job, claim(*job, 1), scratch);
  posted.fetch_and(~bit, std::memory_order_relaxed);
  auto finished = [job] { return job->unfinished.load(std::memory_order_acquire) == 0; };
  if (!report(*job, done) && !spin(finished)) {
    for (;;) {
      const uint32_t seen = job->finished.load(std::memory_order_acquire);
      if (finished()) break;
      sleep_while(job->finished, seen);
    }
  }
  owned.fetch_and(~bit, std::memory_order_release);
}

}  // namespace pydet
