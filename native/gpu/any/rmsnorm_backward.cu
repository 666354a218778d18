// Gradients of RMSNorm, and on CUDA of LayerNorm, in fp32 (NUMERICS.md, "RMSNorm", "LayerNorm"): the CPU's bits. The
// formulas are those of norm_backward.cu.
//
//   dweight: p = fmaf(dy, xhat, p) from +0 down a chain of 16 rows; 4 chains added from +0 are a group, 4 groups a
//            block of 256 rows; the blocks added in order, from +0 or from dweight, and rounded once
//
// One pass over x and dy. A thread block takes a group of rows where there are enough of them to fill the device, else
// a chain, and leaves their sum as one row of partials in the workspace. A second, dependent kernel (column_sums.cu) joins
// the partials in the order above. No bit depends on the choice. A team of one warp takes one chain, and has teams beside it for the others of the group; a
// larger team is its block, takes the chains one after the other, and keeps their sum in shared memory. cp.async keeps
// the next rows in flight, in slots that only their own thread reads, so that no barrier stands between copy and use.

#include "gpu/kernels.h"
#include "gpu/any/column_sums.h"
#include "gpu/any/rows.h"

namespace pydet {
namespace {

// ---- Rows that a team holds --------------------------------------------------------------------------------------

// Walks rows one by one from `first` on, without a division for each.
class RowWalk {
 public:
  __device__ __forceinline__ RowWalk(int64_t inner, int64_t rows, int64_t first)
      : inner_(clamp(inner)), left_(rows <= inner ? kNever : clamp(inner - first % inner)) {}

  // Advances the places of the current row in any number of tensors to the next row.
  template <class... Place> __device__ __forceinline__ void next(const Place &...place) {
    (..., (place.at += place.rows.inner_stride * place.element_bytes));
    if (--left_ == 0) {
      left_ = inner_;
      (..., (place.at += (place.rows.outer_stride - inner_ * place.rows.inner_stride) * place.element_bytes));
    }
  }

 private:
  static constexpr int kNever = 0x7FFFFFFF;  // more rows than anyone walks
  __device__ __forceinline__ static int clamp(int64_t rows) { return rows < kNever ? int(rows) : kNever; }
  int inner_, left_;
};

struct RowPlace {
  char *&at;
  const Rows &rows;
  int element_bytes;
};

// A team's shared memory: a ring of stages of R rows each of x, dy and, where it fits, dresidual.
template <class P, Type type, int T, int W, int V, int R, bool residual> struct Stages {
  using Vector = Packed<type, W>;
  static constexpr int kPieces = Vector::kBytes / Vector::kPieceBytes;
  static constexpr int kSumBytes = kSums<P> * V * T * W * int(sizeof(float));
  // 12 KB a warp and 48 KB a larger team keep the memory busy; more made it slower.
  static constexpr int kMost = kMostSharedBytes - kSumBytes - 2 * kExchange<T, R * kSums<P>> * int(sizeof(float));
  static constexpr int kBudget = T == kLogicalWarp ? 12 << 10 : 48 << 10;
  static constexpr int kTensorBytes = R * V * T * Vector::kBytes;
  static constexpr bool kHoldsResidual = residual && 3 * kTensorBytes <= kMost;
  static constexpr int kTensors = kHoldsResidual ? 3 : 2, kBytes = kTensors * kTensorBytes, kFit = kMost / kBytes;
  static constexpr int kWanted = kBudget / kBytes < 2 ? 2 : kBudget / kBytes;
  static constexpr int kDepth = kFit < 1 ? 1 : kWanted < kFit ? kWanted : kFit;

  // Of the thread: where its pieces of a row's vector are; `slot` is that of the stage.
  __device__ __forceinline__ static char *piece(char *slot, int k, int tensor, int v, int piece) {
    return slot + (((k * kTensors + tensor) * V + v) * kPieces + piece) * T * Vector::kPieceBytes;
  }
  __device__ __forceinline__ static void fetch(char *slot, int k, int tensor, int v, const char *from, bool inside) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      copy_async_piece<Vector::kPieceBytes>(piece(slot, k, tensor, v, i), from + i * Vector::kPieceBytes, inside);
  }
  __device__ __forceinline__ static Vector read(char *slot, int k, int tensor, int v) {
    struct alignas(Vector::kPieceBytes) Piece {
      uint32_t word[Vector::kPieceBytes / 4];
    };
    Vector packed;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      Piece part = *reinterpret_cast<const Piece *>(piece(slot, k, tensor, v, i));
#pragma unroll
      for (int j = 0; j < Vector::kPieceBytes / 4; ++j) packed.word[i * (Vector::kPieceBytes / 4) + j] = part.word[j];
    }
    return packed;
  }
};

template <int W> struct alignas(16) Floats {
  float of[W];
};

// Sums down the rows that wait in shared memory, laid out by thread: of sum s, vector v.
template <int T, int W, int V> __device__ __forceinline__ Floats<W> *sums_at(char *base, int s, int v) {
  return reinterpret_cast<Floats<W> *>(base) + (s * V + v) * T + threadIdx.x % T;
}

template <int T> constexpr int kMostThreads = T == kLogicalWarp ? T * kGroupChains : T;

// `chains` per block: 1 or kGroupChains.
template <class P, Type type, int T, int W, int V, int R, bool residual>
__global__ void __launch_bounds__(kMostThreads<T>, T == 256 ? 2 : 1)
    norm_backward_kernel(const __grid_constant__ P p, int chains) {
  using S = Stages<P, type, T, W, V, R, residual>;
  constexpr bool centred = kCentred<P>;
  constexpr int N = kSums<P>, kBytes = size_of(type), kRoom = kExchange<T, R * N>;
  constexpr bool kBeside = T == kLogicalWarp;  // teams side by side
  extern __shared__ __align__(16) char shared[];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = kBeside ? int(threadIdx.x) / T : 0, t = int(threadIdx.x) - team * T, n = int(p.n);
  char *const ring = shared + team * S::kDepth * S::kBytes + t * S::Vector::kPieceBytes;
  float *exchange = reinterpret_cast<float *>(shared + S::kDepth * S::kBytes);
  char *group = reinterpret_cast<char *>(exchange + 2 * kRoom);
  const int64_t chain0 = int64_t(blockIdx.x) * chains + team;
  const int64_t first = chain0 * kDweightChainRows, end = first + (kBeside ? 1 : chains) * kDweightChainRows;
  const int count = int((end < p.rows ? end : p.rows) - first), stages = (count + R - 1) / R;  // not positive: no rows

  bool inside[V];
#pragma unroll
  for (int v = 0; v < V; ++v) inside[v] = W * (t + T * v) < n;

  const int my_bytes = t * W * kBytes;  // into a row
  constexpr int kVectorStep = T * W * kBytes;
  auto row = [&](const Rows &rows) { return stages > 0 && rows.data ? row_at(rows, kBytes, p.inner, first) : nullptr; };
  char *x_at = row(p.x), *dy_at = row(p.dy), *dresidual_at = row(p.dresidual), *dx_at = row(p.dx);
  RowWalk in(p.inner, p.rows, first), out = in;
  int rows_to_fetch = count;
  auto fetch = [&](char *slot) {
    if (rows_to_fetch > 0)
#pragma unroll
      for (int k = 0; k < R; ++k) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          bool there = inside[v] && k < rows_to_fetch;  // else nothing is read
          S::fetch(slot, k, 0, v, x_at + my_bytes + v * kVectorStep, there);
          S::fetch(slot, k, 1, v, dy_at + my_bytes + v * kVectorStep, there);
          if constexpr (S::kHoldsResidual) S::fetch(slot, k, 2, v, dresidual_at + my_bytes + v * kVectorStep, there);
        }
        RowPlace x{x_at, p.x, kBytes}, dy{dy_at, p.dy, kBytes}, dresidual{dresidual_at, p.dresidual, kBytes};
        if constexpr (S::kHoldsResidual) in.next(x, dy, dresidual);
        else in.next(x, dy);
      }
    rows_to_fetch -= R;
    commit_copies();
  };
  // A row past the last has x = dy = +0; with -0 for its rstd it adds (+0)(-0) to a chain, which changes nothing.
  const float *rstds = reinterpret_cast<const float *>(p.rstd.data) + first;
  auto rstd_at = [&](int row) { return row < count ? rstds[row] : -0.0f; };
  auto mean_at = [&](int row) { return centred && row < count ? mean_of(p, first + row) : 0.0f; };
#pragma unroll
  for (int s = 0; s < S::kDepth; ++s) fetch(ring + s * S::kBytes);

  float scale[V][W], chain[N][V][W] = {}, rstd[R], mean[R];
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int e = 0; e < W; ++e) scale[v][e] = 0.0f;
    if (inside[v]) {
      Scale<W> weight;
      weight.load(p.weight, W * (t + T * v));
      weight.unpack(p.weight, p.weight_offset, scale[v]);
    }
  }
#pragma unroll
  for (int k = 0; k < R; ++k) rstd[k] = rstd_at(k), mean[k] = mean_at(k);
  // xhat, dy and g of a vector in its slot.
  auto read = [&](char *from, int k, int v, float(&xhat)[W], float(&dy)[W], float(&g)[W]) {
    unpack(S::read(from, k, 0, v), xhat);
    unpack(S::read(from, k, 1, v), dy);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      xhat[e] = (centred ? xhat[e] - mean[k] : xhat[e]) * rstd[k];
      g[e] = dy[e] * scale[v][e];
    }
  };
  if (!kBeside && chains > 1)
#pragma unroll
    for (int i = 0; i < N * V; ++i) *sums_at<T, W, V>(group, i / V, i % V) = Floats<W>{};

  char *slot = ring;
  for (int s = 0; s < stages; ++s) {
    float next_rstd[R], next_mean[R];
#pragma unroll
    for (int k = 0; k < R; ++k) next_rstd[k] = rstd_at((s + 1) * R + k), next_mean[k] = mean_at((s + 1) * R + k);
    wait_copies<S::kDepth - 1>();
    Lanes<T, W, V> lanes[R * N];
#pragma unroll
    for (int k = 0; k < R; ++k)
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float xhat[W], dy[W], g[W];
        read(slot, k, v, xhat, dy, g);
        const bool there = s * R + k < count;
#pragma unroll
        for (int e = 0; e < W; ++e) {
          chain[0][v][e] = fmaf(dy[e], xhat[e], chain[0][v][e]);
          if constexpr (centred) chain[1][v][e] = there ? dy[e] + chain[1][v][e] : chain[1][v][e];
        }
        lanes[k * N].add(v, inside[v], g, xhat);
        if constexpr (centred) lanes[k * N + 1].add(v, inside[v], g, Ones());
      }
    if (p.dx.data) {
      char *dx_rows[R], *dresidual_rows[R];
#pragma unroll
      for (int k = 0; k < R; ++k) {
        dx_rows[k] = dx_at;
        dresidual_rows[k] = dresidual_at;
        RowPlace dx{dx_at, p.dx, kBytes}, dresidual{dresidual_at, p.dresidual, kBytes};
        if constexpr (residual && !S::kHoldsResidual) out.next(dx, dresidual);
        else out.next(dx);
      }
      float sums[R * N];
      join(lanes, exchange + s % 2 * kRoom, [&](float sum) { return sum / float(n); }, sums);
#pragma unroll
      for (int k = 0; k < R; ++k)
#pragma unroll
        for (int v = 0; v < V; ++v) {
          float xhat[W], dy[W], dx[W];
          read(slot, k, v, xhat, dy, dx);
#pragma unroll
          for (int e = 0; e < W; ++e) {
            dx[e] = fmaf(-xhat[e], sums[k * N], dx[e]);
            if constexpr (centred) dx[e] -= sums[k * N + 1];
          }
          if constexpr (residual) {
            Packed<type, W> packed = {};
            if constexpr (S::kHoldsResidual) packed = S::read(slot, k, 2, v);
            else if (inside[v] && s * R + k < count)
              packed = load_packed<type, W>(dresidual_rows[k] + my_bytes + v * kVectorStep);
            float dresidual[W];
            unpack(packed, dresidual);
#pragma unroll
            for (int e = 0; e < W; ++e) dx[e] = fmaf(rstd[k], dx[e], dresidual[e]);
          } else {
#pragma unroll
            for (int e = 0; e < W; ++e) dx[e] *= rstd[k];
          }
          if (inside[v] && s * R + k < count) store_packed<type>(dx_rows[k] + my_bytes + v * kVectorStep, dx);
        }
    }
    fetch(slot);
    slot = slot == ring + (S::kDepth - 1) * S::kBytes ? ring : slot + S::kBytes;
#pragma unroll
    for (int k = 0; k < R; ++k) rstd[k] = next_rstd[k], mean[k] = next_mean[k];
    if (!kBeside && chains > 1 && ((s + 1) % (kDweightChainRows / R) == 0 || s + 1 == stages))  // a chain ends
#pragma unroll
      for (int i = 0; i < N * V; ++i) {
        Floats<W> *at = sums_at<T, W, V>(group, i / V, i % V), sum = *at;
#pragma unroll
        for (int e = 0; e < W; ++e) {
          sum.of[e] += chain[i / V][i % V][e];
          chain[i / V][i % V][e] = 0.0f;
        }
        *at = sum;
      }
  }
  if (!p.dweight.data && !p.dbias.data) return;
  // Where partials of sum s, one after the other, are.
  auto partials_of = [&](int sum, int64_t number) {
    const int64_t before = sum ? (p.rows + kDweightChainRows - 1) / kDweightChainRows : 0;
    return static_cast<float *>(p.workspace) + (before + number) * p.n;
  };
  const bool wanted[2] = {p.dweight.data != nullptr, p.dbias.data != nullptr};

#pragma unroll
  for (int s = 0; s < N; ++s) {
    if (!wanted[s]) continue;
    float *const partials = partials_of(s, blockIdx.x);
    if (!kBeside || chains == 1) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        Floats<W> sum;
#pragma unroll
        for (int e = 0; e < W; ++e) sum.of[e] = chain[s][v][e];
        if (!kBeside && chains > 1) sum = *sums_at<T, W, V>(group, s, v);
        if (inside[v])
#pragma unroll
          for (int e = 0; e < W; e += 4) {
            float *to = partials + W * (t + T * v) + e;
            float4 part = make_float4(sum.of[e], sum.of[e + 1], sum.of[e + 2], sum.of[e + 3]);
            if constexpr (V <= 4) store_kept(to, part);
            else *reinterpret_cast<float4 *>(to) = part;  // these rows leave no register for more
          }
      }
    } else {  // the teams' chains, added in order, through the shared memory that the rings no longer need
      constexpr int kRow = T * V * W;
      static_assert(kRow * int(sizeof(float)) <= S::kDepth * S::kBytes || !kBeside, "the chains fit");
      float *columns = reinterpret_cast<float *>(shared);
      wait_copies<0>();
      __syncthreads();
#pragma unroll
      for (int v = 0; v < V; ++v)
#pragma unroll
        for (int e = 0; e < W; ++e) columns[team * kRow + (v * W + e) * T + t] = chain[s][v][e];
      __syncthreads();
      for (int i = int(threadIdx.x); i < kRow; i += int(blockDim.x)) {
        int column = (i / (T * W) * T + i % T) * W + i / T % W;
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < kGroupChains; ++k) sum += columns[k * kRow + i];
        if (column < n) partials[column] = sum;
      }
    }
  }
}

// ---- Launch ------------------------------------------------------------------------------------------------------

// Calls f with a team that holds a row of n: which is fastest for chains, and for groups where they are preferred, was
// measured on an H100. LayerNorm's have 513 to 8192 columns: of longer rows there are no registers for two sums down them.
constexpr int64_t kShortestLayer = 513, kLongestLayer = 512 * 16;
template <class P, class F> auto with_shape(const P &p, int chains, const F &f) {
  const int64_t n = p.n;
  if constexpr (!kCentred<P>) {
    if (n <= 32 * 8) return f(RowShape<32, 8, 1, 4>{});
    if (n <= 64 * 8) return chains == 1 ? f(RowShape<64, 8, 1, 4>{}) : f(RowShape<32, 8, 2, 2>{});
    if (n <= 256 * 4 && chains > 1) return f(RowShape<256, 4, 1, 4>{});
    if (n > 512 * 16) return f(RowShape<512, 4, 8, 1>{});
  }
  return with_first<RowShape<128, 8, 1, 4>, RowShape<256, 8, 1, 4>, RowShape<256, 8, 2, 2>, RowShape<512, 4, 4, 1>>(n,
                                                                                                                    f);
}

// The kernel that holds rows of p.n, and how it is launched.
template <class P> struct Held {
  void (*kernel)(P, int);
  Launch where;
};

template <class P, Type type, int T, int W, int V, int R, bool residual> Held<P> held(const P &p, int chains) {
  using S = Stages<P, type, T, W, V, R, residual>;
  constexpr bool kBeside = T == kLogicalWarp;
  int teams = kBeside ? chains : 1, sum_bytes = kBeside || chains == 1 ? 0 : S::kSumBytes;
  constexpr int kRing = S::kDepth * S::kBytes, kExchanges = 2 * kExchange<T, R * kSums<P>> * int(sizeof(float));
  void (*kernel)(P, int) = nullptr;                                  // where no device has room for its ring
  constexpr int kFewestTeams = kBeside && V > 1 ? kGroupChains : 1;  // with_shape has such teams for groups alone
  if constexpr (kFewestTeams * kRing + kExchanges <= kMostSharedBytes)
    kernel = norm_backward_kernel<P, type, T, W, V, R, residual>;
  return {kernel, blocks_of("norm_backward_held", p, unsigned(divide_up(p.rows, chains * kDweightChainRows)), T * teams,
                            teams * kRing + kExchanges + sum_bytes)};
}

template <class P> Held<P> held(const P &p, int chains) {
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return with_shape(p, chains, [&](auto shape) {
      constexpr int T = shape.T, W = shape.W, V = shape.V, R = shape.R;
      if (p.dresidual.data) return held<P, type, T, W, V, R, true>(p, chains);
      return held<P, type, T, W, V, R, false>(p, chains);
    });
  });
}

template <class P> bool fits(const P &p, int chains) {
  const Held<P> one = held(p, chains);
  return one.kernel && one.where.shared_bytes <= gpu_shared_bytes(p.device.id) &&
         divide_up(p.rows, chains * kDweightChainRows) <= most_blocks(int(one.where.block.x));
}

// `chains` a block, and a partial.
template <class P> pydet_status backward_held(const P &p, int chains) {
  return with_sums_over_rows("norm_backward_held", p, chains, [&] {
    const Held<P> one = held(p, chains);
    return launch(one.where, one.kernel, p, chains);
  });
}

template <class P> bool held_takes(const P &p) {
  if (kCentred<P> && (p.n < kShortestLayer || p.n > kLongestLayer)) return false;
  return p.n <= kLongestHeldRow && rows_whole(p) && vector_aligned(p.weight) && fits(p, 1);
}
// The sums of a group may be what does not fit.
template <class P> pydet_status by_groups(const P &p) {
  return backward_held(p, fits(p, kGroupChains) ? kGroupChains : 1);
}

// Chains fill the device better where there are not enough groups, and groups that all start at once move in step; else
// the chains' partials are a burden, if not where rows are of 513 to 4096: on an H200 (tools/rows_sweep.py) 65634x1376 takes
// 173 us by chains and 237 by groups, LayerNorm's 161123x776 302 and 392; but on an H100 138533x888 306 and 272.
template <class P> bool prefers_chains(const P &p) {
  if (!p.dweight.data && !p.dbias.data) return true;
  if (p.n > 512 && p.n <= 4096) return kCentred<P> || p.n > 1024 || p.rows <= 100'000;
  return (p.n > 4096 && p.rows <= 12'000) ||
         p.rows / kDweightGroupRows * 4 < int64_t(gpu_multiprocessors(p.device.id)) * 3;
}

}  // namespace

bool rmsnorm_backward_held_takes(const RmsNormBackward &p) { return held_takes(p); }
bool rmsnorm_backward_chain_prefers(const RmsNormBackward &p) { return prefers_chains(p); }
pydet_status rmsnorm_backward_chain(const RmsNormBackward &p) { return backward_held(p, 1); }
pydet_status rmsnorm_backward_group(const RmsNormBackward &p) { return by_groups(p); }

#if !defined(__HIP_PLATFORM_AMD__)
bool layernorm_backward_ring_takes(const LayerNormBackward &p) { return held_takes(p); }
bool layernorm_backward_chain_prefers(const LayerNormBackward &p) { return prefers_chains(p); }
pydet_status layernorm_backward_chain(const LayerNormBackward &p) { return backward_held(p, 1); }
pydet_status layernorm_backward_group(const LayerNormBackward &p) { return by_groups(p); }
#endif

}  // namespace pydet
