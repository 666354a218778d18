// What the tables of every maker's GPUs ask of a problem.
#pragma once

#include "gpu/gpu.h"
#include "ops/gemm/problem.h"

namespace pydet {

// Enough tiles to give every multiprocessor (compute unit) one: else smaller tiles are faster.
template <int tile_m, int tile_n> bool fills_device(const Gemm &problem) {
  int64_t tiles = divide_up(problem.m, tile_m) * divide_up(problem.n, tile_n) * problem.batch.count;
  return tiles >= gpu_multiprocessors(problem.device.id);
}

}  // namespace pydet
