"""The head of a language model whose vocabulary is shared out over the ranks, without the logits in memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pydet._native import constants, fail
from pydet.ops import Arithmetic, log_prob, log_prob_backward
from pydet.torch.distributed.exchange import Group, Tensor, gather, reduce_sums, shared, together
from pydet.torch.ops import matrix
from pydet.torch.ops.head import WORKSPACE, Asked, Head, gradients, rounded

_OP = "vocab_parallel_linear_log_prob"


def _segment_of(index: Tensor, width: int, segments: int) -> Tensor:
    """Which segment a column is of; -1 for what is no column."""
    segment = index.div(width, rounding_mode="floor")
    return torch.where((index >= 0) & (segment < segments), segment, -1)


def _inside(index: Tensor, width: int, segments: int, number: int) -> Tensor:
    """The column within a segment; -1 where it is of another."""
    return torch.where(_segment_of(index, width, segments) == number, index - number * width, -1)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, index: Tensor, bias: Tensor | None, group: Group, segments: int, head: Head
    ) -> Tensor:
        world, rank = dist.get_world_size(group), dist.get_rank(group)

        def terms() -> tuple[Any, ...]:
            own = shared(segments, world, _OP, "segments")
            if w.dim() != 2:
                fail(constants.PYDET_INVALID_SHAPE, f"{_OP}: w is {tuple(w.shape)}, want this rank's rows [V / W, K]")
            width = shared(w.shape[0], own, _OP, "this rank's vocabulary, in segments,")
            totals, inside = [], torch.zeros(len(x), dtype=torch.float32, device=x.device)
            for i in range(own):
                part = slice(i * width, (i + 1) * width)
                column = _inside(index, width, segments, rank * own + i)
                row = None if bias is None else bias[part]
                how = (*head[:3], False, True, False, False, *head[3:])
                mine, _, lse, *_ = torch.ops.pydet.linear_log_prob(x, w[part], column, row, *how)
                totals.append(lse)
                inside = torch.where(column >= 0, mine, inside)
            word = f"{len(x)} rows of {x.shape[1]}, {w.shape[0]} columns a rank, {x.dtype}, {segments} segments"
            same = f"bias {bias is not None}", str(head[:-1])  # the workspace decides no bit
            return (torch.stack([*totals, inside], 1), width), word, *same

        known, width = together(_OP, group, x.device, terms)[0]
        everyone = gather(known, group)  # [W, rows, S / W + 1]
        totals = everyone[:, :, :-1].transpose(0, 1).flatten(1).contiguous()
        segment = _segment_of(index, width, segments)
        owner = segment.clamp(min=0).div(segments // world, rounding_mode="floor")
        inside = everyone[owner, torch.arange(len(x), device=x.device), -1]
        ctx.save_for_backward(x, w, index, bias, totals)
        ctx.group, ctx.segments, ctx.head = group, segments, head
        return inside + log_prob(totals, segment)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        (x, w, index, bias, totals), group, segments, head = ctx.saved_tensors, ctx.group, ctx.segments, ctx.head
        own, rank = segments // dist.get_world_size(group), dist.get_rank(group)
        width = w.shape[0] // own
        gradient = given[0].to(torch.float32).contiguous()
        between = log_prob_backward(gradient, totals, _segment_of(index, width, segments))  # by each segment's lse
        of_x, of_w, of_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        dw = torch.zeros(w.shape, dtype=torch.float32, device=w.device) if of_w else None
        dbias = torch.zeros(w.shape[0], dtype=torch.float32, device=w.device) if bias is not None and of_bias else None
        parts = []
        for i in range(own):
            part = slice(i * width, (i + 1) * width)
            column = _inside(index, width, segments, rank * own + i)
            asked = Asked(None, between[:, rank * own + i], None)
            row, dw_part, dbias_part = (None if t is None else t[part] for t in (bias, dw, dbias))
            mine = gradients(
                gradient, asked, x, w[part], column, row, head, of_x, dw_part, dbias_part, dx_dtype=torch.float32
            )
            parts.append(mine)
        dx = None
        if of_x:
            dx = reduce_sums(
                _OP, torch.stack([part for part in parts if part is not None]), group, None, x.dtype, "ordered", "auto"
            )
        if dw is not None:
            dw = rounded(dw, w.dtype, head)
        if dbias is not None and bias is not None:
            dbias = rounded(dbias[None], bias.dtype, head)[0]
        return dx, dw, None, dbias, None, None, None


def vocab_parallel_linear_log_prob(
    x: Tensor,
    w: Tensor,
    index: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    segments: int = 8,
    logits_dtype: torch.dtype | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    arithmetic: Arithmetic = "auto",
    workspace: int = WORKSPACE,
) -> Tensor:
    """:func:`pydet.torch.linear_log_prob` where each rank holds some rows of ``w``; with gradients, without the logits.

    The bits of :func:`vocab_parallel_log_prob` on the columns of :func:`column_parallel_linear`: the same on any number
    of ranks. A rank gives one number a row and segment away. In backward x's gradient is the ordered sum of the
    segments' products, exchanged in float32 and rounded once; those of w and bias need no exchange.

    Args:
        x: ``[..., K]``, the same on every rank.
        w: ``[V / W, K]``: this rank's rows of the head.
        index: ``[...]``, int64, columns of the whole vocabulary, the same on every rank. One that is none gives NaN,
            and zeros in the gradient.
        bias: ``[V / W]``, likewise.
        group: a process group, the default one if None.
        segments: a multiple of the number of ranks that divides V. It decides bits.
        logits_dtype, temperature, softcap, arithmetic, workspace: as in :func:`pydet.torch.linear_log_prob`. Beside the
            workspace backward holds x's gradient in float32 for each segment of the rank.

    Returns:
        ``[...]``, float32, the same on every rank.
    """
    head = Head(logits_dtype, float(temperature), softcap, arithmetic, None, workspace)
    y: Tensor = _LinearLogProb.apply(matrix(x), w, index.reshape(-1), bias, group, segments, head)
    return y.view(index.shape)
