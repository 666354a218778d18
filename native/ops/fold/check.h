// Argument checks of fold.
#pragma once

#include "ops/norm/check.h"

namespace pydet {

struct Flag {
  const char *name;
  int32_t value;
};

// The ranks of a fold across devices, which own `count` parts each.
inline pydet_status peers_of(const char *op, const pydet_fold_peers *given, int32_t count, Peers *peers) {
  if (!given) return PYDET_OK;
  PYDET_TRY(check_size<pydet_fold_peers>(op, "peers", given->struct_size));
  if (given->ranks < 1 || given->ranks > PYDET_FOLD_RANKS)
    return fail(PYDET_INVALID_VALUE, "%s: peers.ranks is %d, want 1 to %d", op, int(given->ranks), PYDET_FOLD_RANKS);
  if (given->rank < 0 || given->rank >= given->ranks)
    return fail(PYDET_INVALID_VALUE, "%s: peers.rank is %d, want 0 to %d", op, int(given->rank), int(given->ranks) - 1);
  for (const auto &[name, value] : {Flag{"gathered", given->gathered}, Flag{"scatter", given->scatter}})
    if (value != 0 && value != 1)
      return fail(PYDET_INVALID_VALUE, "%s: peers.%s is %d, want 0 or 1", op, name, int(value));
  peers->first_sums = given->first_sums;
  const int32_t want = given->rank == 0 ? 1 : given->first_sums;
  if (given->first_sums < 0 || given->first_sums > PYDET_FOLD_PARTS)
    return fail(PYDET_INVALID_VALUE, "%s: peers.first_sums is %d, want 0 to %d", op, int(given->first_sums),
                PYDET_FOLD_PARTS);
  if (given->first_sums && (given->gathered || count != want))
    return fail(PYDET_INVALID_VALUE, "%s: peers.first_sums is %d with %d parts of rank %d, gathered %d, want %d, not",
                op, int(given->first_sums), int(count), int(given->rank), int(given->gathered), int(want));
  if (given->from < 0 || given->from >= given->ranks)
    return fail(PYDET_INVALID_VALUE, "%s: peers.from is %d, want 0 to %d", op, int(given->from), int(given->ranks) - 1);
  if (reinterpret_cast<uintptr_t>(given->flag) % sizeof(uint64_t))
    return fail(PYDET_MISALIGNED, "%s: peers.flag is at %p, want a multiple of 8 bytes", op,
                static_cast<const void *>(given->flag));
  if (given->flag && (given->word == 0 || given->gathered || given->scatter || given->first_sums))
    return fail(PYDET_INVALID_VALUE,
                "%s: peers.flag is given with word %d, gathered %d, scatter %d, first_sums %d, "
                "want a word, and none of them",
                op, int(given->word != 0), int(given->gathered), int(given->scatter), int(given->first_sums));
  peers->from = given->from, peers->flag = given->flag;
  const int32_t total = given->gathered ? count : given->flag ? 1 : peers->parts_of_each(count) * given->ranks;
  if (total > PYDET_FOLD_PARTS)
    return fail(PYDET_INVALID_VALUE, "%s: count is %d on each of %d ranks, want at most %d parts of all", op,
                int(peers->parts_of_each(count)), int(given->ranks), PYDET_FOLD_PARTS);
  if (!given->memory) return fail(PYDET_NULL_POINTER, "%s: peers.memory is NULL, want an array of addresses", op);
  for (int32_t r = 0; r < given->ranks; ++r) {
    if (!given->memory[r]) return fail(PYDET_NULL_POINTER, "%s: peers.memory[%d] is NULL", op, int(r));
    if (reinterpret_cast<uintptr_t>(given->memory[r]) % 16)
      return fail(PYDET_MISALIGNED, "%s: peers.memory[%d] is at %p, want a multiple of 16 bytes", op, int(r),
                  given->memory[r]);
    peers->memory[r] = static_cast<char *>(given->memory[r]);
  }
  const uint64_t wanted = PYDET_FOLD_SIGNALS + uint64_t(total + given->ranks) * PYDET_FOLD_ROOM;
  if (given->memory_size < wanted)
    return fail(PYDET_WORKSPACE_TOO_SMALL, "%s: peers.memory_size is %" PRIu64 ", want %" PRIu64, op,
                given->memory_size, wanted);
  if (reinterpret_cast<uintptr_t>(given->fault) % sizeof(uint64_t))
    return fail(PYDET_MISALIGNED, "%s: peers.fault is at %p, want a multiple of 8 bytes", op,
                static_cast<void *>(given->fault));
  peers->ranks = given->ranks, peers->rank = given->rank;
  peers->gathered = given->gathered != 0, peers->scatter = given->scatter != 0;
  peers->timeout_ms = given->timeout_ms, peers->memory_size = given->memory_size;
  peers->word = given->word, peers->fault = given->fault;
  return PYDET_OK;
}

// The parts one by one, so that a call needs room for one of them alone; fold->tree, accumulate and peers are set.
inline pydet_status fold_of(const pydet_tensor *const *parts, int32_t count, const View &bias, const View &out,
                            Fold *fold) {
  if (!parts) return fail(PYDET_NULL_POINTER, "%s: parts is NULL, want an array of %d tensors", out.op, int(count));
  PYDET_TRY(contiguous(out));
  if (fold->accumulate && out.type != Type::f32)
    return fail(PYDET_INVALID_DTYPE, "%s: out is %s, want float32 under accumulate", out.op, type_name(out.type));
  // Parts are shaped like out but for the first extent, where one of them is a rank's share of the other.
  int64_t shape[kMaxDims];
  for (int i = 0; i < out.ndim; ++i) shape[i] = out.shape[i];
  const Peers &peers = fold->peers;
  if (peers.gathered != peers.scatter) {
    if (out.ndim < 1 || (peers.gathered && shape[0] % peers.ranks))
      return fail(PYDET_INVALID_SHAPE, "%s: out is %s, want a first extent that %d ranks share", out.op,
                  shape_text(out).text, int(peers.ranks));
    if (peers.gathered) shape[0] /= peers.ranks;
    else if (__builtin_mul_overflow(shape[0], int64_t(peers.ranks), shape))
      return fail(PYDET_OVERFLOW, "%s: the parts of %s from %d ranks have more than 2^63 - 1 elements", out.op,
                  shape_text(out).text, int(peers.ranks));
  }
  fold->bias_period = 1;
  if (bias.present()) {
    const bool of_row = bias.ndim == 1 && out.ndim > 1;
    PYDET_TRY(same_device(out, bias));
    PYDET_TRY(want_shape(bias, of_row ? out.shape + out.ndim - 1 : out.shape, of_row ? 1 : out.ndim));
    PYDET_TRY(contiguous(bias));
    PYDET_TRY(disjoint(out, bias));
    for (int i = 0; i < bias.ndim; ++i) fold->bias_period *= bias.shape[i];
  }
  for (int32_t i = 0; i < count; ++i) {
    char name[24];
    snprintf(name, sizeof name, "parts[%d]", int(i));
    View part;
    const bool may_be_made = peers.flag && count == 1 && !bias.present();
    PYDET_TRY(read(out.op, name, may_be_made ? kResult : kPart, parts[i], 0, &part));
    fold->copies = may_be_made && part.type == out.type;
    if (part.type != Type::f32 && !fold->copies)
      return fail(PYDET_INVALID_DTYPE, "%s: %s is %s, want float32 or out's %s", out.op, name, type_name(part.type),
                  type_name(out.type));
    PYDET_TRY(same_device(out, part));
    PYDET_TRY(want_shape(part, shape, out.ndim));
    PYDET_TRY(contiguous(part));
    if (!fold->copies || part.data != out.data) PYDET_TRY(disjoint(out, part));
    fold->parts[i] = reinterpret_cast<const float *>(part.data);
  }
  fold->device = out.device;
  fold->count = count;
  fold->size = out.empty() ? 0 : 1;
  for (int i = 0; i < out.ndim && fold->size; ++i) fold->size *= out.shape[i];
  fold->bias = vector_of(bias);
  fold->out = vector_of(out);
  return PYDET_OK;
}

}  // namespace pydet
