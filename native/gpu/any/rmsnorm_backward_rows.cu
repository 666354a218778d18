// Gradients of RMSNorm in one pass (norm_backward_rows.h): of rows that begin anywhere, and of heads.

#include "gpu/any/norm_backward_rows.h"

namespace pydet {
namespace {

using P = RmsNormBackward;
constexpr int64_t kLongestOfHeads = 1024;
// Of rows that begin anywhere. Of fp32 no longer one has registers.
int64_t longest(Type type) { return (type == Type::f32 ? 4096 : 8192) - (kVector - 1); }

// Calls f with a team that holds `most` elements.
template <Type type, class F> pydet_status with_shifted_shape(int64_t most, const F &f) {
  if (most <= 16 * 8) return f(RowShape<16, 8, 1, 4>{});
  if (most <= 32 * 8) return f(RowShape<32, 8, 1, 4>{});
  if (most <= 64 * 8) return f(RowShape<64, 8, 1, 2>{});
  if (most <= 128 * 8) return f(RowShape<128, 8, 1, 2>{});
  if (most <= 256 * 8) return f(RowShape<256, 8, 1, 2>{});
  if constexpr (type == Type::f32) {
    return f(RowShape<512, 4, 2, 1>{});
  } else {
    if (most <= 256 * 16) return f(RowShape<256, 8, 2, 1>{});
    return f(RowShape<512, 4, 4, 1>{});
  }
}
template <class F> pydet_status with_shape_of_head(int64_t n, const F &f) {
  if (n <= 8 * 8) return f(RowShape<8, 8, 1, 2>{});
  if (n <= 16 * 8) return f(RowShape<16, 8, 1, 2>{});
  if (n <= 32 * 8) return f(RowShape<32, 8, 1, 2>{});
  return f(RowShape<128, 8, 1, 2>{});
}

pydet_status backward_rows(const char *name, const P &p, bool shifted) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  P sums = p;  // rows of the weights of all heads
  sums.rows = p.rows / p.heads;
  sums.n = p.heads * p.n;
  if (const pydet_status ready = ready_to_join(sums); ready != PYDET_OK) return ready;
  if (p.rows > 0) {
    const pydet_status launched = with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
      if (!shifted)
        return with_shape_of_head(p.n,
                                  [&](auto shape) { return launch_rows<P, type, decltype(shape), false>(name, p); });
      return with_shifted_shape<type>(p.n + kVector - 1,
                                      [&](auto shape) { return launch_rows<P, type, decltype(shape), true>(name, p); });
    });
    if (launched != PYDET_OK) return launched;
  }
  return join_partials(sums, 1);
}

}  // namespace

bool rmsnorm_backward_shifted_takes(const P &p) {
  const int64_t bytes = kVector * size_of(p.x.type);
  return p.n <= longest(p.x.type) && vector_aligned(p.weight) && rows_agree(p.dy, p.x, bytes) &&
         rows_agree(p.dresidual, p.x, bytes) && rows_agree(p.dx, p.x, bytes) &&
         rows_ascend(p.x, p.inner, p.rows, p.n) && rows_ascend(p.dy, p.inner, p.rows, p.n) &&
         rows_ascend(p.dresidual, p.inner, p.rows, p.n);
}
// Many elements: few are faster by rmsnorm_backward_unaligned, which reads them twice. Measured on an H100, us:
// 153670x163 187 and 323, 81818x1163 510 and 786, but 3319x434 22.1 and 14.8, 1364x2603 38.7 and 32.5. Rows that a
// warp holds are joined without a barrier: 30000x255 takes 56, as many elements as 20000x201, which takes 49
// unaligned, here an estimated 35.
bool rmsnorm_backward_shifted_prefers(const P &p) {
  return p.rows * p.n > (p.n + kVector - 1 <= 32 * 8 ? 4'000'000 : 4'500'000);
}
pydet_status rmsnorm_backward_shifted(const P &p) { return backward_rows("rmsnorm_backward_shifted", p, true); }

bool rmsnorm_backward_heads_takes(const P &p) {
  return p.n % kVector == 0 && p.n <= kLongestOfHeads && rows_aligned(p.dy) && rows_aligned(p.x) &&
         rows_aligned(p.dresidual) && rows_aligned(p.dx) && vector_aligned(p.weight);
}
pydet_status rmsnorm_backward_heads(const P &p) { return backward_rows("rmsnorm_backward_heads", p, false); }

}  // namespace pydet
