// Softmax, its logarithm, one column of that, and their gradients.

#include "core/launch.h"
#include "ops/softmax/check.h"

using namespace pydet;

pydet_status pydet_softmax(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *y_tensor,
                           const pydet_softmax_options *given) {
  const char *op = "softmax";
  pydet_softmax_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  PYDET_TRY(check_flag(op, "log", options.log));
  View x, y;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "y", kNormRow, y_tensor, 1, &y));
  Softmax softmax = {};
  PYDET_TRY(softmax_of(stream, x, y, &softmax));
  softmax.kind = options.log ? SoftmaxKind::log_softmax : SoftmaxKind::softmax;
  return softmax.rows ? launch(op, softmax, options.kernel) : nothing_to_write();
}

pydet_status pydet_softmax_backward(void *stream, const pydet_tensor *dy_tensor, const pydet_tensor *y_tensor,
                                    const pydet_tensor *dx_tensor, const pydet_softmax_options *given) {
  const char *op = "softmax_backward";
  pydet_softmax_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  PYDET_TRY(check_flag(op, "log", options.log));
  View dy, y, dx;
  PYDET_TRY(read(op, "y", kNormRow, y_tensor, 1, &y));
  PYDET_TRY(read(op, "dy", kNormRow, dy_tensor, 1, &dy));
  PYDET_TRY(read(op, "dx", kNormRow, dx_tensor, 1, &dx));
  PYDET_TRY(unit_last_stride(y));
  const View *like[] = {&dy, &dx};
  PYDET_TRY(check_norm(y, like, 2, View{}, View{}));
  PYDET_TRY(no_self_overlap(dx));
  PYDET_TRY(disjoint(dx, dy));
  PYDET_TRY(disjoint(dx, y));
  RowWalk walk;
  const View *walked[] = {&y, &dy, &dx};
  PYDET_TRY(walk_rows(walked, 3, &walk));
  if (walk.rows == 0) return nothing_to_write();
  return launch(op,
                SoftmaxBackward{y.device, stream, walk.rows, walk.inner, y.cols(), options.log != 0,
                                rows_of(dy, walk, 1), rows_of(y, walk, 0), rows_of(dx, walk, 2)},
                options.kernel);
}

pydet_status pydet_log_prob(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *index_tensor,
                            const pydet_tensor *log_prob_tensor, const pydet_log_prob_options *given) {
  const char *op = "log_prob";
  pydet_log_prob_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View x, log_prob;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "log_prob", kNormVector, log_prob_tensor, 0, &log_prob));
  Softmax softmax = {};
  PYDET_TRY(columns_of(x, index_tensor, log_prob, log_prob, &softmax.index));
  PYDET_TRY(softmax_of(stream, x, View{}, &softmax));
  PYDET_TRY(disjoint(log_prob, x));
  softmax.kind = SoftmaxKind::log_prob;
  softmax.log_prob = vector_of(log_prob);
  return softmax.rows ? launch(op, softmax, options.kernel) : nothing_to_write();
}

pydet_status pydet_log_prob_backward(void *stream, const pydet_tensor *dlog_prob_tensor, const pydet_tensor *x_tensor,
                                     const pydet_tensor *index_tensor, const pydet_tensor *dx_tensor,
                                     const pydet_log_prob_options *given) {
  const char *op = "log_prob_backward";
  pydet_log_prob_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View x, dlog_prob, dx;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "dlog_prob", kNormVector, dlog_prob_tensor, 0, &dlog_prob));
  PYDET_TRY(read(op, "dx", kNormRow, dx_tensor, 1, &dx));
  Softmax softmax = {};
  PYDET_TRY(columns_of(x, index_tensor, dlog_prob, dx, &softmax.index));
  PYDET_TRY(softmax_of(stream, x, dx, &softmax));
  PYDET_TRY(disjoint(dx, dlog_prob));
  softmax.kind = SoftmaxKind::log_prob_backward;
  softmax.dlog_prob = vector_of(dlog_prob);
  return softmax.rows ? launch(op, softmax, options.kernel) : nothing_to_write();
}
