// Attention, forward, of few rows on Hopper: decoding, where all is loading of keys and values.
//
//   Rows are the columns of small products (mma.sync) whose rows are keys, and later columns of v. A warp loads a job's
//   keys and values by TMA through one ring, those of some blocks at a time: first their keys, then their values. Eight
//   warps share out the keys of each product for the scores, meet for the largest of each block, make the weights, and
//   share out the columns of v. One more walks the sums of weights, which are chains over keys. O of the segments so far
//   is in registers.
//
// The order of every sum is NUMERICS.md's, "Attention".

#include "contract/elementary.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/kv.h"
#include "gpu/nvidia/sm90/attention/row.h"
#include "gpu/nvidia/sm90/pipe/out.h"

namespace pydet {
namespace {

constexpr int kUnit = 128;  // keys of a unit: 16 a warp, two stages of the ring

template <Type type_, int d_> struct DecodeShape {
  static constexpr Type type = type_;
  static constexpr int sharers = 1;
  static constexpr int d = d_, row_tiles = 1, rows = 8 * row_tiles;  // two spill
  static constexpr int n = kUnit / 2, chunks = d / kBlockK;
  static constexpr int block = block_keys(d), blocks = kUnit / block;                       // of a unit
  static constexpr int units = 4;                                                           // between two meetings
  static constexpr int column_tiles = d == 256 ? 2 : 1;                                     // of 16, a warp's
  static constexpr int warps = 8, consumer_warps = warps + 1, slot_warps = consumer_warps;  // of which one walks sums
  static constexpr int threads = (consumer_warps + 1) * 32, warps_that_meet = consumer_warps * 32;
  static constexpr int blocks_an_sm = d == 256 ? 1 : 2, stages = d == 64 ? 10 : 5;

  static constexpr int q_box_bytes = rows * kRowBytes, q_bytes = chunks * q_box_bytes;
  static constexpr int box_bytes = n * kRowBytes, stage_bytes = chunks * box_bytes;
  static constexpr int keys = units * kUnit;
  static constexpr int q_at = 0, ring_at = q_at + q_bytes, rounded_at = ring_at + stages * stage_bytes,
                       weights_at = rounded_at + keys * rows * 2, largest_at = weights_at + keys * rows * 4,
                       worth_at = largest_at + units * warps * rows * 4, sums_at = worth_at + units * blocks * rows * 4,
                       slots_at = sums_at + rows * 4, kSlots = 4, kSlotBytes = 48,
                       barriers_at = slots_at + kSlots * kSlotBytes, q_full_at = barriers_at,
                       q_empty_at = q_full_at + 8, full_at = q_empty_at + 8, empty_at = full_at + stages * 8,
                       slot_full_at = empty_at + stages * 8, slot_empty_at = slot_full_at + kSlots * 8,
                       flag_at = slot_empty_at + kSlots * 8, shared_bytes = flag_at + 16;
  static_assert(ring_at % 1024 == 0 && slots_at % 16 == 0, "boxes lie in atoms of 1024 bytes");
  static_assert((shared_bytes + 1024) * blocks_an_sm <= (kMostSharedBytes + 1024), "blocks of an SM");
};

// The next group of units of a job: up to `stop`, of a segment that ends at `segment_end`.
struct Units {
  int stop, segment_end;
};
template <class S> __device__ __forceinline__ Units units_from(const AttentionPlan &p, int unit, int end) {
  const int segment_end = min(end, (unit / p.segment_blocks + 1) * p.segment_blocks);
  return {min(unit + S::units, segment_end), segment_end};
}

// ---- The warp that loads -----------------------------------------------------------------------------------------

template <class S> __device__ __forceinline__ void load_jobs(const AttentionPlan &p, const Layout<S> &at) {
  const AttentionSlots<S> slots = at.slots();
  Cursor<S::stages> ring;
  Walk<kUnit> walk(p);
  Numbers<> numbers(p);
  Job job;
  int turn = 0;
  for (; walk.find(numbers.now(), &job); ++turn, numbers.take()) {
    slots.put(turn, job);
    const int group = job.head / p.group_heads;
    Boxes ahead = boxes_of<S>(p, job, 2 * job.begin);
    const auto load = [&](const CUtensorMap *map, bool sequence_moves, bool group_moves, int next) {
      const Boxes boxes = ahead;
      ahead = boxes_of<S>(p, job, next);  // a page is known by when its turn comes
      barrier_wait(at.empty(ring.stage), ring.parity ^ 1);
      load_block<S>(p, map, sequence_moves, group_moves, boxes, group, at.stage(ring.stage), at.full(ring.stage));
      ring.next();
    };
    for (int unit = job.begin; unit < job.end;) {
      const int stop = units_from<S>(p, unit, job.end).stop;
#pragma unroll 1
      for (int stage = 2 * unit; stage < 2 * stop; ++stage) {
        load(&p.k, p.sequence_moves_k, p.group_moves_k, stage + 1 < 2 * stop ? stage + 1 : 2 * unit);
        if (stage == 2 * job.begin) {
          barrier_wait(at.q_empty(0), (turn & 1) ^ 1);
          if (threadIdx.x % 32 == 0) load_queries<S>(p, job, 0, at.q(0), at.q_full(0));
        }
      }
#pragma unroll 1
      for (int stage = 2 * unit; stage < 2 * stop; ++stage) load(&p.v, p.sequence_moves_v, p.group_moves_v, stage + 1);
      unit = stop;
    }
  }
  job = {};
  slots.put(turn, job);
}

// ---- The warp that walks the sums --------------------------------------------------------------------------------

// A lane has one row of each 8, and the keys of two residues modulo 8.
template <class S> __device__ __forceinline__ void sum_jobs(const AttentionPlan &p, const Layout<S> &at) {
  const AttentionSlots<S> slots = at.slots();
  const int lane = int(threadIdx.x % 32), row = lane % 8;
  const uint32_t weights = at.base + S::weights_at + lane * 4, worth = at.base + S::worth_at + row * 4;
  for (int turn = 0;; ++turn) {
    slots.wait(turn);
    const Job job = slots.look(turn);
    if (!job.end) break;
    float l[S::row_tiles][2] = {};
    for (int unit = job.begin; unit < job.end;) {
      const Units group = units_from<S>(p, unit, job.end);
      named_sync(1, S::warps_that_meet);
      named_sync(2, S::warps_that_meet);
#pragma unroll 1
      for (int i = 0; i < (group.stop - unit) * S::blocks; ++i) {
#pragma unroll
        for (int t = 0; t < S::row_tiles; ++t) {
          const float factor = load_word(worth + (i * S::rows + t * 8) * 4);
          l[t][0] = l[t][0] * factor, l[t][1] = l[t][1] * factor;
        }
#pragma unroll
        for (int k = 0; k < S::block; k += 8)
#pragma unroll
          for (int t = 0; t < S::row_tiles; ++t)
#pragma unroll
            for (int r = 0; r < 2; ++r)  // of the keys k + lane / 8 + 4 r
              l[t][r] = l[t][r] + load_word(weights + (t * S::keys + i * S::block + k + 4 * r) * 8 * 4);
      }
      unit = group.stop;
      if (unit < group.segment_end) continue;
#pragma unroll
      for (int t = 0; t < S::row_tiles; ++t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          l[t][r] = l[t][r] + __shfl_xor_sync(0xFFFFFFFFu, l[t][r], 8);
          l[t][r] = l[t][r] + __shfl_xor_sync(0xFFFFFFFFu, l[t][r], 16);
        }
        if (lane < 8) store_word(at.base + S::sums_at + (t * 8 + row) * 4, l[t][0] + l[t][1]);
        l[t][0] = l[t][1] = 0;
      }
      named_sync(3, S::warps_that_meet);
    }
    slots.give_back(turn);
  }
}

// ---- The warps that multiply -------------------------------------------------------------------------------------

// A thread's rows: of each 8 two that stand beside each other.
template <class S> struct RowPairs {
  float x[S::row_tiles][2];
  __device__ __forceinline__ void fill(float value) {
#pragma unroll
    for (int t = 0; t < S::row_tiles; ++t) x[t][0] = x[t][1] = value;
  }
};

// Where 16 bytes of a tile's row lie, `chunk` of them along it.
__device__ __forceinline__ uint32_t place_in(uint32_t tile, int box_bytes, int row, int chunk) {
  return tile + chunk / 8 * box_bytes + row * kRowBytes + ((chunk % 8) ^ (row % 8)) * 16;
}

template <class S> __device__ __forceinline__ void multiply_jobs(const AttentionPlan &p, const Layout<S> &at,
                                                                 int warp) {
  const AttentionSlots<S> slots = at.slots();
  const int lane = int(threadIdx.x % 32), pair = lane % 4 * 2, eighth = lane / 4;
  const int first_column = warp * 16 * S::column_tiles;
  const bool has_columns = first_column < S::d;
  Cursor<S::stages> ring;
  bool finite = true;
  const auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) barrier_arrive(at.empty(stage));
  };

  for (int turn = 0;; ++turn) {
    slots.wait(turn);
    const Job job = slots.look(turn);
    const int end = same_in_warp(job.end);
    if (!end) break;
    barrier_wait(at.q_full(0), turn & 1);
    uint32_t q[S::d / 32][S::row_tiles][4];
#pragma unroll
    for (int i = 0; i < S::d / 32; ++i)
#pragma unroll
      for (int t = 0; t < S::row_tiles; ++t)
        load_matrices<false>(q[i][t], place_in(at.q(0), S::q_box_bytes, t * 8 + lane % 8, 4 * i + lane / 8));
    __syncwarp();
    if (lane == 0) barrier_arrive(at.q_empty(0));

    const auto query_of = [&](int t, int e) {
      const RowPlace row = row_place(p, t * 8 + pair + e);
      return row.query < p.warpgroup_queries && job.query + row.query < job.queries ? job.query + row.query : -1;
    };
    int from[S::row_tiles][2], to[S::row_tiles][2];  // keys that a row sees
#pragma unroll
    for (int t = 0; t < S::row_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int query = query_of(t, e);
        const Keys keys = keys_of(p, job, query, query);
        from[t][e] = query < 0 ? 0 : keys.begin, to[t][e] = query < 0 ? 0 : keys.end;
      }

    RowPairs<S> m, total_m, total_l;
    total_m.fill(-INFINITY), total_l.fill(0), m.fill(-INFINITY);
    float o[S::column_tiles][S::row_tiles][4] = {}, all[S::column_tiles][S::row_tiles][4] = {};
#pragma unroll 1
    for (int unit = same_in_warp(job.begin); unit < end;) {
      const Units group = units_from<S>(p, unit, end);
      float s[S::units][S::row_tiles][4];
#pragma unroll
      for (int i = 0; i < S::units; ++i)
        if (unit + i < group.stop) {
          Cursor<S::stages> second = ring;
          second.next();
          barrier_wait(at.full(ring.stage), ring.parity);
          barrier_wait(at.full(second.stage), second.parity);
          const uint32_t stage = at.stage(warp < 4 ? ring.stage : second.stage);
#pragma unroll
          for (int t = 0; t < S::row_tiles; ++t)
#pragma unroll
            for (int k = 0; k < 4; ++k) s[i][t][k] = 0;
#pragma unroll
          for (int k = 0; k < S::d / kStep; ++k) {
            uint32_t a[4];
            load_matrices<false>(a, place_in(stage, S::box_bytes, warp % 4 * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (int t = 0; t < S::row_tiles; ++t)
              mma<S::type>(s[i][t], a, q[k / 2][t][k % 2 * 2], q[k / 2][t][k % 2 * 2 + 1]);
          }
          release(ring.stage), release(second.stage);
          ring = second;
          ring.next();

          const int key = (unit + i) * kUnit + warp * 16 + eighth;
#pragma unroll
          for (int t = 0; t < S::row_tiles; ++t) {
            float most[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
#pragma unroll
              for (int h = 0; h < 2; ++h)
                if (key + 8 * h < from[t][e] || key + 8 * h >= to[t][e]) s[i][t][2 * h + e] = -INFINITY;
              most[e] = larger(s[i][t][e], s[i][t][2 + e]);
#pragma unroll
              for (int other = 4; other < 32; other *= 2)
                most[e] = larger(most[e], __shfl_xor_sync(0xFFFFFFFFu, most[e], other));
            }
            if (eighth == 0)
              store_pair(at.base + S::largest_at + ((i * S::warps + warp) * S::rows + t * 8 + pair) * 4, most[0],
                         most[1]);
          }
        }
      named_sync(1, S::warps_that_meet);

      RowPairs<S> worth[S::units][S::blocks];
#pragma unroll
      for (int i = 0; i < S::units; ++i)
        if (unit + i < group.stop) {
          RowPairs<S> taken;
#pragma unroll
          for (int b = 0; b < S::blocks; ++b)
#pragma unroll
            for (int t = 0; t < S::row_tiles; ++t) {
              constexpr int kSharing = S::warps / S::blocks;  // warps of a block of keys
              float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
              for (int w = 0; w < kSharing; ++w) {
                const float2 x = load_pair(at.base + S::largest_at +
                                           ((i * S::warps + b * kSharing + w) * S::rows + t * 8 + pair) * 4);
                most[0] = larger(most[0], x.x), most[1] = larger(most[1], x.y);
              }
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const float n = larger(m.x[t][e], most[e] * p.c);
                worth[i][b].x[t][e] = n == -INFINITY ? 1.0f : ex2_f32(m.x[t][e] - n);
                if (S::blocks == 1 || warp / kSharing == b) taken.x[t][e] = n == -INFINITY ? 0.0f : n;
                m.x[t][e] = n;
              }
              if (warp == 0 && eighth == 0)
                store_pair(at.base + S::worth_at + ((i * S::blocks + b) * S::rows + t * 8 + pair) * 4,
                           worth[i][b].x[t][0], worth[i][b].x[t][1]);
            }
#pragma unroll
          for (int t = 0; t < S::row_tiles; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float first = ex2_f32(fmaf(s[i][t][2 * h], p.c, -taken.x[t][0])),
                          second = ex2_f32(fmaf(s[i][t][2 * h + 1], p.c, -taken.x[t][1]));
              const int place = (t * S::keys + i * kUnit + warp * 16 + eighth + 8 * h) * 8 + pair;
              store_pair(at.base + S::weights_at + place * 4, first, second);
              store_word(at.base + S::rounded_at + place * 2, __uint_as_float(rounded_pair<S::type>(first, second)));
            }
        }
      named_sync(2, S::warps_that_meet);

#pragma unroll
      for (int i = 0; i < S::units; ++i)
        if (unit + i < group.stop)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            barrier_wait(at.full(ring.stage), ring.parity);
            if (has_columns) {
              if (half == 0 || S::blocks == 2)
#pragma unroll
                for (int c = 0; c < S::column_tiles; ++c)
#pragma unroll
                  for (int t = 0; t < S::row_tiles; ++t)
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                      o[c][t][k] = o[c][t][k] * worth[i][S::blocks == 2 ? half : 0].x[t][k % 2];
              uint32_t b[S::row_tiles][4];
#pragma unroll
              for (int k = 0; k < S::n / kStep; ++k) {
                if (k % 2 == 0)
#pragma unroll
                  for (int t = 0; t < S::row_tiles; ++t)
                    load_matrices<true>(b[t], at.base + S::rounded_at +
                                                  (t * S::keys + i * kUnit + half * S::n + k * kStep + lane) * 16);
#pragma unroll
                for (int c = 0; c < S::column_tiles; ++c) {
                  uint32_t a[4];
                  load_matrices<true>(a,
                                      place_in(at.stage(ring.stage), S::box_bytes, k * kStep + lane % 8 + lane / 16 * 8,
                                               first_column / 8 + 2 * c + lane / 8 % 2));
#pragma unroll
                  for (int t = 0; t < S::row_tiles; ++t) mma<S::type>(o[c][t], a, b[t][k % 2 * 2], b[t][k % 2 * 2 + 1]);
                }
              }
            }
            release(ring.stage);
            ring.next();
          }

      unit = group.stop;
      if (unit < group.segment_end) continue;
      named_sync(3, S::warps_that_meet);
#pragma unroll
      for (int t = 0; t < S::row_tiles; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t sums = at.base + S::sums_at + (t * 8 + pair + e) * 4;
          const float l = load_word(sums), n = larger(total_m.x[t][e], m.x[t][e]);
          const float past = n == -INFINITY ? 1.0f : ex2_f32(total_m.x[t][e] - n),
                      now = n == -INFINITY ? 1.0f : ex2_f32(m.x[t][e] - n);
          total_l.x[t][e] = total_l.x[t][e] * past + l * now;
          total_m.x[t][e] = n;
#pragma unroll
          for (int c = 0; c < S::column_tiles; ++c)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              float &sum = all[c][t][2 * h + e];
              sum = sum * past + o[c][t][2 * h + e] * now;
              o[c][t][2 * h + e] = 0;
            }
        }
      m.fill(-INFINITY);
    }

    // Results, or what the segment leaves to combine.cu.
    float zero = 0;  // times what is finite
#pragma unroll
    for (int t = 0; t < S::row_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int query = query_of(t, e);
        if (query < 0) continue;
        const int head = job.head + row_place(p, t * 8 + pair + e).head, token = job.q_first + query;
        const bool writes_sums = warp == 0 && eighth == 0;
        if (p.split) {
          const int64_t part = part_of(p, job.segment, job.sequence, token, head);
          if (writes_sums)
            *reinterpret_cast<float2 *>(p.parts + 2 * part) = make_float2(total_m.x[t][e], total_l.x[t][e]);
#pragma unroll
          for (int c = 0; c < S::column_tiles; ++c)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int column = first_column + c * 16 + h * 8 + eighth;
              if (column < p.e) p.part_o[part * p.e + column] = all[c][t][2 * h + e];
            }
          continue;
        }
        const bool none = total_m.x[t][e] == -INFINITY;
        const float reciprocal = none ? 0.0f : __frcp_rn(total_l.x[t][e]);
        uint16_t *out = reinterpret_cast<uint16_t *>(result_at(p, job.sequence, token, head));
#pragma unroll
        for (int c = 0; c < S::column_tiles; ++c)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int column = first_column + c * 16 + h * 8 + eighth;
            const float x = none ? 0.0f : weighed(all[c][t][2 * h + e], reciprocal);
            zero = fmaf(x, 0.0f, zero);
            if (column < p.e) out[column] = uint16_t(rounded_pair<S::type>(x, x));
          }
        if (p.lse.data && writes_sums)
          reinterpret_cast<float *>(p.lse.data)[job.sequence * p.lse.sequence_stride + head * p.lse.head_stride +
                                                token * p.lse.token_stride] =
              none ? -INFINITY : canonical(log_sum_exp({total_m.x[t][e], total_l.x[t][e]}));
      }
    finite &= __all_sync(0xFFFFFFFFu, zero == 0.0f);
    slots.give_back(turn);
  }

  // Rows that are not finite, again.
  const uint32_t flag = at.base + S::flag_at;
  if (!finite && lane == 0) store_word(flag, 1.0f);
  named_sync(4, S::warps * 32);
  if (load_word(flag) == 0.0f) return;
  Walk<kUnit> walk(p);
  Numbers<> numbers(p);
  Job job;
  for (; walk.find(numbers.now(), &job); numbers.take()) {
    const Lengths x = {job.queries, job.keys, job.q_first, job.k_first};
    for (int row = warp; row < S::rows; row += S::warps) {
      const RowPlace place = row_place(p, row);
      const int query = job.query + place.query, head = job.head + place.head;
      if (place.query < p.warpgroup_queries && query < job.queries &&
          !row_is_finite<S::type>(p, result_at(p, job.sequence, job.q_first + query, head)))
        compute_row<S::type, S::block>(p, x, job.sequence, query, head);
    }
  }
}

template <class S>
__global__ void __launch_bounds__(S::threads, S::blocks_an_sm)
    attention_decode(const __grid_constant__ AttentionPlan p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Layout<S> at = {shared_address(memory)};
  const int warp = same_in_warp(int(threadIdx.x) / 32);
  if (threadIdx.x == S::consumer_warps * 32) {
    barrier_init(at.q_full(0), 1), barrier_init(at.q_empty(0), S::warps);
    for (int i = 0; i < S::stages; ++i) barrier_init(at.full(i), 1), barrier_init(at.empty(i), S::warps);
    at.slots().init();
    store_word(at.base + S::flag_at, 0.0f);
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (warp == S::consumer_warps) load_jobs<S>(p, at);
  else if (warp == S::warps) sum_jobs<S>(p, at);
  else multiply_jobs<S>(p, at, warp);
}

template <class S> pydet_status launch_shape(const Launch &launch, const AttentionPlan &plan) {
  Launch shape = launch;
  shape.block = dim3(S::threads);
  shape.shared_bytes = S::shared_bytes;
  return pydet::launch(shape, attention_decode<S>, plan);
}

}  // namespace

template <Type type> pydet_status attention_decode_sm90(const Launch &launch, const AttentionPlan &plan) {
  return plan.d <= 64    ? launch_shape<DecodeShape<type, 64>>(launch, plan)
         : plan.d <= 128 ? launch_shape<DecodeShape<type, 128>>(launch, plan)
                         : launch_shape<DecodeShape<type, 256>>(launch, plan);
}

template pydet_status attention_decode_sm90<Type::bf16>(const Launch &, const AttentionPlan &);
template pydet_status attention_decode_sm90<Type::f16>(const Launch &, const AttentionPlan &);

}  // namespace pydet
