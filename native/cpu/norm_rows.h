// What the norms on the CPU share: their weights, and the sums over rows of their gradients (NUMERICS.md, "RMSNorm").
#pragma once

#include <new>

#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace pydet {
namespace {

// ---- Weights --------------------------------------------------------------------------------------------------------

template <class T> struct Weights {  // w + weight_offset
  const typename T::Stored *data;
  float offset;
  template <class V> V at(int64_t j, V v) const { return get<T>(data + j, v) + all(offset, v); }
};
struct Ones {  // no weight: 1 + weight_offset
  float scale;
  template <class V> V at(int64_t, V v) const { return all(scale, v); }
};

template <class F> void with_weights(const Vector &weight, float offset, F f) {
  if (!weight.data) return f(Ones{1.0f + offset});
  dispatch(weight.type, [&](auto number) {
    using T = decltype(number);
    f(Weights<T>{(const typename T::Stored *)weight.data, offset});
  });
}

// Their type is asked for each vector: kernels for every pair of types of weight and bias would be four times the code.
struct Biases {
  const Vector &bias;
  template <class V> V added(int64_t j, V xhat, V w) const {
    if (!bias.data) return xhat * w;
    V b;
    dispatch(bias.type, [&](auto number) {
      using T = decltype(number);
      b = get<T>((const typename T::Stored *)bias.data + j, V{});
    });
    return fma(xhat, w, b);
  }
};

// ---- Rows -----------------------------------------------------------------------------------------------------------

int64_t threads_for(double elements) { return pydet::threads_for(elements, 1 << 17); }

constexpr int64_t kRowElements = 8192;  // of rows that a task takes at least

struct RowBlock {
  int64_t index, first, end;
  RowSum &lanes;
};

// f(number, weights, block) for blocks of `at_once` rows, on several threads; f passes over an element `passes` times.
template <class Problem, class F>
void over_rows(const Problem &norm, int64_t at_once, double passes, Scratch &scratch, F f) {
  dispatch(norm.x.type, [&](auto number) {
    with_weights(norm.weight, norm.weight_offset, [&](const auto &weights) {
      const int64_t threads = threads_for(passes * double(norm.rows) * double(norm.n));
      parallel(divide_up(norm.rows, at_once), threads, scratch, [&](int64_t i, Scratch &own) {
        const int64_t first = i * at_once, end = first + at_once < norm.rows ? first + at_once : norm.rows;
        f(number, weights, RowBlock{i, first, end, *new (own.data) RowSum});
      });
    });
  });
}

// A function of its own: each copy of it would have a frame of its own on the caller's 16 KiB of stack.
__attribute__((noinline)) float joined(const RowSum &lanes, int64_t n) { return lanes.joined(n); }

// ---- Sums over rows ------------------------------------------------------------------------------------------------

constexpr int64_t kJoinColumns = 512;  // at a time

struct alignas(64) Joined {
  float total[kJoinColumns], block[kJoinColumns], group[kJoinColumns];
};
static_assert(sizeof(Joined) <= Scratch::kSmall, "the least scratch memory holds the sums of some columns");

inline void add_columns(float *sum, const float *part, int64_t columns) {
  along(columns,
        [&](int64_t j, auto v) { set<Partial>(sum + j, get<Partial>(sum + j, v) + get<Partial>(part + j, v)); });
}
__attribute__((noinline)) void add_and_clear(float *sum, float *part, int64_t columns) {
  add_columns(sum, part, columns);
  memset(part, 0, size_t(columns) * sizeof(float));
}

// Sums from numbers of `type`, and rounded to them.
inline void begin_columns(Type type, const char *from, int64_t columns, float *total) {
  dispatch(type, [&](auto number) {
    using T = decltype(number);
    along(columns,
          [&](int64_t j, auto v) { set<Partial>(total + j, get<T>((const typename T::Stored *)from + j, v)); });
  });
}
__attribute__((noinline)) void end_columns(Type type, const float *total, int64_t columns, char *to) {
  dispatch(type, [&](auto number) {
    using T = decltype(number);
    along(columns, [&](int64_t j, auto v) { set<T>((typename T::Stored *)to + j, get<Partial>(total + j, v)); });
  });
}

// How blocks become a result: added from +0, added from the result, or each a row of it.
enum class JoinBlocks { from_zero, from_result, apart };

// Columns of `result` from `first` on, of which the chains are `count` rows of n: 4 chains added from +0 are a group, 4
// groups a block; the blocks are added and rounded once, or kept apart.
inline void join_columns(const float *chains, int64_t count, int64_t n, const Vector &result, JoinBlocks blocks,
                         int64_t first, Joined &sums) {
  constexpr int64_t kGroupChains = kDweightGroupRows / kDweightChainRows,
                    kBlockChains = kDweightBlockRows / kDweightChainRows;
  const int64_t columns = n - first < kJoinColumns ? n - first : kJoinColumns;
  char *to = result.data + first * size_of(result.type);
  float *total = sums.total, *block = sums.block, *group = sums.group;

  if (blocks == JoinBlocks::from_result) begin_columns(result.type, to, columns, total);
  for (int64_t i = 0; i < count; ++i) {
    add_columns(group, chains + i * n + first, columns);
    const bool last = i + 1 == count;
    if (last || (i + 1) % kGroupChains == 0) add_and_clear(block, group, columns);
    if (!last && (i + 1) % kBlockChains != 0) continue;
    add_and_clear(total, block, columns);
    if (blocks != JoinBlocks::apart) continue;
    end_columns(result.type, total, columns, to);
    memset(total, 0, size_t(columns) * sizeof(float));
    to += n * size_of(result.type);
  }
  if (blocks != JoinBlocks::apart) end_columns(result.type, total, columns, to);
}

// All columns of it, on several threads.
inline void join_chains(const float *chains, int64_t count, int64_t n, const Vector &result, JoinBlocks blocks,
                        Scratch &scratch) {
  const int64_t tasks = divide_up(n, kJoinColumns);
  parallel(tasks, threads_for(double(count) * double(n)), scratch, [&](int64_t i, Scratch &own) {
    join_columns(chains, count, n, result, blocks, i * kJoinColumns, *new (own.data) Joined());
  });
}

}  // namespace
}  // namespace pydet
