// The sum of partial sums, element by element in fp32 (NUMERICS.md, "Fold"). The bits are those of every other backend.
//
//   out = round(D + bias),   D = D0 + s_0 + s_1 + ... ascending, or D = D0 + tree(s_0, s_1, ...);   D0 = +0, or out
//
// A vector of elements walks all parts before the next does, so that nothing is kept in memory between them.

#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace pydet {
namespace {

template <class V> V ordered(const Fold &p, int64_t i, V sum) {
  for (int s = 0; s < p.count; ++s) sum = sum + get<Partial>(p.parts[s] + i, V{});
  return sum;
}

// Part s closes the subtrees of 2, 4, 8, ... parts that end with it. Where the last ones are no power of two, they are a
// smaller tree, which is added to the larger one before it.
template <class V> V tree(const Fold &p, int64_t i, V start) {
  V waiting[kFoldLevels];
  int top = 0;
  for (int s = 0; s < p.count; ++s) {
    V sum = get<Partial>(p.parts[s] + i, V{});
    for (int left = s; left & 1; left >>= 1) sum = waiting[--top] + sum;
    waiting[top++] = sum;
  }
  V sum = waiting[--top];
  while (top) sum = waiting[--top] + sum;
  return start + sum;
}

struct NoBias {
  using Stored = char;
};

// Elements [begin, end), within one row of the bias, which begins at `bias`.
template <class T, class B>
void fold_row(const Fold &p, int64_t begin, int64_t end, [[maybe_unused]] const typename B::Stored *bias) {
  auto *out = (typename T::Stored *)p.out.data;
  along(end - begin, [&](int64_t j, auto v) {
    const int64_t i = begin + j;
    const auto start = p.accumulate ? get<Partial>((const float *)p.out.data + i, v) : all(0.0f, v);
    auto sum = p.tree ? tree(p, i, start) : ordered(p, i, start);
    if constexpr (!std::is_same_v<B, NoBias>) sum = sum + get<B>(bias + j, v);
    set<T>(out + i, sum);
  });
}

template <class T, class B> void fold_range(const Fold &p, int64_t begin, int64_t end) {
  const auto *bias = (const typename B::Stored *)p.bias.data;
  while (begin < end) {
    const int64_t column = bias ? begin % p.bias_period : 0, rest = bias ? p.bias_period - column : end - begin;
    const int64_t row_end = rest < end - begin ? begin + rest : end;
    fold_row<T, B>(p, begin, row_end, bias ? bias + column : nullptr);
    begin = row_end;
  }
}

}  // namespace

template <> pydet_status fold<Isa>(const Fold &problem) {
  constexpr int64_t kPiece = 8192;    // elements that a task takes
  constexpr double kWorth = 1 << 16;  // parts of elements for which a thread is worth waking
  Scratch scratch;                    // not worked in: where there is none, one thread computes
  auto pieces = [&](auto out, auto bias) {
    const double work = double(problem.size) * problem.count;
    parallel(divide_up(problem.size, kPiece), threads_for(work, kWorth), scratch, [&](int64_t i, Scratch &) {
      const int64_t end = problem.size - i * kPiece < kPiece ? problem.size : (i + 1) * kPiece;
      fold_range<decltype(out), decltype(bias)>(problem, i * kPiece, end);
    });
  };
  dispatch(problem.out.type, [&](auto out) {
    if (!problem.bias.data) return pieces(out, NoBias{});
    dispatch(problem.bias.type, [&](auto bias) { pieces(out, bias); });
  });
  return PYDET_OK;
}

}  // namespace pydet
