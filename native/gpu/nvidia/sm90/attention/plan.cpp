// Which attention the Hopper kernel takes, how it is shared out, and the tensor maps.

#include <algorithm>
#include <cstring>

#include "gpu/kernels.h"
#include "gpu/nvidia/sm90/attention/maps.h"
#include "core/choice.h"
#include "gpu/nvidia/sm90/gemm.h"

namespace pydet {
namespace {

constexpr int64_t kMost = int64_t(1) << 30;  // of tokens
constexpr int64_t kMostD = 256, kNarrowD = 128;
constexpr int64_t kMostMultiprocessors = 144;                       // of a Hopper
constexpr int kDecodeRows = 8, kDecodeUnit = 128, kDecodeBox = 64;  // of decode.cu: rows, and keys

// A page is as many boxes of a block as it takes, or a block as many pages.
bool pages_fit(const Attention &a) {
  const int64_t block = block_keys(a.d);
  return !a.first_key && !a.k_start && a.page_count > 0 &&
         (a.page_size % block == 0 || (block % a.page_size == 0 && a.page_size >= kAtomRows));
}

bool takes(const Attention &a) {
  const int64_t group_heads = a.heads / a.groups, padded = a.d <= 64 ? 64 : a.d <= kNarrowD ? kNarrowD : kMostD;
  if (a.d > kMostD || a.d % kUnit || a.e > padded || a.e % kUnit || a.e <= 0 || a.d <= 0) return false;
  if (a.queries <= 0 || a.keys <= 0 || a.sequences <= 0 || a.heads <= 0) return false;
  if (a.queries > kMost || a.keys > kMost || a.sequences > kMost || a.heads > kMost / std::max(a.queries, a.sequences))
    return false;
  if (a.pages && !pages_fit(a)) return false;
  const int64_t stored = a.pages ? a.page_count : a.sequences, tokens = a.pages ? a.page_size : a.keys;
  return aligned(a.q, a.sequences, a.heads, a.queries) && aligned(a.k, stored, a.groups, tokens) &&
         aligned(a.v, stored, a.groups, tokens) && aligned(a.out, a.sequences, a.heads, a.queries) && group_heads > 0 &&
         a.q.head_stride > 0;
}

// How rows become tiles.
struct Cut {
  int pack, warpgroup_queries, job_queries;
  int64_t tiles;  // about so many in all, of all heads
  bool wide, split;
};

int64_t tiles_of(const Attention &a, int pack, int job_queries) {
  const int64_t heads = a.heads / pack;
  if (!a.q_start) return a.sequences * heads * divide_up(a.queries, job_queries);
  // A sequence's last is half full, and it is one at least.
  return std::max(heads * a.sequences, divide_up(heads * (2 * a.queries + a.sequences * job_queries), 2 * job_queries));
}

int warpgroups_of(const Attention &a, bool wide) { return !wide ? 1 : a.d <= 64 ? 3 : 2; }

Cut cut_rows(const Attention &a, bool wide, int pack) {
  const int queries = kAttentionWarpgroupRows / pack, all = queries * warpgroups_of(a, wide);
  return {pack, queries, all, tiles_of(a, pack, all), wide, false};
}
// The heads of a group go into one tile where that makes fewer.
Cut cut_rows(const Attention &a, bool wide) {
  const int64_t group_heads = a.heads / a.groups;
  const Cut apart = cut_rows(a, wide, 1);
  if (group_heads == 1 || group_heads > kAttentionWarpgroupRows) return apart;
  const Cut packed = cut_rows(a, wide, int(group_heads));
  return packed.tiles < apart.tiles ? packed : apart;
}

// m and l, and o, of each segment of each row.
int64_t rows_of(const Attention &a) { return (a.q_start ? 1 : a.sequences) * a.queries * a.heads; }
uint64_t bytes_split(const Attention &a) {
  return uint64_t(rows_of(a)) * uint64_t(divide_up(a.keys, a.kv_chunk)) * uint64_t(a.e + 2) * sizeof(float);
}
uint64_t bytes_of_running(const Attention &a) {
  return a.d > kNarrowD && a.keys > a.kv_chunk ? 2 * uint64_t(kRunningBlocks) * kRunningBytes : 0;
}

// Whether packs' jobs go by their sizes. To find one takes longer than by level, which heads of a group each under a mask
// do not win back: their tiles see as many keys as others of their level.
bool in_sizes(const Attention &a) {
  return a.q_start && (a.heads > a.groups || (!a.causal && a.window_left == kNoWindow && a.window_right == kNoWindow));
}

// Of packs, whose sequences' lengths the device alone knows: the count from which blocks take their jobs, and which job
// followed which. It is cleared by a launch of its own, 2 us, which few tiles do not win back.
constexpr uint64_t kTakenBytes = 128;
constexpr int64_t kFewTiles = 400, kMostNumbers = int64_t(1) << 20;
int64_t numbers_of(const Attention &a, const Cut &cut) { return cut.tiles + a.sequences * (a.heads / cut.pack); }
uint64_t bytes_of_numbers(const Attention &a, const Cut &cut) {
  const int64_t numbers = numbers_of(a, cut);
  if (!in_sizes(a) || a.keys <= a.kv_chunk || cut.tiles < kFewTiles || numbers > kMostNumbers) return 0;
  return kTakenBytes + 4 * uint64_t(numbers);
}

// Whether decode.cu has them, rather than a tile of 64 rows.
bool decodes(const Attention &a, const Cut &cut) {
  return !cut.wide && !a.q_start && a.heads / a.groups * a.queries <= kDecodeRows;
}

// Where each can have a multiprocessor of its own, the smaller tiles are done sooner: of one head, and of one warpgroup.
// Else tiles of one warpgroup leave the tensor cores idle for longer, and load more in advance. Keys are split where tiles
// leave multiprocessors idle that would load more, or give some two where others have one; sequences whose lengths only
// the device knows may leave more so. For so many multiprocessors, or at least and at most.
Cut fastest(const Attention &a, int64_t least, int64_t sms) {
  const int64_t rows = a.heads / a.groups * (a.q_start ? divide_up(a.queries, a.sequences) : a.queries);
  Cut cut = cut_rows(a, rows > kAttentionWarpgroupRows);
  if (cut.wide && a.keys <= a.kv_chunk)
    for (bool wide : {false, true}) {
      const Cut apart = cut_rows(a, wide, 1);
      if (apart.tiles <= sms) return apart;
    }
  if (cut.wide && a.d <= 64 && a.keys <= a.kv_chunk) {
    const Cut few = cut_rows(a, false);
    if (2 * few.tiles <= sms) return few;
  }
  if (a.keys <= a.kv_chunk) return cut;
  // Of a pack the keys are those of all: one sequence seldom has most of them.
  if (a.q_start && a.k_start && a.keys <= 2 * a.kv_chunk) return cut;
  const bool known = !a.q_start && !a.k_start && !a.k_length && !a.first_key, narrow = a.d <= 64;
  cut.split = cut.tiles < (!cut.wide && !known ? 2 * sms : cut.wide || narrow ? sms * 3 / 4 : sms * 3 / 8);
  if (decodes(a, cut) && !narrow && a.keys > 2 * a.kv_chunk) cut.split |= cut.tiles > least && cut.tiles < 2 * sms;
  return cut;
}

// Bytes of keys and values: those that need no sections, and of a section.
constexpr int64_t kHeld = 24 << 20;
int64_t held_at_once(const Attention &a, bool causal) {
  return !causal ? 14 << 20 : a.d > kNarrowD ? 12'000'000 : 20'000'000;
}

// Jobs of a unit that stand together. All of them, unless keys and values are more than the L2 holds, and each is read
// again for every tile of queries. Of a causal mask tiles see more or fewer keys, and sections of few jobs may leave some
// blocks the larger tiles of each: only where jobs are many, or a group has few heads to read its keys at a time.
int64_t section_of(const Attention &a, const Cut &cut, int64_t sms) {
  const int64_t of_group = a.heads / a.groups / cut.pack, groups = a.sequences * a.groups, jobs = groups * of_group,
                bytes = 2 * a.keys * (a.d + a.e);
  const bool known = !a.q_start && !a.k_start && !a.k_length && !a.first_key,
             causal = a.causal && (a.window_left == kNoWindow || a.window_left >= a.keys / 2);
  if (!known || cut.split || !cut.wide || bytes > kHeld || groups * bytes <= kHeld) return jobs;
  if (causal && jobs < (of_group <= 2 ? sms / 2 : 4 * sms)) return jobs;
  const int64_t at_once = std::max<int64_t>(held_at_once(a, causal) / bytes, 1);
  return divide_up(groups, divide_up(groups, at_once)) * of_group;
}

// Blocks of a cluster that share keys and values: two, of heads that stand beside each other in a group, where pages are
// so small that a block takes long to load them: it loads half. Larger boxes are loaded soon enough by each, and blocks
// that wait for each other lose 1 to 5 %. Few tiles are not shared out as well by twos.
constexpr int64_t kSmallPage = 16;
int sharers_of(const Attention &a, const Cut &cut, int64_t sms) {
  const bool pages = a.pages && a.page_size <= kSmallPage,
             shares = pages && cut.wide && !cut.split && cut.pack == 1 && a.heads / a.groups % 2 == 0 && a.d > 64;
  return shares && cut.tiles >= 2 * sms ? 2 : 1;
}

// Whether spread.cu has them: all clusters at once, a block a multiprocessor.
bool spreads(const Attention &a, const Cut &cut, int64_t sms) {
  if (!decodes(a, cut) || (cut.split ? a.kv_chunk != kSpreadKeys : a.keys > std::min<int64_t>(a.kv_chunk, kSpreadKeys)))
    return false;
  return a.sequences * a.groups * divide_up(a.keys, kSpreadKeys) * spread_parts(int(a.d)) <= sms;
}

uint64_t workspace_of(const Attention &a, const Cut &cut) {
  return cut.split ? bytes_split(a) : cut.wide ? bytes_of_running(a) : 0;
}

}  // namespace

Choice attention_sm90_choose(const Attention &a, int variant) {
  if (!takes(a)) return {};
  const int64_t sms = gpu_multiprocessors(a.device.id);
  Cut cut = fastest(a, sms, sms);
  if (variant == kAnyVariant) {
    if (a.workspace_size < workspace_of(a, cut)) cut.split = false;
  } else {
    cut = cut_rows(a, variant == kAttentionWide || variant == kAttentionWideSplit);
    cut.split = variant == kAttentionWideSplit || variant == kAttentionFewSplit;
  }
  if (a.workspace_size < workspace_of(a, cut)) return {};
  return Choice(
      cut.wide ? (cut.split ? kAttentionWideSplit : kAttentionWide) : (cut.split ? kAttentionFewSplit : kAttentionFew),
      cut);
}

// Of every variant that may be chosen, or of the one that is asked for, on any Hopper.
uint64_t attention_sm90_workspace(const Attention &a, const char *kernel) {
  if (a.arithmetic != Arithmetic::sm90 && a.arithmetic != Arithmetic::automatic) return 0;
  const auto is = [&](int variant) { return kernel && strcmp(kernel, kAttentionNames[variant]) == 0; };
  if (is(kAttentionWideSplit) || is(kAttentionFewSplit)) return bytes_split(a);
  const bool few = is(kAttentionFew), wide = is(kAttentionWide);
  if (kernel && !few && !wide) return 0;
  const Cut cut = kernel ? cut_rows(a, wide) : fastest(a, 0, kMostMultiprocessors);
  return std::max(cut.split ? bytes_split(a) : 0, (few ? 0 : bytes_of_running(a)) + bytes_of_numbers(a, cut));
}

pydet_status attention_sm90(const Attention &a, const Choice &choice) {
  const char *name = kAttentionNames[choice.variant];
  auto cut = choice.cut<Cut>();
  const int64_t group_heads = a.heads / a.groups, sms = gpu_multiprocessors(a.device.id);
  const bool decode = decodes(a, cut), spread = spreads(a, cut, sms);
  const int sharers = sharers_of(a, cut, sms);
  if (decode) cut.pack = int(group_heads), cut.warpgroup_queries = cut.job_queries = kDecodeRows / cut.pack;
  const int block = decode && !spread ? kDecodeUnit : block_keys(a.d);
  DeviceGuard guard(a.device.id);
  if (guard.error() != kGpuSuccess) return device_error(name, guard.error());
  AttentionPlan p = {};
  EncodeTensorMap encode = nullptr;
  if (pydet_status status = find_encoder(name, &encode)) return status;
  const int most_keys = decode ? kDecodeBox : block / sharers;
  p.box_keys = int(a.pages ? std::min<int64_t>(most_keys, a.page_size) : most_keys);
  const int64_t stored = a.pages ? a.page_count : a.sequences, tokens = a.pages ? a.page_size : a.keys;
  const MapShape k = map_of(a.k, a.d, tokens, a.groups, stored, p.box_keys);
  MapShape v = map_of(a.v, a.e, tokens, a.groups, stored, p.box_keys);
  if (spread) v.box_extent = kSpreadColumns, v.swizzle_bytes = 2 * kSpreadColumns;
  // The heads of a group, and then tokens: so a box has the rows of a tile as they lie in it.
  MapShape q = map_of(a.q, a.d, group_heads, a.queries, a.sequences, cut.pack);
  q.row_stride = group_heads > 1 ? a.q.head_stride : kUnit;
  q.box_batch = cut.warpgroup_queries;
  p.sequence_moves_q = q.batch_shape[1] > 1;
  q.batch_shape[0] = a.queries, q.batch_shape[1] = a.groups, q.batch_shape[2] = p.sequence_moves_q ? a.sequences : 1;
  q.batch_stride[2] = q.batch_stride[1];
  q.batch_stride[0] = a.queries > 1 ? a.q.token_stride : kUnit;
  q.batch_stride[1] = a.groups > 1 ? group_heads * a.q.head_stride : kUnit;
  if (pydet_status status = make_map(name, encode, q, &p.q)) return status;
  if (pydet_status status = make_map(name, encoder_for(a.k, a.d, encode), k, &p.k)) return status;
  if (pydet_status status = make_map(name, encoder_for(a.v, a.e, encode), v, &p.v)) return status;
  p.group_moves_k = k.batch_shape[0] > 1, p.sequence_moves_k = k.batch_shape[1] > 1;
  p.group_moves_v = v.batch_shape[0] > 1, p.sequence_moves_v = v.batch_shape[1] > 1;

  p.sequences = int(a.sequences), p.queries = int(a.queries), p.keys = int(a.keys);
  p.heads = int(a.heads), p.group_heads = int(group_heads), p.d = int(a.d), p.e = int(a.e);
  p.q_start = a.q_start, p.k_start = a.k_start, p.k_length = a.k_length, p.first_key = a.first_key, p.pages = a.pages;
  p.pages_stride = a.pages_stride, p.page_size = int(a.page_size), p.page_count = int(a.page_count);
  p.uniform = !a.q_start && !a.k_start && !a.k_length && !a.first_key;
  p.sharers = sharers;
  p.pack = cut.pack, p.job_heads = int(a.heads / (cut.pack * sharers));
  p.warpgroup_queries = cut.warpgroup_queries, p.job_queries = cut.job_queries;
  p.segment_keys = int(std::min(a.kv_chunk, kMost)), p.segment_blocks = p.segment_keys / block;
  p.split = cut.split;
  p.one_segment = cut.split || a.keys <= a.kv_chunk;
  p.section = int(decode ? a.sequences * p.job_heads : section_of(a, cut, sms) / sharers);
  const int64_t key_bytes = 2 * (a.d + a.e);
  p.in_turn = (a.q_start ? in_sizes(a) : decode && !p.uniform) && !cut.split, p.halves = true;
  p.held = int(held_at_once(a, a.causal && a.window_left == kNoWindow) / key_bytes);
  p.most_held = int(kHeld / key_bytes);
  p.folds_later = a.causal || a.keys / 4 < a.kv_chunk;
  const auto side = [](int64_t window) { return int(window == kNoWindow ? kMost : std::min(window, kMost)); };
  p.left = side(a.window_left), p.right = a.causal ? 0 : side(a.window_right);
  const int64_t seen = int64_t(p.left) + p.right + p.job_queries;  // by a job
  for (p.most_size = 30; p.most_size > 7 && int64_t(1) << p.most_size > seen;) --p.most_size;
  p.c = score_scale(a).c;
  p.in_q = a.q, p.in_k = a.k, p.in_v = a.v, p.out = a.out, p.lse = a.lse;
  p.part_count = rows_of(a);
  if (p.split) {
    p.part_o = static_cast<float *>(a.workspace);
    p.parts = p.part_o + p.part_count * divide_up(a.keys, a.kv_chunk) * a.e;
  } else {
    p.running = static_cast<float *>(a.workspace);
    const uint64_t before = cut.wide ? bytes_of_running(a) : 0, bytes = sharers > 1 ? 0 : bytes_of_numbers(a, cut);
    if (bytes && a.workspace_size >= before + bytes) {
      p.taken = reinterpret_cast<int *>(static_cast<char *>(a.workspace) + before);
      p.followed = p.taken + kTakenBytes / 4, p.numbers = int(numbers_of(a, cut));
    }
  }

  const int64_t most_jobs =
      cut.tiles / sharers * (p.split ? divide_up(a.keys, a.kv_chunk) : 1) + (a.q_start ? a.sequences * p.job_heads : 0);
  int64_t blocks = std::min<int64_t>(decode && a.d <= kNarrowD ? 2 * sms : sms, most_jobs);
  if (!p.split && cut.wide && bytes_of_running(a)) blocks = std::min<int64_t>(blocks, kRunningBlocks);
  if (sharers > 1)
    blocks = sharers * std::min<int64_t>({sm90_clusters(a.device.id, sharers), most_jobs, blocks / sharers});
  if (spread) blocks = a.sequences * p.job_heads * divide_up(a.keys, kSpreadKeys);  // clusters
  Launch launch = {name, static_cast<gpu_stream>(a.stream), dim3(unsigned(blocks)), dim3(1)};
  launch.overlaps_previous = true;
  const auto run = [&](auto type) {
    constexpr Type kType = decltype(type)::value;
    if (p.taken) {
      if (pydet_status status = attention_load_sm90<kType>(name, p, cut.wide)) return status;
      launch.loaded = true;
      if (pydet_status status = attention_clear_sm90(launch, p)) return status;
    }
    const pydet_status status = spread   ? attention_spread_sm90<kType>(launch, p)
                                : decode ? attention_decode_sm90<kType>(launch, p)
                                         : attention_forward_sm90<kType>(launch, p, cut.wide);
    return status || !p.split ? status : attention_combine_sm90<kType>(launch, p);
  };
  return with_type<kHalfTypes>(a.q.type, run);
}

}  // namespace pydet
