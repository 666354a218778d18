// Softmax of long rows, held in the registers of a cluster's blocks, in fp32 (NUMERICS.md, "Softmax"): the CPU's bits.
//
// C blocks share a row, which is read once: of each 2048 elements block c has those of 256 / C groups of lanes, and a
// thread W adjacent ones, V times. The blocks send each other (cluster.h) the largest of theirs, then the sums of their
// groups. exp is computed once and kept as fp32, for some vectors in shared memory, so that more rows are on their way.
// Of log_softmax x is kept as it lies in memory, and so are dy and y of gradients.

#include "gpu/kernels.h"
#include "gpu/nvidia/softmax_cluster.h"

// Kernels of other machines are empty: Blackwell's would spill.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ / 100 == 9
#define PYDET_HOPPER 1
#endif

namespace pydet {
namespace {

// What becomes of some pieces of a row, from the v-th on: `one` has exps, or x for logarithms.
template <Type type, int W, bool whole, int N>
__device__ __forceinline__ void store_results(const Finish &finish, bool log, char *row, int first, int n, int v,
                                              float (&one)[N]) {
  Packed<type, N> y;
  if (log) {
    finish.logarithms(one);
    round_words<type>(one, y.word);
  } else if (finish.p.kind == SoftmaxKind::log_prob_backward) {
    finish.quotients(one, one);
#pragma unroll
    for (int i = 0; i < N; ++i) one[i] = finish.gradient_of(first + kRowLanes * (v + i / W) + i % W, one[i]);
    round_words<type>(one, y.word);
  } else if constexpr (size_of(type) == 2) {
    finish.rounded_quotients<type>(one, y.word);
  } else {
    finish.quotients(one, one);
    round_words<type>(one, y.word);
  }
  store_pieces<type, W, whole>(row, first, n, v, y);
}

constexpr int more_of(int a, int b) { return a > b ? a : b; }

// Threads that a multiprocessor is to hold, by the registers in which each of them keeps elements.
constexpr int threads_for(int kept) {
  return kept <= 16 ? 1280 : kept <= 32 ? 1024 : kept <= 64 ? 640 : kept <= 80 ? 512 : kept <= 128 ? 384 : 256;
}

template <Type type, int C, int W, int V, int S, bool log, bool whole> struct Registers {
  static constexpr int T = kRowLanes / (W * C), kOfX = whole ? V * W * size_of(type) / 4 : V * W;
  static constexpr int kMost = log ? kOfX : more_of(kOfX, (V - S) * W);
  static constexpr int kBlocks = more_of(threads_for(kMost) / T, 1);
};

// The exps of the first S vectors are kept in shared memory. `whole`: rows begin and end at whole pieces of W elements.
template <Type type, int C, int W, int V, int S, int kAtOnce, bool log, bool whole>
__global__ void __launch_bounds__(kRowLanes / (W * C), Registers<type, C, W, V, S, log, whole>::kBlocks)
    softmax_spread_kernel(const __grid_constant__ Softmax p) {
#if defined(PYDET_HOPPER)
  constexpr int T = kRowLanes / (W * C), kSize = size_of(type), N = kAtOnce * W;
  static_assert(V % kAtOnce == 0 && S % kAtOnce == 0);  // vectors whose steps are computed together
  __shared__ float of_warps[T / kLogicalWarp];
  __shared__ Received<C> received;
  extern __shared__ __align__(16) char shared[];
  Packed<Type::f32, W> *const staged = reinterpret_cast<Packed<Type::f32, W> *>(shared) + threadIdx.x;
  if constexpr (C > 1) expect_from_cluster(&received.most_arrived, int(sizeof received.most));
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int rank = int(blockIdx.x) % C, n = int(p.n), t = int(threadIdx.x);
  const int64_t r = blockIdx.x / C;
  const RowIndex where = row_index(p.inner, r);
  const char *const x_row = row_at(p.x, kSize, where);
  const int first = W * (T * rank + t);  // the thread's column
  Packed<type, W> x[V];
  load_pieces<type, W, V, whole>(x_row, first, n, kLowestWord<type>, x);
  Finish finish(p, r, log);
  if constexpr (C > 1) {
    meet_cluster();
    expect_from_cluster(&received.sums_arrived, int(sizeof received.sums));
  }

  float tops[W], max;
  tops_of(x, tops);
  max = tops[0];
#pragma unroll
  for (int e = 1; e < W; ++e) max = larger(max, tops[e]);
  max = row_max<C, T>(max, of_warps, received, rank);

  float lane[W] = {}, kept[log ? 1 : V - S][W];
  add_exps<kAtOnce>(x, max, n, lane, [&](int v, const float(&exps)[W]) {
    if constexpr (!log) {
      Packed<Type::f32, W> bits;
#pragma unroll
      for (int e = 0; e < W; ++e) {
        bits.word[e] = bits_of(exps[e]);
        if (v >= S) kept[v >= S ? v - S : 0][e] = exps[e];
      }
      if (v < S) staged[v * T] = bits;
    }
  });
  const float sum = row_sum<C, W>(lane, received, rank);
  if constexpr (!log) finish.ask();  // not before: there are no registers
  finish.known(max, sum);
  if (p.kind == SoftmaxKind::log_prob) {
    if (rank == 0 && t == 0) finish.store_log_prob(x_row);
    return;
  }

  char *const y_row = row_at(p.y, kSize, where);
#pragma unroll
  for (int v = 0; v < V; v += kAtOnce) {
    if (v > 0 && kRowLanes * v >= n) continue;
    float one[N];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float of_vector[W];
      if constexpr (log) {
        unpack(x[v + i], of_vector);
      } else if (v < S) {
        unpack(staged[(v + i) * T], of_vector);
      } else {
#pragma unroll
        for (int e = 0; e < W; ++e) of_vector[e] = kept[v >= S ? v + i - S : 0][e];
      }
#pragma unroll
      for (int e = 0; e < W; ++e) one[i * W + e] = of_vector[e];
    }
    store_results<type, W, whole>(finish, log, y_row, first, n, v, one);
  }
#endif
}

// Gradients. A row of dy and y is held as it lies in memory.
template <Type type, int C, int W, int V, int kAtOnce, bool log>
__global__ void __launch_bounds__(kRowLanes / (W * C), Registers<type, C, W, 2 * V, 0, true, true>::kBlocks)
    softmax_backward_spread_kernel(const __grid_constant__ SoftmaxBackward p) {
#if defined(PYDET_HOPPER)
  SoftmaxBackward kind;
  kind.log = log;
  constexpr int T = kRowLanes / (W * C), kSize = size_of(type), N = kAtOnce * W;
  constexpr uint32_t kMinusZero = type == Type::f32 ? 0x80000000u : 0x80008000u;
  __shared__ Received<C> received;
  if constexpr (C > 1) expect_from_cluster(&received.sums_arrived, int(sizeof received.sums));
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int rank = int(blockIdx.x) % C, n = int(p.n), first = W * (T * rank + int(threadIdx.x));
  const RowIndex where = row_index(p.inner, blockIdx.x / C);
  Packed<type, W> dy[V], y[V];  // past the row's end their product is -0, which changes no lane
  load_pieces<type, W, V, true>(row_at(p.dy, kSize, where), first, n, kMinusZero, dy);
  load_pieces<type, W, V, true>(row_at(p.y, kSize, where), first, n, 0, y);
  float lane[W] = {};
#pragma unroll
  for (int v = 0; v < V; v += kAtOnce) {
    if (v > 0 && kRowLanes * v >= n) continue;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float dy_of[W], y_of[W];
      unpack(dy[v + i], dy_of);
      unpack(y[v + i], y_of);
#pragma unroll
      for (int e = 0; e < W; ++e) lane[e] = fmaf(dy_of[e], second_of(kind, y_of[e]), lane[e]);
    }
  }
  const float c = row_sum<C, W>(lane, received, rank);
#pragma unroll
  for (int v = 0; v < V; ++v)  // else the numbers are kept beside the words
#pragma unroll
    for (int i = 0; i < W * kSize / 4; ++i) make_opaque(dy[v].word[i]), make_opaque(y[v].word[i]);
  char *const dx_row = row_at(p.dx, kSize, where);
#pragma unroll
  for (int v = 0; v < V; v += kAtOnce) {
    if (v > 0 && kRowLanes * v >= n) continue;
    float dy_of[N], y_of[N];
    unpack_pieces(dy, v, dy_of);
    unpack_pieces(y, v, y_of);
    gradients_of(kind, c, dy_of, y_of);
    Packed<type, N> dx;
    round_words<type>(dy_of, dx.word);
    store_pieces<type, W, true>(dx_row, first, n, v, dx);
  }
#endif
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int64_t kMostRows = int64_t(1) << 27;

template <int blocks, int elements, int vectors, int shared, int at_once> struct Spread {
  static constexpr int C = blocks, W = elements, V = vectors, S = shared, kAtOnce = at_once, T = kRowLanes / (W * C);
  static constexpr int holds() { return V * kRowLanes; }
};
constexpr int64_t kLongest = 76 * kRowLanes;

// Calls f with the cluster for rows of n, which are whole pieces of its W elements, or are read and written one by one.
// Few rows are spread over more threads; where there are many, what they keep in shared memory lets more rows be held.
template <class F> pydet_status with_cluster(int64_t rows, int64_t n, const F &f) {
  if (n <= 2 * kRowLanes) return f(Spread<1, 8, 2, 0, 1>{});
  if (n <= 4 * kRowLanes) return rows <= 112 ? f(Spread<4, 4, 4, 0, 1>{}) : f(Spread<1, 8, 4, 0, 1>{});
  if (n <= 8 * kRowLanes) {
    if (rows <= 40) return f(Spread<8, 2, 8, 0, 2>{});
    return rows <= 120 ? f(Spread<4, 4, 8, 0, 2>{}) : f(Spread<2, 8, 8, 0, 1>{});
  }
  if (n <= 16 * kRowLanes) return rows <= 150 ? f(Spread<8, 2, 16, 0, 4>{}) : f(Spread<4, 4, 16, 8, 2>{});
  return with_first<Spread<8, 2, 32, 16, 4>, Spread<8, 2, 64, 32, 4>, Spread<8, 2, 76, 36, 4>>(n, f);
}
template <class F> pydet_status with_cluster_of_singles(int64_t n, const F &f) {
  return with_first<Spread<8, 2, 8, 0, 2>, Spread<8, 2, 16, 0, 4>, Spread<8, 2, 32, 0, 4>, Spread<8, 2, 64, 0, 4>,
                    Spread<8, 2, 76, 0, 4>>(n, f);
}
template <class F> pydet_status with_gradient_cluster(int64_t n, const F &f) {
  return with_first<Spread<2, 8, 4, 0, 1>, Spread<4, 4, 8, 0, 1>, Spread<4, 4, 16, 0, 1>, Spread<4, 4, 32, 0, 1>>(n, f);
}

template <class Shape, class Problem>
pydet_status launch_spread(const char *name, const Problem &p, Shape, int shared_bytes, void (*kernel)(Problem)) {
  return launch(blocks_of(name, p, unsigned(p.rows * Shape::C), Shape::T, shared_bytes, Shape::C), kernel, p);
}

}  // namespace

bool softmax_spread_takes(const Softmax &p) { return p.n <= kLongest && p.rows <= kMostRows; }

// On an H100 (tools/rows_sweep.py). Half as long again by the others are 1024x128256 and 2048x50304, but 16384x2048 takes
// 67 us and 59 in a block's registers. log_prob's gradient asks for its column late: few rows lose.
bool softmax_spread_prefers(const Softmax &p) {
  const bool whole = rows_whole(p), log = p.kind == SoftmaxKind::log_softmax || p.kind == SoftmaxKind::log_prob;
  if (p.kind == SoftmaxKind::log_prob_backward) return p.rows > 24 && p.n > (whole ? 2 : 4) * kRowLanes;
  const bool few = p.kind != SoftmaxKind::log_prob && p.rows <= (p.n > kRowLanes / 2 ? 260 : 100);
  if (whole) return p.n > kRowLanes || few;
  if (p.rows <= 32 && p.n > 2 * kRowLanes) return true;
  return p.n > 4 * kRowLanes && (!log || p.rows < 1000 || p.n > 45 * kRowLanes);
}

pydet_status softmax_spread(const Softmax &p) {
  const char *name = "softmax_spread";
  return by_type(name, p, p.x.type, [&](auto type) {
    auto run = [&](auto shape, auto in_pieces) {
      constexpr int C = shape.C, W = shape.W, V = shape.V, S = type == Type::f32 ? 0 : shape.S, A = shape.kAtOnce;
      const bool log = p.kind == SoftmaxKind::log_softmax || p.kind == SoftmaxKind::log_prob;
      return log ? launch_spread(name, p, shape, 0, softmax_spread_kernel<type, C, W, V, 0, A, true, in_pieces>)
                 : launch_spread(name, p, shape, S * shape.T * W * 4,
                                 softmax_spread_kernel<type, C, W, V, S, A, false, in_pieces>);
    };
    if (rows_whole(p)) return with_cluster(p.rows, p.n, [&](auto shape) { return run(shape, std::true_type{}); });
    return with_cluster_of_singles(p.n, [&](auto shape) { return run(shape, std::false_type{}); });
  });
}

bool softmax_backward_spread_takes(const SoftmaxBackward &p) {
  return rows_whole(p) && p.n <= (p.dy.type == Type::f32 ? 16 : 32) * kRowLanes && p.rows <= kMostRows;
}
bool softmax_backward_spread_prefers(const SoftmaxBackward &p) {
  return p.n > 2 * kRowLanes && !(p.log && p.rows <= 24 && p.n > 8 * kRowLanes);
}

pydet_status softmax_backward_spread(const SoftmaxBackward &p) {
  const char *name = "softmax_backward_spread";
  return by_type(name, p, p.dy.type, [&](auto type) {
    return with_gradient_cluster(p.n, [&](auto shape) {
      constexpr int C = shape.C, W = shape.W, V = shape.V, A = shape.kAtOnce;
      static_assert(shape.S == 0);
      if constexpr (type == Type::f32 && V > 16) {
        return pydet_status(PYDET_UNSUPPORTED);
      } else {
        return launch_spread(name, p, shape, 0,
                             p.log ? softmax_backward_spread_kernel<type, C, W, V, A, true>
                                   : softmax_backward_spread_kernel<type, C, W, V, A, false>);
      }
    });
  });
}

}  // namespace pydet
