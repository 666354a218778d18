// What one warp of grouped.cu does with its 16 rows of a tile before and after the main loop.
#pragma once

#include "gpu/nvidia/sm90/groups.h"
#include "gpu/nvidia/sm90/pipe/out.h"

namespace pydet {
namespace {

// Of its 16 rows `rows` are the group's. Lane t holds in d[4 i + 2 h + e] row t / 4 + 8 h, column 8 i + 2 (t % 4) + e.
template <class S> struct WarpTile {
  const GroupedProblem &p;
  int64_t out;           // where its first row begins, in elements
  int group, row, rows;  // row: the warpgroup's first
  int column, warp, lane;
  uint32_t staging;  // the warpgroup's, and the barrier of its threads
  int sync;

  // f(i, place, pair) for every two accumulators d[i] and d[i + 1] in out: the first's place in it, and whether the
  // second is inside too.
  template <class F> __device__ __forceinline__ void each_pair(F f) const {
#pragma unroll
    for (int i = 0; i < S::registers; i += 2) {
      const int r = lane / 4 + i % 4 / 2 * 8, c = column + i / 4 * 8 + lane % 4 * 2;
      if (r < rows && c < p.n) f(i, out + r * p.out_row_stride + c, c + 1 < p.n);
    }
  }

  // All loads are on their way before the first is waited for.
  __device__ __forceinline__ void begin_at_out(float (&d)[S::registers]) const {
    const float *from = reinterpret_cast<const float *>(p.out) + out;
    const int first = column + lane % 4 * 2;
    if (p.out_aligned && p.n % 2 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = lane / 4 + 8 * h, left = r < rows ? p.n - first : 0;
        const float *const line = from + r * p.out_row_stride + first;
#pragma unroll
        for (int j = 0; j < S::n / 8; ++j) {
          const float2 pair = 8 * j < left ? *reinterpret_cast<const float2 *>(line + 8 * j) : make_float2(0, 0);
          d[4 * j + 2 * h] = pair.x, d[4 * j + 2 * h + 1] = pair.y;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < S::registers; ++i) {
        const int r = lane / 4 + i % 4 / 2 * 8, c = first + i / 4 * 8 + i % 2;
        d[i] = r < rows && c < p.n ? from[r * p.out_row_stride + c] : 0;
      }
    }
#pragma unroll
    for (float &x : d) asm volatile("mov.f32 %0, %1;" : "=f"(x) : "f"(canonical(x)));  // before the products' fence
  }

  __device__ __forceinline__ void add_bias(float (&d)[S::registers]) const {
#pragma unroll
    for (int i = 0; i < S::registers; i += 4) {
      const int c = column + i / 4 * 8 + lane % 4 * 2;
      float bias[2] = {};
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (c + e < p.n)
          bias[e] = f32_from_raw(load_raw(p.bias, group * p.bias_stride + (c + e) * p.bias_column_stride, p.bias_type),
                                 p.bias_type);
#pragma unroll
      for (int e = 0; e < 4; ++e) d[i + e] = d[i + e] + bias[e % 2];
    }
  }

  __device__ __forceinline__ void store_f32(const float (&d)[S::registers]) const {
    float *to = reinterpret_cast<float *>(p.out);
    each_pair([&](int i, int64_t place, bool pair) {
      if (p.out_aligned && pair) {
        *reinterpret_cast<float2 *>(to + place) = make_float2(d[i], d[i + 1]);
      } else {
        to[place] = d[i];
        if (pair) to[place + 1] = d[i + 1];
      }
    });
  }

  // The columns from `start` on, 64 of them, pass through a block of shared memory, swizzled as TMA does it.
  __device__ __forceinline__ uint32_t staged(int start, int r, int chunk) const {
    const int block = S::stores_by_tma ? start / 64 * kBlockBytes : 0;
    return staging + block + (warp * kWarpRows + r) * kRowBytes + ((chunk ^ (r & 7)) << 4);
  }
  template <bool bf16> __device__ __forceinline__ void stage(const float (&d)[S::registers], int start) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float *e = d + start / 2 + 8 * j;
      const uint32_t fragments[4] = {round_pair<bf16>(e[0], e[1]), round_pair<bf16>(e[2], e[3]),
                                     round_pair<bf16>(e[4], e[5]), round_pair<bf16>(e[6], e[7])};
      store_matrices(staged(start, lane % 16, 2 * j + lane / 16), fragments);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void copy_out(int start) const {
    const int c = column + start + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + lane / 8;
      if (r >= rows || c >= p.n) continue;
      uint16_t *to = reinterpret_cast<uint16_t *>(p.out) + out + r * p.out_row_stride + c;
      const uint4 words = load_16_bytes(staged(start, r, lane % 8));
      if (p.out_aligned && c + 8 <= p.n) {
        *reinterpret_cast<uint4 *>(to) = words;
      } else {
        const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (c + e < p.n) to[e] = uint16_t(pairs[e / 2] >> e % 2 * 16);
      }
    }
    __syncwarp();
  }

  template <bool bf16> __device__ __forceinline__ void store_half(const float (&d)[S::registers]) const {
    if constexpr (!S::stores_by_tma) {
#pragma unroll
      for (int start = 0; start < S::n; start += 64) {
        stage<bf16>(d, start);
        copy_out(start);
      }
    } else {
      const bool first = warp == 0 && lane == 0;
      if (first) wait_until_read();  // of the tile before
      named_sync(sync, kWarpgroup);
#pragma unroll
      for (int start = 0; start < S::n; start += 64) stage<bf16>(d, start);
      if (!p.out_mapped) {
#pragma unroll
        for (int start = 0; start < S::n; start += 64) copy_out(start);
        return;
      }
      fence_stores();
      named_sync(sync, kWarpgroup);
      if (!first) return;
      // Blocks past the last column too: under a condition ptxas 13.0 left the coordinates of some out.
#pragma unroll
      for (int start = 0; start < S::n; start += 64)
        store_box<3>(&p.out_map, {column + start, row, {group}}, staged(start, 0, 0));
      commit_boxes();
    }
  }
};

}  // namespace
}  // namespace pydet
