// Sampling of tokens, and the k largest of a row (NUMERICS.md, "Sampling"): the CPU's bits.
//
//   z = x / temperature,   m = max(z) + 0,   e = exp(z - m)
//   kept: the leading columns that top_k and top_p leave, of these those with e >= min_p
//   token = the first column whose (z - m) + g is the largest, of those that are kept
//
// A block takes a row, and passes over it from memory: nothing is sorted but the k that topk gives. What the leading columns
// are is found a digit of their order at a time, by what the columns of each digit weigh: 1 each for top_k, their masses,
// which are whole numbers, for top_p. Where equal columns are cut, the last that is kept is found by its number likewise.
// Noise is made only of columns that it can still lift above the best so far.

#include "gpu/kernels.h"
#include "gpu/any/softmax_row.h"
#include "ops/sample/formulas.h"

namespace pydet {
namespace {

constexpr int T = kMaxTeam;
static_assert(T == kDigits, "a thread has a digit");
constexpr int64_t kNoCut = INT64_MAX;
constexpr int kSortedInShared = 2048;  // of the k largest; more of them are sorted in memory, where index will be

using Weight = unsigned long long;  // as atomicAdd takes it

// What the threads of a block find together.
struct Together {
  Weight weight[T];
  uint32_t digit;
  Weight above, own;
};

// A digit of the order that was looked for: the order, what all higher ones weigh, and what itself does.
struct Found {
  uint32_t order;
  Weight above, own;
};

// The columns that are kept: those of a higher order; of this one those up to a number.
struct Cut {
  uint32_t order;
  int64_t last;
  __device__ __forceinline__ bool keeps(uint32_t of, int64_t j) const {
    return of > order || (of == order && j <= last);
  }
};

// Columns of one digit that follow each other in a thread: the digit's weight is touched once for all of them.
struct Run {
  uint32_t digit = 0;
  Weight weight = 0;
  __device__ __forceinline__ void add(Together &all, uint32_t of, Weight more) {
    if (of != digit) end(all), digit = of;
    weight += more;
  }
  __device__ __forceinline__ void end(Together &all) {
    if (weight) atomicAdd(&all.weight[digit], weight);
    weight = 0;
  }
};

// The highest key such that what has it or a higher one weighs target(total) or more. key(j, x) of a column, weigh(j, x, key).
template <Type type, bool aligned, class Key, class WeighOf, class Target>
__device__ __forceinline__ Found threshold(const char *row, int64_t n, int first_shift, Together &all, const Key &key,
                                           const WeighOf &weigh, const Target &target) {
  const int t = int(threadIdx.x);
  Found found = {};
  Weight reach = 0;
  for (int shift = first_shift; shift >= 0; shift -= kDigitBits) {
    const uint32_t mask = shift < first_shift ? ~uint32_t(0) << (shift + kDigitBits) : 0;
    all.weight[t] = 0;
    __syncthreads();
    Run run;
    pass_over<type, aligned>(row, n, [&](int64_t j, const float(&x)[kVector]) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        if (j + e >= n) continue;
        const uint32_t of = key(j + e, x[e]);
        if ((of ^ found.order) & mask) continue;
        if (const Weight more = weigh(j + e, x[e], of)) run.add(all, of >> shift & (kDigits - 1), more);
      }
    });
    run.end(all);
    __syncthreads();
    const Weight own = all.weight[t];
    Weight from_here = own;  // of this digit and of the higher ones
    for (int apart = 1; apart < T; apart *= 2) {
      const Weight more = t + apart < T ? all.weight[t + apart] : 0;
      __syncthreads();
      all.weight[t] = from_here += more;
      __syncthreads();
    }
    if (shift == first_shift) reach = target(uint64_t(all.weight[0]));
    const Weight above = found.above + (from_here - own);
    if (above < reach && above + own >= reach) all.digit = uint32_t(t), all.above = above, all.own = own;
    __syncthreads();
    found = {found.order | all.digit << shift, all.above, all.own};
  }
  return found;
}

// The number of the equal-th column of this order.
template <Type type, bool aligned>
__device__ __forceinline__ int64_t number_of_equal(const char *row, int64_t n, uint32_t order, int64_t equal,
                                                   Together &all) {
  const Found found = threshold<type, aligned>(
      row, n, n <= int64_t(1) << 24 ? 16 : 24, all, [&](int64_t j, float) { return uint32_t(n - 1 - j); },
      [&](int64_t, float x, uint32_t) { return Weight(order_of(x) == order); },
      [&](uint64_t) { return Weight(equal); });
  return n - 1 - int64_t(found.order);
}

// The first k columns.
template <Type type, bool aligned>
__device__ __forceinline__ Cut cut_by_rank(const char *row, int64_t n, int64_t k, Together &all) {
  const Found found = threshold<type, aligned>(
      row, n, kOrderBits - kDigitBits, all, [](int64_t, float x) { return order_of(x); },
      [](int64_t, float, uint32_t) { return Weight(1); }, [&](uint64_t) { return Weight(k); });
  const int64_t equal = k - int64_t(found.above);
  if (equal == int64_t(found.own)) return {found.order, kNoCut};
  return {found.order, number_of_equal<type, aligned>(row, n, found.order, equal, all)};
}

// The largest of the block's numbers.
__device__ __forceinline__ Weight block_max(Weight mine, Together &all) {
  const int t = int(threadIdx.x);
  __syncthreads();
  all.weight[t] = mine;
  for (int apart = T / 2; apart > 0; apart /= 2) {
    __syncthreads();
    if (t < apart && all.weight[t + apart] > all.weight[t]) all.weight[t] = all.weight[t + apart];
  }
  __syncthreads();
  return all.weight[0];
}
// Ordered by the value, then the lowest column first; 0 is none.
__device__ __forceinline__ Weight candidate(float value, int64_t j) {
  return Weight(order_of(value)) << 32 | (0xFFFFFFFFu - uint32_t(j));
}
__device__ __forceinline__ int64_t column_of(Weight candidate) { return 0xFFFFFFFFu - uint32_t(candidate); }

// ---- Sampling ----------------------------------------------------------------------------------------------------

struct SampledRow {
  RowChoice choice;
  float max;  // m
  __device__ __forceinline__ float distance(float x) const {
    return (choice.divisor == 1.0f ? x : x / choice.divisor) - max;
  }
  __device__ __forceinline__ float exp_of(float distance) const {
    return kGpuDeviceType == PYDET_CUDA ? falling_exp_f32(distance) : exp_f32(distance);
  }
};

// Of the columns that `within` keeps, the first whose masses reach top_p of theirs.
template <Type type, bool aligned>
__device__ __forceinline__ Cut cut_by_mass(const char *row, int64_t n, const SampledRow &of, const Cut &within,
                                           Together &all) {
  uint64_t reach = 0;
  const Found found = threshold<type, aligned>(
      row, n, kOrderBits - kDigitBits, all, [](int64_t, float x) { return order_of(x); },
      [&](int64_t j, float x, uint32_t order) {
        return within.keeps(order, j) ? Weight(mass_of(of.exp_of(of.distance(x)))) : 0;
      },
      [&](uint64_t total) { return Weight(reach = target_of(total, of.choice.top_p)); });
  const uint64_t each = mass_of(of.exp_of(of.distance(in_order(found.order))));
  const uint64_t equal = (reach - found.above + each - 1) / each;
  if (equal * each == found.own) return {found.order, found.order == within.order ? within.last : kNoCut};
  return {found.order, number_of_equal<type, aligned>(row, n, found.order, int64_t(equal), all)};
}

template <Type type, bool aligned>
__global__ void __launch_bounds__(T) sample_kernel(const __grid_constant__ Sample p) {
  __shared__ float sums[2][T], largest[T / kLogicalWarp];
  __shared__ Together all;
  auto *all_log_probs = reinterpret_cast<float *>(p.log_prob.data);
  auto *filtered_log_probs = reinterpret_cast<float *>(p.filtered_log_prob.data);
  float ones[kVector];
#pragma unroll
  for (int e = 0; e < kVector; ++e) ones[e] = 1.0f;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const char *row = row_at(p.x, size_of(type), p.inner, r);
    SampledRow of = {choice_of(p, r), 0.0f};
    const RowChoice &choice = of.choice;
    float most = kLowest;
    int lost = !choice.serves;
    pass_over<type, aligned>(row, p.n, [&](int64_t j, const float(&x)[kVector]) {
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        if (aligned || j + e < p.n) most = larger(most, x[e]), lost |= x[e] != x[e];
    });
    __syncthreads();  // the row before may still be read of
    const float largest_x = team_max<T>(most, largest);
    of.max = largest_x / choice.divisor + 0.0f;
    lost |= !(fabsf(of.max) < INFINITY);
    if (__syncthreads_or(lost)) {
      if (threadIdx.x == 0) {
        reinterpret_cast<int64_t *>(p.token)[r] = -1;
        if (all_log_probs) all_log_probs[r] = float_of(kNanF32);
        if (filtered_log_probs) filtered_log_probs[r] = float_of(kNanF32);
      }
      continue;
    }

    Cut cut = {0, kNoCut};
    const bool cuts = choice.by_rank() || choice.by_mass();
    if (choice.by_rank()) cut = cut_by_rank<type, aligned>(row, p.n, choice.top_k, all);
    if (choice.by_mass()) cut = cut_by_mass<type, aligned>(row, p.n, of, cut, all);

    Lanes<T, kVector, 1> of_all[1], of_kept[1];
    const bool wants_kept = filtered_log_probs && choice.filters();
    const bool wants_all = all_log_probs || (filtered_log_probs && !choice.filters());
    float best = kLeastNoise;  // which the likeliest column, at z - m = 0, is above
    Weight chosen = 0;
    pass_over<type, aligned>(row, p.n, [&](int64_t j, const float(&x)[kVector]) {
      float distance[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) distance[e] = of.distance(x[e]);
      if (choice.greedy) {
#pragma unroll
        for (int e = kVector - 1; e >= 0; --e)
          if (j + e < p.n && x[e] == largest_x && chosen < candidate(0.0f, j + e)) chosen = candidate(0.0f, j + e);
      }
      float exps[kVector] = {};
      if (wants_all || wants_kept || choice.min_p > 0.0f) exps_of(distance, 0.0f, exps);
      if (wants_all) of_all[0].add_left(0, p.n - j, exps, ones);
      if (choice.greedy) return;
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        bool keep = j + e < p.n;
        if (cuts) keep = keep && cut.keeps(order_of(x[e]), j + e);
        if (choice.min_p > 0.0f) keep = keep && exps[e] >= choice.min_p;
        if (!keep) distance[e] = -INFINITY, exps[e] = 0.0f;
      }
      if (wants_kept) of_kept[0].add_left(0, p.n - j, exps, ones);
#pragma unroll
      for (int block = 0; block < kVector / kNoiseBlock; ++block) {
        bool may = false;
#pragma unroll
        for (int e = 0; e < kNoiseBlock; ++e) may |= !(distance[block * kNoiseBlock + e] + kMostNoise < best);
        if (!may) continue;
        const NoiseBlock noise = philox(choice.seed, choice.position, uint32_t(j / kNoiseBlock + block));
#pragma unroll
        for (int e = 0; e < kNoiseBlock; ++e) {
          const float here = distance[block * kNoiseBlock + e];
          if (here + kMostNoise < best) continue;
          const float with_noise = here + gumbel(noise.word[e]);
          if (with_noise > best) best = with_noise, chosen = candidate(best, j + block * kNoiseBlock + e);
        }
      }
    });
    const int64_t token = column_of(block_max(chosen, all));
    float sum_of_all[1] = {1.0f}, sum_of_kept[1] = {1.0f};
    const auto as_it_is = [](float s) { return s; };
    if (wants_all) join(of_all, sums[0], as_it_is, sum_of_all);
    if (wants_kept) join(of_kept, sums[1], as_it_is, sum_of_kept);
    if (threadIdx.x != 0) continue;
    const float at_token = of.distance(load_f32(row, type, token));
    reinterpret_cast<int64_t *>(p.token)[r] = token;
    const float log_prob = at_token - log_f32(sum_of_all[0]);
    if (all_log_probs) all_log_probs[r] = log_prob;
    if (filtered_log_probs)
      filtered_log_probs[r] = choice.greedy ? 0.0f : wants_kept ? at_token - log_f32(sum_of_kept[0]) : log_prob;
  }
}

// ---- The k largest -----------------------------------------------------------------------------------------------

// Puts count numbers in ascending order, whatever their count: a bitonic network whose steps all put the lesser one first,
// so that what would lie behind the last may be thought to be infinite.
__device__ __forceinline__ void sort(Weight *numbers, int64_t count) {
  const auto in_order = [&](int64_t low, int64_t high) {
    if (high >= count || numbers[low] <= numbers[high]) return;
    const Weight lesser = numbers[high];
    numbers[high] = numbers[low];
    numbers[low] = lesser;
  };
  for (int64_t size = 2; size / 2 < count; size *= 2) {
    for (int64_t apart = size / 2; apart > 0; apart /= 2) {
      __syncthreads();
      for (int64_t i = threadIdx.x; 2 * apart * (i / apart) < count; i += T) {
        const int64_t begin = 2 * apart * (i / apart), place = i % apart;
        in_order(begin + place, apart == size / 2 ? begin + size - 1 - place : begin + place + apart);
      }
    }
  }
  __syncthreads();
}

template <Type type, bool aligned>
__global__ void __launch_bounds__(T, 4) topk_kernel(const __grid_constant__ TopK p) {
  __shared__ Together all;
  __shared__ Weight few[kSortedInShared];
  __shared__ uint32_t taken;
  using Bits = typename Element<type>::Bits;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const char *row = row_at(p.x, size_of(type), p.inner, r);
    auto *index = reinterpret_cast<int64_t *>(p.index) + r * p.k;
    auto *values = reinterpret_cast<Bits *>(p.values.data) + r * p.k;
    Weight *numbers = p.k <= kSortedInShared ? few : reinterpret_cast<Weight *>(index);
    const Cut cut = cut_by_rank<type, aligned>(row, p.n, p.k, all);
    if (threadIdx.x == 0) taken = 0;
    __syncthreads();
    pass_over<type, aligned>(row, p.n, [&](int64_t j, const float(&x)[kVector]) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const uint32_t order = order_of(x[e]);
        if (j + e < p.n && cut.keeps(order, j + e))
          numbers[atomicAdd(&taken, 1u)] = Weight(~order) << 32 | uint32_t(j + e);
      }
    });
    sort(numbers, p.k);
    for (int64_t i = threadIdx.x; i < p.k; i += T) {
      const int64_t at = uint32_t(numbers[i]);
      index[i] = at;
      values[i] = Element<type>::from_f32(load_f32(row, type, at));
    }
    __syncthreads();
  }
}

template <class Problem> pydet_status launch_rows(const char *name, const Problem &p, void (*kernel)(Problem)) {
  constexpr int64_t kMostBlocks = 1 << 20;  // more rows are walked in turns
  Launch where = {name, static_cast<gpu_stream>(p.stream), dim3(unsigned(p.rows < kMostBlocks ? p.rows : kMostBlocks)),
                  dim3(T)};
  return launch(where, kernel, p);
}

}  // namespace

pydet_status sample(const Sample &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("sample", guard.error());
  const bool whole = p.n % kVector == 0 && rows_aligned(p.x);
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return launch_rows("sample", p, whole ? sample_kernel<type, true> : sample_kernel<type, false>);
  });
}

pydet_status topk(const TopK &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("topk", guard.error());
  const bool whole = p.n % kVector == 0 && rows_aligned(p.x);
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    return launch_rows("topk", p, whole ? topk_kernel<type, true> : topk_kernel<type, false>);
  });
}

}  // namespace pydet
