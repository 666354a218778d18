// Sampling of tokens, and the k largest of a row (NUMERICS.md, "Sampling"). The bits are those of every other backend.
//
//   z = x / temperature,   m = max(z) + 0,   e = exp(z - m)
//   kept: the leading columns that top_k and top_p leave, of these those with e >= min_p
//   token = the first column whose (z - m) + g is the largest, of those that are kept
//
// What the leading columns are is found a digit of their order at a time, by the weights of the columns of each digit:
// 1 each for top_k, their masses for top_p; a few are found in one pass, which keeps those that may be among them. A
// row is passed over up to ten times, in pieces that become floats on the stack.

#include <algorithm>
#include <functional>

#include "cpu/each_row.h"
#include "ops/sample/formulas.h"

namespace pydet {
namespace {

constexpr int kBlocks = kPiece / kNoiseBlock, kFewNoises = kPiece / 8;  // of a piece; so few are made one by one

// Columns of one order, and what they weigh together.
struct Weighed {
  uint32_t order;
  uint64_t weight;
};

// The highest order such that what is of it or of a higher one weighs target(total) or more; and what the higher ones weigh
// then. weigh(j, count, orders, prefix, shift, digits) adds the weights of a piece to the digits behind the prefix;
// `extra` is what is there beside all pieces.
template <class Weigh, class Target>
Weighed threshold(Type type, const char *x, int64_t n, uint64_t (&digits)[kDigits], const Weighed &extra,
                  const Target &target, const Weigh &weigh) {
  uint32_t prefix = 0;
  uint64_t above = 0, reach = 0;
  Piece piece;
  uint32_t order[kPiece];
  for (int shift = kOrderBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
    const uint32_t mask = shift + kDigitBits < kOrderBits ? ~uint32_t(0) << (shift + kDigitBits) : 0;
    memset(digits, 0, sizeof digits);
    if (((extra.order ^ prefix) & mask) == 0) digits[extra.order >> shift & (kDigits - 1)] += extra.weight;
    pieces(n, [&](int64_t j, int64_t count) {
      piece.load(type, x, j, count);
      uint32_t differ[kPiece], none = mask;
      for (int i = 0; i < kPiece; ++i) {
        order[i] = order_of(piece.x[i]);
        differ[i] = (order[i] ^ prefix) & mask;
        none = differ[i] < none ? differ[i] : none;
      }
      if (none) return;
      weigh(piece, count, order, differ, shift, digits);
    });
    if (mask == 0) {
      uint64_t total = 0;
      for (uint64_t weight : digits) total += weight;
      reach = target(total);
    }
    int digit = kDigits - 1;
    while (digit > 0 && above + digits[digit] < reach) above += digits[digit--];
    prefix |= uint32_t(digit) << shift;
  }
  return {prefix, above};
}

// order_of each element of a piece, by steps of which the compiler makes vectors; the largest.
inline uint32_t orders_of(Piece &piece, uint32_t (&order)[kPiece]) {
  for (float &v : piece.x) v = v + 0.0f;
  memcpy(order, piece.x, sizeof order);
  uint32_t most = 0;
  for (uint32_t &u : order)
    u = (u & 0x7FFFFFFFu) > 0x7F800000u ? kNanOrder : u ^ (uint32_t(int32_t(u) >> 31) | 0x80000000u);
  for (uint32_t u : order) most = u > most ? u : most;
  return most;
}

// The largest element of a piece, which has no NaN.
inline float largest_of(const Piece &piece) {
  float most[kWidth];
  memcpy(most, piece.x, sizeof most);
  for (int j = kWidth; j < kPiece; j += kWidth)
    for (int i = 0; i < kWidth; ++i) most[i] = piece.x[j + i] > most[i] ? piece.x[j + i] : most[i];
  for (float v : most) most[0] = v > most[0] ? v : most[0];
  return most[0];
}

// The orders of what may be among the first k columns of a row, where k is no more than kFew.
struct Candidates {
  uint32_t order[kRowLanes];
};
static_assert(sizeof(Candidates) <= sizeof(RowSum), "they lie where the lanes of a row's sum do");
constexpr int64_t kFew = kRowLanes / 4;

// The first k columns, whose orders are then the first k of those held. Of the columns so far only the first k matter,
// and what is no larger than the last of them comes behind it: so few are held, and most pieces are only looked at.
__attribute__((noinline)) Leading leading_of_few(Type type, const char *x, int64_t n, int64_t k, Candidates &held) {
  uint32_t *const orders = held.order;
  uint32_t last = 0;  // no order is 0
  int64_t count = 0;
  const auto leave_k = [&] {
    std::nth_element(orders, orders + k - 1, orders + count, std::greater<uint32_t>());
    last = orders[k - 1];
    count = k;
  };
  Piece piece;
  uint32_t order[kPiece];
  pieces(n, [&](int64_t j, int64_t in_piece) {
    piece.load(type, x, j, in_piece);
    if (orders_of(piece, order) <= last) return;
    for (int i = 0; i < in_piece; ++i) {
      orders[count] = order[i];
      count += order[i] > last;
    }
    if (count > kRowLanes - kPiece) leave_k();
  });
  leave_k();
  return {last, std::count(orders, orders + k, last)};
}

// The first k columns.
__attribute__((noinline)) Leading leading_of(Type type, const char *x, int64_t n, int64_t k,
                                             uint64_t (&digits)[kDigits]) {
  const Weighed found = threshold(
      type, x, n, digits, {0, 0}, [&](uint64_t) { return uint64_t(k); },
      [](const Piece &, int64_t count, const uint32_t *order, const uint32_t *differ, int shift, uint64_t *to) {
        for (int i = 0; i < count; ++i)
          if (differ[i] == 0) ++to[order[i] >> shift & (kDigits - 1)];
      });
  return {found.order, k - int64_t(found.weight)};
}

// A row as it is drawn from. Its passes are no parts of their caller: only one of them is on the stack.
struct SampledRow {
  const Sample &p;
  RowChoice choice;
  Type type;
  const char *x;
  float max = 0;  // m

  // z - m of a piece of x.
  void distances(Piece &piece) const {
    if (choice.divisor != 1.0f)
      for (float &v : piece.x) v = v / choice.divisor;
    for (float &v : piece.x) v = v - max;
  }
  uint64_t mass_in(uint32_t order) const { return mass_of(exp_f32(in_order(order) / choice.divisor - max)); }

  // m, and whether there is anything to draw from.
  __attribute__((noinline)) bool find_max() {
    Piece piece;
    const float largest = row_max(type, x, p.n, piece);
    int nans = 0;
    pieces(p.n, [&](int64_t j, int64_t count) {
      piece.load(type, x, j, count);
      for (float v : piece.x) nans |= v != v;
    });
    max = largest / choice.divisor + 0.0f;
    return !nans && fabsf(max) < INFINITY;
  }

  __attribute__((noinline)) int64_t first_largest() const {
    Piece piece;
    int64_t first = -1;
    for (int64_t j = 0; first < 0 && j < p.n; j += kPiece) {
      const int64_t count = p.n - j < kPiece ? p.n - j : int64_t(kPiece);
      piece.load(type, x, j, count);
      for (int i = 0; first < 0 && i < count; ++i)
        if (piece.x[i] == max) first = j + i;
    }
    return first;
  }

  // What top_k and top_p leave; `lanes` is the memory that is worked in.
  Leading leading(RowSum &lanes) const {
    const int64_t k = choice.top_k;
    if (choice.by_rank() && k <= kFew) {
      auto &held = *new (&lanes) Candidates;
      const Leading first = leading_of_few(type, x, p.n, k, held);
      return choice.by_mass() ? leading_mass_of_few(held, k) : first;
    }
    auto &digits = *new (&lanes) uint64_t[1][kDigits];
    const Leading first = choice.by_rank() ? leading_of(type, x, p.n, k, digits) : kEverything;
    return choice.by_mass() ? leading_mass(first, digits) : first;
  }

  // Of the columns that `within` holds, the first whose masses reach top_p of theirs.
  __attribute__((noinline)) Leading leading_mass(const Leading &within, uint64_t (&digits)[kDigits]) const {
    const bool all = within.equal == kAllColumns;
    const Weighed equal = {within.order, all ? 0 : uint64_t(within.equal) * mass_in(within.order)};
    uint64_t reach = 0;
    const auto target = [&](uint64_t total) { return reach = target_of(total, choice.top_p); };
    const auto weigh = [&](Piece &piece, int64_t count, const uint32_t *order, const uint32_t *differ, int shift,
                           uint64_t *to) {
      distances(piece);
      for (float &v : piece.x) v = exp_f32(v);
      for (int i = 0; i < count; ++i)
        if (differ[i] == 0 && (all || order[i] > within.order))
          to[order[i] >> shift & (kDigits - 1)] += mass_of(piece.x[i]);
    };
    const Weighed found = threshold(type, x, p.n, digits, equal, target, weigh);
    return {found.order, divide_up(int64_t(reach - found.weight), int64_t(mass_in(found.order)))};
  }

  // The same within the first k columns, whose orders are held.
  __attribute__((noinline)) Leading leading_mass_of_few(Candidates &held, int64_t k) const {
    uint32_t *const orders = held.order;
    std::sort(orders, orders + k, std::greater<uint32_t>());
    uint64_t total = 0, above = 0;
    for (int64_t i = 0; i < k; ++i) total += mass_in(orders[i]);
    const uint64_t reach = target_of(total, choice.top_p);
    for (int64_t i = 0;;) {
      const uint64_t mass = mass_in(orders[i]);
      const int64_t first = i;
      while (i < k && orders[i] == orders[first]) ++i;
      const uint64_t of_order = uint64_t(i - first) * mass;
      if (above + of_order >= reach) return {orders[first], divide_up(int64_t(reach - above), int64_t(mass))};
      above += of_order;
    }
  }

  // s of all columns.
  __attribute__((noinline)) float sum_of_all(RowSum &lanes) const {
    Piece piece;
    lanes.clear(p.n);
    pieces(p.n, [&](int64_t j, int64_t count) {
      piece.load(type, x, j, count);
      distances(piece);
      add_exps(piece, j, count, lanes);
    });
    return lanes.joined(p.n);
  }
  static void add_exps(Piece &piece, int64_t j, int64_t count, RowSum &lanes) {
    for (float &v : piece.x) v = exp_f32(v);
    along(count, [&](int64_t i, auto v) { lanes.add(j + i, get<Partial>(piece.x + i, v), all(1.0f, v)); });
  }

  // The token, and s of the columns that are kept, if it is wanted.
  __attribute__((noinline)) int64_t draw(const Leading &leading, RowSum *lanes, float *sum) const {
    const bool cut = leading.equal != kAllColumns;
    const float least = cut ? in_order(leading.order) : 0.0f;
    int64_t equal = 0, token = -1;
    float best = kLeastNoise;  // which the likeliest column, at z - m = 0, is above
    Piece piece, noise;
    if (lanes) lanes->clear(p.n);
    pieces(p.n, [&](int64_t j, int64_t count) {
      piece.load(type, x, j, count);
      if (cut && largest_of(piece) < least) return;  // none is kept, and a sum would not change by 0
      bool keep[kPiece];
      for (int i = 0; i < kPiece; ++i) keep[i] = !cut || piece.x[i] > least;
      if (cut)
        for (int i = 0; i < count; ++i)
          if (piece.x[i] == least) keep[i] = equal++ < leading.equal;
      distances(piece);
      if (choice.min_p > 0.0f)
        for (int i = 0; i < kPiece; ++i) keep[i] &= exp_f32(piece.x[i]) >= choice.min_p;
      for (int i = 0; i < kPiece; ++i) keep[i] &= i < count;
      for (int i = 0; i < kPiece; ++i) piece.x[i] = keep[i] ? piece.x[i] : -INFINITY;
      if (!(largest_of(piece) + kMostNoise < best)) {  // else no noise makes a token of these
        const bool few = std::count(keep, keep + kPiece, true) <= kFewNoises;
        if (!few) noise_of(j, noise);
        for (int i = 0; i < count; ++i) {
          if (few && !keep[i]) continue;
          const float with_noise = piece.x[i] + (few ? noise_of_column(j + i) : noise.x[i]);
          if (with_noise > best) best = with_noise, token = j + i;
        }
      }
      if (lanes) add_exps(piece, j, count, *lanes);
    });
    if (lanes) *sum = lanes->joined(p.n);
    return token;
  }
  float noise_of_column(int64_t j) const {
    return gumbel(philox(choice.seed, choice.position, uint32_t(j / kNoiseBlock)).word[j % kNoiseBlock]);
  }
  void noise_of(int64_t j, Piece &noise) const {
    uint32_t word[kNoiseBlock][kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      const NoiseBlock block = philox(choice.seed, choice.position, uint32_t(j / kNoiseBlock + b));
      for (int w = 0; w < kNoiseBlock; ++w) word[w][b] = block.word[w];
    }
    for (int w = 0; w < kNoiseBlock; ++w) {
      float of_word[kBlocks];
      for (int b = 0; b < kBlocks; ++b) of_word[b] = gumbel(word[w][b]);
      for (int b = 0; b < kBlocks; ++b) noise.x[b * kNoiseBlock + w] = of_word[b];
    }
  }
};

void sample_row(const Sample &p, int64_t r, RowSum &lanes) {
  SampledRow row = {p, choice_of(p, r), p.x.type, pydet::row(p.x, p.inner, r)};
  auto *all = (float *)p.log_prob.data, *filtered = (float *)p.filtered_log_prob.data;
  auto &token = ((int64_t *)p.token)[r];
  if (!row.choice.serves || !row.find_max()) {
    token = -1;
    for (float *log_prob : {all, filtered})
      if (log_prob) log_prob[r] = float_of(kNanF32);
    return;
  }
  const bool filters = row.choice.filters();
  float sum = 0, kept_sum = 0;
  if (all && (filters || row.choice.greedy)) sum = row.sum_of_all(lanes);
  if (row.choice.greedy) {
    token = row.first_largest();
  } else {
    const Leading leading = row.leading(lanes);
    const bool wanted = filters ? filtered != nullptr : all || filtered;
    token = row.draw(leading, wanted ? new (&lanes) RowSum : nullptr, &kept_sum);
    if (!filters) sum = kept_sum;
  }
  const float distance = element(row.type, row.x, token) / row.choice.divisor - row.max;
  if (all) all[r] = distance - log_f32(sum);
  if (filtered) filtered[r] = row.choice.greedy ? 0.0f : distance - log_f32(kept_sum);
}

// The numbers of the leading columns, ascending.
__attribute__((noinline)) void find_columns(Type type, const char *x, int64_t n, const Leading &leading,
                                            int64_t *index) {
  int64_t found = 0, equal = 0;
  Piece piece;
  uint32_t order[kPiece];
  pieces(n, [&](int64_t j, int64_t count) {
    piece.load(type, x, j, count);
    if (orders_of(piece, order) < leading.order) return;
    for (int i = 0; i < count; ++i)
      if (order[i] > leading.order || (order[i] == leading.order && equal++ < leading.equal)) index[found++] = j + i;
  });
}

void topk_row(const TopK &p, int64_t r, RowSum &memory) {
  const Type type = p.x.type;
  const char *x = row(p.x, p.inner, r);
  const Leading leading = p.k <= kFew ? leading_of_few(type, x, p.n, p.k, *new (&memory) Candidates)
                                      : leading_of(type, x, p.n, p.k, *new (&memory) uint64_t[1][kDigits]);
  int64_t *index = (int64_t *)p.index + r * p.k;
  find_columns(type, x, p.n, leading, index);
  std::sort(index, index + p.k, [&](int64_t a, int64_t b) {
    const uint32_t of_a = order_of(element(type, x, a)), of_b = order_of(element(type, x, b));
    return of_a > of_b || (of_a == of_b && a < b);
  });
  dispatch(type, [&](auto number) {
    using T = decltype(number);
    auto *values = (typename T::Stored *)p.values.data + r * p.k;
    for (int64_t i = 0; i < p.k; ++i) T::set(values + i, T::get((const typename T::Stored *)x + index[i]));
  });
}

}  // namespace

template <> pydet_status sample<Isa>(const Sample &problem) {
  each_row(problem.rows, problem.n, [&](int64_t r, RowSum &lanes) { sample_row(problem, r, lanes); });
  return PYDET_OK;
}

template <> pydet_status topk<Isa>(const TopK &problem) {
  each_row(problem.rows, problem.n, [&](int64_t r, RowSum &lanes) { topk_row(problem, r, lanes); });
  return PYDET_OK;
}

}  // namespace pydet
