// The sum of partial sums, element by element in fp32 (NUMERICS.md, "Fold"): the CPU's bits.
//
//   out = round(D + bias),   D = D0 + s_0 + s_1 + ... ascending, or D = D0 + tree(s_0, s_1, ...);   D0 = +0, or out
//
// A thread takes four neighbouring elements, or one where something is not aligned for that, and walks all parts. A part
// may be a peer's memory: it is read once.

#include "gpu/any/epilogue.h"
#include "gpu/kernels.h"

namespace pydet {
namespace {

constexpr int kThreads = 256;

template <int W> struct Elements {
  float x[W];
};

template <int W> __device__ __forceinline__ Elements<W> load_elements(const float *from) {
  Elements<W> v;
  if constexpr (W == 4) {
    const float4 four = *reinterpret_cast<const float4 *>(from);
    v.x[0] = four.x, v.x[1] = four.y, v.x[2] = four.z, v.x[3] = four.w;
  } else {
    v.x[0] = *from;
  }
  return v;
}

template <int W> __device__ __forceinline__ Elements<W> sum_of(const Elements<W> &a, const Elements<W> &b) {
  Elements<W> sum;
#pragma unroll
  for (int e = 0; e < W; ++e) sum.x[e] = a.x[e] + b.x[e];
  return sum;
}

template <int W> __device__ __forceinline__ Elements<W> ordered(const Fold &p, int64_t i, Elements<W> sum) {
#pragma unroll 4
  for (int s = 0; s < p.count; ++s) sum = sum_of(sum, load_elements<W>(p.parts[s] + i));
  return sum;
}

// waiting[level] is the subtree of 2^level parts that waits for its partner; the levels are unrolled, so that it lies in
// registers. Bit `level` of the number of parts so far says whether there is one.
template <int W> __device__ __forceinline__ Elements<W> tree(const Fold &p, int64_t i, const Elements<W> &start) {
  Elements<W> waiting[kFoldLevels], sum = {};
  for (int s = 0; s < p.count; ++s) {
    sum = load_elements<W>(p.parts[s] + i);
    bool moving = true;
#pragma unroll
    for (int level = 0; level < kFoldLevels; ++level) {
      const bool meets = (s >> level & 1) != 0;
      if (moving && meets) sum = sum_of(waiting[level], sum);
      if (moving && !meets) waiting[level] = sum;
      moving = moving && meets;
    }
  }
  bool found = false;
#pragma unroll
  for (int level = 0; level < kFoldLevels; ++level) {
    if ((p.count >> level & 1) == 0) continue;
    sum = found ? sum_of(waiting[level], sum) : waiting[level];
    found = true;
  }
  return sum_of(start, sum);
}

template <int W> __global__ void __launch_bounds__(kThreads) fold_kernel(const __grid_constant__ Fold p) {
  const int64_t i = (block_number() * kThreads + threadIdx.x) * W;
  if (i >= p.size) return;
  Elements<W> start = {};
  if (p.accumulate) start = load_elements<W>(reinterpret_cast<const float *>(p.out.data) + i);
  Elements<W> sum = p.tree ? tree<W>(p, i, start) : ordered<W>(p, i, start);
  if (p.bias.data) {
    int64_t column = i % p.bias_period;
#pragma unroll
    for (int e = 0; e < W; ++e) {
      sum.x[e] = sum.x[e] + load_f32(p.bias.data, p.bias.type, column);
      column = column + 1 == p.bias_period ? 0 : column + 1;
    }
  }
  if constexpr (W == 4) {
    if (p.out.type == Type::f32) {
      *reinterpret_cast<float4 *>(reinterpret_cast<float *>(p.out.data) + i) =
          make_float4(canonical(sum.x[0]), canonical(sum.x[1]), canonical(sum.x[2]), canonical(sum.x[3]));
    } else {
      uint2 pairs;
      if (p.out.type == Type::bf16) {
        pairs.x = rounded_pair<Type::bf16>(sum.x[0], sum.x[1]);
        pairs.y = rounded_pair<Type::bf16>(sum.x[2], sum.x[3]);
      } else {
        pairs.x = rounded_pair<Type::f16>(sum.x[0], sum.x[1]);
        pairs.y = rounded_pair<Type::f16>(sum.x[2], sum.x[3]);
      }
      *reinterpret_cast<uint2 *>(reinterpret_cast<uint16_t *>(p.out.data) + i) = pairs;
    }
  } else {
    store_rounded(p.out.data, p.out.type, i, sum.x[0]);
  }
}

bool aligned(const void *data, int bytes) { return reinterpret_cast<uintptr_t>(data) % uintptr_t(bytes) == 0; }

template <int W> pydet_status launch_fold(const Fold &p) {
  Launch where = {"fold", static_cast<gpu_stream>(p.stream), grid_of(divide_up(p.size, kThreads * W), kThreads),
                  dim3(kThreads)};
  return launch(where, fold_kernel<W>, p);
}

}  // namespace

pydet_status fold(const Fold &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("fold", guard.error());
  bool by_four = p.size % 4 == 0 && aligned(p.out.data, 4 * size_of(p.out.type));
  for (int s = 0; s < p.count; ++s) by_four = by_four && aligned(p.parts[s], 4 * int(sizeof(float)));
  return by_four ? launch_fold<4>(p) : launch_fold<1>(p);
}

}  // namespace pydet
