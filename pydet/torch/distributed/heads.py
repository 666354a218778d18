"""Layers whose parts go together: fused weights in the order of the segments, and key heads that segments share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pydet._native import constants, fail
from pydet.torch.distributed.exchange import Group, Tensor, fold_all, gather, shared, together
from pydet.torch.distributed.linear import STEP


def segment_order(parts: Sequence[int], segments: int = 8) -> Tensor:
    """The rows of a fused weight, segment by segment: ``weight[segment_order(...)]`` may be cut between any segments.

    A fused layer has its parts one below the other, [gate; up] or [q; k; v]. Cut for ranks, each rank has some of each
    part: so the order in which the gradient of x is summed would follow the number of ranks. In this order segment s
    has its rows of the first part, then of the second, and so on; any number of ranks that divides the segments cuts
    between them. ``order.argsort()`` is the way back, for checkpoints.

    Args:
        parts: the rows of each part: multiples of ``segments``, whose sum is a multiple of ``16 segments``.
        segments: as in :func:`column_parallel_linear`.

    Returns:
        ``[sum(parts)]``, int64: which row of the fused weight comes at each place.

    Raises:
        Error: parts that the segments do not divide.
    """
    for rows in parts:
        shared(rows, segments, "segment_order", "the rows of a part")
    if sum(parts) % (segments * STEP):
        got, want = sum(parts), segments * STEP
        fail(
            constants.PYDET_INVALID_SHAPE, f"segment_order: the parts have {got} rows in all, want a multiple of {want}"
        )
    begins = [sum(parts[:i]) for i in range(len(parts))]
    rows_of = [torch.arange(n).view(segments, -1) + begin for n, begin in zip(parts, begins, strict=True)]
    return torch.cat(rows_of, 1).view(-1)


def split_segments(y: Tensor, parts: Sequence[int], segments: int = 8) -> list[Tensor]:
    """The parts of what a fused layer in :func:`segment_order` gave, each ``[..., parts[i] n / sum(parts)]``.

    Args:
        y: ``[..., n]``: this rank's columns, whole segments.
        parts, segments: as in :func:`segment_order`.
    """
    own = shared(y.shape[-1] * segments, sum(parts), "split_segments", "the columns by segments")
    if sum(parts) % segments or any(rows % segments for rows in parts):
        fail(constants.PYDET_INVALID_SHAPE, f"split_segments: parts of {list(parts)}, want multiples of {segments}")
    each = [rows // segments for rows in parts]
    return [part.flatten(-2) for part in y.unflatten(-1, (own, -1)).split(each, -1)]


class _ShareHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, segments: int, group: Group) -> Tensor:
        op, world = "share_heads", dist.get_world_size(group)

        def terms() -> tuple[Any, ...]:
            if not -x.dim() <= dim < x.dim():
                fail(constants.PYDET_INVALID_VALUE, f"{op}: dim is {dim}, x has {x.dim()} dimensions")
            heads, own = x.shape[dim], shared(segments, world, op, "segments")
            if segments % heads:
                fail(
                    constants.PYDET_INVALID_SHAPE,
                    f"{op}: x has {heads} heads, want a divisor of the {segments} segments; heads that the segments "
                    "divide are sharded by column_parallel_linear",
                )
            return (own, segments // heads), tuple(x.shape), x.dtype, f"dim {dim}, {segments} segments"

        own, copies = together(op, group, x.device, terms)[0]
        first = dist.get_rank(group) * own
        ctx.dim, ctx.copies, ctx.group = dim, copies, group
        return x.index_select(dim, torch.arange(first, first + own, device=x.device) // copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        mine = gradients[0].movedim(ctx.dim, 0).to(torch.float32).contiguous()
        everyone = gather(mine, ctx.group).flatten(0, 1)  # by segments
        parts = everyone.unflatten(0, (-1, ctx.copies)).transpose(0, 1).contiguous()
        return fold_all(parts, out_dtype=gradients[0].dtype).movedim(0, ctx.dim), None, None, None


def share_heads(x: Tensor, *, dim: int = 1, segments: int = 8, group: Group = None) -> Tensor:
    """Key or value heads that are fewer than segments, for the query heads of this rank's segments; with a gradient.

    Grouped-query attention with 2 key heads on 8 ranks: every rank makes all key and value heads with the whole,
    replicated weight, and takes the ones that its query heads look at, one for each of its segments. The gradient of a
    head is the sum of what its segments have, folded in ascending order in fp32 and rounded once: the same bits on
    every rank, for every number of ranks. So the weight's gradient is the whole one on every rank: add it once.

    Args:
        x: all heads along ``dim``, as many as divide ``segments``; the same on every rank.
        dim: which dimension the heads have.
        segments: of the query heads, as their :func:`column_parallel_linear` has them. It decides the gradient's bits.
        group: a process group, the default one if None.

    Returns:
        x with one head for each of this rank's segments: segment s has head ``s heads / segments``.

    Raises:
        Error: on every rank, where one has another shape or refuses.
    """
    y: Tensor = _ShareHeads.apply(x, dim, segments, group)
    return y
