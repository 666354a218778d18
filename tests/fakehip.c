/* A HIP runtime without a GPU, for the tests of libpydet_hip.so: the library's host code runs on it unmodified. Device
 * memory is the process's own. A launch is checked against the limits of a workgroup and handed to a callback, which may
 * execute it. Any call can be made to fail. */
#include <hip/hip_runtime_api.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef int (*launch_callback)(const char *kernel, const unsigned *grid_and_block, size_t shared, void **arguments,
                               void *stream);

static struct {
  launch_callback launch;
  int devices, device, calls, fail_at;
  char arch[64], log[1 << 16];
} fake = {.devices = 1, .fail_at = -1, .arch = "gfx90a:sramecc+:xnack-"};

static struct {
  const void *host;
  const char *name;
} functions[4096];
static int function_count;

/* For the tests: how many devices of which architecture; the call that fails (counted from the last fakehip_reset, -1 for
 * none); what was called since. */
EXPORT void fakehip_reset(int devices, const char *arch, int fail_at) {
  fake.devices = devices, fake.device = 0, fake.calls = 0, fake.fail_at = fail_at, fake.log[0] = 0;
  snprintf(fake.arch, sizeof fake.arch, "%s", arch);
}
EXPORT void fakehip_on_launch(launch_callback callback) { fake.launch = callback; }
EXPORT int fakehip_calls(void) { return fake.calls; }
EXPORT int fakehip_device(void) { return fake.device; }
EXPORT void fakehip_set_device(int id) { fake.device = id; }
EXPORT const char *fakehip_log(void) { return fake.log; }
EXPORT int fakehip_kernels(void) { return function_count; }
EXPORT const char *fakehip_kernel(int i) { return functions[i].name; }

/* Counts a call; whether it is the one that fails. */
static int fails(const char *name) {
  size_t used = strlen(fake.log);
  snprintf(fake.log + used, sizeof fake.log - used, "%s ", name);
  return fake.calls++ == fake.fail_at;
}
#define CALL(name) \
  if (fails(name)) return hipErrorUnknown

/* ---- What a compiled library calls when it is loaded ------------------------------------------------------------- */

EXPORT void **__hipRegisterFatBinary(const void *wrapper) {
  (void)wrapper;
  return calloc(1, sizeof(void *));
}
EXPORT void __hipUnregisterFatBinary(void **modules) { free(modules); }
EXPORT void __hipRegisterFunction(void **modules, const void *host, char *device_name, const char *name, int threads,
                                  void *thread, void *block, void *block_size, void *grid_size, int *warp) {
  (void)modules, (void)device_name, (void)threads, (void)thread, (void)block, (void)block_size, (void)grid_size, (void)warp;
  if (function_count == sizeof functions / sizeof *functions) abort();
  functions[function_count].host = host;
  functions[function_count++].name = name;
}
EXPORT hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, hipStream_t stream) {
  (void)grid, (void)block, (void)shared, (void)stream;
  return hipErrorUnknown; /* only <<<>>> uses it, which the library does not */
}
EXPORT hipError_t __hipPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, hipStream_t *stream) {
  (void)grid, (void)block, (void)shared, (void)stream;
  return hipErrorUnknown;
}

/* ---- What it calls at run time ------------------------------------------------------------------------------------ */

EXPORT hipError_t hipLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                                  hipStream_t stream) {
  CALL("hipLaunchKernel");
  for (int i = 0; i < function_count; ++i) {
    if (functions[i].host != host) continue;
    const unsigned shape[] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
    for (int d = 0; d < 6; ++d)
      if (shape[d] == 0) return hipErrorInvalidConfiguration;
    if ((unsigned long long)block.x * block.y * block.z > 1024 || shared > 65536) return hipErrorInvalidConfiguration;
    if ((unsigned long long)grid.x * block.x > 0xFFFFFFFFull) return hipErrorInvalidConfiguration;
    return fake.launch && fake.launch(functions[i].name, shape, shared, arguments, stream) ? hipErrorLaunchFailure : hipSuccess;
  }
  return hipErrorInvalidDeviceFunction;
}
EXPORT hipError_t hipGetDeviceCount(int *count) {
  CALL("hipGetDeviceCount");
  *count = fake.devices;
  return fake.devices ? hipSuccess : hipErrorNoDevice;
}
EXPORT hipError_t hipGetDevice(int *id) {
  CALL("hipGetDevice");
  *id = fake.device;
  return hipSuccess;
}
EXPORT hipError_t hipSetDevice(int id) {
  CALL("hipSetDevice");
  if (id < 0 || id >= fake.devices) return hipErrorInvalidDevice;
  fake.device = id;
  return hipSuccess;
}
EXPORT hipError_t hipDeviceGetAttribute(int *value, hipDeviceAttribute_t attribute, int id) {
  CALL("hipDeviceGetAttribute");
  if (id < 0 || id >= fake.devices) return hipErrorInvalidDevice;
  *value = attribute == hipDeviceAttributeMultiprocessorCount       ? 4
           : attribute == hipDeviceAttributeMaxSharedMemoryPerBlock ? 65536
           : attribute == hipDeviceAttributeWarpSize                ? 64
                                                                    : 0;
  return hipSuccess;
}
EXPORT hipError_t hipGetDeviceProperties(hipDeviceProp_t *properties, int id) {
  CALL("hipGetDeviceProperties");
  if (id < 0 || id >= fake.devices) return hipErrorInvalidDevice;
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "a GPU that is not there");
  snprintf(properties->gcnArchName, sizeof properties->gcnArchName, "%s", fake.arch);
  properties->multiProcessorCount = 4;
  return hipSuccess;
}
EXPORT const char *hipGetErrorString(hipError_t error) { return error ? "made to fail" : "no error"; }
