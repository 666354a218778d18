// What XLA asks of rotary embeddings.

#include "core/operations.h"
#include "entry/xla_rows.h"

namespace pydet {
namespace {

pydet_tensor as_vector(Call &call, const char *name, const pydet_xla_buffer &buffer, Shape *shape) {
  if (buffer.rank != 1) {
    call.fail("%s is %s, want a vector", name, ShapeWords(buffer.dims, buffer.rank).text);
    return {};
  }
  *shape = {{buffer.dims[0]}, {1}};
  return call.tensor(buffer, shape, 1);
}

// Operands: positions, frequencies; cos, sin.
void rotary_table(Call &call) {
  pydet_rotary_table_options options = {};
  options.struct_size = sizeof options;
  options.scale = call.real("scale");
  options.kernel = call.kernel();
  const pydet_xla_buffer &of_cos = call.result(0), &of_sin = call.result(1);
  Shape s[4];
  const pydet_tensor positions = as_values(call, "positions", call.argument(0), of_cos, &s[0]),
                     frequencies = as_vector(call, "frequencies", call.argument(1), &s[1]),
                     cos = as_rows(call, of_cos, &s[2]);
  call.expect_shape("sin", of_sin, of_cos.dims, of_cos.rank);
  const pydet_tensor sin = as_rows(call, of_sin, &s[3]);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_rotary_table(stream, &positions, &frequencies, &cos, &sin, &options));
}

// Heads of N elements, whatever the leading dimensions.
pydet_tensor as_heads(Call &call, const char *name, const pydet_xla_buffer &buffer, Shape *shape) {
  if (buffer.rank < 2) {
    call.fail("%s is %s, want 2 dimensions or more", name, ShapeWords(buffer.dims, buffer.rank).text);
    return {};
  }
  const int64_t heads = buffer.dims[buffer.rank - 2], n = buffer.dims[buffer.rank - 1];
  *shape = {{product(call, buffer.dims, buffer.rank - 2), heads, n}, {heads * n, n, 1}};
  return call.tensor(buffer, shape, 3);
}

// Operands: q, k if has_k, cos, sin, of as many tokens each; q_out, k_out if has_k.
void rotary(Call &call) {
  const bool has_k = call.flag("has_k");
  pydet_rotary_options options = {};
  options.struct_size = sizeof options;
  options.whole = call.flag("whole");
  options.neighbours = call.flag("neighbours");
  options.out_neighbours = call.flag("out_neighbours");
  options.in_fp32 = call.flag("in_fp32");
  options.transposed = call.flag("transposed");
  options.kernel = call.kernel();
  Shape s[6];
  const pydet_tensor q = as_heads(call, "q", call.argument(0), &s[0]),
                     q_out = as_heads(call, "q_out", call.result(0), &s[1]),
                     cos = as_rows(call, call.argument(1 + has_k), &s[2]),
                     sin = as_rows(call, call.argument(2 + has_k), &s[3]);
  pydet_tensor k = {}, k_out = {};
  if (has_k) {
    k = as_heads(call, "k", call.argument(1), &s[4]);
    k_out = as_heads(call, "k_out", call.result(1), &s[5]);
  }
  void *stream = call.stream();
  if (!call.failed())
    call.check(pydet_rotary(stream, &q, has_k ? &k : nullptr, &cos, &sin, &q_out, has_k ? &k_out : nullptr, &options));
}

constexpr char kRotaryTable[] = "rotary_table";
constexpr char kRotary[] = "rotary";
constexpr pydet_xla_handler kHandlers[] = {
    handler<kRotaryTable, rotary_table>(),
    handler<kRotary, rotary>(),
};

}  // namespace

Items<pydet_xla_handler> Operation<RotaryTable>::xla() { return kHandlers; }

}  // namespace pydet
