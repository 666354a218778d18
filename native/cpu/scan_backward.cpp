// Gradients of recurrences over tokens (NUMERICS.md, "Scans", "Their gradients"). The bits are those of every other backend.
//
// A task has a sequence and some columns side by side, and walks the tokens from the last to the first.

#include "cpu/scan_rows.h"

namespace pydet {
namespace {

// ---- The walk back -----------------------------------------------------------------------------------------------------

using V = Vectors<kColumns>;
static_assert(kColumns == kScanColumns, "a task has a block of columns");

// The sum over a block's columns, of which `count` are there.
inline float sum_of_columns(const V &terms, int64_t count) {
  alignas(64) float s[kColumns];
  terms.to(s);
  for (int64_t e = count; e < kColumns; ++e) s[e] = 0.0f;
  for (int h = kColumns / 2; h; h /= 2)
    for (int e = 0; e < h; ++e) s[e] = s[e] + s[e + h];
  return s[0];
}

// What a task works in: the gradient of the state, operands of a token, and states before as many tokens as fit.
struct Room {
  float *gradient, *first, *second, *free;  // free: two blocks
  float *slots;
  int64_t count, size;  // of slots, each of so many floats

  Room(const ScanWorkspace &workspace, Scratch &own) : size(workspace.block_floats()) {
    const int64_t fixed = workspace.own_floats() - size;
    gradient = own.large() ? (float *)own.data : workspace.own();
    free = gradient + size, first = free + 2 * size, second = first + workspace.states;
    slots = gradient + fixed;
    count = own.large() ? (Scratch::kWalked / int64_t(sizeof(float)) - fixed) / size : 1;
    if (count > checkpoint_tokens(workspace.states)) count = checkpoint_tokens(workspace.states);
  }
  float *slot(int64_t i) const { return slots + i * size; }
};
static_assert((4 * kColumns + 2) * kMostStates * int64_t(sizeof(float)) <= Scratch::kWalked, "those and one slot");

// Walks a sequence's tokens forwards and then backwards: step(t, from, to) makes the states behind a token of those before
// it, back(t, before) takes a token back.
template <class Task> void walk_back(Task &task, const Room &room, int64_t sequence, int64_t group, int64_t block) {
  const Sequences::Range range = task.range;
  const ScanWorkspace &workspace = task.p.workspace;
  const int64_t every = checkpoint_tokens(workspace.states);
  const size_t bytes = size_t(room.size) * sizeof(float);
  const int64_t begin = range.batch * task.p.sequences.tokens + range.begin, tokens = range.end - range.begin;
  const auto kept = [&](int64_t after) { return workspace.states_at(sequence, begin, after, group, block); };
  task.states_from(room.slot(0));
  for (int64_t i = 0; i < tokens; ++i) {
    if (i % every == 0) memcpy(kept(i), room.slot(0), bytes);
    if (i + 1 < tokens) task.step(range.begin + i, room.slot(0), room.slot(0));
  }
  for (int64_t end = tokens; end > 0;) {
    const int64_t from = (end - 1) / every * every;
    const int64_t low = end - from > room.count ? end - room.count : from;
    memcpy(room.slot(0), kept(from), bytes);
    for (int64_t i = from; i < low; ++i) task.step(range.begin + i, room.slot(0), room.slot(0));
    for (int64_t i = low; i + 1 < end; ++i) task.step(range.begin + i, room.slot(i - low), room.slot(i - low + 1));
    for (; end > low; --end) task.back(range.begin + end - 1, room.slot(end - 1 - low));
  }
}

// ---- The selective scan ------------------------------------------------------------------------------------------------

struct SelectiveBack {
  const SelectiveScanBackward &p;
  const int64_t sequence, group, block;
  const Neighbours of;
  const Room room;
  const Sequences::Range range = p.sequences.range(sequence);
  float *const gradient = room.gradient, *const b = room.first, *const c = room.second;
  float *const of_states = room.free, *const da = room.free + room.size;  // with a decay for each state
  alignas(64) float a[kColumns] = {}, d[kColumns] = {}, x[kColumns] = {}, dt[kColumns] = {}, u[kColumns] = {};
  alignas(64) float dy[kColumns] = {}, decay[kColumns] = {};

  void run() {
    if (!p.each_state) of.read_heads(p.a, 0, p.a.stride[0], a);
    for (int64_t n = 0; p.each_state && n < p.states; ++n) {
      memset(of_states + n * kColumns, 0, sizeof a);
      of.read_heads(p.a, n * p.a.stride[1], p.a.stride[0], of_states + n * kColumns);
    }
    if (p.each_state) memset(da, 0, size_t(room.size) * sizeof(float));
    if (p.d.data) of.read_heads(p.d, 0, p.d.stride[0], d);
    read_states(p.dfinal, gradient);
    walk_back(*this, room, sequence, group, block);
    for (int64_t n = 0; p.dinitial.data && n < p.states; ++n)
      of.write(p.dinitial, sequence * p.dinitial.stride[0] + n * p.dinitial.stride[3], p.dinitial.stride[1],
               p.dinitial.stride[2], gradient + n * kColumns);
    const int64_t begin = range.batch * p.sequences.tokens + range.begin;
    if (p.each_state)
      memcpy(p.workspace.states_at(sequence, begin, 0, group, block), da, size_t(room.size) * sizeof(float));
  }
  void states_from(float *state) const { read_states(p.initial, state); }

  void step(int64_t t, const float *from, float *to) {
    read_token(t);
    const V input = V::of(u);
    for (int64_t n = 0; n < p.states; ++n)
      fma(b[n], input, decay_of(n) * V::of(from + n * kColumns)).to(to + n * kColumns);
  }

  void back(int64_t t, const float *before) {
    read_token(t);
    read_row(p.c, at(p.c, t) + group * p.c.stride[2], p.c.stride[3], p.states, c);
    of.read(p.dy, at(p.dy, t), p.dy.stride[2], p.dy.stride[3], dy);
    const V input = V::of(u), of_y = V::of(dy);
    const int64_t token = range.batch * p.sequences.tokens + t;
    float *const db = p.workspace.row(0, token, group, block), *const dc = p.workspace.row(1, token, group, block);
    const V v = sum_of_lanes<V>(p.states, [&](int64_t n, const V &sum) {
      const V g = fma(c[n], of_y, V::of(gradient + n * kColumns));
      g.to(gradient + n * kColumns);
      db[n] = sum_of_columns(input * g, of.count);
      return fma(b[n], g, sum);
    });
    const V l = sum_of_lanes<V>(p.states, [&](int64_t n, const V &sum) {
      const V g = V::of(gradient + n * kColumns), factor = decay_of(n), r = factor * V::of(before + n * kColumns);
      dc[n] = sum_of_columns(of_y * fma(b[n], input, r), of.count);
      (factor * g).to(gradient + n * kColumns);
      if (!p.each_state) return fma(g, r, sum);
      const V e = g * r;
      fma(V::of(dt), e, V::of(da + n * kColumns)).to(da + n * kColumns);
      return fma(V::of(of_states + n * kColumns), e, sum);
    });
    alignas(64) float of_u[kColumns], of_decay[kColumns], dx[kColumns], terms[3][kColumns];
    v.to(of_u), l.to(of_decay);
    for (int i = 0; i < kColumns; ++i) {
      dx[i] = p.d.data ? fmaf(dt[i], of_u[i], d[i] * dy[i]) : dt[i] * of_u[i];
      terms[0][i] = x[i] * of_u[i], terms[1][i] = of_decay[i], terms[2][i] = dy[i] * x[i];
    }
    of.write(p.dx, at(p.dx, t), p.dx.stride[2], p.dx.stride[3], dx);
    for (int64_t i = 0; i < of.count;) {
      const int64_t column = of.first + i, head = column / p.width, left = (head + 1) * p.width - column;
      const int64_t end = i + left < of.count ? i + left : of.count, in_group = head % (p.heads / p.groups);
      const int64_t part = block - in_group * p.width / kColumns;
      for (int which = 0; which < 3; ++which) {
        float sum = 0.0f;
        for (int64_t e = i; e < end; ++e) sum = sum + terms[which][e];
        p.workspace.of_head(which, token, head)[part] = sum;
      }
      i = end;
    }
  }

 private:
  int64_t at(const Strided &operand, int64_t t) const {
    return range.batch * operand.stride[0] + t * operand.stride[1];
  }
  void read_states(const Strided &from, float *to) const {
    memset(to, 0, size_t(room.size) * sizeof(float));
    for (int64_t n = 0; from.data && n < p.states; ++n)
      of.read(from, sequence * from.stride[0] + n * from.stride[3], from.stride[1], from.stride[2], to + n * kColumns);
  }
  void read_token(int64_t t) {
    read_row(p.b, at(p.b, t) + group * p.b.stride[2], p.b.stride[3], p.states, b);
    of.read(p.x, at(p.x, t), p.x.stride[2], p.x.stride[3], x);
    of.read_heads(p.dt, at(p.dt, t), p.dt.stride[2], dt);
    for (int i = 0; i < kColumns; ++i) u[i] = dt[i] * x[i];
    if (p.each_state) return;
    const float one = of.one_head ? exp_f32(dt[0] * a[0]) : 0.0f;
    for (int i = 0; i < kColumns; ++i) decay[i] = of.one_head ? one : exp_f32(dt[i] * a[i]);
  }
  V decay_of(int64_t n) {
    for (int i = 0; p.each_state && i < kColumns; ++i) decay[i] = exp_f32(dt[i] * of_states[n * kColumns + i]);
    return V::of(decay);
  }
};

// ---- The gated delta rule ----------------------------------------------------------------------------------------------

struct DeltaBack {
  const GatedDeltaBackward &p;
  const int64_t sequence, head, first, count, block;  // block: of the group's
  const Room room;
  const Sequences::Range range = p.sequences.range(sequence);
  const int64_t group = head / (p.heads / p.groups);
  float *const gradient = room.gradient, *const q = room.first, *const k = room.second;
  alignas(64) float v[kColumns] = {}, dout[kColumns] = {};
  float decay = 0.0f, beta = 0.0f;

  void run() {
    read_states(p.dfinal, gradient);
    walk_back(*this, room, sequence, group, block);
    for (int64_t n = 0; p.dinitial.data && n < p.keys; ++n)
      write_row(p.dinitial, of_states(p.dinitial, n), p.dinitial.stride[3], count, gradient + n * kColumns);
  }
  void states_from(float *state) const { read_states(p.initial, state); }

  void step(int64_t t, const float *from, float *to) {
    read_token(t);
    const V m = remembered(from), w = V::all(beta) * m;
    for (int64_t n = 0; n < p.keys; ++n) fma(k[n], w, V::all(decay) * V::of(from + n * kColumns)).to(to + n * kColumns);
  }

  void back(int64_t t, const float *before) {
    read_token(t);
    read_row(p.q, at(p.q, t, group), p.q.stride[3], p.keys, q);
    read_row(p.dout, at(p.dout, t, head) + first * p.dout.stride[3], p.dout.stride[3], count, dout);
    const int64_t token = range.batch * p.sequences.tokens + t;
    float *const dq = p.workspace.row(0, token, group, block), *const dk = p.workspace.row(1, token, group, block);
    const V factor = V::all(decay), of_out = V::of(dout), m = remembered(before), w = V::all(beta) * m;
    const V z = sum_of_lanes<V>(p.keys, [&](int64_t n, const V &sum) {
      const V g = fma(q[n], of_out, V::of(gradient + n * kColumns));
      g.to(gradient + n * kColumns);
      dq[n] = sum_of_columns(of_out * fma(k[n], w, factor * V::of(before + n * kColumns)), count);
      return fma(k[n], g, sum);
    });
    const V r = V::all(beta) * z;
    const V l = sum_of_lanes<V>(p.keys, [&](int64_t n, const V &sum) {
      const V old = factor * V::of(before + n * kColumns), g = V::of(gradient + n * kColumns);
      dk[n] = sum_of_columns(fma(w, g, V::all(-1.0f) * (r * old)), count);
      const V through = fma(-k[n], r, g);
      (factor * through).to(gradient + n * kColumns);
      return fma(through, old, sum);
    });
    alignas(64) float dv[kColumns], terms[2][kColumns];
    r.to(dv), l.to(terms[0]), (z * m).to(terms[1]);
    write_row(p.dv, at(p.dv, t, head) + first * p.dv.stride[3], p.dv.stride[3], count, dv);
    for (int which = 0; which < 2; ++which) {
      float sum = 0.0f;
      for (int64_t e = 0; e < count; ++e) sum = sum + terms[which][e];
      p.workspace.of_head(which, token, head)[first / kColumns] = sum;
    }
  }

 private:
  int64_t at(const Strided &operand, int64_t t, int64_t i) const {
    return range.batch * operand.stride[0] + t * operand.stride[1] + i * operand.stride[2];
  }
  int64_t of_states(const Strided &states, int64_t n) const {
    return sequence * states.stride[0] + head * states.stride[1] + n * states.stride[2] + first * states.stride[3];
  }
  void read_states(const Strided &from, float *to) const {
    memset(to, 0, size_t(room.size) * sizeof(float));
    for (int64_t n = 0; from.data && n < p.keys; ++n)
      read_row(from, of_states(from, n), from.stride[3], count, to + n * kColumns);
  }
  void read_token(int64_t t) {
    read_row(p.k, at(p.k, t, group), p.k.stride[3], p.keys, k);
    read_row(p.v, at(p.v, t, head) + first * p.v.stride[3], p.v.stride[3], count, v);
    decay = exp_f32(read_one(p.g, at(p.g, t, head))), beta = read_one(p.beta, at(p.beta, t, head));
  }
  // What v has beyond the state's answer to k.
  V remembered(const float *before) const {
    const V known = sum_of_lanes<V>(
        p.keys, [&](int64_t n, const V &sum) { return fma(k[n], V::all(decay) * V::of(before + n * kColumns), sum); });
    return fma(-1.0f, known, V::of(v));
  }
};

// ---- What blocks of columns leave --------------------------------------------------------------------------------------

inline float chain(const float *parts, int64_t count, int64_t stride = 1) {
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum = sum + parts[i * stride];
  return sum;
}

// A row of the sum over columns, of all blocks of the group.
void write_sum(const ScanWorkspace &workspace, int which, int64_t token, int64_t group, const Strided &to, int64_t at) {
  const float *const parts = workspace.row(which, token, group, 0);
  for (int64_t n = 0; n < workspace.states; ++n) {
    const float sum = chain(parts + n, workspace.blocks, workspace.states);
    write_row(to, at + n * to.stride[3], 1, 1, &sum);
  }
}

// Calls body(sequence, range, t) once for each token that is in a sequence.
template <class Body> void each_token(const Sequences &sequences, double work, Scratch &scratch, const Body &body) {
  constexpr int64_t kTokens = 16;
  const int64_t pieces = divide_up(sequences.tokens, kTokens);
  parallel(sequences.count * pieces, threads_for(work, kWorthAThread), scratch, [&](int64_t i, Scratch &) {
    const int64_t sequence = i / pieces, begin = i % pieces * kTokens;
    const Sequences::Range range = sequences.range(sequence);
    for (int64_t t = range.begin + begin; t < range.begin + begin + kTokens && t < range.end; ++t) body(range, t);
  });
}

void finish(const SelectiveScanBackward &p, double work, Scratch &scratch) {
  const ScanWorkspace &workspace = p.workspace;
  const int64_t of_group = p.heads / p.groups;
  const auto head_sum = [&](int which, int64_t token, int64_t head) {
    const int64_t first = head % of_group * p.width, blocks = (first + p.width - 1) / kColumns - first / kColumns + 1;
    return chain(workspace.of_head(which, token, head), p.width ? blocks : 0);
  };
  each_token(p.sequences, work, scratch, [&](const Sequences::Range &range, int64_t t) {
    const int64_t token = range.batch * p.sequences.tokens + t;
    const auto at = [&](const Strided &x, int64_t i) {
      return range.batch * x.stride[0] + t * x.stride[1] + i * x.stride[2];
    };
    for (int64_t g = 0; g < p.groups; ++g) {
      write_sum(workspace, 0, token, g, p.db, at(p.db, g));
      write_sum(workspace, 1, token, g, p.dc, at(p.dc, g));
    }
    for (int64_t h = 0; h < p.heads; ++h) {
      const float of_u = head_sum(0, token, h), of_decay = head_sum(1, token, h);
      const float ddt = p.each_state ? of_decay + of_u : fmaf(read_one(p.a, h * p.a.stride[0]), of_decay, of_u);
      write_row(p.ddt, at(p.ddt, h), 1, 1, &ddt);
    }
  });
  parallel(p.sequences.count * p.heads, threads_for(work, kWorthAThread), scratch, [&](int64_t i, Scratch &) {
    const int64_t sequence = i / p.heads, head = i % p.heads, group = head / of_group;
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t begin = range.batch * p.sequences.tokens;
    float da = 0.0f, dd = 0.0f;
    for (int64_t t = range.end - 1; t >= range.begin; --t) {
      const float dt = read_one(p.dt, range.batch * p.dt.stride[0] + t * p.dt.stride[1] + head * p.dt.stride[2]);
      if (!p.each_state) da = fmaf(dt, head_sum(1, begin + t, head), da);
      dd = dd + head_sum(2, begin + t, head);
    }
    if (p.dd.data) write_row(p.dd, sequence * p.dd.stride[0] + head * p.dd.stride[1], 1, 1, &dd);
    const int64_t to = sequence * p.da.stride[0] + head * p.da.stride[1];
    if (!p.each_state) return write_row(p.da, to, 1, 1, &da);
    for (int64_t n = 0; n < p.states; ++n) {
      float sum = 0.0f;
      for (int64_t c = head % of_group * p.width; c < (head % of_group + 1) * p.width; ++c)
        sum = sum +
              workspace.states_at(sequence, begin + range.begin, 0, group, c / kColumns)[n * kColumns + c % kColumns];
      write_row(p.da, to + n * p.da.stride[2], 1, 1, &sum);
    }
  });
}

void finish(const GatedDeltaBackward &p, double work, Scratch &scratch) {
  each_token(p.sequences, work, scratch, [&](const Sequences::Range &range, int64_t t) {
    const int64_t token = range.batch * p.sequences.tokens + t;
    const auto at = [&](const Strided &x, int64_t i) {
      return range.batch * x.stride[0] + t * x.stride[1] + i * x.stride[2];
    };
    for (int64_t g = 0; g < p.groups; ++g) {
      write_sum(p.workspace, 0, token, g, p.dq, at(p.dq, g));
      write_sum(p.workspace, 1, token, g, p.dk, at(p.dk, g));
    }
    for (int64_t h = 0; h < p.heads; ++h) {
      const float dg = chain(p.workspace.of_head(0, token, h), p.workspace.parts);
      const float dbeta = chain(p.workspace.of_head(1, token, h), p.workspace.parts);
      write_row(p.dg, at(p.dg, h), 1, 1, &dg);
      write_row(p.dbeta, at(p.dbeta, h), 1, 1, &dbeta);
    }
  });
}

template <class Problem> double work_of(const Problem &p, int64_t states) {
  return double(p.sequences.tokens) * double(p.heads) * double(p.width) * double(states) *
         (p.sequences.starts ? 1 : double(p.sequences.count));
}

// ---- The causal convolution --------------------------------------------------------------------------------------------

struct ConvTask {
  const CausalConv1dBackward &p;
  const int64_t sequence, first, count;
  const Sequences::Range range = p.sequences.range(sequence);

  int64_t row(const Strided &of, int64_t t) const {
    return range.batch * of.stride[0] + t * of.stride[1] + first * of.stride[2];
  }
  int64_t row_before(const Strided &of, int64_t i) const {
    return sequence * of.stride[0] + i * of.stride[1] + first * of.stride[2];
  }

  // Gradients of what stands at tokens [begin, end), from the last: negative ones are before the sequence.
  void inputs(int64_t begin, int64_t end) const {
    alignas(64) float w[kMostTaps][kColumns], dy[kColumns] = {}, out[kColumns];
    weights(w);
    for (int64_t t = range.begin + end - 1; t >= range.begin + begin; --t) {
      V sum = V::all(0.0f);
      for (int64_t j = p.taps - 1; j >= 0; --j) {
        const int64_t to = t + p.taps - 1 - j;
        if (to < range.begin || to >= range.end) continue;
        read_row(p.dy, row(p.dy, to), p.dy.stride[2], count, dy);
        sum = fma(V::of(w[j]), V::of(dy), sum);
      }
      sum.to(out);
      const int64_t before = t - range.begin + p.taps - 1;
      if (t >= range.begin) write_row(p.dx, row(p.dx, t), p.dx.stride[2], count, out);
      else write_row(p.dinitial, row_before(p.dinitial, before), p.dinitial.stride[2], count, out);
    }
  }

  void sums() const {
    alignas(64) float total[kMostTaps][kColumns] = {}, bias[kColumns] = {}, dy[kColumns] = {}, x[kColumns] = {};
    for (int64_t t = range.end - 1; t >= range.begin; --t) {
      read_row(p.dy, row(p.dy, t), p.dy.stride[2], count, dy);
      (V::of(bias) + V::of(dy)).to(bias);
      for (int64_t j = 0; p.dw.data && j < p.taps; ++j) {
        const int64_t from = t - p.taps + 1 + j, before = from - range.begin + p.taps - 1;
        if (from >= range.begin) read_row(p.x, row(p.x, from), p.x.stride[2], count, x);
        else if (p.initial.data) read_row(p.initial, row_before(p.initial, before), p.initial.stride[2], count, x);
        else memset(x, 0, sizeof x);
        fma(V::of(dy), V::of(x), V::of(total[j])).to(total[j]);
      }
    }
    for (int64_t j = 0; p.dw.data && j < p.taps; ++j)
      write_row(p.dw, sequence * p.dw.stride[0] + first * p.dw.stride[1] + j * p.dw.stride[2], p.dw.stride[1], count,
                total[j]);
    if (p.dbias.data)
      write_row(p.dbias, sequence * p.dbias.stride[0] + first * p.dbias.stride[1], p.dbias.stride[1], count, bias);
  }

 private:
  void weights(float (&w)[kMostTaps][kColumns]) const {
    for (int64_t j = 0; j < p.taps; ++j) {
      memset(w[j], 0, sizeof w[j]);
      read_row(p.w, first * p.w.stride[0] + j * p.w.stride[1], p.w.stride[0], count, w[j]);
    }
  }
};

}  // namespace

template <> pydet_status selective_scan_backward<Isa>(const SelectiveScanBackward &p) {
  const double work = work_of(p, p.states);
  const int64_t of_group = p.heads / p.groups * p.width, blocks = p.workspace.blocks;
  Scratch scratch;
  parallel(p.sequences.count * p.groups * blocks, threads_for(work, kWorthAThread), scratch,
           [&](int64_t i, Scratch &own) {
             const int64_t block = i % blocks, group = i / blocks % p.groups, sequence = i / blocks / p.groups;
             const int64_t first = block * kColumns, count = of_group - first < kColumns ? of_group - first : kColumns;
             const Neighbours of = {p.width, group * of_group + first, count,
                                    first / p.width == (first + count - 1) / p.width};
             SelectiveBack task = {p, sequence, group, block, of, Room(p.workspace, own)};
             task.run();
           });
  finish(p, work, scratch);
  return PYDET_OK;
}

template <> pydet_status gated_delta_backward<Isa>(const GatedDeltaBackward &p) {
  const double work = work_of(p, p.keys);
  const int64_t of_head = divide_up(p.width, kColumns);
  Scratch scratch;
  parallel(
      p.sequences.count * p.heads * of_head, threads_for(work, kWorthAThread), scratch, [&](int64_t i, Scratch &own) {
        const int64_t first = i % of_head * kColumns, head = i / of_head % p.heads, sequence = i / of_head / p.heads;
        const int64_t count = p.width - first < kColumns ? p.width - first : kColumns;
        const int64_t block = head % (p.heads / p.groups) * of_head + first / kColumns;
        DeltaBack task = {p, sequence, head, first, count, block, Room(p.workspace, own)};
        task.run();
      });
  finish(p, work, scratch);
  return PYDET_OK;
}

template <> pydet_status causal_conv1d_backward<Isa>(const CausalConv1dBackward &p) {
  constexpr int64_t kTokens = 64;
  Scratch scratch;  // not worked in: where there is none, one thread computes
  // The first piece is what lies before a sequence, the last one has the sums over its tokens.
  const int64_t blocks = divide_up(p.channels, kColumns), pieces = divide_up(p.sequences.tokens, kTokens) + 2;
  const double work = double(p.sequences.tokens) * double(p.channels) * double(p.taps) *
                      (p.sequences.starts ? 1 : double(p.sequences.count));
  parallel(p.sequences.count * pieces * blocks, threads_for(work, kWorthAThread), scratch, [&](int64_t i, Scratch &) {
    const int64_t first = i % blocks * kColumns, piece = i / blocks % pieces, sequence = i / blocks / pieces;
    const ConvTask task = {p, sequence, first, p.channels - first < kColumns ? p.channels - first : kColumns};
    const int64_t begin = (piece - 1) * kTokens, tokens = task.range.end - task.range.begin;
    if (piece == pieces - 1) {
      if (p.dw.data || p.dbias.data) task.sums();
    } else if (piece == 0) {
      if (p.dinitial.data) task.inputs(1 - p.taps, 0);
    } else if (p.dx.data) task.inputs(begin, begin + kTokens < tokens ? begin + kTokens : tokens);
  });
  return PYDET_OK;
}

}  // namespace pydet
