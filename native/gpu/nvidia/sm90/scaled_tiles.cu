// Scaled GEMM of fp8 on Hopper's tensor cores (NUMERICS.md, "Scaled GEMM"), arithmetic sm90.
//
//   s_c = the chain of steps of 32 over chunk c of k, from +0;   D = fmaf(w_c, s_c, D), c ascending
//   w_c = fl(sa[m, c] sb[c, n]) with scales along k, else 1;     then out = round(fl(fl(D sb[n]) sa[m]) + bias)
//
// Both factors e4m3; scaled_gemm.cu has the other pairs. One persistent block an SM, two blocks a cluster. A producer
// thread brings tiles of m by 128 k and 128 k by n into a ring of stages by TMA; the blocks of a cluster lie under each
// other and each brings half of b's tile to both, or side by side and halves of a's. Two warps put the weights of each
// stage beside it, so that the warpgroups that multiply only read them: where these loaded scales themselves, the
// kernel had half of its speed. The additions, which are half as many instructions again, are made while the other
// warpgroup's chunk is on the tensor cores, or this one's next. Adding zeros past the end of K changes nothing, since a
// step leaves c on a grid that the next step keeps.

#include "gpu/nvidia/sm90/scaled_tiles.h"
#include "gpu/nvidia/sm90/wgmma_fp8.h"
#include "gpu/nvidia/tensor_map.h"

namespace pydet {
namespace {

// total += w sum for a thread's part of 64 rows: rows lane / 4 and 8 on, of weights w[..][0] and w[..][1]; from column
// `split` on those of the second block of columns.
template <class S, int registers, int column_blocks>
__device__ __forceinline__ void add_chunk(float (&total)[registers], const float (&sum)[registers],
                                          const float (&w)[column_blocks][2], int split) {
#pragma unroll
  for (int i = 0; i < registers; i += 4) {
    float w_0 = w[0][0], w_1 = w[0][1];
    if (column_blocks > 1 && i * 2 >= S::least_split) {
      const bool second = i * 2 >= split;
      w_0 = second ? w[column_blocks - 1][0] : w_0, w_1 = second ? w[column_blocks - 1][1] : w_1;
    }
    total[i] = fmaf(w_0, sum[i], total[i]);
    total[i + 1] = fmaf(w_0, sum[i + 1], total[i + 1]);
    total[i + 2] = fmaf(w_1, sum[i + 2], total[i + 2]);
    total[i + 3] = fmaf(w_1, sum[i + 3], total[i + 3]);
  }
}

template <class S>
__device__ __forceinline__ void consume(const ScaledProblem &problem, uint32_t shared, int rank, int warpgroup) {
  const Sm90Problem &p = problem.rows;
  const int thread = int(threadIdx.x) % kWarpgroup, lane = thread % 32;
  const uint32_t piece = shared + S::staging_at + (warpgroup * 4 + thread / 32) * kPieceBytes;
  const uint32_t columns = shared + S::columns_at + warpgroup * S::n * 4;
  const DeviceScale &a_scale = problem.a_scale, &b_scale = problem.b_scale;
  const bool by_column = S::by_column && problem.along_k && by_columns(b_scale);
  const bool scaled_after = !problem.along_k && (a_scale.data || b_scale.data);
  // Whose stages this warp frees: those of the blocks that share its rows or its columns.
  const int row_rank = rank % S::cluster_m, column_rank = rank / S::cluster_m;
  const int freed = lane < S::cluster_m
                        ? lane + column_rank * S::cluster_m
                        : row_rank + (lane - S::cluster_m + (lane - S::cluster_m >= column_rank)) * S::cluster_m;
  Cursor<S> ring, done;
  auto give_turn = [](int to) {
    if (S::turns) asm volatile("bar.arrive %0, %1;" ::"r"(kTurn + to), "n"(256) : "memory");
  };
  if (warpgroup == kConsumers - 1) give_turn(0);
  for (int index = int(blockIdx.x) / S::cluster; index < p.tiles; index += int(gridDim.x) / S::cluster) {
    // Worked out anew on each side of the main loop, which leaves no registers to keep it in.
    auto rows_of = [&](int i, int block) {
      int t = thread;
      asm volatile("" : "+r"(i), "+r"(t));
      const Tile tile = tile_of<S>(p, i, rank);
      return WarpRows<S>{p, tile, piece, tile.row + (warpgroup * S::blocks + block) * 64 + t / 32 * kWarpRows, t % 32};
    };
    float total[S::blocks][S::registers];
    float sum[S::ahead ? 1 : S::registers];
#pragma unroll
    for (int block = 0; block < S::blocks; ++block)
#pragma unroll
      for (int i = 0; i < S::registers; ++i) total[block][i] = 0;
    if (p.accumulate)
#pragma unroll
      for (int block = 0; block < S::blocks; ++block) {
        const WarpRows<S> rows = rows_of(index, block);
        rows.each_element(p.out, Type::f32, rows.tile.out_offset, p.out_stride, 1,
                          [&](int i, float x) { total[block][i] = canonical(x); });
      }
    if constexpr (S::long_chunks)
      if (problem.chain_from_out)
#pragma unroll
        for (int i = 0; i < S::registers; ++i) sum[i] = total[0][i], total[0][i] = 0;

    // Scales that do not vary along k: loaded before the main loop, used after it.
    constexpr int column_loads = (S::n + kWarpgroup - 1) / kWarpgroup;
    float row_scale[S::blocks * 2], column_scale[column_loads];
    int split = S::n;
    if (scaled_after || S::column_blocks > 1) {
      const WarpRows<S> rows = rows_of(index, 0);
      split = kScaleGroup - rows.tile.column % kScaleGroup;
      if (scaled_after) {
        int64_t row_at[S::blocks * 2], column_at[column_loads];
#pragma unroll
        for (int j = 0; j < S::blocks * 2; ++j)
          row_at[j] = batch_offset(a_scale, rows.tile) +
                      min(rows.row + lane / 4 + j / 2 * 64 + j % 2 * 8, p.m - 1) * a_scale.stride;
#pragma unroll
        for (int j = 0; j < column_loads; ++j)
          column_at[j] = batch_offset(b_scale, rows.tile) +
                         min(rows.tile.column + thread + j * kWarpgroup, p.n - 1) * b_scale.stride;
        load_scales(a_scale, row_at, row_scale);
        load_scales(b_scale, column_at, column_scale);
      }
    }

    if constexpr (S::ahead) {
      float sums[2][S::registers];
      auto begin = [&](float(&x)[S::registers]) {
        const uint32_t at = shared + ring.stage * (S::a_bytes + S::b_bytes);
        const uint64_t a = wgmma_descriptor<true>(at + warpgroup * kBlockBytes);
        const uint64_t b = wgmma_descriptor<true>(at + S::a_bytes);
        barrier_wait(full_barrier<S>(shared, ring.stage), ring.parity);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStageK / kFp8Step; ++step)
          wgmma_fp8<S::a_type, S::b_type>(x, a + step * 2, b + step * 2, step);
        wgmma_commit();
        ring.next();
      };
      auto load_weights = [&](float(&w)[S::column_blocks][2]) {
        const uint32_t of_rows = shared + S::weights_at + done.stage * S::weight_bytes +
                                 (warpgroup * 64 + thread / 32 * kWarpRows + lane / 4) * 4;
#pragma unroll
        for (int l = 0; l < S::column_blocks; ++l)
#pragma unroll
          for (int h = 0; h < 2; ++h) w[l][h] = problem.along_k ? load_word(of_rows + (l * S::m + h * 8) * 4) : 1.0f;
      };
      auto end = [&](const float(&x)[S::registers], const float(&w)[S::column_blocks][2]) {
        if (lane < S::cluster_m + S::cluster_n - 1) barrier_arrive(empty_barrier<S>(shared, done.stage), freed);
        add_chunk<S>(total[0], x, w, split);
        done.next();
      };
      float w[S::column_blocks][2];
      int i = 0;
#pragma unroll 1
      for (; i + kAhead <= p.k; i += kAhead) {
        begin(sums[0]);
#pragma unroll
        for (int j = 1; j < kAhead; ++j) {
          begin(sums[j % 2]);
          load_weights(w);
          wgmma_wait<1>();
          end(sums[(j + 1) % 2], w);
        }
        load_weights(w);
        wgmma_wait<0>();
        end(sums[(kAhead + 1) % 2], w);
      }
#pragma unroll 1
      for (; i < p.k; ++i) {
        begin(sums[0]);
        load_weights(w);
        wgmma_wait<0>();
        end(sums[0], w);
      }
    } else {
      bool fresh = !problem.chain_from_out;
      int left = p.chunk;
#pragma unroll 1
      for (int i = 0; i < p.k; ++i) {
        const bool ends = !S::long_chunks || --left == 0 || i + 1 == p.k;
        const uint32_t at = shared + ring.stage * (S::a_bytes + S::b_bytes);
        const uint32_t weights = shared + S::weights_at + ring.stage * S::weight_bytes;
        barrier_wait(full_barrier<S>(shared, ring.stage), ring.parity);
#pragma unroll
        for (int block = 0; block < S::blocks; ++block) {
          const uint64_t a = wgmma_descriptor<true>(at + (warpgroup * S::blocks + block) * kBlockBytes);
          const uint64_t b = wgmma_descriptor<true>(at + S::a_bytes);
          if (S::turns) named_sync(kTurn + warpgroup, 256);
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < kStageK / kFp8Step; ++step)
            wgmma_fp8<S::a_type, S::b_type>(sum, a + step * 2, b + step * 2, step || (S::long_chunks && !fresh));
          wgmma_commit();
          give_turn((warpgroup + 1) % kConsumers);
          float w[S::column_blocks][2];
          const uint32_t of_rows =
              weights + ((warpgroup * S::blocks + block) * 64 + thread / 32 * kWarpRows + lane / 4) * 4;
#pragma unroll
          for (int l = 0; l < S::column_blocks; ++l)
#pragma unroll
            for (int h = 0; h < 2; ++h) w[l][h] = problem.along_k ? load_word(of_rows + (l * S::m + h * 8) * 4) : 1.0f;
          if (by_column) {
            wgmma_wait<0>();
#pragma unroll
            for (int j = 0; j < S::registers; j += 4) {
              const float2 sb = load_pair(weights + (S::row_weights + j * 2 + lane % 4 * 2) * 4);
              total[block][j] = fmaf(w[0][0] * sb.x, sum[j], total[block][j]);
              total[block][j + 1] = fmaf(w[0][0] * sb.y, sum[j + 1], total[block][j + 1]);
              total[block][j + 2] = fmaf(w[0][1] * sb.x, sum[j + 2], total[block][j + 2]);
              total[block][j + 3] = fmaf(w[0][1] * sb.y, sum[j + 3], total[block][j + 3]);
            }
          } else {
            wgmma_wait<0>();
          }
          if (block == S::blocks - 1 && lane < S::cluster_m + S::cluster_n - 1)
            barrier_arrive(empty_barrier<S>(shared, ring.stage), freed);
          if (ends && !by_column) add_chunk<S>(total[block], sum, w, split);
        }
        fresh = ends;
        if (ends) left = p.chunk;
        ring.next();
      }
    }

    if (scaled_after) {
      named_sync(1 + warpgroup, kWarpgroup);
#pragma unroll
      for (int j = 0; j < column_loads; ++j)
        if (thread + j * kWarpgroup < S::n) store_word(columns + (thread + j * kWarpgroup) * 4, column_scale[j]);
      named_sync(1 + warpgroup, kWarpgroup);
    }
#pragma unroll
    for (int block = 0; block < S::blocks; ++block) {
      float(&x)[S::registers] = total[block];
      const WarpRows<S> rows = rows_of(index, block);
      if (scaled_after) {
        const float sa_0 = row_scale[block * 2], sa_1 = row_scale[block * 2 + 1];
#pragma unroll
        for (int j = 0; j < S::registers; j += 4) {
          const float2 sb = load_pair(columns + (j * 2 + rows.lane % 4 * 2) * 4);
          x[j] = (x[j] * sb.x) * sa_0;
          x[j + 1] = (x[j + 1] * sb.y) * sa_0;
          x[j + 2] = (x[j + 2] * sb.x) * sa_1;
          x[j + 3] = (x[j + 3] * sb.y) * sa_1;
        }
      }
      if (p.bias)
        rows.each_element(p.bias, p.bias_type, rows.tile.bias_offset, p.bias_row_stride, p.bias_column_stride,
                          [&](int i, float bias) { x[i] = x[i] + bias; });
      if (p.out_type == Type::bf16) rows.template store<2, true>(x);
      else if (p.out_type == Type::f16) rows.template store<2, false>(x);
      else rows.template store<4, false>(x);
    }
  }
}

template <class S> __global__ void __launch_bounds__(S::threads, 1)
    scaled_gemm_kernel(const __grid_constant__ ScaledProblem p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::stages; ++i) {
      barrier_init(full_barrier<S>(shared, i), 1 + (p.along_k ? kWeighers / 32 : 0));
      barrier_init(empty_barrier<S>(shared, i), kConsumers * 4 * (S::cluster_m + S::cluster_n - 1));
    }
    fence_barrier_init();
    if (p.rows.k > 0) prefetch(&p.rows.a), prefetch(&p.rows.b);
  }
  cluster_sync_relaxed();
  let_next_kernel_start();
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, int(threadIdx.x) / kWarpgroup, 0);
  wait_for_previous_kernel();
  if (warpgroup == 0) {
    registers_down<40>();
    const int thread = int(threadIdx.x);
    if (thread == 0) produce<S>(p.rows, shared, rank);
    else if (thread >= kWarpgroup - kWeighers && p.along_k)
      weigh<S>(p, shared, rank, thread - (kWarpgroup - kWeighers));
  } else {
    registers_up<232>();
    consume<S>(p, shared, rank, warpgroup - 1);
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

MapShape map_of(const ScaledGemm &g, const Matrix &matrix, int operand, int64_t rows, int64_t row_stride,
                int box_rows) {
  MapShape map = {matrix.data,
                  matrix.type,
                  g.k,
                  rows,
                  rows == 1 ? kScaledUnit : row_stride,
                  kStageK,
                  box_rows,
                  g.batch.count > 1 ? 5 : 2,
                  {1, 1, 1},
                  {kScaledUnit, kScaledUnit, kScaledUnit}};
  for (int i = 0; i < g.batch.dims; ++i)
    if (g.batch.stride[operand][i]) {
      map.batch_shape[i] = g.batch.shape[i];
      map.batch_stride[i] = g.batch.stride[operand][i];
    }
  return map;
}

template <class S> pydet_status launch_shape(const char *name, const ScaledGemm &g) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  ScaledProblem problem = {};
  Sm90Problem &p = problem.rows;
  EncodeTensorMap encode = nullptr;
  if (pydet_status status = find_encoder(name, &encode)) return status;
  if (g.k > 0) {
    const MapShape a = map_of(g, g.a, g.kA, g.m, g.a.row_stride, S::m / S::cluster_n);
    const MapShape b = map_of(g, g.b, g.kB, g.n, g.b.col_stride, S::n / S::cluster_m);
    if (pydet_status status = make_map(name, encode, a, &p.a)) return status;
    if (pydet_status status = make_map(name, encode, b, &p.b)) return status;
  }
  const int64_t unit = kScaledUnit / size_of(g.out.type);
  p.out_stride = g.out.row_stride;  // between rows, since out is along n
  p.out_aligned = reinterpret_cast<uintptr_t>(g.out.data) % kScaledUnit == 0 && (g.m == 1 || p.out_stride % unit == 0);
  for (int i = 0; i < g.batch.dims; ++i) p.out_aligned &= g.batch.stride[g.kOut][i] % unit == 0;
  p.rows_move = true;  // but not columns, which share scales
  p.m = int(g.m), p.n = int(g.n), p.k = int(cut_up(g.k, kStageK));
  p.chunk = std::max(1, g.k_chunk ? int(std::min(g.k_chunk, g.k + kStageK) / kStageK) : p.k);
  p.cluster_rows = int(cut_up(g.m, S::m * S::cluster_m));
  p.cluster_columns = int(cut_up(g.n, S::n * S::cluster_n));
  p.tiles = int(p.cluster_rows * p.cluster_columns * g.batch.count);
  p.band = std::max(1, 2048 / S::m / S::cluster_m);
  p.batched = g.batch.count > 1;
  p.accumulate = g.accumulate;
  p.out_type = g.out.type, p.out = g.out.data;
  p.bias = g.bias.data, p.bias_type = g.bias.type;
  p.bias_row_stride = g.bias.row_stride, p.bias_column_stride = g.bias.col_stride;
  for (int i = 0; i < kSm90MaxBatch; ++i) {
    const bool here = i < g.batch.dims;
    p.batch_shape[i] = here ? int(g.batch.shape[i]) : 1;
    p.a_moves[i] = here && g.batch.stride[g.kA][i];
    p.b_moves[i] = here && g.batch.stride[g.kB][i];
    p.out_batch_stride[i] = here ? g.batch.stride[g.kOut][i] : 0;
    p.bias_batch_stride[i] = here ? g.batch.stride[g.kBias][i] : 0;
  }
  problem.a_scale = scale_of(g, g.a_scale, g.kAScale);
  problem.b_scale = scale_of(g, g.b_scale, g.kBScale);
  problem.along_k = g.along_k;
  problem.chain_from_out = g.accumulate && g.k_chunk == 0 && g.k > 0;
  const int clusters = std::min(sm90_clusters(g.device.id, S::cluster), p.tiles);
  Launch shape = {name, gpu_stream(g.stream), dim3(unsigned(clusters * S::cluster)), dim3(S::threads)};
  shape.shared_bytes = S::shared_bytes;
  shape.cluster = S::cluster;
  shape.overlaps_previous = true;
  return launch(shape, scaled_gemm_kernel<S>, problem);
}

constexpr bool is_e4m3(const ScaledGemm &g) { return g.a.type == Type::e4m3 && g.b.type == Type::e4m3; }

// Of a tile, in us: of a stage of 128 k, and of what comes before and after. On an H100 all tiles have the same speed
// in their main loop, 1150 TFLOP/s, so that what differs is how well whole waves of them fit.
struct Cost {
  int m, n;
  double stage, rest;
};
constexpr Cost kCosts[] = {{256, 128, 0.96, 1.6}, {128, 192, 0.72, 1.2}, {128, 128, 0.48, 0.9}};

}  // namespace

bool scaled_gemm_e4m3_takes(const ScaledGemm &g) { return is_e4m3(g) && readable(g); }
pydet_status scaled_gemm_e4m3_256x128(const ScaledGemm &g) {
  return launch_shape<Shape<128, 128, 2, 1, Way::in_turn>>("cuda_scaled_gemm_sm90_e4m3_256x128", g);
}
pydet_status scaled_gemm_e4m3_128x192(const ScaledGemm &g) {
  return launch_shape<Shape<64, 192, 2, 1, Way::at_will>>("cuda_scaled_gemm_sm90_e4m3_128x192", g);
}
pydet_status scaled_gemm_e4m3_128x128_ahead(const ScaledGemm &g) {
  return launch_shape<Shape<64, 128, 2, 1, Way::ahead>>("cuda_scaled_gemm_sm90_e4m3_128x128_ahead", g);
}
pydet_status scaled_gemm_e4m3_128x128(const ScaledGemm &g) {
  return launch_shape<Shape<64, 128, 1, 2, Way::in_turn>>("cuda_scaled_gemm_sm90_e4m3_128x128", g);
}

int scaled_gemm_e4m3_best(const ScaledGemm &g) {
  const int64_t pairs = sm90_clusters(g.device.id, 2), stages = cut_up(g.k, kStageK);
  auto time_of = [&](const Cost &tile) {
    const int64_t tiles = cut_up(g.m, 2 * tile.m) * cut_up(g.n, tile.n) * g.batch.count;
    return double(cut_up(tiles, pairs)) * (tile.stage * double(stages) + tile.rest);
  };
  int best = 0;
  for (int i = 1; i < kScaledTiles; ++i)
    if (time_of(kCosts[i]) < time_of(kCosts[best])) best = i;
  return best;
}

}  // namespace pydet
