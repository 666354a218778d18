// What recurrences over tokens and their gradients have in common on NVIDIA GPUs: elements of any type, the places of a
// team's states, the launch of blocks of columns.
#pragma once

#include "gpu/device.h"
#include "ops/scan/problem.h"

namespace pydet {
namespace {

constexpr int kColumns = 32, kThreads = kColumns * kScanLanes;
static_assert(kScanLanes == 8 && kScanLaneElements == 4, "a lane's elements are a vector");

__device__ __forceinline__ float element(const Strided &from, int64_t offset) {
  const char *at = from.at(offset);
  if (from.type == Type::f32) return *reinterpret_cast<const float *>(at);
  const uint16_t bits = *reinterpret_cast<const uint16_t *>(at);
  return from.type == Type::bf16 ? f32_from_bf16(bits) : f32_from_f16(bits);
}
// The same in two steps, the first of which waits for nothing: what is loaded is a number when it is asked for. Each width
// has a register of its own: two loads into one would wait for each other. bf16: it is known to be.
struct LoadedBits {
  uint32_t wide;
  uint16_t narrow;
};
template <bool bf16 = false>
__device__ __forceinline__ LoadedBits bits_from(const char *from, Type type, bool there) {
  LoadedBits bits = {};
  const bool wide = !bf16 && type == Type::f32;
  if (there && wide) bits.wide = *reinterpret_cast<const uint32_t *>(from);
  if (there && !wide) bits.narrow = *reinterpret_cast<const uint16_t *>(from);
  return bits;
}
__device__ __forceinline__ LoadedBits bits_at(const Strided &from, int64_t offset, bool there) {
  return bits_from(from.at(offset), from.type, there);
}
template <bool bf16 = false> __device__ __forceinline__ float number_of(Type type, LoadedBits bits) {
  if (!bf16 && type == Type::f32) return float_of(bits.wide);
  return bf16 || type == Type::bf16 ? f32_from_bf16(bits.narrow) : f32_from_f16(bits.narrow);
}
__device__ __forceinline__ void put_at(Type type, char *at, float x) {
  if (type == Type::f32) *reinterpret_cast<float *>(at) = canonical(x);
  else *reinterpret_cast<uint16_t *>(at) = type == Type::bf16 ? bf16_from_f32(x) : f16_from_f32(x);
}
__device__ __forceinline__ void put(const Strided &to, int64_t offset, float x) { put_at(to.type, to.at(offset), x); }

// Elements of a type, `apart` from each other.
struct Apart {
  char *first;
  int64_t bytes;
  Type type;

  __device__ __forceinline__ Apart(const Strided &x, int64_t offset, int64_t apart)
      : first(x.at(offset)), bytes(apart * size_of(x.type)), type(x.type) {}
  __device__ __forceinline__ LoadedBits bits(int j, bool there) const {
    return bits_from(first + j * bytes, type, there);
  }
  __device__ __forceinline__ void put(int j, float x) const { put_at(type, first + j * bytes, x); }
};

// A warp has four teams of eight threads, one for each lane of a sum. Neighbouring threads are of four teams and one lane:
// what all of them read of a row then is the same, and shared memory answers half a warp at a time.
constexpr int kTeams = 32 / kScanLanes;  // of a warp
__device__ __forceinline__ int scan_lane() { return int(threadIdx.x) % 32 / kTeams; }
__device__ __forceinline__ int team_of_warp() { return int(threadIdx.x) % kTeams; }

__device__ __forceinline__ float join_lanes(float sum) {
#pragma unroll
  for (int h = kScanLanes / 2; h; h /= 2) sum = sum + gpu_shfl_xor(sum, h * kTeams, 32);
  return sum;
}

// Neighbouring numbers of a thread, as a vector.
template <int kOwn> __device__ __forceinline__ void put_own(float *to, const float (&x)[kOwn]) {
  if constexpr (kOwn == 4) *reinterpret_cast<float4 *>(to) = make_float4(x[0], x[1], x[2], x[3]);
  else if constexpr (kOwn == 2) *reinterpret_cast<float2 *>(to) = make_float2(x[0], x[1]);
  else
#pragma unroll
    for (int k = 0; k < kOwn; ++k) to[k] = x[k];
}
template <int kOwn> __device__ __forceinline__ void get_own(float (&x)[kOwn], const float *from) {
  if constexpr (kOwn == 4) {
    const float4 got = *reinterpret_cast<const float4 *>(from);
    x[0] = got.x, x[1] = got.y, x[2] = got.z, x[3] = got.w;
  } else if constexpr (kOwn == 2) {
    const float2 got = *reinterpret_cast<const float2 *>(from);
    x[0] = got.x, x[1] = got.y;
  } else {
#pragma unroll
    for (int k = 0; k < kOwn; ++k) x[k] = from[k];
  }
}

// How many elements are from this lane's first one on: element i of round r is there if r * kScanRound + i is below.
__device__ __forceinline__ int left_of(int64_t states) { return int(states) - scan_lane() * kScanLaneElements; }
// Element i of round r of this thread's lane.
__device__ __forceinline__ int state_of(int r, int i) { return r * kScanRound + scan_lane() * kScanLaneElements + i; }
__device__ __forceinline__ float4 vector_of(const float *row, int r) {
  return *reinterpret_cast<const float4 *>(row + state_of(r, 0));
}
__device__ __forceinline__ float part(const float4 &v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Rows of kTokens tokens on their way to shared memory, as they lie in memory: of a thread kOwn elements, in pieces of
// neighbours. Rows that are not whole pieces are read when they are stored.
template <int kTokens, int kElements, int threads> struct Rows {
  static constexpr int kOwn = kTokens * kElements / threads, kPiece = kOwn < 4 ? kOwn : 4, kPieces = kOwn / kPiece;
  static_assert(kTokens * kElements % threads == 0 && (kPiece == 1 || kPiece == 2 || kPiece == 4) &&
                kOwn % kPiece == 0);
  const Strided &x;
  int64_t at, count, token, end;  // the rows' first element; elements; tokens from and to
  bool pieces;
  uint32_t bits[kOwn];  // two elements of 16 bits each, or one of 32

  __device__ __forceinline__ Rows(const Strided &rows, int64_t first, int64_t elements)
      : x(rows),
        at(first),
        count(elements),
        token(0),
        end(0),
        pieces(rows.stride[3] == 1 && rows.stride[1] % kPiece == 0 && elements % kPiece == 0 &&
               reinterpret_cast<uintptr_t>(rows.at(first)) % (kPiece * size_of(rows.type)) == 0) {}
  // Places are computed each time: kept over the walk they would fill the registers.
  static __device__ __forceinline__ int own_thread() {
    int thread = int(threadIdx.x);
    make_opaque(thread);
    return thread;
  }

  template <class Bits> __device__ __forceinline__ void load_pieces(int64_t from, int64_t to) {
    const int thread = own_thread();
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int place = (j * threads + thread) * kPiece, n = place % kElements;
      const int64_t t = from + place / kElements;
      Bits got = {};
      if (n < count && t < to) got = *reinterpret_cast<const Bits *>(x.at(at + t * x.stride[1] + n));
      uint32_t words[4] = {};
      memcpy(words, &got, sizeof got);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) bits[j * kPiece + i] = words[i];
    }
  }
  // Sets out to read the rows of the tokens from `from` on that are before `to`.
  __device__ __forceinline__ void load(int64_t from, int64_t to) {
    if (!pieces) {
      token = from, end = to;
      return;
    }
    if constexpr (kPiece == 4) {
      if (x.type == Type::f32) load_pieces<uint4>(from, to);
      else load_pieces<uint2>(from, to);
    } else if constexpr (kPiece == 2) {
      if (x.type == Type::f32) load_pieces<uint2>(from, to);
      else load_pieces<uint32_t>(from, to);
    } else {
      if (x.type == Type::f32) load_pieces<uint32_t>(from, to);
      else load_pieces<uint16_t>(from, to);
    }
  }
  template <Type type> __device__ __forceinline__ void store_pieces(float *to) const {
    const int thread = own_thread();
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int place = (j * threads + thread) * kPiece;
      float y[kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const uint32_t word = bits[j * kPiece + (type == Type::f32 ? i : i / 2)];
        if constexpr (type == Type::f32) y[i] = float_of(word);
        else if constexpr (type == Type::bf16) y[i] = f32_from_bf16(uint16_t(word >> i % 2 * 16));
        else y[i] = f32_from_f16(uint16_t(word >> i % 2 * 16));
      }
      if constexpr (kPiece == 4) {
        *reinterpret_cast<float4 *>(to + place) = make_float4(y[0], y[1], y[2], y[3]);
      } else {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) to[place + i] = y[i];
      }
    }
  }
  __device__ __forceinline__ void store(float *to) const {
    if (!pieces) {
#pragma unroll 1
      for (int i = own_thread(); i < kTokens * kElements; i += threads) {
        const int n = i % kElements;
        const int64_t t = token + i / kElements;
        to[i] = n < count && t < end ? element(x, at + t * x.stride[1] + n * x.stride[3]) : 0.0f;
      }
    } else if (x.type == Type::f32) {
      store_pieces<Type::f32>(to);
    } else if (x.type == Type::bf16) {
      store_pieces<Type::bf16>(to);
    } else {
      store_pieces<Type::f16>(to);
    }
  }
};

// Whether rows of so many elements, of every token and group, are whole pieces of four.
inline bool rows_in_pieces(const Strided &x, int64_t elements) {
  return elements % 4 == 0 && x.stride[3] == 1 && x.stride[0] % 4 == 0 && x.stride[1] % 4 == 0 &&
         x.stride[2] % 4 == 0 && reinterpret_cast<uintptr_t>(x.data) % (4 * size_of(x.type)) == 0;
}

// A tile's rows on their way to shared memory, in pieces of four.
// bf16: they are known to be.
template <int kTokens, int kElements, int threads, bool bf16 = false> struct Pieces {
  static constexpr int kOfRow = kElements / 4, kAll = kTokens * kOfRow;
  static constexpr int kPass = threads / kOfRow;  // tokens at a time
  static constexpr int kCount = kAll < threads ? 1 : kAll / threads;
  static_assert(threads % kOfRow == 0);
  const char *at;
  int64_t of_token;  // bytes
  Type type;
  int thread;
  uint32_t bits[kCount][bf16 ? 2 : 4];

  __device__ __forceinline__ Pieces(const Strided &rows, int64_t first, int64_t token, int thread = int(threadIdx.x))
      : of_token(rows.stride[1] * size_of(rows.type)), type(rows.type), thread(thread) {
    go_to(rows, first, token);
  }
  __device__ __forceinline__ void go_to(const Strided &rows, int64_t first, int64_t token) {
    at = rows.at(first + thread % kOfRow * 4) + (token + thread / kOfRow) * of_token;
  }
  template <class Bits> __device__ __forceinline__ void load_as(int left) {
    constexpr bool kEven = kCount * kPass == kTokens;  // steps of these lead to the next tile
    const char *from = at;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      Bits got = {};
      const int token = thread / kOfRow + j * kPass;
      if (token < left && token < kTokens) got = *reinterpret_cast<const Bits *>(from);
      memcpy(bits[j], &got, sizeof got);
      if (kEven || j + 1 < kCount) from += kPass * of_token;
    }
    at = kEven ? from : at + kTokens * of_token;
  }
  // Sets out to read the next tile's rows, of which `left` are there.
  __device__ __forceinline__ void load(int left) {
    if constexpr (bf16) load_as<uint2>(left);
    else if (type == Type::f32) load_as<uint4>(left);
    else load_as<uint2>(left);
  }
  template <Type of> __device__ __forceinline__ void store_as(float *to) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (kAll < threads && thread >= kAll) break;
      float y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = bits[j][of == Type::f32 ? i : i / 2];
        if constexpr (of == Type::f32) y[i] = float_of(word);
        else if constexpr (of == Type::bf16) y[i] = f32_from_bf16(uint16_t(word >> i % 2 * 16));
        else y[i] = f32_from_f16(uint16_t(word >> i % 2 * 16));
      }
      *reinterpret_cast<float4 *>(to + (j * threads + thread) * 4) = make_float4(y[0], y[1], y[2], y[3]);
    }
  }
  __device__ __forceinline__ void store(float *to) const {
    if constexpr (bf16) store_as<Type::bf16>(to);
    else if (type == Type::f32) store_as<Type::f32>(to);
    else if (type == Type::bf16) store_as<Type::bf16>(to);
    else store_as<Type::f16>(to);
  }
};

inline bool all_bf16(const Strided &a, const Strided &b, const Strided &c, const Strided &d) {
  return a.type == Type::bf16 && b.type == Type::bf16 && c.type == Type::bf16 && d.type == Type::bf16;
}

// A column's states, whose elements lie `apart` and are aligned as four where `vectors` says so; what is absent is +0.
template <int kRounds>
__device__ __forceinline__ void load_states(const Strided &from, int64_t at, int64_t apart, int left, bool there,
                                            bool vectors, float (&state)[kRounds][kScanLaneElements]) {
  const int first = scan_lane() * kScanLaneElements;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    make_opaque(apart);  // else all places would be computed before the first block, and kept
    float4 got = {};
    if (there && vectors) {
      got = *reinterpret_cast<const float4 *>(from.at(at + r * kScanRound + first));
    } else {
      float of_each[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        of_each[i] = there && r * kScanRound + i < left
                         ? *reinterpret_cast<const float *>(from.at(at + (r * kScanRound + first + i) * apart))
                         : 0.0f;
      got = make_float4(of_each[0], of_each[1], of_each[2], of_each[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) state[r][i] = part(got, i);
  }
}
template <int kRounds>
__device__ __forceinline__ void store_states(const Strided &to, int64_t at, int64_t apart, int left, bool vectors,
                                             const float (&state)[kRounds][kScanLaneElements]) {
  const int first = scan_lane() * kScanLaneElements;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    make_opaque(apart);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = canonical(state[r][i]);
    if (vectors) {
      *reinterpret_cast<float4 *>(to.at(at + r * kScanRound + first)) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (r * kScanRound + i < left)
          *reinterpret_cast<float *>(to.at(at + (r * kScanRound + first + i) * apart)) = x[i];
    }
  }
}
// Whether states of `count` elements, of which a column's lie along dimension 3, are whole vectors.
__device__ __forceinline__ bool whole_vectors(const Strided &x, int64_t count, bool whole) {
  return whole && x.stride[3] == 1 && x.stride[2] % 4 == 0 && x.stride[1] % 4 == 0 && x.stride[0] % 4 == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

constexpr int64_t kMostBlocks = int64_t(1) << 24;  // more are walked in turns

// Its device must be current (DeviceGuard).
template <class Problem>
pydet_status launch_blocks(const char *name, const Problem &p, int64_t blocks, int threads,
                           void (*kernel)(Problem, int64_t), int shared_bytes = 0) {
  if (blocks == 0) return PYDET_OK;
  if (blocks > INT32_MAX)
    return fail(PYDET_UNSUPPORTED, "%s: %lld blocks of columns and tokens, want at most 2147483647", name,
                static_cast<long long>(blocks));
  const Launch where = {name, static_cast<gpu_stream>(p.stream),
                        dim3(unsigned(blocks < kMostBlocks ? blocks : kMostBlocks)), dim3(unsigned(threads)),
                        shared_bytes};
  return launch(where, kernel, p, blocks);
}

// The same, where it is all that a call launches.
template <class Problem>
pydet_status launch_alone(const char *name, const Problem &p, int64_t blocks, int threads,
                          void (*kernel)(Problem, int64_t), int shared_bytes = 0) {
  DeviceGuard guard(p.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  return launch_blocks(name, p, blocks, threads, kernel, shared_bytes);
}

// f with the rounds that so many states fill as a compile-time constant: 1, 2, 4 and so on.
template <int rounds = 1, int64_t most = kMostStates, class F> pydet_status with_rounds(int64_t states, const F &f) {
  if constexpr (rounds * kScanRound >= most) {
    return f(std::integral_constant<int, rounds>());
  } else {
    if (states <= rounds * kScanRound) return f(std::integral_constant<int, rounds>());
    return with_rounds<2 * rounds, most>(states, f);
  }
}

}  // namespace
}  // namespace pydet
