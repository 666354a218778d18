// What a block of attention has to do: jobs, worked out on the device from the sequences' lengths by the warp that
// loads, and handed to the warpgroups that multiply by slots in shared memory.
#pragma once

#include "gpu/nvidia/sm90/attention/tiles.h"
#include "gpu/nvidia/sm90/pipe/ring.h"

namespace pydet {
namespace {

__device__ __forceinline__ int clamped(int x, int low, int high) { return min(max(x, low), high); }

// One sequence, as extent_of in formulas.h has it: its extents, and where its first query and key lie.
struct Lengths {
  int queries, keys, q_first, k_first;
};
__device__ __forceinline__ Lengths lengths_of(const AttentionPlan &p, int sequence) {
  Lengths x = {p.queries, p.keys, 0, 0};
  if (p.q_start) {
    x.q_first = clamped(p.q_start[sequence], 0, p.queries);
    x.queries = clamped(p.q_start[sequence + 1], x.q_first, p.queries) - x.q_first;
  }
  if (p.k_start) {
    x.k_first = clamped(p.k_start[sequence], 0, p.keys);
    x.keys = clamped(p.k_start[sequence + 1], x.k_first, p.keys) - x.k_first;
  }
  if (p.k_length) x.keys = clamped(p.k_length[sequence], 0, x.keys);
  if (p.first_key) {
    const int first = clamped(p.first_key[sequence], 0, x.keys);
    x.k_first += first, x.keys -= first;
  }
  return x;
}

__device__ __forceinline__ int tiles_of(const AttentionPlan &p, const Lengths &x) {
  return (x.queries + p.job_queries - 1) / p.job_queries;
}
__device__ __forceinline__ int segments_of(const AttentionPlan &p, int keys) {
  return max((keys + p.segment_keys - 1) / p.segment_keys, 1);
}
// Jobs of a sequence for each of its job_heads.
__device__ __forceinline__ int units_of(const AttentionPlan &p, const Lengths &x) {
  return tiles_of(p, x) * (p.split ? segments_of(p, x.keys) : 1);
}

struct Job {
  int sequence, head;  // the first of its heads
  int query, segment;  // the first of its queries; where split
  int begin, end;      // blocks of keys; at least one
  int queries, keys;   // of the sequence
  int q_first, k_first;
};

// The keys that query `first` sees from, and `last` to, of those the sequence has.
struct Keys {
  int begin, end;
};
__device__ __forceinline__ Keys keys_of(const AttentionPlan &p, const Job &job, int first, int last) {
  const int place = job.keys - job.queries;
  return {max(place + first - p.left, 0), min(place + last + p.right, job.keys - 1) + 1};
}

template <int n, int sharers = 1>
__device__ __forceinline__ Job job_of(const AttentionPlan &p, const Lengths &x, int sequence, int unit, int head_job) {
  Job job;
  job.sequence = sequence, job.head = (head_job * sharers + (sharers > 1 ? int(blockIdx.x) % sharers : 0)) * p.pack;
  const int tiles = p.split ? tiles_of(p, x) : 0;
  job.segment = p.split ? unit / tiles : 0;
  job.query = (unit - job.segment * tiles) * p.job_queries;
  job.queries = x.queries, job.keys = x.keys, job.q_first = x.q_first, job.k_first = x.k_first;
  const Keys keys = keys_of(p, job, job.query, min(job.query + p.job_queries, job.queries) - 1);
  job.begin = keys.begin / n, job.end = (keys.end + n - 1) / n;
  if (p.split) {
    job.begin = max(job.begin, job.segment * p.segment_blocks);
    job.end = min(job.end, (job.segment + 1) * p.segment_blocks);
  }
  if (job.end <= job.begin) {  // nothing to see: one block of which all is masked
    if (p.split) job.begin = min(job.begin, (job.segment + 1) * p.segment_blocks - 1);
    job.end = job.begin + 1;
  }
  return job;
}

// Which job a number is, all lanes of a warp together: of numbers that rise from one to the next.
//
// Of sequences of one size: in the order of units from the last to the first, of all sequences, of all heads, in sections
// of heads, the keys and values of which the L2 holds. So tiles that see many keys come first, and those that read the
// same keys stand together. Of others: units that see at least half as many keys as any first, one sequence after another
// and each in that order, then those that see at least a quarter, and so on; or, where they are split, all sequences that
// have a unit before those that have the one below it.
template <int n, int sharers = 1> class Walk {
 public:
  __device__ __forceinline__ explicit Walk(const AttentionPlan &plan) : p(plan) {
    if (p.uniform) {
      level = units_of(p, lengths_of(p, 0));
    } else if (p.in_turn) {
      for (int i = 0; i < p.sequences; i += 32) {
        const int sequence = i + int(threadIdx.x % 32);
        if (sequence < p.sequences) sizes |= sizes_of(lengths_of(p, sequence));
      }
      sizes = __reduce_or_sync(0xFFFFFFFFu, sizes);
      chunk = p.sequences;
    } else {
      for (int i = 0; i < p.sequences; i += 32) level = max(level, int(__reduce_max_sync(0xFFFFFFFFu, units(i))));
    }
  }

  // False: there is none, nor any behind it.
  __device__ __forceinline__ bool find(int number, Job *job) {
    if (p.uniform) {
      const int pairs = p.sequences * p.job_heads, section = number / (p.section * level), first = section * p.section;
      if (first >= pairs) return false;
      const int rest = number - first * level, here = min(p.section, pairs - first), down = rest / here;
      if (down >= level) return false;
      const int pair = first + rest - down * here, sequence = pair / p.job_heads;
      *job = job_of<n, sharers>(p, lengths_of(p, sequence), sequence, level - 1 - down, pair - sequence * p.job_heads);
    } else if (p.in_turn) {
      for (int all; all = __shfl_sync(0xFFFFFFFFu, jobs, 31), number - before >= all;) {
        before = min(before + all, kMostJobs);
        if (!next_chunk()) return false;
      }
      const int which = __ffs(int(__ballot_sync(0xFFFFFFFFu, number - before < jobs))) - 1,
                ahead = __shfl_sync(0xFFFFFFFFu, jobs, max(which - 1, 0)), sequence = chunk + which;
      const Lengths x = lengths_of(p, sequence);
      const int top = units_below(x, level + 1), height = top - units_below(x, level), section = section_of(x.keys),
                own = number - before - (which ? ahead : 0), first = own / (section * height) * section,
                rest = own - first * height, here = min(section, p.job_heads - first), down = rest / here;
      *job = job_of<n, sharers>(p, x, sequence, top - 1 - down, first + rest - down * here);
    } else {
      while (number - level_first >= level_sequences * p.job_heads) {
        if (--level < 0) return false;
        level_first += level_sequences * p.job_heads;
        level_sequences = 0;
        for (int i = 0; i < p.sequences; i += 32) level_sequences += __popc(having(i));
      }
      int rank = (number - level_first) / p.job_heads, i = 0;
      const int head_job = number - level_first - rank * p.job_heads;
      uint32_t who = having(0);
      while (rank >= __popc(who)) rank -= __popc(who), i += 32, who = having(i);
      for (; rank > 0; --rank) who &= who - 1;
      const int sequence = i + __ffs(int(who)) - 1;
      *job = job_of<n, sharers>(p, lengths_of(p, sequence), sequence, level, head_job);
    }
    return true;
  }

 private:
  const AttentionPlan &p;
  int level = 0, level_first = 0, level_sequences = 0;
  // In turn: the sizes that are left, of which `level` is at hand, of it 32 sequences, the jobs before them, and those of
  // them up to this lane's. Lengths that overlap may have more jobs than are counted.
  static constexpr int kMostJobs = (1 << 30) - 1;
  uint32_t sizes = 0;
  int chunk = 0, before = 0, jobs = 0;

  // Of this lane's among the 32 sequences from i on.
  __device__ __forceinline__ int units(int i) const {
    const int sequence = i + int(threadIdx.x % 32);
    return sequence < p.sequences ? units_of(p, lengths_of(p, sequence)) : 0;
  }
  // Which of them have a unit `level`.
  __device__ __forceinline__ uint32_t having(int i) const { return __ballot_sync(0xFFFFFFFFu, units(i) > level); }

  // In powers of two.
  __device__ __forceinline__ static int size_of(int keys) { return 31 - __clz(max(keys, 0) | 127); }
  // Those of a sequence's units: a bit each.
  __device__ __forceinline__ uint32_t sizes_of(const Lengths &x) const {
    if (x.queries == 0) return 0;
    const int least =
        p.right >= x.queries ? x.keys : min(x.keys - x.queries + min(p.job_queries, x.queries) + p.right, x.keys);
    return (2u << min(size_of(x.keys), p.most_size)) - (1u << min(size_of(least), p.most_size));
  }
  // How many of them are below one.
  __device__ __forceinline__ int units_below(const Lengths &x, int size) const {
    const int all = units_of(p, x);
    if (size > p.most_size || size > size_of(x.keys)) return all;
    if (size <= size_of(0) || p.right >= x.queries) return 0;
    return clamped(((1 << size) - 1 - (x.keys - x.queries) - p.right) / p.job_queries, 0, all);
  }
  // The 32 sequences that follow, or the first of the size below.
  __device__ __forceinline__ bool next_chunk() {
    if (chunk += 32; chunk >= p.sequences) {
      chunk = 0;
      if (level) sizes &= ~(1u << level);
      if (!sizes) return false;
      level = 31 - __clz(int(sizes));
    }
    const int sequence = chunk + int(threadIdx.x % 32);
    jobs = 0;
    if (sequence < p.sequences) {
      const Lengths x = lengths_of(p, sequence);
      jobs = min((units_below(x, level + 1) - units_below(x, level)) * p.job_heads, kMostJobs);
    }
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int lower = __shfl_up_sync(0xFFFFFFFFu, jobs, i);
      if (int(threadIdx.x % 32) >= i) jobs = min(jobs + lower, kMostJobs);
    }
    return true;
  }
  // Jobs of a unit that stand together, of a sequence of so many keys.
  __device__ __forceinline__ int section_of(int keys) const {
    const int groups = p.heads / p.group_heads;
    if (keys > p.most_held || keys <= p.most_held / groups) return p.job_heads;
    const int sections = (groups + max(p.held / keys, 1) - 1) / max(p.held / keys, 1);
    return (groups + sections - 1) / sections * (p.group_heads / (p.pack * sharers));
  }
};

// The numbers of this block's jobs, and of those that share its keys. They are taken in turns, every second time around
// from the last block to the first: so none has the larger one each time. Or each takes the next of all when it has need of
// one, which the warp that finds jobs does; what number followed which is then written down.
template <int sharers = 1> class Numbers {
 public:
  __device__ __forceinline__ explicit Numbers(const AttentionPlan &plan) : p(plan), number(int(blockIdx.x) / sharers) {}
  __device__ __forceinline__ int now() const { return number; }
  // Of the warp that finds jobs, some time before it goes on to the next.
  __device__ __forceinline__ void ask() {
    if (counted() && threadIdx.x % 32 == 0) asked = atomicAdd(p.taken, 1);
  }
  __device__ __forceinline__ void take() {
    if (!counted()) return turn();
    const int next = int(gridDim.x) + __shfl_sync(0xFFFFFFFFu, asked, 0);
    if (threadIdx.x % 32 == 0 && number < p.numbers) p.followed[number] = next;
    number = next;
  }
  // Of others, later.
  __device__ __forceinline__ void follow() {
    if (!counted()) return turn();
    number = number < p.numbers ? p.followed[number] : p.numbers;
  }

 private:
  const AttentionPlan &p;
  int number, asked = 0;  // or asked: how often it was this block's turn
  __device__ __forceinline__ bool counted() const { return sharers == 1 && p.taken; }
  __device__ __forceinline__ void turn() {
    const int blocks = int(gridDim.x) / sharers, block = int(blockIdx.x) / sharers;
    number = ++asked * blocks + (asked % 2 ? blocks - 1 - block : block);
  }
};

// A ring of jobs. A slot whose `end` is 0 holds none and follows the last.
template <class S> struct AttentionSlots {
  uint32_t slots, full_barriers, empty_barriers;

  __device__ __forceinline__ uint32_t slot(int turn) const { return slots + turn % S::kSlots * S::kSlotBytes; }
  __device__ __forceinline__ uint32_t full(int turn) const { return full_barriers + turn % S::kSlots * 8; }
  __device__ __forceinline__ uint32_t empty(int turn) const { return empty_barriers + turn % S::kSlots * 8; }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < S::kSlots; ++i) barrier_init(full(i), 1), barrier_init(empty(i), S::slot_warps);
  }

  // All lanes of the warp that finds jobs.
  __device__ __forceinline__ void put(int turn, const Job &job) const {
    barrier_wait(empty(turn), (turn / S::kSlots & 1) ^ 1);
    if (threadIdx.x % 32 == 0) {
      const uint32_t at = slot(turn);
      asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(job.sequence), "r"(job.head),
                   "r"(job.query), "r"(job.segment)
                   : "memory");
      asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(at + 16), "r"(job.begin), "r"(job.end),
                   "r"(job.queries), "r"(job.keys)
                   : "memory");
      asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(at + 32), "r"(job.q_first), "r"(job.k_first) : "memory");
      barrier_arrive(full(turn));
    }
  }

  // All threads that multiply or load.
  __device__ __forceinline__ void wait(int turn) const { barrier_wait(full(turn), turn / S::kSlots & 1); }
  __device__ __forceinline__ Job look(int turn) const {
    Job job;
    const uint32_t at = slot(turn);
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(job.sequence), "=r"(job.head), "=r"(job.query), "=r"(job.segment)
                 : "r"(at)
                 : "memory");
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(job.begin), "=r"(job.end), "=r"(job.queries), "=r"(job.keys)
                 : "r"(at + 16)
                 : "memory");
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(job.q_first), "=r"(job.k_first) : "r"(at + 32) : "memory");
    return job;
  }
  __device__ __forceinline__ void give_back(int turn) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(turn));
  }
};

// Of the warpgroups that multiply. Asked for again where it is seldom wanted: else what can be worked out from it is
// kept in registers through the loop over blocks.
__device__ __forceinline__ int thread_number() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
// The first of a thread's two rows of its warpgroup.
__device__ __forceinline__ int row_of(int thread) { return thread % kWarpgroup / 32 * kWarpRows + thread % 32 / 4; }

// Where the parts of a block's shared memory lie.
template <class S> struct Layout {
  uint32_t base;
  __device__ __forceinline__ uint32_t q(int warpgroup) const { return base + S::q_at + warpgroup * S::q_bytes; }
  __device__ __forceinline__ uint32_t stage(int i) const { return base + S::ring_at + i * S::stage_bytes; }
  __device__ __forceinline__ uint32_t q_full(int warpgroup) const { return base + S::q_full_at + warpgroup * 8; }
  __device__ __forceinline__ uint32_t q_empty(int warpgroup) const { return base + S::q_empty_at + warpgroup * 8; }
  __device__ __forceinline__ uint32_t full(int i) const { return base + S::full_at + i * 8; }
  __device__ __forceinline__ uint32_t empty(int i) const { return base + S::empty_at + i * 8; }
  __device__ __forceinline__ uint32_t late() const { return base + S::late_at; }
  __device__ __forceinline__ AttentionSlots<S> slots() const {
    return {base + S::slots_at, base + S::slot_full_at, base + S::slot_empty_at};
  }
};

}  // namespace
}  // namespace pydet
