// y = round(chain_k(x, w) + bias) for up to 128 rows of x and many weights, on Hopper's tensor cores, arithmetic sm90:
// the decode step at memory speed, with the bits of gemm_sm90.cu.
//
//   D = +0 or y;  D = step(D, x[m, 16i .. 16i+15], w[n, 16i .. 16i+15]) for i ascending            without k_chunk
//   D = +0 or y;  D = D + s_c for chunks c ascending, s_c = such a chain from +0 over its own k    with k_chunk
//
// x is the 64-row operand of wgmma, one warpgroup for each 64, and w its n = 8 to 128, so that tiles can be so narrow
// that every SM has one. (The rows of that operand that x does not have are whatever lies behind it in shared memory;
// nothing of theirs is stored.) skinny_sm90.h has the rings that the operands come through. What is left of the time
// where N is small is the chain: 35 cycles a step, 5 us for K = 4096; by mma.sync it was 40.

#include "skinny_sm90.h"

namespace pydet {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kWarpgroupRows = 64;
constexpr int kMostM = 2 * kWarpgroupRows;

template <Type input, int tile_rows, int warpgroups, bool chunks> struct Shape {
  static constexpr Type type = input;
  static constexpr int rows = tile_rows;
  static constexpr bool chunked = chunks, restarts = chunks;
  static constexpr int consumer_warps = warpgroups * 4, arrivals = warpgroups;
  static constexpr int registers = rows / 2;                // accumulators a thread
  static constexpr int stage_blocks = rows <= 48 ? 2 : 1;   // boxes along k in a stage: about 8 KiB of w
  static constexpr int stage_steps = stage_blocks * kBlockSteps;
  static constexpr int w_block_bytes = rows * kRowBytes, w_bytes = stage_blocks * w_block_bytes;
  static constexpr int threads = consumer_warps * 32 + 64;  // and a warp to load w, one to load x
  static_assert(w_block_bytes % (kAtomRows * kRowBytes) == 0, "tiles are whole swizzle atoms");
};

// A descriptor moved on in shared memory: one addition, since making it anew cost the chain 10 cycles a step.
__device__ __forceinline__ uint64_t further(uint64_t descriptor, int bytes) {
  return (descriptor & ~uint64_t(0xFFFFFFFFu)) | (uint32_t(descriptor) + uint32_t(bytes >> 4));
}

// Where in the rings a warpgroup reads, and behind that the stage that its wgmma group in flight may still read.
template <class S> struct Reader {
  const Layout<S> &at;
  const int warpgroup, thread;
  Cursor x, w, x_done, w_done;
  bool in_flight = false;

  __device__ __forceinline__ Reader(const Problem &p, const Layout<S> &layout, int group)
      : at(layout), warpgroup(group), thread(int(threadIdx.x) % kWarpgroup), x(p.x_stages), w(p.w_stages),
        x_done(p.x_stages), w_done(p.w_stages) {}

  // The stage before has been read.
  __device__ __forceinline__ void release() {
    if (thread == 0) {
      barrier_arrive(at.x_empty(x_done.stage));
      barrier_arrive(at.w_empty(w_done.stage));
    }
    x_done.next();
    w_done.next();
  }

  // Starts `steps` steps on the next stage, the first from +0 if `fresh`, and frees the one before.
  __device__ __forceinline__ void advance(float (&d)[S::registers], int steps, bool fresh) {
    barrier_wait(at.w_full(w.stage), w.parity);
    barrier_wait(at.x_full(x.stage), x.parity);
    const uint64_t x_tile = wgmma_descriptor<true>(at.x_stage(x.stage) + warpgroup * kWarpgroupRows * kRowBytes);
    const uint64_t w_tile = wgmma_descriptor<true>(at.w_stage(w.stage));
    wgmma_fence();
    if (!S::chunked || steps == S::stage_steps) {
#pragma unroll
      for (int i = 0; i < S::stage_steps; ++i) step(d, x_tile, w_tile, i, i || !fresh);
    } else {
#pragma unroll 1
      for (int i = 0; i < steps; ++i) step(d, x_tile, w_tile, i, i || !fresh);
    }
    wgmma_commit();
    x.next();
    w.next();
    wgmma_wait<1>();
    if (in_flight) release();
    in_flight = true;
  }

  __device__ __forceinline__ void step(float (&d)[S::registers], uint64_t x_tile, uint64_t w_tile, int i, int add) {
    const int block = i / kBlockSteps, along = i % kBlockSteps * kStep * 2;
    wgmma<S::type, true, true>(d, further(x_tile, block * at.x_block_bytes + along),
                               further(w_tile, block * S::w_block_bytes + along), add);
  }

  // The accumulators may be read.
  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
    if (in_flight) release();
    in_flight = false;
  }

  // d = the chain of one tile, or the sum of its chunks, from d. The last stage's steps past K read zeros, which change
  // nothing in a chain that has taken a step.
  __device__ __forceinline__ void chain(float (&d)[S::registers], int steps, int chunk_steps) {
    if constexpr (S::chunked) {
      float sum[S::registers];
      for (int chunk = 0; chunk < steps; chunk += chunk_steps) {
        const int end = min(steps - chunk, chunk_steps) + chunk;
#pragma unroll 1
        for (int start = chunk; start < end; start += S::stage_steps)
          advance(sum, min(S::stage_steps, end - start), start == chunk);
        finish();
#pragma unroll
        for (int i = 0; i < S::registers; ++i) d[i] = d[i] + sum[i];
      }
    } else {
#pragma unroll 1
      for (int start = 0; start < steps; start += S::stage_steps) advance(d, S::stage_steps, false);
      finish();
    }
  }
};

// Rounds and stores x and, if there is one, its neighbour y, at once where `pairs` are aligned. cvt makes a NaN 0x7FFF.
template <Type type>
__device__ __forceinline__ void store_pair(char *out, int64_t index, float x, float y, bool pairs, bool both) {
  if constexpr (type == Type::f32) {
    float *to = reinterpret_cast<float *>(out) + index;
    x = canonical(x), y = canonical(y);
    if (pairs && both) {
      *reinterpret_cast<float2 *>(to) = make_float2(x, y);
    } else {
      to[0] = x;
      if (both) to[1] = y;
    }
  } else {
    uint32_t pair;
    if constexpr (type == Type::bf16) asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(x), "f"(y));
    else asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(x), "f"(y));
    uint16_t *to = reinterpret_cast<uint16_t *>(out) + index;
    if (pairs && both) {
      *reinterpret_cast<uint32_t *>(to) = pair;
    } else {
      to[0] = uint16_t(pair);
      if (both) to[1] = uint16_t(pair >> 16);
    }
  }
}

template <class S> __device__ __forceinline__ void multiply(const Problem &p, const Layout<S> &at, int warpgroup) {
  const int lane = int(threadIdx.x) % 32, first_row = int(threadIdx.x) / 32 * 16 + lane / 4;
  Reader<S> reader(p, at, warpgroup);
  for (int tile = int(blockIdx.x); tile < p.tiles; tile += int(gridDim.x)) {
    const int column_0 = tile * S::rows + lane % 4 * 2;
    // f(i, row, column) for the accumulators d[i] and d[i + 1] of neighbours in a row of y.
    auto each_pair = [&](auto f) {
#pragma unroll
      for (int i = 0; i < S::registers; i += 2) {
        int row = first_row + i % 4 / 2 * 8, column = column_0 + i / 4 * 8;
        if (row < p.m && column < p.n) f(i, row, column);
      }
    };
    if (p.bias)
      each_pair([&](int, int row, int column) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.bias + bias_at(p, row, column) * size_of(p.bias_type)));
      });

    // ptxas keeps wgmma asynchronous only where each way of setting the accumulators has its own main loop
    float d[S::registers];
    if (p.accumulate) {
      const float *y = reinterpret_cast<const float *>(p.out);
#pragma unroll
      for (int i = 0; i < S::registers; ++i) {
        int row = first_row + i % 4 / 2 * 8, column = column_0 + i / 4 * 8 + i % 2;
        d[i] = row < p.m && column < p.n ? y[row * p.out_stride + column] : 0.0f;
      }
      reader.chain(d, p.steps, p.chunk_steps);
    } else {
#pragma unroll
      for (int i = 0; i < S::registers; ++i) d[i] = 0;
      reader.chain(d, p.steps, p.chunk_steps);
    }

    // The code below runs once: where it was long, fetching its instructions took 4 us.
    if (p.bias)
      with_type(p.bias_type, [&](auto type) {
        each_pair([&](int i, int row, int column) {
          d[i] = d[i] + load_f32(p.bias, decltype(type)::value, bias_at(p, row, column));
          if (column + 1 < p.n)
            d[i + 1] = d[i + 1] + load_f32(p.bias, decltype(type)::value, bias_at(p, row, column + 1));
        });
      });
    with_type(p.out_type, [&](auto type) {
      each_pair([&](int i, int row, int column) {
        const int64_t index = row * p.out_stride + column;
        store_pair<decltype(type)::value>(p.out, index, d[i], d[i + 1], p.pairs, column + 1 < p.n);
      });
    });
  }
}

template <class S> __global__ void __launch_bounds__(S::threads, 1) skinny_kernel(const __grid_constant__ Problem p) {
  share_out<S>(p, [&](const Layout<S> &at, int warp) { multiply<S>(p, at, S::consumer_warps == 4 ? 0 : warp / 4); });
}

// Two warpgroups leave 168 registers a thread: too few for a chunk's accumulators beside the sum's of the widest tile.
constexpr bool has_registers(bool chunked, bool two_warpgroups, int rows) {
  return !chunked || !two_warpgroups || rows < 128;
}
bool has_registers(const Gemm &g, int rows) { return has_registers(g.k_chunk != 0, g.m > kWarpgroupRows, rows); }

// The fastest in a sweep on an H100: M from 1 to 128, (N, K) from (768, 4096) to (128256, 4096), kernels back to back.
// Tiles so wide that there is one for every SM, but no wider than it takes to keep many rows of w open at a time; for
// more than 64 rows of x wide ones, since every tile reads all of x.
int choose(const Gemm &g) {
  const int64_t blocks = gpu_multiprocessors(g.device.id);
  if (g.m > kWarpgroupRows) return g.n < 16 * blocks ? 16 : g.n < 24 * blocks ? 32 : 64;
  if (g.n <= 8 * blocks) return g.m <= 16 ? 8 : 16;
  if (g.n <= 24 * blocks) return 32;
  if (g.n <= 32 * blocks) return g.m <= 8 && g.k <= 8192 ? 48 : 32;
  if (g.n <= 48 * blocks) return 48;
  if (g.n <= 64 * blocks) return g.k <= 1024 ? 64 : 32;
  return g.n <= 512 * blocks ? 32 : 64;
}

Plan plan_of(const Gemm &g, int rows) {
  const int64_t blocks = gpu_multiprocessors(g.device.id), tiles = cut(g.n, rows);
  const bool few = g.m <= 16, short_k = g.k <= 2048;
  const int bytes = (few && short_k) || (g.m <= kWarpgroupRows && g.k <= 1024) ? kHalfSharedBytes : kMostSharedBytes;
  return {rows, bytes - kReservedBytes, tiles > blocks || (few && g.k <= 1024)};
}

template <int rows> pydet_status launch_plan(const char *name, const Gemm &g, const Plan &plan) {
  return either(g.a.type == Type::bf16, [&](auto is_bf16) {
    return either(g.m > kWarpgroupRows, [&](auto two) {
      return either(g.k_chunk != 0, [&](auto chunked) {
        using S = Shape<is_bf16 ? Type::bf16 : Type::f16, rows, two ? 2 : 1, chunked>;
        if constexpr (has_registers(chunked, two, rows)) return launch_shape<S>(name, g, plan, skinny_kernel<S>);
        else return pydet_status(PYDET_UNSUPPORTED);  // takes() has refused it
      });
    });
  });
}

}  // namespace

template <int rows> bool SkinnySm90<rows>::takes(const Gemm &g) {
  return pydet::takes(g, kMostM) && has_registers(g, rows);
}
// With more rows than one warpgroup's, gemm_sm90.cu's larger tiles win where w has few, and where these leave much of the
// device idle: half of it in a single wave, a tenth in several (measured at m = 96 and 128 over 12 shapes).
template <int rows> bool SkinnySm90<rows>::prefers(const Gemm &g) {
  if (choose(g) != rows) return false;
  if (g.m <= kWarpgroupRows) return true;
  if (g.n < 4096) return false;
  const int64_t multiprocessors = gpu_multiprocessors(g.device.id), tiles = (g.n + rows - 1) / rows;
  const int64_t waves = (tiles + multiprocessors - 1) / multiprocessors;
  return 100 * tiles >= (waves == 1 ? 55 : 90) * waves * multiprocessors;
}
template <int rows> pydet_status SkinnySm90<rows>::launch(const Gemm &g) {
  return launch_plan<rows>("cuda_skinny_gemm_sm90", g, plan_of(g, rows));
}

template struct SkinnySm90<8>;
template struct SkinnySm90<16>;
template struct SkinnySm90<32>;
template struct SkinnySm90<48>;
template struct SkinnySm90<64>;
template struct SkinnySm90<128>;

}  // namespace pydet
