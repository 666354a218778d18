/* pydet: deterministic, batch-invariant GEMM (plain, skinny, grouped, fp8), norms, softmax and activations for CPU,
 * CUDA and HIP.
 *
 * The promise. An output element is a pure function of its own row of A, its own column of B, the arithmetic and
 * k_chunk. Nothing else reaches its bits: not M or N, the place in the batch, padding, strides, alignment, the kernel,
 * the number of SMs or threads, the stream, graph replay, a workspace, earlier calls, or the release of pydet (one that
 * must change bits raises PYDET_NUMERICS). NUMERICS.md writes every sum as a formula.
 *
 * The library. libpydet_cpu.so, libpydet_cuda.so and libpydet_hip.so share this header; each holds the CPU kernels too,
 * and picks the backend by the tensors' device. It keeps no state that a result depends on, never synchronises, prints
 * or exits, works under CUDA-graph capture, allocates nothing for a call, and may be called from any threads at once.
 *
 * The process. A call on the CPU needs at most 16 KiB of its thread's stack. The CPU kernels have threads of their own
 * (pydet_threads) and 512 KiB for each that is computing, made when first needed and kept; where they cannot be had,
 * the caller computes alone, or in smaller pieces, with the same bits. The library works on after fork(), in the child
 * too; fork() itself must not be called in a signal handler that interrupted a call. dlclose() does not unload it. A
 * signal handler may call it, even where it interrupted a call, if that thread has called it before and the process has
 * its threads (one large call makes them).
 *
 * The call. Every operation checks everything before it launches anything, and returns a status. On any but PYDET_OK
 * nothing was enqueued and no output was touched, and pydet_last_error() says why in one sentence. PYDET_DEVICE_ERROR
 * alone may come after part of the work was enqueued; then the device itself is in trouble.
 *
 * Structures that begin with struct_size, which the caller sets to their sizeof, grow at their ends. What the options
 * of an earlier release lack is 0; those of a later one are taken if all that this release does not know is 0, else
 * refused (PYDET_UNSUPPORTED). Of an info, so many bytes are written. `reserved` is 0. `kernel` is NULL, or a name of
 * pydet_kernel_name: that kernel or PYDET_UNSUPPORTED.
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
 * PYDET_ABI rises when a caller must be recompiled, PYDET_NUMERICS when any output bit may differ. */
enum {
  PYDET_VERSION_MAJOR = 0,
  PYDET_VERSION_MINOR = 2,
  PYDET_VERSION_PATCH = 0,
  PYDET_ABI = 1,
  PYDET_NUMERICS = 2,
};

/* The same three, of the library that was loaded. */
PYDET_API const char *pydet_version(void); /* "0.2.0" */
PYDET_API int32_t pydet_abi(void);
PYDET_API int32_t pydet_numerics(void);

/* ---- Status ---------------------------------------------------------------------------------------------------
 * The numbers are pinned. */
typedef int32_t pydet_status;
enum {
  PYDET_OK = 0,
  PYDET_INVALID_VALUE = 1,  /* an option, enumerator, index or struct_size that means nothing */
  PYDET_INVALID_SHAPE = 2,  /* rank or extents that do not fit each other */
  PYDET_INVALID_DTYPE = 3,  /* an element type this operand or arithmetic does not take */
  PYDET_INVALID_STRIDE = 4, /* no unit stride, a negative stride, an output that overlaps itself */
  PYDET_INVALID_DEVICE = 5, /* tensors on different devices, or a device this build does not serve */
  PYDET_NULL_POINTER = 6,   /* a required tensor or its data is NULL */
  PYDET_OVERLAP = 7,        /* an output shares memory with an input or another output */
  PYDET_OVERFLOW = 8,       /* an extent or address past 2^63 - 1 bytes */
  PYDET_MISALIGNED = 9,     /* data not aligned to its own element size */
  PYDET_WORKSPACE_TOO_SMALL = 10,
  PYDET_UNSUPPORTED = 11, /* meaningful, but this build or machine has no kernel for it */
  PYDET_NO_DEVICE = 12,   /* no such GPU here, or its driver is missing or too old */
  PYDET_DEVICE_ERROR = 13 /* the runtime refused a launch */
};

/* "PYDET_OVERLAP" for 7, "unknown status" for a number not above. */
PYDET_API const char *pydet_status_name(pydet_status status);

/* Why this thread's last call that failed was refused: operation, argument, got, want. Valid until its next call. */
PYDET_API const char *pydet_last_error(void);

/* The kernel of this thread's last successful operation; "" if it had nothing to write. */
PYDET_API const char *pydet_last_kernel(void);

/* ---- Tensors --------------------------------------------------------------------------------------------------
 * Laid out as DLPack's DLTensor: a pointer to one may be passed. Descriptors are read only during the call. */
enum {
  PYDET_CPU = 1,
  PYDET_CUDA = 2,
  PYDET_CUDA_HOST = 3,
  PYDET_ROCM = 10,
  PYDET_ROCM_HOST = 11,
  PYDET_CUDA_MANAGED = 13
};
/* dtype codes: FLOAT of 32 or 16 bits, BFLOAT of 16, the FLOAT8 of 8; INT of 32 or 64 for numbers of columns, keys and
 * pages, BOOL of 8 for masks */
enum {
  PYDET_INT = 0,
  PYDET_FLOAT = 2,
  PYDET_BFLOAT = 4,
  PYDET_BOOL = 6,
  PYDET_FLOAT8_E4M3FN = 10,
  PYDET_FLOAT8_E5M2 = 12,
  PYDET_FLOAT8_E8M0FNU = 14 /* a power of two: for scales alone */
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
 * How one fp32 accumulator walks along k (NUMERICS.md, "GEMM"). The CPU computes all of them, a GPU those of its own
 * tensor cores. AUTO is IEEE for fp32 and on the CPU, else the device's tensor cores: pydet_resolve_arithmetic says
 * which. */
enum {
  PYDET_AUTO = 0,
  PYDET_IEEE = 1,  /* one fmaf per k, round to nearest even; fp32, bf16, fp16; the same bits on every backend */
  PYDET_SM90 = 2,  /* Hopper tensor cores: truncating steps of 16; bf16, fp16 */
  PYDET_SM80 = 3,  /* Ampere and Ada tensor cores: truncating steps of 8; bf16, fp16; from a published model */
  PYDET_CDNA3 = 4, /* AMD gfx942 matrix cores; bf16, fp16; from a published model */
  PYDET_CDNA2 = 5  /* AMD gfx90a matrix cores; bf16, fp16; from a published model */
};

/* What `arithmetic` means for inputs of this dtype on this device. */
PYDET_API pydet_status pydet_resolve_arithmetic(pydet_device device, pydet_dtype dtype, int32_t arithmetic,
                                                int32_t *resolved);

/* "sm90" for PYDET_SM90, NULL past the last: for (int32_t i = 0; pydet_arithmetic_name(i); ++i) lists them. */
PYDET_API const char *pydet_arithmetic_name(int32_t arithmetic);

/* ---- GEMM -----------------------------------------------------------------------------------------------------
 *   out[m, n] = round( chain_k(a[m, k], b[k, n]) + bias[n] )
 *
 * Operands   a [..., M, K] and b [..., K, N], fp32, bf16 or fp16, the same type. out [..., M, N] and bias, NULL, [N] or
 *            [..., M, N], any of the three. One of the last two strides of a, b and out is 1, the other not negative.
 * Batch      Leading dimensions (at most 6) broadcast as in matmul of the array API standard; out has that shape.
 * Initial    options.initial in place of +0: what accumulate does to an fp32 out, with an out and a bias of any type.
 *            Not with accumulate. Of an out that is not fp32 it needs pydet_gemm_workspace's bytes, on the CPU too.
 * Empty      K = 0 gives zeros (or initial, or out under accumulate) plus bias. M, N or batch = 0 writes nothing.
 * NaN        Any NaN result is stored as 0x7FFFFFFF (fp32) or 0x7FFF (bf16, fp16).
 * Stream     The GPU stream to run on, NULL for the default one; ignored on the CPU. */
typedef struct pydet_gemm_options {
  uint32_t struct_size;    /* sizeof(pydet_gemm_options) */
  int32_t arithmetic;      /* PYDET_AUTO, ... */
  int64_t k_chunk;         /* 0: one chain. c, a multiple of 16: chains of c, their sums added in ascending order */
  int32_t accumulate;      /* 1: the chain starts from out, which is fp32, instead of +0 */
  int32_t reserved;        /* 0 */
  const char *kernel;      /* NULL: the library chooses */
  void *workspace;         /* on the tensors' device, 16-byte aligned, or NULL; it may let a faster kernel run, */
  uint64_t workspace_size; /* and never changes a bit. Its contents do not matter and are lost */
  const pydet_tensor
      *initial; /* NULL, or fp32, shaped like out, contiguous, apart from out: the chain starts from it */
} pydet_gemm_options;

PYDET_API pydet_status pydet_gemm(void *stream, const pydet_tensor *a, const pydet_tensor *b, const pydet_tensor *bias,
                                  const pydet_tensor *out, const pydet_gemm_options *options);

/* Gradients of out = a b: the same operation on transposed views, under the same rules.
 *   da[m, k] = sum_n dc[m, n] b[k, n]       dc [..., M, N], b [..., K, N], da [..., M, K]
 *   db[k, n] = sum_m a[m, k] dc[m, n]       a [..., M, K], dc [..., M, N], db [..., K, N]
 * k_chunk counts along the dimension summed over. Under accumulate db of micro-batches, cut at multiples of the
 * arithmetic's step (NUMERICS.md) or of k_chunk, has the bits of one batch. */
PYDET_API pydet_status pydet_gemm_da(void *stream, const pydet_tensor *dc, const pydet_tensor *b,
                                     const pydet_tensor *da, const pydet_gemm_options *options);
PYDET_API pydet_status pydet_gemm_db(void *stream, const pydet_tensor *a, const pydet_tensor *dc,
                                     const pydet_tensor *db, const pydet_gemm_options *options);

/* Bytes of workspace that options.kernel, or if it is NULL any kernel, can use: a function of these extents and of the
 * options' arithmetic, k_chunk and whether there is an initial (with room then for the sums of an out that is not
 * fp32). */
PYDET_API pydet_status pydet_gemm_workspace(int64_t batch, int64_t m, int64_t n, int64_t k,
                                            const pydet_gemm_options *options, uint64_t *bytes);

/* ---- Skinny GEMM ----------------------------------------------------------------------------------------------
 *   y[..., n] = round( chain_k(x[..., k], w[n, k]) + bias[n] )
 *
 * Few rows of x, a large w: the function and the bits of pydet_gemm on (x, w transposed), on kernels shaped for memory
 * bandwidth. x [..., K] of any rank from 1, w [N, K], y [..., N], bias NULL, [N] or like y. PYDET_FAST lets a kernel
 * cut K as suits shape and device: its bits are NOT promised, not even from run to run. */
enum { PYDET_DETERMINISTIC = 0, PYDET_FAST = 1 };

typedef struct pydet_skinny_gemm_options {
  uint32_t struct_size;
  int32_t arithmetic;
  int64_t k_chunk;
  int32_t accumulate;
  int32_t mode; /* PYDET_DETERMINISTIC or PYDET_FAST */
  const char *kernel;
  void *workspace;
  uint64_t workspace_size;
  int32_t weights_constant; /* 1: no work still running in the stream writes w, so that it may be read early */
  int32_t reserved;         /* 0 */
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
 * Chains of the arithmetic over chunks of k, each from +0, are combined in ascending order (NUMERICS.md, "Scaled
 * GEMM"):
 *   scales along k   D = fmaf(fl(sa sb), s_c, D), chunks of 128;   out = round(D + bias)
 *   otherwise        D = fl(D + s_c), chunks of k_chunk;           out = round(fl(fl(D sb) sa) + bias)
 *
 * Operands   a [..., M, K] and b [..., K, N], e4m3fn or e5m2, each its own. out and bias as in pydet_gemm. One of the
 *            last two strides of a, b and out is 1.
 * Hopper     SM90 on a GPU refuses what IEEE takes (PYDET_UNSUPPORTED): data or strides of a and b that are no multiples of
 *            16 bytes ("the tensor cores do not read a, want its data and strides in multiples of 16 bytes"), "a left
 *            operand along M" or "a right operand along N" (k is adjacent in both: a's last stride is 1, and b's last but
 *            one), "an out along M" (out's last stride is 1), "a k_chunk that is no multiple of 128".
 * Scales     fp32 or e8m0fnu, of any strides; NULL for none. Their shapes say what shares one:
 *              a_scale  []: all of a; [..., M, 1]: a row; [..., M, ceil(K/128)]: a row's 128 elements along k
 *              b_scale  []: all of b; [..., 1, N]: a column; [..., ceil(K/128), N]: a column's 128 along k;
 *                       [..., ceil(K/128), ceil(N/128)]: a block of 128 x 128
 *            A scale is along k if its second extent (b: first) is ceil(K/128): for K <= 128 every one but [], for K = 0
 *            only one with an extent of 0. With N <= 128 a b_scale of [ceil(K/128), 1] is by blocks.
 * Batch      Leading dimensions as in pydet_gemm; those of scales broadcast likewise.
 * Initial    As in pydet_gemm, with scales as accumulate has them; the bytes are pydet_scaled_gemm_workspace's.
 * Empty, NaN, Stream   As in pydet_gemm.
 *
 * IEEE and SM90 are the arithmetics of fp8. AUTO means SM90 on Hopper, IEEE on the CPU and on other GPUs. */
typedef struct pydet_scaled_gemm_options {
  uint32_t struct_size;
  int32_t arithmetic;
  int64_t k_chunk; /* 0: one chain. c, a multiple of 32: chains of c. 128 with scales along k, and if options is NULL */
  int32_t accumulate; /* 1: D starts from out, which is fp32, instead of +0; the scales are along k, or absent */
  int32_t reserved;   /* 0 */
  const char *kernel;
  void *workspace; /* as in pydet_gemm_options, of an initial alone */
  uint64_t workspace_size;
  const pydet_tensor *initial; /* NULL, or fp32, shaped like out, contiguous, apart from out: D starts from it */
} pydet_scaled_gemm_options;

PYDET_API pydet_status pydet_scaled_gemm(void *stream, const pydet_tensor *a, const pydet_tensor *a_scale,
                                         const pydet_tensor *b, const pydet_tensor *b_scale, const pydet_tensor *bias,
                                         const pydet_tensor *out, const pydet_scaled_gemm_options *options);

/* Bytes of workspace for the sums of an out that is not fp32 and an options.initial, of which nothing is read; else 0. */
PYDET_API pydet_status pydet_scaled_gemm_workspace(int64_t batch, int64_t m, int64_t n, int64_t k,
                                                   const pydet_scaled_gemm_options *options, uint64_t *bytes);

/* ---- Quantisation ---------------------------------------------------------------------------------------------
 *   scale = max(amax, 1e-10) / L,   out = x / scale, clamped to [-L, L], to nearest even;   L is the largest of out's type
 *
 * A true division; amax is the largest |x| of what shares the scale. x [..., M, K], fp32, bf16 or fp16; out like it,
 * e4m3fn or e5m2; one of the last two strides of each is 1. scale, of a type and strides that pydet_scaled_gemm takes
 * (of e8m0fnu powers of two):
 *   ROW     [..., M, 1]               GROUP  [..., M, ceil(K/128)], 128 along k
 *   TENSOR  []                        BLOCK  [..., ceil(M/128), ceil(K/128)], 128 x 128
 * transposed and transposed_scale, both or neither NULL: what the call would give of x transposed, [..., K, M]; GROUP
 * and BLOCK. NaN in x makes NaN of all that share its scale; Inf becomes NaN, and the finite beside it 0, or NaN if the
 * scale is a power of two. The amax of no elements is 0: a TENSOR's scale is written where x is empty, and a ROW's
 * where K = 0. On a GPU the scale of a TENSOR takes three launches; out holds what is in between. */
enum { PYDET_ROW = 0, PYDET_GROUP = 1, PYDET_BLOCK = 2, PYDET_TENSOR = 3 };

typedef struct pydet_quantize_options {
  uint32_t struct_size;
  int32_t granularity;  /* PYDET_ROW, ... */
  int32_t power_of_two; /* 1: the scale is rounded up to a power of two */
  int32_t given;        /* 1: scale is read instead of written; then nothing is transposed */
  int32_t reserved;     /* 0 */
  const char *kernel;
} pydet_quantize_options;

PYDET_API pydet_status pydet_quantize(void *stream, const pydet_tensor *x, const pydet_tensor *out,
                                      const pydet_tensor *scale, const pydet_tensor *transposed,
                                      const pydet_tensor *transposed_scale, const pydet_quantize_options *options);

/* ---- RMSNorm --------------------------------------------------------------------------------------------------
 *   y = x rstd (w + weight_offset) + bias,   rstd = 1 / sqrt(mean(x^2) + eps),   over the last dimension
 *
 * In fp32 with the same bits on every backend. x [..., N], bf16, fp16 or fp32, elements of a row adjacent, rows
 * anywhere, with at most three strides left once dimensions are merged. y like x. rstd NULL or [...] fp32, contiguous.
 * weight NULL (1), [N], or [H, N] beside x [..., H, N]; bias NULL (0) or like weight; either of any of the three types.
 * A head has the bits of a call on it alone, its dweight and dbias too. residual NULL or like x, or fp32: then sum, like
 * residual, receives x + residual rounded to its type, and is what is normalised. */
typedef struct pydet_rmsnorm_options {
  uint32_t struct_size;
  float eps;           /* not negative; 1e-6 if options is NULL */
  float weight_offset; /* 1 for models that store w - 1 */
  int32_t reserved;    /* 0 */
  const char *kernel;
  const pydet_tensor *bias; /* NULL: 0 */
} pydet_rmsnorm_options;

PYDET_API pydet_status pydet_rmsnorm(void *stream, const pydet_tensor *x, const pydet_tensor *residual,
                                     const pydet_tensor *weight, const pydet_tensor *y, const pydet_tensor *rstd,
                                     const pydet_tensor *sum, const pydet_rmsnorm_options *options);

/* The same and pydet_quantize of its y in one pass, with the bits of the two calls:
 *   y = round(x rstd (w + weight_offset)) to x's type,   out = y / scale, as pydet_quantize has it
 *
 * x, residual, weight ([N] or NULL), rstd and sum as in pydet_rmsnorm, the rows of all operands with at most two strides
 * left. y NULL, or like x: what is quantised. out like x, e4m3fn or e5m2, elements of a row adjacent. scale fp32 or
 * e8m0fnu, of any strides: written for ROW [..., 1] and GROUP [..., ceil(N/128)]; for TENSOR [], and read. */
typedef struct pydet_rmsnorm_quantize_options {
  uint32_t struct_size;
  float eps;            /* not negative; 1e-6 if options is NULL */
  float weight_offset;  /* 1 for models that store w - 1 */
  int32_t granularity;  /* PYDET_ROW (if options is NULL), PYDET_GROUP, PYDET_TENSOR */
  int32_t power_of_two; /* 1: the scale is rounded up to a power of two; not with PYDET_TENSOR */
  int32_t reserved;     /* 0 */
  const char *kernel;
} pydet_rmsnorm_quantize_options;

PYDET_API pydet_status pydet_rmsnorm_quantize(void *stream, const pydet_tensor *x, const pydet_tensor *residual,
                                              const pydet_tensor *weight, const pydet_tensor *out,
                                              const pydet_tensor *scale, const pydet_tensor *y,
                                              const pydet_tensor *rstd, const pydet_tensor *sum,
                                              const pydet_rmsnorm_quantize_options *options);

/* Gradients, from the x (or sum) and rstd of the forward call:
 *   xhat = x rstd,  g = dy (w + weight_offset),  dx = rstd (g - xhat mean(g xhat)) + dresidual
 *   dweight[n] = sum over rows of dy xhat,   dbias[n] = sum over rows of dy
 * dy like x, or of any type beside an fp32 x; dx and dresidual like x, or NULL; dweight [N] fp32, bf16 or fp16, or [H,
 * N] where weight is, or NULL: it needs a workspace of pydet_rmsnorm_backward_workspace bytes. Under accumulate it
 * continues from dweight, then fp32: rows (of each head) cut at a multiple of PYDET_DWEIGHT_ROWS give the bits of one
 * call. Of rows on several devices block_sums gives B = ceil(rows / PYDET_DWEIGHT_ROWS) sums (rows of a head), not
 * under accumulate: pydet_fold of all of them, in the order of the rows, is dweight. */
enum { PYDET_DWEIGHT_ROWS = 256 };

typedef struct pydet_rmsnorm_backward_options {
  uint32_t struct_size;
  float weight_offset;
  int32_t accumulate;
  int32_t reserved; /* 0 */
  const char *kernel;
  void *workspace;
  uint64_t workspace_size;
  const pydet_tensor *dbias; /* NULL, or shaped like dweight, and under accumulate continued too; twice the workspace */
  int64_t
      block_sums; /* 1: dweight and dbias are [B, N] or [B, H, N], fp32: those of each PYDET_DWEIGHT_ROWS rows alone */
} pydet_rmsnorm_backward_options;

PYDET_API pydet_status pydet_rmsnorm_backward(void *stream, const pydet_tensor *dy, const pydet_tensor *x,
                                              const pydet_tensor *weight, const pydet_tensor *rstd,
                                              const pydet_tensor *dresidual, const pydet_tensor *dx,
                                              const pydet_tensor *dweight,
                                              const pydet_rmsnorm_backward_options *options);

/* Bytes of workspace for dweight over `rows` rows of n elements: a function of the two alone. For H heads those of
 * rows / H rows of H n elements. */
PYDET_API pydet_status pydet_rmsnorm_backward_workspace(int64_t rows, int64_t n, uint64_t *bytes);

/* ---- LayerNorm ------------------------------------------------------------------------------------------------
 *   y = (x - mean) rstd (w + weight_offset) + bias,   rstd = 1 / sqrt(mean((x - mean)^2) + eps),   over the last dimension
 *
 * All in fp32 with the same bits on every backend (NUMERICS.md, "LayerNorm"). Operands as in pydet_rmsnorm; bias NULL
 * (0) or [N] of any of the three types; mean like rstd: NULL or [...] fp32, contiguous. */
typedef struct pydet_layernorm_options {
  uint32_t struct_size;
  float eps;           /* not negative; 1e-5 if options is NULL */
  float weight_offset; /* 1 for models that store w - 1 */
  int32_t reserved;    /* 0 */
  const char *kernel;
} pydet_layernorm_options;

PYDET_API pydet_status pydet_layernorm(void *stream, const pydet_tensor *x, const pydet_tensor *residual,
                                       const pydet_tensor *weight, const pydet_tensor *bias, const pydet_tensor *y,
                                       const pydet_tensor *mean, const pydet_tensor *rstd, const pydet_tensor *sum,
                                       const pydet_layernorm_options *options);

/* Gradients, from the x (or sum), mean and rstd of the forward call:
 *   xhat = (x - mean) rstd,  g = dy (w + weight_offset),  dx = rstd (g - mean(g) - xhat mean(g xhat)) + dresidual
 *   dweight[n] = sum over rows of dy xhat,   dbias[n] = sum over rows of dy
 * dx like x, dweight and dbias [N] fp32, bf16 or fp16, any of them NULL; dresidual like x, or NULL. The sums over rows,
 * and accumulate, are those of pydet_rmsnorm_backward; they need pydet_layernorm_backward_workspace bytes. */
typedef struct pydet_layernorm_backward_options {
  uint32_t struct_size;
  float weight_offset;
  int32_t accumulate;
  int32_t reserved; /* 0 */
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

/* Bytes of workspace for dweight or dbias over `rows` rows of n elements: a function of the two alone. */
PYDET_API pydet_status pydet_layernorm_backward_workspace(int64_t rows, int64_t n, uint64_t *bytes);

/* ---- Softmax --------------------------------------------------------------------------------------------------
 *   y = e / s, or under log: (x - m) - log(s);   m = max(x),  e = exp(x - m),  s = sum(e),  over the last dimension
 *
 * In fp32 with the same bits on every backend. x [..., N] as of pydet_rmsnorm, y like x. -Inf at a row's end changes
 * nothing. A row of nothing but -Inf, or with a NaN or Inf, is NaN. The gradient is that of the y that was stored:
 * dx = y (dy - sum(dy y)), or under log dy - exp(y) sum(dy). */
typedef struct pydet_softmax_options {
  uint32_t struct_size;
  int32_t log; /* 1: the logarithm */
  const char *kernel;
  int64_t reserved; /* 0 */
} pydet_softmax_options;

PYDET_API pydet_status pydet_softmax(void *stream, const pydet_tensor *x, const pydet_tensor *y,
                                     const pydet_softmax_options *options);
PYDET_API pydet_status pydet_softmax_backward(void *stream, const pydet_tensor *dy, const pydet_tensor *y,
                                              const pydet_tensor *dx, const pydet_softmax_options *options);

/* log_prob = (x[index] - m) - log(s), one column of each row's log-softmax: x [..., N], index [...] in int32 or int64,
 * log_prob [...] in fp32, both contiguous. An index below 0 or from N on gives NaN. The gradient is
 * dx = dlog_prob (1 at index, else 0, less e / s), like x; +0 for such an index. */
typedef struct pydet_log_prob_options {
  uint32_t struct_size;
  int32_t reserved; /* 0 */
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
 * pydet_skinny_gemm and pydet_log_prob in one, with their bits, z being in the workspace for some rows at a time: how
 * many changes no bit (NUMERICS.md, "Head"). Backward makes z again; d is its gradient, rounded to z's type and then to
 * x's:
 *   dx[t, k] = round( chain_n(d[t, n], w[n, k]) );   dw[n, k] = chain_t(d[t, n], x[t, k]);   dbias[n] = chain_t(1, d[t, n])
 *
 * Operands   x [..., K], whose rows lie one stride apart, w [N, K], both fp32, bf16 or fp16, the same type, one of
 *            their strides 1; bias NULL or [N], of any of the three; index [...], int32 or int64, and log_prob and
 *            dlog_prob [...], fp32, contiguous. An index below 0 or from N on (a row to be ignored) gives NaN, and
 *            zeros in d.
 * Results    dx like x, dw [N, K], dbias [N], of any of the three types, their last stride 1, or NULL. dw and dbias
 *            that are not fp32 need a workspace for all rows at once. accumulate: they are continued; micro-batches of
 *            a multiple of 16 rows (or of k_chunk) have the bits of one batch. Else an fp32 dw may hold z until it is
 *            written. log_prob in backward: NULL, or written too, so that a loss whose dlog_prob is known takes three
 *            products, not four.
 * Products   No kernel can be asked for by name; arithmetic and k_chunk are those of all products.
 * Empty, NaN, Stream   As in pydet_gemm and pydet_log_prob. */
typedef struct pydet_linear_log_prob_options {
  uint32_t struct_size;
  int32_t arithmetic;
  int64_t k_chunk;
  pydet_dtype logits; /* what z is rounded to: zeros for the type of x, or fp32 */
  int32_t accumulate; /* of backward: 1: dw and dbias, then fp32, are continued; no rows leave them as they are */
  void *workspace; /* as large as pydet_linear_log_prob_workspace says, or for fewer rows at a time; refused where it */
  uint64_t workspace_size; /* holds less than a row forward, 16 (or k_chunk) for sums over rows */
  int64_t reserved;        /* 0 */
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

/* Bytes of workspace for x [rows, K] of this type, w [N, K]: for the rows that `most` bytes hold (0: 256 MiB), or the
 * fewest that may be. */
PYDET_API pydet_status pydet_linear_log_prob_workspace(int64_t rows, int64_t n, int64_t k, pydet_dtype type,
                                                       int32_t backward, uint64_t most,
                                                       const pydet_linear_log_prob_options *options, uint64_t *bytes);

/* ---- Sampling --------------------------------------------------------------------------------------------------
 * A token of each row of logits x [..., N], N up to 8,388,608, drawn from softmax(x / temperature) and the filters
 * below: a function of the row, its seed, its position and its options alone, on every backend (NUMERICS.md,
 * "Sampling").
 *
 *   z = x / temperature,   token = the column of the largest z - max(z) + g, the lowest of equal ones
 *   g = -log(-log(u)),     u of Philox4x32-10: seed is the key, position and column are the counter
 *
 * Filters keep the first columns in the order of x descending, equal ones by ascending number: top_k that many (0:
 * all); of these top_p the fewest whose probability reaches top_p of theirs, at least one (1: all); of these min_p what
 * is at least min_p as probable as the likeliest (0: all). temperature 0 takes the largest x, the first of equal ones,
 * unfiltered.
 *
 * seed, position [...] in int32 or int64: any numbers. token [...] in int64. log_prob and filtered_log_prob [...] in
 * fp32 or NULL: of the token before the filters, as pydet_log_prob of x / temperature (of x at 0), and after them (0 at
 * 0). All are contiguous. A row with a NaN or +Inf, of nothing but -Inf, or whose own options are out of range, has
 * token -1 and NaN.
 *
 * NULL options, and all 0, are greedy: the largest x. With another temperature top_p is 1, or less. */
typedef struct pydet_sample_options {
  uint32_t struct_size;
  float temperature;                /* 0 or more */
  float top_p;                      /* 0 to 1 */
  float min_p;                      /* 0 to 1 */
  int64_t top_k;                    /* 0 or more */
  const pydet_tensor *temperatures; /* [...], fp32, contiguous: each row's, in the place of the number; or NULL */
  const pydet_tensor *top_ks;       /* [...], int32 or int64; or NULL */
  const pydet_tensor *top_ps;       /* [...], fp32; or NULL */
  const pydet_tensor *min_ps;       /* [...], fp32; or NULL */
  const char *kernel;
  int64_t reserved; /* 0 */
} pydet_sample_options;

PYDET_API pydet_status pydet_sample(void *stream, const pydet_tensor *x, const pydet_tensor *seed,
                                    const pydet_tensor *position, const pydet_tensor *token,
                                    const pydet_tensor *log_prob, const pydet_tensor *filtered_log_prob,
                                    const pydet_sample_options *options);

/* The k largest of each row of x [..., N], N below 2^31, descending, equal ones by ascending column: values [..., k] of
 * x's type and index [..., k] in int64, contiguous, 1 <= k <= N. -0 equals +0; NaNs are equal, and larger than all
 * else. */
typedef struct pydet_topk_options {
  uint32_t struct_size;
  int32_t reserved; /* 0 */
  const char *kernel;
} pydet_topk_options;

PYDET_API pydet_status pydet_topk(void *stream, const pydet_tensor *x, const pydet_tensor *values,
                                  const pydet_tensor *index, const pydet_topk_options *options);

/* ---- Embedding -------------------------------------------------------------------------------------------------
 *   out[t, :] = w[ids[t], :],   and its gradient   dw[v, :] = sum over the tokens t with ids[t] = v, ascending, of dout[t, :]
 *
 * w [V, N] fp32, bf16 or fp16, elements of a row adjacent; ids [...] in int32 or int64, contiguous; out and dout [...,
 * N], rows as of pydet_rmsnorm, out of w's type. The sum is in fp32, an addition each. dw [V, N] of dout's type or
 * fp32; a row without tokens becomes 0. Under accumulate dw, then fp32, is continued: tokens cut anywhere into calls in
 * their order give the bits of one call, and a row without tokens is not touched. Tokens whose id is `padding` have no
 * part in the gradient.
 *
 * The CPU refuses an id that is none of the table's rows. On a GPU its row of out is NaN, and its token has no part in
 * dw. The workspace is pydet_embedding_backward_workspace bytes. */
typedef struct pydet_embedding_options {
  uint32_t struct_size;
  int32_t reserved; /* 0 */
  const char *kernel;
} pydet_embedding_options;

PYDET_API pydet_status pydet_embedding(void *stream, const pydet_tensor *w, const pydet_tensor *ids,
                                       const pydet_tensor *out, const pydet_embedding_options *options);

typedef struct pydet_embedding_backward_options {
  uint32_t struct_size;
  int32_t accumulate;
  int64_t padding;     /* an id, where has_padding is 1 */
  int32_t has_padding; /* 0 or 1 */
  int32_t reserved;    /* 0 */
  const char *kernel;
  void *workspace;
  uint64_t workspace_size;
} pydet_embedding_backward_options;

PYDET_API pydet_status pydet_embedding_backward(void *stream, const pydet_tensor *dout, const pydet_tensor *ids,
                                                const pydet_tensor *dw,
                                                const pydet_embedding_backward_options *options);

/* Bytes of workspace for the gradient of a table of `rows` rows by so many tokens: a function of the two alone. Both
 * are below 2^31. */
PYDET_API pydet_status pydet_embedding_backward_workspace(int64_t tokens, int64_t rows, uint64_t *bytes);

/* ---- Rotary embeddings ------------------------------------------------------------------------------------------
 *   a[..., j] = fl(position[...] frequencies[j]),   cos = round(fl(cos(a) scale)),   sin = round(fl(sin(a) scale))
 *
 * positions [...] in int32, int64, fp32, bf16 or fp16, contiguous; frequencies [F] in fp32, contiguous. cos and sin
 * [..., F], or [..., 2 F]: then the F once more behind them; both of one type, rows as of pydet_rmsnorm. An element
 * depends on its position and frequency alone (NUMERICS.md, "Rotary embeddings"). */
typedef struct pydet_rotary_table_options {
  uint32_t struct_size;
  float scale;      /* finite and not 0; 1 without options */
  int64_t reserved; /* 0 */
  const char *kernel;
} pydet_rotary_table_options;

PYDET_API pydet_status pydet_rotary_table(void *stream, const pydet_tensor *positions, const pydet_tensor *frequencies,
                                          const pydet_tensor *cos, const pydet_tensor *sin,
                                          const pydet_rotary_table_options *options);

/* Pairs (a, b) of the first R elements of each head become (a cos - b sin, b cos + a sin); the other elements are
 * copied.
 *
 * q [..., H, N] and q_out like it, k [..., G, N] and k_out likewise, or NULL both; elements of a head adjacent. cos and
 * sin [..., R / 2], a number a pair; under `whole` [..., R], a number an element, at its place in q_out (transposed: in
 * q). A leading extent of theirs may be 1 where that of q is not. q and k are of one type, q_out and k_out of one, cos
 * and sin of one. Pair i is elements i and R / 2 + i; under neighbours it is 2 i and 2 i + 1 of q and k, under
 * out_neighbours of q_out and k_out.
 *
 * Each product is rounded to the type of q_out, and then the sum; under in_fp32 the sum alone. transposed: (a cos + b
 * sin, b cos - a sin), the gradient by q of that by q_out, where a sum of -0 is +0, and so are elements that are
 * copied. */
typedef struct pydet_rotary_options {
  uint32_t struct_size;
  int32_t whole, neighbours, out_neighbours, in_fp32, transposed; /* 0 or 1 */
  int64_t reserved;                                               /* 0 */
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
 * In fp32, with the same bits on every backend (NUMERICS.md, "Activations"), rounded once; with up f(x) is rounded, and
 * the product, as if by two calls. x [..., N] as of pydet_softmax; up NULL or like x; y like x: x or up itself, with
 * its strides, or apart from both. */
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
  int64_t reserved; /* 0 */
} pydet_activation_options;

PYDET_API pydet_status pydet_activation(void *stream, const pydet_tensor *x, const pydet_tensor *up,
                                        const pydet_tensor *y, const pydet_activation_options *options);

/* dx = dy f'(x); with up: g = dy up, rounded, then dx = g f'(x) and dup = dy f(x), f(x) rounded. dx and dup like x,
 * either NULL, not both; no dup without up. Each may be dy, x or up itself, as y may be; the two are apart. */
PYDET_API pydet_status pydet_activation_backward(void *stream, const pydet_tensor *dy, const pydet_tensor *x,
                                                 const pydet_tensor *up, const pydet_tensor *dx,
                                                 const pydet_tensor *dup, const pydet_activation_options *options);

/* ---- Scans -----------------------------------------------------------------------------------------------------
 * Recurrences in fp32, token by token: however a sequence is cut into calls, each of which takes the state that the
 * last one left, it has the bits of one call (NUMERICS.md, "Scans").
 *
 * selective_scan: of each head, with a state S [states, width],
 *     u = dt x,   S = fmaf(u, b, exp(dt a) S),   y = the sum over the states of c S, and d x
 * x and y [batch, tokens, heads, width] of one type; dt [batch, tokens, heads]; b and c [batch, tokens, groups,
 * states], heads / groups neighbouring heads having one; a [heads] (Mamba-2) or [heads, states] (Mamba, whose channels
 * are heads of width 1), and d [heads] or NULL, both fp32; initial and final [sequences, heads, width, states] fp32,
 * either NULL.
 *
 * gated_delta: of each head, with a state S [keys, width],
 *     S = exp(g) S,   w = beta (v - the sum over the keys of k S),   S = fmaf(k, w, S),   o = the sum of q S
 * v and o [batch, tokens, heads, width] of one type; q and k [batch, tokens, groups, keys]; g and beta [batch, tokens,
 * heads]; initial and final [sequences, heads, keys, width] fp32, either NULL.
 *
 * causal_conv1d: of each channel y[t] = the sum over the taps of w[j] x[t - taps + 1 + j], and bias
 * x and y [batch, tokens, channels] of one type; w [channels, taps]; bias [channels] or NULL; initial [sequences,
 * taps - 1, channels] of x's type or NULL: what lies before a sequence, which is +0 else.
 *
 * Operands are fp32, bf16 or fp16, each its own where nothing else is said, of any strides; states and keys up to 512
 * elements, taps up to 64. cu_seqlens NULL, or [sequences + 1] in int32 or int64, contiguous, for a batch of 1:
 * sequence s has the tokens [cu_seqlens[s], cu_seqlens[s + 1]). They ascend from 0 to the number of tokens; the CPU
 * refuses others, and a GPU writes no token that is in no sequence. final may be initial itself, with its strides;
 * outputs are apart from all else. */
typedef struct pydet_scan_options {
  uint32_t struct_size;
  int32_t reserved; /* 0 */
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

/* Their gradients, from those of their results: the recurrence walked backwards, token by token.
 *
 * A sequence has its own: those of w, bias, a and d are its sums over its tokens, in fp32, one for each sequence,
 * [sequences, ...]. pydet_fold adds them in their order, and under accumulate to what micro-batches before have left:
 * so these may be cut between any two sequences.
 *
 * selective_scan_backward: dy and dx like x; ddt, db and dc of the types of dt, b and c; da [sequences, heads] or
 * [sequences, heads, states] and dd [sequences, heads] fp32, dd NULL where d is; dfinal and dinitial like initial,
 * either NULL.
 *
 * gated_delta_backward: dout and dv like v; dq, dk, dg and dbeta of the types of q, k, g and beta; dfinal and dinitial
 * like initial, either NULL.
 *
 * causal_conv1d_backward: dy, x and dx [batch, tokens, channels] of one type; dw [sequences, channels, taps] and dbias
 * [sequences, channels] fp32; initial and dinitial [sequences, taps - 1, channels] of x's type. Each result may be
 * NULL. x and initial have a part in dw alone. */
typedef struct pydet_scan_backward_options {
  uint32_t struct_size;
  int32_t reserved; /* 0 */
  const char *kernel;
  void *workspace; /* never changes a bit, what it holds does not matter; causal_conv1d_backward needs none */
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

/* Bytes of workspace for the gradient of either: `tokens` of all sequences together, heads of `width` columns in
 * `groups`, states (or keys) of so many elements. A function of these alone. */
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
 *   out[i, :] = sum_j p_j v[j, :] / sum_j p_j,   p_j = exp(scale q[i, :] k[j, :]),   over the keys j that query i may see
 *
 * of each head of each sequence. A query's result is a function of its own row of q, of its own keys and values,
 * counted from its sequence's first key, of the arithmetic and of kv_chunk: not of other queries, of the batch, or of
 * where keys lie (NUMERICS.md, "Attention"). So a decoded token has the bits of a prefill's last row.
 *
 * Operands   q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E], out [B, H, Q, E], all fp32, bf16 or fp16, the same type;
 *            lse NULL or [B, H, Q] in fp32: the natural logarithm of the sum of exp(score). H is a multiple of G: head
 *            h has the keys of head h / (H / G). D and E are multiples of 8 from 8 to 256, or 576 and 512. The last
 *            stride of q, k, v and out is 1, others are any.
 * Packed     With cu_seqlens_q [B + 1], int32: q [T, H, D], out [T, H, E], lse [T, H], and sequence s has the tokens
 *            cu_seqlens_q[s] to cu_seqlens_q[s + 1]. With cu_seqlens_k k and v [T, G, D or E] likewise. Tokens that are
 *            in no sequence are not written.
 * Pages      With block_table [B, N], int32: k and v [P, S, G, D or E], P pages of any S keys, and key j of sequence s
 *            is in page block_table[s, j / S]. seqlens_k must be there.
 * Lengths    seqlens_k [B], int32: the keys of each sequence's storage that are there; K, or N S, if NULL. first_key
 *            [B], int32: where in it the sequence's own keys begin, behind padding; 0 if NULL. What lies past the last
 *            key is not read. All these integers are contiguous (of block_table each row), on the tensors' device, read
 *            when the work runs, and clamped to what is there. Where boundaries descend, either of two sequences may
 *            write a token.
 * Masks      With the K own keys and Q queries of its sequence, query i stands at key K - Q + i. causal: it sees none
 *            after that. window: none further than window_left before it or window_right after it. allowed, bool, or
 *            bias, fp32, bf16 or fp16, added to the score after scale: of any shape that broadcasts to [B, H, Q, K], K
 *            by the place in storage; not of packed sequences. A bias of -Inf, as any score of -Inf, is a key that is
 *            not allowed. Values of keys that are not allowed do not matter, even if they are NaN. No key allowed: out
 *            0, lse -Inf.
 * Softcap    softcap tanh(score / softcap) in place of a score, before bias and masks.
 * Sinks      [H], fp32, bf16 or fp16, contiguous: a score of one key more for every query of the head, of value 0.
 * NaN        A NaN or +Inf among a query's scores makes its row NaN. NaN results are stored as in pydet_gemm.
 * Stream     As in pydet_gemm. */
typedef struct pydet_attention_options {
  uint32_t struct_size;
  int32_t arithmetic;
  float scale;         /* 0: 1 / sqrt(D) */
  float softcap;       /* 0: none */
  int32_t causal;      /* 1: no key after the query's own place */
  int32_t window;      /* 1: window_left and window_right hold */
  int64_t window_left; /* keys; -1: any number */
  int64_t window_right;
  int64_t kv_chunk; /* keys of a segment, a multiple of 128; 0: 1024. It changes bits: segments are summed apart */
  const pydet_tensor *sinks;   /* this and all that follow: NULL for none */
  const pydet_tensor *allowed; /* 1: the query may see the key */
  const pydet_tensor *bias;
  const pydet_tensor *first_key;
  const pydet_tensor *cu_seqlens_q;
  const pydet_tensor *cu_seqlens_k;
  const pydet_tensor *seqlens_k;
  const pydet_tensor *block_table;
  const char *kernel;
  void *workspace; /* as in pydet_gemm_options: never changes a bit */
  uint64_t workspace_size;
  int64_t reserved; /* 0 */
} pydet_attention_options;

PYDET_API pydet_status pydet_attention(void *stream, const pydet_tensor *q, const pydet_tensor *k,
                                       const pydet_tensor *v, const pydet_tensor *out, const pydet_tensor *lse,
                                       const pydet_attention_options *options);

/* Bytes of workspace that a kernel can use: a function of the extents and of the options' arithmetic, kv_chunk and
 * kernel, and of whether cu_seqlens_q is there. queries: of each sequence, or of the whole pack; keys: the most of any.
 * */
PYDET_API pydet_status pydet_attention_workspace(int64_t sequences, int64_t heads, int64_t groups, int64_t queries,
                                                 int64_t keys, int64_t d, int64_t e,
                                                 const pydet_attention_options *options, uint64_t *bytes);

/* ---- Attention, backward ---------------------------------------------------------------------------------------
 * The gradients of q, k, v and the sinks of a pydet_attention from dout, that of out, and from out and lse as it gave
 * them. A row of dq is a function of its own query, keys and values; a row of dk and dv of its own sequence, whose
 * queries count in blocks of 128 from its first one (NUMERICS.md, "Attention, backward").
 *
 * Operands   q, k, v, out, lse and what the options name as in pydet_attention; dout as out, of the same type. lse must
 *            be there. Pages are not taken. allowed and bias make the scores again; no gradient of bias is made.
 * Results    dq as q, dk as k, dv as v, each fp32 or of the operands' type, the last stride 1. dq NULL: not asked for;
 *            dk and dv both or neither. dsinks NULL or [H], fp32, bf16 or fp16, contiguous; it wants sinks.
 * Written    Packed: the tokens that are in a sequence. Otherwise all; rows of dk and dv that are no own key of a
 *            sequence +0, or kept under accumulate. A query that sees no key has dq 0.
 * Cuts       accumulate: dk, dv and dsinks, then fp32, are continued; dq is written. Calls of some sequences each, in
 *            order, have the bits of one call, and so have calls of some of a sequence's queries, cut at multiples of
 *            128. (Under causal or a window such a call ends at the key where its last query stands. With more queries
 *            than keys under causal, multiples are counted from the first that sees a key.)
 * NaN        A NaN or Inf in a row of dout, q, k or v reaches only what its pairs that are allowed reach.
 * Stream     As in pydet_gemm. */
typedef struct pydet_attention_backward_options {
  uint32_t struct_size;
  int32_t arithmetic; /* down to window_right as in pydet_attention_options */
  float scale;
  float softcap;
  int32_t causal;
  int32_t window;
  int64_t window_left;
  int64_t window_right;
  int32_t accumulate;        /* 1: dk, dv and dsinks begin at what they hold */
  int32_t reserved;          /* 0 */
  const pydet_tensor *sinks; /* this and all that follow: NULL for none */
  const pydet_tensor *dsinks;
  const pydet_tensor *allowed;
  const pydet_tensor *bias;
  const pydet_tensor *first_key;
  const pydet_tensor *cu_seqlens_q;
  const pydet_tensor *cu_seqlens_k;
  const pydet_tensor *seqlens_k;
  const char *kernel;
  void *workspace; /* as in pydet_gemm_options: never changes a bit */
  uint64_t workspace_size;
} pydet_attention_backward_options;

PYDET_API pydet_status pydet_attention_backward(void *stream, const pydet_tensor *dout, const pydet_tensor *q,
                                                const pydet_tensor *k, const pydet_tensor *v, const pydet_tensor *out,
                                                const pydet_tensor *lse, const pydet_tensor *dq, const pydet_tensor *dk,
                                                const pydet_tensor *dv,
                                                const pydet_attention_backward_options *options);

/* Bytes of workspace that a kernel can use: a function of the extents and of the options' arithmetic and kernel, and of
 * whether cu_seqlens_q and cu_seqlens_k are there. queries and keys: of each sequence, or of the whole pack. */
PYDET_API pydet_status pydet_attention_backward_workspace(int64_t sequences, int64_t heads, int64_t groups,
                                                          int64_t queries, int64_t keys, int64_t d, int64_t e,
                                                          const pydet_attention_backward_options *options,
                                                          uint64_t *bytes);

/* ---- Grouped GEMM ---------------------------------------------------------------------------------------------
 *   rows    out[t, :] = round( chain_k(a[t, k], b[g, k, :]) + bias[g, :] )      a [T, K], b [G, K, N], out [T, N]
 *   depth   out[g, :, :] = round( chain_t(a[:, t], b[t, :]) + bias[g, :] )      a [M, T], b [T, N], out [G, M, N]
 *
 * for the tokens t of each group g, start[g] <= t < end[g]; the dimensions of b say which of the two. A row has the
 * bits of pydet_gemm of that row and b[g], an out[g] those of pydet_gemm of those columns of a and rows of b, the chain
 * (and k_chunk) counted from the group's first token.
 *
 * Operands   a and b both fp32, bf16 or fp16, the same type; out fp32, bf16 or fp16; bias NULL or [G, N], any of the
 *            three. One of the last two strides of a, b and out is 1.
 * Boundaries group_start and group_end [G], int32, contiguous, on the tensors' device; read when the work runs.
 * group_start
 *            NULL: a group starts where the latest one with tokens ended, so group_end are torch's offs. A start is clamped
 *            to [the end of the latest group with tokens, T], an end to [its start, T]. None need be aligned.
 * Empty      A group without tokens: in rows nothing, in depth zeros (or out[g] itself under accumulate) plus bias.
 *            Rows of out that are in no group are not touched. K = 0, NaN, Stream: as in pydet_gemm. */
typedef struct pydet_grouped_gemm_options {
  uint32_t struct_size;
  int32_t arithmetic;
  int64_t k_chunk;
  int32_t accumulate;
  int32_t reserved; /* 0 */
  const char *kernel;
} pydet_grouped_gemm_options;

PYDET_API pydet_status pydet_grouped_gemm(void *stream, const pydet_tensor *a, const pydet_tensor *b,
                                          const pydet_tensor *bias, const pydet_tensor *group_start,
                                          const pydet_tensor *group_end, const pydet_tensor *out,
                                          const pydet_grouped_gemm_options *options);

/* ---- Scaled grouped GEMM --------------------------------------------------------------------------------------
 *   out[t, n] = round( sum_k a[t, k] sa[t, k div 128] b[g, k, n] sb[g, k div 128, n] + bias[g, n] )      in fp8
 *
 * for the tokens t of each group g. A row has the bits of pydet_scaled_gemm of that row, its scales, b[g] and b[g]'s
 * scales. Groups that are summed over (a [M, T], b [T, N]) are not taken.
 *
 * Operands   a [T, K] and b [G, K, N], e4m3fn or e5m2, each its own; out [T, N] and bias [G, N] as in
 *            pydet_grouped_gemm. What the GPU's tensor cores read is as in pydet_scaled_gemm.
 * Scales     fp32 or e8m0fnu, of any strides; NULL for none. Their shapes, with what they mean, are
 *            pydet_scaled_gemm's:
 *              a_scale  []: all of a; [T, 1]: a token; [T, ceil(K/128)]: a token's 128 elements along k
 *              b_scale  []: all of b; [G, 1, N]: a column; [G, ceil(K/128), N]: a column's 128 along k;
 *                       [G, ceil(K/128), ceil(N/128)]: a block of 128 x 128. Without G, or with 1 for it: of every group
 * Boundaries, Empty, NaN, Stream   As in pydet_grouped_gemm; arithmetics and k_chunk as in pydet_scaled_gemm. */
typedef struct pydet_scaled_grouped_gemm_options {
  uint32_t struct_size;
  int32_t arithmetic;
  int64_t k_chunk; /* as in pydet_scaled_gemm: 128 if options is NULL */
  int32_t accumulate;
  int32_t reserved; /* 0 */
  const char *kernel;
} pydet_scaled_grouped_gemm_options;

PYDET_API pydet_status pydet_scaled_grouped_gemm(void *stream, const pydet_tensor *a, const pydet_tensor *a_scale,
                                                 const pydet_tensor *b, const pydet_tensor *b_scale,
                                                 const pydet_tensor *bias, const pydet_tensor *group_start,
                                                 const pydet_tensor *group_end, const pydet_tensor *out,
                                                 const pydet_scaled_grouped_gemm_options *options);

/* ---- Fold -----------------------------------------------------------------------------------------------------
 *   out = round( D + bias ),   D = D0 + parts[0] + parts[1] + ... element by element in fp32,   D0 = +0, or out
 *
 * Adds partial sums that were computed apart (NUMERICS.md, "Fold"): ORDERED one after the other, as a product with
 * k_chunk adds its chunks; TREE by the binary tree over the parts' numbers, then to D0. ORDERED may be cut anywhere,
 * and continued under accumulate; TREE at multiples of a power of two, each such group folded first. parts: count
 * tensors, 1 to PYDET_FOLD_PARTS, fp32, shaped like out; out fp32, bf16 or fp16; bias NULL, [N] or like out, of any of
 * the three types; all contiguous and apart from out. A peer's memory that the device reaches is passed as the device's
 * own. */
enum { PYDET_ORDERED = 0, PYDET_TREE = 1 };
enum { PYDET_FOLD_PARTS = 64 };

/* The ranks of one fold, a device each, in one launch: parts are this rank's, D folds all ranks' parts, rank 0's first, and
 * out is the same on every rank, with the bits of one fold of them all. Every rank makes the same calls in the same order
 * with the same counts (but see first_sums), shapes, types and options: a rank waits on its device until the others have
 * come. CUDA only.
 * memory: of each rank, reached by all the others, at multiples of 16 bytes; its first PYDET_FOLD_SIGNALS bytes are zeros
 * before the first call, the rest may hold anything; used by one sequence of calls, with one memory_size, which is at least
 * PYDET_FOLD_SIGNALS + (all ranks' parts + ranks) PYDET_FOLD_ROOM. The last 8 PYDET_FOLD_RANKS bytes of the signals are the
 * word of each rank's latest call. On a device no more than two folds may run at a time, on memory of their own; a fold has
 * a block for each 1024 elements of a rank's share, PYDET_FOLD_BLOCKS at most, and those of many small folds count as one.
 * fault: NULL, or PYDET_FOLD_FAULT words, zeros before, that the device writes and the host reads when it likes: why a fold
 * was not finished. What it lacks of out is NaN, and so is all of out of each later fold on this memory, on any rank, until
 * the host has waited for all ranks' devices, zeroed the words and the signals of all, and waited for that. [0] is
 *   PYDET_FOLD_DISAGREES   rank [1] came with other sizes, counts, types, options or another word
 *   PYDET_FOLD_LATE        rank [1] did not come in timeout_ms; this rank itself: another fold on its memory did not end
 *   PYDET_FOLD_LEFT        rank [1] waited longer than that, for this rank or another
 * Without it such a fold ends with an error of its device, which is lost to the process.
 * first_sums: rank 0 gives one part, the sum of its own as many, as a product with k_chunk makes it. ORDERED, neither gathered
 * nor under accumulate.
 * flag: this rank alone folds its own parts, and exchanges nothing: rank `from` brings some of them and then, behind them on
 * its stream, puts word at flag, which was 0. Until then the device waits, for timeout_ms, or until the ranks have failed:
 * then out is NaN. ORDERED, not under accumulate. One part alone may have out's type: it is what was made elsewhere, and is
 * copied, or is out itself, which stays as it is where the word comes. */
enum { PYDET_FOLD_RANKS = 16, PYDET_FOLD_SIGNALS = 1 << 17, PYDET_FOLD_ROOM = 3 << 20 };
enum { PYDET_FOLD_BLOCKS = 128, PYDET_FOLD_FAULT = 2 };
enum { PYDET_FOLD_DISAGREES = 1, PYDET_FOLD_LATE = 2, PYDET_FOLD_LEFT = 3 };

typedef struct pydet_fold_peers {
  uint32_t struct_size;
  int32_t ranks;    /* 1 to PYDET_FOLD_RANKS; all ranks' parts are at most PYDET_FOLD_PARTS */
  int32_t rank;     /* this one */
  int32_t gathered; /* 1: parts are all ranks', of this rank's share of out alone, which the others wrote here before */
  int32_t scatter;  /* 1: out is this rank's share alone. A share: as many rows of the first dimension for each rank */
  uint32_t timeout_ms; /* a rank waits no longer for another; 0: for ever */
  void *const *memory; /* [ranks] */
  uint64_t memory_size;
  uint64_t word;        /* the same on every rank: what the call is and which of them, by its caller's count */
  uint64_t *fault;      /* NULL, or this rank's words */
  int32_t first_sums;   /* 0, or the parts of each other rank, where rank 0 has one */
  int32_t from;         /* the rank that raises flag */
  const uint64_t *flag; /* NULL, or where word comes */
} pydet_fold_peers;

typedef struct pydet_fold_options {
  uint32_t struct_size;
  int32_t order;      /* PYDET_ORDERED or PYDET_TREE */
  int32_t accumulate; /* 1: D0 is out, which is fp32 */
  int32_t reserved;   /* 0 */
  const char *kernel;
  const pydet_fold_peers *peers; /* NULL: this device alone */
} pydet_fold_options;

PYDET_API pydet_status pydet_fold(void *stream, const pydet_tensor *const *parts, int32_t count,
                                  const pydet_tensor *bias, const pydet_tensor *out, const pydet_fold_options *options);

/* ---- Threads --------------------------------------------------------------------------------------------------
 * How many threads one call on the CPU may use, its caller among them: what pydet_set_threads set, else
 * PYDET_NUM_THREADS, else OMP_NUM_THREADS (environment variables, read once, passed over unless positive numbers), else
 * as many CPUs as the process's affinity and its cgroups' quotas grant. No bit depends on it. */
PYDET_API int32_t pydet_threads(void);

/* For all threads of the process; 0 undoes it. */
PYDET_API pydet_status pydet_set_threads(int32_t count);

/* ---- What is here ---------------------------------------------------------------------------------------------*/
typedef struct pydet_device_info {
  uint32_t struct_size;    /* in: sizeof(pydet_device_info) */
  int32_t multiprocessors; /* SMs, CUs, or logical CPUs */
  char name[64];           /* "NVIDIA H100 80GB HBM3" */
  char arch[32];           /* "sm_90", "gfx942", "x86-64 avx512" */
} pydet_device_info;

/* Devices of a type (PYDET_CPU, PYDET_CUDA, PYDET_ROCM) that this build can use: 0, with PYDET_OK, where there is none.
 * */
PYDET_API pydet_status pydet_device_count(int32_t device_type, int32_t *count);
PYDET_API pydet_status pydet_query_device(pydet_device device, pydet_device_info *info);

typedef struct pydet_kernel_info {
  uint32_t struct_size;
  int32_t device_type;   /* where it runs */
  int32_t available;     /* 1: some device of this machine can run it */
  int32_t arithmetic;    /* PYDET_IEEE, ... */
  const char *name;      /* for options.kernel */
  const char *operation; /* "gemm", "rmsnorm", "rmsnorm_backward" */
  const char *dtypes;    /* of the inputs: "bf16 fp16" */
  const char *requires_; /* "avx512", "sm_90a", ... */
} pydet_kernel_info;

/* The name of kernel i, NULL past the last: for (int32_t i = 0; pydet_kernel_name(i); ++i) lists the table. */
PYDET_API const char *pydet_kernel_name(int32_t index);
PYDET_API pydet_status pydet_query_kernel(int32_t index, pydet_kernel_info *info);

#ifdef __cplusplus
}
#endif

#endif /* PYDET_H */
