// The cross-entropy of rows, its reduction and its gradients (ops/head/loss.h), in order, by one thread: a row has a few
// numbers here, and a vocabulary's before.

#include "cpu/parallel.h"
#include "cpu/piece.h"
#include "ops/head/loss.h"

namespace pydet {
namespace {

// The number of rows that are not ignored.
float count_of(const HeadLoss &p) {
  int64_t count = 0;
  for (int64_t r = 0; r < p.rows; ++r) count += target_of(p, r) != p.ignore_index;
  return float(count);
}

// In chains of so many rows, whose sums are added in ascending order.
float sum_of_losses(const HeadLoss &p) {
  float sum = 0.0f;
  for (int64_t first = 0; first < p.rows; first += kLossChain) {
    float chain = 0.0f;
    for (int64_t r = first; r < p.rows && r < first + kLossChain; ++r) chain = chain + loss_of(p, r);
    sum = sum + chain;
  }
  return sum;
}

void make_loss(const HeadLoss &p) {
  if (p.reduction == Reduction::none) {
    for (int64_t r = 0; r < p.rows; ++r) put_number(p.loss, r, pydet::canonical(loss_of(p, r)));
    return;
  }
  const float sum = sum_of_losses(p);
  put_number(p.loss, 0, pydet::canonical(p.reduction == Reduction::mean ? sum / count_of(p) : sum));
}

void make_gradients(const HeadLoss &p) {
  const bool of_rows = p.reduction == Reduction::none;
  float given = p.dloss.data && !of_rows ? number_of(p.dloss, 0) : 1.0f;
  if (p.reduction == Reduction::mean) given = given / count_of(p);
  for (int64_t r = 0; r < p.rows; ++r) {
    const int64_t target = target_of(p, r);
    const bool ignored = target == p.ignore_index;
    if (of_rows && p.dloss.data) given = number_of(p.dloss, r);
    const RowLossGradient by = ignored ? RowLossGradient{} : row_loss_gradient(p.rule, given, number_of(p.lse, r));
    put_number(p.dlog_prob, r, by.of_log_prob);
    put_number(p.dlse, r, by.of_lse);
    put_number(p.dmean, r, by.of_mean);
    if (!p.index) continue;
    if (p.target.wide) reinterpret_cast<int64_t *>(p.index)[r] = ignored ? -1 : target;
    else reinterpret_cast<int32_t *>(p.index)[r] = ignored ? -1 : int32_t(target);
  }
}

}  // namespace

template <> pydet_status head_loss<Isa>(const HeadLoss &problem) {
  Scratch scratch;  // not worked in: one thread computes, in the arithmetic that shared work has
  parallel(1, 1, scratch, [&](int64_t, Scratch &) {
    if (problem.loss.data) make_loss(problem);
    if (problem.dlog_prob.data) make_gradients(problem);
  });
  return PYDET_OK;
}

}  // namespace pydet
