// The log-probability of a column under a linear layer, and its gradients, once a call is checked: products and softmax
// of the other folders, over some rows of logits at a time; and what else may be asked of these rows.
#pragma once

#include "core/operation.h"
#include "ops/softmax/problem.h"

namespace pydet {

// How logits are read, and what is asked of a row beside log_prob: one number each, contiguous, fp32 (greedy: int64). Of
// gradients these are the ones by them. What is absent has no data.
struct HeadAsked {
  float softcap, temperature;  // 0: none
  Vector entropy, lse, mean;
  char *greedy;

  bool scales() const { return softcap != 0 || temperature != 0; }
  bool more() const { return entropy.data || lse.data || mean.data || greedy; }
};

// Without kernels of its own. log_prob, dlog_prob: one a row, contiguous, fp32. What is absent has no data.
struct LinearLogProb {
  Device device;
  void *stream;
  Matrix x, w, bias, dx, dw, dbias;  // x [rows, k], w [n, k]; bias and dbias are of one row
  Columns index;
  Vector log_prob, dlog_prob;
  HeadAsked asked;
  int64_t rows, n, k;
  Type logits;
  Arithmetic arithmetic;  // resolved
  int64_t k_chunk;
  bool backward, accumulate;
  const char *kernel;  // that makes what is asked of rows, or NULL
  void *workspace;
  uint64_t workspace_size;
  uint64_t taken;  // bytes of the caller's workspace that are not in this one

  uint64_t needs() const { return 0; }
};

template <> struct Operation<LinearLogProb> : AsAsked {
  static constexpr const char *name = "linear_log_prob";
  static Type input(const LinearLogProb &p) { return p.x.type; }
  template <class Show> static void memory(const LinearLogProb &p, Show show) {
    show(p.x.data, p.w.data, p.bias.data, p.dx.data, p.dw.data, p.dbias.data, p.log_prob.data, p.dlog_prob.data,
         static_cast<const char *>(p.index.data), p.asked.entropy.data, p.asked.lse.data, p.asked.mean.data,
         p.asked.greedy, static_cast<char *>(p.workspace));
  }
  using Functions = FunctionList<pydet_linear_log_prob, pydet_linear_log_prob_backward, pydet_linear_log_prob_workspace,
                                 pydet_linear_cross_entropy, pydet_linear_cross_entropy_backward,
                                 pydet_linear_cross_entropy_workspace>;
  static Items<pydet_exchange_method> python();
  static Items<pydet_xla_handler> xla();
};

// Rows of logits x that are scaled, or of which more is asked than softmax's kernels make; of `backward` their gradient y,
// of any type, which may take the place of x. log_prob may be absent.
struct HeadRows {
  Device device;
  void *stream;
  int64_t rows, n;
  bool backward;
  Rows x, y;
  Columns index;
  Vector log_prob, dlog_prob;
  HeadAsked asked;
  Slabs slabs;  // of x, whose place y takes then

  uint64_t needs() const {
    return when(backward, kRowGradient) | when(asked.softcap != 0, kSoftcap) | when(slabs.columns, kSlabs);
  }
};

template <> struct Operation<HeadRows> : AlwaysIeee {
  static constexpr const char *name = "head_rows";
  static Type input(const HeadRows &p) { return p.x.type; }
  template <class Show> static void memory(const HeadRows &p, Show show) {
    show(p.x.data, p.y.data, static_cast<const char *>(p.index.data), p.log_prob.data, p.dlog_prob.data,
         p.asked.entropy.data, p.asked.lse.data, p.asked.mean.data, p.asked.greedy, p.slabs.first);
  }
};

struct HeadLoss;                        // ops/head/loss.h
template <class Problem> struct Hooks;  // core/kernel.h
template <> struct Hooks<HeadRows> {
  pydet_status (*loss)(const HeadLoss &);
};

}  // namespace pydet
