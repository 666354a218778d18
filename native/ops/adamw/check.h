// Argument checks of AdamW.
#pragma once

#include <algorithm>
#include <cmath>

#include "contract/to_fp32.h"
#include "core/float_environment.h"
#include "core/options.h"
#include "ops/adamw/problem.h"

namespace pydet {

// ---- Numbers -----------------------------------------------------------------------------------------------------

// In double, from left to right as written, and then rounded once. Where the thread's modes are those of IEEE 754.
__attribute__((noinline)) inline void make_numbers(const pydet_adamw_step &step, AdamWNumbers *by) {
  by->beta1 = f32_from_f64(step.beta1);
  by->one_minus_beta1 = f32_from_f64(1 - step.beta1);
  by->beta2 = f32_from_f64(step.beta2);
  by->one_minus_beta2 = f32_from_f64(1 - step.beta2);
  by->root_factor = f32_from_f64(1 / std::sqrt(1 - step.beta2_power));
  by->eps = f32_from_f64(step.eps);
  by->decay = f32_from_f64(1 - step.lr * step.weight_decay);
  by->rate = f32_from_f64(step.lr / (1 - step.beta1_power));
}

inline pydet_status numbers_of(const char *op, const pydet_adamw_step *given, AdamWNumbers *by) {
  if (!given) return fail(PYDET_NULL_POINTER, "%s: step is NULL, want the numbers of the step", op);
  PYDET_TRY(check_size<pydet_adamw_step>(op, "step", given->struct_size));
  if (given->reserved != 0)
    return fail(PYDET_INVALID_VALUE, "%s: step.reserved is %d, want 0", op, int(given->reserved));
  struct Number {
    const char *name;
    double value;
  };
  for (const auto &[name, value] :
       {Number{"beta1", given->beta1}, Number{"beta2", given->beta2}, Number{"beta1_power", given->beta1_power},
        Number{"beta2_power", given->beta2_power}})
    if (!(value >= 0 && value < 1))
      return fail(PYDET_INVALID_VALUE, "%s: %s is %g, want a number from 0 to below 1", op, name, value);
  for (const auto &[name, value] :
       {Number{"lr", given->lr}, Number{"eps", given->eps}, Number{"weight_decay", given->weight_decay}})
    if (!(value >= 0) || bits_of(f32_from_f64(value)) == 0x7F800000u)
      return fail(PYDET_INVALID_VALUE, "%s: %s is %g, want a finite number of 0 or more in float32", op, name, value);
  const FloatEnvironment environment;
  asm volatile("" ::: "memory");  // what is computed is read and written between these two
  make_numbers(*given, by);
  asm volatile("" ::: "memory");
  return PYDET_OK;
}

// ---- Tensors -----------------------------------------------------------------------------------------------------

// No element at the place of another, and no gap between them: all memory from the first to the last is the view's.
inline pydet_status dense(const View &view, int64_t *size) {
  *size = view.empty() ? 0 : 1;
  if (view.empty()) return PYDET_OK;
  PYDET_TRY(no_self_overlap(view));
  for (int i = 0; i < view.ndim; ++i) *size *= view.shape[i];
  const Footprint all = footprint(view);
  if (int64_t(all.end - all.begin) == *size * size_of(view.type)) return PYDET_OK;
  return fail(PYDET_INVALID_STRIDE, "%s: %s has gaps between its elements, want it dense, as a contiguous copy is",
              view.op, view.name);
}

inline pydet_status lies_like(const View &first, const View &other) {
  PYDET_TRY(same_device(first, other));
  PYDET_TRY(want_shape(other, first.shape, first.ndim));
  for (int i = 0; i < first.ndim; ++i)
    if (other.stride[i] != first.stride[i])
      return fail(PYDET_INVALID_STRIDE, "%s: %s has stride %" PRId64 " in dimension %d, want %" PRId64 " as %s has",
                  other.op, other.name, other.stride[i], i, first.stride[i], first.name);
  return PYDET_OK;
}

// The lists of a call; masters may be NULL.
constexpr int kAdamWLists = 5;
struct AdamWLists {
  const pydet_tensor *const *tensors[kAdamWLists];
};
struct ListName {
  const char *name;
  Use use;
};
constexpr ListName kListNames[kAdamWLists] = {
    {"params", kResult}, {"grads", kAddend}, {"exp_avgs", kPart}, {"exp_avg_sqs", kPart}, {"masters", kPart}};

// "params[0]" and so on, ready made: a call has hundreds of names, and a sentence seldom needs one.
struct ElementNames {
  char text[kAdamWLists][PYDET_ADAMW_TENSORS][16];
};
constexpr ElementNames element_names() {
  static_assert(PYDET_ADAMW_TENSORS <= 100, "two digits");
  ElementNames names = {};
  for (int list = 0; list < kAdamWLists; ++list)
    for (int i = 0; i < PYDET_ADAMW_TENSORS; ++i) {
      char *at = names.text[list][i];
      for (const char *from = kListNames[list].name; *from; ++from) *at++ = *from;
      *at++ = '[';
      if (i >= 10) *at++ = char('0' + i / 10);
      *at++ = char('0' + i % 10);
      *at++ = ']';
    }
  return names;
}
inline constexpr ElementNames kElementNames = element_names();

// Tensors of number i, whose place in the call's sentences that is. `first`: the first tensor of the call.
__attribute__((noinline)) inline pydet_status tensor_of_lists(const char *op, const AdamWLists &lists, int i,
                                                              View *first, AdamWTensor *tensor) {
  View view, param;
  const char *data[kAdamWLists] = {};
  for (int list = 0; list < kAdamWLists; ++list) {
    if (list == 4 && (!lists.tensors[list] || !lists.tensors[list][i])) break;
    PYDET_TRY(read(op, kElementNames.text[list][i], kListNames[list].use, lists.tensors[list][i], 0, &view));
    if (list == 0) {
      param = view;
      if (!first->present()) *first = view, first->name = "params[0]";
      PYDET_TRY(same_device(*first, view));
      PYDET_TRY(dense(view, &tensor->size));
      tensor->param_type = view.type;
    } else {
      PYDET_TRY(lies_like(param, view));
    }
    if (list == 1) tensor->grad_type = view.type;
    if (list == 4 && param.type == Type::f32)
      return fail(PYDET_INVALID_DTYPE, "%s: %s is given, want none beside a parameter that is float32", op, view.name);
    data[list] = view.data;
  }
  const auto floats = [](const char *at) { return reinterpret_cast<float *>(const_cast<char *>(at)); };
  tensor->param = const_cast<char *>(data[0]), tensor->grad = data[1];
  tensor->exp_avg = floats(data[2]), tensor->exp_avg_sq = floats(data[3]), tensor->master = floats(data[4]);
  return PYDET_OK;
}

// One tensor of a call, as its place in the memory of the device.
struct Span {
  uintptr_t begin, end;
  int16_t list, number;  // of the tensor, for its name
};

// The tensors of a call that have elements; returns how many. numbers[i] is what tensor i is called, since those without
// elements are left out.
inline int spans_of(const AdamW &a, const int16_t *numbers, Span *spans) {
  int count = 0;
  for (int i = 0; i < a.count; ++i) {
    const AdamWTensor &t = a.tensors[i];
    const auto add = [&](int list, const void *data, int bytes) {
      if (!data) return;
      const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
      spans[count++] = {begin, begin + uintptr_t(t.size) * unsigned(bytes), int16_t(list), numbers[i]};
    };
    add(0, t.param, size_of(t.param_type));
    add(1, t.grad, size_of(t.grad_type));
    add(2, t.exp_avg, int(sizeof(float)));
    add(3, t.exp_avg_sq, int(sizeof(float)));
    add(4, t.master, int(sizeof(float)));
  }
  return count;
}

// Nothing that is written shares memory with another tensor; gradients may with each other. By places in order, so that
// each meets its neighbours alone.
__attribute__((noinline)) inline pydet_status tensors_apart(const char *op, const AdamW &a, const int16_t *numbers) {
  Span spans[kAdamWLists * PYDET_ADAMW_TENSORS];
  const int count = spans_of(a, numbers, spans);
  std::sort(spans, spans + count, [](const Span &x, const Span &y) {
    if (x.begin != y.begin) return x.begin < y.begin;
    return x.number != y.number ? x.number < y.number : x.list < y.list;
  });
  const Span none = {0, 0, 0, 0};
  const Span *furthest = &none, *furthest_written = &none;  // which of those before reaches the furthest
  for (const Span *span = spans; span < spans + count; ++span) {
    const bool written = span->list != 1;
    const Span *before = written ? furthest : furthest_written;
    if (span->begin < before->end) {
      const char *own = kElementNames.text[span->list][span->number];
      const char *other = kElementNames.text[before->list][before->number];
      return fail(PYDET_OVERLAP, "%s: %s shares memory with %s, want it apart", op, written ? own : other,
                  written ? other : own);
    }
    if (span->end > furthest->end) furthest = span;
    if (written && span->end > furthest_written->end) furthest_written = span;
  }
  return PYDET_OK;
}

__attribute__((noinline)) inline pydet_status adamw_of(const char *op, const AdamWLists &lists, int32_t count,
                                                       AdamW *adamw) {
  for (int list = 0; list + 1 < kAdamWLists; ++list)
    if (!lists.tensors[list])
      return fail(PYDET_NULL_POINTER, "%s: %s is NULL, want an array of %d tensors", op, kListNames[list].name,
                  int(count));
  View first = {};
  int16_t numbers[PYDET_ADAMW_TENSORS];
  for (int32_t i = 0; i < count; ++i) {
    numbers[adamw->count] = int16_t(i);
    PYDET_TRY(tensor_of_lists(op, lists, i, &first, &adamw->tensors[adamw->count]));
    if (adamw->tensors[adamw->count].size) ++adamw->count;
  }
  adamw->device = first.device;
  return tensors_apart(op, *adamw, numbers);
}

}  // namespace pydet
