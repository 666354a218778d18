// Argument checks of the head: its operands, what is asked of rows, and the sums over rows.
#pragma once

#include "ops/gemm/check.h"
#include "ops/head/problem.h"
#include "ops/softmax/check.h"

namespace pydet {

// [..., K] as one matrix of rows.
inline pydet_status one_matrix(View *view) {
  if (!view->present()) return PYDET_OK;
  const View given = *view;
  View *views[] = {view};
  merge_rows(views, 1);
  if (view->ndim == 2) return PYDET_OK;
  if (!given.empty())
    return fail(PYDET_INVALID_STRIDE, "%s: the rows of %s, %s, are not one stride apart, as those of a copy are",
                given.op, given.name, shape_text(given).text);
  for (; view->ndim > 2; --view->ndim) {  // nothing lies anywhere
    view->shape[0] *= view->shape[1];
    for (int i = 1; i + 1 < view->ndim; ++i) view->shape[i] = view->shape[i + 1];
  }
  return PYDET_OK;
}

// The type that logits are rounded to: x's where none is asked for.
inline pydet_status logits_of(const char *op, pydet_dtype asked, Type of_x, Type *logits) {
  *logits = of_x;
  if (asked.bits == 0 && asked.code == 0 && asked.lanes == 0) return PYDET_OK;
  if (type_of(asked, logits) && (kUnscaledTypes & bit(*logits))) return PYDET_OK;
  return fail(PYDET_INVALID_DTYPE, "%s: options.logits is %s, want float32, bfloat16 or float16", op,
              dtype_text(asked).text);
}

// ---- Operands ----------------------------------------------------------------------------------------------------

// As a caller gave them; `index` is the column of each row, by the name that it has there.
struct HeadTensors {
  const pydet_tensor *x, *w, *bias, *index;
  const char *index_name;
};
struct HeadViews {
  View given, x, w, bias, index;  // given: x as it is, whose leading dimensions are those of what has a number a row
};

inline pydet_status read_head(const char *op, void *stream, const HeadTensors &tensors,
                              const pydet_linear_log_prob_options &options, HeadViews *views, LinearLogProb *p) {
  View &x = views->x, &w = views->w, &bias = views->bias;
  PYDET_TRY(read(op, "x", kFactor, tensors.x, 1, &x));
  PYDET_TRY(read(op, "w", kFactor, tensors.w, 2, &w));
  PYDET_TRY(read_optional(op, "bias", kAddend, tensors.bias, 1, &bias));
  PYDET_TRY(same_device(x, w));
  PYDET_TRY(same_device(x, bias));
  PYDET_TRY(same_type(x, w));
  if (w.ndim != 2 || w.cols() != x.cols())
    return fail(PYDET_INVALID_SHAPE, "%s: w is %s, want Nx%" PRId64, op, shape_text(w).text, x.cols());
  if (w.rows() == 0) return fail(PYDET_INVALID_SHAPE, "%s: w is %s, want a row or more", op, shape_text(w).text);
  if (bias.present()) PYDET_TRY(want_shape(bias, w.shape, 1));
  PYDET_TRY(resolve(op, x.device, x.type, options.arithmetic, &p->arithmetic));
  PYDET_TRY(check_chunk(op, options.k_chunk, kChunkMultiple));
  PYDET_TRY(check_workspace(op, options.workspace, options.workspace_size));

  WholeNumbers numbers = {};
  PYDET_TRY(whole_numbers(x, tensors.index_name, tensors.index, x.shape, x.ndim - 1, true, &numbers));
  views->index = numbers.words;
  views->given = x;
  p->index = {numbers.words.data, numbers.wide};
  PYDET_TRY(one_matrix(&x));
  PYDET_TRY(matrix_of(x, &p->x));
  PYDET_TRY(matrix_of(w, &p->w));
  p->bias = bias.present() ? Matrix{bias.data, bias.type, 1, w.rows(), 0, bias.stride[0]} : Matrix{};
  p->device = x.device;
  p->stream = stream;
  p->rows = x.rows();
  p->n = w.rows();
  p->k = x.cols();
  p->k_chunk = options.k_chunk;
  p->kernel = options.kernel;
  p->workspace = options.workspace;
  p->workspace_size = options.workspace_size;
  return logits_of(op, options.logits, p->x.type, &p->logits);
}

// One number a row of x as it was given, in fp32.
inline pydet_status read_of_rows(const View &x, const char *name, const pydet_tensor *tensor, View *vector,
                                 Vector *data) {
  PYDET_TRY(read(x.op, name, kNormVector, tensor, 0, vector));
  PYDET_TRY(one_a_row(x, *vector));
  *data = vector_of(*vector);
  return PYDET_OK;
}

// What is asked of rows beside log_prob: results, or the gradients by them.
struct AskedViews {
  View entropy, lse, mean, greedy;
};
inline pydet_status read_asked(const View &x, const pydet_linear_log_prob_options &options, AskedViews *views,
                               HeadAsked *asked) {
  PYDET_TRY(check_scale(x.op, "softcap", options.softcap, true));
  PYDET_TRY(check_scale(x.op, "temperature", options.temperature, true));
  asked->softcap = options.softcap;
  asked->temperature = options.temperature == 1.0f ? 0.0f : options.temperature;
  if (options.entropy) PYDET_TRY(read_of_rows(x, "entropy", options.entropy, &views->entropy, &asked->entropy));
  if (options.lse) PYDET_TRY(read_of_rows(x, "lse", options.lse, &views->lse, &asked->lse));
  if (options.mean) PYDET_TRY(read_of_rows(x, "mean", options.mean, &views->mean, &asked->mean));
  if (!options.greedy) return PYDET_OK;
  WholeNumbers numbers = {};
  PYDET_TRY(whole_numbers(x, "greedy", options.greedy, x.shape, x.ndim - 1, false, &numbers));
  views->greedy = numbers.words;
  asked->greedy = numbers.words.data;
  return PYDET_OK;
}

// ---- Gradients ---------------------------------------------------------------------------------------------------

// A sum over rows, [N, K] or [N].
inline pydet_status read_sum(const View &like, const char *name, const pydet_tensor *tensor, int ndim, bool accumulate,
                             View *sum) {
  PYDET_TRY(read_optional(like.op, name, kResult, tensor, 1, sum));
  if (!sum->present()) return PYDET_OK;
  PYDET_TRY(same_device(like, *sum));
  PYDET_TRY(want_shape(*sum, like.shape, ndim));
  PYDET_TRY(unit_last_stride(*sum));
  if (!accumulate || sum->type == Type::f32) return PYDET_OK;
  return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want float32 under accumulate", like.op, name, type_name(sum->type));
}

// What backward writes, each of which may be absent.
struct GradientTensors {
  const pydet_tensor *dx, *dw, *dbias;
};
struct GradientViews {
  View dx, dw, dbias;
};

inline pydet_status read_gradients(const HeadViews &head, const GradientTensors &tensors, bool accumulate,
                                   GradientViews *views) {
  View &dx = views->dx;
  PYDET_TRY(read_optional(head.given.op, "dx", kResult, tensors.dx, 1, &dx));
  if (dx.present()) {
    PYDET_TRY(same_device(head.given, dx));
    PYDET_TRY(want_shape(dx, head.given.shape, head.given.ndim));
    PYDET_TRY(unit_last_stride(dx));
  }
  PYDET_TRY(read_sum(head.w, "dw", tensors.dw, 2, accumulate, &views->dw));
  return read_sum(head.w, "dbias", tensors.dbias, 1, accumulate, &views->dbias);
}

// Once they are known to lie apart.
inline pydet_status set_gradients(const GradientViews &views, bool accumulate, LinearLogProb *p) {
  View dx = views.dx;
  const View &dw = views.dw, &dbias = views.dbias;
  PYDET_TRY(one_matrix(&dx));
  if (dx.present()) PYDET_TRY(matrix_of(dx, &p->dx));
  if (dw.present()) PYDET_TRY(matrix_of(dw, &p->dw));
  if (dbias.present()) p->dbias = {dbias.data, dbias.type, 1, dbias.cols(), dbias.cols(), 1};
  p->backward = true;
  p->accumulate = accumulate;
  return PYDET_OK;
}

}  // namespace pydet
