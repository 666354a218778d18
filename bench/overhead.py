"""What a call costs before any work is done: 4 x 4 x 4 in fp32, always the same arrays."""

from functools import partial

import numpy as np

import pydet
from bench.gemm import normal
from bench.harness import Row, Variant

try:
    import torch

    import pydet.torch
except ImportError:
    torch = None


def numpy_arrays(with_out):
    a, b, ours, theirs = (normal(seed, (4, 4)) for seed in range(4))
    if with_out:
        variants = [
            Variant("pydet", [lambda: pydet.gemm(a, b, out=ours)], [ours]),
            Variant("numpy", [lambda: np.matmul(a, b, out=theirs)]),
        ]
    else:
        variants = [Variant("pydet", [lambda: pydet.gemm(a, b)]), Variant("numpy", [lambda: np.matmul(a, b)])]
    return Row("call", f"NumPy arrays{', out=' * with_out}", "fp32", variants, peer="numpy")


def torch_tensors(with_out):
    a, b, ours, theirs = (torch.from_numpy(normal(seed, (4, 4))) for seed in range(4))
    if with_out:
        variants = [
            Variant("pydet", [lambda: pydet.gemm(a, b, out=ours)], [ours.numpy()]),
            Variant("torch.mm", [lambda: torch.mm(a, b, out=theirs)]),
        ]
    else:
        variants = [
            Variant("pydet", [lambda: pydet.gemm(a, b)]),
            Variant("torch.ops.pydet", [lambda: torch.ops.pydet.gemm(a, b)]),
            Variant("torch.mm", [lambda: torch.mm(a, b)]),
        ]
    return Row("call", f"torch tensors{', out=' * with_out}", "fp32", variants, peer="torch.mm")


def rows(threads):
    if threads > 1:
        return
    for with_out in (True, False):
        yield partial(numpy_arrays, with_out)
        if torch:
            yield partial(torch_tensors, with_out)
