// Attention (NUMERICS.md, "Attention"), in every arithmetic:
//
//   per segment of kv_chunk keys, per block of 128 (D <= 128) or 64:  n = max(m, fl(c max s));  a = exp2(fl(m - n));  m = n
//     o = fl(o a);  l = fl(l a);  p_j = exp2(fmaf(s_j, c, -m));  l[j mod 8] += p_j;  o = chain of round(p_j), v_j, from o
//   segments join in ascending order;  out = round(fl(O fl(1 / L)))
//
// A task is some rows (the heads of a group for some queries) of one sequence. Block by block it packs the keys and values
// once for all its rows, then goes through the rows strip by strip: scores, weights, values. So memory is that of a few
// rows and one block, whatever the lengths. Few queries of long sequences are shared out by segments as well, whose parts
// wait in the workspace. A value that is not finite is kept from the rows that may not see its key, which are then computed
// one by one.

#include "cpu/attention_few.h"
#include "cpu/attention_rows.h"
#include "cpu/attention_small.h"

namespace pydet {
namespace {

// How a problem is shared out among tasks: as many blocks of rows of each group as the longest sequence has, of which a
// shorter one's last have nothing to do.
struct Plan {
  int64_t rows;      // of a task, at most
  int64_t blocks;    // of a group
  int64_t segments;  // of the longest sequence
  bool split;        // each segment is a task, whose part goes to the workspace
};

struct Task {
  int64_t sequence, group, first, rows;  // rows: of a group, query by query
  Extent extent;
};

inline Row row_of(const Attention &a, const Task &task, int64_t r) {
  const int64_t of_group = a.heads / a.groups, at = task.first + r;
  return {task.sequence, task.group * of_group + at % of_group, at / of_group, keys_of(a, task.extent, at / of_group)};
}

inline int64_t rows_of(const Attention &a, const Extent &extent) { return extent.queries * (a.heads / a.groups); }

// False: there is nothing to do. The last rows come first, which see most keys under causal.
inline bool find_task(const Attention &a, const Plan &plan, int64_t index, Task *task) {
  const int64_t sequence = index / plan.blocks / a.groups;
  const Extent extent = extent_of(a, sequence);
  const int64_t rows = rows_of(a, extent), first = (divide_up(rows, plan.rows) - 1 - index % plan.blocks) * plan.rows;
  if (first < 0) return false;
  *task = {sequence, index / plan.blocks % a.groups, first, least(plan.rows, rows - first), extent};
  return true;
}

inline const char *query_at(const Attention &a, const Task &task, const Row &row) {
  const int64_t token = task.extent.q_begin + row.query;
  return a.q.data + (row.sequence * a.q.sequence_stride + row.head * a.q.head_stride + token * a.q.token_stride) *
                        size_of(a.q.type);
}

// Parts of rows in the workspace: m and l, then o, of each segment of each row.
struct Parts {
  float *at(const Attention &a, const Plan &plan, const Task &task, const Row &row, int64_t segment) const {
    const int64_t token = (a.q_start ? 0 : row.sequence * a.queries) + task.extent.q_begin + row.query;
    return (float *)a.workspace + ((token * a.heads + row.head) * plan.segments + segment) * (a.e + 2);
  }
};

// ---- A task --------------------------------------------------------------------------------------------------------

// What a task works in. Of as many rows as fit in scratch memory beside one block.
struct Desk {
  explicit Desk(const Attention &a) : products(a) {}

  Products products;
  float *turn, *s, *o, *total;
  const char **key, **value;
  uint8_t *left_out;  // of each row of a strip, keys that are not allowed
  float *m, *l;
  RowSoFar *so_far;

  static int64_t columns(int64_t e) { return round_up(e, kSide); }
  void take(Arena &arena, const Attention &a, int64_t rows) {
    const int64_t keys = block_keys(a.d);
    products.take_panels(arena, a.d, a.e, keys);
    turn = arena.take<float>(kTurnFloats);
    s = arena.take<float>(round_up(products.strip, kWidth) * kSide);
    key = arena.take<const char *>(keys + kWidth), value = arena.take<const char *>(keys);
    left_out = arena.take<uint8_t>(products.strip * kSide);
    products.take_rows(arena, rows, a.d);
    o = arena.take<float>(rows * columns(a.e)), total = arena.take<float>(rows * columns(a.e));
    m = arena.take<float>(rows), l = arena.take<float>(rows * kWeightLanes);
    so_far = arena.take<RowSoFar>(rows);
  }
  // The most rows for which all fits: strips, if there is room for one.
  static int64_t most_rows(const Attention &a) {
    auto fits = [&](int64_t rows) {
      Arena arena(nullptr);
      Desk desk(a);
      desk.take(arena, a, rows);
      return arena.used() <= Scratch::kWalked;
    };
    const int64_t strip = Products(a).strip;
    int64_t rows = 1;
    while (rows < strip && fits(rows + 1)) ++rows;
    while (rows % strip == 0 && rows < 256 && fits(rows + strip)) rows += strip;
    return rows;
  }
};

struct Walk {
  const Attention &a;
  const Task &task;
  const ScoreScale scale;
  Desk &desk;
  const float c = a.bias.data ? 1.0f : scale.c;  // what a score still wants once it is masked
  const int64_t apart = task.rows * kSide;

  void begin() {
    desk.products.pack_queries(task.rows, a.d, desk.turn,
                               [&](int64_t r) { return query_at(a, task, row_of(a, task, r)); });
  }

  // One strip of rows against keys first ... first + count - 1 of a block.
  void strip(int64_t begin, int64_t rows, int64_t first, int64_t count, bool few, bool &packed, int &finite) {
    int64_t low = first + count, high = first;
    for (int64_t r = 0; r < rows; ++r) {
      const KeyRange keys = row_of(a, task, begin + r).keys;
      if (keys.first < keys.end) low = least(low, keys.first), high = most(high, keys.end);
    }
    count = least(count, high - first);
    if (count <= 0 || low >= first + count) return;
    const int64_t padded = round_up(count, 16);
    if (few)
      dispatch(a.q.type, [&](auto number) {
        scores_of_few<decltype(number)>(rows, desk.products.q, desk.key, count, a.d, desk.s);
      });
    else desk.products.scores(begin, rows, count, a.d, task.rows, desk.s);

    Top top[kMostStrip];
    bool excludes = false;
    for (int64_t r = 0; r < rows; ++r) {
      float *s = desk.s + r * kSide;
      mask_scores(a, scale, run_of(a, task.extent, row_of(a, task, begin + r), first, count), count, s);
      top[r] = top_of(s, padded);
      excludes |= top[r].excludes || c * top[r].score == -INFINITY;
    }
    bool careful = false;
    if (excludes) {
      if (!packed) desk.products.pack_values(desk.value, block_count, a.e, nullptr), packed = true;
      if (finite < 0) finite = all_finite(desk.products.v, values_packed);
      careful = !finite;
    }
    for (int64_t r = 0; r < rows; ++r) {
      float *s = desk.s + r * kSide, &m = desk.m[begin + r], *l = desk.l + (begin + r) * kWeightLanes;
      const float reference = reference_of(m, c * top[r].score);
      const bool none = reference == -INFINITY;
      if (careful)
        for (int64_t j = 0; j < padded; ++j) desk.left_out[r * kSide + j] = none || s[j] == -INFINITY;
      if (none) {
        memset(s, 0, size_t(padded) * sizeof(float));
        continue;
      }
      with_exp2(a, [&](auto exp2) {
        using Exp2 = decltype(exp2);
        const float factor = Exp2::of(m - reference);
        if (factor != 1.0f) {
          for (int i = 0; i < kWeightLanes; ++i) l[i] *= factor;
          scale_row(desk.products.flushes, desk.o + (begin + r) * kSide, apart, a.e, factor);
        }
        m = reference;
        weigh_scores<Exp2>(s, padded, c, reference, l);
      });
      round_all(a.q.type, s, padded);
    }
    if (!careful && few)
      return dispatch(a.q.type, [&](auto number) {
        weigh_few<decltype(number)>(rows, desk.s, desk.value, count, a.e, desk.o, apart);
      });
    if (!careful) {
      if (!packed) desk.products.pack_values(desk.value, block_count, a.e, nullptr), packed = true;
      desk.products.pack_weights(desk.s, rows, padded);
      desk.products.weigh(rows, count, block_count, a.e, desk.o + begin * kSide, apart);
      return;
    }
    for (int64_t r = 0; r < rows; ++r) {
      desk.products.pack_values(desk.value, count, a.e, desk.left_out + r * kSide);
      desk.products.pack_weights(desk.s + r * kSide, 1, padded);
      desk.products.weigh(1, count, count, a.e, desk.o + (begin + r) * kSide, apart);
    }
    packed = false;
  }

  // Rows' m, l and o of the keys [begin, end) of one segment.
  void segment(int64_t begin, int64_t end) {
    for (int64_t r = 0; r < task.rows; ++r) desk.m[r] = -INFINITY;
    memset(desk.l, 0, size_t(task.rows) * kWeightLanes * sizeof(float));
    memset(desk.o, 0, size_t(task.rows * Desk::columns(a.e)) * sizeof(float));
    const int64_t block = block_keys(a.d);
    const bool few = task.rows <= desk.products.few_rows;
    for (int64_t at = begin / block * block; at < end; at += block) {
      const int64_t first = most(at, begin) / 16 * 16;
      block_count = least(at + block, end) - first;
      find_keys(first, block_count);
      if (!few) desk.products.pack_keys(desk.key, block_count, a.d, desk.turn);
      values_packed = round_up(a.e, desk.products.panel()) * round_up(block_count, 16);
      bool packed = false;
      int finite = -1;
      for (int64_t r = 0; r < task.rows; r += desk.products.strip)
        strip(r, least(desk.products.strip, task.rows - r), first, block_count, few, packed, finite);
    }
  }

  // Where keys and values lie, run by run: to the end of a page, or of all.
  void find_keys(int64_t first, int64_t count) {
    const int64_t size = size_of(a.k.type), base = task.extent.k_begin + task.extent.first + first;
    const char *key = nullptr, *value = nullptr;
    for (int64_t j = 0, run = 0; j < count;
         ++j, --run, key += a.k.token_stride * size, value += a.v.token_stride * size) {
      if (run == 0) {
        key = a.k.data + (key_offset(a, a.k, task.sequence, base + j) + task.group * a.k.head_stride) * size;
        value = a.v.data + (key_offset(a, a.v, task.sequence, base + j) + task.group * a.v.head_stride) * size;
        run = a.pages ? a.page_size - (base + j) % a.page_size : count;
      }
      desk.key[j] = key, desk.value[j] = value;
    }
  }

  int64_t block_count = 0, values_packed = 0;
};

// The keys that any row of the task sees.
inline KeyRange keys_of_task(const Attention &a, const Task &task) {
  KeyRange all = {task.extent.keys, 0};
  for (int64_t r = 0; r < task.rows; ++r) {
    const KeyRange keys = row_of(a, task, r).keys;
    if (keys.first < keys.end) all = {least(all.first, keys.first), most(all.end, keys.end)};
  }
  return all;
}

// All segments of a task, or the one that is asked for, whose parts go to the workspace.
__attribute__((noinline)) void run_task(const Attention &a, const Plan &plan, const Task &task, int64_t only,
                                        Scratch &scratch) {
  Arena arena(scratch.data);
  Desk desk(a);
  desk.take(arena, a, task.rows);
  const KeyRange keys = keys_of_task(a, task);
  const int64_t h = a.kv_chunk, first = only >= 0 ? only : keys.first / h;
  const int64_t end = only >= 0 ? only + 1 : divide_up(keys.end, h), columns = Desk::columns(a.e);
  Walk walk = {a, task, score_scale(a), desk};
  walk.begin();
  const bool one = only < 0 && end - first <= 1;
  for (int64_t r = 0; r < task.rows; ++r) desk.so_far[r] = {-INFINITY, 0};
  if (!one || end <= first) memset(one ? desk.o : desk.total, 0, size_t(task.rows * columns) * sizeof(float));
  for (int64_t segment = first; segment < end; ++segment) {
    walk.segment(most(keys.first, segment * h), least(keys.end, (segment + 1) * h));
    for (int64_t r = 0; r < task.rows; ++r) {
      const RowSoFar part = {desk.m[r], joined(desk.l + r * kWeightLanes)};
      float *o = desk.o + r * kSide;
      if (only >= 0) {
        float *to = Parts().at(a, plan, task, row_of(a, task, r), only);
        to[0] = part.m, to[1] = part.l;
        for (int64_t e = 0; e < a.e; ++e) to[2 + e] = o[e / kSide * walk.apart + e % kSide];
      } else if (one) {
        desk.so_far[r] = part;
      } else {
        join_segment(a, part, o, desk.so_far[r], desk.total + r * kSide, walk.apart);
      }
    }
  }
  if (only >= 0) return;
  for (int64_t r = 0; r < task.rows; ++r) {
    float *o = (one ? desk.o : desk.total) + r * kSide;
    finish_row(a, task.extent, row_of(a, task, r), desk.so_far[r], o, walk.apart);
  }
}

// The parts of a task's rows, joined.
void join_parts(const Attention &a, const Plan &plan, const Task &task, Scratch &scratch) {
  float *o = (float *)scratch.data;
  for (int64_t r = 0; r < task.rows; ++r) {
    const Row row = row_of(a, task, r);
    RowSoFar so_far = {-INFINITY, 0};
    memset(o, 0, size_t(a.e) * sizeof(float));
    for (int64_t segment = 0; segment < plan.segments; ++segment) {
      const float *part = Parts().at(a, plan, task, row, segment);
      join_segment(a, {part[0], part[1]}, part + 2, so_far, o, kSide);
    }
    finish_row(a, task.extent, row, so_far, o, kSide);
  }
}

}  // namespace

template <> pydet_status attention<Isa>(const Attention &a) {
  constexpr double kWorthAThread = 1 << 18;
  const int64_t strip = Products(a).strip;
  Plan plan = {Desk::most_rows(a), 0, divide_up(a.keys, a.kv_chunk), false};
  int64_t tasks = 0, busy = 0, rows = 0;
  auto cut = [&](int64_t of_task) {
    plan.rows = of_task;
    plan.blocks = busy = rows = 0;
    for (int64_t s = 0; s < a.sequences; ++s) {
      const int64_t own = rows_of(a, extent_of(a, s)), blocks = divide_up(own, of_task);
      plan.blocks = most(plan.blocks, blocks), busy += blocks * a.groups, rows += own * a.groups;
    }
    tasks = plan.blocks * a.groups * a.sequences;
  };
  cut(plan.rows);
  const double work = double(rows) * double(a.keys) * double(a.d + a.e);
  const int64_t threads = threads_for(work, kWorthAThread);
  const uint64_t parts = bytes_of_parts(a);
  plan.split = busy < 2 * threads && parts && a.workspace && a.workspace_size >= parts;
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) {
    if (!scratch.large()) {
      plan.split = false;
      cut(1);
      for (int64_t i = 0; i < tasks; ++i) {
        Task task;
        if (find_task(a, plan, i, &task)) small_row(a, task.extent, row_of(a, task, 0), scratch);
      }
      return;
    }
    if (!plan.split && threads > 1)  // some tasks for every thread
      while (plan.rows > 2 * strip && busy < 4 * threads) cut(round_up(plan.rows / 2, strip));
    const int64_t each = plan.split ? plan.segments : 1;
    parallel(tasks * each, threads, scratch, [&](int64_t i, Scratch &own) {
      Task task;
      if (find_task(a, plan, i / each, &task)) run_task(a, plan, task, plan.split ? i % each : -1, own);
    });
    if (!plan.split) return;
    parallel(tasks, threads, scratch, [&](int64_t i, Scratch &own) {
      Task task;
      if (find_task(a, plan, i, &task)) join_parts(a, plan, task, own);
    });
  });
  return PYDET_OK;
}

}  // namespace pydet
