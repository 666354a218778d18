"""RMSNorm, forward and backward, beside PyTorch's on the CPU and a copy of as many bytes. The rate counts each large
tensor once.

PyTorch allocates its results in each call, so pydet is timed that way too.
"""

from functools import partial

import numpy as np

import pydet
from bench import draws
from bench.gemm import copies, kernels_of, normal
from bench.harness import Row, Variant
from bench.peers import NO_TORCH, as_torch, copying, torch

EPS = 1e-6
MOST_ELEMENTS = 1 << 24  # of a drawn x


def row(op, x, dtype, work, variants, agrees):
    shape, note = f"{x.shape[0]} x {x.shape[1]}", "" if torch else NO_TORCH
    return Row(op, shape, dtype, variants, "torch" if torch else "copy", work, "GB/s", agrees, note)


def forward(m, n, dtype):
    x, weight = normal(1, (m, n), dtype), normal(2, n, dtype)
    sets = copies((x, weight, np.empty_like(x)))
    call = partial(pydet.rmsnorm, eps=EPS)
    variants = [
        Variant("pydet, out=", [partial(call, x, w, out=y) for x, w, y in sets], [sets[0][2]]),
        Variant("pydet", [partial(call, x, w) for x, w, _ in sets]),
        Variant("copy", [copying([x], [y]) for x, _, y in sets]),
    ]
    if torch:
        norm = torch.nn.functional.rms_norm
        variants.append(Variant("torch", [partial(norm, as_torch(x), (n,), as_torch(w), EPS) for x, w, _ in sets]))

    def agrees():
        some = slice(m // 2, m // 2 + 2)
        y, names = sets[0][2][some], kernels_of("rmsnorm", "ieee", dtype)
        parts = [call(x[some], weight, kernel=name)[0] for name in names]
        return len(names) > 0 and all(part.tobytes() == y.tobytes() for part in parts)

    return row("rmsnorm", x, dtype, 2 * x.nbytes, variants, agrees)


def backward(m, n, dtype):
    """dx and dweight. PyTorch's are what autograd computes for torch.nn.functional.rms_norm."""
    dy, x, weight = normal(1, (m, n), dtype), normal(2, (m, n), dtype), normal(3, n, dtype)
    _, rstd = pydet.rmsnorm(x, weight, eps=EPS)
    sets = copies((dy, x, weight, rstd, np.empty_like(x), np.empty_like(weight)))
    call = pydet.rmsnorm_backward
    calls = [partial(call, dy, x, w, r, out=dx, dweight=dw) for dy, x, w, r, dx, dw in sets]
    variants = [
        Variant("pydet, out=", calls, [sets[0][4], sets[0][5]]),
        Variant("pydet", [partial(call, dy, x, w, r) for dy, x, w, r, *_ in sets]),
        Variant("copy", [copying([dy, x], [dx]) for dy, x, *_, dx, _ in sets]),
    ]
    if torch:

        def gradient(dy, x, w):
            x, w = as_torch(x).requires_grad_(), as_torch(w).requires_grad_()
            y = torch.nn.functional.rms_norm(x, (n,), w, EPS)
            return partial(torch.autograd.grad, y, (x, w), as_torch(dy), retain_graph=True)

        variants.append(Variant("torch", [gradient(dy, x, w) for dy, x, w, *_ in sets]))

    def agrees():
        names = kernels_of("rmsnorm_backward", "ieee", dtype)
        parts = [call(dy, x, weight, rstd, kernel=name) for name in names]
        want = [output.tobytes() for output in sets[0][4:]]
        return len(names) > 0 and all([dx.tobytes(), dw.tobytes()] == want for dx, dw in parts)

    return row("rmsnorm_backward", x, dtype, 3 * x.nbytes, variants, agrees)


def rows(threads):
    for direction in (forward, backward):
        for dtype in ("fp32", "bf16"):
            yield partial(direction, 4096, 4096, dtype)


def draw(generator, _):
    shape = draws.norm_shape(generator, 16384, MOST_ELEMENTS)
    return partial(generator.choice((forward, backward)), *shape, generator.choice(("fp32", "bf16")))
