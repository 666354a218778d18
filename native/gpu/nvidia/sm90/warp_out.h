// What one warp of gemm.cu does with its 16 rows of a tile before and after the main loop. Where the tile is one of
// out^T, its rows are columns of out, and its columns rows: then what is adjacent in memory lies along its rows.
//
// Behind other kernels this code is cold, and to fetch a line of it costs more than to run it. So a tile's pieces are
// taken in loops that stay loops: only what names accumulators stands there once a piece.
#pragma once

#include <utility>

#include "gpu/nvidia/sm90/pipe/wgmma.h"
#include "gpu/nvidia/sm90/rows.h"

namespace pydet {
namespace {

// Of the warpgroups that consume: read again where it is asked for, rather than kept.
__device__ __forceinline__ uint32_t thread_number() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread - kWarpgroup;
}
// f(integral_constant i) for the i that `which` is.
template <class F, int... i>
__device__ __forceinline__ void with_index(int which, F f, std::integer_sequence<int, i...>) {
  ((which == i ? f(std::integral_constant<int, i>()) : void()), ...);
}

// The tiles that the producer has begun. A slot is 48 bytes of shared memory; one that holds no tile follows the last.
constexpr int kSlots = 8, kSlotBytes = 48;
struct TileSlots : Slots<kSlots, uint32_t> {
  uint32_t slots;
  __device__ __forceinline__ uint32_t slot(uint32_t turn) const { return slots + turn % kSlots * kSlotBytes; }

  // One thread. `kind`: 0 where there is no tile. Of a part of a tile also how many k it has.
  template <bool has_depth = false>
  __device__ __forceinline__ void put(uint32_t turn, const Tile &tile, int kind, int depth = 0) const {
    wait_empty(turn);
    const uint32_t at = slot(turn);
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(tile.row), "r"(tile.column),
                 "r"(tile.first_row), "r"(tile.first_column)
                 : "memory");
    asm volatile("st.shared.v2.s64 [%0], {%1, %2};" ::"r"(at + 16), "l"(tile.out_offset), "l"(tile.bias_offset)
                 : "memory");
    if constexpr (has_depth) asm volatile("st.shared.s32 [%0], %1;" ::"r"(at + 36), "r"(depth) : "memory");
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(at + 32), "r"(kind) : "memory");
    barrier_arrive(full(turn));
  }

  // All threads of the consumers: whether there is a tile, which stays until it is given back.
  __device__ __forceinline__ bool wait(uint32_t turn) const {
    wait_full(turn);
    return kind(turn);
  }
  __device__ __forceinline__ int kind(uint32_t turn) const {
    int kind;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(kind) : "r"(slot(turn) + 32) : "memory");
    return kind;
  }
  __device__ __forceinline__ int depth(uint32_t turn) const {
    int depth;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(depth) : "r"(slot(turn) + 36) : "memory");
    return depth;
  }
  __device__ __forceinline__ Tile look(uint32_t turn) const {
    Tile tile = {};
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.row), "=r"(tile.column), "=r"(tile.first_row), "=r"(tile.first_column)
                 : "r"(slot(turn))
                 : "memory");
    asm volatile("ld.shared.v2.s64 {%0, %1}, [%2];"
                 : "=l"(tile.out_offset), "=l"(tile.bias_offset)
                 : "r"(slot(turn) + 16)
                 : "memory");
    return tile;
  }
};

// `d` are a thread's accumulators of 16 rows by S::n columns. `piece` is 2 KiB of shared memory, the warp's own.
template <class S> struct WarpOut {
  const Sm90Problem &p;
  const Tile tile;
  uint32_t piece;
  int row, lane;  // row: the first, in the matrix

  static constexpr int kFloatColumns = 32, kHalfColumns = S::n < 64 ? S::n : 64;
  template <int columns> static constexpr int pieces = (S::n + columns - 1) / columns;
  // The last piece may overlap the one before: it has the same bits there.
  template <int columns> __device__ static constexpr int start_of(int piece) {
    return piece * columns < S::n - columns ? piece * columns : S::n - columns;
  }
  // From where a piece starts to where the next does.
  template <int columns> __device__ __forceinline__ static int step_from(int piece) {
    return S::n % columns && piece == pieces<columns> - 2 ? S::n % columns : columns;
  }

  // A piece of floats: row r, 32 columns, the 16 bytes c / 4 of a row at c / 4 ^ 2 (r % 4 ^ r / 4). So neither the rows
  // that a warp writes pairs of at once share banks, nor, for out^T, every fourth row, nor what lies along a row.
  __device__ __forceinline__ uint32_t float_address(int r, int c) const {
    return piece + r * kRowBytes + (((c / 4) ^ (((r ^ (r >> 2)) & 3) << 1)) << 4) + c % 4 * 4;
  }
  // f(d[i], address) of all d[i] and d[i + 1] in the piece whose first column in the tile is `start`.
  template <int start, class F> __device__ __forceinline__ void each_pair(F f) const {
    const uint32_t first = float_address(lane / 4, lane % 4 * 2);  // 8 columns on are two units on, 8 rows four
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) f(start / 2 + 4 * j + 2 * h, (first ^ (j << 5) ^ (h << 6)) + h * 8 * kRowBytes);
  }
  // Whether an element of the matrix is this tile's to store.
  __device__ __forceinline__ bool owns(int r, int c) const {
    return r >= tile.first_row && r < p.m && c >= tile.first_column && c < p.n;
  }
  __device__ __forceinline__ int64_t place(int r, int c) const {
    return tile.out_offset + (p.swapped ? c * p.out_stride + r : r * p.out_stride + c);
  }

  // Accumulators that continue out's elements, or those of `from`, in fp32. All loads are on their way before the first is
  // waited for: eight lanes' words are a sector, along a row of out or, for out^T, along its column.
  __device__ __forceinline__ void begin(float (&d)[S::n / 2]) const {
    const int r = row + lane / 4, c = tile.column + lane % 4 * 2;
    const float *const from = p.from + tile.out_offset;
    const auto place = [&](int r, int c) { return p.swapped ? c * p.from_stride + r : r * p.from_stride + c; };
    if (p.from_pairs && !p.swapped) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float *const line = from + place(r + 8 * h, c);
        const int left = r + 8 * h < p.m ? p.n - c : 0;
#pragma unroll
        for (int j = 0; j < S::n / 8; ++j) {
          const float2 pair = 8 * j < left ? *reinterpret_cast<const float2 *>(line + 8 * j) : make_float2(0, 0);
          d[4 * j + 2 * h] = pair.x, d[4 * j + 2 * h + 1] = pair.y;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < S::n / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at_r = r + i / 2 * 8, at_c = c + 8 * j + i % 2;
          d[4 * j + i] = at_r < p.m && at_c < p.n ? from[place(at_r, at_c)] : 0;
        }
    }
#pragma unroll
    for (float &x : d) asm volatile("mov.f32 %0, %1;" : "=f"(x) : "f"(canonical(x)));  // before the products' fence
  }

  // To out of the operands' type, whose rows and what lies adjacent in them are whole units of 16 bytes.
  __device__ __forceinline__ void store_halves(const float (&d)[S::n / 2]) const {
    constexpr bool bf16 = is_bf16<S::type>();
    // A piece lies as rows of 128 bytes, 16-byte part c of row r at c ^ (r % 8), or for out^T as 64 rows of 32 bytes,
    // half h of row r at h ^ (r / 4 % 2). A lane takes four parts, `step` rows of memory from each other.
    const bool swapped = p.swapped;
    const int step = swapped ? 16 : 4, line = swapped ? lane / 2 : lane / 8, part = swapped ? lane % 2 : lane % 8;
    uint32_t from[2];  // of even and of odd turns
    from[0] = piece + lane / 2 * 32 + ((lane % 2 ^ (lane / 8 & 1)) << 4);
    from[1] = from[0];
    if (!swapped)
      for (int i = 0; i < 2; ++i) from[i] = piece + lane / 8 * kRowBytes + ((part ^ (lane / 8 + 4 * i)) << 4);
    // In the matrix, across what is adjacent, and along it.
    int first = (swapped ? tile.column : row) + line, other = (swapped ? row : tile.column) + part * 8;
    const int end = swapped ? p.n : p.m, other_end = swapped ? p.m : p.n;
    const int64_t bytes = p.out_stride * 2, column_bytes = swapped ? bytes : 2;
    char *to = p.out + (tile.out_offset + first * p.out_stride + other) * 2;
#pragma unroll 1
    for (int i = 0; i < pieces<kHalfColumns>; ++i) {
      auto stage = [&](auto index) {
        constexpr int start = start_of<kHalfColumns>(decltype(index)::value);
#pragma unroll
        for (int j = 0; j < kHalfColumns / 16; ++j) {
          const float *e = d + start / 2 + 8 * j;
          const uint32_t fragments[4] = {round_pair<bf16>(e[0], e[1]), round_pair<bf16>(e[2], e[3]),
                                         round_pair<bf16>(e[4], e[5]), round_pair<bf16>(e[6], e[7])};
          const int r = lane % 16, c = 2 * j + lane / 16;
          if (swapped)
            store_matrices<true>(
                piece + j * 512 + (lane / 16 * 8 + lane % 8) * 32 + (((lane / 8 & 1) ^ (lane / 4 & 1)) << 4),
                fragments);
          else store_matrices(piece + r * kRowBytes + ((c ^ (r & 7)) << 4), fragments);
        }
      };
      with_index(i, stage, std::make_integer_sequence<int, pieces<kHalfColumns>>());
      __syncwarp();
      const bool inside = other < other_end && (swapped || part * 8 < kHalfColumns);
      char *here = to;
#pragma unroll
      for (int j = 0; j < 4; ++j, here += step * bytes)
        if (inside && first + j * step < end && (!swapped || j * 16 < kHalfColumns))
          *reinterpret_cast<uint4 *>(here) = load_16_bytes(from[j % 2] + j * 512);
      const int columns = step_from<kHalfColumns>(i);
      to += columns * column_bytes, (swapped ? first : other) += columns;
      __syncwarp();
    }
  }

  // Piece i of the accumulators, as floats.
  __device__ __forceinline__ void stage_floats(const float (&d)[S::n / 2], int i) const {
    auto stage = [&](auto index) {
      each_pair<start_of<kFloatColumns>(decltype(index)::value)>(
          [&](int e, uint32_t address) { store_pair(address, d[e], d[e + 1]); });
    };
    with_index(i, stage, std::make_integer_sequence<int, pieces<kFloatColumns>>());
    __syncwarp();
  }

  // To out of fp32, whose rows and what lies adjacent in them are whole units of 16 bytes.
  __device__ __forceinline__ void store_singles(const float (&d)[S::n / 2]) const {
    // A lane takes four units of a piece, `step` rows of memory from each other: 16 bytes of a row of the piece, or for
    // out^T four words of a column.
    const bool swapped = p.swapped;
    const int step = swapped ? 8 : 4, line = swapped ? lane / 4 : lane / 8, part = swapped ? lane % 4 : lane % 8;
    const uint32_t from = swapped ? float_address(part * 4, line) : float_address(line, part * 4);
    // In the matrix, across what is adjacent, and along it.
    int first = (swapped ? tile.column : row) + line, other = (swapped ? row : tile.column) + part * 4;
    const int begin = swapped ? tile.first_column : tile.first_row, end = swapped ? p.n : p.m;
    const int other_begin = swapped ? tile.first_row : tile.first_column, other_end = swapped ? p.m : p.n;
    const int64_t bytes = p.out_stride * 4, column_bytes = swapped ? bytes : 4;
    char *to = p.out + (tile.out_offset + first * p.out_stride + other) * 4;
#pragma unroll 1
    for (int i = 0; i < pieces<kFloatColumns>; ++i) {
      stage_floats(d, i);
      uint4 units[4];
      if (swapped) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t at = from ^ (j << 5);  // 8 columns on are two units on, as is the next row
          units[j] =
              make_uint4(bits_of(load_word(at)), bits_of(load_word((at ^ 32) + kRowBytes)),
                         bits_of(load_word((at ^ 64) + 2 * kRowBytes)), bits_of(load_word((at ^ 96) + 3 * kRowBytes)));
        }
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) units[j] = load_16_bytes((from ^ (j << 5)) + j * 4 * kRowBytes);
      }
      const bool inside = other >= other_begin && other < other_end;
      char *here = to;
#pragma unroll
      for (int j = 0; j < 4; ++j, here += step * bytes) {
        const int line_here = first + j * step;
        if (inside && line_here >= begin && line_here < end) *reinterpret_cast<uint4 *>(here) = units[j];
      }
      const int columns = step_from<kFloatColumns>(i);
      to += columns * column_bytes, (swapped ? first : other) += columns;
      __syncwarp();
    }
  }

  // To any out, with a bias that has rows and columns of its own, if there is one.
  __device__ __forceinline__ void store_any(const float (&d)[S::n / 2]) const {
#pragma unroll 1
    for (int i = 0; i < pieces<kFloatColumns>; ++i) {
      stage_floats(d, i);
      store_floats(tile.column + start_of<kFloatColumns>(i));
      __syncwarp();
    }
  }

  // The piece of floats to its place in out, four adjacent elements a lane.
  __device__ __forceinline__ void store_floats(int column) const {
    const bool swapped = p.swapped;
#pragma unroll 1
    for (int j = lane; j < kWarpRows * kFloatColumns / 4; j += 32) {
      const int r = swapped ? j % 4 * 4 : j / 8, c = swapped ? j / 4 : j % 8 * 4;
      float x[4];
      bool inside[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at_r = r + (swapped ? e : 0), at_c = c + (swapped ? 0 : e);
        x[e] = load_word(float_address(at_r, at_c));
        inside[e] = owns(row + at_r, column + at_c);
        if (p.bias_way == BiasWay::any && inside[e]) {
          const int64_t at =
              tile.bias_offset + (row + at_r) * p.bias_row_stride + (column + at_c) * p.bias_column_stride;
          x[e] = x[e] + f32_from_raw(load_raw(p.bias, at, p.bias_type), p.bias_type);
        }
      }
      const int64_t at = place(row + r, column + c);
      uint32_t bits[4];
      if (p.out_type == Type::f32) {
#pragma unroll
        for (int e = 0; e < 4; ++e) bits[e] = bits_of(x[e]);
        float *to = reinterpret_cast<float *>(p.out) + at;
        if (p.out_fours) {
          if (inside[0]) *reinterpret_cast<uint4 *>(to) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (inside[e]) to[e] = x[e];
        }
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          bits[e] = p.out_type == Type::bf16 ? round_pair<true>(x[e], 0) : round_pair<false>(x[e], 0);
        uint16_t *to = reinterpret_cast<uint16_t *>(p.out) + at;
        if (p.out_fours) {
          if (inside[0]) *reinterpret_cast<uint2 *>(to) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (inside[e]) to[e] = uint16_t(bits[e]);
        }
      }
    }
  }
};

// What is added to the accumulators of a thread: loaded before the main loop, where that leaves registers for it.
template <class S> struct Biases {
  static constexpr int loads = (S::n + kWarpgroup - 1) / kWarpgroup;
  uint32_t column[loads] = {};
  float row[S::blocks][2] = {};

  // first_row: of the warp's first block.
  __device__ __forceinline__ void load(const Sm90Problem &p, const Tile &tile, int first_row) {
    const int thread = int(thread_number() % kWarpgroup);
    if (p.bias_way == BiasWay::by_column) {
#pragma unroll
      for (int i = 0; i < loads; ++i) {
        const int c = tile.column + thread + i * kWarpgroup;
        if (c < p.n) column[i] = load_raw(p.bias, tile.bias_offset + c * p.bias_column_stride, p.bias_type);
      }
    } else if (p.bias_way == BiasWay::by_row) {
#pragma unroll
      for (int i = 0; i < 2 * S::blocks; ++i) {
        const int r = first_row + i / 2 * 64 + i % 2 * 8 + thread % 32 / 4;
        if (r < p.m)
          row[i / 2][i % 2] =
              f32_from_raw(load_raw(p.bias, tile.bias_offset + r * p.bias_row_stride, p.bias_type), p.bias_type);
      }
    }
  }

  // Columns' by way of n floats of the warpgroup's in shared memory.
  __device__ __forceinline__ void add(const Sm90Problem &p, float (&d)[S::registers], uint32_t shared) const {
    const int warpgroup = int(thread_number() / kWarpgroup), thread = int(thread_number() % kWarpgroup);
    const int barrier = 1 + warpgroup;
    const uint32_t floats = shared + S::bias_at + warpgroup * S::n * 4;
    if (p.bias_way == BiasWay::by_column) {
      named_sync(barrier, kWarpgroup);
#pragma unroll
      for (int i = 0; i < loads; ++i)
        if (thread + i * kWarpgroup < S::n)
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(floats + (thread + i * kWarpgroup) * 4),
                       "f"(f32_from_raw(column[i], p.bias_type))
                       : "memory");
      named_sync(barrier, kWarpgroup);
#pragma unroll
      for (int i = 0; i < S::n / 8; ++i) {
        const float2 pair = load_pair(floats + (8 * i + thread % 4 * 2) * 4);
#pragma unroll
        for (int block = 0; block < S::blocks; ++block) {
          float *x = block_of<S>(d, block) + 4 * i;
          x[0] = x[0] + pair.x, x[1] = x[1] + pair.y, x[2] = x[2] + pair.x, x[3] = x[3] + pair.y;
        }
      }
    } else if (p.bias_way == BiasWay::by_row) {
#pragma unroll
      for (int i = 0; i < S::registers; ++i) d[i] = d[i] + row[i / S::block_registers][i / 2 % 2];
    }
  }
};

}  // namespace
}  // namespace pydet
