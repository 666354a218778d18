// A row of RMSNorm on the GPU: vectors of eight elements, the sum along a row, and a ring of rows in flight. Shared by
// rmsnorm.cu and rmsnorm_backward.cu.
//
//   rowsum   lane (g, e) walks elements j with j mod 8 = e, j div 8 mod 256 = g, lane = fmaf(u, v, lane) from +0;
//            then e is joined 4, 2, 1 apart, then g 128, 64, ..., 1 apart
//
// A team of T threads owns a row at a time: vector v of thread t is elements 8 (t + T v) .. + 7, so a thread holds whole
// lanes, whatever T is, and T and V may be chosen by speed. cp.async keeps several rows of a team in flight, in slots
// that only their own thread reads, so that no barrier stands between copy and use.
#pragma once

#include "epilogue.h"

namespace pydet {
namespace {

constexpr int kVector = kRowLaneElements;
constexpr int kLogicalWarp = 32;  // also on a wave of 64
constexpr int kMaxTeam = kRowLaneGroups;

// ---- Eight elements ----------------------------------------------------------------------------------------------

template <Type type> constexpr int kVectorBytes = kVector * (type == Type::f32 ? 4 : 2);
template <Type type> constexpr int kPieces = kVectorBytes<type> / 16;

template <Type type> struct alignas(16) Packed {
  uint4 piece[kPieces<type>];
};

template <Type type> __device__ __forceinline__ void unpack(const Packed<type> &packed, float (&x)[kVector]) {
#pragma unroll
  for (int i = 0; i < kPieces<type>; ++i) {
    const uint32_t words[4] = {packed.piece[i].x, packed.piece[i].y, packed.piece[i].z, packed.piece[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (type == Type::f32) {
        x[4 * i + j] = float_of(words[j]);
      } else {
        uint16_t low = uint16_t(words[j]), high = uint16_t(words[j] >> 16);
        x[2 * j] = type == Type::bf16 ? f32_from_bf16(low) : f32_from_f16(low);
        x[2 * j + 1] = type == Type::bf16 ? f32_from_bf16(high) : f32_from_f16(high);
      }
    }
  }
}

template <Type type> __device__ __forceinline__ uint32_t rounded_word(const float *x) {
  if (type == Type::f32) return bits_of(canonical(x[0]));
  uint32_t low = type == Type::bf16 ? bf16_from_f32(x[0]) : f16_from_f32(x[0]);
  uint32_t high = type == Type::bf16 ? bf16_from_f32(x[1]) : f16_from_f32(x[1]);
  return low | high << 16;
}

template <Type type> __device__ __forceinline__ Packed<type> pack(const float (&x)[kVector]) {
  constexpr int kWordElements = type == Type::f32 ? 1 : 2;
  Packed<type> packed;
#pragma unroll
  for (int i = 0; i < kPieces<type>; ++i) {
    const float *from = x + 4 * kWordElements * i;
    packed.piece[i] = make_uint4(rounded_word<type>(from), rounded_word<type>(from + kWordElements),
                                 rounded_word<type>(from + 2 * kWordElements), rounded_word<type>(from + 3 * kWordElements));
  }
  return packed;
}

// Elements j .. j + 7 of a row of n; those past n read as +0 and are not written. `aligned`: the row is, to 16 bytes.
template <Type type> __device__ __forceinline__ void load_vector(const char *row, int64_t j, int64_t n, bool aligned, float (&x)[kVector]) {
  if (aligned && j + kVector <= n) return unpack(*reinterpret_cast<const Packed<type> *>(row + j * size_of(type)), x);
#pragma unroll
  for (int e = 0; e < kVector; ++e) x[e] = j + e < n ? load_f32(row, type, j + e) : 0.0f;
}

template <Type type> __device__ __forceinline__ void store_vector(char *row, int64_t j, int64_t n, bool aligned, const float (&x)[kVector]) {
  if (aligned && j + kVector <= n) {
    *reinterpret_cast<Packed<type> *>(row + j * size_of(type)) = pack<type>(x);
    return;
  }
#pragma unroll
  for (int e = 0; e < kVector; ++e)
    if (j + e < n) store_rounded(row, type, j + e, x[e]);
}

// w + weight_offset; w is 1 where there is none.
__device__ __forceinline__ void load_scale(const Vector &weight, float offset, int64_t j, int64_t n, bool aligned, float (&scale)[kVector]) {
#pragma unroll
  for (int e = 0; e < kVector; ++e) scale[e] = 1.0f;
  if (weight.data) switch (weight.type) {
      case Type::bf16: load_vector<Type::bf16>(weight.data, j, n, aligned, scale); break;
      case Type::f16: load_vector<Type::f16>(weight.data, j, n, aligned, scale); break;
      default: load_vector<Type::f32>(weight.data, j, n, aligned, scale); break;
    }
#pragma unroll
  for (int e = 0; e < kVector; ++e) scale[e] += offset;
}

// A division of 64 bits takes as long as a load: only rows of two levels meet it.
__device__ __forceinline__ char *row_at(const Rows &rows, int element_bytes, int64_t inner, int64_t r) {
  int64_t outer = r < inner ? 0 : r / inner;
  return rows.data + (outer * rows.outer_stride + (r - outer * inner) * rows.inner_stride) * element_bytes;
}

// ---- The sum along a row -----------------------------------------------------------------------------------------

// The lanes of one thread: `kSlots` of its groups, the rest of them empty.
template <int T, int V> struct Lanes {
  static constexpr int kGroups = kRowLaneGroups / T;             // of a thread
  static constexpr int kSlots = V < kGroups ? V : kGroups;       // that V vectors reach
  float lane[kSlots][kVector] = {};

  // Adds x y, vector v of the thread, of which `left` elements are in the row: those past it must not reach a lane, for
  // fmaf(+0, +0, -0) is +0.
  __device__ __forceinline__ void add(int v, int64_t left, const float (&x)[kVector], const float (&y)[kVector]) {
    float(&s)[kVector] = lane[v % kSlots];
    if (left >= kVector) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) s[e] = fmaf(x[e], y[e], s[e]);
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) s[e] = e < left ? fmaf(x[e], y[e], s[e]) : s[e];
    }
  }

  // Joins all lanes of the team; every thread gets the sum. `exchange` is 2 T floats of the team's shared memory, used by
  // halves: one barrier a row is enough, since nobody can be two rows ahead of it.
  __device__ __forceinline__ float join(float *exchange, int row_index) {
    float group[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (i >= kSlots) {
        group[i] = 0.0f;
        continue;
      }
      float(&s)[kVector] = lane[i < kSlots ? i : 0];
#pragma unroll
      for (int apart = kVector / 2; apart > 0; apart /= 2)
#pragma unroll
        for (int e = 0; e < apart; ++e) s[e] += s[e + apart];
      group[i] = s[0];
    }
#pragma unroll
    for (int apart = kGroups / 2; apart > 0; apart /= 2)
#pragma unroll
      for (int i = 0; i < apart; ++i) group[i] += group[i + apart];
    float sum = group[0];
    if constexpr (T > kLogicalWarp) {
      constexpr int kWarps = T / kLogicalWarp;
      float *mine = exchange + row_index % 2 * T;
      mine[threadIdx.x % T] = sum;
      __syncthreads();
      float part[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) part[w] = mine[w * kLogicalWarp + threadIdx.x % kLogicalWarp];
#pragma unroll
      for (int apart = kWarps / 2; apart > 0; apart /= 2)
#pragma unroll
        for (int w = 0; w < apart; ++w) part[w] += part[w + apart];
      sum = part[0];
    }
#pragma unroll
    for (int apart = kLogicalWarp / 2; apart > 0; apart /= 2) sum += gpu_shfl_xor(sum, apart, kLogicalWarp);
    return sum;
  }
};

// ---- Rows in flight ----------------------------------------------------------------------------------------------

// Teams of one warp share a block of four; a larger team is a block, so that its barrier is the block's.
template <int T> constexpr int kTeams = T == kLogicalWarp ? kDweightGroupRows / kDweightChainRows : 1;
template <int T> constexpr int kBlock = T * kTeams<T>;

// A ring of rows of `tensors` operands. Slots are laid out by thread, and only their own thread reads them.
template <Type type, int T, int V, int tensors> struct Ring {
  static constexpr int kRowBytes = tensors * V * T * kVectorBytes<type>;
  // About 48 KB a block, 3 rows where that is less, as many as fit where those are too many.
  static constexpr int kBlockRow = kRowBytes * kTeams<T>, kFit = (208 << 10) / kBlockRow, kWanted = (48 << 10) / kBlockRow;
  static constexpr int kAtLeast3 = kWanted < 3 ? 3 : kWanted > 8 ? 8 : kWanted;
  static constexpr int kDepth = kFit < 1 ? 1 : kFit < kAtLeast3 ? kFit : kAtLeast3;
  static constexpr int kTeamBytes = kDepth * kRowBytes + 2 * T * int(sizeof(float));
  char *base;

  // `row_index` counts the team's rows from 0.
  __device__ __forceinline__ uint4 *slot(int row_index, int tensor, int v, int piece) const {
    int place = ((row_index % kDepth * tensors + tensor) * V + v) * kPieces<type> + piece;
    return reinterpret_cast<uint4 *>(base) + place * T + threadIdx.x % T;
  }
  __device__ __forceinline__ float *exchange() const { return reinterpret_cast<float *>(base + kDepth * kRowBytes); }

  __device__ __forceinline__ void fetch(int row_index, int tensor, const char *row, int64_t n) const {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int i = 0; i < kPieces<type>; ++i) {
        int byte = int(threadIdx.x % T + T * v) * kVectorBytes<type> + 16 * i, left = int(n) * size_of(type) - byte;
        int valid = left >= 16 ? 16 : left > 0 ? left : 0;
        copy_async_16(slot(row_index, tensor, v, i), row + (valid ? byte : 0), valid);
      }
  }
  __device__ __forceinline__ void read(int row_index, int tensor, int v, float (&x)[kVector]) const {
    Packed<type> packed;
#pragma unroll
    for (int i = 0; i < kPieces<type>; ++i) packed.piece[i] = *slot(row_index, tensor, v, i);
    unpack(packed, x);
  }
  __device__ __forceinline__ void write(int row_index, int tensor, int v, const Packed<type> &packed) const {
#pragma unroll
    for (int i = 0; i < kPieces<type>; ++i) *slot(row_index, tensor, v, i) = packed.piece[i];
  }
};

// ---- Choosing ----------------------------------------------------------------------------------------------------

template <int team, int vectors> struct RowShape {
  static constexpr int T = team, V = vectors;
};

// Rows up to this are held whole by their team; longer ones are passed over again.
constexpr int64_t kLongestHeldRow = 8 * kRowLanes;

// Calls f with a team and vectors that hold a row of n. Few threads with much to do each: a row costs every thread some 200
// instructions beside those of its elements.
template <class F> pydet_status with_small_team(int64_t n, const F &f) {
  if (n <= 32 * kVector) return f(RowShape<32, 1>{});
  if (n <= 32 * 2 * kVector) return f(RowShape<32, 2>{});
  if (n <= 32 * 4 * kVector) return f(RowShape<32, 4>{});
  if (n <= 64 * 4 * kVector) return f(RowShape<64, 4>{});
  if (n <= 128 * 4 * kVector) return f(RowShape<128, 4>{});
  if (n <= 256 * 4 * kVector) return f(RowShape<256, 4>{});
  return f(RowShape<256, 8>{});
}

// Many threads with little to do each, for where few rows are taken at once.
template <class F> pydet_status with_large_team(int64_t n, const F &f) {
  if (n <= 32 * kVector) return f(RowShape<32, 1>{});
  if (n <= 64 * kVector) return f(RowShape<64, 1>{});
  if (n <= 128 * kVector) return f(RowShape<128, 1>{});
  if (n <= kRowLanes) return f(RowShape<256, 1>{});
  if (n <= 2 * kRowLanes) return f(RowShape<256, 2>{});
  if (n <= 4 * kRowLanes) return f(RowShape<256, 4>{});
  return f(RowShape<256, 8>{});
}

// Whether 16-byte pieces of every row are aligned (an absent operand has no say).
inline bool rows_aligned(const Rows &rows) {
  if (!rows.data) return true;
  int64_t bytes = size_of(rows.type);
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.outer_stride * bytes % 16 == 0 && rows.inner_stride * bytes % 16 == 0;
}
inline bool vector_aligned(const Vector &vector) { return reinterpret_cast<uintptr_t>(vector.data) % 16 == 0; }

// Calls f with the type as a compile-time constant.
template <class F> pydet_status with_type(Type type, const F &f) {
  switch (type) {
    case Type::bf16: return f(std::integral_constant<Type, Type::bf16>{});
    case Type::f16: return f(std::integral_constant<Type, Type::f16>{});
    default: return f(std::integral_constant<Type, Type::f32>{});
  }
}

}  // namespace
}  // namespace pydet
