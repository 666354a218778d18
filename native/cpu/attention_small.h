// One row of attention in the smallest scratch memory: every chain by itself, number by number. Slow, with the same bits.
#pragma once

#include "cpu/attention_rows.h"

namespace pydet {
namespace {

// One chain of `count` terms a(i), b(i), from c, in the steps of the engine.
template <class Engine> struct SmallChain;

template <class T> struct SmallChain<Ieee<T>> {
  template <class A, class B> float operator()(float c, int64_t count, const A &a, const B &b) {
    for (int64_t i = 0; i < count; ++i) c = fmaf(a(i), b(i), c);
    return c;
  }
};

template <class T, class Model> struct SmallChain<TensorCore<T, Model>> {
  float a_step[16], b_step[16 * kTile], b_near[16];
  int32_t a_exponent[16];
  int16_t b_exponent[16 * kTile], exponents[16];

  template <class A, class B> float operator()(float c, int64_t count, const A &a, const B &b) {
    for (int64_t begin = 0; begin < count; begin += Model::kStep) {
      for (int64_t i = 0; i < Model::kStep; ++i) {
        const bool in = begin + i < count;
        a_step[i] = in ? a(begin + i) : 0.0f, b_near[i] = in ? b(begin + i) : 0.0f;
      }
      exponents_of<T, Model>(a_step, Model::kStep, exponents);
      for (int64_t i = 0; i < Model::kStep; ++i) a_exponent[i] = exponents[i];
      exponents_of<T, Model>(b_near, Model::kStep, exponents);
      for (int64_t i = 0; i < Model::kStep; ++i) b_step[i * kTile] = b_near[i], b_exponent[i * kTile] = exponents[i];
      c = step(c);
    }
    return c;
  }
  float step(float c) const {
    if constexpr (__is_same(Model, Cdna2)) {
      auto flushed = [](float x) { return fabsf(x) < 0x1p-126f ? 0.0f : x; };
      float p[4];
      for (int i = 0; i < 4; ++i) p[i] = flushed(a_step[i] * b_step[i * kTile]);
      return flushed(flushed(c) + flushed(flushed(p[0] + p[1]) + flushed(p[2] + p[3])));
    } else {
      return Model::exact({a_step, a_exponent, b_step, b_exponent}, c);
    }
  }
};

template <class Engine> struct SmallDesk {
  static constexpr int64_t kColumns = 512;
  float o[kColumns], total[kColumns], s[kSide];
  uint8_t left_out[kSide];
  SmallChain<Engine> chain;
};

template <class Engine, class Exp2>
__attribute__((noinline)) void small_row(const Attention &a, const Extent &extent, const Row &row, Scratch &scratch) {
  using T = typename Engine::Number;
  using Stored = typename T::Stored;
  static_assert(sizeof(SmallDesk<Engine>) <= Scratch::kSmall, "it fits");
  SmallDesk<Engine> &desk = *(SmallDesk<Engine> *)scratch.data;
  const ScoreScale scale = score_scale(a);
  const float c = a.bias.data ? 1.0f : scale.c;
  const int64_t token = extent.q_begin + row.query, group = row.head / (a.heads / a.groups);
  const Stored *q = (const Stored *)a.q.data + row.sequence * a.q.sequence_stride + row.head * a.q.head_stride +
                    token * a.q.token_stride;
  auto vector_at = [&](const Heads &heads, int64_t key) {
    return (const Stored *)heads.data + group * heads.head_stride +
           key_offset(a, heads, row.sequence, extent.k_begin + extent.first + key);
  };
  RowSoFar so_far = {-INFINITY, 0};
  memset(desk.total, 0, sizeof desk.total);
  const int64_t h = a.kv_chunk, block = block_keys(a.d);
  for (int64_t begin = row.keys.first / h * h; begin < row.keys.end; begin += h) {
    float m = -INFINITY, l[kWeightLanes] = {};
    memset(desk.o, 0, sizeof desk.o);
    const int64_t end = least(begin + h, row.keys.end);
    for (int64_t at = most(begin, row.keys.first / block * block); at < end; at += block) {
      const int64_t count = least(at + block, end) - at, padded = round_up(count, 16);
      for (int64_t j = 0; j < count; ++j) {
        const Stored *k = vector_at(a.k, at + j);
        desk.s[j] = at + j < row.keys.first ? 0.0f
                                            : desk.chain(
                                                  0.0f, a.d, [&](int64_t i) { return T::get(q + i); },
                                                  [&](int64_t i) { return T::get(k + i); });
      }
      mask_scores(a, scale, run_of(a, extent, row, at, count), count, desk.s);
      const float reference = reference_of(m, c * top_of(desk.s, padded).score);
      if (reference == -INFINITY) continue;
      for (int64_t j = 0; j < padded; ++j) desk.left_out[j] = desk.s[j] == -INFINITY;
      const float factor = Exp2::of(m - reference);
      for (float &lane : l) lane *= factor;
      scale_row<Engine::kFlushes>(desk.o, kSide, a.e, factor);
      m = reference;
      weigh_scores<Exp2>(desk.s, padded, c, reference, l);
      round_weights<T>(desk.s, padded);
      for (int64_t e = 0; e < a.e; ++e)
        desk.o[e] = desk.chain(
            desk.o[e], count, [&](int64_t j) { return desk.left_out[j] ? 0.0f : desk.s[j]; },
            [&](int64_t j) { return desk.left_out[j] ? 0.0f : T::get(vector_at(a.v, at + j) + e); });
    }
    join_segment<Exp2>({m, joined(l)}, desk.o, so_far, desk.total, kSide, a.e);
  }
  finish_row<Exp2>(a, extent, row, so_far, desk.total, kSide);
}

}  // namespace
}  // namespace pydet
