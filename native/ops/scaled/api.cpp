// Scaled GEMM, and the quantisation that makes its operands.

#include "core/launch.h"
#include "ops/gemm/initial.h"
#include "ops/scaled/check.h"

namespace pydet {
namespace {

constexpr GemmWords kScaledGemm = {"scaled_gemm", "a", "b", "out", "M", "N", "K", false, false};

// What a product whose sums begin at a tensor of their own does before and after it: `gemm` computes the sums, under
// accumulate, in out if that is fp32, else in the workspace.
struct ScaledSteps {
  Matrix from, bias, out;
  int64_t bias_strides[kMaxBatchDims], out_strides[kMaxBatchDims];
  bool ends;

  // A pass from a matrix whose batch lies dense, or has out's strides of `sums`.
  Rounding pass(const ScaledGemm &sums) const {
    Rounding made = {sums.device, sums.stream, {}, {}, {}, {}, sums.m, sums.n, {}};
    made.batch.dims = sums.batch.dims, made.batch.count = sums.batch.count;
    for (int i = 0; i < sums.batch.dims; ++i) made.batch.shape[i] = sums.batch.shape[i];
    return made;
  }
  Rounding before(const ScaledGemm &sums) const {
    Rounding made = pass(sums);
    made.from = from, made.to = sums.out;
    dense_strides(made.batch, sums.m, sums.n, made.batch.a);
    for (int i = 0; i < sums.batch.dims; ++i) made.batch.out[i] = sums.batch.stride[ScaledGemm::kOut][i];
    return upright(made);
  }
  Rounding after(const ScaledGemm &sums) const {
    Rounding made = pass(sums);
    made.from = sums.out, made.bias = bias, made.to = out;
    for (int i = 0; i < sums.batch.dims; ++i) {
      made.batch.a[i] = sums.batch.stride[ScaledGemm::kOut][i];
      made.batch.bias[i] = bias_strides[i], made.batch.out[i] = out_strides[i];
    }
    return upright(made);
  }
};

struct ScaledWork {
  ScaledGemm gemm;
  ScaledSteps steps;
  bool from_initial, none;  // none: no element of out
};

// `work->gemm` has been checked but for its sums.
pydet_status start_from(const View &initial, const pydet_scaled_gemm_options &options, ScaledWork *work) {
  ScaledGemm &gemm = work->gemm;
  ScaledSteps &steps = work->steps;
  steps.from = {initial.data, Type::f32, gemm.m, gemm.n, gemm.n, 1};
  steps.bias = gemm.bias, steps.out = gemm.out;
  const bool in_place = gemm.out.type == Type::f32;
  steps.ends = !in_place || gemm.bias.data;
  for (int i = 0; i < gemm.batch.dims; ++i) {
    steps.bias_strides[i] = gemm.batch.stride[ScaledGemm::kBias][i];
    steps.out_strides[i] = gemm.batch.stride[ScaledGemm::kOut][i];
    gemm.batch.stride[ScaledGemm::kBias][i] = 0;
  }
  gemm.bias = {};
  gemm.accumulate = true;
  if (in_place) return PYDET_OK;
  uint64_t bytes = 0;
  PYDET_TRY(bytes_of_sums(kScaledGemm.op, gemm.batch.count, gemm.m, gemm.n, &bytes));
  if (options.workspace_size < bytes)
    return fail(PYDET_WORKSPACE_TOO_SMALL,
                "%s: workspace_size is %" PRIu64 ", want %" PRIu64 " for the sums of a %s out", kScaledGemm.op,
                options.workspace_size, bytes, type_name(gemm.out.type));
  gemm.out = {static_cast<char *>(options.workspace), Type::f32, gemm.m, gemm.n, gemm.n, 1};
  int64_t stride = gemm.m * gemm.n;
  for (int i = gemm.batch.dims - 1; i >= 0; --i) {
    gemm.batch.stride[ScaledGemm::kOut][i] = stride;
    stride *= gemm.batch.shape[i];
  }
  return PYDET_OK;
}

// Apart from the call itself, so that the views are off the stack when a kernel runs.
__attribute__((noinline)) pydet_status read_scaled_gemm(void *stream, const pydet_tensor *a_tensor,
                                                        const pydet_tensor *a_scale_tensor,
                                                        const pydet_tensor *b_tensor,
                                                        const pydet_tensor *b_scale_tensor,
                                                        const pydet_tensor *bias_tensor, const pydet_tensor *out_tensor,
                                                        const pydet_scaled_gemm_options &options, ScaledWork *work) {
  const char *op = kScaledGemm.op;
  View a, a_scale, b, b_scale, bias, out, initial;
  PYDET_TRY(read(op, "a", kScaledFactor, a_tensor, 2, &a));
  PYDET_TRY(read_optional(op, "a_scale", kScaling, a_scale_tensor, 0, &a_scale));
  PYDET_TRY(read(op, "b", kScaledFactor, b_tensor, 2, &b));
  PYDET_TRY(read_optional(op, "b_scale", kScaling, b_scale_tensor, 0, &b_scale));
  PYDET_TRY(read_optional(op, "bias", kAddend, bias_tensor, 1, &bias));
  PYDET_TRY(read(op, "out", kResult, out_tensor, 2, &out));
  work->gemm.stream = stream;
  PYDET_TRY(scaled_gemm_of(a, a_scale, b, b_scale, bias, out, options, &work->gemm));
  PYDET_TRY(check_workspace(op, options.workspace, options.workspace_size));
  PYDET_TRY(read_initial(op, options, out, &initial));
  work->none = out.empty();
  work->from_initial = initial.present() && !work->none;
  if (!initial.present()) return PYDET_OK;
  PYDET_TRY(want_scales_of_chunks(op, a_scale, b_scale, work->gemm, "with initial"));
  for (const View *view : {&a, &a_scale, &b, &b_scale, &bias, &out, &initial})
    PYDET_TRY(workspace_apart(*view, options.workspace, options.workspace_size));
  return work->none ? PYDET_OK : start_from(initial, options, work);
}

}  // namespace
}  // namespace pydet

using namespace pydet;

pydet_status pydet_scaled_gemm(void *stream, const pydet_tensor *a, const pydet_tensor *a_scale, const pydet_tensor *b,
                               const pydet_tensor *b_scale, const pydet_tensor *bias, const pydet_tensor *out,
                               const pydet_scaled_gemm_options *given) {
  pydet_scaled_gemm_options options = {};
  options.k_chunk = kScaleGroup;
  PYDET_TRY(read_options(kScaledGemm.op, given, &options));
  ScaledWork work = {};
  PYDET_TRY(read_scaled_gemm(stream, a, a_scale, b, b_scale, bias, out, options, &work));
  if (work.none) return nothing_to_write();
  return work.from_initial ? launch_between_passes(kScaledGemm.op, work.gemm, work.steps, options.kernel)
                           : launch(kScaledGemm.op, work.gemm, options.kernel);
}

pydet_status pydet_scaled_gemm_workspace(int64_t batch, int64_t m, int64_t n, int64_t k,
                                         const pydet_scaled_gemm_options *given, uint64_t *bytes) {
  const char *op = "scaled_gemm_workspace";
  pydet_scaled_gemm_options options = {};
  options.k_chunk = kScaleGroup;
  PYDET_TRY(read_options(op, given, &options));
  PYDET_TRY(check_arithmetic(op, options.arithmetic));
  PYDET_TRY(check_flag(op, "accumulate", options.accumulate));
  PYDET_TRY(check_extents(op, batch, m, n, k, bytes));
  PYDET_TRY(check_chunk(op, options.k_chunk, kFp8Step));
  *bytes = 0;
  return options.initial ? bytes_of_sums(op, batch, m, n, bytes) : PYDET_OK;
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
