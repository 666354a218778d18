// Gradients of attention for one key or one query in the smallest scratch memory: every chain by itself, number by number.
// Slow, with the same bits.
#pragma once

#include "cpu/attention_gradients.h"
#include "cpu/attention_small.h"

namespace pydet {
namespace {

struct SmallGradients {
  static constexpr int64_t kRun = 16, kColumns = 256;  // pairs at a time, columns of a result
  float sums[kColumns], block[kColumns];
  float s[kRun], dp[kRun], tanhs[kRun], twos[kRun], deltas[kRun];
  bool left_out[kRun];

  // Pair j of a run, before it is masked: vectors of query and key, and what lies behind the query.
  void pair(const Products &products, const Attention &a, int64_t j, const char *q, const char *k, const char *dout,
            const char *v, const RowBehind &row) {
    s[j] = product(products, q, k, a.d), dp[j] = product(products, dout, v, a.e);
    twos[j] = row.twos, deltas[j] = row.delta_scale;
  }
  static float product(const Products &products, const char *x, const char *y, int64_t count) {
    return products.chain(
        0.0f, count, [&](int64_t i) { return products.get(x, i); }, [&](int64_t i) { return products.get(y, i); });
  }
  // The run of `count` pairs becomes weights and gradients of scores, rounded.
  void finish(const Attention &a, const Run &run, int64_t count) {
    const ScoreScale scale = score_scale(a);
    for (int64_t j = count; j < kRun; ++j) twos[j] = deltas[j] = dp[j] = 0;
    mask_scores(a, scale, run, count, s, tanhs);
    for (int64_t j = 0; j < kRun; ++j) left_out[j] = s[j] == -INFINITY || twos[j] == -INFINITY;
    gradients(a, a.bias.data ? 1.0f : scale.c, kRun, twos, deltas, a.softcap ? tanhs : nullptr, s, dp);
    round_all(a.q.type, s, kRun), round_all(a.q.type, dp, kRun);
  }
  // sum of `count` pairs' weights, or gradients, and the numbers that lie in column c of their vectors.
  template <class At>
  void add(const Products &products, float *to, int64_t columns, const float *weights, int64_t count, const At &at) {
    for (int64_t c = 0; c < columns; ++c)
      to[c] = products.chain(
          to[c], count, [&](int64_t j) { return left_out[j] ? 0.0f : weights[j]; },
          [&](int64_t j) { return left_out[j] ? 0.0f : products.get(at(j), c); });
  }
};

// dk and dv of one key, some columns at a time.
inline __attribute__((noinline)) void small_key(const AttentionBackward &b, const Extent &extent, int64_t sequence,
                                                int64_t group, int64_t key, Scratch &scratch) {
  using Desk = SmallGradients;
  static_assert(sizeof(Desk) <= Scratch::kSmall, "it fits");
  Desk &desk = *(Desk *)scratch.data;
  const Attention &a = b.forward;
  const Products products(a);
  const QueryRange seen = queries_of(a, extent, key);
  const int64_t of_group = a.heads / a.groups, place = key_place(extent, key);
  const char *k = vector_at(a.k, sequence, group, place), *v = vector_at(a.v, sequence, group, place);
  for (const Heads *result : {&b.dk, &b.dv}) {
    const bool of_weights = result == &b.dv;
    const Heads &from = of_weights ? b.dout : a.q;
    const int64_t width = of_weights ? a.e : a.d, size = size_of(from.type);
    for (int64_t column = 0; column < width; column += Desk::kColumns) {
      const int64_t columns = least(width - column, Desk::kColumns);
      char *to = vector_at(*result, sequence, group, place) + column * size_of(result->type);
      for (int64_t c = 0; c < columns; ++c)
        desk.sums[c] = b.accumulate ? begun(products.flushes, ((const float *)to)[c]) : 0.0f;
      for (int64_t block = first_query(a, extent); block < seen.end; block += kQueriesBlock)
        for (int64_t head = group * of_group; head < (group + 1) * of_group; ++head)
          for (int64_t first = block; first < least(block + kQueriesBlock, seen.end); first += Desk::kRun) {
            const int64_t count = least(Desk::kRun, extent.queries - first);
            auto at = [&](const Heads &heads, int64_t j) {
              return vector_at(heads, sequence, head, extent.q_begin + first + j);
            };
            for (int64_t j = 0; j < count; ++j)
              desk.pair(products, a, j, at(a.q, j), k, at(b.dout, j), v, behind(b, extent, sequence, head, first + j));
            desk.finish(a, run_of_key(a, extent, sequence, head, key, seen, first, count), count);
            desk.add(products, desk.sums, columns, of_weights ? desk.s : desk.dp, count,
                     [&](int64_t j) { return at(from, j) + column * size; });
          }
      end_sums(to, result->type, columns, desk.sums, kSide);
    }
  }
}

// dq of one query of a head likewise.
inline __attribute__((noinline)) void small_query(const AttentionBackward &b, const Extent &extent, int64_t sequence,
                                                  int64_t head, int64_t query, Scratch &scratch) {
  using Desk = SmallGradients;
  Desk &desk = *(Desk *)scratch.data;
  const Attention &a = b.forward;
  const Products products(a);
  const Row row = {sequence, head, query, keys_of(a, extent, query)};
  const int64_t group = head / (a.heads / a.groups), token = extent.q_begin + query, g = block_keys(a.d);
  const char *q = vector_at(a.q, sequence, head, token), *dout = vector_at(b.dout, sequence, head, token);
  const RowBehind here = behind(b, extent, sequence, head, query);
  const int64_t size = size_of(a.k.type);
  for (int64_t column = 0; column < a.d; column += Desk::kColumns) {
    const int64_t columns = least(a.d - column, Desk::kColumns);
    memset(desk.sums, 0, sizeof desk.sums);
    for (int64_t block = (divide_up(row.keys.end, g) - 1) * g; block >= 0 && block + g > row.keys.first; block -= g) {
      memset(desk.block, 0, sizeof desk.block);
      for (int64_t first = block; first < least(block + g, row.keys.end); first += Desk::kRun) {
        const int64_t count = least(Desk::kRun, extent.keys - first);
        auto at = [&](const Heads &heads, int64_t j) {
          return vector_at(heads, sequence, group, key_place(extent, first + j));
        };
        for (int64_t j = 0; j < count; ++j) desk.pair(products, a, j, q, at(a.k, j), dout, at(a.v, j), here);
        desk.finish(a, run_of(a, extent, row, first, count), count);
        desk.add(products, desk.block, columns, desk.dp, count, [&](int64_t j) { return at(a.k, j) + column * size; });
      }
      for (int64_t c = 0; c < columns; ++c) desk.sums[c] += desk.block[c];
    }
    end_sums(vector_at(b.dq, sequence, head, token) + column * size_of(b.dq.type), b.dq.type, columns, desk.sums,
             kSide);
  }
}

}  // namespace
}  // namespace pydet
