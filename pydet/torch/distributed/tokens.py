"""Layers whose tokens are shared out over the ranks (context parallel), and whose weights are whole on each.

A token's result is its own, so forward is each rank's alone. The gradient of a weight is a sum over all tokens. Here it
is one whose order follows from the sequence: by ``segments`` of it, or token after token. So it is the whole gradient,
with the same bits on every rank, for every number of ranks and either layout: add it once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pydet._native import constants, fail
from pydet.ops import DWEIGHT_ROWS, Arithmetic, embedding_backward, gemm, gemm_db, layernorm, layernorm_backward
from pydet.torch.distributed.context import Layout, check_layout, owners_of, whole
from pydet.torch.distributed.exchange import Group, Tensor, fold_all, gather, split_sums, together

SEGMENTS = 16


def check_tokens(op: str, x: Tensor, layout: str, group: Group, multiple: int, why: str) -> None:
    """``[B, tokens, N]``, of whose chunks this rank has so many tokens that `multiple` of them divide each."""
    check_layout(op, layout)
    if x.dim() != 3:
        fail(constants.PYDET_INVALID_SHAPE, f"{op}: x is {tuple(x.shape)}, want [B, tokens, N]")
    world = dist.get_world_size(group)
    cuts = len(owners_of(world, layout)) // world
    if world > 1 and x.shape[1] % (cuts * multiple):
        fail(
            constants.PYDET_INVALID_SHAPE,
            f"{op}: x has {x.shape[1]} tokens on a rank, want a multiple of {cuts * multiple} in {layout}: {why}",
        )


# ---- Linear ----------------------------------------------------------------------------------------------------------


def _fold_segments(sums: Tensor, group: Group, layout: str, out_dtype: torch.dtype) -> Tensor:
    """All ranks' ``[s, ...]``, this rank's segments as its tokens lie, folded in the order of the sequence."""
    world, count = dist.get_world_size(group), sums[0].numel()
    if world == 1:
        return fold_all(sums, out_dtype=out_dtype)
    send = split_sums(sums, world)
    received = torch.empty_like(send)
    dist.all_to_all_single(received.view(-1), send.view(-1), group=group)
    if layout == "zigzag":
        first, second = received.chunk(2, 1)
        received = torch.cat([first, second.flip(0)])
    own = fold_all(received.flatten(0, 1), out_dtype=out_dtype)
    return gather(own, group).view(-1)[:count].view(sums.shape[1:])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        group: Group,
        layout: str,
        segments: int,
        arithmetic: Arithmetic,
    ) -> Tensor:
        op, world = "context_parallel_linear", dist.get_world_size(group)

        def terms() -> tuple[Any, ...]:
            check_layout(op, layout)
            chunks = len(owners_of(world, layout))
            if segments < 1 or segments % chunks:
                fail(
                    constants.PYDET_INVALID_SHAPE,
                    f"{op}: segments is {segments}, want a multiple of the {chunks} chunks on {world} ranks",
                )
            check_tokens(op, x, layout, group, segments // chunks, f"a chunk has {segments // chunks} segments")
            if x.shape[1] * world % segments:
                got = x.shape[1] * world
                fail(constants.PYDET_INVALID_SHAPE, f"{op}: x has {got} tokens, want a multiple of {segments} segments")
            y = gemm(x.flatten(0, 1), w.t(), bias=bias, arithmetic=arithmetic).view(*x.shape[:2], w.shape[0])
            shapes = f"x {tuple(x.shape)}, w {tuple(w.shape)}, bias {bias is not None}"
            return y, shapes, x.dtype, layout, segments, arithmetic

        y: Tensor = together(op, group, x.device, terms)[0]
        ctx.save_for_backward(x, w, bias)
        ctx.how = group, layout, segments // world, arithmetic
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w, bias = ctx.saved_tensors
        group, layout, own, arithmetic = ctx.how
        dy, dx, dw, dbias = gradients[0].contiguous(), None, None, None
        if ctx.needs_input_grad[0]:
            dx = gemm(dy.flatten(0, 1), w, arithmetic=arithmetic).view(x.shape)
        parts = [dy.unflatten(1, (own, dy.shape[1] // own)), x.unflatten(1, (own, x.shape[1] // own))]
        rows = [[part[:, i].flatten(0, 1) for part in parts] for i in range(own)]  # of each of this rank's segments
        if ctx.needs_input_grad[1]:
            sums = [gemm_db(*some, arithmetic=arithmetic, out_dtype=torch.float32) for some in rows]
            dw = _fold_segments(torch.stack(sums), group, layout, w.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            ones = dy.new_ones(1, len(rows[0][0]))
            sums = [gemm(ones, some, arithmetic="ieee", out_dtype=torch.float32).view(-1) for some, _ in rows]
            dbias = _fold_segments(torch.stack(sums), group, layout, bias.dtype)
        return dx, dw, dbias, None, None, None, None


def context_parallel_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    layout: Layout = "contiguous",
    segments: int = SEGMENTS,
    arithmetic: Arithmetic = "auto",
) -> Tensor:
    """``x w^T + bias`` of tokens that are shared out, with the gradients of w and bias over all ranks' tokens.

    Each segment of the sequence has a chain of its own, over the batch and then its tokens; these are folded in
    ascending order in fp32 and rounded once: with one sequence, the bits of ``k_chunk = S / segments`` on one device.

    Args:
        x: ``[B, S / W, K]``: this rank's tokens, as :func:`shard_context` cuts them.
        w: ``[N, K]``, the same on every rank. Its gradient is the whole one, on every rank: add it once.
        bias: ``[N]``, likewise.
        group: a process group, the default one if None.
        layout: as in :func:`context_parallel_attention`.
        segments: into how many the sequence is cut, a multiple of its chunks: of W, in zigzag of 2 W. It decides bits.
        arithmetic: as in :func:`pydet.gemm`.

    Raises:
        Error: on every rank, where one has other shapes, types or options, or refuses.
    """
    y: Tensor = _Linear.apply(x, w, bias, group, layout, segments, arithmetic)
    return y


# ---- LayerNorm -------------------------------------------------------------------------------------------------------


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, group: Group, layout: str
    ) -> Tensor:
        op = "layer_norm"

        def terms() -> tuple[Any, ...]:
            check_tokens(op, x, layout, group, DWEIGHT_ROWS, "sums over rows are made in blocks of so many")
            made = layernorm(x.flatten(0, 1), weight, bias, eps=eps)
            return made, tuple(x.shape), x.dtype, f"bias {bias is not None}", eps, layout

        y, mean, rstd = together(op, group, x.device, terms)[0]
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.how = group, layout
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        group, layout = ctx.how
        dy, rows = gradients[0].contiguous().flatten(0, 1), x.flatten(0, 1).contiguous()
        dx = torch.empty_like(rows)
        count = -(-len(rows) // DWEIGHT_ROWS)
        sums = torch.zeros(2, count, x.shape[-1], dtype=torch.float32, device=x.device)
        for i in range(count):
            some = slice(i * DWEIGHT_ROWS, (i + 1) * DWEIGHT_ROWS)
            into: dict[str, Any] = {"out": dx[some], "dweight": sums[0, i], "dbias": sums[1, i]}
            layernorm_backward(dy[some], rows[some], weight, mean[some], rstd[some], **into)
        if dist.get_world_size(group) > 1:
            by_sequence = sums.view(2, x.shape[0], -1, x.shape[-1])
            sums = whole(by_sequence, group, layout).flatten(1, 2)
        dweight = fold_all(sums[0].contiguous(), out_dtype=weight.dtype)
        dbias = None if bias is None else fold_all(sums[1].contiguous(), out_dtype=bias.dtype)
        return dx.view(x.shape), dweight, dbias, None, None, None


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    group: Group = None,
    layout: Layout = "contiguous",
) -> Tensor:
    """:func:`pydet.torch.layer_norm` of tokens that are shared out, with gradients: the bits of one device's.

    Args:
        x: ``[B, S / W, N]``: this rank's tokens; on more than one rank a chunk is a multiple of ``DWEIGHT_ROWS``.
        weight, bias: ``[N]``, the same on every rank. Their gradients are the whole ones: add them once.
        eps: as in :func:`pydet.torch.layer_norm`.
        group: a process group, the default one if None.
        layout: as in :func:`context_parallel_attention`.
    """
    y: Tensor = _LayerNorm.apply(x, weight, bias, eps, group, layout)
    return y


# ---- Embedding -------------------------------------------------------------------------------------------------------


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, w: Tensor, group: Group, layout: str, padding: int | None) -> Tensor:
        op = "context_parallel_embedding"

        def terms() -> tuple[Any, ...]:
            if ids.dim() != 2 or w.dim() != 2:
                got = f"ids is {tuple(ids.shape)}, w is {tuple(w.shape)}"
                fail(constants.PYDET_INVALID_SHAPE, f"{op}: {got}, want [B, tokens] and [V, N]")
            check_tokens(op, ids[:, :, None], layout, group, 1, "each rank has two chunks")
            made, shapes = torch.nn.functional.embedding(ids, w), (tuple(ids.shape), tuple(w.shape))
            return made, shapes, ids.dtype, w.dtype, layout, padding

        y: Tensor = together(op, group, w.device, terms)[0]
        ctx.save_for_backward(ids, w)
        ctx.how = group, layout, padding
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ids, w = ctx.saved_tensors
        group, layout, padding = ctx.how
        all_ids, all_rows = (whole(x, group, layout, dim=1) for x in (ids, gradients[0].contiguous()))
        flat = all_rows.reshape(-1, w.shape[1]), all_ids.reshape(-1).contiguous()
        return None, embedding_backward(*flat, len(w), padding_idx=padding, out_dtype=w.dtype), None, None, None


def context_parallel_embedding(
    ids: Tensor, w: Tensor, *, padding: int | None = None, group: Group = None, layout: Layout = "contiguous"
) -> Tensor:
    """Rows of a table for tokens that are shared out, with the table's gradient over all ranks' tokens.

    The gradients of an id's tokens are added in their order, an addition each, as by :class:`pydet.torch.Embedding`.

    Args:
        ids: ``[B, S / W]``, int64: this rank's tokens.
        w: ``[V, N]``, the same on every rank. Its gradient is the whole one, on every rank: add it once.
        padding: an id whose row gets no gradient.
        group: a process group, the default one if None.
        layout: as in :func:`context_parallel_attention`.
    """
    y: Tensor = _Embedding.apply(ids, w, group, layout, padding)
    return y
