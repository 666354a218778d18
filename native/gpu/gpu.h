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

#include "problem.h"

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
constexpr int gpu_unroll(int) { return 1; }  // all loads of what is unrolled would come first, and take the registers
#else
constexpr int gpu_stages(int wanted, int) { return wanted; }
constexpr int gpu_unroll(int turns) { return turns; }
#endif

// Enough tiles to give every multiprocessor (compute unit) one: else smaller tiles are faster.
template <int tile_m, int tile_n> bool fills_device(const Gemm &problem) {
  int64_t tiles = divide_up(problem.m, tile_m) * divide_up(problem.n, tile_n) * problem.batch.count;
  return tiles >= gpu_multiprocessors(problem.device.id);
}

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
};

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
  constexpr int kSharedWithoutAsking = 48 << 10;
  if (shape.shared_bytes > kSharedWithoutAsking) {
    gpu_error error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
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
  const int64_t rows = (blocks + most_blocks(threads) - 1) / most_blocks(threads);
  return kGpuDeviceType == PYDET_ROCM && rows > 1 ? dim3(unsigned((blocks + rows - 1) / rows), unsigned(rows))
                                                  : dim3(unsigned(blocks));
}

// Brings a kernel's code to the device, which its first launch would do otherwise: what is launched in more than one
// part asks for all of it first, so that a part that cannot be loaded is known before another has written anything.
template <class... Parameters> pydet_status load(const char *name, void (*kernel)(Parameters...)) {
  const void *function = reinterpret_cast<const void *>(kernel);
#if defined(__HIP_PLATFORM_AMD__)
  hipFuncAttributes attributes;
  gpu_error error = hipFuncGetAttributes(&attributes, function);
#else
  cudaFuncAttributes attributes;
  gpu_error error = cudaFuncGetAttributes(&attributes, function);
#endif
  return error == kGpuSuccess ? PYDET_OK : device_error(name, error);
}

// ---- On the device -----------------------------------------------------------------------------------------------

#if defined(__CUDACC__) || defined(__HIPCC__)

#if !defined(__HIP_PLATFORM_AMD__)
// As PTX takes it.
__device__ __forceinline__ uint32_t shared_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }
#endif

// Of a grid that grid_of made.
__device__ __forceinline__ int64_t block_number() {
#if defined(__HIP_PLATFORM_AMD__)
  return int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
#else
  return blockIdx.x;
#endif
}

// The value of lane `lane ^ mask` among each `width` neighbouring lanes, all of which call it. width <= 32.
__device__ __forceinline__ float gpu_shfl_xor(float value, int mask, int width) {
#if defined(__HIP_PLATFORM_AMD__)
  return __shfl_xor(value, mask, width);
#else
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask, width);
#endif
}

// The value of lane `lane` of each `width` neighbouring lanes, all of which call it. width <= 32.
__device__ __forceinline__ float gpu_shfl(float value, int lane, int width) {
#if defined(__HIP_PLATFORM_AMD__)
  return __shfl(value, lane, width);
#else
  return __shfl_sync(0xFFFFFFFFu, value, lane, width);
#endif
}

// Two elements of 16 bits as they lie in memory, rounded by one instruction where there is one.
template <Type type> __device__ __forceinline__ uint32_t rounded_pair(float first, float second) {
  static_assert(type != Type::f32);
#if defined(__HIP_PLATFORM_AMD__)
  return type == Type::bf16 ? bf16_from_f32(first) | uint32_t(bf16_from_f32(second)) << 16
                            : f16_from_f32(first) | uint32_t(f16_from_f32(second)) << 16;
#else
  uint32_t pair;
  if constexpr (type == Type::bf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#endif
}

#if defined(__HIP_PLATFORM_AMD__)

// ---- AMD's matrix cores: a wave of 64 multiplies rows x k by k x rows ----

// A lane holds four consecutive k, as they lie in memory, of row lane % rows of a, or column lane % rows of b, from
// k = 4 (lane / rows) on. Element i of its accumulators is column lane % rows of row mfma_row(lane, i).
constexpr int kWave = 64;
#if defined(__gfx90a__) || defined(__gfx942__)
constexpr bool kHasMfma = true;
#else
constexpr bool kHasMfma = false;  // kernels for them are then empty, and never launched
#endif

template <int rows> struct Mfma {
  static_assert(rows == 16 || rows == 32);
  static constexpr int kStep = 256 / rows;  // k of one instruction: 16 or 8
  static constexpr int kCount = rows * rows / kWave;
  using Accumulators = float __attribute__((ext_vector_type(kCount)));
};

template <int rows> __device__ __forceinline__ int mfma_row(int lane, int i) {
  return i % 4 + i / 4 * Mfma<rows>::kStep + lane / rows * 4;
}

template <int rows, Type type>
__device__ __forceinline__ void mfma([[maybe_unused]] typename Mfma<rows>::Accumulators &c, [[maybe_unused]] uint2 a,
                                     [[maybe_unused]] uint2 b) {
#if defined(__gfx90a__) || defined(__gfx942__)
  using Bits = std::conditional_t<type == Type::bf16, short, _Float16> __attribute__((ext_vector_type(4)));
  Bits a_bits, b_bits;
  memcpy(&a_bits, &a, sizeof a_bits);
  memcpy(&b_bits, &b, sizeof b_bits);
  if constexpr (rows == 16 && type == Type::bf16)
    c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a_bits, b_bits, c, 0, 0, 0);
  else if constexpr (rows == 16) c = __builtin_amdgcn_mfma_f32_16x16x16f16(a_bits, b_bits, c, 0, 0, 0);
  else if constexpr (type == Type::bf16) c = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a_bits, b_bits, c, 0, 0, 0);
  else c = __builtin_amdgcn_mfma_f32_32x32x8f16(a_bits, b_bits, c, 0, 0, 0);
#endif
}

#endif

// Copies 16 bytes into shared memory without a register: the first `valid` are read, the rest become zero. A thread
// waits for its own copies with wait_copies<n>, which leaves its n latest commits in flight; others need a barrier too.
__device__ __forceinline__ void copy_async_16(void *shared, const void *global, int valid) {
#if defined(__HIP_PLATFORM_AMD__)
  if (valid == 16) {
    *static_cast<uint4 *>(shared) = *static_cast<const uint4 *>(global);
  } else {
    for (int i = 0; i < 16; ++i) static_cast<char *>(shared)[i] = i < valid ? static_cast<const char *>(global)[i] : 0;
  }
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid)
               : "memory");
#endif
}

// The compiler forgets what it knows of the value.
#if !defined(__HIP_PLATFORM_AMD__)
__device__ __forceinline__ void make_opaque(int &value) { asm volatile("" : "+r"(value)); }
#else
__device__ __forceinline__ void make_opaque(int &value) { asm volatile("" : "+v"(value)); }
// And again in each turn of a loop, so that what follows from it is not computed before and kept in registers.
__device__ __forceinline__ void make_opaque(int &value, int64_t turn) { asm("" : "+v"(value) : "s"(int(turn))); }
#endif
// For code that is unrolled widely: AMD's compiler keeps what it computed for all elements, without registers for it.
__device__ __forceinline__ void recompute_on_amd([[maybe_unused]] int &value) {
#if defined(__HIP_PLATFORM_AMD__)
  make_opaque(value);
#endif
}
__device__ __forceinline__ void make_opaque(const float *&pointer) {
#if defined(__HIP_PLATFORM_AMD__)
  asm volatile("" : "+v"(pointer));
#else
  asm volatile("" : "+l"(pointer));
#endif
}

// The same of one fp32 element, all of it.
__device__ __forceinline__ void copy_async_4(float *shared, const float *global) {
#if defined(__HIP_PLATFORM_AMD__)
  *shared = *global;
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
#endif
}

// The same for a piece of 16 or 8 bytes that is read whole or not at all.
template <int bytes> __device__ __forceinline__ void copy_async_piece(void *shared, const void *global, bool there) {
  static_assert(bytes == 16 || bytes == 8);
#if defined(__HIP_PLATFORM_AMD__)
  using Piece = std::conditional_t<bytes == 16, uint4, uint2>;
  *static_cast<Piece *>(shared) = there ? *static_cast<const Piece *>(global) : Piece{};
#else
  if constexpr (bytes == 16) {
    copy_async_16(shared, global, there ? 16 : 0);
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(there ? 8 : 0)
                 : "memory");
  }
#endif
}

__device__ __forceinline__ void commit_copies() {
#if !defined(__HIP_PLATFORM_AMD__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int in_flight> __device__ __forceinline__ void wait_copies() {
#if !defined(__HIP_PLATFORM_AMD__)
  asm volatile("cp.async.wait_group %0;" ::"n"(in_flight) : "memory");
#endif
}

// Stores four floats, 16-byte aligned, that the next kernel will read: the L2 is asked to keep them until then.
__device__ __forceinline__ void store_kept(float *to, float4 x) {
#if defined(__HIP_PLATFORM_AMD__)
  *reinterpret_cast<float4 *>(to) = x;
#else
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, policy;\n}" ::"l"(to),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
      : "memory");
#endif
}

// The same of two, 8-byte aligned.
__device__ __forceinline__ void store_kept(float *to, float2 x) {
#if defined(__HIP_PLATFORM_AMD__)
  *reinterpret_cast<float2 *>(to) = x;
#else
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "st.global.L2::cache_hint.v2.f32 [%0], {%1, %2}, policy;\n}" ::"l"(to),
      "f"(x.x), "f"(x.y)
      : "memory");
#endif
}

// From here on a kernel launched with overlaps_previous may take the places that this one's blocks leave.
__device__ __forceinline__ void let_next_kernel_start() {
#if !defined(__HIP_PLATFORM_AMD__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In a kernel launched with overlaps_previous: returns when the kernel ahead has ended and its writes are seen.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if !defined(__HIP_PLATFORM_AMD__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif

}  // namespace pydet
