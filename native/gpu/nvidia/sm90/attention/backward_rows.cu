// The first launch of attention's gradients: of each row its lse in powers of two, and delta = sum of dout and out, times
// the scale. Rows past a sequence's end, and those that see no key, get a weight of 0 everywhere.
//
// The order of every sum is NUMERICS.md's, "Attention, backward".

#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/backward_tiles.h"

namespace pydet {
namespace {

constexpr int kAhead = 4;  // pieces of 16 bytes of either operand, on their way

template <Type type>
__global__ void __launch_bounds__(kBackwardTile)
    attention_backward_rows_kernel(const __grid_constant__ AttentionBackwardPlan p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  int sequence = int(blockIdx.z), tile = int(blockIdx.x);
  const int head = int(blockIdx.y), lane = int(threadIdx.x % 32);
  if (p.a.q_start) {  // the sequence whose tile it is
    for (int i = 0;; i += 32) {
      if (i >= p.a.sequences) return;
      const int mine = i + lane;
      int first = 0, tiles = 0;
      if (mine < p.a.sequences) {
        const Lengths x = from_first_query(p.a, lengths_of(p.a, mine));
        first = x.q_first / kBackwardTile + mine, tiles = backward_tiles(x.queries);
      }
      const uint32_t has = __ballot_sync(0xFFFFFFFFu, tile >= first && tile < first + tiles);
      if (!has) continue;
      const int which = __ffs(int(has)) - 1;
      sequence = i + which, tile -= __shfl_sync(0xFFFFFFFFu, first, which);
      break;
    }
  }
  const Lengths x = from_first_query(p.a, lengths_of(p.a, sequence));
  const int query = tile * kBackwardTile + int(threadIdx.x);
  float twos = INFINITY, delta_scale = 0;
  if (query < x.queries) {
    const int token = x.q_first + query;
    const uint4 *one = reinterpret_cast<const uint4 *>(vector_at(p.in_dout, sequence, head, token)),
                *other = reinterpret_cast<const uint4 *>(vector_at(p.a.out, sequence, head, token));
    const float lse = *reinterpret_cast<const float *>(vector_at(p.a.lse, sequence, head, token));
    float l[kDeltaLanes] = {};
    const int count = p.a.e / kDeltaLanes;
    for (int first = 0; first < count; first += kAhead) {
      uint4 a[kAhead], b[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + i < count) a[i] = one[first + i], b[i] = other[first + i];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + i < count) {
          const uint32_t wa[4] = {a[i].x, a[i].y, a[i].z, a[i].w}, wb[4] = {b[i].x, b[i].y, b[i].z, b[i].w};
#pragma unroll
          for (int k = 0; k < kDeltaLanes; ++k)
            l[k] = fmaf(Element<type>::to_f32(uint16_t(wa[k / 2] >> k % 2 * 16)),
                        Element<type>::to_f32(uint16_t(wb[k / 2] >> k % 2 * 16)), l[k]);
        }
    }
    if (lse != -INFINITY) {
      const RowBehind row = row_behind(lse, joined(l), p.scale);
      twos = row.twos, delta_scale = row.delta_scale;
    }
  }
  float *piece = row_piece(p, sequence, head, x, query / kBackwardQueries * kBackwardQueries);
  piece[query % kBackwardQueries] = twos;
  piece[kBackwardQueries + query % kBackwardQueries] = delta_scale;
}

}  // namespace

template <Type type> pydet_status attention_backward_rows(const Launch &launch, const AttentionBackwardPlan &plan) {
  Launch shape = launch;
  shape.grid = dim3(unsigned(plan.row_tiles), unsigned(plan.a.heads), unsigned(plan.a.q_start ? 1 : plan.a.sequences));
  shape.block = dim3(kBackwardTile);
  return pydet::launch(shape, attention_backward_rows_kernel<type>, plan);
}

template pydet_status attention_backward_rows<Type::bf16>(const Launch &, const AttentionBackwardPlan &);
template pydet_status attention_backward_rows<Type::f16>(const Launch &, const AttentionBackwardPlan &);

}  // namespace pydet
