// Softmax and its gradients of short rows that begin anywhere, in fp32 (NUMERICS.md, "Softmax"): the CPU's bits. The
// formulas are those of softmax.cu.
//
// A team of at most a warp holds a row in registers. Each thread reads whole vectors of memory (norm_pieces.h). With
// what the thread behind it has read it makes the elements of its lanes; with the results of the one before it, what it
// writes. So operands may lie differently far behind a whole vector.

#include "gpu/any/norm_pieces.h"
#include "gpu/any/softmax_row.h"
#include "gpu/kernels.h"

namespace pydet {
namespace {

constexpr int kBlock = 128, W = kVector;
constexpr int kLongest = 32 * 8 * W - (W - 1);  // a row may lie in one vector more than it fills

template <Type type> using Piece = Packed<type, W>;

// What another thread of the team holds.
template <int T, Type type> __device__ __forceinline__ Piece<type> from_thread(const Piece<type> &piece, int thread) {
  Piece<type> result;
#pragma unroll
  for (int i = 0; i < Piece<type>::kBytes / 4; ++i)
    result.word[i] = __shfl_sync(0xFFFFFFFFu, piece.word[i], thread & (T - 1), T);
  return result;
}

// By words: a choice between two structures would be one between places in memory.
template <Type type>
__device__ __forceinline__ Piece<type> choose(bool first, const Piece<type> &one, const Piece<type> &other) {
  Piece<type> result;
#pragma unroll
  for (int i = 0; i < Piece<type>::kBytes / 4; ++i) result.word[i] = first ? one.word[i] : other.word[i];
  return result;
}

// A thread of a team, and its vectors of a row of n.
template <Type type, int T, int V> struct Team {
  int t, n;
  bool before, behind;  // whether there are rows to read there

  __device__ __forceinline__ Team(int64_t columns, int64_t r, int64_t last, bool ascend)
      : t(int(threadIdx.x) % T), n(int(columns)), before(ascend && r > 0), behind(ascend && r < last) {}

  __device__ __forceinline__ int column(int v) const { return W * (t + T * v); }
  // Whether any thread has elements in its vectors v, of a row that lies in one more.
  __device__ __forceinline__ bool reaches(int v) const { return W * T * v < n + W - 1; }

  // The thread's elements of a row.
  __device__ __forceinline__ void load(const char *row, Piece<type> (&x)[V]) const {
    const int shift = shift_of<type, W>(row);
#pragma unroll
    for (int v = 0; v < V; ++v) x[v] = load_piece<type, W>(row, reaches(v) ? column(v) - shift : n, n, before, behind);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!reaches(v)) continue;
      // The team's last thread needs the first one's next vector.
      const Piece<type> given = choose<type>(t > 0, x[v], x[v + 1 < V ? v + 1 : v]);
      x[v] = window<type, W>(x[v], from_thread<T, type>(given, t + 1), shift);
    }
  }
  // Writes them.
  __device__ __forceinline__ void store(char *row, const Piece<type> (&y)[V], bool there) const {
    const int shift = shift_of<type, W>(row);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!reaches(v)) continue;
      const Piece<type> given = choose<type>(t < T - 1, y[v], y[v > 0 ? v - 1 : 0]);
      const Piece<type> previous = choose<type>(shift, from_thread<T, type>(given, t - 1), y[v]);
      const Piece<type> piece = window<type, W>(previous, y[v], (W - shift) & (W - 1));
      if (there) store_piece<type, W>(row, column(v) - shift, n, piece);
    }
  }
};

template <int T> __device__ __forceinline__ float most_of_team(float most) {
#pragma unroll
  for (int apart = T / 2; apart > 0; apart /= 2) most = fmaxf(most, gpu_shfl_xor(most, apart, T));
  return most + 0.0f;  // which zero is the largest would depend on the order
}

template <Type type, int T, int V>
__global__ void __launch_bounds__(kBlock) softmax_shifted_kernel(const __grid_constant__ Softmax p, bool ascend) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t mine = int64_t(blockIdx.x) * (kBlock / T) + threadIdx.x / T, last = p.rows - 1;
  const int64_t r = mine <= last ? mine : last;
  const RowIndex where = row_index(p.inner, r);
  const Team<type, T, V> team(p.n, r, last, ascend);
  const char *const x_row = row_at(p.x, size_of(type), where);
  Piece<type> packed[V];
  team.load(x_row, packed);
  Finish finish(p, r);

  float x[V][W], most = kLowest, ones[W], sum[1];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (!team.reaches(v)) continue;
    const int left = team.n - team.column(v);
    unpack(packed[v], x[v]);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      ones[e] = 1.0f;
      if (e > 0) x[v][e] = e < left ? x[v][e] : x[v][0];  // one of the row, once more
      if (left > 0) most = fmaxf(most, x[v][e]);
    }
  }
  const float max = most_of_team<T>(most);
  Lanes<T, W, V> lanes[1];
  bool normal[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int left = team.n - team.column(v);
    normal[v] = true;
    if (left <= 0) continue;
    float exps[W];
    normal[v] = exps_of(x[v], max, exps);
    add_left_of(lanes[0], v, left, exps, ones);
    if (p.kind == SoftmaxKind::log_softmax) continue;
#pragma unroll
    for (int e = 0; e < W; ++e) x[v][e] = exps[e];
  }
  join(lanes, static_cast<float *>(nullptr), [](float s) { return s; }, sum);
  finish.known(max, sum[0]);
  if (p.kind == SoftmaxKind::log_prob) {
    if (mine <= last && team.t == 0) finish.store_log_prob(x_row);
    return;
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
    packed[v] = {};
    if (team.column(v) >= team.n) continue;
    float y[W];
#pragma unroll
    for (int e = 0; e < W; ++e) y[e] = x[v][e];
    finish.elements<1>(team.column(v), x[v], normal[v], y);
    packed[v] = pack<type>(y);
  }
  team.store(row_at(p.y, size_of(type), where), packed, mine <= last);
}

template <Type type, int T, int V>
__global__ void __launch_bounds__(kBlock)
    softmax_backward_shifted_kernel(const __grid_constant__ SoftmaxBackward p, bool ascend) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t mine = int64_t(blockIdx.x) * (kBlock / T) + threadIdx.x / T, last = p.rows - 1;
  const int64_t r = mine <= last ? mine : last;
  const RowIndex where = row_index(p.inner, r);
  const Team<type, T, V> team(p.n, r, last, ascend);
  Piece<type> dy[V], y[V];
  team.load(row_at(p.dy, size_of(type), where), dy);
  team.load(row_at(p.y, size_of(type), where), y);
  Lanes<T, W, V> lanes[1];
  float c[1];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int left = team.n - team.column(v);
    if (left <= 0) continue;
    float first[W], second[W];
    unpack(dy[v], first);
    unpack(y[v], second);
#pragma unroll
    for (int e = 0; e < W; ++e) second[e] = second_of(p, second[e]);
    add_left_of(lanes[0], v, left, first, second);
  }
  join(lanes, static_cast<float *>(nullptr), [](float s) { return s; }, c);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (team.column(v) >= team.n) continue;
    float first[W], second[W];
    unpack(dy[v], first);
    unpack(y[v], second);
    gradients_of(p, c[0], first, second);
    dy[v] = pack<type>(first);
  }
  team.store(row_at(p.dx, size_of(type), where), dy, mine <= last);
}

// ---- Host --------------------------------------------------------------------------------------------------------

// Calls f with a team that holds the vectors of memory in which a row of n may lie.
template <class F> pydet_status with_shape(int64_t n, const F &f) {
  const int64_t most = n + W - 1;
  if (most <= 8 * 8) return f(RowShape<8, 8, 1, 1>{});
  if (most <= 16 * 8) return f(RowShape<16, 8, 1, 1>{});
  if (most <= 16 * 16) return f(RowShape<16, 8, 2, 1>{});
  if (most <= 16 * 32) return f(RowShape<16, 8, 4, 1>{});
  if (most <= 32 * 32) return f(RowShape<32, 8, 4, 1>{});
  return f(RowShape<32, 8, 8, 1>{});
}

bool holds(int64_t rows, int64_t n) {
  constexpr int64_t kMostRows = int64_t(1) << 31;
  return n <= kLongest && rows <= kMostRows;
}
bool whole(const Rows &rows, int64_t n) { return n % W == 0 && rows_aligned(rows); }
// Not few rows of many warps' work. Measured on an H100, us, softmax here and by softmax_staged: 60x777 3.9 and 2.4,
// 64x2041 7.5 and 2.7, 600x777 4.7 and 6.4, 49696x1381 239 and 388.
bool fills_warps(int64_t rows, int64_t n) { return n <= 256 || rows > 512; }

template <int T, class Problem> Launch grid_of_teams(const char *name, const Problem &p) {
  Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(divide_up(p.rows, kBlock / T))), dim3(kBlock)};
  where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
  return where;
}

}  // namespace

bool softmax_shifted_takes(const Softmax &p) { return holds(p.rows, p.n); }
bool softmax_shifted_prefers(const Softmax &p) {
  return fills_warps(p.rows, p.n) && (!whole(p.x, p.n) || !whole(p.y, p.n));
}

pydet_status softmax_shifted(const Softmax &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("softmax_shifted", guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return with_shape(p.n, [&](auto shape) {
      return launch(grid_of_teams<shape.T>("softmax_shifted", p), softmax_shifted_kernel<type, shape.T, shape.V>, p,
                    rows_ascend(p.x, p.inner, p.rows, p.n));
    });
  });
}

bool softmax_backward_shifted_takes(const SoftmaxBackward &p) { return holds(p.rows, p.n); }
bool softmax_backward_shifted_prefers(const SoftmaxBackward &p) {
  return fills_warps(p.rows, p.n) && (!whole(p.dy, p.n) || !whole(p.y, p.n) || !whole(p.dx, p.n));
}

pydet_status softmax_backward_shifted(const SoftmaxBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("softmax_backward_shifted", guard.error());
  return with_type<kUnscaledTypes>(p.dy.type, [&](auto type) {
    return with_shape(p.n, [&](auto shape) {
      return launch(grid_of_teams<shape.T>("softmax_backward_shifted", p),
                    softmax_backward_shifted_kernel<type, shape.T, shape.V>, p,
                    rows_ascend(p.dy, p.inner, p.rows, p.n) && rows_ascend(p.y, p.inner, p.rows, p.n));
    });
  });
}

}  // namespace pydet
