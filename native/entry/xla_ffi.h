/* What XLA's foreign function interface hands to a handler and takes from it, as far as xla_ffi.cpp uses it: a stable C
 * interface (major version 0), whose structures only grow at their ends. The names are ours, the layout is its public
 * header's; tests/test_jax.py compares the two where JAX is installed.
 * Also the handlers, which pydet/jax.py registers by name. */
#ifndef PYDET_XLA_FFI_H
#define PYDET_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How a structure begins. */
typedef struct pydet_xla_extension {
  size_t struct_size;
  int32_t type; /* PYDET_XLA_METADATA: the caller asks what the handler is, and calls it for nothing else */
  struct pydet_xla_extension *next;
} pydet_xla_extension;

enum { PYDET_XLA_METADATA = 1 };

typedef struct pydet_xla_version {
  size_t struct_size;
  pydet_xla_extension *extensions;
  int32_t major, minor;
} pydet_xla_version;

typedef struct pydet_xla_metadata {
  size_t struct_size;
  pydet_xla_version version;
  uint32_t traits; /* 1: may be captured into a graph of commands */
} pydet_xla_metadata;

typedef struct pydet_xla_metadata_extension {
  pydet_xla_extension base;
  pydet_xla_metadata *metadata;
} pydet_xla_metadata_extension;

/* Of elements. */
enum {
  PYDET_XLA_S32 = 4,
  PYDET_XLA_S64 = 5,
  PYDET_XLA_U8 = 6,
  PYDET_XLA_F16 = 10,
  PYDET_XLA_F32 = 11,
  PYDET_XLA_F64 = 12,
  PYDET_XLA_BF16 = 16,
  PYDET_XLA_F8E5M2 = 19,
  PYDET_XLA_F8E4M3FN = 20,
  PYDET_XLA_F8E8M0FNU = 33
};

typedef struct pydet_xla_buffer {
  size_t struct_size;
  pydet_xla_extension *extensions;
  int32_t dtype;
  void *data;
  int64_t rank;
  int64_t *dims;
} pydet_xla_buffer;

/* Arguments and results. All are buffers. */
typedef struct pydet_xla_list {
  size_t struct_size;
  pydet_xla_extension *extensions;
  int64_t size;
  int32_t *types;
  pydet_xla_buffer **items;
} pydet_xla_list;

typedef struct pydet_xla_name {
  const char *text;
  size_t length;
} pydet_xla_name;

typedef struct pydet_xla_scalar {
  int32_t dtype;
  void *value;
} pydet_xla_scalar;

enum { PYDET_XLA_SCALAR = 3, PYDET_XLA_STRING = 4 }; /* of the types of attributes; a string is a pydet_xla_name */

typedef struct pydet_xla_attributes {
  size_t struct_size;
  pydet_xla_extension *extensions;
  int64_t size;
  int32_t *types;
  pydet_xla_name **names;
  void **items;
} pydet_xla_attributes;

typedef struct pydet_xla_error pydet_xla_error;
typedef struct pydet_xla_context pydet_xla_context;

typedef struct pydet_xla_error_arguments {
  size_t struct_size;
  pydet_xla_extension *extensions;
  const char *message;
  int32_t code; /* PYDET_XLA_INVALID_ARGUMENT, ... */
} pydet_xla_error_arguments;

enum { PYDET_XLA_INVALID_ARGUMENT = 3, PYDET_XLA_INTERNAL = 13 };

typedef struct pydet_xla_stream_arguments {
  size_t struct_size;
  pydet_xla_extension *extensions;
  pydet_xla_context *context;
  void *stream; /* out */
} pydet_xla_stream_arguments;

typedef struct pydet_xla_ordinal_arguments {
  size_t struct_size;
  pydet_xla_extension *extensions;
  pydet_xla_context *context;
  int32_t ordinal; /* out */
} pydet_xla_ordinal_arguments;

typedef struct pydet_xla_api {
  size_t struct_size;
  pydet_xla_extension *extensions;
  pydet_xla_version version;
  const void *internal;
  pydet_xla_error *(*make_error)(pydet_xla_error_arguments *);
  void *unused_1[3];
  pydet_xla_error *(*get_stream)(pydet_xla_stream_arguments *);
  void *unused_2[12];
  pydet_xla_error *(*get_ordinal)(pydet_xla_ordinal_arguments *); /* not in older ones: see struct_size */
} pydet_xla_api;

typedef struct pydet_xla_call {
  size_t struct_size;
  pydet_xla_extension *extensions;
  const pydet_xla_api *api;
  pydet_xla_context *context;
  int32_t stage; /* PYDET_XLA_EXECUTE */
  pydet_xla_list arguments, results;
  pydet_xla_attributes attributes;
} pydet_xla_call;

enum { PYDET_XLA_EXECUTE = 3 };

/* The handlers, on the CPU and on a GPU. Operands are in C order; integers are attributes of 64 bits, floats of 64.
 *
 * gemm: a, b, then a bias if has_bias, what to continue from if accumulate; one result. transpose_a, transpose_b: the
 *   matrices as they lie are a^T, b^T. arithmetic, k_chunk as in pydet_gemm_options. A bias with one row serves all
 *   rows. skinny: a, b^T are x, w of pydet_skinny_gemm, with mode and weights_constant; a batch of b, which that does
 *   not take, goes to pydet_gemm. No workspace: a kernel that wants one (pydet_gemm_workspace) is not chosen.
 * rmsnorm: x, then a residual if has_residual, a weight if has_weight, a bias if has_bias; y, rstd, and the sum if
 *   has_residual. eps, weight_offset. heads: how many a weight or bias has, 0 where it is [n].
 * rmsnorm_backward: dy, x, rstd, then a weight if has_weight, dresidual if has_dresidual, a dweight to continue from if
 *   accumulate; dx, then dweight if has_weight, dbias if has_bias, and a workspace of bytes if either. weight_offset,
 *   heads.
 * layernorm: x, then a residual if has_residual, a weight if has_weight, a bias if has_bias; y, mean, rstd, and the sum
 *   if has_residual. eps, weight_offset.
 * layernorm_backward: dy, x, mean, rstd, then a weight if has_weight, dresidual if has_dresidual; dx, then dweight if
 *   has_weight, dbias if has_bias, and a workspace of bytes if either. weight_offset.
 * softmax: x; y. log. softmax_backward: dy, y; dx. log.
 * log_prob: x, index (int32 or int64); the column of each row. log_prob_backward: dlog_prob, x, index; dx.
 * grouped_gemm: a, b, group_end (int32), and what lies in the result before: rows of no group keep it. depth: a lies as
 *   [T, M] and is read transposed, with b [T, N]. transpose_b: b lies as [G, N, K].
 * scaled_gemm: a, b, whose last two dimensions lie in column order (k adjacent), then a_scale if has_a_scale, b_scale if
 *   has_b_scale, a bias if has_bias, what to continue from if accumulate; one result. arithmetic, k_chunk as in
 *   pydet_scaled_gemm_options.
 * quantize: x, then the scale if given; out, then the scale if not given, the transposed copy and its scale if
 *   transposed. granularity, power_of_two as in pydet_quantize_options.
 * A weight or bias [groups, ..., n] means that many problems: its leading dimensions are the rows' first ones. All take
 * kernel, a string as in the options, "" for none. What is continued from must lie where its result does: XLA's aliasing
 * sees to it. Flags are 0 or 1; what a handler does not read, attribute, operand or result, is refused. */
#ifndef PYDET_API
#define PYDET_API __attribute__((visibility("default")))
#endif
PYDET_API pydet_xla_error *pydet_xla_cpu_gemm(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_cpu_grouped_gemm(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_cpu_scaled_gemm(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_cpu_quantize(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_cpu_rmsnorm(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_cpu_rmsnorm_backward(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_cpu_layernorm(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_cpu_layernorm_backward(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_cpu_softmax(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_cpu_softmax_backward(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_cpu_log_prob(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_cpu_log_prob_backward(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_gpu_gemm(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_gpu_grouped_gemm(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_gpu_scaled_gemm(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_gpu_quantize(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_gpu_rmsnorm(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_gpu_rmsnorm_backward(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_gpu_layernorm(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_gpu_layernorm_backward(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_gpu_softmax(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_gpu_softmax_backward(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_gpu_log_prob(pydet_xla_call *call);
PYDET_API pydet_xla_error *pydet_xla_gpu_log_prob_backward(pydet_xla_call *call);

#ifdef __cplusplus
}
#endif

#endif /* PYDET_XLA_FFI_H */
