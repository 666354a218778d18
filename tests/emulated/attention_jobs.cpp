// Which jobs the blocks of Hopper's attention find, by what they find them with: jobs.h has no instruction of the GPU there.
#include "gpu/nvidia/sm90/attention/jobs.h"

namespace {

// As ctypes hands them over (test_cuda_emulated.py).
struct Given {
  int sequences, heads, group_heads, pack, warpgroup_queries, left, right, in_turn, most_size, held, most_held, blocks;
  const int32_t *q_start, *k_start;
  int32_t *taken, *followed;
  int numbers;
};
struct Found {
  int block, sequence, head, query, begin, end;
};

}  // namespace

// Each block's jobs, up to `most`; returns how many there are, -1 where threads wait for each other. again: as they were
// found before. sharers: 1, or 2 blocks that share keys, which have all numbers.
extern "C" __attribute__((visibility("default"))) int emulated_attention_jobs(const Given &given, bool again,
                                                                              int sharers, Found *jobs, int most) {
  using namespace pydet;
  AttentionPlan p = {};
  p.sequences = given.sequences;
  p.q_start = given.q_start, p.queries = given.q_start[given.sequences];
  p.k_start = given.k_start, p.keys = given.k_start[given.sequences];
  p.heads = given.heads, p.group_heads = given.group_heads, p.pack = given.pack, p.sharers = sharers,
  p.job_heads = given.heads / (given.pack * sharers);
  p.warpgroup_queries = given.warpgroup_queries, p.job_queries = 2 * given.warpgroup_queries;
  p.left = given.left, p.right = given.right;
  p.in_turn = given.in_turn, p.most_size = given.most_size, p.held = given.held, p.most_held = given.most_held;
  p.taken = given.taken, p.followed = given.followed, p.numbers = given.numbers;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(sharers > 1 ? sharers : given.blocks)), config.blockDim = dim3(32);
  int count = 0;
  const auto put = [&](const Job &job) {
    if (threadIdx.x == 0 && count < most)
      jobs[count] = {int(blockIdx.x), job.sequence, job.head, job.query, job.begin, job.end};
    if (threadIdx.x == 0) ++count;
  };
  const auto find_shared = [&] {
    Walk<128, 2> walk(p);
    Job job;
    for (int number = 0; walk.find(number, &job); ++number) put(job);
  };
  const auto find_all = [&] {
    Walk<128> walk(p);
    Numbers<> numbers(p);
    Job job;
    while (walk.find(numbers.now(), &job)) {
      put(job);
      if (!again) numbers.ask();
      again ? numbers.follow() : numbers.take();
    }
  };
  const auto launched = sharers > 1 ? emulated::launch(config, find_shared) : emulated::launch(config, find_all);
  return launched == cudaSuccess ? count : -1;
}
