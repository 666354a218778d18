// What GPU kernels of attention share beside its formulas: rows of a tile, where they lie, and how a row ends. And how
// segments that blocks of their own made are folded.
#pragma once

#include "gpu/any/epilogue.h"
#include "ops/attention/formulas.h"

namespace pydet {

// Rows of a tile are pairs of a query and one of the heads that share a key, heads beside each other: so a decoding step
// has a row for each of them.
PYDET_HD int64_t heads_of_group(const Attention &p) { return p.heads / p.groups; }
PYDET_HD int64_t rows_of_group(const Attention &p) { return p.queries * heads_of_group(p); }
PYDET_HD int64_t segments_of(const Attention &p) { return (p.keys + p.kv_chunk - 1) / p.kv_chunk; }

// ---- Segments that are made apart --------------------------------------------------------------------------------

// Of each query of each head its segments, of each of them e elements of o, then m and l.
PYDET_HD int64_t floats_of_part(const Attention &p) { return p.e + 2; }
// Whether so few blocks would run that each segment is worth one, and there is room for what they make (bytes_of_parts).
bool splits_segments(const Attention &, int64_t blocks);
// Folds them into out and lse, once its kernel is there. The device is current.
pydet_status load_combine(const char *name, const Attention &);
pydet_status combine_segments(const char *name, const Attention &);

#if defined(__CUDACC__) || defined(__HIPCC__)

// ---- Rows --------------------------------------------------------------------------------------------------------

// A row of a group, and the keys that it may see, a mask aside.
struct QueryRow {
  int64_t query, head;
  KeyRange keys;
};
__device__ __forceinline__ QueryRow row_of(const Attention &p, const Extent &extent, int64_t group, int64_t row) {
  const int64_t heads = heads_of_group(p), query = row / heads;
  return {query, group * heads + row % heads, keys_of(p, extent, query)};
}

// Where its vector begins.
__device__ __forceinline__ int64_t row_offset(const Heads &x, int64_t sequence, const Extent &extent,
                                              const QueryRow &row) {
  return sequence * x.sequence_stride + row.head * x.head_stride + (extent.q_begin + row.query) * x.token_stride;
}

// Where its segments lie.
__device__ __forceinline__ float *parts_of(const Attention &p, int64_t sequence, const Extent &extent,
                                           const QueryRow &row) {
  const int64_t query = row.query + (p.q_start ? extent.q_begin : sequence * p.queries);
  return static_cast<float *>(p.workspace) + (query * p.heads + row.head) * segments_of(p) * floats_of_part(p);
}

// Of a mask or a bias.
__device__ __forceinline__ int64_t pair_offset(const Pairs &x, int64_t sequence, const Extent &extent,
                                               const QueryRow &row, int64_t key) {
  return sequence * x.sequence_stride + row.head * x.head_stride + row.query * x.query_stride +
         (extent.first + key) * x.key_stride;
}
__device__ __forceinline__ bool sees(const Attention &p, int64_t sequence, const Extent &extent, const QueryRow &row,
                                     int64_t key) {
  if (key < row.keys.first || key >= row.keys.end) return false;
  return !p.allowed.data || p.allowed.data[pair_offset(p.allowed, sequence, extent, row, key)] != 0;
}

// Scores as exponents, before a row's reference is taken off; with a bias they have their factor already.
__device__ __forceinline__ float biased(const Attention &p, const ScoreScale &scale, int64_t sequence,
                                        const Extent &extent, const QueryRow &row, int64_t key, float score) {
  if (scale.softcap != 0.0f) score = capped(score, scale);
  if (!p.bias.data) return score;
  const float bias = load_f32(p.bias.data, p.bias.type, pair_offset(p.bias, sequence, extent, row, key));
  return fmaf(score, scale.c, bias * kLog2e);
}

// A row's reference moves on to its largest score of a block: what its sums are scaled by, and the weights' exponents. A row
// that has seen no key, or scores of -Inf alone, keeps the weights 0.
template <class Exp2> struct Moved {
  float m, factor, reference, c;
  bool has_bias;

  __device__ __forceinline__ Moved(const Attention &p, const ScoreScale &scale, float before, float largest)
      : c(scale.c), has_bias(p.bias.data) {
    m = reference_of(before, has_bias ? largest : c * largest);
    reference = m == -INFINITY ? 0.0f : m;
    factor = Exp2::of(before - reference);
  }
  __device__ __forceinline__ float weight(float x) const {
    return Exp2::of(has_bias ? x - reference : fmaf(x, c, -reference));
  }
};

// A segment joins what is there.
template <class Exp2> struct Joined {
  float m, of_first, of_second;

  __device__ __forceinline__ Joined(float first, float second) {
    const Join both = join<Exp2>(first, second);
    m = both.m, of_first = both.none ? 0.0f : both.of_first, of_second = both.none ? 0.0f : both.of_second;
  }
  __device__ __forceinline__ float sum(float first, float second) const {
    return first * of_first + second * of_second;
  }
};

// From sums to a result.
template <class Exp2> struct RowEnd {
  float scale, inverse, lse;

  __device__ __forceinline__ RowEnd(const Attention &p, int64_t head, RowSoFar row) : scale(1.0f) {
    if (p.sinks.data) {
      const Joined<Exp2> joined(row.m, load_f32(p.sinks.data, p.sinks.type, head) * kLog2e);
      row = {joined.m, joined.sum(row.l, 1.0f)}, scale = joined.of_first;
    }
    inverse = row.m == -INFINITY ? 0.0f : 1.0f / row.l;
    lse = row.m == -INFINITY ? -INFINITY : canonical(log_sum_exp(row));
  }
  __device__ __forceinline__ float element(float o) const { return weighed(o * scale, inverse); }
};

#endif

}  // namespace pydet
