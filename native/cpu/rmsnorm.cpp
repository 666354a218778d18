// RMSNorm and its gradients, in fp32 (NUMERICS.md, "RMSNorm"). The bits are those of every other backend.
//
//   forward    x    = round(x + residual), stored in sum          only with a residual; in its type, or in fp32
//              rstd = 1 / sqrt(rowsum(x, x) / n + eps)
//              y    = round((x rstd) (w + weight_offset)), or round(fmaf(x rstd, w + weight_offset, bias))
//   backward   xhat = x rstd,   g = dy (w + weight_offset),   c = rowsum(g, xhat) / n
//              t    = fmaf(-xhat, c, g)
//              dx   = round(rstd t), or round(fmaf(rstd, t, dresidual))
//              dweight: p = fmaf(dy, xhat, p) from +0 down a chain of 16 rows; 4 chains added from +0 are a group, 4
//                       groups a block of 256 rows; the blocks added, from +0 or from dweight, and rounded once;
//                       with heads over the rows of each head; or the blocks apart. dbias sums dy alike
//   quantised  out = y / scale, clamped and rounded, scale of the largest |y| of a group or a row (fp8_rows.h)
//   rowsum     element j of (u, v) goes to lane j mod 2048, lane = fmaf(u, v, lane) from +0; then lane 8 g + e is
//              joined over e with partners 4, 2, 1 apart, then over g with partners 128, 64, ..., 1 apart
//
// A thread takes a few rows, and passes over each twice: the first pass reads it from memory into the lanes, the second
// from the cache, and asks for the next row meanwhile, since the processor foresees no jump back (10 to 30 % of the time
// of 4096 rows of 4096). The chains of dweight lie in the workspace until threads over columns join them.

#include <new>

#include "cpu/fp8_rows.h"
#include "cpu/norm_rows.h"

namespace pydet {
namespace {

// ---- Forward -----------------------------------------------------------------------------------------------------

// Row r's sum, where it has a residual, and its rstd. S: the type of residual and sum. With a residual the sum is what is
// normalised, else x, which has that type then.
template <class T, class S>
float rstd_of_row(const RmsNorm &problem, const RowPlace &at, int64_t r, const typename S::Stored *normed,
                  RowSum &lanes) {
  const int64_t n = problem.n;
  const auto *x = row<T>(problem.x, at);
  const auto *residual = row<S>(problem.residual, at);
  auto *sum = row<S>(problem.sum, at);

  lanes.clear(n);
  if (residual) {
    along(n, [&](int64_t j, auto v) {
      set<S>(sum + j, get<T>(x + j, v) + get<S>(residual + j, v));
      auto a = get<S>(sum + j, v);
      lanes.add(j, a, a);
    });
  } else {
    along(n, [&](int64_t j, auto v) {
      auto a = get<S>(normed + j, v);
      lanes.add(j, a, a);
    });
  }
  const float mean = joined(lanes, n) / float(n);
  const float rstd = 1.0f / sqrtf(mean + problem.eps);
  if (problem.rstd.data) ((float *)problem.rstd.data)[r] = pydet::canonical(rstd);
  return rstd;
}

template <class T, class S> const typename S::Stored *normed_row(const RmsNorm &problem, const RowPlace &at) {
  const auto *sum = row<S>(problem.sum, at);
  return sum ? sum : (const typename S::Stored *)row<T>(problem.x, at);
}

template <class T, class S, class W>
void normalize_row(const RmsNorm &problem, const W &weights, int64_t r, RowSum &lanes) {
  const Biases biases = {problem.bias};
  const RowPlace at = place_of(problem, r), after = place_of(problem, r + 1 < problem.rows ? r + 1 : r);
  const int64_t n = problem.n, first = r % problem.heads * n;  // of the weights
  const auto *normed = normed_row<T, S>(problem, at);
  auto *y = row<T>(problem.y, at);
  const float rstd = rstd_of_row<T, S>(problem, at, r, normed, lanes);
  const auto *next_x = row<T>(problem.x, after);
  const auto *next_residual = row<S>(problem.residual, after);
  along(n, [&](int64_t j, auto v) {
    prefetch(next_x, j);
    prefetch(next_residual, j);
    set<T>(y + j, biases.added(first + j, get<S>(normed + j, v) * all(rstd, v), weights.at(first + j, v)));
  });
}

// One row of y, group by group, and its q. A group that needs the scale of the row is made twice.
template <class T, class S, class W>
void quantize_row(const RmsNormQuantize &problem, const W &weights, int64_t r, RowSum &lanes) {
  const RowPlace at = place_of(problem, r);
  const auto *normed = normed_row<T, S>(problem, at);
  auto *y = row<T>(problem.y, at);
  const float rstd = rstd_of_row<T, S>(problem, at, r, normed, lanes);
  const float largest = largest_of(problem.out.type);
  auto *out = row<Fp8Bytes>(problem.out, at);
  const Matrix scale = {problem.scale.data, problem.scale.type, 0, 0, 0, 0};
  const int64_t scale_at = at.outer * problem.scale.outer_stride + at.inner * problem.scale.inner_stride;

  float values[kSide];
  // The rounded y from j on, of which there are `count`, and their largest magnitude.
  auto make = [&](int64_t j, int64_t count) {
    typename T::Stored rounded[kSide];
    along(count, [&](int64_t i, auto v) {
      set<T>(rounded + i, get<S>(normed + j + i, v) * all(rstd, v) * weights.at(j + i, v));
      set<Partial>(values + i, get<T>(rounded + i, v));
    });
    if (y) memcpy(y + j, rounded, size_t(count) * sizeof *rounded);
    uint32_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = larger(most, magnitude(values[i]));
    return most;
  };
  auto each_group = [&](const auto &f) {
    for (int64_t j = 0; j < problem.n; j += kSide) f(j, problem.n - j < kSide ? problem.n - j : int64_t(kSide));
  };
  float s = 0;
  if (problem.given()) {
    s = read_scale(scale, 0);
  } else if (problem.granularity == Granularity::row) {
    uint32_t most = 0;
    each_group([&](int64_t j, int64_t count) { most = larger(most, make(j, count)); });
    write_scale(scale, scale_at, s = scale_of(most, largest, problem.power_of_two));
  }
  each_group([&](int64_t j, int64_t count) {
    const uint32_t most = make(j, count);
    if (problem.granularity == Granularity::group)
      write_scale(scale, scale_at + j / kSide * problem.scale_stride,
                  s = scale_of(most, largest, problem.power_of_two));
    round_row(problem.out.type, values, int(count), nullptr, s, out + j, 1);
  });
}

// take(number of x, number of what is normalised, weights, r, lanes) of each row. passes: over a row, as over_rows has them.
template <class Problem, class F> void each_row(const Problem &problem, double passes, const F &take) {
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) {
    over_rows(problem, kRowElements / problem.n + 1, passes, scratch, [&](auto x, const auto &weights, auto block) {
      const bool wide = problem.residual.data && problem.residual.type != problem.x.type;
      for (int64_t r = block.first; r < block.end; ++r)
        wide ? take(x, Number<Type::f32>(), weights, r, block.lanes) : take(x, x, weights, r, block.lanes);
    });
  });
}

// ---- Backward ----------------------------------------------------------------------------------------------------

// Calls f with the number type of dy beside an x of type T: T, or any beside fp32.
template <class T, class F> void with_dy(Type type, const F &f) {
  if constexpr (std::is_same_v<T, Number<Type::f32>>) dispatch(type, f);
  else f(T{});
}

// One row: its dx, and its step in the chains of dweight and dbias, which are those of its head (or NULL). D: the type of
// dy, T that of all else.
template <class T, class D, class W>
void backward_row(const RmsNormBackward &problem, const W &weights, int64_t r, float *dweight, float *dbias,
                  RowSum &lanes) {
  const RowPlace at = place_of(problem, r), after = place_of(problem, r + 1 < problem.rows ? r + 1 : r);
  const int64_t n = problem.n, first = r % problem.heads * n;  // of the weights
  const auto *dy = row<D>(problem.dy, at);
  const auto *x = row<T>(problem.x, at);
  const auto *dresidual = row<T>(problem.dresidual, at);
  auto *dx = row<T>(problem.dx, at);
  const float rstd = ((const float *)problem.rstd.data)[r];

  if (dx) lanes.clear(n);
  along(n, [&](int64_t j, auto v) {
    auto d = get<D>(dy + j, v), xhat = get<T>(x + j, v) * all(rstd, v);
    if (dweight) set<Partial>(dweight + first + j, fma(d, xhat, get<Partial>(dweight + first + j, v)));
    if (dbias) set<Partial>(dbias + first + j, d + get<Partial>(dbias + first + j, v));
    if (dx) lanes.add(j, d * weights.at(first + j, v), xhat);
  });
  if (!dx) return;

  const float c = joined(lanes, n) / float(n);
  const auto *next_dy = row<D>(problem.dy, after);
  const auto *next_x = row<T>(problem.x, after);
  along(n, [&](int64_t j, auto v) {
    prefetch(next_dy, j);
    prefetch(next_x, j);
    auto g = get<D>(dy + j, v) * weights.at(first + j, v), xhat = get<T>(x + j, v) * all(rstd, v);
    auto t = fnma(xhat, all(c, v), g);
    set<T>(dx + j, dresidual ? fma(all(rstd, v), t, get<T>(dresidual + j, v)) : all(rstd, v) * t);
  });
}

}  // namespace

// ---- Launchers ---------------------------------------------------------------------------------------------------

template <> pydet_status rmsnorm<Isa>(const RmsNorm &problem) {
  each_row(problem, 1, [&](auto x, auto normed, const auto &weights, int64_t r, RowSum &lanes) {
    normalize_row<decltype(x), decltype(normed)>(problem, weights, r, lanes);
  });
  return PYDET_OK;
}

template <> pydet_status rmsnorm_quantize<Isa>(const RmsNormQuantize &problem) {
  each_row(problem, 3, [&](auto x, auto normed, const auto &weights, int64_t r, RowSum &lanes) {
    quantize_row<decltype(x), decltype(normed)>(problem, weights, r, lanes);
  });
  return PYDET_OK;
}

template <> pydet_status rmsnorm_backward<Isa>(const RmsNormBackward &problem) {
  const int64_t heads = problem.heads, columns = heads * problem.n;
  const int64_t chains = divide_up(problem.rows / heads, kDweightChainRows);
  const bool sums = problem.dweight.data || problem.dbias.data;
  const int64_t at_once = sums ? kDweightChainRows * heads : kRowElements / problem.n + 1;
  float *of_weight = (float *)problem.workspace, *of_bias = sums ? of_weight + chains * columns : nullptr;
  const JoinBlocks blocks = problem.block_sums   ? JoinBlocks::apart
                            : problem.accumulate ? JoinBlocks::from_result
                                                 : JoinBlocks::from_zero;
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) {
    over_rows(problem, at_once, 2, scratch, [&](auto number, const auto &weights, auto block) {
      float *dweight = problem.dweight.data ? of_weight + block.index * columns : nullptr;
      float *dbias = problem.dbias.data ? of_bias + block.index * columns : nullptr;
      if (dweight) memset(dweight, 0, size_t(columns) * sizeof(float));
      if (dbias) memset(dbias, 0, size_t(columns) * sizeof(float));
      with_dy<decltype(number)>(problem.dy.type, [&](auto gradient) {
        for (int64_t r = block.first; r < block.end; ++r)
          backward_row<decltype(number), decltype(gradient)>(problem, weights, r, dweight, dbias, block.lanes);
      });
    });
    if (problem.dweight.data) join_chains(of_weight, chains, columns, problem.dweight, blocks, scratch);
    if (problem.dbias.data) join_chains(of_bias, chains, columns, problem.dbias, blocks, scratch);
  });
  return PYDET_OK;
}

}  // namespace pydet
