// Hopper's tensor cores (wgmma): a warpgroup's products of a, in shared memory or registers, by b, in shared memory, of
// 16-bit operands (a step of 16 k) or fp8 (a step of 32). Tiles lie as operand.h brings them.
#pragma once

#include "gpu/nvidia/mma.h"
#include "gpu/nvidia/sm90/pipe/shape.h"

namespace pydet {

// How wgmma finds a tile in shared memory. Rows along k (k is adjacent): 8-row atoms follow each other at 1024 bytes.
// Rows along m or n: blocks of `columns` by `depth` k follow each other, 8 k to an atom, in the swizzle of 2 `columns`
// bytes.
template <bool k_adjacent, int columns = 64, int depth = 64>
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  static_assert(columns == 64 || (!k_adjacent && (columns == 32 || columns == 16)), "a swizzle's width");
  constexpr uint64_t kSwizzle = uint64_t(columns == 64 ? 1 : columns == 32 ? 2 : 3) << 62;
  constexpr uint64_t kAtomStride = uint64_t(columns * 2 * 8 >> 4) << 32;
  constexpr uint64_t kBlockStride = uint64_t(k_adjacent ? 1 : columns * depth * 2 >> 4) << 16;
  return kSwizzle | kAtomStride | kBlockStride | (address & 0x3FFFF) >> 4;  // above: the block's rank in its cluster
}
// Added to a descriptor to move on by 16 k, with blocks of 64 columns.
template <bool k_adjacent> constexpr uint64_t kDescriptorStep = (k_adjacent ? 16 * 2 : 16 * 128) >> 4;

// Before the first of a group of products, and whenever their registers have been written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int groups> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// Of a warpgroup's accumulators those of one of its blocks of 64 rows.
template <class S>
__device__ __forceinline__ auto block_of(float (&d)[S::registers], int block) -> float (&)[S::registers / S::blocks] {
  return *reinterpret_cast<float(*)[S::registers / S::blocks]>(d + block * (S::registers / S::blocks));
}

// The accumulators of m64nN as text and as operands, 8 more a line; then X(n, type, text, the numbers of the operands
// after them, accumulators) for the n that is meant. Undefined again below.
#define D_4 "%0, %1, %2, %3"
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
#define D12 D11 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define D13 D12 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define D14 D13 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define D15 D14 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define R_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R0 R_4(0), R_4(4)
#define R1 R0, R_4(8), R_4(12)
#define R2 R1, R_4(16), R_4(20)
#define R3 R2, R_4(24), R_4(28)
#define R4 R3, R_4(32), R_4(36)
#define R5 R4, R_4(40), R_4(44)
#define R6 R5, R_4(48), R_4(52)
#define R7 R6, R_4(56), R_4(60)
#define R8 R7, R_4(64), R_4(68)
#define R9 R8, R_4(72), R_4(76)
#define R10 R9, R_4(80), R_4(84)
#define R11 R10, R_4(88), R_4(92)
#define R12 R11, R_4(96), R_4(100)
#define R13 R12, R_4(104), R_4(108)
#define R14 R13, R_4(112), R_4(116)
#define R15 R14, R_4(120), R_4(124)
#define WGMMA(X, type)                                                                                        \
  do {                                                                                                        \
    if constexpr (n == 8) X("8", type, D_4, "%4", "%5", "%6", "%7", "%8", "%9", "%10", R_4(0));               \
    if constexpr (n == 16) X("16", type, D0, "%8", "%9", "%10", "%11", "%12", "%13", "%14", R0);              \
    if constexpr (n == 32) X("32", type, D1, "%16", "%17", "%18", "%19", "%20", "%21", "%22", R1);            \
    if constexpr (n == 48) X("48", type, D2, "%24", "%25", "%26", "%27", "%28", "%29", "%30", R2);            \
    if constexpr (n == 64) X("64", type, D3, "%32", "%33", "%34", "%35", "%36", "%37", "%38", R3);            \
    if constexpr (n == 80) X("80", type, D4, "%40", "%41", "%42", "%43", "%44", "%45", "%46", R4);            \
    if constexpr (n == 96) X("96", type, D5, "%48", "%49", "%50", "%51", "%52", "%53", "%54", R5);            \
    if constexpr (n == 112) X("112", type, D6, "%56", "%57", "%58", "%59", "%60", "%61", "%62", R6);          \
    if constexpr (n == 128) X("128", type, D7, "%64", "%65", "%66", "%67", "%68", "%69", "%70", R7);          \
    if constexpr (n == 144) X("144", type, D8, "%72", "%73", "%74", "%75", "%76", "%77", "%78", R8);          \
    if constexpr (n == 160) X("160", type, D9, "%80", "%81", "%82", "%83", "%84", "%85", "%86", R9);          \
    if constexpr (n == 176) X("176", type, D10, "%88", "%89", "%90", "%91", "%92", "%93", "%94", R10);        \
    if constexpr (n == 192) X("192", type, D11, "%96", "%97", "%98", "%99", "%100", "%101", "%102", R11);     \
    if constexpr (n == 208) X("208", type, D12, "%104", "%105", "%106", "%107", "%108", "%109", "%110", R12); \
    if constexpr (n == 224) X("224", type, D13, "%112", "%113", "%114", "%115", "%116", "%117", "%118", R13); \
    if constexpr (n == 256) X("256", type, D15, "%128", "%129", "%130", "%131", "%132", "%133", "%134", R15); \
  } while (0)
#define SHARED_16(n, type, text, a, b, add, ta, tb, o5, o6, ...)                                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type \
               "." type " {" text "}, " a ", " b ", p, 1, 1, " ta ", " tb ";\n}"                                   \
               : __VA_ARGS__                                                                                       \
               : "l"(a_descriptor), "l"(b_descriptor), "r"(add_to_d), "n"(int(!a_k_adjacent)),                     \
                 "n"(int(!b_k_adjacent)))
#define REGISTERS_16(n, type, text, a0, a1, a2, a3, b, add, tb, ...)                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type \
               "." type " {" text "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", p, 1, 1, " tb ";\n}"                \
               : __VA_ARGS__                                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor), "r"(add_to_d),                     \
                 "n"(int(!b_k_adjacent)))
#define SHARED_8(n, types, text, a, b, add, o3, o4, o5, o6, ...)                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k32.f32." types \
               " {" text "}, " a ", " b ", p, 1, 1;\n}"                                                             \
               : __VA_ARGS__                                                                                        \
               : "l"(a_descriptor), "l"(b_descriptor), "r"(add_to_d))

template <int n> constexpr bool kHasWgmma = n == 8 || (n % 16 == 0 && n <= 256 && n != 240);

// d = a b, or d + a b, for a warpgroup: 64 rows, n columns, 16 k. Thread t of the warpgroup holds in d[4 i + 2 h + e]
// row 16 (t / 32) + t % 32 / 4 + 8 h, column 8 i + 2 (t % 4) + e.
template <Type type, bool a_k_adjacent, bool b_k_adjacent, int registers>
__device__ __forceinline__ void wgmma(float (&d)[registers], uint64_t a_descriptor, uint64_t b_descriptor,
                                      int add_to_d) {
  constexpr int n = 2 * registers;
  static_assert(kHasWgmma<n>, "no instruction here");
  if constexpr (is_bf16<type>()) WGMMA(SHARED_16, "bf16");
  else WGMMA(SHARED_16, "f16");
}

// The same of an a in registers, two elements in each: a[2 j + h] holds row 16 (t / 32) + t % 32 / 4 + 8 h, columns
// 8 j + 2 (t % 4) and the next. So d[8 i] to d[8 i + 7] of a product, rounded two by two, are step i's a of the next
// product. They stay as they are until the group has been waited for.
template <Type type, bool b_k_adjacent, int registers>
__device__ __forceinline__ void wgmma_from_registers(float (&d)[registers], const uint32_t (&a)[4],
                                                     uint64_t b_descriptor, int add_to_d) {
  constexpr int n = 2 * registers;
  static_assert(kHasWgmma<n>, "no instruction here");
  if constexpr (is_bf16<type>()) WGMMA(REGISTERS_16, "bf16");
  else WGMMA(REGISTERS_16, "f16");
}

// The same of fp8, both operands with k adjacent: a step of 32 (NUMERICS.md, "Scaled GEMM").
template <Type a_type, Type b_type, int registers>
__device__ __forceinline__ void wgmma_fp8(float (&d)[registers], uint64_t a_descriptor, uint64_t b_descriptor,
                                          int add_to_d) {
  constexpr int n = 2 * registers;
  static_assert(kHasWgmma<n>, "no instruction here");
  if constexpr (a_type == Type::e4m3 && b_type == Type::e4m3) WGMMA(SHARED_8, "e4m3.e4m3");
  else if constexpr (a_type == Type::e4m3) WGMMA(SHARED_8, "e4m3.e5m2");
  else if constexpr (b_type == Type::e4m3) WGMMA(SHARED_8, "e5m2.e4m3");
  else WGMMA(SHARED_8, "e5m2.e5m2");
}

#undef SHARED_8
#undef REGISTERS_16
#undef SHARED_16
#undef WGMMA
#undef R15
#undef D15
#undef R14
#undef D14
#undef R13
#undef D13
#undef R12
#undef D12
#undef R11
#undef D11
#undef R10
#undef D10
#undef R9
#undef D9
#undef R8
#undef D8
#undef R7
#undef D7
#undef R6
#undef D6
#undef R5
#undef D5
#undef R4
#undef D4
#undef R3
#undef D3
#undef R2
#undef D2
#undef R1
#undef D1
#undef R0
#undef D0
#undef R_4
#undef D_4

}  // namespace pydet
