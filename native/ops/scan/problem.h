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
  using Functions = FunctionList<pydet_selective_scan, pydet_gated_delta, pydet_causal_conv1d>;
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

}  // namespace pydet
