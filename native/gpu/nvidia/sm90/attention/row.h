// One row of attention by one warp, from memory: slow, and exact in what the tiles are not. A key that the row does
// not see has no part in it, whatever its value holds; in a tile a weight of 0 makes NaN of an Inf. So a row of a
// tile's that is not finite is done again here.
#pragma once

#include "gpu/nvidia/sm90/attention/mask.h"
#include "gpu/nvidia/sm90/attention/softmax.h"

namespace pydet {
namespace {

// Of the parts of a split problem.
__device__ __forceinline__ int64_t part_of(const AttentionPlan &p, int segment, int sequence, int token, int head) {
  const int64_t row = (p.q_start ? token : int64_t(sequence) * p.queries + token) * p.heads + head;
  return segment * p.part_count + row;
}

__device__ __forceinline__ char *result_at(const AttentionPlan &p, int sequence, int token, int head) {
  return p.out.data + 2 * (sequence * p.out.sequence_stride + head * p.out.head_stride + token * p.out.token_stride);
}

// Whether the row has a result that is not finite. All lanes of a warp.
template <Type type> __device__ __forceinline__ bool row_is_finite(const AttentionPlan &p, const char *row) {
  bool finite = true;
  for (int i = int(threadIdx.x % 32); i < p.e; i += 32) {
    const float x = Element<type>::to_f32(reinterpret_cast<const uint16_t *>(row)[i]);
    finite &= x - x == 0.0f;
  }
  return __all_sync(0xFFFFFFFFu, finite);
}

// All 16 rows of the products' left operands are this one: so a lane has the scores and weights of the keys whose
// values it loads. n: keys of a block.
template <Type type, int n>
__device__ __noinline__ void compute_row(const AttentionPlan &p, const Lengths x, int sequence, int query, int head) {
  const int lane = int(threadIdx.x % 32), pair = lane % 4 * 2, group = head / p.group_heads;
  const uint16_t *q = reinterpret_cast<const uint16_t *>(p.in_q.data) + sequence * p.in_q.sequence_stride +
                      head * p.in_q.head_stride + (x.q_first + query) * p.in_q.token_stride;
  const auto vector = [&](const Heads &heads, int key) {
    const int place = x.k_first + key;
    int64_t at = sequence * heads.sequence_stride + place * heads.token_stride;
    if (p.pages) {
      const int page = clamped(p.pages[sequence * p.pages_stride + place / p.page_size], 0, p.page_count - 1);
      at = page * heads.sequence_stride + place % p.page_size * heads.token_stride;
    }
    return reinterpret_cast<const uint16_t *>(heads.data) + at + group * heads.head_stride;
  };
  const auto two = [&](const uint16_t *from, int i) {  // elements i and i + 1, +0 past the last
    return i < p.d ? *reinterpret_cast<const uint32_t *>(from + i) : 0u;
  };
  Job job = {};
  job.queries = x.queries, job.keys = x.keys;
  const Keys keys = keys_of(p, job, query, query);

#pragma unroll 1
  for (int column = 0; column < p.e; column += 8) {
    float total[4];
    Totals totals;
    totals.clear();
#pragma unroll 1
    for (int segment = keys.begin / p.segment_keys; segment * p.segment_keys < keys.end; ++segment) {
      const int begin = max(keys.begin, segment * p.segment_keys), end = min(keys.end, (segment + 1) * p.segment_keys);
      float o[4] = {0, 0, 0, 0};
      RowSums sums;
      sums.clear();
#pragma unroll 1
      for (int block = begin / n; block * n < end; ++block) {
        float s[n / 2];
#pragma unroll 1
        for (int i = 0; i < n / 8; ++i) {
          float c[4] = {0, 0, 0, 0};
          const int key = block * n + 8 * i + lane / 4;
          const uint16_t *k = vector(p.in_k, clamped(key, begin, end - 1));
          for (int step = 0; step < p.d; step += 16) {
            const uint32_t low = two(q, step + pair), high = two(q, step + 8 + pair);
            mma<type>(c, {low, low, high, high}, two(k, step + pair), two(k, step + 8 + pair));
          }
#pragma unroll
          for (int j = 0; j < n / 8; ++j)
            if (i == j) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const int at = block * n + 8 * j + pair + e % 2;
                s[4 * j + e] = at >= begin && at < end ? c[e] : -INFINITY;
              }
            }
        }
        bool out[n / 8][2];  // keys that have no part in the row
#pragma unroll
        for (int i = 0; i < n / 8; ++i) out[i][0] = s[4 * i] == -INFINITY, out[i][1] = s[4 * i + 1] == -INFINITY;
        Step step;
        move_references(s, sums.m, p.c, step);
        weigh_scores<0, 8>(s, p.c, step);
        scale_sums(sums.l, step);
#pragma unroll
        for (int i = 0; i < n / 2; ++i) sums.l[i / 2 % 2][i % 2] = sums.l[i / 2 % 2][i % 2] + s[i];
#pragma unroll
        for (int e = 0; e < 4; ++e) o[e] = o[e] * step.worth[0];
#pragma unroll
        for (int i = 0; i < n / 16; ++i) {
          uint32_t v[2];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            uint32_t word = 0;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int key = block * n + 16 * i + 8 * k + pair + e;
              if (!out[2 * i + k][e])
                word |= uint32_t(vector(p.in_v, clamped(key, begin, end - 1))[column + lane / 4]) << 16 * e;
            }
            v[k] = word;
          }
          const uint32_t low = rounded_pair<type>(s[8 * i], s[8 * i + 1]),
                         high = rounded_pair<type>(s[8 * i + 4], s[8 * i + 5]);
          mma<type>(o, {low, low, high, high}, v[0], v[1]);
        }
      }
      const bool first = totals.m[0] == -INFINITY;
      float past[2], now[2];
      weigh(totals, sums, past, now);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (sums.m[0] != -INFINITY) total[e] = first ? o[e] : total[e] * past[0] + o[e] * now[0];
      }
    }
    const bool none = totals.m[0] == -INFINITY;
    const float reciprocal = none ? 0.0f : __frcp_rn(totals.l[0]);
    if (lane < 4)
      *reinterpret_cast<uint32_t *>(result_at(p, sequence, x.q_first + query, head) + 2 * (column + pair)) =
          rounded_pair<type>(none ? 0.0f : weighed(total[0], reciprocal), none ? 0.0f : weighed(total[1], reciprocal));
  }
}

}  // namespace
}  // namespace pydet
