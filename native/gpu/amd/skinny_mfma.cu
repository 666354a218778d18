// y = round(sum of chunks of k + bias) for few rows of x and many weights, on AMD's matrix cores: arithmetic cdna3 on
// gfx942, cdna2 on gfx90a. Without chunks: skinny_mfma_chain.cu.
//
//   chain: one accumulator, a chunk's k ascending in MFMAs of 16x16x16, from +0; the sums of chunks are added ascending
//   to +0 or y. +0 is added at the end of every chain (gemm_mfma.cu)
//
// A wave makes 16 rows of w (columns of y) for all of x, up to 128 rows. Both operands go from memory straight into the
// registers of their MFMA, 8 bytes a lane, 6 to 16 MFMA steps ahead. x comes from the caches, which a block's waves, of
// different chunks, share with other blocks. w is the left operand, so that a lane ends with four neighbours of y. A
// block's waves make chunks of the same 16 rows side by side, and the first wave adds them in order; or, where chunks
// are many, N is small and the caller gave a workspace, every chunk has a block, and a second kernel adds them. K is a
// multiple of 8 and rows are aligned; gemm_mfma.cu takes the rest. No chain is split, so fast mode has nothing to gain
// here and is the same.

#include "gpu/amd/skinny_mfma.h"

namespace pydet {
namespace {

constexpr int kPiece = 8;  // what K is a multiple of

// Steps of 16 k on the way: a load of w and one of each tile of x each, of the 63 that a wave can wait for. Other waves
// are beside it: fewer than that, which a chunk of 512 is whole rounds of but for the most tiles.
template <int tiles> constexpr int kAhead = tiles <= 2 ? 16 : tiles == 4 ? 8 : 6;
// Waves that make chunks side by side: their sums meet in shared memory.
template <int tiles> constexpr int kChunkWaves = tiles == kMostTiles ? 4 : 8;  // more leave too little shared memory

// A block a chunk is offered for more chunks than the blocks of Chunks::beside make in one round, or two where rows are
// few: below, the second kernel's launch is not paid for (estimated: tools/amd/limits.md).
constexpr int64_t least_apart(int64_t m) { return 1 + (m <= kRows ? 16 : m <= 4 * kRows ? 8 : 4); }
constexpr int64_t kMostApart = 2560;  // rows of w: for more, there is work for every compute unit as it is
constexpr int kJoinThreads = 64;

// Where the sums of chunks meet.
enum class Chunks {
  beside,  // a block's waves make them, in shared memory
  apart    // a block makes one, in the workspace: [chunk][row of x][n], n rounded up to whole waves
};

constexpr PYDET_HD int64_t whole_waves(int64_t n) { return (n + kRows - 1) / kRows * kRows; }

// A lane's addresses: its four k of the first step in a row of w and in a row of every tile of x.
template <int tiles> struct Sources {
  const uint16_t *w, *x[tiles];

  __device__ __forceinline__ void advance(int64_t k) {
    w += k;
#pragma unroll
    for (int i = 0; i < tiles; ++i) x[i] += k;
  }
};

// What a step multiplies.
template <int tiles> struct Fragments {
  uint2 w, x[tiles];

  __device__ __forceinline__ void fetch(const Sources<tiles> &from, int64_t k) {
    w = *reinterpret_cast<const uint2 *>(from.w + k);
#pragma unroll
    for (int i = 0; i < tiles; ++i) x[i] = *reinterpret_cast<const uint2 *>(from.x[i] + k);
  }
};

// chain = the steps of `k_end` k from `from` on, a lane's own `lane_k`.
template <Type type, int kSteps, int tiles>
__device__ __forceinline__ void run(M::Accumulators (&chain)[tiles], Sources<tiles> from, int64_t k_end, int lane_k) {
  constexpr int kRound = kSteps * M::kStep;
  Fragments<tiles> steps[kSteps];
  if (k_end <= 0) return;
  auto multiply = [&](const Fragments<tiles> &step, uint32_t mask) {
#pragma unroll
    for (int i = 0; i < tiles; ++i)
      mfma<kRows, type>(chain[i], make_uint2(step.w.x & mask, step.w.y & mask),
                        make_uint2(step.x[i].x & mask, step.x[i].y & mask));
  };
  // The last, broken round has `left` k, from `start` on. Past its end the last k are read, and replaced by zeros where
  // they are used: a branch around a load would have the compiler wait for all.
  auto fetch_last = [&](int s, int start, int left) {
    int most = start + left - kUnit - lane_k;
    make_opaque(most);  // else what follows from it, for every step, is kept in registers
    const int k = start + s * M::kStep;
    steps[s].fetch(from, k < most ? k : most);
    keep_order();
  };
  // Both ways end in code of their own: where they met, the compiler would copy what the loop has on the way.
  auto finish = [&](int left) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (left <= s * M::kStep) break;
      multiply(steps[s], s * M::kStep + lane_k < left ? ~0u : 0u);
      keep_order();
    }
  };
  if (k_end < kRound) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) fetch_last(s, 0, int(k_end));
    finish(int(k_end));
  } else {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) steps[s].fetch(from, s * M::kStep);
    if (k_end >= 2 * kRound) do {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          multiply(steps[s], ~0u);
          steps[s].fetch(from, kRound + s * M::kStep);
          keep_order();
        }
        from.advance(kRound);
        k_end -= kRound;
      } while (k_end >= 2 * kRound);
    const int left = int(k_end) - kRound;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      multiply(steps[s], ~0u);
      fetch_last(s, kRound, left);
    }
    finish(left);
  }
#if defined(__gfx90a__)  // there results take the registers of steps past the break: each store would wait, for all
  wait_for_loads();
#endif
}

// `waves` of a block make chunks side by side, of the same `rows` of w, 4, 8 or 16: of fewer than 16 lanes hold copies.
template <Type type, int tiles, int waves, Chunks chunks>
__global__ void __launch_bounds__(kWave *waves) skinny_mfma_kernel(const __grid_constant__ Gemm problem, int rows) {
  if constexpr (kHasMfma) {
    constexpr bool kBeside = chunks == Chunks::beside;
    constexpr int kSteps = kAhead<tiles>;
    __shared__ float4 sums[kBeside ? waves : 1][kBeside ? tiles : 1][kWave];
    const int wave = int(threadIdx.x) / kWave, lane = int(threadIdx.x % kWave);
    const int lane_k = lane / kRows * kUnit;
    const int64_t step = int64_t(gridDim.x) * rows, chunk = kBeside ? 0 : blockIdx.y;
    const int column = lane / kRows * kQuad;  // of this lane's quads, in its wave's rows of w
    loaded_by_now(int(gridDim.x));

    for (int64_t n0 = int64_t(blockIdx.x) * rows; n0 < problem.n; n0 += step) {
      const int64_t n = n0 + column;
      const int count = column < rows ? clamped(problem.n - n, kQuad) : 0;
      const int64_t w_row = n0 + (lane & (rows - 1));
      // Rows past N are copies of the last one, rows past M of the first; their sums are never stored.
      Sources<tiles> from;
      from.w = reinterpret_cast<const uint16_t *>(problem.b.data) +
               (w_row < problem.n ? w_row : problem.n - 1) * problem.b.col_stride + lane_k;
#pragma unroll
      for (int i = 0; i < tiles; ++i) {
        const int row = i * kRows + lane % kRows;
        from.x[i] = reinterpret_cast<const uint16_t *>(problem.a.data) +
                    (row < problem.m ? row : 0) * problem.a.row_stride + lane_k;
      }

      // Calls f(tile, row of x) for every tile of which this lane has elements: `count` neighbours in y, from n on.
      auto each = [&](const auto &f) {
        int place = lane % kRows;
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
          make_opaque(place);
          const int row = i * kRows + place;
          if (row < int(problem.m) && count > 0) f(i, row);
        }
      };
      M::Accumulators total[tiles] = {};
      if (kBeside && problem.accumulate) {
        each([&](int i, int row) {
          const float *at = reinterpret_cast<const float *>(problem.out.data) + row * problem.out.row_stride + n;
#pragma unroll
          for (int e = 0; e < kQuad; ++e)
            if (e < count) total[i][e] = at[e];
        });
        wait_for_loads();  // else each sum's first use waits, for what is on the way by then
      }

      if constexpr (!kBeside) {
        const int64_t start = chunk * problem.k_chunk, left = problem.k - start;
        from.advance(start);
        run<type, kSteps>(total, from, left < problem.k_chunk ? left : problem.k_chunk, lane_k);
        float *const sums_of = static_cast<float *>(problem.workspace) + chunk * problem.m * whole_waves(problem.n);
        each([&](int i, int row) {
          const M::Accumulators sum = total[i] + 0.0f;
          *reinterpret_cast<float4 *>(sums_of + row * whole_waves(problem.n) + n) =
              make_float4(sum[0], sum[1], sum[2], sum[3]);
        });
        continue;
      } else {
        for (int64_t start = 0; start < problem.k; start += waves * problem.k_chunk) {
          const int64_t mine = start + wave * problem.k_chunk, left = problem.k - mine;
          if (left > 0) {
            M::Accumulators chain[tiles] = {};
            Sources<tiles> here = from;
            here.advance(mine);
            run<type, kSteps>(chain, here, left < problem.k_chunk ? left : problem.k_chunk, lane_k);
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
              chain[i] += 0.0f;
              sums[wave][i][lane] = make_float4(chain[i][0], chain[i][1], chain[i][2], chain[i][3]);
            }
          }
          __syncthreads();
          if (wave == 0)
            for (int w = 0; w < waves && start + w * problem.k_chunk < problem.k; ++w)
#pragma unroll
              for (int i = 0; i < tiles; ++i) {
                const float4 sum = sums[w][i][lane];
                total[i] += M::Accumulators{sum.x, sum.y, sum.z, sum.w};
              }
          __syncthreads();  // the next chunks' sums take these ones' places
        }
        if (wave > 0) continue;
      }

      if (problem.bias.data) each([&](int i, int row) { add_bias(total[i], problem, row, n, count); });
      each([&](int i, int row) { store_quad(total[i], problem, row, n, count); });
    }
  }
}

// The end of Chunks::apart: a thread adds the sums of all chunks of a quad of y.
__global__ void __launch_bounds__(kJoinThreads) join_chunks_kernel(const __grid_constant__ Gemm problem, int chunks) {
  constexpr int kAtOnce = 16;  // loads on the way
  const int64_t whole = whole_waves(problem.n), part = problem.m * whole, row = blockIdx.y;
  const int64_t n = (int64_t(blockIdx.x) * kJoinThreads + threadIdx.x) * kQuad;
  if (n >= problem.n) return;
  const int count = clamped(problem.n - n, kQuad);
  const float *const sums = static_cast<const float *>(problem.workspace) + row * whole + n;
  M::Accumulators total = {};
  if (problem.accumulate) {
    const float *const out = reinterpret_cast<const float *>(problem.out.data) + row * problem.out.row_stride + n;
#pragma unroll
    for (int e = 0; e < kQuad; ++e)
      if (e < count) total[e] = out[e];
    wait_for_loads();
  }
  for (int first = 0; first < chunks; first += kAtOnce) {
    float4 found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      found[i] = *reinterpret_cast<const float4 *>(sums + (first + i < chunks ? first + i : chunks - 1) * part);
    keep_order();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i < chunks) total += M::Accumulators{found[i].x, found[i].y, found[i].z, found[i].w};
  }
  if (problem.bias.data) add_bias(total, problem, row, n, count);
  store_quad(total, problem, row, n, count);
}

// ---- Launch ------------------------------------------------------------------------------------------------------

// Whether `bytes` along k are aligned in every row.
bool is_aligned(const Matrix &matrix, int64_t rows, int64_t stride, int bytes) {
  return reinterpret_cast<uintptr_t>(matrix.data) % unsigned(bytes) == 0 &&
         (rows == 1 || stride * size_of(matrix.type) % bytes == 0);
}

constexpr int64_t kMaxApart = (1 << 16) - 1;  // blocks along a grid's y

template <Type type, int tiles, int waves, Chunks chunks> pydet_status launch_waves(const Gemm &g) {
  const int64_t apart = chunks == Chunks::apart ? divide_up(g.k, g.k_chunk) : 1;
  const int rows = wave_rows(g, apart);
  const int64_t blocks = divide_up(g.n, rows);
  Launch shape = {"skinny_gemm_mfma", static_cast<gpu_stream>(g.stream),
                  dim3(unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks), unsigned(apart)), dim3(kWave * waves)};
  return launch(shape, skinny_mfma_kernel<type, tiles, waves, chunks>, g, rows);
}

}  // namespace

bool skinny_mfma_takes(const Gemm &g) {
  return g.m <= kMostTiles * kRows && g.k % kPiece == 0 && g.batch.count == 1 && g.a.col_stride == 1 &&
         g.b.row_stride == 1 && is_aligned(g.a, g.m, g.a.row_stride, kPiece * 2) &&
         is_aligned(g.b, g.n, g.b.col_stride, kUnit * 2);
}

pydet_status skinny_mfma(const Gemm &g) {
  if (g.k_chunk == 0) return skinny_mfma_chain(g);
  Gemm chunked = g;  // a chunk of more than K is one of K, and no multiple of it overflows
  chunked.k_chunk = g.k_chunk < g.k ? g.k_chunk : (g.k + kChunkMultiple - 1) / kChunkMultiple * kChunkMultiple;
  return with_tiles(
      g, [&](auto type, auto tiles) { return launch_waves<type, tiles, kChunkWaves<tiles>, Chunks::beside>(chunked); });
}

// ---- Chunks apart ------------------------------------------------------------------------------------------------

uint64_t skinny_mfma_workspace(int64_t m, int64_t n, int64_t k, int64_t k_chunk) {
  constexpr uint64_t kMostBytes = 64 << 20;
  if (k_chunk == 0 || m > kMostTiles * kRows || n > kMostApart || k % kPiece != 0) return 0;
  const int64_t chunks = (k - 1) / k_chunk + 1;
  if (chunks < least_apart(m) || chunks > kMaxApart) return 0;
  const uint64_t part = uint64_t(m * whole_waves(n)) * sizeof(float);
  return uint64_t(chunks) <= kMostBytes / part ? uint64_t(chunks) * part : 0;
}

bool skinny_mfma_chunks_takes(const Gemm &g) {
  const uint64_t wanted = skinny_mfma_workspace(g.m, g.n, g.k, g.k_chunk);
  return skinny_mfma_takes(g) && wanted > 0 && g.workspace_size >= wanted;
}

// Without it most units would have no block, or half of them where more rows share what is read of w.
bool skinny_mfma_chunks_prefers(const Gemm &g) {
  return divide_up(g.n, kRows) * (g.m <= kRows ? 4 : 2) <= gpu_multiprocessors(g.device.id);
}

pydet_status skinny_mfma_chunks(const Gemm &g) {
  return with_tiles(g, [&](auto type, auto tiles) {
    const pydet_status status = launch_waves<type, tiles, 1, Chunks::apart>(g);
    if (status != PYDET_OK) return status;
    Launch shape = {"skinny_gemm_mfma_chunks", static_cast<gpu_stream>(g.stream),
                    dim3(unsigned(divide_up(g.n, kQuad * kJoinThreads)), unsigned(g.m)), dim3(kJoinThreads)};
    return launch(shape, join_chunks_kernel, g, int(divide_up(g.k, g.k_chunk)));
  });
}

}  // namespace pydet
