// Products of operands that the copy engine cannot read, since their rows begin between two units of 16 bytes, as with
// K = 3420 or a vocabulary of 50257. Each such operand is first copied into the workspace, to rows that begin at lines of
// the L2; then Hopper's kernels multiply the copies, to the same bits. What is copied is read and written once, while a
// kernel that loads single elements takes three to ten times as long as all of this.

#include <algorithm>

#include "gpu/gpu.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/pieces.h"
#include "gpu/nvidia/sm90/gemm.h"
#include "ops/gemm/problem.h"

namespace pydet {
namespace {

constexpr int kUnit = 8;   // elements in 16 bytes
constexpr int kLine = 64;  // in a line of the L2
constexpr int kThreads = 256;
constexpr int64_t kMostExtent = int64_t(1) << 30;
constexpr uint64_t kMostBytes = uint64_t(1) << 30;  // more room a call should not ask for

// Rows of adjacent elements: those of the matrix or of its transpose, whichever are longer.
bool by_columns(const Matrix &x) { return x.col_stride != 1 || (x.row_stride == 1 && x.rows > x.cols); }
Matrix by_rows(const Matrix &x) { return by_columns(x) ? transposed(x) : x; }

// Which of its dimensions k is makes no difference.
bool lies_well(const Matrix &x) {
  Sm90Operand operand;
  return sm90_operand(x, x.cols, x.col_stride, x.rows, x.row_stride, &operand);
}

int64_t copied_stride(const Matrix &x) { return divide_up(x.cols, kLine) * kLine; }

// One operand. There are fewer than 2^31 vectors, of kMostBytes.
struct CopiedRows {
  const char *from;
  char *to;
  int64_t from_stride, to_stride;
  int rows, extent, vectors;  // vectors: of kUnit elements in a row
};
struct CopiedOperands {
  CopiedRows operand[2];
  int first_blocks;  // that copy the first of them
};

// A thread makes a vector of the copy from the one or two of memory in which its elements lie.
__global__ void __launch_bounds__(kThreads) copy_operands(const __grid_constant__ CopiedOperands p) {
  let_next_kernel_start();
  const bool second = int(blockIdx.x) >= p.first_blocks;
  const CopiedRows &x = p.operand[second];
  const int index = (int(blockIdx.x) - (second ? p.first_blocks : 0)) * kThreads + int(threadIdx.x);
  const int row = index / x.vectors, first = (index - row * x.vectors) * kUnit;
  wait_for_previous_kernel();
  if (row >= x.rows) return;
  const char *const from = x.from + row * x.from_stride * 2;
  const int behind = shift_of<Type::bf16, kUnit>(from);
  const bool apart = x.from_stride >= kUnit;  // else a vector may reach past both ends of the operand
  const bool before = apart && row > 0, after = apart && row + 1 < x.rows;
  const auto own = load_piece<Type::bf16, kUnit>(from, first - behind, x.extent, before, after);
  auto next = own;
  if (behind) next = load_piece<Type::bf16, kUnit>(from, first - behind + kUnit, x.extent, before, after);
  *reinterpret_cast<Packed<Type::bf16, kUnit> *>(x.to + (row * x.to_stride + first) * 2) =
      window<Type::bf16, kUnit>(own, next, behind);
}

// The operand's copy at `to`, in the operand's own orientation; what is to be copied goes to *rows.
Matrix copy_of(const Matrix &matrix, char *to, CopiedRows *rows) {
  const Matrix x = by_rows(matrix);
  const int64_t stride = copied_stride(x);
  *rows = {x.data, to, x.row_stride, stride, int(x.rows), int(x.cols), int(divide_up(x.cols, kUnit))};
  const Matrix copy = {to, x.type, x.rows, x.cols, stride, 1};
  return by_columns(matrix) ? transposed(copy) : copy;
}

}  // namespace

uint64_t gemm_copied_bytes(const Matrix &matrix) {
  if (!(bit(matrix.type) & kHalfTypes) || lies_well(matrix)) return 0;
  const Matrix x = by_rows(matrix);
  if (x.rows > kMostExtent || x.cols > kMostExtent) return 0;
  const uint64_t bytes = uint64_t(x.rows) * uint64_t(copied_stride(x)) * 2;
  return bytes <= kMostBytes ? bytes : 0;
}

bool gemm_copied_takes(const Gemm &g) {
  if (g.batch.dims > 0 || g.k == 0 || g.from.data || g.m > kMostExtent || g.n > kMostExtent) return false;
  const uint64_t a = gemm_copied_bytes(g.a), b = gemm_copied_bytes(g.b);
  return a + b > 0 && a + b <= g.workspace_size && (a || lies_well(g.a)) && (b || lies_well(g.b));
}

// Few rows by many weights are made faster of the weights where they lie: 1x16384x4100 in 71 us, with copies in 140, but
// 64x1280x3420 in 18 and 12 (H100).
bool gemm_copied_prefers(const Gemm &g) {
  constexpr int64_t kFewRows = 32, kManyWeights = int64_t(1) << 23;
  return !skinny_mma_takes(g) || (g.m > kFewRows && g.n * g.k < kManyWeights);
}

pydet_status gemm_copy_operands(const Gemm &g, Gemm *copied) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error("gemm_copied", guard.error());
  *copied = g;
  CopiedOperands p = {};
  int64_t blocks = 0;
  int count = 0;
  for (Matrix *matrix : {&copied->a, &copied->b}) {
    const uint64_t bytes = gemm_copied_bytes(*matrix);
    if (bytes == 0) continue;
    CopiedRows &rows = p.operand[count++];
    *matrix = copy_of(*matrix, static_cast<char *>(copied->workspace), &rows);
    copied->workspace = static_cast<char *>(copied->workspace) + bytes;
    copied->workspace_size -= bytes;
    blocks += divide_up(int64_t(rows.rows) * rows.vectors, kThreads);
    if (count == 1) p.first_blocks = int(blocks);
  }
  copied->weights_constant = false;  // the copy has just been written
  Launch shape = {"cuda_gemm_sm90_copied", gpu_stream(g.stream), dim3(unsigned(blocks)), dim3(kThreads)};
  shape.overlaps_previous = gpu_overlaps_kernels(g.device.id);
  return launch(shape, copy_operands, p);
}

}  // namespace pydet
