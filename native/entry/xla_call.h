// A call of XLA's: its buffers, attributes, stream and error, as the handlers read and answer them.
#pragma once

#include "entry/xla_ffi.h"

#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "contract/types.h"
#include "contract/to_fp32.h"

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

// "3x4" for a sentence; "()" of a scalar.
struct ShapeWords {
  char text[96] = "()";
  ShapeWords(const int64_t *dims, int64_t rank) {
    int length = 0;
    for (int64_t i = 0; i < rank && length < int(sizeof text) - 24; ++i)
      length += std::snprintf(text + length, sizeof text - size_t(length), "%s%" PRId64, i ? "x" : "", dims[i]);
  }
};

// int8, which is none of ours, of an element type that we have not.
inline pydet_dtype dtype_of_xla(int32_t xla) {
  for (const TypeRow &row : kTypes)
    if (xla_of(row.type) == xla) return {row.code, row.bits, 1};
  if (xla == PYDET_XLA_S32) return {PYDET_INT, 32, 1};
  if (xla == PYDET_XLA_S64) return {PYDET_INT, 64, 1};
  if (xla == PYDET_XLA_PRED) return {PYDET_BOOL, 8, 1};
  return {PYDET_INT, 8, 1};
}

inline int64_t elements(const pydet_xla_buffer &buffer) {
  for (int64_t i = 0; i < buffer.rank; ++i)
    if (buffer.dims[i] == 0) return 0;  // however vast the others are
  int64_t count = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) count *= buffer.dims[i];
  return count;
}

// In the stream's order, within the device's memory.
pydet_status copy_within(const char *op, const pydet_device &device, void *stream, void *to, const void *from,
                         uint64_t bytes);

// A call that fails remembers why, and everything after that does nothing. What is read of it is checked there; that
// there is nothing else, in stream().
class Call {
 public:
  Call(pydet_xla_call *call, bool gpu, const char *op) : call_(call), gpu_(gpu), op_(op), device_{PYDET_CPU, 0} {
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
  __attribute__((format(printf, 2, 3))) void fail(const char *format, ...) {
    if (*problem_) return;
    const int length = std::snprintf(problem_, sizeof problem_, "%s: ", op_);
    va_list values;
    va_start(values, format);
    std::vsnprintf(problem_ + length, sizeof problem_ - size_t(length), format, values);
    va_end(values);
  }
  void check(pydet_status status) {
    if (status != PYDET_OK && !*problem_) std::snprintf(problem_, sizeof problem_, "%s", pydet_last_error());
    ours_ |= status == PYDET_DEVICE_ERROR;
  }
  void expect_shape(const char *name, const pydet_xla_buffer &buffer, const int64_t *want, int64_t rank) {
    bool fits = buffer.rank == rank;
    for (int64_t i = 0; fits && i < rank; ++i) fits = buffer.dims[i] == want[i];
    if (!fits) fail("%s is %s, want %s", name, ShapeWords(buffer.dims, buffer.rank).text, ShapeWords(want, rank).text);
  }
  bool failed() const { return *problem_; }

  int64_t integer(const char *name) { return scalar<int64_t>(name, PYDET_XLA_S64); }
  int32_t number(const char *name) {  // of the options that have 32 bits
    const int64_t value = integer(name);
    if (value != int32_t(value)) fail("attribute %s is %" PRId64 ", want a number of 32 bits", name, value);
    return int32_t(value);
  }
  bool flag(const char *name) {
    const int64_t value = integer(name);
    if (value != 0 && value != 1) fail("attribute %s is %" PRId64 ", want 0 or 1", name, value);
    return value == 1;
  }
  // In fp32; XLA's own threads flush subnormals.
  float real(const char *name) { return f32_from_f64(scalar<double>(name, PYDET_XLA_F64)); }
  // Where 0 says that there is none: no other number may become it.
  float real_or_none(const char *name) {
    const double value = scalar<double>(name, PYDET_XLA_F64);
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const float single = f32_from_f64(value);
    if (bits << 1 && !(bits_of(single) << 1)) fail("attribute %s is %g, which is 0 in float32", name, value);
    return single;
  }

  // options.kernel, which lives as long as the call; NULL for "".
  const char *kernel() {
    const auto *name = static_cast<const pydet_xla_name *>(attribute("kernel", PYDET_XLA_STRING));
    if (!name || !name->length) return nullptr;
    if (name->length >= sizeof kernel_) fail("attribute kernel is longer than any name of a kernel");
    else if (std::memchr(name->text, 0, name->length)) fail("attribute kernel has a NUL character in it");
    std::snprintf(kernel_, sizeof kernel_, "%.*s", int(name->length), name->text);
    return kernel_;
  }

  // Argument or result i; an empty one where there is none, which fails the call.
  const pydet_xla_buffer &argument(int64_t i) { return item("operands", call_->arguments, i, &arguments_); }
  const pydet_xla_buffer &result(int64_t i) { return item("results", call_->results, i, &results_); }

  // stream() copies so many bytes from where they lie to where the operation is to find them.
  void copy_before(const void *from, void *to, uint64_t bytes) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(from), other = reinterpret_cast<uintptr_t>(to);
    if (failed() || begin == other) return;
    if (begin < other + bytes && other < begin + bytes)
      fail("XLA gave what is continued from and the result memory that overlaps");
    else if (copy_count_ == kMostCopies) fail("more than %d results are continued", kMostCopies);
    else copies_[copy_count_++] = {from, to, bytes};
  }

  // Once everything has been read: what is given beside that fails the call, since nothing would come of it.
  void *stream() {
    surplus("operands", call_->arguments.size, arguments_);
    surplus("results", call_->results.size, results_);
    for (int64_t i = 0; i < call_->attributes.size; ++i) {
      const pydet_xla_name &own = *call_->attributes.names[i];
      if (i >= 64 || !(attributes_ >> i & 1))
        fail("attribute %.*s is unknown", int(own.length < 64 ? own.length : 64), own.text);
    }
    if (failed()) return nullptr;
    pydet_xla_stream_arguments arguments = {sizeof arguments, nullptr, call_->context, nullptr};
    if (gpu_ && call_->api->get_stream(&arguments)) fail("XLA gives no stream");
    for (int i = 0; i < copy_count_ && !failed(); ++i)
      check(copy_within(op_, device_, arguments.stream, copies_[i].to, copies_[i].from, copies_[i].bytes));
    return arguments.stream;
  }

  // The tensor of a buffer from element `offset` on, with these dimensions.
  pydet_tensor tensor(const pydet_xla_buffer &buffer, Shape *shape, int rank, int64_t offset = 0) {
    pydet_tensor t = {};
    t.dtype = dtype_of_xla(buffer.dtype);
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
      if (i < 64) attributes_ |= uint64_t(1) << i;
      if (all.types[i] != type) break;
      const auto *value = static_cast<const pydet_xla_scalar *>(all.items[i]);
      if (type != PYDET_XLA_SCALAR || value->dtype == dtype) return value;
    }
    fail("attribute %s is missing or of another type", name);
    return nullptr;
  }
  template <class T> T scalar(const char *name, int32_t dtype) {
    const auto *found = static_cast<const pydet_xla_scalar *>(attribute(name, PYDET_XLA_SCALAR, dtype));
    return found ? *static_cast<const T *>(found->value) : 0;
  }

  const pydet_xla_buffer &item(const char *what, const pydet_xla_list &list, int64_t i, int64_t *read) {
    static const pydet_xla_buffer none = {};
    if (*read <= i) *read = i + 1;
    if (i < list.size) return *list.items[i];
    fail("got %" PRId64 " %s, want %" PRId64 " or more", list.size, what, i + 1);
    return none;
  }
  void surplus(const char *what, int64_t size, int64_t read) {
    if (size > read) fail("got %" PRId64 " %s, want %" PRId64, size, what, read);
  }

  static constexpr int kMostCopies = 4;
  struct Copy {
    const void *from;
    void *to;
    uint64_t bytes;
  };

  pydet_xla_call *call_;
  bool gpu_, ours_ = false;
  const char *op_;
  int64_t arguments_ = 0, results_ = 0;  // how many have been read
  uint64_t attributes_ = 0;              // which
  pydet_device device_;
  Copy copies_[kMostCopies];
  int copy_count_ = 0;
  char problem_[512] = "", kernel_[64];
};

// Extents beside a 0 may be any, and their product more than 64 bits.
inline int64_t product(Call &call, const int64_t *dims, int64_t count) {
  int64_t all = 1;
  for (int64_t i = 0; i < count; ++i)
    if (__builtin_mul_overflow(all, dims[i], &all)) call.fail("an operand has 2^63 elements or more");
  return all;
}

// The operation finds in the result what the argument holds. XLA is told that both are one buffer. For a GPU it may put
// the result elsewhere nevertheless: straight into the array in which a loop collects its results.
inline void continue_from(Call &call, const pydet_xla_buffer &argument, const pydet_xla_buffer &result) {
  call.expect_shape("what is continued from", argument, result.dims, result.rank);
  if (argument.dtype != result.dtype) call.fail("what is continued from and the result are of different types");
  if (call.failed() || !elements(result)) return;
  const int64_t bytes = dtype_of_xla(result.dtype).bits / 8,
                extents[] = {bytes, product(call, result.dims, result.rank)};
  call.copy_before(argument.data, result.data, uint64_t(product(call, extents, 2)));
}

// C order.
inline void lay_out(Shape *shape, int rank) {
  int64_t stride = 1;
  for (int i = rank - 1; i >= 0; --i) {
    shape->strides[i] = stride;
    stride *= shape->dims[i];
  }
}

inline pydet_xla_error *handle(pydet_xla_call *call, bool gpu, const char *op, void (*operation)(Call &)) {
  for (pydet_xla_extension *e = call->extensions; e; e = e->next) {
    if (e->type != PYDET_XLA_METADATA) continue;
    pydet_xla_metadata *metadata = reinterpret_cast<pydet_xla_metadata_extension *>(e)->metadata;
    metadata->version.major = 0;
    metadata->version.minor = 1;  // what is used here has been there since
    metadata->traits = 1;         // nothing but launches and copies on the stream: these may be captured
    return nullptr;
  }
  if (call->stage != PYDET_XLA_EXECUTE) return nullptr;
  Call described(call, gpu, op);
  operation(described);
  return described.finish();
}

template <const char *name, void (*operation)(Call &), bool gpu> pydet_xla_error *handled(pydet_xla_call *call) {
  return handle(call, gpu, name, operation);
}
template <const char *name, void (*operation)(Call &)> constexpr pydet_xla_handler handler() {
  return {name, handled<name, operation, false>, handled<name, operation, true>};
}

}  // namespace pydet
