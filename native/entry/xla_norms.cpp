// What XLA asks of the operations that work row by row.

#include "entry/xla_call.h"

namespace pydet {
namespace {

// Rows of N elements that come in groups, each with a weight of its own, or all with one. Where a weight is one of heads,
// N is that of all heads.
struct Groups {
  int64_t n, groups, rows;  // rows of a group
  int64_t heads;            // 0: weights are not of heads

  // The tensor of group g of a buffer of rows (or of one value a row): the whole of it where it has just one group.
  pydet_tensor rows_of(Call &call, const pydet_xla_buffer &buffer, int64_t g, bool values, Shape *shape) const {
    const int64_t each = values ? rows * (heads ? heads : 1) : rows * n;
    if (elements(buffer) != each && elements(buffer) != each * groups) {
      call.fail("an operand does not fit the others");
      return {};
    }
    *shape = {{rows, n}, {n, 1}};
    if (values) shape->strides[0] = 1;
    if (heads) {
      *shape = {{rows, heads, n / heads}, {n, n / heads, 1}};
      if (values) shape->strides[0] = heads, shape->strides[1] = 1;
    }
    return call.tensor(buffer, shape, (values ? 1 : 2) + (heads != 0), elements(buffer) == each ? 0 : g * each);
  }
  pydet_tensor weight_of(Call &call, const pydet_xla_buffer &buffer, int64_t g, Shape *shape) const {
    if (elements(buffer) != n && elements(buffer) != n * groups) call.fail("a weight does not fit the rows");
    *shape = {{n}, {1}};
    if (heads) *shape = {{heads, n / heads}, {n / heads, 1}};
    return call.tensor(buffer, shape, heads ? 2 : 1, elements(buffer) == n ? 0 : g * n);
  }
};

// What a result of rows has, against the smallest of `count` arguments of rows, and `weights` elements of weights.
Groups groups_of(Call &call, const pydet_xla_buffer &result, const pydet_xla_buffer *const *operands, int count,
                 int64_t weights, int64_t heads = 0) {
  const int64_t n = (result.rank ? result.dims[result.rank - 1] : 0) * (heads ? heads : 1);
  if (n == 0) return {0, 0, 0, heads};
  if (elements(result) == 0) return {n, weights > n ? weights / n : 1, 0, heads};  // sums over no rows are written too
  int64_t least = elements(result);
  for (int i = 0; i < count; ++i) least = elements(*operands[i]) < least ? elements(*operands[i]) : least;
  int64_t groups = least ? elements(result) / least : 1;
  if (weights / n > groups) groups = weights / n;
  if (elements(result) % (groups * n)) call.fail("the operands do not fit each other");
  return {n, groups, elements(result) / (groups * n), heads};
}

// Elements of the larger of two buffers, which may be absent.
int64_t larger(const pydet_xla_buffer *one, const pydet_xla_buffer *other) {
  const int64_t first = one ? elements(*one) : 0, second = other ? elements(*other) : 0;
  return first > second ? first : second;
}

}  // namespace

void xla_rmsnorm(Call &call) {
  const bool has_residual = call.integer("has_residual"), has_weight = call.integer("has_weight");
  const bool has_bias = call.integer("has_bias");
  const int64_t heads = call.integer("heads");
  pydet_rmsnorm_options options = {};
  options.struct_size = sizeof options;
  options.eps = float(call.real("eps"));
  options.weight_offset = float(call.real("weight_offset"));
  options.kernel = call.kernel();
  const pydet_xla_buffer *rows[] = {&call.argument(0), has_residual ? &call.argument(1) : &call.argument(0)};
  const pydet_xla_buffer *weight = has_weight ? &call.argument(1 + has_residual) : nullptr;
  const pydet_xla_buffer *bias = has_bias ? &call.argument(1 + has_residual + has_weight) : nullptr;
  const pydet_xla_buffer &y = call.result(0), &rstd = call.result(1);
  void *stream = call.stream();
  if (call.failed()) return;
  const Groups all = groups_of(call, y, rows, 2, larger(weight, bias), heads);
  for (int64_t g = 0; g < all.groups && !call.failed(); ++g) {
    Shape s[7];
    const pydet_tensor x_part = all.rows_of(call, *rows[0], g, false, &s[0]),
                       y_part = all.rows_of(call, y, g, false, &s[1]),
                       rstd_part = all.rows_of(call, rstd, g, true, &s[2]);
    pydet_tensor residual = {}, sum = {}, w = {}, b = {};
    if (has_residual) {
      residual = all.rows_of(call, *rows[1], g, false, &s[3]);
      sum = all.rows_of(call, call.result(2), g, false, &s[4]);
    }
    if (weight) w = all.weight_of(call, *weight, g, &s[5]);
    if (bias) b = all.weight_of(call, *bias, g, &s[6]);
    options.bias = bias ? &b : nullptr;
    if (call.failed()) return;
    call.check(pydet_rmsnorm(stream, &x_part, has_residual ? &residual : nullptr, weight ? &w : nullptr, &y_part,
                             &rstd_part, has_residual ? &sum : nullptr, &options));
  }
}

void xla_rmsnorm_backward(Call &call) {
  const bool has_weight = call.integer("has_weight"), has_dresidual = call.integer("has_dresidual");
  const bool accumulate = call.integer("accumulate"), has_bias = call.integer("has_bias");
  const int64_t heads = call.integer("heads");
  pydet_rmsnorm_backward_options options = {};
  options.struct_size = sizeof options;
  options.weight_offset = float(call.real("weight_offset"));
  options.accumulate = accumulate;
  options.kernel = call.kernel();
  const pydet_xla_buffer *rows[] = {&call.argument(0), &call.argument(1),
                                    has_dresidual ? &call.argument(3 + has_weight) : &call.argument(0)};
  const pydet_xla_buffer &rstd = call.argument(2), &dx = call.result(0);
  const pydet_xla_buffer *weight = has_weight ? &call.argument(3) : nullptr;
  const pydet_xla_buffer *dweight = has_weight ? &call.result(1) : nullptr;
  const pydet_xla_buffer *dbias = has_bias ? &call.result(1 + has_weight) : nullptr;
  if (has_weight || has_bias) {
    const pydet_xla_buffer &workspace = call.result(1 + has_weight + has_bias);
    options.workspace = workspace.data;
    options.workspace_size = uint64_t(elements(workspace));
  }
  if (accumulate) expect_in_place(call, call.argument(3 + has_weight + has_dresidual), call.result(1));
  void *stream = call.stream();
  if (call.failed()) return;
  const Groups all = groups_of(call, dx, rows, 3, larger(dweight, dbias), heads);
  for (int64_t g = 0; g < all.groups && !call.failed(); ++g) {
    Shape s[8];
    const pydet_tensor dy_part = all.rows_of(call, *rows[0], g, false, &s[0]),
                       x_part = all.rows_of(call, *rows[1], g, false, &s[1]),
                       rstd_part = all.rows_of(call, rstd, g, true, &s[2]),
                       dx_part = all.rows_of(call, dx, g, false, &s[3]);
    pydet_tensor dresidual = {}, w = {}, dw = {}, db = {};
    if (has_dresidual) dresidual = all.rows_of(call, *rows[2], g, false, &s[4]);
    if (has_weight) {
      w = all.weight_of(call, *weight, g, &s[5]);
      dw = all.weight_of(call, *dweight, g, &s[6]);
    }
    if (dbias) db = all.weight_of(call, *dbias, g, &s[7]);
    options.dbias = dbias ? &db : nullptr;
    if (call.failed()) return;
    call.check(pydet_rmsnorm_backward(stream, &dy_part, &x_part, has_weight ? &w : nullptr, &rstd_part,
                                      has_dresidual ? &dresidual : nullptr, &dx_part, has_weight ? &dw : nullptr,
                                      &options));
  }
}

void xla_layernorm(Call &call) {
  const bool has_residual = call.integer("has_residual"), has_weight = call.integer("has_weight");
  const bool has_bias = call.integer("has_bias");
  pydet_layernorm_options options = {};
  options.struct_size = sizeof options;
  options.eps = float(call.real("eps"));
  options.weight_offset = float(call.real("weight_offset"));
  options.kernel = call.kernel();
  const pydet_xla_buffer *rows[] = {&call.argument(0), has_residual ? &call.argument(1) : &call.argument(0)};
  const pydet_xla_buffer *weight = has_weight ? &call.argument(1 + has_residual) : nullptr;
  const pydet_xla_buffer *bias = has_bias ? &call.argument(1 + has_residual + has_weight) : nullptr;
  const pydet_xla_buffer &y = call.result(0), &mean = call.result(1), &rstd = call.result(2);
  void *stream = call.stream();
  if (call.failed()) return;
  const Groups all = groups_of(call, y, rows, 2, larger(weight, bias));
  for (int64_t g = 0; g < all.groups && !call.failed(); ++g) {
    Shape s[8];
    const pydet_tensor x_part = all.rows_of(call, *rows[0], g, false, &s[0]),
                       y_part = all.rows_of(call, y, g, false, &s[1]),
                       mean_part = all.rows_of(call, mean, g, true, &s[2]),
                       rstd_part = all.rows_of(call, rstd, g, true, &s[3]);
    pydet_tensor residual = {}, sum = {}, w = {}, b = {};
    if (has_residual) {
      residual = all.rows_of(call, *rows[1], g, false, &s[4]);
      sum = all.rows_of(call, call.result(3), g, false, &s[5]);
    }
    if (weight) w = all.weight_of(call, *weight, g, &s[6]);
    if (bias) b = all.weight_of(call, *bias, g, &s[7]);
    if (call.failed()) return;
    call.check(pydet_layernorm(stream, &x_part, has_residual ? &residual : nullptr, weight ? &w : nullptr,
                               bias ? &b : nullptr, &y_part, &mean_part, &rstd_part, has_residual ? &sum : nullptr,
                               &options));
  }
}

void xla_layernorm_backward(Call &call) {
  const bool has_weight = call.integer("has_weight"), has_bias = call.integer("has_bias");
  const bool has_dresidual = call.integer("has_dresidual");
  pydet_layernorm_backward_options options = {};
  options.struct_size = sizeof options;
  options.weight_offset = float(call.real("weight_offset"));
  options.kernel = call.kernel();
  const pydet_xla_buffer *rows[] = {&call.argument(0), &call.argument(1),
                                    has_dresidual ? &call.argument(4 + has_weight) : &call.argument(0)};
  const pydet_xla_buffer &mean = call.argument(2), &rstd = call.argument(3), &dx = call.result(0);
  const pydet_xla_buffer *weight = has_weight ? &call.argument(4) : nullptr;
  const pydet_xla_buffer *dweight = has_weight ? &call.result(1) : nullptr;
  const pydet_xla_buffer *dbias = has_bias ? &call.result(1 + has_weight) : nullptr;
  if (has_weight || has_bias) {
    const pydet_xla_buffer &workspace = call.result(1 + has_weight + has_bias);
    options.workspace = workspace.data;
    options.workspace_size = uint64_t(elements(workspace));
  }
  void *stream = call.stream();
  if (call.failed()) return;
  const Groups all = groups_of(call, dx, rows, 3, larger(dweight, dbias));
  for (int64_t g = 0; g < all.groups && !call.failed(); ++g) {
    Shape s[9];
    const pydet_tensor dy_part = all.rows_of(call, *rows[0], g, false, &s[0]),
                       x_part = all.rows_of(call, *rows[1], g, false, &s[1]),
                       mean_part = all.rows_of(call, mean, g, true, &s[2]),
                       rstd_part = all.rows_of(call, rstd, g, true, &s[3]),
                       dx_part = all.rows_of(call, dx, g, false, &s[4]);
    pydet_tensor dresidual = {}, w = {}, dw = {}, db = {};
    if (has_dresidual) dresidual = all.rows_of(call, *rows[2], g, false, &s[5]);
    if (has_weight) {
      w = all.weight_of(call, *weight, g, &s[6]);
      dw = all.weight_of(call, *dweight, g, &s[7]);
    }
    if (has_bias) db = all.weight_of(call, *dbias, g, &s[8]);
    if (call.failed()) return;
    call.check(pydet_layernorm_backward(stream, &dy_part, &x_part, has_weight ? &w : nullptr, &mean_part, &rstd_part,
                                        has_dresidual ? &dresidual : nullptr, &dx_part, has_weight ? &dw : nullptr,
                                        has_bias ? &db : nullptr, &options));
  }
}

// The softmax family: buffers of rows, whatever their leading dimensions.
namespace {

pydet_tensor as_rows(Call &call, const pydet_xla_buffer &buffer, Shape *shape) {
  const int64_t n = buffer.rank ? buffer.dims[buffer.rank - 1] : 0;
  *shape = {{n ? elements(buffer) / n : 0, n}, {n, 1}};
  return call.tensor(buffer, shape, 2);
}
pydet_tensor as_values(Call &call, const pydet_xla_buffer &buffer, Shape *shape) {
  *shape = {{elements(buffer)}, {1}};
  pydet_tensor values = call.tensor(buffer, shape, 1);
  if (buffer.dtype == PYDET_XLA_S32) values.dtype = {PYDET_INT, 32, 1};
  if (buffer.dtype == PYDET_XLA_S64) values.dtype = {PYDET_INT, 64, 1};
  return values;
}

pydet_softmax_options softmax_options(Call &call) {
  pydet_softmax_options options = {};
  options.struct_size = sizeof options;
  options.log = int32_t(call.integer("log"));
  options.kernel = call.kernel();
  return options;
}
pydet_log_prob_options log_prob_options(Call &call) {
  pydet_log_prob_options options = {};
  options.struct_size = sizeof options;
  options.kernel = call.kernel();
  return options;
}

}  // namespace

void xla_softmax(Call &call) {
  const pydet_softmax_options options = softmax_options(call);
  Shape s[2];
  const pydet_tensor x = as_rows(call, call.argument(0), &s[0]), y = as_rows(call, call.result(0), &s[1]);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_softmax(stream, &x, &y, &options));
}

void xla_softmax_backward(Call &call) {
  const pydet_softmax_options options = softmax_options(call);
  Shape s[3];
  const pydet_tensor dy = as_rows(call, call.argument(0), &s[0]), y = as_rows(call, call.argument(1), &s[1]),
                     dx = as_rows(call, call.result(0), &s[2]);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_softmax_backward(stream, &dy, &y, &dx, &options));
}

void xla_log_prob(Call &call) {
  const pydet_log_prob_options options = log_prob_options(call);
  Shape s[3];
  const pydet_tensor x = as_rows(call, call.argument(0), &s[0]), index = as_values(call, call.argument(1), &s[1]),
                     found = as_values(call, call.result(0), &s[2]);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_log_prob(stream, &x, &index, &found, &options));
}

void xla_log_prob_backward(Call &call) {
  const pydet_log_prob_options options = log_prob_options(call);
  Shape s[4];
  const pydet_tensor given = as_values(call, call.argument(0), &s[0]), x = as_rows(call, call.argument(1), &s[1]),
                     index = as_values(call, call.argument(2), &s[2]), dx = as_rows(call, call.result(0), &s[3]);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_log_prob_backward(stream, &given, &x, &index, &dx, &options));
}

}  // namespace pydet
