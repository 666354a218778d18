// native/gpu/nvidia/mma.h on a CPU, but for its barriers in memory. An m16n8k16 is one step of sm90 (NUMERICS.md,
// "GEMM"), as on Hopper.
#pragma once

#include "gpu/device.h"

namespace pydet {

// As an offset into the block's shared memory.
inline uint32_t shared_address(const void *p) {
  return uint32_t(static_cast<const char *>(p) - emulated::shared_begin());
}

inline void named_sync(int id, int threads) { emulated::meet_some(id, threads); }

// Lane l gives the address of row l % 8 of matrix l / 8; it takes elements 2 (l % 4) and one more of row l / 4, or,
// turned, of column l / 4.
template <bool transpose> void load_matrices(uint32_t (&r)[4], uint32_t row) {
  const int lane = int(threadIdx.x) % emulated::kWarp;
  const uint32_t *rows = emulated::meet_warp(row, -1);
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t two[2];
    for (int i = 0; i < 2; ++i) {
      const int along = lane % 4 * 2 + i, across = lane / 4;
      const char *at = emulated::shared_begin() + rows[8 * matrix + (transpose ? along : across)];
      memcpy(&two[i], at + 2 * (transpose ? across : along), sizeof *two);
    }
    r[matrix] = two[0] | uint32_t(two[1]) << 16;
  }
}

template <Type type> float mma_step(const uint16_t *a, const uint16_t *b, float c) {
  constexpr int kFraction = 25, kLeast = is_bf16<type>() ? -126 : -14;
  const auto number = [](uint16_t x) { return is_bf16<type>() ? f32_from_bf16(x) : f32_from_f16(x); };
  const auto exponent = [](float x, int least) { return std::max(int(bits_of(x) >> 23 & 255) - 127, least); };
  int top = -133;
  float odd = std::isfinite(c) ? 0.0f : c;
  if (c != 0.0f && std::isfinite(c)) top = std::max(top, exponent(c, -126));
  for (int k = 0; k < 16; ++k) {
    const float x = number(a[k]), y = number(b[k]);
    if (!std::isfinite(x) || !std::isfinite(y)) odd += x * y;
    else if (x != 0.0f && y != 0.0f) top = std::max(top, exponent(x, kLeast) + exponent(y, kLeast));
  }
  if (!(odd == 0.0f)) return odd;
  const double per_unit = std::ldexp(1.0, kFraction - top);
  int64_t sum = int64_t(double(c) * per_unit);
  for (int k = 0; k < 16; ++k) sum += int64_t(double(number(a[k])) * double(number(b[k])) * per_unit);
  const double exact = std::ldexp(double(sum), top - kFraction);
  float nearest = float(exact);
  if (std::fabs(exact) >= 0x1p128) return nearest;
  if (std::fabs(double(nearest)) > std::fabs(exact)) nearest = std::nextafterf(nearest, 0.0f);
  return nearest + 0.0f;  // -0 becomes +0
}

template <Type type> void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = int(threadIdx.x) % emulated::kWarp, row = lane / 4, column = lane % 4 * 2;
  uint32_t words[6][emulated::kWarp];
  for (int i = 0; i < 6; ++i)
    memcpy(words[i], emulated::meet_warp(i < 4 ? a[i] : i == 4 ? b0 : b1, -1), sizeof words[i]);
  for (int q = 0; q < 4; ++q) {
    uint16_t of_a[16], of_b[16];
    for (int k = 0; k < 16; ++k) {
      const int shift = k % 2 * 16, along = k % 8 / 2;
      of_a[k] = uint16_t(words[k / 8 * 2 + q / 2][row * 4 + along] >> shift);
      of_b[k] = uint16_t(words[4 + k / 8][(column + q % 2) * 4 + along] >> shift);
    }
    c[q] = mma_step<type>(of_a, of_b, c[q]);
  }
}

}  // namespace pydet
