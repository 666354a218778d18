// The fold of all ranks' parts in one launch on each (NUMERICS.md, "Fold"): the parts travel by stores into the peers'
// memory, a meeting of the ranks, the fold from one's own memory, and the results by stores again. The bits are those of
// gpu/any/fold.cu over all parts.
//
//   one shot   every rank gets all parts and folds all of out                         count S n fp32 received, 1 meeting
//   two shot   rank r gets the parts of its share of out, folds it, and gives it to all     1/ranks of that, 2 meetings
//   stream     the same, and no meeting but the first: below, at the kernel
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
//
// Ranks that disagree. Beside the number a signal has the fold's tag, a hash of all that decides who sends what where, and
// of the caller's word. A rank that reads this meeting's number beside another tag does not go on; nor does the other, for
// it reads this rank's. (One that is past this meeting has seen this rank's tag and found it right: so a block that did not
// go on marks its number's word, and no launch that waited for it may go on and hide that tag by its own.) Blocks that one
// rank alone has see that their own rank has failed. Nothing was written to out before the first meeting; NaN is written
// now, peers.fault says why, and every fold on this memory gives NaN until the host, on all ranks, has zeroed its signals.
//
// Two launches on one memory at a time, of a graph's replay and of another stream, say: a block takes the word of its
// number and gives it back at its end, so that one of them waits. Where the ranks differ in which, their words do too.
//
// Why folds cannot hang beside each other. A fold ends if on each rank one of its blocks has a place to run: blocks start
// in the order of their numbers (as CUB's scans count on), so the lowest block that has not ended on some rank runs, or
// comes next, on every rank, whatever else waits. So it hangs only where others that wait leave it not one place. A block
// of any of these kernels takes half a multiprocessor at most, and a fold has 128: another fold leaves it 68 of an H100's
// 132 multiprocessors, of which NCCL's kernels, which wait too, take 16 to 32. Two others leave four. So two folds may run
// at a time beside anything, and pydet.torch.distributed sees to it that no more do (symmetric.py, Turns).

#include "gpu/any/fold.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/signals.h"

namespace pydet {
namespace {

constexpr int kThreads = 256, kMostBlocks = PYDET_FOLD_BLOCKS, kUnit = 4;  // elements of a thread
constexpr int kMostTurns = 24;                                             // units of a thread in a round
constexpr int kSlot = kThreads * kUnit * int(sizeof(float));               // bytes of a part of a block's unit
constexpr int kRoomSlots = 3;  // of each area, for a part: what PYDET_FOLD_ROOM holds
constexpr uint32_t kAskedBeforeLook = 64, kAskedBeforeTime = 1024;  // the clock takes longer to read than a signal
constexpr int64_t kOneShotElements = 1 << 19;                       // of all parts: up to here one shot is the faster
static_assert(2 * kMostBlocks * kRoomSlots * kSlot == PYDET_FOLD_ROOM, "two areas a block");

// What a rank's memory begins with. All zeros at first.
struct Board {
  uint64_t signal[kMostBlocks][PYDET_FOLD_RANKS];  // from each rank: the meeting's number, the tag
  uint64_t state[kMostBlocks];  // kTaken, kSecondArea for the next fold, kStopped, the number of its last meeting
  uint64_t failed;              // 2 + r: rank r found that it must not go on
  uint64_t reported;            // 1: to this rank's host
  char unused[PYDET_FOLD_SIGNALS - (kMostBlocks * (PYDET_FOLD_RANKS + 1) + 2 + PYDET_FOLD_RANKS) * sizeof(uint64_t)];
  uint64_t word[PYDET_FOLD_RANKS];  // that each rank came with, to the latest fold
};
static_assert(sizeof(Board) == PYDET_FOLD_SIGNALS, "the words are the last ones of the signals");
constexpr uint64_t kTaken = 1ull << 63, kSecondArea = 1ull << 62, kStopped = 1ull << 61;

// What all ranks have alike: a function of the sizes.
struct Plan {
  int64_t share;  // elements of out that a rank folds, but for rank 0
  int64_t first;  // those of rank 0, not more
  int64_t area;   // bytes
  int32_t turns;  // units of a thread in a round
  int32_t rounds;
  int32_t slots;  // for the parts that travel
  uint32_t tag;   // a hash of all of it, and of the call
  bool two_shot;
  bool prefix;   // rank 0 sends the fold of its parts
  int32_t each;  // parts of a rank, whether rank 0 gives them or their sum
  // Of a stream:
  int32_t chunk, chunks;            // units of a block in a chunk, and how many chunks there are
  int32_t units[PYDET_FOLD_RANKS];  // of a block, of each rank's share, at most

  // Of a rank's parts among those that travel.
  __device__ __forceinline__ int first_slot(int rank) const {
    return prefix && rank > 0 ? 1 + (rank - 1) * each : rank * each;
  }
  // Parts of its share that a rank is sent.
  __host__ __device__ __forceinline__ int sent_to(int rank) const { return slots - (prefix && rank == 0 ? 1 : each); }
  // Slots in an area of rank `of` before the results of rank `from`.
  __host__ __device__ __forceinline__ int before_results(int of, int from) const {
    int before = units[of] * sent_to(of);
    for (int rank = 0; rank < from; ++rank) before += rank == of ? 0 : units[rank];
    return before;
  }
  __device__ __forceinline__ int64_t begin_of(int rank) const {
    return two_shot && rank > 0 ? first + (rank - 1) * share : 0;
  }
  __device__ __forceinline__ int64_t end_of(int rank, int64_t n) const {
    const int64_t end = begin_of(rank) + (rank > 0 ? share : first);
    return end < n ? end : n;
  }
};

__device__ __forceinline__ Board &board_of(const Peers &peers, int rank) {
  return *reinterpret_cast<Board *>(peers.memory[rank]);
}

// The rank that is `step` after this one, in a ring: so that not all write to one at a time.
__device__ __forceinline__ int after(const Peers &peers, int step) {
  return peers.rank + step < peers.ranks ? peers.rank + step : peers.rank + step - peers.ranks;
}

// ---- Meetings, and what goes wrong -----------------------------------------------------------------------------------

enum Outcome : uint64_t {
  kMet = 0,
  kDisagrees = PYDET_FOLD_DISAGREES,
  kLate = PYDET_FOLD_LATE,
  kLeft = PYDET_FOLD_LEFT
};

// Asks done() until it holds, or this rank has failed, or it takes too long.
template <class Done> __device__ __forceinline__ Outcome wait_for(const Peers &peers, const Done &done) {
  uint64_t start = 0;
  for (uint32_t asked = 1; !done(); ++asked) {
    if (asked % kAskedBeforeLook) continue;
    if (see_word(&board_of(peers, peers.rank).failed)) return kLeft;
    if (asked % kAskedBeforeTime || !peers.timeout_ms) continue;
    const uint64_t now = nanoseconds();
    start = start ? start : now;
    if (now - start > peers.timeout_ms * uint64_t(1000000)) return kLate;
  }
  return kMet;
}

// The first of this rank's threads that finds something wrong says it, and that rank `other` has to do with it. After a
// rank that waited too long none of the others is to wait.
__device__ __forceinline__ void report(const Peers &peers, Outcome outcome, int other) {
  Board &board = board_of(peers, peers.rank);
  const uint64_t failed = see_word(&board.failed);
  if (take_word(&board.reported, 1) == 0) {
    if (!peers.fault) lose_device();
    peers.fault[1] = failed ? failed - 2 : uint64_t(other);
    put_signal(peers.fault, failed ? kLeft : outcome);
  }
  if (failed == 0) put_signal(&board.failed, uint64_t(2 + peers.rank));
  if (failed || outcome != kLate) return;
  for (int step = 1; step < peers.ranks; ++step)
    put_signal(&board_of(peers, after(peers, step)).failed, uint64_t(2 + peers.rank));
}

// False where this block must not go on.
__device__ __forceinline__ bool meet(const Peers &peers, uint32_t number, uint32_t tag) {
  __syncthreads();
  Outcome outcome = kMet;
  if (int(threadIdx.x) < peers.ranks) {
    const int other = threadIdx.x;
    put_signal(&board_of(peers, other).signal[blockIdx.x][peers.rank], uint64_t(number) << 32 | tag);
    const uint64_t *const signal = &board_of(peers, peers.rank).signal[blockIdx.x][other];
    uint64_t got = 0;
    outcome = wait_for(peers, [&] { return int32_t(uint32_t((got = get_signal(signal)) >> 32) - number) >= 0; });
    if (outcome == kMet && uint32_t(got >> 32) == number && uint32_t(got) != tag) outcome = kDisagrees;
    if (outcome) report(peers, outcome, other);
  }
  return __syncthreads_and(outcome == kMet);
}

// One thread's: the state of this block's number, which is now this launch's; kTaken where it must not go on.
__device__ __forceinline__ uint64_t enter(const Peers &peers) {
  Board &board = board_of(peers, peers.rank);
  uint64_t *const state = &board.state[blockIdx.x], found = kTaken;
  const uint64_t failed = see_word(&board.failed);  // it travels beside the other word
  Outcome outcome = wait_for(peers, [&] { return ((found = take_word(state, kTaken)) & kTaken) == 0; });
  if (outcome == kMet && (failed || found & kStopped)) {
    give_word(state, found);
    outcome = kLeft;
  }
  if (outcome == kMet) return found;
  report(peers, outcome, peers.rank);
  return kTaken;
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
      store_elements(peers.memory[to] + area + (plan.first_slot(peers.rank) + first + s) * part_bytes + slot, v[s]);
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

// Units of a thread that are loaded before the first of them is stored: one at a time, memory rests.
constexpr int kAhead = 4;     // where elements lie by fours: beside others, and a tree, there are no registers for it
constexpr int kTogether = 8;  // parts that are loaded before the first of them is added

// f(i, element, turn) for units i of this block, `begin` to `end`, in a round, from the turn `first` on.
template <int ahead, class F>
__device__ __forceinline__ void each_ahead(const Plan &plan, int round, int first, int64_t begin, int64_t end, F f) {
#pragma unroll
  for (int i = 0; i < ahead; ++i) {
    const int turn = first + i;
    const int64_t unit = (int64_t(round) * plan.turns + turn) * gridDim.x + blockIdx.x;
    const int64_t at = begin + (unit * kThreads + threadIdx.x) * kUnit;
    if (turn < plan.turns && at < end) f(i, at, turn);
  }
}

// This rank's only part, of a round.
template <bool by_four, int ahead>
__device__ __forceinline__ void send_one(const Fold &p, const Plan &plan, int round, int64_t area, int64_t n) {
  const Peers &peers = p.peers;
  for (int step = 1; step < peers.ranks; ++step) {
    const int to = after(peers, step);
    const int64_t begin = plan.begin_of(to), end = plan.end_of(to, n);
    char *const slots = peers.memory[to] + area + plan.first_slot(peers.rank) * int64_t(plan.turns) * kSlot;
    for (int turn = 0; turn < plan.turns; turn += ahead) {
      Elements<4> v[ahead];
      each_ahead<ahead>(plan, round, turn, begin, end,
                        [&](int i, int64_t at, int) { v[i] = load_own(p.parts[0], at, end, by_four); });
      each_ahead<ahead>(plan, round, turn, begin, end, [&](int i, int64_t, int turn) {
        store_elements(slots + int64_t(turn) * kSlot + int64_t(threadIdx.x) * kUnit * int(sizeof(float)), v[i]);
      });
    }
  }
}

// The other ranks' results, of a round, to out.
template <bool by_four, int ahead>
__device__ __forceinline__ void take_results(const Fold &p, const Plan &plan, int round, int64_t area, int64_t n) {
  const Peers &peers = p.peers;
  const int64_t part_bytes = int64_t(plan.turns) * kSlot;
  const int bytes = size_of(p.out.type);
  for (int step = 1; step < peers.ranks; ++step) {
    const int from = after(peers, step);
    const int64_t begin = plan.begin_of(from), end = plan.end_of(from, n);
    const char *const got = peers.memory[peers.rank] + area + (plan.slots + from) * part_bytes;
    for (int turn = 0; turn < plan.turns; turn += ahead) {
      uint4 words[ahead];
      each_ahead<ahead>(plan, round, turn, begin, end, [&](int i, int64_t, int turn) {
        const char *const at = got + int64_t(turn) * kSlot + int64_t(threadIdx.x) * kUnit * bytes;
        if (p.out.type == Type::f32) {
          words[i] = *reinterpret_cast<const uint4 *>(at);
        } else {
          const uint2 two = *reinterpret_cast<const uint2 *>(at);
          words[i] = make_uint4(two.x, two.y, 0, 0);
        }
      });
      each_ahead<ahead>(plan, round, turn, begin, end,
                        [&](int i, int64_t at, int) { store_own(p.out.data, p.out.type, at, end, by_four, words[i]); });
    }
  }
}

// The same a unit at a time, beside the registers of a tree: ptxas 13.0 spills on Hopper where it is inlined, on Ampere where
// it is not.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ / 100 == 9
#define PYDET_APART __noinline__
#else
#define PYDET_APART __forceinline__
#endif
template <bool by_four>
__device__ PYDET_APART void take_slowly(const Fold &p, const Plan &plan, int round, int64_t area, int64_t n) {
  take_results<by_four, 1>(p, plan, round, area, n);
}

// NaN to all that this block has of out: the ranks disagree, or one did not come.
__device__ __noinline__ void spoil(const Fold &p, const Plan &plan) {
  const Peers &peers = p.peers;
  const bool shares = plan.two_shot && !peers.scatter;
  const int64_t n = peers.scatter ? p.size * peers.ranks : p.size;
  for (int rank = shares ? 0 : peers.rank; rank < (shares ? peers.ranks : peers.rank + 1); ++rank) {
    const int64_t begin = plan.begin_of(rank), size = plan.end_of(rank, n) - begin;
    for (int64_t unit = blockIdx.x; unit * kThreads * kUnit < size; unit += gridDim.x) {
      for (int e = 0; e < kUnit; ++e) {
        const int64_t at = (unit * kUnit + e) * kThreads + threadIdx.x;
        if (at < size) store_rounded(p.out.data, p.out.type, (peers.scatter ? 0 : begin) + at, NAN);
      }
    }
  }
}

constexpr int kBlocksHeld = 2;  // by a multiprocessor

// once: of one round, whose kernel has the registers for more loads at a time.
template <bool as_tree, bool by_four, bool once>
__global__ void __launch_bounds__(kThreads, kBlocksHeld)
    fold_peers_kernel(const __grid_constant__ Fold p, const __grid_constant__ Plan plan) {
  __shared__ const char *sources[PYDET_FOLD_PARTS];
  __shared__ uint64_t entered;
  const Peers &peers = p.peers;
  const int rank = peers.rank, ranks = peers.ranks;
  wait_for_previous_kernel();
  const bool meets = ranks > 1, sends = meets && !peers.gathered, shares = meets && plan.two_shot && !peers.scatter;
  const int64_t n = peers.scatter ? p.size * ranks : p.size;
  const int64_t begin = plan.begin_of(rank), end = plan.end_of(rank, n);
  const int64_t out_begin = peers.scatter ? 0 : begin;
  const int64_t part_bytes = int64_t(plan.turns) * kSlot, results = plan.slots * part_bytes;
  // Rank 0's parts lie here, where all others have one slot for their sum.
  const int more = plan.prefix && rank == 0 ? p.count - 1 : 0, folded = plan.slots + more;
  const int own_first = peers.gathered ? 0 : plan.first_slot(rank), own_end = own_first + p.count;

  if (meets && threadIdx.x == 0) entered = enter(peers);
  // Part s of what is folded, at the first element of its own tensor or, of an area, at its first slot.
  for (int s = threadIdx.x; s < folded; s += kThreads) {
    if (s < own_first || s >= own_end) sources[s] = peers.memory[rank] + (s - more) * part_bytes;
    else sources[s] = reinterpret_cast<const char *>(p.parts[s - own_first] + (peers.gathered ? 0 : begin));
  }
  __syncthreads();
  const uint64_t state = meets ? entered : 0;
  if (state & kTaken) {
    spoil(p, plan);
    return;
  }
  if (meets && blockIdx.x == 0 && int(threadIdx.x) < ranks) board_of(peers, threadIdx.x).word[rank] = peers.word;
  uint32_t meeting = uint32_t(state);
  const int first_area = state & kSecondArea ? 1 : 0;
  const auto area_of = [&](int round) {
    return PYDET_FOLD_SIGNALS + (2 * int64_t(blockIdx.x) + (first_area + round) % 2) * plan.area;
  };
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
    if (!as_tree && by_four && p.count == 1) return send_one<by_four, kAhead>(p, plan, round, area, n);
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
  bool met = !meets || meet(peers, ++meeting, plan.tag);

  const int rounds = once ? 1 : plan.rounds;
  for (int round = 0; met && round < rounds; ++round) {
    const bool last = once || round + 1 == rounds;
    if (sends && !last) send_round(round + 1);
    const int64_t area = area_of(round);
    for (int turn = 0; turn < plan.turns; ++turn) {
      const int64_t at = element(round, turn), slot = slot_of(turn, sizeof(float)), out_at = out_begin + at;
      if (begin + at >= end) break;
      Elements<4> start = {};
      const float *out = reinterpret_cast<const float *>(p.out.data);
      if (p.accumulate) start = load_own(out, out_at, out_begin + end - begin, by_four);
      const auto part = [&](int s) {
        if (unsigned(s - own_first) >= unsigned(p.count))  // not this rank's; a register less than two bounds
          return load_elements<4>(reinterpret_cast<const float *>(sources[s] + area + slot));
        return load_own(reinterpret_cast<const float *>(sources[s]), at, end - begin, by_four);
      };
      Elements<4> sum = start;
      if constexpr (once && by_four && !as_tree) {
        for (int s = 0; s < folded; s += kTogether) {  // by address, so that no load waits for another
          Elements<4> v[kTogether];
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            if (s + i >= folded) continue;
            const bool own = unsigned(s + i - own_first) < unsigned(p.count);
            const int64_t there = own ? at * int64_t(sizeof(float)) : area + slot;
            v[i] = load_elements<4>(reinterpret_cast<const float *>(sources[s + i] + there));
          }
#pragma unroll
          for (int i = 0; i < kTogether; ++i)
            if (s + i < folded) sum = sum_of(sum, v[i]);
        }
      } else {
        sum = as_tree ? tree(folded, part, start) : ordered(folded, part, start);
      }
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
    if (meets && (shares || (sends && !last) || (peers.gathered && last))) met = meet(peers, ++meeting, plan.tag);

    if (met && shares && as_tree) take_slowly<by_four>(p, plan, round, area, n);
    if (met && shares && !as_tree) take_results<by_four, by_four ? kAhead : 1>(p, plan, round, area, n);
  }
  if (!met) spoil(p, plan);
  __syncthreads();
  if (meets && threadIdx.x == 0)
    give_word(&board_of(peers, rank).state[blockIdx.x],
              meeting | ((first_area + plan.rounds) % 2 ? kSecondArea : 0) | (met ? 0 : kStopped));
}

// ---- A stream --------------------------------------------------------------------------------------------------------

// Each block has room for all that it is sent, so nothing is waited for but what is folded next. Its warps but the last
//
//   send the parts of the other ranks' shares, a chunk of units after the other
//   fold the chunks of their own share, as they come, and give the results to all
//   take the others' results, as they come
//
// and count up what they have done of a chunk. The last warp sees that count and tells the other ranks, by a signal with
// the chunk's number: so no thread that moves data waits until its stores have arrived. A rank that comes early sends all
// it has. But no signal goes out beyond the first before the other rank's first one is there, with the right tag: whoever
// reads a later number knows, as in the rounds above, that the ranks agree.
constexpr int kMoving = kThreads / 32, kMostChunks = 8;
constexpr int kLeastChunk = 8;  // units; a signal waits until what is before it has arrived, some 3 us
constexpr int kStreamPart = 4;  // of rank 0's share, of two: 1 / (kStreamPart each) of all

template <bool by_four>
__global__ void __launch_bounds__(kThreads + 32, kBlocksHeld)
    fold_stream_kernel(const __grid_constant__ Fold p, const __grid_constant__ Plan plan) {
  __shared__ uint32_t done[2 * kMostChunks], failed;
  __shared__ uint64_t entered;
  const Peers &peers = p.peers;
  const int rank = peers.rank, ranks = peers.ranks, warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int64_t n = p.size;
  wait_for_previous_kernel();
  if (threadIdx.x == 0) entered = enter(peers);
  if (threadIdx.x < 2 * kMostChunks) done[threadIdx.x] = 0;
  if (threadIdx.x == 2 * kMostChunks) failed = 0;
  __syncthreads();
  const uint64_t state = entered;
  if (state & kTaken) {
    if (warp < kMoving) spoil(p, plan);
    return;
  }
  if (blockIdx.x == 0 && int(threadIdx.x) < ranks) board_of(peers, threadIdx.x).word[rank] = peers.word;
  const uint32_t first = uint32_t(state) + 1;  // the first chunk's number
  const int64_t area = PYDET_FOLD_SIGNALS + (2 * int64_t(blockIdx.x) + (state & kSecondArea ? 1 : 0)) * plan.area;

  // A warp's: whether the signal of this number, or a later one, is there from every other rank.
  const auto told = [&](uint32_t number) {
    Outcome outcome = kMet;
    if (lane < ranks && lane != rank) {
      const uint64_t *const signal = &board_of(peers, rank).signal[blockIdx.x][lane];
      uint64_t got = 0;
      outcome = wait_for(peers, [&] { return int32_t(uint32_t((got = get_signal(signal)) >> 32) - number) >= 0; });
      if (outcome == kMet && uint32_t(got >> 32) == number && uint32_t(got) != plan.tag) outcome = kDisagrees;
      if (outcome) report(peers, outcome, lane);
    }
    const bool all = __ballot_sync(~0u, outcome != kMet) == 0;
    if (!all && lane == 0) count_up(&failed);
    return all;
  };

  if (warp == kMoving) {
    for (int c = 0; c < 2 * plan.chunks; ++c) {
      if (lane == 0) wait_for_warps([&] { return see_count(&done[c]) == kMoving || see_count(&failed); });
      __syncwarp();
      if (see_count(&failed) && see_count(&done[c]) != kMoving) break;
      if (lane < ranks && lane != rank)
        put_signal(&board_of(peers, lane).signal[blockIdx.x][rank], uint64_t(first + c) << 32 | plan.tag);
      if (c == 0 && !told(first)) break;
    }
  } else {
    const auto element = [&](int unit) {
      return ((int64_t(unit) * gridDim.x + blockIdx.x) * kThreads + threadIdx.x) * kUnit;
    };
    const auto ends = [&](int c, int of) {
      return (c + 1) * plan.chunk < plan.units[of] ? (c + 1) * plan.chunk : plan.units[of];
    };
    const auto is_done = [&](int c) {
      __syncwarp();
      if (lane == 0) count_up(&done[c]);
    };
    const int64_t at_slot = int64_t(threadIdx.x) * kUnit * int(sizeof(float)), begin = plan.begin_of(rank),
                  end = plan.end_of(rank, n);

    for (int c = 0; c < plan.chunks; ++c) {
      for (int step = 1; step < ranks; ++step) {
        const int to = after(peers, step), sent = plan.sent_to(to), slot = plan.first_slot(rank);
        const int64_t its_begin = plan.begin_of(to), its_end = plan.end_of(to, n);
        const int first_of_mine = slot < plan.first_slot(to) ? slot : slot - (plan.slots - sent);
        char *const slots = peers.memory[to] + area + first_of_mine * int64_t(kSlot) + at_slot;
        const auto part = [&](int s, int64_t at) { return load_own(p.parts[s], at, its_end, by_four); };
        const int last = ends(c, to);
        if (p.count == 1) {
          for (int unit = c * plan.chunk; unit < last; unit += kAhead) {
            Elements<4> v[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
              const int64_t at = its_begin + element(unit + i);
              if (unit + i < last && at < its_end) v[i] = part(0, at);
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
              if (unit + i < last && its_begin + element(unit + i) < its_end)
                store_elements(slots + int64_t(unit + i) * sent * kSlot, v[i]);
          }
          continue;
        }
        for (int unit = c * plan.chunk; unit < last; ++unit) {
          const int64_t at = its_begin + element(unit);
          if (at >= its_end) break;
          char *const its = slots + int64_t(unit) * sent * kSlot;
          const bool sums = plan.prefix && rank == 0;
          Elements<4> sum = {};
          for (int s = 0; s < p.count; s += kAhead) {
            Elements<4> v[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
              if (s + i < p.count) v[i] = part(s + i, at);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
              if (s + i >= p.count) continue;
              if (sums) sum = sum_of(sum, v[i]);
              else store_elements(its + (s + i) * kSlot, v[i]);
            }
          }
          if (sums) store_elements(its, sum);
        }
      }
      is_done(c);
    }

    bool met = true;
    const int sent = plan.sent_to(rank), own_first = plan.first_slot(rank), folded = sent + p.count;
    for (int c = 0; met && c < plan.chunks; ++c) {
      if (!(met = told(first + c))) break;
      for (int unit = c * plan.chunk; unit < ends(c, rank); ++unit) {
        const int64_t at = begin + element(unit);
        if (at >= end) break;
        const char *const slots = peers.memory[rank] + area + int64_t(unit) * sent * kSlot + at_slot;
        // By address, so that loads do not wait for each other behind branches.
        const auto part = [&](int s) {
          const bool own = unsigned(s - own_first) < unsigned(p.count);
          if (own && !by_four) return load_own(p.parts[s - own_first], at, end, by_four);
          const char *const brought = slots + (s < own_first ? s : s - p.count) * kSlot;
          return load_elements<4>(own ? p.parts[s - own_first] + at : reinterpret_cast<const float *>(brought));
        };
        Elements<4> sum = {};
        for (int s = 0; s < folded; s += kTogether) {
          Elements<4> v[kTogether];
#pragma unroll
          for (int i = 0; i < kTogether; ++i)
            if (s + i < folded) v[i] = part(s + i);
#pragma unroll
          for (int i = 0; i < kTogether; ++i)
            if (s + i < folded) sum = sum_of(sum, v[i]);
        }
        if (p.bias.data) {
          int64_t column = at % p.bias_period;
          for (int e = 0; e < kUnit; ++e) {
            if (at + e < end) sum.x[e] = sum.x[e] + load_f32(p.bias.data, p.bias.type, column);
            column = column + 1 == p.bias_period ? 0 : column + 1;
          }
        }
        const uint4 words = packed(sum, p.out.type);
        store_own(p.out.data, p.out.type, at, end, by_four, words);
        for (int step = 1; step < ranks; ++step) {
          const int to = after(peers, step);
          char *const results = peers.memory[to] + area + int64_t(plan.before_results(to, rank) + unit) * kSlot;
          store_packed(results + int64_t(threadIdx.x) * kUnit * size_of(p.out.type), p.out.type, words);
        }
      }
      is_done(plan.chunks + c);
    }

    for (int c = 0; met && c < plan.chunks; ++c) {
      if (!(met = told(first + plan.chunks + c))) break;
      for (int step = 1; step < ranks; ++step) {
        const int from = after(peers, step);
        const int64_t its_begin = plan.begin_of(from), its_end = plan.end_of(from, n);
        const char *const results = peers.memory[rank] + area + int64_t(plan.before_results(rank, from)) * kSlot +
                                    int64_t(threadIdx.x) * kUnit * size_of(p.out.type);
        const int last = ends(c, from);
        for (int unit = c * plan.chunk; unit < last; unit += kAhead) {
          uint4 words[kAhead];
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            if (unit + i >= last || its_begin + element(unit + i) >= its_end) continue;
            const char *const its = results + int64_t(unit + i) * kSlot;
            if (p.out.type == Type::f32) {
              words[i] = *reinterpret_cast<const uint4 *>(its);
            } else {
              const uint2 two = *reinterpret_cast<const uint2 *>(its);
              words[i] = make_uint4(two.x, two.y, 0, 0);
            }
          }
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            const int64_t at = its_begin + element(unit + i);
            if (unit + i < last && at < its_end) store_own(p.out.data, p.out.type, at, its_end, by_four, words[i]);
          }
        }
      }
    }
  }
  __syncthreads();
  if (failed && warp < kMoving) spoil(p, plan);
  __syncthreads();
  if (threadIdx.x == 0)
    give_word(&board_of(peers, rank).state[blockIdx.x],
              (first - 1 + 2 * plan.chunks) | (state & kSecondArea ? 0 : kSecondArea) | (failed ? kStopped : 0));
}

// FNV-1a over 64-bit words.
struct Hash {
  uint64_t value = 0xCBF29CE484222325u;
  void add(int64_t word) { value = (value ^ uint64_t(word)) * 0x100000001B3u, value ^= value >> 29; }
};

// What must be the same on all ranks. Addresses are a rank's own.
uint32_t tag_of(const Fold &p, const Plan &plan, int64_t blocks) {
  const Peers &peers = p.peers;
  Hash hash;
  for (int64_t word :
       {int64_t(peers.word), int64_t(peers.ranks), int64_t(peers.memory_size), p.size, int64_t(plan.each),
        int64_t(peers.first_sums), int64_t(plan.two_shot), int64_t(p.tree), int64_t(p.accumulate),
        int64_t(peers.gathered), int64_t(peers.scatter), int64_t(p.out.type), int64_t(p.bias.data != nullptr),
        p.bias_period, plan.area, int64_t(plan.turns), blocks, int64_t(plan.chunk)})
    hash.add(word);
  return uint32_t(hash.value ^ hash.value >> 32);
}

bool aligned(const void *data, int bytes) { return reinterpret_cast<uintptr_t>(data) % uintptr_t(bytes) == 0; }

// Who folds what, and which parts travel for it.
Plan plan_shares(const Fold &p, bool two_shot, int64_t first_part) {
  const Peers &peers = p.peers;
  const int64_t n = peers.scatter ? p.size * peers.ranks : p.size;
  Plan plan = {};
  plan.two_shot = two_shot;
  plan.each = peers.parts_of_each(p.count);
  plan.share = plan.first = two_shot ? divide_up(n, peers.ranks) : n;
  const bool whole = two_shot && !peers.scatter;  // shares need not be alike
  plan.prefix = peers.first_sums || (whole && p.count > 1 && !p.tree && !p.accumulate && !peers.gathered);
  if (plan.prefix && whole && peers.ranks == 2) {
    plan.first = n / (first_part * plan.each) / (kThreads * kUnit) * (kThreads * kUnit);
    plan.share = n - plan.first;
  }
  plan.slots = peers.gathered ? p.count : plan.prefix ? 1 + plan.each * (peers.ranks - 1) : plan.each * peers.ranks;
  if (peers.ranks > 1) plan.area = int64_t((peers.memory_size - PYDET_FOLD_SIGNALS) / (2 * kMostBlocks)) / 16 * 16;
  return plan;
}

int64_t blocks_for(const Plan &plan) {
  const int64_t wanted = divide_up(plan.share, kThreads * kUnit);
  return wanted < kMostBlocks ? wanted : kMostBlocks;
}

bool lies_by_four(const Fold &p, const Plan &plan, bool two_shot) {
  const int64_t n = p.peers.scatter ? p.size * p.peers.ranks : p.size;
  bool by_four = (plan.first < plan.share || n % p.peers.ranks == 0 || !two_shot) && plan.share % kUnit == 0 &&
                 n % kUnit == 0 && aligned(p.out.data, kUnit * size_of(p.out.type));
  for (int s = 0; s < p.count; ++s) by_four = by_four && aligned(p.parts[s], kUnit * int(sizeof(float)));
  return by_four;
}

pydet_status launch_peers(const Fold &given, bool two_shot) {
  const char *name = two_shot ? "fold_two_shot" : "fold_one_shot";
  DeviceGuard guard(given.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  Fold p = given;
  if (p.peers.ranks == 0) p.peers.ranks = 1;  // without peers: this device alone
  const Peers &peers = p.peers;
  Plan plan = plan_shares(p, two_shot, 2);
  const bool by_four = lies_by_four(p, plan, two_shot);
  const int64_t blocks = blocks_for(plan), blocks_wanted = divide_up(plan.share, kThreads * kUnit);
  Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(blocks)), dim3(kThreads)};
  where.overlaps_previous = true;
  plan.turns = 1;
  for (const int64_t wanted = divide_up(blocks_wanted, blocks); plan.turns < kMostTurns && plan.turns < wanted;) {
    if ((plan.turns + 1) * int64_t(plan.slots + peers.ranks) * kSlot > plan.area) break;
    ++plan.turns;
  }
  plan.rounds = int32_t(divide_up(blocks_wanted, blocks * plan.turns));
  plan.tag = tag_of(p, plan, blocks);
  if (by_four && !p.tree && plan.rounds == 1) return launch(where, fold_peers_kernel<false, true, true>, p, plan);
  if (by_four)
    return launch(where, p.tree ? fold_peers_kernel<true, true, false> : fold_peers_kernel<false, true, false>, p,
                  plan);
  return launch(where, p.tree ? fold_peers_kernel<true, false, false> : fold_peers_kernel<false, false, false>, p,
                plan);
}

// The plan of a stream; false where a block has no room for all it is sent. By the sizes alone.
bool plan_stream(const Fold &p, Plan *plan) {
  const Peers &peers = p.peers;
  *plan = plan_shares(p, true, kStreamPart);
  const int64_t blocks = blocks_for(*plan);
  int most = 0;
  for (int rank = 0; rank < peers.ranks; ++rank) {
    const int64_t begin = rank > 0 ? plan->first + (rank - 1) * plan->share : 0;
    const int64_t size = rank > 0 ? plan->share : plan->first, left = p.size > begin ? p.size - begin : 0;
    const int64_t units = divide_up(divide_up(size < left ? size : left, kThreads * kUnit), blocks);
    if (units * kSlot > plan->area) return false;
    plan->units[rank] = int(units);
    if (plan->units[rank] > most) most = plan->units[rank];
  }
  for (int rank = 0; rank < peers.ranks; ++rank)
    if (int64_t(plan->before_results(rank, peers.ranks)) * kSlot > plan->area) return false;
  const int chunk = int(divide_up(most, kMostChunks));
  plan->chunk = chunk < kLeastChunk ? kLeastChunk : chunk;
  plan->chunks = divide_up(most, plan->chunk);
  plan->tag = tag_of(p, *plan, blocks);
  return true;
}

// Elements of a stream's launch, of which it may take several: a bias begins anew with each. 0: they do not fit.
int64_t elements_of_launch(const Fold &p) {
  const bool in_rows = p.bias.data && p.bias_period < p.size;
  const int64_t step = in_rows ? p.bias_period : kThreads * kUnit;
  Fold some = p;
  for (int64_t launches = 1;; ++launches) {
    const int64_t most = divide_up(divide_up(p.size, launches), step) * step;
    some.size = most < p.size ? most : p.size;
    Plan plan;
    if (plan_stream(some, &plan)) return some.size;
    if (most <= step) return 0;
  }
}

// ---- A rank's own parts, some of which another one brings -------------------------------------------------------------

// Whether the flag is up. It stays up: the host puts it down when all that wait for it have ended.
__device__ __forceinline__ bool flag_is_up(const Peers &peers) {
  uint64_t got = 0;
  Outcome outcome = wait_for(peers, [&] { return (got = get_signal(peers.flag)) != 0; });
  if (outcome == kMet && see_word(&board_of(peers, peers.rank).failed)) outcome = kLeft;
  if (outcome == kMet && got != peers.word) outcome = kDisagrees;
  if (outcome == kMet) return true;
  report(peers, outcome, peers.from);
  put_signal(&board_of(peers, peers.from).failed, uint64_t(2 + peers.rank));
  return false;
}

template <bool by_four> __global__ void __launch_bounds__(kThreads)
    fold_awaited_kernel(const __grid_constant__ Fold p) {
  __shared__ int up;
  wait_for_previous_kernel();
  if (threadIdx.x == 0) up = !p.peers.flag || flag_is_up(p.peers);
  __syncthreads();
  if (p.copies && up && reinterpret_cast<const char *>(p.parts[0]) == p.out.data) return;
  const int64_t step = int64_t(gridDim.x) * kThreads * kUnit;
  for (int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kUnit; at < p.size; at += step) {
    if (p.copies && up) {
      const char *const from = reinterpret_cast<const char *>(p.parts[0]);
      if (by_four && p.out.type == Type::f32) store_elements(p.out.data + at * 4, load_elements<4>(p.parts[0] + at));
      else if (by_four)
        *reinterpret_cast<uint2 *>(p.out.data + at * 2) = *reinterpret_cast<const uint2 *>(from + at * 2);
      else
        for (int e = 0; e < kUnit && at + e < p.size; ++e)
          for (int b = 0; b < size_of(p.out.type); ++b)
            p.out.data[(at + e) * size_of(p.out.type) + b] = from[(at + e) * size_of(p.out.type) + b];
      continue;
    }
    const auto part = [&](int s) { return load_own(p.parts[s], at, p.size, by_four); };
    Elements<4> start = {}, sum = {{NAN, NAN, NAN, NAN}};
    if (p.accumulate) start = load_own(reinterpret_cast<const float *>(p.out.data), at, p.size, by_four);
    if (up) sum = p.tree ? tree(p.count, part, start) : ordered(p.count, part, start);
    if (p.bias.data) {
      int64_t column = at % p.bias_period;
      for (int e = 0; e < kUnit; ++e) {
        if (at + e < p.size) sum.x[e] = sum.x[e] + load_f32(p.bias.data, p.bias.type, column);
        column = column + 1 == p.bias_period ? 0 : column + 1;
      }
    }
    store_own(p.out.data, p.out.type, at, p.size, by_four, packed(sum, p.out.type));
  }
}

}  // namespace

bool fold_awaited_takes(const Fold &p) { return p.peers.ranks == 0 || p.peers.flag; }
pydet_status fold_awaited(const Fold &p) {
  const char *name = "fold_awaited";
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  bool by_four = p.size % kUnit == 0 && aligned(p.out.data, kUnit * size_of(p.out.type));
  for (int s = 0; s < p.count; ++s) by_four = by_four && aligned(p.parts[s], kUnit * int(sizeof(float)));
  const int64_t blocks = divide_up(p.size, kThreads * kUnit), most = 4 * gpu_multiprocessors(p.device.id);
  Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(blocks < most ? blocks : most)),
                  dim3(kThreads)};
  where.overlaps_previous = true;
  return launch(where, by_four ? fold_awaited_kernel<true> : fold_awaited_kernel<false>, p);
}

// One meeting less, ranks times the bytes.
bool fold_one_shot_takes(const Fold &p) { return !p.peers.gathered && !p.peers.scatter && !p.peers.flag; }
bool fold_two_shot_takes(const Fold &p) { return !p.peers.flag; }
bool fold_one_shot_prefers(const Fold &p) {
  return p.size * p.peers.parts_of_each(p.count) * p.peers.ranks <= kOneShotElements;
}
pydet_status fold_one_shot(const Fold &p) { return launch_peers(p, false); }
pydet_status fold_two_shot(const Fold &p) { return launch_peers(p, true); }
bool fold_stream_takes(const Fold &p) {
  const Peers &peers = p.peers;
  if (peers.ranks <= 1 || peers.flag || peers.gathered || peers.scatter || p.tree || p.accumulate) return false;
  return elements_of_launch(p) > 0;
}
pydet_status fold_stream(const Fold &p) {
  const char *name = "fold_stream";
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  const int64_t most = elements_of_launch(p);
  for (int64_t at = 0; at < p.size; at += most) {
    Fold some = p;
    Plan plan;
    some.size = p.size - at < most ? p.size - at : most;
    for (int s = 0; s < p.count; ++s) some.parts[s] += at;
    some.out.data += at * size_of(p.out.type);
    if (p.bias.data && p.bias_period == p.size) {
      some.bias.data += at * size_of(p.bias.type);
      some.bias_period = some.size;
    }
    plan_stream(some, &plan);
    Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(blocks_for(plan))), dim3(kThreads + 32)};
    where.overlaps_previous = true;
    const bool by_four = lies_by_four(some, plan, true);
    if (pydet_status status = launch(where, by_four ? fold_stream_kernel<true> : fold_stream_kernel<false>, some, plan))
      return status;
  }
  return PYDET_OK;
}

}  // namespace pydet
