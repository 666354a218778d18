// How a problem of attention is shared out on Hopper: what the kernels are told of it.
//
// A job is a tile of rows of one sequence and one of its heads, or, where queries are few, of all heads that share keys
// (`pack` of them). Split, a job has one segment of the keys, and combine.cu joins what they leave in the workspace.
#pragma once

#include <cuda.h>

#include "ops/attention/formulas.h"

namespace pydet {

struct Launch;  // gpu/gpu.h
class Choice;   // kernel.h

constexpr int kAttentionWarpgroupRows = 64;  // of a tile, that one warpgroup has
// Blocks that have an O in the workspace, and as much again for a segment's o, each as large as two warpgroups'
// accumulators.
constexpr int kRunningBlocks = 132, kRunningBytes = 2 * kAttentionWarpgroupRows * 256 * int(sizeof(float));

// Of spread.cu: rows and keys that a cluster has, keys of a box, columns of a block of it; and its blocks.
constexpr int kSpreadRows = 8, kSpreadKeys = 1024, kSpreadBox = 64, kSpreadColumns = 32;
constexpr int spread_parts(int d) { return (d <= 64 ? 64 : d <= 128 ? 128 : 256) / kSpreadColumns; }

// The variants of the kernel, which are rows of the table: tiles of several warpgroups or of one, whole or split.
enum AttentionVariant : int { kAttentionWide, kAttentionFew, kAttentionWideSplit, kAttentionFewSplit };
constexpr const char *kAttentionNames[] = {"cuda_attention_sm90_wide", "cuda_attention_sm90_few",
                                           "cuda_attention_sm90_wide_split", "cuda_attention_sm90_few_split"};

struct AttentionPlan {
  CUtensorMap q, k, v;
  int sequences, queries, keys;  // of each sequence; of the pack, or at most, where `uniform` is false
  int heads, group_heads;        // of q; of them for each of k
  int d, e;
  const int32_t *q_start, *k_start, *k_length, *first_key, *pages;
  int64_t pages_stride;
  int page_size, page_count, box_keys;  // keys of one box of k and v: all of a block, or those of a page
  bool sequence_moves_q, sequence_moves_k, group_moves_k, sequence_moves_v,
      group_moves_v;  // else all have one place in the map

  int pack, job_heads;                 // heads of a job; jobs of a sequence's rows
  int warpgroup_queries, job_queries;  // of a warpgroup's rows, of a tile
  int segment_blocks, segment_keys;
  bool uniform;         // lengths are the host's
  int section;          // jobs of a unit that stand together, of `sequences` times `job_heads`, where they are
  bool in_turn;         // else, and not split: jobs that see about as many keys stand together, of them a sequence's;
  int most_size;        // 2^most_size keys are as many as any
  int held, most_held;  // sections of so many keys of all groups, of sequences of up to so many in a group
  bool halves;          // always: known to ptxas it leaves too few registers for one loop's products
  bool split;
  bool one_segment;  // has all keys of a job
  bool folds_later;  // at d = 256: beside later blocks, and warpgroups take no turns

  int left, right;  // keys that a query sees before and after its own place
  float c;          // scale log2 e

  // For what is done again, row by row (row.h), and for results. Strides in elements.
  Heads in_q, in_k, in_v, out, lse;

  float *running;         // of long keys where shared memory has no room: O of each tile in work
  float *part_o, *parts;  // split: e of o, and m and l, of each segment of each row
  int64_t part_count;     // rows: tokens times heads

  int *taken;     // blocks take their jobs from one count: how many are taken beside each block's first; NULL: in turns
  int *followed;  // by which job's number, in its block, of `numbers` jobs at most
  int numbers;
  int sharers;  // blocks of a cluster, which have the jobs' heads one after another
};

template <Type type>
pydet_status attention_forward_sm90(const Launch &launch, const AttentionPlan &plan, bool wide);
template <Type type>
pydet_status attention_load_sm90(const char *name, const AttentionPlan &plan, bool wide);  // its kernel
template <Type type>
pydet_status attention_decode_sm90(const Launch &launch, const AttentionPlan &plan);
template <Type type>
pydet_status attention_spread_sm90(const Launch &launch, const AttentionPlan &plan);
pydet_status attention_clear_sm90(const Launch &launch, const AttentionPlan &plan);  // `taken`
template <Type type>
pydet_status attention_combine_sm90(const Launch &launch, const AttentionPlan &plan);

}  // namespace pydet
