// Scaled GEMM of fp8 for few rows of a and many columns of b, in arithmetic ieee on plain fp32 units, with chunks of 128
// along k (NUMERICS.md, "Scaled GEMM"): the CPU's bits.
//
//   s_c: s = fmaf(a[m, k], b[k, n], s), k ascending over chunk c, from +0
//   D = fmaf(fl(sa[m, c] sb[c, n]), s_c, D) or fl(D + s_c), c ascending, from +0 or out
//
// Chunks do not wait for each other: a block of 256 threads takes 16 columns, and of each 16 chunks at a time, a thread
// one of them, for up to 4 rows. It loads its chunk of b, 128 bytes, while it multiplies the one before. a passes through
// shared memory as fp32. After each round a thread for every element of out adds the 16 sums in their order.
//
// A byte of e4m3 is an fp16 of 2^-8 times its value once its sign and the rest are moved, subnormals too, and one of e5m2
// is the upper byte of an fp16: so b is made fp32 by an instruction of the hardware. What it is too small by, a is too
// large by, both exactly, so the products are the same. e4m3's NaN would be a number: a chunk of b that has one is NaN.

#include "gpu/any/epilogue.h"
#include "gpu/any/quads.h"
#include "gpu/any/scales.h"
#include "gpu/kernels.h"

namespace pydet {
namespace {

constexpr int kColumns = 16, kChunks = 16, kThreads = kColumns * kChunks;
constexpr int kPieces = kScaleGroup / 16;  // of 16 bytes, of a chunk
constexpr int kMostM = 16, kMostRows = 4;  // of a call, of a block

template <Type type> constexpr float kWhole = type == Type::e4m3 ? 256.0f : 1.0f;  // what makes widen's numbers whole

// Four bytes as fp32, of e4m3 2^-8 times too small; what of them is NaN shows in the upper bits of `nan`.
template <Type type> __device__ __forceinline__ void widen(uint32_t word, float (&to)[4], uint32_t &nan) {
  uint32_t even = word << 8, odd = word;  // fp16's upper bytes: of 0 and 2, of 1 and 3
  if constexpr (type == Type::e4m3) {
    nan |= (word & 0x7F7F7F7Fu) + 0x01010101u;
    even = (even & 0x80008000u) | (word << 7 & 0x3F803F80u);
    odd = (odd & 0x80008000u) | (word >> 1 & 0x3F803F80u);
  } else {
    even &= 0xFF00FF00u, odd &= 0xFF00FF00u;
  }
#if defined(__HIP_PLATFORM_AMD__)  // two fp16 of one register: v_fma_mix_f32 takes either as it is
  asm("" : "+v"(even), "+v"(odd));
#endif
  to[0] = f32_from_f16(uint16_t(even)), to[1] = f32_from_f16(uint16_t(odd));
  to[2] = f32_from_f16(uint16_t(even >> 16)), to[3] = f32_from_f16(uint16_t(odd >> 16));
}

template <Type type, int rows> __global__ void __launch_bounds__(kThreads, rows == kMostRows ? 1 : 2)
    scaled_skinny_ieee_kernel(const __grid_constant__ ScaledGemm g) {
  constexpr int kChunkPitch = rows * kScaleGroup + kQuad;  // floats: chunks side by side lie in other banks
  __shared__ __align__(16) float a_stage[kChunks * kChunkPitch];
  __shared__ float2 sums[kChunks][rows][kColumns];  // the scale of a sum, and the sum
  const int thread = int(threadIdx.x), column = thread % kColumns, slot = thread / kColumns;
  const int64_t n = int64_t(blockIdx.x) * kColumns + column, m0 = int64_t(blockIdx.y) * rows;
  const int64_t chunks = (g.k + kScaleGroup - 1) / kScaleGroup;
  const bool is_column = n < g.n;
  const char *b_column = g.b.data + n * g.b.col_stride;

  // The element of out that this thread adds up, if it has one.
  const int64_t m = m0 + slot;
  const bool adds = slot < rows && m < g.m && is_column;
  float total = 0;
  if (adds && g.accumulate)
    total = reinterpret_cast<const float *>(g.out.data)[m * g.out.row_stride + n * g.out.col_stride];

  // What a round needs of memory: this thread's chunk of b, and 8 bytes of each row of a.
  uint4 b_next[kPieces] = {};
  uint2 a_next[rows] = {};
  auto fetch = [&](int64_t first) {
    const int64_t k = (first + slot) * kScaleGroup, k_of_a = first * kScaleGroup + thread * 8;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (is_column && k + 16 * i < g.k) b_next[i] = *reinterpret_cast<const uint4 *>(b_column + k + 16 * i);
#pragma unroll
    for (int r = 0; r < rows; ++r)
      if (m0 + r < g.m && k_of_a < g.k)
        a_next[r] = *reinterpret_cast<const uint2 *>(g.a.data + (m0 + r) * g.a.row_stride + k_of_a);
  };
  fetch(0);

  for (int64_t first = 0; first < chunks; first += kChunks) {
    uint4 b[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) b[i] = b_next[i];
    with_type<kFp8Types>(g.a.type, [&](auto of_a) {
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const int at = thread / (kScaleGroup / 8) * kChunkPitch + r * kScaleGroup + thread % (kScaleGroup / 8) * 8;
        const uint32_t words[2] = {a_next[r].x, a_next[r].y};
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          float x[kQuad];
          uint32_t nan = 0;
          widen<decltype(of_a)::value>(words[q], x, nan);
#pragma unroll
          for (int e = 0; e < kQuad; ++e) {
            x[e] *= kWhole<decltype(of_a)::value> * kWhole<type>;
            if (decltype(of_a)::value == Type::e4m3 && (nan >> 8 * e & 0x80)) x[e] = float_of(kNanF32);
          }
          *reinterpret_cast<float4 *>(a_stage + at + kQuad * q) = {x[0], x[1], x[2], x[3]};
        }
      }
    });
    __syncthreads();
    if (first + kChunks < chunks) fetch(first + kChunks);
    uint32_t a_scale[rows], b_scale = bits_of(1.0f);
    const int64_t chunk = first + slot;
    const bool scales = g.along_k && chunk < chunks && is_column;
    if (scales) b_scale = scale_bits_at(g.b_scale, n, chunk);
#pragma unroll
    for (int r = 0; r < rows; ++r)
      a_scale[r] = scales && m0 + r < g.m ? scale_bits_at(g.a_scale, m0 + r, chunk) : bits_of(1.0f);

    float chain[rows] = {};
    uint32_t nan = 0;
    auto walk = [&](int piece) {
      const uint32_t words[4] = {b[piece].x, b[piece].y, b[piece].z, b[piece].w};
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        float w[kQuad];
        widen<type>(words[q], w, nan);
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          float x[kQuad];
          load_quads(x, a_stage + slot * kChunkPitch + r * kScaleGroup + 16 * piece, q, 1);
#pragma unroll
          for (int e = 0; e < kQuad; ++e) chain[r] = fmaf(x[e], w[e], chain[r]);
        }
      }
    };
    const int64_t left = g.k - chunk * kScaleGroup;
    if (left >= kScaleGroup) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) walk(i);
    } else {
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        if (16 * i < left) walk(i);
    }
    const bool lost = type == Type::e4m3 && (nan & 0x80808080u);
#pragma unroll
    for (int r = 0; r < rows; ++r)
      sums[slot][r][column] = {scales ? scale_of_bits(g.a_scale, a_scale[r]) * scale_of_bits(g.b_scale, b_scale) : 1.0f,
                               lost ? float_of(kNanF32) : chain[r]};
    __syncthreads();
    if (adds) {
      const int count = int(min(chunks - first, int64_t(kChunks)));
      constexpr int kAtOnce = 8;  // loads that are waited for together
#pragma unroll
      for (int begin = 0; begin < kChunks; begin += kAtOnce) {
        float2 parts[kAtOnce];
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) parts[c] = sums[begin + c][slot][column];
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) {
          const float next = fmaf(parts[c].x, parts[c].y, total);  // without scales 1: fl(D + s)
          total = begin + c < count ? next : total;
        }
      }
    }
  }
  if (!adds) return;
  if (!g.along_k) total = total * scale_at(g.b_scale, 0, n, 0) * scale_at(g.a_scale, 0, m, 0);
  if (g.bias.data) total += load_f32(g.bias.data, g.bias.type, m * g.bias.row_stride + n * g.bias.col_stride);
  store_rounded(g.out.data, g.out.type, m * g.out.row_stride + n * g.out.col_stride, total);
}

template <Type type, int rows> pydet_status start(const char *name, const ScaledGemm &g) {
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  Launch shape = {name, static_cast<gpu_stream>(g.stream),
                  dim3(unsigned(divide_up(g.n, kColumns)), unsigned(divide_up(g.m, rows))), dim3(kThreads)};
  return launch(shape, scaled_skinny_ieee_kernel<type, rows>, g);
}

}  // namespace

bool scaled_skinny_ieee_takes(const ScaledGemm &g) {
  // k adjacent in whole pieces of each operand's rows.
  auto pieces = [&](const Matrix &matrix, int64_t k_stride, int64_t stride, int64_t count, int bytes) {
    return k_stride == 1 && (count == 1 || stride % bytes == 0) &&
           reinterpret_cast<uintptr_t>(matrix.data) % uintptr_t(bytes) == 0;
  };
  return g.m <= kMostM && g.batch.count == 1 && g.k > 0 && g.k % 16 == 0 && g.n <= int64_t(1) << 34 &&
         pieces(g.a, g.a.col_stride, g.a.row_stride, g.m, 8) && pieces(g.b, g.b.row_stride, g.b.col_stride, g.n, 16);
}

pydet_status scaled_skinny_ieee(const ScaledGemm &g) {
  const char *name = "scaled_skinny_ieee";
  return with_type<kFp8Types>(g.b.type, [&](auto type) {
    if (g.m == 1) return start<type, 1>(name, g);
    return g.m == 2 ? start<type, 2>(name, g) : start<type, kMostRows>(name, g);
  });
}

}  // namespace pydet
