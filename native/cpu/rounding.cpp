// A pass over the elements of a product (ops/gemm/rounding.h): to = round(from + bias), row by row.

#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "ops/gemm/rounding.h"
#include "ops/grouped/problem.h"

namespace pydet {
namespace {

struct NoBias {
  using Stored = char;
};

// `length` elements of a row.
template <class T, class B>
void round_row(const float *from, int64_t from_stride, [[maybe_unused]] const typename B::Stored *bias,
               [[maybe_unused]] int64_t bias_stride, typename T::Stored *to, int64_t length) {
  constexpr bool kHasBias = !std::is_same_v<B, NoBias>;
  if (from_stride != 1 || (kHasBias && bias_stride != 1)) {  // some at a time become adjacent
    constexpr int64_t kAtOnce = 64;
    for (int64_t j = 0; j < length; j += kAtOnce) {
      const int64_t count = length - j < kAtOnce ? length - j : kAtOnce;
      float x[kAtOnce];
      typename B::Stored b[kAtOnce];
      for (int64_t i = 0; i < count; ++i) x[i] = from[(j + i) * from_stride];
      if constexpr (kHasBias)
        for (int64_t i = 0; i < count; ++i) b[i] = bias[(j + i) * bias_stride];
      round_row<T, B>(x, 1, b, 1, to + j, count);
    }
    return;
  }
  along(length, [&](int64_t j, auto v) {
    auto x = get<Partial>(from + j, v);
    if constexpr (kHasBias) x = x + get<B>(bias + j, v);
    set<T>(to + j, x);
  });
}

// Elements [begin, end), counted along the rows of the whole batch.
template <class T, class B> void round_range(const Rounding &p, int64_t begin, int64_t end) {
  const auto *from = (const float *)p.from.data;
  const auto *bias = (const typename B::Stored *)p.bias.data;
  auto *to = (typename T::Stored *)p.to.data;
  while (begin < end) {
    const int64_t row = begin / p.n, n = begin % p.n, m = row % p.m;
    const int64_t length = p.n - n < end - begin ? p.n - n : end - begin;
    const BatchOffsets at = batch_offsets(p.batch, row / p.m);
    const int64_t of_bias = at.bias + m * p.bias.row_stride + n * p.bias.col_stride;
    round_row<T, B>(from + at.a + m * p.from.row_stride + n * p.from.col_stride, p.from.col_stride,
                    bias ? bias + of_bias : nullptr, p.bias.col_stride, to + at.out + m * p.to.row_stride + n, length);
    begin += length;
  }
}

// round(rows) for those of each group in turn, with its bias.
template <class F> pydet_status each_group(const Rounding &problem, F round) {
  struct {
    int64_t tokens;
    const int32_t *start, *end;
  } const groups = {problem.groups.tokens, problem.groups.start, problem.groups.end};
  GroupWalk group;
  pydet_status status = PYDET_OK;
  for (int64_t i = 0; i < problem.groups.count && status == PYDET_OK; ++i) {
    group.next(groups);
    Rounding one = problem;
    one.groups = {};
    one.m = group.last - group.first;
    if (one.m == 0) continue;
    const auto skip = [](Matrix &matrix, int64_t elements) { matrix.data += elements * size_of(matrix.type); };
    skip(one.from, group.first * one.from.row_stride);
    skip(one.to, group.first * one.to.row_stride);
    if (one.bias.data) skip(one.bias, group.index * problem.groups.bias_stride);
    status = round(upright(one));
  }
  return status;
}

}  // namespace

template <> pydet_status round_elements<Isa>(const Rounding &problem) {
  if (problem.groups.end) return each_group(problem, round_elements<Isa>);
  constexpr int64_t kPiece = 8192;    // elements that a task takes
  constexpr double kWorth = 1 << 16;  // elements for which a thread is worth waking
  Scratch scratch;                    // not worked in: where there is none, one thread computes
  const int64_t size = problem.batch.count * problem.m * problem.n;
  auto pieces = [&](auto to, auto bias) {
    parallel(divide_up(size, kPiece), threads_for(double(size), kWorth), scratch, [&](int64_t i, Scratch &) {
      const int64_t end = size - i * kPiece < kPiece ? size : (i + 1) * kPiece;
      round_range<decltype(to), decltype(bias)>(problem, i * kPiece, end);
    });
  };
  dispatch(problem.to.type, [&](auto to) {
    if (!problem.bias.data) return pieces(to, NoBias{});
    dispatch(problem.bias.type, [&](auto bias) { pieces(to, bias); });
  });
  return PYDET_OK;
}

}  // namespace pydet
