// Recurrences over tokens: the selective scan, the gated delta rule, and the causal convolution before them.

#include "core/launch.h"
#include "ops/scan/check.h"

using namespace pydet;

pydet_status pydet_selective_scan(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *dt_tensor,
                                  const pydet_tensor *a_tensor, const pydet_tensor *b_tensor,
                                  const pydet_tensor *c_tensor, const pydet_tensor *d_tensor,
                                  const pydet_tensor *initial_tensor, const pydet_tensor *cu_seqlens,
                                  const pydet_tensor *y_tensor, const pydet_tensor *final_tensor,
                                  const pydet_scan_options *given) {
  const char *op = "selective_scan";
  pydet_scan_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View x, dt, a, b, c, d, initial, y, final, words;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "dt", kNormRow, dt_tensor, 1, &dt));
  PYDET_TRY(read(op, "a", kNormVector, a_tensor, 1, &a));
  PYDET_TRY(read(op, "b", kNormRow, b_tensor, 1, &b));
  PYDET_TRY(read(op, "c", kNormRow, c_tensor, 1, &c));
  PYDET_TRY(read_optional(op, "d", kNormVector, d_tensor, 1, &d));
  PYDET_TRY(read_optional(op, "initial", kNormRow, initial_tensor, 1, &initial));
  PYDET_TRY(read(op, "y", kNormRow, y_tensor, 1, &y));
  PYDET_TRY(read_optional(op, "final", kNormRow, final_tensor, 1, &final));
  PYDET_TRY(want_dims(x, 4, "[batch, tokens, heads, width]"));
  PYDET_TRY(want_dims(b, 4, "[batch, tokens, groups, states]"));
  for (const View *view : {&dt, &a, &b, &c, &d, &y}) PYDET_TRY(same_device(x, *view));
  const int64_t heads = x.shape[2], width = x.shape[3], states = b.shape[3];
  PYDET_TRY(check_selective(x, dt, a, b, c));
  PYDET_TRY(want_fp32(a));
  if (d.present()) PYDET_TRY(want_shape(d, &heads, 1));
  PYDET_TRY(want_fp32(d));
  PYDET_TRY(same_type(x, y));
  PYDET_TRY(want_shape(y, x.shape, 4));
  SelectiveScan scan = {};
  PYDET_TRY(sequences_of(x, cu_seqlens, &words, &scan.sequences));
  const int64_t of_states[] = {scan.sequences.count, heads, width, states};
  PYDET_TRY(check_states(x, initial, final, of_states));
  const View *inputs[] = {&x, &dt, &a, &b, &c, &d, &words}, *outputs[] = {&y, &final};
  PYDET_TRY(outputs_apart(inputs, outputs));
  PYDET_TRY(disjoint(y, initial));
  if (y.empty() && (!final.present() || final.empty())) return nothing_to_write();
  scan.device = x.device, scan.stream = stream;
  scan.heads = heads, scan.width = width, scan.groups = b.shape[2], scan.states = states;
  scan.x = strided(x), scan.dt = strided(dt), scan.a = strided(a), scan.b = strided(b), scan.c = strided(c);
  scan.d = strided(d), scan.initial = strided(initial), scan.y = strided(y), scan.final = strided(final);
  scan.each_state = a.ndim == 2;
  return launch(op, scan, options.kernel);
}

pydet_status pydet_gated_delta(void *stream, const pydet_tensor *q_tensor, const pydet_tensor *k_tensor,
                               const pydet_tensor *v_tensor, const pydet_tensor *g_tensor,
                               const pydet_tensor *beta_tensor, const pydet_tensor *initial_tensor,
                               const pydet_tensor *cu_seqlens, const pydet_tensor *o_tensor,
                               const pydet_tensor *final_tensor, const pydet_scan_options *given) {
  const char *op = "gated_delta";
  pydet_scan_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View q, k, v, g, beta, initial, o, final, words;
  PYDET_TRY(read(op, "q", kNormRow, q_tensor, 1, &q));
  PYDET_TRY(read(op, "k", kNormRow, k_tensor, 1, &k));
  PYDET_TRY(read(op, "v", kNormRow, v_tensor, 1, &v));
  PYDET_TRY(read(op, "g", kNormRow, g_tensor, 1, &g));
  PYDET_TRY(read(op, "beta", kNormRow, beta_tensor, 1, &beta));
  PYDET_TRY(read_optional(op, "initial", kNormRow, initial_tensor, 1, &initial));
  PYDET_TRY(read(op, "o", kNormRow, o_tensor, 1, &o));
  PYDET_TRY(read_optional(op, "final", kNormRow, final_tensor, 1, &final));
  PYDET_TRY(want_dims(v, 4, "[batch, tokens, heads, width]"));
  PYDET_TRY(want_dims(k, 4, "[batch, tokens, groups, keys]"));
  for (const View *view : {&q, &k, &g, &beta, &o}) PYDET_TRY(same_device(v, *view));
  const int64_t heads = v.shape[2], width = v.shape[3], keys = k.shape[3];
  PYDET_TRY(check_delta(q, k, v, g, beta));
  PYDET_TRY(same_type(v, o));
  PYDET_TRY(want_shape(o, v.shape, 4));
  GatedDelta rule = {};
  PYDET_TRY(sequences_of(v, cu_seqlens, &words, &rule.sequences));
  const int64_t of_states[] = {rule.sequences.count, heads, keys, width};
  PYDET_TRY(check_states(v, initial, final, of_states));
  const View *inputs[] = {&q, &k, &v, &g, &beta, &words}, *outputs[] = {&o, &final};
  PYDET_TRY(outputs_apart(inputs, outputs));
  PYDET_TRY(disjoint(o, initial));
  if (o.empty() && (!final.present() || final.empty())) return nothing_to_write();
  rule.device = v.device, rule.stream = stream;
  rule.heads = heads, rule.width = width, rule.groups = k.shape[2], rule.keys = keys;
  rule.q = strided(q), rule.k = strided(k), rule.v = strided(v), rule.g = strided(g), rule.beta = strided(beta);
  rule.initial = strided(initial), rule.o = strided(o), rule.final = strided(final);
  return launch(op, rule, options.kernel);
}

pydet_status pydet_causal_conv1d(void *stream, const pydet_tensor *x_tensor, const pydet_tensor *w_tensor,
                                 const pydet_tensor *bias_tensor, const pydet_tensor *initial_tensor,
                                 const pydet_tensor *cu_seqlens, const pydet_tensor *y_tensor,
                                 const pydet_scan_options *given) {
  const char *op = "causal_conv1d";
  pydet_scan_options options = {};
  PYDET_TRY(read_options(op, given, &options));
  View x, w, bias, initial, y, words;
  PYDET_TRY(read(op, "x", kNormRow, x_tensor, 1, &x));
  PYDET_TRY(read(op, "w", kNormVector, w_tensor, 1, &w));
  PYDET_TRY(read_optional(op, "bias", kNormVector, bias_tensor, 1, &bias));
  PYDET_TRY(read_optional(op, "initial", kNormRow, initial_tensor, 1, &initial));
  PYDET_TRY(read(op, "y", kNormRow, y_tensor, 1, &y));
  PYDET_TRY(want_dims(x, 3, "[batch, tokens, channels]"));
  PYDET_TRY(want_dims(w, 2, "[channels, taps]"));
  for (const View *view : {&w, &bias, &initial, &y}) PYDET_TRY(same_device(x, *view));
  const int64_t channels = x.shape[2], taps = w.shape[1];
  PYDET_TRY(check_number(w, "taps", taps, kMostTaps));
  const int64_t of_w[] = {channels, taps};
  PYDET_TRY(want_shape(w, of_w, 2));
  if (bias.present()) PYDET_TRY(want_shape(bias, &channels, 1));
  PYDET_TRY(same_type(x, y));
  PYDET_TRY(want_shape(y, x.shape, 3));
  CausalConv1d conv = {};
  PYDET_TRY(sequences_of(x, cu_seqlens, &words, &conv.sequences));
  const int64_t of_initial[] = {conv.sequences.count, taps - 1, channels};
  if (initial.present()) PYDET_TRY(want_shape(initial, of_initial, 3));
  PYDET_TRY(same_type(x, initial));
  const View *inputs[] = {&x, &w, &bias, &initial, &words}, *outputs[] = {&y};
  PYDET_TRY(outputs_apart(inputs, outputs));
  if (y.empty()) return nothing_to_write();
  conv.device = x.device, conv.stream = stream;
  conv.channels = channels, conv.taps = taps;
  conv.x = strided(x), conv.w = strided(w), conv.bias = strided(bias);
  if (taps > 1) conv.initial = strided(initial);
  conv.y = strided(y);
  return launch(op, conv, options.kernel);
}
