// A step of AdamW for some tensors, once a call is checked.
#pragma once

#include "core/operation.h"

namespace pydet {

// The numbers of a step, as NUMERICS.md makes them of a caller's.
struct AdamWNumbers {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float root_factor;  // 1 / sqrt(1 - beta2^t)
  float eps;
  float decay;  // 1 - lr weight_decay
  float rate;   // lr / (1 - beta1^t)
};

// `size` elements, which lie at one place in all of them.
struct AdamWTensor {
  char *param;
  const char *grad;
  float *exp_avg, *exp_avg_sq;
  float *master;  // NULL: w is the parameter
  int64_t size;   // 1 or more
  Type param_type, grad_type;
};

struct AdamW {
  Device device;
  void *stream;
  AdamWNumbers by;
  int32_t count;
  AdamWTensor tensors[PYDET_ADAMW_TENSORS];

  uint64_t needs() const {
    bool masters = false;
    for (int i = 0; i < count; ++i) masters = masters || tensors[i].master;
    return when(masters, kMaster);
  }
};

template <> struct Operation<AdamW> : AlwaysIeee {
  static constexpr const char *name = "adamw";
  static Type input(const AdamW &a) { return a.tensors[0].param_type; }
  template <class Show> static void memory(const AdamW &a, Show show) {
    for (int i = 0; i < a.count; ++i) {
      const AdamWTensor &t = a.tensors[i];
      show(t.param, t.grad, t.exp_avg, t.exp_avg_sq, t.master);
    }
  }
  using Functions = FunctionList<pydet_adamw>;
  static Items<pydet_exchange_method> python();
};

}  // namespace pydet
