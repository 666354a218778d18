// What XLA asks of the norms. A weight or bias [groups, n] means that many problems, each with rows / groups rows of
// the others.

#include "core/operations.h"
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

// The buffers of a call, in their order; NULL where one is not there.
struct Buffers {
  Call &call;
  int64_t arguments = 0, results = 0;

  const pydet_xla_buffer *argument(bool present = true) { return present ? &call.argument(arguments++) : nullptr; }
  const pydet_xla_buffer *argument(const char *has) { return argument(call.integer(has) != 0); }
  const pydet_xla_buffer *result(bool present = true) { return present ? &call.result(results++) : nullptr; }
};

// What a result of rows has, against the smallest of the arguments of rows and the largest of the weights.
Groups groups_of(Call &call, const pydet_xla_buffer &result, std::initializer_list<const pydet_xla_buffer *> operands,
                 std::initializer_list<const pydet_xla_buffer *> weights, int64_t heads) {
  int64_t least = elements(result), most = 0;
  for (const pydet_xla_buffer *x : operands)
    if (x) least = elements(*x) < least ? elements(*x) : least;
  for (const pydet_xla_buffer *w : weights)
    if (w) most = elements(*w) > most ? elements(*w) : most;
  const int64_t n = (result.rank ? result.dims[result.rank - 1] : 0) * (heads ? heads : 1);
  if (n == 0) return {0, 0, 0, heads};
  if (elements(result) == 0) return {n, most > n ? most / n : 1, 0, heads};  // sums over no rows are written too
  int64_t groups = least ? elements(result) / least : 1;
  if (most / n > groups) groups = most / n;
  if (elements(result) % (groups * n)) call.fail("the operands do not fit each other");
  return {n, groups, elements(result) / (groups * n), heads};
}

// The tensors of group g, one after the other; NULL of a buffer that is not there.
class Part {
 public:
  Part(Call &call, const Groups &all, int64_t g) : call_(call), all_(all), g_(g) {}

  const pydet_tensor *rows(const pydet_xla_buffer *buffer) {
    return buffer ? add(all_.rows_of(call_, *buffer, g_, false, &shapes_[count_])) : nullptr;
  }
  const pydet_tensor *values(const pydet_xla_buffer *buffer) {  // one a row
    return buffer ? add(all_.rows_of(call_, *buffer, g_, true, &shapes_[count_])) : nullptr;
  }
  const pydet_tensor *weight(const pydet_xla_buffer *buffer) {
    return buffer ? add(all_.weight_of(call_, *buffer, g_, &shapes_[count_])) : nullptr;
  }

 private:
  const pydet_tensor *add(const pydet_tensor &tensor) {
    tensors_[count_] = tensor;
    return &tensors_[count_++];
  }

  Call &call_;
  const Groups &all_;
  int64_t g_;
  int count_ = 0;
  Shape shapes_[9];
  pydet_tensor tensors_[9];
};

// Runs an operation on one group after the other.
template <class Run> void each_group(Call &call, const Groups &all, Run run) {
  for (int64_t g = 0; g < all.groups && !call.failed(); ++g) {
    Part part(call, all, g);
    run(part);
  }
}

template <class Options> Options forward_options(Call &call) {
  Options options = {};
  options.struct_size = sizeof options;
  options.eps = call.real("eps");
  options.weight_offset = call.real("weight_offset");
  options.kernel = call.kernel();
  return options;
}

// With the workspace, which is the last result of those that sum over rows.
template <class Options> Options backward_options(Call &call, const pydet_xla_buffer *workspace) {
  Options options = {};
  options.struct_size = sizeof options;
  options.weight_offset = call.real("weight_offset");
  options.kernel = call.kernel();
  if (workspace) {
    options.workspace = workspace->data;
    options.workspace_size = uint64_t(elements(*workspace));
  }
  return options;
}

// Operands: x, then a residual if has_residual, a weight if has_weight, a bias if has_bias; y, rstd, and the sum if
// has_residual. eps, weight_offset. heads: how many a weight or bias has, 0 where it is [n].
void rmsnorm(Call &call) {
  Buffers of = {call};
  const pydet_xla_buffer *x = of.argument(), *residual = of.argument("has_residual"),
                         *weight = of.argument("has_weight"), *bias = of.argument("has_bias"), *y = of.result(),
                         *rstd = of.result(), *sum = of.result(residual);
  auto options = forward_options<pydet_rmsnorm_options>(call);
  const int64_t heads = call.integer("heads");
  void *stream = call.stream();
  if (call.failed()) return;
  each_group(call, groups_of(call, *y, {x, residual}, {weight, bias}, heads), [&](Part &part) {
    const pydet_tensor *x_part = part.rows(x), *residual_part = part.rows(residual), *w = part.weight(weight),
                       *y_part = part.rows(y), *rstd_part = part.values(rstd), *sum_part = part.rows(sum);
    options.bias = part.weight(bias);
    if (call.failed()) return;
    call.check(pydet_rmsnorm(stream, x_part, residual_part, w, y_part, rstd_part, sum_part, &options));
  });
}

// Operands: dy, x, rstd, then a weight if has_weight, dresidual if has_dresidual, a dweight to continue from if
// accumulate; dx, then dweight if has_weight, dbias if has_bias, and a workspace of bytes if either. weight_offset,
// heads.
void rmsnorm_backward(Call &call) {
  Buffers of = {call};
  const bool has_bias = call.integer("has_bias"), accumulate = call.integer("accumulate");
  const pydet_xla_buffer *dy = of.argument(), *x = of.argument(), *rstd = of.argument(),
                         *weight = of.argument("has_weight"), *dresidual = of.argument("has_dresidual"),
                         *start = of.argument(accumulate), *dx = of.result(), *dweight = of.result(weight),
                         *dbias = of.result(has_bias);
  auto options = backward_options<pydet_rmsnorm_backward_options>(call, of.result(dweight || dbias));
  options.accumulate = accumulate;
  if (start) expect_in_place(call, *start, call.result(1));
  const int64_t heads = call.integer("heads");
  void *stream = call.stream();
  if (call.failed()) return;
  each_group(call, groups_of(call, *dx, {dy, x, dresidual}, {dweight, dbias}, heads), [&](Part &part) {
    const pydet_tensor *dy_part = part.rows(dy), *x_part = part.rows(x), *w = part.weight(weight),
                       *rstd_part = part.values(rstd), *dresidual_part = part.rows(dresidual), *dx_part = part.rows(dx),
                       *dw = part.weight(dweight);
    options.dbias = part.weight(dbias);
    if (call.failed()) return;
    call.check(pydet_rmsnorm_backward(stream, dy_part, x_part, w, rstd_part, dresidual_part, dx_part, dw, &options));
  });
}

// Operands: x, then a residual if has_residual, a weight if has_weight, a bias if has_bias; y, mean, rstd, and the
// sum if has_residual. eps, weight_offset.
void layernorm(Call &call) {
  Buffers of = {call};
  const pydet_xla_buffer *x = of.argument(), *residual = of.argument("has_residual"),
                         *weight = of.argument("has_weight"), *bias = of.argument("has_bias"), *y = of.result(),
                         *mean = of.result(), *rstd = of.result(), *sum = of.result(residual);
  const auto options = forward_options<pydet_layernorm_options>(call);
  void *stream = call.stream();
  if (call.failed()) return;
  each_group(call, groups_of(call, *y, {x, residual}, {weight, bias}, 0), [&](Part &part) {
    const pydet_tensor *x_part = part.rows(x), *residual_part = part.rows(residual), *w = part.weight(weight),
                       *b = part.weight(bias), *y_part = part.rows(y), *mean_part = part.values(mean),
                       *rstd_part = part.values(rstd), *sum_part = part.rows(sum);
    if (call.failed()) return;
    call.check(pydet_layernorm(stream, x_part, residual_part, w, b, y_part, mean_part, rstd_part, sum_part, &options));
  });
}

// Operands: dy, x, mean, rstd, then a weight if has_weight, dresidual if has_dresidual; dx, then dweight if
// has_weight, dbias if has_bias, and a workspace of bytes if either. weight_offset.
void layernorm_backward(Call &call) {
  Buffers of = {call};
  const pydet_xla_buffer *dy = of.argument(), *x = of.argument(), *mean = of.argument(), *rstd = of.argument(),
                         *weight = of.argument("has_weight"), *dresidual = of.argument("has_dresidual"),
                         *dx = of.result(), *dweight = of.result(weight), *dbias = of.result(call.integer("has_bias"));
  const auto options = backward_options<pydet_layernorm_backward_options>(call, of.result(dweight || dbias));
  void *stream = call.stream();
  if (call.failed()) return;
  each_group(call, groups_of(call, *dx, {dy, x, dresidual}, {dweight, dbias}, 0), [&](Part &part) {
    const pydet_tensor *dy_part = part.rows(dy), *x_part = part.rows(x), *w = part.weight(weight),
                       *mean_part = part.values(mean), *rstd_part = part.values(rstd),
                       *dresidual_part = part.rows(dresidual), *dx_part = part.rows(dx), *dw = part.weight(dweight),
                       *db = part.weight(dbias);
    if (call.failed()) return;
    call.check(pydet_layernorm_backward(stream, dy_part, x_part, w, mean_part, rstd_part, dresidual_part, dx_part, dw,
                                        db, &options));
  });
}

constexpr pydet_xla_handler kHandlers[] = {
    handler<rmsnorm>("rmsnorm"),
    handler<rmsnorm_backward>("rmsnorm_backward"),
    handler<layernorm>("layernorm"),
    handler<layernorm_backward>("layernorm_backward"),
};

}  // namespace

Items<pydet_xla_handler> Operation<RmsNorm>::xla() { return kHandlers; }

}  // namespace pydet
