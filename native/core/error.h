// The sentences of refusals: operation, argument, got, want; and the words that they are made of.
#pragma once

#include <cinttypes>
#include <cstdarg>
#include <cstdio>

#include "contract/arithmetic.h"
#include "contract/status.h"

namespace pydet {

inline thread_local char last_error[512] = "";

inline __attribute__((cold, noinline)) pydet_status fail(pydet_status status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return status;
}

// Returns early with any status but PYDET_OK.
#define PYDET_TRY(expression)                                                     \
  do {                                                                            \
    if (pydet_status status_ = (expression); status_ != PYDET_OK) return status_; \
  } while (0)

constexpr const char *type_name(Type type) { return kTypes[int(type)].name; }

struct Text {
  char text[200];
};

// "float32, bfloat16 or float16".
inline __attribute__((cold, noinline)) Text type_list(uint32_t types) {
  Text out = {""};
  size_t used = 0;
  for (const TypeRow &row : kTypes) {
    if (!(types & bit(row.type))) continue;
    const char *join = used == 0 ? "" : types >> (int(row.type) + 1) ? ", " : " or ";
    used += size_t(snprintf(out.text + used, sizeof out.text - used, "%s%s", join, row.name));
    if (used >= sizeof out.text) break;
  }
  return out;
}

// "float64", of any type that has such a name; else what DLPack says of it.
inline __attribute__((cold, noinline)) Text dtype_text(pydet_dtype dtype) {
  constexpr const char *kNames[] = {"int", "uint", "float", nullptr, "bfloat", "complex", "bool"};
  constexpr int kBool = 6;
  Text out;
  const char *name = dtype.code < sizeof kNames / sizeof *kNames ? kNames[dtype.code] : nullptr;
  Type type;
  if (type_of(dtype, &type)) snprintf(out.text, sizeof out.text, "%s", type_name(type));
  else if (name && dtype.lanes == 1 && dtype.code == kBool) snprintf(out.text, sizeof out.text, "%s", name);
  else if (name && dtype.lanes == 1) snprintf(out.text, sizeof out.text, "%s%d", name, int(dtype.bits));
  else
    snprintf(out.text, sizeof out.text, "of DLPack dtype (code %d, bits %d, lanes %d)", int(dtype.code),
             int(dtype.bits), int(dtype.lanes));
  return out;
}

// "4096x512"; a scalar's shape is "()".
inline __attribute__((cold, noinline)) Text shape_text(const int64_t *shape, int ndim) {
  Text out;
  size_t used = size_t(snprintf(out.text, sizeof out.text, "%s", ndim == 0 ? "()" : ""));
  for (int i = 0; i < ndim && used < sizeof out.text; ++i)
    used += size_t(snprintf(out.text + used, sizeof out.text - used, "%s%" PRId64, i ? "x" : "", shape[i]));
  return out;
}

inline __attribute__((cold, noinline)) Text device_text(int32_t type, int32_t id) {
  Text out;
  const char *name = type == PYDET_CPU    ? "the CPU"
                     : type == PYDET_CUDA ? "CUDA"
                     : type == PYDET_ROCM ? "ROCm"
                                          : nullptr;
  if (type == PYDET_CPU) snprintf(out.text, sizeof out.text, "%s", name);
  else if (name) snprintf(out.text, sizeof out.text, "%s device %d", name, int(id));
  else snprintf(out.text, sizeof out.text, "a device of DLPack type %d", int(type));
  return out;
}

}  // namespace pydet
