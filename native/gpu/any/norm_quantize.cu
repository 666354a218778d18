// RMSNorm quantised in one pass, with the bits of the two: the kernels of norm.h for rows whose y becomes fp8.

#include "gpu/any/norm.h"

namespace pydet {

bool rmsnorm_quantize_held_takes(const RmsNormQuantize &p) {
  return p.n <= kLongestHeldRow && all_whole(p) && rows_aligned(p.out, kVector);
}
pydet_status rmsnorm_quantize_held(const RmsNormQuantize &p) {
  const char *name = "rmsnorm_quantize_held";
  return on_device(name, p, [&] {
    return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
      return with_team(p, [&](auto team) {
        constexpr int T = team.T, R = team.R, kRows = kBlock<T> / T * R;
        auto start = [&](auto problem) {
          return launch(blocks_of(name, p, grid_of(divide_up(p.rows, kRows), kBlock<T>), kBlock<T>),
                        norm_kernel<decltype(problem), type, T, team.V, R, team.value>, problem);
        };
        if (type != Type::f32 && !p.given()) return start(NormToFp8 < type == Type::f32 > {p});
        return start(NormToFp8<true>{p});
      });
    });
  });
}

pydet_status rmsnorm_quantize_general(const RmsNormQuantize &p) {
  const char *name = "rmsnorm_quantize_general";
  return on_device(name, p, [&] {
    return with_first<GeneralTeam<32, 1>, GeneralTeam<32, 4>, GeneralTeam<256, 0>>(p.n, [&](auto team) {
      constexpr int T = team.T, kTeams = kBlock<T> / T;
      return launch(blocks_of(name, p, grid_of(divide_up(p.rows, kTeams), kBlock<T>), kBlock<T>),
                    norm_general_kernel<NormToFp8<true>, T, team.V>, NormToFp8<true>{p}, all_whole(p));
    });
  });
}

}  // namespace pydet
