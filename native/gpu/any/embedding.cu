// Rows of a table by their numbers, and the table's gradient (NUMERICS.md, "Embedding"): the CPU's bits.
//
//   out[t] = w[ids[t]],   dw[v] = dw[v] or +0, and then + dout[t] for the tokens t with ids[t] = v, ascending
//
// The gradient is two kernels. The first puts tokens in order by id, those of one id as they come. A block has the ids of
// one part of the table, and looks at all tokens: how many have lower ids says where its own begin. Each of its warps has
// tokens that lie together, and counts its own of each id: so every place is known, whoever writes first. The second adds:
// a team of threads has the place where the tokens of an id begin, and walks them. An id of very many tokens is a chain
// that one multiprocessor brings too slowly: blocks of their own have some columns of it each.

#include <algorithm>

#include "gpu/kernels.h"
#include "gpu/any/softmax_row.h"
#include "ops/embedding/problem.h"

namespace pydet {
namespace {

// ---- Rows by their numbers ---------------------------------------------------------------------------------------

constexpr int kCopyThreads = 256;

// NaNs of the type.
template <class Piece> __device__ __forceinline__ Piece nan_of(Type type) {
  const uint32_t word = type == Type::f32 ? kNanF32 : 0x7FFF7FFFu;
  if constexpr (sizeof(Piece) == 16) return make_uint4(word, word, word, word);
  else return Piece(word);
}

// Pieces of all tokens' rows, counted through.
struct CopyPlan {
  int64_t pieces, all;  // of a row, of all
  bool narrow;          // numbers of 32 bits hold them
};

// A thread takes kAtOnce pieces, all of which are on their way before the first is written. A row of none of the table's
// numbers is NaN.
template <class Piece, int kAtOnce>
__global__ void __launch_bounds__(kCopyThreads)
    embedding_kernel(const __grid_constant__ Embedding p, const __grid_constant__ CopyPlan plan) {
  const int size = size_of(p.w.type);
  for (int64_t block = blockIdx.x; block * kCopyThreads * kAtOnce < plan.all; block += gridDim.x) {
    Piece *to[kAtOnce];
    Piece some[kAtOnce];
    int64_t id[kAtOnce], column[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t i = (block * kAtOnce + k) * kCopyThreads + int(threadIdx.x);
      to[k] = nullptr;
      if (i >= plan.all) continue;
      const int64_t token = plan.narrow ? uint32_t(i) / uint32_t(plan.pieces) : i / plan.pieces;
      column[k] = i - token * plan.pieces;
      id[k] = p.ids.wide ? static_cast<const int64_t *>(p.ids.data)[token]
                         : static_cast<const int32_t *>(p.ids.data)[token];
      to[k] = reinterpret_cast<Piece *>(row_at(p.out, size, p.inner, token)) + column[k];
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      some[k] = nan_of<Piece>(p.w.type);
      if (to[k] && id[k] >= 0 && id[k] < p.w.rows)
        some[k] = reinterpret_cast<const Piece *>(p.w.data + id[k] * p.w.row_stride * size)[column[k]];
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (to[k]) *to[k] = some[k];
  }
}

template <class Piece> pydet_status launch_copy(const Embedding &p) {
  constexpr int kMany = 4;
  constexpr int64_t kMostBlocks = int64_t(1) << 24;  // more are walked in turns
  const int64_t pieces = p.n * size_of(p.w.type) / int64_t(sizeof(Piece)), all = p.rows * pieces;
  const CopyPlan plan = {pieces, all, all < int64_t(1) << 32};
  const bool many = all >= int64_t(kMany) * kMany * kCopyThreads * gpu_multiprocessors(p.device.id);
  const int64_t blocks = divide_up(all, kCopyThreads * (many ? kMany : 1));
  Launch where = {"embedding", static_cast<gpu_stream>(p.stream),
                  dim3(unsigned(blocks < kMostBlocks ? blocks : kMostBlocks)), dim3(kCopyThreads)};
  return launch(where, many ? embedding_kernel<Piece, kMany> : embedding_kernel<Piece, 1>, p, plan);
}

// ---- The order of tokens -----------------------------------------------------------------------------------------

constexpr int kSortThreads = 512, kSortWarps = kSortThreads / kLogicalWarp;
constexpr int kOwnIds = kSortThreads;  // of a block: a thread has one of them
static_assert(kOwnIds % kTableWord == 0 && kTableWord == kLogicalWarp, "a warp has the bits of a word");

// Looks at the tokens of a warp in their order, one a lane: f(token, id), where the id of a token that does not count, or of
// none, is -1.
template <class F> __device__ __forceinline__ void each_token(const EmbeddingBackward &p, const F &f) {
  constexpr int kAtOnce = 4;
  const int64_t steps = (p.rows + kLogicalWarp - 1) / kLogicalWarp, of_warp = (steps + kSortWarps - 1) / kSortWarps;
  const int lane = int(threadIdx.x) % kLogicalWarp;
  const int64_t begin = int(threadIdx.x) / kLogicalWarp * of_warp * kLogicalWarp;
  const int64_t end = begin + of_warp * kLogicalWarp < p.rows ? begin + of_warp * kLogicalWarp : p.rows;
  for (int64_t first = begin; first < end; first += kAtOnce * kLogicalWarp) {
    int64_t id[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t token = first + k * kLogicalWarp + lane;
      id[k] = token < end ? p.id_of(token) : -1;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) f(first + k * kLogicalWarp + lane, id[k]);
  }
}

__global__ void __launch_bounds__(kSortThreads) embedding_sort_kernel(const __grid_constant__ EmbeddingBackward p) {
  __shared__ uint32_t place[kSortWarps][kOwnIds];  // a warp's tokens of each id; then where the next of them goes
  __shared__ uint32_t of_warps[kSortWarps], below;
  const int t = int(threadIdx.x), lane = t % kLogicalWarp, warp = t / kLogicalWarp;
  const int64_t first_id = block_number() * kOwnIds;
  let_next_kernel_start();
  if (first_id >= p.dw.rows) return;
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w) place[w][t] = 0;
  if (t == 0) below = 0;
  __syncthreads();
  uint32_t lower = 0;
  each_token(p, [&](int64_t, int64_t id) {
    if (id < 0) return;
    if (id < first_id) ++lower;
    else if (id < first_id + kOwnIds) atomicAdd(&place[warp][id - first_id], 1u);
  });
  if (lower) atomicAdd(&below, lower);
  __syncthreads();

  uint32_t own = 0;  // of id t
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w) own += place[w][t];
  const uint32_t word = gpu_ballot(own != 0);
  if (lane == 0 && first_id + t < p.dw.rows) p.has_tokens()[(first_id + t) / kTableWord] = word;
  uint32_t up_to = own;  // of the ids up to t: of its warp's, and then of the warps before
#pragma unroll
  for (int apart = 1; apart < kLogicalWarp; apart *= 2) {
    const uint32_t before = from_lane(up_to, lane >= apart ? lane - apart : lane);
    if (lane >= apart) up_to += before;
  }
  if (lane == kLogicalWarp - 1) of_warps[warp] = up_to;
  __syncthreads();
  uint32_t all = 0;
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w) {
    if (w < warp) up_to += of_warps[w];
    all += of_warps[w];
  }
  uint32_t next = below + (up_to - own);
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w) {
    const uint32_t of_warp = place[w][t];
    place[w][t] = next;
    next += of_warp;
  }
  if (t == kSortThreads - 1 && first_id + kOwnIds >= p.dw.rows) *p.count() = next;
  if (all == 0) return;
  __syncthreads();

  each_token(p, [&](int64_t token, int64_t id) {
    const bool mine = id >= first_id && id < first_id + kOwnIds;
    const uint32_t number = mine ? uint32_t(id - first_id) : kOwnIds;
    uint32_t left = gpu_ballot(mine);
    while (left) {  // the tokens of one id after the other
      const int leader = __ffs(int(left)) - 1;
      const bool same = number == from_lane(number, leader);
      const uint32_t who = gpu_ballot(same);
      uint32_t at = 0;
      if (lane == leader) at = atomicAdd(&place[warp][number], uint32_t(__popc(who)));
      at = from_lane(at, leader);
      if (same) p.sorted()[at + __popc(who & ((1u << lane) - 1))] = {uint32_t(id), uint32_t(token)};
      left &= ~who;
    }
  });
}

// ---- Sums --------------------------------------------------------------------------------------------------------

constexpr int kSumThreads = 128;
constexpr int kClearedRows = 8;  // that a team looks at, whether they have to be cleared

// How the work is cut: teams of threads that have some columns of a row together, a part of it.
struct SumPlan {
  int team;
  int64_t parts;
  int64_t adding, blocks;  // of each part: blocks that add, and with those that clear
  int spread;              // blocks before these for ids of very many tokens, in turn for some columns each; 0: none
};

// A vector of a token's row on its way.
template <Type type, bool aligned> struct Loaded {
  Packed<type, kVector> packed;
  __device__ __forceinline__ void load(const char *row, int64_t column, int64_t) {
    packed = load_packed<type, kVector>(row + column * size_of(type));
  }
  __device__ __forceinline__ void add_to(float (&sum)[kVector]) const {
    float x[kVector];
    unpack(packed, x);
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum[e] = sum[e] + x[e];
  }
};
template <Type type> struct Loaded<type, false> {
  float elements[kVector];
  __device__ __forceinline__ void load(const char *row, int64_t column, int64_t n) {
    load_eight(row, type, column, n, false, elements);
  }
  __device__ __forceinline__ void add_to(float (&sum)[kVector]) const {
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum[e] = sum[e] + elements[e];
  }
};

// Tokens [first, end), all of one id, eight columns of a thread. Some at a time are on their way together.
template <Type type, bool aligned>
__device__ __forceinline__ void add_run(const EmbeddingBackward &p, int64_t first, int64_t end, int64_t column,
                                        float (&sum)[kVector]) {
  constexpr int kAtOnce = aligned && type != Type::f32 ? 8 : 4;
  const SortedToken *const sorted = p.sorted();
  const auto row = [&](int64_t i) { return row_at(p.dout, size_of(type), p.inner, sorted[i].token); };
  for (; first + kAtOnce <= end; first += kAtOnce) {
    Loaded<type, aligned> rows[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) rows[k].load(row(first + k), column, p.n);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) rows[k].add_to(sum);
  }
  for (; first < end; ++first) {
    Loaded<type, aligned> one;
    one.load(row(first), column, p.n);
    one.add_to(sum);
  }
}

// The same of many tokens on NVIDIA's GPUs, which copy into shared memory without a register: a thread has a ring there
// of two groups of rows, its own columns of them, of which one is added while the other comes.
constexpr int kRingBytes = 256;  // of a thread
constexpr bool kHasRing = kGpuDeviceType == PYDET_CUDA;
template <Type type> struct Ring {
  static constexpr int kPieces = kVector * size_of(type) / 16;    // of a row
  static constexpr int kGroup = kRingBytes / 2 / (16 * kPieces);  // rows
  static constexpr int64_t kWorth = 2 * kGroup;                   // from so many tokens on
};
template <Type type>
__device__ __forceinline__ void add_long_run(const EmbeddingBackward &p, int64_t first, int64_t end, int64_t column,
                                             uint4 (&ring)[kRingBytes / 16][kSumThreads], float (&sum)[kVector]) {
  constexpr int kGroup = Ring<type>::kGroup, kPieces = Ring<type>::kPieces;
  const SortedToken *const sorted = p.sorted();
  const int t = int(threadIdx.x);
  const int64_t groups = (end - first) / kGroup;
  uint32_t token[kGroup];
  const auto look = [&](int64_t group) {
#pragma unroll
    for (int k = 0; k < kGroup; ++k)
      if (group < groups) token[k] = sorted[first + group * kGroup + k].token;
  };
  const auto ask = [&](int64_t group) {
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      if (group >= groups) continue;
      const char *const row = row_at(p.dout, size_of(type), p.inner, token[k]) + column * size_of(type);
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        copy_async_16(&ring[(group % 2 * kGroup + k) * kPieces + i][t], row + 16 * i, 16);
    }
    commit_copies();
  };
  look(0), ask(0);
  look(1), ask(1);
  for (int64_t group = 0; group < groups; ++group) {
    look(group + 2);
    wait_copies<1>();
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      Loaded<type, true> one;
      static_assert(sizeof one == 16 * kPieces, "pieces of 16 bytes");
      uint4 pieces[kPieces];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) pieces[i] = ring[(group % 2 * kGroup + k) * kPieces + i][t];
      memcpy(&one, pieces, sizeof one);
      one.add_to(sum);
    }
    ask(group + 2);
  }
  wait_copies<0>();
  add_run<type, true>(p, first + groups * kGroup, end, column, sum);
}

// The end of the tokens that have the id of the one at `place`, which is the first: by steps that double, and then halve.
__device__ __forceinline__ int64_t end_of_run(const SortedToken *sorted, int64_t place, uint32_t id, int64_t total) {
  int64_t step = 1, last = place;  // which has it
  while (last + step < total && sorted[last + step].id == id) last += step, step *= 2;
  for (; step > 0; step /= 2)
    if (last + step < total && sorted[last + step].id == id) last += step;
  return last + 1;
}

// ---- Ids of very many tokens --------------------------------------------------------------------------------------

constexpr int kManyTokens = 128;  // at multiples of it they are looked for: such an id has two neighbouring ones
constexpr int kSpreadColumns = 64, kSpreadTurns = 16;  // of a block, and blocks that take turns with the ids

PYDET_HD bool many_tokens(int64_t first, int64_t end) {
  return (first + kManyTokens - 1) / kManyTokens * kManyTokens + kManyTokens < end;
}

// Tokens [first, end) of `id`, columns of the block's. All threads bring rows into the ring, some of them add, a column
// each.
template <Type type, Type to>
__device__ __forceinline__ void add_spread(const EmbeddingBackward &p, int64_t first, int64_t end, uint32_t id,
                                           int64_t first_column, uint4 (&ring)[kRingBytes / 16][kSumThreads]) {
  constexpr int kGroups = kRingBytes / 16, kAhead = kGroups - 4, kElements = 16 / size_of(type);
  constexpr int kPieces = kSpreadColumns / kElements, kRows = kSumThreads / kPieces;  // of a group, a piece a thread
  const SortedToken *const sorted = p.sorted();
  const int t = int(threadIdx.x);
  const int64_t column = first_column + t % kPieces * kElements, own = first_column + t;
  const bool adds = t < kSpreadColumns && own < p.n;
  const int64_t at = int64_t(id) * p.dw.row_stride + own;
  float sum = adds && p.accumulate ? load_f32(p.dw.data, to, at) : 0.0f;
  constexpr int kLooked = 8;  // groups whose tokens are looked up while those of as many are asked for
  constexpr uint32_t kNone = ~0u;
  const int64_t groups = (end - first + kRows - 1) / kRows;
  uint32_t token[kLooked], next[kLooked];
  const auto look = [&](int64_t group) {
#pragma unroll
    for (int j = 0; j < kLooked; ++j) {
      const int64_t i = first + (group + j) * kRows + t / kPieces;
      next[j] = i < end && column < p.n ? sorted[i].token : kNone;
    }
  };
  const auto add = [&](int64_t group) {
    const int64_t left = end - first - group * kRows;
    float x[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) x[k] = load_f32(&ring[group % kGroups][0], type, k * kSpreadColumns + t);
#pragma unroll
    for (int k = 0; k < kRows; ++k)
      if (k < left) sum = sum + x[k];
  };
  look(0);
  __syncthreads();  // the ring has been read
  for (int64_t base = 0; base < groups + kAhead; base += kLooked) {
#pragma unroll
    for (int j = 0; j < kLooked; ++j) token[j] = next[j];
    look(base + kLooked);
#pragma unroll
    for (int j = 0; j < kLooked; ++j) {
      const int64_t asked = base + j, group = asked - kAhead;
      if (group >= 0) {
        wait_copies<kAhead - 1>();
        __syncthreads();
      }
      if (token[j] != kNone)
        copy_async_16(&ring[asked % kGroups][t],
                      row_at(p.dout, size_of(type), p.inner, int64_t(token[j])) + column * size_of(type), 16);
      commit_copies();
      if (adds && group >= 0 && group < groups) add(group);
    }
  }
  wait_copies<0>();
  if (adds) store_rounded(p.dw.data, to, at, sum);
}

// Those of this block's turns, for its columns.
template <Type type, Type to>
__device__ __forceinline__ void add_many(const EmbeddingBackward &p, int64_t total,
                                         uint4 (&ring)[kRingBytes / 16][kSumThreads]) {
  constexpr int kWarps = kSumThreads / kLogicalWarp;
  __shared__ uint32_t found[kWarps];
  const SortedToken *const sorted = p.sorted();
  const int t = int(threadIdx.x), turn = int(blockIdx.x) % kSpreadTurns;
  const int64_t first_column = int64_t(blockIdx.x) / kSpreadTurns * kSpreadColumns;
  const auto place_of = [&](int64_t number) { return (number * kSpreadTurns + turn) * kManyTokens; };
  for (int64_t base = 0; place_of(base) + kManyTokens < total; base += kSumThreads) {
    const int64_t place = place_of(base + t);
    bool many = place + kManyTokens < total && sorted[place].id == sorted[place + kManyTokens].id;
    if (many && place > 0) many = sorted[place - kManyTokens].id != sorted[place].id;
    const uint32_t word = gpu_ballot(many);
    __syncthreads();
    if (t % kLogicalWarp == 0) found[t / kLogicalWarp] = word;
    __syncthreads();
    for (int warp = 0; warp < kWarps; ++warp)
      for (uint32_t left = found[warp]; left; left &= left - 1) {
        const int64_t here = place_of(base + warp * kLogicalWarp + __ffs(int(left)) - 1);
        const uint32_t id = sorted[here].id;
        int64_t first = here, before = here > 0 ? here - kManyTokens : -1;  // which has another id
        while (first - before > 1) {
          const int64_t middle = before + (first - before) / 2;
          if (sorted[middle].id == id) first = middle;
          else before = middle;
        }
        const int64_t end = end_of_run(sorted, here + kManyTokens, id, total);
        add_spread<type, to>(p, first, end, id, first_column, ring);
      }
  }
}

template <Type type, Type to, bool aligned>
__global__ void __launch_bounds__(kSumThreads, 5)
    embedding_sum_kernel(const __grid_constant__ EmbeddingBackward p, const __grid_constant__ SumPlan plan) {
  constexpr bool rings = kHasRing && aligned;
  __shared__ uint4 ring[rings ? kRingBytes / 16 : 1][rings ? kSumThreads : 1];
  wait_for_previous_kernel();
  const SortedToken *const sorted = p.sorted();
  const int64_t total = *p.count();
  if constexpr (rings)
    if (int(blockIdx.x) < plan.spread) {
      if (blockIdx.y == 0) add_many<type, to>(p, total, ring);
      return;
    }
  const int teams = kSumThreads / plan.team, lane = int(threadIdx.x) % plan.team;
  const int64_t column = (int64_t(blockIdx.y) * plan.team + lane) * kVector;
  if (column >= p.n) return;
  for (int64_t block = int(blockIdx.x) - plan.spread; block < plan.blocks; block += int(gridDim.x) - plan.spread) {
    const bool adds = block < plan.adding;
    const int64_t unit = (adds ? block : block - plan.adding) * teams + int(threadIdx.x) / plan.team;
    if (!adds) {
      const float zeros[kVector] = {};
      for (int64_t v = unit * kClearedRows; v < p.dw.rows && v < (unit + 1) * kClearedRows; ++v)
        if (!(p.has_tokens()[v / kTableWord] >> v % kTableWord & 1))
          store_eight(p.dw.data + v * p.dw.row_stride * size_of(to), to, column, p.n, aligned, zeros);
      continue;
    }
    if (unit >= total) continue;
    const uint32_t id = sorted[unit].id;
    if (unit > 0 && sorted[unit - 1].id == id) continue;  // another team begins with it
    const int64_t end = end_of_run(sorted, unit, id, total);
    if (plan.spread > 0 && many_tokens(unit, end)) continue;
    char *const row = p.dw.data + int64_t(id) * p.dw.row_stride * size_of(to);
    float sum[kVector] = {};
    if (p.accumulate) load_eight(row, to, column, p.n, aligned, sum);
    bool added = false;
    if constexpr (rings)
      if (end - unit >= Ring<type>::kWorth) add_long_run<type>(p, unit, end, column, ring, sum), added = true;
    if (!added) add_run<type, aligned>(p, unit, end, column, sum);
    store_eight(row, to, column, p.n, aligned, sum);
  }
}

// A power of two that holds so many threads, or `most`.
int team_of(int64_t threads, int most) {
  int team = 1;
  while (team < most && team < threads) team *= 2;
  return team;
}

constexpr int64_t kMostSpread = 1 << 16;  // columns

bool rows_whole(const EmbeddingBackward &p) {
  return p.n % kVector == 0 && rows_aligned(p.dout) && reinterpret_cast<uintptr_t>(p.dw.data) % 16 == 0 &&
         p.dw.row_stride * size_of(p.dw.type) % 16 == 0;
}

SumPlan plan_of(const EmbeddingBackward &p) {
  const int64_t vectors = divide_up(p.n, kVector);
  SumPlan plan = {};
  plan.team = team_of(vectors, kSumThreads);
  const int64_t teams = kSumThreads / plan.team;
  plan.parts = divide_up(vectors, plan.team);
  plan.adding = divide_up(p.rows, teams);
  plan.blocks = plan.adding + (p.accumulate ? 0 : divide_up(p.dw.rows, teams * kClearedRows));
  if (kHasRing && rows_whole(p) && p.rows > 2 * kManyTokens && p.n <= kMostSpread)
    plan.spread = int(divide_up(p.n, kSpreadColumns)) * kSpreadTurns;
  return plan;
}

template <Type type, Type to> pydet_status launch_sum(const EmbeddingBackward &p) {
  constexpr int64_t kMostBlocks = int64_t(1) << 24, kMostParts = 65535;  // more blocks are walked in turns
  const char *const name = "embedding_backward";
  const SumPlan plan = plan_of(p);
  if (plan.parts > kMostParts) return fail(PYDET_UNSUPPORTED, "%s: dout has too many columns for a GPU", name);
  const auto kernel = rows_whole(p) ? embedding_sum_kernel<type, to, true> : embedding_sum_kernel<type, to, false>;
  pydet_status status = load(name, embedding_sort_kernel);
  if (status == PYDET_OK) status = load(name, kernel);
  if (status != PYDET_OK) return status;
  const auto stream = static_cast<gpu_stream>(p.stream);
  const Launch order = {name, stream, grid_of(divide_up(p.dw.rows, kOwnIds), kSortThreads), dim3(kSortThreads)};
  Launch sum = {name, stream, dim3(unsigned(plan.spread + std::min(plan.blocks, kMostBlocks)), unsigned(plan.parts)),
                dim3(kSumThreads)};
  sum.overlaps_previous = gpu_overlaps_kernels(p.device.id);
  status = launch(order, embedding_sort_kernel, p);
  if (status != PYDET_OK) return status;
  return launch(sum, kernel, p, plan);
}

}  // namespace

pydet_status embedding(const Embedding &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("embedding", guard.error());
  const int64_t size = size_of(p.w.type);
  const bool whole = p.n * size % 16 == 0 && rows_aligned(p.out) && reinterpret_cast<uintptr_t>(p.w.data) % 16 == 0 &&
                     p.w.row_stride * size % 16 == 0;
  if (whole) return launch_copy<uint4>(p);
  return size == 4 ? launch_copy<uint32_t>(p) : launch_copy<uint16_t>(p);
}

pydet_status embedding_backward(const EmbeddingBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("embedding_backward", guard.error());
  return with_type<kUnscaledTypes>(p.dout.type, [&](auto type) {
    return p.dw.type == Type::f32 ? launch_sum<type, Type::f32>(p) : launch_sum<type, type>(p);
  });
}

}  // namespace pydet
