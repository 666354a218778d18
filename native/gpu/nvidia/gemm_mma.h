// The objects that gemm_mma.cu is compiled to, one a type, and who calls them (gemm_mma.cpp).
#pragma once

#include "ops/grouped/problem.h"

namespace pydet {

constexpr Type kMmaTypes[] = {Type::bf16, Type::f16};

template <Type type> struct GemmMma {
  static pydet_status tile_64(const Gemm &, bool aligned);
  static pydet_status tile_64(const GroupedGemm &, bool aligned);
  static pydet_status tile_128(const Gemm &);  // of aligned operands
  static pydet_status tile_128(const GroupedGemm &);
};

}  // namespace pydet
