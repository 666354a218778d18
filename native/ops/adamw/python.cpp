// A step of AdamW.
#include "entry/python/methods.h"

#include <cstdlib>

#include "ops/adamw/check.h"

namespace pydet {
namespace {

struct AdamWArguments {
  PYDET_ARGUMENTS(params, grads, exp_avgs, exp_avg_sqs,  // positional: tuples of tensors
                  masters,                               // None, or a tuple of tensors and None
                  lr, beta1, beta2, eps, weight_decay, beta1_power, beta2_power, kernel, stream);
};

constexpr int kLists = kAdamWLists;
constexpr int kMost = PYDET_ADAMW_TENSORS;

// Operands of all lists: too many for the stack of a thread that is not the first.
class Room {
 public:
  explicit Room(intptr_t operands) : operands_(static_cast<Operand *>(malloc(size_t(operands) * sizeof(Operand)))) {}
  ~Room() { free(operands_); }
  Room(const Room &) = delete;
  Room &operator=(const Room &) = delete;
  Operand *operands() const { return operands_; }

 private:
  Operand *operands_;
};

// -> None
Object *call_adamw(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall reading("adamw");
  AdamWArguments given;
  if (!reading.arguments(names_of<AdamWArguments>, 4, args, count, keywords, &given)) return nullptr;
  Object *const lists[kLists] = {given.params, given.grads, given.exp_avgs, given.exp_avg_sqs, given.masters};
  const int present = pydet::given(given.masters) ? kLists : kLists - 1;
  intptr_t length = 0;
  char sentence[120];
  for (int list = 0; list < present; ++list) {
    const intptr_t own = python().PyTuple_Size(lists[list]);
    if (list == 0) length = own;
    snprintf(sentence, sizeof sentence, "a sequence of %lld, want 1 to %d tensors", static_cast<long long>(own), kMost);
    if (own < 1 || own > kMost) return reading.refuse(kListNames[list].name, sentence), nullptr;
    snprintf(sentence, sizeof sentence, "a sequence of %lld, want %lld as params is", static_cast<long long>(own),
             static_cast<long long>(length));
    if (own != length) return reading.refuse(kListNames[list].name, sentence), nullptr;
  }
  const Room room(length * present);
  if (!room.operands())
    return reading.fail(PYDET_DEVICE_ERROR, "adamw: no memory for the tensors' descriptors"), nullptr;
  PythonCall call("adamw", room.operands());
  const pydet_tensor *tensors[kLists][kMost] = {};
  for (int list = 0; list < present; ++list) {  // tensors of a list are mostly of one Python type
    for (int i = 0; i < length; ++i) {
      const char *name = kElementNames.text[list][i];
      Object *object = python().PyTuple_GetItem(lists[list], i);
      Operand *operand =
          list == kLists - 1 ? call.read_optional(name, object, true) : call.read(name, object, list != 1);
      if (!operand) return nullptr;
      tensors[list][i] = tensor_of(operand);
    }
  }
  int64_t work = 0;
  for (int i = 0; i < length && work < kGilWork; ++i) {
    const int64_t size = elements(tensors[0][i][0]);
    work += size > kGilWork ? kGilWork : size > 0 ? size : 0;
  }
  pydet_adamw_step step = {};
  pydet_adamw_options options = {};
  step.struct_size = sizeof step, options.struct_size = sizeof options;
  if (!call.double_of("lr", given.lr, &step.lr) || !call.double_of("beta1", given.beta1, &step.beta1)) return nullptr;
  if (!call.double_of("beta2", given.beta2, &step.beta2) || !call.double_of("eps", given.eps, &step.eps))
    return nullptr;
  if (!call.double_of("weight_decay", given.weight_decay, &step.weight_decay)) return nullptr;
  if (!call.double_of("beta1_power", given.beta1_power, &step.beta1_power)) return nullptr;
  if (!call.double_of("beta2_power", given.beta2_power, &step.beta2_power)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  const bool done = call.run(work, [&](void *stream) {
    return call.library().call<pydet_adamw>(
        stream, static_cast<const pydet_tensor *const *>(tensors[0]),
        static_cast<const pydet_tensor *const *>(tensors[1]), static_cast<const pydet_tensor *const *>(tensors[2]),
        static_cast<const pydet_tensor *const *>(tensors[3]),
        present == kLists ? static_cast<const pydet_tensor *const *>(tensors[4]) : nullptr, int32_t(length),
        static_cast<const pydet_adamw_step *>(&step), static_cast<const pydet_adamw_options *>(&options));
  });
  if (!done) return nullptr;
  python().Py_IncRef(exchange->none);
  return exchange->none;
}

constexpr pydet_exchange_method kMethods[] = {
    method<AdamWArguments>("adamw", call_adamw),
};

}  // namespace

Items<pydet_exchange_method> Operation<AdamW>::python() { return kMethods; }

}  // namespace pydet
