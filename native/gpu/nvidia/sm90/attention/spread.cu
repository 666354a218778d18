// Attention, forward, of few rows and few keys on Hopper: decoding from a small cache, where one multiprocessor would
// load a segment for longer than all else takes.
//
//   A cluster has a segment of one sequence and group. Each of its blocks loads a part of the keys and makes their
//   scores, as decode.cu does (mma.sync, keys as rows), and hands them to all: so each has the scores of all keys, and
//   makes all weights and sums of its own. Of the values each block loads 32 columns, of all keys, and makes o of them.
//   All loads are under way from the start: nothing is a ring.
//
// The order of every sum is NUMERICS.md's, "Attention".

#include "contract/elementary.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/kv.h"
#include "gpu/nvidia/sm90/attention/row.h"
#include "gpu/nvidia/sm90/pipe/out.h"

namespace pydet {
namespace {

template <Type type_, int d_> struct SpreadShape {
  static constexpr Type type = type_;
  static constexpr int sharers = 1;  // of load_block: boxes go to this block alone
  static constexpr int d = d_, rows = kSpreadRows, chunks = d / kBlockK, n = kSpreadBox;
  static constexpr int block = block_keys(d), keys = kSpreadKeys, blocks = keys / block;
  static constexpr int parts = spread_parts(d), part_keys = keys / parts;  // of a cluster
  static constexpr int warps = 8, own_blocks = blocks / warps;             // of keys, a warp's
  static constexpr int column_warps = kSpreadColumns / 16;
  static constexpr int threads = (warps + 2) * 32;  // one walks sums, one loads

  static constexpr int q_box_bytes = rows * kRowBytes, q_bytes = chunks * q_box_bytes;
  static constexpr int box_bytes = n * kRowBytes, stage_bytes = chunks * box_bytes, k_stages = part_keys / n;
  static constexpr int v_row_bytes = 2 * kSpreadColumns, v_stage_bytes = n * v_row_bytes, v_stages = keys / n;
  static constexpr int score_bytes = keys * rows * 4;
  static constexpr int q_at = 0, k_at = q_at + q_bytes, v_at = k_at + k_stages * stage_bytes,
                       weights_at = v_at + v_stages * v_stage_bytes, rounded_at = weights_at + score_bytes,
                       largest_at = rounded_at + score_bytes / 2, worth_at = largest_at + blocks * rows * 4,
                       sums_at = worth_at + blocks * rows * 4, q_full_at = sums_at + rows * 4,
                       scores_full_at = q_full_at + 8, k_full_at = scores_full_at + 8,
                       v_full_at = k_full_at + k_stages * 8, flag_at = v_full_at + v_stages * 8,
                       shared_bytes = flag_at + 16;
  static_assert(k_at % 1024 == 0 && v_at % 1024 == 0, "boxes lie in atoms of 1024 bytes");
  static_assert(shared_bytes <= kMostSharedBytes, "a block an SM");
};

// What this cluster has: a segment, from key `first` on, and of it the keys that are looked at.
struct Part {
  Job job;
  int first, begin, end;
  __device__ __forceinline__ bool has(int key) const { return key >= begin && key < end; }
};
// False: its sequence has no such segment.
template <class S> __device__ __forceinline__ bool find_part(const AttentionPlan &p, Part *part) {
  const int number = int(blockIdx.x) / S::parts, of_segment = p.sequences * p.job_heads, segment = number / of_segment,
            rest = number - segment * of_segment, sequence = rest / p.job_heads;
  const Lengths x = lengths_of(p, sequence);
  if (segment >= segments_of(p, x.keys)) return false;
  part->job = job_of<S::block>(p, x, sequence, segment, rest - sequence * p.job_heads);
  part->first = segment * S::keys;
  part->begin = part->job.begin * S::block, part->end = part->job.end * S::block;
  return true;
}

// All lanes of the warp that loads.
template <class S>
__device__ __forceinline__ void load_part(const AttentionPlan &p, const Part &part, uint32_t base, int rank) {
  const Job &job = part.job;
  const int lane = int(threadIdx.x % 32), group = job.head / p.group_heads;
  if (lane == 0) load_queries<S>(p, job, 0, base + S::q_at, base + S::q_full_at);
#pragma unroll 1
  for (int i = 0; i < S::k_stages; ++i) {
    const int key = part.first + rank * S::part_keys + i * S::n;
    if (part.has(key))
      load_block<S>(p, &p.k, p.sequence_moves_k, p.group_moves_k, boxes_of<S>(p, job, key / S::n), group,
                    base + S::k_at + i * S::stage_bytes, base + S::k_full_at + i * 8);
  }
#pragma unroll 1
  for (int i = 0; i < S::v_stages; ++i) {
    const int key = part.first + i * S::n;
    if (!part.has(key)) continue;
    const uint32_t barrier = base + S::v_full_at + i * 8;
    const Boxes at = boxes_of<S>(p, job, key / S::n);
    if (elected()) barrier_expect(barrier, S::v_stage_bytes);
    __syncwarp();
    each_box<S::n>(p, at, 0, [&](int key, int token, int sequence) {
      const Place place = {
          rank * kSpreadColumns, token, {p.group_moves_v ? group : 0, p.sequence_moves_v ? sequence : 0, 0}};
      load_box<5, false>(base + S::v_at + i * S::v_stage_bytes + key * S::v_row_bytes, &p.v, barrier, place, 0);
    });
  }
}

// Two words to the same place of a block of the cluster, which its barrier counts.
__device__ __forceinline__ void send_pair(uint32_t to, float x, float y, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "f"(x), "f"(y), "r"(barrier)
               : "memory");
}

// The warp that walks the sums of weights: a lane has one row, and the keys of two residues modulo 8.
template <class S> __device__ __forceinline__ void sum_part(uint32_t base) {
  const int lane = int(threadIdx.x % 32), row = lane % S::rows;
  named_sync(2, (S::warps + 1) * 32);
  float l[2] = {};
#pragma unroll 1
  for (int b = 0; b < S::blocks; ++b) {
    const float worth = load_word(base + S::worth_at + (b * S::rows + row) * 4);
    l[0] = l[0] * worth, l[1] = l[1] * worth;
#pragma unroll
    for (int k = 0; k < S::block; k += 8)
#pragma unroll
      for (int r = 0; r < 2; ++r)  // of the keys k + lane / 8 + 4 r
        l[r] = l[r] + load_word(base + S::weights_at + ((b * S::block + k + 4 * r) * S::rows + lane) * 4);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    l[r] = l[r] + __shfl_xor_sync(0xFFFFFFFFu, l[r], 8);
    l[r] = l[r] + __shfl_xor_sync(0xFFFFFFFFu, l[r], 16);
  }
  if (lane < S::rows) store_word(base + S::sums_at + row * 4, l[0] + l[1]);
  named_sync(3, (S::column_warps + 1) * 32);
}

// The warps that multiply.
template <class S>
__device__ __forceinline__ void multiply_part(const AttentionPlan &p, const Part &part, uint32_t base, int rank,
                                              int warp) {
  const Job &job = part.job;
  const int lane = int(threadIdx.x % 32), pair = lane % 4 * 2, eighth = lane / 4;
  const auto query_of = [&](int e) {
    const RowPlace row = row_place(p, pair + e);
    return row.query < p.warpgroup_queries && job.query + row.query < job.queries ? job.query + row.query : -1;
  };
  int from[2], to[2];  // keys that a row sees
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int query = query_of(e);
    const Keys keys = keys_of(p, job, query, query);
    from[e] = query < 0 ? 0 : keys.begin, to[e] = query < 0 ? 0 : keys.end;
  }

  // Scores of this block's keys, to all blocks.
  barrier_wait(base + S::q_full_at, 0);
  uint32_t q[S::d / 32][4];
#pragma unroll
  for (int i = 0; i < S::d / 32; ++i) {
    const int row = lane % 8, chunk = 4 * i + lane / 8;
    load_matrices<false>(
        q[i], base + S::q_at + chunk / 8 * S::q_box_bytes + row * kRowBytes + ((chunk % 8) ^ (row % 8)) * 16);
  }
#pragma unroll 1
  for (int tile = warp; tile < S::part_keys / 16; tile += S::warps) {
    const int stage = tile * 16 / S::n, first = rank * S::part_keys + tile * 16;
    float s[4] = {};
    if (part.has(part.first + first / S::n * S::n)) {
      barrier_wait(base + S::k_full_at + stage * 8, 0);
#pragma unroll
      for (int k = 0; k < S::d / kStep; ++k) {
        const int row = tile * 16 % S::n + lane % 16, chunk = 2 * k + lane / 16;
        uint32_t a[4];
        load_matrices<false>(a, base + S::k_at + stage * S::stage_bytes + chunk / 8 * S::box_bytes + row * kRowBytes +
                                    ((chunk % 8) ^ (row % 8)) * 16);
        mma<S::type>(s, a, q[k / 2][k % 2 * 2], q[k / 2][k % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = first + eighth + 8 * h;
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (part.first + key < from[e] || part.first + key >= to[e]) s[2 * h + e] = -INFINITY;
      const uint32_t place = base + S::weights_at + (key * S::rows + pair) * 4;
#pragma unroll
      for (int other = 0; other < S::parts; ++other)
        send_pair(in_block(place, other), s[2 * h], s[2 * h + 1], in_block(base + S::scores_full_at, other));
    }
  }

  // The largest of each block of keys, of all keys from here on.
  barrier_wait(base + S::scores_full_at, 0);
  float2 s[S::own_blocks][S::block / 8];
#pragma unroll
  for (int i = 0; i < S::own_blocks; ++i) {
    const int block = warp * S::own_blocks + i;
    float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int k = 0; k < S::block / 8; ++k) {
      s[i][k] = load_pair(base + S::weights_at + ((block * S::block + k * 8 + eighth) * S::rows + pair) * 4);
      most[0] = larger(most[0], s[i][k].x), most[1] = larger(most[1], s[i][k].y);
    }
#pragma unroll
    for (int other = 4; other < 32; other *= 2)
#pragma unroll
      for (int e = 0; e < 2; ++e) most[e] = larger(most[e], __shfl_xor_sync(0xFFFFFFFFu, most[e], other));
    if (eighth == 0) store_pair(base + S::largest_at + (block * S::rows + pair) * 4, most[0], most[1]);
  }
  named_sync(1, S::warps * 32);

  // References, and weights of this warp's blocks.
  float m[2] = {-INFINITY, -INFINITY}, taken[S::own_blocks][2];
#pragma unroll
  for (int b = 0; b < S::blocks; ++b) {
    const float2 most = load_pair(base + S::largest_at + (b * S::rows + pair) * 4);
    const bool own = warp == b / S::own_blocks;
    float worth[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float n = larger(m[e], (e ? most.y : most.x) * p.c);
      worth[e] = n == -INFINITY ? 1.0f : ex2_f32(m[e] - n);
      if (own) taken[b % S::own_blocks][e] = n == -INFINITY ? 0.0f : n;
      m[e] = n;
    }
    if (own && eighth == 0) store_pair(base + S::worth_at + (b * S::rows + pair) * 4, worth[0], worth[1]);
  }
#pragma unroll
  for (int i = 0; i < S::own_blocks; ++i)
#pragma unroll
    for (int k = 0; k < S::block / 8; ++k) {
      const float first = ex2_f32(fmaf(s[i][k].x, p.c, -taken[i][0])),
                  second = ex2_f32(fmaf(s[i][k].y, p.c, -taken[i][1]));
      const int place = ((warp * S::own_blocks + i) * S::block + k * 8 + eighth) * S::rows + pair;
      store_pair(base + S::weights_at + place * 4, first, second);
      store_word(base + S::rounded_at + place * 2, __uint_as_float(rounded_pair<S::type>(first, second)));
    }
  named_sync(2, (S::warps + 1) * 32);

  // The values' columns.
  bool finite = true;
  if (warp < S::column_warps) {
    float o[4] = {};
    struct Fragments {
      uint32_t v[S::n / kStep][4], weights[S::n / 32][4];
    };
    const auto load = [&](int stage, Fragments &x) {
      barrier_wait(base + S::v_full_at + stage * 8, 0);
#pragma unroll
      for (int k = 0; k < S::n / kStep; ++k) {
        if (k % 2 == 0)
          load_matrices<true>(x.weights[k / 2], base + S::rounded_at + (stage * S::n + k * kStep + lane) * 16);
        const int row = k * kStep + lane % 8 + lane / 16 * 8, chunk = 2 * warp + lane / 8 % 2;
        load_matrices<true>(
            x.v[k], base + S::v_at + stage * S::v_stage_bytes + row * S::v_row_bytes + (chunk ^ (row / 2 % 4)) * 16);
      }
    };
    const int begin = (part.begin - part.first) / S::n, end = (part.end - part.first) / S::n;
    Fragments now, next;
    load(begin, now);
#pragma unroll 1
    for (int stage = begin; stage < end; ++stage) {
      if (stage + 1 < end) load(stage + 1, next);
      if (stage * S::n % S::block == 0) {
        const float2 worth = load_pair(base + S::worth_at + (stage * S::n / S::block * S::rows + pair) * 4);
        o[0] = o[0] * worth.x, o[1] = o[1] * worth.y, o[2] = o[2] * worth.x, o[3] = o[3] * worth.y;
      }
#pragma unroll
      for (int k = 0; k < S::n / kStep; ++k)
        mma<S::type>(o, now.v[k], now.weights[k / 2][k % 2 * 2], now.weights[k / 2][k % 2 * 2 + 1]);
      now = next;
    }
    named_sync(3, (S::column_warps + 1) * 32);

    // Results, or what the segment leaves to combine.cu.
    float zero = 0;  // times what is finite
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int query = query_of(e);
      if (query < 0) continue;
      const int head = job.head + row_place(p, pair + e).head, token = job.q_first + query;
      const bool none = m[e] == -INFINITY, writes_sums = rank == 0 && warp == 0 && eighth == 0;
      const float past = none ? 1.0f : 0.0f, l = 0 * past + load_word(base + S::sums_at + (pair + e) * 4);
      float all[2];  // as they join an O of zeros
#pragma unroll
      for (int h = 0; h < 2; ++h) all[h] = 0 * past + o[2 * h + e];
      const int column = rank * kSpreadColumns + warp * 16 + eighth;
      if (p.split) {
        const int64_t at = part_of(p, job.segment, job.sequence, token, head);
        if (writes_sums) *reinterpret_cast<float2 *>(p.parts + 2 * at) = make_float2(m[e], l);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (column + 8 * h < p.e) p.part_o[at * p.e + column + 8 * h] = all[h];
        continue;
      }
      const float reciprocal = none ? 0.0f : __frcp_rn(l);
      uint16_t *out = reinterpret_cast<uint16_t *>(result_at(p, job.sequence, token, head));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = none ? 0.0f : weighed(all[h], reciprocal);
        zero = fmaf(x, 0.0f, zero);
        if (column + 8 * h < p.e) out[column + 8 * h] = uint16_t(rounded_pair<S::type>(x, x));
      }
      if (p.lse.data && writes_sums)
        reinterpret_cast<float *>(
            p.lse.data)[job.sequence * p.lse.sequence_stride + head * p.lse.head_stride + token * p.lse.token_stride] =
            none ? -INFINITY : canonical(log_sum_exp({m[e], l}));
    }
    finite = __all_sync(0xFFFFFFFFu, zero == 0.0f);
  }

  // Rows of which this block's columns are not finite, again, with all their columns: so does each block that has some.
  const uint32_t flag = base + S::flag_at;
  if (!finite && lane == 0) store_word(flag, 1.0f);
  named_sync(4, S::warps * 32);
  if (load_word(flag) == 0.0f) return;
  const RowPlace place = row_place(p, warp);
  const int query = job.query + place.query, head = job.head + place.head;
  const Lengths x = {job.queries, job.keys, job.q_first, job.k_first};
  if (place.query < p.warpgroup_queries && query < job.queries &&
      !row_is_finite<S::type>(p, result_at(p, job.sequence, job.q_first + query, head)))
    compute_row<S::type, S::block>(p, x, job.sequence, query, head);
}

template <class S>
__global__ void __launch_bounds__(S::threads, 1) attention_spread(const __grid_constant__ AttentionPlan p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int warp = same_in_warp(int(threadIdx.x) / 32), rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 + S::k_stages + S::v_stages; ++i) barrier_init(base + S::q_full_at + i * 8, 1);
    store_word(base + S::flag_at, 0.0f);
    fence_barrier_init();
    barrier_expect(base + S::scores_full_at, S::score_bytes);
  }
  __syncthreads();
  cluster_sync_relaxed();
  wait_for_previous_kernel();
  let_next_kernel_start();
  Part part;
  if (!find_part<S>(p, &part)) return;
  if (warp == S::warps + 1) load_part<S>(p, part, base, rank);
  else if (warp == S::warps) sum_part<S>(base);
  else multiply_part<S>(p, part, base, rank, warp);
}

template <class S> pydet_status launch_shape(const Launch &launch, const AttentionPlan &plan) {
  Launch shape = launch;
  shape.grid.x *= S::parts;
  shape.block = dim3(S::threads);
  shape.cluster = S::parts;
  shape.shared_bytes = S::shared_bytes;
  return pydet::launch(shape, attention_spread<S>, plan);
}

}  // namespace

template <Type type> pydet_status attention_spread_sm90(const Launch &launch, const AttentionPlan &plan) {
  return plan.d <= 64    ? launch_shape<SpreadShape<type, 64>>(launch, plan)
         : plan.d <= 128 ? launch_shape<SpreadShape<type, 128>>(launch, plan)
                         : launch_shape<SpreadShape<type, 256>>(launch, plan);
}

template pydet_status attention_spread_sm90<Type::bf16>(const Launch &, const AttentionPlan &);
template pydet_status attention_spread_sm90<Type::f16>(const Launch &, const AttentionPlan &);

}  // namespace pydet
