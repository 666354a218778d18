// The CPU kernels of scaled GEMM and quantisation, once per instruction set, as those of kernels.h.
#pragma once

#include "cpu/kernels.h"
#include "ops/scaled/problem.h"

namespace pydet {

template <class Isa> pydet_status scaled_gemm_ieee(const ScaledGemm &);
template <class Isa> pydet_status scaled_gemm_sm90(const ScaledGemm &);
template <class Isa> pydet_status quantize(const Quantize &);

}  // namespace pydet
