// Gradients of the selective scan (NUMERICS.md, "Scans", "Their gradients"): its tiles, and the walks before them.
#pragma once

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
          Tile::sum_columns(terms, i, columns);
        }
        tile.leave(r, columns);
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

// The two walks: of the states forwards, which are kept before each tile, and of their gradients backwards, kept behind each
// but the last. A thread has two columns of a lane.
template <int kRounds>
__global__ void __launch_bounds__(kWalkThreads, kRounds > kThreadRounds ? 2 : 3)
    selective_walks_kernel(const __grid_constant__ SelectiveScanBackward p, const __grid_constant__ int64_t blocks) {
  constexpr int kOwn = 2, kWalkers = kWalkThreads, kElements = kRounds * kScanRound,
                kTokens = checkpoint_tokens(kElements);
  constexpr int kTurn = 8, kAtOnce = kWalkers / kColumns, kNumbers = kTokens / kAtOnce;
  struct Shared {
    float rows[2][kTokens][kElements];
    float2 numbers[2][kTokens][kColumns];  // u or dy, and a decay
  };
  __shared__ __align__(16) Shared shared;
  const uint32_t in_group = uint32_t(p.workspace.blocks), groups = uint32_t(p.groups),
                 of_group = uint32_t(p.heads) / groups * uint32_t(p.width);
  const int own = (int(threadIdx.x) / 32 * kTeams + team_of_warp()) * kOwn, width = int(p.width);
  const ScanWorkspace workspace = of_rounds<kRounds>(p.workspace);
  for (uint32_t job = blockIdx.x; job < blocks; job += gridDim.x) {
    const uint32_t block = job % in_group, group = job / in_group % groups, outer = job / in_group / groups;
    const bool backwards = outer % 2;
    const int64_t sequence = outer / 2;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t tokens = range.end - range.begin, begin = range.batch * p.sequences.tokens + range.begin;
    const int at_group = int(group * of_group + block * kColumns);
    const Strided &rows_of = backwards ? p.c : p.b, &numbers_of = backwards ? p.dy : p.x;
    const Strided &given = backwards ? p.dfinal : p.initial;
    float state[kOwn][kRounds][kScanLaneElements];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int head = (at_group + own + k) / width, column = (at_group + own + k) % width;
      load_states(given, sequence * given.stride[0] + head * given.stride[1] + column * given.stride[2],
                  given.stride[3], left_of(kElements), given.data != nullptr, whole_vectors(given, kElements, true),
                  state[k]);
    }
    const auto keep_own = [&](float *to) {  // the first of a block's columns
#pragma unroll
      for (int k = 0; k < kOwn; ++k) keep_at<true>(state[k], to + (own + k) * kElements, kElements);
    };
    float *const first_kept = workspace.states_at(sequence, begin, 0, group, block);
    const int64_t kept_apart = workspace.groups * workspace.blocks * workspace.block_floats();

    // What a thread brings: rows, and numbers of a column.
    const int c = int(threadIdx.x) % kColumns, head = (at_group + c) / width, column = (at_group + c) % width;
    const int first_token = int(threadIdx.x) / kColumns;
    const float a = element(p.a, head * p.a.stride[0]);
    const int64_t of_number =
                      range.batch * numbers_of.stride[0] + head * numbers_of.stride[2] + column * numbers_of.stride[3],
                  of_dt = range.batch * p.dt.stride[0] + head * p.dt.stride[2],
                  of_rows = range.batch * rows_of.stride[0] + group * rows_of.stride[2];
    LoadedBits bits[kNumbers], dt_bits[kNumbers];
    Pieces<kTokens, kElements, kWalkers> rows(rows_of, of_rows, range.begin);
    int left = 0;
    const auto load = [&](int64_t from) {
      left = tokens - from < kTokens ? int(tokens - from) : kTokens;
      rows.go_to(rows_of, of_rows, range.begin + from);
      rows.load(left);
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        const int64_t t = range.begin + from + first_token + i * kAtOnce;
        const bool there = first_token + i * kAtOnce < left;
        bits[i] = bits_at(numbers_of, of_number + t * numbers_of.stride[1], there);
        dt_bits[i] = bits_at(p.dt, of_dt + t * p.dt.stride[1], there);
      }
    };
    const auto store = [&](int turn) {
      rows.store(&shared.rows[turn][0][0]);
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        const int t = first_token + i * kAtOnce;
        const float number = number_of(numbers_of.type, bits[i]), dt = number_of(p.dt.type, dt_bits[i]);
        // An absent token leaves the states as they are.
        shared.numbers[turn][t][c] =
            t < left ? make_float2(backwards ? number : dt * number, exp_f32(dt * a)) : make_float2(-0.0f, 1.0f);
      }
    };
    const auto take = [&](int turn, int t, bool back) {
      const float4 numbers = *reinterpret_cast<const float4 *>(&shared.numbers[turn][t][own]);
      const float x[kOwn] = {numbers.x, numbers.z}, decay[kOwn] = {numbers.y, numbers.w};
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 row = vector_of(shared.rows[turn][t], r);
#pragma unroll
        for (int k = 0; k < kOwn; ++k)
#pragma unroll
          for (int i = 0; i < kScanLaneElements; ++i) {
            float &s = state[k][r][i];
            s = back ? decay[k] * fmaf(part(row, i), x[k], s) : fmaf(x[k], part(row, i), decay[k] * s);
          }
      }
    };
    const int64_t last = (tokens - 1) / kTokens * kTokens;  // the last tile
    if (tokens > 0 && (backwards || last > 0)) load(backwards ? last : 0), store(0);
    int turn = 0;
    for (int64_t i = 0; tokens > 0 && i <= last; i += kTokens, turn ^= 1) {
      const int64_t from = backwards ? last - i : i;
      if (!backwards) {
        keep_own(first_kept + from / kTokens * kept_apart);
        if (from == last) break;  // nothing needs what follows
      }
      const bool more = backwards ? from > 0 : from + kTokens < last;
      __syncthreads();
      if (more) load(backwards ? from - kTokens : from + kTokens);
#pragma unroll 1
      for (int t = 0; t < kTokens; t += kTurn) {
        if (t + kTurn == kTokens && more) store(turn ^ 1);
        if (backwards) {
#pragma unroll
          for (int of = 0; of < kTurn; ++of) take(turn, kTokens - 1 - t - of, true);
        } else {
#pragma unroll
          for (int of = 0; of < kTurn; ++of) take(turn, t + of, false);
        }
      }
      if (backwards && from > 0)
#pragma unroll
        for (int k = 0; k < kOwn; ++k)
          keep_at<true>(state[k], gradient_at(workspace, begin + from - kTokens, group, block, own + k), kElements);
    }
    if (p.dinitial.data && backwards)
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const int of_head = (at_group + own + k) / width, of_column = (at_group + own + k) % width;
        store_states(
            p.dinitial,
            sequence * p.dinitial.stride[0] + of_head * p.dinitial.stride[1] + of_column * p.dinitial.stride[2],
            p.dinitial.stride[3], left_of(kElements), whole_vectors(p.dinitial, kElements, true), state[k]);
      }
    __syncthreads();
  }
}

}  // namespace
}  // namespace pydet
