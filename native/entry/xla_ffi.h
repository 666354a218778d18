/* What XLA's foreign function interface hands to a handler and takes from it, as far as xla_call.h uses it: a stable C
 * interface (major version 0), whose structures only grow at their ends. The names are ours, the layout is its public
 * header's; tests/test_jax.py compares the two where JAX is installed.
 * Also the handlers, which pydet/jax/calls.py registers by name. */
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
  PYDET_XLA_PRED = 1, /* bool, a byte */
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

/* What XLA calls for a custom call of this name. Operands are in C order; integers are attributes of 64 bits, floats of
 * 64; all take kernel, a string as in the options, "" for none. What else there is stands at each, in ops/X/xla.cpp.
 * What is continued from lies where its result does, by XLA's aliasing; where XLA puts the result elsewhere, it is copied
 * there first. Flags are 0 or 1; what a handler does not read, attribute, operand or result, is refused. */
typedef pydet_xla_error *(*pydet_xla_function)(pydet_xla_call *call);
typedef struct pydet_xla_handler {
  const char *name; /* NULL: the end of the handlers */
  pydet_xla_function on_cpu, on_gpu;
} pydet_xla_handler;

#ifndef PYDET_API
#define PYDET_API __attribute__((visibility("default")))
#endif
PYDET_API const pydet_xla_handler *pydet_xla_handlers(void);

#ifdef __cplusplus
}
#endif

#endif /* PYDET_XLA_FFI_H */
