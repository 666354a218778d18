// Gradients of RMSNorm, in fp32 (NUMERICS.md, "RMSNorm"): the CPU's bits.
//
//   xhat = x rstd,   g = dy (w + weight_offset),   c = rowsum(g, xhat) / n
//   dx   = round(rstd fmaf(-xhat, c, g)), or round(fmaf(rstd, fmaf(-xhat, c, g), dresidual))
//   dweight: p = fmaf(dy, xhat, p) from +0 down a chain of 16 rows; 4 chains added from +0 are a group, 4 groups a block
//            of 256 rows; the blocks added in order, from +0 or from dweight, and rounded once
//
// One pass over x and dy. A block takes one chain or one group of rows, its dweight in registers, and leaves that as one
// row of partials in the workspace; a second, dependent kernel joins the partials in the order above. Which of the two a
// block takes is the balance between partials to move and blocks to fill the device with, and no bit depends on it. Rows
// longer than 16384, or misaligned, are passed twice for dx and once more for dweight.

#include "kernels.h"
#include "rmsnorm_rows.h"

namespace pydet {
namespace {

constexpr int kGroupChains = kDweightGroupRows / kDweightChainRows;
constexpr int kBlockGroups = kDweightBlockRows / kDweightGroupRows;

// A row of dresidual; NULL without one.
__device__ __forceinline__ const char *dresidual_at(const RmsNormBackward &p, int element_bytes, int64_t r) {
  return p.dresidual.data ? row_at(p.dresidual, element_bytes, p.inner, r) : nullptr;
}

// One row's gradient to x, for eight elements whose xhat and g are known.
template <Type type>
__device__ __forceinline__ void store_dx(char *dx_row, const char *dresidual_row, int64_t j, int64_t n, bool aligned, float rstd,
                                         float c, const float (&xhat)[kVector], const float (&g)[kVector]) {
  float dx[kVector];
#pragma unroll
  for (int e = 0; e < kVector; ++e) dx[e] = fmaf(-xhat[e], c, g[e]);
  if (dresidual_row) {
    float dresidual[kVector];
    load_vector<type>(dresidual_row, j, n, aligned, dresidual);
#pragma unroll
    for (int e = 0; e < kVector; ++e) dx[e] = fmaf(rstd, dx[e], dresidual[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kVector; ++e) dx[e] *= rstd;
  }
  store_vector<type>(dx_row, j, n, aligned, dx);
}

__device__ __forceinline__ void store_partial(float *partials, int64_t n, int64_t j, const float (&sum)[kVector]) {
#pragma unroll
  for (int e = 0; e < kVector; ++e)
    if (j + e < n) partials[j + e] = sum[e];
}

// ---- Rows that a team holds --------------------------------------------------------------------------------------

// Chains per block: 1 or kGroupChains. Teams of a warp take a chain each, side by side; a larger team takes its block's
// chains one after the other.
template <Type type, int T, int V>
__global__ void __launch_bounds__(kBlock<T>, 1) rmsnorm_backward_kernel(const __grid_constant__ RmsNormBackward p, int chains) {
  using R = Ring<type, T, V, 2>;
  extern __shared__ __align__(16) char shared[];
  int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T;
  R ring = {shared + team * R::kTeamBytes};
  const float *rstds = reinterpret_cast<const float *>(p.rstd.data);
  const bool beside = kTeams<T> > 1;  // teams side by side
  int64_t chain0 = beside ? int64_t(blockIdx.x) * kTeams<T> + team : int64_t(blockIdx.x) * chains;
  int64_t first = chain0 * kDweightChainRows, last = first + (beside ? 1 : chains) * kDweightChainRows;
  if (last > p.rows) last = p.rows;

  auto fetch = [&](int i) {
    if (first + i < last) {
      ring.fetch(i, 0, row_at(p.x, size_of(type), p.inner, first + i), p.n);
      ring.fetch(i, 1, row_at(p.dy, size_of(type), p.inner, first + i), p.n);
    }
    commit_copies();
  };
  for (int i = 0; i < R::kDepth; ++i) fetch(i);

  constexpr bool kKeepsScale = V <= 2;  // in registers, else read again from the cache
  float kept[kKeepsScale ? V : 1][kVector];
  auto scale_of = [&](int v, float(&scale)[kVector]) {
    load_scale(p.weight, p.weight_offset, kVector * (t + T * v), p.n, true, scale);
  };
  if constexpr (kKeepsScale)
#pragma unroll
    for (int v = 0; v < V; ++v) scale_of(v, kept[v]);

  float chain[V][kVector] = {}, group[V][kVector] = {};
  float rstd = first < last ? rstds[first] : 0.0f;
  int i = 0;
  for (int64_t r = first; r < last; ++r, ++i) {
    wait_copies<R::kDepth - 1>();
    float next_rstd = r + 1 < last ? rstds[r + 1] : 0.0f;
    Lanes<T, V> lanes;
    auto xhat_and_g = [&](int v, float(&xhat)[kVector], float(&g)[kVector], auto with_dy) {
      float dy[kVector], scale[kVector];
      ring.read(i, 0, v, xhat);
      ring.read(i, 1, v, dy);
      if constexpr (!kKeepsScale) scale_of(v, scale);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        xhat[e] *= rstd;
        g[e] = dy[e] * (kKeepsScale ? kept[kKeepsScale ? v : 0][e] : scale[e]);
      }
      with_dy(dy);
    };
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float xhat[kVector], g[kVector];
      xhat_and_g(v, xhat, g, [&](const float(&dy)[kVector]) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) chain[v][e] = fmaf(dy[e], xhat[e], chain[v][e]);
      });
      lanes.add(v, p.n - kVector * (t + T * v), g, xhat);
    }
    if (p.dx.data) {
      float c = lanes.join(ring.exchange(), i) / float(p.n);
      char *dx_row = row_at(p.dx, size_of(type), p.inner, r);
      const char *dresidual_row = dresidual_at(p, size_of(type), r);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float xhat[kVector], g[kVector];
        xhat_and_g(v, xhat, g, [](const float(&)[kVector]) {});
        store_dx<type>(dx_row, dresidual_row, kVector * (t + T * v), p.n, true, rstd, c, xhat, g);
      }
    }
    fetch(i + R::kDepth);
    rstd = next_rstd;
    if (!beside && ((r + 1) % kDweightChainRows == 0 || r + 1 == last))
#pragma unroll
      for (int v = 0; v < V; ++v)
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          group[v][e] += chain[v][e];
          chain[v][e] = 0.0f;
        }
  }
  if (!p.dweight.data) return;

  float *partials = static_cast<float *>(p.workspace);
  if (!beside) {
#pragma unroll
    for (int v = 0; v < V; ++v) store_partial(partials + blockIdx.x * p.n, p.n, kVector * (t + T * v), group[v]);
  } else if (chains == 1) {
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (first < last) store_partial(partials + chain0 * p.n, p.n, kVector * (t + T * v), chain[v]);
  } else {  // the teams' chains, added in order, through the shared memory that the rings no longer need
    constexpr int kRow = T * V * kVector;
    static_assert(kTeams<T> * kRow * int(sizeof(float)) <= kTeams<T> * R::kTeamBytes || kTeams<T> == 1, "the chains fit");
    float *exchange = reinterpret_cast<float *>(shared);
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int e = 0; e < kVector; ++e) exchange[team * kRow + (v * kVector + e) * T + t] = chain[v][e];
    __syncthreads();
    for (int i = int(threadIdx.x); i < kRow; i += kBlock<T>) {
      int64_t column = (i / (T * kVector) * T + i % T) * kVector + i / T % kVector;
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < kTeams<T>; ++k) sum += exchange[k * kRow + i];
      if (column < p.n) partials[blockIdx.x * p.n + column] = sum;
    }
  }
}

// ---- Rows too long to hold, or misaligned ------------------------------------------------------------------------

template <Type type>
__device__ __forceinline__ void load_xhat(const RmsNormBackward &p, int64_t r, int64_t j, float rstd, float (&xhat)[kVector], float (&dy)[kVector]) {
  load_vector<type>(row_at(p.x, size_of(type), p.inner, r), j, p.n, false, xhat);
  load_vector<type>(row_at(p.dy, size_of(type), p.inner, r), j, p.n, false, dy);
#pragma unroll
  for (int e = 0; e < kVector; ++e) xhat[e] *= rstd;
}

template <Type type>
__device__ __forceinline__ void load_xhat_and_g(const RmsNormBackward &p, int64_t r, int64_t j, float rstd, float (&xhat)[kVector], float (&g)[kVector]) {
  float scale[kVector];
  load_xhat<type>(p, r, j, rstd, xhat, g);
  load_scale(p.weight, p.weight_offset, j, p.n, false, scale);
#pragma unroll
  for (int e = 0; e < kVector; ++e) g[e] *= scale[e];
}

template <Type type> __global__ void __launch_bounds__(kMaxTeam) rmsnorm_dx_long_kernel(const __grid_constant__ RmsNormBackward p) {
  __shared__ float exchange[2 * kMaxTeam];
  int i = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x, ++i) {
    float rstd = reinterpret_cast<const float *>(p.rstd.data)[r], xhat[kVector], g[kVector];
    Lanes<kMaxTeam, 1> lanes;
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      load_xhat_and_g<type>(p, r, j, rstd, xhat, g);
      lanes.add(0, p.n - j, g, xhat);
    }
    float c = lanes.join(exchange, i) / float(p.n);
    char *dx_row = row_at(p.dx, size_of(type), p.inner, r);
    const char *dresidual_row = dresidual_at(p, size_of(type), r);
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      load_xhat_and_g<type>(p, r, j, rstd, xhat, g);
      store_dx<type>(dx_row, dresidual_row, j, p.n, false, rstd, c, xhat, g);
    }
  }
}

// One group of rows by 2048 columns a block.
template <Type type> __global__ void __launch_bounds__(kMaxTeam) rmsnorm_dweight_long_kernel(const __grid_constant__ RmsNormBackward p) {
  int64_t slices = (p.n + kRowLanes - 1) / kRowLanes, groups = (p.rows + kDweightGroupRows - 1) / kDweightGroupRows;
  for (int64_t job = blockIdx.x; job < slices * groups; job += gridDim.x) {
    int64_t j = job % slices * kRowLanes + kVector * threadIdx.x, first = job / slices * kDweightGroupRows;
    float chain[kVector] = {}, group[kVector] = {};
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
    store_partial(static_cast<float *>(p.workspace) + job / slices * p.n, p.n, j, group);
  }
}

// ---- The partials, joined ----------------------------------------------------------------------------------------

constexpr int kJoinColumns = 32, kJoinWarps = 16, kJoinBlocks = 256;  // blocks of rows joined at a time

// Warps take blocks of rows, lanes columns; then one warp adds the blocks in order.
__global__ void __launch_bounds__(kJoinColumns * kJoinWarps) rmsnorm_dweight_kernel(const __grid_constant__ RmsNormBackward p, int chains) {
  __shared__ float blocks[kJoinBlocks][kJoinColumns];
  wait_for_previous_kernel();
  int lane = int(threadIdx.x) % kJoinColumns, warp = int(threadIdx.x) / kJoinColumns;
  int64_t column = int64_t(blockIdx.x) * kJoinColumns + lane;
  int64_t group_count = (p.rows + kDweightGroupRows - 1) / kDweightGroupRows, block_count = (group_count + kBlockGroups - 1) / kBlockGroups;
  int64_t partial_count = (p.rows + chains * kDweightChainRows - 1) / (chains * kDweightChainRows);
  const float *partials = static_cast<const float *>(p.workspace);
  bool inside = column < p.n;
  auto group_sum = [&](int64_t group) {
    if (chains == kGroupChains) return group < partial_count ? partials[group * p.n + column] : 0.0f;
    float part[kGroupChains], sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kGroupChains; ++k) {
      int64_t i = group * kGroupChains + k;
      part[k] = i < partial_count ? partials[i * p.n + column] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kGroupChains; ++k) sum += part[k];
    return sum;
  };
  float total = inside && p.accumulate && warp == 0 ? reinterpret_cast<const float *>(p.dweight.data)[column] : 0.0f;
  for (int64_t b0 = 0; b0 < block_count; b0 += kJoinBlocks) {
    int count = block_count - b0 < kJoinBlocks ? int(block_count - b0) : kJoinBlocks;
    for (int b = warp; inside && b < count; b += kJoinWarps) {
      float part[kBlockGroups], sum = 0.0f;
#pragma unroll
      for (int k = 0; k < kBlockGroups; ++k) part[k] = group_sum((b0 + b) * kBlockGroups + k);
#pragma unroll
      for (int k = 0; k < kBlockGroups; ++k) sum += part[k];
      blocks[b][lane] = sum;
    }
    __syncthreads();
    if (warp == 0) {
#pragma unroll 8
      for (int b = 0; b < count; ++b) total += blocks[b][lane];
    }
    __syncthreads();
  }
  if (inside && warp == 0) store_rounded(p.dweight.data, p.dweight.type, column, total);
}

// ---- Launch ------------------------------------------------------------------------------------------------------

pydet_status join_partials(const RmsNormBackward &p, int chains) {
  if (!p.dweight.data) return PYDET_OK;
  Launch where = {"rmsnorm_dweight", static_cast<gpu_stream>(p.stream), dim3(unsigned((p.n + kJoinColumns - 1) / kJoinColumns)),
                  dim3(kJoinColumns * kJoinWarps)};
  where.overlaps_previous = p.rows > 0 && gpu_overlaps_kernels(p.device.id);
  return launch(where, rmsnorm_dweight_kernel, p, chains);
}

pydet_status backward_held(const RmsNormBackward &p, int chains) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_backward_held", guard.error());
  if (p.rows > 0) {
    pydet_status status = with_type(p.x.type, [&](auto type) {
      return with_large_team(p.n, [&](auto shape) {
        constexpr int T = shape.T, V = shape.V;
        using R = Ring<type, T, V, 2>;
        int64_t block_rows = (kTeams<T> > 1 ? kTeams<T> : chains) * kDweightChainRows;
        Launch where = {"rmsnorm_backward_held", static_cast<gpu_stream>(p.stream), dim3(unsigned((p.rows + block_rows - 1) / block_rows)),
                        dim3(kBlock<T>), kTeams<T> * R::kTeamBytes};
        return launch(where, rmsnorm_backward_kernel<type, T, V>, p, chains);
      });
    });
    if (status != PYDET_OK) return status;
  }
  return join_partials(p, chains);
}

int64_t limited(int64_t blocks) {
  constexpr int64_t kMost = 1 << 20;  // more are walked in turns
  return blocks < kMost ? blocks : kMost;
}

}  // namespace

bool rmsnorm_backward_held_takes(const RmsNormBackward &p) {
  return p.n <= kLongestHeldRow && rows_aligned(p.x) && rows_aligned(p.dy) && rows_aligned(p.dx) && rows_aligned(p.dresidual) &&
         vector_aligned(p.weight);
}

// A chain a block fills the device better; its partials cost nothing while they stay in the L2.
bool rmsnorm_backward_chain_prefers(const RmsNormBackward &p) {
  constexpr int64_t kCachedBytes = 16 << 20;
  return p.rows / kDweightChainRows * p.n * int64_t(sizeof(float)) <= kCachedBytes;
}

pydet_status rmsnorm_backward_chain(const RmsNormBackward &p) { return backward_held(p, 1); }
pydet_status rmsnorm_backward_group(const RmsNormBackward &p) { return backward_held(p, kGroupChains); }

pydet_status rmsnorm_backward_long(const RmsNormBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_backward_long", guard.error());
  gpu_stream stream = static_cast<gpu_stream>(p.stream);
  int64_t slices = (p.n + kRowLanes - 1) / kRowLanes, groups = (p.rows + kDweightGroupRows - 1) / kDweightGroupRows;
  pydet_status status = with_type(p.x.type, [&](auto type) {
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
