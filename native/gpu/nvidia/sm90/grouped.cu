// Products of groups of tokens on Hopper's tensor cores, arithmetic sm90, with the bits of gemm.cu.
//
//   rows:   out[t, :] = round(D + bias[g, :]),  D = +0 or out, D = step(D, a[t, 16i ..], b[g][16i .., :]), i ascending
//   depth:  out[g]    = round(D + bias[g, :]),  D likewise over the tokens of group g, 16 a step from its first
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
#include "gpu/nvidia/sm90/rows.h"

namespace pydet {
namespace {

constexpr int kWarpgroup = 128;
constexpr uint16_t kBoth = 3;  // blocks of the cluster

template <Type input, int tile_m, int tile_n, bool along_depth, bool b_adjacent> struct Shape {
  static constexpr Type type = input;
  static constexpr int m = tile_m, n = tile_n;
  static constexpr bool depth = along_depth, a_k_adjacent = !depth, b_k_adjacent = b_adjacent;
  static constexpr int consumers = m / 64, threads = kWarpgroup * (1 + consumers), registers = n / 2;
  static constexpr int producer_registers = 40, consumer_registers = 232;
  // Boxes of TMA along m and n. A tile brings the boxes of a that have rows of its group.
  static constexpr int a_box = depth ? 64 : kGroupedTokenBox, a_boxes = m / a_box, a_box_bytes = a_box * kRowBytes;
  static constexpr int b_boxes = b_k_adjacent ? 2 : n / 64, b_box = n / b_boxes;
  static constexpr int a_bytes = m * kRowBytes, b_bytes = n * kRowBytes, stage_bytes = a_bytes + b_bytes;
  static constexpr int stages = std::min(12, (192 << 10) / stage_bytes);
  static constexpr int staging_at = stages * stage_bytes, table_at = staging_at + consumers * 4 * kPieceBytes;
  static constexpr int barriers_at = table_at + kTableInts * 4, shared_bytes = barriers_at + stages * 16;
  static_assert(shared_bytes <= kMostSharedBytes && b_boxes % 2 == 0, "halves, and they fit");
};

// ---- Loads -------------------------------------------------------------------------------------------------------

template <bool multicast> __device__ __forceinline__ void load_of_matrix(uint32_t to, const CUtensorMap *map,
                                                                         uint32_t barrier, int x, int y, int matrix) {
  if constexpr (multicast)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(matrix), "h"(kBoth)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(matrix)
        : "memory");
}

// One stage of a tile, from k on: of what the two blocks share each brings half, for both.
template <class S, bool strip>
__device__ __forceinline__ void load_stage(const GroupedProblem &p, const Spot &at, uint32_t to, uint32_t full, int k,
                                           int first, int boxes, int rank) {
#pragma unroll
  for (int i = 0; i < S::a_boxes; ++i) {
    if (i >= boxes || (strip && i % 2 != rank)) continue;
    const int row = at.row + i * S::a_box;
    const Place place = S::depth ? Place{row, first + k, {}} : Place{k, row, {}};
    load_box<2, strip>(to + i * S::a_box_bytes, &p.a, full, place, kBoth);
  }
#pragma unroll
  for (int i = 0; i < S::b_boxes; ++i) {
    if (!strip && i / (S::b_boxes / 2) != rank) continue;
    const int column = at.column + i * S::b_box, row = S::depth ? first + k : k, matrix = S::depth ? 0 : at.group;
    load_of_matrix<!strip>(to + S::a_bytes + i * S::b_box * kRowBytes, &p.b, full, S::b_k_adjacent ? row : column,
                           S::b_k_adjacent ? column : row, matrix);
  }
}

template <class S>
__device__ __forceinline__ void produce(const GroupedProblem &p, const Groups &groups, uint32_t shared, int rank) {
  int stage = 0, parity = 0, group = 0;
  const int jobs = groups.jobs[p.groups - 1];
  for (int index = int(blockIdx.x) / kCluster; index < jobs; index += int(gridDim.x) / kCluster) {
    const Spot at = spot_of<S>(p, groups, group, index, rank);
    group = at.group;
    const int first = S::depth ? groups.first[group] : 0, depth = S::depth ? groups.last[group] - first : p.k;
    const int boxes = min(S::a_boxes, cut(at.end - at.row, S::a_box));
    for (int k = 0; k < depth; k += kBlockK) {
      const uint32_t full = shared + S::barriers_at + stage * 8, to = shared + stage * S::stage_bytes;
      barrier_wait(full + S::stages * 8, parity ^ 1);
      barrier_expect(full, boxes * S::a_box_bytes + S::b_bytes);
      if (at.strip) load_stage<S, true>(p, at, to, full, k, first, boxes, rank);
      else load_stage<S, false>(p, at, to, full, k, first, boxes, rank);
      if (++stage == S::stages) stage = 0, parity ^= 1;
    }
  }
  // The block may end when every arrival that the other owes it has come.
  for (int i = 0; i < S::stages; ++i) {
    barrier_wait(shared + S::barriers_at + (S::stages + stage) * 8, parity ^ 1);
    if (++stage == S::stages) stage = 0, parity ^= 1;
  }
}

// ---- Products ----------------------------------------------------------------------------------------------------

// Where in the ring a warpgroup reads, and the stage that its wgmma group in flight still reads.
template <class S> struct Ring {
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

  // A stage on; the one before is free.
  __device__ __forceinline__ void advance(float (&d)[S::registers]) {
    barrier_wait(full(), parity);
    const uint32_t at = shared + stage * S::stage_bytes;
    const uint64_t a = wgmma_descriptor<S::a_k_adjacent>(at + warpgroup * kBlockBytes);
    const uint64_t b = wgmma_descriptor<S::b_k_adjacent>(at + S::a_bytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockK / 16; ++i)
      wgmma<S::type, S::a_k_adjacent, S::b_k_adjacent>(d, a + i * kDescriptorStep<S::a_k_adjacent>,
                                                       b + i * kDescriptorStep<S::b_k_adjacent>, 1);
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
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before wgmma reads, and the next load writes
    named_sync(1 + warpgroup, kWarpgroup);
  }

  // d = the chain of one tile, from d.
  __device__ __forceinline__ void chain(float (&d)[S::registers], int depth) {
#pragma unroll 1
    for (int k = 0; k < depth; k += kBlockK) {
      if (S::depth && depth - k < kBlockK) zero_after(depth - k);
      advance(d);
    }
    wgmma_wait<0>();
    release(reading);
    reading = -1;
  }

  // Leaves out as many stages.
  __device__ __forceinline__ void skip(int depth) {
#pragma unroll 1
    for (int k = 0; k < depth; k += kBlockK) {
      barrier_wait(full(), parity);
      release(stage);
      next();
    }
  }
};

// What one warp does with its 16 rows of a tile, of which `rows` are its group's. Thread t holds in d[4 i + 2 h + e]
// row t / 4 + 8 h, column 8 i + 2 (t % 4) + e.
template <class S> struct WarpTile {
  const GroupedProblem &p;
  int64_t out;  // where its first row begins, in elements
  int rows, column, lane;
  uint32_t piece;

  // f(i, place, pair) for every two accumulators d[i] and d[i + 1] in out: the first's place in it, and whether the
  // second is inside too.
  template <class F> __device__ __forceinline__ void each_pair(F f) const {
#pragma unroll
    for (int i = 0; i < S::registers; i += 2) {
      const int r = lane / 4 + i % 4 / 2 * 8, c = column + i / 4 * 8 + lane % 4 * 2;
      if (r < rows && c < p.n) f(i, out + r * p.out_row_stride + c, c + 1 < p.n);
    }
  }

  // Selects, not branches: behind those ptxas serialises every wgmma (C7515).
  __device__ __forceinline__ void begin_at_out(float (&d)[S::registers]) const {
    const float *from = reinterpret_cast<const float *>(p.out);
#pragma unroll
    for (int i = 0; i < S::registers; ++i) {
      const int r = lane / 4 + i % 4 / 2 * 8, c = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
      d[i] = r < rows && c < p.n ? canonical(from[out + r * p.out_row_stride + c]) : 0.0f;
    }
  }

  __device__ __forceinline__ void add_bias(float (&d)[S::registers], int group) const {
#pragma unroll
    for (int i = 0; i < S::registers; i += 4) {
      const int c = column + i / 4 * 8 + lane % 4 * 2;
      float bias[2] = {};
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (c + e < p.n)
          bias[e] = f32_from_raw(load_raw(p.bias, group * p.bias_stride + (c + e) * p.bias_column_stride, p.bias_type),
                                 p.bias_type);
#pragma unroll
      for (int e = 0; e < 4; ++e) d[i + e] = d[i + e] + bias[e % 2];
    }
  }

  __device__ __forceinline__ void store_f32(const float (&d)[S::registers]) const {
    float *to = reinterpret_cast<float *>(p.out);
    each_pair([&](int i, int64_t place, bool pair) {
      if (p.out_aligned && pair) {
        *reinterpret_cast<float2 *>(to + place) = make_float2(d[i], d[i + 1]);
      } else {
        to[place] = d[i];
        if (pair) to[place + 1] = d[i + 1];
      }
    });
  }

  // Piece by piece of 64 columns, through shared memory, swizzled as in rows.h.
  template <bool bf16> __device__ __forceinline__ void store_half(const float (&d)[S::registers]) const {
#pragma unroll
    for (int start = 0; start < S::n; start += 64) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float *e = d + start / 2 + 8 * j;
        const uint32_t fragments[4] = {round_pair<bf16>(e[0], e[1]), round_pair<bf16>(e[2], e[3]),
                                       round_pair<bf16>(e[4], e[5]), round_pair<bf16>(e[6], e[7])};
        const int r = lane % 16, chunk = 2 * j + lane / 16;
        store_matrices(piece + r * kRowBytes + ((chunk ^ (r & 7)) << 4), fragments);
      }
      __syncwarp();
      const int c = column + start + lane % 8 * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * i + lane / 8;
        if (r >= rows || c >= p.n) continue;
        uint16_t *to = reinterpret_cast<uint16_t *>(p.out) + out + r * p.out_row_stride + c;
        const uint4 words = load_16_bytes(piece + r * kRowBytes + ((lane % 8 ^ (r & 7)) << 4));
        if (p.out_aligned && c + 8 <= p.n) {
          *reinterpret_cast<uint4 *>(to) = words;
        } else {
          const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
          for (int e = 0; e < 8; ++e)
            if (c + e < p.n) to[e] = uint16_t(pairs[e / 2] >> e % 2 * 16);
        }
      }
      __syncwarp();
    }
  }
};

template <class S>
__device__ __forceinline__ void consume(const GroupedProblem &p, const Groups &groups, uint32_t shared, int rank,
                                        int warpgroup) {
  const int thread = int(threadIdx.x) % kWarpgroup, warp = thread / 32;
  const uint32_t piece = shared + S::staging_at + (warpgroup * 4 + warp) * kPieceBytes;
  Ring<S> ring = {shared, warpgroup, thread};
  int group = 0;
  const int jobs = groups.jobs[p.groups - 1];
  for (int index = int(blockIdx.x) / kCluster; index < jobs; index += int(gridDim.x) / kCluster) {
    const Spot at = spot_of<S>(p, groups, group, index, rank);
    group = at.group;
    const int depth = S::depth ? groups.last[group] - groups.first[group] : p.k;
    const int row = at.row + warpgroup * 64;
    if (row >= at.end || at.column >= p.n) {
      ring.skip(depth);
      continue;
    }
    const int warp_row = row + warp * kWarpRows;
    const WarpTile<S> tile = {p,
                              (S::depth ? group * p.out_stride : 0) + warp_row * p.out_row_stride,
                              at.end - warp_row,
                              at.column,
                              thread % 32,
                              piece};
    float d[S::registers];
    // ptxas keeps wgmma asynchronous only where each way of setting the accumulators has its own main loop
    if (p.accumulate) {
      tile.begin_at_out(d);
      ring.chain(d, depth);
    } else {
#pragma unroll
      for (int i = 0; i < S::registers; ++i) d[i] = 0;
      ring.chain(d, depth);
    }
    if (p.bias) tile.add_bias(d, group);
    if (p.out_type == Type::bf16) tile.template store_half<true>(d);
    else if (p.out_type == Type::f16) tile.template store_half<false>(d);
    else tile.store_f32(d);
  }
}

template <class S>
__global__ void __launch_bounds__(S::threads, 1) grouped_kernel(const __grid_constant__ GroupedProblem p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::stages; ++i) {
      barrier_init(shared + S::barriers_at + i * 8, 1);
      barrier_init(shared + S::barriers_at + (S::stages + i) * 8, S::consumers * kCluster);
    }
    fence_barrier_init();
    prefetch(&p.a), prefetch(&p.b);
  }
  cluster_sync_relaxed();
  let_next_kernel_start();
  wait_for_previous_kernel();
  int *table = reinterpret_cast<int *>(memory + S::table_at);
  const Groups groups = {table, table + kGroupedMostGroups, table + 2 * kGroupedMostGroups};
  find_groups<S>(p, groups, table + 3 * kGroupedMostGroups);

  const int warpgroup = int(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    registers_down<S::producer_registers>();
    if (threadIdx.x == 0) produce<S>(p, groups, shared, rank);
  } else {
    registers_up<S::consumer_registers>();
    consume<S>(p, groups, shared, rank, warpgroup - 1);
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

template <class S> pydet_status launch_shape(const GroupedGemm &g, const char *name) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  GroupedProblem problem = {};
  const GroupedBoxes boxes = {S::a_box, S::b_k_adjacent ? S::b_box : kBlockK};
  if (pydet_status status = grouped_plan(g, name, boxes, &problem)) return status;
  problem.columns = int(divide_up(g.n, S::n));
  const int64_t clusters = std::min<int64_t>(sm90_clusters(g.device.id, kCluster), most_jobs(g, 2 * S::m, S::n));
  Launch shape = {name, gpu_stream(g.stream), dim3(unsigned(clusters * kCluster)), dim3(S::threads)};
  shape.shared_bytes = S::shared_bytes;
  shape.cluster = kCluster;
  shape.overlaps_previous = true;
  return launch(shape, grouped_kernel<S>, problem);
}

template <int tile, Type type> pydet_status launch_layout(const GroupedGemm &g) {
  constexpr GroupedTile kTile = kGroupedTiles[tile];
  if (g.depth) return launch_shape<Shape<type, kTile.m, kTile.n, true, false>>(g, kTile.name);
  return grouped_b_k_adjacent(g) ? launch_shape<Shape<type, kTile.m, kTile.n, false, true>>(g, kTile.name)
                                 : launch_shape<Shape<type, kTile.m, kTile.n, false, false>>(g, kTile.name);
}

}  // namespace

template <int tile> pydet_status GroupedSm90<tile>::launch(const GroupedGemm &g) {
  return g.a.type == Type::bf16 ? launch_layout<tile, Type::bf16>(g) : launch_layout<tile, Type::f16>(g);
}

template struct GroupedSm90<0>;
template struct GroupedSm90<1>;
static_assert(kGroupedTileCount == 2, "each is instantiated");

}  // namespace pydet
