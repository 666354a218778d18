// Attention, once it is checked: what the kernels take.
#pragma once

#include "core/operation.h"

namespace pydet {

// Vectors of heads: element i of head h of token t of sequence s lies at data + s sequence_stride + h head_stride +
// t token_stride + i, in elements. `data` is NULL where the operand is absent. Packed sequences have sequence_stride 0 and
// tokens counted from the begin of the pack; pages (below) take the place of sequences.
struct Heads {
  char *data;
  Type type;
  int64_t sequence_stride, head_stride, token_stride;
};

// One number for each pair of a query and a key: bool (a byte each), or of a type. Strides in elements, 0 where broadcast.
struct Pairs {
  char *data;
  Type type;
  int64_t sequence_stride, head_stride, query_stride, key_stride;
};

constexpr int64_t kNoWindow = -1;

// out[s, h, i, :] = sum_j p_j v[s, g, j, :] / sum_j p_j over the keys j that query i may see, g = h / (heads / groups). Keys
// are counted from the sequence's own first one. NUMERICS.md, "Attention", has the order of every sum.
struct Attention {
  Device device;
  void *stream;
  int64_t sequences, heads, groups;  // heads is a multiple of groups: of q and out, of k and v
  int64_t d, e;                      // elements of a head of q and k, of v and out
  int64_t queries, keys;             // of every sequence; where lengths are on the device, at most so many
  Heads q, k, v, out;
  Heads lse;                 // fp32, token_stride between queries; data NULL where it is not asked for
  const int32_t *q_start;    // packed: sequence s has queries q_start[s] to q_start[s + 1]; NULL: `queries` each
  const int32_t *k_start;    // packed keys likewise; NULL: `keys` each, or k_length
  const int32_t *k_length;   // keys of each sequence, counted from where its storage begins; NULL: `keys`
  const int32_t *first_key;  // left padding: its first key lies at this place of its storage; NULL: 0
  const int32_t
      *pages;  // sequence s has page pages[s pages_stride + i] for its tokens from i page_size on; NULL: none.
  int64_t pages_stride;               // Of k and v sequence_stride is then between pages, token_stride inside one
  int64_t page_size, page_count;      // a number that is none of the page_count pages is the nearest that is
  bool causal;                        // query i of Q sees keys up to K - Q + i
  int64_t window_left, window_right;  // and none further than so many before and after that one; kNoWindow: any
  Pairs allowed;                      // bool; data NULL: all
  Pairs bias;                         // fp32, bf16 or fp16, added to the score after the scale
  Vector sinks;                       // one logit a head
  float scale, softcap;               // softcap 0: none
  Arithmetic arithmetic;
  int64_t kv_chunk;  // keys of a segment, a multiple of 128
  void *workspace;
  uint64_t workspace_size;

  uint64_t needs() const {
    return when(lse.data, kLogSumExp) | when(q_start || k_start, kPacked) | when(k_length, kLengths) |
           when(first_key, kFirstKey) | when(pages, kPages) |
           when(window_left != kNoWindow || window_right != kNoWindow, kWindow) | when(allowed.data, kMask) |
           when(bias.data, kBias) | when(sinks.data, kSinks) | when(softcap != 0, kSoftcap);
  }
};

template <> struct Operation<Attention> : AsAsked {
  static constexpr const char *name = "attention";
  static Type input(const Attention &a) { return a.q.type; }
  template <class Show> static void memory(const Attention &a, Show show) {
    show(a.q.data, a.k.data, a.v.data, a.out.data, a.lse.data, a.q_start, a.k_start, a.k_length, a.first_key, a.pages,
         a.allowed.data, a.bias.data, a.sinks.data);
  }
  using Functions = FunctionList<pydet_attention, pydet_attention_workspace>;
  static Items<pydet_exchange_method> python();
  static Items<pydet_xla_handler> xla();
};

// The gradients of q, k, v and the sinks from that of out. NUMERICS.md, "Attention, backward", has the order of every sum.
struct AttentionBackward {
  Device device;
  void *stream;
  // As it was called, of the same device and stream. out and lse are read: what it gave. There are no pages, and kv_chunk
  // and its workspace are unused.
  Attention forward;
  Heads dout;        // of the operands' type
  Heads dq, dk, dv;  // each fp32 or of the operands' type; data NULL where not asked for, or of no elements
  Vector dsinks;     // one a head; data NULL likewise
  bool accumulate;   // dk, dv and dsinks, then fp32, continue from what they hold
  void *workspace;
  uint64_t workspace_size;

  uint64_t needs() const {
    return (forward.needs() & ~uint64_t(kLogSumExp | kSinks)) | when(dsinks.data, kSinks) |
           when(accumulate, kAccumulate);
  }
};

template <> struct Operation<AttentionBackward> : AnyOperation {
  static constexpr const char *name = "attention_backward";
  static Type input(const AttentionBackward &b) { return b.forward.q.type; }
  static Arithmetic arithmetic(const AttentionBackward &b) { return b.forward.arithmetic; }
  template <class Show> static void memory(const AttentionBackward &b, Show show) {
    Operation<Attention>::memory(b.forward, show);
    show(b.dout.data, b.dq.data, b.dk.data, b.dv.data, b.dsinks.data);
  }
  using Functions = FunctionList<pydet_attention_backward, pydet_attention_backward_workspace>;
};

template <class Problem> struct Hooks;  // core/kernel.h
template <> struct Hooks<Attention> {
  // Bytes that the kernel which is asked for by name, or else whichever may be chosen, uses; of the problem the extents,
  // types, arithmetic and lengths are there, and no data.
  uint64_t (*workspace)(const Attention &, const char *kernel);
};
template <> struct Hooks<AttentionBackward> {
  uint64_t (*workspace)(const AttentionBackward &, const char *kernel);  // likewise
};

}  // namespace pydet
