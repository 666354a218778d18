// The fold of all ranks' parts in one launch on each (NUMERICS.md, "Fold"): the parts travel by stores into the peers'
// memory, a meeting of the ranks, the fold from one's own memory, and the results by stores again. The bits are those of
// gpu/any/fold.cu over all parts.
//
//   one shot   every rank gets all parts and folds all of out                         count S n fp32 received, 1 meeting
//   two shot   rank r gets the parts of its share of out, folds it, and gives it to all     1/ranks of that, 2 meetings
//
// The parts of rank 0 are the first of the order, so by two shots it sends what it has folded of them, one part instead of
// all. Of two ranks its share is then the smaller one, by which as many bytes go either way: 3.75 n of 8 parts, not 9 n.
//
// Blocks of one number work together across the ranks and with no others: block b owns two areas of each rank's memory,
// and rounds of elements that are a function of the sizes alone, which take the areas in turn. While a round is folded the
// parts of the next one travel; one meeting then says that both have been done:
//
//   send 0, meet;   round r: send r + 1, fold r, results to all, meet, take the results of r
//
// What a peer writes into an area in round r + 2 comes after the meeting of round r, to which this block comes when it has
// folded what lies there; the results of round r, which it may read still, lie elsewhere in the area, and are written
// again two meetings later. So there is no meeting after the last read, and a graph may be replayed any number of times.
//
// A meeting: every thread of the block is past its stores and loads (bar.sync), then thread t writes the meeting's number
// to rank t's signal with st.release.sys, which orders after it what the block did before, and reads its own signal from
// rank t with ld.acquire.sys until the number is there; then bar.sync. Loads of what peers wrote come after, and are plain.

#include "gpu/any/fold.h"
#include "gpu/kernels.h"

namespace pydet {
namespace {

constexpr int kThreads = 256, kMostBlocks = 384, kUnit = 4;  // elements of a thread
constexpr int kMostTurns = 4;  // units of a thread in a round: 16.8 million elements of 2 ranks take 187 us, 239 by one
constexpr int kSlot = kThreads * kUnit * int(sizeof(float));  // bytes of a part of a block's unit
constexpr uint32_t kAskedBeforeTime = 1024;                   // the clock takes longer to read than a signal
constexpr int64_t kOneShotElements = 1 << 19;                 // of all parts: up to here one shot is the faster
// The signals: [block][rank], then for each block the numbers of its latest meeting and of its next area.
constexpr int kCounts = kMostBlocks * PYDET_FOLD_RANKS;
static_assert((kCounts + 2 * kMostBlocks) * int(sizeof(uint32_t)) <= PYDET_FOLD_SIGNALS, "the signals have room");
static_assert(2 * kMostBlocks * kSlot == PYDET_FOLD_ROOM, "two areas a block have room for one slot each");

// What all ranks have alike: a function of the sizes.
struct Plan {
  int64_t share;  // elements of out that a rank folds, but for rank 0
  int64_t first;  // those of rank 0, not more
  int64_t area;   // bytes
  int32_t turns;  // units of a thread in a round
  int32_t rounds;
  int32_t total;  // parts of all ranks
  bool two_shot;
  bool prefix;  // rank 0 sends the fold of its parts

  __device__ __forceinline__ int64_t begin_of(int rank) const {
    return two_shot && rank > 0 ? first + (rank - 1) * share : 0;
  }
  __device__ __forceinline__ int64_t end_of(int rank, int64_t n) const {
    const int64_t end = begin_of(rank) + (rank > 0 ? share : first);
    return end < n ? end : n;
  }
};

__device__ __forceinline__ void put_signal(uint32_t *to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t get_signal(const uint32_t *from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time)::"memory");
  return time;
}
__device__ __forceinline__ uint32_t *signals(const Peers &peers, int rank) {
  return reinterpret_cast<uint32_t *>(peers.memory[rank]);
}

// The rank that is `step` after this one, in a ring: so that not all write to one at a time.
__device__ __forceinline__ int after(const Peers &peers, int step) {
  return peers.rank + step < peers.ranks ? peers.rank + step : peers.rank + step - peers.ranks;
}

__device__ __forceinline__ void meet(const Peers &peers, uint32_t number) {
  __syncthreads();
  if (int(threadIdx.x) < peers.ranks) {
    const int other = threadIdx.x, at = int(blockIdx.x) * PYDET_FOLD_RANKS;
    put_signal(signals(peers, other) + at + peers.rank, number);
    const uint32_t *const signal = signals(peers, peers.rank) + at + other;
    uint64_t start = 0;
    for (uint32_t asked = 1; int32_t(get_signal(signal) - number) < 0; ++asked) {
      if (asked % kAskedBeforeTime || !peers.timeout_ms) continue;
      const uint64_t now = nanoseconds();
      start = start ? start : now;
      if (now - start > peers.timeout_ms * uint64_t(1000000)) __trap();
    }
  }
  __syncthreads();
}

// Elements [at, at + 4) of a tensor of this rank's own that ends at `end`; those beyond are 0.
__device__ __forceinline__ Elements<4> load_own(const float *from, int64_t at, int64_t end, bool by_four) {
  if (by_four) return load_elements<4>(from + at);
  Elements<4> v = {};
#pragma unroll
  for (int e = 0; e < kUnit; ++e)
    if (at + e < end) v.x[e] = from[at + e];
  return v;
}

__device__ __forceinline__ void store_own(char *out, Type type, int64_t at, int64_t end, bool by_four,
                                          const uint4 &words) {
  if (by_four) return store_packed(out + at * size_of(type), type, words);
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int e = 0; e < kUnit; ++e) {
    if (at + e >= end) continue;
    if (type == Type::f32) reinterpret_cast<uint32_t *>(out)[at + e] = word[e];
    else reinterpret_cast<uint16_t *>(out)[at + e] = uint16_t(word[e / 2] >> e % 2 * 16);
  }
}

__device__ __forceinline__ void store_elements(char *to, const Elements<4> &v) {
  *reinterpret_cast<float4 *>(to) = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
}

// `many` of this rank's parts, of the elements at `at`, to their slots on all ranks that want them.
template <int many, bool by_four>
__device__ __forceinline__ void send(const Fold &p, const Plan &plan, int first, int64_t area, int64_t slot, int64_t at,
                                     int64_t n) {
  const Peers &peers = p.peers;
  const int64_t part_bytes = int64_t(plan.turns) * kSlot;
  Elements<4> v[many];
  for (int step = 1; step < peers.ranks; ++step) {
    const int to = after(peers, step);
    const int64_t begin = plan.begin_of(to), end = plan.end_of(to, n);
    if (begin + at >= end) continue;
    if (plan.two_shot || step == 1) {
#pragma unroll
      for (int s = 0; s < many; ++s) v[s] = load_own(p.parts[first + s], begin + at, end, by_four);
    }
#pragma unroll
    for (int s = 0; s < many; ++s)
      store_elements(peers.memory[to] + area + (peers.rank * p.count + first + s) * part_bytes + slot, v[s]);
  }
}

// The fold of this rank's parts, rank 0's, to the first slot of all ranks. Not inlined, so that its registers are not held
// beside those of the kernel, which spilled.
template <bool by_four>
__device__ __noinline__ void send_prefix(const Fold &p, const Plan &plan, int64_t area, int64_t slot, int64_t at,
                                         int64_t n) {
  for (int to = 1; to < p.peers.ranks; ++to) {
    const int64_t begin = plan.begin_of(to), end = plan.end_of(to, n);
    if (begin + at >= end) continue;
    const auto part = [&](int s) { return load_own(p.parts[s], begin + at, end, by_four); };
    store_elements(p.peers.memory[to] + area + slot, ordered(p.count, part, Elements<4>{}));
  }
}

// Blocks a multiprocessor is to hold of the kernel in whole units: with three, Blackwell's code spills.
#if defined(__CUDA_ARCH__)
constexpr int kBlocksByFour = __CUDA_ARCH__ >= 1000 ? 2 : 3;
#else
constexpr int kBlocksByFour = 3;
#endif

template <bool as_tree, bool by_four>
__global__ void __launch_bounds__(kThreads, by_four && !as_tree ? kBlocksByFour : 2)
    fold_peers_kernel(const __grid_constant__ Fold p, const __grid_constant__ Plan plan) {
  __shared__ const char *sources[PYDET_FOLD_PARTS];
  const Peers &peers = p.peers;
  const int rank = peers.rank, ranks = peers.ranks;
  const bool meets = ranks > 1, sends = meets && !peers.gathered, shares = meets && plan.two_shot && !peers.scatter;
  const int64_t n = peers.scatter ? p.size * ranks : p.size;
  const int64_t begin = plan.begin_of(rank), end = plan.end_of(rank, n);
  const int64_t out_begin = peers.scatter ? 0 : begin;
  const int64_t part_bytes = int64_t(plan.turns) * kSlot, results = plan.total * part_bytes;
  const int skipped = plan.prefix && rank > 0 ? p.count - 1 : 0, folded = plan.total - skipped;
  const int own_first = peers.gathered ? 0 : rank * p.count - skipped, own_end = own_first + p.count;

  uint32_t *const counts = meets ? signals(peers, rank) + kCounts + 2 * blockIdx.x : nullptr;
  uint32_t meeting = meets ? counts[0] : 0, next_area = meets ? counts[1] : 0;
  const auto area_of = [&](int round) {
    return PYDET_FOLD_SIGNALS + (2 * int64_t(blockIdx.x) + (next_area + uint32_t(round)) % 2) * plan.area;
  };
  // Part s of what is folded, at the first element of its own tensor or, of an area, at its first slot.
  for (int s = threadIdx.x; s < folded; s += kThreads) {
    if (s < own_first || s >= own_end) sources[s] = peers.memory[rank] + (s ? s + skipped : 0) * part_bytes;
    else sources[s] = reinterpret_cast<const char *>(p.parts[s - own_first] + (peers.gathered ? 0 : begin));
  }
  // A thread's first element of a turn, from the start of a share, and where its unit lies in a part's slots.
  const auto element = [&](int round, int turn) {
    const int64_t unit = (int64_t(round) * plan.turns + turn) * gridDim.x + blockIdx.x;
    return (unit * kThreads + threadIdx.x) * kUnit;
  };
  const auto slot_of = [&](int turn, int bytes) {
    return int64_t(turn) * kSlot + int64_t(threadIdx.x) * kUnit * bytes;
  };

  const auto send_round = [&](int round) {
    const int64_t area = area_of(round);
    for (int turn = 0; turn < plan.turns; ++turn) {
      const int64_t at = element(round, turn), slot = slot_of(turn, sizeof(float));
      if (at >= plan.share) break;
      if (!as_tree && plan.prefix && rank == 0) {
        send_prefix<by_four>(p, plan, area, slot, at, n);
        continue;
      }
      int s = 0;
      for (; s + 4 <= p.count; s += 4) send<4, by_four>(p, plan, s, area, slot, at, n);
      if (p.count - s >= 2) send<2, by_four>(p, plan, s, area, slot, at, n), s += 2;
      if (s < p.count) send<1, by_four>(p, plan, s, area, slot, at, n);
    }
  };
  if (sends) send_round(0);
  if (meets) meet(peers, ++meeting);
  else __syncthreads();

  for (int round = 0; round < plan.rounds; ++round) {
    const bool last = round + 1 == plan.rounds;
    if (sends && !last) send_round(round + 1);
    const int64_t area = area_of(round);
    for (int turn = 0; turn < plan.turns; ++turn) {
      const int64_t at = element(round, turn), slot = slot_of(turn, sizeof(float)), out_at = out_begin + at;
      if (begin + at >= end) break;
      Elements<4> start = {};
      const float *out = reinterpret_cast<const float *>(p.out.data);
      if (p.accumulate) start = load_own(out, out_at, out_begin + end - begin, by_four);
      const auto part = [&](int s) {
        if (s < own_first || s >= own_end)
          return load_elements<4>(reinterpret_cast<const float *>(sources[s] + area + slot));
        return load_own(reinterpret_cast<const float *>(sources[s]), at, end - begin, by_four);
      };
      Elements<4> sum = as_tree ? tree(folded, part, start) : ordered(folded, part, start);
      if (p.bias.data) {
        int64_t column = out_at % p.bias_period;
        for (int e = 0; e < kUnit; ++e) {
          if (begin + at + e < end) sum.x[e] = sum.x[e] + load_f32(p.bias.data, p.bias.type, column);
          column = column + 1 == p.bias_period ? 0 : column + 1;
        }
      }
      const uint4 words = packed(sum, p.out.type);
      store_own(p.out.data, p.out.type, out_at, out_begin + end - begin, by_four, words);
      for (int step = 1; shares && step < ranks; ++step) {
        char *const to = peers.memory[after(peers, step)] + area + results + rank * part_bytes;
        store_packed(to + slot_of(turn, size_of(p.out.type)), p.out.type, words);
      }
    }
    // Gathered parts may be written again once all ranks are past their last meeting.
    if (meets && (shares || (sends && !last) || (peers.gathered && last))) meet(peers, ++meeting);

    for (int turn = 0; shares && turn < plan.turns; ++turn) {
      const int64_t at = element(round, turn);
      if (at >= plan.share) break;
      for (int step = 1; step < ranks; ++step) {
        const int from = after(peers, step);
        const int64_t to = plan.begin_of(from) + at, to_end = plan.end_of(from, n);
        if (to >= to_end) continue;
        const char *got = peers.memory[rank] + area + results + from * part_bytes;
        got += slot_of(turn, size_of(p.out.type));
        uint4 words = {};
        if (p.out.type == Type::f32) {
          words = *reinterpret_cast<const uint4 *>(got);
        } else {
          const uint2 two = *reinterpret_cast<const uint2 *>(got);
          words.x = two.x, words.y = two.y;
        }
        store_own(p.out.data, p.out.type, to, to_end, by_four, words);
      }
    }
  }
  if (meets && threadIdx.x == 0) counts[0] = meeting, counts[1] = next_area + uint32_t(plan.rounds);
}

bool aligned(const void *data, int bytes) { return reinterpret_cast<uintptr_t>(data) % uintptr_t(bytes) == 0; }

pydet_status launch_peers(const Fold &given, bool two_shot) {
  const char *name = two_shot ? "fold_two_shot" : "fold_one_shot";
  DeviceGuard guard(given.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  Fold p = given;
  if (p.peers.ranks == 0) p.peers.ranks = 1;  // without peers: this device alone
  const Peers &peers = p.peers;
  const int64_t n = peers.scatter ? p.size * peers.ranks : p.size;
  Plan plan = {};
  plan.two_shot = two_shot;
  plan.total = peers.gathered ? p.count : p.count * peers.ranks;
  plan.share = plan.first = two_shot ? divide_up(n, peers.ranks) : n;
  plan.prefix = two_shot && p.count > 1 && !p.tree && !p.accumulate && !peers.gathered && !peers.scatter;
  if (plan.prefix && peers.ranks == 2) {
    plan.first = n / (2 * p.count) / (kThreads * kUnit) * (kThreads * kUnit);
    plan.share = n - plan.first;
  }
  bool by_four = (plan.first < plan.share || n % peers.ranks == 0 || !two_shot) && plan.share % kUnit == 0 &&
                 n % kUnit == 0 && aligned(p.out.data, kUnit * size_of(p.out.type));
  for (int s = 0; s < p.count; ++s) by_four = by_four && aligned(p.parts[s], kUnit * int(sizeof(float)));
  const int64_t blocks_wanted = divide_up(plan.share, kThreads * kUnit);
  const int64_t blocks = blocks_wanted < kMostBlocks ? blocks_wanted : kMostBlocks;
  if (peers.ranks > 1) plan.area = int64_t((peers.memory_size - PYDET_FOLD_SIGNALS) / (2 * kMostBlocks)) / 16 * 16;
  plan.turns = 1;
  for (const int64_t wanted = divide_up(blocks_wanted, blocks); plan.turns < kMostTurns && plan.turns < wanted;) {
    if ((plan.turns + 1) * int64_t(plan.total + peers.ranks) * kSlot > plan.area) break;
    ++plan.turns;
  }
  plan.rounds = int32_t(divide_up(blocks_wanted, blocks * plan.turns));
  Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(blocks)), dim3(kThreads)};
  if (by_four) return launch(where, p.tree ? fold_peers_kernel<true, true> : fold_peers_kernel<false, true>, p, plan);
  return launch(where, p.tree ? fold_peers_kernel<true, false> : fold_peers_kernel<false, false>, p, plan);
}

}  // namespace

// One meeting less, ranks times the bytes.
bool fold_one_shot_takes(const Fold &p) { return !p.peers.gathered && !p.peers.scatter; }
bool fold_one_shot_prefers(const Fold &p) { return p.size * p.count * p.peers.ranks <= kOneShotElements; }
pydet_status fold_one_shot(const Fold &p) { return launch_peers(p, false); }
pydet_status fold_two_shot(const Fold &p) { return launch_peers(p, true); }

}  // namespace pydet
