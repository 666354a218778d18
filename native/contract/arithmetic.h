// The arithmetics: how a product's sums are rounded (NUMERICS.md).
#pragma once

#include "contract/types.h"

namespace pydet {

enum class Arithmetic : int32_t {
  automatic = PYDET_AUTO,
  ieee = PYDET_IEEE,
  sm90 = PYDET_SM90,
  sm80 = PYDET_SM80,
  cdna3 = PYDET_CDNA3,
  cdna2 = PYDET_CDNA2,
};

// One row an arithmetic, at its number: its name, and the factors that it takes.
struct ArithmeticRow {
  Arithmetic arithmetic;
  const char *name;
  uint32_t factors;
};
constexpr ArithmeticRow kArithmetics[] = {
    {Arithmetic::automatic, "auto", kUnscaledTypes | kFp8Types},
    {Arithmetic::ieee, "ieee", kUnscaledTypes | kFp8Types},
    {Arithmetic::sm90, "sm90", kHalfTypes | kFp8Types},
    {Arithmetic::sm80, "sm80", kHalfTypes},
    {Arithmetic::cdna3, "cdna3", kHalfTypes},
    {Arithmetic::cdna2, "cdna2", kHalfTypes},
};
constexpr int kArithmeticCount = int(sizeof kArithmetics / sizeof *kArithmetics);
constexpr bool arithmetics_are_in_order() {
  for (int i = 0; i < kArithmeticCount; ++i)
    if (int(kArithmetics[i].arithmetic) != i) return false;
  return true;
}
static_assert(arithmetics_are_in_order(), "row i of kArithmetics is that of arithmetic i");

constexpr const char *arithmetic_name(Arithmetic arithmetic) { return kArithmetics[int(arithmetic)].name; }

constexpr bool is_arithmetic(int32_t asked) { return asked >= 0 && asked < kArithmeticCount; }

}  // namespace pydet
