// For tests/test_needs.py: hands every row of this build's kernel tables to the library's choice, with a problem that
// needs nothing of a kernel. Each row is opened as far as it goes beside its features, so these alone decide. Prints
// "name status sentence" a row. No kernel is linked, and none is launched.
#include "core/launch.cpp"

namespace pydet {
namespace {

// A problem whose own needs the row names, where it always has one.
template <class Problem> void suit(const Kernel<Problem> &, Problem &) {}
void suit(const Kernel<ScaledGemm> &, ScaledGemm &problem) { problem.k_chunk = kScaleGroup; }
void suit(const Kernel<ScaledGroupedGemm> &, ScaledGroupedGemm &problem) { problem.k_chunk = kScaleGroup; }
void suit(const Kernel<Quantize> &row, Quantize &problem) {
  constexpr uint64_t kReleased = ~(1ull << 63);
  for (int i = PYDET_ROW; i <= PYDET_TENSOR && (problem.needs() & kReleased & ~row.features); ++i)
    problem.granularity = Granularity(i);
}

void suit(const Kernel<Attention> &, Attention &problem) { problem.window_left = problem.window_right = kNoWindow; }

template <class Problem> void show(const Backend &backend, const Kernel<Problem> &row) {
  Problem problem = {};
  problem.device = {backend.device_type, 0};
  suit(row, problem);
  Kernel<Problem> open = row;
  open.types = bit(input_type(problem));
  open.arithmetic = arithmetic_of(problem);
  open.machine = {"", [](const Device &) { return true; }};
  open.takes = nullptr, open.prefers = nullptr, open.choose = nullptr;
  const Kernel<Problem> *chosen = nullptr;
  Choice choice;
  const Table<Problem> alone = {&open, 1, nullptr};
  const pydet_status status = choose_by_name("needs", alone, problem, row.name, &chosen, &choice);
  const bool by_itself = choose(alone, problem, &choice) == &open;
  if (by_itself != (status == PYDET_OK)) printf("by name and by itself differ: ");
  printf("%s %d %s\n", row.name, int(status), status == PYDET_OK ? "" : last_error);
}

}  // namespace
}  // namespace pydet

int main() {
  pydet::each_kernel([](const pydet::Backend &backend, const char *, const auto &row) { pydet::show(backend, row); });
}
