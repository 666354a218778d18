// A checked problem of the head: whether its steps can be enqueued, and enqueueing them.
#pragma once

#include "ops/head/problem.h"

namespace pydet {

// Refuses what run_head would, and enqueues nothing.
pydet_status check_head(const char *op, const LinearLogProb &p);
pydet_status run_head(const char *op, const LinearLogProb &p);

// What pydet_linear_log_prob_workspace says.
pydet_status head_workspace(const char *op, int64_t rows, int64_t n, int64_t k, pydet_dtype type, int32_t backward,
                            uint64_t most, const pydet_linear_log_prob_options &options, uint64_t *bytes);

}  // namespace pydet
