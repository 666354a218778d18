// What XLA asks of attention: sequences of one length each, with lengths on the device; sequences behind each other; and
// keys in pages.

#include <utility>

#include "core/operations.h"
#include "entry/xla_call.h"

namespace pydet {
namespace {

// The dimensions that vmap put in front, of all buffers the same, and how their problems are computed: as more sequences
// of one, or one after the other.
struct Fronts {
  int64_t count;    // such dimensions
  int64_t batches;  // their product
  int64_t calls;    // 1, or `batches`
};

// Buffers as attention's tensors.
class Part {
 public:
  Part(Call &call, const Fronts &fronts, bool tokens_first, int64_t at)
      : call_(call), fronts_(fronts), tokens_first_(tokens_first), at_(at) {}

  // [B, H, Q, ...]: that of rank 3 is lse. Where tokens come first, the buffer is [B, Q, H, ...].
  const pydet_tensor *heads(const pydet_xla_buffer &buffer, int rank) {
    const pydet_tensor *made = plain(buffer, rank);
    if (!tokens_first_) return made;
    for (int64_t *values : {shapes_[count_ - 1].dims, shapes_[count_ - 1].strides}) std::swap(values[1], values[2]);
    return made;
  }
  // As the buffer lies; the first of its dimensions counts sequences.
  const pydet_tensor *plain(const pydet_xla_buffer &buffer, int rank) {
    Shape *shape = &shapes_[count_];
    for (int i = 0; i < rank; ++i) shape->dims[i] = buffer.dims[fronts_.count + i];
    const int64_t each = product(call_, shape->dims, rank);
    if (fronts_.calls == 1 && __builtin_mul_overflow(shape->dims[0], fronts_.batches, &shape->dims[0]))
      call_.fail("an operand has 2^63 elements or more");
    lay_out(shape, rank);
    tensors_[count_] = call_.tensor(buffer, shape, rank, at_ * each);
    return &tensors_[count_++];
  }

 private:
  Call &call_;
  const Fronts &fronts_;
  bool tokens_first_;
  int64_t at_;
  int count_ = 0;
  Shape shapes_[16];
  pydet_tensor tensors_[16];
};

struct Given {
  const char *name;
  const pydet_xla_buffer *buffer;  // NULL: not there
  int rank;                        // without the dimensions of vmap
};

// The fronts of a call; every buffer has them before dimensions of its own.
Fronts fronts_of(Call &call, const Given *given, int count, const pydet_xla_buffer &q) {
  Fronts fronts = {q.rank - 4, 1, 1};
  if (fronts.count < 0) {
    call.fail("q is %s, want 4 dimensions or more", ShapeWords(q.dims, q.rank).text);
    return fronts;
  }
  for (int i = 0; i < count; ++i) {
    const Given &x = given[i];
    if (!x.buffer) continue;
    bool fits = x.buffer->rank == fronts.count + x.rank;
    for (int64_t j = 0; fits && j < fronts.count; ++j) fits = x.buffer->dims[j] == q.dims[j];
    if (!fits)
      call.fail("%s is %s, want %d dimensions behind those that q, %s, has before its last 4", x.name,
                ShapeWords(x.buffer->dims, x.buffer->rank).text, x.rank, ShapeWords(q.dims, q.rank).text);
  }
  fronts.batches = product(call, q.dims, fronts.count);
  return fronts;
}

// What broadcasts over sequences does not over those of several problems; and sinks are of one.
bool joins(const Fronts &fronts, const pydet_xla_buffer &q, const pydet_xla_buffer *sinks,
           std::initializer_list<const pydet_xla_buffer *> pairs) {
  if (sinks) return false;
  for (const pydet_xla_buffer *x : pairs)
    if (x && x->dims[fronts.count] != q.dims[fronts.count]) return false;
  return true;
}

// What a call has beside q, k and v, each where its flag is 1; and what it is told of all of them.
struct Beside {
  const pydet_xla_buffer *sinks, *allowed, *bias, *first_key, *seqlens_k;
  bool tokens_first;
};

// The operands from `first` on.
Beside read_beside(Call &call, int64_t first) {
  auto optional = [&](const char *has) { return call.flag(has) ? &call.argument(first++) : nullptr; };
  const pydet_xla_buffer *sinks = optional("has_sinks"), *allowed = optional("has_allowed"),
                         *bias = optional("has_bias"), *first_key = optional("has_first_key"),
                         *seqlens_k = optional("has_seqlens_k");
  return {sinks, allowed, bias, first_key, seqlens_k, call.flag("tokens_first")};
}

template <class Options> Options read_options(Call &call, const pydet_xla_buffer &workspace) {
  Options options = {};
  options.struct_size = sizeof options;
  options.arithmetic = call.number("arithmetic");
  options.scale = call.real_or_none("scale");
  options.softcap = call.real_or_none("softcap");
  options.causal = call.flag("causal");
  options.window = 1;
  options.window_left = call.integer("window_left");
  options.window_right = call.integer("window_right");
  options.kernel = call.kernel();
  if (workspace.dtype != PYDET_XLA_U8) call.fail("the workspace is no result of bytes (uint8)");
  return options;
}

// Calls `run` with each part of what there is to do. `heads` are the buffers of heads and lse beside q, k and v.
template <class Options, class Run>
void each_part(Call &call, const Beside &beside, const pydet_xla_buffer &workspace, std::initializer_list<Given> heads,
               Options *options, Run run) {
  const pydet_xla_buffer &q = *heads.begin()->buffer;
  const Given more[] = {{"sinks", beside.sinks, 1},         {"allowed", beside.allowed, 4},
                        {"bias", beside.bias, 4},           {"first_key", beside.first_key, 1},
                        {"seqlens_k", beside.seqlens_k, 1}, {"the workspace", &workspace, 1}};
  Fronts fronts = fronts_of(call, heads.begin(), int(heads.size()), q);
  fronts_of(call, more, int(sizeof more / sizeof *more), q);
  if (call.failed()) return;
  if (fronts.batches != 1 && !joins(fronts, q, beside.sinks, {beside.allowed, beside.bias}))
    fronts.calls = fronts.batches;
  options->workspace_size = uint64_t(elements(workspace));
  options->workspace = options->workspace_size ? workspace.data : nullptr;
  for (int64_t i = 0; i < fronts.calls && !call.failed(); ++i) {
    Part part(call, fronts, beside.tokens_first, i);
    options->sinks = beside.sinks ? part.plain(*beside.sinks, 1) : nullptr;
    options->allowed = beside.allowed ? part.plain(*beside.allowed, 4) : nullptr;
    options->bias = beside.bias ? part.plain(*beside.bias, 4) : nullptr;
    options->first_key = beside.first_key ? part.plain(*beside.first_key, 1) : nullptr;
    options->seqlens_k = beside.seqlens_k ? part.plain(*beside.seqlens_k, 1) : nullptr;
    run(part);
  }
}

// Operands: q, k, v, then each that has its flag: sinks, allowed and bias (of 4 dimensions), first_key, seqlens_k; out,
// lse if has_lse, and a workspace of bytes, which may be empty. tokens_first: the buffers of heads are [B, Q, H, D] and
// lse [B, Q, H]. scale and softcap: 0 as in pydet_attention_options. window_left, window_right: -1 for any.
void attention(Call &call) {
  const pydet_xla_buffer &q = call.argument(0), &k = call.argument(1), &v = call.argument(2), &out = call.result(0);
  const Beside beside = read_beside(call, 3);
  const pydet_xla_buffer *lse = call.flag("has_lse") ? &call.result(1) : nullptr;
  const pydet_xla_buffer &workspace = call.result(lse ? 2 : 1);
  auto options = read_options<pydet_attention_options>(call, workspace);
  options.kv_chunk = call.integer("kv_chunk");
  void *stream = call.stream();
  if (call.failed()) return;
  const std::initializer_list<Given> heads = {
      {"q", &q, 4}, {"k", &k, 4}, {"v", &v, 4}, {"out", &out, 4}, {"lse", lse, 3}};
  each_part(call, beside, workspace, heads, &options, [&](Part &part) {
    const pydet_tensor *q_part = part.heads(q, 4), *k_part = part.heads(k, 4), *v_part = part.heads(v, 4),
                       *out_part = part.heads(out, 4), *lse_part = lse ? part.heads(*lse, 3) : nullptr;
    if (!call.failed()) call.check(pydet_attention(stream, q_part, k_part, v_part, out_part, lse_part, &options));
  });
}

// Operands: dout, q, k, v, out, lse, then as above; dq, dk, dv, dsinks if has_sinks, and a workspace.
void attention_backward(Call &call) {
  const pydet_xla_buffer &dout = call.argument(0), &q = call.argument(1), &k = call.argument(2), &v = call.argument(3),
                         &out = call.argument(4), &lse = call.argument(5), &dq = call.result(0), &dk = call.result(1),
                         &dv = call.result(2);
  const Beside beside = read_beside(call, 6);
  const pydet_xla_buffer *dsinks = beside.sinks ? &call.result(3) : nullptr;
  const pydet_xla_buffer &workspace = call.result(dsinks ? 4 : 3);
  auto options = read_options<pydet_attention_backward_options>(call, workspace);
  void *stream = call.stream();
  if (call.failed()) return;
  const std::initializer_list<Given> heads = {
      {"q", &q, 4},     {"k", &k, 4},   {"v", &v, 4},   {"dout", &dout, 4}, {"out", &out, 4},
      {"lse", &lse, 3}, {"dq", &dq, 4}, {"dk", &dk, 4}, {"dv", &dv, 4},     {"dsinks", dsinks, 1}};
  each_part(call, beside, workspace, heads, &options, [&](Part &part) {
    options.dsinks = dsinks ? part.plain(*dsinks, 1) : nullptr;
    const pydet_tensor *dout_part = part.heads(dout, 4), *q_part = part.heads(q, 4), *k_part = part.heads(k, 4),
                       *v_part = part.heads(v, 4), *out_part = part.heads(out, 4), *lse_part = part.heads(lse, 3),
                       *dq_part = part.heads(dq, 4), *dk_part = part.heads(dk, 4), *dv_part = part.heads(dv, 4);
    if (call.failed()) return;
    call.check(pydet_attention_backward(stream, dout_part, q_part, k_part, v_part, out_part, lse_part, dq_part, dk_part,
                                        dv_part, &options));
  });
}

// ---- Packed sequences, and pages -----------------------------------------------------------------------------------

// Buffers as they lie, of any rank; vmap makes such calls one by one.
class Whole {
 public:
  explicit Whole(Call &call) : call_(call) {}

  const pydet_tensor *tensor(const pydet_xla_buffer &buffer) {
    Shape *shape = &shapes_[count_];
    if (buffer.rank > kMaxRank) {
      call_.fail("a buffer has %" PRId64 " dimensions, want %d at most", buffer.rank, kMaxRank);
      return nullptr;
    }
    for (int64_t i = 0; i < buffer.rank; ++i) shape->dims[i] = buffer.dims[i];
    product(call_, shape->dims, buffer.rank);
    if (call_.failed()) return nullptr;
    lay_out(shape, int(buffer.rank));
    tensors_[count_] = call_.tensor(buffer, shape, int(buffer.rank));
    return &tensors_[count_++];
  }

 private:
  Call &call_;
  int count_ = 0;
  Shape shapes_[16];
  pydet_tensor tensors_[16];
};

// The operands of a call one after the other, and those that have a flag.
struct Operands {
  Call &call;
  Whole &whole;
  int64_t next = 0;

  const pydet_tensor *given() { return whole.tensor(call.argument(next++)); }
  const pydet_tensor *given(const char *has) { return call.flag(has) ? given() : nullptr; }
  // Result i, in the memory of the operand that comes next: what is in no sequence keeps what that holds.
  const pydet_tensor *begun(int64_t i) {
    continue_from(call, call.argument(next++), call.result(i));
    return whole.tensor(call.result(i));
  }
};

template <class Options> void give_workspace_of(Call &call, int64_t i, Options *options) {
  options->workspace_size = uint64_t(elements(call.result(i)));
  options->workspace = options->workspace_size ? call.result(i).data : nullptr;
}

// Operands: q, k, v, then each that has its flag, of cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, first_key, sinks,
// allowed and bias, all as pydet_attention has them, and what out and lse hold where no sequence is; out, lse and a
// workspace of bytes, which may be empty. scale and on as of attention.
void attention_stored(Call &call) {
  Whole whole(call);
  Operands of = {call, whole};
  auto options = read_options<pydet_attention_options>(call, call.result(2));
  options.kv_chunk = call.integer("kv_chunk");
  const pydet_tensor *q = of.given(), *k = of.given(), *v = of.given();
  options.cu_seqlens_q = of.given("has_cu_seqlens_q");
  options.cu_seqlens_k = of.given("has_cu_seqlens_k");
  options.block_table = of.given("has_block_table");
  options.seqlens_k = of.given("has_seqlens_k");
  options.first_key = of.given("has_first_key");
  options.sinks = of.given("has_sinks");
  options.allowed = of.given("has_allowed");
  options.bias = of.given("has_bias");
  const pydet_tensor *out = of.begun(0), *lse = of.begun(1);
  give_workspace_of(call, 2, &options);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_attention(stream, q, k, v, out, lse, &options));
}

// Operands: dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, sinks if has_sinks, and what dq, dk and dv hold where no
// sequence is; dq, dk, dv, dsinks if has_sinks, and a workspace.
void attention_varlen_backward(Call &call) {
  Whole whole(call);
  Operands of = {call, whole};
  const bool has_sinks = call.flag("has_sinks");
  const int64_t workspace = has_sinks ? 4 : 3;
  auto options = read_options<pydet_attention_backward_options>(call, call.result(workspace));
  const pydet_tensor *dout = of.given(), *q = of.given(), *k = of.given(), *v = of.given(), *out = of.given(),
                     *lse = of.given();
  options.cu_seqlens_q = of.given();
  options.cu_seqlens_k = of.given();
  options.sinks = has_sinks ? of.given() : nullptr;
  const pydet_tensor *dq = of.begun(0), *dk = of.begun(1), *dv = of.begun(2);
  options.dsinks = has_sinks ? whole.tensor(call.result(3)) : nullptr;
  give_workspace_of(call, workspace, &options);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_attention_backward(stream, dout, q, k, v, out, lse, dq, dk, dv, &options));
}

constexpr char kAttention[] = "attention";
constexpr char kAttentionBackward[] = "attention_backward";
constexpr char kAttentionStored[] = "attention_stored";
constexpr char kAttentionVarlenBackward[] = "attention_varlen_backward";
constexpr pydet_xla_handler kHandlers[] = {
    handler<kAttention, attention>(),
    handler<kAttentionBackward, attention_backward>(),
    handler<kAttentionStored, attention_stored>(),
    handler<kAttentionVarlenBackward, attention_varlen_backward>(),
};

}  // namespace

Items<pydet_xla_handler> Operation<Attention>::xla() { return kHandlers; }

}  // namespace pydet
