// native/gpu/cluster.h on a CPU: what arrives is counted in the word of the mbarrier.
#pragma once

#include "gpu/device.h"

namespace pydet {
namespace {

inline void expect_from_cluster(uint64_t *arrived, int bytes) {
  if (threadIdx.x == 0) *arrived = uint64_t(bytes);
  __syncwarp();
  emulated::arrive_at_cluster();
}
inline void meet_cluster() { emulated::meet_cluster(); }
template <class Piece> void send(void *to, const Piece &piece, uint64_t *arrived, int rank) {
  *static_cast<Piece *>(emulated::in_block(rank, to)) = piece;
  *static_cast<uint64_t *>(emulated::in_block(rank, arrived)) -= sizeof piece;
}
inline void wait_for_cluster(uint64_t *arrived) {
  emulated::wait_until([arrived] { return *arrived == 0; });
}
inline int cluster_block() { return int(blockIdx.x) % emulated::cluster_blocks(); }
inline int cluster_blocks() { return emulated::cluster_blocks(); }
template <class Word> Word *in_cluster_block(Word *mine, int rank) {
  return reinterpret_cast<Word *>(emulated::in_block(rank, (char *)mine));
}
inline void sync_cluster() {
  emulated::arrive_at_cluster();
  emulated::meet_cluster();
}

}  // namespace
}  // namespace pydet
