// Attention.

#include "api/launch.h"
#include "ops/attention/check.h"

namespace pydet {
namespace {

// Apart from the call itself, so that the views are off the stack when a kernel runs.
__attribute__((noinline)) pydet_status read_attention(const pydet_tensor *q, const pydet_tensor *k,
                                                      const pydet_tensor *v, const pydet_tensor *out,
                                                      const pydet_tensor *lse, const pydet_attention_options &options,
                                                      Attention *problem) {
  const char *op = "attention";
  AttentionViews x = {};
  PYDET_TRY(read(op, "q", kFactor, q, 3, &x.q));
  PYDET_TRY(read(op, "k", kFactor, k, 3, &x.k));
  PYDET_TRY(read(op, "v", kFactor, v, 3, &x.v));
  PYDET_TRY(read(op, "out", kResult, out, 3, &x.out));
  PYDET_TRY(read_optional(op, "lse", kNormVector, lse, 2, &x.lse));
  PYDET_TRY(read_optional(op, "sinks", kAddend, options.sinks, 1, &x.sinks));
  PYDET_TRY(read_bools(op, "allowed", options.allowed, &x.allowed));
  PYDET_TRY(read_optional(op, "bias", kAddend, options.bias, 0, &x.bias));
  PYDET_TRY(read_integers(op, "first_key", options.first_key, 1, &x.first_key));
  PYDET_TRY(read_integers(op, "cu_seqlens_q", options.cu_seqlens_q, 1, &x.q_start));
  PYDET_TRY(read_integers(op, "cu_seqlens_k", options.cu_seqlens_k, 1, &x.k_start));
  PYDET_TRY(read_integers(op, "seqlens_k", options.seqlens_k, 1, &x.k_length));
  PYDET_TRY(read_integers(op, "block_table", options.block_table, 2, &x.pages));
  return attention_of(x, options, problem);
}

}  // namespace
}  // namespace pydet

using namespace pydet;

pydet_status pydet_attention(void *stream, const pydet_tensor *q, const pydet_tensor *k, const pydet_tensor *v,
                             const pydet_tensor *out, const pydet_tensor *lse, const pydet_attention_options *given) {
  const char *op = "attention";
  pydet_attention_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  Attention problem = {};
  problem.stream = stream;
  PYDET_TRY(read_attention(q, k, v, out, lse, options, &problem));
  if (problem.sequences == 0 || problem.heads == 0 || problem.queries == 0) return nothing_to_write();
  return launch(op, problem, options.kernel);
}

pydet_status pydet_attention_workspace(int64_t sequences, int64_t heads, int64_t groups, int64_t queries, int64_t keys,
                                       int64_t d, int64_t e, const pydet_attention_options *given, uint64_t *bytes) {
  const char *op = "attention_workspace";
  pydet_attention_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  if (!bytes) return fail(PYDET_NULL_POINTER, "%s: bytes is NULL", op);
  PYDET_TRY(check_arithmetic(op, options.arithmetic));
  if (sequences < 0 || heads < 0 || queries < 0 || keys < 0)
    return fail(PYDET_INVALID_SHAPE,
                "%s: an extent is negative (B %" PRId64 ", H %" PRId64 ", Q %" PRId64 ", K %" PRId64 ")", op, sequences,
                heads, queries, keys);
  if (groups < 1 || heads % groups)
    return fail(PYDET_INVALID_SHAPE, "%s: H is %" PRId64 ", want a multiple of G, %" PRId64, op, heads, groups);
  PYDET_TRY(check_widths(op, d, e));
  Attention problem = {};
  PYDET_TRY(check_segment(op, options.kv_chunk, &problem.kv_chunk));
  static const int32_t kPacked = 0;  // to be told from NULL; nobody reads it
  problem.sequences = sequences, problem.heads = heads, problem.groups = groups;
  problem.queries = queries, problem.keys = keys, problem.d = d, problem.e = e;
  problem.q_start = options.cu_seqlens_q ? &kPacked : nullptr;
  problem.arithmetic = Arithmetic(options.arithmetic);
  *bytes = 0;
  for (const Backend *backend : {&cpu_backend(), gpu_backend()}) {
    if (!backend || !backend->attention_workspace) continue;
    const uint64_t wanted = backend->attention_workspace(problem, options.kernel);
    *bytes = wanted > *bytes ? wanted : *bytes;
  }
  return PYDET_OK;
}
