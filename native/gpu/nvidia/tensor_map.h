// How the copy engine is told of a matrix in memory: tensor maps, made by the driver's encoder, which is found through
// the runtime so that no driver is linked.
#pragma once

#include <atomic>

#include <cuda.h>

#include "gpu/device.h"

namespace pydet {

// A matrix in memory as the copy engine sees it: `extent` elements adjacent, `rows` of them `row_stride` elements
// apart, up to three batch dimensions; boxes of box_extent by box_rows, in the swizzle of 128, 64 or 32 bytes. `rank` 2
// leaves the batch out.
struct MapShape {
  char *data;
  Type type;
  int64_t extent, rows, row_stride;
  int box_extent, box_rows;
  int rank;
  int64_t batch_shape[3], batch_stride[3];
  int swizzle_bytes = 128;
  int box_batch = 1;  // of the first batch dimension
};

using EncodeTensorMap = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                     const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Asked of the driver once.
inline pydet_status find_encoder(const char *kernel, EncodeTensorMap *encode) {
  static std::atomic<EncodeTensorMap> known{nullptr};
  if ((*encode = known.load(std::memory_order_relaxed))) return PYDET_OK;
  void *entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess)
    return fail(PYDET_DEVICE_ERROR, "%s: this driver has no cuTensorMapEncodeTiled: %s (%d)", kernel,
                gpu_error_text(error), int(error));
  known.store(*encode = reinterpret_cast<EncodeTensorMap>(entry), std::memory_order_relaxed);
  return PYDET_OK;
}

inline pydet_status make_map(const char *kernel, EncodeTensorMap encode, const MapShape &shape, CUtensorMap *map) {
  constexpr CUtensorMapDataType types[] = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                           CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                                           CU_TENSOR_MAP_DATA_TYPE_UINT8};
  int64_t size = size_of(shape.type);
  cuuint64_t extents[5] = {cuuint64_t(shape.extent), cuuint64_t(shape.rows)},
             strides[4] = {cuuint64_t(shape.row_stride * size)};
  cuuint32_t box[5] = {cuuint32_t(shape.box_extent), cuuint32_t(shape.box_rows), cuuint32_t(shape.box_batch), 1, 1},
             steps[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 3; ++i) {
    extents[2 + i] = cuuint64_t(shape.batch_shape[i]);
    strides[1 + i] = cuuint64_t(shape.batch_stride[i] * size);
  }
  const CUtensorMapSwizzle swizzle = shape.swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : shape.swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                                 : CU_TENSOR_MAP_SWIZZLE_32B;
  // With lines of 128 bytes that are asked of memory the L2 asks for their neighbours too, neither gain nor loss where rows
  // begin at lines (six products, an H200). Where they do not, products of few rows take 6 to 15 % longer with these.
  constexpr int64_t kLine = 128;
  const CUtensorMapL2promotion promotion = shape.rows > 1 && shape.row_stride * size % kLine
                                               ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                               : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  const auto encoded = [&] {
    return encode(map, types[int(shape.type)], cuuint32_t(shape.rank), shape.data, extents, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encoded();
  // The driver wants a context, and a thread that does its first work on a GPU has none: PyTorch's backward pass. The
  // runtime gives it the current device's.
  int device = 0;
  if (result == CUDA_ERROR_INVALID_CONTEXT && gpu_get_device(&device) == kGpuSuccess &&
      gpu_set_device(device) == kGpuSuccess)
    result = encoded();
  if (result == CUDA_SUCCESS) return PYDET_OK;
  return fail(PYDET_DEVICE_ERROR, "%s: cuTensorMapEncodeTiled refused a %lldx%lld matrix (CUresult %d)", kernel,
              static_cast<long long>(shape.rows), static_cast<long long>(shape.extent), int(result));
}

}  // namespace pydet
