// Scaled products of groups of tokens in fp8 on Hopper's tensor cores, arithmetic sm90, with the bits of scaled_tiles.cu
// (NUMERICS.md, "Scaled grouped GEMM").
//
//   s_c = the chain of steps of 32 over chunk c of k, from +0;   D = fmaf(w_c, s_c, D), c ascending
//   w_c = fl(sa[t, c] sb[g, c, n]) with scales along k, else 1;  then out = round(fl(fl(D sb[g, n]) sa[t]) + bias[g, n])
//
// The tiles of all groups, their pairs and strips, and who brings what are those of grouped.cu (group_jobs.h): 128
// rows, or 256 where groups have many, by 128 columns, stages of 128 k. Two warps put the weights of each stage beside
// it, and as in scaled_tiles.cu, with 128 rows, a warpgroup adds a chunk while its next one is on the tensor cores
// (`ahead`). Neither that nor 256 rows leave registers for scales of columns along k or for chains of more than a
// stage: those have 128 rows and wait. A tile reads what follows its group, and its scales, and stores none of it.

#include <algorithm>

#include "gpu/nvidia/sm90/scaled_groups.h"

namespace pydet {

// Of products with an operand of e5m2, whose kernels are an object of their own (PYDET_SCALED_E5M2).
template <int rows, bool ahead, uint32_t results>
pydet_status scaled_groups_e5m2(const char *name, const ScaledGroupedGemm &);

namespace {

// ---- Products ----------------------------------------------------------------------------------------------------

// One of the warpgroups that multiply: 64 rows of each tile.
template <class S> struct Consumer {
  const ScaledGroupsProblem &problem;
  SpotSlots slots;
  Ring<S> ring, done;  // done: whose weights and chains are still to be added
  int warpgroup;

  __device__ __forceinline__ int thread() const { return int(threadIdx.x) % kWarpgroup; }

  // The stage's four steps for 64 of the warpgroup's rows, the first step from +0 if `fresh`.
  __device__ __forceinline__ void issue(float (&sum)[S::registers], bool fresh, int block = 0) {
    const uint64_t a = wgmma_descriptor<true>(ring.a() + (warpgroup * S::blocks + block) * kBlockBytes);
    const uint64_t b = wgmma_descriptor<true>(ring.a() + S::a_bytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kStageK / kFp8Step; ++step)
      wgmma_fp8<S::a_type, S::b_type>(sum, a + step * 2, b + step * 2, step || !fresh);
    wgmma_commit();
  }
  __device__ __forceinline__ void multiply(float (&sum)[S::registers], bool fresh) {
    ring.wait_full();
    issue(sum, fresh);
    ring.next();
  }

  // The weights of the thread's two rows of those 64.
  __device__ __forceinline__ void load_weights(const Ring<S> &at, int block, float (&w)[2]) const {
    const int lane = thread() % 32;
    const uint32_t of_rows =
        weights_of(at) + ((warpgroup * S::blocks + block) * 64 + thread() / 32 * kWarpRows + lane / 4) * 4;
    w[0] = w[1] = 1;
    if (problem.along_k) w[0] = load_word(of_rows), w[1] = load_word(of_rows + 8 * 4);
  }

  static __device__ __forceinline__ void add_chunk(float (&total)[S::registers], const float (&sum)[S::registers],
                                                   const float (&w)[2]) {
#pragma unroll
    for (int j = 0; j < S::registers; j += 4) {
      total[j] = fmaf(w[0], sum[j], total[j]);
      total[j + 1] = fmaf(w[0], sum[j + 1], total[j + 1]);
      total[j + 2] = fmaf(w[1], sum[j + 2], total[j + 2]);
      total[j + 3] = fmaf(w[1], sum[j + 3], total[j + 3]);
    }
  }

  // total += w sum, once the products but the last `in_flight` are made; frees the stage.
  template <int in_flight>
  __device__ __forceinline__ void add(float (&total)[S::registers], const float (&sum)[S::registers], bool ends) {
    float w[2];
    load_weights(done, 0, w);
    wgmma_wait<in_flight>();
    const bool by_column = S::by_column && problem.along_k && by_columns(problem.b_scale);
    if (by_column) {
#pragma unroll
      for (int j = 0; j < S::registers; j += 4) {
        const float2 sb = load_pair(weights_of(done) + (S::m + j * 2 + thread() % 4 * 2) * 4);
        total[j] = fmaf(w[0] * sb.x, sum[j], total[j]);
        total[j + 1] = fmaf(w[0] * sb.y, sum[j + 1], total[j + 1]);
        total[j + 2] = fmaf(w[1] * sb.x, sum[j + 2], total[j + 2]);
        total[j + 3] = fmaf(w[1] * sb.y, sum[j + 3], total[j + 3]);
      }
    }
    release(done);
    done.next();
    if (ends && !by_column) add_chunk(total, sum, w);
  }

  // So many chunks, each one stage: the next is on the tensor cores while one is added.
  template <int count> __device__ __forceinline__ void add_chunks(float (&total)[S::registers]) {
    float sums[2][S::registers];
    multiply(sums[0], true);
#pragma unroll
    for (int j = 0; j < count; ++j) {
      if (j + 1 < count) {
        multiply(sums[(j + 1) % 2], true);
        add<1>(total, sums[j % 2], true);
      } else {
        add<0>(total, sums[j % 2], true);
      }
    }
  }

  __device__ __forceinline__ void sum_up(float (&totals)[S::blocks][S::registers], int depth) {
    float(&total)[S::registers] = totals[0];
    if constexpr (S::ahead) {
      int left = depth;
#pragma unroll 1
      for (; left >= kAhead; left -= kAhead) add_chunks<kAhead>(total);
      if (left & 4) add_chunks<4>(total);
      if (left & 2) add_chunks<2>(total);
      if (left & 1) add_chunks<1>(total);
    } else if constexpr (!S::long_chunks) {
      float sum[S::registers];
#pragma unroll 4
      for (int i = 0; i < depth; ++i) {
        ring.wait_full();
#pragma unroll
        for (int block = 0; block < S::blocks; ++block) {
          issue(sum, true, block);
          float w[2];
          load_weights(ring, block, w);
          wgmma_wait<0>();
          if (block == S::blocks - 1) release(ring);
          add_chunk(totals[block], sum, w);
        }
        ring.next();
      }
    } else {
      float sum[S::registers];
      if (problem.chain_from_out)
#pragma unroll
        for (int i = 0; i < S::registers; ++i) sum[i] = total[i], total[i] = 0;
      bool fresh = !problem.chain_from_out;
      int left = problem.groups.chunk;
#pragma unroll 1
      for (int i = 0; i < depth; ++i) {
        const bool ends = --left == 0 || i + 1 == depth;
        multiply(sum, fresh);
        add<0>(total, sum, ends);
        fresh = ends;
        if (ends) left = problem.groups.chunk;
      }
    }
  }

  // x = fl(fl(x sb) sa), of scales that do not vary along k.
  __device__ __forceinline__ void scale(float (&x)[S::registers], const Spot &at, int block) const {
    const GroupedProblem &p = problem.groups;
    const DeviceScale &a_scale = problem.a_scale, &b_scale = problem.b_scale;
    const int lane = thread() % 32;
    const int row = at.row + (warpgroup * S::blocks + block) * 64 + thread() / 32 * kWarpRows + lane / 4;
    const int64_t a_at[2] = {min(row, p.tokens - 1) * a_scale.stride, min(row + 8, p.tokens - 1) * a_scale.stride};
    float sa[2];
    load_scales(a_scale, a_at, sa);
    constexpr int kColumns = 16;  // at a time
#pragma unroll
    for (int first = 0; first < S::registers / 2; first += kColumns) {
      int64_t b_at[kColumns];
      float sb[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int column = at.column + (first + i) / 2 * 8 + lane % 4 * 2 + i % 2;
        b_at[i] = at.group * b_scale.batch_stride[0] + min(column, p.n - 1) * b_scale.stride;
      }
      load_scales(b_scale, b_at, sb);
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float &element = x[(first + i) / 2 * 4 + h * 2 + i % 2];
          element = (element * sb[i]) * sa[h];
        }
    }
  }

  __device__ __forceinline__ void skip(int depth) {
#pragma unroll 1
    for (int i = 0; i < depth; ++i) {
      ring.wait_full();
      release(ring);
      ring.next();
    }
    done = ring;
  }

  __device__ __forceinline__ void run(uint32_t shared) {
    const GroupedProblem &p = problem.groups;
    const uint32_t staging = shared + S::staging_at + warpgroup * S::staging_bytes;
    // Read anew on each side of the main loop, which leaves no registers to keep it in.
    const auto tile_of = [&](const Spot &at, int block) {
      int t = thread();
      asm volatile("" : "+r"(t));
      const int row = at.row + (warpgroup * S::blocks + block) * 64, warp_row = row + t / 32 * kWarpRows;
      return WarpTile<S>{p,
                         warp_row * p.out_row_stride,
                         at.group,
                         row,
                         at.end - warp_row,
                         at.column,
                         t / 32,
                         t % 32,
                         staging,
                         1 + warpgroup};
    };
    for (; slots.look().group != kNoGroup; slots.give_back()) {
      const Spot &at = slots.look();
      const int depth = at.depth;
      if (at.row + warpgroup * S::blocks * 64 >= at.end || at.column >= p.n) {
        skip(depth);
        continue;
      }
      float totals[S::blocks][S::registers];
#pragma unroll
      for (int block = 0; block < S::blocks; ++block)
#pragma unroll
        for (int i = 0; i < S::registers; ++i) totals[block][i] = 0;
      if constexpr (S::stores_f32)
        if (p.accumulate)
#pragma unroll
          for (int block = 0; block < S::blocks; ++block) tile_of(at, block).begin_at_out(totals[block]);
      sum_up(totals, depth);
      const Spot end = slots.look();
#pragma unroll
      for (int block = 0; block < S::blocks; ++block) {
        float(&total)[S::registers] = totals[block];
        const WarpTile<S> tile = tile_of(end, block);
        if (!problem.along_k && (problem.a_scale.data || problem.b_scale.data)) scale(total, end, block);
        if (p.bias) tile.add_bias(total);
        with_type<S::results>(p.out_type, [&](auto constant) {
          constexpr Type type = decltype(constant)::value;
          if constexpr (type == Type::f32) tile.store_f32(total);
          else tile.template store_half<type == Type::bf16>(total);
        });
      }
    }
  }
};

template <class S> __global__ void __launch_bounds__(S::threads, 1)
    scaled_groups_kernel(const __grid_constant__ ScaledGroupsProblem problem) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const GroupedProblem &p = problem.groups;
  const uint32_t shared = shared_address(memory);
  const int rank = cluster_rank(), weighers = problem.along_k ? kWeighers / 32 : 0;  // warps
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::stages; ++i) {
      barrier_init(Ring<S>::full_of(shared, i), 1 + weighers);
      barrier_init(Ring<S>::empty_of(shared, i), S::consumers * 4 * kCluster);
    }
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(shared + S::slots_at + i * 8, 1);
      barrier_init(shared + S::slots_at + (kSlots + i) * 8, S::consumers * 4 + weighers);
    }
    fence_barrier_init();
    if (p.k > 0) prefetch(&p.a), prefetch(&problem.whole_a), prefetch(&p.b);
  }
  cluster_sync_relaxed();
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Groups groups = find_groups<S>(p, reinterpret_cast<int *>(memory + S::table_at));

  const SpotSlots slots = {reinterpret_cast<Spot *>(memory + S::slots_at + kSlots * 16), shared + S::slots_at};
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, int(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    registers_down<40>();
    const int thread = int(threadIdx.x);
    if (thread == 0) produce<S>(problem, groups, slots, shared, rank);
    else if (thread >= kWarpgroup - kWeighers && problem.along_k)
      weigh<S>(problem, slots, shared, thread - (kWarpgroup - kWeighers));
  } else {
    registers_up<232>();
    Consumer<S>{problem, slots, {shared}, {shared}, warpgroup - 1}.run(shared);
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

pydet_status make_maps(const char *name, const ScaledGroupedGemm &g, int rows, ScaledGroupsProblem *problem) {
  EncodeTensorMap encode = nullptr;
  if (pydet_status status = find_encoder(name, &encode)) return status;
  const auto stride_of = [](int64_t stride, int64_t count) { return count == 1 ? kScaledUnit : stride; };
  MapShape a = {g.a.data, g.a.type,         g.k, g.tokens, stride_of(g.a.row_stride, g.tokens),
                kStageK,  kGroupedTokenBox, 2,   {},       {}};
  const MapShape b = {g.b.data,
                      g.b.type,
                      g.k,
                      g.n,
                      stride_of(g.b.col_stride, g.n),
                      kStageK,
                      64,
                      3,
                      {g.groups, 1, 1},
                      {stride_of(g.b_stride, g.groups), kScaledUnit, kScaledUnit}};
  if (pydet_status status = make_map(name, encode, a, &problem->groups.a)) return status;
  a.box_rows = rows;
  if (pydet_status status = make_map(name, encode, a, &problem->whole_a)) return status;
  return make_map(name, encode, b, &problem->groups.b);
}

template <class S> pydet_status launch_shape(const char *name, const ScaledGroupedGemm &g) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  ScaledGroupsProblem problem = {};
  GroupedProblem &p = problem.groups;
  if (g.k > 0)
    if (pydet_status status = make_maps(name, g, S::m, &problem)) return status;
  p.m = int(g.m), p.n = int(g.n), p.k = int(divide_up(g.k, kStageK));
  p.tokens = int(g.tokens);
  p.columns = int(divide_up(g.n, S::n));
  p.start = g.start, p.end = g.end;
  p.accumulate = g.accumulate;
  p.out_aligned = reinterpret_cast<uintptr_t>(g.out.data) % 16 == 0 &&
                  (g.m == 1 || g.out.row_stride * size_of(g.out.type) % 16 == 0);
  p.out_type = g.out.type, p.out = g.out.data, p.out_row_stride = g.out.row_stride;
  p.bias = g.bias.data, p.bias_type = g.bias.type;
  p.bias_stride = g.bias_stride, p.bias_column_stride = g.bias.col_stride;
  p.chunk = std::max(1, int(Chunk{g.k_chunk}.of_chain(g.k, kStageK)));
  const auto scale_of = [](const Scale &scale, int64_t group_stride) {
    return DeviceScale{scale.data, scale.type, scale.blocks, scale.stride, scale.chunk_stride, {group_stride}};
  };
  problem.a_scale = scale_of(g.a_scale, 0), problem.b_scale = scale_of(g.b_scale, g.b_scale_stride);
  problem.along_k = g.along_k;
  problem.chain_from_out = g.accumulate && g.k_chunk == 0 && g.k > 0;
  const int64_t jobs = (divide_up(g.m, 2 * S::m) + std::min(g.groups, g.m)) * p.columns;  // or fewer
  const int64_t clusters = std::min<int64_t>(sm90_clusters(g.device.id, kCluster), jobs);
  Launch shape = {name, gpu_stream(g.stream), dim3(unsigned(clusters * kCluster)), dim3(S::threads)};
  shape.shared_bytes = S::shared_bytes;
  shape.cluster = kCluster;
  shape.overlaps_previous = true;
  for (int64_t first = 0; first < g.groups; first += S::most_groups) {
    p.first_group = int(first), p.groups = int(std::min<int64_t>(g.groups - first, S::most_groups));
    if (pydet_status status = launch(shape, scaled_groups_kernel<S>, problem)) return status;
  }
  return PYDET_OK;
}

#if PYDET_SCALED_E5M2
}  // namespace

template <int rows, bool ahead, uint32_t results>
pydet_status scaled_groups_e5m2(const char *name, const ScaledGroupedGemm &g) {
  return with_type<kFp8Types>(g.a.type, [&](auto a) {
    return with_type<kFp8Types>(g.b.type, [&](auto b) {
      constexpr Type a_type = decltype(a)::value, b_type = decltype(b)::value;
      if constexpr (a_type == Type::e4m3 && b_type == Type::e4m3)
        return pydet_status(PYDET_OK);  // never: the other object's
      else return launch_shape<Shape<rows, ahead ? Way::ahead : Way::at_will, a_type, b_type, results>>(name, g);
    });
  });
}
template pydet_status scaled_groups_e5m2<128, false, bit(Type::f32)>(const char *, const ScaledGroupedGemm &);
template pydet_status scaled_groups_e5m2<128, false, kHalfTypes>(const char *, const ScaledGroupedGemm &);
template pydet_status scaled_groups_e5m2<64, true, kUnscaledTypes>(const char *, const ScaledGroupedGemm &);
template pydet_status scaled_groups_e5m2<64, false, kUnscaledTypes>(const char *, const ScaledGroupedGemm &);
#else
template <int rows, Way how, uint32_t results = kUnscaledTypes>
pydet_status launch_types(const char *name, const ScaledGroupedGemm &g) {
  if (g.a.type == Type::e4m3 && g.b.type == Type::e4m3)
    return launch_shape<Shape<rows, how, Type::e4m3, Type::e4m3, results>>(name, g);
  constexpr bool ahead = how == Way::ahead;
  return scaled_groups_e5m2<rows, ahead, results>(name, g);
}

bool b_aligned(const ScaledGroupedGemm &g) {
  const bool apart =
      g.groups == 1 || (g.b_stride % kScaledUnit == 0 && g.b_stride > 0 && g.b_stride < int64_t(1) << 38);
  return aligned(g.b, g.k, g.b.row_stride, g.n, g.b.col_stride) && (g.k == 0 || apart);
}
bool a_aligned(const ScaledGroupedGemm &g) { return aligned(g.a, g.k, g.a.col_stride, g.m, g.a.row_stride); }

bool fits(const ScaledGroupedGemm &g) {
  return g.groups <= kMostLaunches * kGroupedMostGroups && g.tokens <= kScaledMost && g.n <= kScaledMost &&
         g.k <= kScaledMost && (divide_up(g.tokens, 64) + g.groups) * divide_up(g.n, 64) <= kScaledMost;
}

// Says what cannot be read: after this kernel no other is tried.
pydet_status unreadable(const ScaledGroupedGemm &g) {
  if (!fits(g))
    return fail(PYDET_UNSUPPORTED, "scaled_grouped_gemm: more than %d groups, or an extent passes 2^30, on a GPU",
                kMostLaunches * kGroupedMostGroups);
  return fail(
      PYDET_UNSUPPORTED,
      "scaled_grouped_gemm: the tensor cores do not read %s, want its data and strides in multiples of %d bytes",
      a_aligned(g) ? "b" : "a", kScaledUnit);
}

}  // namespace

bool scaled_groups_takes(const ScaledGroupedGemm &g) { return fits(g) && a_aligned(g) && b_aligned(g); }
// A group that ends inside a tile of 256 rows wastes more of it: below so many tokens that costs what the tile gains.
bool scaled_groups_tall_prefers(const ScaledGroupedGemm &g) { return g.tokens >= 512 * g.groups; }
// fp32 has a kernel of its own, as in scaled_tiles.cu.
pydet_status scaled_groups_tall(const ScaledGroupedGemm &g) {
  const char *name = "cuda_scaled_grouped_gemm_sm90_256x128";
  return g.out.type == Type::f32 ? launch_types<128, Way::at_will, bit(Type::f32)>(name, g)
                                 : launch_types<128, Way::at_will, kHalfTypes>(name, g);
}
pydet_status scaled_groups_ahead(const ScaledGroupedGemm &g) {
  return launch_types<64, Way::ahead>("cuda_scaled_grouped_gemm_sm90_128x128_ahead", g);
}
pydet_status scaled_groups_any(const ScaledGroupedGemm &g) {
  if (!scaled_groups_takes(g)) return unreadable(g);
  return launch_types<64, Way::at_will>("cuda_scaled_grouped_gemm_sm90_128x128", g);
}
#endif

}  // namespace pydet
