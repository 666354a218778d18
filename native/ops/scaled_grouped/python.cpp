// Scaled grouped GEMM.
#include "ops/scaled/python.h"

namespace pydet {
namespace {

struct ScaledGroupedGemmArguments {
  PYDET_ARGUMENTS(a, b, group_end,  // positional
                  group_start, a_scale, b_scale, bias, out,
                  out_dtype,  // a type index or None
                  accumulate, arithmetic,
                  k_chunk,  // None: 128
                  initial, kernel, stream);
};

Object *call_scaled_grouped_gemm(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("scaled_grouped_gemm");
  ScaledGroupedGemmArguments given;
  ScaledCall<pydet_scaled_grouped_gemm_options, true> of;
  if (!call.arguments(names_of<ScaledGroupedGemmArguments>, 3, args, count, keywords, &given)) return nullptr;
  if (!of.read(call, given)) return nullptr;
  Operand *initial = call.read_optional("initial", given.initial);
  if (!initial) return nullptr;
  const pydet_tensor &a = of.a->tensor, &b = of.b->tensor;
  const bool rows = a.ndim == 2 && b.ndim == 3 && sound(a, 2) && sound(b, 2);
  const int64_t shape[2] = {rows ? a.shape[0] : 0, rows ? b.shape[2] : 0};
  if (!of.make_out(call, "scaled_grouped_gemm", rows, 2, shape)) return nullptr;
  if (!make_room_for_sums(call, *initial, *of.out, &of.options)) return nullptr;
  const bool done = call.run(rows ? product_work(a, b.shape[2]) : 0, [&](void *stream) {
    return call.library().call<pydet_scaled_grouped_gemm>(
        stream, tensor_of(of.a), tensor_of(of.a_scale), tensor_of(of.b), tensor_of(of.b_scale), tensor_of(of.bias),
        tensor_of(of.group_start), tensor_of(of.group_end), tensor_of(of.out), &of.options);
  });
  return done ? call.result(of.out) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<ScaledGroupedGemmArguments>("scaled_grouped_gemm", call_scaled_grouped_gemm),
};

}  // namespace

Items<pydet_exchange_method> Operation<ScaledGroupedGemm>::python() { return kMethods; }

}  // namespace pydet
