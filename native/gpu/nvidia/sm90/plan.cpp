// How a GEMM is laid out for gemm.cu: which operands its copy engine can read, and the tensor maps.

#include <algorithm>
#include <cstring>
#include <utility>

#include "gpu/nvidia/sm90/choose.h"
#include "gpu/nvidia/sm90/gemm.h"
#include "gpu/nvidia/tensor_map.h"
#include "core/backend.h"

namespace pydet {
namespace {

constexpr int kUnit = 8;  // 16 bytes of an operand

bool aligned_stride(int64_t stride, int64_t extent) {
  return extent == 1 || (stride % kUnit == 0 && stride > 0 && stride < int64_t(1) << 38);
}

bool aligned_batch(const Batch &batch, const int64_t (&strides)[kMaxBatchDims]) {
  for (int i = 0; i < batch.dims; ++i)
    if (strides[i] && !aligned_stride(strides[i], batch.shape[i])) return false;
  return true;
}

bool takes(const Gemm &g, Sm90Operands *operands) {
  constexpr int64_t kMost = int64_t(1) << 30;
  if (g.m > kMost || g.n > kMost || g.k > kMost || g.batch.dims > kSm90MaxBatch) return false;
  if (divide_up(g.m, 64) * divide_up(g.n, 64) > kMost / g.batch.count) return false;
  return sm90_operand(g.a, g.k, g.a.col_stride, g.m, g.a.row_stride, &operands->a) &&
         sm90_operand(g.b, g.k, g.b.row_stride, g.n, g.b.col_stride, &operands->b) &&
         aligned_batch(g.batch, g.batch.a) && aligned_batch(g.batch, g.batch.b);
}

int log2_of(int power) {
  int log = 0;
  while (1 << log < power) ++log;
  return log;
}

MapShape map_of(const Gemm &g, const Matrix &matrix, const Sm90Operand &operand,
                const int64_t (&batch_strides)[kMaxBatchDims], int extent, int shares) {
  constexpr int64_t kAnyStride = kUnit;  // where there is only one of something
  // No more rows than there are, where a block brings all of them: zeros past the last would take longer.
  if (operand.k_adjacent && shares == 1) extent = int(std::min<int64_t>(extent, operand.rows));
  MapShape map = {matrix.data,
                  matrix.type,
                  operand.extent,
                  operand.rows,
                  operand.rows == 1 ? kAnyStride : operand.row_stride,
                  64,
                  operand.k_adjacent ? extent / shares : kBlockK / shares,
                  g.batch.count > 1 ? 5 : 2,
                  {1, 1, 1},
                  {kAnyStride, kAnyStride, kAnyStride}};
  for (int i = 0; i < g.batch.dims; ++i)
    if (batch_strides[i]) map.batch_shape[i] = g.batch.shape[i], map.batch_stride[i] = batch_strides[i];
  return map;
}

// A layer's shape comes again and again, so a thread keeps its last answer.
int fastest_tile(const Gemm &g, const Sm90Operands &operands) {
  struct Question {
    int64_t m, n, k, k_chunk, batches, strides[4], device, workspace_size;
  };
  thread_local Question last = {};
  thread_local int answer = -1;
  const Question question = {g.m,           g.n,
                             g.k,           g.k_chunk,
                             g.batch.count, {g.a.row_stride, g.a.col_stride, g.b.row_stride, g.b.col_stride},
                             g.device.id,   int64_t(g.workspace_size)};
  if (answer < 0 || memcmp(&question, &last, sizeof last)) last = question, answer = sm90_fastest_tile(g, operands);
  return answer;
}

template <int... groups>
pydet_status launch_group(const Gemm &g, const Sm90Operands &operands, int tile, int group,
                          std::integer_sequence<int, groups...>) {
  pydet_status status = PYDET_UNSUPPORTED;
  ((groups == group ? void(status = Sm90Group<groups>::launch(g, operands, tile)) : void()), ...);
  return status;
}

}  // namespace

bool sm90_operand(const Matrix &matrix, int64_t k, int64_t k_stride, int64_t extent, int64_t stride,
                  Sm90Operand *operand) {
  if (k == 0) return *operand = {true, 0, 0, 0}, true;
  if (reinterpret_cast<uintptr_t>(matrix.data) % 16) return false;
  if ((k == 1 || k_stride == 1) && aligned_stride(stride, extent)) return *operand = {true, k, extent, stride}, true;
  if ((extent == 1 || stride == 1) && aligned_stride(k_stride, k)) return *operand = {false, extent, k, k_stride}, true;
  return false;
}

Choice gemm_sm90_choose(const Gemm &g, int tile) {
  Sm90Operands operands;
  if (!takes(g, &operands)) return {};
  if (tile == kAnyVariant) tile = fastest_tile(g, operands);
  const Sm90Tile &t = kSm90Tiles[tile];
  if (t.hands_over && !sm90_hands_over(g, tile)) return {};
  const bool a_k_adjacent = operands.a.k_adjacent, b_k_adjacent = operands.b.k_adjacent;
  const uint32_t layout = t.swapped ? layout_bit(b_k_adjacent, a_k_adjacent) : layout_bit(a_k_adjacent, b_k_adjacent);
  return sm90_layouts(tile, g.k_chunk != 0) & layout ? Choice(tile, operands) : Choice();
}

pydet_status gemm_sm90(const Gemm &g, const Choice &choice) {
  const int group = sm90_group(choice.variant, g.a.type);
  constexpr auto groups = std::make_integer_sequence<int, 2 * kSm90SizeGroups>();
  const auto operands = choice.cut<Sm90Operands>();
  if (!kSm90Tiles[choice.variant].swapped) return launch_group(g, operands, choice.variant, group, groups);
  return launch_group(transposed(g), {operands.b, operands.a}, choice.variant, group, groups);
}

pydet_status sm90_plan(const Gemm &g, const Sm90Operands &operands, int tile_index, Sm90Problem *problem) {
  const Sm90Tile &tile = kSm90Tiles[tile_index];
  const Sm90Operand &a = operands.a, &b = operands.b;
  Sm90Problem &p = *problem;
  EncodeTensorMap encode = nullptr;
  if (pydet_status status = find_encoder(tile.name, &encode)) return status;
  if (g.k > 0) {
    if (pydet_status status = make_map(tile.name, encode, map_of(g, g.a, a, g.batch.a, tile.m, tile.cluster_n), &p.a))
      return status;
    if (pydet_status status = make_map(tile.name, encode, map_of(g, g.b, b, g.batch.b, tile.n, tile.cluster_m), &p.b))
      return status;
  }
  p.out_stride = tile.swapped ? g.out.col_stride : g.out.row_stride;
  const int64_t out_rows = tile.swapped ? g.n : g.m, out_size = size_of(g.out.type);
  // Whether rows of out begin at multiples of so many elements.
  const auto aligned_to = [&](int64_t unit) {
    bool aligned = reinterpret_cast<uintptr_t>(g.out.data) % uintptr_t(unit * out_size) == 0 &&
                   (out_rows == 1 || p.out_stride % unit == 0);
    for (int i = 0; i < g.batch.dims; ++i) aligned &= g.batch.out[i] % unit == 0;
    return aligned;
  };
  p.out_aligned = aligned_to(16 / out_size);
  // Where an operand has its rows or columns adjacent, the copy engine faults on a box that begins between two units; and
  // a tile's part of a row of out is stored from one on.
  p.rows_move = g.m % kUnit == 0 || (a.k_adjacent && !tile.swapped);
  p.columns_move = g.n % kUnit == 0 || (b.k_adjacent && tile.swapped);
  p.m = int(g.m);
  p.n = int(g.n);
  p.k = int(g.k);
  p.chunk = std::max(1, int(Chunk{g.k_chunk}.of_chain(g.k)));
  p.cluster_rows = int(divide_up(g.m, tile.m * tile.cluster_m));
  p.cluster_columns = int(divide_up(g.n, tile.n * tile.cluster_n));
  p.tiles = int(p.cluster_rows * p.cluster_columns * g.batch.count);
  p.band = std::max(1, 2048 / (tile.m * tile.cluster_m));
  p.cluster_m_log = log2_of(tile.cluster_m), p.cluster_n_log = log2_of(tile.cluster_n);
  for (int i = 0; i < tile.cluster_n; ++i) p.row_mask |= 1 << i * tile.cluster_m;
  p.batched = g.batch.count > 1;
  // Where the sums begin at other elements than out's, tiles that overlap store the same twice.
  p.begins = g.accumulate;
  p.accumulate = g.accumulate && !g.from.data;
  const Matrix &from = g.from.data ? g.from : g.out;
  p.from = reinterpret_cast<const float *>(from.data);
  p.from_stride = tile.swapped ? from.col_stride : from.row_stride;
  p.out_type = g.out.type;
  p.out = g.out.data;
  p.bias = g.bias.data;
  p.bias_type = g.bias.type;
  p.bias_row_stride = g.m == 1 ? 0 : g.bias.row_stride;
  p.bias_column_stride = g.bias.col_stride;
  p.bias_way = !g.bias.data                            ? BiasWay::none
               : p.bias_row_stride == 0                ? BiasWay::by_column
               : g.n == 1 || p.bias_column_stride == 0 ? BiasWay::by_row
                                                       : BiasWay::any;
  p.swapped = tile.swapped;
  // One thread fills a stage in about 140 ns, which is longer than the products of a small tile take.
  p.producers = tile.m * tile.n <= 128 * 96 ? 2 : 1;
  const int64_t adjacent = tile.swapped ? g.m : g.n;
  p.out_halves = p.out_aligned && g.out.type == g.a.type && adjacent % kUnit == 0 && p.bias_way != BiasWay::any;
  p.out_fours = aligned_to(4) && adjacent % 4 == 0;
  p.out_singles = p.out_fours && g.out.type == Type::f32 && p.bias_way != BiasWay::any;
  p.from_pairs = g.from.data
                     ? adjacent % 4 == 0 && p.from_stride % 4 == 0 && reinterpret_cast<uintptr_t>(p.from) % 16 == 0
                     : p.out_singles;
  for (int i = 0; i < kSm90MaxBatch; ++i) {
    bool here = i < g.batch.dims;
    p.batch_shape[i] = here ? int(g.batch.shape[i]) : 1;
    p.a_moves[i] = here && g.batch.a[i];
    p.b_moves[i] = here && g.batch.b[i];
    p.out_batch_stride[i] = here ? g.batch.out[i] : 0;
    p.bias_batch_stride[i] = here ? g.batch.bias[i] : 0;
  }
  return PYDET_OK;
}

}  // namespace pydet
