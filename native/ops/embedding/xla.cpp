// What XLA asks of rows of a table, and of the table's gradient.

#include "core/operations.h"
#include "entry/xla_rows.h"

namespace pydet {
namespace {

pydet_tensor as_table(Call &call, const char *name, const pydet_xla_buffer &buffer, Shape *shape) {
  if (buffer.rank != 2) {
    call.fail("%s is %s, want a matrix", name, ShapeWords(buffer.dims, buffer.rank).text);
    return {};
  }
  *shape = {{buffer.dims[0], buffer.dims[1]}, {buffer.dims[1], 1}};
  return call.tensor(buffer, shape, 2);
}

// Operands: w, ids (int32 or int64); their rows.
void embedding(Call &call) {
  pydet_embedding_options options = {};
  options.struct_size = sizeof options;
  options.kernel = call.kernel();
  const pydet_xla_buffer &table = call.argument(0), &numbers = call.argument(1), &rows = call.result(0);
  Shape s[3];
  const pydet_tensor w = as_table(call, "w", table, &s[0]), ids = as_values(call, "ids", numbers, rows, &s[1]),
                     out = as_rows(call, rows, &s[2]);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_embedding(stream, &w, &ids, &out, &options));
}

// Operands: dout, ids, a dw to continue from if accumulate; dw, and a workspace of bytes. padding: an id, or -1.
void embedding_backward(Call &call) {
  pydet_embedding_backward_options options = {};
  options.struct_size = sizeof options;
  options.accumulate = call.flag("accumulate");
  options.padding = call.integer("padding");
  options.has_padding = options.padding != -1;
  options.kernel = call.kernel();
  const pydet_xla_buffer &rows = call.argument(0), &numbers = call.argument(1), &table = call.result(0);
  if (options.accumulate) continue_from(call, call.argument(2), table);
  give_workspace(call, call.result(1), &options);
  Shape s[3];
  const pydet_tensor dout = as_rows(call, rows, &s[0]), ids = as_values(call, "ids", numbers, rows, &s[1]),
                     dw = as_table(call, "dw", table, &s[2]);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_embedding_backward(stream, &dout, &ids, &dw, &options));
}

constexpr char kEmbedding[] = "embedding";
constexpr char kEmbeddingBackward[] = "embedding_backward";
constexpr pydet_xla_handler kHandlers[] = {
    handler<kEmbedding, embedding>(),
    handler<kEmbeddingBackward, embedding_backward>(),
};

}  // namespace

Items<pydet_xla_handler> Operation<Embedding>::xla() { return kHandlers; }

}  // namespace pydet
