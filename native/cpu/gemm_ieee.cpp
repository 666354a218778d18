// GEMM in arithmetic `ieee` (NUMERICS.md, "GEMM"): one fmaf per k, k ascending, for every output element.
//
//   s = +0, or out under accumulate;  s = fmaf(a[m, k], b[k, n], s) for k = 0, 1, ...;  out = round(s + bias[m, n])
//   with k_chunk: s starts from +0 at every multiple of it, and D = D + s over the chunks, from D = +0 or out
//
// A task owns a block of out and walks all of k, so neither blocks nor threads show in a bit. It packs a slab of k of
// its rows of a into strips, then some steps of k of a few panels of its columns of b (both in the L2), and keeps a tile
// of strip by panel in registers (gemm_ieee_chains.h). The strip stays in the L1 and goes along the panels: down the
// strips, loads of out would wait for the stores of the tile before where rows lie a multiple of 4 KiB apart, since the
// processor compares 12 bits of their addresses. What is packed next is asked for meanwhile.
//
// A chain that a slab, panel or chunk interrupts waits as the fp32 it is, in out itself where out is fp32, else in
// scratch memory. Few columns are the few rows of the transposed problem.

#include "cpu/gemm_ieee_in_place.h"

namespace pydet {
namespace {

// ---- Blocks ------------------------------------------------------------------------------------------------------

// A task's rows and columns, and what it packs of b at a time: so many steps of k of so many columns, which are adjacent.
constexpr int64_t kBlockRows = kWidth == 16 ? 37 * 14 : 42 * 6, kBlockColumns = 2048;
constexpr int64_t kDepth = 256, kGroupColumns = 128;

// Floats of a thread's scratch memory, in this order.
constexpr int64_t kStripFloats = kWidth == 16 ? 130 * 1024 : 64 * 1024;  // a, half of an L2
constexpr int64_t kGroupFloats = kDepth * kGroupColumns;                 // b
constexpr int64_t kSumFloats = 44 * 1024;                                // chains that cannot wait in out
constexpr int64_t kSurplus = 16;                                         // that packing a strip may write past its end
static_assert(kStripFloats + kSurplus + kGroupFloats + kSumFloats + kTurnFloats <= Scratch::kLarge / 4, "all fit");
static_assert(kBlockRows * kDepth <= kStripFloats, "a block's strips fit");
constexpr int64_t kStreamFloats = 8 * 1024;  // of out, that stay in an L1 while few rows pass over b

// How out is cut into tasks, and k into slabs and panels.
struct Plan {
  int64_t rows, columns;  // of a task
  int64_t row_tasks, column_tasks;
  int64_t slab, depth;                 // steps of k that a task packs of a, and of b, at a time
  bool in_place;                       // chains wait in out
  int64_t panels;                      // that are packed together
  int64_t panel_at, sums_at, turn_at;  // in scratch memory, where the strips come first
};

// Where the unfinished chains of a tile wait: its total, and its open chunk if it has one.
struct Sums {
  Tile total, open_chunk;
};

// Takes a tile from step `begin` of k to `end`, in calls that end where chunks do. `steps` holds the columns and where
// a and b are at `begin`; a_step and b_step are bytes from k to k.
void advance(Chain chain, Steps steps, int64_t a_step, int64_t b_step, const Gemm &gemm, const Sums &sums,
             int64_t begin, int64_t end) {
  const int64_t chunk = gemm.k ? gemm.k_chunk : 0;
  do {
    const bool opens = chunk && begin % chunk == 0;
    const int64_t until = chunk ? least(end, (begin / chunk + 1) * chunk) : end;
    const bool closes = chunk && (until % chunk == 0 || until == gemm.k);
    const bool has_total = begin >= most(chunk, 1) || gemm.accumulate;
    const Tile none = {nullptr, 0};
    steps.depth = until - begin;
    steps.start = opens ? none : chunk ? sums.open_chunk : has_total ? sums.total : none;
    steps.base = has_total ? sums.total : none;
    steps.to = chunk && !closes ? sums.open_chunk : sums.total;
    steps.fold = closes;
    chain(steps);
    steps.ask = nullptr;
    steps.a = (const float *)((const char *)steps.a + steps.depth * a_step);
    steps.b = (const char *)steps.b + steps.depth * b_step;
    begin = until;
  } while (begin < end);
}

// One panel of a block.
struct Panel {
  int64_t columns, padded;
  Matrix out;
  bool in_place;           // as of the plan
  Tile total, open_chunk;  // its sums: see Sums
};

// Columns `first` to `last` of b, some steps of k, into panels.
template <class T>
void pack_group(const Matrix &b, int64_t k, int64_t depth, int64_t first, int64_t last, float *to, float *turn) {
  using Stored = typename T::Stored;
  constexpr int64_t kColumns = Tiles::kColumns;
  if (b.col_stride == 1) return pack_panels<T>((const Stored *)at(b, k, first), b.row_stride, last - first, depth, to);
  for (int64_t column = first; column < last; column += kColumns, to += depth * kColumns) {
    pack<T>((const Stored *)at(b, k, column), b.col_stride, b.row_stride, least(kColumns, last - column), depth, to,
            kColumns, turn);
  }
}

// What is packed next, of a task's a and b, after columns `first` to `last` up to step `k` of a slab.
Ahead after_group(const Plan &plan, const Matrix &a, const Matrix &b, int64_t k, int64_t k_slab, int64_t slab,
                  int64_t first, int64_t last) {
  auto of_b = [&](int64_t k, int64_t steps, int64_t column) {
    return part(b, k, least(plan.depth, steps), column, least(last - first, b.cols - column));
  };
  Ahead ahead;
  if (k < k_slab + slab) {
    ahead.add(of_b(k, k_slab + slab - k, first));
  } else if (last < b.cols) {
    ahead.add(of_b(k_slab, slab, last));
  } else if (k < a.cols) {
    const int64_t next_slab = least(plan.slab, a.cols - k);
    ahead.add(part(a, 0, a.rows, k, next_slab));
    ahead.add(of_b(k, next_slab, 0));
  }
  return ahead;
}

// out = round(a b + bias) for one task; a, b, bias and out are its own rows and columns.
template <class S, class T>
__attribute__((noinline)) void block(const Gemm &gemm, const Plan &plan, const Matrix &a, const Matrix &b,
                                     const Matrix &bias, const Matrix &out, float *scratch) {
  using Stored = typename T::Stored;
  constexpr bool kPacks = S::kWay == Way::tiles;  // else b is read where it is
  float *strips = scratch, *panel = scratch + plan.panel_at, *sums = scratch + plan.sums_at;
  float *turn = scratch + plan.turn_at;
  const int64_t k = gemm.k;
  int64_t k_slab = 0;
  do {
    const int64_t slab = least(plan.slab, k - k_slab);
    for (int64_t row = 0; row < out.rows; row += S::kRows) {
      const int64_t rows = least(S::kRows, out.rows - row);
      const Stored *a_at = (const Stored *)at(a, row, k_slab);
      pack<T>(a_at, a.row_stride, a.col_stride, rows, slab, strips + row * slab, rows, turn);
    }
    int64_t last;
    for (int64_t first = 0; first < out.cols; first = last) {
      last = least(first + plan.panels * S::kColumns, out.cols);
      if (S::kWay == Way::across && last - first > kWidth) last -= (last - first) % kWidth;
      int64_t k_panel = k_slab;
      auto panel_of = [&](int64_t column) {
        Panel p;
        p.columns = least(S::kColumns, last - column);
        p.padded = S::kWay == Way::tiles ? S::kColumns : divide_up(p.columns, kWidth) * kWidth;
        p.out = part(out, 0, out.rows, column, p.columns);
        p.in_place = plan.in_place && p.columns == p.padded;
        p.total = {(float *)p.out.data, out.row_stride};
        if (!p.in_place) p.total = {sums + (plan.in_place ? 0 : column * out.rows), p.padded};
        // The chain of an unfinished chunk, where total holds the chunks before it.
        const int64_t totals = (plan.in_place ? S::kColumns : plan.columns) * out.rows;
        p.open_chunk = {sums + totals + column * out.rows, p.padded};
        return p;
      };
      if (k_slab == 0 && gemm.accumulate) {
        for (int64_t column = first; column < last; column += S::kColumns) {
          const Panel p = panel_of(column);
          if (!p.in_place) fetch(p.out, p.total);
        }
      }
      do {
        const int64_t depth = least(plan.depth, k_slab + slab - k_panel);
        Ahead ahead;
        if constexpr (kPacks) {
          pack_group<T>(b, k_panel, depth, first, last, panel, turn);
          ahead = after_group(plan, a, b, k_panel + depth, k_slab, slab, first, last);
        }
        int64_t calls = divide_up(out.rows, S::kRows) * divide_up(last - first, S::kColumns);
        const int64_t asking = ahead.calls(depth);
        for (int64_t row = 0; row < out.rows; row += S::kRows) {
          const int64_t rows = least(S::kRows, out.rows - row);
          auto of_strip = [&](Tile tile) { return Tile{tile.p + row * tile.stride, tile.stride}; };
          const float *packed = panel;
          for (int64_t column = first; column < last; column += S::kColumns) {
            const Panel p = panel_of(column);
            Steps steps = {};
            steps.columns = p.columns;
            steps.a = strips + row * slab + (k_panel - k_slab) * rows;
            steps.b = kPacks ? (const void *)packed : at(b, k_panel, column);
            steps.b_stride = kPacks ? p.padded : S::kWay == Way::transposed ? b.col_stride : b.row_stride;
            const bool wraps = column + S::kColumns >= last;
            const Panel next = panel_of(wraps ? first : column + S::kColumns);
            steps.next = {next.total.p + (row + (wraps ? rows : 0)) * next.total.stride, next.total.stride};
            if (calls-- <= asking) ahead.ask(steps, depth);
            if (S::kWay == Way::across) {
              if (out.cols - last >= kWidth) steps.ask = at(b, k_panel, last);
              else if (k_panel + depth < k) steps.ask = at(b, k_panel + depth, 0);
            }
            const int64_t b_step = kPacks ? p.padded * size_of(Type::f32) : b.row_stride * size_of(b.type);
            advance(S::template chain<T>(rows), steps, rows * size_of(Type::f32), b_step, gemm,
                    {of_strip(p.total), of_strip(p.open_chunk)}, k_panel, k_panel + depth);
            packed += depth * p.padded;
          }
        }
        k_panel += depth;
      } while (k_panel < k_slab + slab);

      if (k_slab + slab == k) {
        for (int64_t column = first; column < last; column += S::kColumns) {
          const Panel p = panel_of(column);
          if (bias.data) {
            dispatch(bias.type,
                     [&](auto number) { add<decltype(number)>(part(bias, 0, out.rows, column, p.columns), p.total); });
          }
          if (!p.in_place) {
            dispatch(out.type, [&](auto number) { round<decltype(number)>(p.total, p.out); });
          }
        }
      }
    }
    k_slab += slab;
  } while (k_slab < k);
}

// ---- The whole of out --------------------------------------------------------------------------------------------

template <class S> Plan cut(const Gemm &gemm, int64_t threads) {
  Plan plan;
  const bool streams = S::kWay == Way::across;
  plan.in_place = gemm.out.type == Type::f32 && gemm.out.col_stride == 1;
  plan.depth = S::kWay == Way::transposed ? kStripFloats / S::kRows : streams ? kStreamDepth : kDepth;
  plan.panels = S::kWay == Way::tiles ? kGroupColumns / S::kColumns : 1;

  const bool chunks_fit = gemm.k_chunk <= plan.depth;
  if (gemm.k_chunk && chunks_fit) plan.depth -= plan.depth % gemm.k_chunk;
  const int64_t sums = (plan.in_place ? 0 : 1) + (chunks_fit ? 0 : 1);  // that a column needs

  // Blocks as large as the caches and scratch memory allow, but some for every thread.
  const int64_t step = S::kWay == Way::tiles ? S::kColumns : 4 * kWidth, most_tasks = divide_up(gemm.n, step);
  const int64_t short_of_threads = divide_up(threads, most_tasks * gemm.batch.count);
  plan.row_tasks =
      most(divide_up(gemm.m, sums ? 168 : kBlockRows), least(short_of_threads, divide_up(gemm.m, S::kRows)));
  plan.rows = divide_up(gemm.m, plan.row_tasks);
  if (S::kWay == Way::tiles) plan.rows = divide_up(plan.rows, S::kRows) * S::kRows;
  plan.row_tasks = divide_up(gemm.m, plan.rows);
  int64_t max_columns = streams ? kStreamFloats / plan.rows : kBlockColumns;
  if (sums) max_columns = least(max_columns, (kSumFloats / plan.rows - (plan.in_place ? S::kColumns : 0)) / sums);
  // Some tasks for every thread; fewer where they would be so narrow that packing their rows of a takes long.
  auto columns_for = [&](int64_t tasks) { return divide_up(gemm.n * plan.row_tasks * gemm.batch.count, tasks); };
  int64_t wanted_columns = columns_for(threads == 1 ? 1 : streams ? 2 * threads : 4 * threads);
  if (!streams && threads > 1) wanted_columns = most(wanted_columns, least(512, columns_for(2 * threads)));
  plan.columns = most(least(divide_up(wanted_columns, step), max_columns / step), 1) * step;
  plan.column_tasks = divide_up(gemm.n, plan.columns);
  plan.columns = divide_up(divide_up(gemm.n, plan.column_tasks), step) * step;  // even ones
  plan.column_tasks = divide_up(gemm.n, plan.columns);

  plan.slab = streams ? plan.depth : kStripFloats / plan.rows / plan.depth * plan.depth;
  plan.panel_at = kStripFloats + kSurplus;
  plan.sums_at = plan.panel_at + kGroupFloats;
  plan.turn_at = plan.sums_at + kSumFloats;
  return plan;
}

// One tile a task and few steps of k at a time, for the smallest scratch memory: slow, with the same bits.
Plan cut_small(const Gemm &gemm) {
  using S = Tiles;
  constexpr int64_t kSteps = kChunkMultiple, kStrip = S::kRows * kSteps + kSurplus, kPanel = S::kColumns * kSteps;
  constexpr int64_t kSums = 2 * S::kRows * S::kColumns, kTurn = kWidth * (kSteps <= kWidth ? kWidth : kLaneFloats);
  static_assert(kStrip + kPanel + kSums + kTurn <= Scratch::kSmall / 4, "all fit");
  Plan plan = {};
  plan.rows = S::kRows, plan.columns = S::kColumns;
  plan.row_tasks = divide_up(gemm.m, plan.rows), plan.column_tasks = divide_up(gemm.n, plan.columns);
  plan.slab = plan.depth = kSteps;
  plan.panels = 1;
  plan.in_place = gemm.out.type == Type::f32 && gemm.out.col_stride == 1;
  plan.panel_at = kStrip;
  plan.sums_at = plan.panel_at + kPanel;
  plan.turn_at = plan.sums_at + kSums;
  return plan;
}

template <class S> void compute(const Gemm &gemm, const Plan &plan, int64_t threads, Scratch &scratch) {
  const int64_t tasks_each = plan.row_tasks * plan.column_tasks;
  parallel(tasks_each * gemm.batch.count, threads, scratch, [&](int64_t task, Scratch &own) {
    const BatchOffsets at = batch_offsets(gemm.batch, task / tasks_each);
    const int64_t row = task % tasks_each % plan.row_tasks * plan.rows, rows = least(plan.rows, gemm.m - row);
    const int64_t column = task % tasks_each / plan.row_tasks * plan.columns;
    const int64_t columns = least(plan.columns, gemm.n - column);
    auto of_task = [](Matrix matrix, int64_t offset, int64_t row, int64_t rows, int64_t column, int64_t columns) {
      if (matrix.data) matrix.data += offset * size_of(matrix.type);
      return part(matrix, row, rows, column, columns);
    };
    const Matrix a_block = of_task(gemm.a, at.a, row, rows, 0, gemm.k);
    const Matrix b_block = of_task(gemm.b, at.b, 0, gemm.k, column, columns);
    const Matrix bias_block = of_task(gemm.bias, at.bias, row, rows, column, columns);
    const Matrix out_block = of_task(gemm.out, at.out, row, rows, column, columns);
    dispatch(gemm.a.type, [&](auto number) {
      block<S, decltype(number)>(gemm, plan, a_block, b_block, bias_block, out_block, (float *)own.data);
    });
  });
}

}  // namespace

template <> Chain tile_chain<Isa>(int64_t rows) { return Tiles::chain<Number<Type::f32>>(rows); }

template <> pydet_status gemm_ieee<Isa>(const Gemm &problem) {
  constexpr double kWorthAThread = 3 << 19;  // some 30 us, as long as a sleeping thread takes to come
  const bool few_columns =
      problem.n <= kWidth && problem.m > 2 * kWidth && !(problem.n > Transposed::kRows && is_small(problem));
  const Gemm &gemm = few_columns ? transposed(problem) : problem;
  const double m = double(gemm.m), n = double(gemm.n), k = double(gemm.k);
  const double work = (m * n * k + 8 * (m + n) * k) * double(gemm.batch.count);  // an element read costs as 8 fmaf
  const int64_t threads = threads_for(work, kWorthAThread);
  const bool row_major_b = gemm.b.col_stride == 1;
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) {
    if (is_small(gemm) && (row_major_b || scratch.large())) {
      compute_in_place(gemm, threads, scratch);
    } else if (!scratch.large()) {
      compute<Tiles>(gemm, cut_small(gemm), threads, scratch);
    } else if (row_major_b && gemm.m <= (gemm.b.type == Type::f32 ? 6 : Across::kRows) && gemm.n > Tiles::kColumns) {
      compute<Across>(gemm, cut<Across>(gemm, threads), threads, scratch);
    } else if (!row_major_b && gemm.m <= Transposed::kRows) {
      compute<Transposed>(gemm, cut<Transposed>(gemm, threads), threads, scratch);
    } else {
      compute<Tiles>(gemm, cut<Tiles>(gemm, threads), threads, scratch);
    }
  });
  return PYDET_OK;
}

}  // namespace pydet
