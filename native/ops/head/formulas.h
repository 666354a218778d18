// What a logit is read as, and its gradient, as formulas: the same bits on every backend (NUMERICS.md, "Head"). Every step is
// rounded once.
#pragma once

#include "ops/activation/formulas.h"
#include "ops/head/problem.h"

namespace pydet {

PYDET_HD Activated capped(float z, float softcap) { return activated<ActivationKind::tanh>(z / softcap); }

// v_j of z_j.
PYDET_HD float read_logit(const HeadAsked &asked, float z) {
  if (asked.softcap != 0.0f) z = asked.softcap * capped(z, asked.softcap).value;
  return asked.temperature != 0.0f ? z / asked.temperature : z;
}

// What is known of a row: max, sum and its logarithm, H; and the gradients by log_prob, H, lse and by the mean over N.
struct KnownRow {
  float max, sum, log_sum, entropy;
  float of_log_prob, of_entropy, of_lse, of_mean;
  int64_t index;  // -1: no column is asked for
};

// l_j of v_j.
PYDET_HD float logarithm_of(const KnownRow &row, float v) {
  const float l = (v - row.max) - row.log_sum;
  return l == -INFINITY ? 0.0f : l;
}

// Where the gradient by a row's number is 0, nothing of the row counts, whatever it is.
PYDET_HD float part_of_gradient(float x, float times) { return times == 0.0f ? 0.0f : x * times; }

// d_j, in fp32, of z_j and of p_j, which is a probability.
PYDET_HD float logit_gradient(const HeadAsked &asked, const KnownRow &row, int64_t j, float z, float v, float p) {
  float d = row.index < 0 ? 0.0f : fmaf(-p, row.of_log_prob, j == row.index ? row.of_log_prob : 0.0f);
  if (asked.entropy.data) d = d + part_of_gradient((logarithm_of(row, v) + row.entropy) * p, -row.of_entropy);
  if (asked.lse.data) d = d + part_of_gradient(p, row.of_lse);
  if (asked.mean.data) d = d + row.of_mean;
  if (asked.temperature != 0.0f) d = d / asked.temperature;
  return asked.softcap != 0.0f ? d * capped(z, asked.softcap).slope : d;
}

}  // namespace pydet
