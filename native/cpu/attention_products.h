// The two products of attention on the CPU, of one strip of query rows and one block of keys: scores s = q k^T, and
// o = chain over the keys of weights and values, from o. Operands become fp32 panels in scratch memory, which all rows of
// a task share; `Ieee` and `TensorCore` walk them by the chains of GEMM.
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
template <class T, int64_t panel>
void pack_keys(const char *const *keys, int64_t count, int64_t d, int64_t depth, float *to, float *buffer) {
  for (int64_t first = 0; first < count; first += panel, to += panel * depth) {
    for (int64_t lane = 0; lane < panel; lane += kWidth)
      turn_lanes<T>(keys + first + lane, most(count - first - lane, 0), d, to + lane, panel, buffer);
    memset(to + d * panel, 0, size_t((depth - d) * panel) * sizeof(float));
  }
}

// Values behind each other: panels[column / panel][key][column mod panel], keys and columns padded with +0 to `depth` and a
// panel; keys that `left_out` names are +0 too.
template <class T, int64_t panel>
void pack_values(const char *const *values, int64_t count, int64_t e, int64_t depth, const uint8_t *left_out, float *to) {
  using Stored = typename T::Stored;
  const int64_t columns = round_up(e, panel);
  for (int64_t key = 0; key < depth; ++key) {
    const bool absent = key >= count || (left_out && left_out[key]);
    const Stored *row = absent ? nullptr : (const Stored *)values[key];
    for (int64_t c = 0; c < columns; c += kWidth) {
      float *at = to + (c / panel * depth + key) * panel + c % panel;
      store(at, absent ? zero() : T::load(row + c, most(e - c, 0)));
    }
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

// ---- ieee ----------------------------------------------------------------------------------------------------------

// An operand type, one fmaf a step. Rows lie in strips, the rows of one step adjacent.
template <class T> struct Ieee {
  using Number = T;
  static constexpr int64_t kPanel = Tiles::kColumns, kStrip = Tiles::kRows, kStep = 1;
  static constexpr bool kFlushes = false;

  float *q, *p, *k, *v;

  void take_panels(Arena &arena, int64_t d, int64_t e, int64_t keys) {
    p = arena.take<float>(kStrip * kSide + kWidth);
    k = arena.take<float>(round_up(keys, kPanel) * d);
    v = arena.take<float>(keys * round_up(e, kPanel));
  }
  void take_rows(Arena &arena, int64_t rows, int64_t d) { q = arena.take<float>(rows * d); }

  void pack_query(const char *query, int64_t row, int64_t rows, int64_t d) {
    const typename T::Stored *from = (const typename T::Stored *)query;
    const int64_t first = row / kStrip * kStrip, height = least(kStrip, rows - first);
    float *to = q + first * d + (row - first);
    for (int64_t i = 0; i < d; ++i) to[i * height] = T::get(from + i);
  }
  void pack_keys(const char *const *keys, int64_t count, int64_t d, float *buffer) {
    pydet::pack_keys<T, kPanel>(keys, count, d, d, k, buffer);
  }
  void pack_values(const char *const *values, int64_t count, int64_t e, const uint8_t *left_out) {
    pydet::pack_values<T, kPanel>(values, count, e, round_up(count, 16), left_out, v);
  }

  // s[r][j] of the strip's rows and the packed keys.
  void scores(int64_t first, int64_t rows, int64_t keys, int64_t d, int64_t, float *s) const {
    const auto chain = Tiles::chain<T>(rows);
    Steps steps = {};
    steps.depth = d, steps.columns = kPanel, steps.a = q + first * d, steps.b_stride = kPanel;
    for (int64_t j = 0; j < keys; j += kPanel) {
      steps.b = k + j * d;
      steps.to = {s + j, kSide};
      chain(steps);
    }
  }
  // The same of few rows from the keys where they lie, kWidth keys by kWidth elements turned in registers: each key is
  // read once, and nothing is packed.
  static constexpr int64_t kFewRows = kWidth == 16 ? 8 : kWidth == 8 ? 4 : 0;
  template <int rows>
  static void scores_of(const float *q, const char *const *keys, int64_t count, int64_t d, float *s) {
    using Stored = typename T::Stored;
    for (int64_t j = 0; j < count; j += kWidth) {
      Floats sum[rows];
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) sum[r] = zero();
      for (int64_t i = 0; i < d; i += kWidth) {
        Floats t[kWidth];
        const int64_t rest = d - i;
#pragma GCC unroll 16
        for (int lane = 0; lane < kWidth; ++lane) {
          const Stored *key = (const Stored *)keys[least(j + lane, count - 1)] + i;
          prefetch(key, 4096);
          t[lane] = rest >= kWidth ? T::load(key) : T::load(key, rest);
        }
        transpose(t);
        if (rest >= kWidth) {
#pragma GCC unroll 16
          for (int step = 0; step < kWidth; ++step) {
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) sum[r] = fma(broadcast(q[(i + step) * rows + r]), t[step], sum[r]);
          }
        } else {
          for (int64_t step = 0; step < rest; ++step)
            for (int r = 0; r < rows; ++r) sum[r] = fma(broadcast(q[(i + step) * rows + r]), t[step], sum[r]);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) store(s + r * kSide + j, sum[r]);
    }
  }
  template <int rows = int(kFewRows)>
  void scores_of_few(int64_t count_rows, const char *const *keys, int64_t count, int64_t d, float *s) const {
    if constexpr (rows > 0) {
      if (count_rows == rows) return scores_of<rows>(q, keys, count, d, s);
      if constexpr (rows > 1) return scores_of_few<rows - 1>(count_rows, keys, count, d, s);
    }
  }

  // Weights as the strip of the second product, from s[r][j].
  void pack_weights(const float *s, int64_t rows, int64_t keys) {
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
  void weigh(int64_t rows, int64_t keys, int64_t packed, int64_t e, float *o, int64_t apart) const {
    const auto chain = Tiles::chain<T>(rows);
    Steps steps = {};
    steps.depth = keys, steps.columns = kPanel, steps.a = p, steps.b_stride = kPanel;
    for (int64_t c = 0; c < e; c += kPanel) {
      steps.b = v + c * round_up(packed, 16);
      steps.start = steps.to = {o + c / kSide * apart + c % kSide, kSide};
      chain(steps);
    }
  }
  const float *packed_values() const { return v; }
};

// ---- Tensor cores --------------------------------------------------------------------------------------------------

// The 16-bit exponents that steps want beside fp32 values of type T.
template <class T, class Model> inline void exponents_of(float *values, int64_t count, int16_t *exponents) {
  constexpr int kLeast = T::kIsBf16 ? -126 : -14;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t size = bits_of(values[i]) & 0x7FFFFFFFu;
    if (__is_same(Model, Cdna2)) {
      const bool tiny = size < uint32_t(kLeast + 127) << 23;
      values[i] = tiny ? 0.0f : values[i];
      size = tiny ? 0 : size;
    }
    const int32_t exponent = int32_t(size >> 23) - 127;
    const int32_t finite = exponent < kLeast ? kLeast : exponent;
    exponents[i] = int16_t(size == 0 ? kNone : exponent == 128 ? kSpecial : finite);
  }
}

// An operand type of 16 bits and a model. Rows lie in slices of kDepth along d.
template <class T, class Model_> struct TensorCore {
  using Number = T;
  using Model = Model_;
  static constexpr int64_t kPanel = kTile, kStrip = 8, kStep = Model::kStep, kFewRows = 0;
  static constexpr bool kFlushes = __is_same(Model, Cdna2);

  float *q, *k, *v, *p;
  int32_t *q_exponent, *p_exponent;
  int16_t *k_exponent, *v_exponent;

  void take_panels(Arena &arena, int64_t d, int64_t e, int64_t keys) {
    const int64_t of_k = round_up(keys, kPanel) * round_up(d, 16), of_v = keys * round_up(e, kPanel);
    p_exponent = arena.take<int32_t>(kStrip * kSide);
    k = arena.take<float>(of_k), v = arena.take<float>(of_v);
    k_exponent = arena.take<int16_t>(of_k), v_exponent = arena.take<int16_t>(of_v);
  }
  void take_rows(Arena &arena, int64_t rows, int64_t d) {
    q = arena.take<float>(rows * round_up(d, kDepth));
    q_exponent = arena.take<int32_t>(rows * round_up(d, kDepth));
  }

  static void spread(float *values, int32_t *exponents) {
    int16_t own[kDepth];
    exponents_of<T, Model>(values, kDepth, own);
    for (int i = 0; i < kDepth; ++i) exponents[i] = int32_t(uint16_t(own[i]) * 0x10001u);
  }
  void pack_query(const char *query, int64_t row, int64_t rows, int64_t d) {
    const typename T::Stored *from = (const typename T::Stored *)query;
    for (int64_t slice = 0; slice * kDepth < d; ++slice) {
      const int64_t at = (slice * rows + row) * kDepth;
      for (int64_t i = 0; i < kDepth; i += kWidth)
        store(q + at + i, T::load(from + slice * kDepth + i, most(d - slice * kDepth - i, 0)));
      spread(q + at, q_exponent + at);
    }
  }
  void pack_keys(const char *const *keys, int64_t count, int64_t d, float *buffer) {
    const int64_t depth = round_up(d, 16);
    pydet::pack_keys<T, kPanel>(keys, count, d, depth, k, buffer);
    exponents_of<T, Model>(k, round_up(count, kPanel) * depth, k_exponent);
  }
  void pack_values(const char *const *values, int64_t count, int64_t e, const uint8_t *left_out) {
    const int64_t depth = round_up(count, 16);
    pydet::pack_values<T, kPanel>(values, count, e, depth, left_out, v);
    exponents_of<T, Model>(v, round_up(e, kPanel) * depth, v_exponent);
  }

  static void walk_rows(const Panels &panels, int64_t rows, int64_t depth, float *chain) {
    int64_t r = 0;
    for (; r + kGroup <= rows; r += kGroup) walk<Model, kGroup>(panels, int(r), 0, int(depth), chain + r * kSide);
    for (; r < rows; ++r) walk<Model, 1>(panels, int(r), 0, int(depth), chain + r * kSide);
  }
  void scores(int64_t first, int64_t rows, int64_t keys, int64_t d, int64_t all_rows, float *s) const {
    const int64_t depth = round_up(d, 16);
    memset(s, 0, size_t(rows * kSide) * sizeof(float));
    for (int64_t j = 0; j < keys; j += kPanel) {
      for (int64_t begin = 0; begin < d; begin += kDepth) {
        const int64_t of_q = (begin / kDepth * all_rows + first) * kDepth, of_k = (j / kPanel * depth + begin) * kPanel;
        Panels panels = {};
        panels.a = (float (*)[kDepth])(q + of_q), panels.a_exponent = (int32_t (*)[kDepth])(q_exponent + of_q);
        panels.b = (float (*)[kTile])(k + of_k), panels.b_exponent = (int16_t (*)[kTile])(k_exponent + of_k);
        walk_rows(panels, rows, least(kDepth, d - begin), s + j);
      }
    }
  }
  void scores_of_few(int64_t, const char *const *, int64_t, int64_t, float *) const {}

  // They stay where they are, with their exponents beside them.
  void pack_weights(float *s, int64_t rows, int64_t) {
    p = s;
    for (int64_t r = 0; r < rows; ++r) spread(s + r * kSide, p_exponent + r * kSide);
  }
  void weigh(int64_t rows, int64_t keys, int64_t packed, int64_t e, float *o, int64_t apart) const {
    const int64_t depth = round_up(packed, 16);
    for (int64_t c = 0; c < e; c += kPanel) {
      const int64_t of_v = c * depth;
      Panels panels = {};
      panels.a = (float (*)[kDepth])p, panels.a_exponent = (int32_t (*)[kDepth])p_exponent;
      panels.b = (float (*)[kTile])(v + of_v), panels.b_exponent = (int16_t (*)[kTile])(v_exponent + of_v);
      walk_rows(panels, rows, keys, o + c / kSide * apart + c % kSide);
    }
  }
  const float *packed_values() const { return v; }
};

}  // namespace
}  // namespace pydet
