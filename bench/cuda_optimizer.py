"""AdamW on one NVIDIA GPU beside torch.optim.AdamW, fused and foreach, and a copy of the bytes that a step must move.

Parameters and gradients are float32, as PyTorch's moments are then too; or bf16 parameters with gradients and masters
in float32, which PyTorch's does not have. One tensor, those of a Llama of 1.2 billion parameters, and many small ones.
"""

import time
from functools import partial

import torch

import pydet
import pydet.torch
from bench.cuda_norms import sets_of
from bench.harness import Row, Variant

HOW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
POWERS = (0.9**10, 0.999**10)
# Of Llama 3.2 1B: embeddings, 16 layers of q, k, v, o, gate, up, down and two norms, and the last norm.
LAYER = [2048 * 2048, 512 * 2048, 512 * 2048, 2048 * 2048, *[8192 * 2048] * 3, 2048, 2048]
SHAPES = {
    "one of 64 M": [1 << 26],
    "Llama 1B, 146 tensors": [128256 * 2048, *LAYER * 16, 2048],
    "300 of 4096": [4096] * 300,
    "300 of 1 to 8191": [1 + 977 * i % 8191 for i in range(300)],
}
SLICE = 1 << 28  # elements that are copied at a time


def tensors_of(sizes, dtype):
    """Parameters, gradients, moments, and masters or None, each in memory of its own as a framework has them."""
    make = partial(torch.randn, device="cuda")
    params, grads = [make(n).to(dtype) for n in sizes], [make(n) * 1e-2 for n in sizes]
    m, v = [make(n) * 1e-2 for n in sizes], [make(n).square() * 1e-4 for n in sizes]
    return params, grads, m, v, None if dtype == torch.float32 else [p.float() for p in params]


def step(lists):
    """As many calls as the tensors need."""
    most = pydet.ADAMW_TENSORS
    for i in range(0, len(lists[0]), most):
        few = [x if x is None else x[i : i + most] for x in lists]
        pydet.adamw(*few, **HOW, beta_powers=POWERS)


def theirs(lists, **options):
    """A step of PyTorch's on the same tensors."""
    params = [torch.nn.Parameter(p, requires_grad=False) for p in lists[0]]
    optimizer = torch.optim.AdamW(params, **HOW, capturable=True, **options)
    for p, grad, m, v in zip(params, *lists[1:4], strict=True):
        p.grad = grad
        optimizer.state[p] = {"step": torch.tensor(10.0, device="cuda"), "exp_avg": m, "exp_avg_sq": v}
    return optimizer.step


def copying(moved):
    """What moves so many bytes, reads and writes together, by copies of at most SLICE elements."""
    count = moved // 8
    source, target = (torch.empty(min(count, SLICE), device="cuda") for _ in range(2))
    parts = [min(SLICE, count - i) for i in range(0, count, SLICE)]
    return lambda: [target[:n].copy_(source[:n]) for n in parts]


def adamw(name, dtype):
    sizes, fp32 = SHAPES[name], dtype == torch.float32
    moved = sum(sizes) * (28 if fp32 else 32)
    sets = [tensors_of(sizes, dtype) for _ in range(sets_of(moved, 8) if moved < 1 << 28 else 1)]
    variants = [Variant("pydet", [partial(step, lists) for lists in sets])]
    if fp32:
        variants.append(Variant("torch fused", [theirs(lists, fused=True) for lists in sets]))
        variants.append(Variant("torch foreach", [theirs(lists, foreach=True) for lists in sets[:1]]))
    variants.append(Variant("copy", [copying(moved) for _ in sets]))
    return Row("adamw", name, "fp32" if fp32 else "bf16", variants, "copy", moved, "GB/s")


def adamw_rows(quick):
    for dtype in (torch.float32, torch.bfloat16):
        for name in SHAPES:
            if not quick or "1B" not in name:
                yield partial(adamw, name, dtype)


def steps():
    """Seconds of a step as a training loop has it, the host's work with it: nothing is captured."""
    found = []
    for name, sizes in SHAPES.items():
        params = [torch.nn.Parameter(torch.randn(n, device="cuda")) for n in sizes]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizers = {
            "pydet": pydet.torch.AdamW(params, **HOW),
            "torch fused": torch.optim.AdamW(params, **HOW, fused=True),
            "torch foreach": torch.optim.AdamW(params, **HOW, foreach=True),
        }
        taken = {kind: [] for kind in optimizers}
        for _ in range(12):
            for kind, optimizer in optimizers.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                optimizer.step()
                torch.cuda.synchronize()
                taken[kind].append(time.perf_counter() - start)
        entry = {kind: round(sorted(times[2:])[len(times) // 2 - 1] * 1e6) for kind, times in taken.items()}
        found.append({"shape": name, **{f"{kind} us": us for kind, us in entry.items()}})
        del params, optimizers
        torch.cuda.empty_cache()
    return found


ROWS = {"adamw": adamw_rows}
LISTS = {"adamw_steps": steps}
