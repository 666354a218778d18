// What the Python entry touches: CPython's objects through the table that the binding fills, and the structures that
// CPython and DLPack have written down.
#pragma once

#include <cstdio>
#include <cstring>

#include "contract/types.h"
#include "core/operations.h"
#include "entry/python.h"
#include "contract/to_fp32.h"

#ifdef __cpp_exceptions
#error "compile with -fno-exceptions: a Python that shuts down unwinds threads, whose destructors would enter it"
#endif

namespace pydet {

using Object = pydet_object;
using Framework = pydet_exchange_framework;

inline const pydet_exchange *exchange;  // set by pydet_exchange_methods
inline thread_local int32_t last_library = -1;

inline const pydet_exchange_python &python() { return exchange->python; }

// ---- The functions of a loaded library ------------------------------------------------------------------------------

template <auto... first, auto... second>
constexpr FunctionList<first..., second...> operator+(FunctionList<first...>, FunctionList<second...>) {
  return {};
}
template <class... Problems> constexpr auto all_functions(Operations<Problems...>) {
  return (FunctionList<pydet_last_error>{} + ... + typename Operation<Problems>::Functions{});
}

// Its place in the list; -1 where it is in none.
template <auto function, auto... all> constexpr int place_of(FunctionList<all...>) {
  int place = -1, i = 0;
  ((std::is_same_v<FunctionList<function>, FunctionList<all>> ? place = i : 0, ++i), ...);
  return place;
}

// What a library gave as its functions (python.h).
class Library {
 public:
  explicit Library(const pydet_exchange_function *functions) : functions_(functions) {}
  explicit operator bool() const { return functions_; }
  template <auto function, class... Arguments> auto call(Arguments... arguments) const {
    constexpr int place = place_of<function>(all_functions(AllOperations{}));
    static_assert(place >= 0, "a function that no Operation names");
    return reinterpret_cast<decltype(function)>(functions_[place])(arguments...);
  }

 private:
  const pydet_exchange_function *functions_;
};

// ---- Layouts that others have written down -----------------------------------------------------------------------

constexpr int kFastCallKeywords = 0x82;  // METH_FASTCALL | METH_KEYWORDS
constexpr int kEqual = 2;                // Py_EQ

struct Buffer {  // CPython's Py_buffer
  void *data;
  Object *object;
  intptr_t size, item_size;
  int readonly, ndim;
  char *format;
  intptr_t *shape, *strides, *suboffsets;  // strides in bytes
  void *internal;
};
constexpr int kStrided = 0x18;  // PyBUF_STRIDED_RO

struct ManagedTensor {  // DLPack 1's DLManagedTensorVersioned
  uint32_t major, minor;
  void *owner;
  void (*deleter)(ManagedTensor *);
  uint64_t flags;
  pydet_tensor tensor;
};

struct ExchangeApi {  // DLPack 1's DLPackExchangeAPI
  uint32_t major, minor;
  const void *previous;
  int (*allocate)(pydet_tensor *prototype, ManagedTensor **tensor, void *context,
                  void (*set_error)(void *context, const char *kind, const char *message));
  int (*managed_from_object)(Object *object, ManagedTensor **tensor);
  int (*object_from_managed)(ManagedTensor *tensor, Object **object);
  int (*tensor_from_object)(Object *object, pydet_tensor *tensor);
  int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
};

// ---- Objects -----------------------------------------------------------------------------------------------------

// The returned object is the caller's to release; NULL with a Python exception set.
template <class... Objects> Object *call_python(Object *callable, Objects... arguments) {
  return python().PyObject_CallFunctionObjArgs(callable, arguments..., static_cast<Object *>(nullptr));
}

// While this lives there is no pending exception, so that Python code may run: what releases an object may.
class ExceptionAside {
 public:
  ExceptionAside() {
    if (python().PyErr_Occurred()) python().PyErr_Fetch(&type_, &value_, &traceback_);
  }
  ~ExceptionAside() {
    if (type_) python().PyErr_Restore(type_, value_, traceback_);
  }
  ExceptionAside(const ExceptionAside &) = delete;
  ExceptionAside &operator=(const ExceptionAside &) = delete;

 private:
  Object *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;
};

class Owned {
 public:
  explicit Owned(Object *object) : object_(object) {}
  ~Owned() {
    if (object_) python().Py_DecRef(object_);
  }
  Owned(const Owned &) = delete;
  Owned &operator=(const Owned &) = delete;
  operator Object *() const { return object_; }
  Object *release() {
    Object *object = object_;
    object_ = nullptr;
    return object;
  }

 private:
  Object *object_;
};

inline Object *text(const char *sentence) {  // a sentence may have been cut inside a character
  return python().PyUnicode_DecodeUTF8(sentence, intptr_t(strlen(sentence)), "replace");
}
inline Object *integer(int64_t value) { return python().PyLong_FromLongLong(value); }

inline bool given(Object *argument) { return argument && argument != exchange->none; }

constexpr int kDims = 8;               // what the library takes; more go to it as they are, to be refused
constexpr int64_t kGilWork = 1 << 16;  // multiply-adds or elements under which the GIL is kept: some 10 us

static_assert(kTypeCount == PYDET_EXCHANGE_TYPES, "as python.h says");

// The place behind the type indices: of results that are int64, such as tokens.
constexpr int kWholeNumbers = kTypeCount;
inline pydet_dtype dtype_of(int type) {
  if (type == kWholeNumbers) return {PYDET_INT, 64, 1};
  return {kTypes[type].code, kTypes[type].bits, 1};
}

inline int type_index(pydet_dtype dtype) {  // -1: none of ours
  Type type;
  return type_of(dtype, &type) ? int(type) : -1;
}

// Has a shape and a type that results can be made after; the operation says what is wrong with any other.
inline bool sound(const pydet_tensor &tensor, int min_ndim) {
  if (tensor.ndim < min_ndim || tensor.ndim > kDims || type_index(tensor.dtype) < 0) return false;
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.shape[i] < 0) return false;
  return true;
}

inline int library_index(int32_t device_type) {
  if (device_type == PYDET_CUDA || device_type == PYDET_CUDA_MANAGED) return PYDET_EXCHANGE_CUDA;
  return device_type == PYDET_ROCM ? PYDET_EXCHANGE_ROCM : PYDET_EXCHANGE_CPU;
}

struct Operand {
  pydet_tensor tensor;
  int64_t shape[kDims], strides[kDims];
  Buffer buffer;
  Object *object;  // borrowed of the caller, unless made
  Object *keep;    // released after the call
  bool present, buffered, made;
};

inline const pydet_tensor *tensor_of(const Operand *operand) {
  return operand && operand->present ? &operand->tensor : nullptr;
}

// numpy.ndarray of our types; false, with no exception set, is for the `borrow` hook to look at.
inline bool fill_by_buffer(Operand *operand) {
  Owned dtype(python().PyObject_GetAttr(operand->object, exchange->dtype));
  int type = 0;
  while (type < kTypeCount && (!dtype || exchange->numpy_dtypes[type] != dtype)) ++type;
  Buffer &buffer = operand->buffer;
  if (type == kTypeCount || python().PyObject_GetBuffer(operand->object, &buffer, kStrided) != 0) {
    python().PyErr_Clear();
    return false;
  }
  operand->buffered = true;
  const intptr_t size = kTypes[type].bits / 8;
  bool whole = buffer.ndim <= kDims && buffer.item_size == size;
  for (int i = 0; whole && i < buffer.ndim; ++i) {
    whole = buffer.strides[i] % size == 0;
    operand->shape[i] = buffer.shape[i];
    operand->strides[i] = buffer.strides[i] / size;
  }
  if (whole)
    operand->tensor = {buffer.data, {PYDET_CPU, 0}, buffer.ndim, dtype_of(type), operand->shape, operand->strides, 0};
  return whole;
}

// Copies shape and strides, which another thread may change once the GIL is released.
inline void own_extents(Operand *operand) {
  pydet_tensor &tensor = operand->tensor;
  if (tensor.ndim > kDims) return;
  for (int i = 0; i < tensor.ndim; ++i) {
    operand->shape[i] = tensor.shape[i];
    if (tensor.strides) operand->strides[i] = tensor.strides[i];
  }
  tensor.shape = operand->shape;
  if (tensor.strides) tensor.strides = operand->strides;
}

}  // namespace pydet
