// dq of attention on tensor cores (attention_backward_mma.h): a block has 64 rows, each a query of one of a group's
// heads, and 64 or 128 columns of dq. It walks the contract's blocks of keys from the last, each from its first key.

#include "gpu/nvidia/attention_backward_mma.h"
#include "gpu/device.h"

namespace pydet {
namespace {

template <Type type, int columns, bool adjusts> class Queries {
 public:
  __device__ Queries(const AttentionBackward &problem, const ScoreScale &scale, Shared &shared,
                     const AttentionBackwardWay &way, int64_t tile, int64_t s, int64_t group, int column0)
      : p_(problem),
        f_(problem.forward),
        scale_(scale),
        shared_(shared),
        products_(shared, way, f_),
        s_(int(s)),
        group_(int(group)),
        column0_(column0),
        extent_(shared.extent),
        row0_(tile * kRows) {
    if (threadIdx.x == 0) shared.extent = extent_of(f_, s);
    __syncthreads();
    const int64_t rows = extent_.queries * heads_of_group(f_) - row0_;
    rows_ = rows < 0 ? 0 : rows < kRows ? int(rows) : kRows;
    if (rows_ == 0) return;
    // Rows ascend by query, and so do the keys that they may see.
    from_ = int(tile_row(0).keys.first), to_ = int(tile_row(rows_ - 1).keys.end);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      QueryRow row = tile_row(my_row(h) < rows_ ? my_row(h) : 0);
      const float lse = my_row(h) < rows_ ? lse_of(f_, s_, extent_, row) : -INFINITY;
      behind_[h] = row_behind(lse, delta(row), f_.scale);
      close(row, behind_[h]);
      first_[h] = int(row.keys.first), end_[h] = int(row.keys.end);
    }
  }

  __device__ bool empty() const { return rows_ == 0; }

  // Blocks of keys from the last.
  __device__ void walk(bool careful) {
    clear<columns>(dq_);
    if (from_ >= to_) return;
    __syncthreads();  // a walk before this one has left shared memory
    for (int i = int(threadIdx.x); i < 2 * kRows; i += kThreads) {
      const int r = i % kRows;
      const Heads &x = i < kRows ? f_.q : p_.dout;
      shared_.tile[i / kRows][r] = r < rows_ ? row_offset(x, s_, extent_, tile_row(r)) : -1;
    }
    __syncthreads();
    products_.load_tile(0, f_.q.data);
    products_.load_tile(1, p_.dout.data);
    const int block = block_keys(f_.d);
#pragma unroll 1
    for (int j0 = (to_ - 1) / block * block; j0 >= 0 && j0 + block > from_; j0 -= block) {
      Sums<columns> sums;
      clear<columns>(sums);
#pragma unroll 1
      for (int j = j0; j < j0 + block && j < to_; j += kWalked)
        if (j + kWalked > from_) add(sums, j, careful);
#pragma unroll
      for (int i = 0; i < columns / 8; ++i)
#pragma unroll
        for (int q = 0; q < 4; ++q) dq_[i][q] += sums[i][q];
    }
  }

  __device__ bool astray() { return __syncthreads_or(not_finite<columns>(dq_)) != 0; }

  __device__ void store() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (my_row(h) >= rows_) continue;
      const int64_t at = row_offset(p_.dq, s_, extent_, tile_row(my_row(h)));
#pragma unroll
      for (int i = 0; i < columns / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = column0_ + 8 * i + pair() + e;
          if (column < f_.d) store_rounded(p_.dq.data, p_.dq.type, at + column, settled(dq_[i][2 * h + e]));
        }
    }
  }

 private:
  struct Meeting {
    const Queries &queries;
    int j0;
    __device__ QueryRow row(int, int h) const {
      QueryRow row = queries.tile_row(my_row(h));
      row.keys = {queries.first_[h], queries.end_[h]};
      return row;
    }
    __device__ RowBehind behind(int, int h) const { return queries.behind_[h]; }
    __device__ int64_t key(int w, int) const { return j0 + w; }
  };

  __device__ QueryRow tile_row(int r) const { return row_of(f_, extent_, group_, row0_ + r); }

  // The four threads of a row make two of its lanes each, as delta_of adds them.
  __device__ float delta(const QueryRow &row) const {
    if (const float *deltas = deltas_of(p_)) return deltas[delta_place(f_, s_, extent_, row)];
    const int64_t dout = row_offset(p_.dout, s_, extent_, row), out = row_offset(f_.out, s_, extent_, row);
    float sums[2] = {};
#pragma unroll 4
    for (int64_t e = pair(); e < f_.e; e += kDeltaLanes)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        sums[i] = fmaf(load_f32(p_.dout.data, type, dout + e + i), load_f32(f_.out.data, type, out + e + i), sums[i]);
    float sum = sums[0] + sums[1];
    sum += gpu_shfl_xor(sum, 1, 4);
    return sum + gpu_shfl_xor(sum, 2, 4);
  }

  // Keys from j0 on.
  __device__ void add(Sums<columns> &sums, int j0, bool careful) {
    __syncthreads();  // those before have been used
    for (int i = int(threadIdx.x); i < 2 * kWalked; i += kThreads) {
      const int j = j0 + i % kWalked;
      const Heads &x = i < kWalked ? f_.k : f_.v;
      shared_.walked[i / kWalked][i % kWalked] =
          j >= from_ && j < to_ ? key_place_offset(x, s_, extent_, group_, j) : -1;
    }
    __syncthreads();
    products_.load_walked(0, f_.k.data);
    products_.load_walked(1, f_.v.data);
    products_.landed();
    Scores scores, gradients;
    products_.chain(scores, 0, f_.q.data, f_.k.data);
    products_.chain(gradients, 1, p_.dout.data, f_.v.data);
    uint32_t seen[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < kWalked / 4; ++n) {
        const int j = j0 + n / 2 * 8 + pair() + n % 2;
        seen[h] |= uint32_t(j >= first_[h] && j < end_[h]) << n;
      }
    weigh_pairs<adjusts>(p_, scale_, s_, extent_, seen, scores, gradients, Meeting{*this, j0});
    if (!products_.whole()) {
      __syncthreads();
      products_.load_columns(0, f_.k.data, column0_);
      products_.landed();
    }
    if (careful) products_.add_by_rows(sums, gradients, seen, 0, column0_);
    else products_.add(sums, gradients, 0, column0_);
  }

  const AttentionBackward &p_;
  const Attention &f_;
  const ScoreScale &scale_;
  Shared &shared_;
  Products<type, columns> products_;
  const int s_, group_, column0_;
  const Extent &extent_;
  const int64_t row0_;
  int rows_;
  int from_, to_;          // keys that any row may see
  int first_[2], end_[2];  // those that my_row(h) may see
  RowBehind behind_[2];
  Sums<columns> dq_;
};

// Tiles from the last, whose rows see most keys where attention is causal.
template <Type type, int columns, bool adjusts>
__global__ void __launch_bounds__(kThreads, 2)
    queries_kernel(const __grid_constant__ AttentionBackward p, const ScoreScale scale, const AttentionBackwardWay way,
                   const int64_t tiles) {
  extern __shared__ __align__(128) char shared[];
  const Attention &f = p.forward;
  const int64_t slices = (f.d + columns - 1) / columns;
  int64_t number = blockIdx.x;
  const int64_t slice = number % slices, group = number / slices % f.groups;
  number = number / slices / f.groups;
  Queries<type, columns, adjusts> queries(p, scale, *reinterpret_cast<Shared *>(shared), way,
                                          tiles - 1 - number / f.sequences, number % f.sequences, group,
                                          int(slice * columns));
  if (queries.empty()) return;
  bool careful = false;
  do queries.walk(careful);
  while (!careful && (careful = queries.astray()));
  queries.store();
}

template <class F> pydet_status with_kernel(const AttentionBackward &p, F f) {
  return with_type<kHalfTypes>(p.forward.q.type, [&](auto element) {
    constexpr Type type = decltype(element)::value;
    if (adjusts_scores(p.forward)) return f(queries_kernel<type, 64, true>, 64);
    return p.forward.d <= 64 ? f(queries_kernel<type, 64, false>, 64) : f(queries_kernel<type, 128, false>, 128);
  });
}

}  // namespace

pydet_status load_queries_mma(const char *name, const AttentionBackward &p) {
  return with_kernel(p, [&](auto kernel, int) { return load(name, kernel); });
}

pydet_status make_queries_mma(const char *name, const AttentionBackward &p, const AttentionBackwardWay &way) {
  const Attention &f = p.forward;
  return with_kernel(p, [&](auto kernel, int columns) {
    const int64_t tiles = divide_up(rows_of_group(f), kRows),
                  blocks = divide_up(f.d, columns) * f.groups * f.sequences * tiles;
    const Launch shape = {name, static_cast<gpu_stream>(f.stream), grid_of(blocks, kThreads), dim3(kThreads),
                          shared_bytes(way.width)};
    return launch(shape, kernel, p, score_scale(f), way, tiles);
  });
}

}  // namespace pydet
