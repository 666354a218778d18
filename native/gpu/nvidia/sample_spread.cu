// Sampling, and the k largest of a row, where rows are few and long (Hopper): a cluster takes a row.

#include <algorithm>

#include "gpu/any/sample_row.h"
#include "gpu/kernels.h"

// Kernels of other machines are empty: they would spill.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ / 100 == 9
#define PYDET_HOPPER 1
#endif

namespace pydet {
namespace {

template <Type type, bool aligned>
__global__ void __launch_bounds__(T) sample_spread_kernel(const __grid_constant__ Sample p) {
#if PYDET_HOPPER
  __shared__ OfSample<Spread> all;
  __shared__ Told<Spread> told;
  const Spread team;
  team.meet();  // all have begun, and may be told something
  sample_row<type, aligned>(p, blockIdx.x / unsigned(team.blocks), team, all, told);
#endif
}

template <Type type, bool aligned>
__global__ void __launch_bounds__(T) topk_spread_kernel(const __grid_constant__ TopK p) {
#if PYDET_HOPPER
  __shared__ OfTopK<Spread> all;
  const Spread team;
  topk_row<type, aligned>(p, blockIdx.x / unsigned(team.blocks), team, all);
#endif
}

constexpr int kMostClusterBlocks = 8;
constexpr int64_t kMostRows = 1 << 20;

// Blocks a row: as many as the multiprocessors have room for, if each has two vectors a thread of it.
int blocks_of(const Device &device, int64_t rows, int64_t n) {
  int blocks = 1;
  while (blocks < kMostClusterBlocks && rows * blocks < 2 * gpu_multiprocessors(device.id) &&
         n >= int64_t(4) * blocks * kRowLanes)
    blocks *= 2;
  return blocks;
}

template <class Problem> pydet_status launch_clusters(const char *name, const Problem &p, void (*kernel)(Problem)) {
  const int blocks = std::max(2, blocks_of(p.device, p.rows, p.n));
  Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(p.rows * blocks)), dim3(T)};
  where.cluster = blocks;
  return launch(where, kernel, p);
}

}  // namespace

bool sample_spread_takes(const Sample &p) { return p.rows <= kMostRows; }
bool sample_spread_prefers(const Sample &p) { return blocks_of(p.device, p.rows, p.n) > 1; }
bool topk_spread_takes(const TopK &p) { return p.rows <= kMostRows && p.k <= kTopKListed; }
bool topk_spread_prefers(const TopK &p) { return blocks_of(p.device, p.rows, p.n) > 1; }

pydet_status sample_spread(const Sample &p) {
  const char *name = "sample_spread";
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  const bool whole = p.n % kVector == 0 && rows_aligned(p.x);
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return launch_clusters(name, p, whole ? sample_spread_kernel<type, true> : sample_spread_kernel<type, false>);
  });
}

pydet_status topk_spread(const TopK &p) {
  const char *name = "topk_spread";
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  const bool whole = p.n % kVector == 0 && rows_aligned(p.x);
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return launch_clusters(name, p, whole ? topk_spread_kernel<type, true> : topk_spread_kernel<type, false>);
  });
}

}  // namespace pydet
