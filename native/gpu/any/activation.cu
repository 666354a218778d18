// Activations, alone or as the gate of another factor, and their gradients, in fp32 (NUMERICS.md, "Activations"): the CPU's
// bits.
//
//   y = round(f(x)), or with the other factor round(round(f(x)) up)
//   dx = round(g f'(x)),  g = dy, or with the other factor round(dy up);   dup = round(dy round(f(x)))
//
// A thread takes vectors of 16 bytes, all rows' counted through, or where rows are not aligned for that single elements
// with its neighbours. It reads all that it needs of an element before it writes there.

#include "gpu/any/epilogue.h"
#include "gpu/device.h"
#include "gpu/kernels.h"
#include "ops/activation/formulas.h"

namespace pydet {
namespace {

constexpr int kThreads = 256, kVectorBytes = 16;

// W elements of a row as they lie in memory, in words: of vectors of 16-bit numbers clang 19 makes moves of bytes, and on
// AMD's GPUs one that lets a neighbour's sign into a number (tests/test_hip.py has seen it).
template <Type type, int W> struct Elements {
  static constexpr int kPerWord = 4 / size_of(type);
  uint32_t words[divide_up(W, kPerWord)];

  __device__ __forceinline__ typename Element<type>::Bits bits(int e) const {
    return typename Element<type>::Bits(words[e / kPerWord] >> e % kPerWord * 16);
  }
};
// Of those from `from` on, `left` are the row's. Past its end there are zeros.
template <Type type, int W>
__device__ __forceinline__ Elements<type, W> load_elements(const char *from, int64_t left) {
  using Bits = typename Element<type>::Bits;
  Elements<type, W> v = {};
  if (W > 1 && left >= W) {
    if constexpr (W > 1) {
      const uint4 words = *reinterpret_cast<const uint4 *>(from);
      v.words[0] = words.x, v.words[1] = words.y, v.words[2] = words.z, v.words[3] = words.w;
    }
  } else {
#pragma unroll
    for (int e = 0; e < W; ++e)
      if (e < left) v.words[e / v.kPerWord] |= uint32_t(reinterpret_cast<const Bits *>(from)[e]) << e % v.kPerWord * 16;
  }
  return v;
}
template <Type type, int W>
__device__ __forceinline__ void store_elements(char *to, int64_t left, const float (&x)[W]) {
  using Bits = typename Element<type>::Bits;
  if (W > 1 && left >= W) {
    if constexpr (W > 1) {
      uint32_t words[kVectorBytes / 4];
#pragma unroll
      for (int i = 0; i < kVectorBytes / 4; ++i) {
        if constexpr (type == Type::f32) words[i] = bits_of(canonical(x[i]));
        else words[i] = rounded_pair<type>(x[2 * i], x[2 * i + 1]);
      }
      *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < W; ++e)
      if (e < left) reinterpret_cast<Bits *>(to)[e] = Element<type>::from_f32(x[e]);
  }
}
template <Type type, int W> __device__ __forceinline__ void unpack(const Elements<type, W> &v, float (&x)[W]) {
#pragma unroll
  for (int e = 0; e < W; ++e) x[e] = Element<type>::to_f32(v.bits(e));
}
// How vectors are counted through all rows.
struct Count {
  int64_t vectors, in_row;
  bool narrow;  // numbers of 32 bits hold what is divided and multiplied
};

// Where a thread's elements are in a tensor, and how many are left of the row.
struct Place {
  int64_t outer, inner, column, left;
  bool narrow;
  template <Type type> __device__ __forceinline__ char *in(const Rows &rows) const {
    int64_t at = column;
    if (narrow) {
      at += int64_t(uint64_t(uint32_t(inner)) * uint32_t(rows.inner_stride));
      if (outer) at += int64_t(uint64_t(uint32_t(outer)) * uint32_t(rows.outer_stride));
    } else {
      at += outer * rows.outer_stride + inner * rows.inner_stride;
    }
    return rows.data + at * size_of(type);
  }
};

// Of vector i of W elements.
template <int W, class Problem>
__device__ __forceinline__ Place place_of(const Problem &p, const Count &count, int64_t i) {
  if (i >= count.vectors) return {0, 0, 0, 0, true};
  if (p.rows == 1) return {0, 0, i * W, p.n - i * W, true};
  int64_t row, outer = 0;
  if (count.narrow) {
    row = uint32_t(i) / uint32_t(count.in_row);
    if (p.inner != p.rows) outer = uint32_t(row) / uint32_t(p.inner);
  } else {
    row = i / count.in_row;
    if (p.inner != p.rows) outer = row / p.inner;
  }
  const int64_t column = (i - row * count.in_row) * W;
  return {outer, row - outer * p.inner, column, p.n - column, count.narrow};
}
// Of vector i, `step` behind `before`: without a division where rows have so many vectors.
template <int W, int step, class Problem>
__device__ __forceinline__ Place next_place(const Problem &p, const Count &count, const Place &before, int64_t i) {
  if (p.rows == 1 || count.in_row < step || i >= count.vectors) return place_of<W>(p, count, i);
  Place at = before;
  at.column += step * W;
  if (at.column >= count.in_row * W) {
    at.column -= count.in_row * W;
    if (++at.inner == p.inner) at.inner = 0, ++at.outer;
  }
  at.left = p.n - at.column;
  return at;
}

// A block takes kTurns times as many vectors as it has threads: all are asked for before the first is worked on.
template <Type type, int W, int kTurns, bool gated>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(const __grid_constant__ Activation p, const __grid_constant__ Count count) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t first = block_number() * (kThreads * kTurns) + threadIdx.x;
  Place at[kTurns];
  Elements<type, W> x[kTurns], up[kTurns];
#pragma unroll
  for (int k = 0; k < kTurns; ++k) {
    if (k == 0) at[k] = place_of<W>(p, count, first);
    else at[k] = next_place<W, kThreads>(p, count, at[k - 1], first + k * kThreads);
    x[k] = load_elements<type, W>(at[k].template in<type>(p.x), at[k].left);
    if constexpr (gated) up[k] = load_elements<type, W>(at[k].template in<type>(p.up), at[k].left);
  }
  with_kind(p.kind, [&](auto kind) {
#pragma unroll
    for (int k = 0; k < kTurns; ++k) {
      float value[W];
      [[maybe_unused]] float factor[W];
      unpack(x[k], value);
      if constexpr (gated) unpack(up[k], factor);
#pragma unroll
      for (int e = 0; e < W; ++e) {
        value[e] = activated<kind>(value[e]).value;
        if constexpr (gated) value[e] = rounded<type>(value[e]) * factor[e];
      }
      store_elements<type, W>(at[k].template in<type>(p.y), at[k].left, value);
    }
  });
}

template <Type type, int W, int kTurns, bool gated>
__global__ void __launch_bounds__(kThreads)
    activation_backward_kernel(const __grid_constant__ ActivationBackward p, const __grid_constant__ Count count) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t first = block_number() * (kThreads * kTurns) + threadIdx.x;
  Place at[kTurns];
  Elements<type, W> dy[kTurns], x[kTurns], up[kTurns];
#pragma unroll
  for (int k = 0; k < kTurns; ++k) {
    if (k == 0) at[k] = place_of<W>(p, count, first);
    else at[k] = next_place<W, kThreads>(p, count, at[k - 1], first + k * kThreads);
    dy[k] = load_elements<type, W>(at[k].template in<type>(p.dy), at[k].left);
    x[k] = load_elements<type, W>(at[k].template in<type>(p.x), at[k].left);
    if constexpr (gated) up[k] = load_elements<type, W>(at[k].template in<type>(p.up), at[k].left);
  }
  with_kind(p.kind, [&](auto kind) {
#pragma unroll
    for (int k = 0; k < kTurns; ++k) {
      float given[W], value[W];
      [[maybe_unused]] float factor[W];
      unpack(dy[k], given);
      unpack(x[k], value);
      if constexpr (gated) unpack(up[k], factor);
#pragma unroll
      for (int e = 0; e < W; ++e) {
        const Activated of = activated<kind>(value[e]);
        value[e] = given[e] * rounded<type>(of.value);
        if constexpr (gated) given[e] = rounded<type>(given[e] * factor[e]);
        given[e] = given[e] * of.slope;
      }
      if (p.dx.data) store_elements<type, W>(at[k].template in<type>(p.dx), at[k].left, given);
      if constexpr (gated)
        if (p.dup.data) store_elements<type, W>(at[k].template in<type>(p.dup), at[k].left, value);
    }
  });
}

// Whether rows begin at multiples of 16 bytes.
bool aligned(const Rows &rows, int64_t count, int64_t inner) {
  if (!rows.data) return true;
  const int64_t size = size_of(rows.type);
  auto whole = [&](int64_t stride) { return stride * size % kVectorBytes == 0; };
  return reinterpret_cast<uintptr_t>(rows.data) % kVectorBytes == 0 && (inner <= 1 || whole(rows.inner_stride)) &&
         (inner >= count || whole(rows.outer_stride));
}

template <int W, int kTurns, class Problem, size_t operands>
pydet_status launch_vectors(const char *name, const Problem &p, const Rows *const (&all)[operands],
                            void (*kernel)(Problem, Count)) {
  constexpr int64_t kNarrow = int64_t(1) << 31;
  const int64_t in_row = divide_up(p.n, W);
  Count count = {p.rows * in_row, in_row, true};
  count.narrow = count.vectors + kThreads * kTurns < kNarrow;
  for (const Rows *rows : all) count.narrow &= rows->inner_stride < kNarrow && rows->outer_stride < kNarrow;
  Launch where = {name, static_cast<gpu_stream>(p.stream),
                  grid_of(divide_up(count.vectors, kThreads * kTurns), kThreads), dim3(kThreads)};
  where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
  return launch(where, kernel, p, count);
}

}  // namespace

pydet_status activation(const Activation &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("activation", guard.error());
  const Rows *const all[] = {&p.x, &p.up, &p.y};
  bool whole = true;
  for (const Rows *rows : all) whole = whole && aligned(*rows, p.rows, p.inner);
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    constexpr int W = kVectorBytes / size_of(type);
    auto run = [&](auto gated) {
      return whole ? launch_vectors<W, 2>("activation", p, all, activation_kernel<type, W, 2, gated>)
                   : launch_vectors<1, 4>("activation", p, all, activation_kernel<type, 1, 4, gated>);
    };
    return p.up.data ? run(std::true_type{}) : run(std::false_type{});
  });
}

pydet_status activation_backward(const ActivationBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("activation_backward", guard.error());
  const Rows *const all[] = {&p.dy, &p.x, &p.up, &p.dx, &p.dup};
  bool whole = true;
  for (const Rows *rows : all) whole = whole && aligned(*rows, p.rows, p.inner);
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    constexpr int W = kVectorBytes / size_of(type);
    auto run = [&](auto gated) {
      return whole ? launch_vectors<W, 1>("activation_backward", p, all, activation_backward_kernel<type, W, 1, gated>)
                   : launch_vectors<1, 4>("activation_backward", p, all, activation_backward_kernel<type, 1, 4, gated>);
    };
    return p.up.data ? run(std::true_type{}) : run(std::false_type{});
  });
}

}  // namespace pydet
