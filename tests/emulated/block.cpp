// Blocks of threads as fibers. A thread runs until it waits for others; the threads of a block are walked in ascending
// order in one launch and in descending order in the next, so that a barrier that lacks is seen: a thread then
// reads before another has written. Blocks run one after another, in either order too (or in the one that a GPU keeps to,
// where a test asks for it); those of a cluster in turns, each as a thread of
// the system, whose thread_local variables are its shared memory.
#include "block.h"

#include <ucontext.h>

#include <condition_variable>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

// Dynamic shared memory, by the names that kernels give it.
constexpr size_t kMostShared = 227 << 10;
alignas(128) thread_local char shared_memory[kMostShared] asm("_ZN5pydet12_GLOBAL__N_16sharedE");
alignas(128) thread_local char staged_memory[kMostShared] asm("_ZN5pydet12_GLOBAL__N_18x_stagedE");

thread_local uint3 threadIdx, blockIdx;
thread_local dim3 blockDim, gridDim;

// Of GCC's own, which save what a function of theirs needs and no more; a buffer of libc's is made anew at every jump.
using Jump = void *[5];
__attribute__((noinline)) static void jump(Jump to) { __builtin_longjmp(to, 1); }  // never from where the jump was made

namespace emulated {
namespace {

constexpr size_t kStack = 64 << 10;
enum class State { begins, runs, waits, at_warp, at_block, ended };  // the first three may go on

struct Fiber {
  ucontext_t context;  // where it begins
  Jump at;
  std::unique_ptr<char[]> stack;
  State state;
  uint3 index;
  Copies copies;
  int meetings;      // with other threads of the warp
  int done[3];       // of what may be left out
  int votes;         // of the block
  int64_t arrivals;  // at the cluster's barrier
};
struct Warp {
  uint32_t values[2][kWarp];
  bool there[2][kWarp];
};
struct Cluster {
  int blocks, turn = 0, idle = 0, left;
  int64_t arrivals = 0;
  const char *failure = nullptr;
  std::vector<char *> anchors;
  std::vector<bool> ended;
  std::mutex mutex;
  std::condition_variable turned;
};

// What each thread leaves out once, to see whether it is missed: its barrier, exchange or wait of this number.
enum Omission { barrier, exchange, wait };
int omitted = -1, omitted_number;
bool in_order;  // blocks start as their numbers ascend

// A block, by the thread of the system that runs it.
struct Block {
  char *anchor;  // in its shared memory
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Jump scheduler;
  int current, threads, rank;
  int against[3];    // votes of the block: of this one, of one that some have not read, of one that all have
  int64_t came[16];  // to each barrier that some of its threads meet at
  bool moved;
  Cluster *cluster;
  const std::function<void()> *body;

  Fiber &fiber() { return fibers[current]; }
};
thread_local char anchor;
thread_local Block *block;

__attribute__((noinline)) void pause(State state) {
  Fiber &fiber = block->fiber();
  fiber.state = state;
  if (!__builtin_setjmp(fiber.at)) jump(block->scheduler);
}
bool omits(Omission what) { return block->fiber().done[what]++ == omitted_number && what == omitted; }
void fail(const char *why) {
  block->cluster->failure = why;
  pause(State::waits);
}
void begin() {
  for (;; pause(State::ended)) (*block->body)();
}

// Lets those of the threads `first` to `last` go on that have met, which are all that have not ended.
void release(Block &own, int first, int last, State state) {
  Fiber *const fibers = own.fibers.data();
  int one = -1;
  for (int i = first; i < last; ++i) {
    if (fibers[i].state != state && fibers[i].state != State::ended) return;
    if (fibers[i].state == state) one = i;
  }
  if (one < 0) return;
  bool *const there = own.warps[first / kWarp].there[fibers[one].meetings % 2];
  for (int i = first; i < last; ++i) {
    if (state == State::at_warp) there[i - first] = fibers[i].state == state;
    if (fibers[i].state == state) fibers[i].state = State::runs;
  }
  own.moved = true;
}

__attribute__((noinline)) void go_on(Block &own, Fiber &fiber) {
  if (__builtin_setjmp(own.scheduler)) return;
  if (fiber.state == State::begins) setcontext(&fiber.context);
  jump(fiber.at);
}

// Each thread once, as far as it goes. Whether some are left.
bool walk(Block &own, bool ascending) {
  const int threads = own.threads;
  int left = 0;
  own.moved = false;
  for (int k = 0; k < threads && !own.cluster->failure; ++k) {
    own.current = ascending ? k : threads - 1 - k;
    Fiber &fiber = own.fiber();
    if (fiber.state <= State::waits) {
      own.moved |= fiber.state != State::waits;
      threadIdx = fiber.index;
      go_on(own, fiber);
    }
    left += fiber.state != State::ended;
  }
  for (int first = 0; first < threads; first += kWarp)
    release(own, first, std::min(first + kWarp, threads), State::at_warp);
  release(own, 0, threads, State::at_block);
  return left > 0;
}

void run_block(Block &own, bool ascending, size_t shared_bytes) {
  const int threads = own.threads = int(blockDim.x * blockDim.y * blockDim.z);
  std::vector<Fiber> &fibers = own.fibers;
  if (int(fibers.size()) < threads) fibers.resize(threads);
  own.warps.assign((threads + kWarp - 1) / kWarp, Warp());
  memset(own.against, 0, sizeof own.against);
  memset(own.came, 0, sizeof own.came);
  memset(shared_memory, 0x7F, shared_bytes);
  memset(staged_memory, 0x7F, shared_bytes);
  for (int i = 0; i < threads; ++i) {
    Fiber &fiber = fibers[i];
    const unsigned x = unsigned(i) % blockDim.x, rest = unsigned(i) / blockDim.x;
    fiber.state = State::runs, fiber.index = {x, rest % blockDim.y, rest / blockDim.y};
    fiber.copies = {}, fiber.meetings = 0, fiber.votes = 0, fiber.arrivals = 0,
    memset(fiber.done, 0, sizeof fiber.done);
    if (fiber.stack) continue;
    fiber.state = State::begins;
    fiber.stack.reset(new char[kStack]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, begin, 0);
  }
  Cluster &cluster = *own.cluster;
  const int rank = own.rank;
  std::unique_lock<std::mutex> lock(cluster.mutex);
  cluster.anchors[rank] = own.anchor;
  for (bool left = true; left && !cluster.failure;) {
    cluster.turned.wait(lock, [&] { return cluster.turn == rank || cluster.failure; });
    ++cluster.idle;
    for (own.moved = true; left && own.moved && !cluster.failure;) {
      left = walk(own, ascending);
      if (own.moved) cluster.idle = 0;
    }
    cluster.ended[rank] = !left, cluster.left -= !left;
    if (cluster.idle > cluster.blocks && cluster.left > 0) cluster.failure = "threads wait for each other";
    do cluster.turn = (cluster.turn + 1) % cluster.blocks;
    while (cluster.left > 0 && cluster.ended[cluster.turn]);
    cluster.turned.notify_all();
  }
}

}  // namespace

Copies &copies() { return block->fiber().copies; }

const uint32_t *meet_warp(uint32_t mine, int from) {
  const int turn = ++block->fiber().meetings % 2, lane = block->current % kWarp;
  Warp &warp = block->warps[block->current / kWarp];
  warp.values[turn][lane] = mine;
  pause(State::at_warp);
  if (from >= 0 && omits(exchange)) warp.values[turn][from] = mine;
  if (from >= 0 && !warp.there[turn][from]) fail("a lane reads one that has ended");
  return warp.values[turn];
}
void sync_warp() {
  if (!omits(barrier)) meet_warp(0, -1);
}
void meet_block() {
  if (!omits(barrier)) pause(State::at_block);
}
char *shared_begin() { return shared_memory; }
bool all_of_block(bool holds) {
  int *const against = block->against;
  const int turn = block->fiber().votes++ % 3;
  against[turn] += !holds, against[(turn + 1) % 3] = 0;
  pause(State::at_block);
  return against[turn] == 0;
}
void wait_copies(int in_flight) {
  if (omits(wait)) return;
  Copies &copies = block->fiber().copies;
  size_t kept = 0;
  for (const Copy &copy : copies.pending) {
    if (copy.group >= copies.groups - in_flight) {
      copies.pending[kept++] = copy;
    } else {
      memset(copy.to, 0, size_t(copy.bytes));
      memcpy(copy.to, copy.from, size_t(copy.valid));
    }
  }
  copies.pending.resize(kept);
}
void wait_until(const std::function<bool()> &holds) {
  while (!holds()) pause(State::waits);
  block->moved = true;
}
void meet_some(int id, int count) {
  if (omits(barrier)) return;
  const int64_t all = (block->came[id]++ / count + 1) * count;
  wait_until([id, all] { return block->came[id] >= all; });
}
void let_others() { pause(State::runs); }
int cluster_blocks() { return block->cluster->blocks; }
void arrive_at_cluster() { ++block->cluster->arrivals, ++block->fiber().arrivals; }
void meet_cluster() {
  const int64_t all = block->fiber().arrivals * block->threads * block->cluster->blocks;
  wait_until([all] { return block->cluster->arrivals >= all; });
}
void *in_block(int to, void *mine) {
  if (block->cluster->ended[to]) fail("a block is sent something that has ended");
  return block->cluster->anchors[to] + (static_cast<char *>(mine) - block->anchor);
}

extern "C" __attribute__((visibility("default"))) void emulated_omit(int what, int number) {
  omitted = what, omitted_number = number;
}
extern "C" __attribute__((visibility("default"))) void emulated_in_order(int on) { in_order = on != 0; }

cudaError_t launch(const cudaLaunchConfig_t &config, const std::function<void()> &kernel) {
  thread_local bool other_way = false;
  thread_local Block kept;  // with the stacks of its fibers
  other_way = !other_way;
  const bool ascending = other_way;
  int size = 1;
  for (unsigned i = 0; i < config.numAttrs; ++i)
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) size = int(config.attrs[i].val.clusterDim.x);
  const dim3 grid = config.gridDim;
  const int64_t count = int64_t(grid.x) * grid.y * grid.z / size;
  std::deque<Cluster> clusters(count);
  const char *failure = nullptr;
  auto run = [&](Block &own, int number) {
    block = &own, own.anchor = &anchor, own.rank = number, own.body = &kernel, blockDim = config.blockDim,
    gridDim = grid;
    for (int64_t k = 0; k < count && !failure; ++k) {
      const unsigned at = unsigned((ascending || in_order ? k : count - 1 - k) * size + number);
      blockIdx = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
      own.cluster = &clusters[k];
      run_block(own, ascending, config.dynamicSmemBytes);
      if (own.cluster->failure) failure = own.cluster->failure;
    }
  };
  for (Cluster &one : clusters) one.blocks = one.left = size, one.anchors.resize(size), one.ended.resize(size);
  std::vector<std::thread> others;
  for (int number = 1; number < size; ++number)
    others.emplace_back([&run, number] {
      Block own;
      run(own, number);
    });
  run(kept, 0);
  for (std::thread &other : others) other.join();
  if (!failure) return cudaSuccess;
  fprintf(stderr, "%s\n", failure);
  kept.fibers.clear();
  return cudaErrorLaunchFailure;
}

}  // namespace emulated
