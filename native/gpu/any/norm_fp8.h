// The rows of a norm to fp8 (NUMERICS.md, "Quantisation"):  s = max(amax, 1e-10) / largest,  q = round(clamp(y / s)),  of
// the y that was rounded to x's type. Part of norm.h's kernels, which hold the row, or make its y again.
#pragma once

#include "gpu/any/quantize.h"
#include "gpu/any/rows.h"

namespace pydet {
namespace {

// The problem as kernels see it. `divides`: y is fp32, or a scale is given, so that quotient_of is no division.
template <bool divides> struct NormToFp8 : RmsNormQuantize {};
template <class P> constexpr bool kQuantizes = std::is_base_of_v<RmsNormQuantize, P>;
static_assert(kUnit == kVector, "sixteen threads side by side on a group");

// A scale, and what to divide by it with.
struct ScaleOf {
  float s;
  Divisor by;
};

// Eight to bytes.
template <bool divides, Type to>
__device__ __forceinline__ uint2 fp8_of(const float (&y)[kVector], const ScaleOf &scale) {
  uint32_t pairs[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    float two[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) two[e] = divides ? y[2 * i + e] / scale.s : quotient_of(y[2 * i + e], scale.by);
    pairs[i] = round_pair<to>(two[0], two[1]);
  }
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}
template <bool divides>
__device__ __forceinline__ uint2 fp8_of(Type to, const float (&y)[kVector], const ScaleOf &scale) {
  return to == Type::e4m3 ? fp8_of<divides, Type::e4m3>(y, scale) : fp8_of<divides, Type::e5m2>(y, scale);
}

__device__ __forceinline__ int64_t first_scale(const RmsNormQuantize &p, int64_t outer, int64_t within) {
  return outer * p.scale.outer_stride + within * p.scale.inner_stride;
}

// Largest magnitudes of V vectors: of halves two in a word, of fp32 one.
template <Type type, int V> struct Largest {
  static constexpr bool kHalves = type != Type::f32;
  static constexpr int kWords = kHalves ? (V + 1) / 2 : V;
  uint32_t word[kWords] = {};

  __device__ __forceinline__ static uint32_t larger(uint32_t a, uint32_t b) {
#if defined(__HIP_PLATFORM_AMD__)
    if constexpr (kHalves) return max(a & 0xFFFF0000u, b & 0xFFFF0000u) | max(a & 0xFFFFu, b & 0xFFFFu);
    else return max(a, b);
#else
    if constexpr (kHalves) return __vmaxu2(a, b);
    else return max(a, b);
#endif
  }

  __device__ __forceinline__ explicit Largest(const Packed<type, kVector> (&y)[V]) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      uint32_t most = 0;
#pragma unroll
      for (uint32_t bits : y[v].word) most = larger(most, bits & (kHalves ? 0x7FFF7FFFu : 0x7FFFFFFFu));
      if constexpr (kHalves) word[v / 2] |= max(most >> 16, most & 0xFFFFu) << v % 2 * 16;
      else word[v] = most;
    }
  }
  // Of each `lanes` neighbouring threads of a warp, all of which call it.
  template <int lanes> __device__ __forceinline__ void join() {
#pragma unroll
    for (int apart = lanes / 2; apart > 0; apart /= 2)
#pragma unroll
      for (uint32_t &bits : word) bits = larger(bits, from_lane_across(bits, apart));
  }
  // word[at], by halves: a number for an index would put the words into memory.
  template <int first, int count> __device__ __forceinline__ uint32_t picked(int at) const {
    if constexpr (first >= kWords) return 0;
    else if constexpr (count == 1) return word[first];
    else return at & count / 2 ? picked<first + count / 2, count / 2>(at) : picked<first, count / 2>(at);
  }
  // Of vector v, as fp32's bits.
  __device__ __forceinline__ uint32_t of(int v) const {
    const int at = kHalves ? v / 2 : v;
    const uint32_t found = picked<0, kWords <= 2 ? kWords : kWords <= 4 ? 4 : 8>(at);
    if constexpr (kHalves) return bits_of(Element<type>::to_f32(uint16_t(v % 2 ? found >> 16 : found)));
    else return found;
  }
  __device__ __forceinline__ uint32_t of_all() const {
    uint32_t most = word[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) most = larger(most, word[i]);
    if constexpr (kHalves) return bits_of(Element<type>::to_f32(uint16_t(max(most >> 16, most & 0xFFFFu))));
    else return most;
  }
};

// R rows of a team of T threads, of which a thread holds V vectors of y each, zeros past the row's end.
template <int T, Type type, int V, int R, bool divides>
__device__ __forceinline__ void quantize_held(const NormToFp8<divides> &p, int team, int t, const RowIndex (&index)[R],
                                              const bool (&there)[R], const bool (&inside)[V],
                                              const Packed<type, kVector> (&y)[R][V]) {
  constexpr int kTeamWarps = T < kLogicalWarp ? 1 : T / kLogicalWarp, kTeams = T < 128 ? 128 / T : 1;
  constexpr int kWidth = T < kLogicalWarp ? T : kLogicalWarp, kOfGroup = T < kLanes ? T : kLanes;
  const float largest = pydet::largest_of(p.out.type);
  ScaleOf scale[R][V];
  auto all_of_row = [&](int k, float s) {
    const ScaleOf one = {s, divisor_of(s)};
#pragma unroll
    for (int v = 0; v < V; ++v) scale[k][v] = one;
  };
  if (p.granularity == Granularity::row) {
    __shared__ uint32_t of_warp[T > kLogicalWarp ? kTeams : 1][kTeamWarps][R];
    uint32_t most[R];
#pragma unroll
    for (int k = 0; k < R; ++k) most[k] = most_of_lanes<kWidth>(Largest<type, V>(y[k]).of_all());
    if constexpr (T > kLogicalWarp) {
      if (t % kLogicalWarp == 0)
#pragma unroll
        for (int k = 0; k < R; ++k) of_warp[team][t / kLogicalWarp][k] = most[k];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kTeamWarps; ++i)
#pragma unroll
        for (int k = 0; k < R; ++k) most[k] = max(most[k], of_warp[team][i][k]);
    }
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const float s = scale_of(most[k], largest, p.power_of_two);
      if (t == 0 && there[k]) write_scale(p.scale, first_scale(p, index[k].outer, index[k].within), s);
      all_of_row(k, s);
    }
  } else if (p.granularity == Granularity::group) {
    // A thread of a group makes the scale of one of its V vectors, which the others then have of it.
    static_assert(V <= kOfGroup);
    const int mine = t % kOfGroup, group = t / kLanes + T / kLanes * (mine % V);
#pragma unroll
    for (int k = 0; k < R; ++k) {
      Largest<type, V> most(y[k]);
      most.template join<kOfGroup>();
      const float s = scale_of(most.of(mine % V), largest, p.power_of_two);
      if (mine < V && there[k] && group * kSide < p.n)
        write_scale(p.scale, first_scale(p, index[k].outer, index[k].within) + group * p.scale_stride, s);
      const Divisor by = divisor_of(s);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if constexpr (divides) scale[k][v] = {gpu_shfl(s, v, kOfGroup), {}};
        else scale[k][v] = {0, {gpu_shfl(by.s, v, kOfGroup), gpu_shfl(by.inverse, v, kOfGroup)}};
      }
    }
  } else {
    const float known = read_scale(p.scale, 0);
#pragma unroll
    for (int k = 0; k < R; ++k) all_of_row(k, known);
  }
#pragma unroll
  for (int k = 0; k < R; ++k) {
    char *out = row_at(p.out, 1, index[k]) + t * kVector;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float numbers[kVector];
      unpack(y[k][v], numbers);
      const uint2 bytes = fp8_of<divides>(p.out.type, numbers, scale[k][v]);
      if (there[k] && inside[v]) *reinterpret_cast<uint2 *>(out + v * T * kVector) = bytes;
    }
  }
}

// The row at `at` by a team of T threads, a warp or a block, for which make(j, y) makes the eight of y from j on, as often as it is asked.
template <int T, class F>
__device__ __forceinline__ void quantize_general(const RmsNormQuantize &p, const Place &at, int t, bool whole,
                                                 const F &make) {
  __shared__ uint32_t of_warp[T / kWarp];  // of a block
  const float largest = pydet::largest_of(p.out.type);
  const int64_t n = p.n, scale_at = first_scale(p, at.outer, at.inner);
  const bool group = p.granularity == Granularity::group;
  char *row = row_at(p.out, at);
  // Calls f(j, y) for eights of the row, by all threads of a warp together; y is +0 past the row's end.
  auto pass = [&](const auto &f) {
#pragma unroll 1
    for (int64_t of_warps = t / kWarp * kWarp * kVector; of_warps < n; of_warps += T * kVector) {
      const int64_t j = of_warps + t % kWarp * kVector;
      float y[kVector] = {};
      if (j < n) make(j, y);
#pragma unroll
      for (int e = 0; e < kVector; ++e) y[e] = j + e < n ? rounded_as(p.x.type, y[e]) : 0.0f;
      f(j, y);
    }
  };
  float s = 0;
  if (p.granularity == Granularity::row) {
    uint32_t most = 0;
    pass([&](int64_t, const float(&y)[kVector]) { most = max(most, largest_of(y)); });
    most = most_of_lanes<kWarp>(most);
    if constexpr (T > kWarp) {
      if (t % kWarp == 0) of_warp[t / kWarp] = most;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < T / kWarp; ++i) most = max(most, of_warp[i]);
    }
    s = scale_of(most, largest, p.power_of_two);
    if (t == 0) write_scale(p.scale, scale_at, s);
  } else if (!group) {
    s = read_scale(p.scale, 0);
  }
  pass([&](int64_t j, const float(&y)[kVector]) {
    if (group) {
      s = scale_of(most_of_lanes<kLanes>(largest_of(y)), largest, p.power_of_two);
      if (t % kLanes == 0 && j < n) write_scale(p.scale, scale_at + j / kSide * p.scale_stride, s);
    }
    if (j >= n) return;
    if (p.y.data) store_eight(row_at(p.y, at), p.y.type, j, n, whole, y);
    const uint2 bytes = fp8_of<true>(p.out.type, y, {s, {}});
#pragma unroll
    for (int e = 0; e < kVector; ++e)
      if (j + e < n) row[j + e] = char((e < 4 ? bytes.x : bytes.y) >> e % 4 * 8);
  });
}

}  // namespace
}  // namespace pydet
