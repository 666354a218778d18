// The tiles of out that the blocks of a kernel share out among them: of one product or a batch of them, or of groups whose
// boundaries the device alone knows. A block takes every gridDim.x-th job, in ascending order.
#pragma once

#include <algorithm>

#include "gpu/device.h"
#include "ops/grouped/problem.h"

namespace pydet {

#if defined(__CUDACC__) || defined(__HIPCC__)

// One tile: its first row and column of its product, that product's extents, and where its operands begin.
struct Job {
  int64_t m0, n0;
  int64_t m, k;
  BatchOffsets at;
};

// for (Jobs<Problem, tile_m, tile_n> jobs(problem); jobs.more(); jobs.advance()) { const Job job = jobs.job(); ... }
template <class Problem, int tile_m, int tile_n> class Jobs;

template <int tile_m, int tile_n> class Jobs<Gemm, tile_m, tile_n> {
 public:
  __device__ explicit Jobs(const Gemm &problem)
      : problem_(problem),
        tiles_m_((problem.m + tile_m - 1) / tile_m),
        tiles_n_((problem.n + tile_n - 1) / tile_n),
        number_(blockIdx.x) {}
  __device__ bool more() { return number_ < tiles_m_ * tiles_n_ * problem_.batch.count; }
  __device__ void advance() { number_ += gridDim.x; }
  __device__ Job job() const {
    return {number_ % tiles_m_ * tile_m, number_ / tiles_m_ % tiles_n_ * tile_n, problem_.m, problem_.k,
            batch_offsets(problem_.batch, number_ / (tiles_m_ * tiles_n_))};
  }
  // An element of out, from where the job's out begins. It is row-major.
  __device__ int64_t out_at(int64_t row, int64_t column) const { return row * problem_.out.row_stride + column; }

 private:
  const Gemm &problem_;
  int64_t tiles_m_, tiles_n_, number_;
};

// Jobs of a group are adjacent, so a block walks the boundaries once, as far as its last job.
template <int tile_m, int tile_n> class Jobs<GroupedGemm, tile_m, tile_n> {
 public:
  __device__ explicit Jobs(const GroupedGemm &problem)
      : problem_(problem), tiles_n_((problem.n + tile_n - 1) / tile_n), number_(blockIdx.x) {}
  __device__ bool more() {
    while (number_ >= tiles_m_ * tiles_n_) {
      if (group_.index + 1 == problem_.groups) return false;
      number_ -= tiles_m_ * tiles_n_;
      group_.next(problem_);
      tiles_m_ = (rows() + tile_m - 1) / tile_m;
    }
    return true;
  }
  __device__ void advance() { number_ += gridDim.x; }
  __device__ Job job() const {
    return {number_ % tiles_m_ * tile_m, number_ / tiles_m_ * tile_n, rows(),
            problem_.depth ? group_.last - group_.first : problem_.k, group_offsets(problem_, group_)};
  }
  __device__ int64_t out_at(int64_t row, int64_t column) const {
    return row * problem_.out.row_stride + column * problem_.out.col_stride;
  }

 private:
  __device__ int64_t rows() const { return problem_.depth ? problem_.m : group_.last - group_.first; }

  const GroupedGemm &problem_;
  GroupWalk group_;
  int64_t tiles_n_, tiles_m_ = 0;  // the latter of this group
  int64_t number_;                 // among this group's jobs
};

#endif

// No more jobs than that: every group with rows may end with a tile that is not full.
inline int64_t most_jobs(const GroupedGemm &problem, int tile_m, int tile_n) {
  const int64_t tiles_n = divide_up(problem.n, tile_n);
  if (problem.depth) return problem.groups * divide_up(problem.m, tile_m) * tiles_n;
  return (divide_up(problem.m, tile_m) + std::min(problem.groups, problem.m)) * tiles_n;
}

// Blocks for them: some for each place on the device, since those of large and small groups take turns there.
inline unsigned blocks_for(const GroupedGemm &problem, int tile_m, int tile_n) {
  constexpr int kBlocksPerMultiprocessor = 16;
  const int64_t blocks = int64_t(kBlocksPerMultiprocessor) * gpu_multiprocessors(problem.device.id);
  return unsigned(std::min(most_jobs(problem, tile_m, tile_n), blocks));
}

}  // namespace pydet
