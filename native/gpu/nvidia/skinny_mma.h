// How skinny_mma.cu cuts a problem and brings its operands: two rings of stages in shared memory, one of w, which is
// evicted first from the L2 where an architecture can be told so, and one of x, each filled by two warps with cp.async.
#pragma once

#include "gpu/any/epilogue.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/mma.h"
#include "ops/gemm/problem.h"

namespace pydet {
namespace {

constexpr int kWarp = 32;
constexpr int kStep = 16;        // k of one mma
constexpr int kPiece = 8;        // elements in 16 bytes
constexpr int kTileRows = 16;    // of w in one mma
constexpr int kTileColumns = 8;  // rows of x in one mma
constexpr int kMostM = 128;
constexpr int kMostWarps = 8;                  // that multiply
constexpr int kWThreads = 64, kXThreads = 64;  // that load
constexpr int kMostThreads = kMostWarps * kWarp + kWThreads + kXThreads;
constexpr int kMostStages = 32;  // of a ring
constexpr int kBarrierBytes = 4 * kMostStages * 8;

// What a warp multiplies: `rows` tiles of w by `columns` of x. Where that is little, a stage is longer.
template <Type input, int row_tiles, int column_tiles> struct Shape {
  static constexpr Type type = input;
  static constexpr int rows = row_tiles, columns = column_tiles;
  static constexpr int stage_k = columns <= 2 ? 128 : 64, stage_steps = stage_k / kStep;
  static constexpr int row_bytes = stage_k * 2, row_pieces = stage_k / kPiece;
};

// How a problem is cut and the rings are laid out. Counts of stages are multiples of `groups`: each place of a ring
// then belongs to one group, for which the parity of its barriers is enough.
struct Plan {
  int rows;              // of w, a block
  int parts, part_rows;  // blocks that share rows of w, and rows of x that each of them has
  int warps_w, warps_x;  // of a group: along w and along x
  int groups;            // of warps, a chunk each at a time
  int x_rows;            // that a stage of x has room for
  int w_stages, x_stages;
  int tiles, blocks;       // tiles: in all
  int steps, chunk_steps;  // chunk_steps = steps without k_chunk
  int w_unit, x_unit;      // bytes that are copied at once: 16, 8 or 4, as rows begin
};

// A group's place in a ring of `stages`.
struct Cursor {
  int stages, by, stage, parity = 0;
  __device__ __forceinline__ Cursor(int count, int first, int turn) : stages(count), by(turn), stage(first) {}
  __device__ __forceinline__ void next() {
    if ((stage += by) >= stages) stage -= stages, parity ^= 1;
  }
};

// Addresses in shared memory: the ring of w, that of x, barriers, and room for joining sums.
template <class S> struct Layout {
  int w_bytes, x_bytes;  // of a stage
  uint32_t w, x, barriers, joins;
  __device__ __forceinline__ Layout(const Plan &p, uint32_t start)
      : w_bytes(p.rows * S::row_bytes),
        x_bytes(p.x_rows * S::row_bytes),
        w(start),
        x(w + p.w_stages * w_bytes),
        barriers(x + p.x_stages * x_bytes),
        joins(barriers + kBarrierBytes) {}
  __device__ __forceinline__ uint32_t w_full(int i) const { return barriers + i * 8; }
  __device__ __forceinline__ uint32_t w_empty(int i) const { return barriers + (kMostStages + i) * 8; }
  __device__ __forceinline__ uint32_t x_full(int i) const { return barriers + (2 * kMostStages + i) * 8; }
  __device__ __forceinline__ uint32_t x_empty(int i) const { return barriers + (3 * kMostStages + i) * 8; }
};

// ---- Loads -------------------------------------------------------------------------------------------------------

// The `valid` first bytes of a piece, and +0 behind them.
template <bool evict_first, int unit>
__device__ __forceinline__ void copy_piece(uint32_t to, const void *from, int valid, uint64_t policy) {
  if constexpr (unit < 16)
#pragma unroll
    for (int i = 0; i < 16; i += unit) {
      const int left = valid - i, bytes = left <= 0 ? 0 : left < unit ? left : unit;
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to + i),
                   "l"(static_cast<const char *>(from) + (bytes ? i : 0)), "n"(unit), "r"(bytes)
                   : "memory");
    }
  else if constexpr (evict_first)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(valid),
                 "l"(policy)
                 : "memory");
  else asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}

// Where the piece lies in a stage: eight rows of one piece share no bank.
template <class S> __device__ __forceinline__ int place(int row, int piece) {
  return row * S::row_bytes + ((piece ^ (row & 7)) << 4);
}

// f(first step, steps) for every stage of a tile: each begins anew with a chunk, and the groups take turns. A group
// whose chunk has ended, or is not there, gets a stage of no steps.
template <class S, class F> __device__ __forceinline__ void each_stage(const Plan &p, const F &f) {
  for (int first = 0; first < p.steps; first += p.groups * p.chunk_steps) {
    const int longest = min(p.chunk_steps, p.steps - first);
    for (int i = 0; i < longest; i += S::stage_steps)
      for (int group = 0; group < p.groups; ++group) {
        const int start = first + group * p.chunk_steps + i;
        f(start, max(0, min(S::stage_steps, min(p.chunk_steps - i, p.steps - start))));
      }
  }
}

// One of `threads` threads that fill a stage with `rows` rows of a matrix, from element k of `first_row` on; the
// stage's other rows, and what lies past its steps, keep whatever they hold.
template <class S, int threads, bool evict_first, int unit>
__device__ __forceinline__ void load_stage(uint32_t to, const uint16_t *first_row, int64_t stride, int rows,
                                           int64_t k_end, int start, int steps, int thread, uint64_t policy) {
  constexpr int kRowsAtOnce = threads / S::row_pieces;
  const int piece = thread % S::row_pieces, first = thread / S::row_pieces;
  if (piece * kPiece >= steps * kStep) return;
  const int64_t k = int64_t(start) * kStep + piece * kPiece, left = k_end - k;
  const int valid = left <= 0 ? 0 : left < kPiece ? int(left) : kPiece;
  const uint16_t *from = first_row + first * stride + (valid ? k : 0);
#pragma unroll 4
  for (int row = first; row < rows; row += kRowsAtOnce, from += kRowsAtOnce * stride)
    copy_piece<evict_first, unit>(to + place<S>(row, piece), from, valid * 2, policy);
}

template <class S, int unit>
__device__ __forceinline__ void load_weights(const Gemm &g, const Plan &p, const Layout<S> &at, int thread) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  if (!g.weights_constant) wait_for_previous_kernel();
  Cursor ring(p.w_stages, 0, 1);
  for (int tile = int(blockIdx.x); tile < p.tiles; tile += int(gridDim.x)) {
    const int n0 = tile / p.parts * p.rows, rows = min(p.rows, int(g.n) - n0);
    const uint16_t *first_row = reinterpret_cast<const uint16_t *>(g.b.data) + n0 * g.b.col_stride;
    each_stage<S>(p, [&](int start, int steps) {
      barrier_wait(at.w_empty(ring.stage), ring.parity ^ 1);
      load_stage<S, kWThreads, true, unit>(at.w + ring.stage * at.w_bytes, first_row, g.b.col_stride, rows, g.k, start,
                                           steps, thread, policy);
      barrier_arrive_after_copies(at.w_full(ring.stage));
      ring.next();
    });
  }
  // The next kernel's first loads of w then take their turn in the memory behind the last of ours.
  wait_for_previous_kernel();
  let_next_kernel_start();
}

template <class S, int unit>
__device__ __forceinline__ void load_x(const Gemm &g, const Plan &p, const Layout<S> &at, int thread) {
  wait_for_previous_kernel();
  Cursor ring(p.x_stages, 0, 1);
  for (int tile = int(blockIdx.x); tile < p.tiles; tile += int(gridDim.x)) {
    const int m0 = tile % p.parts * p.part_rows, rows = min(p.part_rows, int(g.m) - m0);
    const uint16_t *first_row = reinterpret_cast<const uint16_t *>(g.a.data) + m0 * g.a.row_stride;
    each_stage<S>(p, [&](int start, int steps) {
      barrier_wait(at.x_empty(ring.stage), ring.parity ^ 1);
      load_stage<S, kXThreads, false, unit>(at.x + ring.stage * at.x_bytes, first_row, g.a.row_stride, rows, g.k, start,
                                            steps, thread, 0);
      barrier_arrive_after_copies(at.x_full(ring.stage));
      ring.next();
    });
  }
}

}  // namespace
}  // namespace pydet
