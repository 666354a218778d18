// The sum of partial sums, element by element in fp32 (NUMERICS.md, "Fold"): the CPU's bits.
//
//   out = round(D + bias),   D = D0 + s_0 + s_1 + ... ascending, or D = D0 + tree(s_0, s_1, ...);   D0 = +0, or out
//
// A thread takes four neighbouring elements, or one where something is not aligned for that, and walks all parts. A part
// may be a peer's memory: it is read once.

#include "gpu/any/fold.h"
#include "gpu/kernels.h"

namespace pydet {
namespace {

constexpr int kThreads = 256;

template <int W> __global__ void __launch_bounds__(kThreads) fold_kernel(const __grid_constant__ Fold p) {
  const int64_t i = (block_number() * kThreads + threadIdx.x) * W;
  if (i >= p.size) return;
  Elements<W> start = {};
  if (p.accumulate) start = load_elements<W>(reinterpret_cast<const float *>(p.out.data) + i);
  const auto part = [&](int s) { return load_elements<W>(p.parts[s] + i); };
  Elements<W> sum = p.tree ? tree(p.count, part, start) : ordered(p.count, part, start);
  if (p.bias.data) add_bias(sum, p.bias, i % p.bias_period, p.bias_period);
  if constexpr (W == 4) {
    store_packed(p.out.data + i * size_of(p.out.type), p.out.type, packed(sum, p.out.type));
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
