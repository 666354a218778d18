// For tests/test_quantize.py: quotient_of (native/ops/scaled/problem.h) against a division. Mantissas: all of x, of fp16 and so of
// bf16 too, by every STEP-th of s and those next to powers of two, with the quotient's bits. Exponents: x and scales as
// quantisation makes them, zeros, subnormals and what is not finite, with the bytes of both fp8 types. Prints the pairs
// and how many differ, and how many would without the correction.  quotients [STEP]
#include <cstdio>
#include <cstdlib>
#include <random>

#include "ops/scaled/problem.h"

using namespace pydet;

namespace {

template <Type type> uint8_t byte_of(float quotient) {
  return uint8_t(Element<type>::from_f32(clamped(quotient, largest_of(type))));
}

struct Count {
  uint64_t pairs = 0, differ = 0, uncorrected = 0;
};

void mantissas(uint32_t of_s, Count *count) {
  const float s = float_of(0x3F800000u | of_s);
  const Divisor by = divisor_of(s);
  for (uint32_t of_x = 0; of_x < 1024; ++of_x) {
    const float x = float_of(0x3F800000u | of_x << 13), want = x / s;
    ++count->pairs;
    count->differ += bits_of(quotient_of(x, by)) != bits_of(want);
    count->uncorrected += bits_of(x * by.inverse) != bits_of(want);
  }
}

template <Type x_type, Type type> void exponents(bool infinite, std::mt19937_64 *random, Count *count) {
  const auto number = [&] { return uint16_t((*random)()); };
  const float amax = infinite ? float_of(0x7F800000u) : Element<x_type>::to_f32(number());
  const float s = scale_of(bits_of(amax) & 0x7FFFFFFFu, largest_of(type), false);
  const Divisor by = divisor_of(s);
  for (int i = 0; i < 64; ++i) {
    float x = Element<x_type>::to_f32(i < 4 ? uint16_t(i << 15 | (i & 2)) : number());
    if ((bits_of(x) & 0x7FFFFFFFu) > (bits_of(amax) & 0x7FFFFFFFu)) x = i % 2 ? amax : -amax;
    ++count->pairs;
    count->differ += byte_of<type>(quotient_of(x, by)) != byte_of<type>(x / s);
    count->uncorrected += byte_of<type>(x * by.inverse) != byte_of<type>(x / s);
  }
}

void print(const char *name, const Count &count) {
  std::printf("%s: %llu pairs, %llu differ, %llu without the correction\n", name, (unsigned long long)count.pairs,
              (unsigned long long)count.differ, (unsigned long long)count.uncorrected);
}

}  // namespace

int main(int argc, char **argv) {
  const uint32_t step = argc > 1 ? uint32_t(std::atoi(argv[1])) : 1021, end = 1u << 23;
  Count of_mantissas, of_exponents;
  for (uint32_t s = 0; s < end; s += step) mantissas(s, &of_mantissas);
  for (uint32_t bit = 1; bit < end; bit *= 2)
    for (uint32_t s : {bit - 1, bit, bit + 1, end - bit}) mantissas(s, &of_mantissas);
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    const bool infinite = i % 100 == 0;
    exponents<Type::bf16, Type::e4m3>(infinite, &random, &of_exponents);
    exponents<Type::bf16, Type::e5m2>(infinite, &random, &of_exponents);
    exponents<Type::f16, Type::e4m3>(infinite, &random, &of_exponents);
    exponents<Type::f16, Type::e5m2>(infinite, &random, &of_exponents);
  }
  print("mantissas", of_mantissas);
  print("exponents", of_exponents);
}
