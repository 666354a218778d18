// libpydet_cpu.so has no GPU backend.

#include "core/backend.h"

const pydet::Backend *pydet::gpu_backend() { return nullptr; }
