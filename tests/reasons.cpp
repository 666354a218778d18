// For tests/test_needs.py: rows that refuse a problem for one reason each. Prints the sentence of each.
#include "check/reason.h"

using namespace pydet;

namespace {

bool is_aligned(const char *data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

void show(const Kernel<Gemm> &row, const Gemm &g) {
  refuse_row("gemm", row, g, g.a.type, g.arithmetic);
  printf("%s\n", last_error);
}

}  // namespace

int main() {
  alignas(512) static char memory[1024];
  auto here = [](const Device &) { return true; };
  const auto away = [](const Device &) { return false; };
  Gemm g = {};
  g.device = {PYDET_CUDA, 1};
  g.arithmetic = Arithmetic::sm90;
  g.m = 100, g.n = 8, g.k = 24, g.k_chunk = 16, g.batch.count = 1;
  g.a = {memory + 514, Type::bf16, 100, 24, 25, 1};
  g.b = {memory, Type::bf16, 24, 8, 8, 1};
  g.out = {memory, Type::bf16, 100, 8, 8, 1};
  constexpr uint64_t kAll = ~0ull;
  show({"typed", bit(Type::f32), Arithmetic::sm90, kAll, "", here, nullptr, nullptr, {}}, g);
  show({"other", kHalfTypes, Arithmetic::ieee, kAll, "", here, nullptr, nullptr, {}}, g);
  show({"absent", kHalfTypes, Arithmetic::sm90, kAll, "sm_90a", away, nullptr, nullptr, {}}, g);
  const auto few = [](const Gemm &p) { return p.m <= 64 && p.k_chunk == 0; };
  show({"small", kHalfTypes, Arithmetic::sm90, kAll, "", here, few, nullptr, {}}, g);
  const auto aligned = [](const Gemm &p) { return is_aligned(p.a.data) && p.a.row_stride % 8 == 0; };
  show({"aligned", kHalfTypes, Arithmetic::sm90, kAll, "", here, aligned, nullptr, {}}, g);
  const auto along_k = [](const Gemm &p) { return p.b.row_stride == 1; };
  show({"along_k", kHalfTypes, Arithmetic::sm90, kAll, "", here, along_k, nullptr, {}}, g);
  const auto whole = [](const Gemm &p) { return p.k_chunk == 0; };
  show({"whole", kHalfTypes, Arithmetic::sm90, kAll, "", here, whole, nullptr, {}}, g);

  const auto tiles = [](const Gemm &p, int variant) { return is_aligned(p.a.data) ? Choice(variant) : Choice(); };
  show({"tiled", kHalfTypes, Arithmetic::sm90, kAll, "", here, nullptr, nullptr, {}, tiles, 3}, g);

  RmsNorm norm = {};
  norm.n = 40;
  norm.x = {memory + 4, Type::f32, 41, 0, 0};
  const auto rows = [](const RmsNorm &p) { return p.n <= 64 && is_aligned(p.x.data) && p.x.outer_stride % 4 == 0; };
  const Kernel<RmsNorm> held = {"held", ~0u, Arithmetic::ieee, kAll, "", here, rows, nullptr, {}};
  refuse_row("rmsnorm", held, norm, Type::f32, Arithmetic::ieee);
  printf("%s\n", last_error);
  norm.n = 80;
  refuse_row("rmsnorm", held, norm, Type::f32, Arithmetic::ieee);
  printf("%s\n", last_error);
}
