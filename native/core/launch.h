// What every entry of the C ABI ends with, once its arguments are checked.
#pragma once

#include "kernel.h"

namespace pydet {

// Runs the problem by the kernel of that name, or where `forced` is NULL by the one that suits it best. Made in
// launch.cpp for each problem.
template <class Problem> pydet_status launch(const char *op, const Problem &problem, const char *forced);

struct FromInitial;  // rounding.h

// The same of a product that computes the sums of a result that begins at a tensor of its own.
pydet_status launch_from(const char *op, const Gemm &sums, const FromInitial &steps, const char *forced);

// For a call whose outputs have no elements.
pydet_status nothing_to_write();

}  // namespace pydet
