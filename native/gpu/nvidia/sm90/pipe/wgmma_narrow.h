// Products of fp8 with 24, 40 and 56 columns, of e4m3 alone: what half of a tile of 48, 80 or 112 has. wgmma.h has the
// others.
#pragma once

#include "gpu/nvidia/sm90/pipe/wgmma.h"

namespace pydet {

#define R_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D_12 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
#define D_20 D_12 ", %12, %13, %14, %15, %16, %17, %18, %19"
#define D_28 D_20 ", %20, %21, %22, %23, %24, %25, %26, %27"
#define WGMMA(n, text, a, b, add, ...)                                                                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3" \
               " {" text "}, " a ", " b ", p, 1, 1;\n}"                                                         \
               : __VA_ARGS__                                                                                    \
               : "l"(a_descriptor), "l"(b_descriptor), "r"(add_to_d))

// As wgmma_fp8, whose widths it has too.
template <Type a_type, Type b_type, int registers>
__device__ __forceinline__ void wgmma_fp8_of(float (&d)[registers], uint64_t a_descriptor, uint64_t b_descriptor,
                                             int add_to_d) {
  constexpr int n = 2 * registers;
  if constexpr (kHasWgmma<n>) {
    wgmma_fp8<a_type, b_type>(d, a_descriptor, b_descriptor, add_to_d);
  } else {
    static_assert(a_type == Type::e4m3 && b_type == Type::e4m3 && (n == 24 || n == 40 || n == 56), "no instruction here");
    if constexpr (n == 24) WGMMA("24", D_12, "%12", "%13", "%14", R_4(0), R_4(4), R_4(8));
    if constexpr (n == 40) WGMMA("40", D_20, "%20", "%21", "%22", R_4(0), R_4(4), R_4(8), R_4(12), R_4(16));
    if constexpr (n == 56)
      WGMMA("56", D_28, "%28", "%29", "%30", R_4(0), R_4(4), R_4(8), R_4(12), R_4(16), R_4(20), R_4(24));
  }
}

#undef WGMMA
#undef D_28
#undef D_20
#undef D_12
#undef R_4

}  // namespace pydet
