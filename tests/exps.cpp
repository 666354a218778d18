// For tests/test_softmax.py: falling_exp_f32 and normal_exp_f32 (native/contract/elementary.h) against exp_f32, for every STEP-th
// fp32 number from -0 down to -Inf. Prints how many there were and how many differ.  exps [STEP]
#include <cstdio>
#include <cstdlib>

#include "contract/elementary.h"

using namespace pydet;

int main(int count, char **arguments) {
  const uint32_t step = count > 1 ? uint32_t(atoi(arguments[1])) : 1;
  uint32_t numbers = 0, differ = 0;
  for (uint32_t bits = 0x80000000u; bits <= 0xFF800000u; bits += step, ++numbers) {
    const float x = float_of(bits), want = exp_f32(x);
    differ += bits_of(falling_exp_f32(x)) != bits_of(want);
    differ += x >= kLowestNormalExp && bits_of(normal_exp_f32(x)) != bits_of(want);
  }
  printf("%u numbers, %u differ\n", numbers, differ);
}
