// What GPU kernels of attention's gradients share beside its formulas: the tiles of rows and of keys, the pairs of
// both, and the two parts that are no product: delta of every row, and the gradients of the sinks
// (attention_backward_rows.cu).
#pragma once

#include "core/error.h"
#include "gpu/any/attention.h"

namespace pydet {

// Places of the keys' storage that a sequence may have, those of padding among them: at most so many.
PYDET_HD int64_t places_of(const Attention &p, const Extent &extent) {
  return p.k_start ? extent.first + extent.keys : p.keys;
}

// With this workspace delta is made once, of each head of each query; without, each block makes what it needs.
PYDET_HD uint64_t bytes_of_deltas(const Attention &p) {
  return uint64_t(p.q_start ? 1 : p.sequences) * uint64_t(p.queries) * uint64_t(p.heads) * sizeof(float);
}
PYDET_HD const float *deltas_of(const AttentionBackward &p) {
  return p.workspace && p.workspace_size >= bytes_of_deltas(p.forward) ? static_cast<const float *>(p.workspace)
                                                                       : nullptr;
}

// What comes before and after the products, once its kernels are there. The device is current.
pydet_status load_rows(const char *name, const AttentionBackward &);
pydet_status make_deltas(const char *name, const AttentionBackward &);
pydet_status make_sink_gradients(const char *name, const AttentionBackward &);

#if defined(__CUDACC__) || defined(__HIPCC__)

// ---- Rows --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int64_t delta_place(const Attention &p, int64_t sequence, const Extent &extent,
                                               const QueryRow &row) {
  return (row.query + (p.q_start ? extent.q_begin : sequence * p.queries)) * p.heads + row.head;
}

// The kDeltaLanes neighbouring threads of a row call it, each as `lane`; all receive it.
template <Type type, int unrolled = 8>
__device__ __forceinline__ float delta_of(const AttentionBackward &p, int64_t sequence, const Extent &extent,
                                          const QueryRow &row, int lane) {
  const int64_t dout = row_offset(p.dout, sequence, extent, row),
                out = row_offset(p.forward.out, sequence, extent, row);
  float sum = 0.0f;
#pragma unroll unrolled
  for (int64_t e = lane; e < p.forward.e; e += kDeltaLanes)
    sum = fmaf(load_f32(p.dout.data, type, dout + e), load_f32(p.forward.out.data, type, out + e), sum);
#pragma unroll
  for (int mask = 1; mask < kDeltaLanes; mask *= 2) sum += gpu_shfl_xor(sum, mask, kDeltaLanes);
  return sum;
}

__device__ __forceinline__ float lse_of(const Attention &p, int64_t sequence, const Extent &extent,
                                        const QueryRow &row) {
  return reinterpret_cast<const float *>(p.lse.data)[row_offset(p.lse, sequence, extent, row)];
}

// A row whose lse is -Inf has no allowed key.
__device__ __forceinline__ void close(QueryRow &row, const RowBehind &behind) {
  if (behind.twos == -INFINITY) row.keys.end = row.keys.first;
}

// ---- Keys --------------------------------------------------------------------------------------------------------

// `size` places of a sequence's storage from `place` on, and the queries that may see any of them.
struct KeysTile {
  int64_t place, key;  // the first one, and the key that lies there; less than 0 for padding
  int places;          // that are there
  int own, own_end;    // of them those with a key of the sequence; the others' rows are zeros
  QueryRange queries;
  int64_t block;  // the contract's block of queries in which the first of them is begins here

  __device__ __forceinline__ KeysTile(const Attention &p, const Extent &extent, int64_t tile, int size)
      : place(tile * size), key(tile * size - extent.first), queries{0, 0}, block(0) {
    places = int(within(places_of(p, extent) - place, 0, size));
    own = int(within(-key, 0, places)), own_end = int(within(extent.keys - key, own, places));
    if (own == own_end) return;
    queries = {queries_of(p, extent, key + own).first, queries_of(p, extent, key + own_end - 1).end};
    block = queries.first - (queries.first - first_query(p, extent)) % kQueriesBlock;
  }
  __device__ __forceinline__ bool empty() const { return places == 0; }
  __device__ __forceinline__ bool owns(int r) const { return r >= own && r < own_end; }
};

__device__ __forceinline__ int64_t place_offset(const Heads &x, int64_t sequence, const Extent &extent, int64_t group,
                                                int64_t place) {
  return sequence * x.sequence_stride + group * x.head_stride + (extent.k_begin + place) * x.token_stride;
}
__device__ __forceinline__ int64_t key_place_offset(const Heads &x, int64_t sequence, const Extent &extent,
                                                    int64_t group, int64_t key) {
  return place_offset(x, sequence, extent, group, extent.first + key);
}

// A row of dk or dv, element by element: where it begins, what it continues, what it becomes.
__device__ __forceinline__ float begin_sum(const AttentionBackward &p, const Heads &to, int64_t at) {
  return p.accumulate ? reinterpret_cast<const float *>(to.data)[at] : 0.0f;
}

// ---- Pairs -------------------------------------------------------------------------------------------------------

// From the chains of q, k and of dout, v to a pair's weight and the gradient of its score, neither rounded. Of a pair
// that is not allowed both are +0; `allowed` comes as causal, window and mask let it, and says in the end whether it
// is.
template <class Exp2, bool adjusts = true>
__device__ __forceinline__ void weigh_pair(const AttentionBackward &b, const ScoreScale &scale, int64_t sequence,
                                           const Extent &extent, const QueryRow &row, const RowBehind &behind,
                                           int64_t key, bool &allowed, float &score, float &gradient) {
  const Attention &p = b.forward;
  float x = score, t = 0.0f, c = scale.c;
  if (adjusts && scale.softcap != 0.0f) {
    t = tanh_f32(score * scale.before_tanh);
    x = scale.softcap * t;
  }
  if (adjusts && p.bias.data && allowed) {
    const float bias = load_f32(p.bias.data, p.bias.type, pair_offset(p.bias, sequence, extent, row, key));
    x = fmaf(x, scale.c, bias * kLog2e), c = 1.0f;
  }
  allowed = allowed && x != -INFINITY;
  const float weight = weight_again<Exp2>(x, c, behind);
  float ds = score_gradient(weight, gradient, p.scale, behind);
  if (adjusts && scale.softcap != 0.0f) ds = capped_gradient(ds, t);
  score = allowed ? weight : 0.0f, gradient = allowed ? ds : 0.0f;
}

#endif

}  // namespace pydet
