// GEMM in arithmetic ieee on a GPU's plain fp32 units: the CPU's bits, in every layout, stride and alignment.
//
//   out[m, n] = round(chain_k(a[m, k] b[k, n]) + bias[m, n]),   fp32, bf16 and fp16 in
//   chain: c = fmaf(a[m, k], b[k, n], c), k ascending, from +0 or out; or chains of k_chunk, their sums added ascending
//
// A block of 256 threads makes a tile of 64x64, 4x4 a thread: for every type, stride and alignment, for small problems
// and for k_chunk; gemm_ieee_fp32.cu makes large fp32 ones. It lives on asynchronous copies, which AMD has not: there a
// tile of 128x128, 8x8 a thread, makes large products. Stages of 8 k are converted to fp32 on their way to shared
// memory, k-major whatever the operand's layout; the next stage's loads are in flight during this one's products. Zero
// padding would turn a chain of -0 into +0, so the last stage is walked to K and no further.

#include "gpu/any/epilogue.h"
#include "gpu/any/jobs.h"
#include "gpu/kernels.h"
#include "gpu/any/quads.h"

namespace pydet {
namespace {

constexpr int kStageK = 8;
constexpr int kUnroll = gpu_unroll(kStageK / 2);  // of a loop over a stage, two k a turn
constexpr int kThreads = 256;
constexpr int kPadding = 4;  // floats a row: keeps 16-byte alignment, spreads the transposing stores over the banks

static_assert(kChunkMultiple % kStageK == 0, "a chunk ends where a stage ends");

constexpr int kThreadsN = 16, kThreadsM = kThreads / kThreadsN;  // threads of a block along n and m

// A pointer to elements that read as fp32, of a type known only at run time.
struct AnyType {
  const char *p;
  Type type;
  __device__ AnyType(const Matrix &matrix, int64_t offset)
      : p(matrix.data + offset * size_of(matrix.type)), type(matrix.type) {}
  __device__ AnyType operator+(int64_t n) const { return AnyType(p + n * size_of(type), type); }
  __device__ float value() const { return load_f32(p, type, 0); }

 private:
  __device__ AnyType(const char *moved, Type t) : p(moved), type(t) {}
};

// This thread's share of every stage of one operand: `kCount` elements, neighbours in memory on neighbouring threads.
// `outer` is m or n, `tile` its extent in the tile.
template <bool k_contiguous, int tile> struct Reader {
  static constexpr int kCount = tile * kStageK / kThreads;
  static_assert(kThreads % kStageK == 0 && (kThreads % tile == 0), "a thread's elements are evenly spaced");
  // From one of the thread's elements to its next: along outer where k is contiguous, else along k.
  static constexpr int kSpacing = k_contiguous ? kThreads / kStageK : kThreads / tile;

  int o, k;  // of the first element, in the tile and the stage
  int64_t outer_left, k_left;
  AnyType at;
  int64_t spacing, stage;  // steps in elements

  __device__ Reader(AnyType start, int64_t outer_stride, int64_t k_stride, int64_t outer_extent, int64_t k_extent)
      : o(k_contiguous ? int(threadIdx.x) / kStageK : int(threadIdx.x) % tile),
        k(k_contiguous ? int(threadIdx.x) % kStageK : int(threadIdx.x) / tile),
        outer_left(outer_extent - o),
        k_left(k_extent - k),
        at(start + (o * outer_stride + k * k_stride)),
        spacing(kSpacing * (k_contiguous ? outer_stride : k_stride)),
        stage(kStageK * k_stride) {}

  // The next stage's elements, +0 past the extents.
  __device__ void fetch(float (&values)[kCount]) {
    AnyType from = at;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      bool inside = k_contiguous ? k_left > 0 && outer_left > i * kSpacing : outer_left > 0 && k_left > i * kSpacing;
      values[i] = inside ? from.value() : 0.0f;
      from = from + spacing;
    }
    at = at + stage;
    k_left -= kStageK;
  }

  __device__ void deposit(float *shared, const float (&values)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int row = k_contiguous ? k : k + i * kSpacing, column = k_contiguous ? o + i * kSpacing : o;
      shared[row * (tile + kPadding) + column] = values[i];
    }
  }
};

// A thread makes `side` by `side` elements of out.
template <class Problem, int side, bool a_k_contiguous, bool b_k_contiguous>
__global__ void __launch_bounds__(kThreads) gemm_ieee_kernel(const __grid_constant__ Problem problem) {
  constexpr int kThreadM = side, kThreadN = side;
  constexpr bool kFolds = side == 4;  // the large tile has no registers for the sums of chunks
  constexpr int kTileM = kThreadsM * kThreadM, kTileN = kThreadsN * kThreadN;
  extern __shared__ __align__(16) float shared[];
  constexpr int kStageA = kStageK * (kTileM + kPadding), kStageB = kStageK * (kTileN + kPadding);
  float *a_stages = shared, *b_stages = shared + 2 * kStageA;
  int thread_row = int(threadIdx.x) / kThreadsN, thread_column = int(threadIdx.x) % kThreadsN;
  const bool folds = kFolds && problem.k_chunk > 0;

  for (Jobs<Problem, kTileM, kTileN> jobs(problem); jobs.more(); jobs.advance()) {
    const Job job = jobs.job();
    int64_t m0 = job.m0, n0 = job.n0;
    int64_t stage_count = (job.k + kStageK - 1) / kStageK;
    const BatchOffsets &at = job.at;
    using ReaderA = Reader<a_k_contiguous, kTileM>;
    using ReaderB = Reader<b_k_contiguous, kTileN>;
    ReaderA a(AnyType(problem.a, at.a + m0 * problem.a.row_stride), problem.a.row_stride, problem.a.col_stride,
              job.m - m0, job.k);
    ReaderB b(AnyType(problem.b, at.b + n0 * problem.b.col_stride), problem.b.col_stride, problem.b.row_stride,
              problem.n - n0, job.k);

    // Calls f(value's indices, row, column) for every element of out that this thread holds.
    auto each = [&](auto f) {
      int row_thread = thread_row, column_thread = thread_column;
#pragma unroll
      for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
        for (int j = 0; j < kThreadN; ++j) {
          if (j % kQuad == 0) {
            recompute_on_amd(row_thread);
            recompute_on_amd(column_thread);
          }
          int64_t row = m0 + outer_of(row_thread, i, kThreadsM), column = n0 + outer_of(column_thread, j, kThreadsN);
          if (row < job.m && column < problem.n) f(i, j, row, column);
        }
      }
    };

    float chain[kThreadM][kThreadN] = {};
    float sum[kFolds ? kThreadM : 1][kThreadN] = {};
    if (problem.accumulate)
      each([&](int i, int j, int64_t row, int64_t column) {
        float start = load_f32(problem.out.data, problem.out.type, at.out + jobs.out_at(row, column));
        if (folds) sum[kFolds ? i : 0][j] = start;
        else chain[i][j] = start;
      });

    float a_next[ReaderA::kCount], b_next[ReaderB::kCount];
    auto fetch_stage = [&] {
      a.fetch(a_next);
      b.fetch(b_next);
    };
    auto deposit_stage = [&](int64_t stage) {
      a.deposit(a_stages + stage % 2 * kStageA, a_next);
      b.deposit(b_stages + stage % 2 * kStageB, b_next);
      __syncthreads();
    };
    if (stage_count > 0) {
      fetch_stage();
      deposit_stage(0);
    }
    int64_t chunk_left = problem.k_chunk;
    for (int64_t stage = 0; stage < stage_count; ++stage) {
      if (stage + 1 < stage_count) fetch_stage();
      const float *a_stage = a_stages + stage % 2 * kStageA, *b_stage = b_stages + stage % 2 * kStageB;
      float a_values[2][kThreadM], b_values[2][kThreadN];  // of this k, and of the next, on its way
      auto load = [&](int which, int k) {
        load_quads(a_values[which], a_stage + k * (kTileM + kPadding), thread_row, kThreadsM);
        load_quads(b_values[which], b_stage + k * (kTileN + kPadding), thread_column, kThreadsN);
      };
      auto step = [&](int which) {
#pragma unroll
        for (int i = 0; i < kThreadM; ++i)
#pragma unroll
          for (int j = 0; j < kThreadN; ++j) chain[i][j] = fmaf(a_values[which][i], b_values[which][j], chain[i][j]);
      };
      int64_t left = job.k - stage * kStageK;
      load(0, 0);
      if (left >= kStageK) {
#pragma unroll kUnroll
        for (int k = 0; k < kStageK; k += 2) {
          load(1, k + 1);
          step(0);
          if (k + 2 < kStageK) load(0, k + 2);
          step(1);
        }
      } else {
#pragma unroll
        for (int k = 0; k < kStageK; ++k) {
          if (k >= int(left)) break;
          if (k + 1 < kStageK) load((k + 1) % 2, k + 1);
          step(k % 2);
        }
      }
      chunk_left -= kStageK;
      if (folds && (chunk_left == 0 || stage + 1 == stage_count)) {
        chunk_left = problem.k_chunk;
#pragma unroll
        for (int i = 0; i < kThreadM; ++i)
#pragma unroll
          for (int j = 0; j < kThreadN; ++j) {
            sum[kFolds ? i : 0][j] += chain[i][j];
            chain[i][j] = 0.0f;
          }
      }
      // Two stages: the one filled now was last read before the barrier that ended the fill before.
      if (stage + 1 < stage_count) deposit_stage(stage + 1);
    }
    __syncthreads();  // the next tile's first stage overwrites one that may still be read

    each([&](int i, int j, int64_t row, int64_t column) {
      float x = folds ? sum[kFolds ? i : 0][j] : chain[i][j];
      if (problem.bias.data)
        x += load_f32(problem.bias.data, problem.bias.type,
                      at.bias + row * problem.bias.row_stride + column * problem.bias.col_stride);
      store_rounded(problem.out.data, problem.out.type, at.out + jobs.out_at(row, column), x);
    });
  }
}

template <int side, class Problem> pydet_status run(const char *name, const Problem &problem, unsigned blocks) {
  constexpr int kTileM = kThreadsM * side, kTileN = kThreadsN * side;
  bool a = problem.a.col_stride == 1, b = problem.b.row_stride == 1;  // k-contiguous
  auto kernel = a ? (b ? gemm_ieee_kernel<Problem, side, true, true> : gemm_ieee_kernel<Problem, side, true, false>)
                  : (b ? gemm_ieee_kernel<Problem, side, false, true> : gemm_ieee_kernel<Problem, side, false, false>);
  Launch shape = {name, static_cast<gpu_stream>(problem.stream), dim3(blocks), dim3(kThreads)};
  shape.shared_bytes = 2 * kStageK * (kTileM + kTileN + 2 * kPadding) * int(sizeof(float));
  DeviceGuard guard(problem.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  return launch(shape, kernel, problem);
}

template <int side> pydet_status gemm_ieee(const char *name, const Gemm &problem) {
  constexpr int kMaxBlocks = 1 << 20;  // more tiles than that are walked in turns
  constexpr int kTileM = kThreadsM * side, kTileN = kThreadsN * side;
  int64_t tiles = (problem.m + kTileM - 1) / kTileM * ((problem.n + kTileN - 1) / kTileN) * problem.batch.count;
  return run<side>(name, problem, unsigned(tiles < kMaxBlocks ? tiles : kMaxBlocks));
}

}  // namespace

pydet_status gemm_ieee_64x64(const Gemm &problem) { return gemm_ieee<4>("gemm_ieee_64x64", problem); }

#if !defined(__CUDACC__)  // there gemm_ieee_fp32.cu has its place
pydet_status gemm_ieee_128x128(const Gemm &problem) { return gemm_ieee<8>("gemm_ieee_128x128", problem); }
#endif

pydet_status grouped_gemm_ieee_64x64(const GroupedGemm &problem) {
  constexpr int kTile = kThreadsM * 4;
  return run<4>("grouped_gemm_ieee_64x64", problem, blocks_for(problem, kTile, kTile));
}

}  // namespace pydet
