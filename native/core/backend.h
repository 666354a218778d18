// What a backend provides: its devices, and a table of kernels for each operation, of which core/launch.h chooses.
#pragma once

#include "core/kernel.h"
#include "core/operations.h"

namespace pydet {

using Tables = AllOperations::Each<Table>;

// Of each operation's table, in any order.
template <class... Problems> constexpr Tables tables(const Table<Problems> &...given) {
  static_assert(AllOperations::are<Problems...>(),
                "one table an operation; no_kernels<Problem>() where there are none");
  Tables all = {};
  ((static_cast<Table<Problems> &>(all) = given), ...);
  return all;
}

struct Backend {
  int32_t device_type;
  const char *name;  // "CPU", "CUDA", "HIP"
  pydet_status (*device_count)(int32_t *) = nullptr;
  pydet_status (*query_device)(int32_t id, pydet_device_info *) = nullptr;  // id is in range
  // What AUTO means for bf16 and fp16; `automatic` where the device does not answer: no kernel has that.
  Arithmetic (*tensor_cores)(int32_t id) = nullptr;
  // Whether its kernels can use this memory; NULL: not to be known.
  bool (*reaches)(int32_t id, const void *) = nullptr;
  // Copies bytes from one place of a device's memory to another, in the stream's order.
  pydet_status (*copy)(const char *op, int32_t id, void *stream, void *to, const void *from, uint64_t bytes) = nullptr;
  void (*forget)() = nullptr;       // what was remembered of devices; NULL: nothing is
  const char *built_for = nullptr;  // architectures, and the setting that names them; NULL: any of its devices
  Tables tables = {};

  template <class Problem> const Table<Problem> &table() const { return tables; }
};

const Backend &cpu_backend();
const Backend *gpu_backend();  // NULL in libpydet_cpu.so

// NULL where this build does not serve such devices.
inline const Backend *backend_for(int32_t device_type) {
  if (device_type == PYDET_CPU) return &cpu_backend();
  const Backend *gpu = gpu_backend();
  return gpu && gpu->device_type == device_type ? gpu : nullptr;
}

template <class... Problems, class F> void each_row_of(Operations<Problems...>, const Backend &backend, F f) {
  const auto rows_of = [&](const char *operation, const auto &table) {
    for (int i = 0; i < table.count; ++i) f(backend, operation, table.rows[i]);
  };
  (rows_of(Operation<Problems>::name, backend.table<Problems>()), ...);
}

// Calls f(backend, operation, row) for every row of every table.
template <class F> void each_kernel(F f) {
  for (const Backend *backend : {&cpu_backend(), gpu_backend()})
    if (backend) each_row_of(AllOperations{}, *backend, f);
}

}  // namespace pydet
