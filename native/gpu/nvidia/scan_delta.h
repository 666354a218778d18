// The gated delta rule's walk (scan_crew.h). A column's sum over the keys is joined before its states go on: while a warp
// waits for its lanes it adds up the query's sums of the token before.
#pragma once

#include "contract/elementary.h"
#include "gpu/nvidia/scan_crew.h"

namespace pydet {
namespace {

template <class Own> struct DeltaShared {
  float rows[Own::kStages][2][Own::kTokens][Own::kElements];  // queries, keys
  float v[Own::kStages][Own::kTokens][Own::kColumns];
  float2 gates[Own::kStages][Own::kTokens];  // a decay and beta
  // Those of a tile's last token are there when the next one has begun.
  typename Own::Sums sums[3][Own::kTokens][Own::kGroups];
};

template <class Own>
__global__ void __launch_bounds__(Own::kThreads, Own::kBlocks)
    delta_walk_kernel(const __grid_constant__ GatedDelta p, const __grid_constant__ int64_t blocks) {
  using Shared = DeltaShared<Own>;
  constexpr int kRounds = Own::kRounds, kOwn = Own::kOwn, kTokens = Own::kTokens, kTurn = Own::kTurn;
  static_assert(Own::kSplit == 1, "a token's states follow from a sum over all of them");
  extern __shared__ __align__(16) char shared[];
  Shared &tile = *reinterpret_cast<Shared *>(shared);
  const int zero = int(blocks >> 32);  // which the compiler does not know
  const auto role = Own::role();
  const uint32_t in_head = uint32_t(divide_up(p.width, Own::kColumns)), heads = uint32_t(p.heads);
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {  // of 32 bits: those of 64 divide by calls
    const int64_t head = block / in_head % heads, sequence = block / in_head / heads;
    const int64_t group = uint32_t(head) / (heads / uint32_t(p.groups)), first = block % in_head * Own::kColumns;
    const int columns = p.width - first < Own::kColumns ? int(p.width - first) : Own::kColumns;
    const Sequences::Range range = p.sequences.range(sequence);
    const int tiles = int(divide_up(range.end - range.begin, int64_t(kTokens)));
    const int turns = tiles ? tiles + 2 : 0;
    int left = int(range.end - range.begin);  // tokens
    if (role == Own::kWalks) {
      const int column_group = int(threadIdx.x) / 32, thread = int(threadIdx.x) % 32,
                own = (column_group * kTeams + team_of_warp()) * kOwn;
      const auto of_state = [&](const Strided &states, int k) {
        return sequence * states.stride[0] + head * states.stride[1] + (first + own + k) * states.stride[3];
      };
      float state[kOwn][kRounds][kScanLaneElements];
#pragma unroll
      for (int k = 0; k < kOwn; ++k)
        load_states(p.initial, of_state(p.initial, k), p.initial.stride[2], left_of(p.keys),
                    own + k < columns && p.initial.data, false, state[k]);
      // The sums of a token are of the query and the states that it left, while the next one's are joined.
      float4 query[kRounds] = {};
      const auto add = [&](int n, float(&sum)[kOwn]) {
#pragma unroll
        for (int k = 0; k < kOwn; ++k) sum[k] = fmaf(part(query[n / 4], n % 4), state[k][n / 4][n % 4], sum[k]);
      };
      constexpr int kKeys = kTokens * Own::kElements;  // from a query to its key
      const auto rows_of = [&](int stage) { return &tile.rows[stage][0][0][0]; };
      int stage = 0, third = 0;
      const float *rows = rows_of(0), *v_at = &tile.v[0][0][own];
      const float2 *gates_at = &tile.gates[0][0];
      auto *to = &tile.sums[2][kTokens - 1][column_group];  // of the token before; that of none is no one's
      float4 keys[kRounds];
      float2 gates = {};
      float v_here[kOwn] = {};
      for (int turn = 0; turn < turns; ++turn) {
        __syncthreads();
        if (turn >= tiles) {
          if (turn > tiles) continue;
          float sum[kOwn] = {};
#pragma unroll
          for (int n = 0; n < kRounds * kScanLaneElements; ++n) add(n, sum);
          to->put(thread, sum);
          continue;
        }
        if (turn == 0) {
#pragma unroll
          for (int r = 0; r < kRounds; ++r) keys[r] = vector_of(rows + kKeys, r);
          gates = *gates_at;
          get_own(v_here, v_at);
        }
        stage = Own::next_stage(stage);
#pragma unroll 1
        for (int t = 0; t < kTokens; t += kTurn) {
          const bool last = t + kTurn == kTokens;
          const float *const next_rows = last ? rows_of(stage) : rows + kTurn * Own::kElements;
          const float *const next_v = last ? &tile.v[stage][0][own] : v_at + kTurn * Own::kColumns;
          const float2 *const next_gates_at = last ? &tile.gates[stage][0] : gates_at + kTurn;
#pragma unroll
          for (int of = 0; of < kTurn; ++of) {
            float known[kOwn], sum[kOwn], w[kOwn], decayed[kOwn][kRounds][kScanLaneElements];
#pragma unroll
            for (int k = 0; k < kOwn; ++k) known[k] = sum[k] = 0.0f;
#pragma unroll
            for (int r = 0; r < kRounds; ++r)
#pragma unroll
              for (int i = 0; i < kScanLaneElements; ++i)
#pragma unroll
                for (int k = 0; k < kOwn; ++k) {
                  decayed[k][r][i] = gates.x * state[k][r][i];
                  known[k] = fmaf(part(keys[r], i), decayed[k][r][i], known[k]);
                }
            const bool within = of + 1 < kTurn;
            const float *const key_row = (within ? rows + (of + 1) * Own::kElements : next_rows) + kKeys;
            float4 next[kRounds];  // keys
            float2 next_gates = {};
            float v_next[kOwn] = {};
            // Between its steps stand parts of the other sums, which the compiler would put behind all of them if the lane
            // that is asked did not seem to follow from them.
            constexpr int kSum = kRounds * kScanLaneElements, kSteps = 3;
            int tie = 0;
            const auto join = [&](auto which) {
              constexpr int step = decltype(which)::value, h = kScanLanes / 2 >> step;
              float other[kOwn];
#pragma unroll
              for (int k = 0; k < kOwn; ++k) other[k] = gpu_shfl_xor(known[k], h * kTeams | tie, 32);
#pragma unroll
              for (int n = kSum * step / kSteps; n < kSum * (step + 1) / kSteps; ++n) add(n, sum);
              tie = int(bits_of(sum[kOwn - 1])) & zero;
#pragma unroll
              for (int r = kRounds * step / kSteps; r < kRounds * (step + 1) / kSteps; ++r)
                next[r] = vector_of(key_row, r);
              if (step == 0) {
                next_gates = within ? gates_at[of + 1] : *next_gates_at;
                get_own(v_next, within ? v_at + (of + 1) * Own::kColumns : next_v);
              }
#pragma unroll
              for (int k = 0; k < kOwn; ++k) known[k] = known[k] + other[k];
            };
            join(std::integral_constant<int, 0>());
            join(std::integral_constant<int, 1>());
            join(std::integral_constant<int, 2>());
#pragma unroll
            for (int r = 0; r < kRounds; ++r) query[r] = vector_of(rows + of * Own::kElements, r);
            to->put(thread, sum);
            to = &tile.sums[third][t + of][column_group];
#pragma unroll
            for (int k = 0; k < kOwn; ++k) {
              w[k] = gates.y * (v_here[k] - known[k]);
              // An absent token leaves the states as they are, also where some are no numbers.
              w[k] = t + of < left ? w[k] : -0.0f;
            }
#pragma unroll
            for (int r = 0; r < kRounds; ++r) {
#pragma unroll
              for (int i = 0; i < kScanLaneElements; ++i)
#pragma unroll
                for (int k = 0; k < kOwn; ++k) state[k][r][i] = fmaf(part(keys[r], i), w[k], decayed[k][r][i]);
              keys[r] = next[r];
            }
            gates = next_gates;
#pragma unroll
            for (int k = 0; k < kOwn; ++k) v_here[k] = v_next[k];
          }
          rows = next_rows, v_at = next_v, gates_at = next_gates_at;
        }
        left -= kTokens, third = third < 2 ? third + 1 : 0;
      }
#pragma unroll
      for (int k = 0; k < kOwn; ++k)
        if (p.final.data && own + k < columns)
          store_states(p.final, of_state(p.final, k), p.final.stride[2], left_of(p.keys), false, state[k]);
    } else if (tiles) {
      // A thread has a slot of some tokens.
      constexpr int kTimes = Own::kTimes, kApart = Own::kApart;
      const int thread = int(threadIdx.x - Own::kWalkers) % Own::kHelpers, slot = thread % Own::kSlots,
                t = thread / Own::kSlots, own = slot * kOwn, here = columns - own;
      const auto place = [&](const Strided &x, int64_t column) {
        return x.at(range.batch * x.stride[0] + (range.begin + t) * x.stride[1] + head * x.stride[2] +
                    column * x.stride[3]);
      };
      const int64_t column = here > 0 ? first + own : 0;
      const auto step_of = [](const Strided &x) { return kApart * x.stride[1] * size_of(x.type); };
      const bool brings = role == Own::kBrings;
      const Strided &of_rows = brings ? p.k : p.q;
      Pieces<kTokens, Own::kElements, Own::kHelpers> rows(
          of_rows, range.batch * of_rows.stride[0] + group * of_rows.stride[2], range.begin, thread);
      int stage = 0;
      if (brings) {
        // Keys and what is of a column or a token.
        const char *v_at = place(p.v, column), *g_at = place(p.g, 0), *beta_at = place(p.beta, 0);
        const int64_t v_apart = p.v.stride[3] * size_of(p.v.type), v_step = step_of(p.v), g_step = step_of(p.g),
                      beta_step = step_of(p.beta);
        const bool gated = slot == 0;
        LoadedBits v_bits[kTimes][kOwn], g_bits[kTimes], beta_bits[kTimes];
        const auto load = [&] {
          rows.load(left);
#pragma unroll
          for (int n = 0; n < kTimes; ++n) {
            const bool there = t + n * kApart < left;
#pragma unroll
            for (int k = 0; k < kOwn; ++k) v_bits[n][k] = bits_from(v_at + k * v_apart, p.v.type, there && k < here);
            g_bits[n] = bits_from(g_at, p.g.type, gated && there);
            beta_bits[n] = bits_from(beta_at, p.beta.type, gated && there);
            v_at += v_step, g_at += g_step, beta_at += beta_step;
          }
        };
        const auto bring = [&] {
          if (left <= 0) return;
          rows.store(&tile.rows[stage][1][0][0]);
#pragma unroll
          for (int n = 0; n < kTimes; ++n) {
            const int token = t + n * kApart;
            float v[kOwn];
#pragma unroll
            for (int k = 0; k < kOwn; ++k) v[k] = number_of(p.v.type, v_bits[n][k]);
            put_own(&tile.v[stage][token][own], v);
            if (gated)
              tile.gates[stage][token] = token < left ? make_float2(exp_f32(number_of(p.g.type, g_bits[n])),
                                                                    number_of(p.beta.type, beta_bits[n]))
                                                      : make_float2(1.0f, 0.0f);
          }
          left -= kTokens, stage = Own::next_stage(stage);
          if (left > 0) load();
        };
        load();
        bring();
        for (int turn = 0; turn < turns; ++turn) {
          bring();
          __syncthreads();
        }
      } else {
        // Queries, and the results.
        char *o_at = place(p.o, column);
        const int64_t o_apart = p.o.stride[3] * size_of(p.o.type), o_step = step_of(p.o);
        int to_bring = left, third = 0;
        const auto bring = [&] {
          if (to_bring <= 0) return;
          rows.store(&tile.rows[stage][0][0][0]);
          to_bring -= kTokens, stage = Own::next_stage(stage);
          if (to_bring > 0) rows.load(to_bring);
        };
        rows.load(left);
        bring();
        for (int turn = 0; turn < turns; ++turn) {
          bring();
          __syncthreads();
          if (turn < 2) continue;
#pragma unroll
          for (int n = 0; n < kTimes; ++n) {
            const int token = t + n * kApart;
            float sum[kOwn];
            tile.sums[third][token][slot / kTeams].join(slot % kTeams, sum);
#pragma unroll
            for (int k = 0; k < kOwn; ++k)
              if (token < left && k < here) put_at(p.o.type, o_at + k * o_apart, sum[k]);
            o_at += o_step;
          }
          left -= kTokens, third = third < 2 ? third + 1 : 0;
        }
      }
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace pydet
