// The methods that the library gives to Python, a file a topic.
#pragma once

#include "entry/python/results.h"

namespace pydet {

using Method = Object *(Object *self, Object *const *args, intptr_t count, Object *keywords);

template <Product product> Object *call_product(Object *self, Object *const *args, intptr_t count, Object *keywords);
Method call_grouped_gemm, call_scaled_gemm, call_scaled_grouped_gemm, call_quantize;
Method call_rmsnorm, call_rmsnorm_backward, call_layernorm, call_layernorm_backward;
template <bool log> Object *call_softmax(Object *self, Object *const *args, intptr_t count, Object *keywords);
template <bool log> Object *call_softmax_backward(Object *self, Object *const *args, intptr_t count, Object *keywords);
Method call_log_prob, call_log_prob_backward;
Method call_fold;
Method call_attention;

}  // namespace pydet
