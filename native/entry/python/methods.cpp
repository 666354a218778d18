// The Python entry (python.h): reads Python objects as descriptors, makes the results in the caller's framework,
// calls the operation, and hands the results back. Every check of shapes, types and devices stays the operation's own.
//
// Called with the GIL held, as any Python method; it is released around work that is large or goes to a GPU.
#include "entry/python/methods.h"

#include "core/backend.h"
#include "core/error.h"
#include "core/joined.h"

namespace pydet {
namespace {

template <class... Problems> const pydet_exchange_method *methods_of(Operations<Problems...>) {
  return joined<pydet_exchange_method>({Operation<Problems>::python()...});
}

template <auto... functions> const pydet_exchange_function *addresses(FunctionList<functions...>) {
  static const pydet_exchange_function all[] = {reinterpret_cast<pydet_exchange_function>(functions)...};
  return all;
}

// FNV-1a of the operations' names and of how many functions each has, in the list's order.
template <auto... functions> constexpr uint32_t size_of_list(FunctionList<functions...>) {
  return sizeof...(functions);
}
template <class... Problems> constexpr uint32_t number_of(Operations<Problems...>) {
  uint32_t number = 2166136261u;
  const auto add = [&](uint32_t word) { number = (number ^ word) * 16777619u; };
  const auto add_operation = [&](const char *name, uint32_t functions) {
    for (; *name; ++name) add(uint8_t(*name));
    add(functions);
  };
  (add_operation(Operation<Problems>::name, size_of_list(typename Operation<Problems>::Functions{})), ...);
  return number;
}

}  // namespace

Items<pydet_exchange_method> AnyOperation::python() { return {}; }

}  // namespace pydet

const pydet_exchange_method *pydet_exchange_methods(const pydet_exchange *exchange) {
  using namespace pydet;
  static int64_t owner = -1;  // the interpreter that may use the hooks
  if (exchange->struct_size != sizeof(pydet_exchange)) {
    fail(PYDET_UNSUPPORTED, "this library was built for another release of the Python package; build both anew");
    return nullptr;
  }
  int64_t none = -1;
  if (!__atomic_compare_exchange_n(&owner, &none, exchange->interpreter, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) &&
      none != exchange->interpreter) {
    fail(PYDET_UNSUPPORTED, "pydet is in use by another interpreter of this process; import it in one of them only");
    return nullptr;
  }
  static const pydet_exchange_method *const methods = methods_of(AllOperations{});
  pydet::exchange = exchange;
  return methods;
}

const pydet_exchange_function *pydet_exchange_functions(uint32_t *operations) {
  using namespace pydet;
  constexpr uint32_t number = number_of(AllOperations{});
  *operations = number;
  return addresses(all_functions(AllOperations{}));
}

void pydet_exchange_forget_devices(void) {
  if (const pydet::Backend *gpu = pydet::gpu_backend()) gpu->forget();
}

const char *pydet_exchange_type(int32_t index, pydet_dtype *dtype) {
  if (index < 0 || index >= pydet::kTypeCount) return nullptr;
  *dtype = pydet::dtype_of(index);
  return pydet::kTypes[index].name;
}

int32_t pydet_exchange_last_library(void) { return pydet::last_library; }
