// The CPU kernels. Each source file is compiled once per instruction set and specialises these for its own `Isa`
// (simd.h), with everything else in an unnamed namespace; backend.cpp makes the table.
#pragma once

#include "ops/activation/problem.h"
#include "ops/adamw/problem.h"
#include "ops/attention/problem.h"
#include "ops/embedding/problem.h"
#include "ops/fold/problem.h"
#include "ops/gemm/rounding.h"
#include "ops/head/loss.h"
#include "ops/norm/problem.h"
#include "ops/rotary/problem.h"
#include "ops/sample/problem.h"
#include "ops/scan/problem.h"
#include "ops/softmax/problem.h"

namespace pydet {

struct Scalar {};  // whatever the compiler's baseline is
struct Avx2 {};    // AVX2, FMA, F16C
struct Avx512 {};  // AVX-512 F, BW, DQ, VL

template <class Isa> pydet_status gemm_ieee(const Gemm &);
template <class Isa> pydet_status gemm_sm90(const Gemm &);
template <class Isa> pydet_status gemm_sm80(const Gemm &);
template <class Isa> pydet_status gemm_cdna3(const Gemm &);
template <class Isa> pydet_status gemm_cdna2(const Gemm &);
template <class Isa> pydet_status attention(const Attention &);
template <class Isa> pydet_status attention_backward(const AttentionBackward &);
template <class Isa> pydet_status rmsnorm(const RmsNorm &);
template <class Isa> pydet_status rmsnorm_quantize(const RmsNormQuantize &);
template <class Isa> pydet_status rmsnorm_backward(const RmsNormBackward &);
template <class Isa> pydet_status softmax(const Softmax &);
template <class Isa> pydet_status softmax_backward(const SoftmaxBackward &);
template <class Isa> pydet_status head_rows(const HeadRows &);
template <class Isa> pydet_status head_loss(const HeadLoss &);
template <class Isa> pydet_status sample(const Sample &);
template <class Isa> pydet_status topk(const TopK &);
template <class Isa> pydet_status embedding(const Embedding &);
template <class Isa> pydet_status embedding_backward(const EmbeddingBackward &);
template <class Isa> pydet_status rotary_table(const RotaryTable &);
template <class Isa> pydet_status rotary(const Rotary &);
template <class Isa> pydet_status activation(const Activation &);
template <class Isa> pydet_status activation_backward(const ActivationBackward &);
template <class Isa> pydet_status fold(const Fold &);
template <class Isa> pydet_status adamw(const AdamW &);
template <class Isa> pydet_status round_elements(const Rounding &);
template <class Isa> pydet_status layernorm(const LayerNorm &);
template <class Isa> pydet_status layernorm_backward(const LayerNormBackward &);
template <class Isa> pydet_status selective_scan(const SelectiveScan &);
template <class Isa> pydet_status gated_delta(const GatedDelta &);
template <class Isa> pydet_status causal_conv1d(const CausalConv1d &);
template <class Isa> pydet_status selective_scan_backward(const SelectiveScanBackward &);
template <class Isa> pydet_status gated_delta_backward(const GatedDeltaBackward &);
template <class Isa> pydet_status causal_conv1d_backward(const CausalConv1dBackward &);

}  // namespace pydet
