// Attention.
#include "entry/python/methods.h"
#include "entry/python/results.h"

namespace pydet {
namespace {

// What the library is asked how much workspace it wants for: as far as the operands have shapes that fit, else nothing.
bool make_room(PythonCall &call, const Operand &q, const Operand &k, const Operand &v, const Operand &table,
               pydet_attention_options *options) {
  const pydet_tensor &queries = q.tensor, &keys = k.tensor;
  const bool packed_q = options->cu_seqlens_q, packed_k = options->cu_seqlens_k, paged = options->block_table;
  if (!sound(queries, packed_q ? 3 : 4) || !sound(keys, packed_k ? 3 : 4) || !sound(v.tensor, 1)) return true;
  const int64_t heads = queries.shape[1], groups = keys.shape[paged ? 2 : 1];
  int64_t most = keys.shape[packed_k ? 0 : paged ? 1 : 2];
  if (paged && (table.tensor.ndim != 2 || __builtin_mul_overflow(most, table.tensor.shape[1], &most))) return true;
  const int64_t d = keys.shape[keys.ndim - 1], e = v.tensor.shape[v.tensor.ndim - 1];
  uint64_t bytes = 0;
  const pydet_status status = call.library().attention_workspace(
      packed_q ? 1 : queries.shape[0], heads, groups, queries.shape[packed_q ? 0 : 2], most, d, e, options, &bytes);
  return status != PYDET_OK || call.make_workspace(bytes, &options->workspace, &options->workspace_size);
}

// Multiply-adds, or any large number where there are very many.
int64_t attention_work(const pydet_tensor &q, const pydet_tensor &k) {
  int64_t work;
  return __builtin_mul_overflow(elements(q), elements(k), &work) ? kGilWork : work;
}

}  // namespace

// -> out, or (out, lse)
Object *call_attention(Object *, Object *const *args, intptr_t count, Object *keywords) {
  Operand more[4];
  PythonCall call("attention", more);
  pydet_attention_arguments given;
  if (!call.arguments(exchange->attention_names, 3, args, count, keywords, &given)) return nullptr;
  Operand *q = call.read("q", given.q);
  Operand *k = q ? call.read("k", given.k) : nullptr;
  Operand *v = k ? call.read("v", given.v) : nullptr;
  if (!v) return nullptr;
  pydet_attention_options options = {};
  options.struct_size = sizeof options;
  Operand *table = nullptr;
  const struct {
    const char *name;
    Object *object;
    const pydet_tensor **tensor;
  } operands[] = {{"sinks", given.sinks, &options.sinks},
                  {"allowed", given.allowed, &options.allowed},
                  {"bias", given.bias, &options.bias},
                  {"first_key", given.first_key, &options.first_key},
                  {"cu_seqlens_q", given.cu_seqlens_q, &options.cu_seqlens_q},
                  {"cu_seqlens_k", given.cu_seqlens_k, &options.cu_seqlens_k},
                  {"seqlens_k", given.seqlens_k, &options.seqlens_k},
                  {"block_table", given.block_table, &options.block_table}};
  for (const auto &operand : operands) {
    if (!(table = call.read_optional(operand.name, operand.object))) return nullptr;
    *operand.tensor = tensor_of(table);
  }
  Operand *out = call.read_optional("out", given.out, true);
  int32_t stores_lse = 0;
  if (!out) return nullptr;
  if (pydet::given(given.scale) && !call.float_of("scale", given.scale, &options.scale)) return nullptr;
  if (pydet::given(given.scale) && options.scale == 0)
    return call.refuse("scale", "0, want a number from 2^-100 to 2^100, or None for 1 / sqrt(D)"), nullptr;
  if (pydet::given(given.softcap) && !call.float_of("softcap", given.softcap, &options.softcap)) return nullptr;
  if (pydet::given(given.softcap) && options.softcap == 0)
    return call.refuse("softcap", "0, want a number from 2^-100 to 2^100, or None for none"), nullptr;
  if (!call.flag_of("causal", given.causal, &options.causal)) return nullptr;
  options.window = pydet::given(given.window_left) || pydet::given(given.window_right);
  options.window_left = options.window_right = options.window ? -1 : 0;
  if (!call.integer_of("window_left", given.window_left, &options.window_left)) return nullptr;
  if (!call.integer_of("window_right", given.window_right, &options.window_right)) return nullptr;
  if (!call.integer_of("kv_chunk", given.kv_chunk, &options.kv_chunk)) return nullptr;
  if (pydet::given(given.kv_chunk) && options.kv_chunk == 0)
    return call.refuse("kv_chunk", "0, want a positive multiple of 128"), nullptr;
  if (!call.number_of("arithmetic", exchange->arithmetics, given.arithmetic, &options.arithmetic)) return nullptr;
  if (!call.flag_of("return_lse", given.return_lse, &stores_lse)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel)) return nullptr;
  if (!call.choose_library(given.stream)) return nullptr;

  const pydet_tensor &like = q->tensor;
  const bool rows = sound(like, 3) && sound(v->tensor, 1);
  Operand *lse = nullptr;
  if (rows) {
    int64_t shape[kDims];
    for (int i = 0; i < like.ndim; ++i) shape[i] = like.shape[i];
    shape[like.ndim - 1] = v->tensor.shape[v->tensor.ndim - 1];
    if (!out->present && !(out = call.make(like.ndim, shape, type_index(like.dtype)))) return nullptr;
    if (stores_lse && !(lse = call.make(like.ndim - 1, shape, int(Type::f32)))) return nullptr;
  }
  if (!make_room(call, *q, *k, *v, *table, &options)) return nullptr;
  const bool done = call.run(attention_work(like, k->tensor), [&](void *stream) {
    return call.library().attention(stream, tensor_of(q), tensor_of(k), tensor_of(v), tensor_of(out), tensor_of(lse),
                                    &options);
  });
  if (!done) return nullptr;
  if (!lse) return call.result(out);
  Operand *results[] = {out, lse};
  return call.results(results, 2);
}

}  // namespace pydet
