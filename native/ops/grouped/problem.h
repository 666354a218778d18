// Products of groups of tokens, whose boundaries the device alone knows: what a checked call asks for, and how every
// backend walks the groups (NUMERICS.md, "Grouped GEMM").
#pragma once

#include "ops/gemm/problem.h"

namespace pydet {

// Rows:   out[t, :] = round(chain_k(a[t, k], b[g][k, :]) + bias[g, :])             for the tokens t of group g
// Depth:  out[g]    = round(chain over the tokens t of group g of a[:, t], b[t, :] + bias[g, :]), from its first token
// As a Gemm it is the product of a group that has all tokens: m (rows) or k (depth) is `tokens`, and b and bias (rows) or
// bias and out (depth) are those of group 0. It has no batch. Its out has a unit stride on either side.
struct GroupedGemm : Gemm {
  bool depth;
  int64_t groups, tokens;
  const int32_t *start, *end;                 // on the device; start NULL: the end before
  int64_t b_stride, bias_stride, out_stride;  // from group to group, in elements

  uint64_t needs() const {
    return Gemm::needs() | when(depth, kDepth) | when(out.col_stride != 1 && n > 1, kOutAlongM);
  }
};

template <> struct Operation<GroupedGemm> : AsAsked {
  static constexpr const char *name = "grouped_gemm";
  static Type input(const GroupedGemm &g) { return g.a.type; }
  template <class Show> static void memory(const GroupedGemm &g, Show show) {
    show(g.a.data, g.b.data, g.bias.data, g.out.data, g.start, g.end);
  }
  using Functions = FunctionList<pydet_grouped_gemm>;
  static Items<pydet_exchange_method> python();
  static Items<pydet_xla_handler> xla();
};

constexpr uint64_t kGroupedGemmFeatures =
    kBias | kAccumulate | kChunks | kAlongM | kAlongN | kOutAlongM | kDepth;  // all

// The groups in turn, group `index` with the tokens [first, last). Whatever the boundaries hold, the groups' tokens are
// apart, ascending and in [0, tokens).
struct GroupWalk {
  int64_t index = -1, first = 0, last = 0;
  int64_t reached = 0;  // where the latest group with tokens ended

  // Of a problem that has `tokens`, `start` and `end`.
  template <class Problem> PYDET_INLINE void next(const Problem &problem) {
    ++index;
    const int64_t start = problem.start ? problem.start[index] : 0, end = problem.end[index];
    first = start < reached ? reached : start < problem.tokens ? start : problem.tokens;
    last = end < first ? first : end < problem.tokens ? end : problem.tokens;
    if (last > first) reached = last;
  }
};

// Where a group's operands begin, in elements.
PYDET_HD BatchOffsets group_offsets(const GroupedGemm &problem, const GroupWalk &group) {
  if (problem.depth)
    return {group.first * problem.a.col_stride, group.first * problem.b.row_stride, group.index * problem.bias_stride,
            group.index * problem.out_stride};
  return {group.first * problem.a.row_stride, group.index * problem.b_stride, group.index * problem.bias_stride,
          group.first * problem.out.row_stride};
}

}  // namespace pydet
