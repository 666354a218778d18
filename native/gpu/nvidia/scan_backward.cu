// Gradients of recurrences over tokens (NUMERICS.md, "Scans", "Their gradients"): the CPU's bits.

#include <algorithm>

#include "contract/elementary.h"
#include "core/error.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/scan.h"
#include "gpu/nvidia/scan_delta_back.h"
#include "gpu/nvidia/scan_selective_back.h"

namespace pydet {
namespace {

// ---- The walk back -----------------------------------------------------------------------------------------------------
//
// A block has 32 columns of a sequence, each with a team of eight threads, as forwards. The tokens go by tiles of 32 (16, 8):
// the states before each are kept, and those before its tokens made again from them. Sums over the columns go by shuffles
// within a warp, whose columns are 8 apart, and then through shared memory; one block's are parts of a sum that a kernel
// behind adds up.
//
// Two chains walk the tokens: the states forwards, their gradients backwards. Neither needs the other, so of states that fill
// their rounds blocks of their own walk them first and keep what is at each tile's begin, or end; then each tile is taken
// back by a block of its own, all of them side by side (scan_tiles.h). What is kept at a tile's end lies where the tile's
// parts of sums will. Of other states, whose tiles' parts may be too few, with a decay for each state, whose gradient is a
// chain of a column over its tokens, and of columns that fill no block, the kernels here do both, a tile after the other.

constexpr int64_t kMostHeldStates = 256, kMostOwnRates = 128;  // of a column, beyond which registers spill
constexpr int kWarps = kThreads / 32;
static_assert(kWarps == 8 && kColumns == kScanColumns, "a warp has four columns, 8 apart");

// The column of a thread's team: those of a warp are 8 apart, so that the first two joins are within it.
__device__ __forceinline__ int own_column() { return team_of_warp() * 8 + int(threadIdx.x) / 32; }

// States before so many tokens stay in shared memory, of which even the smallest chips have enough for a block. In registers
// they would want a copy of a token's code for each, which is more than the caches of instructions hold.
PYDET_HD constexpr int held_tokens(int rounds) { return rounds == 1 ? 8 : rounds == 2 ? 4 : rounds == 4 ? 3 : 1; }

// Shared memory of a block, for rounds of 32 states: two rows of each of some tokens, four numbers of each token and
// column, and what warps leave of a token's sums, in turns.
template <int kRounds> struct BackTile {
  static constexpr int kElements = kRounds * kScanRound, kTokens = checkpoint_tokens(kElements);
  float rows[2][kTokens][kElements];
  float numbers[4][kTokens][kColumns];
  static constexpr int kTurns = kRounds > kThreadRounds ? 1 : 2;  // of parts, for want of shared memory
  float parts[kTurns][2][kWarps][kElements];
  float terms[kTokens][3 * kColumns + 1];  // of sums over a head's columns
  alignas(16) float4 held[held_tokens(kRounds)][kRounds][kThreads];

  // The other place was read before this token's barrier; one alone is read before another.
  static __device__ __forceinline__ int next_turn(int turn) {
    if constexpr (kTurns == 2) return turn ^ 1;
    __syncthreads();
    return 0;
  }
};

// Rounds whose sums over columns are made at a time.
PYDET_HD constexpr int joined_rounds(int rounds) { return rounds < 2 ? rounds : 2; }

// Adds v of a warp's four columns, and leaves the sums in parts[warp]: a thread comes to have a quarter of its states.
template <int kRounds> __device__ __forceinline__ void join_columns(const float (&v)[kRounds][4], float *parts) {
  constexpr int kAll = 4 * kRounds, kHalf = kAll / 2, kQuarter = kAll / 4;
  const bool upper = team_of_warp() & 2, odd = team_of_warp() & 1;
  float half[kHalf], quarter[kQuarter];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float low = v[i / 4][i % 4], high = v[(i + kHalf) / 4][(i + kHalf) % 4];
    const float other = gpu_shfl_xor(upper ? low : high, 2, 32);
    half[i] = (upper ? high : low) + other;
  }
#pragma unroll
  for (int i = 0; i < kQuarter; ++i) {
    const float other = gpu_shfl_xor(odd ? half[i] : half[i + kQuarter], 1, 32);
    quarter[i] = (odd ? half[i + kQuarter] : half[i]) + other;
  }
#pragma unroll
  for (int i = 0; i < kQuarter; ++i) {
    const int at = (upper ? kHalf : 0) + (odd ? kQuarter : 0) + i;
    parts[state_of(at / 4, at % 4)] = quarter[i];
  }
}

// The sums over a block's 32 columns, of what its warps left, into the workspace.
template <int kElements>
__device__ __forceinline__ void write_parts(const float (&parts)[2][kWarps][kElements], const ScanWorkspace &workspace,
                                            int64_t token, int64_t group, int64_t block) {
  for (int i = int(threadIdx.x); i < 2 * kElements; i += kThreads) {
    const int which = i / kElements, n = i % kElements;
    if (n >= workspace.states) continue;
    float s[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) s[w] = parts[which][w][n];
    workspace.row(which, token, group, block)[n] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
  }
}

template <int kRounds>
__device__ __forceinline__ void keep(const float (&state)[kRounds][4], float *to, int64_t states) {
  keep_at<false>(state, to + own_column() * states, states);
}
template <int kRounds>
__device__ __forceinline__ void restore(float (&state)[kRounds][4], const float *from, int64_t states) {
  const float *own = from + own_column() * states + scan_lane() * kScanLaneElements;
  make_opaque(own);  // else a place of each round would be kept
#pragma unroll
  for (int r = 0; r < kRounds; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i) state[r][i] = state_of(r, i) < states ? own[r * kScanRound + i] : 0.0f;
}

// Walks the tokens of a sequence forwards and keeps the states before each tile: fetch(from) sets out to read a tile's
// operands, place() has them in shared memory, step(i, state) takes the state over its token i.
template <int kRounds, class Kept, class Fetch, class Place, class Step>
__device__ __forceinline__ void walk_states(int64_t tokens, int64_t states, const Kept &kept,
                                            float (&state)[kRounds][4], const Fetch &fetch, const Place &place,
                                            const Step &step) {
  constexpr int kTokens = BackTile<kRounds>::kTokens;
  if (tokens > kTokens) fetch(0);
  for (int64_t from = 0; from < tokens; from += kTokens) {
    keep(state, kept(from), states);
    if (from + kTokens >= tokens) break;
    place();
    __syncthreads();
    if (from + 2 * kTokens < tokens) fetch(from + kTokens);
#pragma unroll 1
    for (int i = 0; i < kTokens; ++i) step(i, state);
    __syncthreads();
  }
}

// A sequence's tiles, the last one first: `from` is where each begins, when take() has it.
template <int kTokens, class Take>
__device__ __forceinline__ void take_tiles(int64_t tokens, int64_t &from, const Take &take) {
  for (from = (tokens - 1) / kTokens * kTokens; from >= 0 && tokens > 0; from -= kTokens) {
    take();
    __syncthreads();
  }
}

// Takes the `count` tokens of a tile back, whose operands are in shared memory: back(i, before) a token.
template <int kRounds, class Step, class Back>
__device__ __forceinline__ void take_back(BackTile<kRounds> &tile, int count, const float *kept, int64_t states,
                                          float (&state)[kRounds][4], const Step &step, const Back &back) {
  constexpr int kHeld = held_tokens(kRounds);
#pragma unroll 1
  for (int low = (count - 1) / kHeld * kHeld; low >= 0; low -= kHeld) {
    restore(state, kept, states);
    const int end = low + kHeld < count ? low + kHeld : count;
#pragma unroll 1
    for (int i = 0; i < end; ++i) {
      if (i >= low)
#pragma unroll
        for (int r = 0; r < kRounds; ++r)
          tile.held[i - low][r][threadIdx.x] = make_float4(state[r][0], state[r][1], state[r][2], state[r][3]);
      if (i + 1 < end) step(i, state);
    }
#pragma unroll 1
    for (int i = end - 1; i >= low; --i) {
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 held = tile.held[i - low][r][threadIdx.x];
#pragma unroll
        for (int e = 0; e < 4; ++e) state[r][e] = part(held, e);
      }
      back(i, state);
    }
  }
}

// ---- The selective scan ------------------------------------------------------------------------------------------------

template <int kRounds, bool each_state>
__global__ void __launch_bounds__(kThreads, 1)
    selective_back_kernel(const __grid_constant__ SelectiveScanBackward p, const __grid_constant__ int64_t blocks) {
  using Tile = BackTile<kRounds>;
  const int64_t states = p.states;
  enum { kX, kDt, kDecay, kDy };
  extern __shared__ __align__(16) char shared[];
  Tile &tile = *reinterpret_cast<Tile *>(shared);
  const int64_t of_group = p.heads / p.groups * p.width, in_group = p.workspace.blocks;
  const int own = own_column(), left = left_of(states), lane = scan_lane();
  for (int64_t job = blockIdx.x; job < blocks; job += gridDim.x) {
    const int64_t block = job % in_group, group = job / in_group % p.groups, sequence = job / in_group / p.groups;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t tokens = range.end - range.begin;
    const int64_t first = block * kColumns, at_group = group * of_group + first;
    const int columns = of_group - first < kColumns ? int(of_group - first) : kColumns;
    const bool mine = own < columns;
    const int64_t head = (at_group + (mine ? own : 0)) / p.width, column = (at_group + (mine ? own : 0)) % p.width;
    const int64_t begin = range.batch * p.sequences.tokens + range.begin;
    float state[kRounds][4], gradient[kRounds][4];
    constexpr int kOwn = each_state ? kRounds : 1;
    float rates[kOwn][4], da[kOwn][4];
    const auto of_states = [&](const Strided &x) {
      return sequence * x.stride[0] + head * x.stride[1] + column * x.stride[2];
    };
    float *const first_kept = p.workspace.states_at(sequence, begin, 0, group, block);
    const auto kept = [&](int64_t after) {
      return first_kept + after / Tile::kTokens * p.workspace.groups * p.workspace.blocks * p.workspace.block_floats();
    };
    const auto given = [&](const Strided &from, float(&to)[kRounds][4]) {
      load_states(from, of_states(from), from.stride[3], left, mine && from.data, false, to);
    };
    given(p.initial, state), given(p.dfinal, gradient);
    if constexpr (each_state)
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = state_of(r, i);
          rates[r][i] = mine && n < states ? element(p.a, head * p.a.stride[0] + n * p.a.stride[1]) : 0.0f;
          da[r][i] = 0.0f;
        }
    const float d = p.d.data ? element(p.d, head * p.d.stride[0]) : 0.0f;

    // The column of which a thread brings numbers, of every eighth token, and where it lies.
    constexpr int kRowsAtOnce = kThreads / kColumns;
    const int of_column = int(threadIdx.x) % kColumns;
    const int64_t brought = (at_group + (of_column < columns ? of_column : 0)) / p.width,
                  within = (at_group + (of_column < columns ? of_column : 0)) % p.width;
    const auto brought_of = [&](const Strided &x) { return brought * x.stride[2] + within * x.stride[3]; };
    const int64_t of_dt = brought * p.dt.stride[2], of_x = brought_of(p.x), of_dy = brought_of(p.dy);
    const float a = each_state ? 0.0f : element(p.a, brought * p.a.stride[0]);
    using RowsHere = Rows<Tile::kTokens, Tile::kElements, kThreads>;
    RowsHere b_rows(p.b, range.batch * p.b.stride[0] + group * p.b.stride[2], states);
    RowsHere c_rows(p.c, range.batch * p.c.stride[0] + group * p.c.stride[2], states);
    constexpr int kOwnNumbers = Tile::kTokens * kColumns / kThreads;
    LoadedBits x_bits[kOwnNumbers], dt_bits[kOwnNumbers], dy_bits[kOwnNumbers];
    // What the walk of the states wants, that of the gradients, or a tile: both.
    const auto fetch = [&](int64_t from, bool of_states_walk = true, bool of_gradients = true) {
      const int64_t token = range.begin + from;
      const auto at = [&](const Strided &x) { return range.batch * x.stride[0] + token * x.stride[1]; };
      if (of_states_walk) b_rows.load(token, range.end);
      if (of_gradients) c_rows.load(token, range.end);
      const int thread = b_rows.own_thread();
#pragma unroll
      for (int i = 0; i < kOwnNumbers; ++i) {
        const int t = i * kRowsAtOnce + thread / kColumns;
        const bool there = from + t < tokens && thread % kColumns < columns;
        const auto value = [&](const Strided &x, int64_t of) {
          return bits_at(x, at(x) + t * x.stride[1] + of, there);
        };
        dt_bits[i] = value(p.dt, of_dt);
        if (of_states_walk) x_bits[i] = value(p.x, of_x);
        if (of_gradients) dy_bits[i] = value(p.dy, of_dy);
      }
    };
    const auto place = [&](bool of_states_walk = true, bool of_gradients = true) {
      if (of_states_walk) b_rows.store(&tile.rows[0][0][0]);
      if (of_gradients) c_rows.store(&tile.rows[1][0][0]);
      const int thread = b_rows.own_thread();
#pragma unroll
      for (int i = 0; i < kOwnNumbers; ++i) {
        const int t = i * kRowsAtOnce + thread / kColumns;
        const float dt = number_of(p.dt.type, dt_bits[i]);
        tile.numbers[kDt][t][thread % kColumns] = dt;
        if (of_states_walk) tile.numbers[kX][t][thread % kColumns] = number_of(p.x.type, x_bits[i]);
        if (of_gradients) tile.numbers[kDy][t][thread % kColumns] = number_of(p.dy.type, dy_bits[i]);
        if constexpr (!each_state) tile.numbers[kDecay][t][thread % kColumns] = exp_f32(dt * a);
      }
    };
    const auto decay_of = [&](float decay, float dt, int r, int i) {
      if constexpr (each_state) return exp_f32(dt * rates[r][i]);
      else return decay;
    };
    const auto step = [&](int t, float(&over)[kRounds][4]) {
      const float dt = tile.numbers[kDt][t][own], u = dt * tile.numbers[kX][t][own];
      const float decay = tile.numbers[kDecay][t][own];
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 b = vector_of(tile.rows[0][t], r);
#pragma unroll
        for (int i = 0; i < 4; ++i) over[r][i] = fmaf(u, part(b, i), decay_of(decay, dt, r, i) * over[r][i]);
      }
    };
    constexpr int kJoined = each_state ? 1 : joined_rounds(kRounds);
    int turn = 0;
    int64_t from = 0;
    const int64_t of_dx =
        range.batch * p.dx.stride[0] + range.begin * p.dx.stride[1] + head * p.dx.stride[2] + column * p.dx.stride[3];
    const auto back = [&](int t, const float(&before)[kRounds][4]) {
      const float x = tile.numbers[kX][t][own], dt = tile.numbers[kDt][t][own], u = dt * x;
      const float dy = tile.numbers[kDy][t][own], decay = tile.numbers[kDecay][t][own];
      const int64_t token = begin + from + t;
      float v = 0.0f, l = 0.0f;
#pragma unroll
      for (int begun = 0; begun < kRounds; begun += kJoined) {
        float terms[kJoined][4];
#pragma unroll
        for (int joined = 0; joined < kJoined; ++joined) {
          const int r = begun + joined;
          const float4 b = vector_of(tile.rows[0][t], r), c = vector_of(tile.rows[1][t], r);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float g = fmaf(part(c, i), dy, gradient[r][i]);
            gradient[r][i] = g;
            terms[joined][i] = mine ? u * g : 0.0f;
            if (r * kScanRound + i < left) v = fmaf(part(b, i), g, v);
          }
        }
        join_columns(terms, tile.parts[turn][0][threadIdx.x / 32] + begun * kScanRound);
      }
#pragma unroll
      for (int begun = 0; begun < kRounds; begun += kJoined) {
        float terms[kJoined][4];
#pragma unroll
        for (int joined = 0; joined < kJoined; ++joined) {
          const int r = begun + joined;
          const float4 b = vector_of(tile.rows[0][t], r);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float factor = decay_of(decay, dt, r, i), g = gradient[r][i], old = factor * before[r][i];
            terms[joined][i] = mine ? dy * fmaf(u, part(b, i), old) : 0.0f;
            gradient[r][i] = factor * g;
            if constexpr (each_state) {
              const float e = g * old;
              da[r][i] = fmaf(dt, e, da[r][i]);
              if (r * kScanRound + i < left) l = fmaf(rates[r][i], e, l);
            } else if (r * kScanRound + i < left) {
              l = fmaf(g, old, l);
            }
          }
        }
        join_columns(terms, tile.parts[turn][1][threadIdx.x / 32] + begun * kScanRound);
      }
      v = join_lanes(v), l = join_lanes(l);
      if (lane == 0) {
        float *const terms = tile.terms[t] + own;
        terms[0] = x * v, terms[kColumns] = l, terms[2 * kColumns] = dy * x;
        if (mine) put(p.dx, of_dx + (from + t) * p.dx.stride[1], p.d.data ? fmaf(dt, v, d * dy) : dt * v);
      }
      __syncthreads();
      write_parts(tile.parts[turn], p.workspace, token, group, block);
      turn = Tile::next_turn(turn);
    };
    const auto take_tile = [&] {
      fetch(from), place();
      __syncthreads();
      const int count = tokens - from < Tile::kTokens ? int(tokens - from) : Tile::kTokens;
      take_back(tile, count, kept(from), states, state, step, back);
      add_heads<int64_t, Tile::kTokens, kThreads>(p, tile.terms, begin + from, count, at_group, columns,
                                                  block);  // behind the last token's barrier
    };
    const auto walk = [&] {
      walk_states(
          tokens, states, kept, state, [&](int64_t at) { fetch(at, true, false); }, [&] { place(true, false); }, step);
    };
    walk();
    take_tiles<Tile::kTokens>(tokens, from, take_tile);
    if (p.dinitial.data && mine)
      store_states(p.dinitial, of_states(p.dinitial), p.dinitial.stride[3], left, false, gradient);
    if constexpr (each_state) keep(da, p.workspace.states_at(sequence, begin, 0, group, block), states);
    __syncthreads();
  }
}

// ---- The gated delta rule ----------------------------------------------------------------------------------------------

template <int kRounds>
__global__ void __launch_bounds__(kThreads, 1)
    delta_back_kernel(const __grid_constant__ GatedDeltaBackward p, const __grid_constant__ int64_t blocks) {
  using Tile = BackTile<kRounds>;
  const int64_t states = p.keys;
  enum { kV, kDecay, kBeta, kOut };
  extern __shared__ __align__(16) char shared[];
  Tile &tile = *reinterpret_cast<Tile *>(shared);
  const int64_t of_head = divide_up(p.width, kColumns);
  const int own = own_column(), left = left_of(states), lane = scan_lane();
  for (int64_t job = blockIdx.x; job < blocks; job += gridDim.x) {
    const int64_t first = job % of_head * kColumns, head = job / of_head % p.heads, sequence = job / of_head / p.heads;
    const int64_t in_group = p.heads / p.groups, group = head / in_group;
    const int64_t block = head % in_group * of_head + first / kColumns, column = first + own;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t tokens = range.end - range.begin;
    const int columns = p.width - first < kColumns ? int(p.width - first) : kColumns;
    const bool mine = own < columns;
    const int64_t begin = range.batch * p.sequences.tokens + range.begin;
    float state[kRounds][4], gradient[kRounds][4];
    const auto of_states = [&](const Strided &x) {
      return sequence * x.stride[0] + head * x.stride[1] + column * x.stride[3];
    };
    float *const first_kept = p.workspace.states_at(sequence, begin, 0, group, block);
    const auto kept = [&](int64_t after) {
      return first_kept + after / Tile::kTokens * p.workspace.groups * p.workspace.blocks * p.workspace.block_floats();
    };
    const auto given = [&](const Strided &from, float(&to)[kRounds][4]) {
      load_states(from, of_states(from), from.stride[2], left, mine && from.data, false, to);
    };
    given(p.initial, state), given(p.dfinal, gradient);

    using RowsHere = Rows<Tile::kTokens, Tile::kElements, kThreads>;
    RowsHere q_rows(p.q, range.batch * p.q.stride[0] + group * p.q.stride[2], states);
    RowsHere k_rows(p.k, range.batch * p.k.stride[0] + group * p.k.stride[2], states);
    constexpr int kRowsAtOnce = kThreads / kColumns, kOwnNumbers = Tile::kTokens / kRowsAtOnce;
    const int c = int(threadIdx.x) % kColumns, of_row = int(threadIdx.x) / kColumns;
    LoadedBits v_bits[kOwnNumbers], out_bits[kOwnNumbers], g_bits[kOwnNumbers], beta_bits[kOwnNumbers];
    // What the walk of the states wants, that of the gradients, or a tile: both.
    const auto fetch = [&](int64_t from, bool of_states_walk = true, bool of_gradients = true) {
      const int64_t token = range.begin + from;
      const auto at = [&](const Strided &x, int64_t i) {
        return range.batch * x.stride[0] + token * x.stride[1] + i * x.stride[2];
      };
      k_rows.load(token, range.end);
      if (of_gradients) q_rows.load(token, range.end);
#pragma unroll
      for (int i = 0; i < kOwnNumbers; ++i) {
        const int t = i * kRowsAtOnce + of_row;
        const auto value = [&](const Strided &x, int64_t n) {
          return bits_at(x, at(x, head) + t * x.stride[1] + n * x.stride[3], from + t < tokens && c < columns);
        };
        if (of_states_walk) v_bits[i] = value(p.v, first + c);
        if (of_gradients) out_bits[i] = value(p.dout, first + c);
        g_bits[i] = value(p.g, 0), beta_bits[i] = value(p.beta, 0);
      }
    };
    const auto place = [&](bool of_states_walk = true, bool of_gradients = true) {
      k_rows.store(&tile.rows[1][0][0]);
      if (of_gradients) q_rows.store(&tile.rows[0][0][0]);
#pragma unroll
      for (int i = 0; i < kOwnNumbers; ++i) {
        const int t = i * kRowsAtOnce + of_row;
        if (of_states_walk) tile.numbers[kV][t][c] = number_of(p.v.type, v_bits[i]);
        if (of_gradients) tile.numbers[kOut][t][c] = number_of(p.dout.type, out_bits[i]);
        tile.numbers[kDecay][t][c] = exp_f32(number_of(p.g.type, g_bits[i]));
        tile.numbers[kBeta][t][c] = number_of(p.beta.type, beta_bits[i]);
      }
    };
    // What v has beyond the state's answer to k.
    const auto remembered = [&](int t, float decay, const float(&before)[kRounds][4]) {
      float known = 0.0f;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 k = vector_of(tile.rows[1][t], r);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (r * kScanRound + i < left) known = fmaf(part(k, i), decay * before[r][i], known);
      }
      return tile.numbers[kV][t][own] - join_lanes(known);
    };
    const auto step = [&](int t, float(&over)[kRounds][4]) {
      const float decay = tile.numbers[kDecay][t][own];
      const float w = tile.numbers[kBeta][t][own] * remembered(t, decay, over);
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 k = vector_of(tile.rows[1][t], r);
#pragma unroll
        for (int i = 0; i < 4; ++i) over[r][i] = fmaf(part(k, i), w, decay * over[r][i]);
      }
    };
    constexpr int kJoined = joined_rounds(kRounds);
    int turn = 0;
    int64_t from = 0;
    const int64_t of_dv =
        range.batch * p.dv.stride[0] + range.begin * p.dv.stride[1] + head * p.dv.stride[2] + column * p.dv.stride[3];
    const auto back = [&](int t, const float(&before)[kRounds][4]) {
      const float decay = tile.numbers[kDecay][t][own], beta = tile.numbers[kBeta][t][own];
      const float dout = tile.numbers[kOut][t][own], m = remembered(t, decay, before), w = beta * m;
      const int64_t token = begin + from + t;
      float z = 0.0f, l = 0.0f;
#pragma unroll
      for (int begun = 0; begun < kRounds; begun += kJoined) {
        float terms[kJoined][4];
#pragma unroll
        for (int joined = 0; joined < kJoined; ++joined) {
          const int r = begun + joined;
          const float4 q = vector_of(tile.rows[0][t], r), k = vector_of(tile.rows[1][t], r);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float g = fmaf(part(q, i), dout, gradient[r][i]);
            gradient[r][i] = g;
            terms[joined][i] = mine ? dout * fmaf(part(k, i), w, decay * before[r][i]) : 0.0f;
            if (r * kScanRound + i < left) z = fmaf(part(k, i), g, z);
          }
        }
        join_columns(terms, tile.parts[turn][0][threadIdx.x / 32] + begun * kScanRound);
      }
      z = join_lanes(z);
      const float of_m = beta * z;
#pragma unroll
      for (int begun = 0; begun < kRounds; begun += kJoined) {
        float terms[kJoined][4];
#pragma unroll
        for (int joined = 0; joined < kJoined; ++joined) {
          const int r = begun + joined;
          const float4 k = vector_of(tile.rows[1][t], r);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float old = decay * before[r][i], g = gradient[r][i];
            terms[joined][i] = mine ? fmaf(w, g, -(of_m * old)) : 0.0f;
            const float through = fmaf(-part(k, i), of_m, g);
            gradient[r][i] = decay * through;
            if (r * kScanRound + i < left) l = fmaf(through, old, l);
          }
        }
        join_columns(terms, tile.parts[turn][1][threadIdx.x / 32] + begun * kScanRound);
      }
      l = join_lanes(l);
      if (lane == 0) {
        tile.terms[t][own] = l, tile.terms[t][kColumns + own] = z * m;
        if (mine) put(p.dv, of_dv + (from + t) * p.dv.stride[1], of_m);
      }
      __syncthreads();
      write_parts(tile.parts[turn], p.workspace, token, group, block);
      turn = Tile::next_turn(turn);
    };
    const auto take_tile = [&] {
      fetch(from), place();
      __syncthreads();
      const int count = tokens - from < Tile::kTokens ? int(tokens - from) : Tile::kTokens;
      take_back(tile, count, kept(from), states, state, step, back);
      for (int i = int(threadIdx.x); i < 2 * Tile::kTokens; i += kThreads) {  // behind the last token's barrier
        const int t = i % Tile::kTokens, which = i / Tile::kTokens;
        if (t < count)
          p.workspace.of_head(which, begin + from + t, head)[first / kColumns] =
              chain_of(tile.terms[t] + which * kColumns, 0, columns);
      }
    };
    const auto walk = [&] {
      walk_states(
          tokens, states, kept, state, [&](int64_t at) { fetch(at, true, false); }, [&] { place(true, false); }, step);
    };
    walk();
    take_tiles<Tile::kTokens>(tokens, from, take_tile);
    if (p.dinitial.data && mine)
      store_states(p.dinitial, of_states(p.dinitial), p.dinitial.stride[2], left, false, gradient);
    __syncthreads();
  }
}

// ---- What blocks of columns leave --------------------------------------------------------------------------------------

__device__ __forceinline__ float chain(const float *parts, int64_t count, int64_t stride = 1) {
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t i = 0; i < count; ++i) sum = sum + parts[i * stride];
  return sum;
}

// Two rows of a token and group, of the sums over columns: a block has some tokens of a sequence.
struct RowSums {
  Sequences sequences;
  ScanWorkspace workspace;
  Strided first, second;
  Device device;
  void *stream;
};
constexpr int kFinishTokens = 4;  // of a block
__global__ void __launch_bounds__(kThreads)
    row_sums_kernel(const __grid_constant__ RowSums p, const __grid_constant__ int64_t blocks) {
  const uint32_t pieces = uint32_t(divide_up(p.sequences.tokens, kFinishTokens));
  const int64_t groups = p.workspace.groups, states = p.workspace.states;
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t piece = block % pieces, sequence = block / pieces;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t begin = range.begin + piece * kFinishTokens;
    const int64_t tokens = range.end - begin < kFinishTokens ? range.end - begin : kFinishTokens;
    for (int64_t i = threadIdx.x; i < tokens * groups * 2 * states; i += kThreads) {
      const int64_t n = i % states, which = i / states % 2, group = i / states / 2 % groups;
      const int64_t t = begin + i / states / 2 / groups;
      const float *const parts = p.workspace.row(int(which), range.batch * p.sequences.tokens + t, group, 0);
      const Strided &to = which ? p.second : p.first;
      put(to, range.batch * to.stride[0] + t * to.stride[1] + group * to.stride[2] + n * to.stride[3],
          chain(parts + n, p.workspace.blocks, states));
    }
  }
}

// The parts that a head has of its sum.
__device__ __forceinline__ float head_sum(const SelectiveScanBackward &p, int which, int64_t token, int64_t head) {
  const int64_t first = head % (p.heads / p.groups) * p.width;
  return chain(p.workspace.of_head(which, token, head),
               p.width ? (first + p.width - 1) / kColumns - first / kColumns + 1 : 0);
}

// ddt, and a token's parts of dA and dD: a thread has a head of a token.
__global__ void __launch_bounds__(kThreads)
    selective_steps_kernel(const __grid_constant__ SelectiveScanBackward p, const __grid_constant__ int64_t blocks) {
  const uint32_t pieces = uint32_t(divide_up(p.sequences.tokens, kFinishTokens));
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t piece = block % pieces, sequence = block / pieces;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t begin = range.begin + piece * kFinishTokens;
    const int64_t tokens = range.end - begin < kFinishTokens ? range.end - begin : kFinishTokens;
    for (int64_t i = threadIdx.x; i < tokens * p.heads; i += kThreads) {
      const int64_t head = i % p.heads, t = begin + i / p.heads, token = range.batch * p.sequences.tokens + t;
      const float of_u = head_sum(p, 0, token, head), of_decay = head_sum(p, 1, token, head);
      put(p.ddt, range.batch * p.ddt.stride[0] + t * p.ddt.stride[1] + head * p.ddt.stride[2],
          p.each_state ? of_decay + of_u : fmaf(element(p.a, head * p.a.stride[0]), of_decay, of_u));
      // The sums that chains over the tokens want, in place of their first parts.
      if (!p.each_state) *p.workspace.of_head(1, token, head) = of_decay;
      if (p.dd.data) *p.workspace.of_head(2, token, head) = head_sum(p, 2, token, head);
    }
  }
}

// dA and dD: a block has some heads of a sequence, whose terms its threads read some tokens ahead of the two chains.
constexpr int kSumHeads = 8, kSumTokens = 64, kOwnSums = kSumTokens * kSumHeads / kThreads;
__global__ void __launch_bounds__(kThreads)
    selective_sums_kernel(const __grid_constant__ SelectiveScanBackward p, const __grid_constant__ int64_t blocks) {
  __shared__ float terms[2][3][kSumTokens][kSumHeads];
  enum { kDt, kOfDecay, kOfX };
  const int own = int(threadIdx.x) % kSumHeads, warp = int(threadIdx.x) / 32;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t in_sequence = divide_up(p.heads, kSumHeads), sequence = block / in_sequence;
    const int64_t head = block % in_sequence * kSumHeads + own, of_group = p.heads / p.groups;
    const bool mine = head < p.heads;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t before = range.batch * p.sequences.tokens;
    LoadedBits dt[kOwnSums];
    float of_decay[kOwnSums], of_x[kOwnSums];
    const auto load = [&](int64_t last) {
#pragma unroll
      for (int i = 0; i < kOwnSums; ++i) {
        const int64_t t = last - (int(threadIdx.x) + i * kThreads) / kSumHeads;
        const bool there = mine && t >= range.begin;
        dt[i] = bits_at(p.dt, range.batch * p.dt.stride[0] + t * p.dt.stride[1] + head * p.dt.stride[2], there);
        of_decay[i] = there && !p.each_state ? *p.workspace.of_head(1, before + t, head) : 0.0f;
        of_x[i] = there && p.dd.data ? *p.workspace.of_head(2, before + t, head) : 0.0f;
      }
    };
    float da = 0.0f, dd = 0.0f;
    load(range.end - 1);
    int turn = 0;
    for (int64_t last = range.end - 1; last >= range.begin; last -= kSumTokens, turn ^= 1) {
#pragma unroll
      for (int i = 0; i < kOwnSums; ++i) {
        const int t = (int(threadIdx.x) + i * kThreads) / kSumHeads;
        terms[turn][kDt][t][own] = number_of(p.dt.type, dt[i]);
        terms[turn][kOfDecay][t][own] = of_decay[i], terms[turn][kOfX][t][own] = of_x[i];
      }
      __syncthreads();
      load(last - kSumTokens);
      const int count = last - range.begin + 1 < kSumTokens ? int(last - range.begin + 1) : kSumTokens;
      if (warp == 0)
#pragma unroll 16
        for (int t = 0; t < count; ++t) da = fmaf(terms[turn][kDt][t][own], terms[turn][kOfDecay][t][own], da);
      if (warp == 1)
#pragma unroll 16
        for (int t = 0; t < count; ++t) dd = dd + terms[turn][kOfX][t][own];
      // The other place is written next, and was read before this turn's barrier.
    }
    const bool writes = mine && int(threadIdx.x) % 32 < kSumHeads;
    if (p.dd.data && writes && warp == 1) put(p.dd, sequence * p.dd.stride[0] + head * p.dd.stride[1], dd);
    const int64_t to = sequence * p.da.stride[0] + head * p.da.stride[1];
    if (!p.each_state && writes && warp == 0) put(p.da, to, da);
    for (int64_t n = int(threadIdx.x) / kSumHeads; p.each_state && mine && n < p.states; n += kThreads / kSumHeads) {
      float sum = 0.0f;
      for (int64_t c = head % of_group * p.width; c < (head % of_group + 1) * p.width; ++c)
        sum = sum + p.workspace.states_at(sequence, before + range.begin, 0, head / of_group,
                                          c / kColumns)[c % kColumns * p.states + n];
      put(p.da, to + n * p.da.stride[2], sum);
    }
    __syncthreads();
  }
}

// dg and dbeta: a thread has a head of a token.
__global__ void __launch_bounds__(kThreads)
    delta_sums_kernel(const __grid_constant__ GatedDeltaBackward p, const __grid_constant__ int64_t blocks) {
  const uint32_t pieces = uint32_t(divide_up(p.sequences.tokens, kFinishTokens));
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t piece = block % pieces, sequence = block / pieces;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t begin = range.begin + piece * kFinishTokens;
    const int64_t tokens = range.end - begin < kFinishTokens ? range.end - begin : kFinishTokens;
    for (int64_t i = threadIdx.x; i < tokens * p.heads * 2; i += kThreads) {
      const int64_t which = i % 2, head = i / 2 % p.heads, t = begin + i / 2 / p.heads;
      const Strided &to = which ? p.dbeta : p.dg;
      const int64_t token = range.batch * p.sequences.tokens + t;
      put(to, range.batch * to.stride[0] + t * to.stride[1] + head * to.stride[2],
          chain(p.workspace.of_head(int(which), token, head), p.workspace.parts));
    }
  }
}

template <class F> pydet_status with_held_rounds(int64_t states, const F &f) {
  return with_rounds<1, kMostHeldStates>(states, f);
}

constexpr int64_t kMostGrid = 65535;  // blocks of a grid in y, and in z

template <class Tile>
bool tiles_fit(const Device &device, const ScanWorkspace &workspace, int64_t heads, int64_t width, const Strided &first,
               const Strided &second) {
  return int(sizeof(Tile)) <= gpu_shared_bytes(device.id) && workspace.states == Tile::kElements &&
         heads <= kMostGrid && heads * width <= INT32_MAX && reinterpret_cast<uintptr_t>(workspace.data) % 16 == 0 &&
         rows_in_pieces(first, workspace.states) && rows_in_pieces(second, workspace.states);
}

pydet_status check_blocks(const char *name, int64_t blocks) {
  if (blocks <= INT32_MAX) return PYDET_OK;
  return fail(PYDET_UNSUPPORTED, "%s: %lld blocks of columns, want at most 2147483647", name,
              static_cast<long long>(blocks));
}
template <class Problem>
pydet_status launch_back(const char *name, const Problem &p, int64_t blocks, void (*kernel)(Problem, int64_t),
                         size_t bytes, int threads = kThreads) {
  if (blocks == 0) return PYDET_OK;
  PYDET_TRY(check_blocks(name, blocks));
  Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(blocks < kMostBlocks ? blocks : kMostBlocks)),
                  dim3(unsigned(threads)), int(bytes)};
  return launch(where, kernel, p, blocks);
}

// Both walks, then the tiles, which are asked for before the walks begin. blocks: of a tile, in x and y.
template <class Tile, class Problem>
pydet_status launch_apart(const char *name, const Problem &p, void (*walk)(Problem, int64_t), size_t walk_bytes,
                          dim3 blocks, void (*tile)(Problem, int64_t)) {
  const int64_t tiles = tiles_of(p.sequences, Tile::kTokens), of_tile = int64_t(blocks.x) * blocks.y;
  PYDET_TRY(check_blocks(name, of_tile * tiles));
  if (of_tile * p.sequences.count == 0) return PYDET_OK;
  PYDET_TRY(load(name, tile, sizeof(Tile)));
  PYDET_TRY(launch_back(name, p, 2 * of_tile * p.sequences.count, walk, walk_bytes, kWalkThreads));
  blocks.z = unsigned(std::min(tiles, kMostGrid));
  Launch where = {name, static_cast<gpu_stream>(p.stream), blocks, dim3(Tile::kThreads), int(sizeof(Tile))};
  where.loaded = true;
  return launch(where, tile, p, tiles);
}

template <class Problem>
pydet_status add_rows(const char *name, const Problem &p, const Strided &first, const Strided &second) {
  const RowSums sums = {p.sequences, p.workspace, first, second, p.device, p.stream};
  return launch_blocks(name, sums, p.sequences.count * divide_up(p.sequences.tokens, kFinishTokens), kThreads,
                       row_sums_kernel);
}

}  // namespace

bool gated_delta_backward_takes(const GatedDeltaBackward &p) { return p.keys <= kMostHeldStates; }
bool selective_scan_backward_takes(const SelectiveScanBackward &p) {
  return p.states <= (p.each_state ? kMostOwnRates : kMostHeldStates);
}

pydet_status selective_scan_backward(const SelectiveScanBackward &p) {
  const char *name = "selective_scan_backward";
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  const int64_t blocks = p.groups * p.workspace.blocks, count = p.sequences.count;
  PYDET_TRY(with_held_rounds(p.states, [&](auto rounds) {
    constexpr int kRounds = rounds;
    using Tile = BackTile<kRounds>;
    using Wide = SelectiveTile<kRounds>;
    if constexpr (kRounds * kScanRound <= kMostOwnRates)
      if (p.each_state) return launch_back(name, p, blocks * count, selective_back_kernel<kRounds, true>, sizeof(Tile));
    if (p.heads / p.groups * p.width % kColumns == 0 &&
        tiles_fit<Wide>(p.device, p.workspace, p.heads, p.width, p.b, p.c))
      return launch_apart<Wide>(name, p, selective_walks_kernel<kRounds>, 0,
                                dim3(unsigned(p.workspace.blocks), unsigned(p.groups)),
                                selective_tiles_kernel<kRounds>);
    return launch_back(name, p, blocks * count, selective_back_kernel<kRounds, false>, sizeof(Tile));
  }));
  PYDET_TRY(add_rows(name, p, p.db, p.dc));
  PYDET_TRY(launch_blocks(name, p, p.sequences.count * divide_up(p.sequences.tokens, kFinishTokens), kThreads,
                          selective_steps_kernel));
  return launch_blocks(name, p, p.sequences.count * divide_up(p.heads, kSumHeads), kThreads, selective_sums_kernel);
}

pydet_status gated_delta_backward(const GatedDeltaBackward &p) {
  const char *name = "gated_delta_backward";
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  const int64_t blocks = p.heads * divide_up(p.width, kColumns), count = p.sequences.count;
  PYDET_TRY(with_held_rounds(p.keys, [&](auto rounds) {
    constexpr int kRounds = rounds;
    using Tile = BackTile<kRounds>;
    if constexpr (kRounds <= kThreadRounds) {
      using Wide = DeltaTile<kRounds>;
      if (p.width % kColumns == 0 && tiles_fit<Wide>(p.device, p.workspace, p.heads, p.width, p.q, p.k))
        return launch_apart<Wide>(name, p, delta_walks_kernel<kRounds>, kDeltaWalkBytes<kRounds>,
                                  dim3(unsigned(p.width / kColumns), unsigned(p.heads)), delta_tiles_kernel<kRounds>);
    }
    return launch_back(name, p, blocks * count, delta_back_kernel<kRounds>, sizeof(Tile));
  }));
  PYDET_TRY(add_rows(name, p, p.dq, p.dk));
  return launch_blocks(name, p, p.sequences.count * divide_up(p.sequences.tokens, kFinishTokens), kThreads,
                       delta_sums_kernel);
}

}  // namespace pydet
