// Rows of a table by their numbers, and the table's gradient (NUMERICS.md, "Embedding"). The bits are those of every other
// backend.
//
//   out[t] = w[ids[t]],   dw[v] = dw[v] or +0, and then + dout[t] for the tokens t with ids[t] = v, ascending
//
// Tokens are sorted by id, and stay in order: what has one id lies together. A thread takes those of some ids, and of
// their rows some columns.

#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/piece.h"

namespace pydet {
namespace {

constexpr double kWorthAThread = 1 << 16;  // bytes

void copy_rows(const Embedding &p) {
  constexpr int64_t kAtOnce = 16;
  const int64_t bytes = p.n * size_of(p.w.type), size = size_of(p.w.type);
  Scratch scratch;  // not worked in: where there is none, one thread copies
  const int64_t threads = threads_for(double(p.rows) * double(bytes), kWorthAThread);
  parallel(divide_up(p.rows, kAtOnce), threads, scratch, [&](int64_t i, Scratch &) {
    for (int64_t t = i * kAtOnce; t < p.rows && t < (i + 1) * kAtOnce; ++t) {
      const int64_t id = p.ids.wide ? ((const int64_t *)p.ids.data)[t] : ((const int32_t *)p.ids.data)[t];
      const int64_t to = t / p.inner * p.out.outer_stride + t % p.inner * p.out.inner_stride;
      memcpy(p.out.data + to * size, p.w.data + id * p.w.row_stride * size, size_t(bytes));
    }
  });
}

// Puts the tokens that count in order, and says how many they are.
int64_t sort_tokens(const EmbeddingBackward &p) {
  SortedToken *const sorted = p.sorted();
  int64_t count = 0;
  for (int64_t t = 0; t < p.rows; ++t)
    if (const int64_t id = p.id_of(t); id >= 0) sorted[count++] = {uint32_t(id), uint32_t(t)};
  const auto key = [](const SortedToken &x) { return uint64_t(x.id) << 32 | x.token; };
  std::sort(sorted, sorted + count, [&](const SortedToken &a, const SortedToken &b) { return key(a) < key(b); });
  return count;
}

void clear_rows(const EmbeddingBackward &p, int64_t threads, Scratch &scratch) {
  const int64_t size = size_of(p.dw.type), at_once = 1 + (1 << 16) / (p.n * size);
  parallel(divide_up(p.dw.rows, at_once), threads, scratch, [&](int64_t i, Scratch &) {
    for (int64_t v = i * at_once; v < p.dw.rows && v < (i + 1) * at_once; ++v)
      memset(p.dw.data + v * p.dw.row_stride * size, 0, size_t(p.n * size));
  });
}

// Adds the rows of tokens [first, end), which have one id, to columns [begin, stop) of its row of dw.
template <class From, class To>
void add_rows(const EmbeddingBackward &p, int64_t first, int64_t end, int64_t begin, int64_t stop) {
  const SortedToken *const sorted = p.sorted();
  auto *to = (typename To::Stored *)p.dw.data + int64_t(sorted[first].id) * p.dw.row_stride;
  Piece sum;
  pieces(stop - begin, [&](int64_t j, int64_t count) {
    j += begin;
    if (p.accumulate) sum.load<To>(to + j, count);
    else memset(sum.x, 0, sizeof sum.x);
    for (int64_t i = first; i < end; ++i) {
      const auto *const from = row<From>(p.dout, p.inner, sorted[i].token) + j;
      along(count,
            [&](int64_t e, auto v) { set<Partial>(sum.x + e, get<Partial>(sum.x + e, v) + get<From>(from + e, v)); });
    }
    sum.store<To>(to + j, count);
  });
}

// Of the ids whose tokens begin at places [first, end).
template <class From, class To>
void add_ids(const EmbeddingBackward &p, int64_t tokens, int64_t first, int64_t end, int64_t begin, int64_t stop) {
  const SortedToken *const sorted = p.sorted();
  const auto begins = [&](int64_t i) { return i == 0 || sorted[i].id != sorted[i - 1].id; };
  for (int64_t i = first; i < end; ++i) {
    if (!begins(i)) continue;
    int64_t next = i + 1;
    while (next < tokens && !begins(next)) ++next;
    add_rows<From, To>(p, i, next, begin, stop);
  }
}

}  // namespace

template <> pydet_status embedding<Isa>(const Embedding &problem) {
  copy_rows(problem);
  return PYDET_OK;
}

template <> pydet_status embedding_backward<Isa>(const EmbeddingBackward &p) {
  constexpr int64_t kTokens = 64, kColumns = 1024;
  static_assert(kColumns % kPiece == 0, "a piece lies in adjacent columns");
  const int64_t tokens = sort_tokens(p), parts = divide_up(p.n, kColumns);
  Scratch scratch;  // not worked in: where there is none, one thread computes
  if (!p.accumulate)
    clear_rows(p, threads_for(double(p.dw.rows) * double(p.n) * size_of(p.dw.type), kWorthAThread), scratch);
  const int64_t threads = threads_for(double(tokens) * double(p.n) * sizeof(float), kWorthAThread);
  dispatch(p.dout.type, [&](auto from) {
    const auto add = [&](auto to) {
      parallel(divide_up(tokens, kTokens) * parts, threads, scratch, [&](int64_t i, Scratch &) {
        const int64_t first = i / parts * kTokens, begin = i % parts * kColumns;
        add_ids<decltype(from), decltype(to)>(p, tokens, first, first + kTokens < tokens ? first + kTokens : tokens,
                                              begin, begin + kColumns < p.n ? begin + kColumns : p.n);
      });
    };
    if (p.dw.type == Type::f32) add(Number<Type::f32>());
    else add(from);
  });
  return PYDET_OK;
}

}  // namespace pydet
