// dk and dv of attention on tensor cores (attention_backward_mma.h): a block has 64 places of a sequence's keys and 64
// or 128 columns of dk and dv. It walks the queries that see any of them in the contract's order: by 128, heads,
// queries. 128 columns spill some registers, and are 1.6 times as fast for heads of 128 as two blocks of 64 columns
// (H100).

#include "gpu/nvidia/attention_backward_mma.h"
#include "gpu/device.h"

namespace pydet {
namespace {

template <Type type, int columns, bool adjusts> class Keys {
 public:
  __device__ Keys(const AttentionBackward &problem, const ScoreScale &scale, Shared &shared,
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
        tile_(f_, extent_of(f_, s), tile, kRows) {
    if (threadIdx.x == 0) shared.extent = extent_of(f_, s);
    __syncthreads();
  }

  __device__ bool empty() const { return tile_.empty(); }

  __device__ void walk(bool careful) {
    begin(dk_, p_.dk, f_.d);
    begin(dv_, p_.dv, f_.e);
    const int from = int(tile_.queries.first), to = int(tile_.queries.end);
    if (from >= to) return;
    __syncthreads();  // a walk before this one has left shared memory
    for (int i = int(threadIdx.x); i < 2 * kRows; i += kThreads) {
      const int r = i % kRows;
      const Heads &x = i < kRows ? f_.k : f_.v;
      shared_.tile[i / kRows][r] = tile_.owns(r) ? key_place_offset(x, s_, extent_, group_, tile_.key + r) : -1;
    }
    __syncthreads();
    products_.load_tile(0, f_.k.data);
    products_.load_tile(1, f_.v.data);
    const int heads = int(heads_of_group(f_));
#pragma unroll 1
    for (int i0 = int(tile_.block); i0 < to; i0 += kQueriesBlock)
#pragma unroll 1
      for (int h = 0; h < heads; ++h)
#pragma unroll 1
        for (int i = i0; i < i0 + kQueriesBlock && i < to; i += kWalked)
          if (i + kWalked > from) add(i, group_ * heads + h, from, to, careful);
  }

  __device__ bool astray() { return __syncthreads_or(not_finite<columns>(dk_) || not_finite<columns>(dv_)) != 0; }

  __device__ void store() const {
    store(dk_, p_.dk, f_.d);
    store(dv_, p_.dv, f_.e);
  }

 private:
  struct Meeting {
    const Keys &keys;
    int i0;
    int64_t head;
    __device__ QueryRow row(int w, int) const { return {i0 + w, head, {keys.shared_.first[w], keys.shared_.end[w]}}; }
    __device__ RowBehind behind(int w, int) const { return keys.shared_.behind[w]; }
    __device__ int64_t key(int, int h) const { return keys.key(h); }
  };

  __device__ int key(int h) const { return int(tile_.key) + my_row(h); }
  __device__ int64_t place(const Heads &x, int r) const {
    return place_offset(x, s_, extent_, group_, tile_.place + r);
  }

  // f(sum, row, column) for a thread's sums.
  template <class S, class F> __device__ void each(S &sums, int64_t width, F f) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < columns / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (column0_ + 8 * i + pair() + e < width) f(sums[i][2 * h + e], my_row(h), column0_ + 8 * i + pair() + e);
  }
  __device__ void begin(Sums<columns> &sums, const Heads &to, int64_t width) const {
    clear<columns>(sums);
    if (!p_.accumulate) return;
    each(sums, width, [&](float &x, int r, int column) {
      if (tile_.owns(r)) x = begin_sum(p_, to, place(to, r) + column);
    });
  }
  __device__ void store(const Sums<columns> &sums, const Heads &to, int64_t width) const {
    each(sums, width, [&](float x, int r, int column) {
      if (r < tile_.places && (tile_.owns(r) || !p_.accumulate))
        store_rounded(to.data, to.type, place(to, r) + column, settled(x));
    });
  }

  // Queries from i0 on of a head.
  __device__ void add(int i0, int64_t head, int from, int to, bool careful) {
    __syncthreads();  // those before have been used
    find_rows(i0, head, from, to);
    __syncthreads();
    products_.load_walked(0, f_.q.data);
    products_.load_walked(1, p_.dout.data);
    products_.landed();
    Scores weights, gradients;
    products_.chain(weights, 0, f_.k.data, f_.q.data);
    products_.chain(gradients, 1, f_.v.data, p_.dout.data);
    uint32_t seen[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kWalked / 8; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int w = 8 * i + pair() + e;
#pragma unroll
        for (int h = 0; h < 2; ++h)
          seen[h] |= uint32_t(key(h) >= shared_.first[w] && key(h) < shared_.end[w]) << (2 * i + e);
      }
    weigh_pairs<adjusts>(p_, scale_, s_, extent_, seen, weights, gradients, Meeting{*this, i0, head});
    if (!products_.whole()) {
      __syncthreads();
      products_.load_columns(0, f_.q.data, column0_);
      products_.load_columns(1, p_.dout.data, column0_);
      products_.landed();
    }
    if (careful) {
      products_.add_by_rows(dv_, weights, seen, 1, column0_);
      products_.add_by_rows(dk_, gradients, seen, 0, column0_);
    } else {
      products_.add(dv_, weights, 1, column0_);
      products_.add(dk_, gradients, 0, column0_);
    }
  }

  __device__ void find_rows(int i0, int64_t head, int from, int to) {
    // Eight threads a row, a lane of delta each.
    for (int i = int(threadIdx.x) / kDeltaLanes; i < kWalked; i += kThreads / kDeltaLanes) {
      const bool there = i0 + i >= from && i0 + i < to;
      QueryRow row = {there ? i0 + i : from, head, {0, 0}};
      const int part = int(threadIdx.x) % kDeltaLanes;
      const float *deltas = deltas_of(p_), delta = deltas ? deltas[delta_place(f_, s_, extent_, row)]
                                                          : delta_of<type, 1>(p_, s_, extent_, row, part);
      if (part != 0) continue;
      if (there) row.keys = keys_of(f_, extent_, row.query);
      const RowBehind behind = row_behind(lse_of(f_, s_, extent_, row), delta, f_.scale);
      close(row, behind);
      shared_.walked[0][i] = there ? row_offset(f_.q, s_, extent_, row) : -1;
      shared_.walked[1][i] = there ? row_offset(p_.dout, s_, extent_, row) : -1;
      shared_.behind[i] = behind;
      shared_.first[i] = int(row.keys.first), shared_.end[i] = int(row.keys.end);
    }
  }

  const AttentionBackward &p_;
  const Attention &f_;
  const ScoreScale &scale_;
  Shared &shared_;
  Products<type, columns> products_;
  const int s_, group_, column0_;
  const Extent &extent_;
  const KeysTile tile_;
  Sums<columns> dk_, dv_;
};

// Blocks: slices of columns, groups and sequences beside each other, then tiles from the first, which most queries see
// where attention is causal.
template <Type type, int columns, bool adjusts>
__global__ void __launch_bounds__(kThreads, 2)
    keys_kernel(const __grid_constant__ AttentionBackward p, const ScoreScale scale, const AttentionBackwardWay way,
                const int64_t slices) {
  extern __shared__ __align__(128) char shared[];
  const Attention &f = p.forward;
  int64_t number = blockIdx.x;
  const int64_t slice = number % slices, group = number / slices % f.groups;
  number = number / slices / f.groups;
  Keys<type, columns, adjusts> keys(p, scale, *reinterpret_cast<Shared *>(shared), way, number / f.sequences,
                                    number % f.sequences, group, int(slice * columns));
  if (keys.empty()) return;
  bool careful = false;
  do keys.walk(careful);
  while (!careful && (careful = keys.astray()));
  keys.store();
}

template <class F> pydet_status with_kernel(const AttentionBackward &p, F f) {
  return with_type<kHalfTypes>(p.forward.q.type, [&](auto element) {
    constexpr Type type = decltype(element)::value;
    if (adjusts_scores(p.forward)) return f(keys_kernel<type, 64, true>, 64);
    return p.forward.d <= 64 && p.forward.e <= 64 ? f(keys_kernel<type, 64, false>, 64)
                                                  : f(keys_kernel<type, 128, false>, 128);
  });
}

}  // namespace

pydet_status load_keys_mma(const char *name, const AttentionBackward &p) {
  return with_kernel(p, [&](auto kernel, int) { return load(name, kernel); });
}

pydet_status make_keys_mma(const char *name, const AttentionBackward &p, const AttentionBackwardWay &way) {
  const Attention &f = p.forward;
  return with_kernel(p, [&](auto kernel, int columns) {
    const int64_t slices = divide_up(f.d > f.e ? f.d : f.e, columns),
                  blocks = slices * f.groups * f.sequences * divide_up(f.keys, kRows);
    const Launch shape = {name, static_cast<gpu_stream>(f.stream), grid_of(blocks, kThreads), dim3(kThreads),
                          shared_bytes(way.width)};
    return launch(shape, kernel, p, score_scale(f), way, slices);
  });
}

}  // namespace pydet
