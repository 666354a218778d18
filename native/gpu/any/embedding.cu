// Rows of a table by their numbers, and the table's gradient (NUMERICS.md, "Embedding"): the CPU's bits.
//
//   out[t] = w[ids[t]],   dw[v] = dw[v] or +0, and then + dout[t] for the tokens t with ids[t] = v, ascending
//
// The gradient is two kernels. The first puts tokens in order by id, those of one id as they come. A block has the ids of
// one part of the table, and looks at all tokens: how many have lower ids says where its own begin. Each of its warps has
// tokens that lie together, and counts its own of each id: so every place is known, whoever writes first. The second adds:
// a team of threads has the place where the tokens of an id begin, and walks them.

#include "gpu/kernels.h"
#include "gpu/any/row_passes.h"
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

// A thread takes pieces of a row with its team, which has a row at a time. A row of none of the table's numbers is NaN.
template <class Piece>
__global__ void __launch_bounds__(kCopyThreads)
    embedding_kernel(const __grid_constant__ Embedding p, int team, int64_t pieces) {
  const int teams = kCopyThreads / team, lane = int(threadIdx.x) % team;
  const int size = size_of(p.w.type);
  for (int64_t token = int64_t(blockIdx.x) * teams + int(threadIdx.x) / team; token < p.rows;
       token += int64_t(gridDim.x) * teams) {
    const int64_t id =
        p.ids.wide ? static_cast<const int64_t *>(p.ids.data)[token] : static_cast<const int32_t *>(p.ids.data)[token];
    auto *to = reinterpret_cast<Piece *>(row_at(p.out, size, p.inner, token));
    if (id < 0 || id >= p.w.rows) {
      for (int64_t i = lane; i < pieces; i += team) to[i] = nan_of<Piece>(p.w.type);
      continue;
    }
    const auto *from = reinterpret_cast<const Piece *>(p.w.data + id * p.w.row_stride * size);
    constexpr int kAtOnce = 4;
    for (int64_t i = lane; i < pieces; i += kAtOnce * team) {
      Piece some[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (i + k * team < pieces) some[k] = from[i + k * team];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (i + k * team < pieces) to[i + k * team] = some[k];
    }
  }
}

// A team of so many threads as there are pieces, a power of two.
int team_of(int64_t pieces, int most) {
  int team = 1;
  while (team < most && team < pieces) team *= 2;
  return team;
}

template <class Piece> pydet_status launch_copy(const Embedding &p) {
  constexpr int64_t kMostBlocks = 1 << 20;  // more tokens are walked in turns
  const int64_t pieces = p.n * size_of(p.w.type) / int64_t(sizeof(Piece));
  const int team = team_of(pieces, kCopyThreads);
  const int64_t blocks = divide_up(p.rows, kCopyThreads / team);
  Launch where = {"embedding", static_cast<gpu_stream>(p.stream),
                  dim3(unsigned(blocks < kMostBlocks ? blocks : kMostBlocks)), dim3(kCopyThreads)};
  return launch(where, embedding_kernel<Piece>, p, team, pieces);
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

__device__ __forceinline__ uint32_t from_lane(uint32_t value, int lane) {
  return bits_of(gpu_shfl(float_of(value), lane, kLogicalWarp));
}

__global__ void __launch_bounds__(kSortThreads) embedding_sort_kernel(const __grid_constant__ EmbeddingBackward p) {
  __shared__ uint32_t place[kSortWarps][kOwnIds];  // a warp's tokens of each id; then where the next of them goes
  __shared__ uint32_t sums[kSortThreads], below;
  const int t = int(threadIdx.x), lane = t % kLogicalWarp, warp = t / kLogicalWarp;
  const int64_t first_id = block_number() * kOwnIds;
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
  uint32_t up_to = own;  // of the ids up to t
  sums[t] = own;
  __syncthreads();
  for (int apart = 1; apart < kSortThreads; apart *= 2) {
    const uint32_t before = t >= apart ? sums[t - apart] : 0;
    __syncthreads();
    sums[t] = up_to += before;
    __syncthreads();
  }
  uint32_t next = below + (up_to - own);
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w) {
    const uint32_t of_warp = place[w][t];
    place[w][t] = next;
    next += of_warp;
  }
  if (t == kSortThreads - 1 && first_id + kOwnIds >= p.dw.rows) *p.count() = next;
  if (sums[kSortThreads - 1] == 0) return;
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

// How the work is cut: teams of threads that have some columns of a row together.
struct SumPlan {
  int team;
  int64_t parts;           // of a row
  int64_t adding, blocks;  // blocks that add, and with those that clear
};

// A vector of a token's row on its way.
template <Type type, bool aligned> struct Loaded {
  Packed<type, kVector> packed;
  __device__ __forceinline__ void load(const char *row, int64_t column, int64_t) {
    packed = load_packed<type, kVector>(row + column * size_of(type));
  }
  __device__ __forceinline__ void read(float (&x)[kVector]) const { unpack(packed, x); }
};
template <Type type> struct Loaded<type, false> {
  float elements[kVector];
  __device__ __forceinline__ void load(const char *row, int64_t column, int64_t n) {
    load_elements<type>(row, column, n, elements);
  }
  __device__ __forceinline__ void read(float (&x)[kVector]) const {
#pragma unroll
    for (int e = 0; e < kVector; ++e) x[e] = elements[e];
  }
};

// Adds the tokens from `place` on that have its id, if that is where they begin: 8 columns.
template <Type type, Type to, bool aligned>
__device__ __forceinline__ void add_tokens(const EmbeddingBackward &p, int64_t place, int64_t column) {
  constexpr int kAtOnce = aligned && type != Type::f32 ? 8 : 4;
  const int64_t total = *p.count();
  const SortedToken *const sorted = p.sorted();
  if (place >= total) return;
  const uint32_t id = sorted[place].id;
  if (place > 0 && sorted[place - 1].id == id) return;
  char *const row = p.dw.data + int64_t(id) * p.dw.row_stride * size_of(to);
  float sum[kVector] = {};
  if (p.accumulate) load_vector<to, aligned>(row, column, p.n, sum);
  uint32_t token[kAtOnce];
  bool there[kAtOnce];
  const auto look = [&](int64_t first) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      there[k] = first + k < total;
      const SortedToken of = there[k] ? sorted[first + k] : SortedToken{};
      there[k] = there[k] && of.id == id;
      token[k] = of.token;
    }
  };
  look(place);
  for (int64_t first = place;; first += kAtOnce) {
    Loaded<type, aligned> rows[kAtOnce];
    bool adds[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      adds[k] = there[k];
      if (adds[k]) rows[k].load(row_at(p.dout, size_of(type), p.inner, token[k]), column, p.n);
    }
    const bool more = there[kAtOnce - 1];
    if (more) look(first + kAtOnce);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (!adds[k]) continue;
      float x[kVector];
      rows[k].read(x);
#pragma unroll
      for (int e = 0; e < kVector; ++e) sum[e] = sum[e] + x[e];
    }
    if (!more) break;
  }
  store_vector<to, aligned>(row, column, p.n, sum);
}

template <Type type, Type to, bool aligned>
__global__ void __launch_bounds__(kSumThreads)
    embedding_sum_kernel(const __grid_constant__ EmbeddingBackward p, const __grid_constant__ SumPlan plan) {
  const int teams = kSumThreads / plan.team, lane = int(threadIdx.x) % plan.team;
  for (int64_t block = blockIdx.x; block < plan.blocks; block += gridDim.x) {
    const bool adds = block < plan.adding;
    const int64_t of = adds ? block : block - plan.adding;
    const int64_t unit = of / plan.parts * teams + int(threadIdx.x) / plan.team;
    const int64_t column = (of % plan.parts * plan.team + lane) * kVector;
    if (column >= p.n) continue;
    if (adds) {
      add_tokens<type, to, aligned>(p, unit, column);
      continue;
    }
    const float zeros[kVector] = {};
    for (int64_t v = unit * kClearedRows; v < p.dw.rows && v < (unit + 1) * kClearedRows; ++v)
      if (!(p.has_tokens()[v / kTableWord] >> v % kTableWord & 1))
        store_vector<to, aligned>(p.dw.data + v * p.dw.row_stride * size_of(to), column, p.n, zeros);
  }
}

SumPlan plan_of(const EmbeddingBackward &p) {
  const int64_t vectors = divide_up(p.n, kVector);
  SumPlan plan = {};
  plan.team = team_of(vectors, kSumThreads);
  const int64_t teams = kSumThreads / plan.team;
  plan.parts = divide_up(vectors, plan.team);
  plan.adding = divide_up(p.rows, teams) * plan.parts;
  plan.blocks = plan.adding + (p.accumulate ? 0 : divide_up(p.dw.rows, teams * kClearedRows) * plan.parts);
  return plan;
}

bool rows_whole(const EmbeddingBackward &p) {
  return p.n % kVector == 0 && rows_aligned(p.dout) && reinterpret_cast<uintptr_t>(p.dw.data) % 16 == 0 &&
         p.dw.row_stride * size_of(p.dw.type) % 16 == 0;
}

template <Type type, Type to> pydet_status launch_sum(const EmbeddingBackward &p) {
  constexpr int64_t kMostBlocks = int64_t(1) << 24;  // more are walked in turns
  const char *const name = "embedding_backward";
  const auto kernel = rows_whole(p) ? embedding_sum_kernel<type, to, true> : embedding_sum_kernel<type, to, false>;
  pydet_status status = load(name, embedding_sort_kernel);
  if (status == PYDET_OK) status = load(name, kernel);
  if (status != PYDET_OK) return status;
  const auto stream = static_cast<gpu_stream>(p.stream);
  const Launch order = {name, stream, grid_of(divide_up(p.dw.rows, kOwnIds), kSortThreads), dim3(kSortThreads)};
  status = launch(order, embedding_sort_kernel, p);
  if (status != PYDET_OK) return status;
  const SumPlan plan = plan_of(p);
  const Launch sum = {name, stream, dim3(unsigned(plan.blocks < kMostBlocks ? plan.blocks : kMostBlocks)),
                      dim3(kSumThreads)};
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
