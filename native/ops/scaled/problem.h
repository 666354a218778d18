// Products of scaled fp8 factors, and the quantisation that makes them: what a checked call asks for, and the formulas
// that every backend shares (NUMERICS.md, "Scaled GEMM", "Quantisation").
#pragma once

#include <cmath>

#include "core/operation.h"

namespace pydet {

constexpr int kScaleGroup = 128;  // elements along k, or columns, that share a scale
constexpr int kFineGroup = 32;    // and along k, where chunks are of so many
constexpr int kFp8Step = 32;      // k of one step of the tensor core, and what k_chunk is a multiple of

// sa[m, c] or sb[c, n], c = k div 128, or 32: data + (m or n, or n div 128 if `blocks`) * stride + c * chunk_stride.
struct Scale {
  char *data;  // NULL: 1
  Type type;   // f32 or e8m0
  int64_t stride, chunk_stride;
  bool blocks;
};

// Leading dimensions, as Batch; strides in elements.
template <int operands> struct Walk {
  int dims;
  int64_t count;
  int64_t shape[kMaxBatchDims];
  int64_t stride[operands][kMaxBatchDims];

  PYDET_INLINE void at(int64_t index, int64_t (&offset)[operands]) const {
    for (int i = 0; i < operands; ++i) offset[i] = 0;
    for (int d = dims - 1; d >= 0; --d) {
      for (int i = 0; i < operands; ++i) offset[i] += index % shape[d] * stride[i][d];
      index /= shape[d];
    }
  }
};

// s_c = the chain over k in [c k_chunk, (c + 1) k_chunk), from +0
// along_k:  D = fmaf(fl(sa[m, c] sb[c, n]), s_c, D), c ascending;  then out = round(D + bias). k_chunk is 128 or 32.
// else:     D = fl(D + s_c), c ascending, or the one chain;        then out = round(fl(fl(D sb[n]) sa[m]) + bias)
// a and b have a unit stride each, and so has out, on either side. Where accumulate is set, D (or the chain) starts from
// out, and the scales are along k or absent. m, n and batch.count are not 0; k may be.
struct ScaledGemm {
  enum Operand { kA, kB, kAScale, kBScale, kBias, kOut, kOperands };
  Device device;
  void *stream;
  Matrix a, b, bias, out;
  Scale a_scale, b_scale;
  Walk<kOperands> batch;
  int64_t m, n, k;
  Arithmetic arithmetic;  // resolved
  int64_t k_chunk;        // 0: one chain
  bool along_k;
  bool accumulate;

  // Whether scales are of 32 elements along k.
  bool fine() const { return along_k && k_chunk == kFineGroup; }

  uint64_t needs() const {
    const bool by_column = b_scale.data && !b_scale.blocks && b_scale.stride != 0;
    return when(batch.dims > 0, kBatch) | when(bias.data, pydet::kBias) | when(accumulate, kAccumulate) |
           when(fine(), kGroupScales) | when(k_chunk != kScaleGroup && !fine(), kChunks) |
           when(k_chunk % kScaleGroup != 0 && !fine(), kBrokenChunks) | when(a.col_stride != 1 && k > 1, kAlongM) |
           when(b.row_stride != 1 && k > 1, kAlongN) | when(out.col_stride != 1 && n > 1, kOutAlongM) |
           when(along_k && by_column, kColumnScales);
  }
};

template <> struct Operation<ScaledGemm> : AsAsked {
  static constexpr const char *name = "scaled_gemm";
  static Type input(const ScaledGemm &g) { return g.a.type; }
  template <class Show> static void memory(const ScaledGemm &g, Show show) {
    show(g.a.data, g.a_scale.data, g.b.data, g.b_scale.data, g.bias.data, g.out.data);
  }
  using Functions = FunctionList<pydet_scaled_gemm, pydet_scaled_gemm_workspace>;
  static Items<pydet_exchange_method> python();
  static Items<pydet_xla_handler> xla();
};

constexpr uint64_t kScaledGemmFeatures = kBatch | kBias | kAccumulate | kChunks | kBrokenChunks | kAlongM | kAlongN |
                                         kOutAlongM | kColumnScales | kGroupScales;  // all

// What has one scale.
enum class Granularity : int32_t {
  row = PYDET_ROW,
  group = PYDET_GROUP,
  block = PYDET_BLOCK,
  tensor = PYDET_TENSOR,
};

// q = round(clamp(fl(x / s))) for x [m, k]; s from the largest |x| of what shares it, or given. `transposed` is the same
// of x^T: its q [k, m], its scale by groups along m, or blocks. data is NULL where absent.
struct Quantize {
  enum Operand { kX, kOut, kScale, kTransposed, kTransposedScale, kOperands };
  Device device;
  void *stream;
  Matrix x, out, scale, transposed, transposed_scale;
  Walk<kOperands> batch;
  int64_t m, k;
  Granularity granularity;
  bool given;  // the scale is read
  bool power_of_two;

  uint64_t needs() const {
    constexpr Feature kFound[] = {kRowScales, kGroupScales, kBlockScales, kTensorScale};
    return when(batch.dims > 0, kBatch) | when(transposed.data, kTransposedCopy) |
           uint32_t(given ? kGivenScales : kFound[int(granularity)]);
  }
};

template <> struct Operation<Quantize> : AlwaysIeee {
  static constexpr const char *name = "quantize";
  static Type input(const Quantize &q) { return q.x.type; }
  template <class Show> static void memory(const Quantize &q, Show show) {
    show(q.x.data, q.out.data, q.scale.data, q.transposed.data, q.transposed_scale.data);
  }
  using Functions = FunctionList<pydet_quantize>;
};

constexpr uint64_t kQuantizeFeatures =
    kBatch | kGivenScales | kRowScales | kGroupScales | kBlockScales | kTensorScale | kTransposedCopy;  // all

// ---- Formulas ----------------------------------------------------------------------------------------------------

PYDET_HD constexpr float largest_of(Type fp8) { return fp8 == Type::e5m2 ? 57344.0f : 448.0f; }

// The least power of two that is not below a positive x, by its bits; NaN if x is not finite. Its bits as e8m0 are
// those of the exponent. No scale comes near the ends: 1e-10 / 57344 is 2^-49.
PYDET_HD float power_of_two_above(float x) {
  uint32_t u = bits_of(x);
  if (u >= 0x7F800000u) return float_of(kNanF32);
  return float_of((u + 0x7FFFFFu) & 0xFF800000u);
}

// amax: the bits of the largest |x|, as integers, which order as the numbers do, with Inf and then NaN above all.
PYDET_HD float scale_of(uint32_t amax, float largest, bool power_of_two) {
  float x = float_of(amax);
  float s = (x < 1e-10f ? 1e-10f : x) / largest;
  return power_of_two ? power_of_two_above(s) : canonical(s);
}

// What to divide by, where 1 / s is needed once and x / s often. No scale that is found comes near the ends: they lie
// between 2^-49 and 2^120, or are Inf or NaN.
struct Divisor {
  float s, inverse;  // s is 0 in place of Inf: what is finite then becomes 0, with its sign, and Inf becomes NaN
};
PYDET_HD Divisor divisor_of(float s) { return {bits_of(s) == 0x7F800000u ? 0.0f : s, 1.0f / s}; }

// fl(x / s) for x of at most 11 significant bits, bf16 and fp16, where it is 2^-18 or more; below, of x's sign and less
// than 2^-17, which is as good, since it becomes 0. Over mantissas tried out: 0 of 2^33 pairs differ (without the
// correction a quarter would). Exponents change nothing above, where no step is subnormal. A -0 stays one: the rest
// q s - x vanishes as +0, and times what is negative becomes -0. (Not the rest's own sign: GCC turns -fma(a, b, -c) into
// what vanishes as +0.)
PYDET_HD float quotient_of(float x, const Divisor &by) {
  const float q = x * by.inverse;
  return fmaf(fmaf(q, by.s, -x), -by.inverse, q);
}

PYDET_HD float clamped(float x, float largest) {  // a NaN stays one
  return x > largest ? largest : x < -largest ? -largest : x;
}

}  // namespace pydet
