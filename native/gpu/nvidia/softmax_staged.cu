// Softmax of rows of any length and place, and its gradients, in the shared memory of a block or of a cluster's blocks, in
// fp32 (NUMERICS.md, "Softmax"): the CPU's bits. The formulas are those of softmax.cu, the threads those of
// softmax_cluster.h.
//
// A row is read once, and lies in shared memory as it does in memory. A thread reads there what it has brought itself, so
// that none waits for another but for the maximum and the sum.

#include "gpu/kernels.h"
#include "gpu/nvidia/softmax_cluster.h"

namespace pydet {
namespace {

// Blocks a multiprocessor is to hold, for 64 registers a thread.
template <int C, int W> constexpr int kBlocks = 1024 / (kRowLanes / (W * C));
constexpr int kAtOnce = 8;  // elements of a thread whose steps are computed together

// Brings the thread's pieces of a row to `staged`, where they lie T apart: some at a time, which f(pieces) is given too.
// Past the row's end they are `outside`.
template <bool whole, Type type, int W, class F>
__device__ __forceinline__ void stage(const char *row, int first, int n, uint32_t outside, Adjacent<type, W> *staged,
                                      const F &f) {
  constexpr int V = kAtOnce / W;
#pragma unroll 2
  for (int v = 0; kRowLanes * v < n; v += V) {
    Adjacent<type, W> x[V];
    load_pieces<type, W, V, whole>(row, first + kRowLanes * v, n, outside, x);
#pragma unroll
    for (int i = 0; i < V; ++i) staged[(v + i) * int(blockDim.x)] = x[i];
    f(x);
  }
}

// Calls f(v, x) for the elements of some pieces at a time, from the v-th on.
template <Type type, int W, class F>
__device__ __forceinline__ void turns(const Adjacent<type, W> *staged, int n, const F &f) {
  constexpr int V = kAtOnce / W;
#pragma unroll 1
  for (int v = 0; kRowLanes * v < n; v += V) {
    float x[kAtOnce];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float one[W];
      to_floats(staged[(v + i) * int(blockDim.x)], one);
#pragma unroll
      for (int e = 0; e < W; ++e) x[i * W + e] = one[e];
    }
    f(v, x);
  }
}

template <Type type, int C, int W, bool whole>
__global__ void __launch_bounds__(kRowLanes / (W * C), kBlocks<C, W>)
    softmax_staged_kernel(const __grid_constant__ Softmax p) {
  constexpr int T = kRowLanes / (W * C), kSize = size_of(type), V = kAtOnce / W;
  constexpr uint32_t kLowestWord = type == Type::f32 ? 0xFF800000u : type == Type::bf16 ? 0xFF80FF80u : 0xFC00FC00u;
  extern __shared__ __align__(16) char shared[];
  __shared__ float of_warps[T / kLogicalWarp];
  __shared__ Received<C> received;
  if constexpr (C > 1) expect_from_cluster(&received.most_arrived, int(sizeof received.most));
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int rank = int(blockIdx.x) % C, n = int(p.n), first = W * (T * rank + int(threadIdx.x));
  const int64_t r = blockIdx.x / C;
  const RowIndex where = row_index(p.inner, r);
  const char *const x_row = row_at(p.x, kSize, where);
  auto *const staged = reinterpret_cast<Adjacent<type, W> *>(shared) + threadIdx.x;
  float most = kLowest;
  stage<whole>(x_row, first, n, kLowestWord, staged, [&](const Adjacent<type, W>(&x)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float one[W];
      to_floats(x[i], one);
#pragma unroll
      for (int e = 0; e < W; ++e) most = larger(most, one[e]);
    }
  });
  Finish finish(p, r);
  if constexpr (C > 1) {
    meet_cluster();
    expect_from_cluster(&received.sums_arrived, int(sizeof received.sums));
  }
  const float max = row_max<C, T>(most, of_warps, received, rank);
  float lane[W] = {};
  turns(staged, n, [&](int, const float(&x)[kAtOnce]) {
    float exps[kAtOnce];
    exps_of(x, max, exps);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) lane[i % W] += exps[i];
  });
  finish.known(max, row_sum<C, W>(lane, received, rank));
  if (p.kind == SoftmaxKind::log_prob) {
    if (rank == 0 && threadIdx.x == 0) finish.store_log_prob(x_row);
    return;
  }
  char *const y_row = row_at(p.y, kSize, where);
  const bool log = p.kind == SoftmaxKind::log_softmax;
  turns(staged, n, [&](int v, float(&x)[kAtOnce]) {
    if (!log) exps_of(x, max, x);
    store_results<type, W, whole>(finish, log, y_row, first, n, v, x);
  });
}

template <Type type, int C, int W, bool whole>
__global__ void __launch_bounds__(kRowLanes / (W * C), kBlocks<C, W>)
    softmax_backward_staged_kernel(const __grid_constant__ SoftmaxBackward p, int bytes) {
  constexpr int T = kRowLanes / (W * C), kSize = size_of(type);
  constexpr uint32_t kMinusZero = type == Type::f32 ? 0x80000000u : 0x80008000u;
  extern __shared__ __align__(16) char shared[];
  __shared__ Received<C> received;
  if constexpr (C > 1) expect_from_cluster(&received.sums_arrived, int(sizeof received.sums));
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int rank = int(blockIdx.x) % C, n = int(p.n), first = W * (T * rank + int(threadIdx.x));
  const RowIndex where = row_index(p.inner, blockIdx.x / C);
  auto *const dy_staged = reinterpret_cast<Adjacent<type, W> *>(shared) + threadIdx.x;
  auto *const y_staged = reinterpret_cast<Adjacent<type, W> *>(shared + bytes) + threadIdx.x;
  auto nothing = [](const auto &) {};
  // Past the row's end their product is -0, which changes no lane.
  stage<whole>(row_at(p.dy, kSize, where), first, n, kMinusZero, dy_staged, nothing);
  stage<whole>(row_at(p.y, kSize, where), first, n, 0, y_staged, nothing);
  // Calls f(v, dy, y).
  auto both = [&](const auto &f) {
    turns(dy_staged, n, [&](int v, float(&dy)[kAtOnce]) {
      float y[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce / W; ++i) {
        float one[W];
        to_floats(y_staged[(v + i) * T], one);
#pragma unroll
        for (int e = 0; e < W; ++e) y[i * W + e] = one[e];
      }
      f(v, dy, y);
    });
  };
  float lane[W] = {};
  both([&](int, const float(&dy)[kAtOnce], const float(&y)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) lane[i % W] = fmaf(dy[i], second_of(p, y[i]), lane[i % W]);
  });
  const float c = row_sum<C, W>(lane, received, rank);
  char *const dx_row = row_at(p.dx, kSize, where);
  both([&](int v, float(&dy)[kAtOnce], float(&y)[kAtOnce]) {
    gradients_of(p, c, dy, y);
    Adjacent<type, kAtOnce> dx;
    round_words<type>(dy, dx.word);
    store_pieces<type, W, whole>(dx_row, first, n, v, dx);
  });
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int64_t kMostRows = int64_t(1) << 27;
constexpr int kRanks = 8;  // blocks of a cluster

template <int blocks, int elements> struct Shares {
  static constexpr int C = blocks, W = elements, T = kRowLanes / (W * C);
};

// Calls f(shares, whole): a block alone has whole rows in long pieces, other rows are in pairs of elements.
template <int C, class Problem, class F> auto with_shares(const Problem &p, const F &f) {
  if (!rows_whole(p)) return f(Shares<C, 2>{}, std::false_type{});
  return f(Shares<C, C == 1 ? 8 : 2>{}, std::true_type{});
}

// Of shared memory for a row, of each block.
template <int C, class Problem> int64_t bytes_of_row(const Problem &p, Type type) {
  return with_shares<C>(p, [&](auto shares, auto) {
    constexpr int64_t kTurn = int64_t(kRowLanes) * kAtOnce / shares.W;  // whole turns
    return divide_up(p.n, kTurn) * kTurn / C * size_of(type);
  });
}
template <int C, class Problem> bool fits(const Problem &p, int parts, Type type) {
  constexpr int64_t kStatic = 4 << 10;
  return p.rows <= kMostRows && parts * bytes_of_row<C>(p, type) + kStatic <= gpu_shared_bytes(p.device.id);
}

template <class Shares, class Problem, class... More>
pydet_status launch_shares(const char *name, const Problem &p, Shares, int shared_bytes, void (*kernel)(Problem, More...),
                           More... more) {
  Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(p.rows * Shares::C)), dim3(Shares::T),
                  shared_bytes, Shares::C};
  where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
  return launch(where, kernel, p, more...);
}

template <int C> pydet_status forward(const char *name, const Softmax &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return with_shares<C>(p, [&](auto shares, auto whole) {
      return launch_shares(name, p, shares, int(bytes_of_row<C>(p, type)),
                           softmax_staged_kernel<type, C, shares.W, whole>);
    });
  });
}
template <int C> pydet_status backward(const char *name, const SoftmaxBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  return with_type<kUnscaledTypes>(p.dy.type, [&](auto type) {
    return with_shares<C>(p, [&](auto shares, auto whole) {
      const int bytes = int(bytes_of_row<C>(p, type));
      return launch_shares(name, p, shares, 2 * bytes, softmax_backward_staged_kernel<type, C, shares.W, whole>, bytes);
    });
  });
}

}  // namespace

bool softmax_staged_takes(const Softmax &p) { return fits<1>(p, 1, p.x.type); }

// Of aligned rows those of more than 8192 elements, where there are many and a multiprocessor holds two. Measured on
// an H100, us, here, held in registers and read three times: 12932x8792 254, 522 and 273, 4407x15088 146, 211 and 150,
// 300x12000 19, 19 and 16, 4096x8192 77, 73 and 80, 4096x32000 271 and 336, 1500x40000 148 and 180.
bool softmax_staged_prefers(const Softmax &p) {
  return (!rows_whole(p) && p.n > kLongestSingly) ||
         (p.n > 8192 && p.rows > 132 && bytes_of_row<1>(p, p.x.type) <= 110 << 10);
}
pydet_status softmax_staged(const Softmax &p) { return forward<1>("softmax_staged", p); }

bool softmax_cluster_takes(const Softmax &p) { return fits<kRanks>(p, 1, p.x.type); }
// Few rows: meeting twice takes a cluster some us, which pays where there are no other rows for its blocks.
bool softmax_cluster_prefers(const Softmax &p) {
  return (p.rows <= 24 && p.n > 8192) || (p.rows <= 64 && p.n > kLongestHeldRow) || p.n > 76 * kRowLanes;
}
pydet_status softmax_cluster(const Softmax &p) { return forward<kRanks>("softmax_cluster", p); }

bool softmax_backward_staged_takes(const SoftmaxBackward &p) { return fits<1>(p, 2, p.dy.type); }
pydet_status softmax_backward_staged(const SoftmaxBackward &p) { return backward<1>("softmax_backward_staged", p); }

bool softmax_backward_cluster_takes(const SoftmaxBackward &p) { return fits<kRanks>(p, 2, p.dy.type); }
bool softmax_backward_cluster_prefers(const SoftmaxBackward &p) {
  return p.n > kLongestHeldRow || (p.rows <= 32 && p.n > 8192);
}
pydet_status softmax_backward_cluster(const SoftmaxBackward &p) {
  return backward<kRanks>("softmax_backward_cluster", p);
}

}  // namespace pydet
