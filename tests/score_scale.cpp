// For tests/test_attention.py: what attention's launches make of scale and softcap on the host, on a thread that rounds
// otherwise and flushes. Prints how many were compared, and how many differ from what rounds to nearest.
#include <cfenv>
#include <cstdio>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "ops/attention/formulas.h"

using namespace pydet;

namespace {

uint32_t random_word() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return uint32_t(state >> 32);
}

// From 2^-100 on; of the edges, many have all bits of the fraction alike.
float random_factor() {
  const uint32_t word = random_word(), fraction = word % 4 ? word >> 9 : word % 8 ? 0 : 0x7FFFFF;
  return float_of((27 + random_word() % 200) << 23 | fraction);
}

Attention of(float scale, float softcap) {
  Attention a = {};
  a.scale = scale, a.softcap = softcap;
  return a;
}

}  // namespace

int main() {
  struct Pair {
    float scale, softcap, product, quotient;
  };
  std::vector<Pair> pairs;
  for (int i = 0; i < 200000; ++i) {
    const volatile float scale = random_factor(), softcap = random_factor();
    pairs.push_back({scale, softcap, scale * kLog2e, scale / softcap});
  }
  long compared = 0, differ = 0;
  for (int mode : {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO})
    for (int flushes : {0, 1}) {
#if defined(__x86_64__)
      const unsigned saved = _mm_getcsr();
      if (flushes) _mm_setcsr(saved | 0x8040);
#endif
      std::fesetround(mode);
      for (const Pair &pair : pairs) {
        const ScoreScale plain = score_scale(of(pair.scale, 0)), capped = score_scale(of(pair.scale, pair.softcap));
        differ += bits_of(plain.c) != bits_of(pair.product) || bits_of(capped.before_tanh) != bits_of(pair.quotient) ||
                  bits_of(capped.softcap) != bits_of(pair.softcap) || bits_of(plain.softcap) ||
                  bits_of(plain.before_tanh);
        ++compared;
      }
      std::fesetround(FE_TONEAREST);
#if defined(__x86_64__)
      _mm_setcsr(saved);
#endif
    }
  std::printf("%ld %ld\n", compared, differ);
}
