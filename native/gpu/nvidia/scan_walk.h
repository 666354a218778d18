// Walks of recurrences over tokens that leave no thread waiting (NUMERICS.md, "Scans"): for states that fill their rounds
// and rows of whole pieces.
//
// A multiprocessor's four schedulers have a warp each, or two, of a kernel whose registers are full of states: what a warp
// waits for, its scheduler waits for. So a warp reads the rows of the next token while it computes with these, a block
// stores the next tokens' rows while it walks these, with one barrier a tile, and sums are joined over the lanes once for
// eight tokens: a lane leaves its parts in shared memory and then adds up all lanes' of one token.
#pragma once

#include "contract/elementary.h"
#include "gpu/nvidia/scan.h"

namespace pydet {
namespace {

constexpr int kTurn = 4;  // tokens of a turn of a loop: more are more code than is kept near

// Of a thread kOwn neighbouring columns of a head, one lane of each; a tile of tokens is one for each lane.
template <int kRounds, int kOwn, int kWarps> struct Walk {
  static constexpr int kWalkers = 32 * kWarps, kElements = kRounds * kScanRound, kTokens = kScanLanes;
  static constexpr int kOfWarp = kTeams * kOwn, kColumns = kWarps * kOfWarp;
  // Tokens of which the threads bring a number each at a time; numbers of a thread.
  static constexpr int kPass = kWalkers / kColumns, kNumbers = kTokens / kPass;
  static_assert(kTokens % kPass == 0, "a thread's numbers are of one column");
  // Parts of sums: eight threads that read the same of neighbouring tokens meet 32 banks.
  static constexpr int kOfToken = (32 + kTeams) * kOwn;
  // What threads of a warp that are kTeams apart read alike is aligned as it is read.
  using Rows = float[2][kTokens][kElements];

  static __device__ __forceinline__ int first_own() { return int(threadIdx.x) / 32 * kOfWarp + team_of_warp() * kOwn; }
  static __device__ __forceinline__ int brought_column() { return int(threadIdx.x) % kColumns; }
  static __device__ __forceinline__ int brought_token(int i) { return int(threadIdx.x) / kColumns + i * kPass; }
  static __device__ __forceinline__ bool brings() { return int(threadIdx.x) < kPass * kColumns; }
};

// Numbers one behind the other in steps of bytes, of any type: what is loaded is a number when it is asked for.
struct Stepped {
  const char *at;
  int64_t step;
  Type type;

  template <bool bf16 = false> __device__ __forceinline__ LoadedBits load(int i, bool there) const {
    LoadedBits bits = {};
    const char *const from = at + i * step;
    if constexpr (bf16) {
      if (there) bits.narrow = *reinterpret_cast<const uint16_t *>(from);
      return bits;
    }
    if (there && type == Type::f32) bits.wide = *reinterpret_cast<const uint32_t *>(from);
    if (there && type != Type::f32) bits.narrow = *reinterpret_cast<const uint16_t *>(from);
    return bits;
  }
};

// Adds up what a warp's lanes left of a tile's sums: those of token `lane`, of this thread's columns.
template <class Own, int kOwn>
__device__ __forceinline__ void join_tile(const float *sums, float (&sum)[kOwn]) {
  float s[kScanLanes][kOwn];
  const float *const of_token = sums + scan_lane() * Own::kOfToken + team_of_warp() * kOwn;
#pragma unroll
  for (int e = 0; e < kScanLanes; ++e) get_own(s[e], of_token + e * kTeams * kOwn);
#pragma unroll
  for (int k = 0; k < kOwn; ++k)
    sum[k] = ((s[0][k] + s[4][k]) + (s[2][k] + s[6][k])) + ((s[1][k] + s[5][k]) + (s[3][k] + s[7][k]));
}

template <bool bf16> __device__ __forceinline__ float brought_number(Type type, LoadedBits bits) {
  if constexpr (bf16) return f32_from_bf16(bits.narrow);
  else return number_of(type, bits);
}

// Writes a token's results of a thread's columns, of which `there` are, `apart` elements from each other. near: they are
// neighbours, and aligned as a vector.
template <bool bf16, int kOwn>
__device__ __forceinline__ void put_results(const Strided &to, int64_t at, int64_t apart, bool near, int there,
                                            const float (&x)[kOwn]) {
  if constexpr (bf16) {
    uint16_t bits[kOwn];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) bits[k] = bf16_from_f32(x[k]);
    uint16_t *const first = reinterpret_cast<uint16_t *>(to.data) + at;
    if constexpr (kOwn == 2 || kOwn == 4) {
      if (near && there >= kOwn) {
        std::conditional_t<kOwn == 4, uint2, uint32_t> all;
        memcpy(&all, bits, sizeof all);
        *reinterpret_cast<decltype(all) *>(first) = all;
        return;
      }
    }
#pragma unroll
    for (int k = 0; k < kOwn; ++k)
      if (k < there) first[k * apart] = bits[k];
  } else {
#pragma unroll
    for (int k = 0; k < kOwn; ++k)
      if (k < there) put(to, at + k * apart, x[k]);
  }
}
// Whether all of a tensor's columns lie as put_results has it near.
template <int kOwn> __device__ __forceinline__ bool near_columns(const Strided &x) {
  return x.stride[3] == 1 && x.stride[0] % kOwn == 0 && x.stride[1] % kOwn == 0 && x.stride[2] % kOwn == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % (2 * kOwn) == 0;
}

// Uses the states before a walk's loop, so that they have arrived. Else their first use in the loop would wait, in each
// tile, for all loads on their way, which are the next tile's. `zero`: 0, which the compiler does not know.
template <int kOwn, int kRounds>
__device__ __forceinline__ void wait_for_states(int zero, float (&state)[kOwn][kRounds][kScanLaneElements]) {
#pragma unroll
  for (int k = 0; k < kOwn; ++k)
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int i = 0; i < kScanLaneElements; ++i) state[k][r][i] = float_of(bits_of(state[k][r][i]) ^ uint32_t(zero));
}

// What an absent token is given, so that it leaves every state as it is: fmaf(-0, +0, s) is s.
constexpr uint32_t kMinusZero = 0x80000000u;

// ---- The selective scan ------------------------------------------------------------------------------------------------

template <int kRounds, int kOwn, int kWarps, bool bf16>
__global__ void __launch_bounds__(32 * kWarps, kRounds *kOwn <= 4 ? 3 : 2)
    selective_walk_kernel(const __grid_constant__ SelectiveScan p, const __grid_constant__ int64_t blocks) {
  using Own = Walk<kRounds, kOwn, kWarps>;
  constexpr int kTokens = Own::kTokens;
  // Heads in a block at most, since the columns of a thread are of one head. So a thread brings the step of one head and
  // token. A loop over heads would have loads in it, and the code behind it would wait for those of the next tile too.
  constexpr int kHeads = Own::kColumns / kOwn;
  static_assert(kHeads * kTokens <= Own::kWalkers);
  struct Shared {
    typename Own::Rows rows[2];
    float x[2][kTokens][Own::kColumns];
    float sums[kWarps][kTokens][Own::kOfToken];
    float2 gates[2][kTokens][kHeads];  // a step and a decay
  };
  __shared__ __align__(16) Shared shared;
  const int64_t of_group = p.heads / p.groups * p.width, in_group = divide_up(of_group, Own::kColumns);
  const int own = Own::first_own(), lane = scan_lane(), warp = int(threadIdx.x) / 32;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t group = block / in_group % p.groups, sequence = block / in_group / p.groups;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t first = block % in_group * Own::kColumns, begin = group * of_group + first;
    const int columns = of_group - first < Own::kColumns ? int(of_group - first) : Own::kColumns;
    const int64_t first_head = begin / p.width;
    const int heads = int((begin + columns - 1) / p.width - first_head) + 1;
    const auto head_of = [&](int k) { return (begin + (own + k < columns ? own + k : 0)) / p.width; };
    const auto at_column = [&](const Strided &x, int k, int dimension) {
      const int64_t at = begin + (own + k < columns ? own + k : 0);
      return at / p.width * x.stride[dimension - 1] + at % p.width * x.stride[dimension];
    };
    float state[kOwn][kRounds][kScanLaneElements];
    const bool near = near_columns<kOwn>(p.y);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      load_states(p.initial, sequence * p.initial.stride[0] + at_column(p.initial, k, 2), p.initial.stride[3],
                  left_of(p.states), own + k < columns && p.initial.data, whole_vectors(p.initial, p.states, true),
                  state[k]);
    }
    int64_t of_y = range.batch * p.y.stride[0] + at_column(p.y, 0, 3) + (range.begin + lane) * p.y.stride[1];
    const float d = p.d.data ? element(p.d, head_of(0) * p.d.stride[0]) : 0.0f;
    const int at_gate = int(head_of(0) - first_head);
    // x: a thread brings those of a column, of some tokens of a tile; steps: it brings those of a head.
    Stepped x, dt;
    {
      const bool there = Own::brings() && Own::brought_column() < columns;
      const int64_t at = begin + (there ? Own::brought_column() : 0), size = size_of(p.x.type);
      x = {p.x.at(range.batch * p.x.stride[0] + at / p.width * p.x.stride[2] + at % p.width * p.x.stride[3] +
                  (range.begin + Own::brought_token(0)) * p.x.stride[1]),
           Own::kPass * p.x.stride[1] * size, p.x.type};
      if (!there) x.step = 0;
    }
    const int gate_token = int(threadIdx.x) % kTokens, gate_head = int(threadIdx.x) / kTokens;
    const bool gated = gate_head < heads;
    dt = {p.dt.at(range.batch * p.dt.stride[0] + (range.begin + gate_token) * p.dt.stride[1] +
                  (first_head + (gated ? gate_head : 0)) * p.dt.stride[2]),
          kTokens * p.dt.stride[1] * size_of(p.dt.type), p.dt.type};
    const bool brings = Own::brings() && Own::brought_column() < columns;
    const float a = element(p.a, (first_head + (gated ? gate_head : 0)) * p.a.stride[0]);
    LoadedBits x_bits[Own::kNumbers], dt_bits;
    Pieces<kTokens, Own::kElements, Own::kWalkers, bf16> b_rows(
        p.b, range.batch * p.b.stride[0] + group * p.b.stride[2], range.begin),
        c_rows(p.c, range.batch * p.c.stride[0] + group * p.c.stride[2], range.begin);
    // Both of the next tile, of which `left` tokens are there; beyond it nothing is brought.
    int left = 0;
    const auto load = [&](int64_t token) {
      left = range.end - token < kTokens ? int(range.end - token) : kTokens;
      b_rows.load(left), c_rows.load(left);
#pragma unroll
      for (int i = 0; i < Own::kNumbers; ++i) x_bits[i] = x.load<bf16>(i, brings && Own::brought_token(i) < left);
      dt_bits = dt.load(0, gated && gate_token < left);
      x.at += Own::kNumbers * x.step, dt.at += dt.step;
    };
    const auto store = [&](int turn) {
      b_rows.store(&shared.rows[turn][0][0][0]), c_rows.store(&shared.rows[turn][1][0][0]);
      if (Own::brings())
#pragma unroll
        for (int i = 0; i < Own::kNumbers; ++i)
          shared.x[turn][Own::brought_token(i)][Own::brought_column()] =
              Own::brought_token(i) < left ? brought_number<bf16>(x.type, x_bits[i]) : float_of(kMinusZero);
      if (gated) {
        const float step = number_of(dt.type, dt_bits);
        shared.gates[turn][gate_token][gate_head] =
            gate_token < left ? make_float2(step, exp_f32(step * a)) : make_float2(1.0f, 1.0f);
      }
    };
    load(range.begin);
    store(0);
    wait_for_states(int(blocks >> 32), state);
    int turn = 0;
    for (int64_t token = range.begin; token < range.end; token += kTokens, turn ^= 1) {
      const int count = range.end - token < kTokens ? int(range.end - token) : kTokens;
      const bool more = token + kTokens < range.end;
      __syncthreads();
      if (more) load(token + kTokens);
      // The first rounds of a turn's first token are read in the turn before.
      float4 first_b, first_c;
      float2 first_gates;
      float first_x[kOwn];
      const auto read_numbers = [&](int t, float2 &gates, float(&x)[kOwn]) {
        gates = shared.gates[turn][t][at_gate];
        get_own(x, &shared.x[turn][t][own]);
      };
      const auto read_first = [&](int t) {
        first_b = vector_of(shared.rows[turn][0][t], 0), first_c = vector_of(shared.rows[turn][1][t], 0);
        read_numbers(t, first_gates, first_x);
      };
      read_first(0);
#pragma unroll 1
      for (int t = 0; t < count; t += kTurn) {
        if (t == (kTokens / 2) && more) store(turn ^ 1);
        float sums[kTurn][kOwn];  // stored behind the turn's reads, which could not pass them
#pragma unroll
        for (int of = 0; of < kTurn; ++of) {
          float2 gates = first_gates;
          float x[kOwn], u[kOwn];
          if (of == 0) {
#pragma unroll
            for (int k = 0; k < kOwn; ++k) x[k] = first_x[k];
          } else {
            read_numbers(t + of, gates, x);
          }
#pragma unroll
          for (int k = 0; k < kOwn; ++k) sums[of][k] = 0.0f, u[k] = gates.x * x[k];
#pragma unroll
          for (int r = 0; r < kRounds; ++r) {
            const bool read = of == 0 && r == 0;
            const float4 b = read ? first_b : vector_of(shared.rows[turn][0][t + of], r);
            const float4 c = read ? first_c : vector_of(shared.rows[turn][1][t + of], r);
#pragma unroll
            for (int i = 0; i < kScanLaneElements; ++i) {
#pragma unroll
              for (int k = 0; k < kOwn; ++k) state[k][r][i] = fmaf(part(b, i), u[k], gates.y * state[k][r][i]);
#pragma unroll
              for (int k = 0; k < kOwn; ++k) sums[of][k] = fmaf(part(c, i), state[k][r][i], sums[of][k]);
            }
          }
        }
        read_first((t + kTurn) % kTokens);
#pragma unroll
        for (int of = 0; of < kTurn; ++of) put_own(&shared.sums[warp][t + of][int(threadIdx.x) % 32 * kOwn], sums[of]);
      }
      __syncwarp();
      float sum[kOwn], of_x[kOwn];
      join_tile<Own>(&shared.sums[warp][0][0], sum);
      get_own(of_x, &shared.x[turn][lane][own]);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) sum[k] = p.d.data ? fmaf(d, of_x[k], sum[k]) : sum[k];
      if (lane < count) put_results<bf16>(p.y, of_y, p.y.stride[3], near, columns - own, sum);
      of_y += kTokens * p.y.stride[1];
      // The sums are written next behind the barrier.
    }
#pragma unroll
    for (int k = 0; k < kOwn; ++k)
      if (p.final.data && own + k < columns)
        store_states(p.final, sequence * p.final.stride[0] + at_column(p.final, k, 2), p.final.stride[3],
                     left_of(p.states), whole_vectors(p.final, p.states, true), state[k]);
    __syncthreads();
  }
}

// ---- The gated delta rule ----------------------------------------------------------------------------------------------

// A column's sum over the keys is joined before its states go on: while a warp waits for its lanes it adds up the query's
// sums of the token before.
template <int kRounds, int kOwn, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 2)
    delta_walk_kernel(const __grid_constant__ GatedDelta p, const __grid_constant__ int64_t blocks) {
  using Own = Walk<kRounds, kOwn, kWarps>;
  constexpr int kTokens = Own::kTokens;
  struct Shared {
    typename Own::Rows rows[2];
    float v[2][kTokens][Own::kColumns];
    float sums[2][kWarps][kTokens][Own::kOfToken];
    float2 gates[2][kTokens];  // a decay and beta
  };
  __shared__ __align__(16) Shared shared;
  const int zero = int(blocks >> 32);  // which the compiler does not know
  const uint32_t in_head = uint32_t(divide_up(p.width, Own::kColumns)), heads = uint32_t(p.heads);
  const int own = Own::first_own(), lane = scan_lane(), warp = int(threadIdx.x) / 32;
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {  // of 32 bits: those of 64 divide by calls
    const int64_t head = block / in_head % heads, sequence = block / in_head / heads;
    const int64_t group = uint32_t(head) / (heads / uint32_t(p.groups)), first = block % in_head * Own::kColumns;
    const int columns = p.width - first < Own::kColumns ? int(p.width - first) : Own::kColumns;
    const Sequences::Range range = p.sequences.range(sequence);
    const auto of_state = [&](const Strided &states, int k) {
      return sequence * states.stride[0] + head * states.stride[1] + (first + own + k) * states.stride[3];
    };
    float state[kOwn][kRounds][kScanLaneElements];
#pragma unroll
    for (int k = 0; k < kOwn; ++k)
      load_states(p.initial, of_state(p.initial, k), p.initial.stride[2], left_of(p.keys),
                  own + k < columns && p.initial.data, false, state[k]);
    const bool brings = Own::brings() && Own::brought_column() < columns, gated = int(threadIdx.x) < kTokens;
    Stepped v = {p.v.at(range.batch * p.v.stride[0] + (range.begin + Own::brought_token(0)) * p.v.stride[1] +
                        head * p.v.stride[2] + (first + (brings ? Own::brought_column() : 0)) * p.v.stride[3]),
                 Own::kPass * p.v.stride[1] * size_of(p.v.type), p.v.type};
    const auto gate = [&](const Strided &x) {
      const int64_t at = range.batch * x.stride[0] + head * x.stride[2];
      return Stepped{x.at(at + (range.begin + (gated ? int(threadIdx.x) : 0)) * x.stride[1]),
                     kTokens * x.stride[1] * size_of(x.type), x.type};
    };
    Stepped g = gate(p.g), beta = gate(p.beta);
    LoadedBits v_bits[Own::kNumbers], g_bits, beta_bits;
    Pieces<kTokens, Own::kElements, Own::kWalkers> q_rows(p.q, range.batch * p.q.stride[0] + group * p.q.stride[2],
                                                          range.begin),
        k_rows(p.k, range.batch * p.k.stride[0] + group * p.k.stride[2], range.begin);
    const bool near = near_columns<kOwn>(p.o);
    int64_t of_o = range.batch * p.o.stride[0] + (range.begin + lane) * p.o.stride[1] + head * p.o.stride[2] +
                   (first + own) * p.o.stride[3];
    int left = 0;
    const auto load = [&](int64_t token) {
      left = range.end - token < kTokens ? int(range.end - token) : kTokens;
      q_rows.load(left), k_rows.load(left);
#pragma unroll
      for (int i = 0; i < Own::kNumbers; ++i) v_bits[i] = v.load(i, brings && Own::brought_token(i) < left);
      g_bits = g.load(0, gated && int(threadIdx.x) < left), beta_bits = beta.load(0, gated && int(threadIdx.x) < left);
      v.at += Own::kNumbers * v.step, g.at += g.step, beta.at += beta.step;
    };
    const auto store = [&](int turn) {
      q_rows.store(&shared.rows[turn][0][0][0]), k_rows.store(&shared.rows[turn][1][0][0]);
      if (Own::brings())
#pragma unroll
        for (int i = 0; i < Own::kNumbers; ++i)
          shared.v[turn][Own::brought_token(i)][Own::brought_column()] = number_of(v.type, v_bits[i]);
      if (gated)
        shared.gates[turn][threadIdx.x] =
            int(threadIdx.x) < left ? make_float2(exp_f32(number_of(g.type, g_bits)), number_of(beta.type, beta_bits))
                                    : make_float2(1.0f, 0.0f);
    };
    // The sums of a token are of the query and the states that it left, while the next one's are joined.
    float4 query[kRounds] = {};
    const auto add = [&](int n, float(&sum)[kOwn]) {
#pragma unroll
      for (int k = 0; k < kOwn; ++k) sum[k] = fmaf(part(query[n / 4], n % 4), state[k][n / 4][n % 4], sum[k]);
    };
    const auto finish = [&](int turn, int count) {
      __syncwarp();
      float sum[kOwn];
      join_tile<Own>(&shared.sums[turn][warp][0][0], sum);
      if (lane < count) put_results<false>(p.o, of_o, p.o.stride[3], near, columns - own, sum);
      of_o += kTokens * p.o.stride[1];
    };
    const auto leave = [&](int turn, int t, const float(&sum)[kOwn]) {
      put_own(&shared.sums[turn][warp][t][int(threadIdx.x) % 32 * kOwn], sum);
    };
    load(range.begin);
    store(0);
    int turn = 0, count = 0, last = 0;
    for (int64_t token = range.begin; token < range.end; token += kTokens, turn ^= 1) {
      count = range.end - token < kTokens ? int(range.end - token) : kTokens;
      const bool more = token + kTokens < range.end;
      __syncthreads();
      if (more) load(token + kTokens);
#pragma unroll 1
      for (int t = 0; t < count; t += kTurn) {
        if (t == (kTokens / 2) && more) store(turn ^ 1);
        float4 keys[kRounds];
        float2 gates = shared.gates[turn][t];
        float v_here[kOwn];
        get_own(v_here, &shared.v[turn][t][own]);
#pragma unroll
        for (int r = 0; r < kRounds; ++r) keys[r] = vector_of(shared.rows[turn][1][t], r);
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
          float4 next[kRounds];  // keys
          float2 next_gates = {};
          float next_v[kOwn] = {};
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
              if (of + 1 < kTurn) next[r] = vector_of(shared.rows[turn][1][t + of + 1], r);
            if (of + 1 < kTurn && step == 0) {
              next_gates = shared.gates[turn][t + of + 1];
              get_own(next_v, &shared.v[turn][t + of + 1][own]);
            }
#pragma unroll
            for (int k = 0; k < kOwn; ++k) known[k] = known[k] + other[k];
          };
          join(std::integral_constant<int, 0>());
          join(std::integral_constant<int, 1>());
          join(std::integral_constant<int, 2>());
#pragma unroll
          for (int r = 0; r < kRounds; ++r) query[r] = vector_of(shared.rows[turn][0][t + of], r);
          leave(of || t ? turn : turn ^ 1, (t + of + kTokens - 1) % kTokens, sum);
#pragma unroll
          for (int k = 0; k < kOwn; ++k) {
            w[k] = gates.y * (v_here[k] - known[k]);
            // An absent token leaves the states as they are, also where some are no numbers.
            w[k] = t + of < count ? w[k] : -0.0f;
          }
#pragma unroll
          for (int r = 0; r < kRounds; ++r) {
#pragma unroll
            for (int i = 0; i < kScanLaneElements; ++i)
#pragma unroll
              for (int k = 0; k < kOwn; ++k) state[k][r][i] = fmaf(part(keys[r], i), w[k], decayed[k][r][i]);
            if (of + 1 < kTurn) keys[r] = next[r];
          }
          gates = next_gates;
#pragma unroll
          for (int k = 0; k < kOwn; ++k) v_here[k] = next_v[k];
        }
        last = t + kTurn - 1;
        if (t == 0 && token > range.begin) finish(turn ^ 1, kTokens);
      }
    }
    if (range.begin < range.end) {
      float sum[kOwn] = {};
#pragma unroll
      for (int n = 0; n < kRounds * kScanLaneElements; ++n) add(n, sum);
      leave(turn ^ 1, last, sum);
      finish(turn ^ 1, count);
    }
#pragma unroll
    for (int k = 0; k < kOwn; ++k)
      if (p.final.data && own + k < columns)
        store_states(p.final, of_state(p.final, k), p.final.stride[2], left_of(p.keys), false, state[k]);
    __syncthreads();
  }
}

}  // namespace
}  // namespace pydet
