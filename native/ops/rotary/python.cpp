// Rotary embeddings: the table of their cosines and sines, and pairs of elements turned by it.
#include "entry/python/methods.h"

#include <utility>

namespace pydet {
namespace {

struct RotaryTableArguments {
  PYDET_ARGUMENTS(positions, frequencies,  // positional
                  scale, twice, cos, sin, out_dtype, kernel, stream);
};
struct RotaryArguments {
  PYDET_ARGUMENTS(q, k, cos, sin,  // positional; k may be None
                  whole, neighbours, out_neighbours, in_fp32, transposed, heads_first, out_dtype, q_out, k_out, kernel,
                  stream);
};

// -> (cos, sin)
Object *call_rotary_table(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("rotary_table");
  RotaryTableArguments given;
  if (!call.arguments(names_of<RotaryTableArguments>, 2, args, count, keywords, &given)) return nullptr;
  Operand *positions = call.read("positions", given.positions);
  Operand *frequencies = positions ? call.read("frequencies", given.frequencies) : nullptr;
  Operand *cos = frequencies ? call.read_optional("cos", given.cos, true) : nullptr;
  Operand *sin = cos ? call.read_optional("sin", given.sin, true) : nullptr;
  if (!sin) return nullptr;
  pydet_rotary_table_options options = {};
  options.struct_size = sizeof options;
  options.scale = 1;
  int32_t twice = 0;
  int64_t type = -1;
  if (!call.float_of("scale", given.scale, &options.scale) || !call.flag_of("twice", given.twice, &twice))
    return nullptr;
  if (!call.type_of("out_dtype", given.out_dtype, &type)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  if (!type_agrees(call, "cos", *cos, type) || !type_agrees(call, "sin", *sin, type)) return nullptr;
  const pydet_tensor &places = positions->tensor, &of_all = frequencies->tensor;
  if (!cos->present || !sin->present) {
    if (!sound(of_all, 1) || of_all.ndim != 1)
      return call.refuse("frequencies", "no vector of float32", PYDET_INVALID_SHAPE), nullptr;
    if (places.ndim >= kDims) return call.refuse("positions", "of too many dimensions", PYDET_INVALID_SHAPE), nullptr;
    int64_t shape[kDims];
    for (int i = 0; i < places.ndim; ++i) shape[i] = places.shape[i];
    shape[places.ndim] = of_all.shape[0] * (twice ? 2 : 1);
    for (Operand **made : {&cos, &sin})
      if (!(*made)->present && !(*made = call.make(places.ndim + 1, shape, type < 0 ? int(Type::f32) : int(type))))
        return nullptr;
  }
  const bool done = call.run(elements(cos->tensor), [&](void *stream) {
    return call.library().call<pydet_rotary_table>(stream, tensor_of(positions), tensor_of(frequencies), tensor_of(cos),
                                                   tensor_of(sin), &options);
  });
  Operand *results[] = {cos, sin};
  return done ? call.results(results, 2) : nullptr;
}

// Tensors whose heads lie before their tokens, [..., H, T, N], as [..., T, H, N].
void put_tokens_first(Operand *operand) {
  pydet_tensor &tensor = operand->tensor;
  if (!operand->present || tensor.ndim < 3 || tensor.ndim > kDims) return;
  own_extents(operand);
  if (!tensor.strides) {  // in C order
    int64_t dense = 1;
    for (int i = tensor.ndim - 1; i >= 0; --i) {
      operand->strides[i] = dense;
      if (tensor.shape[i] > 0 && __builtin_mul_overflow(dense, tensor.shape[i], &dense)) return;  // refused as it is
    }
    tensor.strides = operand->strides;
  }
  std::swap(operand->shape[tensor.ndim - 3], operand->shape[tensor.ndim - 2]);
  std::swap(operand->strides[tensor.ndim - 3], operand->strides[tensor.ndim - 2]);
}

// -> (q_out, k_out), None for a k that is None
Object *call_rotary(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("rotary");
  RotaryArguments given;
  if (!call.arguments(names_of<RotaryArguments>, 4, args, count, keywords, &given)) return nullptr;
  Operand *q = call.read("q", given.q);
  Operand *k = q ? call.read_optional("k", given.k) : nullptr;
  Operand *cos = k ? call.read("cos", given.cos) : nullptr;
  Operand *sin = cos ? call.read("sin", given.sin) : nullptr;
  Operand *q_out = sin ? call.read_optional("q_out", given.q_out, true) : nullptr;
  Operand *k_out = q_out ? call.read_optional("k_out", given.k_out, true) : nullptr;
  if (!k_out) return nullptr;
  pydet_rotary_options options = {};
  options.struct_size = sizeof options;
  int64_t type = -1;
  if (!call.flag_of("whole", given.whole, &options.whole)) return nullptr;
  if (!call.flag_of("neighbours", given.neighbours, &options.neighbours)) return nullptr;
  if (!call.flag_of("out_neighbours", given.out_neighbours, &options.out_neighbours)) return nullptr;
  if (!call.flag_of("in_fp32", given.in_fp32, &options.in_fp32)) return nullptr;
  if (!call.flag_of("transposed", given.transposed, &options.transposed)) return nullptr;
  int32_t heads_first = 0;
  if (!call.flag_of("heads_first", given.heads_first, &heads_first)) return nullptr;
  if (!call.type_of("out_dtype", given.out_dtype, &type)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  if (!type_agrees(call, "q_out", *q_out, type) || !type_agrees(call, "k_out", *k_out, type)) return nullptr;
  const auto make = [&](const Operand *x, Operand **y) {
    return !x->present ||
           make_like(call, x->tensor, x->tensor.ndim, type < 0 ? type_index(x->tensor.dtype) : int(type), y);
  };
  if (!make(q, &q_out) || !make(k, &k_out)) return nullptr;
  if (heads_first)
    for (Operand *operand : {q, k, q_out, k_out}) put_tokens_first(operand);
  const bool done = call.run(elements(q->tensor), [&](void *stream) {
    return call.library().call<pydet_rotary>(stream, tensor_of(q), tensor_of(k), tensor_of(cos), tensor_of(sin),
                                             tensor_of(q_out), tensor_of(k_out), &options);
  });
  Operand *results[] = {q_out, k_out};
  return done ? call.results(results, 2) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<RotaryTableArguments>("rotary_table", call_rotary_table),
    method<RotaryArguments>("rotary", call_rotary),
};

}  // namespace

Items<pydet_exchange_method> Operation<RotaryTable>::python() { return kMethods; }

}  // namespace pydet
