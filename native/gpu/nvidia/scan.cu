// Recurrences over tokens (NUMERICS.md, "Scans"): the selective scan and the gated delta rule: the CPU's bits.
//
// A block has some neighbouring columns, which are independent, and walks the tokens of a sequence. Each column has a team
// of eight threads, one for each lane of a sum over the states: its states stay in its registers. What the columns share, the
// two rows of a token, comes through shared memory, some tokens at a time; those of the next ones are on their way while a
// block works. Of states that fill their rounds scan_crew.h has more.

#include "contract/elementary.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/scan.h"
#include "gpu/nvidia/scan_delta.h"
#include "gpu/nvidia/scan_selective.h"

namespace pydet {
namespace {

constexpr int kWalkers = 128;  // threads of a block
// Blocks whose registers a multiprocessor is to hold.
template <int kRounds> constexpr int kBlocksHeld = kRounds <= 4 ? 3 : 2;
constexpr int64_t kMostOwnDecays = 256;  // of states with a decay each, beyond which registers spill

// A thread has a lane of a column.
template <int kRounds> struct Tile {
  static constexpr int kElements = kRounds * kScanRound, kTokens = kRounds > 8 ? 4 : 8,
                       kColumns = kWalkers / kScanLanes;
  static constexpr int kNumbers = kTokens * kColumns;
  static_assert(kNumbers <= kWalkers, "a thread brings a number");
  static constexpr int kPadded = kColumns + 4;
  struct Shared {
    float rows[2][2][kTokens][kElements];
    float2 factors[2][kTokens][kColumns];
    float x[2][kTokens][kPadded];
  };
  static __device__ __forceinline__ int own() { return int(threadIdx.x) / 32 * kTeams + team_of_warp(); }
  // The token and column of the number that a thread brings.
  static __device__ __forceinline__ int token_of() { return int(threadIdx.x) / kColumns; }
  static __device__ __forceinline__ int column_of() { return int(threadIdx.x) % kColumns; }
};

// ---- The selective scan ------------------------------------------------------------------------------------------------

template <int kRounds, bool each_state>
__global__ void __launch_bounds__(kWalkers, kBlocksHeld<kRounds>)
    selective_scan_kernel(const __grid_constant__ SelectiveScan p, const __grid_constant__ int64_t blocks) {
  using Own = Tile<kRounds>;
  constexpr int kTokens = Own::kTokens;
  constexpr bool kHeld = each_state && kRounds <= 4;  // decays, in registers
  __shared__ __align__(16) typename Own::Shared shared;
  const int64_t of_group = p.heads / p.groups * p.width, in_group = divide_up(of_group, Own::kColumns);
  const int own = Own::own(), left = left_of(p.states);
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t group = block / in_group % p.groups, sequence = block / in_group / p.groups;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t first = block % in_group * Own::kColumns, begin = group * of_group + first;
    const int64_t columns = of_group - first < Own::kColumns ? of_group - first : Own::kColumns;
    const bool mine = own < columns;
    // This thread's column; an absent one does as the block's first.
    const int64_t column = begin + (mine ? own : 0), head = column / p.width;
    const auto at_column = [&](const Strided &x, int dimension) {
      return head * x.stride[dimension - 1] + column % p.width * x.stride[dimension];
    };
    float state[kRounds][kScanLaneElements], decays[kHeld ? kRounds : 1][kScanLaneElements];
    const int64_t of_y = range.batch * p.y.stride[0] + at_column(p.y, 3);
    const float d = p.d.data ? element(p.d, head * p.d.stride[0]) : 0.0f;
    load_states(p.initial, sequence * p.initial.stride[0] + at_column(p.initial, 2), p.initial.stride[3], left,
                mine && p.initial.data, false, state);
    const int64_t of_a = each_state ? head * p.a.stride[0] : 0;
    if constexpr (kHeld)
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
#pragma unroll
        for (int i = 0; i < kScanLaneElements; ++i)
          decays[r][i] = r * kScanRound + i < left ? element(p.a, of_a + state_of(r, i) * p.a.stride[1]) : 0.0f;

    // x and its step: a thread brings those of a column and token of a tile.
    const bool loads = Own::column_of() < columns && Own::token_of() < kTokens;
    const int64_t brought = begin + (loads ? Own::column_of() : 0), of_head = brought / p.width;
    const int64_t of_x = range.batch * p.x.stride[0] + of_head * p.x.stride[2] + brought % p.width * p.x.stride[3];
    const int64_t of_dt = range.batch * p.dt.stride[0] + of_head * p.dt.stride[2];
    const float a = each_state ? 0.0f : element(p.a, of_head * p.a.stride[0]);
    LoadedBits x_bits, dt_bits;
    using RowsHere = Rows<kTokens, Own::kElements, kWalkers>;
    RowsHere b_rows(p.b, range.batch * p.b.stride[0] + group * p.b.stride[2], p.states);
    RowsHere c_rows(p.c, range.batch * p.c.stride[0] + group * p.c.stride[2], p.states);
    const auto load = [&](int64_t token) {
      b_rows.load(token, range.end), c_rows.load(token, range.end);
      const int64_t t = token + Own::token_of();
      x_bits = bits_at(p.x, of_x + t * p.x.stride[1], loads && t < range.end);
      dt_bits = bits_at(p.dt, of_dt + t * p.dt.stride[1], loads && t < range.end);
    };
    load(range.begin);
    int turn = 0;
    for (int64_t token = range.begin; token < range.end; token += kTokens, turn ^= 1) {
      b_rows.store(&shared.rows[turn][0][0][0]), c_rows.store(&shared.rows[turn][1][0][0]);
      if (Own::token_of() < kTokens) {
        const float x = number_of(p.x.type, x_bits), dt = number_of(p.dt.type, dt_bits);
        shared.x[turn][Own::token_of()][Own::column_of()] = x;
        shared.factors[turn][Own::token_of()][Own::column_of()] =
            make_float2(dt * x, each_state ? dt : exp_f32(dt * a));
      }
      __syncthreads();
      load(token + kTokens);
      const int count = range.end - token < kTokens ? int(range.end - token) : kTokens;
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        int here = left;
        make_opaque(here);  // else what is there would be found out once, and kept
        const float2 factors = shared.factors[turn][t][own];
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const float4 b = vector_of(shared.rows[turn][0][t], r), c = vector_of(shared.rows[turn][1][t], r);
#pragma unroll
          for (int i = 0; i < kScanLaneElements; ++i) {
            float decay = factors.y;
            if constexpr (kHeld) decay = exp_f32(factors.y * decays[r][i]);
            else if constexpr (each_state)
              decay = r * kScanRound + i < here
                          ? exp_f32(factors.y * element(p.a, of_a + state_of(r, i) * p.a.stride[1]))
                          : 0.0f;
            const float s = fmaf(factors.x, part(b, i), decay * state[r][i]);
            state[r][i] = s;
            if (r * kScanRound + i < here) sum = fmaf(part(c, i), s, sum);
          }
        }
        sum = join_lanes(sum);
        if (scan_lane() == 0 && mine)
          put(p.y, of_y + (token + t) * p.y.stride[1], p.d.data ? fmaf(d, shared.x[turn][t][own], sum) : sum);
      }
      // The other place is written next, and was read before this tile's barrier.
    }
    if (p.final.data && mine)
      store_states(p.final, sequence * p.final.stride[0] + at_column(p.final, 2), p.final.stride[3], left, false,
                   state);
    __syncthreads();
  }
}

// ---- The gated delta rule ----------------------------------------------------------------------------------------------

template <int kRounds>
__global__ void __launch_bounds__(kWalkers, kBlocksHeld<kRounds>)
    gated_delta_kernel(const __grid_constant__ GatedDelta p, const __grid_constant__ int64_t blocks) {
  using Own = Tile<kRounds>;
  constexpr int kTokens = Own::kTokens;
  __shared__ __align__(16) typename Own::Shared shared;
  __shared__ float2 gates[2][kTokens];  // a decay and beta
  const uint32_t in_head = uint32_t(divide_up(p.width, Own::kColumns)), heads = uint32_t(p.heads);
  const int own = Own::own(), left = left_of(p.keys);
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {  // of 32 bits: those of 64 divide by calls
    const int64_t head = block / in_head % heads, sequence = block / in_head / heads;
    const int64_t group = uint32_t(head) / (heads / uint32_t(p.groups)), first = block % in_head * Own::kColumns,
                  column = first + own;
    const bool mine = column < p.width;
    const Sequences::Range range = p.sequences.range(sequence);
    const auto of_state = [&](const Strided &states) {
      return sequence * states.stride[0] + head * states.stride[1] + column * states.stride[3];
    };
    float state[kRounds][kScanLaneElements];
    load_states(p.initial, of_state(p.initial), p.initial.stride[2], left, mine && p.initial.data, false, state);
    LoadedBits v_bits, g_bits, beta_bits;
    using RowsHere = Rows<kTokens, Own::kElements, kWalkers>;
    RowsHere q_rows(p.q, range.batch * p.q.stride[0] + group * p.q.stride[2], p.keys);
    RowsHere k_rows(p.k, range.batch * p.k.stride[0] + group * p.k.stride[2], p.keys);
    const auto load = [&](int64_t token) {
      q_rows.load(token, range.end), k_rows.load(token, range.end);
      const auto at = [&](const Strided &x, int64_t t) {
        return range.batch * x.stride[0] + t * x.stride[1] + head * x.stride[2];
      };
      int64_t t = token + Own::token_of();
      const int64_t c = first + Own::column_of();
      v_bits = bits_at(p.v, at(p.v, t) + c * p.v.stride[3], Own::token_of() < kTokens && c < p.width && t < range.end);
      t = token + int(threadIdx.x);
      const bool there = int(threadIdx.x) < kTokens && t < range.end;
      g_bits = bits_at(p.g, at(p.g, t), there), beta_bits = bits_at(p.beta, at(p.beta, t), there);
    };
    load(range.begin);
    int turn = 0;
    for (int64_t token = range.begin; token < range.end; token += kTokens, turn ^= 1) {
      q_rows.store(&shared.rows[turn][0][0][0]), k_rows.store(&shared.rows[turn][1][0][0]);
      if (Own::token_of() < kTokens) shared.x[turn][Own::token_of()][Own::column_of()] = number_of(p.v.type, v_bits);
      if (int(threadIdx.x) < kTokens)
        gates[turn][threadIdx.x] = make_float2(exp_f32(number_of(p.g.type, g_bits)), number_of(p.beta.type, beta_bits));
      __syncthreads();
      load(token + kTokens);
      const int count = range.end - token < kTokens ? int(range.end - token) : kTokens;
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        const float2 gate = gates[turn][t];
        int here = left;
        make_opaque(here);  // as above
        float known = 0.0f, sum = 0.0f;
        constexpr bool kKept = kRounds <= 4;  // the key, in registers
        float4 keys[kKept ? kRounds : 1];
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const float4 key = vector_of(shared.rows[turn][1][t], r);
          if constexpr (kKept) keys[r] = key;
#pragma unroll
          for (int i = 0; i < kScanLaneElements; ++i) {
            state[r][i] = gate.x * state[r][i];
            if (r * kScanRound + i < here) known = fmaf(part(key, i), state[r][i], known);
          }
        }
        const float w = gate.y * (shared.x[turn][t][own] - join_lanes(known));
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const float4 q = vector_of(shared.rows[turn][0][t], r);
          const float4 key = kKept ? keys[kKept ? r : 0] : vector_of(shared.rows[turn][1][t], r);
#pragma unroll
          for (int i = 0; i < kScanLaneElements; ++i) {
            state[r][i] = fmaf(part(key, i), w, state[r][i]);
            if (r * kScanRound + i < here) sum = fmaf(part(q, i), state[r][i], sum);
          }
        }
        sum = join_lanes(sum);
        if (scan_lane() == 0 && mine)
          put(p.o,
              range.batch * p.o.stride[0] + (token + t) * p.o.stride[1] + head * p.o.stride[2] + column * p.o.stride[3],
              sum);
      }
    }
    if (p.final.data && mine) store_states(p.final, of_state(p.final), p.final.stride[2], left, false, state);
    __syncthreads();
  }
}

constexpr int kMostWalkRounds = 8;
constexpr int64_t kMostWalkTokens = int64_t(1) << 30;  // of a sequence, whose tokens a thread counts in 32 bits
constexpr int64_t kMostOwn = 5;                        // columns of a thread, which are of two heads at most
constexpr int kSelectivePerState = 3, kDeltaPerState = 4;

// By rounds, the crews whose registers do not spill. A crew's numbers: rounds, columns of a thread, warps of columns, parts,
// helpers, tokens of a helper, tokens of a turn, blocks side by side (two: many short sequences).
template <int kRounds, bool bf16>
struct SelectiveCrews : BestCrew<SelectiveShared, Crew<kRounds, 4, 4, 1, 128>, Crew<kRounds, 2, 4, 1, 128>,
                                 Crew<kRounds, 2, 4, 1, 64, 1, 4, 2>> {};
template <bool bf16>
struct SelectiveCrews<4, bf16>
    : BestCrew<SelectiveShared, Crew<4, 5, 2, 2, 128>, Crew<4, 4, 4, 1, 128>, Crew<4, 4, 2, 2, 128>,
               Crew<4, 2, 2, 2, 128>, Crew<4, 2, 4, 1, 128>, Crew<4, 2, 4, 1, 64, 1, 4, 2>> {};
template <>
struct SelectiveCrews<8, true> : BestCrew<SelectiveShared, Crew<8, 4, 2, 2, 128>, Crew<8, 2, 2, 2, 128>,
                                          Crew<8, 1, 4, 1, 128, 1, 2>, Crew<8, 1, 4, 1, 64, 1, 1, 2>> {};
template <>
struct SelectiveCrews<8, false> : BestCrew<SelectiveShared, Crew<8, 2, 2, 2, 128>, Crew<8, 1, 4, 1, 128, 1, 2>> {};
template <int kRounds> struct DeltaCrews : BestCrew<DeltaShared, Crew<kRounds, 2, 8, 1, 64, 4>,
                                                    Crew<kRounds, 2, 4, 1, 64, 4>, Crew<kRounds, 1, 4, 1, 64, 4>> {};
template <> struct DeltaCrews<8> : BestCrew<DeltaShared, Crew<8, 1, 4, 1, 64, 4>, Crew<8, 1, 4, 1, 64>> {};

}  // namespace

bool selective_scan_takes(const SelectiveScan &p) { return !p.each_state || p.states <= kMostOwnDecays; }

pydet_status selective_scan(const SelectiveScan &p) {
  const char *name = "selective_scan";
  const bool bf16 = all_bf16(p.x, p.b, p.c, p.y);
  return with_rounds(p.states, [&](auto rounds) {
    constexpr int kRounds = rounds;
    const auto blocks = [&](int64_t columns) {
      return p.sequences.count * p.groups * divide_up(p.heads / p.groups * p.width, columns);
    };
    if constexpr (kRounds <= kMostWalkRounds)
      if (p.states == kRounds * kScanRound && !p.each_state && rows_in_pieces(p.b, p.states) &&
          rows_in_pieces(p.c, p.states) && p.width >= kMostOwn && p.sequences.tokens <= kMostWalkTokens) {
        pydet_status status = PYDET_OK;
        const int64_t pieces = p.sequences.count * p.groups, columns = p.heads / p.groups * p.width;
        const auto by_type = [&](auto known) {
          constexpr bool kKnown = decltype(known)::value;
          return SelectiveCrews<kRounds, kKnown>::launch(
              p.device, p.sequences, pieces, columns, kSelectivePerState, [&](auto crew) {
                using Own = decltype(crew);
                static_assert(Own::kOwn <= kMostOwn);
                status = launch_alone(name, p, blocks(Own::kColumns), Own::kThreads, selective_walk_kernel<Own, kKnown>,
                                      int(sizeof(SelectiveShared<Own>)));
              });
        };
        if (bf16 ? by_type(std::true_type()) : by_type(std::false_type())) return status;
      }
    void (*kernel)(SelectiveScan, int64_t) = selective_scan_kernel<kRounds, false>;
    if constexpr (kRounds * kScanRound <= kMostOwnDecays)
      if (p.each_state) kernel = selective_scan_kernel<kRounds, true>;
    return launch_alone(name, p, blocks(Tile<kRounds>::kColumns), kWalkers, kernel);
  });
}

pydet_status gated_delta(const GatedDelta &p) {
  const char *name = "gated_delta";
  return with_rounds(p.keys, [&](auto rounds) {
    constexpr int kRounds = rounds;
    const auto blocks = [&](int64_t columns) { return p.sequences.count * p.heads * divide_up(p.width, columns); };
    if constexpr (kRounds <= kMostWalkRounds)
      if (p.keys == kRounds * kScanRound && rows_in_pieces(p.q, p.keys) && rows_in_pieces(p.k, p.keys) &&
          p.sequences.tokens <= kMostWalkTokens) {
        pydet_status status = PYDET_OK;
        const auto launched = DeltaCrews<kRounds>::launch(
            p.device, p.sequences, p.sequences.count * p.heads, p.width, kDeltaPerState, [&](auto crew) {
              using Own = decltype(crew);
              status = launch_alone(name, p, blocks(Own::kColumns), Own::kThreads, delta_walk_kernel<Own>,
                                    int(sizeof(DeltaShared<Own>)));
            });
        if (launched) return status;
      }
    return launch_alone(name, p, blocks(Tile<kRounds>::kColumns), kWalkers, gated_delta_kernel<kRounds>);
  });
}

}  // namespace pydet
