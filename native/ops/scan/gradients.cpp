// Gradients of recurrences over tokens.

#include "core/launch.h"
#include "ops/scan/check.h"

using namespace pydet;

namespace {

// Extents so large that their product is more bytes than there are addresses are refused.
pydet_status measure(const char *op, const ScanWorkspace &at, uint64_t *bytes) {
  const double floats = 2.0 * double(at.tokens) * double(at.groups) * double(at.blocks) * double(at.states) +
                        3.0 * double(at.tokens) * double(at.heads) * double(at.parts) +
                        (double(at.tokens) / checkpoint_tokens(at.states) + double(at.sequences)) * double(at.groups) *
                            double(at.blocks) * double(at.states) * kScanColumns +
                        2.0 * double(at.tokens) * double(at.columns);
  if (floats > double(int64_t(1) << 59))
    return fail(PYDET_OVERFLOW, "%s: its workspace is of more bytes than an address reaches", op);
  *bytes = sizeof(float) * uint64_t(at.floats());
  return PYDET_OK;
}
pydet_status check_extents(const char *op, int64_t sequences, int64_t tokens, int64_t heads, int64_t width,
                           int64_t groups, int64_t states, const char *of_states) {
  const struct {
    const char *name;
    int64_t value, least, most;
  } extents[] = {{"sequences", sequences, 0, INT64_MAX}, {"tokens", tokens, 0, INT64_MAX},
                 {"heads", heads, 0, INT64_MAX},         {"width", width, 0, INT64_MAX},
                 {"groups", groups, 1, INT64_MAX},       {of_states, states, 1, kMostStates}};
  for (const auto &extent : extents)
    if (extent.value < extent.least || extent.value > extent.most)
      return fail(PYDET_INVALID_SHAPE, "%s: %s is %" PRId64 ", want %" PRId64 " to %" PRId64, op, extent.name,
                  extent.value, extent.least, extent.most);
  if (heads % groups)
    return fail(PYDET_INVALID_SHAPE, "%s: heads is %" PRId64 ", want a multiple of the %" PRId64 " groups", op, heads,
                groups);
  if (double(heads) * double(width) > double(int64_t(1) << 59))
    return fail(PYDET_OVERFLOW, "%s: its workspace is of more bytes than an address reaches", op);
  return PYDET_OK;
}

// The workspace of a call, once its size is known.
pydet_status place(const char *op, const pydet_scan_backward_options &options, ScanWorkspace *at) {
  uint64_t needed = 0;
  PYDET_TRY(measure(op, *at, &needed));
  PYDET_TRY(check_workspace(op, options.workspace, options.workspace_size));
  if (options.workspace_size < needed)
    return fail(PYDET_WORKSPACE_TOO_SMALL, "%s: workspace is %" PRIu64 " bytes, want %" PRIu64 " (pydet_%s_workspace)",
                op, options.workspace_size, needed, op);
  at->data = static_cast<float *>(options.workspace);
  return PYDET_OK;
}

// Results like operands, of their shapes and types.
pydet_status alike(const View &like, const View &view) {
  PYDET_TRY(want_shape(view, like.shape, like.ndim));
  return same_type(like, view);
}

template <int count> bool any_written(const View *const (&outputs)[count]) {
  for (const View *view : outputs)
    if (view->present() && !view->empty()) return true;
  return false;
}

// Where a call works: what `workspace_of`, one of the two functions, says of its extents.
template <class Of, int inputs, int outputs>
pydet_status make_room(const View &x, int64_t sequences, const View &b, const char *of_states, Of workspace_of,
                       const pydet_scan_backward_options &options, const View *const (&from)[inputs],
                       const View *const (&to)[outputs], ScanWorkspace *at) {
  int64_t tokens = 0;
  if (__builtin_mul_overflow(x.shape[0], x.shape[1], &tokens)) tokens = INT64_MAX;
  const int64_t heads = x.shape[2], width = x.shape[3], groups = b.shape[2], states = b.shape[3];
  PYDET_TRY(check_extents(x.op, sequences, tokens, heads, width, groups, states, of_states));
  *at = workspace_of(sequences, tokens, heads, width, groups, states);
  PYDET_TRY(place(x.op, options, at));
  PYDET_TRY(workspace_apart(from, options.workspace, options.workspace_size));
  return workspace_apart(to, options.workspace, options.workspace_size);
}

}  // namespace

pydet_status pydet_selective_scan_backward(
    void *stream, const pydet_tensor *dy_tensor, const pydet_tensor *dfinal_tensor, const pydet_tensor *x_tensor,
    const pydet_tensor *dt_tensor, const pydet_tensor *a_tensor, const pydet_tensor *b_tensor,
    const pydet_tensor *c_tensor, const pydet_tensor *d_tensor, const pydet_tensor *initial_tensor,
    const pydet_tensor *cu_seqlens, const pydet_tensor *dx_tensor, const pydet_tensor *ddt_tensor,
    const pydet_tensor *da_tensor, const pydet_tensor *db_tensor, const pydet_tensor *dc_tensor,
    const pydet_tensor *dd_tensor, const pydet_tensor *dinitial_tensor, const pydet_scan_backward_options *given) {
  const char *op = "selective_scan_backward";
  pydet_scan_backward_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View dy, dfinal, x, dt, a, b, c, d, initial, dx, ddt, da, db, dc, dd, dinitial, words;
  PYDET_TRY(read(op, "dy", kNormRow, dy_tensor, 1, &dy));
  PYDET_TRY(read_optional(op, "dfinal", kNormRow, dfinal_tensor, 1, &dfinal));
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "dt", kNormRow, dt_tensor, 1, &dt));
  PYDET_TRY(read(op, "a", kNormVector, a_tensor, 1, &a));
  PYDET_TRY(read(op, "b", kNormRow, b_tensor, 1, &b));
  PYDET_TRY(read(op, "c", kNormRow, c_tensor, 1, &c));
  PYDET_TRY(read_optional(op, "d", kNormVector, d_tensor, 1, &d));
  PYDET_TRY(read_optional(op, "initial", kNormRow, initial_tensor, 1, &initial));
  PYDET_TRY(read(op, "dx", kNormRow, dx_tensor, 1, &dx));
  PYDET_TRY(read(op, "ddt", kNormRow, ddt_tensor, 1, &ddt));
  PYDET_TRY(read(op, "da", kNormRow, da_tensor, 1, &da));
  PYDET_TRY(read(op, "db", kNormRow, db_tensor, 1, &db));
  PYDET_TRY(read(op, "dc", kNormRow, dc_tensor, 1, &dc));
  PYDET_TRY(read_optional(op, "dd", kNormRow, dd_tensor, 1, &dd));
  PYDET_TRY(read_optional(op, "dinitial", kNormRow, dinitial_tensor, 1, &dinitial));
  PYDET_TRY(want_dims(x, 4, "[batch, tokens, heads, width]"));
  PYDET_TRY(want_dims(b, 4, "[batch, tokens, groups, states]"));
  for (const View *view : {&dy, &dt, &a, &b, &c, &d, &dx, &ddt, &da, &db, &dc, &dd}) PYDET_TRY(same_device(x, *view));
  const int64_t heads = x.shape[2], width = x.shape[3], groups = b.shape[2], states = b.shape[3];
  PYDET_TRY(check_selective(x, dt, a, b, c));
  if (d.present()) PYDET_TRY(want_shape(d, &heads, 1));
  for (const View *view : {&a, &d, &da, &dd}) PYDET_TRY(want_fp32(*view));
  for (const View *view : {&dy, &dx}) PYDET_TRY(alike(x, *view));
  PYDET_TRY(alike(dt, ddt));
  PYDET_TRY(alike(b, db));
  PYDET_TRY(alike(c, dc));
  SelectiveScanBackward scan = {};
  PYDET_TRY(sequences_of(x, cu_seqlens, &words, &scan.sequences));
  const int64_t count = scan.sequences.count, of_states[] = {count, heads, width, states};
  const View *states_given[] = {&dfinal, &initial, &dinitial};
  PYDET_TRY(check_each_state(x, states_given, of_states));
  const int64_t of_sums[] = {count, heads, states};
  PYDET_TRY(want_shape(da, of_sums, a.ndim == 2 ? 3 : 2));
  if (d.present() != dd.present())
    return fail(PYDET_NULL_POINTER, "%s: %s is NULL and %s is not, want both or neither", op, d.present() ? "dd" : "d",
                d.present() ? "d" : "dd");
  if (dd.present()) PYDET_TRY(want_shape(dd, of_sums, 2));
  const View *inputs[] = {&dy, &dfinal, &x, &dt, &a, &b, &c, &d, &initial, &words},
             *outputs[] = {&dx, &ddt, &da, &db, &dc, &dd, &dinitial};
  PYDET_TRY(outputs_apart(inputs, outputs));
  PYDET_TRY(make_room(x, count, b, "states", selective_workspace, options, inputs, outputs, &scan.workspace));
  if (!any_written(outputs)) return nothing_to_write();
  scan.device = x.device, scan.stream = stream;
  scan.heads = heads, scan.width = width, scan.groups = groups, scan.states = states;
  scan.dy = strided(dy), scan.dfinal = strided(dfinal), scan.x = strided(x), scan.dt = strided(dt);
  scan.a = strided(a), scan.b = strided(b), scan.c = strided(c), scan.d = strided(d), scan.initial = strided(initial);
  scan.dx = strided(dx), scan.ddt = strided(ddt), scan.da = strided(da), scan.db = strided(db), scan.dc = strided(dc);
  scan.dd = strided(dd), scan.dinitial = strided(dinitial);
  scan.each_state = a.ndim == 2;
  return launch(op, scan, options.kernel);
}

pydet_status pydet_gated_delta_backward(void *stream, const pydet_tensor *dout_tensor,
                                        const pydet_tensor *dfinal_tensor, const pydet_tensor *q_tensor,
                                        const pydet_tensor *k_tensor, const pydet_tensor *v_tensor,
                                        const pydet_tensor *g_tensor, const pydet_tensor *beta_tensor,
                                        const pydet_tensor *initial_tensor, const pydet_tensor *cu_seqlens,
                                        const pydet_tensor *dq_tensor, const pydet_tensor *dk_tensor,
                                        const pydet_tensor *dv_tensor, const pydet_tensor *dg_tensor,
                                        const pydet_tensor *dbeta_tensor, const pydet_tensor *dinitial_tensor,
                                        const pydet_scan_backward_options *given) {
  const char *op = "gated_delta_backward";
  pydet_scan_backward_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View dout, dfinal, q, k, v, g, beta, initial, dq, dk, dv, dg, dbeta, dinitial, words;
  PYDET_TRY(read(op, "dout", kNormRow, dout_tensor, 1, &dout));
  PYDET_TRY(read_optional(op, "dfinal", kNormRow, dfinal_tensor, 1, &dfinal));
  PYDET_TRY(read(op, "q", kNormRow, q_tensor, 1, &q));
  PYDET_TRY(read(op, "k", kNormRow, k_tensor, 1, &k));
  PYDET_TRY(read(op, "v", kNormRow, v_tensor, 1, &v));
  PYDET_TRY(read(op, "g", kNormRow, g_tensor, 1, &g));
  PYDET_TRY(read(op, "beta", kNormRow, beta_tensor, 1, &beta));
  PYDET_TRY(read_optional(op, "initial", kNormRow, initial_tensor, 1, &initial));
  PYDET_TRY(read(op, "dq", kNormRow, dq_tensor, 1, &dq));
  PYDET_TRY(read(op, "dk", kNormRow, dk_tensor, 1, &dk));
  PYDET_TRY(read(op, "dv", kNormRow, dv_tensor, 1, &dv));
  PYDET_TRY(read(op, "dg", kNormRow, dg_tensor, 1, &dg));
  PYDET_TRY(read(op, "dbeta", kNormRow, dbeta_tensor, 1, &dbeta));
  PYDET_TRY(read_optional(op, "dinitial", kNormRow, dinitial_tensor, 1, &dinitial));
  PYDET_TRY(want_dims(v, 4, "[batch, tokens, heads, width]"));
  PYDET_TRY(want_dims(k, 4, "[batch, tokens, groups, keys]"));
  for (const View *view : {&dout, &q, &k, &g, &beta, &dq, &dk, &dv, &dg, &dbeta}) PYDET_TRY(same_device(v, *view));
  const int64_t heads = v.shape[2], width = v.shape[3], groups = k.shape[2], keys = k.shape[3];
  PYDET_TRY(check_delta(q, k, v, g, beta));
  const View *pairs[][2] = {{&v, &dout}, {&v, &dv}, {&q, &dq}, {&k, &dk}, {&g, &dg}, {&beta, &dbeta}};
  for (const auto &pair : pairs) PYDET_TRY(alike(*pair[0], *pair[1]));
  GatedDeltaBackward rule = {};
  PYDET_TRY(sequences_of(v, cu_seqlens, &words, &rule.sequences));
  const int64_t count = rule.sequences.count, of_states[] = {count, heads, keys, width};
  const View *states_given[] = {&dfinal, &initial, &dinitial};
  PYDET_TRY(check_each_state(v, states_given, of_states));
  const View *inputs[] = {&dout, &dfinal, &q, &k, &v, &g, &beta, &initial, &words},
             *outputs[] = {&dq, &dk, &dv, &dg, &dbeta, &dinitial};
  PYDET_TRY(outputs_apart(inputs, outputs));
  PYDET_TRY(make_room(v, count, k, "keys", delta_workspace, options, inputs, outputs, &rule.workspace));
  if (!any_written(outputs)) return nothing_to_write();
  rule.device = v.device, rule.stream = stream;
  rule.heads = heads, rule.width = width, rule.groups = groups, rule.keys = keys;
  rule.dout = strided(dout), rule.dfinal = strided(dfinal), rule.q = strided(q), rule.k = strided(k);
  rule.v = strided(v), rule.g = strided(g), rule.beta = strided(beta), rule.initial = strided(initial);
  rule.dq = strided(dq), rule.dk = strided(dk), rule.dv = strided(dv), rule.dg = strided(dg);
  rule.dbeta = strided(dbeta), rule.dinitial = strided(dinitial);
  return launch(op, rule, options.kernel);
}

pydet_status pydet_selective_scan_backward_workspace(int64_t sequences, int64_t tokens, int64_t heads, int64_t width,
                                                     int64_t groups, int64_t states, uint64_t *bytes) {
  const char *op = "selective_scan_backward_workspace";
  if (!bytes) return fail(PYDET_NULL_POINTER, "%s: bytes is NULL", op);
  PYDET_TRY(check_extents(op, sequences, tokens, heads, width, groups, states, "states"));
  return measure(op, selective_workspace(sequences, tokens, heads, width, groups, states), bytes);
}

pydet_status pydet_gated_delta_backward_workspace(int64_t sequences, int64_t tokens, int64_t heads, int64_t width,
                                                  int64_t groups, int64_t keys, uint64_t *bytes) {
  const char *op = "gated_delta_backward_workspace";
  if (!bytes) return fail(PYDET_NULL_POINTER, "%s: bytes is NULL", op);
  PYDET_TRY(check_extents(op, sequences, tokens, heads, width, groups, keys, "keys"));
  return measure(op, delta_workspace(sequences, tokens, heads, width, groups, keys), bytes);
}

pydet_status pydet_causal_conv1d_backward(void *stream, const pydet_tensor *dy_tensor, const pydet_tensor *x_tensor,
                                          const pydet_tensor *w_tensor, const pydet_tensor *initial_tensor,
                                          const pydet_tensor *cu_seqlens, const pydet_tensor *dx_tensor,
                                          const pydet_tensor *dw_tensor, const pydet_tensor *dbias_tensor,
                                          const pydet_tensor *dinitial_tensor,
                                          const pydet_scan_backward_options *given) {
  const char *op = "causal_conv1d_backward";
  pydet_scan_backward_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View dy, x, w, initial, dx, dw, dbias, dinitial, words;
  PYDET_TRY(read(op, "dy", kNormRow, dy_tensor, 1, &dy));
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "w", kNormVector, w_tensor, 1, &w));
  PYDET_TRY(read_optional(op, "initial", kNormRow, initial_tensor, 1, &initial));
  PYDET_TRY(read_optional(op, "dx", kNormRow, dx_tensor, 1, &dx));
  PYDET_TRY(read_optional(op, "dw", kNormRow, dw_tensor, 1, &dw));
  PYDET_TRY(read_optional(op, "dbias", kNormRow, dbias_tensor, 1, &dbias));
  PYDET_TRY(read_optional(op, "dinitial", kNormRow, dinitial_tensor, 1, &dinitial));
  PYDET_TRY(want_dims(x, 3, "[batch, tokens, channels]"));
  PYDET_TRY(want_dims(w, 2, "[channels, taps]"));
  for (const View *view : {&dy, &w, &initial, &dx, &dw, &dbias, &dinitial}) PYDET_TRY(same_device(x, *view));
  const int64_t channels = x.shape[2], taps = w.shape[1];
  PYDET_TRY(check_number(w, "taps", taps, kMostTaps));
  const int64_t of_w[] = {channels, taps};
  PYDET_TRY(want_shape(w, of_w, 2));
  for (const View *view : {&dy, &dx}) {
    if (!view->present()) continue;
    PYDET_TRY(want_shape(*view, x.shape, 3));
    PYDET_TRY(same_type(x, *view));
  }
  CausalConv1dBackward conv = {};
  PYDET_TRY(sequences_of(x, cu_seqlens, &words, &conv.sequences));
  const int64_t count = conv.sequences.count, of_initial[] = {count, taps - 1, channels};
  for (const View *view : {&initial, &dinitial}) {
    if (!view->present()) continue;
    PYDET_TRY(want_shape(*view, of_initial, 3));
    PYDET_TRY(same_type(x, *view));
  }
  const int64_t of_sums[] = {count, channels, taps};
  if (dw.present()) PYDET_TRY(want_shape(dw, of_sums, 3));
  if (dbias.present()) PYDET_TRY(want_shape(dbias, of_sums, 2));
  for (const View *view : {&dw, &dbias}) PYDET_TRY(want_fp32(*view));
  const View *inputs[] = {&dy, &x, &w, &initial, &words}, *outputs[] = {&dx, &dw, &dbias, &dinitial};
  PYDET_TRY(outputs_apart(inputs, outputs));
  if (!any_written(outputs)) return nothing_to_write();
  conv.device = x.device, conv.stream = stream;
  conv.channels = channels, conv.taps = taps;
  conv.dy = strided(dy), conv.x = strided(x), conv.w = strided(w), conv.dx = strided(dx);
  conv.dw = strided(dw), conv.dbias = strided(dbias);
  if (taps > 1) conv.initial = strided(initial), conv.dinitial = strided(dinitial);
  return launch(op, conv, options.kernel);
}
