// y = round(chain_k(x, w) + bias) for few rows of x and many weights, in arithmetic ieee on plain fp32 units.
//
//   chain: c = fmaf(x[m, k], w[n, k], c), k ascending, from +0 or y; or chains of k_chunk, their sums added ascending
//
// A block of 4 warps (on AMD 8) makes 32 rows of w (columns of y), one a lane, for up to 16 rows of x, dealt out to the
// warps in turn. Both operands pass through 5 stages of 512 bytes a row in shared memory, copied in whole 16 bytes as they lie
// in memory: w is read back along k by the lane that owns the row, x by all lanes at once. The memory's speed is
// reached where N is large; where it is small the chain takes 7 ns a step of fp32, 5 of bf16 (H100). Where copies are not
// asynchronous a thread holds its pieces of the next stage while it multiplies this one.
// Zeros past K would turn a chain of -0 into +0, so the last stage is walked to K and no further.

#include <algorithm>

#include "gpu/any/epilogue.h"
#include "gpu/kernels.h"
#include "ops/gemm/problem.h"

namespace pydet {
namespace {

constexpr bool kHolds = kGpuDeviceType != PYDET_CUDA;
constexpr int kWarps = kHolds ? 8 : 4, kLanes = 32, kThreads = kWarps * kLanes;
constexpr int kRowBytes = 512;  // of an operand's row in a stage
constexpr int kPieces = kRowBytes / 16;
constexpr int kRowPitch = kRowBytes + 16;  // eight lanes' 16 bytes then fill the banks once
constexpr int kMostM = 16, kMostPerWarp = kMostM / kWarps;

// A stage: rows of w, then rows of x.
template <int per_warp> constexpr int kStageRows = kLanes + kWarps * per_warp;
template <int per_warp> constexpr int kStages = gpu_stages(5, kStageRows<per_warp> *kRowPitch);
template <int per_warp> constexpr int kSharedBytes = kStages<per_warp> * kStageRows<per_warp> * kRowPitch;
static_assert(kThreads % kPieces == 0, "a row's pieces are copied by neighbouring threads");

// The elements in 16 bytes as fp32.
template <Type type> __device__ __forceinline__ void widen(float (&to)[16 / size_of(type)], const uint4 &from) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (type == Type::f32) to[i] = float_of(words[i]);
    else if constexpr (is_bf16<type>())
      to[2 * i] = float_of(words[i] << 16), to[2 * i + 1] = float_of(words[i] & 0xFFFF0000u);
    else to[2 * i] = f32_from_f16(uint16_t(words[i])), to[2 * i + 1] = f32_from_f16(uint16_t(words[i] >> 16));
  }
}

// `per_warp` rows of x belong to a warp: rows warp, warp + 4, ...
template <Type type, int per_warp>
__global__ void __launch_bounds__(kThreads) skinny_ieee_kernel(const __grid_constant__ Gemm problem) {
  constexpr int kSize = size_of(type), kPiece = 16 / kSize, kDepth = kRowBytes / kSize;
  constexpr int kStageBytes = kStageRows<per_warp> * kRowPitch, kRowsAtOnce = kThreads / kPieces;
  extern __shared__ __align__(16) char shared[];
  const int warp = int(threadIdx.x) / kLanes, lane = int(threadIdx.x) % kLanes;
  const int64_t k_end = problem.k, stage_count = (k_end + kDepth - 1) / kDepth;
  const bool folds = problem.k_chunk > 0;

  // Pieces of 16 bytes that are held, of the rows that this thread copies of a stage.
  constexpr int kHeldPieces = kHolds ? (kStageRows<per_warp> + kRowsAtOnce - 1) / kRowsAtOnce : 1;
  [[maybe_unused]] uint4 held[kHeldPieces];

  wait_for_previous_kernel();
  for (int64_t tile = blockIdx.x; tile * kLanes < problem.n; tile += gridDim.x) {
    const int64_t n0 = tile * kLanes, n = n0 + lane;

    auto fill = [&](int64_t s) {
      if (s < stage_count) {
        char *to = shared + s % kStages<per_warp> * kStageBytes + int(threadIdx.x) % kPieces * 16;
        const int64_t k = s * kDepth + int(threadIdx.x) % kPieces * kPiece, left = k_end - k;
        const int valid = left <= 0 ? 0 : left < kPiece ? int(left) : kPiece;
#pragma unroll
        for (int row = int(threadIdx.x) / kPieces; row < kStageRows<per_warp>; row += kRowsAtOnce) {
          const bool is_w = row < kLanes;
          const Matrix &from = is_w ? problem.b : problem.a;
          const int64_t at = is_w ? n0 + row : row - kLanes;
          const int64_t stride = is_w ? problem.b.col_stride : problem.a.row_stride;
          const int bytes = at < (is_w ? problem.n : problem.m) ? valid * kSize : 0;
          copy_async_16(to + row * kRowPitch, from.data + (bytes ? (at * stride + k) * kSize : 0), bytes);
        }
      }
      commit_copies();  // an empty group past the end, so that the count of groups in flight stays the same
    };
    // The same in two steps. Of rows that are not there the first one's elements come: no result has part of them.
    [[maybe_unused]] auto fetch = [&](int64_t s) {
      static_assert(kLanes % kRowsAtOnce == 0, "a piece held is of w or of x for all threads");
      const int64_t k = s * kDepth + int(threadIdx.x) % kPieces * kPiece, left = k_end - k;
      auto from = [&](int i) {
        const int row = int(threadIdx.x) / kPieces + i * kRowsAtOnce;
        if (i < kLanes / kRowsAtOnce)
          return problem.b.data + ((n0 + row < problem.n ? n0 + row : 0) * problem.b.col_stride + k) * kSize;
        return problem.a.data + ((row - kLanes < problem.m ? row - kLanes : 0) * problem.a.row_stride + k) * kSize;
      };
      if (left >= kPiece) {
#pragma unroll
        for (int i = 0; i < kHeldPieces; ++i) held[i] = *reinterpret_cast<const uint4 *>(from(i));
      } else {
#pragma unroll
        for (int i = 0; i < kHeldPieces; ++i) {
          uint32_t words[4] = {};
#pragma unroll
          for (int e = 0; e < kPiece; ++e)
            if (e < left)
              words[e * kSize / 4] |= uint32_t(reinterpret_cast<const typename Element<type>::Bits *>(from(i))[e])
                                      << e * kSize % 4 * 8;
          held[i] = {words[0], words[1], words[2], words[3]};
        }
      }
    };
    [[maybe_unused]] auto deposit = [&](int64_t s) {
      char *to = shared + s % kStages<per_warp> * kStageBytes + int(threadIdx.x) % kPieces * 16;
#pragma unroll
      for (int i = 0; i < kHeldPieces; ++i) {
        const int row = int(threadIdx.x) / kPieces + i * kRowsAtOnce;
        if (row < kStageRows<per_warp>) *reinterpret_cast<uint4 *>(to + row * kRowPitch) = held[i];
      }
    };
    if constexpr (kHolds) {
      if (stage_count > 0) fetch(0), deposit(0);
      __syncthreads();
    } else {
      for (int s = 0; s < kStages<per_warp> - 1; ++s) fill(s);
    }

    float chain[per_warp] = {}, sum[per_warp] = {};
    if (problem.accumulate && n < problem.n)
#pragma unroll
      for (int i = 0; i < per_warp; ++i)
        if (warp + i * kWarps < problem.m) {
          float start = load_f32(problem.out.data, problem.out.type, (warp + i * kWarps) * problem.out.row_stride + n);
          if (folds) sum[i] = start;
          else chain[i] = start;
        }
    int64_t chunk_left = problem.k_chunk;
    for (int64_t s = 0; s < stage_count; ++s) {
      if constexpr (kHolds) {
        if (s + 1 < stage_count) fetch(s + 1);
      } else {
        wait_copies<kStages<per_warp> - 2>();
        __syncthreads();  // stage s has landed, and everyone has left the one that is filled next
        fill(s + kStages<per_warp> - 1);
        if (warp >= problem.m) continue;
      }

      const char *stage = shared + s % kStages<per_warp> * kStageBytes;
      const uint4 *w_row = reinterpret_cast<const uint4 *>(stage + lane * kRowPitch);
      const uint4 *x_row = reinterpret_cast<const uint4 *>(stage + (kLanes + warp) * kRowPitch);
      constexpr int kNextX = kWarps * kRowPitch / 16;
      // `count` fmaf a chain on 16 bytes of every row.
      auto walk = [&](const uint4 &w_piece, const uint4(&x_pieces)[per_warp], int count) {
        float w[kPiece];
        widen<type>(w, w_piece);
#pragma unroll
        for (int i = 0; i < per_warp; ++i) {
          float x[kPiece];
          widen<type>(x, x_pieces[i]);
#pragma unroll
          for (int j = 0; j < kPiece; ++j)
            if (j < count) chain[i] = fmaf(x[j], w[j], chain[i]);
        }
      };
      const int64_t left = k_end - s * kDepth;
      if (kHolds && warp >= problem.m) {
        // has no row of x, but copies
      } else if (left >= kDepth && !folds) {
        // A piece is read two ahead of its use: what shared memory takes to answer.
        constexpr int kAhead = 2;
        uint4 w[kAhead], x[kAhead][per_warp];
        auto read = [&](int piece) {
          w[piece % kAhead] = w_row[piece];
#pragma unroll
          for (int i = 0; i < per_warp; ++i) x[piece % kAhead][i] = x_row[i * kNextX + piece];
        };
#pragma unroll
        for (int piece = 0; piece < kAhead; ++piece) read(piece);
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const uint4 w_now = w[piece % kAhead];
          uint4 x_now[per_warp];
#pragma unroll
          for (int i = 0; i < per_warp; ++i) x_now[i] = x[piece % kAhead][i];
          if (piece + kAhead < kPieces) read(piece + kAhead);
          walk(w_now, x_now, kPiece);
        }
      } else {
#pragma unroll 1
        for (int piece = 0; piece < kPieces && piece * kPiece < left; ++piece) {
          const int64_t here = left - piece * kPiece;
          uint4 x_now[per_warp];
#pragma unroll
          for (int i = 0; i < per_warp; ++i) x_now[i] = x_row[i * kNextX + piece];
          walk(w_row[piece], x_now, here < kPiece ? int(here) : kPiece);
          chunk_left -= kPiece;
          if (folds && (chunk_left == 0 || here <= kPiece)) {
            chunk_left = problem.k_chunk;
#pragma unroll
            for (int i = 0; i < per_warp; ++i) {
              sum[i] += chain[i];
              chain[i] = 0.0f;
            }
          }
        }
      }
      if constexpr (kHolds) {  // of two stages: what is filled now was last read before the barrier ahead
        if (s + 1 < stage_count) deposit(s + 1);
        __syncthreads();
      }
    }
    __syncthreads();  // the next tile's first stages overwrite this one's last

    if (n < problem.n)
#pragma unroll
      for (int i = 0; i < per_warp; ++i) {
        int64_t m = warp + i * kWarps;
        if (m >= problem.m) break;
        float y = folds ? sum[i] : chain[i];
        if (problem.bias.data)
          y +=
              load_f32(problem.bias.data, problem.bias.type, m * problem.bias.row_stride + n * problem.bias.col_stride);
        store_rounded(problem.out.data, problem.out.type, m * problem.out.row_stride + n, y);
      }
  }
}

template <Type type, int per_warp> pydet_status launch_warps(const Gemm &g) {
  constexpr int64_t kMaxBlocks = 1 << 20;  // more tiles than that are walked in turns
  Launch shape = {"skinny_gemm_ieee", static_cast<gpu_stream>(g.stream),
                  dim3(unsigned(std::min(divide_up(g.n, kLanes), kMaxBlocks))), dim3(kThreads), kSharedBytes<per_warp>};
  DeviceGuard guard(g.device.id);
  if (guard.error() != kGpuSuccess) return device_error(shape.kernel, guard.error());
  shape.overlaps_previous = gpu_overlaps_kernels(g.device.id);
  return launch(shape, skinny_ieee_kernel<type, per_warp>, g);
}

template <Type type> pydet_status launch_type(const Gemm &g) {
  if (g.m <= kWarps) return launch_warps<type, 1>(g);
  if constexpr (kMostPerWarp > 2)
    if (g.m > 2 * kWarps) return launch_warps<type, kMostPerWarp>(g);
  return launch_warps<type, 2>(g);
}

}  // namespace

bool skinny_ieee_takes(const Gemm &g) {
  // Rows along k, copied in aligned pieces of 16 bytes.
  auto copies = [&](const Matrix &matrix, int64_t k_stride, int64_t stride, int64_t count) {
    return (k_stride == 1 || g.k <= 1) && (count == 1 || stride * size_of(matrix.type) % 16 == 0) &&
           reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0;
  };
  return g.m <= kMostM && g.batch.count == 1 && copies(g.a, g.a.col_stride, g.a.row_stride, g.m) &&
         copies(g.b, g.b.row_stride, g.b.col_stride, g.n);
}

pydet_status skinny_ieee(const Gemm &g) {
  return with_type<kUnscaledTypes>(g.b.type, [&](auto type) { return launch_type<type>(g); });
}

}  // namespace pydet
