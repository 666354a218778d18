// RMSNorm, LayerNorm (rows of up to 12288) and their gradients (to 16384) for rows that are not whole pieces of 16 bytes,
// odd in length or in place: the CPU's bits. The formulas are those of rmsnorm.cu, layernorm.cu and their gradients.
//
// A team holds a row in registers, which it reads and writes element by element (strided_row.h). dweight and dbias need
// no sum along a row, as mean and rstd are given: blocks of the same launch go down columns, a thread one column of a
// chain of 16 rows, and leave the chains' sums in the workspace, which column_sums.cu joins.

#include <type_traits>

#include "gpu/kernels.h"
#include "gpu/any/column_sums.h"
#include "gpu/nvidia/strided_row.h"

namespace pydet {
namespace {

template <int T> constexpr int kBlock = T < 256 ? 256 : T;  // several small teams share one

template <class P, int size, int T, int V, int F>
__global__ void __launch_bounds__(kBlock<T>) norm_unaligned_kernel(const __grid_constant__ P p) {
  constexpr bool centred = std::is_same_v<P, LayerNorm>;
  constexpr int kTeams = kBlock<T> / T, kRoom = kStridedExchange<T, 1>;
  __shared__ float of_mean[centred ? kTeams * kRoom + 1 : 1], of_squares[kTeams * kRoom + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T;
  const Strided<size, T, V, F> columns = {int(threadIdx.x) % T, int(p.n)};
  const int64_t r = block_number() * kTeams + team, last = p.rows - 1;
  const bool there = r <= last;
  const RowIndex where = row_index(p.inner, there ? r : last);
  ElementBits<size> bits[V];
  columns.load(row_at(p.x, size, where), bits);
  float x[V], scale[V], bias[V], mean[1] = {}, rstd[1];
  floats_of<size>(p.x.type, bits, x);
  if (p.residual.data) {
    float other[V];
    columns.load(row_at(p.residual, size, where), bits);
    floats_of<size>(p.x.type, bits, other);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] += other[i];
    rounded<size>(p.x.type, x, bits);
    if (there) columns.store(row_at(p.sum, size, where), bits);
    floats_of<size>(p.x.type, bits, x);
  }
  columns.load_scale(p.weight, p.weight_offset, scale);
  constexpr float kNothing = -0.0f;  // which changes no number that it is added to
  if constexpr (centred) columns.load_scale(p.bias, kNothing, bias);
  StridedLanes<T, V> squares[1];
  if constexpr (centred) {
    StridedLanes<T, V> lanes[1];
#pragma unroll
    for (int i = 0; i < V; ++i) lanes[0].add(i, columns.inside(i), x[i], 1.0f);
    join_strided(lanes, of_mean + team * kRoom, [&](float sum) { return sum / float(p.n); }, mean);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] -= mean[0];
  }
#pragma unroll
  for (int i = 0; i < V; ++i) squares[0].add(i, columns.inside(i), x[i], x[i]);
  join_strided(squares, of_squares + team * kRoom, [&](float sum) { return rstd_of(sum, p.n, p.eps); }, rstd);
  if (!there) return;
  if (columns.t == 0) {
    if constexpr (centred) store_of_row(p.mean, r, mean[0]);
    store_of_row(p.rstd, r, rstd[0]);
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    x[i] *= rstd[0];
    if (centred && p.bias.data) x[i] = fmaf(x[i], scale[i], bias[i]);
    else x[i] *= scale[i];
  }
  rounded<size>(p.x.type, x, bits);
  columns.store(row_at(p.y, size, where), bits);
}

// ---- Gradients ---------------------------------------------------------------------------------------------------

template <class P> constexpr int kSums = kCentred<P> ? 2 : 1;  // over rows: dweight, dbias; along a row: c, a

// Rows of a column whose elements are on their way: as many as 1024 threads have registers for.
template <int T, int V> constexpr int kAtOnce = T <= 512 ? kDweightChainRows : V <= 12 ? 8 : 4;

// One column of one chain a thread.
template <class P, int size, int at_once> __device__ __forceinline__ void go_down(const P &p, int64_t job) {
  const int64_t chain_number = job / p.n, column = job - chain_number * p.n, first = chain_number * kDweightChainRows;
  if (first >= p.rows) return;
  const int64_t last = p.rows - 1;
  float chain[2] = {};
#pragma unroll 1
  for (int64_t row0 = first; row0 < first + kDweightChainRows; row0 += at_once) {
    ElementBits<size> x_bits[at_once], dy_bits[at_once];
    float x[at_once], dy[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const RowIndex row = row_index(p.inner, row0 + i <= last ? row0 + i : last);
      x_bits[i] = reinterpret_cast<const ElementBits<size> *>(row_at(p.x, size, row))[column];
      dy_bits[i] = reinterpret_cast<const ElementBits<size> *>(row_at(p.dy, size, row))[column];
    }
    floats_of<size>(p.x.type, x_bits, x);
    floats_of<size>(p.x.type, dy_bits, dy);
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (row0 + i > last) continue;
      float d = x[i];
      if constexpr (kCentred<P>) d -= of_row(p.mean, row0 + i);
      chain[0] = fmaf(dy[i], d * of_row(p.rstd, row0 + i), chain[0]);
      chain[1] = dy[i] + chain[1];
    }
  }
  float *const chains = static_cast<float *>(p.workspace);
  if constexpr (kCentred<P>) {
    const int64_t all = (p.rows + kDweightChainRows - 1) / kDweightChainRows * p.n;
    if (p.dweight.data) chains[job] = chain[0];
    if (p.dbias.data) chains[all + job] = chain[1];
  } else {
    chains[job] = chain[0];
  }
}

// The first `column_blocks` go down columns, the others along rows.
template <class P, int size, int T, int V, int F>
__global__ void __launch_bounds__(kBlock<T>)
    norm_backward_unaligned_kernel(const __grid_constant__ P p, int64_t column_blocks) {
  constexpr int kTeams = kBlock<T> / T;
  __shared__ float exchange[kTeams * kStridedExchange<T, kSums<P>> + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (block_number() < column_blocks)
    return go_down<P, size, kAtOnce<T, V>>(p, block_number() * kBlock<T> + threadIdx.x);
  const int team = int(threadIdx.x) / T;
  const Strided<size, T, V, F> columns = {int(threadIdx.x) % T, int(p.n)};
  const int64_t r = (block_number() - column_blocks) * kTeams + team, last = p.rows - 1;
  const RowIndex where = row_index(p.inner, r <= last ? r : last);
  const float rstd = of_row(p.rstd, r <= last ? r : last);
  float mean = 0.0f;
  if constexpr (kCentred<P>) mean = of_row(p.mean, r <= last ? r : last);
  ElementBits<size> x_bits[V], dy_bits[V];
  constexpr bool kTight = T * V > 1024 * 12;  // registers: x comes when the weights have gone
  if constexpr (!kTight) columns.load(row_at(p.x, size, where), x_bits);
  columns.load(row_at(p.dy, size, where), dy_bits);
  float xhat[V], g[V], scale[V], sums[kSums<P>];
  columns.load_scale(p.weight, p.weight_offset, scale);
  floats_of<size>(p.x.type, dy_bits, g);
#pragma unroll
  for (int i = 0; i < V; ++i) g[i] *= scale[i];
  if constexpr (kTight) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      uint32_t bits = bits_of(g[i]);
      asm volatile("" : "+r"(bits)::"memory");
      g[i] = float_of(bits);
    }
    columns.load(row_at(p.x, size, where), x_bits);
  }
  floats_of<size>(p.x.type, x_bits, xhat);
  StridedLanes<T, V> lanes[kSums<P>];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    xhat[i] = (kCentred<P> ? xhat[i] - mean : xhat[i]) * rstd;
    lanes[0].add(i, columns.inside(i), g[i], xhat[i]);
    if constexpr (kCentred<P>) lanes[1].add(i, columns.inside(i), g[i], 1.0f);
  }
  join_strided(
      lanes, exchange + team * kStridedExchange<T, kSums<P>>, [&](float sum) { return sum / float(p.n); }, sums);
  if (r <= last) store_dx(p, where, columns, rstd, xhat, sums, g);
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int64_t kLongest = 1024 * 12, kLongestGradient = 1024 * 16;

// Calls f with a team that holds a row of n, up to `longest`.
template <int64_t longest, class F> pydet_status with_shape(int64_t n, const F &f) {
  if (n <= 32 * 4) return f(StridedShape<32, 4, 0>{});
  if (n <= 32 * 8) return f(StridedShape<32, 8, 4>{});
  if (n <= 64 * 8) return f(StridedShape<64, 8, 4>{});
  if (n <= 128 * 8) return f(StridedShape<128, 8, 4>{});
  if (n <= 256 * 6) return f(StridedShape<256, 6, 4>{});
  if (n <= 256 * 8) return f(StridedShape<256, 8, 6>{});
  if (n <= 256 * 12) return f(StridedShape<256, 12, 8>{});
  if (n <= 512 * 8) return f(StridedShape<512, 8, 6>{});
  if (n <= 512 * 12) return f(StridedShape<512, 12, 8>{});
  if (n <= 512 * 16) return f(StridedShape<512, 16, 12>{});
  if constexpr (longest > 1024 * 12)
    if (n > 1024 * 12) return f(StridedShape<1024, 16, 12>{});
  return f(StridedShape<1024, 12, 8>{});
}

template <int64_t longest> bool holds(int64_t rows, int64_t n) {
  constexpr int64_t kMostElements = int64_t(1) << 40;  // of all rows: their blocks are one grid
  return n <= longest && rows <= most_blocks(256) / 2 && rows * n <= kMostElements;
}

// `sums`: those over rows, as column_sums.cu joins them, if any are wanted.
template <class P>
pydet_status backward_unaligned(const char *name, const P &p, const RmsNormBackward &sums, bool wanted) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  pydet_status status = ready_to_join(sums);
  if (status != PYDET_OK) return status;
  const int64_t jobs = wanted ? divide_up(p.rows, kDweightChainRows) * p.n : 0;
  if (p.rows > 0 && (wanted || p.dx.data)) {
    status = with_shape<kLongestGradient>(p.n, [&](auto shape) {
      constexpr int T = shape.T, kThreads = kBlock<T>;
      const int64_t column_blocks = divide_up(jobs, kThreads),
                    row_blocks = p.dx.data ? divide_up(p.rows, kThreads / T) : 0;
      Launch where = {name, static_cast<gpu_stream>(p.stream), grid_of(column_blocks + row_blocks, kThreads),
                      dim3(kThreads)};
      where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
      return launch(where,
                    p.x.type == Type::f32 ? norm_backward_unaligned_kernel<P, 4, T, shape.V, shape.F>
                                          : norm_backward_unaligned_kernel<P, 2, T, shape.V, shape.F>,
                    p, column_blocks);
    });
    if (status != PYDET_OK) return status;
  }
  return join_partials(sums, 1);
}

template <class P> pydet_status norm_unaligned(const char *name, const P &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  return with_shape<kLongest>(p.n, [&](auto shape) {
    constexpr int T = shape.T, kThreads = kBlock<T>;
    Launch where = {name, static_cast<gpu_stream>(p.stream), grid_of(divide_up(p.rows, kThreads / T), kThreads),
                    dim3(kThreads)};
    where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
    return launch(where,
                  p.x.type == Type::f32 ? norm_unaligned_kernel<P, 4, T, shape.V, shape.F>
                                        : norm_unaligned_kernel<P, 2, T, shape.V, shape.F>,
                  p);
  });
}

}  // namespace

bool rmsnorm_unaligned_takes(const RmsNorm &p) { return holds<kLongest>(p.rows, p.n); }
pydet_status rmsnorm_unaligned(const RmsNorm &p) { return norm_unaligned("rmsnorm_unaligned", p); }
bool layernorm_unaligned_takes(const LayerNorm &p) { return holds<kLongest>(p.rows, p.n); }
pydet_status layernorm_unaligned(const LayerNorm &p) { return norm_unaligned("layernorm_unaligned", p); }

bool rmsnorm_backward_unaligned_takes(const RmsNormBackward &p) { return holds<kLongestGradient>(p.rows, p.n); }
pydet_status rmsnorm_backward_unaligned(const RmsNormBackward &p) {
  return backward_unaligned("rmsnorm_backward_unaligned", p, p, p.dweight.data);
}

bool layernorm_backward_unaligned_takes(const LayerNormBackward &p) { return holds<kLongestGradient>(p.rows, p.n); }
// Of few elements, as they are read twice. Measured on an H100, us, beside layernorm_backward_rows (whole rows), _apart
// (few rows) and _strided: whole rows 1075x416 7.7, 10.9 and 10.7, 2048x512 10.3, 11.4 and 13, 4096x256 10.3, 10.7 and 18,
// 1100x1280 12.2, 13.9 and 13.6, but 2048x768 12.8 and 11.8, 1500x1088 14.3, 14.0 and 13.7; others 120x1023 5.6 and, apart,
// 7.4, 600x2041 11 and 20, 8000x301 20.5 and, strided, 22.1, 1100x6001 43 and 46, 65x13260 12 and, apart, 31, but 64x2603
// 9.7 and, apart, 7.9, 256x2041 9.8 and 8.4, 120x5001 9.5 and 9.1, 1100x5001 36 and, strided, 30, 4000x6001 142 and 95.
bool layernorm_backward_unaligned_prefers(const LayerNormBackward &p) {
  if (rows_whole(p)) return p.rows > 1024 && p.rows * p.n <= (p.n <= 1024 ? 1'200'000 : 1'500'000);
  const int64_t few = p.n <= 1800 || p.n > 8185 ? 0 : p.n <= 4500 ? 256 : 128;
  const int64_t most = p.n <= 5120 ? 4'000'000 : p.n <= 6144 ? 8'000'000 : 12'000'000;
  return p.rows > few && (p.n > 8185 || p.rows * p.n <= most);
}
pydet_status layernorm_backward_unaligned(const LayerNormBackward &p) {
  return backward_unaligned("layernorm_backward_unaligned", p, sums_over_rows(p), p.dweight.data || p.dbias.data);
}

}  // namespace pydet
