// What the library says of itself: version, words, threads, devices, kernels.

#include "core/backend.h"
#include "ops/gemm/check.h"
#include "cpu/pool.h"

namespace pydet {
namespace {

// "fp32 bf16 fp16" for each set of types.
struct TypeLists {
  char text[1 << kTypeCount][8 * kTypeCount];
};
constexpr TypeLists type_lists() {
  TypeLists lists = {};
  for (uint32_t types = 0; types < 1u << kTypeCount; ++types) {
    int used = 0;
    for (const TypeRow &row : kTypes) {
      if (!(types & bit(row.type))) continue;
      if (used) lists.text[types][used++] = ' ';
      for (const char *c = row.brief; *c; ++c) lists.text[types][used++] = *c;
    }
  }
  return lists;
}
constexpr TypeLists kTypeLists = type_lists();

}  // namespace
}  // namespace pydet

using namespace pydet;

const char *pydet_version(void) {
  static_assert(PYDET_VERSION_MAJOR == 0 && PYDET_VERSION_MINOR == 2 && PYDET_VERSION_PATCH == 0, "the text below");
  return "0.2.0";
}
int32_t pydet_abi(void) { return PYDET_ABI; }
int32_t pydet_numerics(void) { return PYDET_NUMERICS; }
const char *pydet_last_error(void) { return last_error; }

const char *pydet_status_name(pydet_status status) {
  static const char *const names[] = {"PYDET_OK",
                                      "PYDET_INVALID_VALUE",
                                      "PYDET_INVALID_SHAPE",
                                      "PYDET_INVALID_DTYPE",
                                      "PYDET_INVALID_STRIDE",
                                      "PYDET_INVALID_DEVICE",
                                      "PYDET_NULL_POINTER",
                                      "PYDET_OVERLAP",
                                      "PYDET_OVERFLOW",
                                      "PYDET_MISALIGNED",
                                      "PYDET_WORKSPACE_TOO_SMALL",
                                      "PYDET_UNSUPPORTED",
                                      "PYDET_NO_DEVICE",
                                      "PYDET_DEVICE_ERROR"};
  constexpr int count = int(sizeof names / sizeof *names);
  static_assert(count == PYDET_DEVICE_ERROR + 1, "one name a status");
  return status >= 0 && status < count ? names[status] : "unknown status";
}

const char *pydet_arithmetic_name(int32_t arithmetic) {
  return arithmetic >= 0 && arithmetic < kArithmeticCount ? kArithmetics[arithmetic].name : nullptr;
}

pydet_status pydet_resolve_arithmetic(pydet_device device, pydet_dtype dtype, int32_t arithmetic, int32_t *resolved) {
  const char *op = "resolve_arithmetic";
  if (!resolved) return fail(PYDET_NULL_POINTER, "%s: resolved is NULL", op);
  Type type;
  if (!type_of(dtype, &type))
    return fail(PYDET_INVALID_DTYPE, "%s: dtype is %s, want %s", op, dtype_text(dtype).text,
                type_list(types_for(kFactor)).text);
  if (device.device_type == PYDET_CPU && device.device_id != 0)
    return fail(PYDET_NO_DEVICE, "%s: device is CPU %d, want CPU 0", op, int(device.device_id));
  Device normal = normalized(device);
  int32_t count = 0;
  PYDET_TRY(pydet_device_count(normal.type, &count));
  if (normal.id < 0 || normal.id >= count)
    return fail(PYDET_NO_DEVICE, "%s: device is %s, and there are %d of them", op,
                device_text(normal.type, normal.id).text, int(count));
  Arithmetic result = Arithmetic::automatic;
  PYDET_TRY(resolve(op, normal, type, arithmetic, &result));
  if (result == Arithmetic::automatic)
    return fail(PYDET_DEVICE_ERROR, "%s: %s does not say what it is", op, device_text(normal.type, normal.id).text);
  *resolved = int32_t(result);
  return PYDET_OK;
}

int32_t pydet_threads(void) { return thread_count(); }

pydet_status pydet_set_threads(int32_t count) {
  if (count < 0) return fail(PYDET_INVALID_VALUE, "set_threads: count is %d, want 0 or more", int(count));
  set_thread_count(count);
  return PYDET_OK;
}

pydet_status pydet_device_count(int32_t device_type, int32_t *count) {
  if (!count) return fail(PYDET_NULL_POINTER, "device_count: count is NULL");
  if (device_type != PYDET_CPU && device_type != PYDET_CUDA && device_type != PYDET_ROCM)
    return fail(PYDET_INVALID_VALUE, "device_count: device_type is %d, want PYDET_CPU, PYDET_CUDA or PYDET_ROCM",
                int(device_type));
  *count = 0;
  const Backend *backend = backend_for(device_type);
  return backend ? backend->device_count(count) : PYDET_OK;
}

pydet_status pydet_query_device(pydet_device device, pydet_device_info *info) {
  const char *op = "query_device";
  if (!info) return fail(PYDET_NULL_POINTER, "%s: info is NULL", op);
  PYDET_TRY(check_size<pydet_device_info>(op, "info", info->struct_size));
  int32_t count = 0;
  PYDET_TRY(pydet_device_count(device.device_type, &count));
  if (device.device_id < 0 || device.device_id >= count)
    return fail(PYDET_NO_DEVICE, "%s: device is %s, and there are %d of them", op,
                device_text(device.device_type, device.device_id).text, int(count));
  pydet_device_info filled = {};
  PYDET_TRY(backend_for(device.device_type)->query_device(device.device_id, &filled));
  write_info(filled, info);
  return PYDET_OK;
}

const char *pydet_kernel_name(int32_t index) {
  const char *name = nullptr;
  int32_t i = 0;
  each_kernel([&](const Backend &, const char *, const auto &row) {
    if (i++ == index) name = row.name;
  });
  return name;
}

pydet_status pydet_query_kernel(int32_t index, pydet_kernel_info *info) {
  const char *op = "query_kernel";
  if (!info) return fail(PYDET_NULL_POINTER, "%s: info is NULL", op);
  PYDET_TRY(check_size<pydet_kernel_info>(op, "info", info->struct_size));
  if (!pydet_kernel_name(index))
    return fail(PYDET_INVALID_VALUE, "%s: index is %d, past the last kernel", op, int(index));
  int32_t i = 0;
  each_kernel([&](const Backend &backend, const char *operation, const auto &row) {
    if (i++ != index) return;
    int32_t devices = 0, available = 0;
    if (backend.device_count(&devices) == PYDET_OK)
      for (int32_t id = 0; id < devices; ++id) available |= row.machine.has({backend.device_type, id});
    write_info({sizeof *info, backend.device_type, available, int32_t(row.arithmetic), row.name, operation,
                kTypeLists.text[row.types], row.machine.name},
               info);
  });
  return PYDET_OK;
}
