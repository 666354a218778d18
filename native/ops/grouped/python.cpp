// Grouped GEMM.
#include "entry/python/methods.h"

namespace pydet {
namespace {

struct GroupedGemmArguments {
  PYDET_ARGUMENTS(a, b, group_end,  // positional
                  group_start, bias, out,
                  out_dtype,  // a type index or None
                  accumulate, arithmetic,
                  k_chunk,  // or None
                  initial,
                  kernel,  // or None
                  stream);
};

Object *call_grouped_gemm(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("grouped_gemm");
  GroupedGemmArguments given;
  if (!call.arguments(names_of<GroupedGemmArguments>, 3, args, count, keywords, &given)) return nullptr;
  Operand *a = call.read("a", given.a);
  Operand *b = a ? call.read("b", given.b) : nullptr;
  Operand *end = b ? call.read("group_end", given.group_end) : nullptr;
  Operand *start = end ? call.read_optional("group_start", given.group_start) : nullptr;
  Operand *bias = start ? call.read_optional("bias", given.bias) : nullptr;
  Operand *initial = bias ? call.read_optional("initial", given.initial) : nullptr;
  Operand *out = initial ? call.read_optional("out", given.out, true) : nullptr;
  if (!out) return nullptr;
  pydet_grouped_gemm_options options = {};
  options.struct_size = sizeof options;
  int64_t type = -1;
  if (!read_sum_options(call, given, &options, &type)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel)) return nullptr;
  if (!call.choose_library(given.stream) || !type_agrees(call, "out", *out, type)) return nullptr;
  const pydet_tensor &x = a->tensor, &y = b->tensor;
  if (!out->present) {
    if (!starts_from_zero(call, "grouped_gemm", options.accumulate)) return nullptr;
    const bool rows = y.ndim == 3, depth = y.ndim == 2 && end->tensor.ndim == 1;
    if (x.ndim == 2 && (rows || depth) && sound(x, 2) && sound(y, 2)) {
      const int64_t groups = depth ? end->tensor.shape[0] : 0;
      int64_t shape[3] = {rows ? x.shape[0] : groups, rows ? y.shape[2] : x.shape[0], y.shape[y.ndim - 1]};
      if (groups < 0) return call.refuse("group_end", "of a negative extent", PYDET_INVALID_SHAPE), nullptr;
      if (!(out = call.make(rows ? 2 : 3, shape, type < 0 ? type_index(x.dtype) : int(type)))) return nullptr;
    }
  }
  if (!make_room_for_sums(call, *initial, *out, &options)) return nullptr;
  const int64_t most = sound(x, 2) && sound(y, 2) ? product_work(x, y.shape[y.ndim - 1]) : 0;  // of every token
  const bool done = call.run(most, [&](void *stream) {
    return call.library().call<pydet_grouped_gemm>(stream, tensor_of(a), tensor_of(b), tensor_of(bias),
                                                   tensor_of(start), tensor_of(end), tensor_of(out), &options);
  });
  return done ? call.result(out) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<GroupedGemmArguments>("grouped_gemm", call_grouped_gemm),
};

}  // namespace

Items<pydet_exchange_method> Operation<GroupedGemm>::python() { return kMethods; }

}  // namespace pydet
