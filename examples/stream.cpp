// One token's next step, alone and in a batch of 64: RMSNorm, then its product with a weight matrix, in bf16 on a CUDA
// stream. The token's bits are the same both times, which the program checks.
//
// With PYDET_EXAMPLE_CUDA it needs the CUDA runtime and runs on GPU 0; without, or where there is no GPU, on the CPU.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <pydet.hpp>

#ifdef PYDET_EXAMPLE_CUDA
#include <cuda_bf16.h>
#include <cuda_runtime.h>
template <> struct pydet::dtype_of<__nv_bfloat16> : pydet::dtype_of<pydet::bfloat16> {};  // its own type is welcome
using bf16 = __nv_bfloat16;
#else
using bf16 = pydet::bfloat16;
#endif

namespace {

constexpr int64_t kTokens = 64, kHidden = 1024, kOutputs = 768, kToken = 7;

// A stream, and memory that the host and the stream's device reach; on the CPU, no stream and plain memory.
struct Place {
  pydet_device device = pydet::cpu();
  void *stream = nullptr;

#ifdef PYDET_EXAMPLE_CUDA
  static void check(cudaError_t status) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "stream: %s\n", cudaGetErrorString(status));
    std::exit(1);
  }
  bool on_gpu() const { return device.device_type != PYDET_CPU; }
  Place() {
    if (pydet::device_count(PYDET_CUDA) == 0) return;
    device = pydet::cuda(0);
    cudaStream_t made;
    check(cudaStreamCreate(&made));
    stream = made;
  }
  void *allocate(size_t bytes) const {
    void *memory = nullptr;
    if (!on_gpu()) return std::malloc(bytes);
    check(cudaMallocManaged(&memory, bytes));
    return memory;
  }
  void synchronize() const {
    if (on_gpu()) check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
  }
  void release(void *memory) const { on_gpu() ? check(cudaFree(memory)) : std::free(memory); }
#else
  void *allocate(size_t bytes) const { return std::malloc(bytes); }
  void synchronize() const {}
  void release(void *memory) const { std::free(memory); }
#endif
};

// Uniform in [-1, 1), as the upper half of a float.
void fill(bf16 *data, int64_t count, uint32_t seed) {
  for (int64_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    float value = static_cast<float>(static_cast<int32_t>(seed)) / 2147483648.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint16_t upper = static_cast<uint16_t>(bits >> 16);
    std::memcpy(static_cast<void *>(data + i), &upper, sizeof upper);
  }
}

int run() {
  Place place;
  auto allocate = [&](int64_t count) { return static_cast<bf16 *>(place.allocate(size_t(count) * sizeof(bf16))); };
  bf16 *x = allocate(kTokens * kHidden), *scale = allocate(kHidden), *w = allocate(kOutputs * kHidden);
  bf16 *normed = allocate(kTokens * kHidden), *batch = allocate(kTokens * kOutputs), *alone = allocate(kOutputs);
  fill(x, kTokens * kHidden, 1);
  fill(scale, kHidden, 2);
  fill(w, kOutputs * kHidden, 3);

  pydet::tensor weights(w, {kOutputs, kHidden}, place.device), scales(scale, {kHidden}, place.device);
  auto options = pydet::options<pydet_rmsnorm_options>();
  options.eps = 1e-5f;
  // The stream orders the two operations; nothing waits between them.
  auto step = [&](bf16 *input, int64_t tokens, bf16 *output) {
    pydet::tensor in(input, {tokens, kHidden}, place.device), middle(normed, {tokens, kHidden}, place.device);
    pydet::tensor out(output, {tokens, kOutputs}, place.device);
    pydet::rmsnorm(place.stream, in, {}, scales, middle, {}, {}, &options);
    pydet::skinny_gemm(place.stream, middle, weights, {}, out);
  };
  step(x, kTokens, batch);
  std::printf("pydet %s on %s: %s for %d tokens", pydet_version(), place.stream ? "a CUDA stream" : "the CPU",
              pydet_last_kernel(), int(kTokens));
  step(x + kToken * kHidden, 1, alone);
  std::printf(", %s for one\n", pydet_last_kernel());
  place.synchronize();

  bool same = std::memcmp(alone, batch + kToken * kOutputs, kOutputs * sizeof(bf16)) == 0;
  bool other = std::memcmp(alone, batch + (kToken + 1) * kOutputs, kOutputs * sizeof(bf16)) != 0;
  std::printf("token %d alone has %s bits it has in the batch\n", int(kToken), same && other ? "the" : "NOT the");

  try {  // what is refused says so, and touches nothing
    pydet::skinny_gemm(place.stream, pydet::tensor(normed, {kTokens, kHidden / 2}, place.device), weights, {},
                       pydet::tensor(batch, {kTokens, kOutputs}, place.device));
    same = false;
  } catch (const pydet::error &refused) {
    std::printf("%s: %s\n", refused.status_name(), refused.what());
  }
  for (bf16 *memory : {x, scale, w, normed, batch, alone}) place.release(memory);
  return same && other ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const pydet::error &problem) {
    std::fprintf(stderr, "stream: %s\n", problem.what());
    return 1;
  }
}
