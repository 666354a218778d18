// The gradients of attention (NUMERICS.md, "Attention, backward"), in every arithmetic:
//
//   p = exp2(x - lse),   ds = p (dp scale - delta scale),   dp = chain of dout and v
//   dv, dk = chain over the queries of round(p) and dout, of round(ds) and q;   dq = sum over blocks of keys, the last
//   first, of their chains of round(ds) and k
//
// A task is some keys of a group, whose dk and dv it makes, or some rows of queries, whose dq it makes. Either walks the
// other side tile by tile: it packs a tile's vectors once for all its rows, then goes through the rows strip by strip. A
// strip's scores and dp are made again by each task that needs them. So memory is that of a few rows and one tile, whatever
// the lengths, and no task waits for another. Where something is not finite, pairs that are not allowed are kept from the
// sums, row by row.

#include "cpu/attention_backward_small.h"

namespace pydet {
namespace {

// Rows of a task are keys of a group (`of_keys`), or a group's queries, head by head for each.
struct Task {
  int64_t sequence, group, first, rows;
  Extent extent;
};

template <bool of_keys> int64_t rows_of(const Attention &a, const Extent &extent) {
  return of_keys ? extent.keys : extent.queries * (a.heads / a.groups);
}

// How one kind of tasks is shared out: as many blocks of rows of each group as the longest sequence has, of which a shorter
// one's last have nothing to do.
template <bool of_keys> struct Share {
  int64_t rows, blocks, busy;

  void cut(const Attention &a, int64_t of_task) {
    rows = of_task, blocks = busy = 0;
    for (int64_t s = 0; s < a.sequences; ++s) {
      const int64_t own = divide_up(rows_of<of_keys>(a, extent_of(a, s)), of_task);
      blocks = most(blocks, own), busy += own * a.groups;
    }
  }
  int64_t tasks(const Attention &a) const { return blocks * a.groups * a.sequences; }

  // What sees, or is seen by, most comes first under causal: the first keys, the last queries.
  bool find(const Attention &a, int64_t index, Task *task) const {
    const int64_t sequence = index / blocks / a.groups, block = index % blocks;
    const Extent extent = extent_of(a, sequence);
    const int64_t all = rows_of<of_keys>(a, extent);
    const int64_t first = (of_keys ? block : divide_up(all, rows) - 1 - block) * rows;
    *task = {sequence, index / blocks % a.groups, first, within(all - first, 0, rows), extent};
    return first >= 0 && task->rows > 0;
  }
};

// What a task works in. `one` makes scores and sums with out's columns, `two` dp and sums with those of q and k.
template <bool of_keys> struct Desk {
  explicit Desk(const Attention &a) : one(a), two(a) {}

  Products one, two;
  float *turn, *s, *dp, *tanhs;
  const char **first, **second;  // the tile's vectors, of D and of E
  uint8_t *left_out;
  float *twos, *deltas;          // behind the pairs of a run
  float *row_twos, *row_deltas;  // behind each row of queries
  float *d_sums, *more;          // dk and dv; dq and the chain of a block
  int64_t tile;                  // pairs of a run, at most

  static int64_t columns(int64_t width) { return round_up(width, kSide); }
  void take(Arena &arena, const Attention &a, int64_t rows, int64_t of_tile) {
    tile = of_tile;
    one.take_panels(arena, a.d, of_keys ? a.e : 0, tile), two.take_panels(arena, a.e, a.d, tile);
    turn = arena.take<float>(kTurnFloats);
    const int64_t strip = round_up(one.strip, kWidth) * kSide;
    s = arena.take<float>(strip), dp = arena.take<float>(strip), tanhs = arena.take<float>(a.softcap ? strip : 0);
    first = arena.take<const char *>(tile + kWidth), second = arena.take<const char *>(tile + kWidth);
    left_out = arena.take<uint8_t>(one.strip * kSide);
    twos = arena.take<float>(kSide), deltas = arena.take<float>(kSide);
    one.take_rows(arena, rows, a.d), two.take_rows(arena, rows, a.e);
    row_twos = arena.take<float>(rows), row_deltas = arena.take<float>(rows);
    d_sums = arena.take<float>(rows * columns(a.d)), more = arena.take<float>(rows * columns(of_keys ? a.e : a.d));
  }
  // The most rows for which all fits beside such a tile: strips, if there is room for one.
  static int64_t most_rows(const Attention &a, int64_t tile) {
    auto fits = [&](int64_t rows) {
      Arena arena(nullptr);
      Desk desk(a);
      desk.take(arena, a, rows, tile);
      return arena.used() <= Scratch::kWalked;
    };
    const int64_t strip = Products(a).strip;
    int64_t rows = 1;
    while (rows < strip && fits(rows + 1)) ++rows;
    while (rows % strip == 0 && rows < 256 && fits(rows + strip)) rows += strip;
    return rows;
  }
  // A large tile is packed for many rows, which then need room too.
  static int64_t best_tile(const Attention &a) {
    int64_t tile = of_keys ? kQueriesBlock : block_keys(a.d);
    while (tile > 16 && most_rows(a, tile) < 64) tile /= 2;
    return tile;
  }
};

template <bool of_keys> struct Walk {
  const AttentionBackward &b;
  const Attention &a;
  const Task &task;
  Desk<of_keys> &desk;
  const ScoreScale scale = score_scale(a);
  const float c = a.bias.data ? 1.0f : scale.c;
  const int64_t apart = task.rows * kSide, of_group = a.heads / a.groups;

  // The tile: its first query or key and how many, of which head where it is of queries.
  int64_t head = 0, tile_first = 0, count = 0;
  bool packed = false, some_absent = false;
  int finite = -1;

  int64_t head_of(int64_t r) const { return task.group * of_group + (task.first + r) % of_group; }
  int64_t query_of(int64_t r) const { return (task.first + r) / of_group; }
  // Keys that the row sees, or queries that see it.
  std::pair<int64_t, int64_t> seen(int64_t r) const {
    if constexpr (of_keys) {
      const QueryRange range = queries_of(a, task.extent, task.first + r);
      return {range.first, range.end};
    } else {
      const KeyRange range = keys_of(a, task.extent, query_of(r));
      return {range.first, range.end};
    }
  }
  Run run(int64_t r) const {
    if constexpr (of_keys) {
      const int64_t key = task.first + r;
      return run_of_key(a, task.extent, task.sequence, head, key, queries_of(a, task.extent, key), tile_first, count);
    } else {
      const Row row = {task.sequence, head_of(r), query_of(r), keys_of(a, task.extent, query_of(r))};
      return run_of(a, task.extent, row, tile_first, count);
    }
  }

  char *query_at(const Heads &heads, int64_t of_head, int64_t query) const {
    return vector_at(heads, task.sequence, of_head, task.extent.q_begin + query);
  }
  char *key_at(const Heads &heads, int64_t key) const {
    return vector_at(heads, task.sequence, task.group, key_place(task.extent, key));
  }

  void begin() {
    desk.one.pack_queries(task.rows, a.d, desk.turn, [&](int64_t r) {
      return of_keys ? key_at(a.k, task.first + r) : query_at(a.q, head_of(r), query_of(r));
    });
    desk.two.pack_queries(task.rows, a.e, desk.turn, [&](int64_t r) {
      return of_keys ? key_at(a.v, task.first + r) : query_at(b.dout, head_of(r), query_of(r));
    });
    for (int64_t r = 0; r < task.rows; ++r) {
      if constexpr (of_keys) {
        const int64_t key = task.first + r;
        begin_sums(desk.one.flushes, key_at(b.dk, key), b.accumulate, a.d, desk.d_sums + r * kSide, apart);
        begin_sums(desk.one.flushes, key_at(b.dv, key), b.accumulate, a.e, desk.more + r * kSide, apart);
      } else {
        const RowBehind row = behind(b, task.extent, task.sequence, head_of(r), query_of(r));
        desk.row_twos[r] = row.twos, desk.row_deltas[r] = row.delta_scale;
        begin_sums(false, nullptr, false, a.d, desk.d_sums + r * kSide, apart);
      }
    }
  }
  void end() {
    for (int64_t r = 0; r < task.rows; ++r) {
      if constexpr (of_keys) {
        const int64_t key = task.first + r;
        end_sums(key_at(b.dk, key), b.dk.type, a.d, desk.d_sums + r * kSide, apart);
        end_sums(key_at(b.dv, key), b.dv.type, a.e, desk.more + r * kSide, apart);
      } else {
        end_sums(query_at(b.dq, head_of(r), query_of(r)), b.dq.type, a.d, desk.d_sums + r * kSide, apart);
      }
    }
  }

  // The tile's vectors as those of which sums are made, but for those that are left out.
  void pack_values(const uint8_t *left_out) {
    if constexpr (of_keys) desk.one.pack_values(desk.second, count, a.e, left_out);
    desk.two.pack_values(desk.first, count, a.d, left_out);
  }
  bool values_are_finite() {
    const int64_t deep = round_up(count, 16);
    bool all = all_finite(desk.two.v, round_up(a.d, desk.one.panel()) * deep);
    if constexpr (of_keys) all &= all_finite(desk.one.v, round_up(a.e, desk.one.panel()) * deep);
    return all;
  }
  // Sums of rows from `r` on take the weights and gradients that lie in `at`'s rows of the strip.
  void add(int64_t r, int64_t at, int64_t rows) {
    const int64_t padded = round_up(count, 16);
    if constexpr (of_keys) {
      desk.one.pack_weights(desk.s + at * kSide, rows, padded);
      desk.one.weigh(rows, count, count, a.e, desk.more + r * kSide, apart);
    }
    desk.two.pack_weights(desk.dp + at * kSide, rows, padded);
    desk.two.weigh(rows, count, count, a.d, (of_keys ? desk.d_sums : desk.more) + r * kSide, apart);
  }

  void strip(int64_t begin, int64_t rows) {
    Run runs[kMostStrip];
    bool sees = false;
    for (int64_t r = 0; r < rows; ++r) runs[r] = run(begin + r), sees |= runs[r].begin < runs[r].end;
    if (!sees) return;
    const int64_t padded = round_up(count, 16);
    desk.one.scores(begin, rows, count, a.d, task.rows, desk.s);
    desk.two.scores(begin, rows, count, a.e, task.rows, desk.dp);
    bool excludes = some_absent;
    for (int64_t r = 0; r < rows; ++r) {
      float *s = desk.s + r * kSide;
      mask_scores(a, scale, runs[r], count, s, a.softcap ? desk.tanhs + r * kSide : nullptr);
      excludes |= top_of(s, padded).excludes || (!of_keys && desk.row_twos[begin + r] == -INFINITY);
    }
    if (!packed) pack_values(nullptr), packed = true;
    if (excludes && finite < 0) finite = values_are_finite();
    const bool careful = excludes && !finite;
    for (int64_t r = 0; r < rows; ++r) {
      float *s = desk.s + r * kSide, *dp = desk.dp + r * kSide;
      if constexpr (!of_keys)
        for (int64_t j = 0; j < padded; ++j)
          desk.twos[j] = desk.row_twos[begin + r], desk.deltas[j] = desk.row_deltas[begin + r];
      if (careful)
        for (int64_t j = 0; j < padded; ++j)
          desk.left_out[r * kSide + j] = s[j] == -INFINITY || desk.twos[j] == -INFINITY;
      gradients(a, c, padded, desk.twos, desk.deltas, a.softcap ? desk.tanhs + r * kSide : nullptr, s, dp);
      if constexpr (of_keys) round_all(a.q.type, s, padded);
      round_all(a.q.type, dp, padded);
    }
    if (!careful) return add(begin, 0, rows);
    for (int64_t r = 0; r < rows; ++r) {
      pack_values(desk.left_out + r * kSide);
      add(begin + r, r, 1);
    }
    packed = false;
  }

  void tile(int64_t first, int64_t of_tile) {
    tile_first = first, count = of_tile, packed = false, some_absent = false, finite = -1;
    for (int64_t j = 0; j < count; ++j) {
      if constexpr (of_keys) {
        const RowBehind row = behind(b, task.extent, task.sequence, head, first + j);
        desk.twos[j] = row.twos, desk.deltas[j] = row.delta_scale, some_absent |= row.twos == -INFINITY;
        desk.first[j] = query_at(a.q, head, first + j), desk.second[j] = query_at(b.dout, head, first + j);
      } else {
        desk.first[j] = key_at(a.k, first + j), desk.second[j] = key_at(a.v, first + j);
      }
    }
    for (int64_t j = count; j < round_up(count, 16); ++j) desk.twos[j] = desk.deltas[j] = 0;
    desk.one.pack_keys(desk.first, count, a.d, desk.turn);
    desk.two.pack_keys(desk.second, count, a.e, desk.turn);
    for (int64_t r = 0; r < task.rows; r += desk.one.strip) strip(r, least(desk.one.strip, task.rows - r));
  }

  // Tiles of one block of queries or keys, as far as they are in [low, high).
  void tiles(int64_t block, int64_t size, int64_t low, int64_t high) {
    const int64_t end = least(block + size, high);
    const int64_t begin = block + most(low - block, 0) / desk.tile * desk.tile;
    for (int64_t at = begin; at < end; at += desk.tile) tile(at, least(desk.tile, end - at));
  }

  void all() {
    begin();
    int64_t low = of_keys ? task.extent.queries : task.extent.keys, high = 0;
    for (int64_t r = 0; r < task.rows; ++r)
      if (const auto [first, end] = seen(r); first < end) low = least(low, first), high = most(high, end);
    const int64_t size = of_keys ? kQueriesBlock : block_keys(a.d);
    if constexpr (of_keys) {
      for (int64_t block = first_query(a, task.extent); block < high; block += size)
        for (int64_t h = 0; h < of_group; ++h) head = task.group * of_group + h, tiles(block, size, low, high);
    } else {
      for (int64_t block = divide_up(high, size) * size - size; block + size > low && block >= 0; block -= size) {
        const int64_t sums = task.rows * desk.columns(a.d);
        memset(desk.more, 0, size_t(sums) * sizeof(float));
        tiles(block, size, low, high);
        for (int64_t i = 0; i < sums; ++i) desk.d_sums[i] += desk.more[i];
      }
    }
    end();
  }
};

template <bool of_keys>
__attribute__((noinline)) void run_task(const AttentionBackward &b, const Task &task, int64_t tile, Scratch &scratch) {
  Arena arena(scratch.data);
  Desk<of_keys> desk(b.forward);
  desk.take(arena, b.forward, task.rows, tile);
  Walk<of_keys> walk = {b, b.forward, task, desk};
  walk.all();
}

// One after another in the smallest scratch memory.
template <bool of_keys>
void run_small(const AttentionBackward &b, const Share<of_keys> &share, Scratch &scratch) {
  const Attention &a = b.forward;
  for (int64_t i = 0; i < share.tasks(a); ++i) {
    Task task;
    if (!share.find(a, i, &task)) continue;
    const int64_t of_group = a.heads / a.groups;
    if constexpr (of_keys) small_key(b, task.extent, task.sequence, task.group, task.first, scratch);
    else
      small_query(b, task.extent, task.sequence, task.group * of_group + task.first % of_group, task.first / of_group,
                  scratch);
  }
}

}  // namespace

template <> pydet_status attention_backward<Isa>(const AttentionBackward &b) {
  constexpr double kWorthAThread = 1 << 18;
  const Attention &a = b.forward;
  const int64_t strip = Products(a).strip;
  const bool keys = b.dk.data || b.dv.data, queries = b.dq.data;
  const int64_t key_tile = Desk<true>::best_tile(a), query_tile = Desk<false>::best_tile(a);
  Share<true> of_keys = {};
  Share<false> of_queries = {};
  of_keys.cut(a, Desk<true>::most_rows(a, key_tile));
  of_queries.cut(a, Desk<false>::most_rows(a, query_tile));
  double rows = 0;
  for (int64_t s = 0; s < a.sequences; ++s) rows += double(rows_of<false>(a, extent_of(a, s)) * a.groups);
  const int64_t threads = threads_for(4 * rows * double(a.keys) * double(a.d + a.e), kWorthAThread);
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) {
    const bool small = !scratch.large();
    if (keys && !b.accumulate)
      for (int64_t i = 0; i < a.sequences * a.groups; ++i)
        clear_padding(b, extent_of(a, i / a.groups), i / a.groups, i % a.groups);
    if (small) {
      of_keys.cut(a, 1), of_queries.cut(a, 1);
      if (keys) run_small(b, of_keys, scratch);
      if (queries) run_small(b, of_queries, scratch);
    } else {
      auto share_more = [&](auto &share) {  // some tasks for every thread
        while (threads > 1 && share.rows > 2 * strip && share.busy < 4 * threads)
          share.cut(a, round_up(share.rows / 2, strip));
      };
      share_more(of_keys), share_more(of_queries);
      const int64_t first = keys ? of_keys.tasks(a) : 0, then = queries ? of_queries.tasks(a) : 0;
      parallel(first + then, threads, scratch, [&](int64_t i, Scratch &own) {
        Task task;
        if (i < first && of_keys.find(a, i, &task)) run_task<true>(b, task, key_tile, own);
        if (i >= first && of_queries.find(a, i - first, &task)) run_task<false>(b, task, query_tile, own);
      });
    }
    if (b.dsinks.data) parallel(a.heads, threads, scratch, [&](int64_t head, Scratch &) { sum_sinks(b, head); });
  });
  return PYDET_OK;
}

}  // namespace pydet
