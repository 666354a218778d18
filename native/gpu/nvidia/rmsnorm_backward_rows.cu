// Gradients of RMSNorm in one pass (norm_backward_rows.h): of rows that begin anywhere, and of heads.

#include "gpu/nvidia/norm_backward_rows.h"

namespace pydet {
namespace {

using P = RmsNormBackward;
constexpr int64_t kLongestOfHeads = 1024;

// A team for long rows of 16 bits that begin anywhere: shorter ones are faster by norm_backward_strided.cu, and of fp32
// it has no registers.
using LongRow = RowShape<512, 4, 4, 1>;
constexpr int64_t kLongestShifted = 8192 - (kVector - 1);

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
    auto by_long_rows = [&](auto type) { return launch_rows<P, type, LongRow, true>(name, p); };
    auto by_heads = [&](auto type) {
      return with_shape_of_head(p.n, [&](auto shape) { return launch_rows<P, type, decltype(shape), false>(name, p); });
    };
    const pydet_status launched =
        shifted ? with_type<kHalfTypes>(p.x.type, by_long_rows) : with_type<kUnscaledTypes>(p.x.type, by_heads);
    if (launched != PYDET_OK) return launched;
  }
  return join_partials(sums, 1);
}

}  // namespace

bool rmsnorm_backward_shifted_takes(const P &p) {
  return p.n <= kLongestShifted && vector_aligned(p.weight) && all_rows_agree(p);
}
// Many elements: few are faster by rmsnorm_backward_unaligned, which reads them twice. Measured on an H100, us:
// 2000x5001 60 and 56, 8000x4001 112 and 169.
bool rmsnorm_backward_shifted_prefers(const P &p) { return p.rows * p.n > 12'000'000; }
pydet_status rmsnorm_backward_shifted(const P &p) { return backward_rows("rmsnorm_backward_shifted", p, true); }

bool rmsnorm_backward_heads_takes(const P &p) {
  return p.n <= kLongestOfHeads && rows_whole(p) && vector_aligned(p.weight);
}
pydet_status rmsnorm_backward_heads(const P &p) { return backward_rows("rmsnorm_backward_heads", p, false); }

}  // namespace pydet
