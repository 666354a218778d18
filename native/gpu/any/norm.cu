// The kernels of RMSNorm and LayerNorm, in fp32 (NUMERICS.md, "RMSNorm", "LayerNorm"): the CPU's bits.
//
//   x    = round(x + residual), stored in sum          only with a residual
//   mean = rowsum(x, 1) / n, d = x - mean              LayerNorm; d is x in RMSNorm
//   rstd = 1 / sqrt(rowsum(d, d) / n + eps)
//   y    = round((d rstd) (w + weight_offset)), or round(fmaf(d rstd, w + weight_offset, bias))
//   q    = round(clamp(y / s))                         RMSNorm quantised (norm_fp8.h)
//
// Held: rows of whole vectors up to 16384, LayerNorm's on HIP 8192, are in registers of their team (rows.h), one or two
// at a time; a block ends with them, and enough blocks share a multiprocessor to keep the memory busy. Where a warp is
// enough, no barrier stands between the two sums of LayerNorm. RMSNorm's weights, and LayerNorm's of few rows, are loaded
// ahead of the sums, since little else hides the memory's latency.
//
// General: rows of any length and place, weights of heads, biases, a sum in fp32 beside another type, three strides. A
// team holds a row up to 8192, and passes over it again from there on. Types are asked for at run time.

#include "gpu/kernels.h"
#include "gpu/any/norm_fp8.h"

namespace pydet {
namespace {

constexpr int W = kVector;
constexpr float kNothing = -0.0f;  // which changes no number that it is added to

// ---- Held ----------------------------------------------------------------------------------------------------------

// Vectors whose weights are loaded together: all, or one, whose wait others hide.
template <int V, bool early> constexpr int kTogether = early ? V : 1;
// Whether they are loaded ahead of the sums: of LayerNorm's longer rows they would take registers of the row.
template <class P, int V, bool early> constexpr bool kAheadOfSums = early && (V <= 2 || !kCentred<P>);

template <class P, Type type, int T, int V, int R, bool early>
__global__ void __launch_bounds__(kBlock<T>) norm_kernel(const __grid_constant__ P p) {
  constexpr bool centred = kCentred<P>;
  constexpr int kBytes = size_of(type), kVectorStep = T * W * kBytes, kTeams = kBlock<T> / T;
  constexpr int kRoom = kTeams * kExchange<T, R> + 1, kWhole = V <= 1 ? 1 : V <= 2 ? 2 : V <= 4 ? 4 : 8;
  using Sums = Lanes<T, W, kWhole>;  // groups are joined by halves
  __shared__ __align__(16) float of_mean[centred ? kRoom : 1], of_squares[kRoom];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T, n = int(p.n);
  const int64_t first = (block_number() * kTeams + team) * R;
  bool inside[V], there[R];
  RowIndex index[R];
#pragma unroll
  for (int v = 0; v < V; ++v) inside[v] = W * (t + T * v) < n;
#pragma unroll
  for (int k = 0; k < R; ++k) {
    there[k] = first + k < p.rows;
    index[k] = row_index(p.inner, first + k);
  }

  auto load = [&](const Rows &rows, Packed<type, W>(&to)[R][V]) {
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const char *row = row_at(rows, kBytes, index[k]) + t * W * kBytes;
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (there[k] && inside[v]) to[k][v] = load_packed<type, W>(row + v * kVectorStep);
    }
  };
  Packed<type, W> x[R][V] = {};
  load(p.x, x);
  if (p.residual.data) {
    Packed<type, W> added[R][V] = {};
    load(p.residual, added);
#pragma unroll
    for (int k = 0; k < R; ++k) {
      char *row = row_at(p.sum, kBytes, index[k]) + t * W * kBytes;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float one[W], other[W];
        unpack(x[k][v], one);
        unpack(added[k][v], other);
#pragma unroll
        for (int e = 0; e < W; ++e) one[e] += other[e];
        x[k][v] = pack<type>(one);
        if (there[k] && inside[v]) *reinterpret_cast<Packed<type, W> *>(row + v * kVectorStep) = x[k][v];
      }
    }
  }

  constexpr int G = kTogether<V, early>;
  constexpr bool ahead = kAheadOfSums<P, V, early>;
  struct Weights {
    Scale<W> scale[G], shift[centred ? G : 1];
  };
  auto load_weights = [&](int v0, Weights &to) {
#pragma unroll
    for (int v = v0; v < v0 + G && v < V; ++v) {
      if (!inside[v]) continue;
      to.scale[v - v0].load(p.weight, W * (t + T * v));
      if constexpr (centred) to.shift[v - v0].load(p.bias, W * (t + T * v));
    }
  };
  Weights loaded;
  if constexpr (ahead) load_weights(0, loaded);

  Sums lanes[R], squares[R];
  float mean[R] = {}, rstd[R];
  if constexpr (centred) {
#pragma unroll
    for (int k = 0; k < R; ++k)
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float one[W];
        unpack(x[k][v], one);
        float(&lane)[W] = lanes[k].lane[v % Sums::kSlots];
#pragma unroll
        for (int e = 0; e < W; ++e) lane[e] = v < Sums::kSlots ? one[e] : lane[e] + one[e];
      }
    // Every lane begins with +0: that changes -0 alone, and once is enough. Past the row's end x is +0.
    join(lanes, of_mean + team * kExchange<T, R>, [&](float sum) { return (sum + 0.0f) / float(p.n); }, mean);
  }
  // A number less its row's mean. Past the row's end it is +0, which no square notices.
  auto less_mean = [&](float number, int k, bool in) { return centred ? number - (in ? mean[k] : 0.0f) : number; };
#pragma unroll
  for (int k = 0; k < R; ++k)
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if constexpr (!early) keep_packed(x[k][v]);
      float d[W];
      unpack(x[k][v], d);
#pragma unroll
      for (int e = 0; e < W; ++e) d[e] = less_mean(d[e], k, inside[v]);
      squares[k].add(v, true, d, d);
      if constexpr (!early) keep_packed(x[k][v]);
    }
  join(squares, of_squares + team * kExchange<T, R>, [&](float sum) { return rstd_of(sum, p.n, p.eps); }, rstd);
  if (t == 0)
#pragma unroll
    for (int k = 0; k < R; ++k)
      if (there[k]) {
        if constexpr (centred) store_of_row(p.mean, first + k, mean[k]);
        store_of_row(p.rstd, first + k, rstd[k]);
      }

  char *y_row[R];
#pragma unroll
  for (int k = 0; k < R; ++k) y_row[k] = row_at(p.y, kBytes, index[k]) + t * W * kBytes;
#pragma unroll
  for (int v0 = 0; v0 < V; v0 += G) {
    if (G == 1 && !inside[v0]) continue;
    Weights weights;
    if constexpr (ahead) weights = loaded;
    else load_weights(v0, weights);
#pragma unroll
    for (int v = v0; v < v0 + G && v < V; ++v) {
      if (!inside[v]) continue;
      float scale[W], shift[W];
      weights.scale[v - v0].unpack(p.weight, p.weight_offset, scale);
      if constexpr (centred) weights.shift[v - v0].unpack(p.bias, kNothing, shift);
#pragma unroll
      for (int k = 0; k < R; ++k) {
        float y[W];
        unpack(x[k][v], y);
#pragma unroll
        for (int e = 0; e < W; ++e) {
          const float xhat = less_mean(y[e], k, true) * rstd[k];
          y[e] = centred && p.bias.data ? fmaf(xhat, scale[e], shift[e]) : xhat * scale[e];
        }
        if constexpr (kQuantizes<P>) {  // y takes the place of x
          x[k][v] = pack<type>(y);
          if (p.y.data && there[k]) *reinterpret_cast<Packed<type, W> *>(y_row[k] + v * kVectorStep) = x[k][v];
        } else if (there[k]) {
          store_packed<type>(y_row[k] + v * kVectorStep, y);
        }
      }
    }
  }
  if constexpr (kQuantizes<P>) quantize_held<T>(p, team, t, index, there, inside, x);
}

// ---- General -------------------------------------------------------------------------------------------------------

// Blocks a multiprocessor is to hold, 0: as the compiler likes, which spills registers where rows are read again, and
// before Hopper where four vectors hold them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <int V> constexpr int kBlocks = V == 0 ? 2 : V == 4 ? 1 : 0;
#else
template <int V> constexpr int kBlocks = V == 0 ? 2 : 0;
#endif

// V vectors a thread hold the row; 0: it is of any length, and read again.
template <class P, int T, int V>
__global__ void __launch_bounds__(kBlock<T>, kBlocks<V>) norm_general_kernel(const __grid_constant__ P p, bool whole) {
  constexpr bool centred = kCentred<P>, held = V > 0;
  constexpr int kTeams = kBlock<T> / T, kVectors = held ? V : 1, kRoom = kTeams * kExchange<T, 1> + 1;
  __shared__ float of_mean[centred ? kRoom : 1], of_squares[kRoom];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int team = int(threadIdx.x) / T, t = int(threadIdx.x) % T;
  const int64_t n = p.n, last = p.rows - 1, mine = block_number() * kTeams + team, r = mine < last ? mine : last;
  const Place at = place_of(p, r);
  const Rows &normed = p.residual.data ? p.sum : p.x;
  float x[kVectors][W] = {}, mean[1] = {}, rstd[1];
  // Calls f(v, j, x) for the thread's vectors: of a row that is not held, read again unless it is `given`.
  auto pass = [&](bool given, const auto &f) {
#pragma unroll kVectors
    for (int v = 0; held ? v < V : W * (t + int64_t(T) * v) < n; ++v) {
      const int64_t j = W * (t + int64_t(T) * v);
      if (j >= n) continue;
      float(&one)[W] = x[held ? v : 0];
      if (!held && !given) load_eight(row_at(normed, at), normed.type, j, n, whole, one);
      f(v, j, one);
    }
  };
  auto fetch = [&](int64_t j, float(&one)[W]) {
    load_eight(row_at(p.x, at), p.x.type, j, n, whole, one);
    if (!p.residual.data) return;
    float other[W];
    load_eight(row_at(p.residual, at), p.residual.type, j, n, whole, other);
#pragma unroll
    for (int e = 0; e < W; ++e) one[e] = rounded_as(p.sum.type, one[e] + other[e]);
    if (mine <= last) store_eight(row_at(p.sum, at), p.sum.type, j, n, whole, one);
  };
  Lanes<T, W, kVectors> lanes[1], squares[1];
  pass(true, [&](int v, int64_t j, float(&one)[W]) {
    fetch(j, one);
    if constexpr (centred) lanes[0].add_left(v, n - j, one, Ones());
    else squares[0].add_left(v, n - j, one, one);
  });
  if constexpr (centred) {
    join(lanes, of_mean + team * kExchange<T, 1>, [&](float sum) { return sum / float(n); }, mean);
    pass(false, [&](int v, int64_t j, const float(&one)[W]) {
      float d[W];
#pragma unroll
      for (int e = 0; e < W; ++e) d[e] = one[e] - mean[0];
      squares[0].add_left(v, n - j, d, d);
    });
  }
  join(squares, of_squares + team * kExchange<T, 1>, [&](float sum) { return rstd_of(sum, n, p.eps); }, rstd);
  if (mine > last) return;
  if (t == 0) {
    if constexpr (centred) store_of_row(p.mean, r, mean[0]);
    store_of_row(p.rstd, r, rstd[0]);
  }
  const int64_t first = first_weight(p, r);
  auto normalize = [&](int64_t j, float(&y)[W]) {
    float scale[W], bias[W];
    load_scales(p.weight, p.weight_offset, first, j, n, whole, scale);
    if (p.bias.data) load_eight(p.bias.data + first * size_of(p.bias.type), p.bias.type, j, n, whole, bias);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const float xhat = (centred ? y[e] - mean[0] : y[e]) * rstd[0];
      y[e] = p.bias.data ? fmaf(xhat, scale[e], bias[e]) : xhat * scale[e];
    }
  };
  if constexpr (kQuantizes<P>) {
    static_assert(T == kWarp || kTeams == 1, "a warp or a block reads its row again");
    quantize_general<T>(p, at, t, whole, [&](int64_t j, float(&y)[W]) {
      load_eight(row_at(normed, at), normed.type, j, n, whole, y);
      normalize(j, y);
    });
  } else {
    pass(false, [&](int, int64_t j, float(&y)[W]) {
      normalize(j, y);
      store_eight(row_at(p.y, at), p.y.type, j, n, whole, y);
    });
  }
}

// ---- Host ----------------------------------------------------------------------------------------------------------

template <int T, int V, int R, bool early> struct Team : RowShape<T, kVector, V, R>, std::bool_constant<early> {};

// Calls f with a team that holds a row of n: few threads with much to do each, and some rows more where a row is short.
template <class F> pydet_status with_team(const RmsNorm &p, const F &f) {
  return with_first<Team<8, 1, 2, true>, Team<16, 1, 2, true>, Team<32, 1, 1, true>, Team<32, 2, 2, true>,
                    Team<64, 2, 2, true>, Team<128, 2, 1, true>, Team<128, 4, 1, true>, Team<256, 4, 1, true>,
                    Team<256, 8, 1, true>>(p.n, f);
}

// Whether so many rows leave much of the device idle.
[[maybe_unused]] bool few_rows(int64_t rows, int64_t n) {
  return n <= 8192 && rows <= (n <= 1024 ? 1024 : 512) && rows * n <= 2'000'000;
}

// On CUDA, where that was timed, of many rows few threads with much to do each.
template <class F> pydet_status with_team(const LayerNorm &p, const F &f) {
  const int64_t rows = p.rows, n = p.n;
  if constexpr (kGpuDeviceType != PYDET_CUDA) {
    return with_first<Team<32, 1, 1, true>, Team<128, 2, 1, false>, Team<256, 4, 1, false>>(n, f);
  } else if (few_rows(rows, n)) {
    return with_first<Team<16, 1, 1, true>, Team<32, 1, 1, true>, Team<64, 1, 1, true>, Team<128, 1, 1, true>,
                      Team<128, 2, 1, true>, Team<256, 2, 1, true>, Team<256, 4, 1, true>>(n, f);
  } else {
    if (n <= 32 * 16)
      return with_first<Team<8, 1, 2, false>, Team<16, 1, 2, false>, Team<32, 1, 2, false>, Team<32, 2, 2, false>>(n,
                                                                                                                   f);
    // 2600x640 5.3 us, by the next one 6.2, 6000x640 8.6 and 9.2; but 4096x768 8.0 and 7.3.
    const bool in_time = (rows > 2400 && rows <= 3600) || rows > 4500;
    if (n <= 32 * 24 && in_time) return f(Team<32, 3, 2, false>{});
    if (n <= 64 * 16) return f(Team<64, 2, 2, false>{});
    // 2300x1408 7.8 us, by the one after 7.1; 1300x1408 5.5 and 6.3, 4096x1536 13.1 and 12.1.
    const bool wide = (rows > 1400 && rows <= 2400) || (n > 64 * 22 && rows > 3200 && rows <= 6000);
    if (n <= 64 * 24 && !wide) return f(Team<64, 3, 1, false>{});
    return with_first<Team<128, 2, 2, false>, Team<128, 3, 1, false>, Team<128, 4, 1, false>, Team<256, 3, 1, false>,
                      Team<256, 4, 1, false>, Team<256, 5, 1, false>, Team<256, 6, 1, false>, Team<256, 8, 1, false>>(
        n, f);
  }
}

// Calls f with a team that holds a row of n whose y is quantised. On CUDA, where that was timed (H200): 8192x5120 77 us,
// by the next one 92; 2048x12288 49 and 52, 8192x2880 44 and 48; but 4096x7168 with weights loaded late 67 and 56.
// 128x4096 3.7 by 256 threads, by 128 4.0.
template <class F> pydet_status with_team(const RmsNormQuantize &p, const F &f) {
  const RmsNorm &norm = p;
  if (kGpuDeviceType != PYDET_CUDA || p.n <= 2048) return with_team(norm, f);
  if constexpr (kGpuDeviceType == PYDET_CUDA) {
    if (p.n <= 4096 && p.rows <= 256) return f(Team<256, 2, 1, true>{});
    return with_first<Team<128, 3, 1, false>, Team<128, 4, 1, true>, Team<256, 3, 1, false>, Team<256, 4, 1, true>,
                      Team<256, 5, 1, true>, Team<256, 6, 1, true>, Team<256, 7, 1, true>, Team<256, 8, 1, true>>(p.n,
                                                                                                                  f);
  }
}

template <class P> bool all_whole(const P &p) {
  return p.n % kVector == 0 && rows_aligned(p.x) && rows_aligned(p.residual) && rows_aligned(p.y) &&
         rows_aligned(p.sum) && vector_aligned(p.weight) && vector_aligned(p.bias);
}

// `as`: turns the problem into the one that the kernel for that type gets.
template <class P, class As> pydet_status norm_held(const char *name, const P &p, const As &as) {
  return by_type(name, p, p.x.type, [&](auto type) {
    return with_team(p, [&](auto team) {
      // Of LayerNorm as much in bytes.
      constexpr int T = team.T, R = kCentred<P> && type == Type::f32 ? 1 : team.R;
      return as(type, [&](const auto &problem) {
        using Its = std::decay_t<decltype(problem)>;
        return launch_rows(name, problem, kBlock<T> / T * R, kBlock<T>,
                           norm_kernel<Its, type, T, team.V, R, team.value>);
      });
    });
  });
}
template <class P> pydet_status norm_held(const char *name, const P &p) {
  return norm_held(name, p, [&](auto, const auto &start) { return start(p); });
}

template <class Team, class P> pydet_status launch_general(const char *name, const P &p, Team) {
  constexpr int T = Team::T;
  return launch_rows(name, p, kBlock<T> / T, kBlock<T>, norm_general_kernel<P, T, Team::V>, all_whole(p));
}
template <class P> pydet_status norm_general(const char *name, const P &p) {
  return on_device(name, p,
                   [&] { return with_general_team(p.n, [&](auto team) { return launch_general(name, p, team); }); });
}

}  // namespace

bool rmsnorm_held_takes(const RmsNorm &p) { return p.n <= kLongestHeldRow && all_whole(p); }
pydet_status rmsnorm_held(const RmsNorm &p) { return norm_held("rmsnorm_held", p); }
pydet_status rmsnorm_general(const RmsNorm &p) { return norm_general("rmsnorm_general", p); }

bool rmsnorm_quantize_held_takes(const RmsNormQuantize &p) {
  return p.n <= kLongestHeldRow && all_whole(p) && rows_aligned(p.out, kVector);
}
pydet_status rmsnorm_quantize_held(const RmsNormQuantize &p) {
  return norm_held("rmsnorm_quantize_held", p, [&](auto type, const auto &start) {
    constexpr bool divides = type == Type::f32;
    return divides || p.given() ? start(NormToFp8<true>{p}) : start(NormToFp8<divides>{p});
  });
}
pydet_status rmsnorm_quantize_general(const RmsNormQuantize &p) {
  const char *name = "rmsnorm_quantize_general";
  return on_device(name, p, [&] {
    return with_first<GeneralTeam<32, 1>, GeneralTeam<32, 4>, GeneralTeam<256, 0>>(
        p.n, [&](auto team) { return launch_general(name, NormToFp8<true>{p}, team); });
  });
}

bool layernorm_held_takes(const LayerNorm &p) { return p.n <= kLongestHeldLayer && all_whole(p); }
pydet_status layernorm_held(const LayerNorm &p) { return norm_held("layernorm_held", p); }
pydet_status layernorm_general(const LayerNorm &p) { return norm_general("layernorm_general", p); }

}  // namespace pydet
