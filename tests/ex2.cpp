// For tests/test_ex2.py: the exponentials and tanh of attention (native/ex2.h, native/elementary.h).
//   ex2 hash [STEP]   a hash of ex2_f32 of every STEP-th fp32 number, in order, and how many there were
//   ex2 wide          2^(i 2^-23) for all i by 64-bit words, as NUMERICS.md writes it, against ex2_significand: how many differ
//   ex2 ulp           the largest errors of exp2_f32 (in ulp), coarse_exp2_f32 (relative), tanh_f32 (in ulp)
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "elementary.h"
#include "ex2.h"

using namespace pydet;

namespace {

uint32_t significand_in_wide_words(uint32_t i) {
  const uint32_t segment = i >> 17, d = i & 0x1FFFF;
  uint64_t square = 0;
  for (int j = 10; j < 17; ++j)
    if (d >> j & 1) square += ((d & ((1u << j) - 1)) >> (18 - j)) + (uint64_t(1) << (2 * j - 19));
  return uint32_t(((uint64_t(kEx2.start[segment]) << 13) + 6114 + uint64_t(kEx2.slope[segment]) * d +
                   kEx2.curve[segment] * square) >>
                  15);
}

// Numbers in pieces of 4096, 8 lanes: lane = lane * odd + word, lanes mixed in the end. Lanes are vectors to a compiler.
uint64_t hash_of(uint32_t step, uint64_t *numbers) {
  constexpr int kPiece = 4096, kLanes = 8;
  static uint32_t words[kPiece];
  uint64_t lanes[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8};
  *numbers = 0;
  for (uint64_t begin = 0; begin < (uint64_t(1) << 32); begin += uint64_t(step) * kPiece) {
    for (int i = 0; i < kPiece; ++i) {
      const uint64_t number = begin + uint64_t(i) * step;
      words[i] = number >> 32 ? 0 : bits_of(ex2_f32(float_of(uint32_t(number))));
    }
    for (int i = 0; i < kPiece; i += kLanes)
      for (int j = 0; j < kLanes; ++j) lanes[j] = lanes[j] * 0x9E3779B97F4A7C15u + words[i + j];
    *numbers += kPiece;
  }
  uint64_t hash = 0;
  for (uint64_t lane : lanes) hash = (hash ^ lane) * 0xBF58476D1CE4E5B9u, hash ^= hash >> 29;
  return hash;
}

double ulp_of(double exact) { return std::ldexp(1.0, std::max(-126, std::ilogb(exact)) - 23); }

}  // namespace

int main(int count, char **arguments) {
  const char *what = count > 1 ? arguments[1] : "";
  if (!strcmp(what, "hash")) {
    uint64_t numbers = 0;
    const uint64_t hash = hash_of(count > 2 ? uint32_t(atoi(arguments[2])) : 1, &numbers);
    printf("%016llx %llu\n", static_cast<unsigned long long>(hash), static_cast<unsigned long long>(numbers));
  } else if (!strcmp(what, "wide")) {
    uint32_t differ = 0;
    for (uint32_t i = 0; i < 1u << 23; ++i) differ += ex2_significand(i) != significand_in_wide_words(i);
    printf("%u\n", differ);
  } else if (!strcmp(what, "ulp")) {
    double fine = 0, coarse = 0, tanh_most = 0;
    for (uint32_t bits = 0x80000000u; bits <= 0xC2F00000u; bits += 61) {  // -0 down to -120
      const double t = double(float_of(bits)), exact = std::exp2(t);
      fine = std::max(fine, std::fabs(double(exp2_f32(float(t))) - exact) / ulp_of(exact));
      coarse = std::max(coarse, std::fabs(double(coarse_exp2_f32(float(t))) / exact - 1));
    }
    for (uint32_t bits = 1; bits < 0x41800000u; bits += 61) {  // up to 16
      const double x = double(float_of(bits)), exact = std::tanh(x);
      tanh_most = std::max(tanh_most, std::fabs(double(tanh_f32(float(x))) - exact) / ulp_of(exact));
      if (bits_of(tanh_f32(-float(x))) != (bits_of(tanh_f32(float(x))) ^ 0x80000000u)) tanh_most = 1e9;
    }
    printf("%.4f %.4g %.4f\n", fine, coarse, tanh_most);
  } else {
    return 2;
  }
}
