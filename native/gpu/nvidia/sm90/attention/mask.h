// Which keys a row of attention may see.
#pragma once

#include "gpu/nvidia/sm90/attention/jobs.h"

namespace pydet {
namespace {

// The query of a row of a warpgroup's tile, and its head among those of the job; none where it is not below
// warpgroup_queries.
struct RowPlace {
  int query, head;
};
__device__ __forceinline__ RowPlace row_place(const AttentionPlan &p, int row) {
  const int query = p.pack == 1 ? row : row / p.pack;
  return {query, row - query * p.pack};
}

// What the rows of a warpgroup see of a job's keys: the blocks of which any row sees a key, at least one, and the keys
// that all of them see.
struct Sight {
  int begin, end;
  int whole_begin, whole_end;
};
// The last key that any of them sees.
__device__ __forceinline__ int last_in_sight(const AttentionPlan &p, const Job &job, int warpgroup) {
  const int last = min(job.query + (warpgroup + 1) * p.warpgroup_queries, job.queries) - 1;
  return keys_of(p, job, last, last).end - 1;
}
template <class S>
__device__ __forceinline__ Sight sight_of(const AttentionPlan &p, const Job &job, int warpgroup) {
  const int most = job.queries - 1, first = min(job.query + warpgroup * p.warpgroup_queries, most),
            last = min(first + p.warpgroup_queries - 1, most);
  const Keys low = keys_of(p, job, first, first), high = keys_of(p, job, last, last);
  Sight x;
  x.begin = min(max(low.begin / S::n, job.begin), job.end - 1);
  x.end = max(min((high.end + S::n - 1) / S::n, job.end), x.begin + 1);
  x.whole_begin = high.begin, x.whole_end = low.end;
  return x;
}

// Scores of keys that a row does not see become -Inf. s[4 i + 2 h + e] is that of row `row` + 8 h, key `first` + 8 i +
// e.
template <int registers>
__device__ __forceinline__ void mask_scores(const AttentionPlan &p, const Job &job, float (&s)[registers],
                                            int first_query, int row, int first) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = min(first_query + row_place(p, row + 8 * h).query, job.queries - 1);
    const Keys keys = keys_of(p, job, query, query);
    const int from = keys.begin - first, to = keys.end - first;
#pragma unroll
    for (int i = 0; i < registers / 4; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * i + e < from || 8 * i + e >= to) s[4 * i + 2 * h + e] = -INFINITY;
  }
}

}  // namespace
}  // namespace pydet
