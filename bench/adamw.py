"""A step of AdamW on the CPU, of one tensor and of many small ones, beside torch.optim.AdamW, fused and foreach, and a
copy of the bytes that it must move.

Of fp32, where all keep the same numbers. PyTorch's steps are those of its optimizers, pydet's the calls of one.
"""

from functools import partial

import pydet
from bench.gemm import copies, normal
from bench.harness import Row, Variant
from bench.peers import NO_TORCH, copying, torch

HOW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
POWERS = (0.9**10, 0.999**10)


def step(lists):
    """As many calls as the tensors need."""
    most = pydet.ADAMW_TENSORS
    for i in range(0, len(lists[0]), most):
        pydet.adamw(*(x[i : i + most] for x in lists), **HOW, beta_powers=POWERS)


def theirs(lists, **options):
    params = [torch.nn.Parameter(torch.from_numpy(p), requires_grad=False) for p in lists[0]]
    optimizer = torch.optim.AdamW(params, **HOW, **options)
    for p, grad, m, v in zip(params, *(map(torch.from_numpy, x) for x in lists[1:]), strict=True):
        p.grad = grad
        optimizer.state[p] = {"step": torch.tensor(10.0), "exp_avg": m, "exp_avg_sq": v}
    return optimizer.step


def adamw(count, size):
    whole = [normal(i, (count, size)) for i in range(3)]
    whole.append(normal(3, (count, size)) ** 2)
    sets = [[list(x) for x in one] for one in copies(tuple(whole))]
    variants = [Variant("pydet", [partial(step, lists) for lists in sets])]
    if torch:
        for kind in ("fused", "foreach"):
            variants.append(Variant(f"torch {kind}", [theirs(lists, **{kind: True}) for lists in sets]))
    variants.append(Variant("copy", [copying(whole, whole[:1] + whole[2:])]))

    moved = 28 * count * size
    note = "" if torch else NO_TORCH
    return Row("adamw", f"{count} x {size}", "fp32", variants, variants[1].name, moved, "GB/s", note=note)


def rows(threads):
    for count, size in ((1, 1 << 24), (30, 1 << 18), (300, 4096)):
        yield partial(adamw, count, size)
