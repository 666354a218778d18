// What the Python methods of scaled products share.
#pragma once

#include "entry/python/methods.h"

namespace pydet {

// A scaled product: its operands in the order of its arguments, its options, and the library for them.
template <class Options, bool grouped = false> struct ScaledCall {
  Operand *a = nullptr, *b = nullptr, *group_end = nullptr, *group_start = nullptr;  // the last two where it has groups
  Operand *a_scale = nullptr, *b_scale = nullptr, *bias = nullptr, *out = nullptr;
  Options options = {};
  int64_t type = -1;

  template <class Arguments> bool read(PythonCall &call, const Arguments &given) {
    if (!(a = call.read("a", given.a)) || !(b = call.read("b", given.b))) return false;
    if constexpr (grouped)
      if (!(group_end = call.read("group_end", given.group_end)) ||
          !(group_start = call.read_optional("group_start", given.group_start)))
        return false;
    if (!(a_scale = call.read_optional("a_scale", given.a_scale)) ||
        !(b_scale = call.read_optional("b_scale", given.b_scale)) || !(bias = call.read_optional("bias", given.bias)) ||
        !(out = call.read_optional("out", given.out, true)))
      return false;
    options.struct_size = sizeof options;
    options.k_chunk = kScaleGroup;
    return read_sum_options(call, given, &options, &type) && call.text_of("kernel", given.kernel, &options.kernel) &&
           call.choose_library(given.stream) && type_agrees(call, "out", *out, type);
  }
  // Makes out of the given shape, if it is not there; `sound`: the operands have a shape by which that is known.
  bool make_out(PythonCall &call, const char *op, bool sound, int ndim, const int64_t *shape) {
    if (out->present) return true;
    if (!starts_from_zero(call, op, options.accumulate)) return false;
    return !sound || (out = call.make(ndim, shape, type < 0 ? int(Type::bf16) : int(type)));
  }
};

}  // namespace pydet
