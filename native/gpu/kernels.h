// The GPU kernels as backend.cpp's table sees them: host functions, one .cu file below each comment.
#pragma once

#include "contract/arithmetic.h"
#include "core/choice.h"

namespace pydet {

struct Attention;  // ops/*/problem.h, as all of these
struct Matrix;
struct AttentionBackward;
struct Activation;
struct AdamW;
struct Embedding;
struct EmbeddingBackward;
struct SelectiveScan;
struct GatedDelta;
struct CausalConv1d;
struct SelectiveScanBackward;
struct GatedDeltaBackward;
struct CausalConv1dBackward;
struct RotaryTable;
struct Rotary;
struct Sample;
struct TopK;
struct ActivationBackward;
struct Gemm;
struct Rounding;
struct GroupedGemm;
struct ScaledGemm;
struct Quantize;
struct ScaledGroupedGemm;
struct RmsNorm;
struct RmsNormBackward;
struct RmsNormQuantize;
struct LayerNorm;
struct LayerNormBackward;
struct Softmax;
struct SoftmaxBackward;
struct HeadRows;
struct HeadLoss;
struct Fold;

// nvidia/sm90/gemm.cu, whose variants are the tiles of nvidia/sm90/tiles.h (plan.cpp).
Choice gemm_sm90_choose(const Gemm &, int tile);
pydet_status gemm_sm90(const Gemm &, const Choice &);
uint64_t gemm_sm90_workspace(int64_t m, int64_t n, int64_t k, int64_t k_chunk, Arithmetic asked, const char *kernel);

// nvidia/gemm_copied.cu. The bytes of an operand's copy, 0 where Hopper's kernels can read it as it lies; and the copies,
// with the product of them.
uint64_t gemm_copied_bytes(const Matrix &);
bool gemm_copied_takes(const Gemm &);
bool gemm_copied_prefers(const Gemm &);
pydet_status gemm_copy_operands(const Gemm &, Gemm *copied);

// nvidia/sm90/skinny.cu. Rows of the weights that a block works on at a time, for up to 128 rows of a; `turned`: they
// have n adjacent, not k.
template <bool turned> Choice skinny_sm90_choose(const Gemm &, int rows);
template <int rows, bool turned> pydet_status skinny_sm90(const Gemm &, const Choice &);

// nvidia/sm90/attention/forward.cu, in variants (plan.h).
Choice attention_sm90_choose(const Attention &, int variant);
pydet_status attention_sm90(const Attention &, const Choice &);
uint64_t attention_sm90_workspace(const Attention &, const char *kernel);

// nvidia/sm90/attention/backward*.cu
bool attention_backward_sm90_takes(const AttentionBackward &);
pydet_status attention_backward_sm90(const AttentionBackward &);
uint64_t attention_backward_sm90_workspace(const AttentionBackward &, const char *kernel);

// nvidia/sm90/scaled_tiles.cu, whose variants are the tiles of nvidia/sm90/fp8_tiles.h, and its kernel for the rest.
Choice scaled_gemm_sm90_choose(const ScaledGemm &, int tile);
template <int tile> pydet_status scaled_gemm_sm90(const ScaledGemm &, const Choice &);
pydet_status scaled_gemm_sm90_rest(const ScaledGemm &);

// nvidia/sm90/scaled_skinny.cu. Columns of b that a block works on at a time, for up to 128 rows of a.
constexpr uint32_t scaled_skinny_types(int columns) {  // others would only take longer to compile
  return columns == 32 || columns == 64 ? kFp8Types : bit(Type::e4m3);
}
Choice scaled_skinny_sm90_choose(const ScaledGemm &, int columns);
template <int columns> pydet_status scaled_skinny_sm90(const ScaledGemm &, const Choice &);
bool scaled_fine_sm90_takes(const ScaledGemm &);
pydet_status scaled_fine_sm90(const ScaledGemm &);

// any/scaled_gemm_ieee.cu
pydet_status scaled_gemm_ieee_64x64(const ScaledGemm &);
pydet_status scaled_grouped_gemm_ieee_64x64(const ScaledGroupedGemm &);

// any/scaled_skinny_ieee.cu
bool scaled_skinny_ieee_takes(const ScaledGemm &);
pydet_status scaled_skinny_ieee(const ScaledGemm &);

// any/quantize.cu
bool quantize_rows_takes(const Quantize &);
pydet_status quantize_by_rows(const Quantize &);
pydet_status quantize_tiled(const Quantize &);

// nvidia/quantize_packed.cu
bool quantize_rows_packed_takes(const Quantize &);
pydet_status quantize_rows_packed(const Quantize &);
bool quantize_groups_packed_takes(const Quantize &);
pydet_status quantize_groups_packed(const Quantize &);
bool quantize_tiles_packed_takes(const Quantize &);
pydet_status quantize_tiles_packed(const Quantize &);

// any/skinny_ieee.cu
bool skinny_ieee_takes(const Gemm &);
pydet_status skinny_ieee(const Gemm &);

// nvidia/skinny_mma.cu
bool skinny_mma_takes(const Gemm &);
bool skinny_mma_prefers(const Gemm &);
pydet_status skinny_mma(const Gemm &);

// nvidia/gemm_mma.cu
pydet_status gemm_mma_64(const Gemm &);
bool gemm_mma_128_takes(const Gemm &);
pydet_status gemm_mma_128(const Gemm &);

pydet_status grouped_gemm_mma_64(const GroupedGemm &);
bool grouped_gemm_mma_128_takes(const GroupedGemm &);
bool grouped_gemm_mma_128_prefers(const GroupedGemm &);
pydet_status grouped_gemm_mma_128(const GroupedGemm &);

// nvidia/sm90/grouped.cu, whose variants are the tiles of nvidia/sm90/groups.h (groups.cpp).
Choice grouped_sm90_choose(const GroupedGemm &, int tile);
template <int tile> pydet_status grouped_sm90(const GroupedGemm &, const Choice &);

// amd/gemm_mfma.cu
pydet_status gemm_mfma_64(const Gemm &);
pydet_status gemm_mfma_128(const Gemm &);
pydet_status grouped_gemm_mfma_64(const GroupedGemm &);

// amd/skinny_mfma_chain.cu: the part of skinny_mfma without chunks
pydet_status skinny_mfma_chain(const Gemm &);

// amd/skinny_mfma.cu
bool skinny_mfma_takes(const Gemm &);
pydet_status skinny_mfma(const Gemm &);
uint64_t skinny_mfma_workspace(int64_t m, int64_t n, int64_t k, int64_t k_chunk);  // 0: the next three are not for it
bool skinny_mfma_chunks_takes(const Gemm &);
bool skinny_mfma_chunks_prefers(const Gemm &);
pydet_status skinny_mfma_chunks(const Gemm &);

// any/gemm_ieee.cu
pydet_status gemm_ieee_64x64(const Gemm &);
pydet_status gemm_ieee_128x128(const Gemm &);  // HIP
pydet_status grouped_gemm_ieee_64x64(const GroupedGemm &);

// nvidia/gemm_ieee_few.cu
bool gemm_few_columns_takes(const Gemm &);
pydet_status gemm_few_columns(const Gemm &);
bool gemm_few_dots_takes(const Gemm &);
pydet_status gemm_few_dots(const Gemm &);

// nvidia/gemm_ieee_fp32.cu
bool gemm_ieee_128x256_takes(const Gemm &);
pydet_status gemm_ieee_128x256(const Gemm &);

// any/norm.cu
bool rmsnorm_held_takes(const RmsNorm &);
pydet_status rmsnorm_held(const RmsNorm &);
pydet_status rmsnorm_general(const RmsNorm &);
bool rmsnorm_quantize_held_takes(const RmsNormQuantize &);
pydet_status rmsnorm_quantize_held(const RmsNormQuantize &);
pydet_status rmsnorm_quantize_general(const RmsNormQuantize &);
bool layernorm_held_takes(const LayerNorm &);
pydet_status layernorm_held(const LayerNorm &);
pydet_status layernorm_general(const LayerNorm &);

// any/norm_backward.cu
pydet_status rmsnorm_backward_general(const RmsNormBackward &);
pydet_status layernorm_backward_general(const LayerNormBackward &);
bool layernorm_backward_held_takes(const LayerNormBackward &);
pydet_status layernorm_backward_held(const LayerNormBackward &);

// any/rmsnorm_backward.cu
bool rmsnorm_backward_held_takes(const RmsNormBackward &);
bool rmsnorm_backward_chain_prefers(const RmsNormBackward &);
pydet_status rmsnorm_backward_chain(const RmsNormBackward &);
pydet_status rmsnorm_backward_group(const RmsNormBackward &);
bool layernorm_backward_ring_takes(const LayerNormBackward &);
bool layernorm_backward_chain_prefers(const LayerNormBackward &);
pydet_status layernorm_backward_chain(const LayerNormBackward &);
pydet_status layernorm_backward_group(const LayerNormBackward &);

// nvidia/norm_backward_apart.cu
bool rmsnorm_backward_apart_takes(const RmsNormBackward &);
bool rmsnorm_backward_apart_prefers(const RmsNormBackward &);
pydet_status rmsnorm_backward_apart(const RmsNormBackward &);
bool layernorm_backward_apart_takes(const LayerNormBackward &);
bool layernorm_backward_apart_prefers(const LayerNormBackward &);
pydet_status layernorm_backward_apart(const LayerNormBackward &);

// nvidia/norm_backward_rows.cu
bool rmsnorm_backward_heads_takes(const RmsNormBackward &);
pydet_status rmsnorm_backward_heads(const RmsNormBackward &);
bool rmsnorm_backward_narrow_takes(const RmsNormBackward &);
bool rmsnorm_backward_narrow_prefers(const RmsNormBackward &);
pydet_status rmsnorm_backward_narrow(const RmsNormBackward &);
bool layernorm_backward_rows_takes(const LayerNormBackward &);
pydet_status layernorm_backward_rows(const LayerNormBackward &);
bool rmsnorm_backward_short_takes(const RmsNormBackward &);
bool rmsnorm_backward_short_chain_prefers(const RmsNormBackward &);
pydet_status rmsnorm_backward_short_chain(const RmsNormBackward &);

// nvidia/norm_elements.cu
bool rmsnorm_unaligned_takes(const RmsNorm &);
pydet_status rmsnorm_unaligned(const RmsNorm &);
bool layernorm_unaligned_takes(const LayerNorm &);
pydet_status layernorm_unaligned(const LayerNorm &);
bool rmsnorm_adjacent_takes(const RmsNorm &);
bool rmsnorm_adjacent_prefers(const RmsNorm &);
pydet_status rmsnorm_adjacent(const RmsNorm &);
bool layernorm_adjacent_takes(const LayerNorm &);
bool layernorm_adjacent_prefers(const LayerNorm &);
pydet_status layernorm_adjacent(const LayerNorm &);
bool rmsnorm_staged_takes(const RmsNorm &);
bool rmsnorm_staged_prefers(const RmsNorm &);
pydet_status rmsnorm_staged(const RmsNorm &);
bool layernorm_staged_takes(const LayerNorm &);
bool layernorm_staged_prefers(const LayerNorm &);
pydet_status layernorm_staged(const LayerNorm &);

// nvidia/norm_backward_elements.cu
bool rmsnorm_backward_strided_takes(const RmsNormBackward &);
bool rmsnorm_backward_strided_prefers(const RmsNormBackward &);
pydet_status rmsnorm_backward_strided(const RmsNormBackward &);
bool layernorm_backward_strided_takes(const LayerNormBackward &);
bool layernorm_backward_strided_prefers(const LayerNormBackward &);
pydet_status layernorm_backward_strided(const LayerNormBackward &);
bool rmsnorm_backward_staged_takes(const RmsNormBackward &);
bool rmsnorm_backward_staged_prefers(const RmsNormBackward &);
pydet_status rmsnorm_backward_staged(const RmsNormBackward &);
bool layernorm_backward_staged_takes(const LayerNormBackward &);
bool layernorm_backward_staged_prefers(const LayerNormBackward &);
pydet_status layernorm_backward_staged(const LayerNormBackward &);
bool rmsnorm_backward_unaligned_takes(const RmsNormBackward &);
pydet_status rmsnorm_backward_unaligned(const RmsNormBackward &);
bool layernorm_backward_unaligned_takes(const LayerNormBackward &);
bool layernorm_backward_unaligned_prefers(const LayerNormBackward &);
pydet_status layernorm_backward_unaligned(const LayerNormBackward &);

// any/softmax.cu
bool softmax_held_takes(const Softmax &);
pydet_status softmax_held(const Softmax &);
pydet_status softmax_long(const Softmax &);
bool softmax_backward_held_takes(const SoftmaxBackward &);
pydet_status softmax_backward_held(const SoftmaxBackward &);
pydet_status softmax_backward_long(const SoftmaxBackward &);

// any/head_rows.cu
pydet_status head_rows(const HeadRows &);

// any/head_loss.cu
pydet_status head_loss(const HeadLoss &);

// nvidia/head_rows_cluster.cu
bool head_rows_cluster_takes(const HeadRows &);
bool head_rows_cluster_prefers(const HeadRows &);
pydet_status head_rows_cluster(const HeadRows &);

// nvidia/softmax_staged.cu
bool softmax_staged_takes(const Softmax &);
bool softmax_staged_prefers(const Softmax &);
pydet_status softmax_staged(const Softmax &);
bool softmax_cluster_takes(const Softmax &);
bool softmax_cluster_prefers(const Softmax &);
pydet_status softmax_cluster(const Softmax &);
bool softmax_backward_staged_takes(const SoftmaxBackward &);
pydet_status softmax_backward_staged(const SoftmaxBackward &);
bool softmax_backward_cluster_takes(const SoftmaxBackward &);
bool softmax_backward_cluster_prefers(const SoftmaxBackward &);
pydet_status softmax_backward_cluster(const SoftmaxBackward &);

// nvidia/softmax_spread.cu
bool softmax_spread_takes(const Softmax &);
bool softmax_spread_prefers(const Softmax &);
pydet_status softmax_spread(const Softmax &);
bool softmax_backward_spread_takes(const SoftmaxBackward &);
bool softmax_backward_spread_prefers(const SoftmaxBackward &);
pydet_status softmax_backward_spread(const SoftmaxBackward &);

// nvidia/softmax_head.cu
bool softmax_head_takes(const Softmax &);
bool softmax_head_prefers(const Softmax &);
pydet_status softmax_head(const Softmax &);

// nvidia/softmax_strided.cu
bool softmax_strided_takes(const Softmax &);
bool softmax_strided_prefers(const Softmax &);
pydet_status softmax_strided(const Softmax &);
bool softmax_backward_strided_takes(const SoftmaxBackward &);
bool softmax_backward_strided_prefers(const SoftmaxBackward &);
pydet_status softmax_backward_strided(const SoftmaxBackward &);
bool softmax_backward_shifted_takes(const SoftmaxBackward &);
bool softmax_backward_shifted_prefers(const SoftmaxBackward &);
pydet_status softmax_backward_shifted(const SoftmaxBackward &);

// any/fold.cu
pydet_status fold(const Fold &);

// any/adamw.cu
bool adamw_takes(const AdamW &);
pydet_status adamw(const AdamW &);

// any/rounding.cu
pydet_status round_elements(const Rounding &);

// nvidia/fold_peers.cu
bool fold_awaited_takes(const Fold &);
bool fold_one_shot_takes(const Fold &);
bool fold_two_shot_takes(const Fold &);
bool fold_stream_takes(const Fold &);
bool fold_one_shot_prefers(const Fold &);
pydet_status fold_awaited(const Fold &);
pydet_status fold_one_shot(const Fold &);
pydet_status fold_two_shot(const Fold &);
pydet_status fold_stream(const Fold &);

// any/activation.cu
pydet_status activation(const Activation &);
pydet_status activation_backward(const ActivationBackward &);

// any/sample.cu
pydet_status sample(const Sample &);
pydet_status topk(const TopK &);

// nvidia/sample_spread.cu
bool sample_spread_takes(const Sample &);
bool sample_spread_prefers(const Sample &);
pydet_status sample_spread(const Sample &);
bool topk_spread_takes(const TopK &);
bool topk_spread_prefers(const TopK &);
pydet_status topk_spread(const TopK &);

// any/embedding.cu
pydet_status embedding(const Embedding &);
pydet_status embedding_backward(const EmbeddingBackward &);

// nvidia/scan.cu
bool selective_scan_takes(const SelectiveScan &);
pydet_status selective_scan(const SelectiveScan &);
pydet_status gated_delta(const GatedDelta &);

// nvidia/scan_step.cu
bool selective_step_takes(const SelectiveScan &);
bool selective_step_prefers(const SelectiveScan &);
pydet_status selective_step(const SelectiveScan &);
bool delta_step_takes(const GatedDelta &);
bool delta_step_prefers(const GatedDelta &);
pydet_status delta_step(const GatedDelta &);

// nvidia/scan_backward.cu
bool selective_scan_backward_takes(const SelectiveScanBackward &);
pydet_status selective_scan_backward(const SelectiveScanBackward &);
bool gated_delta_backward_takes(const GatedDeltaBackward &);
pydet_status gated_delta_backward(const GatedDeltaBackward &);

// nvidia/scan_conv.cu
pydet_status causal_conv1d(const CausalConv1d &);
pydet_status causal_conv1d_backward(const CausalConv1dBackward &);

// any/rotary.cu
pydet_status rotary_table(const RotaryTable &);
pydet_status rotary(const Rotary &);

// any/attention_ieee.cu, nvidia/attention_mma.cu
bool attention_ieee_takes(const Attention &);
pydet_status attention_ieee(const Attention &);
bool attention_mma_takes(const Attention &);
pydet_status attention_mma(const Attention &);
uint64_t attention_mma_workspace(const Attention &, const char *kernel);

// any/attention_backward_ieee.cu, nvidia/attention_backward_mma.cu
pydet_status attention_backward_ieee(const AttentionBackward &);
pydet_status attention_backward_mma(const AttentionBackward &);

}  // namespace pydet
