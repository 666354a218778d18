// Which tile a problem is computed by (choose.cpp).
#pragma once

#include "problem.h"

namespace pydet {

// The index in kSm90Tiles of the tile that is predicted to be the fastest, for a problem that one of them takes.
int sm90_choose(const Gemm &);

}  // namespace pydet
