// How many clusters of blocks a device runs at once.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include "gpu/device.h"
#include "gpu/nvidia/sm90/choose.h"

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

// Before a kernel that waits for them. It ends when the kernel ahead has, which may use the same workspace.
__global__ void put_flags_down(uint32_t *flags, int count) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) flags[i] = 0;
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

// ---- Handover ----------------------------------------------------------------------------------------------------

namespace {
// The workspace: flags of every warp of every block, then its accumulators. Hopper has up to 144 multiprocessors.
constexpr int kMostBlocks = 144, kMostWarps = 12, kMostTile = 192 * 192;
constexpr uint64_t kFlagBytes = kMostBlocks * kMostWarps * 4;
constexpr uint64_t kHandoverBytes = kFlagBytes + uint64_t(kMostBlocks) * kMostTile * 4;
}  // namespace

uint64_t sm90_handover_bytes(int64_t m, int64_t n, int64_t k, int64_t k_chunk) {
  constexpr double kLeastWork = 1e10;  // less is done in 30 us, of which a launch more would be too much
  constexpr int64_t kLeast = 2048;     // what is handed on outweighs what is gained of less k
  const bool enough = double(m) * double(n) * double(k) >= kLeastWork;
  return Chunk{k_chunk}.one_chain(k) && enough && k >= kLeast && k <= kMostHandedOver ? kHandoverBytes : 0;
}

bool sm90_shares_out(const Sm90Tile &tile, int64_t m, int64_t n, int clusters) {
  if (tile.swapped) std::swap(m, n);
  const int64_t tiles = divide_up(m, tile.m * tile.cluster_m) * divide_up(n, tile.n * tile.cluster_n);
  return clusters * tile.cluster() <= kMostBlocks && tiles > clusters && tiles % clusters;
}

bool sm90_hands_over(const Gemm &g, int index) {
  const Sm90Tile &tile = kSm90Tiles[index];
  const uint64_t wanted = sm90_handover_bytes(g.m, g.n, g.k, g.k_chunk);
  return g.batch.count == 1 && wanted > 0 && g.workspace_size >= wanted &&
         sm90_shares_out(tile, g.m, g.n, sm90_clusters(g.device.id, tile.cluster()));
}

pydet_status sm90_begin_handover(const Gemm &g, int index, int clusters, Sm90Problem *p) {
  p->handover = {p->tiles, 0, nullptr, nullptr};
  if (!kSm90Tiles[index].hands_over) return PYDET_OK;
  p->handover.turns = p->tiles / clusters - 1;
  p->handover.tiles = p->tiles - p->handover.turns * clusters;
  char *const workspace = static_cast<char *>(g.workspace);
  p->handover.flags = reinterpret_cast<uint32_t *>(workspace);
  p->handover.sums = reinterpret_cast<float *>(workspace + kFlagBytes);
  constexpr int kThreads = 256, kFlags = int(kFlagBytes / 4);
  Launch shape = {kSm90Tiles[index].name, gpu_stream(g.stream), dim3((kFlags + kThreads - 1) / kThreads),
                  dim3(kThreads)};
  shape.overlaps_previous = true;
  return launch(shape, put_flags_down, p->handover.flags, int(kFlags));
}

}  // namespace pydet
