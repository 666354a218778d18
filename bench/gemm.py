"""GEMM. fp32 beside NumPy's BLAS and PyTorch, and the tensor-core models, kernel beside kernel, on one core. Drawn
products are of fp32 or bf16, of 2 MFLOP to 6 GFLOP, in four layouts."""

from functools import partial

import ml_dtypes
import numpy as np

import pydet
from bench import peers
from bench.harness import Row, Variant, buffer_sets

TYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}


def normal(seed, shape, dtype="fp32"):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(TYPES[dtype])


def copies(arrays):
    """Sets of buffers with the same contents and layouts: the arrays themselves, and copies."""
    sets = buffer_sets(sum(array.nbytes for array in arrays))
    return [arrays] + [tuple(array.copy(order="K") for array in arrays) for _ in range(sets - 1)]


def kernels_of(operation, arithmetic, dtype):
    """Names of the kernels that this CPU can run."""
    return [
        k.name
        for k in pydet.kernels()
        if k.available
        and k.device == "cpu"
        and (k.operation, k.arithmetic) == (operation, arithmetic)
        and dtype in k.dtypes
    ]


def same_bits_by_every_kernel(a, b, out, arithmetic, dtype):
    """An element depends on its row of a and column of b alone, so that a few of each, in a product of their own, tell
    what every kernel makes of the large one."""
    random = np.random.default_rng(0)
    rows = np.sort(random.permutation(out.shape[0])[:16])
    cols = np.sort(random.permutation(out.shape[1])[:48])
    a, b, want = a[rows], b[:, cols], out[np.ix_(rows, cols)].tobytes()
    names = kernels_of("gemm", arithmetic, dtype)
    parts = [pydet.gemm(a, b, arithmetic=arithmetic, out_dtype=out.dtype, kernel=name) for name in names]
    return len(names) > 0 and all(part.tobytes() == want for part in parts)


def operand(seed, rows, columns, letter, dtype):
    """Of a layout's letter: N row-major, T the transpose of what is."""
    return normal(seed, (rows, columns), dtype) if letter == "N" else normal(seed, (columns, rows), dtype).T


def product(m, n, k, dtype="fp32", layout="NN"):
    """C = A B."""
    a, b = operand(1, m, k, layout[0], dtype), operand(2, k, n, layout[1], dtype)
    sets = copies((a, b, np.empty((m, n), a.dtype)))
    calls = [partial(pydet.gemm, a, b, out=out, arithmetic="ieee") for a, b, out in sets]
    return Row(
        op="gemm",
        shape=f"{m} x {n} x {k}" + f", {layout}" * (layout != "NN"),
        dtype=dtype,
        work=2 * m * n * k,
        unit="GFLOP/s",
        variants=[Variant("pydet", calls, [sets[0][2]]), *peers.products(sets)],
        peer="numpy",
        agrees=partial(same_bits_by_every_kernel, a, b, sets[0][2], "ieee", dtype),
        note="" if dtype == "fp32" else peers.AS_FP32,
    )


def model(arithmetic, dtype, m=64, n=256, k=2048):
    """A tensor core's arithmetic on the CPU, by each kernel that computes it."""
    a, b = normal(1, (m, k), dtype), normal(2, (k, n), dtype)
    names = kernels_of("gemm", arithmetic, dtype)
    outs = {name: np.empty((m, n), np.float32) for name in names}
    call = partial(pydet.gemm, a, b, arithmetic=arithmetic)
    return Row(
        op=f"gemm {arithmetic}",
        shape=f"{m} x {n} x {k}",
        dtype=dtype,
        work=m * n * k,
        unit="GMAC/s",
        variants=[Variant(name, [partial(call, out=out, kernel=name)], [out]) for name, out in outs.items()],
        peer=f"cpu_gemm_{arithmetic}_scalar",
    )


def rows(threads):
    for m, n, k in ((512, 4096, 4096), (1024, 1024, 1024), (2048, 2048, 2048)):
        yield partial(product, m, n, k)
    if threads == 1:
        yield partial(model, "sm90", "bf16")
        yield partial(model, "sm90", "fp16")
        for arithmetic in ("sm80", "cdna3", "cdna2"):
            yield partial(model, arithmetic, "bf16")


def draw(generator, between):
    dtype, layout = generator.choices(("fp32", "bf16"), (3, 1))[0], generator.choice(("NN", "NT", "TN", "TT"))
    while True:
        m, n, k = (between(1, 4096) for _ in range(3))
        if 2e6 <= 2 * m * n * k <= 6e9:
            return partial(product, m, n, k, dtype, layout)
