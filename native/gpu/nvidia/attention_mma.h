// The objects that attention_mma.cu is compiled to, one a type, and who calls them (attention_mma.cpp).
#pragma once

#include "gpu/nvidia/gemm_mma.h"
#include "ops/attention/problem.h"

namespace pydet {

// What a block keeps in the workspace where segments are folded, at most, and the most blocks that do.
constexpr int kAttentionRunningBytes = 67584, kAttentionRunningBlocks = 320;

template <Type type> struct AttentionMma {
  static bool takes(const Attention &);
  static pydet_status run(const Attention &);
};

}  // namespace pydet
