// Rows of a table by their numbers, and the table's gradient.

#include "core/launch.h"
#include "ops/embedding/check.h"

using namespace pydet;

pydet_status pydet_embedding(void *stream, const pydet_tensor *w_tensor, const pydet_tensor *ids_tensor,
                             const pydet_tensor *out_tensor, const pydet_embedding_options *given) {
  const char *op = "embedding";
  pydet_embedding_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View w, out;
  PYDET_TRY(read(op, "w", kNormRow, w_tensor, 1, &w));
  PYDET_TRY(read(op, "out", kNormRow, out_tensor, 1, &out));
  PYDET_TRY(unit_last_stride(out));
  PYDET_TRY(check_table(w, out));
  PYDET_TRY(same_type(w, out));
  WholeNumbers numbers = {};
  PYDET_TRY(whole_numbers(out, "ids", ids_tensor, out.shape, out.ndim - 1, true, &numbers));
  const View *inputs[] = {&w, &numbers.words}, *outputs[] = {&out};
  PYDET_TRY(outputs_apart(inputs, outputs));
  RowWalk walk;
  const View *walked[] = {&out};
  PYDET_TRY(walk_rows(walked, 1, &walk));
  const Columns ids = {numbers.words.data, numbers.wide};
  PYDET_TRY(check_ids(op, out.device, ids, walk.rows, w.rows()));
  if (walk.rows == 0) return nothing_to_write();
  const Embedding embedding = {out.device, stream,      walk.rows, walk.inner,
                               out.cols(), table_of(w), ids,       rows_of(out, walk, 0)};
  return launch(op, embedding, options.kernel);
}

pydet_status pydet_embedding_backward(void *stream, const pydet_tensor *dout_tensor, const pydet_tensor *ids_tensor,
                                      const pydet_tensor *dw_tensor, const pydet_embedding_backward_options *given) {
  const char *op = "embedding_backward";
  pydet_embedding_backward_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  PYDET_TRY(check_flag(op, "accumulate", options.accumulate));
  PYDET_TRY(check_flag(op, "has_padding", options.has_padding));
  View dout, dw;
  PYDET_TRY(read(op, "dout", kNormRow, dout_tensor, 1, &dout));
  PYDET_TRY(read(op, "dw", kNormRow, dw_tensor, 1, &dw));
  PYDET_TRY(unit_last_stride(dout));
  PYDET_TRY(check_table(dw, dout));
  if (dw.type != Type::f32 && (options.accumulate || dw.type != dout.type))
    return fail(PYDET_INVALID_DTYPE, "%s: dw is %s, want float32%s%s%s", op, type_name(dw.type),
                options.accumulate ? " under accumulate" : ", or ", options.accumulate ? "" : type_name(dout.type),
                options.accumulate ? "" : " as dout is");
  if (options.has_padding && (options.padding < 0 || options.padding >= dw.rows()))
    return fail(PYDET_INVALID_VALUE, "%s: the padding id is %" PRId64 ", want one of dw's %" PRId64 " rows, from 0", op,
                options.padding, dw.rows());
  WholeNumbers numbers = {};
  PYDET_TRY(whole_numbers(dout, "ids", ids_tensor, dout.shape, dout.ndim - 1, true, &numbers));
  const View *inputs[] = {&dout, &numbers.words}, *outputs[] = {&dw};
  PYDET_TRY(outputs_apart(inputs, outputs));
  RowWalk walk;
  const View *walked[] = {&dout};
  PYDET_TRY(walk_rows(walked, 1, &walk));
  PYDET_TRY(check_counts(op, walk.rows, dw.rows()));
  PYDET_TRY(check_workspace(op, options.workspace, options.workspace_size));
  const uint64_t needed = embedding_workspace(walk.rows, dw.rows());
  if (options.workspace_size < needed)
    return fail(PYDET_WORKSPACE_TOO_SMALL,
                "%s: workspace is %" PRIu64 " bytes, want %" PRIu64 " (pydet_embedding_backward_workspace)", op,
                options.workspace_size, needed);
  for (const View *view : {&dout, &numbers.words, &dw})
    PYDET_TRY(workspace_apart(*view, options.workspace, options.workspace_size));
  const Columns ids = {numbers.words.data, numbers.wide};
  PYDET_TRY(check_ids(op, dout.device, ids, walk.rows, dw.rows()));
  if (dw.empty() || (walk.rows == 0 && options.accumulate)) return nothing_to_write();
  const EmbeddingBackward embedding = {dout.device,
                                       stream,
                                       walk.rows,
                                       walk.inner,
                                       dout.cols(),
                                       rows_of(dout, walk, 0),
                                       ids,
                                       table_of(dw),
                                       options.accumulate != 0,
                                       options.has_padding ? options.padding : -1,
                                       options.workspace,
                                       options.workspace_size};
  return launch(op, embedding, options.kernel);
}

pydet_status pydet_embedding_backward_workspace(int64_t tokens, int64_t rows, uint64_t *bytes) {
  const char *op = "embedding_backward_workspace";
  if (!bytes) return fail(PYDET_NULL_POINTER, "%s: bytes is NULL", op);
  PYDET_TRY(check_counts(op, tokens, rows));
  *bytes = embedding_workspace(tokens, rows);
  return PYDET_OK;
}
