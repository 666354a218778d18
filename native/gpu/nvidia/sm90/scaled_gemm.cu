// Scaled GEMM of fp8 on Hopper's tensor cores (NUMERICS.md, "Scaled GEMM"), arithmetic sm90.
//
//   s_c = the chain of steps of 32 over chunk c of k, from +0;   D = fmaf(w_c, s_c, D), c ascending
//   w_c = fl(sa[m, c] sb[c, n]) with scales along k, else 1;     then out = round(fl(fl(D sb[n]) sa[m]) + bias)
//
// One persistent block an SM, two blocks a cluster. A producer thread brings tiles of m by 128 k and 128 k by 128 into a
// ring of stages by TMA; the blocks of a cluster lie side by side and each brings half of a's tile to both. Two
// warpgroups take turns to issue their wgmma: while one's chunk is on the tensor cores, the other adds its own to D. So
// the additions, which are half as many instructions again, cost no time of the tensor cores. Adding zeros past the end
// of K changes nothing, since a step leaves c on a grid that the next step keeps.

#include <algorithm>

#include "gpu/nvidia/sm90/rows.h"
#include "gpu/nvidia/sm90/wgmma_fp8.h"
#include "gpu/nvidia/tensor_map.h"
#include "scaled.h"

namespace pydet {
namespace {

constexpr int kStageK = kScaleGroup;  // of k in a stage, 128 bytes
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kSharedBytes = 227 << 10;  // the most a block may have
constexpr int kTurn = 4;                 // the first of the named barriers by which the warpgroups take turns

struct DeviceScale {
  const char *data;  // NULL: 1
  Type type;
  bool blocks;
  int64_t stride, chunk_stride;
  int64_t batch_stride[kSm90MaxBatch];
};

struct ScaledProblem {
  Sm90Problem rows;  // where tiles and out lie; its k and chunk count stages
  DeviceScale a_scale, b_scale;
  bool along_k, chain_from_out;  // chain_from_out: the one chain starts from out, not D
};

template <int rows_a_warpgroup, Type a, Type b> struct Shape {
  static constexpr Type a_type = a, b_type = b;
  static constexpr int blocks = rows_a_warpgroup / 64;  // of 64 rows
  static constexpr int m = kConsumers * rows_a_warpgroup, n = 128;
  static constexpr int cluster_m = 1, cluster_n = 2, cluster = 2;
  static constexpr int threads = kWarpgroup * (1 + kConsumers), registers = n / 2;
  static constexpr int a_bytes = m * kRowBytes, b_bytes = n * kRowBytes;
  static constexpr int staging_bytes = kConsumers * 4 * kPieceBytes;
  static constexpr int stages = std::min(6, (kSharedBytes - staging_bytes - 256) / (a_bytes + b_bytes));
  static constexpr int staging_at = stages * (a_bytes + b_bytes), barriers_at = staging_at + staging_bytes;
  static constexpr int shared_bytes = barriers_at + stages * 16;
  // Else there are registers for the chain of one stage, and for one weight a row, alone.
  static constexpr bool long_chunks = blocks == 1, by_column = blocks == 1;
  static_assert(stages >= 3 && shared_bytes <= kSharedBytes, "the ring must fit");
};

__device__ __forceinline__ float load_scale(const DeviceScale &scale, int64_t at) {
  return scale.type == Type::f32 ? __ldg(reinterpret_cast<const float *>(scale.data) + at)
                                 : f32_from_e8m0(__ldg(reinterpret_cast<const uint8_t *>(scale.data) + at));
}
// Each column has its own.
__device__ __forceinline__ bool by_columns(const DeviceScale &scale) { return !scale.blocks && scale.stride != 0; }

__device__ __forceinline__ int64_t batch_offset(const DeviceScale &scale, const Tile &tile) {
  int64_t offset = 0;
  for (int d = 0; d < kSm90MaxBatch; ++d) offset += tile.batch[d] * scale.batch_stride[d];
  return offset;
}

template <class S> __device__ __forceinline__ void produce(const Sm90Problem &p, uint32_t shared, int rank) {
  constexpr int share = S::m / S::cluster;
  int stage = 0, parity = 0;
  wait_for_previous_kernel();
  for (int index = int(blockIdx.x) / S::cluster; index < p.tiles; index += int(gridDim.x) / S::cluster) {
    const Tile tile = tile_of<S>(p, index, rank);
    Place a_place = {}, b_place = {};
    for (int d = 0; d < kSm90MaxBatch; ++d) {
      a_place.batch[d] = p.a_moves[d] ? tile.batch[d] : 0;
      b_place.batch[d] = p.b_moves[d] ? tile.batch[d] : 0;
    }
    a_place.y = tile.row + rank * share, b_place.y = tile.column;
    for (int i = 0; i < p.k; ++i) {
      const uint32_t full = shared + S::barriers_at + stage * 8, empty = full + S::stages * 8;
      const uint32_t a = shared + stage * (S::a_bytes + S::b_bytes) + rank * share * kRowBytes;
      const uint32_t b = shared + stage * (S::a_bytes + S::b_bytes) + S::a_bytes;
      a_place.x = b_place.x = i * kStageK;
      barrier_wait(empty, parity ^ 1);
      barrier_expect(full, S::a_bytes + S::b_bytes);
      if (p.batched) {
        load_box<5, true>(a, &p.a, full, a_place, uint16_t(3));
        load_box<5, false>(b, &p.b, full, b_place, uint16_t(0));
      } else {
        load_box<2, true>(a, &p.a, full, a_place, uint16_t(3));
        load_box<2, false>(b, &p.b, full, b_place, uint16_t(0));
      }
      if (++stage == S::stages) stage = 0, parity ^= 1;
    }
  }
  // The block may end when every arrival that the other owes it has come.
  for (int i = 0; i < S::stages; ++i) {
    barrier_wait(shared + S::barriers_at + (S::stages + stage) * 8, parity ^ 1);
    if (++stage == S::stages) stage = 0, parity ^= 1;
  }
}

// total += w sum for a thread's part of 64 rows: rows lane / 4 and 8 on, of weights w_0 and w_1.
template <int registers>
__device__ __forceinline__ void add_chunk(float (&total)[registers], const float (&sum)[registers], float w_0,
                                          float w_1) {
#pragma unroll
  for (int i = 0; i < registers; i += 4) {
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
  int stage = 0, parity = 0;
  wait_for_previous_kernel();
  auto give_turn = [](int to) { asm volatile("bar.arrive %0, %1;" ::"r"(kTurn + to), "n"(256) : "memory"); };
  if (warpgroup == kConsumers - 1) give_turn(0);
  for (int index = int(blockIdx.x) / S::cluster; index < p.tiles; index += int(gridDim.x) / S::cluster) {
    // Worked out anew on each side of the main loop, which leaves no registers to keep it in.
    auto rows_of = [&](int i, int block) {
      int t = thread;
      asm volatile("" : "+r"(i), "+r"(t));
      const Tile tile = tile_of<S>(p, i, rank);
      return WarpRows<S>{p, tile, piece, tile.row + (warpgroup * S::blocks + block) * 64 + t / 32 * kWarpRows, t % 32};
    };
    float total[S::blocks][S::registers], sum[S::registers];
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
    if (S::long_chunks && problem.chain_from_out)
#pragma unroll
      for (int i = 0; i < S::registers; ++i) sum[i] = total[0][i], total[0][i] = 0;

    // Scales of a stage, loaded one ahead.
    const DeviceScale &a_scale = problem.a_scale, &b_scale = problem.b_scale;
    const bool scales_a = problem.along_k && a_scale.data, scales_b = problem.along_k && b_scale.data;
    const bool by_column = S::by_column && scales_b && by_columns(b_scale);
    const Tile here = tile_of<S>(p, index, rank);
    const int row = here.row, first_column = here.column;
    const int64_t a_at = batch_offset(a_scale, here), b_at = batch_offset(b_scale, here);
    auto a_row = [&](int block, int h) {
      int t = thread;
      asm volatile("" : "+r"(t));
      return a_at + min(row + (warpgroup * S::blocks + block) * 64 + t / 32 * kWarpRows + t % 32 / 4 + 8 * h, p.m - 1) *
                        a_scale.stride;
    };
    auto column = [&](int i) {
      return min(first_column + i / 4 * 8 + lane % 4 * 2 + i % 2, p.n - 1);
    };  // of register i
    float a_next[S::blocks][2], b_next = 1;
    auto load_scales = [&](int chunk) {
#pragma unroll
      for (int block = 0; block < S::blocks; ++block)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          a_next[block][h] = scales_a ? load_scale(a_scale, a_row(block, h) + chunk * a_scale.chunk_stride) : 1.0f;
      if (scales_b && !by_column)
        b_next = load_scale(b_scale,
                            b_at + (b_scale.blocks ? min(first_column, p.n - 1) / kScaleGroup * b_scale.stride : 0) +
                                chunk * b_scale.chunk_stride);
    };
    if (p.k > 0) load_scales(0);

    bool fresh = !problem.chain_from_out;
    int left = p.chunk;
#pragma unroll 1
    for (int i = 0; i < p.k; ++i) {
      float w[S::blocks][2];  // by_column: without b's
#pragma unroll
      for (int block = 0; block < S::blocks; ++block)
#pragma unroll
        for (int h = 0; h < 2; ++h) w[block][h] = a_next[block][h] * b_next;
      if (i + 1 < p.k) load_scales(i + 1);
      const bool ends = !S::long_chunks || --left == 0 || i + 1 == p.k;
      barrier_wait(shared + S::barriers_at + stage * 8, parity);
      const uint32_t at = shared + stage * (S::a_bytes + S::b_bytes);
#pragma unroll
      for (int block = 0; block < S::blocks; ++block) {
        const uint64_t a = wgmma_descriptor<true>(at + (warpgroup * S::blocks + block) * kBlockBytes);
        const uint64_t b = wgmma_descriptor<true>(at + S::a_bytes);
        named_sync(kTurn + warpgroup, 256);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStageK / kFp8Step; ++step)
          wgmma_fp8<S::a_type, S::b_type>(sum, a + step * 2, b + step * 2, step || (S::long_chunks && !fresh));
        wgmma_commit();
        give_turn(1 - warpgroup);
        wgmma_wait<0>();
        if (block == S::blocks - 1 && thread < S::cluster)
          barrier_arrive(shared + S::barriers_at + (S::stages + stage) * 8, thread);
        if (!ends) continue;
        if (by_column) {
#pragma unroll
          for (int j = 0; j < S::registers; j += 4)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float sb = load_scale(b_scale, b_at + column(j + e) * b_scale.stride + i * b_scale.chunk_stride);
              total[block][j + e] = fmaf(w[block][0] * sb, sum[j + e], total[block][j + e]);
              total[block][j + 2 + e] = fmaf(w[block][1] * sb, sum[j + 2 + e], total[block][j + 2 + e]);
            }
        } else {
          add_chunk(total[block], sum, w[block][0], w[block][1]);
        }
      }
      fresh = ends;
      if (ends) left = p.chunk;
      if (++stage == S::stages) stage = 0, parity ^= 1;
    }

#pragma unroll
    for (int block = 0; block < S::blocks; ++block) {
      float(&x)[S::registers] = total[block];
      const WarpRows<S> rows = rows_of(index, block);
      if (!problem.along_k && (a_scale.data || b_scale.data)) {
        const float sa_0 = a_scale.data ? load_scale(a_scale, a_row(block, 0)) : 1.0f;
        const float sa_1 = a_scale.data ? load_scale(a_scale, a_row(block, 1)) : 1.0f;
#pragma unroll
        for (int j = 0; j < S::registers; j += 4)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float sb = b_scale.data ? load_scale(b_scale, b_at + column(j + e) * b_scale.stride) : 1.0f;
            x[j + e] = (x[j + e] * sb) * sa_0;
            x[j + 2 + e] = (x[j + 2 + e] * sb) * sa_1;
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
      barrier_init(shared + S::barriers_at + i * 8, 1);
      barrier_init(shared + S::barriers_at + (S::stages + i) * 8, kConsumers * S::cluster);
    }
    fence_barrier_init();
    if (p.rows.k > 0) prefetch(&p.rows.a), prefetch(&p.rows.b);
  }
  cluster_sync_relaxed();
  let_next_kernel_start();
  const int warpgroup = int(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    registers_down<40>();
    if (threadIdx.x == 0) produce<S>(p.rows, shared, rank);
  } else {
    registers_up<232>();
    consume<S>(p, shared, rank, warpgroup - 1);
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int kUnit = 16;  // bytes: what the copy engine's addresses and strides are multiples of
constexpr int64_t kMost = int64_t(1) << 30;

int64_t cut(int64_t extent, int64_t size) { return (extent + size - 1) / size; }

bool aligned(const Matrix &matrix, int64_t k, int64_t k_stride, int64_t extent, int64_t stride) {
  const bool rows = extent == 1 || (stride % kUnit == 0 && stride > 0 && stride < int64_t(1) << 38);
  return k == 0 || (reinterpret_cast<uintptr_t>(matrix.data) % kUnit == 0 && (k == 1 || k_stride == 1) && rows);
}

bool aligned_batch(const ScaledGemm &g, int operand) {
  for (int i = 0; i < g.batch.dims; ++i)
    if (g.batch.stride[operand][i] % kUnit) return false;
  return true;
}

bool readable(const ScaledGemm &g) {
  return aligned(g.a, g.k, g.a.col_stride, g.m, g.a.row_stride) && aligned_batch(g, g.kA) &&
         aligned(g.b, g.k, g.b.row_stride, g.n, g.b.col_stride) && aligned_batch(g, g.kB) && g.m <= kMost &&
         g.n <= kMost && g.k <= kMost && cut(g.m, 128) * cut(g.n, 128) <= kMost / g.batch.count &&
         g.batch.dims <= kSm90MaxBatch;
}

// Says what is not readable: after this kernel no other is tried.
pydet_status unreadable(const ScaledGemm &g) {
  const bool a = aligned(g.a, g.k, g.a.col_stride, g.m, g.a.row_stride) && aligned_batch(g, g.kA);
  const bool b = aligned(g.b, g.k, g.b.row_stride, g.n, g.b.col_stride) && aligned_batch(g, g.kB);
  if (a && b)
    return fail(PYDET_UNSUPPORTED,
                "scaled_gemm: an extent passes 2^30, or the batch needs more than %d strides, on a GPU", kSm90MaxBatch);
  return fail(PYDET_UNSUPPORTED,
              "scaled_gemm: the tensor cores do not read %s, want its data and strides in multiples of %d"
              " bytes",
              a ? "b" : "a", kUnit);
}

MapShape map_of(const ScaledGemm &g, const Matrix &matrix, int operand, int64_t rows, int64_t row_stride,
                int box_rows) {
  MapShape map = {matrix.data,
                  matrix.type,
                  g.k,
                  rows,
                  rows == 1 ? kUnit : row_stride,
                  kStageK,
                  box_rows,
                  g.batch.count > 1 ? 5 : 2,
                  {1, 1, 1},
                  {kUnit, kUnit, kUnit}};
  for (int i = 0; i < g.batch.dims; ++i)
    if (g.batch.stride[operand][i]) {
      map.batch_shape[i] = g.batch.shape[i];
      map.batch_stride[i] = g.batch.stride[operand][i];
    }
  return map;
}

DeviceScale scale_of(const ScaledGemm &g, const Scale &scale, int operand) {
  DeviceScale device = {scale.data, scale.type, scale.blocks, scale.stride, scale.chunk_stride, {}};
  for (int i = 0; i < g.batch.dims; ++i) device.batch_stride[i] = g.batch.stride[operand][i];
  return device;
}

template <class S> pydet_status launch_shape(const char *name, const ScaledGemm &g) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  ScaledProblem problem = {};
  Sm90Problem &p = problem.rows;
  EncodeTensorMap encode = nullptr;
  if (pydet_status status = find_encoder(name, &encode)) return status;
  if (g.k > 0) {
    const MapShape a = map_of(g, g.a, g.kA, g.m, g.a.row_stride, S::m / S::cluster);
    const MapShape b = map_of(g, g.b, g.kB, g.n, g.b.col_stride, S::n);
    if (pydet_status status = make_map(name, encode, a, &p.a)) return status;
    if (pydet_status status = make_map(name, encode, b, &p.b)) return status;
  }
  const int64_t unit = kUnit / size_of(g.out.type);
  p.out_stride = g.out.row_stride;  // between rows, since out is along n
  p.out_aligned = reinterpret_cast<uintptr_t>(g.out.data) % kUnit == 0 && (g.m == 1 || p.out_stride % unit == 0);
  for (int i = 0; i < g.batch.dims; ++i) p.out_aligned &= g.batch.stride[g.kOut][i] % unit == 0;
  p.rows_move = true;  // but not columns, which share scales
  p.m = int(g.m), p.n = int(g.n), p.k = int(cut(g.k, kStageK));
  p.chunk = std::max(1, g.k_chunk ? int(std::min(g.k_chunk, g.k + kStageK) / kStageK) : p.k);
  p.cluster_rows = int(cut(g.m, S::m));
  p.cluster_columns = int(cut(g.n, S::n * S::cluster_n));
  p.tiles = int(p.cluster_rows * p.cluster_columns * g.batch.count);
  p.band = std::max(1, 2048 / S::m);
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
  const int clusters = std::min(gpu_multiprocessors(g.device.id) / S::cluster, p.tiles);
  Launch shape = {name, gpu_stream(g.stream), dim3(unsigned(clusters * S::cluster)), dim3(S::threads)};
  shape.shared_bytes = S::shared_bytes;
  shape.cluster = S::cluster;
  shape.overlaps_previous = true;
  return launch(shape, scaled_gemm_kernel<S>, problem);
}

template <int rows> pydet_status launch_types(const char *name, const ScaledGemm &g) {
  return with_type<kFp8Types>(g.a.type, [&](auto a) {
    return with_type<kFp8Types>(
        g.b.type, [&](auto b) { return launch_shape<Shape<rows, decltype(a)::value, decltype(b)::value>>(name, g); });
  });
}

}  // namespace

bool scaled_gemm_sm90_256_takes(const ScaledGemm &g) { return readable(g); }
// Where weights are loaded for every chunk, the smaller tile is faster (measured on an H100: 650 against 560 TFLOP/s).
bool scaled_gemm_sm90_256_prefers(const ScaledGemm &g) {
  const int64_t pairs = gpu_multiprocessors(g.device.id) / 2;
  return !g.along_k && cut(g.m, 256) * cut(g.n, 256) * g.batch.count >= pairs;
}
pydet_status scaled_gemm_sm90_256(const ScaledGemm &g) { return launch_types<128>("cuda_scaled_gemm_sm90_256x128", g); }

pydet_status scaled_gemm_sm90_128(const ScaledGemm &g) {
  if (!readable(g)) return unreadable(g);
  return launch_types<64>("cuda_scaled_gemm_sm90_128x128", g);
}

}  // namespace pydet
