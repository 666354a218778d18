// Tiles of recurrences that are taken back (NUMERICS.md, "Scans", "Their gradients"): for states that fill their rounds and
// blocks of 32 columns that are all there.
//
// A thread has four columns, eight apart, of a lane: the first two steps of a sum over the columns are within it, and what
// is read of a row serves four. The two warps of a block have every other lane of all 32 columns, so that sums over columns
// need no other warp; a sum over the states comes in halves, which are added at a tile's end.
#pragma once

#include "contract/elementary.h"
#include "gpu/nvidia/scan.h"

namespace pydet {
namespace {

// The chain of a token's numbers from column `first` to before `end`.
__device__ __forceinline__ float chain_of(const float *terms, int first, int end) {
  float sum = 0.0f;
#pragma unroll 8
  for (int i = first; i < end; ++i) sum = sum + terms[i];
  return sum;
}

// Where what is kept of column c at the end of the tile of tokens from `token` on lies: among the parts of the tile's sums.
__device__ __forceinline__ float *gradient_at(const ScanWorkspace &workspace, int64_t token, int64_t group,
                                              int64_t block, uint32_t c) {
  return workspace.row(int(c % 2), token + c / 2, group, block);
}

// The sequence and tile of the i-th of all kept states.
struct TileOf {
  int64_t sequence, from;
  Sequences::Range range;
};
__device__ __forceinline__ TileOf tile_of(const Sequences &sequences, int64_t i, int tokens) {
  const auto begin = [&](int64_t s) {
    const Sequences::Range range = sequences.range(s);
    return (range.batch * sequences.tokens + range.begin) / tokens + s;
  };
  int64_t low = 0, high = sequences.count;  // the last sequence that begins no later is one of [low, high)
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (begin(middle) <= i) low = middle;
    else high = middle;
  }
  return {low, (i - begin(low)) * tokens, sequences.range(low)};
}
PYDET_HD int64_t tiles_of(const Sequences &sequences, int64_t tokens_of_tile) {
  const int64_t tokens = sequences.starts ? sequences.tokens : sequences.count * sequences.tokens;
  return tokens / tokens_of_tile + sequences.count;
}

// The sums over a head's columns of a tile's tokens: a thread has a token and a head of the block's. Index: numbers of columns
// are of it.
template <class Index, int kTokens, int threads>
__device__ __forceinline__ void add_heads(const SelectiveScanBackward &p,
                                          const float (&terms)[kTokens][3 * kColumns + 1], int64_t token, int count,
                                          Index at_group, int columns, Index block) {
  const Index width = Index(p.width), of_group = Index(p.heads / p.groups), first = at_group / width;
  const int heads = int((at_group + columns - 1) / width - first) + 1;
  for (int i = int(threadIdx.x); i < 3 * kTokens * heads; i += threads) {
    const int t = i % kTokens, which = i / kTokens % 3;
    if (t >= count) continue;
    const Index head = first + i / kTokens / 3, start = head * width - at_group;
    const int end = start + width < columns ? int(start + width) : columns;
    p.workspace.of_head(which, token + t, head)[block - head % of_group * width / kColumns] =
        chain_of(terms[t] + which * kColumns, start > 0 ? int(start) : 0, end);
  }
}

// A column's states, one behind the other. vectors: all that the rounds have, and aligned.
template <bool vectors, int kRounds>
__device__ __forceinline__ void keep_at(const float (&state)[kRounds][4], float *to, int64_t states) {
  float *const own = to + scan_lane() * kScanLaneElements;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    if constexpr (vectors)
      *reinterpret_cast<float4 *>(own + r * kScanRound) =
          make_float4(state[r][0], state[r][1], state[r][2], state[r][3]);
    else
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (state_of(r, i) < states) own[r * kScanRound + i] = state[r][i];
  }
}

constexpr int kMostWideRounds = 4;  // of 32 states, beyond which registers spill
constexpr int kWalkThreads = 128, kBackThreads = 64, kBackOwn = 4,
              kBackHeld = 3;  // held: states before tokens, besides the last one's

// The workspace of so many states, which the compiler then knows.
template <int kRounds> __device__ __forceinline__ ScanWorkspace of_rounds(ScanWorkspace workspace) {
  workspace.states = kRounds * kScanRound;
  return workspace;
}

// Calls f(first, how many) for batches of what is to be read. All of a batch sets out before any of it is a number: of two
// types that are known at run time, one after the other would be waited for.
template <int count, int most, class F> __device__ __forceinline__ void in_batches(const F &f) {
  constexpr int kBatch = count < most ? count : most;
  static_assert(count % kBatch == 0);
#pragma unroll 1
  for (int first = 0; first < count; first += kBatch) f(first, std::integral_constant<int, kBatch>());
}

// What a tile's block has in shared memory: `numbers` of each token and column, `sums` over the states of each.
template <int kRounds, int numbers_of, int sums_of> struct WideTile {
  static constexpr int kElements = kRounds * kScanRound, kTokens = checkpoint_tokens(kElements), kSums = sums_of;
  // Vectors of what threads leave for a sum over columns: two of a round; four lanes, apart so that no two meet a bank.
  static constexpr int kLane = 9, kVectors = 4 * kLane;
  float4 held[kBackHeld][kBackOwn][kRounds][kBackThreads];
  float rows[2][kTokens][kElements];
  float numbers[numbers_of][kTokens][kColumns];  // the four columns of a thread are neighbours
  float4 parts[2][2 * kRounds][kVectors];
  float halves[2][kTokens][sums_of][kColumns];
  float terms[kTokens][3 * kColumns + 1];

  // This thread's warp; its columns, 8 apart from the first one; its lane, the first of whose states of a round is this.
  static __device__ __forceinline__ int warp() { return int(threadIdx.x / 32); }
  static __device__ __forceinline__ int set() { return int(threadIdx.x % 8); }
  static __device__ __forceinline__ int quad() { return int(threadIdx.x % 32 / 8); }
  static __device__ __forceinline__ int first_state() { return (2 * quad() + warp()) * kScanLaneElements; }

  __device__ __forceinline__ void four(int which, int t, float (&x)[kBackOwn]) const {
    const float4 got = *reinterpret_cast<const float4 *>(&numbers[which][t][set() * kBackOwn]);
#pragma unroll
    for (int k = 0; k < kBackOwn; ++k) x[k] = part(got, k);
  }
  __device__ __forceinline__ float4 vector(int which, int t, int r) const {
    return *reinterpret_cast<const float4 *>(&rows[which][t][r * kScanRound + first_state()]);
  }
  // Sets out to bring this thread's states of four columns, as they are kept before the tile, to where the last of those
  // held were; there they are waited for.
  __device__ __forceinline__ void bring_kept(const float *kept) {
    const float *const own = kept + set() * kElements + first_state();
#pragma unroll
    for (int k = 0; k < kBackOwn; ++k)
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
        copy_async_16(&held[kBackHeld - 1][k][r][threadIdx.x], own + 8 * k * kElements + r * kScanRound, 16);
    commit_copies();
  }
  __device__ __forceinline__ void take_held(int i, float (&state)[kBackOwn][kRounds][4]) const {
#pragma unroll
    for (int k = 0; k < kBackOwn; ++k)
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 got = held[i][k][r][threadIdx.x];
#pragma unroll
        for (int j = 0; j < 4; ++j) state[k][r][j] = part(got, j);
      }
  }
  __device__ __forceinline__ void take_kept(float (&state)[kBackOwn][kRounds][4]) const {
    wait_copies<0>();
    take_held(kBackHeld - 1, state);
  }
  // Leaves this thread's sums over its columns of four states of round r.
  __device__ __forceinline__ void leave(int which, int r, const float (&sum)[4]) {
    parts[warp()][which * kRounds + r][quad() * kLane + set()] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
  // Adds up what the warp's threads left of a token's two sums, in two steps; where the workspace wants this thread's four
  // states of the tile's first token, and how far from there those of the next lie.
  static __device__ __forceinline__ float *sums_to(const ScanWorkspace &workspace, int64_t token, int64_t group,
                                                   int64_t block) {
    return workspace.row(threadIdx.x % 32 / (4 * kRounds) % 2, token, group, block) +
           threadIdx.x / 4 % kRounds * kScanRound + (2 * (threadIdx.x % 4) + warp()) * kScanLaneElements;
  }
  static __device__ __forceinline__ bool adds() { return kRounds == 4 || threadIdx.x % 32 < 8 * kRounds; }
  __device__ __forceinline__ void read_parts(float4 (&s)[8]) const {
    __syncwarp();
    if (adds()) {
      const float4 *const from = &parts[warp()][threadIdx.x % 32 / 4][threadIdx.x % 4 * kLane];
#pragma unroll
      for (int c = 0; c < 8; ++c) s[c] = from[c];
    }
  }
  __device__ __forceinline__ void add_parts(const float4 (&s)[8], float *to) const {
    if (adds()) {
      const auto sum = [&](int i) {
        const auto at = [&](int c) { return part(s[c], i); };
        return ((at(0) + at(4)) + (at(2) + at(6))) + ((at(1) + at(5)) + (at(3) + at(7)));
      };
      *reinterpret_cast<float4 *>(to) = make_float4(sum(0), sum(1), sum(2), sum(3));
    }
    __syncwarp();
  }
};
template <int kRounds> using SelectiveTile = WideTile<kRounds, 5, 2>;
template <int kRounds> using DeltaTile = WideTile<kRounds, 5, 1>;
static_assert(sizeof(SelectiveTile<4>) <= kBlockSharedBytes && sizeof(SelectiveTile<2>) <= kBlockSharedBytes);

// Takes the `count` tokens of a tile back, before the first of which `state` is kept: back(t, ahead) with `state` as it was
// before token t, of which it has no need when it calls ahead(); read(t) is what take() wants that takes it over a token.
template <class Tile, int kRounds, class Read, class Take, class Back>
__device__ __forceinline__ void take_wide(Tile &tile, int count, const float *kept,
                                          float (&state)[kBackOwn][kRounds][4], const Read &read, const Take &take,
                                          const Back &back) {
  constexpr int kSome = kBackHeld + 1;
  const auto held = [&](int i, int k, int r) -> float4 & { return tile.held[i][k][r][threadIdx.x]; };
#pragma unroll 1
  for (int low = (count - 1) / kSome * kSome; low >= 0; low -= kSome) {
    const int end = low + kSome < count ? low + kSome : count;
#pragma unroll 1
    for (int t = 0; t < low; t += kSome)  // side by side: a token's operands are read while the one before is taken
#pragma unroll
      for (int i = 0; i < kSome; ++i) take(read(t + i));
#pragma unroll 1
    for (int t = low; t < end - 1; ++t) {
      const auto operands = read(t);  // no read passes what is stored next
#pragma unroll
      for (int k = 0; k < kBackOwn; ++k)
#pragma unroll
        for (int r = 0; r < kRounds; ++r)
          held(t - low, k, r) = make_float4(state[k][r][0], state[k][r][1], state[k][r][2], state[k][r][3]);
      take(operands);
    }
    // Kept states set out as soon as their place is free.
    if (low > 0 && end - low < kSome) tile.bring_kept(kept);
#pragma unroll 1
    for (int t = end - 1; t >= low; --t)
      back(t, [&] {
        if (t == low) {
          if (low > 0) tile.take_kept(state);
          return;
        }
        tile.take_held(t - 1 - low, state);
        if (low > 0 && t == low + kBackHeld) tile.bring_kept(kept);
      });
  }
}

// Where the number of column c lies: those 8 apart are neighbours.
__device__ __forceinline__ int beside(int c) { return c % 8 * kBackOwn + c / 8; }

template <int kRounds>
__global__ void __launch_bounds__(kBackThreads, 2)
    selective_tiles_kernel(const __grid_constant__ SelectiveScanBackward p, const __grid_constant__ int64_t blocks) {
  using Tile = SelectiveTile<kRounds>;
  constexpr int kTokens = Tile::kTokens, kElements = Tile::kElements, kAtOnce = kBackThreads / kColumns;
  enum { kX, kDt, kU, kDecay, kDy };
  extern __shared__ __align__(16) char shared[];
  Tile &tile = *reinterpret_cast<Tile *>(shared);
  const int warp = Tile::warp(), set = Tile::set(), quad = Tile::quad(), first_state = Tile::first_state();
  // Of 32 bits, which tiles_fit and check_blocks have seen to suffice: numbers of 64 divide by calls.
  const uint32_t in_group = uint32_t(p.workspace.blocks), groups = uint32_t(p.groups), width = uint32_t(p.width);
  const uint32_t of_group = uint32_t(p.heads) / groups * width;
  const ScanWorkspace workspace = of_rounds<kRounds>(p.workspace);
  for (uint32_t job = blockIdx.x; job < blocks; job += gridDim.x) {
    float state[kBackOwn][kRounds][4], gradient[kBackOwn][kRounds][4];
    const float *kept;
    float *sums_to;
    int count;
    {
      const uint32_t block = job % in_group, group = job / in_group % groups;
      const TileOf of = tile_of(p.sequences, job / in_group / groups, kTokens);
      const int64_t tokens = of.range.end - of.range.begin, token = of.range.begin + of.from;  // the tile's first
      if (of.from >= tokens) continue;
      count = tokens - of.from < kTokens ? int(tokens - of.from) : kTokens;
      tile.bring_kept(workspace.states_at(of.sequence, of.range.batch * p.sequences.tokens + of.range.begin, of.from,
                                          group, block));
      const uint32_t at_group = group * of_group + block * kColumns;
      using RowsHere = Pieces<kTokens, kElements, kBackThreads>;
      RowsHere b_rows(p.b, of.range.batch * p.b.stride[0] + group * p.b.stride[2], token),
          c_rows(p.c, of.range.batch * p.c.stride[0] + group * p.c.stride[2], token);
      b_rows.load(count);
      const int c = int(threadIdx.x) % kColumns, head = int((at_group + c) / width),
                column = int((at_group + c) % width);
      const float a = element(p.a, head * p.a.stride[0]);
      const auto at = [&](const Strided &x) {
        return of.range.batch * x.stride[0] + token * x.stride[1] + head * x.stride[2];
      };
      const int64_t of_x = at(p.x) + column * p.x.stride[3], of_dy = at(p.dy) + column * p.dy.stride[3],
                    of_dt = at(p.dt);
      in_batches<kTokens / kAtOnce, 8>([&](int from, auto batch) {
        constexpr int kBatch = decltype(batch)::value;
        LoadedBits x_bits[kBatch], dt_bits[kBatch], dy_bits[kBatch];
        const int first = int(threadIdx.x) / kColumns + from * kAtOnce;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int t = first + i * kAtOnce;
          x_bits[i] = bits_at(p.x, of_x + t * p.x.stride[1], t < count);
          dt_bits[i] = bits_at(p.dt, of_dt + t * p.dt.stride[1], t < count);
          dy_bits[i] = bits_at(p.dy, of_dy + t * p.dy.stride[1], t < count);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const auto put_number = [&](int which, float number) {
            tile.numbers[which][first + i * kAtOnce][beside(c)] = number;
          };
          const float x = number_of(p.x.type, x_bits[i]), dt = number_of(p.dt.type, dt_bits[i]);
          put_number(kX, x), put_number(kDt, dt), put_number(kU, dt * x), put_number(kDecay, exp_f32(dt * a));
          put_number(kDy, number_of(p.dy.type, dy_bits[i]));
        }
      });
      b_rows.store(&tile.rows[0][0][0]);
      c_rows.load(count);
      c_rows.store(&tile.rows[1][0][0]);
    }
    {
      uint32_t same = job;  // found again, here and behind, for want of registers
      make_opaque(same);
      const uint32_t block = same % in_group, group = same / in_group % groups,
                     at_group = group * of_group + block * kColumns;
      const TileOf of = tile_of(p.sequences, same / in_group / groups, kTokens);
      const int64_t tokens = of.range.end - of.range.begin,
                    begin = of.range.batch * p.sequences.tokens + of.range.begin;
      kept = workspace.states_at(of.sequence, begin, of.from, group, block);
      sums_to = Tile::sums_to(workspace, begin + of.from, group, block);
#pragma unroll
      for (int k = 0; k < kBackOwn; ++k) {
        const int c = set + 8 * k;
        if (of.from + kTokens < tokens) {
          const float *const from = gradient_at(workspace, begin + of.from, group, block, c) + first_state;
#pragma unroll
          for (int r = 0; r < kRounds; ++r) {
            const float4 got = *reinterpret_cast<const float4 *>(from + r * kScanRound);
#pragma unroll
            for (int i = 0; i < 4; ++i) gradient[k][r][i] = part(got, i);
          }
        } else {
          const int head = int((at_group + c) / width), column = int((at_group + c) % width);
          const int64_t at = of.sequence * p.dfinal.stride[0] + head * p.dfinal.stride[1] + column * p.dfinal.stride[2];
#pragma unroll
          for (int r = 0; r < kRounds; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              gradient[k][r][i] = p.dfinal.data ? *reinterpret_cast<const float *>(p.dfinal.at(
                                                      at + (r * kScanRound + first_state + i) * p.dfinal.stride[3]))
                                                : 0.0f;
        }
      }
    }
    tile.take_kept(state);
    __syncthreads();  // gradients lie where sums will

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
    const auto back = [&](int t, const auto &ahead) {
      float u[kBackOwn], decay[kBackOwn], dy[kBackOwn], sums[2][kBackOwn] = {};
      tile.four(kU, t, u), tile.four(kDecay, t, decay), tile.four(kDy, t, dy);
      float4 next_b = tile.vector(0, t, 0),
             next_c = tile.vector(1, t, 0);  // read before sums are stored, which they could not pass
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 b = next_b, c = next_c;
        if (r + 1 < kRounds) next_b = tile.vector(0, t, r + 1), next_c = tile.vector(1, t, r + 1);
        float of_b[4], of_c[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float terms[2][kBackOwn];
#pragma unroll
          for (int k = 0; k < kBackOwn; ++k) {
            const float g = fmaf(part(c, i), dy[k], gradient[k][r][i]), old = decay[k] * state[k][r][i];
            sums[0][k] = fmaf(part(b, i), g, sums[0][k]), sums[1][k] = fmaf(g, old, sums[1][k]);
            terms[0][k] = u[k] * g, terms[1][k] = dy[k] * fmaf(u[k], part(b, i), old);
            gradient[k][r][i] = decay[k] * g;
          }
          of_b[i] = (terms[0][0] + terms[0][2]) + (terms[0][1] + terms[0][3]);
          of_c[i] = (terms[1][0] + terms[1][2]) + (terms[1][1] + terms[1][3]);
        }
        tile.leave(0, r, of_b), tile.leave(1, r, of_c);
      }
      float4 s[8];  // added up when other reads have been waited for as well
      tile.read_parts(s);
      // This warp's lanes of the sums over the states: a thread comes to have two columns of one.
      const bool second = quad & 2, odd = quad & 1;
      float half[kBackOwn], quarter[2];
#pragma unroll
      for (int k = 0; k < kBackOwn; ++k)
        half[k] = (second ? sums[1][k] : sums[0][k]) + gpu_shfl_xor(second ? sums[0][k] : sums[1][k], 16, 32);
#pragma unroll
      for (int k = 0; k < 2; ++k)
        quarter[k] = (odd ? half[k + 2] : half[k]) + gpu_shfl_xor(odd ? half[k] : half[k + 2], 8, 32);
      *reinterpret_cast<float2 *>(&tile.halves[warp][t][second][set * kBackOwn + (odd ? 2 : 0)]) =
          make_float2(quarter[0], quarter[1]);
      ahead();
      tile.add_parts(s, sums_to + t * of_token);
    };
    take_wide(tile, count, kept, state, read, take, back);
    __syncthreads();

    // The sums over the states, whole, and those of heads.
    uint32_t same = job;
    make_opaque(same);
    const uint32_t block = same % in_group, group = same / in_group % groups;
    const TileOf of = tile_of(p.sequences, same / in_group / groups, kTokens);
    const int64_t token = of.range.begin + of.from;
    const uint32_t at_group = group * of_group + block * kColumns;
    {
      const int c = int(threadIdx.x) % kColumns, head = int((at_group + c) / width),
                column = int((at_group + c) % width);
      const float d = p.d.data ? element(p.d, head * p.d.stride[0]) : 0.0f;
      const int64_t of_dx =
          of.range.batch * p.dx.stride[0] + token * p.dx.stride[1] + head * p.dx.stride[2] + column * p.dx.stride[3];
      for (int t = int(threadIdx.x) / kColumns; t < count; t += kAtOnce) {
        const int at = beside(c);
        const float v = tile.halves[0][t][0][at] + tile.halves[1][t][0][at];
        const float l = tile.halves[0][t][1][at] + tile.halves[1][t][1][at];
        const float x = tile.numbers[kX][t][at], dt = tile.numbers[kDt][t][at], dy = tile.numbers[kDy][t][at];
        put(p.dx, of_dx + t * p.dx.stride[1], p.d.data ? fmaf(dt, v, d * dy) : dt * v);
        float *const terms = tile.terms[t] + c;
        terms[0] = x * v, terms[kColumns] = l, terms[2 * kColumns] = dy * x;
      }
    }
    __syncthreads();
    add_heads<int, kTokens, kBackThreads>(p, tile.terms, of.range.batch * p.sequences.tokens + token, count,
                                          int(at_group), kColumns, int(block));
    __syncthreads();
  }
}

// The two walks: of the states forwards, which are kept before each tile, and of their gradients backwards, kept behind each
// but the last. A thread has two columns of a lane.
template <int kRounds>
__global__ void __launch_bounds__(kWalkThreads, 3)
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

// ---- The gated delta rule ----------------------------------------------------------------------------------------------
//
// What a token's column has beyond the state's answer to k, and the gradient's answer to it, are kept by the walks: so tiles
// wait for no sum over the keys.

template <int kRounds>
__global__ void __launch_bounds__(kBackThreads, 2)
    delta_tiles_kernel(const __grid_constant__ GatedDeltaBackward p, const __grid_constant__ int64_t blocks) {
  using Tile = DeltaTile<kRounds>;
  constexpr int kTokens = Tile::kTokens, kElements = Tile::kElements, kAtOnce = kBackThreads / kColumns;
  enum { kM, kZ, kW, kOfM, kOut };
  extern __shared__ __align__(16) char shared[];
  Tile &tile = *reinterpret_cast<Tile *>(shared);
  __shared__ float decays[kTokens];
  const int warp = Tile::warp(), set = Tile::set(), quad = Tile::quad(), first_state = Tile::first_state();
  const uint32_t of_head = uint32_t(p.width) / kColumns, heads = uint32_t(p.heads),
                 in_group = heads / uint32_t(p.groups);
  const ScanWorkspace workspace = of_rounds<kRounds>(p.workspace);
  for (uint32_t job = blockIdx.x; job < blocks; job += gridDim.x) {  // of 32 bits, as above
    float state[kBackOwn][kRounds][4], gradient[kBackOwn][kRounds][4];
    const float *kept;
    float *sums_to;
    int count;
    const int c = int(threadIdx.x) % kColumns;
    {
      const uint32_t first = job % of_head * kColumns, head = job / of_head % heads, group = head / in_group;
      const TileOf of = tile_of(p.sequences, job / of_head / heads, kTokens);
      const int64_t tokens = of.range.end - of.range.begin, token = of.range.begin + of.from;  // the tile's first
      if (of.from >= tokens) continue;
      count = tokens - of.from < kTokens ? int(tokens - of.from) : kTokens;
      tile.bring_kept(workspace.states_at(of.sequence, of.range.batch * p.sequences.tokens + of.range.begin, of.from,
                                          group, head % in_group * of_head + first / kColumns));
      using RowsHere = Pieces<kTokens, kElements, kBackThreads>;
      RowsHere q_rows(p.q, of.range.batch * p.q.stride[0] + group * p.q.stride[2], token),
          k_rows(p.k, of.range.batch * p.k.stride[0] + group * p.k.stride[2], token);
      q_rows.load(count);
      const auto at = [&](const Strided &x) {
        return of.range.batch * x.stride[0] + token * x.stride[1] + head * x.stride[2];
      };
      const int64_t of_out = at(p.dout) + (first + c) * p.dout.stride[3], of_beta = at(p.beta), of_g = at(p.g);
      const int64_t of_all = of.range.batch * p.sequences.tokens + token;
      const float *const kept_m = workspace.of_column(0, of_all) + head * p.width + first + c, *const kept_z =
                                                                                                   workspace.of_column(
                                                                                                       1, of_all) +
                                                                                                   head * p.width +
                                                                                                   first + c;
      in_batches<kTokens / kAtOnce, 4>([&](int from, auto batch) {
        constexpr int kBatch = decltype(batch)::value;
        LoadedBits out_bits[kBatch], beta_bits[kBatch];
        float m[kBatch], z[kBatch];
        const int first = int(threadIdx.x) / kColumns + from * kAtOnce;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int t = first + i * kAtOnce;
          out_bits[i] = bits_at(p.dout, of_out + t * p.dout.stride[1], t < count);
          beta_bits[i] = bits_at(p.beta, of_beta + t * p.beta.stride[1], t < count);
          m[i] = t < count ? kept_m[t * workspace.columns] : 0.0f;
          z[i] = t < count ? kept_z[t * workspace.columns] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const auto put_number = [&](int which, float number) {
            tile.numbers[which][first + i * kAtOnce][beside(c)] = number;
          };
          const float beta = number_of(p.beta.type, beta_bits[i]);
          put_number(kM, m[i]), put_number(kZ, z[i]), put_number(kW, beta * m[i]), put_number(kOfM, beta * z[i]);
          put_number(kOut, number_of(p.dout.type, out_bits[i]));
        }
      });
      if (int(threadIdx.x) < count)
        decays[threadIdx.x] = exp_f32(element(p.g, of_g + int64_t(threadIdx.x) * p.g.stride[1]));
      q_rows.store(&tile.rows[0][0][0]);
      k_rows.load(count);
      k_rows.store(&tile.rows[1][0][0]);
    }
    {
      uint32_t same = job;
      make_opaque(same);
      const uint32_t first = same % of_head * kColumns, head = same / of_head % heads, group = head / in_group;
      const uint32_t block = head % in_group * of_head + first / kColumns;
      const TileOf of = tile_of(p.sequences, same / of_head / heads, kTokens);
      const int64_t tokens = of.range.end - of.range.begin,
                    begin = of.range.batch * p.sequences.tokens + of.range.begin;
      kept = workspace.states_at(of.sequence, begin, of.from, group, block);
      sums_to = Tile::sums_to(workspace, begin + of.from, group, block);
      if (of.from + kTokens < tokens) {
#pragma unroll
        for (int k = 0; k < kBackOwn; ++k) {
          const float *const from = gradient_at(workspace, begin + of.from, group, block, set + 8 * k) + first_state;
#pragma unroll
          for (int r = 0; r < kRounds; ++r) {
            const float4 got = *reinterpret_cast<const float4 *>(from + r * kScanRound);
#pragma unroll
            for (int i = 0; i < 4; ++i) gradient[k][r][i] = part(got, i);
          }
        }
      } else {
        const int64_t at = of.sequence * p.dfinal.stride[0] + head * p.dfinal.stride[1];
#pragma unroll
        for (int k = 0; k < kBackOwn; ++k)
#pragma unroll
          for (int r = 0; r < kRounds; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              gradient[k][r][i] = p.dfinal.data ? *reinterpret_cast<const float *>(p.dfinal.at(
                                                      at + (r * kScanRound + first_state + i) * p.dfinal.stride[2] +
                                                      (first + set + 8 * k) * p.dfinal.stride[3]))
                                                : 0.0f;
      }
    }
    tile.take_kept(state);
    __syncthreads();  // gradients lie where sums will

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
    const auto back = [&](int t, const auto &ahead) {
      float w[kBackOwn], of_m[kBackOwn], out[kBackOwn], sums[kBackOwn] = {};
      tile.four(kW, t, w), tile.four(kOfM, t, of_m), tile.four(kOut, t, out);
      const float decay = decays[t];
      float4 next_q = tile.vector(0, t, 0), next_key = tile.vector(1, t, 0);  // as above
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 q = next_q, key = next_key;
        if (r + 1 < kRounds) next_q = tile.vector(0, t, r + 1), next_key = tile.vector(1, t, r + 1);
        float of_q[4], of_key[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float terms[2][kBackOwn];
#pragma unroll
          for (int k = 0; k < kBackOwn; ++k) {
            const float g = fmaf(part(q, i), out[k], gradient[k][r][i]), old = decay * state[k][r][i];
            terms[0][k] = out[k] * fmaf(part(key, i), w[k], old);
            terms[1][k] = fmaf(w[k], g, -(of_m[k] * old));
            const float through = fmaf(-part(key, i), of_m[k], g);
            sums[k] = fmaf(through, old, sums[k]);
            gradient[k][r][i] = decay * through;
          }
          of_q[i] = (terms[0][0] + terms[0][2]) + (terms[0][1] + terms[0][3]);
          of_key[i] = (terms[1][0] + terms[1][2]) + (terms[1][1] + terms[1][3]);
        }
        tile.leave(0, r, of_q), tile.leave(1, r, of_key);
      }
      float4 s[8];  // as above
      tile.read_parts(s);
      // This warp's lanes of the sum over the states: a thread comes to have a column's.
      const bool second = quad & 2, odd = quad & 1;
      float half[2];
#pragma unroll
      for (int k = 0; k < 2; ++k)
        half[k] = (second ? sums[k + 2] : sums[k]) + gpu_shfl_xor(second ? sums[k] : sums[k + 2], 16, 32);
      tile.halves[warp][t][0][set * kBackOwn + quad] =
          (odd ? half[1] : half[0]) + gpu_shfl_xor(odd ? half[0] : half[1], 8, 32);
      ahead();
      tile.add_parts(s, sums_to + t * of_token);
    };
    take_wide(tile, count, kept, state, read, take, back);
    __syncthreads();

    // The sums over the states, whole, and those of the head.
    uint32_t same = job;
    make_opaque(same);
    const uint32_t first = same % of_head * kColumns, head = same / of_head % heads;
    const TileOf of = tile_of(p.sequences, same / of_head / heads, kTokens);
    const int64_t token = of.range.begin + of.from;
    {
      const int64_t of_dv = of.range.batch * p.dv.stride[0] + token * p.dv.stride[1] + head * p.dv.stride[2] +
                            (first + c) * p.dv.stride[3];
      for (int t = int(threadIdx.x) / kColumns; t < count; t += kAtOnce) {
        const int at = beside(c);
        put(p.dv, of_dv + t * p.dv.stride[1], tile.numbers[kOfM][t][at]);
        tile.terms[t][c] = tile.halves[0][t][0][at] + tile.halves[1][t][0][at];
        tile.terms[t][kColumns + c] = tile.numbers[kZ][t][at] * tile.numbers[kM][t][at];
      }
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < 2 * kTokens; i += kBackThreads) {
      const int t = i % kTokens, which = i / kTokens;
      if (t < count)
        workspace.of_head(which, of.range.batch * p.sequences.tokens + token + t, head)[first / kColumns] =
            chain_of(tile.terms[t] + which * kColumns, 0, kColumns);
    }
    __syncthreads();
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
