// Recurrences over tokens, once a call is checked: the selective scan of state-space models, the gated delta rule, and the
// causal convolution that goes before either (NUMERICS.md, "Scans").
#pragma once

#include "core/operation.h"

namespace pydet {

// An operand of up to four dimensions: strides in elements; data is NULL where it is absent.
struct Strided {
  char *data;
  Type type;
  int64_t stride[4];

  PYDET_INLINE char *at(int64_t offset) const { return data + offset * size_of(type); }
};

// A state, or a key, has at most so many elements.
constexpr int64_t kMostStates = 512;
constexpr int64_t kMostTaps = 64;

// The lanes of a sum over a state: element n is of lane (n div 4) mod 8, which walks its elements ascending from +0. Lanes
// are joined as those of a row are, partners 4, 2, 1 apart.
constexpr int kScanLanes = 8, kScanLaneElements = 4;
constexpr int kScanRound = kScanLanes * kScanLaneElements;

// The sequences of a call: those of the batch, or without one those of a pack, [starts[s], starts[s + 1]) of its tokens.
struct Sequences {
  int64_t count, tokens;
  const void *starts;  // NULL: a batch
  bool wide;           // int64, else int32

  struct Range {
    int64_t batch, begin, end;
  };
  PYDET_INLINE int64_t start(int64_t s) const {
    const int64_t start = wide ? static_cast<const int64_t *>(starts)[s] : static_cast<const int32_t *>(starts)[s];
    return start < 0 ? 0 : start > tokens ? tokens : start;
  }
  PYDET_INLINE Range range(int64_t s) const {
    if (!starts) return {s, 0, tokens};
    const int64_t begin = start(s), end = start(s + 1);
    return {0, begin, end < begin ? begin : end};
  }
};

constexpr uint64_t scan_needs(const Strided &initial, const Strided &final, const Sequences &sequences) {
  return when(initial.data, kInitialState) | when(final.data, kFinalState) | when(sequences.starts, kPacked);
}

// Of each head, with S [states, width] from `initial` or +0, token by token:
//   u = dt x,   S = fmaf(u, b, exp(dt a) S),   y = round(fmaf(d, x, the sum over the states of c S))
struct SelectiveScan {
  Device device;
  void *stream;
  Sequences sequences;
  int64_t heads, width, groups, states;  // heads of a group are neighbours
  Strided x, dt, a, b, c, d;  // [batch, token, head, .], [., ., head], [head, state or .], [., ., group, state]
  Strided initial, y, final;  // states [sequence, head, width, state]
  bool each_state;            // a has a number for each state

  uint64_t needs() const {
    return scan_needs(initial, final, sequences) | when(each_state, kEachState) | when(d.data, kSkip);
  }
};

template <> struct Operation<SelectiveScan> : AlwaysIeee {
  static constexpr const char *name = "selective_scan";
  static Type input(const SelectiveScan &s) { return s.x.type; }
  template <class Show> static void memory(const SelectiveScan &s, Show show) {
    show(s.x.data, s.dt.data, s.a.data, s.b.data, s.c.data, s.d.data, s.initial.data, s.y.data, s.final.data,
         s.sequences.starts);
  }
  using Functions =
      FunctionList<pydet_selective_scan, pydet_gated_delta, pydet_causal_conv1d, pydet_selective_scan_backward,
                   pydet_selective_scan_backward_workspace, pydet_gated_delta_backward,
                   pydet_gated_delta_backward_workspace, pydet_causal_conv1d_backward>;
  static Items<pydet_exchange_method> python();
};

// Of each head, with S [keys, width] from `initial` or +0, token by token:
//   S = exp(g) S,   w = beta (v - the sum over the keys of k S),   S = fmaf(k, w, S),   o = round(the sum of q S)
struct GatedDelta {
  Device device;
  void *stream;
  Sequences sequences;
  int64_t heads, width, groups, keys;  // heads of one key and query are neighbours
  Strided q, k, v, g, beta;            // [batch, token, group, key], [., ., head, width], [., ., head]
  Strided initial, o, final;           // states [sequence, head, key, width]

  uint64_t needs() const { return scan_needs(initial, final, sequences); }
};

template <> struct Operation<GatedDelta> : AlwaysIeee {
  static constexpr const char *name = "gated_delta";
  static Type input(const GatedDelta &s) { return s.v.type; }
  template <class Show> static void memory(const GatedDelta &s, Show show) {
    show(s.q.data, s.k.data, s.v.data, s.g.data, s.beta.data, s.initial.data, s.o.data, s.final.data,
         s.sequences.starts);
  }
};

// y[t, c] = round(the chain over the taps, ascending, of w[c, j] x[t - taps + 1 + j, c], and bias[c]). Before a sequence
// lies `initial`, its last row nearest, or +0.
struct CausalConv1d {
  Device device;
  void *stream;
  Sequences sequences;
  int64_t channels, taps;
  Strided x, w, bias, initial, y;  // [batch, token, channel], [channel, tap], [channel], [sequence, taps - 1, channel]

  uint64_t needs() const { return scan_needs(initial, Strided{}, sequences) | when(bias.data, kBias); }
};

template <> struct Operation<CausalConv1d> : AlwaysIeee {
  static constexpr const char *name = "causal_conv1d";
  static Type input(const CausalConv1d &s) { return s.x.type; }
  template <class Show> static void memory(const CausalConv1d &s, Show show) {
    show(s.x.data, s.w.data, s.bias.data, s.initial.data, s.y.data, s.sequences.starts);
  }
};

// ---- Their gradients ---------------------------------------------------------------------------------------------------

// A sum over columns goes by blocks of 32 (of which absent ones count as +0) whose sums are added ascending. States that the
// way back needs are computed again from those before every 32nd token of a sequence, of many states before more: which they
// are decides no bit.
constexpr int kScanColumns = 32;
PYDET_HD constexpr int checkpoint_tokens(int64_t states) { return states <= 64 ? 32 : states <= 256 ? 16 : 8; }

// Where the parts of sums and those states lie, all in fp32. A block of columns is of a group's, or of a head's of it.
struct ScanWorkspace {
  float *data;
  int64_t sequences, tokens, heads, groups, states;  // tokens: of all sequences
  int64_t blocks, parts;  // of columns: those of a group; the most that one head has a part in
  int64_t columns;        // of a token, of each of which two numbers are kept

  static constexpr int kRows = 2, kOfHeads = 3;

  PYDET_INLINE int64_t row_floats() const { return kRows * tokens * groups * blocks * states; }
  // What lies behind begins at a multiple of 16 bytes where the workspace does and states are a multiple of four.
  PYDET_INLINE int64_t head_floats() const { return divide_up(kOfHeads * tokens * heads * parts, 4) * 4; }
  PYDET_INLINE int64_t block_floats() const { return states * kScanColumns; }
  PYDET_INLINE int64_t floats() const {
    return row_floats() + head_floats() +
           (tokens / checkpoint_tokens(states) + sequences) * groups * blocks * block_floats() + column_floats() +
           own_floats();
  }
  PYDET_INLINE int64_t column_floats() const { return 2 * tokens * columns; }
  // What the CPU works in where it has no memory of its own.
  PYDET_INLINE int64_t own_floats() const { return 4 * block_floats() + 2 * states; }
  PYDET_INLINE float *own() const { return data + floats() - own_floats(); }
  // One of two numbers of a token's columns.
  PYDET_INLINE float *of_column(int which, int64_t token) const {
    return own() - column_floats() + (which * tokens + token) * columns;
  }
  // A block's part of one of the two sums over columns at a token: [states].
  PYDET_INLINE float *row(int which, int64_t token, int64_t group, int64_t block) const {
    return data + (((which * tokens + token) * groups + group) * blocks + block) * states;
  }
  // Parts of the three sums of a head at a token: [parts].
  PYDET_INLINE float *of_head(int which, int64_t token, int64_t head) const {
    return data + row_floats() + ((which * tokens + token) * heads + head) * parts;
  }
  // The kept states before the token so many after the sequence's first one, which is `begin` among all: [states, 32 columns].
  PYDET_INLINE float *states_at(int64_t sequence, int64_t begin, int64_t after, int64_t group, int64_t block) const {
    const int64_t every = checkpoint_tokens(states), at = begin / every + sequence + after / every;
    return data + row_floats() + head_floats() + ((at * groups + group) * blocks + block) * block_floats();
  }
};

inline ScanWorkspace selective_workspace(int64_t sequences, int64_t tokens, int64_t heads, int64_t width,
                                         int64_t groups, int64_t states) {
  return {nullptr,
          sequences,
          tokens,
          heads,
          groups,
          states,
          divide_up(heads / groups * width, kScanColumns),
          (width + kScanColumns - 2) / kScanColumns + 1,
          0};
}
inline ScanWorkspace delta_workspace(int64_t sequences, int64_t tokens, int64_t heads, int64_t width, int64_t groups,
                                     int64_t keys) {
  const int64_t of_head = divide_up(width, kScanColumns);
  return {nullptr, sequences, tokens, heads, groups, keys, heads / groups * of_head, of_head, heads * width};
}

struct SelectiveScanBackward {
  Device device;
  void *stream;
  Sequences sequences;
  int64_t heads, width, groups, states;
  Strided dy, dfinal, x, dt, a, b, c, d, initial;
  Strided dx, ddt, da, db, dc, dd, dinitial;  // da [sequence, head, state or .], dd [sequence, head]
  bool each_state;
  ScanWorkspace workspace;

  uint64_t needs() const {
    return scan_needs(initial, Strided{}, sequences) | when(each_state, kEachState) | when(d.data, kSkip) |
           when(dfinal.data, kFinalGradient) | when(dinitial.data, kInitialGradient);
  }
};

template <> struct Operation<SelectiveScanBackward> : AlwaysIeee {
  static constexpr const char *name = "selective_scan_backward";
  static Type input(const SelectiveScanBackward &s) { return s.x.type; }
  template <class Show> static void memory(const SelectiveScanBackward &s, Show show) {
    show(s.dy.data, s.dfinal.data, s.x.data, s.dt.data, s.a.data, s.b.data, s.c.data, s.d.data, s.initial.data,
         s.dx.data, s.ddt.data, s.da.data, s.db.data, s.dc.data, s.dd.data, s.dinitial.data, s.sequences.starts,
         s.workspace.data);
  }
};

struct GatedDeltaBackward {
  Device device;
  void *stream;
  Sequences sequences;
  int64_t heads, width, groups, keys;
  Strided dout, dfinal, q, k, v, g, beta, initial;
  Strided dq, dk, dv, dg, dbeta, dinitial;
  ScanWorkspace workspace;

  uint64_t needs() const {
    return scan_needs(initial, Strided{}, sequences) | when(dfinal.data, kFinalGradient) |
           when(dinitial.data, kInitialGradient);
  }
};

template <> struct Operation<GatedDeltaBackward> : AlwaysIeee {
  static constexpr const char *name = "gated_delta_backward";
  static Type input(const GatedDeltaBackward &s) { return s.v.type; }
  template <class Show> static void memory(const GatedDeltaBackward &s, Show show) {
    show(s.dout.data, s.dfinal.data, s.q.data, s.k.data, s.v.data, s.g.data, s.beta.data, s.initial.data, s.dq.data,
         s.dk.data, s.dv.data, s.dg.data, s.dbeta.data, s.dinitial.data, s.sequences.starts, s.workspace.data);
  }
};

// Of x, of what lies before a sequence, and for each sequence by itself of w and bias, in fp32. What is not wanted is absent.
struct CausalConv1dBackward {
  Device device;
  void *stream;
  Sequences sequences;
  int64_t channels, taps;
  Strided dy, x, w, initial, dx, dw, dbias, dinitial;  // dw [sequence, channel, tap], dbias [sequence, channel]

  uint64_t needs() const {
    return scan_needs(initial, Strided{}, sequences) | when(dx.data, kRowGradient) | when(dw.data, kWeightGradient) |
           when(dbias.data, kBiasGradient) | when(dinitial.data, kInitialGradient);
  }
};

template <> struct Operation<CausalConv1dBackward> : AlwaysIeee {
  static constexpr const char *name = "causal_conv1d_backward";
  static Type input(const CausalConv1dBackward &s) { return s.dy.type; }
  template <class Show> static void memory(const CausalConv1dBackward &s, Show show) {
    show(s.dy.data, s.x.data, s.w.data, s.initial.data, s.dx.data, s.dw.data, s.dbias.data, s.dinitial.data,
         s.sequences.starts);
  }
};

}  // namespace pydet
