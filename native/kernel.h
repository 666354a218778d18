// What a backend provides: tables of kernels for checked problems. api/ checks, chooses a row and launches it.
#pragma once

#include "problem.h"

namespace pydet {

struct GroupedGemm;  // grouped.h
struct ScaledGemm;   // scaled.h
struct Quantize;
struct ScaledGroupedGemm;  // scaled_grouped.h

// One row: what the kernel computes, where it runs, which problems it takes, and how to launch it. Any row that takes a
// problem gives the same bits, so `takes` may ask anything, and rows are tried from the top: the fastest first.
template <class Problem>
struct Kernel {
  const char *name;
  uint32_t types;  // of the inputs, bit(Type) each
  Arithmetic arithmetic;
  uint32_t features;                 // what it does, of the problem's needs (problem.h)
  const char *requires_;             // "avx512", "sm_90a"
  bool (*runs_on)(const Device &);   // the machine has what it requires; reports nothing
  bool (*takes)(const Problem &);    // shape, layout and workspace fit; NULL: whatever the columns before this let pass
  bool (*prefers)(const Problem &);  // worth choosing by itself here; NULL: always. Forced by name it need not be
  pydet_status (*launch)(const Problem &);
  // Rows that are variants of one kernel, such as its tiles, stand together and share `best`: which variant is the
  // fastest here, or one that no row has where none takes the problem. It is asked once for all of them. NULL: no such.
  int (*best)(const Problem &) = nullptr;
  int variant = 0;
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
