// Rotary embeddings: the table of their cosines and sines, and pairs of elements turned by it, once a call is checked.
#pragma once

#include "core/operation.h"

namespace pydet {

// cos and sin of position times frequency, times scale.
struct RotaryTable {
  Device device;
  void *stream;
  int64_t rows, inner, n;  // rows: positions; n: frequencies
  Columns whole;           // positions, where they are whole numbers,
  Vector real;             // or others
  Vector frequencies;
  float scale;
  bool twice;  // columns [n, 2 n) are the first n once more
  Rows cos, sin;

  uint64_t needs() const { return when(inner < rows, kTwoStrides); }
};

template <> struct Operation<RotaryTable> : AlwaysIeee {
  static constexpr const char *name = "rotary_table";
  static Type input(const RotaryTable &t) { return t.cos.type; }
  template <class Show> static void memory(const RotaryTable &t, Show show) {
    show(t.whole.data, t.real.data, t.frequencies.data, t.cos.data, t.sin.data);
  }
  static bool lay_well(RotaryTable &table) { return give_room(table.cos), give_room(table.sin), true; }
  using Functions = FunctionList<pydet_rotary_table, pydet_rotary>;
  static Items<pydet_exchange_method> python();
};

// Heads of each token, x turned into y.
struct TurnedHeads {
  Rows x, y;  // the first head of each token; data is NULL where absent
  int64_t x_stride, y_stride, heads;
};

struct Rotary {
  Device device;
  void *stream;
  int64_t rows, inner, n, turned;  // rows: tokens; n: elements of a head, of which the first `turned` are turned
  TurnedHeads q, k;
  Rows cos, sin;
  bool whole;                       // the table has a number for each element of a pair, else one for both
  bool neighbours, out_neighbours;  // pairs of x, and where y has them: elements next to each other, else half apart
  bool in_fp32;                     // one rounding; else of each step
  bool transposed;                  // back: what the gradient is

  uint64_t needs() const {
    return when(inner < rows, kTwoStrides) | when(neighbours || out_neighbours, kNeighbours) | when(in_fp32, kWideSum) |
           when(transposed, kRowGradient);
  }
  PYDET_INLINE int64_t pairs() const { return turned / 2; }
  PYDET_INLINE bool table_neighbours() const { return transposed ? neighbours : out_neighbours; }
};

template <> struct Operation<Rotary> : AlwaysIeee {
  static constexpr const char *name = "rotary";
  static Type input(const Rotary &r) { return r.q.x.type; }
  template <class Show> static void memory(const Rotary &r, Show show) {
    show(r.q.x.data, r.q.y.data, r.k.x.data, r.k.y.data, r.cos.data, r.sin.data);
  }
  static bool lay_well(Rotary &r) {
    for (Rows *rows : {&r.q.x, &r.q.y, &r.k.x, &r.k.y, &r.cos, &r.sin}) give_room(*rows);
    for (TurnedHeads *heads : {&r.q, &r.k}) {
      heads->x_stride = with_room(heads->x_stride);
      heads->y_stride = with_room(heads->y_stride);
    }
    return true;
  }
};

}  // namespace pydet
