// Gradients of LayerNorm in one pass, for rows of up to 8192 that begin anywhere (norm_backward_rows.h).

#include "gpu/nvidia/norm_backward_rows.h"

namespace pydet {
namespace {

// Of rows that begin anywhere, of 16 bits alone: shorter ones are faster by norm_backward_strided.cu.
using LongRow = RowShape<512, 4, 4, 1>;

// Of fp32 no longer row has registers.
int64_t longest(Type type) { return type == Type::f32 ? 4096 : 8192; }

// Calls f with a team that holds a row of n.
template <Type type, class F> pydet_status with_shape(int64_t n, const F &f) {
  if (n <= 16 * 8) return f(RowShape<16, 8, 1, 2>{});
  if (n <= 32 * 8) return f(RowShape<32, 8, 1, 2>{});
  if (n <= 64 * 8) return f(RowShape<64, 8, 1, 2>{});
  if (n <= 128 * 8) return f(RowShape<128, 8, 1, 2>{});
  if (n <= 256 * 8) return f(RowShape<256, 8, 1, 2>{});
  if constexpr (type == Type::f32) {
    return f(RowShape<512, 4, 2, 1>{});
  } else {
    if (n <= 256 * 16) return f(RowShape<256, 8, 2, 1>{});
    return f(RowShape<512, 4, 4, 1>{});
  }
}

}  // namespace

bool layernorm_backward_rows_takes(const LayerNormBackward &p) {
  if (!vector_aligned(p.weight)) return false;
  if (rows_whole(p)) return p.n <= longest(p.x.type);
  return p.n <= LongRow::T * LongRow::W * LongRow::V - (kVector - 1) && p.x.type != Type::f32 && all_rows_agree(p);
}

pydet_status layernorm_backward_rows(const LayerNormBackward &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("layernorm_backward_rows", guard.error());
  const RmsNormBackward sums = sums_over_rows(p);
  if (const pydet_status ready = ready_to_join(sums); ready != PYDET_OK) return ready;
  const bool aligned = rows_whole(p);
  if (p.rows > 0) {
    auto of_whole_rows = [&](auto type) {
      return with_shape<type>(p.n, [&](auto shape) {
        return launch_rows<LayerNormBackward, type, decltype(shape), false>("layernorm_backward_rows", p);
      });
    };
    auto of_others = [&](auto type) {
      return launch_rows<LayerNormBackward, type, LongRow, true>("layernorm_backward_rows", p);
    };
    const pydet_status launched =
        aligned ? with_type<kUnscaledTypes>(p.x.type, of_whole_rows) : with_type<kHalfTypes>(p.x.type, of_others);
    if (launched != PYDET_OK) return launched;
  }
  return join_partials(sums, 1);
}

}  // namespace pydet
