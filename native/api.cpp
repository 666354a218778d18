// The C ABI: each call is check -> choose -> launch.

#include <initializer_list>

#include "check/check_grouped.h"
#include "check/check_scaled.h"
#include "check/fold.h"
#include "check/norm.h"
#include "check/reason.h"
#include "check/softmax.h"
#include "cpu/pool.h"

namespace pydet {
namespace {

thread_local const char *last_kernel = "";

// "fp32 bf16 fp16" for each set of types.
struct TypeLists {
  char text[1 << kTypeCount][8 * kTypeCount];
};
constexpr TypeLists type_lists() {
  TypeLists lists = {};
  for (uint32_t types = 0; types < 1u << kTypeCount; ++types) {
    int used = 0;
    for (const TypeRow &row : kTypes) {
      if (!(types & bit(row.type))) continue;
      if (used) lists.text[types][used++] = ' ';
      for (const char *c = row.brief; *c; ++c) lists.text[types][used++] = *c;
    }
  }
  return lists;
}
constexpr TypeLists kTypeLists = type_lists();

// ---- Choose ------------------------------------------------------------------------------------------------------

const char *operation_of(const Gemm &) { return "gemm"; }
const char *operation_of(const ScaledGemm &) { return "scaled_gemm"; }
const char *operation_of(const Quantize &) { return "quantize"; }
const char *operation_of(const RmsNorm &) { return "rmsnorm"; }
const char *operation_of(const RmsNormBackward &) { return "rmsnorm_backward"; }
const char *operation_of(const Softmax &) { return "softmax"; }
const char *operation_of(const SoftmaxBackward &) { return "softmax_backward"; }
const char *operation_of(const GroupedGemm &) { return "grouped_gemm"; }
const char *operation_of(const Fold &) { return "fold"; }
const char *operation_of(const LayerNorm &) { return "layernorm"; }
const char *operation_of(const LayerNormBackward &) { return "layernorm_backward"; }

const Table<Gemm> &table_of(const Backend &backend, const Gemm &) { return backend.gemm; }
const Table<ScaledGemm> &table_of(const Backend &backend, const ScaledGemm &) { return backend.scaled_gemm; }
const Table<Quantize> &table_of(const Backend &backend, const Quantize &) { return backend.quantize; }
const Table<RmsNorm> &table_of(const Backend &backend, const RmsNorm &) { return backend.rmsnorm; }
const Table<RmsNormBackward> &table_of(const Backend &backend, const RmsNormBackward &) {
  return backend.rmsnorm_backward;
}
const Table<Softmax> &table_of(const Backend &backend, const Softmax &) { return backend.softmax; }
const Table<SoftmaxBackward> &table_of(const Backend &backend, const SoftmaxBackward &) {
  return backend.softmax_backward;
}
const Table<GroupedGemm> &table_of(const Backend &backend, const GroupedGemm &) { return backend.grouped_gemm; }
const Table<Fold> &table_of(const Backend &backend, const Fold &) { return backend.fold; }
const Table<LayerNorm> &table_of(const Backend &backend, const LayerNorm &) { return backend.layernorm; }
const Table<LayerNormBackward> &table_of(const Backend &backend, const LayerNormBackward &) {
  return backend.layernorm_backward;
}

Type input_type(const Gemm &problem) { return problem.a.type; }
Type input_type(const ScaledGemm &problem) { return problem.a.type; }
Type input_type(const Quantize &problem) { return problem.x.type; }
Type input_type(const RmsNorm &problem) { return problem.x.type; }
Type input_type(const RmsNormBackward &problem) { return problem.x.type; }
Type input_type(const Softmax &problem) { return problem.x.type; }
Type input_type(const SoftmaxBackward &problem) { return problem.dy.type; }
Type input_type(const GroupedGemm &problem) { return problem.a.type; }
Type input_type(const Fold &) { return Type::f32; }
Type input_type(const LayerNorm &problem) { return problem.x.type; }
Type input_type(const LayerNormBackward &problem) { return problem.x.type; }

Arithmetic arithmetic_of(const Gemm &problem) { return problem.arithmetic; }
Arithmetic arithmetic_of(const ScaledGemm &problem) { return problem.arithmetic; }
Arithmetic arithmetic_of(const Quantize &) { return Arithmetic::ieee; }
Arithmetic arithmetic_of(const RmsNorm &) { return Arithmetic::ieee; }
Arithmetic arithmetic_of(const RmsNormBackward &) { return Arithmetic::ieee; }
Arithmetic arithmetic_of(const Softmax &) { return Arithmetic::ieee; }
Arithmetic arithmetic_of(const SoftmaxBackward &) { return Arithmetic::ieee; }
Arithmetic arithmetic_of(const GroupedGemm &problem) { return problem.arithmetic; }
Arithmetic arithmetic_of(const Fold &) { return Arithmetic::ieee; }
Arithmetic arithmetic_of(const LayerNorm &) { return Arithmetic::ieee; }
Arithmetic arithmetic_of(const LayerNormBackward &) { return Arithmetic::ieee; }

bool equal(const char *x, const char *y) { return strcmp(x, y) == 0; }

// Calls f(backend, table, row) for every row of every table, in the order of pydet_kernel_name.
template <class F> void each_kernel(F f) {
  const Backend *backends[] = {&cpu_backend(), gpu_backend()};
  for (const Backend *backend : backends) {
    if (!backend) continue;
    for (int i = 0; i < backend->gemm.count; ++i) f(*backend, "gemm", backend->gemm.rows[i]);
    for (int i = 0; i < backend->scaled_gemm.count; ++i) f(*backend, "scaled_gemm", backend->scaled_gemm.rows[i]);
    for (int i = 0; i < backend->quantize.count; ++i) f(*backend, "quantize", backend->quantize.rows[i]);
    for (int i = 0; i < backend->rmsnorm.count; ++i) f(*backend, "rmsnorm", backend->rmsnorm.rows[i]);
    for (int i = 0; i < backend->rmsnorm_backward.count; ++i)
      f(*backend, "rmsnorm_backward", backend->rmsnorm_backward.rows[i]);
    for (int i = 0; i < backend->softmax.count; ++i) f(*backend, "softmax", backend->softmax.rows[i]);
    for (int i = 0; i < backend->softmax_backward.count; ++i)
      f(*backend, "softmax_backward", backend->softmax_backward.rows[i]);
    for (int i = 0; i < backend->grouped_gemm.count; ++i) f(*backend, "grouped_gemm", backend->grouped_gemm.rows[i]);
    for (int i = 0; i < backend->fold.count; ++i) f(*backend, "fold", backend->fold.rows[i]);
    for (int i = 0; i < backend->layernorm.count; ++i) f(*backend, "layernorm", backend->layernorm.rows[i]);
    for (int i = 0; i < backend->layernorm_backward.count; ++i)
      f(*backend, "layernorm_backward", backend->layernorm_backward.rows[i]);
  }
}

bool kernel_exists(const char *name) {
  bool found = false;
  each_kernel([&](const Backend &, const char *, const auto &row) { found |= equal(row.name, name); });
  return found;
}

// "k_chunk, a batch", of a set of features.
Text feature_list(uint32_t features) {
  Text out = {"more than any release has"};  // where no feature has a name
  size_t used = 0;
  for (const FeatureRow &row : kFeatures)
    if (features & row.feature && used < sizeof out.text)
      used += size_t(snprintf(out.text + used, sizeof out.text - used, "%s%s", used ? ", " : "", row.name));
  return out;
}

// Whether a row is for the problem's types and arithmetic, on this machine. Of what else it needs the features decide,
// and of its shape and layout `takes`.
template <class Problem> bool computes(const Kernel<Problem> &row, const Problem &problem) {
  return (row.types & bit(input_type(problem))) && row.arithmetic == arithmetic_of(problem);
}
template <class Problem> bool is_for(const Kernel<Problem> &row, const Problem &problem) {
  return computes(row, problem) && row.runs_on(problem.device);
}

// Why no row of the table takes the problem, and what this build has instead.
template <class Problem>
pydet_status refuse(const char *op, const Problem &problem, const Backend &backend, const Table<Problem> &table) {
  int32_t devices = 0;
  PYDET_TRY(backend.device_count(&devices));
  if (problem.device.id < 0 || problem.device.id >= devices)
    return fail(PYDET_NO_DEVICE, "%s: the tensors are on %s, and there are %d of them", op,
                device_text(problem.device.type, problem.device.id).text, int(devices));
  if (arithmetic_of(problem) == Arithmetic::automatic)
    return fail(PYDET_DEVICE_ERROR, "%s: %s does not say what it is, so arithmetic auto cannot be resolved", op,
                device_text(problem.device.type, problem.device.id).text);
  uint32_t lacking = problem.needs();  // of every row that would do else
  bool near = false;
  for (int i = 0; i < table.count; ++i) {
    if (!is_for(table.rows[i], problem)) continue;
    near = true;
    lacking &= ~table.rows[i].features;
  }
  if (near)
    return fail(PYDET_UNSUPPORTED, "%s: no kernel for arithmetic %s on %s inputs on %s takes %s", op,
                arithmetic_name(arithmetic_of(problem)), type_name(input_type(problem)),
                device_text(problem.device.type, problem.device.id).text,
                lacking ? feature_list(lacking).text : "this problem");
  Text have = {""};
  size_t used = 0;
  bool runs = false;
  for (int i = 0; i < table.count; ++i) {
    const Kernel<Problem> &row = table.rows[i];
    const bool row_runs = row.runs_on(problem.device);
    runs |= row_runs;
    if (!(row.types & bit(input_type(problem))) || !row_runs) continue;
    const char *name = arithmetic_name(row.arithmetic);
    if (strstr(have.text, name)) continue;
    used += size_t(snprintf(have.text + used, sizeof have.text - used, "%s%s", used ? ", " : "", name));
    if (used >= sizeof have.text) break;
  }
  if (pydet_device_info info = {}; !runs && backend.built_for) {
    PYDET_TRY(backend.query_device(problem.device.id, &info));
    return fail(PYDET_UNSUPPORTED, "%s: %s is a %s, and this library was built with %s, which does not name it", op,
                device_text(problem.device.type, problem.device.id).text, info.arch, backend.built_for);
  }
  return fail(PYDET_UNSUPPORTED, "%s: no kernel for arithmetic %s on %s inputs on %s; it has %s", op,
              arithmetic_name(arithmetic_of(problem)), type_name(input_type(problem)),
              device_text(problem.device.type, problem.device.id).text, used ? have.text : "none for these inputs");
}

// Refuses memory that the device cannot reach, which would break it for the whole process.
template <class... Data>
pydet_status check_reach(const char *op, const Backend &backend, const Device &device, const Data *...data) {
  if (!backend.reaches) return PYDET_OK;
  for (const void *at : {static_cast<const void *>(data)...})
    if (at && !backend.reaches(device.id, at))
      return fail(PYDET_INVALID_DEVICE, "%s: the data at %p lie on the host, and the tensors are said to be on %s", op,
                  at, device_text(device.type, device.id).text);
  return PYDET_OK;
}
pydet_status check_reach(const char *op, const Backend &backend, const Gemm &g) {
  return check_reach(op, backend, g.device, g.a.data, g.b.data, g.bias.data, g.out.data);
}
pydet_status check_reach(const char *op, const Backend &backend, const ScaledGemm &g) {
  return check_reach(op, backend, g.device, g.a.data, g.a_scale.data, g.b.data, g.b_scale.data, g.bias.data,
                     g.out.data);
}
pydet_status check_reach(const char *op, const Backend &backend, const Quantize &q) {
  return check_reach(op, backend, q.device, q.x.data, q.out.data, q.scale.data, q.transposed.data,
                     q.transposed_scale.data);
}
pydet_status check_reach(const char *op, const Backend &backend, const RmsNorm &n) {
  return check_reach(op, backend, n.device, n.x.data, n.residual.data, n.y.data, n.sum.data, n.weight.data,
                     n.rstd.data);
}
pydet_status check_reach(const char *op, const Backend &backend, const RmsNormBackward &n) {
  return check_reach(op, backend, n.device, n.dy.data, n.x.data, n.dresidual.data, n.dx.data, n.weight.data,
                     n.rstd.data, n.dweight.data);
}
pydet_status check_reach(const char *op, const Backend &backend, const Softmax &s) {
  return check_reach(op, backend, s.device, s.x.data, s.y.data, static_cast<const char *>(s.index.data),
                     s.log_prob.data, s.dlog_prob.data);
}
pydet_status check_reach(const char *op, const Backend &backend, const SoftmaxBackward &s) {
  return check_reach(op, backend, s.device, s.dy.data, s.y.data, s.dx.data);
}
pydet_status check_reach(const char *op, const Backend &backend, const GroupedGemm &g) {
  return check_reach(op, backend, g.device, g.a.data, g.b.data, g.bias.data, g.out.data,
                     reinterpret_cast<const char *>(g.start), reinterpret_cast<const char *>(g.end));
}
pydet_status check_reach(const char *op, const Backend &backend, const Fold &f) {
  for (int i = 0; i < f.count; ++i) PYDET_TRY(check_reach(op, backend, f.device, f.parts[i]));
  if (f.peers.ranks) PYDET_TRY(check_reach(op, backend, f.device, f.peers.memory[f.peers.rank]));
  return check_reach(op, backend, f.device, f.bias.data, f.out.data);
}
pydet_status check_reach(const char *op, const Backend &backend, const LayerNorm &n) {
  return check_reach(op, backend, n.device, n.x.data, n.residual.data, n.y.data, n.sum.data, n.weight.data, n.bias.data,
                     n.mean.data, n.rstd.data);
}
pydet_status check_reach(const char *op, const Backend &backend, const LayerNormBackward &n) {
  return check_reach(op, backend, n.device, n.dy.data, n.x.data, n.dresidual.data, n.dx.data, n.weight.data,
                     n.mean.data, n.rstd.data, n.dweight.data, n.dbias.data);
}

// The row of that name, if it takes the problem.
template <class Problem>
pydet_status choose_by_name(const char *op, const Table<Problem> &table, const Problem &problem, const char *name,
                            const Kernel<Problem> **chosen) {
  for (int i = 0; i < table.count; ++i) {
    const Kernel<Problem> &row = table.rows[i];
    if (!equal(row.name, name)) continue;
    const bool meant = is_for(row, problem);
    const uint32_t lacking = problem.needs() & ~row.features;
    if (meant && lacking)
      return fail(PYDET_UNSUPPORTED, "%s: kernel %s does not take this problem, which needs %s", op, name,
                  feature_list(lacking).text);
    if (!meant || (row.takes && !row.takes(problem)))
      return refuse_row(op, row, problem, input_type(problem), arithmetic_of(problem));
    *chosen = &row;
    return PYDET_OK;
  }
  if (kernel_exists(name))
    return fail(PYDET_UNSUPPORTED, "%s: kernel %s is not a %s kernel for %s", op, name, operation_of(problem),
                device_text(problem.device.type, problem.device.id).text);
  return fail(PYDET_INVALID_VALUE,
              "%s: no kernel is named %s (pydet.kernels() in Python and pydet_kernel_name in C list them)", op, name);
}

// The first row that takes the problem and is worth it. Neighbours often ask the same of the machine, or which of them is
// the best: each question is asked once. NULL: there is none.
template <class Problem> const Kernel<Problem> *choose(const Table<Problem> &table, const Problem &problem) {
  const uint32_t needs = problem.needs();
  bool (*machine)(const Device &) = nullptr;
  int (*family)(const Problem &) = nullptr;
  bool runs = false;
  int best = 0;
  for (int i = 0; i < table.count; ++i) {
    const Kernel<Problem> &row = table.rows[i];
    if (!computes(row, problem) || (needs & ~row.features)) continue;
    if (row.runs_on != machine) machine = row.runs_on, runs = machine(problem.device);
    if (!runs) continue;
    if (row.best && row.best != family) family = row.best, best = family(problem);
    if (row.best && best != row.variant) continue;
    if ((row.takes && !row.takes(problem)) || (row.prefers && !row.prefers(problem))) continue;
    return &row;
  }
  return nullptr;
}

template <class Problem> pydet_status launch(const char *op, const Problem &problem, const char *forced) {
  const Backend &backend = *backend_for(problem.device.type);
  const Table<Problem> &table = table_of(backend, problem);
  const Kernel<Problem> *row = forced ? nullptr : choose(table, problem);
  if (forced) PYDET_TRY(choose_by_name(op, table, problem, forced, &row));
  if (!row) return refuse(op, problem, backend, table);
  PYDET_TRY(check_reach(op, backend, problem));
  PYDET_TRY(row->launch(problem));
  last_kernel = row->name;
  return PYDET_OK;
}

pydet_status nothing_to_write() {
  last_kernel = "";
  return PYDET_OK;
}

// ---- GEMM --------------------------------------------------------------------------------------------------------

constexpr GemmWords kGemm = {"gemm", "a", "b", "out", "M", "N", "K", false, false};
constexpr GemmWords kGemmDa = {"gemm_da", "dc", "b", "da", "M", "K", "N", false, true};
constexpr GemmWords kGemmDb = {"gemm_db", "a", "dc", "db", "K", "N", "M", true, false};
constexpr GemmWords kSkinnyGemm = {"skinny_gemm", "x", "w", "y", "M", "N", "K", false, true};

pydet_status finish_gemm(const GemmWords &words, const Gemm &gemm, const char *kernel, const View *const *views,
                         int count) {
  for (int i = 0; i < count; ++i) PYDET_TRY(workspace_apart(*views[i], gemm.workspace, gemm.workspace_size));
  if (gemm.m == 0 || gemm.n == 0 || gemm.batch.count == 0) return nothing_to_write();
  return launch(words.op, gemm, kernel);
}

pydet_status run_gemm(const GemmWords &words, void *stream, const pydet_tensor *a_tensor, const pydet_tensor *b_tensor,
                      const pydet_tensor *bias_tensor, const pydet_tensor *out_tensor,
                      const pydet_gemm_options *given) {
  pydet_gemm_options options = {};
  options.struct_size = sizeof options;
  PYDET_TRY(read_options(words.op, given, &options));
  View a, b, bias, out;
  PYDET_TRY(read(words.op, words.a, kFactor, a_tensor, 2, &a));
  PYDET_TRY(read(words.op, words.b, kFactor, b_tensor, 2, &b));
  PYDET_TRY(read_optional(words.op, "bias", kAddend, bias_tensor, 1, &bias));
  PYDET_TRY(read(words.op, words.out, kResult, out_tensor, 2, &out));
  Gemm gemm = {};
  gemm.stream = stream;
  PYDET_TRY(
      gemm_of(words, words.a_transposed ? transposed(a) : a, words.b_transposed ? transposed(b) : b, bias, out, &gemm));
  PYDET_TRY(apply_gemm_options(words, options, out, &gemm));
  const View *views[] = {&a, &b, &bias, &out};
  return finish_gemm(words, gemm, options.kernel, views, 4);
}

// x [..., K] as a matrix [..., M, K]: M is the last leading dimension after merging, so that a call on [tokens, K], or on
// [batch, tokens, K] without gaps, is one matrix. The merge must hold for y and for a bias shaped like it.
void merge_rows(View *const *views, int count) {
  for (int t = 0; t < count; ++t)
    if (views[t]->ndim == 1) {  // one row
      views[t]->ndim = 2;
      views[t]->shape[1] = views[t]->shape[0];
      views[t]->stride[1] = views[t]->stride[0];
      views[t]->shape[0] = 1;
      views[t]->stride[0] = 0;
    }
  while (views[0]->ndim > 2) {
    int r = views[0]->ndim - 2;  // merge dimension r into r - 1
    for (int t = 0; t < count; ++t) {
      const View &v = *views[t];
      bool merges = v.shape[r] == 1 || v.shape[r - 1] == 1 || v.stride[r - 1] == v.stride[r] * v.shape[r];
      if (!merges) return;
    }
    for (int t = 0; t < count; ++t) {
      View &v = *views[t];
      v.stride[r - 1] = v.shape[r] == 1 ? v.stride[r - 1] : v.stride[r];
      v.shape[r - 1] *= v.shape[r];
      v.shape[r] = v.shape[r + 1];
      v.stride[r] = v.stride[r + 1];
      --v.ndim;
    }
  }
}

pydet_status check_skinny_options(const char *op, const pydet_skinny_gemm_options &options) {
  if (options.mode != PYDET_DETERMINISTIC && options.mode != PYDET_FAST)
    return fail(PYDET_INVALID_VALUE, "%s: options.mode is %d, want 0 (deterministic) or 1 (fast)", op,
                int(options.mode));
  return check_flag(op, "weights_constant", options.weights_constant);
}

pydet_status run_skinny_gemm(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *w_tensor,
                             const pydet_tensor *bias_tensor, const pydet_tensor *y_tensor,
                             const pydet_skinny_gemm_options *given) {
  const GemmWords &words = kSkinnyGemm;
  pydet_skinny_gemm_options options = {};
  options.struct_size = sizeof options;
  PYDET_TRY(read_options(words.op, given, &options));
  View x, w, bias, y;
  PYDET_TRY(read(words.op, "x", kFactor, x_tensor, 1, &x));
  PYDET_TRY(read(words.op, "w", kFactor, w_tensor, 2, &w));
  PYDET_TRY(read_optional(words.op, "bias", kAddend, bias_tensor, 1, &bias));
  PYDET_TRY(read(words.op, "y", kResult, y_tensor, 1, &y));
  if (w.ndim != 2) return fail(PYDET_INVALID_SHAPE, "%s: w is %s, want NxK", words.op, shape_text(w).text);
  int64_t wanted[kMaxDims];
  for (int i = 0; i + 1 < x.ndim; ++i) wanted[i] = x.shape[i];
  wanted[x.ndim - 1] = w.rows();
  PYDET_TRY(want_shape(y, wanted, x.ndim));
  bool full_bias = bias.present() && bias.ndim > 1;
  if (full_bias) PYDET_TRY(want_shape(bias, wanted, x.ndim));
  if (bias.present() && !full_bias) PYDET_TRY(want_shape(bias, wanted + x.ndim - 1, 1));
  View *rows[] = {&x, &y, &bias};
  merge_rows(rows, full_bias ? 3 : 2);

  Gemm gemm = {};
  gemm.stream = stream;
  PYDET_TRY(gemm_of(words, x, transposed(w), bias, y, &gemm));
  PYDET_TRY(apply_gemm_options(words, options, y, &gemm));
  PYDET_TRY(check_skinny_options(words.op, options));
  gemm.skinny = true;
  gemm.fast = options.mode == PYDET_FAST;
  gemm.weights_constant = options.weights_constant != 0;
  const View *views[] = {&x, &w, &bias, &y};
  return finish_gemm(words, gemm, options.kernel, views, 4);
}

pydet_status check_extents(const char *op, int64_t batch, int64_t m, int64_t n, int64_t k, const uint64_t *bytes) {
  if (!bytes) return fail(PYDET_NULL_POINTER, "%s: bytes is NULL", op);
  if (batch < 0 || m < 0 || n < 0 || k < 0)
    return fail(PYDET_INVALID_SHAPE,
                "%s: an extent is negative (batch %" PRId64 ", M %" PRId64 ", N %" PRId64 ", K %" PRId64 ")", op, batch,
                m, n, k);
  return PYDET_OK;
}

pydet_status gemm_workspace(const char *op, int64_t batch, int64_t m, int64_t n, int64_t k, int64_t k_chunk,
                            uint64_t *bytes) {
  PYDET_TRY(check_extents(op, batch, m, n, k, bytes));
  PYDET_TRY(check_chunk(op, k_chunk, kChunkMultiple));
  *bytes = 0;  // no kernel of this release wants one
  return PYDET_OK;
}

// ---- RMSNorm -----------------------------------------------------------------------------------------------------

// What forward and backward share: where they run, the rows of x, and what goes with them.
template <class Norm>
Norm norm_of(void *stream, const View &x, const RowWalk &walk, const View &weight, const View &rstd) {
  Norm norm = {};
  norm.device = x.device;
  norm.stream = stream;
  norm.rows = walk.rows;
  norm.inner = walk.inner;
  norm.n = x.cols();
  norm.x = rows_of(x, walk, 0);
  norm.weight = vector_of(weight);
  norm.rstd = vector_of(rstd);
  return norm;
}

// For the chains of `sums` sums over rows.
pydet_status backward_workspace(const char *op, int64_t rows, int64_t n, int sums, uint64_t *bytes) {
  int64_t chains = rows / kDweightChainRows + (rows % kDweightChainRows != 0), size = 0;
  if (__builtin_mul_overflow(chains, n, &size) || __builtin_mul_overflow(size, sums * int64_t(sizeof(float)), &size))
    return fail(PYDET_OVERFLOW, "%s: workspace for %" PRId64 " rows of %" PRId64 " passes 2^63 - 1 bytes", op, rows, n);
  *bytes = uint64_t(size);
  return PYDET_OK;
}

pydet_status checked_backward_workspace(const char *op, int64_t rows, int64_t n, int sums, uint64_t *bytes) {
  if (!bytes) return fail(PYDET_NULL_POINTER, "%s: bytes is NULL", op);
  if (rows < 0 || n < 1)
    return fail(PYDET_INVALID_SHAPE, "%s: rows is %" PRId64 " and n %" PRId64 ", want 0 or more and 1 or more", op,
                rows, n);
  return backward_workspace(op, rows, n, sums, bytes);
}

// That a norm's gradient of x [rows, n] has the workspace for that many sums over rows, apart from its tensors.
template <class Options, size_t in, size_t out>
pydet_status check_backward_workspace(const char *op, const Options &options, int64_t rows, int64_t n, int sums,
                                      const View *const (&inputs)[in], const View *const (&outputs)[out]) {
  PYDET_TRY(check_workspace(op, options.workspace, options.workspace_size));
  uint64_t needed = 0;
  if (sums) PYDET_TRY(backward_workspace(op, rows, n, sums, &needed));
  if (options.workspace_size < needed)
    return fail(PYDET_WORKSPACE_TOO_SMALL, "%s: workspace is %" PRIu64 " bytes, want %" PRIu64 " (pydet_%s_workspace)",
                op, options.workspace_size, needed, op);
  for (const View *input : inputs) PYDET_TRY(workspace_apart(*input, options.workspace, options.workspace_size));
  for (const View *output : outputs) PYDET_TRY(workspace_apart(*output, options.workspace, options.workspace_size));
  return PYDET_OK;
}

}  // namespace
}  // namespace pydet

using namespace pydet;

const char *pydet_version(void) {
  static_assert(PYDET_VERSION_MAJOR == 0 && PYDET_VERSION_MINOR == 2 && PYDET_VERSION_PATCH == 0, "the text below");
  return "0.2.0";
}
int32_t pydet_abi(void) { return PYDET_ABI; }
int32_t pydet_numerics(void) { return PYDET_NUMERICS; }
const char *pydet_last_error(void) { return last_error; }
const char *pydet_last_kernel(void) { return last_kernel; }

const char *pydet_status_name(pydet_status status) {
  static const char *const names[] = {"PYDET_OK",
                                      "PYDET_INVALID_VALUE",
                                      "PYDET_INVALID_SHAPE",
                                      "PYDET_INVALID_DTYPE",
                                      "PYDET_INVALID_STRIDE",
                                      "PYDET_INVALID_DEVICE",
                                      "PYDET_NULL_POINTER",
                                      "PYDET_OVERLAP",
                                      "PYDET_OVERFLOW",
                                      "PYDET_MISALIGNED",
                                      "PYDET_WORKSPACE_TOO_SMALL",
                                      "PYDET_UNSUPPORTED",
                                      "PYDET_NO_DEVICE",
                                      "PYDET_DEVICE_ERROR"};
  constexpr int count = int(sizeof names / sizeof *names);
  static_assert(count == PYDET_DEVICE_ERROR + 1, "one name a status");
  return status >= 0 && status < count ? names[status] : "unknown status";
}

const char *pydet_arithmetic_name(int32_t arithmetic) {
  return arithmetic >= 0 && arithmetic < kArithmeticCount ? kArithmetics[arithmetic].name : nullptr;
}

pydet_status pydet_resolve_arithmetic(pydet_device device, pydet_dtype dtype, int32_t arithmetic, int32_t *resolved) {
  const char *op = "resolve_arithmetic";
  if (!resolved) return fail(PYDET_NULL_POINTER, "%s: resolved is NULL", op);
  Type type;
  if (!type_of(dtype, &type))
    return fail(PYDET_INVALID_DTYPE, "%s: dtype is %s, want %s", op, dtype_text(dtype).text,
                type_list(types_for(kFactor)).text);
  if (device.device_type == PYDET_CPU && device.device_id != 0)
    return fail(PYDET_NO_DEVICE, "%s: device is CPU %d, want CPU 0", op, int(device.device_id));
  Device normal = normalized(device);
  int32_t count = 0;
  PYDET_TRY(pydet_device_count(normal.type, &count));
  if (normal.id < 0 || normal.id >= count)
    return fail(PYDET_NO_DEVICE, "%s: device is %s, and there are %d of them", op,
                device_text(normal.type, normal.id).text, int(count));
  Arithmetic result = Arithmetic::automatic;
  PYDET_TRY(resolve(op, normal, type, arithmetic, &result));
  if (result == Arithmetic::automatic)
    return fail(PYDET_DEVICE_ERROR, "%s: %s does not say what it is", op, device_text(normal.type, normal.id).text);
  *resolved = int32_t(result);
  return PYDET_OK;
}

pydet_status pydet_gemm(void *stream, const pydet_tensor *a, const pydet_tensor *b, const pydet_tensor *bias,
                        const pydet_tensor *out, const pydet_gemm_options *options) {
  return run_gemm(kGemm, stream, a, b, bias, out, options);
}

pydet_status pydet_gemm_da(void *stream, const pydet_tensor *dc, const pydet_tensor *b, const pydet_tensor *da,
                           const pydet_gemm_options *options) {
  return run_gemm(kGemmDa, stream, dc, b, nullptr, da, options);
}

pydet_status pydet_gemm_db(void *stream, const pydet_tensor *a, const pydet_tensor *dc, const pydet_tensor *db,
                           const pydet_gemm_options *options) {
  return run_gemm(kGemmDb, stream, a, dc, nullptr, db, options);
}

pydet_status pydet_gemm_workspace(int64_t batch, int64_t m, int64_t n, int64_t k, const pydet_gemm_options *given,
                                  uint64_t *bytes) {
  pydet_gemm_options options = {};
  PYDET_TRY(read_options("gemm_workspace", given, &options));
  PYDET_TRY(check_arithmetic("gemm_workspace", options.arithmetic));
  PYDET_TRY(check_flag("gemm_workspace", "accumulate", options.accumulate));
  return gemm_workspace("gemm_workspace", batch, m, n, k, options.k_chunk, bytes);
}

pydet_status pydet_skinny_gemm(void *stream, const pydet_tensor *x, const pydet_tensor *w, const pydet_tensor *bias,
                               const pydet_tensor *y, const pydet_skinny_gemm_options *options) {
  return run_skinny_gemm(stream, x, w, bias, y, options);
}

pydet_status pydet_skinny_gemm_workspace(int64_t m, int64_t n, int64_t k, const pydet_skinny_gemm_options *given,
                                         uint64_t *bytes) {
  pydet_skinny_gemm_options options = {};
  const char *op = "skinny_gemm_workspace";
  PYDET_TRY(read_options(op, given, &options));
  PYDET_TRY(check_arithmetic(op, options.arithmetic));
  PYDET_TRY(check_flag(op, "accumulate", options.accumulate));
  PYDET_TRY(check_skinny_options(op, options));
  return gemm_workspace(op, 1, m, n, k, options.k_chunk, bytes);
}

pydet_status pydet_scaled_gemm(void *stream, const pydet_tensor *a_tensor, const pydet_tensor *a_scale_tensor,
                               const pydet_tensor *b_tensor, const pydet_tensor *b_scale_tensor,
                               const pydet_tensor *bias_tensor, const pydet_tensor *out_tensor,
                               const pydet_scaled_gemm_options *given) {
  const char *op = "scaled_gemm";
  pydet_scaled_gemm_options options = {};
  options.k_chunk = kScaleGroup;
  PYDET_TRY(read_options(op, given, &options));
  View a, a_scale, b, b_scale, bias, out;
  PYDET_TRY(read(op, "a", kScaledFactor, a_tensor, 2, &a));
  PYDET_TRY(read_optional(op, "a_scale", kScaling, a_scale_tensor, 0, &a_scale));
  PYDET_TRY(read(op, "b", kScaledFactor, b_tensor, 2, &b));
  PYDET_TRY(read_optional(op, "b_scale", kScaling, b_scale_tensor, 0, &b_scale));
  PYDET_TRY(read_optional(op, "bias", kAddend, bias_tensor, 1, &bias));
  PYDET_TRY(read(op, "out", kResult, out_tensor, 2, &out));
  ScaledGemm gemm = {};
  gemm.stream = stream;
  PYDET_TRY(scaled_gemm_of(a, a_scale, b, b_scale, bias, out, options, &gemm));
  if (out.empty()) return nothing_to_write();
  return launch(op, gemm, options.kernel);
}

pydet_status pydet_scaled_gemm_workspace(int64_t batch, int64_t m, int64_t n, int64_t k,
                                         const pydet_scaled_gemm_options *given, uint64_t *bytes) {
  const char *op = "scaled_gemm_workspace";
  pydet_scaled_gemm_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  PYDET_TRY(check_extents(op, batch, m, n, k, bytes));
  *bytes = 0;  // no kernel of this release needs any
  return PYDET_OK;
}

namespace {

// Apart from the call itself, so that the views are off the stack when a kernel runs; *work is false where there is none.
__attribute__((noinline)) pydet_status read_grouped_gemm(const pydet_tensor *a_tensor, const pydet_tensor *b_tensor,
                                                         const pydet_tensor *bias_tensor,
                                                         const pydet_tensor *group_start, const pydet_tensor *group_end,
                                                         const pydet_tensor *out_tensor,
                                                         const pydet_grouped_gemm_options &options,
                                                         GroupedGemm *problem, bool *work) {
  constexpr GemmWords kWords = {"grouped_gemm", "a", "b", "out", "M", "N", "K", false, false};
  const char *op = kWords.op;
  View a, b, bias, out;
  PYDET_TRY(read(op, "a", kFactor, a_tensor, 2, &a));
  PYDET_TRY(read(op, "b", kFactor, b_tensor, 2, &b));
  PYDET_TRY(layout_of(a, b, &problem->depth));
  PYDET_TRY(read_optional(op, "bias", kAddend, bias_tensor, 2, &bias));
  PYDET_TRY(read(op, "out", kResult, out_tensor, 2, &out));
  PYDET_TRY(grouped_gemm_of(a, b, bias, group_start, group_end, out, problem));
  PYDET_TRY(apply_gemm_options(kWords, options, out, problem));
  *work = !out.empty() && problem->groups != 0;
  return PYDET_OK;
}

}  // namespace

pydet_status pydet_grouped_gemm(void *stream, const pydet_tensor *a, const pydet_tensor *b, const pydet_tensor *bias,
                                const pydet_tensor *group_start, const pydet_tensor *group_end, const pydet_tensor *out,
                                const pydet_grouped_gemm_options *given) {
  const char *op = "grouped_gemm";
  pydet_grouped_gemm_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  GroupedGemm problem = {};
  bool work = false;
  problem.stream = stream;
  PYDET_TRY(read_grouped_gemm(a, b, bias, group_start, group_end, out, options, &problem, &work));
  return work ? launch(op, problem, options.kernel) : nothing_to_write();
}

pydet_status pydet_quantize(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *out_tensor,
                            const pydet_tensor *scale_tensor, const pydet_tensor *transposed_tensor,
                            const pydet_tensor *transposed_scale_tensor, const pydet_quantize_options *given) {
  const char *op = "quantize";
  pydet_quantize_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View x, out, scale, transposed, transposed_scale;
  PYDET_TRY(read(op, "x", kFactor, x_tensor, 2, &x));
  PYDET_TRY(read(op, "out", kScaledFactor, out_tensor, 2, &out));
  PYDET_TRY(read(op, "scale", kScaling, scale_tensor, 0, &scale));
  PYDET_TRY(read_optional(op, "transposed", kScaledFactor, transposed_tensor, 2, &transposed));
  PYDET_TRY(read_optional(op, "transposed_scale", kScaling, transposed_scale_tensor, 0, &transposed_scale));
  Quantize problem = {};
  problem.stream = stream;
  PYDET_TRY(quantize_of(x, out, scale, transposed, transposed_scale, options, &problem));
  if (x.empty()) return nothing_to_write();
  return launch(op, problem, options.kernel);
}

pydet_status pydet_rmsnorm(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *residual_tensor,
                           const pydet_tensor *weight_tensor, const pydet_tensor *y_tensor,
                           const pydet_tensor *rstd_tensor, const pydet_tensor *sum_tensor,
                           const pydet_rmsnorm_options *given) {
  const char *op = "rmsnorm";
  pydet_rmsnorm_options options = {};
  options.eps = 1e-6f;
  PYDET_TRY(read_options(op, given, &options));
  View x, residual, weight, y, rstd, sum;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read_optional(op, "residual", kNormRow, residual_tensor, 1, &residual));
  PYDET_TRY(read_optional(op, "weight", kNormVector, weight_tensor, 1, &weight));
  PYDET_TRY(read(op, "y", kNormRow, y_tensor, 1, &y));
  PYDET_TRY(read_optional(op, "rstd", kNormVector, rstd_tensor, 0, &rstd));
  PYDET_TRY(read_optional(op, "sum", kNormRow, sum_tensor, 1, &sum));
  PYDET_TRY(both_or_neither(op, residual, sum));
  PYDET_TRY(unit_last_stride(x));
  const View *like[] = {&residual, &y, &sum};
  PYDET_TRY(check_norm(x, like, 3, weight, rstd));
  PYDET_TRY(check_eps(op, options.eps));
  PYDET_TRY(check_weight_offset(op, options.weight_offset));
  const View *inputs[] = {&x, &residual, &weight}, *outputs[] = {&y, &sum, &rstd};
  PYDET_TRY(outputs_apart(inputs, outputs));
  RowWalk walk;
  const View *walked[] = {&x, &residual, &y, &sum};
  PYDET_TRY(walk_rows(walked, 4, &walk));
  if (walk.rows == 0) return nothing_to_write();
  auto norm = norm_of<RmsNorm>(stream, x, walk, weight, rstd);
  norm.residual = rows_of(residual, walk, 1);
  norm.y = rows_of(y, walk, 2);
  norm.sum = rows_of(sum, walk, 3);
  norm.eps = options.eps;
  norm.weight_offset = options.weight_offset;
  return launch(op, norm, options.kernel);
}

pydet_status pydet_rmsnorm_backward(void *stream, const pydet_tensor *dy_tensor, const pydet_tensor *x_tensor,
                                    const pydet_tensor *weight_tensor, const pydet_tensor *rstd_tensor,
                                    const pydet_tensor *dresidual_tensor, const pydet_tensor *dx_tensor,
                                    const pydet_tensor *dweight_tensor, const pydet_rmsnorm_backward_options *given) {
  const char *op = "rmsnorm_backward";
  pydet_rmsnorm_backward_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View dy, x, weight, rstd, dresidual, dx, dweight;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "dy", kNormRow, dy_tensor, 1, &dy));
  PYDET_TRY(read_optional(op, "weight", kNormVector, weight_tensor, 1, &weight));
  PYDET_TRY(read(op, "rstd", kNormVector, rstd_tensor, 0, &rstd));
  PYDET_TRY(read_optional(op, "dresidual", kNormRow, dresidual_tensor, 1, &dresidual));
  PYDET_TRY(read_optional(op, "dx", kNormRow, dx_tensor, 1, &dx));
  PYDET_TRY(read_optional(op, "dweight", kNormVector, dweight_tensor, 1, &dweight));
  if (!dx.present() && !dweight.present())
    return fail(PYDET_NULL_POINTER, "%s: dx and dweight are both NULL, want one of them", op);
  PYDET_TRY(unit_last_stride(x));
  const View *like[] = {&dy, &dresidual, &dx};
  PYDET_TRY(check_norm(x, like, 3, weight, rstd));
  PYDET_TRY(check_norm(x, like, 0, dweight, View{}));
  PYDET_TRY(check_weight_offset(op, options.weight_offset));
  PYDET_TRY(check_flag(op, "accumulate", options.accumulate));
  if (options.accumulate && !dweight.present())
    return fail(PYDET_NULL_POINTER, "%s: dweight is NULL, want a tensor under accumulate", op);
  if (options.accumulate && dweight.type != Type::f32)
    return fail(PYDET_INVALID_DTYPE, "%s: dweight is %s, want float32 under accumulate", op, type_name(dweight.type));
  const View *inputs[] = {&dy, &x, &weight, &rstd, &dresidual}, *outputs[] = {&dx, &dweight};
  for (const View *output : outputs) {
    PYDET_TRY(no_self_overlap(*output));
    for (const View *input : inputs) PYDET_TRY(disjoint(*output, *input));
  }
  PYDET_TRY(disjoint(dx, dweight));
  RowWalk walk;
  const View *walked[] = {&x, &dy, &dresidual, &dx};
  PYDET_TRY(walk_rows(walked, 4, &walk));

  PYDET_TRY(check_backward_workspace(op, options, walk.rows, x.cols(), dweight.present() ? 1 : 0, inputs, outputs));
  if (walk.rows == 0 && !dweight.present()) return nothing_to_write();

  auto norm = norm_of<RmsNormBackward>(stream, x, walk, weight, rstd);
  norm.dy = rows_of(dy, walk, 1);
  norm.dresidual = rows_of(dresidual, walk, 2);
  norm.dx = rows_of(dx, walk, 3);
  norm.dweight = vector_of(dweight);
  norm.weight_offset = options.weight_offset;
  norm.accumulate = options.accumulate != 0;
  norm.workspace = options.workspace;
  norm.workspace_size = options.workspace_size;
  return launch(op, norm, options.kernel);
}

pydet_status pydet_rmsnorm_backward_workspace(int64_t rows, int64_t n, uint64_t *bytes) {
  return checked_backward_workspace("rmsnorm_backward_workspace", rows, n, 1, bytes);
}

pydet_status pydet_layernorm(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *residual_tensor,
                             const pydet_tensor *weight_tensor, const pydet_tensor *bias_tensor,
                             const pydet_tensor *y_tensor, const pydet_tensor *mean_tensor,
                             const pydet_tensor *rstd_tensor, const pydet_tensor *sum_tensor,
                             const pydet_layernorm_options *given) {
  const char *op = "layernorm";
  pydet_layernorm_options options = {};
  options.eps = 1e-5f;
  PYDET_TRY(read_options(op, given, &options));
  View x, residual, weight, bias, y, mean, rstd, sum;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read_optional(op, "residual", kNormRow, residual_tensor, 1, &residual));
  PYDET_TRY(read_optional(op, "weight", kNormVector, weight_tensor, 1, &weight));
  PYDET_TRY(read_optional(op, "bias", kNormVector, bias_tensor, 1, &bias));
  PYDET_TRY(read(op, "y", kNormRow, y_tensor, 1, &y));
  PYDET_TRY(read_optional(op, "mean", kNormVector, mean_tensor, 0, &mean));
  PYDET_TRY(read_optional(op, "rstd", kNormVector, rstd_tensor, 0, &rstd));
  PYDET_TRY(read_optional(op, "sum", kNormRow, sum_tensor, 1, &sum));
  PYDET_TRY(both_or_neither(op, residual, sum));
  PYDET_TRY(unit_last_stride(x));
  const View *like[] = {&residual, &y, &sum};
  PYDET_TRY(check_norm(x, like, 3, weight, rstd));
  PYDET_TRY(check_norm(x, like, 0, bias, mean));
  PYDET_TRY(check_eps(op, options.eps));
  PYDET_TRY(check_weight_offset(op, options.weight_offset));
  const View *inputs[] = {&x, &residual, &weight, &bias}, *outputs[] = {&y, &sum, &mean, &rstd};
  PYDET_TRY(outputs_apart(inputs, outputs));
  RowWalk walk;
  const View *walked[] = {&x, &residual, &y, &sum};
  PYDET_TRY(walk_rows(walked, 4, &walk));
  if (walk.rows == 0) return nothing_to_write();
  auto norm = norm_of<LayerNorm>(stream, x, walk, weight, rstd);
  norm.bias = vector_of(bias);
  norm.mean = vector_of(mean);
  norm.residual = rows_of(residual, walk, 1);
  norm.y = rows_of(y, walk, 2);
  norm.sum = rows_of(sum, walk, 3);
  norm.eps = options.eps;
  norm.weight_offset = options.weight_offset;
  return launch(op, norm, options.kernel);
}

pydet_status pydet_layernorm_backward(void *stream, const pydet_tensor *dy_tensor, const pydet_tensor *x_tensor,
                                      const pydet_tensor *weight_tensor, const pydet_tensor *mean_tensor,
                                      const pydet_tensor *rstd_tensor, const pydet_tensor *dresidual_tensor,
                                      const pydet_tensor *dx_tensor, const pydet_tensor *dweight_tensor,
                                      const pydet_tensor *dbias_tensor, const pydet_layernorm_backward_options *given) {
  const char *op = "layernorm_backward";
  pydet_layernorm_backward_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View dy, x, weight, mean, rstd, dresidual, dx, dweight, dbias;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "dy", kNormRow, dy_tensor, 1, &dy));
  PYDET_TRY(read_optional(op, "weight", kNormVector, weight_tensor, 1, &weight));
  PYDET_TRY(read(op, "mean", kNormVector, mean_tensor, 0, &mean));
  PYDET_TRY(read(op, "rstd", kNormVector, rstd_tensor, 0, &rstd));
  PYDET_TRY(read_optional(op, "dresidual", kNormRow, dresidual_tensor, 1, &dresidual));
  PYDET_TRY(read_optional(op, "dx", kNormRow, dx_tensor, 1, &dx));
  PYDET_TRY(read_optional(op, "dweight", kNormVector, dweight_tensor, 1, &dweight));
  PYDET_TRY(read_optional(op, "dbias", kNormVector, dbias_tensor, 1, &dbias));
  const bool sums = dweight.present() || dbias.present();
  if (!dx.present() && !sums)
    return fail(PYDET_NULL_POINTER, "%s: dx, dweight and dbias are all NULL, want one of them", op);
  PYDET_TRY(unit_last_stride(x));
  const View *like[] = {&dy, &dresidual, &dx};
  PYDET_TRY(check_norm(x, like, 3, weight, rstd));
  PYDET_TRY(check_norm(x, like, 0, dweight, mean));
  PYDET_TRY(check_norm(x, like, 0, dbias, View{}));
  PYDET_TRY(check_weight_offset(op, options.weight_offset));
  PYDET_TRY(check_flag(op, "accumulate", options.accumulate));
  if (options.accumulate && !sums)
    return fail(PYDET_NULL_POINTER, "%s: dweight and dbias are NULL, want one of them under accumulate", op);
  for (const View *sum : {&dweight, &dbias})
    if (options.accumulate && sum->present() && sum->type != Type::f32)
      return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want float32 under accumulate", op, sum->name,
                  type_name(sum->type));
  const View *inputs[] = {&dy, &x, &weight, &mean, &rstd, &dresidual}, *outputs[] = {&dx, &dweight, &dbias};
  PYDET_TRY(outputs_apart(inputs, outputs));
  RowWalk walk;
  const View *walked[] = {&x, &dy, &dresidual, &dx};
  PYDET_TRY(walk_rows(walked, 4, &walk));

  PYDET_TRY(check_backward_workspace(op, options, walk.rows, x.cols(), sums ? 2 : 0, inputs, outputs));
  if (walk.rows == 0 && !sums) return nothing_to_write();

  auto norm = norm_of<LayerNormBackward>(stream, x, walk, weight, rstd);
  norm.mean = vector_of(mean);
  norm.dy = rows_of(dy, walk, 1);
  norm.dresidual = rows_of(dresidual, walk, 2);
  norm.dx = rows_of(dx, walk, 3);
  norm.dweight = vector_of(dweight);
  norm.dbias = vector_of(dbias);
  norm.weight_offset = options.weight_offset;
  norm.accumulate = options.accumulate != 0;
  norm.workspace = options.workspace;
  norm.workspace_size = options.workspace_size;
  return launch(op, norm, options.kernel);
}

pydet_status pydet_layernorm_backward_workspace(int64_t rows, int64_t n, uint64_t *bytes) {
  return checked_backward_workspace("layernorm_backward_workspace", rows, n, 2, bytes);
}

int32_t pydet_threads(void) { return thread_count(); }

pydet_status pydet_set_threads(int32_t count) {
  if (count < 0) return fail(PYDET_INVALID_VALUE, "set_threads: count is %d, want 0 or more", int(count));
  set_thread_count(count);
  return PYDET_OK;
}

pydet_status pydet_softmax(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *y_tensor,
                           const pydet_softmax_options *given) {
  const char *op = "softmax";
  pydet_softmax_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  PYDET_TRY(check_flag(op, "log", options.log));
  View x, y;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "y", kNormRow, y_tensor, 1, &y));
  Softmax softmax = {};
  PYDET_TRY(softmax_of(stream, x, y, &softmax));
  softmax.kind = options.log ? SoftmaxKind::log_softmax : SoftmaxKind::softmax;
  return softmax.rows ? launch(op, softmax, options.kernel) : nothing_to_write();
}

pydet_status pydet_softmax_backward(void *stream, const pydet_tensor *dy_tensor, const pydet_tensor *y_tensor,
                                    const pydet_tensor *dx_tensor, const pydet_softmax_options *given) {
  const char *op = "softmax_backward";
  pydet_softmax_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  PYDET_TRY(check_flag(op, "log", options.log));
  View dy, y, dx;
  PYDET_TRY(read(op, "y", kNormRow, y_tensor, 1, &y));
  PYDET_TRY(read(op, "dy", kNormRow, dy_tensor, 1, &dy));
  PYDET_TRY(read(op, "dx", kNormRow, dx_tensor, 1, &dx));
  PYDET_TRY(unit_last_stride(y));
  const View *like[] = {&dy, &dx};
  PYDET_TRY(check_norm(y, like, 2, View{}, View{}));
  PYDET_TRY(no_self_overlap(dx));
  PYDET_TRY(disjoint(dx, dy));
  PYDET_TRY(disjoint(dx, y));
  RowWalk walk;
  const View *walked[] = {&y, &dy, &dx};
  PYDET_TRY(walk_rows(walked, 3, &walk));
  if (walk.rows == 0) return nothing_to_write();
  return launch(op,
                SoftmaxBackward{y.device, stream, walk.rows, walk.inner, y.cols(), options.log != 0,
                                rows_of(dy, walk, 1), rows_of(y, walk, 0), rows_of(dx, walk, 2)},
                options.kernel);
}

pydet_status pydet_log_prob(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *index_tensor,
                            const pydet_tensor *log_prob_tensor, const pydet_log_prob_options *given) {
  const char *op = "log_prob";
  pydet_log_prob_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View x, log_prob;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "log_prob", kNormVector, log_prob_tensor, 0, &log_prob));
  Softmax softmax = {};
  PYDET_TRY(columns_of(x, index_tensor, log_prob, log_prob, &softmax.index));
  PYDET_TRY(softmax_of(stream, x, View{}, &softmax));
  PYDET_TRY(disjoint(log_prob, x));
  softmax.kind = SoftmaxKind::log_prob;
  softmax.log_prob = vector_of(log_prob);
  return softmax.rows ? launch(op, softmax, options.kernel) : nothing_to_write();
}

pydet_status pydet_log_prob_backward(void *stream, const pydet_tensor *dlog_prob_tensor, const pydet_tensor *x_tensor,
                                     const pydet_tensor *index_tensor, const pydet_tensor *dx_tensor,
                                     const pydet_log_prob_options *given) {
  const char *op = "log_prob_backward";
  pydet_log_prob_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View x, dlog_prob, dx;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "dlog_prob", kNormVector, dlog_prob_tensor, 0, &dlog_prob));
  PYDET_TRY(read(op, "dx", kNormRow, dx_tensor, 1, &dx));
  Softmax softmax = {};
  PYDET_TRY(columns_of(x, index_tensor, dlog_prob, dx, &softmax.index));
  PYDET_TRY(softmax_of(stream, x, dx, &softmax));
  PYDET_TRY(disjoint(dx, dlog_prob));
  softmax.kind = SoftmaxKind::log_prob_backward;
  softmax.dlog_prob = vector_of(dlog_prob);
  return softmax.rows ? launch(op, softmax, options.kernel) : nothing_to_write();
}

pydet_status pydet_fold(void *stream, const pydet_tensor *const *parts, int32_t count, const pydet_tensor *bias_tensor,
                        const pydet_tensor *out_tensor, const pydet_fold_options *given) {
  const char *op = "fold";
  pydet_fold_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  if (options.order != PYDET_ORDERED && options.order != PYDET_TREE)
    return fail(PYDET_INVALID_VALUE, "%s: options.order is %d, want 0 (ordered) or 1 (tree)", op, int(options.order));
  PYDET_TRY(check_flag(op, "accumulate", options.accumulate));
  View bias, out;
  PYDET_TRY(read(op, "out", kResult, out_tensor, 0, &out));
  PYDET_TRY(read_optional(op, "bias", kAddend, bias_tensor, 0, &bias));
  Fold fold = {};
  fold.stream = stream;
  fold.tree = options.order == PYDET_TREE;
  fold.accumulate = options.accumulate != 0;
  if (count < 1 || count > PYDET_FOLD_PARTS)
    return fail(PYDET_INVALID_VALUE, "%s: count is %d, want 1 to %d parts", op, int(count), PYDET_FOLD_PARTS);
  PYDET_TRY(peers_of(op, options.peers, count, &fold.peers));
  PYDET_TRY(fold_of(parts, count, bias, out, &fold));
  return fold.size ? launch(op, fold, options.kernel) : nothing_to_write();
}

pydet_status pydet_device_count(int32_t device_type, int32_t *count) {
  if (!count) return fail(PYDET_NULL_POINTER, "device_count: count is NULL");
  if (device_type != PYDET_CPU && device_type != PYDET_CUDA && device_type != PYDET_ROCM)
    return fail(PYDET_INVALID_VALUE, "device_count: device_type is %d, want PYDET_CPU, PYDET_CUDA or PYDET_ROCM",
                int(device_type));
  *count = 0;
  const Backend *backend = backend_for(device_type);
  return backend ? backend->device_count(count) : PYDET_OK;
}

pydet_status pydet_query_device(pydet_device device, pydet_device_info *info) {
  const char *op = "query_device";
  if (!info) return fail(PYDET_NULL_POINTER, "%s: info is NULL", op);
  PYDET_TRY(check_size<pydet_device_info>(op, "info", info->struct_size));
  int32_t count = 0;
  PYDET_TRY(pydet_device_count(device.device_type, &count));
  if (device.device_id < 0 || device.device_id >= count)
    return fail(PYDET_NO_DEVICE, "%s: device is %s, and there are %d of them", op,
                device_text(device.device_type, device.device_id).text, int(count));
  pydet_device_info filled = {};
  PYDET_TRY(backend_for(device.device_type)->query_device(device.device_id, &filled));
  write_info(filled, info);
  return PYDET_OK;
}

const char *pydet_kernel_name(int32_t index) {
  const char *name = nullptr;
  int32_t i = 0;
  each_kernel([&](const Backend &, const char *, const auto &row) {
    if (i++ == index) name = row.name;
  });
  return name;
}

pydet_status pydet_query_kernel(int32_t index, pydet_kernel_info *info) {
  const char *op = "query_kernel";
  if (!info) return fail(PYDET_NULL_POINTER, "%s: info is NULL", op);
  PYDET_TRY(check_size<pydet_kernel_info>(op, "info", info->struct_size));
  if (!pydet_kernel_name(index))
    return fail(PYDET_INVALID_VALUE, "%s: index is %d, past the last kernel", op, int(index));
  int32_t i = 0;
  each_kernel([&](const Backend &backend, const char *operation, const auto &row) {
    if (i++ != index) return;
    int32_t devices = 0, available = 0;
    if (backend.device_count(&devices) == PYDET_OK)
      for (int32_t id = 0; id < devices; ++id) available |= row.runs_on({backend.device_type, id});
    write_info({sizeof *info, backend.device_type, available, int32_t(row.arithmetic), row.name, operation,
                kTypeLists.text[row.types], row.requires_},
               info);
  });
  return PYDET_OK;
}
