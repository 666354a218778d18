// What XLA asks of products of scaled fp8 factors, and of the quantisation that makes them.

#include <utility>

#include "core/operations.h"
#include "entry/xla_call.h"

namespace pydet {
namespace {

// A buffer as it lies; `turned`: its transpose.
pydet_tensor as_it_lies(Call &call, const pydet_xla_buffer &buffer, bool turned, Shape *shape) {
  const int rank = int(buffer.rank);
  if (rank > kMaxRank || (turned && rank < 2)) {
    call.fail(turned && rank < 2 ? "want a matrix" : "want 8 dimensions at most");
    return {};
  }
  std::memcpy(shape->dims, buffer.dims, size_t(rank) * sizeof *buffer.dims);
  lay_out(shape, rank);
  if (turned) {
    std::swap(shape->dims[rank - 1], shape->dims[rank - 2]);
    std::swap(shape->strides[rank - 1], shape->strides[rank - 2]);
  }
  return call.tensor(buffer, shape, rank);
}

// Operands: a, the transpose of b, a_scale if has_a_scale, b_scale if has_b_scale, a bias if has_bias, what to continue
// from if accumulate; one result. arithmetic, k_chunk as in pydet_scaled_gemm_options.
void scaled_gemm(Call &call) {
  const bool has_a_scale = call.flag("has_a_scale"), has_b_scale = call.flag("has_b_scale");
  const bool has_bias = call.flag("has_bias"), accumulate = call.flag("accumulate");
  Shape shapes[6];
  int next = 2;
  const pydet_tensor a = as_it_lies(call, call.argument(0), false, &shapes[0]);
  const pydet_tensor b = as_it_lies(call, call.argument(1), true, &shapes[1]);
  pydet_tensor a_scale = {}, b_scale = {}, bias = {};
  if (has_a_scale) a_scale = as_it_lies(call, call.argument(next++), false, &shapes[2]);
  if (has_b_scale) b_scale = as_it_lies(call, call.argument(next++), false, &shapes[3]);
  if (has_bias) bias = as_it_lies(call, call.argument(next++), false, &shapes[4]);
  if (accumulate) continue_from(call, call.argument(next), call.result(0));
  const pydet_tensor out = as_it_lies(call, call.result(0), false, &shapes[5]);
  pydet_scaled_gemm_options options = {};
  options.struct_size = sizeof options;
  options.arithmetic = call.number("arithmetic");
  options.k_chunk = call.integer("k_chunk");
  options.accumulate = accumulate;
  options.kernel = call.kernel();
  void *stream = call.stream();
  if (call.failed()) return;
  call.check(pydet_scaled_gemm(stream, &a, has_a_scale ? &a_scale : nullptr, &b, has_b_scale ? &b_scale : nullptr,
                               has_bias ? &bias : nullptr, &out, &options));
}

// Operands: x, then the scale if given; out, then the scale if not given, the transposed copy and its scale if
// transposed. granularity, power_of_two as in pydet_quantize_options.
void quantize(Call &call) {
  const bool given = call.flag("given"), transposed = call.flag("transposed");
  Shape shapes[5];
  const pydet_tensor x = as_it_lies(call, call.argument(0), false, &shapes[0]);
  const pydet_tensor out = as_it_lies(call, call.result(0), false, &shapes[1]);
  const pydet_tensor scale = as_it_lies(call, given ? call.argument(1) : call.result(1), false, &shapes[2]);
  pydet_tensor turned = {}, turned_scale = {};
  if (transposed) {
    turned = as_it_lies(call, call.result(2), false, &shapes[3]);
    turned_scale = as_it_lies(call, call.result(3), false, &shapes[4]);
  }
  pydet_quantize_options options = {};
  options.struct_size = sizeof options;
  options.granularity = call.number("granularity");
  options.power_of_two = call.flag("power_of_two");
  options.given = given;
  options.kernel = call.kernel();
  void *stream = call.stream();
  if (call.failed()) return;
  call.check(pydet_quantize(stream, &x, &out, &scale, transposed ? &turned : nullptr,
                            transposed ? &turned_scale : nullptr, &options));
}

constexpr char kScaledGemm[] = "scaled_gemm";
constexpr char kQuantize[] = "quantize";
constexpr pydet_xla_handler kHandlers[] = {
    handler<kScaledGemm, scaled_gemm>(),
    handler<kQuantize, quantize>(),
};

}  // namespace

Items<pydet_xla_handler> Operation<ScaledGemm>::xla() { return kHandlers; }

}  // namespace pydet
