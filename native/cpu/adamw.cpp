// A step of AdamW, element by element in fp32 (NUMERICS.md, "AdamW"). The bits are those of every other backend.

#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "ops/adamw/formula.h"

namespace pydet {
namespace {

// x as it comes back from an element of T.
template <class T> Floats rounded(Floats x) {
  typename T::Stored words[kWidth];
  T::store(words, x);
  return T::load(words);
}
template <class T> float rounded(float x) {
  typename T::Stored word;
  T::set(&word, x);
  return T::get(&word);
}
inline float where_equal(float a, float b, float x, float y) { return a == b ? x : y; }

// Elements [begin, end) of a tensor, whose parameter is of P and whose gradient is of G.
template <class P, class G> void step_range(const AdamWNumbers &by, const AdamWTensor &t, int64_t begin, int64_t end) {
  using Fp32 = Number<Type::f32>;
  auto *param = (typename P::Stored *)t.param + begin;
  const auto *grad = (const typename G::Stored *)t.grad + begin;
  float *exp_avg = t.exp_avg + begin, *exp_avg_sq = t.exp_avg_sq + begin;
  float *master = t.master ? t.master + begin : nullptr;
  along(end - begin, [&](int64_t i, auto width) {
    const auto g = get<G>(grad + i, width);
    auto w = get<P>(param + i, width), m = get<Fp32>(exp_avg + i, width), v = get<Fp32>(exp_avg_sq + i, width);
    if (master) {
      const auto kept = get<Fp32>(master + i, width);
      w = where_equal(rounded<P>(kept), w, kept, w);
    }
    adamw_step(by, [&](float x) { return all(x, width); }, g, w, m, v);
    set<Fp32>(exp_avg + i, m);
    set<Fp32>(exp_avg_sq + i, v);
    if (master) set<Fp32>(master + i, w);
    set<P>(param + i, w);
  });
}

}  // namespace

template <> pydet_status adamw<Isa>(const AdamW &problem) {
  constexpr int64_t kPiece = 4096;    // elements that a task takes
  constexpr double kWorth = 1 << 14;  // elements for which a thread is worth waking
  int64_t ends[PYDET_ADAMW_TENSORS];  // where the pieces of each tensor end, among all
  int64_t pieces = 0;
  double work = 0;
  for (int t = 0; t < problem.count; ++t) {
    work += double(problem.tensors[t].size);
    ends[t] = pieces += divide_up(problem.tensors[t].size, kPiece);
  }
  Scratch scratch;  // not worked in: where there is none, one thread computes
  parallel(pieces, threads_for(work, kWorth), scratch, [&](int64_t piece, Scratch &) {
    int t = 0;
    while (piece >= ends[t]) ++t;
    const AdamWTensor &tensor = problem.tensors[t];
    const int64_t begin = (piece - (t ? ends[t - 1] : 0)) * kPiece, rest = tensor.size - begin;
    dispatch(tensor.param_type, [&](auto param) {
      dispatch(tensor.grad_type, [&](auto grad) {
        step_range<decltype(param), decltype(grad)>(problem.by, tensor, begin, begin + (rest < kPiece ? rest : kPiece));
      });
    });
  });
  return PYDET_OK;
}

}  // namespace pydet
