// What becomes of a row of softmax when its maximum and its sum are known, and of its gradient. Shared by softmax.cu and
// the kernels of nvidia/softmax_staged.h.
#pragma once

#include "elementary.h"
#include "gpu/any/rmsnorm_rows.h"

namespace pydet {
namespace {

constexpr float kLowest = -INFINITY;
constexpr int64_t kLongestSingly = 32;  // of rows that begin anywhere, which softmax_held reads element by element

// exp of some elements, all of them from -69 to 0 where they are `normal`.
template <int N> __device__ __forceinline__ void to_exps(bool normal, float (&x)[N]) {
  if (normal) {
#pragma unroll
    for (int e = 0; e < N; ++e) x[e] = normal_exp_f32(x[e]);
  } else {
#pragma unroll
    for (int e = 0; e < N; ++e) x[e] = exp_f32(x[e]);
  }
}

// exp(x - max) of some elements. True where all of them may take the short ways of exp and of a division: what is
// masked, or far below the maximum, may not.
template <int N>
__device__ __forceinline__ bool exps_of(const float (&x)[N], float max, float (&exps)[N]) {
  bool normal = kGpuDeviceType == PYDET_CUDA;  // AMD's compiler has no registers for both
#pragma unroll
  for (int e = 0; e < N; ++e) {
    exps[e] = x[e] - max;
    normal = normal & (exps[e] >= kLowestNormalExp);
  }
  to_exps(normal, exps);
  return normal;
}

// What is written of a row when its maximum and its sum are known.
struct Finish {
  const Softmax &p;
  int64_t row, index;  // index: the column that log_prob asks for, -1 where it is none
  float max, sum, reciprocal, log_sum, gradient;

  __device__ __forceinline__ Finish(const Softmax &problem, int64_t r) : p(problem), row(r), index(-1), gradient(0) {
    if (!p.index.data) return;
    int64_t asked =
        p.index.wide ? static_cast<const int64_t *>(p.index.data)[r] : static_cast<const int32_t *>(p.index.data)[r];
    if (asked >= 0 && asked < p.n) index = asked;
    if (p.kind == SoftmaxKind::log_prob_backward) gradient = reinterpret_cast<const float *>(p.dlog_prob.data)[r];
  }
  __device__ __forceinline__ void known(float largest, float total) {
    max = largest;
    sum = total;
    reciprocal = 1.0f / total;
    log_sum = p.kind == SoftmaxKind::log_softmax || p.kind == SoftmaxKind::log_prob ? log_f32(total) : 0.0f;
  }
  // Makes the results of elements j, j + step, ... of them. `exps`: of what each is below the maximum, `normal` as
  // exps_of says.
  template <int step, int N>
  __device__ __forceinline__ void elements(int64_t j, const float (&exps)[N], bool normal, float (&x)[N]) const {
    if (p.kind == SoftmaxKind::log_softmax) {
#pragma unroll
      for (int e = 0; e < N; ++e) x[e] = (x[e] - max) - log_sum;
      return;
    }
    if (normal) {
#pragma unroll
      for (int e = 0; e < N; ++e) x[e] = quotient_f32(exps[e], sum, reciprocal);
    } else {
#pragma unroll
      for (int e = 0; e < N; ++e) x[e] = exps[e] / sum;
    }
    if (p.kind == SoftmaxKind::softmax) return;
#pragma unroll
    for (int e = 0; e < N; ++e)
      x[e] = index < 0 ? 0.0f : fmaf(-x[e], gradient, j + e * step == index ? gradient : 0.0f);
  }
  // log_prob: the column asked for is read again, by one thread.
  __device__ __forceinline__ void store_log_prob(const char *x_row) const {
    float x = index < 0 ? float_of(kNanF32) : load_f32(x_row, p.x.type, index);
    reinterpret_cast<float *>(p.log_prob.data)[row] = canonical((x - max) - log_sum);
  }
};

// ---- Gradients from y --------------------------------------------------------------------------------------------

// What a column adds to c is first * second.
__device__ __forceinline__ float second_of(const SoftmaxBackward &p, float y) { return p.log ? 1.0f : y; }
// Makes dx of some elements, in the place of dy.
template <int N>
__device__ __forceinline__ void gradients_of(const SoftmaxBackward &p, float c, float (&dy)[N], float (&y)[N]) {
  if (p.log) {
    bool normal = kGpuDeviceType == PYDET_CUDA;
#pragma unroll
    for (int e = 0; e < N; ++e) normal = normal & (y[e] >= kLowestNormalExp) & (y[e] <= 0.0f);
    to_exps(normal, y);
#pragma unroll
    for (int e = 0; e < N; ++e) dy[e] = fmaf(-y[e], c, dy[e]);
  } else {
#pragma unroll
    for (int e = 0; e < N; ++e) dy[e] = y[e] * (dy[e] - c);
  }
}

}  // namespace
}  // namespace pydet
