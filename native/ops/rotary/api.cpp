// Rotary embeddings: the table of their cosines and sines, and pairs of elements turned by it.

#include "core/launch.h"
#include "ops/rotary/check.h"

using namespace pydet;

pydet_status pydet_rotary_table(void *stream, const pydet_tensor *positions_tensor,
                                const pydet_tensor *frequencies_tensor, const pydet_tensor *cos_tensor,
                                const pydet_tensor *sin_tensor, const pydet_rotary_table_options *given) {
  const char *op = "rotary_table";
  pydet_rotary_table_options options = {};
  options.scale = 1;
  PYDET_TRY(read_options(op, given, &options));
  PYDET_TRY(check_scale(op, options.scale));
  View cos, sin, frequencies;
  PYDET_TRY(read(op, "cos", kNormRow, cos_tensor, 1, &cos));
  PYDET_TRY(read(op, "sin", kNormRow, sin_tensor, 1, &sin));
  PYDET_TRY(read(op, "frequencies", kNormVector, frequencies_tensor, 1, &frequencies));
  PYDET_TRY(unit_last_stride(cos));
  PYDET_TRY(same_device(cos, sin));
  PYDET_TRY(same_type(cos, sin));
  PYDET_TRY(want_shape(sin, cos.shape, cos.ndim));
  PYDET_TRY(unit_last_stride(sin));
  PYDET_TRY(same_device(cos, frequencies));
  PYDET_TRY(contiguous(frequencies));
  const int64_t n = frequencies.cols();
  if (frequencies.type != Type::f32)
    return fail(PYDET_INVALID_DTYPE, "%s: frequencies is %s, want float32", op, type_name(frequencies.type));
  if (frequencies.ndim != 1 || n < 1 || n > kMostFrequencies || (cos.cols() != n && cos.cols() != 2 * n))
    return fail(PYDET_INVALID_SHAPE, "%s: frequencies is %s, want 1 dimension, all or half of the %" PRId64 " of cos",
                op, shape_text(frequencies).text, cos.cols());
  Positions positions = {};
  PYDET_TRY(positions_of(cos, positions_tensor, &positions));
  const View *inputs[] = {&positions.view, &frequencies}, *outputs[] = {&cos, &sin};
  PYDET_TRY(outputs_apart(inputs, outputs));
  RowWalk walk;
  const View *walked[] = {&cos, &sin};
  PYDET_TRY(walk_rows(walked, 2, &walk));
  if (walk.rows == 0) return nothing_to_write();
  const RotaryTable table = {cos.device,
                             stream,
                             walk.rows,
                             walk.inner,
                             n,
                             positions.whole(),
                             positions.real(),
                             vector_of(frequencies),
                             options.scale,
                             cos.cols() != n,
                             rows_of(cos, walk, 0),
                             rows_of(sin, walk, 1)};
  return launch(op, table, options.kernel);
}

pydet_status pydet_rotary(void *stream, const pydet_tensor *q_tensor, const pydet_tensor *k_tensor,
                          const pydet_tensor *cos_tensor, const pydet_tensor *sin_tensor,
                          const pydet_tensor *q_out_tensor, const pydet_tensor *k_out_tensor,
                          const pydet_rotary_options *given) {
  const char *op = "rotary";
  pydet_rotary_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  PYDET_TRY(check_flag(op, "whole", options.whole));
  PYDET_TRY(check_flag(op, "neighbours", options.neighbours));
  PYDET_TRY(check_flag(op, "out_neighbours", options.out_neighbours));
  PYDET_TRY(check_flag(op, "in_fp32", options.in_fp32));
  PYDET_TRY(check_flag(op, "transposed", options.transposed));
  View q, k, cos, sin, q_out, k_out;
  PYDET_TRY(read(op, "q", kNormRow, q_tensor, 2, &q));
  PYDET_TRY(read_optional(op, "k", kNormRow, k_tensor, 2, &k));
  PYDET_TRY(read(op, "cos", kNormRow, cos_tensor, 1, &cos));
  PYDET_TRY(read(op, "sin", kNormRow, sin_tensor, 1, &sin));
  PYDET_TRY(read(op, "q_out", kNormRow, q_out_tensor, 2, &q_out));
  PYDET_TRY(read_optional(op, "k_out", kNormRow, k_out_tensor, 2, &k_out));
  if (k.present() != k_out.present())
    return fail(PYDET_NULL_POINTER, "%s: %s is given without %s, want both or neither", op, k.present() ? "k" : "k_out",
                k.present() ? "k_out" : "k");
  PYDET_TRY(unit_last_stride(q));
  PYDET_TRY(check_heads(q));
  PYDET_TRY(check_heads(k));
  PYDET_TRY(check_beside(q, k));
  PYDET_TRY(same_device(q, q_out));
  PYDET_TRY(want_shape(q_out, q.shape, q.ndim));
  PYDET_TRY(unit_last_stride(q_out));
  PYDET_TRY(check_beside(q_out, k_out));
  if (k.present()) PYDET_TRY(want_shape(k_out, k.shape, k.ndim));
  PYDET_TRY(same_device(q, cos));
  PYDET_TRY(same_device(q, sin));
  PYDET_TRY(same_type(cos, sin));
  PYDET_TRY(want_shape(sin, cos.shape, cos.ndim));
  PYDET_TRY(unit_last_stride(cos));
  PYDET_TRY(unit_last_stride(sin));
  const int64_t columns = cos.cols(), most = options.whole ? q.cols() : q.cols() / 2;
  if (columns < 1 || columns > most || (options.whole && columns % 2))
    return fail(PYDET_INVALID_SHAPE,
                "%s: cos is %s beside heads of %" PRId64 ", want a last dimension of %s up to %" PRId64, op,
                shape_text(cos).text, q.cols(), options.whole ? "2, 4, ..." : "1", most);
  View firsts[] = {first_heads(q), first_heads(k), first_heads(q_out), first_heads(k_out)};
  PYDET_TRY(spread_over(firsts[0], &cos));
  PYDET_TRY(spread_over(firsts[0], &sin));
  const View *inputs[] = {&q, &k, &cos, &sin}, *outputs[] = {&q_out, &k_out};
  PYDET_TRY(outputs_apart(inputs, outputs));
  if (firsts[0].empty()) return nothing_to_write();
  RowWalk walk;
  const View *walked[] = {&firsts[0], &firsts[1], &firsts[2], &firsts[3], &cos, &sin};
  PYDET_TRY(walk_rows(walked, 6, &walk));
  const Rotary rotary = {q.device,
                         stream,
                         walk.rows,
                         walk.inner,
                         q.cols(),
                         options.whole ? columns : 2 * columns,
                         heads_of(q, q_out, firsts[0], firsts[2], walk, 0, 2),
                         heads_of(k, k_out, firsts[1], firsts[3], walk, 1, 3),
                         rows_of(cos, walk, 4),
                         rows_of(sin, walk, 5),
                         options.whole != 0,
                         options.neighbours != 0,
                         options.out_neighbours != 0,
                         options.in_fp32 != 0,
                         options.transposed != 0};
  return launch(op, rotary, options.kernel);
}
