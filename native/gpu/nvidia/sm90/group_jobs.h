// How the clusters of grouped.cu and scaled_groups.cu share out the tiles of all groups, which each block works out from
// the boundaries as it starts.
//
// A cluster's job is a tile for each of its two blocks, S::m by S::n of out. Two under each other are a pair, which
// share b. A group's rows are cut into pairs; if what is left fits one tile, two of those side by side, which share a,
// are a strip.
#pragma once

#include "gpu/nvidia/sm90/groups.h"
#include "gpu/nvidia/sm90/pipe/jobs.h"

namespace pydet {
namespace {

constexpr int kCluster = 2;
constexpr uint16_t kBoth = 3;    // blocks of the cluster
constexpr int kSlots = 4;        // tiles that the producer may be ahead
constexpr int kBandRows = 2048;  // of a group that are walked together, for the L2
constexpr int table_ints(int groups) { return 4 * groups + 64; }

// What each group has: its tokens [first, last), and the clusters' jobs up to its end, of groups that have pairs and of
// those that have none. The latter wait for the memory, the former for the tensor cores, so they take turns.
struct Groups {
  int *first, *last, *large, *small;
  int large_jobs, jobs;
};

__device__ __forceinline__ int divide_up_int(int extent, int size) { return (extent + size - 1) / size; }

// How the rows of a group are shared out: pairs of tiles, and whether a strip is left.
template <class S> struct Share {
  int pairs;
  bool strip;
  __device__ __forceinline__ explicit Share(int rows) : pairs(rows / (2 * S::m)), strip(false) {
    const int rest = rows - pairs * 2 * S::m;
    if (rest > S::m) ++pairs;
    else strip = rest > 0;
  }
  __device__ __forceinline__ int jobs(int columns) const {
    return pairs * columns + (strip ? divide_up_int(columns, 2) : 0);
  }
};

// What the threads before this one have, joined to *all, which becomes that of all threads. `scratch` is a word a warp.
template <int warps, class F> __device__ __forceinline__ int scan(int x, F join, int *scratch, int *all) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, x, d);
    if (lane >= d) x = join(x, other);
  }
  if (lane == 31) scratch[warp] = x;
  __syncthreads();
  int before = *all;
  for (int w = 0; w < warps; ++w) {
    if (w < warp) before = join(before, scratch[w]);
    *all = join(*all, scratch[w]);
  }
  const int beside = __shfl_up_sync(0xFFFFFFFFu, x, 1);
  return lane ? join(before, beside) : before;
}

// Fills the table, as GroupWalk would (grouped.h): a group begins where the latest before it with tokens ended, which
// is the greatest end so far of those that lie after their start. Those before first_group count for that alone.
// All threads.
template <class S> __device__ __forceinline__ Groups find_groups(const GroupedProblem &p, int *table) {
  constexpr int kWarps = S::threads / 32, kMost = S::most_groups;
  static_assert(kWarps <= 16, "the table has room");
  Groups groups = {table, table + kMost, table + 2 * kMost, table + 3 * kMost, 0, 0};
  int *scratch = table + 4 * kMost, reached = 0, small_jobs = 0;
  const auto most = [](int x, int y) { return max(x, y); };
  const auto sum = [](int x, int y) { return x + y; };
  const int all = p.first_group + p.groups;
  for (int base = 0; base < all; base += S::threads) {
    const int g = base + int(threadIdx.x), own = g - p.first_group;
    const bool is_own = own >= 0 && g < all;
    int start = 0, end = 0;
    if (g < all) {
      end = min(p.end[g], p.tokens);
      if (p.start) start = max(0, min(p.start[g], p.tokens));
    }
    const int before = scan<kWarps>(end > start ? end : 0, most, scratch, &reached);
    const int first = max(before, start), last = max(first, end);
    const Share<S> share(!is_own ? 0 : S::depth ? p.m : last - first);
    const int jobs = share.jobs(p.columns), large = share.pairs ? jobs : 0, small = jobs - large;
    const int large_before = scan<kWarps>(large, sum, scratch + 16, &groups.large_jobs);
    const int small_before = scan<kWarps>(small, sum, scratch + 32, &small_jobs);
    if (is_own) {
      groups.first[own] = first, groups.last[own] = last;
      groups.large[own] = large_before + large, groups.small[own] = small_before + small;
    }
  }
  groups.jobs = groups.large_jobs + small_jobs;
  __syncthreads();
  return groups;
}

// A block's tile: rows [row, end) and the columns from `column` on are its own to store, and k runs over `depth` from
// `first` on. In depth rows are those of every group's product, and k is its tokens.
struct Spot {
  int group, row, end, column, first, depth;
  bool strip;
};
constexpr int kNoGroup = -1;  // of what comes after the last tile

// The job `index` of all, for the block `rank` of the cluster.
template <class S>
__device__ __forceinline__ Spot spot_of(const GroupedProblem &p, const Groups &groups, int index, int rank) {
  const int large = int(int64_t(index) * groups.large_jobs / groups.jobs);  // that come before it
  const bool is_large = int64_t(index + 1) * groups.large_jobs / groups.jobs > large;
  const int *ends = is_large ? groups.large : groups.small, number = is_large ? large : index - large;
  int group = 0;  // the first whose jobs end after this one
  for (int high = p.groups - 1; group < high;) {
    const int middle = (group + high) / 2;
    if (ends[middle] > number) high = middle;
    else group = middle + 1;
  }
  constexpr int kBand = kBandRows / (2 * S::m);
  const int base = S::depth ? 0 : groups.first[group];
  const int tokens = groups.last[group] - groups.first[group], rows = S::depth ? p.m : tokens;
  const int first = S::depth ? groups.first[group] : 0, depth = S::depth ? tokens : p.k;
  const Share<S> share(rows);
  const int i = number - (group ? ends[group - 1] : 0);
  // Bands of pairs; the last one has the strip. In a band two columns at a time, the strip's part of them after them.
  const int bands = max(1, divide_up_int(share.pairs, kBand)), band = min(i / (kBand * p.columns), bands - 1);
  const int here = min(kBand, share.pairs - band * kBand), within = i - band * kBand * p.columns;
  const int per_two = 2 * here + (share.strip && band == bands - 1), two = within / per_two;
  const int r = within - two * per_two;
  if (r < here * min(2, p.columns - 2 * two))
    return {p.first_group + group,
            base + ((band * kBand + r % here) * 2 + rank) * S::m,
            base + rows,
            (2 * two + r / here) * S::n,
            first,
            depth,
            false};
  return {
      p.first_group + group, base + share.pairs * 2 * S::m, base + rows, (2 * two + rank) * S::n, first, depth, true};
}

// The tiles that the producer has begun; what has no group follows the last.
struct SpotSlots : Slots<kSlots, int> {
  Spot *spots;
  int turn = 0;

  __device__ __forceinline__ void put(const Spot &spot) {
    wait_empty(turn);
    spots[turn % kSlots] = spot;
    barrier_arrive(full(turn));
    ++turn;
  }
  // All threads of the consumers: the tile, which stays until it is given back.
  __device__ __forceinline__ const Spot &look() const {
    wait_full(turn);
    return spots[turn % kSlots];
  }
  __device__ __forceinline__ void give_back() {
    Slots::give_back(turn);
    ++turn;
  }
  __device__ __forceinline__ Spot take() {
    const Spot spot = look();
    give_back();
    return spot;
  }
};

}  // namespace
}  // namespace pydet
