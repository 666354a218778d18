// Blocks that walk the tokens of scans (NUMERICS.md, "Scans"), for states that fill their rounds and rows of whole pieces.
//
// The states of a call are few for a GPU: each scheduler has a warp or two that walk. So these do nothing else. Other warps
// of the block bring the numbers of the tile after the next one, as they are used, and add up and write the results of the
// tile before. All meet once a tile.
#pragma once

#include <algorithm>

#include "gpu/nvidia/scan.h"

namespace pydet {
namespace {

// A number for each of a warp's threads and kPad more, kOwn of them: in vectors of four, and the rest.
template <int kOwn, int kPad> struct OwnNumbers {
  static constexpr int kFours = kOwn / 4, kRest = kOwn % 4, kSlots = 32 + kPad;
  static_assert(kRest != 3);
  float all[kOwn * kSlots];

  __device__ __forceinline__ void put(int slot, const float (&x)[kOwn]) {
#pragma unroll
    for (int f = 0; f < kFours; ++f)
      *reinterpret_cast<float4 *>(all + (f * kSlots + slot) * 4) =
          make_float4(x[4 * f], x[4 * f + 1], x[4 * f + 2], x[4 * f + 3]);
    float *const rest = all + kFours * kSlots * 4 + slot * kRest;
    if constexpr (kRest == 1) rest[0] = x[kOwn - 1];
    if constexpr (kRest == 2) *reinterpret_cast<float2 *>(rest) = make_float2(x[kOwn - 2], x[kOwn - 1]);
  }
  __device__ __forceinline__ void get(int slot, float (&x)[kOwn]) const {
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      const float4 got = *reinterpret_cast<const float4 *>(all + (f * kSlots + slot) * 4);
      x[4 * f] = got.x, x[4 * f + 1] = got.y, x[4 * f + 2] = got.z, x[4 * f + 3] = got.w;
    }
    const float *const rest = all + kFours * kSlots * 4 + slot * kRest;
    if constexpr (kRest == 1) x[kOwn - 1] = rest[0];
    if constexpr (kRest == 2) {
      const float2 got = *reinterpret_cast<const float2 *>(rest);
      x[kOwn - 2] = got.x, x[kOwn - 1] = got.y;
    }
  }
  // The sum over the lanes of what the threads of a team put here.
  __device__ __forceinline__ void join(int team, float (&sum)[kOwn]) const {
    float s[kScanLanes][kOwn];
#pragma unroll
    for (int e = 0; e < kScanLanes; ++e) get(e * kTeams + team, s[e]);
#pragma unroll
    for (int k = 0; k < kOwn; ++k)
      sum[k] = ((s[0][k] + s[4][k]) + (s[2][k] + s[6][k])) + ((s[1][k] + s[5][k]) + (s[3][k] + s[7][k]));
  }
};

// A walking thread has kOwn neighbouring columns, a slot, and of their states a part of the rounds: a warp of each of
// kSplit parts goes on with the sums of the part before, a tile later. Twice kHelpers threads help: half of them bring one
// row and all other numbers, half bring the other row and write results. A helper is of one slot and kTimes tokens of a
// tile. A loop goes on by kTurn tokens: more are more code than is kept near. A multiprocessor is to hold kBlocks.
template <int rounds, int own, int groups, int split, int helpers, int times = 1,
          int turn = (own * rounds / split < 16 ? 4 : 2), int blocks = 1>
struct Crew {
  static constexpr int kRounds = rounds, kOwn = own, kGroups = groups, kSplit = split, kHelpers = helpers,
                       kTimes = times, kTurn = turn, kBlocks = blocks;
  static constexpr int kWalkers = 32 * kGroups * kSplit, kThreads = kWalkers + 2 * kHelpers;
  static constexpr int kSlots = kGroups * kTeams, kColumns = kSlots * kOwn;
  static constexpr int kApart = kHelpers / kSlots, kTokens = kTimes * kApart;  // tokens of a helper are kApart apart
  static constexpr int kElements = kRounds * kScanRound, kPart = kRounds / kSplit;
  static_assert(kRounds % kSplit == 0 && kHelpers % kSlots == 0);
  // Tiles in shared memory: those that are walked, a part's each, the next one, and one that is brought.
  static constexpr int kStages = kSplit + 2;
  static_assert(kTokens % kTurn == 0);
  using Sums = OwnNumbers<kOwn, kTeams>;

  enum Role { kWalks, kBrings, kWrites };
  static __device__ __forceinline__ Role role() {
    return int(threadIdx.x) < kWalkers ? kWalks : int(threadIdx.x) < kWalkers + kHelpers ? kBrings : kWrites;
  }
  static __device__ __forceinline__ int next_stage(int stage) { return stage + 1 < kStages ? stage + 1 : 0; }
};

// The crew of `Crews` that is done first, by instructions of those that walk: f is called with it. False where a
// multiprocessor has shared memory for none. columns: of a call, in pieces that blocks do not share; per_state:
// instructions for a state and token.
template <template <class> class Shared, class... Crews> struct BestCrew {
  template <class F>
  static bool launch(const Device &device, const Sequences &sequences, int64_t pieces, int64_t columns, int per_state,
                     const F &f) {
    // Of a sequence.
    const int64_t tokens = sequences.starts && sequences.count ? sequences.tokens / sequences.count : sequences.tokens;
    const auto cost = [&](auto crew) -> int64_t {
      using Own = decltype(crew);
      if (int(sizeof(Shared<Own>)) > gpu_shared_bytes(device.id)) return INT64_MAX;
      // What is no state's of a token, and of a block its way in and out, which those beside it hide in part.
      constexpr int64_t kOfToken = 50, kOfBlock = Own::kBlocks == 1 ? 8500 : 5300;
      const int64_t of_token = Own::kWalkers * Own::kOwn * Own::kPart * kScanLaneElements * per_state / 128 + kOfToken;
      return divide_up(pieces * divide_up(columns, int64_t(Own::kColumns)),
                       int64_t(gpu_multiprocessors(device.id)) * Own::kBlocks) *
             (Own::kBlocks * of_token * tokens + kOfBlock);
    };
    const int64_t costs[] = {cost(Crews())...};
    const int64_t *const least = std::min_element(costs, costs + sizeof...(Crews));
    if (*least == INT64_MAX) return false;
    const int64_t *of_crew = costs;
    ((of_crew++ == least ? f(Crews()) : void()), ...);
    return true;
  }
};

}  // namespace
}  // namespace pydet
