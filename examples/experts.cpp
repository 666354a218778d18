// A layer of a mixture of experts in bf16, on a CUDA stream: tokens sorted by expert go through their experts' two
// matrices. Where each expert's tokens end the device alone need know. No token feels how the others were shared out:
// the program shares them out in two ways, and compares the tokens that went to the same expert in both.
//
// With PYDET_EXAMPLE_CUDA it needs the CUDA runtime and runs on GPU 0; without, or where there is no GPU, on the CPU.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <pydet.hpp>

#ifdef PYDET_EXAMPLE_CUDA
#include <cuda_runtime.h>
#endif

namespace {

using pydet::bfloat16;
constexpr int64_t kTokens = 100, kExperts = 8, kHidden = 256, kInner = 384;
pydet_device device = pydet::cpu();

// Memory that the host and the device reach, kept to the end.
template <class T> T *allocate(int64_t count) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(T);
  void *memory = nullptr;
#ifdef PYDET_EXAMPLE_CUDA
  if (device.device_type == PYDET_CUDA && cudaMallocManaged(&memory, bytes) != cudaSuccess) memory = nullptr;
#endif
  if (device.device_type == PYDET_CPU) memory = std::malloc(bytes);
  if (!memory) std::abort();
  return static_cast<T *>(memory);
}

void wait() {
#ifdef PYDET_EXAMPLE_CUDA
  if (device.device_type == PYDET_CUDA && cudaDeviceSynchronize() != cudaSuccess) std::abort();
#endif
}

uint32_t next(uint32_t &seed) { return seed = seed * 1664525u + 1013904223u; }

// Uniform in [-1, 1), as the upper half of a float.
bfloat16 *random(int64_t count, uint32_t seed) {
  bfloat16 *data = allocate<bfloat16>(count);
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(static_cast<int32_t>(next(seed))) / 2147483648.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    data[i] = static_cast<bfloat16>(bits >> 16);
  }
  return data;
}

int run() {
  void *stream = nullptr;
#ifdef PYDET_EXAMPLE_CUDA
  if (pydet::device_count(PYDET_CUDA) > 0) device = pydet::cuda(0);
#endif
  const bfloat16 *x = random(kTokens * kHidden, 1);
  pydet::tensor up(random(kExperts * kHidden * kInner, 2), {kExperts, kHidden, kInner}, device);
  pydet::tensor down(random(kExperts * kInner * kHidden, 3), {kExperts, kInner, kHidden}, device);
  bfloat16 *sorted = allocate<bfloat16>(kTokens * kHidden), *y = allocate<bfloat16>(kTokens * kHidden);
  int32_t *end = allocate<int32_t>(kExperts);
  pydet::tensor in(sorted, {kTokens, kHidden}, device), out(y, {kTokens, kHidden}, device);
  pydet::tensor middle(allocate<bfloat16>(kTokens * kInner), {kTokens, kInner}, device);
  pydet::tensor ends(end, {kExperts}, device);

  // results[t] and expert[t]: what token t became, and where.
  auto layer = [&](uint32_t seed, int64_t experts, bfloat16 *results, int64_t *expert) {
    int64_t row = 0, token_of[kTokens];
    for (int64_t t = 0; t < kTokens; ++t) expert[t] = (next(seed) >> 16) % experts;
    for (int64_t e = 0; e < kExperts; ++e) {
      for (int64_t t = 0; t < kTokens; ++t)
        if (expert[t] == e) token_of[row++] = t;
      end[e] = static_cast<int32_t>(row);
    }
    for (int64_t r = 0; r < kTokens; ++r)
      std::memcpy(sorted + r * kHidden, x + token_of[r] * kHidden, kHidden * sizeof(bfloat16));
    // The stream orders the two; nothing waits between them, and nobody reads the ends on the host.
    pydet::grouped_gemm(stream, in, up, {}, {}, ends, middle);
    pydet::grouped_gemm(stream, middle, down, {}, {}, ends, out);
    wait();
    for (int64_t r = 0; r < kTokens; ++r)
      std::memcpy(results + token_of[r] * kHidden, y + r * kHidden, kHidden * sizeof(bfloat16));
  };

  static bfloat16 first[kTokens * kHidden], second[kTokens * kHidden];
  int64_t expert[kTokens], other[kTokens];
  layer(5, kExperts, first, expert);
  layer(6, 3, second, other);  // three experts get all of the tokens
  int64_t met = 0, same = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    if (expert[t] != other[t]) continue;
    ++met;
    same += !std::memcmp(first + t * kHidden, second + t * kHidden, kHidden * sizeof(bfloat16));
  }
  std::printf("pydet %s, %s: of %d tokens that met the same expert twice, %d have the same bits\n", pydet_version(),
              pydet_last_kernel(), static_cast<int>(met), static_cast<int>(same));
  return met > 0 && same == met ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const pydet::error &problem) {
    std::fprintf(stderr, "experts: %s\n", problem.what());
    return 1;
  }
}
