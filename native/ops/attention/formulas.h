// Attention's formulas, the same on every backend (NUMERICS.md, "Attention"): which keys a query may see, how its row of
// scores becomes weights, and how the parts of a row are joined.
#pragma once

#include "contract/elementary.h"
#include "contract/ex2.h"
#include "contract/to_fp32.h"
#include "ops/attention/problem.h"

namespace pydet {

constexpr int kKeysBlock = 128;  // the most keys of a block
constexpr int kWeightLanes = 8;  // in which a row's weights are added: key j goes to lane j mod 8
constexpr int kSegmentMultiple = 128;
constexpr int64_t kSegmentDefault = 1024;

// Keys of a block: a row's reference and its sums are scaled once a block.
PYDET_HD constexpr int block_keys(int64_t d) { return d <= 128 ? kKeysBlock : 64; }

// ---- Sequences -----------------------------------------------------------------------------------------------------

// One sequence, whatever the boundaries on the device hold. Its keys lie from place k_begin + first of its storage on.
struct Extent {
  int64_t q_begin, queries;      // in the pack, 0 without one
  int64_t k_begin, first, keys;  // first: keys of padding before its own
};
PYDET_HD int64_t within(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }
PYDET_HD Extent extent_of(const Attention &a, int64_t sequence) {
  Extent x = {0, a.queries, 0, 0, a.keys};
  if (a.q_start) {
    x.q_begin = within(a.q_start[sequence], 0, a.queries);
    x.queries = within(a.q_start[sequence + 1], x.q_begin, a.queries) - x.q_begin;
  }
  if (a.k_start) {
    x.k_begin = within(a.k_start[sequence], 0, a.keys);
    x.keys = within(a.k_start[sequence + 1], x.k_begin, a.keys) - x.k_begin;
  }
  if (a.k_length) x.keys = within(a.k_length[sequence], 0, x.keys);
  if (a.first_key) {
    x.first = within(a.first_key[sequence], 0, x.keys);
    x.keys -= x.first;
  }
  return x;
}

// Keys [first, end) of the sequence's own, which causal and window leave to query i of it. Never less with a larger i.
struct KeyRange {
  int64_t first, end;
};
PYDET_HD KeyRange keys_of(const Attention &a, const Extent &x, int64_t query) {
  const int64_t here = x.keys - x.queries + query;  // the key that is as far from the last one as the query is
  KeyRange range = {0, x.keys};
  if (a.window_left != kNoWindow) range.first = within(here - a.window_left, 0, x.keys);
  if (a.window_right != kNoWindow) range.end = within(here + a.window_right + 1, 0, x.keys);
  if (a.causal) range.end = within(here + 1, 0, range.end);
  if (range.end < range.first) range.end = range.first;
  return range;
}

// Queries [first, end) of the sequence, to which causal and window leave its own key `key`: those whose keys_of holds it.
// Never less with a larger key.
struct QueryRange {
  int64_t first, end;
};
PYDET_HD QueryRange queries_of(const Attention &a, const Extent &x, int64_t key) {
  const int64_t here = key - x.keys + x.queries;  // the query that stands at the key
  QueryRange range = {0, x.queries};
  if (a.window_left != kNoWindow) range.end = within(here + a.window_left + 1, 0, x.queries);
  if (a.window_right != kNoWindow) range.first = within(here - a.window_right, 0, x.queries);
  if (a.causal) range.first = within(here, range.first, x.queries);
  if (range.end < range.first) range.end = range.first;
  return range;
}

// Where vector `place` of a sequence's storage begins, in elements of `heads`, head 0.
PYDET_HD int64_t key_offset(const Attention &a, const Heads &heads, int64_t sequence, int64_t place) {
  if (!a.pages) return sequence * heads.sequence_stride + place * heads.token_stride;
  const int64_t page = within(a.pages[sequence * a.pages_stride + place / a.page_size], 0, a.page_count - 1);
  return page * heads.sequence_stride + place % a.page_size * heads.token_stride;
}

// ---- Scores and weights --------------------------------------------------------------------------------------------

// x = s scale in powers of two, before the reference m is taken off: fl(c s). Under a softcap s is first
// fl(softcap tanh(fl(s before_tanh))).
struct ScoreScale {
  float c, before_tanh, softcap;  // softcap 0: none
};
// On the host, for GPUs on the calling thread, which may round otherwise and flush: in double precision a product of two
// fp32 numbers is exact, and their quotient no nearer to a half way in fp32 than its rounding moves it.
inline ScoreScale score_scale(const Attention &a) {
  if (a.softcap == 0) return {f32_from_f64(double(a.scale) * double(kLog2e)), 0, 0};
  return {kLog2e, f32_from_f64(double(a.scale) / double(a.softcap)), a.softcap};
}
PYDET_HD float capped(float s, const ScoreScale &scale) { return scale.softcap * tanh_f32(s * scale.before_tanh); }

// The larger of a reference and a score; a NaN stays.
PYDET_HD float reference_of(float m, float x) { return x > m || x != x ? x : m; }

// exp2 belongs to the arithmetic.
struct HopperExp2 {
  static PYDET_INLINE float of(float t) { return ex2_f32(t); }
};
struct CoarseExp2 {
  static PYDET_INLINE float of(float t) { return coarse_exp2_f32(t); }
};
struct FineExp2 {
  static PYDET_INLINE float of(float t) { return exp2_f32(t); }
};
template <Type type> using IeeeExp2 = std::conditional_t<type == Type::f32, FineExp2, CoarseExp2>;

PYDET_HD float joined(const float *l) { return ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7])); }

// ---- Rows ----------------------------------------------------------------------------------------------------------

// Bytes for the parts of few rows of long sequences, a segment each, which are computed apart: m, l and o in fp32. 0 where
// there is one segment, or so many parts that there is enough to share out without.
constexpr double kMostParts = 1 << 16;
PYDET_HD uint64_t bytes_of_parts(const Attention &a) {
  const int64_t segments = divide_up(a.keys, a.kv_chunk);
  const double tokens = double(a.q_start ? 1 : a.sequences) * double(a.queries);
  const double parts = tokens * double(a.heads) * double(segments);
  if (segments < 2 || parts > kMostParts) return 0;
  return uint64_t(parts) * uint64_t(a.e + 2) * sizeof(float);
}

// What is known of a row: o / l is its result so far, m the reference of both. Of no key: {-Inf, 0}, and o is 0.
struct RowSoFar {
  float m, l;
};

// How two parts are joined: o = fl(fl(o of_first) + fl(o' of_second)), l likewise. Neither has a key: `none`.
struct Join {
  float m, of_first, of_second;
  bool none;
};
template <class Exp2> PYDET_HD Join join(float first, float second) {
  const float m = reference_of(first, second);
  return {m, Exp2::of(first - m), Exp2::of(second - m), m == -INFINITY};
}

// ln of the sum of exp(score) over the keys; -Inf where there is none.
PYDET_HD float log_sum_exp(const RowSoFar &row) { return fmaf(row.m, kLn2, log_f32(row.l)); }

// One element of the result, before it is rounded to its type; `inverse` is fl(1 / l).
PYDET_HD float weighed(float o, float inverse) { return (o + 0.0f) * inverse; }

// ---- Backward ------------------------------------------------------------------------------------------------------

constexpr int kQueriesBlock = 128;  // sums of dk and dv take the heads of a group by blocks of so many queries

// The query from which those blocks are counted: the first to which causal and window leave a key, so that queries of left
// padding have no part in it.
PYDET_HD int64_t first_query(const Attention &a, const Extent &x) { return queries_of(a, x, 0).first; }

constexpr int kDeltaLanes = 8;  // in which delta is summed: element e goes to lane e mod 8, by fmaf; then joined()

// The row's lse in powers of two: weights are exp2 of x - this.
PYDET_HD float lse_in_twos(float lse) { return lse * kLog2e; }

// What a row's weights and gradients of scores are made with. A row whose `twos` is -Inf has no allowed key.
struct RowBehind {
  float twos;         // lse_in_twos
  float delta_scale;  // fl(delta scale)
};
PYDET_HD RowBehind row_behind(float lse, float delta, float scale) { return {lse_in_twos(lse), delta * scale}; }

// p_ij of an allowed pair. x: the score as the forward's exp2 takes it, but for its factor c.
template <class Exp2> PYDET_HD float weight_again(float x, float c, const RowBehind &row) {
  return Exp2::of(fmaf(x, c, -row.twos));
}
// ds_ij of an allowed pair, before it is rounded, where there is no softcap; dp: the chain of dout_i and v_j.
PYDET_HD float score_gradient(float p, float dp, float scale, const RowBehind &row) {
  return p * fmaf(dp, scale, -row.delta_scale);
}
// The same under a softcap; t: the tanh of which the score was made.
PYDET_HD float capped_gradient(float ds, float t) { return ds * fmaf(-t, t, 1.0f); }

// One step of the chain of dsinks. sink: as fp32.
template <class Exp2> PYDET_HD float sink_step(float sum, float sink, float twos, float delta) {
  return fmaf(-Exp2::of(fmaf(sink, kLog2e, -twos)), delta, sum);
}

// A sum that is done, before it is rounded to its type: never -0, so that steps of zeros may be left out.
PYDET_HD float settled(float sum) { return sum + 0.0f; }

}  // namespace pydet
