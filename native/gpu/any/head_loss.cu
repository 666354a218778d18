// The cross-entropy of rows, its reduction and its gradients (ops/head/loss.h): the CPU's bits.
//
// A warp makes the losses of a chain of rows, a lane each, and adds them in order; of all chains of a turn, which the warps
// of the one block have, the first thread adds the sums in order. What the head does before reads a vocabulary a row.

#include "core/error.h"
#include "gpu/device.h"
#include "gpu/kernels.h"
#include "ops/head/loss.h"

namespace pydet {
namespace {

constexpr int kThreads = 512, kLanes = 32, kWarps = kThreads / kLanes;

// The number of rows that are not ignored. All threads of the block call it.
__device__ __forceinline__ float count_of(const HeadLoss &p) {
  __shared__ unsigned long long all;
  if (threadIdx.x == 0) all = 0;
  __syncthreads();
  unsigned long long count = 0;
  for (int64_t r = threadIdx.x; r < p.rows; r += blockDim.x) count += target_of(p, r) != p.ignore_index;
  atomicAdd(&all, count);
  __syncthreads();
  return float(int64_t(all));
}

__global__ void __launch_bounds__(kThreads) losses_kernel(const __grid_constant__ HeadLoss p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t r = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (r < p.rows) put_number(p.loss, r, canonical(loss_of(p, r)));
}

__global__ void __launch_bounds__(kThreads) reduced_loss_kernel(const __grid_constant__ HeadLoss p) {
  __shared__ float chains[kWarps];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int warp = int(threadIdx.x) / kLanes, lane = int(threadIdx.x) % kLanes;
  const float count = p.reduction == Reduction::mean ? count_of(p) : 1.0f;
  float sum = 0.0f;
  for (int64_t first = 0; first < p.rows; first += kWarps * kLossChain) {
    const int64_t own = first + warp * kLossChain;
    float chain = 0.0f;
    for (int i = 0; i < kLossChain; i += kLanes) {
      const float loss = own + i + lane < p.rows ? loss_of(p, own + i + lane) : 0.0f;
      for (int j = 0; j < kLanes; ++j) {
        const float one = gpu_shfl(loss, j, kLanes);
        if (own + i + j < p.rows) chain = chain + one;
      }
    }
    if (lane == 0) chains[warp] = chain;
    __syncthreads();
    if (threadIdx.x == 0)
      for (int i = 0; i < kWarps && first + i * kLossChain < p.rows; ++i) sum = sum + chains[i];
    __syncthreads();
  }
  if (threadIdx.x == 0) put_number(p.loss, 0, canonical(p.reduction == Reduction::mean ? sum / count : sum));
}

__global__ void __launch_bounds__(kThreads) loss_gradients_kernel(const __grid_constant__ HeadLoss p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const bool of_rows = p.reduction == Reduction::none;
  float given = p.dloss.data && !of_rows ? number_of(p.dloss, 0) : 1.0f;
  if (p.reduction == Reduction::mean) given = given / count_of(p);
  for (int64_t r = int64_t(blockIdx.x) * kThreads + threadIdx.x; r < p.rows; r += int64_t(gridDim.x) * kThreads) {
    const int64_t target = target_of(p, r);
    const bool ignored = target == p.ignore_index;
    if (of_rows && p.dloss.data) given = number_of(p.dloss, r);
    const RowLossGradient by = ignored ? RowLossGradient{} : row_loss_gradient(p.rule, given, number_of(p.lse, r));
    put_number(p.dlog_prob, r, by.of_log_prob);
    put_number(p.dlse, r, by.of_lse);
    put_number(p.dmean, r, by.of_mean);
    if (!p.index) continue;
    if (p.target.wide) reinterpret_cast<int64_t *>(p.index)[r] = ignored ? -1 : target;
    else reinterpret_cast<int32_t *>(p.index)[r] = ignored ? -1 : int32_t(target);
  }
}

Launch blocks_of(const HeadLoss &p, int64_t blocks) {
  Launch shape = {"head_loss", static_cast<gpu_stream>(p.stream), dim3(unsigned(blocks)), dim3(kThreads)};
  shape.overlaps_previous = gpu_overlaps_kernels(p.device.id);
  return shape;
}

}  // namespace

pydet_status head_loss(const HeadLoss &p) {
  constexpr int64_t kMostBlocks = 64;  // each counts all rows
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("head_loss", guard.error());
  const int64_t blocks = divide_up(p.rows, kThreads);
  if (p.loss.data && p.reduction == Reduction::none && p.rows > 0)
    PYDET_TRY(launch(blocks_of(p, blocks), losses_kernel, p));
  if (p.loss.data && p.reduction != Reduction::none) PYDET_TRY(launch(blocks_of(p, 1), reduced_loss_kernel, p));
  if (!p.dlog_prob.data || p.rows == 0) return PYDET_OK;
  return launch(blocks_of(p, blocks < kMostBlocks ? blocks : kMostBlocks), loss_gradients_kernel, p);
}

}  // namespace pydet
