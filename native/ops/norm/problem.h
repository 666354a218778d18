// RMSNorm and LayerNorm, with their gradients, and RMSNorm quantised, once a call is checked.
#pragma once

#include "ops/scaled/problem.h"

namespace pydet {

struct RmsNorm {
  Device device;
  void *stream;
  int64_t rows, inner, outer, n;
  int64_t heads;  // row r has the weights and biases from (r % heads) n on
  Rows x, residual, y, sum;
  Vector weight, bias, rstd;  // rstd: one per row
  float eps, weight_offset;

  uint64_t needs() const {
    return when(residual.data, kResidual) | when(weight.data, kWeight) | when(weight_offset != 0, kWeightOffset) |
           when(rstd.data, kRstd) | when(inner < rows, kTwoStrides) | when(heads > 1 || inner * outer < rows, kHeads) |
           when(bias.data, kBias) | when(residual.data && residual.type != x.type, kWideSum);
  }
};

template <> struct Operation<RmsNorm> : AlwaysIeee {
  static constexpr const char *name = "rmsnorm";
  static Type input(const RmsNorm &n) { return n.x.type; }
  template <class Show> static void memory(const RmsNorm &n, Show show) {
    show(n.x.data, n.residual.data, n.y.data, n.sum.data, n.weight.data, n.bias.data, n.rstd.data);
  }
  static bool lay_well(RmsNorm &norm) {
    for (Rows *rows : {&norm.x, &norm.residual, &norm.y, &norm.sum}) give_room(*rows);
    return give_room(norm.weight.data), true;
  }
  using Functions = FunctionList<pydet_rmsnorm>;
  static Items<pydet_exchange_method> python();
  static Items<pydet_xla_handler> xla();
};

// RMSNorm, and of the y that it rounds what quantize would make: y need not be stored, and there are no heads and no bias.
struct RmsNormQuantize : RmsNorm {
  Rows out, scale;          // scale: where the scales of a row begin, walked with the rows
  int64_t scale_stride;     // from group to group
  Granularity granularity;  // row, group; or tensor, whose scale is read
  bool power_of_two;

  bool given() const { return granularity == Granularity::tensor; }
  uint64_t needs() const {
    return RmsNorm::needs() | uint64_t(given()                             ? kGivenScales
                                       : granularity == Granularity::group ? kGroupScales
                                                                           : kRowScales);
  }
};

template <> struct Operation<RmsNormQuantize> : AlwaysIeee {
  static constexpr const char *name = "rmsnorm_quantize";
  static Type input(const RmsNormQuantize &n) { return n.x.type; }
  template <class Show> static void memory(const RmsNormQuantize &n, Show show) {
    show(n.x.data, n.residual.data, n.y.data, n.sum.data, n.weight.data, n.rstd.data, n.out.data, n.scale.data);
  }
  static bool lay_well(RmsNormQuantize &norm) {
    for (Rows *rows : {&norm.x, &norm.residual, &norm.y, &norm.sum, &norm.out}) give_room(*rows);
    return give_room(norm.weight.data), true;
  }
  using Functions = FunctionList<pydet_rmsnorm_quantize>;
};

struct RmsNormBackward {
  Device device;
  void *stream;
  int64_t rows, inner, outer, n;  // rows may be 0 (dweight and dbias are then +0, or kept)
  int64_t heads;                  // the sums of dweight and dbias are over rows r of one r % heads
  Rows dy, x, dresidual, dx;
  Vector weight, rstd, dweight, dbias;
  float weight_offset;
  bool accumulate;
  bool block_sums;  // dweight and dbias have a row of heads n columns for each block of rows, not one
  void *workspace;  // chains of dweight, heads n columns each; those of dbias are the second half
  uint64_t workspace_size;

  uint64_t needs() const {
    return when(dresidual.data, kResidual) | when(weight.data, kWeight) | when(weight_offset != 0, kWeightOffset) |
           when(inner < rows, kTwoStrides) | when(accumulate, kAccumulate) | when(dx.data, kRowGradient) |
           when(dweight.data, kWeightGradient) | when(dbias.data, kBiasGradient) |
           when(heads > 1 || inner * outer < rows, kHeads) | when(dy.type != x.type, kWideSum) |
           when(block_sums, kBlockSums);
  }
};

template <> struct Operation<RmsNormBackward> : AlwaysIeee {
  static constexpr const char *name = "rmsnorm_backward";
  static Type input(const RmsNormBackward &n) { return n.x.type; }
  template <class Show> static void memory(const RmsNormBackward &n, Show show) {
    show(n.dy.data, n.x.data, n.dresidual.data, n.dx.data, n.weight.data, n.rstd.data, n.dweight.data, n.dbias.data);
  }
  static bool lay_well(RmsNormBackward &norm) {
    for (Rows *rows : {&norm.dy, &norm.x, &norm.dresidual, &norm.dx}) give_room(*rows);
    return give_room(norm.weight.data), true;
  }
  using Functions = FunctionList<pydet_rmsnorm_backward, pydet_rmsnorm_backward_workspace>;
};

struct LayerNorm {
  Device device;
  void *stream;
  int64_t rows, inner, n;
  Rows x, residual, y, sum;
  Vector weight, bias, mean, rstd;  // mean and rstd: one per row
  float eps, weight_offset;

  uint64_t needs() const {
    return when(residual.data, kResidual) | when(weight.data, kWeight) | when(weight_offset != 0, kWeightOffset) |
           when(bias.data, kBias) | when(mean.data, kMean) | when(rstd.data, kRstd) | when(inner < rows, kTwoStrides);
  }
};

template <> struct Operation<LayerNorm> : AlwaysIeee {
  static constexpr const char *name = "layernorm";
  static Type input(const LayerNorm &n) { return n.x.type; }
  template <class Show> static void memory(const LayerNorm &n, Show show) {
    show(n.x.data, n.residual.data, n.y.data, n.sum.data, n.weight.data, n.bias.data, n.mean.data, n.rstd.data);
  }
  using Functions = FunctionList<pydet_layernorm>;
};

struct LayerNormBackward {
  Device device;
  void *stream;
  int64_t rows, inner, n;  // rows may be 0 (dweight and dbias are then +0, or kept)
  Rows dy, x, dresidual, dx;
  Vector weight, mean, rstd, dweight, dbias;
  float weight_offset;
  bool accumulate;
  void *workspace;  // for dweight or dbias: layernorm_backward_workspace, of which dbias has the second half
  uint64_t workspace_size;

  uint64_t needs() const {
    return when(dresidual.data, kResidual) | when(weight.data, kWeight) | when(weight_offset != 0, kWeightOffset) |
           when(inner < rows, kTwoStrides) | when(accumulate, kAccumulate) | when(dx.data, kRowGradient) |
           when(dweight.data, kWeightGradient) | when(dbias.data, kBiasGradient);
  }
};

template <> struct Operation<LayerNormBackward> : AlwaysIeee {
  static constexpr const char *name = "layernorm_backward";
  static Type input(const LayerNormBackward &n) { return n.x.type; }
  template <class Show> static void memory(const LayerNormBackward &n, Show show) {
    show(n.dy.data, n.x.data, n.dresidual.data, n.dx.data, n.weight.data, n.mean.data, n.rstd.data, n.dweight.data,
         n.dbias.data);
  }
  using Functions = FunctionList<pydet_layernorm_backward, pydet_layernorm_backward_workspace>;
};

}  // namespace pydet
