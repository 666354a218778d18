// Activations, alone or as the gate of another factor, and their gradients, once a call is checked.
#pragma once

#include "core/operation.h"

namespace pydet {

enum class ActivationKind : int32_t { silu, gelu, gelu_tanh, quick_gelu, sigmoid, tanh, softplus, exp };
constexpr int kActivationKinds = 8;

// y = round(f(x)), or with the other factor round(fl(round(f(x)) up)).
struct Activation {
  Device device;
  void *stream;
  int64_t rows, inner, n;
  ActivationKind kind;
  Rows x, up, y;  // y may be x or up

  uint64_t needs() const { return when(inner < rows, kTwoStrides) | when(up.data, kGate); }
};

template <> struct Operation<Activation> : AlwaysIeee {
  static constexpr const char *name = "activation";
  static Type input(const Activation &a) { return a.x.type; }
  template <class Show> static void memory(const Activation &a, Show show) { show(a.x.data, a.up.data, a.y.data); }
  static bool lay_well(Activation &a) {
    for (Rows *rows : {&a.x, &a.up, &a.y}) give_room(*rows);
    return true;
  }
  using Functions = FunctionList<pydet_activation, pydet_activation_backward>;
  static Items<pydet_exchange_method> python();
  static Items<pydet_xla_handler> xla();
};

// dx = round(fl(dy f'(x))); with the other factor g = round(fl(dy up)) in the place of dy, and dup = round(fl(dy round(f(x)))).
struct ActivationBackward {
  Device device;
  void *stream;
  int64_t rows, inner, n;
  ActivationKind kind;
  Rows dy, x, up, dx, dup;  // dx or dup may be absent; each may be dy, x or up

  uint64_t needs() const {
    return when(inner < rows, kTwoStrides) | when(up.data, kGate) | when(dx.data, kRowGradient);
  }
};

template <> struct Operation<ActivationBackward> : AlwaysIeee {
  static constexpr const char *name = "activation_backward";
  static Type input(const ActivationBackward &a) { return a.x.type; }
  template <class Show> static void memory(const ActivationBackward &a, Show show) {
    show(a.dy.data, a.x.data, a.up.data, a.dx.data, a.dup.data);
  }
  static bool lay_well(ActivationBackward &a) {
    for (Rows *rows : {&a.dy, &a.x, &a.up, &a.dx, &a.dup}) give_room(*rows);
    return true;
  }
};

// Calls f with the kind as a compile-time constant.
template <ActivationKind kind> using KindConstant = std::integral_constant<ActivationKind, kind>;
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // a host's f makes it a host function
#endif
template <int first = 0, class F> PYDET_HD auto with_kind(ActivationKind kind, F f) {
  if constexpr (first + 1 == kActivationKinds) {
    return f(KindConstant<ActivationKind(first)>{});
  } else {
    if (kind == ActivationKind(first)) return f(KindConstant<ActivationKind(first)>{});
    return with_kind<first + 1>(kind, f);
  }
}

}  // namespace pydet
