// What the general kernels of attention's gradients by mma.sync share (attention_backward_keys_mma.cu,
// attention_backward_queries_mma.cu). Most problems have fast ones (attention_backward_mma_team.h), which call these where
// a result is not finite.
//
//   A block of four warps has a tile of 64 vectors, a warp 16 of them, of one side (keys, or queries); it walks vectors
//   of the other side, 32 at a time. Both sides have two operands: first q or k, second dout or v. The products of a
//   warp's vectors and those that are walked are its scores and what their gradients are made of; rounded, they are
//   operands as they lie in registers, of the products that the results are summed from. Where a head fits, the tile
//   stays in shared memory; else both sides come in pieces of 128 columns. An m16n8k16 is one step of sm90 on Hopper
//   and later, two of sm80 before (gemm_mma.cu).
//
// A pair that is not allowed has weight 0, and 0 times a number is 0 unless that is Inf or NaN. A tile with a result
// that is not finite is therefore made again row by row, with zeros for what such pairs would meet.
#pragma once

#include "gpu/any/attention_backward.h"
#include "gpu/nvidia/mma.h"

namespace pydet {

// How a launch lets a kernel work.
struct AttentionBackwardWay {
  int width;     // columns of a vector in shared memory
  bool aligned;  // vectors of eight elements begin at multiples of 16 bytes
};
inline bool adjusts_scores(const Attention &p) { return p.bias.data || p.softcap != 0.0f; }

pydet_status load_keys_mma(const char *name, const AttentionBackward &, const AttentionBackwardWay &);
pydet_status make_keys_mma(const char *name, const AttentionBackward &, const AttentionBackwardWay &);
pydet_status load_queries_mma(const char *name, const AttentionBackward &, const AttentionBackwardWay &);
pydet_status make_queries_mma(const char *name, const AttentionBackward &, const AttentionBackwardWay &);

namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRows = 16 * kWarps;  // of a tile
constexpr int kWalked = 32;         // keys or queries at a time
constexpr int kStep = 16;           // of one mma
constexpr int kColumns = 64;        // of a result, in a block
constexpr int kVector = 8;          // elements in 16 bytes
constexpr int kPad = kVector;       // so that eight rows at one column lie in all banks
constexpr int kPiece = 128;         // columns of a head that is not there as a whole
constexpr int kMostKeys = 1 << 30;

PYDET_HD constexpr int used(int64_t d) { return int((d + kStep - 1) / kStep * kStep); }

// Beside the operands.
struct Shared {
  Extent extent;
  int64_t tile[2][kRows], walked[2][kWalked];  // where vectors begin; less than 0 for zeros
  RowBehind behind[kWalked];                   // of rows that are walked
  int first[kWalked], end[kWalked];            // the keys that they may see
};
constexpr int kOperands = (int(sizeof(Shared)) + 127) / 128 * 128;  // where they begin
inline int shared_bytes(int width) { return kOperands + 2 * 2 * (kRows + kWalked) * (width + kPad); }

#if defined(__CUDACC__)

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
using Exp2 = HopperExp2;
#else
using Exp2 = CoarseExp2;
#endif

__device__ __forceinline__ int lane() { return int(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp() { return int(threadIdx.x) / kWarp; }
// Element 2 h + e of piece i of a fragment is this row of the tile, and of what is walked, or of the columns, number
// 8 i + pair() + e.
__device__ __forceinline__ int my_row(int h) { return 16 * warp() + lane() / 4 + 8 * h; }
__device__ __forceinline__ int pair() { return lane() % 4 * 2; }

// All threads of a general kernel: of a fast one's block, which makes a tile again, those that do.
__device__ __forceinline__ void meet_all() { named_sync(15, kThreads); }

using Scores = float[kWalked / 8][4];  // of 16 rows and what is walked, a warp's
using Sums = float[kColumns / 8][4];

// Four operands side by side: of the tile and of what is walked, first q or k, second dout or v.
template <Type type> class Products {
 public:
  __device__ Products(Shared &shared, const AttentionBackwardWay &way, const Attention &p)
      : shared_(shared), way_(way), p_(p), stride_(way.width + kPad) {}

  __device__ bool whole() const { return used(p_.d) <= way_.width && used(p_.e) <= way_.width; }
  __device__ void load_tile(int which, const char *data) {
    if (whole()) load<kRows>(tile(which), data, shared_.tile[which], width(which), 0);
  }
  // Whole vectors of what is walked now. Every thread has left those before.
  __device__ void load_walked(int which, const char *data) {
    if (whole()) load<kWalked>(walked(which), data, shared_.walked[which], width(which), 0);
  }

  // Chains over the whole width. Every thread calls it.
  __device__ void chain(Scores &sums, int which, const char *of_tile, const char *of_walked) {
#pragma unroll
    for (int i = 0; i < kWalked / 8; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) sums[i][q] = 0.0f;
    if (whole()) return chain_piece(sums, which, used(width(which)));
#pragma unroll 1
    for (int d0 = 0; d0 < width(which); d0 += way_.width) {
      meet_all();
      load<kRows>(tile(which), of_tile, shared_.tile[which], width(which), d0);
      load<kWalked>(walked(which), of_walked, shared_.walked[which], width(which), d0);
      landed();
      const int left = used(width(which) - d0);
      chain_piece(sums, which, left < way_.width ? left : way_.width);
    }
  }

  // Columns from column0 on of what is walked are there for add. Every thread calls it, for both before it adds.
  __device__ void load_columns(int which, const char *of_walked, int column0) {
    if (whole() || column0 >= width(which)) return;
    load<kWalked>(walked(which), of_walked, shared_.walked[which], width(which), column0);
  }

  // All that was loaded is there for all.
  __device__ void landed() {
    commit_copies();
    wait_copies<0>();
    meet_all();
  }

  // sums += factors and the columns of what is walked from column0 on.
  __device__ void add(Sums &sums, const Scores &factors, int which, int column0) const {
    const uint16_t *from = walked(which) + (whole() ? column0 : 0);
    const int here = used(width(which)) - column0;
#pragma unroll
    for (int step = 0; step < kWalked / kStep; ++step) {
      uint32_t a[4];
      load_left(a, factors, step);
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        if (16 * i >= here) break;
        uint32_t b[4];
        load_right<true>(b, from + kStep * step * stride_ + 16 * i);
        mma<type>(sums[2 * i], a, b[0], b[1]);
        mma<type>(sums[2 * i + 1], a, b[2], b[3]);
      }
    }
  }

  // The same row by row, with zeros for what a row does not see. seen[h]: bit 2 i + e of element 2 h + e of piece i.
  __device__ void add_by_rows(Sums &sums, const Scores &factors, const uint32_t (&seen)[2], int which,
                              int column0) const {
    const uint16_t *from = walked(which) + (whole() ? column0 : 0);
    const int here = used(width(which)) - column0;
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
      const uint32_t low = __shfl_sync(0xFFFFFFFFu, seen[0], r % 8 * 4 + lane() % 4),
                     high = __shfl_sync(0xFFFFFFFFu, seen[1], r % 8 * 4 + lane() % 4), bits = r < 8 ? low : high;
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        if (16 * i >= here) break;
        float own[2][4];
#pragma unroll
        for (int q = 0; q < 8; ++q) own[q / 4][q % 4] = sums[2 * i + q / 4][q % 4];
#pragma unroll
        for (int step = 0; step < kWalked / kStep; ++step) {
          uint32_t a[4], b[4];
          load_left(a, factors, step);
#pragma unroll
          for (int k = 0; k < 4; ++k) a[k] = lane() / 4 + k % 2 * 8 == r ? a[k] : 0;
          load_right<true>(b, from + kStep * step * stride_ + 16 * i);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const uint32_t both = bits >> (4 * step + k % 2 * 2);
            b[k] &= (both & 1 ? 0xFFFFu : 0) | (both & 2 ? 0xFFFF0000u : 0);
          }
          mma<type>(own[0], a, b[0], b[1]);
          mma<type>(own[1], a, b[2], b[3]);
        }
#pragma unroll
        for (int q = 0; q < 8; ++q)
          if (lane() / 4 + q % 4 / 2 * 8 == r) sums[2 * i + q / 4][q % 4] = own[q / 4][q % 4];
      }
    }
  }

 private:
  __device__ int width(int which) const { return int(which ? p_.e : p_.d); }
  __device__ uint16_t *tile(int which) const {
    return reinterpret_cast<uint16_t *>(reinterpret_cast<char *>(&shared_) + kOperands) +
           which * (kRows + kWalked) * stride_;
  }
  __device__ uint16_t *walked(int which) const { return tile(which) + kRows * stride_; }

  // Columns [d0, d0 + way.width) of so many vectors into shared memory, zeros behind their ends.
  template <int count>
  __device__ void load(uint16_t *to, const char *data, const int64_t *at, int width, int d0) const {
    const int left = used(width - d0), vectors = (left < way_.width ? left : way_.width) / kVector;
#pragma unroll 2
    for (int i = int(threadIdx.x); i < count * vectors; i += kThreads) {
      const int r = i / vectors, d = i % vectors * kVector;
      const bool there = at[r] >= 0 && d0 + d < width;
      copy_vector(to + r * stride_ + d, data, there ? at[r] + d0 + d : 0, there);
    }
  }
  // Eight elements from `at` on, or zeros.
  __device__ void copy_vector(uint16_t *to, const char *data, int64_t at, bool there) const {
    const uint16_t *from = reinterpret_cast<const uint16_t *>(data) + at;
    if (way_.aligned) return copy_async_16(to, from, there ? 16 : 0);
    uint32_t words[4] = {};
    if (there)
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = from[2 * i] | uint32_t(from[2 * i + 1]) << 16;
    *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }

  __device__ void chain_piece(Scores &sums, int which, int depth) const {
#pragma unroll 1
    for (int d = 0; d < depth; d += kStep) {
      uint32_t a[4];
      load_matrices<false>(a,
                           shared_address(tile(which) + (16 * warp() + lane() % 16) * stride_ + d + lane() / 16 * 8));
#pragma unroll
      for (int i = 0; i < kWalked / 16; ++i) {
        uint32_t b[4];
        load_right<false>(b, walked(which) + 16 * i * stride_ + d);
        mma<type>(sums[2 * i], a, b[0], b[1]);
        mma<type>(sums[2 * i + 1], a, b[2], b[3]);
      }
    }
  }

  // Factors of 16 of what is walked, rounded, as the left operand of an mma.
  __device__ static void load_left(uint32_t (&a)[4], const Scores &factors, int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float *two = &factors[2 * step + i / 2][i % 2 * 2];
      a[i] = rounded_pair<type>(two[0], two[1]);
    }
  }
  // Two operands of eight columns from 16 rows of shared memory, k along the rows, or across them (`turned`).
  template <bool turned> __device__ void load_right(uint32_t (&b)[4], const uint16_t *from) const {
    const int matrix = lane() / 8, k = matrix % 2 * 8, n = matrix / 2 * 8;
    load_matrices<turned>(
        b, shared_address(turned ? from + (k + lane() % 8) * stride_ + n : from + (n + lane() % 8) * stride_ + k));
  }

  Shared &shared_;
  const AttentionBackwardWay &way_;
  const Attention &p_;
  const int stride_;  // of the operands in shared memory
};

// What a block of the general kernels works at.
struct GeneralTile {
  const AttentionBackward &p_;
  const Attention &f_;
  const ScoreScale &scale_;
  Shared &shared_;
  const int s_, group_, column0_;
  const Extent &extent_;
  __device__ GeneralTile(const AttentionBackward &problem, const ScoreScale &scale, Shared &shared, int64_t s,
                         int64_t group, int column0)
      : p_(problem),
        f_(problem.forward),
        scale_(scale),
        shared_(shared),
        s_(int(s)),
        group_(int(group)),
        column0_(column0),
        extent_(shared.extent) {
    if (threadIdx.x == 0) shared.extent = extent_of(f_, s);
    meet_all();
  }
};

__device__ __forceinline__ void clear(Sums &sums) {
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
    for (int q = 0; q < 4; ++q) sums[i][q] = 0.0f;
}

__device__ __forceinline__ bool not_finite(const Sums &sums) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
    for (int q = 0; q < 4; ++q) found |= !(fabsf(sums[i][q]) < INFINITY);
  return found;
}

// ---- Pairs ---------------------------------------------------------------------------------------------------------

// A thread's scores become weights, and their gradients. seen: which of its pairs are allowed, bit 2 i + e of seen[h]
// for element 2 h + e of piece i; it comes as causal and window let them. `at` says what meets at vector w that is
// walked and my_row(h): at.row(w, h), at.behind(w, h), at.key(w, h).
template <bool adjusts, class Meeting>
__device__ __forceinline__ void weigh_pairs(const AttentionBackward &p, const ScoreScale &scale, int64_t sequence,
                                            const Extent &extent, uint32_t (&seen)[2], Scores &scores,
                                            Scores &gradients, const Meeting &at) {
  if (p.forward.allowed.data)
#pragma unroll 1
    for (int n = 0; n < kWalked / 4; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int w = n / 2 * 8 + pair() + n % 2;
        if (seen[h] >> n & 1 && !sees(p.forward, sequence, extent, at.row(w, h), at.key(w, h))) seen[h] &= ~(1u << n);
      }
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int i = 0; i < kWalked / 8; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int n = 2 * i + e, w = 8 * i + pair() + e;
        bool allowed = seen[h] >> n & 1;
        weigh_pair<Exp2, adjusts>(p, scale, sequence, extent, at.row(w, h), at.behind(w, h), at.key(w, h), allowed,
                                  scores[i][2 * h + e], gradients[i][2 * h + e]);
        if (!allowed) seen[h] &= ~(1u << n);
      }
}

#endif

}  // namespace
}  // namespace pydet
