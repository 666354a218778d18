// GEMM in the arithmetic of tensor cores (NUMERICS.md, "GEMM"), by the steps of tensorcore_steps.h.
//
// A block is a task: its operands are packed into scratch memory, kDepth of k at a time, and its chains wait there.
#include <new>

#include "cpu/parallel.h"
#include "cpu/tensorcore_steps.h"

namespace pydet {
namespace {

// ---- Scratch memory -----------------------------------------------------------------------------------------------

template <int rows, int cols, int depth> struct alignas(64) PanelMemory {
  static constexpr int kStrips = cols / kTile, kWords = rows * kDepth > depth *cols ? rows *kDepth : depth *cols;
  static_assert(kStrips == 1 || depth == kDepth, "strips are kDepth apart");
  float a[rows][kDepth];
  int32_t a_exponent[rows][kDepth];
  float b[kStrips * depth][kTile];
  int16_t b_exponent[kStrips * depth][kTile];
  uint16_t words[kWords];
  float chain[rows][kCols], total[rows][kCols];

  Panels panels() { return {rows, cols, depth, a, a_exponent, b, b_exponent, words, chain, total}; }
};
using LargeMemory = PanelMemory<kRows, kCols, kDepth>;
using SmallMemory = PanelMemory<kGroup, kTile, 16>;
static_assert(sizeof(LargeMemory) <= Scratch::kLarge && sizeof(SmallMemory) <= Scratch::kSmall, "they fit");

inline Panels panels_in(Scratch &scratch, bool large) {
  return large ? (new (scratch.data) LargeMemory)->panels() : (new (scratch.data) SmallMemory)->panels();
}

// ---- One block ----------------------------------------------------------------------------------------------------

struct Block {
  BatchOffsets at;
  int64_t m, n;  // its first row and column
  int rows, cols;
};

template <class T>
__attribute__((noinline)) void pack(const Gemm &g, const Block &block, int64_t k, int depth, const Panels &panels) {
  const bool flushes = g.arithmetic == Arithmetic::cdna2;
  int padded = (depth + 15) / 16 * 16;  // of which walk takes the steps that it needs
  uint16_t *words = panels.words;
  alignas(64) int16_t exponents[kDepth];
  const uint16_t *a = (const uint16_t *)g.a.data + block.at.a + block.m * g.a.row_stride + k * g.a.col_stride;
  gather<kDepth>(a, g.a.row_stride, g.a.col_stride, block.rows, depth, block.rows, words);
  for (int r = 0; r < block.rows; ++r) {
    unpack<T>(flushes, words + r * kDepth, padded, panels.a[r], exponents);
    for (int i = 0; i < padded; ++i) panels.a_exponent[r][i] = int32_t(uint16_t(exponents[i]) * 0x10001u);
  }
  const uint16_t *b = (const uint16_t *)g.b.data + block.at.b + k * g.b.row_stride + block.n * g.b.col_stride;
  gather<kTile>(b, g.b.row_stride, g.b.col_stride, depth, block.cols, padded, words);
  for (int strip = 0; strip * kTile < block.cols; ++strip)
    unpack<T>(flushes, words + strip * padded * kTile, padded * kTile, panels.b[strip * kDepth],
              panels.b_exponent[strip * kDepth]);
}

// out = round(sum + bias) for one row of the block.
inline void finish_row(const Gemm &g, const Block &block, int row, float *sum) {
  int64_t m = block.m + row;
  if (g.bias.data)
    dispatch(g.bias.type, [&](auto number) {
      using T = decltype(number);
      auto *bias = (const typename T::Stored *)g.bias.data + block.at.bias + m * g.bias.row_stride;
      for (int j = 0; j < block.cols; ++j) sum[j] += T::get(bias + (block.n + j) * g.bias.col_stride);
    });
  dispatch(g.out.type, [&](auto number) {
    using T = decltype(number);
    auto *out = (typename T::Stored *)g.out.data + block.at.out + m * g.out.row_stride + block.n;
    int j = 0;
    for (; j + kWidth <= block.cols; j += kWidth) T::store(out + j, load(sum + j));
    for (; j < block.cols; ++j) T::set(out + j, sum[j]);
  });
}

__attribute__((noinline)) void run_block(const Gemm &g, const Block &block, const Panels &panels,
                                         TensorCoreLoops::Walk *walk) {
  auto *chain = panels.chain, *total = panels.total;
  auto *start = g.k_chunk ? total : chain;  // what accumulate continues
  for (int r = 0; r < block.rows; ++r) {
    memset(start[r], 0, sizeof start[r]);
    if (g.accumulate) {
      const float *out = (const float *)g.out.data + block.at.out + (block.m + r) * g.out.row_stride + block.n;
      memcpy(start[r], out, size_t(block.cols) * 4);
    }
  }

  int64_t chunk = g.k_chunk ? g.k_chunk : g.k;
  for (int64_t chunk_start = 0; chunk_start < g.k; chunk_start += chunk) {
    int64_t chunk_end = g.k - chunk_start < chunk ? g.k : chunk_start + chunk;
    if (g.k_chunk) memset(chain, 0, sizeof(chain[0]) * block.rows);
    for (int64_t k = chunk_start; k < chunk_end; k += panels.depth) {
      int depth = chunk_end - k < panels.depth ? int(chunk_end - k) : panels.depth;
      with_type<kHalfTypes>(g.a.type, [&](auto type) { pack<Number<type>>(g, block, k, depth, panels); });
      for (int first = 0; first < block.cols; first += kTile) {
        const int strip = first / kTile * kDepth;
        walk(*panels.a, *panels.a_exponent, panels.b[strip], panels.b_exponent[strip], block.rows, depth,
             chain[0] + first);
      }
    }
    if (g.k_chunk)
      for (int r = 0; r < block.rows; ++r)
        for (int j = 0; j < kCols; ++j) total[r][j] += chain[r][j];
  }
  for (int r = 0; r < block.rows; ++r) finish_row(g, block, r, start[r]);
}

// Blocks are as large as scratch memory allows, with fewer rows where that leaves too few of them to share.
void compute(const Gemm &g, TensorCoreLoops::Walk *walk, Scratch &scratch) {
  const bool large = scratch.large();
  const Panels most = panels_in(scratch, large);
  int64_t col_blocks = divide_up(g.n, most.cols), rows = most.rows;
  while (rows > 32 && g.batch.count * col_blocks * divide_up(g.m, rows) < 32) rows /= 2;
  int64_t row_blocks = divide_up(g.m, rows);
  auto task = [&](int64_t i, Scratch &own) {
    Block block{};
    block.n = i % col_blocks * most.cols;
    block.m = i / col_blocks % row_blocks * rows;
    block.rows = int(g.m - block.m < rows ? g.m - block.m : rows);
    block.cols = int(g.n - block.n < most.cols ? g.n - block.n : most.cols);
    block.at = batch_offsets(g.batch, i / col_blocks / row_blocks);
    run_block(g, block, panels_in(own, large), walk);
  };
  constexpr double kWorthAThread = 1 << 17;
  double work = double(g.batch.count) * double(g.m) * double(g.n) * double(g.k + 1);
  parallel(g.batch.count * row_blocks * col_blocks, threads_for(work, kWorthAThread), scratch, task);
}

pydet_status run(const Gemm &g, TensorCoreLoops::Walk *walk) {
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) { compute(g, walk, scratch); });
  return PYDET_OK;
}

// ---- The loops of each arithmetic ---------------------------------------------------------------------------------

template <class Model>
void walk_rows(const float *a, const int32_t *a_exponent, const float *b, const int16_t *b_exponent, int64_t rows,
               int64_t depth, float *chain) {
  const Operands operands = {(const float(*)[kDepth])a, (const int32_t(*)[kDepth])a_exponent, (const float(*)[kTile])b,
                             (const int16_t(*)[kTile])b_exponent};
  int r = 0;
  for (; r + kGroup <= rows; r += kGroup) walk<Model, kGroup>(operands, r, int(depth), chain + r * kCols);
  for (; r < rows; ++r) walk<Model, 1>(operands, r, int(depth), chain + r * kCols);
}

template <class Model> float walk_one(Type type, const float *a, const float *b, int64_t count, float c) {
  constexpr bool kFlushes = __is_same(Model, Cdna2);
  float x[16] = {}, y[16] = {};
  int16_t of_x[16], of_y[16];
  int32_t x_exponent[16];
  for (int64_t i = 0; i < count; ++i) x[i] = a[i], y[i] = b[i];
  exponents_of(type, kFlushes, x, 16, of_x), exponents_of(type, kFlushes, y, 16, of_y);
  for (int i = 0; i < 16; ++i) x_exponent[i] = of_x[i];
  for (int64_t i = 0; i < count; i += Model::kStep) c = Model::exact({x + i, x_exponent + i, y + i, of_y + i, 1}, c);
  return c;
}

template <class Model> constexpr TensorCoreLoops kLoops = {walk_rows<Model>, walk_one<Model>};

}  // namespace

template <> const TensorCoreLoops &tensor_core_loops<Isa>(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::sm90: return kLoops<Sm90>;
    case Arithmetic::sm80: return kLoops<Sm80>;
    case Arithmetic::cdna3: return kLoops<Cdna3>;
    default: return kLoops<Cdna2>;
  }
}

template <> pydet_status gemm_sm90<Isa>(const Gemm &g) { return run(g, walk_rows<Sm90>); }
template <> pydet_status gemm_sm80<Isa>(const Gemm &g) { return run(g, walk_rows<Sm80>); }
template <> pydet_status gemm_cdna3<Isa>(const Gemm &g) { return run(g, walk_rows<Cdna3>); }
template <> pydet_status gemm_cdna2<Isa>(const Gemm &g) { return run(g, walk_rows<Cdna2>); }

}  // namespace pydet
