// How a warp's 16 rows of a product come to memory: by way of pieces of shared memory, 16 rows of 128 bytes each, which
// lie there as the copy engine's swizzle has them: the 16-byte chunk c of row r at c ^ (r % 8).
#pragma once

#include "gpu/nvidia/sm90/pipe/operand.h"
#include "gpu/nvidia/sm90/pipe/shape.h"

namespace pydet {

constexpr int kPieceBytes = kWarpRows * kRowBytes;

// Four 8x8 matrices of 16-bit elements from a warp's fragments to shared memory; lane l gives the address of row l % 8
// of matrix l / 8.
// `transposed`: of its column l % 8.
template <bool transposed = false>
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&fragments)[4]) {
  if constexpr (transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(fragments[0]),
                 "r"(fragments[1]), "r"(fragments[2]), "r"(fragments[3])
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(fragments[0]),
                 "r"(fragments[1]), "r"(fragments[2]), "r"(fragments[3])
                 : "memory");
}

__device__ __forceinline__ uint32_t load_raw(const char *data, int64_t index, Type type) {
  return type == Type::f32 ? reinterpret_cast<const uint32_t *>(data)[index]
                           : reinterpret_cast<const uint16_t *>(data)[index];
}
__device__ __forceinline__ float f32_from_raw(uint32_t raw, Type type) {
  return type == Type::f32    ? float_of(raw)
         : type == Type::bf16 ? f32_from_bf16(uint16_t(raw))
                              : f32_from_f16(uint16_t(raw));
}
__device__ __forceinline__ void store_word(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ float load_word(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void store_pair(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ float2 load_pair(uint32_t address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
  return pair;
}
__device__ __forceinline__ uint4 load_16_bytes(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
template <bool bf16> __device__ __forceinline__ uint32_t round_pair(float x, float y) {
  uint32_t pair;
  if (bf16) asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(x), "f"(y));
  else asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(x), "f"(y));
  return pair;
}

// Where the 16-byte chunk `chunk` of a piece's row r lies.
__device__ __forceinline__ uint32_t chunk_of(uint32_t piece, int r, int chunk) {
  return piece + r * kRowBytes + ((chunk ^ (r & 7)) << 4);
}

// Rounds a warp's accumulators of 64 columns to 16 bits, which fill a piece.
template <bool bf16> __device__ __forceinline__ void stage_halves(const float *d, uint32_t piece, int lane) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float *e = d + 8 * j;
    const uint32_t fragments[4] = {round_pair<bf16>(e[0], e[1]), round_pair<bf16>(e[2], e[3]),
                                   round_pair<bf16>(e[4], e[5]), round_pair<bf16>(e[6], e[7])};
    store_matrices(chunk_of(piece, lane % 16, 2 * j + lane / 16), fragments);
  }
}

// Has the copy engine store a box from shared memory, which others wrote before fence_stores and a barrier.
__device__ __forceinline__ void fence_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int rank> __device__ __forceinline__ void store_box(const CUtensorMap *map, const Place &at, uint32_t from) {
  if constexpr (rank == 2)
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(at.x),
                 "r"(at.y), "r"(from)
                 : "memory");
  else
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(at.x), "r"(at.y), "r"(at.batch[0]), "r"(from)
                 : "memory");
}
__device__ __forceinline__ void commit_boxes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all boxes that this thread has committed have been read, or stored.
__device__ __forceinline__ void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_until_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace pydet
