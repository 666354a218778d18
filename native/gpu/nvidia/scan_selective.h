// The selective scan's walk (scan_crew.h).
#pragma once

#include "contract/elementary.h"
#include "gpu/nvidia/scan_crew.h"

namespace pydet {
namespace {

template <class Own> struct SelectiveShared {
  static constexpr int kPairs = (Own::kOwn + 1) / 2 * 2;  // of a slot: whole vectors
  float rows[Own::kStages][2][Own::kTokens][Own::kElements];
  float2 pairs[Own::kStages][Own::kTokens][Own::kSlots][kPairs];  // dt x and a decay
  typename Own::Sums sums[Own::kSplit][2][Own::kTokens]
                         [Own::kGroups];  // what a part left of a tile, and of the one before
};

template <class Own, bool bf16>
__global__ void __launch_bounds__(Own::kThreads, Own::kBlocks)
    selective_walk_kernel(const __grid_constant__ SelectiveScan p, const __grid_constant__ int64_t blocks) {
  using Shared = SelectiveShared<Own>;
  static_assert(Own::kTimes == 1);
  constexpr int kOwn = Own::kOwn, kGroups = Own::kGroups, kSplit = Own::kSplit, kPart = Own::kPart,
                kTokens = Own::kTokens, kTurn = Own::kTurn, kPairs = Shared::kPairs;
  extern __shared__ __align__(16) char shared[];
  Shared &tile = *reinterpret_cast<Shared *>(shared);
  const int64_t of_group = p.heads / p.groups * p.width, in_group = divide_up(of_group, Own::kColumns);
  const auto role = Own::role();
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t group = block / in_group % p.groups, sequence = block / in_group / p.groups;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t first = block % in_group * Own::kColumns, begin = group * of_group + first;
    const int columns = of_group - first < Own::kColumns ? int(of_group - first) : Own::kColumns;
    const int tiles = int(divide_up(range.end - range.begin, int64_t(kTokens)));
    const int turns = tiles ? tiles + kSplit : 0;
    const auto at_column = [&](const Strided &x, int column, int dimension) {
      const int64_t at = begin + (column < columns ? column : 0);
      return at / p.width * x.stride[dimension - 1] + at % p.width * x.stride[dimension];
    };
    if (role == Own::kWalks) {
      const int warp = int(threadIdx.x) / 32, column_group = warp % kGroups, split = warp / kGroups;
      const int thread = int(threadIdx.x) % 32, slot = column_group * kTeams + team_of_warp(), own = slot * kOwn;
      const int first_state = split * kPart * kScanRound;
      float state[kOwn][kPart][kScanLaneElements];
      const auto of_state = [&](const Strided &states, int k) {
        return sequence * states.stride[0] + at_column(states, own + k, 2) + first_state * states.stride[3];
      };
#pragma unroll
      for (int k = 0; k < kOwn; ++k)
        load_states(p.initial, of_state(p.initial, k), p.initial.stride[3], kPart * kScanRound,
                    own + k < columns && p.initial.data, whole_vectors(p.initial, p.states, true), state[k]);
      // The first numbers of a turn are read in the turn before, also where that is of the tile before.
      float4 first_b, first_c, first_pairs;
      const auto rows_of = [&](int stage) { return &tile.rows[stage][0][0][first_state]; };
      const auto pairs_of = [&](int stage) { return reinterpret_cast<const float4 *>(&tile.pairs[stage][0][slot][0]); };
      constexpr int kOfToken = Own::kSlots * kPairs / 2;  // vectors of pairs
      const auto read_first = [&](const float *rows, const float4 *pairs) {
        first_b = vector_of(rows, 0), first_c = vector_of(rows + kTokens * Own::kElements, 0), first_pairs = *pairs;
      };
      int stage = 0, odd = 0;
      const float *rows = rows_of(0);
      const float4 *pairs_at = pairs_of(0);
      for (int turn = 0; turn < turns; ++turn) {
        __syncthreads();
        if (turn < split || turn - split >= tiles) continue;
        if (turn == split) read_first(rows, pairs_at);
        auto *from = &tile.sums[split ? split - 1 : 0][odd][0][column_group];
        auto *to = &tile.sums[split][odd][0][column_group];
        stage = Own::next_stage(stage), odd ^= 1;
#pragma unroll 1
        for (int t = 0; t < kTokens; t += kTurn) {
          float sums[kTurn][kOwn];  // stored behind the turn's reads, which could not pass them
#pragma unroll
          for (int of = 0; of < kTurn; ++of) {
            float2 pairs[kPairs];
#pragma unroll
            for (int k = 0; k < kPairs; k += 2) {
              const float4 two = of == 0 && k == 0 ? first_pairs : pairs_at[of * kOfToken + k / 2];
              pairs[k] = make_float2(two.x, two.y), pairs[k + 1] = make_float2(two.z, two.w);
            }
#pragma unroll
            for (int k = 0; k < kOwn; ++k) sums[of][k] = 0.0f;
            if (kSplit > 1 && split > 0) from[of * kGroups].get(thread, sums[of]);
#pragma unroll
            for (int r = 0; r < kPart; ++r) {
              const bool read = of == 0 && r == 0;
              const float *const b_row = rows + of * Own::kElements, *const c_row = b_row + kTokens * Own::kElements;
              const float4 b = read ? first_b : vector_of(b_row, r), c = read ? first_c : vector_of(c_row, r);
#pragma unroll
              for (int i = 0; i < kScanLaneElements; ++i) {
#pragma unroll
                for (int k = 0; k < kOwn; ++k)
                  state[k][r][i] = fmaf(part(b, i), pairs[k].x, pairs[k].y * state[k][r][i]);
#pragma unroll
                for (int k = 0; k < kOwn; ++k) sums[of][k] = fmaf(part(c, i), state[k][r][i], sums[of][k]);
              }
            }
          }
          const bool last = t + kTurn == kTokens;
          rows = last ? rows_of(stage) : rows + kTurn * Own::kElements;
          pairs_at = last ? pairs_of(stage) : pairs_at + kTurn * kOfToken;
          read_first(rows, pairs_at);
#pragma unroll
          for (int of = 0; of < kTurn; ++of) to[of * kGroups].put(thread, sums[of]);
          to += kTurn * kGroups, from += kTurn * kGroups;
        }
      }
#pragma unroll
      for (int k = 0; k < kOwn; ++k)
        if (p.final.data && own + k < columns)
          store_states(p.final, of_state(p.final, k), p.final.stride[3], kPart * kScanRound,
                       whole_vectors(p.final, p.states, true), state[k]);
    } else if (tiles) {
      // A thread has a slot of a token. Its columns are of a head or, from `of_next` on, of the next one.
      const int thread = int(threadIdx.x - Own::kWalkers) % Own::kHelpers, slot = thread % Own::kSlots,
                t = thread / Own::kSlots, own = slot * kOwn, here = columns - own;
      const int64_t head = (begin + (here > 0 ? own : 0)) / p.width;
      const int of_next = here > 0 ? int((head + 1) * p.width - begin) - own : kOwn;
      const bool two = of_next < kOwn && of_next < here;
      // Where a slot's first column is, and the bytes from there to each.
      const auto place = [&](const Strided &x, int64_t(&offset)[kOwn]) {
        const int size = size_of(x.type);
#pragma unroll
        for (int k = 0; k < kOwn; ++k)
          offset[k] = (k * x.stride[3] + (k < of_next ? 0 : x.stride[2] - p.width * x.stride[3])) * size;
        return x.at(range.batch * x.stride[0] + (range.begin + t) * x.stride[1] + at_column(x, own, 3));
      };
      int left = int(range.end - range.begin);  // tokens
      int64_t x_offset[kOwn];
      const char *x_at = place(p.x, x_offset);
      const int64_t x_step = kTokens * p.x.stride[1] * size_of(p.x.type);
      if (role == Own::kBrings) {
        const char *dt_at =
            p.dt.at(range.batch * p.dt.stride[0] + (range.begin + t) * p.dt.stride[1] + head * p.dt.stride[2]);
        const int64_t dt_next = two ? p.dt.stride[2] * size_of(p.dt.type) : 0;
        const int64_t dt_step = kTokens * p.dt.stride[1] * size_of(p.dt.type);
        float a[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) a[n] = element(p.a, (head + (two ? n : 0)) * p.a.stride[0]);
        LoadedBits x_bits[kOwn], dt_bits[2];
        Pieces<kTokens, Own::kElements, Own::kHelpers, bf16> rows(
            p.b, range.batch * p.b.stride[0] + group * p.b.stride[2], range.begin, thread);
        const auto load_numbers = [&] {
#pragma unroll
          for (int k = 0; k < kOwn; ++k)
            x_bits[k] = bits_from<bf16>(x_at + x_offset[k], p.x.type, t < left && k < here);
          dt_bits[0] = bits_from(dt_at, p.dt.type, t < left);
          dt_bits[1] = bits_from(dt_at + dt_next, p.dt.type, t < left && two);
          x_at += x_step, dt_at += dt_step;
        };
        const auto store_pairs = [&](int stage, bool there) {
          // What an absent token is given, so that it leaves every state as it is: fmaf(+0, -0, s) is s.
          float2 gates[2] = {make_float2(1.0f, 1.0f), make_float2(1.0f, 1.0f)};
          if (there) {
            const float step = number_of(p.dt.type, dt_bits[0]);
            gates[0] = gates[1] = make_float2(step, exp_f32(step * a[0]));
            if (two) {
              const float other = number_of(p.dt.type, dt_bits[1]);
              gates[1] = make_float2(other, exp_f32(other * a[1]));
            }
          }
          float2 pairs[kPairs] = {};
#pragma unroll
          for (int k = 0; k < kOwn; ++k) {
            const float2 gate = k < of_next ? gates[0] : gates[1];
            const float x = there ? number_of<bf16>(p.x.type, x_bits[k]) : -0.0f;
            pairs[k] = make_float2(gate.x * x, gate.y);
          }
#pragma unroll
          for (int k = 0; k < kPairs; k += 2)
            *reinterpret_cast<float4 *>(&tile.pairs[stage][t][slot][k]) =
                make_float4(pairs[k].x, pairs[k].y, pairs[k + 1].x, pairs[k + 1].y);
        };
        int stage = 0;
        const auto bring = [&] {
          if (left <= 0) return;
          rows.store(&tile.rows[stage][0][0][0]);
          store_pairs(stage, t < left);
          left -= kTokens, stage = Own::next_stage(stage);
          if (left > 0) rows.load(left), load_numbers();
        };
        rows.load(left), load_numbers();
        bring();
        for (int turn = 0; turn < turns; ++turn) {
          bring();
          __syncthreads();
        }
      } else {
        // Brings the other rows, and writes a token's results of a slot: the sums of all lanes, and d x.
        Pieces<kTokens, Own::kElements, Own::kHelpers, bf16> rows(
            p.c, range.batch * p.c.stride[0] + group * p.c.stride[2], range.begin, thread);
        int64_t y_offset[kOwn];
        char *y_at = place(p.y, y_offset);
        const int64_t y_step = kTokens * p.y.stride[1] * size_of(p.y.type);
        float d[2] = {};
        if (p.d.data)
#pragma unroll
          for (int n = 0; n < 2; ++n) d[n] = element(p.d, (head + (two ? n : 0)) * p.d.stride[0]);
        int stage = 0, to_bring = left;
        const auto bring = [&] {
          if (to_bring <= 0) return;
          rows.store(&tile.rows[stage][1][0][0]);
          to_bring -= kTokens, stage = Own::next_stage(stage);
          if (to_bring > 0) rows.load(to_bring);
        };
        rows.load(left);
        bring();
        LoadedBits x_bits[kOwn] = {};
        int odd = 0;
        for (int turn = 0; turn < turns; ++turn) {
          bring();
          __syncthreads();
          if (turn < kSplit) continue;
          if (p.d.data)
#pragma unroll
            for (int k = 0; k < kOwn; ++k)
              x_bits[k] = bits_from<bf16>(x_at + x_offset[k], p.x.type, t < left && k < here);
          float y[kOwn];
          tile.sums[kSplit - 1][odd][t][slot / kTeams].join(slot % kTeams, y);
#pragma unroll
          for (int k = 0; k < kOwn; ++k) {
            if (p.d.data) y[k] = fmaf(k < of_next ? d[0] : d[1], number_of<bf16>(p.x.type, x_bits[k]), y[k]);
            if (t < left && k < here) put_at(bf16 ? Type::bf16 : p.y.type, y_at + y_offset[k], y[k]);
          }
          x_at += x_step, y_at += y_step, left -= kTokens, odd ^= 1;
        }
      }
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace pydet
