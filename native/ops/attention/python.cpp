// Attention.
#include "entry/python/methods.h"

namespace pydet {
namespace {

struct AttentionArguments {
  PYDET_ARGUMENTS(q, k, v,         // positional
                  scale, softcap,  // or None, as all from here on but the flags and arithmetic
                  causal, window_left, window_right, sinks, allowed, bias, first_key, cu_seqlens_q, cu_seqlens_k,
                  seqlens_k, block_table, arithmetic, kv_chunk, out, return_lse, kernel, stream);
};

struct AttentionBackwardArguments {
  PYDET_ARGUMENTS(dout, q, k, v, out, lse,  // positional
                  scale, softcap,           // or None, as all from here on but the flags and arithmetic
                  causal, window_left, window_right, sinks, allowed, bias, first_key, cu_seqlens_q, cu_seqlens_k,
                  seqlens_k, arithmetic, accumulate, without_q,
                  without_kv,  // whether dq, or dk and dv, are not asked for
                  dq, dk, dv, dsinks, kernel, stream);
};

// What the library is asked how much workspace it wants for: as far as the operands have shapes that fit, else nothing.
// table: of pages, or NULL.
template <auto workspace, class Options>
bool make_room(PythonCall &call, const Operand &q, const Operand &k, const Operand &v, const Operand *table,
               Options *options) {
  const pydet_tensor &queries = q.tensor, &keys = k.tensor;
  const bool packed_q = options->cu_seqlens_q, packed_k = options->cu_seqlens_k, paged = table && table->present;
  if (!sound(queries, packed_q ? 3 : 4) || !sound(keys, packed_k ? 3 : 4) || !sound(v.tensor, 1)) return true;
  const int64_t heads = queries.shape[1], groups = keys.shape[paged ? 2 : 1];
  int64_t most = keys.shape[packed_k ? 0 : paged ? 1 : 2];
  if (paged && (table->tensor.ndim != 2 || __builtin_mul_overflow(most, table->tensor.shape[1], &most))) return true;
  const int64_t d = keys.shape[keys.ndim - 1], e = v.tensor.shape[v.tensor.ndim - 1];
  if (packed_q && (options->cu_seqlens_q->ndim != 1 || options->cu_seqlens_q->shape[0] < 1)) return true;
  const int64_t sequences = packed_q ? options->cu_seqlens_q->shape[0] - 1 : queries.shape[0];
  uint64_t bytes = 0;
  const pydet_status status = call.library().call<workspace>(sequences, heads, groups, queries.shape[packed_q ? 0 : 2],
                                                             most, d, e, options, &bytes);
  return status != PYDET_OK || call.make_workspace(bytes, &options->workspace, &options->workspace_size);
}

// Multiply-adds, or any large number where there are very many.
int64_t attention_work(const pydet_tensor &q, const pydet_tensor &k) {
  int64_t work;
  return __builtin_mul_overflow(elements(q), elements(k), &work) ? kGilWork : work;
}

// The tensors and numbers that both directions have.
template <class Arguments, class Options>
bool read_operands(PythonCall &call, const Arguments &given, Options *options) {
  const struct {
    const char *name;
    Object *object;
    const pydet_tensor **tensor;
  } operands[] = {{"sinks", given.sinks, &options->sinks},
                  {"allowed", given.allowed, &options->allowed},
                  {"bias", given.bias, &options->bias},
                  {"first_key", given.first_key, &options->first_key},
                  {"cu_seqlens_q", given.cu_seqlens_q, &options->cu_seqlens_q},
                  {"cu_seqlens_k", given.cu_seqlens_k, &options->cu_seqlens_k},
                  {"seqlens_k", given.seqlens_k, &options->seqlens_k}};
  for (const auto &operand : operands) {
    Operand *read = call.read_optional(operand.name, operand.object);
    if (!read) return false;
    *operand.tensor = tensor_of(read);
  }
  return true;
}
template <class Arguments, class Options>
bool read_numbers(PythonCall &call, const Arguments &given, Options *options) {
  if (pydet::given(given.scale) && !call.float_of("scale", given.scale, &options->scale)) return false;
  if (pydet::given(given.scale) && options->scale == 0)
    return call.refuse("scale", "0, want a number from 2^-100 to 2^100, or None for 1 / sqrt(D)");
  if (pydet::given(given.softcap) && !call.float_of("softcap", given.softcap, &options->softcap)) return false;
  if (pydet::given(given.softcap) && options->softcap == 0)
    return call.refuse("softcap", "0, want a number from 2^-100 to 2^100, or None for none");
  if (!call.flag_of("causal", given.causal, &options->causal)) return false;
  options->window = pydet::given(given.window_left) || pydet::given(given.window_right);
  options->window_left = options->window_right = options->window ? -1 : 0;
  return call.integer_of("window_left", given.window_left, &options->window_left) &&
         call.integer_of("window_right", given.window_right, &options->window_right);
}
template <class Arguments, class Options> bool read_way(PythonCall &call, const Arguments &given, Options *options) {
  return call.number_of("arithmetic", exchange->arithmetics, given.arithmetic, &options->arithmetic) &&
         call.text_of("kernel", given.kernel, &options->kernel) && call.choose_library(given.stream);
}

// -> out, or (out, lse)
Object *call_attention(Object *, Object *const *args, intptr_t count, Object *keywords) {
  Operand more[4];
  PythonCall call("attention", more);
  AttentionArguments given;
  if (!call.arguments(names_of<AttentionArguments>, 3, args, count, keywords, &given)) return nullptr;
  Operand *q = call.read("q", given.q);
  Operand *k = q ? call.read("k", given.k) : nullptr;
  Operand *v = k ? call.read("v", given.v) : nullptr;
  if (!v) return nullptr;
  pydet_attention_options options = {};
  options.struct_size = sizeof options;
  if (!read_operands(call, given, &options)) return nullptr;
  Operand *table = call.read_optional("block_table", given.block_table);
  if (!table) return nullptr;
  options.block_table = tensor_of(table);
  Operand *out = call.read_optional("out", given.out, true);
  int32_t stores_lse = 0;
  if (!out || !read_numbers(call, given, &options)) return nullptr;
  if (!call.integer_of("kv_chunk", given.kv_chunk, &options.kv_chunk)) return nullptr;
  if (pydet::given(given.kv_chunk) && options.kv_chunk == 0)
    return call.refuse("kv_chunk", "0, want a positive multiple of 128"), nullptr;
  if (!call.flag_of("return_lse", given.return_lse, &stores_lse)) return nullptr;
  if (!read_way(call, given, &options)) return nullptr;

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
  if (!make_room<pydet_attention_workspace>(call, *q, *k, *v, table, &options)) return nullptr;
  const bool done = call.run(attention_work(like, k->tensor), [&](void *stream) {
    return call.library().call<pydet_attention>(stream, tensor_of(q), tensor_of(k), tensor_of(v), tensor_of(out),
                                                tensor_of(lse), &options);
  });
  if (!done) return nullptr;
  if (!lse) return call.result(out);
  Operand *results[] = {out, lse};
  return call.results(results, 2);
}

// -> (dq or None, dk or None, dv or None), and dsinks where there are sinks
Object *call_attention_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  Operand more[8];
  PythonCall call("attention_backward", more);
  AttentionBackwardArguments given;
  if (!call.arguments(names_of<AttentionBackwardArguments>, 6, args, count, keywords, &given)) return nullptr;
  const struct {
    const char *name;
    Object *object;
  } inputs[] = {{"dout", given.dout}, {"q", given.q},     {"k", given.k},
                {"v", given.v},       {"out", given.out}, {"lse", given.lse}};
  Operand *read[6];
  for (int i = 0; i < 6; ++i)
    if (!(read[i] = call.read(inputs[i].name, inputs[i].object))) return nullptr;
  auto [dout, q, k, v, out, lse] = read;
  pydet_attention_backward_options options = {};
  options.struct_size = sizeof options;
  if (!read_operands(call, given, &options)) return nullptr;
  Operand *dq = call.read_optional("dq", given.dq, true);
  Operand *dk = dq ? call.read_optional("dk", given.dk, true) : nullptr;
  Operand *dv = dk ? call.read_optional("dv", given.dv, true) : nullptr;
  Operand *dsinks = dv ? call.read_optional("dsinks", given.dsinks, true) : nullptr;
  if (!dsinks || !read_numbers(call, given, &options)) return nullptr;
  int32_t without_q = 0, without_kv = 0;
  if (!call.flag_of("accumulate", given.accumulate, &options.accumulate)) return nullptr;
  if (!call.flag_of("without_q", given.without_q, &without_q)) return nullptr;
  if (!call.flag_of("without_kv", given.without_kv, &without_kv)) return nullptr;
  if (!read_way(call, given, &options)) return nullptr;
  if (options.accumulate && !without_kv && !(dk->present && dv->present))
    return call.fail(PYDET_INVALID_VALUE,
                     "attention_backward: accumulate needs dk and dv, the float32 tensors to continue from"),
           nullptr;
  if (options.accumulate && options.sinks && !dsinks->present)
    return call.fail(PYDET_INVALID_VALUE,
                     "attention_backward: accumulate needs dsinks, the float32 tensor to continue from"),
           nullptr;

  const int type = type_index(q->tensor.dtype);
  if (!without_q && !make_like(call, q->tensor, q->tensor.ndim, type, &dq)) return nullptr;
  if (!without_kv && !make_like(call, k->tensor, k->tensor.ndim, type, &dk)) return nullptr;
  if (!without_kv && !make_like(call, v->tensor, v->tensor.ndim, type, &dv)) return nullptr;
  if (options.sinks && !make_like(call, *options.sinks, options.sinks->ndim, type_index(options.sinks->dtype), &dsinks))
    return nullptr;
  options.dsinks = tensor_of(dsinks);
  if (!make_room<pydet_attention_backward_workspace>(call, *q, *k, *v, nullptr, &options)) return nullptr;
  const bool done = call.run(attention_work(q->tensor, k->tensor), [&](void *stream) {
    return call.library().call<pydet_attention_backward>(stream, tensor_of(dout), tensor_of(q), tensor_of(k),
                                                         tensor_of(v), tensor_of(out), tensor_of(lse), tensor_of(dq),
                                                         tensor_of(dk), tensor_of(dv), &options);
  });
  Operand *results[] = {dq, dk, dv, dsinks};
  return done ? call.results(results, dsinks->present ? 4 : 3) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<AttentionArguments>("attention", call_attention),
    method<AttentionBackwardArguments>("attention_backward", call_attention_backward),
};

}  // namespace

Items<pydet_exchange_method> Operation<Attention>::python() { return kMethods; }

}  // namespace pydet
