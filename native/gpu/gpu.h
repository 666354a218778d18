// The GPU runtime under one set of names: this file alone knows which vendor it is compiled for.
//
// Every launch goes through launch(), whose return code is the only error that is looked at: an earlier error of
// somebody else's is neither cleared nor reported as ours. (An error that broke the device itself is returned by every
// later launch; the sentence says that it may be older.)
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "contract/operand.h"
#include "contract/status.h"

#if defined(__HIP_PLATFORM_AMD__)
#include <hip/hip_runtime.h>
#if !defined(__grid_constant__)
#define __grid_constant__  // a kernel argument is read only where it is passed
#endif
#else
#include <cuda_runtime.h>
#endif

namespace pydet {

// What never changes of a device. Read from the runtime once, by read_device; 0 is what could not be read.
struct DeviceFacts {
  int multiprocessors;
  int arch;               // 90 for sm_90, 0x90a for gfx90a
  int shared_bytes;       // that a block may ask for
  bool reaches_pageable;  // its kernels may use the host's own memory
};

#if defined(__HIP_PLATFORM_AMD__)

using gpu_error = hipError_t;
using gpu_stream = hipStream_t;
constexpr gpu_error kGpuSuccess = hipSuccess;
constexpr int32_t kGpuDeviceType = PYDET_ROCM;
inline const char *gpu_error_text(gpu_error error) { return hipGetErrorString(error); }
inline gpu_error gpu_get_device(int *id) { return hipGetDevice(id); }
inline gpu_error gpu_set_device(int id) { return hipSetDevice(id); }
constexpr int kMostSharedBytes = 64 << 10;   // that kernels count on; a device may have more
constexpr int kBlockSharedBytes = 64 << 10;  // that every architecture has that kernels are built for

// Whether kernels may overlap the ones ahead of them.
inline bool gpu_overlaps_kernels(int) { return false; }

// Whether the runtime knows this memory; what it does not know is the host's own.
inline bool gpu_knows(const void *data) {
  hipPointerAttribute_t found = {};
  gpu_error error = hipPointerGetAttributes(&found, data);
#if HIP_VERSION_MAJOR >= 6  // before it, unknown memory is an error alone
  if (error == hipSuccess && found.type == hipMemoryTypeUnregistered) error = hipErrorInvalidValue;
#endif
  return error != hipErrorInvalidValue;  // of another error the launch will say what is wrong
}

// 0 and OK where this machine has no AMD GPU, or no driver for one.
inline pydet_status gpu_device_count(int32_t *count) {
  *count = 0;
  int devices = 0;
  gpu_error error = hipGetDeviceCount(&devices);
  if (error == hipSuccess) *count = devices;
  if (error == hipSuccess || error == hipErrorNoDevice) return PYDET_OK;
  return fail(PYDET_NO_DEVICE, "the HIP runtime cannot use this machine's GPUs: %s (%d)", gpu_error_text(error),
              int(error));
}

// `arch` is the plain name of the instruction set: "gfx90a" of "gfx90a:sramecc+:xnack-".
inline gpu_error gpu_describe(int id, pydet_device_info *info) {
  hipDeviceProp_t properties;
  gpu_error error = hipGetDeviceProperties(&properties, id);
  if (error != hipSuccess) return error;
  info->multiprocessors = properties.multiProcessorCount;
  snprintf(info->name, sizeof info->name, "%.*s", int(sizeof info->name) - 1, properties.name);
  snprintf(info->arch, sizeof info->arch, "%.*s", int(strcspn(properties.gcnArchName, ":")), properties.gcnArchName);
  return hipSuccess;
}

// False where any of it could not be read.
inline bool read_device(int id, DeviceFacts *facts) {
  *facts = {};
  pydet_device_info info = {};
  if (gpu_describe(id, &info) != hipSuccess) return false;
  facts->multiprocessors = info.multiprocessors;
  facts->arch = strncmp(info.arch, "gfx", 3) == 0 ? int(strtol(info.arch + 3, nullptr, 16)) : 0;
  int pageable = 0;
  const bool read =
      hipDeviceGetAttribute(&facts->shared_bytes, hipDeviceAttributeMaxSharedMemoryPerBlock, id) == hipSuccess &&
      hipDeviceGetAttribute(&pageable, hipDeviceAttributePageableMemoryAccess, id) == hipSuccess;
  facts->reaches_pageable = pageable != 0;
  return read;
}

#else

using gpu_error = cudaError_t;
using gpu_stream = cudaStream_t;
constexpr gpu_error kGpuSuccess = cudaSuccess;
constexpr int32_t kGpuDeviceType = PYDET_CUDA;
inline const char *gpu_error_text(gpu_error error) { return cudaGetErrorString(error); }
inline gpu_error gpu_get_device(int *id) { return cudaGetDevice(id); }
inline gpu_error gpu_set_device(int id) { return cudaSetDevice(id); }

constexpr int kMostSharedBytes = 227 << 10;  // that kernels count on; a device may have less
constexpr int kBlockSharedBytes = 99 << 10;  // that every architecture has that kernels are built for

// Whether the runtime knows this memory; what it does not know is the host's own.
inline bool gpu_knows(const void *data) {
  cudaPointerAttributes found;
  if (cudaPointerGetAttributes(&found, data) != cudaSuccess) return true;  // the launch will say what is wrong
  return found.type != cudaMemoryTypeUnregistered;
}

// False where any of it could not be read.
inline bool read_device(int id, DeviceFacts *facts) {
  *facts = {};
  bool read = true;
  auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    const bool known = cudaDeviceGetAttribute(&value, which, id) == cudaSuccess;
    read &= known;
    return known ? value : 0;
  };
  facts->multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  facts->arch = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  facts->shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  facts->reaches_pageable = attribute(cudaDevAttrPageableMemoryAccess) != 0;
  return read;
}

#endif

// ---- What is known of a device -----------------------------------------------------------------------------------

// One word a device holds all of it, so that any thread may write it and none sees half of it. What could not be read is
// asked for again at the next call. A process that is forked keeps what was read: a device stays what it is.
constexpr int kRememberedDevices = 64;
inline std::atomic<uint64_t> remembered[kRememberedDevices];

inline DeviceFacts gpu_facts(int id) {
  const bool has_word = id >= 0 && id < kRememberedDevices;
  const uint64_t word = has_word ? remembered[id].load(std::memory_order_relaxed) : 0;
  if (word) return {int(word & 0xFFFF), int(word >> 16 & 0xFFFF), int(word >> 32 & 0xFFFFFF), (word >> 56 & 1) != 0};
  DeviceFacts facts;
  const bool fits = read_device(id, &facts) && uint32_t(facts.multiprocessors) <= 0xFFFF &&
                    uint32_t(facts.arch) <= 0xFFFF && uint32_t(facts.shared_bytes) <= 0xFFFFFF;
  if (fits && has_word)
    remembered[id].store(uint64_t(facts.multiprocessors) | uint64_t(facts.arch) << 16 |
                             uint64_t(facts.shared_bytes) << 32 | uint64_t(facts.reaches_pageable) << 56 |
                             uint64_t(1) << 63,
                         std::memory_order_relaxed);
  return facts;
}
inline void gpu_forget() {
  for (auto &word : remembered) word.store(0, std::memory_order_relaxed);
}

// 1 where it cannot be read, so that it may divide: it says how work is shared out, and decides no bits.
inline int gpu_multiprocessors(int id) {
  const int count = gpu_facts(id).multiprocessors;
  return count > 0 ? count : 1;
}
inline int gpu_shared_bytes(int id) { return gpu_facts(id).shared_bytes; }

// Whether kernels there can use this memory. The host's own a device reaches only where it shares its page tables;
// elsewhere the access ends the process (HIP), or breaks the device for it (CUDA).
inline bool gpu_reaches(int id, const void *data) { return gpu_knows(data) || gpu_facts(id).reaches_pageable; }

#if !defined(__HIP_PLATFORM_AMD__)
inline int compute_capability(int id) { return gpu_facts(id).arch; }

// Whether Launch::overlaps_previous is understood.
inline bool gpu_overlaps_kernels(int id) { return compute_capability(id) >= 90; }
#endif

// The stages of a ring, of those wanted, that fit on every architecture that the ring's kernel is launched on.
#if defined(__HIP_PLATFORM_AMD__)
constexpr int gpu_stages(int wanted, int stage_bytes) {
  return wanted * stage_bytes <= kBlockSharedBytes ? wanted : kBlockSharedBytes / stage_bytes;
}
#else
constexpr int gpu_stages(int wanted, int) { return wanted; }
#endif

inline pydet_status device_error(const char *kernel, gpu_error error) {
  return fail(PYDET_DEVICE_ERROR, "%s: the launch failed: %s (%d); the cause may be older work on this device", kernel,
              gpu_error_text(error), int(error));
}

// Makes `id` the thread's current device while in scope, then puts the caller's back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int id) {
    error_ = gpu_get_device(&saved_);
    if (error_ != kGpuSuccess || saved_ == id) return;
    error_ = gpu_set_device(id);
    changed_ = error_ == kGpuSuccess;
  }
  ~DeviceGuard() {
    if (changed_) (void)gpu_set_device(saved_);
  }
  DeviceGuard(const DeviceGuard &) = delete;
  DeviceGuard &operator=(const DeviceGuard &) = delete;
  gpu_error error() const { return error_; }

 private:
  gpu_error error_;
  int saved_ = 0;
  bool changed_ = false;
};

// Where and how wide a kernel runs. The device must be current (DeviceGuard).
struct Launch {
  const char *kernel;  // its name in the table, for error text
  gpu_stream stream;
  dim3 grid, block;
  int shared_bytes = 0;            // dynamic
  int cluster = 1;                 // blocks in a cluster, along x
  bool overlaps_previous = false;  // programmatic dependent launch: the kernel itself waits for the one ahead
  bool loaded = false;             // by load(), with its shared memory
};

#if !defined(__HIP_PLATFORM_AMD__)
// More dynamic shared memory than a kernel has without asking.
inline gpu_error ask_for_shared(const void *function, int bytes) {
  constexpr int kSharedWithoutAsking = 48 << 10;
  if (bytes <= kSharedWithoutAsking) return kGpuSuccess;
  return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
#endif

template <class... Parameters, class... Arguments>
pydet_status launch(const Launch &shape, void (*kernel)(Parameters...), const Arguments &...arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "one argument a parameter");
  static_assert((std::is_same_v<Parameters, Arguments> && ...), "arguments are passed as they are, unconverted");
#if defined(__HIP_PLATFORM_AMD__)
  void *pointers[] = {const_cast<void *>(static_cast<const void *>(&arguments))...};
  gpu_error error = hipLaunchKernel(reinterpret_cast<const void *>(kernel), shape.grid, shape.block, pointers,
                                    size_t(shape.shared_bytes), shape.stream);
#else
  const void *function = reinterpret_cast<const void *>(kernel);
  if (!shape.loaded) {
    gpu_error error = ask_for_shared(function, shape.shared_bytes);
    if (error != kGpuSuccess) return device_error(shape.kernel, error);
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = size_t(shape.shared_bytes);
  config.stream = shape.stream;
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute &attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(shape.cluster), 1, 1};
  }
  if (shape.overlaps_previous) {
    cudaLaunchAttribute &attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  void *pointers[] = {const_cast<void *>(static_cast<const void *>(&arguments))...};
  gpu_error error = cudaLaunchKernelExC(&config, function, pointers);
#endif
  return error == kGpuSuccess ? PYDET_OK : device_error(shape.kernel, error);
}

// Blocks along a side of a grid: HIP counts their threads, below 2^32.
constexpr int64_t most_blocks([[maybe_unused]] int threads) {
#if defined(__HIP_PLATFORM_AMD__)
  return (int64_t(1) << 32) / threads - 1;
#else
  return (int64_t(1) << 31) - 1;
#endif
}

// A grid of so many blocks, for kernels that ask for block_number(): on HIP in several rows where one does not hold them,
// the last of which may pass the number.
inline dim3 grid_of(int64_t blocks, int threads) {
  const int64_t rows = divide_up(blocks, most_blocks(threads));
  return kGpuDeviceType == PYDET_ROCM && rows > 1 ? dim3(unsigned(divide_up(blocks, rows)), unsigned(rows))
                                                  : dim3(unsigned(blocks));
}

// Brings a kernel's code to the device, which its first launch would do otherwise: what is launched in more than one
// part asks for all of it first, so that a part that cannot be loaded is known before another has written anything. With
// shared_bytes its shared memory too, which a launch that says so (`loaded`) then does not ask for.
template <class... Parameters>
pydet_status load(const char *name, void (*kernel)(Parameters...), [[maybe_unused]] int shared_bytes = 0) {
  const void *function = reinterpret_cast<const void *>(kernel);
#if defined(__HIP_PLATFORM_AMD__)
  hipFuncAttributes attributes;
  gpu_error error = hipFuncGetAttributes(&attributes, function);
#else
  cudaFuncAttributes attributes;
  gpu_error error = cudaFuncGetAttributes(&attributes, function);
  if (error == kGpuSuccess) error = ask_for_shared(function, shared_bytes);
#endif
  return error == kGpuSuccess ? PYDET_OK : device_error(name, error);
}

}  // namespace pydet
