// Handlers for XLA's foreign function interface: each reads its buffers and attributes, calls the C function of its
// name, and turns its status and sentence into XLA's error. They keep nothing and allocate nothing.

#include "entry/xla_ffi.h"

#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "types.h"

namespace {

using namespace pydet;

constexpr int32_t xla_of(Type type) {
  switch (type) {
    case Type::f32: return PYDET_XLA_F32;
    case Type::bf16: return PYDET_XLA_BF16;
    case Type::f16: return PYDET_XLA_F16;
    case Type::e4m3: return PYDET_XLA_F8E4M3FN;
    case Type::e5m2: return PYDET_XLA_F8E5M2;
    case Type::e8m0: return PYDET_XLA_F8E8M0FNU;
  }
  return 0;
}

constexpr int kMaxRank = 8;  // of a batch (6) and a matrix

struct Shape {
  int64_t dims[kMaxRank], strides[kMaxRank];
};

// A call that fails remembers why, and everything after that does nothing.
class Call {
 public:
  Call(pydet_xla_call *call, bool gpu) : call_(call), gpu_(gpu), device_{PYDET_CPU, 0} {
    if (!gpu) return;
    int32_t count = 0;
    const bool rocm = pydet_device_count(PYDET_ROCM, &count) == PYDET_OK && count > 0;
    pydet_xla_ordinal_arguments arguments = {sizeof arguments, nullptr, call->context, 0};
    const size_t needed = offsetof(pydet_xla_api, get_ordinal) + sizeof call->api->get_ordinal;
    if (call->api->struct_size >= needed && call->api->get_ordinal(&arguments)) fail("XLA names no device");
    device_ = {rocm ? PYDET_ROCM : PYDET_CUDA, arguments.ordinal};
  }

  pydet_xla_error *finish() {
    if (!*problem_) return nullptr;
    pydet_xla_error_arguments arguments = {sizeof arguments, nullptr, problem_,
                                           ours_ ? PYDET_XLA_INTERNAL : PYDET_XLA_INVALID_ARGUMENT};
    return call_->api->make_error(&arguments);
  }
  void fail(const char *sentence) {
    if (!*problem_) std::snprintf(problem_, sizeof problem_, "%s", sentence);
  }
  void check(pydet_status status) {
    if (status != PYDET_OK) fail(pydet_last_error());
    ours_ |= status == PYDET_DEVICE_ERROR;
  }
  bool failed() const { return *problem_; }

  int64_t integer(const char *name) { return scalar<int64_t>(name, PYDET_XLA_S64); }
  double real(const char *name) { return scalar<double>(name, PYDET_XLA_F64); }

  // options.kernel, which lives as long as the call; NULL for "".
  const char *kernel() {
    const auto *name = static_cast<const pydet_xla_name *>(attribute("kernel", PYDET_XLA_STRING));
    if (!name || !name->length) return nullptr;
    if (name->length >= sizeof kernel_) fail("kernel is longer than any name of a kernel");
    std::snprintf(kernel_, sizeof kernel_, "%.*s", int(name->length), name->text);
    return kernel_;
  }

  // Argument or result i; an empty one where there is none, which fails the call.
  const pydet_xla_buffer &argument(int64_t i) { return item(call_->arguments, i); }
  const pydet_xla_buffer &result(int64_t i) { return item(call_->results, i); }

  void *stream() {
    if (!gpu_ || failed()) return nullptr;
    pydet_xla_stream_arguments arguments = {sizeof arguments, nullptr, call_->context, nullptr};
    if (call_->api->get_stream(&arguments)) fail("XLA gives no stream");
    return arguments.stream;
  }

  // The tensor of a buffer from element `offset` on, with these dimensions.
  pydet_tensor tensor(const pydet_xla_buffer &buffer, Shape *shape, int rank, int64_t offset = 0) {
    pydet_tensor t = {};
    t.dtype = {0, 8, 1};  // none of ours
    for (const TypeRow &row : kTypes)
      if (xla_of(row.type) == buffer.dtype) t.dtype = {row.code, row.bits, 1};
    t.data = static_cast<char *>(buffer.data) + offset * (t.dtype.bits / 8);
    t.device = device_;
    t.ndim = rank;
    t.shape = shape->dims;
    t.strides = shape->strides;
    return t;
  }

 private:
  // The attribute of this name and type, where that is a scalar's of this element type; NULL where there is none, which
  // fails the call.
  const void *attribute(const char *name, int32_t type, int32_t dtype = 0) {
    const pydet_xla_attributes &all = call_->attributes;
    for (int64_t i = 0; i < all.size; ++i) {
      const pydet_xla_name &own = *all.names[i];
      if (own.length != std::strlen(name) || std::memcmp(own.text, name, own.length)) continue;
      if (all.types[i] != type) break;
      const auto *value = static_cast<const pydet_xla_scalar *>(all.items[i]);
      if (type != PYDET_XLA_SCALAR || value->dtype == dtype) return value;
    }
    char sentence[96];
    std::snprintf(sentence, sizeof sentence, "attribute %s is missing or of another type", name);
    fail(sentence);
    return nullptr;
  }
  template <class T> T scalar(const char *name, int32_t dtype) {
    const auto *found = static_cast<const pydet_xla_scalar *>(attribute(name, PYDET_XLA_SCALAR, dtype));
    return found ? *static_cast<const T *>(found->value) : 0;
  }

  const pydet_xla_buffer &item(const pydet_xla_list &list, int64_t i) {
    static const pydet_xla_buffer none = {};
    if (i < list.size) return *list.items[i];
    fail("an operand is missing");
    return none;
  }

  pydet_xla_call *call_;
  bool gpu_, ours_ = false;
  pydet_device device_;
  char problem_[512] = "", kernel_[64];
};

int64_t elements(const pydet_xla_buffer &buffer) {
  int64_t count = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) count *= buffer.dims[i];
  return count;
}

// What is continued from is the result's own buffer.
void expect_in_place(Call &call, const pydet_xla_buffer &argument, const pydet_xla_buffer &result) {
  if (argument.data != result.data && elements(result))
    call.fail("XLA gave what is continued from and the result different memory");
}

// C order.
void lay_out(Shape *shape, int rank) {
  int64_t stride = 1;
  for (int i = rank - 1; i >= 0; --i) {
    shape->strides[i] = stride;
    stride *= shape->dims[i];
  }
}

pydet_tensor matrix(Call &call, const pydet_xla_buffer &buffer, bool transposed, Shape *shape) {
  const int rank = int(buffer.rank);
  if (rank < 2 || rank > kMaxRank) {
    call.fail("gemm: want matrices, with at most 6 leading dimensions");
    return {};
  }
  std::memcpy(shape->dims, buffer.dims, size_t(rank) * sizeof *buffer.dims);
  lay_out(shape, rank);
  if (transposed) {
    for (int64_t *values : {shape->dims, shape->strides}) {
      const int64_t last = values[rank - 1];
      values[rank - 1] = values[rank - 2];
      values[rank - 2] = last;
    }
  }
  return call.tensor(buffer, shape, rank);
}

// A bias as it broadcasts against out: [N] where it has no more, else out's shape with steps of 0.
pydet_tensor bias_of(Call &call, const pydet_xla_buffer &bias, const pydet_xla_buffer &out, Shape *shape) {
  const int rank = int(out.rank), missing = rank - int(bias.rank);
  if (missing < 0 || bias.rank < 1) {
    call.fail("gemm: bias has more dimensions than the result, or none");
    return {};
  }
  Shape own = {};
  std::memcpy(own.dims, bias.dims, size_t(bias.rank) * sizeof *bias.dims);
  lay_out(&own, int(bias.rank));
  for (int i = 0; i < rank; ++i) {
    const int64_t extent = i < missing ? 1 : own.dims[i - missing];
    if (extent != out.dims[i] && extent != 1) call.fail("gemm: bias does not broadcast to the result");
    shape->dims[i] = out.dims[i];
    shape->strides[i] = extent == 1 ? 0 : own.strides[i - missing];
  }
  if (elements(bias) != out.dims[rank - 1]) return call.tensor(bias, shape, rank);
  shape->dims[0] = out.dims[rank - 1];
  shape->strides[0] = 1;
  return call.tensor(bias, shape, 1);
}

// The weights of a skinny product as its function takes them: a matrix. False for a batch of them.
bool as_one_matrix(pydet_tensor *w) {
  for (int i = 0; i + 2 < w->ndim; ++i)
    if (w->shape[i] != 1) return false;
  w->shape += w->ndim - 2;
  w->strides += w->ndim - 2;
  w->ndim = 2;
  return true;
}

void gemm(Call &call) {
  const bool has_bias = call.integer("has_bias"), accumulate = call.integer("accumulate");
  const bool transpose_a = call.integer("transpose_a"), transpose_b = call.integer("transpose_b");
  const bool skinny = call.integer("skinny");
  Shape shapes[4];
  const pydet_xla_buffer &result = call.result(0);
  const pydet_tensor a = matrix(call, call.argument(0), transpose_a, &shapes[0]);
  const pydet_tensor b = matrix(call, call.argument(1), transpose_b, &shapes[1]);
  const pydet_tensor out = matrix(call, result, false, &shapes[2]);
  pydet_tensor bias = {};
  if (has_bias && !call.failed()) bias = bias_of(call, call.argument(2), result, &shapes[3]);
  if (accumulate) expect_in_place(call, call.argument(2 + has_bias), result);
  pydet_skinny_gemm_options options = {};
  options.struct_size = sizeof options;
  options.arithmetic = int32_t(call.integer("arithmetic"));
  options.k_chunk = call.integer("k_chunk");
  options.accumulate = accumulate;
  options.mode = int32_t(call.integer("mode"));
  options.weights_constant = int32_t(call.integer("weights_constant"));
  options.kernel = call.kernel();
  if (skinny && (transpose_a || !transpose_b)) call.fail("skinny_gemm: want a and b^T as they lie");
  void *stream = call.stream();
  if (call.failed()) return;
  const pydet_tensor *given_bias = has_bias ? &bias : nullptr;
  if (skinny) {
    Shape shape;
    pydet_tensor w = matrix(call, call.argument(1), false, &shape);
    if (as_one_matrix(&w)) return call.check(pydet_skinny_gemm(stream, &a, &w, given_bias, &out, &options));
  }
  pydet_gemm_options plain = {};
  plain.struct_size = sizeof plain;
  plain.arithmetic = options.arithmetic;
  plain.k_chunk = options.k_chunk;
  plain.accumulate = options.accumulate;
  plain.kernel = options.kernel;
  call.check(pydet_gemm(stream, &a, &b, given_bias, &out, &plain));
}

// Products of groups of tokens, whose ends are on the device.
void grouped_gemm(Call &call) {
  const bool depth = call.integer("depth"), transpose_b = call.integer("transpose_b");
  Shape shapes[4];
  const pydet_xla_buffer &ends = call.argument(2), &result = call.result(0);
  const pydet_tensor a = matrix(call, call.argument(0), depth, &shapes[0]);
  const pydet_tensor b = matrix(call, call.argument(1), transpose_b, &shapes[1]);
  const pydet_tensor out = matrix(call, result, false, &shapes[2]);
  shapes[3] = {{elements(ends)}, {1}};
  pydet_tensor group_end = call.tensor(ends, &shapes[3], 1);
  if (ends.dtype == PYDET_XLA_S32) group_end.dtype = {PYDET_INT, 32, 1};
  expect_in_place(call, call.argument(3), result);
  pydet_grouped_gemm_options options = {};
  options.struct_size = sizeof options;
  options.arithmetic = int32_t(call.integer("arithmetic"));
  options.k_chunk = call.integer("k_chunk");
  options.kernel = call.kernel();
  void *stream = call.stream();
  if (call.failed()) return;
  call.check(pydet_grouped_gemm(stream, &a, &b, nullptr, nullptr, &group_end, &out, &options));
}

// Rows of N elements that come in groups, each with a weight of its own, or all with one.
struct Groups {
  int64_t n, groups, rows;  // rows of a group

  // The tensor of group g of a buffer of rows (or of one value a row): the whole of it where it has just one group.
  pydet_tensor rows_of(Call &call, const pydet_xla_buffer &buffer, int64_t g, bool values, Shape *shape) const {
    const int64_t each = values ? rows : rows * n;
    if (elements(buffer) != each && elements(buffer) != each * groups) {
      call.fail("rmsnorm: an operand does not fit the others");
      return {};
    }
    *shape = {{rows, n}, {n, 1}};
    if (values) shape->strides[0] = 1;
    return call.tensor(buffer, shape, values ? 1 : 2, elements(buffer) == each ? 0 : g * each);
  }
  pydet_tensor weight_of(Call &call, const pydet_xla_buffer &buffer, int64_t g, Shape *shape) const {
    if (elements(buffer) != n && elements(buffer) != n * groups) call.fail("rmsnorm: weight does not fit the rows");
    *shape = {{n}, {1}};
    return call.tensor(buffer, shape, 1, elements(buffer) == n ? 0 : g * n);
  }
};

// What a result of rows has, against the smallest of `count` arguments of rows, and `weights` elements of weights.
Groups groups_of(Call &call, const pydet_xla_buffer &result, const pydet_xla_buffer *const *operands, int count,
                 int64_t weights) {
  if (result.rank < 1 || elements(result) == 0) return {result.rank ? result.dims[result.rank - 1] : 0, 0, 0};
  const int64_t n = result.dims[result.rank - 1];
  int64_t least = elements(result);
  for (int i = 0; i < count; ++i) least = elements(*operands[i]) < least ? elements(*operands[i]) : least;
  int64_t groups = least ? elements(result) / least : 1;
  if (weights / n > groups) groups = weights / n;
  if (elements(result) % (groups * n)) call.fail("rmsnorm: the operands do not fit each other");
  return {n, groups, elements(result) / (groups * n)};
}

void rmsnorm(Call &call) {
  const bool has_residual = call.integer("has_residual"), has_weight = call.integer("has_weight");
  pydet_rmsnorm_options options = {};
  options.struct_size = sizeof options;
  options.eps = float(call.real("eps"));
  options.weight_offset = float(call.real("weight_offset"));
  options.kernel = call.kernel();
  const pydet_xla_buffer *rows[] = {&call.argument(0), has_residual ? &call.argument(1) : &call.argument(0)};
  const pydet_xla_buffer *weight = has_weight ? &call.argument(1 + has_residual) : nullptr;
  const pydet_xla_buffer &y = call.result(0), &rstd = call.result(1);
  void *stream = call.stream();
  if (call.failed()) return;
  const Groups all = groups_of(call, y, rows, 2, weight ? elements(*weight) : 0);
  for (int64_t g = 0; g < all.groups && !call.failed(); ++g) {
    Shape s[6];
    const pydet_tensor x_part = all.rows_of(call, *rows[0], g, false, &s[0]),
                       y_part = all.rows_of(call, y, g, false, &s[1]),
                       rstd_part = all.rows_of(call, rstd, g, true, &s[2]);
    pydet_tensor residual = {}, sum = {}, w = {};
    if (has_residual) {
      residual = all.rows_of(call, *rows[1], g, false, &s[3]);
      sum = all.rows_of(call, call.result(2), g, false, &s[4]);
    }
    if (weight) w = all.weight_of(call, *weight, g, &s[5]);
    if (call.failed()) return;
    call.check(pydet_rmsnorm(stream, &x_part, has_residual ? &residual : nullptr, weight ? &w : nullptr, &y_part,
                             &rstd_part, has_residual ? &sum : nullptr, &options));
  }
}

void rmsnorm_backward(Call &call) {
  const bool has_weight = call.integer("has_weight"), has_dresidual = call.integer("has_dresidual");
  const bool accumulate = call.integer("accumulate");
  pydet_rmsnorm_backward_options options = {};
  options.struct_size = sizeof options;
  options.weight_offset = float(call.real("weight_offset"));
  options.accumulate = accumulate;
  options.kernel = call.kernel();
  const pydet_xla_buffer *rows[] = {&call.argument(0), &call.argument(1),
                                    has_dresidual ? &call.argument(3 + has_weight) : &call.argument(0)};
  const pydet_xla_buffer &rstd = call.argument(2), &dx = call.result(0);
  const pydet_xla_buffer *weight = has_weight ? &call.argument(3) : nullptr;
  const pydet_xla_buffer *dweight = has_weight ? &call.result(1) : nullptr;
  if (has_weight) {
    options.workspace = call.result(2).data;
    options.workspace_size = uint64_t(elements(call.result(2)));
  }
  if (accumulate) expect_in_place(call, call.argument(3 + has_weight + has_dresidual), call.result(1));
  void *stream = call.stream();
  if (call.failed()) return;
  const Groups all = groups_of(call, dx, rows, 3, dweight ? elements(*dweight) : 0);
  for (int64_t g = 0; g < all.groups && !call.failed(); ++g) {
    Shape s[7];
    const pydet_tensor dy_part = all.rows_of(call, *rows[0], g, false, &s[0]),
                       x_part = all.rows_of(call, *rows[1], g, false, &s[1]),
                       rstd_part = all.rows_of(call, rstd, g, true, &s[2]),
                       dx_part = all.rows_of(call, dx, g, false, &s[3]);
    pydet_tensor dresidual = {}, w = {}, dw = {};
    if (has_dresidual) dresidual = all.rows_of(call, *rows[2], g, false, &s[4]);
    if (has_weight) {
      w = all.weight_of(call, *weight, g, &s[5]);
      dw = all.weight_of(call, *dweight, g, &s[6]);
    }
    if (call.failed()) return;
    call.check(pydet_rmsnorm_backward(stream, &dy_part, &x_part, has_weight ? &w : nullptr, &rstd_part,
                                      has_dresidual ? &dresidual : nullptr, &dx_part, has_weight ? &dw : nullptr,
                                      &options));
  }
}

pydet_xla_error *handle(pydet_xla_call *call, bool gpu, void (*operation)(Call &)) {
  for (pydet_xla_extension *e = call->extensions; e; e = e->next) {
    if (e->type != PYDET_XLA_METADATA) continue;
    pydet_xla_metadata *metadata = reinterpret_cast<pydet_xla_metadata_extension *>(e)->metadata;
    metadata->version.major = 0;
    metadata->version.minor = 1;  // what is used here has been there since
    metadata->traits = 1;         // nothing but launches on the stream: these may be captured
    return nullptr;
  }
  if (call->stage != PYDET_XLA_EXECUTE) return nullptr;
  Call described(call, gpu);
  operation(described);
  return described.finish();
}

}  // namespace

pydet_xla_error *pydet_xla_cpu_gemm(pydet_xla_call *call) { return handle(call, false, gemm); }
pydet_xla_error *pydet_xla_cpu_grouped_gemm(pydet_xla_call *call) { return handle(call, false, grouped_gemm); }
pydet_xla_error *pydet_xla_cpu_rmsnorm(pydet_xla_call *call) { return handle(call, false, rmsnorm); }
pydet_xla_error *pydet_xla_cpu_rmsnorm_backward(pydet_xla_call *call) { return handle(call, false, rmsnorm_backward); }
pydet_xla_error *pydet_xla_gpu_gemm(pydet_xla_call *call) { return handle(call, true, gemm); }
pydet_xla_error *pydet_xla_gpu_grouped_gemm(pydet_xla_call *call) { return handle(call, true, grouped_gemm); }
pydet_xla_error *pydet_xla_gpu_rmsnorm(pydet_xla_call *call) { return handle(call, true, rmsnorm); }
pydet_xla_error *pydet_xla_gpu_rmsnorm_backward(pydet_xla_call *call) { return handle(call, true, rmsnorm_backward); }
