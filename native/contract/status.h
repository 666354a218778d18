// The status of a call, and the one writer of error text.
#pragma once

#include "pydet.h"

namespace pydet {

// Writes the thread's error text, printf style, and returns the status (core/error.h).
__attribute__((format(printf, 2, 3))) pydet_status fail(pydet_status status, const char *format, ...);

}  // namespace pydet
