// The end of attention whose keys were split: the parts that forward.cu left of each row, a segment each, are joined in
// ascending order, a block a row and a thread a column (NUMERICS.md, "Attention").

#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/row.h"

namespace pydet {
namespace {

constexpr int kAtOnce = 32;  // segments, whose parts are on their way together

template <Type type> __global__ void __launch_bounds__(256) attention_combine(const __grid_constant__ AttentionPlan p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = int(threadIdx.x % 32), column = int(threadIdx.x);
  const int64_t number = blockIdx.x;  // of the row, among all tokens' heads
  const int head = int(number % p.heads), token = int(number / p.heads);
  int sequence = 0, query = token;
  Lengths x;
  if (!p.q_start) {
    sequence = token / p.queries, query = token - sequence * p.queries;
    x = lengths_of(p, sequence);
  } else {
    // The pack's sequence that has the token; lanes look at 32 at a time.
    for (;; sequence += 32) {
      if (sequence >= p.sequences) return;
      const int mine = sequence + lane;
      Lengths each = {};
      if (mine < p.sequences) each = lengths_of(p, mine);
      const uint32_t has = __ballot_sync(
          0xFFFFFFFFu, mine < p.sequences && token >= each.q_first && token < each.q_first + each.queries);
      if (!has) continue;
      sequence += __ffs(int(has)) - 1;
      break;
    }
    x = lengths_of(p, sequence);
    query = token - x.q_first;
  }
  const int segments = segments_of(p, x.keys), place = p.q_start ? token : query;

  float total = 0;
  Totals totals;
  totals.clear();
  for (int first = 0; first < segments; first += kAtOnce) {
    // A lane has a segment: what it is worth, and all before it, from the largest reference up to each.
    float2 part = make_float2(-INFINITY, 0.0f);
    if (first + lane < segments)
      part = *reinterpret_cast<const float2 *>(p.parts + 2 * ((first + lane) * p.part_count + number));
    float o[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      o[k] = first + k < segments && column < p.e ? p.part_o[((first + k) * p.part_count + number) * p.e + column] : 0;
    float most = part.x;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const float before = __shfl_up_sync(0xFFFFFFFFu, most, by);
      if (lane >= by) most = larger(before, most);
    }
    most = larger(totals.m[0], most);
    float before = __shfl_up_sync(0xFFFFFFFFu, most, 1);
    if (lane == 0) before = totals.m[0];
    const float past = ex2_f32(before - most), now = ex2_f32(part.x - most), l = part.y * now;
    const uint32_t joins = __ballot_sync(0xFFFFFFFFu, part.x != -INFINITY);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k >= segments) break;
      if (!(joins >> k & 1)) continue;
      const float worth = __shfl_sync(0xFFFFFFFFu, past, k);
      total = total * worth + o[k] * __shfl_sync(0xFFFFFFFFu, now, k);
      totals.l[0] = totals.l[0] * worth + __shfl_sync(0xFFFFFFFFu, l, k);
    }
    totals.m[0] = __shfl_sync(0xFFFFFFFFu, most, 31);
  }
  const bool none = totals.m[0] == -INFINITY;
  const float result = none ? 0.0f : weighed(total, none ? 0.0f : __frcp_rn(totals.l[0]));
  if (column < p.e)
    reinterpret_cast<uint16_t *>(result_at(p, sequence, place, head))[column] =
        uint16_t(rounded_pair<type>(result, result));
  if (p.lse.data && column == 0)
    reinterpret_cast<float *>(
        p.lse.data)[sequence * p.lse.sequence_stride + head * p.lse.head_stride + place * p.lse.token_stride] =
        none ? -INFINITY : canonical(log_sum_exp({totals.m[0], totals.l[0]}));
  if (!__syncthreads_or(column < p.e && !(result - result == 0.0f)) || threadIdx.x >= 32) return;
  if (p.d <= 128) compute_row<type, 128>(p, x, sequence, query, head);
  else compute_row<type, 64>(p, x, sequence, query, head);
}

}  // namespace

template <Type type> pydet_status attention_combine_sm90(const Launch &launch, const AttentionPlan &plan) {
  Launch shape = launch;
  shape.grid = dim3(unsigned(plan.part_count));
  shape.block = dim3(unsigned(divide_up(plan.e, 32) * 32));
  return pydet::launch(shape, attention_combine<type>, plan);
}

template pydet_status attention_combine_sm90<Type::bf16>(const Launch &, const AttentionPlan &);
template pydet_status attention_combine_sm90<Type::f16>(const Launch &, const AttentionPlan &);

}  // namespace pydet
