// Softmax of rows that begin anywhere, and of long ones by clusters, in fp32 (NUMERICS.md, "Softmax"): the CPU's bits.
// The formulas are those of softmax.cu, the rows those of softmax_staged.h. A thread keeps its elements of a row.

#include "gpu/kernels.h"
#include "gpu/nvidia/softmax_staged.h"

namespace pydet {
namespace {

// A thread keeps its K elements of a row, or its exps.
template <Type type, int T, int K>
__global__ void __launch_bounds__(Stage<type, T, 1>::kBlock, 1024 / Stage<type, T, 1>::kBlock)
    softmax_kept_kernel(const __grid_constant__ Softmax p, int team_bytes) {
  using S = Stage<type, T, 1>;
  constexpr int kSlots = K < S::kLanes ? K : S::kLanes, kAtOnce = 4;
  extern __shared__ __align__(16) char shared[];
  __shared__ float of_warps[T == kLogicalWarp ? 1 : T / kLogicalWarp], of_groups[T / 8];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const S stage(p.n);
  const int team = int(threadIdx.x) / T;
  const int64_t r = int64_t(blockIdx.x) * S::kTeams + team;
  if (r >= p.rows) return;  // a whole warp, or no thread of the block
  const RowIndex where = row_index(p.inner, r);
  const char *const x_row = row_at(p.x, S::kSize, where);
  char *const staged = shared + team * team_bytes;
  stage.fetch(staged, x_row);
  commit_copies();
  Finish finish(p, r);
  wait_copies<0>();
  S::meet();

  float x[K], most = kLowest, lane[kSlots] = {};
  bool normal[K / kAtOnce];
  const int x_shift = S::shift_of(x_row);
#pragma unroll
  for (int first = 0; first < K; first += kAtOnce) {
    if (T * first >= stage.n) continue;
#pragma unroll
    for (int q = first; q < first + kAtOnce; ++q) {
      x[q] = stage.column(q) < stage.n ? S::load(staged, stage.place(q) + x_shift) : kLowest;
      most = fmaxf(most, x[q]);
    }
  }
  const float max = most_of<T, 1>(most, of_warps, nullptr);
#pragma unroll
  for (int first = 0; first < K; first += kAtOnce) {
    if (T * first >= stage.n) continue;
    float some[kAtOnce], exps[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) some[i] = stage.column(first + i) < stage.n ? x[first + i] : max;
    normal[first / kAtOnce] = exps_of(some, max, exps);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int q = first + i;
      if (stage.column(q) < stage.n) lane[q % kSlots] += exps[i];
      if (p.kind != SoftmaxKind::log_softmax) x[q] = exps[i];
    }
  }
  finish.known(max, LaneSum<T, 1, kSlots>::joined(lane, of_groups, nullptr));
  if (p.kind == SoftmaxKind::log_prob) {
    if (stage.t == 0) finish.store_log_prob(x_row);
    return;
  }
  char *const y_row = row_at(p.y, S::kSize, where);
  const int y_shift = S::shift_of(y_row);
  if (T == kLogicalWarp) __syncwarp();  // the others of the team have read x
#pragma unroll
  for (int first = 0; first < K; first += kAtOnce) {
    if (T * first >= stage.n) continue;
    float some[kAtOnce], exps[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) some[i] = exps[i] = x[first + i];
    finish.elements<T>(stage.column(first), exps, normal[first / kAtOnce], some);
    stage.store(staged, y_shift, first, some);
  }
  S::meet();
  stage.write(staged, y_row);
}

// A longer row stays in shared memory alone. y takes the place of x, or has y_bytes of its own.
template <Type type, int T, int C>
__global__ void __launch_bounds__(T, 1024 / T)
    softmax_staged_kernel(const __grid_constant__ Softmax p, int bytes, int y_bytes) {
  using S = Stage<type, T, C>;
  constexpr int kAtOnce = 8;
  extern __shared__ __align__(16) char x_staged[];
  __shared__ float of_warps[T / kLogicalWarp], of_groups[T / 8];
  __shared__ Exchange cluster;
  if constexpr (C > 1) expect_from_cluster(&cluster.most_arrived, int(sizeof cluster.most));
  wait_for_previous_kernel();
  let_next_kernel_start();
  const S stage(p.n);
  const int64_t r = blockIdx.x / C;
  const RowIndex where = row_index(p.inner, r);
  const char *const x_row = row_at(p.x, S::kSize, where);
  stage.fetch(x_staged, x_row);
  commit_copies();
  Finish finish(p, r);
  if constexpr (C > 1) {
    meet_cluster();
    expect_from_cluster(&cluster.sums_arrived, int(sizeof cluster.sums));
  }
  wait_copies<0>();
  S::meet();

  // Calls body(q, x) for the thread's elements, some from q on at a time; those that are none of the row are `other`.
  const int x_shift = S::shift_of(x_row);
  auto turns = [&](float other, const auto &body) {
    for (int first = 0; stage.column(first) < stage.n; first += kAtOnce) {
      float x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        x[i] = stage.column(first + i) < stage.n ? S::load(x_staged, stage.place(first + i) + x_shift) : other;
      body(first, x);
    }
  };
  float most = kLowest, lane[S::kLanes] = {};
  turns(kLowest, [&](int, const float(&x)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) most = fmaxf(most, x[i]);
  });
  const float max = most_of<T, C>(most, of_warps, &cluster);
  turns(max, [&](int first, const float(&x)[kAtOnce]) {
    float exps[kAtOnce];
    exps_of(x, max, exps);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (stage.column(first + i) < stage.n) lane[i % S::kLanes] += exps[i];
  });
  finish.known(max, LaneSum<T, C, S::kLanes>::joined(lane, of_groups, &cluster));
  if (p.kind == SoftmaxKind::log_prob) {
    if (stage.t == 0 && stage.rank == 0) finish.store_log_prob(x_row);
    return;
  }
  char *const y_row = row_at(p.y, S::kSize, where), *const y_staged = x_staged + (y_bytes ? bytes : 0);
  const int y_shift = S::shift_of(y_row);
  turns(max, [&](int first, float(&x)[kAtOnce]) {
    float exps[kAtOnce];
    const bool normal = p.kind != SoftmaxKind::log_softmax && exps_of(x, max, exps);
    finish.elements<C == 1 ? T : kRowLanes>(stage.column(first), exps, normal, x);
    stage.store(y_staged, y_shift, first, x);
  });
  S::meet();
  stage.write(y_staged, y_row);
}

// ---- Host --------------------------------------------------------------------------------------------------------

template <int team, int elements> struct Kept {
  static constexpr int T = team, K = elements;
};

// Calls f with a team that keeps a row of n.
template <class F> pydet_status with_team(int64_t n, const F &f) {
  if (n <= 32 * 4) return f(Kept<32, 4>{});
  if (n <= 32 * 16) return f(Kept<32, 16>{});
  if (n <= 128 * 16) return f(Kept<128, 16>{});
  return f(Kept<256, 16>{});
}
constexpr int64_t kLongestKept = 256 * 16, kMostRows = int64_t(1) << 27;

Launch shape_of(const char *name, const Softmax &p, int64_t blocks, int threads, int shared_bytes, int cluster) {
  Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(blocks)), dim3(unsigned(threads))};
  where.shared_bytes = shared_bytes;
  where.cluster = cluster;
  where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
  return where;
}

template <Type type, int T, int C> pydet_status launch_staged(const char *name, const Softmax &p) {
  const int bytes = Stage<type, T, C>::bytes(p.n), y_bytes = p.y.data && rows_differ(p.y, p.x) ? bytes : 0;
  return launch(shape_of(name, p, p.rows * C, T, bytes + y_bytes, C), softmax_staged_kernel<type, T, C>, p, bytes,
                y_bytes);
}

}  // namespace

bool softmax_staged_takes(const Softmax &p) {
  return p.rows <= kMostRows && (p.n <= kLongestKept || rows_fit(2, p.n, p.x.type, 1, p.device.id));
}

// Of aligned rows, measured on an H100: many of 8192 to 16384 elements (12932x8792: 382 us, held in registers 522), and
// longer ones of log_softmax (4096x32000: 265 us, read three times 329; softmax 370 and 336).
bool softmax_staged_prefers(const Softmax &p) {
  if (p.n % kVector != 0 || !rows_aligned(p.x) || !rows_aligned(p.y)) return true;
  return p.n > kLongestHeldRow ? p.kind == SoftmaxKind::log_softmax && p.rows > 512 : p.n > 8192 && p.rows > 512;
}

pydet_status softmax_staged(const Softmax &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("softmax_staged", guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    if (p.n > kLongestKept) return launch_staged<type, 256, 1>("softmax_staged", p);
    return with_team(p.n, [&](auto shape) {
      using S = Stage<type, shape.T, 1>;
      const int team_bytes = S::bytes(p.n);
      return launch(shape_of("softmax_staged", p, divide_up(p.rows, S::kTeams), S::kBlock, S::kTeams * team_bytes, 1),
                    softmax_kept_kernel<type, shape.T, shape.K>, p, team_bytes);
    });
  });
}

bool softmax_cluster_takes(const Softmax &p) {
  return p.rows <= kMostRows && rows_fit(2, p.n, p.x.type, kRanks, p.device.id);
}
// Few rows: meeting twice takes a cluster some us, which pays where there are no other rows for its blocks.
bool softmax_cluster_prefers(const Softmax &p) {
  return (p.rows <= 32 && p.n > 8192) || (p.rows <= 64 && p.n > kLongestHeldRow);
}

pydet_status softmax_cluster(const Softmax &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("softmax_cluster", guard.error());
  return with_type<kUnscaledTypes>(p.x.type,
                                   [&](auto type) { return launch_staged<type, 256, kRanks>("softmax_cluster", p); });
}

}  // namespace pydet
