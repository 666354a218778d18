// Softmax, its logarithm, one column of that, and their gradients.
#include "entry/python/methods.h"

namespace pydet {
namespace {

// Of each method: operands, which are positional, then these three.
struct SoftmaxArguments {
  PYDET_ARGUMENTS(x, out, kernel, stream);
};
struct SoftmaxBackwardArguments {
  PYDET_ARGUMENTS(dy, y, out, kernel, stream);
};
struct LogProbArguments {
  PYDET_ARGUMENTS(x, index, out, kernel, stream);
};
struct LogProbBackwardArguments {
  PYDET_ARGUMENTS(dlog_prob, x, index, out, kernel, stream);
};
template <int count> struct RowArguments {
  Object *operands[count], *out, *kernel, *stream;
};
template <class Arguments> constexpr int kOperands = int(sizeof(Arguments) / sizeof(Argument)) - 3;

// What they have of their own: the operands' names, which of them the result is like, and whether that has one number a
// row of it, in fp32.
template <int count> struct RowWords {
  const char *op, *operands[count];
  int like;
  bool one_a_row;
};

// -> the result, which operation(library, stream, descriptors of the operands, of the result) has filled in
template <class Arguments, int count = kOperands<Arguments>, class Options, class Operation>
Object *call_rows(const RowWords<count> &words, Options *options, const Operation &operation, Object *const *args,
                  intptr_t given_count, Object *keywords) {
  PythonCall call(words.op);
  RowArguments<count> given;
  if (!call.arguments(names_of<Arguments>, count, args, given_count, keywords, &given)) return nullptr;
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

template <bool log> Object *call_softmax(Object *, Object *const *args, intptr_t count, Object *keywords) {
  pydet_softmax_options options = {};
  options.log = log;
  return call_rows<SoftmaxArguments>(
      {log ? "log_softmax" : "softmax", {"x"}, 0, false}, &options,
      [&](const Library &library, void *stream, Tensors in, const pydet_tensor *y) {
        return library.call<pydet_softmax>(stream, in[0], y, &options);
      },
      args, count, keywords);
}

template <bool log> Object *call_softmax_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  pydet_softmax_options options = {};
  options.log = log;
  return call_rows<SoftmaxBackwardArguments>(
      {log ? "log_softmax_backward" : "softmax_backward", {"dy", "y"}, 1, false}, &options,
      [&](const Library &library, void *stream, Tensors in, const pydet_tensor *dx) {
        return library.call<pydet_softmax_backward>(stream, in[0], in[1], dx, &options);
      },
      args, count, keywords);
}

Object *call_log_prob(Object *, Object *const *args, intptr_t count, Object *keywords) {
  pydet_log_prob_options options = {};
  return call_rows<LogProbArguments>(
      {"log_prob", {"x", "index"}, 0, true}, &options,
      [&](const Library &library, void *stream, Tensors in, const pydet_tensor *log_prob) {
        return library.call<pydet_log_prob>(stream, in[0], in[1], log_prob, &options);
      },
      args, count, keywords);
}

Object *call_log_prob_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  pydet_log_prob_options options = {};
  return call_rows<LogProbBackwardArguments>(
      {"log_prob_backward", {"dlog_prob", "x", "index"}, 1, false}, &options,
      [&](const Library &library, void *stream, Tensors in, const pydet_tensor *dx) {
        return library.call<pydet_log_prob_backward>(stream, in[0], in[1], in[2], dx, &options);
      },
      args, count, keywords);
}

constexpr pydet_exchange_method kMethods[] = {
    method<SoftmaxArguments>("softmax", call_softmax<false>),
    method<SoftmaxArguments>("log_softmax", call_softmax<true>),
    method<SoftmaxBackwardArguments>("softmax_backward", call_softmax_backward<false>),
    method<SoftmaxBackwardArguments>("log_softmax_backward", call_softmax_backward<true>),
    method<LogProbArguments>("log_prob", call_log_prob),
    method<LogProbBackwardArguments>("log_prob_backward", call_log_prob_backward),
};

}  // namespace

Items<pydet_exchange_method> Operation<Softmax>::python() { return kMethods; }

}  // namespace pydet
