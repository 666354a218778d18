// The sum of parts in a fixed order, once a call is checked.
#pragma once

#include "core/operation.h"

namespace pydet {

// The ranks of a fold across devices; none where `ranks` is 0.
struct Peers {
  int32_t ranks, rank;
  bool gathered, scatter;
  uint32_t timeout_ms;
  char *memory[PYDET_FOLD_RANKS];  // of each rank
  uint64_t memory_size;
  uint64_t word;
  uint64_t *fault;
  int32_t first_sums;    // 0, or the parts of each rank, of which rank 0 gives the sum
  int32_t from;          // the rank that raises `flag`
  const uint64_t *flag;  // NULL, or where `word` is once this rank's own parts are there, which alone are folded

  int32_t parts_of_each(int32_t count) const { return first_sums ? first_sums : count; }
};

// out[i] = round(D + bias[i % bias_period]), D the sum of the parts' element i. All contiguous, `size` elements of out.
struct Fold {
  Device device;
  void *stream;
  const float *parts[PYDET_FOLD_PARTS];
  int32_t count;
  bool tree, accumulate;
  bool copies;  // its one part has out's type, and is out, once peers.flag is up
  int64_t size, bias_period;
  Vector bias, out;
  Peers peers;

  uint64_t needs() const {
    return when(bias.data, kBias) | when(accumulate, kAccumulate) | when(tree, kTree) | when(peers.ranks, kPeers);
  }
};

template <> struct Operation<Fold> : AlwaysIeee {
  static constexpr const char *name = "fold";
  static Type input(const Fold &) { return Type::f32; }
  template <class Show> static void memory(const Fold &f, Show show) {
    for (int i = 0; i < f.count; ++i) show(f.parts[i]);
    if (f.peers.ranks) show(f.peers.memory[f.peers.rank]);
    show(f.bias.data, f.out.data);
  }
  using Functions = FunctionList<pydet_fold>;
  static Items<pydet_exchange_method> python();
  static Items<pydet_xla_handler> xla();
};

}  // namespace pydet
