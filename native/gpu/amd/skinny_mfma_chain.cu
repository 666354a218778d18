// y = round(chain_k(x, w) + bias) for few rows of x and many weights, on AMD's matrix cores, without chunks: arithmetic
// cdna3 on gfx942, cdna2 on gfx90a.
//
//   chain: one accumulator, k ascending in MFMAs of 16x16x16, from +0 or y. +0 is added at the end (gemm_mfma.cu)
//
// A block makes 16 rows of w (columns of y) for all of x, up to 128 rows, a wave for each tile of 16 rows of x; for a
// single tile two waves make the same. N gives few blocks, and a chain is not split: so what a block has on the way
// decides how much of the memory's bandwidth is used. Its waves bring w together, each element once, by loads of 16
// bytes a lane (8 of the most waves), and have six stages of 128 k on the way to registers, 24 KiB: what each of 256
// blocks needs for all of an MI300X's bandwidth where memory answers after 2400 cycles. When its turn comes a stage goes
// to shared memory, where each lane finds the four k of its MFMA. x, from the caches, goes straight to the registers of
// its MFMA, as far ahead, 8 bytes a lane; that of a single tile goes the way of w, in a quarter of the loads. w is the
// left operand, so that a lane ends with four neighbours of y. K is a multiple of 8 and rows are aligned
// (skinny_mfma_takes). No chain is split, so fast mode has nothing to gain here and is the same.

#include "gpu/amd/skinny_mfma.h"

namespace pydet {
namespace {

constexpr int kStage = 128, kSteps = kStage / M::kStep;  // k of a stage, and its MFMAs
// Of a row in shared memory: 16 rows are one place of two banks apart, so that 16 lanes read from all.
constexpr int kPitch = kStage / kUnit + 1;

// Stages on the way. A die of an MI250X has fewer compute units, so more blocks on each: four, with which three blocks of
// four waves have registers there, are more bytes.
#if defined(__gfx90a__)
constexpr int kAhead = 4;
#else
constexpr int kAhead = 6;
#endif

// How a block brings a stage, for so many tiles of x.
template <int tiles> struct Shape {
  static constexpr int kWaves = tiles == 1 ? 2 : tiles;       // a tile each; of one tile both make it
  static constexpr bool kStagedX = tiles == 1;                // x goes through shared memory too
  static constexpr int kUnits = tiles == kMostTiles ? 1 : 2;  // of four k, in a piece: what a lane loads
  static constexpr int kLanes = kStage / (kUnits * kUnit);    // for a row
  static constexpr int kLoadRows = kWave * kWaves / kLanes;   // of a load by all lanes
  static constexpr int kLoads = kRows / kLoadRows;            // of a lane, for 16 rows
  static constexpr int kOperands = kStagedX ? 2 : 1, kPieces = kOperands * kLoads;
  static constexpr int kBuffers = 2;  // a stage is written while the one before it is read
  static_assert(kAhead * (kPieces + (kStagedX ? 0 : kSteps)) <= 63, "a wave can wait for so many loads");
  static_assert(kAhead % kBuffers == 0 && kPieces <= kSteps);
  // Rows are whole units of 8 bytes, as the loads of AMD's GPUs may be.
  typedef uint32_t Piece __attribute__((ext_vector_type(2 * kUnits), aligned(2 * kUnit)));
  using Shared = uint2[kBuffers][kOperands][kRows][kPitch];
};

// A lane's addresses in the first stage: of its pieces, and of its four k of a row of x.
template <int tiles> struct Sources {
  const uint16_t *piece[Shape<tiles>::kPieces], *x;

  __device__ __forceinline__ void advance(int64_t k) {
#pragma unroll
    for (auto &at : piece) at += k;
    x += k;
  }
};

// The compiler leaves the MFMA that made this sum where it is: it would move all behind the loads that take the registers
// of their operands, and copy these.
template <int tiles> __device__ __forceinline__ void hold([[maybe_unused]] M::Accumulators &sum) {
#if defined(__HIP_DEVICE_COMPILE__)
  if constexpr (tiles == kMostTiles) asm volatile("" : "+v"(sum));
  else asm volatile("" : "+a"(sum));
#endif
}

// chain = the steps of `k_end` k. Of a lane: `piece_k` in a stage and `piece_row` of a load are its piece's, `lane_k` is
// that of its four k in a step, `row` its row of a tile.
template <Type type, int tiles>
__device__ __forceinline__ void run(M::Accumulators &chain, Sources<tiles> from, int64_t k_end,
                                    typename Shape<tiles>::Shared &shared, int piece_row, int piece_k, int row,
                                    int lane_k) {
  using S = Shape<tiles>;
  constexpr int kRound = kAhead * kStage;
  typename S::Piece pieces[kAhead][S::kPieces];
  uint2 x_ahead[S::kStagedX ? 1 : kAhead][kSteps];
  if (k_end <= 0) return;

  // Loads of a stage of this round. Past the `end` of K the last k are read: a branch around a load would have the
  // compiler wait for all.
  auto fetch_piece = [&](int stage, int p) {
    pieces[stage % kAhead][p] = *reinterpret_cast<const typename S::Piece *>(from.piece[p] + stage * kStage);
  };
  auto fetch_step = [&](int stage, int s) {
    if constexpr (!S::kStagedX)
      x_ahead[stage % kAhead][s] = *reinterpret_cast<const uint2 *>(from.x + stage * kStage + s * M::kStep);
  };
  auto fetch_last_piece = [&](int stage, int p, int end) {
    int most = end - S::kUnits * kUnit - piece_k;
    make_opaque(most);  // else what follows from it, for every stage, is kept in registers
    const int k = stage * kStage;
    pieces[stage % kAhead][p] = *reinterpret_cast<const typename S::Piece *>(from.piece[p] + (k < most ? k : most));
  };
  auto fetch_last_step = [&](int stage, int s, int end) {
    if constexpr (!S::kStagedX) {
      int most = end - kUnit - lane_k;
      make_opaque(most);
      const int k = stage * kStage + s * M::kStep;
      x_ahead[stage % kAhead][s] = *reinterpret_cast<const uint2 *>(from.x + (k < most ? k : most));
    }
  };
  // A piece from its registers to shared memory, or zeros.
  auto put = [&](int stage, int p, uint32_t mask) {
    const auto piece = pieces[stage % kAhead][p];
    uint2 *const to =
        &shared[stage % S::kBuffers][p / S::kLoads][p % S::kLoads * S::kLoadRows + piece_row][piece_k / kUnit];
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) to[u] = make_uint2(piece[2 * u] & mask, piece[2 * u + 1] & mask);
  };
  uint2 w_now[kSteps], x_now[kSteps];
  auto take = [&](int stage, int s) {
    w_now[s] = shared[stage % S::kBuffers][0][row][s * (M::kStep / kUnit) + lane_k / kUnit];
    if constexpr (S::kStagedX)
      x_now[s] = shared[stage % S::kBuffers][S::kOperands - 1][row][s * (M::kStep / kUnit) + lane_k / kUnit];
  };
  auto take_all = [&](int stage) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) take(stage, s);
    keep_order();
  };
  auto multiply = [&](int stage, int s, uint32_t mask) {
    const uint2 x = S::kStagedX ? x_now[s] : x_ahead[S::kStagedX ? 0 : stage % kAhead][s];
    mfma<kRows, type>(chain, w_now[s], make_uint2(x.x & mask, x.y & mask));
    hold<tiles>(chain);
  };

  // Stages of this round, whose first is taken from shared memory and the next on the way. While a stage's first half is
  // multiplied the one behind it is put there, and while the other half is, taken from there.
  auto whole_round = [&](const auto &piece_behind, const auto &step_behind) {
#pragma unroll
    for (int stage = 0; stage < kAhead; ++stage) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int p = 2 * s; p < 2 * s + 2 && p < S::kPieces; ++p) {
          put(stage + 1, p, ~0u);
          piece_behind(stage + 1 + kAhead, p);
        }
        multiply(stage, s, ~0u);
        step_behind(stage + kAhead, s);
        if (s == kSteps / 2 - 1) {
          __syncthreads();
#pragma unroll
          for (int done = 0; done < kSteps / 2; ++done) take(stage + 1, done);
        }
        if (s >= kSteps / 2 && s % 2) {  // two, which are one instruction
          take(stage + 1, s - 1);
          take(stage + 1, s);
        }
        keep_order();
      }
    }
  };
  // As many and one more, of which `left` k are there. Both ways end in code of their own: where they met, the compiler
  // would copy what the loop has on the way.
  auto finish = [&](int left) {
#pragma unroll
    for (int stage = 0; stage <= kAhead; ++stage) {
      const int here = decided_late(left) - stage * kStage;
      if (here <= 0) break;
      const bool more = stage < kAhead && here > kStage;
      if (more)
#pragma unroll
        for (int p = 0; p < S::kPieces; ++p) put(stage + 1, p, piece_k < here - kStage ? ~0u : 0u);
      int lane_here = here - lane_k;
      make_opaque(lane_here);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (here <= s * M::kStep) break;
        multiply(stage, s, S::kStagedX || s * M::kStep < lane_here ? ~0u : 0u);
        keep_order();
      }
      if (stage == 0)
#pragma unroll
        for (int s = 0; s < kSteps; ++s) fetch_last_step(kAhead, s, left);
      if (more) {
        __syncthreads();
        take_all(stage + 1);
      }
    }
    __syncthreads();  // the next rows of w take the place of these
  };
  if (k_end < kRound + kStage) {
    const int left = int(k_end);
#pragma unroll
    for (int stage = 0; stage < kAhead; ++stage) {
#pragma unroll
      for (int p = 0; p < S::kPieces; ++p) fetch_last_piece(stage, p, left);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) fetch_last_step(stage, s, left);
      keep_order();
    }
#pragma unroll
    for (int p = 0; p < S::kPieces; ++p) {
      put(0, p, piece_k < left ? ~0u : 0u);
      fetch_last_piece(kAhead, p, left);
    }
    __syncthreads();
    take_all(0);
    finish(left);
  } else {
#pragma unroll
    for (int stage = 0; stage < kAhead; ++stage) {
#pragma unroll
      for (int p = 0; p < S::kPieces; ++p) fetch_piece(stage, p);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) fetch_step(stage, s);
      keep_order();
    }
#pragma unroll
    for (int p = 0; p < S::kPieces; ++p) {
      put(0, p, ~0u);
      fetch_piece(kAhead, p);
    }
    __syncthreads();
    take_all(0);
    if (k_end >= 2 * kRound + kStage) do {
        whole_round(fetch_piece, fetch_step);
        from.advance(kRound);
        k_end -= kRound;
      } while (k_end >= 2 * kRound + kStage);
    const int end = int(k_end);
    whole_round([&](int stage, int p) { fetch_last_piece(stage, p, end); },
                [&](int stage, int s) { fetch_last_step(stage, s, end); });
    from.advance(kRound);
    finish(end - kRound);
  }
#if defined(__gfx90a__)  // there results take the registers of steps past the break: each store would wait, for all
  wait_for_loads();
#endif
}

// A block has `rows` of w, 4, 8 or 16: of fewer than 16 it brings copies.
template <Type type, int tiles>
__global__ void __launch_bounds__(kWave *Shape<tiles>::kWaves)
    skinny_mfma_chain_kernel(const __grid_constant__ Gemm problem, int rows) {
  if constexpr (kHasMfma) {
    using S = Shape<tiles>;
    __shared__ typename S::Shared shared;
    const int thread = int(threadIdx.x), tile = thread / kWave % tiles, lane = thread % kWave;
    const int piece_row = thread / S::kLanes, piece_k = thread % S::kLanes * (S::kUnits * kUnit);
    const int lane_k = lane / kRows * kUnit, column = lane / kRows * kQuad;  // of this lane's quad, in the block's rows
    const int row = tile * kRows + lane % kRows;
    const int64_t step = int64_t(gridDim.x) * rows;
    loaded_by_now(int(gridDim.x));

    for (int64_t n0 = int64_t(blockIdx.x) * rows; n0 < problem.n; n0 += step) {
      const int64_t n = n0 + column;
      const int count =
          thread < tiles * kWave && row < int(problem.m) && column < rows ? clamped(problem.n - n, kQuad) : 0;
      // Rows past N are copies of the last one, rows past M of the first; their sums are never stored.
      auto row_of_x = [&](int of) {
        return reinterpret_cast<const uint16_t *>(problem.a.data) + (of < problem.m ? of : 0) * problem.a.row_stride;
      };
      Sources<tiles> from;
#pragma unroll
      for (int i = 0; i < S::kLoads; ++i) {
        const int of = i * S::kLoadRows + piece_row;
        const int64_t w_row = n0 + (of & (rows - 1));
        from.piece[i] = reinterpret_cast<const uint16_t *>(problem.b.data) +
                        (w_row < problem.n ? w_row : problem.n - 1) * problem.b.col_stride + piece_k;
        if constexpr (S::kStagedX) from.piece[S::kLoads + i] = row_of_x(of) + piece_k;
      }
      from.x = row_of_x(row) + lane_k;

      M::Accumulators total = {};
      if (problem.accumulate && count > 0) {
        const float *at = reinterpret_cast<const float *>(problem.out.data) + row * problem.out.row_stride + n;
#pragma unroll
        for (int e = 0; e < kQuad; ++e)
          if (e < count) total[e] = at[e];
      }
      run<type, tiles>(total, from, problem.k, shared, piece_row, piece_k, lane % kRows, lane_k);
      if (problem.k > 0) total += 0.0f;
      if (count > 0) {
        if (problem.bias.data) add_bias(total, problem, row, n, count);
        store_quad(total, problem, row, n, count);
      }
    }
  }
}

}  // namespace

pydet_status skinny_mfma_chain(const Gemm &g) {
  return with_tiles(g, [&](auto type, auto tiles) {
    const int rows = wave_rows(g, 1);
    const int64_t blocks = divide_up(g.n, rows);
    Launch shape = {"skinny_gemm_mfma", static_cast<gpu_stream>(g.stream),
                    dim3(unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks)), dim3(kWave * Shape<tiles>::kWaves)};
    return launch(shape, skinny_mfma_chain_kernel<type, tiles>, g, rows);
  });
}

}  // namespace pydet
