// RMSNorm and LayerNorm: the kernels of norm.h.

#include "gpu/any/norm.h"

namespace pydet {

bool rmsnorm_held_takes(const RmsNorm &p) { return p.n <= kLongestHeldRow && all_whole(p); }
pydet_status rmsnorm_held(const RmsNorm &p) { return norm_held("rmsnorm_held", p); }
pydet_status rmsnorm_general(const RmsNorm &p) { return norm_general("rmsnorm_general", p); }

bool layernorm_held_takes(const LayerNorm &p) { return p.n <= kLongestHeldLayer && all_whole(p); }
pydet_status layernorm_held(const LayerNorm &p) { return norm_held("layernorm_held", p); }
pydet_status layernorm_general(const LayerNorm &p) { return norm_general("layernorm_general", p); }

}  // namespace pydet
