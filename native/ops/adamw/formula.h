// AdamW of one element, or of a vector of them (NUMERICS.md, "AdamW"): the text of every backend.
#pragma once

#include <cmath>

#include "ops/adamw/problem.h"

namespace pydet {

PYDET_HD float root(float x) { return sqrtf(x); }

// Each step rounded to fp32, nothing fused. of(x): the number x for all elements of a vector.
template <class V, class Of>
PYDET_HD void adamw_step(const AdamWNumbers &by, const Of &of, const V &g, V &w, V &m, V &v) {
  m = of(by.beta1) * m + of(by.one_minus_beta1) * g;
  v = of(by.beta2) * v + (of(by.one_minus_beta2) * g) * g;
  const V d = root(v) * of(by.root_factor) + of(by.eps);
  w = w * of(by.decay) - (of(by.rate) * m) / d;
}

}  // namespace pydet
