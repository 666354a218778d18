// Gradients of attention's scores on the CPU: for a run of pairs what its weights were, and what the gradient of each score
// is. Also what a row has behind it, and how sums begin and end.
#pragma once

#include "cpu/attention_rows.h"

namespace pydet {
namespace {

// Of a key and the queries first ... first + count - 1 of a head. seen: the queries that see the key.
inline Run run_of_key(const Attention &a, const Extent &extent, int64_t sequence, int64_t head, int64_t key,
                      const QueryRange &seen, int64_t first, int64_t count) {
  const int64_t place = extent.first + key, begin = within(seen.first - first, 0, count);
  return {pair_at(a.bias, sequence, head, first, place),
          pair_at(a.allowed, sequence, head, first, place),
          a.bias.query_stride,
          a.allowed.query_stride,
          begin,
          within(seen.end - first, begin, count)};
}

inline char *vector_at(const Heads &heads, int64_t sequence, int64_t head, int64_t token) {
  return heads.data + (sequence * heads.sequence_stride + head * heads.head_stride + token * heads.token_stride) *
                          size_of(heads.type);
}
inline int64_t key_place(const Extent &extent, int64_t key) { return extent.k_begin + extent.first + key; }

// ---- A row ---------------------------------------------------------------------------------------------------------

// delta: the sum of dout out.
template <class T> float delta_of(const char *dout, const char *out, int64_t e) {
  using Stored = typename T::Stored;
  float lanes[kDeltaLanes] = {}, x[kWidth], y[kWidth];
  for (int64_t at = 0; at < e; at += kWidth) {
    store(x, T::load((const Stored *)dout + at, e - at));
    store(y, T::load((const Stored *)out + at, e - at));
    for (int i = 0; i < kWidth && at + i < e; ++i) {
      float &lane = lanes[(at + i) % kDeltaLanes];
      lane = fmaf(x[i], y[i], lane);
    }
  }
  return joined(lanes);
}

inline float lse_of(const Attention &a, const Extent &extent, int64_t sequence, int64_t head, int64_t query) {
  return *(const float *)vector_at(a.lse, sequence, head, extent.q_begin + query);
}
inline float delta_of_row(const AttentionBackward &b, const Extent &extent, int64_t sequence, int64_t head,
                          int64_t query) {
  const int64_t token = extent.q_begin + query;
  return dispatch(b.dout.type, [&](auto number) {
    return delta_of<decltype(number)>(vector_at(b.dout, sequence, head, token),
                                      vector_at(b.forward.out, sequence, head, token), b.forward.e);
  });
}
inline RowBehind behind(const AttentionBackward &b, const Extent &extent, int64_t sequence, int64_t head,
                        int64_t query) {
  return row_behind(lse_of(b.forward, extent, sequence, head, query), delta_of_row(b, extent, sequence, head, query),
                    b.forward.scale);
}

// ---- A run of pairs ------------------------------------------------------------------------------------------------

// Scores of a run, masked, become weights, and dp the gradients of the scores; both +0 where a pair is not allowed. What
// lies behind the row of each pair is in `twos` and `deltas`; tanhs: under a
// softcap, else NULL. count: a multiple of 16.
template <class Exp2>
void gradients_by(const Attention &a, float c, int64_t count, const float *twos, const float *deltas,
                  const float *tanhs, float *s, float *dp) {
  for (int64_t j = 0; j < count; ++j) {
    const bool absent = s[j] == -INFINITY || twos[j] == -INFINITY;
    const RowBehind row = {twos[j], deltas[j]};
    const float p = weight_again<Exp2>(s[j], c, row);
    const float ds = score_gradient(p, dp[j], a.scale, row);
    s[j] = absent ? 0.0f : p;
    dp[j] = absent ? 0.0f : tanhs ? capped_gradient(ds, tanhs[j]) : ds;
  }
}
inline void gradients(const Attention &a, float c, int64_t count, const float *twos, const float *deltas,
                      const float *tanhs, float *s, float *dp) {
  with_exp2(a, [&](auto exp2) { gradients_by<decltype(exp2)>(a, c, count, twos, deltas, tanhs, s, dp); });
}

// ---- Sums ----------------------------------------------------------------------------------------------------------

inline float begun(bool flushes, float x) { return flushes && fabsf(x) < 0x1p-126f ? 0.0f : x; }

// A row of sums, their groups of kSide columns `apart`, begins at +0 or, where it continues, at what the result holds.
inline void begin_sums(bool flushes, const char *result, bool continues, int64_t columns, float *sums, int64_t apart) {
  for (int64_t c = 0; c < columns; ++c)
    sums[c / kSide * apart + c % kSide] = continues ? begun(flushes, ((const float *)result)[c]) : 0.0f;
}
// It ends: rounded to the result's type.
inline void end_sums(char *result, Type type, int64_t columns, float *sums, int64_t apart) {
  dispatch(type, [&](auto number) {
    using T = decltype(number);
    auto *to = (typename T::Stored *)result;
    for (int64_t begin = 0; begin < columns; begin += kSide, sums += apart) {
      const int64_t here = least(columns - begin, kSide);
      for (int64_t c = 0; c < here; ++c) sums[c] = settled(sums[c]);
      for (int64_t c = 0; c < here; c += kWidth) T::store(to + begin + c, load(sums + c), here - c);
    }
  });
}

// dk and dv at places of a sequence's storage that are none of its own keys are +0.
inline void clear_padding(const AttentionBackward &b, const Extent &extent, int64_t sequence, int64_t group) {
  const Attention &a = b.forward;
  const int64_t first = key_place(extent, 0), end = first + extent.keys;
  const auto clear = [&](int64_t place, int64_t last) {
    for (; place < last; ++place) {
      memset(vector_at(b.dk, sequence, group, place), 0, size_t(a.d * size_of(b.dk.type)));
      memset(vector_at(b.dv, sequence, group, place), 0, size_t(a.e * size_of(b.dv.type)));
    }
  };
  clear(extent.k_begin, first);
  clear(end, a.k_start ? end : a.keys);
}

// dsinks of one head, in one chain over all rows.
inline void sum_sinks(const AttentionBackward &b, int64_t head) {
  const Attention &a = b.forward;
  float sink = 0, sum = 0;
  dispatch(a.sinks.type, [&](auto number) {
    using Given = decltype(number);
    sink = Given::get((const typename Given::Stored *)a.sinks.data + head);
  });
  if (b.accumulate) sum = ((const float *)b.dsinks.data)[head];
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
    const Extent extent = extent_of(a, sequence);
    for (int64_t i = 0; i < extent.queries; ++i) {
      const float twos = lse_in_twos(lse_of(a, extent, sequence, head, i));
      if (twos == -INFINITY) continue;
      const float delta = delta_of_row(b, extent, sequence, head, i);
      sum = with_exp2(a, [&](auto exp2) { return sink_step<decltype(exp2)>(sum, sink, twos, delta); });
    }
  }
  dispatch(b.dsinks.type, [&](auto number) {
    using To = decltype(number);
    To::set((typename To::Stored *)b.dsinks.data + head, settled(sum));
  });
}

}  // namespace
}  // namespace pydet
