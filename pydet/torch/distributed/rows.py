"""What works along rows: a norm whose rows are shared out, and the log-probability over a vocabulary that is."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from pydet._native import constants, fail
from pydet.ops import DWEIGHT_ROWS, log_prob, rmsnorm, rmsnorm_backward, softmax
from pydet.torch.distributed.context import Layout, whole
from pydet.torch.distributed.exchange import Group, Tensor, fold_all, gather, shared, together
from pydet.torch.distributed.tokens import check_tokens
from pydet.torch.ops import matrix

Order: TypeAlias = tuple[tuple[int, ...], str]  # of tokens: the shape of x, and how they are shared out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, weight_offset: float, group: Group, order: Order | None
    ) -> Tensor:
        op, world = "rms_norm", dist.get_world_size(group)

        def terms() -> tuple[Any, ...]:
            if order is not None:
                shape, layout = order
                check_tokens(op, x.view(shape), layout, group, DWEIGHT_ROWS, "sums over rows are in blocks of so many")
            elif world > 1 and x.shape[0] % DWEIGHT_ROWS:
                fail(
                    constants.PYDET_INVALID_SHAPE,
                    f"{op}: x has {x.shape[0]} rows, want a multiple of {DWEIGHT_ROWS} on each of {world} ranks",
                )
            made = rmsnorm(x, weight, eps=eps, weight_offset=weight_offset)
            return made, tuple(x.shape), x.dtype, eps, weight_offset, order

        y, rstd = together(op, group, x.device, terms)[0]
        ctx.save_for_backward(x, weight, rstd)
        ctx.group, ctx.weight_offset, ctx.order = group, weight_offset, order
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        dy, offset = gradients[0].contiguous(), ctx.weight_offset
        if dist.get_world_size(ctx.group) == 1:
            dx, dweight = rmsnorm_backward(dy, x, weight, rstd, weight_offset=offset)
            return dx, dweight, None, None, None, None
        dx, blocks = rmsnorm_backward(dy, x, weight, rstd, weight_offset=offset, block_sums=True)
        if ctx.order is None:
            everyone = gather(blocks, ctx.group).flatten(0, 1)
        else:
            shape, layout = ctx.order
            of_tokens = blocks.unflatten(0, (shape[0], len(blocks) // shape[0]))
            everyone = whole(of_tokens, ctx.group, layout, dim=1).flatten(0, 1).contiguous()
        return dx, fold_all(everyone, out_dtype=weight.dtype), None, None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    weight_offset: float = 0.0,
    group: Group = None,
    layout: Layout | None = None,
) -> Tensor:
    """:func:`pydet.torch.rms_norm` of rows that are shared out over the ranks (sequence parallel), with gradients.

    The weight's gradient is the one of all ranks' rows, rank 0's first, with the bits of one rank that has them all:
    the sums of blocks of ``DWEIGHT_ROWS`` rows are gathered and folded.

    Args:
        x: ``[..., N]``: this rank's rows, as many on every rank, a multiple of ``DWEIGHT_ROWS``.
        weight: ``[N]``, the same on every rank. Its gradient is the whole one, on every rank: add it once.
        eps, weight_offset: as in :func:`pydet.torch.rms_norm`.
        group: a process group, the default one if None.
        layout: x is ``[B, S / W, N]``, tokens of sequences, shared out as :func:`context_parallel_attention` says, a
            chunk being a multiple of ``DWEIGHT_ROWS`` tokens; then the gradient has the bits of one rank that has the
            whole sequences. None: a rank's rows all come before the next one's.
    """
    order = None if layout is None else (tuple(x.shape), layout)
    y: Tensor = _RmsNorm.apply(matrix(x), weight, eps, weight_offset, group, order)
    return y.view(x.shape)


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, group: Group, segments: int) -> Tensor:
        op, world = "vocab_parallel_log_prob", dist.get_world_size(group)

        def terms() -> tuple[Any, ...]:
            own = shared(segments, world, op, "segments")
            width = shared(x.shape[1], own, op, "this rank's vocabulary, in segments,")
            parts = x.to(torch.float32).view(len(x), own, width)
            largest = parts.amax(-1)
            # log p of a segment's largest column is -log(sum e): so the segment's own log-sum-exp is m - that.
            known = log_prob(parts.contiguous(), parts.argmax(-1))
            first = dist.get_rank(group) * own
            segment = index.div(width, rounding_mode="floor") - first
            here = (segment >= 0) & (segment < own) & (index >= 0)
            mine = parts[torch.arange(len(x), device=x.device), segment.clamp(0, own - 1)]
            inside = log_prob(mine.contiguous(), torch.where(here, index % width, 0))
            word = f"{len(x)} rows, {x.shape[1]} columns a rank, {x.dtype}, {segments} segments"
            return (largest - known, torch.where(here, inside, 0), width), word

        totals, inside, width = together(op, group, x.device, terms)[0]
        everyone = gather(torch.cat([totals, inside[:, None]], 1), group)  # [W, rows, S / W + 1]
        totals = everyone[:, :, :-1].transpose(0, 1).flatten(1).contiguous()
        segment = index.div(width, rounding_mode="floor")
        there = (index >= 0) & (segment < segments)
        owner = segment.clamp(0, segments - 1).div(segments // world, rounding_mode="floor")
        inside = everyone[owner, torch.arange(len(x), device=x.device), -1]
        between = log_prob(totals, torch.where(there, segment, -1))
        ctx.save_for_backward(x, index, totals)
        ctx.group, ctx.segments = group, segments
        return inside + between

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, index, totals = ctx.saved_tensors
        world, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        own, gradient = ctx.segments // world, gradients[0].to(torch.float32)
        width = x.shape[1] // own
        parts = x.to(torch.float32).view(len(x), own, width).contiguous()
        there = (index >= 0) & (index < width * ctx.segments)
        shares = softmax(totals)[:, rank * own : (rank + 1) * own]  # p of each segment
        dx = (softmax(parts) * -(shares * gradient[:, None])[:, :, None]).flatten(1)
        column = index - rank * x.shape[1]
        here = torch.nonzero((column >= 0) & (column < x.shape[1]) & there).view(-1)
        dx[here, column[here]] += gradient[here]
        return torch.where(there[:, None], dx, 0).to(x.dtype), None, None, None


def vocab_parallel_log_prob(x: Tensor, index: Tensor, *, group: Group = None, segments: int = 8) -> Tensor:
    """The log-probability of a column under logits whose columns are shared out over the ranks, in float32.

    ``log p(index) = log p(index | its segment) + log p(its segment)``, both by :func:`pydet.log_prob`: first over the
    columns of one of ``segments`` equal parts of the vocabulary, then over the log-sum-exps of all parts. A rank gives
    one number a row and segment away, and the bits do not depend on the number of ranks. (They are not those of
    :func:`pydet.log_prob` over the whole row, whose sum has another shape.) With a gradient.

    Args:
        x: ``[..., V / W]``: this rank's columns, float32, bfloat16 or float16.
        index: ``[...]``, int64, columns of the whole vocabulary, the same on every rank. One that is none gives NaN.
        group: a process group, the default one if None.
        segments: a multiple of the number of ranks that divides V. It decides bits.
    """
    y: Tensor = _LogProb.apply(matrix(x), index.reshape(-1), group, segments)
    return y.view(index.shape)
