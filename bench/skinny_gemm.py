"""Few rows against large weights: the decode step, bound by memory. Drawn ones are of published models' weights."""

from functools import partial

import numpy as np

import pydet
from bench import model_shapes, peers
from bench.gemm import copies, normal, operand, same_bits_by_every_kernel
from bench.harness import Row, Variant


def skinny(m, n, k, layout, dtype="fp32"):
    """y = x w^T with w [N, K], or y = x b with b [K, N]. The rate counts the bytes of the weights."""
    x, b = normal(1, (m, k), dtype), operand(2, k, n, "T" if layout == "w[N,K]" else "N", dtype)
    sets = copies((x, b, np.empty((m, n), x.dtype)))
    call = pydet.skinny_gemm if layout == "w[N,K]" else pydet.gemm
    ours = [partial(call, x, b.T if layout == "w[N,K]" else b, out=y, arithmetic="ieee") for x, b, y in sets]
    return Row(
        op="skinny_gemm" if layout == "w[N,K]" else "gemm",
        shape=f"{m} x {n} x {k}, {layout}",
        dtype=dtype,
        work=b.nbytes,
        unit="GB/s",
        variants=[Variant("pydet", ours, [sets[0][2]]), *peers.products(sets)],
        peer="numpy",
        agrees=partial(same_bits_by_every_kernel, x, b, sets[0][2], "ieee", dtype),
        note="" if dtype == "fp32" else peers.AS_FP32,
    )


def rows(threads):
    for m in (1, 8):
        for layout in ("w[N,K]", "b[K,N]"):
            yield partial(skinny, m, 4096, 4096, layout)


MOST_ELEMENTS = 1 << 24  # of drawn weights


def draw(generator, between):
    n, k = generator.choice([(n, k) for n, k in model_shapes.pool() if n * k <= MOST_ELEMENTS])
    dtype, layout = generator.choices(("fp32", "bf16"), (3, 1))[0], generator.choice(("w[N,K]", "b[K,N]"))
    return partial(skinny, between(1, 16), n, k, layout, dtype)
