// Gradients of RMSNorm for rows longer than 16384, or misaligned, by single elements: the CPU's bits. The formulas are
// those of rmsnorm_backward.cu. x and dy are passed twice for dx, a block a row, and once more for dweight, a block 64
// rows of 2048 columns, whose sums rmsnorm_dweight.cu joins.

#include "gpu/kernels.h"
#include "gpu/any/rmsnorm_partials.h"
#include "gpu/any/rmsnorm_rows.h"

namespace pydet {
namespace {

template <Type type>
__device__ __forceinline__ void load_xhat(const RmsNormBackward &p, int64_t r, int64_t j, float rstd,
                                          float (&xhat)[kVector], float (&dy)[kVector]) {
  load_elements<type>(row_at(p.x, size_of(type), p.inner, r), j, p.n, xhat);
  load_elements<type>(row_at(p.dy, size_of(type), p.inner, r), j, p.n, dy);
#pragma unroll
  for (int e = 0; e < kVector; ++e) xhat[e] *= rstd;
}

template <Type type>
__device__ __forceinline__ void load_xhat_and_g(const RmsNormBackward &p, int64_t r, int64_t j, float rstd,
                                                float (&xhat)[kVector], float (&g)[kVector]) {
  float scale[kVector];
  load_xhat<type>(p, r, j, rstd, xhat, g);
  load_scale(p.weight, p.weight_offset, j, p.n, scale);
#pragma unroll
  for (int e = 0; e < kVector; ++e) g[e] *= scale[e];
}

template <Type type>
__global__ void __launch_bounds__(kMaxTeam) rmsnorm_dx_long_kernel(const __grid_constant__ RmsNormBackward p) {
  __shared__ float exchange[2 * kMaxTeam];
  int i = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x, ++i) {
    float rstd = reinterpret_cast<const float *>(p.rstd.data)[r], xhat[kVector], g[kVector], c[1];
    Lanes<kMaxTeam, kVector, 1> lanes[1];
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      load_xhat_and_g<type>(p, r, j, rstd, xhat, g);
      lanes[0].add_left(p.n - j, g, xhat);
    }
    join(lanes, exchange + i % 2 * kMaxTeam, [&](float sum) { return sum / float(p.n); }, c);
    char *dx_row = row_at(p.dx, size_of(type), p.inner, r);
    const char *dresidual_row = p.dresidual.data ? row_at(p.dresidual, size_of(type), p.inner, r) : nullptr;
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      load_xhat_and_g<type>(p, r, j, rstd, xhat, g);
      float dx[kVector], dresidual[kVector] = {};
      if (dresidual_row) load_elements<type>(dresidual_row, j, p.n, dresidual);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        float t = fmaf(-xhat[e], c[0], g[e]);
        dx[e] = dresidual_row ? fmaf(rstd, t, dresidual[e]) : rstd * t;
      }
      store_elements<type>(dx_row, j, p.n, dx);
    }
  }
}

// One group of rows by 2048 columns a block.
template <Type type>
__global__ void __launch_bounds__(kMaxTeam) rmsnorm_dweight_long_kernel(const __grid_constant__ RmsNormBackward p) {
  int64_t slices = (p.n + kRowLanes - 1) / kRowLanes, groups = (p.rows + kDweightGroupRows - 1) / kDweightGroupRows;
  for (int64_t job = blockIdx.x; job < slices * groups; job += gridDim.x) {
    int64_t j = job % slices * kRowLanes + kVector * threadIdx.x, first = job / slices * kDweightGroupRows;
    float chain[kVector] = {}, group[kVector] = {}, *partials = static_cast<float *>(p.workspace) + job / slices * p.n;
    for (int64_t r = first; r < p.rows && r < first + kDweightGroupRows; ++r) {
      float xhat[kVector], dy[kVector];
      load_xhat<type>(p, r, j, reinterpret_cast<const float *>(p.rstd.data)[r], xhat, dy);
#pragma unroll
      for (int e = 0; e < kVector; ++e) chain[e] = fmaf(dy[e], xhat[e], chain[e]);
      if ((r + 1) % kDweightChainRows == 0 || r + 1 == p.rows)
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          group[e] += chain[e];
          chain[e] = 0.0f;
        }
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e)
      if (j + e < p.n) partials[j + e] = group[e];
  }
}

int64_t limited(int64_t blocks) {
  constexpr int64_t kMost = 1 << 20;  // more are walked in turns
  return blocks < kMost ? blocks : kMost;
}

}  // namespace

pydet_status rmsnorm_backward_long(const RmsNormBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_backward_long", guard.error());
  pydet_status status = ready_to_join(p);
  if (status != PYDET_OK) return status;
  gpu_stream stream = static_cast<gpu_stream>(p.stream);
  int64_t slices = (p.n + kRowLanes - 1) / kRowLanes, groups = (p.rows + kDweightGroupRows - 1) / kDweightGroupRows;
  status = with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    pydet_status ready = load("rmsnorm_dweight_long", rmsnorm_dweight_long_kernel<type>);
    if (ready != PYDET_OK) return ready;
    if (p.dx.data && p.rows > 0) {
      Launch where = {"rmsnorm_dx_long", stream, dim3(unsigned(limited(p.rows))), dim3(kMaxTeam)};
      pydet_status launched = launch(where, rmsnorm_dx_long_kernel<type>, p);
      if (launched != PYDET_OK) return launched;
    }
    if (!p.dweight.data || p.rows == 0) return pydet_status(PYDET_OK);
    Launch where = {"rmsnorm_dweight_long", stream, dim3(unsigned(limited(slices * groups))), dim3(kMaxTeam)};
    return launch(where, rmsnorm_dweight_long_kernel<type>, p);
  });
  return status == PYDET_OK ? join_partials(p, kGroupChains) : status;
}

}  // namespace pydet
