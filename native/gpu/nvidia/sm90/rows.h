// Where tiles of gemm.cu and scaled_tiles.cu lie, and what one warp of scaled_tiles.cu does with its 16 rows of one
// before and after the main loop.
#pragma once

#include "gpu/nvidia/sm90/gemm.h"
#include "gpu/nvidia/sm90/pipe/jobs.h"
#include "gpu/nvidia/sm90/pipe/out.h"

namespace pydet {
namespace {

// Where a tile lies, and its batch. A tile that would pass an edge is moved back to end there, since boxes that TMA has to
// fill with zeros cost more than whole ones; it then makes again, to the same bits, what its neighbour makes. Only what
// is at first_row, first_column and after them is stored: all of it, or under accumulate, where nothing may be added
// twice, the tile's own part.
struct Tile {
  int row, column, first_row, first_column;
  int batch[kSm90MaxBatch];
  int64_t out_offset, bias_offset;
};

// Of m by n, in a cluster of cluster_m by cluster_n of them.
template <bool quick = false>
__device__ __forceinline__ Tile tile_of(const Sm90Problem &p, int index, int m, int n, int cluster_m, int cluster_n,
                                        int row_rank, int column_rank) {
  Tile tile = {};
  int matrix = p.cluster_rows * p.cluster_columns, batch = p.batched ? index / matrix : 0;
  int i = index - batch * matrix, band_tiles = p.band * p.cluster_columns, band = quotient_of<quick>(i, band_tiles);
  int rows = min(p.band, p.cluster_rows - band * p.band), within = i - band * band_tiles;
  const int column = quotient_of<quick>(within, rows), row = quick ? within - column * rows : within % rows;
  tile.row = ((band * p.band + row) * cluster_m + row_rank) * m;
  tile.column = (column * cluster_n + column_rank) * n;
  tile.first_row = tile.row, tile.first_column = tile.column;
  if (p.rows_move) tile.row = max(0, min(tile.row, p.m - m));
  if (p.columns_move) tile.column = max(0, min(tile.column, p.n - n));
  if (!p.accumulate) tile.first_row = tile.row, tile.first_column = tile.column;
  if (p.batched)
    for (int d = kSm90MaxBatch - 1; d >= 0; --d) {
      tile.batch[d] = batch % p.batch_shape[d];
      batch /= p.batch_shape[d];
      tile.out_offset += tile.batch[d] * p.out_batch_stride[d];
      tile.bias_offset += tile.batch[d] * p.bias_batch_stride[d];
    }
  return tile;
}
template <class S> __device__ __forceinline__ Tile tile_of(const Sm90Problem &p, int index, int rank) {
  return tile_of<true>(p, index, S::m, S::n, S::cluster_m, S::cluster_n, rank % S::cluster_m, rank / S::cluster_m);
}

// The kernels that store through WarpRows name each type of out.
static_assert(types_for(kResult) == (bit(Type::f32) | bit(Type::bf16) | bit(Type::f16)), "what they name");

// What one warp does with its 16 rows of a tile outside of the main loop. A piece is 16 rows of 128 bytes in shared
// memory, swizzled as TMA does it: the 16-byte chunk c of row r lies at chunk c ^ (r % 8).
template <class S> struct WarpRows {
  const Sm90Problem &p;
  const Tile tile;
  uint32_t piece;  // this warp's own
  int row, lane;   // first row, in the matrix

  // The address of this thread's pair of fp32 in 8-column group i of a piece: row lane / 4 + 8 h.
  __device__ __forceinline__ uint32_t pair_address(int i, int h) const {
    int r = lane / 4 + 8 * h, chunk = 2 * i + lane % 4 / 2;
    return piece + r * kRowBytes + ((chunk ^ (r & 7)) << 4) + (lane & 1) * 8;
  }

  // f(i, x) for every accumulator d[i] and the element x of a matrix that belongs to it; 0 past the edges.
  template <class F>
  __device__ __forceinline__ void each_element(const char *data, Type type, int64_t offset, int64_t row_stride,
                                               int64_t column_stride, F f) const {
    constexpr int columns = 32;
#pragma unroll
    for (int group = 0; group < (S::n + columns - 1) / columns; ++group) {
      const int start = group * columns < S::n - columns ? group * columns : S::n - columns;
      int column = tile.column + start + lane;
#pragma unroll 8
      for (int r = 0; r < kWarpRows; ++r) {
        bool inside = row + r < p.m && column < p.n;
        uint32_t raw = inside ? load_raw(data, offset + (row + r) * row_stride + column * column_stride, type) : 0;
        uint32_t address = piece + r * kRowBytes + (((lane / 4) ^ (r & 7)) << 4) + lane % 4 * 4;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(f32_from_raw(raw, type)) : "memory");
      }
      __syncwarp();
#pragma unroll
      for (int i = (group * columns - start) / 8; i < 4; ++i)  // each element once
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float2 pair = load_pair(pair_address(i, h));
          f(start / 2 + i * 4 + h * 2, pair.x);
          f(start / 2 + i * 4 + h * 2 + 1, pair.y);
        }
      __syncwarp();
    }
  }

  // Rounds and stores the accumulators, piece by piece. `columns` of `size` bytes fill one.
  template <int size, bool bf16> __device__ __forceinline__ void store(const float (&d)[S::n / 2]) const {
    constexpr int columns = kRowBytes / size, last = S::n - columns;
#pragma unroll
    for (int i = 0; i < (S::n + columns - 1) / columns; ++i) {
      const int start = i * columns < last ? i * columns : last;  // the last may overlap the one before: the same bits
      if constexpr (size == 4) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            store_pair(pair_address(j, h), d[start / 2 + 4 * j + 2 * h], d[start / 2 + 4 * j + 2 * h + 1]);
      } else {
        stage_halves<bf16>(d + start / 2, piece, lane);
      }
      __syncwarp();
      copy_out<size>(tile.column + start);
      __syncwarp();
    }
  }

  // The piece to its place in out: 16 bytes a lane where it lies whole and aligned inside, else by elements.
  template <int size> __device__ __forceinline__ void copy_out(int column) const {
    constexpr int columns = kRowBytes / size;
    char *to = p.out + (tile.out_offset + row * p.out_stride + column) * size;
    const int64_t stride = p.out_stride * size;
    const bool whole_rows = row >= tile.first_row && row + kWarpRows <= p.m;
    if (p.out_aligned && whole_rows && column >= tile.first_column && column + columns <= p.n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int r = 4 * i + lane / 8;
        *reinterpret_cast<uint4 *>(to + r * stride + lane % 8 * 16) =
            load_16_bytes(piece + r * kRowBytes + ((lane % 8 ^ (r & 7)) << 4));
      }
      return;
    }
#pragma unroll 1
    for (int r = max(0, tile.first_row - row); r < kWarpRows && row + r < p.m; ++r)
#pragma unroll 1
      for (int c = lane; c < columns && column + c < p.n; c += 32) {
        if (column + c < tile.first_column) continue;
        uint32_t address = piece + r * kRowBytes + (((c * size >> 4) ^ (r & 7)) << 4) + c * size % 16;
        if constexpr (size == 4) {
          uint32_t word;
          asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
          reinterpret_cast<uint32_t *>(to + r * stride)[c] = word;
        } else {
          uint16_t word;
          asm volatile("ld.shared.u16 %0, [%1];" : "=h"(word) : "r"(address) : "memory");
          reinterpret_cast<uint16_t *>(to + r * stride)[c] = word;
        }
      }
  }
};

}  // namespace
}  // namespace pydet
