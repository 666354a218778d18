// Even shares of the last waves: a cluster may begin a tile that the next one ends.
//
// Tiles rarely fill the last wave of clusters. So all but the last whole wave and what is left are dealt out as ever,
// and the tiles of these are laid end to end, cut into equal parts in order, one a cluster. A part has between one and
// two tiles' work, so a tile is cut once at most. A cluster first makes the head of the tile that its part ends in (k from
// 0), leaves the accumulators in the workspace and raises a flag; then its whole tiles; and at last the rest of the tile
// that its part begins in, whose chain it continues from the cluster's before it. The chain is the same, and so the bits.
//
// A head waits for nothing, and is made by the cluster of the next lower index, which starts no later: so no cluster
// waits for one that cannot run, however few there is room for.
#pragma once

#include "gpu/nvidia/sm90/warp_out.h"

namespace pydet {
namespace {

// What the consumers make of a turn.
enum PieceKind : int { kNoTile, kWholeTile, kHead, kTail };

struct Piece {
  int tile, begin, end, kind;  // of k
};

// The pieces of a cluster, in order.
template <bool parts> struct Walk;

template <> struct Walk<false> {
  const Sm90Problem &p;
  const int cluster, clusters;
  __device__ __forceinline__ Walk(const Sm90Problem &p, int cluster, int clusters)
      : p(p), cluster(cluster), clusters(clusters) {}
  __device__ __forceinline__ Piece first() const { return {cluster, 0, p.k, kWholeTile}; }
  __device__ __forceinline__ bool is_one(const Piece &piece) const { return piece.tile < p.tiles; }
  __device__ __forceinline__ void advance(Piece *piece, uint32_t) const { piece->tile += clusters; }
};

template <> struct Walk<true> {
  const Sm90Problem &p;
  const int cluster, clusters;
  Sm90Cut from = {}, to = {};

  __device__ __forceinline__ Walk(const Sm90Problem &p, int cluster, int clusters)
      : p(p), cluster(cluster), clusters(clusters) {
    if (p.handover.tiles == 0) return;
    const int stages = (p.k + kBlockK - 1) / kBlockK;
    from = sm90_cut(cluster, clusters, p.handover.tiles, stages);
    to = sm90_cut(cluster + 1, clusters, p.handover.tiles, stages);
  }
  __device__ __forceinline__ Piece first() const {
    Piece piece;
    advance(&piece, 0);
    return piece;
  }
  __device__ __forceinline__ bool is_one(const Piece &piece) const { return piece.kind != kNoTile; }
  __device__ __forceinline__ void advance(Piece *piece, uint32_t turn) const {
    const int after = int(turn) - p.handover.turns;  // turns since the parts began
    if (after < 0) {
      const int tile = cluster + int(turn) * clusters;
      *piece = {tile, 0, p.k, tile < p.tiles ? kWholeTile : kNoTile};
      return;
    }
    const int first_shared = p.handover.turns * clusters, heads = to.stage > 0;
    if (after < heads) {
      *piece = {first_shared + to.tile, 0, to.stage * kBlockK, kHead};
      return;
    }
    const int tile = from.tile + (from.stage > 0) + after - heads;  // the next whole one
    if (tile < to.tile) *piece = {first_shared + tile, 0, p.k, kWholeTile};
    else if (tile == max(to.tile, from.tile + (from.stage > 0)) && from.stage > 0)
      *piece = {first_shared + from.tile, from.stage * kBlockK, p.k, kTail};
    else *piece = {0, 0, 0, kNoTile};
  }
};

// This thread's accumulators of block `block`, and its warp's flag.
template <class S> __device__ __forceinline__ float *sums_of(const Sm90Problem &p, int block) {
  return p.handover.sums + block * (S::consumers * kWarpgroup) * S::registers + thread_number() * 4;
}
template <class S> __device__ __forceinline__ uint32_t *flag_of(const Sm90Problem &p, int block) {
  return p.handover.flags + block * S::warps + thread_number() / 32;
}

template <class S>
__device__ __forceinline__ void hand_on(const Sm90Problem &p, const float (&d)[S::registers]) {
  float *const to = sums_of<S>(p, int(blockIdx.x));
#pragma unroll
  for (int i = 0; i < S::registers / 4; ++i)
    asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i * S::consumers * kWarpgroup * 4),
                 "f"(d[4 * i]), "f"(d[4 * i + 1]), "f"(d[4 * i + 2]), "f"(d[4 * i + 3])
                 : "memory");
  __syncwarp();
  if (thread_number() % 32 == 0) {
    __threadfence();
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag_of<S>(p, int(blockIdx.x))), "r"(1) : "memory");
  }
}

template <class S> __device__ __forceinline__ void take_over(const Sm90Problem &p, float (&d)[S::registers]) {
  const int block = int(blockIdx.x) - (1 << (p.cluster_m_log + p.cluster_n_log));
  if (thread_number() % 32 == 0) {
    const uint32_t *const flag = flag_of<S>(p, block);
    uint32_t raised = 0;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
    while (!raised);
  }
  __syncwarp();
  const float *const from = sums_of<S>(p, block);
#pragma unroll
  for (int i = 0; i < S::registers / 4; ++i) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(d[4 * i]), "=f"(d[4 * i + 1]), "=f"(d[4 * i + 2]), "=f"(d[4 * i + 3])
                 : "l"(from + i * S::consumers * kWarpgroup * 4)
                 : "memory");
  }
}

}  // namespace
}  // namespace pydet
