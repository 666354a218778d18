// Gradients of LayerNorm, dx and the sums over rows apart (norm_backward_apart.h).

#include "gpu/nvidia/norm_backward_apart.h"

namespace pydet {

bool layernorm_backward_apart_takes(const LayerNormBackward &p) { return apart_takes(p); }

// Of few rows, as RMSNorm's; of whole ones more, where they are long. On an H100, us, beside layernorm_backward_rows:
// 1500x1536 14.5 and 17, 2048x2048 19.0 and 21; but 2048x1024 14.5 and 12.7, 3000x768 19.7 and 15.5.
bool layernorm_backward_apart_prefers(const LayerNormBackward &p) {
  constexpr int64_t kMostBytes = 12 << 20;  // of x
  return p.rows <= (rows_whole(p) && p.n > 1024 ? 2048 : 1024) && p.rows * p.n * size_of(p.x.type) <= kMostBytes;
}

pydet_status layernorm_backward_apart(const LayerNormBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("layernorm_backward_apart", guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
    constexpr const char *kName = "layernorm_backward_apart";
    using Columns = Slice<16, 2, type == Type::f32 ? 8 : 16>;
    if (!rows_whole(p)) return launch_apart<Columns, type, true>(kName, p);
    // Up to a block of rows all of them at once, by narrow columns; then by wide ones.
    if (p.rows <= kDweightBlockRows) return launch_apart<Columns, type, false>(kName, p);
    return launch_apart<Slice<4, 8, 4>, type, false>(kName, p);
  });
}

}  // namespace pydet
