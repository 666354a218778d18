// y = round(chain_k(x, w) + bias) for up to 128 rows of x and many weights, on Hopper's tensor cores, arithmetic sm90:
// the decode step at memory speed, with the bits of gemm.cu.
//
//   D = +0 or y;  D = step(D, x[m, 16i .. 16i+15], w[n, 16i .. 16i+15]) for i ascending            without k_chunk
//   D = +0 or y;  D = D + s_c for chunks c ascending, s_c = such a chain from +0 over its own k    with k_chunk
//
// or, of a batch whose matrices are the chunks of one product side by side along k, each s_c to its own place.
//
// x is the 64-row operand of wgmma, one warpgroup for each 64, and w its n = 16 to 96, so that tiles can be so narrow
// that every SM has one. (The rows of that operand that x does not have are whatever lies behind it in shared memory;
// nothing of theirs is stored.) skinny.h has the rings that the operands come through. What is left of the time where N
// is small is the chain: 25 cycles a step, 3.6 us for K = 4096. wgmma alone takes 20, which is the time to read 64 rows
// of x from shared memory. The file is compiled twice: for weights with k adjacent, and with n adjacent, as the gradient
// of x has them.

#include "gpu/cluster.h"
#include "gpu/nvidia/sm90/pipe/wgmma.h"
#include "gpu/nvidia/sm90/skinny.h"

namespace pydet {
namespace {

constexpr bool kTurned = PYDET_SKINNY_ALONG_N;  // this object's kernels: w has n adjacent, not k
constexpr int kWarpgroupRows = kSkinnyWarpgroupRows, kNarrowRows = kSkinnyNarrowRows;
constexpr int kFewM = 32;  // of which long stages have room in shared memory

// `warpgroups` for 64 rows of x each; `chunks`: there is k_chunk; `parts`: the blocks of a cluster share the chunks of a
// tile; `few`: at most kFewM rows of x.
template <Type input, int tile_rows, int warpgroups, bool chunks, bool parts, bool few> struct Shape {
  static constexpr Type type = input;
  static constexpr bool turned = kTurned;
  static constexpr bool prefetches = !kTurned;  // there it gained nothing
  // Where n is adjacent: rows of w in a box, as wide as a swizzle is
  static constexpr int box_columns = tile_rows % 64 == 0 ? 64 : tile_rows % 32 == 0 ? 32 : 16;
  static constexpr int rows = tile_rows;
  static constexpr bool chunked = chunks, split = parts;
  static constexpr int consumer_warps = warpgroups * 4, arrivals = warpgroups;
  static constexpr int registers = rows / 2;  // accumulators a thread
  // Boxes along k in a stage: about 8 KiB of w, and more where the chain decides, since each stage costs it 100 cycles
  static constexpr int stage_blocks = few && rows <= kNarrowRows ? 4 : rows <= 48 ? 2 : 1;
  static constexpr int stage_steps = stage_blocks * kBlockSteps;
  static constexpr int w_block_bytes = rows * kRowBytes, w_bytes = stage_blocks * w_block_bytes;
  static constexpr int threads = consumer_warps * 32 + 64;  // and a warp to load w, one to load x
  static_assert(w_block_bytes % (kAtomRows * kRowBytes) == 0, "tiles are whole swizzle atoms");
  static_assert(!split || (chunked && warpgroups == 1), "chunks side by side");
};

// Where in the rings a warpgroup reads, and the barriers of the stage that its wgmma group in flight may still read.
template <class S> struct Reader {
  const Layout<S> &at;
  const int warpgroup, thread;
  Cursor<kAnyCount> x, w;
  uint32_t x_reading = 0, w_reading = 0;
  bool x_ready = false, w_ready = false;  // the next stage, as far as is known

  __device__ __forceinline__ Reader(const Problem &p, const Layout<S> &layout, int group)
      : at(layout), warpgroup(group), thread(int(threadIdx.x) % kWarpgroup), x(p.x_stages), w(p.w_stages) {}

  // The stage before has been read.
  __device__ __forceinline__ void release() {
    if (w_reading && thread == 0) {
      barrier_arrive(x_reading);
      barrier_arrive(w_reading);
    }
    w_reading = 0;
  }

  // On to the next stage; the one left is released after that. Asking for it already, while the tensor cores are
  // busy, takes the barriers' latency out of the chain.
  __device__ __forceinline__ void next() {
    const uint32_t x_left = at.x_empty(x.stage), w_left = at.w_empty(w.stage);
    x.next(), w.next();
    w_ready = barrier_ready(at.w_full(w.stage), w.parity);
    x_ready = barrier_ready(at.x_full(x.stage), x.parity);
    wgmma_wait<1>();
    release();
    x_reading = x_left;
    w_reading = w_left;
  }

  // Starts `steps` steps on the next stage, the first from +0 if `fresh`, and frees the one before.
  __device__ __forceinline__ void advance(float (&d)[S::registers], int steps, bool fresh) {
    if (!w_ready) barrier_wait(at.w_full(w.stage), w.parity);
    if (!x_ready) barrier_wait(at.x_full(x.stage), x.parity);
    const uint64_t x_tile = wgmma_descriptor<true>(at.x_stage(x.stage) + warpgroup * kWarpgroupRows * kRowBytes);
    const uint64_t w_tile = wgmma_descriptor<!S::turned, S::turned ? S::box_columns : 64>(at.w_stage(w.stage));
    wgmma_fence();
    if (!S::chunked || steps == S::stage_steps) {
#pragma unroll
      for (int i = 0; i < S::stage_steps; ++i) step(d, x_tile, w_tile, i, i || !fresh);
    } else {
#pragma unroll 1
      for (int i = 0; i < steps; ++i) step(d, x_tile, w_tile, i, i || !fresh);
    }
    wgmma_commit();
    next();
  }

  __device__ __forceinline__ void step(float (&d)[S::registers], uint64_t x_tile, uint64_t w_tile, int i, int add) {
    // 64-bit additions, which ptxas does ahead for all steps: changing the low half alone left it one set of uniform
    // registers for all of them, and each step waited until the one before had read it, 15 cycles
    const int block = i / kBlockSteps, along = i % kBlockSteps * kStep * 2;
    const int w_along = S::turned ? i % kBlockSteps * kStep * S::box_columns * 2 : along;
    wgmma<S::type, true, !S::turned>(d, x_tile + block * (at.x_block_bytes >> 4) + (along >> 4),
                                     w_tile + ((block * S::w_block_bytes + w_along) >> 4), add);
  }

  // The accumulators may be read.
  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
    release();
  }

  // The steps from `first` to before `end`; if `restarts`, from +0. The last stage's steps past K read zeros, which
  // change nothing in a chain that has taken a step.
  __device__ __forceinline__ void run(float (&d)[S::registers], int first, int end, bool restarts) {
#pragma unroll 1
    for (int start = first; start < end; start += S::stage_steps)
      advance(d, S::chunked ? min(S::stage_steps, end - start) : S::stage_steps, restarts && start == first);
    finish();
  }

  // Where the first block of the cluster has this thread's elements 4i to 4i + 3 of another's sum.
  __device__ __forceinline__ uint32_t sum_place(const Problem &p, int sum, int i) {
    return at.sums + sum * sum_bytes<S>(p.m) + (i * (sum_bytes<S>(p.m) / S::registers / 4) + thread) * 16;
  }
  __device__ __forceinline__ bool has_rows(const Problem &p) { return thread / 32 * kWarpRows < p.m; }

  // d = the chain of one tile, or the sum of its chunks, from d. Of a tile that is split, the first block adds up all
  // chunks: its own, which are the first, then the others', which these store in its shared memory. Sums that are wanted
  // apart go to keep(sum, chunk) instead.
  template <class Keep> __device__ __forceinline__ void chain(float (&d)[S::registers], const Problem &p, Keep keep) {
    const Part part(p, S::split);
    if constexpr (!S::chunked) {
      run(d, 0, p.steps, false);
    } else {
      float sum[S::registers];
      for (int chunk = part.first; chunk < part.end; chunk += p.chunk_steps) {
        run(sum, chunk, chunk + min(p.chunk_steps, part.end - chunk), true);
        if (p.apart) {
          keep(sum, chunk / p.chunk_steps);
        } else if (part.first == 0) {
#pragma unroll
          for (int i = 0; i < S::registers; ++i) d[i] = d[i] + sum[i];
        } else if (has_rows(p)) {
#pragma unroll
          for (int i = 0; i < S::registers / 4; ++i)
            send(sum_place(p, (chunk - p.part_steps) / p.chunk_steps, i),
                 make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]), at.sums_full(), 0);
        }
      }
      if (S::split && part.first == 0 && !p.apart) {
        barrier_wait(at.sums_full(), 0);
        if (!has_rows(p)) return;
        const int sums = sums_bytes<S>(p) / sum_bytes<S>(p.m);
#pragma unroll 1
        for (int j = 0; j < sums; ++j)
#pragma unroll
          for (int i = 0; i < S::registers / 4; ++i) {
            float x[4];
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                         : "r"(sum_place(p, j, i))
                         : "memory");
#pragma unroll
            for (int e = 0; e < 4; ++e) d[4 * i + e] = d[4 * i + e] + x[e];
          }
      }
    }
  }
};

template <class S> __device__ __forceinline__ void multiply(const Problem &p, const Layout<S> &at, int warpgroup) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  Reader<S> reader(p, at, warpgroup);
  for (int tile = int(blockIdx.x) / p.parts; tile < p.tiles; tile += int(gridDim.x)) {
    const int first_row = first_of_x(p, tile) + warp * kWarpRows + lane / 4;
    const int column_0 = first_of_w<S>(p, tile) + lane % 4 * 2;
    const int least_row = (tile & p.x_split) * kTileRows, least_column = (tile >> p.x_split) * S::rows;
    auto is_ours = [&](int row, int column) {
      return row >= least_row && row < p.m && column >= least_column && column < p.n;
    };
    // f(i, row, column) for the accumulators d[i] and d[i + 1] of neighbours in a row of y.
    auto each_pair = [&](auto f) {
#pragma unroll
      for (int i = 0; i < S::registers; i += 2) {
        int row = first_row + i % 4 / 2 * 8, column = column_0 + i / 4 * 8;
        if (is_ours(row, column)) f(i, row, column);
      }
    };
    if (p.bias)
      each_pair([&](int, int row, int column) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.bias + bias_at(p, row, column) * size_of(p.bias_type)));
      });

    float d[S::registers];
    auto begin_at_y = [&] {
      const float *y = reinterpret_cast<const float *>(p.out);
#pragma unroll
      for (int i = 0; i < S::registers; ++i) {
        int row = first_row + i % 4 / 2 * 8, column = column_0 + i / 4 * 8 + i % 2;
        d[i] = is_ours(row, column) ? y[row * p.out_stride + column] : 0.0f;
      }
    };
    auto begin_at_zero = [&] {
#pragma unroll
      for (int i = 0; i < S::registers; ++i) d[i] = 0;
    };
    // A chunk's sum, fp32, to its own place.
    auto keep = [&](const float(&sum)[S::registers], int chunk) {
      each_pair([&](int i, int row, int column) {
        const int64_t index = chunk * p.apart + row * p.out_stride + column;
        store_pair<Type::f32>(p.out, index, sum[i], sum[i + 1], p.pairs, column + 1 < p.n);
      });
    };
    if constexpr (S::chunked) {
      if (p.accumulate) begin_at_y();
      else begin_at_zero();
      reader.chain(d, p, keep);
      if (p.apart) continue;
    } else if (p.accumulate) {
      // ptxas keeps wgmma asynchronous only where each way of setting its accumulators has its own main loop
      begin_at_y();
      reader.chain(d, p, keep);
    } else {
      begin_at_zero();
      reader.chain(d, p, keep);
    }

    if (S::split && cluster_rank() > 0) continue;  // the sums are the first block's
    // The code below runs once: where it was long, fetching its instructions took 4 us.
    if (p.bias)
      with_type<kUnscaledTypes>(p.bias_type, [&](auto type) {
        each_pair([&](int i, int row, int column) {
          d[i] = d[i] + load_f32(p.bias, decltype(type)::value, bias_at(p, row, column));
          if (column + 1 < p.n)
            d[i + 1] = d[i + 1] + load_f32(p.bias, decltype(type)::value, bias_at(p, row, column + 1));
        });
      });
    with_type<kUnscaledTypes>(p.out_type, [&](auto type) {
      each_pair([&](int i, int row, int column) {
        const int64_t index = row * p.out_stride + column;
        store_pair<decltype(type)::value>(p.out, index, d[i], d[i + 1], p.pairs, column + 1 < p.n);
      });
    });
  }
}

template <class S> __global__ void __launch_bounds__(S::threads, 1) skinny_kernel(const __grid_constant__ Problem p) {
  share_out<S>(p, [&](const Layout<S> &at, int warp) { multiply<S>(p, at, warp / 4); });
}

template <int rows> pydet_status launch_plan(const char *name, const Gemm &g, const SkinnyPlan &plan) {
  return with_type<kHalfTypes>(g.a.type, [&](auto type) {
    return either(g.m > kWarpgroupRows && !plan.x_split, [&](auto two) {
      return either(g.k_chunk != 0, [&](auto chunked) {
        auto go = [&](auto split, auto few) {
          using S = Shape<type, rows, two ? 2 : 1, chunked, split, few>;
          return launch_shape<S>(name, g, plan, skinny_kernel<S>);
        };
        if constexpr (rows <= kNarrowRows && !two)
          return either(g.m <= kFewM, [&](auto few) {
            if constexpr (chunked)
              if (plan.parts > 1) return go(std::true_type(), few);
            return go(std::false_type(), few);
          });
        else return go(std::false_type(), std::false_type());
      });
    });
  });
}

}  // namespace

template <int rows, bool turned> pydet_status skinny_sm90(const Gemm &g, const Choice &choice) {
  const auto cut = choice.cut<SkinnyCut>();
  Gemm cut_up = in_one(g);
  cut_up.k_chunk = cut.k_chunk;
  return launch_plan<rows>("cuda_skinny_gemm_sm90", cut_up, cut.plan);
}

// This object's rows.
#if PYDET_SKINNY_WIDE
template pydet_status skinny_sm90<48, kTurned>(const Gemm &, const Choice &);
template pydet_status skinny_sm90<64, kTurned>(const Gemm &, const Choice &);
template pydet_status skinny_sm90<96, kTurned>(const Gemm &, const Choice &);
#else
template pydet_status skinny_sm90<16, kTurned>(const Gemm &, const Choice &);
template pydet_status skinny_sm90<32, kTurned>(const Gemm &, const Choice &);
#endif

}  // namespace pydet
