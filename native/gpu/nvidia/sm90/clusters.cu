// How many clusters of blocks a device runs at once.

#include <algorithm>
#include <atomic>

#include "gpu/device.h"
#include "gpu/nvidia/sm90/gemm.h"

namespace pydet {
namespace {

// Takes a whole SM, as the blocks of gemm.cu do.
__global__ void __launch_bounds__(384, 1) takes_an_sm() {}

// 0 where the runtime does not say.
int active_clusters(int device, int cluster) {
  const int multiprocessors = gpu_multiprocessors(device);
  const void *kernel = reinterpret_cast<const void *>(takes_an_sm);
  DeviceGuard guard(device);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(multiprocessors / cluster * cluster));
  config.blockDim = dim3(384);
  config.dynamicSmemBytes = kMostSharedBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostSharedBytes) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess)
    return cudaGetLastError(), 0;
  return count > 0 ? count : multiprocessors / cluster;
}

}  // namespace

int sm90_clusters(int device, int cluster) {
  constexpr int kDevices = 64, kMostCluster = 8;
  static std::atomic<int> known[kDevices][kMostCluster + 1];
  if (device >= kDevices) return std::max(active_clusters(device, cluster), 1);
  std::atomic<int> &count = known[device][cluster];
  int found = count.load(std::memory_order_relaxed);
  if (found == 0) {
    found = active_clusters(device, cluster);
    count.store(found, std::memory_order_relaxed);
  }
  return std::max(found, 1);
}

}  // namespace pydet
