// dweight and dbias of norms from the partial sums that the kernels of their backward leave (NUMERICS.md, "RMSNorm"):
//
//   4 chains added from +0 are a group, 4 groups a block of 256 rows; the blocks added in order, from +0 or from
//   dweight, and rounded once; or each block's sum is a row of the result
//
// A block takes 8 or 16 columns of one of the two. Its threads read 16 partials of a column each at once, then the first
// of them add the blocks of rows, one after the other as the order asks: 256 of them are 0.6 us of dependent additions.

#include "gpu/any/column_sums.h"
#include "gpu/any/rows.h"

namespace pydet {
namespace {

constexpr int kMostThreads = 512, kJoinBlocks = 256;  // blocks of rows joined at a time

// `columns` neighbouring threads take 16 partials, the chains of one block of rows or the groups of four; then the
// first of them add the blocks in order.
template <int columns>
__global__ void __launch_bounds__(kMostThreads)
    rmsnorm_dweight_kernel(const __grid_constant__ RmsNormBackward p, int chains) {
  const bool of_bias = blockIdx.y > 0 || !p.dweight.data;
  const Vector &result = of_bias ? p.dbias : p.dweight;
  constexpr int kAtOnce = kGroupChains * kBlockGroups;
  static_assert(kGroupChains == 4 && kBlockGroups == 4 && kJoinBlocks % 4 == 0);
  __shared__ __align__(16) float blocks[columns][kJoinBlocks + 4];  // 4 more: each column begins in other banks
  int lane = int(threadIdx.x) % columns, worker = int(threadIdx.x) / columns, workers = int(blockDim.x) / columns;
  int64_t column = int64_t(blockIdx.x) * columns + lane;
  int64_t block_count = (p.rows + kDweightBlockRows - 1) / kDweightBlockRows;
  int64_t partial_count = (p.rows + chains * kDweightChainRows - 1) / (chains * kDweightChainRows);
  const int64_t before = of_bias ? (p.rows + kDweightChainRows - 1) / kDweightChainRows * p.n : 0;
  const float *partials = static_cast<const float *>(p.workspace) + before + column;
  bool inside = column < p.n, are_groups = chains == kGroupChains;
  wait_for_previous_kernel();
  let_next_kernel_start();
  float total = inside && p.accumulate && worker == 0 ? reinterpret_cast<const float *>(result.data)[column] : 0.0f;
  for (int64_t b0 = 0; b0 < block_count; b0 += kJoinBlocks) {
    int count = block_count - b0 < kJoinBlocks ? int(block_count - b0) : kJoinBlocks;
    int step = are_groups ? kAtOnce / kBlockGroups : 1;  // blocks
    auto keep = [&](int b, float sum) {
      if (!p.block_sums) blocks[lane][b] = sum;
      else if (b < count) store_rounded(result.data, result.type, (b0 + b) * p.n + column, sum);
    };
    for (int b = worker * step; inside && b < count; b += workers * step) {
      int64_t first = (b0 + b) / step * kAtOnce;
      float part[kAtOnce], sum = 0.0f;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) part[k] = first + k < partial_count ? partials[(first + k) * p.n] : 0.0f;
#pragma unroll
      for (int k = 0; k < kAtOnce; k += 4) {
        float four = 0.0f;  // a group of chains, or a block of groups
#pragma unroll
        for (int j = 0; j < 4; ++j) four += part[k + j];
        if (are_groups) keep(b + k / 4, four);
        sum += four;
      }
      if (!are_groups) keep(b, sum);
    }
    if (p.block_sums) continue;
    __syncthreads();
    if (worker == 0) {
      int b = 0;
#pragma unroll 8
      for (; b + 4 <= count; b += 4) {
        float4 four = *reinterpret_cast<const float4 *>(blocks[lane] + b);
        total = total + four.x + four.y + four.z + four.w;
      }
      for (; b < count; ++b) total += blocks[lane][b];
    }
    __syncthreads();
  }
  if (inside && worker == 0 && !p.block_sums) store_rounded(result.data, result.type, column, total);
}

constexpr int kNarrow = 8, kWide = 16;

// Few columns: narrow slices, so that more of the device reads.
template <class F> pydet_status with_slice(int64_t n, const F &f) {
  constexpr int kFew = 4096;
  return n <= kFew ? f(rmsnorm_dweight_kernel<kNarrow>, kNarrow) : f(rmsnorm_dweight_kernel<kWide>, kWide);
}

}  // namespace

pydet_status ready_to_join(const RmsNormBackward &p) {
  if (!p.dweight.data && !p.dbias.data) return PYDET_OK;
  return with_slice(p.n, [](auto kernel, int) { return load("rmsnorm_dweight", kernel); });
}

pydet_status join_partials(const RmsNormBackward &p, int chains) {
  if (!p.dweight.data && !p.dbias.data) return PYDET_OK;
  // Twice as many threads where there is work for them; else they delay the start.
  constexpr int kFewThreads = 256, kFewReads = 32;
  int64_t reads = divide_up(divide_up(p.rows, int64_t(chains) * kDweightChainRows), kGroupChains * kBlockGroups);
  unsigned threads = reads > kFewReads ? kMostThreads : kFewThreads;
  return with_slice(p.n, [&](auto kernel, int columns) {
    const unsigned sums = p.dweight.data && p.dbias.data ? 2 : 1;
    return launch(blocks_of("rmsnorm_dweight", p, dim3(unsigned(divide_up(p.n, columns)), sums), int(threads)), kernel,
                  p, chains);
  });
}

}  // namespace pydet
