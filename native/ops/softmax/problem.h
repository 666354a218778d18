// Softmax, its logarithm, one column of that, and their gradients, once a call is checked.
#pragma once

#include "core/operation.h"

namespace pydet {

enum class SoftmaxKind : int32_t { softmax, log_softmax, log_prob, log_prob_backward };

// Where rows lie in slabs, as those of log_prob_backward may (the head's), whose y then takes the place of x: columns
// c * columns and the next of all rows are a matrix of so many columns, for c = 0 at `first`, else at
// x + (c - 1) * bytes.
struct Slabs {
  int64_t columns, bytes;  // columns: 0 where there are none, else a multiple of kSlabColumns
  char *first;
};
constexpr int64_t kSlabColumns = 2048;

struct Softmax {
  Device device;
  void *stream;
  int64_t rows, inner, n;
  SoftmaxKind kind;
  Rows x, y;      // y: dx of log_prob_backward; absent of log_prob
  Columns index;  // of the last two kinds
  Vector log_prob,
      dlog_prob;  // one a row, fp32: the result of log_prob (of its gradient too, if it is there), an input
  Slabs slabs;

  uint64_t needs() const {
    const bool gradient = kind == SoftmaxKind::log_prob_backward;
    return when(inner < rows, kTwoStrides) | when(kind == SoftmaxKind::log_softmax, kLogarithm) |
           when(index.data, kColumn) | when(gradient, kRowGradient) | when(gradient && log_prob.data, kLogProbs) |
           when(slabs.columns, kSlabs);
  }
};

// The slab c of row r of p.x, from the slab's first column on.
template <class Problem> PYDET_HD char *slab_row(const Problem &p, int64_t c, int64_t r) {
  char *const slab = c == 0 ? p.slabs.first : p.x.data + (c - 1) * p.slabs.bytes;
  return slab + r * p.slabs.columns * size_of(p.x.type);
}

template <> struct Operation<Softmax> : AlwaysIeee {
  static constexpr const char *name = "softmax";
  static Type input(const Softmax &s) { return s.x.type; }
  template <class Show> static void memory(const Softmax &s, Show show) {
    show(s.x.data, s.y.data, s.index.data, s.log_prob.data, s.dlog_prob.data, s.slabs.first);
  }
  static bool lay_well(Softmax &softmax) { return give_room(softmax.x), give_room(softmax.y), true; }
  using Functions = FunctionList<pydet_softmax, pydet_log_prob, pydet_log_prob_backward>;
  static Items<pydet_exchange_method> python();
  static Items<pydet_xla_handler> xla();
};

struct SoftmaxBackward {
  Device device;
  void *stream;
  int64_t rows, inner, n;
  bool log;
  Rows dy, y, dx;

  uint64_t needs() const { return when(inner < rows, kTwoStrides) | when(log, kLogarithm); }
};

template <> struct Operation<SoftmaxBackward> : AlwaysIeee {
  static constexpr const char *name = "softmax_backward";
  static Type input(const SoftmaxBackward &s) { return s.dy.type; }
  template <class Show> static void memory(const SoftmaxBackward &s, Show show) {
    show(s.dy.data, s.y.data, s.dx.data);
  }
  static bool lay_well(SoftmaxBackward &softmax) {
    return give_room(softmax.dy), give_room(softmax.y), give_room(softmax.dx), true;
  }
  using Functions = FunctionList<pydet_softmax_backward>;
};

}  // namespace pydet
