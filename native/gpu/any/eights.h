// Eight elements of a row of any type and place, as norms' general kernels read and write them. Shared by norm.cu and
// norm_backward.cu.
#pragma once

#include "gpu/any/rows.h"

namespace pydet {
namespace {

__device__ __forceinline__ float rounded_as(Type type, float x) {
  if (type == Type::f32) return x;
  return type == Type::bf16 ? f32_from_bf16(bf16_from_f32(x)) : f32_from_f16(f16_from_f32(x));
}

// Elements j .. j + 7 of a row of n, j < n; those past n read as +0. `whole`: as vectors, of which none passes n.
__device__ __forceinline__ void load_eight(const char *row, Type type, int64_t j, int64_t n, bool whole,
                                           float (&x)[kVector]) {
  if (!whole) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) x[e] = j + e < n ? load_f32(row, type, j + e) : 0.0f;
  } else if (type == Type::f32) {
    unpack(load_packed<Type::f32, kVector>(row + j * 4), x);
  } else {
    const auto halves = load_packed<Type::f16, kVector>(row + j * 2);
    if (type == Type::f16) {
      unpack(halves, x);
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) x[e] = f32_from_bf16(uint16_t(halves.word[e / 2] >> e % 2 * 16));
    }
  }
}

__device__ __forceinline__ void store_eight(char *row, Type type, int64_t j, int64_t n, bool whole,
                                            const float (&x)[kVector]) {
  if (!whole) {
#pragma unroll
    for (int e = 0; e < kVector; ++e)
      if (j + e < n) store_rounded(row, type, j + e, x[e]);
  } else if (type == Type::f32) {
    store_packed<Type::f32>(row + j * 4, x);
  } else if (type == Type::bf16) {
    store_packed<Type::bf16>(row + j * 2, x);
  } else {
    store_packed<Type::f16>(row + j * 2, x);
  }
}

__device__ __forceinline__ char *row_at(const Rows &rows, const Place &at) {
  return row_at(rows, size_of(rows.type), at);
}

// Where the weights of row r begin: those of its head.
template <class P> __device__ __forceinline__ int64_t first_weight(const P &p, int64_t r) {
  if constexpr (kCentred<P>) return 0;
  else return (r - quotient(r, p.heads) * p.heads) * p.n;
}

// w + weight_offset, of the weights that begin at element `first`.
__device__ __forceinline__ void load_scales(const Vector &weight, float offset, int64_t first, int64_t j, int64_t n,
                                            bool whole, float (&scale)[kVector]) {
  if (weight.data) load_eight(weight.data + first * size_of(weight.type), weight.type, j, n, whole, scale);
#pragma unroll
  for (int e = 0; e < kVector; ++e) scale[e] = (weight.data ? scale[e] : 1.0f) + offset;
}

// A team of T threads with V vectors each; 0: for rows of any length.
template <int team, int vectors> struct GeneralTeam {
  static constexpr int T = team, V = vectors;
  static constexpr int holds() { return T * V * kVector; }
};
template <class F> pydet_status with_general_team(int64_t n, const F &f) {
  return with_first<GeneralTeam<8, 1>, GeneralTeam<16, 1>, GeneralTeam<32, 1>, GeneralTeam<128, 2>, GeneralTeam<256, 4>,
                    GeneralTeam<256, 0>>(n, f);
}

}  // namespace
}  // namespace pydet
