// The CUDA table of kernels, the fastest first, and what is asked of the runtime about devices.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <utility>

#include <cuda.h>

#include "core/launch.h"
#include "gpu/backend.h"
#include "gpu/kernels.h"
#include "gpu/any/attention_backward.h"
#include "gpu/nvidia/sm90/attention/backward.h"
#include "gpu/nvidia/sm90/choose.h"
#include "gpu/nvidia/sm90/groups.h"
#include "ops/adamw/allocations.h"

namespace pydet {
namespace {

bool is_sm90(const Device &device) { return compute_capability(device.id) == 90; }
bool from_sm90(const Device &device) { return compute_capability(device.id) >= 90; }
bool from_sm80(const Device &device) { return compute_capability(device.id) >= 80; }
bool is_sm80_to_89(const Device &device) { return from_sm80(device) && !from_sm90(device); }
constexpr Machine kSm90a = {"sm_90a", is_sm90};  // by instructions of that architecture alone
constexpr Machine kSm90 = {"sm_90", is_sm90};
constexpr Machine kFromSm90 = {"sm_90 or later", from_sm90};
constexpr Machine kFromSm80 = {"sm_80 or later", from_sm80};
constexpr Machine kSm80To89 = {"sm_80 to sm_89", is_sm80_to_89};

// What kernels do, of what problems need. Each set is spelled out: a new feature belongs to no row until it is named here.
constexpr uint64_t kOneMatrix = kBias | kAccumulate | kChunks;  // x and w of a skinny product, both along k
constexpr uint64_t kOneChain = kBatch | kBias | kAccumulate | kAlongM | kAlongN;
constexpr uint64_t kAllOfGemm = kOneChain | kChunks;
constexpr uint64_t kAllOfNorm = kResidual | kWeight | kWeightOffset | kRstd | kTwoStrides;
constexpr uint64_t kGradientAlone =
    kWeight | kWeightOffset | kTwoStrides | kAccumulate | kRowGradient | kWeightGradient;
constexpr uint64_t kAllOfGradient = kGradientAlone | kResidual;
constexpr uint64_t kOfHeads = kBias | kHeads | kWideSum;
constexpr uint64_t kAllOfLayerNorm = kAllOfNorm | kBias | kMean;
constexpr uint64_t kLayerNormGradient = kAllOfGradient | kBiasGradient;
constexpr uint64_t kSoftmaxForward = kTwoStrides | kLogarithm | kColumn;
constexpr uint64_t kAllOfSoftmax = kSoftmaxForward | kRowGradient;
constexpr uint64_t kHeadOfSoftmax = kTwoStrides | kColumn | kRowGradient | kLogProbs | kSlabs;
constexpr uint64_t kSoftmaxGradient = kTwoStrides | kLogarithm;
constexpr uint64_t kHeadRowsFeatures = kRowGradient | kSoftcap | kSlabs;
constexpr uint64_t kAllOfActivation = kTwoStrides | kGate;
constexpr uint64_t kActivationGradient = kAllOfActivation | kRowGradient;
constexpr uint64_t kAllOfSampling = kTwoStrides | kFilters | kLogProbs;

template <int tile> constexpr Kernel<Gemm> sm90_row() {
  return Row(kSm90Tiles[tile].name, kHalfTypes, Arithmetic::sm90, kSm90a,
             sm90_layouts(tile, true) ? kAllOfGemm : kOneChain)
      .chooses(gemm_sm90_choose, tile)
      .launches(gemm_sm90);
}

template <int rows, bool turned> constexpr Kernel<Gemm> skinny_row(const char *name) {
  return Row(name, kHalfTypes, Arithmetic::sm90, kSm90a, turned ? kOneMatrix | kAlongN : kOneMatrix | kBatch)
      .chooses(skinny_sm90_choose<turned>, rows)
      .launches(skinny_sm90<rows, turned>);
}

constexpr Kernel<Gemm> kSkinnyRows[] = {
    skinny_row<16, false>("cuda_skinny_gemm_sm90_16"),       skinny_row<32, false>("cuda_skinny_gemm_sm90_32"),
    skinny_row<48, false>("cuda_skinny_gemm_sm90_48"),       skinny_row<64, false>("cuda_skinny_gemm_sm90_64"),
    skinny_row<96, false>("cuda_skinny_gemm_sm90_96"),       skinny_row<16, true>("cuda_skinny_gemm_sm90_turned_16"),
    skinny_row<32, true>("cuda_skinny_gemm_sm90_turned_32"), skinny_row<48, true>("cuda_skinny_gemm_sm90_turned_48"),
    skinny_row<64, true>("cuda_skinny_gemm_sm90_turned_64"), skinny_row<96, true>("cuda_skinny_gemm_sm90_turned_96"),
};
// More rows read b again, each from the L2.
bool gemm_few_columns_prefers(const Gemm &g) { return g.m * g.k <= 64; }
// One round of its tiles, be it full or not, takes as long as tiles of 64x64 take for half of a full one (H100).
bool gemm_ieee_128x256_prefers(const Gemm &g) {
  return 2 * divide_up(g.m, 128) * divide_up(g.n, 256) * g.batch.count > gpu_multiprocessors(g.device.id);
}

// By whichever row is the best for copies of the operands.
pydet_status gemm_copied(const Gemm &);

constexpr Kernel<Gemm> kOtherRows[] = {
    Row("cuda_gemm_sm90_copied", kHalfTypes, Arithmetic::sm90, kSm90a, kAllOfGemm & ~kBatch)
        .takes(gemm_copied_takes)
        .prefers(gemm_copied_prefers)
        .launches(gemm_copied),
    Row("cuda_skinny_gemm_sm90_mma", kHalfTypes, Arithmetic::sm90, kFromSm90, kOneMatrix)
        .takes(skinny_mma_takes)
        .prefers(skinny_mma_prefers)
        .launches(skinny_mma),
    Row("cuda_gemm_sm90_mma_128x128", kHalfTypes, Arithmetic::sm90, kFromSm90, kOneChain)
        .takes(gemm_mma_128_takes)
        .prefers(fills_device<128, 128>)
        .launches(gemm_mma_128),
    Row("cuda_gemm_sm90_mma_64x64", kHalfTypes, Arithmetic::sm90, kFromSm90, kAllOfGemm).launches(gemm_mma_64),
    Row("cuda_skinny_gemm_sm80_mma", kHalfTypes, Arithmetic::sm80, kSm80To89, kOneMatrix)
        .takes(skinny_mma_takes)
        .prefers(skinny_mma_prefers)
        .launches(skinny_mma),
    Row("cuda_gemm_sm80_mma_128x128", kHalfTypes, Arithmetic::sm80, kSm80To89, kOneChain)
        .takes(gemm_mma_128_takes)
        .prefers(fills_device<128, 128>)
        .launches(gemm_mma_128),
    Row("cuda_gemm_sm80_mma_64x64", kHalfTypes, Arithmetic::sm80, kSm80To89, kAllOfGemm).launches(gemm_mma_64),
    Row("cuda_skinny_gemm_ieee", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kOneMatrix)
        .takes(skinny_ieee_takes)
        .launches(skinny_ieee),
    Row("cuda_gemm_ieee_few_columns", kUnscaledTypes, Arithmetic::ieee, kFromSm80,
        kBatch | kAccumulate | kAlongM | kAlongN)
        .takes(gemm_few_columns_takes)
        .prefers(gemm_few_columns_prefers)
        .launches(gemm_few_columns),
    Row("cuda_gemm_ieee_few_dots", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kBatch | kAccumulate)
        .takes(gemm_few_dots_takes)
        .launches(gemm_few_dots),
    Row("cuda_gemm_ieee_128x256", bit(Type::f32), Arithmetic::ieee, kFromSm80, kOneChain)
        .takes(gemm_ieee_128x256_takes)
        .prefers(gemm_ieee_128x256_prefers)
        .launches(gemm_ieee_128x256),
    Row("cuda_gemm_ieee_64x64", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfGemm).launches(gemm_ieee_64x64),
};

// The skinny kernels, the tiles of sm90/tiles.h, and the rest.
constexpr int kSkinnyCount = int(sizeof kSkinnyRows / sizeof *kSkinnyRows),
              kOtherCount = int(sizeof kOtherRows / sizeof *kOtherRows);
template <int... skinny, int... tiles, int... others>
constexpr std::array<Kernel<Gemm>, kSkinnyCount + kSm90TileCount + kOtherCount> gemm_rows(
    std::integer_sequence<int, skinny...>, std::integer_sequence<int, tiles...>,
    std::integer_sequence<int, others...>) {
  return {kSkinnyRows[skinny]..., sm90_row<tiles>()..., kOtherRows[others]...};
}
constexpr auto kGemm =
    gemm_rows(std::make_integer_sequence<int, kSkinnyCount>(), std::make_integer_sequence<int, kSm90TileCount>(),
              std::make_integer_sequence<int, kOtherCount>());

pydet_status gemm_copied(const Gemm &g) {
  Gemm copied;
  Choice choice;
  PYDET_TRY(gemm_copy_operands(g, &copied));
  return choose(table(kGemm), copied, &choice)->launch(copied, choice);
}
uint64_t gemm_copy_workspace(const Device &device, const Matrix &operand) {
  return is_sm90(device) ? gemm_copied_bytes(operand) : 0;
}

constexpr uint64_t kScaledTile = kBatch | kBias | kAccumulate;
constexpr uint64_t kScaledSkinny = kBias | kAccumulate | kColumnScales;
template <int rows> constexpr Kernel<ScaledGemm> scaled_skinny_row(const char *name) {
  return Row(name, scaled_skinny_types(rows), Arithmetic::sm90, kSm90a, kScaledSkinny)
      .chooses(scaled_skinny_sm90_choose, rows)
      .launches(scaled_skinny_sm90<rows>);
}
template <int tile> constexpr Kernel<ScaledGemm> scaled_tile_row() {
  return Row(kFp8Tiles[tile].name, kFp8Tiles[tile].types, Arithmetic::sm90, kSm90a, kScaledTile)
      .chooses(scaled_gemm_sm90_choose, tile)
      .launches(scaled_gemm_sm90<tile>);
}
constexpr int kScaledOthers = 11;
template <int... tiles>
constexpr std::array<Kernel<ScaledGemm>, kScaledOthers + sizeof...(tiles)> scaled_rows(
    std::integer_sequence<int, tiles...>) {
  return {{
      scaled_skinny_row<16>("cuda_scaled_gemm_sm90_skinny_16"),
      scaled_skinny_row<32>("cuda_scaled_gemm_sm90_skinny_32"),
      scaled_skinny_row<48>("cuda_scaled_gemm_sm90_skinny_48"),
      scaled_skinny_row<64>("cuda_scaled_gemm_sm90_skinny_64"),
      scaled_skinny_row<80>("cuda_scaled_gemm_sm90_skinny_80"),
      scaled_skinny_row<96>("cuda_scaled_gemm_sm90_skinny_96"),
      scaled_skinny_row<128>("cuda_scaled_gemm_sm90_skinny_128"),
      scaled_tile_row<tiles>()...,
      Row(kFp8Rest.name, kFp8Rest.types, Arithmetic::sm90, kSm90a, kScaledTile | kChunks | kColumnScales)
          .launches(scaled_gemm_sm90_rest),
      Row("cuda_scaled_gemm_sm90_fine", kFp8Types, Arithmetic::sm90, kSm90a, kScaledSkinny | kGroupScales)
          .takes(scaled_fine_sm90_takes)
          .launches(scaled_fine_sm90),
      Row("cuda_scaled_skinny_ieee", kFp8Types, Arithmetic::ieee, kFromSm80, kScaledSkinny | kOutAlongM)
          .takes(scaled_skinny_ieee_takes)
          .launches(scaled_skinny_ieee),
      Row("cuda_scaled_gemm_ieee_64x64", kFp8Types, Arithmetic::ieee, kFromSm80, kScaledGemmFeatures)
          .launches(scaled_gemm_ieee_64x64),
  }};
}
constexpr auto kScaledGemm = scaled_rows(std::make_integer_sequence<int, kFp8TileCount>());

constexpr Kernel<Quantize> kQuantize[] = {
    Row("cuda_quantize_rows_packed", kHalfTypes, Arithmetic::ieee, kFromSm80, kRowScales)
        .takes(quantize_rows_packed_takes)
        .launches(quantize_rows_packed),
    Row("cuda_quantize_groups_packed", kHalfTypes, Arithmetic::ieee, kFromSm80, kGroupScales)
        .takes(quantize_groups_packed_takes)
        .launches(quantize_groups_packed),
    Row("cuda_quantize_tiles_packed", kHalfTypes, Arithmetic::ieee, kFromSm80,
        kGroupScales | kBlockScales | kTransposedCopy)
        .takes(quantize_tiles_packed_takes)
        .launches(quantize_tiles_packed),
    Row("cuda_quantize_rows", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kBatch | kRowScales)
        .takes(quantize_rows_takes)
        .launches(quantize_by_rows),
    Row("cuda_quantize_tiles", kUnscaledTypes, Arithmetic::ieee, kFromSm80,
        kBatch | kGivenScales | kGroupScales | kBlockScales | kTensorScale | kTransposedCopy)
        .launches(quantize_tiled),
};

constexpr Kernel<RmsNorm> kRmsNorm[] = {
    Row("cuda_rmsnorm_held", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfNorm)
        .takes(rmsnorm_held_takes)
        .launches(rmsnorm_held),
    Row("cuda_rmsnorm_staged", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfNorm)
        .takes(rmsnorm_staged_takes)
        .prefers(rmsnorm_staged_prefers)
        .launches(rmsnorm_staged),
    Row("cuda_rmsnorm_adjacent", kHalfTypes, Arithmetic::ieee, kFromSm80, kAllOfNorm & ~kResidual)
        .takes(rmsnorm_adjacent_takes)
        .prefers(rmsnorm_adjacent_prefers)
        .launches(rmsnorm_adjacent),
    Row("cuda_rmsnorm_unaligned", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfNorm)
        .takes(rmsnorm_unaligned_takes)
        .launches(rmsnorm_unaligned),
    Row("cuda_rmsnorm_general", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfNorm | kOfHeads)
        .launches(rmsnorm_general),
};

constexpr uint64_t kAllOfNormQuantize = kAllOfNorm | kGivenScales | kRowScales | kGroupScales;
constexpr Kernel<RmsNormQuantize> kRmsNormQuantize[] = {
    Row("cuda_rmsnorm_quantize_held", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfNormQuantize)
        .takes(rmsnorm_quantize_held_takes)
        .launches(rmsnorm_quantize_held),
    Row("cuda_rmsnorm_quantize_general", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfNormQuantize | kWideSum)
        .launches(rmsnorm_quantize_general),
};

constexpr Kernel<RmsNormBackward> kRmsNormBackward[] = {
    Row("cuda_rmsnorm_backward_apart", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfGradient)
        .takes(rmsnorm_backward_apart_takes)
        .prefers(rmsnorm_backward_apart_prefers)
        .launches(rmsnorm_backward_apart),
    Row("cuda_rmsnorm_backward_narrow", kHalfTypes, Arithmetic::ieee, kFromSm80, kGradientAlone | kBlockSums)
        .takes(rmsnorm_backward_narrow_takes)
        .prefers(rmsnorm_backward_narrow_prefers)
        .launches(rmsnorm_backward_narrow),
    Row("cuda_rmsnorm_backward_short_chain", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfGradient | kBlockSums)
        .takes(rmsnorm_backward_short_takes)
        .prefers(rmsnorm_backward_short_chain_prefers)
        .launches(rmsnorm_backward_short_chain),
    Row("cuda_rmsnorm_backward_chain", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfGradient | kBlockSums)
        .takes(rmsnorm_backward_held_takes)
        .prefers(rmsnorm_backward_chain_prefers)
        .launches(rmsnorm_backward_chain),
    Row("cuda_rmsnorm_backward_group", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfGradient | kBlockSums)
        .takes(rmsnorm_backward_held_takes)
        .launches(rmsnorm_backward_group),
    Row("cuda_rmsnorm_backward_staged", kUnscaledTypes, Arithmetic::ieee, kSm90, kAllOfGradient | kBlockSums)
        .takes(rmsnorm_backward_staged_takes)
        .prefers(rmsnorm_backward_staged_prefers)
        .launches(rmsnorm_backward_staged),
    Row("cuda_rmsnorm_backward_strided", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfGradient | kBlockSums)
        .takes(rmsnorm_backward_strided_takes)
        .prefers(rmsnorm_backward_strided_prefers)
        .launches(rmsnorm_backward_strided),
    Row("cuda_rmsnorm_backward_unaligned", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfGradient | kBlockSums)
        .takes(rmsnorm_backward_unaligned_takes)
        .launches(rmsnorm_backward_unaligned),
    Row("cuda_rmsnorm_backward_heads", kUnscaledTypes, Arithmetic::ieee, kFromSm80,
        kLayerNormGradient | kHeads | kBlockSums)
        .takes(rmsnorm_backward_heads_takes)
        .launches(rmsnorm_backward_heads),
    Row("cuda_rmsnorm_backward_general", kUnscaledTypes, Arithmetic::ieee, kFromSm80,
        kLayerNormGradient | kOfHeads | kBlockSums)
        .launches(rmsnorm_backward_general),
};

constexpr Kernel<Softmax> kSoftmax[] = {
    Row("cuda_softmax_head", kUnscaledTypes, Arithmetic::ieee, kSm90, kHeadOfSoftmax)
        .takes(softmax_head_takes)
        .prefers(softmax_head_prefers)
        .launches(softmax_head),
    Row("cuda_softmax_spread", kUnscaledTypes, Arithmetic::ieee, kSm90, kAllOfSoftmax)
        .takes(softmax_spread_takes)
        .prefers(softmax_spread_prefers)
        .launches(softmax_spread),
    Row("cuda_softmax_strided", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfSoftmax)
        .takes(softmax_strided_takes)
        .prefers(softmax_strided_prefers)
        .launches(softmax_strided),
    Row("cuda_softmax_cluster", kUnscaledTypes, Arithmetic::ieee, kFromSm90, kAllOfSoftmax)
        .takes(softmax_cluster_takes)
        .prefers(softmax_cluster_prefers)
        .launches(softmax_cluster),
    Row("cuda_softmax_staged", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfSoftmax)
        .takes(softmax_staged_takes)
        .prefers(softmax_staged_prefers)
        .launches(softmax_staged),
    Row("cuda_softmax_held", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfSoftmax)
        .takes(softmax_held_takes)
        .launches(softmax_held),
    Row("cuda_softmax_long", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfSoftmax).launches(softmax_long),
};

constexpr Kernel<SoftmaxBackward> kSoftmaxBackward[] = {
    Row("cuda_softmax_backward_spread", kUnscaledTypes, Arithmetic::ieee, kSm90, kSoftmaxGradient)
        .takes(softmax_backward_spread_takes)
        .prefers(softmax_backward_spread_prefers)
        .launches(softmax_backward_spread),
    Row("cuda_softmax_backward_strided", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kSoftmaxGradient)
        .takes(softmax_backward_strided_takes)
        .prefers(softmax_backward_strided_prefers)
        .launches(softmax_backward_strided),
    Row("cuda_softmax_backward_shifted", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kSoftmaxGradient)
        .takes(softmax_backward_shifted_takes)
        .prefers(softmax_backward_shifted_prefers)
        .launches(softmax_backward_shifted),
    Row("cuda_softmax_backward_cluster", kUnscaledTypes, Arithmetic::ieee, kFromSm90, kSoftmaxGradient)
        .takes(softmax_backward_cluster_takes)
        .prefers(softmax_backward_cluster_prefers)
        .launches(softmax_backward_cluster),
    Row("cuda_softmax_backward_held", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kSoftmaxGradient)
        .takes(softmax_backward_held_takes)
        .launches(softmax_backward_held),
    Row("cuda_softmax_backward_staged", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kSoftmaxGradient)
        .takes(softmax_backward_staged_takes)
        .launches(softmax_backward_staged),
    Row("cuda_softmax_backward_long", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kSoftmaxGradient)
        .launches(softmax_backward_long),
};

constexpr Kernel<HeadRows> kHeadRows[] = {
    Row("cuda_head_rows_cluster", kUnscaledTypes, Arithmetic::ieee, kSm90, kHeadRowsFeatures)
        .takes(head_rows_cluster_takes)
        .prefers(head_rows_cluster_prefers)
        .launches(head_rows_cluster),
    Row("cuda_head_rows", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kHeadRowsFeatures).launches(head_rows),
};

// Masks, biases, sinks and softcaps are the general kernels'.
constexpr uint64_t kAttentionTile = kLogSumExp | kPacked | kLengths | kFirstKey | kPages | kWindow;
constexpr uint64_t kAllOfAttention = kAttentionTile | kMask | kBias | kSinks | kSoftcap;
constexpr Kernel<Attention> attention_row(int variant) {
  return Row(kAttentionNames[variant], kHalfTypes, Arithmetic::sm90, kSm90a, kAttentionTile)
      .chooses(attention_sm90_choose, variant)
      .launches(attention_sm90);
}
constexpr Kernel<Attention> kAttention[] = {
    attention_row(kAttentionWide),
    attention_row(kAttentionFew),
    attention_row(kAttentionWideSplit),
    attention_row(kAttentionFewSplit),
    Row("cuda_attention_sm90_mma", kHalfTypes, Arithmetic::sm90, kFromSm90, kAllOfAttention)
        .takes(attention_mma_takes)
        .launches(attention_mma),
    Row("cuda_attention_sm80_mma", kHalfTypes, Arithmetic::sm80, kSm80To89, kAllOfAttention)
        .takes(attention_mma_takes)
        .launches(attention_mma),
    Row("cuda_attention_ieee", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfAttention)
        .takes(attention_ieee_takes)
        .launches(attention_ieee),
};
constexpr uint64_t kAttentionBackwardTile = kPacked | kLengths | kFirstKey | kWindow | kAccumulate;
constexpr uint64_t kAllOfAttentionGradient = (kAllOfAttention & ~(kLogSumExp | kPages)) | kAccumulate;
template <KeysCut cut> constexpr Kernel<AttentionBackward> attention_backward_row() {  // by name alone
  return Row(kKeysCutNames[cut], kHalfTypes, Arithmetic::sm90, kSm90a, kAttentionBackwardTile)
      .takes(attention_backward_cut_takes)
      .prefers(attention_backward_by_name)
      .launches(attention_backward_cut<cut>);
}
constexpr Kernel<AttentionBackward> kAttentionBackward[] = {
    Row(kAttentionBackwardFusedName, kHalfTypes, Arithmetic::sm90, kSm90a, kAttentionBackwardTile & ~kFirstKey)
        .takes(attention_backward_fused_takes)
        .prefers(attention_backward_by_name)
        .launches(attention_backward_fused),
    Row(kAttentionBackwardName, kHalfTypes, Arithmetic::sm90, kSm90a, kAttentionBackwardTile)
        .takes(attention_backward_sm90_takes)
        .launches(attention_backward_sm90),
    attention_backward_row<kWideKeys>(),
    attention_backward_row<kNarrowKeys>(),
    attention_backward_row<kHalvedKeys>(),
    Row("cuda_attention_backward_sm90_mma", kHalfTypes, Arithmetic::sm90, kFromSm90, kAllOfAttentionGradient)
        .launches(attention_backward_mma),
    Row("cuda_attention_backward_sm80_mma", kHalfTypes, Arithmetic::sm80, kSm80To89, kAllOfAttentionGradient)
        .launches(attention_backward_mma),
    Row("cuda_attention_backward_ieee", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfAttentionGradient)
        .launches(attention_backward_ieee),
};
uint64_t attention_workspace(const Attention &a, const char *kernel) {
  return std::max({attention_sm90_workspace(a, kernel), attention_mma_workspace(a, kernel), bytes_of_parts(a)});
}

uint64_t attention_backward_workspace(const AttentionBackward &b, const char *kernel) {
  return std::max(attention_backward_sm90_workspace(b, kernel), bytes_of_deltas(b.forward));
}

constexpr Kernel<Activation> kActivation[] = {
    Row("cuda_activation", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfActivation).launches(activation),
};

constexpr Kernel<ActivationBackward> kActivationBackward[] = {
    Row("cuda_activation_backward", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kActivationGradient)
        .launches(activation_backward),
};

constexpr Kernel<Sample> kSample[] = {
    Row("cuda_sample_spread", kUnscaledTypes, Arithmetic::ieee, kSm90, kAllOfSampling)
        .takes(sample_spread_takes)
        .prefers(sample_spread_prefers)
        .launches(sample_spread),
    Row("cuda_sample", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfSampling).launches(sample),
};

constexpr Kernel<TopK> kTopK[] = {
    Row("cuda_topk_spread", kUnscaledTypes, Arithmetic::ieee, kSm90, kTwoStrides)
        .takes(topk_spread_takes)
        .prefers(topk_spread_prefers)
        .launches(topk_spread),
    Row("cuda_topk", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kTwoStrides).launches(topk),
};

constexpr Kernel<Embedding> kEmbedding[] = {
    Row("cuda_embedding", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kTwoStrides).launches(embedding),
};

constexpr uint64_t kScanFeatures = kInitialState | kFinalState | kPacked;
constexpr Kernel<SelectiveScan> kSelectiveScan[] = {
    Row("cuda_selective_scan_step", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kScanFeatures | kEachState | kSkip)
        .takes(selective_step_takes)
        .prefers(selective_step_prefers)
        .launches(selective_step),
    Row("cuda_selective_scan", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kScanFeatures | kEachState | kSkip)
        .takes(selective_scan_takes)
        .launches(selective_scan),
};
constexpr Kernel<GatedDelta> kGatedDelta[] = {
    Row("cuda_gated_delta_step", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kScanFeatures)
        .takes(delta_step_takes)
        .prefers(delta_step_prefers)
        .launches(delta_step),
    Row("cuda_gated_delta", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kScanFeatures).launches(gated_delta),
};
constexpr Kernel<CausalConv1d> kCausalConv1d[] = {
    Row("cuda_causal_conv1d", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kInitialState | kPacked | kBias)
        .launches(causal_conv1d),
};
constexpr uint64_t kScanGradient = kInitialState | kPacked | kInitialGradient | kFinalGradient;
constexpr Kernel<SelectiveScanBackward> kSelectiveScanBackward[] = {
    Row("cuda_selective_scan_backward", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kScanGradient | kEachState | kSkip)
        .takes(selective_scan_backward_takes)
        .launches(selective_scan_backward),
};
constexpr Kernel<GatedDeltaBackward> kGatedDeltaBackward[] = {
    Row("cuda_gated_delta_backward", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kScanGradient)
        .takes(gated_delta_backward_takes)
        .launches(gated_delta_backward),
};
constexpr Kernel<CausalConv1dBackward> kCausalConv1dBackward[] = {
    Row("cuda_causal_conv1d_backward", kUnscaledTypes, Arithmetic::ieee, kFromSm80,
        kInitialState | kPacked | kRowGradient | kWeightGradient | kBiasGradient | kInitialGradient)
        .launches(causal_conv1d_backward),
};

constexpr Kernel<EmbeddingBackward> kEmbeddingBackward[] = {
    Row("cuda_embedding_backward", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kTwoStrides | kAccumulate | kPadding)
        .launches(embedding_backward),
};

constexpr Kernel<RotaryTable> kRotaryTable[] = {
    Row("cuda_rotary_table", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kTwoStrides).launches(rotary_table),
};

constexpr Kernel<Rotary> kRotary[] = {
    Row("cuda_rotary", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kTwoStrides | kNeighbours | kWideSum | kRowGradient)
        .launches(rotary),
};

constexpr Kernel<Fold> kFold[] = {
    Row("cuda_fold", bit(Type::f32), Arithmetic::ieee, kFromSm80, kBias | kAccumulate | kTree).launches(fold),
    Row("cuda_fold_one_shot", bit(Type::f32), Arithmetic::ieee, kFromSm80, kBias | kAccumulate | kTree | kPeers)
        .takes(fold_one_shot_takes)
        .prefers(fold_one_shot_prefers)
        .launches(fold_one_shot),
    Row("cuda_fold_awaited", bit(Type::f32), Arithmetic::ieee, kFromSm80, kBias | kAccumulate | kTree | kPeers)
        .takes(fold_awaited_takes)
        .launches(fold_awaited),
    Row("cuda_fold_two_shot", bit(Type::f32), Arithmetic::ieee, kFromSm80, kBias | kAccumulate | kTree | kPeers)
        .takes(fold_two_shot_takes)
        .launches(fold_two_shot),
    Row("cuda_fold_stream", bit(Type::f32), Arithmetic::ieee, kFromSm80, kBias | kPeers)
        .takes(fold_stream_takes)
        .launches(fold_stream),
};

constexpr uint64_t kGroupsOneChain = kBias | kAccumulate | kAlongM | kAlongN | kOutAlongM | kDepth;
constexpr uint64_t kGroupsTile = kBias | kAccumulate | kAlongM | kAlongN | kDepth;
template <int tile> constexpr Kernel<GroupedGemm> groups_row() {
  return Row(kGroupedTiles[tile].name, kHalfTypes, Arithmetic::sm90, kSm90a,
             kGroupsTile | when(kGroupedTiles[tile].chunks, kChunks))
      .chooses(grouped_sm90_choose, tile)
      .launches(grouped_sm90<tile>);
}
constexpr Kernel<GroupedGemm> kGroupedGemm[] = {
    groups_row<0>(),
    groups_row<1>(),
    Row("cuda_grouped_gemm_sm90_mma_128x128", kHalfTypes, Arithmetic::sm90, kFromSm90, kGroupsOneChain)
        .takes(grouped_gemm_mma_128_takes)
        .prefers(grouped_gemm_mma_128_prefers)
        .launches(grouped_gemm_mma_128),
    Row("cuda_grouped_gemm_sm90_mma_64x64", kHalfTypes, Arithmetic::sm90, kFromSm90, kGroupsOneChain | kChunks)
        .launches(grouped_gemm_mma_64),
    Row("cuda_grouped_gemm_sm80_mma_128x128", kHalfTypes, Arithmetic::sm80, kSm80To89, kGroupsOneChain)
        .takes(grouped_gemm_mma_128_takes)
        .prefers(grouped_gemm_mma_128_prefers)
        .launches(grouped_gemm_mma_128),
    Row("cuda_grouped_gemm_sm80_mma_64x64", kHalfTypes, Arithmetic::sm80, kSm80To89, kGroupsOneChain | kChunks)
        .launches(grouped_gemm_mma_64),
    Row("cuda_grouped_gemm_ieee_64x64", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kGroupsOneChain | kChunks)
        .launches(grouped_gemm_ieee_64x64),
};

constexpr Kernel<ScaledGroupedGemm> kScaledGroupedGemm[] = {
    Row("cuda_scaled_grouped_gemm_sm90_256x128", kFp8Types, Arithmetic::sm90, kSm90a, kBias | kAccumulate)
        .takes(scaled_groups_takes)
        .prefers(scaled_groups_tall_prefers)
        .launches(scaled_groups_tall),
    Row("cuda_scaled_grouped_gemm_sm90_128x128_ahead", kFp8Types, Arithmetic::sm90, kSm90a, kBias | kAccumulate)
        .takes(scaled_groups_takes)
        .launches(scaled_groups_ahead),
    Row("cuda_scaled_grouped_gemm_sm90_128x128", kFp8Types, Arithmetic::sm90, kSm90a,
        kBias | kAccumulate | kChunks | kColumnScales)
        .launches(scaled_groups_any),
    Row("cuda_scaled_grouped_gemm_ieee_64x64", kFp8Types, Arithmetic::ieee, kFromSm80, kScaledGroupedGemmFeatures)
        .launches(scaled_grouped_gemm_ieee_64x64),
};

constexpr Kernel<AdamW> kAdamW[] = {
    Row("cuda_adamw", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kMaster).takes(adamw_takes).launches(adamw),
};

constexpr Kernel<LayerNorm> kLayerNorm[] = {
    Row("cuda_layernorm_held", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfLayerNorm)
        .takes(layernorm_held_takes)
        .launches(layernorm_held),
    Row("cuda_layernorm_staged", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfLayerNorm)
        .takes(layernorm_staged_takes)
        .prefers(layernorm_staged_prefers)
        .launches(layernorm_staged),
    Row("cuda_layernorm_adjacent", kHalfTypes, Arithmetic::ieee, kFromSm80, kAllOfLayerNorm & ~kResidual)
        .takes(layernorm_adjacent_takes)
        .prefers(layernorm_adjacent_prefers)
        .launches(layernorm_adjacent),
    Row("cuda_layernorm_unaligned", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfLayerNorm)
        .takes(layernorm_unaligned_takes)
        .launches(layernorm_unaligned),
    Row("cuda_layernorm_general", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kAllOfLayerNorm)
        .launches(layernorm_general),
};

constexpr Kernel<LayerNormBackward> kLayerNormBackward[] = {
    Row("cuda_layernorm_backward_unaligned", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kLayerNormGradient)
        .takes(layernorm_backward_unaligned_takes)
        .prefers(layernorm_backward_unaligned_prefers)
        .launches(layernorm_backward_unaligned),
    Row("cuda_layernorm_backward_staged", kUnscaledTypes, Arithmetic::ieee, kSm90, kLayerNormGradient)
        .takes(layernorm_backward_staged_takes)
        .prefers(layernorm_backward_staged_prefers)
        .launches(layernorm_backward_staged),
    Row("cuda_layernorm_backward_strided", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kLayerNormGradient)
        .takes(layernorm_backward_strided_takes)
        .prefers(layernorm_backward_strided_prefers)
        .launches(layernorm_backward_strided),
    Row("cuda_layernorm_backward_apart", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kLayerNormGradient)
        .takes(layernorm_backward_apart_takes)
        .prefers(layernorm_backward_apart_prefers)
        .launches(layernorm_backward_apart),
    Row("cuda_layernorm_backward_chain", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kLayerNormGradient)
        .takes(layernorm_backward_ring_takes)
        .prefers(layernorm_backward_chain_prefers)
        .launches(layernorm_backward_chain),
    Row("cuda_layernorm_backward_group", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kLayerNormGradient)
        .takes(layernorm_backward_ring_takes)
        .launches(layernorm_backward_group),
    Row("cuda_layernorm_backward_rows", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kLayerNormGradient)
        .takes(layernorm_backward_rows_takes)
        .launches(layernorm_backward_rows),
    Row("cuda_layernorm_backward_held", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kLayerNormGradient)
        .takes(layernorm_backward_held_takes)
        .launches(layernorm_backward_held),
    Row("cuda_layernorm_backward_general", kUnscaledTypes, Arithmetic::ieee, kFromSm80, kLayerNormGradient)
        .launches(layernorm_backward_general),
};

// 0 and OK where this machine has no NVIDIA driver or no GPU; an old driver is an error that can be acted on.
pydet_status device_count(int32_t *count) {
  *count = 0;
  int devices = 0;
  cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess) {
    *count = devices;
    return PYDET_OK;
  }
  if (error == cudaErrorNoDevice || error == cudaErrorStubLibrary) return PYDET_OK;
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0, runtime = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return PYDET_OK;
    cudaRuntimeGetVersion(&runtime);
    return fail(PYDET_NO_DEVICE, "the NVIDIA driver supports CUDA %d.%d, this build of pydet needs %d.%d or later",
                driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
  }
  return fail(PYDET_NO_DEVICE, "the CUDA runtime cannot use this machine's GPUs: %s (%d)", gpu_error_text(error),
              int(error));
}

pydet_status query_device(int32_t id, pydet_device_info *info) {
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDeviceProperties(&properties, id);
  if (error != cudaSuccess)
    return fail(PYDET_NO_DEVICE, "query_device: CUDA device %d: %s (%d)", int(id), gpu_error_text(error), int(error));
  info->multiprocessors = properties.multiProcessorCount;
  snprintf(info->name, sizeof info->name, "%.*s", int(sizeof info->name) - 1, properties.name);
  snprintf(info->arch, sizeof info->arch, "sm_%d%d", properties.major, properties.minor);
  return PYDET_OK;
}

// From sm_90 on all generations compute Hopper's step of 16 (Blackwell by a published model).
Arithmetic tensor_cores(int32_t id) {
  int capability = compute_capability(id);
  if (capability == 0) return Arithmetic::automatic;
  return capability >= 90 ? Arithmetic::sm90 : capability >= 80 ? Arithmetic::sm80 : Arithmetic::ieee;
}

// Hopper's tiles do, where it lies along rows as out does. Few rows are a skinny kernel's.
bool gemm_begins(const Gemm &g, const char *kernel) {
  constexpr int64_t kFew = 128;
  if (g.from.col_stride != 1) return false;
  if (g.arithmetic != Arithmetic::sm90 || !is_sm90(g.device) || !(kHalfTypes & bit(g.a.type)) || g.k == 0) return false;
  if (!kernel) return g.m > kFew && g.n > kFew && gemm_sm90_choose(g, kAnyVariant).variant >= 0;
  for (int tile = 0; tile < kSm90TileCount; ++tile)
    if (!strcmp(kSm90Tiles[tile].name, kernel)) return gemm_sm90_choose(g, tile).variant >= 0;
  return false;
}

constexpr Hooks<Gemm> kGemmHooks = {round_elements, gemm_sm90_workspace, gemm_begins, gemm_copy_workspace};
constexpr Hooks<HeadRows> kHeadHooks = {head_loss};
constexpr Hooks<Attention> kAttentionHooks = {attention_workspace};
constexpr Hooks<AttentionBackward> kAttentionBackwardHooks = {attention_backward_workspace};

using GetPointerAttributes = CUresult (*)(unsigned, CUpointer_attribute *, void **, CUdeviceptr);

// Found through the runtime, so that no driver is linked; NULL where it has none.
GetPointerAttributes pointer_attributes() {
  static std::atomic<GetPointerAttributes> known{nullptr};
  if (const GetPointerAttributes function = known.load(std::memory_order_relaxed)) return function;
  void *entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuPointerGetAttributes", &entry, 12000, cudaEnableDefault, &found) !=
          cudaSuccess ||
      found != cudaDriverEntryPointSuccess)
    return nullptr;
  const auto function = reinterpret_cast<GetPointerAttributes>(entry);
  known.store(function, std::memory_order_relaxed);
  return function;
}

Allocation allocation_of(const void *at) {
  const GetPointerAttributes ask = pointer_attributes();
  CUdeviceptr begin = 0;
  size_t size = 0;
  CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void *found[] = {&begin, &size};
  if (!ask || ask(2, which, found, reinterpret_cast<CUdeviceptr>(at)) != CUDA_SUCCESS) return {};
  return {uintptr_t(begin), uintptr_t(begin) + size};
}

constexpr Hooks<AdamW> kAdamWHooks = {allocation_of};

constexpr Backend cuda() {
  Backend backend = {PYDET_CUDA, "CUDA"};
  backend.device_count = device_count;
  backend.query_device = query_device;
  backend.tensor_cores = tensor_cores;
  backend.reaches = gpu_reaches;
  backend.copy = gpu_copy;
  backend.forget = gpu_forget;
  backend.tables =
      tables(table(kGemm, &kGemmHooks), table(kScaledGemm), table(kQuantize), table(kRmsNorm), table(kRmsNormBackward),
             table(kSoftmax), table(kSoftmaxBackward), table(kGroupedGemm), table(kFold), table(kLayerNorm),
             table(kLayerNormBackward), table(kScaledGroupedGemm), table(kAttention, &kAttentionHooks),
             table(kAttentionBackward, &kAttentionBackwardHooks), table(kActivation), table(kActivationBackward),
             table(kSample), table(kTopK), table(kEmbedding), table(kEmbeddingBackward), table(kSelectiveScan),
             table(kGatedDelta), table(kCausalConv1d), no_kernels<LinearLogProb>(), table(kHeadRows, &kHeadHooks),
             table(kRotaryTable), table(kRotary), table(kSelectiveScanBackward), table(kGatedDeltaBackward),
             table(kCausalConv1dBackward), table(kRmsNormQuantize), table(kAdamW, &kAdamWHooks));
  return backend;
}

}  // namespace

const Backend *gpu_backend() {
  static constexpr Backend backend = cuda();
  return &backend;
}

}  // namespace pydet
