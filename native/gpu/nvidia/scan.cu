// Recurrences over tokens (NUMERICS.md, "Scans"): the selective scan and the gated delta rule: the
// CPU's bits.
//
// A block has 32 neighbouring columns, which are independent, and walks the tokens of a sequence. Each column has a team of
// eight threads, one for each lane of a sum over the states: its states stay in its registers. What the columns share, the
// two rows of a token, comes through shared memory, some tokens at a time; those of the next ones are on their way while a
// block works.

#include "contract/elementary.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/scan.h"

namespace pydet {
namespace {

constexpr int64_t kMostOwnDecays = 256;  // of states with a decay each, beyond which registers spill
// Two rows of each of kTokens tokens: of up to kRounds rounds of 32 elements, in turns in two places of shared memory.
template <int kRounds> struct Rows2 {
  static constexpr int kElements = kRounds * kScanRound, kTokens = kRounds > 8 ? 4 : 8;
  static constexpr int kOwn = kTokens * kElements / kThreads;  // of a thread
  static_assert(kTokens * kElements % kThreads == 0 && kTokens * kColumns <= kThreads);
  struct Shared {
    float first[2][kTokens][kElements], second[2][kTokens][kElements];
    float of_column[2][3][kTokens][kColumns];  // of each token and column three numbers
  };
  float first[kOwn], second[kOwn], of_column[3] = {};  // on their way

  __device__ __forceinline__ void load(const Strided &x, const Strided &y, int64_t batch, int64_t group, int64_t count,
                                       int64_t token, int64_t end) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = int(threadIdx.x) + i * kThreads, n = at % kElements;
      const int64_t t = token + at / kElements;
      const bool there = n < count && t < end;
      const auto of = [&](const Strided &row) {
        return batch * row.stride[0] + t * row.stride[1] + group * row.stride[2] + n * row.stride[3];
      };
      first[i] = there ? element(x, of(x)) : 0.0f;
      second[i] = there ? element(y, of(y)) : 0.0f;
    }
  }
  __device__ __forceinline__ void store(Shared &shared, int turn) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = int(threadIdx.x) + i * kThreads;
      (&shared.first[turn][0][0])[at] = first[i];
      (&shared.second[turn][0][0])[at] = second[i];
    }
    if (int(threadIdx.x) < kTokens * kColumns) {
      const int token = int(threadIdx.x) / kColumns, column = int(threadIdx.x) % kColumns;
#pragma unroll
      for (int i = 0; i < 3; ++i) shared.of_column[turn][i][token][column] = of_column[i];
    }
  }
};

// ---- The selective scan ------------------------------------------------------------------------------------------------

// whole: the states are all that the rounds have.
template <int kRounds, bool whole, bool each_state>
__global__ void __launch_bounds__(kThreads)
    selective_scan_kernel(const __grid_constant__ SelectiveScan p, const __grid_constant__ int64_t blocks) {
  using Tile = Rows2<kRounds>;
  constexpr bool kHeld = each_state && kRounds <= 4;  // decays, in registers
  __shared__ __align__(16) typename Tile::Shared shared;
  const int64_t of_group = p.heads / p.groups * p.width, in_group = divide_up(of_group, kColumns);
  const int lane = int(threadIdx.x) % kScanLanes, own = int(threadIdx.x) / kScanLanes, left = left_of(p.states);
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t group = block / in_group % p.groups, sequence = block / in_group / p.groups;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t first = block % in_group * kColumns, begin = group * of_group + first;
    const int64_t columns = of_group - first < kColumns ? of_group - first : kColumns;
    const bool mine = own < columns;
    const int64_t head = (begin + (mine ? own : 0)) / p.width, column = (begin + (mine ? own : 0)) % p.width;
    float state[kRounds][kScanLaneElements], decays[kHeld ? kRounds : 1][kScanLaneElements];
    const auto of_state = [&](const Strided &states, int n) {
      return sequence * states.stride[0] + head * states.stride[1] + column * states.stride[2] + n * states.stride[3];
    };
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int i = 0; i < kScanLaneElements; ++i) {
        const int n = state_of(r, i);
        const bool there = mine && n < p.states;
        state[r][i] = there && p.initial.data ? element(p.initial, of_state(p.initial, n)) : 0.0f;
        if constexpr (kHeld) decays[r][i] = there ? element(p.a, head * p.a.stride[0] + n * p.a.stride[1]) : 0.0f;
      }
    const float d = p.d.data ? element(p.d, head * p.d.stride[0]) : 0.0f;

    // x and its step: one thread for each token and column of a tile.
    const int64_t loaded = int(threadIdx.x) % kColumns;
    const bool loads = int(threadIdx.x) < Tile::kTokens * kColumns && loaded < columns;
    const int64_t of_head = (begin + (loads ? loaded : 0)) / p.width,
                  at_column = (begin + (loads ? loaded : 0)) % p.width;
    const float a = each_state ? 0.0f : element(p.a, of_head * p.a.stride[0]);
    Tile tile;
    const auto load = [&](int64_t token) {
      tile.load(p.b, p.c, range.batch, group, p.states, token, range.end);
      const int64_t t = token + int(threadIdx.x) / kColumns;
      const bool there = loads && t < range.end;
      const auto at = [&](const Strided &x) {
        return range.batch * x.stride[0] + t * x.stride[1] + of_head * x.stride[2];
      };
      tile.of_column[0] = there ? element(p.x, at(p.x) + at_column * p.x.stride[3]) : 0.0f;
      tile.of_column[1] = there ? element(p.dt, at(p.dt)) : 0.0f;
      if constexpr (!each_state) tile.of_column[2] = exp_f32(tile.of_column[1] * a);
    };
    load(range.begin);
    int turn = 0;
    for (int64_t token = range.begin; token < range.end; token += Tile::kTokens, turn ^= 1) {
      tile.store(shared, turn);
      __syncthreads();
      load(token + Tile::kTokens);
      const int count = range.end - token < Tile::kTokens ? int(range.end - token) : Tile::kTokens;
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        const float x = shared.of_column[turn][0][t][own], dt = shared.of_column[turn][1][t][own], u = dt * x;
        const float decay = each_state ? 0.0f : shared.of_column[turn][2][t][own];
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const float4 b = vector_of(shared.first[turn][t], r), c = vector_of(shared.second[turn][t], r);
#pragma unroll
          for (int i = 0; i < kScanLaneElements; ++i) {
            float of_this = decay;
            if constexpr (kHeld) of_this = exp_f32(dt * decays[r][i]);
            else if constexpr (each_state)
              of_this = r * kScanRound + i < left
                            ? exp_f32(dt * element(p.a, head * p.a.stride[0] + state_of(r, i) * p.a.stride[1]))
                            : 0.0f;
            const float s = fmaf(u, part(b, i), of_this * state[r][i]);
            state[r][i] = s;
            if (whole || r * kScanRound + i < left) sum = fmaf(part(c, i), s, sum);
          }
        }
        sum = join_lanes(sum);
        if (lane == 0 && mine)
          put(p.y,
              range.batch * p.y.stride[0] + (token + t) * p.y.stride[1] + head * p.y.stride[2] + column * p.y.stride[3],
              p.d.data ? fmaf(d, x, sum) : sum);
      }
      // The other place is written next, and was read before this tile's barrier.
    }
    if (p.final.data && mine)
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
#pragma unroll
        for (int i = 0; i < kScanLaneElements; ++i)
          if (r * kScanRound + i < left) put(p.final, of_state(p.final, state_of(r, i)), state[r][i]);
    __syncthreads();
  }
}

// ---- The gated delta rule ----------------------------------------------------------------------------------------------

template <int kRounds, bool whole>
__global__ void __launch_bounds__(kThreads)
    gated_delta_kernel(const __grid_constant__ GatedDelta p, const __grid_constant__ int64_t blocks) {
  using Tile = Rows2<kRounds>;
  __shared__ __align__(16) typename Tile::Shared shared;
  __shared__ float beta[2][Tile::kTokens];
  const uint32_t in_head = uint32_t(divide_up(p.width, kColumns)), heads = uint32_t(p.heads);
  const int lane = int(threadIdx.x) % kScanLanes, own = int(threadIdx.x) / kScanLanes, left = left_of(p.keys);
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {  // of 32 bits: those of 64 divide by calls
    const int64_t head = block / in_head % heads, sequence = block / in_head / heads;
    const int64_t group = uint32_t(head) / (heads / uint32_t(p.groups)), first = block % in_head * kColumns,
                  column = first + own;
    const Sequences::Range range = p.sequences.range(sequence);
    const bool mine = column < p.width;
    const auto of_state = [&](const Strided &states, int n) {
      return sequence * states.stride[0] + head * states.stride[1] + n * states.stride[2] + column * states.stride[3];
    };
    float state[kRounds][kScanLaneElements];
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int i = 0; i < kScanLaneElements; ++i) {
        const int n = state_of(r, i);
        state[r][i] = mine && n < p.keys && p.initial.data ? element(p.initial, of_state(p.initial, n)) : 0.0f;
      }
    const int64_t at_column = first + int(threadIdx.x) % kColumns;
    const bool loads = int(threadIdx.x) < Tile::kTokens * kColumns && at_column < p.width;
    Tile tile;
    float next_beta = 0.0f;
    const auto load = [&](int64_t token) {
      tile.load(p.q, p.k, range.batch, group, p.keys, token, range.end);
      const auto at = [&](const Strided &x, int64_t t) {
        return range.batch * x.stride[0] + t * x.stride[1] + head * x.stride[2];
      };
      int64_t t = token + int(threadIdx.x) / kColumns;
      const bool there = loads && t < range.end;
      tile.of_column[0] = there ? element(p.v, at(p.v, t) + at_column * p.v.stride[3]) : 0.0f;
      tile.of_column[1] = there ? exp_f32(element(p.g, at(p.g, t))) : 0.0f;
      t = token + int(threadIdx.x);
      next_beta = int(threadIdx.x) < Tile::kTokens && t < range.end ? element(p.beta, at(p.beta, t)) : 0.0f;
    };
    load(range.begin);
    int turn = 0;
    for (int64_t token = range.begin; token < range.end; token += Tile::kTokens, turn ^= 1) {
      tile.store(shared, turn);
      if (int(threadIdx.x) < Tile::kTokens) beta[turn][threadIdx.x] = next_beta;
      __syncthreads();
      load(token + Tile::kTokens);
      const int count = range.end - token < Tile::kTokens ? int(range.end - token) : Tile::kTokens;
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        const float v = shared.of_column[turn][0][t][own];
        const float decay = mine ? shared.of_column[turn][1][t][own] : 0.0f;
        float known = 0.0f;
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const float4 k = vector_of(shared.second[turn][t], r);
#pragma unroll
          for (int i = 0; i < kScanLaneElements; ++i) {
            state[r][i] = decay * state[r][i];
            if (whole || r * kScanRound + i < left) known = fmaf(part(k, i), state[r][i], known);
          }
        }
        known = join_lanes(known);
        const float w = beta[turn][t] * (v - known);
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const float4 q = vector_of(shared.first[turn][t], r), k = vector_of(shared.second[turn][t], r);
#pragma unroll
          for (int i = 0; i < kScanLaneElements; ++i) {
            state[r][i] = fmaf(part(k, i), w, state[r][i]);
            if (whole || r * kScanRound + i < left) sum = fmaf(part(q, i), state[r][i], sum);
          }
        }
        sum = join_lanes(sum);
        if (lane == 0 && mine)
          put(p.o,
              range.batch * p.o.stride[0] + (token + t) * p.o.stride[1] + head * p.o.stride[2] + column * p.o.stride[3],
              sum);
      }
    }
    if (p.final.data && mine)
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
#pragma unroll
        for (int i = 0; i < kScanLaneElements; ++i)
          if (r * kScanRound + i < left) put(p.final, of_state(p.final, state_of(r, i)), state[r][i]);
    __syncthreads();
  }
}

template <class Problem>
pydet_status launch_alone(const char *name, const Problem &p, int64_t blocks, int threads,
                          void (*kernel)(Problem, int64_t)) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  return launch_blocks(name, p, blocks, threads, kernel);
}

}  // namespace

bool selective_scan_takes(const SelectiveScan &p) { return !p.each_state || p.states <= kMostOwnDecays; }

pydet_status selective_scan(const SelectiveScan &p) {
  const int64_t blocks = p.sequences.count * p.groups * divide_up(p.heads / p.groups * p.width, kColumns);
  return with_rounds(p.states, [&](auto rounds) {
    constexpr int kRounds = rounds;
    void (*kernel)(SelectiveScan, int64_t) = p.states == kRounds * kScanRound
                                                 ? selective_scan_kernel<kRounds, true, false>
                                                 : selective_scan_kernel<kRounds, false, false>;
    if constexpr (kRounds * kScanRound <= kMostOwnDecays)
      if (p.each_state) kernel = selective_scan_kernel<kRounds, false, true>;
    return launch_alone("selective_scan", p, blocks, kThreads, kernel);
  });
}

pydet_status gated_delta(const GatedDelta &p) {
  const int64_t blocks = p.sequences.count * p.heads * divide_up(p.width, kColumns);
  return with_rounds(p.keys, [&](auto rounds) {
    constexpr int kRounds = rounds;
    const bool whole = p.keys == kRounds * kScanRound;
    return launch_alone("gated_delta", p, blocks, kThreads,
                        whole ? gated_delta_kernel<kRounds, true> : gated_delta_kernel<kRounds, false>);
  });
}

}  // namespace pydet
