// Tiles of recurrences that are taken back (NUMERICS.md, "Scans", "Their gradients"): for states that fill their rounds and
// blocks of 32 columns that are all there.
//
// A thread has four columns, eight apart, of a lane: the first two steps of a sum over the columns are within it, and what
// is read of a row serves four. The two warps of a part have every other lane of all 32 columns, so that sums over columns
// need no other warp; a sum over the states comes in halves, which are added at a piece's end. Rounds beyond the fourth are
// of a second part, which goes on with the sums of the first one a token later.
//
// Two tokens are taken back at a time: the states between them are an element at a time. Four blocks are to fit a
// multiprocessor, each with what a piece of 8 tokens wants in shared memory. So a tile is walked forwards once, to keep the
// states before each of its pieces, and a piece once, to keep those before its second half.
#pragma once

#include "contract/elementary.h"
#include "gpu/nvidia/mma.h"
#include "gpu/nvidia/scan.h"

namespace pydet {
namespace {

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

constexpr int kThreadRounds = 4;  // of 32 states, beyond which registers spill
constexpr int kWalkThreads = 128, kBackOwn = 4, kPiece = 8;

// The workspace of so many states, which the compiler then knows.
template <int kRounds> __device__ __forceinline__ ScanWorkspace of_rounds(ScanWorkspace workspace) {
  workspace.states = kRounds * kScanRound;
  return workspace;
}

// Where the number of column c lies: those 8 apart are neighbours.
__device__ __forceinline__ int beside(int c) { return c % 8 * kBackOwn + c / 8; }

// Sums over the states that the first part's threads hand to those of the second.
template <int kParts, int sums_of> struct HandedSums {
  float4 handed[2][2][sums_of][64];  // in turns, of a pair of tokens
};
template <int sums_of> struct HandedSums<1, sums_of> {};

// What a tile's block has in shared memory: `numbers_of` of each token and column, `sums_of` over the states of each.
template <int rounds, int numbers_of, int sums_of>
struct WideTile : HandedSums<rounds <= kThreadRounds ? 1 : rounds / kThreadRounds, sums_of> {
  static constexpr int kParts = rounds <= kThreadRounds ? 1 : rounds / kThreadRounds, kRounds = rounds / kParts;
  static_assert(kParts <= 2 && kRounds * kParts == rounds);
  static constexpr int kThreads = 64 * kParts, kBlocks = 4 / kParts, kAtOnce = kThreads / kColumns;
  static constexpr int kElements = rounds * kScanRound, kTokens = checkpoint_tokens(kElements);
  static constexpr int kPieces = kTokens / kPiece, kNumbers = kPiece / kAtOnce;  // of a thread: numbers that it brings
  static_assert(kPieces > 1);
  // Vectors of what threads leave for sums over columns: two of a round and token, for some rounds at a time; four lanes,
  // apart so that no two meet a bank.
  static constexpr int kJoined = kRounds < 2 ? kRounds : 2, kLeft = 2 * 2 * kJoined, kLane = 9, kVectors = 4 * kLane;
  using Terms = float[3 * kColumns + 1];
  // States before half of a piece; before pieces, the first's where the second's were.
  float4 held[kPieces][kBackOwn][kRounds][kThreads];
  float rows[2][kPiece][kElements];
  float numbers[numbers_of][kPiece][kColumns];  // the four columns of a thread are neighbours
  union {
    float4 parts[2 * kParts][kLeft][kVectors];
    Terms terms[kPiece];  // of sums over heads, at a piece's end
  };
  float halves[2][kPiece][sums_of][kColumns];

  // This thread's warp, and of its part; its columns, 8 apart from the first one; its lane, the first of whose states of a
  // round is this.
  static __device__ __forceinline__ int warp() { return int(threadIdx.x / 32); }
  static __device__ __forceinline__ int half() { return kParts == 1 ? warp() : warp() % 2; }
  static __device__ __forceinline__ int of_part() { return kParts == 1 ? 0 : int(threadIdx.x / 64); }
  static __device__ __forceinline__ int set() { return int(threadIdx.x % 8); }
  static __device__ __forceinline__ int quad() { return int(threadIdx.x % 32 / 8); }
  static __device__ __forceinline__ int first_state() {
    return of_part() * kRounds * kScanRound + (2 * quad() + half()) * kScanLaneElements;
  }

  __device__ __forceinline__ void four(int which, int t, float (&x)[kBackOwn]) const {
    const float4 got = *reinterpret_cast<const float4 *>(&numbers[which][t][set() * kBackOwn]);
#pragma unroll
    for (int k = 0; k < kBackOwn; ++k) x[k] = part(got, k);
  }
  __device__ __forceinline__ float4 vector(int which, int t, int r) const {
    return *reinterpret_cast<const float4 *>(&rows[which][t][r * kScanRound + first_state()]);
  }
  // Where the states before piece i are.
  static __device__ __forceinline__ int before(int i) { return i > 1 ? i : 1; }
  // Sets out to bring this thread's states of four columns, as they are kept before the tile, to where those before its first
  // piece are to be; there they are waited for.
  __device__ __forceinline__ void bring_kept(const float *kept) {
    const float *const own = kept + set() * kElements + first_state();
#pragma unroll
    for (int k = 0; k < kBackOwn; ++k)
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
        copy_async_16(&held[before(0)][k][r][threadIdx.x], own + 8 * k * kElements + r * kScanRound, 16);
    commit_copies();
  }
  __device__ __forceinline__ void hold(int i, const float (&state)[kBackOwn][kRounds][4]) {
#pragma unroll
    for (int k = 0; k < kBackOwn; ++k)
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
        held[i][k][r][threadIdx.x] = make_float4(state[k][r][0], state[k][r][1], state[k][r][2], state[k][r][3]);
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
  // Gradients of the states behind the tile, as the walk kept them; and those that given(column, state) has, behind a
  // sequence's last token.
  static __device__ __forceinline__ void take_gradients(const ScanWorkspace &workspace, int64_t token, int64_t group,
                                                        int64_t block, float (&gradient)[kBackOwn][kRounds][4]) {
#pragma unroll
    for (int k = 0; k < kBackOwn; ++k) {
      const float *const from = gradient_at(workspace, token, group, block, set() + 8 * k) + first_state();
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float4 got = *reinterpret_cast<const float4 *>(from + r * kScanRound);
#pragma unroll
        for (int i = 0; i < 4; ++i) gradient[k][r][i] = part(got, i);
      }
    }
  }
  template <class Given>
  static __device__ __forceinline__ void take_given(const Given &given, float (&gradient)[kBackOwn][kRounds][4]) {
#pragma unroll
    for (int k = 0; k < kBackOwn; ++k)
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) gradient[k][r][i] = given(set() + 8 * k, r * kScanRound + first_state() + i);
  }
  // The sums over this thread's columns of the i-th element of a round: of each token's and sum's terms.
  static __device__ __forceinline__ void sum_columns(const float (&terms)[2][2][kBackOwn], int i,
                                                     float (&columns)[2][2][4]) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const float(&f)[kBackOwn] = terms[j][which];
        columns[j][which][i] = (f[0] + f[2]) + (f[1] + f[3]);
      }
  }
  // Leaves this thread's sums over its columns of four states of round r, of both tokens of a pair.
  __device__ __forceinline__ void leave(int r, const float (&columns)[2][2][4]) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const float(&sum)[4] = columns[j][which];
        parts[warp()][(2 * j + which) * kJoined + r % kJoined][quad() * kLane + set()] =
            make_float4(sum[0], sum[1], sum[2], sum[3]);
      }
  }
  // Adds up what the warp's threads left, in two steps: a thread has four states of a sum and a token of the pair, own_token().
  // Where the workspace wants them of the tile's first pair and first rounds.
  static __device__ __forceinline__ int own_token() { return threadIdx.x % 32 / (8 * kJoined) % 2; }
  static __device__ __forceinline__ float *sums_to(const ScanWorkspace &workspace, int64_t token, int64_t group,
                                                   int64_t block) {
    return workspace.row(threadIdx.x % 32 / (4 * kJoined) % 2, token + own_token(), group, block) +
           (of_part() * kRounds + threadIdx.x / 4 % kJoined) * kScanRound +
           (2 * (threadIdx.x % 4) + half()) * kScanLaneElements;
  }
  static __device__ __forceinline__ bool adds() { return kJoined == 2 || threadIdx.x % 32 < 16; }
  __device__ __forceinline__ void read_parts(float4 (&s)[8]) const {
    __syncwarp();
    if (adds()) {
      const float4 *const from = &parts[warp()][threadIdx.x % 32 / 4][threadIdx.x % 4 * kLane];
#pragma unroll
      for (int c = 0; c < 8; ++c) s[c] = from[c];
    }
  }
  // count: of the pair's tokens.
  __device__ __forceinline__ void add_parts(const float4 (&s)[8], int count, float *to) const {
    if (adds() && own_token() < count) {
      const auto sum = [&](int i) {
        const auto at = [&](int c) { return part(s[c], i); };
        return ((at(0) + at(4)) + (at(2) + at(6))) + ((at(1) + at(5)) + (at(3) + at(7)));
      };
      *reinterpret_cast<float4 *>(to) = make_float4(sum(0), sum(1), sum(2), sum(3));
    }
    __syncwarp();
  }
  // The sums over the states of a pair's tokens so far: those of the first part, if this is the second.
  __device__ __forceinline__ void begin_sums(int pair, float (&sums)[2][sums_of][kBackOwn]) const {
    if constexpr (kParts > 1)
      if (of_part() > 0) {
        named_sync(1 + half(), 64);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int s = 0; s < sums_of; ++s) {
            const float4 got = this->handed[pair % 2][j][s][threadIdx.x % 64];
#pragma unroll
            for (int k = 0; k < kBackOwn; ++k) sums[j][s][k] = part(got, k);
          }
        return;
      }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int s = 0; s < sums_of; ++s)
#pragma unroll
        for (int k = 0; k < kBackOwn; ++k) sums[j][s][k] = 0.0f;
  }
  // Whether these are all; else they are handed on. Which of two places has them the barrier of the next pair frees.
  __device__ __forceinline__ bool whole_sums(int pair, const float (&sums)[2][sums_of][kBackOwn]) {
    if constexpr (kParts > 1)
      if (of_part() == 0) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int s = 0; s < sums_of; ++s)
            this->handed[pair % 2][j][s][threadIdx.x] =
                make_float4(sums[j][s][0], sums[j][s][1], sums[j][s][2], sums[j][s][3]);
        named_sync(1 + half(), 64);
        return false;
      }
    return true;
  }
};
template <int rounds> using SelectiveTile = WideTile<rounds, 3, 2>;
template <int rounds> using DeltaTile = WideTile<rounds, 3, 1>;
// What a multiprocessor of sm_90 has, of which a block takes 1 KB besides its own.
static_assert(SelectiveTile<4>::kBlocks * (sizeof(SelectiveTile<4>) + 1024) <= 228 * 1024 &&
              SelectiveTile<8>::kBlocks * (sizeof(SelectiveTile<8>) + 1024) <= 228 * 1024);

// Takes the `count` tokens of a tile back. The states before the first are on their way; bring_kept() sets out to bring them
// again. load(i, back) brings what piece i wants to be walked forwards or back, where an absent token leaves gradients as
// they are. read(t) is what take() wants that takes `state` over the piece's token t. back(i, pair, ahead) has `state` as it
// was before a pair of tokens, and no need of it when it calls ahead(). finish(i) follows a piece's last pair.
template <class Tile, int kRounds, class Bring, class Load, class Read, class Take, class Back, class Finish>
__device__ __forceinline__ void take_wide(Tile &tile, int count, float (&state)[kBackOwn][kRounds][4],
                                          const Bring &bring_kept, const Load &load, const Read &read, const Take &take,
                                          const Back &back, const Finish &finish) {
  const int last = (count - 1) / kPiece;
  const auto walk = [&](int from, int to) {
#pragma unroll 1
    for (int t = from; t < to; t += 2) {
      const auto first = read(t), second = read(t + 1);
      take(first), take(second);
    }
  };
#pragma unroll 1
  for (int step = 0; step <= 2 * last; ++step) {
    const bool forwards = step < last;
    const int i = forwards ? step : 2 * last - step;
    load(i, !forwards);
    if (step == 0 || i == 0) wait_copies<0>();
    __syncthreads();
    if (step == 0 || step > last) tile.take_held(Tile::before(i), state);
    const int pairs = count - i * kPiece < kPiece ? (count - i * kPiece + 1) / 2 : kPiece / 2;
    if (pairs > 2) {
      walk(0, forwards ? kPiece : kPiece / 2);
      tile.hold(forwards ? i + 1 : 0, state);
    }
    if (!forwards) {
      if (i == 1 && pairs == 1) bring_kept();
#pragma unroll 1
      for (int pair = pairs - 1; pair >= 0; --pair) {
        if (pair % 2) walk(2 * pair - 2, 2 * pair);
        back(i, pair, [&] {
          if (pair == 0) return;
          tile.take_held(pair > 2 ? 0 : Tile::before(i), state);
          if (i == 1 && pair == 1) bring_kept();  // their place is free
        });
      }
    }
    __syncthreads();
    if (forwards) continue;
    finish(i);
    __syncthreads();
  }
}

}  // namespace
}  // namespace pydet
