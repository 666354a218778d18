// Rotary embeddings: the table of their cosines and sines, and pairs of elements turned by it (NUMERICS.md, "Rotary
// embeddings"): the CPU's bits.
//
// A thread has one number of the table; and eight pairs of a head, or one where some head or row does not begin at a
// multiple of 16 bytes. Those of q and k of all tokens are counted through, in one launch.

#include "gpu/device.h"
#include "gpu/kernels.h"
#include "ops/rotary/formula.h"

namespace pydet {
namespace {

constexpr int kThreads = 128, kVectorBytes = 16, kPairs = 8;
constexpr int64_t kNarrow = int64_t(1) << 31;

// What is divided, and by what, in numbers of 32 bits where these hold it.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b, bool narrow) {
  return narrow ? int64_t(uint32_t(a) / uint32_t(b)) : a / b;
}

// ---- The table ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ void store_one(const Rows &rows, int64_t at, float x) {
  with_type<kUnscaledTypes>(rows.type, [&](auto type) {
    reinterpret_cast<typename Element<decltype(type)::value>::Bits *>(rows.data)[at] =
        Element<decltype(type)::value>::from_f32(x);
  });
}

__global__ void __launch_bounds__(kThreads) rotary_table_kernel(const __grid_constant__ RotaryTable p, int64_t count) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t i = block_number() * kThreads + threadIdx.x;
  if (i >= count) return;
  const bool narrow = count < kNarrow;
  const int64_t r = quotient(i, p.n, narrow), j = i - r * p.n, outer = quotient(r, p.inner, narrow);
  const int64_t inner = r - outer * p.inner;
  const CosSin made = cos_sin(position_of(p, r) * reinterpret_cast<const float *>(p.frequencies.data)[j]);
  const float cos = made.cos * p.scale, sin = made.sin * p.scale;
  const int64_t cos_at = outer * p.cos.outer_stride + inner * p.cos.inner_stride + j;
  const int64_t sin_at = outer * p.sin.outer_stride + inner * p.sin.inner_stride + j;
  store_one(p.cos, cos_at, cos);
  store_one(p.sin, sin_at, sin);
  if (!p.twice) return;
  store_one(p.cos, cos_at + p.n, cos);
  store_one(p.sin, sin_at + p.n, sin);
}

// ---- Heads -------------------------------------------------------------------------------------------------------

// W elements from element j on, which lie in whole vectors where there are more than one.
template <int W> __device__ __forceinline__ void load(Type type, const char *row, int64_t j, float (&x)[W]) {
  const char *const from = row + j * size_of(type);
  if constexpr (W == 1) {
    x[0] = with_type<kUnscaledTypes>(type, [&](auto known) {
      return Element<decltype(known)::value>::to_f32(
          *reinterpret_cast<const typename Element<decltype(known)::value>::Bits *>(from));
    });
  } else if (type == Type::f32) {
#pragma unroll
    for (int v = 0; v < W / 4; ++v) {
      const uint4 words = reinterpret_cast<const uint4 *>(from)[v];
      x[4 * v] = float_of(words.x), x[4 * v + 1] = float_of(words.y);
      x[4 * v + 2] = float_of(words.z), x[4 * v + 3] = float_of(words.w);
    }
  } else {
    static_assert(W == 8);
    const uint4 words = *reinterpret_cast<const uint4 *>(from);
    const uint32_t word[] = {words.x, words.y, words.z, words.w};
    with_type<kHalfTypes>(type, [&](auto half) {
#pragma unroll
      for (int e = 0; e < W; ++e) x[e] = Element<decltype(half)::value>::to_f32(uint16_t(word[e / 2] >> e % 2 * 16));
    });
  }
}
template <int W> __device__ __forceinline__ void store(Type type, char *row, int64_t j, const float (&x)[W]) {
  char *const to = row + j * size_of(type);
  if constexpr (W == 1) {
    with_type<kUnscaledTypes>(type, [&](auto known) {
      *reinterpret_cast<typename Element<decltype(known)::value>::Bits *>(to) =
          Element<decltype(known)::value>::from_f32(x[0]);
    });
  } else if (type == Type::f32) {
#pragma unroll
    for (int v = 0; v < W / 4; ++v)
      reinterpret_cast<uint4 *>(to)[v] = make_uint4(bits_of(canonical(x[4 * v])), bits_of(canonical(x[4 * v + 1])),
                                                    bits_of(canonical(x[4 * v + 2])), bits_of(canonical(x[4 * v + 3])));
  } else {
    with_type<kHalfTypes>(type, [&](auto half) {
      *reinterpret_cast<uint4 *>(to) =
          make_uint4(rounded_pair<decltype(half)::value>(x[0], x[1]), rounded_pair<decltype(half)::value>(x[2], x[3]),
                     rounded_pair<decltype(half)::value>(x[4], x[5]), rounded_pair<decltype(half)::value>(x[6], x[7]));
    });
  }
}

// First and second elements of W pairs from pair j on.
template <int W>
__device__ __forceinline__ void load_pairs(Type type, const char *head, bool neighbours, int64_t pairs, int64_t j,
                                           float (&first)[W], float (&second)[W]) {
  load<W>(type, head, neighbours ? 2 * j : j, first);
  load<W>(type, head, neighbours ? 2 * j + W : pairs + j, second);
  if (!neighbours || W == 1) return;
  float x[2 * W];
#pragma unroll
  for (int e = 0; e < W; ++e) x[e] = first[e], x[W + e] = second[e];
#pragma unroll
  for (int e = 0; e < W; ++e) first[e] = x[2 * e], second[e] = x[2 * e + 1];
}
template <int W>
__device__ __forceinline__ void store_pairs(Type type, char *head, bool neighbours, int64_t pairs, int64_t j,
                                            float (&first)[W], float (&second)[W]) {
  if (neighbours && W > 1) {
    float x[2 * W];
#pragma unroll
    for (int e = 0; e < W; ++e) x[2 * e] = first[e], x[2 * e + 1] = second[e];
#pragma unroll
    for (int e = 0; e < W; ++e) first[e] = x[e], second[e] = x[W + e];
  }
  store<W>(type, head, neighbours ? 2 * j : j, first);
  store<W>(type, head, neighbours ? 2 * j + W : pairs + j, second);
}

// How a token's work is counted: pieces of W pairs of a head, and then of W elements that are copied.
struct HeadPlan {
  int64_t turned, in_head, in_token, count;
};

template <int W>
__global__ void __launch_bounds__(kThreads)
    rotary_kernel(const __grid_constant__ Rotary p, const __grid_constant__ HeadPlan plan) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t i = block_number() * kThreads + threadIdx.x;
  if (i >= plan.count) return;
  const bool narrow = plan.count < kNarrow;
  const int64_t r = quotient(i, plan.in_token, narrow), outer = quotient(r, p.inner, narrow);
  const int64_t inner = r - outer * p.inner, of_token = i - r * plan.in_token;
  const int64_t any_head = quotient(of_token, plan.in_head, narrow), piece = of_token - any_head * plan.in_head;
  const bool is_q = any_head < p.q.heads;
  const int64_t h = is_q ? any_head : any_head - p.q.heads;
  const TurnedHeads &of = is_q ? p.q : p.k;
  const Type type = p.q.x.type, to = p.q.y.type;
  const char *const x =
      of.x.data + (outer * of.x.outer_stride + inner * of.x.inner_stride + h * of.x_stride) * size_of(type);
  char *const y = of.y.data + (outer * of.y.outer_stride + inner * of.y.inner_stride + h * of.y_stride) * size_of(to);
  if (piece >= plan.turned) {
    const int64_t j = p.turned + (piece - plan.turned) * W;
    float rest[W];
    load<W>(type, x, j, rest);
    if (p.transposed) {
#pragma unroll
      for (int e = 0; e < W; ++e) rest[e] = rest[e] + 0.0f;
    }
    store<W>(to, y, j, rest);
    return;
  }
  const int64_t j = piece * W, pairs = p.pairs();
  const char *const cos = p.cos.data + (outer * p.cos.outer_stride + inner * p.cos.inner_stride) * size_of(p.cos.type);
  const char *const sin = p.sin.data + (outer * p.sin.outer_stride + inner * p.sin.inner_stride) * size_of(p.sin.type);
  float first[W], second[W], cos_first[W], cos_second[W], sin_first[W], sin_second[W];
  load_pairs<W>(type, x, p.neighbours, pairs, j, first, second);
  if (p.whole) {
    load_pairs<W>(p.cos.type, cos, p.table_neighbours(), pairs, j, cos_first, cos_second);
    load_pairs<W>(p.sin.type, sin, p.table_neighbours(), pairs, j, sin_first, sin_second);
  } else {
    load<W>(p.cos.type, cos, j, cos_first);
    load<W>(p.sin.type, sin, j, sin_first);
  }
  const Type step = p.in_fp32 ? Type::f32 : to;
#pragma unroll
  for (int e = 0; e < W; ++e) {
    const Turn by = {cos_first[e], p.whole ? cos_second[e] : cos_first[e], sin_first[e],
                     p.whole ? sin_second[e] : sin_first[e]};
    const Pair made = turned({first[e], second[e]}, by, step, p.transposed);
    first[e] = made.first, second[e] = made.second;
  }
  store_pairs<W>(to, y, p.out_neighbours, pairs, j, first, second);
}

// Whether rows, and the heads in them, begin at multiples of 16 bytes.
bool aligned(const Rows &rows, int64_t head_stride, int64_t heads, const Rotary &p) {
  if (!rows.data) return true;
  const int64_t size = size_of(rows.type);
  auto whole = [&](int64_t stride) { return stride * size % kVectorBytes == 0; };
  return reinterpret_cast<uintptr_t>(rows.data) % kVectorBytes == 0 && (heads <= 1 || whole(head_stride)) &&
         (p.inner <= 1 || whole(rows.inner_stride)) && (p.inner >= p.rows || whole(rows.outer_stride));
}

template <int W> pydet_status launch_heads(const Rotary &p) {
  const int64_t turned = p.pairs() / W, in_head = turned + (p.n - p.turned) / W;
  const int64_t in_token = in_head * (p.q.heads + p.k.heads), count = p.rows * in_token;
  const HeadPlan plan = {turned, in_head, in_token, count};
  Launch where = {"rotary", static_cast<gpu_stream>(p.stream), grid_of(divide_up(count, kThreads), kThreads),
                  dim3(kThreads)};
  where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
  return launch(where, rotary_kernel<W>, p, plan);
}

}  // namespace

pydet_status rotary_table(const RotaryTable &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rotary_table", guard.error());
  const int64_t count = p.rows * p.n;
  Launch where = {"rotary_table", static_cast<gpu_stream>(p.stream), grid_of(divide_up(count, kThreads), kThreads),
                  dim3(kThreads)};
  where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
  return launch(where, rotary_table_kernel, p, count);
}

pydet_status rotary(const Rotary &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rotary", guard.error());
  bool whole = p.pairs() % kPairs == 0 && (p.n - p.turned) % kPairs == 0;
  for (const TurnedHeads *heads : {&p.q, &p.k})
    whole = whole && aligned(heads->x, heads->x_stride, heads->heads, p) &&
            aligned(heads->y, heads->y_stride, heads->heads, p);
  whole = whole && aligned(p.cos, 0, 1, p) && aligned(p.sin, 0, 1, p);
  return whole ? launch_heads<kPairs>(p) : launch_heads<1>(p);
}

}  // namespace pydet
