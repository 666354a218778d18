// Hopper's own instructions under plain names: mbarriers, the bulk tensor copy engine (TMA), wgmma, stmatrix.
//
// Shared addresses are 32-bit. Tiles of operands lie in shared memory as TMA's 128-byte swizzle writes them: rows of 64
// 16-bit elements along whichever of k or m (n) is adjacent in memory, 8 rows to a 1024-byte atom.
#pragma once

#include "gpu/nvidia/mma.h"
#include "gpu/nvidia/tensor_map.h"

namespace pydet {

// ---- Barriers ----------------------------------------------------------------------------------------------------
// Beside those of mma.h. The plain forms carry release and acquire at the scope they need. An explicit .release.cluster
// on the arrive becomes MEMBAR.ALL.GPU and halves a GEMM (315 against 628 TFLOP/s).

// Makes initialised barriers visible to the cluster and to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether a wait would return at once.
__device__ __forceinline__ bool barrier_ready(uint32_t barrier, int parity) {
  uint32_t ready;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
      : "=r"(ready)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ready;
}

// Arrives at the barrier at the same offset in block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, "
      "[remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// The same address in block `rank` of the cluster.
__device__ __forceinline__ uint32_t in_block(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// One thread of a whole warp, of which the compiler knows that it is one.
__device__ __forceinline__ bool elected() {
  uint32_t one;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(one));
  return one;
}

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster. Relaxed: orders no memory but the barriers that fence_barrier_init made visible; the form
// that releases costs a MEMBAR.ALL.GPU, about 1000 cycles.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Registers a thread of this warpgroup may use from here on.
template <int count> __device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count> __device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- The copy engine ---------------------------------------------------------------------------------------------

// A place in a tensor map: x along the adjacent dimension, y along the other, then up to three batch dimensions.
struct Place {
  int x, y;
  int batch[3];
};

__device__ __forceinline__ void prefetch(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Brings a box of two dimensions into the L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap *map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}

// Loads a box into shared memory and counts its bytes on `barrier`; what lies outside of the tensor reads as zero. With
// a mask of more than this block, the same box and count arrive in every block of the mask.
template <int rank, bool multicast> __device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap *map,
                                                                             uint32_t barrier, const Place &at,
                                                                             uint16_t mask) {
  if constexpr (rank == 2 && !multicast)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            to),
        "l"(map), "r"(barrier), "r"(at.x), "r"(at.y)
        : "memory");
  else if constexpr (rank == 2)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "h"(mask)
        : "memory");
  else if constexpr (!multicast)
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.batch[0]), "r"(at.batch[1]), "r"(at.batch[2])
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.batch[0]), "r"(at.batch[1]), "r"(at.batch[2]), "h"(mask)
        : "memory");
}

// Four 8x8 matrices of 16-bit elements from a warp's fragments to shared memory; lane l gives the address of row l % 8
// of matrix l / 8.
// `transposed`: of its column l % 8.
template <bool transposed = false>
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&fragments)[4]) {
  if constexpr (transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(fragments[0]),
                 "r"(fragments[1]), "r"(fragments[2]), "r"(fragments[3])
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(fragments[0]),
                 "r"(fragments[1]), "r"(fragments[2]), "r"(fragments[3])
                 : "memory");
}

// ---- wgmma -------------------------------------------------------------------------------------------------------

// How wgmma finds a tile in shared memory. Rows along k (k is adjacent): 8-row atoms follow each other at 1024 bytes.
// Rows along m or n: blocks of 64 by 64 at kBlockBytes, 8 k to an atom.
constexpr int kBlockBytes = 64 * 64 * 2;
template <bool k_adjacent> __device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62, kAtomStride = uint64_t(1024 >> 4) << 32;
  constexpr uint64_t kBlockStride = uint64_t(k_adjacent ? 1 : kBlockBytes >> 4) << 16;
  return kSwizzle128 | kAtomStride | kBlockStride | (address & 0x3FFFF) >> 4;  // above: the block's rank in its cluster
}
// Added to a descriptor to move on by 16 k.
template <bool k_adjacent> constexpr uint64_t kDescriptorStep = (k_adjacent ? 16 * 2 : 16 * 128) >> 4;

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int groups> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// The accumulators of m64nNk16 as text and as operands, 8 more a line, then one instruction; undefined again below.
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
#define WGMMA(n, type, text, a, b, add, ta, tb, ...)                                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type \
               "." type " {" text "}, " a ", " b ", p, 1, 1, " ta ", " tb ";\n}"                                   \
               : __VA_ARGS__                                                                                       \
               : "l"(a_descriptor), "l"(b_descriptor), "r"(add_to_d), "n"(int(!a_k_adjacent)),                     \
                 "n"(int(!b_k_adjacent)))

// d = a b, or d + a b, for a warpgroup: 64 rows, n columns, 16 k. Thread t of the warpgroup holds in d[4 i + 2 h + e]
// row 16 (t / 32) + t % 32 / 4 + 8 h, column 8 i + 2 (t % 4) + e.
template <Type type, bool a_k_adjacent, bool b_k_adjacent, int registers>
__device__ __forceinline__ void wgmma(float (&d)[registers], uint64_t a_descriptor, uint64_t b_descriptor,
                                      int add_to_d) {
  constexpr int n = 2 * registers;
  static_assert(n == 8 || (n % 16 == 0 && n <= 256 && n != 240), "no instruction here");
  if constexpr (is_bf16<type>()) {
    if constexpr (n == 8) WGMMA("8", "bf16", D_4, "%4", "%5", "%6", "%7", "%8", R_4(0));
    if constexpr (n == 16) WGMMA("16", "bf16", D0, "%8", "%9", "%10", "%11", "%12", R0);
    if constexpr (n == 32) WGMMA("32", "bf16", D1, "%16", "%17", "%18", "%19", "%20", R1);
    if constexpr (n == 48) WGMMA("48", "bf16", D2, "%24", "%25", "%26", "%27", "%28", R2);
    if constexpr (n == 64) WGMMA("64", "bf16", D3, "%32", "%33", "%34", "%35", "%36", R3);
    if constexpr (n == 80) WGMMA("80", "bf16", D4, "%40", "%41", "%42", "%43", "%44", R4);
    if constexpr (n == 96) WGMMA("96", "bf16", D5, "%48", "%49", "%50", "%51", "%52", R5);
    if constexpr (n == 112) WGMMA("112", "bf16", D6, "%56", "%57", "%58", "%59", "%60", R6);
    if constexpr (n == 128) WGMMA("128", "bf16", D7, "%64", "%65", "%66", "%67", "%68", R7);
    if constexpr (n == 144) WGMMA("144", "bf16", D8, "%72", "%73", "%74", "%75", "%76", R8);
    if constexpr (n == 160) WGMMA("160", "bf16", D9, "%80", "%81", "%82", "%83", "%84", R9);
    if constexpr (n == 176) WGMMA("176", "bf16", D10, "%88", "%89", "%90", "%91", "%92", R10);
    if constexpr (n == 192) WGMMA("192", "bf16", D11, "%96", "%97", "%98", "%99", "%100", R11);
    if constexpr (n == 208) WGMMA("208", "bf16", D12, "%104", "%105", "%106", "%107", "%108", R12);
    if constexpr (n == 224) WGMMA("224", "bf16", D13, "%112", "%113", "%114", "%115", "%116", R13);
    if constexpr (n == 256) WGMMA("256", "bf16", D15, "%128", "%129", "%130", "%131", "%132", R15);
  } else {
    if constexpr (n == 8) WGMMA("8", "f16", D_4, "%4", "%5", "%6", "%7", "%8", R_4(0));
    if constexpr (n == 16) WGMMA("16", "f16", D0, "%8", "%9", "%10", "%11", "%12", R0);
    if constexpr (n == 32) WGMMA("32", "f16", D1, "%16", "%17", "%18", "%19", "%20", R1);
    if constexpr (n == 48) WGMMA("48", "f16", D2, "%24", "%25", "%26", "%27", "%28", R2);
    if constexpr (n == 64) WGMMA("64", "f16", D3, "%32", "%33", "%34", "%35", "%36", R3);
    if constexpr (n == 80) WGMMA("80", "f16", D4, "%40", "%41", "%42", "%43", "%44", R4);
    if constexpr (n == 96) WGMMA("96", "f16", D5, "%48", "%49", "%50", "%51", "%52", R5);
    if constexpr (n == 112) WGMMA("112", "f16", D6, "%56", "%57", "%58", "%59", "%60", R6);
    if constexpr (n == 128) WGMMA("128", "f16", D7, "%64", "%65", "%66", "%67", "%68", R7);
    if constexpr (n == 144) WGMMA("144", "f16", D8, "%72", "%73", "%74", "%75", "%76", R8);
    if constexpr (n == 160) WGMMA("160", "f16", D9, "%80", "%81", "%82", "%83", "%84", R9);
    if constexpr (n == 176) WGMMA("176", "f16", D10, "%88", "%89", "%90", "%91", "%92", R10);
    if constexpr (n == 192) WGMMA("192", "f16", D11, "%96", "%97", "%98", "%99", "%100", R11);
    if constexpr (n == 208) WGMMA("208", "f16", D12, "%104", "%105", "%106", "%107", "%108", R12);
    if constexpr (n == 224) WGMMA("224", "f16", D13, "%112", "%113", "%114", "%115", "%116", R13);
    if constexpr (n == 256) WGMMA("256", "f16", D15, "%128", "%129", "%130", "%131", "%132", R15);
  }
}

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
