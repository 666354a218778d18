// RMSNorm and LayerNorm of rows that are not whole pieces of 16 bytes, odd in length or in place, in fp32 (NUMERICS.md,
// "RMSNorm", "LayerNorm"): the CPU's bits. The formulas are those of rmsnorm.cu and layernorm.cu.
//
// A team holds a row in registers, by the vectors of memory that it lies in (norm_pieces.h): all operands' rows are to
// be as far behind a whole vector as x's. From each vector and the one behind it, which its neighbour reads too, a
// thread makes what it adds to its lanes; y is made of its vector as it lies.

#include <type_traits>

#include "gpu/kernels.h"
#include "gpu/any/norm_pieces.h"

namespace pydet {
namespace {

template <int T> constexpr int kBlock = T < 128 ? 128 : T;  // several small teams share one
// Blocks a multiprocessor is to hold, 0: as the compiler likes, which of long rows are more than registers allow.
template <class P, Type type, int T, int V> constexpr int kBlocks =
    V < 2 ? 0
          : (type == Type::f32 || (V == 8 && std::is_same_v<P, LayerNorm>) ? 256
             : V == 2 && T >= 128                                          ? 768
                                                                           : 512) /
                kBlock<T>;

__device__ __forceinline__ float rstd_of(float sum, int64_t n, float eps) { return 1.0f / sqrtf(sum / float(n) + eps); }

__device__ __forceinline__ void store_of_row(const Vector &values, int64_t r, float value) {
  if (values.data) reinterpret_cast<float *>(values.data)[r] = canonical(value);
}

template <class P, Type type, int T, int V>
__global__ void __launch_bounds__(kBlock<T>, kBlocks<P, type, T, V>) norm_shifted_kernel(const __grid_constant__ P p) {
  constexpr bool centred = std::is_same_v<P, LayerNorm>;
  constexpr int W = kVector, kTeams = kBlock<T> / T, kRoom = kTeams * kExchange<T, 1> + 1;
  __shared__ float of_squares[kRoom];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T, n = int(p.n);
  const int64_t r = block_number() * kTeams + team, last = p.rows - 1;
  const bool there = r <= last;
  const RowIndex where = row_index(p.inner, there ? r : last);
  const char *const x_row = row_at(p.x, size_of(type), where);
  const int shift = shift_of<type, W>(x_row);
  const bool before = there && r > 0, behind = r < last;
  auto first_of = [&](int v) { return W * (t + T * v) - shift; };

  Packed<type, W> own[V], of_lanes[centred ? V : 1];
  Lanes<T, W, V> lanes[1], squares[1];
  float ones[W], mean[1] = {}, rstd[1];
#pragma unroll
  for (int e = 0; e < W; ++e) ones[e] = 1.0f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    own[v] = load_piece<type, W>(x_row, first_of(v), n, before, behind);
    Packed<type, W> next = load_piece<type, W>(x_row, first_of(v) + W, n, before, behind);
    if (p.residual.data) {
      const char *residual_row = row_at(p.residual, size_of(type), where);
      auto add_residual = [&](Packed<type, W> &packed, int first) {
        float one[W], other[W];
        unpack(packed, one);
        unpack(load_piece<type, W>(residual_row, first, n, before, behind), other);
#pragma unroll
        for (int e = 0; e < W; ++e) one[e] += other[e];
        packed = pack<type>(one);
      };
      add_residual(own[v], first_of(v));
      add_residual(next, first_of(v) + W);
      if (there) store_piece<type, W>(row_at(p.sum, size_of(type), where), first_of(v), n, own[v]);
    }
    const Packed<type, W> columns = window<type, W>(own[v], next, shift);
    float x[W];
    unpack(columns, x);
    if constexpr (centred) {
      of_lanes[v] = columns;
      add_left_of(lanes[0], v, n - W * (t + T * v), x, ones);
    } else {
      add_left_of(squares[0], v, n - W * (t + T * v), x, x);
    }
  }
  if constexpr (centred) {
    __shared__ float of_mean[kRoom];
    join(lanes, of_mean + team * kExchange<T, 1>, [&](float sum) { return sum / float(p.n); }, mean);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float d[W];
      unpack(of_lanes[v], d);
#pragma unroll
      for (int e = 0; e < W; ++e) d[e] -= mean[0];
      add_left_of(squares[0], v, n - W * (t + T * v), d, d);
    }
  }
  join(squares, of_squares + team * kExchange<T, 1>, [&](float sum) { return rstd_of(sum, p.n, p.eps); }, rstd);
  if (!there) return;
  if (t == 0) {
    if constexpr (centred) store_of_row(p.mean, r, mean[0]);
    store_of_row(p.rstd, r, rstd[0]);
  }

  constexpr float kNothing = -0.0f;  // which changes no number that it is added to
  char *const y_row = row_at(p.y, size_of(type), where);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (first_of(v) >= n) continue;
    float y[W], scale[W], bias[W];
    unpack(own[v], y);
    load_scales_of(p.weight, p.weight_offset, 1.0f, first_of(v), n, scale);
    if constexpr (centred) load_scales_of(p.bias, kNothing, 0.0f, first_of(v), n, bias);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      if constexpr (centred) {
        const float xhat = (y[e] - mean[0]) * rstd[0];
        y[e] = p.bias.data ? fmaf(xhat, scale[e], bias[e]) : xhat * scale[e];
      } else {
        y[e] = y[e] * rstd[0] * scale[e];
      }
    }
    store_piece<type, W>(y_row, first_of(v), n, pack<type>(y));
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int64_t kLongest = 8 * kRowLanes - (kVector - 1);  // a row may lie in one vector more than it fills

// Calls f with a team that holds the vectors of memory in which a row of n may lie.
template <class F> pydet_status with_shape(int64_t n, const F &f) {
  const int64_t most = n + kVector - 1;
  if (most <= 16 * 8) return f(RowShape<16, 8, 1, 1>{});
  if (most <= 32 * 16) return f(RowShape<32, 8, 2, 1>{});
  if (most <= 128 * 16) return f(RowShape<128, 8, 2, 1>{});
  if (most <= 256 * 16) return f(RowShape<256, 8, 2, 1>{});
  if (most <= 256 * 32) return f(RowShape<256, 8, 4, 1>{});
  return f(RowShape<256, 8, 8, 1>{});
}

template <class P> bool takes(const P &p) {
  const int64_t bytes = kVector * size_of(p.x.type);
  return p.n <= kLongest && rows_ascend(p.x, p.inner, p.rows, p.n) && rows_ascend(p.residual, p.inner, p.rows, p.n) &&
         rows_agree(p.residual, p.x, bytes) && rows_agree(p.y, p.x, bytes) && rows_agree(p.sum, p.x, bytes) &&
         vector_aligned(p.weight) && vector_aligned(p.bias);
}

template <class P> pydet_status norm_shifted(const char *name, const P &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return with_shape(p.n, [&](auto shape) {
      constexpr int T = shape.T, kTeams = kBlock<T> / T;
      Launch where = {name, static_cast<gpu_stream>(p.stream), grid_of(divide_up(p.rows, kTeams), kBlock<T>),
                      dim3(kBlock<T>)};
      where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
      return launch(where, norm_shifted_kernel<P, type, T, shape.V>, p);
    });
  });
}

}  // namespace

bool rmsnorm_shifted_takes(const RmsNorm &p) { return takes(p); }
pydet_status rmsnorm_shifted(const RmsNorm &p) { return norm_shifted("rmsnorm_shifted", p); }
bool layernorm_shifted_takes(const LayerNorm &p) { return takes(p); }
pydet_status layernorm_shifted(const LayerNorm &p) { return norm_shifted("layernorm_shifted", p); }

}  // namespace pydet
