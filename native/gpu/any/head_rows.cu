// What is asked of rows of logits, scaled or not, and its gradient, in fp32 (NUMERICS.md, "Head"): the CPU's bits.
//
// A block has a row, and passes over it for its maximum, for each of its sums, then for its gradient, by vectors of memory;
// what it reads again the L2 has, of as many rows as it holds. The gradient may take the place of the logits: a thread
// writes what it has read itself.

#include "gpu/any/softmax_row.h"
#include "gpu/kernels.h"
#include "ops/head/formulas.h"

namespace pydet {
namespace {

// Where the vector from column j on lies, of rows or of slabs.
template <Type type> __device__ __forceinline__ char *vector_at(const HeadRows &p, const Rows &rows, int64_t r,
                                                                int64_t j) {
  const int64_t columns = p.slabs.columns;
  if (!columns) return row_at(rows, size_of(type), p.rows, r) + j * size_of(type);
  return slab_row(p, j / columns, r) + j % columns * size_of(type);
}

// The largest number of a row and its column: a NaN before all others, then the first of equal ones.
struct Greedy {
  float most;
  int64_t column;

  __device__ __forceinline__ bool before(float x, int64_t j) const {
    const bool nan = x != x, known = most != most;
    if (nan || known) return nan && (!known || j < column);
    return x > most || (x == most && j < column);
  }
  __device__ __forceinline__ void meet(float x, int64_t j) {
    if (before(x, j)) most = x, column = j;
  }
};

template <Type type, bool scales>
__global__ void __launch_bounds__(kMaxTeam) head_rows_kernel(const __grid_constant__ HeadRows p, bool aligned) {
  constexpr int T = kMaxTeam, W = kVector, kWarps = T / kLogicalWarp;
  __shared__ float sums[3][T], largest[kWarps];
  __shared__ Greedy greediest[kWarps];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const HeadAsked &asked = p.asked;
  const auto read = [&](float z) { return scales ? read_logit(asked, z) : z; };
  const auto given = [&](const Vector &from, int64_t r) {
    return from.data ? reinterpret_cast<const float *>(from.data)[r] : 0.0f;
  };
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    // Calls body(j, z, v, left) for the thread's vectors, of which `left` elements or more are the row's.
    const auto walk = [&](const auto &body) {
      for (int64_t j = W * int64_t(threadIdx.x); j < p.n; j += kRowLanes) {
        const int64_t left = p.n - j;
        float z[W], v[W];
        load_eight(vector_at<type>(p, p.x, r, j), type, 0, left, aligned && left >= W, z);
#pragma unroll
        for (int e = 0; e < W; ++e) v[e] = read(z[e]);
        body(j, z, v, left);
      }
    };
    const auto sum_of = [&](float *exchange, const auto &make) {
      Lanes<T, W, 1> lanes[1];
      float sum[1];
      walk([&](int64_t, const float(&)[W], const float(&v)[W], int64_t left) {
        float first[W], second[W];
        make(v, first, second);
        lanes[0].add_left(0, left, first, second);
      });
      join(lanes, exchange, [](float s) { return s; }, sum);
      return sum[0];
    };
    const auto put = [&](const Vector &to, float value) {
      if (to.data && threadIdx.x == 0) reinterpret_cast<float *>(to.data)[r] = canonical(value);
    };

    KnownRow row = {};
    const int64_t index =
        p.index.wide ? static_cast<const int64_t *>(p.index.data)[r] : static_cast<const int32_t *>(p.index.data)[r];
    row.index = index >= 0 && index < p.n ? index : -1;
    float most = -INFINITY;
    Greedy greedy = {-INFINITY, 0};
    bool any = false;
    walk([&](int64_t j, const float(&)[W], const float(&v)[W], int64_t left) {
#pragma unroll
      for (int e = 0; e < W; ++e) {
        if (e >= left) continue;
        most = larger(most, v[e]);
        if (!asked.greedy) continue;
        if (!any) greedy = {v[e], j + e}, any = true;
        else greedy.meet(v[e], j + e);
      }
    });
    row.max = team_max<T>(most, largest);
    if (asked.greedy) {
      if (!any) greedy.column = INT64_MAX;  // behind all that are -Inf
      for (int apart = kLogicalWarp / 2; apart > 0; apart /= 2) {
        const float other = gpu_shfl_xor(greedy.most, apart, kLogicalWarp);
        const uint32_t low = bits_of(gpu_shfl_xor(float_of(uint32_t(greedy.column)), apart, kLogicalWarp));
        const uint32_t high = bits_of(gpu_shfl_xor(float_of(uint32_t(greedy.column >> 32)), apart, kLogicalWarp));
        greedy.meet(other, int64_t(uint64_t(high) << 32 | low));
      }
      if (threadIdx.x % kLogicalWarp == 0) greediest[threadIdx.x / kLogicalWarp] = greedy;
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int i = 1; i < kWarps; ++i) greedy.meet(greediest[i].most, greediest[i].column);
        reinterpret_cast<int64_t *>(asked.greedy)[r] = greedy.column;
      }
    }
    const float total = sum_of(sums[0], [&](const float(&v)[W], float(&e)[W], float(&one)[W]) {
      exps_of(v, row.max, e);
#pragma unroll
      for (float &x : one) x = 1.0f;
    });
    row.sum = fabsf(row.max) < INFINITY ? total : float_of(kNanF32);
    row.log_sum = log_f32(row.sum);
    if (p.log_prob.data && threadIdx.x == 0) {
      float x = float_of(kNanF32);
      if (row.index >= 0) x = read(load_f32(vector_at<type>(p, p.x, r, row.index), type, 0));
      put(p.log_prob, (x - row.max) - row.log_sum);
    }
    const auto probabilities = [&](const float(&v)[W], float(&probability)[W]) {
      exps_of(v, row.max, probability);
#pragma unroll
      for (int e = 0; e < W; ++e) probability[e] = probability[e] / row.sum;
    };
    if (asked.entropy.data)
      row.entropy = 0.0f - sum_of(sums[1], [&](const float(&v)[W], float(&l)[W], float(&probability)[W]) {
                      probabilities(v, probability);
#pragma unroll
                      for (int e = 0; e < W; ++e) l[e] = logarithm_of(row, v[e]);
                    });
    if (!p.backward) {
      put(asked.entropy, row.entropy);
      put(asked.lse, row.max + row.log_sum);
      if (asked.mean.data) {
        const float sum = sum_of(sums[2], [&](const float(&v)[W], float(&x)[W], float(&one)[W]) {
#pragma unroll
          for (int e = 0; e < W; ++e) x[e] = v[e], one[e] = 1.0f;
        });
        put(asked.mean, sum / float(p.n));
      }
    } else {
      row.of_log_prob = given(p.dlog_prob, r);
      row.of_entropy = given(asked.entropy, r);
      row.of_lse = given(asked.lse, r);
      row.of_mean = given(asked.mean, r) / float(p.n);
      if (p.log_prob.data) __syncthreads();  // its column has been read
      walk([&](int64_t j, float(&z)[W], const float(&v)[W], int64_t left) {
        float probability[W];
        probabilities(v, probability);
#pragma unroll
        for (int e = 0; e < W; ++e)
          z[e] = rounded_as(type, logit_gradient(asked, row, j + e, z[e], v[e], probability[e]));
        char *const to = p.slabs.columns ? vector_at<type>(p, p.x, r, j)
                                         : row_at(p.y, size_of(p.y.type), p.rows, r) + j * size_of(p.y.type);
        store_eight(to, p.y.type, 0, left, aligned && left >= W, z);
      });
    }
    __syncthreads();  // before the next row takes what this one shares
  }
}

}  // namespace

pydet_status head_rows(const HeadRows &p) {
  constexpr int64_t kMostBlocks = 1 << 20;  // more rows are walked in turns
  const bool aligned = rows_aligned(p.x) && rows_aligned(p.y) && reinterpret_cast<uintptr_t>(p.slabs.first) % 16 == 0;
  return by_type("head_rows", p, p.x.type, [&](auto type) {
    return launch(blocks_of("head_rows", p, unsigned(p.rows < kMostBlocks ? p.rows : kMostBlocks), kMaxTeam),
                  p.asked.scales() ? head_rows_kernel<type, true> : head_rows_kernel<type, false>, p, aligned);
  });
}

}  // namespace pydet
