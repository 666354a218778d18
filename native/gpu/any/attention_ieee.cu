// Attention by fmaf chains, on any GPU, for every type, layout and option: the general kernel of arithmetic ieee.
//
//   NUMERICS.md, "Attention", has the formula. A block makes 16 rows, each a query of one of a group's heads. It walks the
//   keys that any of them sees in the contract's blocks of 64 or 128: their scores (a thread has a key and all rows, or half
//   of them), their weights (eight threads a row, one for each partial sum of weights), their sum of values (a thread has
//   a column and all rows; more than 128 columns are shared out among blocks). With a workspace a block makes one segment,
//   and attention_combine.cu folds them.
//
// A key that a row may not see has weight 0, and 0 times a value is 0 unless that is Inf or NaN. A tile with a result that
// is not finite is therefore made again with such keys left out by a branch.

#include "gpu/any/attention.h"
#include "gpu/device.h"
#include "gpu/kernels.h"

namespace pydet {
namespace {

constexpr int kRows = 16;
constexpr int kThreads = kRows * kWeightLanes;
constexpr int kDepth = 32;  // of the heads, staged at a time
static_assert(kThreads == kKeysBlock, "a thread a key of the largest block");

// What the threads of a block exchange; q as [d][kRows] lies behind it.
template <int block> struct Shared {
  float weights[block][kRows];  // scores before
  float keys[kDepth][block + 1];
  float first[kRows], second[kRows];  // factors of rows
  uint32_t seen[block][kRows / 4];    // whether a row sees a key, a byte each
  int64_t q_begin[kRows], out_begin[kRows];
  int astray;  // whether a result was not finite

  __device__ float *queries() { return reinterpret_cast<float *>(this + 1); }
};

template <Type type, int block> class Tile {
 public:
  __device__ Tile(const Attention &problem, const ScoreScale &scale, Shared<block> &shared, int64_t tile, int64_t s,
                  int64_t group, int64_t slice)
      : p_(problem),
        scale_(scale),
        shared_(shared),
        s_(s),
        group_(group),
        column_(slice * kThreads + threadIdx.x),
        extent_(extent_of(problem, s)),
        row0_(tile * kRows) {
    const int64_t rows = extent_.queries * heads_of_group(p_) - row0_;
    rows_ = rows < 0 ? 0 : rows < kRows ? int(rows) : kRows;
    if (rows_ == 0) return;
    // Rows ascend by query, and so do the keys that they may see.
    from_ = tile_row(0).keys.first, to_ = tile_row(rows_ - 1).keys.end;
    mine_ = tile_row(my_row() < rows_ ? my_row() : 0);
    if (my_row() >= rows_) mine_.keys.end = mine_.keys.first;
    if (lane() == 0) {
      shared_.q_begin[my_row()] = row_offset(p_.q, s_, extent_, mine_);
      shared_.out_begin[my_row()] = row_offset(p_.out, s_, extent_, mine_);
    }
    __syncthreads();
    load_queries();
  }

  __device__ bool empty() const { return rows_ == 0; }

  // Segments `first` to `last`, folded. Every thread calls it.
  __device__ void walk(int64_t first, int64_t last, bool careful) {
    total_m_ = -INFINITY, total_l_ = 0.0f;
    each(total_, [](float &x, int) { x = 0.0f; });
    for (int64_t segment = first; segment < last; ++segment) {
      const int64_t begin = segment * p_.kv_chunk, end = begin + p_.kv_chunk < to_ ? begin + p_.kv_chunk : to_;
      if (begin >= end || begin + p_.kv_chunk <= from_) continue;
      m_ = -INFINITY, l_ = 0.0f;
      each(o_, [](float &x, int) { x = 0.0f; });
      for (int64_t j0 = begin; j0 < end; j0 += block) {
        if (j0 + block <= from_) continue;
        make_scores(j0);
        make_weights(j0);
        add_values(j0, careful);
      }
      fold();
    }
  }

  __device__ bool astray() {
    bool mine = false;
    each(total_, [&](float &x, int) { mine |= !(fabsf(x) < INFINITY); });
    if (threadIdx.x == 0) shared_.astray = 0;
    __syncthreads();
    if (mine) shared_.astray = 1;
    __syncthreads();
    return shared_.astray != 0;
  }

  // Of one segment, for the kernel that folds them.
  __device__ void store_part(int64_t segment) {
    if (lane() == 0)
      shared_.out_begin[my_row()] =
          parts_of(p_, s_, extent_, mine_) + segment * floats_of_part(p_) - static_cast<float *>(p_.workspace);
    __syncthreads();
    float *parts = static_cast<float *>(p_.workspace);
    if (column_ < p_.e)
      each(total_, [&](float x, int r) {
        if (r < rows_) parts[shared_.out_begin[r] + column_] = x;
      });
    if (column_ >= kThreads || lane() != 0 || my_row() >= rows_) return;
    parts[shared_.out_begin[my_row()] + p_.e] = total_m_, parts[shared_.out_begin[my_row()] + p_.e + 1] = total_l_;
  }

  __device__ void store() {
    if (lane() == 0) {
      const RowEnd<IeeeExp2<type>> end(p_, mine_.head, {total_m_, total_l_});
      shared_.first[my_row()] = end.scale, shared_.second[my_row()] = end.inverse;
      if (p_.lse.data && column_ < kThreads && my_row() < rows_)
        reinterpret_cast<float *>(p_.lse.data)[row_offset(p_.lse, s_, extent_, mine_)] = end.lse;
    }
    __syncthreads();
    if (column_ >= p_.e) return;
    each(total_, [&](float x, int r) {
      if (r < rows_)
        store_rounded(p_.out.data, type, shared_.out_begin[r] + column_,
                      weighed(x * shared_.first[r], shared_.second[r]));
    });
  }

 private:
  __device__ QueryRow tile_row(int r) const { return row_of(p_, extent_, group_, row0_ + r); }
  // While weights are made: eight threads a row.
  __device__ static int my_row() { return int(threadIdx.x) / kWeightLanes; }
  __device__ static int lane() { return int(threadIdx.x) % kWeightLanes; }

  // f(sum, row) for a thread's sums, of its column.
  template <class F> __device__ static void each(float (&sums)[kRows], F f) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) f(sums[r], r);
  }

  __device__ void load_queries() {
    float *queries = shared_.queries();
    for (int r = 0; r < kRows; ++r)
      for (int64_t d = threadIdx.x; d < p_.d; d += kThreads)
        queries[d * kRows + r] = r < rows_ ? load_f32(p_.q.data, type, shared_.q_begin[r] + d) : 0.0f;
  }

  __device__ int64_t offset_of(const Heads &x, int64_t key) const {
    return group_ * x.head_stride + key_offset(p_, x, s_, extent_.k_begin + extent_.first + key);
  }

  // Chains over d.
  __device__ void make_scores(int64_t j0) {
    constexpr int kRowsEach = kRows * block / kThreads;
    const int key = int(threadIdx.x) % block, r0 = int(threadIdx.x) / block * kRowsEach;
    float scores[kRowsEach] = {};
    for (int64_t d0 = 0; d0 < p_.d; d0 += kDepth) {
      const int depth = p_.d - d0 < kDepth ? int(p_.d - d0) : kDepth;
      __syncthreads();
      for (int i = int(threadIdx.x); i < block * kDepth; i += kThreads) {
        const int j = i / kDepth, d = i % kDepth;
        if (d < depth)
          shared_.keys[d][j] = j0 + j < to_ ? load_f32(p_.k.data, type, offset_of(p_.k, j0 + j) + d0 + d) : 0.0f;
      }
      __syncthreads();
#pragma unroll 4
      for (int d = 0; d < depth; ++d) {
        const float k = shared_.keys[d][key], *q = shared_.queries() + (d0 + d) * kRows + r0;
#pragma unroll
        for (int r = 0; r < kRowsEach; ++r) scores[r] = fmaf(q[r], k, scores[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsEach; ++r) shared_.weights[key][r0 + r] = scores[r];
    __syncthreads();
  }

  // From scores to weights, rounded as values' factors, and the references.
  __device__ void make_weights(int64_t j0) {
    constexpr int kEach = block / kWeightLanes;
    float x[kEach], largest = -INFINITY;
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int j = lane() + i * kWeightLanes;
      const bool sees_it = sees(p_, s_, extent_, mine_, j0 + j);
      x[i] = sees_it ? biased(p_, scale_, s_, extent_, mine_, j0 + j, shared_.weights[j][my_row()]) : -INFINITY;
      largest = reference_of(largest, x[i]);
      seen |= uint32_t(x[i] != -INFINITY) << i;
    }
#pragma unroll
    for (int mask = 1; mask < kWeightLanes; mask *= 2)
      largest = reference_of(largest, gpu_shfl_xor(largest, mask, kWeightLanes));
    const Moved<IeeeExp2<type>> moved(p_, scale_, m_, largest);
    m_ = moved.m, l_ = l_ * moved.factor;
    if (lane() == 0) shared_.first[my_row()] = moved.factor;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int j = lane() + i * kWeightLanes;
      const float weight = seen >> i & 1 ? moved.weight(x[i]) : 0.0f;
      l_ += weight;
      shared_.weights[j][my_row()] = rounded<type>(weight);
      reinterpret_cast<uint8_t *>(shared_.seen[j])[my_row()] = seen >> i & 1;
    }
    __syncthreads();
  }

  // Chains over keys. Careful: a row's has only keys that it sees.
  __device__ void add_values(int64_t j0, bool careful) {
    const int first = from_ > j0 ? int(from_ - j0) : 0, last = to_ - j0 < block ? int(to_ - j0) : block;
    each(o_, [&](float &x, int r) { x *= shared_.first[r]; });
    const auto value = [&](int j) { return load_f32(p_.v.data, type, offset_of(p_.v, j0 + j) + column_); };
    if (column_ >= p_.e) {
      // has no column
    } else if (careful) {
      for (int j = first; j < last; ++j) {
        const float v = value(j);
        each(o_, [&](float &x, int r) {
          if (shared_.seen[j][r / 4] >> r % 4 * 8 & 0xFF) x = fmaf(shared_.weights[j][r], v, x);
        });
      }
    } else {
#pragma unroll 4
      for (int j = first; j < last; ++j) {
        const float v = value(j);
        each(o_, [&](float &x, int r) { x = fmaf(shared_.weights[j][r], v, x); });
      }
    }
    __syncthreads();
  }

  // The segment into the total.
  __device__ void fold() {
    float l = l_;
#pragma unroll
    for (int mask = 1; mask < kWeightLanes; mask *= 2) l += gpu_shfl_xor(l, mask, kWeightLanes);
    const Joined<IeeeExp2<type>> joined(total_m_, m_);
    total_m_ = joined.m, total_l_ = joined.sum(total_l_, l);
    if (lane() == 0) shared_.first[my_row()] = joined.of_first, shared_.second[my_row()] = joined.of_second;
    __syncthreads();
    each(total_, [&](float &x, int r) { x = x * shared_.first[r] + o_[r] * shared_.second[r]; });
    __syncthreads();
  }

  const Attention &p_;
  const ScoreScale &scale_;
  Shared<block> &shared_;
  int64_t s_, group_, column_;
  Extent extent_;
  int64_t row0_;
  int rows_;
  int64_t from_, to_;                // keys that any row may see
  QueryRow mine_;                    // my_row()
  float m_, l_, total_m_, total_l_;  // of it; l_: partial sum lane()
  float o_[kRows], total_[kRows];    // of column_
};

// Blocks: slices of columns, groups and sequences beside each other, then tiles from the last, whose rows see most keys where
// attention is causal, then segments where they are apart.
template <Type type, int block>
__global__ void __launch_bounds__(kThreads)
    attention_ieee_kernel(const __grid_constant__ Attention p, const ScoreScale scale, const int64_t tiles,
                          const bool split) {
  extern __shared__ __align__(16) char shared[];
  const int64_t slices = (p.e + kThreads - 1) / kThreads;
  int64_t number = block_number();
  const int64_t slice = number % slices, group = number / slices % p.groups;
  number = number / slices / p.groups;
  const int64_t s = number % p.sequences, tile_number = tiles - 1 - number / p.sequences % tiles,
                segment = number / p.sequences / tiles;
  if (segment >= (split ? segments_of(p) : 1)) return;
  Tile<type, block> tile(p, scale, *reinterpret_cast<Shared<block> *>(shared), tile_number, s, group, slice);
  if (tile.empty()) return;
  const int64_t first = split ? segment : 0, last = split ? segment + 1 : segments_of(p);
  bool careful = false;
  do tile.walk(first, last, careful);
  while (!careful && (careful = tile.astray()));
  if (split) tile.store_part(segment);
  else tile.store();
}

constexpr const char *kName = "attention_ieee";

template <int block> int shared_bytes(int64_t d) { return int(sizeof(Shared<block>) + d * kRows * sizeof(float)); }

template <Type type, int block> pydet_status run(const Attention &p) {
  const int64_t tiles = divide_up(rows_of_group(p), kRows),
                whole = tiles * divide_up(p.e, kThreads) * p.groups * p.sequences;
  const bool split = splits_segments(p, whole);
  Launch shape = {kName, static_cast<gpu_stream>(p.stream), grid_of(split ? whole * segments_of(p) : whole, kThreads),
                  dim3(kThreads), shared_bytes<block>(p.d)};
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(kName, guard.error());
  pydet_status status = split ? load_combine(kName, p) : PYDET_OK;
  if (status == PYDET_OK) status = launch(shape, attention_ieee_kernel<type, block>, p, score_scale(p), tiles, split);
  return status == PYDET_OK && split ? combine_segments(kName, p) : status;
}

template <Type type> pydet_status run_type(const Attention &p) {
  return block_keys(p.d) == kKeysBlock ? run<type, kKeysBlock>(p) : run<type, 64>(p);
}

}  // namespace

bool attention_ieee_takes(const Attention &p) { return shared_bytes<64>(p.d) <= kBlockSharedBytes; }

pydet_status attention_ieee(const Attention &p) {
  return with_type<kUnscaledTypes>(p.q.type, [&](auto element) { return run_type<decltype(element)::value>(p); });
}

}  // namespace pydet
