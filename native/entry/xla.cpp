// The handlers for XLA's foreign function interface: each reads its buffers and attributes, calls the C function of its
// name, and turns its status and sentence into XLA's error. They keep nothing and allocate nothing.

#include "entry/xla_call.h"

#include "core/operations.h"

namespace pydet {
namespace {

// Those of all operations; the first one without a name ends them.
template <class... Problems> const pydet_xla_handler *handlers_of(Operations<Problems...>) {
  const int count = (0 + ... + Operation<Problems>::xla().count);
  auto *const handlers = new pydet_xla_handler[size_t(count) + 1]();  // for ever
  auto *next = handlers;
  for (const auto &own : {Operation<Problems>::xla()...})
    for (const pydet_xla_handler &handler : own) *next++ = handler;
  return handlers;
}

}  // namespace

Items<pydet_xla_handler> AnyOperation::xla() { return {}; }

}  // namespace pydet

const pydet_xla_handler *pydet_xla_handlers(void) {
  static const pydet_xla_handler *const handlers = pydet::handlers_of(pydet::AllOperations{});
  return handlers;
}
