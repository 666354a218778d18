// Gradients of RMSNorm, dx and dweight apart (norm_backward_apart.h).

#include "gpu/nvidia/norm_backward_apart.h"

namespace pydet {

bool rmsnorm_backward_apart_takes(const RmsNormBackward &p) { return apart_takes(p); }

// Of few rows. More of them go down a column one after the other, and what is read twice falls out of the L2.
bool rmsnorm_backward_apart_prefers(const RmsNormBackward &p) {
  constexpr int64_t kMostRows = 1024, kMostBytes = 12 << 20;  // of x
  // Of other rows, measured on an H100: rmsnorm_backward_unaligned takes 868x174 in 5.4 us, this kernel in 23, 934x1595
  // in 10.6 and 25, 700x5001 in 21 and 34, but 64x4095 in 8.4 and 7.3.
  if (p.dweight.data && !rows_whole(p) && p.rows > (p.n > 8185 ? 0 : p.n < 3072 ? 16 : 128)) return false;
  return p.rows <= kMostRows && (!p.dweight.data || p.rows * p.n * size_of(p.x.type) <= kMostBytes);
}

pydet_status rmsnorm_backward_apart(const RmsNormBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("rmsnorm_backward_apart", guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    constexpr const char *kName = "rmsnorm_backward_apart";
    if (!rows_whole(p)) return launch_apart<Slice<16, 2, type == Type::f32 ? 8 : 16>, type, true>(kName, p);
    // Up to a block of rows all of them at once, by narrow columns; then by wide ones.
    if (p.rows <= kDweightBlockRows) return launch_apart<Slice<16, 2, 16>, type, false>(kName, p);
    return launch_apart<Slice<4, 8, type == Type::f32 ? 4 : 8>, type, false>(kName, p);
  });
}

}  // namespace pydet
