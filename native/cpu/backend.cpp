// The CPU's table of kernels: every kernel once per instruction set, the widest first, chosen by what this machine has.

#include <cstdio>
#include <thread>

#include "core/backend.h"
#include "cpu/grouped_kernels.h"
#include "ops/attention/formulas.h"

namespace pydet {
namespace {

// Each instruction set includes the ones below it.
bool has_scalar(const Device &) { return true; }
#if defined(__x86_64__)
bool has_avx2(const Device &) {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512(const Device &device) {
  return has_avx2(device) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
constexpr Machine kAvx512 = {"avx512", has_avx512}, kAvx2 = {"avx2", has_avx2};
#endif
constexpr Machine kAnyCpu = {"any CPU", has_scalar};

constexpr uint64_t kGemmFeatures = kBatch | kBias | kAccumulate | kChunks | kAlongM | kAlongN;
constexpr uint64_t kLayerNormFeatures = kResidual | kWeight | kWeightOffset | kBias | kMean | kRstd | kTwoStrides;
constexpr uint64_t kLayerNormGradient =
    kResidual | kWeight | kWeightOffset | kTwoStrides | kAccumulate | kRowGradient | kWeightGradient | kBiasGradient;
constexpr uint64_t kOfHeads = kHeads | kWideSum;
constexpr uint64_t kNormFeatures = kResidual | kWeight | kWeightOffset | kBias | kRstd | kTwoStrides | kOfHeads;
constexpr uint64_t kGradientFeatures = kLayerNormGradient | kOfHeads | kBlockSums;
constexpr uint64_t kSoftmaxFeatures = kTwoStrides | kLogarithm | kColumn | kRowGradient | kLogProbs | kSlabs;
constexpr uint64_t kSoftmaxGradient = kTwoStrides | kLogarithm;
constexpr uint64_t kHeadRowsFeatures = kRowGradient | kSoftcap | kSlabs;
constexpr uint64_t kActivationFeatures = kTwoStrides | kGate;
constexpr uint64_t kActivationGradient = kActivationFeatures | kRowGradient;
constexpr uint64_t kSampleFeatures = kTwoStrides | kFilters | kLogProbs;
constexpr uint64_t kRotaryFeatures = kTwoStrides | kNeighbours | kWideSum | kRowGradient;
constexpr uint64_t kEmbeddingGradient = kTwoStrides | kAccumulate | kPadding;

constexpr uint64_t kScanFeatures = kInitialState | kFinalState | kPacked;
constexpr uint64_t kSelectiveFeatures = kScanFeatures | kEachState | kSkip;
constexpr uint64_t kConvFeatures = kInitialState | kPacked | kBias;
constexpr uint64_t kScanGradient = kInitialState | kPacked | kInitialGradient | kFinalGradient;
constexpr uint64_t kSelectiveGradient = kScanGradient | kEachState | kSkip;
constexpr uint64_t kConvGradient =
    kInitialState | kPacked | kRowGradient | kWeightGradient | kBiasGradient | kInitialGradient;

constexpr Kernel<Gemm> kGemm[] = {
#if defined(__x86_64__)
    Row("cpu_gemm_ieee_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kGemmFeatures).launches(gemm_ieee<Avx512>),
    Row("cpu_gemm_ieee_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kGemmFeatures).launches(gemm_ieee<Avx2>),
    Row("cpu_gemm_sm90_avx512", kHalfTypes, Arithmetic::sm90, kAvx512, kGemmFeatures).launches(gemm_sm90<Avx512>),
    Row("cpu_gemm_sm90_avx2", kHalfTypes, Arithmetic::sm90, kAvx2, kGemmFeatures).launches(gemm_sm90<Avx2>),
    Row("cpu_gemm_sm80_avx512", kHalfTypes, Arithmetic::sm80, kAvx512, kGemmFeatures).launches(gemm_sm80<Avx512>),
    Row("cpu_gemm_sm80_avx2", kHalfTypes, Arithmetic::sm80, kAvx2, kGemmFeatures).launches(gemm_sm80<Avx2>),
    Row("cpu_gemm_cdna3_avx512", kHalfTypes, Arithmetic::cdna3, kAvx512, kGemmFeatures).launches(gemm_cdna3<Avx512>),
    Row("cpu_gemm_cdna3_avx2", kHalfTypes, Arithmetic::cdna3, kAvx2, kGemmFeatures).launches(gemm_cdna3<Avx2>),
    Row("cpu_gemm_cdna2_avx512", kHalfTypes, Arithmetic::cdna2, kAvx512, kGemmFeatures).launches(gemm_cdna2<Avx512>),
    Row("cpu_gemm_cdna2_avx2", kHalfTypes, Arithmetic::cdna2, kAvx2, kGemmFeatures).launches(gemm_cdna2<Avx2>),
#endif
    Row("cpu_gemm_ieee_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kGemmFeatures).launches(gemm_ieee<Scalar>),
    Row("cpu_gemm_sm90_scalar", kHalfTypes, Arithmetic::sm90, kAnyCpu, kGemmFeatures).launches(gemm_sm90<Scalar>),
    Row("cpu_gemm_sm80_scalar", kHalfTypes, Arithmetic::sm80, kAnyCpu, kGemmFeatures).launches(gemm_sm80<Scalar>),
    Row("cpu_gemm_cdna3_scalar", kHalfTypes, Arithmetic::cdna3, kAnyCpu, kGemmFeatures).launches(gemm_cdna3<Scalar>),
    Row("cpu_gemm_cdna2_scalar", kHalfTypes, Arithmetic::cdna2, kAnyCpu, kGemmFeatures).launches(gemm_cdna2<Scalar>),
};

constexpr Kernel<ScaledGemm> kScaledGemm[] = {
#if defined(__x86_64__)
    Row("cpu_scaled_gemm_ieee_avx512", kFp8Types, Arithmetic::ieee, kAvx512, kScaledGemmFeatures)
        .launches(scaled_gemm_ieee<Avx512>),
    Row("cpu_scaled_gemm_ieee_avx2", kFp8Types, Arithmetic::ieee, kAvx2, kScaledGemmFeatures)
        .launches(scaled_gemm_ieee<Avx2>),
    Row("cpu_scaled_gemm_sm90_avx512", kFp8Types, Arithmetic::sm90, kAvx512, kScaledGemmFeatures)
        .launches(scaled_gemm_sm90<Avx512>),
    Row("cpu_scaled_gemm_sm90_avx2", kFp8Types, Arithmetic::sm90, kAvx2, kScaledGemmFeatures)
        .launches(scaled_gemm_sm90<Avx2>),
#endif
    Row("cpu_scaled_gemm_ieee_scalar", kFp8Types, Arithmetic::ieee, kAnyCpu, kScaledGemmFeatures)
        .launches(scaled_gemm_ieee<Scalar>),
    Row("cpu_scaled_gemm_sm90_scalar", kFp8Types, Arithmetic::sm90, kAnyCpu, kScaledGemmFeatures)
        .launches(scaled_gemm_sm90<Scalar>),
};

constexpr Kernel<Quantize> kQuantize[] = {
#if defined(__x86_64__)
    Row("cpu_quantize_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kQuantizeFeatures).launches(quantize<Avx512>),
    Row("cpu_quantize_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kQuantizeFeatures).launches(quantize<Avx2>),
#endif
    Row("cpu_quantize_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kQuantizeFeatures).launches(quantize<Scalar>),
};

constexpr Kernel<RmsNorm> kRmsNorm[] = {
#if defined(__x86_64__)
    Row("cpu_rmsnorm_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kNormFeatures).launches(rmsnorm<Avx512>),
    Row("cpu_rmsnorm_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kNormFeatures).launches(rmsnorm<Avx2>),
#endif
    Row("cpu_rmsnorm_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kNormFeatures).launches(rmsnorm<Scalar>),
};

constexpr uint64_t kNormQuantizeFeatures =
    (kNormFeatures & ~(kBias | kHeads)) | kGivenScales | kRowScales | kGroupScales;
constexpr Kernel<RmsNormQuantize> kRmsNormQuantize[] = {
#if defined(__x86_64__)
    Row("cpu_rmsnorm_quantize_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kNormQuantizeFeatures)
        .launches(rmsnorm_quantize<Avx512>),
    Row("cpu_rmsnorm_quantize_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kNormQuantizeFeatures)
        .launches(rmsnorm_quantize<Avx2>),
#endif
    Row("cpu_rmsnorm_quantize_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kNormQuantizeFeatures)
        .launches(rmsnorm_quantize<Scalar>),
};

constexpr Kernel<RmsNormBackward> kRmsNormBackward[] = {
#if defined(__x86_64__)
    Row("cpu_rmsnorm_backward_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kGradientFeatures)
        .launches(rmsnorm_backward<Avx512>),
    Row("cpu_rmsnorm_backward_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kGradientFeatures)
        .launches(rmsnorm_backward<Avx2>),
#endif
    Row("cpu_rmsnorm_backward_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kGradientFeatures)
        .launches(rmsnorm_backward<Scalar>),
};

constexpr Kernel<Softmax> kSoftmax[] = {
#if defined(__x86_64__)
    Row("cpu_softmax_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kSoftmaxFeatures).launches(softmax<Avx512>),
    Row("cpu_softmax_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kSoftmaxFeatures).launches(softmax<Avx2>),
#endif
    Row("cpu_softmax_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kSoftmaxFeatures).launches(softmax<Scalar>),
};

constexpr Kernel<SoftmaxBackward> kSoftmaxBackward[] = {
#if defined(__x86_64__)
    Row("cpu_softmax_backward_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kSoftmaxGradient)
        .launches(softmax_backward<Avx512>),
    Row("cpu_softmax_backward_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kSoftmaxGradient)
        .launches(softmax_backward<Avx2>),
#endif
    Row("cpu_softmax_backward_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kSoftmaxGradient)
        .launches(softmax_backward<Scalar>),
};

constexpr Kernel<HeadRows> kHeadRows[] = {
#if defined(__x86_64__)
    Row("cpu_head_rows_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kHeadRowsFeatures)
        .launches(head_rows<Avx512>),
    Row("cpu_head_rows_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kHeadRowsFeatures).launches(head_rows<Avx2>),
#endif
    Row("cpu_head_rows_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kHeadRowsFeatures)
        .launches(head_rows<Scalar>),
};

constexpr Kernel<Activation> kActivation[] = {
#if defined(__x86_64__)
    Row("cpu_activation_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kActivationFeatures)
        .launches(activation<Avx512>),
    Row("cpu_activation_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kActivationFeatures).launches(activation<Avx2>),
#endif
    Row("cpu_activation_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kActivationFeatures)
        .launches(activation<Scalar>),
};

constexpr Kernel<ActivationBackward> kActivationBackward[] = {
#if defined(__x86_64__)
    Row("cpu_activation_backward_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kActivationGradient)
        .launches(activation_backward<Avx512>),
    Row("cpu_activation_backward_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kActivationGradient)
        .launches(activation_backward<Avx2>),
#endif
    Row("cpu_activation_backward_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kActivationGradient)
        .launches(activation_backward<Scalar>),
};

constexpr Kernel<Sample> kSample[] = {
#if defined(__x86_64__)
    Row("cpu_sample_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kSampleFeatures).launches(sample<Avx512>),
    Row("cpu_sample_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kSampleFeatures).launches(sample<Avx2>),
#endif
    Row("cpu_sample_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kSampleFeatures).launches(sample<Scalar>),
};

constexpr Kernel<TopK> kTopK[] = {
#if defined(__x86_64__)
    Row("cpu_topk_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kTwoStrides).launches(topk<Avx512>),
    Row("cpu_topk_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kTwoStrides).launches(topk<Avx2>),
#endif
    Row("cpu_topk_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kTwoStrides).launches(topk<Scalar>),
};

constexpr Kernel<Embedding> kEmbedding[] = {
#if defined(__x86_64__)
    Row("cpu_embedding_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kTwoStrides).launches(embedding<Avx512>),
    Row("cpu_embedding_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kTwoStrides).launches(embedding<Avx2>),
#endif
    Row("cpu_embedding_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kTwoStrides).launches(embedding<Scalar>),
};

constexpr Kernel<EmbeddingBackward> kEmbeddingBackward[] = {
#if defined(__x86_64__)
    Row("cpu_embedding_backward_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kEmbeddingGradient)
        .launches(embedding_backward<Avx512>),
    Row("cpu_embedding_backward_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kEmbeddingGradient)
        .launches(embedding_backward<Avx2>),
#endif
    Row("cpu_embedding_backward_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kEmbeddingGradient)
        .launches(embedding_backward<Scalar>),
};

constexpr Kernel<SelectiveScan> kSelectiveScan[] = {
#if defined(__x86_64__)
    Row("cpu_selective_scan_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kSelectiveFeatures)
        .launches(selective_scan<Avx512>),
    Row("cpu_selective_scan_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kSelectiveFeatures)
        .launches(selective_scan<Avx2>),
#endif
    Row("cpu_selective_scan_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kSelectiveFeatures)
        .launches(selective_scan<Scalar>),
};

constexpr Kernel<GatedDelta> kGatedDelta[] = {
#if defined(__x86_64__)
    Row("cpu_gated_delta_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kScanFeatures)
        .launches(gated_delta<Avx512>),
    Row("cpu_gated_delta_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kScanFeatures).launches(gated_delta<Avx2>),
#endif
    Row("cpu_gated_delta_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kScanFeatures)
        .launches(gated_delta<Scalar>),
};

constexpr Kernel<CausalConv1d> kCausalConv1d[] = {
#if defined(__x86_64__)
    Row("cpu_causal_conv1d_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kConvFeatures)
        .launches(causal_conv1d<Avx512>),
    Row("cpu_causal_conv1d_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kConvFeatures).launches(causal_conv1d<Avx2>),
#endif
    Row("cpu_causal_conv1d_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kConvFeatures)
        .launches(causal_conv1d<Scalar>),
};

constexpr Kernel<SelectiveScanBackward> kSelectiveScanBackward[] = {
#if defined(__x86_64__)
    Row("cpu_selective_scan_backward_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kSelectiveGradient)
        .launches(selective_scan_backward<Avx512>),
    Row("cpu_selective_scan_backward_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kSelectiveGradient)
        .launches(selective_scan_backward<Avx2>),
#endif
    Row("cpu_selective_scan_backward_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kSelectiveGradient)
        .launches(selective_scan_backward<Scalar>),
};

constexpr Kernel<GatedDeltaBackward> kGatedDeltaBackward[] = {
#if defined(__x86_64__)
    Row("cpu_gated_delta_backward_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kScanGradient)
        .launches(gated_delta_backward<Avx512>),
    Row("cpu_gated_delta_backward_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kScanGradient)
        .launches(gated_delta_backward<Avx2>),
#endif
    Row("cpu_gated_delta_backward_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kScanGradient)
        .launches(gated_delta_backward<Scalar>),
};

constexpr Kernel<CausalConv1dBackward> kCausalConv1dBackward[] = {
#if defined(__x86_64__)
    Row("cpu_causal_conv1d_backward_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kConvGradient)
        .launches(causal_conv1d_backward<Avx512>),
    Row("cpu_causal_conv1d_backward_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kConvGradient)
        .launches(causal_conv1d_backward<Avx2>),
#endif
    Row("cpu_causal_conv1d_backward_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kConvGradient)
        .launches(causal_conv1d_backward<Scalar>),
};

constexpr Kernel<RotaryTable> kRotaryTable[] = {
#if defined(__x86_64__)
    Row("cpu_rotary_table_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kTwoStrides)
        .launches(rotary_table<Avx512>),
    Row("cpu_rotary_table_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kTwoStrides).launches(rotary_table<Avx2>),
#endif
    Row("cpu_rotary_table_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kTwoStrides)
        .launches(rotary_table<Scalar>),
};

constexpr Kernel<Rotary> kRotary[] = {
#if defined(__x86_64__)
    Row("cpu_rotary_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kRotaryFeatures).launches(rotary<Avx512>),
    Row("cpu_rotary_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kRotaryFeatures).launches(rotary<Avx2>),
#endif
    Row("cpu_rotary_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kRotaryFeatures).launches(rotary<Scalar>),
};

constexpr Kernel<GroupedGemm> kGroupedGemm[] = {
#if defined(__x86_64__)
    Row("cpu_grouped_gemm_ieee_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kGroupedGemmFeatures)
        .launches(each_group<gemm_ieee<Avx512>>),
    Row("cpu_grouped_gemm_ieee_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kGroupedGemmFeatures)
        .launches(each_group<gemm_ieee<Avx2>>),
    Row("cpu_grouped_gemm_sm90_avx512", kHalfTypes, Arithmetic::sm90, kAvx512, kGroupedGemmFeatures)
        .launches(each_group<gemm_sm90<Avx512>>),
    Row("cpu_grouped_gemm_sm90_avx2", kHalfTypes, Arithmetic::sm90, kAvx2, kGroupedGemmFeatures)
        .launches(each_group<gemm_sm90<Avx2>>),
    Row("cpu_grouped_gemm_sm80_avx512", kHalfTypes, Arithmetic::sm80, kAvx512, kGroupedGemmFeatures)
        .launches(each_group<gemm_sm80<Avx512>>),
    Row("cpu_grouped_gemm_sm80_avx2", kHalfTypes, Arithmetic::sm80, kAvx2, kGroupedGemmFeatures)
        .launches(each_group<gemm_sm80<Avx2>>),
    Row("cpu_grouped_gemm_cdna3_avx512", kHalfTypes, Arithmetic::cdna3, kAvx512, kGroupedGemmFeatures)
        .launches(each_group<gemm_cdna3<Avx512>>),
    Row("cpu_grouped_gemm_cdna3_avx2", kHalfTypes, Arithmetic::cdna3, kAvx2, kGroupedGemmFeatures)
        .launches(each_group<gemm_cdna3<Avx2>>),
    Row("cpu_grouped_gemm_cdna2_avx512", kHalfTypes, Arithmetic::cdna2, kAvx512, kGroupedGemmFeatures)
        .launches(each_group<gemm_cdna2<Avx512>>),
    Row("cpu_grouped_gemm_cdna2_avx2", kHalfTypes, Arithmetic::cdna2, kAvx2, kGroupedGemmFeatures)
        .launches(each_group<gemm_cdna2<Avx2>>),
#endif
    Row("cpu_grouped_gemm_ieee_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kGroupedGemmFeatures)
        .launches(each_group<gemm_ieee<Scalar>>),
    Row("cpu_grouped_gemm_sm90_scalar", kHalfTypes, Arithmetic::sm90, kAnyCpu, kGroupedGemmFeatures)
        .launches(each_group<gemm_sm90<Scalar>>),
    Row("cpu_grouped_gemm_sm80_scalar", kHalfTypes, Arithmetic::sm80, kAnyCpu, kGroupedGemmFeatures)
        .launches(each_group<gemm_sm80<Scalar>>),
    Row("cpu_grouped_gemm_cdna3_scalar", kHalfTypes, Arithmetic::cdna3, kAnyCpu, kGroupedGemmFeatures)
        .launches(each_group<gemm_cdna3<Scalar>>),
    Row("cpu_grouped_gemm_cdna2_scalar", kHalfTypes, Arithmetic::cdna2, kAnyCpu, kGroupedGemmFeatures)
        .launches(each_group<gemm_cdna2<Scalar>>),
};

constexpr Kernel<ScaledGroupedGemm> kScaledGroupedGemm[] = {
#if defined(__x86_64__)
    Row("cpu_scaled_grouped_gemm_ieee_avx512", kFp8Types, Arithmetic::ieee, kAvx512, kScaledGroupedGemmFeatures)
        .launches(each_scaled_group<scaled_gemm_ieee<Avx512>>),
    Row("cpu_scaled_grouped_gemm_ieee_avx2", kFp8Types, Arithmetic::ieee, kAvx2, kScaledGroupedGemmFeatures)
        .launches(each_scaled_group<scaled_gemm_ieee<Avx2>>),
    Row("cpu_scaled_grouped_gemm_sm90_avx512", kFp8Types, Arithmetic::sm90, kAvx512, kScaledGroupedGemmFeatures)
        .launches(each_scaled_group<scaled_gemm_sm90<Avx512>>),
    Row("cpu_scaled_grouped_gemm_sm90_avx2", kFp8Types, Arithmetic::sm90, kAvx2, kScaledGroupedGemmFeatures)
        .launches(each_scaled_group<scaled_gemm_sm90<Avx2>>),
#endif
    Row("cpu_scaled_grouped_gemm_ieee_scalar", kFp8Types, Arithmetic::ieee, kAnyCpu, kScaledGroupedGemmFeatures)
        .launches(each_scaled_group<scaled_gemm_ieee<Scalar>>),
    Row("cpu_scaled_grouped_gemm_sm90_scalar", kFp8Types, Arithmetic::sm90, kAnyCpu, kScaledGroupedGemmFeatures)
        .launches(each_scaled_group<scaled_gemm_sm90<Scalar>>),
};

constexpr uint64_t kFoldFeatures = kBias | kAccumulate | kTree;
constexpr Kernel<Fold> kFold[] = {
#if defined(__x86_64__)
    Row("cpu_fold_avx512", bit(Type::f32), Arithmetic::ieee, kAvx512, kFoldFeatures).launches(fold<Avx512>),
    Row("cpu_fold_avx2", bit(Type::f32), Arithmetic::ieee, kAvx2, kFoldFeatures).launches(fold<Avx2>),
#endif
    Row("cpu_fold_scalar", bit(Type::f32), Arithmetic::ieee, kAnyCpu, kFoldFeatures).launches(fold<Scalar>),
};

constexpr Kernel<AdamW> kAdamW[] = {
#if defined(__x86_64__)
    Row("cpu_adamw_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kMaster).launches(adamw<Avx512>),
    Row("cpu_adamw_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kMaster).launches(adamw<Avx2>),
#endif
    Row("cpu_adamw_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kMaster).launches(adamw<Scalar>),
};

constexpr Kernel<LayerNorm> kLayerNorm[] = {
#if defined(__x86_64__)
    Row("cpu_layernorm_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kLayerNormFeatures)
        .launches(layernorm<Avx512>),
    Row("cpu_layernorm_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kLayerNormFeatures).launches(layernorm<Avx2>),
#endif
    Row("cpu_layernorm_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kLayerNormFeatures)
        .launches(layernorm<Scalar>),
};

constexpr Kernel<LayerNormBackward> kLayerNormBackward[] = {
#if defined(__x86_64__)
    Row("cpu_layernorm_backward_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kLayerNormGradient)
        .launches(layernorm_backward<Avx512>),
    Row("cpu_layernorm_backward_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kLayerNormGradient)
        .launches(layernorm_backward<Avx2>),
#endif
    Row("cpu_layernorm_backward_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kLayerNormGradient)
        .launches(layernorm_backward<Scalar>),
};

constexpr uint64_t kAttentionFeatures =
    kLogSumExp | kPacked | kLengths | kFirstKey | kPages | kWindow | kMask | kBias | kSinks | kSoftcap;
constexpr Kernel<Attention> kAttention[] = {
#if defined(__x86_64__)
    Row("cpu_attention_ieee_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kAttentionFeatures)
        .launches(attention<Avx512>),
    Row("cpu_attention_ieee_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kAttentionFeatures)
        .launches(attention<Avx2>),
    Row("cpu_attention_sm90_avx512", kHalfTypes, Arithmetic::sm90, kAvx512, kAttentionFeatures)
        .launches(attention<Avx512>),
    Row("cpu_attention_sm90_avx2", kHalfTypes, Arithmetic::sm90, kAvx2, kAttentionFeatures).launches(attention<Avx2>),
    Row("cpu_attention_sm80_avx512", kHalfTypes, Arithmetic::sm80, kAvx512, kAttentionFeatures)
        .launches(attention<Avx512>),
    Row("cpu_attention_sm80_avx2", kHalfTypes, Arithmetic::sm80, kAvx2, kAttentionFeatures).launches(attention<Avx2>),
    Row("cpu_attention_cdna3_avx512", kHalfTypes, Arithmetic::cdna3, kAvx512, kAttentionFeatures)
        .launches(attention<Avx512>),
    Row("cpu_attention_cdna3_avx2", kHalfTypes, Arithmetic::cdna3, kAvx2, kAttentionFeatures).launches(attention<Avx2>),
    Row("cpu_attention_cdna2_avx512", kHalfTypes, Arithmetic::cdna2, kAvx512, kAttentionFeatures)
        .launches(attention<Avx512>),
    Row("cpu_attention_cdna2_avx2", kHalfTypes, Arithmetic::cdna2, kAvx2, kAttentionFeatures).launches(attention<Avx2>),
#endif
    Row("cpu_attention_ieee_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kAttentionFeatures)
        .launches(attention<Scalar>),
    Row("cpu_attention_sm90_scalar", kHalfTypes, Arithmetic::sm90, kAnyCpu, kAttentionFeatures)
        .launches(attention<Scalar>),
    Row("cpu_attention_sm80_scalar", kHalfTypes, Arithmetic::sm80, kAnyCpu, kAttentionFeatures)
        .launches(attention<Scalar>),
    Row("cpu_attention_cdna3_scalar", kHalfTypes, Arithmetic::cdna3, kAnyCpu, kAttentionFeatures)
        .launches(attention<Scalar>),
    Row("cpu_attention_cdna2_scalar", kHalfTypes, Arithmetic::cdna2, kAnyCpu, kAttentionFeatures)
        .launches(attention<Scalar>),
};

constexpr uint64_t kAttentionGradient = (kAttentionFeatures & ~uint64_t(kLogSumExp | kPages)) | kAccumulate;
constexpr Kernel<AttentionBackward> kAttentionBackward[] = {
#if defined(__x86_64__)
    Row("cpu_attention_backward_ieee_avx512", kUnscaledTypes, Arithmetic::ieee, kAvx512, kAttentionGradient)
        .launches(attention_backward<Avx512>),
    Row("cpu_attention_backward_ieee_avx2", kUnscaledTypes, Arithmetic::ieee, kAvx2, kAttentionGradient)
        .launches(attention_backward<Avx2>),
    Row("cpu_attention_backward_sm90_avx512", kHalfTypes, Arithmetic::sm90, kAvx512, kAttentionGradient)
        .launches(attention_backward<Avx512>),
    Row("cpu_attention_backward_sm90_avx2", kHalfTypes, Arithmetic::sm90, kAvx2, kAttentionGradient)
        .launches(attention_backward<Avx2>),
    Row("cpu_attention_backward_sm80_avx512", kHalfTypes, Arithmetic::sm80, kAvx512, kAttentionGradient)
        .launches(attention_backward<Avx512>),
    Row("cpu_attention_backward_sm80_avx2", kHalfTypes, Arithmetic::sm80, kAvx2, kAttentionGradient)
        .launches(attention_backward<Avx2>),
    Row("cpu_attention_backward_cdna3_avx512", kHalfTypes, Arithmetic::cdna3, kAvx512, kAttentionGradient)
        .launches(attention_backward<Avx512>),
    Row("cpu_attention_backward_cdna3_avx2", kHalfTypes, Arithmetic::cdna3, kAvx2, kAttentionGradient)
        .launches(attention_backward<Avx2>),
    Row("cpu_attention_backward_cdna2_avx512", kHalfTypes, Arithmetic::cdna2, kAvx512, kAttentionGradient)
        .launches(attention_backward<Avx512>),
    Row("cpu_attention_backward_cdna2_avx2", kHalfTypes, Arithmetic::cdna2, kAvx2, kAttentionGradient)
        .launches(attention_backward<Avx2>),
#endif
    Row("cpu_attention_backward_ieee_scalar", kUnscaledTypes, Arithmetic::ieee, kAnyCpu, kAttentionGradient)
        .launches(attention_backward<Scalar>),
    Row("cpu_attention_backward_sm90_scalar", kHalfTypes, Arithmetic::sm90, kAnyCpu, kAttentionGradient)
        .launches(attention_backward<Scalar>),
    Row("cpu_attention_backward_sm80_scalar", kHalfTypes, Arithmetic::sm80, kAnyCpu, kAttentionGradient)
        .launches(attention_backward<Scalar>),
    Row("cpu_attention_backward_cdna3_scalar", kHalfTypes, Arithmetic::cdna3, kAnyCpu, kAttentionGradient)
        .launches(attention_backward<Scalar>),
    Row("cpu_attention_backward_cdna2_scalar", kHalfTypes, Arithmetic::cdna2, kAnyCpu, kAttentionGradient)
        .launches(attention_backward<Scalar>),
};

pydet_status device_count(int32_t *count) {
  *count = 1;
  return PYDET_OK;
}

pydet_status query_device(int32_t, pydet_device_info *info) {
  info->multiprocessors = int32_t(std::thread::hardware_concurrency());
#if defined(__x86_64__)
  Device here = {PYDET_CPU, 0};
  const char *isa = has_avx512(here) ? "x86-64 avx512" : has_avx2(here) ? "x86-64 avx2" : "x86-64";
#elif defined(__aarch64__)
  const char *isa = "aarch64";
#else
  const char *isa = "generic";
#endif
  snprintf(info->name, sizeof info->name, "CPU");
  snprintf(info->arch, sizeof info->arch, "%s", isa);
  return PYDET_OK;
}

Arithmetic tensor_cores(int32_t) { return Arithmetic::ieee; }

uint64_t attention_workspace(const Attention &a, const char *) { return bytes_of_parts(a); }

pydet_status round_here(const Rounding &problem) {
#if defined(__x86_64__)
  if (has_avx512(problem.device)) return round_elements<Avx512>(problem);
  if (has_avx2(problem.device)) return round_elements<Avx2>(problem);
#endif
  return round_elements<Scalar>(problem);
}

pydet_status loss_here(const HeadLoss &problem) {
#if defined(__x86_64__)
  if (has_avx512(problem.device)) return head_loss<Avx512>(problem);
  if (has_avx2(problem.device)) return head_loss<Avx2>(problem);
#endif
  return head_loss<Scalar>(problem);
}

constexpr Hooks<Gemm> kGemmHooks = {round_here, nullptr, nullptr, nullptr};
constexpr Hooks<HeadRows> kHeadHooks = {loss_here};
constexpr Hooks<Attention> kAttentionHooks = {attention_workspace};

pydet_status copy(const char *, int32_t, void *, void *to, const void *from, uint64_t bytes) {
  memcpy(to, from, size_t(bytes));
  return PYDET_OK;
}

constexpr Backend cpu() {
  Backend backend = {PYDET_CPU, "CPU"};
  backend.device_count = device_count;
  backend.query_device = query_device;
  backend.tensor_cores = tensor_cores;
  backend.copy = copy;
  backend.tables =
      tables(table(kGemm, &kGemmHooks), table(kScaledGemm), table(kQuantize), table(kRmsNorm), table(kRmsNormBackward),
             table(kSoftmax), table(kSoftmaxBackward), table(kGroupedGemm), table(kFold), table(kLayerNorm),
             table(kLayerNormBackward), table(kScaledGroupedGemm), table(kAttention, &kAttentionHooks),
             table(kAttentionBackward), table(kActivation), table(kActivationBackward), table(kSample), table(kTopK),
             table(kEmbedding), table(kEmbeddingBackward), table(kSelectiveScan), table(kGatedDelta),
             table(kCausalConv1d), no_kernels<LinearLogProb>(), table(kHeadRows, &kHeadHooks), table(kRotaryTable),
             table(kRotary), table(kSelectiveScanBackward), table(kGatedDeltaBackward), table(kCausalConv1dBackward),
             table(kRmsNormQuantize), table(kAdamW));
  return backend;
}

}  // namespace

const Backend &cpu_backend() {
  static constexpr Backend backend = cpu();
  return backend;
}

}  // namespace pydet
