"""Activations, sampling and topk beside PyTorch's on the CPU.

PyTorch allocates its results in each call; pydet writes into `out` where it says so.
"""

from functools import partial

import numpy as np

import pydet
from bench.gemm import copies, normal
from bench.harness import Row, Variant
from bench.peers import NO_TORCH, as_torch, torch


def row(op, shape, dtype, work, variants):
    return Row(op, shape, dtype, variants, "torch", work, "GB/s", note="" if torch else NO_TORCH)


def activating(kind, m, n, dtype):
    x = normal(1, (m, n), dtype)
    sets = copies((x, np.empty_like(x)))
    variants = [Variant("pydet, out=", [partial(pydet.activation, x, kind, out=y) for x, y in sets], [sets[0][1]])]
    if torch:
        stock = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[kind]
        variants.append(Variant("torch", [partial(stock, as_torch(x)) for x, _ in sets]))
    return row(kind, f"{m} x {n}", dtype, 2 * x.nbytes, variants)


def sampling(m, n, dtype):
    x, number = normal(1, (m, n), dtype), np.arange(m)
    sets = copies((x, np.empty(m, np.int64)))
    call = partial(pydet.sample, temperature=0.8, return_log_prob=False)
    variants = [Variant("pydet, out=", [partial(call, x, number, number, out=y) for x, y in sets], [sets[0][1]])]
    if torch:

        def stock(x):
            return torch.multinomial((x.float() / 0.8).softmax(-1), 1)

        variants.append(Variant("torch", [partial(stock, as_torch(x)) for x, _ in sets]))
    return row("sample", f"{m} x {n}", dtype, x.nbytes, variants)


def largest(m, n, k, dtype):
    x = normal(1, (m, n), dtype)
    sets = copies((x, np.empty((m, k), x.dtype), np.empty((m, k), np.int64)))
    calls = [partial(pydet.topk, x, k, values=values, index=index) for x, values, index in sets]
    variants = [Variant("pydet, out=", calls, [*sets[0][1:]])]
    if torch:
        variants.append(Variant("torch", [partial(torch.topk, as_torch(x), k) for x, *_ in sets]))
    return row(f"topk, k = {k}", f"{m} x {n}", dtype, x.nbytes, variants)


def rows(threads):
    for dtype in ("fp32", "bf16"):
        for kind in ("silu", "gelu"):
            yield partial(activating, kind, 4096, 4096, dtype)
        yield partial(sampling, 16, 152064, dtype)
        yield partial(largest, 16, 152064, 50, dtype)
