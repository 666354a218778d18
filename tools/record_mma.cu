// What the tensor cores of this GPU make of given bits: record_mma.py's device half. mma.sync m16n8k16, fp32 sums.

#include <cstdint>
#include <cuda_runtime.h>

namespace {

// Registers of a lane, g = lane / 4 and t = lane % 4: a holds rows g and g + 8, k 2t and 2t + 8 (two adjacent each), b
// column g of the same k, c rows g and g + 8, columns 2t and 2t + 1.
template <bool bf16> __device__ void step(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (bf16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Matrix i: d [16, 8] = c + a [16, k] b [8, k]^T, k ascending in steps of 16. One warp a matrix.
template <bool bf16>
__global__ void __launch_bounds__(32) chains(const uint16_t *a, const uint16_t *b, const float *c, float *d, int k) {
  const int lane = int(threadIdx.x), g = lane / 4, t = lane % 4;
  a += size_t(blockIdx.x) * 16 * k, b += size_t(blockIdx.x) * 8 * k;
  c += size_t(blockIdx.x) * 128, d += size_t(blockIdx.x) * 128;
  auto pair = [](const uint16_t *at) { return uint32_t(at[0]) | uint32_t(at[1]) << 16; };
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  for (int first = 0; first < k; first += 16) {
    uint32_t left[4], right[2];
    for (int i = 0; i < 4; ++i) left[i] = pair(a + (g + i % 2 * 8) * k + first + 2 * t + i / 2 * 8);
    for (int i = 0; i < 2; ++i) right[i] = pair(b + g * k + first + 2 * t + i * 8);
    step<bf16>(sum, left, right);
  }
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
}

}  // namespace

// All four on the host. Returns a cudaError_t.
extern "C" int record_chains(int bf16, int count, int k, const uint16_t *a, const uint16_t *b, const float *c,
                             float *d) {
  const size_t sizes[] = {size_t(count) * 16 * k * 2, size_t(count) * 8 * k * 2, size_t(count) * 128 * 4};
  char *memory = nullptr;
  cudaError_t error = cudaMalloc(reinterpret_cast<void **>(&memory), sizes[0] + sizes[1] + 2 * sizes[2]);
  if (error != cudaSuccess) return error;
  char *on_b = memory + sizes[0], *on_c = on_b + sizes[1], *on_d = on_c + sizes[2];
  cudaMemcpy(memory, a, sizes[0], cudaMemcpyHostToDevice);
  cudaMemcpy(on_b, b, sizes[1], cudaMemcpyHostToDevice);
  cudaMemcpy(on_c, c, sizes[2], cudaMemcpyHostToDevice);
  auto *kernel = bf16 ? chains<true> : chains<false>;
  kernel<<<count, 32>>>(reinterpret_cast<uint16_t *>(memory), reinterpret_cast<uint16_t *>(on_b),
                        reinterpret_cast<float *>(on_c), reinterpret_cast<float *>(on_d), k);
  error = cudaGetLastError();
  if (error == cudaSuccess) error = cudaMemcpy(d, on_d, sizes[2], cudaMemcpyDeviceToHost);
  cudaFree(memory);
  return error;
}
