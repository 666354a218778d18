// Quantisation of 16-bit numbers in whole units of 16 bytes (NUMERICS.md, "Quantisation"), which stay packed in
// registers from the one reading to the last use:  s = max(amax, 1e-10) / largest,  q = round(clamp(x / s)).
//
// Rows: one, four or eight warps hold a row. Groups: half a warp holds one, and several at a time. Tiles: a block of
// 256 threads holds 128 x 128, 8 x 8 a thread, so that eight bytes of q lie adjacent along either side, and q, both
// scales and the transposed copy come of one reading. A maximum does not mind the order: |x| is compared as integers.
// One formula serves every scale: where s is a power of two, its correction adds nothing. On an H100 rows, groups and
// blocks take the time of a copy, groups both ways 1.17 times that.

#include "gpu/any/quantize.h"

namespace pydet {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = kUnit / 2;  // of two elements
constexpr int kHeld = 8;           // units a thread has of a row
constexpr int kAtOnce = 4;         // groups that half a warp has
constexpr int kHalf = 16;          // lanes
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr uint32_t kMagnitudes = 0x7FFF7FFFu;

// The part of a problem that the device sees.
struct Packed {
  const uint16_t *x;
  char *out, *transposed;
  Matrix scale, transposed_scale;
  int64_t x_stride, out_stride, transposed_stride;
  int m, k, groups;
  int rows_on, groups_on;  // from one group of half a warp to its next
  float largest;
  bool power_of_two, block;
};

using Words = uint32_t[kWords];

__device__ __forceinline__ void load_words(const uint16_t *x, bool here, Words &words) {
  const uint4 v = here ? __ldg(reinterpret_cast<const uint4 *>(x)) : uint4{0, 0, 0, 0};
  words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
}

// Of each half by itself.
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
__device__ __forceinline__ uint32_t largest_halves(const Words &words) {
  return larger(larger(words[0] & kMagnitudes, words[1] & kMagnitudes),
                larger(words[2] & kMagnitudes, words[3] & kMagnitudes));
}
__device__ __forceinline__ uint32_t larger_half(uint32_t word) { return max(word >> 16, word & 0xFFFFu); }

template <Type type> __device__ __forceinline__ float scale_of_halves(const Packed &p, uint32_t amax) {
  return scale_of(bits_of(Element<type>::to_f32(uint16_t(amax))), p.largest, p.power_of_two);
}

template <Type type> __device__ __forceinline__ float low(uint32_t word) {
  return Element<type>::to_f32(uint16_t(word));
}
template <Type type> __device__ __forceinline__ float high(uint32_t word) {
  return Element<type>::to_f32(uint16_t(word >> 16));
}

// Eight of one scale.
template <Type type, Type fp8> __device__ __forceinline__ uint2 round_words(const Words &words, const Divisor &by) {
  uint32_t pairs[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    pairs[i] = round_pair<fp8>(quotient_of(low<type>(words[i]), by), quotient_of(high<type>(words[i]), by));
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// ---- Rows --------------------------------------------------------------------------------------------------------

PYDET_HD constexpr int row_threads(int warps) { return warps < 4 ? 128 : warps * 32; }

template <Type type, Type fp8, int warps> __global__ void __launch_bounds__(row_threads(warps))
    quantize_rows(const __grid_constant__ Packed p) {
  constexpr int lanes = warps * 32;
  __shared__ uint32_t of_warp[warps];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int thread = int(threadIdx.x) % lanes;
  const int row = int(blockIdx.x) * (row_threads(warps) / lanes) + int(threadIdx.x) / lanes;
  if (row >= p.m) return;
  const uint16_t *x = p.x + row * p.x_stride;
  Words held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int k = (thread + i * lanes) * kUnit;
    load_words(x + k, k < p.k, held[i]);
  }
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) amax = larger(amax, largest_halves(held[i]));
  amax = __reduce_max_sync(kAll, larger_half(amax));
  if constexpr (warps > 1) {
    if (thread % 32 == 0) of_warp[thread / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < warps; ++i) amax = max(amax, of_warp[i]);
  }
  const float s = scale_of_halves<type>(p, amax);
  if (thread == 0) write_scale(p.scale, row * p.scale.row_stride, s);
  const Divisor by = divisor_of(s);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int k = (thread + i * lanes) * kUnit;
    if (k < p.k) *reinterpret_cast<uint2 *>(p.out + row * p.out_stride + k) = round_words<type, fp8>(held[i], by);
  }
}

// ---- Groups ------------------------------------------------------------------------------------------------------

template <Type type, Type fp8> __global__ void __launch_bounds__(kThreads)
    quantize_groups(const __grid_constant__ Packed p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = int(threadIdx.x) % kHalf;
  const uint32_t first = blockIdx.x * (kThreads / kHalf * kAtOnce) + threadIdx.x / kHalf;
  int row[kAtOnce], group[kAtOnce];
  row[0] = int(first / uint32_t(p.groups)), group[0] = int(first % uint32_t(p.groups));
#pragma unroll
  for (int i = 1; i < kAtOnce; ++i) {
    row[i] = row[i - 1] + p.rows_on, group[i] = group[i - 1] + p.groups_on;
    if (group[i] >= p.groups) group[i] -= p.groups, ++row[i];
  }
  Words held[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int k = group[i] * kSide + lane * kUnit;
    load_words(p.x + row[i] * p.x_stride + k, row[i] < p.m && k < p.k, held[i]);
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    uint32_t amax = largest_halves(held[i]);
#pragma unroll
    for (int apart = kHalf / 2; apart > 0; apart /= 2) amax = larger(amax, __shfl_xor_sync(kAll, amax, apart));
    const float s = scale_of_halves<type>(p, larger_half(amax));
    if (row[i] >= p.m) continue;
    const int k = group[i] * kSide + lane * kUnit;
    if (lane == 0) write_scale(p.scale, row[i] * p.scale.row_stride + group[i] * p.scale.col_stride, s);
    if (k < p.k)
      *reinterpret_cast<uint2 *>(p.out + row[i] * p.out_stride + k) = round_words<type, fp8>(held[i], divisor_of(s));
  }
}

// ---- Tiles: blocks, and all that has a transposed copy ------------------------------------------------------------

// Where the eight bytes of a column's rows 8 cell to 8 cell + 7 lie in shared memory: moved about so that neither those
// who write, in columns 8 apart, nor those who read meet in a bank.
__device__ __forceinline__ int cell_at(int column, int cell) {
  return column * kSide + ((cell ^ (column / kUnit % kHalf)) << 3);
}

template <Type type, Type fp8, bool transposes> __global__ void __launch_bounds__(kThreads, 3)
    quantize_tiles(const __grid_constant__ Packed p) {
  __shared__ uint32_t block_amax;
  __shared__ __align__(16) uint32_t of_warp[transposes ? kThreads / 32 : 1][kSide / 2];
  __shared__ __align__(16) float2 by_column[transposes ? kSide : 2];
  __shared__ __align__(16) uint8_t transposed[transposes ? kSide * kSide : 16];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int thread = int(threadIdx.x), lane = thread % kHalf, warp = thread / 32;
  const int group_k = int(blockIdx.x), group_m = int(blockIdx.y);
  const int first_row = group_m * kSide + thread / kHalf * kUnit, first_column = group_k * kSide + lane * kUnit;

  Words held[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit; ++i)
    load_words(p.x + (first_row + i) * p.x_stride + first_column, first_row + i < p.m && first_column < p.k, held[i]);

  float of_block = 0;
  if (p.block) {
    if (thread == 0) block_amax = 0;
    __syncthreads();
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) amax = larger(amax, largest_halves(held[i]));
    amax = __reduce_max_sync(kAll, larger_half(amax));
    if (thread % 32 == 0) atomicMax(&block_amax, amax);
    __syncthreads();
    of_block = scale_of_halves<type>(p, block_amax);
    if (thread == 0) {
      write_scale(p.scale, group_m * p.scale.row_stride + group_k * p.scale.col_stride, of_block);
      if (transposes)
        write_scale(p.transposed_scale,
                    group_k * p.transposed_scale.row_stride + group_m * p.transposed_scale.col_stride, of_block);
    }
  }

  // Rows: after two exchanges a lane knows two of its eight rows, whose scales it makes one of.
  Divisor mine = divisor_of(of_block);
  if (!p.block) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] = larger_half(largest_halves(held[2 * i])) | larger_half(largest_halves(held[2 * i + 1])) << 16;
    const bool upper = lane & 8, odd = lane & 4;
    uint32_t kept[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      kept[i] = larger(upper ? pairs[2 + i] : pairs[i], __shfl_xor_sync(kAll, upper ? pairs[i] : pairs[2 + i], 8));
    uint32_t two = larger(odd ? kept[1] : kept[0], __shfl_xor_sync(kAll, odd ? kept[0] : kept[1], 4));
    two = larger(two, __shfl_xor_sync(kAll, two, 2));
    two = larger(two, __shfl_xor_sync(kAll, two, 1));
    const float s = scale_of_halves<type>(p, lane & 2 ? two >> 16 : two & 0xFFFFu);
    const int row = first_row + lane / 2;
    if (lane % 2 == 0 && row < p.m) write_scale(p.scale, row * p.scale.row_stride + group_k * p.scale.col_stride, s);
    mine = divisor_of(s);
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    const int from = thread % 32 / kHalf * kHalf + 2 * i;
    const Divisor by = {__shfl_sync(kAll, mine.s, from), __shfl_sync(kAll, mine.inverse, from)};
    if (first_row + i < p.m && first_column < p.k)
      *reinterpret_cast<uint2 *>(p.out + (first_row + i) * p.out_stride + first_column) =
          round_words<type, fp8>(held[i], by);
  }

  if constexpr (transposes) {
    if (!p.block) {
      Words amax;
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        amax[j] = held[0][j] & kMagnitudes;
#pragma unroll
        for (int i = 1; i < kUnit; ++i) amax[j] = larger(amax[j], held[i][j] & kMagnitudes);
        amax[j] = larger(amax[j], __shfl_xor_sync(kAll, amax[j], kHalf));
      }
      if (thread % 32 < kHalf)
        *reinterpret_cast<uint4 *>(&of_warp[warp][lane * kWords]) = {amax[0], amax[1], amax[2], amax[3]};
      __syncthreads();
      if (thread < kSide) {
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < kThreads / 32; ++i) most = larger(most, of_warp[i][thread / 2]);
        const float s = scale_of_halves<type>(p, thread % 2 ? most >> 16 : most & 0xFFFFu);
        if (group_k * kSide + thread < p.k)
          write_scale(
              p.transposed_scale,
              (group_k * kSide + thread) * p.transposed_scale.row_stride + group_m * p.transposed_scale.col_stride, s);
        const Divisor by = divisor_of(s);
        by_column[thread] = {by.s, by.inverse};
      }
      __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      Divisor by = mine;
      if (!p.block) {
        const float2 pair = by_column[lane * kUnit + j];
        by = {pair.x, pair.y};
      }
      uint32_t pairs[kWords];
#pragma unroll
      for (int i = 0; i < kUnit; i += 2) {
        const uint32_t upper = held[i][j / 2], under = held[i + 1][j / 2];
        pairs[i / 2] = round_pair<fp8>(quotient_of(j % 2 ? high<type>(upper) : low<type>(upper), by),
                                       quotient_of(j % 2 ? high<type>(under) : low<type>(under), by));
      }
      *reinterpret_cast<uint2 *>(transposed + cell_at(lane * kUnit + j, thread / kHalf)) = {pairs[0] | pairs[1] << 16,
                                                                                            pairs[2] | pairs[3] << 16};
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSide * kSide / 16 / kThreads; ++i) {
      const int column = thread / 8 + i * (kThreads / 8), cell = thread % 8 * 2;
      const int to_row = group_k * kSide + column, to_column = group_m * kSide + cell * 8;
      if (to_row >= p.k || to_column >= p.m) continue;
      const uint2 a = *reinterpret_cast<const uint2 *>(transposed + cell_at(column, cell));
      const uint2 b = *reinterpret_cast<const uint2 *>(transposed + cell_at(column, cell + 1));
      *reinterpret_cast<uint4 *>(p.transposed + to_row * p.transposed_stride + to_column) = {a.x, a.y, b.x, b.y};
    }
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int64_t kMost = int64_t(1) << 30;  // rows, columns, and groups of a matrix

Packed packed_of(const Quantize &p) {
  const int groups = int(divide_up(p.k, kSide));
  Packed packed = {};
  packed.x = reinterpret_cast<const uint16_t *>(p.x.data), packed.x_stride = p.x.row_stride;
  packed.out = p.out.data, packed.out_stride = p.out.row_stride;
  packed.transposed = p.transposed.data, packed.transposed_stride = p.transposed.row_stride;
  packed.scale = p.scale, packed.transposed_scale = p.transposed_scale;
  packed.m = int(p.m), packed.k = int(p.k), packed.groups = groups;
  packed.rows_on = kThreads / kHalf / groups, packed.groups_on = kThreads / kHalf % groups;
  packed.largest = largest_of(p.out.type);
  packed.power_of_two = p.power_of_two;
  packed.block = p.granularity == Granularity::block;
  return packed;
}

// f(type of x, type of out), both compile-time.
template <class F> pydet_status with_types(const Quantize &p, F f) {
  return with_type<kHalfTypes>(
      p.x.type, [&](auto type) { return with_type<kFp8Types>(p.out.type, [&](auto fp8) { return f(type, fp8); }); });
}

template <class Kernel>
pydet_status start(const char *name, const Quantize &p, dim3 grid, int threads, Kernel kernel) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  Launch shape = {name, gpu_stream(p.stream), grid, dim3(unsigned(threads))};
  shape.overlaps_previous = gpu_overlaps_kernels(p.device.id);
  return launch(shape, kernel, packed_of(p));
}

bool is_packed(const Quantize &p) {
  return p.k > 0 && p.m <= kMost && p.k <= kMost && p.m * divide_up(p.k, kSide) <= kMost && p.k % kUnit == 0 &&
         vectors(p, p.x, p.kX, 16) && vectors(p, p.out, p.kOut, 8);
}

template <int warps> pydet_status launch_rows(const char *name, const Quantize &p) {
  constexpr int rows = row_threads(warps) / (warps * 32);
  return with_types(p, [&](auto type, auto fp8) {
    return start(name, p, dim3(unsigned(divide_up(p.m, rows))), row_threads(warps),
                 quantize_rows<decltype(type)::value, decltype(fp8)::value, warps>);
  });
}

}  // namespace

bool quantize_rows_packed_takes(const Quantize &p) { return is_packed(p) && p.k <= 8 * 32 * kUnit * kHeld; }
pydet_status quantize_rows_packed(const Quantize &p) {
  const char *name = "cuda_quantize_rows_packed";
  constexpr int kOfWarp = 32 * kUnit * kHeld;
  if (p.k <= kOfWarp) return launch_rows<1>(name, p);
  return p.k <= 4 * kOfWarp ? launch_rows<4>(name, p) : launch_rows<8>(name, p);
}

bool quantize_groups_packed_takes(const Quantize &p) { return is_packed(p); }
pydet_status quantize_groups_packed(const Quantize &p) {
  const int64_t groups = p.m * divide_up(p.k, kSide), each = kThreads / kHalf * kAtOnce;
  return with_types(p, [&](auto type, auto fp8) {
    return start("cuda_quantize_groups_packed", p, dim3(unsigned(divide_up(groups, each))), kThreads,
                 quantize_groups<decltype(type)::value, decltype(fp8)::value>);
  });
}

bool quantize_tiles_packed_takes(const Quantize &p) {
  constexpr int64_t kMostStripes = 65535;
  return is_packed(p) && divide_up(p.m, kSide) <= kMostStripes &&
         (!p.transposed.data || (p.m % 16 == 0 && vectors(p, p.transposed, p.kTransposed, 16)));
}
pydet_status quantize_tiles_packed(const Quantize &p) {
  const dim3 grid(unsigned(divide_up(p.k, kSide)), unsigned(divide_up(p.m, kSide)));
  return with_types(p, [&](auto type, auto fp8) {
    constexpr Type of_x = decltype(type)::value, of_out = decltype(fp8)::value;
    return start("cuda_quantize_tiles_packed", p, grid, kThreads,
                 p.transposed.data ? quantize_tiles<of_x, of_out, true> : quantize_tiles<of_x, of_out, false>);
  });
}

}  // namespace pydet
