// What a backend provides: tables of kernels for checked problems. api.cpp checks, chooses a row and launches it.
#pragma once

#include "pydet.h"
#include "numerics.h"

namespace pydet {

enum class Arithmetic : int32_t {
  automatic = PYDET_AUTO,
  ieee = PYDET_IEEE,
  sm90 = PYDET_SM90,
  sm80 = PYDET_SM80,
  cdna3 = PYDET_CDNA3,
  cdna2 = PYDET_CDNA2,
};

// A checked matrix: strides in elements, none negative; data is NULL only where there are no elements.
struct Matrix {
  char *data;
  Type type;
  int64_t rows, cols;
  int64_t row_stride, col_stride;
};

constexpr int kMaxBatchDims = 6;

// Leading dimensions after merging all that can be: element strides are those of a, b, bias and out (0: broadcast).
// dims = 0 and count = 1 where there is no batch.
struct Batch {
  int dims;
  int64_t count;
  int64_t shape[kMaxBatchDims];
  int64_t a[kMaxBatchDims], b[kMaxBatchDims], bias[kMaxBatchDims], out[kMaxBatchDims];
};

struct Device {
  int32_t type;  // PYDET_CPU, PYDET_CUDA or PYDET_ROCM
  int32_t id;
};

// out[m, n] = round(chain_k(a[m, k], b[k, n]) + bias[m, n]). out is row-major: col_stride is 1. a and b have a unit
// stride each. bias.data is NULL where there is none; its strides may be 0. k may be 0; m, n and batch.count are not.
struct Gemm {
  Device device;
  void *stream;
  Matrix a, b, bias, out;
  Batch batch;
  int64_t m, n, k;
  Arithmetic arithmetic;  // resolved
  int64_t k_chunk;        // 0: none
  bool accumulate;
  bool skinny;            // called through pydet_skinny_gemm: a holds the few rows, b^T the weights
  bool fast;              // PYDET_FAST: bits may vary
  bool weights_constant;
  void *workspace;
  uint64_t workspace_size;
};

// Row r of a tensor starts at data + ((r / inner) * outer_stride + (r % inner) * inner_stride) elements; its elements
// are adjacent. `inner` is the same for all tensors of a problem. data is NULL where the operand is absent.
struct Rows {
  char *data;
  Type type;
  int64_t outer_stride, inner_stride;
};

// Contiguous along n; data is NULL where absent.
struct Vector {
  char *data;
  Type type;
};

struct RmsNorm {
  Device device;
  void *stream;
  int64_t rows, inner, n;
  Rows x, residual, y, sum;
  Vector weight, rstd;  // rstd: one per row
  float eps, weight_offset;
};

struct RmsNormBackward {
  Device device;
  void *stream;
  int64_t rows, inner, n;  // rows may be 0 (dweight is then +0, or kept)
  Rows dy, x, dresidual, dx;
  Vector weight, rstd, dweight;
  float weight_offset;
  bool accumulate;
  void *workspace;
  uint64_t workspace_size;
};

// One row: what the kernel computes, where it runs, which problems it takes, and how to launch it. Any row that takes a
// problem gives the same bits, so `takes` may ask anything, and rows are tried from the top: the fastest first.
template <class Problem>
struct Kernel {
  const char *name;
  uint32_t types;  // of the inputs, bit(Type) each
  Arithmetic arithmetic;
  const char *requires_;                       // "avx512", "sm_90a"
  bool (*runs_on)(const Device &);             // the machine has what it requires; reports nothing
  bool (*takes)(const Problem &);              // shape, layout and workspace fit; NULL: always
  bool (*prefers)(const Problem &);            // worth choosing by itself here; NULL: always. Forced by name it need not be
  pydet_status (*launch)(const Problem &);
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
  Arithmetic (*tensor_cores)(int32_t id);                         // what AUTO means for bf16 and fp16; `automatic` where
                                                                  // the device does not answer: no kernel has that
  uint64_t (*gemm_workspace)(int64_t batch, int64_t m, int64_t n, int64_t k, int64_t k_chunk, bool skinny, bool fast);
  bool (*reaches)(int32_t id, const void *);  // whether kernels there can use this memory; NULL: not to be known
  Table<Gemm> gemm;
  Table<RmsNorm> rmsnorm;
  Table<RmsNormBackward> rmsnorm_backward;
};

const Backend &cpu_backend();
const Backend *gpu_backend();  // NULL in libpydet_cpu.so

// Writes the thread's error text, printf style, and returns the status. The one writer of error text (check/check.h).
__attribute__((format(printf, 2, 3))) pydet_status fail(pydet_status status, const char *format, ...);

}  // namespace pydet
