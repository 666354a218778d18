// The ring of stages that a Hopper kernel's operands pass through: mbarriers, registers, clusters, and where a ring
// stands.
//
// Shared addresses are 32-bit.
#pragma once

#include "gpu/nvidia/mma.h"

namespace pydet {

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

// ---- Rings -------------------------------------------------------------------------------------------------------

// A place in a ring of `count` stages, or of as many as the kernel is told: which is next, and the parity of the phase
// that its barriers then end.
constexpr int kAnyCount = 0;
template <int count> struct Cursor {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == count) stage = 0, parity ^= 1;
  }
};
template <> struct Cursor<kAnyCount> {
  int count, stage = 0, parity = 0;
  __device__ __forceinline__ explicit Cursor(int stages) : count(stages) {}
  __device__ __forceinline__ void next() {
    if (++stage == count) stage = 0, parity ^= 1;
  }
};

// S::stages stages of S::stage_bytes each, from `shared` on: S::a_bytes of a's rows, then b's. From S::barriers_at on
// each stage's barrier that it is full, then each one's that it is empty.
template <class S> struct Ring {
  uint32_t shared;
  int stage = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == S::stages) stage = 0, parity ^= 1;
  }
  // On by fewer than all stages, and back.
  __device__ __forceinline__ void skip(int stages) {
    if ((stage += stages) >= S::stages) stage -= S::stages, parity ^= 1;
  }
  __device__ __forceinline__ void back(int stages) {
    if ((stage -= stages) < 0) stage += S::stages, parity ^= 1;
  }

  __device__ __forceinline__ static uint32_t full_of(uint32_t start, int i) { return start + S::barriers_at + i * 8; }
  __device__ __forceinline__ static uint32_t empty_of(uint32_t start, int i) {
    return start + S::barriers_at + (S::stages + i) * 8;
  }
  __device__ __forceinline__ uint32_t full() const { return shared + S::barriers_at + stage * 8; }
  __device__ __forceinline__ uint32_t empty() const { return full() + S::stages * 8; }
  __device__ __forceinline__ uint32_t a() const { return shared + stage * S::stage_bytes; }
  __device__ __forceinline__ uint32_t b() const { return a() + S::a_bytes; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), parity); }
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty(), parity ^ 1); }

  // Who fills it, after the last stage: a block may end when every arrival that others owe it has come.
  __device__ __forceinline__ void end() {
    for (int i = 0; i < S::stages; ++i) {
      wait_empty();
      next();
    }
  }
};

}  // namespace pydet
