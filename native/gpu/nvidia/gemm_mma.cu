// GEMM on tensor cores through mma.sync, for every layout, stride and alignment: the general kernel.
//
//   out[m, n] = round(chain_k(a[m, k] b[k, n]) + bias[m, n]),   bf16 and fp16 in, sm_80 and later
//
// The chain is one accumulator, k ascending in mma.sync.m16n8k16 steps: on sm_90 and later one truncating step of 16
// (arithmetic sm90), on sm_80 to sm_89 two of 8 (arithmetic sm80). Two m16n8k8 are a different function on Hopper and
// are never used. A chunk's chain is added to the running sum at every multiple of k_chunk.
//
// A block makes a tile of 64x64 (4 warps of 32x32) or 128x128 (8 warps of 64x32) of out, 32 of k a stage, 4 stages in
// shared memory, filled by cp.async where 16 bytes are aligned and by element loads where not. Stages are laid out as
// the operand lies in memory, k-contiguous or not, swizzled so that ldmatrix meets no bank conflict; ldmatrix.trans
// turns the second kind. Not tuned for peak speed: sm90/gemm.cu is.

#include "gpu/any/epilogue.h"
#include "gpu/any/jobs.h"
#include "gpu/nvidia/gemm_mma.h"
#include "gpu/nvidia/mma.h"

#if !defined(PYDET_MMA_TYPE)
#error "compiled once a type of kMmaTypes: PYDET_MMA_TYPE is its place there (Makefile)"
#endif

namespace pydet {
namespace {

constexpr Type kType = kMmaTypes[PYDET_MMA_TYPE];  // of this object's kernels

constexpr int kStepK = 16;   // of one mma
constexpr int kStageK = 32;  // of one stage
constexpr int kStages = 4;
constexpr int kWarp = 32;
constexpr int kChunkElements = 8;  // 16 bytes

template <int tile> struct Shape;
template <> struct Shape<64> {
  static constexpr int warps_m = 2, warps_n = 2, warp_m = 32, warp_n = 32;
};
template <> struct Shape<128> {
  static constexpr int warps_m = 2, warps_n = 4, warp_m = 64, warp_n = 32;
};
template <int tile> constexpr int kThreads = Shape<tile>::warps_m * Shape<tile>::warps_n * kWarp;
template <int tile> constexpr int kStageElements = tile * kStageK;  // of one operand
template <int tile> constexpr int kSharedBytes = kStages * 2 * kStageElements<tile> * 2;

// ---- Stages ------------------------------------------------------------------------------------------------------

// One operand as the tile sees it: `outer` is m or n, and k runs along the other side.
struct Operand {
  const uint16_t *data;
  int64_t outer, k;  // extents
  int64_t stride;    // of the side that is not contiguous
};

// Element (outer o, k) of a stage. k-contiguous: rows of 32 k, 64 bytes, so two rows share the 128 bytes of all banks.
// Otherwise rows of `tile` outers. Eight rows at one 16-byte column never share a bank.
template <bool k_contiguous, int tile> __device__ __forceinline__ int place(int o, int k) {
  int row = k_contiguous ? o : k, along = k_contiguous ? k : o;
  int chunk = along / kChunkElements, swizzled = k_contiguous ? chunk ^ ((row >> 1) & 3) : chunk ^ (row & 7);
  return row * (k_contiguous ? kStageK : tile) + swizzled * kChunkElements + along % kChunkElements;
}

// Fills one operand's stage with outers [o0, o0 + tile) and k [k0, k0 + 32), zeros past the extents.
template <bool k_contiguous, bool aligned, int tile>
__device__ __forceinline__ void fill(uint16_t *stage, const Operand &operand, int64_t o0, int64_t k0) {
  constexpr int kRowChunks = (k_contiguous ? kStageK : tile) / kChunkElements;
  constexpr int kChunks = kStageElements<tile> / kChunkElements;
  static_assert(kChunks % kThreads<tile> == 0, "every thread copies the same number of chunks");
#pragma unroll
  for (int i = 0; i < kChunks / kThreads<tile>; ++i) {
    int chunk = int(threadIdx.x) + i * kThreads<tile>;
    int row = chunk / kRowChunks, along = chunk % kRowChunks * kChunkElements;
    int o = k_contiguous ? row : along, k = k_contiguous ? along : row;
    uint16_t *to = stage + place<k_contiguous, tile>(o, k);
    int64_t outer_left = operand.outer - (o0 + o), k_left = operand.k - (k0 + k);
    int64_t left = k_contiguous ? (outer_left > 0 ? k_left : 0) : (k_left > 0 ? outer_left : 0);
    int valid = left <= 0 ? 0 : left < kChunkElements ? int(left) : kChunkElements;
    int64_t at = k_contiguous ? (o0 + o) * operand.stride + k0 + k : (k0 + k) * operand.stride + o0 + o;
    const uint16_t *from = operand.data + (valid ? at : 0);
    if (aligned) {
      copy_async_16(to, from, valid * 2);
    } else {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t low = 2 * j < valid ? from[2 * j] : 0, high = 2 * j + 1 < valid ? from[2 * j + 1] : 0;
        words[j] = low | high << 16;
      }
      *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Four 8x8 matrices of an operand: outers o .. o + 15, k .. k + 15. The registers come out in the order (o, k), then
// `outer_first` says whether the second is (o + 8, k), as a's fragment wants, or (o, k + 8), as b's does.
template <bool k_contiguous, bool outer_first, int tile>
__device__ __forceinline__ void load_fragment(uint32_t (&r)[4], const uint16_t *stage, int o, int k) {
  int lane = int(threadIdx.x) % kWarp, matrix = lane / 8, row = lane % 8;
  int o_block = outer_first ? matrix % 2 : matrix / 2, k_block = outer_first ? matrix / 2 : matrix % 2;
  o += o_block * 8 + (k_contiguous ? row : 0);
  k += k_block * 8 + (k_contiguous ? 0 : row);
  load_matrices<!k_contiguous>(r, shared_address(stage + place<k_contiguous, tile>(o, k)));
}

// ---- Kernel ------------------------------------------------------------------------------------------------------

// `chunked` kernels take k_chunk too, for twice the accumulators.
template <class Problem, Type type, int tile, bool a_k_contiguous, bool b_k_contiguous, bool aligned, bool chunked>
__global__ void __launch_bounds__(kThreads<tile>) gemm_mma_kernel(const __grid_constant__ Problem problem) {
  using S = Shape<tile>;
  constexpr int kTilesM = S::warp_m / 16, kTilesN = S::warp_n / 8;
  extern __shared__ __align__(128) uint16_t stages[];
  int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  int warp_m = warp / S::warps_n * S::warp_m, warp_n = warp % S::warps_n * S::warp_n;

  for (Jobs<Problem, tile, tile> jobs(problem); jobs.more(); jobs.advance()) {
    const Job job = jobs.job();
    int64_t m0 = job.m0, n0 = job.n0;
    int64_t stage_count = (job.k + kStageK - 1) / kStageK, steps = (job.k + kStepK - 1) / kStepK;
    const BatchOffsets &at = job.at;
    Operand a = {reinterpret_cast<const uint16_t *>(problem.a.data) + at.a, job.m, job.k,
                 a_k_contiguous ? problem.a.row_stride : problem.a.col_stride};
    Operand b = {reinterpret_cast<const uint16_t *>(problem.b.data) + at.b, problem.n, job.k,
                 b_k_contiguous ? problem.b.col_stride : problem.b.row_stride};

    // Calls f(value's indices, row, column) for every element of out that this thread holds.
    auto each = [&](auto f) {
#pragma unroll
      for (int i = 0; i < kTilesM; ++i)
#pragma unroll
        for (int j = 0; j < kTilesN; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            int64_t row = m0 + warp_m + i * 16 + lane / 4 + q / 2 * 8,
                    column = n0 + warp_n + j * 8 + lane % 4 * 2 + q % 2;
            if (row < job.m && column < problem.n) f(i, j, q, row, column);
          }
    };

    const bool folds = chunked && problem.k_chunk > 0;
    float chain[kTilesM][kTilesN][4] = {};
    float sum[chunked ? kTilesM : 1][chunked ? kTilesN : 1][4] = {};
    if (problem.accumulate)
      each([&](int i, int j, int q, int64_t row, int64_t column) {
        float start = load_f32(problem.out.data, problem.out.type, at.out + jobs.out_at(row, column));
        if constexpr (chunked) {
          if (folds) sum[i][j][q] = start;
          else chain[i][j][q] = start;
        } else {
          chain[i][j][q] = start;
        }
      });

    auto fill_stage = [&](int64_t stage) {
      if (stage < stage_count) {
        uint16_t *to = stages + stage % kStages * 2 * kStageElements<tile>;
        fill<a_k_contiguous, aligned, tile>(to, a, m0, stage * kStageK);
        fill<b_k_contiguous, aligned, tile>(to + kStageElements<tile>, b, n0, stage * kStageK);
      }
      commit_copies();  // an empty group past the end, so that the count of groups in flight stays the same
    };
    for (int s = 0; s < kStages - 1; ++s) fill_stage(s);

    int64_t chunk_steps = problem.k_chunk / kStepK, chunk_left = chunk_steps;
    for (int64_t stage = 0; stage < stage_count; ++stage) {
      wait_copies<kStages - 2>();
      __syncthreads();  // all of this stage has landed, and everyone has left the one that is filled next
      fill_stage(stage + kStages - 1);
      const uint16_t *a_stage = stages + stage % kStages * 2 * kStageElements<tile>,
                     *b_stage = a_stage + kStageElements<tile>;
#pragma unroll
      for (int half = 0; half < kStageK / kStepK; ++half) {
        int64_t step = stage * (kStageK / kStepK) + half;
        if (step >= steps) break;
        uint32_t a_fragment[kTilesM][4], b_fragment[kTilesN / 2][4];
#pragma unroll
        for (int i = 0; i < kTilesM; ++i)
          load_fragment<a_k_contiguous, true, tile>(a_fragment[i], a_stage, warp_m + i * 16, half * kStepK);
#pragma unroll
        for (int j = 0; j < kTilesN / 2; ++j)
          load_fragment<b_k_contiguous, false, tile>(b_fragment[j], b_stage, warp_n + j * 16, half * kStepK);
#pragma unroll
        for (int i = 0; i < kTilesM; ++i)
#pragma unroll
          for (int j = 0; j < kTilesN; ++j)
            mma<type>(chain[i][j], a_fragment[i], b_fragment[j / 2][j % 2 * 2], b_fragment[j / 2][j % 2 * 2 + 1]);
        if constexpr (chunked) {
          if (!folds || (--chunk_left > 0 && step + 1 < steps)) continue;
          chunk_left = chunk_steps;
#pragma unroll
          for (int i = 0; i < kTilesM; ++i)
#pragma unroll
            for (int j = 0; j < kTilesN; ++j)
#pragma unroll
              for (int q = 0; q < 4; ++q) {
                sum[i][j][q] += chain[i][j][q];
                chain[i][j][q] = 0.0f;
              }
        }
      }
    }
    __syncthreads();  // the next tile's first stages overwrite this one's last

    each([&](int i, int j, int q, int64_t row, int64_t column) {
      float x = folds ? sum[chunked ? i : 0][chunked ? j : 0][q] : chain[i][j][q];
      if (problem.bias.data)
        x += load_f32(problem.bias.data, problem.bias.type,
                      at.bias + row * problem.bias.row_stride + column * problem.bias.col_stride);
      store_rounded(problem.out.data, problem.out.type, at.out + jobs.out_at(row, column), x);
    });
  }
}

// ---- Launch ------------------------------------------------------------------------------------------------------

template <Type type, int tile, bool aligned, bool chunked>
pydet_status launch_layout(const Gemm &problem) {
  constexpr int kMaxBlocks = 1 << 20;                                 // more tiles than that are walked in turns
  bool a = problem.a.col_stride == 1, b = problem.b.row_stride == 1;  // k-contiguous
  auto kernel = a ? (b ? gemm_mma_kernel<Gemm, type, tile, true, true, aligned, chunked>
                       : gemm_mma_kernel<Gemm, type, tile, true, false, aligned, chunked>)
                  : (b ? gemm_mma_kernel<Gemm, type, tile, false, true, aligned, chunked>
                       : gemm_mma_kernel<Gemm, type, tile, false, false, aligned, chunked>);
  int64_t tiles = divide_up(problem.m, tile) * divide_up(problem.n, tile) * problem.batch.count;
  Launch shape = {tile == 64 ? "gemm_mma_64x64" : "gemm_mma_128x128", static_cast<gpu_stream>(problem.stream),
                  dim3(unsigned(tiles < kMaxBlocks ? tiles : kMaxBlocks)), dim3(kThreads<tile>), kSharedBytes<tile>};
  DeviceGuard guard(problem.device.id);
  if (guard.error() != kGpuSuccess) return device_error(shape.kernel, guard.error());
  return launch(shape, kernel, problem);
}

template <Type type, int tile, bool aligned, bool chunked> pydet_status launch_layout(const GroupedGemm &problem) {
  bool a = problem.a.col_stride == 1, b = problem.b.row_stride == 1;  // k-contiguous
  auto kernel = gemm_mma_kernel<GroupedGemm, type, tile, false, false, aligned, chunked>;
  if (a)
    kernel = b ? gemm_mma_kernel<GroupedGemm, type, tile, true, true, aligned, chunked>
               : gemm_mma_kernel<GroupedGemm, type, tile, true, false, aligned, chunked>;
  if constexpr (!aligned)
    if (!a && b) kernel = gemm_mma_kernel<GroupedGemm, type, tile, false, true, aligned, chunked>;
  Launch shape = {tile == 64 ? "grouped_gemm_mma_64x64" : "grouped_gemm_mma_128x128",
                  static_cast<gpu_stream>(problem.stream), dim3(blocks_for(problem, tile, tile)), dim3(kThreads<tile>),
                  kSharedBytes<tile>};
  DeviceGuard guard(problem.device.id);
  if (guard.error() != kGpuSuccess) return device_error(shape.kernel, guard.error());
  return launch(shape, kernel, problem);
}

template <class Problem> pydet_status launch_64(const Problem &problem, bool aligned) {
  return aligned ? launch_layout<kType, 64, true, true>(problem) : launch_layout<kType, 64, false, true>(problem);
}

}  // namespace

template <> pydet_status GemmMma<kType>::tile_64(const Gemm &g, bool aligned) { return launch_64(g, aligned); }
template <> pydet_status GemmMma<kType>::tile_64(const GroupedGemm &g, bool aligned) { return launch_64(g, aligned); }
template <> pydet_status GemmMma<kType>::tile_128(const Gemm &g) { return launch_layout<kType, 128, true, false>(g); }
template <> pydet_status GemmMma<kType>::tile_128(const GroupedGemm &g) {
  return launch_layout<kType, 128, true, false>(g);
}

}  // namespace pydet
