// Attention, forward, on Hopper's tensor cores: out = softmax(q k^T) v for one tile of rows after another.
//
//   A block is persistent. One warp loads by TMA: a job's queries, and through one ring its blocks of keys and of values, in
//   the order in which they are multiplied: the scores of a block come before the values of the block ahead of it.
//   Warpgroups of 64 rows take turns on the tensor cores: in its turn one starts the scores of its next block (q and k from
//   shared memory) and the product of the last one's weights, which are in its registers, with their values. While another
//   has its turn it makes weights of the scores. All of a block's jobs are one such loop: the first scores of a job lie
//   beside the last values of the one before.
//   Keys longer than a segment: o is folded into O, which lies in shared memory, or for d = 256 in the L2, each element where
//   the thread that has it finds it again.
//   Measured: bench/README.md.
//
// The order of every sum is NUMERICS.md's, "Attention".

#include "elementary.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/kv.h"
#include "gpu/nvidia/sm90/attention/row.h"
#include "gpu/nvidia/sm90/pipe/out.h"
#include "gpu/nvidia/sm90/pipe/wgmma.h"

namespace pydet {
namespace {

__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A place in the ring.
template <int stages> struct RingPlace {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

template <class S> struct Layout {
  uint32_t base;
  __device__ __forceinline__ uint32_t q(int warpgroup) const { return base + S::q_at + warpgroup * S::q_bytes; }
  __device__ __forceinline__ uint32_t stage(int i) const { return base + S::ring_at + i * S::stage_bytes; }
  __device__ __forceinline__ uint32_t q_full(int warpgroup) const { return base + S::q_full_at + warpgroup * 8; }
  __device__ __forceinline__ uint32_t q_empty(int warpgroup) const { return base + S::q_empty_at + warpgroup * 8; }
  __device__ __forceinline__ uint32_t full(int i) const { return base + S::full_at + i * 8; }
  __device__ __forceinline__ uint32_t empty(int i) const { return base + S::empty_at + i * 8; }
  __device__ __forceinline__ AttentionSlots<S> slots() const {
    return {base + S::slots_at, base + S::slot_full_at, base + S::slot_empty_at};
  }
};

// ---- The warp that loads -----------------------------------------------------------------------------------------

template <class S> __device__ __forceinline__ void load_jobs(const AttentionPlan &p, const Layout<S> &at) {
  const AttentionSlots<S> slots = at.slots();
  const bool one = threadIdx.x % 32 == 0;
  RingPlace<S::stages> ring;
  Walk<S::n> walk(p);
  Job job;
  Boxes values = {};  // of the block ahead
  int values_group = -1, turn = 0;
  const auto load = [&](const CUtensorMap *map, bool sequence_moves, bool group_moves, const Boxes &boxes, int group) {
    barrier_wait(at.empty(ring.stage), ring.parity ^ 1);
    load_block<S>(p, map, sequence_moves, group_moves, boxes, group, at.stage(ring.stage), at.full(ring.stage));
    ring.next();
  };
  const auto load_values = [&] { load(&p.v, p.sequence_moves_v, p.group_moves_v, values, values_group); };
  for (; walk.next(&job); ++turn) {
    slots.put(turn, job);
    const int group = job.head / p.group_heads;
    for (int block = job.begin; block < job.end; ++block) {
      const Boxes boxes = boxes_of<S>(p, job, block);
      load(&p.k, p.sequence_moves_k, p.group_moves_k, boxes, group);
      if (block == job.begin) {
#pragma unroll 1
        for (int i = 0; i < S::warpgroups; ++i) {
          barrier_wait(at.q_empty(i), (turn & 1) ^ 1);
          if (one) load_queries<S>(p, job, i, at.q(i), at.q_full(i));
        }
      }
      if (values_group >= 0) load_values();
      values = boxes, values_group = group;
    }
  }
  if (values_group >= 0) load_values();
  job = {};
  slots.put(turn, job);
}

// ---- The warpgroups that multiply --------------------------------------------------------------------------------

// Of the warpgroups that multiply. Asked for again where it is seldom wanted: else what can be worked out from it is kept in
// registers through the loop over blocks.
__device__ __forceinline__ int thread_number() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
// The first of a thread's two rows of its warpgroup.
__device__ __forceinline__ int row_of(int thread) { return thread % kWarpgroup / 32 * kWarpRows + thread % 32 / 4; }

// O of the segments so far: a thread's own elements, four at a time.
template <class S> struct RunningO {
  uint32_t shared;
  float4 *global;
  __device__ __forceinline__ RunningO(const AttentionPlan &p, const Layout<S> &at) {
    const int thread = thread_number(), warp = thread / 32, lane = thread % 32;
    shared = at.base + S::out_at + warp * S::out_warp_bytes + lane * 16;
    global = reinterpret_cast<float4 *>(p.running) +
             (int64_t(blockIdx.x) * S::consumer_warps + warp) * (S::running_bytes / 4 / 16) + lane;
  }
  __device__ __forceinline__ float4 load(int i) const {
    if (i >= S::held) return __ldcg(global + i * 32);
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(shared + i * 512)
                 : "memory");
    return x;
  }
  __device__ __forceinline__ void store(int i, const float4 &x) const {
    if (i >= S::held) __stcg(global + i * 32, x);
    else
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared + i * 512), "f"(x.x), "f"(x.y), "f"(x.z),
                   "f"(x.w)
                   : "memory");
  }
};

// The totals of a thread's two rows, which are seldom looked at; the four lanes of a row have the same.
template <class S> struct SharedTotals {
  uint32_t base;
  __device__ __forceinline__ uint32_t address(int thread) const {
    return base + S::totals_at + (thread / kWarpgroup * kAttentionWarpgroupRows + row_of(thread)) * 8;
  }
  __device__ __forceinline__ Totals load() const {
    const uint32_t shared = address(thread_number());
    Totals x;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.m[h]), "=f"(x.l[h]) : "r"(shared + h * 64) : "memory");
    return x;
  }
  __device__ __forceinline__ void store(const Totals &x) const {
    __syncwarp();  // the lanes beside have read what was there
    const int thread = thread_number();
    if (thread % 4 == 0) {
      const uint32_t shared = address(thread);
#pragma unroll
      for (int h = 0; h < 2; ++h) store_pair(shared + h * 64, x.m[h], x.l[h]);
    }
    __syncwarp();
  }
};

// The tile's results, or what its segment leaves to combine.cu. False: one of them is not finite.
template <class S>
__device__ __forceinline__ bool store_tile(const AttentionPlan &p, const Layout<S> &at, const Job &job, int warpgroup,
                                           float (&o)[S::d / 2], const Totals &totals) {
  const int thread = thread_number(), lane = thread % 32, warp = thread / 32, first = warp % 4 * kWarpRows;
  const int first_query = job.query + warpgroup * p.warpgroup_queries;
  const auto has = [&](const RowPlace &at_row) {
    return at_row.query < p.warpgroup_queries && first_query + at_row.query < job.queries;
  };
  if (p.split) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowPlace at_row = row_place(p, first + lane / 4 + 8 * h);
      if (!has(at_row)) continue;
      const int64_t part =
          part_of(p, job.segment, job.sequence, job.q_first + first_query + at_row.query, job.head + at_row.head);
      if (lane % 4 == 0) *reinterpret_cast<float2 *>(p.parts + 2 * part) = make_float2(totals.m[h], totals.l[h]);
      float *to = p.part_o + part * p.e + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < S::d / 8; ++i)
        if (i * 8 < p.e) *reinterpret_cast<float2 *>(to + i * 8) = make_float2(o[4 * i + 2 * h], o[4 * i + 2 * h + 1]);
    }
    return true;
  }
  float zero = 0;  // times what is finite
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool none = totals.m[h] == -INFINITY;
    const float reciprocal = none ? 0.0f : __frcp_rn(totals.l[h]);
#pragma unroll
    for (int i = 0; i < S::d / 8; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float &x = o[4 * i + 2 * h + e];
        x = none ? 0.0f : weighed(x, reciprocal);
        zero = fmaf(x, 0.0f, zero);
      }
    const RowPlace at_row = row_place(p, first + lane / 4 + 8 * h);
    if (p.lse.data && lane % 4 == 0 && has(at_row))
      reinterpret_cast<float *>(
          p.lse.data)[job.sequence * p.lse.sequence_stride + (job.head + at_row.head) * p.lse.head_stride +
                      (job.q_first + first_query + at_row.query) * p.lse.token_stride] =
          none ? -INFINITY : canonical(log_sum_exp({totals.m[h], totals.l[h]}));
  }
  const uint32_t piece = at.base + S::out_at + warp * S::out_warp_bytes;
#pragma unroll
  for (int chunk = 0; chunk < S::chunks; ++chunk) {
    __syncwarp();  // the piece, or O that lay there, has been read
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t fragments[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int i = (chunk * 8 + 2 * j + k / 2) * 4 + k % 2 * 2;
        fragments[k] = rounded_pair<S::type>(o[i], o[i + 1]);
      }
      const int row = lane % 16;
      store_matrices(piece + row * kRowBytes + ((2 * j + lane / 16) ^ (row % 8)) * 16, fragments);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * i + lane / 8;
      const RowPlace at_row = row_place(p, first + row);
      uint4 x;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "r"(piece + row * kRowBytes + ((lane % 8) ^ (row % 8)) * 16)
                   : "memory");
      const int column = chunk * kBlockK + lane % 8 * 8;
      if (has(at_row) && column < p.e)
        *reinterpret_cast<uint4 *>(
            p.out.data + 2 * (job.sequence * p.out.sequence_stride + (job.head + at_row.head) * p.out.head_stride +
                              (job.q_first + first_query + at_row.query) * p.out.token_stride + column)) = x;
    }
  }
  return __all_sync(0xFFFFFFFFu, zero == 0.0f);
}

// Once all jobs are done: a warp's rows that are not finite, again.
template <class S> __device__ __forceinline__ void repair_rows(const AttentionPlan &p, int warp) {
  Walk<S::n> walk(p);
  Job job;
  while (walk.next(&job)) {
    const Lengths x = {job.queries, job.keys, job.q_first, job.k_first};
    for (int row = 0; row < kWarpRows; ++row) {
      const RowPlace at_row = row_place(p, warp % 4 * kWarpRows + row);
      const int query = job.query + warp / 4 * p.warpgroup_queries + at_row.query, head = job.head + at_row.head;
      if (at_row.query < p.warpgroup_queries && query < job.queries &&
          !row_is_finite<S::type>(p, result_at(p, job.sequence, job.q_first + query, head)))
        compute_row<S::type, S::n>(p, x, job.sequence, query, head);
    }
  }
}

template <class S>
__device__ __forceinline__ void multiply_jobs(const AttentionPlan &p, const Layout<S> &at, int warpgroup) {
  const AttentionSlots<S> slots = at.slots();
  const bool first_lane = threadIdx.x % 32 == 0;
  const SharedTotals<S> totals_so_far = {at.base};
  RingPlace<S::stages> ring;
  float o[S::d / 2], s[S::n / 2];
  uint32_t weights[S::n / 16][4];
  RowSums sums;
  Sight sight;
  int turn = 0, turn_of_weights = 0, block = 0, end = 0, next_segment = 0;
  bool more = false;         // a block of keys comes next
  bool fresh = true;         // and it is this warpgroup's first of its job
  bool behind = false;       // a block's values come next
  bool weighted = false;     // and this warpgroup has weights for them
  bool first_values = true;  // which are the first of a segment
  bool runs = false;         // O has segments
  bool finite = true;        // so far, all results of this warp

  const auto take_job = [&] {
    slots.wait(turn);
    const Job job = slots.look(turn);
    end = same_in_warp(job.end), more = end > 0;
    if (!more) return;
    block = same_in_warp(job.begin), fresh = true;
    next_segment = same_in_warp((job.begin / p.segment_blocks + 1) * p.segment_blocks);
    const Sight seen = sight_of<S>(p, job, warpgroup);
    sight = {same_in_warp(seen.begin), same_in_warp(seen.end), same_in_warp(seen.whole_begin),
             same_in_warp(seen.whole_end)};
  };
  const auto my_turn = [&] {
    if constexpr (S::warpgroups > 1) named_sync(1 + warpgroup, 2 * kWarpgroup);
  };
  const auto your_turn = [&] {
    if constexpr (S::warpgroups > 1)
      named_arrive(1 + (warpgroup == S::warpgroups - 1 ? 0 : warpgroup + 1), 2 * kWarpgroup);
  };
  const auto release = [&](uint32_t barrier) {
    if (first_lane) barrier_arrive(barrier);
  };
  const auto scores = [&](int stage) {
    const uint64_t q = wgmma_descriptor<true>(at.q(warpgroup)), k = wgmma_descriptor<true>(at.stage(stage));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::d / kStep; ++i)
      wgmma<S::type, true, true>(s, q + ((i / 4 * S::q_box_bytes + i % 4 * kStep * 2) >> 4),
                                 k + ((i / 4 * S::box_bytes + i % 4 * kStep * 2) >> 4), i > 0);
    wgmma_commit();
  };
  const auto products = [&](int stage) {
    const uint64_t v = wgmma_descriptor<false, 64, S::n>(at.stage(stage));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::n / kStep; ++i)
      wgmma_from_registers<S::type, false>(o, weights[i], v + (i * kStep * kRowBytes >> 4), i > 0 || !first_values);
    wgmma_commit();
  };
  // For the products, whose sums are then worth a[h] if any reference has moved. A wait in either branch, and each worded
  // in its own way: ptxas moves a wait, but not across a branch, to before the weights that are made beside the products.
  const auto wait_and_rescale = [&](bool moved, const Step &step) {
    if (__any_sync(0xFFFFFFFFu, moved)) {
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < S::d / 2; ++i) o[i] = o[i] * step.worth[i / 2 % 2];
    } else {
      asm volatile("wgmma.wait_group.sync.aligned 0;  // nothing moved" ::: "memory");
    }
  };
  take_job();
  if (S::warpgroups > 1 && warpgroup == S::warpgroups - 1) named_arrive(1, 2 * kWarpgroup);
  while (more || behind) {
    // Blocks that all rows see, between others of the same segment: most of them.
    if (weighted && !fresh && block * S::n >= sight.whole_begin) {
      const int plain_end = min(min(sight.whole_end / S::n, sight.end - 1), next_segment);
#pragma unroll 1
      for (; block < plain_end; ++block) {
        RingPlace<S::stages> values = ring;
        values.next();
        barrier_wait(at.full(ring.stage), ring.parity);
        barrier_wait(at.full(values.stage), values.parity);
        my_turn();
        scores(ring.stage);
        products(values.stage);
        your_turn();
        wgmma_wait<1>();
        release(at.empty(ring.stage));
        Step step;
        const bool moved = move_references(s, sums.m, p.c, step);
        weigh_scores<0, S::ahead>(s, p.c, step);
        wait_and_rescale(moved, step);
        release(at.empty(values.stage));
        scale_sums(sums.l, step);
        weigh_scores<S::ahead, 8>(s, p.c, step);
        add_weights<S::type, 0, 8>(s, sums.l, weights);
        first_values = false;
        ring = values;
        ring.next();
      }
    }

    const bool live = more && block >= sight.begin && block < sight.end;
    const bool begins = fresh || block == next_segment, closes = weighted && (!live || begins);
    RingPlace<S::stages> values = ring;
    if (more) {
      values.next();
      if (live && fresh) barrier_wait(at.q_full(warpgroup), turn & 1);
      barrier_wait(at.full(ring.stage), ring.parity);
    }
    if (behind) barrier_wait(at.full(values.stage), values.parity);
    float past[2], now[2];  // what O, and the segment behind, are worth
    const bool folds = runs;
    if (closes) {
      Totals totals = totals_so_far.load();
      weigh(totals, sums, past, now);
      totals_so_far.store(totals);
    }

    bool moved = false;
    Step step;
    const auto softmax = [&] {
      release(at.empty(ring.stage));
      if (block + 1 == sight.end) release(at.q_empty(warpgroup));
      if (block * S::n < sight.whole_begin || (block + 1) * S::n > sight.whole_end) {
        const Job job = slots.look(turn);
        const int thread = thread_number();
        mask_scores(p, job, s, job.query + warpgroup * p.warpgroup_queries, row_of(thread),
                    block * S::n + thread % 4 * 2);
      }
      if (begins) sums.clear();
      moved = move_references(s, sums.m, p.c, step);
      weigh_scores<0, 8>(s, p.c, step);
    };
    my_turn();
    if (live && weighted) {
      scores(ring.stage);
      products(values.stage);
      your_turn();
      wgmma_wait<1>();
      softmax();
      wait_and_rescale(moved && !closes, step);
    } else if (live) {
      scores(ring.stage);
      your_turn();
      wgmma_wait<0>();
      softmax();
    } else {
      if (weighted) {
        products(values.stage);
        your_turn();
        wgmma_wait<0>();
      } else {
        your_turn();
      }
      if (more) release(at.empty(ring.stage));
    }
    if (behind) release(at.empty(values.stage));
    if (closes) {
      const RunningO<S> running(p, at);
      if (folds) {
#pragma unroll
        for (int i = 0; i < S::d / 8; ++i) {
          const float4 x = running.load(i);
          o[4 * i] = x.x * past[0] + o[4 * i] * now[0];
          o[4 * i + 1] = x.y * past[0] + o[4 * i + 1] * now[0];
          o[4 * i + 2] = x.z * past[1] + o[4 * i + 2] * now[1];
          o[4 * i + 3] = x.w * past[1] + o[4 * i + 3] * now[1];
        }
      }
      if (!live || fresh) {
        finite &= store_tile(p, at, slots.look(turn_of_weights), warpgroup, o, totals_so_far.load());
        slots.give_back(turn_of_weights);
        runs = false;
      } else {
#pragma unroll
        for (int i = 0; i < S::d / 8; ++i)
          running.store(i, make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]));
        runs = true;
      }
    }
    if (live) {
      if (fresh) {
        Totals totals;
        totals.clear();
        totals_so_far.store(totals);
      }
      scale_sums(sums.l, step);
      add_weights<S::type, 0, 8>(s, sums.l, weights);
      turn_of_weights = turn, fresh = false, first_values = begins;
    }
    weighted = live;

    ring = values;
    if (behind) ring.next();
    behind = more;
    if (block == next_segment) next_segment += p.segment_blocks;
    if (more && ++block == end) ++turn, take_job();
  }
  if (S::warpgroups > 1 && warpgroup == 0) named_sync(1, 2 * kWarpgroup);
  if (!finite) repair_rows<S>(p, thread_number() / 32);
}

template <class S>
__global__ void __launch_bounds__(S::threads, 1) attention_forward(const __grid_constant__ AttentionPlan p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Layout<S> at = {shared_address(memory)};
  const int warp = same_in_warp(int(threadIdx.x) / 32);
  if (threadIdx.x == S::consumer_warps * 32) {
    for (int i = 0; i < S::warpgroups; ++i) barrier_init(at.q_full(i), 1), barrier_init(at.q_empty(i), 4);
    for (int i = 0; i < S::stages; ++i) barrier_init(at.full(i), 1), barrier_init(at.empty(i), S::consumer_warps);
    at.slots().init();
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (warp >= S::consumer_warps) {
    if constexpr (S::moves_registers) registers_down<S::producer_registers>();
    if (warp == S::consumer_warps) load_jobs<S>(p, at);
  } else {
    if constexpr (S::moves_registers) registers_up<S::consumer_registers>();
    multiply_jobs<S>(p, at, warp / 4);
  }
}

template <class S> pydet_status launch_shape(const Launch &launch, const AttentionPlan &plan) {
  Launch shape = launch;
  shape.block = dim3(S::threads);
  shape.shared_bytes = S::shared_bytes;
  return pydet::launch(shape, attention_forward<S>, plan);
}

}  // namespace

#ifndef PYDET_ATTENTION_TYPE
#error "one object a type: 1 bf16, 2 fp16"
#endif
template <Type type>
pydet_status attention_forward_sm90(const Launch &launch, const AttentionPlan &plan, bool wide) {
  const auto sized = [&](auto constant) {
    constexpr int d = decltype(constant)::value;
    return wide ? launch_shape<AttentionTile<type, d, true>>(launch, plan)
                : launch_shape<AttentionTile<type, d, false>>(launch, plan);
  };
  return plan.d <= 64    ? sized(std::integral_constant<int, 64>())
         : plan.d <= 128 ? sized(std::integral_constant<int, 128>())
                         : sized(std::integral_constant<int, 256>());
}

template pydet_status attention_forward_sm90<Type(PYDET_ATTENTION_TYPE)>(const Launch &, const AttentionPlan &, bool);

}  // namespace pydet
