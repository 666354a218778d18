// Attention: Views become the problem.
#pragma once

#include "ops/gemm/check.h"
#include "ops/norm/check.h"
#include "ops/attention/formulas.h"

namespace pydet {

// The operands as they were given.
struct AttentionViews {
  View q, k, v, out, lse, sinks, allowed, bias, first_key, q_start, k_start, k_length, pages;
};

// Integers on the device, int32 and contiguous; `least_ndim` dimensions. Read as words of 4 bytes, which nothing here looks
// into.
inline pydet_status read_integers(const char *op, const char *name, const pydet_tensor *tensor, int ndim, View *view) {
  *view = {};
  if (!tensor) return PYDET_OK;
  if (tensor->dtype.code != PYDET_INT || tensor->dtype.bits != 32 || tensor->dtype.lanes != 1)
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want int32", op, name, dtype_text(tensor->dtype).text);
  pydet_tensor words = *tensor;
  words.dtype = {PYDET_FLOAT, 32, 1};
  PYDET_TRY(read(op, name, kNormVector, &words, ndim, view));
  if (view->ndim != ndim)
    return fail(PYDET_INVALID_SHAPE, "%s: %s has %d dimensions, want %d", op, name, view->ndim, ndim);
  return PYDET_OK;
}
inline const int32_t *integers(const View &view) { return reinterpret_cast<const int32_t *>(view.data); }

// Bools, a byte each, as bytes of a type that has one.
inline pydet_status read_bools(const char *op, const char *name, const pydet_tensor *tensor, View *view) {
  *view = {};
  if (!tensor) return PYDET_OK;
  if (tensor->dtype.code != PYDET_BOOL || tensor->dtype.bits != 8 || tensor->dtype.lanes != 1)
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want bool", op, name, dtype_text(tensor->dtype).text);
  pydet_tensor bytes = *tensor;
  bytes.dtype = {PYDET_FLOAT8_E4M3FN, 8, 1};
  return read(op, name, kScaledFactor, &bytes, 0, view);
}

inline pydet_status want_ndim(const View &view, int ndim, const char *shape) {
  if (view.ndim == ndim) return PYDET_OK;
  return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want %s", view.op, view.name, shape_text(view).text, shape);
}

inline pydet_status check_heads(const View &q, int64_t heads, int64_t groups) {
  if (groups > 0 && heads % groups == 0) return PYDET_OK;
  return fail(PYDET_INVALID_SHAPE, "%s: q has %" PRId64 " heads, want a multiple of the %" PRId64 " of k and v", q.op,
              heads, groups);
}

inline pydet_status check_widths(const char *op, int64_t d, int64_t e) {
  const bool even = d >= 8 && d <= 256 && d % 8 == 0 && e >= 8 && e <= 256 && e % 8 == 0;
  if (even || (d == 576 && e == 512)) return PYDET_OK;
  return fail(PYDET_INVALID_SHAPE,
              "%s: heads of q and k have %" PRId64 " elements and those of v %" PRId64
              ", want multiples of 8 from 8 to 256, or 576 and 512",
              op, d, e);
}

// What is [..., queries, keys] of every sequence and head, dimensions of 1 or left out in front being the same for all.
inline pydet_status pairs_of(const View &view, const Attention &a, Pairs *pairs) {
  if (!view.present()) return PYDET_OK;
  const int64_t full[] = {a.sequences, a.heads, a.queries, a.keys};
  int64_t strides[4] = {};
  bool fits = view.ndim <= 4;
  for (int i = 0; fits && i < view.ndim; ++i) {
    const int at = 4 - view.ndim + i;
    fits = view.shape[i] == full[at] || view.shape[i] == 1;
    strides[at] = view.shape[i] == 1 ? 0 : view.stride[i];
  }
  if (!fits)
    return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want one that broadcasts to %s", view.op, view.name,
                shape_text(view).text, shape_text(full, 4).text);
  *pairs = {view.data, view.type, strides[0], strides[1], strides[2], strides[3]};
  return PYDET_OK;
}

// Vectors of heads: [B, H, T, ...], or [T, H, ...] of a pack.
inline Heads heads_of(const View &view, bool packed) {
  return {view.data, view.type, packed ? 0 : view.stride[0], view.stride[1], view.stride[packed ? 0 : 2]};
}

// Sequences, their keys and where those lie.
inline pydet_status keys_of_views(const AttentionViews &x, Attention *a) {
  const char *op = x.q.op;
  const bool packed = x.k_start.present(), paged = x.pages.present();
  if (packed && paged)
    return fail(PYDET_INVALID_VALUE, "%s: cu_seqlens_k is given with block_table, want one of them", op);
  if (packed && x.k_length.present())
    return fail(PYDET_INVALID_VALUE, "%s: seqlens_k is given with cu_seqlens_k, want one of them", op);
  if (paged && !x.k_length.present())
    return fail(PYDET_NULL_POINTER, "%s: seqlens_k is NULL, want the keys of each sequence beside block_table", op);
  const char *shape = packed ? "TxGxD, since cu_seqlens_k is given" : paged ? "PxSxGxD, pages of S keys" : "BxGxKxD";
  PYDET_TRY(want_ndim(x.k, packed ? 3 : 4, shape));
  int64_t like_k[4];
  for (int i = 0; i < x.k.ndim; ++i) like_k[i] = x.k.shape[i];
  if (x.v.ndim == x.k.ndim) like_k[x.k.ndim - 1] = x.v.cols();
  PYDET_TRY(want_shape(x.v, like_k, x.k.ndim));
  const int head = packed ? 1 : paged ? 2 : 1, token = packed ? 0 : paged ? 1 : 2;
  a->groups = x.k.shape[head];
  a->d = x.k.cols(), a->e = x.v.cols();
  for (auto [view, heads] : {std::pair<const View *, Heads *>{&x.k, &a->k}, {&x.v, &a->v}})
    *heads = {view->data, view->type, packed ? 0 : view->stride[0], view->stride[head], view->stride[token]};
  a->keys = x.k.shape[token];
  if (packed && x.k_start.shape[0] != a->sequences + 1)
    return fail(PYDET_INVALID_SHAPE, "%s: cu_seqlens_k is %s, want %" PRId64, op, shape_text(x.k_start).text,
                a->sequences + 1);
  if (!packed && !paged && x.k.shape[0] != a->sequences)
    return fail(PYDET_INVALID_SHAPE, "%s: k is %s, want one of %" PRId64 " sequences", op, shape_text(x.k).text,
                a->sequences);
  for (const View *view : {&x.k_length, &x.first_key})
    if (view->present()) PYDET_TRY(want_shape(*view, &a->sequences, 1));
  a->k_start = integers(x.k_start), a->k_length = integers(x.k_length), a->first_key = integers(x.first_key);
  if (!paged) return PYDET_OK;
  if (x.pages.shape[0] != a->sequences)
    return fail(PYDET_INVALID_SHAPE, "%s: block_table is %s, want %" PRId64 " rows, one a sequence", op,
                shape_text(x.pages).text, a->sequences);
  PYDET_TRY(unit_last_stride(x.pages));
  a->pages = integers(x.pages), a->pages_stride = x.pages.stride[0];
  a->page_size = a->keys, a->page_count = x.k.shape[0];
  if (__builtin_mul_overflow(a->page_size, x.pages.shape[1], &a->keys))
    return fail(PYDET_OVERFLOW, "%s: block_table is %s, of pages of %" PRId64 " keys: more than 2^63 - 1", op,
                shape_text(x.pages).text, a->page_size);
  if (x.k.empty()) a->keys = 0;
  return PYDET_OK;
}

inline pydet_status check_window_side(const char *op, const char *name, int64_t keys) {
  if (keys >= kNoWindow && keys <= int64_t(1) << 40) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: options.%s is %" PRId64 ", want 0 to 2^40 keys, or -1 for any", op, name, keys);
}

// No memory holds more; counts of what is longer do not overflow.
constexpr int64_t kMostTokens = int64_t(1) << 40;

inline pydet_status check_segment(const char *op, int64_t kv_chunk, int64_t *used) {
  if (kv_chunk < 0 || kv_chunk % kSegmentMultiple)
    return fail(PYDET_INVALID_VALUE, "%s: kv_chunk is %" PRId64 ", want a positive multiple of %d", op, kv_chunk,
                kSegmentMultiple);
  *used = kv_chunk == 0 ? kSegmentDefault : kv_chunk < kMostTokens ? kv_chunk : kMostTokens;
  return PYDET_OK;
}

// The operands that the forward has, and where they lie.
inline pydet_status operands_of(const AttentionViews &x, Attention *a) {
  const View &q = x.q;
  const char *op = q.op;
  const bool packed = x.q_start.present();
  for (const View *other : {&x.k, &x.v, &x.sinks, &x.allowed, &x.bias, &x.first_key, &x.q_start, &x.k_start,
                            &x.k_length, &x.pages, &x.out, &x.lse})
    PYDET_TRY(same_device(q, *other));
  for (const View *other : {&x.k, &x.v, &x.out}) PYDET_TRY(same_type(q, *other));
  PYDET_TRY(want_ndim(q, packed ? 3 : 4, packed ? "TxHxD, since cu_seqlens_q is given" : "BxHxQxD"));
  const int token = packed ? 0 : 2;
  if (packed && x.q_start.shape[0] < 1)
    return fail(PYDET_INVALID_SHAPE, "%s: cu_seqlens_q is empty, want one number more than there are sequences", op);
  a->sequences = packed ? x.q_start.shape[0] - 1 : q.shape[0];
  a->heads = q.shape[1];
  a->queries = q.shape[token];
  a->q_start = integers(x.q_start);
  PYDET_TRY(keys_of_views(x, a));
  PYDET_TRY(check_heads(q, a->heads, a->groups));
  if (q.cols() != a->d)
    return fail(PYDET_INVALID_SHAPE, "%s: k is %s, want heads of %" PRId64 " elements as q's", op, shape_text(x.k).text,
                q.cols());
  PYDET_TRY(check_widths(op, a->d, a->e));
  int64_t like_q[kMaxDims];
  for (int i = 0; i + 1 < q.ndim; ++i) like_q[i] = q.shape[i];
  if (x.lse.present()) {
    PYDET_TRY(want_shape(x.lse, like_q, q.ndim - 1));
    if (x.lse.type != Type::f32)
      return fail(PYDET_INVALID_DTYPE, "%s: lse is %s, want float32", op, type_name(x.lse.type));
  }
  like_q[q.ndim - 1] = a->e;
  PYDET_TRY(want_shape(x.out, like_q, q.ndim));
  for (const View *view : {&q, &x.k, &x.v, &x.out}) PYDET_TRY(unit_last_stride(*view));
  a->q = heads_of(q, packed), a->out = heads_of(x.out, packed);
  if (x.lse.present()) a->lse = heads_of(x.lse, packed);
  if (x.sinks.present()) {
    PYDET_TRY(want_shape(x.sinks, &a->heads, 1));
    PYDET_TRY(contiguous(x.sinks));
    a->sinks = vector_of(x.sinks);
  }
  for (const View *view : {&x.first_key, &x.q_start, &x.k_start, &x.k_length}) PYDET_TRY(contiguous(*view));
  for (const View *view : {&x.allowed, &x.bias})
    if (view->present() && (packed || x.k_start.present()))
      return fail(PYDET_UNSUPPORTED,
                  "%s: %s is given with packed sequences, want none with cu_seqlens_q or cu_seqlens_k", op, view->name);
  PYDET_TRY(pairs_of(x.allowed, *a, &a->allowed));
  return pairs_of(x.bias, *a, &a->bias);
}

// What the options of both directions say alike. inputs, outputs: what the workspace is to be apart from.
template <class Options, size_t in, size_t out>
pydet_status settings_of(const View &q, const Options &options, const View *const (&inputs)[in],
                         const View *const (&outputs)[out], Attention *a) {
  const char *op = q.op;
  a->device = q.device;
  PYDET_TRY(resolve(op, a->device, q.type, options.arithmetic, &a->arithmetic));
  PYDET_TRY(check_scale(op, "scale", options.scale, true));
  PYDET_TRY(check_scale(op, "softcap", options.softcap, true));
  PYDET_TRY(check_flag(op, "causal", options.causal));
  PYDET_TRY(check_flag(op, "window", options.window));
  PYDET_TRY(check_window_side(op, "window_left", options.window_left));
  PYDET_TRY(check_window_side(op, "window_right", options.window_right));
  a->scale = options.scale != 0 ? options.scale : f32_from_f64(1.0 / __builtin_sqrt(double(a->d)));
  a->softcap = options.softcap;
  a->causal = options.causal != 0;
  a->window_left = options.window ? options.window_left : kNoWindow;
  a->window_right = options.window ? options.window_right : kNoWindow;
  PYDET_TRY(check_workspace(op, options.workspace, options.workspace_size));
  PYDET_TRY(workspace_apart(inputs, options.workspace, options.workspace_size));
  return workspace_apart(outputs, options.workspace, options.workspace_size);
}

inline pydet_status attention_of(const AttentionViews &x, const pydet_attention_options &options, Attention *a) {
  const View *inputs[] = {&x.q,         &x.k,       &x.v,       &x.sinks,    &x.allowed, &x.bias,
                          &x.first_key, &x.q_start, &x.k_start, &x.k_length, &x.pages};
  const View *outputs[] = {&x.out, &x.lse};
  PYDET_TRY(operands_of(x, a));
  PYDET_TRY(outputs_apart(inputs, outputs));
  PYDET_TRY(settings_of(x.q, options, inputs, outputs, a));
  PYDET_TRY(check_segment(x.q.op, options.kv_chunk, &a->kv_chunk));
  a->workspace = options.workspace, a->workspace_size = options.workspace_size;
  return PYDET_OK;
}

// ---- Backward ------------------------------------------------------------------------------------------------------

struct AttentionBackwardViews {
  AttentionViews forward;
  View dout, dq, dk, dv, dsinks;
};

// A gradient of `like`, of its shape: in fp32, or of its type unless it `continues`.
inline pydet_status check_gradient(const View &gradient, const View &like, bool continues) {
  if (!gradient.present()) return PYDET_OK;
  PYDET_TRY(same_device(like, gradient));
  PYDET_TRY(want_shape(gradient, like.shape, like.ndim));
  if (gradient.type == Type::f32) return unit_last_stride(gradient);
  if (continues)
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want float32 under accumulate", gradient.op, gradient.name,
                type_name(gradient.type));
  if (gradient.type != like.type)
    return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want %s as %s is, or float32", gradient.op, gradient.name,
                type_name(gradient.type), type_name(like.type), like.name);
  return unit_last_stride(gradient);
}

inline pydet_status attention_backward_of(const AttentionBackwardViews &b,
                                          const pydet_attention_backward_options &options, AttentionBackward *to) {
  const AttentionViews &x = b.forward;
  Attention &a = to->forward;
  const char *op = x.q.op;
  const View *inputs[] = {&x.q,       &x.k,    &x.v,         &x.out,     &x.lse,     &b.dout,    &x.sinks,
                          &x.allowed, &x.bias, &x.first_key, &x.q_start, &x.k_start, &x.k_length};
  const View *outputs[] = {&b.dq, &b.dk, &b.dv, &b.dsinks};
  PYDET_TRY(operands_of(x, &a));
  PYDET_TRY(check_flag(op, "accumulate", options.accumulate));
  to->accumulate = options.accumulate != 0;
  PYDET_TRY(same_device(x.q, b.dout));
  PYDET_TRY(same_type(x.q, b.dout));
  PYDET_TRY(want_shape(b.dout, x.out.shape, x.out.ndim));
  PYDET_TRY(unit_last_stride(b.dout));
  if (b.dk.present() != b.dv.present())
    return fail(PYDET_NULL_POINTER, "%s: %s is given without %s, want both or neither", op,
                b.dk.present() ? "dk" : "dv", b.dk.present() ? "dv" : "dk");
  if (!b.dq.present() && !b.dk.present() && !b.dsinks.present())
    return fail(PYDET_NULL_POINTER, "%s: dq, dk, dv and dsinks are NULL, want one of them", op);
  if (to->accumulate && !b.dk.present() && !b.dsinks.present())
    return fail(PYDET_NULL_POINTER, "%s: dk, dv and dsinks are NULL, want some of them under accumulate", op);
  PYDET_TRY(check_gradient(b.dq, x.q, false));
  PYDET_TRY(check_gradient(b.dk, x.k, to->accumulate));
  PYDET_TRY(check_gradient(b.dv, x.v, to->accumulate));
  if (b.dsinks.present()) {
    if (!x.sinks.present()) return fail(PYDET_NULL_POINTER, "%s: dsinks is given without sinks, want both", op);
    PYDET_TRY(same_device(x.q, b.dsinks));
    PYDET_TRY(want_shape(b.dsinks, &a.heads, 1));
    PYDET_TRY(contiguous(b.dsinks));
    if (to->accumulate && b.dsinks.type != Type::f32)
      return fail(PYDET_INVALID_DTYPE, "%s: dsinks is %s, want float32 under accumulate", op, type_name(b.dsinks.type));
  }
  PYDET_TRY(outputs_apart(inputs, outputs));
  PYDET_TRY(settings_of(x.q, options, inputs, outputs, &a));
  to->device = a.device;
  const bool packed_q = x.q_start.present(), packed_k = x.k_start.present();
  to->dout = heads_of(b.dout, packed_q);
  if (b.dq.present()) to->dq = heads_of(b.dq, packed_q);
  if (b.dk.present()) to->dk = heads_of(b.dk, packed_k), to->dv = heads_of(b.dv, packed_k);
  to->dsinks = vector_of(b.dsinks);
  to->workspace = options.workspace, to->workspace_size = options.workspace_size;
  return PYDET_OK;
}

}  // namespace pydet
