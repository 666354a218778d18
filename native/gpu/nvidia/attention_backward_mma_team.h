// What the fast kernels of attention's gradients by mma.sync share (attention_backward_keys_mma.cu,
// attention_backward_queries_mma.cu): those of vectors that begin at multiples of 16 bytes, without softcap and bias.
//
//   A block has a tile of vectors of one side (keys, or queries) and walks vectors of the other side; both sides have two
//   operands in swizzled rows: first q or k, second dout or v. What is walked takes turns in two places of shared memory:
//   while one is used the next is copied into the other, and one barrier a turn hands them over.
//   A team of warps has 16 or 32 vectors of the tile. Each of its warps makes their pairs with its part of what is walked,
//   and sums its part of the results' columns over all of it; so the rounded factors go from warp to warp, as the
//   operands that they are in registers. Warps of 32 rows read half as often what is walked as warps of 16.
#pragma once

#include <type_traits>

#include "gpu/device.h"
#include "gpu/nvidia/attention_backward_mma.h"

namespace pydet {
namespace {

struct TeamShape {
  int warps, team;  // of a block, and of a team
  int rows;         // of a team
  int walked;       // at a time
  int depth;        // columns of a vector in shared memory
  int blocks;       // that a multiprocessor is to hold
  int factors;      // that products of results have: weights and gradients of scores, or these alone
};

template <int warps, int team, int rows, int walked, int depth, int blocks, int factors> struct TeamOf {
  static constexpr TeamShape shape = {warps, team, rows, walked, depth, blocks, factors};
};

// Where vectors, or numbers of rows, lie that are walked: of token 0 and of the group's first head.
struct Source {
  const char *from;
  int64_t token_bytes, head_bytes;
  PYDET_HD const char *at(int token, int head) const { return from + token * token_bytes + head * head_bytes; }
};

template <class S> struct TeamSizes {
  static constexpr TeamShape s = S::shape;
  static constexpr int kThreads = s.warps * kWarp, kTeams = s.warps / s.team;
  static constexpr int kRows = kTeams * s.rows;      // of the tile
  static constexpr int kHigh = s.rows / 16;          // pieces of 16 rows
  static constexpr int kOwn = s.walked / s.team;     // of what is walked, those whose pairs a warp makes
  static constexpr int kColumns = s.depth / s.team;  // of the results, those that a warp sums
  static constexpr int kTileElements = kRows * s.depth, kWalkedElements = s.walked * s.depth;
  static constexpr int kWarpFactors = kHigh * kOwn / kStep * kWarp;  // of four words each
  static constexpr int kFactorsBytes = s.team > 1 ? s.factors *s.warps *kWarpFactors * 16 : 0;
  static constexpr int kHeader =
      (int(sizeof(Extent) + 4 * sizeof(Source)) + (s.factors == 2 ? 8 * kRows + 16 * s.walked : 24 * kRows) + 127) /
      128 * 128;
  static constexpr int kBytes = kHeader + 2 * (2 * kTileElements + 4 * kWalkedElements) + kFactorsBytes;
  static_assert(kRows % ::pydet::kRows == 0, "what is made again has whole tiles");
  static_assert(kOwn % kStep == 0 && kColumns % kStep == 0 && s.walked <= kQueriesBlock / 2);
};

// Whether the fast kernels take it; their results are written in pairs.
inline bool in_pairs(const Heads &x) {
  return !x.data || (reinterpret_cast<uintptr_t>(x.data) % 8 == 0 && x.sequence_stride % 2 == 0 &&
                     x.head_stride % 2 == 0 && x.token_stride % 2 == 0);
}
inline bool takes_teams(const AttentionBackward &p, const AttentionBackwardWay &way) {
  const Attention &f = p.forward;
  return way.aligned && !adjusts_scores(f) && deltas_of(p) && f.d <= 256 && f.e <= 256 && f.d % 2 == 0 &&
         f.e % 2 == 0 && in_pairs(p.dq) && in_pairs(p.dk) && in_pairs(p.dv);
}
template <class S> bool fits(const Attention &f) {
  constexpr int depth = S::shape.depth;
  return f.d <= depth && f.e <= depth && TeamSizes<S>::kBytes <= gpu_shared_bytes(f.device.id);
}
// fast(shape) with the first of the shapes that fits and suits a side, or general().
template <class... S> struct TeamShapes {};
template <class Side, class Fast, class General, class... S>
pydet_status with_shape(TeamShapes<S...>, const AttentionBackward &p, const AttentionBackwardWay &way, Fast fast,
                        General general) {
  const Attention &f = p.forward;
  pydet_status status = PYDET_OK;
  bool found = false;
  if (takes_teams(p, way))
    ((found = found || (fits<S>(f) && Side::template suits<S>(f) && (status = fast(S()), true))), ...);
  return found ? status : general();
}
// How the general kernel makes a tile again in so much shared memory.
template <class S> AttentionBackwardWay again_way(const Attention &f) {
  const int wider = used(f.d > f.e ? f.d : f.e);
  return {shared_bytes(wider) <= TeamSizes<S>::kBytes || wider <= kPiece ? wider : kPiece, true};
}

#if defined(__CUDACC__)

template <Type type, class S> class Team : public TeamSizes<S> {
 public:
  using Sizes = TeamSizes<S>;
  using Sizes::kColumns, Sizes::kHigh, Sizes::kOwn, Sizes::kRows, Sizes::kTeams, Sizes::kThreads, Sizes::s;
  using Pairs = float[kHigh][kOwn / 8][4];
  using Factors = uint32_t[kHigh][kOwn / kStep][4];
  using ColumnSums = float[kHigh][kColumns / 8][4];

  __device__ static int team() { return warp() / s.team; }
  __device__ static int member() { return warp() % s.team; }
  // Element 2 h + e of piece i of the 16 rows m: this row of the tile; what is walked, or column, 8 i + pair() + e.
  __device__ static int row_in_tile(int m, int h) { return team() * s.rows + 16 * m + lane() / 4 + 8 * h; }
  __device__ static int column0() { return member() * kColumns; }

  __device__ static char *behind_header(char *shared) { return shared + Sizes::kHeader; }
  __device__ static uint16_t *tile(char *shared, int which) {
    return reinterpret_cast<uint16_t *>(behind_header(shared)) + which * Sizes::kTileElements;
  }
  __device__ static uint16_t *walked(char *shared, int turn, int which) {
    return tile(shared, 2) + (2 * turn + which) * Sizes::kWalkedElements;
  }
  __device__ static uint4 *factors_of(char *shared, int of_warp, int which) {
    return reinterpret_cast<uint4 *>(walked(shared, 2, 0)) + (which * s.warps + of_warp) * Sizes::kWarpFactors + lane();
  }

  // ---- Copies ----

  static constexpr int kMembers = 8, kRowsAtOnce = kThreads / kMembers;  // a row's threads copy every 64th column
  // Row r of `to`: `columns` elements, zeros behind them, or all zeros.
  __device__ static void copy_row(uint16_t *to, int r, const char *from, bool there, int columns) {
    const int c = int(threadIdx.x) % kMembers;
    to += r * s.depth + (c ^ r % 8) * kVector;
#pragma unroll
    for (int n = 0; n < s.depth; n += 64)
      copy_async_16(to + n, from + 2 * (n + c * kVector), there && n + c * kVector < columns ? 16 : 0);
  }
  // Those of `rows` that lie in [begin, end); from: where row 0 would begin.
  template <int rows>
  __device__ __forceinline__ static void copy_rows(uint16_t *to, const char *from, int64_t row_bytes, int begin,
                                                   int end, int columns) {
    static_assert(rows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0);
    const int r = int(threadIdx.x) / kMembers;
    from += r * row_bytes;
#pragma unroll
    for (int n = 0; n < rows; n += kRowsAtOnce, from += kRowsAtOnce * row_bytes)
      copy_row(to, r + n, from, r + n >= begin && r + n < end, columns);
  }

  // ---- Operands ----

  enum Operand { kLeft, kRight, kTurned };  // the left one, a right one with k along the rows, or across them
  template <Operand operand> __device__ static uint32_t lane_address(const uint16_t *rows) {
    const int number = lane() / 8, odd = number % 2, high = number / 2, eighth = lane() % 8;
    const int r = (operand == kRight ? high : odd) * 8 + eighth, c = operand == kRight ? odd : high;
    return shared_address(rows) + uint32_t(2 * (r * s.depth + (c ^ eighth) * kVector));
  }
  // Rows from `row` and columns from `column` on, both multiples of 16.
  template <bool turned>
  __device__ __forceinline__ static void load(uint32_t (&r)[4], uint32_t lane_address, int row, int column) {
    const int c = column / kVector;
    load_matrices<turned>(r, (lane_address ^ uint32_t(c % 8 * 16)) + uint32_t(2 * row * s.depth + c / 8 * 128));
  }

  // ---- Products ----

  // Of the team's rows and this warp's part of what is walked.
  __device__ __forceinline__ static void chain(Pairs &x, const uint16_t *of_tile, const uint16_t *of_walked) {
#pragma unroll
    for (int m = 0; m < kHigh; ++m)
#pragma unroll
      for (int i = 0; i < kOwn / 8; ++i)
#pragma unroll
        for (int q = 0; q < 4; ++q) x[m][i][q] = 0.0f;
    const uint32_t left = lane_address<kLeft>(of_tile + team() * s.rows * s.depth),
                   right = lane_address<kRight>(of_walked + member() * kOwn * s.depth);
#pragma unroll
    for (int d = 0; d < s.depth; d += kStep) {
      uint32_t a[kHigh][4];
#pragma unroll
      for (int m = 0; m < kHigh; ++m) load<false>(a[m], left, 16 * m, d);
#pragma unroll
      for (int i = 0; i < kOwn / 16; ++i) {
        uint32_t b[4];
        load<false>(b, right, 16 * i, d);
#pragma unroll
        for (int m = 0; m < kHigh; ++m) {
          mma<type>(x[m][2 * i], a[m], b[0], b[1]);
          mma<type>(x[m][2 * i + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ static void round(Factors &factors, const Pairs &x) {
#pragma unroll
    for (int m = 0; m < kHigh; ++m)
#pragma unroll
      for (int step = 0; step < kOwn / kStep; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float *two = &x[m][2 * step + i / 2][i % 2 * 2];
          factors[m][step][i] = rounded_pair<type>(two[0], two[1]);
        }
  }
  // To the others of the team.
  __device__ __forceinline__ static void give(char *shared, int which, const Factors &factors) {
    uint4 *to = factors_of(shared, warp(), which);
#pragma unroll
    for (int m = 0; m < kHigh; ++m)
#pragma unroll
      for (int step = 0; step < kOwn / kStep; ++step) {
        const uint32_t(&x)[4] = factors[m][step];
        to[(m * (kOwn / kStep) + step) * kWarp] = make_uint4(x[0], x[1], x[2], x[3]);
      }
  }
  __device__ __forceinline__ static void meet() {
    if constexpr (s.team > 1) named_sync(1 + team(), s.team * kWarp);
  }

  // sums += factors and what member `of` made them with, this warp's columns.
  __device__ __forceinline__ static void add(ColumnSums &sums, char *shared, int of, int which, const Factors &own,
                                             const uint16_t *of_walked) {
    // A multiple of the columns is the same bits of an address as what is added to them, and as the swizzle.
    static_assert(kColumns % 64 == 0 || 64 % kColumns == 0);
    const uint32_t from = lane_address<kTurned>(of_walked + of * kOwn * s.depth),
                   right = (from ^ uint32_t(column0() % 64 * 2)) + uint32_t(column0() / 64 * 128);
#pragma unroll
    for (int step = 0; step < kOwn / kStep; ++step) {
      uint32_t a[kHigh][4];
#pragma unroll
      for (int m = 0; m < kHigh; ++m)
        if constexpr (s.team > 1) {
          const uint4 x = factors_of(shared, team() * s.team + of, which)[(m * (kOwn / kStep) + step) * kWarp];
          a[m][0] = x.x, a[m][1] = x.y, a[m][2] = x.z, a[m][3] = x.w;
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = own[m][step][i];
        }
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        uint32_t b[4];
        load<true>(b, right, kStep * step, 16 * i);
#pragma unroll
        for (int m = 0; m < kHigh; ++m) {
          mma<type>(sums[m][2 * i], a[m], b[0], b[1]);
          mma<type>(sums[m][2 * i + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // Which of a thread's pairs of one row are seen, a bit each: those of [first, end), counted from the thread's first one,
  // and where there is a mask those that allowed(w) says.
  template <class Allowed>
  __device__ __forceinline__ static uint32_t seen_of(int first, int end, bool masked, Allowed allowed) {
    uint32_t seen = 0;
#pragma unroll
    for (int n = 0; n < kOwn / 4; ++n) {
      const int w = n / 2 * 8 + n % 2;
      seen |= uint32_t(w >= first && w < end) << n;
    }
    if (masked)
#pragma unroll 1
      for (int n = 0; n < kOwn / 4; ++n)
        if (seen >> n & 1 && !allowed(n / 2 * 8 + n % 2)) seen &= ~(1u << n);
    return seen;
  }
  __device__ __forceinline__ static void mask(Pairs &x, int m, int h, uint32_t seen) {
#pragma unroll
    for (int n = 0; n < kOwn / 4; ++n)
      if (!(seen >> n & 1)) x[m][n / 2][2 * h + n % 2] = 0.0f;
  }

  // f(two elements, m, h, column of the result) for all of a thread's.
  template <class F> __device__ __forceinline__ static void each(ColumnSums &sums, F f) {
#pragma unroll
    for (int m = 0; m < kHigh; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i) f(&sums[m][i][2 * h], m, h, column0() + 8 * i + pair());
  }
  __device__ __forceinline__ static bool stray(ColumnSums &sums) {
    bool found = false;
    each(sums,
         [&](const float *two, int, int, int) { found |= !(fabsf(two[0]) < INFINITY) || !(fabsf(two[1]) < INFINITY); });
    return found;
  }
  // Two elements of a result, from `at` on.
  __device__ __forceinline__ static void store_two(const Heads &to, int64_t at, const float *two) {
    if (to.type == Type::f32) {
      *reinterpret_cast<float2 *>(reinterpret_cast<float *>(to.data) + at) =
          make_float2(canonical(settled(two[0])), canonical(settled(two[1])));
    } else {
      *reinterpret_cast<uint32_t *>(to.data + 2 * at) = rounded_pair<type>(settled(two[0]), settled(two[1]));
    }
  }
};

// What a block of the fast kernels works at.
struct FastTile {
  const AttentionBackward &p_;
  const Attention &f_;
  const ScoreScale &scale_;
  char *shared_;
  const int sequence_, group_;
};

// ---- Kernels and launches, of a side: OfKeys or OfQueries ----------------------------------------------------------

// Blocks: slices of columns, groups and sequences beside each other, then tiles.
template <class Side, Type type, bool adjusts>
__global__ void __launch_bounds__(kThreads, 2)
    attention_backward_general_kernel(const __grid_constant__ AttentionBackward p, const ScoreScale scale,
                                      const AttentionBackwardWay way, const int64_t tiles) {
  extern __shared__ __align__(128) char shared[];
  const Attention &f = p.forward;
  const int64_t slices = divide_up(Side::columns(f), kColumns);
  int64_t number = blockIdx.x;
  const int64_t slice = number % slices, group = number / slices % f.groups;
  number = number / slices / f.groups;
  const int64_t down = number / f.sequences, tile = Side::descends ? tiles - 1 - down : down;
  typename Side::template General<type, adjusts> one(p, scale, *reinterpret_cast<Shared *>(shared), way, tile,
                                                     number % f.sequences, group, int(slice * kColumns));
  if (one.empty()) return;
  bool careful = false;
  do one.walk(careful);
  while (!careful && (careful = one.astray()));
  one.store();
}

// In tiles of the general kernel, `times` of which are one.
template <class Side, Type type>
__device__ __noinline__ void make_again(const AttentionBackward &p, const ScoreScale &scale, char *shared,
                                        const AttentionBackwardWay &way, int64_t tile, int64_t sequence, int64_t group,
                                        int times) {
#pragma unroll 1
  for (int64_t t = tile * times; t < (tile + 1) * times; ++t)
#pragma unroll 1
    for (int column0 = 0; column0 < Side::columns(p.forward); column0 += kColumns) {
      meet_all();
      typename Side::template General<type, false> one(p, scale, *reinterpret_cast<Shared *>(shared), way, t, sequence,
                                                       group, column0);
      if (one.empty()) break;
      one.walk(true);
      one.store();
    }
}

template <class Side, Type type, class S>
__global__ void __launch_bounds__(TeamSizes<S>::kThreads, S::shape.blocks)
    attention_backward_fast_kernel(const __grid_constant__ AttentionBackward p,
                                   const __grid_constant__ ScoreScale scale,
                                   const __grid_constant__ AttentionBackwardWay way, const uint32_t tiles) {
  extern __shared__ __align__(128) char shared[];
  uint32_t number = blockIdx.x;
  const uint32_t groups = uint32_t(p.forward.groups), sequences = uint32_t(p.forward.sequences);
  const int group = int(number % groups);
  number /= groups;
  const uint32_t down = number / sequences;
  const int sequence = int(number % sequences), tile = int(Side::descends ? tiles - 1 - down : down);
  bool again;
  {
    typename Side::template Fast<type, S> one(p, scale, shared, sequence, group);
    again = one.make(tile);
  }
  if (again && threadIdx.x < unsigned(kThreads))
    make_again<Side, type>(p, scale, shared, way, tile, sequence, group, TeamSizes<S>::kRows / kRows);
}

// general(kernel) or fast(kernel, its shape) of the one that takes it.
template <class Side, class General, class Fast>
pydet_status with_kernel(const AttentionBackward &p, const AttentionBackwardWay &way, General general, Fast fast) {
  return with_type<kHalfTypes>(p.forward.q.type, [&](auto element) {
    constexpr Type type = decltype(element)::value;
    return with_shape<Side>(
        typename Side::Shapes(), p, way,
        [&](auto shape) { return fast(attention_backward_fast_kernel<Side, type, decltype(shape)>, shape); },
        [&] {
          return adjusts_scores(p.forward) ? general(attention_backward_general_kernel<Side, type, true>)
                                           : general(attention_backward_general_kernel<Side, type, false>);
        });
  });
}

template <class Side>
pydet_status load_side(const char *name, const AttentionBackward &p, const AttentionBackwardWay &way) {
  return with_kernel<Side>(
      p, way, [&](auto kernel) { return load(name, kernel, shared_bytes(way.width)); },
      [&](auto kernel, auto shape) { return load(name, kernel, TeamSizes<decltype(shape)>::kBytes); });
}

template <class Side>
pydet_status make_side(const char *name, const AttentionBackward &p, const AttentionBackwardWay &way) {
  const Attention &f = p.forward;
  const auto shape_of = [&](int64_t blocks, int threads, int bytes) {
    Launch one = {name, static_cast<gpu_stream>(f.stream), grid_of(blocks, threads), dim3(threads), bytes};
    one.loaded = true;
    return one;
  };
  return with_kernel<Side>(
      p, way,
      [&](auto kernel) {
        const int64_t tiles = divide_up(Side::extent(f), kRows),
                      blocks = divide_up(Side::columns(f), kColumns) * f.groups * f.sequences * tiles;
        return launch(shape_of(blocks, kThreads, shared_bytes(way.width)), kernel, p, score_scale(f), way, tiles);
      },
      [&](auto kernel, auto shape) {
        using Sizes = TeamSizes<decltype(shape)>;
        const int64_t tiles = divide_up(Side::extent(f), Sizes::kRows), blocks = f.groups * f.sequences * tiles;
        return launch(shape_of(blocks, Sizes::kThreads, Sizes::kBytes), kernel, p, score_scale(f),
                      again_way<decltype(shape)>(f), uint32_t(tiles));
      });
}

#endif

}  // namespace
}  // namespace pydet
