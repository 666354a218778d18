// What neighbouring blocks, a cluster, send each other (Hopper and later). A block waits for bytes that the others
// write straight into its shared memory, where an mbarrier counts them: nobody waits for writes to memory, as a barrier
// of the cluster with release would. Elsewhere there are no clusters, and none of this is reached.
#pragma once

#include "gpu/device.h"
#if defined(__CUDACC__)
#include "gpu/nvidia/mma.h"
#endif

namespace pydet {
namespace {

#if __CUDA_ARCH__ >= 900

// `bytes` will be sent to this block. All threads, before anything is sent. One thread makes the barrier and arrives at
// it, in its own order; racecheck, which sees both as the whole warp's, warns of a hazard between lanes 31 and 0.
__device__ __forceinline__ void expect_from_cluster(uint64_t *arrived, int bytes) {
  if (threadIdx.x == 0) {
    barrier_init(shared_address(arrived), 1);
    asm volatile("fence.mbarrier_init.release.cluster;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(arrived)),
                 "r"(bytes)
                 : "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Returns when every block of the cluster expects what it will be sent. All threads.
__device__ __forceinline__ void meet_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Writes a piece to the place `to` of block `rank`'s shared memory.
__device__ __forceinline__ void send(void *to, float2 piece, uint64_t *arrived, int rank) {
  asm volatile(
      "{\n.reg .b32 there, counter;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3, %4}, [counter];\n}" ::"r"(
          shared_address(to)),
      "r"(shared_address(arrived)), "r"(rank), "f"(piece.x), "f"(piece.y)
      : "memory");
}
__device__ __forceinline__ void send(uint32_t to, float4 piece, uint32_t arrived, int rank) {
  asm volatile(
      "{\n.reg .b32 there, counter;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counter];\n}" ::"r"(to),
      "r"(arrived), "r"(rank), "f"(piece.x), "f"(piece.y), "f"(piece.z), "f"(piece.w)
      : "memory");
}

// The same for what is read: a block's number of its cluster and the count of them, a word of another block's shared
// memory, and a barrier of all threads after which each sees what the others wrote before.
__device__ __forceinline__ int cluster_block() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ int cluster_blocks() {
  int blocks;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  return blocks;
}
template <class Word> __device__ __forceinline__ Word *in_cluster_block(Word *mine, int rank) {
  Word *there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(mine), "r"(rank));
  return there;
}
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Returns when all that this block expects has been written. The block must not end before.
__device__ __forceinline__ void wait_for_cluster(uint64_t *arrived) { barrier_wait(shared_address(arrived), 0); }

#else

__device__ __forceinline__ void expect_from_cluster(uint64_t *, int) {}
__device__ __forceinline__ void meet_cluster() {}
template <class Piece> __device__ __forceinline__ void send(void *, const Piece &, uint64_t *, int) {}
__device__ __forceinline__ void wait_for_cluster(uint64_t *) {}
__device__ __forceinline__ int cluster_block() { return 0; }
__device__ __forceinline__ int cluster_blocks() { return 1; }
template <class Word> __device__ __forceinline__ Word *in_cluster_block(Word *mine, int) { return mine; }
__device__ __forceinline__ void sync_cluster() { __syncthreads(); }

#endif

}  // namespace
}  // namespace pydet
