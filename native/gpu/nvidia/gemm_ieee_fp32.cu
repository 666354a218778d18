// Large fp32 GEMM in arithmetic ieee on a GPU's plain fp32 units: the CPU's bits.
//
//   out[m, n] = round(chain_k(a[m, k] b[k, n]) + bias[m, n]);   chain: c = fmaf(a[m, k], b[k, n], c), k ascending, from
//   +0 or out
//
// A block of 256 threads makes a tile of 128x256, 8x16 a thread, from a ring of stages of 16 k that asynchronous copies
// fill: 16 bytes at a time where an operand's outer dimension is adjacent in memory, an element at a time, transposing,
// where k is. Fragments of the next k are loaded while this one's products are made; copies are spread over the stage.
// What lies past an edge is a copy of the last row (zeros, where columns are adjacent) and never stored; the part of a
// stage past K is not walked, since products of zeros would turn a chain of -0 into +0.

#include <algorithm>

#include "gpu/any/epilogue.h"
#include "gpu/kernels.h"
#include "gpu/any/quads.h"
#include "ops/gemm/problem.h"

namespace pydet {
namespace {

constexpr int kThreads = 256;
constexpr int kThreadM = 8, kThreadN = 16;     // elements of out a thread: quads, far apart
constexpr int kThreadsM = 16, kThreadsN = 16;  // threads of a block along m and n
constexpr int kLanesN = 8, kWarpsM = 4;        // of which a warp is 4 by 8
constexpr int kTileM = kThreadM * kThreadsM, kTileN = kThreadN * kThreadsN;
constexpr int kStageK = 16;
constexpr int kPadding = 4;  // floats a row: keeps 16-byte alignment, spreads the transposing copies over the banks
constexpr int kBand = 16;    // tiles under each other that are walked together, for the L2
constexpr int kStageBytes = kStageK * (kTileM + kTileN + 2 * kPadding) * int(sizeof(float));
constexpr int kStages = std::min(4, kBlockSharedBytes / kStageBytes);
static_assert(kStages >= 2, "one stage is read while another fills");

// This thread's share of the copies of every stage of one operand into k-major rows. `tile` is the extent of the outer
// dimension, m or n.
template <bool k_adjacent, int tile> struct Copier {
  static constexpr int kRow = tile + kPadding, kFloats = kStageK * kRow;
  static constexpr int kNeighbours = k_adjacent ? 8 : tile / kQuad;  // threads on adjacent memory
  static constexpr int kRows = k_adjacent ? tile * kNeighbours / kThreads : 1;
  static constexpr int kCount = k_adjacent ? kRows * kStageK / kNeighbours : tile * kStageK / kQuad / kThreads;
  static constexpr int kSpacing = kThreads / kNeighbours;  // between a thread's rows of outer (k adjacent), or of k

  const float *from;
  int offsets[kRows];  // of its rows
  int first_k, to, valid;
  int64_t stride;

  // `stride` is that of the dimension that is not adjacent; `outer_left` at least 1.
  __device__ Copier(const float *start, int64_t row_stride, int64_t outer_left) : stride(row_stride) {
    const int along = int(threadIdx.x) % kNeighbours, across = int(threadIdx.x) / kNeighbours;
    if constexpr (k_adjacent) {
      for (int i = 0; i < kRows; ++i)
        offsets[i] = int((across + i * kSpacing < outer_left ? across + i * kSpacing : outer_left - 1) * stride);
      first_k = along;
      from = start + along;
      to = along * kRow + across;
    } else {
      const int64_t left = outer_left - along * kQuad;
      valid = int(left < 0 ? 0 : left < kQuad ? left : kQuad) * int(sizeof(float));
      first_k = across;
      from = start + across * stride + (valid ? along * kQuad : 0);
      to = across * kRow + along * kQuad;
    }
  }

  // Where in k copy i lies, after first_k.
  __device__ static constexpr int k_of(int i) { return k_adjacent ? i / kRows * kNeighbours : i * kSpacing; }

  __device__ __forceinline__ void copy(int i, float *stage) const {
    if constexpr (k_adjacent)
      copy_async_4(stage + to + k_of(i) * kRow + i % kRows * kSpacing, from + offsets[i % kRows] + k_of(i));
    else copy_async_16(stage + to + k_of(i) * kRow, from + k_of(i) * stride, valid);
  }

  __device__ __forceinline__ void advance() {
    from += k_adjacent ? kStageK : kStageK * stride;
    make_opaque(from);  // else every copy's own address is kept, for which there are no registers
  }
};

template <bool a_k_adjacent, bool b_k_adjacent>
__global__ void __launch_bounds__(kThreads, 1) gemm_ieee_fp32_kernel(const __grid_constant__ Gemm problem) {
  using CopierA = Copier<a_k_adjacent, kTileM>;
  using CopierB = Copier<b_k_adjacent, kTileN>;
  constexpr int kStageFloats = CopierA::kFloats + CopierB::kFloats, kCopies = CopierA::kCount + CopierB::kCount;
  extern __shared__ __align__(16) float shared[];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int thread_row = warp % kWarpsM * (32 / kLanesN) + lane / kLanesN;
  const int thread_column = warp / kWarpsM * kLanesN + lane % kLanesN;
  const int64_t tiles_m = (problem.m + kTileM - 1) / kTileM, tiles_n = (problem.n + kTileN - 1) / kTileN;
  const int64_t whole = problem.k / kStageK;
  const int64_t matrix = blockIdx.x / (tiles_m * tiles_n), tile = blockIdx.x % (tiles_m * tiles_n);
  const int64_t band = tile / (kBand * tiles_n), within = tile % (kBand * tiles_n);
  const int64_t height = tiles_m - band * kBand < kBand ? tiles_m - band * kBand : kBand;
  const int64_t m0 = (band * kBand + within % height) * kTileM, n0 = within / height * kTileN;
  const BatchOffsets at = batch_offsets(problem.batch, matrix);
  const Matrix &out = problem.out;
  CopierA a(reinterpret_cast<const float *>(problem.a.data) + at.a + m0 * problem.a.row_stride,
            a_k_adjacent ? problem.a.row_stride : problem.a.col_stride, problem.m - m0);
  CopierB b(reinterpret_cast<const float *>(problem.b.data) + at.b + n0 * problem.b.col_stride,
            b_k_adjacent ? problem.b.col_stride : problem.b.row_stride, problem.n - n0);

  // Calls f(value's indices, row, column) for every element of out that this thread holds.
  auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kThreadM; ++i)
#pragma unroll
      for (int j = 0; j < kThreadN; ++j) {
        const int64_t row = m0 + outer_of(thread_row, i, kThreadsM);
        const int64_t column = n0 + outer_of(thread_column, j, kThreadsN);
        if (row < problem.m && column < problem.n) f(i, j, row, column);
      }
  };

  float chain[kThreadM][kThreadN] = {};
  if (problem.accumulate)
    each([&](int i, int j, int64_t row, int64_t column) {
      chain[i][j] = load_f32(out.data, out.type, at.out + row * out.row_stride + column);
    });

  auto copy = [&](int i, float *stage) {
    if (i < CopierA::kCount) a.copy(i, stage);
    else b.copy(i - CopierA::kCount, stage + CopierA::kFloats);
  };
  auto advance = [&] {
    a.advance();
    b.advance();
  };
  float a_values[2][kThreadM], b_values[2][kThreadN];  // of this k, and of the next, on its way
  auto load = [&](int which, const float *stage, int k) {
    load_quads(a_values[which], stage + k * CopierA::kRow, thread_row, kThreadsM);
    load_quads(b_values[which], stage + CopierA::kFloats + k * CopierB::kRow, thread_column, kThreadsN);
  };
  // To and fro, so that neighbouring instructions share an operand.
  auto step = [&](int which) {
#pragma unroll
    for (int i = 0; i < kThreadM; ++i)
#pragma unroll
      for (int j = 0; j < kThreadN; ++j) {
        const int column = i % 2 ? kThreadN - 1 - j : j;
        chain[i][column] = fmaf(a_values[which][i], b_values[which][column], chain[i][column]);
      }
  };

  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < whole) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) copy(i, shared + stage * kStageFloats);
      advance();
    }
    commit_copies();
  }
  wait_copies<kStages - 2>();
  __syncthreads();
  if (whole > 0) load(0, shared, 0);

  int reads = 0, fills = kStages - 1;
#pragma unroll 1
  for (int64_t stage = 0; stage < whole; ++stage) {
    const bool more = stage + kStages - 1 < whole;
    const float *here = shared + reads * kStageFloats;
    float *filled = shared + fills * kStageFloats;
    reads = reads + 1 == kStages ? 0 : reads + 1;
    fills = fills + 1 == kStages ? 0 : fills + 1;
#pragma unroll
    for (int k = 0; k < kStageK; ++k) {
      if (k + 1 < kStageK) {
        load((k + 1) % 2, here, k + 1);
        if (more) {
#pragma unroll
          for (int i = k * kCopies / (kStageK - 1); i < (k + 1) * kCopies / (kStageK - 1); ++i) copy(i, filled);
        }
      } else {
        // All have read this stage, and the next is here.
        if (more) advance();
        commit_copies();
        wait_copies<kStages - 2>();
        __syncthreads();
        load(0, shared + reads * kStageFloats, 0);  // after the last stage: of no use, and not used
      }
      step(k % 2);
    }
  }
  if (const int left = int(problem.k - whole * kStageK)) {
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < CopierA::kCount; ++i)
      if (a.first_k + CopierA::k_of(i) < left) a.copy(i, shared);
#pragma unroll
    for (int i = 0; i < CopierB::kCount; ++i)
      if (b.first_k + CopierB::k_of(i) < left) b.copy(i, shared + CopierA::kFloats);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
#pragma unroll 1
    for (int k = 0; k < left; ++k) {
      load(0, shared, k);
      step(0);
    }
  }
  if (out.type == Type::f32 && !problem.bias.data && m0 + kTileM <= problem.m && n0 + kTileN <= problem.n &&
      (reinterpret_cast<uintptr_t>(out.data) / sizeof(float) + at.out) % kQuad == 0 && out.row_stride % kQuad == 0) {
    float *to = reinterpret_cast<float *>(out.data) + at.out + m0 * out.row_stride + n0;
#pragma unroll
    for (int i = 0; i < kThreadM; ++i)
#pragma unroll
      for (int j = 0; j < kThreadN; j += kQuad) {
        const float *x = chain[i] + j;
        *reinterpret_cast<float4 *>(to + outer_of(thread_row, i, kThreadsM) * out.row_stride +
                                    outer_of(thread_column, j, kThreadsN)) =
            make_float4(canonical(x[0]), canonical(x[1]), canonical(x[2]), canonical(x[3]));
      }
    return;
  }
  each([&](int i, int j, int64_t row, int64_t column) {
    float x = chain[i][j];
    if (problem.bias.data)
      x += load_f32(problem.bias.data, problem.bias.type,
                    at.bias + row * problem.bias.row_stride + column * problem.bias.col_stride);
    store_rounded(out.data, out.type, at.out + row * out.row_stride + column, x);
  });
}

// The copies reach an operand whose k is adjacent, or whose outer dimension is, in steps of 16 bytes; a tile's offsets
// fit an int.
bool reaches(const Matrix &matrix, int64_t k_stride, int64_t outer_stride, int64_t k, const Batch &batch,
             const int64_t (&batch_strides)[kMaxBatchDims]) {
  constexpr int64_t kMostStride = (int64_t(1) << 31) / kTileN;
  if (k_stride == 1 || k == 1) return outer_stride >= 0 && outer_stride < kMostStride;
  bool aligned = outer_stride == 1 && k_stride % kQuad == 0 && reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0;
  for (int i = 0; i < batch.dims; ++i) aligned &= batch_strides[i] % kQuad == 0;
  return aligned;
}

int64_t tile_count(const Gemm &g) { return divide_up(g.m, kTileM) * divide_up(g.n, kTileN) * g.batch.count; }

}  // namespace

bool gemm_ieee_128x256_takes(const Gemm &g) {
  constexpr int64_t kMostBlocks = (int64_t(1) << 31) - 1;
  return tile_count(g) <= kMostBlocks && reaches(g.a, g.a.col_stride, g.a.row_stride, g.k, g.batch, g.batch.a) &&
         reaches(g.b, g.b.row_stride, g.b.col_stride, g.k, g.batch, g.batch.b);
}

pydet_status gemm_ieee_128x256(const Gemm &g) {
  constexpr const char *kName = "gemm_ieee_128x256";
  const bool a = g.a.col_stride == 1 || g.k == 1, b = g.b.row_stride == 1 || g.k == 1;
  auto kernel = a ? (b ? gemm_ieee_fp32_kernel<true, true> : gemm_ieee_fp32_kernel<true, false>)
                  : (b ? gemm_ieee_fp32_kernel<false, true> : gemm_ieee_fp32_kernel<false, false>);
  Launch shape = {kName, static_cast<gpu_stream>(g.stream), dim3(unsigned(tile_count(g))), dim3(kThreads)};
  shape.shared_bytes = kStages * kStageBytes;
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(kName, guard.error());
  return launch(shape, kernel, g);
}

}  // namespace pydet
