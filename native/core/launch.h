// What every function of the C ABI ends with, once its arguments are checked: choosing a kernel for the problem,
// launching it, and saying why there is none.
#pragma once

#include "core/backend.h"
#include "core/reason.h"

namespace pydet {

inline thread_local const char *last_kernel = "";

bool kernel_exists(const char *name);

// "k_chunk, a batch", of a set of features.
Text feature_list(uint64_t features);

template <class Problem> Type input_type(const Problem &problem) { return Operation<Problem>::input(problem); }
template <class Problem> Arithmetic arithmetic_of(const Problem &problem) {
  return Operation<Problem>::arithmetic(problem);
}

// Whether a row is for the problem's types and arithmetic, on this machine. Of what else it needs the features decide,
// and of its shape and layout `takes`.
template <class Problem> bool computes(const Kernel<Problem> &row, const Problem &problem) {
  return (row.types & bit(input_type(problem))) && row.arithmetic == arithmetic_of(problem);
}
template <class Problem> bool is_for(const Kernel<Problem> &row, const Problem &problem) {
  return computes(row, problem) && row.machine.has(problem.device);
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
    const bool row_runs = row.machine.has(problem.device);
    runs |= row_runs;
    if (!(row.types & bit(input_type(problem))) || !row_runs) continue;
    const char *name = arithmetic_name(row.arithmetic);
    if (strstr(have.text, name)) continue;
    used += size_t(snprintf(have.text + used, sizeof have.text - used, "%s%s", used ? ", " : "", name));
    if (used >= sizeof have.text) break;
  }
  if (pydet_device_info info = {}; table.count && !runs && backend.built_for) {
    PYDET_TRY(backend.query_device(problem.device.id, &info));
    return fail(PYDET_UNSUPPORTED, "%s: %s is a %s, and this library was built with %s, which does not name it", op,
                device_text(problem.device.type, problem.device.id).text, info.arch, backend.built_for);
  }
  return fail(PYDET_UNSUPPORTED, "%s: no kernel for arithmetic %s on %s inputs on %s; it has %s", op,
              arithmetic_name(arithmetic_of(problem)), type_name(input_type(problem)),
              device_text(problem.device.type, problem.device.id).text, used ? have.text : "none for these inputs");
}

// Whether a device reaches the memory of one tensor of a call. An operation of very many has one of its own.
template <class Problem> struct Reach {
  bool operator()(const Backend &backend, int32_t id, const void *at) { return backend.reaches(id, at); }
};

// Refuses memory that the device cannot reach, which would break it for the whole process.
template <class Problem> pydet_status check_reach(const char *op, const Backend &backend, const Problem &problem) {
  if (!backend.reaches) return PYDET_OK;
  Reach<Problem> reach;
  const void *astray = nullptr;
  const auto look = [&](const void *at) {
    if (!astray && at && !reach(backend, problem.device.id, at)) astray = at;
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
    if (strcmp(row.name, name) != 0) continue;
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
    if (row.machine.has != machine) machine = row.machine.has, runs = machine(problem.device);
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
  const Table<Problem> &table = backend.table<Problem>();
  *row = forced ? nullptr : choose(table, problem, choice);
  if (forced) PYDET_TRY(choose_by_name(op, table, problem, forced, row, choice));
  if (!*row) return refuse(op, problem, backend, table);
  return check_reach(op, backend, problem);
}

// Runs the problem by the kernel of that name, or where `forced` is NULL by the one that suits it best. Never a part of
// its caller, whose views are off the stack when a kernel runs.
template <class Problem>
__attribute__((noinline)) pydet_status launch(const char *op, const Problem &problem, const char *forced) {
  Choice choice;
  const Kernel<Problem> *row = nullptr;
  PYDET_TRY(find(op, problem, forced, &row, &choice));
  PYDET_TRY(row->launch(problem, choice));
  last_kernel = row->name;
  return PYDET_OK;
}

// For a call whose outputs have no elements.
inline pydet_status nothing_to_write() {
  last_kernel = "";
  return PYDET_OK;
}

}  // namespace pydet
