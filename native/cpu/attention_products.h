// The two products of attention on the CPU, of one strip of query rows and one block of keys: scores s = q k^T, and
// o = chain over the keys of weights and values, from o. Operands become fp32 panels in scratch memory, which all rows of
// a task share, and are walked by the loops of GEMM. What has no part in those loops is the same code for every arithmetic
// and type: it asks for them.
#pragma once

#include "cpu/gemm_ieee_chains.h"
#include "cpu/parallel.h"
#include "cpu/tensorcore_steps.h"
#include "ops/attention/formulas.h"

namespace pydet {
namespace {

constexpr int64_t kSide = 128;  // floats of a row of scores; columns of o that lie together
static_assert(kSide == kKeysBlock && kSide == kDepth && kSide == kCols, "one row length for both products");

constexpr int64_t round_up(int64_t x, int64_t multiple) { return divide_up(x, multiple) * multiple; }

// Memory that is handed out from the front, in pieces that begin at cache lines. Without memory it only counts.
class Arena {
 public:
  explicit Arena(void *memory) : at_((char *)memory) {}
  template <class Element> Element *take(int64_t count) {
    Element *piece = (Element *)(at_ ? at_ + used_ : nullptr);
    used_ += round_up(count * int64_t(sizeof(Element)), 64);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char *at_;
  int64_t used_ = 0;
};

// ---- Packing -------------------------------------------------------------------------------------------------------

constexpr int64_t kTurnRun = 64, kTurnFloats = kWidth * (kTurnRun + kWidth);  // where lanes are turned

// kWidth vectors, by their addresses, each `depth` elements, side by side: to[i * ld + lane]; lanes past the last +0. A few
// lines of each in turn go to a buffer, for vectors a power of two apart would evict each other from the L1.
template <class T>
void turn_lanes(const char *const *lanes, int64_t count, int64_t depth, float *to, int64_t ld, float *buffer) {
  using Stored = typename T::Stored;
  constexpr int64_t kLaneFloats = kTurnRun + kWidth;
  for (int64_t begin = 0; begin < depth; begin += kTurnRun) {
    const int64_t run = least(depth - begin, kTurnRun);
    for (int64_t i = 0; i < kWidth; ++i) {
      float *row = buffer + i * kLaneFloats;
      if (i >= count) {
        for (int64_t j = 0; j < run; j += kWidth) store(row + j, zero());
        continue;
      }
      const Stored *lane = (const Stored *)lanes[i] + begin;
      for (int64_t j = 0; j < run; j += kWidth) store(row + j, T::load(lane + j, run - j));
    }
    for (int64_t j = 0; j < run; j += kWidth) {
      Floats t[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) t[i] = load(buffer + i * kLaneFloats + j);
      transpose(t);
      const int64_t rest = least(run - j, kWidth);
      for (int64_t i = 0; i < rest; ++i) store(to + (begin + j + i) * ld, t[i]);
    }
  }
}

// Keys beside each other: panels[key / panel][d][key mod panel], d and keys padded with +0 to `depth` and a panel.
template <class T>
void pack_keys(const char *const *keys, int64_t count, int64_t d, int64_t depth, int64_t panel, float *to,
               float *buffer) {
  for (int64_t first = 0; first < count; first += panel, to += panel * depth) {
    for (int64_t lane = 0; lane < panel; lane += kWidth)
      turn_lanes<T>(keys + first + lane, most(count - first - lane, 0), d, to + lane, panel, buffer);
    memset(to + d * panel, 0, size_t((depth - d) * panel) * sizeof(float));
  }
}

// Values behind each other: panels[column / panel][key][column mod panel], keys and columns padded with +0 to `depth` and a
// panel; keys that `left_out` names are +0 too.
template <class T>
void pack_values(const char *const *values, int64_t count, int64_t e, int64_t depth, const uint8_t *left_out,
                 int64_t panel, float *to) {
  using Stored = typename T::Stored;
  for (int64_t key = 0; key < depth; ++key) {
    const bool absent = key >= count || (left_out && left_out[key]);
    const Stored *row = absent ? nullptr : (const Stored *)values[key];
    for (int64_t first = 0; first < e; first += panel)
      for (int64_t c = 0; c < panel; c += kWidth)
        store(to + first * depth + key * panel + c, absent ? zero() : T::load(row + first + c, most(e - first - c, 0)));
  }
}

// Whether all of so many numbers are finite.
inline bool all_finite(const float *x, int64_t count) {
  uint32_t most_bits = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t size = bits_of(x[i]) & 0x7FFFFFFFu;
    most_bits = size > most_bits ? size : most_bits;
  }
  return most_bits < 0x7F800000u;
}

// ---- An arithmetic -----------------------------------------------------------------------------------------------------

// Few rows of ieee are multiplied from where keys and values lie (attention_few.h): this many.
constexpr int64_t kFewRows = kWidth == 16 ? 8 : kWidth == 8 ? 4 : 0;
constexpr int64_t kTensorStrip = 8, kMostStrip = most(Tiles::kRows, kTensorStrip);

// The products of one problem, and where their operands are packed.
//   ieee           rows lie in strips, the rows of one step adjacent
//   tensor cores   rows lie in slices of kDepth along d, with exponents beside all that is packed
struct Products {
  explicit Products(const Attention &a)
      : type(a.q.type),
        loops(a.arithmetic == Arithmetic::ieee ? nullptr : &tensor_core_loops<Isa>(a.arithmetic)),
        flushes(a.arithmetic == Arithmetic::cdna2),
        strip(loops ? kTensorStrip : Tiles::kRows),
        few_rows(loops ? 0 : kFewRows) {}

  Type type;
  const TensorCoreLoops *loops;  // NULL: ieee
  bool flushes;                  // what is subnormal
  int64_t strip, few_rows;
  float *q, *p, *k, *v;
  int32_t *q_exponent, *p_exponent;
  int16_t *k_exponent, *v_exponent;

  // Columns of a panel: with vectors it is a constant.
  int64_t panel() const { return kTile == Tiles::kColumns || loops ? kTile : Tiles::kColumns; }
  int64_t depth(int64_t d) const { return loops ? round_up(d, 16) : d; }
  void take_panels(Arena &arena, int64_t d, int64_t e, int64_t keys) {
    const int64_t of_k = round_up(keys, panel()) * depth(d), of_v = keys * round_up(e, panel());
    if (loops) p_exponent = arena.take<int32_t>(strip * kSide);
    else p = arena.take<float>(strip * kSide + kWidth);
    k = arena.take<float>(of_k), v = arena.take<float>(of_v);
    if (loops) k_exponent = arena.take<int16_t>(of_k), v_exponent = arena.take<int16_t>(of_v);
  }
  void take_rows(Arena &arena, int64_t rows, int64_t d) {
    const int64_t of_row = loops ? round_up(d, kDepth) : d;
    q = arena.take<float>(rows * of_row + (loops ? 0 : kWidth));
    if (loops) q_exponent = arena.take<int32_t>(rows * of_row);
  }

  void add_exponents(float *values, int64_t count, int16_t *exponents) const {
    exponents_of(type, flushes, values, count, exponents);
  }
  __attribute__((noinline)) void spread_exponents(float *values, int32_t *exponents) const {  // of kDepth
    int16_t own[kDepth];
    add_exponents(values, kDepth, own);
    for (int i = 0; i < kDepth; ++i) exponents[i] = int32_t(uint16_t(own[i]) * 0x10001u);
  }
  // Rows of queries; at(r): where row r lies.
  template <class At> void pack_queries(int64_t rows, int64_t d, float *buffer, const At &at) {
    for (int64_t first = 0; first < rows; first += strip) {
      const char *queries[kMostStrip];
      const int64_t height = least(strip, rows - first);
      for (int64_t r = 0; r < height; ++r) queries[r] = at(first + r);
      if (loops)
        for (int64_t r = 0; r < height; ++r) pack_slices(queries[r], first + r, rows, d);
      else pack_strip(queries, height, d, q + first * d, buffer);
    }
  }
  __attribute__((noinline)) void pack_strip(const char *const *queries, int64_t height, int64_t d, float *to,
                                            float *buffer) {
    dispatch(type, [&](auto number) {  // what a step writes too much the next overwrites, or the next strip
      for (int64_t lane = 0; lane < height; lane += kWidth)
        turn_lanes<decltype(number)>(queries + lane, height - lane, d, to + lane, height, buffer);
    });
  }
  __attribute__((noinline)) void pack_slices(const char *query, int64_t row, int64_t rows, int64_t d) {
    for (int64_t slice = 0; slice * kDepth < d; ++slice) {
      const int64_t at = (slice * rows + row) * kDepth;
      with_type<kHalfTypes>(type, [&](auto type) {
        for (int64_t i = 0; i < kDepth; i += kWidth)
          store(q + at + i,
                Number<type>::load((const uint16_t *)query + slice * kDepth + i, most(d - slice * kDepth - i, 0)));
      });
      spread_exponents(q + at, q_exponent + at);
    }
  }
  __attribute__((noinline)) void pack_keys(const char *const *keys, int64_t count, int64_t d, float *buffer) {
    dispatch(type,
             [&](auto number) { pydet::pack_keys<decltype(number)>(keys, count, d, depth(d), panel(), k, buffer); });
    if (loops) add_exponents(k, round_up(count, panel()) * depth(d), k_exponent);
  }
  __attribute__((noinline)) void pack_values(const char *const *values, int64_t count, int64_t e,
                                             const uint8_t *left_out) {
    const int64_t deep = round_up(count, 16);
    dispatch(type,
             [&](auto number) { pydet::pack_values<decltype(number)>(values, count, e, deep, left_out, panel(), v); });
    if (loops) add_exponents(v, round_up(e, panel()) * deep, v_exponent);
  }

  // s[r][j] of the strip's rows and the packed keys.
  __attribute__((noinline)) void scores(int64_t first, int64_t rows, int64_t keys, int64_t d, int64_t all_rows,
                                        float *s) const {
    if (!loops) {
      const Chain chain = tile_chain<Isa>(rows);
      Steps steps = {};
      steps.depth = d, steps.columns = panel(), steps.a = q + first * d, steps.b_stride = panel();
      for (int64_t j = 0; j < keys; j += panel()) {
        steps.b = k + j * d;
        steps.to = {s + j, kSide};
        chain(steps);
      }
      return;
    }
    memset(s, 0, size_t(rows * kSide) * sizeof(float));
    for (int64_t j = 0; j < keys; j += panel())
      for (int64_t begin = 0; begin < d; begin += kDepth) {
        const int64_t of_q = (begin / kDepth * all_rows + first) * kDepth, of_k = j * depth(d) + begin * panel();
        loops->walk(q + of_q, q_exponent + of_q, k + of_k, k_exponent + of_k, rows, least(kDepth, d - begin), s + j);
      }
  }

  // Weights as the rows of the second product, from s[r][j]: the strip, or with exponents beside them where they are.
  __attribute__((noinline)) void pack_weights(float *s, int64_t rows, int64_t keys) {
    if (loops) {
      p = s;
      for (int64_t r = 0; r < rows; ++r) spread_exponents(s + r * kSide, p_exponent + r * kSide);
      return;
    }
    if constexpr (kWidth == 1) {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t j = 0; j < keys; ++j) p[j * rows + r] = s[r * kSide + j];
    } else {
      for (int64_t j = 0; j < keys; j += kWidth) {
        Floats t[kWidth];
        for (int r = 0; r < kWidth; ++r) t[r] = r < rows ? load(s + r * kSide + j) : zero();
        transpose(t);
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) store(p + (j + i) * rows, t[i]);  // the next step's overwrite the surplus
      }
    }
  }
  // o += weights and values; o[column / kSide][row][column mod kSide], the columns' groups `apart`.
  // Of the values `packed` keys are there.
  __attribute__((noinline)) void weigh(int64_t rows, int64_t keys, int64_t packed, int64_t e, float *o,
                                       int64_t apart) const {
    const int64_t deep = round_up(packed, 16);
    const Chain chain = loops ? nullptr : tile_chain<Isa>(rows);
    Steps steps = {};
    steps.depth = keys, steps.columns = panel(), steps.a = p, steps.b_stride = panel();
    for (int64_t c = 0; c < e; c += panel()) {
      float *to = o + c / kSide * apart + c % kSide;
      if (loops) {
        loops->walk(p, p_exponent, v + c * deep, v_exponent + c * deep, rows, keys, to);
      } else {
        steps.b = v + c * deep;
        steps.start = steps.to = {to, kSide};
        chain(steps);
      }
    }
  }

  // One chain of `count` terms a(i), b(i), from c, number by number.
  template <class A, class B> float chain(float c, int64_t count, const A &a, const B &b) const {
    float x[16], y[16];
    for (int64_t begin = 0; begin < count; begin += 16) {
      const int64_t here = least(16, count - begin);
      for (int64_t i = 0; i < here; ++i) x[i] = a(begin + i), y[i] = b(begin + i);
      if (loops) {
        c = loops->walk_one(type, x, y, here, c);
      } else {
        for (int64_t i = 0; i < here; ++i) c = fmaf(x[i], y[i], c);
      }
    }
    return c;
  }
  // Element i of a vector of an operand.
  float get(const char *vector, int64_t i) const {
    return dispatch(type, [&](auto number) {
      using T = decltype(number);
      return T::get((const typename T::Stored *)vector + i);
    });
  }
};

// exp2 belongs to the arithmetic. Calls f with it.
template <class F> auto with_exp2(const Attention &a, F f) {
  if (a.arithmetic == Arithmetic::sm90) return f(HopperExp2{});
  if (a.arithmetic == Arithmetic::ieee && a.q.type == Type::f32) return f(FineExp2{});
  return f(CoarseExp2{});
}

}  // namespace
}  // namespace pydet
