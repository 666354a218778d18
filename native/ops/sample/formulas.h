// What a token is drawn by, as formulas that have the same bits on every backend (NUMERICS.md, "Sampling"): the noise of a
// column, the order of a row's columns, and their masses, which are whole numbers so that their sums have no order.
#pragma once

#include "contract/elementary.h"
#include "ops/sample/problem.h"

namespace pydet {

// ---- Noise -------------------------------------------------------------------------------------------------------

// Philox4x32-10 (Salmon et al., SC 2011) of a row's seed and position: four words, those of columns 4 block to
// 4 block + 3.
constexpr int kNoiseBlock = 4;
struct NoiseBlock {
  uint32_t word[kNoiseBlock];
};
PYDET_HD NoiseBlock philox(uint64_t seed, uint64_t position, uint32_t block) {
  uint32_t c0 = block, c1 = 0, c2 = uint32_t(position), c3 = uint32_t(position >> 32);
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t(c0) * 0xD2511F53u, second = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(second >> 32) ^ c1 ^ k0;
    c1 = uint32_t(second);
    c2 = uint32_t(first >> 32) ^ c3 ^ k1;
    c3 = uint32_t(first);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// g = -log(-log(1 - v)), v = (word + 1/2) 2^-32: a number of the Gumbel distribution, from -3.14 to 22.88. Where v is
// small, 1 - v is not rounded on the way to its logarithm; where it is not, it is made of the word's complement.
constexpr float kMostNoise = 23.0f, kLeastNoise = -3.25f;  // beyond any g
PYDET_HD float gumbel(uint32_t word) {
  const float v = fmaf(float(word), 0x1p-32f, 0x1p-33f), rest = fmaf(float(~word), 0x1p-32f, 0x1p-33f);
  const LogParts near = {-v, 0.0f}, far = log_parts(rest);
  const bool small = v < 0.25f;
  const LogParts parts = {small ? near.f : far.f, small ? near.whole : far.whole};
  return -log_of(log_parts(-log_of(parts)));
}

// ---- The order of columns ----------------------------------------------------------------------------------------

// Ascending with x; of -0 as of +0; that of a NaN is the largest.
constexpr uint32_t kNanOrder = 0xFFFFFFFFu;
PYDET_HD uint32_t order_of(float x) {
  const uint32_t u = bits_of(x + 0.0f);
  return x != x ? kNanOrder : u >> 31 ? ~u : u | 0x80000000u;
}
// The x of an order, of no NaN.
PYDET_HD float in_order(uint32_t order) { return float_of(order >> 31 ? order & 0x7FFFFFFFu : ~order); }

// The first columns of a row in descending order of x, equal ones by ascending number: those of more than `order`, and
// of those equal to it the first `equal`.
struct Leading {
  uint32_t order;
  int64_t equal;
};
constexpr int64_t kAllColumns = kMostColumns;
constexpr Leading kEverything = {0, kAllColumns};

// What is looked for is found a digit at a time, the highest first.
constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits, kOrderBits = 32;

// ---- Masses ------------------------------------------------------------------------------------------------------

// Of e = exp(z - m), which is at most 1.
PYDET_HD uint64_t mass_of(float e) { return uint64_t(e * 0x1p40f); }

// What the masses of the leading columns must reach: floor(total floor(2^32 p) / 2^32), at least 1. total < 2^63.
PYDET_HD uint64_t target_of(uint64_t total, float p) {
  const uint64_t part = uint64_t(p * 0x1p32f);
  const uint64_t target = (total >> 32) * part + ((total & 0xFFFFFFFFu) * part >> 32);
  return target ? target : 1;
}

// ---- A row -------------------------------------------------------------------------------------------------------

PYDET_HD int64_t number_of(const Columns &columns, int64_t row) {
  return columns.wide ? static_cast<const int64_t *>(columns.data)[row]
                      : static_cast<const int32_t *>(columns.data)[row];
}
PYDET_HD float number_of(const Vector &vector, float all, int64_t row) {
  return vector.data ? reinterpret_cast<const float *>(vector.data)[row] : all;
}

PYDET_HD bool temperature_serves(float temperature) { return temperature >= 0.0f && temperature < INFINITY; }
PYDET_HD bool part_serves(float part) { return part >= 0.0f && part <= 1.0f; }

// How one row is drawn from. Of a row whose own numbers do not serve, nothing is. What filters nothing is 0 or 1.
struct RowChoice {
  float divisor, top_p, min_p;
  int64_t top_k;
  uint64_t seed, position;
  bool serves, greedy;

  PYDET_INLINE bool by_rank() const { return top_k > 0; }
  PYDET_INLINE bool by_mass() const { return top_p < 1.0f; }
  PYDET_INLINE bool filters() const { return by_rank() || by_mass() || min_p > 0.0f; }
};
PYDET_HD RowChoice choice_of(const Sample &p, int64_t row) {
  const float temperature = number_of(p.temperatures, p.temperature, row);
  const float top_p = number_of(p.top_ps, p.top_p, row), min_p = number_of(p.min_ps, p.min_p, row);
  const int64_t top_k = p.top_ks.data ? number_of(p.top_ks, row) : p.top_k;
  const bool serves = temperature_serves(temperature) && part_serves(top_p) && part_serves(min_p) && top_k >= 0;
  const bool greedy = temperature == 0.0f;
  return {greedy ? 1.0f : temperature,
          greedy ? 1.0f : top_p,
          greedy ? 0.0f : min_p,
          greedy || top_k >= p.n ? 0 : top_k,
          uint64_t(number_of(p.seed, row)),
          uint64_t(number_of(p.position, row)),
          serves,
          greedy};
}

}  // namespace pydet
