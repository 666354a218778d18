/* pydet: deterministic, batch-invariant operations of neural networks for CPU, CUDA and HIP.
 *
 * An output element is a pure function of its own row of A, its own column of B, the arithmetic and k_chunk: not of the
 * batch, strides, alignment, kernel, threads, stream, workspace, earlier calls or release (PYDET_NUMERICS rises where
 * bits change). native/NUMERICS.md writes every sum; docs/reference/rules.md has every rule of the calls below.
 *
 * libpydet_cpu.so, libpydet_cuda.so and libpydet_hip.so share this header, and pick the backend by the tensors' device.
 * A call checks everything first: on any status but PYDET_OK nothing was enqueued or written, and pydet_last_error()
 * says why (after PYDET_DEVICE_ERROR part of the work may run). Calls allocate nothing, never synchronise, may come
 * from any threads and under graph capture, and need at most 16 KiB of its thread's stack.
 *
 * In options struct_size is their sizeof, reserved is 0, kernel is NULL or a name of pydet_kernel_name, and workspace
 * is memory of the tensors' device at a multiple of 16 bytes, or NULL: it never changes a bit. NULL options are the
 * defaults. Structures grow at their ends. stream is a GPU's, NULL for the default one.
 */
#ifndef PYDET_H
#define PYDET_H

#ifndef PYDET_CDEF /* the Python binding is generated from this header, preprocessed with PYDET_CDEF */
#include <stdint.h>
#endif

#if defined(PYDET_CDEF)
#define PYDET_API
#elif defined(__GNUC__)
#define PYDET_API __attribute__((visibility("default")))
#else
#define PYDET_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Versions -------------------------------------------------------------------------------------------------
 * PYDET_ABI rises when callers must be recompiled, PYDET_NUMERICS when a bit may differ. */
enum {
  PYDET_VERSION_MAJOR = 0,
  PYDET_VERSION_MINOR = 2,
  PYDET_VERSION_PATCH = 0,
  PYDET_ABI = 1,
  PYDET_NUMERICS = 2,
};

/* Of the library that was loaded. */
PYDET_API const char *pydet_version(void); /* "0.2.0" */
PYDET_API int32_t pydet_abi(void);
PYDET_API int32_t pydet_numerics(void);

/* ---- Status ---------------------------------------------------------------------------------------------------
 * The numbers are pinned. */
typedef int32_t pydet_status;
enum {
  PYDET_OK = 0,
  PYDET_INVALID_VALUE = 1, /* an option, enumerator, index or struct_size */
  PYDET_INVALID_SHAPE = 2, /* rank or extents */
  PYDET_INVALID_DTYPE = 3,
  PYDET_INVALID_STRIDE = 4, /* no unit stride, a negative one, an output that overlaps itself */
  PYDET_INVALID_DEVICE = 5, /* different devices, or one this build does not serve */
  PYDET_NULL_POINTER = 6,
  PYDET_OVERLAP = 7,    /* an output shares memory with another tensor */
  PYDET_OVERFLOW = 8,   /* past 2^63 - 1 bytes */
  PYDET_MISALIGNED = 9, /* to its own element size */
  PYDET_WORKSPACE_TOO_SMALL = 10,
  PYDET_UNSUPPORTED = 11, /* no kernel here for it */
  PYDET_NO_DEVICE = 12,   /* no such GPU, or no driver that is new enough */
  PYDET_DEVICE_ERROR = 13 /* the runtime refused a launch */
};

/* "PYDET_OVERLAP" for 7. */
PYDET_API const char *pydet_status_name(pydet_status status);

/* Why this thread's last failed call was refused, in one sentence, until its next call. */
PYDET_API const char *pydet_last_error(void);

/* The kernel of this thread's last operation; "" if nothing was to be written. */
PYDET_API const char *pydet_last_kernel(void);

/* ---- Tensors --------------------------------------------------------------------------------------------------
 * DLPack's DLTensor, read only during the call. */
enum {
  PYDET_CPU = 1,
  PYDET_CUDA = 2,
  PYDET_CUDA_HOST = 3,
  PYDET_ROCM = 10,
  PYDET_ROCM_HOST = 11,
  PYDET_CUDA_MANAGED = 13
};
/* dtype codes */
enum {
  PYDET_INT = 0,
  PYDET_FLOAT = 2,
  PYDET_BFLOAT = 4,
  PYDET_BOOL = 6,
  PYDET_FLOAT8_E4M3FN = 10,
  PYDET_FLOAT8_E5M2 = 12,
  PYDET_FLOAT8_E8M0FNU = 14 /* scales alone */
};

typedef struct pydet_device {
  int32_t device_type; /* PYDET_CPU, ... */
  int32_t device_id;
} pydet_device;

typedef struct pydet_dtype {
  uint8_t code;   /* PYDET_FLOAT, ... */
  uint8_t bits;   /* 32, 16 or 8 */
  uint16_t lanes; /* 1 */
} pydet_dtype;

typedef struct pydet_tensor {
  void *data;
  pydet_device device;
  int32_t ndim;
  pydet_dtype dtype;
  int64_t *shape;   /* ndim extents */
  int64_t *strides; /* ndim strides in elements, or NULL for C order */
  uint64_t byte_offset;
} pydet_tensor;

/* ---- Arithmetic -----------------------------------------------------------------------------------------------
 * How one fp32 accumulator walks along k. The CPU computes all, a GPU IEEE and its own tensor cores'. AUTO is IEEE for
 * fp32 and on the CPU, else the device's tensor cores. */
enum {
  PYDET_AUTO = 0,
  PYDET_IEEE = 1,  /* one fmaf per k; fp32, bf16, fp16; the same bits on every backend */
  PYDET_SM90 = 2,  /* Hopper: truncating steps of 16; this and the rest: bf16, fp16 */
  PYDET_SM80 = 3,  /* Ampere, Ada: truncating steps of 8; this and the rest: from published models */
  PYDET_CDNA3 = 4, /* gfx942 */
  PYDET_CDNA2 = 5  /* gfx90a */
};

/* What `arithmetic` means there. */
PYDET_API pydet_status pydet_resolve_arithmetic(pydet_device device, pydet_dtype dtype, int32_t arithmetic,
                                                int32_t *resolved);

/* "sm90" for PYDET_SM90; NULL past the last. */
PYDET_API const char *pydet_arithmetic_name(int32_t arithmetic);

/* ---- GEMM -----------------------------------------------------------------------------------------------------
 *   out[m, n] = round( chain_k(a[m, k], b[k, n]) + bias[n] )
 *
 * a [..., M, K] and b [..., K, N] of one type: fp32, bf16 or fp16. out [..., M, N] and bias, NULL, [N] or like out, of
 * any of these. One of the last two strides is 1. Batches broadcast. A NaN is 0x7FFFFFFF or 0x7FFF. */
typedef struct pydet_gemm_options {
  uint32_t struct_size; /* sizeof(pydet_gemm_options) */
  int32_t arithmetic;   /* PYDET_AUTO, ... */
  int64_t k_chunk;      /* 0: one chain. c, a multiple of 16: chains of c, added in ascending order */
  int32_t accumulate;   /* 1: the chain starts from out, which is fp32 */
  int32_t reserved;
  const char *kernel;
  void *workspace;
  uint64_t workspace_size;
  const pydet_tensor *initial; /* NULL, or fp32 like out, contiguous: the chain starts from it; not with accumulate */
} pydet_gemm_options;

PYDET_API pydet_status pydet_gemm(void *stream, const pydet_tensor *a, const pydet_tensor *b, const pydet_tensor *bias,
                                  const pydet_tensor *out, const pydet_gemm_options *options);

/* Gradients of out = a b:   da[m, k] = sum_n dc[m, n] b[k, n],   db[k, n] = sum_m a[m, k] dc[m, n]
 * Under accumulate db of micro-batches has the bits of one batch, cut at multiples of k_chunk or the arithmetic's
 * step. */
PYDET_API pydet_status pydet_gemm_da(void *stream, const pydet_tensor *dc, const pydet_tensor *b,
                                     const pydet_tensor *da, const pydet_gemm_options *options);
PYDET_API pydet_status pydet_gemm_db(void *stream, const pydet_tensor *a, const pydet_tensor *dc,
                                     const pydet_tensor *db, const pydet_gemm_options *options);

/* Bytes of workspace that a kernel can use, or an initial needs (of an out that is not fp32). */
PYDET_API pydet_status pydet_gemm_workspace(int64_t batch, int64_t m, int64_t n, int64_t k,
                                            const pydet_gemm_options *options, uint64_t *bytes);

/* Bytes more for an operand that a Hopper multiplies faster from a copy, or 0. */
PYDET_API pydet_status pydet_gemm_copy_workspace(const pydet_tensor *operand, uint64_t *bytes);

/* ---- Skinny GEMM ----------------------------------------------------------------------------------------------
 *   y[..., n] = round( chain_k(x[..., k], w[n, k]) + bias[n] )
 *
 * Few rows of x [..., K], a large w [N, K]: the bits of pydet_gemm. Those of PYDET_FAST are NOT promised, not even from
 * run to run. */
enum { PYDET_DETERMINISTIC = 0, PYDET_FAST = 1 };

typedef struct pydet_skinny_gemm_options {
  uint32_t struct_size;
  int32_t arithmetic;
  int64_t k_chunk;
  int32_t accumulate;
  int32_t mode; /* PYDET_DETERMINISTIC, ... */
  const char *kernel;
  void *workspace;
  uint64_t workspace_size;
  int32_t weights_constant; /* 1: no work still running writes w */
  int32_t reserved;
  const pydet_tensor *initial;
} pydet_skinny_gemm_options;

PYDET_API pydet_status pydet_skinny_gemm(void *stream, const pydet_tensor *x, const pydet_tensor *w,
                                         const pydet_tensor *bias, const pydet_tensor *y,
                                         const pydet_skinny_gemm_options *options);

PYDET_API pydet_status pydet_skinny_gemm_workspace(int64_t m, int64_t n, int64_t k,
                                                   const pydet_skinny_gemm_options *options, uint64_t *bytes);

/* ---- Scaled GEMM ----------------------------------------------------------------------------------------------
 *   out[m, n] = round( sum_k a[m, k] sa[m, k div 128] b[k, n] sb[k div 128, n] + bias[n] ), in fp8
 *
 * Operands   and bias as in pydet_gemm, a and b e4m3fn or e5m2, each its own. IEEE or SM90; AUTO is SM90 on Hopper,
 *            which
 * wants k adjacent in both, out's last stride 1, and multiples of 16 bytes. Scales are NULL, or fp32 or e8m0fnu:
 *   a_scale  []   [..., M, 1]   [..., M, ceil(K/128)]
 *   b_scale  []   [..., 1, N]   [..., ceil(K/128), N]   or blocks of 128 x 128: [..., ceil(K/128), ceil(N/128)]
 * With a k_chunk of 32 (MXFP8) 32 takes the place of 128 along k. */
typedef struct pydet_scaled_gemm_options {
  uint32_t struct_size;
  int32_t arithmetic;
  int64_t k_chunk; /* 0: one chain. c, a multiple of 32 (on Hopper 128): chains of c. 128 or 32 with scales along k */
  int32_t accumulate; /* 1: starts from out, which is fp32; scales along k, or none */
  int32_t reserved;
  const char *kernel;
  void *workspace; /* for an initial */
  uint64_t workspace_size;
  const pydet_tensor *initial; /* as in pydet_gemm */
} pydet_scaled_gemm_options;

PYDET_API pydet_status pydet_scaled_gemm(void *stream, const pydet_tensor *a, const pydet_tensor *a_scale,
                                         const pydet_tensor *b, const pydet_tensor *b_scale, const pydet_tensor *bias,
                                         const pydet_tensor *out, const pydet_scaled_gemm_options *options);

PYDET_API pydet_status pydet_scaled_gemm_workspace(int64_t batch, int64_t m, int64_t n, int64_t k,
                                                   const pydet_scaled_gemm_options *options, uint64_t *bytes);

/* ---- Quantisation ---------------------------------------------------------------------------------------------
 *   scale = max(amax, 1e-10) / L,   out = x / scale, clamped to [-L, L];   L is the largest of out's type
 *
 * x [..., M, K], fp32, bf16 or fp16; out e4m3fn or e5m2; amax of what shares a scale:
 *   ROW [..., M, 1]   GROUP [..., M, ceil(K/128)]   BLOCK [..., ceil(M/128), ceil(K/128)]   TENSOR []
 * transposed and its scale, both or neither NULL: those of x transposed; GROUP and BLOCK. */
enum { PYDET_ROW = 0, PYDET_GROUP = 1, PYDET_BLOCK = 2, PYDET_TENSOR = 3 };

typedef struct pydet_quantize_options {
  uint32_t struct_size;
  int32_t granularity;  /* PYDET_ROW, ... */
  int32_t power_of_two; /* 1: scales are rounded up to one */
  int32_t given;        /* 1: scale is read, and nothing transposed */
  int32_t reserved;
  const char *kernel;
} pydet_quantize_options;

PYDET_API pydet_status pydet_quantize(void *stream, const pydet_tensor *x, const pydet_tensor *out,
                                      const pydet_tensor *scale, const pydet_tensor *transposed,
                                      const pydet_tensor *transposed_scale, const pydet_quantize_options *options);

/* ---- RMSNorm --------------------------------------------------------------------------------------------------
 *   y = x rstd (w + weight_offset) + bias,   rstd = 1 / sqrt(mean(x^2) + eps),   over the last dimension
 *
 * In fp32. x [..., N], fp32, bf16 or fp16, elements of a row adjacent; y like x; rstd [...] fp32 or NULL. weight and
 * bias NULL, [N], or [H, N] beside x [..., H, N], of any type. With a residual, like x or fp32, sum receives x +
 * residual, rounded, which is normalised. */
typedef struct pydet_rmsnorm_options {
  uint32_t struct_size;
  float eps;           /* 1e-6 if options is NULL */
  float weight_offset; /* 1 for models that store w - 1 */
  int32_t reserved;
  const char *kernel;
  const pydet_tensor *bias;
} pydet_rmsnorm_options;

PYDET_API pydet_status pydet_rmsnorm(void *stream, const pydet_tensor *x, const pydet_tensor *residual,
                                     const pydet_tensor *weight, const pydet_tensor *y, const pydet_tensor *rstd,
                                     const pydet_tensor *sum, const pydet_rmsnorm_options *options);

/* The same and pydet_quantize of its y in one pass, with the bits of the two calls. weight [N] or NULL; y, what is
 * quantised, may be NULL; scale of any strides: ROW [..., 1], GROUP [..., ceil(N/128)], or TENSOR [], which is read. */
typedef struct pydet_rmsnorm_quantize_options {
  uint32_t struct_size;
  float eps;           /* 1e-6 if options is NULL */
  float weight_offset; /* 1 for models that store w - 1 */
  int32_t granularity;
  int32_t power_of_two; /* 1: scales are rounded up to one */
  int32_t reserved;
  const char *kernel;
} pydet_rmsnorm_quantize_options;

PYDET_API pydet_status pydet_rmsnorm_quantize(void *stream, const pydet_tensor *x, const pydet_tensor *residual,
                                              const pydet_tensor *weight, const pydet_tensor *out,
                                              const pydet_tensor *scale, const pydet_tensor *y,
                                              const pydet_tensor *rstd, const pydet_tensor *sum,
                                              const pydet_rmsnorm_quantize_options *options);

/* Gradients:
 *   xhat = x rstd,  g = dy (w + weight_offset),  dx = rstd (g - xhat mean(g xhat)) + dresidual
 *   dweight[n] = sum over rows of dy xhat,   dbias[n] = sum over rows of dy
 * x is the sum, where there was one. dx, dweight, dbias and dresidual may be NULL; dweight needs a workspace. Under
 * accumulate dweight and dbias, fp32, continue: rows cut at a multiple of PYDET_DWEIGHT_ROWS give the bits of one call.
 * */
enum { PYDET_DWEIGHT_ROWS = 256 };

typedef struct pydet_rmsnorm_backward_options {
  uint32_t struct_size;
  float weight_offset;
  int32_t accumulate;
  int32_t reserved;
  const char *kernel;
  void *workspace;
  uint64_t workspace_size;
  const pydet_tensor *dbias; /* like dweight: twice the workspace */
  int64_t block_sums;        /* 1: a sum for each PYDET_DWEIGHT_ROWS rows, [B, N] or [B, H, N], for pydet_fold */
} pydet_rmsnorm_backward_options;

PYDET_API pydet_status pydet_rmsnorm_backward(void *stream, const pydet_tensor *dy, const pydet_tensor *x,
                                              const pydet_tensor *weight, const pydet_tensor *rstd,
                                              const pydet_tensor *dresidual, const pydet_tensor *dx,
                                              const pydet_tensor *dweight,
                                              const pydet_rmsnorm_backward_options *options);

/* For H heads: rows / H rows of H n elements. */
PYDET_API pydet_status pydet_rmsnorm_backward_workspace(int64_t rows, int64_t n, uint64_t *bytes);

/* ---- LayerNorm ------------------------------------------------------------------------------------------------
 *   y = (x - mean) rstd (w + weight_offset) + bias,   rstd = 1 / sqrt(mean((x - mean)^2) + eps),   of a row
 *
 * As pydet_rmsnorm; mean like rstd. */
typedef struct pydet_layernorm_options {
  uint32_t struct_size;
  float eps; /* 1e-5 if options is NULL */
  float weight_offset;
  int32_t reserved;
  const char *kernel;
} pydet_layernorm_options;

PYDET_API pydet_status pydet_layernorm(void *stream, const pydet_tensor *x, const pydet_tensor *residual,
                                       const pydet_tensor *weight, const pydet_tensor *bias, const pydet_tensor *y,
                                       const pydet_tensor *mean, const pydet_tensor *rstd, const pydet_tensor *sum,
                                       const pydet_layernorm_options *options);

/* Gradients:
 *   xhat = (x - mean) rstd,  g = dy (w + weight_offset),  dx = rstd (g - mean(g) - xhat mean(g xhat)) + dresidual
 * and sums as in pydet_rmsnorm_backward. */
typedef struct pydet_layernorm_backward_options {
  uint32_t struct_size;
  float weight_offset;
  int32_t accumulate;
  int32_t reserved;
  const char *kernel;
  void *workspace;
  uint64_t workspace_size;
} pydet_layernorm_backward_options;

PYDET_API pydet_status pydet_layernorm_backward(void *stream, const pydet_tensor *dy, const pydet_tensor *x,
                                                const pydet_tensor *weight, const pydet_tensor *mean,
                                                const pydet_tensor *rstd, const pydet_tensor *dresidual,
                                                const pydet_tensor *dx, const pydet_tensor *dweight,
                                                const pydet_tensor *dbias,
                                                const pydet_layernorm_backward_options *options);

PYDET_API pydet_status pydet_layernorm_backward_workspace(int64_t rows, int64_t n, uint64_t *bytes);

/* ---- Softmax --------------------------------------------------------------------------------------------------
 *   y = e / s, or under log: (x - m) - log(s);   m = max(x),  e = exp(x - m),  s = sum(e),  over the last dimension
 *
 * In fp32; x and y as in pydet_rmsnorm. -Inf at a row's end changes nothing. The gradient, of the y that was stored:
 * dx = y (dy - sum(dy y)), or under log dy - exp(y) sum(dy). */
typedef struct pydet_softmax_options {
  uint32_t struct_size;
  int32_t log; /* 1: the logarithm */
  const char *kernel;
  int64_t reserved;
} pydet_softmax_options;

PYDET_API pydet_status pydet_softmax(void *stream, const pydet_tensor *x, const pydet_tensor *y,
                                     const pydet_softmax_options *options);
PYDET_API pydet_status pydet_softmax_backward(void *stream, const pydet_tensor *dy, const pydet_tensor *y,
                                              const pydet_tensor *dx, const pydet_softmax_options *options);

/* One column of each row's log-softmax: index [...] int32 or int64, log_prob [...] fp32. An index below 0 or from N on
 * gives NaN, and a gradient of +0. */
typedef struct pydet_log_prob_options {
  uint32_t struct_size;
  int32_t reserved;
  const char *kernel;
} pydet_log_prob_options;

PYDET_API pydet_status pydet_log_prob(void *stream, const pydet_tensor *x, const pydet_tensor *index,
                                      const pydet_tensor *log_prob, const pydet_log_prob_options *options);
PYDET_API pydet_status pydet_log_prob_backward(void *stream, const pydet_tensor *dlog_prob, const pydet_tensor *x,
                                               const pydet_tensor *index, const pydet_tensor *dx,
                                               const pydet_log_prob_options *options);

/* ---- Linear log-probability -----------------------------------------------------------------------------------
 *   z[t, n] = round( chain_k(x[t, k], w[n, k]) + bias[n] );   log_prob[t] = pydet_log_prob of z[t, :] and index[t]
 *
 * x [..., K], w [N, K], bias NULL or [N], index [...], log_prob [...] fp32. z is never whole in memory: the workspace
 * holds it for some rows at a time, and how many changes no bit. Backward makes it again; d is its gradient, rounded:
 *   dx[t, k] = round( chain_n(d[t, n], w[n, k]) );   dw[n, k] = chain_t(d[t, n], x[t, k]);   dbias[n] = chain_t(1, d)
 * dx, dw and dbias may be NULL; sums that are not fp32 need a workspace for all rows. log_prob in backward is NULL, or
 * written too. With a softcap C and a temperature T rows are read as (C tanh(z / C)) / T. More may be asked of them, [...]
 * fp32: the entropy of their softmax, lse = log(sum of exp), their mean; and greedy, int64, the first column of the
 * largest. In backward entropy, lse and mean are the gradients by them. */
typedef struct pydet_linear_log_prob_options {
  uint32_t struct_size;
  int32_t arithmetic;
  int64_t k_chunk;
  pydet_dtype logits; /* z's type: zeros for that of x */
  int32_t accumulate; /* 1: dw and dbias, fp32, continue; micro-batches are multiples of 16 rows (or k_chunk) */
  void *workspace;    /* for fewer rows too: at least 1 forward, 16 (or k_chunk) for sums over rows */
  uint64_t workspace_size;
  float softcap; /* 0: none */
  float temperature;
  const pydet_tensor *entropy;
  const pydet_tensor *lse;
  const pydet_tensor *mean;
  const pydet_tensor *greedy;
  const char *kernel; /* of what is asked of rows (head_rows), which it then makes; NULL: the library's choice */
  int64_t reserved;
} pydet_linear_log_prob_options;

PYDET_API pydet_status pydet_linear_log_prob(void *stream, const pydet_tensor *x, const pydet_tensor *w,
                                             const pydet_tensor *bias, const pydet_tensor *index,
                                             const pydet_tensor *log_prob,
                                             const pydet_linear_log_prob_options *options);
PYDET_API pydet_status pydet_linear_log_prob_backward(void *stream, const pydet_tensor *dlog_prob,
                                                      const pydet_tensor *x, const pydet_tensor *w,
                                                      const pydet_tensor *bias, const pydet_tensor *index,
                                                      const pydet_tensor *log_prob, const pydet_tensor *dx,
                                                      const pydet_tensor *dw, const pydet_tensor *dbias,
                                                      const pydet_linear_log_prob_options *options);

/* For the rows that `most` bytes hold (0: 256 MiB), or the fewest that may be. */
PYDET_API pydet_status pydet_linear_log_prob_workspace(int64_t rows, int64_t n, int64_t k, pydet_dtype type,
                                                       int32_t backward, uint64_t most,
                                                       const pydet_linear_log_prob_options *options, uint64_t *bytes);

/* ---- Linear cross-entropy -------------------------------------------------------------------------------------
 *   loss[t] = -log_prob[t];   with label_smoothing E   (1 - E) loss[t] + E (lse[t] - mean[t]);   + z_loss lse[t]^2
 *
 * Of rows as above and targets, int32 or int64, in fp32. Ignored rows have loss 0 and no gradient.
 * loss is [], or [...] for PYDET_REDUCTION_NONE; dloss like it, or NULL for 1. loss in backward is NULL, or written too. */
enum { PYDET_REDUCTION_MEAN = 0, PYDET_REDUCTION_SUM = 1, PYDET_REDUCTION_NONE = 2 };

typedef struct pydet_linear_cross_entropy_options {
  uint32_t struct_size;
  int32_t arithmetic; /* down to temperature as above */
  int64_t k_chunk;
  pydet_dtype logits;
  int32_t accumulate;
  void *workspace;
  uint64_t workspace_size;
  float softcap;
  float temperature;
  double label_smoothing; /* 0 to 1 */
  double z_loss;
  int32_t reduction;        /* PYDET_REDUCTION_MEAN, ... */
  int32_t has_ignore_index; /* 1: ignore_index holds; 0: it is -100 */
  int64_t ignore_index;
  const pydet_tensor *lse; /* NULL, or [...]: forward writes it, and it spares backward with z_loss a product */
  const char *kernel;
  int64_t reserved;
} pydet_linear_cross_entropy_options;

PYDET_API pydet_status pydet_linear_cross_entropy(void *stream, const pydet_tensor *x, const pydet_tensor *w,
                                                  const pydet_tensor *bias, const pydet_tensor *target,
                                                  const pydet_tensor *loss,
                                                  const pydet_linear_cross_entropy_options *options);
PYDET_API pydet_status pydet_linear_cross_entropy_backward(void *stream, const pydet_tensor *dloss,
                                                           const pydet_tensor *x, const pydet_tensor *w,
                                                           const pydet_tensor *bias, const pydet_tensor *target,
                                                           const pydet_tensor *loss, const pydet_tensor *dx,
                                                           const pydet_tensor *dw, const pydet_tensor *dbias,
                                                           const pydet_linear_cross_entropy_options *options);

/* As above. */
PYDET_API pydet_status pydet_linear_cross_entropy_workspace(int64_t rows, int64_t n, int64_t k, pydet_dtype type,
                                                            int32_t backward, uint64_t most,
                                                            const pydet_linear_cross_entropy_options *options,
                                                            uint64_t *bytes);

/* ---- Sampling --------------------------------------------------------------------------------------------------
 * A token of each row of logits x [..., N], drawn from softmax(x / temperature): a function of its row, seed, position
 * and options alone.
 *
 *   z = x / temperature,   token = the column of the largest z - max(z) + g, the lowest of equal ones
 *   g = -log(-log(u)),     u of Philox4x32-10: seed is the key, position and column are the counter
 *
 * top_k keeps that many of the largest (0: all), of these top_p the fewest that reach top_p of their probability
 * (1: all), of these min_p those at least min_p as probable as the likeliest (0: all). temperature 0, as NULL options:
 * the largest x, the first of equal ones. seed, position [...] int32 or int64; token [...] int64; log_prob, before the
 * filters, and filtered_log_prob [...] fp32 or NULL. A row with a NaN or +Inf, or of nothing but -Inf, has token -1. */
typedef struct pydet_sample_options {
  uint32_t struct_size;
  float temperature;
  float top_p;
  float min_p;
  int64_t top_k;
  const pydet_tensor *temperatures; /* NULL, or [...] fp32 (top_ks: int32 or int64): each row's own */
  const pydet_tensor *top_ks;
  const pydet_tensor *top_ps;
  const pydet_tensor *min_ps;
  const char *kernel;
  int64_t reserved;
} pydet_sample_options;

PYDET_API pydet_status pydet_sample(void *stream, const pydet_tensor *x, const pydet_tensor *seed,
                                    const pydet_tensor *position, const pydet_tensor *token,
                                    const pydet_tensor *log_prob, const pydet_tensor *filtered_log_prob,
                                    const pydet_sample_options *options);

/* The k largest of each row, descending, equal ones by ascending column, NaN first: values [..., k] of x's type, index
 * [..., k] int64. */
typedef struct pydet_topk_options {
  uint32_t struct_size;
  int32_t reserved;
  const char *kernel;
} pydet_topk_options;

PYDET_API pydet_status pydet_topk(void *stream, const pydet_tensor *x, const pydet_tensor *values,
                                  const pydet_tensor *index, const pydet_topk_options *options);

/* ---- Embedding -------------------------------------------------------------------------------------------------
 *   out[t, :] = w[ids[t], :],   dw[v, :] = sum of dout[t, :] over the tokens t with ids[t] = v, ascending, in fp32
 *
 * w [V, N], ids [...] int32 or int64, out [..., N] of w's type; dw of dout's, or fp32. Under accumulate dw, fp32,
 * continues: tokens may be cut anywhere. The CPU refuses an id that is no row of the table; a GPU gives NaN. */
typedef struct pydet_embedding_options {
  uint32_t struct_size;
  int32_t reserved;
  const char *kernel;
} pydet_embedding_options;

PYDET_API pydet_status pydet_embedding(void *stream, const pydet_tensor *w, const pydet_tensor *ids,
                                       const pydet_tensor *out, const pydet_embedding_options *options);

typedef struct pydet_embedding_backward_options {
  uint32_t struct_size;
  int32_t accumulate;
  int64_t padding; /* where has_padding is 1: an id that has no part in dw */
  int32_t has_padding;
  int32_t reserved;
  const char *kernel;
  void *workspace;
  uint64_t workspace_size;
} pydet_embedding_backward_options;

PYDET_API pydet_status pydet_embedding_backward(void *stream, const pydet_tensor *dout, const pydet_tensor *ids,
                                                const pydet_tensor *dw,
                                                const pydet_embedding_backward_options *options);

PYDET_API pydet_status pydet_embedding_backward_workspace(int64_t tokens, int64_t rows, uint64_t *bytes);

/* ---- Rotary embeddings ------------------------------------------------------------------------------------------
 *   a[..., j] = fl(position[...] frequencies[j]),   cos = round(fl(cos(a) scale)),   sin = round(fl(sin(a) scale))
 *
 * positions [...], frequencies [F] fp32; cos and sin [..., F], or [..., 2 F] with the F once more. */
typedef struct pydet_rotary_table_options {
  uint32_t struct_size;
  float scale; /* 1 without options */
  int64_t reserved;
  const char *kernel;
} pydet_rotary_table_options;

PYDET_API pydet_status pydet_rotary_table(void *stream, const pydet_tensor *positions, const pydet_tensor *frequencies,
                                          const pydet_tensor *cos, const pydet_tensor *sin,
                                          const pydet_rotary_table_options *options);

/* Pairs (a, b) of the first R elements of each head become (a cos - b sin, b cos + a sin); the rest is copied. q [...,
 * H, N], k [..., G, N] or NULL, and outputs like them; cos and sin [..., R / 2], or under `whole` [..., R], in the
 * places of q_out. Pair i is elements i and R / 2 + i, or 2 i and 2 i + 1 of q and k under neighbours, of the outputs
 * under out_neighbours. Products are rounded to q_out's type, and their sum; under in_fp32 the sum alone. transposed:
 * the gradient. */
typedef struct pydet_rotary_options {
  uint32_t struct_size;
  int32_t whole, neighbours, out_neighbours, in_fp32, transposed; /* 0 or 1 */
  int64_t reserved;
  const char *kernel;
} pydet_rotary_options;

PYDET_API pydet_status pydet_rotary(void *stream, const pydet_tensor *q, const pydet_tensor *k, const pydet_tensor *cos,
                                    const pydet_tensor *sin, const pydet_tensor *q_out, const pydet_tensor *k_out,
                                    const pydet_rotary_options *options);

/* ---- Activations ----------------------------------------------------------------------------------------------
 *   y = f(x), or as the gate of another factor: y = f(x) up        element by element
 *
 *   SILU        x / (1 + e^-x)                     SIGMOID   1 / (1 + e^-x)
 *   GELU        x P(a normal number is below x)    TANH      tanh(x)
 *   GELU_TANH   its approximation by tanh          SOFTPLUS  log(1 + e^x)
 *   QUICK_GELU  x / (1 + e^(-1.702 x))             EXP       e^x
 *
 * In fp32, rounded once; with up, f(x) and then the product. x [..., N] as in pydet_softmax; y may be x or up itself.
 * */
enum {
  PYDET_SILU = 0,
  PYDET_GELU = 1,
  PYDET_GELU_TANH = 2,
  PYDET_QUICK_GELU = 3,
  PYDET_SIGMOID = 4,
  PYDET_TANH = 5,
  PYDET_SOFTPLUS = 6,
  PYDET_EXP = 7
};

typedef struct pydet_activation_options {
  uint32_t struct_size;
  int32_t kind; /* PYDET_SILU, ... */
  const char *kernel;
  int64_t reserved;
} pydet_activation_options;

PYDET_API pydet_status pydet_activation(void *stream, const pydet_tensor *x, const pydet_tensor *up,
                                        const pydet_tensor *y, const pydet_activation_options *options);

/* dx = dy f'(x); with up: dx = (dy up) f'(x), dup = dy f(x), the inner results rounded. Either may be NULL; each may be
 * dy, x or up itself. */
PYDET_API pydet_status pydet_activation_backward(void *stream, const pydet_tensor *dy, const pydet_tensor *x,
                                                 const pydet_tensor *up, const pydet_tensor *dx,
                                                 const pydet_tensor *dup, const pydet_activation_options *options);

/* ---- Scans -----------------------------------------------------------------------------------------------------
 * Recurrences in fp32, token by token: cut into calls, each of which takes the state that the last one left, a sequence
 * has the bits of one call.
 *
 * selective_scan: of each head, with a state S [states, width],
 *     u = dt x,   S = fmaf(u, b, exp(dt a) S),   y = the sum over the states of c S, and d x
 * x, y [batch, tokens, heads, width]; dt [batch, tokens, heads]; b, c [batch, tokens, groups, states]; a [heads] or
 * [heads, states], d [heads] or NULL, fp32; initial, final [sequences, heads, width, states] fp32, or NULL.
 *
 * gated_delta: of each head, with a state S [keys, width],
 *     S = exp(g) S,   w = beta (v - the sum over the keys of k S),   S = fmaf(k, w, S),   o = the sum of q S
 * v, o [batch, tokens, heads, width]; q, k [batch, tokens, groups, keys]; g, beta [batch, tokens, heads]; initial,
 * final [sequences, heads, keys, width] fp32, or NULL.
 *
 * causal_conv1d: of each channel y[t] = the sum over the taps of w[j] x[t - taps + 1 + j], and bias
 * x, y [batch, tokens, channels]; w [channels, taps]; bias [channels] or NULL; initial [sequences, taps - 1, channels]
 * or NULL: what lies before.
 *
 * Up to 512 states or keys, 64 taps. cu_seqlens [sequences + 1] int32 or int64, or NULL: where sequences of a batch of
 * 1 begin and end. */
typedef struct pydet_scan_options {
  uint32_t struct_size;
  int32_t reserved;
  const char *kernel;
} pydet_scan_options;

PYDET_API pydet_status pydet_selective_scan(void *stream, const pydet_tensor *x, const pydet_tensor *dt,
                                            const pydet_tensor *a, const pydet_tensor *b, const pydet_tensor *c,
                                            const pydet_tensor *d, const pydet_tensor *initial,
                                            const pydet_tensor *cu_seqlens, const pydet_tensor *y,
                                            const pydet_tensor *final, const pydet_scan_options *options);

PYDET_API pydet_status pydet_gated_delta(void *stream, const pydet_tensor *q, const pydet_tensor *k,
                                         const pydet_tensor *v, const pydet_tensor *g, const pydet_tensor *beta,
                                         const pydet_tensor *initial, const pydet_tensor *cu_seqlens,
                                         const pydet_tensor *o, const pydet_tensor *final,
                                         const pydet_scan_options *options);

PYDET_API pydet_status pydet_causal_conv1d(void *stream, const pydet_tensor *x, const pydet_tensor *w,
                                           const pydet_tensor *bias, const pydet_tensor *initial,
                                           const pydet_tensor *cu_seqlens, const pydet_tensor *y,
                                           const pydet_scan_options *options);

/* Gradients: the recurrence walked backwards. Those of w, bias, a and d are a sum for each sequence, [sequences, ...]
 * in fp32, for pydet_fold; others are like what they are gradients of. dfinal and dinitial may be NULL, of
 * causal_conv1d any result. */
typedef struct pydet_scan_backward_options {
  uint32_t struct_size;
  int32_t reserved;
  const char *kernel;
  void *workspace;
  uint64_t workspace_size;
} pydet_scan_backward_options;

PYDET_API pydet_status pydet_selective_scan_backward(
    void *stream, const pydet_tensor *dy, const pydet_tensor *dfinal, const pydet_tensor *x, const pydet_tensor *dt,
    const pydet_tensor *a, const pydet_tensor *b, const pydet_tensor *c, const pydet_tensor *d,
    const pydet_tensor *initial, const pydet_tensor *cu_seqlens, const pydet_tensor *dx, const pydet_tensor *ddt,
    const pydet_tensor *da, const pydet_tensor *db, const pydet_tensor *dc, const pydet_tensor *dd,
    const pydet_tensor *dinitial, const pydet_scan_backward_options *options);

PYDET_API pydet_status pydet_gated_delta_backward(void *stream, const pydet_tensor *dout, const pydet_tensor *dfinal,
                                                  const pydet_tensor *q, const pydet_tensor *k, const pydet_tensor *v,
                                                  const pydet_tensor *g, const pydet_tensor *beta,
                                                  const pydet_tensor *initial, const pydet_tensor *cu_seqlens,
                                                  const pydet_tensor *dq, const pydet_tensor *dk,
                                                  const pydet_tensor *dv, const pydet_tensor *dg,
                                                  const pydet_tensor *dbeta, const pydet_tensor *dinitial,
                                                  const pydet_scan_backward_options *options);

/* `tokens` of all sequences together, heads of `width` columns. */
PYDET_API pydet_status pydet_selective_scan_backward_workspace(int64_t sequences, int64_t tokens, int64_t heads,
                                                               int64_t width, int64_t groups, int64_t states,
                                                               uint64_t *bytes);
PYDET_API pydet_status pydet_gated_delta_backward_workspace(int64_t sequences, int64_t tokens, int64_t heads,
                                                            int64_t width, int64_t groups, int64_t keys,
                                                            uint64_t *bytes);

PYDET_API pydet_status pydet_causal_conv1d_backward(void *stream, const pydet_tensor *dy, const pydet_tensor *x,
                                                    const pydet_tensor *w, const pydet_tensor *initial,
                                                    const pydet_tensor *cu_seqlens, const pydet_tensor *dx,
                                                    const pydet_tensor *dw, const pydet_tensor *dbias,
                                                    const pydet_tensor *dinitial,
                                                    const pydet_scan_backward_options *options);

/* ---- Attention ------------------------------------------------------------------------------------------------
 *   out[i, :] = sum_j p_j v[j, :] / sum_j p_j,   p_j = exp(scale q[i, :] k[j, :]),   over keys j that query i may see
 *
 * A query's result is a function of its own row of q and its own keys and values, counted from its sequence's first
 * key: a decoded token has the bits of a prefill's last row.
 *
 * Operands   q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E], out [B, H, Q, E], fp32, bf16 or fp16, the same; lse NULL
 *            or [B, H, Q] fp32. G divides H. D and E are multiples of 8 up to 256, or 576 and 512. Last strides are 1.
 * Packed     cu_seqlens_q [B + 1]: q [T, H, D], out and lse likewise; cu_seqlens_k: k and v [T, G, ...].
 * Pages      block_table [B, N]: k and v [P, S, G, ...]; key j of sequence s is in page block_table[s, j / S].
 * Lengths    seqlens_k [B]: keys that are there (with pages it must be); first_key [B]: where they begin. All of these
 *            are int32, on the device.
 * Masks      Query i stands at key K - Q + i: causal sees none after that, window none beyond window_left and
 *            window_right of it. allowed, bool, and bias broadcast to [B, H, Q, K]; a key of bias -Inf is not seen. No
 *            key seen: out 0, lse -Inf.
 * Softcap    softcap tanh(score / softcap) in place of a score, before bias and masks.
 * Sinks      [H]: a score of one key more, of value 0. */
typedef struct pydet_attention_options {
  uint32_t struct_size;
  int32_t arithmetic;
  float scale;         /* 0: 1 / sqrt(D) */
  float softcap;       /* 0: none */
  int32_t causal;      /* 1: no key after the query's place */
  int32_t window;      /* 1: window_left and window_right hold */
  int64_t window_left; /* keys; -1: any number */
  int64_t window_right;
  int64_t kv_chunk;          /* keys that are summed apart, a multiple of 128; 0: 1024 */
  const pydet_tensor *sinks; /* this and all that follow: NULL for none */
  const pydet_tensor *allowed;
  const pydet_tensor *bias;
  const pydet_tensor *first_key;
  const pydet_tensor *cu_seqlens_q;
  const pydet_tensor *cu_seqlens_k;
  const pydet_tensor *seqlens_k;
  const pydet_tensor *block_table;
  const char *kernel;
  void *workspace;
  uint64_t workspace_size;
  int64_t reserved;
} pydet_attention_options;

PYDET_API pydet_status pydet_attention(void *stream, const pydet_tensor *q, const pydet_tensor *k,
                                       const pydet_tensor *v, const pydet_tensor *out, const pydet_tensor *lse,
                                       const pydet_attention_options *options);

/* queries: of each sequence, or of the whole pack; keys: the most of any. */
PYDET_API pydet_status pydet_attention_workspace(int64_t sequences, int64_t heads, int64_t groups, int64_t queries,
                                                 int64_t keys, int64_t d, int64_t e,
                                                 const pydet_attention_options *options, uint64_t *bytes);

/* ---- Attention, backward ---------------------------------------------------------------------------------------
 * From dout, and out and lse as pydet_attention gave them. A row of dq is a function of its own query, keys and values;
 * a row of dk and dv of its own sequence, whose queries count in blocks of 128.
 *
 * Operands   As there; no pages. dq, dk and dv fp32 or of the operands' type; dq may be NULL, dk and dv both. dsinks
 *            NULL or [H]. Rows of dk and dv that are no own key are +0.
 * Cuts       accumulate: dk, dv and dsinks, fp32, continue. Calls of some sequences each, or of queries cut at
 *            multiples of 128, have the bits of one call. */
typedef struct pydet_attention_backward_options {
  uint32_t struct_size;
  int32_t arithmetic; /* down to window_right as there */
  float scale;
  float softcap;
  int32_t causal;
  int32_t window;
  int64_t window_left;
  int64_t window_right;
  int32_t accumulate;
  int32_t reserved;
  const pydet_tensor *sinks; /* this and all that follow: NULL for none */
  const pydet_tensor *dsinks;
  const pydet_tensor *allowed;
  const pydet_tensor *bias;
  const pydet_tensor *first_key;
  const pydet_tensor *cu_seqlens_q;
  const pydet_tensor *cu_seqlens_k;
  const pydet_tensor *seqlens_k;
  const char *kernel;
  void *workspace;
  uint64_t workspace_size;
} pydet_attention_backward_options;

PYDET_API pydet_status pydet_attention_backward(void *stream, const pydet_tensor *dout, const pydet_tensor *q,
                                                const pydet_tensor *k, const pydet_tensor *v, const pydet_tensor *out,
                                                const pydet_tensor *lse, const pydet_tensor *dq, const pydet_tensor *dk,
                                                const pydet_tensor *dv,
                                                const pydet_attention_backward_options *options);

PYDET_API pydet_status pydet_attention_backward_workspace(int64_t sequences, int64_t heads, int64_t groups,
                                                          int64_t queries, int64_t keys, int64_t d, int64_t e,
                                                          const pydet_attention_backward_options *options,
                                                          uint64_t *bytes);

/* ---- Grouped GEMM ---------------------------------------------------------------------------------------------
 *   rows    out[t, :] = round( chain_k(a[t, k], b[g, k, :]) + bias[g, :] )      a [T, K], b [G, K, N], out [T, N]
 *   depth   out[g, :, :] = round( chain_t(a[:, t], b[t, :]) + bias[g, :] )      a [M, T], b [T, N], out [G, M, N]
 *
 * for the tokens t of each group g, start[g] <= t < end[g], with the operands and bits of pydet_gemm. bias NULL or [G,
 * N]. group_start and group_end [G], int32, are read on the device when the work runs, and clamped; group_start NULL:
 * where the group before ended. A group without tokens: in rows nothing, in depth zeros, or out, plus bias. */
typedef struct pydet_grouped_gemm_options {
  uint32_t struct_size;
  int32_t arithmetic;
  int64_t k_chunk;
  int32_t accumulate;
  int32_t reserved;
  const char *kernel;
  void *workspace; /* for an initial: 4 bytes an element of an out that is not fp32 */
  uint64_t workspace_size;
  const pydet_tensor *initial; /* as in pydet_gemm */
} pydet_grouped_gemm_options;

PYDET_API pydet_status pydet_grouped_gemm(void *stream, const pydet_tensor *a, const pydet_tensor *b,
                                          const pydet_tensor *bias, const pydet_tensor *group_start,
                                          const pydet_tensor *group_end, const pydet_tensor *out,
                                          const pydet_grouped_gemm_options *options);

/* ---- Scaled grouped GEMM --------------------------------------------------------------------------------------
 *   out[t, n] = round( sum_k a[t, k] sa[t, k div 128] b[g, k, n] sb[g, k div 128, n] + bias[g, n] ), in fp8
 *
 * Rows with the bits and scales of pydet_scaled_gemm; b_scale has G first, or is of every group. */
typedef struct pydet_scaled_grouped_gemm_options {
  uint32_t struct_size;
  int32_t arithmetic;
  int64_t k_chunk;
  int32_t accumulate;
  int32_t reserved;
  const char *kernel;
  void *workspace; /* for an initial, as in pydet_grouped_gemm */
  uint64_t workspace_size;
  const pydet_tensor *initial;
} pydet_scaled_grouped_gemm_options;

PYDET_API pydet_status pydet_scaled_grouped_gemm(void *stream, const pydet_tensor *a, const pydet_tensor *a_scale,
                                                 const pydet_tensor *b, const pydet_tensor *b_scale,
                                                 const pydet_tensor *bias, const pydet_tensor *group_start,
                                                 const pydet_tensor *group_end, const pydet_tensor *out,
                                                 const pydet_scaled_grouped_gemm_options *options);

/* ---- Fold -----------------------------------------------------------------------------------------------------
 *   out = round( D + bias ),   D = D0 + parts[0] + parts[1] + ... element by element in fp32,   D0 = +0, or out
 *
 * ORDERED one after the other, as k_chunk adds its chunks: cut anywhere. TREE by the binary tree over the parts'
 * numbers:
 * cut at multiples of a power of two. parts: 1 to PYDET_FOLD_PARTS, fp32, like out; all contiguous. */
enum { PYDET_ORDERED = 0, PYDET_TREE = 1 };
enum { PYDET_FOLD_PARTS = 64 };

/* The ranks of one fold, a CUDA device each, in one launch: parts are this rank's, out is the fold of all ranks' parts,
 * rank 0's first. All make the same calls in the same order; a rank waits on its device for the others. On a device no
 * more than two may run at a time, on memory of their own.
 * memory: of each rank, reached by all, at least PYDET_FOLD_SIGNALS + (all ranks' parts + ranks) PYDET_FOLD_ROOM; the
 * signals are zeros before the first call.
 * fault: words that the device writes: [0] why a fold was not finished, [1] which rank DISAGREES, came LATE or LEFT.
 * What it lacks of out is NaN, as are later folds, until the host has waited for all and zeroed words and signals.
 * Without it the device fails, for the process.
 * flag: this rank alone folds its parts, some of which rank `from` brings before it puts word at flag, which was 0. */
enum { PYDET_FOLD_RANKS = 16, PYDET_FOLD_SIGNALS = 1 << 17, PYDET_FOLD_ROOM = 3 << 20 };
enum { PYDET_FOLD_BLOCKS = 128, PYDET_FOLD_FAULT = 2 };
enum { PYDET_FOLD_DISAGREES = 1, PYDET_FOLD_LATE = 2, PYDET_FOLD_LEFT = 3 };

typedef struct pydet_fold_peers {
  uint32_t struct_size;
  int32_t ranks;
  int32_t rank;        /* this one */
  int32_t gathered;    /* 1: parts are all ranks', of this rank's share of out, written before */
  int32_t scatter;     /* 1: out is this rank's share alone, as many rows for each */
  uint32_t timeout_ms; /* 0: for ever */
  void *const *memory; /* [ranks] */
  uint64_t memory_size;
  uint64_t word;      /* what the call is and which, the same on every rank */
  uint64_t *fault;    /* NULL, or this rank's words */
  int32_t first_sums; /* 0, or how many parts rank 0 has as one sum */
  int32_t from;
  const uint64_t *flag; /* NULL, or where word comes */
} pydet_fold_peers;

typedef struct pydet_fold_options {
  uint32_t struct_size;
  int32_t order;      /* PYDET_ORDERED or PYDET_TREE */
  int32_t accumulate; /* 1: D0 is out, fp32 */
  int32_t reserved;
  const char *kernel;
  const pydet_fold_peers *peers; /* NULL: this device alone */
} pydet_fold_options;

PYDET_API pydet_status pydet_fold(void *stream, const pydet_tensor *const *parts, int32_t count,
                                  const pydet_tensor *bias, const pydet_tensor *out, const pydet_fold_options *options);

/* ---- AdamW ----------------------------------------------------------------------------------------------------
 * A step in place, of 1 to PYDET_ADAMW_TENSORS tensors. masters: NULL, or fp32 beside bf16, fp16. */
enum { PYDET_ADAMW_TENSORS = 64 };

typedef struct pydet_adamw_step {
  uint32_t struct_size;
  int32_t reserved;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double beta1_power; /* beta1^t */
  double beta2_power;
} pydet_adamw_step;

typedef struct pydet_adamw_options {
  uint32_t struct_size;
  int32_t reserved;
  const char *kernel;
} pydet_adamw_options;

PYDET_API pydet_status pydet_adamw(void *stream, const pydet_tensor *const *params, const pydet_tensor *const *grads,
                                   const pydet_tensor *const *exp_avgs, const pydet_tensor *const *exp_avg_sqs,
                                   const pydet_tensor *const *masters, int32_t count, const pydet_adamw_step *step,
                                   const pydet_adamw_options *options);

/* ---- Threads --------------------------------------------------------------------------------------------------
 * Of one call on the CPU, its caller among them: by pydet_set_threads, PYDET_NUM_THREADS, OMP_NUM_THREADS, or the CPUs
 * granted. No bit depends on it. */
PYDET_API int32_t pydet_threads(void);

/* For the process; 0 undoes it. */
PYDET_API pydet_status pydet_set_threads(int32_t count);

/* ---- What is here ---------------------------------------------------------------------------------------------*/
typedef struct pydet_device_info {
  uint32_t struct_size;
  int32_t multiprocessors; /* SMs, CUs, or logical CPUs */
  char name[64];           /* "NVIDIA H100 80GB HBM3" */
  char arch[32];           /* "sm_90", "gfx942", "x86-64 avx512" */
} pydet_device_info;

/* Devices of a type that this build can use, or 0. */
PYDET_API pydet_status pydet_device_count(int32_t device_type, int32_t *count);
PYDET_API pydet_status pydet_query_device(pydet_device device, pydet_device_info *info);

typedef struct pydet_kernel_info {
  uint32_t struct_size;
  int32_t device_type; /* where it runs */
  int32_t available;   /* 1: some device here can run it */
  int32_t arithmetic;  /* PYDET_IEEE, ... */
  const char *name;
  const char *operation; /* "rmsnorm_backward" */
  const char *dtypes;    /* of inputs: "bf16 fp16" */
  const char *requires_; /* "avx512", "sm_90a" */
} pydet_kernel_info;

/* NULL past the last. */
PYDET_API const char *pydet_kernel_name(int32_t index);
PYDET_API pydet_status pydet_query_kernel(int32_t index, pydet_kernel_info *info);

#ifdef __cplusplus
}
#endif

#endif /* PYDET_H */
