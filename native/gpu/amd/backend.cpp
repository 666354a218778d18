// The HIP table of kernels, the fastest first. What it asks of the runtime goes through gpu.h.

#include <cstring>

#include "gpu/gpu.h"
#include "gpu/kernels.h"
#include "grouped.h"
#include "kernel.h"
#include "scaled_grouped.h"

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

// Every wave reads all of x. From 65 rows on tiles of 64x64 are faster, on gfx942 where K is whole stages of theirs or
// the tiles fill the device (estimated: bench/README.md).
bool skinny_cdna2_prefers(const Gemm &g) { return g.m <= 64; }
bool skinny_cdna3_prefers(const Gemm &g) {
  const bool whole = g.k % 64 == 0 && g.k_chunk == 0;
  return g.m <= 64 || (!whole && divide_up(g.m, 64) * divide_up(g.n, 64) < gpu_multiprocessors(g.device.id));
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

// Columns: name, input types, arithmetic, features, requires, runs_on, takes, prefers, launch.
constexpr Kernel<Gemm> kGemm[] = {
    {"hip_skinny_gemm_cdna3_mfma_chunks", kHalfTypes, Arithmetic::cdna3, kOneMatrix, "gfx942", is_gfx942,
     skinny_mfma_chunks_takes, skinny_mfma_chunks_prefers, skinny_mfma_chunks},
    {"hip_skinny_gemm_cdna3_mfma", kHalfTypes, Arithmetic::cdna3, kOneMatrix, "gfx942", is_gfx942, skinny_mfma_takes,
     skinny_cdna3_prefers, skinny_mfma},
    {"hip_skinny_gemm_cdna2_mfma_chunks", kHalfTypes, Arithmetic::cdna2, kOneMatrix, "gfx90a", is_gfx90a,
     skinny_mfma_chunks_takes, skinny_mfma_chunks_prefers, skinny_mfma_chunks},
    {"hip_skinny_gemm_cdna2_mfma", kHalfTypes, Arithmetic::cdna2, kOneMatrix, "gfx90a", is_gfx90a, skinny_mfma_takes,
     skinny_cdna2_prefers, skinny_mfma},
    {"hip_gemm_cdna3_mfma_128x128", kHalfTypes, Arithmetic::cdna3, kOneChain, "gfx942", is_gfx942, nullptr,
     fills_device<128, 128>, gemm_mfma_128},
    {"hip_gemm_cdna3_mfma_64x64", kHalfTypes, Arithmetic::cdna3, kAllOfGemm, "gfx942", is_gfx942, nullptr, nullptr,
     gemm_mfma_64},
    {"hip_gemm_cdna2_mfma_128x128", kHalfTypes, Arithmetic::cdna2, kOneChain, "gfx90a", is_gfx90a, nullptr,
     fills_device<128, 128>, gemm_mfma_128},
    {"hip_gemm_cdna2_mfma_64x64", kHalfTypes, Arithmetic::cdna2, kAllOfGemm, "gfx90a", is_gfx90a, nullptr, nullptr,
     gemm_mfma_64},
    {"hip_skinny_gemm_ieee", kUnscaledTypes, Arithmetic::ieee, kOneMatrix, kBuiltFor, is_built, skinny_ieee_takes,
     nullptr, skinny_ieee},
    {"hip_gemm_ieee_128x128", kUnscaledTypes, Arithmetic::ieee, kOneChain, kBuiltFor, is_built, nullptr,
     fills_device<128, 128>, gemm_ieee_128x128},
    {"hip_gemm_ieee_64x64", kUnscaledTypes, Arithmetic::ieee, kAllOfGemm, kBuiltFor, is_built, nullptr, nullptr,
     gemm_ieee_64x64},
};

constexpr uint64_t kAllOfScaled =
    kBatch | kBias | kAccumulate | kChunks | kBrokenChunks | kAlongM | kAlongN | kOutAlongM | kColumnScales;
constexpr Kernel<ScaledGemm> kScaledGemm[] = {
    {"hip_scaled_gemm_ieee_64x64", kFp8Types, Arithmetic::ieee, kAllOfScaled, kBuiltFor, is_built, nullptr, nullptr,
     scaled_gemm_ieee_64x64},
};

constexpr uint64_t kAllOfTiles = kBatch | kGivenScales | kGroupScales | kBlockScales | kTensorScale | kTransposedCopy;
constexpr Kernel<Quantize> kQuantize[] = {
    {"hip_quantize_rows", kUnscaledTypes, Arithmetic::ieee, kBatch | kRowScales, kBuiltFor, is_built,
     quantize_rows_takes, nullptr, quantize_by_rows},
    {"hip_quantize_tiles", kUnscaledTypes, Arithmetic::ieee, kAllOfTiles, kBuiltFor, is_built, nullptr, nullptr,
     quantize_tiled},
};

constexpr uint64_t kAllOfGroups = kBias | kAccumulate | kChunks | kAlongM | kAlongN | kOutAlongM | kDepth;
constexpr Kernel<GroupedGemm> kGroupedGemm[] = {
    {"hip_grouped_gemm_cdna3_mfma_64x64", kHalfTypes, Arithmetic::cdna3, kAllOfGroups, "gfx942", is_gfx942, nullptr,
     nullptr, grouped_gemm_mfma_64},
    {"hip_grouped_gemm_cdna2_mfma_64x64", kHalfTypes, Arithmetic::cdna2, kAllOfGroups, "gfx90a", is_gfx90a, nullptr,
     nullptr, grouped_gemm_mfma_64},
    {"hip_grouped_gemm_ieee_64x64", kUnscaledTypes, Arithmetic::ieee, kAllOfGroups, kBuiltFor, is_built, nullptr,
     nullptr, grouped_gemm_ieee_64x64},
};

constexpr Kernel<ScaledGroupedGemm> kScaledGroupedGemm[] = {
    {"hip_scaled_grouped_gemm_ieee_64x64", kFp8Types, Arithmetic::ieee, kScaledGroupedGemmFeatures, kBuiltFor, is_built,
     nullptr, nullptr, scaled_grouped_gemm_ieee_64x64},
};

constexpr Kernel<RmsNorm> kRmsNorm[] = {
    {"hip_rmsnorm_held", kUnscaledTypes, Arithmetic::ieee, kAllOfNorm, kBuiltFor, is_built, rmsnorm_held_takes, nullptr,
     rmsnorm_held},
    {"hip_rmsnorm_long", kUnscaledTypes, Arithmetic::ieee, kAllOfNorm, kBuiltFor, is_built, nullptr, nullptr,
     rmsnorm_long},
    {"hip_rmsnorm_general", kUnscaledTypes, Arithmetic::ieee, kAllOfNorm | kOfHeads, kBuiltFor, is_built, nullptr,
     nullptr, rmsnorm_general},
};

constexpr Kernel<RmsNormBackward> kRmsNormBackward[] = {
    {"hip_rmsnorm_backward_chain", kUnscaledTypes, Arithmetic::ieee, kAllOfGradient | kBlockSums, kBuiltFor, is_built,
     rmsnorm_backward_held_takes, rmsnorm_backward_chain_prefers, rmsnorm_backward_chain},
    {"hip_rmsnorm_backward_group", kUnscaledTypes, Arithmetic::ieee, kAllOfGradient | kBlockSums, kBuiltFor, is_built,
     rmsnorm_backward_held_takes, nullptr, rmsnorm_backward_group},
    {"hip_rmsnorm_backward_long", kUnscaledTypes, Arithmetic::ieee, kAllOfGradient | kBlockSums, kBuiltFor, is_built,
     nullptr, nullptr, rmsnorm_backward_long},
    {"hip_rmsnorm_backward_general", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient | kOfHeads | kBlockSums,
     kBuiltFor, is_built, nullptr, nullptr, rmsnorm_backward_general},
};

constexpr Kernel<Softmax> kSoftmax[] = {
    {"hip_softmax_held", kUnscaledTypes, Arithmetic::ieee, kAllOfSoftmax, kBuiltFor, is_built, softmax_held_takes,
     nullptr, softmax_held},
    {"hip_softmax_long", kUnscaledTypes, Arithmetic::ieee, kAllOfSoftmax, kBuiltFor, is_built, nullptr, nullptr,
     softmax_long},
};

constexpr Kernel<SoftmaxBackward> kSoftmaxBackward[] = {
    {"hip_softmax_backward_held", kUnscaledTypes, Arithmetic::ieee, kSoftmaxGradient, kBuiltFor, is_built,
     softmax_backward_held_takes, nullptr, softmax_backward_held},
    {"hip_softmax_backward_long", kUnscaledTypes, Arithmetic::ieee, kSoftmaxGradient, kBuiltFor, is_built, nullptr,
     nullptr, softmax_backward_long},
};

constexpr Kernel<Fold> kFold[] = {
    {"hip_fold", bit(Type::f32), Arithmetic::ieee, kBias | kAccumulate | kTree, kBuiltFor, is_built, nullptr, nullptr,
     fold},
};

constexpr Kernel<LayerNorm> kLayerNorm[] = {
    {"hip_layernorm_held", kUnscaledTypes, Arithmetic::ieee, kAllOfLayerNorm, kBuiltFor, is_built, layernorm_held_takes,
     nullptr, layernorm_held},
    {"hip_layernorm_long", kUnscaledTypes, Arithmetic::ieee, kAllOfLayerNorm, kBuiltFor, is_built, nullptr, nullptr,
     layernorm_long},
};

constexpr Kernel<LayerNormBackward> kLayerNormBackward[] = {
    {"hip_layernorm_backward_held", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient, kBuiltFor, is_built,
     layernorm_backward_held_takes, nullptr, layernorm_backward_held},
    {"hip_layernorm_backward_long", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient, kBuiltFor, is_built, nullptr,
     nullptr, layernorm_backward_long},
};

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

}  // namespace

const Backend *gpu_backend() {
  static constexpr Backend backend = {PYDET_ROCM,
                                      "HIP",
                                      gpu_device_count,
                                      query_device,
                                      tensor_cores,
                                      gpu_reaches,
                                      gpu_forget,
                                      "HIP_ARCHS=\"" PYDET_HIP_ARCHS "\"",
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
                                      round_elements,
                                      gemm_workspace};
  return &backend;
}

}  // namespace pydet
