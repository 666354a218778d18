// Scaled GEMM, and the quantisation that makes its operands.

#include "core/launch.h"
#include "ops/scaled/check.h"

using namespace pydet;

pydet_status pydet_scaled_gemm(void *stream, const pydet_tensor *a_tensor, const pydet_tensor *a_scale_tensor,
                               const pydet_tensor *b_tensor, const pydet_tensor *b_scale_tensor,
                               const pydet_tensor *bias_tensor, const pydet_tensor *out_tensor,
                               const pydet_scaled_gemm_options *given) {
  const char *op = "scaled_gemm";
  pydet_scaled_gemm_options options = {};
  options.k_chunk = kScaleGroup;
  PYDET_TRY(read_options(op, given, &options));
  View a, a_scale, b, b_scale, bias, out;
  PYDET_TRY(read(op, "a", kScaledFactor, a_tensor, 2, &a));
  PYDET_TRY(read_optional(op, "a_scale", kScaling, a_scale_tensor, 0, &a_scale));
  PYDET_TRY(read(op, "b", kScaledFactor, b_tensor, 2, &b));
  PYDET_TRY(read_optional(op, "b_scale", kScaling, b_scale_tensor, 0, &b_scale));
  PYDET_TRY(read_optional(op, "bias", kAddend, bias_tensor, 1, &bias));
  PYDET_TRY(read(op, "out", kResult, out_tensor, 2, &out));
  ScaledGemm gemm = {};
  gemm.stream = stream;
  PYDET_TRY(scaled_gemm_of(a, a_scale, b, b_scale, bias, out, options, &gemm));
  if (out.empty()) return nothing_to_write();
  return launch(op, gemm, options.kernel);
}

pydet_status pydet_quantize(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *out_tensor,
                            const pydet_tensor *scale_tensor, const pydet_tensor *transposed_tensor,
                            const pydet_tensor *transposed_scale_tensor, const pydet_quantize_options *given) {
  const char *op = "quantize";
  pydet_quantize_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View x, out, scale, transposed, transposed_scale;
  PYDET_TRY(read(op, "x", kFactor, x_tensor, 2, &x));
  PYDET_TRY(read(op, "out", kScaledFactor, out_tensor, 2, &out));
  PYDET_TRY(read(op, "scale", kScaling, scale_tensor, 0, &scale));
  PYDET_TRY(read_optional(op, "transposed", kScaledFactor, transposed_tensor, 2, &transposed));
  PYDET_TRY(read_optional(op, "transposed_scale", kScaling, transposed_scale_tensor, 0, &transposed_scale));
  Quantize problem = {};
  problem.stream = stream;
  PYDET_TRY(quantize_of(x, out, scale, transposed, transposed_scale, options, &problem));
  if (x.empty() && (problem.given || scale.empty())) return nothing_to_write();  // else the scale of nothing is
  return launch(op, problem, options.kernel);
}
