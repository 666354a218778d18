// What XLA asks of sampling, and of the k largest of a row: buffers of rows, whatever their leading dimensions.

#include "core/operations.h"
#include "entry/xla_rows.h"

namespace pydet {
namespace {

// A row's own numbers, which the call has if the flag says so.
struct OwnNumbers {
  Shape shape;
  pydet_tensor tensor;

  const pydet_tensor *read(Call &call, const char *flag, const char *name, const pydet_xla_buffer &rows,
                           int64_t *argument) {
    if (!call.flag(flag)) return nullptr;
    tensor = as_values(call, name, call.argument((*argument)++), rows, &shape);
    return &tensor;
  }
};

// Operands: x, seed, position (int32 or int64), then temperatures, top_ks, top_ps, min_ps, each if there is one; the
// token's two words of 32 bits, log_prob, filtered_log_prob.
void sample(Call &call) {
  pydet_sample_options options = {};
  options.struct_size = sizeof options;
  options.temperature = call.real("temperature");
  options.top_p = call.real("top_p");
  options.min_p = call.real("min_p");
  options.top_k = call.integer("top_k");
  options.kernel = call.kernel();
  const pydet_xla_buffer &rows = call.argument(0);
  int64_t next = 3;
  OwnNumbers temperatures, top_ks, top_ps, min_ps;
  Shape s[5];
  const pydet_tensor x = as_rows(call, rows, &s[0]), seed = as_values(call, "seed", call.argument(1), rows, &s[1]),
                     position = as_values(call, "position", call.argument(2), rows, &s[2]);
  options.temperatures = temperatures.read(call, "has_temperatures", "temperatures", rows, &next);
  options.top_ks = top_ks.read(call, "has_top_ks", "top_ks", rows, &next);
  options.top_ps = top_ps.read(call, "has_top_ps", "top_ps", rows, &next);
  options.min_ps = min_ps.read(call, "has_min_ps", "min_ps", rows, &next);
  const int64_t lead = rows.rank ? rows.rank - 1 : 0;
  const pydet_tensor log_prob = as_values(call, "log_prob", call.result(1), rows, &s[3]),
                     filtered = as_values(call, "filtered_log_prob", call.result(2), rows, &s[4]);
  const pydet_tensor token = as_words(call, "token", call.result(0), rows.dims, lead, log_prob);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_sample(stream, &x, &seed, &position, &token, &log_prob, &filtered, &options));
}

// Operands: x; values [..., k], and the two words of 32 bits of each index.
void topk(Call &call) {
  pydet_topk_options options = {};
  options.struct_size = sizeof options;
  options.kernel = call.kernel();
  const pydet_xla_buffer &rows = call.argument(0), &chosen = call.result(0);
  Shape s[2];
  const pydet_tensor x = as_rows(call, rows, &s[0]), values = as_rows(call, chosen, &s[1]);
  int64_t want[kMaxRank];
  if (rows.rank <= kMaxRank && chosen.rank == rows.rank) {
    for (int64_t i = 0; i < rows.rank; ++i) want[i] = i + 1 < rows.rank ? rows.dims[i] : chosen.dims[i];
    call.expect_shape("values", chosen, want, rows.rank);
  } else {
    call.fail("values is %s, want as many dimensions as x has, %s", ShapeWords(chosen.dims, chosen.rank).text,
              ShapeWords(rows.dims, rows.rank).text);
  }
  const pydet_tensor index = as_words(call, "index", call.result(1), chosen.dims, chosen.rank, values);
  void *stream = call.stream();
  if (!call.failed()) call.check(pydet_topk(stream, &x, &values, &index, &options));
}

constexpr char kSample[] = "sample";
constexpr char kTopK[] = "topk";
constexpr pydet_xla_handler kHandlers[] = {
    handler<kSample, sample>(),
    handler<kTopK, topk>(),
};

}  // namespace

Items<pydet_xla_handler> Operation<Sample>::xla() { return kHandlers; }

}  // namespace pydet
