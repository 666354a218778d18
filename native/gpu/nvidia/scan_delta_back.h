// Gradients of the gated delta rule (NUMERICS.md, "Scans", "Their gradients"): its tiles, and the walks before them. What a
// token's column has beyond the state's answer to k, and the gradient's answer to it, are kept by the walks: so tiles wait
// for no sum over the keys.
#pragma once

#include "gpu/nvidia/scan_tiles.h"

namespace pydet {
namespace {

// A block of columns, a head and a tile: the grid's x, y and z.
template <int rounds>
__global__ void __launch_bounds__(DeltaTile<rounds>::kThreads, DeltaTile<rounds>::kBlocks)
    delta_tiles_kernel(const __grid_constant__ GatedDeltaBackward p, const __grid_constant__ int64_t tiles) {
  using Tile = DeltaTile<rounds>;
  constexpr int kRounds = Tile::kRounds, kTokens = Tile::kTokens, kElements = Tile::kElements;
  constexpr int kNumbers = Tile::kNumbers, kAtOnce = Tile::kAtOnce;
  enum { kW, kOfM, kOut };
  extern __shared__ __align__(16) char shared[];
  Tile &tile = *reinterpret_cast<Tile *>(shared);
  __shared__ float decays[kPiece];
  const uint32_t head = blockIdx.y, first_column = blockIdx.x * kColumns;
  const ScanWorkspace workspace = of_rounds<rounds>(p.workspace);
  for (uint32_t job = blockIdx.z; job < tiles; job += gridDim.z) {  // of 32 bits, as the selective scan's
    struct Place {
      uint32_t group, block;  // of the head; of its columns among a group's
      TileOf of;
      int64_t first, token;  // the tile's first token of all; of its batch
    };
    const auto place = [&] {  // found again each time, for want of registers
      uint32_t same = job, in_group = uint32_t(p.heads) / uint32_t(p.groups);
      make_opaque(same), make_opaque(in_group);
      Place at;
      uint32_t own_head = head;
      make_opaque(own_head);
      at.group = own_head / in_group, at.block = own_head % in_group * gridDim.x + blockIdx.x;
      at.of = tile_of(p.sequences, same, kTokens);
      at.token = at.of.range.begin + at.of.from, at.first = at.of.range.batch * p.sequences.tokens + at.token;
      return at;
    };
    float state[kBackOwn][kRounds][4], gradient[kBackOwn][kRounds][4];
    float *sums_to;
    int count;
    const auto bring_kept = [&](const Place &at) {
      tile.bring_kept(workspace.states_at(at.of.sequence, at.first - at.of.from, at.of.from, at.group, at.block));
    };
    {
      const Place at = place();
      const int64_t left = at.of.range.end - at.token;
      if (left <= 0) continue;
      count = left < kTokens ? int(left) : kTokens;
      bring_kept(at);
      sums_to = Tile::sums_to(workspace, at.first, at.group, at.block);
      if (left > kTokens) Tile::take_gradients(workspace, at.first, at.group, at.block, gradient);
      else if (p.dfinal.data)
        Tile::take_given(
            [&](int c, int n) {
              const int64_t of = at.of.sequence * p.dfinal.stride[0] + head * p.dfinal.stride[1] +
                                 n * p.dfinal.stride[2] + (first_column + c) * p.dfinal.stride[3];
              return *reinterpret_cast<const float *>(p.dfinal.at(of));
            },
            gradient);
      else Tile::take_given([](int, int) { return 0.0f; }, gradient);
    }

    // Numbers of a thread's column, at tokens of piece i that are kAtOnce apart; the same of what the walks kept.
    const auto numbers = [&](const Strided &x, const Place &at, int i, int64_t of_column) {
      const int64_t token = at.token + i * kPiece + threadIdx.x / kColumns;
      return Apart(x,
                   at.of.range.batch * x.stride[0] + token * x.stride[1] + head * x.stride[2] +
                       (first_column + threadIdx.x % kColumns) * of_column,
                   kAtOnce * x.stride[1]);
    };
    const auto kept_of = [&](int which, const Place &at, int i) {
      return workspace.of_column(which, at.first + i * kPiece + threadIdx.x / kColumns) + head * p.width +
             first_column + threadIdx.x % kColumns;
    };
    const int64_t kept_apart = kAtOnce * workspace.columns;
    const auto load = [&](int i, bool back) {
      const Place at = place();
      const int64_t batch = at.of.range.batch, token = at.token + i * kPiece;
      const int left = count - i * kPiece, first = int(threadIdx.x) / kColumns;
      using RowsHere = Pieces<kPiece, kElements, Tile::kThreads>;
      RowsHere q_rows(p.q, batch * p.q.stride[0] + at.group * p.q.stride[2], token),
          k_rows(p.k, batch * p.k.stride[0] + at.group * p.k.stride[2], token);
      k_rows.load(left), q_rows.load(back ? left : 0);
      const Apart outs = numbers(p.dout, at, i, p.dout.stride[3]), betas = numbers(p.beta, at, i, 0);
      const float *const kept_m = kept_of(0, at, i), *const kept_z = kept_of(1, at, i);
      LoadedBits out[kNumbers], beta[kNumbers];
      float m[kNumbers], z[kNumbers];
#pragma unroll
      for (int j = 0; j < kNumbers; ++j) {
        const bool there = first + j * kAtOnce < left;
        beta[j] = betas.bits(j, there), out[j] = outs.bits(j, there && back);
        m[j] = there ? kept_m[j * kept_apart] : 0.0f, z[j] = there && back ? kept_z[j * kept_apart] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kNumbers; ++j) {
        const auto put_number = [&](int which, float number) {
          tile.numbers[which][first + j * kAtOnce][beside(int(threadIdx.x) % kColumns)] = number;
        };
        const float factor = number_of(p.beta.type, beta[j]);
        put_number(kW, factor * m[j]), put_number(kOfM, factor * z[j]);
        put_number(kOut, first + j * kAtOnce < left ? number_of(p.dout.type, out[j]) : -0.0f);
      }
      const int t = int(threadIdx.x);
      if (t < kPiece)
        decays[t] =
            t < left ? exp_f32(element(p.g, batch * p.g.stride[0] + (token + t) * p.g.stride[1] + head * p.g.stride[2]))
                     : 1.0f;
      k_rows.store(&tile.rows[1][0][0]);
      if (back) q_rows.store(&tile.rows[0][0][0]);
    };
    struct Operands {
      float w[kBackOwn], decay;
      float4 key[kRounds];
    };
    const auto read = [&](int t) {
      Operands of;
      tile.four(kW, t, of.w), of.decay = decays[t];
#pragma unroll
      for (int r = 0; r < kRounds; ++r) of.key[r] = tile.vector(1, t, r);
      return of;
    };
    const auto take = [&](const Operands &of) {
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
#pragma unroll
        for (int k = 0; k < kBackOwn; ++k)
#pragma unroll
          for (int i = 0; i < 4; ++i) state[k][r][i] = fmaf(part(of.key[r], i), of.w[k], of.decay * state[k][r][i]);
    };
    const int of_token = int(workspace.groups * workspace.blocks) * kElements;
    const auto back = [&](int piece, int pair, const auto &ahead) {
      const int t = 2 * pair, there = count - piece * kPiece - t;
      float *const to = sums_to + (piece * kPiece + t) * of_token;
      float w[2][kBackOwn], of_m[2][kBackOwn], out[2][kBackOwn], decay[2], sums[2][1][kBackOwn];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        tile.four(kW, t + j, w[j]), tile.four(kOfM, t + j, of_m[j]), tile.four(kOut, t + j, out[j]);
        decay[j] = decays[t + j];
      }
      tile.begin_sums(pair, sums);
      float4 s[8];
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 q[2] = {tile.vector(0, t, r), tile.vector(0, t + 1, r)},
                     key[2] = {tile.vector(1, t, r), tile.vector(1, t + 1, r)};
        float columns[2][2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float terms[2][2][kBackOwn];
#pragma unroll
          for (int k = 0; k < kBackOwn; ++k) {
            float old[2], after[2], g = gradient[k][r][i];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              old[j] = decay[j] * (j ? after[0] : state[k][r][i]);
              after[j] = fmaf(part(key[j], i), w[j][k], old[j]);
            }
#pragma unroll
            for (int j = 1; j >= 0; --j) {
              g = fmaf(part(q[j], i), out[j][k], g);
              terms[j][0][k] = out[j][k] * after[j], terms[j][1][k] = fmaf(w[j][k], g, -(of_m[j][k] * old[j]));
              g = fmaf(-part(key[j], i), of_m[j][k], g);
              sums[j][0][k] = fmaf(g, old[j], sums[j][0][k]);
              g = decay[j] * g;
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
        // This warp's lanes of the sum over the states: a thread comes to have a column's.
        const bool second = Tile::quad() & 2, odd = Tile::quad() & 1;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float half[2];
#pragma unroll
          for (int k = 0; k < 2; ++k)
            half[k] = (second ? sums[j][0][k + 2] : sums[j][0][k]) +
                      gpu_shfl_xor(second ? sums[j][0][k] : sums[j][0][k + 2], 16, 32);
          tile.halves[Tile::half()][t + j][0][Tile::set() * kBackOwn + Tile::quad()] =
              (odd ? half[1] : half[0]) + gpu_shfl_xor(odd ? half[0] : half[1], 8, 32);
        }
      }
      ahead();
      tile.add_parts(s, there, to + (kRounds - Tile::kJoined) * kScanRound);
    };
    // The sums over the states, whole, and those of the head.
    const auto finish = [&](int i) {
      const Place at = place();
      const int left = count - i * kPiece, here = left < kPiece ? left : kPiece;
      const int c = int(threadIdx.x) % kColumns, first = int(threadIdx.x) / kColumns;
      const float *const kept_m = kept_of(0, at, i), *const kept_z = kept_of(1, at, i);
      const Apart dvs = numbers(p.dv, at, i, p.dv.stride[3]);
      float m[kNumbers], z[kNumbers];
#pragma unroll
      for (int j = 0; j < kNumbers; ++j) {
        const bool there = first + j * kAtOnce < here;
        m[j] = there ? kept_m[j * kept_apart] : 0.0f, z[j] = there ? kept_z[j * kept_apart] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kNumbers; ++j) {
        const int t = first + j * kAtOnce, own = beside(c);
        if (t < here) dvs.put(j, tile.numbers[kOfM][t][own]);
        tile.terms[t][c] = tile.halves[0][t][0][own] + tile.halves[1][t][0][own];
        tile.terms[t][kColumns + c] = z[j] * m[j];
      }
      __syncthreads();
      const int t = int(threadIdx.x) % kPiece, which = int(threadIdx.x) / kPiece;
      if (which < 2 && t < here)
        workspace.of_head(which, at.first + i * kPiece + t, head)[blockIdx.x] =
            chain_of(tile.terms[t] + which * kColumns, 0, kColumns);
    };
    take_wide(tile, count, state, [&] { bring_kept(place()); }, load, read, take, back, finish);
  }
}

template <int kRounds>
__global__ void __launch_bounds__(kWalkThreads, 2)
    delta_walks_kernel(const __grid_constant__ GatedDeltaBackward p, const __grid_constant__ int64_t blocks) {
  constexpr int kOwn = 2, kWalkers = kWalkThreads, kElements = kRounds * kScanRound,
                kTokens = checkpoint_tokens(kElements);
  constexpr int kTurn = 4, kAtOnce = kWalkers / kColumns, kNumbers = kTokens / kAtOnce;
  struct Shared {
    float rows[2][2][kTokens][kElements];  // q, of the walk backwards alone, and k
    float numbers[2][kTokens][kColumns];   // v or do
    float2 gates[2][kTokens];              // a decay and beta
  };
  extern __shared__ __align__(16) char shared[];
  Shared &walk = *reinterpret_cast<Shared *>(shared);
  const uint32_t of_head = uint32_t(p.width) / kColumns, heads = uint32_t(p.heads),
                 in_group = heads / uint32_t(p.groups);
  const int own = (int(threadIdx.x) / 32 * kTeams + team_of_warp()) * kOwn, lane = scan_lane();
  const ScanWorkspace workspace = of_rounds<kRounds>(p.workspace);
  for (uint32_t job = blockIdx.x; job < blocks; job += gridDim.x) {
    const uint32_t first = job % of_head * kColumns, head = job / of_head % heads, group = head / in_group;
    const uint32_t block = head % in_group * of_head + first / kColumns;
    const bool backwards = job / of_head / heads % 2;
    const int64_t sequence = job / of_head / heads / 2;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t tokens = range.end - range.begin, begin = range.batch * p.sequences.tokens + range.begin;
    const Strided &numbers_of = backwards ? p.dout : p.v, &given = backwards ? p.dfinal : p.initial;
    float state[kOwn][kRounds][kScanLaneElements];
    const auto of_states = [&](const Strided &x, int k) {
      return sequence * x.stride[0] + head * x.stride[1] + (first + own + k) * x.stride[3];
    };
#pragma unroll
    for (int k = 0; k < kOwn; ++k)
      load_states(given, of_states(given, k), given.stride[2], left_of(kElements), given.data != nullptr, false,
                  state[k]);
    float *const first_kept = workspace.states_at(sequence, begin, 0, group, block);
    const int64_t kept_apart = workspace.groups * workspace.blocks * workspace.block_floats();

    const int c = int(threadIdx.x) % kColumns, first_token = int(threadIdx.x) / kColumns;
    const auto at = [&](const Strided &x) {
      return range.batch * x.stride[0] + range.begin * x.stride[1] + head * x.stride[2];
    };
    const int64_t of_number = at(numbers_of) + (first + c) * numbers_of.stride[3], of_g = at(p.g), of_beta = at(p.beta);
    const int64_t of_q = range.batch * p.q.stride[0] + group * p.q.stride[2],
                  of_k = range.batch * p.k.stride[0] + group * p.k.stride[2];
    LoadedBits bits[kNumbers], g_bits, beta_bits;
    Pieces<kTokens, kElements, kWalkers> q_rows(p.q, of_q, range.begin), k_rows(p.k, of_k, range.begin);
    int left = 0;
    const auto load = [&](int64_t from) {
      left = tokens - from < kTokens ? int(tokens - from) : kTokens;
      k_rows.go_to(p.k, of_k, range.begin + from), k_rows.load(left);
      if (backwards) q_rows.go_to(p.q, of_q, range.begin + from), q_rows.load(left);
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        const int t = first_token + i * kAtOnce;
        bits[i] = bits_at(numbers_of, of_number + (from + t) * numbers_of.stride[1], t < left);
      }
      const int t = int(threadIdx.x);
      g_bits = bits_at(p.g, of_g + (from + t) * p.g.stride[1], t < left);
      beta_bits = bits_at(p.beta, of_beta + (from + t) * p.beta.stride[1], t < left);
    };
    // An absent token leaves the states as they are, and their gradients.
    const auto store = [&](int turn) {
      k_rows.store(&walk.rows[turn][1][0][0]);
      if (backwards) q_rows.store(&walk.rows[turn][0][0][0]);
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        const int t = first_token + i * kAtOnce;
        walk.numbers[turn][t][c] = t < left ? number_of(numbers_of.type, bits[i]) : -0.0f;
      }
      const int t = int(threadIdx.x);
      if (t < kTokens)
        walk.gates[turn][t] = t < left
                                  ? make_float2(exp_f32(number_of(p.g.type, g_bits)), number_of(p.beta.type, beta_bits))
                                  : make_float2(1.0f, 0.0f);
    };
    const auto take = [&](int turn, int count, int t, bool back) {
      const float2 gates = walk.gates[turn][t];
      const float2 got = *reinterpret_cast<const float2 *>(&walk.numbers[turn][t][own]);
      const float number[kOwn] = {got.x, got.y};
      float4 key[kRounds];
      float sum[kOwn] = {}, kept[kOwn];
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        key[r] = vector_of(walk.rows[turn][1][t], r);
        const float4 q = back ? vector_of(walk.rows[turn][0][t], r) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < kScanLaneElements; ++i)
#pragma unroll
          for (int k = 0; k < kOwn; ++k) {
            float &s = state[k][r][i];
            s = back ? fmaf(part(q, i), number[k], s) : gates.x * s;
            sum[k] = fmaf(part(key[r], i), s, sum[k]);
          }
      }
#pragma unroll
      for (int k = 0; k < kOwn; ++k) sum[k] = join_lanes(sum[k]);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        kept[k] = back ? sum[k] : number[k] - sum[k];  // z, or m
        const float w = t < count ? gates.y * kept[k] : back ? 0.0f : -0.0f;
#pragma unroll
        for (int r = 0; r < kRounds; ++r)
#pragma unroll
          for (int i = 0; i < kScanLaneElements; ++i) {
            float &s = state[k][r][i];
            s = back ? gates.x * fmaf(-part(key[r], i), w, s) : fmaf(part(key[r], i), w, s);
          }
      }
      if (lane == 0) *reinterpret_cast<float2 *>(&walk.numbers[turn][t][own]) = make_float2(kept[0], kept[1]);
    };
    // What a tile kept of its columns, behind the barrier that follows it.
    const auto flush = [&](int turn, int64_t from) {
      float *const to = workspace.of_column(backwards, begin + from) + head * p.width + first + c;
      const int count = tokens - from < kTokens ? int(tokens - from) : kTokens;
      for (int t = first_token; t < count; t += kAtOnce) to[t * workspace.columns] = walk.numbers[turn][t][c];
    };
    const int64_t last = (tokens - 1) / kTokens * kTokens;  // the last tile
    if (tokens > 0) load(backwards ? last : 0), store(0);
    int turn = 0;
    for (int64_t i = 0; tokens > 0 && i <= last; i += kTokens, turn ^= 1) {
      const int64_t from = backwards ? last - i : i;
      const int count = tokens - from < kTokens ? int(tokens - from) : kTokens;
      if (!backwards)
#pragma unroll
        for (int k = 0; k < kOwn; ++k)
          keep_at<true>(state[k], first_kept + from / kTokens * kept_apart + (own + k) * kElements, kElements);
      const bool more = i < last;
      __syncthreads();
      if (i > 0) flush(turn ^ 1, backwards ? from + kTokens : from - kTokens);
      if (more) load(backwards ? from - kTokens : from + kTokens);
#pragma unroll 1
      for (int t = 0; t < kTokens; t += kTurn) {
        if (t + kTurn == kTokens && more) store(turn ^ 1);
        if (backwards) {
#pragma unroll
          for (int of = 0; of < kTurn; ++of) take(turn, count, kTokens - 1 - t - of, true);
        } else {
#pragma unroll
          for (int of = 0; of < kTurn; ++of) take(turn, count, t + of, false);
        }
      }
      if (backwards && from > 0)
#pragma unroll
        for (int k = 0; k < kOwn; ++k)
          keep_at<true>(state[k], gradient_at(workspace, begin + from - kTokens, group, block, own + k), kElements);
    }
    __syncthreads();
    if (tokens > 0) flush(turn ^ 1, backwards ? 0 : last);
    if (p.dinitial.data && backwards)
#pragma unroll
      for (int k = 0; k < kOwn; ++k)
        store_states(p.dinitial, of_states(p.dinitial, k), p.dinitial.stride[2], left_of(kElements), false, state[k]);
    __syncthreads();
  }
}
template <int kRounds>
constexpr int kDeltaWalkBytes = 4 * (2 * 2 * checkpoint_tokens(kRounds * kScanRound) * kRounds * kScanRound +
                                     2 * checkpoint_tokens(kRounds * kScanRound) * (kColumns + 2));

}  // namespace
}  // namespace pydet
