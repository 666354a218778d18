// A step of AdamW for up to 64 tensors in one launch, element by element in fp32 (NUMERICS.md, "AdamW"): the CPU's bits.
//
// A block takes a piece of one tensor, by four neighbouring elements a thread where all that it reads and writes is
// aligned for that, and the rest one by one. What a thread needs is all asked for before any of it is used.

#include "gpu/any/epilogue.h"
#include "gpu/kernels.h"
#include "ops/adamw/formula.h"

namespace pydet {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 4;   // elements
constexpr int kVectors = 2;  // of a thread
constexpr int kPiece = kThreads * kVectors * kVector;

// Where the pieces of each tensor end, among all.
struct Pieces {
  uint32_t ends[PYDET_ADAMW_TENSORS];
};
static_assert(sizeof(AdamW) + sizeof(Pieces) <= 4096, "what a kernel is given");

struct Four {
  float x[kVector];
};

// Four elements as they lie in memory; of 16-bit types in the first two words.
__device__ __forceinline__ uint4 load_words(const char *at, Type type) {
  if (type == Type::f32) return *reinterpret_cast<const uint4 *>(at);
  const uint2 words = *reinterpret_cast<const uint2 *>(at);
  return make_uint4(words.x, words.y, 0, 0);
}
__device__ __forceinline__ uint4 load_words(const float *at) { return *reinterpret_cast<const uint4 *>(at); }

__device__ __forceinline__ Four floats(const uint4 &words) {
  return {{float_of(words.x), float_of(words.y), float_of(words.z), float_of(words.w)}};
}
__device__ __forceinline__ Four floats(const uint4 &words, Type type) {
  if (type == Type::f32) return floats(words);
  Four four;
  with_type<kHalfTypes>(type, [&](auto half) {
    using Half = Element<decltype(half)::value>;
    four.x[0] = Half::to_f32(uint16_t(words.x)), four.x[1] = Half::to_f32(uint16_t(words.x >> 16));
    four.x[2] = Half::to_f32(uint16_t(words.y)), four.x[3] = Half::to_f32(uint16_t(words.y >> 16));
  });
  return four;
}

__device__ __forceinline__ void store(float *at, const Four &four) {
  *reinterpret_cast<uint4 *>(at) = make_uint4(bits_of(canonical(four.x[0])), bits_of(canonical(four.x[1])),
                                              bits_of(canonical(four.x[2])), bits_of(canonical(four.x[3])));
}
__device__ __forceinline__ void store(char *at, Type type, const Four &four) {
  if (type == Type::f32) return store(reinterpret_cast<float *>(at), four);
  with_type<kHalfTypes>(type, [&](auto half) {
    constexpr Type known = decltype(half)::value;
    *reinterpret_cast<uint2 *>(at) =
        make_uint2(rounded_pair<known>(four.x[0], four.x[1]), rounded_pair<known>(four.x[2], four.x[3]));
  });
}

// A master, unless the parameter is no longer its rounding.
__device__ __forceinline__ float kept(Type type, float master, float param) {
  const float rounded = with_type<kHalfTypes>(type, [&](auto half) {
    using Half = Element<decltype(half)::value>;
    return Half::to_f32(Half::from_f32(master));
  });
  return rounded == param ? master : param;
}

__device__ __forceinline__ void step_one(const AdamWNumbers &by, const AdamWTensor &t, int64_t i) {
  const float g = load_f32(t.grad, t.grad_type, i);
  float w = load_f32(t.param, t.param_type, i), m = t.exp_avg[i], v = t.exp_avg_sq[i];
  if (t.master) w = kept(t.param_type, t.master[i], w);
  adamw_step(by, [](float x) { return x; }, g, w, m, v);
  t.exp_avg[i] = canonical(m), t.exp_avg_sq[i] = canonical(v);
  if (t.master) t.master[i] = canonical(w);
  store_rounded(t.param, t.param_type, i, w);
}

// Whether four elements from any multiple of four on are whole vectors.
__device__ __forceinline__ bool aligned(const AdamWTensor &t) {
  const auto at = [](const void *data) { return uint32_t(reinterpret_cast<uintptr_t>(data)); };
  const uint32_t of_floats = at(t.exp_avg) | at(t.exp_avg_sq) | at(t.master);
  const bool halves = at(t.param) % (kVector * size_of(t.param_type)) || at(t.grad) % (kVector * size_of(t.grad_type));
  return of_floats % (kVector * sizeof(float)) == 0 && !halves;
}

__global__ void __launch_bounds__(kThreads, 4)
    adamw_kernel(const __grid_constant__ AdamW p, const __grid_constant__ Pieces pieces) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t piece = block_number();
  if (piece >= pieces.ends[p.count - 1]) return;
  int number = 0;  // of the tensor
  for (int step = PYDET_ADAMW_TENSORS / 2; step > 0; step /= 2)
    if (number + step < p.count && piece >= pieces.ends[number + step - 1]) number += step;
  const AdamWTensor &t = p.tensors[number];
  const int64_t first = (piece - (number ? pieces.ends[number - 1] : 0)) * kPiece, rest = t.size - first;
  const int count = rest < kPiece ? int(rest) : kPiece, vectors = aligned(t) ? count / kVector : 0;
  const Type param_type = t.param_type, grad_type = t.grad_type;
  const bool has_master = t.master != nullptr;

  uint4 param[kVectors], grad[kVectors], exp_avg[kVectors], exp_avg_sq[kVectors], master[kVectors];
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    const int vector = n * kThreads + int(threadIdx.x);
    if (vector >= vectors) continue;
    const int64_t i = first + vector * kVector;
    grad[n] = load_words(t.grad + i * size_of(grad_type), grad_type);
    exp_avg[n] = load_words(t.exp_avg + i);
    exp_avg_sq[n] = load_words(t.exp_avg_sq + i);
    param[n] = load_words(t.param + i * size_of(param_type), param_type);
    if (has_master) master[n] = load_words(t.master + i);
  }
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    const int vector = n * kThreads + int(threadIdx.x);
    if (vector >= vectors) continue;
    const int64_t i = first + vector * kVector;
    const Four g = floats(grad[n], grad_type);
    Four w = floats(param[n], param_type), m = floats(exp_avg[n]), v = floats(exp_avg_sq[n]);
    if (has_master) {
      const Four of_master = floats(master[n]);
#pragma unroll
      for (int e = 0; e < kVector; ++e) w.x[e] = kept(param_type, of_master.x[e], w.x[e]);
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) adamw_step(p.by, [](float x) { return x; }, g.x[e], w.x[e], m.x[e], v.x[e]);
    store(t.exp_avg + i, m);
    store(t.exp_avg_sq + i, v);
    if (has_master) store(t.master + i, w);
    store(t.param + i * size_of(param_type), param_type, w);
  }
  for (int i = vectors * kVector + int(threadIdx.x); i < count; i += kThreads) step_one(p.by, t, first + i);
}

int64_t pieces_of(const AdamW &p, Pieces *pieces) {
  int64_t count = 0;
  for (int t = 0; t < p.count; ++t) {
    count += divide_up(p.tensors[t].size, kPiece);
    if (pieces) pieces->ends[t] = uint32_t(count);
  }
  return count;
}

}  // namespace

bool adamw_takes(const AdamW &p) { return pieces_of(p, nullptr) < int64_t(1) << 31; }

pydet_status adamw(const AdamW &p) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error("adamw", guard.error());
  Pieces pieces = {};
  const int64_t count = pieces_of(p, &pieces);
  Launch where = {"adamw", static_cast<gpu_stream>(p.stream), grid_of(count, kThreads), dim3(kThreads)};
  where.overlaps_previous = gpu_overlaps_kernels(p.device.id);
  return launch(where, adamw_kernel, p, pieces);
}

}  // namespace pydet
