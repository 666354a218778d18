// Sampling of tokens, and the k largest of a row.
#include "entry/python/methods.h"

namespace pydet {
namespace {

struct SampleArguments {
  PYDET_ARGUMENTS(x, seed, position,  // positional
                  out, log_prob, filtered_log_prob,
                  return_log_prob,                       // a flag: both are made where none is given
                  temperature, top_k, top_p, min_p,      // numbers
                  temperatures, top_ks, top_ps, min_ps,  // tensors in their place
                  kernel, stream);
};
struct TopKArguments {
  PYDET_ARGUMENTS(x, k,  // positional
                  values, index, kernel, stream);
};

// -> (token, log_prob, filtered_log_prob), None for what is neither given nor wanted
Object *call_sample(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("sample");
  SampleArguments given;
  if (!call.arguments(names_of<SampleArguments>, 3, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);
  Operand *seed = x ? call.read("seed", given.seed) : nullptr;
  Operand *position = seed ? call.read("position", given.position) : nullptr;
  Operand *token = position ? call.read_optional("out", given.out, true) : nullptr;
  Operand *log_prob = token ? call.read_optional("log_prob", given.log_prob, true) : nullptr;
  Operand *filtered = log_prob ? call.read_optional("filtered_log_prob", given.filtered_log_prob, true) : nullptr;
  Operand *temperatures = filtered ? call.read_optional("temperatures", given.temperatures) : nullptr;
  Operand *top_ks = temperatures ? call.read_optional("top_ks", given.top_ks) : nullptr;
  Operand *top_ps = top_ks ? call.read_optional("top_ps", given.top_ps) : nullptr;
  Operand *min_ps = top_ps ? call.read_optional("min_ps", given.min_ps) : nullptr;
  if (!min_ps) return nullptr;
  pydet_sample_options options = {};
  options.struct_size = sizeof options;
  options.temperature = options.top_p = 1.0f;
  int32_t return_log_prob = 0;
  if (!call.flag_of("return_log_prob", given.return_log_prob, &return_log_prob)) return nullptr;
  if (!call.float_of("temperature", given.temperature, &options.temperature)) return nullptr;
  if (!call.integer_of("top_k", given.top_k, &options.top_k)) return nullptr;
  if (!call.float_of("top_p", given.top_p, &options.top_p)) return nullptr;
  if (!call.float_of("min_p", given.min_p, &options.min_p)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  options.temperatures = tensor_of(temperatures);
  options.top_ks = tensor_of(top_ks);
  options.top_ps = tensor_of(top_ps);
  options.min_ps = tensor_of(min_ps);
  const pydet_tensor &like = x->tensor;
  const int ndim = like.ndim < 1 ? 0 : like.ndim - 1;
  if (!make_like(call, like, ndim, kWholeNumbers, &token)) return nullptr;
  for (Operand **result : {&log_prob, &filtered})
    if (return_log_prob && !make_like(call, like, ndim, int(Type::f32), result)) return nullptr;
  const bool done = call.run(elements(like), [&](void *stream) {
    return call.library().call<pydet_sample>(stream, tensor_of(x), tensor_of(seed), tensor_of(position),
                                             tensor_of(token), tensor_of(log_prob), tensor_of(filtered), &options);
  });
  Operand *results[] = {token, log_prob, filtered};
  return done ? call.results(results, 3) : nullptr;
}

// -> (values, index)
Object *call_topk(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("topk");
  TopKArguments given;
  if (!call.arguments(names_of<TopKArguments>, 2, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);
  Operand *values = x ? call.read_optional("values", given.values, true) : nullptr;
  Operand *index = values ? call.read_optional("index", given.index, true) : nullptr;
  if (!index) return nullptr;
  pydet_topk_options options = {};
  options.struct_size = sizeof options;
  int64_t k = 0;
  if (!call.integer_of("k", given.k, &k)) return nullptr;
  if (!call.text_of("kernel", given.kernel, &options.kernel) || !call.choose_library(given.stream)) return nullptr;
  const pydet_tensor &like = x->tensor;
  if (sound(like, 1)) {
    const int64_t n = like.shape[like.ndim - 1];
    if (k < 1 || k > n) {
      char what[80];
      snprintf(what, sizeof what, "%lld, want 1 to the %lld elements of a row", static_cast<long long>(k),
               static_cast<long long>(n));
      return call.refuse("k", what), nullptr;
    }
    int64_t shape[kDims];
    for (int i = 0; i + 1 < like.ndim; ++i) shape[i] = like.shape[i];
    shape[like.ndim - 1] = k;
    if (!values->present && !(values = call.make(like.ndim, shape, type_index(like.dtype)))) return nullptr;
    if (!index->present && !(index = call.make(like.ndim, shape, kWholeNumbers))) return nullptr;
  }
  const bool done = call.run(elements(like), [&](void *stream) {
    return call.library().call<pydet_topk>(stream, tensor_of(x), tensor_of(values), tensor_of(index), &options);
  });
  Operand *results[] = {values, index};
  return done ? call.results(results, 2) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<SampleArguments>("sample", call_sample),
    method<TopKArguments>("topk", call_topk),
};

}  // namespace

Items<pydet_exchange_method> Operation<Sample>::python() { return kMethods; }

}  // namespace pydet
