"""pydet bench: how fast pydet is on this CPU, beside NumPy, and whether the bits that it timed are right.

A small bench of what an installed package has: a few seconds, NumPy as the one peer. That of the sources (`make bench`,
`python -m bench.cuda`) has more shapes and peers, GPUs, buffers that pass the caches, and samples that it takes again
when other processes disturb them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

try:
    import ml_dtypes
    import numpy as np
except ImportError as missing:
    raise SystemExit(f"pydet bench: needs numpy and ml_dtypes ({missing}): pip install numpy ml_dtypes") from None

import pydet

SAMPLES = 5


def microseconds(calls: list[Callable[[], Any]], seconds: float) -> list[float]:
    """The median time of each call; they take turns, and each sample makes as many calls as fill its share."""
    counts = []
    for call in calls:
        call()
        begin = time.perf_counter()
        call()
        counts.append(max(1, int(seconds / SAMPLES / max(time.perf_counter() - begin, 1e-7))))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(SAMPLES):
        for call, count, taken in zip(calls, counts, samples, strict=True):
            begin = time.perf_counter()
            for _ in range(count):
                call()
            taken.append((time.perf_counter() - begin) / count * 1e6)
    return [statistics.median(taken) for taken in samples]


def product(
    m: int, n: int, k: int, dtype: str, arithmetic: Any, seconds: float, *, skinny: bool = False
) -> dict[str, Any]:
    """A row of the table: a product, timed beside NumPy's in fp32; one of its rows alone must have the same bits."""
    random = np.random.default_rng(0)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    x, w = random.standard_normal((m, k)).astype(kind), random.standard_normal((n, k)).astype(kind)
    out = np.empty((m, n), kind)

    def run(x: Any, out: Any) -> Any:
        operation = pydet.skinny_gemm if skinny else pydet.gemm
        return operation(x, w if skinny else w.T, out=out, arithmetic=arithmetic)

    calls = [lambda: run(x, out)]
    if dtype == "float32":
        theirs = np.empty_like(out)
        calls.append(lambda: np.matmul(x, w.T, out=theirs))
    us, *peer = microseconds(calls, seconds)
    row = m // 2
    return {
        "operation": "skinny_gemm" if skinny else "gemm",
        "shape": f"{m} x {n} x {k}",
        "dtype": dtype,
        "arithmetic": arithmetic,
        "kernel": pydet.last_kernel(),
        "us": us,
        "rate": f"{m * n * k / us / 1e3:.1f} GMAC/s",
        "times_numpy": peer[0] / us if peer else None,
        "bits_ok": run(x[row : row + 1], None).tobytes() == out[row : row + 1].tobytes(),
    }


def norm(m: int, n: int, seconds: float) -> dict[str, Any]:
    """The row of the RMSNorm."""
    x = np.random.default_rng(0).standard_normal((m, n), np.float32)
    y = np.empty_like(x)

    def numpy() -> Any:
        return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(1e-6))

    us, peer = microseconds([lambda: pydet.rmsnorm(x, eps=1e-6, out=y), numpy], seconds)
    return {
        "operation": "rmsnorm",
        "shape": f"{m} x {n}",
        "dtype": "float32",
        "arithmetic": "ieee",
        "kernel": pydet.last_kernel(),
        "us": us,
        "rate": f"{8 * m * n / us / 1e3:.1f} GB/s",
        "times_numpy": peer / us,
        "bits_ok": pydet.rmsnorm(x[1:2], eps=1e-6)[0].tobytes() == y[1:2].tobytes(),
    }


def measure(seconds: float) -> list[dict[str, Any]]:
    """All rows; `seconds` for each variant of each."""
    return [
        product(512, 1024, 1024, "float32", "ieee", seconds),
        product(8, 4096, 1024, "float32", "ieee", seconds, skinny=True),
        product(1, 4096, 1024, "float32", "ieee", seconds, skinny=True),
        product(64, 256, 1024, "bfloat16", "sm90", seconds),
        product(64, 256, 1024, "bfloat16", "sm80", seconds),
        norm(512, 4096, seconds),
    ]


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="pydet bench",
        description="Time pydet on this CPU beside NumPy, and check the bits of what was timed.",
        epilog="Exit status: 0, 1 if a row alone has other bits than in the batch, 2 if it cannot run. The sources "
        "have a longer bench, for GPUs too: make bench, python -m bench.cuda.",
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="for each variant of each row (default: 0.3)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args(arguments)
    if not 0 < given.seconds < float("inf"):
        parser.error("--seconds must be positive and finite")
    rows = measure(given.seconds)
    if given.json:
        print(json.dumps({"pydet": pydet.__version__, "numerics": pydet.NUMERICS, "rows": rows}, indent=2))
    else:
        print(f"{'':12} {'shape':18} {'type':9} {'sum':5} {'us':>9} {'rate':>13} {'x NumPy':>8}  bits  kernel")
        for row in rows:
            times = "" if row["times_numpy"] is None else f"{row['times_numpy']:.2f}"
            print(
                f"{row['operation']:12} {row['shape']:18} {row['dtype']:9} {row['arithmetic']:5} {row['us']:9.1f} "
                f"{row['rate']:>13} {times:>8}  {'ok' if row['bits_ok'] else 'NO':4}  {row['kernel']}"
            )
    return 0 if all(row["bits_ok"] for row in rows) else 1
