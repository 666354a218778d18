// Handlers for XLA's foreign function interface: each reads its buffers and attributes, calls the C function of its
// name, and turns its status and sentence into XLA's error. They keep nothing and allocate nothing. Products are here,
// those of fp8 in xla_scaled.cpp, what works row by row in xla_norms.cpp.

#include "entry/xla_call.h"

namespace {

using namespace pydet;

pydet_tensor matrix(Call &call, const pydet_xla_buffer &buffer, bool transposed, Shape *shape) {
  const int rank = int(buffer.rank);
  if (rank < 2 || rank > kMaxRank) {
    call.fail("want matrices, with at most 6 leading dimensions");
    return {};
  }
  std::memcpy(shape->dims, buffer.dims, size_t(rank) * sizeof *buffer.dims);
  lay_out(shape, rank);
  if (transposed) {
    for (int64_t *values : {shape->dims, shape->strides}) {
      const int64_t last = values[rank - 1];
      values[rank - 1] = values[rank - 2];
      values[rank - 2] = last;
    }
  }
  return call.tensor(buffer, shape, rank);
}

// A bias as it broadcasts against out: [N] where it has no more, else out's shape with steps of 0.
pydet_tensor bias_of(Call &call, const pydet_xla_buffer &bias, const pydet_xla_buffer &out, Shape *shape) {
  const int rank = int(out.rank), missing = rank - int(bias.rank);
  if (missing < 0 || bias.rank < 1) {
    call.fail("bias has more dimensions than the result, or none");
    return {};
  }
  Shape own = {};
  std::memcpy(own.dims, bias.dims, size_t(bias.rank) * sizeof *bias.dims);
  lay_out(&own, int(bias.rank));
  for (int i = 0; i < rank; ++i) {
    const int64_t extent = i < missing ? 1 : own.dims[i - missing];
    if (extent != out.dims[i] && extent != 1) call.fail("bias does not broadcast to the result");
    shape->dims[i] = out.dims[i];
    shape->strides[i] = extent == 1 ? 0 : own.strides[i - missing];
  }
  const bool of_columns = bias.dims[bias.rank - 1] == out.dims[rank - 1] && elements(bias) == out.dims[rank - 1];
  if (!of_columns) return call.tensor(bias, shape, rank);
  shape->dims[0] = out.dims[rank - 1];
  shape->strides[0] = 1;
  return call.tensor(bias, shape, 1);
}

// The weights of a skinny product as its function takes them: a matrix. False for a batch of them.
bool as_one_matrix(pydet_tensor *w) {
  for (int i = 0; i + 2 < w->ndim; ++i)
    if (w->shape[i] != 1) return false;
  w->shape += w->ndim - 2;
  w->strides += w->ndim - 2;
  w->ndim = 2;
  return true;
}

void gemm(Call &call) {
  const bool has_bias = call.flag("has_bias"), accumulate = call.flag("accumulate");
  const bool transpose_a = call.flag("transpose_a"), transpose_b = call.flag("transpose_b");
  const bool skinny = call.flag("skinny");
  Shape shapes[4];
  const pydet_xla_buffer &result = call.result(0);
  const pydet_tensor a = matrix(call, call.argument(0), transpose_a, &shapes[0]);
  const pydet_tensor b = matrix(call, call.argument(1), transpose_b, &shapes[1]);
  const pydet_tensor out = matrix(call, result, false, &shapes[2]);
  pydet_tensor bias = {};
  if (has_bias && !call.failed()) bias = bias_of(call, call.argument(2), result, &shapes[3]);
  if (accumulate) expect_in_place(call, call.argument(2 + has_bias), result);
  pydet_skinny_gemm_options options = {};
  options.struct_size = sizeof options;
  options.arithmetic = call.number("arithmetic");
  options.k_chunk = call.integer("k_chunk");
  options.accumulate = accumulate;
  options.mode = call.number("mode");
  options.weights_constant = call.flag("weights_constant");
  options.kernel = call.kernel();
  if (options.mode != PYDET_DETERMINISTIC && options.mode != PYDET_FAST)  // a batch of b does not get to its function
    call.fail("attribute mode is %d, want 0 (deterministic) or 1 (fast)", int(options.mode));
  if (!skinny && (options.mode || options.weights_constant))
    call.fail("attribute %s is 1 without skinny, want 0", options.mode ? "mode" : "weights_constant");
  if (skinny && (transpose_a || !transpose_b)) call.fail("attribute skinny is 1 with other than a and b^T as they lie");
  void *stream = call.stream();
  if (call.failed()) return;
  const pydet_tensor *given_bias = has_bias ? &bias : nullptr;
  if (skinny) {
    Shape shape;
    pydet_tensor w = matrix(call, call.argument(1), false, &shape);
    if (as_one_matrix(&w)) return call.check(pydet_skinny_gemm(stream, &a, &w, given_bias, &out, &options));
  }
  pydet_gemm_options plain = {};
  plain.struct_size = sizeof plain;
  plain.arithmetic = options.arithmetic;
  plain.k_chunk = options.k_chunk;
  plain.accumulate = options.accumulate;
  plain.kernel = options.kernel;
  call.check(pydet_gemm(stream, &a, &b, given_bias, &out, &plain));
}

// Products of groups of tokens, whose ends are on the device.
void grouped_gemm(Call &call) {
  const bool depth = call.flag("depth"), transpose_b = call.flag("transpose_b");
  Shape shapes[4];
  const pydet_xla_buffer &ends = call.argument(2), &result = call.result(0);
  const pydet_tensor a = matrix(call, call.argument(0), depth, &shapes[0]);
  const pydet_tensor b = matrix(call, call.argument(1), transpose_b, &shapes[1]);
  const pydet_tensor out = matrix(call, result, false, &shapes[2]);
  if (ends.rank != 1) call.fail("group_end is %s, want one dimension", ShapeWords(ends.dims, ends.rank).text);
  shapes[3] = {{elements(ends)}, {1}};
  pydet_tensor group_end = call.tensor(ends, &shapes[3], 1);
  if (ends.dtype == PYDET_XLA_S32) group_end.dtype = {PYDET_INT, 32, 1};
  expect_in_place(call, call.argument(3), result);
  pydet_grouped_gemm_options options = {};
  options.struct_size = sizeof options;
  options.arithmetic = call.number("arithmetic");
  options.k_chunk = call.integer("k_chunk");
  options.kernel = call.kernel();
  void *stream = call.stream();
  if (call.failed()) return;
  call.check(pydet_grouped_gemm(stream, &a, &b, nullptr, nullptr, &group_end, &out, &options));
}

}  // namespace

pydet_xla_error *pydet_xla_cpu_gemm(pydet_xla_call *call) { return handle(call, false, "gemm", gemm); }
pydet_xla_error *pydet_xla_cpu_grouped_gemm(pydet_xla_call *call) {
  return handle(call, false, "grouped_gemm", grouped_gemm);
}
pydet_xla_error *pydet_xla_cpu_scaled_gemm(pydet_xla_call *call) {
  return handle(call, false, "scaled_gemm", xla_scaled_gemm);
}
pydet_xla_error *pydet_xla_cpu_quantize(pydet_xla_call *call) { return handle(call, false, "quantize", xla_quantize); }
pydet_xla_error *pydet_xla_cpu_rmsnorm(pydet_xla_call *call) { return handle(call, false, "rmsnorm", xla_rmsnorm); }
pydet_xla_error *pydet_xla_cpu_rmsnorm_backward(pydet_xla_call *call) {
  return handle(call, false, "rmsnorm_backward", xla_rmsnorm_backward);
}
pydet_xla_error *pydet_xla_cpu_layernorm(pydet_xla_call *call) {
  return handle(call, false, "layernorm", xla_layernorm);
}
pydet_xla_error *pydet_xla_cpu_layernorm_backward(pydet_xla_call *call) {
  return handle(call, false, "layernorm_backward", xla_layernorm_backward);
}
pydet_xla_error *pydet_xla_cpu_softmax(pydet_xla_call *call) { return handle(call, false, "softmax", xla_softmax); }
pydet_xla_error *pydet_xla_cpu_softmax_backward(pydet_xla_call *call) {
  return handle(call, false, "softmax_backward", xla_softmax_backward);
}
pydet_xla_error *pydet_xla_cpu_log_prob(pydet_xla_call *call) { return handle(call, false, "log_prob", xla_log_prob); }
pydet_xla_error *pydet_xla_cpu_log_prob_backward(pydet_xla_call *call) {
  return handle(call, false, "log_prob_backward", xla_log_prob_backward);
}
pydet_xla_error *pydet_xla_gpu_gemm(pydet_xla_call *call) { return handle(call, true, "gemm", gemm); }
pydet_xla_error *pydet_xla_gpu_grouped_gemm(pydet_xla_call *call) {
  return handle(call, true, "grouped_gemm", grouped_gemm);
}
pydet_xla_error *pydet_xla_gpu_scaled_gemm(pydet_xla_call *call) {
  return handle(call, true, "scaled_gemm", xla_scaled_gemm);
}
pydet_xla_error *pydet_xla_gpu_quantize(pydet_xla_call *call) { return handle(call, true, "quantize", xla_quantize); }
pydet_xla_error *pydet_xla_gpu_rmsnorm(pydet_xla_call *call) { return handle(call, true, "rmsnorm", xla_rmsnorm); }
pydet_xla_error *pydet_xla_gpu_rmsnorm_backward(pydet_xla_call *call) {
  return handle(call, true, "rmsnorm_backward", xla_rmsnorm_backward);
}
pydet_xla_error *pydet_xla_gpu_layernorm(pydet_xla_call *call) {
  return handle(call, true, "layernorm", xla_layernorm);
}
pydet_xla_error *pydet_xla_gpu_layernorm_backward(pydet_xla_call *call) {
  return handle(call, true, "layernorm_backward", xla_layernorm_backward);
}
pydet_xla_error *pydet_xla_gpu_softmax(pydet_xla_call *call) { return handle(call, true, "softmax", xla_softmax); }
pydet_xla_error *pydet_xla_gpu_softmax_backward(pydet_xla_call *call) {
  return handle(call, true, "softmax_backward", xla_softmax_backward);
}
pydet_xla_error *pydet_xla_gpu_log_prob(pydet_xla_call *call) { return handle(call, true, "log_prob", xla_log_prob); }
pydet_xla_error *pydet_xla_gpu_log_prob_backward(pydet_xla_call *call) {
  return handle(call, true, "log_prob_backward", xla_log_prob_backward);
}
