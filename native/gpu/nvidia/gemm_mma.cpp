// Of the kernels of gemm_mma.cu those that a problem is computed by: of its type, and where 16 bytes are aligned those
// that copy so many at a time.

#include "gpu/nvidia/gemm_mma.h"

#include "gpu/any/jobs.h"
#include "gpu/kernels.h"

namespace pydet {
namespace {

constexpr int kUnit = 8;  // elements: 16 bytes

// Whether every 16 bytes along the unit stride are aligned in every row and matrix of the batch.
bool copies_16_bytes(const Matrix &matrix, const int64_t *batch_strides, int batch_dims) {
  int64_t stride = matrix.col_stride == 1 ? matrix.row_stride : matrix.col_stride;
  bool aligned = reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0 && stride % kUnit == 0;
  for (int i = 0; i < batch_dims; ++i) aligned = aligned && batch_strides[i] % kUnit == 0;
  return aligned;
}

bool all_aligned(const Gemm &problem) {
  return copies_16_bytes(problem.a, problem.batch.a, problem.batch.dims) &&
         copies_16_bytes(problem.b, problem.batch.b, problem.batch.dims);
}

// The same wherever a group begins: tokens must not be neighbours in memory. So of the aligned kernels one layout in depth
// is left, and two of rows.
bool all_aligned(const GroupedGemm &problem) {
  if (problem.depth)
    return copies_16_bytes(problem.a, nullptr, 0) && copies_16_bytes(problem.b, nullptr, 0) &&
           problem.a.col_stride != 1 && problem.b.row_stride != 1;
  return copies_16_bytes(problem.a, nullptr, 0) && copies_16_bytes(problem.b, &problem.b_stride, 1) &&
         problem.a.col_stride == 1;
}

template <class Problem> pydet_status launch_64(const Problem &problem) {
  return with_type<kHalfTypes>(problem.a.type,
                               [&](auto type) { return GemmMma<type>::tile_64(problem, all_aligned(problem)); });
}
template <class Problem> pydet_status launch_128(const Problem &problem) {
  return with_type<kHalfTypes>(problem.a.type, [&](auto type) { return GemmMma<type>::tile_128(problem); });
}

}  // namespace

pydet_status gemm_mma_64(const Gemm &problem) { return launch_64(problem); }
bool gemm_mma_128_takes(const Gemm &problem) { return all_aligned(problem); }
pydet_status gemm_mma_128(const Gemm &problem) { return launch_128(problem); }

pydet_status grouped_gemm_mma_64(const GroupedGemm &problem) { return launch_64(problem); }
bool grouped_gemm_mma_128_takes(const GroupedGemm &problem) { return all_aligned(problem); }
bool grouped_gemm_mma_128_prefers(const GroupedGemm &problem) {
  return most_jobs(problem, 128, 128) >= gpu_multiprocessors(problem.device.id) &&
         (problem.depth ? problem.m : problem.tokens / problem.groups) > 64;
}
pydet_status grouped_gemm_mma_128(const GroupedGemm &problem) { return launch_128(problem); }

}  // namespace pydet
