// Scaled GEMM of fp8 for up to 128 rows of a and many columns of b, on Hopper's tensor cores: the decode step at memory
// speed, with the bits of scaled_tiles.cu.
//
//   s_c = the chain of steps of 32 over chunk c of k, from +0;   D = fmaf(w_c, s_c, D), c ascending
//   w_c = fl(sa[m, c] sb[c, n]) with scales along k, else 1;     then out = round(fl(fl(D sb[n]) sa[m]) + bias)
//
// Chunks are of 128, or, where scales are for 32 elements each, of one step, and a launch has 64 rows or fewer.
//
// skinny.h brings the operands, a as its x and b^T as its w; to it two fp8 numbers are one of 16 bits. Chunks do not
// depend on each other, so those of a stage are on the tensor cores at once, each with its own accumulators, and are
// added in their order. All scales of a tile are brought to shared memory before its first stage has come.

#include <utility>

#include "gpu/nvidia/sm90/choose.h"
#include "gpu/nvidia/sm90/scales.h"
#include "gpu/nvidia/sm90/skinny.h"
#include "gpu/nvidia/sm90/pipe/wgmma.h"

namespace pydet {
namespace {

constexpr int kWarpgroupRows = 64;
constexpr int kMostM = 2 * kWarpgroupRows;
constexpr int kMostTableBytes = 48 << 10;  // of scales in shared memory
constexpr int kMostFineBytes = 96 << 10;   // and of those of 32 elements each
constexpr int kMostTileK = 4096;           // up to which 128x64 of scaled_tiles.cu is faster for more than 64 rows,
constexpr int kMostShortK = 2048;          // or, of few columns, up to this one
constexpr int kMostUnalignedK = 1536;      // and up to this one where rows do not begin lines, for more than 16
constexpr int kPair = 2;                   // fp8 numbers in one of 16 bits
constexpr int kAheadBytes = 32 << 10;      // of b's a block that are asked of the L2 while the kernel ahead ends
constexpr int kFewM = 16;                  // past which half a multiprocessor asks for half of them
constexpr int kOneWarpgroup = 80;  // columns of tiles for up to 64 rows: others would only take longer to compile
constexpr int kScales = 1;         // the first of the named barriers

struct SkinnyProblem {
  Problem p;
  DeviceScale a_scale, b_scale;
  int chunks;        // of k
  int table_chunks;  // for which there are scales: 1 where they do not vary along k
  int b_scales;      // of each of those, that a tile has: 1 a column, or those of the two blocks it lies in
  bool along_k;
};

// `half`: of the registers and shared memory of a multiprocessor, so that the next kernel's blocks lie beside this one's.
// `fine`: chunks of a step.
template <int tile_rows, int warpgroups, Type a, Type b, bool half = false, bool fine = false> struct Shape {
  static constexpr Type a_type = a, b_type = b;
  static constexpr int blocks_an_sm = half ? 2 : 1;
  static constexpr bool turned = false;  // both operands have k adjacent
  static constexpr bool prefetches = true;
  static constexpr int rows = tile_rows, box_columns = rows;
  static constexpr bool chunked = false, split = false;  // stages go on through chunks
  static constexpr int consumer_warps = warpgroups * 4, arrivals = warpgroups;
  static constexpr int registers = rows / 2;  // of a chunk's sum a thread
  static constexpr int stage_blocks = rows > 64 || fine ? 1 : rows > 32 || warpgroups > 1 ? 2 : 4;  // boxes
  static constexpr int block_chunks = fine ? kBlockSteps : 1, chunk_steps = kBlockSteps / block_chunks;
  static constexpr int stage_chunks = stage_blocks * block_chunks;
  static constexpr int stage_steps = stage_blocks * kBlockSteps;
  // Stages whose chunks are on the tensor cores at once: what registers for their sums allow.
  static constexpr int stages_at_once = 2 * stage_chunks * registers <= (half ? 64 : warpgroups > 1 ? 96 : 128) ? 2 : 1;
  static constexpr int w_block_bytes = rows * kRowBytes, w_bytes = stage_blocks * w_block_bytes;
  static constexpr int threads = consumer_warps * 32 + 64, consumers = consumer_warps * 32;
};

// Where scales lie in shared memory: of each row of a those along k, one more apart than there are, and then of each
// chunk b's.
template <class S> struct Scales {
  const SkinnyProblem &problem;
  uint32_t a, b;
  int pitch;
  __device__ __forceinline__ Scales(const SkinnyProblem &s, uint32_t at)
      : problem(s), a(at), b(at + s.p.m * (s.table_chunks | 1) * 4), pitch(s.table_chunks | 1) {}

  // Where they lie in global memory, in elements, and where they go.
  __device__ __forceinline__ int64_t from_row(int row, int chunk) const {
    return row * problem.a_scale.stride + chunk * problem.a_scale.chunk_stride;
  }
  template <int each> __device__ __forceinline__ int64_t from_column(int first_column, int index) const {
    const int j = index % each;
    const int column = problem.b_scale.blocks ? min(first_column / kScaleGroup + j, (problem.p.n - 1) / kScaleGroup)
                                              : min(first_column + j, problem.p.n - 1);
    return column * problem.b_scale.stride + index / each * problem.b_scale.chunk_stride;
  }

  // By all consumers, before their first tile: those of a, as many lanes a row as it has scales, or a chunk as it has
  // rows where these are adjacent. Copied ones come until wait_for_words().
  __device__ __forceinline__ void load_rows(int thread) const {
    const int chunks = problem.table_chunks, rows = problem.p.m;
    const bool down = problem.a_scale.stride < problem.a_scale.chunk_stride;
    const int extent = down ? rows : chunks, others = down ? chunks : rows;
    const int log = extent == 1 ? 0 : extent <= 8 ? 3 : extent <= 16 ? 4 : 5;
    const int first = thread >> log, step = S::consumers >> log, lanes = 1 << log;
    auto row_of = [&](int other, int inner) { return down ? inner : other; };
    auto chunk_of = [&](int other, int inner) { return down ? other : inner; };
    auto to = [&](int other, int inner) { return of_row(row_of(other, inner)) + chunk_of(other, inner) * 4; };
    if (copied(problem.a_scale)) {
#pragma unroll 2
      for (int other = first; other < others; other += step)
        for (int inner = thread % lanes; inner < extent; inner += lanes)
          copy_word(to(other, inner),
                    problem.a_scale.data + from_row(row_of(other, inner), chunk_of(other, inner)) * 4);
      return;
    }
    constexpr int at_once = 8;
    for (int other = first; other < others; other += at_once * step)
      for (int inner = thread % lanes; inner < extent; inner += lanes) {
        int64_t from[at_once];
        float x[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          const int here = min(other + i * step, others - 1);
          from[i] = from_row(row_of(here, inner), chunk_of(here, inner));
        }
        load_scales(problem.a_scale, from, x);
#pragma unroll
        for (int i = 0; i < at_once; ++i)
          if (other + i * step < others) store_word(to(other + i * step, inner), x[i]);
      }
  }
  // And before each tile those of its columns, `each` of them a chunk.
  template <int each> __device__ __forceinline__ void load_columns(int thread, int first_column) const {
    const DeviceScale &scale = problem.b_scale;
    constexpr int at_once = 4;
    const int count = each * problem.table_chunks;
    if (copied(scale)) {
#pragma unroll 1
      for (int i = thread; i < count; i += S::consumers)
        copy_word(b + i * 4, scale.data + from_column<each>(first_column, i) * 4);
      return;
    }
    for (int start = thread; start < count; start += at_once * S::consumers) {
      int64_t from[at_once];
      float x[at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i)
        from[i] = from_column<each>(first_column, min(start + i * S::consumers, count - 1));
      load_scales(scale, from, x);
#pragma unroll
      for (int i = 0; i < at_once; ++i)
        if (start + i * S::consumers < count) store_word(b + (start + i * S::consumers) * 4, x[i]);
    }
  }
  __device__ __forceinline__ uint32_t of_row(int row) const { return a + row * pitch * 4; }
};

// f(0), f(1) .. f(count - 1), compile-time numbers.
template <class F, int... i> __device__ __forceinline__ void each_of(F f, std::integer_sequence<int, i...>) {
  (f(std::integral_constant<int, i>()), ...);
}
template <int count, class F> __device__ __forceinline__ void each_of(F f) {
  each_of(f, std::make_integer_sequence<int, count>());
}

template <class S>
__device__ __forceinline__ void multiply(const SkinnyProblem &problem, const Layout<S> &at, int warpgroup) {
  const Problem &p = problem.p;
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const Scales<S> scales(problem, at.sums);
  const bool two_blocks = problem.b_scales == 2, by_column = problem.along_k && !two_blocks;
  const uint32_t of_columns = scales.b + lane % 4 * 8;
  Cursor<kAnyCount> x(p.x_stages), w(p.w_stages);
  scales.load_rows(thread);
  for (int tile = int(blockIdx.x); tile < p.tiles; tile += int(gridDim.x)) {
    const int first_row = first_of_x(p, tile) + warp * kWarpRows + lane / 4;
    const int start_column = first_of_w<S>(p, tile), column_0 = start_column + lane % 4 * 2;
    const int least_row = (tile & p.x_split) * kWarpgroupRows, least_column = (tile >> p.x_split) * S::rows;
    // Rows that a does not have take the scales of its last.
    const uint32_t of_rows[2] = {scales.of_row(min(first_row, p.m - 1)), scales.of_row(min(first_row + 8, p.m - 1))};
    const int split = kScaleGroup - start_column % kScaleGroup;  // where the second block of columns begins
    auto is_ours = [&](int row, int column) {
      return row >= least_row && row < p.m && column >= least_column && column < p.n;
    };
    // f(i, row, column) for the sums d[i] and d[i + 1] of neighbours in a row of out.
    auto each_pair = [&](auto f) {
#pragma unroll
      for (int i = 0; i < S::registers; i += 2) {
        const int row = first_row + i % 4 / 2 * 8, column = column_0 + i / 4 * 8;
        if (is_ours(row, column)) f(i, row, column);
      }
    };
    if (tile != int(blockIdx.x)) named_sync(kScales, S::consumers);
    if (two_blocks) scales.template load_columns<2>(thread, start_column);
    else scales.template load_columns<S::rows>(thread, start_column);
    wait_for_words();
    named_sync(kScales, S::consumers);

    float d[S::registers];
#pragma unroll
    for (int i = 0; i < S::registers; ++i) d[i] = 0;
    if (p.accumulate) {
      const float *out = reinterpret_cast<const float *>(p.out);
      each_pair([&](int i, int row, int column) {
        d[i] = canonical(out[row * p.out_stride + column]);
        if (column + 1 < p.n) d[i + 1] = canonical(out[row * p.out_stride + column + 1]);
      });
    }

    auto start_chunk = [&](float(&sum)[S::registers], int x_stage, int w_stage, int chunk) {
      const int block = chunk / S::block_chunks, first = chunk % S::block_chunks * S::chunk_steps;
      const uint64_t x_tile = wgmma_descriptor<true>(at.x_stage(x_stage) + warpgroup * kWarpgroupRows * kRowBytes) +
                              block * (at.x_block_bytes >> 4);
      const uint64_t w_tile = wgmma_descriptor<true>(at.w_stage(w_stage)) + (block * S::w_block_bytes >> 4);
#pragma unroll
      for (int i = 0; i < S::chunk_steps; ++i)
        wgmma_fp8<S::a_type, S::b_type>(sum, x_tile + (first + i) * 2, w_tile + (first + i) * 2, i);
      wgmma_commit();
    };
    // The weights of a chunk, of rows row_0 and row_8, in the first and the second block of columns; by column a's scales
    // alone.
    auto load_weights = [&](float(&weight)[2][2], int chunk) {
      float sa[2] = {1, 1}, sb[2] = {1, 1};
      if (problem.along_k)
#pragma unroll
        for (int h = 0; h < 2; ++h) sa[h] = load_word(of_rows[h] + chunk * 4);
      if (problem.along_k && two_blocks)
#pragma unroll
        for (int j = 0; j < 2; ++j) sb[j] = load_word(scales.b + chunk * 8 + j * 4);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) weight[j][h] = sa[h] * sb[j];
    };
    auto add_chunk = [&](const float(&sum)[S::registers], const float(&weight)[2][2], int chunk) {
      if (by_column) {
#pragma unroll
        for (int i = 0; i < S::registers; ++i) {
          const float sb = load_word(of_columns + (chunk * S::rows + i / 4 * 8 + i % 2) * 4);
          d[i] = fmaf(weight[0][i % 4 / 2] * sb, sum[i], d[i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < S::registers; ++i) {
          const bool second = i / 4 * 8 + lane % 4 * 2 >= split;
          d[i] = fmaf(second ? weight[1][i % 4 / 2] : weight[0][i % 4 / 2], sum[i], d[i]);
        }
      }
    };
    // All chunks of the next stages.
    auto run_stages = [&](auto stages, int chunk) {
      constexpr int count = decltype(stages)::value * S::stage_chunks;
      float sum[count][S::registers], weight[count][2][2];
      Cursor<kAnyCount> x_read = x, w_read = w;
      each_of<count>([&](auto index) {
        constexpr int i = decltype(index)::value;
        if (i % S::stage_chunks == 0) {
          barrier_wait(at.w_full(w.stage), w.parity);
          barrier_wait(at.x_full(x.stage), x.parity);
          wgmma_fence();
        }
        start_chunk(sum[i], x.stage, w.stage, i % S::stage_chunks);
        if (i % S::stage_chunks == S::stage_chunks - 1) x.next(), w.next();
      });
#pragma unroll
      for (int i = 0; i < count; ++i) load_weights(weight[i], chunk + i);
      each_of<count>([&](auto index) {
        constexpr int i = decltype(index)::value;
        wgmma_wait<count - 1 - i>();
        if (i % S::stage_chunks == S::stage_chunks - 1) {
          if (thread % kWarpgroup == 0)
            barrier_arrive(at.x_empty(x_read.stage)), barrier_arrive(at.w_empty(w_read.stage));
          x_read.next(), w_read.next();
        }
        add_chunk(sum[i], weight[i], chunk + i);
      });
    };
    constexpr int at_once = S::stages_at_once * S::stage_chunks;
    int chunk = 0;
#pragma unroll 1
    for (; chunk + at_once <= problem.chunks; chunk += at_once)
      run_stages(std::integral_constant<int, S::stages_at_once>(), chunk);
    if (S::stages_at_once > 1 && chunk + S::stage_chunks <= problem.chunks) {
      run_stages(std::integral_constant<int, 1>(), chunk);
      chunk += S::stage_chunks;
    }
    if (chunk < problem.chunks) {
      barrier_wait(at.w_full(w.stage), w.parity);
      barrier_wait(at.x_full(x.stage), x.parity);
#pragma unroll 1
      for (int i = 0; chunk + i < problem.chunks; ++i) {
        float sum[S::registers], weight[2][2];
        wgmma_fence();
        start_chunk(sum, x.stage, w.stage, i);
        load_weights(weight, chunk + i);
        wgmma_wait<0>();
        add_chunk(sum, weight, chunk + i);
      }
      if (thread % kWarpgroup == 0) barrier_arrive(at.x_empty(x.stage)), barrier_arrive(at.w_empty(w.stage));
      x.next(), w.next();
    }

    if (!problem.along_k) {
      const float sa[2] = {load_word(of_rows[0]), load_word(of_rows[1])};
#pragma unroll
      for (int i = 0; i < S::registers; ++i)
        d[i] = (d[i] * load_word(of_columns + (i / 4 * 8 + i % 2) * 4)) * sa[i % 4 / 2];
    }
    if (p.bias)
      with_type<kUnscaledTypes>(p.bias_type, [&](auto type) {
        each_pair([&](int i, int row, int column) {
          d[i] = d[i] + load_f32(p.bias, decltype(type)::value, bias_at(p, row, column));
          if (column + 1 < p.n)
            d[i + 1] = d[i + 1] + load_f32(p.bias, decltype(type)::value, bias_at(p, row, column + 1));
        });
      });
    with_type<kUnscaledTypes>(p.out_type, [&](auto type) {
      each_pair([&](int i, int row, int column) {
        const int64_t index = row * p.out_stride + column;
        store_pair<decltype(type)::value>(p.out, index, d[i], d[i + 1], p.pairs, column + 1 < p.n);
      });
    });
  }
}

template <class S> __global__ void __launch_bounds__(S::threads, S::blocks_an_sm)
    scaled_skinny_kernel(const __grid_constant__ SkinnyProblem problem) {
  share_out<S>(problem.p, [&](const Layout<S> &at, int warp) { multiply<S>(problem, at, warp / 4); });
}

// ---- Host --------------------------------------------------------------------------------------------------------

// The same operands with two fp8 numbers as one of 16 bits, as skinny.h takes them.
Gemm in_pairs(const ScaledGemm &g) {
  Gemm pairs = {};
  pairs.device = g.device, pairs.stream = g.stream;
  pairs.a = g.a, pairs.b = g.b, pairs.bias = g.bias, pairs.out = g.out;
  pairs.a.type = pairs.b.type = Type::bf16;
  pairs.a.row_stride /= kPair, pairs.b.col_stride /= kPair;
  pairs.batch.count = 1;
  pairs.m = g.m, pairs.n = g.n, pairs.k = g.k / kPair;
  pairs.accumulate = g.accumulate;
  return pairs;
}

int64_t chunks_of(const ScaledGemm &g) { return divide_up(g.k, g.fine() ? kFineGroup : kScaleGroup); }
// Beside the second of two blocks of columns, which the last tile may not have.
int columns_of(const ScaledGemm &g, int rows) {
  return g.along_k && (!g.b_scale.data || g.b_scale.blocks || g.b_scale.stride == 0) ? 2 : rows;
}
int64_t table_bytes(const ScaledGemm &g, int rows) {
  const int64_t chunks = g.along_k ? chunks_of(g) : 1;
  return (g.m * (chunks | 1) + chunks * columns_of(g, rows)) * 4;
}

constexpr const char *kName = "cuda_scaled_skinny_gemm_sm90";

// What the device is told. It must be current.
template <class S>
pydet_status describe(const ScaledGemm &g, bool x_split, SkinnyProblem *described, Launch *launch) {
  SkinnyProblem &problem = *described;
  SkinnyPlan plan = {S::rows, x_split, S::blocks_an_sm > 1 ? kHalfSharedBytes : kMostSharedBytes, true};
  plan.more_bytes = int(table_bytes(g, S::rows));
  if (pydet_status status = prepare<S>(kName, in_pairs(g), plan, &problem.p, launch)) return status;
  problem.a_scale = scale_of(g, g.a_scale, g.kAScale);
  problem.b_scale = scale_of(g, g.b_scale, g.kBScale);
  problem.chunks = int(chunks_of(g));
  problem.table_chunks = g.along_k ? problem.chunks : 1;
  problem.b_scales = columns_of(g, S::rows);
  // With more rows, or tiles for few of the multiprocessors, that gained nothing or cost up to a fifth.
  const bool asks = g.m <= kWarpgroupRows && 2 * problem.p.tiles >= gpu_multiprocessors(g.device.id);
  const int bytes = S::blocks_an_sm > 1 && g.m > kFewM ? kAheadBytes / 2 : kAheadBytes;
  problem.p.ahead = asks ? bytes / (S::rows * kRowBytes) * kBlockK : 0;
  problem.along_k = g.along_k;
  return PYDET_OK;
}

template <class S> pydet_status launch_shape(const ScaledGemm &g, bool x_split) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(kName, guard.error());
  SkinnyProblem problem = {};
  Launch shape = {};
  if (pydet_status status = describe<S>(g, x_split, &problem, &shape)) return status;
  return launch(shape, scaled_skinny_kernel<S>, problem);
}

// Rows of a in launches of so many each, for which all that may fail is asked before the first.
template <class S> pydet_status launch_in_turn(const ScaledGemm &g, int64_t rows) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(kName, guard.error());
  SkinnyProblem problem = {};
  Problem &p = problem.p;
  Launch shape = {};
  ScaledGemm first = g;
  first.m = std::min(rows, g.m);
  if (pydet_status status = describe<S>(first, false, &problem, &shape)) return status;
  EncodeTensorMap encode = nullptr;
  if (pydet_status status = find_encoder(kName, &encode)) return status;
  const Gemm all = in_pairs(g);
  const MapShape of_a = map_of(all, all.a, all.m, all.a.row_stride, p.box_rows);
  if (pydet_status status = make_map(kName, encode, of_a, &p.x)) return status;
  if (pydet_status status = load(kName, scaled_skinny_kernel<S>, shape.shared_bytes)) return status;
  shape.loaded = true;
  p.pairs = p.pairs && (g.m == 1 || g.out.row_stride % 2 == 0);  // of every row
  for (; p.x_first < g.m; p.x_first += p.m) {
    p.m = int(std::min(rows, g.m - p.x_first));
    if (pydet_status status = launch(shape, scaled_skinny_kernel<S>, problem)) return status;
    p.out += p.m * g.out.row_stride * size_of(g.out.type);
    if (p.bias) p.bias += p.m * g.bias.row_stride * size_of(g.bias.type);
    if (g.a_scale.data) problem.a_scale.data += p.m * g.a_scale.stride * size_of(g.a_scale.type);
  }
  return PYDET_OK;
}

// The fastest of sweeps on an H100, M from 1 to 128, (N, K) of five layers: so few columns that there is a tile for
// every SM, or for every two of them where each has half of the rows; where there are several, those that leave the
// fewest idle, of as many the widest (an H200: 20x12096x640 6.9 us, 9.2 by half as many columns). 0: a tile of scaled_tiles.cu. Where rows of k do not begin lines of the L2, these are faster, since they
// read b for all rows at once.
int fastest_columns_of_e4m3(const ScaledGemm &g) {
  const int64_t sms = gpu_multiprocessors(g.device.id), width = divide_up(g.n, g.m > kWarpgroupRows ? sms / 2 : sms);
  if (!scaled_whole_lines(g)) {
    if (g.m > kWarpgroupRows) return width <= 16 ? 48 : 0;
    if (g.m > kFewM && g.k <= kMostUnalignedK && width > 32) return 0;
  }
  if (width <= 16) return g.m > 32 && g.m <= kWarpgroupRows && width > 8 ? 32 : 16;
  if (width <= 32) return 32;
  if (g.along_k && g.m > kWarpgroupRows && !(g.needs() & kColumnScales)) return 0;
  if (g.m > kWarpgroupRows && width <= 48) return 48;
  if (width <= 64) return 64;
  if (g.m > kWarpgroupRows && g.k <= kMostShortK) return 0;
  if (g.m > kWarpgroupRows && width <= 128) return g.k <= kMostTileK ? 0 : 128;
  if (g.m > kWarpgroupRows) return 0;
  int best = 48;
  for (int columns : {64, kOneWarpgroup, 96})
    if (divide_up(divide_up(g.n, columns), sms) * columns <= divide_up(divide_up(g.n, best), sms) * best)
      best = columns;
  return best;
}

bool of_e4m3(const ScaledGemm &g) { return g.a.type == Type::e4m3 && g.b.type == Type::e4m3; }

int fastest_columns(const ScaledGemm &g) {
  const int columns = fastest_columns_of_e4m3(g);
  if (of_e4m3(g) || columns == 0) return columns;
  return columns <= 32 ? 32 : 64;
}

struct Cut {
  bool split;  // the rows of a: two blocks with 64 each are faster than one, where there are multiprocessors for both
  bool half;
};
// Half of each multiprocessor where most of them have one tile, and enough bytes to read: 1x7168x2048 takes 0.87 of the
// time. With more rows and bytes the smaller rings cost what that gains.
bool fits_half(const ScaledGemm &g, int columns) {
  constexpr int64_t kFewestBytes = 10 << 20, kMostBytes = 20 << 20;
  const int64_t sms = gpu_multiprocessors(g.device.id), tiles = divide_up(g.n, columns), bytes = g.n * g.k;
  return of_e4m3(g) && (columns == 32 || columns == 64) && g.m <= kWarpgroupRows && tiles <= sms && 2 * tiles > sms &&
         bytes >= kFewestBytes && (2 * g.m <= kWarpgroupRows || bytes <= kMostBytes);
}

template <int columns, Type a, Type b> pydet_status launch_types(const ScaledGemm &g, bool split) {
  if constexpr (columns == kOneWarpgroup) return launch_shape<Shape<columns, 1, a, b>>(g, false);
  else
    return g.m <= kWarpgroupRows || split ? launch_shape<Shape<columns, 1, a, b>>(g, split)
                                          : launch_shape<Shape<columns, 2, a, b>>(g, false);
}

// Scales of 32 elements each: for how many rows there is room beside those of a tile's columns.
constexpr int kFineColumns = 32;
int64_t fine_rows(const ScaledGemm &g) {
  ScaledGemm part = g;
  for (part.m = std::min<int64_t>(g.m, kWarpgroupRows); part.m > 0; part.m /= 2)
    if (table_bytes(part, kFineColumns) <= kMostFineBytes) break;
  return part.m;
}

}  // namespace

Choice scaled_skinny_sm90_choose(const ScaledGemm &g, int columns) {
  if (g.m > kMostM || g.k == 0 || g.k % kPair || !readable(g)) return {};
  if (columns == kAnyVariant) columns = fastest_columns(g);
  if (columns == 0 || table_bytes(g, columns) > kMostTableBytes) return {};
  if (columns == kOneWarpgroup && g.m > kWarpgroupRows) return {};
  if (!of_e4m3(g) && scaled_skinny_types(columns) != kFp8Types) return {};
  const bool split = g.m > kWarpgroupRows && 2 * divide_up(g.n, columns) <= gpu_multiprocessors(g.device.id);
  return Choice(columns, Cut{split, fits_half(g, columns)});
}

template <int columns> pydet_status scaled_skinny_sm90(const ScaledGemm &g, const Choice &choice) {
  const Cut cut = choice.cut<Cut>();
  if constexpr (columns == 32 || columns == 64)
    if (cut.half) return launch_shape<Shape<columns, 1, Type::e4m3, Type::e4m3, true>>(g, false);
  return with_type<scaled_skinny_types(columns)>(g.a.type, [&](auto a) {
    return with_type<scaled_skinny_types(columns)>(
        g.b.type, [&](auto b) { return launch_types<columns, decltype(a)::value, decltype(b)::value>(g, cut.split); });
  });
}

bool scaled_fine_sm90_takes(const ScaledGemm &g) {
  return g.fine() && g.k > 0 && g.k % kPair == 0 && readable(g) && fine_rows(g) > 0;
}
pydet_status scaled_fine_sm90(const ScaledGemm &g) {
  return with_type<kFp8Types>(g.a.type, [&](auto a) {
    return with_type<kFp8Types>(g.b.type, [&](auto b) {
      return launch_in_turn<Shape<kFineColumns, 1, decltype(a)::value, decltype(b)::value, false, true>>(g,
                                                                                                         fine_rows(g));
    });
  });
}

template pydet_status scaled_skinny_sm90<16>(const ScaledGemm &, const Choice &);
template pydet_status scaled_skinny_sm90<32>(const ScaledGemm &, const Choice &);
template pydet_status scaled_skinny_sm90<48>(const ScaledGemm &, const Choice &);
template pydet_status scaled_skinny_sm90<64>(const ScaledGemm &, const Choice &);
template pydet_status scaled_skinny_sm90<80>(const ScaledGemm &, const Choice &);
template pydet_status scaled_skinny_sm90<96>(const ScaledGemm &, const Choice &);
template pydet_status scaled_skinny_sm90<128>(const ScaledGemm &, const Choice &);

}  // namespace pydet
