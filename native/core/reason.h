// Why a kernel that is asked for by name does not take a problem: the first of what its row wants that is not so.
#pragma once

#include <initializer_list>

#include "check/error.h"

namespace pydet {

// The same problem where no stride and no address can be in a kernel's way: elements along k or along the row are
// adjacent, and all begins at multiples of `kRoom` elements. Of no use but to be shown to a row.
constexpr int64_t kRoom = 128;
inline int64_t with_room(int64_t stride) { return stride / kRoom * kRoom + (stride % kRoom ? kRoom : 0); }
inline void lay_well(char *&data) {
  if (data) data -= reinterpret_cast<uintptr_t>(data) % (4 * kRoom);
}
inline void lay_well(Rows &rows) {
  lay_well(rows.data);
  rows.outer_stride = with_room(rows.outer_stride);
  rows.inner_stride = with_room(rows.inner_stride);
}
inline bool lay_well(Gemm &g) {
  for (Matrix *matrix : {&g.a, &g.b, &g.out}) lay_well(matrix->data);
  g.a.row_stride = g.b.col_stride = with_room(g.k);
  g.a.col_stride = g.b.row_stride = 1;
  g.out.row_stride = with_room(g.n);
  for (int i = 0; i < g.batch.dims; ++i)
    for (int64_t *strides : {g.batch.a, g.batch.b, g.batch.out}) strides[i] = with_room(strides[i]);
  return true;
}
inline bool lay_well(RmsNorm &norm) {
  for (Rows *rows : {&norm.x, &norm.residual, &norm.y, &norm.sum}) lay_well(*rows);
  return lay_well(norm.weight.data), true;
}
inline bool lay_well(RmsNormBackward &norm) {
  for (Rows *rows : {&norm.dy, &norm.x, &norm.dresidual, &norm.dx}) lay_well(*rows);
  return lay_well(norm.weight.data), true;
}
inline bool lay_well(Softmax &softmax) { return lay_well(softmax.x), lay_well(softmax.y), true; }
inline bool lay_well(SoftmaxBackward &softmax) {
  return lay_well(softmax.dy), lay_well(softmax.y), lay_well(softmax.dx), true;
}
template <class Problem> bool lay_well(Problem &) { return false; }  // not known to matter

inline bool drop_chunks(Gemm &g) { return g.k_chunk != 0 && (g.k_chunk = 0, true); }
template <class Problem> bool drop_chunks(Problem &) { return false; }

// Of a row that has the features and that does not accept the problem.
template <class Problem> const char *why_not_accepted(const Kernel<Problem> &row, const Problem &problem) {
  Problem other = problem;
  if (!lay_well(other)) return "not with this shape, these strides or this alignment";
  Choice choice;
  if (row.accepts(other, &choice)) return "not with these strides or this alignment";
  if (drop_chunks(other) && row.accepts(other, &choice)) return "not with this k_chunk";
  return "not of this shape";
}

template <class Problem>
pydet_status refuse_row(const char *op, const Kernel<Problem> &row, const Problem &problem, Type type,
                        Arithmetic arithmetic) {
  char start[200];
  snprintf(start, sizeof start, "%s: kernel %s does not take this problem", op, row.name);
  if (!(row.types & bit(type)))
    return fail(PYDET_UNSUPPORTED, "%s: it takes %s inputs, got %s", start, type_list(row.types).text, type_name(type));
  if (row.arithmetic != arithmetic)
    return fail(PYDET_UNSUPPORTED, "%s: it computes arithmetic %s, and the call asks for %s", start,
                arithmetic_name(row.arithmetic), arithmetic_name(arithmetic));
  if (!row.runs_on(problem.device))
    return fail(PYDET_UNSUPPORTED, "%s: it needs %s, which %s does not have", start, row.requires_,
                device_text(problem.device.type, problem.device.id).text);
  // Asked again, nothing is in the way: the device did not answer when the row was tried, and does now.
  if (Choice choice; row.accepts(problem, &choice))
    return fail(PYDET_UNSUPPORTED, "%s: %s does not say what it is", start,
                device_text(problem.device.type, problem.device.id).text);
  return fail(PYDET_UNSUPPORTED, "%s: %s", start, why_not_accepted(row, problem));
}

}  // namespace pydet
