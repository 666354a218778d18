// The handlers for XLA's foreign function interface: each reads its buffers and attributes, calls the C function of its
// name, and turns its status and sentence into XLA's error. They keep nothing and allocate nothing.

#include "entry/xla_call.h"

#include "core/backend.h"
#include "core/joined.h"
#include "core/operations.h"

namespace pydet {
namespace {

template <class... Problems> const pydet_xla_handler *handlers_of(Operations<Problems...>) {
  return joined<pydet_xla_handler>({Operation<Problems>::xla()...});
}

}  // namespace

pydet_status copy_within(const char *op, const pydet_device &device, void *stream, void *to, const void *from,
                         uint64_t bytes) {
  const Backend *backend = backend_for(device.device_type);
  return backend ? backend->copy(op, device.device_id, stream, to, from, bytes)
                 : PYDET_OK;  // or else the operation is refused
}

Items<pydet_xla_handler> AnyOperation::xla() { return {}; }

}  // namespace pydet

const pydet_xla_handler *pydet_xla_handlers(void) {
  static const pydet_xla_handler *const handlers = pydet::handlers_of(pydet::AllOperations{});
  return handlers;
}
