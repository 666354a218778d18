// Rows of a table by their numbers, and the table's gradient.
#include "entry/python/methods.h"

namespace pydet {
namespace {

struct EmbeddingArguments {
  PYDET_ARGUMENTS(w, ids,  // positional
                  out, kernel, stream);
};
struct EmbeddingBackwardArguments {
  PYDET_ARGUMENTS(dout, ids,          // positional
                  rows, padding_idx,  // numbers or None; rows: of dw, where it is not given
                  out, out_dtype,     // dw; a type index or None
                  accumulate, kernel, stream);
};

// -> out
Object *call_embedding(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("embedding");
  EmbeddingArguments given;
  if (!call.arguments(names_of<EmbeddingArguments>, 2, args, count, keywords, &given)) return nullptr;
  Operand *w = call.read("w", given.w);
  Operand *ids = w ? call.read("ids", given.ids) : nullptr;
  Operand *out = ids ? call.read_optional("out", given.out, true) : nullptr;
  if (!out) return nullptr;
  pydet_embedding_options options = {};
  options.struct_size = sizeof options;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  const pydet_tensor &table = w->tensor, &numbers = ids->tensor;
  if (!out->present) {
    if (table.ndim != 2) return call.refuse("w", "no matrix", PYDET_INVALID_SHAPE), nullptr;
    if (numbers.ndim >= kDims) return call.refuse("ids", "of too many dimensions", PYDET_INVALID_SHAPE), nullptr;
    int64_t shape[kDims];
    for (int i = 0; i < numbers.ndim; ++i) shape[i] = numbers.shape[i];
    shape[numbers.ndim] = table.shape[1];
    if (sound(table, 2) && !(out = call.make(numbers.ndim + 1, shape, type_index(table.dtype)))) return nullptr;
  }
  const bool done = call.run(out->present ? elements(out->tensor) : 0, [&](void *stream) {
    return call.library().call<pydet_embedding>(stream, tensor_of(w), tensor_of(ids), tensor_of(out), &options);
  });
  return done ? call.result(out) : nullptr;
}

// -> dw
Object *call_embedding_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  const char *op = "embedding_backward";
  PythonCall call(op);
  EmbeddingBackwardArguments given;
  if (!call.arguments(names_of<EmbeddingBackwardArguments>, 2, args, count, keywords, &given)) return nullptr;
  Operand *dout = call.read("dout", given.dout);
  Operand *ids = dout ? call.read("ids", given.ids) : nullptr;
  Operand *dw = ids ? call.read_optional("out", given.out, true) : nullptr;
  if (!dw) return nullptr;
  pydet_embedding_backward_options options = {};
  options.struct_size = sizeof options;
  int64_t rows = -1, type = -1;
  if (!call.integer_of("rows", given.rows, &rows) || !call.type_of("out_dtype", given.out_dtype, &type)) return nullptr;
  options.has_padding = given.padding_idx && given.padding_idx != exchange->none;
  if (!call.integer_of("padding_idx", given.padding_idx, &options.padding)) return nullptr;
  if (!call.flag_of("accumulate", given.accumulate, &options.accumulate)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  if (!type_agrees(call, "out", *dw, type)) return nullptr;
  const pydet_tensor &like = dout->tensor;
  const bool says_rows = given.rows && given.rows != exchange->none;
  if (says_rows && dw->present && sound(dw->tensor, 2) && rows != dw->tensor.shape[0])
    return call.refuse("rows", "not that of out, whose first extent it is", PYDET_INVALID_SHAPE), nullptr;
  if (!dw->present) {
    if (!starts_from_zero(call, op, options.accumulate)) return nullptr;
    if (!says_rows) return call.refuse("rows", "not given, want those of the table, or out"), nullptr;
    if (rows < 0 || rows != int32_t(rows))
      return call.refuse("rows", "no number from 0 to 2147483647", PYDET_INVALID_SHAPE), nullptr;
    if (sound(like, 1)) {
      const int64_t shape[] = {rows, like.shape[like.ndim - 1]};
      if (!(dw = call.make(2, shape, type < 0 ? type_index(like.dtype) : int(type)))) return nullptr;
    }
  }
  if (dw->present && sound(dw->tensor, 2) && sound(like, 1) && like.shape[like.ndim - 1] > 0) {
    uint64_t bytes = 0;
    const int64_t tokens = elements(like) / like.shape[like.ndim - 1];
    if (call.library().call<pydet_embedding_backward_workspace>(tokens, dw->tensor.shape[0], &bytes) != PYDET_OK)
      bytes = 0;
    if (!call.make_workspace(bytes, &options.workspace, &options.workspace_size)) return nullptr;
  }
  const bool done = call.run(elements(like), [&](void *stream) {
    return call.library().call<pydet_embedding_backward>(stream, tensor_of(dout), tensor_of(ids), tensor_of(dw),
                                                         &options);
  });
  return done ? call.result(dw) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<EmbeddingArguments>("embedding", call_embedding),
    method<EmbeddingBackwardArguments>("embedding_backward", call_embedding_backward),
};

}  // namespace

Items<pydet_exchange_method> Operation<Embedding>::python() { return kMethods; }

}  // namespace pydet
