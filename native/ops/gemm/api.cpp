// GEMM, its two gradients and skinny GEMM: one problem under four names.

#include "core/launch.h"
#include "ops/gemm/initial.h"

namespace pydet {
namespace {

constexpr GemmWords kGemm = {"gemm", "a", "b", "out", "M", "N", "K", false, false};
constexpr GemmWords kGemmDa = {"gemm_da", "dc", "b", "da", "M", "K", "N", false, true};
constexpr GemmWords kGemmDb = {"gemm_db", "a", "dc", "db", "K", "N", "M", true, false};
constexpr GemmWords kSkinnyGemm = {"skinny_gemm", "x", "w", "y", "M", "N", "K", false, true};

// A call, once it is checked.
struct Work {
  Gemm gemm;
  FromInitial steps;
  bool from_initial, none;  // none: no element of out
};

// `out` is as gemm_of took it.
pydet_status finish_reading(const GemmWords &words, const View &initial, const View &out,
                            std::initializer_list<const View *> views, Work *work) {
  Gemm &gemm = work->gemm;
  if (!initial.present() && one_chunk_is_one_chain(gemm)) gemm.k_chunk = 0;
  for (const View *view : views) PYDET_TRY(workspace_apart(*view, gemm.workspace, gemm.workspace_size));
  PYDET_TRY(workspace_apart(initial, gemm.workspace, gemm.workspace_size));
  work->none = gemm.m == 0 || gemm.n == 0 || gemm.batch.count == 0;
  work->from_initial = initial.present() && !work->none;
  return work->from_initial ? start_from(words, initial, out, &gemm, &work->steps) : PYDET_OK;
}

// The product that does it all, by a kernel that begins at the tensor; *taken says whether there is one.
__attribute__((noinline)) pydet_status launch_in_one(const char *op, const Backend &backend, const Gemm &sums,
                                                     const FromInitial &steps, const char *forced, bool *taken) {
  Gemm whole = sums;
  whole.bias = steps.bias, whole.out = steps.out, whole.from = steps.from;
  const auto *const hooks = backend.table<Gemm>().hooks;
  *taken = steps.ends && sums.batch.dims == 0 && hooks->begins && hooks->begins(whole, forced);
  return *taken ? launch(op, whole, forced) : PYDET_OK;
}

// launch() of a product that computes the sums of a result that begins at a tensor of its own.
pydet_status launch_from(const char *op, const Gemm &sums, const FromInitial &steps, const char *forced) {
  bool taken = false;
  PYDET_TRY(launch_in_one(op, *backend_for(sums.device.type), sums, steps, forced, &taken));
  return taken ? PYDET_OK : launch_between_passes(op, sums, steps, forced);
}

pydet_status run(const char *op, const Work &work, const char *kernel) {
  if (work.none) return nothing_to_write();
  return work.from_initial ? launch_from(op, work.gemm, work.steps, kernel) : launch(op, work.gemm, kernel);
}

// Apart from the call itself, so that the views are off the stack when a kernel runs.
__attribute__((noinline)) pydet_status read_gemm(const GemmWords &words, void *stream, const pydet_tensor *a_tensor,
                                                 const pydet_tensor *b_tensor, const pydet_tensor *bias_tensor,
                                                 const pydet_tensor *out_tensor, const pydet_gemm_options &options,
                                                 Work *work) {
  View a, b, bias, out, initial;
  PYDET_TRY(read(words.op, words.a, kFactor, a_tensor, 2, &a));
  PYDET_TRY(read(words.op, words.b, kFactor, b_tensor, 2, &b));
  PYDET_TRY(read_optional(words.op, "bias", kAddend, bias_tensor, 1, &bias));
  PYDET_TRY(read(words.op, words.out, kResult, out_tensor, 2, &out));
  Gemm &gemm = work->gemm;
  gemm.stream = stream;
  PYDET_TRY(
      gemm_of(words, words.a_transposed ? transposed(a) : a, words.b_transposed ? transposed(b) : b, bias, out, &gemm));
  PYDET_TRY(apply_gemm_options(words, options, out, &gemm));
  PYDET_TRY(read_initial(words.op, options, out, &initial));
  return finish_reading(words, initial, out, {&a, &b, &bias, &out}, work);
}

pydet_status run_gemm(const GemmWords &words, void *stream, const pydet_tensor *a_tensor, const pydet_tensor *b_tensor,
                      const pydet_tensor *bias_tensor, const pydet_tensor *out_tensor,
                      const pydet_gemm_options *given) {
  pydet_gemm_options options = {};
  options.struct_size = sizeof options;
  PYDET_TRY(read_options(words.op, given, &options));
  Work work = {};
  PYDET_TRY(read_gemm(words, stream, a_tensor, b_tensor, bias_tensor, out_tensor, options, &work));
  return run(words.op, work, options.kernel);
}

pydet_status check_skinny_options(const char *op, const pydet_skinny_gemm_options &options) {
  if (options.mode != PYDET_DETERMINISTIC && options.mode != PYDET_FAST)
    return fail(PYDET_INVALID_VALUE, "%s: options.mode is %d, want 0 (deterministic) or 1 (fast)", op,
                int(options.mode));
  return check_flag(op, "weights_constant", options.weights_constant);
}

__attribute__((noinline)) pydet_status read_skinny_gemm(void *stream, const pydet_tensor *x_tensor,
                                                        const pydet_tensor *w_tensor, const pydet_tensor *bias_tensor,
                                                        const pydet_tensor *y_tensor,
                                                        const pydet_skinny_gemm_options &options, Work *work) {
  const GemmWords &words = kSkinnyGemm;
  View x, w, bias, y, initial;
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
  PYDET_TRY(read_initial(words.op, options, y, &initial));
  View *rows[] = {&x, &y, &bias};
  merge_rows(rows, full_bias ? 3 : 2);

  Gemm &gemm = work->gemm;
  gemm.stream = stream;
  PYDET_TRY(gemm_of(words, x, transposed(w), bias, y, &gemm));
  PYDET_TRY(apply_gemm_options(words, options, y, &gemm));
  PYDET_TRY(check_skinny_options(words.op, options));
  gemm.skinny = true;
  gemm.fast = options.mode == PYDET_FAST;
  gemm.weights_constant = options.weights_constant != 0;
  return finish_reading(words, initial, y, {&x, &w, &bias, &y}, work);
}

pydet_status run_skinny_gemm(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *w_tensor,
                             const pydet_tensor *bias_tensor, const pydet_tensor *y_tensor,
                             const pydet_skinny_gemm_options *given) {
  pydet_skinny_gemm_options options = {};
  options.struct_size = sizeof options;
  PYDET_TRY(read_options(kSkinnyGemm.op, given, &options));
  Work work = {};
  PYDET_TRY(read_skinny_gemm(stream, x_tensor, w_tensor, bias_tensor, y_tensor, options, &work));
  return run(kSkinnyGemm.op, work, options.kernel);
}

pydet_status gemm_workspace(const char *op, int64_t batch, int64_t m, int64_t n, int64_t k, int32_t arithmetic,
                            int64_t k_chunk, const char *kernel, bool from_initial, uint64_t *bytes) {
  PYDET_TRY(check_extents(op, batch, m, n, k, bytes));
  PYDET_TRY(check_chunk(op, k_chunk, kChunkMultiple));
  const Backend *gpu = gpu_backend();  // the CPU's kernels want none
  const bool asks = gpu && batch == 1 && m > 0 && n > 0 && k > 0;
  uint64_t sums = 0;
  if (from_initial) PYDET_TRY(bytes_of_sums(op, batch, m, n, &sums));
  *bytes = sums + (asks ? gpu->table<Gemm>().hooks->workspace(m, n, k, k_chunk, Arithmetic(arithmetic), kernel) : 0);
  return PYDET_OK;
}

}  // namespace
}  // namespace pydet

using namespace pydet;

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
  return gemm_workspace("gemm_workspace", batch, m, n, k, options.arithmetic, options.k_chunk, options.kernel,
                        options.initial, bytes);
}

pydet_status pydet_gemm_copy_workspace(const pydet_tensor *operand, uint64_t *bytes) {
  const char *op = "gemm_copy_workspace";
  if (!bytes) return fail(PYDET_NULL_POINTER, "%s: bytes is NULL", op);
  View view;
  PYDET_TRY(read(op, "operand", kFactor, operand, 1, &view));
  View *rows[] = {&view};
  merge_rows(rows, 1);
  Matrix matrix = {};
  if (view.ndim == 2) PYDET_TRY(matrix_of(view, &matrix));
  const auto copy = backend_for(view.device.type)->table<Gemm>().hooks->copy;
  *bytes = copy && matrix.data ? copy(view.device, matrix) : 0;
  return PYDET_OK;
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
  return gemm_workspace(op, 1, m, n, k, options.arithmetic, options.k_chunk, options.kernel, options.initial, bytes);
}
