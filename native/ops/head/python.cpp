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

struct LinearCrossEntropyArguments {
  PYDET_ARGUMENTS(x, w, target,  // positional
                  bias, out, lse, ignore_index, label_smoothing, z_loss,
                  reduction,  // its number
                  logits_dtype, softcap, temperature, arithmetic, k_chunk, workspace, kernel, stream);
};
struct LinearCrossEntropyBackwardArguments {
  PYDET_ARGUMENTS(dloss,         // or None: 1
                  x, w, target,  // positional, all four
                  bias, lse, loss, dx, dw, dbias, of_x, of_w, of_bias,
                  of_loss,   // whether each is made where it is not given
                  dw_dtype,  // of dw and dbias; float32 if None
                  accumulate, ignore_index, label_smoothing, z_loss, reduction, logits_dtype, softcap, temperature,
                  arithmetic, k_chunk, workspace, kernel, stream);
};

// The options, and the workspace once the library is chosen.
template <class Given, class Options>
bool read_head_options(PythonCall &call, const Given &given, Options *options, int64_t *most) {
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
template <auto workspace_of, class Options>
bool make_head_workspace(PythonCall &call, const pydet_tensor &x, const pydet_tensor &w, int32_t backward, int64_t most,
                         bool whole, Options *options) {
  constexpr uint64_t kAny = uint64_t(1) << 62;
  if (!sound(x, 1) || !sound(w, 2) || w.ndim != 2) return true;  // the operation will say it
  int64_t rows = 1;
  for (int i = 0; i + 1 < x.ndim; ++i)
    if (__builtin_mul_overflow(rows, x.shape[i], &rows)) return true;
  uint64_t bytes = 0;
  if (call.library().call<workspace_of>(rows, w.shape[0], x.shape[x.ndim - 1], x.dtype, backward,
                                        whole ? kAny : uint64_t(most), options, &bytes) != PYDET_OK)
    return true;
  if (most > 0 && bytes > uint64_t(most)) bytes = uint64_t(most);  // too small: the operation says what it wants
  return call.make_workspace(bytes, &options->workspace, &options->workspace_size);
}

int64_t head_work(const pydet_tensor &x, const pydet_tensor &w) {
  return sound(w, 2) ? product_work(x, w.shape[0]) : elements(x);
}

// Whether dw and dbias are of the type that is asked for, and there to be continued, where they are made.
bool may_continue(PythonCall &call, const char *op, int64_t type, bool of_w, bool of_bias, const Operand &dw,
                  const Operand &dbias, int32_t accumulate) {
  if (!type_agrees(call, "dw", dw, type) || !type_agrees(call, "dbias", dbias, type)) return false;
  if (!accumulate || ((!of_w || dw.present) && (!of_bias || dbias.present))) return true;
  char sentence[120];
  snprintf(sentence, sizeof sentence, "%s: accumulate needs dw and dbias, the float32 tensors to continue from", op);
  return call.fail(PYDET_INVALID_VALUE, sentence), false;
}

// Makes what is wanted of the gradients and was not given.
struct WantedGradients {
  int32_t dx, dw, dbias;
};
bool make_gradients(PythonCall &call, const pydet_tensor &x, const pydet_tensor &w, int64_t type_of_sums,
                    const WantedGradients &wanted, Operand **dx, Operand **dw, Operand **dbias) {
  const int sums = type_of_sums < 0 ? int(Type::f32) : int(type_of_sums);
  if (wanted.dx && !make_like(call, x, x.ndim, type_index(x.dtype), dx)) return false;
  if (!sound(w, 2) || w.ndim != 2) return true;
  if (wanted.dw && !(*dw)->present && !(*dw = call.make(2, w.shape, sums))) return false;
  return !wanted.dbias || (*dbias)->present || (*dbias = call.make(1, w.shape, sums));
}

bool rounds(const Operand &sum) { return sum.present && type_index(sum.tensor.dtype) != int(Type::f32); }

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
  if (!make_head_workspace<pydet_linear_log_prob_workspace>(call, rows, w->tensor, 0, most, false, &options))
    return nullptr;
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
  if (!may_continue(call, op, type, of_w, of_bias, *dw, *dbias, options.accumulate)) return nullptr;
  options.entropy = tensor_of(dentropy), options.lse = tensor_of(dlse), options.mean = tensor_of(dmean);
  const pydet_tensor &rows = x->tensor, &weight = w->tensor;
  if (!make_gradients(call, rows, weight, type, {of_x, of_w, of_bias}, &dx, &dw, &dbias)) return nullptr;
  if (of_log_prob && !make_like(call, rows, rows.ndim < 1 ? 0 : rows.ndim - 1, int(Type::f32), &log_prob))
    return nullptr;
  const bool whole = rounds(*dw) || rounds(*dbias);
  if (!make_head_workspace<pydet_linear_log_prob_workspace>(call, rows, weight, 1, most, whole, &options))
    return nullptr;
  const bool done = call.run(head_work(rows, weight), [&](void *stream) {
    return call.library().call<pydet_linear_log_prob_backward>(
        stream, tensor_of(dlog_prob), tensor_of(x), tensor_of(w), tensor_of(bias), tensor_of(index),
        tensor_of(log_prob), tensor_of(dx), tensor_of(dw), tensor_of(dbias), &options);
  });
  Operand *results[] = {dx, dw, dbias, log_prob};
  return done ? call.results(results, 4) : nullptr;
}

template <class Given>
bool read_loss_options(PythonCall &call, const Given &given, pydet_linear_cross_entropy_options *options,
                       int64_t *most) {
  int64_t reduction = 0;
  if (!call.double_of("label_smoothing", given.label_smoothing, &options->label_smoothing) ||
      !call.double_of("z_loss", given.z_loss, &options->z_loss) ||
      !call.integer_of("ignore_index", given.ignore_index, &options->ignore_index) ||
      !call.integer_of("reduction", given.reduction, &reduction))
    return false;
  options->has_ignore_index = given.ignore_index && given.ignore_index != exchange->none;
  options->reduction = reduction >= 0 && reduction <= INT32_MAX ? int32_t(reduction) : -1;
  return read_head_options(call, given, options, most);
}

// Makes what there is of the loss where it was not given: one number, or one a row.
bool make_loss(PythonCall &call, const pydet_tensor &x, int32_t reduction, Operand **loss) {
  const int ndim = reduction == PYDET_REDUCTION_NONE && x.ndim > 0 ? x.ndim - 1 : 0;
  return make_like(call, x, ndim, int(Type::f32), loss);
}

// -> loss
Object *call_linear_cross_entropy(Object *, Object *const *args, intptr_t count, Object *keywords) {
  PythonCall call("linear_cross_entropy");
  LinearCrossEntropyArguments given;
  if (!call.arguments(names_of<LinearCrossEntropyArguments>, 3, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);
  Operand *w = x ? call.read("w", given.w) : nullptr;
  Operand *target = w ? call.read("target", given.target) : nullptr;
  Operand *bias = target ? call.read_optional("bias", given.bias) : nullptr;
  Operand *loss = bias ? call.read_optional("loss", given.out, true) : nullptr;
  Operand *lse = loss ? call.read_optional("lse", given.lse, true) : nullptr;
  if (!lse) return nullptr;
  pydet_linear_cross_entropy_options options = {};
  int64_t most = 0;
  if (!read_loss_options(call, given, &options, &most)) return nullptr;
  options.lse = tensor_of(lse);
  const pydet_tensor &rows = x->tensor;
  if (!make_loss(call, rows, options.reduction, &loss)) return nullptr;
  if (!make_head_workspace<pydet_linear_cross_entropy_workspace>(call, rows, w->tensor, 0, most, false, &options))
    return nullptr;
  const bool done = call.run(head_work(rows, w->tensor), [&](void *stream) {
    return call.library().call<pydet_linear_cross_entropy>(stream, tensor_of(x), tensor_of(w), tensor_of(bias),
                                                           tensor_of(target), tensor_of(loss), &options);
  });
  return done ? call.result(loss) : nullptr;
}

// -> (dx, dw, dbias, loss), None for what is not asked for
Object *call_linear_cross_entropy_backward(Object *, Object *const *args, intptr_t count, Object *keywords) {
  const char *op = "linear_cross_entropy_backward";
  Operand more[2];
  PythonCall call(op, more);
  LinearCrossEntropyBackwardArguments given;
  if (!call.arguments(names_of<LinearCrossEntropyBackwardArguments>, 4, args, count, keywords, &given)) return nullptr;
  Operand *x = call.read("x", given.x);  // the first: results are like it
  Operand *dloss = x ? call.read_optional("dloss", given.dloss) : nullptr;
  Operand *w = dloss ? call.read("w", given.w) : nullptr;
  Operand *target = w ? call.read("target", given.target) : nullptr;
  Operand *bias = target ? call.read_optional("bias", given.bias) : nullptr;
  Operand *lse = bias ? call.read_optional("lse", given.lse) : nullptr;
  Operand *loss = lse ? call.read_optional("loss", given.loss, true) : nullptr;
  Operand *dx = loss ? call.read_optional("dx", given.dx, true) : nullptr;
  Operand *dw = dx ? call.read_optional("dw", given.dw, true) : nullptr;
  Operand *dbias = dw ? call.read_optional("dbias", given.dbias, true) : nullptr;
  if (!dbias) return nullptr;
  pydet_linear_cross_entropy_options options = {};
  int64_t most = 0, type = -1;
  int32_t of_x = 0, of_w = 0, of_bias = 0, of_loss = 0;
  if (!call.flag_of("of_x", given.of_x, &of_x) || !call.flag_of("of_w", given.of_w, &of_w) ||
      !call.flag_of("of_bias", given.of_bias, &of_bias) || !call.flag_of("of_loss", given.of_loss, &of_loss) ||
      !call.flag_of("accumulate", given.accumulate, &options.accumulate) ||
      !call.type_of("dw_dtype", given.dw_dtype, &type) || !read_loss_options(call, given, &options, &most))
    return nullptr;
  if (!may_continue(call, op, type, of_w, of_bias, *dw, *dbias, options.accumulate)) return nullptr;
  options.lse = tensor_of(lse);
  const pydet_tensor &rows = x->tensor, &weight = w->tensor;
  if (!make_gradients(call, rows, weight, type, {of_x, of_w, of_bias}, &dx, &dw, &dbias)) return nullptr;
  if (of_loss && !make_loss(call, rows, options.reduction, &loss)) return nullptr;
  const bool whole = rounds(*dw) || rounds(*dbias);
  if (!make_head_workspace<pydet_linear_cross_entropy_workspace>(call, rows, weight, 1, most, whole, &options))
    return nullptr;
  const bool done = call.run(head_work(rows, weight), [&](void *stream) {
    return call.library().call<pydet_linear_cross_entropy_backward>(
        stream, tensor_of(dloss), tensor_of(x), tensor_of(w), tensor_of(bias), tensor_of(target), tensor_of(loss),
        tensor_of(dx), tensor_of(dw), tensor_of(dbias), &options);
  });
  Operand *results[] = {dx, dw, dbias, loss};
  return done ? call.results(results, 4) : nullptr;
}

constexpr pydet_exchange_method kMethods[] = {
    method<LinearLogProbArguments>("linear_log_prob", call_linear_log_prob),
    method<LinearLogProbBackwardArguments>("linear_log_prob_backward", call_linear_log_prob_backward),
    method<LinearCrossEntropyArguments>("linear_cross_entropy", call_linear_cross_entropy),
    method<LinearCrossEntropyBackwardArguments>("linear_cross_entropy_backward", call_linear_cross_entropy_backward),
};

}  // namespace

Items<pydet_exchange_method> Operation<LinearLogProb>::python() { return kMethods; }

}  // namespace pydet
