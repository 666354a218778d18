// Batches of small products in arithmetic ieee: the sums over a token's experts, and their gradients. A tile of 64x64
// (gpu/any/gemm_ieee.cu) makes 64 times as much of them as there is.
//
//   chain: c = fmaf(a[m, k], b[k, n], c), k ascending, from +0 or out
//
//   columns   a few rows of out, as long as b's, whose columns are adjacent: a thread makes eight columns of one row
//   dots      a few rows and columns, and long chains along k, which is adjacent in both: a thread makes one element
//
// Threads of a warp that make dots of one matrix read one row of a and each its own of b: 16 bytes at a time, of lines
// that the L1 keeps until all of them are read; the next 64 bytes are on their way while the last ones are multiplied.

#include "gpu/any/rows.h"
#include "gpu/kernels.h"
#include "ops/gemm/problem.h"

namespace pydet {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostRows = 8, kMostColumns = 32;     // of dots; of columns the rows alone
constexpr int64_t kLongest = 64, kMostItems = 1 << 30;  // k of columns; threads of a launch
constexpr int kPieces = 4;                              // of 16 bytes that a thread of dots has under way

bool aligned(const Matrix &matrix, const int64_t (&batch)[kMaxBatchDims], int64_t stride, int dims, int bytes) {
  uint64_t all = uint64_t(stride);
  for (int i = 0; i < dims; ++i) all |= uint64_t(batch[i]);
  return (reinterpret_cast<uintptr_t>(matrix.data) | all * uint64_t(size_of(matrix.type))) % uint64_t(bytes) == 0;
}

template <bool whole> __global__ void __launch_bounds__(kThreads)
    gemm_few_columns_kernel(const __grid_constant__ Gemm problem, int64_t items) {
  wait_for_previous_kernel();
  const int64_t groups = (problem.n + kVector - 1) / kVector;
  const int size = size_of(problem.b.type);
  for (int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x; item < items;
       item += int64_t(gridDim.x) * kThreads) {
    const int64_t row_of_all = item / groups, n = (item - row_of_all * groups) * kVector;
    const int64_t number = row_of_all / problem.m, m = row_of_all - number * problem.m;
    const BatchOffsets at = batch_offsets(problem.batch, number);
    const int64_t out_row = at.out + m * problem.out.row_stride, a_row = at.a + m * problem.a.row_stride;
    char *const out = problem.out.data + out_row * size_of(problem.out.type);
    float sum[kVector] = {};
    if (problem.accumulate) load_eight(out, problem.out.type, n, problem.n, whole, sum);
#pragma unroll 4
    for (int64_t k = 0; k < problem.k; ++k) {
      float x[kVector];
      load_eight(problem.b.data + (at.b + k * problem.b.row_stride) * size, problem.b.type, n, problem.n, whole, x);
      const float factor = load_f32(problem.a.data, problem.a.type, a_row + k * problem.a.col_stride);
#pragma unroll
      for (int e = 0; e < kVector; ++e) sum[e] = fmaf(factor, x[e], sum[e]);
    }
    store_eight(out, problem.out.type, n, problem.n, whole, sum);
  }
}

template <Type type> __global__ void __launch_bounds__(kThreads)
    gemm_few_dots_kernel(const __grid_constant__ Gemm problem, int64_t items) {
  constexpr int kOfPiece = 16 / size_of(type), kStep = kPieces * kOfPiece;
  wait_for_previous_kernel();
  const int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= items) return;
  const int64_t row_of_all = item / problem.n, n = item - row_of_all * problem.n;
  const int64_t number = row_of_all / problem.m, m = row_of_all - number * problem.m;
  const BatchOffsets at = batch_offsets(problem.batch, number);
  const char *const a = problem.a.data + (at.a + m * problem.a.row_stride) * size_of(type);
  const char *const b = problem.b.data + (at.b + n * problem.b.col_stride) * size_of(type);
  const int64_t out = at.out + m * problem.out.row_stride + n, steps = problem.k / kStep;

  struct Ahead {
    uint4 a[kPieces], b[kPieces];
  };
  const auto fetch = [&](Ahead &to, int64_t step) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      to.a[i] = *reinterpret_cast<const uint4 *>(a + (step * kPieces + i) * 16);
      to.b[i] = *reinterpret_cast<const uint4 *>(b + (step * kPieces + i) * 16);
    }
  };
  const auto element = [](const uint4 &piece, int e) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
    if constexpr (type == Type::f32) return float_of(words[e]);
    else {
      const auto half = uint16_t(words[e / 2] >> e % 2 * 16);
      return type == Type::bf16 ? f32_from_bf16(half) : f32_from_f16(half);
    }
  };
  float sum = problem.accumulate ? load_f32(problem.out.data, problem.out.type, out) : 0.0f;
  Ahead now, next;
  if (steps > 0) fetch(now, 0);
#pragma unroll 1
  for (int64_t step = 0; step < steps; ++step) {
    if (step + 1 < steps) fetch(next, step + 1);
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int e = 0; e < kOfPiece; ++e) sum = fmaf(element(now.a[i], e), element(now.b[i], e), sum);
    now = next;
  }
  for (int64_t k = steps * kStep; k < problem.k; ++k) sum = fmaf(load_f32(a, type, k), load_f32(b, type, k), sum);
  store_rounded(problem.out.data, problem.out.type, out, sum);
}

pydet_status start(const char *name, const Gemm &problem, void (*kernel)(Gemm, int64_t), int64_t items) {
  const int64_t blocks = (items + kThreads - 1) / kThreads;
  Launch shape = {name, static_cast<gpu_stream>(problem.stream), dim3(unsigned(blocks)), dim3(kThreads)};
  DeviceGuard guard(problem.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  return launch(shape, kernel, problem, items);
}

int64_t items_of_columns(const Gemm &g) { return (g.n + kVector - 1) / kVector * g.m * g.batch.count; }

// Extents are checked one by one: their product may be more than 64 bits hold.
bool few(const Gemm &g, int64_t of_each) { return g.m <= kMostRows && g.batch.count <= kMostItems / (g.m * of_each); }

}  // namespace

bool gemm_few_columns_takes(const Gemm &g) {
  return g.k <= kLongest && g.n <= kMostItems && few(g, (g.n + kVector - 1) / kVector) &&
         (g.b.col_stride == 1 || g.n == 1);
}
pydet_status gemm_few_columns(const Gemm &g) {
  const int dims = g.batch.dims;
  const bool whole = g.n % kVector == 0 && aligned(g.b, g.batch.b, g.b.row_stride, dims, kVector * size_of(g.b.type)) &&
                     aligned(g.out, g.batch.out, g.out.row_stride, dims, kVector * size_of(g.out.type));
  return start("gemm_few_columns", g, whole ? gemm_few_columns_kernel<true> : gemm_few_columns_kernel<false>,
               items_of_columns(g));
}

bool gemm_few_dots_takes(const Gemm &g) {
  const auto along_k = [](int64_t stride, int64_t k) { return stride == 1 || k <= 1; };
  return g.n <= kMostColumns && few(g, g.n) && along_k(g.a.col_stride, g.k) && along_k(g.b.row_stride, g.k) &&
         aligned(g.a, g.batch.a, g.a.row_stride, g.batch.dims, 16) &&
         aligned(g.b, g.batch.b, g.b.col_stride, g.batch.dims, 16);
}
pydet_status gemm_few_dots(const Gemm &g) {
  const int64_t items = g.m * g.n * g.batch.count;
  const auto kernel = g.a.type == Type::f32    ? gemm_few_dots_kernel<Type::f32>
                      : g.a.type == Type::bf16 ? gemm_few_dots_kernel<Type::bf16>
                                               : gemm_few_dots_kernel<Type::f16>;
  return start("gemm_few_dots", g, kernel, items);
}

}  // namespace pydet
