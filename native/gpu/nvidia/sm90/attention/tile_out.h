// What a warpgroup of attention keeps of a tile beside its registers, and how its results come to memory.
#pragma once

#include "gpu/nvidia/sm90/attention/row.h"
#include "gpu/nvidia/sm90/pipe/out.h"

namespace pydet {
namespace {

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
  // A segment's o that waits to be folded.
  __device__ __forceinline__ float4 *waiting(int i) const {
    return global + kRunningBytes / 16 * kRunningBlocks + i * 32;
  }
};

// What O and a segment's o are worth beside each other, of a thread's two rows.
struct Worth {
  float past[2], now[2];
  __device__ __forceinline__ float4 folded(const float4 &all, const float4 &o) const {
    return {all.x * past[0] + o.x * now[0], all.y * past[0] + o.y * now[0], all.z * past[1] + o.z * now[1],
            all.w * past[1] + o.w * now[1]};
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
    const uint32_t shared = address(thread_number());
#pragma unroll
    for (int h = 0; h < 2; ++h) store_pair(shared + h * 64, x.m[h], x.l[h]);
    __syncwarp();
  }
  // Of the latest segment.
  __device__ __forceinline__ Worth worth() const {
    const uint32_t shared = address(thread_number()) + S::rows * 8;
    Worth x;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(x.past[h]), "=f"(x.now[h])
                   : "r"(shared + h * 64)
                   : "memory");
    return x;
  }
  __device__ __forceinline__ void join(const RowSums &sums) const {
    Totals totals = load();
    float past[2], now[2];
    weigh(totals, sums, past, now);
    store(totals);
    const uint32_t shared = address(thread_number()) + S::rows * 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) store_pair(shared + h * 64, past[h], now[h]);
    __syncwarp();
  }
};

// How a finished segment's o joins O, which is then worth `past` and o `now`. What lies in shared memory is folded at
// once. What lies in the L2 is far: o goes there too, without waiting, and is folded beside the blocks of the next
// segment, a few elements in each.
template <class S> struct Fold {
  static constexpr int fours = S::d / 8, ahead = 2;
  static constexpr bool waits = !S::one && S::held < fours;
  bool runs = false;  // O has segments
  int next = fours;   // of the o that waits
  struct Share {
    Worth worth;
    float4 all[ahead], o[ahead];
  };

  __device__ __forceinline__ static float4 four(const float (&x)[S::d / 2], int i) {
    return make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }
  // Of all that waited before nothing is left.
  template <bool later> __device__ __forceinline__ void put(const AttentionPlan &p, const Layout<S> &at,
                                                            const float (&x)[S::d / 2]) {
    if constexpr (S::one) return;
    const RunningO<S> running(p, at);
    if (!runs) {
#pragma unroll
      for (int i = 0; i < fours; ++i) running.store(i, four(x, i));
    } else if constexpr (!waits || !later) {
      const Worth worth = SharedTotals<S>{at.base}.worth();
#pragma unroll
      for (int i = 0; i < fours; ++i) running.store(i, worth.folded(running.load(i), four(x, i)));
    } else {
      const Worth worth = SharedTotals<S>{at.base}.worth();
#pragma unroll
      for (int i = S::held; i < fours; ++i) __stcg(running.waiting(i), four(x, i));
#pragma unroll
      for (int i = 0; i < S::held; ++i) running.store(i, worth.folded(running.load(i), four(x, i)));
      next = S::held;
    }
    runs = true;
  }
  // Beside a block: its share is asked for, and later folded.
  __device__ __forceinline__ Share ask(const AttentionPlan &p, const Layout<S> &at) const {
    Share x = {};
    if constexpr (waits) {
      if (next == fours) return x;
      const RunningO<S> running(p, at);
      x.worth = SharedTotals<S>{at.base}.worth();
#pragma unroll
      for (int k = 0; k < ahead; ++k) x.all[k] = running.load(next + k), x.o[k] = __ldcg(running.waiting(next + k));
    }
    return x;
  }
  __device__ __forceinline__ void fold(const AttentionPlan &p, const Layout<S> &at, const Share &x) {
    if constexpr (waits) {
      if (next == fours) return;
      const RunningO<S> running(p, at);
#pragma unroll
      for (int k = 0; k < ahead; ++k) running.store(next + k, x.worth.folded(x.all[k], x.o[k]));
      next += ahead;
    }
  }
  __device__ __forceinline__ void finish(const AttentionPlan &p, const Layout<S> &at, int most = fours) {
    if constexpr (waits) {
#pragma unroll 1
      while (next < most) fold(p, at, ask(p, at));
    }
  }
  // The tile's last segment: x becomes O.
  __device__ __forceinline__ void end(const AttentionPlan &p, const Layout<S> &at, float (&x)[S::d / 2]) {
    if constexpr (S::one) return;
    if (runs) {
      const RunningO<S> running(p, at);
      const Worth worth = SharedTotals<S>{at.base}.worth();
#pragma unroll
      for (int i = 0; i < fours; ++i) {
        const float4 sum = worth.folded(running.load(i), four(x, i));
        x[4 * i] = sum.x, x[4 * i + 1] = sum.y, x[4 * i + 2] = sum.z, x[4 * i + 3] = sum.w;
      }
    }
    runs = false;
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
    const bool none = totals.m[h] == -INFINITY;  // and all of o is 0
    const float reciprocal = none ? 0.0f : __frcp_rn(totals.l[h]);
#pragma unroll
    for (int i = 0; i < S::d / 8; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float &x = o[4 * i + 2 * h + e];
        x = weighed(x, reciprocal);
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
  char *rows[4];  // where 16 bytes of each chunk of every fourth go; null: there is no such row
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const RowPlace at_row = row_place(p, first + 4 * i + lane / 8);
    const int token = job.q_first + first_query + at_row.query;
    rows[i] = has(at_row) ? result_at(p, job.sequence, token, job.head + at_row.head) + lane % 8 * 16 : nullptr;
  }
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
    const bool inside = chunk * kBlockK + lane % 8 * 8 < p.e;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * i + lane / 8;
      uint4 x;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "r"(piece + row * kRowBytes + ((lane % 8) ^ (row % 8)) * 16)
                   : "memory");
      if (inside && rows[i]) *reinterpret_cast<uint4 *>(rows[i] + chunk * kRowBytes) = x;
    }
  }
  return __all_sync(0xFFFFFFFFu, zero == 0.0f);
}

// Once all jobs are done: a warp's rows that are not finite, again.
template <class S> __device__ __forceinline__ void repair_rows(const AttentionPlan &p, int warp) {
  Walk<S::n, S::sharers> walk(p);
  Numbers<S::sharers> numbers(p);
  Job job;
  for (; walk.find(numbers.now(), &job); numbers.follow()) {
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

}  // namespace
}  // namespace pydet
