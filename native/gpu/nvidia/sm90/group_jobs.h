// How grouped.cu's clusters share out the tiles of all groups, which each block works out from the boundaries as it
// starts.
//
// A cluster's job is a tile for each of its two blocks, S::m by S::n of out. Two under each other are a pair, which
// share b. A group's rows are cut into pairs; if what is left fits one tile, two of those side by side, which share a,
// are a strip.
#pragma once

#include "gpu/nvidia/sm90/groups.h"

namespace pydet {
namespace {

constexpr int kCluster = 2;
constexpr int kBandRows = 2048;  // of a group that are walked together, for the L2
constexpr int kTableInts = 3 * kGroupedMostGroups + 32;

// What each group has: its tokens [first, last), and the clusters' jobs up to its end.
struct Groups {
  int *first, *last, *jobs;
};

__device__ __forceinline__ int cut(int extent, int size) { return (extent + size - 1) / size; }

// How the rows of a group are shared out: pairs of tiles, and whether a strip is left.
template <class S> struct Share {
  int pairs;
  bool strip;
  __device__ __forceinline__ explicit Share(int rows) : pairs(rows / (2 * S::m)), strip(false) {
    const int rest = rows - pairs * 2 * S::m;
    if (rest > S::m) ++pairs;
    else strip = rest > 0;
  }
  __device__ __forceinline__ int jobs(int columns) const { return pairs * columns + (strip ? cut(columns, 2) : 0); }
};

// Fills the table, as GroupWalk would (grouped.h): a group begins where the latest before it with tokens ended, which
// is the greatest end so far of those that lie after their start. All threads.
template <class S> __device__ __forceinline__ void find_groups(const GroupedProblem &p, const Groups &groups,
                                                               int *sums) {
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  constexpr int kWarps = S::threads / 32;
  static_assert(2 * kWarps <= 32, "kTableInts has room");
  int reached = 0, jobs = 0;
  for (int base = 0; base < p.groups; base += S::threads) {
    const int g = base + thread;
    int start = 0, end = 0;
    if (g < p.groups) {
      end = min(p.end[g], p.tokens);
      if (p.start) start = max(0, min(p.start[g], p.tokens));
    }
    int most = end > start ? end : 0;
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, most, d);
      if (lane >= d) most = max(most, other);
    }
    if (lane == 31) sums[warp] = most;
    __syncthreads();
    int before = __shfl_up_sync(0xFFFFFFFFu, most, 1);
    before = lane ? max(before, reached) : reached;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before = max(before, sums[w]);
      reached = max(reached, sums[w]);
    }
    const int first = max(before, start), last = max(first, end);
    const int own = g < p.groups ? Share<S>(S::depth ? p.m : last - first).jobs(p.columns) : 0;
    int sum = own;
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) sums[kWarps + warp] = sum;
    __syncthreads();
    sum += jobs;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) sum += sums[kWarps + w];
      jobs += sums[kWarps + w];
    }
    if (g < p.groups) groups.first[g] = first, groups.last[g] = last, groups.jobs[g] = sum;
  }
  __syncthreads();
}

// A block's tile: rows [row, end) and the columns from `column` on are its own to store. In depth rows are those of
// every group's product.
struct Spot {
  int group, row, end, column;
  bool strip;
};

// The job `index` of all, for the block `rank` of the cluster; its group is `group` or a later one.
template <class S>
__device__ __forceinline__ Spot spot_of(const GroupedProblem &p, const Groups &groups, int group, int index, int rank) {
  for (int high = p.groups - 1; group < high && groups.jobs[group] <= index;) {
    const int middle = (group + 1 + high) / 2;
    if (groups.jobs[middle - 1] <= index) group = middle;
    else high = middle - 1;
  }
  constexpr int kBand = kBandRows / (2 * S::m);
  const int base = S::depth ? 0 : groups.first[group];
  const int rows = S::depth ? p.m : groups.last[group] - base;
  const Share<S> share(rows);
  const int i = index - (group ? groups.jobs[group - 1] : 0);
  // Bands of pairs; the last one has the strip. In a band two columns at a time, the strip's part of them after them.
  const int bands = max(1, cut(share.pairs, kBand)), band = min(i / (kBand * p.columns), bands - 1);
  const int here = min(kBand, share.pairs - band * kBand), within = i - band * kBand * p.columns;
  const int per_two = 2 * here + (share.strip && band == bands - 1), two = within / per_two;
  const int r = within - two * per_two;
  if (r < here * min(2, p.columns - 2 * two))
    return {group, base + ((band * kBand + r % here) * 2 + rank) * S::m, base + rows, (2 * two + r / here) * S::n,
            false};
  return {group, base + share.pairs * 2 * S::m, base + rows, (2 * two + rank) * S::n, true};
}

}  // namespace
}  // namespace pydet
