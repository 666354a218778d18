// y = round(chain_k(x, w) + bias) for up to 128 rows of x and many weights, through mma.sync: decode on every tensor
// core from sm_80 on, with the bits of gemm_mma.cu (arithmetic sm80 on sm_80 to sm_89, sm90 from sm_90 on).
//
//   D = +0 or y;  D = step(D, w[n, 16i .. 16i+15], x[m, 16i .. 16i+15]) for i ascending            without k_chunk
//   D = +0 or y;  D = D + s_c for chunks c ascending, s_c = such a chain from +0 over its own k    with k_chunk
//
// The weights are the 16-row operand of m16n8k16 and x its 8 columns, so that tiles are so narrow that every SM has
// one: a block makes 16 to 128 rows of w for all of x, or for a part of it where w alone is too few tiles. Four warps
// bring w and x (skinny_mma.h), the others wait at a stage's barrier and multiply. The rings run on over the ends of
// tiles, so that the memory never rests. Up to 4 chunks of k_chunk are made side by side by different warps, which join
// their sums through shared memory.

#include <algorithm>
#include <type_traits>

#include "gpu/nvidia/skinny_mma.h"

namespace pydet {
namespace {

// ---- Products ----------------------------------------------------------------------------------------------------

// A warp's accumulators, and the fragments of two steps at a time, one loaded while the other is multiplied. The rows
// of x that there are not are whatever lies in the stage; nothing of theirs is stored.
template <class S> struct Products {
  using Sums = float[S::rows][S::columns][4];
  static constexpr bool kTwoSteps = S::columns == 1;  // four matrices of x are then those of two steps
  uint32_t w_fragments[2][S::rows][4], x_fragments[2][(S::columns + 1) / 2][4];
  int w_offset, x_offset;  // of this lane's row in a stage

  __device__ __forceinline__ Products(int warp_w, int warp_x, int lane) {
    const int w_row = warp_w * S::rows * kTileRows + lane % 16;
    w_offset = place<S>(w_row, lane / 16);
    const int x_row = warp_x * S::columns * kTileColumns + lane % 8 + (kTwoSteps ? 0 : lane / 16 * 8);
    x_offset = place<S>(x_row, kTwoSteps ? lane / 8 : lane / 8 % 2);
  }

  // Step i of the stages at w and x. A step is 32 bytes of a row: two bits of the swizzled address that no row touches.
  __device__ __forceinline__ void load(uint32_t w, uint32_t x, int i) {
#pragma unroll
    for (int r = 0; r < S::rows; ++r)
      load_matrices<false>(w_fragments[i % 2][r], ((w + w_offset) ^ (i * kStep * 2)) + r * kTileRows * S::row_bytes);
    if constexpr (kTwoSteps) {
      if (i % 2 == 0) load_matrices<false>(x_fragments[i / 2 % 2][0], (x + x_offset) ^ (i * kStep * 2));
    } else {
#pragma unroll
      for (int c = 0; c < S::columns; c += 2)
        load_matrices<false>(x_fragments[i % 2][c / 2],
                             ((x + x_offset) ^ (i * kStep * 2)) + c * kTileColumns * S::row_bytes);
    }
  }

  __device__ __forceinline__ void multiply(Sums &sums, int i) const {
#pragma unroll
    for (int r = 0; r < S::rows; ++r)
#pragma unroll
      for (int c = 0; c < S::columns; ++c) {
        const uint32_t(&x)[4] = kTwoSteps ? x_fragments[i / 2 % 2][0] : x_fragments[i % 2][c / 2];
        const int first = kTwoSteps ? i % 2 * 2 : c % 2 * 2;
        mma<S::type>(sums[r][c], w_fragments[i % 2][r], x[first], x[first + 1]);
      }
  }
};

// Where in the rings a group reads.
template <class S> struct Reader {
  const Layout<S> &at;
  const int lane;
  Cursor w, x;

  __device__ __forceinline__ Reader(const Plan &p, const Layout<S> &layout, int group, int lane_)
      : at(layout), lane(lane_), w(p.w_stages, group, p.groups), x(p.x_stages, group, p.groups) {}
  __device__ __forceinline__ void wait() const {
    barrier_wait(at.w_full(w.stage), w.parity);
    barrier_wait(at.x_full(x.stage), x.parity);
  }
  __device__ __forceinline__ uint32_t w_stage() const { return at.w + w.stage * at.w_bytes; }
  __device__ __forceinline__ uint32_t x_stage() const { return at.x + x.stage * at.x_bytes; }
  // This warp has read stages w_read and x_read.
  __device__ __forceinline__ void release(int w_read, int x_read) const {
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(at.w_empty(w_read));
      barrier_arrive(at.x_empty(x_read));
    }
  }
  __device__ __forceinline__ void next() { w.next(), x.next(); }

  // sums = the chain of `steps` steps from sums, in `visits` stages, of which the last may have none for this group.
  __device__ __forceinline__ void chain(typename Products<S>::Sums &sums, Products<S> &products, int steps,
                                        int visits) {
    const int whole = steps / S::stage_steps;
    if (whole > 0) {
      wait();
      products.load(w_stage(), x_stage(), 0);
    }
#pragma unroll 1
    for (int stage = 0; stage < whole; ++stage) {
      const uint32_t w_now = w_stage(), x_now = x_stage();
      const int w_read = w.stage, x_read = x.stage;
#pragma unroll
      for (int i = 0; i < S::stage_steps; ++i) {
        if (i + 1 < S::stage_steps) {
          products.load(w_now, x_now, i + 1);
        } else {
          next();
          if (stage + 1 < whole) {
            wait();
            products.load(w_stage(), x_stage(), 0);
          }
        }
        products.multiply(sums, i);
      }
      release(w_read, x_read);
    }
#pragma unroll 1
    for (int stage = whole; stage < visits; ++stage) {
      const int count = steps - stage * S::stage_steps;
      wait();
#pragma unroll
      for (int i = 0; i < S::stage_steps; ++i)
        if (i < count) {
          products.load(w_stage(), x_stage(), i);
          products.multiply(sums, i);
        }
      release(w.stage, x.stage);
      next();
    }
  }
};

// d = d + the sums of `count` groups in ascending order, in the first group; the others hand theirs over in shared
// memory, where the same thread of every group has the same elements. Then sums = 0.
template <class S>
__device__ __forceinline__ void join(const Plan &p, uint32_t joins, typename Products<S>::Sums &d,
                                     typename Products<S>::Sums &sums, int group, int count) {
  constexpr int kElements = S::rows * S::columns * 4;
  const int group_threads = p.warps_w * p.warps_x * kWarp, thread = int(threadIdx.x) - group * group_threads;
  // f(an element of d, of sums, its place in shared memory, where `from` is the group that puts it there).
  auto each = [&](int from, auto f) {
    uint32_t at = joins + ((from - 1) * kElements * group_threads + thread) * 4;
#pragma unroll
    for (int i = 0; i < kElements; ++i, at += group_threads * 4)
      f(d[i / 4 / S::columns][i / 4 % S::columns][i % 4], sums[i / 4 / S::columns][i / 4 % S::columns][i % 4], at);
  };
  if (group > 0)
    each(group, [](float &, float sum, uint32_t at) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(sum) : "memory");
    });
  if (p.groups > 1) named_sync(1, p.groups * group_threads);
  each(1, [](float &x, float &sum, uint32_t) {
    x = x + sum;
    sum = 0.0f;
  });
  if (group == 0)
#pragma unroll 1
    for (int other = 1; other < count; ++other)
      each(other, [](float &x, float, uint32_t at) {
        float sum;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(sum) : "r"(at) : "memory");
        x = x + sum;
      });
  if (p.groups > 1) named_sync(1, p.groups * group_threads);
}

template <class S>
__device__ __forceinline__ void multiply(const Gemm &g, const Plan &p, const Layout<S> &at, int warp) {
  const int lane = int(threadIdx.x) % kWarp, group_warps = p.warps_w * p.warps_x;
  const int group = warp / group_warps, warp_w = warp % group_warps / p.warps_x, warp_x = warp % p.warps_x;
  const bool folds = g.k_chunk > 0;
  Reader<S> reader(p, at, group, lane);
  Products<S> products(warp_w, warp_x, lane);
  wait_for_previous_kernel();  // y may be read or written by it, bias written
  for (int tile = int(blockIdx.x); tile < p.tiles; tile += int(gridDim.x)) {
    const int m0 = tile % p.parts * p.part_rows, m_end = min(m0 + p.part_rows, int(g.m));
    const int first_n = tile / p.parts * p.rows + warp_w * S::rows * kTileRows + lane / 4;
    const int first_m = m0 + warp_x * S::columns * kTileColumns + lane % 4 * 2;
    // f(indices of the accumulator, m, n) for every element of y that this thread holds.
    auto each = [&](auto f) {
#pragma unroll
      for (int r = 0; r < S::rows; ++r)
#pragma unroll
        for (int c = 0; c < S::columns; ++c)
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const int m = first_m + c * kTileColumns + q % 2, n = first_n + r * kTileRows + q / 2 * 8;
            if (m < m_end && n < g.n) f(r, c, q, m, n);
          }
    };
    auto bias_at = [&](int m, int n) { return m * g.bias.row_stride + n * g.bias.col_stride; };
    if (g.bias.data && group == 0)
      each([&](int, int, int, int m, int n) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(g.bias.data + bias_at(m, n) * size_of(g.bias.type)));
      });

    // Without k_chunk there is one chunk, whose chain begins at y instead of being added to it.
    float d[S::rows][S::columns][4] = {}, sums[S::rows][S::columns][4] = {};
    if (g.accumulate && group == 0) {
      const float *y = reinterpret_cast<const float *>(g.out.data);
      each([&](int r, int c, int q, int m, int n) {
        const float start = y[m * g.out.row_stride + n];
        if (folds) d[r][c][q] = start;
        else sums[r][c][q] = start;
      });
    }
    for (int first = 0; first < p.steps; first += p.groups * p.chunk_steps) {
      const int left = p.steps - first, longest = min(p.chunk_steps, left);
      const int visits = (longest + S::stage_steps - 1) / S::stage_steps;
      reader.chain(sums, products, max(0, min(left - group * p.chunk_steps, p.chunk_steps)), visits);
      if (!folds) break;
      join<S>(p, at.joins, d, sums, group, min(p.groups, (left + p.chunk_steps - 1) / p.chunk_steps));
    }
    if (group > 0) continue;
    if (!folds)
#pragma unroll
      for (int r = 0; r < S::rows; ++r)
#pragma unroll
        for (int c = 0; c < S::columns; ++c)
#pragma unroll
          for (int q = 0; q < 4; ++q) d[r][c][q] = sums[r][c][q];

    // Types outside of the loops: where they are inside, fetching the instructions takes longer than they do.
    if (g.bias.data)
      with_type<kUnscaledTypes>(g.bias.type, [&](auto type) {
        each([&](int r, int c, int q, int m, int n) {
          d[r][c][q] = d[r][c][q] + load_f32(g.bias.data, decltype(type)::value, bias_at(m, n));
        });
      });
    with_type<kUnscaledTypes>(g.out.type, [&](auto type) {
      each([&](int r, int c, int q, int m, int n) {
        store_rounded(g.out.data, decltype(type)::value, m * g.out.row_stride + n, d[r][c][q]);
      });
    });
  }
}

// f(integral_constant<int, unit>), of 16, 8 or 4 bytes.
template <class F> __device__ __forceinline__ void with_unit(int unit, const F &f) {
  if (unit == 16) f(std::integral_constant<int, 16>());
  else if (unit == 8) f(std::integral_constant<int, 8>());
  else f(std::integral_constant<int, 4>());
}

template <class S>
__global__ void __launch_bounds__(kMostThreads, 1)
    skinny_mma_kernel(const __grid_constant__ Gemm g, const __grid_constant__ Plan p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Layout<S> at(p, shared_address(memory));
  const int warp = __shfl_sync(0xFFFFFFFFu, int(threadIdx.x) / kWarp, 0);
  const int group_warps = p.warps_w * p.warps_x, warps = p.groups * group_warps;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.w_stages; ++i)
      barrier_init(at.w_full(i), kWThreads), barrier_init(at.w_empty(i), group_warps);
    for (int i = 0; i < p.x_stages; ++i)
      barrier_init(at.x_full(i), kXThreads), barrier_init(at.x_empty(i), group_warps);
  }
  __syncthreads();
  const int load_thread = int(threadIdx.x) - warps * kWarp;
  if (warp < warps) multiply<S>(g, p, at, warp);
  else if (load_thread < kWThreads)
    with_unit(p.w_unit, [&](auto unit) { load_weights<S, decltype(unit)::value>(g, p, at, load_thread); });
  else with_unit(p.x_unit, [&](auto unit) { load_x<S, decltype(unit)::value>(g, p, at, load_thread - kWThreads); });
}

// ---- Launch ------------------------------------------------------------------------------------------------------

// The most bytes, up to 16, at whose multiples each row begins; 0 where rows are not along k, or are of single elements.
int unit_of(const Matrix &matrix, int64_t count, int64_t stride, int64_t k_stride, int64_t k) {
  if (k_stride != 1 && k != 1) return 0;
  const uint64_t bits = reinterpret_cast<uintptr_t>(matrix.data) | (count == 1 ? 0 : uint64_t(stride) * 2);
  return bits % 16 == 0 ? 16 : bits % 8 == 0 ? 8 : bits % 4 == 0 ? 4 : 0;
}
int unit_of_x(const Gemm &g) { return unit_of(g.a, g.m, g.a.row_stride, g.a.col_stride, g.k); }
int unit_of_w(const Gemm &g) { return unit_of(g.b, g.n, g.b.col_stride, g.b.row_stride, g.k); }

// How many tiles of 16 rows of w a warp multiplies beside 32 rows of x: two, where a block has warps enough anyway,
// need a third less of what shared memory can deliver.
int row_tiles(const Plan &p) {
  const int tiles = p.rows / kTileRows;
  return p.part_rows > 2 * kTileColumns && tiles % 2 == 0 && tiles * p.warps_x > 4 ? 2 : 1;
}

// The cut that leaves the busiest SM the least: its rounds, times what a round takes. That is the rows of w, from
// memory, or those of w and of x, from the L2 at about twice the speed, or, of a narrow tile, the chain.
Plan plan_of(const Gemm &g) {
  const int64_t sms = std::max(gpu_multiprocessors(g.device.id), 1);
  Plan p = {};
  p.x_unit = unit_of_x(g), p.w_unit = unit_of_w(g);
  p.parts = 1;
  while (divide_up(g.m, p.parts) > 2 * kTileColumns && divide_up(g.n, 2 * kTileRows) * p.parts * 2 <= sms) p.parts *= 2;
  p.part_rows = int(divide_up(divide_up(g.m, p.parts), kTileColumns)) * kTileColumns;
  p.parts = int(divide_up(g.m, p.part_rows));
  p.warps_x = int(divide_up(p.part_rows, 4 * kTileColumns));
  int64_t least = 0;
  for (int tiles : {1, 2, 3, 4, 6, 8}) {
    Plan wider = p;
    wider.rows = tiles * kTileRows;
    wider.warps_w = tiles / row_tiles(wider);
    const bool few_rows = p.part_rows <= 2 * kTileColumns;
    if (wider.warps_w * p.warps_x > kMostWarps || (few_rows && tiles > 4)) continue;
    const int64_t count = divide_up(g.n, wider.rows) * p.parts;
    const int64_t time = divide_up(count, sms) * std::max({3 * kTileRows, 2 * wider.rows, wider.rows + p.part_rows});
    if (least && time >= least) continue;
    least = time;
    wider.tiles = int(count);
    wider.blocks = int(std::min(count, sms));
    p = wider;
  }
  return p;
}

template <class S> pydet_status launch_shape(const Gemm &g, Plan p) {
  constexpr int kFewestChunk = 2 * S::stage_steps, kRowsAtOnce = 64;
  const int warps = p.warps_w * p.warps_x;
  p.steps = int(divide_up(g.k, kStep));
  p.chunk_steps = int(Chunk{g.k_chunk}.of_chain(g.k, kStep));
  // Chains of so many rows keep the memory busy as they are, and short chunks would meet too often.
  p.groups = 1;
  while (p.groups * p.rows < kRowsAtOnce && p.chunk_steps >= kFewestChunk && p.groups * p.chunk_steps < p.steps &&
         p.groups * 2 * warps <= kMostWarps)
    p.groups *= 2;
  p.x_rows = p.warps_x * S::columns * kTileColumns;
  const int w_bytes = p.rows * S::row_bytes, x_bytes = p.x_rows * S::row_bytes;
  const int join_bytes = (p.groups - 1) * warps * kWarp * S::rows * S::columns * 4 * int(sizeof(float));
  const int ring_bytes = kBlockSharedBytes - kBarrierBytes - join_bytes;
  // Behind w's many requests, x from the L2 comes as late as w: as many stages, or half as many where they are large.
  auto turns = [&](int stages) { return std::min(stages, kMostStages) / p.groups * p.groups; };
  p.x_stages = turns(std::max(2 * p.groups, ring_bytes / (x_bytes + (S::columns <= 2 ? 1 : 2) * w_bytes)));
  p.w_stages = turns((ring_bytes - p.x_stages * x_bytes) / w_bytes);
  Launch shape = {"skinny_gemm_mma", static_cast<gpu_stream>(g.stream), dim3(unsigned(p.blocks)),
                  dim3(unsigned(p.groups * warps * kWarp + kWThreads + kXThreads))};
  shape.shared_bytes = p.w_stages * w_bytes + p.x_stages * x_bytes + kBarrierBytes + join_bytes;
  shape.overlaps_previous = gpu_overlaps_kernels(g.device.id);
  return launch(shape, skinny_mma_kernel<S>, g, p);
}

template <Type type> pydet_status launch_type(const Gemm &g, const Plan &p) {
  if (p.part_rows <= kTileColumns) return launch_shape<Shape<type, 1, 1>>(g, p);
  if (p.part_rows <= 2 * kTileColumns) return launch_shape<Shape<type, 1, 2>>(g, p);
  return row_tiles(p) == 1 ? launch_shape<Shape<type, 1, 4>>(g, p) : launch_shape<Shape<type, 2, 4>>(g, p);
}

}  // namespace

bool skinny_mma_takes(const Gemm &g) {
  constexpr int64_t kMost = int64_t(1) << 30;
  return g.m <= kMostM && g.k > 0 && g.k <= kMost && g.n <= kMost && g.batch.count == 1 && unit_of_x(g) && unit_of_w(g);
}

// Few rows, tiles of gemm_mma.cu that would leave SMs idle, or that would read single elements.
bool skinny_mma_prefers(const Gemm &g) {
  return g.m <= 64 || unit_of_x(g) < 16 || unit_of_w(g) < 16 ||
         divide_up(g.m, 64) * divide_up(g.n, 64) < gpu_multiprocessors(g.device.id);
}

pydet_status skinny_mma(const Gemm &g) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error("skinny_gemm_mma", guard.error());
  const Plan plan = plan_of(g);
  return with_type<kHalfTypes>(g.a.type, [&](auto type) { return launch_type<type>(g, plan); });
}

}  // namespace pydet
