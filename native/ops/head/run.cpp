// The log-probability of a column under a linear layer, and its gradients, without the logits of all rows: chunks of rows
// go through the products and the softmax of the other folders, over the workspace.
//
//   z = round(x w^T + bias),   log_prob = (z[index] - m) - log(s),   d = its gradient by z, in the place of z;
//                              or what else is asked of a row, and its gradient (HeadRows)
//   dx = d w;   dw = d^T x and dbias = 1^T d, continued from chunk to chunk
//
// Rows are independent, and the sums over rows are cut where a chain may be: so a chunk decides no bit. Where there would
// be several chunks and dw is begun, all rows go through in slabs of columns, in the memory of dw (chunks.h).

#include <algorithm>

#include "core/launch.h"
#include "ops/gemm/rounding.h"
#include "ops/head/check.h"
#include "ops/head/chunks.h"
#include "ops/head/run.h"

namespace pydet {
namespace {

// Where things lie in the workspace, of the first chunk, which is the largest.
struct Room {
  char *logits, *d, *ones, *of_products;  // d: the logits themselves, or their gradient in the type of x
  uint64_t of_products_size;
  bool both;        // the gradient's kernel makes log_prob beside it
  int64_t columns;  // of a slab; `logits` is slab 0
};

Room room_of(const LinearLogProb &p, const HeadChunks &chunks) {
  Room room = {};
  if (!p.workspace || chunks.rows == 0) return room;
  uintptr_t at = reinterpret_cast<uintptr_t>(p.workspace);
  const auto take = [&](uint64_t bytes) {
    at = (at + kHeadAlignment - 1) / kHeadAlignment * kHeadAlignment;
    char *const place = reinterpret_cast<char *>(at);
    at += bytes;
    return place;
  };
  const auto rows_of_type = [&](Type type) {
    return uint64_t(chunks.rows) * uint64_t(head_stride(p.n, type)) * uint64_t(size_of(type));
  };
  room.logits = room.d = take(rows_of_type(p.logits));
  if (head_narrows(p)) room.d = take(rows_of_type(p.x.type));
  if (p.dbias.data) room.ones = take(uint64_t(chunks.rows) * uint64_t(size_of(p.x.type)));
  room.of_products_size = chunks.of_products;
  if (chunks.of_products) room.of_products = take(chunks.of_products);
  return room;
}

// Rows first .. first + count - 1 of what has a row for each of x's.
struct Part {
  int64_t first, count;
};

Matrix part_of(const Matrix &matrix, Part part) {
  Matrix rows = matrix;
  rows.rows = part.count;
  if (rows.data) rows.data += part.first * matrix.row_stride * size_of(matrix.type);
  return rows;
}
Matrix chunk_of(char *data, Type type, int64_t rows, int64_t n) {
  return {data, type, rows, n, head_stride(n, type), 1};
}

// ---- The steps, as problems of their operations --------------------------------------------------------------------

Gemm product_of(const LinearLogProb &p, const Room &room, const Matrix &a, const Matrix &b, const Matrix &out,
                bool accumulate) {
  Gemm g = {};
  g.device = p.device;
  g.stream = p.stream;
  g.a = a, g.b = b, g.out = out;
  g.batch.count = 1;
  g.m = a.rows, g.n = b.cols, g.k = a.cols;
  g.arithmetic = p.arithmetic;
  g.k_chunk = p.k_chunk;
  g.accumulate = accumulate;
  if (one_chunk_is_one_chain(g)) g.k_chunk = 0;
  g.workspace = room.of_products;
  g.workspace_size = room.of_products_size;
  return g.out.col_stride == 1 ? g : transposed(g);
}

Gemm logits_of(const LinearLogProb &p, const Room &room, Part part) {
  Gemm g =
      product_of(p, room, part_of(p.x, part), transposed(p.w), chunk_of(room.logits, p.logits, part.count, p.n), false);
  g.bias = p.bias;
  g.bias.rows = part.count;
  g.skinny = true;
  return g;
}
Gemm dx_of(const LinearLogProb &p, const Room &room, Part part) {
  return product_of(p, room, chunk_of(room.d, p.x.type, part.count, p.n), p.w, part_of(p.dx, part), false);
}
Gemm dw_of(const LinearLogProb &p, const Room &room, Part part) {
  return product_of(p, room, transposed(chunk_of(room.d, p.x.type, part.count, p.n)), part_of(p.x, part), p.dw,
                    p.accumulate || part.first > 0);
}
Gemm dbias_of(const LinearLogProb &p, const Room &room, Part part) {
  const Matrix ones = {room.ones, p.x.type, 1, part.count, part.count, 1};
  return product_of(p, room, ones, chunk_of(room.d, p.x.type, part.count, p.n), p.dbias,
                    p.accumulate || part.first > 0);
}
// The ones begin as zeros, the empty product: softmax of a row of one number makes it 1.
Gemm zeros_of(const LinearLogProb &p, const Room &room, Part part) {
  const int64_t count = part.count;
  Gemm g = product_of(p, room, {room.ones, p.x.type, 1, 0, 0, 1}, {room.ones, p.x.type, 0, count, count, 1},
                      {room.ones, p.x.type, 1, count, count, 1}, false);
  g.k_chunk = 0;
  return g;
}
Softmax ones_of(const LinearLogProb &p, const Room &room, Part part) {
  const Rows rows = {room.ones, p.x.type, 0, 1, 0};
  Softmax s = {};
  s.device = p.device, s.stream = p.stream;
  s.rows = s.inner = part.count, s.n = 1;
  s.kind = SoftmaxKind::softmax;
  s.x = s.y = rows;
  return s;
}

// The gradient takes the place of the logits: every kernel reads an element for the last time before it, or the thread
// itself, writes there (rows begin at multiples of 16 bytes).
Softmax rows_of(const LinearLogProb &p, const Room &room, Part part, SoftmaxKind kind) {
  Softmax s = {};
  s.device = p.device, s.stream = p.stream;
  s.rows = s.inner = part.count, s.n = p.n;
  s.kind = kind;
  s.x = {room.logits, p.logits, 0, head_stride(p.n, p.logits), 0};
  s.index = {static_cast<const char *>(p.index.data) + part.first * (p.index.wide ? 8 : 4), p.index.wide};
  const auto at = [&](const Vector &vector) { return Vector{vector.data + 4 * part.first, Type::f32}; };
  if (kind == SoftmaxKind::log_prob || room.both) s.log_prob = at(p.log_prob);
  if (kind == SoftmaxKind::log_prob_backward) s.y = s.x, s.dlog_prob = at(p.dlog_prob);
  return s;
}

// What is not softmax's own: all that is asked of rows, and its gradient, at once.
HeadRows asked_of(const LinearLogProb &p, const Room &room, Part part) {
  HeadRows h = {};
  h.device = p.device, h.stream = p.stream;
  h.rows = part.count, h.n = p.n;
  h.backward = p.backward;
  h.x = {room.logits, p.logits, 0, head_stride(p.n, p.logits), 0};
  if (p.backward) h.y = {room.d, p.x.type, 0, head_stride(p.n, p.x.type), 0};
  h.index = {static_cast<const char *>(p.index.data) + part.first * (p.index.wide ? 8 : 4), p.index.wide};
  h.asked = p.asked;
  const auto at = [&](const Vector &vector) {
    return vector.data ? Vector{vector.data + 4 * part.first, vector.type} : Vector{};
  };
  h.log_prob = at(p.log_prob), h.dlog_prob = at(p.dlog_prob);
  h.asked.entropy = at(p.asked.entropy), h.asked.lse = at(p.asked.lse), h.asked.mean = at(p.asked.mean);
  if (h.asked.greedy) h.asked.greedy += 8 * part.first;
  return h;
}

Softmax log_probs_of(const LinearLogProb &p, const Room &room, Part part) {
  return rows_of(p, room, part, SoftmaxKind::log_prob);
}
Softmax gradients_of(const LinearLogProb &p, const Room &room, Part part) {
  return rows_of(p, room, part, SoftmaxKind::log_prob_backward);
}

// To the type of x, the rest of the padding's elements too where rows can then be taken by four.
Rounding narrowing_of(const LinearLogProb &p, const Room &room, Part part) {
  const int64_t n = head_stride(p.n, p.logits);
  Rounding r = {};
  r.device = p.device, r.stream = p.stream;
  r.from = {room.logits, p.logits, part.count, n, n, 1};
  r.to = {room.d, p.x.type, part.count, n, head_stride(p.n, p.x.type), 1};
  r.batch.count = 1;
  r.m = part.count, r.n = n;
  return r;
}

// ---- The same of slabs, whose columns are the part ------------------------------------------------------------------

Matrix slab_of(const LinearLogProb &p, const Room &room, Part part) {
  char *data = room.logits;
  if (part.first > 0) data = p.dw.data + (part.first - room.columns) * p.k * size_of(p.dw.type);
  return {data, p.x.type, p.rows, part.count, room.columns, 1};
}
Gemm slab_logits_of(const LinearLogProb &p, const Room &room, Part part) {
  Gemm g = product_of(p, room, p.x, transposed(part_of(p.w, part)), slab_of(p, room, part), false);
  g.bias = p.bias;
  if (g.bias.data) g.bias.data += part.first * g.bias.col_stride * size_of(g.bias.type);
  g.bias.rows = p.rows, g.bias.cols = part.count;
  g.skinny = true;
  return g;
}
Softmax slab_gradients_of(const LinearLogProb &p, const Room &room, Part) {
  Softmax s = rows_of(p, room, {0, p.rows}, SoftmaxKind::log_prob_backward);
  s.x = s.y = {p.dw.data, p.x.type, 0, room.columns, 0};
  s.slabs = {room.columns, room.columns * p.k * size_of(p.dw.type), room.logits};
  return s;
}
HeadRows slab_asked_of(const LinearLogProb &p, const Room &room, Part) {
  HeadRows h = asked_of(p, room, {0, p.rows});
  h.x = h.y = {p.dw.data, p.x.type, 0, room.columns, 0};
  h.slabs = {room.columns, room.columns * p.k * size_of(p.dw.type), room.logits};
  return h;
}
// In fp32, where it is not so itself, it is summed in the place of the last columns of dw.
Matrix sums_of_dx(const LinearLogProb &p, const Room &room) {
  if (p.dx.type == Type::f32) return p.dx;
  char *const last = p.dw.data + (p.n - 1) / room.columns * room.columns * p.k * size_of(p.dw.type);
  return {last, Type::f32, p.rows, p.k, p.k, 1};
}
Gemm slab_dx_of(const LinearLogProb &p, const Room &room, Part part) {
  return product_of(p, room, slab_of(p, room, part), part_of(p.w, part), sums_of_dx(p, room), part.first > 0);
}
Rounding rounded_dx_of(const LinearLogProb &p, const Room &room) {
  Rounding r = {};
  r.device = p.device, r.stream = p.stream;
  r.from = sums_of_dx(p, room), r.to = p.dx;
  r.batch.count = 1;
  r.m = p.rows, r.n = p.k;
  return r;
}
Gemm slab_dw_of(const LinearLogProb &p, const Room &room, Part part) {
  return product_of(p, room, transposed(slab_of(p, room, part)), p.x, part_of(p.dw, part), false);
}
Gemm slab_dbias_of(const LinearLogProb &p, const Room &room, Part part) {
  Matrix columns = p.dbias;
  columns.data += part.first * size_of(columns.type), columns.cols = part.count;
  const Matrix ones = {room.ones, p.x.type, 1, p.rows, p.rows, 1};
  return product_of(p, room, ones, slab_of(p, room, part), columns, false);
}

// ---- The call ------------------------------------------------------------------------------------------------------

template <class Problem> const char *forced_of(const LinearLogProb &p) {
  return std::is_same_v<Problem, HeadRows> ? p.kernel : nullptr;
}

// One step, whose problem is off the stack when the next one runs.
template <class Problem> using Step = Problem (*)(const LinearLogProb &, const Room &, Part);
template <class Problem>
__attribute__((noinline)) pydet_status run_step(const char *op, const LinearLogProb &p, const Room &room, Part part,
                                                Step<Problem> step) {
  return launch(op, step(p, room, part), forced_of<Problem>(p));
}
// Whether there is a kernel for a step, before the first one is enqueued.
template <class Problem>
__attribute__((noinline)) pydet_status has_kernel(const char *op, const LinearLogProb &p, const Room &room, Part part,
                                                  Step<Problem> step) {
  Choice choice;
  const Kernel<Problem> *row = nullptr;
  return find(op, step(p, room, part), forced_of<Problem>(p), &row, &choice);
}

__attribute__((noinline)) pydet_status narrow(const LinearLogProb &p, const Room &room, Part part) {
  return backend_for(p.device.type)->table<Gemm>().hooks->round_elements(narrowing_of(p, room, part));
}

__attribute__((noinline)) pydet_status round_dx(const LinearLogProb &p, const Room &room) {
  return backend_for(p.device.type)->table<Gemm>().hooks->round_elements(rounded_dx_of(p, room));
}

// Calls take(step) of all steps, in order, and narrow() between them where the gradient is to be of another type.
template <class F, class G>
pydet_status each_step(const LinearLogProb &p, bool both, Part part, const F &take, const G &narrow) {
  if (part.count > 0) {
    PYDET_TRY(take(logits_of));
    if (!head_is_plain(p)) {
      PYDET_TRY(take(asked_of));
    } else {
      if (p.log_prob.data && !both) PYDET_TRY(take(log_probs_of));
      if (p.backward) PYDET_TRY(take(gradients_of));
      if (head_narrows(p)) PYDET_TRY(narrow());
    }
    if (p.dx.data) PYDET_TRY(take(dx_of));
  }
  if (p.dw.data) PYDET_TRY(take(dw_of));
  return p.dbias.data ? take(dbias_of) : PYDET_OK;
}

// Whether anything is to be written.
bool writes(const LinearLogProb &p) {
  if (p.rows > 0 && (p.log_prob.data || p.dx.data || (!p.backward && p.asked.more()))) return true;
  return (p.dw.data || p.dbias.data) && (p.rows > 0 || !p.accumulate);
}

// Whether a kernel makes what would else take another step, or another way.
__attribute__((noinline)) bool has_softmax(const LinearLogProb &p, const Room &room, Part part, Step<Softmax> step) {
  Choice choice;
  return choose(backend_for(p.device.type)->table<Softmax>(), step(p, room, part), &choice) != nullptr;
}

pydet_status make_ones(const char *op, const LinearLogProb &p, const Room &room, Part rows) {
  if (!p.dbias.data || rows.count == 0) return PYDET_OK;
  PYDET_TRY(run_step(op, p, room, rows, zeros_of));
  return run_step(op, p, room, rows, ones_of);
}

// Where slabs lie, if there are to be any: columns is 0 otherwise.
Room room_of_slabs(const LinearLogProb &p) {
  const HeadSlabs slabs = head_slabs(p);
  if (slabs.count == 0) return {};
  Room room = {};
  room.logits = static_cast<char *>(p.workspace);
  if (p.dbias.data) room.ones = room.logits + p.rows * slabs.columns * size_of(p.x.type);
  room.columns = slabs.columns;
  room.both = p.log_prob.data;
  return !head_is_plain(p) || has_softmax(p, room, {}, slab_gradients_of) ? room : Room{};
}
// The same with room for products in so many bytes, if these are enough.
Room with_products(Room room, char *begin, uint64_t bytes, uint64_t wanted) {
  const uint64_t skipped = -reinterpret_cast<uintptr_t>(begin) % kHeadAlignment;
  if (wanted > 0 && bytes >= skipped && bytes - skipped >= wanted)
    room.of_products = begin + skipped, room.of_products_size = wanted;
  return room;
}

pydet_status run_slabs(const char *op, const LinearLogProb &p, const Room &begun, OfProducts of_products,
                       bool enqueues) {
  const auto slab = [&](int64_t first) { return Part{first, std::min(begun.columns, p.n - first)}; };
  const int64_t last = (p.n - 1) / begun.columns * begun.columns, row_bytes = p.k * size_of(p.dw.type);
  // Until dw is written the part of its last columns is free behind the sums of dx, then what is left of the workspace.
  const uint64_t wanted = head_product_bytes(p, of_products, p.rows, begun.columns);
  const int64_t of_dx = p.dx.data && p.dx.type != Type::f32 ? p.rows : 0, taken = head_slab_bytes(p, begun.columns);
  const Room room =
      with_products(begun, p.dw.data + (last + of_dx) * row_bytes, (p.n - last - of_dx) * row_bytes, wanted);
  const Room after = with_products(begun, begun.logits + taken, p.workspace_size - taken, wanted);
  for (const int64_t first : {int64_t(0), last}) {
    PYDET_TRY(has_kernel(op, p, room, slab(first), slab_logits_of));
    if (p.dx.data) PYDET_TRY(has_kernel(op, p, room, slab(first), slab_dx_of));
    if (p.dbias.data) PYDET_TRY(has_kernel(op, p, after, slab(first), slab_dbias_of));
    PYDET_TRY(has_kernel(op, p, after, slab(first), slab_dw_of));
  }
  if (!head_is_plain(p)) PYDET_TRY(has_kernel(op, p, room, {}, slab_asked_of));
  if (!enqueues) return PYDET_OK;
  PYDET_TRY(make_ones(op, p, room, {0, p.rows}));
  for (int64_t first = 0; first <= last; first += room.columns)
    PYDET_TRY(run_step(op, p, room, slab(first), slab_logits_of));
  PYDET_TRY(head_is_plain(p) ? run_step(op, p, room, {}, slab_gradients_of) : run_step(op, p, room, {}, slab_asked_of));
  if (p.dx.data) {
    for (int64_t first = 0; first <= last; first += room.columns)
      PYDET_TRY(run_step(op, p, room, slab(first), slab_dx_of));
    if (p.dx.type != Type::f32) PYDET_TRY(round_dx(p, room));
  }
  for (int64_t first = last; first >= 0; first -= room.columns) {
    if (p.dbias.data) PYDET_TRY(run_step(op, p, after, slab(first), slab_dbias_of));
    PYDET_TRY(run_step(op, p, after, slab(first), slab_dw_of));
  }
  return PYDET_OK;
}

// Checks whether there are kernels for all steps, then runs them if it `enqueues`.
pydet_status run(const char *op, const LinearLogProb &p, bool enqueues) {
  if (!writes(p)) return nothing_to_write();
  const OfProducts of_products = backend_for(p.device.type)->table<Gemm>().hooks->workspace;
  if (head_bytes(p, p.rows) > p.workspace_size) {
    if (const Room room = room_of_slabs(p); room.columns > 0) {
      PYDET_TRY(check_reach(op, *backend_for(p.device.type), p));
      return run_slabs(op, p, room, of_products, enqueues);
    }
  }
  HeadChunks chunks = {};
  PYDET_TRY(head_chunks(op, p, of_products, &chunks));
  Room room = room_of(p, chunks);
  PYDET_TRY(check_reach(op, *backend_for(p.device.type), p));
  const Part first = {0, chunks.rows};
  if (p.backward && p.log_prob.data && first.count > 0 && head_is_plain(p)) {
    room.both = true;
    room.both = has_softmax(p, room, first, gradients_of);
  }
  PYDET_TRY(each_step(
      p, room.both, first, [&](auto step) { return has_kernel(op, p, room, first, step); }, [] { return PYDET_OK; }));
  if (!enqueues) return PYDET_OK;
  PYDET_TRY(make_ones(op, p, room, first));
  Part part = first;
  do {
    part.count = std::min(chunks.rows, p.rows - part.first);
    PYDET_TRY(each_step(
        p, room.both, part, [&](auto step) { return run_step(op, p, room, part, step); },
        [&] { return narrow(p, room, part); }));
    part.first += part.count;
  } while (part.first < p.rows);
  return PYDET_OK;
}

}  // namespace

pydet_status check_head(const char *op, const LinearLogProb &p) { return run(op, p, false); }
pydet_status run_head(const char *op, const LinearLogProb &p) { return run(op, p, true); }

pydet_status head_workspace(const char *op, int64_t rows, int64_t n, int64_t k, pydet_dtype type, int32_t backward,
                            uint64_t most, const pydet_linear_log_prob_options &options, uint64_t *bytes) {
  PYDET_TRY(check_extents(op, 1, rows, n, k, bytes));
  PYDET_TRY(check_arithmetic(op, options.arithmetic));
  PYDET_TRY(check_chunk(op, options.k_chunk, kChunkMultiple));
  if (backward != 0 && backward != 1)
    return fail(PYDET_INVALID_VALUE, "%s: backward is %d, want 0 or 1", op, int(backward));
  LinearLogProb p = {};
  if (!type_of(type, &p.x.type) || !(types_for(kFactor) & kUnscaledTypes & bit(p.x.type)))
    return fail(PYDET_INVALID_DTYPE, "%s: x is %s, want %s", op, dtype_text(type).text, type_list(kUnscaledTypes).text);
  PYDET_TRY(logits_of(op, options.logits, p.x.type, &p.logits));
  char there = 0;  // stands for all results
  p.rows = rows, p.n = n, p.k = k;
  p.arithmetic = Arithmetic(options.arithmetic);
  p.k_chunk = options.k_chunk;
  p.backward = backward != 0;
  if (p.backward) p.dx.data = p.dw.data = p.dbias.data = &there;
  p.workspace_size = most ? most : kHeadWorkspace;
  p.dw.type = p.dbias.type = Type::f32;
  p.workspace_size = std::max(p.workspace_size, head_bytes(p, std::min(rows, head_unit(p))));
  const Backend *gpu = gpu_backend();
  HeadChunks chunks = {};
  PYDET_TRY(head_chunks(op, p, gpu ? gpu->table<Gemm>().hooks->workspace : nullptr, &chunks));
  *bytes = rows == 0 || n == 0 ? 0 : head_bytes(p, chunks.rows) + chunks.of_products;
  if (rows == 0 || n == 0 || chunks.rows == rows) return PYDET_OK;
  p.dw = {nullptr, Type::f32, n, k, k, 1};
  p.dx.type = p.x.type;
  p.accumulate = options.accumulate != 0;
  p.dw.data = reinterpret_cast<char *>(kHeadAlignment);  // anywhere
  for (char *dbias : {&there, static_cast<char *>(nullptr)}) {
    p.dbias.data = dbias;
    const HeadSlabs slabs = head_slabs(p);
    if (slabs.count == 0) continue;
    const uint64_t wanted =
        head_product_bytes(p, gpu ? gpu->table<Gemm>().hooks->workspace : nullptr, rows, slabs.columns);
    *bytes = std::max(*bytes, std::min(p.workspace_size, head_slab_bytes(p, slabs.columns) + wanted));
  }
  return PYDET_OK;
}

}  // namespace pydet
