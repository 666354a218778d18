// The one list of operations, of which tables, backends, the ways in from Python and XLA, and what the library says of
// itself are made.
#pragma once

#include <type_traits>

#include "ops/activation/problem.h"
#include "ops/adamw/problem.h"
#include "ops/attention/problem.h"
#include "ops/embedding/problem.h"
#include "ops/fold/problem.h"
#include "ops/gemm/problem.h"
#include "ops/grouped/problem.h"
#include "ops/head/problem.h"
#include "ops/norm/problem.h"
#include "ops/rotary/problem.h"
#include "ops/sample/problem.h"
#include "ops/scaled/problem.h"
#include "ops/scaled_grouped/problem.h"
#include "ops/scan/problem.h"
#include "ops/softmax/problem.h"

namespace pydet {

template <class... Problems> struct Operations {
  template <template <class> class Of> struct Each : Of<Problems>... {};

  // Whether these are all of them, each once.
  template <class... Given> static constexpr bool are() {
    const auto times = [](auto *problem) { return (int(std::is_same_v<decltype(problem), Given *>) + ... + 0); };
    return sizeof...(Given) == sizeof...(Problems) && ((times(static_cast<Problems *>(nullptr)) == 1) && ...);
  }
};

// In the order of pydet_kernel_name.
using AllOperations =
    Operations<Gemm, ScaledGemm, Quantize, RmsNorm, RmsNormBackward, Softmax, SoftmaxBackward, GroupedGemm, Fold,
               LayerNorm, LayerNormBackward, ScaledGroupedGemm, Attention, AttentionBackward, Activation,
               ActivationBackward, Sample, TopK, Embedding, EmbeddingBackward, SelectiveScan, GatedDelta, CausalConv1d,
               LinearLogProb, HeadRows, RotaryTable, Rotary, SelectiveScanBackward, GatedDeltaBackward,
               CausalConv1dBackward, RmsNormQuantize, AdamW>;

}  // namespace pydet
