// Gradients of RMSNorm and LayerNorm in one pass over x and dy, for rows that begin anywhere, in fp32 (NUMERICS.md,
// "RMSNorm", "LayerNorm"): the CPU's bits. The formulas are those of rmsnorm_general.cu and layernorm.cu.
//
// A team takes a chain of 16 rows, one at a time in registers, element by element (strided_row.h), and goes down its own
// columns of them as well: a thread's share of the chains of dweight and dbias is in registers too, and ends in the
// workspace, which column_sums.cu joins. `ahead`: the next row is on its way while this one's sum is joined.

#include "gpu/kernels.h"
#include "gpu/any/column_sums.h"
#include "gpu/nvidia/strided_row.h"

namespace pydet {
namespace {

template <int T> constexpr int kBlock = T < 128 ? 128 : T;  // several small teams share one

template <class P, int size, int T, int V, int F, bool ahead>
__global__ void __launch_bounds__(kBlock<T>, 512 / kBlock<T>)
    norm_backward_strided_kernel(const __grid_constant__ P p) {
  constexpr bool centred = kCentred<P>;
  constexpr int kTeams = kBlock<T> / T, kSums = centred ? 2 : 1;  // along a row: c and a
  constexpr int kRoom = kStridedExchange<T, kSums>;
  __shared__ float exchange[2][kTeams * kRoom + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, n = int(p.n);
  const Strided<size, T, V, F> columns = {int(threadIdx.x) % T, n};
  const int64_t chain_number = block_number() * kTeams + team, first = chain_number * kDweightChainRows;
  const int64_t left = p.rows - first;
  const int count = left < kDweightChainRows ? int(left) : kDweightChainRows;  // not positive: no rows
  float scale[V], of_weight[V] = {}, of_bias[centred ? V : 1] = {};
  columns.load_scale(p.weight, p.weight_offset, scale);

  ElementBits<size> x_bits[V], dy_bits[V];
  float next_mean, next_rstd;
  // A row past the last has x = dy = +0; with -0 for its rstd it adds (+0)(-0) to a chain, which changes nothing.
  auto fetch = [&](int i) {
    next_rstd = -0.0f, next_mean = 0.0f;
    if (i < count) {
      const RowIndex row = row_index(p.inner, first + i);
      next_rstd = of_row(p.rstd, first + i);
      if constexpr (centred) next_mean = of_row(p.mean, first + i);
      columns.load(row_at(p.x, size, row), x_bits);
      columns.load(row_at(p.dy, size, row), dy_bits);
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) x_bits[v] = dy_bits[v] = 0;
    }
  };
  if constexpr (ahead) fetch(0);

#pragma unroll 1
  for (int i = 0; i < kDweightChainRows; ++i) {
    if constexpr (!ahead) fetch(i);
    StridedLanes<T, V> lanes[kSums];
    float xhat[V], g[V], sums[kSums];
    const float mean = next_mean, rstd = next_rstd;
    floats_of<size>(p.x.type, x_bits, xhat);
    floats_of<size>(p.x.type, dy_bits, g);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      xhat[v] = (centred ? xhat[v] - mean : xhat[v]) * rstd;
      of_weight[v] = fmaf(g[v], xhat[v], of_weight[v]);
      if constexpr (centred) of_bias[v] = g[v] + of_bias[v];
      g[v] *= scale[v];
      lanes[0].add(v, columns.inside(v), g[v], xhat[v]);
      if constexpr (centred) lanes[1].add(v, columns.inside(v), g[v], 1.0f);
    }
    if constexpr (ahead)
      if (i + 1 < kDweightChainRows) fetch(i + 1);
    if (!p.dx.data) continue;
    join_strided(lanes, exchange[i % 2] + team * kRoom, [&](float sum) { return sum / float(n); }, sums);
    if (i < count) store_dx(p, row_index(p.inner, first + i), columns, rstd, xhat, sums, g);
  }

  if (count <= 0) return;
  float *const chains = static_cast<float *>(p.workspace) + chain_number * p.n;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (!columns.inside(i)) continue;
    if (p.dweight.data) chains[columns.column(i)] = of_weight[i];
    if constexpr (centred)
      if (p.dbias.data) chains[divide_up(p.rows, kDweightChainRows) * p.n + columns.column(i)] = of_bias[i];
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int64_t kLongest = 512 * 12;

// Calls f with a team that holds a row of n.
template <class F> pydet_status with_shape(int64_t n, const F &f) {
  if (n <= 32 * 4) return f(StridedShape<32, 4, 0>{});
  if (n <= 32 * 8) return f(StridedShape<32, 8, 4>{});
  if (n <= 64 * 8) return f(StridedShape<64, 8, 4>{});
  if (n <= 128 * 8) return f(StridedShape<128, 8, 4>{});
  if (n <= 256 * 6) return f(StridedShape<256, 6, 4>{});
  if (n <= 256 * 8) return f(StridedShape<256, 8, 6>{});
  if (n <= 512 * 6) return f(StridedShape<512, 6, 4>{});
  if (n <= 512 * 8) return f(StridedShape<512, 8, 6>{});
  if (n <= 512 * 10) return f(StridedShape<512, 10, 8>{});
  return f(StridedShape<512, 12, 8>{});
}

template <class P> pydet_status backward_strided(const char *name, const P &p, const RmsNormBackward &sums) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  if (const pydet_status ready = ready_to_join(sums); ready != PYDET_OK) return ready;
  if (p.rows > 0) {
    const pydet_status launched = with_shape(p.n, [&](auto shape) {
      constexpr int T = shape.T, V = shape.V, F = shape.F;
      constexpr bool ahead = V <= 10;  // longer rows leave no registers for the next one
      Launch where = {name, static_cast<gpu_stream>(p.stream),
                      grid_of(divide_up(p.rows, kDweightChainRows * (kBlock<T> / T)), kBlock<T>), dim3(kBlock<T>)};
      where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
      return launch(where,
                    p.x.type == Type::f32 ? norm_backward_strided_kernel<P, 4, T, V, F, ahead>
                                          : norm_backward_strided_kernel<P, 2, T, V, F, ahead>,
                    p);
    });
    if (launched != PYDET_OK) return launched;
  }
  return join_partials(sums, 1);
}

// Many elements: few are faster by rmsnorm_backward_unaligned, which reads them twice. Measured on an H100, us, beside
// it: 81818x1163 356 and 540, 8000x1023 29.5 and 43.4, 4096x1023 21.4 and 22.4, 1100x5001 26 and 31, 4000x6001 87 and 122,
// but 1364x2603 21.2 and 19.5, 1100x6001 42 and 36.
bool many_elements(int64_t rows, int64_t n) { return rows * n > (n <= 5120 ? 4'000'000 : 8'000'000); }

}  // namespace

bool rmsnorm_backward_strided_takes(const RmsNormBackward &p) { return p.n <= kLongest; }
bool rmsnorm_backward_strided_prefers(const RmsNormBackward &p) { return many_elements(p.rows, p.n); }
pydet_status rmsnorm_backward_strided(const RmsNormBackward &p) {
  return backward_strided("rmsnorm_backward_strided", p, p);
}
bool layernorm_backward_strided_takes(const LayerNormBackward &p) { return p.n <= kLongest; }
bool layernorm_backward_strided_prefers(const LayerNormBackward &p) {
  return !rows_whole(p) && many_elements(p.rows, p.n);
}
pydet_status layernorm_backward_strided(const LayerNormBackward &p) {
  return backward_strided("layernorm_backward_strided", p, sums_over_rows(p));
}

}  // namespace pydet
