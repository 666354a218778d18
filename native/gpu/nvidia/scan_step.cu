// Recurrences over a few tokens, as in decoding (NUMERICS.md, "Scans"): the CPU's bits, at the speed of the states' memory.
//
// A state is read once and written once, and next to nothing is computed between. So a thread sets out to read all that it
// has of the states before anything else, no tile of tokens is laid out, and many blocks have a place at a time. The rows of
// a token, which the columns share, come through shared memory.

#include "contract/elementary.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/scan.h"

namespace pydet {
namespace {

constexpr int64_t kMostStepStates = 256;  // beyond which a thread has no registers for its part
constexpr int64_t kFewTokens = 4;         // of a sequence: with more the walks are faster

// Rows of a token to shared memory, as numbers.
__device__ __forceinline__ void bring_row(const Strided &x, int64_t at, int count, float *to) {
  for (int n = int(threadIdx.x); n < count; n += int(blockDim.x)) to[n] = element(x, at + n * x.stride[3]);
}

// ---- The selective scan ------------------------------------------------------------------------------------------------

constexpr int kSelectiveThreads = 128, kSelectiveColumns = kSelectiveThreads / kScanLanes;

// A column's states lie side by side: a thread has a lane of them, in vectors.
template <int kRounds, bool each_state>
__global__ void __launch_bounds__(kSelectiveThreads, kRounds <= 4 ? 8 : 5)
    selective_step_kernel(const __grid_constant__ SelectiveScan p, const __grid_constant__ int64_t blocks) {
  __shared__ __align__(16) float rows[2][kRounds * kScanRound];
  const uint32_t width = uint32_t(p.width), groups = uint32_t(p.groups), of_group = uint32_t(p.heads) / groups * width;
  const uint32_t in_group = (of_group + kSelectiveColumns - 1) / kSelectiveColumns;
  const uint32_t own = threadIdx.x / 32 * kTeams + team_of_warp();
  const int states = int(p.states), first_state = scan_lane() * kScanLaneElements;
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const uint32_t group = block / in_group % groups, first = block % in_group * kSelectiveColumns;
    const int64_t sequence = block / in_group / groups;
    const bool mine = first + own < of_group;
    const uint32_t column = group * of_group + first + (mine ? own : 0);
    const int64_t head = column / width, in_head = column % width;
    const auto states_at = [&](const Strided &x) {
      return x.at(sequence * x.stride[0] + head * x.stride[1] + in_head * x.stride[2] + first_state);
    };
    float4 state[kRounds] = {};
    if (p.initial.data && mine) {
      const float4 *const from = reinterpret_cast<const float4 *>(states_at(p.initial));
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
        if (r * kScanRound + first_state < states) state[r] = from[r * (kScanRound / 4)];
    }
    const Sequences::Range range = p.sequences.range(sequence);
    const float d = p.d.data ? element(p.d, head * p.d.stride[0]) : 0.0f;
    const float a = each_state ? 0.0f : element(p.a, head * p.a.stride[0]);
    for (int64_t token = range.begin; token < range.end; ++token) {
      const auto at = [&](const Strided &x) { return range.batch * x.stride[0] + token * x.stride[1]; };
      const float x = element(p.x, at(p.x) + head * p.x.stride[2] + in_head * p.x.stride[3]);
      const float dt = element(p.dt, at(p.dt) + head * p.dt.stride[2]);
      bring_row(p.b, at(p.b) + group * p.b.stride[2], states, rows[0]);
      bring_row(p.c, at(p.c) + group * p.c.stride[2], states, rows[1]);
      __syncthreads();
      const float u = dt * x;
      float decay = each_state ? 0.0f : exp_f32(dt * a), sum = 0.0f;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const int n = r * kScanRound + first_state;
        if (n >= states) continue;
        const float4 b = vector_of(rows[0], r), c = vector_of(rows[1], r);
        float s[4] = {state[r].x, state[r].y, state[r].z, state[r].w};
#pragma unroll
        for (int i = 0; i < kScanLaneElements; ++i) {
          if constexpr (each_state) decay = exp_f32(dt * element(p.a, head * p.a.stride[0] + (n + i) * p.a.stride[1]));
          s[i] = fmaf(u, part(b, i), decay * s[i]);
          sum = fmaf(part(c, i), s[i], sum);
        }
        state[r] = make_float4(s[0], s[1], s[2], s[3]);
      }
      sum = join_lanes(sum);
      if (scan_lane() == 0 && mine)
        put(p.y, at(p.y) + head * p.y.stride[2] + in_head * p.y.stride[3], p.d.data ? fmaf(d, x, sum) : sum);
      __syncthreads();  // the rows are written next
    }
    if (!p.final.data || !mine) continue;
    float4 *const to = reinterpret_cast<float4 *>(states_at(p.final));
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
      if (r * kScanRound + first_state < states)
        to[r * (kScanRound / 4)] =
            make_float4(canonical(state[r].x), canonical(state[r].y), canonical(state[r].z), canonical(state[r].w));
  }
}

// ---- The gated delta rule ----------------------------------------------------------------------------------------------

constexpr int kDeltaThreads = 32 * kScanLanes;
// Neighbouring columns of a thread, where there are many blocks: a vector of each of its keys.
template <int kRounds> constexpr int kMostOwn = kRounds <= 4 ? 4 : 2;

// What the lanes of a column leave in shared memory, added up as join_lanes does.
template <int kColumns> __device__ __forceinline__ float joined(const float (&parts)[kScanLanes][kColumns],
                                                                int column) {
  float even[4];
#pragma unroll
  for (int lane = 0; lane < 4; ++lane) even[lane] = parts[lane][column] + parts[lane + 4][column];
  return (even[0] + even[2]) + (even[1] + even[3]);
}

// Columns lie side by side: a warp has a lane of all of the block's.
template <int kRounds, int kOwn>
__global__ void __launch_bounds__(kDeltaThreads, kRounds *kOwn >= 16 || kOwn == 4 ? 2 : 3)
    delta_step_kernel(const __grid_constant__ GatedDelta p, const __grid_constant__ int64_t blocks) {
  constexpr int kColumns = 32 * kOwn;
  __shared__ __align__(16) float rows[2][kRounds * kScanRound];
  __shared__ __align__(16) float parts[2][kScanLanes][kColumns];  // of the sums over keys, and of those of queries
  const uint32_t width = uint32_t(p.width), in_head = (width + kColumns - 1) / kColumns, heads = uint32_t(p.heads);
  const int keys = int(p.keys), lane = int(threadIdx.x) / 32, first_key = lane * kScanLaneElements;
  const int own = int(threadIdx.x) % 32 * kOwn;
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t head = block / in_head % heads, sequence = block / in_head / heads;
    const int64_t group = uint32_t(head) / (heads / uint32_t(p.groups));
    const uint32_t first = block % in_head * kColumns, column = first + own;
    const bool mine = column < width;
    const auto states_at = [&](const Strided &x) {
      return x.at(sequence * x.stride[0] + head * x.stride[1] + first_key * x.stride[2] + column);
    };
    float state[kRounds][kScanLaneElements][kOwn];
    const char *from = states_at(p.initial);
    int64_t apart = p.initial.stride[2] * int64_t(sizeof(float));
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      make_opaque(apart);  // else all places would be computed first, and kept
#pragma unroll
      for (int i = 0; i < kScanLaneElements; ++i) {
#pragma unroll
        for (int k = 0; k < kOwn; ++k) state[r][i][k] = 0.0f;
        if (p.initial.data && mine && r * kScanRound + first_key < keys)
          get_own(state[r][i], reinterpret_cast<const float *>(from + (r * kScanRound + i) * apart));
      }
    }
    const Sequences::Range range = p.sequences.range(sequence);
    for (int64_t token = range.begin; token < range.end; ++token) {
      const auto at = [&](const Strided &x, int64_t of) {
        return range.batch * x.stride[0] + token * x.stride[1] + of * x.stride[2];
      };
      const float gate = exp_f32(element(p.g, at(p.g, head))), beta = element(p.beta, at(p.beta, head));
      float v[kOwn];
#pragma unroll
      for (int k = 0; k < kOwn; ++k) v[k] = mine ? element(p.v, at(p.v, head) + (column + k) * p.v.stride[3]) : 0.0f;
      bring_row(p.k, at(p.k, group), keys, rows[0]);
      bring_row(p.q, at(p.q, group), keys, rows[1]);
      __syncthreads();
      float sum[kOwn] = {};
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        if (r * kScanRound + first_key >= keys) continue;
        const float4 key = *reinterpret_cast<const float4 *>(&rows[0][r * kScanRound + first_key]);
#pragma unroll
        for (int i = 0; i < kScanLaneElements; ++i)
#pragma unroll
          for (int k = 0; k < kOwn; ++k) {
            state[r][i][k] = gate * state[r][i][k];
            sum[k] = fmaf(part(key, i), state[r][i][k], sum[k]);
          }
      }
      put_own(&parts[0][lane][own], sum);
      __syncthreads();
      float w[kOwn];
#pragma unroll
      for (int k = 0; k < kOwn; ++k) w[k] = beta * (v[k] - joined(parts[0], own + k)), sum[k] = 0.0f;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        if (r * kScanRound + first_key >= keys) continue;
        const float4 key = *reinterpret_cast<const float4 *>(&rows[0][r * kScanRound + first_key]);
        const float4 query = *reinterpret_cast<const float4 *>(&rows[1][r * kScanRound + first_key]);
#pragma unroll
        for (int i = 0; i < kScanLaneElements; ++i)
#pragma unroll
          for (int k = 0; k < kOwn; ++k) {
            state[r][i][k] = fmaf(part(key, i), w[k], state[r][i][k]);
            sum[k] = fmaf(part(query, i), state[r][i][k], sum[k]);
          }
      }
      put_own(&parts[1][lane][own], sum);
      __syncthreads();
      // Nobody writes the second parts, or reads the rows, until all have met again.
      if (int(threadIdx.x) < kColumns && first + threadIdx.x < width)
        put(p.o, at(p.o, head) + (first + threadIdx.x) * p.o.stride[3], joined(parts[1], int(threadIdx.x)));
    }
    char *const to = states_at(p.final);
    apart = p.final.stride[2] * int64_t(sizeof(float));
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      make_opaque(apart);
#pragma unroll
      for (int i = 0; i < kScanLaneElements; ++i) {
        float x[kOwn];
#pragma unroll
        for (int k = 0; k < kOwn; ++k) x[k] = canonical(state[r][i][k]);
        if (p.final.data && mine && r * kScanRound + first_key < keys)
          put_own(reinterpret_cast<float *>(to + (r * kScanRound + i) * apart), x);
      }
    }
    __syncthreads();  // where blocks follow each other
  }
}

// Whether runs of so many neighbours of a state's last dimension, or of one that is absent, are aligned vectors.
bool in_vectors(const Strided &states, int64_t extent, int64_t neighbours) {
  return !states.data || ((extent == 1 || states.stride[3] == 1) && states.stride[0] % neighbours == 0 &&
                          states.stride[1] % neighbours == 0 && states.stride[2] % neighbours == 0 &&
                          reinterpret_cast<uintptr_t>(states.data) % (neighbours * sizeof(float)) == 0);
}

// A pack's longest sequence is on the device: it has few tokens where all have few on the average, or the rest have one.
bool few_tokens(const Sequences &of) {
  return of.starts ? of.tokens <= of.count * (kFewTokens / 2) : of.tokens <= kFewTokens;
}

}  // namespace

bool selective_step_takes(const SelectiveScan &p) {
  return p.states <= kMostStepStates && p.states % 4 == 0 && p.heads * p.width <= INT32_MAX &&
         in_vectors(p.initial, p.states, 4) && in_vectors(p.final, p.states, 4);
}
bool selective_step_prefers(const SelectiveScan &p) { return few_tokens(p.sequences); }

pydet_status selective_step(const SelectiveScan &p) {
  const int64_t blocks = p.sequences.count * p.groups * divide_up(p.heads / p.groups * p.width, kSelectiveColumns);
  return with_rounds<1, kMostStepStates>(p.states, [&](auto rounds) {
    constexpr int kRounds = rounds;
    return launch_alone("selective_scan", p, blocks, kSelectiveThreads,
                        p.each_state ? selective_step_kernel<kRounds, true> : selective_step_kernel<kRounds, false>);
  });
}

bool delta_step_takes(const GatedDelta &p) {
  return p.keys <= kMostStepStates && p.keys % 4 == 0 && p.heads * p.width <= INT32_MAX &&
         in_vectors(p.initial, p.width, 1) && in_vectors(p.final, p.width, 1);
}
bool delta_step_prefers(const GatedDelta &p) { return few_tokens(p.sequences); }

pydet_status delta_step(const GatedDelta &p) {
  return with_rounds<1, kMostStepStates>(p.keys, [&](auto rounds) {
    constexpr int kRounds = rounds, kOwn = kMostOwn<kRounds>;
    const auto blocks = [&](int64_t own) { return p.sequences.count * p.heads * divide_up(p.width, 32 * own); };
    // Few blocks of many columns would leave multiprocessors without work.
    if (p.width % kOwn == 0 && in_vectors(p.initial, p.width, kOwn) && in_vectors(p.final, p.width, kOwn) &&
        blocks(kOwn) >= gpu_multiprocessors(p.device.id))
      return launch_alone("gated_delta", p, blocks(kOwn), kDeltaThreads, delta_step_kernel<kRounds, kOwn>);
    return launch_alone("gated_delta", p, blocks(1), kDeltaThreads, delta_step_kernel<kRounds, 1>);
  });
}

}  // namespace pydet
