// RMSNorm, in fp32 (NUMERICS.md, "RMSNorm"): the CPU's bits.
//
//   x    = round(x + residual), stored in sum          only with a residual
//   rstd = 1 / sqrt(rowsum(x, x) / n + eps)
//   y    = round((x rstd) (w + weight_offset))
//
// Rows up to 16384 are held by their team between the two passes (rmsnorm_rows.h); longer or misaligned ones are read
// twice, by plain loads.

#include "kernels.h"
#include "rmsnorm_rows.h"

namespace pydet {
namespace {

__device__ __forceinline__ float rstd_of(float sum, int64_t n, float eps) { return 1.0f / sqrtf(sum / float(n) + eps); }

template <Type type, int T, int V, bool residual>
__global__ void __launch_bounds__(kBlock<T>, 1) rmsnorm_kernel(const __grid_constant__ RmsNorm p) {
  using R = Ring<type, T, V, residual ? 2 : 1>;
  extern __shared__ __align__(16) char shared[];
  int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T;
  R ring = {shared + team * R::kTeamBytes};
  int64_t first = int64_t(blockIdx.x) * kTeams<T> + team, step = int64_t(gridDim.x) * kTeams<T>;
  auto fetch = [&](int i) {
    int64_t r = first + i * step;
    if (r < p.rows) {
      ring.fetch(i, 0, row_at(p.x, size_of(type), p.inner, r), p.n);
      if constexpr (residual) ring.fetch(i, 1, row_at(p.residual, size_of(type), p.inner, r), p.n);
    }
    commit_copies();
  };
  for (int i = 0; i < R::kDepth; ++i) fetch(i);
  int i = 0;
  for (int64_t r = first; r < p.rows; ++i, r += step) {
    wait_copies<R::kDepth - 1>();
    char *y_row = row_at(p.y, size_of(type), p.inner, r), *sum_row = row_at(p.sum, size_of(type), p.inner, r);
    Lanes<T, V> lanes;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float x[kVector];
      ring.read(i, 0, v, x);
      if constexpr (residual) {
        float added[kVector];
        ring.read(i, 1, v, added);
#pragma unroll
        for (int e = 0; e < kVector; ++e) x[e] += added[e];
        Packed<type> sum = pack<type>(x);
        ring.write(i, 0, v, sum);
        unpack(sum, x);
        store_vector<type>(sum_row, kVector * (t + T * v), p.n, true, x);
      }
      lanes.add(v, p.n - kVector * (t + T * v), x, x);
    }
    float rstd = rstd_of(lanes.join(ring.exchange(), i), p.n, p.eps);
    if (p.rstd.data && t == 0) reinterpret_cast<float *>(p.rstd.data)[r] = canonical(rstd);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      int64_t j = kVector * (t + T * v);
      float x[kVector], scale[kVector];
      ring.read(i, 0, v, x);
      load_scale(p.weight, p.weight_offset, j, p.n, true, scale);
#pragma unroll
      for (int e = 0; e < kVector; ++e) x[e] = x[e] * rstd * scale[e];
      store_vector<type>(y_row, j, p.n, true, x);
    }
    fetch(i + R::kDepth);
  }
}

template <Type type> __global__ void __launch_bounds__(kMaxTeam, 2) rmsnorm_long_kernel(const __grid_constant__ RmsNorm p) {
  constexpr int T = kMaxTeam;
  __shared__ float exchange[2 * T];
  int i = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x, ++i) {
    char *x_row = row_at(p.residual.data ? p.sum : p.x, size_of(type), p.inner, r), *y_row = row_at(p.y, size_of(type), p.inner, r);
    Lanes<T, 1> lanes;
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      float x[kVector];
      if (p.residual.data) {
        float residual[kVector];
        load_vector<type>(row_at(p.x, size_of(type), p.inner, r), j, p.n, false, x);
        load_vector<type>(row_at(p.residual, size_of(type), p.inner, r), j, p.n, false, residual);
#pragma unroll
        for (int e = 0; e < kVector; ++e) x[e] += residual[e];
        store_vector<type>(x_row, j, p.n, false, x);
      }
      load_vector<type>(x_row, j, p.n, false, x);
      lanes.add(0, p.n - j, x, x);
    }
    float rstd = rstd_of(lanes.join(exchange, i), p.n, p.eps);
    if (p.rstd.data && threadIdx.x == 0) reinterpret_cast<float *>(p.rstd.data)[r] = canonical(rstd);
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      float x[kVector], scale[kVector];
      load_vector<type>(x_row, j, p.n, false, x);
      load_scale(p.weight, p.weight_offset, j, p.n, false, scale);
#pragma unroll
      for (int e = 0; e < kVector; ++e) x[e] = x[e] * rstd * scale[e];
      store_vector<type>(y_row, j, p.n, false, x);
    }
  }
}

// Blocks enough to fill the device a few times over; each walks its rows with that stride. The bits do not know.
int64_t blocks_for(const RmsNorm &p, int teams) {
  constexpr int kBlocksPerMultiprocessor = 16;
  int64_t wanted = (p.rows + teams - 1) / teams, most = int64_t(kBlocksPerMultiprocessor) * gpu_multiprocessors(p.device.id);
  return wanted < most ? wanted : most;
}

}  // namespace

bool rmsnorm_held_takes(const RmsNorm &p) {
  return p.n <= kLongestHeldRow && rows_aligned(p.x) && rows_aligned(p.residual) && rows_aligned(p.y) && rows_aligned(p.sum) &&
         vector_aligned(p.weight);
}

pydet_status rmsnorm_held(const RmsNorm &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_held", guard.error());
  return with_type(p.x.type, [&](auto type) {
    return with_small_team(p.n, [&](auto shape) {
      constexpr int T = shape.T, V = shape.V;
      bool residual = p.residual.data;
      Launch where = {"rmsnorm_held", static_cast<gpu_stream>(p.stream), dim3(unsigned(blocks_for(p, kTeams<T>))), dim3(kBlock<T>),
                      kTeams<T> * (residual ? Ring<type, T, V, 2>::kTeamBytes : Ring<type, T, V, 1>::kTeamBytes)};
      return launch(where, residual ? rmsnorm_kernel<type, T, V, true> : rmsnorm_kernel<type, T, V, false>, p);
    });
  });
}

pydet_status rmsnorm_long(const RmsNorm &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_long", guard.error());
  return with_type(p.x.type, [&](auto type) {
    Launch where = {"rmsnorm_long", static_cast<gpu_stream>(p.stream), dim3(unsigned(blocks_for(p, 1))), dim3(kMaxTeam)};
    return launch(where, rmsnorm_long_kernel<type>, p);
  });
}

}  // namespace pydet
