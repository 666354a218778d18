// wgmma on fp8 operands, both with k adjacent: a step of 32 (NUMERICS.md, "Scaled GEMM").
#pragma once

#include "gpu/nvidia/sm90/pipe/wgmma.h"

namespace pydet {

// The accumulators of m64nNk32 as text and as operands, then one instruction; undefined again below.
#define D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define D1 D0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define D2 D1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define D3 D2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define D4 D3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define D5 D4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define D6 D5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define D7 D6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define D8 D7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define D9 D8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define D10 D9 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define D11 D10 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define R_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R_16(i) R_4(i), R_4(i + 4), R_4(i + 8), R_4(i + 12)
#define WGMMA(n, types, text, a, b, add, ...)                                                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k32.f32." types \
               " {" text "}, " a ", " b ", p, 1, 1;\n}"                                                             \
               : __VA_ARGS__                                                                                        \
               : "l"(a_descriptor), "l"(b_descriptor), "r"(add_to_d))
#define WGMMA_OF(types)                                                                                          \
  do {                                                                                                           \
    if constexpr (n == 16) WGMMA("16", types, D0, "%8", "%9", "%10", R_4(0), R_4(4));                            \
    if constexpr (n == 32) WGMMA("32", types, D1, "%16", "%17", "%18", R_16(0));                                 \
    if constexpr (n == 48) WGMMA("48", types, D2, "%24", "%25", "%26", R_16(0), R_4(16), R_4(20));               \
    if constexpr (n == 64) WGMMA("64", types, D3, "%32", "%33", "%34", R_16(0), R_16(16));                       \
    if constexpr (n == 96) WGMMA("96", types, D5, "%48", "%49", "%50", R_16(0), R_16(16), R_16(32));             \
    if constexpr (n == 112)                                                                                      \
      WGMMA("112", types, D6, "%56", "%57", "%58", R_16(0), R_16(16), R_16(32), R_4(48), R_4(52));               \
    if constexpr (n == 144)                                                                                      \
      WGMMA("144", types, D8, "%72", "%73", "%74", R_16(0), R_16(16), R_16(32), R_16(48), R_4(64), R_4(68));     \
    if constexpr (n == 160)                                                                                      \
      WGMMA("160", types, D9, "%80", "%81", "%82", R_16(0), R_16(16), R_16(32), R_16(48), R_16(64));             \
    if constexpr (n == 192)                                                                                      \
      WGMMA("192", types, D11, "%96", "%97", "%98", R_16(0), R_16(16), R_16(32), R_16(48), R_16(64), R_16(80));  \
    if constexpr (n == 128) WGMMA("128", types, D7, "%64", "%65", "%66", R_16(0), R_16(16), R_16(32), R_16(48)); \
  } while (0)

// d = a b, or d + a b, for a warpgroup: 64 rows, n columns, 32 k. Where threads hold what is as for wgmma.
template <Type a_type, Type b_type, int registers>
__device__ __forceinline__ void wgmma_fp8(float (&d)[registers], uint64_t a_descriptor, uint64_t b_descriptor,
                                          int add_to_d) {
  constexpr int n = 2 * registers;
  static_assert(
      n == 16 || n == 32 || n == 48 || n == 64 || n == 96 || n == 112 || n == 128 || n == 144 || n == 160 || n == 192,
      "no instruction here");
  if constexpr (a_type == Type::e4m3 && b_type == Type::e4m3) WGMMA_OF("e4m3.e4m3");
  else if constexpr (a_type == Type::e4m3) WGMMA_OF("e4m3.e5m2");
  else if constexpr (b_type == Type::e4m3) WGMMA_OF("e5m2.e4m3");
  else WGMMA_OF("e5m2.e5m2");
}

#undef WGMMA_OF
#undef WGMMA
#undef R_16
#undef R_4
#undef D11
#undef D10
#undef D9
#undef D8
#undef D7
#undef D6
#undef D5
#undef D4
#undef D3
#undef D2
#undef D1
#undef D0

}  // namespace pydet
