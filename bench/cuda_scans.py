"""python -m bench.cuda_scans: scans on an NVIDIA GPU, and Transformers' chunks in PyTorch where it is there.

A line each: milliseconds of pydet's kernel, of Transformers' own function, and the largest difference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import pydet

try:
    from transformers.models.mamba2 import modeling_mamba2 as mamba
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen
except ImportError:
    mamba = qwen = None

TIMES = 5


def milliseconds(call: Callable[[], object]) -> float:
    """The fastest of some."""
    call()
    found = []
    for _ in range(TIMES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return min(found)


def line(name: str, ours: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor]) -> None:
    with torch.no_grad():
        words = f"{name}: {milliseconds(ours):.3f} ms"
        if mamba is not None:
            far = (ours().float() - theirs().float()).abs().max().item()
            words += f", Transformers {milliseconds(theirs):.3f} ms, {far:.2g} apart"
    print(words, flush=True)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda")


def ssd(batch: int, tokens: int, heads: int = 64, width: int = 64, states: int = 128) -> None:
    x, b, c = (normal(batch, tokens, *more) for more in ((heads, width), (1, states), (1, states)))
    dt, a, d = uniform(batch, tokens, heads) / 10, -uniform(heads) * 8, uniform(heads)

    def chunks() -> torch.Tensor:
        return mamba.mamba2_chunk_scan(x, dt, a, b, c, chunk_size=256, D=d)

    line(f"selective_scan {batch}x{tokens}", lambda: pydet.selective_scan(x, dt, a, b, c, d)[0], chunks)


def delta(batch: int, tokens: int, heads: int = 32, width: int = 128, keys: int = 128) -> None:
    unit = partial(torch.nn.functional.normalize, dim=-1)
    q, k = (unit(normal(batch, tokens, heads // 2, keys).float()) for _ in range(2))
    v, g, beta = normal(batch, tokens, heads, width), -uniform(batch, tokens, heads), uniform(batch, tokens, heads)
    scaled = q * keys**-0.5

    def chunks() -> torch.Tensor:
        of_each = (x.to(v.dtype).repeat_interleave(2, 2) for x in (q, k))  # a head of q and k for each of v
        return qwen.torch_chunk_gated_delta_rule(*of_each, v, g, beta)[0]

    line(f"gated_delta {batch}x{tokens}", lambda: pydet.gated_delta(scaled, k, v, g, beta)[0], chunks)


def conv(batch: int, tokens: int, channels: int = 8192) -> None:
    x, w = normal(batch, tokens, channels), normal(channels, 4)

    def theirs() -> torch.Tensor:
        return mamba.causal_conv1d_fn(x.transpose(1, 2), w).transpose(1, 2)

    line(f"causal_conv1d {batch}x{tokens}", lambda: pydet.causal_conv1d(x, w), theirs)


def main() -> None:
    print(torch.cuda.get_device_name())
    for batch, tokens in ((1, 4096), (8, 4096), (64, 1)):
        ssd(batch, tokens)
        delta(batch, tokens)
    conv(1, 4096)


if __name__ == "__main__":
    main()
