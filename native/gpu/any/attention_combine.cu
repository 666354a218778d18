// Attention's segments, which blocks of their own made, folded in ascending order: a block a row, a thread some columns.

#include "gpu/any/attention.h"
#include "gpu/device.h"

namespace pydet {
namespace {

constexpr int kThreads = 64;

template <Type type, class Exp2>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ Attention p) {
  const int64_t number = block_number(), rows = rows_of_group(p);
  const int64_t group = number / rows % p.groups, s = number / rows / p.groups;
  if (s >= p.sequences) return;
  const Extent extent = extent_of(p, s);
  if (number % rows >= extent.queries * heads_of_group(p)) return;
  const QueryRow row = row_of(p, extent, group, number % rows);
  const float *parts = parts_of(p, s, extent, row);
  const int64_t first = row.keys.first / p.kv_chunk,
                last = row.keys.end > row.keys.first ? divide_up(row.keys.end, p.kv_chunk) : first;
  for (int64_t e = threadIdx.x; e < p.e; e += kThreads) {
    RowSoFar sum = {-INFINITY, 0.0f};
    float o = 0.0f;
    for (int64_t segment = first; segment < last; ++segment) {
      const float *next = parts + segment * floats_of_part(p);
      const Joined<Exp2> joined(sum.m, next[p.e]);
      sum = {joined.m, joined.sum(sum.l, next[p.e + 1])}, o = joined.sum(o, next[e]);
    }
    const RowEnd<Exp2> end(p, row.head, sum);
    store_rounded(p.out.data, type, row_offset(p.out, s, extent, row) + e, end.element(o));
    if (e == 0 && p.lse.data) reinterpret_cast<float *>(p.lse.data)[row_offset(p.lse, s, extent, row)] = end.lse;
  }
}

using Kernel = void (*)(Attention);

template <Type type> Kernel kernel_of(const Attention &p) {
  if constexpr (kGpuDeviceType == PYDET_CUDA)
    if (p.arithmetic == Arithmetic::sm90) return combine_kernel<type, HopperExp2>;
  return combine_kernel<type, IeeeExp2<type>>;
}
Kernel kernel_for(const Attention &p) {
  return with_type<kUnscaledTypes>(p.out.type, [&](auto type) { return kernel_of<decltype(type)::value>(p); });
}

}  // namespace

bool splits_segments(const Attention &p, int64_t blocks) {
  const uint64_t wanted = bytes_of_parts(p);
  return wanted > 0 && p.workspace_size >= wanted && blocks < 2 * gpu_multiprocessors(p.device.id);
}

pydet_status load_combine(const char *name, const Attention &p) { return load(name, kernel_for(p)); }

pydet_status combine_segments(const char *name, const Attention &p) {
  const Launch shape = {name, static_cast<gpu_stream>(p.stream),
                        grid_of(p.sequences * p.groups * rows_of_group(p), kThreads), dim3(kThreads)};
  return launch(shape, kernel_for(p), p);
}

}  // namespace pydet
