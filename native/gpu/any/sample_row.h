// Sampling of tokens, and the k largest of a row (NUMERICS.md, "Sampling"), by a block or by the blocks of a cluster.
// Shared by sample.cu and nvidia/sample_spread.cu.
//
//   z = x / temperature,   m = max(z) + 0,   e = exp(z - m)
//   kept: the leading columns that top_k and top_p leave, of these those with e >= min_p
//   token = the first column whose (z - m) + g is the largest, of those that are kept
//
// A row is passed over from memory: nothing is sorted but the k that topk gives. What the leading columns are is found a
// digit of their keys at a time, by what the columns of each digit weigh: 1 each for top_k, their masses, which are whole
// numbers, for top_p. Where equal columns are cut, they are put in order by their numbers; where they are many, the last
// that is kept is found by the digits of its number. Noise is made only of columns that it can still lift above the best
// so far.
#pragma once

#include "gpu/any/softmax_row.h"
#include "gpu/cluster.h"
#include "ops/sample/formulas.h"

namespace pydet {
namespace {

constexpr int T = kMaxTeam, kWarps = T / kLogicalWarp;
constexpr int kBinBits = 11, kBins = 1 << kBinBits, kOwnBins = kBins / T;  // of a digit; of a thread
constexpr int64_t kNoCut = INT64_MAX;

using Weight = unsigned long long;

// ---- Who has a row -----------------------------------------------------------------------------------------------

// A block has all of it.
struct Alone {
  static constexpr bool spread = false;
  static constexpr int rank = 0, blocks = 1;
  __device__ __forceinline__ void meet() const { __syncthreads(); }
  template <class Word> __device__ __forceinline__ Word *of(Word *mine, int) const { return mine; }
  __device__ __forceinline__ int64_t places(int64_t n) const { return n; }
  __device__ __forceinline__ int64_t column(int64_t place) const { return place; }
};

// A cluster of 2, 4 or 8 blocks has it: of each 2048 columns they have equal parts. A block counts its own ones through.
struct Spread {
  static constexpr bool spread = true;
  int rank, blocks, log_part;

  __device__ __forceinline__ Spread()
      : rank(cluster_block()),
        blocks(cluster_blocks()),
        log_part(kBinBits - (blocks == 2   ? 1
                             : blocks == 4 ? 2
                                           : 3)) {}
  // Returns when all threads of the cluster have come; each sees what the others wrote.
  __device__ __forceinline__ void meet() const { sync_cluster(); }
  // The same word of another block.
  template <class Word> __device__ __forceinline__ Word *of(Word *mine, int block) const {
    return in_cluster_block(mine, block);
  }
  __device__ __forceinline__ int part() const { return 1 << log_part; }
  __device__ __forceinline__ int64_t places(int64_t n) const { return (n + kRowLanes - 1) / kRowLanes << log_part; }
  __device__ __forceinline__ int64_t column(int64_t place) const {
    return (place >> log_part) * kRowLanes + rank * part() + (place & (part() - 1));
  }
};
static_assert(kRowLanes == kBins, "log_part");

template <Type type, bool aligned, class Team, class F>
__device__ __forceinline__ void pass_over(const Team &team, const char *row, int64_t n, const F &f) {
  pass_over<type, aligned>(row, n, team.places(n), [&](int64_t place) { return team.column(place); }, f);
}

// ---- Keys --------------------------------------------------------------------------------------------------------

// The bits of an order that tell a type's numbers apart.
template <Type type> constexpr int kKeyShift = type == Type::f32 ? 0 : type == Type::bf16 ? 16 : 13;
template <Type type> constexpr int kKeyBits = kOrderBits - kKeyShift<type>;
template <Type type> __device__ __forceinline__ uint32_t key_of(float x) { return order_of(x) >> kKeyShift<type>; }
template <Type type> __device__ __forceinline__ float in_key(uint32_t key) {
  const uint32_t below = (uint32_t(1) << kKeyShift<type>)-1;  // all of them set in the order of a number below zero
  return in_order(key << kKeyShift<type> | (key >> (kKeyBits<type> - 1) ? 0 : below));
}

// ---- What the threads of a row find together ---------------------------------------------------------------------

template <class Team_, bool heavy_, int listed> struct Together {
  using Team = Team_;
  static constexpr bool heavy = heavy_;                // weights need more than 32 bits
  static constexpr int kTurns = Team::spread ? 2 : 1;  // others may still read the one while the other is filled
  static constexpr int kListed = listed;
  alignas(16) uint32_t low[kTurns][kBins], high[heavy ? kTurns : 1][heavy ? kBins : 4];  // what the digits weigh
  Weight own_list[listed], list[Team::spread ? listed : 1];
  Weight of_warp[kWarps], above, own;
  uint32_t digit, count;

  // By halves, of which the lower one's sum tells when it overflows: 64 bits at once would be tried until they succeed.
  __device__ __forceinline__ void add(int turn, uint32_t to, Weight weight) {
    const uint32_t lower = uint32_t(weight), before = atomicAdd(&low[turn][to], lower);
    if constexpr (heavy) {
      const uint32_t upper = uint32_t(weight >> 32) + (before + lower < before);
      if (upper) atomicAdd(&high[turn][to], upper);
    }
  }
  __device__ __forceinline__ Weight *whole_list() { return Team::spread ? list : own_list; }
};

// A digit of the key that was looked for: the key, what all higher ones weigh, and what itself does.
struct Found {
  uint32_t key;
  Weight above, own;
};

// The columns that are kept: those of a higher key; of this one those up to a number.
struct Cut {
  uint32_t key;
  int64_t last;
  __device__ __forceinline__ bool keeps(uint32_t of, int64_t j) const { return of > key || (of == key && j <= last); }
};

// Columns of one digit that follow each other in a thread: the digit's weight is touched once for all of them.
template <class All> struct Run {
  All &all;
  int turn;
  uint32_t digit = 0;
  Weight weight = 0;
  __device__ __forceinline__ void add(uint32_t of, Weight more) {
    if (of != digit) end(), digit = of;
    weight += more;
  }
  __device__ __forceinline__ void end() {
    if (weight) all.add(turn, digit, weight);
    weight = 0;
  }
};

__device__ __forceinline__ Weight weight_of_lane(Weight weight, int lane) {
  return Weight(from_lane(uint32_t(weight >> 32), lane)) << 32 | from_lane(uint32_t(weight), lane);
}

// The threads of a row, which count the digits they have looked for.
template <Type type, bool aligned, class All> struct Search {
  using Team = typename All::Team;
  All &all;
  Team team;
  int turn = 0;

  // The highest key such that what has it or a higher one weighs target(total) or more. key(j, x) of a column has so many
  // bits; weigh(j, x, key).
  template <class Key, class WeighOf, class Target>
  __device__ __forceinline__ Found threshold(const char *row, int64_t n, int bits, const Key &key, const WeighOf &weigh,
                                             const Target &target) {
    const int t = int(threadIdx.x), lane = t % kLogicalWarp, warp = t / kLogicalWarp;
    Found found = {};
    Weight reach = 0;
    for (int left = bits; left > 0;) {
      const int width = left < kBinBits ? left : kBinBits, shift = left - width;
      const uint32_t known = left < bits ? ~uint32_t(0) << left : 0, digits = (uint32_t(1) << width) - 1;
      uint32_t *const low = all.low[turn], *const high = all.high[All::heavy ? turn : 0];
      for (int i = t; i < kBins; i += T) {
        low[i] = 0;
        if constexpr (All::heavy) high[i] = 0;
      }
      __syncthreads();
      Run<All> run = {all, turn};
      pass_over<type, aligned>(team, row, n, [&](int64_t j, const float(&x)[kVector]) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          if (!aligned && j + e >= n) continue;
          const uint32_t of = key(j + e, x[e]);
          if ((of ^ found.key) & known) continue;
          if (const Weight more = weigh(j + e, x[e], of)) run.add(of >> shift & digits, more);
        }
      });
      run.end();
      team.meet();

      Weight mine[kOwnBins] = {}, sum = 0;
      for (int block = 0; block < team.blocks; ++block) {
        uint32_t lower[kOwnBins], upper[kOwnBins] = {};
        memcpy(lower, __builtin_assume_aligned(team.of(low, block) + kOwnBins * t, 16), sizeof lower);
        if constexpr (All::heavy)
          memcpy(upper, __builtin_assume_aligned(team.of(high, block) + kOwnBins * t, 16), sizeof upper);
#pragma unroll
        for (int i = 0; i < kOwnBins; ++i) mine[i] += Weight(upper[i]) << 32 | lower[i];
      }
#pragma unroll
      for (int i = 0; i < kOwnBins; ++i) sum += mine[i];
      Weight from_here = sum;  // of this thread's digits and of the higher ones
#pragma unroll
      for (int apart = 1; apart < kLogicalWarp; apart *= 2) {
        const Weight more = weight_of_lane(from_here, lane + apart < kLogicalWarp ? lane + apart : lane);
        if (lane + apart < kLogicalWarp) from_here += more;
      }
      if (lane == 0) all.of_warp[warp] = from_here;
      __syncthreads();
      Weight total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        total += all.of_warp[w];
        if (w > warp) from_here += all.of_warp[w];
      }
      if (left == bits) reach = target(uint64_t(total));
      Weight above = found.above + (from_here - sum);
#pragma unroll
      for (int i = kOwnBins - 1; i >= 0; --i) {
        if (above < reach && above + mine[i] >= reach)
          all.digit = uint32_t(kOwnBins * t + i), all.above = above, all.own = mine[i];
        above += mine[i];
      }
      __syncthreads();
      found = {found.key | all.digit << shift, all.above, all.own};
      if (All::kTurns > 1) turn ^= 1;
      left = shift;
    }
    return found;
  }

  // Lists the columns that number(j, x, &number) says, which are at most All::kListed. How many they are. The list is
  // read before the threads meet again. `by_all`: every block wants it, not the first alone.
  template <class Number>
  __device__ __forceinline__ int64_t gather(const char *row, int64_t n, bool by_all, const Number &number) {
    if (threadIdx.x == 0) all.count = 0;
    __syncthreads();
    pass_over<type, aligned>(team, row, n, [&](int64_t j, const float(&x)[kVector]) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        Weight one;
        if ((aligned || j + e < n) && number(j + e, x[e], &one)) all.own_list[atomicAdd(&all.count, 1u)] = one;
      }
    });
    team.meet();
    int64_t count = 0;
    if constexpr (!Team::spread) {
      count = all.count;
    } else if (by_all || team.rank == 0) {
      for (int block = 0; block < team.blocks; ++block) {
        const int64_t more = *team.of(&all.count, block);
        const Weight *const from = team.of(all.own_list, block);
        for (int64_t i = threadIdx.x; i < more; i += T) all.list[count + i] = from[i];
        count += more;
      }
    }
    __syncthreads();
    return count;
  }

  // The number of the equal-th column of this key, of which there are `own`.
  __device__ __forceinline__ int64_t number_of_equal(const char *row, int64_t n, uint32_t key, int64_t equal,
                                                     int64_t own);

  // The first k columns.
  __device__ __forceinline__ Found by_rank(const char *row, int64_t n, int64_t k) {
    return threshold(
        row, n, kKeyBits<type>, [](int64_t, float x) { return key_of<type>(x); },
        [](int64_t, float, uint32_t) { return Weight(1); }, [&](uint64_t) { return Weight(k); });
  }
  __device__ __forceinline__ Cut cut_by_rank(const char *row, int64_t n, int64_t k) {
    const Found found = by_rank(row, n, k);
    const int64_t equal = k - int64_t(found.above);
    if (equal == int64_t(found.own)) return {found.key, kNoCut};
    return {found.key, number_of_equal(row, n, found.key, equal, int64_t(found.own))};
  }
};

// Puts count numbers in ascending order, whatever their count: a bitonic network whose steps all put the lesser one first,
// so that what would lie behind the last may be thought to be infinite.
__device__ __forceinline__ void sort(Weight *numbers, int64_t count_) {
  const uint32_t count = uint32_t(count_);
  const auto in_order = [&](uint32_t low, uint32_t high) {
    if (high >= count || numbers[low] <= numbers[high]) return;
    const Weight lesser = numbers[high];
    numbers[high] = numbers[low];
    numbers[low] = lesser;
  };
  for (int merge = 0; count > 1 && (count - 1) >> merge; ++merge) {  // of twice 1 << merge numbers
    for (int step = merge; step >= 0; --step) {
      const uint32_t apart = 1u << step;
      __syncthreads();
      for (uint32_t i = threadIdx.x;; i += T) {
        const uint32_t begin = i >> step << (step + 1), place = i & (apart - 1);
        if (begin >= count) break;
        in_order(begin + place, step == merge ? begin + 2 * apart - 1 - place : begin + place + apart);
      }
    }
  }
  __syncthreads();
}

template <Type type, bool aligned, class All>
__device__ __forceinline__ int64_t Search<type, aligned, All>::number_of_equal(const char *row, int64_t n, uint32_t key,
                                                                               int64_t equal, int64_t own) {
  if (own <= All::kListed) {
    const int64_t count = gather(row, n, true, [&](int64_t j, float x, Weight *number) {
      *number = Weight(j);
      return key_of<type>(x) == key;
    });
    sort(all.whole_list(), count);
    const int64_t last = int64_t(all.whole_list()[equal - 1]);
    team.meet();  // the blocks' lists are read no more
    return last;
  }
  int bits = 1;
  while ((n - 1) >> bits) ++bits;
  const Found found = threshold(
      row, n, bits, [&](int64_t j, float) { return uint32_t(n - 1 - j); },
      [&](int64_t, float x, uint32_t) { return Weight(key_of<type>(x) == key); },
      [&](uint64_t) { return Weight(equal); });
  return n - 1 - int64_t(found.key);
}

// The largest of the block's numbers.
template <class All> __device__ __forceinline__ Weight block_max(Weight mine, All &all) {
  const int lane = int(threadIdx.x) % kLogicalWarp;
#pragma unroll
  for (int apart = 1; apart < kLogicalWarp; apart *= 2) {
    const Weight other = weight_of_lane(mine, lane ^ apart);
    if (other > mine) mine = other;
  }
  __syncthreads();
  if (lane == 0) all.of_warp[threadIdx.x / kLogicalWarp] = mine;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w)
    if (all.of_warp[w] > mine) mine = all.of_warp[w];
  return mine;
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
template <Type type, bool aligned, class All>
__device__ __forceinline__ Cut cut_by_mass(Search<type, aligned, All> &search, const char *row, int64_t n,
                                           const SampledRow &of, const Cut &within) {
  uint64_t reach = 0;
  const Found found = search.threshold(
      row, n, kKeyBits<type>, [](int64_t, float x) { return key_of<type>(x); },
      [&](int64_t j, float x, uint32_t key) {
        return within.keeps(key, j) ? Weight(mass_of(of.exp_of(of.distance(x)))) : 0;
      },
      [&](uint64_t total) { return Weight(reach = target_of(total, of.choice.top_p)); });
  const uint64_t each = mass_of(of.exp_of(of.distance(in_key<type>(found.key))));
  const uint64_t equal = (reach - found.above + each - 1) / each, own = found.own / each;
  if (equal == own) return {found.key, found.key == within.key ? within.last : kNoCut};
  if (found.key != within.key || within.last == kNoCut)
    return {found.key, search.number_of_equal(row, n, found.key, int64_t(equal), int64_t(own))};
  return {found.key,
          search.number_of_equal(row, n, found.key, int64_t(equal), kNoCut)};  // more than `own` have the key
}

// What a block of a row is told by the others.
template <class Team> struct Told {
  static constexpr int kMost = Team::spread ? 8 : 1;
  float most[kMost];
  int lost[kMost];
  Weight chosen[kMost];
  float groups[2][Team::spread ? kRowLaneGroups : 1];  // sums: of all columns, of those that are kept
};

// The sums over a cluster's lanes, of exps that its blocks have: a block has as many lanes of each 2048 columns as it has
// columns, and a thread some of them. What other threads have of them goes by way of shared memory.
struct SpreadSums {
  static constexpr int kMostLanes = kRowLaneElements / 2;
  float lane[kMostLanes] = {};
  // exps: of 2048 of the block's columns, which are some of each of its lanes, in order.
  __device__ __forceinline__ void add(const Spread &team, const float *exps) {
    const int part = team.part();
#pragma unroll
    for (int i = 0; i < kMostLanes; ++i)
      if (i * T < part)
        for (int place = i * T + int(threadIdx.x); place < kRowLanes; place += part) lane[i] = exps[place] + lane[i];
  }
  // Tells the first block the sums of the groups of eight lanes.
  __device__ __forceinline__ void tell(const Spread &team, float *groups) {
    const int part = team.part();
#pragma unroll
    for (int i = 0; i < kMostLanes; ++i) {
      float sum = lane[i];
#pragma unroll
      for (int apart = kRowLaneElements / 2; apart > 0; apart /= 2) sum += gpu_shfl_xor(sum, apart, kLogicalWarp);
      const int first = i * T + int(threadIdx.x);
      if (i * T < part && threadIdx.x % kRowLaneElements == 0)
        *team.of(groups + (team.rank * part + first) / kRowLaneElements, 0) = sum;
    }
  }
  // The sum of all groups. All threads of the first block.
  __device__ __forceinline__ static float joined(float *groups) {
    for (int apart = kRowLaneGroups / 2; apart > 0; apart /= 2) {
      __syncthreads();
      if (int(threadIdx.x) < apart) groups[threadIdx.x] += groups[threadIdx.x + apart];
    }
    __syncthreads();
    return groups[0];
  }
};

template <class Team> using OfSample = Together<Team, true, 512>;

template <Type type, bool aligned, class Team>
__device__ __forceinline__ void sample_row(const Sample &p, int64_t r, const Team &team, OfSample<Team> &all,
                                           Told<Team> &told) {
  __shared__ float sums[2][T], largest[kWarps];
  const int t = int(threadIdx.x);
  auto *all_log_probs = reinterpret_cast<float *>(p.log_prob.data);
  auto *filtered_log_probs = reinterpret_cast<float *>(p.filtered_log_prob.data);
  const char *row = row_at(p.x, size_of(type), p.inner, r);
  SampledRow of = {choice_of(p, r), 0.0f};
  const RowChoice &choice = of.choice;
  float most = kLowest;
  int lost = !choice.serves;
  pass_over<type, aligned>(team, row, p.n, [&](int64_t j, const float(&x)[kVector]) {
#pragma unroll
    for (int e = 0; e < kVector; ++e)
      if (aligned || j + e < p.n) most = larger(most, x[e]), lost |= x[e] != x[e];
  });
  __syncthreads();  // the row before may still be read of
  float largest_x = team_max<T>(most, largest);
  if constexpr (Team::spread) {
    lost = __syncthreads_or(lost);
    if (t < team.blocks) *team.of(&told.most[team.rank], t) = largest_x, *team.of(&told.lost[team.rank], t) = lost;
    team.meet();
    for (int block = 0; block < team.blocks; ++block)
      largest_x = larger(largest_x, told.most[block]), lost |= told.lost[block];
    largest_x += 0.0f;
  }
  of.max = largest_x / choice.divisor + 0.0f;
  lost |= !(fabsf(of.max) < INFINITY);
  if (__syncthreads_or(lost)) {
    if (t == 0 && team.rank == 0) {
      reinterpret_cast<int64_t *>(p.token)[r] = -1;
      if (all_log_probs) all_log_probs[r] = float_of(kNanF32);
      if (filtered_log_probs) filtered_log_probs[r] = float_of(kNanF32);
    }
    return;
  }

  Cut cut = {0, kNoCut};
  const bool cuts = choice.by_rank() || choice.by_mass();
  Search<type, aligned, OfSample<Team>> search = {all, team};
  if (choice.by_rank()) cut = search.cut_by_rank(row, p.n, choice.top_k);
  if (choice.by_mass()) cut = cut_by_mass(search, row, p.n, of, cut);

  const bool wants_kept = filtered_log_probs && choice.filters();
  const bool wants_all = all_log_probs || (filtered_log_probs && !choice.filters());
  float best = kLeastNoise;  // which the likeliest column, at z - m = 0, is above
  Weight chosen = 0;
  // The exps of some columns, of all and of those that are kept.
  const auto look = [&](int64_t j, const float(&x)[kVector], float(&exps)[kVector], float(&kept)[kVector]) {
    float distance[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) distance[e] = of.distance(x[e]);
    if (choice.greedy) {
#pragma unroll
      for (int e = kVector - 1; e >= 0; --e)
        if (j + e < p.n && x[e] == largest_x && chosen < candidate(0.0f, j + e)) chosen = candidate(0.0f, j + e);
    }
    if (wants_all || wants_kept || choice.min_p > 0.0f) exps_of(distance, 0.0f, exps);
    if (choice.greedy) return;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      bool keep = j + e < p.n;
      if (cuts) keep = keep && cut.keeps(key_of<type>(x[e]), j + e);
      if (choice.min_p > 0.0f) keep = keep && exps[e] >= choice.min_p;
      kept[e] = keep ? exps[e] : 0.0f;
      if (!keep) distance[e] = -INFINITY;
    }
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
  };

  int64_t token;
  float sum_of_all[1] = {1.0f}, sum_of_kept[1] = {1.0f};
  if constexpr (!Team::spread) {
    float ones[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) ones[e] = 1.0f;
    Lanes<T, kVector, 1> of_all[1], of_kept[1];
    pass_over<type, aligned>(team, row, p.n, [&](int64_t j, const float(&x)[kVector]) {
      float exps[kVector] = {}, kept[kVector] = {};
      look(j, x, exps, kept);
      if (wants_all) of_all[0].add_left(0, p.n - j, exps, ones);
      if (wants_kept) of_kept[0].add_left(0, p.n - j, kept, ones);
    });
    token = column_of(block_max(chosen, all));
    const auto as_it_is = [](float s) { return s; };
    if (wants_all) join(of_all, sums[0], as_it_is, sum_of_all);
    if (wants_kept) join(of_kept, sums[1], as_it_is, sum_of_kept);
  } else {
    team.meet();  // what the digits weighed is read no more: exps lie there now
    SpreadSums of_all, of_kept;
    const int64_t places = team.places(p.n), mine = int64_t(kVector) * t;
    float x[kVector] = {};
    const auto load = [&](int64_t place) {
      const int64_t j = team.column(place);
      if (place < places && j < p.n) load_eight(row, type, j, p.n, aligned, x);
    };
    load(mine);
    int turn = 0;
    for (int64_t first = 0; first < places; first += kRowLanes, turn ^= 1) {
      const int64_t j = team.column(first + mine);
      const bool inside = first + mine < places && j < p.n;
      float here[kVector], exps[kVector] = {}, kept[kVector] = {};
#pragma unroll
      for (int e = 0; e < kVector; ++e) here[e] = x[e];
      load(first + kRowLanes + mine);
      if (inside) look(j, here, exps, kept);
      if (!wants_all && !wants_kept) continue;
      auto *const all_exps = reinterpret_cast<float *>(all.low[turn]);
      auto *const kept_exps = reinterpret_cast<float *>(all.high[turn]);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        if (!aligned && j + e >= p.n) exps[e] = 0.0f;
        all_exps[mine + e] = exps[e];
        kept_exps[mine + e] = kept[e];
      }
      __syncthreads();
      if (wants_all) of_all.add(team, all_exps);
      if (wants_kept) of_kept.add(team, kept_exps);
    }
    if (wants_all) of_all.tell(team, told.groups[0]);
    if (wants_kept) of_kept.tell(team, told.groups[1]);
    chosen = block_max(chosen, all);
    if (t == 0) *team.of(&told.chosen[team.rank], 0) = chosen;
    team.meet();
    if (team.rank > 0) return;
    for (int block = 0; block < team.blocks; ++block)
      if (told.chosen[block] > chosen) chosen = told.chosen[block];
    token = column_of(chosen);
    if (wants_all) sum_of_all[0] = SpreadSums::joined(told.groups[0]);
    if (wants_kept) sum_of_kept[0] = SpreadSums::joined(told.groups[1]);
  }
  if (t != 0) return;
  const float at_token = of.distance(load_f32(row, type, token));
  reinterpret_cast<int64_t *>(p.token)[r] = token;
  const float log_prob = at_token - log_f32(sum_of_all[0]);
  if (all_log_probs) all_log_probs[r] = log_prob;
  if (filtered_log_probs)
    filtered_log_probs[r] = choice.greedy ? 0.0f : wants_kept ? at_token - log_f32(sum_of_kept[0]) : log_prob;
}

// ---- The k largest -----------------------------------------------------------------------------------------------

constexpr int kTopKListed = 1024;  // of the k largest; more of them are sorted in memory, where index will be
template <class Team> using OfTopK = Together<Team, false, kTopKListed>;

template <Type type, bool aligned, class Team>
__device__ __forceinline__ void topk_row(const TopK &p, int64_t r, const Team &team, OfTopK<Team> &all) {
  using Bits = typename Element<type>::Bits;
  const char *row = row_at(p.x, size_of(type), p.inner, r);
  auto *index = reinterpret_cast<int64_t *>(p.index) + r * p.k;
  auto *values = reinterpret_cast<Bits *>(p.values.data) + r * p.k;
  Search<type, aligned, OfTopK<Team>> search = {all, team};
  const Found found = search.by_rank(row, p.n, p.k);
  Weight *numbers = all.whole_list();
  const auto number_of = [](int64_t j, float x) { return Weight(~order_of(x)) << 32 | uint32_t(j); };
  if (int64_t(found.above + found.own) <= kTopKListed) {
    const int64_t count = search.gather(row, p.n, false, [&](int64_t j, float x, Weight *number) {
      *number = number_of(j, x);
      return key_of<type>(x) >= found.key;
    });
    if (team.rank == 0) sort(numbers, count);
  } else {
    Cut cut = {found.key, kNoCut};
    const int64_t equal = p.k - int64_t(found.above);
    if (equal != int64_t(found.own)) cut.last = search.number_of_equal(row, p.n, found.key, equal, int64_t(found.own));
    if (Team::spread || p.k <= kTopKListed) {
      search.gather(row, p.n, false, [&](int64_t j, float x, Weight *number) {
        *number = number_of(j, x);
        return cut.keeps(key_of<type>(x), j);
      });
    } else {
      numbers = reinterpret_cast<Weight *>(index);
      if (threadIdx.x == 0) all.count = 0;
      __syncthreads();
      pass_over<type, aligned>(team, row, p.n, [&](int64_t j, const float(&x)[kVector]) {
#pragma unroll
        for (int e = 0; e < kVector; ++e)
          if ((aligned || j + e < p.n) && cut.keeps(key_of<type>(x[e]), j + e))
            numbers[atomicAdd(&all.count, 1u)] = number_of(j + e, x[e]);
      });
    }
    if (team.rank == 0) sort(numbers, p.k);
  }
  if (team.rank == 0) {
    for (int64_t i = threadIdx.x; i < p.k; i += T) {
      const int64_t at = uint32_t(numbers[i]);
      index[i] = at;
      values[i] = Element<type>::from_f32(load_f32(row, type, at));
    }
  }
  team.meet();  // lists are read no more
}

}  // namespace
}  // namespace pydet
