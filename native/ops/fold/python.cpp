// The sum of parts in a fixed order.
#include "entry/python/methods.h"

namespace pydet {
namespace {

struct FoldArguments {
  PYDET_ARGUMENTS(parts,  // positional: a tensor whose first dimension counts the parts, or a tuple of tensors
                  is_tuple, bias, out,
                  out_dtype,  // a type index or None
                  order, accumulate, kernel, stream);
};

// -> out
Object *call_fold(Object *, Object *const *args, intptr_t count, Object *keywords) {
  constexpr int kMost = PYDET_FOLD_PARTS;
  Operand room[kMost];
  PythonCall call("fold", room);
  FoldArguments given;
  if (!call.arguments(names_of<FoldArguments>, 1, args, count, keywords, &given)) return nullptr;
  pydet_tensor slices[kMost];
  const pydet_tensor *parts[kMost];
  int32_t is_tuple = 0;
  if (!call.flag_of("is_tuple", given.is_tuple, &is_tuple)) return nullptr;
  const intptr_t length = is_tuple ? python().PyTuple_Size(given.parts) : 1;
  char sentence[120];
  snprintf(sentence, sizeof sentence, "a sequence of %lld, want 1 to %d parts", static_cast<long long>(length), kMost);
  if (length < 1 || length > kMost) return call.refuse("parts", sentence), nullptr;
  Operand *first = nullptr;
  for (int i = 0; i < length; ++i) {
    char name[24] = "parts";
    if (is_tuple) snprintf(name, sizeof name, "parts[%d]", i);
    Operand *part = call.read(name, is_tuple ? python().PyTuple_GetItem(given.parts, i) : given.parts);
    if (!part) return nullptr;
    if (i == 0) first = part;
    parts[i] = &part->tensor;
  }
  Operand *bias = call.read_optional("bias", given.bias);
  Operand *out = bias ? call.read_optional("out", given.out, true) : nullptr;
  if (!out) return nullptr;
  pydet_fold_options options = {};
  options.struct_size = sizeof options;
  int64_t type = -1;
  if (!call.type_of("out_dtype", given.out_dtype, &type)) return nullptr;
  if (!call.number_of("order", exchange->orders, given.order, &options.order)) return nullptr;
  if (!call.flag_of("accumulate", given.accumulate, &options.accumulate)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel)) return nullptr;
  if (!call.choose_library(given.stream) || !type_agrees(call, "out", *out, type)) return nullptr;
  if (!out->present && !starts_from_zero(call, "fold", options.accumulate)) return nullptr;

  // The parts of one tensor lie along its first dimension.
  pydet_tensor like = first->tensor;
  int32_t used = int32_t(length);
  if (!is_tuple) {
    if (!sound(like, 1) || like.shape[0] < 1 || like.shape[0] > kMost) {
      snprintf(sentence, sizeof sentence, "no float tensor of 1 to %d parts along its first dimension", kMost);
      return call.refuse("parts", sentence), nullptr;
    }
    used = int32_t(like.shape[0]);
    int64_t step = 1;
    for (int d = 1; d < like.ndim; ++d)
      if (__builtin_mul_overflow(step, like.shape[d], &step)) step = 0;  // too large to lie anywhere: refused below
    if (like.strides) step = like.strides[0];
    if (step < 0 && used > 1) return call.refuse("parts", "a tensor whose first stride is negative"), nullptr;
    like.ndim -= 1, like.shape += 1;
    if (like.strides) like.strides += 1;
    int64_t pitch = 0, reach = 0;  // bytes from one part to the next, and to the last
    uint64_t end = 0;
    if (used > 1 && elements(like) != 0 &&
        (__builtin_mul_overflow(step, like.dtype.bits / 8, &pitch) || __builtin_mul_overflow(pitch, used - 1, &reach) ||
         __builtin_add_overflow(like.byte_offset, uint64_t(reach), &end))) {
      snprintf(sentence, sizeof sentence, "a tensor of first stride %lld, which reaches past 2^63 - 1 bytes",
               static_cast<long long>(step));
      return call.refuse("parts", sentence, PYDET_OVERFLOW), nullptr;
    }
    for (int32_t i = 0; i < used; ++i) {
      slices[i] = like;
      slices[i].byte_offset += uint64_t(pitch) * uint64_t(i);
      parts[i] = &slices[i];
    }
  }
  if (!out->present && sound(like, 0) &&
      !(out = call.make(like.ndim, like.shape, type < 0 ? int(Type::f32) : int(type))))
    return nullptr;
  const int64_t work = elements(like);  // of extents that are refused below: anything
  const bool done = call.run(work > 0 && work < kGilWork ? work * used : work, [&](void *stream) {
    return call.library().call<pydet_fold>(stream, parts, used, tensor_of(bias), tensor_of(out), &options);
  });
  return done ? call.result(out) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<FoldArguments>("fold", call_fold),
};

}  // namespace

Items<pydet_exchange_method> Operation<Fold>::python() { return kMethods; }

}  // namespace pydet
