// Activations, alone or as the gate of another factor, and their gradients.

#include "core/launch.h"
#include "ops/activation/check.h"

using namespace pydet;

pydet_status pydet_activation(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *up_tensor,
                              const pydet_tensor *y_tensor, const pydet_activation_options *given) {
  const char *op = "activation";
  pydet_activation_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  PYDET_TRY(check_kind(op, options.kind));
  View x, up, y;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read_optional(op, "up", kNormRow, up_tensor, 1, &up));
  PYDET_TRY(read(op, "y", kNormRow, y_tensor, 1, &y));
  int64_t n = 0;
  RowWalk walk;
  PYDET_TRY(walk_elements({&x, &up, &y}, &n, &walk));
  PYDET_TRY(no_self_overlap(y));
  for (const View *in : {&x, &up}) PYDET_TRY(same_or_apart(y, *in));
  if (walk.rows == 0) return nothing_to_write();
  return launch(op,
                Activation{x.device, stream, walk.rows, walk.inner, n, ActivationKind(options.kind),
                           rows_of(x, walk, 0), rows_of(up, walk, 1), rows_of(y, walk, 2)},
                options.kernel);
}

pydet_status pydet_activation_backward(void *stream, const pydet_tensor *dy_tensor, const pydet_tensor *x_tensor,
                                       const pydet_tensor *up_tensor, const pydet_tensor *dx_tensor,
                                       const pydet_tensor *dup_tensor, const pydet_activation_options *given) {
  const char *op = "activation_backward";
  pydet_activation_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  PYDET_TRY(check_kind(op, options.kind));
  View dy, x, up, dx, dup;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "dy", kNormRow, dy_tensor, 1, &dy));
  PYDET_TRY(read_optional(op, "up", kNormRow, up_tensor, 1, &up));
  PYDET_TRY(read_optional(op, "dx", kNormRow, dx_tensor, 1, &dx));
  PYDET_TRY(read_optional(op, "dup", kNormRow, dup_tensor, 1, &dup));
  if (!dx.present() && !dup.present())
    return fail(PYDET_NULL_POINTER, "%s: dx and dup are NULL, want one of them or both", op);
  if (dup.present() && !up.present())
    return fail(PYDET_NULL_POINTER, "%s: dup is given without up, want both or neither", op);
  int64_t n = 0;
  RowWalk walk;
  PYDET_TRY(walk_elements({&x, &dy, &up, &dx, &dup}, &n, &walk));
  for (const View *out : {&dx, &dup}) {
    PYDET_TRY(no_self_overlap(*out));
    for (const View *in : {&dy, &x, &up}) PYDET_TRY(same_or_apart(*out, *in));
  }
  PYDET_TRY(disjoint(dx, dup));
  if (walk.rows == 0) return nothing_to_write();
  return launch(
      op,
      ActivationBackward{x.device, stream, walk.rows, walk.inner, n, ActivationKind(options.kind), rows_of(dy, walk, 1),
                         rows_of(x, walk, 0), rows_of(up, walk, 2), rows_of(dx, walk, 3), rows_of(dup, walk, 4)},
      options.kernel);
}
