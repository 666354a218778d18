// Gradients of softmax of long rows that begin anywhere, in fp32 (NUMERICS.md, "Softmax"): the CPU's bits. The formulas are
// those of softmax.cu.
//
// A block walks a row twice, by the whole vectors of memory in which it lies (pieces.h), and holds nothing of it but c:
// first by the lanes of the row's sum, then as dx lies in memory. What it reads again the L2 has.

#include "gpu/any/softmax_row.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/pieces.h"

namespace pydet {
namespace {

// A row of n that is read from elements that lie `apart` behind a whole vector of memory.
template <Type type> struct ShiftedRow {
  static constexpr int W = kVector;
  const char *row;
  int n, apart;
  bool before, behind;  // whether there are rows to read there

  // Elements j to j + W - 1; those that are not the row's are anything.
  __device__ __forceinline__ Packed<type, W> at(int j) const {
    const Packed<type, W> first = load_piece<type, W>(row, j - apart, n, before, behind);
    if (apart == 0) return first;
    return window<type, W>(first, load_piece<type, W>(row, j - apart + W, n, before, behind), apart);
  }
};

// Calls body(j, dy, y) for the thread's vectors, from those that begin at -shift on, of which some set out together.
template <int kAtOnce, bool reads_y, Type type, class F>
__device__ __forceinline__ void walk(const ShiftedRow<type> &dy, const ShiftedRow<type> &y, int shift, const F &body) {
  constexpr int W = kVector;
  for (int begin = W * int(threadIdx.x) - shift; begin < dy.n; begin += kAtOnce * kRowLanes) {
    Packed<type, W> of_dy[kAtOnce], of_y[reads_y ? kAtOnce : 1];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int j = begin + i * kRowLanes;
      of_dy[i] = dy.at(j);
      if constexpr (reads_y) of_y[i] = y.at(j);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int j = begin + i * kRowLanes;
      if (j < dy.n) body(j, of_dy[i], of_y[reads_y ? i : 0]);
    }
  }
}

template <Type type, bool log>
__global__ void __launch_bounds__(kMaxTeam, 4)
    softmax_backward_shifted_kernel(const __grid_constant__ SoftmaxBackward p, bool dy_ascends, bool y_ascends) {
  constexpr int T = kMaxTeam, W = kVector, kSize = size_of(type);
  SoftmaxBackward kind;
  kind.log = log;
  __shared__ float of_groups[kExchange<T, 1>];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t r = blockIdx.x;
  const RowIndex where = row_index(p.inner, r);
  const int n = int(p.n);
  const auto row_of = [&](const Rows &rows, bool ascends) {
    const char *const row = row_at(rows, kSize, where);
    return ShiftedRow<type>{row, n, shift_of<type, W>(row), ascends && r > 0, ascends && r < p.rows - 1};
  };
  ShiftedRow<type> dy = row_of(p.dy, dy_ascends), y = row_of(p.y, y_ascends);

  Lanes<T, W, 1> lanes[1];
  walk<log && kSize == 2 ? 4 : 2, !log>(dy, y, 0, [&](int j, const Packed<type, W> &dy, const Packed<type, W> &y) {
    float first[W], second[W];
    unpack(dy, first);
    unpack(y, second);
#pragma unroll
    for (int e = 0; e < W; ++e) second[e] = second_of(kind, second[e]);
    if (j + W <= n) lanes[0].add(0, true, first, second);
    else lanes[0].add_left(0, n - j, first, second);
  });
  float c[1];
  join(lanes, of_groups, [](float s) { return s; }, c);

  char *const dx_row = row_at(p.dx, kSize, where);
  const int shift = shift_of<type, W>(dx_row);
  dy.apart = (dy.apart - shift) & (W - 1), y.apart = (y.apart - shift) & (W - 1);
  walk<kSize == 2 ? 2 : 1, true>(dy, y, shift, [&](int j, const Packed<type, W> &dy, const Packed<type, W> &y) {
    float first[W], second[W];
    unpack(dy, first);
    unpack(y, second);
    gradients_of(kind, c[0], first, second);
    store_piece<type, W>(dx_row, j, n, pack<type>(first));
  });
}

constexpr int64_t kMostRows = int64_t(1) << 31;

}  // namespace

bool softmax_backward_shifted_takes(const SoftmaxBackward &p) { return p.n <= INT32_MAX / 2 && p.rows < kMostRows; }
// On an H100, in bf16: logarithms' 813x23361 59 us and 118 by a cluster, 4096x50257 581 and 935; of few rows, which a
// cluster spreads, 110x101609 71 and 58. With y read twice too 813x23361 68 and 85, but 4096x50257 724 and 654.
bool softmax_backward_shifted_prefers(const SoftmaxBackward &p) {
  constexpr int64_t kLeastRows = 120, kLongest = 40000;
  if (rows_whole(p) || p.rows < kLeastRows) return false;
  return p.log ? p.n > 8192 : p.n > 16384 && p.n <= kLongest;
}

pydet_status softmax_backward_shifted(const SoftmaxBackward &p) {
  const char *name = "softmax_backward_shifted";
  const bool dy_ascends = rows_ascend(p.dy, p.inner, p.rows, p.n), y_ascends = rows_ascend(p.y, p.inner, p.rows, p.n);
  return by_type(name, p, p.dy.type, [&](auto type) {
    return launch(blocks_of(name, p, unsigned(p.rows), kMaxTeam),
                  p.log ? softmax_backward_shifted_kernel<type, true> : softmax_backward_shifted_kernel<type, false>, p,
                  dy_ascends, y_ascends);
  });
}

}  // namespace pydet
