// out = round(chain_k(a, b) + bias) on Hopper's tensor cores, arithmetic sm90.
//
//   D = +0 or out;  D = step(D, a[m, 16i .. 16i+15], b[16i .. 16i+15, n]) for i ascending            without k_chunk
//   D = +0 or out;  D = D + s_c for chunks c ascending, s_c = such a chain from +0 over its own k    with k_chunk
//
// One persistent block an SM: one or two threads bring tiles of m by 64 and 64 by n into a ring of stages by TMA,
// shared with the other blocks of the cluster by multicast; one to three warpgroups run wgmma m64nNk16 on their rows of
// them, k ascending, and store their accumulators (warp_out.h). Either operand may have k adjacent or not: wgmma reads
// both. Few rows of out fit the columns of a tile better than its rows: then the tile is one of out^T = b^T a^T.
// The sums may begin at a tensor other than out, too: then out may have any type. The file is compiled once for each group
// of kernels (tiles.h).

#include <algorithm>

#include "gpu/nvidia/sm90/handover.h"
#include "gpu/nvidia/sm90/pipe/chain.h"
#include "gpu/nvidia/sm90/pipe/operand.h"

namespace pydet {
namespace {

// This object's part of the kernels: those of one type, of the sizes kFirstSize, kFirstSize + kSm90SizeGroups, ...
constexpr int kGroup = PYDET_SM90_GROUP, kFirstSize = kGroup / 2;
constexpr Type kGroupType = kSm90GroupTypes[kGroup % 2];
static_assert(kFirstSize >= 0 && kFirstSize < kSm90SizeGroups, "the Makefile counts the groups as tiles.h does");

template <int rows, int columns, Type input, bool a_adjacent, bool b_adjacent, bool chunks, bool parts> struct Shape {
  static constexpr Type type = input;
  static constexpr bool a_k_adjacent = a_adjacent, b_k_adjacent = b_adjacent, chunked = chunks;
  static constexpr bool hands_over = parts;
  static constexpr int m = rows, n = columns;
  static constexpr int consumers = m == 64 ? 1 : m % 192 ? 2 : 3, threads = kWarpgroup * (1 + consumers);
  static constexpr int blocks = m / 64 / consumers, block_registers = n / 2;  // blocks of 64 rows a warpgroup
  static constexpr int registers = blocks * block_registers;                  // accumulators a thread
  // What the 64 Ki registers of an SM leave: at launch all threads have as many, then the producer gives some back.
  static constexpr int producer_registers = consumers == 3 ? 32 : 40, consumer_registers = consumers == 3 ? 160 : 232;
  static constexpr int a_bytes = m * kRowBytes;
  static constexpr int b_bytes = (b_k_adjacent ? n : (n + 63) / 64 * 64) * kRowBytes, stage_bytes = a_bytes + b_bytes;
  static constexpr int warps = consumers * 4, staging_bytes = warps * kPieceBytes, bias_bytes = consumers * n * 4;
  static constexpr int slot_bytes = kSlots * kSlotBytes;
  static constexpr int stages =
      std::min(12, (kMostSharedBytes - staging_bytes - bias_bytes - slot_bytes - (12 + kSlots) * 16) / stage_bytes);
  static constexpr int staging_at = stages * stage_bytes, bias_at = staging_at + staging_bytes;
  static constexpr int slots_at = bias_at + bias_bytes, slot_barriers_at = slots_at + slot_bytes;
  static constexpr int barriers_at = slot_barriers_at + kSlots * 16, shared_bytes = barriers_at + stages * 16;
  static_assert(m == 64 * consumers * blocks, "each warpgroup has as many blocks of 64 rows");
  static_assert(stages >= 3 && shared_bytes <= kMostSharedBytes, "the ring must fit");
  static_assert(m % 64 == 0 && n % 16 == 0 && n >= 32, "whole warpgroups, whole pieces");
};

// Where this block lies in its cluster: read again where it is asked for, rather than kept.
struct Rank {
  int row, column;
};
__device__ __forceinline__ Rank rank_of(const Sm90Problem &p) {
  const int rank = cluster_rank();
  return {rank & ((1 << p.cluster_m_log) - 1), rank >> p.cluster_m_log};
}

__device__ __forceinline__ int cluster_index(const Sm90Problem &p) {
  return int(blockIdx.x) >> (p.cluster_m_log + p.cluster_n_log);
}
__device__ __forceinline__ int cluster_count(const Sm90Problem &p) {
  return int(gridDim.x) >> (p.cluster_m_log + p.cluster_n_log);
}

template <class S> __device__ __forceinline__ Tile tile_of(const Sm90Problem &p, int index) {
  const Rank rank = rank_of(p);
  return tile_of(p, index, S::m, S::n, 1 << p.cluster_m_log, 1 << p.cluster_n_log, rank.row, rank.column);
}

// Rows of a tile that no box has: of an operand that has fewer, and that no other block brings a share of (plan.cpp).
template <class S> __device__ __forceinline__ int missing_rows(const Sm90Problem &p) {
  int missing = 0;
  if (S::a_k_adjacent && p.cluster_n_log == 0) missing += max(S::m - p.m, 0);
  if (S::b_k_adjacent && p.cluster_m_log == 0) missing += max(S::n - p.n, 0);
  return missing;
}

// One thread of each producing warp. They fill the ring's stages in turn: what one does for a stage takes as long as the
// products of a tile of 64 x 128.
template <class S> __device__ __forceinline__ void produce(const Sm90Problem &p, uint32_t shared, int warp) {
  const Rank rank = rank_of(p);
  // The blocks beside this one share its rows of a, those under it its columns of b.
  const OperandShare a_share = share_of<S::a_k_adjacent, S::m>(rank.column, p.cluster_n_log, p.row_mask << rank.row);
  const OperandShare b_share = share_of<S::b_k_adjacent, S::n>(
      rank.row, p.cluster_m_log, ((1 << (1 << p.cluster_m_log)) - 1) << (rank.column << p.cluster_m_log));
  const TileSlots slots = {{shared + S::slot_barriers_at}, shared + S::slots_at};
  const int warps = p.producers, bytes = S::stage_bytes - missing_rows<S>(p) * kRowBytes;
  Ring<S> ring = {shared};
  ring.stage = warp;
  int others = warp;  // stages that other warps fill before this one's next
  uint32_t turn = 0;
  const Walk<S::hands_over> walk(p, cluster_index(p), cluster_count(p));
  for (Piece piece = walk.first(); walk.is_one(piece); walk.advance(&piece, ++turn)) {
    const Tile tile = tile_of<S>(p, piece.tile);
    if (warp == 0) slots.put<S::hands_over>(turn, tile, piece.kind, piece.end - piece.begin);
    if (turn == 0) {
      if (warp == 0 && !p.batched && p.k > 0) {
        ask_for_operand<S::a_k_adjacent, S::m>(&p.a, tile.row, a_share);
        ask_for_operand<S::b_k_adjacent, S::n>(&p.b, tile.column, b_share);
      }
      wait_for_previous_kernel();
    }
    int a_batch[kSm90MaxBatch], b_batch[kSm90MaxBatch];
    for (int d = 0; d < kSm90MaxBatch; ++d) {
      a_batch[d] = p.a_moves[d] ? tile.batch[d] : 0;
      b_batch[d] = p.b_moves[d] ? tile.batch[d] : 0;
    }
    for (int chunk = piece.begin; chunk < piece.end; chunk += p.chunk) {
      int end = min(piece.end - chunk, p.chunk) + chunk;
      int k = chunk + others * kBlockK;
#pragma unroll 1
      for (; k < end; k += warps * kBlockK) {
        const uint32_t full = ring.full(), a = ring.a(), b = ring.b();
        ring.wait_empty();
        barrier_expect(full, bytes);
        load_operand<S::a_k_adjacent, S::m>(&p.a, full, a, k, tile.row, a_share, p.batched, a_batch);
        load_operand<S::b_k_adjacent, S::n>(&p.b, full, b, k, tile.column, b_share, p.batched, b_batch);
        ring.skip(warps);
      }
      others = (k - end) / kBlockK;
    }
  }
  if (warp == 0) slots.put(turn, {}, kNoTile);
  // The block may end when every arrival that the others owe it has come: of the last turn of the ring, this warp's stages.
#pragma unroll 1
  for (int back = warps - others; back <= S::stages; back += warps) {
    ring.back(warps);
    barrier_wait(ring.empty(), ring.parity);
  }
}

// Where a thread tells a block that writes into this one's stages that one has been read.
struct Tell {
  uint32_t told;  // the first stage's barrier in that block; 0: other threads tell it
  // All four warps have read the stage.
  __device__ __forceinline__ void operator()(int stage) const {
    asm volatile(
        "{\n.reg .pred tells;\nsetp.ne.u32 tells, %0, 0;\n@tells mbarrier.arrive.shared::cluster.b64 _, [%1];\n}" ::"r"(
            stage < 0 ? 0 : told),
        "r"(told + stage * 8)
        : "memory");
  }
};

template <class S>
__device__ __forceinline__ void consume(const Sm90Problem &p, uint32_t shared, int warpgroup) {
  const int thread = int(threadIdx.x) % kWarpgroup;
  const Rank rank = rank_of(p);
  const bool writes_here =
      (thread & ((1 << p.cluster_m_log) - 1)) == rank.row || thread >> p.cluster_m_log == rank.column;
  const bool tells = writes_here && thread < 1 << (p.cluster_m_log + p.cluster_n_log);
  Chain<S, Tell> chain = {{shared}, warpgroup, {tells ? in_block(Ring<S>::empty_of(shared, 0), thread) : 0}};
  // Worked out anew on each side of the main loop, which leaves no registers to keep it in.
  auto rows_of = [&](const Tile &tile, int block) {
    const int warp = int(thread_number() / 32), lane = int(thread_number() % 32);
    return WarpOut<S>{p, tile, shared + S::staging_at + warp * kPieceBytes,
                      tile.row + (warp / 4 * S::blocks + block) * 64 + warp % 4 * kWarpRows, lane};
  };
  const TileSlots slots = {{shared + S::slot_barriers_at}, shared + S::slots_at};
  wait_for_previous_kernel();
  for (uint32_t turn = 0; slots.wait(turn); ++turn) {
    float d[S::registers];
    Biases<S> bias;
    if (!S::chunked && p.bias_way != BiasWay::none) {
      const Tile tile = slots.look(turn);
      bias.load(p, tile, rows_of(tile, 0).row);
    }
    const int depth = S::hands_over ? slots.depth(turn) : p.k;
    // ptxas keeps wgmma asynchronous only where each way of setting the accumulators has its own main loop
    if (S::hands_over && slots.kind(turn) == kTail) {
      take_over<S>(p, d);
      chain.template run<false>(d, depth, p.chunk);
    } else if (p.begins) {
      const Tile tile = slots.look(turn);
#pragma unroll
      for (int block = 0; block < S::blocks; ++block) rows_of(tile, block).begin(block_of<S>(d, block));
      chain.template run<false>(d, depth, p.chunk);
    } else {
      if constexpr (S::chunked) {
#pragma unroll
        for (int i = 0; i < S::registers; ++i) d[i] = 0;
      } else if (depth == 0) {
        // As plain assignments they would become a choice for each element, which every tile then makes.
#pragma unroll
        for (int i = 0; i < S::registers; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[i]));
      }
      if (depth > 0) chain.template run<true>(d, depth, p.chunk);
    }

    if (S::hands_over && slots.kind(turn) == kHead) {
      hand_on<S>(p, d);
      slots.give_back(turn);
      continue;
    }
    const Tile tile = slots.look(turn);
    if (S::chunked) bias.load(p, tile, rows_of(tile, 0).row);
    bias.add(p, d, shared);
#pragma unroll
    for (int block = 0; block < S::blocks; ++block) {
      const WarpOut<S> rows = rows_of(tile, block);
      if (p.out_halves) rows.store_halves(block_of<S>(d, block));
      else if (p.out_singles) rows.store_singles(block_of<S>(d, block));
      else rows.store_any(block_of<S>(d, block));
    }
    slots.give_back(turn);
  }
}

template <class S>
__global__ void __launch_bounds__(S::threads, 1) gemm_kernel(const __grid_constant__ Sm90Problem p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  if (threadIdx.x == 0) {
    const int sharers = (1 << p.cluster_m_log) + (1 << p.cluster_n_log) - 1;
#pragma unroll
    for (int i = 0; i < S::stages; ++i) {
      barrier_init(Ring<S>::full_of(shared, i), 1);
      barrier_init(Ring<S>::empty_of(shared, i), S::consumers * sharers);
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(shared + S::slot_barriers_at + i * 8, 1);
      barrier_init(shared + S::slot_barriers_at + (kSlots + i) * 8, S::warps);
    }
    fence_barrier_init();
    if (p.k > 0) prefetch(&p.a), prefetch(&p.b);
  }
  cluster_sync_relaxed();
  let_next_kernel_start();

  const int warpgroup = int(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    registers_down<S::producer_registers>();
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
    if (warp < p.producers && elected()) produce<S>(p, shared, warp);
  } else {
    registers_up<S::consumer_registers>();
    consume<S>(p, shared, S::consumers == 1 ? 0 : warpgroup - 1);  // the same for all, where the compiler can know
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

template <class S> pydet_status launch_shape(const Gemm &g, const Sm90Operands &operands, int tile) {
  const char *name = kSm90Tiles[tile].name;
  const int cluster = kSm90Tiles[tile].cluster();
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  Sm90Problem problem = {};
  if (pydet_status status = sm90_plan(g, operands, tile, &problem)) return status;
  const int clusters = std::min(sm90_clusters(g.device.id, cluster), problem.tiles);
  if constexpr (S::hands_over) {
    if (pydet_status status = load(name, gemm_kernel<S>, S::shared_bytes)) return status;
    if (pydet_status status = sm90_begin_handover(g, tile, clusters, &problem)) return status;
  }
  Launch shape = {name, gpu_stream(g.stream), dim3(unsigned(clusters * cluster)), dim3(S::threads)};
  shape.shared_bytes = S::shared_bytes;
  shape.cluster = cluster;
  shape.overlaps_previous = true;
  shape.loaded = S::hands_over;
  return launch(shape, gemm_kernel<S>, problem);
}

// Calls f with true_type or false_type for a run-time bool.
template <class F> pydet_status either(bool value, F f) { return value ? f(std::true_type()) : f(std::false_type()); }

template <int size> pydet_status launch_size(const Gemm &g, const Sm90Operands &operands, int tile) {
  return either(operands.a.k_adjacent, [&](auto a_adjacent) {
    return either(operands.b.k_adjacent, [&](auto b_adjacent) {
      return either(g.k_chunk != 0, [&](auto chunked) {
        constexpr bool a_first = decltype(a_adjacent)::value, b_first = decltype(b_adjacent)::value;
        constexpr bool chunks = decltype(chunked)::value;
        constexpr Sm90Size its = kSm90Sizes.sizes[size];
        constexpr uint32_t layout = layout_bit(a_first, b_first);
        constexpr bool hands_over = !chunks && (its.handed_layouts & layout);
        if constexpr (its.layouts_of(chunks) & layout)
          return launch_shape<Shape<its.m, its.n, kGroupType, a_first, b_first, chunks, hands_over>>(g, operands, tile);
        else return pydet_status(PYDET_UNSUPPORTED);  // gemm_sm90_choose has refused it
      });
    });
  });
}

// f(size) for each size of this object's group.
template <class F, int... sizes> void each_size(F f, std::integer_sequence<int, sizes...>) {
  (f(std::integral_constant<int, kFirstSize + sizes * kSm90SizeGroups>()), ...);
}

}  // namespace

template <> pydet_status Sm90Group<kGroup>::launch(const Gemm &g, const Sm90Operands &operands, int tile) {
  constexpr int count = (kSm90Sizes.count - kFirstSize + kSm90SizeGroups - 1) / kSm90SizeGroups;
  pydet_status status = PYDET_UNSUPPORTED;
  each_size(
      [&](auto mine) {
        if (mine == kSm90Sizes.of_tile[tile]) status = launch_size<decltype(mine)::value>(g, operands, tile);
      },
      std::make_integer_sequence<int, count>());
  return status;
}

}  // namespace pydet
