// Of attention's gradients what is no product: delta of each row, where there is a workspace for it, and the gradients
// of the sinks.
//
//   delta_i  = sum over e of dout_ie out_ie in eight lanes (NUMERICS.md, "Attention, backward"): a thread a lane
//   dsinks_h = chain over the tokens, ascending: a block a head makes the terms of 32 tokens at a time, one thread adds
//   them

#include "gpu/any/attention_backward.h"
#include "gpu/device.h"

namespace pydet {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = kThreads / kDeltaLanes;

__device__ __forceinline__ int lane() { return int(threadIdx.x) % kDeltaLanes; }
__device__ __forceinline__ int my_row() { return int(threadIdx.x) / kDeltaLanes; }

template <Type type> __global__ void __launch_bounds__(kThreads)
    deltas_kernel(const __grid_constant__ AttentionBackward p) {
  const Attention &f = p.forward;
  const int64_t of_sequence = divide_up(f.queries * f.heads, kRows), s = block_number() / of_sequence;
  if (s >= f.sequences) return;
  const Extent extent = extent_of(f, s);
  const int64_t number = block_number() % of_sequence * kRows + my_row(), query = number / f.heads;
  if (extent.queries == 0) return;
  const bool there = query < extent.queries;
  const QueryRow row = {there ? query : 0, number % f.heads, {0, 0}};
  const float delta = delta_of<type>(p, s, extent, row, lane());
  if (there && lane() == 0) static_cast<float *>(p.workspace)[delta_place(f, s, extent, row)] = delta;
}

template <Type type, class Exp2>
__global__ void __launch_bounds__(kThreads) sinks_kernel(const __grid_constant__ AttentionBackward p) {
  __shared__ float twos[kRows], delta[kRows];
  const Attention &f = p.forward;
  const int64_t head = block_number();
  if (head >= f.heads) return;
  const float *deltas = deltas_of(p), sink = load_f32(f.sinks.data, f.sinks.type, head);
  float sum = p.accumulate ? reinterpret_cast<const float *>(p.dsinks.data)[head] : 0.0f;
  for (int64_t s = 0; s < f.sequences; ++s) {
    const Extent extent = extent_of(f, s);
    for (int64_t first = 0; first < extent.queries; first += kRows) {
      const bool there = first + my_row() < extent.queries;
      const QueryRow row = {there ? first + my_row() : first, head, {0, 0}};
      const float mine = deltas ? deltas[delta_place(f, s, extent, row)] : delta_of<type>(p, s, extent, row, lane());
      if (lane() == 0)
        delta[my_row()] = mine, twos[my_row()] = there ? lse_in_twos(lse_of(f, s, extent, row)) : -INFINITY;
      __syncthreads();
      if (threadIdx.x == 0)
        for (int r = 0; r < kRows; ++r)
          if (twos[r] != -INFINITY) sum = sink_step<Exp2>(sum, sink, twos[r], delta[r]);
      __syncthreads();
    }
  }
  if (threadIdx.x == 0) store_rounded(p.dsinks.data, p.dsinks.type, head, settled(sum));
}

using Kernel = void (*)(AttentionBackward);

template <Type type> Kernel sinks_of(const Attention &f) {
  if constexpr (kGpuDeviceType == PYDET_CUDA)
    if (f.arithmetic == Arithmetic::sm90) return sinks_kernel<type, HopperExp2>;
  return sinks_kernel<type, IeeeExp2<type>>;
}
Kernel sinks_for(const Attention &f) {
  return with_type<kUnscaledTypes>(f.q.type, [&](auto type) { return sinks_of<decltype(type)::value>(f); });
}
Kernel deltas_for(const Attention &f) {
  return with_type<kUnscaledTypes>(f.q.type, [&](auto type) -> Kernel { return deltas_kernel<decltype(type)::value>; });
}

}  // namespace

pydet_status load_rows(const char *name, const AttentionBackward &p) {
  if (deltas_of(p)) PYDET_TRY(load(name, deltas_for(p.forward)));
  return p.dsinks.data ? load(name, sinks_for(p.forward)) : PYDET_OK;
}

pydet_status make_deltas(const char *name, const AttentionBackward &p) {
  const Attention &f = p.forward;
  const int64_t blocks = f.sequences * divide_up(f.queries * f.heads, kRows);
  if (!deltas_of(p) || blocks == 0) return PYDET_OK;
  const Launch shape = {name, static_cast<gpu_stream>(f.stream), grid_of(blocks, kThreads), dim3(kThreads)};
  return launch(shape, deltas_for(f), p);
}

pydet_status make_sink_gradients(const char *name, const AttentionBackward &p) {
  const Attention &f = p.forward;
  if (!p.dsinks.data || f.heads == 0) return PYDET_OK;
  const Launch shape = {name, static_cast<gpu_stream>(f.stream), grid_of(f.heads, kThreads), dim3(kThreads)};
  return launch(shape, sinks_for(f), p);
}

}  // namespace pydet
