// Rows of scores on the CPU: which of their keys are allowed, what they become on the way to weights, and the weights.
#pragma once

#include "cpu/attention_products.h"
#include "cpu/rows.h"

namespace pydet {
namespace {

// One query of one head, and the keys that causal and window leave to it.
struct Row {
  int64_t sequence, head, query;  // of the sequence
  KeyRange keys;
};

// A run of pairs: of a query with neighbouring keys, or of a key with neighbouring queries.
struct Run {
  const char *bias, *allowed;           // of its first pair, where there are any
  int64_t bias_stride, allowed_stride;  // in elements
  int64_t begin, end;                   // what causal and window leave of it
};

inline const char *pair_at(const Pairs &pairs, int64_t sequence, int64_t head, int64_t query, int64_t place) {
  if (!pairs.data) return nullptr;
  return pairs.data + (sequence * pairs.sequence_stride + head * pairs.head_stride + query * pairs.query_stride +
                       place * pairs.key_stride) *
                          (pairs.type == Type::e4m3 ? 1 : size_of(pairs.type));
}

// Of a row and the keys first ... first + count - 1.
inline Run run_of(const Attention &a, const Extent &extent, const Row &row, int64_t first, int64_t count) {
  const int64_t place = extent.first + first, begin = within(row.keys.first - first, 0, count);
  return {pair_at(a.bias, row.sequence, row.head, row.query, place),
          pair_at(a.allowed, row.sequence, row.head, row.query, place),
          a.bias.key_stride,
          a.allowed.key_stride,
          begin,
          within(row.keys.end - first, begin, count)};
}

// Scores of a run become what exp2 is taken of, but for the factor `c` and the reference; pairs that are not allowed, and
// those up to a multiple of 16 behind the last, become -Inf. Under a softcap the tanh of each goes to `tanhs`, if asked for.
inline void mask_scores(const Attention &a, const ScoreScale &scale, const Run &run, int64_t count, float *s,
                        float *tanhs = nullptr) {
  if (scale.softcap != 0 && tanhs)
    for (int64_t j = 0; j < count; ++j) tanhs[j] = tanh_f32(s[j] * scale.before_tanh);
  if (scale.softcap != 0)
    for (int64_t j = 0; j < count; ++j) s[j] = capped(s[j], scale);
  if (a.bias.data)
    dispatch(a.bias.type, [&](auto number) {
      using T = decltype(number);
      auto *bias = (const typename T::Stored *)run.bias;
      for (int64_t j = 0; j < count; ++j) s[j] = fmaf(s[j], scale.c, T::get(bias + j * run.bias_stride) * kLog2e);
    });
  if (a.allowed.data)
    for (int64_t j = 0; j < count; ++j) s[j] = run.allowed[j * run.allowed_stride] ? s[j] : -INFINITY;
  for (int64_t j = 0; j < run.begin; ++j) s[j] = -INFINITY;
  for (int64_t j = run.end; j < round_up(count, 16); ++j) s[j] = -INFINITY;
}

// The largest of so many scores, a multiple of 16, NaN if one is; and whether any is -Inf.
struct Top {
  float score;
  bool excludes;
};
inline Top top_of(const float *s, int64_t count) {
  F32s top = F32s{} - INFINITY;
  I32s nan{}, out{};
  for (int64_t j = 0; j < count; j += kLanes) {
    const F32s x = load_vector<F32s>(s + j);
    top = x > top ? x : top;
    nan |= x != x;
    out |= x == -INFINITY;
  }
  float score = -INFINITY;
  for (int i = 0; i < kLanes; ++i) score = top[i] > score ? top[i] : score;
  return {any(nan) ? float_of(kNanF32) : score, any(out)};
}

// Scores become weights, which join the row's sums.
template <class Exp2> void weigh_scores(float *s, int64_t count, float c, float reference, float *l) {
  float lanes[kWeightLanes];
  for (int i = 0; i < kWeightLanes; ++i) lanes[i] = l[i];
  for (int64_t j = 0; j < count; ++j) s[j] = Exp2::of(fmaf(s[j], c, -reference));
  for (int64_t j = 0; j < count; j += kWeightLanes)
    for (int i = 0; i < kWeightLanes; ++i) lanes[i] += s[j + i];
  for (int i = 0; i < kWeightLanes; ++i) l[i] = lanes[i];
}

// o *= factor: a row of `e` columns, their groups `apart`.
inline void scale_row(bool flushes, float *o, int64_t apart, int64_t e, float factor) {
  for (int64_t begin = 0; begin < e; begin += kSide, o += apart) {
    const int64_t columns = least(e - begin, kSide);
    for (int64_t c = 0; c < columns; ++c) {
      const float x = o[c] * factor;
      o[c] = flushes && fabsf(x) < 0x1p-126f ? 0.0f : x;
    }
  }
}

// ---- The end of a row ----------------------------------------------------------------------------------------------

inline Join join_of(const Attention &a, float first, float second) {
  return with_exp2(a, [&](auto exp2) { return pydet::join<decltype(exp2)>(first, second); });
}

// The sink joins, then the row is divided and stored, with its lse. o: columns in groups `apart`.
inline void finish_row(const Attention &a, const Extent &extent, const Row &row, RowSoFar so_far, float *o,
                       int64_t apart) {
  if (a.sinks.data) {
    float sink = 0;
    dispatch(a.sinks.type, [&](auto number) {
      using T = decltype(number);
      sink = T::get((const typename T::Stored *)a.sinks.data + row.head);
    });
    const Join join = join_of(a, so_far.m, sink * kLog2e);
    if (!join.none) {
      scale_row(false, o, apart, a.e, join.of_first);
      so_far = {join.m, so_far.l * join.of_first + join.of_second};
    }
  }
  const bool none = so_far.m == -INFINITY;
  const float inverse = none ? 0.0f : 1.0f / so_far.l;
  const int64_t token = extent.q_begin + row.query;
  dispatch(a.out.type, [&](auto number) {
    using T = decltype(number);
    auto *out = (typename T::Stored *)a.out.data + row.sequence * a.out.sequence_stride + row.head * a.out.head_stride +
                token * a.out.token_stride;
    for (int64_t begin = 0; begin < a.e; begin += kSide, o += apart) {
      const int64_t columns = least(a.e - begin, kSide);
      for (int64_t c = 0; c < columns; ++c) o[c] = none ? 0.0f : weighed(o[c], inverse);
      for (int64_t c = 0; c < columns; c += kWidth) T::store(out + begin + c, load(o + c), columns - c);
    }
  });
  if (a.lse.data) {
    float *lse = (float *)a.lse.data + row.sequence * a.lse.sequence_stride + row.head * a.lse.head_stride;
    lse[token * a.lse.token_stride] = none ? -INFINITY : pydet::canonical(log_sum_exp(so_far));
  }
}

// A segment joins the row: o = fl(fl(o of_first) + fl(part of_second)).
inline void join_segment(const Attention &a, const RowSoFar &part, const float *part_o, RowSoFar &so_far, float *o,
                         int64_t apart) {
  const Join join = join_of(a, so_far.m, part.m);
  if (part.m == -INFINITY || join.none) return;
  so_far = {join.m, so_far.l * join.of_first + part.l * join.of_second};
  for (int64_t begin = 0; begin < a.e; begin += kSide, o += apart, part_o += apart) {
    const int64_t columns = least(a.e - begin, kSide);
    for (int64_t c = 0; c < columns; ++c) o[c] = o[c] * join.of_first + part_o[c] * join.of_second;
  }
}

}  // namespace
}  // namespace pydet
