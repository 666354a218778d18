/* Every CPU kernel, forced by name, on a stack of STACK bytes between two guard pages; what lies beyond them is watched.
 *
 *   stack STACK [without-memory]
 *
 * without-memory: no page can be mapped any more once the calls begin. Prints the most stack that a call used, and
 * exits with 1 if a call failed or wrote past a guard. */
#define _GNU_SOURCE
#include <pydet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <ucontext.h>

enum { kNeighbour = 1 << 20, kGuard = 4096, kMost = 1 << 22 };
static const unsigned char kWatched = 0x5A, kUnused = 0xA5;

static char *a, *b, *c, *bias, *workspace; /* kMost bytes of zeros each: zeros in every type */
static ucontext_t caller, callee;
static struct {
  const char *operation, *kernel;
  pydet_dtype dtype;
  int64_t m, n, k, k_chunk;
  int transposed;
  pydet_status status;
} call;

static pydet_tensor tensor(void *data, int32_t ndim, int64_t *shape, int64_t *strides, pydet_dtype dtype) {
  pydet_tensor made = {data, {PYDET_CPU, 0}, ndim, dtype, shape, strides, 0};
  return made;
}

static int32_t arithmetic_of(const char *kernel) {
  int32_t i;
  for (i = 0; pydet_kernel_name(i); ++i) {
    pydet_kernel_info info = {sizeof info, 0, 0, 0, NULL, NULL, NULL, NULL};
    pydet_query_kernel(i, &info);
    if (!strcmp(info.name, kernel)) return info.arithmetic;
  }
  return PYDET_AUTO;
}

/* Apart from run(), whose stack is that of all operations. */
__attribute__((noinline)) static void run_sample(const pydet_tensor *x, int64_t *of_rows) {
  const pydet_dtype fp32 = {PYDET_FLOAT, 32, 1}, whole = {PYDET_INT, 64, 1};
  pydet_sample_options options = {sizeof options, 0.8f, 0.9f, 0.01f, 3, NULL, NULL, NULL, NULL, NULL, 0};
  pydet_tensor seed = tensor(b, 1, of_rows, NULL, whole), token = tensor(c, 1, of_rows, NULL, whole);
  pydet_tensor first = tensor(workspace, 1, of_rows, NULL, fp32);
  pydet_tensor second = tensor(workspace + kMost / 2, 1, of_rows, NULL, fp32);
  options.kernel = call.kernel;
  call.status = pydet_sample(NULL, x, &seed, &seed, &token, &first, call.transposed ? &second : NULL, &options);
}

__attribute__((noinline)) static void run_topk(const pydet_tensor *x, const pydet_tensor *values) {
  const pydet_dtype whole = {PYDET_INT, 64, 1};
  pydet_topk_options options = {sizeof options, 0, NULL};
  pydet_tensor index = tensor(workspace, 2, values->shape, NULL, whole);
  options.kernel = call.kernel;
  call.status = pydet_topk(NULL, x, values, &index, &options);
}

__attribute__((noinline)) static void run_embedding(const pydet_tensor *x, int64_t *of_rows, const pydet_tensor *y) {
  const pydet_dtype whole = {PYDET_INT, 64, 1};
  pydet_embedding_backward_options options = {sizeof options, 0, 0, 0, 0, NULL, NULL, 0};
  pydet_embedding_options forward = {sizeof forward, 0, NULL};
  pydet_tensor ids = tensor(workspace, 1, of_rows, NULL, whole);
  options.kernel = forward.kernel = call.kernel;
  options.workspace = workspace + kMost / 2, options.workspace_size = kMost / 2;
  if (!strcmp(call.operation, "embedding")) call.status = pydet_embedding(NULL, x, &ids, y, &forward);
  else call.status = pydet_embedding_backward(NULL, x, &ids, y, &options);
}

/* Beside each of topk, of whichever instruction set its steps are; and by each of head_rows. */
__attribute__((noinline)) static void run_head(int64_t *of_rows) {
  const pydet_dtype fp32 = {PYDET_FLOAT, 32, 1}, whole = {PYDET_INT, 64, 1};
  int64_t of_x[] = {call.m, call.k}, of_w[] = {call.n, call.k}, of_columns[] = {call.n};
  pydet_linear_log_prob_options options = {sizeof options, PYDET_AUTO, 0,    {0, 0, 0}, 0,    NULL, 0, 0, 0,
                                           NULL,           NULL,       NULL, NULL,      NULL, 0};
  pydet_tensor x = tensor(a, 2, of_x, NULL, call.dtype), w = tensor(b, 2, of_w, NULL, call.dtype);
  pydet_tensor index = tensor(b, 1, of_rows, NULL, whole), given = tensor(b, 1, of_rows, NULL, fp32);
  pydet_tensor dx = tensor(c, 2, of_x, NULL, call.dtype), dw = tensor(workspace, 2, of_w, NULL, fp32);
  pydet_tensor dbias = tensor(bias, 1, of_columns, NULL, fp32), made = tensor(bias + kMost / 2, 1, of_rows, NULL, fp32);
  if (call.transposed && call.dtype.bits == 16) options.arithmetic = PYDET_SM90, options.logits = fp32;
  options.workspace = workspace + kMost / 2, options.workspace_size = kMost / 2;
  if (!strcmp(call.operation, "head_rows")) {
    options.kernel = call.kernel, options.softcap = 2.0f, options.temperature = 0.5f;
    options.entropy = options.lse = options.mean = &given;
  }
  call.status = pydet_linear_log_prob_backward(NULL, &given, &x, &w, NULL, &index, &made, &dx, &dw, &dbias, &options);
}

/* What of a loss takes the most steps: with its gradients, of lse and means too, and of a target that is ignored. */
__attribute__((noinline)) static void run_loss(int64_t *of_rows) {
  const pydet_dtype fp32 = {PYDET_FLOAT, 32, 1}, whole = {PYDET_INT, 64, 1};
  int64_t of_x[] = {call.m, call.k}, of_w[] = {call.n, call.k}, of_columns[] = {call.n};
  pydet_linear_cross_entropy_options options = {
      sizeof options, PYDET_AUTO, 0, {0, 0, 0}, 0, NULL, 0, 2.0f, 0.5f, 0.1, 0.01, 0, 1, 0, NULL, NULL, 0};
  pydet_tensor x = tensor(a, 2, of_x, NULL, call.dtype), w = tensor(b, 2, of_w, NULL, call.dtype);
  pydet_tensor target = tensor(b, 1, of_rows, NULL, whole), loss = tensor(bias + kMost / 2, 0, NULL, NULL, fp32);
  pydet_tensor dx = tensor(c, 2, of_x, NULL, call.dtype), dw = tensor(workspace, 2, of_w, NULL, fp32);
  pydet_tensor dbias = tensor(bias, 1, of_columns, NULL, fp32);
  options.workspace = workspace + kMost / 2, options.workspace_size = kMost / 2;
  if (!strcmp(call.operation, "head_rows")) options.kernel = call.kernel;
  call.status =
      pydet_linear_cross_entropy_backward(NULL, NULL, &x, &w, NULL, &target, &loss, &dx, &dw, &dbias, &options);
  if (call.status == PYDET_OK) call.status = pydet_linear_cross_entropy(NULL, &x, &w, NULL, &target, &loss, &options);
}

__attribute__((noinline)) static void run_rotary(const pydet_tensor *x, int64_t *of_rows, int64_t *of_row,
                                                 const pydet_tensor *y) {
  const pydet_dtype whole = {PYDET_INT, 64, 1}, fp32 = {PYDET_FLOAT, 32, 1};
  int64_t of_heads[] = {of_rows[0], 1, of_row[0]}, of_table[] = {of_rows[0], of_row[0] / 2};
  pydet_rotary_table_options table = {sizeof table, 1, 0, NULL};
  pydet_rotary_options options = {sizeof options, 0, 0, 0, 0, 0, 0, NULL};
  pydet_tensor places = tensor(workspace, 1, of_rows, NULL, whole), frequencies = tensor(b, 1, of_row, NULL, fp32);
  pydet_tensor cos = tensor(workspace, 2, of_table, NULL, fp32), sin = cos, q = *x, out = *y, other = *y;
  table.kernel = options.kernel = call.kernel;
  other.data = workspace + kMost / 2;
  q.ndim = out.ndim = 3, q.shape = out.shape = of_heads, q.strides = out.strides = NULL;
  if (strcmp(call.operation, "rotary"))
    call.status = pydet_rotary_table(NULL, &places, &frequencies, y, &other, &table);
  else if (of_table[1] > 0) call.status = pydet_rotary(NULL, &q, NULL, &cos, &sin, &out, NULL, &options);
  else call.status = PYDET_OK; /* no pair */
}

/* Of one tensor, or of as many as a call takes, each by its own rows of the buffers. */
__attribute__((noinline)) static void run_adamw(void) {
  const pydet_dtype fp32 = {PYDET_FLOAT, 32, 1};
  const pydet_adamw_step step = {sizeof step, 0, 0.1, 0.9, 0.99, 1e-8, 0.1, 0.9, 0.99};
  pydet_adamw_options options = {sizeof options, 0, NULL};
  static pydet_tensor tensors[5][PYDET_ADAMW_TENSORS];
  static const pydet_tensor *lists[5][PYDET_ADAMW_TENSORS];
  char *const buffers[] = {a, b, c, bias, workspace};
  int32_t list, i, used = call.transposed ? PYDET_ADAMW_TENSORS : 1;
  static int64_t size[1];
  size[0] = call.m * call.n;
  for (list = 0; list < 5; ++list)
    for (i = 0; i < used; ++i) {
      tensors[list][i] =
          tensor(buffers[list] + i * (kMost / PYDET_ADAMW_TENSORS), 1, size, NULL, list < 2 ? call.dtype : fp32);
      lists[list][i] = &tensors[list][i];
    }
  if (size[0] * 4 > kMost / PYDET_ADAMW_TENSORS) used = 1;
  options.kernel = call.kernel;
  call.status = pydet_adamw(NULL, lists[0], lists[1], lists[2], lists[3], call.dtype.bits == 16 ? lists[4] : NULL, used,
                            &step, &options);
}

/* Of few tokens, columns and states, whose workspace fits. */
__attribute__((noinline)) static void run_scan_backward(void) {
  const pydet_dtype fp32 = {PYDET_FLOAT, 32, 1};
  pydet_scan_backward_options options = {sizeof options, 0, NULL, NULL, 0};
  const int64_t m = call.m < 40 ? call.m : 40, n = call.n < 40 ? call.n : 40;
  int64_t heads[] = {1, m, 1, n}, states[] = {1, m, 1, n}, channels[] = {1, m, n}, taps[] = {n, 4}, one[] = {1, 1};
  pydet_tensor x = tensor(a, 4, heads, NULL, call.dtype), dx = tensor(c, 4, heads, NULL, call.dtype);
  pydet_tensor row = tensor(b, 4, states, NULL, call.dtype), step = tensor(bias, 3, heads, NULL, fp32);
  pydet_tensor decay = tensor(bias, 1, one, NULL, fp32), w = tensor(b, 2, taps, NULL, call.dtype);
  pydet_tensor first = row, second = row, dstep = step, other = step,
               sums = tensor(c + 7 * (kMost / 8), 2, one, NULL, fp32);
  first.data = c + kMost / 8, second.data = c + kMost / 4;
  dstep.data = c + 3 * (kMost / 8), other.data = c + kMost / 2;
  options.kernel = call.kernel, options.workspace = workspace, options.workspace_size = kMost;
  if (!strcmp(call.operation, "selective_scan_backward")) {
    call.status = pydet_selective_scan_backward(NULL, &x, NULL, &x, &step, &decay, &row, &row, NULL, NULL, NULL, &dx,
                                                &dstep, &sums, &first, &second, NULL, NULL, &options);
  } else if (!strcmp(call.operation, "gated_delta_backward")) {
    call.status = pydet_gated_delta_backward(NULL, &x, NULL, &row, &row, &x, &step, &step, NULL, NULL, &first, &second,
                                             &dx, &dstep, &other, NULL, &options);
  } else {
    x.ndim = dx.ndim = 3, x.shape = dx.shape = channels;
    call.status = pydet_causal_conv1d_backward(NULL, &x, &x, &w, NULL, NULL, &dx, NULL, NULL, NULL, &options);
  }
}

/* Rows are tokens, and columns those of one head, or channels. */
__attribute__((noinline)) static void run_scan(void) {
  const pydet_dtype fp32 = {PYDET_FLOAT, 32, 1};
  pydet_scan_options options = {sizeof options, 0, NULL};
  int64_t heads[] = {1, call.m, 1, call.n}, states[] = {1, call.m, 1, call.n < 512 ? call.n : 512};
  int64_t channels[] = {1, call.m, call.n}, taps[] = {call.n, 4};
  pydet_tensor x = tensor(a, 4, heads, NULL, call.dtype), y = tensor(c, 4, heads, NULL, call.dtype);
  pydet_tensor row = tensor(b, 4, states, NULL, call.dtype), one = tensor(workspace, 3, heads, NULL, fp32);
  pydet_tensor decay = tensor(bias, 1, heads, NULL, fp32), w = tensor(b, 2, taps, NULL, call.dtype);
  options.kernel = call.kernel;
  if (!strcmp(call.operation, "selective_scan")) {
    call.status = pydet_selective_scan(NULL, &x, &one, &decay, &row, &row, NULL, NULL, NULL, &y, NULL, &options);
  } else if (!strcmp(call.operation, "gated_delta")) {
    call.status = pydet_gated_delta(NULL, &row, &row, &x, &one, &one, NULL, NULL, &y, NULL, &options);
  } else {
    x.ndim = y.ndim = 3, x.shape = y.shape = channels;
    call.status = pydet_causal_conv1d(NULL, &x, &w, NULL, NULL, NULL, &y, &options);
  }
}

static void run(void) {
  pydet_dtype fp32 = {PYDET_FLOAT, 32, 1};
  int64_t of_a[] = {call.m, call.k}, of_b[] = {call.k, call.n}, of_c[] = {call.m, call.n}, of_row[] = {call.n};
  int64_t of_rows[] = {call.m}, columns[] = {1, call.k};
  if (!strcmp(call.operation, "scaled_gemm")) {
    pydet_scaled_gemm_options options = {sizeof options, 0, 128, 0, 0, NULL, NULL, 0, NULL};
    pydet_tensor x = tensor(a, 2, of_a, NULL, call.dtype), y = tensor(b, 2, of_b, NULL, call.dtype);
    pydet_tensor out = tensor(c, 2, of_c, NULL, fp32);
    options.arithmetic = strstr(call.kernel, "sm90") ? PYDET_SM90 : PYDET_IEEE;
    options.kernel = call.kernel;
    call.status = pydet_scaled_gemm(NULL, &x, NULL, &y, NULL, NULL, &out, &options);
  } else if (!strcmp(call.operation, "grouped_gemm")) {
    pydet_grouped_gemm_options options = {sizeof options, PYDET_AUTO, 0, 0, 0, NULL, NULL, 0, NULL};
    const pydet_dtype int32 = {PYDET_INT, 32, 1};
    const int depth = call.transposed;
    int32_t ends[2];
    int64_t groups[] = {2}, of_matrices[] = {2, call.k, call.n}, of_sums[] = {2, call.m, call.n};
    pydet_tensor x = tensor(a, 2, of_a, NULL, call.dtype), end = tensor(ends, 1, groups, NULL, int32);
    pydet_tensor y = tensor(b, depth ? 2 : 3, depth ? of_b : of_matrices, NULL, call.dtype);
    pydet_tensor out = tensor(c, depth ? 3 : 2, depth ? of_sums : of_c, NULL, call.dtype);
    ends[1] = (int32_t)(depth ? call.k : call.m), ends[0] = ends[1] / 3;
    options.arithmetic = arithmetic_of(call.kernel);
    options.kernel = call.kernel, options.k_chunk = call.k_chunk;
    call.status = pydet_grouped_gemm(NULL, &x, &y, NULL, NULL, &end, &out, &options);
  } else if (!strcmp(call.operation, "scaled_grouped_gemm")) {
    pydet_scaled_grouped_gemm_options options = {sizeof options, 0, 128, 0, 0, NULL, NULL, 0, NULL};
    const pydet_dtype int32 = {PYDET_INT, 32, 1};
    int32_t ends[2];
    int64_t groups[] = {2}, of_matrices[] = {2, call.k, call.n};
    pydet_tensor x = tensor(a, 2, of_a, NULL, call.dtype), y = tensor(b, 3, of_matrices, NULL, call.dtype);
    pydet_tensor end = tensor(ends, 1, groups, NULL, int32), out = tensor(c, 2, of_c, NULL, fp32);
    ends[0] = (int32_t)call.m / 3, ends[1] = (int32_t)call.m;
    options.arithmetic = arithmetic_of(call.kernel), options.kernel = call.kernel;
    call.status = pydet_scaled_grouped_gemm(NULL, &x, NULL, &y, NULL, NULL, NULL, &end, &out, &options);
  } else if (!strcmp(call.operation, "attention")) {
    pydet_attention_options options = {0};
    const int wide = call.transposed;
    int64_t of_q[4] = {1, 2, 0, 0}, of_k[4] = {1, 1, 0, 0}, of_v[4] = {1, 1, 0, 0}, of_out[4] = {1, 2, 0, 0};
    int64_t of_lse[3] = {1, 2, 0};
    pydet_tensor q = tensor(a, 4, of_q, NULL, call.dtype), k = tensor(b, 4, of_k, NULL, call.dtype);
    pydet_tensor v = tensor(b, 4, of_v, NULL, call.dtype), out = tensor(c, 4, of_out, NULL, call.dtype);
    pydet_tensor lse = tensor(workspace, 3, of_lse, NULL, fp32);
    of_q[2] = of_out[2] = of_lse[2] = call.m % (wide ? 20 : 40) + 1; /* the widest is slow without memory */
    of_k[2] = of_v[2] = wide ? call.k % 400 : call.k;
    of_q[3] = of_k[3] = wide ? 576 : 72, of_v[3] = of_out[3] = wide ? 512 : 40;
    options.struct_size = sizeof options, options.arithmetic = arithmetic_of(call.kernel);
    options.kernel = call.kernel, options.kv_chunk = call.k_chunk ? 128 : 0, options.causal = wide;
    call.status = pydet_attention(NULL, &q, &k, &v, &out, &lse, &options);
  } else if (!strcmp(call.operation, "attention_backward")) {
    pydet_attention_backward_options options = {0};
    const int wide = call.transposed;
    int64_t of_q[4] = {1, 2, 0, 0}, of_k[4] = {1, 1, 0, 0}, of_v[4] = {1, 1, 0, 0}, of_out[4] = {1, 2, 0, 0};
    int64_t of_lse[3] = {1, 2, 0};
    pydet_tensor q = tensor(a, 4, of_q, NULL, call.dtype), k = tensor(b, 4, of_k, NULL, call.dtype);
    pydet_tensor v = tensor(b, 4, of_v, NULL, call.dtype), out = tensor(a, 4, of_out, NULL, call.dtype);
    pydet_tensor lse = tensor(bias, 3, of_lse, NULL, fp32), dq = tensor(c, 4, of_q, NULL, call.dtype);
    pydet_tensor dk = tensor(workspace, 4, of_k, NULL, call.dtype);
    pydet_tensor dv = tensor(workspace + kMost / 2, 4, of_v, NULL, call.dtype);
    of_q[2] = of_out[2] = of_lse[2] = call.m % 5 + 1, of_k[2] = of_v[2] = call.k % 20 + 1; /* slow without memory */
    of_q[3] = of_k[3] = wide ? 576 : 72, of_v[3] = of_out[3] = wide ? 512 : 40;
    options.struct_size = sizeof options, options.arithmetic = arithmetic_of(call.kernel);
    options.kernel = call.kernel, options.causal = wide;
    call.status = pydet_attention_backward(NULL, &out, &q, &k, &v, &out, &lse, &dq, &dk, &dv, &options);
  } else if (!strcmp(call.operation, "gemm")) {
    pydet_gemm_options options = {sizeof options, PYDET_AUTO, 0, 0, 0, NULL, NULL, 0, NULL};
    int64_t *strides = call.transposed ? columns : NULL;
    pydet_tensor x = tensor(a, 2, of_a, NULL, call.dtype), y = tensor(b, 2, of_b, strides, call.dtype);
    pydet_tensor z = tensor(bias, 1, of_row, NULL, fp32), out = tensor(c, 2, of_c, NULL, call.dtype);
    pydet_tensor initial = tensor(workspace, 2, of_c, NULL, fp32);
    options.arithmetic = arithmetic_of(call.kernel);
    options.kernel = call.kernel, options.k_chunk = call.k_chunk;
    if (call.transposed) {
      options.initial = &initial;
      options.workspace = workspace + kMost / 2, options.workspace_size = kMost / 2;
    }
    call.status = pydet_gemm(NULL, &x, &y, &z, &out, &options);
  } else {
    pydet_tensor x = tensor(a, 2, of_c, NULL, call.dtype), y = tensor(c, 2, of_c, NULL, call.dtype);
    pydet_tensor weight = tensor(bias, 1, of_row, NULL, fp32);
    if (!strcmp(call.operation, "quantize")) {
      pydet_quantize_options options = {sizeof options, PYDET_ROW, 0, 0, 0, NULL};
      int64_t of_scale[2] = {call.m, 1};
      pydet_tensor scale = tensor(b, 2, of_scale, NULL, fp32);
      y.dtype.code = PYDET_FLOAT8_E4M3FN, y.dtype.bits = 8;
      options.kernel = call.kernel;
      call.status = pydet_quantize(NULL, &x, &y, &scale, NULL, NULL, &options);
    } else if (!strcmp(call.operation, "rmsnorm")) {
      pydet_rmsnorm_options options = {sizeof options, 1e-6f, 0, 0, NULL, NULL};
      pydet_tensor residual = tensor(b, 2, of_c, NULL, fp32), sum = tensor(workspace, 2, of_c, NULL, fp32);
      options.kernel = call.kernel, options.bias = &weight;
      call.status = pydet_rmsnorm(NULL, &x, call.transposed ? &residual : NULL, &weight, &y, NULL,
                                  call.transposed ? &sum : NULL, &options);
    } else if (!strcmp(call.operation, "rmsnorm_quantize")) {
      pydet_rmsnorm_quantize_options options = {sizeof options, 1e-6f, 0, PYDET_ROW, 0, 0, NULL};
      int64_t of_scale[2] = {call.m, 1};
      pydet_tensor sum = tensor(workspace, 2, of_c, NULL, call.dtype), scale = tensor(b, 2, of_scale, NULL, fp32);
      y.dtype.code = PYDET_FLOAT8_E4M3FN, y.dtype.bits = 8;
      options.kernel = call.kernel, options.granularity = call.transposed ? PYDET_GROUP : PYDET_ROW;
      of_scale[1] = call.transposed ? (call.n + 127) / 128 : 1;
      call.status = pydet_rmsnorm_quantize(NULL, &x, call.k_chunk ? &x : NULL, &weight, &y, &scale, NULL, NULL,
                                           call.k_chunk ? &sum : NULL, &options);
    } else if (!strcmp(call.operation, "softmax")) {
      pydet_softmax_options options = {sizeof options, 0, NULL, 0};
      options.log = call.k_chunk != 0, options.kernel = call.kernel;
      call.status = pydet_softmax(NULL, &x, &y, &options);
    } else if (!strcmp(call.operation, "fold")) {
      pydet_fold_options options = {sizeof options, PYDET_ORDERED, 0, 0, NULL, NULL};
      const pydet_tensor *parts[PYDET_FOLD_PARTS];
      int32_t part, used = call.transposed ? PYDET_FOLD_PARTS : 3;
      for (part = 0; part < used; ++part) parts[part] = &x;
      options.order = call.k_chunk ? PYDET_TREE : PYDET_ORDERED, options.kernel = call.kernel;
      call.status = pydet_fold(NULL, parts, used, &weight, &y, &options);
    } else if (!strcmp(call.operation, "softmax_backward")) {
      pydet_softmax_options options = {sizeof options, 0, NULL, 0};
      pydet_tensor dy = tensor(b, 2, of_c, NULL, call.dtype);
      options.log = call.k_chunk != 0, options.kernel = call.kernel;
      call.status = pydet_softmax_backward(NULL, &dy, &x, &y, &options);
    } else if (!strcmp(call.operation, "activation")) {
      pydet_activation_options options = {sizeof options, 0, NULL, 0};
      pydet_tensor up = tensor(b, 2, of_c, NULL, call.dtype);
      options.kind = (int32_t)(call.n % 8), options.kernel = call.kernel;
      call.status = pydet_activation(NULL, &x, call.transposed ? &up : NULL, &y, &options);
    } else if (!strcmp(call.operation, "activation_backward")) {
      pydet_activation_options options = {sizeof options, 0, NULL, 0};
      pydet_tensor dy = tensor(b, 2, of_c, NULL, call.dtype), dup = tensor(workspace, 2, of_c, NULL, call.dtype);
      options.kind = (int32_t)(call.n % 8), options.kernel = call.kernel;
      call.status = pydet_activation_backward(NULL, &dy, &x, call.transposed ? &dy : NULL, &y,
                                              call.transposed ? &dup : NULL, &options);
    } else if (!strcmp(call.operation, "sample")) {
      run_sample(&x, of_rows);
    } else if (!strcmp(call.operation, "topk")) {
      run_topk(&x, &y);
      if (call.status == PYDET_OK) run_head(of_rows);
      if (call.status == PYDET_OK) run_loss(of_rows);
    } else if (!strcmp(call.operation, "head_rows")) {
      run_head(of_rows);
      if (call.status == PYDET_OK) run_loss(of_rows);
    } else if (!strncmp(call.operation, "embedding", 9)) {
      run_embedding(&x, of_rows, &y);
    } else if (!strcmp(call.operation, "adamw")) {
      run_adamw();
    } else if (!strncmp(call.operation, "rotary", 6)) {
      run_rotary(&x, of_rows, of_row, &y);
    } else if (strstr(call.operation, "_backward") &&
               (strstr(call.operation, "scan") || strstr(call.operation, "delta") ||
                strstr(call.operation, "conv1d"))) {
      run_scan_backward();
    } else if (strstr(call.operation, "scan") || strstr(call.operation, "delta") || strstr(call.operation, "conv1d")) {
      run_scan();
    } else if (!strcmp(call.operation, "layernorm")) {
      pydet_layernorm_options options = {sizeof options, 1e-5f, 0, 0, NULL};
      options.kernel = call.kernel;
      call.status = pydet_layernorm(NULL, &x, NULL, &weight, &weight, &y, NULL, NULL, NULL, &options);
    } else if (!strcmp(call.operation, "layernorm_backward")) {
      pydet_layernorm_backward_options options = {sizeof options, 0, 0, 0, NULL, NULL, 0};
      pydet_tensor dy = tensor(b, 2, of_c, NULL, call.dtype), rstd = tensor(b, 1, of_rows, NULL, fp32);
      pydet_tensor dweight = tensor(workspace, 1, of_row, NULL, fp32);
      options.kernel = call.kernel;
      options.workspace = workspace + kMost / 2, options.workspace_size = kMost / 2;
      call.status = pydet_layernorm_backward(NULL, &dy, &x, &weight, &rstd, &rstd, NULL, &y, &dweight, NULL, &options);
    } else {
      pydet_rmsnorm_backward_options options = {sizeof options, 0, 0, 0, NULL, NULL, 0, NULL, 0};
      pydet_tensor dy = tensor(b, 2, of_c, NULL, call.dtype), rstd = tensor(b, 1, of_rows, NULL, fp32);
      pydet_tensor dweight = tensor(workspace, 1, of_row, NULL, fp32);
      pydet_tensor dbias = tensor(workspace + kMost / 4, 1, of_row, NULL, fp32);
      options.kernel = call.kernel, options.dbias = &dbias;
      options.workspace = workspace + kMost / 2, options.workspace_size = kMost / 2;
      call.status = pydet_rmsnorm_backward(NULL, &dy, &x, &weight, &rstd, NULL, &y, &dweight, &options);
    }
  }
}

static int intact(const char *neighbour) {
  return (unsigned char)*neighbour == kWatched && !memcmp(neighbour, neighbour + 1, kNeighbour - 1);
}

static void run_on(char *bottom, size_t size) {
  getcontext(&callee);
  callee.uc_stack.ss_sp = bottom, callee.uc_stack.ss_size = size, callee.uc_link = &caller;
  makecontext(&callee, run, 0);
  swapcontext(&caller, &callee);
}

int main(int count, char **arguments) {
  const size_t stack = count > 1 ? strtoul(arguments[1], NULL, 10) : 0;
  const pydet_dtype dtypes[] = {
      {PYDET_FLOAT, 32, 1}, {PYDET_BFLOAT, 16, 1}, {PYDET_FLOAT, 16, 1}, {PYDET_FLOAT8_E4M3FN, 8, 1}};
  const char *const names[] = {"fp32", "bf16", "fp16", "e4m3"};
  /* The smallest, some of every edge, few rows, few columns, many of all. */
  const int64_t shapes[][3] = {{1, 1, 1},    {4, 4, 4},     {33, 65, 129},  {1, 700, 300},
                               {5, 64, 900}, {300, 3, 200}, {150, 260, 170}};
  const size_t size = 2 * (kNeighbour + kGuard) + stack;
  char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char *below = memory, *bottom = below + kNeighbour + kGuard, *above = bottom + stack + kGuard;
  size_t most = 0, calls = 0, failures = 0, i;
  char **const buffers[] = {&a, &b, &c, &bias, &workspace};
  int32_t index;
  if (memory == MAP_FAILED || mprotect(bottom - kGuard, kGuard, PROT_NONE) ||
      mprotect(above - kGuard, kGuard, PROT_NONE))
    return 2;
  for (i = 0; i < sizeof buffers / sizeof *buffers; ++i)
    if (!(*buffers[i] = calloc(1, kMost))) return 2;
  pydet_gemm(NULL, NULL, NULL, NULL, NULL, NULL); /* refused; after it this thread has its two texts */
  if (count > 2) {
    const struct rlimit none = {0, 0};
    if (strcmp(arguments[2], "without-memory") || setrlimit(RLIMIT_AS, &none)) return 2;
  }
  memset(below, kWatched, kNeighbour);
  memset(above, kWatched, kNeighbour);
  for (index = 0; pydet_kernel_name(index); ++index) {
    pydet_kernel_info info = {sizeof info, 0, 0, 0, NULL, NULL, NULL, NULL};
    size_t dtype, shape, way;
    pydet_query_kernel(index, &info);
    if (info.device_type != PYDET_CPU || !info.available) continue;
    for (dtype = 0; dtype < 4; ++dtype)
      for (shape = 0; strstr(info.dtypes, names[dtype]) && shape < sizeof shapes / sizeof *shapes; ++shape)
        for (way = 0; way < 4; ++way) {
          size_t untouched = 0;
          call.operation = info.operation, call.kernel = info.name, call.dtype = dtypes[dtype];
          call.m = shapes[shape][0], call.n = shapes[shape][1], call.k = shapes[shape][2];
          call.transposed = way & 1, call.k_chunk = way & 2 ? 48 : 0, call.status = -1;
          memset(bottom, kUnused, stack);
          run_on(bottom, stack);
          while (untouched < stack && (unsigned char)bottom[untouched] == kUnused) ++untouched;
          if (stack - untouched > most) most = stack - untouched;
          if (!intact(below) || !intact(above) || call.status) {
            ++failures;
            printf("%s %s %dx%dx%d: status %d %s%s\n", info.name, names[dtype], (int)call.m, (int)call.n, (int)call.k,
                   (int)call.status, pydet_last_error(),
                   intact(below) && intact(above) ? "" : ", a neighbour overwritten");
            memset(below, kWatched, kNeighbour);
            memset(above, kWatched, kNeighbour);
          }
          ++calls;
        }
  }
  printf("%d calls on a stack of %d bytes used at most %d\n", (int)calls, (int)stack, (int)most);
  return failures || !calls;
}
