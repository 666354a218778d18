// Quantisation to fp8 (NUMERICS.md, "Quantisation"):  s = max(amax, 1e-10) / largest,  q = round(clamp(x / s)), of every
// type, layout and extent, with given scales and batches; on HIP all of it, on CUDA what quantize_packed.cu does not take.
//
// Tiles: a block of 256 threads holds 128 x 128 of x in registers, whole groups of x and of x^T and one block, so that
// q, both scales and the transposed copy come of one reading. Rows: a block a row, which it holds too, up to kHeld.
// A maximum does not mind the order, so amax may be reduced as suits: as integers, which order as the magnitudes do.

#include "gpu/any/quantize.h"

namespace pydet {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRowsApart = kThreads / kLanes;  // of the rows of one thread
constexpr int kRowsEach = kSide / kRowsApart;
constexpr int kPitch = kSide + 16;  // bytes from row to row of the transposed tile
constexpr int kHeld = 4;            // units of a row that a thread keeps, 8192 elements a block

// The part of a problem that the device sees.
struct Call {
  Quantize p;
  bool x_vectors, out_vectors, transposed_vectors;  // rows begin at multiples of 16 (x), 8 and 16 bytes
  bool inverse;                                     // s is a power of two: x (1 / s) is x / s
  int64_t stripes;                                  // of 128 rows
  int64_t pieces;                                   // of a tensor whose scale is to be found; 0 if it is too small
};

// x[0 .. kUnit), zeros from `count` on.
template <Type type>
__device__ __forceinline__ void load_unit(const char *data, int64_t at, int64_t stride, int count, bool vectors,
                                          float (&v)[kUnit]) {
  using Bits = typename Element<type>::Bits;
  const Bits *x = reinterpret_cast<const Bits *>(data) + at;
  if (vectors && count >= kUnit) {
    Bits raw[kUnit];
#pragma unroll
    for (int i = 0; i < int(kUnit * sizeof(Bits) / 16); ++i)
      reinterpret_cast<uint4 *>(raw)[i] = __ldg(reinterpret_cast<const uint4 *>(x) + i);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] = Element<type>::to_f32(raw[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] = i < count ? Element<type>::to_f32(x[i * stride]) : 0.0f;
  }
}

// `type` is x's. A given scale may be any number, which quotient_of does not take.
template <Type type> __device__ __forceinline__ float quotient(const Call &c, float x, float s, const Divisor &by) {
  if (c.inverse) return x * by.inverse;
  if (type == Type::f32 || c.p.given) return x / s;
  return quotient_of(x, by);
}

template <Type of_x>
__device__ __forceinline__ uint2 round_unit(const Call &c, Type type, const float (&v)[kUnit], float s) {
  const Divisor by = divisor_of(s);
  uint32_t pairs[kUnit / 2];
#pragma unroll
  for (int i = 0; i < kUnit / 2; ++i)
    pairs[i] = round_pair(type, quotient<of_x>(c, v[2 * i], s, by), quotient<of_x>(c, v[2 * i + 1], s, by));
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

__device__ __forceinline__ void store_unit(const Matrix &out, int64_t at, int count, bool vectors, uint2 bytes) {
  char *to = out.data + at;
  if (vectors && count >= kUnit) {
    *reinterpret_cast<uint2 *>(to) = bytes;
    return;
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i)
    if (i < count) to[i * out.col_stride] = char((i < 4 ? bytes.x : bytes.y) >> i % 4 * 8);
}

// The largest value of a block's threads, all of which call it once.
__device__ __forceinline__ uint32_t most_of_block(uint32_t most, uint32_t (&of_warp)[kWarps]) {
  most = most_of_lanes<kWarp>(most);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) most = max(most, of_warp[i]);
  return most;
}

// ---- Tiles: groups and blocks, and whatever has its scale already -------------------------------------------------

template <Type type, bool transposes> __global__ void __launch_bounds__(kThreads, 2)
    quantize_tiles_kernel(const __grid_constant__ Call c) {
  __shared__ uint32_t of_warp[kWarps], column_amax[transposes ? kWarps : 1][kSide];
  __shared__ float column_scale[kSide];
  __shared__ __align__(16) uint8_t transposed[transposes ? kSide * kPitch : 16];
  const Quantize &p = c.p;
  const int64_t group_k = blockIdx.x, group_m = int64_t(blockIdx.y) + int64_t(blockIdx.z) * gridDim.y;
  if (group_m >= c.stripes * p.batch.count) return;
  int64_t at[Quantize::kOperands];
  p.batch.at(group_m / c.stripes, at);
  const int64_t stripe = group_m % c.stripes, first_m = stripe * kSide, first_k = group_k * kSide;
  const int rows = int(min(p.m - first_m, int64_t(kSide))), cols = int(min(p.k - first_k, int64_t(kSide)));
  const int thread = int(threadIdx.x), column = thread % kLanes * kUnit, count = cols - column;
  const float largest = pydet::largest_of(p.out.type);
  const bool block = p.granularity == Granularity::block, group = p.granularity == Granularity::group;

  float v[kRowsEach][kUnit];
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = thread / kLanes + i * kRowsApart;
    load_unit<type>(p.x.data, at[p.kX] + (first_m + row) * p.x.row_stride + (first_k + column) * p.x.col_stride,
                    p.x.col_stride, row < rows ? count : 0, c.x_vectors, v[i]);
  }

  uint32_t amax[kRowsEach];
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) amax[i] = largest_of(v[i]);
  float of_block = 0;
  if (block && !p.given) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) most = max(most, amax[i]);
    of_block = scale_of(most_of_block(most, of_warp), largest, p.power_of_two);
    const int64_t to = at[p.kScale] + stripe * p.scale.row_stride + group_k * p.scale.col_stride;
    if (thread == 0) write_scale(p.scale, to, of_block);
    if (thread == 0 && transposes)
      write_scale(
          p.transposed_scale,
          at[p.kTransposedScale] + group_k * p.transposed_scale.row_stride + stripe * p.transposed_scale.col_stride,
          of_block);
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = thread / kLanes + i * kRowsApart;
    const int64_t scale_row = p.granularity == Granularity::tensor ? 0 : block ? stripe : first_m + row;
    const int64_t scale_at =
        at[p.kScale] + scale_row * p.scale.row_stride + (group || block ? group_k * p.scale.col_stride : 0);
    float s = of_block;
    if (p.given) {
      s = row < rows ? read_scale(p.scale, scale_at) : 1.0f;
    } else if (group) {
      s = scale_of(most_of_lanes<kLanes>(amax[i]), largest, p.power_of_two);
      if (thread % kLanes == 0 && row < rows) write_scale(p.scale, scale_at, s);
    }
    if (row < rows && count > 0)
      store_unit(p.out, at[p.kOut] + (first_m + row) * p.out.row_stride + (first_k + column) * p.out.col_stride, count,
                 c.out_vectors, round_unit<type>(c, p.out.type, v[i], s));
  }

  if constexpr (transposes) {
    if (group) {
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) most = max(most, bits_of(v[i][j]) & 0x7FFFFFFFu);
        most = max(most, from_lane_across(most, kLanes));
        if (thread % kWarp < kLanes) column_amax[thread / kWarp][column + j] = most;
      }
      __syncthreads();
      if (thread < kSide) {
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) most = max(most, column_amax[i][thread]);
        column_scale[thread] = scale_of(most, largest, p.power_of_two);
        if (thread < cols)
          write_scale(p.transposed_scale,
                      at[p.kTransposedScale] + (first_k + thread) * p.transposed_scale.row_stride +
                          stripe * p.transposed_scale.col_stride,
                      column_scale[thread]);
      }
      __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      const float s = group ? column_scale[column + j] : of_block;
      const Divisor by = divisor_of(s);
#pragma unroll
      for (int i = 0; i < kRowsEach; i += 2) {
        const uint32_t pair =
            round_pair(p.out.type, quotient<type>(c, v[i][j], s, by), quotient<type>(c, v[i + 1][j], s, by));
        uint8_t *to = transposed + (column + j) * kPitch + thread / kLanes + i * kRowsApart;
        to[0] = uint8_t(pair), to[kRowsApart] = uint8_t(pair >> 8);
      }
    }
    __syncthreads();
    const Matrix &out = p.transposed;
#pragma unroll
    for (int i = 0; i < kSide * kSide / 16 / kThreads; ++i) {
      const int row = thread / 8 + i * (kThreads / 8), from = thread % 8 * 16;  // of x^T, within the tile
      if (row >= cols || from >= rows) continue;
      const uint8_t *bytes = transposed + row * kPitch + from;
      char *to = out.data + at[p.kTransposed] + (first_k + row) * out.row_stride + (first_m + from) * out.col_stride;
      if (c.transposed_vectors && from + 16 <= rows) {
        *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(bytes);
      } else {
#pragma unroll 1
        for (int j = 0; j < 16 && from + j < rows; ++j) to[j * out.col_stride] = char(bytes[j]);
      }
    }
  }
}

// ---- Rows --------------------------------------------------------------------------------------------------------

template <Type type> __global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const __grid_constant__ Call c) {
  __shared__ uint32_t of_warp[kWarps];
  const Quantize &p = c.p;
  const int64_t index = block_number(), row = index % p.m;
  if (index >= p.m * p.batch.count) return;
  int64_t at[Quantize::kOperands];
  p.batch.at(index / p.m, at);
  const int64_t x_at = at[p.kX] + row * p.x.row_stride, out_at = at[p.kOut] + row * p.out.row_stride;
  auto load = [&](int64_t k, float(&v)[kUnit]) {
    load_unit<type>(p.x.data, x_at + k * p.x.col_stride, p.x.col_stride,
                    int(max(int64_t(0), min(p.k - k, int64_t(kUnit)))), c.x_vectors, v);
  };
  float held[kHeld][kUnit];
  uint32_t amax = 0;
  const int64_t first = int64_t(threadIdx.x) * kUnit, step = kThreads * kUnit;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    load(first + i * step, held[i]);
    amax = max(amax, largest_of(held[i]));
  }
  for (int64_t k = first + kHeld * step; k < p.k; k += step) {
    float v[kUnit];
    load(k, v);
    amax = max(amax, largest_of(v));
  }
  const float s = scale_of(most_of_block(amax, of_warp), pydet::largest_of(p.out.type), p.power_of_two);
  if (threadIdx.x == 0) write_scale(p.scale, at[p.kScale] + row * p.scale.row_stride, s);
  auto store = [&](int64_t k, const float(&v)[kUnit]) {
    if (k < p.k)
      store_unit(p.out, out_at + k * p.out.col_stride, int(min(p.k - k, int64_t(kUnit))), c.out_vectors,
                 round_unit<type>(c, p.out.type, v, s));
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) store(first + i * step, held[i]);
  for (int64_t k = first + kHeld * step; k < p.k; k += step) {
    float v[kUnit];
    load(k, v);
    store(k, v);
  }
}

// ---- Tensors: the scale of one, which the tiles then take as given ------------------------------------------------

// A piece: 128 x 128 of x, and at the far ends what is left besides. So it has four elements or more where a matrix has,
// and the bits of its largest magnitude fit into the first four of q, which nothing else needs before q is written.
constexpr int kKept = 4;

struct Piece {
  int64_t at[Quantize::kOperands], m, k;
  int rows, cols;
};

__device__ __forceinline__ Piece piece_at(const Quantize &p, int64_t index) {
  const int64_t across = max(p.k / kSide, int64_t(1)), down = max(p.m / kSide, int64_t(1));
  Piece piece;
  p.batch.at(index / across / down, piece.at);
  piece.k = index % across * kSide, piece.m = index / across % down * kSide;
  piece.cols = int(index % across == across - 1 ? p.k - piece.k : kSide);
  piece.rows = int(index / across % down == down - 1 ? p.m - piece.m : kSide);
  return piece;
}
__device__ __forceinline__ char *byte_kept(const Quantize &p, const Piece &piece, int i) {
  return p.out.data + piece.at[p.kOut] + (piece.m + i / piece.cols) * p.out.row_stride +
         (piece.k + i % piece.cols) * p.out.col_stride;
}

template <Type type> __global__ void __launch_bounds__(kThreads)
    quantize_pieces_kernel(const __grid_constant__ Call c) {
  __shared__ uint32_t of_warp[kWarps];
  const Quantize &p = c.p;
  const int64_t index = block_number();
  if (index >= c.pieces) return;
  const Piece piece = piece_at(p, index);
  const int thread = int(threadIdx.x);
  uint32_t amax = 0;
  for (int column = thread % kLanes * kUnit; column < piece.cols; column += kSide) {
#pragma unroll 4
    for (int row = thread / kLanes; row < piece.rows; row += kRowsApart) {
      float v[kUnit];
      load_unit<type>(p.x.data, piece.at[p.kX] + (piece.m + row) * p.x.row_stride + (piece.k + column) * p.x.col_stride,
                      p.x.col_stride, piece.cols - column, c.x_vectors, v);
      amax = max(amax, largest_of(v));
    }
  }
  amax = most_of_block(amax, of_warp);
  if (thread < kKept) *byte_kept(p, piece, thread) = char(amax >> thread * 8);
}

// One block, for what the pieces keep; where there are none, matrices are so small that it reads x.
template <Type type> __global__ void __launch_bounds__(kThreads)
    quantize_tensor_scale_kernel(const __grid_constant__ Call c) {
  __shared__ uint32_t of_warp[kWarps];
  const Quantize &p = c.p;
  uint32_t amax = 0;
  for (int64_t i = threadIdx.x; i < c.pieces; i += kThreads) {
    const Piece piece = piece_at(p, i);
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kKept; ++j) bits |= uint32_t(uint8_t(*byte_kept(p, piece, j))) << j * 8;
    amax = max(amax, bits);
  }
  const int64_t of_matrix = c.pieces || !p.batch.count ? 0 : p.m * p.k;
  for (int64_t i = threadIdx.x; i < of_matrix * p.batch.count; i += kThreads) {
    int64_t at[Quantize::kOperands];
    p.batch.at(i / of_matrix, at);
    const int64_t row = i % of_matrix / p.k, column = i % of_matrix % p.k;
    float v[kUnit];
    load_unit<type>(p.x.data, at[p.kX] + row * p.x.row_stride + column * p.x.col_stride, p.x.col_stride, 1, false, v);
    amax = max(amax, largest_of(v));
  }
  amax = most_of_block(amax, of_warp);
  if (threadIdx.x == 0) write_scale(p.scale, 0, scale_of(amax, pydet::largest_of(p.out.type), p.power_of_two));
}

// ---- Host --------------------------------------------------------------------------------------------------------

Call call_of(const Quantize &p) {
  Call call = {p, vectors(p, p.x, p.kX, 16), vectors(p, p.out, p.kOut, 8), false, false, (p.m + kSide - 1) / kSide, 0};
  if (p.transposed.data) call.transposed_vectors = vectors(p, p.transposed, p.kTransposed, 16);
  call.inverse = p.given ? p.scale.type == Type::e8m0 : p.power_of_two;
  return call;
}

int64_t at_least_one(int64_t count) { return count > 1 ? count : 1; }

template <Type type> void (*tiles_kernel(bool transposes))(Call) {
  return transposes ? quantize_tiles_kernel<type, true> : quantize_tiles_kernel<type, false>;
}

}  // namespace

pydet_status quantize_tiled(const Quantize &p) {
  const char *name = "quantize_tiles";
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  Call call = call_of(p);
  constexpr int64_t kMostBlocks = 65535;
  const int64_t groups = (p.k + kSide - 1) / kSide, stripes = call.stripes * p.batch.count;
  const int64_t layers = (stripes + kMostBlocks - 1) / kMostBlocks;
  if (groups > most_blocks(kThreads) || layers > kMostBlocks)
    return fail(PYDET_UNSUPPORTED, "quantize: x has too many elements for a GPU");
  Launch shape = {name, gpu_stream(p.stream),
                  dim3(unsigned(groups), unsigned(layers > 1 ? kMostBlocks : stripes), unsigned(layers)),
                  dim3(kThreads)};
  const bool found = p.granularity == Granularity::tensor && !p.given, empty = !p.batch.count || !p.m || !p.k;
  if (found && !empty && (p.m >= kKept || p.k >= kKept || p.m * p.k >= kKept))
    call.pieces = p.batch.count * at_least_one(p.k / kSide) * at_least_one(p.m / kSide);
  if (call.pieces > most_blocks(kThreads))
    return fail(PYDET_UNSUPPORTED, "quantize: x has too many elements for a GPU");
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    constexpr Type of_x = decltype(type)::value;
    const auto tiles = tiles_kernel<of_x>(p.transposed.data != nullptr);
    if (!found) return launch(shape, tiles, call);
    for (auto kernel : {quantize_pieces_kernel<of_x>, quantize_tensor_scale_kernel<of_x>, tiles})
      if (const pydet_status ready = load(name, kernel); ready != PYDET_OK) return ready;
    pydet_status done = PYDET_OK;
    const Launch of_pieces = {name, shape.stream, grid_of(call.pieces, kThreads), dim3(kThreads)};
    if (call.pieces) done = launch(of_pieces, quantize_pieces_kernel<of_x>, call);
    const Launch of_scale = {name, shape.stream, dim3(1), dim3(kThreads)};
    if (done == PYDET_OK) done = launch(of_scale, quantize_tensor_scale_kernel<of_x>, call);
    if (empty || done != PYDET_OK) return done;
    Quantize given = p;
    given.given = true;
    return launch(shape, tiles, call_of(given));
  });
}

bool quantize_rows_takes(const Quantize &p) {
  return p.batch.count <= 0x7FFFFFFF / p.m;  // blocks
}
pydet_status quantize_by_rows(const Quantize &p) {
  const char *name = "quantize_rows";
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  const Call call = call_of(p);
  Launch shape = {name, gpu_stream(p.stream), grid_of(p.m * p.batch.count, kThreads), dim3(kThreads)};
  return with_type<kUnscaledTypes>(
      p.x.type, [&](auto type) { return launch(shape, quantize_rows_kernel<decltype(type)::value>, call); });
}

}  // namespace pydet
