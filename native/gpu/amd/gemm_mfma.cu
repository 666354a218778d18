// GEMM on AMD's matrix cores, for every layout, stride and alignment: arithmetic cdna3 on gfx942, cdna2 on gfx90a.
//
//   out[m, n] = round(chain_k(a[m, k] b[k, n]) + bias[m, n]),   bf16 and fp16 in
//
// The chain is one accumulator, k ascending: an MFMA takes its 8 or 16 k in the unit's own steps of 8 (cdna3) or 4
// (cdna2), the lowest k first (NUMERICS.md). Its zeros past K change no accumulator but the sign of a zero, and +0 is
// added at the end of every chain. A chunk's chain is added to the running sum at every multiple of k_chunk.
//
// A block of 4 waves makes a tile of 128x128, a wave 64x64 of it by MFMAs of 32x32x8, or 64x64, a wave 32x32 by MFMAs
// of 16x16x16. Stages of 32 or 64 k lie k-contiguous in two halves of 32 KiB of shared memory: one is read while the
// next stage is in registers on its way from memory to the other. An operand that is not k-contiguous is turned in
// registers, in blocks of 4x4. Units of four k are swizzled so that 16 rows of a unit share no bank.

#include "gpu/kernels.h"
#include "gpu/amd/mfma.h"

namespace pydet {
namespace {

constexpr int kThreads = 256, kWavesM = 2, kWavesN = 2;
constexpr int kStageElements = 4096;                                    // of one operand
constexpr int kShare = kStageElements / kThreads, kWords = kShare / 2;  // of one thread

template <int tile> constexpr int kStageK = kStageElements / tile;
static_assert(kStageK<64> % kChunkMultiple == 0 && kStageK<128> % kChunkMultiple == 0, "a chunk ends where 16 k end");

// Unit `unit` of row `row` of a stage, in units from its start. Rows that one instruction reads, 16 in turn, and those
// that one writes, 4 apart, lie in different banks: the former all, the latter but for pairs.
template <int tile> __device__ __forceinline__ int place(int row, int unit) {
  constexpr int kRowUnits = kStageK<tile> / kUnit;  // 8, so that two rows fill the banks, or 16
  return row * kRowUnits + (unit ^ (((kRowUnits == 8 ? row >> 1 : row) ^ row >> 4) & (kRowUnits - 1)));
}

// A thread's share of every stage of one operand; `outer` is m or n. Where k is contiguous: two pieces of 8 k, of rows
// kPieceRows apart. Where outer is: a block of 4 outers by 4 k.
template <bool k_contiguous, int tile> struct Reader {
  static constexpr int kRowPieces = kStageK<tile> / 8, kPieceRows = kThreads / kRowPieces;
  static constexpr int kRowBlocks = tile / 4;
  static_assert(2 * kPieceRows == tile && kThreads / kRowBlocks * 4 == kStageK<tile>, "the threads share a stage out");

  int o, k;            // of its first element, in the tile and the stage
  int64_t outer_left;  // from o on
  int64_t k_left;      // from the stage's first k on
  const uint16_t *at;
  int64_t stride;  // of the side that is not contiguous
  bool aligned, whole;

  // `data` points to the tile's first element at k = 0.
  __device__ Reader(const uint16_t *data, int64_t stride_, int64_t outer_extent, int64_t k_extent, bool aligned_)
      : o(k_contiguous ? int(threadIdx.x) / kRowPieces : int(threadIdx.x) % kRowBlocks * 4),
        k(k_contiguous ? int(threadIdx.x) % kRowPieces * 8 : int(threadIdx.x) / kRowBlocks * 4),
        outer_left(outer_extent - o),
        k_left(k_extent),
        at(data + (k_contiguous ? o * stride_ + k : k * stride_ + o)),
        stride(stride_),
        aligned(aligned_),
        whole(aligned_ && outer_extent >= tile) {}

  __device__ __forceinline__ void fetch(uint32_t (&words)[kWords]) {
    const bool all = whole && k_left >= kStageK<tile>;  // the same for the whole block
    if constexpr (k_contiguous) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int valid = all ? 8 : outer_left > i * kPieceRows ? clamped(k_left - k, 8) : 0;
        read<8>(words + 4 * i, at + i * kPieceRows * stride, valid, aligned);
      }
      at += kStageK<tile>;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int valid = all ? 4 : k_left > k + i ? clamped(outer_left, 4) : 0;
        read<4>(words + 2 * i, at + i * stride, valid, aligned);
      }
      at += kStageK<tile> * stride;
    }
    k_left -= kStageK<tile>;
  }

  __device__ __forceinline__ void deposit(uint2 *stage, const uint32_t (&words)[kWords]) const {
    if constexpr (k_contiguous) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        stage[place<tile>(o + i / 2 * kPieceRows, k / kUnit + i % 2)] = make_uint2(words[2 * i], words[2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t k4[4];  // this outer's
#pragma unroll
        for (int j = 0; j < 4; ++j) k4[j] = i % 2 ? words[2 * j + i / 2] >> 16 : words[2 * j + i / 2] & 0xFFFFu;
        stage[place<tile>(o + i, k / kUnit)] = make_uint2(k4[0] | k4[1] << 16, k4[2] | k4[3] << 16);
      }
    }
  }
};

// The smaller tile takes k_chunk too, for twice the accumulators.
template <int tile> constexpr bool kTakesChunks = tile == 64;

template <Type type, int tile, bool a_k_contiguous, bool b_k_contiguous>
__global__ void __launch_bounds__(kThreads, 2)
    gemm_mfma_kernel(const __grid_constant__ Gemm problem, bool a_aligned, bool b_aligned) {
  if constexpr (kHasMfma) {
    constexpr int kRows = tile == 128 ? 32 : 16;  // of one MFMA
    constexpr int kWaveM = tile / kWavesM, kWaveN = tile / kWavesN;
    constexpr int kTilesM = kWaveM / kRows, kTilesN = kWaveN / kRows;
    using M = Mfma<kRows>;
    __shared__ uint2 stages[2][2][kStageElements / kUnit];  // of a and b
    const int wave = int(threadIdx.x) / kWave, lane = int(threadIdx.x) % kWave;
    const int wave_m = wave / kWavesN * kWaveM, wave_n = wave % kWavesN * kWaveN;
    const int64_t tiles_m = (problem.m + tile - 1) / tile, tiles_n = (problem.n + tile - 1) / tile;
    const int64_t stage_count = (problem.k + kStageK<tile> - 1) / kStageK<tile>;
    const bool folds = kTakesChunks<tile> && problem.k_chunk > 0;

    for (int64_t job = blockIdx.x; job < tiles_m * tiles_n * problem.batch.count; job += gridDim.x) {
      const int64_t m0 = job % tiles_m * tile, n0 = job / tiles_m % tiles_n * tile;
      const BatchOffsets at = batch_offsets(problem.batch, job / (tiles_m * tiles_n));
      const uint16_t *a_data = reinterpret_cast<const uint16_t *>(problem.a.data) + at.a + m0 * problem.a.row_stride;
      const uint16_t *b_data = reinterpret_cast<const uint16_t *>(problem.b.data) + at.b + n0 * problem.b.col_stride;
      Reader<a_k_contiguous, tile> a(a_data, a_k_contiguous ? problem.a.row_stride : problem.a.col_stride,
                                     problem.m - m0, problem.k, a_aligned);
      Reader<b_k_contiguous, tile> b(b_data, b_k_contiguous ? problem.b.col_stride : problem.b.row_stride,
                                     problem.n - n0, problem.k, b_aligned);
      const int rows = clamped(problem.m - m0, tile), columns = clamped(problem.n - n0, tile);
      const int64_t out = at.out + m0 * problem.out.row_stride + n0;
      const int64_t bias = at.bias + m0 * problem.bias.row_stride + n0 * problem.bias.col_stride;
      // Calls f(value's indices, inside, row, column) for every element of the tile that this lane holds. A row's place
      // is computed when its turn comes: kept since the last call, they would cost more registers than there are.
      auto each = [&](const auto &f) {
        int thread = int(threadIdx.x);
#pragma unroll
        for (int i = 0; i < kTilesM; ++i)
#pragma unroll
          for (int q = 0; q < M::kCount; ++q) {
            make_opaque(thread);
            const int row = thread / kWave / kWavesN * kWaveM + i * kRows + mfma_row<kRows>(thread % kWave, q);
#pragma unroll
            for (int j = 0; j < kTilesN; ++j) {
              const int column = thread / kWave % kWavesN * kWaveN + j * kRows + thread % kRows;
              f(i, j, q, row < rows && column < columns, row, column);
            }
          }
      };

      typename M::Accumulators chain[kTilesM][kTilesN] = {};
      typename M::Accumulators sum[kTakesChunks<tile> ? kTilesM : 1][kTilesN] = {};
      if (problem.accumulate)
        each([&](int i, int j, int q, bool inside, int row, int column) {
          float start = 0.0f;
          if (inside) start = load_f32(problem.out.data, Type::f32, out + row * problem.out.row_stride + column);
          chain[i][j][q] = folds ? 0.0f : start;
          if constexpr (kTakesChunks<tile>) sum[i][j][q] = folds ? start : 0.0f;
        });

      uint32_t a_next[kWords], b_next[kWords];
      auto fetch_stage = [&] {
        a.fetch(a_next);
        b.fetch(b_next);
      };
      auto deposit_stage = [&](int64_t stage) {
        a.deposit(stages[stage % 2][0], a_next);
        b.deposit(stages[stage % 2][1], b_next);
        __syncthreads();
      };
      if (stage_count > 0) {
        fetch_stage();
        deposit_stage(0);
      }
      int64_t chunk_left = problem.k_chunk;
      wait_for_loads();
      for (int64_t stage = 0; stage < stage_count; ++stage) {
        if (stage + 1 < stage_count) fetch_stage();
        const uint2 *a_stage = stages[stage % 2][0], *b_stage = stages[stage % 2][1];
        auto step = [&](int s) {  // of M::kStep k
          const int unit = s * (M::kStep / kUnit) + lane / kRows;
          uint2 a_fragment[kTilesM], b_fragment[kTilesN];
#pragma unroll
          for (int i = 0; i < kTilesM; ++i)
            a_fragment[i] = a_stage[place<tile>(wave_m + i * kRows + lane % kRows, unit)];
#pragma unroll
          for (int j = 0; j < kTilesN; ++j)
            b_fragment[j] = b_stage[place<tile>(wave_n + j * kRows + lane % kRows, unit)];
#pragma unroll
          for (int i = 0; i < kTilesM; ++i)
#pragma unroll
            for (int j = 0; j < kTilesN; ++j) mfma<kRows, type>(chain[i][j], a_fragment[i], b_fragment[j]);
        };
        if (!folds) {
#pragma unroll
          for (int s = 0; s < kStageK<tile> / M::kStep; ++s) step(s);
        } else if constexpr (kTakesChunks<tile>) {
#pragma unroll 1
          for (int k = 0; k < kStageK<tile>; k += kChunkMultiple) {
            const int64_t left = problem.k - stage * kStageK<tile> - k;
            if (left <= 0) break;
#pragma unroll
            for (int s = 0; s < kChunkMultiple / M::kStep; ++s) step(k / M::kStep + s);
            chunk_left -= kChunkMultiple;
            if (chunk_left > 0 && left > kChunkMultiple) continue;
            chunk_left = problem.k_chunk;
#pragma unroll
            for (int i = 0; i < kTilesM; ++i)
#pragma unroll
              for (int j = 0; j < kTilesN; ++j) {
                sum[i][j] += chain[i][j] + 0.0f;
                chain[i][j] = 0.0f;
              }
          }
        }
        // Two stages: the one filled now was last read before the barrier that ended the fill before.
        if (stage + 1 < stage_count) deposit_stage(stage + 1);
      }
      __syncthreads();  // the next tile's first stage overwrites one that may still be read

#pragma unroll
      for (int i = 0; i < kTilesM; ++i)
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
          if (problem.k > 0) chain[i][j] += 0.0f;
          if constexpr (kTakesChunks<tile>)
            if (folds) chain[i][j] = sum[i][j];
        }
      if (problem.bias.data)
        with_type<kUnscaledTypes>(problem.bias.type, [&](auto bias_type) {
          each([&](int i, int j, int q, bool inside, int row, int column) {
            float added = 0.0f;
            if (inside)
              added = load_f32(problem.bias.data, bias_type,
                               bias + row * problem.bias.row_stride + column * problem.bias.col_stride);
            chain[i][j][q] += added;
          });
        });
      with_type<kUnscaledTypes>(problem.out.type, [&](auto out_type) {
        each([&](int i, int j, int q, bool inside, int row, int column) {
          if (inside)
            store_rounded(problem.out.data, out_type, out + row * problem.out.row_stride + column, chain[i][j][q]);
        });
      });
    }
  }
}

// ---- Launch ------------------------------------------------------------------------------------------------------

// Whether every 16 bytes along k, or 8 along the outer dimension, are aligned in every row and matrix of the batch.
bool is_aligned(const Matrix &matrix, bool k_contiguous, int64_t stride, const int64_t *batch_strides, int batch_dims) {
  const int elements = k_contiguous ? 8 : 4;
  bool aligned = reinterpret_cast<uintptr_t>(matrix.data) % (2 * elements) == 0 && stride % elements == 0;
  for (int i = 0; i < batch_dims; ++i) aligned = aligned && batch_strides[i] % elements == 0;
  return aligned;
}

template <Type type, int tile> pydet_status launch_layout(const Gemm &problem) {
  constexpr int kMaxBlocks = 1 << 20;                                 // more tiles than that are walked in turns
  bool a = problem.a.col_stride == 1, b = problem.b.row_stride == 1;  // k-contiguous
  auto kernel = a ? (b ? gemm_mfma_kernel<type, tile, true, true> : gemm_mfma_kernel<type, tile, true, false>)
                  : (b ? gemm_mfma_kernel<type, tile, false, true> : gemm_mfma_kernel<type, tile, false, false>);
  int64_t tiles = (problem.m + tile - 1) / tile * ((problem.n + tile - 1) / tile) * problem.batch.count;
  Launch shape = {tile == 64 ? "gemm_mfma_64x64" : "gemm_mfma_128x128", static_cast<gpu_stream>(problem.stream),
                  dim3(unsigned(tiles < kMaxBlocks ? tiles : kMaxBlocks)), dim3(kThreads)};
  DeviceGuard guard(problem.device.id);
  if (guard.error() != kGpuSuccess) return device_error(shape.kernel, guard.error());
  const Batch &batch = problem.batch;
  return launch(shape, kernel, problem,
                is_aligned(problem.a, a, a ? problem.a.row_stride : problem.a.col_stride, batch.a, batch.dims),
                is_aligned(problem.b, b, b ? problem.b.col_stride : problem.b.row_stride, batch.b, batch.dims));
}

template <int tile> pydet_status launch_type(const Gemm &problem) {
  return with_type<kHalfTypes>(problem.a.type, [&](auto type) { return launch_layout<type, tile>(problem); });
}

}  // namespace

pydet_status gemm_mfma_64(const Gemm &problem) { return launch_type<64>(problem); }
pydet_status gemm_mfma_128(const Gemm &problem) { return launch_type<128>(problem); }

}  // namespace pydet
