// Products of groups whose sums begin at a tensor of their own: what is done before and after the product, which
// computes under accumulate, in out if that is fp32, else in the workspace.
#pragma once

#include "ops/gemm/initial.h"
#include "ops/grouped/problem.h"

namespace pydet {

// The product's fields and its result's. Rows that are in no group have no part in the passes either.
struct GroupedSteps {
  Matrix from, bias, out;
  int64_t bias_stride, out_stride;  // from group to group
  bool depth, ends;                 // ends: else the sums are the result

  template <class Problem> Rounding pass(const Problem &sums) const {
    Rounding made = {};
    made.device = sums.device, made.stream = sums.stream;
    made.m = sums.m, made.n = sums.n;
    made.batch.count = 1;
    if (depth) {
      made.batch.dims = 1;
      made.batch.count = made.batch.shape[0] = sums.groups;
    } else {
      made.groups = {sums.groups, sums.tokens, sums.start, sums.end, bias_stride};
    }
    return made;
  }
  template <class Problem> Rounding before(const Problem &sums) const {
    Rounding made = pass(sums);
    made.from = from, made.to = sums.out;
    made.batch.a[0] = sums.m * sums.n, made.batch.out[0] = sums_stride(sums);
    return upright(made);
  }
  template <class Problem> Rounding after(const Problem &sums) const {
    Rounding made = pass(sums);
    made.from = sums.out, made.bias = bias, made.to = out;
    made.batch.a[0] = sums_stride(sums), made.batch.bias[0] = bias_stride, made.batch.out[0] = out_stride;
    return upright(made);
  }

 private:
  template <class Problem> int64_t sums_stride(const Problem &sums) const {
    if constexpr (std::is_base_of_v<Gemm, Problem>) return sums.out_stride;
    return 0;
  }
};

// The boundaries are read after the workspace has been written.
template <class Options, class Problem>
pydet_status boundaries_apart(const char *op, const Problem &p, const Options &options) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(options.workspace);
  const auto shares = [&](const int32_t *boundary) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(boundary);
    return boundary && options.workspace && at < begin + options.workspace_size &&
           begin < at + uintptr_t(p.groups) * sizeof *boundary;
  };
  const char *name = shares(p.start) ? "group_start" : shares(p.end) ? "group_end" : nullptr;
  return name ? fail(PYDET_OVERLAP, "%s: workspace shares memory with %s, want it apart", op, name) : PYDET_OK;
}

// options.initial, and `problem`, which has been checked but for its sums, as what computes them.
template <class Options, class Problem>
pydet_status start_groups_from(const char *op, const View &initial, const Options &options, Problem *problem,
                               GroupedSteps *steps) {
  constexpr bool kHasDepth = std::is_base_of_v<Gemm, Problem>;
  Problem &p = *problem;
  PYDET_TRY(boundaries_apart(op, p, options));
  steps->from = {initial.data, Type::f32, p.m, p.n, p.n, 1};
  steps->bias = p.bias, steps->out = p.out;
  steps->bias_stride = p.bias_stride;
  if constexpr (kHasDepth) steps->depth = p.depth, steps->out_stride = p.out_stride;
  const bool in_place = p.out.type == Type::f32;
  steps->ends = !in_place || p.bias.data;
  p.bias = {}, p.bias_stride = 0;
  p.accumulate = true;
  if (in_place) return PYDET_OK;
  uint64_t bytes = 0;
  PYDET_TRY(bytes_of_sums(op, steps->depth ? p.groups : 1, p.m, p.n, &bytes));
  if (options.workspace_size < bytes)
    return fail(PYDET_WORKSPACE_TOO_SMALL,
                "%s: workspace_size is %" PRIu64 ", want %" PRIu64 " for the sums of a %s out", op,
                options.workspace_size, bytes, type_name(p.out.type));
  p.out = {static_cast<char *>(options.workspace), Type::f32, p.m, p.n, p.n, 1};
  if constexpr (kHasDepth)
    if (p.depth) p.out_stride = p.m * p.n;
  return PYDET_OK;
}

}  // namespace pydet
