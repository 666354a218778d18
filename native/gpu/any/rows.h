// A row on the GPU: where it begins, vectors of adjacent elements and the sum along it. What the kernels of norms and
// softmax are made of.
//
//   rowsum   lane (g, e) walks elements j with j mod 8 = e, j div 8 mod 256 = g, lane = fmaf(u, v, lane) from +0;
//            then e is joined 4, 2, 1 apart, then g 128, 64, ..., 1 apart
//
// A team of T threads owns a row at a time: vector v of thread t is the W elements from W (t + T v) on. W is 8, or 4,
// where two neighbours share the lanes of a group; so a lane is one thread's, whatever T is, and T, W and V may be
// chosen by speed. Several rows are joined at once, so that they share the barrier and the latencies of the tree.
#pragma once

#include <type_traits>

#include "gpu/any/epilogue.h"
#include "ops/norm/problem.h"

namespace pydet {
namespace {

constexpr int kLogicalWarp = 32;  // also on a wave of 64
constexpr int kMaxTeam = kRowLaneGroups;
// Threads of a block: several small teams share one.
template <int T, int fewest = 128> constexpr int kBlock = T < fewest ? fewest : T;

// Whether a norm takes its rows' means from them, as LayerNorm does.
template <class P> constexpr bool kCentred = std::is_same_v<P, LayerNorm> || std::is_same_v<P, LayerNormBackward>;

__device__ __forceinline__ uint32_t from_lane(uint32_t value, int lane) {
  return bits_of(gpu_shfl(float_of(value), lane, kLogicalWarp));
}

// ---- A vector of elements ----------------------------------------------------------------------------------------

template <Type type, int W> struct alignas(W *size_of(type) < 16 ? W * size_of(type) : 16) Packed {
  static constexpr int kBytes = W * size_of(type), kPieceBytes = kBytes < 16 ? kBytes : 16;
  uint32_t word[kBytes / 4];
};

template <Type type, int W> __device__ __forceinline__ void unpack(const Packed<type, W> &packed, float (&x)[W]) {
#pragma unroll
  for (int i = 0; i < W; ++i) {
    if constexpr (type == Type::f32) {
      x[i] = float_of(packed.word[i]);
    } else {
      uint16_t half = uint16_t(i % 2 ? packed.word[i / 2] >> 16 : packed.word[i / 2]);
      x[i] = Element<type>::to_f32(half);
    }
  }
}

// Of a type that is known at run time.
template <int W>
__device__ __forceinline__ void unpack_halves(const Packed<Type::f16, W> &packed, Type type, float (&x)[W]) {
  if (type == Type::f16) {
    unpack(packed, x);
  } else {
#pragma unroll
    for (int e = 0; e < W; ++e) x[e] = f32_from_bf16(uint16_t(packed.word[e / 2] >> e % 2 * 16));
  }
}

template <Type type, int W>
__device__ __forceinline__ void round_words(const float (&x)[W], uint32_t (&word)[W * size_of(type) / 4]) {
#pragma unroll
  for (int i = 0; i < W * size_of(type) / 4; ++i) {
    if constexpr (type == Type::f32) word[i] = bits_of(canonical(x[i]));
    else word[i] = rounded_pair<type>(x[2 * i], x[2 * i + 1]);
  }
}
template <Type type, int W> __device__ __forceinline__ Packed<type, W> pack(const float (&x)[W]) {
  Packed<type, W> packed;
  round_words<type>(x, packed.word);
  return packed;
}

template <Type type, int W> __device__ __forceinline__ Packed<type, W> load_packed(const char *from) {
  return *reinterpret_cast<const Packed<type, W> *>(from);
}
template <Type type, int W> __device__ __forceinline__ void store_packed(char *to, const float (&x)[W]) {
  *reinterpret_cast<Packed<type, W> *>(to) = pack<type>(x);
}

// Has the compiler hold a vector as it lies in memory, not as numbers, while sums are joined: those would take more
// registers than the row.
template <Type type, int W> __device__ __forceinline__ void keep_packed([[maybe_unused]] Packed<type, W> &x) {
#if !defined(__HIP_PLATFORM_AMD__)
#pragma unroll
  for (uint32_t &word : x.word) asm volatile("" : "+r"(word));
#endif
}

// W elements of w + weight_offset; w is 1 where there is none. Loaded as they lie in memory, and made numbers later.
template <int W> struct Scale {
  using Half = Packed<Type::f16, W>;
  Half low = {}, high = {};  // high: the second half of fp32 weights

  __device__ __forceinline__ void load(const Vector &weight, int j) {
    if (!weight.data) return;
    const char *at = weight.data + j * size_of(weight.type);
    low = *reinterpret_cast<const Half *>(at);
    if (weight.type == Type::f32) high = *reinterpret_cast<const Half *>(at + Half::kBytes);
  }
  __device__ __forceinline__ void unpack(const Vector &weight, float offset, float (&scale)[W]) const {
    if (!weight.data) {
#pragma unroll
      for (int e = 0; e < W; ++e) scale[e] = 1.0f;
    } else if (weight.type == Type::bf16) {
#pragma unroll
      for (int e = 0; e < W; ++e) scale[e] = f32_from_bf16(uint16_t(low.word[e / 2] >> e % 2 * 16));
    } else if (weight.type == Type::f16) {
      pydet::unpack(low, scale);
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) scale[e] = float_of(e < W / 2 ? low.word[e % (W / 2)] : high.word[e % (W / 2)]);
    }
#pragma unroll
    for (int e = 0; e < W; ++e) scale[e] += offset;
  }
};

// ---- Where a row begins ------------------------------------------------------------------------------------------

// Row r of the problem. A division of 64 bits takes as long as a load: only rows of two levels meet it.
struct RowIndex {
  int64_t outer, within;
};
__device__ __forceinline__ RowIndex row_index(int64_t inner, int64_t r) {
  int64_t outer = r < inner ? 0 : r / inner;
  return {outer, r - outer * inner};
}
__device__ __forceinline__ char *row_at(const Rows &rows, int element_bytes, const RowIndex &row) {
  return rows.data + (row.outer * rows.outer_stride + row.within * rows.inner_stride) * element_bytes;
}
__device__ __forceinline__ char *row_at(const Rows &rows, int element_bytes, int64_t inner, int64_t r) {
  return row_at(rows, element_bytes, row_index(inner, r));
}

// How often `part` goes into x. A division of 64 bits takes as long as a load.
__device__ __forceinline__ int64_t quotient(int64_t x, int64_t part) {
  if (x < part) return 0;
  return x >> 32 ? x / part : int64_t(uint32_t(x) / uint32_t(part));
}

// Row r of a norm: RMSNorm's may be of three strides, and row r / heads of head r % heads.
struct Place {
  int64_t far, outer, inner;
};
template <class P> __device__ __forceinline__ Place place_of(const P &p, int64_t r) {
  const int64_t q = quotient(r, p.inner);
  if constexpr (kCentred<P>) {
    return {0, q, r - q * p.inner};
  } else {
    const int64_t far = quotient(q, p.outer);
    return {far, q - far * p.outer, r - q * p.inner};
  }
}
__device__ __forceinline__ char *row_at(const Rows &rows, int element_bytes, const Place &at) {
  return rows.data +
         (at.far * rows.far_stride + at.outer * rows.outer_stride + at.inner * rows.inner_stride) * element_bytes;
}
template <class P> __device__ __host__ __forceinline__ int64_t heads_of(const P &p) {
  if constexpr (kCentred<P>) return 1;
  else return p.heads;
}

// ---- What a row has one of: mean, rstd ---------------------------------------------------------------------------

__device__ __forceinline__ float rstd_of(float sum, int64_t n, float eps) { return 1.0f / sqrtf(sum / float(n) + eps); }

__device__ __forceinline__ float of_row(const Vector &values, int64_t r) {
  return reinterpret_cast<const float *>(values.data)[r];
}

// LayerNorm's mean of a row.
template <class P> __device__ __forceinline__ float mean_of(const P &p, int64_t r) {
  if constexpr (kCentred<P>) return of_row(p.mean, r);
  else return 0.0f;
}
// Of a gradient over rows: dweight, dbias; along a row: c, a.
template <class P> constexpr int kSums = kCentred<P> ? 2 : 1;

// xhat and g of the elements of x and dy, in their place.
template <class P, int W>
__device__ __forceinline__ void to_xhat_and_g(float mean, float rstd, const float (&scale)[W], float (&x)[W],
                                              float (&dy)[W]) {
#pragma unroll
  for (int e = 0; e < W; ++e) {
    x[e] = (kCentred<P> ? x[e] - mean : x[e]) * rstd;
    dy[e] *= scale[e];
  }
}

// dx of an element, from the sums along its row (norm_backward.cu).
template <class P>
__device__ __forceinline__ float dx_of(float xhat, float g, float rstd, const float *sums, bool added,
                                       float dresidual) {
  float t = fmaf(-xhat, sums[0], g);
  if constexpr (kCentred<P>) t -= sums[1];
  return added ? fmaf(rstd, t, dresidual) : rstd * t;
}

__device__ __forceinline__ void store_of_row(const Vector &values, int64_t r, float value) {
  if (values.data) reinterpret_cast<float *>(values.data)[r] = canonical(value);
}

// ---- The sum along a row -----------------------------------------------------------------------------------------

// The sum of a group's eight lanes, of which a thread has W, by partners 4, 2 and 1 apart. Each of the 8 / W threads gets
// it.
template <int W> __device__ __forceinline__ float of_group(float (&s)[W]) {
  auto from = [](float x, int apart) { return gpu_shfl_xor(x, apart, kLogicalWarp); };
  if constexpr (W == 1) {
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2) s[0] += from(s[0], apart);
    return s[0];
  } else if constexpr (W == 8) {
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2)
#pragma unroll
      for (int e = 0; e < apart; ++e) s[e] += s[e + apart];
    return s[0];
  } else if constexpr (W == 4) {  // the first of two threads goes on with lanes 0 and 2, the second with 1 and 3
    const bool second = threadIdx.x % 2;
    const float low = (second ? s[1] : s[0]) + from(second ? s[0] : s[1], 1);
    const float high = (second ? s[3] : s[2]) + from(second ? s[2] : s[3], 1);
    const float sum = low + high;
    return sum + from(sum, 1);
  } else {
    static_assert(W == 2);
    const bool upper = threadIdx.x & 2;
    float sum = (upper ? s[1] : s[0]) + from(upper ? s[0] : s[1], 2);
    sum += from(sum, 1);
    return sum + from(sum, 2);
  }
}

// In place of y, where x alone is added.
struct Ones {
  __device__ __forceinline__ float operator[](int) const { return 1.0f; }
};

// The lanes of one thread: of `kSlots` of its groups, the rest of them empty.
template <int T, int W, int V> struct Lanes {
  static constexpr int kTeamGroups = T * W / kRowLaneElements;  // that one vector of every thread covers
  static constexpr int kGroups = kRowLaneGroups / kTeamGroups;  // of a thread
  static constexpr int kSlots = V < kGroups ? V : kGroups;      // that V vectors reach
  float lane[kSlots][W] = {};

  // Adds x y, vector v of the thread. A vector past the row's end must not reach its lanes: fmaf(+0, +0, -0) is +0.
  template <class Y> __device__ __forceinline__ void add(int v, bool inside, const float (&x)[W], const Y &y) {
    float(&s)[W] = lane[v % kSlots];
#pragma unroll
    for (int e = 0; e < W; ++e) s[e] = inside ? fmaf(x[e], y[e], s[e]) : s[e];
  }

  // The same of a row that ends anywhere: `left` elements of the vector are the row's.
  template <class Left, class Y>
  __device__ __forceinline__ void add_left(int v, Left left, const float (&x)[W], const Y &y) {
    float(&s)[W] = lane[v % kSlots];
#pragma unroll
    for (int e = 0; e < W; ++e) s[e] = e < left ? fmaf(x[e], y[e], s[e]) : s[e];
  }

  // The sum of the thread's groups; two neighbours get the same one where they share a group.
  __device__ __forceinline__ float own_sum() {
    float group[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) group[i] = of_group(lane[i]);
    if constexpr (kSlots < kGroups)  // the groups that are empty, +0: they change -0 alone, and once
#pragma unroll
      for (int i = 0; i < kSlots; ++i) group[i] += 0.0f;
#pragma unroll
    for (int apart = kGroups / 2; apart > 0; apart /= 2)
#pragma unroll
      for (int i = 0; i < apart && i + apart < kSlots; ++i) group[i] += group[i + apart];
    return group[0];
  }
};

// Floats of shared memory that a join of R rows needs.
template <int T, int R> constexpr int kExchange = T > kLogicalWarp ? R *(T < kMaxTeam ? T : kMaxTeam) : 0;

// Joins the lanes of R rows over the team: every thread gets finish(sum) of each. All threads of the block call it.
template <int T, int W, int V, int R, class F>
__device__ __forceinline__ void join(Lanes<T, W, V> (&lanes)[R], float *exchange, const F &finish, float (&result)[R]) {
  float sum[R];
#pragma unroll
  for (int k = 0; k < R; ++k) sum[k] = lanes[k].own_sum();
  constexpr int kWidth = T < kLogicalWarp ? T : kLogicalWarp;  // of the lanes that the shuffles join
  static_assert(R <= kWidth, "a lane finishes a row");
  int t = int(threadIdx.x) % T, lane = int(threadIdx.x) % kWidth;
  if constexpr (T > kLogicalWarp) {
    constexpr int kGroups = Lanes<T, W, V>::kTeamGroups, kParts = kGroups / kLogicalWarp;
    struct alignas(4 * R) Sums {
      float of[R];
    };
    Sums *sums = reinterpret_cast<Sums *>(exchange);
    if (W == kRowLaneElements || t % 2 == 0) {
      Sums mine;
#pragma unroll
      for (int k = 0; k < R; ++k) mine.of[k] = sum[k];
      sums[t * W / kRowLaneElements] = mine;
    }
    __syncthreads();
    Sums part[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) part[i] = sums[i * kLogicalWarp + lane];
#pragma unroll
    for (int apart = kParts / 2; apart > 0; apart /= 2)
#pragma unroll
      for (int i = 0; i < apart; ++i)
#pragma unroll
        for (int k = 0; k < R; ++k) part[i].of[k] += part[i + apart].of[k];
#pragma unroll
    for (int k = 0; k < R; ++k) sum[k] = part[0].of[k];
  }
  // Half of the lanes go on with half of the rows, until each lane has one: R - 1 exchanges instead of R log R.
  int rows = R;
#pragma unroll
  for (int apart = kWidth / 2; apart > 0; apart /= 2) {
    if (rows > 1) {
      rows /= 2;
      bool upper = lane & apart;
#pragma unroll
      for (int k = 0; k < rows; ++k) {
        float keep = upper ? sum[k + rows] : sum[k], give = upper ? sum[k] : sum[k + rows];
        sum[k] = keep + gpu_shfl_xor(give, apart, kWidth);
      }
    } else {
      sum[0] += gpu_shfl_xor(sum[0], apart, kWidth);
    }
  }
  float finished = finish(sum[0]);
#pragma unroll
  for (int k = 0; k < R; ++k) result[k] = R == 1 ? finished : gpu_shfl(finished, k * (kWidth / R), kWidth);
}

// ---- Choosing, launching -----------------------------------------------------------------------------------------

// A team of T threads with V vectors of W elements each, R rows at a time.
template <int team, int elements, int vectors, int rows> struct RowShape {
  static constexpr int T = team, W = elements, V = vectors, R = rows;
  static constexpr int holds() { return T * W * V; }
};

// Calls f with the first of these shapes that holds a row of n, or with the last of them.
template <class Shape, class... More, class F> auto with_first(int64_t n, const F &f) {
  if constexpr (sizeof...(More) > 0)
    if (n > Shape::holds()) return with_first<More...>(n, f);
  return f(Shape{});
}

// Calls f with the problem's device the current one.
template <class P, class F> pydet_status on_device(const char *name, const P &p, const F &f) {
  DeviceGuard guard(p.device.id);
  return guard.error() == kGpuSuccess ? f() : device_error(name, guard.error());
}
// The same, with the type of the elements as a constant: f(type).
template <class P, class F> pydet_status by_type(const char *name, const P &p, Type type, const F &f) {
  return on_device(name, p, [&] { return with_type<kUnscaledTypes>(type, f); });
}

// Blocks on the problem's stream, of a kernel that itself waits for the one ahead.
template <class P>
Launch blocks_of(const char *name, const P &p, dim3 blocks, int threads, int shared_bytes = 0, int cluster = 1) {
  return {name,    static_cast<gpu_stream>(p.stream),      blocks, dim3(unsigned(threads)), shared_bytes,
          cluster, bool(gpu_overlaps_kernels(p.device.id))};
}

// A kernel whose blocks of `threads` take so many rows each.
template <class P, class... More>
pydet_status launch_rows(const char *name, const P &p, int64_t rows_of_block, int threads, void (*kernel)(P, More...),
                         More... more) {
  return launch(blocks_of(name, p, grid_of(divide_up(p.rows, rows_of_block), threads), threads), kernel, p, more...);
}

// Rows up to this are held whole by their team; longer ones are passed over again.
constexpr int64_t kLongestHeldRow = 8 * kRowLanes;
constexpr int64_t kLongestHeldLayer = kGpuDeviceType == PYDET_CUDA ? kLongestHeldRow : kLongestHeldRow / 2;

// Whether every row is whole 16-byte pieces, or other ones, in place too (an absent operand has no say).
inline bool rows_aligned(const Rows &rows, int pieces = 16) {
  if (!rows.data) return true;
  int64_t bytes = size_of(rows.type);
  return reinterpret_cast<uintptr_t>(rows.data) % uintptr_t(pieces) == 0 && rows.outer_stride * bytes % pieces == 0 &&
         rows.inner_stride * bytes % pieces == 0 && rows.far_stride * bytes % pieces == 0;
}
// Whether a gradient's rows are whole vectors in the places of all operands.
template <class P> bool rows_whole(const P &p) {
  return p.n % kRowLaneElements == 0 && rows_aligned(p.dy) && rows_aligned(p.x) && rows_aligned(p.dresidual) &&
         rows_aligned(p.dx);
}
inline bool vector_aligned(const Vector &vector) { return reinterpret_cast<uintptr_t>(vector.data) % 16 == 0; }

// ---- Rows by eights: of any type and place -----------------------------------------------------------------------

constexpr int kVector = kRowLaneElements;

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
    unpack_halves(load_packed<Type::f16, kVector>(row + j * 2), type, x);
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
