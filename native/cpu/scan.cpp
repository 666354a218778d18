// Recurrences over tokens (NUMERICS.md, "Scans"): the selective scan, the gated delta rule, and the causal convolution
// before them. The bits are those of every other backend.
//
// A task has a sequence, and of a head's columns, which are independent, as many as lie side by side in vectors. It walks
// the tokens with its state in scratch memory. Elements are those of fp32 from when they are read.

#include "cpu/scan_rows.h"

namespace pydet {
namespace {

static_assert(4 * kMostStates * int64_t(sizeof(float)) <= Scratch::kSmall, "a state and its decays, and two rows");
static_assert((2 * kColumns + 2) * kMostStates * int64_t(sizeof(float)) <= Scratch::kLarge, "those of all columns");

// ---- The selective scan ------------------------------------------------------------------------------------------------

template <int columns> struct SelectiveTask {
  using V = Vectors<columns>;
  const SelectiveScan &p;
  float *const state;                          // [states, columns]
  float *const b, *const c, *const of_states;  // a for each state: [states, columns]
  float x[columns], dt[columns], decay[columns], d[columns], u[columns];

  SelectiveTask(const SelectiveScan &p, Scratch &scratch)
      : p(p), state((float *)scratch.data), b(state + p.states * columns), c(b + p.states), of_states(c + p.states) {}

  void states_from(int64_t sequence, const Neighbours &of) {
    memset(state, 0, size_t(p.states * columns) * sizeof(float));
    if (!p.initial.data) return;
    const int64_t *stride = p.initial.stride;
    for (int64_t n = 0; n < p.states; ++n)
      of.read(p.initial, sequence * stride[0] + n * stride[3], stride[1], stride[2], state + n * columns);
  }
  void states_to(int64_t sequence, const Neighbours &of) const {
    if (!p.final.data) return;
    const int64_t *stride = p.final.stride;
    for (int64_t n = 0; n < p.states; ++n)
      of.write(p.final, sequence * stride[0] + n * stride[3], stride[1], stride[2], state + n * columns);
  }

  void run(int64_t sequence, int64_t group, const Neighbours &of) {
    const Sequences::Range range = p.sequences.range(sequence);
    alignas(64) float a[columns] = {};
    for (float *row : {x, dt, d}) memset(row, 0, sizeof x);
    states_from(sequence, of);
    if (!p.each_state) of.read_heads(p.a, 0, p.a.stride[0], a);
    for (int64_t n = 0; p.each_state && n < p.states; ++n) {
      memset(of_states + n * columns, 0, sizeof a);
      of.read_heads(p.a, n * p.a.stride[1], p.a.stride[0], of_states + n * columns);
    }
    if (p.d.data) of.read_heads(p.d, 0, p.d.stride[0], d);
    for (int64_t t = range.begin; t < range.end; ++t) {
      const auto at = [&](const Strided &operand) { return range.batch * operand.stride[0] + t * operand.stride[1]; };
      read_row(p.b, at(p.b) + group * p.b.stride[2], p.b.stride[3], p.states, b);
      read_row(p.c, at(p.c) + group * p.c.stride[2], p.c.stride[3], p.states, c);
      of.read(p.x, at(p.x), p.x.stride[2], p.x.stride[3], x);
      of.read_heads(p.dt, at(p.dt), p.dt.stride[2], dt);
      for (int i = 0; i < columns; ++i) u[i] = dt[i] * x[i];
      V y;
      if (p.each_state) {
        y = sum([&](int64_t n) {
          for (int i = 0; i < columns; ++i) decay[i] = exp_f32(dt[i] * of_states[n * columns + i]);
          return V::of(decay);
        });
      } else {
        if (of.one_head) {
          const float one = exp_f32(dt[0] * a[0]);
          for (int i = 0; i < columns; ++i) decay[i] = one;
        } else {
          for (int i = 0; i < columns; ++i) decay[i] = exp_f32(dt[i] * a[i]);
        }
        y = sum([&](int64_t) { return V::of(decay); });
      }
      alignas(64) float out[columns];
      y.to(out);
      if (p.d.data)
        for (int i = 0; i < columns; ++i) out[i] = fmaf(d[i], x[i], out[i]);
      of.write(p.y, at(p.y), p.y.stride[2], p.y.stride[3], out);
    }
    states_to(sequence, of);
  }

 private:
  template <class Decay> inline __attribute__((always_inline)) V sum(const Decay &of_state) {
    const V input = V::of(u);
    return sum_of_lanes<V>(p.states, [&](int64_t n, const V &sum) {
      const V s = fma(b[n], input, of_state(n) * V::of(state + n * columns));
      s.to(state + n * columns);
      return fma(c[n], s, sum);
    });
  }
};

// ---- The gated delta rule ----------------------------------------------------------------------------------------------

template <int columns> struct DeltaTask {
  using V = Vectors<columns>;
  const GatedDelta &p;
  float *const state;  // [keys, columns]
  float *const q, *const k;

  DeltaTask(const GatedDelta &p, Scratch &scratch)
      : p(p), state((float *)scratch.data), q(state + p.keys * columns), k(q + p.keys) {}

  void run(int64_t sequence, int64_t head, int64_t first, int64_t count) {
    const Sequences::Range range = p.sequences.range(sequence);
    const int64_t group = head / (p.heads / p.groups);
    alignas(64) float row[columns] = {};
    memset(state, 0, size_t(p.keys * columns) * sizeof(float));
    const auto of_states = [&](const Strided &states, int64_t n) {
      return sequence * states.stride[0] + head * states.stride[1] + n * states.stride[2] + first * states.stride[3];
    };
    if (p.initial.data)
      for (int64_t n = 0; n < p.keys; ++n)
        read_row(p.initial, of_states(p.initial, n), p.initial.stride[3], count, state + n * columns);
    for (int64_t t = range.begin; t < range.end; ++t) {
      const auto at = [&](const Strided &operand, int64_t i) {
        return range.batch * operand.stride[0] + t * operand.stride[1] + i * operand.stride[2];
      };
      read_row(p.q, at(p.q, group), p.q.stride[3], p.keys, q);
      read_row(p.k, at(p.k, group), p.k.stride[3], p.keys, k);
      read_row(p.v, at(p.v, head) + first * p.v.stride[3], p.v.stride[3], count, row);
      const V decay = V::all(exp_f32(read_one(p.g, at(p.g, head)))), beta = V::all(read_one(p.beta, at(p.beta, head)));
      const V known = sum_of_lanes<V>(p.keys, [&](int64_t n, const V &sum) {
        const V s = decay * V::of(state + n * columns);
        s.to(state + n * columns);
        return fma(k[n], s, sum);
      });
      const V w = beta * fma(-1.0f, known, V::of(row));
      const V o = sum_of_lanes<V>(p.keys, [&](int64_t n, const V &sum) {
        const V s = fma(k[n], w, V::of(state + n * columns));
        s.to(state + n * columns);
        return fma(q[n], s, sum);
      });
      alignas(64) float out[columns];
      o.to(out);
      write_row(p.o, at(p.o, head) + first * p.o.stride[3], p.o.stride[3], count, out);
    }
    if (p.final.data)
      for (int64_t n = 0; n < p.keys; ++n)
        write_row(p.final, of_states(p.final, n), p.final.stride[3], count, state + n * columns);
  }
};

// ---- The causal convolution --------------------------------------------------------------------------------------------

// Tokens [begin, end) of a sequence, and some channels.
void convolve(const CausalConv1d &p, int64_t sequence, int64_t begin, int64_t end, int64_t first, int64_t count) {
  using V = Vectors<kColumns>;
  const Sequences::Range range = p.sequences.range(sequence);
  alignas(64) float w[kMostTaps][kColumns], row[kColumns] = {}, bias[kColumns] = {};
  for (int64_t j = 0; j < p.taps; ++j) {
    memset(w[j], 0, sizeof w[j]);
    read_row(p.w, first * p.w.stride[0] + j * p.w.stride[1], p.w.stride[0], count, w[j]);
  }
  if (p.bias.data) read_row(p.bias, first * p.bias.stride[0], p.bias.stride[0], count, bias);
  for (int64_t t = range.begin + begin; t < range.begin + end && t < range.end; ++t) {
    V sum = V::all(0.0f);
    for (int64_t j = 0; j < p.taps; ++j) {
      const int64_t from = t - p.taps + 1 + j, before = from - range.begin + p.taps - 1;
      if (from >= range.begin)
        read_row(p.x, range.batch * p.x.stride[0] + from * p.x.stride[1] + first * p.x.stride[2], p.x.stride[2], count,
                 row);
      else if (p.initial.data)
        read_row(p.initial, sequence * p.initial.stride[0] + before * p.initial.stride[1] + first * p.initial.stride[2],
                 p.initial.stride[2], count, row);
      else memset(row, 0, sizeof row);
      const V of_tap = V::of(w[j]), x = V::of(row);
      for (int i = 0; i < V::kCount; ++i) sum.v[i] = fma(of_tap.v[i], x.v[i], sum.v[i]);
    }
    if (p.bias.data) sum = sum + V::of(bias);
    alignas(64) float out[kColumns];
    sum.to(out);
    write_row(p.y, range.batch * p.y.stride[0] + t * p.y.stride[1] + first * p.y.stride[2], p.y.stride[2], count, out);
  }
}

template <int columns> void scan_selectively(const SelectiveScan &p, Scratch &scratch) {
  const int64_t of_group = p.heads / p.groups * p.width, blocks = divide_up(of_group, columns);
  const double work = double(p.sequences.tokens) * double(p.heads) * double(p.width) * double(p.states) *
                      (p.sequences.starts ? 1 : double(p.sequences.count));
  parallel(p.sequences.count * p.groups * blocks, threads_for(work, kWorthAThread), scratch,
           [&](int64_t i, Scratch &own) {
             const int64_t block = i % blocks, group = i / blocks % p.groups, sequence = i / blocks / p.groups;
             const int64_t first = block * columns, count = of_group - first < columns ? of_group - first : columns;
             const Neighbours of = {p.width, group * of_group + first, count,
                                    first / p.width == (first + count - 1) / p.width};
             SelectiveTask<columns>(p, own).run(sequence, group, of);
           });
}

template <int columns> void apply_deltas(const GatedDelta &p, Scratch &scratch) {
  const int64_t blocks = divide_up(p.width, columns);
  const double work = double(p.sequences.tokens) * double(p.heads) * double(p.width) * double(p.keys) *
                      (p.sequences.starts ? 1 : double(p.sequences.count));
  parallel(
      p.sequences.count * p.heads * blocks, threads_for(work, kWorthAThread), scratch, [&](int64_t i, Scratch &own) {
        const int64_t first = i % blocks * columns, head = i / blocks % p.heads, sequence = i / blocks / p.heads;
        DeltaTask<columns>(p, own).run(sequence, head, first, p.width - first < columns ? p.width - first : columns);
      });
}

}  // namespace

template <> pydet_status selective_scan<Isa>(const SelectiveScan &p) {
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) {
    if (scratch.large()) scan_selectively<kColumns>(p, scratch);
    else scan_selectively<1>(p, scratch);
  });
  return PYDET_OK;
}

template <> pydet_status gated_delta<Isa>(const GatedDelta &p) {
  with_scratch([&](Scratch &scratch) __attribute__((noinline)) {
    if (scratch.large()) apply_deltas<kColumns>(p, scratch);
    else apply_deltas<1>(p, scratch);
  });
  return PYDET_OK;
}

template <> pydet_status causal_conv1d<Isa>(const CausalConv1d &p) {
  constexpr int64_t kTokens = 64;
  Scratch scratch;  // not worked in: where there is none, one thread computes
  const int64_t blocks = divide_up(p.channels, kColumns), pieces = divide_up(p.sequences.tokens, kTokens);
  const double work = double(p.sequences.tokens) * double(p.channels) * double(p.taps) *
                      (p.sequences.starts ? 1 : double(p.sequences.count));
  parallel(p.sequences.count * pieces * blocks, threads_for(work, kWorthAThread), scratch, [&](int64_t i, Scratch &) {
    const int64_t first = i % blocks * kColumns, piece = i / blocks % pieces, sequence = i / blocks / pieces;
    const int64_t begin = piece * kTokens;
    convolve(p, sequence, begin, begin + kTokens, first, p.channels - first < kColumns ? p.channels - first : kColumns);
  });
  return PYDET_OK;
}

}  // namespace pydet
