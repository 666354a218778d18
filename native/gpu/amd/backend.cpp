// The HIP table of kernels, the fastest first. What it asks of the runtime goes through gpu.h.

#include <cstring>

#include "core/backend.h"
#include "gpu/any/attention_backward.h"
#include "gpu/backend.h"
#include "gpu/kernels.h"

namespace pydet {
namespace {

// PYDET_HIP_ARCHS: the architectures that this library holds code for, as the Makefile names them.
constexpr const char *kBuiltFor = PYDET_HIP_ARCHS;
bool is_built(const Device &device) {
  const int arch = gpu_facts(device.id).arch;
  for (const char *word = kBuiltFor; arch && (word = strstr(word, "gfx")); word += 3)
    if (strtol(word + 3, nullptr, 16) == arch) return true;
  return false;
}
bool is_gfx942(const Device &device) { return gpu_facts(device.id).arch == 0x942 && is_built(device); }
bool is_gfx90a(const Device &device) { return gpu_facts(device.id).arch == 0x90a && is_built(device); }
constexpr Machine kGfx942 = {"gfx942", is_gfx942}, kGfx90a = {"gfx90a", is_gfx90a}, kBuilt = {kBuiltFor, is_built};

// Every block reads all of x. From 65 rows on tiles of 64x64 are faster, on gfx942 where they fill the device (estimated:
// tools/amd/limits.md).
bool skinny_cdna2_prefers(const Gemm &g) { return g.m <= 64; }
bool skinny_cdna3_prefers(const Gemm &g) {
  return g.m <= 64 || divide_up(g.m, 64) * divide_up(g.n, 64) < gpu_multiprocessors(g.device.id);
}

// What kernels do, of what problems need. Each set is spelled out: a new feature belongs to no row until it is named here.
constexpr uint64_t kOneMatrix = kBias | kAccumulate | kChunks;  // x and w of a skinny product, both along k
constexpr uint64_t kOneChain = kBatch | kBias | kAccumulate | kAlongM | kAlongN;
constexpr uint64_t kAllOfGemm = kOneChain | kChunks;
constexpr uint64_t kAllOfNorm = kResidual | kWeight | kWeightOffset | kRstd | kTwoStrides;
constexpr uint64_t kAllOfGradient =
    kResidual | kWeight | kWeightOffset | kTwoStrides | kAccumulate | kRowGradient | kWeightGradient;
constexpr uint64_t kOfHeads = kBias | kHeads | kWideSum;
constexpr uint64_t kAllOfLayerNorm = kAllOfNorm | kBias | kMean;
constexpr uint64_t kLayerNormGradient = kAllOfGradient | kBiasGradient;
constexpr uint64_t kAllOfSoftmax = kTwoStrides | kLogarithm | kColumn | kRowGradient;
constexpr uint64_t kSoftmaxGradient = kTwoStrides | kLogarithm;
constexpr uint64_t kHeadRowsFeatures = kRowGradient | kSoftcap | kSlabs;
constexpr uint64_t kAllOfActivation = kTwoStrides | kGate;
constexpr uint64_t kActivationGradient = kAllOfActivation | kRowGradient;
constexpr uint64_t kAllOfSampling = kTwoStrides | kFilters | kLogProbs;

constexpr Kernel<Gemm> kGemm[] = {
    Row("hip_skinny_gemm_cdna3_mfma_chunks", kHalfTypes, Arithmetic::cdna3, kGfx942, kOneMatrix)
        .takes(skinny_mfma_chunks_takes)
        .prefers(skinny_mfma_chunks_prefers)
        .launches(skinny_mfma_chunks),
    Row("hip_skinny_gemm_cdna3_mfma", kHalfTypes, Arithmetic::cdna3, kGfx942, kOneMatrix)
        .takes(skinny_mfma_takes)
        .prefers(skinny_cdna3_prefers)
        .launches(skinny_mfma),
    Row("hip_skinny_gemm_cdna2_mfma_chunks", kHalfTypes, Arithmetic::cdna2, kGfx90a, kOneMatrix)
        .takes(skinny_mfma_chunks_takes)
        .prefers(skinny_mfma_chunks_prefers)
        .launches(skinny_mfma_chunks),
    Row("hip_skinny_gemm_cdna2_mfma", kHalfTypes, Arithmetic::cdna2, kGfx90a, kOneMatrix)
        .takes(skinny_mfma_takes)
        .prefers(skinny_cdna2_prefers)
        .launches(skinny_mfma),
    Row("hip_gemm_cdna3_mfma_128x128", kHalfTypes, Arithmetic::cdna3, kGfx942, kOneChain)
        .prefers(fills_device<128, 128>)
        .launches(gemm_mfma_128),
    Row("hip_gemm_cdna3_mfma_64x64", kHalfTypes, Arithmetic::cdna3, kGfx942, kAllOfGemm).launches(gemm_mfma_64),
    Row("hip_gemm_cdna2_mfma_128x128", kHalfTypes, Arithmetic::cdna2, kGfx90a, kOneChain)
        .prefers(fills_device<128, 128>)
        .launches(gemm_mfma_128),
    Row("hip_gemm_cdna2_mfma_64x64", kHalfTypes, Arithmetic::cdna2, kGfx90a, kAllOfGemm).launches(gemm_mfma_64),
    Row("hip_skinny_gemm_ieee", kUnscaledTypes, Arithmetic::ieee, kBuilt, kOneMatrix)
        .takes(skinny_ieee_takes)
        .launches(skinny_ieee),
    Row("hip_gemm_ieee_128x128", kUnscaledTypes, Arithmetic::ieee, kBuilt, kOneChain)
        .prefers(fills_device<128, 128>)
        .launches(gemm_ieee_128x128),
    Row("hip_gemm_ieee_64x64", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfGemm).launches(gemm_ieee_64x64),
};

constexpr uint64_t kFewScaledRows = kBias | kAccumulate | kOutAlongM | kColumnScales;
constexpr Kernel<ScaledGemm> kScaledGemm[] = {
    Row("hip_scaled_skinny_ieee", kFp8Types, Arithmetic::ieee, kBuilt, kFewScaledRows)
        .takes(scaled_skinny_ieee_takes)
        .launches(scaled_skinny_ieee),
    Row("hip_scaled_gemm_ieee_64x64", kFp8Types, Arithmetic::ieee, kBuilt, kScaledGemmFeatures)
        .launches(scaled_gemm_ieee_64x64),
};

constexpr uint64_t kAllOfTiles = kBatch | kGivenScales | kGroupScales | kBlockScales | kTensorScale | kTransposedCopy;
constexpr Kernel<Quantize> kQuantize[] = {
    Row("hip_quantize_rows", kUnscaledTypes, Arithmetic::ieee, kBuilt, kBatch | kRowScales)
        .takes(quantize_rows_takes)
        .launches(quantize_by_rows),
    Row("hip_quantize_tiles", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfTiles).launches(quantize_tiled),
};

constexpr uint64_t kAllOfGroups = kBias | kAccumulate | kChunks | kAlongM | kAlongN | kOutAlongM | kDepth;
constexpr Kernel<GroupedGemm> kGroupedGemm[] = {
    Row("hip_grouped_gemm_cdna3_mfma_64x64", kHalfTypes, Arithmetic::cdna3, kGfx942, kAllOfGroups)
        .launches(grouped_gemm_mfma_64),
    Row("hip_grouped_gemm_cdna2_mfma_64x64", kHalfTypes, Arithmetic::cdna2, kGfx90a, kAllOfGroups)
        .launches(grouped_gemm_mfma_64),
    Row("hip_grouped_gemm_ieee_64x64", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfGroups)
        .launches(grouped_gemm_ieee_64x64),
};

constexpr Kernel<ScaledGroupedGemm> kScaledGroupedGemm[] = {
    Row("hip_scaled_grouped_gemm_ieee_64x64", kFp8Types, Arithmetic::ieee, kBuilt, kScaledGroupedGemmFeatures)
        .launches(scaled_grouped_gemm_ieee_64x64),
};

constexpr Kernel<RmsNorm> kRmsNorm[] = {
    Row("hip_rmsnorm_held", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfNorm)
        .takes(rmsnorm_held_takes)
        .launches(rmsnorm_held),
    Row("hip_rmsnorm_general", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfNorm | kOfHeads)
        .launches(rmsnorm_general),
};

constexpr uint64_t kAllOfNormQuantize = kAllOfNorm | kGivenScales | kRowScales | kGroupScales;
constexpr Kernel<RmsNormQuantize> kRmsNormQuantize[] = {
    Row("hip_rmsnorm_quantize_held", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfNormQuantize)
        .takes(rmsnorm_quantize_held_takes)
        .launches(rmsnorm_quantize_held),
    Row("hip_rmsnorm_quantize_general", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfNormQuantize | kWideSum)
        .launches(rmsnorm_quantize_general),
};

constexpr Kernel<RmsNormBackward> kRmsNormBackward[] = {
    Row("hip_rmsnorm_backward_chain", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfGradient | kBlockSums)
        .takes(rmsnorm_backward_held_takes)
        .prefers(rmsnorm_backward_chain_prefers)
        .launches(rmsnorm_backward_chain),
    Row("hip_rmsnorm_backward_group", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfGradient | kBlockSums)
        .takes(rmsnorm_backward_held_takes)
        .launches(rmsnorm_backward_group),
    Row("hip_rmsnorm_backward_general", kUnscaledTypes, Arithmetic::ieee, kBuilt,
        kLayerNormGradient | kOfHeads | kBlockSums)
        .launches(rmsnorm_backward_general),
};

constexpr Kernel<Softmax> kSoftmax[] = {
    Row("hip_softmax_held", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfSoftmax)
        .takes(softmax_held_takes)
        .launches(softmax_held),
    Row("hip_softmax_long", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfSoftmax).launches(softmax_long),
};

constexpr Kernel<SoftmaxBackward> kSoftmaxBackward[] = {
    Row("hip_softmax_backward_held", kUnscaledTypes, Arithmetic::ieee, kBuilt, kSoftmaxGradient)
        .takes(softmax_backward_held_takes)
        .launches(softmax_backward_held),
    Row("hip_softmax_backward_long", kUnscaledTypes, Arithmetic::ieee, kBuilt, kSoftmaxGradient)
        .launches(softmax_backward_long),
};

constexpr Kernel<HeadRows> kHeadRows[] = {
    Row("hip_head_rows", kUnscaledTypes, Arithmetic::ieee, kBuilt, kHeadRowsFeatures).launches(head_rows),
};

constexpr Kernel<Activation> kActivation[] = {
    Row("hip_activation", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfActivation).launches(activation),
};

constexpr Kernel<ActivationBackward> kActivationBackward[] = {
    Row("hip_activation_backward", kUnscaledTypes, Arithmetic::ieee, kBuilt, kActivationGradient)
        .launches(activation_backward),
};

constexpr Kernel<Sample> kSample[] = {
    Row("hip_sample", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfSampling).launches(sample),
};

constexpr Kernel<TopK> kTopK[] = {
    Row("hip_topk", kUnscaledTypes, Arithmetic::ieee, kBuilt, kTwoStrides).launches(topk),
};

constexpr Kernel<Embedding> kEmbedding[] = {
    Row("hip_embedding", kUnscaledTypes, Arithmetic::ieee, kBuilt, kTwoStrides).launches(embedding),
};

constexpr Kernel<EmbeddingBackward> kEmbeddingBackward[] = {
    Row("hip_embedding_backward", kUnscaledTypes, Arithmetic::ieee, kBuilt, kTwoStrides | kAccumulate | kPadding)
        .launches(embedding_backward),
};

constexpr Kernel<RotaryTable> kRotaryTable[] = {
    Row("hip_rotary_table", kUnscaledTypes, Arithmetic::ieee, kBuilt, kTwoStrides).launches(rotary_table),
};

constexpr Kernel<Rotary> kRotary[] = {
    Row("hip_rotary", kUnscaledTypes, Arithmetic::ieee, kBuilt, kTwoStrides | kNeighbours | kWideSum | kRowGradient)
        .launches(rotary),
};

constexpr Kernel<Fold> kFold[] = {
    Row("hip_fold", bit(Type::f32), Arithmetic::ieee, kBuilt, kBias | kAccumulate | kTree).launches(fold),
};

constexpr Kernel<AdamW> kAdamW[] = {
    Row("hip_adamw", kUnscaledTypes, Arithmetic::ieee, kBuilt, kMaster).takes(adamw_takes).launches(adamw),
};

constexpr Kernel<LayerNorm> kLayerNorm[] = {
    Row("hip_layernorm_held", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfLayerNorm)
        .takes(layernorm_held_takes)
        .launches(layernorm_held),
    Row("hip_layernorm_general", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfLayerNorm).launches(layernorm_general),
};

constexpr Kernel<LayerNormBackward> kLayerNormBackward[] = {
    Row("hip_layernorm_backward_held", kUnscaledTypes, Arithmetic::ieee, kBuilt, kLayerNormGradient)
        .takes(layernorm_backward_held_takes)
        .launches(layernorm_backward_held),
    Row("hip_layernorm_backward_general", kUnscaledTypes, Arithmetic::ieee, kBuilt, kLayerNormGradient)
        .launches(layernorm_backward_general),
};

constexpr uint64_t kAllOfAttention =
    kLogSumExp | kPacked | kLengths | kFirstKey | kPages | kWindow | kMask | kBias | kSinks | kSoftcap;
constexpr Kernel<Attention> kAttention[] = {
    Row("hip_attention_ieee", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfAttention)
        .takes(attention_ieee_takes)
        .launches(attention_ieee),
};
uint64_t attention_workspace(const Attention &a, const char *) { return bytes_of_parts(a); }
constexpr Hooks<Attention> kAttentionHooks = {attention_workspace};

constexpr uint64_t kAllOfAttentionGradient = (kAllOfAttention & ~(kLogSumExp | kPages)) | kAccumulate;
constexpr Kernel<AttentionBackward> kAttentionBackward[] = {
    Row("hip_attention_backward_ieee", kUnscaledTypes, Arithmetic::ieee, kBuilt, kAllOfAttentionGradient)
        .launches(attention_backward_ieee),
};
uint64_t attention_backward_workspace(const AttentionBackward &b, const char *) { return bytes_of_deltas(b.forward); }
constexpr Hooks<AttentionBackward> kAttentionBackwardHooks = {attention_backward_workspace};

pydet_status query_device(int32_t id, pydet_device_info *info) {
  gpu_error error = gpu_describe(id, info);
  if (error == kGpuSuccess) return PYDET_OK;
  return fail(PYDET_NO_DEVICE, "query_device: ROCm device %d: %s (%d)", int(id), gpu_error_text(error), int(error));
}

// Of the matrix cores of other units (gfx950, RDNA) no arithmetic is known: there AUTO is ieee.
Arithmetic tensor_cores(int32_t id) {
  switch (gpu_facts(id).arch) {
    case 0: return Arithmetic::automatic;
    case 0x942: return Arithmetic::cdna3;
    case 0x90a: return Arithmetic::cdna2;
    default: return Arithmetic::ieee;
  }
}

uint64_t gemm_workspace(int64_t m, int64_t n, int64_t k, int64_t k_chunk, Arithmetic arithmetic, const char *) {
  const bool matrix_cores =
      arithmetic == Arithmetic::automatic || arithmetic == Arithmetic::cdna3 || arithmetic == Arithmetic::cdna2;
  return matrix_cores ? skinny_mfma_workspace(m, n, k, k_chunk) : 0;
}

constexpr Hooks<Gemm> kGemmHooks = {round_elements, gemm_workspace, nullptr, nullptr};
constexpr Hooks<HeadRows> kHeadHooks = {head_loss};

constexpr Backend hip() {
  Backend backend = {PYDET_ROCM, "HIP"};
  backend.device_count = gpu_device_count;
  backend.query_device = query_device;
  backend.tensor_cores = tensor_cores;
  backend.built_for = "HIP_ARCHS=\"" PYDET_HIP_ARCHS "\"";
  backend.reaches = gpu_reaches;
  backend.copy = gpu_copy;
  backend.forget = gpu_forget;
  backend.tables = tables(
      table(kGemm, &kGemmHooks), table(kScaledGemm), table(kQuantize), table(kRmsNorm), table(kRmsNormBackward),
      table(kSoftmax), table(kSoftmaxBackward), table(kGroupedGemm), table(kFold), table(kLayerNorm),
      table(kLayerNormBackward), table(kScaledGroupedGemm), table(kAttention, &kAttentionHooks),
      table(kAttentionBackward, &kAttentionBackwardHooks), table(kActivation), table(kActivationBackward),
      table(kSample), table(kTopK), table(kEmbedding), table(kEmbeddingBackward), no_kernels<SelectiveScan>(),
      no_kernels<GatedDelta>(), no_kernels<CausalConv1d>(), no_kernels<LinearLogProb>(), table(kHeadRows, &kHeadHooks),
      table(kRotaryTable), table(kRotary), no_kernels<SelectiveScanBackward>(), no_kernels<GatedDeltaBackward>(),
      no_kernels<CausalConv1dBackward>(), table(kRmsNormQuantize), table(kAdamW));
  return backend;
}

}  // namespace

const Backend *gpu_backend() {
  static constexpr Backend backend = hip();
  return &backend;
}

}  // namespace pydet
