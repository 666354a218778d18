// The causal convolution that goes before recurrences over tokens, and its gradients (NUMERICS.md, "Scans"): the CPU's
// bits.

#include "core/error.h"
#include "gpu/kernels.h"
#include "gpu/nvidia/scan.h"

namespace pydet {
namespace {

// An element of a type that is known when the kernel is compiled: such loads are on their way side by side.
template <Type type> __device__ __forceinline__ float typed(const char *data, int64_t offset) {
  if constexpr (type == Type::f32) return reinterpret_cast<const float *>(data)[offset];
  const uint16_t bits = reinterpret_cast<const uint16_t *>(data)[offset];
  return type == Type::bf16 ? f32_from_bf16(bits) : f32_from_f16(bits);
}

// What stands `from` tokens after a sequence's first one, of which negative ones are the last of `initial`, or +0. Both are
// of one type.
template <Type type, class Conv>
__device__ __forceinline__ float input_at(const Conv &p, const Sequences::Range &range, int64_t sequence, int64_t from,
                                          int64_t c) {
  const bool inside = from >= 0;
  const Strided &of = inside ? p.x : p.initial;
  const int64_t row = inside ? range.batch * of.stride[0] + (range.begin + from) * of.stride[1]
                             : sequence * of.stride[0] + (from + p.taps - 1) * of.stride[1];
  return of.data ? typed<type>(of.data, row + c * of.stride[2]) : 0.0f;
}

constexpr int kHeldTaps = 8;  // of a channel, in registers: those of most convolutions

// ---- Channel by channel, any layout ------------------------------------------------------------------------------------

constexpr int kConvChannels = 64, kConvRows = 4, kConvTokens = 32;

// A block has some tokens of a sequence and 64 channels, one a thread; a thread has every fourth of the tokens.
template <Type type>
__global__ void __launch_bounds__(kConvChannels *kConvRows)
    causal_conv1d_kernel(const __grid_constant__ CausalConv1d p, const __grid_constant__ int64_t blocks) {
  const uint32_t parts = uint32_t(divide_up(p.channels, kConvChannels)),
                 pieces = uint32_t(divide_up(p.sequences.tokens, kConvTokens));
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t c = block % parts * kConvChannels + int(threadIdx.x) % kConvChannels;
    const int64_t piece = block / parts % pieces, sequence = block / parts / pieces;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t begin = range.begin + piece * kConvTokens + int(threadIdx.x) / kConvChannels;
    if (c >= p.channels) continue;
    const float bias = p.bias.data ? element(p.bias, c * p.bias.stride[0]) : 0.0f;
    const bool held = p.taps <= kHeldTaps;
    float w[kHeldTaps];
#pragma unroll
    for (int j = 0; j < kHeldTaps; ++j)
      w[j] = held && j < p.taps ? element(p.w, c * p.w.stride[0] + j * p.w.stride[1]) : 0.0f;
    for (int64_t t = begin; t < range.end && t < range.begin + (piece + 1) * kConvTokens; t += kConvRows) {
      const int64_t first = t - range.begin - p.taps + 1;
      float sum = 0.0f;
      if (held) {
        float x[kHeldTaps];
#pragma unroll
        for (int j = 0; j < kHeldTaps; ++j) x[j] = j < p.taps ? input_at<type>(p, range, sequence, first + j, c) : 0.0f;
#pragma unroll
        for (int j = 0; j < kHeldTaps; ++j)
          if (j < p.taps) sum = fmaf(w[j], x[j], sum);
      } else {
        for (int64_t j = 0; j < p.taps; ++j)
          sum = fmaf(element(p.w, c * p.w.stride[0] + j * p.w.stride[1]),
                     input_at<type>(p, range, sequence, first + j, c), sum);
      }
      if (p.bias.data) sum = sum + bias;
      put(p.y, range.batch * p.y.stride[0] + t * p.y.stride[1] + c * p.y.stride[2], sum);
    }
  }
}

// A block has some tokens of a sequence and 64 channels, one a thread; a thread has every fourth of the tokens. The first
// piece is what lies before the sequence.
template <Type type>
__global__ void __launch_bounds__(kConvChannels *kConvRows)
    conv_inputs_kernel(const __grid_constant__ CausalConv1dBackward p, const __grid_constant__ int64_t blocks) {
  const uint32_t parts = uint32_t(divide_up(p.channels, kConvChannels)),
                 pieces = (p.dx.data ? uint32_t(divide_up(p.sequences.tokens, kConvTokens)) : 0) + 1;
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t c = block % parts * kConvChannels + int(threadIdx.x) % kConvChannels;
    const int64_t piece = int64_t(block / parts % pieces) - 1, sequence = block / parts / pieces;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t begin = piece < 0 ? 1 - p.taps : piece * kConvTokens;
    int64_t end = piece < 0 ? 0 : begin + kConvTokens;
    if (end > range.end - range.begin) end = range.end - range.begin;
    const Strided &out = piece < 0 ? p.dinitial : p.dx;
    if (c >= p.channels || !out.data) continue;
    const bool held = p.taps <= kHeldTaps;
    float w[kHeldTaps];
#pragma unroll
    for (int j = 0; j < kHeldTaps; ++j)
      w[j] = held && j < p.taps ? element(p.w, c * p.w.stride[0] + j * p.w.stride[1]) : 0.0f;
    for (int64_t t = begin + int(threadIdx.x) / kConvChannels; t < end; t += kConvRows) {
      float sum = 0.0f;
      const auto at = [&](int64_t j) {  // a token, behind t
        return range.batch * p.dy.stride[0] + (range.begin + t + p.taps - 1 - j) * p.dy.stride[1] + c * p.dy.stride[2];
      };
      const int64_t last = t + p.taps - 1, count = range.end - range.begin;  // of tap 0: where its token must be before
      const auto there = [&](int64_t j) { return j < p.taps && last - j >= 0 && last - j < count; };
      if (held) {
        float dy[kHeldTaps];
#pragma unroll
        for (int j = 0; j < kHeldTaps; ++j) dy[j] = there(j) ? typed<type>(p.dy.data, at(j)) : 0.0f;
#pragma unroll
        for (int j = kHeldTaps - 1; j >= 0; --j)
          if (there(j)) sum = fmaf(w[j], dy[j], sum);
      } else {
        for (int64_t j = p.taps - 1; j >= 0; --j)
          if (there(j))
            sum = fmaf(element(p.w, c * p.w.stride[0] + j * p.w.stride[1]), typed<type>(p.dy.data, at(j)), sum);
      }
      const int64_t row = piece < 0 ? sequence * out.stride[0] + (t + p.taps - 1) * out.stride[1]
                                    : range.batch * out.stride[0] + (range.begin + t) * out.stride[1];
      put(out, row + c * out.stride[2], sum);
    }
  }
}

constexpr int kSumChannels = 32, kSumTaps = 8, kAhead = 16;

// A block has 32 channels of a sequence, one a thread of a warp, and eight of the taps, of which bias is the last one: a
// chain each, whose operands are read 16 tokens ahead.
template <Type type>
__global__ void __launch_bounds__(kSumChannels *kSumTaps)
    conv_sums_kernel(const __grid_constant__ CausalConv1dBackward p, const __grid_constant__ int64_t blocks) {
  const uint32_t parts = uint32_t(divide_up(p.channels, kSumChannels)),
                 rounds = uint32_t(divide_up(p.taps + 1, kSumTaps));
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t c = block % parts * kSumChannels + int(threadIdx.x) % kSumChannels;
    const int64_t j = block / parts % rounds * kSumTaps + int(threadIdx.x) / kSumChannels;
    const int64_t sequence = block / parts / rounds;
    const bool is_bias = j == p.taps;
    if (c >= p.channels || j > p.taps || !(is_bias ? p.dbias.data : p.dw.data)) continue;
    const Sequences::Range range = p.sequences.range(sequence);
    float sum = 0.0f;
    for (int64_t last = range.end - 1; last >= range.begin; last -= kAhead) {
      float dy[kAhead], x[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t t = last - i;
        const bool there = t >= range.begin;
        dy[i] = there ? typed<type>(p.dy.data, range.batch * p.dy.stride[0] + t * p.dy.stride[1] + c * p.dy.stride[2])
                      : 0.0f;
        x[i] = there && !is_bias ? input_at<type>(p, range, sequence, t - range.begin - p.taps + 1 + j, c) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (last - i >= range.begin) sum = is_bias ? sum + dy[i] : fmaf(dy[i], x[i], sum);
    }
    if (is_bias) put(p.dbias, sequence * p.dbias.stride[0] + c * p.dbias.stride[1], sum);
    else put(p.dw, sequence * p.dw.stride[0] + c * p.dw.stride[1] + j * p.dw.stride[2], sum);
  }
}

// ---- Channels side by side ---------------------------------------------------------------------------------------------
//
// A thread has the channels of 16 bytes and walks some tokens: what it has read stays in registers for as long as taps want
// it, and those of the next tokens are on their way together.

constexpr int kLeastTaps = 2, kMostVectorTaps = 4;
constexpr int kVectorBytes = 16, kWalkVectors = 32, kWalks = 8, kWalkTokens = 32, kWalkAhead = 4;
template <Type type> constexpr int kVector = kVectorBytes / size_of(type);

template <Type type> __device__ __forceinline__ void unpack(const uint4 &bits, float (&x)[kVector<type>]) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < kVector<type>; ++i) {
    if constexpr (type == Type::f32) x[i] = float_of(words[i]);
    else if constexpr (type == Type::bf16) x[i] = f32_from_bf16(uint16_t(words[i / 2] >> i % 2 * 16));
    else x[i] = f32_from_f16(uint16_t(words[i / 2] >> i % 2 * 16));
  }
}
template <Type type> __device__ __forceinline__ uint4 pack(const float (&x)[kVector<type>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (type == Type::f32) words[i] = bits_of(canonical(x[i]));
    else words[i] = rounded_pair<type>(x[2 * i], x[2 * i + 1]);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ const uint4 *vector_at(const Strided &x, int64_t offset) {
  return reinterpret_cast<const uint4 *>(x.at(offset));
}

// The taps of a vector's channels, which lie one behind the other. Of x's type, or fp32.
template <Type type, int taps>
__device__ __forceinline__ void load_taps(const Strided &from, int64_t c, float (&w)[kVector<type>][taps]) {
  constexpr int kCount = kVector<type> * taps;
  const auto load = [&](auto of) {
    constexpr Type kType = decltype(of)::value;
    constexpr int kPieces = kCount * size_of(kType) / kVectorBytes;
    uint4 bits[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) bits[i] = vector_at(from, c * taps)[i];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      float some[kVector<kType>];
      unpack<kType>(bits[i], some);
#pragma unroll
      for (int j = 0; j < kVector<kType>; ++j) {
        const int at = i * kVector<kType> + j;
        w[at / taps][at % taps] = some[j];
      }
    }
  };
  if (from.type == type) load(std::integral_constant<Type, type>());
  else load(std::integral_constant<Type, Type::f32>());
}

// A thread's tokens [begin, end) of a sequence, and the first of its channels.
struct Walk {
  int64_t sequence, c, begin, end;
  Sequences::Range range;
};
template <Type type, class Conv> __device__ __forceinline__ Walk walk_of(const Conv &p, uint32_t block) {
  const uint32_t parts = uint32_t(divide_up(p.channels, kVector<type> * kWalkVectors)),
                 pieces = uint32_t(divide_up(p.sequences.tokens, kWalks * kWalkTokens));
  Walk walk;
  walk.sequence = block / parts / pieces;
  walk.c = (block % parts * kWalkVectors + threadIdx.x % kWalkVectors) * kVector<type>;
  walk.range = p.sequences.range(walk.sequence);
  const int64_t tokens = walk.range.end - walk.range.begin;
  walk.begin = (int64_t(block / parts % pieces) * kWalks + threadIdx.x / kWalkVectors) * kWalkTokens;
  walk.end = walk.begin + kWalkTokens < tokens ? walk.begin + kWalkTokens : tokens;
  if (walk.c >= p.channels) walk.end = walk.begin;
  return walk;
}

template <Type type, int taps>
__global__ void __launch_bounds__(kWalkVectors *kWalks)
    conv_vectors_kernel(const __grid_constant__ CausalConv1d p, const __grid_constant__ int64_t blocks) {
  constexpr int V = kVector<type>;
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const Walk walk = walk_of<type>(p, block);
    if (walk.begin >= walk.end) continue;
    float w[V][taps], bias[V], x[taps][V];  // of taps tokens, the last of them new
    load_taps<type, taps>(p.w, walk.c, w);
#pragma unroll
    for (int i = 0; i < V; ++i) bias[i] = p.bias.data ? element(p.bias, (walk.c + i) * p.bias.stride[0]) : 0.0f;
    const int64_t row = walk.range.batch * p.x.stride[0] + walk.range.begin * p.x.stride[1] + walk.c;
    const auto at = [&](int64_t t) {  // one of a sequence, or before it
      if (t >= 0) return *vector_at(p.x, row + t * p.x.stride[1]);
      if (!p.initial.data) return make_uint4(0, 0, 0, 0);
      return *vector_at(p.initial, walk.sequence * p.initial.stride[0] + (t + taps - 1) * p.initial.stride[1] + walk.c);
    };
#pragma unroll
    for (int j = 0; j < taps - 1; ++j) unpack<type>(at(walk.begin + j - taps + 1), x[j]);
    for (int64_t t = walk.begin; t < walk.end; t += kWalkAhead) {
      uint4 next[kWalkAhead];
#pragma unroll
      for (int k = 0; k < kWalkAhead; ++k) next[k] = t + k < walk.end ? at(t + k) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int k = 0; k < kWalkAhead; ++k) {
        unpack<type>(next[k], x[taps - 1]);
        float y[V];
#pragma unroll
        for (int i = 0; i < V; ++i) {
          y[i] = 0.0f;
#pragma unroll
          for (int j = 0; j < taps; ++j) y[i] = fmaf(w[i][j], x[j][i], y[i]);
          if (p.bias.data) y[i] = y[i] + bias[i];
#pragma unroll
          for (int j = 0; j < taps - 1; ++j) x[j][i] = x[j + 1][i];
        }
        if (t + k < walk.end)
          *reinterpret_cast<uint4 *>(p.y.at(walk.range.batch * p.y.stride[0] +
                                            (walk.range.begin + t + k) * p.y.stride[1] + walk.c)) = pack<type>(y);
      }
    }
  }
}

// dx of what lies in the sequence, its last token first: dy of the taps - 1 tokens behind stays in registers.
template <Type type, int taps>
__global__ void __launch_bounds__(kWalkVectors *kWalks)
    conv_input_vectors_kernel(const __grid_constant__ CausalConv1dBackward p, const __grid_constant__ int64_t blocks) {
  constexpr int V = kVector<type>;
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const Walk walk = walk_of<type>(p, block);
    if (walk.begin >= walk.end) continue;
    const int64_t tokens = walk.range.end - walk.range.begin;
    float w[V][taps], dy[taps][V];  // of a token and those behind it
    load_taps<type, taps>(p.w, walk.c, w);
    const int64_t row = walk.range.batch * p.dy.stride[0] + walk.range.begin * p.dy.stride[1] + walk.c;
    const auto at = [&](int64_t t) {
      return t >= walk.begin && t < tokens ? *vector_at(p.dy, row + t * p.dy.stride[1]) : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int j = 0; j < taps - 1; ++j) unpack<type>(at(walk.end + j), dy[j]);
    for (int64_t last = walk.end - 1; last >= walk.begin; last -= kWalkAhead) {
      uint4 next[kWalkAhead];
#pragma unroll
      for (int k = 0; k < kWalkAhead; ++k) next[k] = at(last - k);
#pragma unroll
      for (int k = 0; k < kWalkAhead; ++k) {
        const int64_t t = last - k;
#pragma unroll
        for (int j = taps - 1; j > 0; --j)
#pragma unroll
          for (int i = 0; i < V; ++i) dy[j][i] = dy[j - 1][i];
        unpack<type>(next[k], dy[0]);
        float dx[V] = {};
#pragma unroll
        for (int j = 0; j < taps; ++j)
          if (t + j < tokens)  // others have no part
#pragma unroll
            for (int i = 0; i < V; ++i) dx[i] = fmaf(w[i][taps - 1 - j], dy[j][i], dx[i]);
        if (t >= walk.begin)
          *reinterpret_cast<uint4 *>(p.dx.at(walk.range.batch * p.dx.stride[0] +
                                             (walk.range.begin + t) * p.dx.stride[1] + walk.c)) = pack<type>(dx);
      }
    }
  }
}

// dw and dbias: a block has the channels of 128 bytes of a sequence, of which a thread has one and two of its taps, the
// second thread bias too. Their chains walk the tokens, which come through shared memory, 32 at a time and some such steps
// ahead: in registers there is no room for what must be on its way.
constexpr int kStepBytes = 128, kStepTokens = 32, kSteps = 4, kOwnTaps = 2;
template <Type type> constexpr int kStepChannels = kStepBytes / size_of(type);
template <Type type, int taps>
__global__ void __launch_bounds__(kStepChannels<type> *kOwnTaps)
    conv_sum_steps_kernel(const __grid_constant__ CausalConv1dBackward p, const __grid_constant__ int64_t blocks) {
  constexpr int kChannels = kStepChannels<type>, kThreadsHere = kChannels * kOwnTaps, kBefore = taps - 1;
  constexpr int kPieces = kStepBytes / kVectorBytes, kRows = 2 * kStepTokens + kBefore;
  static_assert((taps + kOwnTaps - 1) / kOwnTaps <= 2);
  // Of a step x of the tokens before it and of its own, then dy.
  __shared__ __align__(16) char rows[kSteps][kRows][kStepBytes];
  const uint32_t parts = uint32_t(divide_up(p.channels, kChannels));
  const int own = int(threadIdx.x) % kChannels, first = int(threadIdx.x) / kChannels * kOwnTaps;
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t begin = int64_t(block % parts) * kChannels, sequence = block / parts;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t tokens = range.end - range.begin, steps = divide_up(tokens, kStepTokens);
    const auto load = [&](int64_t step) {
      const int64_t low = tokens - (step + 1) * kStepTokens;
      for (int i = int(threadIdx.x); step < steps && i < kRows * kPieces; i += kThreadsHere) {
        const int which = i / kPieces, piece = i % kPieces;
        const int64_t c = begin + piece * kVector<type>;
        const bool is_dy = which >= kStepTokens + kBefore;
        const int64_t t = low + which - (is_dy ? kStepTokens + kBefore : kBefore);
        const Strided &of = is_dy ? p.dy : t < 0 ? p.initial : p.x;
        const bool there = c < p.channels && of.data && t >= (is_dy ? 0 : -kBefore);
        const int64_t row = t < 0 ? sequence * of.stride[0] + (t + kBefore) * of.stride[1]
                                  : range.batch * of.stride[0] + (range.begin + t) * of.stride[1];
        copy_async_16(rows[step % kSteps][which] + piece * kVectorBytes, there ? of.at(row + c) : p.x.data,
                      there ? kVectorBytes : 0);
      }
      commit_copies();
    };
#pragma unroll
    for (int step = 0; step < kSteps - 1; ++step) load(step);
    float sums[kOwnTaps] = {}, of_bias = 0.0f;
    for (int64_t step = 0; step < steps; ++step) {
      wait_copies<kSteps - 2>();
      __syncthreads();
      load(step + kSteps - 1);
      const char(&here)[kRows][kStepBytes] = rows[step % kSteps];
      const auto number = [&](int row) { return typed<type>(here[row], own); };
      const int low = tokens - (step + 1) * kStepTokens < 0 ? int((step + 1) * kStepTokens - tokens) : 0;
      float later = first + 1 < taps ? number(kStepTokens + first) : 0.0f;
#pragma unroll 8
      for (int t = kStepTokens - 1; t >= low; --t) {
        const float dy = number(kStepTokens + kBefore + t), x = number(t + first);
        sums[0] = fmaf(dy, x, sums[0]);
        sums[1] = fmaf(dy, later, sums[1]);
        of_bias = of_bias + dy;
        later = x;
      }
    }
    wait_copies<0>();
    __syncthreads();
    const int64_t c = begin + own;
    if (c >= p.channels) continue;
#pragma unroll
    for (int j = 0; j < kOwnTaps; ++j)
      if (p.dw.data && first + j < taps)
        put(p.dw, sequence * p.dw.stride[0] + c * p.dw.stride[1] + (first + j) * p.dw.stride[2], sums[j]);
    if (p.dbias.data && first == 0) put(p.dbias, sequence * p.dbias.stride[0] + c * p.dbias.stride[1], of_bias);
  }
}

// Whether rows of channels are whole vectors, wherever they begin. What is absent does.
bool in_vectors(const Strided &x) {
  const int64_t vector = kVectorBytes / size_of(x.type);
  return !x.data || (x.stride[2] == 1 && x.stride[0] % vector == 0 && x.stride[1] % vector == 0 &&
                     reinterpret_cast<uintptr_t>(x.data) % kVectorBytes == 0);
}
template <class Conv> bool fits_vectors(const Conv &p) {
  return p.taps >= kLeastTaps && p.taps <= kMostVectorTaps && p.channels % (kVectorBytes / size_of(p.x.type)) == 0;
}
bool taps_adjacent(const Strided &w, Type type, int64_t taps) {
  return (w.type == type || w.type == Type::f32) && w.stride[0] == taps && w.stride[1] == 1 &&
         reinterpret_cast<uintptr_t>(w.data) % kVectorBytes == 0;
}
template <Type type, class Conv> int64_t walks(const Conv &p) {
  return p.sequences.count * divide_up(p.channels, kVector<type> * kWalkVectors) *
         divide_up(p.sequences.tokens, kWalks * kWalkTokens);
}
template <int taps = kLeastTaps, class F> pydet_status with_taps(int64_t count, const F &f) {
  if constexpr (taps < kMostVectorTaps)
    if (count > taps) return with_taps<taps + 1>(count, f);
  return f(std::integral_constant<int, taps>());
}

}  // namespace

pydet_status causal_conv1d(const CausalConv1d &p) {
  const char *name = "causal_conv1d";
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) -> pydet_status {
    constexpr Type kType = type;
    if (fits_vectors(p) && in_vectors(p.x) && in_vectors(p.initial) && in_vectors(p.y) &&
        taps_adjacent(p.w, kType, p.taps))
      return with_taps(p.taps, [&](auto taps) {
        return launch_blocks(name, p, walks<kType>(p), kWalkVectors * kWalks, conv_vectors_kernel<kType, taps>);
      });
    const int64_t blocks =
        p.sequences.count * divide_up(p.channels, kConvChannels) * divide_up(p.sequences.tokens, kConvTokens);
    return launch_blocks(name, p, blocks, kConvChannels * kConvRows, causal_conv1d_kernel<kType>);
  });
}

pydet_status causal_conv1d_backward(const CausalConv1dBackward &given) {
  const char *name = "causal_conv1d_backward";
  CausalConv1dBackward p = given;
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  return with_type<kUnscaledTypes>(p.x.type, [&](auto type) -> pydet_status {
    constexpr Type kType = type;
    const bool vectors = fits_vectors(p) && in_vectors(p.dy);
    const bool sums = p.dw.data || p.dbias.data;
    if (sums && vectors && in_vectors(p.x) && in_vectors(p.initial)) {
      PYDET_TRY(with_taps(p.taps, [&](auto taps) {
        return launch_blocks(name, p, p.sequences.count * divide_up(p.channels, kStepChannels<kType>),
                             kStepChannels<kType> * kOwnTaps, conv_sum_steps_kernel<kType, taps>);
      }));
    } else if (sums) {
      const int64_t rounds = divide_up(p.taps + 1, kSumTaps);
      PYDET_TRY(launch_blocks(name, p, p.sequences.count * divide_up(p.channels, kSumChannels) * rounds,
                              kSumChannels * kSumTaps, conv_sums_kernel<kType>));
    }
    if (p.dx.data && vectors && in_vectors(p.dx) && taps_adjacent(p.w, kType, p.taps)) {
      PYDET_TRY(with_taps(p.taps, [&](auto taps) {
        return launch_blocks(name, p, walks<kType>(p), kWalkVectors * kWalks, conv_input_vectors_kernel<kType, taps>);
      }));
      p.dx = Strided{};
    }
    if (!p.dx.data && !p.dinitial.data) return PYDET_OK;
    // What lies before a sequence alone is its first piece alone.
    const int64_t pieces = (p.dx.data ? divide_up(p.sequences.tokens, kConvTokens) : 0) + 1;
    return launch_blocks(name, p, p.sequences.count * divide_up(p.channels, kConvChannels) * pieces,
                         kConvChannels * kConvRows, conv_inputs_kernel<kType>);
  });
}

}  // namespace pydet
