// Operands of attention as the copy engine sees them.
#pragma once

#include "gpu/nvidia/sm90/attention/plan.h"
#include "gpu/nvidia/sm90/pipe/shape.h"
#include "gpu/nvidia/tensor_map.h"

namespace pydet {

constexpr int kUnit = 8;  // 16 bytes of an operand

inline bool aligned(const Heads &heads, int64_t sequences, int64_t head_count, int64_t tokens) {
  const auto stride = [](int64_t stride, int64_t extent) {
    return extent <= 1 || (stride % kUnit == 0 && stride >= 0 && stride < int64_t(1) << 38);
  };
  return reinterpret_cast<uintptr_t>(heads.data) % 16 == 0 && stride(heads.sequence_stride, sequences) &&
         stride(heads.head_stride, head_count) && stride(heads.token_stride, tokens) &&
         (tokens <= 1 || heads.token_stride > 0);
}

inline CUresult encode_unpromoted(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                                  const cuuint64_t *extents, const cuuint64_t *strides, const cuuint32_t *box,
                                  const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                  CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  EncodeTensorMap encode;
  if (find_encoder("", &encode)) return CUDA_ERROR_NOT_FOUND;
  return encode(map, type, rank, data, extents, strides, box, steps, interleave, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_NONE, fill);
}
// By a map the L2 fetches 256 bytes at a time. Vectors of 192 bytes, say, begin and end within those, and the other
// heads' part of them is gone when it is wanted: of those, what is asked for alone.
inline EncodeTensorMap encoder_for(const Heads &heads, int64_t extent, EncodeTensorMap encode) {
  return extent * size_of(heads.type) % 128 ? encode_unpromoted : encode;
}

// Boxes of 64 elements of `box` tokens. Dimensions along which nothing moves are left at one place.
inline MapShape map_of(const Heads &heads, int64_t extent, int64_t tokens, int64_t head_count, int64_t sequences,
                       int box) {
  const auto stride = [](int64_t stride, int64_t extent) { return extent > 1 && stride > 0 ? stride : int64_t(kUnit); };
  const bool head_moves = head_count > 1 && heads.head_stride > 0,
             sequence_moves = sequences > 1 && heads.sequence_stride > 0;
  return {heads.data,
          heads.type,
          extent,
          tokens,
          stride(heads.token_stride, tokens),
          kBlockK,
          box,
          5,
          {head_moves ? head_count : 1, sequence_moves ? sequences : 1, 1},
          {stride(heads.head_stride, head_count), stride(heads.sequence_stride, sequences), kUnit}};
}

}  // namespace pydet
