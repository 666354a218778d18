// The sum of parts in a fixed order.

#include "core/launch.h"
#include "ops/fold/check.h"

using namespace pydet;

pydet_status pydet_fold(void *stream, const pydet_tensor *const *parts, int32_t count, const pydet_tensor *bias_tensor,
                        const pydet_tensor *out_tensor, const pydet_fold_options *given) {
  const char *op = "fold";
  pydet_fold_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  if (options.order != PYDET_ORDERED && options.order != PYDET_TREE)
    return fail(PYDET_INVALID_VALUE, "%s: options.order is %d, want 0 (ordered) or 1 (tree)", op, int(options.order));
  PYDET_TRY(check_flag(op, "accumulate", options.accumulate));
  View bias, out;
  PYDET_TRY(read(op, "out", kResult, out_tensor, 0, &out));
  PYDET_TRY(read_optional(op, "bias", kAddend, bias_tensor, 0, &bias));
  Fold fold = {};
  fold.stream = stream;
  fold.tree = options.order == PYDET_TREE;
  fold.accumulate = options.accumulate != 0;
  if (count < 1 || count > PYDET_FOLD_PARTS)
    return fail(PYDET_INVALID_VALUE, "%s: count is %d, want 1 to %d parts", op, int(count), PYDET_FOLD_PARTS);
  PYDET_TRY(peers_of(op, options.peers, count, &fold.peers));
  const bool continues = fold.peers.first_sums || fold.peers.flag;
  if (continues && (fold.tree || fold.accumulate))
    return fail(PYDET_INVALID_VALUE, "%s: peers.%s is given, want ordered sums, without accumulate", op,
                fold.peers.flag ? "flag" : "first_sums");
  PYDET_TRY(fold_of(parts, count, bias, out, &fold));
  return fold.size ? launch(op, fold, options.kernel) : nothing_to_write();
}
