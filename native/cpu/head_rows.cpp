// What is asked of rows of logits, scaled or not, and its gradient, in fp32 (NUMERICS.md, "Head"). The bits are those of
// every other backend, and where softmax's kernels make the same, of these.
//
// A row is passed over for its maximum and for each of its sums, then for its gradient, in pieces that become floats on the
// stack.

#include "cpu/each_row.h"
#include "ops/head/formulas.h"

namespace pydet {
namespace {

struct HeadRow {
  const HeadRows &p;
  const int64_t r;
  char *const x;
  Piece z, v;

  HeadRow(const HeadRows &problem, int64_t row) : p(problem), r(row), x(pydet::row(problem.x, problem.rows, row)) {}

  // Of elements j and the next of their slab, or of the row.
  char *place(char *whole, int64_t &j) const {
    const int64_t columns = p.slabs.columns;
    if (!columns) return whole;
    char *const slab = slab_row(p, j / columns, r);
    j %= columns;
    return slab;
  }
  // Calls body(j, count) with z and v of each piece.
  template <class Body> void walk(const Body &body) {
    pieces(p.n, [&](int64_t j, int64_t count) {
      int64_t within = j;
      const char *const from = place(x, within);
      z.load(p.x.type, from, within, count);
      for (int i = 0; i < kPiece; ++i) v.x[i] = read_logit(p.asked, z.x[i]);
      body(j, count);
    });
  }
  // rowsum of what make(v, first, second) makes of each element. Passes are functions of their own, so that their stacks do
  // not add up.
  template <class Make> __attribute__((noinline)) float sum(RowSum &lanes, const Make &make) {
    lanes.clear(p.n);
    walk([&](int64_t j, int64_t count) {
      for (int i = 0; i < kPiece; ++i) {
        float first, second;
        make(v.x[i], first, second);
        z.x[i] = first, v.x[i] = second;
      }
      along(count,
            [&](int64_t i, auto like) { lanes.add(j + i, get<Partial>(z.x + i, like), get<Partial>(v.x + i, like)); });
    });
    return lanes.joined(p.n);
  }
  // The largest number; a NaN has no say in it, and is the greedy column's.
  __attribute__((noinline)) float most() {
    float max = -INFINITY;
    int64_t greedy = 0, nan = -1;
    walk([&](int64_t j, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        if (v.x[i] > max) max = v.x[i], greedy = j + i;
        if (v.x[i] != v.x[i] && nan < 0) nan = j + i;
      }
    });
    if (p.asked.greedy) ((int64_t *)p.asked.greedy)[r] = nan < 0 ? greedy : nan;
    return max + 0.0f;  // which zero is the largest would depend on the order
  }
  __attribute__((noinline)) void write_gradient(const KnownRow &known) {
    char *const y = pydet::row(p.y, p.rows, r);
    walk([&](int64_t j, int64_t count) {
      for (int i = 0; i < kPiece; ++i) {
        const float probability = exp_f32(v.x[i] - known.max) / known.sum;
        z.x[i] = logit_gradient(p.asked, known, j + i, z.x[i], v.x[i], probability);
      }
      z.round(p.x.type);
      int64_t within = j;
      char *const to = place(y, within);
      z.store(p.y.type, to, within, count);
    });
  }
  float read(int64_t j) const {
    char *const from = place(x, j);
    return read_logit(p.asked, element(p.x.type, from, j));
  }
  void put(const Vector &to, float value) const {
    if (to.data) ((float *)to.data)[r] = pydet::canonical(value);
  }
  float given(const Vector &from) const { return from.data ? ((const float *)from.data)[r] : 0.0f; }
};

void head_row(const HeadRows &p, int64_t r, RowSum &lanes) {
  HeadRow row(p, r);
  const HeadAsked &asked = p.asked;
  const int64_t index = p.index.wide ? ((const int64_t *)p.index.data)[r] : ((const int32_t *)p.index.data)[r];
  KnownRow known = {};
  known.index = index >= 0 && index < p.n ? index : -1;

  known.max = row.most();
  const auto exp_of = [&](float v) { return exp_f32(v - known.max); };
  known.sum = row.sum(lanes, [&](float v, float &e, float &one) { e = exp_of(v), one = 1.0f; });
  known.log_sum = log_f32(known.sum);
  if (p.log_prob.data)
    row.put(p.log_prob, known.index < 0 ? float_of(kNanF32) : (row.read(known.index) - known.max) - known.log_sum);
  if (asked.entropy.data)
    known.entropy = 0.0f - row.sum(lanes, [&](float v, float &l, float &probability) {
      l = logarithm_of(known, v), probability = exp_of(v) / known.sum;
    });
  if (!p.backward) {
    row.put(asked.entropy, known.entropy);
    row.put(asked.lse, known.max + known.log_sum);
    if (asked.mean.data)
      row.put(asked.mean, row.sum(lanes, [&](float v, float &x, float &one) { x = v, one = 1.0f; }) / float(p.n));
    return;
  }
  known.of_log_prob = row.given(p.dlog_prob);
  known.of_entropy = row.given(asked.entropy);
  known.of_lse = row.given(asked.lse);
  known.of_mean = row.given(asked.mean) / float(p.n);
  row.write_gradient(known);
}

}  // namespace

template <> pydet_status head_rows<Isa>(const HeadRows &problem) {
  each_row(problem.rows, problem.n, [&](int64_t r, RowSum &lanes) { head_row(problem, r, lanes); });
  return PYDET_OK;
}

}  // namespace pydet
