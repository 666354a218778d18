// How the gradients of attention are shared out on Hopper: what the kernels are told.
//
// Three launches. backward_rows.cu makes of lse, out and dout the two numbers that a row's weights and gradients of scores
// are made with. backward_keys.cu has tiles of keys, walks the queries that see them, upward, and makes dk and dv.
// backward_queries.cu has tiles of queries of one head, walks the keys that they see, downward, and makes dq; its blocks
// begin as those of keys end. Blocks take tiles from counts in the workspace, in an order; no block waits for another.
// In place of those two backward_fused.cu, as backward_keys.cu and dq with it.
#pragma once

#include "gpu/nvidia/sm90/attention/plan.h"

namespace pydet {

constexpr const char *kAttentionBackwardName = "cuda_attention_backward_sm90";
constexpr const char *kAttentionBackwardFusedName = "cuda_attention_backward_sm90_fused";

// How backward_keys.cu cuts keys of d <= 128: into tiles of 128, or 64, or those where two blocks have a tile, and half of
// its gradients' columns each. By name, too; else the host chooses.
enum KeysCut : int { kWideKeys, kNarrowKeys, kHalvedKeys };
constexpr const char *kKeysCutNames[] = {"cuda_attention_backward_sm90_wide", "cuda_attention_backward_sm90_narrow",
                                         "cuda_attention_backward_sm90_halved"};

constexpr int kBackwardTile = 128;                     // keys, or queries, of a block: two warpgroups of 64
constexpr int kBackwardQueries = 64;                   // that a block of keys looks at in a step
constexpr int kRowPieceFloats = 2 * kBackwardQueries;  // of so many rows: of each lse in twos, then delta times scale
constexpr int kRowPieceBytes = kRowPieceFloats * 4;
constexpr int kFusedKeys = 128;  // of a tile of backward_fused.cu: a block of the order of dq

struct AttentionBackwardPlan {
  AttentionPlan a;  // the forward's operands; maps of q, k, v in boxes of 64 or 128 tokens
  CUtensorMap dout;
  CUtensorMap own_k, own_v;  // in boxes of the keys of backward_keys.cu's tiles
  Heads in_dout;
  Heads dq, dk, dv;
  float scale;
  bool accumulate;
  KeysCut cut;       // of d <= 128
  bool behind_keys;  // backward_queries.cu runs behind backward_keys.cu
  bool sequence_moves_dout, head_moves_q, head_moves_dout;
  int row_tiles;  // of kBackwardTile rows, that the rows of a head take: of a sequence, or of a pack
  float *rows;    // of each head of each sequence, or of a pack, so many tiles of two pieces each

  int key_blocks, query_blocks;    // of backward_keys.cu and backward_queries.cu
  int key_numbers, query_numbers;  // of their tiles, at most: of keys in all parts, of 128 queries of all heads
  // Of backward_fused.cu, and `taken` of those: so many are made 0 beforehand, from `words` on.
  int64_t zeros;
  int *words;   // of each piece of `rows`: the keys that have been added to its dq last
  int *said;    // of each section: whether its first keys come first
  int *taken;   // tiles that blocks have begun; of queries, and of keys
  int *begun;   // blocks
  float *sums;  // dq so far, of each piece of `rows`
  int numbers;  // of tiles of keys
  int blocks;
  int section;  // pairs of sequence and group side by side
  bool may_ascend;
};

// Rows of the table of their own.
bool attention_backward_cut_takes(const AttentionBackward &);
template <KeysCut cut> pydet_status attention_backward_cut(const AttentionBackward &);
bool attention_backward_fused_takes(const AttentionBackward &);
bool attention_backward_by_name(const AttentionBackward &);
pydet_status attention_backward_fused(const AttentionBackward &);

template <Type type> pydet_status attention_backward_rows(const Launch &launch, const AttentionBackwardPlan &plan);
template <Type type> pydet_status attention_backward_keys(const Launch &launch, const AttentionBackwardPlan &plan);
template <Type type> pydet_status attention_backward_queries(const Launch &launch, const AttentionBackwardPlan &plan);
template <Type type> pydet_status attention_backward_fused(const Launch &launch, const AttentionBackwardPlan &plan);
// Before another kernel has written anything.
template <Type type> pydet_status load_attention_backward_keys(const char *name, const AttentionBackwardPlan &plan);
template <Type type> pydet_status load_attention_backward_queries(const char *name, const AttentionBackwardPlan &plan);
template <Type type> pydet_status load_attention_backward_fused(const char *name, const AttentionBackwardPlan &plan);

}  // namespace pydet
