// Which gradients of attention the Hopper kernels take, and what they are told.

#include "gpu/nvidia/sm90/attention/backward.h"

#include <algorithm>
#include <cstring>

#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/maps.h"

namespace pydet {
namespace {

constexpr int64_t kMost = int64_t(1) << 28;  // of tokens
constexpr int64_t kMostD = 256;

// Of a head: tiles of rows that have numbers in the workspace.
int64_t row_tiles_of(const Attention &a) { return divide_up(a.queries, kBackwardTile) + (a.q_start ? a.sequences : 0); }
int64_t row_heads_of(const Attention &a) { return a.heads * (a.q_start ? 1 : a.sequences); }

// Two neighbours of a row are stored at once.
bool stores_pairs(const Heads &heads, int64_t sequences, int64_t head_count, int64_t tokens) {
  const auto even = [](int64_t stride, int64_t extent) { return extent <= 1 || stride % 2 == 0; };
  return reinterpret_cast<uintptr_t>(heads.data) % (2 * size_of(heads.type)) == 0 &&
         even(heads.sequence_stride, sequences) && even(heads.head_stride, head_count) &&
         even(heads.token_stride, tokens);
}

// ---- How keys are cut --------------------------------------------------------------------------------------------

// Microseconds of a step of a tile, and of the rest of it, on an H100 whose multiprocessors are all busy.
struct TileCost {
  double step, rest;
};
struct TileCosts {
  TileCost keys[3], queries;  // of each KeysCut
};
constexpr TileCosts kNarrowCosts = {{{1.03, 12}, {0.66, 10}, {0.61, 10}}, {1.08, 1.5}},  // of d <= 64
    kCosts = {{{1.7, 13}, {0.98, 11}, {0.9, 11}}, {1.82, 4.6}};                          // and <= 128

// How long the kernels of keys and of queries take together, if all sequences have all queries and keys. Tiles of keys
// begin in order, those that have the most to do first, as multiprocessors become free, and those of queries behind them.
// So either all multiprocessors are busy to the end, or one of the longest tiles of keys, which begin in waves, is waited
// for. Of 31 problems that were measured, it took the faster of the first two each time.
double microseconds(const AttentionBackward &b, KeysCut cut, int64_t sms) {
  const Attention &a = b.forward;
  const TileCosts &costs = std::max(a.d, a.e) <= 64 ? kNarrowCosts : kCosts;
  const Extent x = {0, a.queries, 0, 0, a.keys};
  const int64_t keys = cut == kWideKeys ? 128 : 64,
                side_by_side = a.sequences * a.groups * (cut == kHalvedKeys ? 2 : 1);
  double all = 0, end = 0;
  int64_t tiles = 0;
  for (int64_t key = 0; key < a.keys; key += keys) {
    const int64_t first = queries_of(a, x, key).first / kBackwardQueries,
                  last = divide_up(queries_of(a, x, std::min(key + keys, a.keys) - 1).end, kBackwardQueries);
    const double tile =
        costs.keys[cut].step * double(std::max(last - first, int64_t(0)) * (a.heads / a.groups)) + costs.keys[cut].rest;
    const int64_t waves = (tiles + side_by_side - 1) / sms;
    end = std::max(end, double(waves) * (tiles ? all / double(tiles) : tile) + tile);
    all += tile * double(side_by_side), tiles += side_by_side;
  }
  for (int64_t query = 0; b.dq.data && query < a.queries; query += kBackwardTile) {
    const int64_t first = keys_of(a, x, query).first / kKeysBlock,
                  last = divide_up(keys_of(a, x, std::min(query + kBackwardTile, a.queries) - 1).end, kKeysBlock);
    all += double(a.sequences * a.heads) *
           (costs.queries.step * double(std::max(last - first, int64_t(0))) + costs.queries.rest);
  }
  return std::max(end, all / double(sms));
}

KeysCut fastest_cut(const AttentionBackward &b, int64_t sms) {
  const Attention &a = b.forward;
  constexpr int64_t kMany = 8;  // tiles a multiprocessor: then nobody waits for one
  if (a.k_start || a.sequences * a.groups * divide_up(a.keys, kKeysBlock) > kMany * sms ||
      a.queries > kMany * sms * kBackwardTile)
    return kWideKeys;
  KeysCut best = kWideKeys;
  double least = microseconds(b, best, sms);
  for (KeysCut cut : {kNarrowKeys, kHalvedKeys}) {
    const double time = microseconds(b, cut, sms);
    if (time < least) best = cut, least = time;
  }
  return best;
}

// What backward_fused.cu wants of the workspace behind the rows' numbers, in this order.
struct FusedParts {
  int64_t pieces, sections;  // of 64 queries; of tiles of keys, at most
  bool may_ascend;
  uint64_t ints, sums;  // bytes
  uint64_t all() const { return ints + sums; }
  int64_t zeros() const { return pieces + sections + 2; }
};
FusedParts fused_parts(const Attention &a) {
  FusedParts x = {};
  x.pieces = row_heads_of(a) * row_tiles_of(a) * 2, x.sections = a.sequences * a.groups;
  x.may_ascend = a.causal && !a.q_start && !a.k_start && !a.k_length;
  x.ints = uint64_t(divide_up(x.zeros(), 32)) * 128;
  x.sums = uint64_t(x.pieces) * kBackwardQueries * (std::max(a.d, a.e) <= 64 ? 64 : 128) * 4;
  return x;
}
bool fits_fused(const Attention &a) { return std::max(a.d, a.e) <= 128; }

uint64_t rows_bytes(const Attention &a) {
  return uint64_t(row_heads_of(a)) * uint64_t(row_tiles_of(a)) * 2 * kRowPieceBytes;
}
constexpr uint64_t kTakenBytes = 128;  // in front of the rows' numbers

}  // namespace

bool attention_backward_fused_takes(const AttentionBackward &b) {
  const Attention &a = b.forward;
  if (!b.dq.data || !b.dk.data || !fits_fused(a) || a.first_key || !attention_backward_sm90_takes(b)) return false;
  return b.workspace_size >= kTakenBytes + rows_bytes(a) + fused_parts(a).all();
}
// By name alone: 0.67 to 1.15 of the two kernels' speed on an H100, without a pattern to choose by (bench/README.md).
bool attention_backward_by_name(const AttentionBackward &) { return false; }

bool attention_backward_sm90_takes(const AttentionBackward &b) {
  const Attention &a = b.forward;
  if (a.d > kMostD || a.d % kUnit || a.e > kMostD || a.e % kUnit || a.d <= 0 || a.e <= 0) return false;
  if (a.e > kKeysBlock && a.d <= kKeysBlock) return false;  // a tile has the blocks of its width
  if (a.queries <= 0 || a.keys <= 0 || a.sequences <= 0 || a.heads <= 0) return false;
  if (a.queries > kMost || a.keys > kMost || a.sequences > kMost || a.heads > 65535) return false;
  if (!a.q_start && a.sequences > 65535) return false;
  if (a.k_start && a.first_key) return false;
  const int64_t most_tiles = (row_tiles_of(a) + divide_up(a.keys, block_keys(a.d)) + a.sequences) * row_heads_of(a);
  if (most_tiles > kMost) return false;
  if (b.workspace_size < kTakenBytes + rows_bytes(a)) return false;
  return aligned(a.q, a.sequences, a.heads, a.queries) && aligned(a.k, a.sequences, a.groups, a.keys) &&
         aligned(a.v, a.sequences, a.groups, a.keys) && aligned(a.out, a.sequences, a.heads, a.queries) &&
         aligned(b.dout, a.sequences, a.heads, a.queries) &&
         (!b.dq.data || stores_pairs(b.dq, a.sequences, a.heads, a.queries)) &&
         (!b.dk.data ||
          (stores_pairs(b.dk, a.sequences, a.groups, a.keys) && stores_pairs(b.dv, a.sequences, a.groups, a.keys)));
}

uint64_t attention_backward_sm90_workspace(const AttentionBackward &b, const char *kernel) {
  const Attention &a = b.forward;
  const auto is = [&](const char *name) { return kernel && strcmp(kernel, name) == 0; };
  const bool fused = is(kAttentionBackwardFusedName);
  const bool cut = is(kKeysCutNames[kWideKeys]) || is(kKeysCutNames[kNarrowKeys]) || is(kKeysCutNames[kHalvedKeys]);
  if (kernel && !fused && !cut && !is(kAttentionBackwardName)) return 0;
  if (a.arithmetic != Arithmetic::sm90 && a.arithmetic != Arithmetic::automatic) return 0;
  return kTakenBytes + rows_bytes(a) + (fused && fits_fused(a) ? fused_parts(a).all() : 0);
}

namespace {

// `cut`: of d <= 128.
pydet_status run_backward(const AttentionBackward &b, const char *name, KeysCut cut, bool fused) {
  const Attention &a = b.forward;
  const int64_t group_heads = a.heads / a.groups, sms = gpu_multiprocessors(a.device.id);
  DeviceGuard guard(a.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  AttentionBackwardPlan p = {};
  EncodeTensorMap encode = nullptr;
  if (pydet_status status = find_encoder(name, &encode)) return status;
  const auto make = [&](const Heads &heads, int64_t extent, int64_t tokens, int64_t head_count, int box,
                        CUtensorMap *map, bool *head_moves, bool *sequence_moves) {
    const MapShape shape = map_of(heads, extent, tokens, head_count, a.sequences, box);
    *head_moves = shape.batch_shape[0] > 1, *sequence_moves = shape.batch_shape[1] > 1;
    return make_map(name, encode, shape, map);
  };
  AttentionPlan &to = p.a;
  p.cut = cut;
  const int block = block_keys(a.d), tile = cut == kWideKeys ? block : 64;
  if (pydet_status status =
          make(a.q, a.d, a.queries, a.heads, kBackwardQueries, &to.q, &p.head_moves_q, &to.sequence_moves_q))
    return status;
  if (pydet_status status =
          make(b.dout, a.e, a.queries, a.heads, kBackwardQueries, &p.dout, &p.head_moves_dout, &p.sequence_moves_dout))
    return status;
  if (pydet_status status = make(a.k, a.d, a.keys, a.groups, block, &to.k, &to.group_moves_k, &to.sequence_moves_k))
    return status;
  if (pydet_status status = make(a.v, a.e, a.keys, a.groups, block, &to.v, &to.group_moves_v, &to.sequence_moves_v))
    return status;
  if (pydet_status status = make(a.k, a.d, a.keys, a.groups, tile, &p.own_k, &to.group_moves_k, &to.sequence_moves_k))
    return status;
  if (pydet_status status = make(a.v, a.e, a.keys, a.groups, tile, &p.own_v, &to.group_moves_v, &to.sequence_moves_v))
    return status;

  to.sequences = int(a.sequences), to.queries = int(a.queries), to.keys = int(a.keys);
  to.heads = int(a.heads), to.group_heads = int(group_heads), to.d = int(a.d), to.e = int(a.e);
  to.q_start = a.q_start, to.k_start = a.k_start, to.k_length = a.k_length, to.first_key = a.first_key;
  to.uniform = !a.q_start && !a.k_start && !a.k_length && !a.first_key;
  const auto side = [](int64_t window) { return int(window == kNoWindow ? kMost : std::min(window, kMost)); };
  to.left = side(a.window_left), to.right = a.causal ? 0 : side(a.window_right);
  to.c = score_scale(a).c;
  to.in_q = a.q, to.in_k = a.k, to.in_v = a.v, to.out = a.out, to.lse = a.lse;
  p.in_dout = b.dout, p.dq = b.dq, p.dk = b.dk, p.dv = b.dv;
  p.scale = a.scale, p.accumulate = b.accumulate, p.behind_keys = b.dk.data != nullptr;
  p.row_tiles = int(row_tiles_of(a));
  p.words = p.taken = static_cast<int *>(b.workspace), p.zeros = 2;
  p.rows = static_cast<float *>(b.workspace) + kTakenBytes / 4;

  if (fused) {
    const FusedParts x = fused_parts(a);
    p.zeros = x.zeros();
    char *at = static_cast<char *>(b.workspace) + kTakenBytes + rows_bytes(a);
    p.words = reinterpret_cast<int *>(at), p.said = p.words + x.pieces;
    p.taken = p.said + x.sections, p.begun = p.taken + 1;
    p.sums = reinterpret_cast<float *>(at + x.ints);
    p.may_ascend = x.may_ascend;  // so many side by side that each of their tiles can have a block
    p.section = int(p.may_ascend ? std::max<int64_t>(sms / divide_up(a.keys, kFusedKeys), 1) : 1);
  }
  const int64_t sequences_of_packs = a.sequences;
  const int64_t key_tiles =
      a.k_start ? divide_up(a.keys, tile) + sequences_of_packs : divide_up(a.keys, tile) * a.sequences;
  const int64_t query_tiles = a.q_start ? row_tiles_of(a) : row_tiles_of(a) * a.sequences;
  Launch launch = {name, static_cast<gpu_stream>(b.stream), dim3(1), dim3(1)};
  launch.overlaps_previous = true;
  p.query_numbers = int(query_tiles * a.heads), p.query_blocks = int(std::min<int64_t>(p.query_numbers, sms));
  p.key_numbers = int(key_tiles * a.groups * (cut == kHalvedKeys ? 2 : 1));
  p.key_blocks = int(std::min<int64_t>(p.key_numbers, sms));
  const auto run = [&](auto type) -> pydet_status {
    constexpr Type kType = decltype(type)::value;
    if (fused) {
      p.numbers = int(key_tiles * a.groups);
      p.blocks = int(std::min<int64_t>(int64_t(p.numbers) + p.query_numbers, sms));
      if (pydet_status status = load_attention_backward_fused<kType>(name, p)) return status;
      if (pydet_status status = attention_backward_rows<kType>(launch, p)) return status;
      return attention_backward_fused<kType>(launch, p);
    }
    if (b.dk.data)
      if (pydet_status status = load_attention_backward_keys<kType>(name, p)) return status;
    if (b.dq.data)
      if (pydet_status status = load_attention_backward_queries<kType>(name, p)) return status;
    if (pydet_status status = attention_backward_rows<kType>(launch, p)) return status;
    if (b.dk.data)
      if (pydet_status status = attention_backward_keys<kType>(launch, p)) return status;
    if (!b.dq.data) return PYDET_OK;
    return attention_backward_queries<kType>(launch, p);
  };
  return with_type<kHalfTypes>(a.q.type, run);
}

}  // namespace

pydet_status attention_backward_sm90(const AttentionBackward &b) {
  const bool wide = std::max(b.forward.d, b.forward.e) > kKeysBlock;
  return run_backward(b, kAttentionBackwardName,
                      wide ? kWideKeys : fastest_cut(b, gpu_multiprocessors(b.forward.device.id)), false);
}
bool attention_backward_cut_takes(const AttentionBackward &b) {
  return fits_fused(b.forward) && attention_backward_sm90_takes(b);
}
template <KeysCut cut> pydet_status attention_backward_cut(const AttentionBackward &b) {
  return run_backward(b, kKeysCutNames[cut], cut, false);
}
template pydet_status attention_backward_cut<kWideKeys>(const AttentionBackward &);
template pydet_status attention_backward_cut<kNarrowKeys>(const AttentionBackward &);
template pydet_status attention_backward_cut<kHalvedKeys>(const AttentionBackward &);
pydet_status attention_backward_fused(const AttentionBackward &b) {
  return run_backward(b, kAttentionBackwardFusedName, kWideKeys, true);
}

}  // namespace pydet
