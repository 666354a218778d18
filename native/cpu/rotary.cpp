// Rotary embeddings: the table of their cosines and sines, and pairs of elements turned by it (NUMERICS.md, "Rotary
// embeddings"). The bits are those of every other backend.

#include "cpu/parallel.h"
#include "cpu/piece.h"
#include "ops/rotary/formula.h"

namespace pydet {
namespace {

// ---- The table ---------------------------------------------------------------------------------------------------

void make_part(const RotaryTable &p, int64_t r, int64_t begin, int64_t end) {
  const float *frequencies = (const float *)p.frequencies.data, position = position_of(p, r);
  char *cos = row(p.cos, p.inner, r), *sin = row(p.sin, p.inner, r);
  Piece of_cos, of_sin;
  pieces(end - begin, [&](int64_t j, int64_t count) {
    j += begin;
    for (int64_t i = 0; i < count; ++i) {
      const CosSin made = cos_sin(position * frequencies[j + i]);
      of_cos.x[i] = made.cos * p.scale, of_sin.x[i] = made.sin * p.scale;
    }
    for (int64_t at = j; at < (p.twice ? 2 * p.n : p.n); at += p.n) {
      of_cos.store(p.cos.type, cos, at, count);
      of_sin.store(p.sin.type, sin, at, count);
    }
  });
}

// ---- Heads -------------------------------------------------------------------------------------------------------

struct PairPiece {
  Piece first, second;

  void load(Type type, const char *head, bool neighbours, int64_t pairs, int64_t j, int64_t count) {
    if (!neighbours) {
      first.load(type, head, j, count);
      second.load(type, head, pairs + j, count);
      return;
    }
    float x[2 * kPiece];
    Piece part;
    for (int64_t begin = 0; begin < 2 * count; begin += kPiece) {
      part.load(type, head, 2 * j + begin, 2 * count - begin < kPiece ? 2 * count - begin : int64_t(kPiece));
      memcpy(x + begin, part.x, sizeof part.x);
    }
    first = second = Piece{};
    for (int64_t i = 0; i < count; ++i) first.x[i] = x[2 * i], second.x[i] = x[2 * i + 1];
  }
  void store(Type type, char *head, bool neighbours, int64_t pairs, int64_t j, int64_t count) const {
    if (!neighbours) {
      first.store(type, head, j, count);
      second.store(type, head, pairs + j, count);
      return;
    }
    float x[2 * kPiece];
    for (int64_t i = 0; i < count; ++i) x[2 * i] = first.x[i], x[2 * i + 1] = second.x[i];
    Piece part;
    for (int64_t begin = 0; begin < 2 * count; begin += kPiece) {
      memcpy(part.x, x + begin, sizeof part.x);
      part.store(type, head, 2 * j + begin, 2 * count - begin < kPiece ? 2 * count - begin : int64_t(kPiece));
    }
  }
};

// Some pairs of a token's table, for all of its heads.
struct TablePiece {
  PairPiece cos, sin;

  void load(const Rotary &p, int64_t r, int64_t j, int64_t count) {
    const char *c = row(p.cos, p.inner, r), *s = row(p.sin, p.inner, r);
    if (p.whole) {
      cos.load(p.cos.type, c, p.table_neighbours(), p.pairs(), j, count);
      sin.load(p.sin.type, s, p.table_neighbours(), p.pairs(), j, count);
      return;
    }
    cos.first.load(p.cos.type, c, j, count);
    sin.first.load(p.sin.type, s, j, count);
    cos.second = cos.first, sin.second = sin.first;
  }
};

// (a cos - b sin, b cos + a sin), or transposed (a cos + b sin, b cos - a sin), where a sum of -0 is +0.
void turn(const TablePiece &table, Type step, bool transposed, PairPiece &pair) {
  float *const a = pair.first.x, *const b = pair.second.x;
  const float *const cos_a = table.cos.first.x, *const cos_b = table.cos.second.x;
  const float *const sin_a = table.sin.first.x, *const sin_b = table.sin.second.x;
  Piece products[4];
  float *const x = products[0].x, *const y = products[1].x, *const z = products[2].x, *const w = products[3].x;
  for (int i = 0; i < kPiece; ++i) x[i] = a[i] * cos_a[i], z[i] = b[i] * cos_b[i];
  if (transposed)
    for (int i = 0; i < kPiece; ++i) y[i] = b[i] * sin_b[i], w[i] = a[i] * sin_a[i];
  else
    for (int i = 0; i < kPiece; ++i) y[i] = b[i] * sin_a[i], w[i] = a[i] * sin_b[i];
  for (Piece &product : products) product.round(step);
  if (transposed)
    for (int i = 0; i < kPiece; ++i) a[i] = (x[i] + y[i]) + 0.0f, b[i] = (z[i] - w[i]) + 0.0f;
  else
    for (int i = 0; i < kPiece; ++i) a[i] = x[i] - y[i], b[i] = z[i] + w[i];
}

void turn_token(const Rotary &p, int64_t r) {
  TablePiece table;
  PairPiece pair;
  Piece rest;
  const TurnedHeads *const both[] = {&p.q, &p.k};
  const auto each_head = [&](const auto &f) {
    for (const TurnedHeads *heads : both) {
      if (!heads->x.data) continue;
      const char *x = row(heads->x, p.inner, r);
      char *y = row(heads->y, p.inner, r);
      for (int64_t h = 0; h < heads->heads; ++h)
        f(*heads, x + h * heads->x_stride * size_of(heads->x.type), y + h * heads->y_stride * size_of(heads->y.type));
    }
  };
  pieces(p.pairs(), [&](int64_t j, int64_t count) {
    table.load(p, r, j, count);
    each_head([&](const TurnedHeads &heads, const char *x, char *y) {
      pair.load(heads.x.type, x, p.neighbours, p.pairs(), j, count);
      turn(table, p.in_fp32 ? Type::f32 : heads.y.type, p.transposed, pair);
      pair.store(heads.y.type, y, p.out_neighbours, p.pairs(), j, count);
    });
  });
  pieces(p.n - p.turned, [&](int64_t j, int64_t count) {
    each_head([&](const TurnedHeads &heads, const char *x, char *y) {
      rest.load(heads.x.type, x, p.turned + j, count);
      if (p.transposed)
        for (float &v : rest.x) v = v + 0.0f;
      rest.store(heads.y.type, y, p.turned + j, count);
    });
  });
}

// Calls f for each row, some of them a task, each of which is so much work.
template <class F> void each_row(int64_t rows, double work, const F &f) {
  constexpr double kTask = 4096, kWorthAThread = 1 << 14;
  const int64_t at_once = work < kTask ? int64_t(kTask / work) : 1;
  Scratch scratch;  // not worked in: where there is none, one thread computes
  parallel(divide_up(rows, at_once), threads_for(double(rows) * work, kWorthAThread), scratch,
           [&](int64_t i, Scratch &) {
             for (int64_t r = i * at_once; r < rows && r < (i + 1) * at_once; ++r) f(r);
           });
}

}  // namespace

template <> pydet_status rotary_table<Isa>(const RotaryTable &p) {
  constexpr int64_t kPart = 1024;
  constexpr double kOfOne = 16;  // elements that are turned in the time of one number of the table
  const int64_t parts = divide_up(p.n, kPart);
  each_row(p.rows * parts, kOfOne * double(p.n < kPart ? p.n : kPart), [&](int64_t i) {
    const int64_t begin = i % parts * kPart;
    make_part(p, i / parts, begin, begin + kPart < p.n ? begin + kPart : p.n);
  });
  return PYDET_OK;
}

template <> pydet_status rotary<Isa>(const Rotary &p) {
  each_row(p.rows, double(p.n) * double(p.q.heads + p.k.heads), [&](int64_t r) { turn_token(p, r); });
  return PYDET_OK;
}

}  // namespace pydet
