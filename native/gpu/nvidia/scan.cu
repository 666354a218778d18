// Recurrences over tokens (NUMERICS.md, "Scans"): the selective scan and the gated delta rule: the CPU's bits.
//
// A block has some neighbouring columns, which are independent, and walks the tokens of a sequence. Each column has a team
// of eight threads, one for each lane of a sum over the states: its states stay in its registers, of two columns where there
// are columns enough for all multiprocessors, so that what is read of a row serves both. What the columns share, the two
// rows of a token, comes through shared memory, some tokens at a time; those of the next ones are on their way while a block
// works. Sums of eight tokens are joined over the lanes together, each of which ends with that of one token.

#include "contract/elementary.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/scan.h"
#include "gpu/nvidia/scan_walk.h"

namespace pydet {
namespace {

constexpr int kWalkers = 128;  // threads of a block
// Blocks whose registers a multiprocessor is to hold.
template <int kRounds, int kOwn> constexpr int kBlocksHeld = kRounds <= 4 && kOwn == 1 ? 3 : 2;
constexpr int64_t kMostOwnDecays = 256;  // of states with a decay each, beyond which registers spill

// Of a thread kOwn columns; a block's: those of a warp are neighbours.
template <int kRounds, int kOwn> struct Tile {
  static constexpr int kElements = kRounds * kScanRound, kTokens = kRounds > 8 ? 4 : 8,
                       kColumns = kWalkers / kScanLanes * kOwn;
  static constexpr int kNumbers = kTokens * kColumns, kOwnNumbers = (kNumbers + kWalkers - 1) / kWalkers;
  static_assert(kWalkers % kColumns == 0, "a thread's numbers are of one column");
  static constexpr int kPadded = kColumns + 4;  // a warp reads of eight tokens neighbouring columns
  struct Shared {
    float rows[2][2][kTokens][kElements];
    float2 factors[2][kTokens][kColumns];
    float x[2][kTokens][kPadded];
  };
  // The first of a thread's columns; the token and column of its i-th number.
  static __device__ __forceinline__ int first_own() { return (int(threadIdx.x) / 32 * kTeams + team_of_warp()) * kOwn; }
  static __device__ __forceinline__ int token_of(int i) { return (i * kWalkers + int(threadIdx.x)) / kColumns; }
  static __device__ __forceinline__ int column_of(int i) { return (i * kWalkers + int(threadIdx.x)) % kColumns; }
};

// Joins the sums of a group of tokens over the lanes: where it has half of them left, a lane gives the other half away.
// Lane e ends with that of token e / (8 / tokens).
template <int kGroup> __device__ __forceinline__ float join_tokens(float (&sums)[kGroup]) {
  int left = kGroup;
#pragma unroll
  for (int h = kScanLanes / 2; h; h /= 2) {
    if (left > 1) {
      const bool upper = scan_lane() & h;
      left /= 2;
#pragma unroll
      for (int t = 0; t < left; ++t) {
        const float keep = upper ? sums[t + left] : sums[t], give = upper ? sums[t] : sums[t + left];
        sums[t] = keep + gpu_shfl_xor(give, h * kTeams, 32);
      }
    } else {
      sums[0] = sums[0] + gpu_shfl_xor(sums[0], h * kTeams, 32);
    }
  }
  return sums[0];
}

// The tokens of a tile, kGroup at a time: step(t, sums) takes the states over a token and has this lane's part of its sums,
// write(t, k, sum) is of those of column k.
template <int kGroup, int kOwn, class Step, class Write>
__device__ __forceinline__ void walk_tile(int begin, int count, const Step &step, const Write &write) {
  constexpr int kSame = kScanLanes / kGroup;  // lanes that end with the same sum
  int t = begin;
#pragma unroll 1
  for (; t + kGroup <= count; t += kGroup) {
    float sums[kOwn][kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      float sum[kOwn];
      step(t + i, sum);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) sums[k][i] = sum[k];
    }
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const float sum = join_tokens(sums[k]);
      if (scan_lane() % kSame == 0) write(t + scan_lane() / kSame, k, sum);
    }
  }
  if constexpr (kGroup > 1) walk_tile<1, kOwn>(t, count, step, write);
}

// ---- The selective scan ------------------------------------------------------------------------------------------------

// whole: the states are all that the rounds have.
template <int kRounds, int kOwn, bool whole, bool each_state>
__global__ void __launch_bounds__(kWalkers, kBlocksHeld<kRounds, kOwn>)
    selective_scan_kernel(const __grid_constant__ SelectiveScan p, const __grid_constant__ int64_t blocks) {
  static_assert(!each_state || kOwn == 1);
  using Own = Tile<kRounds, kOwn>;
  constexpr int kTokens = Own::kTokens, kGroup = each_state || !whole ? 1 : kRounds <= 4 && kOwn == 1 ? 4 : 2;
  constexpr bool kHeld = each_state && kRounds <= 4;  // decays, in registers
  __shared__ __align__(16) typename Own::Shared shared;
  const int64_t of_group = p.heads / p.groups * p.width, in_group = divide_up(of_group, Own::kColumns);
  const int own = Own::first_own(), left = left_of(p.states);
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t group = block / in_group % p.groups, sequence = block / in_group / p.groups;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t first = block % in_group * Own::kColumns, begin = group * of_group + first;
    const int64_t columns = of_group - first < Own::kColumns ? of_group - first : Own::kColumns;
    float state[kOwn][kRounds][kScanLaneElements], decays[kHeld ? kRounds : 1][kScanLaneElements], d[kOwn];
    int64_t of_y[kOwn];
    // Where the k-th of this thread's columns lies; absent ones do as the block's first.
    const auto head_of = [&](int k) { return (begin + (own + k < columns ? own + k : 0)) / p.width; };
    const auto at_column = [&](const Strided &x, int k, int dimension) {
      const int64_t at = begin + (own + k < columns ? own + k : 0);
      return at / p.width * x.stride[dimension - 1] + at % p.width * x.stride[dimension];
    };
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      of_y[k] = range.batch * p.y.stride[0] + at_column(p.y, k, 3);
      d[k] = p.d.data ? element(p.d, head_of(k) * p.d.stride[0]) : 0.0f;
      load_states(p.initial, sequence * p.initial.stride[0] + at_column(p.initial, k, 2), p.initial.stride[3], left,
                  own + k < columns && p.initial.data, whole_vectors(p.initial, p.states, whole), state[k]);
    }
    const int64_t of_a = each_state ? head_of(0) * p.a.stride[0] : 0;
    if constexpr (kHeld)
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
#pragma unroll
        for (int i = 0; i < kScanLaneElements; ++i)
          decays[r][i] = r * kScanRound + i < left ? element(p.a, of_a + state_of(r, i) * p.a.stride[1]) : 0.0f;

    // x and its step: a thread brings those of a column, of some tokens of a tile.
    const bool loads = Own::column_of(0) < columns;
    const int64_t brought = begin + (loads ? Own::column_of(0) : 0), of_head = brought / p.width;
    const int64_t of_x = range.batch * p.x.stride[0] + of_head * p.x.stride[2] + brought % p.width * p.x.stride[3];
    const int64_t of_dt = range.batch * p.dt.stride[0] + of_head * p.dt.stride[2];
    const float a = each_state ? 0.0f : element(p.a, of_head * p.a.stride[0]);
    LoadedBits x_bits[Own::kOwnNumbers], dt_bits[Own::kOwnNumbers];
    using RowsHere = Rows<kTokens, Own::kElements, kWalkers>;
    RowsHere b_rows(p.b, range.batch * p.b.stride[0] + group * p.b.stride[2], p.states);
    RowsHere c_rows(p.c, range.batch * p.c.stride[0] + group * p.c.stride[2], p.states);
    const auto load = [&](int64_t token) {
      b_rows.load(token, range.end), c_rows.load(token, range.end);
#pragma unroll
      for (int i = 0; i < Own::kOwnNumbers; ++i) {
        const int64_t t = token + Own::token_of(i);
        const bool there = loads && Own::token_of(i) < kTokens && t < range.end;
        x_bits[i] = bits_at(p.x, of_x + t * p.x.stride[1], there);
        dt_bits[i] = bits_at(p.dt, of_dt + t * p.dt.stride[1], there);
      }
    };
    load(range.begin);
    int turn = 0;
    for (int64_t token = range.begin; token < range.end; token += kTokens, turn ^= 1) {
      b_rows.store(&shared.rows[turn][0][0][0]), c_rows.store(&shared.rows[turn][1][0][0]);
#pragma unroll
      for (int i = 0; i < Own::kOwnNumbers; ++i) {
        if (Own::token_of(i) >= kTokens) continue;
        const float x = number_of(p.x.type, x_bits[i]), dt = number_of(p.dt.type, dt_bits[i]);
        shared.x[turn][Own::token_of(i)][Own::column_of(i)] = x;
        shared.factors[turn][Own::token_of(i)][Own::column_of(i)] =
            make_float2(dt * x, each_state ? dt : exp_f32(dt * a));
      }
      __syncthreads();
      load(token + kTokens);
      // The sums of a token, this lane's part of them.
      const auto step = [&](int t, float(&sum)[kOwn]) {
        float u[kOwn], decay[kOwn];
        int here = left;
        if constexpr (!whole) make_opaque(here);  // else what is there would be found out once, and kept
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
          const float2 factors = shared.factors[turn][t][own + k];
          u[k] = factors.x, decay[k] = factors.y, sum[k] = 0.0f;
        }
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const float4 b = vector_of(shared.rows[turn][0][t], r), c = vector_of(shared.rows[turn][1][t], r);
#pragma unroll
          for (int k = 0; k < kOwn; ++k)
#pragma unroll
            for (int i = 0; i < kScanLaneElements; ++i) {
              float of_this = decay[k];
              if constexpr (kHeld) of_this = exp_f32(decay[k] * decays[r][i]);
              else if constexpr (each_state)
                of_this = r * kScanRound + i < here
                              ? exp_f32(decay[k] * element(p.a, of_a + state_of(r, i) * p.a.stride[1]))
                              : 0.0f;
              const float s = fmaf(u[k], part(b, i), of_this * state[k][r][i]);
              state[k][r][i] = s;
              if (whole || r * kScanRound + i < here) sum[k] = fmaf(part(c, i), s, sum[k]);
            }
        }
      };
      const auto write = [&](int t, int k, float sum) {
        if (own + k < columns)
          put(p.y, of_y[k] + (token + t) * p.y.stride[1], p.d.data ? fmaf(d[k], shared.x[turn][t][own + k], sum) : sum);
      };
      walk_tile<kGroup, kOwn>(0, range.end - token < kTokens ? int(range.end - token) : kTokens, step, write);
      // The other place is written next, and was read before this tile's barrier.
    }
#pragma unroll
    for (int k = 0; k < kOwn; ++k)
      if (p.final.data && own + k < columns)
        store_states(p.final, sequence * p.final.stride[0] + at_column(p.final, k, 2), p.final.stride[3], left,
                     whole_vectors(p.final, p.states, whole), state[k]);
    __syncthreads();
  }
}

// ---- The gated delta rule ----------------------------------------------------------------------------------------------

template <int kRounds, int kOwn, bool whole>
__global__ void __launch_bounds__(kWalkers, kBlocksHeld<kRounds, kOwn>)
    gated_delta_kernel(const __grid_constant__ GatedDelta p, const __grid_constant__ int64_t blocks) {
  using Own = Tile<kRounds, kOwn>;
  constexpr int kTokens = Own::kTokens, kGroup = whole && kRounds <= 4 ? 2 : 1;
  __shared__ __align__(16) typename Own::Shared shared;
  __shared__ float2 gates[2][kTokens];  // a decay and beta
  const uint32_t in_head = uint32_t(divide_up(p.width, Own::kColumns)), heads = uint32_t(p.heads);
  const int own = Own::first_own(), left = left_of(p.keys);
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {  // of 32 bits: those of 64 divide by calls
    const int64_t head = block / in_head % heads, sequence = block / in_head / heads;
    const int64_t group = uint32_t(head) / (heads / uint32_t(p.groups)), first = block % in_head * Own::kColumns,
                  column = first + own;
    const Sequences::Range range = p.sequences.range(sequence);
    const auto of_state = [&](const Strided &states, int k) {
      return sequence * states.stride[0] + head * states.stride[1] + (column + k) * states.stride[3];
    };
    float state[kOwn][kRounds][kScanLaneElements];
#pragma unroll
    for (int k = 0; k < kOwn; ++k)
      load_states(p.initial, of_state(p.initial, k), p.initial.stride[2], left, column + k < p.width && p.initial.data,
                  false, state[k]);
    LoadedBits v_bits[Own::kOwnNumbers], g_bits, beta_bits;
    using RowsHere = Rows<kTokens, Own::kElements, kWalkers>;
    RowsHere q_rows(p.q, range.batch * p.q.stride[0] + group * p.q.stride[2], p.keys);
    RowsHere k_rows(p.k, range.batch * p.k.stride[0] + group * p.k.stride[2], p.keys);
    const auto load = [&](int64_t token) {
      q_rows.load(token, range.end), k_rows.load(token, range.end);
      const auto at = [&](const Strided &x, int64_t t) {
        return range.batch * x.stride[0] + t * x.stride[1] + head * x.stride[2];
      };
#pragma unroll
      for (int i = 0; i < Own::kOwnNumbers; ++i) {
        const int64_t t = token + Own::token_of(i), c = first + Own::column_of(i);
        const bool there = Own::token_of(i) < kTokens && c < p.width && t < range.end;
        v_bits[i] = bits_at(p.v, at(p.v, t) + c * p.v.stride[3], there);
      }
      const int64_t t = token + int(threadIdx.x);
      const bool there = int(threadIdx.x) < kTokens && t < range.end;
      g_bits = bits_at(p.g, at(p.g, t), there), beta_bits = bits_at(p.beta, at(p.beta, t), there);
    };
    load(range.begin);
    int turn = 0;
    for (int64_t token = range.begin; token < range.end; token += kTokens, turn ^= 1) {
      q_rows.store(&shared.rows[turn][0][0][0]), k_rows.store(&shared.rows[turn][1][0][0]);
#pragma unroll
      for (int i = 0; i < Own::kOwnNumbers; ++i)
        if (Own::token_of(i) < kTokens)
          shared.x[turn][Own::token_of(i)][Own::column_of(i)] = number_of(p.v.type, v_bits[i]);
      if (int(threadIdx.x) < kTokens)
        gates[turn][threadIdx.x] = make_float2(exp_f32(number_of(p.g.type, g_bits)), number_of(p.beta.type, beta_bits));
      __syncthreads();
      load(token + kTokens);
      const auto step = [&](int t, float(&sum)[kOwn]) {
        const float2 gate = gates[turn][t];
        int here = left;
        if constexpr (!whole) make_opaque(here);
        float known[kOwn] = {}, w[kOwn];
        constexpr bool kKept = kRounds <= 4;  // the key, in registers
        float4 keys[kKept ? kRounds : 1];
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const float4 key = vector_of(shared.rows[turn][1][t], r);
          if constexpr (kKept) keys[r] = key;
#pragma unroll
          for (int k = 0; k < kOwn; ++k)
#pragma unroll
            for (int i = 0; i < kScanLaneElements; ++i) {
              state[k][r][i] = gate.x * state[k][r][i];
              if (whole || r * kScanRound + i < here) known[k] = fmaf(part(key, i), state[k][r][i], known[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < kOwn; ++k) known[k] = join_lanes(known[k]);
#pragma unroll
        for (int k = 0; k < kOwn; ++k) w[k] = gate.y * (shared.x[turn][t][own + k] - known[k]), sum[k] = 0.0f;
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const float4 q = vector_of(shared.rows[turn][0][t], r);
          const float4 key = kKept ? keys[kKept ? r : 0] : vector_of(shared.rows[turn][1][t], r);
#pragma unroll
          for (int k = 0; k < kOwn; ++k)
#pragma unroll
            for (int i = 0; i < kScanLaneElements; ++i) {
              state[k][r][i] = fmaf(part(key, i), w[k], state[k][r][i]);
              if (whole || r * kScanRound + i < here) sum[k] = fmaf(part(q, i), state[k][r][i], sum[k]);
            }
        }
      };
      const auto write = [&](int t, int k, float sum) {
        if (column + k < p.width)
          put(p.o,
              range.batch * p.o.stride[0] + (token + t) * p.o.stride[1] + head * p.o.stride[2] +
                  (column + k) * p.o.stride[3],
              sum);
      };
      walk_tile<kGroup, kOwn>(0, range.end - token < kTokens ? int(range.end - token) : kTokens, step, write);
    }
#pragma unroll
    for (int k = 0; k < kOwn; ++k)
      if (p.final.data && column + k < p.width)
        store_states(p.final, of_state(p.final, k), p.final.stride[2], left, false, state[k]);
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

constexpr int kMostPairedRounds = 4;
// Whether blocks of one column a thread are more than the multiprocessors hold at a time.
template <int kRounds> bool pairs_pay(const Device &device, int64_t blocks) {
  return blocks > kBlocksHeld<kRounds, 1> * gpu_multiprocessors(device.id);
}

}  // namespace

bool selective_scan_takes(const SelectiveScan &p) { return !p.each_state || p.states <= kMostOwnDecays; }

pydet_status selective_scan(const SelectiveScan &p) {
  return with_rounds(p.states, [&](auto rounds) {
    constexpr int kRounds = rounds;
    const bool whole = p.states == kRounds * kScanRound;
    const auto blocks = [&](int64_t columns) {
      return p.sequences.count * p.groups * divide_up(p.heads / p.groups * p.width, columns);
    };
    const char *knob = getenv("PYDET_SCAN_OWN");
    const int knob_own = knob ? knob[0] - '0' : 0, knob_warps = knob ? knob[1] - '0' : 4;
    if (whole && !p.each_state && knob_own && rows_in_pieces(p.b, p.states) && rows_in_pieces(p.c, p.states) &&
        (knob_own == 3 || p.width % knob_own == 0)) {
      pydet_status got = PYDET_UNSUPPORTED;
      const int knob_turn = knob && knob[1] ? knob[2] - '0' : 2;
      const bool bf16 = p.x.type == Type::bf16 && p.b.type == Type::bf16 && p.c.type == Type::bf16 && p.y.type == Type::bf16;
      const auto run = [&](auto own, auto warps, auto held, auto turn) {
        if (own == knob_own && warps == knob_warps && turn == knob_turn)
          got = launch_alone("selective_scan", p, blocks(Walk<kRounds, own, warps>::kColumns), 32 * warps,
                             bf16 ? selective_walk_kernel<kRounds, own, warps, held, turn, true>
                                  : selective_walk_kernel<kRounds, own, warps, held, turn, false>);
      };
      using std::integral_constant;
#define RUN(o, w, h, t) \
  run(integral_constant<int, o>(), integral_constant<int, w>(), integral_constant<int, h>(), integral_constant<int, t>())
      if constexpr (kRounds == 8) {
        RUN(2, 4, 1, 2);
        RUN(2, 4, 1, 4);
        RUN(2, 2, 2, 4);
        RUN(1, 4, 2, 4);
      }
      if constexpr (kRounds == 4) {
        RUN(1, 4, 3, 4);
        RUN(1, 4, 3, 8);
        RUN(2, 4, 2, 4);
        RUN(2, 4, 3, 2);
        RUN(2, 2, 4, 4);
        RUN(3, 4, 2, 4);
        RUN(3, 2, 4, 4);
        RUN(4, 4, 2, 4);
        RUN(4, 2, 4, 4);
      }
      if (got != PYDET_UNSUPPORTED) return got;
    }
    if constexpr (kRounds <= kMostPairedRounds) {
      constexpr int64_t kColumns = Tile<kRounds, 2>::kColumns;
      if (!p.each_state && whole && pairs_pay<kRounds>(p.device, blocks(Tile<kRounds, 1>::kColumns)))
        return launch_alone("selective_scan", p, blocks(kColumns), kWalkers,
                            selective_scan_kernel<kRounds, 2, true, false>);
    }
    void (*kernel)(SelectiveScan, int64_t) =
        whole ? selective_scan_kernel<kRounds, 1, true, false> : selective_scan_kernel<kRounds, 1, false, false>;
    if constexpr (kRounds * kScanRound <= kMostOwnDecays)
      if (p.each_state) kernel = selective_scan_kernel<kRounds, 1, false, true>;
    return launch_alone("selective_scan", p, blocks(Tile<kRounds, 1>::kColumns), kWalkers, kernel);
  });
}

pydet_status gated_delta(const GatedDelta &p) {
  return with_rounds(p.keys, [&](auto rounds) {
    constexpr int kRounds = rounds;
    const bool whole = p.keys == kRounds * kScanRound;
    const auto blocks = [&](int64_t columns) { return p.sequences.count * p.heads * divide_up(p.width, columns); };
    const char *knob = getenv("PYDET_SCAN_OWN");
    const int knob_own = knob ? knob[0] - '0' : 0, knob_warps = knob ? knob[1] - '0' : 4;
    if (whole && knob_own && rows_in_pieces(p.q, p.keys) && rows_in_pieces(p.k, p.keys)) {
      pydet_status got = PYDET_UNSUPPORTED;
      const int knob_turn = knob && knob[1] ? knob[2] - '0' : 2;
      const bool bf16 = p.q.type == Type::bf16 && p.k.type == Type::bf16 && p.v.type == Type::bf16 && p.o.type == Type::bf16;
      const auto run = [&](auto own, auto warps, auto held, auto turn) {
        if (own == knob_own && warps == knob_warps && turn == knob_turn)
          got = launch_alone("gated_delta", p, blocks(Walk<kRounds, own, warps>::kColumns), 32 * warps,
                             bf16 ? delta_walk_kernel<kRounds, own, warps, held, turn, true>
                                  : delta_walk_kernel<kRounds, own, warps, held, turn, false>);
      };
      using std::integral_constant;
      if constexpr (kRounds == 4) {
        RUN(2, 4, 2, 2);
        RUN(2, 4, 2, 4);
        RUN(2, 2, 4, 4);
        RUN(1, 4, 2, 4);
      }
      if (got != PYDET_UNSUPPORTED) return got;
    }
    if constexpr (kRounds <= kMostPairedRounds) {
      constexpr int64_t kColumns = Tile<kRounds, 2>::kColumns;
      if (whole && pairs_pay<kRounds>(p.device, blocks(Tile<kRounds, 1>::kColumns)))
        return launch_alone("gated_delta", p, blocks(kColumns), kWalkers, gated_delta_kernel<kRounds, 2, true>);
    }
    return launch_alone("gated_delta", p, blocks(Tile<kRounds, 1>::kColumns), kWalkers,
                        whole ? gated_delta_kernel<kRounds, 1, true> : gated_delta_kernel<kRounds, 1, false>);
  });
}

}  // namespace pydet
