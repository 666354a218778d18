// Quantisation to fp8 (NUMERICS.md, "Quantisation"):  s = max(amax, 1e-10) / largest,  q = round(clamp(x / s)).
//
// In tiles of 128 x 128, row after row, in a pass for the amax and one for q: a tile holds whole groups of both x and
// x^T, and one block. Rows and tensors find their amax beforehand; a maximum does not mind the order.
#include "cpu/fp8_rows.h"
#include "cpu/parallel.h"
#include "cpu/scaled_kernels.h"

namespace pydet {
namespace {

struct Tile {
  int64_t at[Quantize::kOperands];  // elements from data to the tile's batch
  int64_t m, k;                     // its first row and column
  int rows, cols;
};

void unpack(const Quantize &p, const Tile &tile, int row, float (&values)[kSide]) {
  dispatch(p.x.type, [&](auto number) {
    using T = decltype(number);
    auto *x = (const typename T::Stored *)p.x.data + tile.at[p.kX] + (tile.m + row) * p.x.row_stride +
              tile.k * p.x.col_stride;
    if (p.x.col_stride == 1)
      for (int j = 0; j < tile.cols; j += kWidth) store(values + j, T::load(x + j, tile.cols - j));
    else
      for (int j = 0; j < tile.cols; ++j) values[j] = T::get(x + j * p.x.col_stride);
  });
}

// amax of the rows and of the columns of a tile.
struct Largest {
  uint32_t row[kSide], column[kSide];
};
void find_largest(const Quantize &p, const Tile &tile, Largest &amax) {
  memset(amax.column, 0, sizeof amax.column);
  float values[kSide];
  for (int r = 0; r < tile.rows; ++r) {
    unpack(p, tile, r, values);
    uint32_t most = 0;
    for (int j = 0; j < tile.cols; ++j) {
      uint32_t here = magnitude(values[j]);
      most = larger(most, here);
      amax.column[j] = larger(amax.column[j], here);
    }
    amax.row[r] = most;
  }
}

// One tile and the scales that are its own; `scales` holds those of its rows where they are not.
void quantize_tile(const Quantize &p, const Tile &tile, float *scales) {
  const bool block = p.granularity == Granularity::block, group = p.granularity == Granularity::group;
  const float largest = largest_of(p.out.type);
  const int64_t group_m = tile.m / kSide, group_k = tile.k / kSide;
  Largest amax;
  if ((group || block) && !p.given) find_largest(p, tile, amax);

  float of_block = 0;
  if (block) {
    const int64_t at = tile.at[p.kScale] + group_m * p.scale.row_stride + group_k * p.scale.col_stride;
    if (p.given) {
      of_block = read_scale(p.scale, at);
    } else {
      uint32_t most = 0;
      for (int r = 0; r < tile.rows; ++r) most = larger(most, amax.row[r]);
      write_scale(p.scale, at, of_block = scale_of(most, largest, p.power_of_two));
    }
  }
  float by_column[kSide];  // the scales of x^T
  if (p.transposed.data) {
    const Matrix &scale = p.transposed_scale;
    const int64_t at = tile.at[p.kTransposedScale] + group_m * scale.col_stride;
    if (block) write_scale(scale, at + group_k * scale.row_stride, of_block);
    for (int j = 0; j < tile.cols; ++j) {
      by_column[j] = block ? of_block : scale_of(amax.column[j], largest, p.power_of_two);
      if (group) write_scale(scale, at + (tile.k + j) * scale.row_stride, by_column[j]);
    }
  }
  for (int r = 0; r < tile.rows; ++r) {
    float values[kSide];
    unpack(p, tile, r, values);
    const int64_t at = tile.at[p.kScale] + (tile.m + r) * p.scale.row_stride + group_k * p.scale.col_stride;
    if (block) scales[r] = of_block;
    else if (group && p.given) scales[r] = read_scale(p.scale, at);
    else if (group) write_scale(p.scale, at, scales[r] = scale_of(amax.row[r], largest, p.power_of_two));
    uint8_t *out =
        (uint8_t *)p.out.data + tile.at[p.kOut] + (tile.m + r) * p.out.row_stride + tile.k * p.out.col_stride;
    round_row(p.out.type, values, tile.cols, nullptr, scales[r], out, p.out.col_stride);
    if (!p.transposed.data) continue;
    uint8_t *to = (uint8_t *)p.transposed.data + tile.at[p.kTransposed] + tile.k * p.transposed.row_stride +
                  (tile.m + r) * p.transposed.col_stride;
    round_row(p.out.type, values, tile.cols, by_column, 0, to, p.transposed.row_stride);
  }
}

int64_t sides(int64_t extent) { return divide_up(extent, kSide); }

Tile tile_at(const Quantize &p, int64_t batch, int64_t m, int64_t k) {
  Tile tile;
  p.batch.at(batch, tile.at);
  tile.m = m * kSide, tile.k = k * kSide;
  tile.rows = int(p.m - tile.m < kSide ? p.m - tile.m : kSide);
  tile.cols = int(p.k - tile.k < kSide ? p.k - tile.k : kSide);
  return tile;
}

void raise(uint32_t *amax, uint32_t to) {
  uint32_t seen = __atomic_load_n(amax, __ATOMIC_RELAXED);
  while (to > seen && !__atomic_compare_exchange_n(amax, &seen, to, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

void largest_of_rows(const Quantize &p, int64_t batch, int64_t m, uint32_t (&rows)[kSide]) {
  for (int64_t k = 0; k < sides(p.k); ++k) {
    const Tile tile = tile_at(p, batch, m, k);
    Largest amax;
    find_largest(p, tile, amax);
    for (int r = 0; r < tile.rows; ++r) rows[r] = larger(rows[r], amax.row[r]);
  }
}

void compute(const Quantize &p, Scratch &scratch) {
  const int64_t stripes = sides(p.m), tiles = sides(p.k);
  constexpr double kWorthAThread = 1 << 15;  // elements
  const int64_t threads = threads_for(double(p.batch.count) * double(p.m) * double(p.k), kWorthAThread);
  const float largest = largest_of(p.out.type);

  float of_tensor = 0;
  if (p.granularity == Granularity::tensor) {
    if (!p.given) {
      uint32_t whole = 0;
      parallel(p.batch.count * stripes, threads, scratch, [&](int64_t i, Scratch &) {
        uint32_t amax[kSide] = {}, most = 0;
        largest_of_rows(p, i / stripes, i % stripes, amax);
        for (uint32_t of_row : amax) most = larger(most, of_row);
        raise(&whole, most);
      });
      parallel(1, 1, scratch, [&](int64_t, Scratch &) {  // rounds as tasks do, whatever the caller has set
        write_scale(p.scale, 0, scale_of(whole, largest, p.power_of_two));
      });
    }
    of_tensor = read_scale(p.scale, 0);
  }

  if (p.granularity == Granularity::row) {
    parallel(p.batch.count * stripes, threads, scratch, [&](int64_t i, Scratch &) {
      const int64_t batch = i / stripes, m = i % stripes;
      uint32_t amax[kSide] = {};
      if (!p.given) largest_of_rows(p, batch, m, amax);
      Tile tile = tile_at(p, batch, m, 0);
      float scales[kSide];
      for (int r = 0; r < tile.rows; ++r) {
        int64_t at = tile.at[p.kScale] + (tile.m + r) * p.scale.row_stride;
        if (!p.given) write_scale(p.scale, at, scale_of(amax[r], largest, p.power_of_two));
        scales[r] = read_scale(p.scale, at);
      }
      for (int64_t k = 0; k < tiles; ++k) quantize_tile(p, tile_at(p, batch, m, k), scales);
    });
    return;
  }
  parallel(p.batch.count * stripes * tiles, threads, scratch, [&](int64_t i, Scratch &) {
    float scales[kSide];
    for (float &s : scales) s = of_tensor;
    quantize_tile(p, tile_at(p, i / tiles / stripes, i / tiles % stripes, i % tiles), scales);
  });
}

}  // namespace

template <> pydet_status quantize<Isa>(const Quantize &p) {
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) { compute(p, scratch); });  // for the threads alone
  return PYDET_OK;
}

}  // namespace pydet
