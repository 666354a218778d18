// The log-probability of a column under a linear layer, and its gradients.
#include "entry/python/methods.h"

namespace pydet {
namespace {

struct LinearLogProbArguments {
  PYDET_ARGUMENTS(x, w, index,  // positional
                  bias, out, entropy, lse, mean, greedy, of_entropy, of_lse, of_mean,
                  of_greedy,     // whether each is made where it is not given
                  logits_dtype,  // a type index or None
                  softcap, temperature, arithmetic, k_chunk,
                  workspace,  // the most bytes, or None
                  kernel,     // of what is asked of rows, or None
                  stream);
};
struct LinearLogProbBackwardArguments {
  PYDET_ARGUMENTS(dlog_prob, x, w, index,  // positional
                  bias, dentropy, dlse, dmean, dx, dw, dbias, log_prob, of_x, of_w, of_bias,
                  of_log_prob,  // whether each is made where it is not given
                  dw_dtype,     // of dw and dbias; float32 if None
                  accumulate, logits_dtype, softcap, temperature, arithmetic, k_chunk, workspace, kernel, stream);
};

// The options, and the workspace once the library is chosen.
template <class Given>
bool read_head_options(PythonCall &call, const Given &given, pydet_linear_log_prob_options *options, int64_t *most) {
  options->struct_size = sizeof *options;
  int64_t type = -1;
  if (!call.type_of("logits_dtype", given.logits_dtype, &type) || !call.integer_of("workspace", given.workspace, most))
    return false;
  if (given.workspace && given.workspace != exchange->none && *most <= 0)
    return call.refuse("workspace", "no positive number of bytes");
  if (type >= 0) options->logits = {kTypes[type].code, kTypes[type].bits, 1};
  if (!call.float_of("softcap", given.softcap, &options->softcap) ||
      !call.float_of("temperature", given.temperature, &options->temperature) ||
      !call.text_of("kernel", given.kernel, &options->kernel))
    return false;
  return call.number_of("arithmetic", exchange->arithmetics, given.arithmetic, &options->arithmetic) &&
         call.integer_of("k_chunk", given.k_chunk, &options->k_chunk) && call.choose_library(given.stream);
}

// For as many rows at a time as `most` bytes hold; `whole`: for all of them, which sums that are not fp32 want.
bool make_head_workspace(PythonCall &call, const pydet_tensor &x, const pydet_tensor &w, int32_t backward, int64_t most,
                         bool whole, pydet_linear_log_prob_options *options) {
  constexpr uint64_t kAny = uint64_t(1) << 62;
  if (!sound(x, 1) || !sound(w, 2) || w.ndim != 2) return true;  // the operation will say it
  int64_t rows = 1;
  for (int i = 0; i + 1 < x.ndim; ++i)
    if (__builtin_mul_overflow(rows, x.shape[i], &rows)) return true;
  uint64_t bytes = 0;
  if (call.library().call<pydet_linear_log_prob_workspace>(rows, w.shape[0], x.shape[x.ndim - 1], x.dtype, backward,
                                                           whole ? kAny : uint64_t(most), options, &bytes) != PYDET_OK)
    return true;
  if (most > 0 && bytes > uint64_t(most)) bytes = uint64_t(most);  // too small: the operation says what it wants
  return call.make_workspace(bytes, &options->workspace, &options->workspace_size);
}

int64_t head_work(const pydet_tensor &x, const pydet_tensor &w) {
  return sound(w, 2) ? product_work(x, w.shape[0]) : elements(x);
}

// -> log_prob; or (log_prob, entropy, lse, mean, greedy), None for what is neither given nor wanted, where any is
Object *call_linear_log_prob(Object *, Object *const *args, intptr_t count, Object *keywords) {
  Operand more_operands[1];
  PythonCall call("linear_log_prob", more_operands);
  LinearLogProbArguments given;
  if (!call.arguments(names_of<LinearLogProbArguments>, 3, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);
  Operand *w = x ? call.read("w", given.w) : nullptr;
  Operand *index = w ? call.read("index", given.index) : nullptr;
  Operand *bias = index ? call.read_optional("bias", given.bias) : nullptr;
  Operand *out = bias ? call.read_optional("out", given.out, true) : nullptr;
  Operand *entropy = out ? call.read_optional("entropy", given.entropy, true) : nullptr;
  Operand *lse = entropy ? call.read_optional("lse", given.lse, true) : nullptr;
  Operand *mean = lse ? call.read_optional("mean", given.mean, true) : nullptr;
  Operand *greedy = mean ? call.read_optional("greedy", given.greedy, true) : nullptr;
  if (!greedy) return nullptr;
  pydet_linear_log_prob_options options = {};
  int64_t most = 0;
  if (!read_head_options(call, given, &options, &most)) return nullptr;
  const pydet_tensor &rows = x->tensor;
  const int ndim = rows.ndim < 1 ? 0 : rows.ndim - 1;
  if (!make_like(call, rows, ndim, int(Type::f32), &out)) return nullptr;
  const struct {
    const char *name;
    Object *wanted;
    Operand **operand;
    const pydet_tensor **option;
  } more[] = {{"of_entropy", given.of_entropy, &entropy, &options.entropy},
              {"of_lse", given.of_lse, &lse, &options.lse},
              {"of_mean", given.of_mean, &mean, &options.mean},
              {"of_greedy", given.of_greedy, &greedy, &options.greedy}};
  bool any = false;
  for (const auto &one : more) {
    int32_t wanted = 0;
    if (!call.flag_of(one.name, one.wanted, &wanted)) return nullptr;
    const int type = one.operand == &greedy ? kWholeNumbers : int(Type::f32);
    if (wanted && !make_like(call, rows, ndim, type, one.operand)) return nullptr;
    *one.option = tensor_of(*one.operand);
    any |= *one.option != nullptr;
  }
  if (!make_head_workspace(call, rows, w->tensor, 0, most, false, &options)) return nullptr;
  const bool done = call.run(head_work(rows, w->tensor), [&](void *stream) {
    return call.library().call<pydet_linear_log_prob>(stream, tensor_of(x), tensor_of(w), tensor_of(bias),
                                                      tensor_of(index), tensor_of(out), &options);
  });
  if (!done) return nullptr;
  Operand *results[] = {out, entropy, lse, mean, greedy};
  return any ? call.results(results, 5) : call.result(out);
}

// -> (dx, dw, dbias, log_prob), None for what is not asked for
Object *call_linear_log_prob_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  const char *op = "linear_log_prob_backward";
  Operand more[3];
  PythonCall call(op, more);
  LinearLogProbBackwardArguments given;
  if (!call.arguments(names_of<LinearLogProbBackwardArguments>, 4, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);  // the first: results are like it
  Operand *dlog_prob = x ? call.read("dlog_prob", given.dlog_prob) : nullptr;
  Operand *w = dlog_prob ? call.read("w", given.w) : nullptr;
  Operand *index = w ? call.read("index", given.index) : nullptr;
  Operand *bias = index ? call.read_optional("bias", given.bias) : nullptr;
  Operand *dentropy = bias ? call.read_optional("dentropy", given.dentropy) : nullptr;
  Operand *dlse = dentropy ? call.read_optional("dlse", given.dlse) : nullptr;
  Operand *dmean = dlse ? call.read_optional("dmean", given.dmean) : nullptr;
  Operand *dx = dmean ? call.read_optional("dx", given.dx, true) : nullptr;
  Operand *dw = dx ? call.read_optional("dw", given.dw, true) : nullptr;
  Operand *dbias = dw ? call.read_optional("dbias", given.dbias, true) : nullptr;
  Operand *log_prob = dbias ? call.read_optional("log_prob", given.log_prob, true) : nullptr;
  if (!log_prob) return nullptr;
  pydet_linear_log_prob_options options = {};
  int64_t most = 0, type = -1;
  int32_t of_x = 0, of_w = 0, of_bias = 0, of_log_prob = 0;
  if (!call.flag_of("of_x", given.of_x, &of_x) || !call.flag_of("of_w", given.of_w, &of_w) ||
      !call.flag_of("of_bias", given.of_bias, &of_bias) ||
      !call.flag_of("of_log_prob", given.of_log_prob, &of_log_prob) ||
      !call.flag_of("accumulate", given.accumulate, &options.accumulate) ||
      !call.type_of("dw_dtype", given.dw_dtype, &type) || !read_head_options(call, given, &options, &most))
    return nullptr;
  if (!type_agrees(call, "dw", *dw, type) || !type_agrees(call, "dbias", *dbias, type)) return nullptr;
  if (options.accumulate && ((of_w && !dw->present) || (of_bias && !dbias->present))) {
    char sentence[120];
    snprintf(sentence, sizeof sentence, "%s: accumulate needs dw and dbias, the float32 tensors to continue from", op);
    return call.fail(PYDET_INVALID_VALUE, sentence), nullptr;
  }
  options.entropy = tensor_of(dentropy), options.lse = tensor_of(dlse), options.mean = tensor_of(dmean);
  const pydet_tensor &rows = x->tensor, &weight = w->tensor;
  const int sums = type < 0 ? int(Type::f32) : int(type);
  if (of_x && !make_like(call, rows, rows.ndim, type_index(rows.dtype), &dx)) return nullptr;
  if (sound(weight, 2) && weight.ndim == 2) {
    if (of_w && !dw->present && !(dw = call.make(2, weight.shape, sums))) return nullptr;
    if (of_bias && !dbias->present && !(dbias = call.make(1, weight.shape, sums))) return nullptr;
  }
  if (of_log_prob && !make_like(call, rows, rows.ndim < 1 ? 0 : rows.ndim - 1, int(Type::f32), &log_prob))
    return nullptr;
  const auto rounds = [](const Operand &sum) { return sum.present && type_index(sum.tensor.dtype) != int(Type::f32); };
  if (!make_head_workspace(call, rows, weight, 1, most, rounds(*dw) || rounds(*dbias), &options)) return nullptr;
  const bool done = call.run(head_work(rows, weight), [&](void *stream) {
    return call.library().call<pydet_linear_log_prob_backward>(
        stream, tensor_of(dlog_prob), tensor_of(x), tensor_of(w), tensor_of(bias), tensor_of(index),
        tensor_of(log_prob), tensor_of(dx), tensor_of(dw), tensor_of(dbias), &options);
  });
  Operand *results[] = {dx, dw, dbias, log_prob};
  return done ? call.results(results, 4) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<LinearLogProbArguments>("linear_log_prob", call_linear_log_prob),
    method<LinearLogProbBackwardArguments>("linear_log_prob_backward", call_linear_log_prob_backward),
};

}  // namespace

Items<pydet_exchange_method> Operation<LinearLogProb>::python() { return kMethods; }

}  // namespace pydet
