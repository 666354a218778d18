// Why a kernel that is asked for by name does not take a problem: the first of what its row wants that is not so.
#pragma once

#include "core/error.h"
#include "core/kernel.h"
#include "core/operation.h"

namespace pydet {

// Of a row that has the features and that does not accept the problem.
template <class Problem> const char *why_not_accepted(const Kernel<Problem> &row, const Problem &problem) {
  Problem other = problem;
  if (!Operation<Problem>::lay_well(other)) return "not with this shape, these strides or this alignment";
  Choice choice;
  if (row.accepts(other, &choice)) return "not with these strides or this alignment";
  if (Operation<Problem>::drop_chunks(other) && row.accepts(other, &choice)) return "not with this k_chunk";
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
  if (!row.machine.has(problem.device))
    return fail(PYDET_UNSUPPORTED, "%s: it needs %s, which %s does not have", start, row.machine.name,
                device_text(problem.device.type, problem.device.id).text);
  // Asked again, nothing is in the way: the device did not answer when the row was tried, and does now.
  if (Choice choice; row.accepts(problem, &choice))
    return fail(PYDET_UNSUPPORTED, "%s: %s does not say what it is", start,
                device_text(problem.device.type, problem.device.id).text);
  return fail(PYDET_UNSUPPORTED, "%s: %s", start, why_not_accepted(row, problem));
}

}  // namespace pydet
