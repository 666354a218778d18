// What is asked of long rows of logits, and its gradient, in fp32 (NUMERICS.md, "Head"): the CPU's bits.
//
// A cluster of C blocks holds a row (softmax_cluster.h), which is read once and waits in shared memory, where a thread finds
// its own pieces of two elements. It passes over them for the maximum, for each sum and for the gradient, and makes the
// exps anew: these would take twice the room. (In registers, with loops unrolled and exps kept, so few threads fit that
// 8192 rows of 128256 columns took twice as long.) The gradient may take the place of the logits.

#include "gpu/kernels.h"
#include "gpu/nvidia/softmax_cluster.h"
#include "ops/head/formulas.h"

// Kernels of other machines are empty, as softmax_spread.cu's are.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ / 100 == 9
#define PYDET_HOPPER 1
#endif

namespace pydet {
namespace {

constexpr int kCluster = 8, kPiece = 2, kTeam = kRowLanes / (kCluster * kPiece);
constexpr int kAtOnce = 4;              // pieces whose steps are computed together
constexpr int kMostPieces = 200 << 10;  // bytes of shared memory

#if defined(PYDET_HOPPER)
constexpr int kElements = kAtOnce * kPiece;

// A thread's pieces of a row, in ascending order, 2048 columns apart.
template <bool slabs> struct PiecesOf {
  char *at;
  const HeadRows &p;
  int64_t row;
  int first, slab = 0, left;  // left: vectors of this slab

  __device__ __forceinline__ PiecesOf(const HeadRows &problem, const Rows &rows, int size, int64_t r, int first_column)
      : at(slabs ? slab_row(problem, 0, r) : row_at(rows, size, problem.rows, r)),
        p(problem),
        row(r),
        first(first_column * size),
        left(int(p.slabs.columns) / kRowLanes) {
    at += first;
  }
  __device__ __forceinline__ char *next(int size) {
    if constexpr (slabs)
      if (left-- == 0) {
        left = int(p.slabs.columns) / kRowLanes - 1;
        at = slab_row(p, ++slab, row) + first;
      }
    char *const piece = at;
    at += kRowLanes * size;
    return piece;
  }
};

// Quotients by a temperature T, or none. From the reciprocal where T and all the dividends are so far from the ends of
// fp32's range that no step of quotient_f32 is subnormal or overflows; else by division.
struct ByTemperature {
  static constexpr float kLeast = 0x1p-80f, kMost = 0x1p80f, kMostT = 0x1p16f;
  float t, reciprocal;
  bool divides, quickly;

  __device__ __forceinline__ explicit ByTemperature(float temperature)
      : t(temperature),
        reciprocal(1.0f / temperature),
        divides(temperature != 0.0f),
        quickly(temperature >= 1.0f / kMostT && temperature <= kMostT) {}
  static __device__ __forceinline__ bool fits(float x) { return fabsf(x) >= kLeast && fabsf(x) <= kMost; }
  __device__ __forceinline__ void of(float (&x)[kElements], bool fit) const {
    if (!divides) return;
    if (fit) {
#pragma unroll
      for (float &one : x) one = quotient_f32(one, t, reciprocal);
    } else {
#pragma unroll
      for (float &one : x) one = one / t;
    }
  }
  __device__ __forceinline__ void of(float (&x)[kElements]) const {
    bool fit = quickly;
#pragma unroll
    for (const float one : x) fit = fit & fits(one);
    of(x, fit);
  }
};

// Whether all elements that it was shown fit. Without a sign those of 16 bits are in the order of their bits.
template <Type type> struct Fit {
  uint32_t low = 0xFFFFFFFFu, high = 0;
  bool singles = true;

  __device__ __forceinline__ void meet(const Packed<type, kPiece> &x) {
    if constexpr (type == Type::f32) {
      singles = singles & ByTemperature::fits(float_of(x.word[0])) & ByTemperature::fits(float_of(x.word[1]));
    } else {
      low = __vminu2(low, x.word[0] & 0x7FFF7FFFu);
      high = __vmaxu2(high, x.word[0] & 0x7FFF7FFFu);
    }
  }
  __device__ __forceinline__ bool all() const {
    if constexpr (type == Type::f32) {
      return singles;
    } else {
      constexpr uint32_t kLeast = is_bf16<type>() ? 0x1780 : 0x0001, kMost = is_bf16<type>() ? 0x6780 : 0x7BFF;
      static_assert(ByTemperature::kLeast == 0x1p-80f && ByTemperature::kMost == 0x1p80f, "as bf16 has them");
      return (low & 0xFFFF) >= kLeast && low >> 16 >= kLeast && (high & 0xFFFF) <= kMost && high >> 16 <= kMost;
    }
  }
};
#endif

template <Type type, bool slabs, bool caps>
__global__ void __launch_bounds__(kTeam, 5) head_rows_cluster_kernel(const __grid_constant__ HeadRows p) {
#if defined(PYDET_HOPPER)
  constexpr int C = kCluster, W = kPiece, T = kTeam, N = kElements, kSize = size_of(type), kWords = W * kSize / 4;
  using Piece = Packed<type, W>;
  extern __shared__ __align__(16) char shared[];
  Piece *const x = reinterpret_cast<Piece *>(shared) + threadIdx.x;  // piece v at x[v T]
  __shared__ float of_warps[T / kLogicalWarp];
  __shared__ Received<C> received, received_entropy, received_mean;
  __shared__ float2 firsts[C];
  __shared__ uint64_t firsts_arrived;
  expect_from_cluster(&received.most_arrived, int(sizeof received.most));
  wait_for_previous_kernel();
  let_next_kernel_start();
  const HeadAsked &asked = p.asked;
  const int rank = int(blockIdx.x) % C, n = int(p.n), t = int(threadIdx.x), first = W * (T * rank + t);
  const int64_t r = blockIdx.x / C;
  // Pieces of this thread that are the row's, wholly and in part; those behind them, up to a multiple of kAtOnce, are -Inf.
  const int whole = first + W <= n ? (n - W - first) / kRowLanes + 1 : 0;
  const int count = first < n ? (n - 1 - first) / kRowLanes + 1 : 0;
  {
    PiecesOf<slabs> pieces(p, p.x, kSize, r, first);
#pragma unroll 4
    for (int v = 0; v < count; ++v)
      copy_async_part<W * kSize>(&x[v * T], pieces.next(kSize), v < whole ? W * kSize : kSize);
  }
  KnownRow row = {};
  const auto given = [&](const Vector &from) {
    return p.backward && from.data ? reinterpret_cast<const float *>(from.data)[r] : 0.0f;
  };
  const int64_t index =
      p.index.wide ? static_cast<const int64_t *>(p.index.data)[r] : static_cast<const int32_t *>(p.index.data)[r];
  row.index = index >= 0 && index < p.n ? index : -1;
  row.of_log_prob = given(p.dlog_prob), row.of_entropy = given(asked.entropy), row.of_lse = given(asked.lse);
  row.of_mean = given(asked.mean) / float(p.n);
  // The column that is asked for, if the thread has it: in which of its pieces, and where there.
  const int behind = int(row.index) - first, place = behind % kRowLanes;
  const int piece = row.index >= 0 && behind >= 0 && place < W ? behind / kRowLanes : -1;
  const ByTemperature scale(asked.temperature);
  commit_copies();
  wait_copies<0>();
  for (int v = count; v % kAtOnce; ++v)
#pragma unroll
    for (int i = 0; i < kWords; ++i) x[v * T].word[i] = kLowestWord<type>;
  if (whole < count) {  // its second element is another row's
    if constexpr (type == Type::f32) x[whole * T].word[1] = kLowestWord<type>;
    else x[whole * T].word[0] = (x[whole * T].word[0] & 0xFFFFu) | (kLowestWord<type> & 0xFFFF0000u);
  }
  meet_cluster();
  expect_from_cluster(&received.sums_arrived, int(sizeof received.sums));

  // Calls body(v, z) for the pieces from v on, as they lie in memory.
  const auto walk = [&](const auto &body) {
#pragma unroll 1
    for (int v = 0; v < count; v += kAtOnce) {
      Piece z[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) z[i] = x[(v + i) * T];
      body(v, z);
    }
  };
  bool fit = false;
  // As they are read.
  const auto read = [&](int v, const Piece(&z)[kAtOnce], float(&one)[N]) {
    unpack_pieces<type, W, kAtOnce>(z, 0, one);
    if constexpr (caps) {
#pragma unroll
      for (int e = 0; e < N; ++e)
        one[e] = first + kRowLanes * (v + e / W) + e % W < n ? read_logit(asked, one[e]) : kLowest;
    } else {
      scale.of(one, fit && v + kAtOnce <= whole);
    }
  };

  float most = kLowest;
  if constexpr (caps) {
    walk([&](int v, const Piece(&z)[kAtOnce]) {
      float one[N];
      read(v, z, one);
#pragma unroll
      for (const float each : one) most = larger(most, each);
    });
    most = row_max<C, T>(most, of_warps, received, rank);
  } else {  // division by a temperature does not change which is the largest
    Piece top;
    Fit<type> fitting;
#pragma unroll
    for (int i = 0; i < kWords; ++i) top.word[i] = kLowestWord<type>;
    walk([&](int v, const Piece(&z)[kAtOnce]) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (v + i < whole) fitting.meet(z[i]);
#pragma unroll
        for (int k = 0; k < kWords; ++k) {
          if constexpr (type == Type::f32) top.word[k] = bits_of(larger(float_of(top.word[k]), float_of(z[i].word[k])));
          else top.word[k] = larger_pair<type>(top.word[k], z[i].word[k]);
        }
      }
    });
    fit = scale.divides && scale.quickly && fitting.all();
    float tops[W];
    unpack(top, tops);
    most = read_logit(asked, row_max<C, T>(larger(tops[0], tops[1]), of_warps, received, rank));
  }
  row.max = most + 0.0f;

  float lane[W] = {};
  walk([&](int v, const Piece(&z)[kAtOnce]) {
    float one[N];
    read(v, z, one);
#pragma unroll
    for (float &each : one) each = falling_exp_f32(each - row.max);
#pragma unroll
    for (int e = 0; e < N; ++e) lane[e % W] += one[e];
  });
  const float total = row_sum<C, W>(lane, received, rank);
  row.sum = fabsf(row.max) < INFINITY ? total : float_of(kNanF32);
  row.log_sum = log_f32(row.sum);
  const float reciprocal = 1.0f / row.sum;
  const auto probabilities = [&](const float(&one)[N], float(&probability)[N]) {
    bool normal = true;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      probability[e] = falling_exp_f32(one[e] - row.max);
      normal = normal & (probability[e] >= kLeastDividend);
    }
    if (normal) {
#pragma unroll
      for (float &each : probability) each = quotient_f32(each, row.sum, reciprocal);
    } else {
#pragma unroll
      for (float &each : probability) each = each / row.sum;
    }
  };
  const auto put = [&](const Vector &to, float value, bool speaks) {
    if (to.data && speaks) reinterpret_cast<float *>(to.data)[r] = canonical(value);
  };
  const bool speaks = rank == 0 && t == 0;
  if (p.log_prob.data && (row.index < 0 ? speaks : piece >= 0)) {
    float at_index = float_of(kNanF32);
    if (piece >= 0) {
      float two[W];
      unpack(x[piece * T], two);
      at_index = read_logit(asked, place ? two[1] : two[0]);
    }
    put(p.log_prob, (at_index - row.max) - row.log_sum, true);
  }

  // What is past the row's end adds +0: that changes the sign of a zero alone, which an entropy does not have.
  if (asked.entropy.data) {
    expect_from_cluster(&received_entropy.sums_arrived, int(sizeof received_entropy.sums));
    float entropies[W] = {};
    walk([&](int v, const Piece(&z)[kAtOnce]) {
      float one[N], probability[N];
      read(v, z, one);
      probabilities(one, probability);
#pragma unroll
      for (int e = 0; e < N; ++e) entropies[e % W] = fmaf(logarithm_of(row, one[e]), probability[e], entropies[e % W]);
    });
    row.entropy = 0.0f - row_sum<C, W>(entropies, received_entropy, rank);
  }

  if (!p.backward) {
    put(asked.entropy, row.entropy, speaks);
    put(asked.lse, row.max + row.log_sum, speaks);
    if (asked.mean.data) {
      expect_from_cluster(&received_mean.sums_arrived, int(sizeof received_mean.sums));
      float sums[W] = {};
      walk([&](int v, const Piece(&z)[kAtOnce]) {
        float one[N];
        read(v, z, one);
#pragma unroll
        for (int e = 0; e < N; ++e)
          if (first + kRowLanes * (v + e / W) + e % W < n) sums[e % W] = fmaf(one[e], 1.0f, sums[e % W]);
      });
      put(asked.mean, row_sum<C, W>(sums, received_mean, rank) / float(p.n), speaks);
    }
    if (asked.greedy) {  // the first that is as large as the largest, or a NaN as that is
      expect_from_cluster(&firsts_arrived, int(sizeof firsts));
      int column = INT32_MAX;
      walk([&](int v, const Piece(&z)[kAtOnce]) {
        float one[N];
        read(v, z, one);
#pragma unroll
        for (int e = N - 1; e >= 0; --e) {
          const int j = first + kRowLanes * (v + e / W) + e % W;
          if (j < n && (one[e] == row.max || one[e] != one[e])) column = min(column, j);
        }
      });
      column = __reduce_min_sync(0xFFFFFFFFu, column);
      if (t % kLogicalWarp == 0) of_warps[t / kLogicalWarp] = float_of(uint32_t(column));
      __syncthreads();
#pragma unroll
      for (int i = 0; i < T / kLogicalWarp; ++i) column = min(column, int(bits_of(of_warps[i])));
      meet_cluster();
      if (t < C) send(&firsts[rank], make_float2(float_of(uint32_t(column)), 0.0f), &firsts_arrived, t);
      wait_for_cluster(&firsts_arrived);
#pragma unroll
      for (int c = 0; c < C; ++c) column = min(column, int(bits_of(firsts[c].x)));
      if (speaks) reinterpret_cast<int64_t *>(asked.greedy)[r] = column;
    }
    return;
  }

  const Type y_type = slabs ? type : p.y.type;
  PiecesOf<slabs> pieces(p, p.y, size_of(y_type), r, first);
  walk([&](int v, const Piece(&z)[kAtOnce]) {
    float one[N], probability[N], d[N];
    read(v, z, one);
    probabilities(one, probability);
#pragma unroll
    for (int e = 0; e < N; ++e) d[e] = row.index < 0 ? 0.0f : fmaf(-probability[e], row.of_log_prob, 0.0f);
    if (piece >= v && piece < v + kAtOnce)
#pragma unroll
      for (int e = 0; e < N; ++e)
        if (piece == v + e / W && place == e % W) d[e] = fmaf(-probability[e], row.of_log_prob, row.of_log_prob);
    add_more(asked, row, one, probability, d);
    if constexpr (caps) {
      float each[N];
      unpack_pieces<type, W, kAtOnce>(z, 0, each);
#pragma unroll
      for (int e = 0; e < N; ++e) d[e] = gradient_of_logit(asked, each[e], d[e]);
    } else {
      scale.of(d);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (v + i >= count) break;
      char *const to = pieces.next(size_of(y_type));
      const float two[W] = {d[i * W], d[i * W + 1]};
      const Piece rounded = pack<type>(two);
      if (y_type == type && v + i < whole) {
        *reinterpret_cast<Piece *>(to) = rounded;
      } else {
        float again[W];
        unpack(rounded, again);
        store_rounded(to, y_type, 0, again[0]);
        if (v + i < whole) store_rounded(to, y_type, 1, again[1]);
      }
    }
  });
#endif
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int64_t kMostRows = int64_t(1) << 27, kShortest = 4 * kRowLanes;

int64_t bytes_of_pieces(const HeadRows &p) {
  return divide_up(divide_up(p.n, kRowLanes), kAtOnce) * kAtOnce * kTeam * kPiece * size_of(p.x.type);
}

}  // namespace

bool head_rows_cluster_takes(const HeadRows &p) {
  if (p.n > int64_t(1) << 30 || bytes_of_pieces(p) > kMostPieces || p.rows > kMostRows) return false;
  const auto whole = [](const Rows &rows) { return rows_aligned(rows, kPiece * size_of(rows.type)); };
  if (p.slabs.columns) return reinterpret_cast<uintptr_t>(p.slabs.first) % 16 == 0 && whole(p.x);
  return whole(p.x) && (!p.backward || whole(p.y));
}

bool head_rows_cluster_prefers(const HeadRows &p) { return p.n > kShortest; }

pydet_status head_rows_cluster(const HeadRows &p) {
  const char *name = "head_rows_cluster";
  return by_type(name, p, p.x.type, [&](auto type) {
    const Launch where = blocks_of(name, p, unsigned(p.rows * kCluster), kTeam, int(bytes_of_pieces(p)), kCluster);
    const bool caps = p.asked.softcap != 0;
    if (p.slabs.columns)
      return launch(where,
                    caps ? head_rows_cluster_kernel<type, true, true> : head_rows_cluster_kernel<type, true, false>, p);
    return launch(where,
                  caps ? head_rows_cluster_kernel<type, false, true> : head_rows_cluster_kernel<type, false, false>, p);
  });
}

}  // namespace pydet
