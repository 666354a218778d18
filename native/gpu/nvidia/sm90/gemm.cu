// out = round(chain_k(a, b) + bias) on Hopper's tensor cores, arithmetic sm90.
//
//   D = +0 or out;  D = step(D, a[m, 16i .. 16i+15], b[16i .. 16i+15, n]) for i ascending            without k_chunk
//   D = +0 or out;  D = D + s_c for chunks c ascending, s_c = such a chain from +0 over its own k    with k_chunk
//
// One persistent block an SM: a producer thread brings tiles of m by 64 and 64 by n into a ring of stages by TMA,
// shared with the other blocks of the cluster by multicast; one to three warpgroups run wgmma m64nNk16 on their rows of
// them, k ascending, and store their accumulators (rows.h). Either operand may have k adjacent or not: wgmma reads
// both. Few rows of out fit the columns of a tile better than its rows: then the tile is one of out^T = b^T a^T.
// The file is compiled once for each group of kernels (tiles.h).

#include <algorithm>

#include "gpu/nvidia/sm90/rows.h"

namespace pydet {
namespace {

constexpr int kStep = 16;
constexpr int kWarpgroup = 128;
constexpr int kSharedBytes = 227 << 10;  // the most a block may have

// This object's part of the kernels: those of one type, of the tiles kFirstTile, kFirstTile + kSm90TileGroups, ...
constexpr int kGroup = PYDET_SM90_GROUP, kFirstTile = kGroup / 2;
constexpr Type kGroupType = kSm90GroupTypes[kGroup % 2];
static_assert(kFirstTile >= 0 && kFirstTile < kSm90TileGroups, "the Makefile counts the groups as tiles.h does");

template <int index, Type input, bool a_adjacent, bool b_adjacent, bool chunks> struct Shape {
  static constexpr int tile = index;
  static constexpr Type type = input;
  static constexpr bool a_k_adjacent = a_adjacent, b_k_adjacent = b_adjacent, chunked = chunks;
  static constexpr int m = kSm90Tiles[tile].m, n = kSm90Tiles[tile].n;
  static constexpr int cluster_m = kSm90Tiles[tile].cluster_m, cluster_n = kSm90Tiles[tile].cluster_n;
  static constexpr int cluster = cluster_m * cluster_n;
  static constexpr int consumers = m == 64 ? 1 : m % 192 ? 2 : 3, threads = kWarpgroup * (1 + consumers);
  static constexpr int blocks = m / 64 / consumers, block_registers = n / 2;  // blocks of 64 rows a warpgroup
  static constexpr int registers = blocks * block_registers;                  // accumulators a thread
  static constexpr bool transposes = kSm90Tiles[tile].swapped;
  // What the 64 Ki registers of an SM leave: at launch all threads have as many, then the producer gives some back.
  static constexpr int producer_registers = consumers == 3 ? 32 : 40, consumer_registers = consumers == 3 ? 160 : 232;
  static constexpr int a_bytes = m * kRowBytes;
  static constexpr int b_bytes = (b_k_adjacent ? n : (n + 63) / 64 * 64) * kRowBytes;
  static constexpr int staging_bytes = consumers * 4 * kPieceBytes, bias_bytes = consumers * n * 4;
  static constexpr int stages = std::min(12, (kSharedBytes - staging_bytes - bias_bytes - 256) / (a_bytes + b_bytes));
  static constexpr int staging_at = stages * (a_bytes + b_bytes), bias_at = staging_at + staging_bytes;
  static constexpr int barriers_at = bias_at + bias_bytes, shared_bytes = barriers_at + stages * 16;
  static_assert(m == 64 * consumers * blocks, "each warpgroup has as many blocks of 64 rows");
  static_assert(stages >= 3 && shared_bytes <= kSharedBytes, "the ring must fit");
  static_assert(m % 64 == 0 && n % 16 == 0 && n >= 64, "whole warpgroups, whole pieces");
};

// This block's share of an operand tile for the blocks of `mask`: `extent` along m or n, 64 along k.
template <bool k_adjacent, int extent, int shares>
__device__ __forceinline__ void load_operand(const CUtensorMap *map, uint32_t barrier, uint32_t to, int k, int start,
                                             int share, uint16_t mask, bool batched,
                                             const int (&batch)[kSm90MaxBatch]) {
  constexpr bool multicast = shares > 1;
  auto load = [&](uint32_t address, int x, int y) {
    Place place = {x, y, {batch[0], batch[1], batch[2]}};
    if (batched) load_box<5, multicast>(address, map, barrier, place, mask);
    else load_box<2, multicast>(address, map, barrier, place, mask);
  };
  if constexpr (k_adjacent) {
    constexpr int rows = extent / shares;
    static_assert(rows % 8 == 0, "shares are whole swizzle atoms");
    load(to + share * rows * kRowBytes, k, start + share * rows);
  } else {
    constexpr int rows = kBlockK / shares;
#pragma unroll
    for (int block = 0; block < (extent + 63) / 64; ++block)
      load(to + block * kBlockBytes + share * rows * kRowBytes, start + block * 64, k + share * rows);
  }
}

template <class S> __device__ __forceinline__ void produce(const Sm90Problem &p, uint32_t shared, int rank) {
  const int row_rank = rank % S::cluster_m, column_rank = rank / S::cluster_m;
  uint16_t a_mask = 0, b_mask = 0;
  for (int i = 0; i < S::cluster_n; ++i) a_mask |= uint16_t(1 << (row_rank + i * S::cluster_m));
  for (int i = 0; i < S::cluster_m; ++i) b_mask |= uint16_t(1 << (column_rank * S::cluster_m + i));
  int stage = 0, parity = 0;
  wait_for_previous_kernel();
  for (int index = int(blockIdx.x) / S::cluster; index < p.tiles; index += int(gridDim.x) / S::cluster) {
    Tile tile = tile_of<S>(p, index, rank);
    int a_batch[kSm90MaxBatch], b_batch[kSm90MaxBatch];
    for (int d = 0; d < kSm90MaxBatch; ++d) {
      a_batch[d] = p.a_moves[d] ? tile.batch[d] : 0;
      b_batch[d] = p.b_moves[d] ? tile.batch[d] : 0;
    }
    for (int chunk = 0; chunk < p.k; chunk += p.chunk) {
      int end = min(p.k - chunk, p.chunk) + chunk;
      for (int k = chunk; k < end; k += kBlockK) {
        uint32_t full = shared + S::barriers_at + stage * 8, empty = full + S::stages * 8;
        uint32_t a = shared + stage * (S::a_bytes + S::b_bytes), b = a + S::a_bytes;
        barrier_wait(empty, parity ^ 1);
        barrier_expect(full, S::a_bytes + S::b_bytes);
        load_operand<S::a_k_adjacent, S::m, S::cluster_n>(&p.a, full, a, k, tile.row, column_rank, a_mask, p.batched,
                                                          a_batch);
        load_operand<S::b_k_adjacent, S::n, S::cluster_m>(&p.b, full, b, k, tile.column, row_rank, b_mask, p.batched,
                                                          b_batch);
        if (++stage == S::stages) stage = 0, parity ^= 1;
      }
    }
  }
  // The block may end when every arrival that the others owe it has come.
  for (int i = 0; i < S::stages; ++i) {
    barrier_wait(shared + S::barriers_at + (S::stages + stage) * 8, parity ^ 1);
    if (++stage == S::stages) stage = 0, parity ^= 1;
  }
}

// The accumulators of one block of 64 rows.
template <class S>
__device__ __forceinline__ auto block_of(float (&d)[S::registers], int block) -> float (&)[S::block_registers] {
  return *reinterpret_cast<float(*)[S::block_registers]>(d + block * S::block_registers);
}

// Where in the ring a warpgroup reads, and the stage that its wgmma group in flight still reads.
template <class S> struct Ring {
  uint32_t shared;
  int warpgroup, rank, thread;
  int stage = 0, parity = 0, reading = -1;

  // All four warps have read the stage: tells every block that writes into it.
  __device__ __forceinline__ void release() {
    if (reading < 0) return;
    bool writes_here = thread % S::cluster_m == rank % S::cluster_m || thread / S::cluster_m == rank / S::cluster_m;
    if (thread < S::cluster && writes_here) barrier_arrive(shared + S::barriers_at + (S::stages + reading) * 8, thread);
  }

  // Starts `steps` steps of 16 on the next stage, the first from +0 if `fresh`, and frees the stage before it. Whole
  // stages are unrolled.
  template <bool whole> __device__ __forceinline__ void advance(float (&d)[S::registers], int steps, bool fresh) {
    barrier_wait(shared + S::barriers_at + stage * 8, parity);
    uint32_t at = shared + stage * (S::a_bytes + S::b_bytes);
    uint64_t a = wgmma_descriptor<S::a_k_adjacent>(at + warpgroup * S::blocks * kBlockBytes);
    uint64_t b = wgmma_descriptor<S::b_k_adjacent>(at + S::a_bytes);
    wgmma_fence();
    auto step = [&](int i) {
#pragma unroll
      for (int block = 0; block < S::blocks; ++block)
        wgmma<S::type, S::a_k_adjacent, S::b_k_adjacent>(
            block_of<S>(d, block), a + i * kDescriptorStep<S::a_k_adjacent> + (block * kBlockBytes >> 4),
            b + i * kDescriptorStep<S::b_k_adjacent>, i || !fresh);
    };
    if constexpr (whole) {
#pragma unroll
      for (int i = 0; i < kBlockK / kStep; ++i) step(i);
    } else {
#pragma unroll 1
      for (int i = 0; i < steps; ++i) step(i);
    }
    wgmma_commit();
    wgmma_wait<1>();
    release();
    reading = stage;
    if (++stage == S::stages) stage = 0, parity ^= 1;
  }

  // d = the chain of one tile, or the sum of its chunks, from d.
  __device__ __forceinline__ void chain(float (&d)[S::registers], int k_end, int chunk_size) {
    if constexpr (S::chunked) {
      float sum[S::registers];
      for (int chunk = 0; chunk < k_end; chunk += chunk_size) {
        const int k_here = min(k_end - chunk, chunk_size), whole = k_here / kBlockK,
                  steps = (k_here % kBlockK + kStep - 1) / kStep;
#pragma unroll 1
        for (int i = 0; i < whole; ++i) advance<true>(sum, 0, i == 0);
        if (steps) advance<false>(sum, steps, whole == 0);
        finish();
#pragma unroll
        for (int i = 0; i < S::registers; ++i) d[i] = d[i] + sum[i];
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < k_end; k += kBlockK) advance<true>(d, 0, false);
      finish();
    }
  }

  // The accumulators may be read.
  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
    release();
    reading = -1;
  }
};

template <class S>
__device__ __forceinline__ void consume(const Sm90Problem &p, uint32_t shared, int rank, int warpgroup) {
  const int thread = int(threadIdx.x) % kWarpgroup;
  Ring<S> ring = {shared, warpgroup, rank, thread};
  const uint32_t piece = shared + S::staging_at + (warpgroup * 4 + thread / 32) * kPieceBytes;
  const uint32_t bias_row = shared + S::bias_at + warpgroup * S::n * 4;
  const bool one_bias_row = p.bias && p.bias_row_stride == 0;
  wait_for_previous_kernel();
  for (int index = int(blockIdx.x) / S::cluster; index < p.tiles; index += int(gridDim.x) / S::cluster) {
    // Worked out anew on each side of the main loop, which leaves no registers to keep it in.
    auto rows_of = [&](int i, int block = 0) {
      int t = thread;
      asm volatile("" : "+r"(i), "+r"(t));
      Tile tile = tile_of<S>(p, i, rank);
      return WarpRows<S>{p, tile, piece, tile.row + (warpgroup * S::blocks + block) * 64 + t / 32 * kWarpRows, t % 32};
    };
    float d[S::registers];

    constexpr int kBiasLoads = (S::n + kWarpgroup - 1) / kWarpgroup;
    uint32_t bias[kBiasLoads] = {};  // loaded before the main loop, used after it
    if (one_bias_row) {
      const Tile tile = rows_of(index).tile;
#pragma unroll
      for (int i = 0; i < kBiasLoads; ++i) {
        int column = tile.column + thread + i * kWarpgroup;
        if (column < p.n) bias[i] = load_raw(p.bias, tile.bias_offset + column * p.bias_column_stride, p.bias_type);
      }
    }
    // ptxas keeps wgmma asynchronous only where each way of setting the accumulators has its own main loop
    if (p.accumulate) {
#pragma unroll
      for (int block = 0; block < S::blocks; ++block) {
        const WarpRows<S> rows = rows_of(index, block);
        rows.each_element(p.out, Type::f32, rows.tile.out_offset, S::transposes ? 1 : p.out_stride,
                          S::transposes ? p.out_stride : 1,
                          [&](int i, float x) { block_of<S>(d, block)[i] = canonical(x); });
      }
      ring.chain(d, p.k, p.chunk);
    } else {
#pragma unroll
      for (int i = 0; i < S::registers; ++i) d[i] = 0;
      ring.chain(d, p.k, p.chunk);
    }

    if (one_bias_row) {
      named_sync(1 + warpgroup, kWarpgroup);
#pragma unroll
      for (int i = 0; i < kBiasLoads; ++i)
        if (thread + i * kWarpgroup < S::n)
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(bias_row + (thread + i * kWarpgroup) * 4),
                       "f"(f32_from_raw(bias[i], p.bias_type))
                       : "memory");
      named_sync(1 + warpgroup, kWarpgroup);
    }
#pragma unroll
    for (int block = 0; block < S::blocks; ++block) {
      float(&x)[S::block_registers] = block_of<S>(d, block);
      const WarpRows<S> rows = rows_of(index, block);
      if (one_bias_row) {
#pragma unroll
        for (int i = 0; i < S::n / 8; ++i) {
          float2 pair = load_pair(bias_row + (8 * i + rows.lane % 4 * 2) * 4);
          x[4 * i] = x[4 * i] + pair.x;
          x[4 * i + 1] = x[4 * i + 1] + pair.y;
          x[4 * i + 2] = x[4 * i + 2] + pair.x;
          x[4 * i + 3] = x[4 * i + 3] + pair.y;
        }
      } else if (p.bias) {
        rows.each_element(p.bias, p.bias_type, rows.tile.bias_offset, p.bias_row_stride, p.bias_column_stride,
                          [&](int i, float bias) { x[i] = x[i] + bias; });
      }
      if constexpr (S::transposes) {
        if (p.out_type == Type::bf16) rows.template store_transposed<2, true>(x);
        else if (p.out_type == Type::f16) rows.template store_transposed<2, false>(x);
        else rows.template store_transposed<4, false>(x);
      } else if (p.out_type == Type::bf16) rows.template store<2, true>(x);
      else if (p.out_type == Type::f16) rows.template store<2, false>(x);
      else rows.template store<4, false>(x);
    }
  }
}

template <class S>
__global__ void __launch_bounds__(S::threads, 1) gemm_kernel(const __grid_constant__ Sm90Problem p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  const int rank = S::cluster > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::stages; ++i) {
      barrier_init(shared + S::barriers_at + i * 8, 1);
      barrier_init(shared + S::barriers_at + (S::stages + i) * 8, S::consumers * (S::cluster_m + S::cluster_n - 1));
    }
    fence_barrier_init();
    if (p.k > 0) prefetch(&p.a), prefetch(&p.b);
  }
  if (S::cluster > 1) cluster_sync_relaxed();
  else __syncthreads();
  let_next_kernel_start();

  const int warpgroup = int(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    registers_down<S::producer_registers>();
    if (threadIdx.x == 0) produce<S>(p, shared, rank);
  } else {
    registers_up<S::consumer_registers>();
    consume<S>(p, shared, rank, warpgroup - 1);
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

template <class S> pydet_status launch_shape(const Gemm &g, const Sm90Operands &operands) {
  const char *name = kSm90Tiles[S::tile].name;
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  Sm90Problem problem = {};
  if (pydet_status status = sm90_plan(g, operands, S::tile, &problem)) return status;
  const int clusters = std::min(sm90_clusters(g.device.id, S::cluster), problem.tiles);
  Launch shape = {name, gpu_stream(g.stream), dim3(unsigned(clusters * S::cluster)), dim3(S::threads)};
  shape.shared_bytes = S::shared_bytes;
  shape.cluster = S::cluster;
  shape.overlaps_previous = true;
  return launch(shape, gemm_kernel<S>, problem);
}

// Calls f with true_type or false_type for a run-time bool.
template <class F> pydet_status either(bool value, F f) { return value ? f(std::true_type()) : f(std::false_type()); }

template <int tile> pydet_status launch_tile(const Gemm &g, const Sm90Operands &operands) {
  return either(operands.a.k_adjacent, [&](auto a_adjacent) {
    return either(operands.b.k_adjacent, [&](auto b_adjacent) {
      return either(g.k_chunk != 0, [&](auto chunked) {
        constexpr bool a_first = decltype(a_adjacent)::value, b_first = decltype(b_adjacent)::value;
        constexpr bool chunks = decltype(chunked)::value;
        if constexpr (kSm90Tiles[tile].layouts_of(chunks) & layout_bit(a_first, b_first))
          return launch_shape<Shape<tile, kGroupType, a_first, b_first, chunks>>(g, operands);
        else return pydet_status(PYDET_UNSUPPORTED);  // gemm_sm90_choose has refused it
      });
    });
  });
}

// f(tile) for each tile of this object's group.
template <class F, int... tiles> void each_tile(F f, std::integer_sequence<int, tiles...>) {
  (f(std::integral_constant<int, kFirstTile + tiles * kSm90TileGroups>()), ...);
}

}  // namespace

template <> pydet_status Sm90Group<kGroup>::launch(const Gemm &g, const Sm90Operands &operands, int tile) {
  constexpr int count = (kSm90TileCount - kFirstTile + kSm90TileGroups - 1) / kSm90TileGroups;
  pydet_status status = PYDET_UNSUPPORTED;
  each_tile(
      [&](auto mine) {
        if (mine == tile) status = launch_tile<decltype(mine)::value>(g, operands);
      },
      std::make_integer_sequence<int, count>());
  return status;
}

}  // namespace pydet
