"""fold on one NVIDIA GPU: the sum of S fp32 parts, beside torch.sum over them and a copy of as many bytes."""

from functools import partial

import torch

import pydet
from bench.cuda_norms import copying, sets_of
from bench.harness import Row, Variant

PARTS = [2, 4, 8, 16]
MN = [(64, 4096), (512, 4096), (4096, 4096), (4096, 14336)]


def fold(parts, m, n):
    moved = 4 * m * n * (parts + 1)
    sets = [
        (torch.randn(parts, m, n, device="cuda"), torch.empty(m, n, device="cuda")) for _ in range(sets_of(moved, 24))
    ]
    others = [torch.empty_like(out) for _, out in sets]  # of other orders
    variants = [
        Variant("pydet", [partial(pydet.fold, x, out=out) for x, out in sets], [sets[0][1]]),
        Variant(
            "pydet, tree", [partial(pydet.fold, x, out=y, order="tree") for (x, _), y in zip(sets, others, strict=True)]
        ),
        Variant("torch.sum", [partial(torch.sum, x, 0, out=y) for (x, _), y in zip(sets, others, strict=True)]),
        Variant("copy", [copying(pair) for pair in sets]),
    ]
    return Row("fold", f"{parts} x {m} x {n}", "fp32", variants, "torch.sum", moved, "GB/s")


def fold_rows(quick):
    for parts in [8] if quick else PARTS:
        for m, n in MN[:2] if quick else MN:
            yield partial(fold, parts, m, n)


ROWS = {"fold": fold_rows}
