/* A CUDA runtime without a GPU or a driver, for the tests of the library's host code: its objects are linked with this in
 * place of the static runtime (make cuda-stand-in), and run unmodified. What it has is all that the library may call:
 * another function, one that allocates or waits say, does not link. Kernels are not run; launches are counted. Any call
 * can be made to fail, by any error, and all after it as in a context that is broken. */
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdlib.h>
#include <string.h>

#include "failing_calls.h"

#define EXPORT __attribute__((visibility("default")))

static struct {
  int devices, device, capability, driver, error, launches, elsewhere, context;
  void *stream;
  const char *strange; /* see fakecuda_strange */
  size_t strange_bytes;
} fake = {.devices = 1, .capability = 90, .driver = 13000};
static struct {
  struct kernel {
    const void *host;
    const char *name;
    int launched;
  } *all;
  size_t count;
} kernels;

static int shared_bytes(void) { /* that a block may ask for */
  switch (fake.capability) {
    case 80: return 163 << 10;
    case 86:
    case 89:
    case 120: return 99 << 10;
    default: return 227 << 10;
  }
}

/* For the tests: how many devices of which compute capability, the driver's version; the call that fails, counted from
 * here (-1: none), the error that it gives, and whether all later calls give it too; the stream that launches are for. */
EXPORT void fakecuda_reset(int devices, int capability, int driver, int fail_at, int error, int lasting, void *stream) {
  fake.devices = devices, fake.device = 0, fake.capability = capability, fake.driver = driver, fake.error = error;
  fake.stream = stream, fake.launches = fake.elsewhere = 0, fake.context = 1;
  fake.strange = NULL, fake.strange_bytes = 0;
  start_calls(fail_at, lasting);
}
/* As in a thread that has done nothing on a GPU: device 1 is current, and no context. */
EXPORT void fakecuda_new_thread(void) { fake.device = 1, fake.context = 0; }
/* From here on the runtime does not know this memory, as the host's own. */
EXPORT void fakecuda_strange(const void *begin, size_t bytes) { fake.strange = begin, fake.strange_bytes = bytes; }
static int is_strange(const void *at) { return (size_t)((const char *)at - fake.strange) < fake.strange_bytes; }
EXPORT int fakecuda_launches(void) { return fake.launches; }
EXPORT int fakecuda_elsewhere(void) { return fake.elsewhere; } /* launches on another stream or another device than 1 */
EXPORT int fakecuda_device(void) { return fake.device; }
EXPORT const char *fakecuda_log(void) { return calls.log; }

#define CALL(name) \
  if (fails(name)) return (cudaError_t)fake.error

/* ---- What a compiled library calls when it is loaded ------------------------------------------------------------- */

EXPORT void **__cudaRegisterFatBinary(void *wrapper) {
  (void)wrapper;
  return calloc(1, sizeof(void *));
}
EXPORT void __cudaRegisterFatBinaryEnd(void **modules) { (void)modules; }
EXPORT void __cudaUnregisterFatBinary(void **modules) { free(modules); }
EXPORT void __cudaRegisterFunction(void **modules, const char *host, char *device_name, const char *name, int threads,
                                   void *thread, void *block, void *block_size, void *grid_size, int *warp) {
  (void)modules, (void)device_name, (void)threads, (void)thread, (void)block, (void)block_size, (void)grid_size;
  (void)warp;
  if (kernels.count % 64 == 0) kernels.all = realloc(kernels.all, (kernels.count + 64) * sizeof *kernels.all);
  kernels.all[kernels.count++] = (struct kernel){host, name, 0};
}
/* For the tests: how many kernels have `part` in their names, and the name of one of them that was never launched. */
EXPORT int fakecuda_kernels(const char *part) {
  int count = 0;
  for (size_t i = 0; i < kernels.count; ++i) count += strstr(kernels.all[i].name, part) != NULL;
  return count;
}
EXPORT const char *fakecuda_never_launched(const char *part) {
  for (size_t i = 0; i < kernels.count; ++i)
    if (strstr(kernels.all[i].name, part) && !kernels.all[i].launched) return kernels.all[i].name;
  return NULL;
}
/* Only <<<>>> calls these, which the library does not use. */
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
  (void)kernel, (void)host;
  return cudaErrorUnknown;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
  (void)kernel, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
  return cudaErrorUnknown;
}
EXPORT cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) { /* clang's name for it */
  (void)host, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
  return cudaErrorUnknown;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  (void)grid, (void)block, (void)shared, (void)stream;
  return cudaErrorUnknown;
}

/* ---- What it calls at run time ------------------------------------------------------------------------------------ */

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **arguments) {
  CALL("cudaLaunchKernelExC");
  const dim3 g = config->gridDim, b = config->blockDim;
  if (!g.x || !g.y || !g.z || !b.x || !b.y || !b.z || !host || !arguments) return cudaErrorInvalidConfiguration;
  if (b.x * b.y * b.z > 1024 || g.y > 65535 || g.z > 65535 || config->dynamicSmemBytes > (size_t)shared_bytes())
    return cudaErrorInvalidConfiguration;
  ++fake.launches, fake.context = 1;
  for (size_t i = 0; i < kernels.count; ++i) kernels.all[i].launched |= kernels.all[i].host == host;
  fake.elsewhere += config->stream != fake.stream || fake.device != 1;
  return cudaSuccess;
}
/* At once: all memory is the host's. */
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  CALL("cudaMemcpyAsync");
  if (kind != cudaMemcpyDeviceToDevice) return cudaErrorInvalidMemcpyDirection;
  fake.context = 1;
  fake.elsewhere += stream != fake.stream || fake.device != 1;
  memcpy(to, from, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *host, enum cudaFuncAttribute attribute, int value) {
  CALL("cudaFuncSetAttribute");
  (void)host;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > (227 << 10)) return cudaErrorInvalidValue;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *host) {
  CALL("cudaFuncGetAttributes");
  (void)host;
  memset(attributes, 0, sizeof *attributes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *host, const cudaLaunchConfig_t *config) {
  CALL("cudaOccupancyMaxActiveClusters");
  (void)host, (void)config;
  *clusters = 66;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetLastError(void) { return cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceCount(int *count) {
  CALL("cudaGetDeviceCount");
  *count = fake.devices;
  return fake.devices ? cudaSuccess : cudaErrorNoDevice;
}
EXPORT cudaError_t cudaDriverGetVersion(int *version) {
  CALL("cudaDriverGetVersion");
  *version = fake.driver;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
  CALL("cudaRuntimeGetVersion");
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDevice(int *id) {
  CALL("cudaGetDevice");
  *id = fake.device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int id) {
  CALL("cudaSetDevice");
  if (id < 0 || id >= fake.devices) return cudaErrorInvalidDevice;
  fake.device = id, fake.context = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int id) {
  CALL("cudaDeviceGetAttribute");
  if (id < 0 || id >= fake.devices) return cudaErrorInvalidDevice;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = fake.capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = fake.capability % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_bytes(); break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int id) {
  CALL("cudaGetDeviceProperties");
  if (id < 0 || id >= fake.devices) return cudaErrorInvalidDevice;
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "a GPU that is not there");
  properties->major = fake.capability / 10, properties->minor = fake.capability % 10;
  properties->multiProcessorCount = 132;
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *at) {
  CALL("cudaPointerGetAttributes");
  memset(attributes, 0, sizeof *attributes);
  attributes->type = is_strange(at) ? cudaMemoryTypeUnregistered : cudaMemoryTypeDevice;
  return cudaSuccess;
}
/* Allocations are of 1 MiB here, and begin at whole numbers of them; those that have strange memory end before it. */
static CUresult attributes_of(unsigned count, CUpointer_attribute *which, void **found, CUdeviceptr at) {
  if (fails("cuPointerGetAttributes")) return CUDA_ERROR_INVALID_VALUE;
  const size_t size = 1 << 20;
  CUdeviceptr begin = at / size * size, end = begin + size;
  const CUdeviceptr strange = (CUdeviceptr)fake.strange;
  if (begin < strange && strange < end) *(at < strange ? &end : &begin) = strange;
  if (is_strange((const void *)at)) begin = end = 0;
  for (unsigned i = 0; i < count; ++i) {
    if (which[i] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) *(CUdeviceptr *)found[i] = begin;
    else if (which[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE) *(size_t *)found[i] = end - begin;
    else return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}
EXPORT const char *cudaGetErrorString(cudaError_t error) { return error ? "made to fail" : "no error"; }

static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                       const cuuint64_t *extents, const cuuint64_t *strides, const cuuint32_t *box,
                       const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  (void)map, (void)type, (void)rank, (void)data, (void)extents, (void)strides, (void)box, (void)steps, (void)interleave;
  (void)swizzle, (void)promotion, (void)fill;
  if (fails("cuTensorMapEncodeTiled")) return CUDA_ERROR_INVALID_VALUE;
  return fake.context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **entry, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *found) {
  CALL("cudaGetDriverEntryPointByVersion");
  (void)version, (void)flags;
  *found = cudaDriverEntryPointSuccess;
  if (!strcmp(symbol, "cuTensorMapEncodeTiled")) *entry = (void *)encode;
  else if (!strcmp(symbol, "cuPointerGetAttributes")) *entry = (void *)attributes_of;
  else *found = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
