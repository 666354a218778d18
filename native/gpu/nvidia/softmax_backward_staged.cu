// Gradients of softmax of rows that begin anywhere, and of long ones by clusters, in fp32 (NUMERICS.md, "Softmax"): the
// CPU's bits. The formulas are those of softmax.cu, the rows those of softmax_staged.h: dy and y are read twice from
// shared memory, and dx takes the place of dy where their rows are as far behind a piece of memory.

#include "gpu/kernels.h"
#include "gpu/nvidia/softmax_staged.h"

namespace pydet {
namespace {

// Threads that a multiprocessor is to hold: with 1024, Blackwell's code spills.
#if defined(__CUDA_ARCH__)
constexpr int kThreads = __CUDA_ARCH__ >= 1000 ? 768 : 1024;
#else
constexpr int kThreads = 1024;
#endif

// Up to K elements a thread in a turn.
template <Type type, int T, int K, int C>
__global__ void __launch_bounds__(Stage<type, T, C>::kBlock, kThreads / Stage<type, T, C>::kBlock)
    softmax_backward_staged_kernel(const __grid_constant__ SoftmaxBackward p, int bytes, int dx_bytes) {
  using S = Stage<type, T, C>;
  constexpr int kSlots = K >= S::kLanes ? S::kLanes : K;
  extern __shared__ __align__(16) char shared[];
  __shared__ float of_groups[T / 8];
  __shared__ Exchange cluster;
  if constexpr (C > 1) expect_from_cluster(&cluster.sums_arrived, int(sizeof cluster.sums));
  wait_for_previous_kernel();
  let_next_kernel_start();
  const S stage(p.n);
  const int team = int(threadIdx.x) / T;
  const int64_t r = C > 1 ? blockIdx.x / C : int64_t(blockIdx.x) * S::kTeams + team;
  if (r >= p.rows) return;  // the whole of a warp, or of no block
  const RowIndex where = row_index(p.inner, r);
  const char *const dy_row = row_at(p.dy, S::kSize, where), *const y_row = row_at(p.y, S::kSize, where);
  char *const dx_row = row_at(p.dx, S::kSize, where);
  char *const dy_staged = shared + team * (2 * bytes + dx_bytes), *const y_staged = dy_staged + bytes;
  char *const dx_staged = dx_bytes ? y_staged + bytes : dy_staged;
  stage.fetch(dy_staged, dy_row);
  stage.fetch(y_staged, y_row);
  commit_copies();
  wait_copies<0>();
  S::meet();

  const int dy_shift = S::shift_of(dy_row), y_shift = S::shift_of(y_row), dx_shift = S::shift_of(dx_row);
  auto turns = [&](const auto &body) {
    for (int first = 0; stage.column(first) < stage.n; first += K) {
      float dy[K], y[K];
#pragma unroll
      for (int i = 0; i < K; ++i) {
        const bool inside = stage.column(first + i) < stage.n;
        dy[i] = inside ? S::load(dy_staged, stage.place(first + i) + dy_shift) : 0.0f;
        y[i] = inside ? S::load(y_staged, stage.place(first + i) + y_shift) : 0.0f;
      }
      body(first, dy, y);
    }
  };
  float lane[kSlots] = {};
  turns([&](int first, const float(&dy)[K], const float(&y)[K]) {
#pragma unroll
    for (int i = 0; i < K; ++i) {
      float &sum = lane[i % kSlots];
      if (stage.column(first + i) < stage.n) sum = fmaf(dy[i], second_of(p, y[i]), sum);
    }
  });
  const float c = LaneSum<T, C, kSlots>::joined(lane, of_groups, &cluster);
  turns([&](int first, float(&dy)[K], float(&y)[K]) {
    gradients_of(p, c, dy, y);
    stage.store(dx_staged, dx_shift, first, dy);
  });
  S::meet();
  stage.write(dx_staged, dx_row);
}

// ---- Host --------------------------------------------------------------------------------------------------------

template <int team, int elements> struct Turn {
  static constexpr int T = team, K = elements;
};

// Calls f with a team for a row of n.
template <class F> pydet_status with_team(int64_t n, const F &f) {
  if (n <= 32 * 4) return f(Turn<32, 4>{});
  if (n <= 32 * 8) return f(Turn<32, 8>{});
  if (n <= 32 * 16) return f(Turn<32, 16>{});
  if (n <= 128 * 8) return f(Turn<128, 8>{});
  if (n <= 128 * 16) return f(Turn<128, 16>{});
  return f(Turn<256, 8>{});
}

constexpr int64_t kLongestOfTeam = 16384;
constexpr int64_t kMostRows = int64_t(1) << 27;

template <int C, class Shape, Type type> pydet_status launch_staged(const char *name, const SoftmaxBackward &p) {
  using S = Stage<type, Shape::T, C>;
  const int bytes = S::bytes(p.n), dx_bytes = rows_differ(p.dx, p.dy) ? bytes : 0;
  Launch where = {name, static_cast<gpu_stream>(p.stream),
                  dim3(unsigned(C == 1 ? divide_up(p.rows, S::kTeams) : p.rows * C)), dim3(S::kBlock)};
  where.shared_bytes = S::kTeams * (2 * bytes + dx_bytes);
  where.cluster = C;
  where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
  return launch(where, softmax_backward_staged_kernel<type, Shape::T, Shape::K, C>, p, bytes, dx_bytes);
}

}  // namespace

bool softmax_backward_staged_takes(const SoftmaxBackward &p) {
  return p.n <= kLongestOfTeam && p.rows <= kMostRows && rows_fit(3, p.n, p.dy.type, 1, p.device.id);
}

pydet_status softmax_backward_staged(const SoftmaxBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("softmax_backward_staged", guard.error());
  return with_type<kUnscaledTypes>(p.dy.type, [&](auto type) {
    return with_team(p.n,
                     [&](auto shape) { return launch_staged<1, decltype(shape), type>("softmax_backward_staged", p); });
  });
}

bool softmax_backward_cluster_takes(const SoftmaxBackward &p) {
  return p.rows <= kMostRows && rows_fit(3, p.n, p.dy.type, kRanks, p.device.id);
}
bool softmax_backward_cluster_prefers(const SoftmaxBackward &p) {
  return p.n > kLongestOfTeam || (p.rows <= 32 && p.n > 8192);
}

pydet_status softmax_backward_cluster(const SoftmaxBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("softmax_backward_cluster", guard.error());
  return with_type<kUnscaledTypes>(
      p.dy.type, [&](auto type) { return launch_staged<kRanks, Turn<256, 8>, type>("softmax_backward_cluster", p); });
}

}  // namespace pydet
