// What the kernels of scaled_gemm share: scales on the device, and which operands the tensor cores read.
#pragma once

#include "gpu/nvidia/sm90/gemm.h"
#include "gpu/nvidia/sm90/pipe/out.h"
#include "scaled.h"

namespace pydet {
namespace {

struct DeviceScale {
  const char *data;  // NULL: 1
  Type type;
  bool blocks;
  int64_t stride, chunk_stride;
  int64_t batch_stride[kSm90MaxBatch];
};

// Several at once: one branch on their type, and they wait for each other alone.
template <int count>
__device__ __forceinline__ void load_scales(const DeviceScale &scale, const int64_t (&at)[count], float (&to)[count]) {
  if (!scale.data) {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = 1;
  } else if (scale.type == Type::f32) {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = __ldg(reinterpret_cast<const float *>(scale.data) + at[i]);
  } else {
    uint32_t byte[count];
#pragma unroll
    for (int i = 0; i < count; ++i) byte[i] = __ldg(reinterpret_cast<const uint8_t *>(scale.data) + at[i]);
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = f32_from_e8m0(uint8_t(byte[i]));
  }
}
// The same from global memory without passing registers, so that the thread goes on: a scale of fp32 alone. Who waits
// for them does so by wait_for_words(), or on a barrier of which each copying thread's arrival is one.
__device__ __forceinline__ void copy_word(uint32_t to, const char *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_four_words(uint32_t to, const char *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_words() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void arrive_with_words(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Whether one, on the device or as the host has it, can be copied so.
template <class AnyScale> PYDET_HD bool copied(const AnyScale &scale) { return scale.data && scale.type == Type::f32; }
// Each column has its own.
__device__ __forceinline__ bool by_columns(const DeviceScale &scale) {
  return scale.data && !scale.blocks && scale.stride != 0;
}

// ---- Host --------------------------------------------------------------------------------------------------------

constexpr int kScaledUnit = 16;  // bytes: what the copy engine's addresses and strides are multiples of
constexpr int64_t kScaledMost = int64_t(1) << 30;

inline bool aligned(const Matrix &matrix, int64_t k, int64_t k_stride, int64_t extent, int64_t stride) {
  const bool rows = extent == 1 || (stride % kScaledUnit == 0 && stride > 0 && stride < int64_t(1) << 38);
  return k == 0 || (reinterpret_cast<uintptr_t>(matrix.data) % kScaledUnit == 0 && (k == 1 || k_stride == 1) && rows);
}

inline bool aligned_batch(const ScaledGemm &g, int operand) {
  for (int i = 0; i < g.batch.dims; ++i)
    if (g.batch.stride[operand][i] % kScaledUnit) return false;
  return true;
}

inline bool readable(const ScaledGemm &g) {
  return aligned(g.a, g.k, g.a.col_stride, g.m, g.a.row_stride) && aligned_batch(g, g.kA) &&
         aligned(g.b, g.k, g.b.row_stride, g.n, g.b.col_stride) && aligned_batch(g, g.kB) && g.m <= kScaledMost &&
         g.n <= kScaledMost && g.k <= kScaledMost &&
         divide_up(g.m, 128) * divide_up(g.n, 128) <= kScaledMost / g.batch.count && g.batch.dims <= kSm90MaxBatch;
}

// Says what is not readable: after this kernel no other is tried.
inline pydet_status unreadable(const ScaledGemm &g) {
  const bool a = aligned(g.a, g.k, g.a.col_stride, g.m, g.a.row_stride) && aligned_batch(g, g.kA);
  const bool b = aligned(g.b, g.k, g.b.row_stride, g.n, g.b.col_stride) && aligned_batch(g, g.kB);
  if (a && b)
    return fail(PYDET_UNSUPPORTED,
                "scaled_gemm: an extent passes 2^30, or the batch needs more than %d strides, on a GPU", kSm90MaxBatch);
  return fail(PYDET_UNSUPPORTED,
              "scaled_gemm: the tensor cores do not read %s, want its data and strides in multiples of %d"
              " bytes",
              a ? "b" : "a", kScaledUnit);
}

inline DeviceScale scale_of(const ScaledGemm &g, const Scale &scale, int operand) {
  DeviceScale device = {scale.data, scale.type, scale.blocks, scale.stride, scale.chunk_stride, {}};
  for (int i = 0; i < g.batch.dims; ++i) device.batch_stride[i] = g.batch.stride[operand][i];
  return device;
}

}  // namespace
}  // namespace pydet
