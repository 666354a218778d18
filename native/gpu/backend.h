// What the tables of every maker's GPUs ask of a problem.
#pragma once

#include "gpu/gpu.h"
#include "ops/gemm/problem.h"

namespace pydet {

// Enough tiles to give every multiprocessor (compute unit) one: else smaller tiles are faster.
template <int tile_m, int tile_n> bool fills_device(const Gemm &problem) {
  int64_t tiles = divide_up(problem.m, tile_m) * divide_up(problem.n, tile_n) * problem.batch.count;
  return tiles >= gpu_multiprocessors(problem.device.id);
}

// Within a device's memory, in the stream's order. The host does not wait.
inline pydet_status gpu_copy(const char *op, int32_t id, void *stream, void *to, const void *from, uint64_t bytes) {
  DeviceGuard guard(id);
  gpu_error error = guard.error();
#if defined(__HIP_PLATFORM_AMD__)
  if (error == kGpuSuccess)
    error = hipMemcpyAsync(to, from, size_t(bytes), hipMemcpyDeviceToDevice, static_cast<gpu_stream>(stream));
#else
  if (error == kGpuSuccess)
    error = cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDeviceToDevice, static_cast<gpu_stream>(stream));
#endif
  if (error == kGpuSuccess) return PYDET_OK;
  return fail(PYDET_DEVICE_ERROR,
              "%s: the copy of what is continued from failed: %s (%d); the cause may be older work on "
              "this device",
              op, gpu_error_text(error), int(error));
}

}  // namespace pydet
