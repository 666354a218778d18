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

// Adds to gradients by v_j what entropy, lse and mean have of them; p_j is a probability.
template <int N>
PYDET_HD void add_more(const HeadAsked &asked, const KnownRow &row, const float (&v)[N], const float (&p)[N],
                       float (&d)[N]) {
  if (asked.entropy.data)
    for (int e = 0; e < N; ++e)
      d[e] = d[e] + part_of_gradient((logarithm_of(row, v[e]) + row.entropy) * p[e], -row.of_entropy);
  if (asked.lse.data)
    for (int e = 0; e < N; ++e) d[e] = d[e] + part_of_gradient(p[e], row.of_lse);
  if (asked.mean.data)
    for (int e = 0; e < N; ++e) d[e] = d[e] + row.of_mean;
}

// The gradient by z_j, of that by v_j.
PYDET_HD float gradient_of_logit(const HeadAsked &asked, float z, float d) {
  if (asked.temperature != 0.0f) d = d / asked.temperature;
  return asked.softcap != 0.0f ? d * capped(z, asked.softcap).slope : d;
}

// d_j, in fp32, of z_j.
PYDET_HD float logit_gradient(const HeadAsked &asked, const KnownRow &row, int64_t j, float z, float v, float p) {
  float d[1] = {row.index < 0 ? 0.0f : fmaf(-p, row.of_log_prob, j == row.index ? row.of_log_prob : 0.0f)};
  const float read[1] = {v}, probability[1] = {p};
  add_more(asked, row, read, probability, d);
  return gradient_of_logit(asked, z, d[0]);
}

}  // namespace pydet
