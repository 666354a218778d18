// The Python entry (python.h): reads Python objects as descriptors, makes the results in the caller's framework,
// calls the operation, and hands the results back. Every check of shapes, types and devices stays the operation's own.
//
// Called with the GIL held, as any Python method; it is released around work that is large or goes to a GPU.
#include "entry/python/methods.h"

#include "check/error.h"

namespace pydet {
namespace {

const MethodDef kMethods[] = {
    {"gemm", call_product<Product::gemm>, kFastCallKeywords, nullptr},
    {"gemm_da", call_product<Product::gemm_da>, kFastCallKeywords, nullptr},
    {"gemm_db", call_product<Product::gemm_db>, kFastCallKeywords, nullptr},
    {"skinny_gemm", call_product<Product::skinny_gemm>, kFastCallKeywords, nullptr},
    {"scaled_gemm", call_scaled_gemm, kFastCallKeywords, nullptr},
    {"quantize", call_quantize, kFastCallKeywords, nullptr},
    {"rmsnorm", call_rmsnorm, kFastCallKeywords, nullptr},
    {"rmsnorm_backward", call_rmsnorm_backward, kFastCallKeywords, nullptr},
    {"layernorm", call_layernorm, kFastCallKeywords, nullptr},
    {"layernorm_backward", call_layernorm_backward, kFastCallKeywords, nullptr},
    {"softmax", call_softmax<false>, kFastCallKeywords, nullptr},
    {"log_softmax", call_softmax<true>, kFastCallKeywords, nullptr},
    {"softmax_backward", call_softmax_backward<false>, kFastCallKeywords, nullptr},
    {"log_softmax_backward", call_softmax_backward<true>, kFastCallKeywords, nullptr},
    {"log_prob", call_log_prob, kFastCallKeywords, nullptr},
    {"log_prob_backward", call_log_prob_backward, kFastCallKeywords, nullptr},
    {"grouped_gemm", call_grouped_gemm, kFastCallKeywords, nullptr},
    {"scaled_grouped_gemm", call_scaled_grouped_gemm, kFastCallKeywords, nullptr},
    {"fold", call_fold, kFastCallKeywords, nullptr},
    {"attention", call_attention, kFastCallKeywords, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace pydet

const void *pydet_exchange_methods(const pydet_exchange *exchange) {
  using namespace pydet;
  static int64_t owner = -1;  // the interpreter that may use the hooks
  if (exchange->struct_size != sizeof(pydet_exchange)) {
    fail(PYDET_UNSUPPORTED, "this library was built for another release of the Python package; build both anew");
    return nullptr;
  }
  int64_t none = -1;
  if (!__atomic_compare_exchange_n(&owner, &none, exchange->interpreter, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) &&
      none != exchange->interpreter) {
    fail(PYDET_UNSUPPORTED, "pydet is in use by another interpreter of this process; import it in one of them only");
    return nullptr;
  }
  pydet::exchange = exchange;
  return kMethods;
}

void pydet_exchange_forget_devices(void) {
  if (const pydet::Backend *gpu = pydet::gpu_backend()) gpu->forget();
}

const char *pydet_exchange_type(int32_t index, pydet_dtype *dtype) {
  if (index < 0 || index >= pydet::kTypeCount) return nullptr;
  *dtype = pydet::dtype_of(index);
  return pydet::kTypes[index].name;
}

int32_t pydet_exchange_last_library(void) { return pydet::last_library; }
