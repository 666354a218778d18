// Softmax, its logarithm, one column of that, and their gradients.
#include "entry/python/methods.h"
#include "entry/python/results.h"

namespace pydet {
namespace {

// The arguments of the methods below: operands, then these three.
template <int count> struct RowArguments {
  Object *operands[count], *out, *kernel, *stream;
};
static_assert(sizeof(RowArguments<1>) == sizeof(pydet_softmax_arguments) &&
                  sizeof(RowArguments<2>) == sizeof(pydet_softmax_backward_arguments) &&
                  sizeof(RowArguments<2>) == sizeof(pydet_log_prob_arguments) &&
                  sizeof(RowArguments<3>) == sizeof(pydet_log_prob_backward_arguments),
              "as python.h has them");

// What they have of their own: the operands' names, which of them the result is like, and whether that has one number a
// row of it, in fp32.
template <int count> struct RowWords {
  const char *op, *operands[count];
  int like;
  bool one_a_row;
};

// -> the result, which operation(library, stream, descriptors of the operands, of the result) has filled in
template <int count, class Options, class Operation>
Object *call_rows(const RowWords<count> &words, Object *const *names, Options *options, const Operation &operation,
                  Object *const *args, intptr_t given_count, Object *keywords) {
  PythonCall call(words.op);
  RowArguments<count> given;
  if (!call.arguments(names, count, args, given_count, keywords, &given)) return nullptr;
  Operand *operands[count];
  for (int i = 0; i < count; ++i)
    if (!(operands[i] = call.read(words.operands[i], given.operands[i]))) return nullptr;
  Operand *out = call.read_optional("out", given.out, true);
  options->struct_size = sizeof *options;
  if (!out || !call.text_of("kernel", given.kernel, &options->kernel) || !call.choose_library(given.stream))
    return nullptr;
  const pydet_tensor &like = operands[words.like]->tensor;
  const int ndim = words.one_a_row ? (like.ndim < 1 ? 0 : like.ndim - 1) : like.ndim;
  if (!make_like(call, like, ndim, words.one_a_row ? int(Type::f32) : type_index(like.dtype), &out)) return nullptr;
  const pydet_tensor *tensors[count];
  for (int i = 0; i < count; ++i) tensors[i] = tensor_of(operands[i]);
  const bool done = call.run(elements(like),
                             [&](void *stream) { return operation(call.library(), stream, tensors, tensor_of(out)); });
  return done ? call.result(out) : nullptr;
}

using Tensors = const pydet_tensor *const *;

}  // namespace

template <bool log> Object *call_softmax(Object *, Object *const *args, intptr_t count, Object *keywords) {
  pydet_softmax_options options = {};
  options.log = log;
  return call_rows<1>(
      {log ? "log_softmax" : "softmax", {"x"}, 0, false}, exchange->softmax_names, &options,
      [&](const Library &library, void *stream, Tensors in, const pydet_tensor *y) {
        return library.softmax(stream, in[0], y, &options);
      },
      args, count, keywords);
}

template <bool log> Object *call_softmax_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  pydet_softmax_options options = {};
  options.log = log;
  return call_rows<2>(
      {log ? "log_softmax_backward" : "softmax_backward", {"dy", "y"}, 1, false}, exchange->softmax_backward_names,
      &options,
      [&](const Library &library, void *stream, Tensors in, const pydet_tensor *dx) {
        return library.softmax_backward(stream, in[0], in[1], dx, &options);
      },
      args, count, keywords);
}

template Object *call_softmax<false>(Object *, Object *const *, intptr_t, Object *);
template Object *call_softmax<true>(Object *, Object *const *, intptr_t, Object *);
template Object *call_softmax_backward<false>(Object *, Object *const *, intptr_t, Object *);
template Object *call_softmax_backward<true>(Object *, Object *const *, intptr_t, Object *);

Object *call_log_prob(Object *, Object *const *args, intptr_t count, Object *keywords) {
  pydet_log_prob_options options = {};
  return call_rows<2>(
      {"log_prob", {"x", "index"}, 0, true}, exchange->log_prob_names, &options,
      [&](const Library &library, void *stream, Tensors in, const pydet_tensor *log_prob) {
        return library.log_prob(stream, in[0], in[1], log_prob, &options);
      },
      args, count, keywords);
}

Object *call_log_prob_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  pydet_log_prob_options options = {};
  return call_rows<3>(
      {"log_prob_backward", {"dlog_prob", "x", "index"}, 1, false}, exchange->log_prob_backward_names, &options,
      [&](const Library &library, void *stream, Tensors in, const pydet_tensor *dx) {
        return library.log_prob_backward(stream, in[0], in[1], in[2], dx, &options);
      },
      args, count, keywords);
}

}  // namespace pydet
