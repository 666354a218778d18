// The Python entry (python.h): reads Python objects as descriptors, makes the results in the caller's framework,
// calls the operation, and hands the results back. Every check of shapes, types and devices stays the operation's own.
//
// Called with the GIL held, as any Python method; it is released around work that is large or goes to a GPU.
#include "entry/python.h"

#include <cstdio>
#include <cstring>

#include "types.h"

namespace pydet {
namespace {

using Object = pydet_object;
using Framework = pydet_exchange_framework;
using Library = pydet_exchange_library;

const pydet_exchange *exchange;  // set once, by pydet_exchange_methods
thread_local int32_t last_library = -1;

const pydet_exchange_python &python() { return exchange->python; }

// ---- Layouts that others have written down -----------------------------------------------------------------------

struct MethodDef {  // CPython's PyMethodDef
  const char *name;
  Object *(*call)(Object *self, Object *const *args, intptr_t count);
  int flags;
  const char *doc;
};
constexpr int kFastCall = 0x80;  // METH_FASTCALL

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

// ---- Small things ------------------------------------------------------------------------------------------------

// The returned object is the caller's to release; NULL with a Python exception set.
template <class... Objects> Object *call_python(Object *callable, Objects... arguments) {
  return python().PyObject_CallFunctionObjArgs(callable, arguments..., static_cast<Object *>(nullptr));
}

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

Object *text(const char *sentence) {  // a sentence may have been cut inside a character
  return python().PyUnicode_DecodeUTF8(sentence, intptr_t(strlen(sentence)), "replace");
}
Object *integer(int64_t value) { return python().PyLong_FromLongLong(value); }

constexpr int kDims = 8;               // what the library takes; more go to it as they are, to be refused
constexpr int64_t kGilWork = 1 << 16;  // multiply-adds or elements under which the GIL is kept: some 10 us

static_assert(kTypeCount == PYDET_EXCHANGE_TYPES, "as python.h says");

pydet_dtype dtype_of(int type) { return {kTypes[type].code, kTypes[type].bits, 1}; }

int type_index(pydet_dtype dtype) {  // -1: none of ours
  Type type;
  return type_of(dtype, &type) ? int(type) : -1;
}

// Has a shape and a type that results can be made after; the operation says what is wrong with any other.
bool sound(const pydet_tensor &tensor, int min_ndim) {
  if (tensor.ndim < min_ndim || tensor.ndim > kDims || type_index(tensor.dtype) < 0) return false;
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.shape[i] < 0) return false;
  return true;
}

int library_index(int32_t device_type) {
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

// ---- One call ----------------------------------------------------------------------------------------------------

// Operands are read in order; the first is the one that results are like. Methods that return false have set a Python
// exception.
class Call {
 public:
  explicit Call(const char *op) : op_(op) {}
  ~Call() {
    for (int i = 0; i < count_; ++i) {
      Operand &operand = operands_[i];
      if (operand.buffered) python().PyBuffer_Release(&operand.buffer);
      if (operand.keep) python().Py_DecRef(operand.keep);
      if (operand.made) python().Py_DecRef(operand.object);
    }
  }
  Call(const Call &) = delete;
  Call &operator=(const Call &) = delete;

  // A required operand; NULL on failure.
  Operand *read(const char *name, Object *object, bool written = false) {
    Operand *operand = add(object);
    const Framework *framework = framework_of(name, object);
    if (!framework || !agree(name, object, framework) || !fill(name, operand, framework, written)) return nullptr;
    return operand;
  }

  // One that may be None; then it is not present.
  Operand *read_optional(const char *name, Object *object, bool written = false) {
    if (object != exchange->none) return read(name, object, written);
    return add(object);
  }

  // A new tensor of the first operand's framework, on its device.
  Operand *make(int ndim, const int64_t *shape, int type) {
    Operand *operand = add(nullptr);
    const Operand &like = operands_[0];
    if (first_->reader == PYDET_EXCHANGE_API) return make_by_api(operand, ndim, shape, type) ? operand : nullptr;
    Owned extents(python().PyTuple_New(ndim));
    if (!extents) return nullptr;
    for (int i = 0; i < ndim; ++i) {
      Object *extent = integer(shape[i]);
      if (!extent) return nullptr;
      python().PyTuple_SetItem(extents, i, extent);
    }
    if (first_->reader == PYDET_EXCHANGE_ARRAY && exchange->numpy_dtypes[type]) {
      Object *dtype = exchange->numpy_dtypes[type];
      operand->object = call_python(exchange->numpy_empty, static_cast<Object *>(extents), dtype);
    } else {
      Owned index(integer(type)), op(text(op_));
      operand->object = call_python(exchange->allocate, like.object, static_cast<Object *>(extents),
                                    static_cast<Object *>(index), static_cast<Object *>(op));
    }
    if (!operand->object) return nullptr;
    operand->made = true;
    const Framework *framework = framework_of("out", operand->object);
    return framework && fill("out", operand, framework, true) ? operand : nullptr;
  }

  // Scratch memory on the operands' device, aligned to 256 bytes.
  bool make_workspace(uint64_t bytes, void **workspace, uint64_t *size) {
    if (bytes == 0) return true;
    const int64_t floats = int64_t(bytes / 4 + 65);
    uintptr_t begin;
    if (can_allocate()) {
      Operand *operand = make(1, &floats, int(Type::f32));
      if (!operand) return false;
      begin = reinterpret_cast<uintptr_t>(operand->tensor.data) + operand->tensor.byte_offset;
    } else {
      Operand *operand = add(nullptr);
      Owned count(integer(4 * floats)), type(integer(operands_[0].tensor.device.device_type)), op(text(op_));
      operand->keep = call_python(exchange->scratch, operands_[0].object, static_cast<Object *>(type),
                                  static_cast<Object *>(count), static_cast<Object *>(op));
      if (!operand->keep) return false;
      begin = reinterpret_cast<uintptr_t>(python().PyLong_AsVoidPtr(python().PyTuple_GetItem(operand->keep, 0)));
    }
    *workspace = reinterpret_cast<void *>((begin + 255) / 256 * 256);
    *size = bytes;
    return true;
  }

  // Finds the library that serves the first operand's device, and the stream: the one given, or the framework's
  // current one.
  bool choose_library(Object *stream) {
    const pydet_device device = operands_[0].tensor.device;
    int index = library_index(device.device_type);
    library_ = &exchange->libraries[index];
    if (!library_->gemm) {
      Owned type(integer(device.device_type)), op(text(op_));
      Owned loaded(call_python(exchange->load, static_cast<Object *>(type), static_cast<Object *>(op)));
      if (!loaded) return false;
    }
    library_number_ = index;
    on_gpu_ = index != PYDET_EXCHANGE_CPU;
    if (!on_gpu_) return true;
    if (stream != exchange->none) {
      stream_ = python().PyLong_AsVoidPtr(stream);
      return !python().PyErr_Occurred();
    }
    int32_t type = device.device_type == PYDET_CUDA_MANAGED ? int32_t(PYDET_CUDA) : device.device_type;
    if (first_->reader == PYDET_EXCHANGE_API)
      return static_cast<const ExchangeApi *>(first_->api)->current_stream(type, device.device_id, &stream_) == 0;
    Owned device_type(integer(type)), device_id(integer(device.device_id));
    Owned address(call_python(exchange->stream, operands_[0].object, static_cast<Object *>(device_type),
                              static_cast<Object *>(device_id)));
    if (!address) return false;
    stream_ = python().PyLong_AsVoidPtr(address);
    return !python().PyErr_Occurred();
  }

  // Runs operation() without the GIL if its `work` pays for that, or goes to a GPU, where a launch may wait.
  template <class Operation> bool run(int64_t work, const Operation &operation) {
    pydet_status status;
    if (on_gpu_ || work >= kGilWork) {
      void *thread = python().PyEval_SaveThread();
      status = operation(stream_);
      python().PyEval_RestoreThread(thread);
    } else {
      status = operation(stream_);
    }
    if (status != PYDET_OK) return fail(status, library_->last_error());
    last_library = library_number_;
    return true;
  }

  // What the caller gets of an output: a new reference, NULL on failure.
  Object *result(Operand *operand) {
    if (operand->made && first_->adopts) return call_python(exchange->adopt, operands_[0].object, operand->object);
    python().Py_IncRef(operand->object);
    return operand->object;
  }

  bool fail(pydet_status status, const char *sentence) {
    Owned number(integer(status)), words(text(sentence));
    if (words) Owned(call_python(exchange->fail, static_cast<Object *>(number), static_cast<Object *>(words)));
    return false;
  }

  // Scalars; `fail` words what is no number.
  bool integer_of(const char *name, Object *object, int64_t *value) {
    *value = python().PyLong_AsLongLong(object);
    return (*value != -1 || !python().PyErr_Occurred()) || refuse(name, "no 64-bit integer");
  }
  bool flag_of(const char *name, Object *object, int32_t *value) {
    int truth = python().PyObject_IsTrue(object);
    *value = truth;
    return truth >= 0 || refuse(name, "neither true nor false");
  }
  bool float_of(const char *name, Object *object, float *value) {
    double number = python().PyFloat_AsDouble(object);
    *value = float(number);
    return (number != -1 || !python().PyErr_Occurred()) || refuse(name, "no number");
  }
  bool text_of(const char *name, Object *object, const char **value) {
    *value = object == exchange->none ? nullptr : python().PyUnicode_AsUTF8AndSize(object, nullptr);
    return *value || object == exchange->none || refuse(name, "no text");
  }

  // The number of a name in `names`, a dict; what it does not have is the `unknown` hook's to look up or refuse.
  bool number_of(const char *name, Object *names, Object *object, int32_t *value) {
    Object *known = python().PyDict_GetItem(names, object);
    Owned found(known ? nullptr : ask(exchange->unknown, object, name));
    *value = known || found ? int32_t(python().PyLong_AsLongLong(known ? known : static_cast<Object *>(found))) : 0;
    return known || found;
  }

  const Library &library() const { return *library_; }
  bool on_gpu() const { return on_gpu_; }
  bool can_allocate() const { return first_->reader != PYDET_EXCHANGE_HOOK || first_->id != 0; }

 private:
  Operand *add(Object *object) {
    Operand *operand = &operands_[count_++];
    operand->object = object;
    operand->keep = nullptr;
    operand->present = operand->buffered = operand->made = false;
    return operand;
  }

  bool refuse(const char *name, const char *what) {
    python().PyErr_Clear();
    char sentence[160];
    snprintf(sentence, sizeof sentence, "%s: %s is %s", op_, name, what);
    return fail(PYDET_INVALID_VALUE, sentence);
  }

  // Calls a hook of (object, op, name).
  Object *ask(Object *hook, Object *object, const char *name) {
    Owned op(text(op_)), argument(text(name));
    return call_python(hook, object, static_cast<Object *>(op), static_cast<Object *>(argument));
  }

  const Framework *framework_of(const char *name, Object *object) {
    Owned type(python().PyObject_Type(object));
    if (type == last_type_) return last_framework_;  // an operand holds the type
    if (Object *known = python().PyDict_GetItem(exchange->frameworks, type)) {
      last_type_ = type;
      return last_framework_ = static_cast<const Framework *>(python().PyLong_AsVoidPtr(known));
    }
    Owned address(ask(exchange->classify, object, name));
    return address ? static_cast<const Framework *>(python().PyLong_AsVoidPtr(address)) : nullptr;
  }

  bool agree(const char *name, Object *object, const Framework *framework) {
    if (count_ == 1) first_ = framework;
    if (framework->id == 0 || framework->id == id_) return true;
    if (id_ != 0) {
      Owned op(text(op_)), known(text(known_name_)), argument(text(name));
      Owned(call_python(exchange->mixed, static_cast<Object *>(op), static_cast<Object *>(known), known_,
                        static_cast<Object *>(argument), object));
      return false;
    }
    id_ = framework->id;
    known_ = object;
    known_name_ = name;
    return true;
  }

  bool fill(const char *name, Operand *operand, const Framework *framework, bool written) {
    operand->present = true;
    if (framework->reader == PYDET_EXCHANGE_API) return fill_by_api(name, operand, framework);
    if (framework->reader == PYDET_EXCHANGE_ARRAY && fill_by_buffer(operand)) {
      if (!written || !operand->buffer.readonly) return true;
      char sentence[80];
      snprintf(sentence, sizeof sentence, "%s: %s is read-only", op_, name);
      return fail(PYDET_INVALID_VALUE, sentence);
    }
    Owned op(text(op_)), argument(text(name)), write(integer(written));
    operand->keep = call_python(exchange->borrow, operand->object, static_cast<Object *>(op),
                                static_cast<Object *>(argument), static_cast<Object *>(write));
    if (!operand->keep) return false;
    void *address = python().PyLong_AsVoidPtr(python().PyTuple_GetItem(operand->keep, 0));
    operand->tensor = *static_cast<const pydet_tensor *>(address);
    return true;
  }

  // numpy.ndarray of our types; false, with no exception set, is for the `borrow` hook to look at.
  bool fill_by_buffer(Operand *operand) {
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
    bool whole = buffer.ndim <= kDims;
    for (int i = 0; whole && i < buffer.ndim; ++i) {
      whole = buffer.strides[i] % size == 0;
      operand->shape[i] = buffer.shape[i];
      operand->strides[i] = buffer.strides[i] / size;
    }
    if (whole)
      operand->tensor = {buffer.data, {PYDET_CPU, 0}, buffer.ndim, dtype_of(type), operand->shape, operand->strides, 0};
    return whole;
  }

  bool fill_by_api(const char *name, Operand *operand, const Framework *framework) {
    if (static_cast<const ExchangeApi *>(framework->api)->tensor_from_object(operand->object, &operand->tensor) != 0) {
      python().PyErr_Clear();
      Owned(ask(exchange->unreadable, operand->object, name));
      return false;
    }
    own_extents(operand);
    return !framework->torch || operand->made || means_its_memory(name, operand);
  }

  // The exchange API hands out tensors that want a gradient, and the memory of tensors that are its negative.
  bool means_its_memory(const char *name, const Operand *operand) {
    Owned tracked(python().PyObject_GetAttr(operand->object, exchange->requires_grad));
    Owned base(python().PyObject_GetAttr(operand->object, exchange->base));
    if (!tracked || !base) return false;
    bool suspect = python().PyObject_IsTrue(tracked);
    if (!suspect && (base != exchange->none || looks_negated(operand->tensor))) {
      Owned negated(call_python(exchange->is_neg, operand->object));
      if (!negated) return false;
      suspect = python().PyObject_IsTrue(negated);
    }
    if (!suspect) return true;
    Owned checked(ask(exchange->check, operand->object, name));
    return checked;
  }

  // Negated memory is the imaginary part of a conjugated tensor: a view, or if that was detached, every other element.
  // is_neg() takes as long as all else about a tensor together (70 ns), so only such tensors are asked.
  static bool looks_negated(const pydet_tensor &tensor) {
    if (!tensor.strides) return false;
    for (int i = 0; i < tensor.ndim; ++i)
      if (tensor.shape[i] > 1 && tensor.strides[i] % 2 != 0) return false;
    return true;
  }

  // Copies shape and strides, which another thread may change once the GIL is released.
  void own_extents(Operand *operand) {
    pydet_tensor &tensor = operand->tensor;
    if (tensor.ndim > kDims) return;
    for (int i = 0; i < tensor.ndim; ++i) {
      operand->shape[i] = tensor.shape[i];
      if (tensor.strides) operand->strides[i] = tensor.strides[i];
    }
    tensor.shape = operand->shape;
    if (tensor.strides) tensor.strides = operand->strides;
  }

  bool make_by_api(Operand *operand, int ndim, const int64_t *shape, int type) {
    const ExchangeApi *api = static_cast<const ExchangeApi *>(first_->api);
    int64_t extents[kDims];
    for (int i = 0; i < ndim; ++i) extents[i] = shape[i];
    pydet_tensor prototype = {nullptr, operands_[0].tensor.device, ndim, dtype_of(type), extents, nullptr, 0};
    ManagedTensor *managed = nullptr;
    char sentence[256] = "";
    struct Context {
      const char *op;
      char *sentence;
      size_t size;
    } context = {op_, sentence, sizeof sentence};
    auto set_error = [](void *to, const char *, const char *message) {
      auto *context = static_cast<Context *>(to);
      const int line = int(strcspn(message, "\n"));
      snprintf(context->sentence, context->size, "%s: no memory for the result: %.*s", context->op, line, message);
    };
    if (api->allocate(&prototype, &managed, &context, set_error) != 0) {
      python().PyErr_Clear();
      return fail(PYDET_DEVICE_ERROR, sentence);
    }
    operand->tensor = managed->tensor;
    operand->present = true;
    own_extents(operand);
    if (api->object_from_managed(managed, &operand->object) != 0) return false;
    operand->made = true;
    return true;
  }

  const char *op_;
  Operand operands_[10];
  int count_ = 0;
  const Framework *first_ = nullptr;  // of the first operand
  Object *last_type_ = nullptr;       // of the last operand, and its framework
  const Framework *last_framework_ = nullptr;
  int32_t id_ = 0;                    // of the first operand that is no bare carrier, and which that was
  Object *known_ = nullptr;
  const char *known_name_ = nullptr;
  const Library *library_ = nullptr;
  int32_t library_number_ = -1;
  void *stream_ = nullptr;
  bool on_gpu_ = false;
};

const pydet_tensor *tensor_of(const Operand *operand) {
  return operand && operand->present ? &operand->tensor : nullptr;
}

bool count_is(intptr_t count, intptr_t want, const char *op) {
  return count == want || Call(op).fail(PYDET_INVALID_VALUE, "the binding and the library disagree on the arguments");
}

// ---- GEMM --------------------------------------------------------------------------------------------------------

enum class Product { gemm, gemm_da, gemm_db, skinny_gemm };

// The shape of the result, as far as the operands have one: where they do not fit, an empty tensor of the right rows
// and columns, which no operation accepts and which costs nothing.
void product_shape(Product product, const pydet_tensor &x, const pydet_tensor &y, int *ndim, int64_t *shape) {
  const bool skinny = product == Product::skinny_gemm;
  const int64_t *x_end = x.shape + x.ndim, *y_end = y.shape + y.ndim;
  if (skinny) {
    *ndim = x.ndim;
    for (int i = 0; i + 1 < x.ndim; ++i) shape[i] = x.shape[i];
    shape[x.ndim - 1] = y_end[-2];
    return;
  }
  *ndim = x.ndim > y.ndim ? x.ndim : y.ndim;
  const int64_t depth = product == Product::gemm_db ? x_end[-2] : x_end[-1];
  bool fits = depth == (product == Product::gemm_da ? y_end[-1] : y_end[-2]);
  for (int i = 0; i < *ndim - 2; ++i) {
    int ix = i - (*ndim - x.ndim), iy = i - (*ndim - y.ndim);
    int64_t ex = ix < 0 ? 1 : x.shape[ix], ey = iy < 0 ? 1 : y.shape[iy];
    fits = fits && (ex == ey || ex == 1 || ey == 1);
    shape[i] = ex == 1 ? ey : ex;
  }
  if (!fits) {
    *ndim = 3;
    shape[0] = 0;
  }
  shape[*ndim - 2] = product == Product::gemm_db ? x_end[-1] : x_end[-2];
  shape[*ndim - 1] = product == Product::gemm_da ? y_end[-2] : y_end[-1];
}

int64_t elements(const pydet_tensor &tensor) {
  int64_t count = 1;
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.ndim > kDims || __builtin_mul_overflow(count, tensor.shape[i], &count)) return kGilWork;
  return count;
}

// Multiply-adds, or any large number where there are very many.
int64_t product_work(const pydet_tensor &out, int64_t depth) {
  int64_t work;
  return __builtin_mul_overflow(elements(out), depth, &work) ? kGilWork : work;
}

struct ProductWords {
  const char *op, *x, *y;
};
constexpr ProductWords kProductWords[] = {
    {"gemm", "a", "b"}, {"gemm_da", "dc", "b"}, {"gemm_db", "a", "dc"}, {"skinny_gemm", "x", "w"}};

// (x, y, bias, out, out type index or None, accumulate, arithmetic, k_chunk or None, mode or None, weights_constant,
// kernel or None, stream or None)
template <Product product> Object *call_product(Object *, Object *const *args, intptr_t count) {
  constexpr ProductWords words = kProductWords[int(product)];
  if (!count_is(count, 12, words.op)) return nullptr;
  Call call(words.op);
  Operand *x = call.read(words.x, args[0]);
  Operand *y = x ? call.read(words.y, args[1]) : nullptr;
  Operand *bias = y ? call.read_optional("bias", args[2]) : nullptr;
  Operand *out = bias ? call.read_optional("out", args[3], true) : nullptr;
  if (!out) return nullptr;

  pydet_skinny_gemm_options options = {};  // holds what both kinds of options have
  int64_t type = -1;
  if (args[4] != exchange->none && !call.integer_of("out_dtype", args[4], &type)) return nullptr;
  if (!call.flag_of("accumulate", args[5], &options.accumulate)) return nullptr;
  if (!call.number_of("arithmetic", exchange->arithmetics, args[6], &options.arithmetic)) return nullptr;
  if (args[7] != exchange->none && !call.integer_of("k_chunk", args[7], &options.k_chunk)) return nullptr;
  if (args[8] != exchange->none && !call.number_of("mode", exchange->modes, args[8], &options.mode)) return nullptr;
  if (!call.flag_of("weights_constant", args[9], &options.weights_constant)) return nullptr;
  if (!call.text_of("kernel", args[10], &options.kernel)) return nullptr;

  if (!call.choose_library(args[11])) return nullptr;
  const bool given = out->present;
  if (given && type >= 0 && type != type_index(out->tensor.dtype)) {
    char sentence[160];
    int have = type_index(out->tensor.dtype);
    snprintf(sentence, sizeof sentence, "%s: out is %s, and out_dtype asks for %s", words.op,
             have < 0 ? "of another type" : kTypes[have].name, kTypes[type].name);
    return call.fail(PYDET_INVALID_DTYPE, sentence), nullptr;
  }
  if (!given) {
    if (options.accumulate) {
      char sentence[160];
      snprintf(sentence, sizeof sentence, "%s: accumulate needs out, the float32 tensor to continue from", words.op);
      return call.fail(PYDET_INVALID_VALUE, sentence), nullptr;
    }
    if (sound(x->tensor, product == Product::skinny_gemm ? 1 : 2) && sound(y->tensor, 2)) {
      int ndim;
      int64_t shape[kDims];
      product_shape(product, x->tensor, y->tensor, &ndim, shape);
      if (!(out = call.make(ndim, shape, type < 0 ? type_index(x->tensor.dtype) : int(type)))) return nullptr;
    }
  }
  const int inner = product == Product::gemm_db ? 2 : 1;  // which dimension of x, from the end, is summed over
  const int64_t depth = sound(x->tensor, inner) ? x->tensor.shape[x->tensor.ndim - inner] : 0;
  const int64_t work = out->present ? product_work(out->tensor, depth) : 0;

  const Library &library = call.library();
  const bool skinny = product == Product::skinny_gemm;
  options.struct_size = sizeof options;
  pydet_gemm_options plain = {};
  plain.struct_size = sizeof plain;
  plain.arithmetic = options.arithmetic;
  plain.k_chunk = options.k_chunk;
  plain.accumulate = options.accumulate;
  plain.kernel = options.kernel;
  if (call.on_gpu() && call.can_allocate() && out->present && sound(out->tensor, skinny ? 1 : 2)) {
    const pydet_tensor &result = out->tensor;
    const int64_t n = result.shape[result.ndim - 1], m = result.ndim < 2 ? 1 : result.shape[result.ndim - 2];
    const int64_t batch = m > 0 && n > 0 ? elements(result) / m / n : 0;
    uint64_t bytes = 0;
    pydet_status status = skinny ? library.skinny_gemm_workspace(batch * m, n, depth, &options, &bytes)
                                 : library.gemm_workspace(batch, m, n, depth, &plain, &bytes);
    if (status != PYDET_OK) bytes = 0;  // the operation will say it better
    if (!call.make_workspace(bytes, &options.workspace, &options.workspace_size)) return nullptr;
    plain.workspace = options.workspace;
    plain.workspace_size = options.workspace_size;
  }

  const pydet_tensor *px = tensor_of(x), *py = tensor_of(y), *pbias = tensor_of(bias), *pout = tensor_of(out);
  bool done = call.run(work, [&](void *stream) {
    switch (product) {
      case Product::gemm: return library.gemm(stream, px, py, pbias, pout, &plain);
      case Product::gemm_da: return library.gemm_da(stream, px, py, pout, &plain);
      case Product::gemm_db: return library.gemm_db(stream, px, py, pout, &plain);
      case Product::skinny_gemm: return library.skinny_gemm(stream, px, py, pbias, pout, &options);
    }
    return pydet_status(PYDET_INVALID_VALUE);
  });
  return done ? call.result(out) : nullptr;
}

// ---- RMSNorm -----------------------------------------------------------------------------------------------------

// Makes what the caller did not give; an x that has no rows or is of another type is the operation's to refuse.
bool make_like(Call &call, const pydet_tensor &x, int ndim, int type, Operand **operand) {
  if ((*operand)->present || !sound(x, 1)) return true;
  *operand = call.make(ndim, x.shape, type);
  return *operand != nullptr;
}

// (x, residual, weight, y, rstd, sum, eps, weight_offset, kernel or None, stream or None) -> (y, rstd), and sum where
// there is a residual
Object *call_rmsnorm(Object *, Object *const *args, intptr_t count) {
  if (!count_is(count, 10, "rmsnorm")) return nullptr;
  Call call("rmsnorm");
  Operand *x = call.read("x", args[0]);
  Operand *residual = x ? call.read_optional("residual", args[1]) : nullptr;
  Operand *weight = residual ? call.read_optional("weight", args[2]) : nullptr;
  Operand *y = weight ? call.read_optional("out", args[3], true) : nullptr;
  Operand *rstd = y ? call.read_optional("rstd", args[4], true) : nullptr;
  Operand *sum = rstd ? call.read_optional("sum", args[5], true) : nullptr;
  if (!sum) return nullptr;
  pydet_rmsnorm_options options = {};
  options.struct_size = sizeof options;
  if (!call.float_of("eps", args[6], &options.eps)) return nullptr;
  if (!call.float_of("weight_offset", args[7], &options.weight_offset)) return nullptr;
  if (!call.text_of("kernel", args[8], &options.kernel)) return nullptr;
  if (!call.choose_library(args[9])) return nullptr;

  const int type = type_index(x->tensor.dtype);
  if (!make_like(call, x->tensor, x->tensor.ndim, type, &y)) return nullptr;
  if (!make_like(call, x->tensor, x->tensor.ndim < 1 ? 0 : x->tensor.ndim - 1, int(Type::f32), &rstd)) return nullptr;
  if (residual->present && !make_like(call, x->tensor, x->tensor.ndim, type, &sum)) return nullptr;

  bool done = call.run(elements(x->tensor), [&](void *stream) {
    return call.library().rmsnorm(stream, tensor_of(x), tensor_of(residual), tensor_of(weight), tensor_of(y),
                                  tensor_of(rstd), tensor_of(sum), &options);
  });
  if (!done) return nullptr;
  Operand *results[] = {y, rstd, sum};
  const int wanted = sum->present ? 3 : 2;
  Owned tuple(python().PyTuple_New(wanted));
  for (int i = 0; tuple && i < wanted; ++i) {
    Object *object = call.result(results[i]);
    if (!object) return nullptr;
    python().PyTuple_SetItem(tuple, i, object);
  }
  return tuple.release();
}

// (dy, x, weight, rstd, dresidual, dx, dweight, dweight type index or None, weight_offset, accumulate, kernel or None,
// stream or None) -> (dx, dweight or None)
Object *call_rmsnorm_backward(Object *, Object *const *args, intptr_t count) {
  if (!count_is(count, 12, "rmsnorm_backward")) return nullptr;
  Call call("rmsnorm_backward");
  Operand *dy = call.read("dy", args[0]);
  Operand *x = dy ? call.read("x", args[1]) : nullptr;
  Operand *weight = x ? call.read_optional("weight", args[2]) : nullptr;
  Operand *rstd = weight ? call.read("rstd", args[3]) : nullptr;
  Operand *dresidual = rstd ? call.read_optional("dresidual", args[4]) : nullptr;
  Operand *dx = dresidual ? call.read_optional("out", args[5], true) : nullptr;
  Operand *dweight = dx ? call.read_optional("dweight", args[6], true) : nullptr;
  if (!dweight) return nullptr;
  pydet_rmsnorm_backward_options options = {};
  options.struct_size = sizeof options;
  int64_t type = -1;
  if (args[7] != exchange->none && !call.integer_of("dweight_dtype", args[7], &type)) return nullptr;
  if (!call.float_of("weight_offset", args[8], &options.weight_offset)) return nullptr;
  if (!call.flag_of("accumulate", args[9], &options.accumulate)) return nullptr;
  if (!call.text_of("kernel", args[10], &options.kernel)) return nullptr;
  if (!call.choose_library(args[11])) return nullptr;

  if (dweight->present && type >= 0 && type != type_index(dweight->tensor.dtype))
    return call.fail(PYDET_INVALID_DTYPE, "rmsnorm_backward: dweight is not of the type that dweight_dtype asks for"),
           nullptr;
  if (options.accumulate && !dweight->present)
    return call.fail(PYDET_INVALID_VALUE,
                     "rmsnorm_backward: accumulate needs dweight, the float32 tensor to continue from"),
           nullptr;
  if (!make_like(call, x->tensor, x->tensor.ndim, type_index(x->tensor.dtype), &dx)) return nullptr;
  if (!dweight->present && weight->present && sound(weight->tensor, 1) && weight->tensor.ndim == 1) {
    if (type < 0) type = type_index(weight->tensor.dtype);
    if (!(dweight = call.make(1, weight->tensor.shape, int(type)))) return nullptr;
  }
  const int64_t total = elements(x->tensor), n = sound(x->tensor, 1) ? x->tensor.shape[x->tensor.ndim - 1] : 0;
  if (dweight->present && n > 0) {
    uint64_t bytes = 0;
    if (call.library().rmsnorm_backward_workspace(total / n, n, &bytes) != PYDET_OK) bytes = 0;
    if (!call.make_workspace(bytes, &options.workspace, &options.workspace_size)) return nullptr;
  }

  bool done = call.run(total, [&](void *stream) {
    return call.library().rmsnorm_backward(stream, tensor_of(dy), tensor_of(x), tensor_of(weight), tensor_of(rstd),
                                           tensor_of(dresidual), tensor_of(dx), tensor_of(dweight), &options);
  });
  if (!done) return nullptr;
  Owned first(call.result(dx));
  if (!first) return nullptr;
  Owned second(dweight->present ? call.result(dweight) : nullptr);
  if (!second) {
    if (dweight->present) return nullptr;
    python().Py_IncRef(exchange->none);
  }
  Owned tuple(python().PyTuple_New(2));
  if (!tuple) return nullptr;
  python().PyTuple_SetItem(tuple, 0, first.release());
  python().PyTuple_SetItem(tuple, 1, second ? second.release() : exchange->none);
  return tuple.release();
}

const MethodDef kMethods[] = {
    {"gemm", call_product<Product::gemm>, kFastCall, nullptr},
    {"gemm_da", call_product<Product::gemm_da>, kFastCall, nullptr},
    {"gemm_db", call_product<Product::gemm_db>, kFastCall, nullptr},
    {"skinny_gemm", call_product<Product::skinny_gemm>, kFastCall, nullptr},
    {"rmsnorm", call_rmsnorm, kFastCall, nullptr},
    {"rmsnorm_backward", call_rmsnorm_backward, kFastCall, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace pydet

const void *pydet_exchange_methods(const pydet_exchange *exchange) {
  if (exchange->struct_size != sizeof(pydet_exchange)) return nullptr;
  pydet::exchange = exchange;
  return pydet::kMethods;
}

const char *pydet_exchange_type(int32_t index, pydet_dtype *dtype) {
  if (index < 0 || index >= pydet::kTypeCount) return nullptr;
  *dtype = pydet::dtype_of(index);
  return pydet::kTypes[index].name;
}

int32_t pydet_exchange_last_library(void) { return pydet::last_library; }
