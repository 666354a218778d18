// The CUDA table of kernels, the fastest first, and what is asked of the runtime about devices.

#include <array>
#include <cstdio>
#include <utility>

#include "gpu/gpu.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/plan.h"
#include "gpu/nvidia/sm90/groups.h"
#include "gpu/nvidia/sm90/choose.h"
#include "grouped.h"
#include "kernel.h"
#include "scaled_grouped.h"

namespace pydet {
namespace {

bool is_sm90(const Device &device) { return compute_capability(device.id) == 90; }
bool from_sm90(const Device &device) { return compute_capability(device.id) >= 90; }
bool from_sm80(const Device &device) { return compute_capability(device.id) >= 80; }
bool is_sm80_to_89(const Device &device) { return from_sm80(device) && !from_sm90(device); }

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
constexpr uint64_t kSoftmaxGradient = kTwoStrides | kLogarithm;

template <int tile> constexpr Kernel<Gemm> sm90_row() {
  return {kSm90Tiles[tile].name,
          kHalfTypes,
          Arithmetic::sm90,
          sm90_layouts(tile, true) ? kAllOfGemm : kOneChain,
          "sm_90a",
          is_sm90,
          nullptr,
          nullptr,
          gemm_sm90,
          gemm_sm90_choose,
          tile};
}

template <int rows, bool turned> constexpr Kernel<Gemm> skinny_row(const char *name) {
  return {name,
          kHalfTypes,
          Arithmetic::sm90,
          turned ? kOneMatrix | kAlongN : kOneMatrix,
          "sm_90a",
          is_sm90,
          nullptr,
          nullptr,
          skinny_sm90<rows, turned>,
          skinny_sm90_choose<turned>,
          rows};
}

// Columns: name, input types, arithmetic, features, requires, runs_on, takes, prefers, launch, and of variants choose, in
// place of takes and prefers, and variant.
constexpr Kernel<Gemm> kSkinnyRows[] = {
    skinny_row<16, false>("cuda_skinny_gemm_sm90_16"),       skinny_row<32, false>("cuda_skinny_gemm_sm90_32"),
    skinny_row<48, false>("cuda_skinny_gemm_sm90_48"),       skinny_row<64, false>("cuda_skinny_gemm_sm90_64"),
    skinny_row<96, false>("cuda_skinny_gemm_sm90_96"),       skinny_row<16, true>("cuda_skinny_gemm_sm90_turned_16"),
    skinny_row<32, true>("cuda_skinny_gemm_sm90_turned_32"), skinny_row<48, true>("cuda_skinny_gemm_sm90_turned_48"),
    skinny_row<64, true>("cuda_skinny_gemm_sm90_turned_64"), skinny_row<96, true>("cuda_skinny_gemm_sm90_turned_96"),
};
// One round of its tiles, be it full or not, takes as long as tiles of 64x64 take for half of a full one (H100).
bool gemm_ieee_128x256_prefers(const Gemm &g) {
  return 2 * divide_up(g.m, 128) * divide_up(g.n, 256) * g.batch.count > gpu_multiprocessors(g.device.id);
}

constexpr Kernel<Gemm> kOtherRows[] = {
    {"cuda_skinny_gemm_sm90_mma", kHalfTypes, Arithmetic::sm90, kOneMatrix, "sm_90 or later", from_sm90,
     skinny_mma_takes, skinny_mma_prefers, skinny_mma},
    {"cuda_gemm_sm90_mma_128x128", kHalfTypes, Arithmetic::sm90, kOneChain, "sm_90 or later", from_sm90,
     gemm_mma_128_takes, fills_device<128, 128>, gemm_mma_128},
    {"cuda_gemm_sm90_mma_64x64", kHalfTypes, Arithmetic::sm90, kAllOfGemm, "sm_90 or later", from_sm90, nullptr,
     nullptr, gemm_mma_64},
    {"cuda_skinny_gemm_sm80_mma", kHalfTypes, Arithmetic::sm80, kOneMatrix, "sm_80 to sm_89", is_sm80_to_89,
     skinny_mma_takes, skinny_mma_prefers, skinny_mma},
    {"cuda_gemm_sm80_mma_128x128", kHalfTypes, Arithmetic::sm80, kOneChain, "sm_80 to sm_89", is_sm80_to_89,
     gemm_mma_128_takes, fills_device<128, 128>, gemm_mma_128},
    {"cuda_gemm_sm80_mma_64x64", kHalfTypes, Arithmetic::sm80, kAllOfGemm, "sm_80 to sm_89", is_sm80_to_89, nullptr,
     nullptr, gemm_mma_64},
    {"cuda_skinny_gemm_ieee", kUnscaledTypes, Arithmetic::ieee, kOneMatrix, "sm_80 or later", from_sm80,
     skinny_ieee_takes, nullptr, skinny_ieee},
    {"cuda_gemm_ieee_128x256", bit(Type::f32), Arithmetic::ieee, kOneChain, "sm_80 or later", from_sm80,
     gemm_ieee_128x256_takes, gemm_ieee_128x256_prefers, gemm_ieee_128x256},
    {"cuda_gemm_ieee_64x64", kUnscaledTypes, Arithmetic::ieee, kAllOfGemm, "sm_80 or later", from_sm80, nullptr,
     nullptr, gemm_ieee_64x64},
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

constexpr uint64_t kScaledTile = kBatch | kBias | kAccumulate;
constexpr uint64_t kAllOfScaled =
    kScaledTile | kChunks | kBrokenChunks | kAlongM | kAlongN | kOutAlongM | kColumnScales;
constexpr uint64_t kScaledSkinny = kBias | kAccumulate | kColumnScales;
template <int rows> constexpr Kernel<ScaledGemm> scaled_skinny_row(const char *name) {
  return {name,    scaled_skinny_types(rows), Arithmetic::sm90,          kScaledSkinny, "sm_90a", is_sm90, nullptr,
          nullptr, scaled_skinny_sm90<rows>,  scaled_skinny_sm90_choose, rows};
}
template <int tile> constexpr Kernel<ScaledGemm> scaled_tile_row() {
  constexpr const Fp8Tile &its = kFp8Tiles[tile];
  return {its.name,
          its.types,
          Arithmetic::sm90,
          kScaledTile,
          "sm_90a",
          is_sm90,
          nullptr,
          nullptr,
          scaled_gemm_sm90<tile>,
          scaled_gemm_sm90_choose,
          tile};
}
constexpr int kScaledOthers = 8;
template <int... tiles>
constexpr std::array<Kernel<ScaledGemm>, kScaledOthers + sizeof...(tiles)> scaled_rows(
    std::integer_sequence<int, tiles...>) {
  return {{
      scaled_skinny_row<16>("cuda_scaled_gemm_sm90_skinny_16"),
      scaled_skinny_row<32>("cuda_scaled_gemm_sm90_skinny_32"),
      scaled_skinny_row<48>("cuda_scaled_gemm_sm90_skinny_48"),
      scaled_skinny_row<64>("cuda_scaled_gemm_sm90_skinny_64"),
      scaled_skinny_row<96>("cuda_scaled_gemm_sm90_skinny_96"),
      scaled_skinny_row<128>("cuda_scaled_gemm_sm90_skinny_128"),
      scaled_tile_row<tiles>()...,
      {kFp8Rest.name, kFp8Rest.types, Arithmetic::sm90, kScaledTile | kChunks | kColumnScales, "sm_90a", is_sm90,
       nullptr, nullptr, scaled_gemm_sm90_rest},
      {"cuda_scaled_gemm_ieee_64x64", kFp8Types, Arithmetic::ieee, kAllOfScaled, "sm_80 or later", from_sm80, nullptr,
       nullptr, scaled_gemm_ieee_64x64},
  }};
}
constexpr auto kScaledGemm = scaled_rows(std::make_integer_sequence<int, kFp8TileCount>());

constexpr Kernel<Quantize> kQuantize[] = {
    {"cuda_quantize_rows_packed", kHalfTypes, Arithmetic::ieee, kRowScales, "sm_80 or later", from_sm80,
     quantize_rows_packed_takes, nullptr, quantize_rows_packed},
    {"cuda_quantize_groups_packed", kHalfTypes, Arithmetic::ieee, kGroupScales, "sm_80 or later", from_sm80,
     quantize_groups_packed_takes, nullptr, quantize_groups_packed},
    {"cuda_quantize_tiles_packed", kHalfTypes, Arithmetic::ieee, kGroupScales | kBlockScales | kTransposedCopy,
     "sm_80 or later", from_sm80, quantize_tiles_packed_takes, nullptr, quantize_tiles_packed},
    {"cuda_quantize_rows", kUnscaledTypes, Arithmetic::ieee, kBatch | kRowScales, "sm_80 or later", from_sm80,
     quantize_rows_takes, nullptr, quantize_by_rows},
    {"cuda_quantize_tiles", kUnscaledTypes, Arithmetic::ieee,
     kBatch | kGivenScales | kGroupScales | kBlockScales | kTransposedCopy, "sm_80 or later", from_sm80, nullptr,
     nullptr, quantize_tiled},
};

constexpr Kernel<RmsNorm> kRmsNorm[] = {
    {"cuda_rmsnorm_held", kUnscaledTypes, Arithmetic::ieee, kAllOfNorm, "sm_80 or later", from_sm80, rmsnorm_held_takes,
     nullptr, rmsnorm_held},
    {"cuda_rmsnorm_staged", kUnscaledTypes, Arithmetic::ieee, kAllOfNorm, "sm_80 or later", from_sm80,
     rmsnorm_staged_takes, rmsnorm_staged_prefers, rmsnorm_staged},
    {"cuda_rmsnorm_adjacent", kHalfTypes, Arithmetic::ieee, kAllOfNorm & ~kResidual, "sm_80 or later", from_sm80,
     rmsnorm_adjacent_takes, rmsnorm_adjacent_prefers, rmsnorm_adjacent},
    {"cuda_rmsnorm_unaligned", kUnscaledTypes, Arithmetic::ieee, kAllOfNorm, "sm_80 or later", from_sm80,
     rmsnorm_unaligned_takes, nullptr, rmsnorm_unaligned},
    {"cuda_rmsnorm_long", kUnscaledTypes, Arithmetic::ieee, kAllOfNorm, "sm_80 or later", from_sm80, nullptr, nullptr,
     rmsnorm_long},
    {"cuda_rmsnorm_general", kUnscaledTypes, Arithmetic::ieee, kAllOfNorm | kOfHeads, "sm_80 or later", from_sm80,
     nullptr, nullptr, rmsnorm_general},
};

constexpr Kernel<RmsNormBackward> kRmsNormBackward[] = {
    {"cuda_rmsnorm_backward_apart", kUnscaledTypes, Arithmetic::ieee, kAllOfGradient, "sm_80 or later", from_sm80,
     rmsnorm_backward_apart_takes, rmsnorm_backward_apart_prefers, rmsnorm_backward_apart},
    {"cuda_rmsnorm_backward_narrow", kHalfTypes, Arithmetic::ieee, kGradientAlone | kBlockSums, "sm_80 or later",
     from_sm80, rmsnorm_backward_narrow_takes, rmsnorm_backward_narrow_prefers, rmsnorm_backward_narrow},
    {"cuda_rmsnorm_backward_short_chain", kUnscaledTypes, Arithmetic::ieee, kAllOfGradient | kBlockSums,
     "sm_80 or later", from_sm80, rmsnorm_backward_short_takes, rmsnorm_backward_short_chain_prefers,
     rmsnorm_backward_short_chain},
    {"cuda_rmsnorm_backward_short_cluster", kUnscaledTypes, Arithmetic::ieee, kAllOfGradient | kBlockSums,
     "sm_90 or later", from_sm90, rmsnorm_backward_short_takes, nullptr, rmsnorm_backward_short_cluster},
    {"cuda_rmsnorm_backward_chain", kUnscaledTypes, Arithmetic::ieee, kAllOfGradient | kBlockSums, "sm_80 or later",
     from_sm80, rmsnorm_backward_held_takes, rmsnorm_backward_chain_prefers, rmsnorm_backward_chain},
    {"cuda_rmsnorm_backward_cluster", kUnscaledTypes, Arithmetic::ieee, kAllOfGradient | kBlockSums, "sm_90 or later",
     from_sm90, rmsnorm_backward_cluster_takes, rmsnorm_backward_cluster_prefers, rmsnorm_backward_cluster},
    {"cuda_rmsnorm_backward_group", kUnscaledTypes, Arithmetic::ieee, kAllOfGradient | kBlockSums, "sm_80 or later",
     from_sm80, rmsnorm_backward_held_takes, nullptr, rmsnorm_backward_group},
    {"cuda_rmsnorm_backward_strided", kUnscaledTypes, Arithmetic::ieee, kAllOfGradient | kBlockSums, "sm_80 or later",
     from_sm80, rmsnorm_backward_strided_takes, rmsnorm_backward_strided_prefers, rmsnorm_backward_strided},
    {"cuda_rmsnorm_backward_shifted", kHalfTypes, Arithmetic::ieee, kAllOfGradient | kBlockSums, "sm_80 or later",
     from_sm80, rmsnorm_backward_shifted_takes, rmsnorm_backward_shifted_prefers, rmsnorm_backward_shifted},
    {"cuda_rmsnorm_backward_unaligned", kUnscaledTypes, Arithmetic::ieee, kAllOfGradient | kBlockSums, "sm_80 or later",
     from_sm80, rmsnorm_backward_unaligned_takes, nullptr, rmsnorm_backward_unaligned},
    {"cuda_rmsnorm_backward_long", kUnscaledTypes, Arithmetic::ieee, kAllOfGradient | kBlockSums, "sm_80 or later",
     from_sm80, nullptr, nullptr, rmsnorm_backward_long},
    {"cuda_rmsnorm_backward_heads", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient | kHeads | kBlockSums,
     "sm_80 or later", from_sm80, rmsnorm_backward_heads_takes, nullptr, rmsnorm_backward_heads},
    {"cuda_rmsnorm_backward_general", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient | kOfHeads | kBlockSums,
     "sm_80 or later", from_sm80, nullptr, nullptr, rmsnorm_backward_general},
};

constexpr Kernel<Softmax> kSoftmax[] = {
    {"cuda_softmax_spread", kUnscaledTypes, Arithmetic::ieee, kSoftmaxForward, "sm_90", is_sm90, softmax_spread_takes,
     softmax_spread_prefers, softmax_spread},
    {"cuda_softmax_adjacent", kHalfTypes, Arithmetic::ieee, kAllOfSoftmax, "sm_80 or later", from_sm80,
     softmax_adjacent_takes, softmax_adjacent_prefers, softmax_adjacent},
    {"cuda_softmax_strided", kUnscaledTypes, Arithmetic::ieee, kAllOfSoftmax, "sm_80 or later", from_sm80,
     softmax_strided_takes, softmax_strided_prefers, softmax_strided},
    {"cuda_softmax_cluster", kUnscaledTypes, Arithmetic::ieee, kAllOfSoftmax, "sm_90 or later", from_sm90,
     softmax_cluster_takes, softmax_cluster_prefers, softmax_cluster},
    {"cuda_softmax_staged", kUnscaledTypes, Arithmetic::ieee, kAllOfSoftmax, "sm_80 or later", from_sm80,
     softmax_staged_takes, softmax_staged_prefers, softmax_staged},
    {"cuda_softmax_held", kUnscaledTypes, Arithmetic::ieee, kAllOfSoftmax, "sm_80 or later", from_sm80,
     softmax_held_takes, nullptr, softmax_held},
    {"cuda_softmax_long", kUnscaledTypes, Arithmetic::ieee, kAllOfSoftmax, "sm_80 or later", from_sm80, nullptr,
     nullptr, softmax_long},
};

constexpr Kernel<SoftmaxBackward> kSoftmaxBackward[] = {
    {"cuda_softmax_backward_spread", kUnscaledTypes, Arithmetic::ieee, kSoftmaxGradient, "sm_90", is_sm90,
     softmax_backward_spread_takes, softmax_backward_spread_prefers, softmax_backward_spread},
    {"cuda_softmax_backward_adjacent", kHalfTypes, Arithmetic::ieee, kSoftmaxGradient, "sm_80 or later", from_sm80,
     softmax_backward_adjacent_takes, softmax_backward_adjacent_prefers, softmax_backward_adjacent},
    {"cuda_softmax_backward_strided", kUnscaledTypes, Arithmetic::ieee, kSoftmaxGradient, "sm_80 or later", from_sm80,
     softmax_backward_strided_takes, softmax_backward_strided_prefers, softmax_backward_strided},
    {"cuda_softmax_backward_cluster", kUnscaledTypes, Arithmetic::ieee, kSoftmaxGradient, "sm_90 or later", from_sm90,
     softmax_backward_cluster_takes, softmax_backward_cluster_prefers, softmax_backward_cluster},
    {"cuda_softmax_backward_held", kUnscaledTypes, Arithmetic::ieee, kSoftmaxGradient, "sm_80 or later", from_sm80,
     softmax_backward_held_takes, nullptr, softmax_backward_held},
    {"cuda_softmax_backward_staged", kUnscaledTypes, Arithmetic::ieee, kSoftmaxGradient, "sm_80 or later", from_sm80,
     softmax_backward_staged_takes, nullptr, softmax_backward_staged},
    {"cuda_softmax_backward_long", kUnscaledTypes, Arithmetic::ieee, kSoftmaxGradient, "sm_80 or later", from_sm80,
     nullptr, nullptr, softmax_backward_long},
};

// Masks, biases, sinks and softcaps are none of theirs.
constexpr uint64_t kAttentionTile = kLogSumExp | kPacked | kLengths | kFirstKey | kPages | kWindow;
constexpr Kernel<Attention> attention_row(int variant) {
  return {kAttentionNames[variant],
          kHalfTypes,
          Arithmetic::sm90,
          kAttentionTile,
          "sm_90a",
          is_sm90,
          nullptr,
          nullptr,
          attention_sm90,
          attention_sm90_choose,
          variant};
}
constexpr Kernel<Attention> kAttention[] = {attention_row(kAttentionWide), attention_row(kAttentionFew),
                                            attention_row(kAttentionWideSplit), attention_row(kAttentionFewSplit)};

constexpr Kernel<Fold> kFold[] = {
    {"cuda_fold", bit(Type::f32), Arithmetic::ieee, kBias | kAccumulate | kTree, "sm_80 or later", from_sm80, nullptr,
     nullptr, fold},
    {"cuda_fold_one_shot", bit(Type::f32), Arithmetic::ieee, kBias | kAccumulate | kTree | kPeers, "sm_80 or later",
     from_sm80, fold_one_shot_takes, fold_one_shot_prefers, fold_one_shot},
    {"cuda_fold_two_shot", bit(Type::f32), Arithmetic::ieee, kBias | kAccumulate | kTree | kPeers, "sm_80 or later",
     from_sm80, nullptr, nullptr, fold_two_shot},
};

constexpr uint64_t kGroupsOneChain = kBias | kAccumulate | kAlongM | kAlongN | kOutAlongM | kDepth;
constexpr uint64_t kGroupsTile = kBias | kAccumulate | kAlongM | kAlongN | kDepth;
template <int tile> constexpr Kernel<GroupedGemm> groups_row() {
  return {kGroupedTiles[tile].name,
          kHalfTypes,
          Arithmetic::sm90,
          kGroupsTile | when(kGroupedTiles[tile].chunks, kChunks),
          "sm_90a",
          is_sm90,
          nullptr,
          nullptr,
          grouped_sm90<tile>,
          grouped_sm90_choose,
          tile};
}
constexpr Kernel<GroupedGemm> kGroupedGemm[] = {
    groups_row<0>(),
    groups_row<1>(),
    {"cuda_grouped_gemm_sm90_mma_128x128", kHalfTypes, Arithmetic::sm90, kGroupsOneChain, "sm_90 or later", from_sm90,
     grouped_gemm_mma_128_takes, grouped_gemm_mma_128_prefers, grouped_gemm_mma_128},
    {"cuda_grouped_gemm_sm90_mma_64x64", kHalfTypes, Arithmetic::sm90, kGroupsOneChain | kChunks, "sm_90 or later",
     from_sm90, nullptr, nullptr, grouped_gemm_mma_64},
    {"cuda_grouped_gemm_sm80_mma_128x128", kHalfTypes, Arithmetic::sm80, kGroupsOneChain, "sm_80 to sm_89",
     is_sm80_to_89, grouped_gemm_mma_128_takes, grouped_gemm_mma_128_prefers, grouped_gemm_mma_128},
    {"cuda_grouped_gemm_sm80_mma_64x64", kHalfTypes, Arithmetic::sm80, kGroupsOneChain | kChunks, "sm_80 to sm_89",
     is_sm80_to_89, nullptr, nullptr, grouped_gemm_mma_64},
    {"cuda_grouped_gemm_ieee_64x64", kUnscaledTypes, Arithmetic::ieee, kGroupsOneChain | kChunks, "sm_80 or later",
     from_sm80, nullptr, nullptr, grouped_gemm_ieee_64x64},
};

constexpr Kernel<ScaledGroupedGemm> kScaledGroupedGemm[] = {
    {"cuda_scaled_grouped_gemm_sm90_256x128", kFp8Types, Arithmetic::sm90, kBias | kAccumulate, "sm_90a", is_sm90,
     scaled_groups_takes, scaled_groups_tall_prefers, scaled_groups_tall},
    {"cuda_scaled_grouped_gemm_sm90_128x128_ahead", kFp8Types, Arithmetic::sm90, kBias | kAccumulate, "sm_90a", is_sm90,
     scaled_groups_takes, nullptr, scaled_groups_ahead},
    {"cuda_scaled_grouped_gemm_sm90_128x128", kFp8Types, Arithmetic::sm90,
     kBias | kAccumulate | kChunks | kColumnScales, "sm_90a", is_sm90, nullptr, nullptr, scaled_groups_any},
    {"cuda_scaled_grouped_gemm_ieee_64x64", kFp8Types, Arithmetic::ieee, kScaledGroupedGemmFeatures, "sm_80 or later",
     from_sm80, nullptr, nullptr, scaled_grouped_gemm_ieee_64x64},
};

constexpr Kernel<LayerNorm> kLayerNorm[] = {
    {"cuda_layernorm_held", kUnscaledTypes, Arithmetic::ieee, kAllOfLayerNorm, "sm_80 or later", from_sm80,
     layernorm_held_takes, nullptr, layernorm_held},
    {"cuda_layernorm_staged", kUnscaledTypes, Arithmetic::ieee, kAllOfLayerNorm, "sm_80 or later", from_sm80,
     layernorm_staged_takes, layernorm_staged_prefers, layernorm_staged},
    {"cuda_layernorm_adjacent", kHalfTypes, Arithmetic::ieee, kAllOfLayerNorm & ~kResidual, "sm_80 or later", from_sm80,
     layernorm_adjacent_takes, layernorm_adjacent_prefers, layernorm_adjacent},
    {"cuda_layernorm_unaligned", kUnscaledTypes, Arithmetic::ieee, kAllOfLayerNorm, "sm_80 or later", from_sm80,
     layernorm_unaligned_takes, nullptr, layernorm_unaligned},
    {"cuda_layernorm_long", kUnscaledTypes, Arithmetic::ieee, kAllOfLayerNorm, "sm_80 or later", from_sm80, nullptr,
     nullptr, layernorm_long},
};

constexpr Kernel<LayerNormBackward> kLayerNormBackward[] = {
    {"cuda_layernorm_backward_unaligned", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient, "sm_80 or later",
     from_sm80, layernorm_backward_unaligned_takes, layernorm_backward_unaligned_prefers, layernorm_backward_unaligned},
    {"cuda_layernorm_backward_strided", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient, "sm_80 or later",
     from_sm80, layernorm_backward_strided_takes, layernorm_backward_strided_prefers, layernorm_backward_strided},
    {"cuda_layernorm_backward_apart", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient, "sm_80 or later", from_sm80,
     layernorm_backward_apart_takes, layernorm_backward_apart_prefers, layernorm_backward_apart},
    {"cuda_layernorm_backward_rows", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient, "sm_80 or later", from_sm80,
     layernorm_backward_rows_takes, nullptr, layernorm_backward_rows},
    {"cuda_layernorm_backward_held", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient, "sm_80 or later", from_sm80,
     layernorm_backward_held_takes, nullptr, layernorm_backward_held},
    {"cuda_layernorm_backward_long", kUnscaledTypes, Arithmetic::ieee, kLayerNormGradient, "sm_80 or later", from_sm80,
     nullptr, nullptr, layernorm_backward_long},
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

}  // namespace

const Backend *gpu_backend() {
  static constexpr Backend backend = {PYDET_CUDA,
                                      "CUDA",
                                      device_count,
                                      query_device,
                                      tensor_cores,
                                      gpu_reaches,
                                      gpu_forget,
                                      nullptr,
                                      {kGemm.data(), int(kGemm.size())},
                                      {kScaledGemm.data(), int(kScaledGemm.size())},
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
                                      gemm_sm90_workspace,
                                      table(kAttention),
                                      attention_sm90_workspace};
  return &backend;
}

}  // namespace pydet
