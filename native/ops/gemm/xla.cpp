// What XLA asks of products.

#include "core/operations.h"
#include "entry/xla_rows.h"
#include "ops/gemm/xla.h"

namespace pydet {
namespace {

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

// Dimensions in front that only the result and a bias have, as vmap over a bias alone makes them: a repeats along them.
void spread(pydet_tensor *a, const pydet_tensor &b, const pydet_tensor &out) {
  if (a->ndim != out.ndim || b.ndim != out.ndim) return;
  for (int i = 0; i + 2 < out.ndim; ++i)
    if (a->shape[i] == 1 && b.shape[i] == 1 && out.shape[i] != 1) a->shape[i] = out.shape[i], a->strides[i] = 0;
}

// Operands: a, b, then a bias if has_bias, what to continue from if accumulate; one result. transpose_a, transpose_b:
// the matrices as they lie are a^T, b^T. arithmetic, k_chunk as in pydet_gemm_options. A bias with one row serves all
// rows. skinny: a, b^T are x, w of pydet_skinny_gemm, with mode and weights_constant; a batch of b, which that does
// not take, goes to pydet_gemm. has_workspace: bytes behind the result, for kernels that use them, copies of operands among
// them. It is a result, not scratch memory of XLA's: that is given back when the handler returns, and a graph of commands
// which was captured would write to it again. has_initial, not with accumulate or skinny: an operand more, fp32 and shaped
// like the result, where sums begin, and a workspace.
void gemm(Call &call) {
  const bool has_bias = call.flag("has_bias"), accumulate = call.flag("accumulate");
  const bool has_initial = call.flag("has_initial"), has_workspace = call.flag("has_workspace") || has_initial;
  const bool transpose_a = call.flag("transpose_a"), transpose_b = call.flag("transpose_b");
  const bool skinny = call.flag("skinny");
  Shape shapes[5];
  const pydet_xla_buffer &result = call.result(0);
  pydet_tensor a = matrix(call, call.argument(0), transpose_a, &shapes[0]);
  const pydet_tensor b = matrix(call, call.argument(1), transpose_b, &shapes[1]);
  const pydet_tensor out = matrix(call, result, false, &shapes[2]);
  if (!call.failed()) spread(&a, b, out);
  pydet_tensor bias = {};
  if (has_bias && !call.failed()) bias = bias_of(call, call.argument(2), result, &shapes[3]);
  if (accumulate) continue_from(call, call.argument(2 + has_bias), result);
  pydet_tensor initial = {};
  if (has_initial) initial = matrix(call, call.argument(2 + has_bias), false, &shapes[4]);
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
  if (has_initial && (skinny || accumulate))
    call.fail("attribute has_initial is 1 with %s, want 0", skinny ? "skinny" : "accumulate");
  pydet_gemm_options plain = {};
  plain.struct_size = sizeof plain;
  if (has_workspace) give_workspace(call, call.result(1), &plain);
  options.workspace = plain.workspace;
  options.workspace_size = plain.workspace_size;
  if (skinny && (transpose_a || !transpose_b)) call.fail("attribute skinny is 1 with other than a and b^T as they lie");
  void *stream = call.stream();
  if (call.failed()) return;
  const pydet_tensor *given_bias = has_bias ? &bias : nullptr;
  if (skinny) {
    Shape shape;
    pydet_tensor w = matrix(call, call.argument(1), false, &shape);
    if (as_one_matrix(&w)) return call.check(pydet_skinny_gemm(stream, &a, &w, given_bias, &out, &options));
  }
  plain.arithmetic = options.arithmetic;
  plain.k_chunk = options.k_chunk;
  plain.accumulate = options.accumulate;
  plain.kernel = options.kernel;
  plain.initial = has_initial ? &initial : nullptr;
  call.check(pydet_gemm(stream, &a, &b, given_bias, &out, &plain));
}

constexpr char kGemm[] = "gemm";
constexpr pydet_xla_handler kHandlers[] = {
    handler<kGemm, gemm>(),
};

}  // namespace

Items<pydet_xla_handler> Operation<Gemm>::xla() { return kHandlers; }

}  // namespace pydet
