"""python -m bench.cuda_scans: scans on an NVIDIA GPU, and Transformers' chunks in PyTorch where it is there.

A line each: milliseconds of pydet's kernel, of Transformers' own function, and the largest difference. "trained": of
forward and backward together, by autograd, with the largest difference of a gradient, of the largest in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import pydet
import pydet.torch  # torch.ops.pydet

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


def trained(
    name: str, ours: Callable[..., torch.Tensor], theirs: Callable[..., torch.Tensor], operands: list[torch.Tensor]
) -> None:
    """Of functions of the same operands, all of which have gradients."""
    given = [x.detach().requires_grad_() for x in operands]
    weights = torch.randn_like(ours(*operands))

    def gradients(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(function(*given), given, weights)

    words = f"{name} trained: {milliseconds(lambda: gradients(ours)):.3f} ms"
    try:
        if mamba is not None:
            mine = [x.float() for x in gradients(ours)]
            pairs = zip(mine, gradients(theirs), strict=True)
            far = max(((x - y.float()).abs().max() / y.float().abs().max()).item() for x, y in pairs)
            words += f", Transformers {milliseconds(lambda: gradients(theirs)):.3f} ms, {far:.2g} apart"
    except torch.cuda.OutOfMemoryError:
        words += ", Transformers has not the memory"
    print(words, flush=True)
    torch.cuda.empty_cache()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda")


def ssd(batch: int, tokens: int, heads: int = 64, width: int = 64, states: int = 128, gradients: bool = False) -> None:
    x, b, c = (normal(batch, tokens, *more) for more in ((heads, width), (1, states), (1, states)))
    dt, a, d = uniform(batch, tokens, heads) / 10, -uniform(heads) * 8, uniform(heads)

    def chunks() -> torch.Tensor:
        return mamba.mamba2_chunk_scan(x, dt, a, b, c, chunk_size=256, D=d)

    if gradients:

        def stock(*given: torch.Tensor) -> torch.Tensor:
            x, dt, a, b, c, d = given
            return mamba.mamba2_chunk_scan(x, dt, a, b, c, chunk_size=256, D=d).to(x.dtype)

        own = lambda *given: torch.ops.pydet.selective_scan(*given)[0]  # noqa: E731
        return trained(f"selective_scan {batch}x{tokens}", own, stock, [x, dt, a, b, c, d])
    line(f"selective_scan {batch}x{tokens}", lambda: pydet.selective_scan(x, dt, a, b, c, d)[0], chunks)


def delta(batch: int, tokens: int, heads: int = 32, width: int = 128, keys: int = 128, gradients: bool = False) -> None:
    unit = partial(torch.nn.functional.normalize, dim=-1)
    q, k = (unit(normal(batch, tokens, heads // 2, keys).float()) for _ in range(2))
    v, g, beta = normal(batch, tokens, heads, width), -uniform(batch, tokens, heads), uniform(batch, tokens, heads)
    scaled = q * keys**-0.5

    def chunks() -> torch.Tensor:
        of_each = (x.to(v.dtype).repeat_interleave(2, 2) for x in (q, k))  # a head of q and k for each of v
        return qwen.torch_chunk_gated_delta_rule(*of_each, v, g, beta)[0]

    if gradients:

        def stock(*given: torch.Tensor) -> torch.Tensor:
            q, k, v, g, beta = given
            q, k = (x.to(v.dtype).repeat_interleave(2, 2) for x in (q * keys**0.5, k))
            return qwen.torch_chunk_gated_delta_rule(q, k, v, g, beta)[0]

        own = lambda *given: torch.ops.pydet.gated_delta(*given)[0]  # noqa: E731
        return trained(f"gated_delta {batch}x{tokens}", own, stock, [scaled, k, v, g, beta])
    line(f"gated_delta {batch}x{tokens}", lambda: pydet.gated_delta(scaled, k, v, g, beta)[0], chunks)


def conv(batch: int, tokens: int, channels: int = 8192, gradients: bool = False) -> None:
    x, w = normal(batch, tokens, channels), normal(channels, 4)

    def theirs() -> torch.Tensor:
        return mamba.causal_conv1d_fn(x.transpose(1, 2), w).transpose(1, 2)

    if gradients:
        stock = lambda x, w: mamba.causal_conv1d_fn(x.transpose(1, 2), w).transpose(1, 2)  # noqa: E731
        return trained(f"causal_conv1d {batch}x{tokens}", torch.ops.pydet.causal_conv1d, stock, [x, w])
    line(f"causal_conv1d {batch}x{tokens}", lambda: pydet.causal_conv1d(x, w), theirs)


def main() -> None:
    print(torch.cuda.get_device_name())
    for batch, tokens in ((1, 4096), (8, 4096), (64, 1)):
        ssd(batch, tokens)
        delta(batch, tokens)
    conv(1, 4096)
    for batch, tokens in ((1, 1024), (1, 4096), (8, 4096)):
        ssd(batch, tokens, gradients=True)
        delta(batch, tokens, gradients=True)
        conv(batch, tokens, gradients=True)


if __name__ == "__main__":
    main()
