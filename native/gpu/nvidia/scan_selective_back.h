// Gradients of the selective scan (NUMERICS.md, "Scans", "Their gradients"): its tiles, and the walks before them.
#pragma once

#include "gpu/nvidia/scan_crew.h"
#include "gpu/nvidia/scan_tiles.h"

namespace pydet {
namespace {

// A block of columns, a group and a tile: the grid's x, y and z.
template <int rounds>
__global__ void __launch_bounds__(SelectiveTile<rounds>::kThreads, SelectiveTile<rounds>::kBlocks)
    selective_tiles_kernel(const __grid_constant__ SelectiveScanBackward p, const __grid_constant__ int64_t tiles) {
  using Tile = SelectiveTile<rounds>;
  constexpr int kRounds = Tile::kRounds, kTokens = Tile::kTokens, kElements = Tile::kElements;
  constexpr int kNumbers = Tile::kNumbers, kAtOnce = Tile::kAtOnce;
  enum { kU, kDecay, kDy };
  extern __shared__ __align__(16) char shared[];
  Tile &tile = *reinterpret_cast<Tile *>(shared);
  // Of 32 bits, which tiles_fit and check_blocks have seen to suffice: numbers of 64 divide by calls.
  const uint32_t block = blockIdx.x, group = blockIdx.y, width = uint32_t(p.width);
  const uint32_t at_group = group * (uint32_t(p.heads) / uint32_t(p.groups) * width) + block * kColumns;
  const ScanWorkspace workspace = of_rounds<rounds>(p.workspace);
  for (uint32_t job = blockIdx.z; job < tiles; job += gridDim.z) {
    struct Place {
      TileOf of;
      int64_t first, token;  // the tile's first token of all; of its batch
      int head, column;      // of the number that a thread brings
    };
    const auto place = [&] {  // found again each time, for want of registers
      uint32_t same = job;
      make_opaque(same);
      Place at;
      at.of = tile_of(p.sequences, same, kTokens);
      at.token = at.of.range.begin + at.of.from, at.first = at.of.range.batch * p.sequences.tokens + at.token;
      const uint32_t c = at_group + threadIdx.x % kColumns;
      at.head = int(c / width), at.column = int(c % width);
      return at;
    };
    float state[kBackOwn][kRounds][4], gradient[kBackOwn][kRounds][4];
    float *sums_to;
    int count;
    const auto bring_kept = [&](const Place &at) {
      tile.bring_kept(workspace.states_at(at.of.sequence, at.first - at.of.from, at.of.from, group, block));
    };
    {
      const Place at = place();
      const int64_t left = at.of.range.end - at.token;
      if (left <= 0) continue;
      count = left < kTokens ? int(left) : kTokens;
      bring_kept(at);
      sums_to = Tile::sums_to(workspace, at.first, group, block);
      if (left > kTokens) Tile::take_gradients(workspace, at.first, group, block, gradient);
      else if (p.dfinal.data)
        Tile::take_given(
            [&](int c, int n) {
              const int head = int((at_group + c) / width), column = int((at_group + c) % width);
              const int64_t of = at.of.sequence * p.dfinal.stride[0] + head * p.dfinal.stride[1] +
                                 column * p.dfinal.stride[2] + n * p.dfinal.stride[3];
              return *reinterpret_cast<const float *>(p.dfinal.at(of));
            },
            gradient);
      else Tile::take_given([](int, int) { return 0.0f; }, gradient);
    }

    // Numbers of a thread's column, at tokens of piece i that are kAtOnce apart.
    const auto numbers = [&](const Strided &x, const Place &at, int i, int64_t of_column) {
      const int64_t token = at.token + i * kPiece + threadIdx.x / kColumns;
      return Apart(
          x, at.of.range.batch * x.stride[0] + token * x.stride[1] + at.head * x.stride[2] + at.column * of_column,
          kAtOnce * x.stride[1]);
    };
    const auto load = [&](int i, bool back) {
      const Place at = place();
      const int64_t batch = at.of.range.batch, token = at.token + i * kPiece;
      const int left = count - i * kPiece, first = int(threadIdx.x) / kColumns;
      using RowsHere = Pieces<kPiece, kElements, Tile::kThreads>;
      RowsHere b_rows(p.b, batch * p.b.stride[0] + group * p.b.stride[2], token),
          c_rows(p.c, batch * p.c.stride[0] + group * p.c.stride[2], token);
      b_rows.load(left), c_rows.load(back ? left : 0);
      const float a = element(p.a, at.head * p.a.stride[0]);
      const Apart xs = numbers(p.x, at, i, p.x.stride[3]), dts = numbers(p.dt, at, i, 0),
                  dys = numbers(p.dy, at, i, p.dy.stride[3]);
      LoadedBits x[kNumbers], dt[kNumbers], dy[kNumbers];
#pragma unroll
      for (int j = 0; j < kNumbers; ++j) {
        const bool there = first + j * kAtOnce < left;
        x[j] = xs.bits(j, there), dt[j] = dts.bits(j, there), dy[j] = dys.bits(j, there && back);
      }
#pragma unroll
      for (int j = 0; j < kNumbers; ++j) {
        const auto put_number = [&](int which, float number) {
          tile.numbers[which][first + j * kAtOnce][beside(int(threadIdx.x) % kColumns)] = number;
        };
        const bool there = first + j * kAtOnce < left;
        const float step = number_of(p.dt.type, dt[j]);
        put_number(kU, step * number_of(p.x.type, x[j])), put_number(kDecay, there ? exp_f32(step * a) : 1.0f);
        put_number(kDy, there ? number_of(p.dy.type, dy[j]) : -0.0f);
      }
      b_rows.store(&tile.rows[0][0][0]);
      if (back) c_rows.store(&tile.rows[1][0][0]);
    };
    struct Operands {
      float u[kBackOwn], decay[kBackOwn];
      float4 b[kRounds];
    };
    const auto read = [&](int t) {
      Operands of;
      tile.four(kU, t, of.u), tile.four(kDecay, t, of.decay);
#pragma unroll
      for (int r = 0; r < kRounds; ++r) of.b[r] = tile.vector(0, t, r);
      return of;
    };
    const auto take = [&](const Operands &of) {
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
#pragma unroll
        for (int k = 0; k < kBackOwn; ++k)
#pragma unroll
          for (int i = 0; i < 4; ++i) state[k][r][i] = fmaf(of.u[k], part(of.b[r], i), of.decay[k] * state[k][r][i]);
    };
    const int of_token = int(workspace.groups * workspace.blocks) * kElements;
    const auto back = [&](int piece, int pair, const auto &ahead) {
      const int t = 2 * pair, there = count - piece * kPiece - t;
      float *const to = sums_to + (piece * kPiece + t) * of_token;
      float u[2][kBackOwn], decay[2][kBackOwn], dy[2][kBackOwn], sums[2][2][kBackOwn];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        tile.four(kU, t + j, u[j]), tile.four(kDecay, t + j, decay[j]), tile.four(kDy, t + j, dy[j]);
      tile.begin_sums(pair, sums);
      float4 s[8];
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 b[2] = {tile.vector(0, t, r), tile.vector(0, t + 1, r)},
                     c[2] = {tile.vector(1, t, r), tile.vector(1, t + 1, r)};
        float columns[2][2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float terms[2][2][kBackOwn];
#pragma unroll
          for (int k = 0; k < kBackOwn; ++k) {
            float old[2], after[2], g = gradient[k][r][i];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              old[j] = decay[j][k] * (j ? after[0] : state[k][r][i]);
              after[j] = fmaf(u[j][k], part(b[j], i), old[j]);
            }
#pragma unroll
            for (int j = 1; j >= 0; --j) {
              g = fmaf(part(c[j], i), dy[j][k], g);
              sums[j][0][k] = fmaf(part(b[j], i), g, sums[j][0][k]), sums[j][1][k] = fmaf(g, old[j], sums[j][1][k]);
              terms[j][0][k] = u[j][k] * g, terms[j][1][k] = dy[j][k] * after[j];
              g = decay[j][k] * g;
            }
            gradient[k][r][i] = g;
          }
#pragma unroll
          for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
              const float(&f)[kBackOwn] = terms[j][which];
              columns[j][which][i] = (f[0] + f[2]) + (f[1] + f[3]);
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int which = 0; which < 2; ++which) tile.leave(j, which, r, columns[j][which]);
        if (r % Tile::kJoined == Tile::kJoined - 1) {
          tile.read_parts(s);
          if (r < kRounds - 1) tile.add_parts(s, there, to + (r + 1 - Tile::kJoined) * kScanRound);
        }
      }
      if (tile.whole_sums(pair, sums)) {
        // This warp's lanes of the sums over the states: a thread comes to have two columns of one.
        const bool second = Tile::quad() & 2, odd = Tile::quad() & 1;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float half[kBackOwn], quarter[2];
#pragma unroll
          for (int k = 0; k < kBackOwn; ++k)
            half[k] =
                (second ? sums[j][1][k] : sums[j][0][k]) + gpu_shfl_xor(second ? sums[j][0][k] : sums[j][1][k], 16, 32);
#pragma unroll
          for (int k = 0; k < 2; ++k)
            quarter[k] = (odd ? half[k + 2] : half[k]) + gpu_shfl_xor(odd ? half[k] : half[k + 2], 8, 32);
          float *const own = &tile.halves[Tile::half()][t + j][second][Tile::set() * kBackOwn + (odd ? 2 : 0)];
          *reinterpret_cast<float2 *>(own) = make_float2(quarter[0], quarter[1]);
        }
      }
      ahead();
      tile.add_parts(s, there, to + (kRounds - Tile::kJoined) * kScanRound);
    };
    // The sums over the states, whole, and those of heads.
    const auto finish = [&](int i) {
      const Place at = place();
      const int left = count - i * kPiece, here = left < kPiece ? left : kPiece;
      const int c = int(threadIdx.x) % kColumns, first = int(threadIdx.x) / kColumns;
      const float d = p.d.data ? element(p.d, at.head * p.d.stride[0]) : 0.0f;
      const Apart xs = numbers(p.x, at, i, p.x.stride[3]), dts = numbers(p.dt, at, i, 0),
                  dxs = numbers(p.dx, at, i, p.dx.stride[3]);
      LoadedBits x[kNumbers], dt[kNumbers];
#pragma unroll
      for (int j = 0; j < kNumbers; ++j)
        x[j] = xs.bits(j, first + j * kAtOnce < here), dt[j] = dts.bits(j, first + j * kAtOnce < here);
#pragma unroll
      for (int j = 0; j < kNumbers; ++j) {
        const int t = first + j * kAtOnce, own = beside(c);
        const float v = tile.halves[0][t][0][own] + tile.halves[1][t][0][own];
        const float l = tile.halves[0][t][1][own] + tile.halves[1][t][1][own], dy = tile.numbers[kDy][t][own];
        const float of_x = number_of(p.x.type, x[j]), step = number_of(p.dt.type, dt[j]);
        if (t < here) dxs.put(j, p.d.data ? fmaf(step, v, d * dy) : step * v);
        float *const terms = tile.terms[t] + c;
        terms[0] = of_x * v, terms[kColumns] = l, terms[2 * kColumns] = dy * of_x;
      }
      __syncthreads();
      add_heads<int, kPiece, Tile::kThreads>(p, tile.terms, at.first + i * kPiece, here, int(at_group), kColumns,
                                             int(block));
    };
    take_wide(tile, count, state, [&] { bring_kept(place()); }, load, read, take, back, finish);
  }
}

// ---- The walks ---------------------------------------------------------------------------------------------------------

// Of a block: kGroups warps walk, whose threads have `own` neighbouring columns of a lane, a slot. kHelpers threads bring the
// next tile, of a column the tokens that are kAtOnce apart. As scan_crew.h chooses: parts, and blocks side by side, are one.
template <int rounds, int own, int groups> struct SelectiveWalk {
  static constexpr int kRounds = rounds, kOwn = own, kGroups = groups, kPart = rounds, kBlocks = 1;
  static constexpr int kElements = rounds * kScanRound, kTokens = checkpoint_tokens(kElements);
  static constexpr int kSlots = groups * kTeams, kColumns = kSlots * own, kPairs = (own + 1) / 2 * 2;
  static constexpr int kWalkers = 32 * groups, kHelpers = 128, kThreads = kWalkers + kHelpers;
  static constexpr int kAtOnce = kColumns <= 32 ? 4 : kColumns <= 64 ? 2 : 1, kNumbers = kTokens / kAtOnce;
  static constexpr int kBatch = kNumbers < 8 ? kNumbers : 8, kTurn = own * rounds >= 16 ? 2 : 4;
  static constexpr int kRowTokens = rounds > 4 ? kTokens / 2 : kTokens;  // whose rows a helper has registers for
  static_assert(kAtOnce * kColumns <= kHelpers && kTokens % kTurn == 0 && kNumbers % kBatch == 0);
};
template <class Own> struct SelectiveWalkShared {
  float rows[2][Own::kTokens][Own::kElements];
  float2 pairs[2][Own::kTokens][Own::kSlots][Own::kPairs];  // u or dy, and a decay
};

// Of the states forwards, which are kept before each tile, and of their gradients backwards, kept behind each but the last.
template <class Own>
__global__ void __launch_bounds__(Own::kThreads, 1)
    selective_walks_kernel(const __grid_constant__ SelectiveScanBackward p, const __grid_constant__ int64_t blocks) {
  constexpr int kOwn = Own::kOwn, kRounds = Own::kRounds, kElements = Own::kElements, kTokens = Own::kTokens,
                kTurn = Own::kTurn, kNumbers = Own::kNumbers, kAtOnce = Own::kAtOnce, kBatch = Own::kBatch;
  extern __shared__ __align__(16) char shared[];
  auto &walk = *reinterpret_cast<SelectiveWalkShared<Own> *>(shared);
  const int of_group = int(p.heads / p.groups * p.width), width = int(p.width);
  const uint32_t in_group = uint32_t(divide_up(of_group, Own::kColumns)), groups = uint32_t(p.groups);
  const ScanWorkspace workspace = of_rounds<kRounds>(p.workspace);
  for (uint32_t job = blockIdx.x; job < blocks; job += gridDim.x) {
    const int first = int(job % in_group) * Own::kColumns, group = int(job / in_group % groups);
    const bool backwards = job / in_group / groups % 2;
    const int64_t sequence = job / in_group / groups / 2;
    const Sequences::Range range = p.sequences.range(sequence);
    const int tokens = int(range.end - range.begin), last = (tokens - 1) / kTokens * kTokens;  // the last tile
    // Nothing needs what follows the last tile's first states.
    const int walked = tokens <= 0 ? 0 : backwards ? last + kTokens : last;
    if (threadIdx.x >= Own::kWalkers) {
      const int helper = int(threadIdx.x) - Own::kWalkers, c = helper % Own::kColumns,
                own_token = helper / Own::kColumns;
      const bool there = own_token < kAtOnce && first + c < of_group;
      const int column = group * of_group + (there ? first + c : 0), head = column / width;
      const Strided &numbers_of = backwards ? p.dy : p.x, &rows_of = backwards ? p.c : p.b;
      // Of the i-th tile that is walked. An absent token leaves the states as they are, an absent column too.
      const auto bring = [&](int i, int turn) {
        const int from = backwards ? last - i : i, left = tokens - from < kTokens ? tokens - from : kTokens;
        Pieces<Own::kRowTokens, kElements, Own::kHelpers> rows(
            rows_of, range.batch * rows_of.stride[0] + group * rows_of.stride[2], range.begin + from, helper);
        rows.load(left);
        const auto numbers = [&](const Strided &x, int64_t of_column) {
          return Apart(x,
                       range.batch * x.stride[0] + (range.begin + from + own_token) * x.stride[1] + head * x.stride[2] +
                           column % width * of_column,
                       kAtOnce * x.stride[1]);
        };
        const Apart values = numbers(numbers_of, numbers_of.stride[3]), dts = numbers(p.dt, 0);
        const float a = element(p.a, head * p.a.stride[0]);
#pragma unroll 1
        for (int begun = 0; begun < kNumbers; begun += kBatch) {
          LoadedBits value[kBatch], dt[kBatch];
#pragma unroll
          for (int j = 0; j < kBatch; ++j) {
            const bool here = there && own_token + (begun + j) * kAtOnce < left;
            value[j] = values.bits(begun + j, here), dt[j] = dts.bits(begun + j, here);
          }
#pragma unroll
          for (int j = 0; j < kBatch; ++j) {
            const int t = own_token + (begun + j) * kAtOnce;
            const float number = number_of(numbers_of.type, value[j]), step = number_of(p.dt.type, dt[j]);
            if (own_token < kAtOnce)
              walk.pairs[turn][t][c / kOwn][c % kOwn] =
                  there && t < left ? make_float2(backwards ? number : step * number, exp_f32(step * a))
                                    : make_float2(-0.0f, 1.0f);
          }
        }
        rows.store(&walk.rows[turn][0][0]);
        if constexpr (Own::kRowTokens < kTokens)
          rows.load(left - Own::kRowTokens), rows.store(&walk.rows[turn][Own::kRowTokens][0]);
      };
      if (walked > 0) bring(0, 0);
      int turn = 0;
      for (int i = 0; i < walked; i += kTokens) {
        __syncthreads();
        turn ^= 1;
        if (i + kTokens < walked) bring(i + kTokens, turn);
      }
      __syncthreads();
      continue;
    }

    const int own = (int(threadIdx.x) / 32 * kTeams + team_of_warp()) * kOwn;
    const auto there = [&](int k) { return first + own + k < of_group; };
    const auto of_states = [&](const Strided &x, int k) {
      const int column = group * of_group + (there(k) ? first + own + k : 0);
      return sequence * x.stride[0] + column / width * x.stride[1] + column % width * x.stride[2];
    };
    const Strided &given = backwards ? p.dfinal : p.initial;
    float state[kOwn][kRounds][kScanLaneElements];
#pragma unroll
    for (int k = 0; k < kOwn; ++k)
      load_states(given, of_states(given, k), given.stride[3], left_of(kElements), there(k) && given.data,
                  whole_vectors(given, kElements, true), state[k]);
    // What is kept before a tile has the columns one behind the other, also those of the next block of 32.
    const int64_t begin = range.batch * p.sequences.tokens + range.begin;
    const auto keep = [&](int from) {
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const int c = first + own + k;
        if (there(k))
          keep_at<true>(state[k],
                        backwards ? gradient_at(workspace, begin + from, group, c / kScanColumns, c % kScanColumns)
                                  : workspace.states_at(sequence, begin, from, group, 0) + int64_t(c) * kElements,
                        kElements);
      }
    };
    const auto take = [&](int turn, int t, bool back) {
      float x[kOwn], decay[kOwn];
      const float2 *const pairs = walk.pairs[turn][t][own / kOwn];
#pragma unroll
      for (int k = 0; k + 1 < kOwn; k += 2) {
        const float4 two = *reinterpret_cast<const float4 *>(pairs + k);
        x[k] = two.x, decay[k] = two.y, x[k + 1] = two.z, decay[k + 1] = two.w;
      }
      if constexpr (kOwn % 2) {
        const float2 one = pairs[kOwn - 1];
        x[kOwn - 1] = one.x, decay[kOwn - 1] = one.y;
      }
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 row = vector_of(walk.rows[turn][t], r);
#pragma unroll
        for (int k = 0; k < kOwn; ++k)
#pragma unroll
          for (int i = 0; i < kScanLaneElements; ++i) {
            float &s = state[k][r][i];
            s = back ? decay[k] * fmaf(part(row, i), x[k], s) : fmaf(x[k], part(row, i), decay[k] * s);
          }
      }
    };
    int turn = 0;
    for (int i = 0; i < walked; i += kTokens, turn ^= 1) {
      if (!backwards) keep(i);
      __syncthreads();
#pragma unroll 1
      for (int t = 0; t < kTokens; t += kTurn) {
        if (backwards) {
#pragma unroll
          for (int of = 0; of < kTurn; ++of) take(turn, kTokens - 1 - t - of, true);
        } else {
#pragma unroll
          for (int of = 0; of < kTurn; ++of) take(turn, t + of, false);
        }
      }
      if (backwards && i < last) keep(last - i - kTokens);
    }
    if (!backwards && tokens > 0) keep(last);
    if (p.dinitial.data && backwards)
#pragma unroll
      for (int k = 0; k < kOwn; ++k)
        if (there(k))
          store_states(p.dinitial, of_states(p.dinitial, k), p.dinitial.stride[3], left_of(kElements),
                       whole_vectors(p.dinitial, kElements, true), state[k]);
    __syncthreads();
  }
}

constexpr int kSelectiveWalkPerState = 2;  // instructions of a state and token
template <int kRounds>
struct SelectiveWalks : BestCrew<SelectiveWalkShared, SelectiveWalk<kRounds, 4, 4>, SelectiveWalk<kRounds, 2, 4>> {};
template <>
struct SelectiveWalks<4> : BestCrew<SelectiveWalkShared, SelectiveWalk<4, 5, 4>, SelectiveWalk<4, 4, 8>,
                                    SelectiveWalk<4, 4, 4>, SelectiveWalk<4, 2, 4>> {};
template <>
struct SelectiveWalks<8> : BestCrew<SelectiveWalkShared, SelectiveWalk<8, 2, 8>, SelectiveWalk<8, 2, 4>> {};

}  // namespace
}  // namespace pydet
