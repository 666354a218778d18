"""Attention over shared tokens by heads: each rank has all tokens of some heads, for the time of the call.

A head's attention and its gradients are functions of that head's queries and of its group's keys alone. So ranks
exchange: each gives its tokens of all heads, and gets all tokens of its 1/W of them; then it calls what one device
calls, and gives the results back. No rank has more than 1/W of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import pydet
from pydet.torch.distributed.exchange import Group, Tensor, gather
from pydet.torch.ops.attention import adjacent, padded

_backward: Any = pydet.attention_backward


def _to_heads(x: Tensor, group: Group, layout: str) -> Tensor:
    """``[B, heads, tokens / W, D]`` of this rank's tokens to ``[B, heads / W, tokens, D]``, in the sequence's order."""
    world = dist.get_world_size(group)
    send = x.unflatten(1, (world, -1)).movedim(1, 0).contiguous()
    got = torch.empty_like(send)
    dist.all_to_all_single(got, send, group=group)
    if layout == "zigzag" and world > 1:
        first, second = got.unflatten(3, (2, -1)).unbind(3)
        got = torch.cat([first, second.flip(0)])
    return got.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _to_tokens(x: Tensor, group: Group, layout: str) -> Tensor:
    """The way back."""
    world = dist.get_world_size(group)
    if layout == "zigzag" and world > 1:
        first, second = x.unflatten(2, (2 * world, -1)).movedim(2, 0).chunk(2)
        send = torch.cat([first, second.flip(0)], 3).contiguous()
    else:
        send = x.unflatten(2, (world, -1)).movedim(2, 0).contiguous()
    got = torch.empty_like(send)
    dist.all_to_all_single(got, send, group=group)
    return got.movedim(0, 1).flatten(1, 2)


class _Exchanged(torch.autograd.Function):
    """Tokens for heads, or the way back, which is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, layout: str, to_heads: bool) -> Tensor:
        ctx.way = group, layout, not to_heads
        return (_to_heads if to_heads else _to_tokens)(x, group, layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back: Tensor = _Exchanged.apply(gradients[0], *ctx.way)
        return back, None, None, None


class _OwnSinks(torch.autograd.Function):
    """Those of this rank's heads; the gradient is that of all heads, on every rank."""

    @staticmethod
    def forward(ctx: Any, sinks: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return sinks.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gather(gradients[0].contiguous(), ctx.group).flatten(), None


class _Whole(torch.autograd.Function):
    """One device's attention, of some heads."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: Any, of_chunk: Any) -> Tensor:
        out: Tensor
        out, lse = of_chunk(q, k, v, sinks, how)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        widths = q.shape[-1], k.shape[-1], v.shape[-1]
        of_sinks = sinks.detach().contiguous() if sinks is not None and ctx.needs_input_grad[3] else None
        q, k, v = (adjacent(x.detach()) for x in padded(q, k, v))
        pad = (0, v.shape[-1] - widths[2])
        dout, out = (adjacent(torch.nn.functional.pad(x, pad)) for x in (gradients[0], out))
        asked = ctx.how.options | {"causal": ctx.how.causal, "window": ctx.how.window, "sinks": of_sinks}
        found = _backward(dout, q, k, v, out, lse, **asked)
        own = (x[..., :n].contiguous() for x, n in zip(found[:3], widths, strict=True))
        return *own, None if of_sinks is None else found[3].to(sinks.dtype), None, None


def by_heads(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: Any, group: Group, of_chunk: Any) -> Tensor:
    """After all ranks agreed: the attention of this rank's tokens. how: what is asked; of_chunk: the forward call."""
    place = group, how.layout
    turned = (_Exchanged.apply(x, *place, True) for x in (q, k, v))
    own = None if sinks is None else _OwnSinks.apply(sinks, group)
    y: Tensor = _Exchanged.apply(_Whole.apply(*turned, own, how, of_chunk), *place, False)
    return y
