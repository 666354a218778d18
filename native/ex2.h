// Hopper's ex2.approx.ftz.f32 as a function of integers (NUMERICS.md, "exp2"): all 2^32 inputs of an H100 and of an H200,
// 0 differ.
#pragma once

#include <math.h>

#include "types.h"

namespace pydet {

#if !defined(__CUDA_ARCH__)
// Of 2^(i 2^-23), by the upper 6 of the 23 bits of i: its start in units of 2^-25, its slope and its curve.
struct Ex2Tables {
  uint32_t start[64], slope[64], curve[64];
};
constexpr Ex2Tables kEx2 = {
    {33554435, 33919818, 34289182, 34662565, 35040018, 35421577, 35807292, 36197209, 36591372, 36989825, 37392616,
     37799797, 38211409, 38627504, 39048131, 39473337, 39903173, 40337690, 40776937, 41220970, 41669836, 42123592,
     42582286, 43045977, 43514717, 43988561, 44467565, 44951786, 45441278, 45936101, 46436314, 46941971, 47453135,
     47969867, 48492225, 49020269, 49554065, 50093674, 50639159, 51190582, 51748011, 52311510, 52881146, 53456983,
     54039091, 54627538, 55222393, 55823725, 56431607, 57046106, 57667297, 58295254, 58930048, 59571754, 60220447,
     60876205, 61539104, 62209220, 62886634, 63571424, 64263672, 64963458, 65670863, 66385972},
    {22713, 22960, 23210, 23463, 23718, 23977, 24238, 24502, 24768, 25038, 25311, 25586, 25865, 26147, 26431, 26719,
     27010, 27304, 27602, 27902, 28206, 28513, 28824, 29138, 29455, 29776, 30100, 30428, 30759, 31094, 31432, 31775,
     32121, 32471, 32824, 33182, 33543, 33908, 34277, 34651, 35028, 35409, 35795, 36185, 36579, 36977, 37380, 37787,
     38198, 38614, 39035, 39460, 39889, 40324, 40763, 41207, 41655, 42109, 42568, 43031, 43500, 43973, 44452, 44936},
    {494, 501, 506, 511, 518, 521, 527, 532, 541, 546, 551, 559, 564, 568, 577, 583, 589, 596, 600, 609, 615, 622,
     627, 633, 641, 647, 655, 661, 670, 677, 686, 691, 699, 705, 715, 721, 730, 739, 748, 753, 763, 773, 779, 787,
     796, 806, 813, 822, 833, 842, 849, 858, 870, 877, 887, 896, 909, 917, 925, 938, 946, 959, 969, 980}};

// d^2 2^-19 of 17 bits, by a squarer that lacks the columns below 2^19.
PYDET_HD uint32_t ex2_square(uint32_t d) {
  uint32_t square = 0;
#if !defined(__CUDACC__)
#pragma GCC unroll 7
#endif
  for (int j = 10; j < 17; ++j)
    square += (((d & ((1u << j) - 1)) >> (18 - j)) + (1u << (2 * j - 19))) & (0u - (d >> j & 1));
  return square;
}

// 2^(i 2^-23) in units of 2^-23: (start 2^13 + 6114 + slope d + curve d^2 2^-19) 2^-15, cut. The sum has 40 bits; its upper
// ones are found in words of 32.
PYDET_HD uint32_t ex2_significand(uint32_t i) {
  const uint32_t row = i >> 17, d = i & 0x1FFFF, slope = kEx2.slope[row];
  const uint32_t low = 6114 + slope * (d & 15) + kEx2.curve[row] * ex2_square(d);
  return (kEx2.start[row] + ((slope * (d >> 4) + (low >> 4)) >> 9)) >> 2;
}
#endif

// 2^x: +0 where that is below 2^-126, Inf from 128 on, NaN for NaN.
PYDET_HD float ex2_f32(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  const float magnitude = fabsf(x);
  const bool beyond = magnitude >= 256.0f;  // of all results but 0 and Inf
  const uint32_t cut = uint32_t(int32_t((beyond || x != x ? 0.0f : magnitude) * 0x1p23f));  // |x| 2^23
  const uint32_t fixed = x < 0 ? ((cut & 0x7FFFFF) ? ~cut : 0u - cut) : cut;
  const int32_t exponent = (int32_t(fixed) >> 23) + 127;
  const float y = float_of(uint32_t(exponent) << 23 | (ex2_significand(fixed & 0x7FFFFF) & 0x7FFFFF));
  const float finite = exponent <= 0 ? 0.0f : exponent >= 255 ? INFINITY : y;
  const float far = x < 0 ? 0.0f : INFINITY;
  return x != x ? float_of(kNanF32) : beyond ? far : finite;
#endif
}

}  // namespace pydet
