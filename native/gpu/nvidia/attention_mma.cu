// Attention on tensor cores through mma.sync, for every layout, option and width: the general kernel of sm90 and sm80.
//
//   NUMERICS.md, "Attention", has the formula. A block of four warps makes 64 rows, each a query of one of a group's heads,
//   and 64 columns of their result; a warp has 16 rows. Keys come in the contract's blocks of 64 or 128 through
//   shared memory, the next block's while this one's weights and values are worked on. An m16n8k16 is one step of sm90 on
//   Hopper and later, two of sm80 before (gemm_mma.cu). With a workspace a block makes one segment, and
//   attention_combine.cu folds them.
//
// A key that a row may not see has weight 0, and 0 times a value is 0 unless that is Inf or NaN. A tile with a result that
// is not finite is therefore made again row by row, with zeros for such keys' values. Not tuned for peak speed:
// sm90/attention/ is.

#include "gpu/any/attention.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/mma.h"

namespace pydet {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRows = 16 * kWarps;
constexpr int kColumns = 64;   // of the result; for more a thread has no registers
constexpr int kStep = 16;      // of one mma, along d and along keys
constexpr int kVector = 8;     // elements in 16 bytes
constexpr int kPad = kVector;  // so that eight rows at one column lie in all banks
constexpr int kSeenBytes = kRows * kKeysBlock / 8;

// Elements of a row of q and k in shared memory, and those that are computed with.
PYDET_HD int used(int64_t d) { return int((d + kStep - 1) / kStep * kStep); }
PYDET_HD int stride_of(int64_t d) { return used(d) + kPad; }

// Beside q, k and v: which keys the rows see (kSeenBytes), and, where there is a next segment, a row's sums so far.
template <int block> int shared_bytes(int64_t d, bool folds) {
  return kSeenBytes + 2 * ((kRows + block) * stride_of(d) + block * (kColumns + kPad)) +
         (folds ? 4 * kRows * kColumns : 0);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
using Exp2 = HopperExp2;
#else
using Exp2 = CoarseExp2;
#endif

template <Type type, int block, bool aligned, bool adjusts> class Tile {
 public:
  __device__ Tile(const Attention &problem, const ScoreScale &scale, uint16_t *shared, int tile, int s, int group,
                  int column0)
      : p_(problem),
        scale_(scale),
        stride_(stride_of(problem.d)),
        seen_(reinterpret_cast<uint32_t *>(shared)),
        q_(shared + kSeenBytes / 2),
        k_(q_ + kRows * stride_),
        v_(k_ + block * stride_),
        total_(reinterpret_cast<float *>(v_ + block * (kColumns + kPad))),
        s_(s),
        group_(group),
        column0_(column0),
        extent_(extent_of(problem, s)),
        row0_(tile * kRows) {
    const int64_t rows = extent_.queries * heads_of_group(p_) - row0_;
    rows_ = rows < 0 ? 0 : rows < kRows ? int(rows) : kRows;
    if (rows_ == 0) return;
    // Rows ascend by query, and so do the keys that they may see.
    from_ = int(tile_row(0).keys.first), to_ = int(tile_row(rows_ - 1).keys.end);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      mine_[h] = my_row(h) < rows_ ? my_row(h) : 0;
      const KeyRange keys = tile_row(mine_[h]).keys;
      first_[h] = int(keys.first), end_[h] = my_row(h) < rows_ ? int(keys.end) : first_[h];
    }
  }

  __device__ bool empty() const { return rows_ == 0; }

  // Segments `first` to `last`, folded. Every thread calls it.
  __device__ void walk(int64_t first, int64_t last, bool careful) {
    begin_segment();
    bool first_segment = true;
    const int begin = first * p_.kv_chunk > from_ ? int(first * p_.kv_chunk) : from_,
              end = last * p_.kv_chunk < to_ ? int(last * p_.kv_chunk) : to_;
    if (begin >= end) return;
    __syncthreads();                 // a walk before this one has left shared memory
    int j0 = begin / block * block;  // segments are made of whole blocks
    load_queries();
    load_keys(j0);
    commit_copies();
    for (; j0 < end; j0 += block) {
      wait_copies<0>();
      __syncthreads();  // keys have landed, and the values of the block before have been used
      load_values(j0);
      commit_copies();
      make_scores();
      __syncthreads();  // keys have been used
      const bool last_block = j0 + block >= end;
      if (!last_block) load_keys(j0 + block);
      commit_copies();
      make_weights(j0, careful);
      wait_copies<1>();
      __syncthreads();  // values have landed
      if (careful) add_values_by_rows(j0);
      else add_values();
      if (!last_block && (j0 + block) % p_.kv_chunk != 0) continue;
      end_segment(first_segment, last_block);
      first_segment = false;
    }
    wait_copies<0>();
  }

  __device__ bool astray() {
    int mine = 0;
    each(o_, [&](float &x, int) { mine |= !(fabsf(x) < INFINITY); });
    return __syncthreads_or(mine) != 0;
  }

  // Of all segments the result; of one, where they are apart, what the kernel that folds them takes.
  __device__ void store(bool split, int64_t segment) {
    if (split) store_part(segment);
    else store_rows();
  }

 private:
  __device__ void store_part(int64_t segment) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (my_row(h) >= rows_) continue;
      float *to = parts_of(p_, s_, extent_, tile_row(my_row(h))) + segment * floats_of_part(p_);
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (column(i) + e < p_.e) to[column(i) + e] = o_[i][2 * h + e];
      if (lane() % 4 == 0 && column0_ == 0) to[p_.e] = m_[h], to[p_.e + 1] = l_[h][0];
    }
  }

  __device__ void store_rows() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (my_row(h) >= rows_) continue;
      const QueryRow row = tile_row(my_row(h));
      const RowEnd<Exp2> end(p_, row.head, {m_[h], l_[h][0]});
      const int64_t begin = row_offset(p_.out, s_, extent_, row);
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (column(i) + e < p_.e)
            store_rounded(p_.out.data, type, begin + column(i) + e, end.element(o_[i][2 * h + e]));
      if (lane() % 4 == 0 && column0_ == 0 && p_.lse.data)
        reinterpret_cast<float *>(p_.lse.data)[row_offset(p_.lse, s_, extent_, row)] = end.lse;
    }
  }

  __device__ QueryRow tile_row(int r) const { return row_of(p_, extent_, group_, row0_ + r); }
  __device__ static int lane() { return int(threadIdx.x) % kWarp; }
  __device__ static int warp() { return int(threadIdx.x) / kWarp; }
  // Element 2 h + e of a fragment: this row of the tile, and the piece's column lane() % 4 * 2 + e.
  __device__ static int my_row(int h) { return 16 * warp() + lane() / 4 + 8 * h; }
  __device__ int column(int i) const { return column0_ + 8 * i + lane() % 4 * 2; }

  // f(element, h) for all of a thread's elements.
  template <int pieces, class F> __device__ static void each(float (&x)[pieces][4], F f) {
#pragma unroll
    for (int i = 0; i < pieces; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) f(x[i][q], q / 2);
  }

  // Eight elements from `at` on into shared memory, or zeros.
  __device__ static void copy_vector(uint16_t *to, const char *data, int64_t at, bool there) {
    const uint16_t *from = reinterpret_cast<const uint16_t *>(data) + (there ? at : 0);
    if constexpr (aligned) {
      copy_async_16(to, from, there ? 16 : 0);
    } else {
      uint32_t words[4] = {};
      if (there)
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = from[2 * i] | uint32_t(from[2 * i + 1]) << 16;
      *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  __device__ void load_queries() {
    const int vectors = used(p_.d) / kVector;
    for (int i = int(threadIdx.x); i < kRows * vectors; i += kThreads) {
      const int r = i / vectors, d = i % vectors * kVector;
      const bool there = r < rows_ && d < p_.d;
      copy_vector(q_ + r * stride_ + d, p_.q.data, there ? row_offset(p_.q, s_, extent_, tile_row(r)) + d : 0, there);
    }
  }
  // Keys that no row may see are zeros.
  __device__ int64_t offset_of(const Heads &x, int key) const {
    return group_ * x.head_stride + key_offset(p_, x, s_, extent_.k_begin + extent_.first + key);
  }
  __device__ bool is_seen(int key) const { return key >= from_ && key < to_; }
  __device__ void load_keys(int j0) {
    const int vectors = used(p_.d) / kVector;
#pragma unroll 2
    for (int i = int(threadIdx.x); i < block * vectors; i += kThreads) {
      const int j = i / vectors, d = i % vectors * kVector;
      const bool there = is_seen(j0 + j) && d < p_.d;
      copy_vector(k_ + j * stride_ + d, p_.k.data, there ? offset_of(p_.k, j0 + j) + d : 0, there);
    }
  }
  __device__ void load_values(int j0) {
    constexpr int kVectors = kColumns / kVector;
#pragma unroll 2
    for (int i = int(threadIdx.x); i < block * kVectors; i += kThreads) {
      const int j = i / kVectors, e = i % kVectors * kVector;
      const bool there = is_seen(j0 + j) && column0_ + e < p_.e;
      copy_vector(v_ + j * (kColumns + kPad) + e, p_.v.data, there ? offset_of(p_.v, j0 + j) + column0_ + e : 0, there);
    }
  }
  // Those that row r sees: bit 2 (j / 8) + j % 2 of word j % 8 / 2.
  __device__ void load_values_of(int j0, int r) {
#pragma unroll 1
    for (int i = int(threadIdx.x); i < block * kColumns; i += kThreads) {
      const int j = i / kColumns, e = i % kColumns;
      const bool there = column0_ + e < p_.e && seen_[4 * r + j % 8 / 2] >> (j / 8 * 2 + j % 2) & 1;
      v_[j * (kColumns + kPad) + e] =
          there ? reinterpret_cast<const uint16_t *>(p_.v.data)[offset_of(p_.v, j0 + j) + column0_ + e] : 0;
    }
  }

  __device__ void begin_segment() {
#pragma unroll
    for (int h = 0; h < 2; ++h) m_[h] = -INFINITY, l_[h][0] = l_[h][1] = 0.0f;
    each(o_, [](float &x, int) { x = 0.0f; });
  }

  // Two operands of eight columns from 16 rows of shared memory, k along the rows, or across them (`turned`).
  template <bool turned> __device__ static void load_right(uint32_t (&b)[4], const uint16_t *from, int stride) {
    const int matrix = lane() / 8, k = matrix % 2 * 8, n = matrix / 2 * 8;
    load_matrices<turned>(
        b, shared_address(turned ? from + (k + lane() % 8) * stride + n : from + (n + lane() % 8) * stride + k));
  }

  __device__ void make_scores() {
    each(x_, [](float &x, int) { x = 0.0f; });
#pragma unroll 1
    for (int d = 0; d < used(p_.d); d += kStep) {
      uint32_t a[4];
      load_matrices<false>(a, shared_address(q_ + (16 * warp() + lane() % 16) * stride_ + d + lane() / 16 * 8));
#pragma unroll
      for (int i = 0; i < block / 16; ++i) {
        uint32_t b[4];
        load_right<false>(b, k_ + 16 * i * stride_ + d, stride_);
        mma<type>(x_[2 * i], a, b[0], b[1]);
        mma<type>(x_[2 * i + 1], a, b[2], b[3]);
      }
    }
  }

  // From scores to weights, and the references; sums so far are scaled to them.
  __device__ void make_weights(int j0, bool careful) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool plain = !adjusts && !p_.allowed.data && j0 >= first_[h] && j0 + block <= end_[h];
      if (!plain) {
        const int j = j0 + lane() % 4 * 2;
        QueryRow row = tile_row(mine_[h]);
        row.keys = {first_[h], end_[h]};
        uint32_t seen = 0;
#pragma unroll 2
        for (int i = 0; i < block / 4; ++i) seen |= uint32_t(sees(p_, s_, extent_, row, j + i / 2 * 8 + i % 2)) << i;
#pragma unroll
        for (int i = 0; i < block / 8; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float &x = x_[i][2 * h + e];
            if (!(seen >> (2 * i + e) & 1)) x = -INFINITY;
            else if (adjusts) x = biased(p_, scale_, s_, extent_, row, j + 8 * i + e, x);
          }
      }
      if (careful) {
        uint32_t seen = 0;
#pragma unroll
        for (int i = 0; i < block / 4; ++i) seen |= uint32_t(x_[i / 2][2 * h + i % 2] != -INFINITY) << i;
        seen_[my_row(h) * 4 + lane() % 4] = seen;
      }
      float largest = -INFINITY;
#pragma unroll
      for (int i = 0; i < block / 8; ++i) largest = reference_of(reference_of(largest, x_[i][2 * h]), x_[i][2 * h + 1]);
      largest = reference_of(largest, gpu_shfl_xor(largest, 1, 4));
      largest = reference_of(largest, gpu_shfl_xor(largest, 2, 4));
      const Moved<Exp2> moved(p_, scale_, m_[h], largest);
      m_[h] = moved.m;
#pragma unroll
      for (int e = 0; e < 2; ++e) l_[h][e] *= moved.factor;
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) o_[i][2 * h + e] *= moved.factor;
#pragma unroll
      for (int i = 0; i < block / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float &x = x_[i][2 * h + e];
          x = moved.weight(x);
          l_[h][e] += x;
        }
    }
  }

  // Weights of 16 keys as the left operand of an mma.
  __device__ void load_left(uint32_t (&a)[4], int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float *pair = &x_[2 * step + i / 2][i % 2 * 2];
      a[i] = rounded_pair<type>(pair[0], pair[1]);
    }
  }

  __device__ void add_values() {
#pragma unroll
    for (int step = 0; step < block / kStep; ++step) {
      uint32_t a[4];
      load_left(a, step);
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        uint32_t b[4];
        load_right<true>(b, v_ + kStep * step * (kColumns + kPad) + 16 * i, kColumns + kPad);
        mma<type>(o_[2 * i], a, b[0], b[1]);
        mma<type>(o_[2 * i + 1], a, b[2], b[3]);
      }
    }
  }

  // To one row of the warp's alone: the others' weights are zeros, and their sums stay as they are.
  __device__ void add_values_to(int row, const uint32_t (&weights)[block / kStep][4]) {
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      float sums[2][4];
#pragma unroll
      for (int q = 0; q < 8; ++q) sums[q / 4][q % 4] = o_[2 * i + q / 4][q % 4];
#pragma unroll
      for (int step = 0; step < block / kStep; ++step) {
        uint32_t a[4], b[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) a[k] = lane() / 4 + k % 2 * 8 == row ? weights[step][k] : 0;
        load_right<true>(b, v_ + kStep * step * (kColumns + kPad) + 16 * i, kColumns + kPad);
        mma<type>(sums[0], a, b[0], b[1]);
        mma<type>(sums[1], a, b[2], b[3]);
      }
#pragma unroll
      for (int q = 0; q < 8; ++q)
        if (lane() / 4 + q % 4 / 2 * 8 == row) o_[2 * i + q / 4][q % 4] = sums[q / 4][q % 4];
    }
  }

  // QueryRow after row, with zeros for the values of keys that it does not see.
  __device__ void add_values_by_rows(int j0) {
    uint32_t weights[block / kStep][4];
#pragma unroll
    for (int step = 0; step < block / kStep; ++step) load_left(weights[step], step);
#pragma unroll 1
    for (int r = 0; r < rows_; ++r) {
      load_values_of(j0, r);
      __syncthreads();
      if (r / 16 == warp()) add_values_to(r % 16, weights);
      __syncthreads();
    }
  }

  // The segment joins those before it, which wait in shared memory; after the last one the row is o_, m_ and l_[.][0].
  __device__ void end_segment(bool first, bool last) {
    float *total = total_ + threadIdx.x;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float l = l_[h][0] + l_[h][1];
      l += gpu_shfl_xor(l, 1, 4);
      l += gpu_shfl_xor(l, 2, 4);
      if (!first) {
        const Joined<Exp2> joined(total_m_[h], m_[h]);
        m_[h] = joined.m, l = joined.sum(total_l_[h], l);
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            o_[i][2 * h + e] = joined.sum(total[(4 * i + 2 * h + e) * kThreads], o_[i][2 * h + e]);
      }
      total_m_[h] = m_[h], total_l_[h] = l_[h][0] = l;
    }
    if (last) return;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) total[(4 * i + q) * kThreads] = o_[i][q];
    begin_segment();
  }

  const Attention &p_;
  const ScoreScale &scale_;
  const int stride_;  // of q_ and k_
  uint32_t *seen_;    // of each row a bit a key, four words, while rows are made one by one
  uint16_t *q_, *k_, *v_;
  float *total_;  // of each thread its pieces of o
  const int s_, group_, column0_;
  const Extent extent_;
  const int row0_;
  int rows_;
  int from_, to_;  // keys that any row may see
  // Of my_row(h): the tile's row that is meant, and the keys that it may see.
  int mine_[2], first_[2], end_[2];
  float m_[2], l_[2][2], total_m_[2], total_l_[2];
  float x_[block / 8][4];  // scores, then weights
  float o_[kColumns / 8][4];
};

// Blocks: slices of columns, groups and sequences beside each other, then tiles from the last, whose rows see most keys where
// attention is causal, then segments where they are apart.
template <Type type, int block, bool aligned, bool adjusts>
__global__ void __launch_bounds__(kThreads, 2)
    attention_mma_kernel(const __grid_constant__ Attention p, const ScoreScale scale, const int64_t tiles,
                         const bool split) {
  extern __shared__ __align__(16) uint16_t shared[];
  const int64_t slices = (p.e + kColumns - 1) / kColumns;
  int64_t number = blockIdx.x;
  const int64_t slice = number % slices, group = number / slices % p.groups;
  number = number / slices / p.groups;
  const int64_t s = number % p.sequences, tile_number = tiles - 1 - number / p.sequences % tiles,
                segment = number / p.sequences / tiles;
  const int64_t first = split ? segment : 0, last = split ? segment + 1 : segments_of(p);
  Tile<type, block, aligned, adjusts> tile(p, scale, shared, int(tile_number), int(s), int(group),
                                           int(slice * kColumns));
  if (tile.empty()) return;
  bool careful = false;
  do tile.walk(first, last, careful);
  while (!careful && (careful = tile.astray()));
  tile.store(split, segment);
}

constexpr const char *kName = "attention_mma";

template <Type type, int block, bool aligned, bool adjusts> pydet_status run(const Attention &p) {
  const int64_t tiles = divide_up(rows_of_group(p), kRows),
                whole = tiles * divide_up(p.e, kColumns) * p.groups * p.sequences;
  const bool split = splits_segments(p, whole);
  const Launch shape = {kName, static_cast<gpu_stream>(p.stream),
                        grid_of(split ? whole * segments_of(p) : whole, kThreads), dim3(kThreads),
                        shared_bytes<block>(p.d, !split && segments_of(p) > 1)};
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(kName, guard.error());
  pydet_status status = split ? load_combine(kName, p) : PYDET_OK;
  if (status == PYDET_OK)
    status = launch(shape, attention_mma_kernel<type, block, aligned, adjusts>, p, score_scale(p), tiles, split);
  return status == PYDET_OK && split ? combine_segments(kName, p) : status;
}

// Whether vectors of eight elements begin at multiples of 16 bytes.
bool in_vectors(const Heads &x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.sequence_stride % kVector == 0 &&
         x.head_stride % kVector == 0 && x.token_stride % kVector == 0;
}

// Scores under a softcap or with a bias are rare: one kernel a block has them, for vectors that begin anywhere.
template <Type type, int block> pydet_status run_block(const Attention &p) {
  if (p.bias.data || p.softcap != 0.0f) return run<type, block, false, true>(p);
  if (!in_vectors(p.q) || !in_vectors(p.k) || !in_vectors(p.v)) return run<type, block, false, false>(p);
  return run<type, block, true, false>(p);
}
template <Type type> pydet_status run_type(const Attention &p) {
  return block_keys(p.d) == kKeysBlock ? run_block<type, kKeysBlock>(p) : run_block<type, 64>(p);
}

}  // namespace

bool attention_mma_takes(const Attention &p) { return shared_bytes<64>(p.d, true) <= gpu_shared_bytes(p.device.id); }

pydet_status attention_mma(const Attention &p) {
  return with_type<kHalfTypes>(p.q.type, [&](auto element) { return run_type<decltype(element)::value>(p); });
}

}  // namespace pydet
