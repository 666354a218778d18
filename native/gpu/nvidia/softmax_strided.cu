// Softmax of rows that begin anywhere, and its gradients, in fp32 (NUMERICS.md, "Softmax"): the CPU's bits. The formulas
// are those of softmax.cu.
//
//   strided   a team of T threads holds a row in registers, thread t elements t, t + T, ... (elements.h)
//   shifted   gradients of long rows: a block walks a row twice, by the whole vectors of memory in which it lies
//             (pieces.h), and holds nothing of it but c: first by the lanes of the row's sum, then as dx lies in memory.
//             What it reads again the L2 has

#include "gpu/any/softmax_row.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/elements.h"
#include "gpu/nvidia/pieces.h"

namespace pydet {
namespace {

// The largest of the team's values. All threads of the block call it.
template <int T> __device__ __forceinline__ float strided_max(float most, float *of_warps) {
  constexpr int kWarps = T / kLogicalWarp;
#pragma unroll
  for (int apart = (T < kLogicalWarp ? T : kLogicalWarp) / 2; apart > 0; apart /= 2)
    most = fmaxf(most, gpu_shfl_xor(most, apart, kLogicalWarp));
  if constexpr (kWarps > 1) {
    static_assert(T == kBlock<T>, "a team of many warps has the block");
    if (threadIdx.x % kLogicalWarp == 0) of_warps[threadIdx.x / kLogicalWarp] = most;
    __syncthreads();
    most = of_warps[threadIdx.x % kWarps];
#pragma unroll
    for (int apart = kWarps / 2; apart > 0; apart /= 2) most = fmaxf(most, gpu_shfl_xor(most, apart, kLogicalWarp));
  }
  return most + 0.0f;  // which zero is the largest would depend on the order
}

template <int T> __device__ __forceinline__ int64_t row_of_team() {
  return int64_t(blockIdx.x) * (kBlock<T> / T) + int(threadIdx.x) / T;
}

// V elements a thread, of which the first F are always the row's.
template <int size, int T, int V, int F>
__global__ void __launch_bounds__(kBlock<T>) softmax_strided_kernel(const __grid_constant__ Softmax p) {
  constexpr int kAtOnce = V < 8 ? V : 8;  // elements that choose the short ways of exp and of a division together
  __shared__ float largest[T / kLogicalWarp + 1], of_groups[kStridedExchange<T, 1> + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t mine = row_of_team<T>(), r = mine < p.rows ? mine : p.rows - 1;
  const RowIndex where = row_index(p.inner, r);
  const Strided<size, T, V, F> columns = {int(threadIdx.x) % T, int(p.n)};
  const char *const x_row = row_at(p.x, size, where);
  ElementBits<size> bits[V];
  columns.load(x_row, bits);
  Finish finish(p, r);
  float x[V], most = kLowest, sum[1];
  floats_of<size>(p.x.type, bits, x);
#pragma unroll
  for (int i = 0; i < V; ++i) most = fmaxf(most, x[i]);
  const float max = strided_max<T>(most, largest);

  const bool keep_x = p.kind == SoftmaxKind::log_softmax;
  StridedLanes<T, V> lanes[1];
  bool normal[(V + kAtOnce - 1) / kAtOnce];
#pragma unroll
  for (int first = 0; first < V; first += kAtOnce) {
    float exps[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) exps[i] = x[first + i < V ? first + i : 0];
    normal[first / kAtOnce] = exps_by_ways(exps, max, exps);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= V) continue;
      lanes[0].add(first + i, columns.inside(first + i), exps[i], 1.0f);
      if (!keep_x) x[first + i] = exps[i];
    }
  }
  join_strided(lanes, of_groups, [](float s) { return s; }, sum);
  finish.known(max, sum[0]);
  if (mine >= p.rows) return;
  if (p.kind == SoftmaxKind::log_prob) {
    if (columns.t == 0) finish.store_log_prob(x_row);
    return;
  }
#pragma unroll
  for (int first = 0; first < V; first += kAtOnce) {
    float exps[kAtOnce], y[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) exps[i] = y[i] = x[first + i < V ? first + i : 0];
    finish.elements<T>(columns.column(first), exps, normal[first / kAtOnce], y);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i < V) x[first + i] = y[i];
  }
  rounded<size>(p.x.type, x, bits);
  columns.store(row_at(p.y, size, where), bits);
}

template <int size, int T, int V, int F>
__global__ void __launch_bounds__(kBlock<T>)
    softmax_backward_strided_kernel(const __grid_constant__ SoftmaxBackward p) {
  __shared__ float of_groups[kStridedExchange<T, 1> + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t mine = row_of_team<T>(), r = mine < p.rows ? mine : p.rows - 1;
  const RowIndex where = row_index(p.inner, r);
  const Strided<size, T, V, F> columns = {int(threadIdx.x) % T, int(p.n)};
  ElementBits<size> dy_bits[V], y_bits[V];
  columns.load(row_at(p.dy, size, where), dy_bits);
  columns.load(row_at(p.y, size, where), y_bits);
  float dy[V], y[V], c[1];
  floats_of<size>(p.dy.type, dy_bits, dy);
  floats_of<size>(p.dy.type, y_bits, y);
  StridedLanes<T, V> lanes[1];
#pragma unroll
  for (int i = 0; i < V; ++i) lanes[0].add(i, columns.inside(i), dy[i], second_of(p, y[i]));
  join_strided(lanes, of_groups, [](float s) { return s; }, c);
  if (mine >= p.rows) return;
  gradients_of(p, c[0], dy, y);
  rounded<size>(p.dy.type, dy, dy_bits);
  columns.store(row_at(p.dx, size, where), dy_bits);
}

// ---- Gradients of long rows --------------------------------------------------------------------------------------

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

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int64_t kLongest = 16384, kLongestBackward = 8192;
// Rows of up to 1024 by a warp each, where there are many.
constexpr int64_t kFewRows = 512;

// Calls f with a team that holds a row of n.
template <class F> pydet_status with_shape(int64_t rows, int64_t n, const F &f) {
  if (n <= 32 * 8) return with_first<Singles<8, 8, 0>, Singles<16, 8, 4>, Singles<32, 8, 4>>(n, f);
  if (rows > kFewRows && n <= 32 * 32)
    return with_first<Singles<32, 10, 8>, Singles<32, 12, 10>, Singles<32, 16, 12>, Singles<32, 24, 16>,
                      Singles<32, 32, 24>>(n, f);
  return with_first<Singles<128, 8, 0>, Singles<128, 12, 8>, Singles<128, 16, 12>>(n, f);
}
template <int64_t longest, class F> pydet_status with_long_shape(int64_t n, const F &f) {
  if constexpr (longest > 512 * 16)
    if (n > 512 * 16) return with_first<Singles<1024, 12, 8>, Singles<1024, 16, 12>>(n, f);
  return with_first<Singles<256, 12, 8>, Singles<256, 16, 12>, Singles<512, 12, 8>, Singles<512, 16, 12>>(n, f);
}

// A kernel of teams for either size of elements.
template <class Shape, class Problem>
pydet_status launch_teams(const char *name, const Problem &p, void (*kernel)(Problem)) {
  constexpr int T = Shape::T;
  return launch(blocks_of(name, p, unsigned(divide_up(p.rows, kBlock<T> / T)), kBlock<T>), kernel, p);
}

constexpr int64_t kMostRows = int64_t(1) << 31;

}  // namespace

bool softmax_strided_takes(const Softmax &p) { return p.n <= kLongest && p.rows < kMostRows; }

// Of odd rows all that a team holds; of whole ones few, where as whole vectors in registers they would leave much of the
// device idle (tools/rows_sweep.py on an H100: 300x4096 5.3 us and 5.9, but 16384x2048 65 and 59).
bool softmax_strided_prefers(const Softmax &p) {
  if (!rows_whole(p)) return p.n > kLongestSingly && p.n <= 8192;
  if (p.n > 8192) return p.rows > 24 && p.rows <= (p.n > 10240 ? 300 : 132);
  return p.n > 2048 && p.rows <= (p.n > 4096 ? 512 : 300);
}

pydet_status softmax_strided(const Softmax &p) {
  const char *name = "softmax_strided";
  auto run = [&](auto shape) {
    constexpr int T = shape.T, V = shape.V, F = shape.F;
    return launch_teams<decltype(shape)>(
        name, p, p.x.type == Type::f32 ? softmax_strided_kernel<4, T, V, F> : softmax_strided_kernel<2, T, V, F>);
  };
  return on_device(name, p,
                   [&] { return p.n <= 2048 ? with_shape(p.rows, p.n, run) : with_long_shape<kLongest>(p.n, run); });
}

bool softmax_backward_strided_takes(const SoftmaxBackward &p) { return p.n <= kLongestBackward && p.rows < kMostRows; }
bool softmax_backward_strided_prefers(const SoftmaxBackward &p) { return p.n > kLongestSingly && !rows_whole(p); }

pydet_status softmax_backward_strided(const SoftmaxBackward &p) {
  const char *name = "softmax_backward_strided";
  auto run = [&](auto shape) {
    constexpr int T = shape.T, V = shape.V, F = shape.F;
    return launch_teams<decltype(shape)>(name, p,
                                         p.dy.type == Type::f32 ? softmax_backward_strided_kernel<4, T, V, F>
                                                                : softmax_backward_strided_kernel<2, T, V, F>);
  };
  return on_device(name, p, [&] {
    return p.n <= 2048 ? with_shape(p.rows, p.n, run) : with_long_shape<kLongestBackward>(p.n, run);
  });
}

bool softmax_backward_shifted_takes(const SoftmaxBackward &p) { return p.n <= INT32_MAX / 2 && p.rows < kMostRows; }
// On an H100, in bf16: logarithms' 813x23361 59 us and 118 by a cluster, 4096x50257 581 and 935; of few rows, which a
// cluster spreads, 110x101609 71 and 58. With y read twice too 813x23361 68 and 85, but 4096x50257 724 and 654.
bool softmax_backward_shifted_prefers(const SoftmaxBackward &p) {
  constexpr int64_t kLeastRows = 120, kLongestOfBoth = 40000;
  if (rows_whole(p) || p.rows < kLeastRows) return false;
  return p.log ? p.n > 8192 : p.n > 16384 && p.n <= kLongestOfBoth;
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
