// Argument checks of recurrences over tokens.
#pragma once

#include "ops/softmax/check.h"

namespace pydet {

inline Strided strided(const View &view) {
  Strided out = {};
  if (!view.present()) return out;
  out.data = view.data, out.type = view.type;
  for (int i = 0; i < view.ndim && i < 4; ++i) out.stride[i] = view.stride[i];
  return out;
}

inline pydet_status want_dims(const View &view, int ndim, const char *what) {
  if (view.ndim == ndim) return PYDET_OK;
  return fail(PYDET_INVALID_SHAPE, "%s: %s is %s, want %s", view.op, view.name, shape_text(view).text, what);
}

inline pydet_status want_fp32(const View &view) {
  if (!view.present() || view.type == Type::f32) return PYDET_OK;
  return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want float32", view.op, view.name, type_name(view.type));
}

// Where the sequences lie among the tokens of x [batch, tokens, ...]. The CPU looks at each boundary before anything is
// written; on a GPU, where nobody waits for them, they are taken into the tokens, and none begins before itself.
inline pydet_status sequences_of(const View &x, const pydet_tensor *tensor, View *words, Sequences *sequences) {
  const char *op = x.op, *name = "cu_seqlens";
  *sequences = {x.shape[0], x.shape[1], nullptr, false};
  *words = View{};
  if (!tensor) return PYDET_OK;
  if (x.shape[0] != 1)
    return fail(PYDET_INVALID_SHAPE, "%s: %s is given and %s is %s, want a pack: a batch of 1", op, name, x.name,
                shape_text(x).text);
  if (tensor->ndim != 1 || !tensor->shape || tensor->shape[0] < 1)
    return fail(PYDET_INVALID_SHAPE, "%s: %s is no vector of 1 boundary or more", op, name);
  WholeNumbers numbers = {};
  PYDET_TRY(whole_numbers(x, name, tensor, tensor->shape, 1, true, &numbers));
  *words = numbers.words;
  *sequences = {tensor->shape[0] - 1, x.shape[1], numbers.words.data, numbers.wide};
  if (x.device.type != PYDET_CPU) return PYDET_OK;
  int64_t before = 0;
  for (int64_t s = 0; s <= sequences->count; ++s) {
    const int64_t start = sequences->wide ? static_cast<const int64_t *>(sequences->starts)[s]
                                          : static_cast<const int32_t *>(sequences->starts)[s];
    const bool whole = (s > 0 || start == 0) && (s < sequences->count || start == sequences->tokens);
    if (start < before || start > sequences->tokens || !whole)
      return fail(PYDET_INVALID_VALUE,
                  "%s: %s has %" PRId64 " at %" PRId64 ", want boundaries that ascend from 0 to the %" PRId64 " tokens",
                  op, name, start, s, sequences->tokens);
    before = start;
  }
  return PYDET_OK;
}

// States in fp32, of which none need be given.
template <int count>
pydet_status check_each_state(const View &x, const View *const (&states)[count], const int64_t (&shape)[4]) {
  for (const View *state : states) {
    if (!state->present()) continue;
    PYDET_TRY(same_device(x, *state));
    PYDET_TRY(want_shape(*state, shape, 4));
    PYDET_TRY(want_fp32(*state));
  }
  return PYDET_OK;
}

// Each state is written after it was read, by who read it: the last one may lie where the first one does.
inline pydet_status check_states(const View &x, const View &initial, const View &final, const int64_t (&shape)[4]) {
  const View *states[] = {&initial, &final};
  PYDET_TRY(check_each_state(x, states, shape));
  if (!initial.present() || !final.present()) return PYDET_OK;
  bool same = initial.data == final.data;
  for (int i = 0; same && i < 4; ++i) same = initial.stride[i] == final.stride[i];
  return same ? PYDET_OK : disjoint(final, initial);
}

inline pydet_status check_number(const View &x, const char *what, int64_t count, int64_t most) {
  if (count >= 1 && count <= most) return PYDET_OK;
  return fail(PYDET_INVALID_SHAPE, "%s: %s has %" PRId64 " %s, want 1 to %" PRId64, x.op, x.name, count, what, most);
}

inline pydet_status check_groups(const View &x, int64_t heads, const View &of) {
  const int64_t groups = of.shape[2];
  if (groups > 0 && heads % groups == 0) return PYDET_OK;
  return fail(PYDET_INVALID_SHAPE, "%s: %s has %" PRId64 " heads, want a multiple of the %" PRId64 " of %s", x.op,
              x.name, heads, groups, of.name);
}

// The operands of the selective scan beside x [batch, tokens, heads, width] and b [batch, tokens, groups, states].
inline pydet_status check_selective(const View &x, const View &dt, const View &a, const View &b, const View &c) {
  const int64_t heads = x.shape[2], states = b.shape[3];
  const int64_t of_b[] = {x.shape[0], x.shape[1], b.shape[2], states}, of_a[] = {heads, states};
  PYDET_TRY(want_shape(dt, x.shape, 3));
  PYDET_TRY(want_shape(b, of_b, 4));
  PYDET_TRY(want_shape(c, of_b, 4));
  PYDET_TRY(check_number(b, "states", states, kMostStates));
  PYDET_TRY(check_groups(x, heads, b));
  return want_shape(a, of_a, a.ndim == 2 ? 2 : 1);
}

// Those of the gated delta rule beside v [batch, tokens, heads, width] and k [batch, tokens, groups, keys].
inline pydet_status check_delta(const View &q, const View &k, const View &v, const View &g, const View &beta) {
  const int64_t of_k[] = {v.shape[0], v.shape[1], k.shape[2], k.shape[3]};
  PYDET_TRY(want_shape(k, of_k, 4));
  PYDET_TRY(want_shape(q, of_k, 4));
  PYDET_TRY(want_shape(g, v.shape, 3));
  PYDET_TRY(want_shape(beta, v.shape, 3));
  PYDET_TRY(check_number(k, "elements in a key", k.shape[3], kMostStates));
  return check_groups(v, v.shape[2], k);
}

}  // namespace pydet
