// Softmax of many short rows that lie one behind the other and begin anywhere, in fp32 (NUMERICS.md,
// "Softmax"): the CPU's bits. The formulas are those of softmax.cu.
//
// A warp has some rows, in shared memory (elements.h), and 2 to 8 threads a row in registers: the fewer, the more
// rows share the steps of the maximum and of the sum. What a row's results need of x again is still there.

#include "gpu/any/softmax_row.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/elements.h"

namespace pydet {
namespace {

constexpr int kWarps = 4, kBlock = kWarps * kLogicalWarp;

// Minus infinity in the type of 16 bits.
__device__ __forceinline__ uint16_t lowest_of(Type type) { return type == Type::bf16 ? 0xFF80 : 0xFC00; }

template <int T, int V, int F>
__global__ void __launch_bounds__(kBlock, kBlocks<V>)
    softmax_adjacent_kernel(const __grid_constant__ Softmax p, int of_share) {
  constexpr int kAtOnce = kLogicalWarp / T;
  extern __shared__ __align__(16) char shared[];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = int(threadIdx.x) % kLogicalWarp, n = int(p.n);
  const int64_t first = (int64_t(blockIdx.x) * kWarps + int(threadIdx.x) / kLogicalWarp) * of_share;
  if (first >= p.rows) return;
  const int rows = p.rows - first < of_share ? int(p.rows - first) : of_share;
  char *const of_warp = shared + int(threadIdx.x) / kLogicalWarp * share_bytes<T, V>(of_share, n);
  const Share<kLogicalWarp> x_share(p.x.data + first * n * 2, rows * n * 2);
  x_share.bring(of_warp, first > 0, first + rows < p.rows);
  commit_copies();
  wait_copies<0>();
  __syncwarp();

  const SharedRow<T, V, F> columns = {lane % T, n};
#pragma unroll 1
  for (int turn = 0; turn * kAtOnce < rows; ++turn) {
    const int mine = turn * kAtOnce + lane / T, r = mine < rows ? mine : rows - 1;
    char *const row = of_warp + x_share.lead + r * n * 2;
    Finish finish(p, first + r);
    float x[V];
    uint16_t bits[V];
    columns.load(row, lowest_of(p.x.type), bits);
    floats_of<2>(p.x.type, bits, x);
    float most = kLowest;
#pragma unroll
    for (int i = 0; i < V; ++i) most = larger(most, x[i]);
#pragma unroll
    for (int apart = T / 2; apart > 0; apart /= 2) most = larger(most, gpu_shfl_xor(most, apart, kLogicalWarp));
    const float max = most + 0.0f;  // which zero is the largest would depend on the order

    SumOfLanes<T, V> sum;
    float exps[sum.kChunks][kChunk];
#pragma unroll
    for (int c = 0; c < sum.kChunks; ++c) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k)
        exps[c][k] = c * kChunk + k < V ? x[c * kChunk + k < V ? c * kChunk + k : 0] : kLowest;
      exps_of(exps[c], max, exps[c]);
      sum.add(c * kChunk, exps[c]);
    }
    finish.known(max, sum.total());
    if (mine >= rows) continue;
    if (p.kind == SoftmaxKind::log_prob) {
      if (columns.t == 0) finish.store_log_prob(p.x.data + (first + r) * n * 2);
      continue;
    }
    auto write = [&](const auto &make) {
#pragma unroll
      for (int c = 0; c < sum.kChunks; ++c) {
        uint32_t pairs[kChunk / 2];
        make(c * kChunk, exps[c], pairs);
        columns.store_some(row, c * kChunk, pairs);
      }
    };
    using Chunk = float[kChunk];
    using Pairs = uint32_t[kChunk / 2];
    if (p.kind == SoftmaxKind::softmax) {
      if (p.x.type == Type::bf16)
        write([&](int, const Chunk &e, Pairs &pairs) { finish.rounded_quotients<Type::bf16>(e, pairs); });
      else write([&](int, const Chunk &e, Pairs &pairs) { finish.rounded_quotients<Type::f16>(e, pairs); });
    } else if (p.kind == SoftmaxKind::log_softmax) {
      write([&](int i, const Chunk &, Pairs &pairs) {
        uint16_t again[kChunk];
        Chunk y;
        columns.load_some(row, i, again);
        floats_of<2>(p.x.type, again, y);
        finish.logarithms(y);
        pairs_of(p.x.type, y, pairs);
      });
    } else {
      write([&](int i, const Chunk &e, Pairs &pairs) {
        Chunk y;
        finish.elements<T>(columns.t + T * i, e, y);
        pairs_of(p.x.type, y, pairs);
      });
    }
  }
  if (p.kind == SoftmaxKind::log_prob) return;
  __syncwarp();
  Share<kLogicalWarp>(p.y.data + first * n * 2, rows * n * 2).store(of_warp);
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int64_t kLongest = 320;

// Calls f with a team that holds a row of n.
template <class F> pydet_status with_shape(int64_t n, const F &f) {
  return with_first<Singles<2, 24, 16>, Singles<2, 32, 24>, Singles<4, 20, 16>, Singles<4, 24, 20>, Singles<4, 28, 24>,
                    Singles<4, 32, 28>, Singles<4, 36, 32>, Singles<4, 40, 36>, Singles<8, 24, 20>, Singles<8, 28, 24>,
                    Singles<8, 32, 28>, Singles<8, 36, 32>, Singles<8, 40, 36>>(n, f);
}

// A warp's share is rows of all its teams; of very many rows twice as many, so that it is whole pieces wherever they
// begin: 190000x163 67 us with one row a team and 62 with two, but 24000x163 11.4 and 14.0.
template <class Shape> pydet_status launch_shares(const Softmax &p, Shape, void (*kernel)(Softmax, int)) {
  const int of_share = kLogicalWarp / Shape::T * (Shape::T == 8 && p.rows >= 80'000 ? 2 : 1);
  return launch(blocks_of("softmax_adjacent", p, unsigned(divide_up(p.rows, kWarps * of_share)), kBlock,
                          kWarps * share_bytes<Shape::T, Shape::V>(of_share, int(p.n))),
                kernel, p, of_share);
}

bool takes_rows(int64_t rows, int64_t n) { return n > 2 * 16 && n <= kLongest && rows < int64_t(1) << 31; }

}  // namespace

bool softmax_adjacent_takes(const Softmax &p) {
  return takes_rows(p.rows, p.n) && rows_adjacent(p, p.x, p.x) && rows_adjacent(p, p.y, p.x);
}
// From so many rows on this is faster than softmax_strided. Measured on an H100, us, log_softmax here and there:
// 183898x145 51 and 95 (a copy 46), 39647x130 14.0 and 21.9, 190000x65 36 and 50, 190000x203 72 and 100, 124356x309 69
// and 80, but 16000x97 7.8 and 5.9, 48000x63 9.4 and 9.0, 16000x309 14.4 and 12.7, 4000x130 4.0 and 3.9.
bool softmax_adjacent_prefers(const Softmax &p) {
  constexpr struct {
    int64_t longest, rows;
  } kFrom[] = {{48, 24'000}, {64, 80'000},  {71, 28'000},  {96, 8'000},   {128, 40'000},
               {160, 8'000}, {192, 14'000}, {256, 28'000}, {288, 24'000}, {320, 40'000}};
  if (rows_whole(p)) return false;
  for (const auto &from : kFrom)
    if (p.n <= from.longest) return p.rows >= from.rows * (p.kind == SoftmaxKind::log_prob_backward ? 2 : 1);
  return false;
}

pydet_status softmax_adjacent(const Softmax &p) {
  return on_device("softmax_adjacent", p, [&] {
    return with_shape(
        p.n, [&](auto shape) { return launch_shares(p, shape, softmax_adjacent_kernel<shape.T, shape.V, shape.F>); });
  });
}

}  // namespace pydet
