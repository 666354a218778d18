// Sampling of tokens, and the k largest of a row, once a call is checked.
#pragma once

#include "core/operation.h"

namespace pydet {

// Columns of a row that may be drawn from: the sum of their masses is below 2^64.
constexpr int64_t kMostColumns = int64_t(1) << 23;

struct Sample {
  Device device;
  void *stream;
  int64_t rows, inner, n;
  Rows x;
  Columns seed, position;  // one a row
  float temperature, top_p, min_p;
  int64_t top_k;
  Vector temperatures, top_ps, min_ps;  // one a row, fp32, in the place of the number; may be absent
  Columns top_ks;                       // likewise
  Vector log_prob, filtered_log_prob;   // one a row, fp32; may be absent
  char *token;                          // one a row, int64

  bool filters() const { return top_k || top_p < 1.0f || min_p > 0.0f || top_ks.data || top_ps.data || min_ps.data; }
  uint64_t needs() const {
    return when(inner < rows, kTwoStrides) | when(filters(), kFilters) |
           when(log_prob.data || filtered_log_prob.data, kLogProbs);
  }
};

template <> struct Operation<Sample> : AlwaysIeee {
  static constexpr const char *name = "sample";
  static Type input(const Sample &s) { return s.x.type; }
  template <class Show> static void memory(const Sample &s, Show show) {
    show(s.x.data, s.seed.data, s.position.data, s.temperatures.data, s.top_ks.data, s.top_ps.data, s.min_ps.data,
         s.token, s.log_prob.data, s.filtered_log_prob.data);
  }
  static bool lay_well(Sample &sample) { return give_room(sample.x), true; }
  using Functions = FunctionList<pydet_sample, pydet_topk>;
  static Items<pydet_exchange_method> python();
  static Items<pydet_xla_handler> xla();
};

struct TopK {
  Device device;
  void *stream;
  int64_t rows, inner, n, k;
  Rows x;
  Vector values;  // [rows, k]
  char *index;    // [rows, k], int64

  uint64_t needs() const { return when(inner < rows, kTwoStrides); }
};

template <> struct Operation<TopK> : AlwaysIeee {
  static constexpr const char *name = "topk";
  static Type input(const TopK &t) { return t.x.type; }
  template <class Show> static void memory(const TopK &t, Show show) { show(t.x.data, t.values.data, t.index); }
  static bool lay_well(TopK &topk) { return give_room(topk.x), true; }
};

}  // namespace pydet
