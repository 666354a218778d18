// One row of a gradient by one warp, from memory: slow, and exact in what the tiles are not. A pair that is not allowed has
// no part in it, whatever its vectors hold; in a tile a 0 times an Inf makes NaN. So a row of a tile's that is not finite is
// done again here.
#pragma once

#include "gpu/nvidia/sm90/attention/backward_tiles.h"

namespace pydet {
namespace {

// A pair's weight and the gradient of its score.
struct PairGradient {
  float p, ds;
};

__device__ __forceinline__ uint32_t two_of(const uint16_t *from, int i, int extent) {  // +0 past the last
  return i < extent ? *reinterpret_cast<const uint32_t *>(from + i) : 0u;
}

// x . y over `extent` elements, of one x and 8 y: y(i) is where that of column i lies.
template <Type type, class Vectors>
__device__ __forceinline__ void careful_products(float (&c)[4], const uint16_t *x, Vectors y, int extent) {
  const int lane = int(threadIdx.x % 32), pair = lane % 4 * 2;
  const uint16_t *mine = y(lane / 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] = 0;
#pragma unroll 1
  for (int step = 0; step < extent; step += kStep) {
    const uint32_t low = two_of(x, step + pair, extent), high = two_of(x, step + 8 + pair, extent);
    mma<type>(c, {low, low, high, high}, two_of(mine, step + pair, extent), two_of(mine, step + 8 + pair, extent));
  }
}

// c += the chain's step over 16 pairs: x[2 k + e] of pair 8 k + 2 (lane % 4) + e, by element `column` + lane / 4 of y(pair),
// which is none for pairs that are not allowed.
template <Type type, class Vectors>
__device__ __forceinline__ void careful_step(float (&c)[4], const float (&x)[4], Vectors y, int column) {
  const int lane = int(threadIdx.x % 32);
  uint32_t b[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t word = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint16_t *at = y(2 * k + e);
      if (at) word |= uint32_t(at[column + lane / 4]) << 16 * e;
    }
    b[k] = word;
  }
  const uint32_t low = rounded_pair<type>(x[0], x[1]), high = rounded_pair<type>(x[2], x[3]);
  mma<type>(c, {low, low, high, high}, b[0], b[1]);
}

__device__ __forceinline__ const uint16_t *half_at(const Heads &heads, int sequence, int head, int token) {
  return reinterpret_cast<const uint16_t *>(vector_at(heads, sequence, head, token));
}

// x, here and below: from the sequence's first query that has a key on. Query `query` of `head` and the sequence's own key `key`, whose products are s and dp.
__device__ __forceinline__ PairGradient careful_pair(const AttentionBackwardPlan &p, const Lengths &x, int sequence,
                                                     int head, int query, float s, float dp) {
  const float *piece = row_piece(p, sequence, head, x, query / kBackwardQueries * kBackwardQueries);
  const int at = query % kBackwardQueries;
  const float weight = ex2_f32(fmaf(s, p.a.c, -piece[at]));
  return {weight, weight * fmaf(dp, p.scale, -piece[kBackwardQueries + at])};
}
__device__ __forceinline__ bool has_keys(const AttentionBackwardPlan &p, const Lengths &x, int sequence, int head,
                                         int query) {
  return *reinterpret_cast<const float *>(vector_at(p.a.lse, sequence, head, x.q_first + query)) != -INFINITY;
}

// A row of dk, where it is wanted, and one of dv: their columns from `begin` on.
template <Type type>
__device__ __noinline__ void careful_key(const AttentionBackwardPlan &p, const Lengths x, int sequence, int group,
                                         int key, bool of_k, bool of_v, int begin, int end) {
  const int lane = int(threadIdx.x % 32), pair = lane % 4 * 2, ahead = x.queries - x.keys + key;
  const int from = max(ahead - p.a.right, 0), to = min(ahead + p.a.left + 1, x.queries);
  const uint16_t *k = half_at(p.a.in_k, sequence, group, x.k_first + key),
                 *v = half_at(p.a.in_v, sequence, group, x.k_first + key);
#pragma unroll 1
  for (int column = begin; column < min(end, max(p.a.d, p.a.e)); column += 8) {
    const bool in_d = of_k && column < p.a.d, in_e = of_v && column < p.a.e;
    float dk[4] = {}, dv[4] = {};
    char *to_k = vector_at(p.dk, sequence, group, x.k_first + key),
         *to_v = vector_at(p.dv, sequence, group, x.k_first + key);
    if (p.accumulate) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (in_d) dk[i] = reinterpret_cast<const float *>(to_k)[column + pair + i % 2];
        if (in_e) dv[i] = reinterpret_cast<const float *>(to_v)[column + pair + i % 2];
      }
    }
#pragma unroll 1
    for (int block = from / kBackwardTile * kBackwardTile; block < to; block += kBackwardTile)
#pragma unroll 1
      for (int head = group * p.a.group_heads; head < (group + 1) * p.a.group_heads; ++head)
#pragma unroll 1
        for (int first = block; first < min(block + kBackwardTile, to); first += kStep) {
          float weights[4], gradients[4];
          bool allowed[4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float s[4], dp[4];
            const auto token = [&](int i) { return x.q_first + min(first + 8 * half + i, x.queries - 1); };
            careful_products<type>(s, k, [&](int i) { return half_at(p.a.in_q, sequence, head, token(i)); }, p.a.d);
            careful_products<type>(dp, v, [&](int i) { return half_at(p.in_dout, sequence, head, token(i)); }, p.a.e);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int query = first + 8 * half + pair + e, i = 2 * half + e;
              allowed[i] = query >= from && query < to && has_keys(p, x, sequence, head, query);
              const PairGradient one =
                  allowed[i] ? careful_pair(p, x, sequence, head, query, s[e], dp[e]) : PairGradient{0, 0};
              weights[i] = one.p, gradients[i] = one.ds;
            }
          }
          const auto vector = [&](const Heads &heads, int i) {
            return allowed[i] ? half_at(heads, sequence, head, x.q_first + first + i / 2 * 8 + pair + i % 2) : nullptr;
          };
          if (in_d) careful_step<type>(dk, gradients, [&](int i) { return vector(p.a.in_q, i); }, column);
          if (in_e) careful_step<type>(dv, weights, [&](int i) { return vector(p.in_dout, i); }, column);
        }
    __syncwarp();  // what the sums began with has been read
    if (lane < 4 && in_d) store_two<type>(to_k, p.dk.type, column + pair, settled(dk[0]), settled(dk[1]));
    if (lane < 4 && in_e) store_two<type>(to_v, p.dv.type, column + pair, settled(dv[0]), settled(dv[1]));
  }
}

// A row of dq. n: keys of a block.
template <Type type>
__device__ __noinline__ void careful_query(const AttentionBackwardPlan &p, const Lengths x, int sequence, int head,
                                           int query, int n) {
  const int lane = int(threadIdx.x % 32), pair = lane % 4 * 2, group = head / p.a.group_heads;
  Job job = {};
  job.queries = x.queries, job.keys = x.keys;
  const Keys keys = keys_of(p.a, job, query, query);
  const uint16_t *q = half_at(p.a.in_q, sequence, head, x.q_first + query),
                 *dout = half_at(p.in_dout, sequence, head, x.q_first + query);
  const bool any = has_keys(p, x, sequence, head, query);
#pragma unroll 1
  for (int column = 0; column < p.a.d; column += 8) {
    float dq[2] = {};
#pragma unroll 1
    for (int block = keys.end > keys.begin && any ? (keys.end - 1) / n : -1; block >= 0 && (block + 1) * n > keys.begin;
         --block) {
      float sum[4] = {};
#pragma unroll 1
      for (int first = block * n; first < min((block + 1) * n, keys.end); first += kStep) {
        float gradients[4];
        bool allowed[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float s[4], dp[4];
          const auto token = [&](int i) { return x.k_first + min(first + 8 * half + i, x.keys - 1); };
          careful_products<type>(s, q, [&](int i) { return half_at(p.a.in_k, sequence, group, token(i)); }, p.a.d);
          careful_products<type>(dp, dout, [&](int i) { return half_at(p.a.in_v, sequence, group, token(i)); }, p.a.e);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = first + 8 * half + pair + e, i = 2 * half + e;
            allowed[i] = key >= keys.begin && key < keys.end;
            gradients[i] = allowed[i] ? careful_pair(p, x, sequence, head, query, s[e], dp[e]).ds : 0.0f;
          }
        }
        careful_step<type>(
            sum, gradients,
            [&](int i) {
              return allowed[i] ? half_at(p.a.in_k, sequence, group, x.k_first + first + i / 2 * 8 + pair + i % 2)
                                : nullptr;
            },
            column);
      }
      dq[0] = dq[0] + sum[0], dq[1] = dq[1] + sum[1];
    }
    if (lane < 4)
      store_two<type>(vector_at(p.dq, sequence, head, x.q_first + query), p.dq.type, column + pair, settled(dq[0]),
                      settled(dq[1]));
  }
}

// A thread's rows of dq, `first` and the eighth from it; those that are not finite are done again. All lanes of a warp.
template <Type type, int registers>
__device__ __forceinline__ void store_queries(const AttentionBackwardPlan &p, const float (&dq)[registers],
                                              const Lengths &x, int sequence, int head, int first, int n) {
  const int lane = thread_number() % 32;
  const Lengths seen = from_first_query(p.a, x);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = first + 8 * h;
    const bool own = query < x.queries, finite = row_is_finite(dq, h);
    store_row<type>(dq, h, own && finite, vector_at(p.dq, sequence, head, x.q_first + query), p.dq.type, true, p.a.d);
    uint32_t again = __ballot_sync(0xFFFFFFFFu, own && !finite && lane % 4 == 0);
    for (; again; again &= again - 1)
      careful_query<type>(p, seen, sequence, head,
                          query + seen.queries - x.queries - lane / 4 + (__ffs(int(again)) - 1) / 4, n);
  }
}

}  // namespace
}  // namespace pydet
