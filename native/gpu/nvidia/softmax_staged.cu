// Softmax of rows in shared memory, of a block or of a cluster, and its gradients, in fp32 (NUMERICS.md, "Softmax"): the
// CPU's bits. The formulas are those of softmax.cu.
//
// A row is copied as it lies, by the pieces of 16 bytes of memory, and so is its result. In between an element is one
// thread's, by the lanes of the row's sum (rows.h): thread t of T has elements t + T q, whatever their place in memory.
// `C` blocks, a cluster, share a row: of each 2048 elements block c has those of 256 lanes, a thread one (but of a block
// alone softmax has vectors: StagedRow). Gradients read dy and y twice, and dx takes the place of dy where their rows are
// as far behind a piece of memory.

#include "gpu/kernels.h"
#include "gpu/nvidia/elements.h"
#include "gpu/nvidia/pieces.h"
#include "gpu/nvidia/softmax_cluster.h"

namespace pydet {
namespace {

constexpr int kRanks = 8;  // blocks that share a row

template <Type type, int T, int C> struct Stage {
  static_assert(T <= 512 && (C == 1 || (C == kRanks && T == kMaxTeam)));
  static constexpr int kBlock = T < 128 ? 128 : T, kTeams = kBlock / T;
  static constexpr int kSize = size_of(type), kPiece = 16 / kSize;
  // A block of a cluster has segments of a row, a whole one in each 2048 elements.
  static constexpr int kSegment = T, kSegmentRoom = kSegment + kPiece;
  using Bits = typename Element<type>::Bits;

  int t, rank, n;

  __device__ __forceinline__ explicit Stage(int64_t columns)
      : t(int(threadIdx.x) % T), rank(C == 1 ? 0 : int(blockIdx.x) % C), n(int(columns)) {}

  // Element q of the thread: its column, and its place behind those that `shift` makes room for.
  __device__ __forceinline__ int column(int q) const {
    return C == 1 ? t + T * q : kRowLanes * q + kSegment * rank + t;
  }
  __device__ __forceinline__ int place(int q) const { return C == 1 ? t + T * q : kSegmentRoom * q + t; }
  __device__ __forceinline__ static int shift_of(const char *row) {
    return int(reinterpret_cast<uintptr_t>(row) % 16) / kSize;
  }
  __device__ __forceinline__ static float load(const char *staged, int at) {
    return Element<type>::to_f32(reinterpret_cast<const Bits *>(staged)[at]);
  }
  // Rounds N elements of the thread and stores those of them that are the row's, from element q on.
  template <int N>
  __device__ __forceinline__ void store(char *staged, int shift, int q, const float (&x)[N]) const {
    Bits *to = reinterpret_cast<Bits *>(staged) + shift;
    if constexpr (type == Type::f32) {
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (column(q + i) < n) to[place(q + i)] = bits_of(canonical(x[i]));
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        const uint32_t pair = rounded_pair<type>(x[i], x[i + 1]);
        if (column(q + i) < n) to[place(q + i)] = Bits(pair);
        if (column(q + i + 1) < n) to[place(q + i + 1)] = Bits(pair >> 16);
      }
    }
  }

  // Calls whole(staged, memory) for the pieces of 16 bytes of the block's part of a row, `one` for the elements at its
  // ends. `cut`: segments end at their own elements; else they take the whole of a piece that they share.
  template <bool cut, class Whole, class One>
  __device__ __forceinline__ void pieces(char *staged, char *row, const Whole &whole, const One &one) const {
    const int shift = shift_of(row);
    char *const memory = row - shift * kSize;
    if constexpr (C == 1) {
      const int behind = (n + shift) / kPiece;  // the piece that ends the row, if any of it is left
      for (int i = t + (shift > 0); i < behind; i += T) whole(staged + 16 * i, memory + 16 * i);
      if (t < 2 * kPiece) {
        const int j = t % kPiece + (t < kPiece ? 0 : behind * kPiece) - shift;
        if (j >= 0 && j < n && (t < kPiece ? shift > 0 : behind > 0 || shift == 0))
          one(staged + (j + shift) * kSize, row + j * kSize);
      }
    } else {
      const int lane = int(threadIdx.x) % kLogicalWarp, pieces = kSegment / kPiece + (shift > 0);
      for (int q = int(threadIdx.x) / kLogicalWarp;; q += T / kLogicalWarp) {
        const int first = kRowLanes * q + kSegment * rank, left = n - first;
        if (left <= 0) break;
        const int low = cut ? 0 : -first, high = cut ? (left < kSegment ? left : kSegment) : left;
        char *const segment = staged + kSegmentRoom * q * kSize;
        for (int i = lane; i < pieces; i += kLogicalWarp) {
          const int j = i * kPiece - shift;  // of the segment
          if (j >= low && j + kPiece <= high) {
            whole(segment + 16 * i, row + (first + j) * kSize);
          } else {
#pragma unroll
            for (int e = 0; e < kPiece; ++e)
              if (j + e >= low && j + e < high) one(segment + (j + e + shift) * kSize, row + (first + j + e) * kSize);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void fetch(char *staged, const char *row) const {
    pieces<false>(
        staged, const_cast<char *>(row), [](char *to, const char *from) { copy_async_16(to, from, 16); },
        [](char *to, const char *from) { *reinterpret_cast<Bits *>(to) = *reinterpret_cast<const Bits *>(from); });
  }
  __device__ __forceinline__ void write(char *staged, char *row) const {
    pieces<true>(
        staged, row,
        [](const char *from, char *to) { *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from); },
        [](const char *from, char *to) { *reinterpret_cast<Bits *>(to) = *reinterpret_cast<const Bits *>(from); });
  }
  // Bytes of shared memory that a team's part of a row of n takes.
  static int bytes(int64_t n) {
    return C == 1 ? int(n / kPiece + 2) * 16 : int(divide_up(n, kRowLanes)) * kSegmentRoom * kSize;
  }

  __device__ __forceinline__ static void meet() {
    if constexpr (T == kLogicalWarp) __syncwarp();
    else __syncthreads();
  }
};

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
  const float max = team_max<T>(most, of_warps);
  Lanes<T, W, 1> lanes[1];
  float sum[1];
  row.turns(0, max, [&](int j, const float(&x)[W]) {
    float exps[W];
    exps_of(x, max, exps);
    row.add(lanes[0], j, exps, Ones());
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
  __shared__ float of_warps[T / kLogicalWarp];
  __shared__ Received<C> received;
  expect_from_cluster(&received.most_arrived, int(sizeof received.most));
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
  expect_from_cluster(&received.sums_arrived, int(sizeof received.sums));
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
  float most = kLowest, lane[1] = {};
  turns(kLowest, [&](int, const float(&x)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) most = larger(most, x[i]);
  });
  const float max = row_max<C, T>(most, of_warps, received, stage.rank);
  turns(max, [&](int first, const float(&x)[kAtOnce]) {
    float exps[kAtOnce];
    exps_of(x, max, exps);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (stage.column(first + i) < stage.n) lane[0] += exps[i];
  });
  finish.known(max, row_sum<C>(lane, received, stage.rank));
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

// Threads that a multiprocessor is to hold, of gradients: with 1024, Blackwell's code spills.
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
  extern __shared__ __align__(16) char shared[];
  __shared__ float of_groups[T / 8];
  __shared__ Received<C> received;
  if constexpr (C > 1) expect_from_cluster(&received.sums_arrived, int(sizeof received.sums));
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
  [[maybe_unused]] StridedLanes<T, K> lanes[1];
  [[maybe_unused]] float lane[1] = {};  // a thread of a cluster has one
  float c[1];
  turns([&](int first, const float(&dy)[K], const float(&y)[K]) {
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const bool inside = stage.column(first + i) < stage.n;
      if constexpr (C == 1) lanes[0].add(i, inside, dy[i], second_of(p, y[i]));
      else if (inside) lane[0] = fmaf(dy[i], second_of(p, y[i]), lane[0]);
    }
  });
  if constexpr (C == 1) join_strided(lanes, of_groups, [](float sum) { return sum; }, c);
  else c[0] = row_sum<C>(lane, received, stage.rank);
  turns([&](int first, float(&dy)[K], float(&y)[K]) {
    gradients_of(p, c[0], dy, y);
    stage.store(dx_staged, dx_shift, first, dy);
  });
  S::meet();
  stage.write(dx_staged, dx_row);
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int64_t kMostRows = int64_t(1) << 27;

// Whether the shared memory of a block holds `parts` rows of n of a team, one of `sharing` that share a row.
inline bool rows_fit(int parts, int64_t n, Type type, int sharing, int device) {
  constexpr int64_t kStatic = 4 << 10, kRoom = 16;  // of each 256 elements
  const int64_t elements = divide_up(n, kRowLanes) * kRowLanes / sharing;
  return parts * (elements * size_of(type) + elements / 256 * kRoom + 32) + kStatic <= gpu_shared_bytes(device);
}

int64_t bytes_of_row(const Softmax &p) { return bytes_of_staged(p.n, p.x.type); }

// By blocks of 256 threads with up to eight elements each in a turn: shorter rows are other kernels'.
constexpr int64_t kLongestOfBlock = 16384;
template <int C> pydet_status launch_staged(const char *name, const SoftmaxBackward &p) {
  return by_type(name, p, p.dy.type, [&](auto type) {
    using S = Stage<type, kMaxTeam, C>;
    const int bytes = S::bytes(p.n), dx_bytes = rows_agree(p.dx, p.dy, 16) ? 0 : bytes;
    return launch(blocks_of(name, p, unsigned(p.rows * C), S::kBlock, 2 * bytes + dx_bytes, C),
                  softmax_backward_staged_kernel<type, kMaxTeam, 8, C>, p, bytes, dx_bytes);
  });
}

}  // namespace

bool softmax_staged_takes(const Softmax &p) {
  constexpr int64_t kStatic = 4 << 10;
  return p.rows <= kMostRows && bytes_of_row(p) + kStatic <= gpu_shared_bytes(p.device.id);
}

// Of aligned rows those of more than 8192 elements, where there are many and a multiprocessor holds two: on an H100
// 12932x8792 254 us, held in registers 522.
bool softmax_staged_prefers(const Softmax &p) {
  return (!rows_whole(p) && p.n > kLongestSingly) || (p.n > 8192 && p.rows > 132 && bytes_of_row(p) <= 110 << 10);
}

pydet_status softmax_staged(const Softmax &p) {
  const char *name = "softmax_staged";
  return by_type(name, p, p.x.type, [&](auto type) {
    return launch(blocks_of(name, p, unsigned(p.rows), kMaxTeam, int(bytes_of_row(p))),
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
  const char *name = "softmax_cluster";
  return by_type(name, p, p.x.type, [&](auto type) {
    const int bytes = Stage<type, kMaxTeam, kRanks>::bytes(p.n), y_bytes = rows_agree(p.y, p.x, 16) ? 0 : bytes;
    return launch(blocks_of(name, p, unsigned(p.rows * kRanks), kMaxTeam, bytes + y_bytes, kRanks),
                  softmax_cluster_kernel<type>, p, bytes, y_bytes);
  });
}

bool softmax_backward_staged_takes(const SoftmaxBackward &p) {
  return p.n <= kLongestOfBlock && p.rows <= kMostRows && rows_fit(3, p.n, p.dy.type, 1, p.device.id);
}

pydet_status softmax_backward_staged(const SoftmaxBackward &p) {
  return launch_staged<1>("softmax_backward_staged", p);
}

bool softmax_backward_cluster_takes(const SoftmaxBackward &p) {
  return p.rows <= kMostRows && rows_fit(3, p.n, p.dy.type, kRanks, p.device.id);
}
bool softmax_backward_cluster_prefers(const SoftmaxBackward &p) {
  return p.n > kLongestOfBlock || (p.rows <= 32 && p.n > 8192);
}

pydet_status softmax_backward_cluster(const SoftmaxBackward &p) {
  return launch_staged<kRanks>("softmax_backward_cluster", p);
}

}  // namespace pydet
