// Softmax of rows in shared memory, of a block or of a cluster, in fp32 (NUMERICS.md, "Softmax"): the CPU's bits. The
// formulas are those of softmax.cu, a cluster's rows those of softmax_staged.h.

#include "gpu/kernels.h"
#include "gpu/nvidia/softmax_staged.h"
#include "gpu/nvidia/pieces.h"

namespace pydet {
namespace {

// A block holds a row. What becomes y is read again as y lies in memory, wherever x does.
template <Type type, bool shifted>
__global__ void __launch_bounds__(kMaxTeam, 4) softmax_staged_kernel(const __grid_constant__ Softmax p, bool ascend) {
  constexpr int T = kMaxTeam, W = kVector;
  using Row = StagedRow<type, shifted>;
  extern __shared__ __align__(16) char shared[];
  __shared__ float of_groups[T], of_warps[T / kLogicalWarp];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t r = blockIdx.x;
  const RowIndex where = row_index(p.inner, r);
  const char *const x_row = row_at(p.x, size_of(type), where);
  Row row;
  row.fetch(shared, x_row, p.n, ascend && r > 0, ascend && r < p.rows - 1);
  Finish finish(p, r);

  float most = kLowest;
  row.turns(0, kLowest, [&](int, const float(&x)[W]) {
#pragma unroll
    for (int e = 0; e < W; ++e) most = larger(most, x[e]);
  });
  const float max = most_of<T, 1>(most, of_warps, nullptr);
  Lanes<T, W, 1> lanes[1];
  float ones[W], sum[1];
#pragma unroll
  for (int e = 0; e < W; ++e) ones[e] = 1.0f;
  row.turns(0, max, [&](int j, const float(&x)[W]) {
    float exps[W];
    exps_of(x, max, exps);
    row.add(lanes[0], j, exps, ones);
  });
  join(lanes, of_groups, [](float s) { return s; }, sum);
  finish.known(max, sum[0]);
  if (p.kind == SoftmaxKind::log_prob) {
    if (threadIdx.x == 0) finish.store_log_prob(x_row);
    return;
  }
  char *const y_row = row_at(p.y, size_of(type), where);
  row.turns(Row::behind_whole(y_row), max, [&](int j, float(&x)[W]) {
    float exps[W];
    if (p.kind != SoftmaxKind::log_softmax) exps_of(x, max, exps);
    finish.elements<1>(j, exps, x);
    row.store(y_row, j, x);
  });
}

// A cluster holds a row. y takes the place of x, or has y_bytes of its own.
template <Type type>
__global__ void __launch_bounds__(kMaxTeam, 4)
    softmax_cluster_kernel(const __grid_constant__ Softmax p, int bytes, int y_bytes) {
  constexpr int T = kMaxTeam, C = kRanks, kAtOnce = 8;
  using S = Stage<type, T, C>;
  extern __shared__ __align__(16) char x_staged[];
  __shared__ float of_warps[T / kLogicalWarp], of_groups[T / 8];
  __shared__ Exchange cluster;
  expect_from_cluster(&cluster.most_arrived, int(sizeof cluster.most));
  wait_for_previous_kernel();
  let_next_kernel_start();
  const S stage(p.n);
  const int64_t r = blockIdx.x / C;
  const RowIndex where = row_index(p.inner, r);
  const char *const x_row = row_at(p.x, S::kSize, where);
  stage.fetch(x_staged, x_row);
  commit_copies();
  Finish finish(p, r);
  meet_cluster();
  expect_from_cluster(&cluster.sums_arrived, int(sizeof cluster.sums));
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
    for (int i = 0; i < kAtOnce; ++i) most = larger(most, x[i]);
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
    if (p.kind != SoftmaxKind::log_softmax) exps_of(x, max, exps);
    finish.elements<kRowLanes>(stage.column(first), exps, x);
    stage.store(y_staged, y_shift, first, x);
  });
  S::meet();
  stage.write(y_staged, y_row);
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int64_t kMostRows = int64_t(1) << 27;

Launch shape_of(const char *name, const Softmax &p, int64_t blocks, int threads, int shared_bytes, int cluster) {
  Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(blocks)), dim3(unsigned(threads))};
  where.shared_bytes = shared_bytes;
  where.cluster = cluster;
  where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
  return where;
}

int64_t bytes_of_row(const Softmax &p) { return bytes_of_staged(p.n, p.x.type); }

}  // namespace

bool softmax_staged_takes(const Softmax &p) {
  constexpr int64_t kStatic = 4 << 10;
  return p.rows <= kMostRows && bytes_of_row(p) + kStatic <= gpu_shared_bytes(p.device.id);
}

// Of aligned rows those of more than 8192 elements, where there are many and a multiprocessor holds two. Measured on
// an H100, us, here, held in registers and read three times: 12932x8792 254, 522 and 273, 4407x15088 146, 211 and 150,
// 300x12000 19, 19 and 16, 4096x8192 77, 73 and 80, 4096x32000 271 and 336, 1500x40000 148 and 180.
bool softmax_staged_prefers(const Softmax &p) {
  return (!rows_whole(p) && p.n > kLongestSingly) || (p.n > 8192 && p.rows > 132 && bytes_of_row(p) <= 110 << 10);
}

pydet_status softmax_staged(const Softmax &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("softmax_staged", guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return launch(shape_of("softmax_staged", p, p.rows, kMaxTeam, int(bytes_of_row(p)), 1),
                  rows_whole(p) ? softmax_staged_kernel<type, false> : softmax_staged_kernel<type, true>, p,
                  rows_ascend(p.x, p.inner, p.rows, p.n));
  });
}

bool softmax_cluster_takes(const Softmax &p) {
  return p.rows <= kMostRows && rows_fit(2, p.n, p.x.type, kRanks, p.device.id);
}
// Few rows: meeting twice takes a cluster some us, which pays where there are no other rows for its blocks.
bool softmax_cluster_prefers(const Softmax &p) {
  return (p.rows <= 24 && p.n > 8192) || (p.rows <= 64 && p.n > kLongestHeldRow);
}

pydet_status softmax_cluster(const Softmax &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("softmax_cluster", guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    const int bytes = Stage<type, kMaxTeam, kRanks>::bytes(p.n),
              y_bytes = p.y.data && rows_differ(p.y, p.x) ? bytes : 0;
    return launch(shape_of("softmax_cluster", p, p.rows * kRanks, kMaxTeam, bytes + y_bytes, kRanks),
                  softmax_cluster_kernel<type>, p, bytes, y_bytes);
  });
}

}  // namespace pydet
