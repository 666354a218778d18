// One row an operation: its name, its table in a Backend, and what the choice of a kernel asks of its problem.
#pragma once

#include "grouped.h"
#include "kernel.h"
#include "ops/attention/problem.h"
#include "rounding.h"
#include "scaled_grouped.h"

namespace pydet {

// What kernels are chosen by beside features: the arithmetic, and of which operand the type.
struct AsAsked {
  template <class Problem> static Arithmetic arithmetic(const Problem &problem) { return problem.arithmetic; }
};
struct AlwaysIeee {
  template <class Problem> static Arithmetic arithmetic(const Problem &) { return Arithmetic::ieee; }
};

// `memory` shows the data of all operands.
template <class Problem> struct Operation;

template <> struct Operation<Gemm> : AsAsked {
  static constexpr const char *name = "gemm";
  static constexpr auto table = &Backend::gemm;
  static Type input(const Gemm &g) { return g.a.type; }
  template <class Show> static void memory(const Gemm &g, Show show) {
    show(g.a.data, g.b.data, g.bias.data, g.out.data);
  }
};

template <> struct Operation<ScaledGemm> : AsAsked {
  static constexpr const char *name = "scaled_gemm";
  static constexpr auto table = &Backend::scaled_gemm;
  static Type input(const ScaledGemm &g) { return g.a.type; }
  template <class Show> static void memory(const ScaledGemm &g, Show show) {
    show(g.a.data, g.a_scale.data, g.b.data, g.b_scale.data, g.bias.data, g.out.data);
  }
};

template <> struct Operation<Quantize> : AlwaysIeee {
  static constexpr const char *name = "quantize";
  static constexpr auto table = &Backend::quantize;
  static Type input(const Quantize &q) { return q.x.type; }
  template <class Show> static void memory(const Quantize &q, Show show) {
    show(q.x.data, q.out.data, q.scale.data, q.transposed.data, q.transposed_scale.data);
  }
};

template <> struct Operation<RmsNorm> : AlwaysIeee {
  static constexpr const char *name = "rmsnorm";
  static constexpr auto table = &Backend::rmsnorm;
  static Type input(const RmsNorm &n) { return n.x.type; }
  template <class Show> static void memory(const RmsNorm &n, Show show) {
    show(n.x.data, n.residual.data, n.y.data, n.sum.data, n.weight.data, n.bias.data, n.rstd.data);
  }
};

template <> struct Operation<RmsNormBackward> : AlwaysIeee {
  static constexpr const char *name = "rmsnorm_backward";
  static constexpr auto table = &Backend::rmsnorm_backward;
  static Type input(const RmsNormBackward &n) { return n.x.type; }
  template <class Show> static void memory(const RmsNormBackward &n, Show show) {
    show(n.dy.data, n.x.data, n.dresidual.data, n.dx.data, n.weight.data, n.rstd.data, n.dweight.data, n.dbias.data);
  }
};

template <> struct Operation<Softmax> : AlwaysIeee {
  static constexpr const char *name = "softmax";
  static constexpr auto table = &Backend::softmax;
  static Type input(const Softmax &s) { return s.x.type; }
  template <class Show> static void memory(const Softmax &s, Show show) {
    show(s.x.data, s.y.data, s.index.data, s.log_prob.data, s.dlog_prob.data);
  }
};

template <> struct Operation<SoftmaxBackward> : AlwaysIeee {
  static constexpr const char *name = "softmax_backward";
  static constexpr auto table = &Backend::softmax_backward;
  static Type input(const SoftmaxBackward &s) { return s.dy.type; }
  template <class Show> static void memory(const SoftmaxBackward &s, Show show) {
    show(s.dy.data, s.y.data, s.dx.data);
  }
};

template <> struct Operation<GroupedGemm> : AsAsked {
  static constexpr const char *name = "grouped_gemm";
  static constexpr auto table = &Backend::grouped_gemm;
  static Type input(const GroupedGemm &g) { return g.a.type; }
  template <class Show> static void memory(const GroupedGemm &g, Show show) {
    show(g.a.data, g.b.data, g.bias.data, g.out.data, g.start, g.end);
  }
};

template <> struct Operation<Fold> : AlwaysIeee {
  static constexpr const char *name = "fold";
  static constexpr auto table = &Backend::fold;
  static Type input(const Fold &) { return Type::f32; }
  template <class Show> static void memory(const Fold &f, Show show) {
    for (int i = 0; i < f.count; ++i) show(f.parts[i]);
    if (f.peers.ranks) show(f.peers.memory[f.peers.rank]);
    show(f.bias.data, f.out.data);
  }
};

template <> struct Operation<LayerNorm> : AlwaysIeee {
  static constexpr const char *name = "layernorm";
  static constexpr auto table = &Backend::layernorm;
  static Type input(const LayerNorm &n) { return n.x.type; }
  template <class Show> static void memory(const LayerNorm &n, Show show) {
    show(n.x.data, n.residual.data, n.y.data, n.sum.data, n.weight.data, n.bias.data, n.mean.data, n.rstd.data);
  }
};

template <> struct Operation<LayerNormBackward> : AlwaysIeee {
  static constexpr const char *name = "layernorm_backward";
  static constexpr auto table = &Backend::layernorm_backward;
  static Type input(const LayerNormBackward &n) { return n.x.type; }
  template <class Show> static void memory(const LayerNormBackward &n, Show show) {
    show(n.dy.data, n.x.data, n.dresidual.data, n.dx.data, n.weight.data, n.mean.data, n.rstd.data, n.dweight.data,
         n.dbias.data);
  }
};

template <> struct Operation<ScaledGroupedGemm> : AsAsked {
  static constexpr const char *name = "scaled_grouped_gemm";
  static constexpr auto table = &Backend::scaled_grouped_gemm;
  static Type input(const ScaledGroupedGemm &g) { return g.a.type; }
  template <class Show> static void memory(const ScaledGroupedGemm &g, Show show) {
    show(g.a.data, g.a_scale.data, g.b.data, g.b_scale.data, g.bias.data, g.out.data, g.start, g.end);
  }
};

template <> struct Operation<Attention> : AsAsked {
  static constexpr const char *name = "attention";
  static constexpr auto table = &Backend::attention;
  static Type input(const Attention &a) { return a.q.type; }
  template <class Show> static void memory(const Attention &a, Show show) {
    show(a.q.data, a.k.data, a.v.data, a.out.data, a.lse.data, a.q_start, a.k_start, a.k_length, a.first_key, a.pages,
         a.allowed.data, a.bias.data, a.sinks.data);
  }
};

// No operation of its own, and no table.
template <> struct Operation<Rounding> {
  template <class Show> static void memory(const Rounding &r, Show show) { show(r.from.data, r.bias.data, r.to.data); }
};

// One type an operation, in the order of pydet_kernel_name.
template <class... Problems> struct Operations {};
using AllOperations = Operations<Gemm, ScaledGemm, Quantize, RmsNorm, RmsNormBackward, Softmax, SoftmaxBackward,
                                 GroupedGemm, Fold, LayerNorm, LayerNormBackward, ScaledGroupedGemm, Attention>;

template <class... Problems, class F> void each_row_of(Operations<Problems...>, const Backend &backend, F f) {
  const auto rows_of = [&](auto operation) {
    const auto &table = backend.*operation.table;
    for (int i = 0; i < table.count; ++i) f(backend, operation.name, table.rows[i]);
  };
  (rows_of(Operation<Problems>{}), ...);
}

// Calls f(backend, operation, row) for every row of every table.
template <class F> void each_kernel(F f) {
  for (const Backend *backend : {&cpu_backend(), gpu_backend()})
    if (backend) each_row_of(AllOperations{}, *backend, f);
}

}  // namespace pydet
