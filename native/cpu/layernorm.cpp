// LayerNorm and its gradients, in fp32 (NUMERICS.md, "LayerNorm"). The bits are those of every other backend.
//
//   forward    x    = round(x + residual), stored in sum          only with a residual
//              mean = rowsum(x, 1) / n,   d = x - mean,   rstd = 1 / sqrt(rowsum(d, d) / n + eps)
//              y    = round(fmaf(d rstd, w + weight_offset, bias)), or round((d rstd) (w + weight_offset))
//   backward   xhat = (x - mean) rstd,   g = dy (w + weight_offset)
//              a    = rowsum(g, 1) / n,   c = rowsum(g, xhat) / n,   t = fmaf(-xhat, c, g) - a
//              dx   = round(rstd t), or round(fmaf(rstd, t, dresidual))
//              dweight and dbias: sums over rows of dy xhat and of dy, in chains of 16 rows as dweight of RMSNorm
//
// A thread takes a few rows, and passes over each three times, from memory, then from the cache: the least memory that a
// call makes do with has the lanes of one sum. The chains lie in the workspace, those of dweight before those of dbias,
// until threads over columns join them.

#include "cpu/norm_rows.h"

namespace pydet {
namespace {

// x - mean: a sum with the negative, which is the same number.
template <class V> V centred(V x, float mean) { return x + all(-mean, V{}); }

// ---- Forward -----------------------------------------------------------------------------------------------------

template <class T, class W>
void normalize_row(const LayerNorm &problem, const W &weights, int64_t r, RowSum &lanes) {
  const Biases biases = {problem.bias};
  const int64_t n = problem.n, inner = problem.inner, next = r + 1 < problem.rows ? r + 1 : r;
  const auto *x = row<T>(problem.x, inner, r);
  const auto *residual = row<T>(problem.residual, inner, r);
  auto *sum = row<T>(problem.sum, inner, r);
  auto *y = row<T>(problem.y, inner, r);

  lanes.clear(n);
  if (residual) {
    along(n, [&](int64_t j, auto v) {
      set<T>(sum + j, get<T>(x + j, v) + get<T>(residual + j, v));
      lanes.add(j, get<T>(sum + j, v), all(1.0f, v));
    });
    x = sum;
  } else {
    along(n, [&](int64_t j, auto v) { lanes.add(j, get<T>(x + j, v), all(1.0f, v)); });
  }
  const float mean = joined(lanes, n) / float(n);

  lanes.clear(n);
  along(n, [&](int64_t j, auto v) {
    auto d = centred(get<T>(x + j, v), mean);
    lanes.add(j, d, d);
  });
  const float rstd = 1.0f / sqrtf(joined(lanes, n) / float(n) + problem.eps);
  if (problem.mean.data) ((float *)problem.mean.data)[r] = pydet::canonical(mean);
  if (problem.rstd.data) ((float *)problem.rstd.data)[r] = pydet::canonical(rstd);

  const auto *next_x = row<T>(problem.x, inner, next), *next_residual = row<T>(problem.residual, inner, next);
  along(n, [&](int64_t j, auto v) {
    prefetch(next_x, j);
    prefetch(next_residual, j);
    set<T>(y + j, biases.added(j, centred(get<T>(x + j, v), mean) * all(rstd, v), weights.at(j, v)));
  });
}

// ---- Backward ----------------------------------------------------------------------------------------------------

// One row: its dx, and its step in each column's chains of dweight and of dbias (n of each, or NULL).
template <class T, class W>
void backward_row(const LayerNormBackward &problem, const W &weights, int64_t r, float *dweight, float *dbias,
                  RowSum &lanes) {
  const int64_t n = problem.n, inner = problem.inner, next = r + 1 < problem.rows ? r + 1 : r;
  const auto *dy = row<T>(problem.dy, inner, r);
  const auto *x = row<T>(problem.x, inner, r);
  const auto *dresidual = row<T>(problem.dresidual, inner, r);
  auto *dx = row<T>(problem.dx, inner, r);
  const float mean = ((const float *)problem.mean.data)[r], rstd = ((const float *)problem.rstd.data)[r];

  if (dx) lanes.clear(n);
  along(n, [&](int64_t j, auto v) {
    auto d = get<T>(dy + j, v), xhat = centred(get<T>(x + j, v), mean) * all(rstd, v);
    if (dweight) set<Partial>(dweight + j, fma(d, xhat, get<Partial>(dweight + j, v)));
    if (dbias) set<Partial>(dbias + j, d + get<Partial>(dbias + j, v));
    if (dx) lanes.add(j, d * weights.at(j, v), xhat);
  });
  if (!dx) return;
  const float c = joined(lanes, n) / float(n);

  lanes.clear(n);
  along(n, [&](int64_t j, auto v) { lanes.add(j, get<T>(dy + j, v) * weights.at(j, v), all(1.0f, v)); });
  const float a = joined(lanes, n) / float(n);
  const auto *next_dy = row<T>(problem.dy, inner, next), *next_x = row<T>(problem.x, inner, next);
  along(n, [&](int64_t j, auto v) {
    prefetch(next_dy, j);
    prefetch(next_x, j);
    auto g = get<T>(dy + j, v) * weights.at(j, v), xhat = centred(get<T>(x + j, v), mean) * all(rstd, v);
    auto t = centred(fnma(xhat, all(c, v), g), a);
    set<T>(dx + j, dresidual ? fma(all(rstd, v), t, get<T>(dresidual + j, v)) : all(rstd, v) * t);
  });
}

}  // namespace

// ---- Launchers ---------------------------------------------------------------------------------------------------

template <> pydet_status layernorm<Isa>(const LayerNorm &problem) {
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) {
    over_rows(problem, kRowElements / problem.n + 1, 1, scratch, [&](auto number, const auto &weights, auto block) {
      for (int64_t r = block.first; r < block.end; ++r)
        normalize_row<decltype(number)>(problem, weights, r, block.lanes);
    });
  });
  return PYDET_OK;
}

template <> pydet_status layernorm_backward<Isa>(const LayerNormBackward &problem) {
  const int64_t n = problem.n, chains = divide_up(problem.rows, kDweightChainRows);
  const bool sums = problem.dweight.data || problem.dbias.data;
  const int64_t at_once = sums ? kDweightChainRows : kRowElements / n + 1;
  float *of_weight = (float *)problem.workspace, *of_bias = sums ? of_weight + chains * n : nullptr;
  const JoinBlocks blocks = problem.accumulate ? JoinBlocks::from_result : JoinBlocks::from_zero;
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) {
    over_rows(problem, at_once, 2, scratch, [&](auto number, const auto &weights, auto block) {
      float *dweight = problem.dweight.data ? of_weight + block.index * n : nullptr;
      float *dbias = problem.dbias.data ? of_bias + block.index * n : nullptr;
      if (dweight) memset(dweight, 0, size_t(n) * sizeof(float));
      if (dbias) memset(dbias, 0, size_t(n) * sizeof(float));
      for (int64_t r = block.first; r < block.end; ++r)
        backward_row<decltype(number)>(problem, weights, r, dweight, dbias, block.lanes);
    });
    if (problem.dweight.data) join_chains(of_weight, chains, n, problem.dweight, blocks, scratch);
    if (problem.dbias.data) join_chains(of_bias, chains, n, problem.dbias, blocks, scratch);
  });
  return PYDET_OK;
}

}  // namespace pydet
