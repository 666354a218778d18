// Scaled GEMM of fp8 on Hopper's tensor cores (NUMERICS.md, "Scaled GEMM"), arithmetic sm90.
//
//   s_c = the chain of steps of 32 over chunk c of k, from +0;   D = fmaf(w_c, s_c, D), c ascending
//   w_c = fl(sa[m, c] sb[c, n]) with scales along k, else 1;     then out = round(fl(fl(D sb[n]) sa[m]) + bias)
//
// One persistent block an SM, two blocks a cluster. Two threads bring tiles of m by 128 k and 128 k by n into a
// ring of stages by TMA; the blocks of a cluster lie under each other and each brings half of b's tile to both, or side
// by side and halves of a's. A warp or two put the scales of each chunk, or of a tile, into shared memory, so that the
// warpgroups that multiply only read them: where these loaded scales themselves, the kernel had half of its speed. The
// additions, which are half as many instructions again, are made while the other warpgroup's chunk is on the tensor
// cores, or this one's next. Results of 16 bits are stored by the copy engine from shared memory, while the next tile's
// products begin: 2 to 4 % for short K, more where rows end within a box. Adding zeros past the end of K changes
// nothing, since a step leaves c on a grid that the next step keeps.

#include "gpu/nvidia/sm90/choose.h"
#include "gpu/nvidia/sm90/scaled_tiles.h"
#include "gpu/nvidia/sm90/pipe/wgmma.h"
#include "gpu/nvidia/tensor_map.h"

namespace pydet {

// Of products with an operand of e5m2, whose kernels are an object of their own (PYDET_SCALED_E5M2). index: as Of's.
template <int index> pydet_status scaled_gemm_sm90_e5m2(const ScaledGemm &);

namespace {

// The scales of one chunk that a thread needs for its two rows of 64, lane / 4 and 8 further on: a[row] is the row's.
// b[0] is that of the block of 128 columns in which the tile begins, b[1] that of the next block, for a tile that lies
// in two. Where b has a scale for each column they are not here, but read as columns are added.
template <class S> struct Weights {
  float a[2] = {1, 1}, b[2] = {1, 1};
  __device__ __forceinline__ void load(uint32_t of_rows, int pitch, uint32_t of_block) {
    a[0] = load_word(of_rows), a[1] = load_word(of_rows + 8 * pitch);
    b[0] = load_word(of_block);
    if (S::crosses) b[1] = load_word(of_block + 4);
  }
  __device__ __forceinline__ float of(int row, bool next) const { return a[row] * b[next]; }
};

// total += w sum. Where no chunk has weights this is an addition, to the same bits: it reads two registers, not three,
// and 128x128 is 4 % faster by it.
template <class S>
__device__ __forceinline__ void add_chunk(float (&total)[S::registers], const float (&sum)[S::registers],
                                          const Weights<S> &weights, int split) {
#pragma unroll
  for (int i = 0; i < S::registers; ++i) {
    const int column = i / 4 * 8 / S::of_one * S::of_one, row = i % 4 / 2;
    const float w = S::crosses && column >= split ? weights.of(row, true) : weights.of(row, false);
    total[i] = S::weighed ? fmaf(w, sum[i], total[i]) : total[i] + sum[i];
  }
}

// Until the copy engine has read what this warp left to it.
__device__ __forceinline__ void wait_for_boxes(int lane) {
  if (lane == 0) wait_until_read();
  __syncwarp();
}
// Rounds the accumulators of a warp's 16 rows, which the copy engine stores, or the warp where it cannot.
template <bool bf16, class S>
__device__ __forceinline__ void store_pieces(WarpRows<S> rows, const ScaledProblem &problem,
                                             const float (&d)[S::registers]) {
  // The last piece may overlap the one before: it has the same bits there.
  auto start_of = [](int i) { return min(i * kPieceColumns, S::n - kPieceColumns); };
#pragma unroll
  for (int i = 0; i < S::block_pieces; ++i)
    stage_halves<bf16>(d + start_of(i) / 2, rows.piece + i * kPieceBytes, rows.lane);
  if (problem.out_mapped) fence_stores();
  __syncwarp();
  if (!problem.out_mapped) {
#pragma unroll 1
    for (int i = 0; i < S::block_pieces; ++i, rows.piece += kPieceBytes)
      rows.template copy_out<2>(rows.tile.column + start_of(i));
  } else if (rows.lane == 0) {
#pragma unroll
    for (int i = 0; i < S::block_pieces; ++i)
      store_box<2>(&problem.out_map, {rows.tile.column + start_of(i), rows.row, {}}, rows.piece + i * kPieceBytes);
    commit_boxes();
  }
}

template <class S>
__device__ __forceinline__ void consume(const ScaledProblem &problem, uint32_t shared, int rank, int warpgroup) {
  const Sm90Problem &p = problem.rows;
  const int thread = int(threadIdx.x) % kWarpgroup, lane = thread % 32;
  const uint32_t pieces = shared + S::staging_at + (warpgroup * 4 + thread / 32) * S::warp_pieces * kPieceBytes;
  const DeviceScale &a_scale = problem.a_scale, &b_scale = problem.b_scale;
  const bool by_column = S::by_column && problem.along_k && by_columns(b_scale);
  const bool along_k = S::weighed && (S::always_along_k || problem.along_k);
  const bool scaled_after = !S::always_along_k && !problem.along_k && (a_scale.data || b_scale.data);
  Cursor<S::stages> ring, done, round;  // done: whose chunks are still to be added
  auto give_turn = [](int to) {
    if (S::turns) named_arrive(kTurn + to, S::consumers * kWarpgroup);
  };
  if (warpgroup == S::consumers - 1) give_turn(0);
  // Scales that are not brought are 1.
  if (S::weighed && !S::long_chunks && !along_k) {
    for (int i = int(threadIdx.x) - kWarpgroup; i < S::rounds_bytes / 4; i += S::consumers * kWarpgroup)
      store_word(shared + S::rounds_at + i * 4, 1);
    if (thread < S::stages * S::chunk_bytes / 4) store_word(shared + S::chunks_at + thread * 4, 1);
    named_sync(kTurn, S::consumers * kWarpgroup);
  }
  // The low words of the first stage's descriptors, made once and the same in all lanes: made anew in each stage, a
  // chain of five instructions stands before its first product.
  auto descriptor_word = [](uint32_t at) { return __shfl_sync(0xFFFFFFFFu, uint32_t(wgmma_descriptor<true>(at)), 0); };
  auto descriptor = [](uint32_t word) { return wgmma_descriptor<true>(0) >> 32 << 32 | word; };
  const uint32_t a_word = descriptor_word(shared + warpgroup * S::blocks * kBlockBytes);
  const uint32_t b_word = descriptor_word(shared + S::a_bytes);
  // Of chunk `i` of the round.
  const RoundPitch pitch = round_pitch<S>(problem);
  auto load_weights = [&](Weights<S> &weights, int stage, int i, int block) {
    const int row = (warpgroup * S::blocks + block) * 64 + thread / 32 * kWarpRows + lane / 4;
    weights.load(row_scales<S>(shared, round.stage) + row * pitch.row + i * pitch.chunk, pitch.row,
                 column_scales<S>(shared, stage));
  };
  for (int index = int(blockIdx.x) / S::cluster; index < p.tiles; index += int(gridDim.x) / S::cluster) {
    // Worked out anew on each side of the main loop, which leaves no registers to keep it in.
    auto rows_of = [&](int i, int block) {
      int t = thread;
      asm volatile("" : "+r"(i), "+r"(t));
      const Tile tile = tile_of<S>(p, i, rank);
      const int row = tile.row + (warpgroup * S::blocks + block) * 64 + t / 32 * kWarpRows;
      return WarpRows<S>{p, tile, pieces + block * S::block_pieces * kPieceBytes, row, t % 32};
    };
    const int split = S::crosses ? kScaleGroup - tile_of<S>(p, index, rank).column % kScaleGroup : 0;
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

    if constexpr (S::ahead) {
      float sums[2][S::registers];
      auto begin = [&](float(&x)[S::registers]) {
        const uint32_t stage_words = ring.stage * (S::stage_bytes / 16);
        barrier_wait(Ring<S>::full_of(shared, ring.stage), ring.parity);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStageK / kFp8Step; ++step)
          wgmma_fp8<S::a_type, S::b_type>(x, descriptor(a_word + stage_words + step * 2),
                                          descriptor(b_word + stage_words + step * 2), step);
        wgmma_commit();
        ring.next();
      };
      // The first of them is `first` in a round.
      auto make_chunks = [&](auto chunks, int first) {
        constexpr int count = decltype(chunks)::value;
        begin(sums[0]);
#pragma unroll
        for (int j = 0; j < count; ++j) {
          if (j + 1 < count) begin(sums[(j + 1) % 2]);
          Weights<S> weights;
          if (S::weighed) load_weights(weights, done.stage, first + j % kRound, 0);
          if (j + 1 < count) wgmma_wait<1>();
          else wgmma_wait<0>();
          if (lane < S::cluster) barrier_arrive(Ring<S>::empty_of(shared, done.stage), lane);
          done.next();
          if (j % kRound == kRound - 1) round.next();
          add_chunk<S>(total[0], sums[j % 2], weights, split);
        }
      };
      static_assert(kAhead == 8 && kRound == 4, "turns of 8, 4, 2 and 1 chunks, of which the last two share a round");
      // The first warpgroup begins with half a turn, so that the two are not both without products where a turn ends.
      bool half = warpgroup == 0;
      int left = p.k;
#pragma unroll 1
      while (left >= kAhead / 2) {
        if (left >= kAhead && !half) {
          make_chunks(std::integral_constant<int, kAhead>(), 0);
          left -= kAhead;
        } else {
          make_chunks(std::integral_constant<int, kAhead / 2>(), 0);
          left -= kAhead / 2;
        }
        half = false;
      }
      if (left & 2) make_chunks(std::integral_constant<int, 2>(), 0);
      if (left & 1) make_chunks(std::integral_constant<int, 1>(), left & 2);
      if (left) round.next();
    } else {
      bool fresh = !problem.chain_from_out;
      int left = p.chunk;
      auto make_chunk = [&](int i, int of_round) {
        const bool ends = !S::long_chunks || --left == 0 || i + 1 == p.k;
        const uint32_t stage_words = ring.stage * (S::stage_bytes / 16);
        barrier_wait(Ring<S>::full_of(shared, ring.stage), ring.parity);
#pragma unroll
        for (int block = 0; block < S::blocks; ++block) {
          if (S::turns) named_sync(kTurn + warpgroup, 256);
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < kStageK / kFp8Step; ++step)
            wgmma_fp8<S::a_type, S::b_type>(
                sum, descriptor(a_word + stage_words + block * (kBlockBytes / 16) + step * 2),
                descriptor(b_word + stage_words + step * 2), step || (S::long_chunks && !fresh));
          wgmma_commit();
          give_turn((warpgroup + 1) % S::consumers);
          Weights<S> weights;
          if (S::weighed && (!S::long_chunks || problem.along_k)) load_weights(weights, ring.stage, of_round, block);
          wgmma_wait<0>();
          if (by_column) {
#pragma unroll
            for (int j = 0; j < S::registers; j += 4) {
              const float2 sb = load_pair(column_scales<S>(shared, ring.stage) + (j * 2 + lane % 4 * 2) * 4);
              total[block][j] = fmaf(weights.a[0] * sb.x, sum[j], total[block][j]);
              total[block][j + 1] = fmaf(weights.a[0] * sb.y, sum[j + 1], total[block][j + 1]);
              total[block][j + 2] = fmaf(weights.a[1] * sb.x, sum[j + 2], total[block][j + 2]);
              total[block][j + 3] = fmaf(weights.a[1] * sb.y, sum[j + 3], total[block][j + 3]);
            }
          }
          if (block == S::blocks - 1 && lane < S::cluster) barrier_arrive(Ring<S>::empty_of(shared, ring.stage), lane);
          if (ends && !by_column) add_chunk<S>(total[block], sum, weights, split);
        }
        fresh = ends;
        if (ends) left = p.chunk;
        ring.next();
        if (of_round == kRound - 1) round.next();
      };
      // Turns of four stages without a way out, so that the next stage's barrier is asked between the last one's
      // additions.
      int i = 0;
      if (!S::long_chunks)
#pragma unroll 1
        for (; i + S::unrolled <= p.k; i += S::unrolled)
#pragma unroll
          for (int j = 0; j < S::unrolled; ++j) make_chunk(i + j, j);
#pragma unroll 1
      for (; i < p.k; ++i) make_chunk(i, i % kRound);
      if (p.k % kRound) round.next();
    }

    if (S::stores_boxes) wait_for_boxes(lane);  // of the tile before
    if (scaled_after) named_sync(kScalesReady, S::scales_threads);
    const WarpRows<S> first_rows = rows_of(index, 0);
#pragma unroll
    for (int block = 0; block < S::blocks; ++block) {
      float(&x)[S::registers] = total[block];
      const WarpRows<S> rows = {p, first_rows.tile, first_rows.piece + block * S::block_pieces * kPieceBytes,
                                first_rows.row + block * 64, first_rows.lane};
      if (scaled_after) {
        const uint32_t scales = shared + S::scales_at;
        const int row = (warpgroup * S::blocks + block) * 64 + thread / 32 * kWarpRows + lane / 4;
        const float sa_0 = load_word(scales + (S::n + row) * 4), sa_1 = load_word(scales + (S::n + row + 8) * 4);
#pragma unroll
        for (int j = 0; j < S::registers; j += 4) {
          const float2 sb = load_pair(scales + (j * 2 + lane % 4 * 2) * 4);
          x[j] = (x[j] * sb.x) * sa_0;
          x[j + 1] = (x[j + 1] * sb.y) * sa_0;
          x[j + 2] = (x[j + 2] * sb.x) * sa_1;
          x[j + 3] = (x[j + 3] * sb.y) * sa_1;
        }
        if (block == S::blocks - 1) named_arrive(kScalesRead, S::scales_threads);
      }
      if (p.bias)
        rows.each_element(p.bias, p.bias_type, rows.tile.bias_offset, p.bias_row_stride, p.bias_column_stride,
                          [&](int i, float bias) { x[i] = x[i] + bias; });
      if (p.out_type == Type::f32) {
        if constexpr (S::stores_f32) rows.template store<4, false>(x);
      } else if constexpr (S::stores_boxes) {
        if (p.out_type == Type::bf16) store_pieces<true>(rows, problem, x);
        else store_pieces<false>(rows, problem, x);
      } else {
        if (p.out_type == Type::bf16) rows.template store<2, true>(x);
        else rows.template store<2, false>(x);
      }
    }
  }
  if (S::stores_boxes) wait_for_boxes(lane);
}

template <class S> __global__ void __launch_bounds__(S::threads, 1)
    scaled_gemm_kernel(const __grid_constant__ ScaledProblem p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::stages; ++i) {
      barrier_init(Ring<S>::full_of(shared, i), 2 + (S::weighed && p.along_k ? S::bringing_threads : 0));
      barrier_init(Ring<S>::empty_of(shared, i), S::consumers * 4 * S::cluster);
    }
    fence_barrier_init();
    if (p.rows.k > 0) prefetch(&p.rows.a), prefetch(&p.rows.b);
  }
  cluster_sync_relaxed();
  let_next_kernel_start();
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, int(threadIdx.x) / kWarpgroup, 0);
  wait_for_previous_kernel();
  if (warpgroup == 0) {
    if constexpr (S::consumers > 1) registers_down<S::producer_registers>();
    const int thread = int(threadIdx.x);
    if (thread == 0) produce<S, false>(p, shared, rank);
    if (thread == 32) produce<S, true>(p, shared, rank);
    const int bringing = thread - (kWarpgroup - S::bringing_threads);
    if (bringing >= 0 && !p.along_k && (p.a_scale.data || p.b_scale.data)) bring_scales<S>(p, shared, rank, bringing);
    if constexpr (S::weighed)
      if (bringing >= 0 && p.along_k) bring_chunks<S>(p, shared, rank, bringing);
  } else {
    if constexpr (S::consumers > 1) registers_up<S::consumer_registers>();
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

Bring how_to_bring(const ScaledGemm &g) {
  if (!copied(g.a_scale) || !copied(g.b_scale)) return Bring::by_registers;
  const Scale &a = g.a_scale;
  bool aligned = reinterpret_cast<uintptr_t>(a.data) % 16 == 0;
  for (int i = 0; i < g.batch.dims; ++i) aligned &= g.batch.stride[g.kAScale][i] % 4 == 0;
  if (!aligned) return Bring::by_words;
  if (a.chunk_stride == 1 && a.stride % 4 == 0 && divide_up(g.k, kStageK) % kRound == 0) return Bring::by_rounds;
  return a.stride == 1 && a.chunk_stride % 4 == 0 && g.m % 4 == 0 ? Bring::by_fours : Bring::by_words;
}

// A single wave has nothing to hide the copy engine's stores behind, and uses their room for another stage. But boxes
// may end anywhere, where a warp stores what is left of a piece element by element.
template <class S> bool worth_boxes(const ScaledGemm &g) {
  const int64_t tiles = divide_up(g.m, S::m * S::cluster_m) * divide_up(g.n, S::n * S::cluster_n) * g.batch.count;
  return tiles > sm90_clusters(g.device.id, S::cluster) || g.n % kPieceColumns;
}

template <class S> pydet_status launch_shape(const ScaledGemm &g) {
  const char *const name = S::tile.name;
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  ScaledProblem problem = {};
  Sm90Problem &p = problem.rows;
  EncodeTensorMap encode = nullptr;
  if (pydet_status status = find_encoder(name, &encode)) return status;
  if (g.k > 0) {
    constexpr int a_share = S::m / S::cluster_n, b_share = S::n / S::cluster_m;
    MapShape a = map_of(g, g.a, g.kA, g.m, g.a.row_stride, a_share);
    MapShape b = map_of(g, g.b, g.kB, g.n, g.b.col_stride, b_share);
    if (pydet_status status = make_map(name, encode, a, &p.a)) return status;
    if (pydet_status status = make_map(name, encode, b, &p.b)) return status;
    a.box_rows = int(g.m % a_share), b.box_rows = int(g.n % b_share);
    if (g.m < S::m && a.box_rows)
      if (pydet_status status = make_map(name, encode, a, &problem.a_rest)) return status;
    if (b.box_rows)
      if (pydet_status status = make_map(name, encode, b, &problem.b_rest)) return status;
  }
  const int64_t unit = kScaledUnit / size_of(g.out.type);
  p.out_stride = g.out.row_stride;  // between rows, since out is along n
  p.out_aligned = reinterpret_cast<uintptr_t>(g.out.data) % kScaledUnit == 0 && (g.m == 1 || p.out_stride % unit == 0);
  for (int i = 0; i < g.batch.dims; ++i) p.out_aligned &= g.batch.stride[g.kOut][i] % unit == 0;
  p.rows_move = true;  // but not columns, which share scales
  p.m = int(g.m), p.n = int(g.n), p.k = int(divide_up(g.k, kStageK));
  p.chunk = std::max(1, int(Chunk{g.k_chunk}.of_chain(g.k, kStageK)));
  p.cluster_rows = int(divide_up(g.m, S::m * S::cluster_m));
  p.cluster_columns = int(divide_up(g.n, S::n * S::cluster_n));
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
  problem.bring = how_to_bring(g);
  const int clusters = std::min(sm90_clusters(g.device.id, S::cluster), p.tiles);
  problem.out_mapped =
      S::stores_boxes && g.out.type != Type::f32 && p.out_aligned && g.n % unit == 0 && !p.batched && worth_boxes<S>(g);
  if (problem.out_mapped) {
    const int64_t row_stride = g.m == 1 ? g.n : p.out_stride;
    const MapShape out = {g.out.data, g.out.type, g.n, g.m, row_stride, kPieceColumns, kWarpRows, 2, {}, {}};
    if (pydet_status status = make_map(name, encode, out, &problem.out_map)) return status;
  }
  problem.along_k = g.along_k;
  problem.chain_from_out = g.accumulate && g.k_chunk == 0 && g.k > 0;
  Launch shape = {name, gpu_stream(g.stream), dim3(unsigned(clusters * S::cluster)), dim3(S::threads)};
  shape.shared_bytes = S::shared_bytes;
  shape.cluster = S::cluster;
  shape.overlaps_previous = true;
  return launch(shape, scaled_gemm_kernel<S>, problem);
}

// Of the list, or the rest's; with as many blocks side by side as its clusters have.
template <int index, int blocks_n = 0> struct Of {
  static constexpr Fp8Tile tile = index < kFp8TileCount ? kFp8Tiles[index % kFp8TileCount] : kFp8Rest;
  static constexpr int cluster_n = blocks_n ? blocks_n : tile.cluster_n;
};
constexpr Type kE4m3 = Type::e4m3;

#if PYDET_SCALED_E5M2
template <class Its, bool stores_f32> pydet_status launch_types(const ScaledGemm &g) {
  return with_type<kFp8Types>(g.a.type, [&](auto a) {
    return with_type<kFp8Types>(g.b.type, [&](auto b) {
      constexpr Type a_type = decltype(a)::value, b_type = decltype(b)::value;
      if constexpr (a_type == kE4m3 && b_type == kE4m3) return pydet_status(PYDET_OK);  // never: the other object's
      else return launch_shape<Shape<Its, a_type, b_type, stores_f32, true>>(g);
    });
  });
}

}  // namespace

template <int index> pydet_status scaled_gemm_sm90_e5m2(const ScaledGemm &g) {
  if constexpr (index < kFp8TileCount)
    if (g.out.type != Type::f32) return launch_types<Of<index>, false>(g);
  return launch_types<Of<index>, true>(g);
}
template pydet_status scaled_gemm_sm90_e5m2<0>(const ScaledGemm &);
template pydet_status scaled_gemm_sm90_e5m2<1>(const ScaledGemm &);
template pydet_status scaled_gemm_sm90_e5m2<2>(const ScaledGemm &);
template pydet_status scaled_gemm_sm90_e5m2<3>(const ScaledGemm &);
template pydet_status scaled_gemm_sm90_e5m2<4>(const ScaledGemm &);
template pydet_status scaled_gemm_sm90_e5m2<kFp8TileCount>(const ScaledGemm &);
#else
bool of_e4m3(const ScaledGemm &g) { return g.a.type == kE4m3 && g.b.type == kE4m3; }

// 16 bits of e4m3 alone, of which most products are: without weights where no scale varies along k.
template <class Its> pydet_status launch_e4m3(const ScaledGemm &g) {
  using Plain = Shape<Its, kE4m3, kE4m3, false, false>;
  using Single = Shape<Its, kE4m3, kE4m3, false, false, false>;
  if (g.along_k) return launch_shape<Shape<Its, kE4m3, kE4m3, false, true>>(g);
  return worth_boxes<Plain>(g) ? launch_shape<Plain>(g) : launch_shape<Single>(g);
}

// Where all rows are in one tile, more blocks share them unless that takes more waves.
template <class Its> bool worth_wide_clusters(const ScaledGemm &g) {
  auto waves = [&](int blocks) {
    return divide_up(divide_up(g.n, Its::tile.n * blocks) * g.batch.count, sm90_clusters(g.device.id, blocks));
  };
  return g.m <= Its::tile.m && waves(Its::tile.cluster_n_of_one_row) <= waves(Its::tile.cluster_n);
}

}  // namespace

// fp32 has kernels of its own. It is stored from two registers at once, which ties D to the banks of registers that the
// chunk's sums lie in; else ptxas puts nearly each element and its sum into different banks.
template <int index> pydet_status scaled_gemm_sm90(const ScaledGemm &g, const Choice &) {
  using Its = Of<index>;
  constexpr Fp8Tile tile = Its::tile;
  if constexpr (tile.types == kFp8Types) {
    if (!of_e4m3(g)) return scaled_gemm_sm90_e5m2<index>(g);
    if (g.out.type == Type::f32) return launch_shape<Shape<Its, kE4m3, kE4m3, true, true>>(g);
    if constexpr (tile.cluster_n_of_one_row != tile.cluster_n)
      if (worth_wide_clusters<Its>(g)) return launch_e4m3<Of<index, tile.cluster_n_of_one_row>>(g);
    return launch_e4m3<Its>(g);
  } else if constexpr (!tile.takes(true)) {
    return launch_shape<Shape<Its, kE4m3, kE4m3, true, false>>(g);
  } else {
    if (g.out.type == Type::f32) return launch_shape<Shape<Its, kE4m3, kE4m3, true, true>>(g);
    if constexpr (tile.takes(false))
      if (!g.along_k) return launch_shape<Shape<Its, kE4m3, kE4m3, false, false>>(g);
    return launch_shape<Shape<Its, kE4m3, kE4m3, false, true>>(g);
  }
}
template pydet_status scaled_gemm_sm90<0>(const ScaledGemm &, const Choice &);
template pydet_status scaled_gemm_sm90<1>(const ScaledGemm &, const Choice &);
template pydet_status scaled_gemm_sm90<2>(const ScaledGemm &, const Choice &);
template pydet_status scaled_gemm_sm90<3>(const ScaledGemm &, const Choice &);
template pydet_status scaled_gemm_sm90<4>(const ScaledGemm &, const Choice &);
template pydet_status scaled_gemm_sm90<5>(const ScaledGemm &, const Choice &);
template pydet_status scaled_gemm_sm90<6>(const ScaledGemm &, const Choice &);
template pydet_status scaled_gemm_sm90<7>(const ScaledGemm &, const Choice &);
template pydet_status scaled_gemm_sm90<8>(const ScaledGemm &, const Choice &);
template pydet_status scaled_gemm_sm90<9>(const ScaledGemm &, const Choice &);
template pydet_status scaled_gemm_sm90<10>(const ScaledGemm &, const Choice &);
static_assert(kFp8TileCount == 11, "each is instantiated");

pydet_status scaled_gemm_sm90_rest(const ScaledGemm &g) {
  if (!readable(g)) return unreadable(g);
  return of_e4m3(g) ? launch_shape<Shape<Of<kFp8TileCount>, kE4m3, kE4m3, true, true>>(g)
                    : scaled_gemm_sm90_e5m2<kFp8TileCount>(g);
}

Choice scaled_gemm_sm90_choose(const ScaledGemm &g, int tile) {
  if (tile == kAnyVariant) return readable(g) ? Choice(fastest_scaled_tile(g)) : Choice();
  return readable(g) && scaled_tile_takes(g, tile) ? Choice(tile) : Choice();
}
#endif

}  // namespace pydet
