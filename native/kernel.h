// What a backend provides: tables of kernels for checked problems. api/ checks, chooses a row and launches it.
#pragma once

#include <cstring>
#include <type_traits>

#include "problem.h"

namespace pydet {

struct Attention;    // ops/attention/problem.h
struct GroupedGemm;  // grouped.h
struct ScaledGemm;   // scaled.h
struct Quantize;
struct ScaledGroupedGemm;  // scaled_grouped.h
struct Rounding;           // rounding.h

// Which of the variants of a kernel computes a problem, and how it cuts it. A variant's launch receives it, so that nothing
// is worked out twice.
class Choice {
 public:
  int variant = -1;  // none takes the problem

  Choice() = default;
  template <class Cut> Choice(int chosen, const Cut &cut) : variant(chosen) {
    static_assert(std::is_trivially_copyable_v<Cut> && sizeof cut <= sizeof cut_, "carried as bytes");
    memcpy(cut_, &cut, sizeof cut);
  }
  explicit Choice(int chosen) : variant(chosen) {}

  // As it was given.
  template <class Cut> Cut cut() const {
    Cut cut;
    memcpy(&cut, cut_, sizeof cut);
    return cut;
  }

 private:
  unsigned char cut_[64] = {};
};
constexpr int kAnyVariant = -1;  // the fastest

// How a row is launched: a variant with what was chosen, others with the problem alone.
template <class Problem> class Launcher {
 public:
  constexpr Launcher() = default;
  constexpr Launcher(pydet_status (*launch)(const Problem &)) : alone_(launch) {}
  constexpr Launcher(pydet_status (*launch)(const Problem &, const Choice &)) : chosen_(launch) {}
  pydet_status operator()(const Problem &problem, const Choice &choice) const {
    return chosen_ ? chosen_(problem, choice) : alone_(problem);
  }

 private:
  pydet_status (*alone_)(const Problem &) = nullptr;
  pydet_status (*chosen_)(const Problem &, const Choice &) = nullptr;
};

// One row: what the kernel computes, where it runs, which problems it takes, and how to launch it. Any row that takes a
// problem gives the same bits, so `takes` may ask anything, and rows are tried from the top: the fastest first.
template <class Problem>
struct Kernel {
  const char *name;
  uint32_t types;  // of the inputs, bit(Type) each
  Arithmetic arithmetic;
  uint64_t features;                 // what it does, of the problem's needs (problem.h)
  const char *requires_;             // "avx512", "sm_90a"
  bool (*runs_on)(const Device &);   // the machine has what it requires; reports nothing
  bool (*takes)(const Problem &);    // shape, layout and workspace fit; NULL: whatever the columns before this let pass
  bool (*prefers)(const Problem &);  // worth choosing by itself here; NULL: always. Forced by name it need not be
  Launcher<Problem> launch;
  // Rows that are variants of one kernel, such as its tiles, stand together and share `choose`: how this variant
  // computes the problem, or which is the fastest for kAnyVariant, which is asked once for all of them. NULL: no such.
  Choice (*choose)(const Problem &, int variant) = nullptr;
  int variant = 0;

  // Whether shape and layout let it. Of a variant it fills the choice that the launch receives.
  bool accepts(const Problem &problem, Choice *choice) const {
    if (choose) return (*choice = choose(problem, variant)).variant == variant;
    return !takes || takes(problem);
  }
};

template <class Problem>
struct Table {
  const Kernel<Problem> *rows;
  int count;
};
template <class Problem, int count> constexpr Table<Problem> table(const Kernel<Problem> (&rows)[count]) {
  return {rows, count};
}

struct Backend {
  int32_t device_type;
  const char *name;  // "CPU", "CUDA", "HIP"
  pydet_status (*device_count)(int32_t *);
  pydet_status (*query_device)(int32_t id, pydet_device_info *);  // id is in range
  Arithmetic (*tensor_cores)(int32_t id);     // what AUTO means for bf16 and fp16; `automatic` where
                                              // the device does not answer: no kernel has that
  bool (*reaches)(int32_t id, const void *);  // whether kernels there can use this memory; NULL: not to be known
  void (*forget)();                           // what was remembered of devices; NULL: nothing is
  const char *built_for;  // architectures, and the setting that names them; NULL: any of its devices
  Table<Gemm> gemm;
  Table<ScaledGemm> scaled_gemm;
  Table<Quantize> quantize;
  Table<RmsNorm> rmsnorm;
  Table<RmsNormBackward> rmsnorm_backward;
  Table<Softmax> softmax;
  Table<SoftmaxBackward> softmax_backward;
  Table<GroupedGemm> grouped_gemm;
  Table<Fold> fold;
  Table<LayerNorm> layernorm;
  Table<LayerNormBackward> layernorm_backward;
  Table<ScaledGroupedGemm> scaled_grouped_gemm;
  pydet_status (*round_elements)(const Rounding &);
  // Bytes that the kernel which is asked for by name, or else whichever may be chosen, uses for this product of one
  // matrix, whatever its device; NULL: no kernel wants any.
  uint64_t (*gemm_workspace)(int64_t m, int64_t n, int64_t k, int64_t k_chunk, Arithmetic asked,
                             const char *kernel) = nullptr;
  Table<Attention> attention = {};
  // The same of attention; of the problem the extents, types, arithmetic and lengths are there, and no data.
  uint64_t (*attention_workspace)(const Attention &, const char *kernel) = nullptr;
};

const Backend &cpu_backend();
const Backend *gpu_backend();  // NULL in libpydet_cpu.so

// NULL where this build does not serve such devices.
inline const Backend *backend_for(int32_t device_type) {
  if (device_type == PYDET_CPU) return &cpu_backend();
  const Backend *gpu = gpu_backend();
  return gpu && gpu->device_type == device_type ? gpu : nullptr;
}

}  // namespace pydet
