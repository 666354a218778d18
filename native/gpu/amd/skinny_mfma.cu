// y = round(chain_k(x, w) + bias) for few rows of x and many weights, on AMD's matrix cores: arithmetic cdna3 on
// gfx942, cdna2 on gfx90a.
//
//   chain: one accumulator, k ascending in MFMAs of 16x16x16, from +0 or y; or chains of k_chunk, their sums added
//   ascending. +0 is added at the end of every chain (gemm_mfma.cu)
//
// A wave makes 16 rows of w (columns of y) for all of x, up to 128 rows. Its weights go from memory into the registers
// of their MFMA, an entire stage of 64 to 256 k ahead: each is loaded once, by one lane. x is shared by the block's
// waves through two stages in shared memory, 8 or 16 KiB each. A block is 4 waves where N gives every compute unit one,
// else a single wave. K is a multiple of 8 and rows are aligned; gemm_mfma.cu takes the rest. No chain is split, so fast
// mode has nothing to gain here and is the same.

#include "gpu/kernels.h"
#include "gpu/amd/mfma.h"

namespace pydet {
namespace {

constexpr int kRows = 16, kMostTiles = 8;  // rows of x in a tile, and tiles
template <int tiles> constexpr int kStageElements = tiles == 1 ? 4096 : 8192;  // of x
constexpr int kPiece = 8;                  // elements in 16 bytes
using M = Mfma<kRows>;

// Unit `unit` of row `row` of a stage of x: 16 rows of one unit share no bank.
template <int row_units> __device__ __forceinline__ int place(int row, int unit) {
  static_assert(row_units % kRows == 0, "the swizzle stays in the row");
  return row * row_units + unit / kRows * kRows + (unit ^ row) % kRows;
}

template <Type type, int tiles, int waves>
__global__ void __launch_bounds__(kWave *waves, 2) skinny_mfma_kernel(const __grid_constant__ Gemm problem) {
  if constexpr (kHasMfma) {
    constexpr int kThreads = kWave * waves;
    constexpr int kStageK = kStageElements<tiles> / (kRows * tiles), kSteps = kStageK / M::kStep;
    constexpr int kRowUnits = kStageK / kUnit, kRowPieces = kStageK / kPiece;
    constexpr int kPieces = kStageElements<tiles> / kPiece / kThreads;  // of a thread
    __shared__ uint2 stages[2][kStageElements<tiles> / kUnit];
    const int wave = int(threadIdx.x) / kWave, lane = int(threadIdx.x) % kWave;
    const int64_t stage_count = (problem.k + kStageK - 1) / kStageK;
    const bool folds = problem.k_chunk > 0;
    const auto *x = reinterpret_cast<const uint16_t *>(problem.a.data);
    const auto *w = reinterpret_cast<const uint16_t *>(problem.b.data);
    // k from the start of a stage to K.
    auto k_left = [&](int64_t stage) { return clamped(problem.k - stage * kStageK, kStageK); };

    for (int64_t job = blockIdx.x; job * waves * kRows < problem.n; job += gridDim.x) {
      const int64_t n = (job * waves + wave) * kRows + lane % kRows;
      const bool in_y = n < problem.n;
      // Rows past N are copies of the last one, and never stored.
      const uint16_t *w_row = w + (in_y ? n : problem.n - 1) * problem.b.col_stride;

      // What lies outside is read from the stage's first k, or x's first row, and replaced by zeros where it is used.
      auto each_piece = [&](int64_t stage, const auto &f) {
        int thread = int(threadIdx.x);
        make_opaque(thread, stage);
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          f(i, (thread + i * kThreads) / kRowPieces, (thread + i * kThreads) % kRowPieces * kPiece);
      };
      uint4 x_next[kPieces];
      auto fetch_x = [&](int64_t stage) {
        const int left = k_left(stage);
        each_piece(stage, [&](int i, int row, int k) {
          const int64_t at = (row < problem.m ? row : 0) * problem.a.row_stride + stage * kStageK + (k < left ? k : 0);
          x_next[i] = *reinterpret_cast<const uint4 *>(x + at);
        });
      };
      auto deposit_x = [&](int64_t stage) {
        const int left = k_left(stage);
        uint2 *to = stages[stage % 2];
        each_piece(stage, [&](int i, int row, int k) {
          const uint32_t mask = row < problem.m && k < left ? ~0u : 0u;
          to[place<kRowUnits>(row, k / kUnit)] = make_uint2(x_next[i].x & mask, x_next[i].y & mask);
          to[place<kRowUnits>(row, k / kUnit + 1)] = make_uint2(x_next[i].z & mask, x_next[i].w & mask);
        });
        __syncthreads();
      };
      uint2 weights[kSteps];  // of this stage; of the next, where its MFMAs have been
      const int lane_k = lane / kRows * kUnit;
      auto fetch_w = [&](int s, const uint16_t *from, int left) {
        const int k = s * M::kStep + lane_k;
        weights[s] = *reinterpret_cast<const uint2 *>(from + (k < left ? k : 0));
      };

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
      M::Accumulators chain[tiles] = {}, sum[tiles] = {};
      if (problem.accumulate)
        each([&](int i, int q, bool inside, int row) {
          float start = 0.0f;
          if (inside) start = load_f32(problem.out.data, Type::f32, row * problem.out.row_stride + n);
          chain[i][q] = folds ? 0.0f : start;
          sum[i][q] = folds ? start : 0.0f;
        });

      if (stage_count > 0) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) fetch_w(s, w_row, k_left(0));
        fetch_x(0);
        deposit_x(0);
      }
      int64_t chunk_left = problem.k_chunk;
      for (int64_t stage = 0; stage < stage_count; ++stage) {
        const bool more = stage + 1 < stage_count;
        if (more) fetch_x(stage + 1);
        const uint2 *x_stage = stages[stage % 2];
        const uint16_t *next = w_row + (more ? (stage + 1) * kStageK : 0);
        const int left = k_left(stage), next_left = more ? k_left(stage + 1) : 0;
        // `inner`: this stage and the next are whole, and there are no chunks.
        auto walk = [&](auto inner) {
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
            const uint32_t mask = inner || s * M::kStep + lane_k < left ? ~0u : 0u;
            const uint2 weight = make_uint2(weights[s].x & mask, weights[s].y & mask);
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
              const int unit = s * (M::kStep / kUnit) + lane / kRows;
              mfma<kRows, type>(chain[i], x_stage[place<kRowUnits>(i * kRows + lane % kRows, unit)], weight);
            }
            fetch_w(s, next, inner ? kStageK : next_left);
            if (inner || !folds) continue;
            chunk_left -= M::kStep;
            if (chunk_left > 0 && problem.k - stage * kStageK > (s + 1) * M::kStep) continue;
            chunk_left = problem.k_chunk;
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
              sum[i] += chain[i] + 0.0f;
              chain[i] = 0.0f;
            }
          }
        };
        if (!folds && next_left == kStageK) walk(std::true_type{});
        else walk(std::false_type{});
        // The stage filled now was last read before the barrier that ended the fill before.
        if (more) deposit_x(stage + 1);
      }
      __syncthreads();  // the next rows' first stage overwrites one that may still be read

#pragma unroll
      for (int i = 0; i < tiles; ++i) {
        if (problem.k > 0) chain[i] += 0.0f;
        if (folds) chain[i] = sum[i];
      }
      if (problem.bias.data)
        with_type<kUnscaledTypes>(problem.bias.type, [&](auto bias_type) {
          each([&](int i, int q, bool inside, int row) {
            float added = 0.0f;
            if (inside)
              added = load_f32(problem.bias.data, bias_type,
                               row * problem.bias.row_stride + n * problem.bias.col_stride);
            chain[i][q] += added;
          });
        });
      with_type<kUnscaledTypes>(problem.out.type, [&](auto out_type) {
        each([&](int i, int q, bool inside, int row) {
          if (inside) store_rounded(problem.out.data, out_type, row * problem.out.row_stride + n, chain[i][q]);
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

template <Type type, int tiles, int waves> pydet_status launch_waves(const Gemm &g) {
  constexpr int64_t kMaxBlocks = 1 << 20;  // more rows of w than that are walked in turns
  const int64_t blocks = (g.n + kRows * waves - 1) / (kRows * waves);
  Launch shape = {"skinny_gemm_mfma", static_cast<gpu_stream>(g.stream),
                  dim3(unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks)), dim3(kWave * waves)};
  return launch(shape, skinny_mfma_kernel<type, tiles, waves>, g);
}

template <Type type, int tiles> pydet_status launch_tiles(const Gemm &g) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error("skinny_gemm_mfma", guard.error());
  const bool many = g.n / (4 * kRows) >= gpu_multiprocessors(g.device.id);
  return many ? launch_waves<type, tiles, 4>(g) : launch_waves<type, tiles, 1>(g);
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
  return g.a.type == Type::bf16 ? launch_type<Type::bf16>(g) : launch_type<Type::f16>(g);
}

}  // namespace pydet
