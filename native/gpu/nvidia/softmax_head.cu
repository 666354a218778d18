// The gradient of log_prob of long rows, as the head of a language model asks for it, in fp32 (NUMERICS.md, "Softmax"): the
// CPU's bits.
//
//   dx = round(fmaf(-(e / s), g, j = index ? g : 0)),   and log_prob = (x[index] - m) - log(s) beside it where it is asked for
//
// As in softmax_spread.cu a cluster of C blocks holds a row, which is read once, in registers, and its exps of the first S
// vectors of 2048 columns in shared memory. dx may take the place of x, and rows may lie in slabs of columns. Rows begin
// and end at whole pieces of W elements.

#include "gpu/kernels.h"
#include "gpu/nvidia/softmax_cluster.h"

// Kernels of other machines are empty, as softmax_spread.cu's are.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ / 100 == 9
#define PYDET_HOPPER 1
#endif

namespace pydet {
namespace {

#if defined(PYDET_HOPPER)
// Where a thread's pieces of a row lie, those of all vectors in ascending order, from its column `first` on.
struct WholeRow {
  char *at;
  __device__ __forceinline__ WholeRow(const Softmax &p, const Rows &rows, int size, int64_t r, int first)
      : at(row_at(rows, size, p.inner, r) + first * size) {}
  __device__ __forceinline__ char *next(int size) {
    char *const piece = at;
    at += kRowLanes * size;
    return piece;
  }
};
// Without a branch, behind which a load would be waited for before the next one: 7.1 ms for 2.1.
struct RowInSlabs {
  char *at, *behind;  // `behind`: in the slab behind this one
  int64_t apart;
  int vectors, left;  // of a slab, and of this one
  __device__ __forceinline__ RowInSlabs(const Softmax &p, const Rows &, int size, int64_t r, int first)
      : at(slab_row(p, 0, r) + first * size),
        behind(slab_row(p, 1, r) + first * size),
        apart(p.slabs.bytes),
        vectors(int(p.slabs.columns) / kRowLanes),
        left(vectors) {}
  __device__ __forceinline__ char *next(int size) {
    const bool ends = left == 0;
    char *const piece = ends ? behind : at;
    behind += ends ? apart : 0;
    left = (ends ? vectors : left) - 1;
    at = piece + kRowLanes * size;
    return piece;
  }
};
static_assert(kSlabColumns % kRowLanes == 0, "a vector lies in one slab");
#endif

// x[column] of row r.
template <bool slabs> __device__ __forceinline__ float element_of(const Softmax &p, int64_t r, int column) {
  if constexpr (!slabs) return load_f32(row_at(p.x, size_of(p.x.type), p.inner, r), p.x.type, column);
  const int columns = int(p.slabs.columns), slab = column / columns;
  return load_f32(slab_row(p, slab, r), p.x.type, column - slab * columns);
}

// Gradients of some columns from their exps, rounded, as they lie in memory; `asked`: which of them is the column that is
// asked for, or -1. Where one is rounded to 16 bits, its products with the numbers next to 1 / s enclose e / s, and what is
// made of them does not fall where that grows, or does not grow: where both round to one y, that is it.
template <Type type, int N>
__device__ __forceinline__ void rounded_gradients(const Finish &finish, int asked, float (&exps)[N],
                                                  uint32_t (&y)[N * size_of(type) / 4]) {
  const float g = finish.gradient;
  if constexpr (size_of(type) == 4) {
    finish.quotients(exps, exps);
#pragma unroll
    for (int e = 0; e < N; ++e) exps[e] = finish.index < 0 ? 0.0f : fmaf(-exps[e], g, e == asked ? g : 0.0f);
    round_words<type>(exps, y);
  } else {
    const float low = finish.reciprocal * (1.0f - 0x1p-23f), high = finish.reciprocal * (1.0f + 0x1p-23f);
    uint32_t differ = asked >= 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const auto pair = [&](float inverse) {
        return rounded_pair<type>(fmaf(-(exps[2 * i] * inverse), g, 0.0f), fmaf(-(exps[2 * i + 1] * inverse), g, 0.0f));
      };
      y[i] = pair(low);
      differ |= y[i] ^ pair(high);
    }
    if (differ)
#pragma unroll
      for (int i = 0; i < N / 2; ++i)
        y[i] = rounded_pair<type>(fmaf(-(exps[2 * i] / finish.sum), g, asked == 2 * i ? g : 0.0f),
                                  fmaf(-(exps[2 * i + 1] / finish.sum), g, asked == 2 * i + 1 ? g : 0.0f));
    if (finish.index < 0)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) y[i] = 0;
  }
}

// Blocks that a multiprocessor is to hold, by the registers in which a thread keeps elements.
constexpr int blocks_for(int kept, int threads) {
  const int at_once = kept <= 24 ? 1024 : kept <= 56 ? 640 : kept <= 72 ? 512 : kept <= 120 ? 384 : 256;
  return at_once / threads;
}

template <Type type, int C, int W, int V, int S, int kAtOnce, bool slabs>
__global__ void __launch_bounds__(kRowLanes / (W * C), blocks_for((V - S) * W, kRowLanes / (W * C)))
    softmax_head_kernel(const __grid_constant__ Softmax p) {
#if defined(PYDET_HOPPER)
  constexpr int T = kRowLanes / (W * C), kSize = size_of(type), kWords = W * kSize / 4, N = kAtOnce * W;
  static_assert(C > 1 && V % kAtOnce == 0 && S % kAtOnce == 0);  // vectors whose steps are computed together
  using Row = std::conditional_t<slabs, RowInSlabs, WholeRow>;
  using Piece = Packed<type, W>;
  __shared__ float of_warps[T / kLogicalWarp];
  __shared__ Received<C> received;
  __shared__ Packed<Type::f32, W> staged[S == 0 ? 1 : S][T];
  expect_from_cluster(&received.most_arrived, int(sizeof received.most));
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int rank = int(blockIdx.x) % C, n = int(p.n), t = int(threadIdx.x), first = W * (T * rank + t);
  const int64_t r = blockIdx.x / C;
  Piece x[V];
  Row x_row(p, p.x, kSize, r, first);
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) x[v].word[i] = kLowestWord<type>;
    const char *const from = x_row.next(kSize);
    if (first + kRowLanes * v < n) x[v] = *reinterpret_cast<const Piece *>(from);
  }
  Finish finish(p, r);
  // What log_prob is of is read before dx takes its place: it is one of those whose maximum is sent.
  const bool stores = p.log_prob.data && rank == 0 && t == 0;
  const float asked = stores && finish.index >= 0 ? element_of<slabs>(p, r, int(finish.index)) : kLowest;
  meet_cluster();
  expect_from_cluster(&received.sums_arrived, int(sizeof received.sums));

  float tops[W], most = asked;
  tops_of(x, tops);
#pragma unroll
  for (int e = 0; e < W; ++e) most = larger(most, tops[e]);
  const float max = row_max<C, T>(most, of_warps, received, rank);

  float lane[W] = {}, kept[V - S][W];
  add_exps<kAtOnce>(x, max, n, lane, [&](int v, const float(&exps)[W]) {
    Packed<Type::f32, W> bits;
#pragma unroll
    for (int e = 0; e < W; ++e) {
      bits.word[e] = bits_of(exps[e]);
      if (v >= S) kept[v >= S ? v - S : 0][e] = exps[e];
    }
    if (v < S) staged[v < S ? v : 0][t] = bits;
  });
  finish.known(max, row_sum<C, W>(lane, received, rank));
  if (stores) {
    const float found = finish.index < 0 ? float_of(kNanF32) : asked;
    reinterpret_cast<float *>(p.log_prob.data)[r] = canonical((found - max) - log_f32(finish.sum));
  }

  Row y_row(p, p.y, kSize, r, first);
  // The column that is asked for, if the thread has it: in which of its vectors, and where there.
  const int behind = int(finish.index) - first, place = behind % kRowLanes;
  const int vector = finish.index >= 0 && behind >= 0 && place < W ? behind / kRowLanes : V;
#pragma unroll
  for (int v = 0; v < V; v += kAtOnce) {
    if (v > 0 && kRowLanes * v >= n) continue;
    float one[N];
    Packed<type, N> y;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float exps[W];
      if (v < S) {
        unpack(staged[v < S ? v + i : 0][t], exps);
      } else {
#pragma unroll
        for (int e = 0; e < W; ++e) exps[e] = kept[v >= S ? v + i - S : 0][e];
      }
#pragma unroll
      for (int e = 0; e < W; ++e) one[i * W + e] = exps[e];
    }
    const bool here = vector >= v && vector < v + kAtOnce;
    rounded_gradients<type>(finish, here ? (vector - v) * W + place : -1, one, y.word);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      Piece piece;
#pragma unroll
      for (int k = 0; k < kWords; ++k) piece.word[k] = y.word[i * kWords + k];
      char *const to = y_row.next(kSize);
      if (first + kRowLanes * (v + i) < n) *reinterpret_cast<Piece *>(to) = piece;
    }
  }
#endif
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int64_t kMostRows = int64_t(1) << 27, kShortest = 8 * kRowLanes, kLongest = 76 * kRowLanes;
constexpr int64_t kShortestInSlabs = 16 * kRowLanes;

template <int C, int W, int V, int S, int kAtOnce, class Type>
pydet_status launch_head(const char *name, const Softmax &p, Type type) {
  const Launch where = blocks_of(name, p, unsigned(p.rows * C), kRowLanes / (W * C), 0, C);
  constexpr int kStaged = size_of(Type()) == 4 ? 0 : S;
  if constexpr (size_of(Type()) == 2 && V * kRowLanes > kShortestInSlabs)
    if (p.slabs.columns) return launch(where, softmax_head_kernel<type, C, W, V, kStaged, kAtOnce, true>, p);
  return launch(where, softmax_head_kernel<type, C, W, V, kStaged, kAtOnce, false>, p);
}

}  // namespace

bool softmax_head_takes(const Softmax &p) {
  if (p.kind != SoftmaxKind::log_prob_backward || p.n > kLongest || p.rows > kMostRows) return false;
  if (p.slabs.columns) return size_of(p.x.type) == 2 && p.n % kRowLaneElements == 0 && p.n > kShortestInSlabs;
  return rows_whole(p) && p.n > kShortest;
}

// What no other kernel takes; and long rows, which softmax_spread, or where they are few softmax_cluster, make slower: on
// an H200 (tools/rows_sweep.py) 65x45712 takes 9.9 us here and 15.5 there, 1802x72248 294 and 351, 21x67608 8.6 and 11.4,
// but 15x24672 5.1 and 4.5.
bool softmax_head_prefers(const Softmax &p) {
  return p.log_prob.data || p.slabs.columns || p.rows > 24 || p.n > 16 * kRowLanes;
}

pydet_status softmax_head(const Softmax &p) {
  const char *name = "softmax_head";
  return by_type(name, p, p.x.type, [&](auto type) {
    if (p.n <= 16 * kRowLanes) return launch_head<4, 4, 16, 8, 2>(name, p, type);
    if (p.n <= 32 * kRowLanes) return launch_head<8, 2, 32, 16, 4>(name, p, type);
    if (p.n <= 64 * kRowLanes) return launch_head<8, 2, 64, 32, 4>(name, p, type);
    return launch_head<8, 2, 76, 40, 4>(name, p, type);
  });
}

}  // namespace pydet
