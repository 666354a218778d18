// Rows of a table by their numbers, and the table's gradient, once a call is checked.
#pragma once

#include "core/operation.h"

namespace pydet {

struct Embedding {
  Device device;
  void *stream;
  int64_t rows, inner, n;  // rows: tokens
  Matrix w;
  Columns ids;  // one a token
  Rows out;

  uint64_t needs() const { return when(inner < rows, kTwoStrides); }
};

template <> struct Operation<Embedding> : AlwaysIeee {
  static constexpr const char *name = "embedding";
  static Type input(const Embedding &e) { return e.w.type; }
  template <class Show> static void memory(const Embedding &e, Show show) { show(e.w.data, e.ids.data, e.out.data); }
  static bool lay_well(Embedding &embedding) { return give_room(embedding.out), true; }
  using Functions = FunctionList<pydet_embedding, pydet_embedding_backward, pydet_embedding_backward_workspace>;
  static Items<pydet_exchange_method> python();
  static Items<pydet_xla_handler> xla();
};

// The workspace: the tokens that count, by ascending id and then in their order; of each row of dw a bit, whether it has
// tokens; how many count.
struct SortedToken {
  uint32_t id, token;
};
constexpr int kTableWord = 32;  // rows of a word of bits

struct EmbeddingBackward {
  Device device;
  void *stream;
  int64_t rows, inner, n;  // rows: tokens, may be 0 (dw is then +0)
  Rows dout;
  Columns ids;
  Matrix dw;
  bool accumulate;
  int64_t padding;  // tokens of this id do not count; -1: no such
  void *workspace;
  uint64_t workspace_size;

  uint64_t needs() const {
    return when(inner < rows, kTwoStrides) | when(accumulate, kAccumulate) | when(padding >= 0, kPadding);
  }
  PYDET_INLINE SortedToken *sorted() const { return static_cast<SortedToken *>(workspace); }
  PYDET_INLINE uint32_t *has_tokens() const { return reinterpret_cast<uint32_t *>(sorted() + rows); }
  PYDET_INLINE uint32_t *count() const { return has_tokens() + (dw.rows + kTableWord - 1) / kTableWord; }
  // The id of a token, where it counts; -1 of another.
  PYDET_INLINE int64_t id_of(int64_t token) const {
    const int64_t id =
        ids.wide ? static_cast<const int64_t *>(ids.data)[token] : static_cast<const int32_t *>(ids.data)[token];
    return id >= 0 && id < dw.rows && id != padding ? id : -1;
  }
};
// Bytes of it for so many tokens and rows of the table, each of 32 bits.
constexpr uint64_t embedding_workspace(int64_t tokens, int64_t rows) {
  return sizeof(SortedToken) * uint64_t(tokens) + sizeof(uint32_t) * (uint64_t(rows + kTableWord - 1) / kTableWord + 1);
}

template <> struct Operation<EmbeddingBackward> : AlwaysIeee {
  static constexpr const char *name = "embedding_backward";
  static Type input(const EmbeddingBackward &e) { return e.dout.type; }
  template <class Show> static void memory(const EmbeddingBackward &e, Show show) {
    show(e.dout.data, e.ids.data, e.dw.data, e.workspace);
  }
  static bool lay_well(EmbeddingBackward &embedding) { return give_room(embedding.dout), true; }
};

}  // namespace pydet
