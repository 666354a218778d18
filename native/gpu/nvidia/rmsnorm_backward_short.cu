// Gradients of RMSNorm for rows of up to 512, in fp32 (NUMERICS.md, "RMSNorm"): the CPU's bits. The formulas are those
// of rmsnorm_backward.cu.
//
// A block takes a chain of 16 rows, all of them at once in shared memory. First its threads are columns: each goes down
// two of them, which is the chain of dweight. Then its four teams are rows, four each, joined together: dx. So no row
// waits for another, where a ring of rows would take four turns of 0.7 us (4096 x 256: 8.5 us, here 6.4).

#include "gpu/kernels.h"
#include "gpu/any/column_sums.h"
#include "gpu/any/rows.h"

namespace pydet {
namespace {

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

// Two adjacent elements.
template <Type type> __device__ __forceinline__ float2 load_pair(const char *at) {
  if constexpr (type == Type::f32) {
    return *reinterpret_cast<const float2 *>(at);
  } else {
    uint32_t word = *reinterpret_cast<const uint32_t *>(at);
    uint16_t first = uint16_t(word), second = uint16_t(word >> 16);
    return make_float2(Element<type>::to_f32(first), Element<type>::to_f32(second));
  }
}

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
  // A row past the last has x = dy = +0; with -0 for its rstd it adds (+0)(-0) to a chain, which changes nothing.
  if (thread < kDweightChainRows)
    rstds[thread] = thread < count ? reinterpret_cast<const float *>(p.rstd.data)[first + thread] : -0.0f;
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
      float2 x = load_pair<type>(pair + r * C::kRowBytes);
      float2 dy = load_pair<type>(pair + r * C::kRowBytes + C::kTensorBytes);
      chain.x = fmaf(dy.x, x.x * rstds[r], chain.x);
      chain.y = fmaf(dy.y, x.y * rstds[r], chain.y);
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

}  // namespace

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
