// Scaled GEMM of fp8 (NUMERICS.md, "Scaled GEMM"): the chains of Hopper's tensor core, by a bit model, and those of ieee.
//
//   sm90   D = step(a[0..32), b[0..32), c):  p_i = a_i b_i, exact;  e(x) = max(floor(log2|x|), emin), emin = -6 (e4m3),
//          -14 (e5m2);  e_i = e(a_i) + e(b_i);  e_c = max(floor(log2|c|), -126)
//          E = max(e_c, e_i) over what is not zero,  q = 2^(E - 13),  S = trunc(c / q) + sum_i trunc(p_i / q)
//          D = S q truncated toward zero to 13 fraction bits. Confirmed: recorded H100 results, without a difference.
//   ieee   D = fmaf(a, b, c). The product of two fp8 numbers is exact in fp32, so it is a product and a sum.
//
// Tile: kHeight rows by four vectors of columns, whose 8-bit exponents are one vector. Every |p_i / q| is below 2^15, so
// its truncation is the conversion to int32 and the sum is exact. Rows and columns with NaN or Inf, and the lanes whose c
// is out of the vectors' range, take the exact step in fp64; so does all where there is no memory to pack into.
#include <new>

#include "cpu/exponents.h"
#include "cpu/parallel.h"
#include "cpu/scaled_kernels.h"

namespace pydet {
namespace {

// ---- Vectors ------------------------------------------------------------------------------------------------------

constexpr int kVectors = 4, kTile = kVectors * kLanes;  // columns
constexpr int kHeight = kWidth == 16 ? 2 : 1;           // rows

using I8s = int8_t __attribute__((vector_size(kTile)));
using QuarterI8s = int8_t __attribute__((vector_size(kLanes)));

// ---- Packed operands ----------------------------------------------------------------------------------------------

constexpr int kRows = 128, kCols = 128, kDepth = 128;  // of one block
constexpr int kStrips = kCols / kTile;
constexpr int kNone = -60;    // the exponent of a zero: with any other it stays below that of every product
constexpr int kLowest = -28;  // the exponent of the least product

// A block's operands and chains, in scratch memory.
struct Panels {
  alignas(64) float a[kRows][kDepth];
  alignas(64) int32_t a_exponent[kRows][kDepth];  // the 8 bits four times, to be broadcast
  alignas(64) float b[kStrips][kDepth][kTile];
  alignas(64) int8_t b_exponent[kStrips][kDepth][kTile];
  alignas(64) float chain[kRows][kCols], total[kRows][kCols];
  alignas(64) uint8_t words[kDepth * (kRows > kCols ? kRows : kCols)];  // of a or b, on the way there
  bool a_finite[kRows], b_finite[kStrips];
};
static_assert(sizeof(Panels) <= Scratch::kLarge, "scratch memory holds them");

// count: a multiple of 16. Returns whether all are finite.
template <Type type> bool unpack(const uint8_t *words, int count, float *values, int8_t *exponents) {
  constexpr int kMantissaBits = type == Type::e4m3 ? 3 : 2, kBias = type == Type::e4m3 ? 7 : 15;
  constexpr uint8_t kFinite = type == Type::e4m3 ? 0x7E : 0x7B;
  uint8_t most = 0;
  for (int i = 0; i < count; ++i) {
    values[i] = Element<type>::to_f32(words[i]);
    uint8_t magnitude = words[i] & 0x7F;
    int8_t field = int8_t(magnitude >> kMantissaBits);
    int8_t exponent = int8_t((field > 1 ? field : 1) - kBias);
    exponents[i] = magnitude ? exponent : int8_t(kNone);
    most = most > magnitude ? most : magnitude;
  }
  return most <= kFinite;
}

inline bool unpack(Type type, const uint8_t *words, int count, float *values, int8_t *exponents) {
  return type == Type::e4m3 ? unpack<Type::e4m3>(words, count, values, exponents)
                            : unpack<Type::e5m2>(words, count, values, exponents);
}

// ---- The step, exactly --------------------------------------------------------------------------------------------

// One row of A and one column of B at the first k of a step.
struct Terms {
  const float *a;
  const int32_t *a_exponent;
  const float *b;
  const int8_t *b_exponent;
  int apart;  // of b, from k to k

  float product(int k) const { return a[k] * b[k * apart]; }
  int exponent(int k) const { return int8_t(a_exponent[k]) + b_exponent[k * apart]; }
};

float exact_step(const Terms &x, float c) {
  constexpr int kNothing = -1000;
  float infinite = c - c == 0 ? 0.0f : c;
  int top = kNothing;
  if (bits_of(c) << 1) top = int(bits_of(c) >> 23 & 255) - 127;
  if (top == -127) top = -126;
  for (int k = 0; k < kFp8Step; ++k) {
    float p = x.product(k);
    if (p - p != 0) infinite += p;
    else if (p != 0 && x.exponent(k) > top) top = x.exponent(k);
  }
  if (!(infinite == 0)) return pydet::canonical(infinite);
  if (top == kNothing) return 0.0f;
  double per_q = pow2(13 - top);
  int64_t sum = int64_t(double(c) * per_q);
  for (int k = 0; k < kFp8Step; ++k) sum += int64_t(double(x.product(k)) * per_q);
  return float_of(bits_of(float(double(sum) * pow2(top - 13))) & ~0x3FFu) + 0.0f;  // -0 becomes +0
}

// ---- The step, in vectors -----------------------------------------------------------------------------------------

// q and its inverse are normal for E in [kTopMin, kTopMax]. Below, a lane is right if c is 0: then so is all else.
constexpr int kTopMin = -100, kTopMax = 127;

// The odd lanes again, exactly.
__attribute__((noinline, cold)) void repair(const Terms &x, int vector, I32s odd, F32s c, F32s &d) {
  for (int i = 0; i < kLanes; ++i) {
    int column = vector * kLanes + i;
    if (odd[i]) d[i] = exact_step({x.a, x.a_exponent, x.b + column, x.b_exponent + column, kTile}, c[i]);
  }
}

inline void step(const Panels &panels, int row, int strip, int k0, F32s (&c)[kHeight][kVectors]) {
  I8s products[kHeight];  // the largest of their exponents
  for (int r = 0; r < kHeight; ++r) products[r] = I8s{} + int8_t(2 * kNone);
#pragma GCC unroll 32
  for (int k = k0; k < k0 + kFp8Step; ++k) {
    I8s b = load_vector<I8s>(panels.b_exponent[strip][k]);
    for (int r = 0; r < kHeight; ++r)
      products[r] = larger(products[r], (I8s)(b + (I8s)(I32s{} + panels.a_exponent[row + r][k])));
  }

  I32s top[kHeight][kVectors], odd[kHeight][kVectors], odd_anywhere{};
  F32s scale[kHeight][kVectors];
  I32s sum[kHeight][kVectors];
  for (int r = 0; r < kHeight; ++r)
    for (int v = 0; v < kVectors; ++v) {
      I32s of_products = widen<QuarterI8s>(products[r], v), nothing = I32s{} + 2 * kTopMin;
      I32s e = larger(of_products < kLowest ? nothing : of_products, exponent_of(c[r][v]));
      odd[r][v] = (e > kTopMax) | ((e < kTopMin) & (((I32s)c[r][v] & 0x7FFFFFFF) != 0));
      odd_anywhere |= odd[r][v];
      top[r][v] = larger(e, I32s{} + kTopMin);
      scale[r][v] = pow2(13 - top[r][v]);
      sum[r][v] = truncate(c[r][v] * scale[r][v]);
    }
#pragma GCC unroll 32
  for (int k = k0; k < k0 + kFp8Step; ++k)
    for (int v = 0; v < kVectors; ++v) {
      F32s b = load_vector<F32s>(panels.b[strip][k] + v * kLanes);
      for (int r = 0; r < kHeight; ++r) sum[r][v] += truncate((panels.a[row + r][k] * b) * scale[r][v]);
    }
  const bool repairs = __builtin_expect(any(odd_anywhere), 0);
  for (int r = 0; r < kHeight; ++r)
    for (int v = 0; v < kVectors; ++v) {
      F32s exact = __builtin_convertvector(sum[r][v], F32s) * pow2(top[r][v] - 13);
      F32s d = (F32s)((I32s)exact & ~0x3FF);
      if (repairs)
        repair({panels.a[row + r] + k0, panels.a_exponent[row + r] + k0, panels.b[strip][k0],
                panels.b_exponent[strip][k0], kTile},
               v, odd[r][v], c[r][v], d);
      c[r][v] = d;
    }
}

// The chains of kHeight rows by kTile columns, `depth` further along k. chain: [row][kCols].
void walk_sm90(const Panels &panels, int row, int strip, int depth, float *chain) {
  bool finite = panels.b_finite[strip];
  for (int r = 0; r < kHeight; ++r) finite &= panels.a_finite[row + r];
  if (!finite) {
    for (int r = 0; r < kHeight; ++r)
      for (int j = 0; j < kTile; ++j)
        for (int k = 0; k < depth; k += kFp8Step)
          chain[r * kCols + j] = exact_step({panels.a[row + r] + k, panels.a_exponent[row + r] + k,
                                             panels.b[strip][k] + j, panels.b_exponent[strip][k] + j, kTile},
                                            chain[r * kCols + j]);
    return;
  }
  F32s c[kHeight][kVectors];
  for (int r = 0; r < kHeight; ++r)
    for (int v = 0; v < kVectors; ++v) c[r][v] = load_vector<F32s>(chain + r * kCols + v * kLanes);
  for (int k = 0; k < depth; k += kFp8Step) step(panels, row, strip, k, c);
  for (int r = 0; r < kHeight; ++r)
    for (int v = 0; v < kVectors; ++v) memcpy(chain + r * kCols + v * kLanes, &c[r][v], sizeof(F32s));
}

void walk_ieee(const Panels &panels, int row, int strip, int depth, float *chain) {
  F32s c[kHeight][kVectors];
  for (int r = 0; r < kHeight; ++r)
    for (int v = 0; v < kVectors; ++v) c[r][v] = load_vector<F32s>(chain + r * kCols + v * kLanes);
  for (int k = 0; k < depth; ++k)
    for (int v = 0; v < kVectors; ++v) {
      F32s b = load_vector<F32s>(panels.b[strip][k] + v * kLanes);
      for (int r = 0; r < kHeight; ++r) c[r][v] += panels.a[row + r][k] * b;
    }
  for (int r = 0; r < kHeight; ++r)
    for (int v = 0; v < kVectors; ++v) memcpy(chain + r * kCols + v * kLanes, &c[r][v], sizeof(F32s));
}

// ---- One block ----------------------------------------------------------------------------------------------------

using Operand = ScaledGemm::Operand;

struct Block {
  int64_t at[ScaledGemm::kOperands];  // elements from data to the block's batch
  int64_t m, n;                       // its first row and column
  int rows, cols;
};

constexpr int up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

void pack(const ScaledGemm &g, const Block &block, int64_t k, int depth, Panels &panels) {
  int padded = up(depth, kFp8Step);
  uint8_t *words = panels.words;
  alignas(64) int8_t exponents[kDepth];
  const uint8_t *a = (const uint8_t *)g.a.data + block.at[g.kA] + block.m * g.a.row_stride + k * g.a.col_stride;
  int rows = up(block.rows, kHeight);
  gather<kDepth>(a, g.a.row_stride, g.a.col_stride, block.rows, depth, rows, words);
  for (int r = 0; r < rows; ++r) {
    panels.a_finite[r] = unpack(g.a.type, words + r * kDepth, padded, panels.a[r], exponents);
    for (int i = 0; i < padded; ++i) panels.a_exponent[r][i] = int32_t(uint8_t(exponents[i]) * 0x1010101u);
  }
  const uint8_t *b = (const uint8_t *)g.b.data + block.at[g.kB] + k * g.b.row_stride + block.n * g.b.col_stride;
  gather<kTile>(b, g.b.row_stride, g.b.col_stride, depth, block.cols, padded, words);
  for (int strip = 0; strip * kTile < block.cols; ++strip)
    panels.b_finite[strip] = unpack(g.b.type, words + strip * padded * kTile, padded * kTile, panels.b[strip][0],
                                    panels.b_exponent[strip][0]);
}

inline float scale_at(const Scale &scale, int64_t batch, int64_t i, int64_t chunk) {
  int64_t at = batch + (scale.blocks ? i / kScaleGroup : i) * scale.stride + chunk * scale.chunk_stride;
  return scale.type == Type::f32 ? ((const float *)scale.data)[at] : f32_from_e8m0(((const uint8_t *)scale.data)[at]);
}

// One scale for each row or column of the block, at one chunk; 1 where there are none.
inline void read_scales(const Scale &scale, int64_t batch, int64_t first, int count, int64_t chunk, float *scales) {
  for (int i = 0; i < count; ++i) scales[i] = scale.data ? scale_at(scale, batch, first + i, chunk) : 1.0f;
}

// out = round(sum + bias) for one row of the block, after the scales that do not vary along k.
void finish_row(const ScaledGemm &g, const Block &block, int row, float *sum) {
  int64_t m = block.m + row;
  if (!g.along_k && (g.a_scale.data || g.b_scale.data)) {
    float sa = 1, sb[kCols];
    read_scales(g.a_scale, block.at[g.kAScale], m, 1, 0, &sa);
    read_scales(g.b_scale, block.at[g.kBScale], block.n, block.cols, 0, sb);
    for (int j = 0; j < block.cols; ++j) sum[j] = (sum[j] * sb[j]) * sa;
  }
  if (g.bias.data)
    dispatch(g.bias.type, [&](auto number) {
      using T = decltype(number);
      auto *bias = (const typename T::Stored *)g.bias.data + block.at[g.kBias] + m * g.bias.row_stride;
      for (int j = 0; j < block.cols; ++j) sum[j] += T::get(bias + (block.n + j) * g.bias.col_stride);
    });
  dispatch(g.out.type, [&](auto number) {
    using T = decltype(number);
    auto *out = (typename T::Stored *)g.out.data + block.at[g.kOut] + m * g.out.row_stride + block.n * g.out.col_stride;
    int j = 0;
    if (g.out.col_stride == 1)
      for (; j + kWidth <= block.cols; j += kWidth) T::store(out + j, load(sum + j));
    for (; j < block.cols; ++j) T::set(out + j * g.out.col_stride, sum[j]);
  });
}

inline float start_of(const ScaledGemm &g, const Block &block, int row, int column) {
  if (!g.accumulate) return 0;
  return ((const float *)g.out
              .data)[block.at[g.kOut] + (block.m + row) * g.out.row_stride + (block.n + column) * g.out.col_stride];
}

// Adds the chunk's chains to the total.
void fold(const ScaledGemm &g, const Block &block, int64_t chunk, float (*chain)[kCols], float (*total)[kCols]) {
  float sa[kRows], sb[kCols];
  if (g.along_k) {
    read_scales(g.a_scale, block.at[g.kAScale], block.m, block.rows, chunk, sa);
    read_scales(g.b_scale, block.at[g.kBScale], block.n, block.cols, chunk, sb);
  }
  for (int r = 0; r < block.rows; ++r)
    for (int j = 0; j < block.cols; ++j)
      total[r][j] = g.along_k ? fmaf(sa[r] * sb[j], chain[r][j], total[r][j]) : total[r][j] + chain[r][j];
}

template <Arithmetic arithmetic>
__attribute__((noinline)) void run_block(const ScaledGemm &g, const Block &block, Panels &panels) {
  auto &chain = panels.chain, &total = panels.total;
  auto &start = g.k_chunk ? total : chain;  // what accumulate continues
  memset(start, 0, sizeof start);
  for (int r = 0; r < block.rows; ++r)
    for (int j = 0; j < block.cols; ++j) start[r][j] = start_of(g, block, r, j);

  int64_t length = g.k_chunk ? g.k_chunk : g.k;
  for (int64_t begin = 0, chunk = 0; begin < g.k; begin += length, ++chunk) {
    int64_t end = g.k - begin < length ? g.k : begin + length;
    if (g.k_chunk) memset(chain, 0, sizeof chain);
    for (int64_t k = begin; k < end; k += kDepth) {
      int depth = end - k < kDepth ? int(end - k) : kDepth;
      pack(g, block, k, depth, panels);
      for (int first = 0; first < block.cols; first += kTile)
        for (int row = 0; row < block.rows; row += kHeight) {
          if (arithmetic == Arithmetic::ieee) walk_ieee(panels, row, first / kTile, depth, chain[row] + first);
          else walk_sm90(panels, row, first / kTile, depth, chain[row] + first);
        }
    }
    if (g.k_chunk) fold(g, block, chunk, chain, total);
  }
  for (int r = 0; r < block.rows; ++r) finish_row(g, block, r, start[r]);
}

// One element, straight from the operands, for want of memory.
template <Arithmetic arithmetic> float element(const ScaledGemm &g, const Block &block) {
  float start = start_of(g, block, 0, 0), total = g.k_chunk ? start : 0, chain = g.k_chunk ? 0 : start;
  const int64_t length = g.k_chunk ? g.k_chunk : g.k;
  const uint8_t *a = (const uint8_t *)g.a.data + block.at[g.kA] + block.m * g.a.row_stride;
  const uint8_t *b = (const uint8_t *)g.b.data + block.at[g.kB] + block.n * g.b.col_stride;
  for (int64_t k = 0; k < g.k; k += kFp8Step) {
    uint8_t a_words[kFp8Step] = {}, b_words[kFp8Step] = {};
    float a_values[kFp8Step], b_values[kFp8Step];
    int8_t a_exponents[kFp8Step], b_exponent[kFp8Step];
    int32_t a_exponent[kFp8Step];
    const int depth = g.k - k < kFp8Step ? int(g.k - k) : kFp8Step;
    for (int i = 0; i < depth; ++i) {
      a_words[i] = a[(k + i) * g.a.col_stride];
      b_words[i] = b[(k + i) * g.b.row_stride];
    }
    unpack(g.a.type, a_words, kFp8Step, a_values, a_exponents);
    unpack(g.b.type, b_words, kFp8Step, b_values, b_exponent);
    for (int i = 0; i < kFp8Step; ++i) a_exponent[i] = a_exponents[i];
    if (arithmetic == Arithmetic::ieee)
      for (int i = 0; i < depth; ++i) chain += a_values[i] * b_values[i];
    else chain = exact_step({a_values, a_exponent, b_values, b_exponent, 1}, chain);
    if (!g.k_chunk || ((k + kFp8Step) % length && k + kFp8Step < g.k)) continue;
    float sa = 1, sb = 1;
    if (g.along_k) {
      read_scales(g.a_scale, block.at[g.kAScale], block.m, 1, k / length, &sa);
      read_scales(g.b_scale, block.at[g.kBScale], block.n, 1, k / length, &sb);
    }
    total = g.along_k ? fmaf(sa * sb, chain, total) : total + chain;
    chain = 0;
  }
  return g.k_chunk ? total : chain;
}

// Blocks are kRows x kCols, with fewer rows where that leaves too few of them to share; of one element without memory.
template <Arithmetic arithmetic> void compute(const ScaledGemm &g, Scratch &scratch) {
  const bool large = scratch.large();
  const int64_t cols = large ? kCols : 1, col_blocks = divide_up(g.n, cols);
  int64_t rows = large ? kRows : 1;
  while (rows > 32 && g.batch.count * col_blocks * divide_up(g.m, rows) < 32) rows /= 2;
  const int64_t row_blocks = divide_up(g.m, rows);
  auto task = [&](int64_t i, Scratch &own) {
    Block block{};
    block.n = i % col_blocks * cols;
    block.m = i / col_blocks % row_blocks * rows;
    block.rows = int(g.m - block.m < rows ? g.m - block.m : rows);
    block.cols = int(g.n - block.n < cols ? g.n - block.n : cols);
    g.batch.at(i / col_blocks / row_blocks, block.at);
    if (large) return run_block<arithmetic>(g, block, *new (own.data) Panels);
    float x = element<arithmetic>(g, block);
    finish_row(g, block, 0, &x);
  };
  constexpr double kWorthAThread = 1 << 17;  // multiply-adds
  const double work = double(g.batch.count) * double(g.m) * double(g.n) * double(g.k + 1);
  parallel(g.batch.count * row_blocks * col_blocks, threads_for(work, kWorthAThread), scratch, task);
}

template <Arithmetic arithmetic> pydet_status run(const ScaledGemm &g) {
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) { compute<arithmetic>(g, scratch); });
  return PYDET_OK;
}

}  // namespace

template <> pydet_status scaled_gemm_ieee<Isa>(const ScaledGemm &g) { return run<Arithmetic::ieee>(g); }
template <> pydet_status scaled_gemm_sm90<Isa>(const ScaledGemm &g) { return run<Arithmetic::sm90>(g); }

}  // namespace pydet
