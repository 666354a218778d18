// Sampling of tokens, and the k largest of a row (NUMERICS.md, "Sampling"): the CPU's bits. A block takes a row.

#include "gpu/any/sample_row.h"
#include "gpu/kernels.h"

namespace pydet {
namespace {

template <Type type, bool aligned>
__global__ void __launch_bounds__(T) sample_kernel(const __grid_constant__ Sample p) {
  __shared__ OfSample<Alone> all;
  __shared__ Told<Alone> told;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) sample_row<type, aligned>(p, r, Alone{}, all, told);
}

template <Type type, bool aligned>
__global__ void __launch_bounds__(T, 3) topk_kernel(const __grid_constant__ TopK p) {
  __shared__ OfTopK<Alone> all;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) topk_row<type, aligned>(p, r, Alone{}, all);
}

template <class Problem> pydet_status launch_rows(const char *name, const Problem &p, void (*kernel)(Problem)) {
  constexpr int64_t kMostBlocks = 1 << 20;  // more rows are walked in turns
  Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(p.rows < kMostBlocks ? p.rows : kMostBlocks)),
                  dim3(T)};
  return launch(where, kernel, p);
}

}  // namespace

pydet_status sample(const Sample &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("sample", guard.error());
  const bool whole = p.n % kVector == 0 && rows_aligned(p.x);
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return launch_rows("sample", p, whole ? sample_kernel<type, true> : sample_kernel<type, false>);
  });
}

pydet_status topk(const TopK &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("topk", guard.error());
  const bool whole = p.n % kVector == 0 && rows_aligned(p.x);
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return launch_rows("topk", p, whole ? topk_kernel<type, true> : topk_kernel<type, false>);
  });
}

}  // namespace pydet
