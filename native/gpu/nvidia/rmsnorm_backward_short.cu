// Gradients of RMSNorm for rows of up to 512, in fp32 (NUMERICS.md, "RMSNorm"): the CPU's bits. The formulas are those
// of rmsnorm_backward.cu.
//
// A block takes a chain of 16 rows, all of them at once in shared memory. First its threads are columns: each goes down
// two of them, which is the chain of dweight. Then its four teams are rows, four each, joined together: dx. So no row
// waits for another, where a ring of rows would take four turns of 0.7 us (4096 x 256: 8.5 us, here 6.4). Four blocks
// may be a cluster and leave the sum of their group instead of their chains: the columns of a quarter of the threads
// are sent to one of them each, while the rows are made.

#include "gpu/cluster.h"
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
  // Shared memory: the tensors; what a cluster sends, two columns a thread; rstd; the exchange of the teams' joins.
  static constexpr int kSumsAt = kTensors * kTensorBytes, kRstdAt = kSumsAt + kThreads * int(sizeof(float2));
  static constexpr int kArrivedAt = kRstdAt + kDweightChainRows * int(sizeof(float)), kExchangeAt = kArrivedAt + 16;
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
  constexpr int T = C::T, W = C::W, R = C::R, kBytes = size_of(type), kQuarter = C::kThreads / kClusterBlocks;
  extern __shared__ __align__(16) char shared[];
  float *rstds = reinterpret_cast<float *>(shared + C::kRstdAt);
  float2 *sums = reinterpret_cast<float2 *>(shared + C::kSumsAt);
  uint64_t *arrived = reinterpret_cast<uint64_t *>(shared + C::kArrivedAt);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const bool clustered = in_cluster();
  if (clustered) expect_from_cluster(arrived, C::kThreads * int(sizeof(float2)));
  const int thread = int(threadIdx.x), t = thread % T, row0 = thread / T * R, n = int(p.n);
  const int rank = int(blockIdx.x) % kClusterBlocks;
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
  const int64_t partial = clustered ? blockIdx.x / kClusterBlocks : blockIdx.x;
  float *partials = static_cast<float *>(p.workspace) + partial * p.n;
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
    if (clustered) {
      meet_cluster();
      send(sums + rank * kQuarter + thread % kQuarter, chain, arrived, thread / kQuarter);
    } else if (2 * thread < n) {
      store_kept(partials + 2 * thread, chain);
    }
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

  if (p.dweight.data && clustered && thread < kQuarter) {
    const int column = 2 * (rank * kQuarter + thread);
    float2 sum = {};
    wait_for_cluster(arrived);
#pragma unroll
    for (int k = 0; k < kClusterBlocks; ++k) {
      float2 part = sums[k * kQuarter + thread];
      sum = make_float2(sum.x + part.x, sum.y + part.y);
    }
    if (column < n) store_kept(partials + column, sum);
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

pydet_status backward_short(const RmsNormBackward &p, bool clustered) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_backward_short", guard.error());
  pydet_status status = ready_to_join(p);
  if (status != PYDET_OK) return status;
  clustered = clustered && p.dweight.data;
  if (p.rows > 0) {
    // Of 16384 x 256, 1024 blocks, 8 on a multiprocessor are all of them at once, and take 18 us; 7 take 14.
    const int most_blocks = clustered ? 8 : 7, shared_of_block = kMostSharedBytes / most_blocks / 1024 * 1024 - 1024;
    Short one = short_of(p);
    int shared_bytes = one.shared_bytes < shared_of_block ? shared_of_block : one.shared_bytes;
    int64_t blocks =
        clustered ? divide_up(p.rows, kDweightGroupRows) * kClusterBlocks : divide_up(p.rows, kDweightChainRows);
    Launch where = {"rmsnorm_backward_short", static_cast<gpu_stream>(p.stream), dim3(unsigned(blocks)),
                    dim3(unsigned(one.threads)), shared_bytes};
    where.cluster = clustered ? kClusterBlocks : 1;
    where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
    status = launch(where, one.kernel, p);
    if (status != PYDET_OK) return status;
  }
  return join_partials(p, clustered ? kGroupChains : 1);
}

}  // namespace

bool rmsnorm_backward_short_takes(const RmsNormBackward &p) {
  return p.n % kVector == 0 && p.n <= kLongestShortRow && rows_aligned(p.x) && rows_aligned(p.dy) &&
         rows_aligned(p.dx) && rows_aligned(p.dresidual) && vector_aligned(p.weight) &&
         short_of(p).shared_bytes <= gpu_shared_bytes(p.device.id);
}

// Of many rows the chains are a burden as partials: 65536 x 512 takes 79 us with them, 74 with groups.
bool rmsnorm_backward_short_chain_prefers(const RmsNormBackward &p) { return p.rows < 32768 || !p.dweight.data; }

pydet_status rmsnorm_backward_short_chain(const RmsNormBackward &p) { return backward_short(p, false); }
pydet_status rmsnorm_backward_short_cluster(const RmsNormBackward &p) { return backward_short(p, true); }

}  // namespace pydet
