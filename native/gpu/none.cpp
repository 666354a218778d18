// libpydet_cpu.so has no GPU backend.

#include "kernel.h"

const pydet::Backend *pydet::gpu_backend() { return nullptr; }
