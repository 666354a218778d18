// GEMM in arithmetic ieee on a GPU's plain fp32 units: the CPU's bits, in every layout, stride and alignment.
//
//   out[m, n] = round(chain_k(a[m, k] b[k, n]) + bias[m, n]),   fp32, bf16 and fp16 in
//   chain: c = fmaf(a[m, k], b[k, n], c), k ascending, from +0 or out; or chains of k_chunk, their sums added ascending
//
// A block of 256 threads makes a tile of 64x64, 4x4 a thread: for every type, stride and alignment, for small problems
// and for k_chunk; gemm_ieee_fp32.cu makes large fp32 ones. It lives on asynchronous copies, which AMD has not: there a
// tile of 128x128, 8x8 a thread, makes large products. Half of the threads read a and half b, 16 bytes at a time where
// they are aligned and inside the matrix. A stage, of 16 or 8 k, is converted to fp32 on its way to shared memory, k-major
// whatever the operand's layout; the next stage's loads are in flight during this one's products. Zero padding would turn
// a chain of -0 into +0, so the last stage is walked to K and no further.

#include "gpu/any/epilogue.h"
#include "gpu/any/jobs.h"
#include "gpu/kernels.h"
#include "gpu/any/quads.h"

namespace pydet {
namespace {

constexpr int kThreads = 256;
constexpr int kReaders = kThreads / 2;  // of one operand
constexpr int kPieceBytes = 16;
constexpr int kShare = 2 * kQuad;  // elements of every stage a thread: two pieces of fp32, one of 16-bit types
static_assert(kShare * sizeof(uint16_t) == kPieceBytes && kQuad * sizeof(float) == kPieceBytes, "whole pieces");

constexpr int kThreadsN = 16, kThreadsM = kThreads / kThreadsN;  // threads of a block along n and m

// A stage of one operand in shared memory, k-major. Threads that store neighbours along k hold rows of k that differ by
// kQuad: those lie next to each other, at a pitch that spreads them over the banks.
template <int tile> struct Stage {
  static constexpr int kDepth = kShare * kReaders / tile;
  static constexpr int kQuadsK = kDepth / kQuad, kQuadsOuter = tile / kQuad;
  static constexpr int kPitch = tile + 32 / kQuadsK;  // floats; keeps 16-byte alignment
  static constexpr int kFloats = kDepth * kPitch;
  static_assert(kChunkMultiple % kDepth == 0, "a chunk ends where a stage ends");

  __device__ static constexpr int row_of(unsigned k) { return int(k % kQuad * kQuadsK + k / kQuad); }
};

// Two quads of one thread as they lie in memory: of fp32 a quad each; of 16-bit types both in `first`, or where they are
// not `packed` an element to a word.
struct Quads {
  uint4 first, second;
  bool packed;
};

// This thread's share of every stage of one operand, whose elements are as large as a Word: two quads, neighbours along k
// where those are adjacent in memory, else along m or n ("outer"). Past the matrix it reads what is inside, which nobody
// uses.
template <int tile, class Word> struct Reader {
  using Shared = Stage<tile>;
  static constexpr int kSize = sizeof(Word);
  static constexpr bool kPair = kSize == 4;  // of pieces; else of quads in one piece

  Type type;
  bool along_k, whole;            // `whole`: the pieces of whole stages are aligned and inside
  int64_t adjacent, cross, next;  // bytes from an element to the next of its quad, across, and to the next stage's
  const char *first, *second;     // the quads in the next stage
  int first_k, second_k;          // in the stage
  int first_left, second_left;    // elements of the tile from there on, where neighbours are along outer
  int first_at, second_at;        // in a stage in shared memory

  // `start`: of the tile, of which `left` rows (columns) and more may be inside.
  __device__ Reader(int reader, const char *start, Type of, int64_t outer_stride, int64_t k_stride, int64_t left)
      : type(of), along_k(k_stride == 1) {
    const int extent = left < tile ? int(left) : tile;
    adjacent = (along_k ? k_stride : outer_stride) * kSize;
    cross = (along_k ? outer_stride : k_stride) * kSize;
    next = Shared::kDepth * k_stride * kSize;
    whole = adjacent == kSize && (reinterpret_cast<uintptr_t>(start) | uint64_t(cross)) % kPieceBytes == 0 &&
            (along_k || extent % (kPieceBytes / kSize) == 0);

    // Quad q of the stage, in the order of memory.
    auto place = [&](unsigned q, const char *&from, int &k, int &inside, int &at) {
      const unsigned quads = along_k ? Shared::kQuadsK : Shared::kQuadsOuter;  // in a row
      const unsigned row = along_k ? q / Shared::kQuadsK : q / Shared::kQuadsOuter;
      const int along = int(q - row * quads) * kQuad, across = int(row);
      k = along_k ? along : across;
      at = Shared::row_of(k) * Shared::kPitch + (along_k ? across : along);
      const int row_read = !along_k || across < extent ? across : extent - 1;
      const int from_along = along_k || !whole || along < extent ? along : 0;
      inside = extent - from_along;
      from = start + row_read * cross + from_along * adjacent;
    };
    place(kPair ? reader : 2 * reader, first, first_k, first_left, first_at);
    place(kPair ? reader + kReaders : 2 * reader + 1, second, second_k, second_left, second_at);
  }

  // Of a stage of `depth` k.
  __device__ void fetch(Quads &quads, int depth) {
    quads.packed = whole && depth == Shared::kDepth;
    if (quads.packed) {
      quads.first = *reinterpret_cast<const uint4 *>(first);
      if (kPair) quads.second = *reinterpret_cast<const uint4 *>(second);
    } else {
      quads.first = elements(first, first_k, first_left, depth);
      quads.second = elements(second, second_k, second_left, depth);
    }
    first += next;
    second += next;
  }

  __device__ uint4 elements(const char *from, int k, int left, int depth) const {
    const int last = (along_k ? depth - k : left) - 1;  // inside, or before this quad
    if (!along_k && k >= depth) from -= (k - depth + 1) * cross;
    auto element = [&](int i) -> uint32_t {
      return *reinterpret_cast<const Word *>(from + (i < last ? i : last) * adjacent);
    };
    return make_uint4(element(0), element(1), element(2), element(3));
  }

  // A quad in fp32.
  __device__ float4 value(const Quads &quads, bool second_quad) const {
    uint4 words = second_quad ? quads.second : quads.first;
    if constexpr (kPair) return make_float4(float_of(words.x), float_of(words.y), float_of(words.z), float_of(words.w));
    if (quads.packed) {
      const uint32_t low = second_quad ? quads.first.z : quads.first.x;
      const uint32_t high = second_quad ? quads.first.w : quads.first.y;
      words = make_uint4(low, low >> 16, high, high >> 16);
    }
    auto convert = [&](uint32_t word) {
      return type == Type::bf16 ? f32_from_bf16(uint16_t(word)) : f32_from_f16(uint16_t(word));
    };
    return make_float4(convert(words.x), convert(words.y), convert(words.z), convert(words.w));
  }

  __device__ void deposit(float *stage, const Quads &quads) const {
    auto store = [&](float *to, float4 quad) {
      if (along_k) {
        constexpr int kStep = Shared::row_of(1) * Shared::kPitch;
        to[0] = quad.x, to[kStep] = quad.y, to[2 * kStep] = quad.z, to[3 * kStep] = quad.w;
      } else {
        *reinterpret_cast<float4 *>(to) = quad;
      }
    };
    store(stage + first_at, value(quads, false));
    store(stage + second_at, value(quads, true));
  }
};

// A thread makes `side` by `side` elements of out.
template <class Problem, int side, class Word>
__global__ void __launch_bounds__(kThreads) gemm_ieee_kernel(const __grid_constant__ Problem problem) {
  constexpr int kThreadM = side, kThreadN = side;
  constexpr bool kFolds = side == 4;  // the large tile has no registers for the sums of chunks
  constexpr int kTileM = kThreadsM * kThreadM, kTileN = kThreadsN * kThreadN;
  extern __shared__ __align__(16) float shared[];
  static_assert(kTileM == kTileN, "half of the threads for either operand");
  using Shared = Stage<kTileM>;
  constexpr int kStageK = Shared::kDepth;
  float *a_stages = shared, *b_stages = shared + 2 * Shared::kFloats;
  int thread_row = int(threadIdx.x) / kThreadsN, thread_column = int(threadIdx.x) % kThreadsN;
  const bool folds = kFolds && problem.k_chunk > 0;

  for (Jobs<Problem, kTileM, kTileN> jobs(problem); jobs.more(); jobs.advance()) {
    const Job job = jobs.job();
    int64_t m0 = job.m0, n0 = job.n0;
    int64_t stage_count = (job.k + kStageK - 1) / kStageK;
    const BatchOffsets &at = job.at;
    const bool reads_a = same_in_warp(int(threadIdx.x) / kReaders) == 0;
    const int reader_number = int(threadIdx.x) % kReaders;
    auto start_of = [](const Matrix &matrix, int64_t offset) { return matrix.data + offset * size_of(matrix.type); };
    Reader<kTileM, Word> reader(
        reader_number,
        reads_a ? start_of(problem.a, at.a + m0 * problem.a.row_stride)
                : start_of(problem.b, at.b + n0 * problem.b.col_stride),
        reads_a ? problem.a.type : problem.b.type, reads_a ? problem.a.row_stride : problem.b.col_stride,
        reads_a ? problem.a.col_stride : problem.b.row_stride, reads_a ? job.m - m0 : problem.n - n0);
    float *const deposits = reads_a ? a_stages : b_stages;

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

    auto fetch_stage = [&](Quads &quads, int64_t stage) {
      const int64_t left = job.k - stage * kStageK;
      reader.fetch(quads, left < kStageK ? int(left) : kStageK);
    };
    auto deposit_stage = [&](const Quads &quads, int64_t stage) {
      reader.deposit(deposits + stage % 2 * Shared::kFloats, quads);
      __syncthreads();
    };
    if (stage_count > 0) {
      Quads quads;
      fetch_stage(quads, 0);
      deposit_stage(quads, 0);
    }
    float a_values[2][kThreadM], b_values[2][kThreadN];  // of this k, and of the next, on its way
    auto load = [&](int which, int64_t stage, int row) {
      const int at_row = int(stage % 2) * Shared::kFloats + row * Shared::kPitch;
      load_quads(a_values[which], a_stages + at_row, thread_row, kThreadsM);
      load_quads(b_values[which], b_stages + at_row, thread_column, kThreadsN);
    };
    auto step = [&](int which) {
#pragma unroll
      for (int i = 0; i < kThreadM; ++i)
#pragma unroll
        for (int j = 0; j < kThreadN; j += 2) fma_pair(a_values[which][i], &b_values[which][j], &chain[i][j]);
    };
    auto fold = [&] {
#pragma unroll
      for (int i = 0; i < kThreadM; ++i)
#pragma unroll
        for (int j = 0; j < kThreadN; ++j) {
          sum[kFolds ? i : 0][j] += chain[i][j];
          chain[i][j] = 0.0f;
        }
    };
    auto walk = [&](int64_t stage) {
      load(0, stage, 0);
#pragma unroll
      for (int quad = 0; quad < Shared::kQuadsK; ++quad) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          if (i + 1 < kQuad) load((i + 1) % 2, stage, Shared::row_of(i + 1) + quad);
          else if (quad + 1 < Shared::kQuadsK) load(0, stage, quad + 1);
          step(i % 2);
        }
      }
    };
    int64_t chunk_left = problem.k_chunk;
    wait_for_loads_on_amd();
    for (int64_t stage = 0; stage < stage_count - 1; ++stage) {
      Quads quads;
      fetch_stage(quads, stage + 1);
      walk(stage);
      chunk_left -= kStageK;
      if (folds && chunk_left == 0) {
        chunk_left = problem.k_chunk;
        fold();
      }
      // Two stages: the one filled now was last read before the barrier that ended the fill before.
      deposit_stage(quads, stage + 1);
    }
    if (stage_count > 0) {
      const int rest = int(job.k % kStageK);
      if (rest == 0) walk(stage_count - 1);
#pragma unroll 1
      for (int k = 0; k < rest; ++k) {
        load(0, stage_count - 1, Shared::row_of(k));
        step(0);
      }
      if (folds) fold();
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
  constexpr int kTile = kThreadsM * side;
  auto kernel = problem.a.type == Type::f32 ? gemm_ieee_kernel<Problem, side, uint32_t>
                                            : gemm_ieee_kernel<Problem, side, uint16_t>;
  Launch shape = {name, static_cast<gpu_stream>(problem.stream), dim3(blocks), dim3(kThreads)};
  shape.shared_bytes = 4 * Stage<kTile>::kFloats * int(sizeof(float));  // two of either operand
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
