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

/* A method, of which the first four members are CPython's PyMethodDef. The first arguments are positional, the rest
 * keywords in any order; one that is not given is the operation's default. Options are named as in pydet.h. */
typedef struct pydet_exchange_method {
  const char *name; /* NULL: the end of the methods */
  pydet_object *(*call)(pydet_object *self, pydet_object *const *arguments, intptr_t count, pydet_object *keywords);
  int flags;
  const char *doc;
  const char *arguments; /* "a, b, out": the names of all, in their order */
  pydet_object **names;  /* the same as interned strings, one a place: the binding's to fill in before the first call */
} pydet_exchange_method;

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

/* A function of pydet.h in one loaded library, whichever its arguments. */
typedef void (*pydet_exchange_function)(void);

enum { PYDET_EXCHANGE_CPU = 0, PYDET_EXCHANGE_CUDA = 1, PYDET_EXCHANGE_ROCM = 2, PYDET_EXCHANGE_LIBRARIES = 3 };

enum { PYDET_EXCHANGE_TYPES = 6 }; /* element types; a type index counts them in the order of contract/types.h */

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
  pydet_object *is_neg;      /* torch.Tensor.is_neg, NULL until torch is seen */
  pydet_object *records;     /* torch.is_grad_enabled, likewise */
  pydet_object *forward_ad;  /* torch.autograd.forward_ad, whose _current_level is 0 or more while there are tangents */
  pydet_object *numpy_empty; /* numpy.empty and the dtype of each type index, NULL until seen */
  pydet_object *numpy_dtypes[PYDET_EXCHANGE_TYPES];
  pydet_object *frameworks;    /* dict: type -> address of its pydet_exchange_framework, for types that live for ever */
  pydet_object *arithmetics;   /* dict: name -> number */
  pydet_object *modes;         /* dict: name -> number */
  pydet_object *granularities; /* dict: name -> number */
  pydet_object *orders;        /* dict: name -> number */
  pydet_object *kinds;         /* dict: name -> number, of activations */
  pydet_object *classify;      /* (object, op, name) -> that address, for any type */
  pydet_object *borrow;        /* (object, op, name, written) -> (address of a pydet_tensor, what keeps it alive) */
  pydet_object *unknown;       /* (object, op, name) -> the number of a name that the dict does not have */
  pydet_object *flag;          /* (object, op, name) -> True or False, for an object that is neither itself */
  pydet_object *check;         /* (object, op, name): raises if the torch tensor is not to be read as plain memory */
  pydet_object *unreadable;    /* (object, op, name): raises; the exchange API refused the object */
  pydet_object *mixed;         /* (op, first name, first object, name, object): raises */
  pydet_object *allocate;      /* (like, shape, type index, op) -> a new tensor of like's framework and device;
                                  behind the type indices is int64 */
  pydet_object *scratch;       /* (like, device type, bytes, op) -> (address, what keeps it alive), for bare carriers */
  pydet_object *adopt;         /* (like, result) -> what the caller gets */
  pydet_object *stream;        /* (like, device type, device id) -> address of the framework's current stream */
  pydet_object *load;          /* (device type, op): fills in the library that serves it */
  pydet_object *fail;          /* (status, sentence): raises */
  const pydet_exchange_function
      *libraries[PYDET_EXCHANGE_LIBRARIES]; /* pydet_exchange_functions(); NULL until loaded */
} pydet_exchange;

/* The methods of all operations; NULL, and pydet_last_error(), if struct_size is not this library's or another
 * interpreter of the process has them: the hooks are one interpreter's. The table must outlive every call. */
PYDET_API const pydet_exchange_method *pydet_exchange_methods(const pydet_exchange *exchange);

/* What the methods call in the library that serves their tensors: that library's functions. *operations is a number
 * that says which operations it has: the methods are to be those of a library with the same. */
PYDET_API const pydet_exchange_function *pydet_exchange_functions(uint32_t *operations);

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
