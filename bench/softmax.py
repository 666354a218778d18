"""Softmax and its logarithm, forward and backward, beside PyTorch's on the CPU and a copy of as many bytes.

The rate counts each tensor once. PyTorch allocates its results in each call, pydet writes into `out`.
"""

from functools import partial

import numpy as np

import pydet
from bench import draws
from bench.gemm import copies, kernels_of, normal
from bench.harness import Row, Variant
from bench.peers import NO_TORCH, as_torch, copying, torch

NAMES = ("softmax", "log_softmax")


def row(op, x, dtype, tensors, variants, agrees):
    shape, peer, note = f"{x.shape[0]} x {x.shape[1]}", "torch" if torch else "copy", "" if torch else NO_TORCH
    return Row(op, shape, dtype, variants, peer, tensors * x.nbytes, "GB/s", agrees, note)


def agree(operation, call, given, out, dtype):
    """Some rows have these bits by each kernel."""
    some = slice(len(out) // 2, len(out) // 2 + 2)
    names = kernels_of(operation, "ieee", dtype)
    parts = [call(*(x[some] for x in given), kernel=name) for name in names]
    return len(names) > 0 and all(part.tobytes() == out[some].tobytes() for part in parts)


def forward(name, m, n, dtype):
    x, call = normal(1, (m, n), dtype), getattr(pydet, name)
    sets = copies((x, np.empty_like(x)))
    variants = [
        Variant("pydet", [partial(call, x, out=y) for x, y in sets], [sets[0][1]]),
        Variant("copy", [copying([x], [y]) for x, y in sets]),
    ]
    if torch:
        variants.append(Variant("torch", [partial(getattr(torch, name), as_torch(x), -1) for x, _ in sets]))
    return row(name, x, dtype, 2, variants, partial(agree, "softmax", call, [x], sets[0][1], dtype))


def backward(name, m, n, dtype):
    dy, y = normal(1, (m, n), dtype), getattr(pydet, name)(normal(2, (m, n), dtype))
    call = getattr(pydet, f"{name}_backward")
    sets = copies((dy, y, np.empty_like(y)))
    variants = [
        Variant("pydet", [partial(call, dy, y, out=dx) for dy, y, dx in sets], [sets[0][2]]),
        Variant("copy", [copying([dy, y], [dx]) for dy, y, dx in sets]),
    ]
    if torch:
        theirs, kind = getattr(torch.ops.aten, f"_{name}_backward_data"), as_torch(y).dtype
        calls = [partial(theirs, as_torch(dy), as_torch(y), -1, kind) for dy, y, _ in sets]
        variants.append(Variant("torch", calls))
    agrees = partial(agree, "softmax_backward", call, [dy, y], sets[0][2], dtype)
    return row(f"{name}_backward", y, dtype, 3, variants, agrees)


def rows(threads):
    for name in NAMES:
        for direction in (forward, backward):
            for dtype in ("fp32", "bf16"):
                for shape in ((4096, 1024), (64, 128256)):
                    yield partial(direction, name, *shape, dtype)


MOST_ELEMENTS = 1 << 24  # of a drawn x


def draw(generator, _):
    shape = draws.norm_shape(generator, 131072, MOST_ELEMENTS)
    return partial(
        generator.choice((forward, backward)), generator.choice(NAMES), *shape, generator.choice(("fp32", "bf16"))
    )
