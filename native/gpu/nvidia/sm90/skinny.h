// How skinny.cu moves its operands and is launched: two rings of stages in shared memory, and who fills them.
//
// A block makes `rows` rows of w (columns of y) for all rows of x, or, where x is split, for 64 of them. One thread
// fills a ring with w by TMA, evicted first from the L2, another one a ring with x. The next kernel may start while
// this one ends (programmatic dependent launch), on SMs that this one leaves free, or beside its blocks where they take
// half of the shared memory: under weights_constant it then fills its ring with w meanwhile, and the memory hardly
// rests between two kernels.
#pragma once

#include <algorithm>

#include "gpu/any/epilogue.h"
#include "gpu/nvidia/sm90/pipe/operand.h"
#include "gpu/nvidia/sm90/skinny_cut.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/tensor_map.h"
#include "core/backend.h"

namespace pydet {
namespace {

constexpr int kBlockSteps = kBlockK / kStep;
constexpr int kMostStages = 64;  // of a ring
constexpr int kBarrierBytes = 4 * kMostStages * 8 + 16;
constexpr int kReservedBytes = kBarrierBytes + 1024;  // beside the rings; 1024 are the system's own
constexpr int kTileRows = 64;                         // of x that the tensor cores may read, however few there are

// The part of a problem that the device sees. Strides are in elements.
struct Problem {
  CUtensorMap x, w;
  int m, n, steps, chunk_steps;  // steps of 16 k, of all and of one chain
  int tiles;                     // of y, in all
  int parts;                     // blocks of a cluster, each of which makes some of the chunks of one tile
  int part_steps;                // of each but the last; = steps where parts = 1
  int x_split;                   // 1: every two of them read the same rows of w, and the first or the last 64 rows of x
  int box_rows;                  // of x that a block reads
  int x_first;                   // the row of x's map at which x begins
  int x_rows;                    // that a stage of x has room for: box_rows in whole swizzle atoms
  int w_stages, x_stages;
  bool early;                                // the next kernel may start as soon as all before this one have ended
  bool weights_constant, accumulate, pairs;  // pairs: two neighbours of y can be stored at once
  Type out_type, bias_type;
  int ahead;  // of k whose weights the L2 is asked for before the kernel ahead has ended
  char *out;
  const char *bias;
  int64_t out_stride, bias_row_stride, bias_column_stride;
  int64_t apart;  // 0, or where one chunk's sum is, from the one before: they are not added up
};

// Addresses in shared memory: x's ring, then w's, then the barriers, then, in a cluster's first block, the sums of the
// other blocks. What the tensor cores read of x's rows past x's ring lies in w's, which is at least that long.
template <class S> struct Layout {
  uint32_t x, w, barriers, sums;
  int x_block_bytes;
  __device__ __forceinline__ Layout(const Problem &p, uint32_t start)
      : x(start),
        w(start + p.x_stages * S::stage_blocks * p.x_rows * kRowBytes),
        barriers(w + p.w_stages * S::w_bytes),
        sums(barriers + kBarrierBytes),
        x_block_bytes(p.x_rows * kRowBytes) {}
  __device__ __forceinline__ uint32_t x_stage(int i) const { return x + i * S::stage_blocks * x_block_bytes; }
  __device__ __forceinline__ uint32_t w_stage(int i) const { return w + i * S::w_bytes; }
  __device__ __forceinline__ uint32_t x_full(int i) const { return barriers + i * 8; }
  __device__ __forceinline__ uint32_t x_empty(int i) const { return barriers + (kMostStages + i) * 8; }
  __device__ __forceinline__ uint32_t w_full(int i) const { return barriers + (2 * kMostStages + i) * 8; }
  __device__ __forceinline__ uint32_t w_empty(int i) const { return barriers + (3 * kMostStages + i) * 8; }
  __device__ __forceinline__ uint32_t sums_full() const { return barriers + 4 * kMostStages * 8; }
};

// The first row of w and of x that a tile multiplies. A box that reaches past the last row takes twice as long, so
// tiles at an edge begin earlier, and leave what they have in common with the one before to that.
template <class S> __device__ __forceinline__ int first_of_w(const Problem &p, int tile) {
  if constexpr (!S::turned)
    return min((tile >> p.x_split) * S::rows, max((p.n - S::rows + 1) & ~1, 0));  // even, for pairs of y
  constexpr int kUnit = 8;  // of 16 bytes, between which no box may begin
  return min((tile >> p.x_split) * S::rows, max((p.n - S::rows + kUnit - 1) / kUnit * kUnit, 0));
}
__device__ __forceinline__ int first_of_x(const Problem &p, int tile) { return (tile & p.x_split) * (p.m - kTileRows); }

// The steps along k that this block makes of its tiles.
struct Part {
  int first, end;
  __device__ __forceinline__ explicit Part(const Problem &p, bool split)
      : first(split ? cluster_rank() * p.part_steps : 0), end(split ? min(first + p.part_steps, p.steps) : p.steps) {}
};

// f(k, boxes) for every stage of a tile, past K on zeros. If S::chunked, one begins with every chunk.
template <class S, class F> __device__ __forceinline__ void each_stage(const Problem &p, F f) {
  const Part part(p, S::split);
  const int length = S::chunked ? p.chunk_steps : p.steps;
  for (int chunk = part.first; chunk < part.end; chunk += length) {
    const int end = chunk + min(length, part.end - chunk);
    for (int start = chunk; start < end; start += S::stage_steps)
      f(start * kStep,
        S::chunked ? min(S::stage_blocks, (end - start + kBlockSteps - 1) / kBlockSteps) : S::stage_blocks);
  }
}

// Asks the L2 for the weights of this block's first stages. That is right before the kernel ahead has ended too: what
// it still writes, it writes in the L2.
template <class S> __device__ __forceinline__ void prefetch_weights(const Problem &p) {
  const Part part(p, S::split);
  const int row = first_of_w<S>(p, int(blockIdx.x) / p.parts), first = part.first * kStep;
  const int end = min(part.end * kStep, first + p.ahead);
#pragma unroll 1
  for (int k = first; k < end; k += kBlockK)
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&p.w), "r"(k), "r"(row) : "memory");
}

template <class S> __device__ __forceinline__ void load_weights(const Problem &p, const Layout<S> &at) {
  prefetch(&p.w);
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  if (!p.weights_constant) {
    if constexpr (S::prefetches) prefetch_weights<S>(p);
    wait_for_previous_kernel();
  }
  Cursor<kAnyCount> ring(p.w_stages);
  for (int tile = int(blockIdx.x) / p.parts; tile < p.tiles; tile += int(gridDim.x)) {
    const int row = first_of_w<S>(p, tile);
    each_stage<S>(p, [&](int k, int boxes) {
      uint32_t full = at.w_full(ring.stage), to = at.w_stage(ring.stage);
      barrier_wait(at.w_empty(ring.stage), ring.parity ^ 1);
      barrier_expect(full, boxes * S::w_block_bytes);
#pragma unroll
      for (int b = 0; b < S::stage_blocks; ++b)
        if (b < boxes) {
          if constexpr (S::turned) {
#pragma unroll
            for (int c = 0; c < S::rows; c += S::box_columns)
              load_evicting(to + b * S::w_block_bytes + c * kRowBytes, &p.w, full, row + c, k + b * kBlockK, policy);
          } else {
            load_evicting(to + b * S::w_block_bytes, &p.w, full, k + b * kBlockK, row, policy);
          }
        }
      ring.next();
    });
  }
  // The next kernel's first loads of w then take their turn in the memory behind the last of ours. Here and in load_x
  // it can overtake nothing but this kernel, since all before it have ended.
  wait_for_previous_kernel();
  let_next_kernel_start();
}

template <class S> __device__ __forceinline__ void load_x(const Problem &p, const Layout<S> &at) {
  prefetch(&p.x);
  wait_for_previous_kernel();
  if (p.early) let_next_kernel_start();
  Cursor<kAnyCount> ring(p.x_stages);
  for (int tile = int(blockIdx.x) / p.parts; tile < p.tiles; tile += int(gridDim.x)) {
    const int row = p.x_first + first_of_x(p, tile);
    each_stage<S>(p, [&](int k, int boxes) {
      uint32_t full = at.x_full(ring.stage), to = at.x_stage(ring.stage);
      barrier_wait(at.x_empty(ring.stage), ring.parity ^ 1);
      barrier_expect(full, boxes * p.box_rows * kRowBytes);
#pragma unroll
      for (int b = 0; b < S::stage_blocks; ++b)
        if (b < boxes) load_box<2, false>(to + b * at.x_block_bytes, &p.x, full, Place{k + b * kBlockK, row, {}}, 0);
      ring.next();
    });
  }
}

// Of the chunks' sums that the first block of a cluster receives: those of the others' chunks, from the warps that have
// rows of x.
template <class S> __host__ __device__ constexpr int sum_bytes(int m) {
  return (m + kWarpRows - 1) / kWarpRows * 32 * S::registers * 4;
}
template <class S> __host__ __device__ constexpr int sums_bytes(const Problem &p) {
  return p.parts == 1 ? 0 : (p.steps - p.part_steps + p.chunk_steps - 1) / p.chunk_steps * sum_bytes<S>(p.m);
}

// Sets up the barriers, then gives every warp its part: the consumers call `consume`, the last two warps load.
template <class S, class F> __device__ __forceinline__ void share_out(const Problem &p, F consume) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Layout<S> at(p, shared_address(memory));
  // The shuffle tells ptxas that the whole warp has one value: descriptors then stay in uniform registers.
  const int warp = __shfl_sync(0xFFFFFFFFu, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == S::consumer_warps * 32) {
    for (int i = 0; i < p.x_stages; ++i) barrier_init(at.x_full(i), 1), barrier_init(at.x_empty(i), S::arrivals);
    for (int i = 0; i < p.w_stages; ++i) barrier_init(at.w_full(i), 1), barrier_init(at.w_empty(i), S::arrivals);
    if (S::split) {
      barrier_init(at.sums_full(), 1);
      if (cluster_rank() == 0) barrier_expect(at.sums_full(), sums_bytes<S>(p));
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (S::split) cluster_sync_relaxed();  // the first block's barrier is ready for the others' sums
  if (warp < S::consumer_warps) {
    wait_for_previous_kernel();  // y may be read or written by it, bias written
    consume(at, warp);
  } else if (threadIdx.x % 32 == 0) {
    if (warp == S::consumer_warps) load_weights<S>(p, at);
    else load_x<S>(p, at);
  }
}

__device__ __forceinline__ int64_t bias_at(const Problem &p, int row, int column) {
  return row * p.bias_row_stride + column * p.bias_column_stride;
}

// Rounds and stores x and, if there is one, its neighbour y, at once where `pairs` are aligned. cvt makes a NaN 0x7FFF.
template <Type type>
__device__ __forceinline__ void store_pair(char *out, int64_t index, float x, float y, bool pairs, bool both) {
  if constexpr (type == Type::f32) {
    float *to = reinterpret_cast<float *>(out) + index;
    x = canonical(x), y = canonical(y);
    if (pairs && both) {
      *reinterpret_cast<float2 *>(to) = make_float2(x, y);
    } else {
      to[0] = x;
      if (both) to[1] = y;
    }
  } else {
    uint32_t pair;
    if constexpr (is_bf16<type>()) asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(x), "f"(y));
    else asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(x), "f"(y));
    uint16_t *to = reinterpret_cast<uint16_t *>(out) + index;
    if (pairs && both) {
      *reinterpret_cast<uint32_t *>(to) = pair;
    } else {
      to[0] = uint16_t(pair);
      if (both) to[1] = uint16_t(pair >> 16);
    }
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

MapShape map_of(const Gemm &g, const Matrix &matrix, int64_t count, int64_t stride, int box_rows) {
  constexpr int64_t kAnyStride = 8;  // where there is only one row
  return {matrix.data, matrix.type, g.k, count, count == 1 ? kAnyStride : stride, kBlockK, box_rows, 2, {}, {}};
}
template <class S> MapShape map_of_w(const Gemm &g) {
  if (!S::turned) return map_of(g, g.b, g.n, g.b.col_stride, S::rows);
  constexpr int64_t kAnyStride = 8;
  const int64_t stride = g.k == 1 ? kAnyStride : g.b.row_stride;
  return {g.b.data, g.b.type, g.n, g.k, stride, S::box_columns, kBlockK, 2, {}, {}, S::box_columns * 2};
}

// What the device is told and how it is launched, once the shape S is known. The device must be current.
template <class S>
pydet_status prepare(const char *name, const Gemm &g, const SkinnyPlan &plan, Problem *problem, Launch *launch) {
  EncodeTensorMap encode = nullptr;
  if (pydet_status status = find_encoder(name, &encode)) return status;
  Problem &p = *problem;
  p.m = int(g.m);
  p.n = int(g.n);
  p.steps = int(divide_up(g.k, kStep));
  p.chunk_steps = int(Chunk{g.k_chunk}.of_chain(g.k, kStep));
  p.apart = g.batch.dims ? g.batch.out[0] : 0;
  p.x_split = plan.x_split;
  p.box_rows = plan.x_split ? kTileRows : p.m;
  p.x_rows = int(divide_up(p.box_rows, kAtomRows)) * kAtomRows;
  const MapShape x_shape = map_of(g, g.a, g.m, g.a.row_stride, p.box_rows);
  if (pydet_status status = make_map(name, encode, x_shape, &p.x)) return status;
  if (pydet_status status = make_map(name, encode, map_of_w<S>(g), &p.w)) return status;
  p.tiles = int(divide_up(g.n, S::rows)) << p.x_split;
  p.parts = S::split ? plan.parts : 1;
  p.part_steps = S::split ? int(divide_up(divide_up(p.steps, p.chunk_steps), p.parts)) * p.chunk_steps : p.steps;

  const int blocks_an_sm = plan.shared_bytes > kHalfSharedBytes ? 1 : 2;
  const int blocks = S::split ? p.tiles : std::min(gpu_multiprocessors(g.device.id) * blocks_an_sm, p.tiles);
  const int64_t stages =
      divide_up(p.part_steps, p.chunk_steps) * divide_up(p.chunk_steps, S::stage_steps) * divide_up(p.tiles, blocks);
  // The rings share the memory; x needs the more, the more rows it has.
  const int sums = sums_bytes<S>(p) + plan.more_bytes, ring_bytes = plan.shared_bytes - kReservedBytes - sums;
  const int x_stage_bytes = S::stage_blocks * p.x_rows * kRowBytes;
  const int part = p.box_rows <= 8 ? 8 : p.box_rows <= 16 ? 4 : p.box_rows <= 32 ? 3 : 2;
  const int64_t x_room = std::max(2, ring_bytes / part / x_stage_bytes);
  p.x_stages = int(std::min<int64_t>({kMostStages, stages, x_room}));
  const int64_t w_room = (ring_bytes - p.x_stages * x_stage_bytes) / S::w_bytes;
  const int64_t fewest = std::max<int64_t>(2, divide_up(kTileRows * kRowBytes, S::w_bytes));
  p.w_stages = int(std::max(fewest, std::min<int64_t>({kMostStages, stages, w_room})));

  p.weights_constant = g.weights_constant;
  // The fastest of 16 to 128 KiB a block in 194 problems
  const int64_t share = g.n * g.k * 2 / gpu_multiprocessors(g.device.id);
  const int ahead_bytes = g.m > kTileRows || share < (128 << 10) ? 32 << 10 : 64 << 10;
  p.ahead = std::max(kBlockK, ahead_bytes / (S::rows * 2));
  p.early = plan.early;
  p.accumulate = g.accumulate;
  p.out_type = g.out.type;
  p.out = g.out.data;
  p.out_stride = g.out.row_stride;
  p.pairs = reinterpret_cast<uintptr_t>(g.out.data) % (2 * size_of(g.out.type)) == 0 &&
            (g.m == 1 || g.out.row_stride % 2 == 0) && p.apart % 2 == 0;
  p.bias = g.bias.data;
  p.bias_type = g.bias.type;
  p.bias_row_stride = g.bias.row_stride;
  p.bias_column_stride = g.bias.col_stride;
  *launch = {name, gpu_stream(g.stream), dim3(unsigned(blocks * p.parts)), dim3(S::threads)};
  launch->cluster = p.parts;
  launch->shared_bytes = p.x_stages * x_stage_bytes + p.w_stages * S::w_bytes + kBarrierBytes + sums;
  launch->overlaps_previous = true;
  return PYDET_OK;
}

template <class S>
pydet_status launch_shape(const char *name, const Gemm &g, const SkinnyPlan &plan, void (*kernel)(Problem)) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  Problem problem = {};
  Launch shape = {};
  if (pydet_status status = prepare<S>(name, g, plan, &problem, &shape)) return status;
  return launch(shape, kernel, problem);
}

// Calls f with true_type or false_type for a run-time bool.
template <class F> pydet_status either(bool value, F f) { return value ? f(std::true_type()) : f(std::false_type()); }

}  // namespace
}  // namespace pydet
