// Softmax of rows, its logarithm, the log-probability of one column, and their gradients, in fp32 (NUMERICS.md,
// "Softmax"). The bits are those of every other backend.
//
//   m = max(x) + 0,   e = exp(x - m),   s = rowsum(e, 1)
//   softmax  y = round(e / s)                      log_softmax  y = round((x - m) - log(s))
//   log_prob y = (x[index] - m) - log(s)           its gradient dx = round(fmaf(-(e / s), g, j = index ? g : 0))
//   backward c = rowsum(dy, y), dx = round(y (dy - c));   of the log: c = rowsum(dy, 1), dx = round(fmaf(-exp(y), c, dy))
//
// A row is passed over three times, a gradient's twice, in pieces that become floats on the stack: what is done to a
// piece is a loop over them, of which the compiler makes vectors.

#include "cpu/each_row.h"
#include "contract/elementary.h"

namespace pydet {
namespace {

// The column that log_prob asks for in row r; -1 where it is none of the row's.
int64_t column_of(const Softmax &problem, int64_t r) {
  int64_t asked =
      problem.index.wide ? ((const int64_t *)problem.index.data)[r] : ((const int32_t *)problem.index.data)[r];
  return asked >= 0 && asked < problem.n ? asked : -1;
}

// Element j of a row lies at `row`, j places on.
struct ElementPlace {
  char *row;
  int64_t j;
};
ElementPlace place_of(const Softmax &problem, char *whole, int64_t r, int64_t j) {
  const int64_t columns = problem.slabs.columns;
  return columns ? ElementPlace{slab_row(problem, j / columns, r), j % columns} : ElementPlace{whole, j};
}
float max_of(const Softmax &problem, const char *whole, int64_t r, Piece &piece) {
  const int64_t n = problem.n, columns = problem.slabs.columns;
  if (!columns) return row_max(problem.x.type, whole, n, piece);
  float max = -INFINITY;
  for (int64_t c = 0; c * columns < n; ++c) {
    const int64_t left = n - c * columns;
    const float most = row_max(problem.x.type, slab_row(problem, c, r), left < columns ? left : columns, piece);
    max = most > max ? most : max;
  }
  return max;
}

void softmax_row(const Softmax &problem, int64_t r, RowSum &lanes) {
  const int64_t n = problem.n;
  const Type type = problem.x.type;
  char *const x = row(problem.x, problem.inner, r);
  Piece piece;
  const float max = max_of(problem, x, r, piece);
  const auto load = [&](int64_t j, int64_t count) {
    const ElementPlace place = place_of(problem, x, r, j);
    piece.load(type, place.row, place.j, count);
  };
  // In fp32 e waits in y, where it is e again.
  const bool keeps =
      problem.kind == SoftmaxKind::softmax && type == Type::f32 && !problem.slabs.columns && !problem.log_prob.data;
  char *const y = row(problem.y, problem.inner, r);
  lanes.clear(n);
  pieces(n, [&](int64_t j, int64_t count) {
    load(j, count);
    for (float &e : piece.x) e = exp_f32(e - max);
    if (keeps) piece.store<Number<Type::f32>>((float *)y + j, count);
    along(count, [&](int64_t i, auto v) { lanes.add(j + i, get<Partial>(piece.x + i, v), all(1.0f, v)); });
  });
  const float sum = lanes.joined(n);
  if (keeps)
    return pieces(n, [&](int64_t j, int64_t count) {
      piece.load<Number<Type::f32>>((float *)y + j, count);
      for (float &e : piece.x) e = e / sum;
      piece.store<Number<Type::f32>>((float *)y + j, count);
    });
  const float log_sum = log_f32(sum);

  if (problem.log_prob.data) {
    const int64_t index = column_of(problem, r);
    float result = float_of(kNanF32);
    if (index >= 0) {
      const ElementPlace place = place_of(problem, x, r, index);
      result = (element(type, place.row, place.j) - max) - log_sum;
    }
    ((float *)problem.log_prob.data)[r] = pydet::canonical(result);
  }
  if (problem.kind == SoftmaxKind::log_prob) return;
  auto write = [&](auto element) {
    pieces(n, [&](int64_t j, int64_t count) {
      load(j, count);
      for (int i = 0; i < kPiece; ++i) piece.x[i] = element(j + i, piece.x[i]);
      const ElementPlace place = place_of(problem, y, r, j);
      piece.store(type, place.row, place.j, count);
    });
  };
  switch (problem.kind) {
    case SoftmaxKind::softmax: return write([=](int64_t, float v) { return exp_f32(v - max) / sum; });
    case SoftmaxKind::log_softmax: return write([=](int64_t, float v) { return (v - max) - log_sum; });
    case SoftmaxKind::log_prob_backward: break;
    case SoftmaxKind::log_prob: return;
  }
  const int64_t index = column_of(problem, r);
  const float gradient = ((const float *)problem.dlog_prob.data)[r];
  if (index < 0) return write([](int64_t, float) { return 0.0f; });
  write([=](int64_t j, float v) { return fmaf(-(exp_f32(v - max) / sum), gradient, j == index ? gradient : 0.0f); });
}

// Of softmax itself. Elements are read where they are: two copies of them would take as long as the rest.
template <class T> void backward_row(const SoftmaxBackward &problem, int64_t r, RowSum &lanes) {
  const int64_t n = problem.n;
  const auto *const dy = row<T>(problem.dy, problem.inner, r), *const y = row<T>(problem.y, problem.inner, r);
  auto *const dx = row<T>(problem.dx, problem.inner, r);
  lanes.clear(n);
  along(n, [&](int64_t j, auto v) { lanes.add(j, get<T>(dy + j, v), get<T>(y + j, v)); });
  const float c = lanes.joined(n);
  along(n, [&](int64_t j, auto v) { set<T>(dx + j, get<T>(y + j, v) * (get<T>(dy + j, v) + all(-c, v))); });
}

// Of its logarithm.
void log_backward_row(const SoftmaxBackward &problem, int64_t r, RowSum &lanes) {
  const int64_t n = problem.n;
  const Type type = problem.dy.type;
  const char *dy = row(problem.dy, problem.inner, r), *y = row(problem.y, problem.inner, r);
  char *dx = row(problem.dx, problem.inner, r);
  Piece first, second;
  lanes.clear(n);
  pieces(n, [&](int64_t j, int64_t count) {
    first.load(type, dy, j, count);
    along(count, [&](int64_t i, auto v) { lanes.add(j + i, get<Partial>(first.x + i, v), all(1.0f, v)); });
  });
  const float c = lanes.joined(n);
  pieces(n, [&](int64_t j, int64_t count) {
    first.load(type, dy, j, count);
    second.load(type, y, j, count);
    for (int i = 0; i < kPiece; ++i) first.x[i] = fmaf(-exp_f32(second.x[i]), c, first.x[i]);
    first.store(type, dx, j, count);
  });
}

}  // namespace

template <> pydet_status softmax<Isa>(const Softmax &problem) {
  each_row(problem.rows, problem.n, [&](int64_t r, RowSum &lanes) { softmax_row(problem, r, lanes); });
  return PYDET_OK;
}

template <> pydet_status softmax_backward<Isa>(const SoftmaxBackward &problem) {
  each_row(problem.rows, problem.n, [&](int64_t r, RowSum &lanes) {
    if (problem.log) log_backward_row(problem, r, lanes);
    else dispatch(problem.dy.type, [&](auto number) { backward_row<decltype(number)>(problem, r, lanes); });
  });
  return PYDET_OK;
}

}  // namespace pydet
