// y = round(chain_k(x, w) + bias) for few rows of x and many weights, on AMD's matrix cores: arithmetic cdna3 on
// gfx942, cdna2 on gfx90a.
//
//   chain: one accumulator, k ascending in MFMAs of 16x16x16, from +0 or y; or chains of k_chunk, their sums added
//   ascending. +0 is added at the end of every chain (gemm_mfma.cu)
//
// A wave makes 16 rows of w (columns of y) for all of x, up to 128 rows. Both operands go from memory straight into the
// registers of their MFMA, 8 bytes a lane, 6 to 28 MFMA steps ahead: about 60 loads are always on the way, which is what
// the counter of a wave holds. Nothing is shared, so nothing waits for another wave; x comes from the caches, which a
// block's waves, of different rows of w, ask for the same at about the same time. A block is 4 waves where N gives every
// compute unit one, else a single wave. With k_chunk a block's waves make chunks of the same 16 rows side by side, and
// the first wave adds them in order. K is a multiple of 8 and rows are aligned; gemm_mfma.cu takes the rest. No chain is
// split, so fast mode has nothing to gain here and is the same.

#include "gpu/kernels.h"
#include "gpu/amd/mfma.h"

namespace pydet {
namespace {

constexpr int kRows = 16, kMostTiles = 8;  // rows of x in a tile, and tiles
constexpr int kPiece = 8;                  // what K is a multiple of
using M = Mfma<kRows>;

// Steps of 16 k on the way: a load of w and one of each tile of x each, of the 63 that a wave can wait for.
template <int tiles> constexpr int kAhead = tiles == 1 ? 28 : 60 / (1 + tiles);
// Waves that make chunks side by side: their sums meet in shared memory.
template <int tiles> constexpr int kChunkWaves = tiles == 1 ? 8 : 4;  // more leave too few registers for more tiles

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
template <Type type, int tiles>
__device__ __forceinline__ void run(M::Accumulators (&chain)[tiles], Sources<tiles> from, int64_t k_end, int lane_k) {
  constexpr int kSteps = kAhead<tiles>, kRound = kSteps * M::kStep;
  Fragments<tiles> steps[kSteps];
  if (k_end <= 0) return;
  auto multiply = [&](const Fragments<tiles> &step, uint32_t mask) {
#pragma unroll
    for (int i = 0; i < tiles; ++i)
      mfma<kRows, type>(chain[i], make_uint2(step.x[i].x & mask, step.x[i].y & mask),
                        make_uint2(step.w.x & mask, step.w.y & mask));
  };
  // The last, broken round has `left` k, from `start` on. Past its end the first k are read, and replaced by zeros where
  // they are used: a branch around a load would have the compiler wait for all.
  auto fetch_last = [&](int s, int start, int left) {
    steps[s].fetch(from, s * M::kStep + lane_k < left ? start + s * M::kStep : -lane_k);
    keep_order();
  };
  int left;
  if (k_end >= kRound) {
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
    left = int(k_end) - kRound;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      multiply(steps[s], ~0u);
      fetch_last(s, kRound, left);
    }
  } else {
    left = int(k_end);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) fetch_last(s, 0, left);
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (left <= s * M::kStep) break;
    multiply(steps[s], s * M::kStep + lane_k < left ? ~0u : 0u);
    keep_order();
  }
#if defined(__gfx90a__)  // there results take the registers of steps past the break: each store would wait, for all
  wait_for_loads();
#endif
}

// `waves` of a block: of rows of w, or of chunks (`folds`). A wave has `rows` of w, 4, 8 or 16: of fewer than 16 its
// lanes hold copies.
template <Type type, int tiles, int waves, bool folds>
__global__ void __launch_bounds__(kWave *waves) skinny_mfma_kernel(const __grid_constant__ Gemm problem, int rows) {
  if constexpr (kHasMfma) {
    __shared__ float4 sums[folds ? waves : 1][folds ? tiles : 1][kWave];
    const int wave = int(threadIdx.x) / kWave, lane = int(threadIdx.x) % kWave;
    const int lane_k = lane / kRows * kUnit;
    const int block_rows = folds ? rows : rows * waves;

    for (int64_t job = blockIdx.x; job * block_rows < problem.n; job += gridDim.x) {
      const int64_t n = job * block_rows + (folds ? 0 : wave * rows) + (lane & (rows - 1));
      const bool in_y = n < problem.n && lane % kRows < rows;
      // Rows past N are copies of the last one, rows past M of the first; their sums are never stored.
      Sources<tiles> from;
      from.w = reinterpret_cast<const uint16_t *>(problem.b.data) +
               (n < problem.n ? n : problem.n - 1) * problem.b.col_stride + lane_k;
#pragma unroll
      for (int i = 0; i < tiles; ++i) {
        const int row = i * kRows + lane % kRows;
        from.x[i] = reinterpret_cast<const uint16_t *>(problem.a.data) +
                    (row < problem.m ? row : 0) * problem.a.row_stride + lane_k;
      }

      // Calls f(value's indices, inside, row) for every element that this lane holds.
      auto each = [&](const auto &f) {
        int thread = int(threadIdx.x);
#pragma unroll
        for (int i = 0; i < tiles; ++i)
#pragma unroll
          for (int q = 0; q < M::kCount; ++q) {
            make_opaque(thread);
            const int row = i * kRows + mfma_row<kRows>(thread % kWave, q);
            f(i, q, in_y && row < problem.m, row);
          }
      };
      M::Accumulators total[tiles] = {};
      if (problem.accumulate)
        each([&](int i, int q, bool inside, int row) {
          if (inside) total[i][q] = load_f32(problem.out.data, Type::f32, row * problem.out.row_stride + n);
        });

      if constexpr (!folds) {
        run<type>(total, from, problem.k, lane_k);
#pragma unroll
        for (int i = 0; i < tiles; ++i)
          if (problem.k > 0) total[i] += 0.0f;
      } else {
        for (int64_t first = 0; first < problem.k; first += waves * problem.k_chunk) {
          const int64_t mine = first + wave * problem.k_chunk, left = problem.k - mine;
          if (left > 0) {
            M::Accumulators chain[tiles] = {};
            Sources<tiles> here = from;
            here.advance(mine);
            run<type>(chain, here, left < problem.k_chunk ? left : problem.k_chunk, lane_k);
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
              chain[i] += 0.0f;
              sums[wave][i][lane] = make_float4(chain[i][0], chain[i][1], chain[i][2], chain[i][3]);
            }
          }
          __syncthreads();
          if (wave == 0)
            for (int w = 0; w < waves && first + w * problem.k_chunk < problem.k; ++w)
#pragma unroll
              for (int i = 0; i < tiles; ++i) {
                const float4 sum = sums[w][i][lane];
                total[i] += M::Accumulators{sum.x, sum.y, sum.z, sum.w};
              }
          __syncthreads();  // the next chunks' sums take these ones' places
        }
        if (wave > 0) continue;
      }

      if (problem.bias.data)
        with_type<kUnscaledTypes>(problem.bias.type, [&](auto bias_type) {
          each([&](int i, int q, bool inside, int row) {
            float added = 0.0f;
            if (inside)
              added =
                  load_f32(problem.bias.data, bias_type, row * problem.bias.row_stride + n * problem.bias.col_stride);
            total[i][q] += added;
          });
        });
      with_type<kUnscaledTypes>(problem.out.type, [&](auto out_type) {
        each([&](int i, int q, bool inside, int row) {
          if (inside) store_rounded(problem.out.data, out_type, row * problem.out.row_stride + n, total[i][q]);
        });
      });
    }
  }
}

// ---- Launch ------------------------------------------------------------------------------------------------------

// Whether `bytes` along k are aligned in every row.
bool is_aligned(const Matrix &matrix, int64_t rows, int64_t stride, int bytes) {
  return reinterpret_cast<uintptr_t>(matrix.data) % unsigned(bytes) == 0 &&
         (rows == 1 || stride * size_of(matrix.type) % bytes == 0);
}

// Rows of w for a wave: fewer where that gives more compute units work, but not fewer than half of what it reads of x.
int wave_rows(const Gemm &g) {
  const int units = gpu_multiprocessors(g.device.id);
  int rows = kRows;
  while (rows > 4 && rows >= g.m && divide_up(g.n, rows / 2) <= units) rows /= 2;
  return rows;
}

template <Type type, int tiles, int waves, bool folds> pydet_status launch_waves(const Gemm &g) {
  constexpr int64_t kMaxBlocks = 1 << 20;  // more rows of w than that are walked in turns
  const int rows = waves > 1 && !folds ? kRows : wave_rows(g), block_rows = folds ? rows : rows * waves;
  const int64_t blocks = (g.n + block_rows - 1) / block_rows;
  Launch shape = {"skinny_gemm_mfma", static_cast<gpu_stream>(g.stream),
                  dim3(unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks)), dim3(kWave * waves)};
  return launch(shape, skinny_mfma_kernel<type, tiles, waves, folds>, g, rows);
}

template <Type type, int tiles> pydet_status launch_tiles(const Gemm &g) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error("skinny_gemm_mfma", guard.error());
  if (g.k_chunk) {
    Gemm chunked = g;  // a chunk of more than K is one of K, and no multiple of it overflows
    chunked.k_chunk = g.k_chunk < g.k ? g.k_chunk : (g.k + kChunkMultiple - 1) / kChunkMultiple * kChunkMultiple;
    return launch_waves<type, tiles, kChunkWaves<tiles>, true>(chunked);
  }
  const bool many = g.n / (4 * kRows) >= gpu_multiprocessors(g.device.id);
  return many ? launch_waves<type, tiles, 4, false>(g) : launch_waves<type, tiles, 1, false>(g);
}

template <Type type> pydet_status launch_type(const Gemm &g) {
  if (g.m <= kRows) return launch_tiles<type, 1>(g);
  if (g.m <= 2 * kRows) return launch_tiles<type, 2>(g);
  if (g.m <= 4 * kRows) return launch_tiles<type, 4>(g);
  return launch_tiles<type, kMostTiles>(g);
}

}  // namespace

bool skinny_mfma_takes(const Gemm &g) {
  return g.m <= kMostTiles * kRows && g.k % kPiece == 0 && g.batch.count == 1 && g.a.col_stride == 1 &&
         g.b.row_stride == 1 && is_aligned(g.a, g.m, g.a.row_stride, kPiece * 2) &&
         is_aligned(g.b, g.n, g.b.col_stride, kUnit * 2);
}

pydet_status skinny_mfma(const Gemm &g) {
  return with_type<kHalfTypes>(g.a.type, [&](auto type) { return launch_type<type>(g); });
}

}  // namespace pydet
