"""Few rows against large weights: the decode step, bound by memory."""

from functools import partial

import numpy as np

import pydet
from bench.gemm import copies, normal, same_bits_by_every_kernel
from bench.harness import Row, Variant


def skinny(m, n, k, layout):
    """y = x w^T with w [N, K], or y = x b with b [K, N]; fp32. The rate counts the bytes of the weights."""
    x, w = normal(1, (m, k)), normal(2, (n, k) if layout == "w[N,K]" else (k, n))
    ours = copies((x, w, np.empty((m, n), np.float32)))
    theirs = [(x, w, np.empty_like(y)) for x, w, y in ours]
    if layout == "w[N,K]":
        calls = [partial(pydet.skinny_gemm, x, w, out=y) for x, w, y in ours]
        peer = [partial(np.matmul, x, w.T, out=y) for x, w, y in theirs]
        b = w.T
    else:
        calls = [partial(pydet.gemm, x, w, out=y) for x, w, y in ours]
        peer = [partial(np.matmul, x, w, out=y) for x, w, y in theirs]
        b = w
    return Row(
        op="skinny_gemm" if layout == "w[N,K]" else "gemm",
        shape=f"{m} x {n} x {k}, {layout}",
        dtype="fp32",
        work=w.nbytes,
        unit="GB/s",
        variants=[Variant("pydet", calls, [ours[0][2]]), Variant("numpy", peer)],
        peer="numpy",
        agrees=partial(same_bits_by_every_kernel, x, b, ours[0][2], "ieee", "fp32"),
    )


def rows(threads):
    for m in (1, 8):
        for layout in ("w[N,K]", "b[K,N]"):
            yield partial(skinny, m, 4096, 4096, layout)
