// Attention's gradients by fmaf chains, on any GPU, for every type, layout and option: the general kernels of
// arithmetic ieee.
//
//   NUMERICS.md, "Attention, backward", has the formulas. Two kernels make the scores again, and the products of dout
//   and v. Keys: a block has 16 places of a sequence's keys and walks the queries that see any of them, in the
//   contract's blocks of 128 of a head; dk and dv grow in registers, a thread a column of each and all places. Queries:
//   a block has 16 rows, each a query of one of a group's heads, and walks the blocks of keys from the last; a thread
//   has a column of dq and all rows. More than 128 columns are shared out among blocks. In both a thread makes the sums
//   of one vector that is walked with the tile's 16, or with half of them.
//
// A pair that is not allowed has weight 0, and 0 times a number is 0 unless that is Inf or NaN. A tile with a result
// that is not finite is therefore made again with such pairs left out by a branch.

#include "gpu/any/attention_backward.h"
#include "gpu/device.h"
#include "gpu/kernels.h"

namespace pydet {
namespace {

constexpr int kRows = 16;  // of a tile
constexpr int kThreads = 128;
constexpr int kDepth = 32;  // of the heads, staged at a time
static_assert(kThreads == kQueriesBlock && kThreads == kKeysBlock, "a thread a vector of the largest block");

// One operand: where the tile's vectors begin and those that are walked, less than 0 for zeros.
template <int block> struct Places {
  int64_t tile[kRows], walked[block];
};

// What the threads of a block exchange.
template <int block> struct Shared {
  float walked[kDepth][block + 1], tile[kDepth][kRows];
  float weights[block][kRows], gradients[block][kRows];
  uint32_t seen[block][kRows / 4];  // whether a pair is allowed, a byte each
  Places<block> first, second;      // of q and k; of dout and v
  float delta[block];               // of rows that are walked
  RowBehind behind[kRows];          // of the tile's
  int astray;                       // whether a result was not finite
};

// The sums of a thread's walked vector and kEach of the tile's.
template <Type type, int block> struct WalkedPairs {
  static constexpr int kEach = kRows * block / kThreads;
  float scores[kEach], gradients[kEach];

  __device__ static int walked() { return int(threadIdx.x) % block; }
  __device__ static int tile0() { return int(threadIdx.x) / block * kEach; }

  // Chains over `width`. Every thread calls it.
  __device__ static void chain(Shared<block> &shared, float (&sums)[kEach], const char *tile, const char *walks,
                               const Places<block> &at, int64_t width) {
#pragma unroll
    for (int r = 0; r < kEach; ++r) sums[r] = 0.0f;
    for (int64_t d0 = 0; d0 < width; d0 += kDepth) {
      const int depth = width - d0 < kDepth ? int(width - d0) : kDepth;
      __syncthreads();
      for (int i = int(threadIdx.x); i < block * kDepth; i += kThreads) {
        const int j = i / kDepth, d = i % kDepth;
        if (d < depth) shared.walked[d][j] = at.walked[j] < 0 ? 0.0f : load_f32(walks, type, at.walked[j] + d0 + d);
      }
      for (int i = int(threadIdx.x); i < kRows * kDepth; i += kThreads) {
        const int r = i / kDepth, d = i % kDepth;
        if (d < depth) shared.tile[d][r] = at.tile[r] < 0 ? 0.0f : load_f32(tile, type, at.tile[r] + d0 + d);
      }
      __syncthreads();
#pragma unroll 4
      for (int d = 0; d < depth; ++d) {
        const float x = shared.walked[d][walked()], *of_tile = shared.tile[d] + tile0();
#pragma unroll
        for (int r = 0; r < kEach; ++r) sums[r] = fmaf(of_tile[r], x, sums[r]);
      }
    }
  }

  // Into shared memory as factors of the last products. weigh(r, allowed, score, gradient) has the formula, which is
  // there once: it is long.
  template <class F> __device__ void hand_out(Shared<block> &shared, F weigh) const {
    float *weight = shared.weights[walked()] + tile0(), *gradient = shared.gradients[walked()] + tile0();
    uint8_t *seen = reinterpret_cast<uint8_t *>(shared.seen[walked()]) + tile0();
#pragma unroll
    for (int r = 0; r < kEach; ++r) weight[r] = scores[r], gradient[r] = gradients[r];
#pragma unroll 1
    for (int r = 0; r < kEach; ++r) {
      float p = weight[r], ds = gradient[r];
      bool allowed;
      weigh(tile0() + r, allowed, p, ds);
      weight[r] = rounded<type>(p), gradient[r] = rounded<type>(ds), seen[r] = allowed;
    }
    __syncthreads();
  }
};

// sums[r] = chain over the walked vectors first ... last - 1 of factors[j][r] and their element `column`. Careful: of
// allowed pairs alone.
template <Type type, int block>
__device__ __forceinline__ void add_products(const Shared<block> &shared, float (&sums)[kRows],
                                             const float (&factors)[block][kRows], const char *data,
                                             const int64_t (&at)[block], int64_t column, int first, int last,
                                             bool careful) {
  if (careful) {
    for (int j = first; j < last; ++j) {
      const float x = load_f32(data, type, at[j] + column);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (shared.seen[j][r / 4] >> r % 4 * 8 & 0xFF) sums[r] = fmaf(factors[j][r], x, sums[r]);
    }
    return;
  }
#pragma unroll 4
  for (int j = first; j < last; ++j) {
    const float x = load_f32(data, type, at[j] + column);
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = fmaf(factors[j][r], x, sums[r]);
  }
}

__device__ __forceinline__ bool any_astray(int &astray, bool mine) {
  if (threadIdx.x == 0) astray = 0;
  __syncthreads();
  if (mine) astray = 1;
  __syncthreads();
  return astray != 0;
}

// ---- Keys: dk and dv -----------------------------------------------------------------------------------------------

template <Type type> class Keys {
  using Room = Shared<kQueriesBlock>;

 public:
  __device__ Keys(const AttentionBackward &problem, const ScoreScale &scale, Room &shared, int64_t tile, int64_t s,
                  int64_t group, int64_t slice)
      : p_(problem),
        f_(problem.forward),
        scale_(scale),
        shared_(shared),
        s_(s),
        group_(group),
        column_(slice * kThreads + threadIdx.x),
        extent_(extent_of(f_, s)),
        tile_(f_, extent_, tile, kRows) {
    if (threadIdx.x >= kRows) return;
    const int r = int(threadIdx.x);
    shared_.first.tile[r] = tile_.owns(r) ? key_place_offset(f_.k, s_, extent_, group_, tile_.key + r) : -1;
    shared_.second.tile[r] = tile_.owns(r) ? key_place_offset(f_.v, s_, extent_, group_, tile_.key + r) : -1;
  }

  __device__ bool empty() const { return tile_.empty(); }

  __device__ void walk(bool careful) {
    begin(dk_, p_.dk, f_.d);
    begin(dv_, p_.dv, f_.e);
    const int64_t from = tile_.queries.first, to = tile_.queries.end;
    for (int64_t i0 = tile_.block; i0 < to; i0 += kQueriesBlock)
      for (int64_t h = 0; h < heads_of_group(f_); ++h) {
        const int first = i0 < from ? int(from - i0) : 0, last = to - i0 < kQueriesBlock ? int(to - i0) : kQueriesBlock;
        find_rows(i0, group_ * heads_of_group(f_) + h, first, last);
        weigh();
        if (column_ < f_.e)
          add_products<type>(shared_, dv_, shared_.weights, p_.dout.data, shared_.second.walked, column_, first, last,
                             careful);
        if (column_ < f_.d)
          add_products<type>(shared_, dk_, shared_.gradients, f_.q.data, shared_.first.walked, column_, first, last,
                             careful);
        __syncthreads();
      }
  }

  __device__ bool astray() {
    bool mine = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) mine |= !(fabsf(dk_[r]) < INFINITY) || !(fabsf(dv_[r]) < INFINITY);
    return any_astray(shared_.astray, mine);
  }

  __device__ void store() const {
    store(dk_, p_.dk, f_.d);
    store(dv_, p_.dv, f_.e);
  }

 private:
  __device__ int64_t place(const Heads &x, int r) const {
    return place_offset(x, s_, extent_, group_, tile_.place + r);
  }

  __device__ void begin(float (&sums)[kRows], const Heads &to, int64_t width) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      sums[r] = tile_.owns(r) && column_ < width ? begin_sum(p_, to, place(to, r) + column_) : 0.0f;
  }
  __device__ void store(const float (&sums)[kRows], const Heads &to, int64_t width) const {
    if (column_ >= width) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (r < tile_.places && (tile_.owns(r) || !p_.accumulate))
        store_rounded(to.data, to.type, place(to, r) + column_, settled(sums[r]));
  }

  // A thread's query of the block, and what is known of its row.
  __device__ void find_rows(int64_t i0, int64_t head, int first, int last) {
    const int me = int(threadIdx.x);
    const bool there = me >= first && me < last;
    mine_ = {i0 + (there ? me : first), head, {0, 0}};
    shared_.first.walked[me] = there ? row_offset(f_.q, s_, extent_, mine_) : -1;
    shared_.second.walked[me] = there ? row_offset(p_.dout, s_, extent_, mine_) : -1;
    const float *deltas = deltas_of(p_);
    if (!deltas) {
      const int lane = me % kDeltaLanes;
      for (int r = first + me / kDeltaLanes; r - me / kDeltaLanes < last; r += kThreads / kDeltaLanes) {
        const QueryRow row = {i0 + (r < last ? r : first), head, {0, 0}};
        const float delta = delta_of<type>(p_, s_, extent_, row, lane);
        if (r < last && lane == 0) shared_.delta[r] = delta;
      }
      __syncthreads();
    }
    const float delta = deltas ? deltas[delta_place(f_, s_, extent_, mine_)] : shared_.delta[there ? me : first];
    behind_ = row_behind(lse_of(f_, s_, extent_, mine_), delta, f_.scale);
    if (there) mine_.keys = keys_of(f_, extent_, mine_.query);
    close(mine_, behind_);
  }

  __device__ void weigh() {
    WalkedPairs<type, kQueriesBlock> pairs;
    pairs.chain(shared_, pairs.scores, f_.k.data, f_.q.data, shared_.first, f_.d);
    pairs.chain(shared_, pairs.gradients, f_.v.data, p_.dout.data, shared_.second, f_.e);
    pairs.hand_out(shared_, [&](int r, bool &allowed, float &score, float &gradient) {
      const int64_t key = tile_.key + r;
      allowed = sees(f_, s_, extent_, mine_, key);
      weigh_pair<IeeeExp2<type>>(p_, scale_, s_, extent_, mine_, behind_, key, allowed, score, gradient);
    });
  }

  const AttentionBackward &p_;
  const Attention &f_;
  const ScoreScale &scale_;
  Room &shared_;
  int64_t s_, group_, column_;
  Extent extent_;
  KeysTile tile_;
  QueryRow mine_;  // of the block that is walked
  RowBehind behind_;
  float dk_[kRows], dv_[kRows];  // of column_
};

// Blocks: slices of columns, groups and sequences beside each other, then tiles from the first, which most queries see
// where attention is causal.
template <Type type>
__global__ void __launch_bounds__(kThreads)
    keys_kernel(const __grid_constant__ AttentionBackward p, const ScoreScale scale, const int64_t slices) {
  extern __shared__ __align__(16) char shared[];
  const Attention &f = p.forward;
  int64_t number = block_number();
  const int64_t slice = number % slices, group = number / slices % f.groups;
  number = number / slices / f.groups;
  Keys<type> keys(p, scale, *reinterpret_cast<Shared<kQueriesBlock> *>(shared), number / f.sequences,
                  number % f.sequences, group, slice);
  if (keys.empty()) return;
  bool careful = false;
  do keys.walk(careful);
  while (!careful && (careful = keys.astray()));
  keys.store();
}

// ---- Queries: dq ----------------------------------------------------------------------------------------------------

template <Type type, int block> class Queries {
 public:
  __device__ Queries(const AttentionBackward &problem, const ScoreScale &scale, Shared<block> &shared, int64_t tile,
                     int64_t s, int64_t group, int64_t slice)
      : p_(problem),
        f_(problem.forward),
        scale_(scale),
        shared_(shared),
        s_(s),
        group_(group),
        column_(slice * kThreads + threadIdx.x),
        extent_(extent_of(f_, s)),
        row0_(tile * kRows) {
    const int64_t rows = extent_.queries * heads_of_group(f_) - row0_;
    rows_ = rows < 0 ? 0 : rows < kRows ? int(rows) : kRows;
    if (rows_ == 0) return;
    // Rows ascend by query, and so do the keys that they may see.
    from_ = tile_row(0).keys.first, to_ = tile_row(rows_ - 1).keys.end;
    const int r = int(threadIdx.x) / kDeltaLanes, lane = int(threadIdx.x) % kDeltaLanes;
    const QueryRow row = tile_row(r < rows_ ? r : 0);
    const float *deltas = deltas_of(p_),
                delta = deltas ? deltas[delta_place(f_, s_, extent_, row)] : delta_of<type>(p_, s_, extent_, row, lane);
    if (lane == 0) {
      shared_.first.tile[r] = r < rows_ ? row_offset(f_.q, s_, extent_, row) : -1;
      shared_.second.tile[r] = r < rows_ ? row_offset(p_.dout, s_, extent_, row) : -1;
      shared_.behind[r] = row_behind(r < rows_ ? lse_of(f_, s_, extent_, row) : -INFINITY, delta, f_.scale);
    }
    __syncthreads();
  }

  __device__ bool empty() const { return rows_ == 0; }

  // Blocks of keys from the last.
  __device__ void walk(bool careful) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) dq_[r] = 0.0f;
    for (int64_t j0 = (to_ - 1) / block * block; to_ > 0 && j0 + block > from_; j0 -= block) {
      const int first = from_ > j0 ? int(from_ - j0) : 0, last = to_ - j0 < block ? int(to_ - j0) : block;
      find_keys(j0, first, last);
      weigh(j0);
      if (column_ < f_.d) {
        float sums[kRows] = {};
        add_products<type>(shared_, sums, shared_.gradients, f_.k.data, shared_.first.walked, column_, first, last,
                           careful);
#pragma unroll
        for (int r = 0; r < kRows; ++r) dq_[r] += sums[r];
      }
      __syncthreads();
    }
  }

  __device__ bool astray() {
    bool mine = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) mine |= !(fabsf(dq_[r]) < INFINITY);
    return any_astray(shared_.astray, mine);
  }

  __device__ void store() const {
    if (column_ >= f_.d) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (r < rows_)
        store_rounded(p_.dq.data, p_.dq.type, row_offset(p_.dq, s_, extent_, tile_row(r)) + column_, settled(dq_[r]));
  }

 private:
  __device__ QueryRow tile_row(int r) const { return row_of(f_, extent_, group_, row0_ + r); }

  __device__ void find_keys(int64_t j0, int first, int last) {
    const int me = int(threadIdx.x);
    if (me >= block) return;
    const bool there = me >= first && me < last;
    shared_.first.walked[me] = there ? key_place_offset(f_.k, s_, extent_, group_, j0 + me) : -1;
    shared_.second.walked[me] = there ? key_place_offset(f_.v, s_, extent_, group_, j0 + me) : -1;
  }

  __device__ void weigh(int64_t j0) {
    WalkedPairs<type, block> pairs;
    pairs.chain(shared_, pairs.scores, f_.q.data, f_.k.data, shared_.first, f_.d);
    pairs.chain(shared_, pairs.gradients, p_.dout.data, f_.v.data, shared_.second, f_.e);
    const int64_t key = j0 + pairs.walked();
    pairs.hand_out(shared_, [&](int r, bool &allowed, float &score, float &gradient) {
      QueryRow row = tile_row(r < rows_ ? r : 0);
      const RowBehind behind = shared_.behind[r];
      close(row, behind);
      allowed = sees(f_, s_, extent_, row, key);
      weigh_pair<IeeeExp2<type>>(p_, scale_, s_, extent_, row, behind, key, allowed, score, gradient);
    });
  }

  const AttentionBackward &p_;
  const Attention &f_;
  const ScoreScale &scale_;
  Shared<block> &shared_;
  int64_t s_, group_, column_;
  Extent extent_;
  int64_t row0_;
  int rows_;
  int64_t from_, to_;  // keys that any row may see
  float dq_[kRows];    // of column_
};

// Tiles from the last, whose rows see most keys where attention is causal.
template <Type type, int block>
__global__ void __launch_bounds__(kThreads)
    queries_kernel(const __grid_constant__ AttentionBackward p, const ScoreScale scale, const int64_t tiles) {
  extern __shared__ __align__(16) char shared[];
  const Attention &f = p.forward;
  const int64_t slices = divide_up(f.d, kThreads);
  int64_t number = block_number();
  const int64_t slice = number % slices, group = number / slices % f.groups;
  number = number / slices / f.groups;
  if (number / f.sequences >= tiles) return;
  Queries<type, block> queries(p, scale, *reinterpret_cast<Shared<block> *>(shared), tiles - 1 - number / f.sequences,
                               number % f.sequences, group, slice);
  if (queries.empty()) return;
  bool careful = false;
  do queries.walk(careful);
  while (!careful && (careful = queries.astray()));
  queries.store();
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

constexpr const char *kName = "attention_backward_ieee";

template <Type type, int block> pydet_status run(const AttentionBackward &p) {
  const Attention &f = p.forward;
  DeviceGuard guard(f.device.id);
  if (guard.error() != kGpuSuccess) return device_error(kName, guard.error());
  const bool keys = p.dk.data && f.sequences * f.groups * f.keys > 0,
             queries = p.dq.data && f.sequences * rows_of_group(f) > 0;
  PYDET_TRY(load_rows(kName, p));
  if (keys) PYDET_TRY(load(kName, keys_kernel<type>));
  if (queries) PYDET_TRY(load(kName, queries_kernel<type, block>));
  PYDET_TRY(make_deltas(kName, p));
  const ScoreScale scale = score_scale(f);
  Launch shape = {kName, static_cast<gpu_stream>(f.stream), dim3(1), dim3(kThreads)};
  if (keys) {
    const int64_t slices = divide_up(f.d > f.e ? f.d : f.e, kThreads),
                  blocks = slices * f.groups * f.sequences * divide_up(f.keys, kRows);
    shape.grid = grid_of(blocks, kThreads), shape.shared_bytes = int(sizeof(Shared<kQueriesBlock>));
    PYDET_TRY(launch(shape, keys_kernel<type>, p, scale, slices));
  }
  if (queries) {
    const int64_t tiles = divide_up(rows_of_group(f), kRows),
                  blocks = divide_up(f.d, kThreads) * f.groups * f.sequences * tiles;
    shape.grid = grid_of(blocks, kThreads), shape.shared_bytes = int(sizeof(Shared<block>));
    PYDET_TRY(launch(shape, queries_kernel<type, block>, p, scale, tiles));
  }
  return make_sink_gradients(kName, p);
}

template <Type type> pydet_status run_type(const AttentionBackward &p) {
  return block_keys(p.forward.d) == kKeysBlock ? run<type, kKeysBlock>(p) : run<type, 64>(p);
}

}  // namespace

pydet_status attention_backward_ieee(const AttentionBackward &p) {
  return with_type<kUnscaledTypes>(p.forward.q.type,
                                   [&](auto element) { return run_type<decltype(element)::value>(p); });
}

}  // namespace pydet
