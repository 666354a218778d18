"""fp8 products and quantisation, kernel beside kernel; on one core."""

from functools import partial

import ml_dtypes
import numpy as np

import pydet
from bench.gemm import kernels_of, normal
from bench.harness import Row, Variant

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def product(arithmetic, granularity, m=64, n=256, k=2048):
    """Of quantised normal numbers: scales by 128 along k and blocks, or by rows and columns."""
    (a, sa), (w, sw) = (
        pydet.quantize(normal(seed, shape), granularity=granularity[side], dtype=E4M3)
        for side, (seed, shape) in enumerate(((1, (m, k)), (2, (n, k))))
    )
    outs = {name: np.empty((m, n), np.float32) for name in kernels_of("scaled_gemm", arithmetic, "e4m3")}
    call = partial(pydet.scaled_gemm, a, w.T, a_scale=sa, b_scale=sw.T, arithmetic=arithmetic)
    return Row(
        op=f"scaled_gemm {arithmetic}",
        shape=f"{m} x {n} x {k}, {granularity[0]} and {granularity[1]}",
        dtype="e4m3",
        work=m * n * k,
        unit="GMAC/s",
        variants=[Variant(name, [partial(call, out=out, kernel=name)], [out]) for name, out in outs.items()],
        peer=f"cpu_scaled_gemm_{arithmetic}_scalar",
    )


def quantisation(granularity, transposed, m=1024, k=4096):
    """bf16 to e4m3; the rate counts the bytes of x and of what is written."""
    x, groups = normal(1, (m, k), "bf16"), {"row": 1, "group": -(-k // 128)}[granularity]
    variants = []
    for name in kernels_of("quantize", "ieee", "bf16"):
        out = [np.empty((m, k), E4M3), np.empty((m, groups), np.float32)]
        if transposed:
            out += [np.empty((k, m), E4M3), np.empty((k, -(-m // 128)), np.float32)]
        call = partial(pydet.quantize, x, granularity=granularity, transposed=transposed, out=tuple(out), kernel=name)
        variants.append(Variant(name, [call], out))
    return Row(
        op="quantize",
        shape=f"{m} x {k}, {granularity}" + ", both ways" * transposed,
        dtype="bf16",
        work=m * k * (4 if transposed else 3),
        unit="GB/s",
        variants=variants,
        peer="cpu_quantize_scalar",
    )


def rows(threads):
    if threads == 1:
        for arithmetic in ("sm90", "ieee"):
            for granularity in (("group", "block"), ("row", "row")):
                yield partial(product, arithmetic, granularity)
        for granularity, transposed in (("row", False), ("group", False), ("group", True)):
            yield partial(quantisation, granularity, transposed)
