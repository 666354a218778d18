// Products of groups of tokens on Hopper's tensor cores, arithmetic sm90, with the bits of gemm.cu.
//
//   rows:   out[t, :] = round(D + bias[g, :]),  D = +0 or out, D = step(D, a[t, 16i ..], b[g][16i .., :]), i ascending
//   depth:  out[g]    = round(D + bias[g, :]),  D likewise over the tokens of group g, 16 a step from its first
//   with k_chunk D = fl(D + s_c) for chunks c ascending, s_c = such a chain from +0 over the chunk's k or tokens
//
// Persistent clusters of two blocks walk the tiles of all groups, which each block works out from the boundaries as it
// starts: nothing about them is known to the host. In a group, two tiles under each other share their loads of b by
// multicast (a pair), and rows that are left over for one tile alone, which a small group has only, are a strip: two
// tiles side by side that share a. Both bring as many bytes into a stage, so one ring serves them in any order.
// A tile reads what follows its group and stores none of it. In depth the tokens after the last are zeroed in shared
// memory, in both operands, since 0 times the NaN of a neighbour is NaN.

#include <algorithm>

#include "gpu/any/jobs.h"
#include "gpu/nvidia/sm90/group_jobs.h"
#include "gpu/nvidia/sm90/group_rows.h"
#include "gpu/nvidia/sm90/pipe/operand.h"
#include "gpu/nvidia/sm90/pipe/wgmma.h"

namespace pydet {
namespace {

template <Type input, int tile_m, int tile_n, bool along_depth, bool b_adjacent, bool chunks> struct Shape {
  static constexpr Type type = input;
  static constexpr int m = tile_m, n = tile_n;
  static constexpr bool depth = along_depth, a_k_adjacent = !depth, b_k_adjacent = b_adjacent, chunked = chunks;
  static constexpr int consumers = m / 64, threads = kWarpgroup * (1 + consumers), registers = n / 2;
  static constexpr int producer_registers = 40, consumer_registers = 232;
  // Boxes of TMA along m and n. A tile brings the boxes of a that have rows of its group.
  static constexpr int a_box = depth ? 64 : kGroupedTokenBox, a_boxes = m / a_box, a_box_bytes = a_box * kRowBytes;
  static constexpr int b_boxes = b_k_adjacent ? 2 : n / 64, b_box = n / b_boxes;
  static constexpr int a_bytes = m * kRowBytes, b_bytes = n * kRowBytes, stage_bytes = a_bytes + b_bytes;
  // In depth TMA stores out, beside the next tile's products, of which there may be few: a warpgroup has room for all
  // of its 16-bit elements, in blocks of 64 by 64. Over rows a fourth stage is worth more than that room.
  static constexpr bool stores_by_tma = depth;
  static constexpr int staging_bytes = (stores_by_tma ? n / 64 : 1) * kBlockBytes;
  static constexpr int most_groups = kGroupedMostGroups, table_bytes = table_ints(most_groups) * 4;
  static constexpr int stages = (kMostSharedBytes - consumers * staging_bytes - table_bytes - 512) / stage_bytes;
  static constexpr int staging_at = stages * stage_bytes, table_at = staging_at + consumers * staging_bytes;
  static constexpr int barriers_at = table_at + table_bytes, slots_at = barriers_at + stages * 16;
  static constexpr int shared_bytes = slots_at + kSlots * (16 + int(sizeof(Spot)));
  static_assert(shared_bytes <= kMostSharedBytes && b_boxes % 2 == 0, "halves, and they fit");
};

// ---- Loads -------------------------------------------------------------------------------------------------------

// One stage of a tile, from k on: of what the two blocks share each brings half, for both.
template <class S, bool strip>
__device__ __forceinline__ void load_stage(const GroupedProblem &p, const Spot &at, uint32_t to, uint32_t full, int k,
                                           int boxes, int rank) {
#pragma unroll
  for (int i = 0; i < S::a_boxes; ++i) {
    if (i >= boxes || (strip && i % 2 != rank)) continue;
    const int row = at.row + i * S::a_box;
    const Place place = S::depth ? Place{row, at.first + k, {}} : Place{k, row, {}};
    load_box<2, strip>(to + i * S::a_box_bytes, &p.a, full, place, kBoth);
  }
#pragma unroll
  for (int i = 0; i < S::b_boxes; ++i) {
    if (!strip && i / (S::b_boxes / 2) != rank) continue;
    const int column = at.column + i * S::b_box, row = S::depth ? at.first + k : k, matrix = S::depth ? 0 : at.group;
    const Place place = S::b_k_adjacent ? Place{row, column, {matrix}} : Place{column, row, {matrix}};
    load_box<3, !strip>(to + S::a_bytes + i * S::b_box * kRowBytes, &p.b, full, place, kBoth);
  }
}

// Where in k the stage after that at `k` begins: one begins with every chunk.
template <class S> __device__ __forceinline__ int next_stage(int k, int chunk) {
  if constexpr (S::chunked) return min(k + kBlockK, (k / chunk + 1) * chunk);
  else return k + kBlockK;
}

template <class S>
__device__ __forceinline__ void produce(const GroupedProblem &p, const Groups &groups, SpotSlots slots, uint32_t shared,
                                        int rank) {
  int stage = 0, parity = 0;
  for (int index = int(blockIdx.x) / kCluster; index < groups.jobs; index += int(gridDim.x) / kCluster) {
    const Spot at = spot_of<S>(p, groups, index, rank);
    slots.put(at);
    const int boxes = min(S::a_boxes, divide_up_int(at.end - at.row, S::a_box));
    for (int k = 0; k < at.depth; k = next_stage<S>(k, p.chunk)) {
      const uint32_t full = shared + S::barriers_at + stage * 8, to = shared + stage * S::stage_bytes;
      barrier_wait(full + S::stages * 8, parity ^ 1);
      barrier_expect(full, boxes * S::a_box_bytes + S::b_bytes);
      if (at.strip) load_stage<S, true>(p, at, to, full, k, boxes, rank);
      else load_stage<S, false>(p, at, to, full, k, boxes, rank);
      if (++stage == S::stages) stage = 0, parity ^= 1;
    }
  }
  Spot none = {};
  none.group = kNoGroup;
  slots.put(none);
  // The block may end when every arrival that the other owes it has come.
  for (int i = 0; i < S::stages; ++i) {
    barrier_wait(shared + S::barriers_at + (S::stages + stage) * 8, parity ^ 1);
    if (++stage == S::stages) stage = 0, parity ^= 1;
  }
}

// While a tile is multiplied, what the next one's accumulators begin at comes to the L2. A warp of its own takes the tiles
// as the producer begins them: few tokens are a few stages, beside which that memory is most of the tile's time.
template <class S>
__device__ __forceinline__ void bring_sums(const GroupedProblem &p, SpotSlots slots) {
  constexpr int kLine = 128 / 4, kLines = S::n / kLine;  // elements; of a row
  const int lane = int(threadIdx.x) % 32;
  for (Spot at = slots.take(); at.group != kNoGroup; at = slots.take()) {
    const float *const out = reinterpret_cast<const float *>(p.out) + at.group * p.out_stride;
    const int end = min(at.row + S::m, at.end), column = at.column + lane % kLines * kLine;
    for (int row = at.row + lane / kLines; row < end && column < p.n; row += 32 / kLines)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(out + row * p.out_row_stride + column));
  }
}

// ---- Products ----------------------------------------------------------------------------------------------------

// Where in the ring a warpgroup reads, and the stage that its wgmma group in flight still reads.
template <class S> struct Reader {
  uint32_t shared;
  int warpgroup, thread;
  int stage = 0, parity = 0, reading = -1;

  __device__ __forceinline__ uint32_t full() const { return shared + S::barriers_at + stage * 8; }
  __device__ __forceinline__ void next() {
    if (++stage == S::stages) stage = 0, parity ^= 1;
  }
  // The warpgroup has read the stage: tells both blocks, either of which may write into it.
  __device__ __forceinline__ void release(int read) {
    if (read >= 0 && thread < kCluster) barrier_arrive(shared + S::barriers_at + (S::stages + read) * 8, thread);
  }

  // A stage on, or `steps` steps of it, the first from +0 if `fresh`; the stage before is free.
  template <bool whole> __device__ __forceinline__ void advance(float (&d)[S::registers], int steps, bool fresh) {
    barrier_wait(full(), parity);
    const uint32_t at = shared + stage * S::stage_bytes;
    const uint64_t a = wgmma_descriptor<S::a_k_adjacent>(at + warpgroup * kBlockBytes);
    const uint64_t b = wgmma_descriptor<S::b_k_adjacent>(at + S::a_bytes);
    auto step = [&](int i) {
      wgmma<S::type, S::a_k_adjacent, S::b_k_adjacent>(d, a + i * kDescriptorStep<S::a_k_adjacent>,
                                                       b + i * kDescriptorStep<S::b_k_adjacent>, i || !fresh);
    };
    wgmma_fence();
    if constexpr (whole) {
#pragma unroll
      for (int i = 0; i < kBlockK / kStep; ++i) step(i);
    } else {
#pragma unroll 1
      for (int i = 0; i < steps; ++i) step(i);
    }
    wgmma_commit();
    wgmma_wait<1>();
    release(reading);
    reading = stage;
    next();
  }

  // +0 for what the next stage has of tokens from `tokens` on: this warpgroup's rows of a, and b, where both
  // warpgroups write the same.
  __device__ __forceinline__ void zero_after(int tokens) {
    barrier_wait(full(), parity);
    const uint32_t at = shared + stage * S::stage_bytes;
    auto zero = [&](uint32_t block) {
      for (int i = tokens * kRowBytes + thread * 16; i < kBlockBytes; i += kWarpgroup * 16)
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(block + i), "r"(0) : "memory");
    };
    zero(at + warpgroup * kBlockBytes);
    for (int i = 0; i < S::n / 64; ++i) zero(at + S::a_bytes + i * kBlockBytes);
    fence_stores();  // before wgmma reads, and the next load writes
    named_sync(1 + warpgroup, kWarpgroup);
  }

  // The accumulators may be read.
  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
    release(reading);
    reading = -1;
  }

  // d = the chain of one tile, or the sum of its chunks, from d. A chunk ends with a step, the last one past the end.
  __device__ __forceinline__ void chain(float (&d)[S::registers], int depth, int chunk) {
    if constexpr (S::chunked) {
#pragma unroll 1
      for (int start = 0; start < depth; start += chunk) {
        float sum[S::registers];
        const int here = min(chunk, depth - start), whole = here / kBlockK, rest = here % kBlockK;
#pragma unroll 1
        for (int i = 0; i < whole; ++i) advance<true>(sum, 0, i == 0);
        if (S::depth && rest % kStep) zero_after(rest);
        if (rest) advance<false>(sum, (rest + kStep - 1) / kStep, whole == 0);
        finish();
#pragma unroll
        for (int i = 0; i < S::registers; ++i) d[i] = d[i] + sum[i];
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < depth; k += kBlockK) {
        if (S::depth && depth - k < kBlockK) zero_after(depth - k);
        advance<true>(d, 0, false);
      }
      finish();
    }
  }

  // Leaves out as many stages.
  __device__ __forceinline__ void skip(int depth, int chunk) {
#pragma unroll 1
    for (int k = 0; k < depth; k = next_stage<S>(k, chunk)) {
      barrier_wait(full(), parity);
      release(stage);
      next();
    }
  }
};

template <class S>
__device__ __forceinline__ void consume(const GroupedProblem &p, SpotSlots slots, uint32_t shared, int warpgroup) {
  const int thread = int(threadIdx.x) % kWarpgroup, warp = thread / 32;
  const uint32_t staging = shared + S::staging_at + warpgroup * S::staging_bytes;
  Reader<S> ring = {shared, warpgroup, thread};
  for (Spot at = slots.take(); at.group != kNoGroup; at = slots.take()) {
    const int row = at.row + warpgroup * 64;
    if (row >= at.end || at.column >= p.n) {
      ring.skip(at.depth, p.chunk);
      continue;
    }
    const int warp_row = row + warp * kWarpRows;
    const int64_t out = (S::depth ? at.group * p.out_stride : 0) + warp_row * p.out_row_stride;
    const WarpTile<S> tile = {p,         out,  at.group,    row,     at.end - warp_row,
                              at.column, warp, thread % 32, staging, 1 + warpgroup};
    float d[S::registers];
    // ptxas keeps wgmma asynchronous only where each way of setting the accumulators has its own main loop
    if (p.accumulate) {
      tile.begin_at_out(d);
      ring.chain(d, at.depth, p.chunk);
    } else {
#pragma unroll
      for (int i = 0; i < S::registers; ++i) d[i] = 0;
      ring.chain(d, at.depth, p.chunk);
    }
    if (p.bias) tile.add_bias(d);
    if (p.out_type == Type::bf16) tile.template store_half<true>(d);
    else if (p.out_type == Type::f16) tile.template store_half<false>(d);
    else tile.store_f32(d);
  }
  if (S::stores_by_tma && thread == 0) wait_until_stored();
}

template <class S>
__global__ void __launch_bounds__(S::threads, 1) grouped_kernel(const __grid_constant__ GroupedProblem p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  const int rank = cluster_rank();
  const bool continues = S::depth && p.accumulate;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::stages; ++i) {
      barrier_init(shared + S::barriers_at + i * 8, 1);
      barrier_init(shared + S::barriers_at + (S::stages + i) * 8, S::consumers * kCluster);
    }
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(shared + S::slots_at + i * 8, 1);
      barrier_init(shared + S::slots_at + (kSlots + i) * 8, S::consumers * 4 + continues);
    }
    fence_barrier_init();
    prefetch(&p.a), prefetch(&p.b);
  }
  cluster_sync_relaxed();
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Groups groups = find_groups<S>(p, reinterpret_cast<int *>(memory + S::table_at));

  const SpotSlots slots = {reinterpret_cast<Spot *>(memory + S::slots_at + kSlots * 16), shared + S::slots_at};

  const int warpgroup = int(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    registers_down<S::producer_registers>();
    if (threadIdx.x == 0) produce<S>(p, groups, slots, shared, rank);
    if (continues && threadIdx.x / 32 == 1) bring_sums<S>(p, slots);
  } else {
    registers_up<S::consumer_registers>();
    consume<S>(p, slots, shared, warpgroup - 1);
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

template <class S> pydet_status launch_shape(const GroupedGemm &g, const char *name) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  GroupedProblem problem = {};
  const GroupedBoxes boxes = {S::a_box, S::b_k_adjacent ? S::b_box : kBlockK};
  if (pydet_status status = grouped_plan(g, S::b_k_adjacent, name, boxes, &problem)) return status;
  problem.columns = int(divide_up(g.n, S::n));
  const int64_t clusters = std::min<int64_t>(sm90_clusters(g.device.id, kCluster), most_jobs(g, 2 * S::m, S::n));
  Launch shape = {name, gpu_stream(g.stream), dim3(unsigned(clusters * kCluster)), dim3(S::threads)};
  shape.shared_bytes = S::shared_bytes;
  shape.cluster = kCluster;
  shape.overlaps_previous = true;
  for (int64_t first = 0; first < g.groups; first += kGroupedMostGroups) {
    problem.first_group = int(first), problem.groups = int(std::min<int64_t>(g.groups - first, kGroupedMostGroups));
    if (pydet_status status = launch(shape, grouped_kernel<S>, problem)) return status;
  }
  return PYDET_OK;
}

template <int tile, Type type, bool chunked> pydet_status launch_layout(const GroupedGemm &g, bool b_k_adjacent) {
  constexpr GroupedTile kTile = kGroupedTiles[tile];
  if (g.depth) return launch_shape<Shape<type, kTile.m, kTile.n, true, false, chunked>>(g, kTile.name);
  return b_k_adjacent ? launch_shape<Shape<type, kTile.m, kTile.n, false, true, chunked>>(g, kTile.name)
                      : launch_shape<Shape<type, kTile.m, kTile.n, false, false, chunked>>(g, kTile.name);
}

}  // namespace

template <int tile> pydet_status grouped_sm90(const GroupedGemm &g, const Choice &choice) {
  const bool b_k_adjacent = choice.cut<bool>();
  return with_type<kHalfTypes>(g.a.type, [&](auto type) {
    if constexpr (kGroupedTiles[tile].chunks)
      if (g.k_chunk) return launch_layout<tile, type, true>(g, b_k_adjacent);
    return launch_layout<tile, type, false>(g, b_k_adjacent);
  });
}

template pydet_status grouped_sm90<0>(const GroupedGemm &, const Choice &);
template pydet_status grouped_sm90<1>(const GroupedGemm &, const Choice &);
static_assert(kGroupedTileCount == 2, "each is instantiated");

}  // namespace pydet
