// How groups of tokens are laid out for grouped.cu: which operands its copy engine can read, the tensor maps, and which
// tile is taken.

#include <algorithm>

#include "gpu/nvidia/sm90/groups.h"
#include "gpu/nvidia/tensor_map.h"

namespace pydet {
namespace {

constexpr int kUnit = 8;               // 16 bytes of an operand
constexpr int64_t kAnyStride = kUnit;  // where there is only one of something
constexpr int64_t kMost = int64_t(1) << 30;

bool aligned_stride(int64_t stride, int64_t extent) {
  return extent == 1 || (stride % kUnit == 0 && stride > 0 && stride < int64_t(1) << 38);
}

// Neighbours along the one side, multiples of 16 bytes along the other.
bool adjacent(int64_t unit_stride, int64_t extent, int64_t stride, int64_t rows) {
  return (extent == 1 || unit_stride == 1) && aligned_stride(stride, rows);
}

bool aligned(const Matrix &matrix) { return reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0; }

int64_t stride_of(int64_t stride, int64_t count) { return count == 1 ? kAnyStride : stride; }

bool b_k_adjacent_of(const GroupedGemm &g) { return adjacent(g.b.row_stride, g.k, g.b.col_stride, g.n); }

// Tokens must not be neighbours in memory: a box that begins between two units faults.
bool takes(const GroupedGemm &g) {
  const int64_t kept = g.depth ? g.m : g.k;
  if (g.tokens < 1 || kept < 1 || g.n > kMost || kept > kMost || g.tokens > kMost) return false;
  if (g.groups > kMostLaunches * kGroupedMostGroups || !aligned(g.a) || !aligned(g.b)) return false;
  if ((g.depth ? g.groups * divide_up(g.m, 64) : divide_up(g.tokens, 64) + g.groups) * divide_up(g.n, 64) > kMost)
    return false;
  if (g.depth)
    return adjacent(g.a.row_stride, g.m, g.a.col_stride, g.tokens) &&
           adjacent(g.b.col_stride, g.n, g.b.row_stride, g.tokens);
  return adjacent(g.a.col_stride, g.k, g.a.row_stride, g.tokens) && aligned_stride(g.b_stride, g.groups) &&
         (b_k_adjacent_of(g) || adjacent(g.b.col_stride, g.n, g.b.row_stride, g.k));
}

// Tiles of 256 columns draw less from the L2. Where groups are small, two of them side by side, those of 128 win if
// they fit N better, or if there are too few of the others for every cluster.
int fastest_tile(const GroupedGemm &g) {
  constexpr int kWide = 0, kNarrow = 1;
  static_assert(kGroupedTiles[kWide].n == 256 && kGroupedTiles[kNarrow].n == 128 && kGroupedTiles[kNarrow].chunks,
                "as they are named here");
  if (g.k_chunk) return kNarrow;
  if (g.depth || g.tokens > 128 * g.groups) return kWide;
  const int64_t wide = divide_up(g.n, 512), narrow = divide_up(g.n, 256), clusters = sm90_clusters(g.device.id, 2);
  const bool idle = wide * std::min(g.groups, g.tokens) < clusters;
  return idle || 256 * narrow * 14 <= 512 * wide * 13 ? kNarrow : kWide;
}

}  // namespace

// The launch receives whether b's neighbours are along k.
Choice grouped_sm90_choose(const GroupedGemm &g, int tile) {
  if (!takes(g)) return {};
  return Choice(tile == kAnyVariant ? fastest_tile(g) : tile, b_k_adjacent_of(g));
}

pydet_status grouped_plan(const GroupedGemm &g, bool b_k_adjacent, const char *kernel, const GroupedBoxes &boxes,
                          GroupedProblem *problem) {
  GroupedProblem &p = *problem;
  EncodeTensorMap encode = nullptr;
  if (pydet_status status = find_encoder(kernel, &encode)) return status;
  constexpr int kBox = 64;  // elements of 128 bytes
  MapShape a = {g.a.data, g.a.type, g.k, g.tokens, stride_of(g.a.row_stride, g.tokens), kBox, boxes.a, 2, {}, {}};
  if (g.depth) a.extent = g.m, a.row_stride = stride_of(g.a.col_stride, g.tokens), a.box_rows = kBox;
  MapShape b = {g.b.data, g.b.type, g.n, g.k,       stride_of(g.b.row_stride, g.k),
                kBox,     boxes.b,  3,   {1, 1, 1}, {kAnyStride, kAnyStride, kAnyStride}};
  if (!g.depth) {
    b.batch_shape[0] = g.groups, b.batch_stride[0] = stride_of(g.b_stride, g.groups);
    if (b_k_adjacent) b.extent = g.k, b.rows = g.n, b.row_stride = stride_of(g.b.col_stride, g.n);
  }
  if (pydet_status status = make_map(kernel, encode, a, &p.a)) return status;
  if (pydet_status status = make_map(kernel, encode, b, &p.b)) return status;
  const int64_t unit = 16 / size_of(g.out.type);
  p.m = int(g.m);
  p.n = int(g.n);
  p.k = int(g.k);
  p.tokens = int(g.tokens);
  p.chunk = int(std::min(g.k_chunk, kMost));
  p.start = g.start;
  p.end = g.end;
  p.accumulate = g.accumulate;
  p.out_aligned = reinterpret_cast<uintptr_t>(g.out.data) % 16 == 0 && (g.m == 1 || g.out.row_stride % unit == 0) &&
                  (!g.depth || g.groups == 1 || g.out_stride % unit == 0);
  p.out_type = g.out.type;
  // The copy engine stores 16 bytes where a row ends inside of them.
  p.out_mapped = g.depth && g.out.type != Type::f32 && g.n % kUnit == 0 && aligned(g.out) &&
                 aligned_stride(g.out.row_stride, g.m) && aligned_stride(g.out_stride, g.groups);
  if (p.out_mapped) {
    const MapShape out = {g.out.data,
                          g.out.type,
                          g.n,
                          g.m,
                          stride_of(g.out.row_stride, g.m),
                          kBox,
                          kBox,
                          3,
                          {g.groups, 1, 1},
                          {stride_of(g.out_stride, g.groups), kAnyStride, kAnyStride}};
    if (pydet_status status = make_map(kernel, encode, out, &p.out_map)) return status;
  }
  p.bias_type = g.bias.type;
  p.out = g.out.data;
  p.bias = g.bias.data;
  p.out_row_stride = g.out.row_stride;
  p.out_stride = g.out_stride;
  p.bias_stride = g.bias_stride;
  p.bias_column_stride = g.bias.col_stride;
  return PYDET_OK;
}

}  // namespace pydet
