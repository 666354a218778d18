// Gradients of RMSNorm and LayerNorm in one pass over x and dy, for rows of whole vectors, in fp32 (NUMERICS.md,
// "RMSNorm", "LayerNorm"): the CPU's bits. The formulas are those of norm_backward.cu.
//
// A team takes a chain of 16 rows (of one head, where there are heads), R of them at a time in registers, and goes down
// its own columns of them as well: a thread's share of the chains of dweight and dbias is in registers too, and ends in
// the workspace, which column_sums.cu joins. `grouped`: four teams beside each other are a group, whose sum is one row of
// partials.
//
// Short, RMSNorm's up to 512: a block takes a chain, all of its rows at once in shared memory. First its threads are
// columns: each goes down two of them, which is the chain of dweight. Then its four teams are rows, four each, joined
// together: dx. So no row waits for another, where a ring of rows would take four turns of 0.7 us (4096 x 256: 8.5 us,
// here 6.4).

#include "gpu/kernels.h"
#include "gpu/any/column_sums.h"
#include "gpu/any/rows.h"

namespace pydet {
namespace {

// Whether the rows of the next turn are on their way while this one's sums are joined.
template <Type type> constexpr bool kAhead = type != Type::f32;
// Blocks a multiprocessor is to hold, 0: as the compiler likes, which is more than registers allow.
template <class P, Type type, int T, bool grouped>
constexpr int kBlocks = type == Type::f32 ? 0 : (grouped && !kCentred<P> ? 5 : 512 / kBlock<T>);

template <class P, Type type, int T, int W, int V, int R, bool grouped>
__global__ void __launch_bounds__(kBlock<T>, kBlocks<P, type, T, grouped>)
    norm_backward_rows_kernel(const __grid_constant__ P p) {
  constexpr bool centred = kCentred<P>, biased = centred || !grouped;
  constexpr int kTeams = kBlock<T> / T, N = kSums<P>;  // along a row: c and a
  constexpr int kRoom = kTeams * kExchange<T, R * N> + 4;
  __shared__ __align__(16) float exchange[2][kRoom], spread[grouped ? kBlock<T> * W : 4];  // chains of a group
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T, n = int(p.n);
  const int64_t heads = grouped ? 1 : heads_of(p), job = block_number() * kTeams + team;
  const int64_t chain_number = quotient(job, heads), head = job - chain_number * heads;
  const int64_t rows = quotient(p.rows, heads), first = chain_number * kDweightChainRows, left = rows - first;
  const int count = left < kDweightChainRows ? int(left) : kDweightChainRows;  // not positive: no rows
  const int column = int(head * n);                                            // of the weights, and of the sums
  const Vector weight = {p.weight.data ? p.weight.data + column * size_of(p.weight.type) : nullptr, p.weight.type};
  auto load = [&](const char *row, int j) {
    return j < n ? load_packed<type, W>(row + j * size_of(type)) : Packed<type, W>{};
  };

  auto row_of = [&](int i) { return (first + i) * heads + head; };  // row i of the chain

  float scale[V][W], of_weight[V][W] = {}, of_bias[biased ? V : 1][W] = {};
#pragma unroll
  for (int v = 0; v < V; ++v) {
    Scale<W> loaded;
    const int j = W * (t + T * v);
    if (j < n) loaded.load(weight, j);
    loaded.unpack(weight, p.weight_offset, scale[v]);
  }

  // Rows of a turn. One past the last has x = dy = +0; with -0 for its rstd it adds (+0)(-0) to a chain, which changes
  // nothing.
  struct Turn {
    Packed<type, W> x[R][V], dy[R][V];
    float mean[R], rstd[R];
  };
  auto place = [&](int i) {
    const int64_t r = i < count ? row_of(i) : 0;
    if constexpr (!grouped) return place_of(p, r);
    else if (r < p.inner) return Place{0, 0, r};
    else return Place{0, r / p.inner, r % p.inner};
  };
  auto fetch = [&](int row0, Turn &turn) {
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const bool there = row0 + k < count;
      turn.rstd[k] = there ? of_row(p.rstd, row_of(row0 + k)) : -0.0f;
      turn.mean[k] = there ? mean_of(p, row_of(row0 + k)) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const Place at = place(row0 + k);
      const char *x_row = row_at(p.x, size_of(type), at), *dy_row = row_at(p.dy, size_of(type), at);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int j = W * (t + T * v);
        turn.x[k][v] = turn.dy[k][v] = {};
        if (row0 + k >= count) continue;
        turn.x[k][v] = load(x_row, j);
        turn.dy[k][v] = load(dy_row, j);
      }
    }
  };
  Turn next;
  if constexpr (kAhead<type>) fetch(0, next);

#pragma unroll 1
  for (int row0 = 0; row0 < kDweightChainRows; row0 += R) {
    Turn turn;
    if constexpr (kAhead<type>) {
      turn = next;
      if (row0 + R < kDweightChainRows) fetch(row0 + R, next);
    } else {
      fetch(row0, turn);
    }
    auto &[x, dy, mean, rstd] = turn;
    bool there[R];
#pragma unroll
    for (int k = 0; k < R; ++k) there[k] = row0 + k < count;
    Lanes<T, W, V> lanes[R * N];
#pragma unroll
    for (int k = 0; k < R; ++k) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int j = W * (t + T * v);
        float xhat[W], g[W];
        unpack(x[k][v], xhat);
        unpack(dy[k][v], g);
#pragma unroll
        for (int e = 0; e < W; ++e) {
          xhat[e] = (centred ? xhat[e] - mean[k] : xhat[e]) * rstd[k];
          of_weight[v][e] = fmaf(g[e], xhat[e], of_weight[v][e]);
          if constexpr (biased) of_bias[v][e] = there[k] ? g[e] + of_bias[v][e] : of_bias[v][e];
          g[e] *= scale[v][e];
        }
        lanes[k * N].add(v, j < n, g, xhat);
        if constexpr (centred) lanes[k * N + 1].add(v, j < n, g, Ones());
      }
    }
    if (!p.dx.data) continue;
    if constexpr (kAhead<type>)
#pragma unroll
      for (int k = 0; k < R; ++k)
#pragma unroll
        for (int v = 0; v < V; ++v) keep_packed(x[k][v]), keep_packed(dy[k][v]);
    float sums[R * N];
    join(lanes, exchange[row0 / R % 2] + team * kExchange<T, R * N>, [&](float sum) { return sum / float(n); }, sums);
#pragma unroll
    for (int k = 0; k < R; ++k) {
      if (!there[k]) continue;
      const Place at = place(row0 + k);
      char *dx_row = row_at(p.dx, size_of(type), at);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int j = W * (t + T * v);
        if (j >= n) continue;
        float xhat[W], g[W], dresidual[W] = {};
        unpack(x[k][v], xhat);
        unpack(dy[k][v], g);
        if (p.dresidual.data) unpack(load(row_at(p.dresidual, size_of(type), at), j), dresidual);
#pragma unroll
        for (int e = 0; e < W; ++e) {
          xhat[e] = (centred ? xhat[e] - mean[k] : xhat[e]) * rstd[k];
          g[e] = dx_of<P>(xhat[e], g[e] * scale[v][e], rstd[k], sums + k * N, p.dresidual.data, dresidual[e]);
        }
        store_packed<type>(dx_row + j * size_of(type), g);
      }
    }
  }

  // ---- The chains ----
  if constexpr (grouped) {
    static_assert(V == 1 && kTeams % kGroupChains == 0, "whole groups");
    constexpr int kColumns = T * W, kGroups = kTeams / kGroupChains;
    auto store_groups = [&](const Vector &result, float *groups, float(&of)[W]) {
      if (!result.data) return;
      __syncthreads();
#pragma unroll
      for (int e = 0; e < W; e += 4)
        *reinterpret_cast<float4 *>(spread + threadIdx.x * W + e) = make_float4(of[e], of[e + 1], of[e + 2], of[e + 3]);
      __syncthreads();
      for (int i = int(threadIdx.x); i < kGroups * kColumns / 4; i += kBlock<T>) {
        const int group = i / (kColumns / 4), at = i % (kColumns / 4) * 4;
        const int64_t partial = block_number() * kGroups + group;
        if (at >= n || partial * kDweightGroupRows >= p.rows) continue;
        float4 sum = {};
#pragma unroll
        for (int k = 0; k < kGroupChains; ++k) {
          const float4 part = *reinterpret_cast<const float4 *>(spread + (group * kGroupChains + k) * kColumns + at);
          sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
        }
        store_kept(groups + partial * p.n + at, sum);
      }
    };
    float *const sums_at = static_cast<float *>(p.workspace);
    store_groups(p.dweight, sums_at, of_weight[0]);
    if constexpr (centred) store_groups(p.dbias, sums_at + divide_up(p.rows, kDweightChainRows) * p.n, of_bias[0]);
  } else {
    const int64_t width = heads * p.n;
    auto store_chain = [&](const Vector &result, float *chains, float(&of)[W], int v) {
      const int j = W * (t + T * v);
      if (!result.data || count <= 0 || j >= n) return;
      float *to = chains + chain_number * width + column + j;
#pragma unroll
      for (int e = 0; e < W; e += 4)
        *reinterpret_cast<float4 *>(to + e) = make_float4(of[e], of[e + 1], of[e + 2], of[e + 3]);
    };
    float *const sums_at = static_cast<float *>(p.workspace);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      store_chain(p.dweight, sums_at, of_weight[v], v);
      store_chain(p.dbias, sums_at + divide_up(rows, kDweightChainRows) * width, of_bias[v], v);
    }
  }
}

// ---- Short -------------------------------------------------------------------------------------------------------

constexpr int kLongestShortRow = 512;

template <Type type, int team, bool residual> struct Chain {
  static constexpr int T = team, W = kVector, R = 4, kTeams = kDweightChainRows / R, kThreads = T * kTeams;
  static constexpr int kVectorBytes = W * size_of(type), kRowBytes = T * kVectorBytes;
  static constexpr int kTensorBytes = kDweightChainRows * kRowBytes, kTensors = residual ? 3 : 2;
  static_assert(kThreads * 2 == T * W, "two columns a thread");
  // Shared memory: the tensors; rstd; the exchange of the teams' joins.
  static constexpr int kRstdAt = kTensors * kTensorBytes;
  static constexpr int kExchangeAt = kRstdAt + kDweightChainRows * int(sizeof(float));
  static constexpr int kSharedBytes = kExchangeAt + kTeams * kExchange<T, R> * int(sizeof(float));
};

template <Type type, int team_threads, bool residual>
__global__ void __launch_bounds__(Chain<type, team_threads, residual>::kThreads)
    rmsnorm_backward_short_kernel(const __grid_constant__ RmsNormBackward p) {
  using C = Chain<type, team_threads, residual>;
  constexpr int T = C::T, W = C::W, R = C::R, kBytes = size_of(type);
  extern __shared__ __align__(16) char shared[];
  float *rstds = reinterpret_cast<float *>(shared + C::kRstdAt);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int thread = int(threadIdx.x), t = thread % T, row0 = thread / T * R, n = int(p.n);
  const int64_t first = int64_t(blockIdx.x) * kDweightChainRows;
  const int64_t left = p.rows - first;
  const int count = left < kDweightChainRows ? int(left) : kDweightChainRows;  // not positive: no rows
  const bool inside = W * t < n;
  char *const mine = shared + t * C::kVectorBytes + row0 * C::kRowBytes;

#pragma unroll
  for (int k = 0; k < R; ++k) {
    const bool there = inside && row0 + k < count;  // else nothing is read
    const RowIndex row = there ? row_index(p.inner, first + row0 + k) : RowIndex{};
    const int at = t * C::kVectorBytes;
    auto fetch = [&](const Rows &rows, int tensor) {
#pragma unroll
      for (int piece = 0; piece < C::kVectorBytes; piece += 16)
        copy_async_piece<16>(mine + k * C::kRowBytes + tensor * C::kTensorBytes + piece,
                             row_at(rows, kBytes, row) + at + piece, there);
    };
    fetch(p.x, 0);
    fetch(p.dy, 1);
    if constexpr (residual) fetch(p.dresidual, 2);
  }
  commit_copies();
  if (thread < kDweightChainRows)  // -0: as in a Turn above
    rstds[thread] = thread < count ? of_row(p.rstd, first + thread) : -0.0f;
  float scale[W] = {};
  if (inside) {
    Scale<W> weight;
    weight.load(p.weight, W * t);
    weight.unpack(p.weight, p.weight_offset, scale);
  }
  wait_copies<0>();
  __syncthreads();

  // ---- Columns 2 thread and 2 thread + 1 ----
  if (p.dweight.data) {
    const char *pair = shared + thread * 2 * kBytes;
    float2 chain = {};
#pragma unroll
    for (int r = 0; r < kDweightChainRows; ++r) {
      float x[2], dy[2];
      unpack(load_packed<type, 2>(pair + r * C::kRowBytes), x);
      unpack(load_packed<type, 2>(pair + r * C::kRowBytes + C::kTensorBytes), dy);
      chain.x = fmaf(dy[0], x[0] * rstds[r], chain.x);
      chain.y = fmaf(dy[1], x[1] * rstds[r], chain.y);
    }
    if (2 * thread < n) store_kept(static_cast<float *>(p.workspace) + blockIdx.x * p.n + 2 * thread, chain);
  }

  // ---- Rows row0 to row0 + 3 ----
  if (p.dx.data) {
    Lanes<T, W, 1> lanes[R];
    float rstd[R], c[R];
    auto read = [&](int k, int tensor, float(&to)[W]) {
      unpack(load_packed<type, W>(mine + k * C::kRowBytes + tensor * C::kTensorBytes), to);
    };
#pragma unroll
    for (int k = 0; k < R; ++k) {
      float xhat[W], g[W];
      rstd[k] = rstds[row0 + k];
      read(k, 0, xhat);
      read(k, 1, g);
#pragma unroll
      for (int e = 0; e < W; ++e) {
        xhat[e] *= rstd[k];
        g[e] *= scale[e];
      }
      lanes[k].add(0, inside, g, xhat);
    }
    float *exchange = reinterpret_cast<float *>(shared + C::kExchangeAt) + row0 / R * kExchange<T, R>;
    join(lanes, exchange, [&](float sum) { return sum / float(n); }, c);
    int row_again = row0;
    make_opaque(row_again);  // else the rows' addresses are made early and kept in registers that further blocks need
#pragma unroll
    for (int k = 0; k < R; ++k) {
      float xhat[W], dy[W], dx[W];
      read(k, 0, xhat);
      read(k, 1, dy);
#pragma unroll
      for (int e = 0; e < W; ++e) {
        xhat[e] *= rstd[k];
        dx[e] = fmaf(-xhat[e], c[k], dy[e] * scale[e]);
      }
      if constexpr (residual) {
        float dresidual[W];
        read(k, 2, dresidual);
#pragma unroll
        for (int e = 0; e < W; ++e) dx[e] = fmaf(rstd[k], dx[e], dresidual[e]);
      } else {
#pragma unroll
        for (int e = 0; e < W; ++e) dx[e] *= rstd[k];
      }
      if (inside && row0 + k < count)
        store_packed<type>(row_at(p.dx, kBytes, p.inner, first + row_again + k) + t * C::kVectorBytes, dx);
    }
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

// Calls f with the threads of a team.
template <class F> auto with_team(int64_t n, const F &f) {
  if (n <= 32 * kVector) return f(std::integral_constant<int, 32>{});
  return f(std::integral_constant<int, 64>{});
}

struct Short {
  void (*kernel)(RmsNormBackward);
  int threads, shared_bytes;
};

Short short_of(const RmsNormBackward &p) {
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return with_team(p.n, [&](auto T) {
      using C = Chain<type, T, false>;
      using WithResidual = Chain<type, T, true>;
      if (p.dresidual.data)
        return Short{rmsnorm_backward_short_kernel<type, T, true>, C::kThreads, WithResidual::kSharedBytes};
      return Short{rmsnorm_backward_short_kernel<type, T, false>, C::kThreads, C::kSharedBytes};
    });
  });
}

template <class P, Type type, class Shape, bool grouped> pydet_status launch_chains(const char *name, const P &p) {
  constexpr int T = Shape::T, kTeams = kBlock<T> / T;
  const int64_t jobs = divide_up(p.rows / heads_of(p), kDweightChainRows) * heads_of(p);
  return launch(blocks_of(name, p, grid_of(divide_up(jobs, kTeams), kBlock<T>), kBlock<T>),
                norm_backward_rows_kernel<P, type, T, Shape::W, Shape::V, Shape::R, grouped>, p);
}

template <class P> pydet_status by_chains(const char *name, const P &p) {
  return with_sums_over_rows(name, p, 1, [&] {
    return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
      return with_first<RowShape<8, 8, 1, 2>, RowShape<16, 8, 1, 2>, RowShape<32, 8, 1, 2>, RowShape<64, 8, 1, 2>,
                        RowShape<128, 8, 1, 2>>(
          p.n, [&](auto shape) { return launch_chains<P, type, decltype(shape), false>(name, p); });
    });
  });
}

// Many short rows, by groups.
constexpr int64_t kLongest = 1024, kLongestNarrow = 128;
template <class P> bool narrow(const P &p) { return p.n <= kLongestNarrow && p.rows >= 16384; }
template <class P> pydet_status by_groups(const char *name, const P &p) {
  return with_sums_over_rows(name, p, kGroupChains, [&] {
    return with_type<kHalfTypes>(p.x.type, [&](auto type) {
      return with_first<RowShape<8, 8, 1, 2>, RowShape<16, 8, 1, 2>>(
          p.n, [&](auto shape) { return launch_chains<P, type, decltype(shape), true>(name, p); });
    });
  });
}

}  // namespace

bool rmsnorm_backward_heads_takes(const RmsNormBackward &p) {
  return p.n <= kLongest && rows_whole(p) && vector_aligned(p.weight);
}
pydet_status rmsnorm_backward_heads(const RmsNormBackward &p) { return by_chains("rmsnorm_backward_heads", p); }

bool rmsnorm_backward_narrow_takes(const RmsNormBackward &p) {
  return p.n <= kLongestNarrow && rows_whole(p) && vector_aligned(p.weight);
}
// The chains of fewer rows do not fill the device.
bool rmsnorm_backward_narrow_prefers(const RmsNormBackward &p) { return narrow(p); }
pydet_status rmsnorm_backward_narrow(const RmsNormBackward &p) { return by_groups("rmsnorm_backward_narrow", p); }

bool layernorm_backward_rows_takes(const LayerNormBackward &p) {
  return p.n <= kLongest && rows_whole(p) && vector_aligned(p.weight);
}
pydet_status layernorm_backward_rows(const LayerNormBackward &p) {
  constexpr const char *kName = "layernorm_backward_rows";
  return p.x.type != Type::f32 && narrow(p) ? by_groups(kName, p) : by_chains(kName, p);
}

bool rmsnorm_backward_short_takes(const RmsNormBackward &p) {
  return p.n <= kLongestShortRow && rows_whole(p) && vector_aligned(p.weight) &&
         short_of(p).shared_bytes <= gpu_shared_bytes(p.device.id);
}

// Of many rows the chains are a burden as partials, and of 257 to 384 columns many threads have none. Measured on an H100,
// us, here and by groups: 65536x512 79 and 74, 55717x272 52.2 and 46.1, 30077x176 21.4 and 18.8; but 7110x208 8.5 and 9.9,
// 27134x424 35.2 and 39.5.
bool rmsnorm_backward_short_chain_prefers(const RmsNormBackward &p) {
  const int64_t most = p.n <= 256 ? 16384 : p.n <= 384 ? 8000 : 32768;
  return p.rows < most || !p.dweight.data;
}

pydet_status rmsnorm_backward_short_chain(const RmsNormBackward &p) {
  return with_sums_over_rows("rmsnorm_backward_short", p, 1, [&] {
    // Of 16384 x 256, 1024 blocks, 8 on a multiprocessor are all of them at once, and take 18 us; 7 take 14.
    constexpr int kMostBlocks = 7, kSharedOfBlock = kMostSharedBytes / kMostBlocks / 1024 * 1024 - 1024;
    const Short one = short_of(p);
    Launch where = {"rmsnorm_backward_short", static_cast<gpu_stream>(p.stream),
                    dim3(unsigned(divide_up(p.rows, kDweightChainRows))), dim3(unsigned(one.threads)),
                    one.shared_bytes < kSharedOfBlock ? kSharedOfBlock : one.shared_bytes};
    where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
    return launch(where, one.kernel, p);
  });
}

}  // namespace pydet
