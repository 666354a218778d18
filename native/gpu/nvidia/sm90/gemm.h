// What gemm.cu's kernel is told of a problem, and who works it out (plan.cpp, on the host).
#pragma once

#include <cuda.h>

#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/pipe/shape.h"
#include "gpu/nvidia/sm90/tiles.h"

namespace pydet {

constexpr int kSm90MaxBatch = 3;  // dimensions, beside the two of a matrix

// How a bias is added: to columns of a tile, to its rows, or element by element as they are stored.
enum class BiasWay : uint8_t { none, by_column, by_row, any };

// How the last waves are shared out (handover.h): each cluster takes `turns` whole tiles, then its part of the `tiles`
// that are left.
struct Sm90Handover {
  int turns, tiles;  // no tiles: each is one cluster's
  float *sums;       // what each block hands on
  uint32_t *flags;   // whether each of its warps has
};

// Where the part of a cluster begins: in a tile, counted from the first that is shared, before a stage. Nobody makes less
// than kLeastStages of a tile.
struct Sm90Cut {
  int tile, stage;
};
constexpr int kLeastStages = 4;
constexpr int64_t kMostHandedOver = 1 << 20;  // the longest k
PYDET_HD Sm90Cut sm90_cut(int cluster, int clusters, int tiles, int stages) {
  const int at = cluster * tiles * stages / clusters, stage = at % stages;
  if (stage < kLeastStages) return {at / stages, 0};
  if (stages - stage < kLeastStages) return {at / stages + 1, 0};
  return {at / stages, stage};
}

// The part of a problem that the device sees. Strides are in elements.
struct Sm90Problem {
  CUtensorMap a, b;
  int m, n, k, chunk;                        // chunk: k of one chain (contract/numerics.h)
  int cluster_rows, cluster_columns, tiles;  // tiles of a whole cluster in one matrix, and in all
  int band;                                  // cluster rows that are walked together, for the L2
  bool batched, accumulate;
  bool begins;                   // at `from`, which is out's own elements or others in its place
  bool out_aligned;              // its rows begin at multiples of 16 bytes
  bool rows_move, columns_move;  // a tile that passes the last row or column may be moved back to end there
  Type out_type, bias_type;
  char *out;
  const char *bias;
  int64_t out_stride;  // between out's own rows; a swapped tile makes out's transpose
  int64_t bias_row_stride, bias_column_stride;
  int batch_shape[kSm90MaxBatch];
  bool a_moves[kSm90MaxBatch], b_moves[kSm90MaxBatch];  // false: broadcast
  int64_t out_batch_stride[kSm90MaxBatch], bias_batch_stride[kSm90MaxBatch];
  // Of gemm.cu alone. A cluster has 1 << cluster_m_log blocks under each other, 1 << cluster_n_log side by side.
  int cluster_m_log, cluster_n_log;
  const float *from;
  int64_t from_stride;
  bool from_pairs;   // whose elements lie in whole aligned units of 16 bytes
  int row_mask;      // the blocks of a cluster that have the first one's rows
  bool swapped;      // the tile is one of out^T
  bool out_halves;   // out has the operands' type, in whole aligned units of 16 bytes
  bool out_singles;  // out has fp32, in such units
  bool out_fours;    // its elements may be stored four at a time
  BiasWay bias_way;
  uint8_t producers;  // warps that bring stages, of four; no more than a ring has stages
  Sm90Handover handover;
};

// An operand as the copy engine can take it: elements are adjacent along k or along m (n), and the other dimension has
// 16-byte strides.
struct Sm90Operand {
  bool k_adjacent;
  int64_t extent, rows, row_stride;
};
struct Sm90Operands {
  Sm90Operand a, b;
};

// Whether the copy engine can take an operand as it lies, and how. k_stride and stride are those along k and along the
// other dimension, of `extent`.
bool sm90_operand(const Matrix &, int64_t k, int64_t k_stride, int64_t extent, int64_t stride, Sm90Operand *);

// Fills the problem, tensor maps included. The device must be current. Of a swapped tile problem and operands are those of
// out^T = b^T a^T.
pydet_status sm90_plan(const Gemm &, const Sm90Operands &, int tile, Sm90Problem *);

// Of a tile that hands over: whether there is something to share out, and the workspace for it; and the rest of the
// problem, with the flags put down on the stream.
bool sm90_hands_over(const Gemm &, int tile);
pydet_status sm90_begin_handover(const Gemm &, int tile, int clusters, Sm90Problem *);

// How many clusters of so many blocks, one an SM, a device runs at once: each lies in one GPC, so that of 132 SMs 120
// have room in clusters of 4. Read once a device.
int sm90_clusters(int device, int cluster);

// The launches of one group of kernels, which have an object file of their own (tiles.h).
template <int group> struct Sm90Group {
  static pydet_status launch(const Gemm &, const Sm90Operands &, int tile);
};

}  // namespace pydet
