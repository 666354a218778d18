// What XLA asks of a fold: parts behind each other in one buffer.

#include "core/operations.h"
#include "entry/xla_call.h"

namespace pydet {
namespace {

// Operands: the parts [S, ...], fp32, and a bias [N] if has_bias; their sum in ascending order, [...] of any type.
void fold(Call &call) {
  pydet_fold_options options = {};
  options.struct_size = sizeof options;
  options.kernel = call.kernel();
  const pydet_xla_buffer &parts = call.argument(0), &result = call.result(0);
  const pydet_xla_buffer *added = call.flag("has_bias") ? &call.argument(1) : nullptr;
  bool fits = parts.rank >= 1 && parts.rank <= kMaxRank && result.rank == parts.rank - 1;
  for (int64_t i = 0; fits && i < result.rank; ++i) fits = result.dims[i] == parts.dims[i + 1];
  if (!fits)
    call.fail("parts are %s, want as many of %s", ShapeWords(parts.dims, parts.rank).text,
              ShapeWords(result.dims, result.rank).text);
  else if (parts.dims[0] < 1 || parts.dims[0] > PYDET_FOLD_PARTS)
    call.fail("got %" PRId64 " parts, want 1 to %d", parts.dims[0], PYDET_FOLD_PARTS);
  if (added && added->rank != 1) call.fail("bias is %s, want [N]", ShapeWords(added->dims, added->rank).text);
  void *stream = call.stream();
  if (call.failed()) return;
  Shape shape = {}, bias_shape = {};
  const int rank = int(result.rank);
  std::memcpy(shape.dims, result.dims, size_t(rank) * sizeof *result.dims);
  const int64_t each = product(call, shape.dims, rank);
  lay_out(&shape, rank);
  pydet_tensor tensors[PYDET_FOLD_PARTS], bias = {};
  const pydet_tensor *pointers[PYDET_FOLD_PARTS];
  for (int64_t i = 0; i < parts.dims[0]; ++i)
    tensors[i] = call.tensor(parts, &shape, rank, i * each), pointers[i] = &tensors[i];
  const pydet_tensor out = call.tensor(result, &shape, rank);
  if (added) bias_shape = {{added->dims[0]}, {1}}, bias = call.tensor(*added, &bias_shape, 1);
  if (!call.failed())
    call.check(pydet_fold(stream, pointers, int32_t(parts.dims[0]), added ? &bias : nullptr, &out, &options));
}

constexpr char kFold[] = "fold";
constexpr pydet_xla_handler kHandlers[] = {
    handler<kFold, fold>(),
};

}  // namespace

Items<pydet_xla_handler> Operation<Fold>::xla() { return kHandlers; }

}  // namespace pydet
