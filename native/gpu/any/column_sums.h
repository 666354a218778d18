// The sums of dweight and dbias that the kernels of gradients leave in the workspace: rows of n fp32, one for each chain of
// 16 rows or one for each group of 64, and the kernel that joins them. No bit depends on which.
#pragma once

#include "gpu/device.h"
#include "ops/norm/problem.h"

namespace pydet {

constexpr int kGroupChains = kDweightGroupRows / kDweightChainRows;
constexpr int kBlockGroups = kDweightBlockRows / kDweightGroupRows;

// The sums over rows, of each head if there are heads, as column_sums.cu joins them.
inline RmsNormBackward sums_over_rows(const RmsNormBackward &p) {
  RmsNormBackward sums = p;  // rows of the weights of all heads
  sums.rows = p.rows / p.heads;
  sums.n = p.heads * p.n;
  return sums;
}
inline RmsNormBackward sums_over_rows(const LayerNormBackward &p) {
  RmsNormBackward sums = {};
  sums.device = p.device;
  sums.stream = p.stream;
  sums.rows = p.rows;
  sums.n = p.n;
  sums.dweight = p.dweight;
  sums.dbias = p.dbias;
  sums.accumulate = p.accumulate;
  sums.workspace = p.workspace;
  return sums;
}

// column_sums.cu. Before anything else is launched: whether the kernel can be. OK where no sum is wanted.
pydet_status ready_to_join(const RmsNormBackward &);

// Partials of `chains` chains each, 1 or kGroupChains, become dweight; and dbias those behind all chains of dweight,
// wanted or not.
pydet_status join_partials(const RmsNormBackward &, int chains);

// A gradient whose kernel leaves partials of so many chains each. All that is launched is loaded first.
template <class P, class F>
pydet_status with_sums_over_rows(const char *name, const P &p, int chains, const F &launch_rows) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  const RmsNormBackward sums = sums_over_rows(p);
  if (const pydet_status ready = ready_to_join(sums); ready != PYDET_OK) return ready;
  if (p.rows > 0)
    if (const pydet_status launched = launch_rows(); launched != PYDET_OK) return launched;
  return join_partials(sums, chains);
}

}  // namespace pydet
