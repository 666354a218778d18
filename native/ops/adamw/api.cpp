// A step of AdamW.

#include "core/launch.h"
#include "ops/adamw/allocations.h"
#include "ops/adamw/check.h"

namespace pydet {

template <> struct Reach<AdamW> {
  Allocations allocations;
  bool operator()(const Backend &backend, int32_t id, const void *at) {
    const Hooks<AdamW> *hooks = backend.table<AdamW>().hooks;
    return (hooks && allocations.has(*hooks, at)) || backend.reaches(id, at);
  }
};

}  // namespace pydet

using namespace pydet;

pydet_status pydet_adamw(void *stream, const pydet_tensor *const *params, const pydet_tensor *const *grads,
                         const pydet_tensor *const *exp_avgs, const pydet_tensor *const *exp_avg_sqs,
                         const pydet_tensor *const *masters, int32_t count, const pydet_adamw_step *step,
                         const pydet_adamw_options *given) {
  const char *op = "adamw";
  pydet_adamw_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  if (count < 1 || count > PYDET_ADAMW_TENSORS)
    return fail(PYDET_INVALID_VALUE, "%s: count is %d, want 1 to %d tensors", op, int(count), PYDET_ADAMW_TENSORS);
  AdamW adamw = {};
  adamw.stream = stream;
  PYDET_TRY(numbers_of(op, step, &adamw.by));
  PYDET_TRY(adamw_of(op, {{params, grads, exp_avgs, exp_avg_sqs, masters}}, count, &adamw));
  return adamw.count ? launch(op, adamw, options.kernel) : nothing_to_write();
}
