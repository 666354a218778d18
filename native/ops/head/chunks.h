// The chunks of rows, or slabs of columns, in which the logits lie in the workspace, or in that of dw.
#pragma once

#include "ops/gemm/check.h"
#include "ops/head/problem.h"

namespace pydet {

// ---- Chunks ------------------------------------------------------------------------------------------------------

constexpr uint64_t kHeadAlignment = 256;           // of what lies in the workspace
constexpr uint64_t kHeadWorkspace = 256ull << 20;  // that a query without a limit means
constexpr int64_t kHeadCut = kChunkMultiple;       // where a sum over rows may be cut, in any arithmetic
constexpr int64_t kHeadTile = 128;                 // rows that the kernels like to have

// Elements from one row of a chunk to the next: rows begin where tensor cores can read them.
inline int64_t head_stride(int64_t n, Type type) {
  const int64_t unit = 16 / size_of(type);
  return divide_up(n, unit) * unit;
}

// Whether softmax's own kernels make all that is asked.
inline bool head_is_plain(const LinearLogProb &p) {
  return !p.kernel && !p.asked.scales() && !p.asked.more() && (p.logits == p.x.type || p.logits == Type::f32);
}

inline bool head_narrows(const LinearLogProb &p) { return p.backward && p.logits != p.x.type; }

// Of `rows` rows of logits, and what else backward keeps of them; kTooMuch where it passes 2^63.
constexpr uint64_t kTooMuch = ~0ull;
inline uint64_t head_bytes(const LinearLogProb &p, int64_t rows) {
  constexpr int64_t kMostColumns = int64_t(1) << 59;
  if (p.n > kMostColumns) return kTooMuch;
  const auto of = [&](int64_t width, Type type) {
    uint64_t bytes = 0;
    if (__builtin_mul_overflow(uint64_t(rows), uint64_t(width) * uint64_t(size_of(type)), &bytes)) bytes = kTooMuch;
    return bytes;
  };
  uint64_t total = 4 * kHeadAlignment;
  const uint64_t parts[] = {of(head_stride(p.n, p.logits), p.logits),
                            head_narrows(p) ? of(head_stride(p.n, p.x.type), p.x.type) : 0,
                            p.dbias.data ? of(1, p.x.type) : 0};
  for (uint64_t part : parts)
    if (__builtin_add_overflow(total, part, &total)) return kTooMuch;
  return total <= kMaxAddress ? total : kTooMuch;
}

// How many rows a chunk has, and where its products have room of their own.
struct HeadChunks {
  int64_t rows;
  uint64_t of_products;
};

// The bytes that kernels of the products of so many rows can use; of_products is NULL where none wants any.
using OfProducts = uint64_t (*)(int64_t m, int64_t n, int64_t k, int64_t k_chunk, Arithmetic asked, const char *kernel);
inline uint64_t head_product_bytes(const LinearLogProb &p, OfProducts of_products, int64_t rows, int64_t columns) {
  if (!of_products || rows == 0 || p.k == 0) return 0;
  const auto of = [&](int64_t m, int64_t n, int64_t k) {
    return of_products(m, n, k, p.k_chunk, p.arithmetic, nullptr);
  };
  uint64_t most = of(rows, columns, p.k);
  if (p.dx.data) most = std::max(most, of(rows, p.k, columns));
  if (p.dw.data) most = std::max(most, of(columns, p.k, rows));
  return divide_up(most, kHeadAlignment) * kHeadAlignment;
}

// The most rows, up to all, that lie in so many bytes.
inline int64_t head_rows_in(const LinearLogProb &p, uint64_t bytes) {
  if (head_bytes(p, p.rows) <= bytes) return p.rows;
  const uint64_t fixed = head_bytes(p, 0), with_one = head_bytes(p, 1), row = with_one - fixed;
  return bytes <= fixed || with_one == kTooMuch ? 0
                                                : int64_t(std::min<uint64_t>((bytes - fixed) / row, uint64_t(p.rows)));
}

// At multiples of so many rows a chunk may end.
inline int64_t head_unit(const LinearLogProb &p) {
  if (!p.dw.data && !p.dbias.data) return 1;
  return p.k_chunk ? p.k_chunk : kHeadCut;
}

// The caller's workspace holds less than the fewest rows that may be.
inline pydet_status want_more_workspace(const char *op, const LinearLogProb &p, uint64_t given) {
  const int64_t unit = head_unit(p), rows = std::min(unit, p.rows);
  return fail(PYDET_WORKSPACE_TOO_SMALL,
              "%s: workspace is %" PRIu64 " bytes, want at least %" PRIu64 " for %" PRId64 " row%s", op, given,
              p.taken + head_bytes(p, rows), rows, unit == 1 ? "" : "s, where a sum over rows may be cut");
}

// Chunks as even as can be, in whole tiles where these fit.
inline pydet_status head_chunks(const char *op, const LinearLogProb &p, OfProducts of_products, HeadChunks *chunks) {
  *chunks = {};
  if (p.rows == 0) return PYDET_OK;
  const int64_t unit = head_unit(p);
  if (head_bytes(p, std::min(unit, p.rows)) == kTooMuch)
    return fail(PYDET_OVERFLOW, "%s: the logits of %" PRId64 " rows of %" PRId64 " reach past 2^63 - 1 bytes", op,
                std::min(unit, p.rows), p.n);
  int64_t rows = head_rows_in(p, p.workspace_size);
  const uint64_t wanted = head_product_bytes(p, of_products, rows, p.n);
  if (wanted && wanted <= p.workspace_size / 4) {
    const int64_t left = head_rows_in(p, p.workspace_size - wanted);
    const bool fewer = rows == p.rows && left < rows;  // chunks where there would be one
    if (left >= std::min(unit, p.rows) && !fewer) rows = left, chunks->of_products = wanted;
  }
  if (rows < std::min(unit, p.rows)) return want_more_workspace(op, p, p.taken + p.workspace_size);
  for (const Matrix *sum : {&p.dw, &p.dbias})
    if (rows < p.rows && sum->data && sum->type != Type::f32)
      return fail(PYDET_WORKSPACE_TOO_SMALL,
                  "%s: workspace is %" PRIu64 " bytes, want %" PRIu64 " for all rows at once, or %s in float32, not %s",
                  op, p.taken + p.workspace_size, p.taken + head_bytes(p, p.rows), sum == &p.dw ? "dw" : "dbias",
                  type_name(sum->type));
  chunks->rows = rows;
  if (rows == p.rows) return PYDET_OK;
  int64_t whole = 0;
  if (__builtin_mul_overflow(unit / gcd(unit, kHeadTile), kHeadTile, &whole) || whole > rows) whole = unit;
  const int64_t count = divide_up(p.rows, rows / whole * whole);
  chunks->rows = divide_up(divide_up(p.rows, count), whole) * whole;
  return PYDET_OK;
}

// ---- Slabs -------------------------------------------------------------------------------------------------------

// Where chunks would be several, each continues dw, and moves all of it. But while dw is not written yet, its own memory
// holds the logits of all rows, in slabs of columns (ops/softmax/problem.h): slab 0 is in the workspace, slab c where
// columns (c - 1) * columns and the next have their part of dw. From the last slab on each is read for the last time when
// its own part of dw is written, where the slab behind it was: dw is whole chains, written once. The part of the last
// columns is free until then: there dx is summed over the slabs.
constexpr int64_t kMostSlabs = 16;
struct HeadSlabs {
  int64_t columns, count;  // count: 0 where there are none
};

// What slab 0 and the ones take, where any workspace may begin; kTooMuch as above.
constexpr uint64_t kSlabAlignment = 16;
inline uint64_t head_slab_bytes(const LinearLogProb &p, int64_t columns) {
  uint64_t slab = 0;
  if (__builtin_mul_overflow(uint64_t(p.rows), uint64_t(columns), &slab) ||
      __builtin_mul_overflow(slab, uint64_t(size_of(p.x.type)), &slab) || slab > kMaxAddress / 4)
    return kTooMuch;
  const uint64_t ones = p.dbias.data ? uint64_t(p.rows) * uint64_t(size_of(p.x.type)) : 0;
  return slab + divide_up(ones, kSlabAlignment) * kSlabAlignment;
}

// As few as the workspace has room for.
inline HeadSlabs head_slabs(const LinearLogProb &p) {
  constexpr int64_t kOfSums = 4;  // bytes of an element of dw
  const bool sums_in_fp32 = p.dw.type == Type::f32 && (!p.dbias.data || p.dbias.type == Type::f32);
  if (!p.backward || !p.dw.data || p.accumulate || p.logits != p.x.type || !sums_in_fp32) return {};
  if (p.rows == 0 || divide_up(p.rows, kOfSums / size_of(p.x.type)) > p.k) return {};
  if (p.dw.col_stride != 1 || p.dw.row_stride != p.k || reinterpret_cast<uintptr_t>(p.dw.data) % 16) return {};
  int64_t unit = kSlabColumns;  // where the chain of dx may be cut too
  if (p.k_chunk && __builtin_mul_overflow(unit / gcd(unit, p.k_chunk), p.k_chunk, &unit)) return {};
  for (int64_t slabs = 2; slabs <= kMostSlabs && unit < p.n; ++slabs) {
    const int64_t columns = divide_up(divide_up(p.n, slabs), unit) * unit, count = divide_up(p.n, columns);
    const int64_t last = p.n - (count - 1) * columns;
    if (count < 2 || head_slab_bytes(p, columns) > p.workspace_size) continue;
    if (!p.dx.data || p.dx.type == Type::f32 || last >= p.rows) return {columns, count};
  }
  return {};
}

}  // namespace pydet
