// Attention.

#include "core/launch.h"
#include "ops/attention/check.h"

namespace pydet {
namespace {

// What the options of both directions name alike.
template <class Options> pydet_status read_named(const char *op, const Options &options, AttentionViews *x) {
  PYDET_TRY(read_optional(op, "sinks", kAddend, options.sinks, 1, &x->sinks));
  PYDET_TRY(read_bools(op, "allowed", options.allowed, &x->allowed));
  PYDET_TRY(read_optional(op, "bias", kAddend, options.bias, 0, &x->bias));
  PYDET_TRY(read_integers(op, "first_key", options.first_key, 1, &x->first_key));
  PYDET_TRY(read_integers(op, "cu_seqlens_q", options.cu_seqlens_q, 1, &x->q_start));
  PYDET_TRY(read_integers(op, "cu_seqlens_k", options.cu_seqlens_k, 1, &x->k_start));
  return read_integers(op, "seqlens_k", options.seqlens_k, 1, &x->k_length);
}

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
  PYDET_TRY(read_named(op, options, &x));
  PYDET_TRY(read_integers(op, "block_table", options.block_table, 2, &x.pages));
  return attention_of(x, options, problem);
}

struct BackwardTensors {
  const pydet_tensor *dout, *q, *k, *v, *out, *lse, *dq, *dk, *dv;
};
__attribute__((noinline)) pydet_status read_backward(const BackwardTensors &given,
                                                     const pydet_attention_backward_options &options,
                                                     AttentionBackward *problem) {
  const char *op = "attention_backward";
  AttentionBackwardViews x = {};
  PYDET_TRY(read(op, "dout", kFactor, given.dout, 3, &x.dout));
  PYDET_TRY(read(op, "q", kFactor, given.q, 3, &x.forward.q));
  PYDET_TRY(read(op, "k", kFactor, given.k, 3, &x.forward.k));
  PYDET_TRY(read(op, "v", kFactor, given.v, 3, &x.forward.v));
  PYDET_TRY(read(op, "out", kFactor, given.out, 3, &x.forward.out));
  PYDET_TRY(read(op, "lse", kNormVector, given.lse, 2, &x.forward.lse));
  PYDET_TRY(read_optional(op, "dq", kResult, given.dq, 3, &x.dq));
  PYDET_TRY(read_optional(op, "dk", kResult, given.dk, 3, &x.dk));
  PYDET_TRY(read_optional(op, "dv", kResult, given.dv, 3, &x.dv));
  PYDET_TRY(read_named(op, options, &x.forward));
  PYDET_TRY(read_optional(op, "dsinks", kResult, options.dsinks, 1, &x.dsinks));
  return attention_backward_of(x, options, problem);
}

// The extents of a question about a workspace, into *a; data there are none.
template <class Options>
pydet_status read_extents(const char *op, int64_t sequences, int64_t heads, int64_t groups, int64_t queries,
                          int64_t keys, int64_t d, int64_t e, const Options &options, const uint64_t *bytes,
                          Attention *a) {
  if (!bytes) return fail(PYDET_NULL_POINTER, "%s: bytes is NULL", op);
  PYDET_TRY(check_arithmetic(op, options.arithmetic));
  if (sequences < 0 || heads < 0 || queries < 0 || keys < 0)
    return fail(PYDET_INVALID_SHAPE,
                "%s: an extent is negative (B %" PRId64 ", H %" PRId64 ", Q %" PRId64 ", K %" PRId64 ")", op, sequences,
                heads, queries, keys);
  if (groups < 1 || heads % groups)
    return fail(PYDET_INVALID_SHAPE, "%s: H is %" PRId64 ", want a multiple of G, %" PRId64, op, heads, groups);
  PYDET_TRY(check_widths(op, d, e));
  static const int32_t kPacked = 0;  // to be told from NULL; nobody reads it
  a->sequences = sequences, a->heads = heads, a->groups = groups;
  const auto held = [](int64_t tokens) { return tokens < kMostTokens ? tokens : kMostTokens; };
  a->queries = held(queries), a->keys = held(keys), a->d = d, a->e = e;
  a->q_start = options.cu_seqlens_q ? &kPacked : nullptr;
  a->k_start = options.cu_seqlens_k ? &kPacked : nullptr;
  a->arithmetic = Arithmetic(options.arithmetic);
  return PYDET_OK;
}

// The most that any backend wants.
template <class Problem> uint64_t most_workspace(const Problem &problem, const char *kernel) {
  uint64_t bytes = 0;
  for (const Backend *backend : {&cpu_backend(), gpu_backend()}) {
    const Hooks<Problem> *hooks = backend ? backend->table<Problem>().hooks : nullptr;
    if (!hooks) continue;
    const uint64_t wanted = hooks->workspace(problem, kernel);
    bytes = wanted > bytes ? wanted : bytes;
  }
  return bytes;
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
  Attention problem = {};
  PYDET_TRY(read_extents(op, sequences, heads, groups, queries, keys, d, e, options, bytes, &problem));
  PYDET_TRY(check_segment(op, options.kv_chunk, &problem.kv_chunk));
  *bytes = most_workspace(problem, options.kernel);
  return PYDET_OK;
}

pydet_status pydet_attention_backward(void *stream, const pydet_tensor *dout, const pydet_tensor *q,
                                      const pydet_tensor *k, const pydet_tensor *v, const pydet_tensor *out,
                                      const pydet_tensor *lse, const pydet_tensor *dq, const pydet_tensor *dk,
                                      const pydet_tensor *dv, const pydet_attention_backward_options *given) {
  const char *op = "attention_backward";
  pydet_attention_backward_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  AttentionBackward problem = {};
  problem.stream = problem.forward.stream = stream;
  PYDET_TRY(read_backward({dout, q, k, v, out, lse, dq, dk, dv}, options, &problem));
  if (!problem.dq.data && !problem.dk.data && !problem.dv.data && !problem.dsinks.data) return nothing_to_write();
  return launch(op, problem, options.kernel);
}

pydet_status pydet_attention_backward_workspace(int64_t sequences, int64_t heads, int64_t groups, int64_t queries,
                                                int64_t keys, int64_t d, int64_t e,
                                                const pydet_attention_backward_options *given, uint64_t *bytes) {
  const char *op = "attention_backward_workspace";
  pydet_attention_backward_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  AttentionBackward problem = {};
  PYDET_TRY(read_extents(op, sequences, heads, groups, queries, keys, d, e, options, bytes, &problem.forward));
  *bytes = most_workspace(problem, options.kernel);
  return PYDET_OK;
}
