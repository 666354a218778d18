// The end of attention whose keys were split: the parts that forward.cu left of each row, a segment each, are joined in
// ascending order, a warp a row (NUMERICS.md, "Attention").

#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/row.h"

namespace pydet {
namespace {

constexpr int kWarps = 4, kAhead = 8;   // segments that are on their way at a time
constexpr int kMostColumns = 256 / 32;  // of a lane

template <Type type> __global__ void __launch_bounds__(kWarps * 32)
    attention_combine(const __grid_constant__ AttentionPlan p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = int(threadIdx.x % 32);
  const int64_t number = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;  // of the row, among all tokens' heads
  if (number >= p.part_count) return;
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

  float total[kMostColumns / 2][2];
  Totals totals;
  totals.clear();
#pragma unroll
  for (int i = 0; i < kMostColumns / 2; ++i) total[i][0] = total[i][1] = 0;
  for (int first = 0; first < segments; first += kAhead) {
    float2 part[kAhead], o[kAhead][kMostColumns / 2];
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (first + k < segments) {
        const int64_t at = (first + k) * p.part_count + number;
        part[k] = *reinterpret_cast<const float2 *>(p.parts + 2 * at);
#pragma unroll
        for (int i = 0; i < kMostColumns / 2; ++i)
          if (i * 64 + lane * 2 < p.e)
            o[k][i] = *reinterpret_cast<const float2 *>(p.part_o + at * p.e + i * 64 + lane * 2);
      }
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (first + k < segments && part[k].x != -INFINITY) {
        const float n = larger(totals.m[0], part[k].x), past = ex2_f32(totals.m[0] - n), now = ex2_f32(part[k].x - n);
        totals.l[0] = totals.l[0] * past + part[k].y * now;
        totals.m[0] = n;
#pragma unroll
        for (int i = 0; i < kMostColumns / 2; ++i)
          if (i * 64 + lane * 2 < p.e) {
            total[i][0] = total[i][0] * past + o[k][i].x * now;
            total[i][1] = total[i][1] * past + o[k][i].y * now;
          }
      }
  }
  const bool none = totals.m[0] == -INFINITY;
  const float reciprocal = none ? 0.0f : __frcp_rn(totals.l[0]);
  char *out = result_at(p, sequence, place, head);
  float zero = 0;
#pragma unroll
  for (int i = 0; i < kMostColumns / 2; ++i)
    if (i * 64 + lane * 2 < p.e) {
      const float first = none ? 0.0f : weighed(total[i][0], reciprocal),
                  second = none ? 0.0f : weighed(total[i][1], reciprocal);
      zero = fmaf(first, 0.0f, fmaf(second, 0.0f, zero));
      *reinterpret_cast<uint32_t *>(out + (i * 64 + lane * 2) * 2) = rounded_pair<type>(first, second);
    }
  if (p.lse.data && lane == 0)
    reinterpret_cast<float *>(
        p.lse.data)[sequence * p.lse.sequence_stride + head * p.lse.head_stride + place * p.lse.token_stride] =
        none ? -INFINITY : canonical(log_sum_exp({totals.m[0], totals.l[0]}));
  if (!__all_sync(0xFFFFFFFFu, zero == 0.0f)) {
    __syncwarp();
    if (p.d <= 128) compute_row<type, 128>(p, x, sequence, query, head);
    else compute_row<type, 64>(p, x, sequence, query, head);
  }
}

}  // namespace

template <Type type> pydet_status attention_combine_sm90(const Launch &launch, const AttentionPlan &plan) {
  Launch shape = launch;
  shape.grid = dim3(unsigned(divide_up(plan.part_count, kWarps)));
  shape.block = dim3(kWarps * 32);
  return pydet::launch(shape, attention_combine<type>, plan);
}

template pydet_status attention_combine_sm90<Type::bf16>(const Launch &, const AttentionPlan &);
template pydet_status attention_combine_sm90<Type::f16>(const Launch &, const AttentionPlan &);

}  // namespace pydet
