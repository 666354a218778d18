// dk and dv of attention on tensor cores: a general kernel, whose blocks have 64 places of a sequence's keys and 64
// columns of dk and dv (attention_backward_mma.h), and a fast one with all columns (attention_backward_mma_team.h). Both
// walk the queries that see any of their keys in the contract's order: by 128, heads, queries.

#include "gpu/nvidia/attention_backward_mma_team.h"

namespace pydet {
namespace {

template <Type type, bool adjusts> class Keys : GeneralTile {
 public:
  __device__ Keys(const AttentionBackward &problem, const ScoreScale &scale, Shared &shared,
                  const AttentionBackwardWay &way, int64_t tile, int64_t s, int64_t group, int column0)
      : GeneralTile(problem, scale, shared, s, group, column0),
        products_(shared, way, f_),
        tile_(f_, extent_of(f_, s), tile, kRows) {}

  __device__ bool empty() const { return tile_.empty(); }

  __device__ void walk(bool careful) {
    begin(dk_, p_.dk, f_.d);
    begin(dv_, p_.dv, f_.e);
    const int from = int(tile_.queries.first), to = int(tile_.queries.end);
    if (from >= to) return;
    meet_all();  // a walk before this one has left shared memory
    for (int i = int(threadIdx.x); i < 2 * kRows; i += kThreads) {
      const int r = i % kRows;
      const Heads &x = i < kRows ? f_.k : f_.v;
      shared_.tile[i / kRows][r] = tile_.owns(r) ? key_place_offset(x, s_, extent_, group_, tile_.key + r) : -1;
    }
    meet_all();
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

  __device__ bool astray() { return __syncthreads_or(not_finite(dk_) || not_finite(dv_)) != 0; }

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
      for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (column0_ + 8 * i + pair() + e < width) f(sums[i][2 * h + e], my_row(h), column0_ + 8 * i + pair() + e);
  }
  __device__ void begin(Sums &sums, const Heads &to, int64_t width) const {
    clear(sums);
    if (!p_.accumulate) return;
    each(sums, width, [&](float &x, int r, int column) {
      if (tile_.owns(r)) x = begin_sum(p_, to, place(to, r) + column);
    });
  }
  __device__ void store(const Sums &sums, const Heads &to, int64_t width) const {
    each(sums, width, [&](float x, int r, int column) {
      if (r < tile_.places && (tile_.owns(r) || !p_.accumulate))
        store_rounded(to.data, to.type, place(to, r) + column, settled(x));
    });
  }

  // Queries from i0 on of a head.
  __device__ void add(int i0, int64_t head, int from, int to, bool careful) {
    meet_all();  // those before have been used
    find_rows(i0, head, from, to);
    meet_all();
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
      meet_all();
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

  Products<type> products_;
  const KeysTile tile_;
  Sums dk_, dv_;
};

// ---- Fast kernels ----------------------------------------------------------------------------------------------------

// A block has a tile of keys and all columns of dk and dv.
template <Type type, class S> class FastKeys : FastTile {
  using T = Team<type, S>;
  static constexpr TeamShape s = S::shape;

 public:
  struct Header {
    Extent extent;
    Source q, dout, lse, delta;
    int2 seen[T::kRows];  // the queries that see a key
    float lse_of[2][s.walked], delta_of[2][s.walked];
  };
  static_assert(sizeof(Header) <= TeamSizes<S>::kHeader);

  __device__ FastKeys(const AttentionBackward &problem, const ScoreScale &scale, char *shared, int sequence, int group)
      : FastTile{problem, problem.forward, scale, shared, sequence, group},
        header_(*reinterpret_cast<Header *>(shared)),
        heads_(int(heads_of_group(problem.forward))) {}

  // dk and dv, or what make_again is for: then true.
  __device__ __forceinline__ bool make(int64_t tile_number) {
    if (threadIdx.x == 0) {
      const QueryRow row = {0, group_ * heads_of_group(f_), {0, 0}};
      const auto source = [&](const Heads &x, int size) {
        return Source{x.data + size * row_offset(x, sequence_, header_.extent, row), size * x.token_stride,
                      size * x.head_stride};
      };
      header_.extent = extent_of(f_, sequence_);
      header_.q = source(f_.q, 2), header_.dout = source(p_.dout, 2), header_.lse = source(f_.lse, 4);
      header_.delta = {reinterpret_cast<const char *>(deltas_of(p_) + delta_place(f_, sequence_, header_.extent, row)),
                       4 * f_.heads, 4};
    }
    __syncthreads();
    const Extent &extent = header_.extent;
    const KeysTile tile(f_, extent, tile_number, T::kRows);
    if (tile.empty()) return false;
#pragma unroll 1
    for (int r = int(threadIdx.x); r < T::kRows; r += T::kThreads) {
      const QueryRange range = tile.owns(r) ? queries_of(f_, extent, tile.key + r) : QueryRange{0, 0};
      header_.seen[r] = make_int2(int(range.first), int(range.end));
    }
    from_ = int(tile.queries.first), to_ = int(tile.queries.end), key0_ = int(tile.key);
    T::template copy_rows<T::kRows>(T::tile(shared_, 0), row0(f_.k, tile), 2 * f_.k.token_stride, tile.own,
                                    tile.own_end, int(f_.d));
    T::template copy_rows<T::kRows>(T::tile(shared_, 1), row0(f_.v, tile), 2 * f_.v.token_stride, tile.own,
                                    tile.own_end, int(f_.e));
    begin(dk_, p_.dk, f_.d, tile);
    begin(dv_, p_.dv, f_.e, tile);
    __syncthreads();
    const int first = T::team() * s.rows, own = max(tile.own, first), own_end = min(tile.own_end, first + s.rows);
    any_ = all_ = make_int2(0, 0);
    if (own < own_end) {
      any_ = make_int2(header_.seen[own].x, header_.seen[own_end - 1].y);
      if (own_end - own == s.rows) all_ = make_int2(header_.seen[own_end - 1].x, header_.seen[own].y);
    }
    Step at = {int(tile.block), 0, first_of(int(tile.block))};
    if (from_ < to_) load(at, 0);
    int turn = 0;
#pragma unroll 1
    while (at.query < to_) {
      wait_copies<0>();
      __syncthreads();
      const Step now = at;
      advance(at);
      if (at.query < to_) load(at, turn ^ 1);
      add(now.query, now.head, turn);
      turn ^= 1;
    }
    wait_copies<0>();
    if (__syncthreads_or(T::stray(dk_) || T::stray(dv_))) return true;
    store(dk_, p_.dk, f_.d, tile);
    store(dv_, p_.dv, f_.e, tile);
    return false;
  }

 private:
  // What is walked next: of a block of the contract's, a head's queries from `query` on.
  struct Step {
    int block, head, query;
  };
  __device__ int first_of(int block) const {
    return from_ > block ? block + (from_ - block) / s.walked * s.walked : block;
  }
  __device__ void advance(Step &at) const {
    at.query += s.walked;
    if (at.query < at.block + kQueriesBlock && at.query < to_) return;
    if (++at.head == heads_) at.head = 0, at.block += kQueriesBlock;
    at.query = first_of(at.block);
  }

  __device__ const char *row0(const Heads &x, const KeysTile &tile) const {
    return x.data + 2 * place_offset(x, sequence_, header_.extent, group_, tile.place);
  }
  __device__ __forceinline__ void load(const Step &at, int turn) {
    const int begin = from_ - at.query, end = to_ - at.query;
    const Source &q = header_.q, &dout = header_.dout;
    T::template copy_rows<s.walked>(T::walked(shared_, turn, 0), q.at(at.query, at.head), q.token_bytes, begin, end,
                                    int(f_.d));
    T::template copy_rows<s.walked>(T::walked(shared_, turn, 1), dout.at(at.query, at.head), dout.token_bytes, begin,
                                    end, int(f_.e));
    if (int(threadIdx.x) < 2 * s.walked) {
      const int w = int(threadIdx.x) % s.walked, which = int(threadIdx.x) / s.walked;
      float *to = which ? &header_.delta_of[turn][w] : &header_.lse_of[turn][w];
      const Source &source = which ? header_.delta : header_.lse;
      if (w >= begin && w < end) copy_async_4(to, reinterpret_cast<const float *>(source.at(at.query + w, at.head)));
      else *to = 0.0f;
    }
    commit_copies();
  }

  __device__ bool sees_any(int query) const { return query < any_.y && query + T::kOwn > any_.x; }
  __device__ __forceinline__ void add(int query0, int head, int turn) {
    const uint16_t *q = T::walked(shared_, turn, 0), *dout = T::walked(shared_, turn, 1);
    const int query = query0 + T::member() * T::kOwn;
    typename T::Factors weights, gradients;
    if (sees_any(query)) {
      typename T::Pairs x, y;
      T::chain(x, T::tile(shared_, 0), q);
      T::chain(y, T::tile(shared_, 1), dout);
      weigh(x, y, query, group_ * heads_ + head, turn);
      T::round(weights, x);
      T::round(gradients, y);
      if (s.team > 1) T::give(shared_, 0, weights), T::give(shared_, 1, gradients);
    }
    T::meet();
#pragma unroll
    for (int of = 0; of < s.team; ++of) {
      if (!sees_any(query0 + of * T::kOwn)) continue;
      T::add(dv_, shared_, of, 0, weights, dout);
      T::add(dk_, shared_, of, 1, gradients, q);
    }
  }
  __device__ __forceinline__ void weigh(typename T::Pairs &x, typename T::Pairs &y, int query, int64_t head,
                                        int turn) const {
    const bool all = !f_.allowed.data && query >= all_.x && query + T::kOwn <= all_.y;
    const int w0 = T::member() * T::kOwn + pair();
#pragma unroll
    for (int i = 0; i < T::kOwn / 8; ++i) {
      RowBehind behind[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        behind[e] = row_behind(header_.lse_of[turn][w0 + 8 * i + e], header_.delta_of[turn][w0 + 8 * i + e], f_.scale);
#pragma unroll
      for (int m = 0; m < T::kHigh; ++m)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float weight = weight_again<Exp2>(x[m][i][q], scale_.c, behind[q % 2]);
          y[m][i][q] = score_gradient(weight, y[m][i][q], f_.scale, behind[q % 2]);
          x[m][i][q] = weight;
        }
    }
    if (all) return;
#pragma unroll
    for (int m = 0; m < T::kHigh; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = T::row_in_tile(m, h), first = query + pair();
        const int2 seen_by = header_.seen[r];
        const uint32_t seen = T::seen_of(seen_by.x - first, seen_by.y - first, f_.allowed.data, [&](int w) {
          const QueryRow row = {first + w, head, {0, kMostKeys}};
          return sees(f_, sequence_, header_.extent, row, key0_ + r);
        });
        T::mask(x, m, h, seen), T::mask(y, m, h, seen);
      }
  }

  __device__ __forceinline__ void begin(typename T::ColumnSums &sums, const Heads &to, int64_t width,
                                        const KeysTile &tile) const {
    T::each(sums, [&](float *two, int m, int h, int column) {
      const int r = T::row_in_tile(m, h);
      const bool continues = p_.accumulate && tile.owns(r) && column < width;
      const int64_t at = place_offset(to, sequence_, header_.extent, group_, tile.place + r) + column;
#pragma unroll
      for (int e = 0; e < 2; ++e) two[e] = continues ? reinterpret_cast<const float *>(to.data)[at + e] : 0.0f;
    });
  }
  __device__ __forceinline__ void store(typename T::ColumnSums &sums, const Heads &to, int64_t width,
                                        const KeysTile &tile) const {
    T::each(sums, [&](const float *two, int m, int h, int column) {
      const int r = T::row_in_tile(m, h);
      if (r < tile.places && (tile.owns(r) || !p_.accumulate) && column < width)
        T::store_two(to, place_offset(to, sequence_, header_.extent, group_, tile.place + r) + column, two);
    });
  }

  Header &header_;
  const int heads_;
  int from_, to_;   // the queries that see any key of the tile
  int key0_;        // its first
  int2 any_, all_;  // those that see any of the team's, and all
  typename T::ColumnSums dk_, dv_;
};

// TFLOP/s of their four products on an H200, 4096 queries and keys, without a mask: 231 and 215, 282 and 263 (1000 of 8
// groups: Few is faster by a third), 265 and 200.
using Narrow = TeamOf<4, 1, 32, 32, 64, 2, 2>;      // heads of up to 64
using NarrowFew = TeamOf<4, 1, 16, 64, 64, 2, 2>;   // the same, where tiles are few
using Usual = TeamOf<8, 2, 32, 64, 128, 1, 2>;      // of up to 128
using Few = TeamOf<4, 1, 16, 64, 128, 2, 2>;        // the same, where tiles are few or shared memory is short
using Wide = TeamOf<8, 4, 32, 64, 256, 1, 2>;       // of up to 256
using WideShort = TeamOf<8, 2, 16, 32, 256, 1, 2>;  // the same, where shared memory is short

// Tiles from the first, which most queries see where attention is causal.
struct OfKeys {
  template <Type type, bool adjusts> using General = Keys<type, adjusts>;
  template <Type type, class S> using Fast = FastKeys<type, S>;
  using Shapes = TeamShapes<Narrow, NarrowFew, Usual, Few, Wide, WideShort>;
  static constexpr bool descends = false;
  PYDET_HD static int64_t extent(const Attention &f) { return f.keys; }
  PYDET_HD static int64_t columns(const Attention &f) { return f.d > f.e ? f.d : f.e; }
  template <class S> static bool suits(const Attention &f) {
    const bool few = f.groups * f.sequences * divide_up(f.keys, 128) < gpu_multiprocessors(f.device.id);
    return !few || TeamSizes<S>::kRows <= 64;
  }
};

}  // namespace

pydet_status load_keys_mma(const char *name, const AttentionBackward &p, const AttentionBackwardWay &way) {
  return load_side<OfKeys>(name, p, way);
}
pydet_status make_keys_mma(const char *name, const AttentionBackward &p, const AttentionBackwardWay &way) {
  return make_side<OfKeys>(name, p, way);
}

}  // namespace pydet
