/* The Python entry: operations called with Python objects instead of descriptors. Not for C callers, and no part of
 * pydet.h: pydet/_native.py of the same release fills the table below once and gets its functions.
 *
 * CPython is reached through pointers that the binding hands in, by the names and types of its stable ABI, so that the
 * library needs no Python to build or to load. */
#ifndef PYDET_EXCHANGE_H
#define PYDET_EXCHANGE_H

#ifndef PYDET_CDEF
#include <stdint.h>
#endif
#include "pydet.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef void pydet_object; /* a PyObject */

/* Each member is named as the function it points to. */
typedef struct pydet_exchange_python {
  void (*Py_IncRef)(pydet_object *);
  void (*Py_DecRef)(pydet_object *);
  pydet_object *(*PyObject_Type)(pydet_object *);
  pydet_object *(*PyDict_GetItemWithError)(pydet_object *, pydet_object *);
  pydet_object *(*PyObject_GetAttr)(pydet_object *, pydet_object *);
  int (*PyObject_RichCompareBool)(pydet_object *, pydet_object *, int);
  pydet_object *(*PyObject_CallFunctionObjArgs)(pydet_object *, ...);
  int (*PyObject_GetBuffer)(pydet_object *, void *, int);
  void (*PyBuffer_Release)(void *);
  pydet_object *(*PyTuple_New)(intptr_t);
  intptr_t (*PyTuple_Size)(pydet_object *);
  int (*PyTuple_SetItem)(pydet_object *, intptr_t, pydet_object *);
  pydet_object *(*PyTuple_GetItem)(pydet_object *, intptr_t);
  pydet_object *(*PyLong_FromLongLong)(long long);
  long long (*PyLong_AsLongLong)(pydet_object *);
  void *(*PyLong_AsVoidPtr)(pydet_object *);
  double (*PyFloat_AsDouble)(pydet_object *);
  pydet_object *(*PyUnicode_DecodeUTF8)(const char *, intptr_t, const char *);
  const char *(*PyUnicode_AsUTF8AndSize)(pydet_object *, intptr_t *);
  pydet_object *(*PyErr_Occurred)(void);
  void (*PyErr_Clear)(void);
  void (*PyErr_Fetch)(pydet_object **, pydet_object **, pydet_object **);
  void (*PyErr_Restore)(pydet_object *, pydet_object *, pydet_object *);
  void *(*PyEval_SaveThread)(void);
  void (*PyEval_RestoreThread)(void *);
} pydet_exchange_python;

/* The arguments of each method, by name. The first ones are positional, the rest keywords in any order; one that is not
 * given is NULL here, and the operation's default. Options have the names that they have in pydet.h. */
typedef struct pydet_product_arguments { /* gemm, gemm_da, gemm_db, skinny_gemm */
  pydet_object *first, *second;          /* a and b, dc and b, a and dc, x and w; positional */
  pydet_object *bias;                    /* a tensor or None, as every tensor from here on */
  pydet_object *out;
  pydet_object *out_dtype; /* a type index or None */
  pydet_object *accumulate, *arithmetic;
  pydet_object *k_chunk; /* or None */
  pydet_object *initial;
  pydet_object *mode, *weights_constant;
  pydet_object *kernel; /* or None */
  pydet_object *stream; /* an address or None */
} pydet_product_arguments;

typedef struct pydet_rmsnorm_arguments {
  pydet_object *x, *weight, *eps; /* positional */
  pydet_object *bias, *weight_offset, *residual;
  pydet_object *out, *rstd, *sum;
  pydet_object *kernel, *stream;
} pydet_rmsnorm_arguments;

typedef struct pydet_rmsnorm_backward_arguments {
  pydet_object *dy, *x, *weight, *rstd; /* positional */
  pydet_object *weight_offset, *dresidual;
  pydet_object *has_bias; /* whether dbias is made where it is not given */
  pydet_object *out, *dweight, *dbias;
  pydet_object *dweight_dtype; /* of both; a type index or None */
  pydet_object *accumulate, *block_sums, *kernel, *stream;
} pydet_rmsnorm_backward_arguments;

typedef struct pydet_layernorm_arguments {
  pydet_object *x, *weight, *bias, *eps; /* positional */
  pydet_object *weight_offset, *residual;
  pydet_object *out, *mean, *rstd, *sum;
  pydet_object *kernel, *stream;
} pydet_layernorm_arguments;

typedef struct pydet_layernorm_backward_arguments {
  pydet_object *dy, *x, *weight, *mean, *rstd; /* positional */
  pydet_object *weight_offset, *dresidual;
  pydet_object *has_bias; /* whether dbias is made where dweight is */
  pydet_object *out, *dweight, *dbias;
  pydet_object *dweight_dtype; /* of both; a type index or None */
  pydet_object *accumulate, *kernel, *stream;
} pydet_layernorm_backward_arguments;

typedef struct pydet_softmax_arguments { /* of softmax and log_softmax */
  pydet_object *x;                       /* positional */
  pydet_object *out, *kernel, *stream;
} pydet_softmax_arguments;

typedef struct pydet_softmax_backward_arguments { /* of both */
  pydet_object *dy, *y;                           /* positional */
  pydet_object *out, *kernel, *stream;
} pydet_softmax_backward_arguments;

typedef struct pydet_log_prob_arguments {
  pydet_object *x, *index; /* positional */
  pydet_object *out, *kernel, *stream;
} pydet_log_prob_arguments;

typedef struct pydet_log_prob_backward_arguments {
  pydet_object *dlog_prob, *x, *index; /* positional */
  pydet_object *out, *kernel, *stream;
} pydet_log_prob_backward_arguments;

typedef struct pydet_scaled_gemm_arguments {
  pydet_object *a, *b; /* positional */
  pydet_object *a_scale, *b_scale, *bias;
  pydet_object *out, *out_dtype; /* a type index or None */
  pydet_object *accumulate, *arithmetic;
  pydet_object *k_chunk; /* None: 128 */
  pydet_object *kernel, *stream;
} pydet_scaled_gemm_arguments;

typedef struct pydet_grouped_gemm_arguments {
  pydet_object *a, *b, *group_end; /* positional */
  pydet_object *group_start, *bias;
  pydet_object *out, *out_dtype; /* a type index or None */
  pydet_object *accumulate, *arithmetic;
  pydet_object *k_chunk; /* or None */
  pydet_object *kernel, *stream;
} pydet_grouped_gemm_arguments;

typedef struct pydet_scaled_grouped_gemm_arguments {
  pydet_object *a, *b, *group_end; /* positional */
  pydet_object *group_start, *a_scale, *b_scale, *bias;
  pydet_object *out, *out_dtype; /* a type index or None */
  pydet_object *accumulate, *arithmetic;
  pydet_object *k_chunk; /* None: 128 */
  pydet_object *kernel, *stream;
} pydet_scaled_grouped_gemm_arguments;

typedef struct pydet_quantize_arguments {
  pydet_object *x; /* positional */
  pydet_object *granularity;
  pydet_object *given; /* the scale to read, or None; the rest are outputs */
  pydet_object *out, *scale, *transposed, *transposed_scale;
  pydet_object *dtype, *scale_dtype; /* type indices */
  pydet_object *power_of_two;
  pydet_object *turns; /* whether to make a transposed copy */
  pydet_object *kernel, *stream;
} pydet_quantize_arguments;

typedef struct pydet_fold_arguments {
  pydet_object *parts; /* positional: a tensor whose first dimension counts the parts, or a tuple of tensors */
  pydet_object *is_tuple;
  pydet_object *bias;
  pydet_object *out, *out_dtype; /* a type index or None */
  pydet_object *order, *accumulate;
  pydet_object *kernel, *stream;
} pydet_fold_arguments;

typedef struct pydet_attention_arguments {
  pydet_object *q, *k, *v;       /* positional */
  pydet_object *scale, *softcap; /* or None, as all from here on but the flags and arithmetic */
  pydet_object *causal;
  pydet_object *window_left, *window_right;
  pydet_object *sinks, *allowed, *bias, *first_key;
  pydet_object *cu_seqlens_q, *cu_seqlens_k, *seqlens_k, *block_table;
  pydet_object *arithmetic;
  pydet_object *kv_chunk, *out;
  pydet_object *return_lse;
  pydet_object *kernel, *stream;
} pydet_attention_arguments;

/* How tensors of one Python type are read and made. */
enum {
  PYDET_EXCHANGE_ARRAY = 0, /* numpy.ndarray: the buffer protocol, and numpy.empty */
  PYDET_EXCHANGE_API = 1,   /* the DLPack C exchange API */
  PYDET_EXCHANGE_HOOK = 2   /* anything else: the `borrow` and `allocate` hooks */
};

typedef struct pydet_exchange_framework {
  int32_t id;      /* two operands with different ids are refused; 0: a bare carrier of memory, which goes with any */
  int32_t reader;  /* PYDET_EXCHANGE_ARRAY, ... */
  int32_t torch;   /* 1: it has requires_grad, is_neg() and tangents, of which the exchange API says nothing */
  int32_t adopts;  /* 1: results are passed through the `adopt` hook */
  const void *api; /* a DLPackExchangeAPI, for PYDET_EXCHANGE_API */
} pydet_exchange_framework;

/* The operations of one loaded library. */
typedef struct pydet_exchange_library {
  pydet_status (*gemm)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                       const pydet_gemm_options *);
  pydet_status (*gemm_da)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                          const pydet_gemm_options *);
  pydet_status (*gemm_db)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                          const pydet_gemm_options *);
  pydet_status (*gemm_workspace)(int64_t, int64_t, int64_t, int64_t, const pydet_gemm_options *, uint64_t *);
  pydet_status (*skinny_gemm)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                              const pydet_tensor *, const pydet_skinny_gemm_options *);
  pydet_status (*skinny_gemm_workspace)(int64_t, int64_t, int64_t, const pydet_skinny_gemm_options *, uint64_t *);
  pydet_status (*scaled_gemm)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                              const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                              const pydet_scaled_gemm_options *);
  pydet_status (*quantize)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                           const pydet_tensor *, const pydet_tensor *, const pydet_quantize_options *);
  pydet_status (*rmsnorm)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                          const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                          const pydet_rmsnorm_options *);
  pydet_status (*rmsnorm_backward)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                                   const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                                   const pydet_tensor *, const pydet_rmsnorm_backward_options *);
  pydet_status (*rmsnorm_backward_workspace)(int64_t, int64_t, uint64_t *);
  pydet_status (*softmax)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_softmax_options *);
  pydet_status (*softmax_backward)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                                   const pydet_softmax_options *);
  pydet_status (*log_prob)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                           const pydet_log_prob_options *);
  pydet_status (*log_prob_backward)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                                    const pydet_tensor *, const pydet_log_prob_options *);
  pydet_status (*grouped_gemm)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                               const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                               const pydet_grouped_gemm_options *);
  pydet_status (*scaled_grouped_gemm)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                                      const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                                      const pydet_tensor *, const pydet_tensor *,
                                      const pydet_scaled_grouped_gemm_options *);
  pydet_status (*fold)(void *, const pydet_tensor *const *, int32_t, const pydet_tensor *, const pydet_tensor *,
                       const pydet_fold_options *);
  pydet_status (*layernorm)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                            const pydet_tensor *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                            const pydet_tensor *, const pydet_layernorm_options *);
  pydet_status (*layernorm_backward)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                                     const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                                     const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                                     const pydet_layernorm_backward_options *);
  pydet_status (*layernorm_backward_workspace)(int64_t, int64_t, uint64_t *);
  pydet_status (*attention)(void *, const pydet_tensor *, const pydet_tensor *, const pydet_tensor *,
                            const pydet_tensor *, const pydet_tensor *, const pydet_attention_options *);
  pydet_status (*attention_workspace)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                                      const pydet_attention_options *, uint64_t *);
  const char *(*last_error)(void);
  const char *(*last_kernel)(void);
} pydet_exchange_library;

enum { PYDET_EXCHANGE_CPU = 0, PYDET_EXCHANGE_CUDA = 1, PYDET_EXCHANGE_ROCM = 2, PYDET_EXCHANGE_LIBRARIES = 3 };

enum { PYDET_EXCHANGE_TYPES = 6 }; /* element types; a type index counts them in the order of types.h */

/* Everything an operation needs of Python. A hook is a callable; each returns what is said here or raises. `op` and
 * `name` are the operation's and the argument's, for sentences. */
typedef struct pydet_exchange {
  uint32_t struct_size; /* sizeof(pydet_exchange): a library of another release is refused */
  int64_t interpreter;  /* the number of the interpreter whose objects these are */
  pydet_exchange_python python;
  pydet_object *none, *yes, *no;
  pydet_object *requires_grad; /* the strings "requires_grad", "_current_level" and "dtype" */
  pydet_object *current_level;
  pydet_object *dtype;
  pydet_object *const *product_names; /* the members of the structs of arguments, as interned strings */
  pydet_object *const *scaled_gemm_names;
  pydet_object *const *quantize_names;
  pydet_object *const *rmsnorm_names;
  pydet_object *const *rmsnorm_backward_names;
  pydet_object *const *layernorm_names;
  pydet_object *const *layernorm_backward_names;
  pydet_object *const *softmax_names;
  pydet_object *const *softmax_backward_names;
  pydet_object *const *log_prob_names;
  pydet_object *const *log_prob_backward_names;
  pydet_object *const *grouped_gemm_names;
  pydet_object *const *scaled_grouped_gemm_names;
  pydet_object *const *fold_names;
  pydet_object *const *attention_names;
  pydet_object *is_neg;      /* torch.Tensor.is_neg, NULL until torch is seen */
  pydet_object *forward_ad;  /* torch.autograd.forward_ad, whose _current_level is 0 or more while there are tangents */
  pydet_object *numpy_empty; /* numpy.empty and the dtype of each type index, NULL until seen */
  pydet_object *numpy_dtypes[PYDET_EXCHANGE_TYPES];
  pydet_object *frameworks;    /* dict: type -> address of its pydet_exchange_framework, for types that live for ever */
  pydet_object *arithmetics;   /* dict: name -> number */
  pydet_object *modes;         /* dict: name -> number */
  pydet_object *granularities; /* dict: name -> number */
  pydet_object *orders;        /* dict: name -> number */
  pydet_object *classify;      /* (object, op, name) -> that address, for any type */
  pydet_object *borrow;        /* (object, op, name, written) -> (address of a pydet_tensor, what keeps it alive) */
  pydet_object *unknown;       /* (object, op, name) -> the number of a name that the dict does not have */
  pydet_object *flag;          /* (object, op, name) -> True or False, for an object that is neither itself */
  pydet_object *check;         /* (object, op, name): raises if the torch tensor is not to be read as plain memory */
  pydet_object *unreadable;    /* (object, op, name): raises; the exchange API refused the object */
  pydet_object *mixed;         /* (op, first name, first object, name, object): raises */
  pydet_object *allocate;      /* (like, shape, type index, op) -> a new tensor of like's framework and device */
  pydet_object *scratch;       /* (like, device type, bytes, op) -> (address, what keeps it alive), for bare carriers */
  pydet_object *adopt;         /* (like, result) -> what the caller gets */
  pydet_object *stream;        /* (like, device type, device id) -> address of the framework's current stream */
  pydet_object *load;          /* (device type, op): fills in the library that serves it */
  pydet_object *fail;          /* (status, sentence): raises */
  const pydet_exchange_library *libraries[PYDET_EXCHANGE_LIBRARIES]; /* NULL until loaded */
} pydet_exchange;

/* The methods, as a PyMethodDef array that ends with a NULL name; NULL, and pydet_last_error(), if struct_size is not
 * this library's or another interpreter of the process has them: the hooks are one interpreter's. The table must
 * outlive every call. */
PYDET_API const void *pydet_exchange_methods(const pydet_exchange *exchange);

/* The library index that this thread's last successful method call went to, -1 before the first. */
PYDET_API int32_t pydet_exchange_last_library(void);

/* Forgets what was read of the GPUs, which is kept: a test's stand-in runtime has other ones from then on. */
PYDET_API void pydet_exchange_forget_devices(void);

/* The name of a type index and its dtype; NULL past the last. */
PYDET_API const char *pydet_exchange_type(int32_t index, pydet_dtype *dtype);

#ifdef __cplusplus
}
#endif

#endif /* PYDET_EXCHANGE_H */
