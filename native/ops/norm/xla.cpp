// What XLA asks of the norms. A weight or bias [groups, ..., n] means that many problems: its leading dimensions are
// the rows' first ones.

#include "core/operations.h"
#include "entry/xla_call.h"

namespace pydet {
namespace {

// Rows of N elements that come in groups, each with a weight of its own, or all with one. Where a weight is one of heads,
// N is that of all heads.
struct Groups {
  int64_t n, groups, rows;  // rows of a group
  int64_t heads;            // 0: weights are not of heads

  // The tensor of group g of a buffer of rows (or of one value a row), whose shape is checked.
  pydet_tensor rows_of(Call &call, const pydet_xla_buffer &buffer, int64_t g, bool values, Shape *shape) const {
    const int64_t each = values ? rows * (heads ? heads : 1) : rows * n;
    *shape = {{rows, n}, {n, 1}};
    if (values) shape->strides[0] = 1;
    if (heads) {
      *shape = {{rows, heads, n / heads}, {n, n / heads, 1}};
      if (values) shape->strides[0] = heads, shape->strides[1] = 1;
    }
    return call.tensor(buffer, shape, (values ? 1 : 2) + (heads != 0), g * each);
  }
  pydet_tensor weight_of(Call &call, const pydet_xla_buffer &buffer, int64_t g, Shape *shape) const {
    *shape = {{n}, {1}};
    if (heads) *shape = {{heads, n / heads}, {n / heads, 1}};
    return call.tensor(buffer, shape, heads ? 2 : 1, g * n);
  }
};

// The buffers of a call, in their order; NULL where one is not there.
struct Buffers {
  Call &call;
  int64_t arguments = 0, results = 0;

  const pydet_xla_buffer *argument(bool present = true) { return present ? &call.argument(arguments++) : nullptr; }
  const pydet_xla_buffer *argument(const char *has) { return argument(call.flag(has)); }
  const pydet_xla_buffer *result(bool present = true) { return present ? &call.result(results++) : nullptr; }
};

struct Named {
  const char *name;
  const pydet_xla_buffer *buffer;  // NULL: not there
};

// How the rows of a result go with the others: `rows` have its shape, `values` one a row, and weights its last dimension
// (or two, of heads), behind the first of its dimensions where groups of rows have weights of their own.
Groups groups_of(Call &call, const Named &like, std::initializer_list<Named> rows, std::initializer_list<Named> values,
                 std::initializer_list<Named> weights, int64_t heads) {
  const pydet_xla_buffer &result = *like.buffer;
  const int64_t last = result.rank - 1, tail = heads ? 2 : 1;
  if (result.rank < tail) {
    call.fail("%s is %s, want %d dimension%s or more", like.name, ShapeWords(result.dims, result.rank).text, int(tail),
              tail > 1 ? "s" : "");
    return {};
  }
  if (heads && (heads < 0 || result.dims[last - 1] != heads))
    call.fail("attribute heads is %" PRId64 ", want 0, or %" PRId64 " as %s has", heads, result.dims[last - 1],
              like.name);
  for (const Named &x : rows)
    if (x.buffer) call.expect_shape(x.name, *x.buffer, result.dims, result.rank);
  for (const Named &x : values)
    if (x.buffer) call.expect_shape(x.name, *x.buffer, result.dims, last);

  const int64_t within = result.rank - tail;  // the dimensions that count rows
  const pydet_xla_buffer *first = nullptr;
  int64_t lead = 0;
  for (const Named &w : weights) {
    if (!w.buffer) continue;
    if (!first) first = w.buffer, lead = first->rank - tail;
    int64_t want[kMaxRank];
    if (lead < 0 || lead > within || first->rank > kMaxRank) {
      call.fail("%s is %s, which does not go with %s", w.name, ShapeWords(w.buffer->dims, w.buffer->rank).text,
                ShapeWords(result.dims, result.rank).text);
      return {};
    }
    for (int64_t i = 0; i < first->rank; ++i) want[i] = result.dims[i < lead ? i : i + within - lead];
    call.expect_shape(w.name, *w.buffer, want, first->rank);
  }
  if (call.failed()) return {};
  const int64_t n = product(call, result.dims + within, tail);
  return {n, product(call, result.dims, lead), product(call, result.dims + lead, within - lead), heads};
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
  // A weight's gradient, or that of each block of rows: as many as the buffer has.
  const pydet_tensor *sums(const pydet_xla_buffer *buffer, bool of_blocks) {
    if (!buffer || !of_blocks) return weight(buffer);
    Shape *shape = &shapes_[count_];
    const int rank = all_.heads ? 3 : 2;
    const int64_t n = all_.heads ? all_.n / all_.heads : all_.n;
    const int64_t blocks = (all_.rows + PYDET_DWEIGHT_ROWS - 1) / PYDET_DWEIGHT_ROWS;
    *shape = {{blocks, n}, {}};
    if (all_.heads) *shape = {{blocks, all_.heads, n}, {}};
    call_.expect_shape("sums of blocks", *buffer, shape->dims, rank);
    lay_out(shape, rank);
    return add(call_.tensor(*buffer, shape, rank));
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
    if (workspace->dtype != PYDET_XLA_U8) call.fail("the workspace is no result of bytes (uint8)");
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
  const Groups all = groups_of(call, {"y", y}, {{"x", x}, {"residual", residual}, {"sum", sum}}, {{"rstd", rstd}},
                               {{"weight", weight}, {"bias", bias}}, heads);
  each_group(call, all, [&](Part &part) {
    const pydet_tensor *x_part = part.rows(x), *residual_part = part.rows(residual), *w = part.weight(weight),
                       *y_part = part.rows(y), *rstd_part = part.values(rstd), *sum_part = part.rows(sum);
    options.bias = part.weight(bias);
    if (call.failed()) return;
    call.check(pydet_rmsnorm(stream, x_part, residual_part, w, y_part, rstd_part, sum_part, &options));
  });
}

// Operands: dy, x, rstd, then a weight if has_weight, dresidual if has_dresidual, a dweight to continue from if
// accumulate; dx, then dweight if has_weight, dbias if has_bias, and a workspace of bytes if either. weight_offset,
// heads. block_sums: dweight and dbias are those of each PYDET_DWEIGHT_ROWS rows, and all rows have one weight.
void rmsnorm_backward(Call &call) {
  Buffers of = {call};
  const bool has_bias = call.flag("has_bias"), accumulate = call.flag("accumulate"), blocks = call.flag("block_sums");
  const pydet_xla_buffer *dy = of.argument(), *x = of.argument(), *rstd = of.argument(),
                         *weight = of.argument("has_weight"), *dresidual = of.argument("has_dresidual"),
                         *start = of.argument(accumulate), *dx = of.result(), *dweight = of.result(weight),
                         *dbias = of.result(has_bias);
  auto options = backward_options<pydet_rmsnorm_backward_options>(call, of.result(dweight || dbias));
  options.accumulate = accumulate;
  options.block_sums = blocks;
  if (start) continue_from(call, *start, call.result(1));
  const int64_t heads = call.integer("heads");
  void *stream = call.stream();
  if (call.failed()) return;
  const Groups all = groups_of(
      call, {"dx", dx}, {{"dy", dy}, {"x", x}, {"dresidual", dresidual}}, {{"rstd", rstd}},
      {{"weight", weight}, {"dweight", blocks ? nullptr : dweight}, {"dbias", blocks ? nullptr : dbias}}, heads);
  if (blocks && all.groups != 1) call.fail("attribute block_sums is 1 with %" PRId64 " weights, want 0", all.groups);
  each_group(call, all, [&](Part &part) {
    const pydet_tensor *dy_part = part.rows(dy), *x_part = part.rows(x), *w = part.weight(weight),
                       *rstd_part = part.values(rstd), *dresidual_part = part.rows(dresidual), *dx_part = part.rows(dx),
                       *dw = part.sums(dweight, blocks);
    options.dbias = part.sums(dbias, blocks);
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
  const Groups all = groups_of(call, {"y", y}, {{"x", x}, {"residual", residual}, {"sum", sum}},
                               {{"mean", mean}, {"rstd", rstd}}, {{"weight", weight}, {"bias", bias}}, 0);
  each_group(call, all, [&](Part &part) {
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
                         *dx = of.result(), *dweight = of.result(weight), *dbias = of.result(call.flag("has_bias"));
  const auto options = backward_options<pydet_layernorm_backward_options>(call, of.result(dweight || dbias));
  void *stream = call.stream();
  if (call.failed()) return;
  const Groups all =
      groups_of(call, {"dx", dx}, {{"dy", dy}, {"x", x}, {"dresidual", dresidual}}, {{"mean", mean}, {"rstd", rstd}},
                {{"weight", weight}, {"dweight", dweight}, {"dbias", dbias}}, 0);
  each_group(call, all, [&](Part &part) {
    const pydet_tensor *dy_part = part.rows(dy), *x_part = part.rows(x), *w = part.weight(weight),
                       *mean_part = part.values(mean), *rstd_part = part.values(rstd),
                       *dresidual_part = part.rows(dresidual), *dx_part = part.rows(dx), *dw = part.weight(dweight),
                       *db = part.weight(dbias);
    if (call.failed()) return;
    call.check(pydet_layernorm_backward(stream, dy_part, x_part, w, mean_part, rstd_part, dresidual_part, dx_part, dw,
                                        db, &options));
  });
}

constexpr char kRmsnorm[] = "rmsnorm";
constexpr char kRmsnormBackward[] = "rmsnorm_backward";
constexpr char kLayernorm[] = "layernorm";
constexpr char kLayernormBackward[] = "layernorm_backward";
constexpr pydet_xla_handler kHandlers[] = {
    handler<kRmsnorm, rmsnorm>(),
    handler<kRmsnormBackward, rmsnorm_backward>(),
    handler<kLayernorm, layernorm>(),
    handler<kLayernormBackward, layernorm_backward>(),
};

}  // namespace

Items<pydet_xla_handler> Operation<RmsNorm>::xla() { return kHandlers; }

}  // namespace pydet
