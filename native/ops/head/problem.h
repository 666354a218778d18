// The log-probability of a column under a linear layer, and its gradients, once a call is checked: products and softmax
// of the other folders, over some rows of logits at a time.
#pragma once

#include "core/operation.h"

namespace pydet {

// Without kernels of its own. log_prob, dlog_prob: one a row, contiguous, fp32. What is absent has no data.
struct LinearLogProb {
  Device device;
  void *stream;
  Matrix x, w, bias, dx, dw, dbias;  // x [rows, k], w [n, k]; bias and dbias are of one row
  Columns index;
  Vector log_prob, dlog_prob;
  int64_t rows, n, k;
  Type logits;
  Arithmetic arithmetic;  // resolved
  int64_t k_chunk;
  bool backward, accumulate;
  void *workspace;
  uint64_t workspace_size;

  uint64_t needs() const { return 0; }
};

template <> struct Operation<LinearLogProb> : AsAsked {
  static constexpr const char *name = "linear_log_prob";
  static Type input(const LinearLogProb &p) { return p.x.type; }
  template <class Show> static void memory(const LinearLogProb &p, Show show) {
    show(p.x.data, p.w.data, p.bias.data, p.dx.data, p.dw.data, p.dbias.data, p.log_prob.data, p.dlog_prob.data,
         static_cast<const char *>(p.index.data), static_cast<char *>(p.workspace));
  }
  using Functions =
      FunctionList<pydet_linear_log_prob, pydet_linear_log_prob_backward, pydet_linear_log_prob_workspace>;
  static Items<pydet_exchange_method> python();
  static Items<pydet_xla_handler> xla();
};

}  // namespace pydet
