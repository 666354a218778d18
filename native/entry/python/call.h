// One call from Python: its arguments, its operands as descriptors, its results in the caller's framework.
#pragma once

#include "entry/python/objects.h"

namespace pydet {

// Operands are read in order; the first is the one that results are like. Methods that return false, or NULL where
// they return an operand, have set a Python exception.
class PythonCall {
 public:
  // more: room for operands beyond those of most operations.
  explicit PythonCall(const char *op, Operand *more = nullptr) : op_(op), more_(more) {}
  ~PythonCall() {
    const ExceptionAside aside;
    for (int i = 0; i < count_; ++i) {
      Operand &operand = *at(i);
      if (operand.buffered) python().PyBuffer_Release(&operand.buffer);
      if (operand.keep) python().Py_DecRef(operand.keep);
      if (operand.made) python().Py_DecRef(operand.object);
    }
  }
  PythonCall(const PythonCall &) = delete;
  PythonCall &operator=(const PythonCall &) = delete;

  // Sorts the arguments of a method (METH_FASTCALL | METH_KEYWORDS) into its struct, whose first `positional` members
  // must be there. `names` are those of all members. A caller's keywords are interned, and mostly in the struct's order.
  template <class Arguments>
  bool arguments(Object *const *names, int positional, Object *const *args, intptr_t count, Object *keywords,
                 Arguments *arguments) {
    constexpr int members = int(sizeof(Arguments) / sizeof(Object *));
    Object *slots[members] = {};
    bool fits = count == positional;
    for (int i = 0; fits && i < positional; ++i) slots[i] = args[i];
    const intptr_t named = keywords ? python().PyTuple_Size(keywords) : 0;
    int next = positional;
    for (intptr_t k = 0; fits && k < named; ++k) {
      Object *name = python().PyTuple_GetItem(keywords, k);
      while (next < members && names[next] != name) ++next;
      if (next == members) {
        next = positional;
        while (next < members && python().PyObject_RichCompareBool(names[next], name, kEqual) != 1) ++next;
      }
      fits = next < members;
      if (fits) slots[next] = args[count + k];
    }
    memcpy(arguments, slots, sizeof slots);
    return fits || refuse("an argument", "not one that the library knows: build both anew");
  }

  // A required operand; NULL on failure.
  Operand *read(const char *name, Object *object, bool written = false) {
    Operand *operand = add(object);
    const Framework *framework = framework_of(name, object);
    if (!framework || !agree(name, object, framework) || !fill(name, operand, framework, written)) return nullptr;
    return operand;
  }

  // One that may be None or not given; then it is not present.
  Operand *read_optional(const char *name, Object *object, bool written = false) {
    return given(object) ? read(name, object, written) : add(object);
  }

  // A new tensor of the first operand's framework, on its device. `type`: a type index, or kWholeNumbers.
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
    if (first_->reader == PYDET_EXCHANGE_ARRAY && type < kTypeCount && exchange->numpy_dtypes[type]) {
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
    const int index = library_index(device.device_type);
    library_ = loaded(index);
    if (!library_) {
      Owned type(integer(device.device_type)), op(text(op_));
      Owned done(call_python(exchange->load, static_cast<Object *>(type), static_cast<Object *>(op)));
      if (!done) return false;
      library_ = loaded(index);
    }
    library_number_ = index;
    on_gpu_ = index != PYDET_EXCHANGE_CPU;
    if (!on_gpu_) return true;
    if (given(stream)) {
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
    if (status != PYDET_OK) return fail(status, library_.call<pydet_last_error>());
    last_library = library_number_;
    return true;
  }

  // What the caller gets of an output: a new reference, NULL on failure.
  Object *result(Operand *operand) {
    if (operand->made && first_->adopts) return call_python(exchange->adopt, operands_[0].object, operand->object);
    python().Py_IncRef(operand->object);
    return operand->object;
  }

  // What the caller gets of several: a tuple, with None for those that are not present. NULL on failure.
  Object *results(Operand *const *operands, int count) {
    Object *tuple = python().PyTuple_New(count);
    for (int i = 0; tuple && i < count; ++i) {
      Object *object = exchange->none;
      if (operands[i]->present) object = result(operands[i]);
      else python().Py_IncRef(object);
      if (object) {
        python().PyTuple_SetItem(tuple, i, object);
        continue;
      }
      const ExceptionAside aside;
      python().Py_DecRef(tuple);
      return nullptr;
    }
    return tuple;
  }

  bool fail(pydet_status status, const char *sentence) {
    Owned number(integer(status)), words(text(sentence));
    if (words) Owned(call_python(exchange->fail, static_cast<Object *>(number), static_cast<Object *>(words)));
    return false;
  }

  // Says "op: name is what".
  bool refuse(const char *name, const char *what, pydet_status status = PYDET_INVALID_VALUE) {
    python().PyErr_Clear();
    char sentence[240];
    snprintf(sentence, sizeof sentence, "%s: %s is %s", op_, name, what);
    return fail(status, sentence);
  }

  // Scalars. One that is not given leaves *value as it is.
  bool integer_of(const char *name, Object *object, int64_t *value) {
    if (!given(object)) return true;
    *value = python().PyLong_AsLongLong(object);
    return *value != -1 || !python().PyErr_Occurred() || refuse(name, "no 64-bit integer");
  }
  // An element type by its index.
  bool type_of(const char *name, Object *object, int64_t *type) {
    if (!integer_of(name, object, type)) return false;
    if (!given(object) || (*type >= 0 && *type < kTypeCount)) return true;
    char what[80];
    snprintf(what, sizeof what, "%lld, want the index of an element type, 0 to %d", static_cast<long long>(*type),
             kTypeCount - 1);
    return refuse(name, what, PYDET_INVALID_DTYPE);
  }
  bool flag_of(const char *name, Object *object, int32_t *value) {
    if (!object) return true;
    Owned asked(object == exchange->yes || object == exchange->no ? nullptr : ask(exchange->flag, object, name));
    if (asked) object = asked;
    *value = object == exchange->yes;
    return *value || object == exchange->no;
  }
  bool double_of(const char *name, Object *object, double *value) {
    if (!object) return true;
    *value = python().PyFloat_AsDouble(object);
    return *value != -1 || !python().PyErr_Occurred() || refuse(name, "no number");
  }
  bool float_of(const char *name, Object *object, float *value) {
    double number = 0;
    if (!object) return true;
    if (!double_of(name, object, &number)) return false;
    *value = f32_from_f64(number);
    return true;
  }
  bool text_of(const char *name, Object *object, const char **value) {
    if (!given(object)) return true;
    intptr_t length = 0;
    *value = python().PyUnicode_AsUTF8AndSize(object, &length);
    if (!*value) return refuse(name, "no text");
    return intptr_t(strlen(*value)) == length || refuse(name, "text with a NUL character in it");
  }

  // The number of a name in `names`, a dict; what it does not have is the `unknown` hook's to look up or refuse.
  bool number_of(const char *name, Object *names, Object *object, int32_t *value) {
    if (!object) return true;
    Object *known = python().PyDict_GetItemWithError(names, object);
    if (!known) python().PyErr_Clear();  // of what cannot be in any dict
    Owned found(known ? nullptr : ask(exchange->unknown, object, name));
    if (!known) known = found;
    if (known) *value = int32_t(python().PyLong_AsLongLong(known));
    return known;
  }

  const Library &library() const { return library_; }
  bool on_gpu() const { return on_gpu_; }
  bool can_allocate() const { return first_->reader != PYDET_EXCHANGE_HOOK || first_->id != 0; }

 private:
  Operand *at(int i) { return i < kOwnOperands ? &operands_[i] : &more_[i - kOwnOperands]; }

  Operand *add(Object *object) {
    Operand *operand = at(count_++);
    operand->object = object;
    operand->keep = nullptr;
    operand->present = operand->buffered = operand->made = false;
    return operand;
  }

  static Library loaded(int index) { return Library(__atomic_load_n(&exchange->libraries[index], __ATOMIC_ACQUIRE)); }

  // Calls a hook of (object, op, name).
  Object *ask(Object *hook, Object *object, const char *name) {
    Owned op(text(op_)), argument(text(name));
    return call_python(hook, object, static_cast<Object *>(op), static_cast<Object *>(argument));
  }

  const Framework *framework_of(const char *name, Object *object) {
    Owned type(python().PyObject_Type(object));
    if (type == last_type_) return last_framework_;
    if (Object *known = python().PyDict_GetItemWithError(exchange->frameworks, type)) {
      last_type_ = type;  // one that lives for ever
      return last_framework_ = static_cast<const Framework *>(python().PyLong_AsVoidPtr(known));
    }
    python().PyErr_Clear();  // of a type that cannot be in any dict
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
    if (framework->reader == PYDET_EXCHANGE_ARRAY && fill_by_buffer(operand))
      return !written || !operand->buffer.readonly || refuse(name, "read-only");
    Owned op(text(op_)), argument(text(name)), write(integer(written));
    operand->keep = call_python(exchange->borrow, operand->object, static_cast<Object *>(op),
                                static_cast<Object *>(argument), static_cast<Object *>(write));
    if (!operand->keep) return false;
    void *address = python().PyLong_AsVoidPtr(python().PyTuple_GetItem(operand->keep, 0));
    operand->tensor = *static_cast<const pydet_tensor *>(address);
    return true;
  }

  bool fill_by_api(const char *name, Operand *operand, const Framework *framework) {
    if (static_cast<const ExchangeApi *>(framework->api)->tensor_from_object(operand->object, &operand->tensor) != 0) {
      python().PyErr_Clear();
      Owned(ask(exchange->unreadable, operand->object, name));
      return false;
    }
    own_extents(operand);
    return !framework->torch || operand->made || means_its_memory(name, operand->object);
  }

  // What a torch tensor is beyond its memory: one that wants a gradient, the negative of its memory, a dual number of
  // forward-mode AD. The exchange API hands out all of them without a word, and nothing about the memory tells.
  bool means_its_memory(const char *name, Object *object) {
    const bool tracks = records_ != 0;  // else, as is known by now, it does not matter what asks for a gradient
    Owned tracked(tracks ? python().PyObject_GetAttr(object, exchange->requires_grad) : nullptr);
    Owned negated(tracked || !tracks ? call_python(exchange->is_neg, object) : nullptr);
    if (!negated) return false;
    const bool plain = negated == exchange->no && !tangents_about();
    if (plain && (!tracks || tracked == exchange->no || (tracked == exchange->yes && !records()))) return true;
    Owned checked(ask(exchange->check, object, name));
    return checked;
  }

  // Whether PyTorch records gradients now, without which it does not matter what asks for one.
  bool records() {
    if (records_ < 0) {
      Owned enabled(call_python(exchange->records));
      records_ = enabled != exchange->no;
      python().PyErr_Clear();
    }
    return records_;
  }

  bool tangents_about() {
    if (tangents_ < 0) {
      Owned level(python().PyObject_GetAttr(exchange->forward_ad, exchange->current_level));
      tangents_ = !level || python().PyLong_AsLongLong(level) != -1;
      python().PyErr_Clear();
    }
    return tangents_;
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

  static constexpr int kOwnOperands = 14;
  const char *op_;
  Operand operands_[kOwnOperands];
  Operand *const more_;
  int count_ = 0;
  const Framework *first_ = nullptr;  // of the first operand
  Object *last_type_ = nullptr;       // of the last operand whose type lives for ever, and its framework
  const Framework *last_framework_ = nullptr;
  int32_t id_ = 0;  // of the first operand that is no bare carrier, and which that was
  Object *known_ = nullptr;
  const char *known_name_ = nullptr;
  Library library_ = Library(nullptr);
  int32_t library_number_ = -1;
  int tangents_ = -1;  // whether a tensor may have one now; -1: not asked yet
  int records_ = -1;   // likewise
  void *stream_ = nullptr;
  bool on_gpu_ = false;
};

}  // namespace pydet
