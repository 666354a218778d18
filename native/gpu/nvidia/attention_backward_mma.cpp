// Attention's gradients on tensor cores through mma.sync, for every layout, option and width: the general kernels of
// sm90 and sm80, one after the other.

#include "gpu/kernels.h"
#include "gpu/nvidia/attention_backward_mma.h"

namespace pydet {
namespace {

constexpr const char *kName = "attention_backward_mma";

// Whether vectors of eight elements begin at multiples of 16 bytes.
bool in_vectors(const Heads &x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.sequence_stride % kVector == 0 &&
         x.head_stride % kVector == 0 && x.token_stride % kVector == 0;
}

AttentionBackwardWay way_of(const AttentionBackward &p) {
  const Attention &f = p.forward;
  const int wider = used(f.d > f.e ? f.d : f.e);
  const bool whole = wider <= kPiece || shared_bytes(wider) <= gpu_shared_bytes(f.device.id);
  return {whole ? wider : kPiece, in_vectors(f.q) && in_vectors(f.k) && in_vectors(f.v) && in_vectors(p.dout)};
}

}  // namespace

pydet_status attention_backward_mma(const AttentionBackward &p) {
  const Attention &f = p.forward;
  DeviceGuard guard(f.device.id);
  if (guard.error() != kGpuSuccess) return device_error(kName, guard.error());
  const bool keys = p.dk.data && f.sequences * f.groups * f.keys > 0,
             queries = p.dq.data && f.sequences * rows_of_group(f) > 0;
  PYDET_TRY(load_rows(kName, p));
  const AttentionBackwardWay way = way_of(p);
  if (keys) PYDET_TRY(load_keys_mma(kName, p, way));
  if (queries) PYDET_TRY(load_queries_mma(kName, p, way));
  PYDET_TRY(make_deltas(kName, p));
  if (keys) PYDET_TRY(make_keys_mma(kName, p, way));
  if (queries) PYDET_TRY(make_queries_mma(kName, p, way));
  return make_sink_gradients(kName, p);
}

}  // namespace pydet
