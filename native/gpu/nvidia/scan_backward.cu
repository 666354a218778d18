// Gradients of recurrences over tokens (NUMERICS.md, "Scans", "Their gradients"): the CPU's bits.

#include "contract/elementary.h"
#include "core/error.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/scan.h"

namespace pydet {
namespace {

// ---- The walk back -----------------------------------------------------------------------------------------------------
//
// A block has 32 columns of a sequence, each with a team of eight threads, as forwards. It walks the tokens forwards and
// keeps the states before every 32nd (16th, 8th), and then, from the last one, takes so many at a time: their rows lie in shared
// memory, and the states before some of them in registers, made again from those that were kept. Sums over the columns go
// by shuffles within a warp, whose columns are 8 apart, and then through shared memory; one block's are parts of a sum that
// a kernel behind adds up.

constexpr int64_t kMostHeldStates = 256, kMostOwnRates = 128;  // of a column, beyond which registers spill
constexpr int kWarps = kThreads / 32;
static_assert(kWarps == 8 && kColumns == kScanColumns, "a warp has four columns, 8 apart");

// The column of a thread's team: those of a warp are 8 apart, so that the first two joins are within it.
__device__ __forceinline__ int own_column() {
  const int team = int(threadIdx.x) / kScanLanes;
  return team % 4 * 8 + team / 4;
}

// States before so many tokens stay in shared memory, of which even the smallest chips have enough for a block. In registers
// they would want a copy of a token's code for each, which is more than the caches of instructions hold.
PYDET_HD constexpr int held_tokens(int rounds) { return rounds == 1 ? 8 : rounds == 2 ? 4 : rounds == 4 ? 3 : 1; }

// Shared memory of a block, for rounds of 32 states: two rows of each of some tokens, four numbers of each token and
// column, and what warps leave of a token's sums, in turns.
template <int kRounds> struct BackTile {
  static constexpr int kElements = kRounds * kScanRound, kTokens = checkpoint_tokens(kElements);
  float rows[2][kTokens][kElements];
  float numbers[4][kTokens][kColumns];
  float parts[2][2][kWarps][kElements];
  alignas(16) float terms[2][3][kColumns];
  alignas(16) float4 held[held_tokens(kRounds)][kRounds][kThreads];
};

// Rounds whose sums over columns are made at a time.
PYDET_HD constexpr int joined_rounds(int rounds) { return rounds < 4 ? rounds : 4; }

// Adds v of a warp's four columns, and leaves the sums in parts[warp]: a thread comes to have a quarter of its states.
template <int kRounds> __device__ __forceinline__ void join_columns(const float (&v)[kRounds][4], float *parts) {
  constexpr int kAll = 4 * kRounds, kHalf = kAll / 2, kQuarter = kAll / 4;
  const bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
  float half[kHalf], quarter[kQuarter];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float low = v[i / 4][i % 4], high = v[(i + kHalf) / 4][(i + kHalf) % 4];
    const float other = gpu_shfl_xor(upper ? low : high, 16, 32);
    half[i] = (upper ? high : low) + other;
  }
#pragma unroll
  for (int i = 0; i < kQuarter; ++i) {
    const float other = gpu_shfl_xor(odd ? half[i] : half[i + kQuarter], 8, 32);
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

// The chain of a block's numbers from `first` to before `end`, all of which are read at once.
__device__ __forceinline__ float chain_of(const float (&terms)[kColumns], int first, int end) {
  float4 v[kColumns / 4];
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) v[i] = reinterpret_cast<const float4 *>(terms)[i];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (i >= first && i < end) sum = sum + part(v[i / 4], i % 4);
  return sum;
}

template <int kRounds> __device__ __forceinline__ void keep(const float (&state)[kRounds][4], float *to,
                                                            int64_t states) {
  float *const own = to + own_column() * states;
#pragma unroll
  for (int r = 0; r < kRounds; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (state_of(r, i) < states) own[state_of(r, i)] = state[r][i];
}
template <int kRounds>
__device__ __forceinline__ void restore(float (&state)[kRounds][4], const float *from, int64_t states) {
  const float *const own = from + own_column() * states;
#pragma unroll
  for (int r = 0; r < kRounds; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i) state[r][i] = state_of(r, i) < states ? own[state_of(r, i)] : 0.0f;
}

// `count` elements of a row of each of a tile's tokens, of which those before `tokens` are there.
template <int kTokens, int kElements>
__device__ __forceinline__ void load_rows(float (&to)[kTokens][kElements], const Strided &x, int64_t at, int64_t count,
                                          int64_t tokens) {
  for (int i = int(threadIdx.x); i < kTokens * kElements; i += kThreads) {
    const int t = i / kElements, n = i % kElements;
    to[t][n] = n < count && t < tokens ? element(x, at + t * x.stride[1] + n * x.stride[3]) : 0.0f;
  }
}

// Walks a block's tokens: load(from) has a tile of operands in shared memory, step(i, state) takes the state over token i
// of them, and back(i, before) takes a token back.
template <int kRounds, class Load, class Step, class Back>
__device__ __forceinline__ void walk_back(BackTile<kRounds> &tile, const Sequences::Range &range,
                                          const ScanWorkspace &workspace, int64_t sequence, int64_t begin,
                                          int64_t group, int64_t block, float (&state)[kRounds][4], const Load &load,
                                          const Step &step, const Back &back) {
  constexpr int kHeld = held_tokens(kRounds), kTokens = BackTile<kRounds>::kTokens;
  const int64_t tokens = range.end - range.begin;
  const auto kept = [&](int64_t after) { return workspace.states_at(sequence, begin, after, group, block); };
  for (int64_t from = 0; from < tokens; from += kTokens) {
    keep(state, kept(from), workspace.states);
    if (from + kTokens >= tokens) break;
    load(from);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < kTokens; ++i) step(i, state);
    __syncthreads();
  }
  for (int64_t from = (tokens - 1) / kTokens * kTokens; from >= 0 && tokens > 0; from -= kTokens) {
    load(from);
    __syncthreads();
    const int count = tokens - from < kTokens ? int(tokens - from) : kTokens;
#pragma unroll 1
    for (int low = (count - 1) / kHeld * kHeld; low >= 0; low -= kHeld) {
      restore(state, kept(from), workspace.states);
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
        back(from, i, state);
      }
    }
    __syncthreads();
  }
}

// ---- The selective scan ------------------------------------------------------------------------------------------------

template <int kRounds, bool each_state>
__global__ void __launch_bounds__(kThreads, 1)
    selective_back_kernel(const __grid_constant__ SelectiveScanBackward p, const __grid_constant__ int64_t blocks) {
  using Tile = BackTile<kRounds>;
  enum { kX, kDt, kDecay, kDy };
  extern __shared__ __align__(16) char shared[];
  Tile &tile = *reinterpret_cast<Tile *>(shared);
  const int64_t of_group = p.heads / p.groups * p.width, in_group = p.workspace.blocks;
  const int own = own_column(), left = left_of(p.states), lane = int(threadIdx.x) % kScanLanes;
  for (int64_t job = blockIdx.x; job < blocks; job += gridDim.x) {
    const int64_t block = job % in_group, group = job / in_group % p.groups, sequence = job / in_group / p.groups;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t first = block * kColumns, at_group = group * of_group + first;
    const int columns = of_group - first < kColumns ? int(of_group - first) : kColumns;
    const bool mine = own < columns;
    const int64_t head = (at_group + (mine ? own : 0)) / p.width, column = (at_group + (mine ? own : 0)) % p.width;
    const int64_t begin = range.batch * p.sequences.tokens + range.begin;
    float state[kRounds][4], gradient[kRounds][4];
    constexpr int kOwn = each_state ? kRounds : 1;
    float rates[kOwn][4], da[kOwn][4];
    const auto of_state = [&](const Strided &states, int n) {
      return sequence * states.stride[0] + head * states.stride[1] + column * states.stride[2] + n * states.stride[3];
    };
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = state_of(r, i);
        const bool there = mine && n < p.states;
        state[r][i] = there && p.initial.data ? element(p.initial, of_state(p.initial, n)) : 0.0f;
        gradient[r][i] = there && p.dfinal.data ? element(p.dfinal, of_state(p.dfinal, n)) : 0.0f;
        if constexpr (each_state) {
          rates[r][i] = there ? element(p.a, head * p.a.stride[0] + n * p.a.stride[1]) : 0.0f;
          da[r][i] = 0.0f;
        }
      }
    const float d = p.d.data ? element(p.d, head * p.d.stride[0]) : 0.0f;

    const auto load = [&](int64_t from) {
      const int64_t tokens = range.end - range.begin - from, token = range.begin + from;
      const auto at = [&](const Strided &x) { return range.batch * x.stride[0] + token * x.stride[1]; };
      load_rows(tile.rows[0], p.b, at(p.b) + group * p.b.stride[2], p.states, tokens);
      load_rows(tile.rows[1], p.c, at(p.c) + group * p.c.stride[2], p.states, tokens);
      for (int i = int(threadIdx.x); i < Tile::kTokens * kColumns; i += kThreads) {
        const int t = i / kColumns, c = i % kColumns;
        const bool there = t < tokens && c < columns;
        const int64_t h = (at_group + (there ? c : 0)) / p.width, w = (at_group + (there ? c : 0)) % p.width;
        const float dt = there ? element(p.dt, at(p.dt) + t * p.dt.stride[1] + h * p.dt.stride[2]) : 0.0f;
        const auto value = [&](const Strided &x) {
          return there ? element(x, at(x) + t * x.stride[1] + h * x.stride[2] + w * x.stride[3]) : 0.0f;
        };
        tile.numbers[kX][t][c] = value(p.x);
        tile.numbers[kDt][t][c] = dt;
        tile.numbers[kDy][t][c] = value(p.dy);
        if constexpr (!each_state)
          tile.numbers[kDecay][t][c] = there ? exp_f32(dt * element(p.a, h * p.a.stride[0])) : 0.0f;
      }
    };
    const auto decay_of = [&](float decay, float dt, int r, int i) {
      if constexpr (each_state) return exp_f32(dt * rates[r][i]);
      else return decay;
    };
    const auto step = [&](int t, float(&states)[kRounds][4]) {
      const float dt = tile.numbers[kDt][t][own], u = dt * tile.numbers[kX][t][own];
      const float decay = tile.numbers[kDecay][t][own];
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 b = vector_of(tile.rows[0][t], r);
#pragma unroll
        for (int i = 0; i < 4; ++i) states[r][i] = fmaf(u, part(b, i), decay_of(decay, dt, r, i) * states[r][i]);
      }
    };
    // A thread has one of the three sums of a head that begins at its column, or lies there from the block before.
    const int which = int(threadIdx.x) / kColumns, at_column = int(threadIdx.x) % kColumns;
    const int64_t summed = (at_group + at_column) / p.width, start = summed * p.width - at_group;
    const int ends = start + p.width < columns ? int(start + p.width) : columns;
    const bool adds = which < 3 && at_column < columns && (start == at_column || (start < 0 && at_column == 0));
    float *const sums =
        adds ? p.workspace.of_head(which, 0, summed) + block - summed % (p.heads / p.groups) * p.width / kColumns
             : nullptr;
    const int64_t of_token = p.heads * p.workspace.parts;
    constexpr int kJoined = joined_rounds(kRounds);
    int turn = 0;
    const auto back = [&](int64_t from, int t, const float(&before)[kRounds][4]) {
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
        tile.terms[turn][0][own] = x * v, tile.terms[turn][1][own] = l, tile.terms[turn][2][own] = dy * x;
        if (mine)
          put(p.dx,
              range.batch * p.dx.stride[0] + (range.begin + from + t) * p.dx.stride[1] + head * p.dx.stride[2] +
                  column * p.dx.stride[3],
              p.d.data ? fmaf(dt, v, d * dy) : dt * v);
      }
      __syncthreads();
      write_parts(tile.parts[turn], p.workspace, token, group, block);
      if (sums) sums[token * of_token] = chain_of(tile.terms[turn][which], at_column, ends);
      turn ^= 1;  // the other place was read before this token's barrier
    };
    walk_back(tile, range, p.workspace, sequence, begin, group, block, state, load, step, back);
    if (p.dinitial.data && mine)
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (r * kScanRound + i < left) put(p.dinitial, of_state(p.dinitial, state_of(r, i)), gradient[r][i]);
    if constexpr (each_state) keep(da, p.workspace.states_at(sequence, begin, 0, group, block), p.states);
    __syncthreads();
  }
}

// ---- The gated delta rule ----------------------------------------------------------------------------------------------

template <int kRounds>
__global__ void __launch_bounds__(kThreads)
    delta_back_kernel(const __grid_constant__ GatedDeltaBackward p, const __grid_constant__ int64_t blocks) {
  using Tile = BackTile<kRounds>;
  enum { kV, kDecay, kBeta, kOut };
  extern __shared__ __align__(16) char shared[];
  Tile &tile = *reinterpret_cast<Tile *>(shared);
  const int64_t of_head = divide_up(p.width, kColumns);
  const int own = own_column(), left = left_of(p.keys), lane = int(threadIdx.x) % kScanLanes;
  for (int64_t job = blockIdx.x; job < blocks; job += gridDim.x) {
    const int64_t first = job % of_head * kColumns, head = job / of_head % p.heads, sequence = job / of_head / p.heads;
    const int64_t in_group = p.heads / p.groups, group = head / in_group;
    const int64_t block = head % in_group * of_head + first / kColumns, column = first + own;
    const Sequences::Range range = p.sequences.range(sequence);
    const int columns = p.width - first < kColumns ? int(p.width - first) : kColumns;
    const bool mine = own < columns;
    const int64_t begin = range.batch * p.sequences.tokens + range.begin;
    float state[kRounds][4], gradient[kRounds][4];
    const auto of_state = [&](const Strided &states, int n) {
      return sequence * states.stride[0] + head * states.stride[1] + n * states.stride[2] + column * states.stride[3];
    };
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = state_of(r, i);
        const bool there = mine && n < p.keys;
        state[r][i] = there && p.initial.data ? element(p.initial, of_state(p.initial, n)) : 0.0f;
        gradient[r][i] = there && p.dfinal.data ? element(p.dfinal, of_state(p.dfinal, n)) : 0.0f;
      }

    const auto load = [&](int64_t from) {
      const int64_t tokens = range.end - range.begin - from, token = range.begin + from;
      const auto at = [&](const Strided &x, int64_t i) {
        return range.batch * x.stride[0] + token * x.stride[1] + i * x.stride[2];
      };
      load_rows(tile.rows[0], p.q, at(p.q, group), p.keys, tokens);
      load_rows(tile.rows[1], p.k, at(p.k, group), p.keys, tokens);
      for (int i = int(threadIdx.x); i < Tile::kTokens * kColumns; i += kThreads) {
        const int t = i / kColumns, c = i % kColumns;
        const bool there = t < tokens && c < columns;
        const auto value = [&](const Strided &x, int64_t n) {
          return there ? element(x, at(x, head) + t * x.stride[1] + n * x.stride[3]) : 0.0f;
        };
        tile.numbers[kV][t][c] = value(p.v, first + c);
        tile.numbers[kOut][t][c] = value(p.dout, first + c);
        tile.numbers[kDecay][t][c] = there ? exp_f32(value(p.g, 0)) : 0.0f;
        tile.numbers[kBeta][t][c] = value(p.beta, 0);
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
    const auto step = [&](int t, float(&states)[kRounds][4]) {
      const float decay = tile.numbers[kDecay][t][own];
      const float w = tile.numbers[kBeta][t][own] * remembered(t, decay, states);
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 k = vector_of(tile.rows[1][t], r);
#pragma unroll
        for (int i = 0; i < 4; ++i) states[r][i] = fmaf(part(k, i), w, decay * states[r][i]);
      }
    };
    constexpr int kJoined = joined_rounds(kRounds);
    int turn = 0;
    const auto back = [&](int64_t from, int t, const float(&before)[kRounds][4]) {
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
        tile.terms[turn][0][own] = l, tile.terms[turn][1][own] = z * m;
        if (mine)
          put(p.dv,
              range.batch * p.dv.stride[0] + (range.begin + from + t) * p.dv.stride[1] + head * p.dv.stride[2] +
                  column * p.dv.stride[3],
              of_m);
      }
      __syncthreads();
      write_parts(tile.parts[turn], p.workspace, token, group, block);
      if (threadIdx.x % 32 == 0 && threadIdx.x < 64) {
        const int which = int(threadIdx.x) / 32;
        p.workspace.of_head(which, token, head)[first / kColumns] = chain_of(tile.terms[turn][which], 0, columns);
      }
      turn ^= 1;
    };
    walk_back(tile, range, p.workspace, sequence, begin, group, block, state, load, step, back);
    if (p.dinitial.data && mine)
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (r * kScanRound + i < left) put(p.dinitial, of_state(p.dinitial, state_of(r, i)), gradient[r][i]);
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
constexpr int kFinishTokens = 4, kAhead = 16;  // tokens: of a block; whose operands are read before they are added
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

// ddt: a thread has a head of a token.
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
    }
  }
}

// dA and dD: a thread has a head of a sequence; with a decay for each state dA's states a head at a time.
__global__ void __launch_bounds__(32)
    selective_sums_kernel(const __grid_constant__ SelectiveScanBackward p, const __grid_constant__ int64_t blocks) {
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t in_sequence = divide_up(p.heads, 32), sequence = block / in_sequence;
    const int64_t head = block % in_sequence * 32 + threadIdx.x;
    if (head >= p.heads) continue;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t before = range.batch * p.sequences.tokens, of_group = p.heads / p.groups;
    float da = 0.0f, dd = 0.0f;
    for (int64_t last = range.end - 1; last >= range.begin; last -= kAhead) {
      float dt[kAhead], of_decay[kAhead], of_x[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t t = last - i;
        dt[i] = of_decay[i] = of_x[i] = 0.0f;
        if (t < range.begin) continue;
        dt[i] = element(p.dt, range.batch * p.dt.stride[0] + t * p.dt.stride[1] + head * p.dt.stride[2]);
        if (!p.each_state) of_decay[i] = head_sum(p, 1, before + t, head);
        if (p.dd.data) of_x[i] = head_sum(p, 2, before + t, head);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (last - i >= range.begin) da = fmaf(dt[i], of_decay[i], da), dd = dd + of_x[i];
    }
    if (p.dd.data) put(p.dd, sequence * p.dd.stride[0] + head * p.dd.stride[1], dd);
    const int64_t to = sequence * p.da.stride[0] + head * p.da.stride[1];
    if (!p.each_state) put(p.da, to, da);
    for (int64_t n = 0; p.each_state && n < p.states; ++n) {
      float sum = 0.0f;
      for (int64_t c = head % of_group * p.width; c < (head % of_group + 1) * p.width; ++c)
        sum = sum + p.workspace.states_at(sequence, before + range.begin, 0, head / of_group,
                                          c / kColumns)[c % kColumns * p.states + n];
      put(p.da, to + n * p.da.stride[2], sum);
    }
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

template <class Tile, class Problem>
pydet_status launch_back(const char *name, const Problem &p, int64_t blocks, void (*kernel)(Problem, int64_t)) {
  if (blocks == 0) return PYDET_OK;
  if (blocks > INT32_MAX)
    return fail(PYDET_UNSUPPORTED, "%s: %lld blocks of columns, want at most 2147483647", name,
                static_cast<long long>(blocks));
  Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(blocks < kMostBlocks ? blocks : kMostBlocks)),
                  dim3(unsigned(kThreads))};
  where.shared_bytes = sizeof(Tile);
  return launch(where, kernel, p, blocks);
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
  const int64_t blocks = p.sequences.count * p.groups * p.workspace.blocks;
  PYDET_TRY(with_held_rounds(p.states, [&](auto rounds) {
    constexpr int kRounds = rounds;
    void (*kernel)(SelectiveScanBackward, int64_t) = selective_back_kernel<kRounds, false>;
    if constexpr (kRounds * kScanRound <= kMostOwnRates)
      if (p.each_state) kernel = selective_back_kernel<kRounds, true>;
    return launch_back<BackTile<kRounds>>(name, p, blocks, kernel);
  }));
  PYDET_TRY(add_rows(name, p, p.db, p.dc));
  PYDET_TRY(launch_blocks(name, p, p.sequences.count * divide_up(p.sequences.tokens, kFinishTokens), kThreads,
                          selective_steps_kernel));
  return launch_blocks(name, p, p.sequences.count * divide_up(p.heads, 32), 32, selective_sums_kernel);
}

pydet_status gated_delta_backward(const GatedDeltaBackward &p) {
  const char *name = "gated_delta_backward";
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  const int64_t blocks = p.sequences.count * p.heads * divide_up(p.width, kColumns);
  PYDET_TRY(with_held_rounds(p.keys, [&](auto rounds) {
    constexpr int kRounds = rounds;
    return launch_back<BackTile<kRounds>>(name, p, blocks, delta_back_kernel<kRounds>);
  }));
  PYDET_TRY(add_rows(name, p, p.dq, p.dk));
  return launch_blocks(name, p, p.sequences.count * divide_up(p.sequences.tokens, kFinishTokens), kThreads,
                       delta_sums_kernel);
}

}  // namespace pydet
