// Argument checks of fold.
#pragma once

#include "check/norm.h"

namespace pydet {

// The parts one by one, so that a call needs room for one of them alone; fold->tree and fold->accumulate are set.
inline pydet_status fold_of(const pydet_tensor *const *parts, int32_t count, const View &bias, const View &out,
                            Fold *fold) {
  if (!parts) return fail(PYDET_NULL_POINTER, "%s: parts is NULL, want an array of %d tensors", out.op, int(count));
  if (count < 1 || count > PYDET_FOLD_PARTS)
    return fail(PYDET_INVALID_VALUE, "%s: count is %d, want 1 to %d parts", out.op, int(count), PYDET_FOLD_PARTS);
  PYDET_TRY(contiguous(out));
  if (fold->accumulate && out.type != Type::f32)
    return fail(PYDET_INVALID_DTYPE, "%s: out is %s, want float32 under accumulate", out.op, type_name(out.type));
  fold->bias_period = 1;
  if (bias.present()) {
    const bool of_row = bias.ndim == 1 && out.ndim > 1;
    PYDET_TRY(same_device(out, bias));
    PYDET_TRY(want_shape(bias, of_row ? out.shape + out.ndim - 1 : out.shape, of_row ? 1 : out.ndim));
    PYDET_TRY(contiguous(bias));
    PYDET_TRY(disjoint(out, bias));
    for (int i = 0; i < bias.ndim; ++i) fold->bias_period *= bias.shape[i];
  }
  for (int32_t i = 0; i < count; ++i) {
    char name[24];
    snprintf(name, sizeof name, "parts[%d]", int(i));
    View part;
    PYDET_TRY(read(out.op, name, kPart, parts[i], 0, &part));
    PYDET_TRY(same_device(out, part));
    PYDET_TRY(want_shape(part, out.shape, out.ndim));
    PYDET_TRY(contiguous(part));
    PYDET_TRY(disjoint(out, part));
    fold->parts[i] = reinterpret_cast<const float *>(part.data);
  }
  fold->device = out.device;
  fold->count = count;
  fold->size = out.empty() ? 0 : 1;
  for (int i = 0; i < out.ndim && fold->size; ++i) fold->size *= out.shape[i];
  fold->bias = vector_of(bias);
  fold->out = vector_of(out);
  return PYDET_OK;
}

}  // namespace pydet
