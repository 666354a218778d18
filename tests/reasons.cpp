// For tests/test_needs.py: rows that refuse a problem for one reason each. Prints the sentence of each.
#include "core/launch.cpp"

using namespace pydet;

const Backend &pydet::cpu_backend() {
  static const Backend none = {};
  return none;
}
const Backend *pydet::gpu_backend() { return nullptr; }

namespace {

bool is_aligned(const char *data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

template <class Problem> pydet_status never(const Problem &) { return PYDET_OK; }

void show(const Kernel<Gemm> &row, const Gemm &g) {
  refuse_row("gemm", row, g, g.a.type, g.arithmetic);
  printf("%s\n", last_error);
}

}  // namespace

int main() {
  alignas(512) static char memory[1024];
  constexpr Machine kHere = {"", [](const Device &) { return true; }};
  constexpr Machine kAway = {"sm_90a", [](const Device &) { return false; }};
  Gemm g = {};
  g.device = {PYDET_CUDA, 1};
  g.arithmetic = Arithmetic::sm90;
  g.m = 100, g.n = 8, g.k = 24, g.k_chunk = 16, g.batch.count = 1;
  g.a = {memory + 514, Type::bf16, 100, 24, 25, 1};
  g.b = {memory, Type::bf16, 24, 8, 8, 1};
  g.out = {memory, Type::bf16, 100, 8, 8, 1};
  constexpr uint64_t kAll = ~0ull;
  show(Row("typed", bit(Type::f32), Arithmetic::sm90, kHere, kAll).launches(never<Gemm>), g);
  show(Row("other", kHalfTypes, Arithmetic::ieee, kHere, kAll).launches(never<Gemm>), g);
  show(Row("absent", kHalfTypes, Arithmetic::sm90, kAway, kAll).launches(never<Gemm>), g);
  const auto few = [](const Gemm &p) { return p.m <= 64 && p.k_chunk == 0; };
  show(Row("small", kHalfTypes, Arithmetic::sm90, kHere, kAll).takes<Gemm>(few).launches(never<Gemm>), g);
  const auto aligned = [](const Gemm &p) { return is_aligned(p.a.data) && p.a.row_stride % 8 == 0; };
  show(Row("aligned", kHalfTypes, Arithmetic::sm90, kHere, kAll).takes<Gemm>(aligned).launches(never<Gemm>), g);
  const auto along_k = [](const Gemm &p) { return p.b.row_stride == 1; };
  show(Row("along_k", kHalfTypes, Arithmetic::sm90, kHere, kAll).takes<Gemm>(along_k).launches(never<Gemm>), g);
  const auto whole = [](const Gemm &p) { return p.k_chunk == 0; };
  show(Row("whole", kHalfTypes, Arithmetic::sm90, kHere, kAll).takes<Gemm>(whole).launches(never<Gemm>), g);

  const auto tiles = [](const Gemm &p, int variant) { return is_aligned(p.a.data) ? Choice(variant) : Choice(); };
  show(Row("tiled", kHalfTypes, Arithmetic::sm90, kHere, kAll).chooses<Gemm>(tiles, 3).launches(never<Gemm>), g);

  RmsNorm norm = {};
  norm.n = 40;
  norm.x = {memory + 4, Type::f32, 41, 0, 0};
  const auto rows = [](const RmsNorm &p) { return p.n <= 64 && is_aligned(p.x.data) && p.x.outer_stride % 4 == 0; };
  const auto held = Row("held", ~0u, Arithmetic::ieee, kHere, kAll).takes<RmsNorm>(rows).launches(never<RmsNorm>);
  refuse_row("rmsnorm", held, norm, Type::f32, Arithmetic::ieee);
  printf("%s\n", last_error);
  norm.n = 80;
  refuse_row("rmsnorm", held, norm, Type::f32, Arithmetic::ieee);
  printf("%s\n", last_error);

  Backend backend = {PYDET_ROCM, "HIP"};
  backend.device_count = [](int32_t *count) { return *count = 1, pydet_status(PYDET_OK); };
  backend.built_for = "HIP_ARCHS=\"gfx942\"";
  Fold fold = {};
  fold.device = {PYDET_ROCM, 0};
  refuse("fold", fold, backend, no_kernels<Fold>());
  printf("%s\n", last_error);
}
