// RMSNorm quantised in one pass, with the bits of the two: the kernels of norm.h for rows whose y becomes fp8.

#include "gpu/any/norm.h"

namespace pydet {

namespace {

// Calls f with a team that holds a row of n. On CUDA, where that was timed (H200): 8192x5120 77 us, by the next one 92;
// 2048x12288 49 and 52, 8192x2880 44 and 48; but 4096x7168 with weights loaded late 67 and 56. 128x4096 3.7 by 256
// threads, by 128 4.0.
template <class F> pydet_status with_quantizing_team(const RmsNormQuantize &p, const F &f) {
  if constexpr (kGpuDeviceType != PYDET_CUDA) {
    return with_team(p, f);
  } else {
    if (p.n <= 2048) return with_team(p, f);
    if (p.n <= 4096 && p.rows <= 256) return f(Team<256, 2, 1, true>{});
    return with_first<Team<128, 3, 1, false>, Team<128, 4, 1, true>, Team<256, 3, 1, false>, Team<256, 4, 1, true>,
                      Team<256, 5, 1, true>, Team<256, 6, 1, true>, Team<256, 7, 1, true>, Team<256, 8, 1, true>>(p.n,
                                                                                                                  f);
  }
}

}  // namespace

bool rmsnorm_quantize_held_takes(const RmsNormQuantize &p) {
  return p.n <= kLongestHeldRow && all_whole(p) && rows_aligned(p.out, kVector);
}
pydet_status rmsnorm_quantize_held(const RmsNormQuantize &p) {
  const char *name = "rmsnorm_quantize_held";
  return on_device(name, p, [&] {
    return with_type<kUnscaledTypes>(p.x.type, [&](auto type) {
      return with_quantizing_team(p, [&](auto team) {
        constexpr int T = team.T, R = team.R, kRows = kBlock<T> / T * R;
        auto start = [&](auto problem) {
          return launch(blocks_of(name, p, grid_of(divide_up(p.rows, kRows), kBlock<T>), kBlock<T>),
                        norm_kernel<decltype(problem), type, T, team.V, R, team.value>, problem);
        };
        constexpr bool divides = type == Type::f32;
        return divides || p.given() ? start(NormToFp8<true>{p}) : start(NormToFp8<divides>{p});
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
