// dq of attention on tensor cores: a general kernel, whose blocks have 64 rows, each a query of one of a group's heads,
// and 64 columns of dq (attention_backward_mma.h), and a fast one with all columns (attention_backward_mma_team.h). Both
// walk the contract's blocks of keys from the last, each from its first key.

#include "gpu/nvidia/attention_backward_mma_team.h"

namespace pydet {
namespace {

template <Type type, bool adjusts> class Queries : GeneralTile {
 public:
  __device__ Queries(const AttentionBackward &problem, const ScoreScale &scale, Shared &shared,
                     const AttentionBackwardWay &way, int64_t tile, int64_t s, int64_t group, int column0)
      : GeneralTile(problem, scale, shared, s, group, column0), products_(shared, way, f_), row0_(tile * kRows) {
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
    clear(dq_);
    if (from_ >= to_) return;
    meet_all();  // a walk before this one has left shared memory
    for (int i = int(threadIdx.x); i < 2 * kRows; i += kThreads) {
      const int r = i % kRows;
      const Heads &x = i < kRows ? f_.q : p_.dout;
      shared_.tile[i / kRows][r] = r < rows_ ? row_offset(x, s_, extent_, tile_row(r)) : -1;
    }
    meet_all();
    products_.load_tile(0, f_.q.data);
    products_.load_tile(1, p_.dout.data);
    const int block = block_keys(f_.d);
#pragma unroll 1
    for (int j0 = (to_ - 1) / block * block; j0 >= 0 && j0 + block > from_; j0 -= block) {
      Sums sums;
      clear(sums);
#pragma unroll 1
      for (int j = j0; j < j0 + block && j < to_; j += kWalked)
        if (j + kWalked > from_) add(sums, j, careful);
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
        for (int q = 0; q < 4; ++q) dq_[i][q] += sums[i][q];
    }
  }

  __device__ bool astray() { return __syncthreads_or(not_finite(dq_)) != 0; }

  __device__ void store() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (my_row(h) >= rows_) continue;
      const int64_t at = row_offset(p_.dq, s_, extent_, tile_row(my_row(h)));
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i)
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
  __device__ void add(Sums &sums, int j0, bool careful) {
    meet_all();  // those before have been used
    for (int i = int(threadIdx.x); i < 2 * kWalked; i += kThreads) {
      const int j = j0 + i % kWalked;
      const Heads &x = i < kWalked ? f_.k : f_.v;
      shared_.walked[i / kWalked][i % kWalked] =
          j >= from_ && j < to_ ? key_place_offset(x, s_, extent_, group_, j) : -1;
    }
    meet_all();
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
      meet_all();
      products_.load_columns(0, f_.k.data, column0_);
      products_.landed();
    }
    if (careful) products_.add_by_rows(sums, gradients, seen, 0, column0_);
    else products_.add(sums, gradients, 0, column0_);
  }

  Products<type> products_;
  const int64_t row0_;
  int rows_;
  int from_, to_;          // keys that any row may see
  int first_[2], end_[2];  // those that my_row(h) may see
  RowBehind behind_[2];
  Sums dq_;
};

// ---- Fast kernels ----------------------------------------------------------------------------------------------------

// A block has a tile of rows and all columns of dq.
template <Type type, class S> class FastQueries : FastTile {
  using T = Team<type, S>;
  static constexpr TeamShape s = S::shape;

 public:
  struct Row {
    int query, head, first, end;
  };
  struct Header {
    Extent extent;
    Source k, v;
    Row rows[T::kRows];
    RowBehind behind[T::kRows];
  };
  static_assert(sizeof(Header) <= TeamSizes<S>::kHeader);

  __device__ FastQueries(const AttentionBackward &problem, const ScoreScale &scale, char *shared, int sequence,
                         int group)
      : FastTile{problem, problem.forward, scale, shared, sequence, group},
        header_(*reinterpret_cast<Header *>(shared)) {}

  // dq, or what make_again is for: then true.
  __device__ __forceinline__ bool make(int64_t tile) {
    if (threadIdx.x == 0) {
      const auto source = [&](const Heads &x) {
        return Source{x.data + 2 * key_place_offset(x, sequence_, header_.extent, group_, 0), 2 * x.token_stride, 0};
      };
      header_.extent = extent_of(f_, sequence_);
      header_.k = source(f_.k), header_.v = source(f_.v);
    }
    __syncthreads();
    const Extent &extent = header_.extent;
    const int64_t first = tile * T::kRows, left = extent.queries * heads_of_group(f_) - first;
    if (left <= 0) return false;
    const int count = left < T::kRows ? int(left) : T::kRows;
    // A row behind the last one sees what that sees.
#pragma unroll 1
    for (int r = int(threadIdx.x); r < T::kRows; r += T::kThreads) {
      const QueryRow row = row_of(f_, extent, group_, first + (r < count ? r : count - 1));
      header_.rows[r] = {int(row.query), int(row.head), int(row.keys.first), int(row.keys.end)};
      header_.behind[r] = row_behind(lse_of(f_, sequence_, extent, row),
                                     deltas_of(p_)[delta_place(f_, sequence_, extent, row)], f_.scale);
    }
    __syncthreads();
    // Rows ascend by query, and so do the keys that they may see.
    from_ = header_.rows[0].first, to_ = header_.rows[T::kRows - 1].end;
    const Row &above = header_.rows[T::team() * s.rows], &below = header_.rows[T::team() * s.rows + s.rows - 1];
    any_ = make_int2(above.first, below.end), all_ = make_int2(below.first, above.end);
    load_tile(0, f_.q, int(f_.d), count);
    load_tile(1, p_.dout, int(f_.e), count);
    T::each(dq_, [](float *two, int, int, int) { two[0] = two[1] = 0.0f; });
    T::each(sums_, [](float *two, int, int, int) { two[0] = two[1] = 0.0f; });
    const int block = block_keys(f_.d);
    Step at = {(to_ - 1) / block * block, 0};
    at.key = first_of(at.block);
    if (from_ < to_) load(at, 0);
    else at.block = -1;
    int turn = 0;
#pragma unroll 1
    while (at.block >= 0) {
      wait_copies<0>();
      __syncthreads();
      const Step now = at;
      advance(at, block);
      if (at.block >= 0) load(at, turn ^ 1);
      add(now.key, turn);
      turn ^= 1;
      if (at.block == now.block) continue;
#pragma unroll
      for (int m = 0; m < T::kHigh; ++m)
#pragma unroll
        for (int i = 0; i < T::kColumns / 8; ++i)
#pragma unroll
          for (int q = 0; q < 4; ++q) dq_[m][i][q] += sums_[m][i][q], sums_[m][i][q] = 0.0f;
    }
    wait_copies<0>();
    if (__syncthreads_or(T::stray(dq_))) return true;
    T::each(dq_, [&](const float *two, int m, int h, int column) {
      const int r = T::row_in_tile(m, h);
      if (r < count && column < f_.d)
        T::store_two(p_.dq, row_offset(p_.dq, sequence_, header_.extent, query_row(r)) + column, two);
    });
    return false;
  }

 private:
  // What is walked next: of a block of the contract's, keys from `key` on.
  struct Step {
    int block, key;
  };
  __device__ int first_of(int block) const {
    return from_ > block ? block + (from_ - block) / s.walked * s.walked : block;
  }
  __device__ void advance(Step &at, int block) const {
    at.key += s.walked;
    if (at.key < at.block + block && at.key < to_) return;
    at.block = at.block > from_ ? at.block - block : -1;
    at.key = first_of(at.block);
  }
  __device__ QueryRow query_row(int r) const {
    const Row &row = header_.rows[r];
    return {row.query, row.head, {row.first, row.end}};
  }

  __device__ __forceinline__ void load_tile(int which, const Heads &x, int columns, int count) {
#pragma unroll 1
    for (int r = int(threadIdx.x) / T::kMembers; r < T::kRows; r += T::kRowsAtOnce)
      T::copy_row(T::tile(shared_, which), r, x.data + 2 * row_offset(x, sequence_, header_.extent, query_row(r)),
                  r < count, columns);
  }
  __device__ __forceinline__ void load_walked(int which, const Source &x, int columns, int key, int turn) {
    T::template copy_rows<s.walked>(T::walked(shared_, turn, which), x.at(key, 0), x.token_bytes, from_ - key,
                                    to_ - key, columns);
  }
  __device__ __forceinline__ void load(const Step &at, int turn) {
    load_walked(0, header_.k, int(f_.d), at.key, turn);
    load_walked(1, header_.v, int(f_.e), at.key, turn);
    commit_copies();
  }

  __device__ bool sees_any(int key) const { return key < any_.y && key + T::kOwn > any_.x; }
  __device__ __forceinline__ void add(int key0, int turn) {
    const uint16_t *k = T::walked(shared_, turn, 0), *v = T::walked(shared_, turn, 1);
    const int key = key0 + T::member() * T::kOwn;
    typename T::Factors gradients;
    if (sees_any(key)) {
      typename T::Pairs x, y;
      T::chain(x, T::tile(shared_, 0), k);
      T::chain(y, T::tile(shared_, 1), v);
      weigh(x, y, key);
      T::round(gradients, y);
      if (s.team > 1) T::give(shared_, 0, gradients);
    }
    T::meet();
#pragma unroll
    for (int of = 0; of < s.team; ++of)
      if (sees_any(key0 + of * T::kOwn)) T::add(sums_, shared_, of, 0, gradients, k);
  }
  __device__ __forceinline__ void weigh(const typename T::Pairs &x, typename T::Pairs &y, int key) const {
    const bool all = !f_.allowed.data && key >= all_.x && key + T::kOwn <= all_.y;
#pragma unroll
    for (int m = 0; m < T::kHigh; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowBehind behind = header_.behind[T::row_in_tile(m, h)];
#pragma unroll
        for (int i = 0; i < T::kOwn / 8; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int q = 2 * h + e;
            const float weight = weight_again<Exp2>(x[m][i][q], scale_.c, behind);
            y[m][i][q] = score_gradient(weight, y[m][i][q], f_.scale, behind);
          }
      }
    if (all) return;
#pragma unroll
    for (int m = 0; m < T::kHigh; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = T::row_in_tile(m, h), first = key + pair();
        const Row &row = header_.rows[r];
        const uint32_t seen = T::seen_of(row.first - first, row.end - first, f_.allowed.data, [&](int w) {
          return sees(f_, sequence_, header_.extent, query_row(r), first + w);
        });
        T::mask(y, m, h, seen);
      }
  }

  Header &header_;
  int from_, to_;   // keys that any row may see
  int2 any_, all_;  // those that any of the team's may see, and all
  typename T::ColumnSums dq_, sums_;
};

// TFLOP/s of their three products on an H200, 4096 queries and keys, without a mask: 257, 299, 283 and 287 (of which one
// multiprocessor had two), 242 and 186.
using Narrow = TeamOf<4, 1, 32, 32, 64, 2, 1>;      // heads of up to 64
using Usual = TeamOf<4, 2, 32, 64, 128, 2, 1>;      // of up to 128, where two blocks have room
using Alone = TeamOf<8, 2, 32, 64, 128, 1, 1>;      // where one has
using Short = TeamOf<4, 1, 16, 64, 128, 2, 1>;      // the same, where shared memory is short
using Wide = TeamOf<8, 4, 32, 64, 256, 1, 1>;       // of up to 256
using WideShort = TeamOf<8, 2, 16, 32, 256, 1, 1>;  // the same, where shared memory is short

// Tiles from the last, whose rows see most keys where attention is causal.
struct OfQueries {
  template <Type type, bool adjusts> using General = Queries<type, adjusts>;
  template <Type type, class S> using Fast = FastQueries<type, S>;
  using Shapes = TeamShapes<Narrow, Usual, Alone, Short, Wide, WideShort>;
  static constexpr bool descends = true;
  PYDET_HD static int64_t extent(const Attention &f) { return rows_of_group(f); }
  PYDET_HD static int64_t columns(const Attention &f) { return f.d; }
  template <class S> static bool suits(const Attention &f) {
    return !std::is_same<S, Usual>::value || gpu_shared_bytes(f.device.id) >= 2 * (TeamSizes<Usual>::kBytes + 1024);
  }
};

}  // namespace

pydet_status load_queries_mma(const char *name, const AttentionBackward &p, const AttentionBackwardWay &way) {
  return load_side<OfQueries>(name, p, way);
}
pydet_status make_queries_mma(const char *name, const AttentionBackward &p, const AttentionBackwardWay &way) {
  return make_side<OfQueries>(name, p, way);
}

}  // namespace pydet
