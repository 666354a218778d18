// What XLA asks of products of groups.

#include "core/operations.h"
#include "ops/gemm/xla.h"

namespace pydet {
namespace {

// Products of groups of tokens, whose ends are on the device. Operands: a, b, group_end (int32), and what lies in the
// result before: rows of no group keep it. depth: a lies as [T, M] and is read transposed, with b [T, N].
// transpose_b: b lies as [G, N, K].
void grouped_gemm(Call &call) {
  const bool depth = call.flag("depth"), transpose_b = call.flag("transpose_b");
  Shape shapes[4];
  const pydet_xla_buffer &ends = call.argument(2), &result = call.result(0);
  const pydet_tensor a = matrix(call, call.argument(0), depth, &shapes[0]);
  const pydet_tensor b = matrix(call, call.argument(1), transpose_b, &shapes[1]);
  const pydet_tensor out = matrix(call, result, false, &shapes[2]);
  if (ends.rank != 1) call.fail("group_end is %s, want one dimension", ShapeWords(ends.dims, ends.rank).text);
  shapes[3] = {{elements(ends)}, {1}};
  const pydet_tensor group_end = call.tensor(ends, &shapes[3], 1);
  continue_from(call, call.argument(3), result);
  pydet_grouped_gemm_options options = {};
  options.struct_size = sizeof options;
  options.arithmetic = call.number("arithmetic");
  options.k_chunk = call.integer("k_chunk");
  options.kernel = call.kernel();
  void *stream = call.stream();
  if (call.failed()) return;
  call.check(pydet_grouped_gemm(stream, &a, &b, nullptr, nullptr, &group_end, &out, &options));
}

constexpr char kGroupedGemm[] = "grouped_gemm";
constexpr pydet_xla_handler kHandlers[] = {
    handler<kGroupedGemm, grouped_gemm>(),
};

}  // namespace

Items<pydet_xla_handler> Operation<GroupedGemm>::xla() { return kHandlers; }

}  // namespace pydet
