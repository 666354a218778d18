// The tables of kernels: one row a kernel, for checked problems.
#pragma once

#include <array>

#include "contract/arithmetic.h"
#include "contract/operand.h"
#include "core/choice.h"

namespace pydet {

// What a kernel needs of the machine.
struct Machine {
  const char *name;             // "avx512", "sm_80 or later"
  bool (*has)(const Device &);  // reports nothing
};

// How a row is launched: a variant with what was chosen, others with the problem alone.
template <class Problem> class Launcher {
 public:
  constexpr Launcher() = default;
  constexpr Launcher(pydet_status (*launch)(const Problem &)) : alone_(launch) {}
  constexpr Launcher(pydet_status (*launch)(const Problem &, const Choice &)) : chosen_(launch) {}
  pydet_status operator()(const Problem &problem, const Choice &choice) const {
    return chosen_ ? chosen_(problem, choice) : alone_(problem);
  }

 private:
  pydet_status (*alone_)(const Problem &) = nullptr;
  pydet_status (*chosen_)(const Problem &, const Choice &) = nullptr;
};

// One row: what the kernel computes, where it runs, which problems it takes, and how to launch it. Any row that takes a
// problem gives the same bits, so `takes` may ask anything, and rows are tried from the top: the fastest first.
template <class Problem> struct Kernel {
  const char *name;
  uint32_t types;  // of the inputs, bit(Type) each
  Arithmetic arithmetic;
  Machine machine;
  uint64_t features;                           // what it does, of the problem's needs (contract/features.h)
  bool (*takes)(const Problem &) = nullptr;    // shape, layout and workspace fit; NULL: whatever the rest lets pass
  bool (*prefers)(const Problem &) = nullptr;  // worth choosing by itself; NULL: always. Forced by name it need not be
  // Rows that are variants of one kernel, such as its tiles, stand together and share `choose`: how this variant
  // computes the problem, or which is the fastest for kAnyVariant, which is asked once for all of them. NULL: no such.
  Choice (*choose)(const Problem &, int variant) = nullptr;
  int variant = 0;
  Launcher<Problem> launch = {};

  // Whether shape and layout let it. Of a variant it fills the choice that the launch receives.
  bool accepts(const Problem &problem, Choice *choice) const {
    if (choose) return (*choice = choose(problem, variant)).variant == variant;
    return !takes || takes(problem);
  }
};

// How a row is written: Row(name, types, arithmetic, machine, features), then what it takes and prefers or which variant
// it chooses, where it asks for any, and at the end what it launches, which makes it a Kernel.
template <class Problem> class RowOf {
 public:
  constexpr explicit RowOf(const Kernel<Problem> &kernel) : kernel_(kernel) {}
  constexpr RowOf takes(bool (*takes)(const Problem &)) const {
    RowOf row = *this;
    row.kernel_.takes = takes;
    return row;
  }
  constexpr RowOf prefers(bool (*prefers)(const Problem &)) const {
    RowOf row = *this;
    row.kernel_.prefers = prefers;
    return row;
  }
  constexpr RowOf chooses(Choice (*choose)(const Problem &, int), int variant) const {
    RowOf row = *this;
    row.kernel_.choose = choose, row.kernel_.variant = variant;
    return row;
  }
  constexpr Kernel<Problem> launches(Launcher<Problem> launch) const {
    Kernel<Problem> kernel = kernel_;
    kernel.launch = launch;
    return kernel;
  }

 private:
  Kernel<Problem> kernel_;
};

// The first function that is named tells which problem it is of.
class Row {
 public:
  constexpr Row(const char *name, uint32_t types, Arithmetic arithmetic, Machine machine, uint64_t features)
      : name_(name), types_(types), arithmetic_(arithmetic), machine_(machine), features_(features) {}
  template <class Problem> constexpr RowOf<Problem> takes(bool (*takes)(const Problem &)) const {
    return of<Problem>().takes(takes);
  }
  template <class Problem> constexpr RowOf<Problem> prefers(bool (*prefers)(const Problem &)) const {
    return of<Problem>().prefers(prefers);
  }
  template <class Problem> constexpr RowOf<Problem> chooses(Choice (*choose)(const Problem &, int), int variant) const {
    return of<Problem>().chooses(choose, variant);
  }
  template <class Problem> constexpr Kernel<Problem> launches(pydet_status (*launch)(const Problem &)) const {
    return of<Problem>().launches(launch);
  }

 private:
  template <class Problem> constexpr RowOf<Problem> of() const {
    return RowOf<Problem>({name_, types_, arithmetic_, machine_, features_});
  }

  const char *name_;
  uint32_t types_;
  Arithmetic arithmetic_;
  Machine machine_;
  uint64_t features_;
};

// What an operation asks of a backend beside rows; in the operation's own header, where it asks for anything.
template <class Problem> struct Hooks;

template <class Problem> struct Table {
  const Kernel<Problem> *rows;
  int count;
  const Hooks<Problem> *hooks;  // NULL: none
};

template <class Problem, int count>
constexpr Table<Problem> table(const Kernel<Problem> (&rows)[count], const Hooks<Problem> *hooks = nullptr) {
  return {rows, count, hooks};
}
template <class Problem, size_t count>
constexpr Table<Problem> table(const std::array<Kernel<Problem>, count> &rows, const Hooks<Problem> *hooks = nullptr) {
  return {rows.data(), int(count), hooks};
}
template <class Problem> constexpr Table<Problem> no_kernels() { return {nullptr, 0, nullptr}; }

}  // namespace pydet
