// What the fold kernels share: four neighbouring elements of a thread, or one, and the two orders (NUMERICS.md, "Fold").
// part(s) are the thread's elements of part s.
#pragma once

#include "gpu/any/epilogue.h"
#include "ops/fold/problem.h"

namespace pydet {

template <int W> struct Elements {
  float x[W];
};

template <int W> __device__ __forceinline__ Elements<W> load_elements(const float *from) {
  Elements<W> v;
  if constexpr (W == 4) {
    const float4 four = *reinterpret_cast<const float4 *>(from);
    v.x[0] = four.x, v.x[1] = four.y, v.x[2] = four.z, v.x[3] = four.w;
  } else {
    v.x[0] = *from;
  }
  return v;
}

template <int W> __device__ __forceinline__ Elements<W> sum_of(const Elements<W> &a, const Elements<W> &b) {
  Elements<W> sum;
#pragma unroll
  for (int e = 0; e < W; ++e) sum.x[e] = a.x[e] + b.x[e];
  return sum;
}

template <int W, class Part>
__device__ __forceinline__ Elements<W> ordered(int count, const Part &part, Elements<W> sum) {
#pragma unroll 4
  for (int s = 0; s < count; ++s) sum = sum_of(sum, part(s));
  return sum;
}

// waiting[level] is the subtree of 2^level parts that waits for its partner; the levels are unrolled, so that it lies in
// registers. Bit `level` of the number of parts so far says whether there is one.
template <int W, class Part>
__device__ __forceinline__ Elements<W> tree(int count, const Part &part, const Elements<W> &start) {
  Elements<W> waiting[kFoldLevels], sum = {};
  for (int s = 0; s < count; ++s) {
    sum = part(s);
    bool moving = true;
#pragma unroll
    for (int level = 0; level < kFoldLevels; ++level) {
      const bool meets = (s >> level & 1) != 0;
      if (moving && meets) sum = sum_of(waiting[level], sum);
      if (moving && !meets) waiting[level] = sum;
      moving = moving && meets;
    }
  }
  bool found = false;
#pragma unroll
  for (int level = 0; level < kFoldLevels; ++level) {
    if ((count >> level & 1) == 0) continue;
    sum = found ? sum_of(waiting[level], sum) : waiting[level];
    found = true;
  }
  return sum_of(start, sum);
}

// sum += the bias of the elements from `column` on, whose period is that of its elements.
template <int W>
__device__ __forceinline__ void add_bias(Elements<W> &sum, const Vector &bias, int64_t column, int64_t period) {
#pragma unroll
  for (int e = 0; e < W; ++e) {
    sum.x[e] = sum.x[e] + load_f32(bias.data, bias.type, column);
    column = column + 1 == period ? 0 : column + 1;
  }
}

static_assert(types_for(kResult) == (bit(Type::f32) | bit(Type::bf16) | bit(Type::f16)), "what packed() knows");

// Four elements as they lie in memory; of 16-bit types in the first two words.
__device__ __forceinline__ uint4 packed(const Elements<4> &sum, Type type) {
  uint4 words = {};
  if (type == Type::f32) {
    words.x = __float_as_uint(canonical(sum.x[0])), words.y = __float_as_uint(canonical(sum.x[1]));
    words.z = __float_as_uint(canonical(sum.x[2])), words.w = __float_as_uint(canonical(sum.x[3]));
  } else if (type == Type::bf16) {
    words.x = rounded_pair<Type::bf16>(sum.x[0], sum.x[1]), words.y = rounded_pair<Type::bf16>(sum.x[2], sum.x[3]);
  } else {
    words.x = rounded_pair<Type::f16>(sum.x[0], sum.x[1]), words.y = rounded_pair<Type::f16>(sum.x[2], sum.x[3]);
  }
  return words;
}

__device__ __forceinline__ void store_packed(char *at, Type type, const uint4 &words) {
  if (type == Type::f32) *reinterpret_cast<uint4 *>(at) = words;
  else *reinterpret_cast<uint2 *>(at) = make_uint2(words.x, words.y);
}

}  // namespace pydet
