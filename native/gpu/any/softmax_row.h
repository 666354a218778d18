// What becomes of a row of softmax when its maximum and its sum are known, and of its gradient; passes over a long row by
// a block, and the largest of a team's values. Shared by the kernels of softmax, and by sample.cu and embedding.cu.
#pragma once

#include "contract/elementary.h"
#include "gpu/any/rows.h"
#include "ops/softmax/problem.h"

namespace pydet {
namespace {

constexpr float kLowest = -INFINITY;
constexpr int64_t kLongestSingly = 32;  // of rows that begin anywhere, which softmax_held reads element by element

// Whether rows are whole vectors in the places of all operands.
inline bool rows_whole(const Softmax &p) {
  return p.n % kRowLaneElements == 0 && rows_aligned(p.x) && rows_aligned(p.y);
}
inline bool rows_whole(const SoftmaxBackward &p) {
  return p.n % kRowLaneElements == 0 && rows_aligned(p.dy) && rows_aligned(p.y) && rows_aligned(p.dx);
}

// exp(x - max) of some elements. CUDA's does not show a NaN: the maximum is one then.
template <int N> __device__ __forceinline__ void exps_of(const float (&x)[N], float max, float (&exps)[N]) {
#pragma unroll
  for (int e = 0; e < N; ++e)
    exps[e] = kGpuDeviceType == PYDET_CUDA ? falling_exp_f32(x[e] - max) : exp_f32(x[e] - max);
}

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
// The same as exps_of. True where all of them took the short way, and may take that of a division: what is masked, or
// far below the maximum, may not. (softmax_strided.cu: exps_of is no faster there, and spills on Blackwell.)
template <int N>
__device__ __forceinline__ bool exps_by_ways(const float (&x)[N], float max, float (&exps)[N]) {
  bool normal = kGpuDeviceType == PYDET_CUDA;
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

  __device__ __forceinline__ Finish(const Softmax &problem, int64_t r, bool now = true)
      : p(problem), row(r), index(-1), gradient(0) {
    if (now) ask();
  }
  // Reads which column is asked for, of log_prob and of its gradient.
  __device__ __forceinline__ void ask() {
    if (!p.index.data) return;
    int64_t asked = p.index.wide ? static_cast<const int64_t *>(p.index.data)[row]
                                 : static_cast<const int32_t *>(p.index.data)[row];
    if (asked >= 0 && asked < p.n) index = asked;
    if (p.kind == SoftmaxKind::log_prob_backward) gradient = reinterpret_cast<const float *>(p.dlog_prob.data)[row];
  }
  __device__ __forceinline__ void known(float largest, float total) {
    max = largest;
    sum = fabsf(largest) < INFINITY ? total : float_of(kNanF32);
    reciprocal = 1.0f / sum;
    log_sum = p.kind == SoftmaxKind::log_softmax || p.kind == SoftmaxKind::log_prob ? log_f32(sum) : 0.0f;
  }
  template <int N> __device__ __forceinline__ void logarithms(float (&x)[N]) const {
#pragma unroll
    for (int e = 0; e < N; ++e) x[e] = (x[e] - max) - log_sum;
  }
  template <int N> __device__ __forceinline__ void quotients(const float (&exps)[N], float (&x)[N]) const {
    bool normal = kGpuDeviceType == PYDET_CUDA;  // AMD's compiler has no registers for both
#pragma unroll
    for (int e = 0; e < N; ++e) normal = normal & (exps[e] >= kLeastDividend);
    quotients(exps, normal, x);
  }
  template <int N>
  __device__ __forceinline__ void quotients(const float (&exps)[N], bool normal, float (&x)[N]) const {
    if (normal) {
#pragma unroll
      for (int e = 0; e < N; ++e) x[e] = quotient_f32(exps[e], sum, reciprocal);
    } else {
#pragma unroll
      for (int e = 0; e < N; ++e) x[e] = exps[e] / sum;
    }
  }
  // The same, rounded to 16 bits, as they lie in memory. Products with the numbers next to 1 / s enclose e / s: where they
  // round to one y, that is it. One in some 15,000 elements does not tell, and then all of them are divided.
  template <Type type, int N>
  __device__ __forceinline__ void rounded_quotients(const float (&exps)[N], uint32_t (&y)[N / 2]) const {
    const float low = reciprocal * (1.0f - 0x1p-23f), high = reciprocal * (1.0f + 0x1p-23f);
    uint32_t differ = 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      y[i] = rounded_pair<type>(exps[2 * i] * low, exps[2 * i + 1] * low);
      differ |= y[i] ^ rounded_pair<type>(exps[2 * i] * high, exps[2 * i + 1] * high);
    }
    if (differ)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) y[i] = rounded_pair<type>(exps[2 * i] / sum, exps[2 * i + 1] / sum);
  }
  // Makes the results of elements j, j + step, ... of them. `exps`: as exps_of makes them; log_softmax needs none.
  template <int step, int N>
  __device__ __forceinline__ void elements(int64_t j, const float (&exps)[N], float (&x)[N]) const {
    if (p.kind != SoftmaxKind::log_softmax) quotients(exps, x);
    after_quotients<step>(j, x);
  }
  template <int step, int N>
  __device__ __forceinline__ void elements(int64_t j, const float (&exps)[N], bool normal, float (&x)[N]) const {
    if (p.kind != SoftmaxKind::log_softmax) quotients(exps, normal, x);
    after_quotients<step>(j, x);
  }
  template <int step, int N> __device__ __forceinline__ void after_quotients(int64_t j, float (&x)[N]) const {
    if (p.kind == SoftmaxKind::log_softmax) return logarithms(x);
    if (p.kind == SoftmaxKind::softmax) return;
#pragma unroll
    for (int e = 0; e < N; ++e) x[e] = gradient_of(j + e * step, x[e]);
  }
  // log_prob's, of column j and its softmax.
  __device__ __forceinline__ float gradient_of(int64_t j, float y) const {
    return index < 0 ? 0.0f : fmaf(-y, gradient, j == index ? gradient : 0.0f);
  }
  // The same, rounded, as they lie in memory.
  template <Type type, int step, int N>
  __device__ __forceinline__ void rounded(int64_t j, const float (&exps)[N], float (&x)[N],
                                          uint32_t (&y)[N * size_of(type) / 4]) const {
    if constexpr (size_of(type) == 2 && kGpuDeviceType == PYDET_CUDA)
      if (p.kind == SoftmaxKind::softmax) return rounded_quotients<type>(exps, y);
    elements<step>(j, exps, x);
    round_words<type>(x, y);
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

// ---- Passes over a long row --------------------------------------------------------------------------------------

// The largest of the team's values. All threads of the block call it.
template <int T> __device__ __forceinline__ float team_max(float largest, float *exchange) {
#pragma unroll
  for (int apart = (T < kLogicalWarp ? T : kLogicalWarp) / 2; apart > 0; apart /= 2)
    largest = larger(largest, gpu_shfl_xor(largest, apart, kLogicalWarp));
  if constexpr (T > kLogicalWarp) {
    if (threadIdx.x % kLogicalWarp == 0) exchange[threadIdx.x / kLogicalWarp] = largest;
    __syncthreads();
    const float *of_team = exchange + threadIdx.x / T * (T / kLogicalWarp);
#pragma unroll
    for (int i = 0; i < T / kLogicalWarp; ++i) largest = larger(largest, of_team[i]);
  }
  return largest + 0.0f;  // which zero is the largest would depend on the order
}

// Passes over those columns of a row that the block has, a vector of every thread at a time: f(j, x). Of its `places`, in
// pieces of at least a vector, column(place) says where they are. Where rows are aligned, the loads of some set out
// together.
template <Type type, bool aligned, class Column, class F>
__device__ __forceinline__ void pass_over(const char *row, int64_t n, int64_t places, const Column &column,
                                          const F &f) {
  constexpr int kAtOnce = !aligned || type == Type::f32 || kGpuDeviceType != PYDET_CUDA ? 1 : 4;
  for (int64_t first = kVector * threadIdx.x; first < places; first += kAtOnce * kRowLanes) {
    float x[kVector];
    if constexpr (kAtOnce == 1) {
      const int64_t j = column(first);
      if (j >= n) continue;
      load_eight(row, type, j, n, aligned, x);
      f(j, x);
    } else {
      Packed<type, kVector> packed[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t j = column(first + i * kRowLanes);
        if (first + i * kRowLanes < places && j < n) packed[i] = load_packed<type, kVector>(row + j * size_of(type));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t j = column(first + i * kRowLanes);
        if (first + i * kRowLanes >= places || j >= n) continue;
        unpack(packed[i], x);
        f(j, x);
      }
    }
  }
}
// The same of a block that has them all.
template <Type type, bool aligned, class F>
__device__ __forceinline__ void pass_over(const char *row, int64_t n, const F &f) {
  pass_over<type, aligned>(row, n, n, [](int64_t place) { return place; }, f);
}

}  // namespace
}  // namespace pydet
