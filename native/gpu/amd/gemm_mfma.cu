// GEMM, and products of groups of tokens, on AMD's matrix cores, for every layout, stride and alignment: arithmetic cdna3
// on gfx942, cdna2 on gfx90a.
//
//   out[m, n] = round(chain_k(a[m, k] b[k, n]) + bias[m, n]),   bf16 and fp16 in
//
// The chain is one accumulator, k ascending: an MFMA takes its 8 or 16 k in the unit's own steps of 8 (cdna3) or 4
// (cdna2), the lowest k first (NUMERICS.md). Its zeros past K change no accumulator but the sign of a zero, and +0 is
// added at the end of every chain. A chunk's chain is added to the running sum at every multiple of k_chunk.
//
// A block of 4 waves makes a tile of 128x128, a wave 64x64 of it by MFMAs of 32x32x8, or 64x64, a wave 32x32 by MFMAs
// of 16x16x16. Stages of 32 or 64 k lie k-contiguous in two halves of 32 KiB of shared memory: one is read while the
// other is filled from registers, to which the stage after it is on its way from memory, or where K is whole stages of
// aligned rows the two stages after it. An operand that is not k-contiguous is turned in registers, in blocks of 4x4.
// Units of four k are swizzled so that 16 rows of a unit share no bank. Results leave by shared memory, row by row.

#include "gpu/kernels.h"
#include "gpu/amd/mfma.h"
#include "gpu/any/jobs.h"

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
template <bool k_contiguous, int tile> struct Share {
  static constexpr int kRowPieces = kStageK<tile> / 8, kPieceRows = kThreads / kRowPieces;
  static constexpr int kRowBlocks = tile / 4;
  static_assert(2 * kPieceRows == tile && kThreads / kRowBlocks * 4 == kStageK<tile>, "the threads share a stage out");

  int o, k;  // of its first element, in the tile and the stage

  __device__ Share()
      : o(k_contiguous ? int(threadIdx.x) / kRowPieces : int(threadIdx.x) % kRowBlocks * 4),
        k(k_contiguous ? int(threadIdx.x) % kRowPieces * 8 : int(threadIdx.x) / kRowBlocks * 4) {}

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

// Reads shares of any K, at any edge and alignment.
template <bool k_contiguous, int tile> struct Reader : Share<k_contiguous, tile> {
  using Share<k_contiguous, tile>::o, Share<k_contiguous, tile>::k, Share<k_contiguous, tile>::kPieceRows;

  int64_t outer_left;  // from o on
  int64_t k_left;      // from the stage's first k on
  const uint16_t *at;
  int64_t stride;  // of the side that is not contiguous
  bool aligned, whole;

  // `data` points to the tile's first element at k = 0.
  __device__ Reader(const uint16_t *data, int64_t stride_, int64_t outer_extent, int64_t k_extent, bool aligned_)
      : outer_left(outer_extent - o),
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
};

// Reads shares of whole stages of aligned rows. Past the outer extent its last rows are read again, whose products are
// never stored.
template <bool k_contiguous, int tile> struct WholeReader : Share<k_contiguous, tile> {
  using Share<k_contiguous, tile>::o, Share<k_contiguous, tile>::k, Share<k_contiguous, tile>::kPieceRows;
  using Piece = std::conditional_t<k_contiguous, uint4, uint2>;
  static constexpr int kPieces = k_contiguous ? 2 : 4;

  const char *at;  // the tile's first element at the next stage's first k, the same for the whole block
  int64_t stage_bytes;
  uint32_t offsets[kPieces];  // in bytes

  __device__ WholeReader(const uint16_t *data, int64_t stride, int64_t outer_extent)
      : at(reinterpret_cast<const char *>(data)),
        stage_bytes(int64_t(sizeof(uint16_t)) * (k_contiguous ? kStageK<tile> : kStageK<tile> * stride)) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int last = clamped(outer_extent, tile) - (k_contiguous ? 1 : 4),
                outer = o + (k_contiguous ? i * kPieceRows : 0);
      const uint32_t row = uint32_t(k_contiguous ? min(outer, last) : k + i);
      offsets[i] =
          uint32_t(sizeof(uint16_t)) * (row * uint32_t(stride) + uint32_t(k_contiguous ? k : min(outer, last)));
    }
  }

  __device__ __forceinline__ void fetch(uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const Piece piece = *reinterpret_cast<const Piece *>(at + offsets[i]);
      memcpy(words + i * int(sizeof piece / 4), &piece, sizeof piece);
    }
    at += stage_bytes;
  }
};

// The smaller tile takes k_chunk too, for twice the accumulators.
template <int tile> constexpr bool kTakesChunks = tile == 64;

// `whole`: is_whole(problem), and no k_chunk.
template <class Problem, Type type, int tile, bool a_k_contiguous, bool b_k_contiguous, bool whole>
__global__ void __launch_bounds__(kThreads, 2)
    gemm_mfma_kernel(const __grid_constant__ Problem problem, bool a_aligned, bool b_aligned) {
  if constexpr (kHasMfma) {
    constexpr int kRows = tile == 128 ? 32 : 16;  // of one MFMA
    constexpr int kWaveM = tile / kWavesM, kWaveN = tile / kWavesN;
    constexpr int kTilesM = kWaveM / kRows, kTilesN = kWaveN / kRows;
    constexpr bool kFolds = kTakesChunks<tile> && !whole;
    using M = Mfma<kRows>;
    __shared__ __align__(16) uint2 stages[2][2][kStageElements / kUnit];  // of a and b
    // Pointers that are read here the compiler knows to be no shared memory: past a barrier it does not.
    void *const out_data = problem.out.data;
    const void *const bias_data = problem.bias.data;
    const int wave = int(threadIdx.x) / kWave, lane = int(threadIdx.x) % kWave;
    const int wave_m = wave / kWavesN * kWaveM, wave_n = wave % kWavesN * kWaveN;
    const bool folds = kFolds && problem.k_chunk > 0;

    for (Jobs<Problem, tile, tile> jobs(problem); jobs.more(); jobs.advance()) {
      const Job job = jobs.job();
      const int64_t m0 = job.m0, n0 = job.n0;
      const BatchOffsets at = job.at;
      const int64_t stage_count = (job.k + kStageK<tile> - 1) / kStageK<tile>;
      const uint16_t *a_data = reinterpret_cast<const uint16_t *>(problem.a.data) + at.a + m0 * problem.a.row_stride;
      const uint16_t *b_data = reinterpret_cast<const uint16_t *>(problem.b.data) + at.b + n0 * problem.b.col_stride;
      const int64_t a_stride = a_k_contiguous ? problem.a.row_stride : problem.a.col_stride;
      const int64_t b_stride = b_k_contiguous ? problem.b.col_stride : problem.b.row_stride;
      const int rows = clamped(job.m - m0, tile), columns = clamped(problem.n - n0, tile);
      const int64_t out = at.out + jobs.out_at(m0, n0);
      const int64_t bias = at.bias + m0 * problem.bias.row_stride + n0 * problem.bias.col_stride;

      // Between this lane's accumulators and rows as they lie in memory: the MFMAs' i-th row of every wave at a time
      // passes through shared memory. One calls f(j, q, value) for the lane's, one f(four values, row, column) for
      // four neighbours of a row each.
      constexpr int kPassRows = kWavesM * kRows;
      static_assert(kPassRows * tile * sizeof(float) <= sizeof stages, "a pass fits");
      float *const passing = reinterpret_cast<float *>(stages);
      auto each_held = [&](const auto &f) {
#pragma unroll
        for (int q = 0; q < M::kCount; ++q)
#pragma unroll
          for (int j = 0; j < kTilesN; ++j)
            f(j, q,
              passing[(wave / kWavesN * kRows + mfma_row<kRows>(lane, q)) * tile + wave_n + j * kRows + lane % kRows]);
      };
      auto each_four = [&](int i, const auto &f) {
#pragma unroll 1
        for (int four = int(threadIdx.x); four < kPassRows * tile / 4; four += kThreads) {
          const int row = four / (tile / 4);
          f(passing + 4 * four, row / kRows * kWaveM + i * kRows + row % kRows, four % (tile / 4) * 4);
        }
      };

      typename M::Accumulators chain[kTilesM][kTilesN] = {};
      typename M::Accumulators sum[kFolds ? kTilesM : 1][kTilesN] = {};
      if (problem.accumulate) {
#pragma unroll
        for (int i = 0; i < kTilesM; ++i) {
          each_four(i, [&](float *values, int row, int column) {
            for (int e = 0; e < 4; ++e)
              values[e] = row < rows && column + e < columns
                              ? load_f32(out_data, Type::f32, out + jobs.out_at(row, column + e))
                              : 0.0f;
          });
          __syncthreads();
          each_held([&](int j, int q, float start) {
            chain[i][j][q] = folds ? 0.0f : start;
            if constexpr (kFolds) sum[i][j][q] = folds ? start : 0.0f;
          });
          __syncthreads();
        }
      }

      auto step = [&](int64_t stage, int s) {  // of M::kStep k
        const uint2 *a_stage = stages[stage % 2][0], *b_stage = stages[stage % 2][1];
        const int unit = s * (M::kStep / kUnit) + lane / kRows;
        uint2 a_fragment[kTilesM], b_fragment[kTilesN];
#pragma unroll
        for (int i = 0; i < kTilesM; ++i) a_fragment[i] = a_stage[place<tile>(wave_m + i * kRows + lane % kRows, unit)];
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) b_fragment[j] = b_stage[place<tile>(wave_n + j * kRows + lane % kRows, unit)];
#pragma unroll
        for (int i = 0; i < kTilesM; ++i)
#pragma unroll
          for (int j = 0; j < kTilesN; ++j) mfma<kRows, type>(chain[i][j], a_fragment[i], b_fragment[j]);
      };
      auto multiply = [&](int64_t stage) {
#pragma unroll
        for (int s = 0; s < kStageK<tile> / M::kStep; ++s) step(stage, s);
      };
      uint32_t a_next[kWords], b_next[kWords];
      if constexpr (whole) {
        WholeReader<a_k_contiguous, tile> a(a_data, a_stride, rows);
        WholeReader<b_k_contiguous, tile> b(b_data, b_stride, columns);
        uint32_t a_after[kWords], b_after[kWords];
        auto fetch = [&](uint32_t(&a_words)[kWords], uint32_t(&b_words)[kWords]) {
          a.fetch(a_words);
          b.fetch(b_words);
        };
        auto deposit = [&](int stage, const uint32_t(&a_words)[kWords], const uint32_t(&b_words)[kWords]) {
          a.deposit(stages[stage][0], a_words);
          b.deposit(stages[stage][1], b_words);
          __syncthreads();
        };
        fetch(a_after, b_after);
        fetch(a_next, b_next);
        deposit(0, a_after, b_after);
        // Two stages a turn: the first is in shared memory, the second on its way, and the two after them set out.
        int64_t left = stage_count;
        for (; left >= 4; left -= 2) {
          fetch(a_after, b_after);
          keep_order();
          multiply(0);
          deposit(1, a_next, b_next);
          fetch(a_next, b_next);
          keep_order();
          multiply(1);
          deposit(0, a_after, b_after);
        }
        if (left == 3) fetch(a_after, b_after);
        multiply(0);
        deposit(1, a_next, b_next);
        multiply(1);
        if (left == 3) {
          deposit(0, a_after, b_after);
          multiply(0);
        }
      } else {
        Reader<a_k_contiguous, tile> a(a_data, a_stride, job.m - m0, job.k, a_aligned);
        Reader<b_k_contiguous, tile> b(b_data, b_stride, problem.n - n0, job.k, b_aligned);
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
        for (int64_t stage = 0; stage < stage_count; ++stage) {
          if (stage + 1 < stage_count) fetch_stage();
          if (!folds) {
            multiply(stage);
          } else if constexpr (kFolds) {
#pragma unroll 1
            for (int k = 0; k < kStageK<tile>; k += kChunkMultiple) {
              const int64_t left = job.k - stage * kStageK<tile> - k;
              if (left <= 0) break;
#pragma unroll
              for (int s = 0; s < kChunkMultiple / M::kStep; ++s) step(stage, k / M::kStep + s);
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
      }
      __syncthreads();  // results overwrite a stage that may still be read

#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
          if (job.k > 0) chain[i][j] += 0.0f;
          if constexpr (kFolds)
            if (folds) chain[i][j] = sum[i][j];
        }
        each_held([&](int j, int q, float &to) { to = chain[i][j][q]; });
        __syncthreads();
        each_four(i, [&](const float *values, int row, int column) {
          const int count = row < rows ? min(columns - column, 4) : 0;
          float four[4];
          memcpy(four, __builtin_assume_aligned(values, 16), sizeof four);
          if (bias_data) {
            const int64_t from = bias + row * problem.bias.row_stride + column * problem.bias.col_stride;
#pragma unroll
            for (int e = 0; e < 4; ++e)
              if (e < count) four[e] += load_f32(bias_data, problem.bias.type, from + e * problem.bias.col_stride);
          }
          if (std::is_same_v<Problem, Gemm> || problem.out.col_stride == 1) {
            store_four(out_data, problem.out.type, out + jobs.out_at(row, column), four, count);
          } else {
#pragma unroll
            for (int e = 0; e < 4; ++e)
              if (e < count) store_rounded(out_data, problem.out.type, out + jobs.out_at(row, column + e), four[e]);
          }
        });
        __syncthreads();  // the next rows, or the next tile's first stage
      }
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

// Whether an operand has whole stages that every thread reads without asking, by offsets of 32 bits.
template <int tile> bool is_whole(bool k_contiguous, bool aligned, int64_t stride, int64_t outer_extent, int64_t k) {
  return aligned && uint64_t(stride) < uint64_t(1) << 23 && (k_contiguous || outer_extent % 4 == 0) &&
         k % kStageK<tile> == 0 && k / kStageK<tile> >= 2;
}

template <Type type, int tile, bool a, bool b> pydet_status launch_layout(const Launch &shape, const Gemm &problem) {
  const Batch &batch = problem.batch;
  const int64_t a_stride = a ? problem.a.row_stride : problem.a.col_stride;
  const int64_t b_stride = b ? problem.b.col_stride : problem.b.row_stride;
  const bool a_aligned = is_aligned(problem.a, a, a_stride, batch.a, batch.dims);
  const bool b_aligned = is_aligned(problem.b, b, b_stride, batch.b, batch.dims);
  const bool whole = !problem.k_chunk && is_whole<tile>(a, a_aligned, a_stride, problem.m, problem.k) &&
                     is_whole<tile>(b, b_aligned, b_stride, problem.n, problem.k);
  auto kernel =
      whole ? gemm_mfma_kernel<Gemm, type, tile, a, b, true> : gemm_mfma_kernel<Gemm, type, tile, a, b, false>;
  return launch(shape, kernel, problem, a_aligned, b_aligned);
}

// The same wherever a group begins: an operand whose tokens are neighbours in memory is not aligned.
template <Type type, int tile, bool a, bool b>
pydet_status launch_layout(const Launch &shape, const GroupedGemm &problem) {
  const int64_t a_stride = a ? problem.a.row_stride : problem.a.col_stride;
  const int64_t b_stride = b ? problem.b.col_stride : problem.b.row_stride;
  const bool a_aligned = a != problem.depth && is_aligned(problem.a, a, a_stride, nullptr, 0);
  const bool b_aligned = !(b && problem.depth) && is_aligned(problem.b, b, b_stride, &problem.b_stride, 1);
  return launch(shape, gemm_mfma_kernel<GroupedGemm, type, tile, a, b, false>, problem, a_aligned, b_aligned);
}

template <int tile> unsigned blocks_of(const Gemm &problem) {
  constexpr int kMaxBlocks = 1 << 20;  // more tiles than that are walked in turns
  return unsigned(
      std::min<int64_t>(divide_up(problem.m, tile) * divide_up(problem.n, tile) * problem.batch.count, kMaxBlocks));
}
template <int tile> unsigned blocks_of(const GroupedGemm &problem) { return blocks_for(problem, tile, tile); }

template <Type type, int tile, class Problem> pydet_status launch_tile(const Problem &problem, const char *name) {
  bool a = problem.a.col_stride == 1, b = problem.b.row_stride == 1;  // k-contiguous
  Launch shape = {name, static_cast<gpu_stream>(problem.stream), dim3(blocks_of<tile>(problem)), dim3(kThreads)};
  DeviceGuard guard(problem.device.id);
  if (guard.error() != kGpuSuccess) return device_error(shape.kernel, guard.error());
  if (a)
    return b ? launch_layout<type, tile, true, true>(shape, problem)
             : launch_layout<type, tile, true, false>(shape, problem);
  return b ? launch_layout<type, tile, false, true>(shape, problem)
           : launch_layout<type, tile, false, false>(shape, problem);
}

template <int tile, class Problem> pydet_status launch_type(const Problem &problem, const char *name) {
  return with_type<kHalfTypes>(problem.a.type, [&](auto type) { return launch_tile<type, tile>(problem, name); });
}

}  // namespace

pydet_status gemm_mfma_64(const Gemm &problem) { return launch_type<64>(problem, "gemm_mfma_64x64"); }
pydet_status gemm_mfma_128(const Gemm &problem) { return launch_type<128>(problem, "gemm_mfma_128x128"); }
pydet_status grouped_gemm_mfma_64(const GroupedGemm &problem) {
  return launch_type<64>(problem, "grouped_gemm_mfma_64x64");
}

}  // namespace pydet
