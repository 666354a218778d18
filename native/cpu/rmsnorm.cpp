// RMSNorm and its gradients, in fp32 (NUMERICS.md, "RMSNorm"). The bits are those of every other backend.
//
//   forward    x    = round(x + residual), stored in sum          only with a residual
//              rstd = 1 / sqrt(rowsum(x, x) / n + eps)
//              y    = round((x rstd) (w + weight_offset))
//   backward   xhat = x rstd,   g = dy (w + weight_offset),   c = rowsum(g, xhat) / n
//              t    = fmaf(-xhat, c, g)
//              dx   = round(rstd t), or round(fmaf(rstd, t, dresidual))
//              dweight: p = fmaf(dy, xhat, p) from +0 down a chain of 16 rows; 4 chains added from +0 are a group, 4
//                       groups a block of 256 rows; the blocks added, from +0 or from dweight, and rounded once
//   rowsum     element j of (u, v) goes to lane j mod 2048, lane = fmaf(u, v, lane) from +0; then lane 8 g + e is
//              joined over e with partners 4, 2, 1 apart, then over g with partners 128, 64, ..., 1 apart
//
// A thread takes a few rows, and passes over each twice: the first pass reads it from memory into the lanes, the second
// from the cache, and asks for the next row meanwhile, since the processor foresees no jump back (10 to 30 % of the time
// of 4096 rows of 4096). The chains of dweight lie in the workspace until threads over columns join them.

#include <new>

#include "cpu/norm_rows.h"

namespace pydet {
namespace {

// ---- Forward -----------------------------------------------------------------------------------------------------

template <class T, class W> void normalize_row(const RmsNorm &problem, const W &weights, int64_t r, RowSum &lanes) {
  const int64_t n = problem.n, inner = problem.inner, next = r + 1 < problem.rows ? r + 1 : r;
  const auto *x = row<T>(problem.x, inner, r);
  const auto *residual = row<T>(problem.residual, inner, r);
  auto *sum = row<T>(problem.sum, inner, r);
  auto *y = row<T>(problem.y, inner, r);

  lanes.clear(n);
  if (residual) {
    along(n, [&](int64_t j, auto v) {
      set<T>(sum + j, get<T>(x + j, v) + get<T>(residual + j, v));
      auto a = get<T>(sum + j, v);
      lanes.add(j, a, a);
    });
    x = sum;
  } else {
    along(n, [&](int64_t j, auto v) {
      auto a = get<T>(x + j, v);
      lanes.add(j, a, a);
    });
  }

  const float mean = lanes.joined(n) / float(n);
  const float rstd = 1.0f / sqrtf(mean + problem.eps);
  if (problem.rstd.data) ((float *)problem.rstd.data)[r] = pydet::canonical(rstd);
  const auto *next_x = row<T>(problem.x, inner, next), *next_residual = row<T>(problem.residual, inner, next);
  along(n, [&](int64_t j, auto v) {
    prefetch(next_x, j);
    prefetch(next_residual, j);
    set<T>(y + j, get<T>(x + j, v) * all(rstd, v) * weights.at(j, v));
  });
}

// ---- Backward ----------------------------------------------------------------------------------------------------

// One row: its dx, and its step in each column's chain (n of them, or NULL).
template <class T, class W>
void backward_row(const RmsNormBackward &problem, const W &weights, int64_t r, float *chain, RowSum &lanes) {
  const int64_t n = problem.n, inner = problem.inner, next = r + 1 < problem.rows ? r + 1 : r;
  const auto *dy = row<T>(problem.dy, inner, r);
  const auto *x = row<T>(problem.x, inner, r);
  const auto *dresidual = row<T>(problem.dresidual, inner, r);
  auto *dx = row<T>(problem.dx, inner, r);
  const float rstd = ((const float *)problem.rstd.data)[r];

  if (dx) lanes.clear(n);
  along(n, [&](int64_t j, auto v) {
    auto d = get<T>(dy + j, v), xhat = get<T>(x + j, v) * all(rstd, v);
    if (chain) set<Partial>(chain + j, fma(d, xhat, get<Partial>(chain + j, v)));
    if (dx) lanes.add(j, d * weights.at(j, v), xhat);
  });
  if (!dx) return;

  const float c = lanes.joined(n) / float(n);
  const auto *next_dy = row<T>(problem.dy, inner, next), *next_x = row<T>(problem.x, inner, next);
  along(n, [&](int64_t j, auto v) {
    prefetch(next_dy, j);
    prefetch(next_x, j);
    auto g = get<T>(dy + j, v) * weights.at(j, v), xhat = get<T>(x + j, v) * all(rstd, v);
    auto t = fnma(xhat, all(c, v), g);
    set<T>(dx + j, dresidual ? fma(all(rstd, v), t, get<T>(dresidual + j, v)) : all(rstd, v) * t);
  });
}

}  // namespace

// ---- Launchers ---------------------------------------------------------------------------------------------------

template <> pydet_status rmsnorm<Isa>(const RmsNorm &problem) {
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) {
    over_rows(problem, kRowElements / problem.n + 1, 1, scratch, [&](auto number, const auto &weights, auto block) {
      for (int64_t r = block.first; r < block.end; ++r)
        normalize_row<decltype(number)>(problem, weights, r, block.lanes);
    });
  });
  return PYDET_OK;
}

template <> pydet_status rmsnorm_backward<Isa>(const RmsNormBackward &problem) {
  const int64_t n = problem.n, chains = divide_up(problem.rows, kDweightChainRows);
  const bool dweight = problem.dweight.data;
  const int64_t at_once = dweight ? kDweightChainRows : kRowElements / n + 1;
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) {
    over_rows(problem, at_once, 2, scratch, [&](auto number, const auto &weights, auto block) {
      float *chain = dweight ? (float *)problem.workspace + block.index * n : nullptr;
      if (chain) memset(chain, 0, size_t(n) * sizeof(float));
      for (int64_t r = block.first; r < block.end; ++r)
        backward_row<decltype(number)>(problem, weights, r, chain, block.lanes);
    });
    if (!dweight) return;
    join_chains((const float *)problem.workspace, chains, n, problem.dweight, problem.accumulate, scratch);
  });
  return PYDET_OK;
}

}  // namespace pydet
