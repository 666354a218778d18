// One row of attention in the smallest scratch memory: every chain by itself, number by number. Slow, with the same bits.
#pragma once

#include "cpu/attention_rows.h"

namespace pydet {
namespace {

struct SmallDesk {
  static constexpr int64_t kColumns = 512;
  float o[kColumns], total[kColumns], s[kSide];
  uint8_t left_out[kSide];
};

inline __attribute__((noinline)) void small_row(const Attention &a, const Extent &extent, const Row &row,
                                                Scratch &scratch) {
  static_assert(sizeof(SmallDesk) <= Scratch::kSmall, "it fits");
  SmallDesk &desk = *(SmallDesk *)scratch.data;
  const Products products(a);
  const ScoreScale scale = score_scale(a);
  const float c = a.bias.data ? 1.0f : scale.c;
  const int64_t token = extent.q_begin + row.query, group = row.head / (a.heads / a.groups);
  const int64_t size = size_of(a.q.type);
  const char *q =
      a.q.data + (row.sequence * a.q.sequence_stride + row.head * a.q.head_stride + token * a.q.token_stride) * size;
  auto vector_at = [&](const Heads &heads, int64_t key) {
    return heads.data +
           (group * heads.head_stride + key_offset(a, heads, row.sequence, extent.k_begin + extent.first + key)) * size;
  };
  RowSoFar so_far = {-INFINITY, 0};
  memset(desk.total, 0, sizeof desk.total);
  const int64_t h = a.kv_chunk, block = block_keys(a.d);
  for (int64_t begin = row.keys.first / h * h; begin < row.keys.end; begin += h) {
    float m = -INFINITY, l[kWeightLanes] = {};
    memset(desk.o, 0, sizeof desk.o);
    const int64_t end = least(begin + h, row.keys.end);
    for (int64_t at = most(begin, row.keys.first / block * block); at < end; at += block) {
      const int64_t count = least(at + block, end) - at, padded = round_up(count, 16);
      for (int64_t j = 0; j < count; ++j) {
        const char *k = vector_at(a.k, at + j);
        desk.s[j] = at + j < row.keys.first ? 0.0f
                                            : products.chain(
                                                  0.0f, a.d, [&](int64_t i) { return products.get(q, i); },
                                                  [&](int64_t i) { return products.get(k, i); });
      }
      mask_scores(a, scale, run_of(a, extent, row, at, count), count, desk.s);
      const float reference = reference_of(m, c * top_of(desk.s, padded).score);
      if (reference == -INFINITY) continue;
      for (int64_t j = 0; j < padded; ++j) desk.left_out[j] = desk.s[j] == -INFINITY;
      with_exp2(a, [&](auto exp2) {
        using Exp2 = decltype(exp2);
        const float factor = Exp2::of(m - reference);
        for (float &lane : l) lane *= factor;
        scale_row(products.flushes, desk.o, kSide, a.e, factor);
        m = reference;
        weigh_scores<Exp2>(desk.s, padded, c, reference, l);
      });
      round_all(a.q.type, desk.s, padded);
      for (int64_t e = 0; e < a.e; ++e)
        desk.o[e] = products.chain(
            desk.o[e], count, [&](int64_t j) { return desk.left_out[j] ? 0.0f : desk.s[j]; },
            [&](int64_t j) { return desk.left_out[j] ? 0.0f : products.get(vector_at(a.v, at + j), e); });
    }
    join_segment(a, {m, joined(l)}, desk.o, so_far, desk.total, kSide);
  }
  finish_row(a, extent, row, so_far, desk.total, kSide);
}

}  // namespace
}  // namespace pydet
