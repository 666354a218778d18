"""What pydet is timed beside on the CPU: PyTorch where it is installed, NumPy, and copies."""

from functools import partial

import numpy as np

from bench.harness import Variant

try:
    import torch
except ImportError:
    torch = None

NO_TORCH = "PyTorch is not installed, so its rows are missing"
AS_FP32 = "NumPy multiplies numbers of bf16 as fp32"


def as_torch(array):
    """The same memory as a torch tensor, of fp32 or bf16."""
    if array.dtype == np.float32:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def products(sets):
    """Of sets of a, b and out. NumPy has no product of bf16: it multiplies the same numbers, made fp32 before."""
    if sets[0][0].dtype == np.float32:
        theirs = [(a, b, np.empty_like(out)) for a, b, out in sets]
    else:
        theirs = [tuple(x.astype(np.float32) for x in arrays) for arrays in sets]
    variants = [Variant("numpy", [partial(np.matmul, a, b, out=out) for a, b, out in theirs])]
    if torch:
        calls = [partial(torch.mm, *map(as_torch, (a, b)), out=as_torch(np.empty_like(out))) for a, b, out in sets]
        variants.append(Variant("torch", calls))
    return variants


def copying(read, written):
    """What copies as many bytes as these arrays have, reads and writes together."""
    source = np.ones(sum(x.nbytes for x in (*read, *written)) // 2, np.uint8)  # of ones: zeros may share one page
    return partial(np.copyto, np.empty_like(source), source)
