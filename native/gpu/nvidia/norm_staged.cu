// RMSNorm and LayerNorm of rows that begin anywhere, held in shared memory, in fp32 (NUMERICS.md, "RMSNorm",
// "LayerNorm"): the CPU's bits. The formulas are those of rmsnorm.cu and layernorm.cu. Without a residual.

#include <type_traits>

#include "gpu/kernels.h"
#include "gpu/nvidia/staged_row.h"

namespace pydet {
namespace {

template <class P, Type type>
__global__ void __launch_bounds__(kMaxTeam, 4) norm_staged_kernel(const __grid_constant__ P p, bool ascend) {
  constexpr bool centred = std::is_same_v<P, LayerNorm>;
  constexpr int T = kMaxTeam, W = kVector;
  using Row = StagedRow<type, true>;
  extern __shared__ __align__(16) char shared[];
  __shared__ float of_mean[centred ? T : 1], of_squares[T];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t r = blockIdx.x;
  const RowIndex where = row_index(p.inner, r);
  Row row;
  row.fetch(shared, row_at(p.x, size_of(type), where), p.n, ascend && r > 0, ascend && r < p.rows - 1);

  Lanes<T, W, 1> lanes[1], squares[1];
  float ones[W], mean[1] = {}, rstd[1];
#pragma unroll
  for (int e = 0; e < W; ++e) ones[e] = 1.0f;
  if constexpr (centred) {
    row.turns(0, 0.0f, [&](int j, const float(&x)[W]) { row.add(lanes[0], j, x, ones); });
    join(lanes, of_mean, [&](float sum) { return sum / float(p.n); }, mean);
  }
  row.turns(0, 0.0f, [&](int j, float(&x)[W]) {
    if constexpr (centred)
#pragma unroll
      for (int e = 0; e < W; ++e) x[e] -= mean[0];
    row.add(squares[0], j, x, x);
  });
  join(squares, of_squares, [&](float sum) { return rstd_of(sum, p.n, p.eps); }, rstd);
  if (threadIdx.x == 0) {
    if constexpr (centred) store_of_row(p.mean, r, mean[0]);
    store_of_row(p.rstd, r, rstd[0]);
  }

  constexpr float kNothing = -0.0f;  // which changes no number that it is added to
  char *const y_row = row_at(p.y, size_of(type), where);
  row.turns(Row::behind_whole(y_row), 0.0f, [&](int j, float(&y)[W]) {
    float scale[W], bias[W];
    load_scales_of(p.weight, p.weight_offset, 1.0f, j, row.n, scale);
    if constexpr (centred) load_scales_of(p.bias, kNothing, 0.0f, j, row.n, bias);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      if constexpr (centred) {
        const float xhat = (y[e] - mean[0]) * rstd[0];
        y[e] = p.bias.data ? fmaf(xhat, scale[e], bias[e]) : xhat * scale[e];
      } else {
        y[e] = y[e] * rstd[0] * scale[e];
      }
    }
    row.store(y_row, j, y);
  });
}

// ---- Host --------------------------------------------------------------------------------------------------------

template <class P> bool takes(const P &p) {
  constexpr int64_t kStatic = 4 << 10, kMostRows = int64_t(1) << 31;
  return !p.residual.data && p.rows < kMostRows && vector_aligned(p.weight) && vector_aligned(p.bias) &&
         bytes_of_staged(p.n, p.x.type) + kStatic <= gpu_shared_bytes(p.device.id);
}

template <class P> pydet_status norm_staged(const char *name, const P &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(p.rows)), dim3(kMaxTeam)};
    where.shared_bytes = int(bytes_of_staged(p.n, type));
    where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
    return launch(where, norm_staged_kernel<P, type>, p, rows_ascend(p.x, p.inner, p.rows, p.n));
  });
}

// Beside the same rows in registers (norm_unaligned.cu), measured on an H100, us: RMSNorm 2000x5001 24.0 and 27.3,
// 700x5001 both 11.9, 200x7001 6.7 and 5.6, 8000x4001 69.5 and 65.0, 87x10469 5.4 and 6.7, 300x9001 11.7 and 10.2; LayerNorm
// 2000x5001 both 33.5, 700x5001 15.5 and 14.2, 87x10469 6.1 and 9.7, 300x9001 14.1 and 14.4, 2000x9001 67 and 49.
bool prefers(int64_t rows, int64_t n) { return rows > (n <= 8192 ? 1000 : n <= 12288 ? 200 : 0) && n > 4096; }

}  // namespace

bool rmsnorm_staged_takes(const RmsNorm &p) { return takes(p); }
bool rmsnorm_staged_prefers(const RmsNorm &p) { return prefers(p.rows, p.n); }
pydet_status rmsnorm_staged(const RmsNorm &p) { return norm_staged("rmsnorm_staged", p); }
bool layernorm_staged_takes(const LayerNorm &p) { return takes(p); }
bool layernorm_staged_prefers(const LayerNorm &p) { return prefers(p.rows, p.n); }
pydet_status layernorm_staged(const LayerNorm &p) { return norm_staged("layernorm_staged", p); }

}  // namespace pydet
