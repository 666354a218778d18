// The cross-entropy of rows from what the head says of them, its reduction, and its gradients by what the head said
// (NUMERICS.md, "Head"): no operation of its own, and no table, but a pass over a few numbers a row.
#pragma once

#include "contract/numerics.h"
#include "ops/head/problem.h"

namespace pydet {

constexpr int64_t kLossChain = 256;  // rows of a chain of the sum

// As numbers of pydet.h.
enum class Reduction : int32_t { mean, sum, none };
constexpr int kReductions = 3;

// `kept` is fl(1 - smoothing). A term that is not asked for is not added, whatever it would be.
struct LossRule {
  bool smooths, adds_z;
  float smoothing, kept, z;
};

// What is absent has no data. loss and dloss are one number, or where there is no reduction one a row, as are all the
// others, contiguous, fp32. A gradient is made where dlog_prob is there: a dloss that is absent is 1. log_prob may be in
// the place of such a loss.
struct HeadLoss {
  Device device;
  void *stream;
  int64_t rows;
  LossRule rule;
  Reduction reduction;
  int64_t ignore_index;
  Columns target;
  Vector log_prob, lse, mean;     // what the head says
  Vector loss;                    // made of it
  Vector dloss;                   // given
  Vector dlog_prob, dlse, dmean;  // made of it
  char *index;                    // like target, made: target, or -1 where that is ignored
};

template <> struct Operation<HeadLoss> {
  template <class Show> static void memory(const HeadLoss &p, Show show) {
    show(static_cast<const char *>(p.target.data), p.log_prob.data, p.lse.data, p.mean.data, p.loss.data, p.dloss.data,
         p.dlog_prob.data, p.dlse.data, p.dmean.data, p.index);
  }
};

PYDET_HD int64_t target_of(const HeadLoss &p, int64_t r) {
  return p.target.wide ? static_cast<const int64_t *>(p.target.data)[r]
                       : static_cast<const int32_t *>(p.target.data)[r];
}

// Of a row that is not ignored.
PYDET_HD float row_loss(const LossRule &rule, float log_prob, float lse, float mean) {
  float loss = -log_prob;
  if (rule.smooths) loss = loss * rule.kept + (lse - mean) * rule.smoothing;
  return rule.adds_z ? loss + (lse * lse) * rule.z : loss;
}

// Of `given`, the gradient by the row's loss.
struct RowLossGradient {
  float of_log_prob, of_lse, of_mean;
};
PYDET_HD RowLossGradient row_loss_gradient(const LossRule &rule, float given, float lse) {
  RowLossGradient by = {-given, 0.0f, 0.0f};
  if (rule.adds_z) {
    const float once = given * rule.z * lse;
    by.of_lse = once + once;
  }
  if (rule.smooths) {
    const float spread = given * rule.smoothing;
    by.of_log_prob = -(given * rule.kept);
    by.of_lse = rule.adds_z ? by.of_lse + spread : spread;
    by.of_mean = -spread;
  }
  return by;
}

// Numbers of rows; +0, or nothing to write, of one that is absent.
PYDET_HD float number_of(const Vector &from, int64_t r) {
  return from.data ? reinterpret_cast<const float *>(from.data)[r] : 0.0f;
}
PYDET_HD void put_number(const Vector &to, int64_t r, float value) {
  if (to.data) reinterpret_cast<float *>(to.data)[r] = value;
}

PYDET_HD float loss_of(const HeadLoss &p, int64_t r) {
  if (target_of(p, r) == p.ignore_index) return 0.0f;
  return row_loss(p.rule, number_of(p.log_prob, r), number_of(p.lse, r), number_of(p.mean, r));
}

}  // namespace pydet
