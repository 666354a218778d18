// RMSNorm and the gradients of norms for rows of up to 8192 that are not whole pieces of 16 bytes, odd in length or in
// place: the CPU's bits. The formulas are those of rmsnorm.cu, rmsnorm_backward.cu and layernorm_backward.cu.
//
// A team holds a row in registers, which it reads and writes element by element. dweight and dbias need no sum along a
// row, as mean and rstd are given: blocks of the same launch go down columns, a thread one column of a chain of 16 rows,
// and leave the chains' sums in the workspace, which rmsnorm_dweight.cu joins.

#include <type_traits>

#include "gpu/kernels.h"
#include "gpu/any/rmsnorm_partials.h"
#include "gpu/any/rmsnorm_rows.h"

namespace pydet {
namespace {

constexpr int kThreads = 256;
// Blocks a multiprocessor is to hold, 0: as the compiler likes. Where it likes more than registers allow, it spills.
#if defined(__CUDA_ARCH__)
constexpr int kBlocks = __CUDA_ARCH__ < 900 ? 2 : 0;
#else
constexpr int kBlocks = 0;
#endif

__device__ __forceinline__ float rstd_of(float sum, int64_t n, float eps) { return 1.0f / sqrtf(sum / float(n) + eps); }

// The `left` elements of a vector that are the row's; the others are +0.
template <Type type>
__device__ __forceinline__ Packed<type, kVector> load_elements_of(const char *at, int left) {
  Packed<type, kVector> packed = {};
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    if (e >= left) continue;
    if constexpr (type == Type::f32) packed.word[e] = reinterpret_cast<const uint32_t *>(at)[e];
    else packed.word[e / 2] |= uint32_t(reinterpret_cast<const uint16_t *>(at)[e]) << e % 2 * 16;
  }
  return packed;
}
template <Type type>
__device__ __forceinline__ void store_elements_of(char *at, int left, const Packed<type, kVector> &packed) {
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    if (e >= left) continue;
    if constexpr (type == Type::f32) reinterpret_cast<uint32_t *>(at)[e] = packed.word[e];
    else reinterpret_cast<uint16_t *>(at)[e] = uint16_t(packed.word[e / 2] >> e % 2 * 16);
  }
}

// Where vector v of thread t of a row is, and how many of its elements are the row's (not positive: none).
template <int T> struct Place {
  int t, n;
  __device__ __forceinline__ int column(int v) const { return kVector * (t + T * v); }
  __device__ __forceinline__ int left(int v) const { return n - column(v); }
};

// Adds x y, vector v, of which `left` elements are the row's: the others must not reach their lanes.
template <int T, int V>
__device__ __forceinline__ void add_left_of(Lanes<T, kVector, V> &lanes, int v, int left, const float (&x)[kVector],
                                            const float (&y)[kVector]) {
  float(&s)[kVector] = lanes.lane[v % Lanes<T, kVector, V>::kSlots];
#pragma unroll
  for (int e = 0; e < kVector; ++e) s[e] = e < left ? fmaf(x[e], y[e], s[e]) : s[e];
}

template <Type type, int T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks) rmsnorm_unaligned_kernel(const __grid_constant__ RmsNorm p) {
  constexpr int kBytes = size_of(type), kTeams = kThreads / T;
  __shared__ float exchange[kTeams * kExchange<T, 1> + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T;
  const Place<T> place = {int(threadIdx.x) % T, int(p.n)};
  const int64_t r = block_number() * kTeams + team, last = p.rows - 1;
  const bool there = r <= last;
  const RowIndex where = row_index(p.inner, there ? r : last);
  auto at = [&](const Rows &rows, int v) { return row_at(rows, kBytes, where) + place.column(v) * kBytes; };
  Packed<type, kVector> x[V];
#pragma unroll
  for (int v = 0; v < V; ++v) x[v] = load_elements_of<type>(at(p.x, v), place.left(v));
  if (p.residual.data)
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float one[kVector], other[kVector];
      unpack(x[v], one);
      unpack(load_elements_of<type>(at(p.residual, v), place.left(v)), other);
#pragma unroll
      for (int e = 0; e < kVector; ++e) one[e] += other[e];
      x[v] = pack<type>(one);
      if (there) store_elements_of<type>(at(p.sum, v), place.left(v), x[v]);
    }
  Lanes<T, kVector, V> lanes[1];
  float rstd[1];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float one[kVector];
    unpack(x[v], one);
    lanes[0].add(v, true, one, one);  // past the row's end +0: no lane is ever -0 here
  }
  join(lanes, exchange + team * kExchange<T, 1>, [&](float sum) { return rstd_of(sum, p.n, p.eps); }, rstd);
  if (!there) return;
  if (p.rstd.data && place.t == 0) reinterpret_cast<float *>(p.rstd.data)[r] = canonical(rstd[0]);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float y[kVector], scale[kVector];
    unpack(x[v], y);
    load_scale(p.weight, p.weight_offset, place.column(v), p.n, scale);
#pragma unroll
    for (int e = 0; e < kVector; ++e) y[e] = y[e] * rstd[0] * scale[e];
    store_elements_of<type>(at(p.y, v), place.left(v), pack<type>(y));
  }
}

// ---- Gradients ---------------------------------------------------------------------------------------------------

template <class P> constexpr bool kCentred = std::is_same_v<P, LayerNormBackward>;
template <class P> constexpr int kSums = kCentred<P> ? 2 : 1;  // over rows: dweight, dbias; along a row: c, a

__device__ __forceinline__ float of_row(const Vector &values, int64_t r) {
  return reinterpret_cast<const float *>(values.data)[r];
}

// One column of one chain a thread.
template <class P, Type type> __device__ __forceinline__ void go_down(const P &p, int64_t job) {
  constexpr int kBytes = size_of(type);
  const int64_t chain_number = job / p.n, column = job - chain_number * p.n, first = chain_number * kDweightChainRows;
  if (first >= p.rows) return;
  const int64_t last = p.rows - 1;
  float x[kDweightChainRows], dy[kDweightChainRows], chain[2] = {};
#pragma unroll
  for (int i = 0; i < kDweightChainRows; ++i) {
    const RowIndex row = row_index(p.inner, first + i <= last ? first + i : last);
    x[i] = load_f32(row_at(p.x, kBytes, row), type, column);
    dy[i] = load_f32(row_at(p.dy, kBytes, row), type, column);
  }
#pragma unroll
  for (int i = 0; i < kDweightChainRows; ++i) {
    if (first + i > last) continue;
    float d = x[i];
    if constexpr (kCentred<P>) d -= of_row(p.mean, first + i);
    chain[0] = fmaf(dy[i], d * of_row(p.rstd, first + i), chain[0]);
    chain[1] = dy[i] + chain[1];
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
template <class P, Type type, int T, int V>
__global__ void __launch_bounds__(kThreads)
    norm_backward_unaligned_kernel(const __grid_constant__ P p, int64_t column_blocks) {
  constexpr int kBytes = size_of(type), kTeams = kThreads / T;
  __shared__ __align__(16) float exchange[kTeams * kExchange<T, kSums<P>> + 4];
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (block_number() < column_blocks) return go_down<P, type>(p, block_number() * kThreads + threadIdx.x);
  const int team = int(threadIdx.x) / T;
  const Place<T> place = {int(threadIdx.x) % T, int(p.n)};
  const int64_t r = (block_number() - column_blocks) * kTeams + team, last = p.rows - 1;
  const RowIndex where = row_index(p.inner, r <= last ? r : last);
  const float rstd = of_row(p.rstd, r <= last ? r : last);
  float mean = 0.0f;
  if constexpr (kCentred<P>) mean = of_row(p.mean, r <= last ? r : last);
  auto at = [&](const Rows &rows, int v) { return row_at(rows, kBytes, where) + place.column(v) * kBytes; };
  Packed<type, kVector> x[V], dy[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    x[v] = load_elements_of<type>(at(p.x, v), place.left(v));
    dy[v] = load_elements_of<type>(at(p.dy, v), place.left(v));
  }
  auto load_xhat_and_g = [&](int v, float(&xhat)[kVector], float(&g)[kVector]) {
    float scale[kVector];
    load_scale(p.weight, p.weight_offset, place.column(v), p.n, scale);
    unpack(x[v], xhat);
    unpack(dy[v], g);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      xhat[e] = (kCentred<P> ? xhat[e] - mean : xhat[e]) * rstd;
      g[e] *= scale[e];
    }
  };
  Lanes<T, kVector, V> lanes[kSums<P>];
  float ones[kVector], sums[kSums<P>];
#pragma unroll
  for (int e = 0; e < kVector; ++e) ones[e] = 1.0f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float xhat[kVector], g[kVector];
    load_xhat_and_g(v, xhat, g);
    add_left_of(lanes[0], v, place.left(v), g, xhat);
    if constexpr (kCentred<P>) add_left_of(lanes[1], v, place.left(v), g, ones);
  }
  join(lanes, exchange + team * kExchange<T, kSums<P>>, [&](float sum) { return sum / float(p.n); }, sums);
  if (r > last) return;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float xhat[kVector], g[kVector], dresidual[kVector] = {};
    load_xhat_and_g(v, xhat, g);
    if (p.dresidual.data) unpack(load_elements_of<type>(at(p.dresidual, v), place.left(v)), dresidual);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      float d = fmaf(-xhat[e], sums[0], g[e]);
      if constexpr (kCentred<P>) d -= sums[1];
      g[e] = p.dresidual.data ? fmaf(rstd, d, dresidual[e]) : rstd * d;
    }
    store_elements_of<type>(at(p.dx, v), place.left(v), pack<type>(g));
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

// Calls f with a team that holds a row of n.
template <class F> pydet_status with_shape(int64_t n, const F &f) {
  if (n <= 16 * 8) return f(RowShape<16, 8, 1, 1>{});
  if (n <= 64 * 8) return f(RowShape<64, 8, 1, 1>{});
  if (n <= 256 * 8) return f(RowShape<256, 8, 1, 1>{});
  if (n <= 256 * 16) return f(RowShape<256, 8, 2, 1>{});
  return f(RowShape<256, 8, 4, 1>{});
}

bool holds(int64_t rows, int64_t n) {
  constexpr int64_t kLongest = 8192, kMostElements = int64_t(1) << 40;  // of all rows: their blocks are one grid
  return n <= kLongest && rows <= most_blocks(kThreads) / 2 && rows * n <= kMostElements;
}

// `sums`: those over rows, as rmsnorm_dweight.cu joins them, if any are wanted.
template <class P>
pydet_status backward_unaligned(const char *name, const P &p, const RmsNormBackward &sums, bool wanted) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  pydet_status status = ready_to_join(sums);
  if (status != PYDET_OK) return status;
  const int64_t column_blocks = wanted ? divide_up(divide_up(p.rows, kDweightChainRows) * p.n, kThreads) : 0;
  if (p.rows > 0 && (wanted || p.dx.data)) {
    status = with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
      return with_shape(p.n, [&](auto shape) {
        const int64_t row_blocks = p.dx.data ? divide_up(p.rows, kThreads / shape.T) : 0;
        Launch where = {name, static_cast<gpu_stream>(p.stream), grid_of(column_blocks + row_blocks, kThreads),
                        dim3(kThreads)};
        where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
        return launch(where, norm_backward_unaligned_kernel<P, type, shape.T, shape.V>, p, column_blocks);
      });
    });
    if (status != PYDET_OK) return status;
  }
  return join_partials(sums, 1);
}

}  // namespace

bool rmsnorm_unaligned_takes(const RmsNorm &p) { return holds(p.rows, p.n); }

pydet_status rmsnorm_unaligned(const RmsNorm &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_unaligned", guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return with_shape(p.n, [&](auto shape) {
      Launch where = {"rmsnorm_unaligned", static_cast<gpu_stream>(p.stream),
                      grid_of(divide_up(p.rows, kThreads / shape.T), kThreads), dim3(kThreads)};
      where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
      return launch(where, rmsnorm_unaligned_kernel<type, shape.T, shape.V>, p);
    });
  });
}

bool rmsnorm_backward_unaligned_takes(const RmsNormBackward &p) { return holds(p.rows, p.n); }
pydet_status rmsnorm_backward_unaligned(const RmsNormBackward &p) {
  return backward_unaligned("rmsnorm_backward_unaligned", p, p, p.dweight.data);
}

bool layernorm_backward_unaligned_takes(const LayerNormBackward &p) { return holds(p.rows, p.n); }
// Of rows that are no whole pieces of 16 bytes, more than a chain of them, not long, and few elements, as they are
// read twice. Measured on an H100, us, beside layernorm_backward_rows and _apart: 868x174 6.2, 25 and 23, 3319x434 15,
// 24 and 75, 1364x2603 38, 49 and 43; but 153670x163 344, 192 and 5176, 450x3233 21, 43 and 17.
bool layernorm_backward_unaligned_prefers(const LayerNormBackward &p) {
  const bool whole =
      p.n % kVector == 0 && rows_aligned(p.dy) && rows_aligned(p.x) && rows_aligned(p.dresidual) && rows_aligned(p.dx);
  return !whole && p.rows > 16 && p.n < 3072 && p.rows * p.n <= (p.n + kVector - 1 <= 32 * 8 ? 4'000'000 : 4'500'000);
}
pydet_status layernorm_backward_unaligned(const LayerNormBackward &p) {
  return backward_unaligned("layernorm_backward_unaligned", p, sums_over_rows(p), p.dweight.data || p.dbias.data);
}

}  // namespace pydet
