// How operands come to shared memory: by the bulk tensor copy engine (TMA), in boxes whose rows have 128 bytes.
//
// Tiles lie as TMA's 128-byte swizzle writes them: rows of 64 16-bit elements, or 128 of fp8, along whichever of k or m
// (n) is adjacent in memory, 8 rows to a 1024-byte atom.
#pragma once

#include "gpu/nvidia/sm90/pipe/ring.h"
#include "gpu/nvidia/sm90/pipe/shape.h"
#include "gpu/nvidia/tensor_map.h"

namespace pydet {

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
  else if constexpr (rank == 3 && !multicast)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.batch[0])
        : "memory");
  else if constexpr (rank == 3)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.batch[0]), "h"(mask)
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

// Loads a box of two dimensions that the L2 is to forget first, or what else `policy` says.
__device__ __forceinline__ void load_evicting(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x, int y,
                                              uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(policy)
      : "memory");
}

// This block's share of an operand's tiles, which it loads for the blocks of `mask`, itself among them: from row
// `first` of the box that one block alone would load.
struct OperandShare {
  int first, mask;
  bool with_others;
};

template <bool k_adjacent, int extent>
__device__ __forceinline__ OperandShare share_of(int rank, int blocks_log, int mask) {
  return {rank * ((k_adjacent ? extent : kBlockK) >> blocks_log), mask, blocks_log > 0};
}

// `extent` along m or n, 64 along k. `start`: of the tile.
template <bool k_adjacent, int extent>
__device__ __forceinline__ void load_operand(const CUtensorMap *map, uint32_t barrier, uint32_t to, int k, int start,
                                             const OperandShare &share, bool batched, const int (&batch)[3]) {
  to += share.first * kRowBytes;
  Place place = {k_adjacent ? k : start, share.first + (k_adjacent ? start : k), {batch[0], batch[1], batch[2]}};
#pragma unroll
  for (int block = 0; block < (k_adjacent ? 1 : (extent + 63) / 64); ++block, place.x += 64, to += kBlockBytes) {
    if (batched) load_box<5, true>(to, map, barrier, place, uint16_t(share.mask));
    else if (share.with_others) load_box<2, true>(to, map, barrier, place, uint16_t(share.mask));
    else load_box<2, false>(to, map, barrier, place, uint16_t(share.mask));
  }
}

// The same share of the first stage, to the L2: while the kernel ahead ends, whose writes the L2 sees.
template <bool k_adjacent, int extent>
__device__ __forceinline__ void ask_for_operand(const CUtensorMap *map, int start, const OperandShare &share) {
#pragma unroll
  for (int block = 0; block < (k_adjacent ? 1 : (extent + 63) / 64); ++block)
    prefetch_box(map, k_adjacent ? 0 : start + block * 64, share.first + (k_adjacent ? start : 0));
}

}  // namespace pydet
