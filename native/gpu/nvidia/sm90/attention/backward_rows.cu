// The first launch of attention's gradients: of each row its lse in powers of two, and delta = sum of dout and out, times
// the scale. Rows past a sequence's end, and those that see no key, get a weight of 0 everywhere.
//
// The order of every sum is NUMERICS.md's, "Attention, backward".

#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/backward_tiles.h"

namespace pydet {
namespace {

constexpr int kPieces = 8;                   // of 16 bytes of a row, that lie in shared memory at a time
constexpr int kRowInts = (kPieces + 1) * 4;  // with room, so that rows begin in other banks

template <Type type>
__global__ void __launch_bounds__(kBackwardTile)
    attention_backward_rows_kernel(const __grid_constant__ AttentionBackwardPlan p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  {
    const int64_t blocks = int64_t(gridDim.x) * gridDim.y * gridDim.z,
                  block = (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    for (int64_t i = block * kBackwardTile + threadIdx.x; i < p.zeros; i += blocks * kBackwardTile) p.words[i] = 0;
  }
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
  const int first_row = tile * kBackwardTile, query = first_row + int(threadIdx.x);
  __shared__ __align__(16) int rows[2][kBackwardTile][kRowInts];
  float l[kDeltaLanes] = {};
  for (int first = 0; first < p.a.e / kDeltaLanes; first += kPieces) {
    __syncthreads();  // what was there has been read
#pragma unroll
    for (int i = 0; i < 2 * kPieces; ++i) {
      const int number = i / 2 * kBackwardTile + int(threadIdx.x), row = number / kPieces, k = number % kPieces;
      if (first_row + row < x.queries && first + k < p.a.e / kDeltaLanes)
        copy_async_16(
            &rows[i % 2][row][k * 4],
            vector_at(i % 2 ? p.a.out : p.in_dout, sequence, head, x.q_first + first_row + row) + (first + k) * 16, 16);
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    if (query < x.queries)
      for (int k = 0; k < min(kPieces, p.a.e / kDeltaLanes - first); ++k) {
        const uint4 a = *reinterpret_cast<const uint4 *>(&rows[0][threadIdx.x][k * 4]),
                    b = *reinterpret_cast<const uint4 *>(&rows[1][threadIdx.x][k * 4]);
        const uint32_t wa[4] = {a.x, a.y, a.z, a.w}, wb[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int lane_of = 0; lane_of < kDeltaLanes; ++lane_of)
          l[lane_of] = fmaf(Element<type>::to_f32(uint16_t(wa[lane_of / 2] >> lane_of % 2 * 16)),
                            Element<type>::to_f32(uint16_t(wb[lane_of / 2] >> lane_of % 2 * 16)), l[lane_of]);
      }
  }
  float twos = INFINITY, delta_scale = 0;
  if (query < x.queries) {
    const float lse = *reinterpret_cast<const float *>(vector_at(p.a.lse, sequence, head, x.q_first + query));
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
