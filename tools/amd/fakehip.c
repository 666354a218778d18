/* A HIP runtime without a GPU, for the tests of libpydet_hip.so: the library's host code, and hip-python, run on it
 * unmodified. Device memory is the process's own: what hipMalloc gave, and what a test says. A launch is checked against
 * the limits of a workgroup and handed to a callback, which may execute it, or keep it for a graph's launches. Streams do
 * their work at once. Any call of the library's can be made to fail. */
#include <hip/hip_runtime_api.h>

#include <stdlib.h>

#include "../../tests/failing_calls.h"

#define EXPORT __attribute__((visibility("default")))

/* `graph` is the one that the launch is captured for, or NULL; without a kernel, the one that is launched. */
typedef int (*launch_callback)(const char *kernel, const unsigned *grid_and_block, size_t shared, void **arguments,
                               void *stream, void *graph);

static struct {
  launch_callback launch;
  int devices, device, units;
  char arch[64];
} fake = {.devices = 1, .units = 4, .arch = "gfx90a:sramecc+:xnack-"};

static struct {
  const void *host;
  const char *name;
  void **modules; /* of the library that brought it */
} functions[4096];
static int function_count;

static struct {
  char *base;
  size_t size;
  int allocated;
} ranges[4096]; /* of device memory */
static int range_count;

struct ihipStream_t {
  int there;
  struct ihipGraph *graph; /* while it captures */
};
static struct ihipStream_t streams[64];

/* For the tests: how many devices of which architecture; the call that fails (counted from the last fakehip_reset, -1 for
 * none); what was called since. */
EXPORT void fakehip_reset(int devices, const char *arch, int fail_at) {
  fake.devices = devices, fake.device = 0;
  start_calls(fail_at, 0);
  snprintf(fake.arch, sizeof fake.arch, "%s", arch);
}
EXPORT void fakehip_units(int units) { fake.units = units; } /* compute units of a device; 4 at first */
EXPORT void fakehip_on_launch(launch_callback callback) { fake.launch = callback; }
EXPORT int fakehip_calls(void) { return calls.count; }
EXPORT int fakehip_device(void) { return fake.device; }
EXPORT void fakehip_set_device(int id) { fake.device = id; }
EXPORT const char *fakehip_log(void) { return calls.log; }
EXPORT int fakehip_kernels(void) { return function_count; }
EXPORT const char *fakehip_kernel(int i) { return functions[i].name; }

/* Range i of device memory; 0 where there are no more. Memory that is the device's from here on; and none but what
 * hipMalloc gave. */
EXPORT size_t fakehip_memory(int i, void **base) {
  if (i >= range_count) return 0;
  *base = ranges[i].base;
  return ranges[i].size;
}
EXPORT void fakehip_own(void *base, size_t size) {
  if (range_count == sizeof ranges / sizeof *ranges) abort();
  ranges[range_count].base = base, ranges[range_count].size = size, ranges[range_count++].allocated = 0;
}
EXPORT void fakehip_disown(void) {
  int kept = 0;
  for (int i = 0; i < range_count; ++i)
    if (ranges[i].allocated) ranges[kept++] = ranges[i];
  range_count = kept;
}
static int owned(const void *at, size_t size) {
  for (int i = 0; i < range_count; ++i)
    if ((const char *)at >= ranges[i].base && (const char *)at + size <= ranges[i].base + ranges[i].size) return 1;
  return 0;
}

#define CALL(name) \
  if (fails(name)) return hipErrorUnknown

/* What a stream captures for. A test may name a stream that is none. */
static struct ihipGraph *captured_for(hipStream_t stream) {
  for (size_t i = 0; i < sizeof streams / sizeof *streams; ++i)
    if (stream == streams + i) return stream->graph;
  return NULL;
}

/* ---- What a compiled library calls when it is loaded ------------------------------------------------------------- */

EXPORT void **__hipRegisterFatBinary(const void *wrapper) {
  (void)wrapper;
  return calloc(1, sizeof(void *));
}
EXPORT void __hipUnregisterFatBinary(void **modules) {
  int kept = 0;
  for (int i = 0; i < function_count; ++i)
    if (functions[i].modules != modules) functions[kept++] = functions[i];
  function_count = kept;
  free(modules);
}
EXPORT void __hipRegisterFunction(void **modules, const void *host, char *device_name, const char *name, int threads,
                                  void *thread, void *block, void *block_size, void *grid_size, int *warp) {
  (void)device_name, (void)threads, (void)thread, (void)block, (void)block_size, (void)grid_size, (void)warp;
  if (function_count == sizeof functions / sizeof *functions) abort();
  functions[function_count].host = host;
  functions[function_count].modules = modules;
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
    void *graph = captured_for(stream);
    int failed = fake.launch && fake.launch(functions[i].name, shape, shared, arguments, stream, graph);
    return failed ? hipErrorLaunchFailure : hipSuccess;
  }
  return hipErrorInvalidDeviceFunction;
}
EXPORT hipError_t hipMemcpyAsync(void *to, const void *from, size_t size, hipMemcpyKind kind, hipStream_t stream) {
  CALL("hipMemcpyAsync");
  if (captured_for(stream)) return hipErrorStreamCaptureUnsupported; /* no graph keeps it here */
  if (kind != hipMemcpyDeviceToDevice || !owned(to, size) || !owned(from, size)) return hipErrorInvalidValue;
  memcpy(to, from, size);
  return hipSuccess;
}
EXPORT hipError_t hipFuncGetAttributes(struct hipFuncAttributes *attributes, const void *host) {
  CALL("hipFuncGetAttributes");
  for (int i = 0; i < function_count; ++i) {
    if (functions[i].host != host) continue;
    memset(attributes, 0, sizeof *attributes);
    return hipSuccess;
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
  *value = attribute == hipDeviceAttributeMultiprocessorCount       ? fake.units
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
  properties->multiProcessorCount = fake.units;
  properties->sharedMemPerBlock = 65536;
  return hipSuccess;
}
/* Memory that it does not know was an error before release 6. */
EXPORT hipError_t hipPointerGetAttributes(hipPointerAttribute_t *attributes, const void *at) {
  CALL("hipPointerGetAttributes");
  memset(attributes, 0, sizeof *attributes);
#if HIP_VERSION_MAJOR >= 6
  attributes->type = owned(at, 1) ? hipMemoryTypeDevice : hipMemoryTypeUnregistered;
  return hipSuccess;
#else
  return owned(at, 1) ? hipSuccess : hipErrorInvalidValue;
#endif
}
EXPORT const char *hipGetErrorString(hipError_t error) { return error ? "made to fail" : "no error"; }

/* ---- What the tests call by hip-python ------------------------------------------------------------------------------ */

static int captures; /* streams that capture: what would wait for the device, or give it memory, is refused meanwhile */

EXPORT hipError_t hipMalloc(void **at, size_t size) {
  if (captures) return hipErrorStreamCaptureUnsupported;
  *at = aligned_alloc(256, (size + 255) / 256 * 256);
  if (!*at) return hipErrorOutOfMemory;
  fakehip_own(*at, size);
  ranges[range_count - 1].allocated = 1;
  return hipSuccess;
}
EXPORT hipError_t hipFree(void *at) {
  for (int i = 0; i < range_count; ++i) {
    if (ranges[i].base != at || !ranges[i].allocated) continue;
    ranges[i] = ranges[--range_count];
    free(at);
    return hipSuccess;
  }
  return at ? hipErrorInvalidValue : hipSuccess;
}
EXPORT hipError_t hipMemcpy(void *to, const void *from, size_t size, hipMemcpyKind kind) {
  if (captures) return hipErrorStreamCaptureUnsupported;
  if (kind != hipMemcpyHostToDevice && kind != hipMemcpyDeviceToHost) return hipErrorInvalidValue;
  if (!owned(kind == hipMemcpyHostToDevice ? to : from, size)) return hipErrorInvalidValue;
  memcpy(to, from, size);
  return hipSuccess;
}
EXPORT hipError_t hipMemsetAsync(void *at, int value, size_t size, hipStream_t stream) {
  if (captured_for(stream)) return hipErrorStreamCaptureUnsupported;
  if (!owned(at, size)) return hipErrorInvalidValue;
  memset(at, value, size);
  return hipSuccess;
}
EXPORT hipError_t hipDeviceSynchronize(void) { return captures ? hipErrorStreamCaptureUnsupported : hipSuccess; }

EXPORT hipError_t hipStreamCreate(hipStream_t *stream) {
  for (size_t i = 0; i < sizeof streams / sizeof *streams; ++i) {
    if (streams[i].there) continue;
    streams[i].there = 1;
    *stream = streams + i;
    return hipSuccess;
  }
  return hipErrorOutOfMemory;
}
EXPORT hipError_t hipStreamDestroy(hipStream_t stream) {
  stream->there = 0;
  return hipSuccess;
}
EXPORT hipError_t hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode mode) {
  if (!stream || !stream->there || stream->graph || mode != hipStreamCaptureModeGlobal) return hipErrorInvalidValue;
  stream->graph = calloc(1, 1);
  ++captures;
  return hipSuccess;
}
EXPORT hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t *graph) {
  if (!stream || !stream->graph) return hipErrorInvalidValue;
  *graph = stream->graph, stream->graph = NULL;
  --captures;
  return hipSuccess;
}
EXPORT hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t *ready, hipGraph_t graph, unsigned long long flags) {
  if (flags) return hipErrorInvalidValue;
  *ready = (hipGraphExec_t)graph; /* which lives as long as the process: the launches are kept under its address */
  return hipSuccess;
}
EXPORT hipError_t hipGraphLaunch(hipGraphExec_t ready, hipStream_t stream) {
  return fake.launch && fake.launch(NULL, NULL, 0, NULL, stream, ready) ? hipErrorLaunchFailure : hipSuccess;
}
EXPORT hipError_t hipGraphDestroy(hipGraph_t graph) { return graph ? hipSuccess : hipErrorInvalidValue; }
EXPORT hipError_t hipGraphExecDestroy(hipGraphExec_t ready) { return ready ? hipSuccess : hipErrorInvalidValue; }
