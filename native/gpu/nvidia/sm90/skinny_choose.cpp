// Which kernel of skinny.cu computes a problem, and how it cuts it. The bits do not depend on it.

#include <algorithm>

#include "gpu/gpu.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/skinny_cut.h"
#include "core/backend.h"

namespace pydet {
namespace {

constexpr int kMostM = 2 * kSkinnyWarpgroupRows;
constexpr int kWarpRows = 16;  // of x

bool has_rows(const Matrix &matrix, int64_t count, int64_t stride, int64_t k_stride, int64_t k) {
  bool strides = count == 1 || (stride % 8 == 0 && stride > 0 && stride < int64_t(1) << 38);
  return strides && (k_stride == 1 || k == 1) && reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0;
}

// What TMA can describe: rows along k, 16-byte aligned.
bool takes(const Gemm &g, bool turned) {
  constexpr int64_t kMost = int64_t(1) << 30;
  return g.m <= kMostM && g.k > 0 && g.k <= kMost && g.n <= kMost &&
         has_rows(g.a, g.m, g.a.row_stride, g.a.col_stride, g.k) &&
         (turned ? g.b.row_stride != 1 && has_rows(g.b, g.k, g.b.row_stride, g.b.col_stride, g.n)
                 : has_rows(g.b, g.n, g.b.col_stride, g.b.row_stride, g.k));
}

// The fastest of a sweep of 533 problems in which n is adjacent; rows = 0: a tile of gemm.cu. The gradient of a head's
// input is a sum over a vocabulary: of 1, 32, 64, 96 rows of 3584 columns over 152064 tiles take 288, 287, 293, 324 us on
// an H200, tiles of 64 here 317, 302, 308, 401, cuBLAS 247, 258, 265, 274.
SkinnyPlan choose_turned(const Gemm &g) {
  constexpr int64_t kVocabulary = 65536;
  auto plan = [](int rows) { return SkinnyPlan{rows, false, kMostSharedBytes, true}; };
  const int64_t width = divide_up(g.n, gpu_multiprocessors(g.device.id));
  if (width > 24 && width <= 32 && g.k > kVocabulary) return plan(0);
  const bool chunks = g.k_chunk != 0;
  if (g.m > 96) return plan(chunks && width > 32 && width <= 48 ? 96 : 0);
  if (g.m > kSkinnyWarpgroupRows) {
    if (width > 32 && width <= 48) return plan(96);
    return plan(!chunks || width > 64 ? 0 : width <= 8 ? 16 : width <= 16 ? 32 : width <= 24 ? 0 : 64);
  }
  if (width <= 8) return plan(16);
  if (width <= 16) return plan(32);
  if (width <= 24) return plan(g.m <= 16 ? 48 : g.m <= 32 || g.k <= 1024 || chunks ? 32 : 0);
  if (width <= 32) return plan(g.m <= 32 ? 32 : 64);
  if (width <= 48) return plan(width <= 40 || g.m > 32 ? 96 : 48);
  if (width <= 64) return plan(64);
  return plan(width > 96 && width <= 128 ? 64 : 32);
}

// From 65 rows on: whether a tile of gemm.cu whose clusters share loads fills one wave, where it wins by 3 to 12 %. By 600
// problems on an H100.
bool tiles_fill_a_wave(int64_t m, int64_t width, int64_t k) {
  if (width > 32 && width <= 35) return true;                                      // 64x80
  if (m > 96) return (width > 64 && width <= 78) || (width > 96 && width <= 112);  // 128x80, 128x128
  if (width <= 8) return k <= 512;                                                 // 64x32, and 64x48 from here on
  if (width <= 16) return k > 1024 && k <= 8192;
  return width <= 24 || (width <= 32 && k > 8192);
}

// The fastest of sweeps on an H100, M from 1 to 128, (N, K) from (768, 4096) to (128256, 4096), kernels back to back in
// a graph; no rows where a tile of gemm.cu was faster. `width` is the rows of w for every SM.
//
// Tiles so wide that there is one for every SM, but no wider than it takes to keep many rows of w open at a time. With
// more than 64 rows of x and few of w, two blocks share these: the more SMs read x, the sooner they have it. Half of
// the shared memory, so that the next kernel's blocks settle beside these, wins where kernels are short; elsewhere only
// if the next is the same: behind another one, two blocks of a kernel can come to lie on one SM, none on its neighbour.
SkinnyPlan choose(const Gemm &g) {
  constexpr int kMost = kMostSharedBytes, kHalf = kHalfSharedBytes;
  constexpr bool kSplit = true, kEarly = true;
  constexpr SkinnyPlan kNone = {0, false, kMost, false};
  const int64_t width = divide_up(g.n, gpu_multiprocessors(g.device.id));
  const bool constant = g.weights_constant;
  if (g.m > kSkinnyWarpgroupRows) {
    if (!g.k_chunk && !constant && tiles_fill_a_wave(g.m, width, g.k)) return kNone;
    if (width <= 16) return {g.k_chunk ? (width <= 8 ? 16 : 48) : 32, kSplit, kMost, false};
    if (width <= 24) return {48, kSplit, kMost, false};
    if (width <= 32 && g.k > 8192) return g.m <= 96 ? SkinnyPlan{32, false, kMost, false} : kNone;
    if (width <= 32) return constant ? SkinnyPlan{64, false, kMost, false} : kNone;
    if (width <= 48) return g.m <= 96 ? SkinnyPlan{48, false, kMost, kEarly} : SkinnyPlan{96, kSplit, kMost, false};
    if (width <= 64 && g.k <= 1024) return g.m <= 96 ? SkinnyPlan{64, false, kHalf, false} : kNone;
    if (width <= 64) return constant || g.m <= 80 ? SkinnyPlan{64, false, kMost, false} : kNone;
    if (width <= 128) return {width <= 96 ? 96 : 64, false, kMost, kEarly};
    if (width <= 512) return g.m <= 96 ? SkinnyPlan{48, false, kMost, kEarly} : SkinnyPlan{96, kSplit, kMost, false};
    return g.m <= 80 ? SkinnyPlan{64, false, kMost, kEarly} : kNone;
  }
  if (width <= 8) return {g.k_chunk || g.fast ? 32 : 16, false, kMost, kEarly};
  if (width <= 16) return {32, false, kMost, false};
  if (width <= 24) return {g.k_chunk ? 32 : 48, false, kMost, false};
  if (width <= 32) return {constant && g.m <= 8 && g.k <= 8192 ? 48 : 32, false, kMost, false};
  if (width <= 48) return {48, false, kMost, constant};
  if (width <= 64 && g.k <= 1024) return {64, false, constant && g.m > 32 ? kMost : kHalf, kEarly};
  if (width <= 64 && g.k <= 2048 && g.m <= 32 && !(constant && g.m <= 16)) return {64, false, kMost, kEarly};
  if (width <= 64) return {32, false, g.m <= 16 && g.k <= 2048 ? kHalf : kMost, kEarly};
  if (width <= 96) return {g.m <= 16 ? 32 : 48, false, kMost, kEarly};
  return {width <= 512 ? 32 : 64, false, kMost, kEarly};
}

// Blocks that share the chunks of a tile: as many as wins, which 8 and 4 do if every cluster finds SMs at once (it must
// lie in one GPC, so about 120 SMs have room), 2 only if half of the SMs are left for the next kernel.
int parts_of(const Gemm &g, int rows, int64_t chunks) {
  if (rows > kSkinnyNarrowRows || g.m > kSkinnyWarpgroupRows) return 1;
  constexpr int64_t kMostSumBytes = 32 << 10;  // that the first block receives
  const int64_t tiles = divide_up(g.n, rows), sms = gpu_multiprocessors(g.device.id);
  const int64_t most = tiles * 8 <= sms * 10 / 11 ? 8 : tiles * 4 <= sms * 10 / 11 ? 4 : tiles * 2 <= sms / 2 ? 2 : 1;
  const int64_t part = divide_up(chunks, std::min(most, chunks));
  const bool fits = (chunks - part) * divide_up(g.m, kWarpRows) * kWarpRows * rows * 4 <= kMostSumBytes;
  return fits ? int(divide_up(chunks, part)) : 1;
}

// For tiles as the plan has them. In fast mode, where one could be shared, K is cut in as many chunks as share it.
SkinnyCut cut_of(const Gemm &g, const SkinnyPlan &plan, bool turned) {
  constexpr int64_t kUnit = 256;  // whole stages
  SkinnyCut cut = {plan, g.k_chunk};
  if (g.fast && !g.k_chunk && !turned) {
    const int64_t units = divide_up(g.k, kUnit), parts = parts_of(g, plan.rows, units);
    if (parts > 1) cut.k_chunk = divide_up(units, parts) * kUnit;
  }
  if (cut.k_chunk) cut.plan.parts = parts_of(g, plan.rows, divide_up(g.k, cut.k_chunk));
  return cut;
}

// Whether rows begin between the L2's lines, so that each of their 64 k lies in two of these: then clusters that share
// loads are faster (choose.cpp), 15.7 us for 64x4608x4312 on an H200, 23.9 here.
bool cuts_lines(const Gemm &g) {
  constexpr int64_t kLine = 64;  // elements
  return g.m > 1 && g.a.row_stride % kLine != 0;
}

}  // namespace

// Of rows that are asked for by name and not the choice: what suits most problems.
template <bool turned> Choice skinny_sm90_choose(const Gemm &asked, int rows) {
  const bool apart = asked.batch.dims > 0;
  if (apart && (turned || !side_by_side(asked) || asked.m > kSkinnyWarpgroupRows)) return {};
  const Gemm g = in_one(asked);
  if (!takes(g, turned)) return {};
  SkinnyPlan plan = turned ? choose_turned(g) : choose(g);
  constexpr int kFewM = 32;
  constexpr int64_t kFewN = 2304;
  const bool shares = g.m > kSkinnyWarpgroupRows || (g.m > kFewM && g.n >= kFewN);
  if (!turned && !g.k_chunk && !g.fast && shares && cuts_lines(g)) plan.rows = 0;
  if (rows != kAnyVariant && plan.rows != rows) plan = {rows, false, kMostSharedBytes, true};
  return plan.rows ? Choice(plan.rows, cut_of(g, plan, turned)) : Choice();
}

template Choice skinny_sm90_choose<false>(const Gemm &, int);
template Choice skinny_sm90_choose<true>(const Gemm &, int);

}  // namespace pydet
