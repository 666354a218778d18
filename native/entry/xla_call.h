// A call of XLA's: its buffers, attributes, stream and error, as the handlers read and answer them.
#pragma once

#include "entry/xla_ffi.h"

#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "contract/types.h"
#include "entry/to_fp32.h"

namespace pydet {

constexpr int32_t xla_of(Type type) {
  switch (type) {
    case Type::f32: return PYDET_XLA_F32;
    case Type::bf16: return PYDET_XLA_BF16;
    case Type::f16: return PYDET_XLA_F16;
    case Type::e4m3: return PYDET_XLA_F8E4M3FN;
    case Type::e5m2: return PYDET_XLA_F8E5M2;
    case Type::e8m0: return PYDET_XLA_F8E8M0FNU;
  }
  return 0;
}

constexpr int kMaxRank = 8;  // of a batch (6) and a matrix

struct Shape {
  int64_t dims[kMaxRank], strides[kMaxRank];
};

// A call that fails remembers why, and everything after that does nothing.
class Call {
 public:
  Call(pydet_xla_call *call, bool gpu) : call_(call), gpu_(gpu), device_{PYDET_CPU, 0} {
    if (!gpu) return;
    int32_t count = 0;
    const bool rocm = pydet_device_count(PYDET_ROCM, &count) == PYDET_OK && count > 0;
    pydet_xla_ordinal_arguments arguments = {sizeof arguments, nullptr, call->context, 0};
    const size_t needed = offsetof(pydet_xla_api, get_ordinal) + sizeof call->api->get_ordinal;
    if (call->api->struct_size >= needed && call->api->get_ordinal(&arguments)) fail("XLA names no device");
    device_ = {rocm ? PYDET_ROCM : PYDET_CUDA, arguments.ordinal};
  }

  pydet_xla_error *finish() {
    if (!*problem_) return nullptr;
    pydet_xla_error_arguments arguments = {sizeof arguments, nullptr, problem_,
                                           ours_ ? PYDET_XLA_INTERNAL : PYDET_XLA_INVALID_ARGUMENT};
    return call_->api->make_error(&arguments);
  }
  void fail(const char *sentence) {
    if (!*problem_) std::snprintf(problem_, sizeof problem_, "%s", sentence);
  }
  void check(pydet_status status) {
    if (status != PYDET_OK) fail(pydet_last_error());
    ours_ |= status == PYDET_DEVICE_ERROR;
  }
  bool failed() const { return *problem_; }

  int64_t integer(const char *name) { return scalar<int64_t>(name, PYDET_XLA_S64); }
  // In fp32; XLA's own threads flush subnormals.
  float real(const char *name) { return f32_from_f64(scalar<double>(name, PYDET_XLA_F64)); }

  // options.kernel, which lives as long as the call; NULL for "".
  const char *kernel() {
    const auto *name = static_cast<const pydet_xla_name *>(attribute("kernel", PYDET_XLA_STRING));
    if (!name || !name->length) return nullptr;
    if (name->length >= sizeof kernel_) fail("kernel is longer than any name of a kernel");
    std::snprintf(kernel_, sizeof kernel_, "%.*s", int(name->length), name->text);
    return kernel_;
  }

  // Argument or result i; an empty one where there is none, which fails the call.
  const pydet_xla_buffer &argument(int64_t i) { return item(call_->arguments, i); }
  const pydet_xla_buffer &result(int64_t i) { return item(call_->results, i); }

  void *stream() {
    if (!gpu_ || failed()) return nullptr;
    pydet_xla_stream_arguments arguments = {sizeof arguments, nullptr, call_->context, nullptr};
    if (call_->api->get_stream(&arguments)) fail("XLA gives no stream");
    return arguments.stream;
  }

  // The tensor of a buffer from element `offset` on, with these dimensions.
  pydet_tensor tensor(const pydet_xla_buffer &buffer, Shape *shape, int rank, int64_t offset = 0) {
    pydet_tensor t = {};
    t.dtype = {0, 8, 1};  // none of ours
    for (const TypeRow &row : kTypes)
      if (xla_of(row.type) == buffer.dtype) t.dtype = {row.code, row.bits, 1};
    t.data = static_cast<char *>(buffer.data) + offset * (t.dtype.bits / 8);
    t.device = device_;
    t.ndim = rank;
    t.shape = shape->dims;
    t.strides = shape->strides;
    return t;
  }

 private:
  // The attribute of this name and type, where that is a scalar's of this element type; NULL where there is none, which
  // fails the call.
  const void *attribute(const char *name, int32_t type, int32_t dtype = 0) {
    const pydet_xla_attributes &all = call_->attributes;
    for (int64_t i = 0; i < all.size; ++i) {
      const pydet_xla_name &own = *all.names[i];
      if (own.length != std::strlen(name) || std::memcmp(own.text, name, own.length)) continue;
      if (all.types[i] != type) break;
      const auto *value = static_cast<const pydet_xla_scalar *>(all.items[i]);
      if (type != PYDET_XLA_SCALAR || value->dtype == dtype) return value;
    }
    char sentence[96];
    std::snprintf(sentence, sizeof sentence, "attribute %s is missing or of another type", name);
    fail(sentence);
    return nullptr;
  }
  template <class T> T scalar(const char *name, int32_t dtype) {
    const auto *found = static_cast<const pydet_xla_scalar *>(attribute(name, PYDET_XLA_SCALAR, dtype));
    return found ? *static_cast<const T *>(found->value) : 0;
  }

  const pydet_xla_buffer &item(const pydet_xla_list &list, int64_t i) {
    static const pydet_xla_buffer none = {};
    if (i < list.size) return *list.items[i];
    fail("an operand is missing");
    return none;
  }

  pydet_xla_call *call_;
  bool gpu_, ours_ = false;
  pydet_device device_;
  char problem_[512] = "", kernel_[64];
};

inline int64_t elements(const pydet_xla_buffer &buffer) {
  int64_t count = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) count *= buffer.dims[i];
  return count;
}

// What is continued from is the result's own buffer.
inline void expect_in_place(Call &call, const pydet_xla_buffer &argument, const pydet_xla_buffer &result) {
  if (argument.data != result.data && elements(result))
    call.fail("XLA gave what is continued from and the result different memory");
}

// C order.
inline void lay_out(Shape *shape, int rank) {
  int64_t stride = 1;
  for (int i = rank - 1; i >= 0; --i) {
    shape->strides[i] = stride;
    stride *= shape->dims[i];
  }
}

inline pydet_xla_error *handle(pydet_xla_call *call, bool gpu, void (*operation)(Call &)) {
  for (pydet_xla_extension *e = call->extensions; e; e = e->next) {
    if (e->type != PYDET_XLA_METADATA) continue;
    pydet_xla_metadata *metadata = reinterpret_cast<pydet_xla_metadata_extension *>(e)->metadata;
    metadata->version.major = 0;
    metadata->version.minor = 1;  // what is used here has been there since
    metadata->traits = 1;         // nothing but launches on the stream: these may be captured
    return nullptr;
  }
  if (call->stage != PYDET_XLA_EXECUTE) return nullptr;
  Call described(call, gpu);
  operation(described);
  return described.finish();
}

template <void (*operation)(Call &), bool gpu> pydet_xla_error *handled(pydet_xla_call *call) {
  return handle(call, gpu, operation);
}
template <void (*operation)(Call &)> constexpr pydet_xla_handler handler(const char *name) {
  return {name, handled<operation, false>, handled<operation, true>};
}

}  // namespace pydet
