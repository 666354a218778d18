// Gradients of RMSNorm for many rows of up to 128, in fp32 (NUMERICS.md, "RMSNorm"): the CPU's bits. The formulas are
// those of rmsnorm_backward.cu, without dresidual.
//
// A team of 8 or 16 threads, 8 columns each, takes a chain of 16 rows, two of them at a time, all in registers: its
// share of the chain of dweight too. The next two are on their way meanwhile. Four teams beside each other are a group,
// whose sum is one row of partials in the workspace; rmsnorm_dweight.cu joins them.

#include "gpu/kernels.h"
#include "gpu/any/rmsnorm_partials.h"
#include "gpu/any/rmsnorm_rows.h"

namespace pydet {
namespace {

constexpr int kLongestNarrowRow = 128, kThreads = 128;
constexpr int R = 2;  // rows at a time: with four a multiprocessor holds fewer blocks

// R rows of the operands, as they lie in memory.
template <Type type> struct Held {
  Packed<type, kVector> x[R], dy[R];
  float rstd[R];

  // Rows row0 on of the chain that begins at row `first`; those from `count` on read nothing. Their x and dy are +0, and
  // with -0 for their rstd they add (+0)(-0) to a chain, which changes nothing.
  __device__ __forceinline__ void load(const RmsNormBackward &p, int64_t first, int row0, int count, int at,
                                       bool inside) {
    constexpr int kBytes = size_of(type);
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const bool there = row0 + k < count;
      const RowIndex row = there ? row_index(p.inner, first + row0 + k) : RowIndex{};
      rstd[k] = there ? reinterpret_cast<const float *>(p.rstd.data)[first + row0 + k] : -0.0f;
      x[k] = dy[k] = {};
      if (!there || !inside) continue;
      x[k] = load_packed<type, kVector>(row_at(p.x, kBytes, row) + at);
      dy[k] = load_packed<type, kVector>(row_at(p.dy, kBytes, row) + at);
    }
  }
};

// The compiler forgets what it made of a vector: else the numbers are kept, in twice the registers.
template <Type type, int W> __device__ __forceinline__ void forget(Packed<type, W> &packed) {
#pragma unroll
  for (uint32_t &word : packed.word) {
    int opaque = int(word);
    make_opaque(opaque);
    word = uint32_t(opaque);
  }
}

template <Type type, int T>
__global__ void __launch_bounds__(kThreads, 5)
    rmsnorm_backward_narrow_kernel(const __grid_constant__ RmsNormBackward p) {
  constexpr int W = kVector, kBytes = size_of(type), kTeams = kThreads / T, kColumns = T * W;
  constexpr int kGroups = kTeams / kGroupChains;
  static_assert(kTeams % kGroupChains == 0, "whole groups");
  __shared__ __align__(16) float sums[kTeams * kColumns];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T, n = int(p.n);
  const int64_t first = (int64_t(blockIdx.x) * kTeams + team) * kDweightChainRows, left = p.rows - first;
  const int count = left < kDweightChainRows ? int(left) : kDweightChainRows;  // not positive: no rows
  const int my_bytes = t * W * kBytes;
  const bool inside = W * t < n;
  Held<type> rows, next;
  rows.load(p, first, 0, count, my_bytes, inside);
  Scale<W> weight;
  float scale[W], chain[W] = {};
  if (inside) weight.load(p.weight, W * t);
  weight.unpack(p.weight, p.weight_offset, scale);
#pragma unroll 1
  for (int row0 = 0; row0 < kDweightChainRows; row0 += R) {
    next.load(p, first, row0 + R, count, my_bytes, inside);
    Lanes<T, W, 1> lanes[R];
#pragma unroll
    for (int k = 0; k < R; ++k) {
      float xhat[W], g[W];
      unpack(rows.x[k], xhat);
      unpack(rows.dy[k], g);
#pragma unroll
      for (int e = 0; e < W; ++e) {
        xhat[e] *= rows.rstd[k];
        chain[e] = fmaf(g[e], xhat[e], chain[e]);
        g[e] *= scale[e];
      }
      lanes[k].add(0, inside, g, xhat);
    }
    if (p.dx.data) {
      float c[R];
      join(lanes, nullptr, [&](float sum) { return sum / float(n); }, c);
#pragma unroll
      for (int k = 0; k < R; ++k) {
        forget(rows.x[k]);
        forget(rows.dy[k]);
        float xhat[W], dx[W];
        unpack(rows.x[k], xhat);
        unpack(rows.dy[k], dx);
#pragma unroll
        for (int e = 0; e < W; ++e) {
          xhat[e] *= rows.rstd[k];
          dx[e] = fmaf(-xhat[e], c[k], dx[e] * scale[e]);
        }
#pragma unroll
        for (int e = 0; e < W; ++e) dx[e] *= rows.rstd[k];
        if (inside && row0 + k < count)
          store_packed<type>(row_at(p.dx, kBytes, p.inner, first + row0 + k) + my_bytes, dx);
      }
    }
    rows = next;
  }
  if (!p.dweight.data) return;
#pragma unroll
  for (int e = 0; e < W; e += 4)
    *reinterpret_cast<float4 *>(sums + team * kColumns + t * W + e) =
        make_float4(chain[e], chain[e + 1], chain[e + 2], chain[e + 3]);
  __syncthreads();
  for (int i = int(threadIdx.x); i < kGroups * kColumns / 4; i += kThreads) {
    const int group = i / (kColumns / 4), column = i % (kColumns / 4) * 4;
    const int64_t partial = int64_t(blockIdx.x) * kGroups + group;
    if (column >= n || partial * kDweightGroupRows >= p.rows) continue;
    float4 sum = {};
#pragma unroll
    for (int k = 0; k < kGroupChains; ++k) {
      const float4 part = *reinterpret_cast<const float4 *>(sums + (group * kGroupChains + k) * kColumns + column);
      sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
    store_kept(static_cast<float *>(p.workspace) + partial * p.n + column, sum);
  }
}

}  // namespace

bool rmsnorm_backward_narrow_takes(const RmsNormBackward &p) {
  return p.n % kVector == 0 && p.n <= kLongestNarrowRow && rows_aligned(p.x) && rows_aligned(p.dy) &&
         rows_aligned(p.dx) && vector_aligned(p.weight) && p.rows <= most_blocks(kThreads);
}

// The chains of fewer rows do not fill the device.
bool rmsnorm_backward_narrow_prefers(const RmsNormBackward &p) { return p.rows >= 16384; }

pydet_status rmsnorm_backward_narrow(const RmsNormBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_backward_narrow", guard.error());
  pydet_status status = ready_to_join(p);
  if (status != PYDET_OK) return status;
  if (p.rows > 0) {
    status = with_type<kHalfTypes>(p.x.type, [&](auto type) {
      auto with_team = [&](auto T) {
        Launch where = {"rmsnorm_backward_narrow", static_cast<gpu_stream>(p.stream),
                        dim3(unsigned(divide_up(p.rows, kThreads / T * kDweightChainRows))), dim3(kThreads)};
        where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
        return launch(where, rmsnorm_backward_narrow_kernel<type, T>, p);
      };
      return p.n <= 64 ? with_team(std::integral_constant<int, 8>{}) : with_team(std::integral_constant<int, 16>{});
    });
    if (status != PYDET_OK) return status;
  }
  return join_partials(p, kGroupChains);
}

}  // namespace pydet
