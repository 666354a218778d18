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

template <class T, class Model>
void pack(const Gemm &g, const Block &block, int64_t k, int depth, const Panels &panels) {
  int padded = (depth + 15) / 16 * 16;  // of which walk takes the steps that it needs
  uint16_t *words = panels.words;
  alignas(64) int16_t exponents[kDepth];
  const uint16_t *a = (const uint16_t *)g.a.data + block.at.a + block.m * g.a.row_stride + k * g.a.col_stride;
  gather<kDepth>(a, g.a.row_stride, g.a.col_stride, block.rows, depth, block.rows, words);
  for (int r = 0; r < block.rows; ++r) {
    unpack<T, Model>(words + r * kDepth, padded, panels.a[r], exponents);
    for (int i = 0; i < padded; ++i) panels.a_exponent[r][i] = int32_t(uint16_t(exponents[i]) * 0x10001u);
  }
  const uint16_t *b = (const uint16_t *)g.b.data + block.at.b + k * g.b.row_stride + block.n * g.b.col_stride;
  gather<kTile>(b, g.b.row_stride, g.b.col_stride, depth, block.cols, padded, words);
  for (int strip = 0; strip * kTile < block.cols; ++strip)
    unpack<T, Model>(words + strip * padded * kTile, padded * kTile, panels.b[strip * kDepth],
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

template <class Model>
__attribute__((noinline)) void run_block(const Gemm &g, const Block &block, const Panels &panels) {
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
      with_type<kHalfTypes>(g.a.type, [&](auto type) { pack<Number<type>, Model>(g, block, k, depth, panels); });
      for (int first = 0; first < block.cols; first += kTile) {
        int row = 0;
        for (; row + kGroup <= block.rows; row += kGroup)
          walk<Model, kGroup>(panels, row, first / kTile, depth, chain[row] + first);
        for (; row < block.rows; ++row) walk<Model, 1>(panels, row, first / kTile, depth, chain[row] + first);
      }
    }
    if (g.k_chunk)
      for (int r = 0; r < block.rows; ++r)
        for (int j = 0; j < kCols; ++j) total[r][j] += chain[r][j];
  }
  for (int r = 0; r < block.rows; ++r) finish_row(g, block, r, start[r]);
}

// Blocks are as large as scratch memory allows, with fewer rows where that leaves too few of them to share.
template <class Model> void compute(const Gemm &g, Scratch &scratch) {
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
    run_block<Model>(g, block, panels_in(own, large));
  };
  constexpr double kWorthAThread = 1 << 17;
  double work = double(g.batch.count) * double(g.m) * double(g.n) * double(g.k + 1);
  parallel(g.batch.count * row_blocks * col_blocks, threads_for(work, kWorthAThread), scratch, task);
}

template <class Model> pydet_status run(const Gemm &g) {
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) { compute<Model>(g, scratch); });
  return PYDET_OK;
}

}  // namespace

template <> pydet_status gemm_sm90<Isa>(const Gemm &g) { return run<Sm90>(g); }
template <> pydet_status gemm_sm80<Isa>(const Gemm &g) { return run<Sm80>(g); }
template <> pydet_status gemm_cdna3<Isa>(const Gemm &g) { return run<Cdna3>(g); }
template <> pydet_status gemm_cdna2<Isa>(const Gemm &g) { return run<Cdna2>(g); }

}  // namespace pydet
