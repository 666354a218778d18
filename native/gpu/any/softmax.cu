// Softmax of rows, its logarithm, the log-probability of one column, and their gradients, in fp32 (NUMERICS.md,
// "Softmax"): the CPU's bits.
//
//   m = max(x) + 0,   e = exp(x - m),   s = rowsum(e, 1)
//   softmax  y = round(e / s)                      log_softmax  y = round((x - m) - log(s))
//   log_prob y = (x[index] - m) - log(s)           its gradient dx = round(fmaf(-(e / s), g, j = index ? g : 0))
//   backward c = rowsum(dy, y), dx = round(y (dy - c));   of the log: c = rowsum(dy, 1), dx = round(fmaf(-exp(y), c, dy))
//
// Rows up to 16384 are held in registers by their team (rows.h), up to 32 wherever they begin. Others are passed
// over three times, the gradients' twice; by whole vectors where they are aligned. CUDA has other kernels for most of
// them (nvidia/softmax_strided.cu, nvidia/softmax_staged.cu).

#include <type_traits>

#include "gpu/kernels.h"
#include "gpu/any/softmax_row.h"

namespace pydet {
namespace {

// Blocks a multiprocessor is to hold of those that pass over long rows: with four, Blackwell's code spills.
#if defined(__CUDA_ARCH__)
constexpr int kLongBlocks = __CUDA_ARCH__ >= 1000 ? 2 : 4;
#else
constexpr int kLongBlocks = 4;
#endif

// Blocks of those that hold three vectors a thread, which are for many rows: 72 registers. Of two vectors it makes few
// rows slower (0: as it comes).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
template <int V> constexpr int kHeldBlocks = V == 3 ? 7 : 0;
#else
template <int V> constexpr int kHeldBlocks = kGpuDeviceType == PYDET_CUDA ? 0 : 1;
#endif

// Elements j .. j + W - 1 of a short row of n that begins anywhere, one by one; past its end the last once more.
template <Type type, int W> __device__ __forceinline__ Packed<type, W> load_singly(const char *row, int j, int n) {
  Packed<type, W> packed = {};
#pragma unroll
  for (int e = 0; e < W; ++e) {
    const int at = j + e < n ? j + e : n - 1;
    if constexpr (type == Type::f32) packed.word[e] = reinterpret_cast<const uint32_t *>(row)[at];
    else packed.word[e / 2] |= uint32_t(reinterpret_cast<const uint16_t *>(row)[at]) << e % 2 * 16;
  }
  return packed;
}
template <Type type, int W>
__device__ __forceinline__ void store_singly(char *row, int j, int n, const Packed<type, W> &packed) {
#pragma unroll
  for (int e = 0; e < W; ++e) {
    if (j + e >= n) continue;
    if constexpr (type == Type::f32) reinterpret_cast<uint32_t *>(row)[j + e] = packed.word[e];
    else reinterpret_cast<uint16_t *>(row)[j + e] = uint16_t(packed.word[e / 2] >> e % 2 * 16);
  }
}

// `singly`: short rows that begin anywhere.
template <Type type, int T, int V, bool singly>
__global__ void __launch_bounds__(kBlock<T>, kHeldBlocks<V>) softmax_kernel(const __grid_constant__ Softmax p) {
  constexpr int W = kVector, kBytes = size_of(type), kVectorStep = T * W * kBytes, kTeams = kBlock<T> / T;
  __shared__ float sums[kTeams * kExchange<T, 1> + 1], largest[kBlock<T> / kLogicalWarp];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T, n = int(p.n);
  const int64_t r = int64_t(blockIdx.x) * kTeams + team, last = p.rows - 1;
  const bool there = r <= last;
  const RowIndex where = row_index(p.inner, there ? r : last);
  const char *x_row = row_at(p.x, kBytes, where);
  Packed<type, W> x[V] = {};
#pragma unroll
  for (int v = 0; v < V; ++v)
    if constexpr (singly) x[v] = load_singly<type, W>(x_row, W * (t + T * v), n);
    else if (W * (t + T * v) < n) x[v] = load_packed<type, W>(x_row + t * W * kBytes + v * kVectorStep);
  Finish finish(p, there ? r : last);

  float most = kLowest;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float one[W];
    unpack(x[v], one);
#pragma unroll
    for (int e = 0; e < W; ++e)
      if (singly || W * (t + T * v) < n) most = larger(most, one[e]);
  }
  const float max = team_max<T>(most, largest);
  Lanes<T, W, V> lanes[1];
  float exps[V][W], sum[1];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (v > 0 && W * T * v >= n) continue;
    float one[W];
    unpack(x[v], one);
    exps_of(one, max, exps[v]);
    if constexpr (singly) lanes[0].add_left(0, n - W * t, exps[v], Ones());
    else lanes[0].add(v, W * (t + T * v) < n, exps[v], Ones());
  }
  join(lanes, sums + team * kExchange<T, 1>, [](float s) { return s; }, sum);
  finish.known(max, sum[0]);
  if (!there) return;
  if (p.kind == SoftmaxKind::log_prob) {
    if (t == 0) finish.store_log_prob(x_row);
    return;
  }
  char *y_row = row_at(p.y, kBytes, where);
  // x once more, from the cache: held beside the exps that others need, it would take registers.
  constexpr bool again = V == 3 && kGpuDeviceType == PYDET_CUDA;
  if constexpr (again) {
    if (p.kind == SoftmaxKind::log_softmax) {
      asm volatile("" ::: "memory");
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (W * (t + T * v) >= n) continue;
        float one[W];
        unpack(load_packed<type, W>(x_row + t * W * kBytes + v * kVectorStep), one);
        finish.logarithms(one);
        store_packed<type>(y_row + t * W * kBytes + v * kVectorStep, one);
      }
      return;
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (W * (t + T * v) >= n) continue;
    float one[W];
    if constexpr (!again) unpack(x[v], one);
    Packed<type, W> y;
    finish.rounded<type, 1>(W * (t + T * v), exps[v], one, y.word);
    if constexpr (singly) store_singly<type, W>(y_row, W * t, n, y);
    else *reinterpret_cast<Packed<type, W> *>(y_row + t * W * kBytes + v * kVectorStep) = y;
  }
}

template <Type type, bool aligned>
__global__ void __launch_bounds__(kMaxTeam, kLongBlocks) softmax_long_kernel(const __grid_constant__ Softmax p) {
  constexpr int T = kMaxTeam;
  __shared__ float sums[2 * T], largest[2 * T / kLogicalWarp];
  int turn = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x, ++turn) {
    const char *x_row = row_at(p.x, size_of(type), p.inner, r);
    Finish finish(p, r);
    float most = kLowest;
    pass_over<type, aligned>(x_row, p.n, [&](int64_t j, const float(&x)[kVector]) {
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        if (aligned || j + e < p.n) most = larger(most, x[e]);
    });
    const float max = team_max<T>(most, largest + turn % 2 * (T / kLogicalWarp));
    Lanes<T, kVector, 1> lanes[1];
    float sum[1];
    pass_over<type, aligned>(x_row, p.n, [&](int64_t j, const float(&x)[kVector]) {
      float exps[kVector];
      exps_of(x, max, exps);
      lanes[0].add_left(0, p.n - j, exps, Ones());
    });
    join(lanes, sums + turn % 2 * T, [](float s) { return s; }, sum);
    finish.known(max, sum[0]);
    if (p.kind == SoftmaxKind::log_prob) {
      if (threadIdx.x == 0) finish.store_log_prob(x_row);
      continue;
    }
    char *y_row = row_at(p.y, size_of(type), p.inner, r);
    pass_over<type, aligned>(x_row, p.n, [&](int64_t j, float(&x)[kVector]) {
      float exps[kVector];
      if (p.kind != SoftmaxKind::log_softmax) exps_of(x, max, exps);
      finish.elements<1>(j, exps, x);
      store_eight(y_row, type, j, p.n, aligned, x);
    });
  }
}

// ---- Gradients from y --------------------------------------------------------------------------------------------

template <Type type, int T, int V, bool singly>
__global__ void __launch_bounds__(kBlock<T>) softmax_backward_kernel(const __grid_constant__ SoftmaxBackward p) {
  constexpr int W = kVector, kBytes = size_of(type), kVectorStep = T * W * kBytes, kTeams = kBlock<T> / T;
  __shared__ float sums[kTeams * kExchange<T, 1> + 1];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T, n = int(p.n);
  const int64_t r = int64_t(blockIdx.x) * kTeams + team, last = p.rows - 1;
  const RowIndex where = row_index(p.inner, r <= last ? r : last);
  const char *dy_row = row_at(p.dy, kBytes, where), *y_row = row_at(p.y, kBytes, where);
  Packed<type, W> dy[V] = {}, y[V] = {};
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int j = W * (t + T * v);
    if constexpr (singly) {
      dy[v] = load_singly<type, W>(dy_row, j, n);
      y[v] = load_singly<type, W>(y_row, j, n);
    } else if (j < n) {
      dy[v] = load_packed<type, W>(dy_row + t * W * kBytes + v * kVectorStep);
      y[v] = load_packed<type, W>(y_row + t * W * kBytes + v * kVectorStep);
    }
  }
  Lanes<T, W, V> lanes[1];
  float c[1];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float first[W], second[W];
    unpack(dy[v], first);
    unpack(y[v], second);
#pragma unroll
    for (int e = 0; e < W; ++e) second[e] = second_of(p, second[e]);
    if constexpr (singly) lanes[0].add_left(0, n - W * t, first, second);
    else lanes[0].add(v, W * (t + T * v) < n, first, second);
  }
  join(lanes, sums + team * kExchange<T, 1>, [](float s) { return s; }, c);
  if (r > last) return;
  char *dx_row = row_at(p.dx, kBytes, where);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (W * (t + T * v) >= n) continue;
    float first[W], second[W];
    unpack(dy[v], first);
    unpack(y[v], second);
    gradients_of(p, c[0], first, second);
    if constexpr (singly) store_singly<type, W>(dx_row, W * t, n, pack<type>(first));
    else store_packed<type>(dx_row + t * W * kBytes + v * kVectorStep, first);
  }
}

template <Type type, bool aligned>
__global__ void __launch_bounds__(kMaxTeam, 4) softmax_backward_long_kernel(const __grid_constant__ SoftmaxBackward p) {
  constexpr int T = kMaxTeam;
  __shared__ float sums[2 * T];
  int turn = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x, ++turn) {
    const char *dy_row = row_at(p.dy, size_of(type), p.inner, r), *y_row = row_at(p.y, size_of(type), p.inner, r);
    Lanes<T, kVector, 1> lanes[1];
    float c[1];
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      float dy[kVector], y[kVector];
      load_eight(dy_row, type, j, p.n, aligned, dy);
      load_eight(y_row, type, j, p.n, aligned, y);
#pragma unroll
      for (int e = 0; e < kVector; ++e) y[e] = second_of(p, y[e]);
      lanes[0].add_left(0, p.n - j, dy, y);
    }
    join(lanes, sums + turn % 2 * T, [](float s) { return s; }, c);
    char *dx_row = row_at(p.dx, size_of(type), p.inner, r);
    for (int64_t j = kVector * threadIdx.x; j < p.n; j += kRowLanes) {
      float dy[kVector], y[kVector];
      load_eight(dy_row, type, j, p.n, aligned, dy);
      load_eight(y_row, type, j, p.n, aligned, y);
      gradients_of(p, c[0], dy, y);
      store_eight(dx_row, type, j, p.n, aligned, dy);
    }
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

// Calls f with a team that holds a row of n, and whether it reads single elements. Of V vectors a thread, where a row is of
// 33 to 256.
template <int V, class F> pydet_status with_shape(int64_t n, bool aligned, const F &f) {
  auto short_shape = [&](auto singly) {
    return with_first<RowShape<1, 8, 1, 1>, RowShape<2, 8, 1, 1>, RowShape<4, 8, 1, 1>>(
        n, [&](auto shape) { return f(shape, singly); });
  };
  constexpr std::false_type whole{};
  if (!aligned) return short_shape(std::true_type{});
  if (n <= 4 * 8) return short_shape(whole);
  return with_first<RowShape<8 / V, 8, V, 1>, RowShape<16 / V, 8, V, 1>, RowShape<32 / V, 8, V, 1>,
                    RowShape<32, 8, 2, 1>, RowShape<64, 8, 2, 1>, RowShape<128, 8, 2, 1>, RowShape<128, 8, 4, 1>,
                    RowShape<256, 8, 4, 1>, RowShape<256, 8, 8, 1>>(n, [&](auto shape) { return f(shape, whole); });
}

// Threads of rows that fill an H100.
constexpr int64_t kManyThreads = 96'000;

bool holds(int64_t rows, int64_t n, bool aligned) {
  constexpr int64_t kMostThreads = int64_t(1) << 31;  // HIP wants fewer threads than 2^32 in a grid
  return n <= (aligned ? kLongestHeldRow : kLongestSingly) && rows <= kMostThreads / kMaxTeam;
}

template <class Problem> pydet_status launch_long(const char *name, const Problem &p, void (*kernel)(Problem)) {
  constexpr int64_t kMostBlocks = 1 << 20;  // more rows are walked in turns
  Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(p.rows < kMostBlocks ? p.rows : kMostBlocks)),
                  dim3(kMaxTeam)};
  return launch(where, kernel, p);
}

template <int T, class Problem> pydet_status launch_held(const char *name, const Problem &p, void (*kernel)(Problem)) {
  return launch(blocks_of(name, p, unsigned(divide_up(p.rows, kBlock<T> / T)), kBlock<T>), kernel, p);
}

}  // namespace

bool softmax_held_takes(const Softmax &p) { return holds(p.rows, p.n, rows_whole(p)); }

pydet_status softmax_held(const Softmax &p) {
  return by_type("softmax_held", p, p.x.type, [&](auto type) {
    auto run = [&](auto shape, auto singly) {
      return launch_held<shape.T>("softmax_held", p, softmax_kernel<type, shape.T, shape.V, singly>);
    };
    if constexpr (kGpuDeviceType == PYDET_CUDA) {
      auto whole = [&](auto shape) { return run(shape, std::false_type{}); };
      // Three vectors a thread, where two of twice as many threads would be empty by a quarter and more.
      auto between = [&](int T) { return p.n > 2 * 8 * T && p.n <= 3 * 8 * T && p.rows * T >= kManyThreads; };
      if (rows_whole(p)) {
        if (between(4)) return whole(RowShape<4, 8, 3, 1>{});
        if (between(8)) return whole(RowShape<8, 8, 3, 1>{});
        if (between(16)) return whole(RowShape<16, 8, 3, 1>{});
        if (between(32)) return whole(RowShape<32, 8, 3, 1>{});
        if (between(64)) return whole(RowShape<64, 8, 3, 1>{});
      }
    }
    // On CUDA, teams of half as many threads have more to do behind each exchange: 65536x256 from 33 to 30 us.
    return with_shape < kGpuDeviceType == PYDET_CUDA ? 2 : 1 > (p.n, rows_whole(p), run);
  });
}

pydet_status softmax_long(const Softmax &p) {
  return by_type("softmax_long", p, p.x.type, [&](auto type) {
    return launch_long("softmax_long", p,
                       rows_whole(p) ? softmax_long_kernel<type, true> : softmax_long_kernel<type, false>);
  });
}

bool softmax_backward_held_takes(const SoftmaxBackward &p) { return holds(p.rows, p.n, rows_whole(p)); }

pydet_status softmax_backward_held(const SoftmaxBackward &p) {
  const char *name = "softmax_backward_held";
  return by_type(name, p, p.dy.type, [&](auto type) {
    return with_shape<1>(p.n, rows_whole(p), [&](auto shape, auto singly) {
      return launch_held<shape.T>(name, p, softmax_backward_kernel<type, shape.T, shape.V, singly>);
    });
  });
}

pydet_status softmax_backward_long(const SoftmaxBackward &p) {
  const char *name = "softmax_backward_long";
  return by_type(name, p, p.dy.type, [&](auto type) {
    return launch_long(
        name, p, rows_whole(p) ? softmax_backward_long_kernel<type, true> : softmax_backward_long_kernel<type, false>);
  });
}

}  // namespace pydet
