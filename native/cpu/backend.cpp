// The CPU's table of kernels: every kernel once per instruction set, the widest first, chosen by what this machine has.

#include <cstdio>
#include <thread>

#include "cpu/grouped_kernels.h"
#include "kernel.h"
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
#endif

constexpr uint64_t kGemmFeatures = kBatch | kBias | kAccumulate | kChunks | kAlongM | kAlongN;
constexpr uint64_t kLayerNormFeatures = kResidual | kWeight | kWeightOffset | kBias | kMean | kRstd | kTwoStrides;
constexpr uint64_t kLayerNormGradient =
    kResidual | kWeight | kWeightOffset | kTwoStrides | kAccumulate | kRowGradient | kWeightGradient | kBiasGradient;
constexpr uint64_t kOfHeads = kHeads | kWideSum;
constexpr uint64_t kNormFeatures = kResidual | kWeight | kWeightOffset | kBias | kRstd | kTwoStrides | kOfHeads;
constexpr uint64_t kGradientFeatures = kLayerNormGradient | kOfHeads | kBlockSums;
constexpr uint64_t kSoftmaxFeatures = kTwoStrides | kLogarithm | kColumn | kRowGradient;
constexpr uint64_t kSoftmaxGradient = kTwoStrides | kLogarithm;

// Columns: name, input types, arithmetic, features, requires, runs_on, takes (all), prefers (all), launch.
constexpr Kernel<Gemm> kGemm[] = {
#if defined(__x86_64__)
    {"cpu_gemm_ieee_avx512", kUnscaledTypes, Arithmetic::ieee, kGemmFeatures, "avx512", has_avx512, nullptr, nullptr,
     gemm_ieee<Avx512>},
    {"cpu_gemm_ieee_avx2", kUnscaledTypes, Arithmetic::ieee, kGemmFeatures, "avx2", has_avx2, nullptr, nullptr,
     gemm_ieee<Avx2>},
    {"cpu_gemm_sm90_avx512", kHalfTypes, Arithmetic::sm90, kGemmFeatures, "avx512", has_avx512, nullptr, nullptr,
     gemm_sm90<Avx512>},
    {"cpu_gemm_sm90_avx2", kHalfTypes, Arithmetic::sm90, kGemmFeatures, "avx2", has_avx2, nullptr, nullptr,
     gemm_sm90<Avx2>},
    {"cpu_gemm_sm80_avx512", kHalfTypes, Arithmetic::sm80, kGemmFeatures, "avx512", has_avx512, nullptr, nullptr,
     gemm_sm80<Avx512>},
    {"cpu_gemm_sm80_avx2", kHalfTypes, Arithmetic::sm80, kGemmFeatures, "avx2", has_avx2, nullptr, nullptr,
     gemm_sm80<Avx2>},
    {"cpu_gemm_cdna3_avx512", kHalfTypes, Arithmetic::cdna3, kGemmFeatures, "avx512", has_avx512, nullptr, nullptr,
     gemm_cdna3<Avx512>},
    {"cpu_gemm_cdna3_avx2", kHalfTypes, Arithmetic::cdna3, kGemmFeatures, "avx2", has_avx2, nullptr, nullptr,
     gemm_cdna3<Avx2>},
    {"cpu_gemm_cdna2_avx512", kHalfTypes, Arithmetic::cdna2, kGemmFeatures, "avx512", has_avx512, nullptr, nullptr,
     gemm_cdna2<Avx512>},
    {"cpu_gemm_cdna2_avx2", kHalfTypes, Arithmetic::cdna2, kGemmFeatures, "avx2", has_avx2, nullptr, nullptr,
     gemm_cdna2<Avx2>},
#endif
    {"cpu_gemm_ieee_scalar", kUnscaledTypes, Arithmetic::ieee, kGemmFeatures, "any CPU", has_scalar, nullptr, nullptr,
     gemm_ieee<Scalar>},
    {"cpu_gemm_sm90_scalar", kHalfTypes, Arithmetic::sm90, kGemmFeatures, "any CPU", has_scalar, nullptr, nullptr,
     gemm_sm90<Scalar>},
    {"cpu_gemm_sm80_scalar", kHalfTypes, Arithmetic::sm80, kGemmFeatures, "any CPU", has_scalar, nullptr, nullptr,
     gemm_sm80<Scalar>},
    {"cpu_gemm_cdna3_scalar", kHalfTypes, Arithmetic::cdna3, kGemmFeatures, "any CPU", has_scalar, nullptr, nullptr,
     gemm_cdna3<Scalar>},
    {"cpu_gemm_cdna2_scalar", kHalfTypes, Arithmetic::cdna2, kGemmFeatures, "any CPU", has_scalar, nullptr, nullptr,
     gemm_cdna2<Scalar>},
};

constexpr Kernel<ScaledGemm> kScaledGemm[] = {
#if defined(__x86_64__)
    {"cpu_scaled_gemm_ieee_avx512", kFp8Types, Arithmetic::ieee, kScaledGemmFeatures, "avx512", has_avx512, nullptr,
     nullptr, scaled_gemm_ieee<Avx512>},
    {"cpu_scaled_gemm_ieee_avx2", kFp8Types, Arithmetic::ieee, kScaledGemmFeatures, "avx2", has_avx2, nullptr, nullptr,
     scaled_gemm_ieee<Avx2>},
    {"cpu_scaled_gemm_sm90_avx512", kFp8Types, Arithmetic::sm90, kScaledGemmFeatures, "avx512", has_avx512, nullptr,
     nullptr, scaled_gemm_sm90<Avx512>},
    {"cpu_scaled_gemm_sm90_avx2", kFp8Types, Arithmetic::sm90, kScaledGemmFeatures, "avx2", has_avx2, nullptr, nullptr,
     scaled_gemm_sm90<Avx2>},
#endif
    {"cpu_scaled_gemm_ieee_scalar", kFp8Types, Arithmetic::ieee, kScaledGemmFeatures, "any CPU", has_scalar, nullptr,
     nullptr, scaled_gemm_ieee<Scalar>},
    {"cpu_scaled_gemm_sm90_scalar", kFp8Types, Arithmetic::sm90, kScaledGemmFeatures, "any CPU", has_scalar, nullptr,
     nullptr, scaled_gemm_sm90<Scalar>},
};

constexpr Kernel<Quantize> kQuantize[] = {
#if defined(__x86_64__)
    {"cpu_quantize_avx512", kUnscaledTypes, Arithmetic::ieee, kQuantizeFeatures, "avx512", has_avx512, nullptr, nullptr,
     quantize<Avx512>},
    {"cpu_quantize_avx2", kUnscaledTypes, Arithmetic::ieee, kQuantizeFeatures, "avx2", has_avx2, nullptr, nullptr,
     quantize<Avx2>},
#endif
    {"cpu_quantize_scalar", kUnscaledTypes, Arithmetic::ieee, kQuantizeFeatures, "any CPU", has_scalar, nullptr,
     nullptr, quantize<Scalar>},
};

constexpr Kernel<RmsNorm> kRmsNorm[] = {
#if defined(__x86_64__)
    {"cpu_rmsnorm_avx512", kUnscaledTypes, Arithmetic::ieee, kNormFeatures, "avx512", has_avx512, nullptr, nullptr,
     rmsnorm<Avx512>},
    {"cpu_rmsnorm_avx2", kUnscaledTypes, Arithmetic::ieee, kNormFeatures, "avx2", has_avx2, nullptr, nullptr,
     rmsnorm<Avx2>},
#endif
    {"cpu_rmsnorm_scalar", kUnscaledTypes, Arithmetic::ieee, kNormFeatures, "any CPU", has_scalar, nullptr, nullptr,
     rmsnorm<Scalar>},
};

constexpr Kernel<RmsNormBackward> kRmsNormBackward[] = {
#if defined(__x86_64__)
    {"cpu_rmsnorm_backward_avx512", kUnscaledTypes, Arithmetic::ieee, kGradientFeatures, "avx512", has_avx512, nullptr,
     nullptr, rmsnorm_backward<Avx512>},
    {"cpu_rmsnorm_backward_avx2", kUnscaledTypes, Arithmetic::ieee, kGradientFeatures, "avx2", has_avx2, nullptr,
     nullptr, rmsnorm_backward<Avx2>},
#endif
    {"cpu_rmsnorm_backward_scalar", kUnscaledTypes, Arithmetic::ieee, kGradientFeatures, "any CPU", has_scalar, nullptr,
     nullptr, rmsnorm_backward<Scalar>},
};

constexpr Kernel<Softmax> kSoftmax[] = {
#if defined(__x86_64__)
    {"cpu_softmax_avx512", kUnscaledTypes, Arithmetic::ieee, kSoftmaxFeatures, "avx512", has_avx512, nullptr, nullptr,
     softmax<Avx512>},
    {"cpu_softmax_avx2", kUnscaledTypes, Arithmetic::ieee, kSoftmaxFeatures, "avx2", has_avx2, nullptr, nullptr,
     softmax<Avx2>},
#endif
    {"cpu_softmax_scalar", kUnscaledTypes, Arithmetic::ieee, kSoftmaxFeatures, "any CPU", has_scalar, nullptr, nullptr,
     softmax<Scalar>},
};

constexpr Kernel<SoftmaxBackward> kSoftmaxBackward[] = {
#if defined(__x86_64__)
    {"cpu_softmax_backward_avx512", kUnscaledTypes, Arithmetic::ieee, kSoftmaxGradient, "avx512", has_avx512, nullptr,
     nullptr, softmax_backward<Avx512>},
    {"cpu_softmax_backward_avx2", kUnscaledTypes, Arithmetic::ieee, kSoftmaxGradient, "avx2", has_avx2, nullptr,
     nullptr, softmax_backward<Avx2>},
#endif
    {"cpu_softmax_backward_scalar", kUnscaledTypes, Arithmetic::ieee, kSoftmaxGradient, "any CPU", has_scalar, nullptr,
     nullptr, softmax_backward<Scalar>},
};

constexpr Kernel<GroupedGemm> kGroupedGemm[] = {
#if defined(__x86_64__)
    {"cpu_grouped_gemm_ieee_avx512", kUnscaledTypes, Arithmetic::ieee, kGroupedGemmFeatures, "avx512", has_avx512,
     nullptr, nullptr, each_group<gemm_ieee<Avx512>>},
    {"cpu_grouped_gemm_ieee_avx2", kUnscaledTypes, Arithmetic::ieee, kGroupedGemmFeatures, "avx2", has_avx2, nullptr,
     nullptr, each_group<gemm_ieee<Avx2>>},
    {"cpu_grouped_gemm_sm90_avx512", kHalfTypes, Arithmetic::sm90, kGroupedGemmFeatures, "avx512", has_avx512, nullptr,
     nullptr, each_group<gemm_sm90<Avx512>>},
    {"cpu_grouped_gemm_sm90_avx2", kHalfTypes, Arithmetic::sm90, kGroupedGemmFeatures, "avx2", has_avx2, nullptr,
     nullptr, each_group<gemm_sm90<Avx2>>},
    {"cpu_grouped_gemm_sm80_avx512", kHalfTypes, Arithmetic::sm80, kGroupedGemmFeatures, "avx512", has_avx512, nullptr,
     nullptr, each_group<gemm_sm80<Avx512>>},
    {"cpu_grouped_gemm_sm80_avx2", kHalfTypes, Arithmetic::sm80, kGroupedGemmFeatures, "avx2", has_avx2, nullptr,
     nullptr, each_group<gemm_sm80<Avx2>>},
    {"cpu_grouped_gemm_cdna3_avx512", kHalfTypes, Arithmetic::cdna3, kGroupedGemmFeatures, "avx512", has_avx512,
     nullptr, nullptr, each_group<gemm_cdna3<Avx512>>},
    {"cpu_grouped_gemm_cdna3_avx2", kHalfTypes, Arithmetic::cdna3, kGroupedGemmFeatures, "avx2", has_avx2, nullptr,
     nullptr, each_group<gemm_cdna3<Avx2>>},
    {"cpu_grouped_gemm_cdna2_avx512", kHalfTypes, Arithmetic::cdna2, kGroupedGemmFeatures, "avx512", has_avx512,
     nullptr, nullptr, each_group<gemm_cdna2<Avx512>>},
    {"cpu_grouped_gemm_cdna2_avx2", kHalfTypes, Arithmetic::cdna2, kGroupedGemmFeatures, "avx2", has_avx2, nullptr,
     nullptr, each_group<gemm_cdna2<Avx2>>},
#endif
    {"cpu_grouped_gemm_ieee_scalar", kUnscaledTypes, Arithmetic::ieee, kGroupedGemmFeatures, "any CPU", has_scalar,
     nullptr, nullptr, each_group<gemm_ieee<Scalar>>},
    {"cpu_grouped_gemm_sm90_scalar", kHalfTypes, Arithmetic::sm90, kGroupedGemmFeatures, "any CPU", has_scalar, nullptr,
     nullptr, each_group<gemm_sm90<Scalar>>},
    {"cpu_grouped_gemm_sm80_scalar", kHalfTypes, Arithmetic::sm80, kGroupedGemmFeatures, "any CPU", has_scalar, nullptr,
     nullptr, each_group<gemm_sm80<Scalar>>},
    {"cpu_grouped_gemm_cdna3_scalar", kHalfTypes, Arithmetic::cdna3, kGroupedGemmFeatures, "any CPU", has_scalar,
     nullptr, nullptr, each_group<gemm_cdna3<Scalar>>},
    {"cpu_grouped_gemm_cdna2_scalar", kHalfTypes, Arithmetic::cdna2, kGroupedGemmFeatures, "any CPU", has_scalar,
     nullptr, nullptr, each_group<gemm_cdna2<Scalar>>},
};

constexpr Kernel<ScaledGroupedGemm> kScaledGroupedGemm[] = {
#if defined(__x86_64__)
    {"cpu_scaled_grouped_gemm_ieee_avx512", kFp8Types, Arithmetic::ieee, kScaledGroupedGemmFeatures, "avx512",
     has_avx512, nullptr, nullptr, each_scaled_group<scaled_gemm_ieee<Avx512>>},
    {"cpu_scaled_grouped_gemm_ieee_avx2", kFp8Types, Arithmetic::ieee, kScaledGroupedGemmFeatures, "avx2", has_avx2,
     nullptr, nullptr, each_scaled_group<scaled_gemm_ieee<Avx2>>},
    {"cpu_scaled_grouped_gemm_sm90_avx512", kFp8Types, Arithmetic::sm90, kScaledGroupedGemmFeatures, "avx512",
     has_avx512, nullptr, nullptr, each_scaled_group<scaled_gemm_sm90<Avx512>>},
    {"cpu_scaled_grouped_gemm_sm90_avx2", kFp8Types, Arithmetic::sm90, kScaledGroupedGemmFeatures, "avx2", has_avx2,
     nullptr, nullptr, each_scaled_group<scaled_gemm_sm90<Avx2>>},
#endif
    {"cpu_scaled_grouped_gemm_ieee_scalar", kFp8Types, Arithmetic::ieee, kScaledGroupedGemmFeatures, "any CPU",
     has_scalar, nullptr, nullptr, each_scaled_group<scaled_gemm_ieee<Scalar>>},
    {"cpu_scaled_grouped_gemm_sm90_scalar", kFp8Types, Arithmetic::sm90, kScaledGroupedGemmFeatures, "any CPU",
     has_scalar, nullptr, nullptr, each_scaled_group<scaled_gemm_sm90<Scalar>>},
};

constexpr uint64_t kFoldFeatures = kBias | kAccumulate | kTree;
constexpr Kernel<Fold> kFold[] = {
#if defined(__x86_64__)
    {"cpu_fold_avx512", bit(Type::f32), Arithmetic::ieee, kFoldFeatures, "avx512", has_avx512, nullptr, nullptr,
     fold<Avx512>},
    {"cpu_fold_avx2", bit(Type::f32), Arithmetic::ieee, kFoldFeatures, "avx2", has_avx2, nullptr, nullptr, fold<Avx2>},
#endif
    {"cpu_fold_scalar", bit(Type::f32), Arithmetic::ieee, kFoldFeatures, "any CPU", has_scalar, nullptr, nullptr,
     fold<Scalar>},
};

constexpr Kernel<LayerNorm> kLayerNorm[] = {
#if defined(__x86_64__)
    {"cpu_layernorm_avx512", kUnscaledTypes, Arithmetic::ieee, kLayerNormFeatures, "avx512", has_avx512, nullptr,
     nullptr, layernorm<Avx512>},
    {"cpu_layernorm_avx2", kUnscaledTypes, Arithmetic::ieee, kLayerNormFeatures, "avx2", has_avx2, nullptr, nullptr,
     layernorm<Avx2>},
#endif
    {"cpu_layernorm_scalar", kUnscaledTypes, Arithmetic::ieee, kLayerNormFeatures, "any CPU", has_scalar, nullptr,
     nullptr, layernorm<Scalar>},
};

constexpr Kernel<LayerNormBackward> kLayerNormBackward[] = {
#if defined(__x86_64__)
    {"cpu_layernorm_backward_avx512", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient, "avx512", has_avx512,
     nullptr, nullptr, layernorm_backward<Avx512>},
    {"cpu_layernorm_backward_avx2", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient, "avx2", has_avx2, nullptr,
     nullptr, layernorm_backward<Avx2>},
#endif
    {"cpu_layernorm_backward_scalar", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient, "any CPU", has_scalar,
     nullptr, nullptr, layernorm_backward<Scalar>},
};

constexpr uint64_t kAttentionFeatures =
    kLogSumExp | kPacked | kLengths | kFirstKey | kPages | kWindow | kMask | kBias | kSinks | kSoftcap;
constexpr Kernel<Attention> kAttention[] = {
#if defined(__x86_64__)
    {"cpu_attention_ieee_avx512", kUnscaledTypes, Arithmetic::ieee, kAttentionFeatures, "avx512", has_avx512, nullptr,
     nullptr, attention_ieee<Avx512>},
    {"cpu_attention_ieee_avx2", kUnscaledTypes, Arithmetic::ieee, kAttentionFeatures, "avx2", has_avx2, nullptr,
     nullptr, attention_ieee<Avx2>},
    {"cpu_attention_sm90_avx512", kHalfTypes, Arithmetic::sm90, kAttentionFeatures, "avx512", has_avx512, nullptr,
     nullptr, attention_sm90<Avx512>},
    {"cpu_attention_sm90_avx2", kHalfTypes, Arithmetic::sm90, kAttentionFeatures, "avx2", has_avx2, nullptr, nullptr,
     attention_sm90<Avx2>},
    {"cpu_attention_sm80_avx512", kHalfTypes, Arithmetic::sm80, kAttentionFeatures, "avx512", has_avx512, nullptr,
     nullptr, attention_sm80<Avx512>},
    {"cpu_attention_sm80_avx2", kHalfTypes, Arithmetic::sm80, kAttentionFeatures, "avx2", has_avx2, nullptr, nullptr,
     attention_sm80<Avx2>},
    {"cpu_attention_cdna3_avx512", kHalfTypes, Arithmetic::cdna3, kAttentionFeatures, "avx512", has_avx512, nullptr,
     nullptr, attention_cdna3<Avx512>},
    {"cpu_attention_cdna3_avx2", kHalfTypes, Arithmetic::cdna3, kAttentionFeatures, "avx2", has_avx2, nullptr, nullptr,
     attention_cdna3<Avx2>},
    {"cpu_attention_cdna2_avx512", kHalfTypes, Arithmetic::cdna2, kAttentionFeatures, "avx512", has_avx512, nullptr,
     nullptr, attention_cdna2<Avx512>},
    {"cpu_attention_cdna2_avx2", kHalfTypes, Arithmetic::cdna2, kAttentionFeatures, "avx2", has_avx2, nullptr, nullptr,
     attention_cdna2<Avx2>},
#endif
    {"cpu_attention_ieee_scalar", kUnscaledTypes, Arithmetic::ieee, kAttentionFeatures, "any CPU", has_scalar, nullptr,
     nullptr, attention_ieee<Scalar>},
    {"cpu_attention_sm90_scalar", kHalfTypes, Arithmetic::sm90, kAttentionFeatures, "any CPU", has_scalar, nullptr,
     nullptr, attention_sm90<Scalar>},
    {"cpu_attention_sm80_scalar", kHalfTypes, Arithmetic::sm80, kAttentionFeatures, "any CPU", has_scalar, nullptr,
     nullptr, attention_sm80<Scalar>},
    {"cpu_attention_cdna3_scalar", kHalfTypes, Arithmetic::cdna3, kAttentionFeatures, "any CPU", has_scalar, nullptr,
     nullptr, attention_cdna3<Scalar>},
    {"cpu_attention_cdna2_scalar", kHalfTypes, Arithmetic::cdna2, kAttentionFeatures, "any CPU", has_scalar, nullptr,
     nullptr, attention_cdna2<Scalar>},
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

// For the parts of few queries of long sequences, whose segments are shared out.
uint64_t attention_workspace(const Attention &a, const char *) {
  constexpr int64_t kFewRows = 4096;
  const int64_t tokens = a.q_start ? a.queries : a.sequences * a.queries;
  return a.keys > a.kv_chunk && tokens * a.heads <= kFewRows ? bytes_of_parts(a) : 0;
}

pydet_status round_here(const Rounding &problem) {
#if defined(__x86_64__)
  if (has_avx512(problem.device)) return round_elements<Avx512>(problem);
  if (has_avx2(problem.device)) return round_elements<Avx2>(problem);
#endif
  return round_elements<Scalar>(problem);
}

}  // namespace

const Backend &cpu_backend() {
  static constexpr Backend backend = {PYDET_CPU,
                                      "CPU",
                                      device_count,
                                      query_device,
                                      tensor_cores,
                                      nullptr,
                                      nullptr,
                                      nullptr,
                                      table(kGemm),
                                      table(kScaledGemm),
                                      table(kQuantize),
                                      table(kRmsNorm),
                                      table(kRmsNormBackward),
                                      table(kSoftmax),
                                      table(kSoftmaxBackward),
                                      table(kGroupedGemm),
                                      table(kFold),
                                      table(kLayerNorm),
                                      table(kLayerNormBackward),
                                      table(kScaledGroupedGemm),
                                      round_here,
                                      nullptr,
                                      table(kAttention),
                                      attention_workspace};
  return backend;
}

}  // namespace pydet
