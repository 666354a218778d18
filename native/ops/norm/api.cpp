// RMSNorm and LayerNorm, with their gradients.

#include "core/launch.h"
#include "ops/norm/check.h"

namespace pydet {
namespace {

// What forward and backward share: where they run, the rows of x, and what goes with them.
template <class Norm>
Norm norm_of(void *stream, const View &x, const RowWalk &walk, const View &weight, const View &rstd) {
  Norm norm = {};
  norm.device = x.device;
  norm.stream = stream;
  norm.rows = walk.rows;
  norm.inner = walk.inner;
  norm.n = x.cols();
  norm.x = rows_of(x, walk, 0);
  norm.weight = vector_of(weight);
  norm.rstd = vector_of(rstd);
  return norm;
}

// A norm by the walk of x, residual, y and sum, in that order.
template <class Norm, class Options>
Norm forward_of(void *stream, const View *const (&walked)[4], const RowWalk &walk, const View &weight, const View &bias,
                const View &rstd, const Options &options) {
  auto norm = norm_of<Norm>(stream, *walked[0], walk, weight, rstd);
  norm.residual = rows_of(*walked[1], walk, 1);
  norm.y = rows_of(*walked[2], walk, 2);
  norm.sum = rows_of(*walked[3], walk, 3);
  norm.bias = vector_of(bias);
  norm.eps = options.eps;
  norm.weight_offset = options.weight_offset;
  return norm;
}

// Its gradient by the walk of x, dy, dresidual and dx, in that order.
template <class Norm, class Options>
Norm backward_of(void *stream, const View *const (&walked)[4], const RowWalk &walk, const View &weight,
                 const View &rstd, const View &dweight, const View &dbias, const Options &options) {
  auto norm = norm_of<Norm>(stream, *walked[0], walk, weight, rstd);
  norm.dy = rows_of(*walked[1], walk, 1);
  norm.dresidual = rows_of(*walked[2], walk, 2);
  norm.dx = rows_of(*walked[3], walk, 3);
  norm.dweight = vector_of(dweight);
  norm.dbias = vector_of(dbias);
  norm.weight_offset = options.weight_offset;
  norm.accumulate = options.accumulate != 0;
  norm.workspace = options.workspace;
  norm.workspace_size = options.workspace_size;
  return norm;
}

// What accumulate asks of the sums over rows.
pydet_status check_sums(const char *op, int32_t accumulate, const View &dweight, const View &dbias) {
  PYDET_TRY(check_flag(op, "accumulate", accumulate));
  if (!accumulate) return PYDET_OK;
  if (!dweight.present() && !dbias.present())
    return fail(PYDET_NULL_POINTER, "%s: dweight and dbias are NULL, want one of them under accumulate", op);
  for (const View *sum : {&dweight, &dbias})
    if (sum->present() && sum->type != Type::f32)
      return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want float32 under accumulate", op, sum->name,
                  type_name(sum->type));
  return PYDET_OK;
}

// One of the sums of blocks, as dense as check_block_sums wants all of them. Of one without a dimension of blocks, which
// that refuses, nothing.
View one_block(const char *name, const View &sums) {
  if (!sums.present() || sums.ndim < 2) return View{};
  View one = sums;
  one.name = name;
  --one.ndim;
  int64_t dense = 1;
  for (int i = one.ndim - 1; i >= 0; --i) {
    one.shape[i] = sums.shape[i + 1];
    one.stride[i] = one.shape[i] > 1 ? dense : 0;
    if (__builtin_mul_overflow(dense, one.shape[i], &dense)) dense = 0;  // of an empty one: elsewhere memory is smaller
  }
  return one;
}

// What sums of the blocks of `rows` rows, those of one head, ask beside it.
template <size_t count>
pydet_status check_block_sums(const View &x, int64_t rows, int32_t accumulate, const View *const (&sums)[count]) {
  if (accumulate) return fail(PYDET_INVALID_VALUE, "%s: options.accumulate is 1, want 0 with block_sums", x.op);
  const int64_t blocks = divide_up(rows, int64_t(PYDET_DWEIGHT_ROWS));
  for (const View *sum : sums) {
    if (!sum->present()) continue;
    if (sum->ndim < 2 || sum->shape[0] != blocks)
      return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want %" PRId64 " sums of blocks of %d rows, by block_sums", x.op,
                  sum->name, shape_text(*sum).text, blocks, int(PYDET_DWEIGHT_ROWS));
    if (sum->type != Type::f32)
      return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want float32 by block_sums", x.op, sum->name,
                  type_name(sum->type));
    PYDET_TRY(contiguous(*sum));
  }
  return PYDET_OK;
}

// For the chains of `sums` sums over rows.
pydet_status backward_workspace(const char *op, int64_t rows, int64_t n, int sums, uint64_t *bytes) {
  int64_t chains = rows / kDweightChainRows + (rows % kDweightChainRows != 0), size = 0;
  if (__builtin_mul_overflow(chains, n, &size) || __builtin_mul_overflow(size, sums * int64_t(sizeof(float)), &size))
    return fail(PYDET_OVERFLOW, "%s: workspace for %" PRId64 " rows of %" PRId64 " passes 2^63 - 1 bytes", op, rows, n);
  *bytes = uint64_t(size);
  return PYDET_OK;
}

pydet_status checked_backward_workspace(const char *op, int64_t rows, int64_t n, int sums, uint64_t *bytes) {
  if (!bytes) return fail(PYDET_NULL_POINTER, "%s: bytes is NULL", op);
  if (rows < 0 || n < 1)
    return fail(PYDET_INVALID_SHAPE, "%s: rows is %" PRId64 " and n %" PRId64 ", want 0 or more and 1 or more", op,
                rows, n);
  return backward_workspace(op, rows, n, sums, bytes);
}

// That a norm's gradient of x [rows, n] has the workspace for that many sums over rows, apart from its tensors.
template <class Options, size_t in, size_t out>
pydet_status check_backward_workspace(const char *op, const Options &options, int64_t rows, int64_t n, int sums,
                                      const View *const (&inputs)[in], const View *const (&outputs)[out]) {
  PYDET_TRY(check_workspace(op, options.workspace, options.workspace_size));
  uint64_t needed = 0;
  if (sums) PYDET_TRY(backward_workspace(op, rows, n, sums, &needed));
  if (options.workspace_size < needed)
    return fail(PYDET_WORKSPACE_TOO_SMALL, "%s: workspace is %" PRIu64 " bytes, want %" PRIu64 " (pydet_%s_workspace)",
                op, options.workspace_size, needed, op);
  PYDET_TRY(workspace_apart(inputs, options.workspace, options.workspace_size));
  return workspace_apart(outputs, options.workspace, options.workspace_size);
}

// Apart from the call itself, so that the views are off the stack when a kernel runs. Without rows, none are left.
__attribute__((noinline)) pydet_status read_rmsnorm_quantize(
    void *stream, const pydet_tensor *x_tensor, const pydet_tensor *residual_tensor, const pydet_tensor *weight_tensor,
    const pydet_tensor *out_tensor, const pydet_tensor *scale_tensor, const pydet_tensor *y_tensor,
    const pydet_tensor *rstd_tensor, const pydet_tensor *sum_tensor, const pydet_rmsnorm_quantize_options &options,
    RmsNormQuantize *norm) {
  const char *op = "rmsnorm_quantize";
  View x, residual, weight, out, scale, y, rstd, sum;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read_optional(op, "residual", kNormRow, residual_tensor, 1, &residual));
  PYDET_TRY(read_optional(op, "weight", kNormVector, weight_tensor, 1, &weight));
  PYDET_TRY(read(op, "out", kScaledFactor, out_tensor, 1, &out));
  PYDET_TRY(read(op, "scale", kScaling, scale_tensor, 0, &scale));
  PYDET_TRY(read_optional(op, "y", kNormRow, y_tensor, 1, &y));
  PYDET_TRY(read_optional(op, "rstd", kNormVector, rstd_tensor, 0, &rstd));
  PYDET_TRY(read_optional(op, "sum", kNormRow, sum_tensor, 1, &sum));
  PYDET_TRY(both_or_neither(op, residual, sum));
  PYDET_TRY(unit_last_stride(x));
  const View *like[] = {&y};
  PYDET_TRY(check_norm(x, like, 1, weight, rstd));
  PYDET_TRY(check_like(x, residual, &residual));
  PYDET_TRY(check_like(x, sum, &residual));
  if (residual.present()) PYDET_TRY(same_type(residual, sum));
  PYDET_TRY(check_eps(op, options.eps));
  PYDET_TRY(check_weight_offset(op, options.weight_offset));
  PYDET_TRY(check_quantized(x, out, scale, options, norm));
  const View none = {}, &written = norm->given() ? none : scale, &known = norm->given() ? scale : none;
  const View *inputs[] = {&x, &residual, &weight, &known}, *outputs[] = {&out, &y, &sum, &rstd, &written};
  PYDET_TRY(outputs_apart(inputs, outputs));
  RowWalk walk;
  const View *walked[] = {&x, &residual, &y, &sum, &out, &written};
  PYDET_TRY(walk_rows(walked, 6, &walk));
  if (walk.rows == 0) return PYDET_OK;
  const View *of_norm[] = {&x, &residual, &y, &sum};
  static_cast<RmsNorm &>(*norm) = forward_of<RmsNorm>(stream, of_norm, walk, weight, none, rstd, options);
  norm->outer = walk.outer;
  norm->heads = 1;
  norm->out = rows_of(out, walk, 4);
  norm->scale = norm->given() ? Rows{scale.data, scale.type, 0, 0, 0} : rows_of(scale, walk, 5);
  return PYDET_OK;
}

}  // namespace
}  // namespace pydet

using namespace pydet;

pydet_status pydet_rmsnorm(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *residual_tensor,
                           const pydet_tensor *weight_tensor, const pydet_tensor *y_tensor,
                           const pydet_tensor *rstd_tensor, const pydet_tensor *sum_tensor,
                           const pydet_rmsnorm_options *given) {
  const char *op = "rmsnorm";
  pydet_rmsnorm_options options = {};
  options.eps = 1e-6f;
  PYDET_TRY(read_options(op, given, &options));
  View x, residual, weight, bias, y, rstd, sum;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read_optional(op, "residual", kNormRow, residual_tensor, 1, &residual));
  PYDET_TRY(read_optional(op, "weight", kNormVector, weight_tensor, 1, &weight));
  PYDET_TRY(read(op, "y", kNormRow, y_tensor, 1, &y));
  PYDET_TRY(read_optional(op, "rstd", kNormVector, rstd_tensor, 0, &rstd));
  PYDET_TRY(read_optional(op, "sum", kNormRow, sum_tensor, 1, &sum));
  PYDET_TRY(read_optional(op, "bias", kNormVector, options.bias, 1, &bias));
  PYDET_TRY(both_or_neither(op, residual, sum));
  PYDET_TRY(unit_last_stride(x));
  const View *like[] = {&y};
  int64_t heads = 1;
  PYDET_TRY(check_norm(x, like, 0, View{}, View{}));
  PYDET_TRY(check_like(x, residual, &residual));
  PYDET_TRY(check_norm(x, like, 1, View{}, View{}));
  PYDET_TRY(check_like(x, sum, &residual));
  if (residual.present()) PYDET_TRY(same_type(residual, sum));
  PYDET_TRY(check_weights(x, {&weight, &bias}, &heads));
  PYDET_TRY(check_norm(x, like, 0, View{}, rstd));
  PYDET_TRY(check_eps(op, options.eps));
  PYDET_TRY(check_weight_offset(op, options.weight_offset));
  const View *inputs[] = {&x, &residual, &weight, &bias}, *outputs[] = {&y, &sum, &rstd};
  PYDET_TRY(outputs_apart(inputs, outputs));
  RowWalk walk;
  const View *walked[] = {&x, &residual, &y, &sum};
  PYDET_TRY(walk_rows(walked, 4, &walk, 3));
  if (walk.rows == 0) return nothing_to_write();
  auto norm = forward_of<RmsNorm>(stream, walked, walk, weight, bias, rstd, options);
  norm.outer = walk.outer;
  norm.heads = heads;
  return launch(op, norm, options.kernel);
}

pydet_status pydet_rmsnorm_quantize(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *residual_tensor,
                                    const pydet_tensor *weight_tensor, const pydet_tensor *out_tensor,
                                    const pydet_tensor *scale_tensor, const pydet_tensor *y_tensor,
                                    const pydet_tensor *rstd_tensor, const pydet_tensor *sum_tensor,
                                    const pydet_rmsnorm_quantize_options *given) {
  const char *op = "rmsnorm_quantize";
  pydet_rmsnorm_quantize_options options = {};
  options.eps = 1e-6f;
  PYDET_TRY(read_options(op, given, &options));
  RmsNormQuantize norm = {};
  PYDET_TRY(read_rmsnorm_quantize(stream, x_tensor, residual_tensor, weight_tensor, out_tensor, scale_tensor, y_tensor,
                                  rstd_tensor, sum_tensor, options, &norm));
  return norm.rows == 0 ? nothing_to_write() : launch(op, norm, options.kernel);
}

pydet_status pydet_rmsnorm_backward(void *stream, const pydet_tensor *dy_tensor, const pydet_tensor *x_tensor,
                                    const pydet_tensor *weight_tensor, const pydet_tensor *rstd_tensor,
                                    const pydet_tensor *dresidual_tensor, const pydet_tensor *dx_tensor,
                                    const pydet_tensor *dweight_tensor, const pydet_rmsnorm_backward_options *given) {
  const char *op = "rmsnorm_backward";
  pydet_rmsnorm_backward_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View dy, x, weight, rstd, dresidual, dx, dweight, dbias;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "dy", kNormRow, dy_tensor, 1, &dy));
  PYDET_TRY(read_optional(op, "weight", kNormVector, weight_tensor, 1, &weight));
  PYDET_TRY(read(op, "rstd", kNormVector, rstd_tensor, 0, &rstd));
  PYDET_TRY(read_optional(op, "dresidual", kNormRow, dresidual_tensor, 1, &dresidual));
  PYDET_TRY(read_optional(op, "dx", kNormRow, dx_tensor, 1, &dx));
  PYDET_TRY(read_optional(op, "dweight", kNormVector, dweight_tensor, 1, &dweight));
  PYDET_TRY(read_optional(op, "dbias", kNormVector, options.dbias, 1, &dbias));
  const bool sums = dweight.present() || dbias.present();
  if (!dx.present() && !sums)
    return fail(PYDET_NULL_POINTER, "%s: dx, dweight and dbias are all NULL, want one of them", op);
  PYDET_TRY(unit_last_stride(x));
  const View *like[] = {&dresidual, &dx};
  int64_t heads = 1;
  PYDET_TRY(check_norm(x, like, 0, View{}, View{}));
  PYDET_TRY(check_like(x, dy, &x));
  PYDET_TRY(check_norm(x, like, 2, View{}, View{}));
  PYDET_TRY(check_flag(op, "block_sums", options.block_sums));
  const View of_block[] = {options.block_sums ? one_block("a block of dweight", dweight) : dweight,
                           options.block_sums ? one_block("a block of dbias", dbias) : dbias};
  PYDET_TRY(check_weights(x, {&weight, &of_block[0], &of_block[1]}, &heads));
  PYDET_TRY(check_norm(x, like, 0, View{}, rstd));
  PYDET_TRY(check_weight_offset(op, options.weight_offset));
  PYDET_TRY(check_sums(op, options.accumulate, dweight, dbias));
  const View *inputs[] = {&dy, &x, &weight, &rstd, &dresidual}, *outputs[] = {&dx, &dweight, &dbias};
  PYDET_TRY(outputs_apart(inputs, outputs));
  RowWalk walk;
  const View *walked[] = {&x, &dy, &dresidual, &dx};
  PYDET_TRY(walk_rows(walked, 4, &walk, 3));

  int64_t columns = 0;
  if (__builtin_mul_overflow(heads, x.cols(), &columns))
    return fail(PYDET_OVERFLOW, "%s: weights of %" PRId64 " heads pass 2^63 - 1 elements", op, heads);
  if (options.block_sums) PYDET_TRY(check_block_sums(x, walk.rows / heads, options.accumulate, {&dweight, &dbias}));
  const int count = dbias.present() ? 2 : dweight.present() ? 1 : 0;
  PYDET_TRY(check_backward_workspace(op, options, walk.rows / heads, columns, count, inputs, outputs));
  if (walk.rows == 0 && (!sums || options.block_sums)) return nothing_to_write();

  auto norm = backward_of<RmsNormBackward>(stream, walked, walk, weight, rstd, dweight, dbias, options);
  norm.outer = walk.outer;
  norm.heads = heads;
  norm.block_sums = options.block_sums != 0;
  return launch(op, norm, options.kernel);
}

pydet_status pydet_rmsnorm_backward_workspace(int64_t rows, int64_t n, uint64_t *bytes) {
  return checked_backward_workspace("rmsnorm_backward_workspace", rows, n, 1, bytes);
}

pydet_status pydet_layernorm(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *residual_tensor,
                             const pydet_tensor *weight_tensor, const pydet_tensor *bias_tensor,
                             const pydet_tensor *y_tensor, const pydet_tensor *mean_tensor,
                             const pydet_tensor *rstd_tensor, const pydet_tensor *sum_tensor,
                             const pydet_layernorm_options *given) {
  const char *op = "layernorm";
  pydet_layernorm_options options = {};
  options.eps = 1e-5f;
  PYDET_TRY(read_options(op, given, &options));
  View x, residual, weight, bias, y, mean, rstd, sum;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read_optional(op, "residual", kNormRow, residual_tensor, 1, &residual));
  PYDET_TRY(read_optional(op, "weight", kNormVector, weight_tensor, 1, &weight));
  PYDET_TRY(read_optional(op, "bias", kNormVector, bias_tensor, 1, &bias));
  PYDET_TRY(read(op, "y", kNormRow, y_tensor, 1, &y));
  PYDET_TRY(read_optional(op, "mean", kNormVector, mean_tensor, 0, &mean));
  PYDET_TRY(read_optional(op, "rstd", kNormVector, rstd_tensor, 0, &rstd));
  PYDET_TRY(read_optional(op, "sum", kNormRow, sum_tensor, 1, &sum));
  PYDET_TRY(both_or_neither(op, residual, sum));
  PYDET_TRY(unit_last_stride(x));
  const View *like[] = {&residual, &y, &sum};
  PYDET_TRY(check_norm(x, like, 3, weight, rstd));
  PYDET_TRY(check_norm(x, like, 0, bias, mean));
  PYDET_TRY(check_eps(op, options.eps));
  PYDET_TRY(check_weight_offset(op, options.weight_offset));
  const View *inputs[] = {&x, &residual, &weight, &bias}, *outputs[] = {&y, &sum, &mean, &rstd};
  PYDET_TRY(outputs_apart(inputs, outputs));
  RowWalk walk;
  const View *walked[] = {&x, &residual, &y, &sum};
  PYDET_TRY(walk_rows(walked, 4, &walk));
  if (walk.rows == 0) return nothing_to_write();
  auto norm = forward_of<LayerNorm>(stream, walked, walk, weight, bias, rstd, options);
  norm.mean = vector_of(mean);
  return launch(op, norm, options.kernel);
}

pydet_status pydet_layernorm_backward(void *stream, const pydet_tensor *dy_tensor, const pydet_tensor *x_tensor,
                                      const pydet_tensor *weight_tensor, const pydet_tensor *mean_tensor,
                                      const pydet_tensor *rstd_tensor, const pydet_tensor *dresidual_tensor,
                                      const pydet_tensor *dx_tensor, const pydet_tensor *dweight_tensor,
                                      const pydet_tensor *dbias_tensor, const pydet_layernorm_backward_options *given) {
  const char *op = "layernorm_backward";
  pydet_layernorm_backward_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View dy, x, weight, mean, rstd, dresidual, dx, dweight, dbias;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "dy", kNormRow, dy_tensor, 1, &dy));
  PYDET_TRY(read_optional(op, "weight", kNormVector, weight_tensor, 1, &weight));
  PYDET_TRY(read(op, "mean", kNormVector, mean_tensor, 0, &mean));
  PYDET_TRY(read(op, "rstd", kNormVector, rstd_tensor, 0, &rstd));
  PYDET_TRY(read_optional(op, "dresidual", kNormRow, dresidual_tensor, 1, &dresidual));
  PYDET_TRY(read_optional(op, "dx", kNormRow, dx_tensor, 1, &dx));
  PYDET_TRY(read_optional(op, "dweight", kNormVector, dweight_tensor, 1, &dweight));
  PYDET_TRY(read_optional(op, "dbias", kNormVector, dbias_tensor, 1, &dbias));
  const bool sums = dweight.present() || dbias.present();
  if (!dx.present() && !sums)
    return fail(PYDET_NULL_POINTER, "%s: dx, dweight and dbias are all NULL, want one of them", op);
  PYDET_TRY(unit_last_stride(x));
  const View *like[] = {&dy, &dresidual, &dx};
  PYDET_TRY(check_norm(x, like, 3, weight, rstd));
  PYDET_TRY(check_norm(x, like, 0, dweight, mean));
  PYDET_TRY(check_norm(x, like, 0, dbias, View{}));
  PYDET_TRY(check_weight_offset(op, options.weight_offset));
  PYDET_TRY(check_sums(op, options.accumulate, dweight, dbias));
  const View *inputs[] = {&dy, &x, &weight, &mean, &rstd, &dresidual}, *outputs[] = {&dx, &dweight, &dbias};
  PYDET_TRY(outputs_apart(inputs, outputs));
  RowWalk walk;
  const View *walked[] = {&x, &dy, &dresidual, &dx};
  PYDET_TRY(walk_rows(walked, 4, &walk));

  PYDET_TRY(check_backward_workspace(op, options, walk.rows, x.cols(), sums ? 2 : 0, inputs, outputs));
  if (walk.rows == 0 && !sums) return nothing_to_write();

  auto norm = backward_of<LayerNormBackward>(stream, walked, walk, weight, rstd, dweight, dbias, options);
  norm.mean = vector_of(mean);
  return launch(op, norm, options.kernel);
}

pydet_status pydet_layernorm_backward_workspace(int64_t rows, int64_t n, uint64_t *bytes) {
  return checked_backward_workspace("layernorm_backward_workspace", rows, n, 2, bytes);
}
