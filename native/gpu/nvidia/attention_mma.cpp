// Attention on tensor cores through mma.sync: what the host does for both of its types (attention_mma.cu).

#include "gpu/nvidia/attention_mma.h"

#include <cstring>

#include "gpu/any/attention.h"
#include "gpu/kernels.h"

namespace pydet {

// Room for what segments are folded into, where its kernel is asked for or may be chosen.
uint64_t attention_mma_workspace(const Attention &p, const char *kernel) {
  const bool asked = kernel ? strstr(kernel, "_mma") != nullptr
                            : p.arithmetic == Arithmetic::sm80 || p.arithmetic == Arithmetic::automatic;
  if (!asked || segments_of(p) < 2) return 0;
  const double tiles = double(p.sequences) * double(p.groups) * double(divide_up(rows_of_group(p), 64));
  return uint64_t(kAttentionRunningBytes) * uint64_t(tiles < kAttentionRunningBlocks ? tiles : kAttentionRunningBlocks);
}

bool attention_mma_takes(const Attention &p) { return AttentionMma<Type::bf16>::takes(p); }

pydet_status attention_mma(const Attention &p) {
  return with_type<kHalfTypes>(p.q.type, [&](auto type) { return AttentionMma<decltype(type)::value>::run(p); });
}

}  // namespace pydet
