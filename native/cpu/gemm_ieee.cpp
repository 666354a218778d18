// GEMM in arithmetic `ieee` (NUMERICS.md, "GEMM"): one fmaf per k, k ascending, for every output element.
//
//   s = +0, or out under accumulate;  s = fmaf(a[m, k], b[k, n], s) for k = 0, 1, ...;  out = round(s + bias[m, n])
//   with k_chunk: s starts from +0 at every multiple of it, and D = D + s over the chunks, from D = +0 or out
//
// A task owns a block of out and walks all of k, so neither blocks nor threads show in a bit. It packs `slab` steps of k
// of its rows of a into strips (L2), then, panel by panel, kDepth steps of its columns of b (L1), and keeps a tile of
// strip by panel in registers: 14 by 32 with AVX-512, 6 by 16 with AVX2. A chain that a slab, panel or chunk interrupts
// waits as the fp32 it is, in out itself where out is fp32, else on the stack. Few rows take wider tiles (for 3 rows, 8
// vectors), which alone hide the latency of an fmaf; and a row-major b is then streamed, some rows of k at a time, along
// all columns, unpacked if it is fp32. Few columns are the few rows of the transposed problem.

#include "parallel.h"
#include "simd.h"

namespace pydet {
namespace {

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Asks for the line `bytes` on, whatever is there, before it is read.
inline void prefetch(const void *p, int64_t bytes = 512) { __builtin_prefetch((const char *)p + bytes); }
inline void prefetch_once(const void *p, int64_t bytes = 512) { __builtin_prefetch((const char *)p + bytes, 0, 0); }

// ---- Chains ---------------------------------------------------------------------------------------

// Rows and columns of fp32, `stride` floats from row to row; p is NULL for all +0.
struct Tile {
  float *p;
  int64_t stride;
};

// Some steps of k of one tile's chains: s = start, then fmaf over `depth` steps, then base + s if `fold`, into `to`.
struct Steps {
  int64_t depth, columns;
  const float *a;    // a strip: its rows of one k are adjacent
  const void *b;     // a panel: k by columns, fp32, b_stride from k to k; for Way::transposed, see there
  int64_t b_stride;
  Tile start, base, to;
  bool fold;
};

inline Floats started(const Tile &tile, int64_t row, int64_t column) {
  return tile.p ? load(tile.p + row * tile.stride + column) : zero();
}

inline void finish(const Steps &steps, int64_t row, int64_t column, Floats s) {
  if (steps.fold) s = started(steps.base, row, column) + s;
  store(steps.to.p + row * steps.to.stride + column, canonical(s));  // a NaN stays one, so it may be canonical early
}

// Way::tiles: all chains of a tile of kRows by kVectors side by side in registers.
template <int kRows, int kVectors> void chain_tile(const Steps &steps) {
  Floats s[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) s[r][v] = started(steps.start, r, v * kWidth);
  }
  const float *a = steps.a, *b = (const float *)steps.b;
  for (int64_t k = 0; k < steps.depth; ++k, a += kRows, b += steps.b_stride) {
    Floats b_k[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) b_k[v] = load(b + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      Floats a_k = broadcast(a[r]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) s[r][v] = fma(a_k, b_k[v], s[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) finish(steps, r, v * kWidth, s[r][v]);
  }
}

// Way::across: one vector of columns after the other, all its steps of k at once. Each load then walks along one row of
// b, as the hardware's prefetcher expects, and the vectors' chains overlap.
constexpr int kStreamDepth = 8;  // rows of b that are walked at a time

template <int kRows> void chain_across(const Steps &steps) {
  const float *b = (const float *)steps.b;
  for (int64_t c = 0; c < steps.columns; c += kWidth) {
    Floats s[kRows];
    for (int r = 0; r < kRows; ++r) s[r] = started(steps.start, r, c);
    auto step = [&](int64_t k) {
      prefetch_once(b + k * steps.b_stride + c, 1024);
      Floats b_k = load(b + k * steps.b_stride + c);
      for (int r = 0; r < kRows; ++r) s[r] = fma(broadcast(steps.a[k * kRows + r]), b_k, s[r]);
    };
    if (steps.depth == kStreamDepth) {
#pragma GCC unroll 16
      for (int k = 0; k < kStreamDepth; ++k) step(k);
    } else {
      for (int64_t k = 0; k < steps.depth; ++k) step(k);
    }
    for (int r = 0; r < kRows; ++r) finish(steps, r, c, s[r]);
  }
}

// Way::transposed: b is read where it is, elements of T adjacent along k, b_stride from column to column. kWidth columns
// by kWidth steps are transposed in registers and used there.
template <class T, int kRows, bool kFull>
inline __attribute__((always_inline)) void transposed_steps(const typename T::Stored *b, int64_t b_stride,
                                                            int64_t columns, const float *a, int64_t depth,
                                                            Floats (&s)[kRows]) {
  Floats t[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    if (kFull) prefetch_once(b + i * b_stride);
    t[i] = kFull ? T::load(b + i * b_stride) : i < columns ? T::load(b + i * b_stride, depth) : zero();
  }
  transpose(t);
#pragma GCC unroll 16
  for (int k = 0; k < (kFull ? kWidth : depth); ++k) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) s[r] = fma(broadcast(a[k * kRows + r]), t[k], s[r]);
  }
}

template <class T, int kRows> void chain_transposed(const Steps &steps) {
  using Stored = typename T::Stored;
  for (int64_t c = 0; c < steps.columns; c += kWidth) {
    const Stored *b = (const Stored *)steps.b + c * steps.b_stride;
    const int64_t columns = steps.columns - c;
    Floats s[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) s[r] = started(steps.start, r, c);
    // The first steps reach up to a multiple of the vector: later loads then do not straddle lines.
    int64_t count = kWidth - int64_t(uintptr_t(b) / sizeof(Stored) % kWidth);
    for (int64_t k = 0; k < steps.depth; k += count, count = kWidth) {
      const float *a = steps.a + k * kRows;
      if (count == kWidth && columns >= kWidth && steps.depth - k >= kWidth) {
        transposed_steps<T, kRows, true>(b + k, steps.b_stride, columns, a, kWidth, s);
      } else {
        count = least(count, steps.depth - k);
        transposed_steps<T, kRows, false>(b + k, steps.b_stride, columns, a, count, s);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) finish(steps, r, c, s[r]);
  }
}

// A way, its strip's height and its panel's width, and the code for each number of rows up to that.
enum class Way { tiles, across, transposed };

template <Way way, int rows, int vectors> struct Shape {
  static constexpr Way kWay = way;
  static constexpr int kRows = rows, kColumns = vectors * kWidth;
  template <class T, int row = rows> static auto chain(int64_t count) -> void (*)(const Steps &) {
    if constexpr (row > 1) {
      if (count < row) return chain<T, row - 1>(count);
    }
    if constexpr (way == Way::across) return chain_across<row>;
    if constexpr (way == Way::transposed) return chain_transposed<T, row>;
    return chain_tile<row, vectors>;
  }
};

using Tiles = Shape<Way::tiles, kWidth == 16 ? 14 : kWidth == 8 ? 6 : 4, kWidth == 1 ? 4 : 2>;
using Across = Shape<Way::across, 3, 32>;
using Transposed = Shape<Way::transposed, kWidth == 16 ? 8 : 4, 16>;

// ---- Blocks ------------------------------------------------------------------------------------------------------

// Floats on the stack of a thread: 464 KiB.
constexpr int64_t kStripFloats = 64 * 1024;  // a, half of a 1 MiB L2
constexpr int64_t kPanelFloats = 8 * 1024;   // b, most of an L1
constexpr int64_t kSumFloats = 44 * 1024;    // chains that cannot wait in out
constexpr int64_t kBlockRows = 256, kBlockColumns = 1024;

template <class S> constexpr int64_t kDepth = least(kPanelFloats / S::kColumns, kStripFloats / kBlockRows);

// How out is cut into tasks, and k into slabs and panels.
struct Plan {
  int64_t rows, columns;          // of a task
  int64_t row_tasks, column_tasks;
  int64_t slab, depth;            // steps of k that a task packs of a, and of b, at a time
  bool in_place;                  // chains wait in out
  bool unpacked;                  // b is read where it is
};

// kWidth lanes, each lane's steps of k adjacent, to[k * ld + lane]. Lanes from the first `lanes` on count as +0. First a
// few lines of each lane in turn go to a buffer: lanes a power of two apart would evict each other from the L1 while
// 16 of them are walked side by side.
template <class T>
void pack_transposed(const typename T::Stored *from, int64_t lane_stride, int64_t lanes, int64_t depth, float *to,
                     int64_t ld) {
  using Stored = typename T::Stored;
  constexpr int64_t kRun = 64, kStride = kRun + kWidth;
  alignas(64) float buffer[kWidth * kStride];
  for (int64_t begin = 0; begin < depth; begin += kRun) {
    const int64_t run = least(depth - begin, kRun);
    for (int64_t i = 0; i < kWidth; ++i) {
      const Stored *lane = from + i * lane_stride + begin;
      float *to_lane = buffer + i * kStride;
      if (i < lanes && run == kRun) {
#pragma GCC unroll 8
        for (int64_t k = 0; k < kRun; k += kWidth) store(to_lane + k, T::load(lane + k));
      } else {
        for (int64_t k = 0; k < run; k += kWidth) store(to_lane + k, i < lanes ? T::load(lane + k, run - k) : zero());
      }
    }
    for (int64_t k = 0; k < run; k += kWidth) {
      Floats t[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) {
        prefetch(from + i * lane_stride + begin + k);
        t[i] = load(buffer + i * kStride + k);
      }
      transpose(t);
      float *tile = to + (begin + k) * ld;
      if (run - k >= kWidth) {
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) store(tile + i * ld, t[i]);
      } else {
        for (int i = 0; i < run - k; ++i) store(tile + i * ld, t[i]);
      }
    }
  }
}

// Lanes by steps of k, as fp32: to[k * ld + lane], lanes past the last +0. Either stride is 1. ld is a multiple of
// kWidth, or less than that: then each step writes up to kWidth floats, the surplus overwritten by the next step's.
template <class T>
void pack(const typename T::Stored *from, int64_t lane_stride, int64_t k_stride, int64_t lanes, int64_t depth, float *to,
          int64_t ld) {
  if (k_stride != 1) {
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t v = 0; v < ld; v += kWidth) {
        prefetch(from + k * k_stride + v);
        store(to + k * ld + v, T::load(from + k * k_stride + v, most(lanes - v, 0)));
      }
    }
  } else if (ld == 1) {
    pack<T>(from, 1, 0, depth, 1, to, depth);
  } else {
    for (int64_t v = 0; v < ld; v += kWidth) {
      pack_transposed<T>(from + v * lane_stride, lane_stride, lanes - v, depth, to + v, ld);
    }
  }
}

// One element's address; NULL where there is no matrix.
char *at(const Matrix &matrix, int64_t row, int64_t column) {
  if (!matrix.data) return nullptr;
  return matrix.data + (row * matrix.row_stride + column * matrix.col_stride) * size_of(matrix.type);
}

// tile = from, an fp32 matrix.
void fetch(const Matrix &from, Tile tile) {
  for (int64_t r = 0; r < from.rows; ++r) {
    const float *row = (const float *)at(from, r, 0);
    for (int64_t c = 0; c < from.cols; ++c) tile.p[r * tile.stride + c] = row[c * from.col_stride];
  }
}

// tile += bias, a matrix of T.
template <class T> void add(const Matrix &bias, Tile tile) {
  using Stored = typename T::Stored;
  for (int64_t r = 0; r < bias.rows; ++r) {
    const Stored *row = (const Stored *)at(bias, r, 0);
    float *sum = tile.p + r * tile.stride;
    for (int64_t c = 0; c < bias.cols; c += kWidth) {
      int64_t count = least(bias.cols - c, kWidth);
      float terms[kWidth];
      Floats term;
      if (bias.col_stride == 1) {
        term = T::load(row + c, count);
      } else {
        for (int i = 0; i < kWidth; ++i) terms[i] = i < count ? T::get(row + (c + i) * bias.col_stride) : 0.0f;
        term = load(terms);
      }
      Number<Type::f32>::store(sum + c, load(sum + c, count) + term, count);
    }
  }
}

// to = round(tile), a matrix of T.
template <class T> void round(Tile tile, const Matrix &to) {
  using Stored = typename T::Stored;
  for (int64_t r = 0; r < to.rows; ++r) {
    Stored *row = (Stored *)at(to, r, 0);
    const float *sum = tile.p + r * tile.stride;
    if (to.col_stride == 1) {
      for (int64_t c = 0; c < to.cols; c += kWidth) {
        int64_t count = least(to.cols - c, kWidth);
        T::store(row + c, load(sum + c, count), count);
      }
    } else {
      for (int64_t c = 0; c < to.cols; ++c) T::set(row + c * to.col_stride, sum[c]);
    }
  }
}

Matrix part(const Matrix &matrix, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  return {at(matrix, row, column), matrix.type, rows, columns, matrix.row_stride, matrix.col_stride};
}

// out = round(a b + bias) for one task; a, b, bias and out are its own rows and columns.
template <class S, class T>
__attribute__((noinline)) void block(const Gemm &gemm, const Plan &plan, const Matrix &a, const Matrix &b, const Matrix &bias, const Matrix &out) {
  using Stored = typename T::Stored;
  alignas(64) float strips[kStripFloats + kWidth];
  alignas(64) float panel[kPanelFloats];
  alignas(64) float sums[kSumFloats];
  const int64_t k = gemm.k, chunk = k ? gemm.k_chunk : 0;
  const int64_t b_stride = S::kWay == Way::transposed ? b.col_stride : b.row_stride;  // where it is read unpacked
  const int64_t strip_count = ceil_div(out.rows, S::kRows);
  const int64_t short_rows = out.rows / strip_count, taller = out.rows % strip_count;  // the first `taller` have one more

  int64_t k_slab = 0;
  do {
    const int64_t slab = least(plan.slab, k - k_slab);
    for (int64_t i = 0, row = 0; i < strip_count; ++i) {
      int64_t rows = short_rows + (i < taller);
      pack<T>((const Stored *)at(a, row, k_slab), a.row_stride, a.col_stride, rows, slab, strips + row * slab, rows);
      row += rows;
    }
    for (int64_t column = 0; column < out.cols; column += S::kColumns) {
      const int64_t columns = least(S::kColumns, out.cols - column);
      const Matrix out_panel = part(out, 0, out.rows, column, columns);
      const int64_t padded = S::kWay == Way::tiles ? S::kColumns : ceil_div(columns, kWidth) * kWidth;
      const bool in_place = plan.in_place && columns == padded;
      Tile total = {(float *)out_panel.data, out.row_stride};
      if (!in_place) total = {sums + (plan.in_place ? 0 : column * out.rows), padded};
      // The chain of an unfinished chunk, where total holds the chunks before it.
      const int64_t totals = (plan.in_place ? S::kColumns : plan.columns) * out.rows;
      const Tile open_chunk = {sums + totals + column * out.rows, padded};
      if (k_slab == 0 && gemm.accumulate && !in_place) fetch(out_panel, total);

      int64_t k_panel = k_slab;
      do {
        const int64_t depth = least(plan.depth, k_slab + slab - k_panel);
        const Stored *b_at = (const Stored *)at(b, k_panel, column);
        const bool unpacked = plan.unpacked && (S::kWay == Way::transposed || columns == padded);
        if (!unpacked) {
          pack<T>(b_at, b.col_stride, b.row_stride, columns, depth, panel, padded);
        } else if (S::kWay == Way::tiles) {
          for (int64_t i = 0; i < depth; ++i) {
            for (int64_t v = 0; v < S::kColumns; v += kWidth) prefetch(b_at + i * b.row_stride + v);
          }
        }
        for (int64_t i = 0, row = 0; i < strip_count; ++i) {
          const int64_t rows = short_rows + (i < taller);
          const auto run = S::template chain<T>(rows);
          auto of_strip = [&](Tile tile) { return Tile{tile.p + row * tile.stride, tile.stride}; };
          int64_t at_k = k_panel;
          do {
            const int64_t begin = at_k, offset = begin - k_panel;
            Steps steps;
            at_k = k_panel + depth;
            if (chunk) at_k = least(at_k, (begin / chunk + 1) * chunk);
            const bool closes = chunk && (at_k % chunk == 0 || at_k == k);
            steps.depth = at_k - begin;
            steps.columns = columns;
            steps.a = strips + row * slab + (begin - k_slab) * rows;
            steps.b = panel + offset * padded, steps.b_stride = padded;
            if (unpacked) steps.b = b_at + offset * b.row_stride, steps.b_stride = b_stride;
            steps.start = steps.base = {nullptr, 0};
            if (chunk ? begin % chunk != 0 : begin || gemm.accumulate) steps.start = of_strip(chunk ? open_chunk : total);
            if (begin >= chunk || gemm.accumulate) steps.base = of_strip(total);
            steps.to = of_strip(chunk && !closes ? open_chunk : total);
            steps.fold = closes;
            run(steps);
          } while (at_k < k_panel + depth);
          row += rows;
        }
        k_panel += depth;
      } while (k_panel < k_slab + slab);

      if (k_slab + slab == k) {
        if (bias.data) {
          dispatch(bias.type, [&](auto number) {
            add<decltype(number)>(part(bias, 0, out.rows, column, columns), total);
          });
        }
        if (!in_place) {
          dispatch(out.type, [&](auto number) { round<decltype(number)>(total, out_panel); });
        }
      }
    }
    k_slab += slab;
  } while (k_slab < k);
}

// ---- The whole of out --------------------------------------------------------------------------------------------

template <class S> Plan cut(const Gemm &gemm, int64_t threads) {
  Plan plan;
  const bool streams = gemm.m <= S::kRows && gemm.b.col_stride == 1 && S::kWay != Way::transposed;
  plan.in_place = gemm.out.type == Type::f32 && gemm.out.col_stride == 1;
  plan.unpacked = S::kWay == Way::transposed || (streams && gemm.b.type == Type::f32);
  plan.depth = S::kWay == Way::transposed ? kStripFloats / S::kRows : streams ? kStreamDepth : kDepth<S>;
  const bool chunks_fit = gemm.k_chunk <= plan.depth;
  if (gemm.k_chunk && chunks_fit) plan.depth -= plan.depth % gemm.k_chunk;
  const int64_t sums = (plan.in_place ? 0 : 1) + (chunks_fit ? 0 : 1);  // that a column needs on the stack

  // Blocks as large as the caches and the stack allow, then smaller until every thread has some.
  const int64_t max_rows = sums ? 168 : kBlockRows;
  plan.row_tasks = ceil_div(gemm.m, max_rows);
  plan.rows = ceil_div(gemm.m, plan.row_tasks);
  int64_t max_columns = streams ? kPanelFloats / plan.rows : kBlockColumns;
  if (sums) max_columns = least(max_columns, (kSumFloats / plan.rows - (plan.in_place ? S::kColumns : 0)) / sums);
  const int64_t wanted = threads == 1 ? 1 : streams ? 2 * threads : 4 * threads;  // the hardware likes long rows of b
  const int64_t step = S::kWay == Way::tiles ? S::kColumns : 4 * kWidth;
  const int64_t wanted_columns = ceil_div(gemm.n * plan.row_tasks * gemm.batch.count, wanted);
  plan.columns = most(least(ceil_div(wanted_columns, step), max_columns / step), 1) * step;
  plan.column_tasks = ceil_div(gemm.n, plan.columns);

  plan.slab = streams ? plan.depth : kStripFloats / plan.rows / plan.depth * plan.depth;
  return plan;
}

template <class S> void compute(const Gemm &gemm, int64_t threads) {
  const Plan plan = cut<S>(gemm, threads);
  const Batch &batch = gemm.batch;
  const int64_t tasks_each = plan.row_tasks * plan.column_tasks;
  parallel(tasks_each * batch.count, threads > 1 ? INT64_MAX : 0, [&](int64_t task) {
    int64_t a = 0, b = 0, bias = 0, out = 0, index = task / tasks_each;
    for (int d = batch.dims - 1; d >= 0; --d) {
      int64_t i = index % batch.shape[d];
      index /= batch.shape[d];
      a += i * batch.a[d], b += i * batch.b[d], bias += i * batch.bias[d], out += i * batch.out[d];
    }
    const int64_t row = task % tasks_each % plan.row_tasks * plan.rows, rows = least(plan.rows, gemm.m - row);
    const int64_t column = task % tasks_each / plan.row_tasks * plan.columns;
    const int64_t columns = least(plan.columns, gemm.n - column);
    auto of_task = [](Matrix matrix, int64_t offset, int64_t row, int64_t rows, int64_t column, int64_t columns) {
      if (matrix.data) matrix.data += offset * size_of(matrix.type);
      return part(matrix, row, rows, column, columns);
    };
    const Matrix a_block = of_task(gemm.a, a, row, rows, 0, gemm.k);
    const Matrix b_block = of_task(gemm.b, b, 0, gemm.k, column, columns);
    const Matrix bias_block = of_task(gemm.bias, bias, row, rows, column, columns);
    const Matrix out_block = of_task(gemm.out, out, row, rows, column, columns);
    dispatch(gemm.a.type, [&](auto number) {
      block<S, decltype(number)>(gemm, plan, a_block, b_block, bias_block, out_block);
    });
  });
}

Matrix transposed(const Matrix &matrix) {
  return {matrix.data, matrix.type, matrix.cols, matrix.rows, matrix.col_stride, matrix.row_stride};
}

// out^T = b^T a^T: a product does not mind the order of its factors, so neither do the bits.
Gemm transposed(const Gemm &gemm) {
  Gemm result = gemm;
  result.m = gemm.n, result.n = gemm.m;
  result.a = transposed(gemm.b), result.b = transposed(gemm.a);
  result.bias = transposed(gemm.bias), result.out = transposed(gemm.out);
  for (int d = 0; d < gemm.batch.dims; ++d) result.batch.a[d] = gemm.batch.b[d], result.batch.b[d] = gemm.batch.a[d];
  return result;
}

}  // namespace

template <> pydet_status gemm_ieee<Isa>(const Gemm &problem) {
  constexpr int64_t kWorthThreads = 1 << 20;  // some 10 us, several times what waking threads takes
  const bool few_columns = problem.n <= kWidth && problem.m > 2 * kWidth;
  const Gemm &gemm = few_columns ? transposed(problem) : problem;
  const double m = double(gemm.m), n = double(gemm.n), k = double(gemm.k);
  const double work = (m * n * k + 8 * (m + n) * k) * double(gemm.batch.count);  // an element read costs as 8 fmaf
  const int64_t threads = work < kWorthThreads ? 1 : omp_get_max_threads();
  const bool row_major_b = gemm.b.col_stride == 1;
  if (row_major_b && gemm.m <= Across::kRows && gemm.n > Tiles::kColumns) {
    compute<Across>(gemm, threads);
  } else if (!row_major_b && gemm.m <= Transposed::kRows) {
    compute<Transposed>(gemm, threads);
  } else {
    compute<Tiles>(gemm, threads);
  }
  return PYDET_OK;
}

}  // namespace pydet
