// A tile of attention on tensor cores through mma.sync, of any shape (attention_mma.cu chooses them).
//
//   NUMERICS.md, "Attention", has the formula. A block of warps makes rows, each a query of one of a group's heads, and
//   columns of their result; a warp has 16 rows. Keys come in the contract's blocks of 64 or 128, those in one or two
//   parts: parts of keys and of values take turns in two places of shared memory. While one is used the next one is copied
//   into the other, and one barrier a part hands them over. Where a thread has the registers its queries are in them. An
//   m16n8k16 is one step of sm90 on Hopper and later, two of sm80 before (gemm_mma.cu).
//
// A key that a row may not see has weight 0, and 0 times a value is 0 unless that is Inf or NaN. A tile with a result that
// is not finite is therefore made again row by row, with zeros for such keys' values.
#pragma once

#include "gpu/any/attention.h"
#include "gpu/nvidia/mma.h"

namespace pydet {
namespace {

constexpr int kWarp = 32;
constexpr int kStep = 16;      // of one mma, along d and along keys
constexpr int kVector = 8;     // elements in 16 bytes
constexpr int kPad = kVector;  // of rows of any width, so that eight of them at one column lie in all banks

// Elements of a row of q and k in shared memory, and those that are computed with.
PYDET_HD int used(int64_t d) { return int((d + kStep - 1) / kStep * kStep); }

struct TileShape {
  int warps;         // of 16 rows each
  int block, parts;  // keys of a block, and the parts that it comes in
  int columns;       // of the result
  int depth;         // of q and k; 0: any, in padded rows
  int blocks;        // that a multiprocessor is to hold
  bool aligned;      // vectors of eight elements begin at multiples of 16 bytes
  bool adjusts;      // scores have a softcap or a bias
};

constexpr int kMostKeys = 1 << 30;  // a multiple of every block

// A row, and the keys that it may see, a mask aside.
struct TileRow {
  int query, head, first, end;
};

template <Type type, class S> class Tile {
 public:
  static constexpr TileShape s = S::shape;
  static constexpr int kThreads = s.warps * kWarp;
  static constexpr int kRows = 16 * s.warps;
  static constexpr int kPart = s.block / s.parts;
  static constexpr bool kSwizzled = s.depth > 0;
  static constexpr bool kHoldsQueries = s.depth == 128 && s.columns == 128;
  static constexpr int kHalf = 64;  // keys that a warp leaves out where none of its rows sees one
  static constexpr int kRunningFours = s.columns / 8 + 1;  // of a thread, while segments are folded
  static constexpr int kRunningBytes = kRunningFours * kThreads * int(sizeof(float4));

  // Elements of rows in shared memory.
  PYDET_HD static int width(int64_t d) { return kSwizzled ? s.depth : used(d) + kPad; }
  PYDET_HD static constexpr int value_width() { return kSwizzled ? s.columns : s.columns + kPad; }
  // Of a part of keys, with one of values in the same place where there are more.
  PYDET_HD static int place_elements(int64_t d) {
    return kPart * (s.parts == 1 || width(d) > value_width() ? width(d) : value_width());
  }
  PYDET_HD static int ring_elements(int64_t d) {
    return place_elements(d) + (s.parts == 1 ? kPart * value_width() : place_elements(d));
  }

  // Vectors of the keys that are walked, or of their values: the first, but where there are pages that of place 0 of page 0.
  struct Source {
    const char *from;
    int64_t row_bytes;
  };
  // What is looked at now and then: registers are short.
  struct Shared {
    Extent extent;
    Source k, v;
    float4 *running;
    int sequence, group, column0, count;  // count: of rows
    int from, to;                         // keys that any row may see
    int only;                             // the segment that is made, -1 for all
    TileRow rows[kRows];
  };
  static constexpr int kOperands = (int(sizeof(Shared)) + 127) / 128 * 128;  // where they begin
  PYDET_HD static int shared_bytes(int64_t d, bool folds_here) {
    return kOperands + 2 * (kRows * width(d) + ring_elements(d)) + (folds_here ? kRunningBytes : 0);
  }

  // running: kRunningBytes, where there is more than one segment to walk and no other place; NULL: behind all others.
  __device__ Tile(const Attention &problem, const ScoreScale &scale, char *shared, float4 *running)
      : p_(problem),
        scale_(scale),
        shared_(*reinterpret_cast<Shared *>(shared)),
        q_(reinterpret_cast<uint16_t *>(shared + kOperands)),
        ring_(q_ + kRows * width(problem.d)) {
    char *behind = reinterpret_cast<char *>(ring_ + ring_elements(problem.d));
    if (threadIdx.x == 0) shared_.running = running ? running : reinterpret_cast<float4 *>(behind);
  }

  // The tile's rows; false where there are none. Every thread calls it.
  __device__ __forceinline__ bool begin(int tile, int sequence, int group, int column0, int only) {
    __syncthreads();  // a tile before this one has left shared memory
    const int64_t row0 = int64_t(tile) * kRows;
    if (threadIdx.x == 0) {
      const Extent x = extent_of(p_, sequence);
      const int64_t rows = x.queries * heads_of_group(p_) - row0;
      shared_.extent = x, shared_.sequence = sequence, shared_.group = group, shared_.column0 = column0;
      shared_.only = only;
      shared_.count = rows < 0 ? 0 : rows < kRows ? int(rows) : kRows;
    }
    __syncthreads();
    const int count = shared_.count;
    if (count == 0) return false;
    // A row behind the last one sees what that sees.
#pragma unroll 1
    for (int r = int(threadIdx.x); r < kRows; r += kThreads) {
      const QueryRow row = row_of(p_, shared_.extent, group, row0 + (r < count ? r : count - 1));
      const TileRow known = {int(row.query), int(row.head), int(row.keys.first), int(row.keys.end)};
      shared_.rows[r] = known;
      // Rows ascend by query, and so do the keys that they may see.
      if (r == 0) {
        shared_.from = known.first;
        shared_.k = source_of(p_.k, known.first, 0), shared_.v = source_of(p_.v, known.first, column0);
      }
      if (r == kRows - 1) shared_.to = known.end;
    }
    __syncthreads();
    return true;
  }

  // All segments, folded, or the only one. Every thread calls it.
  __device__ __forceinline__ void walk(bool careful) {
    begin_segment();
    const int only = shared_.only, chunk = int(within(p_.kv_chunk, 0, kMostKeys));
    from_ = shared_.from, seen_ = shared_.to - from_;
    int begin = from_, end = from_ + seen_;
    if (only >= 0) {
      begin = only * chunk > begin ? only * chunk : begin;
      end = end - only * chunk > chunk ? (only + 1) * chunk : end;
    }
    if (begin >= end) return;
    bool first_segment = true;
    int j0 = begin / s.block * s.block;  // segments are made of whole blocks
    __syncthreads();                     // a walk before this one has left shared memory
    load_queries();
    load_keys(j0, 0);
    if constexpr (kHoldsQueries) {
      wait_copies<0>();
      __syncthreads();
      hold_queries();
    }
    int left = (chunk - j0 % chunk) / s.block;  // blocks of this segment
#pragma unroll 1
    for (; j0 < end; j0 += s.block) {
      const bool last = j0 + s.block >= end;
      add_block(j0, last, careful);
      if (!last && --left > 0) continue;
      end_segment(first_segment, last);
      first_segment = false, left = chunk / s.block;
    }
    wait_copies<0>();
  }

  __device__ bool astray() {
    int mine = 0;
    each(o_, [&](float &x, int) { mine |= !(fabsf(x) < INFINITY); });
    return __syncthreads_or(mine) != 0;
  }

  // Of all segments the result; of one, where they are apart, what the kernel that folds them takes.
  __device__ __forceinline__ void store() {
    if (shared_.only >= 0) store_part(shared_.only);
    else store_rows();
  }

 private:
  // ---- Rows --------------------------------------------------------------------------------------------------------

  __device__ static int lane() { return int(threadIdx.x % kWarp); }
  __device__ static int warp() { return int(threadIdx.x / kWarp); }
  // Element 2 h + e of a fragment: this row of the tile, and the piece's column pair() + e.
  __device__ static int my_row(int h) { return 16 * warp() + lane() / 4 + 8 * h; }
  __device__ static int pair() { return lane() % 4 * 2; }
  __device__ QueryRow tile_row(int r) const {
    const TileRow row = shared_.rows[r];
    return {row.query, row.head, {row.first, row.end}};
  }

  // f(element, h) for all of a thread's elements.
  template <int pieces, class F> __device__ static void each(float (&x)[pieces][4], F f) {
#pragma unroll
    for (int i = 0; i < pieces; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) f(x[i][q], q / 2);
  }

  __device__ __forceinline__ void store_part(int64_t segment) {
    const int column = shared_.column0 + pair();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = my_row(h);
      if (r >= shared_.count) continue;
      float *to = parts_of(p_, shared_.sequence, shared_.extent, tile_row(r)) + segment * floats_of_part(p_);
#pragma unroll
      for (int i = 0; i < s.columns / 8; ++i)
        if (column + 8 * i < p_.e)  // e is even
          *reinterpret_cast<float2 *>(to + column + 8 * i) = make_float2(o_[i][2 * h], o_[i][2 * h + 1]);
      if (column == 0) to[p_.e] = m_[h], to[p_.e + 1] = l_[h][0];
    }
  }

  // The result of a warp's rows goes through shared memory, where its queries were.
  __device__ __forceinline__ void store_rows() {
    static_assert(!kSwizzled || s.depth >= s.columns, "results have room where queries were");
    uint16_t *rows = q_ + 16 * warp() * width(p_.d);
    const int two = pair(), column = shared_.column0 + two;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = my_row(h);
      const RowEnd<Exp2> end(p_, shared_.rows[r].head, {m_[h], l_[h][0]});
      const int64_t begin = S::takes_all ? row_offset(p_.out, shared_.sequence, shared_.extent, tile_row(r)) : 0;
#pragma unroll
      for (int i = 0; i < s.columns / 8; ++i) {
        const float x = end.element(o_[i][2 * h]), y = end.element(o_[i][2 * h + 1]);
        if constexpr (!S::takes_all) {
          const int row = lane() / 4 + 8 * h;
          *reinterpret_cast<uint32_t *>(rows + row * s.columns + (i ^ row % 8) * kVector + two) =
              rounded_pair<type>(x, y);
        } else if (r < shared_.count && column + 8 * i < p_.e) {
          store_rounded(p_.out.data, type, begin + column + 8 * i, x);
          store_rounded(p_.out.data, type, begin + column + 8 * i + 1, y);
        }
      }
      if (r < shared_.count && column == 0 && p_.lse.data)
        reinterpret_cast<float *>(p_.lse.data)[row_offset(p_.lse, shared_.sequence, shared_.extent, tile_row(r))] =
            end.lse;
    }
    if constexpr (!S::takes_all) {
      __syncwarp();
      constexpr int kVectors = s.columns / kVector;
#pragma unroll 2
      for (int n = lane(); n < 16 * kVectors; n += kWarp) {
        const int row = n / kVectors, c = n % kVectors, r = 16 * warp() + row;
        if (r >= shared_.count || shared_.column0 + c * kVector >= p_.e) continue;
        const int64_t to = row_offset(p_.out, shared_.sequence, shared_.extent, tile_row(r)) + shared_.column0;
        *reinterpret_cast<uint4 *>(p_.out.data + 2 * (to + c * kVector)) =
            *reinterpret_cast<const uint4 *>(rows + row * s.columns + (c ^ row % 8) * kVector);
      }
    }
  }

  // ---- What comes through shared memory ----------------------------------------------------------------------------

  __device__ Source source_of(const Heads &x, int first, int column0) const {
    const Extent &extent = shared_.extent;
    const int64_t at = p_.pages ? 0 : key_offset(p_, x, shared_.sequence, extent.k_begin + extent.first + first);
    return {x.data + 2 * (at + shared_.group * x.head_stride + column0), 2 * x.token_stride};
  }
  // Of key number `key` in pages.
  __device__ const char *paged(const Source &source, int64_t page_stride, int key) const {
    const uint32_t place = uint32_t(shared_.extent.k_begin + shared_.extent.first) + uint32_t(key),
                   size = uint32_t(p_.page_size);
    const int64_t page = within(p_.pages[shared_.sequence * p_.pages_stride + place / size], 0, p_.page_count - 1);
    return source.from + 2 * page * page_stride + place % size * source.row_bytes;
  }

  // Eight elements into shared memory, or zeros.
  __device__ static void copy_vector(uint16_t *to, const char *data, bool there) {
    const uint16_t *from = reinterpret_cast<const uint16_t *>(data);
    if constexpr (s.aligned) {
      copy_async_16(to, from, there ? 16 : 0);
    } else {
      uint32_t words[4] = {};
      if (there)
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = from[2 * i] | uint32_t(from[2 * i + 1]) << 16;
      *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // Of rows whose width is any: f(row, column, where it lies) for each vector.
  template <int rows, class F> __device__ static void each_vector(uint16_t *to, int stride, int vectors, F f) {
#pragma unroll 2
    for (int i = int(threadIdx.x); i < rows * vectors; i += kThreads) {
      const int r = i / vectors, c = i % vectors;
      f(r, c * kVector, to + r * stride + c * kVector);
    }
  }
  // Of others a thread copies every 64th column's vector of every kTeams-th row.
  static constexpr int kTeam = 8, kTeams = kThreads / kTeam;
  static_assert(kPart % kTeams == 0 && kTeams % 8 == 0, "a thread's vectors have one place in their rows' swizzle");
  template <int width> __device__ static uint16_t *place_of_thread(uint16_t *rows, int team, int member) {
    return rows + team * width + (member ^ team % 8) * kVector;
  }
  // A row's vectors from `from` on, those before column `columns` of it.
  template <int width> __device__ static void copy_row(uint16_t *to, const char *from, bool there, int columns) {
#pragma unroll
    for (int c = 0; c < width; c += 64) copy_async_16(to + c, from + 2 * c, there && c < columns ? 16 : 0);
  }

  __device__ __forceinline__ void load_queries() {
    const int count = shared_.count;
    if constexpr (kSwizzled) {
      const int team = int(threadIdx.x / kTeam), member = int(threadIdx.x % kTeam), c = member * kVector;
      uint16_t *to = place_of_thread<s.depth>(q_, team, member);
#pragma unroll 1
      for (int r = team; r < kRows; r += kTeams, to += kTeams * s.depth) {
        const int64_t at = r < count ? row_offset(p_.q, shared_.sequence, shared_.extent, tile_row(r)) + c : 0;
        copy_row<s.depth>(to, p_.q.data + 2 * at, r < count, int(p_.d) - c);
      }
    } else {
      each_vector<kRows>(q_, width(p_.d), used(p_.d) / kVector, [&](int r, int d, uint16_t *to) {
        const bool there = r < count && d < p_.d;
        const int64_t at = there ? row_offset(p_.q, shared_.sequence, shared_.extent, tile_row(r)) + d : 0;
        copy_vector(to, p_.q.data + 2 * at, there);
      });
    }
  }
  // Keys or values from j0 on, so many columns. Keys that no row may see are zeros.
  template <int width>
  __device__ __forceinline__ void load_part(uint16_t *place, int stride, const Source &source, int64_t page_stride,
                                            int columns, int j0) {
    if constexpr (kSwizzled) {
      const int team = int(threadIdx.x / kTeam), member = int(threadIdx.x % kTeam), c = member * kVector;
      uint16_t *to = place_of_thread<width>(place, team, member);
      int j = j0 - from_ + team;  // counted from the first that is seen
      if (p_.pages) {
#pragma unroll 1
        for (int n = 0; n < kPart / kTeams; ++n, j += kTeams, to += kTeams * width) {
          const bool there = uint32_t(j) < uint32_t(seen_);
          copy_row<width>(to, (there ? paged(source, page_stride, from_ + j) : source.from) + 2 * c, there,
                          columns - c);
        }
      } else {
        const char *at = source.from + j * source.row_bytes + 2 * c;
#pragma unroll
        for (int n = 0; n < kPart / kTeams; ++n, at += kTeams * source.row_bytes)
          copy_row<width>(to + n * kTeams * width, at, uint32_t(j + n * kTeams) < uint32_t(seen_), columns - c);
      }
    } else {
      each_vector<kPart>(place, stride, width ? width / kVector : used(columns) / kVector,
                         [&](int j, int c, uint16_t *to) {
                           j += j0 - from_;
                           const bool there = uint32_t(j) < uint32_t(seen_) && c < columns;
                           const char *at = source.from;
                           if (there) at = p_.pages ? paged(source, page_stride, from_ + j) : at + j * source.row_bytes;
                           copy_vector(to, at + (there ? 2 * c : 0), there);
                         });
    }
    commit_copies();
  }
  // Parts of a block alternate between the places: those of keys, then those of values.
  __device__ uint16_t *place_of(int turn) const { return ring_ + turn % 2 * place_elements(p_.d); }
  __device__ __forceinline__ void load_keys(int j0, int part) {
    load_part<s.depth>(place_of(part), width(p_.d), shared_.k, p_.k.sequence_stride, int(p_.d), j0 + part * kPart);
  }
  __device__ __forceinline__ void load_values(int j0, int part) {
    load_part<s.columns>(place_of(s.parts + part), value_width(), shared_.v, p_.v.sequence_stride,
                         int(p_.e) - shared_.column0, j0 + part * kPart);
  }
  // The part of a turn has landed, and the one before it has been used.
  __device__ uint32_t take(int turn) const {
    wait_copies<0>();
    __syncthreads();
    return shared_address(place_of(turn));
  }

  // ---- Blocks of keys ----------------------------------------------------------------------------------------------

  __device__ __forceinline__ void begin_segment() {
#pragma unroll
    for (int h = 0; h < 2; ++h) m_[h] = -INFINITY, l_[h][0] = l_[h][1] = 0.0f;
    each(o_, [](float &x, int) { x = 0.0f; });
  }

  // Whether a row of this warp's may see one of so many keys from j0 on, and whether all see all of them.
  __device__ const TileRow &first_row() const { return shared_.rows[16 * warp()]; }
  __device__ const TileRow &last_row() const { return shared_.rows[16 * warp() + 15]; }
  __device__ bool sees_any(int j0, int keys) const {
    return 16 * warp() < shared_.count && j0 < last_row().end && j0 + keys > first_row().first;
  }
  __device__ bool sees_all(int j0, int keys) const { return j0 >= last_row().first && j0 + keys <= first_row().end; }

  using Scores = float[s.block / 8][4];
  using Weights = uint32_t[s.block / kStep][4];

  __device__ __forceinline__ void add_block(int j0, bool last, [[maybe_unused]] bool careful) {
    const bool any = sees_any(j0, s.block), all = any && sees_all(j0, s.block);
    Scores x;
#pragma unroll
    for (int part = 0; part < s.parts; ++part) {
      const uint32_t keys = take(part);
      if (part + 1 < s.parts) load_keys(j0, part + 1);
      else load_values(j0, 0);
#pragma unroll
      for (int half = 0; half < kPart / kHalf; ++half) {
        const int j = part * kPart + half * kHalf;
        if (all || sees_any(j0 + j, kHalf)) make_scores(x, j, keys, half);
      }
    }
    Weights weights;
    if (any) {
      if (s.adjusts || (S::takes_all && p_.allowed.data) || !all) mask(x, j0);
      move_references(x);
      if (S::takes_all && careful) weigh<true>(x, weights);
      else weigh<false>(x, weights);
    }
#pragma unroll
    for (int part = 0; part < s.parts; ++part) {
      const uint32_t values = take(s.parts + part);
      if (part + 1 < s.parts) load_values(j0, part + 1);
      else if (!last) load_keys(j0 + s.block, 0);
#pragma unroll
      for (int half = 0; half < kPart / kHalf; ++half) {
        const int j = part * kPart + half * kHalf;
        if (!all && !sees_any(j0 + j, kHalf)) continue;
        if (S::takes_all && careful) add_values_by_rows(weights, j, values, half);
        else add_values(weights, j, values, half);
      }
    }
  }

  // Where a lane reads its row of 16 rows: of the left operand, of a right one with k along the rows, or across them.
  enum Operand { kLeft, kRight, kTurned };
  template <Operand operand> __device__ static uint32_t lane_address(uint32_t at, int width) {
    const int number = lane(), odd = number / 8 % 2, high = number / 16, eighth = number % 8;
    const int r = (operand == kRight ? high : odd) * 8 + eighth, c = operand == kRight ? odd : high;
    return at + 2 * (r * width + (kSwizzled ? c ^ eighth : c) * kVector);
  }
  // Rows from `row` and columns from `column` on, both multiples of 16.
  template <bool turned>
  __device__ static void load(uint32_t (&r)[4], uint32_t lane_address, int width, int row, int column) {
    const int c = column / kVector;
    if constexpr (kSwizzled)
      load_matrices<turned>(r, (lane_address ^ (c % 8 * 16)) + uint32_t(2 * row * width + c / 8 * 128));
    else load_matrices<turned>(r, lane_address + uint32_t(2 * (row * width + column)));
  }

  __device__ uint32_t address_of_queries() const {
    return lane_address<kLeft>(shared_address(q_ + 16 * warp() * width(p_.d)), width(p_.d));
  }
  __device__ __forceinline__ void hold_queries() {
    if constexpr (kHoldsQueries) {
      const uint32_t of_q = address_of_queries();
#pragma unroll
      for (int step = 0; step < s.depth / kStep; ++step) load<false>(q_held_[step], of_q, s.depth, 0, step * kStep);
    }
  }

  // Of the 64 keys of a block from j on, a half of a part in its place.
  __device__ __forceinline__ void make_scores(Scores &x, int j, uint32_t keys, int half) {
#pragma unroll
    for (int i = 0; i < kHalf / 8; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) x[j / 8 + i][q] = 0.0f;
    const int stride = width(p_.d);
    const uint32_t of_q = kHoldsQueries ? 0 : address_of_queries(), of_k = lane_address<kRight>(keys, stride);
    const auto step = [&](const uint32_t(&a)[4], int d) {
#pragma unroll
      for (int i = 0; i < kHalf / 16; ++i) {
        uint32_t b[4];
        load<false>(b, of_k, stride, half * kHalf + 16 * i, d);
        mma<type>(x[j / 8 + 2 * i], a, b[0], b[1]);
        mma<type>(x[j / 8 + 2 * i + 1], a, b[2], b[3]);
      }
    };
    if constexpr (kHoldsQueries) {
#pragma unroll
      for (int n = 0; n < s.depth / kStep; ++n) step(q_held_[n], n * kStep);
    } else {
      const auto load_and_step = [&](int d) {
        uint32_t a[4];
        load<false>(a, of_q, stride, 0, d);
        step(a, d);
      };
      if constexpr (kSwizzled) {
#pragma unroll
        for (int d = 0; d < s.depth; d += kStep) load_and_step(d);
      } else {
#pragma unroll 1
        for (int d = 0; d < used(p_.d); d += kStep) load_and_step(d);
      }
    }
  }

  // Scores of keys that a row does not see become -Inf, others what the options make of them.
  __device__ __forceinline__ void mask(Scores &x, int j0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = my_row(h), j = j0 + pair();
      const int first = shared_.rows[r].first - j, end = shared_.rows[r].end - j;
      if (s.adjusts || (S::takes_all && p_.allowed.data)) {
        const QueryRow row = tile_row(r);
        uint32_t seen = 0;
#pragma unroll 2
        for (int i = 0; i < s.block / 4; ++i)
          seen |= uint32_t(sees(p_, shared_.sequence, shared_.extent, row, j + i / 2 * 8 + i % 2)) << i;
#pragma unroll
        for (int i = 0; i < s.block / 8; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float &score = x[i][2 * h + e];
            if (!(seen >> (2 * i + e) & 1)) score = -INFINITY;
            else if (s.adjusts) score = biased(p_, scale_, shared_.sequence, shared_.extent, row, j + 8 * i + e, score);
          }
      } else {
#pragma unroll
        for (int i = 0; i < s.block / 8; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (8 * i + e < first || 8 * i + e >= end) x[i][2 * h + e] = -INFINITY;
      }
    }
  }

  // References move on to the largest scores of a block, and sums so far are scaled to them.
  __device__ __forceinline__ void move_references(const Scores &x) {
    float factor[2];
    bool moves = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < s.block / 8; ++i) most[i % 2] = larger(most[i % 2], larger(x[i][2 * h], x[i][2 * h + 1]));
      float largest = larger(most[0], most[1]);
      largest = larger(largest, gpu_shfl_xor(largest, 1, 4));
      largest = larger(largest, gpu_shfl_xor(largest, 2, 4));
      const Moved<Exp2> moved(p_, scale_, m_[h], largest);
      moves |= moved.m != m_[h];
      m_[h] = moved.m, factor[h] = moved.factor;
    }
    if (!gpu_ballot(moves)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) l_[h][e] *= factor[h];
    each(o_, [&](float &x, int h) { x *= factor[h]; });
  }

  // From scores to weights, as left operands of mma. careful: the weight of a key that a row does not see is -0.
  template <bool careful> __device__ __forceinline__ void weigh(Scores &x, Weights &weights) {
    const bool has_bias = s.adjusts && p_.bias.data;
    const float taken[2] = {m_[0] == -INFINITY ? 0.0f : m_[0], m_[1] == -INFINITY ? 0.0f : m_[1]};
#pragma unroll
    for (int i = 0; i < s.block / 8; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float two[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float score = x[i][2 * h + e];
          two[e] = Exp2::of(has_bias ? score - taken[h] : fmaf(score, scale_.c, -taken[h]));
          if (careful && score == -INFINITY) two[e] = -0.0f;
          l_[h][e] += two[e];
        }
        weights[i / 2][i % 2 * 2 + h] = rounded_pair<type>(two[0], two[1]);
      }
  }

  // Of the 64 keys of a block from j on.
  __device__ __forceinline__ void add_values(const Weights &weights, int j, uint32_t values, int half) {
    const uint32_t of_v = lane_address<kTurned>(values, value_width());
#pragma unroll
    for (int step = 0; step < kHalf / kStep; ++step)
#pragma unroll
      for (int i = 0; i < s.columns / 16; ++i) {
        uint32_t b[4];
        load<true>(b, of_v, value_width(), half * kHalf + kStep * step, 16 * i);
        mma<type>(o_[2 * i], weights[j / kStep + step], b[0], b[1]);
        mma<type>(o_[2 * i + 1], weights[j / kStep + step], b[2], b[3]);
      }
  }

  // Row after row: the others' weights are zeros, and their sums stay as they are; and a value whose key has the weight -0
  // of this row is a zero.
  __device__ __forceinline__ void add_values_by_rows(const Weights &weights, int j, uint32_t values, int half) {
    const uint32_t of_v = lane_address<kTurned>(values, value_width());
    const auto seen = [](uint32_t pair) {
      return ((pair & 0xFFFFu) != 0x8000u ? 0xFFFFu : 0u) | (pair >> 16 != 0x8000u ? 0xFFFF0000u : 0u);
    };
#pragma unroll 1
    for (int row = 0; row < 16; ++row)
#pragma unroll
      for (int i = 0; i < s.columns / 16; ++i) {
        float sums[2][4];
#pragma unroll
        for (int q = 0; q < 8; ++q) sums[q / 4][q % 4] = o_[2 * i + q / 4][q % 4];
#pragma unroll
        for (int step = 0; step < kHalf / kStep; ++step) {
          const uint32_t(&own)[4] = weights[j / kStep + step];
          uint32_t a[4], b[4], kept[2];
#pragma unroll
          for (int k = 0; k < 4; ++k) a[k] = lane() / 4 + k % 2 * 8 == row ? own[k] : 0;
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int from = row % 8 * 4 + lane() % 4;
            const uint32_t low = __shfl_sync(0xFFFFFFFFu, own[2 * k], from),
                           high = __shfl_sync(0xFFFFFFFFu, own[2 * k + 1], from);
            kept[k] = seen(row < 8 ? low : high);
          }
          load<true>(b, of_v, value_width(), half * kHalf + kStep * step, 16 * i);
          mma<type>(sums[0], a, b[0] & kept[0], b[1] & kept[1]);
          mma<type>(sums[1], a, b[2] & kept[0], b[3] & kept[1]);
        }
#pragma unroll
        for (int q = 0; q < 8; ++q)
          if (lane() / 4 + q % 4 / 2 * 8 == row) o_[2 * i + q / 4][q % 4] = sums[q / 4][q % 4];
      }
  }

  // The segment joins those before it, which wait in memory; after the last one the row is o_, m_ and l_[.][0].
  __device__ __forceinline__ void end_segment(bool first, bool last) {
    float4 *running = shared_.running + threadIdx.x;
    float4 &rows = running[s.columns / 8 * kThreads];  // m, then l
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (!first) total = rows;
    float of_first[2], of_second[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float l = l_[h][0] + l_[h][1];
      l += gpu_shfl_xor(l, 1, 4);
      l += gpu_shfl_xor(l, 2, 4);
      if (!first) {
        const Joined<Exp2> joined(h ? total.y : total.x, m_[h]);
        of_first[h] = joined.of_first, of_second[h] = joined.of_second;
        m_[h] = joined.m, l = joined.sum(h ? total.w : total.z, l);
      }
      l_[h][0] = l;
    }
    if (!first)
#pragma unroll
      for (int i = 0; i < s.columns / 8; ++i) {
        const float4 four = running[i * kThreads];
        const float before[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int q = 0; q < 4; ++q) o_[i][q] = before[q] * of_first[q / 2] + o_[i][q] * of_second[q / 2];
      }
    if (last) return;
    rows = make_float4(m_[0], m_[1], l_[0][0], l_[1][0]);
#pragma unroll
    for (int i = 0; i < s.columns / 8; ++i) running[i * kThreads] = make_float4(o_[i][0], o_[i][1], o_[i][2], o_[i][3]);
    begin_segment();
  }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Exp2 = HopperExp2;
#else
  using Exp2 = CoarseExp2;
#endif

  const Attention &p_;
  const ScoreScale &scale_;
  Shared &shared_;
  uint16_t *q_, *ring_;
  int from_, seen_;  // the first key that any row may see, and how many from there on
  float m_[2], l_[2][2];
  uint32_t q_held_[kHoldsQueries ? s.depth / kStep : 1][4];
  float o_[s.columns / 8][4];
};

}  // namespace
}  // namespace pydet
