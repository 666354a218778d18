// Attention, forward, on Hopper's tensor cores: out = softmax(q k^T) v for one tile of rows after another.
//
//   A block is persistent. One warp finds its jobs. One loads by TMA: a job's queries, and through one ring its blocks
//   of keys and of values, in the order in which they are multiplied: the scores of a block come before the values of
//   the block ahead of it. Warpgroups of 64 rows take turns on the tensor cores: in its turn one starts the scores of its
//   next block (q and k from shared memory) and the product of the last one's weights, which are in its registers, with
//   their values. While another has its turn it makes weights of the scores. All of a block's jobs are one such loop: the
//   first scores of a job lie beside the last values of the one before. Keys longer than a segment: o is folded into
//   O, which lies in shared memory, or for d = 256 in the L2, each element where the thread that has it finds it
//   again. Measured: bench/README.md.
//
// The order of every sum is NUMERICS.md's, "Attention".

#include "contract/elementary.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/kv.h"
#include "gpu/nvidia/sm90/attention/tile_out.h"
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

// ---- The warp that finds jobs ------------------------------------------------------------------------------------

// The next one while the warp that loads has loads of the last to wait for; of one count no earlier than it comes near the
// end of that.
template <class S> __device__ __forceinline__ void find_jobs(const AttentionPlan &p, const Layout<S> &at) {
  const AttentionSlots<S> slots = at.slots();
  Walk<S::n, S::sharers> walk(p);
  Numbers<S::sharers> numbers(p);
  Job job;
  int turn = 0;
  for (; walk.find(numbers.now(), &job); numbers.take(), ++turn) {
    slots.put(turn, job);
    if (elected())
      for (int i = 0; i < S::warpgroups; ++i) ask_for_queries<S>(p, job, i);
    if (p.taken) barrier_wait(at.late(), turn & 1);
    numbers.ask();
  }
  job = {};
  slots.put(turn, job);
}

// ---- The warp that loads -----------------------------------------------------------------------------------------

template <class S> __device__ __forceinline__ void load_jobs(const AttentionPlan &p, const Layout<S> &at) {
  const AttentionSlots<S> slots = at.slots();
  const bool one = threadIdx.x % 32 == 0;
  RingPlace<S::stages> ring;
  Boxes values = {};  // of the block ahead
  int values_group = -1;
  const auto load = [&](const CUtensorMap *map, bool sequence_moves, bool group_moves, const Boxes &boxes, int group) {
    barrier_wait(at.empty(ring.stage), ring.parity ^ 1);
    load_block<S>(p, map, sequence_moves, group_moves, boxes, group, at.stage(ring.stage), at.full(ring.stage));
    ring.next();
  };
  const auto load_values = [&] { load(&p.v, p.sequence_moves_v, p.group_moves_v, values, values_group); };
  for (int turn = 0;; ++turn) {
    slots.wait(turn);
    const Job job = slots.look(turn);
    slots.give_back(turn);
    if (!job.end) break;
    const int group = job.head / p.group_heads, late = max(job.begin, job.end - 2);
    for (int block = job.begin; block < job.end; ++block) {
      if (p.taken && block == late && one) barrier_arrive(at.late());
      const Boxes boxes = boxes_of<S>(p, job, block);
      load(&p.k, p.sequence_moves_k, p.group_moves_k, boxes, group);
      if (values_group >= 0) load_values();
      if (block == job.begin) {
#pragma unroll 1
        for (int i = 0; i < S::warpgroups; ++i) {
          barrier_wait(at.q_empty(i), (turn & 1) ^ 1);
          if (one) load_queries<S>(p, job, i, at.q(i), at.q_full(i));
        }
      }
      values = boxes, values_group = group;
    }
  }
  if (values_group >= 0) load_values();
}

// Of a block's scores or weights all, or those of the lower half of its keys, where a warpgroup's rows see none above.
template <bool lower, class T, int extent> __device__ __forceinline__ auto &part_of(T (&all)[extent]) {
  if constexpr (lower) return reinterpret_cast<T(&)[extent / 2]>(all);
  else return all;
}
using Whole = std::false_type;
using Lower = std::true_type;

// ---- The warpgroups that multiply --------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ void multiply_jobs(const AttentionPlan &p, const Layout<S> &at, int warpgroup) {
  const AttentionSlots<S> slots = at.slots();
  const bool first_lane = threadIdx.x % 32 == 0;
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
  bool lower = false;        // of the lower half of its keys alone
  bool first_values = true;  // which are the first of a segment
  bool finite = true;        // so far, all results of this warp
  bool closing = false;      // and o holds the segment before it, which joins O when o is wanted
  Fold<S> fold;
  // At d = 256 the host chooses between turns and a fold at once, and neither.
  const bool turns = S::turns && !(S::through && Fold<S>::waits && p.folds_later);
  const bool through = S::through && (!Fold<S>::waits || p.folds_later);

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
    if (turns) named_sync(1 + warpgroup, 2 * kWarpgroup);
  };
  const auto your_turn = [&] {
    if (turns) named_arrive(1 + (warpgroup == S::warpgroups - 1 ? 0 : warpgroup + 1), 2 * kWarpgroup);
  };
  const auto release = [&](uint32_t barrier) {
    if (first_lane) barrier_arrive(barrier);
  };
  const auto release_stage = [&](int stage) {
    release(at.empty(stage));
    if constexpr (S::sharers > 1)
      if (first_lane) barrier_arrive(at.empty(stage), int(blockIdx.x) % 2 ^ 1);
  };
  const auto scores = [&](int stage, auto of) {
    const uint64_t q = wgmma_descriptor<true>(at.q(warpgroup)), k = wgmma_descriptor<true>(at.stage(stage));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::d / kStep; ++i)
      wgmma<S::type, true, true>(part_of<decltype(of)::value>(s),
                                 q + ((i / 4 * S::q_box_bytes + i % 4 * kStep * 2) >> 4),
                                 k + ((i / 4 * S::box_bytes + i % 4 * kStep * 2) >> 4), i > 0);
    wgmma_commit();
  };
  const auto products = [&](int stage, bool of_lower) {
    const uint64_t v = wgmma_descriptor<false, 64, S::n>(at.stage(stage));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::n / kStep; ++i) {
      if (S::halves && i == S::n / kStep / 2 && of_lower) break;
      wgmma_from_registers<S::type, false>(o, weights[i], v + (i * kStep * kRowBytes >> 4), i > 0 || !first_values);
    }
    wgmma_commit();
  };
  // For the products, whose sums are then worth less if a reference has moved. A wait in either branch, and each worded
  // in its own way: ptxas moves a wait, but not across a branch, to before the weights that are made beside the
  // products.
  const auto wait_and_rescale = [&](bool moved, const Step &step) {
    if (__any_sync(0xFFFFFFFFu, moved)) {
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < S::d / 2; ++i) o[i] = o[i] * step.worth[i / 2 % 2];
    } else {
      asm volatile("wgmma.wait_group.sync.aligned 0;  // nothing moved" ::: "memory");
    }
  };
  // The segment behind joins the totals of its rows, and later o joins O.
  const auto total = [&] {
    fold.finish(p, at);
    SharedTotals<S>{at.base}.join(sums);
  };
  const auto close = [&] { fold.template put<true>(p, at, o); };
  take_job();
  if (turns && warpgroup == S::warpgroups - 1) named_arrive(1, 2 * kWarpgroup);
  while (more || behind) {
    // Blocks that all rows see: most of them.
    if (weighted && !lower && !fresh && block * S::n >= sight.whole_begin) {
      const int most = min(sight.whole_end / S::n, sight.end - 1), plain_end = through ? most : min(most, next_segment);
#pragma unroll 1
      for (; block < plain_end; ++block) {
        RingPlace<S::stages> values = ring;
        values.next();
        const bool begins = S::through && block == next_segment;
        barrier_wait(at.full(ring.stage), ring.parity);
        if (!S::late_values) barrier_wait(at.full(values.stage), values.parity);
        my_turn();
        scores(ring.stage, Whole());
        const bool closed = S::through && closing;
        if (closed) {
          your_turn();
          close();
        }
        if (S::late_values) barrier_wait(at.full(values.stage), values.parity);
        products(values.stage, false);
        if (!closed) your_turn();
        if (begins) fold.finish(p, at, fold.fours - fold.ahead);
        const typename Fold<S>::Share share = fold.ask(p, at);
        if (begins) {
          SharedTotals<S>{at.base}.join(sums);
          sums.clear();
          next_segment += p.segment_blocks;
        }
        wgmma_wait<1>();
        release_stage(ring.stage);
        Step step;
        const bool moved = move_references(s, sums.m, p.c, step);
        if constexpr (S::ahead == 8) {
          // Sums between exponentials that are some way ahead of them. They are never negative, which ptxas does not
          // know, so it makes them before the branch too.
          scale_sums(sums.l, step);
          weigh_scores<0, 4>(s, p.c, step);
          sum_weights<0, 3>(s, sums.l);
          weigh_scores<4, 6>(s, p.c, step);
          sum_weights<3, 5>(s, sums.l);
          weigh_scores<6, 8>(s, p.c, step);
          sum_weights<5, 7>(s, sums.l);
          const bool negative = sums.l[0][0] < 0 || sums.l[0][1] < 0 || sums.l[1][0] < 0 || sums.l[1][1] < 0;
          wait_and_rescale((moved && !begins) || negative, step);
          release_stage(values.stage);
          sum_weights<7, 8>(s, sums.l);
          round_weights<S::type>(s, weights);
        } else {
          weigh_scores<0, S::ahead>(s, p.c, step);
          wait_and_rescale(moved && !begins, step);
          release_stage(values.stage);
          scale_sums(sums.l, step);
          weigh_scores<S::ahead, 8>(s, p.c, step);
          add_weights<S::type>(s, sums.l, weights);
        }
        fold.fold(p, at, share);
        first_values = closing = begins;
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
    if (behind && !(S::late_values && live && weighted)) barrier_wait(at.full(values.stage), values.parity);

    bool moved = false, masked = false;
    Step step;
    const bool past_lower = S::halves && same_in_warp(lower);  // the shuffle tells ptxas that the warp has one
    lower = false;
    if (live && (block * S::n < sight.whole_begin || (block + 1) * S::n > sight.whole_end)) {
      masked = true;
      if (S::halves && p.halves) lower = last_in_sight(p, slots.look(turn), warpgroup) < block * S::n + S::n / 2;
    }
    if (S::halves) lower = same_in_warp(lower);
    const auto softmax = [&](auto of) {
      auto &mine = part_of<decltype(of)::value>(s);
      release_stage(ring.stage);
      if (block + 1 == sight.end) release(at.q_empty(warpgroup));
      if (masked) {
        const Job job = slots.look(turn);
        const int thread = thread_number();
        mask_scores(p, job, mine, job.query + warpgroup * p.warpgroup_queries, row_of(thread),
                    block * S::n + thread % 4 * 2);
      }
      if (begins) sums.clear();
      moved = move_references(mine, sums.m, p.c, step);
      weigh_scores<0, 8>(mine, p.c, step);
    };
    const auto scores_beside_products = [&](auto of) {
      scores(ring.stage, of);
      const bool early = S::d == 64 || (S::through && closing);
      if (early) your_turn();
      if (S::through && closing) close();
      if (S::late_values) barrier_wait(at.full(values.stage), values.parity);
      products(values.stage, past_lower);
      if (!early) your_turn();
      if (closes) total();
      wgmma_wait<1>();
      softmax(of);
      wait_and_rescale(moved && !closes, step);
    };
    my_turn();
    if (live && weighted) {
      if (S::halves && lower) scores_beside_products(Lower());
      else scores_beside_products(Whole());
    } else if (live) {
      lower = false;
      scores(ring.stage, Whole());
      your_turn();
      wgmma_wait<0>();
      softmax(Whole());
    } else {
      if (weighted) {
        if (S::through && closing) close();
        products(values.stage, past_lower);
        your_turn();
        total();
        wgmma_wait<0>();
      } else {
        your_turn();
      }
      if (more) release_stage(ring.stage);
    }
    if (behind) release_stage(values.stage);
    closing = through && closes && live && !fresh;
    if (closes && live && !fresh) {
      if (!through) fold.template put<false>(p, at, o);
    } else if (closes) {
      fold.end(p, at, o);
      finite &= store_tile(p, at, slots.look(turn_of_weights), warpgroup, o, SharedTotals<S>{at.base}.load());
      slots.give_back(turn_of_weights);
    }
    if (live) {
      if (fresh) {
        Totals totals;
        totals.clear();
        SharedTotals<S>{at.base}.store(totals);
      }
      scale_sums(sums.l, step);
      if (S::halves && lower) add_weights<S::type>(part_of<true>(s), sums.l, part_of<true>(weights));
      else add_weights<S::type>(s, sums.l, weights);
      turn_of_weights = turn, fresh = false, first_values = begins;
    }
    weighted = live;

    ring = values;
    if (behind) ring.next();
    behind = more;
    if (block == next_segment) next_segment += p.segment_blocks;
    if (more && ++block == end) ++turn, take_job();
  }
  if (turns && warpgroup == 0) named_sync(1, 2 * kWarpgroup);
  if (!finite) repair_rows<S>(p, thread_number() / 32);
}

template <class S>
__global__ void __launch_bounds__(S::threads, 1) attention_forward(const __grid_constant__ AttentionPlan p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Layout<S> at = {shared_address(memory)};
  const int warp = same_in_warp(int(threadIdx.x) / 32);
  if (threadIdx.x == S::consumer_warps * 32) {
    for (int i = 0; i < S::warpgroups; ++i) barrier_init(at.q_full(i), 1), barrier_init(at.q_empty(i), 4);
    for (int i = 0; i < S::stages; ++i)
      barrier_init(at.full(i), 1), barrier_init(at.empty(i), S::consumer_warps * S::sharers);
    at.slots().init();
    barrier_init(at.late(), 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (S::sharers > 1) cluster_sync_relaxed();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (warp >= S::consumer_warps) {
    if constexpr (S::moves_registers) registers_down<S::producer_registers>();
    if (warp == S::consumer_warps) load_jobs<S>(p, at);
    if (warp == S::consumer_warps + 1) find_jobs<S>(p, at);
  } else {
    if constexpr (S::moves_registers) registers_up<S::consumer_registers>();
    multiply_jobs<S>(p, at, warp / 4);
  }
  if (S::sharers > 1) {
    __syncwarp();
    cluster_sync_relaxed();  // before this block's memory is gone
  }
}

template <class S> pydet_status launch_shape(const Launch &launch, const AttentionPlan &plan) {
  Launch shape = launch;
  shape.block = dim3(S::threads);
  shape.cluster = S::sharers;
  shape.shared_bytes = S::shared_bytes;
  return pydet::launch(shape, attention_forward<S>, plan);
}

}  // namespace

#ifndef PYDET_ATTENTION_TYPE
#error "one object a type: 1 bf16, 2 fp16"
#endif
// Calls f with the shape that the plan asks for.
template <Type type, class F> pydet_status with_shape(const AttentionPlan &plan, bool wide, const F &f) {
  const auto sized = [&](auto constant) {
    constexpr int d = decltype(constant)::value;
    if (!wide) return f(AttentionTile<type, d, false>());
    if constexpr (d > 64)
      if (plan.sharers == 2)
        return plan.one_segment ? f(AttentionTileOfOne<type, d, 2>()) : f(AttentionTile<type, d, true, 2>());
    return plan.one_segment ? f(AttentionTileOfOne<type, d>()) : f(AttentionTile<type, d, true>());
  };
  return plan.d <= 64    ? sized(std::integral_constant<int, 64>())
         : plan.d <= 128 ? sized(std::integral_constant<int, 128>())
                         : sized(std::integral_constant<int, 256>());
}

template <Type type> pydet_status attention_load_sm90(const char *name, const AttentionPlan &plan, bool wide) {
  return with_shape<type>(plan, wide, [&](auto shape) {
    using S = decltype(shape);
    return load(name, attention_forward<S>, S::shared_bytes);
  });
}
template <Type type>
pydet_status attention_forward_sm90(const Launch &launch, const AttentionPlan &plan, bool wide) {
  return with_shape<type>(plan, wide, [&](auto shape) { return launch_shape<decltype(shape)>(launch, plan); });
}

template pydet_status attention_load_sm90<Type(PYDET_ATTENTION_TYPE)>(const char *, const AttentionPlan &, bool);
template pydet_status attention_forward_sm90<Type(PYDET_ATTENTION_TYPE)>(const Launch &, const AttentionPlan &, bool);

}  // namespace pydet
