"""fp8 products beside torch's (cuBLASLt), each recipe beside its own, and quantisation beside a copy.

A row is one recipe: blocks (1x128 of a, 128x128 of b), rows, or one scale a matrix. Its peer is torch._scaled_mm of
that recipe; one with fast accumulation, bf16 and DeepGEMM, where it is installed, stand beside it.
"""

import math
from functools import partial

import torch

import pydet
from bench import draws, model_shapes
from bench.harness import Row, Variant

L2_BYTES = 50 << 20
E4M3 = torch.float8_e4m3fn
DENSE_NK = [(7168, 2048), (2048, 7168), (4096, 7168), (8192, 8192), (6144, 4096), (4096, 14336), (28672, 4096)]
DENSE_M = [512, 1024, 2048, 4096, 8192]
DECODE_NK = [(7168, 2048), (4096, 7168), (2048, 7168), (18432, 7168), (576, 7168)]
DECODE_M = [1, 16, 32, 64, 128]
QUANTIZE_MK = [(4096, 2048), (4096, 7168), (16384, 4096), (64, 7168)]

try:
    import deep_gemm
except ImportError:
    deep_gemm = None


def sets_of(bytes_each, most):
    """How many sets of buffers pass the L2 twice over."""
    return max(2, min(most, math.ceil(2 * L2_BYTES / bytes_each)))


def quantised(rows, k, granularity):
    return pydet.quantize(torch.randn(rows, k, device="cuda").bfloat16(), granularity=granularity)


def one_scale(rows, k):
    x = torch.randn(rows, k, device="cuda")
    return pydet.quantize(x, granularity="tensor", scale=torch.tensor(0.01, device="cuda"))


def scales_of_torch(recipe, sa, sw):
    """As torch._scaled_mm reads them: of groups and blocks the numbers of one chunk of k are adjacent."""
    if recipe == "rows":
        return sa, sw.t().contiguous()
    if recipe == "blocks":
        padded = torch.nn.functional.pad(sw, (0, -sw.shape[1] % 4))
        return sa.t().contiguous().t(), padded[:, : sw.shape[1]].t()
    return sa, sw


def out_of(a, w):
    return torch.empty(len(a), len(w), dtype=torch.bfloat16, device="cuda")


def peers_of(recipe, sets):
    """torch's calls that this build and device take, by name."""
    ways = {f"torch {recipe}": False} | ({f"torch {recipe}, fast": True} if recipe != "blocks" else {})
    for name, fast in ways.items():
        calls = []
        for (a, sa), (w, sw) in sets:
            scales = scales_of_torch(recipe, sa, sw)
            given = {"out_dtype": torch.bfloat16, "use_fast_accum": fast, "out": out_of(a, w)}
            calls.append(partial(torch._scaled_mm, a, w.t(), *scales, **given))
        try:
            calls[0]()
        except (RuntimeError, ValueError) as problem:
            print(f"{name} is left out: {str(problem).splitlines()[0]}")
            continue
        yield Variant(name, calls)
    if deep_gemm and recipe == "blocks":
        calls = []
        for (a, sa), (w, sw) in sets:
            column_major = sa.t().contiguous().t()
            calls.append(partial(deep_gemm.fp8_gemm_nt, (a, column_major), (w, sw), out_of(a, w)))
        yield Variant("DeepGEMM", calls)


def product(recipe, m, n, k):
    few = m <= DECODE_M[-1]
    make = {
        "blocks": lambda: (quantised(m, k, "group"), quantised(n, k, "block")),
        "rows": lambda: (quantised(m, k, "row"), quantised(n, k, "row")),
        "one scale": lambda: (one_scale(m, k), one_scale(n, k)),
    }[recipe]
    sets = [make() for _ in range(sets_of(m * k + n * k, 400 if few else 48))]
    outs = [out_of(a, w) for (a, _), (w, _) in sets]
    calls = [
        partial(pydet.scaled_gemm, a, w.t(), a_scale=sa, b_scale=sw.t(), out=out)
        for ((a, sa), (w, sw)), out in zip(sets, outs, strict=True)
    ]
    peers = list(peers_of(recipe, sets))
    wide = [(torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()) for _ in sets]
    products = [partial(torch.mm, x, w.t(), out=out_of(x, w)) for x, w in wide]
    variants = [Variant("pydet", calls, [outs[0]]), *peers, Variant("bf16 torch.mm", products)]

    def agrees():
        """Rows of their own have the bits that they had among all."""
        (a, sa), (w, sw) = sets[0]
        for row in (0, m // 2, m - 1):
            scale = sa if sa.dim() == 0 else sa[row : row + 1]
            alone = pydet.scaled_gemm(a[row : row + 1], w.t(), a_scale=scale, b_scale=sw.t())
            if not torch.equal(alone.view(torch.int16), outs[0][row : row + 1].view(torch.int16)):
                return False
        return True

    op = f"scaled_gemm, {recipe}"
    work, unit = (n * k, "GB/s") if few else (2 * m * n * k, "GFLOP/s")
    peer = f"torch {recipe}" if any(v.name == f"torch {recipe}" for v in peers) else "bf16 torch.mm"
    return Row(op, f"{m} x {n} x {k}", "e4m3", variants, peer, work, unit, agrees)


def quantisation(granularity, transposed, m, k):
    written = m * k * (2 if transposed else 1)
    count = sets_of(2 * m * k + written, 48)
    sets = [torch.randn(m, k, device="cuda").bfloat16() for _ in range(count)]
    call = partial(pydet.quantize, granularity=granularity, transposed=transposed)
    outs = [call(x) for x in sets]
    calls = [partial(call, x, out=out) for x, out in zip(sets, outs, strict=True)]
    moved = 2 * m * k + written
    pairs = [torch.empty(2, moved // 2, dtype=torch.uint8, device="cuda") for _ in sets]
    copies = [partial(target.copy_, source) for source, target in pairs]
    shape = f"{m} x {k}, {granularity}" + ", both ways" * transposed
    variants = [Variant("pydet", calls, list(outs[0])), Variant("copy", copies)]
    return Row("quantize", shape, "bf16", variants, "copy", moved, "GB/s")


def dense_rows(quick):
    for recipe in RECIPES:
        for n, k in DENSE_NK[:2] if quick else DENSE_NK:
            for m in (512, 4096) if quick else DENSE_M:
                yield partial(product, recipe, m, n, k)


def decode_rows(quick):
    for recipe in ("blocks", "rows"):
        for n, k in DECODE_NK[:2] if quick else DECODE_NK:
            for m in (1, 64) if quick else DECODE_M:
                yield partial(product, recipe, m, n, k)


def quantize_rows(quick):
    for m, k in QUANTIZE_MK[:2] if quick else QUANTIZE_MK:
        for granularity, transposed in (("row", False), ("group", False), ("group", True), ("block", True)):
            yield partial(quantisation, granularity, transposed, m, k)


RECIPES = ("blocks", "rows", "one scale")
MOST_M = 8192


def drawn(generator, between):
    """Of models that no table was fitted to; torch takes extents of whole 16, and of blocks whole 128."""
    recipe, m = generator.choice(RECIPES), between(1, MOST_M)
    unit = 128 if recipe == "blocks" else 16
    shapes = [(n, k) for n, k in model_shapes.unseen() if n % unit == 0 and k % unit == 0]
    return partial(product, recipe, m, *generator.choice(shapes))


RANDOM = {"scaled_gemm": partial(draws.rows, drawn)}
ROWS = {"scaled_gemm": dense_rows, "fp8_decode": decode_rows, "quantize": quantize_rows}
