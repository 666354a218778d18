// Choosing a kernel for a checked problem, launching it, and saying why there is none.

#include "api/launch.h"

#include "api/operations.h"
#include "check/reason.h"

namespace pydet {
namespace {

thread_local const char *last_kernel = "";

template <class Problem> Type input_type(const Problem &problem) { return Operation<Problem>::input(problem); }
template <class Problem> Arithmetic arithmetic_of(const Problem &problem) {
  return Operation<Problem>::arithmetic(problem);
}

bool equal(const char *x, const char *y) { return strcmp(x, y) == 0; }

bool kernel_exists(const char *name) {
  bool found = false;
  each_kernel([&](const Backend &, const char *, const auto &row) { found |= equal(row.name, name); });
  return found;
}

// "k_chunk, a batch", of a set of features.
Text feature_list(uint64_t features) {
  Text out = {"more than any release has"};  // where no feature has a name
  size_t used = 0;
  for (const FeatureRow &row : kFeatures)
    if (features & row.feature && used < sizeof out.text)
      used += size_t(snprintf(out.text + used, sizeof out.text - used, "%s%s", used ? ", " : "", row.name));
  return out;
}

// Whether a row is for the problem's types and arithmetic, on this machine. Of what else it needs the features decide,
// and of its shape and layout `takes`.
template <class Problem> bool computes(const Kernel<Problem> &row, const Problem &problem) {
  return (row.types & bit(input_type(problem))) && row.arithmetic == arithmetic_of(problem);
}
template <class Problem> bool is_for(const Kernel<Problem> &row, const Problem &problem) {
  return computes(row, problem) && row.runs_on(problem.device);
}

// Why no row of the table takes the problem, and what this build has instead.
template <class Problem>
pydet_status refuse(const char *op, const Problem &problem, const Backend &backend, const Table<Problem> &table) {
  int32_t devices = 0;
  PYDET_TRY(backend.device_count(&devices));
  if (problem.device.id < 0 || problem.device.id >= devices)
    return fail(PYDET_NO_DEVICE, "%s: the tensors are on %s, and there are %d of them", op,
                device_text(problem.device.type, problem.device.id).text, int(devices));
  if (arithmetic_of(problem) == Arithmetic::automatic)
    return fail(PYDET_DEVICE_ERROR, "%s: %s does not say what it is, so arithmetic auto cannot be resolved", op,
                device_text(problem.device.type, problem.device.id).text);
  uint64_t lacking = problem.needs();  // of every row that would do else
  bool near = false;
  for (int i = 0; i < table.count; ++i) {
    if (!is_for(table.rows[i], problem)) continue;
    near = true;
    lacking &= ~table.rows[i].features;
  }
  if (near)
    return fail(PYDET_UNSUPPORTED, "%s: no kernel for arithmetic %s on %s inputs on %s takes %s", op,
                arithmetic_name(arithmetic_of(problem)), type_name(input_type(problem)),
                device_text(problem.device.type, problem.device.id).text,
                lacking ? feature_list(lacking).text : "this problem");
  Text have = {""};
  size_t used = 0;
  bool runs = false;
  for (int i = 0; i < table.count; ++i) {
    const Kernel<Problem> &row = table.rows[i];
    const bool row_runs = row.runs_on(problem.device);
    runs |= row_runs;
    if (!(row.types & bit(input_type(problem))) || !row_runs) continue;
    const char *name = arithmetic_name(row.arithmetic);
    if (strstr(have.text, name)) continue;
    used += size_t(snprintf(have.text + used, sizeof have.text - used, "%s%s", used ? ", " : "", name));
    if (used >= sizeof have.text) break;
  }
  if (pydet_device_info info = {}; !runs && backend.built_for) {
    PYDET_TRY(backend.query_device(problem.device.id, &info));
    return fail(PYDET_UNSUPPORTED, "%s: %s is a %s, and this library was built with %s, which does not name it", op,
                device_text(problem.device.type, problem.device.id).text, info.arch, backend.built_for);
  }
  return fail(PYDET_UNSUPPORTED, "%s: no kernel for arithmetic %s on %s inputs on %s; it has %s", op,
              arithmetic_name(arithmetic_of(problem)), type_name(input_type(problem)),
              device_text(problem.device.type, problem.device.id).text, used ? have.text : "none for these inputs");
}

// Refuses memory that the device cannot reach, which would break it for the whole process.
template <class Problem> pydet_status check_reach(const char *op, const Backend &backend, const Problem &problem) {
  if (!backend.reaches) return PYDET_OK;
  const void *astray = nullptr;
  const auto look = [&](const void *at) {
    if (!astray && at && !backend.reaches(problem.device.id, at)) astray = at;
  };
  Operation<Problem>::memory(problem, [&](const auto *...data) { (look(data), ...); });
  if (!astray) return PYDET_OK;
  return fail(PYDET_INVALID_DEVICE, "%s: the data at %p lie on the host, and the tensors are said to be on %s", op,
              astray, device_text(problem.device.type, problem.device.id).text);
}

// The row of that name, if it takes the problem.
template <class Problem>
pydet_status choose_by_name(const char *op, const Table<Problem> &table, const Problem &problem, const char *name,
                            const Kernel<Problem> **chosen, Choice *choice) {
  for (int i = 0; i < table.count; ++i) {
    const Kernel<Problem> &row = table.rows[i];
    if (!equal(row.name, name)) continue;
    const bool meant = is_for(row, problem);
    const uint64_t lacking = problem.needs() & ~row.features;
    if (meant && lacking)
      return fail(PYDET_UNSUPPORTED, "%s: kernel %s does not take this problem, which needs %s", op, name,
                  feature_list(lacking).text);
    if (!meant || !row.accepts(problem, choice))
      return refuse_row(op, row, problem, input_type(problem), arithmetic_of(problem));
    *chosen = &row;
    return PYDET_OK;
  }
  if (kernel_exists(name))
    return fail(PYDET_UNSUPPORTED, "%s: kernel %s is not a %s kernel for %s", op, name, Operation<Problem>::name,
                device_text(problem.device.type, problem.device.id).text);
  return fail(PYDET_INVALID_VALUE,
              "%s: no kernel is named %s (pydet.kernels() in Python and pydet_kernel_name in C list them)", op, name);
}

// The first row that takes the problem and is worth it. Neighbours often ask the same of the machine, or which of them is
// the best: each question is asked once. NULL: there is none.
template <class Problem>
const Kernel<Problem> *choose(const Table<Problem> &table, const Problem &problem, Choice *choice) {
  const uint64_t needs = problem.needs();
  bool (*machine)(const Device &) = nullptr;
  Choice (*family)(const Problem &, int) = nullptr;
  bool runs = false;
  for (int i = 0; i < table.count; ++i) {
    const Kernel<Problem> &row = table.rows[i];
    if (!computes(row, problem) || (needs & ~row.features)) continue;
    if (row.runs_on != machine) machine = row.runs_on, runs = machine(problem.device);
    if (!runs) continue;
    if (row.choose) {
      if (row.choose != family) family = row.choose, *choice = family(problem, kAnyVariant);
      if (choice->variant == row.variant) return &row;
      continue;
    }
    if ((row.takes && !row.takes(problem)) || (row.prefers && !row.prefers(problem))) continue;
    return &row;
  }
  return nullptr;
}

// The row that is to run the problem, whose memory its device reaches.
template <class Problem>
pydet_status find(const char *op, const Problem &problem, const char *forced, const Kernel<Problem> **row,
                  Choice *choice) {
  const Backend &backend = *backend_for(problem.device.type);
  const Table<Problem> &table = backend.*Operation<Problem>::table;
  *row = forced ? nullptr : choose(table, problem, choice);
  if (forced) PYDET_TRY(choose_by_name(op, table, problem, forced, row, choice));
  if (!*row) return refuse(op, problem, backend, table);
  return check_reach(op, backend, problem);
}

// The passes, each off the stack again when the product runs.
__attribute__((noinline)) pydet_status check_reach_of_passes(const char *op, const Backend &backend, const Gemm &sums,
                                                             const FromInitial &steps) {
  PYDET_TRY(check_reach(op, backend, steps.before(sums)));
  return check_reach(op, backend, steps.after(sums));
}
__attribute__((noinline)) pydet_status begin_sums(const Backend &backend, const Gemm &sums, const FromInitial &steps) {
  return backend.round_elements(steps.before(sums));
}
__attribute__((noinline)) pydet_status end_sums(const Backend &backend, const Gemm &sums, const FromInitial &steps) {
  return backend.round_elements(steps.after(sums));
}

}  // namespace

template <class Problem> pydet_status launch(const char *op, const Problem &problem, const char *forced) {
  Choice choice;
  const Kernel<Problem> *row = nullptr;
  PYDET_TRY(find(op, problem, forced, &row, &choice));
  PYDET_TRY(row->launch(problem, choice));
  last_kernel = row->name;
  return PYDET_OK;
}

pydet_status launch_from(const char *op, const Gemm &sums, const FromInitial &steps, const char *forced) {
  const Backend &backend = *backend_for(sums.device.type);
  Choice choice;
  const Kernel<Gemm> *row = nullptr;
  PYDET_TRY(find(op, sums, forced, &row, &choice));
  PYDET_TRY(check_reach_of_passes(op, backend, sums, steps));
  PYDET_TRY(begin_sums(backend, sums, steps));
  PYDET_TRY(row->launch(sums, choice));
  if (steps.ends) PYDET_TRY(end_sums(backend, sums, steps));
  last_kernel = row->name;
  return PYDET_OK;
}

template pydet_status launch(const char *, const Gemm &, const char *);
template pydet_status launch(const char *, const ScaledGemm &, const char *);
template pydet_status launch(const char *, const Quantize &, const char *);
template pydet_status launch(const char *, const RmsNorm &, const char *);
template pydet_status launch(const char *, const RmsNormBackward &, const char *);
template pydet_status launch(const char *, const Softmax &, const char *);
template pydet_status launch(const char *, const SoftmaxBackward &, const char *);
template pydet_status launch(const char *, const GroupedGemm &, const char *);
template pydet_status launch(const char *, const Fold &, const char *);
template pydet_status launch(const char *, const LayerNorm &, const char *);
template pydet_status launch(const char *, const LayerNormBackward &, const char *);
template pydet_status launch(const char *, const ScaledGroupedGemm &, const char *);
template pydet_status launch(const char *, const Attention &, const char *);

pydet_status nothing_to_write() {
  last_kernel = "";
  return PYDET_OK;
}

}  // namespace pydet

const char *pydet_last_kernel(void) { return pydet::last_kernel; }
