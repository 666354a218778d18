// Sampling of tokens, and the k largest of a row.

#include "core/launch.h"
#include "ops/sample/check.h"

using namespace pydet;

namespace {

// The problems as they are checked, rows 0 where there is nothing to write. Never a part of their callers, whose stack is
// what a kernel has beside its own.
__attribute__((noinline)) pydet_status sample_of(const char *op, const pydet_tensor *x_tensor,
                                                 const pydet_tensor *seed_tensor, const pydet_tensor *position_tensor,
                                                 const pydet_tensor *token_tensor, const pydet_tensor *log_prob_tensor,
                                                 const pydet_tensor *filtered_log_prob_tensor,
                                                 const pydet_sample_options &options, Sample *sample) {
  PYDET_TRY(check_temperature(op, options.temperature));
  PYDET_TRY(check_top_k(op, options.top_k));
  PYDET_TRY(check_part(op, "top_p", options.top_p));
  PYDET_TRY(check_part(op, "min_p", options.min_p));
  View x, log_prob, filtered_log_prob, temperatures, top_ps, min_ps;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read_optional(op, "log_prob", kNormVector, log_prob_tensor, 0, &log_prob));
  PYDET_TRY(read_optional(op, "filtered_log_prob", kNormVector, filtered_log_prob_tensor, 0, &filtered_log_prob));
  PYDET_TRY(read_optional(op, "temperatures", kNormVector, options.temperatures, 0, &temperatures));
  PYDET_TRY(read_optional(op, "top_ps", kNormVector, options.top_ps, 0, &top_ps));
  PYDET_TRY(read_optional(op, "min_ps", kNormVector, options.min_ps, 0, &min_ps));
  PYDET_TRY(unit_last_stride(x));
  PYDET_TRY(check_columns(x, kMostColumns));
  WholeNumbers seed = {}, position = {}, top_ks = {}, token = {};
  PYDET_TRY(whole_numbers_of_rows(x, "seed", seed_tensor, &seed, &sample->seed));
  PYDET_TRY(whole_numbers_of_rows(x, "position", position_tensor, &position, &sample->position));
  if (options.top_ks) PYDET_TRY(whole_numbers_of_rows(x, "top_ks", options.top_ks, &top_ks, &sample->top_ks));
  PYDET_TRY(whole_numbers(x, "token", token_tensor, x.shape, x.ndim - 1, false, &token));
  for (const View *vector : {&log_prob, &filtered_log_prob, &temperatures, &top_ps, &min_ps})
    PYDET_TRY(one_a_row(x, *vector));
  PYDET_TRY(outputs_apart({&x, &seed.words, &position.words, &top_ks.words, &temperatures, &top_ps, &min_ps},
                          {&token.words, &log_prob, &filtered_log_prob}));
  RowWalk walk;
  const View *walked[] = {&x};
  PYDET_TRY(walk_rows(walked, 1, &walk));
  sample->device = x.device;
  sample->rows = walk.rows;
  sample->inner = walk.inner;
  sample->n = x.cols();
  sample->x = rows_of(x, walk, 0);
  sample->temperature = options.temperature;
  sample->top_p = options.top_p;
  sample->min_p = options.min_p;
  sample->top_k = options.top_k;
  sample->temperatures = vector_of(temperatures);
  sample->top_ps = vector_of(top_ps);
  sample->min_ps = vector_of(min_ps);
  sample->log_prob = vector_of(log_prob);
  sample->filtered_log_prob = vector_of(filtered_log_prob);
  sample->token = token.words.data;
  return PYDET_OK;
}

__attribute__((noinline)) pydet_status topk_of(const char *op, const pydet_tensor *x_tensor,
                                               const pydet_tensor *values_tensor, const pydet_tensor *index_tensor,
                                               TopK *topk) {
  constexpr int64_t kMost = (int64_t(1) << 31) - 1;
  View x, values;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "values", kNormRow, values_tensor, 1, &values));
  PYDET_TRY(unit_last_stride(x));
  PYDET_TRY(check_columns(x, kMost));
  PYDET_TRY(same_device(x, values));
  PYDET_TRY(same_type(x, values));
  int64_t shape[kMaxDims];
  for (int i = 0; i < x.ndim; ++i) shape[i] = x.shape[i];
  if (values.ndim == x.ndim) shape[x.ndim - 1] = values.cols();
  PYDET_TRY(want_shape(values, shape, x.ndim));
  const int64_t k = values.cols();
  if (k < 1 || k > x.cols())
    return fail(PYDET_INVALID_SHAPE, "%s: values is %s, want a last dimension from 1 to %" PRId64 ", as x has", op,
                shape_text(values).text, x.cols());
  PYDET_TRY(contiguous(values));
  WholeNumbers index = {};
  PYDET_TRY(whole_numbers(x, "index", index_tensor, shape, x.ndim, false, &index));
  PYDET_TRY(outputs_apart({&x}, {&values, &index.words}));
  RowWalk walk;
  const View *walked[] = {&x};
  PYDET_TRY(walk_rows(walked, 1, &walk));
  *topk = {x.device,          nullptr,         walk.rows, walk.inner, x.cols(), k, rows_of(x, walk, 0),
           vector_of(values), index.words.data};
  return PYDET_OK;
}

}  // namespace

pydet_status pydet_sample(void *stream, const pydet_tensor *x, const pydet_tensor *seed, const pydet_tensor *position,
                          const pydet_tensor *token, const pydet_tensor *log_prob,
                          const pydet_tensor *filtered_log_prob, const pydet_sample_options *given) {
  const char *op = "sample";
  pydet_sample_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  Sample sample = {};
  PYDET_TRY(sample_of(op, x, seed, position, token, log_prob, filtered_log_prob, options, &sample));
  sample.stream = stream;
  return sample.rows ? launch(op, sample, options.kernel) : nothing_to_write();
}

pydet_status pydet_topk(void *stream, const pydet_tensor *x, const pydet_tensor *values, const pydet_tensor *index,
                        const pydet_topk_options *given) {
  const char *op = "topk";
  pydet_topk_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  TopK topk = {};
  PYDET_TRY(topk_of(op, x, values, index, &topk));
  topk.stream = stream;
  return topk.rows ? launch(op, topk, options.kernel) : nothing_to_write();
}
