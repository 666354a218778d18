// The end of attention whose keys were split: the parts that others left of each row, a segment each, are joined in
// ascending order, a warp a row, or of few rows a block a row and a thread a column (NUMERICS.md, "Attention").

#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/row.h"

namespace pydet {
namespace {

constexpr int kWarps = 4, kAhead = 8;   // segments that are on their way at a time
constexpr int kMostColumns = 256 / 32;  // of a lane
constexpr int kFewRows = 4096;
constexpr int kAtOnce = 32, kFew = 8;  // segments, of few rows; of them

// The row `number` among all tokens' heads. All lanes of a warp; false: its token is no sequence's.
struct PartRow {
  int head, sequence, query, place, segments;
  Lengths x;
};
__device__ __forceinline__ bool find_row(const AttentionPlan &p, int64_t number, PartRow *row) {
  const int lane = int(threadIdx.x % 32), token = int(number / p.heads);
  row->head = int(number % p.heads);
  int sequence = 0;
  if (!p.q_start) {
    sequence = token / p.queries;
  } else {
    // The pack's sequence that has the token; lanes look at 32 at a time.
    for (;; sequence += 32) {
      if (sequence >= p.sequences) return false;
      const int mine = sequence + lane;
      Lengths each = {};
      if (mine < p.sequences) each = lengths_of(p, mine);
      const uint32_t has = __ballot_sync(
          0xFFFFFFFFu, mine < p.sequences && token >= each.q_first && token < each.q_first + each.queries);
      if (!has) continue;
      sequence += __ffs(int(has)) - 1;
      break;
    }
  }
  row->sequence = sequence, row->x = lengths_of(p, sequence);
  row->query = p.q_start ? token - row->x.q_first : token - sequence * p.queries;
  row->place = p.q_start ? token : row->query;
  row->segments = segments_of(p, row->x.keys);
  return true;
}

__global__ void attention_clear(int *taken) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x == 0) *taken = 0;
}

template <Type type> __global__ void __launch_bounds__(kWarps * 32)
    attention_combine(const __grid_constant__ AttentionPlan p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = int(threadIdx.x % 32);
  const int64_t number = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;  // of the row, among all tokens' heads
  if (number >= p.part_count) return;
  PartRow row;
  if (!find_row(p, number, &row)) return;
  const int segments = row.segments;

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
  char *out = result_at(p, row.sequence, row.place, row.head);
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
    reinterpret_cast<float *>(p.lse.data)[row.sequence * p.lse.sequence_stride + row.head * p.lse.head_stride +
                                          row.place * p.lse.token_stride] =
        none ? -INFINITY : canonical(log_sum_exp({totals.m[0], totals.l[0]}));
  if (!__all_sync(0xFFFFFFFFu, zero == 0.0f)) {
    __syncwarp();
    if (p.d <= 128) compute_row<type, 128>(p, row.x, row.sequence, row.query, row.head);
    else compute_row<type, 64>(p, row.x, row.sequence, row.query, row.head);
  }
}

template <Type type> __global__ void __launch_bounds__(256)
    attention_combine_columns(const __grid_constant__ AttentionPlan p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = int(threadIdx.x % 32), column = int(threadIdx.x);
  const int64_t number = blockIdx.x;  // of the row, among all tokens' heads
  PartRow row;
  if (!find_row(p, number, &row)) return;
  const int segments = row.segments;

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
    // Without a branch a segment, which would keep each waiting for the shuffles of its own.
#pragma unroll
    for (int few = 0; few < kAtOnce; few += kFew) {
      if (first + few >= segments) break;
#pragma unroll
      for (int k = few; k < few + kFew; ++k) {
        const float worth = __shfl_sync(0xFFFFFFFFu, past, k), share = __shfl_sync(0xFFFFFFFFu, now, k),
                    joined = total * worth + o[k] * share, sum = totals.l[0] * worth + __shfl_sync(0xFFFFFFFFu, l, k);
        const bool join = joins >> k & 1;
        total = join ? joined : total, totals.l[0] = join ? sum : totals.l[0];
      }
    }
    totals.m[0] = __shfl_sync(0xFFFFFFFFu, most, 31);
  }
  const bool none = totals.m[0] == -INFINITY;
  const float result = none ? 0.0f : weighed(total, none ? 0.0f : __frcp_rn(totals.l[0]));
  if (column < p.e)
    reinterpret_cast<uint16_t *>(result_at(p, row.sequence, row.place, row.head))[column] =
        uint16_t(rounded_pair<type>(result, result));
  if (p.lse.data && column == 0)
    reinterpret_cast<float *>(p.lse.data)[row.sequence * p.lse.sequence_stride + row.head * p.lse.head_stride +
                                          row.place * p.lse.token_stride] =
        none ? -INFINITY : canonical(log_sum_exp({totals.m[0], totals.l[0]}));
  if (!__syncthreads_or(column < p.e && !(result - result == 0.0f)) || threadIdx.x >= 32) return;
  if (p.d <= 128) compute_row<type, 128>(p, row.x, row.sequence, row.query, row.head);
  else compute_row<type, 64>(p, row.x, row.sequence, row.query, row.head);
}

}  // namespace

pydet_status attention_clear_sm90(const Launch &launch, const AttentionPlan &plan) {
  Launch shape = launch;
  shape.grid = dim3(1), shape.block = dim3(32);
  return pydet::launch(shape, attention_clear, plan.taken);
}

template <Type type> pydet_status attention_combine_sm90(const Launch &launch, const AttentionPlan &plan) {
  Launch shape = launch;
  if (plan.part_count <= kFewRows) {
    shape.grid = dim3(unsigned(plan.part_count));
    shape.block = dim3(unsigned(divide_up(plan.e, 32) * 32));
    return pydet::launch(shape, attention_combine_columns<type>, plan);
  }
  shape.grid = dim3(unsigned(divide_up(plan.part_count, kWarps)));
  shape.block = dim3(kWarps * 32);
  return pydet::launch(shape, attention_combine<type>, plan);
}

template pydet_status attention_combine_sm90<Type::bf16>(const Launch &, const AttentionPlan &);
template pydet_status attention_combine_sm90<Type::f16>(const Launch &, const AttentionPlan &);

}  // namespace pydet
