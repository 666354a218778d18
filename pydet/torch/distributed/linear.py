"""Row- and column-parallel linear layers whose bits do not depend on the number of ranks.

``k_chunk`` is a function of the extent that is summed over and of ``segments`` alone: ceil(extent / segments), up to
the next multiple of 16. A rank holds whole segments; where they do not divide the extent evenly (2880 in 8), the last
rank's shard is the shorter one (:func:`shard_bounds`). With ``even`` all segments have extent / segments, a multiple of
16 or not (360), and all shards are alike, as DTensor shards them: the bits are the fold of the segments' products.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from pydet._native import INVALID_VALUE, Error, constants, fail
from pydet.ops import Arithmetic, gemm, gemm_db
from pydet.torch.distributed import relay
from pydet.torch.distributed.exchange import (
    PEER_METHODS,
    Group,
    Method,
    Tensor,
    choose,
    fold_all,
    gather,
    reduce_sums,
    shared,
    together,
)
from pydet.torch.distributed.symmetric import Peers, capturing, peers_of
from pydet.torch.ops import matrix

Rows: TypeAlias = Literal["replicate", "shard_rows"]
STEP = 16  # segments are multiples of it
_FEW_ROWS = 64  # up to here a product for each segment, which is bound by its weights, is faster than a batch of them,
# but on Hopper, which has a kernel that makes them all


def segment_length(extent: int, segments: int, even: bool = False) -> int:
    """``k_chunk`` of a sum over `extent` in so many segments; the last may be shorter, unless they are even."""
    if even:
        return shared(extent, segments, "segment_length", "the extent", "segments")
    return -(-extent // (segments * STEP)) * STEP


def shard_bounds(extent: int, segments: int, rank: int, world: int, even: bool = False) -> tuple[int, int]:
    """The part of `extent` that a rank holds: segments rank * segments / world and following."""
    each = segment_length(extent, segments, even) * shared(segments, world, "shard_bounds", "segments")
    return min(extent, rank * each), min(extent, (rank + 1) * each)


def _check_shard(op: str, name: str, have: int, extent: int, segments: int, even: bool, group: Group) -> int:
    """The length of a segment; refuses a shard that is not this rank's."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    shared(segments, world, op, "segments")
    begin, end = shard_bounds(extent, segments, rank, world, even)
    if have != end - begin:
        fail(
            constants.PYDET_INVALID_SHAPE,
            f"{op}: {name} of rank {rank} is {have}, want {end - begin}: {segments} segments of "
            f"{segment_length(extent, segments, even)} of {extent} over {world} ranks",
        )
    return segment_length(extent, segments, even)


class _Plan(NamedTuple):
    """What the terms of a product come to: calls with peers make it once, when all ranks have agreed on them."""

    method: str  # "alone": of one rank, whose product is the result
    chunk: int
    own: int  # segments of a rank
    first_sums: int = 0  # the same, where rank 0 makes the sum of its own in one product; else 0
    whole: bool = False  # this rank's result is that sum
    at_once: bool = False  # its segments are one batch
    relays: bool = False  # a graph's calls may be a relay, by peers' memory


def _one_batch(x: Tensor, w: Tensor, chunk: int, count: int, arithmetic: Arithmetic) -> bool:
    """Whether the segments of x ``[M, k]`` times w ``[k, N]`` are made as a batch; of few rows they are where that is
    one pass over the weights (native/gpu/nvidia/sm90/skinny.cu)."""
    if x.shape[1] != count * chunk:
        return False
    if x.shape[0] > _FEW_ROWS:
        return True
    if x.device.type != "cuda" or torch.version.cuda is None or x.dtype == torch.float32 or chunk % STEP:
        return False
    along_k, hopper = w.stride(0) == 1, torch.cuda.get_device_capability(x.device) == (9, 0)
    return along_k and hopper and arithmetic in ("auto", "sm90")


def _segment_sums(
    x: Tensor,
    w: Tensor,
    chunk: int,
    count: int,
    arithmetic: Arithmetic,
    out: Tensor | None = None,
    at_once: bool | None = None,
) -> Tensor:
    """``[count, M, N]`` fp32: x ``[M, k]`` times w ``[k, N]`` by segments of k; those that are not there are zeros."""
    (m, k), n = x.shape, w.shape[1]
    sums = x.new_empty(count, m, n, dtype=torch.float32) if out is None else out
    if _one_batch(x, w, chunk, count, arithmetic) if at_once is None else at_once:
        a, b = x.unflatten(1, (count, chunk)).transpose(0, 1), w.unflatten(0, (count, chunk))
        return gemm(a, b, out=sums, arithmetic=arithmetic)
    for i in range(count):
        here = slice(i * chunk, min(k, (i + 1) * chunk))
        if i * chunk < k:
            gemm(x[:, here], w[here], out=sums[i], arithmetic=arithmetic)
        else:
            sums[i].zero_()
    return sums


def _push(
    x: Tensor, w: Tensor, chunk: int, count: int, arithmetic: Arithmetic, bias: Tensor | None, peers: Peers, rows: bool
) -> Tensor:
    """Each rank's rows of the sums are made in its memory by all ranks, and folded there."""
    each, first = x.shape[0] // peers.world, peers.rank * count
    staged = peers.staging((count * peers.world, each, w.shape[1]))
    peers.reserve(count * peers.world)
    out = x.new_empty(each if rows else x.shape[0], w.shape[1])
    # The peers' memory is written from here on: only once the group's earlier fold is over, which read it.
    with peers.turn(x.shape[0] * w.shape[1]) as stream:
        if peers.relays:  # which end on one rank while the other still reads what was brought
            peers.meet(stream)
        for step in range(1, peers.world + 1):
            owner = (peers.rank + step) % peers.world
            mine = x[owner * each : (owner + 1) * each]
            _segment_sums(mine, w, chunk, count, arithmetic, staged[owner][first : first + count])
        peers.launch(stream, staged[peers.rank], out, bias, gathered=True, scatter=rows)
    return out


def _parallel_product(
    op: str,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    extent: int,
    segments: int,
    even: bool,
    group: Group,
    out: str,
    method: str,
    arithmetic: Arithmetic,
    *,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """The ordered sum over all ranks of x ``[M, k]`` times w ``[k, N]``, in x's type; `extent` is k of all ranks.

    meanwhile: launches what does not need it. A method that waits for the other ranks calls this before.
    """
    peers, plan = peers_of(group, x.device), None
    given: tuple[Any, ...] = ()
    made: Tensor | None = None
    if peers is not None:
        added = None if bias is None else (bias.shape, bias.dtype, bias.device)
        tensors = x.shape, x.dtype, x.stride(), w.shape, w.dtype, w.stride(), w.device, added
        given = op, tensors, extent, segments, even, out, method, arithmetic, capturing()
        plan = peers.planned(op, given)
    if plan is not None:
        try:
            made = _own_sums(x, w, plan, arithmetic)
        except (Error, ValueError, TypeError, RuntimeError):
            plan = None  # the others are told below
    if plan is None:
        agree = lambda: _agree(op, x, w, bias, extent, segments, even, group, out, method, arithmetic)  # noqa: E731
        plan, made = agree()
        if peers is not None:
            if plan.relays and not relay.reserve(peers, x.shape[0], w.shape[1], x.dtype, plan.own):
                plan, made = agree()
            peers.plan(given, plan)
    rows = out == "shard_rows"
    if plan.method == "push" and peers is not None:
        return _push(x, w, plan.chunk, plan.own, arithmetic, bias, peers, rows)
    if plan.method == "relay":
        if x.shape[0] * w.shape[1] == 0:
            return x.new_empty(x.shape[0], w.shape[1])
        if peers is None:
            return relay.relay_by_collectives(x, w, plan.chunk, arithmetic, bias, group)
        sums = lambda rows: _segment_sums(rows, w, plan.chunk, plan.own, arithmetic)  # noqa: E731
        return relay.relay_by_peers(x, w, plan.chunk, plan.own, sums, arithmetic, bias, peers, meanwhile)
    assert made is not None
    if plan.method == "alone":
        return made
    first = plan.first_sums if peers is not None else 0
    return reduce_sums(op, made, group, bias, x.dtype, "ordered", method, rows, first, plan.method)


def _own_sums(x: Tensor, w: Tensor, plan: _Plan, arithmetic: Arithmetic) -> Tensor | None:
    """What this rank gives to the fold; nothing yet, where its product waits for the other ranks."""
    if plan.method in ("push", "relay"):
        return None
    if plan.whole:
        return gemm(x, w, k_chunk=plan.chunk, arithmetic=arithmetic, out_dtype=torch.float32).unsqueeze(0)
    return _segment_sums(x, w, plan.chunk, plan.own, arithmetic, at_once=plan.at_once)


def _agree(
    op: str,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    extent: int,
    segments: int,
    even: bool,
    group: Group,
    out: str,
    method: str,
    arithmetic: Arithmetic,
) -> tuple[_Plan, Tensor | None]:
    """The plan and what this rank gives, when all ranks have come with the same terms."""
    world, peers = dist.get_world_size(group), peers_of(group, x.device)

    def planned(chunk: int) -> _Plan:
        product = method == "push" or x.shape[0] % world == 0
        relays = chunk % STEP == 0 and out == "replicate"
        relays = relays and (peers is None or peers.relaying)
        m, several, own = x.shape[0], segments > world, segments // world
        many = m >= (relay.LEAST_ROWS if several else relay.LEAST_OF_ONE)
        # Of a graph: the launches of an eager relay take the host longer than the device.
        prefers = many and (peers is None or capturing())
        name = choose(op, method, "ordered", segments, m * w.shape[1], world, peers, product, relays, prefers)
        first = own if several and chunk % STEP == 0 and name in PEER_METHODS else 0
        whole = first > 0 and dist.get_rank(group) == 0
        may_relay = name == "relay" or (method == "auto" and many)
        may_relay = may_relay and relays and peers is not None and m * w.shape[1] > 0 and not capturing()
        return _Plan(name, chunk, own, first, whole, _one_batch(x, w, chunk, own, arithmetic), may_relay)

    def terms() -> tuple[Any, ...]:
        if w.dim() != 2 or x.shape[1] != w.shape[0]:
            got, want = tuple(x.shape), w.shape[0] if w.dim() == 2 else "a matrix w"
            fail(constants.PYDET_INVALID_SHAPE, f"{op}: this rank's factor is {got}, want {want} columns, as w has")
        chunk = _check_shard(op, "the shard", x.shape[1], extent, segments, even, group)
        if out not in ("replicate", "shard_rows"):
            fail(INVALID_VALUE, f"{op}: out is {out!r}, want 'replicate' or 'shard_rows'")
        if out == "shard_rows":
            shared(x.shape[0], world, op, "the number of rows")
        plan, made = _Plan("alone", chunk, segments), None
        if world == 1 and chunk % STEP == 0:
            made = gemm(x, w, bias=bias, k_chunk=chunk, arithmetic=arithmetic)
        elif world == 1:
            made = fold_all(_segment_sums(x, w, chunk, segments, arithmetic), bias, x.dtype)
        else:
            plan = planned(chunk)
            if plan.method == "push" and capturing():
                fail(
                    INVALID_VALUE,
                    f"{op}: method is 'push' under graph capture, whose products nothing orders in a replay",
                )
            if plan.method == "push":
                shared(x.shape[0], world, op, "the number of rows")
            if plan.method in ("push", "relay"):
                gemm(x[:0], w, bias=bias, arithmetic=arithmetic)  # refuses what the products would
            made = _own_sums(x, w, plan, arithmetic)
        shape = f"{x.shape[0]} rows, {w.shape[1]} columns, {extent} summed in {segments} segments of {chunk}"
        return (plan, made), shape, x.dtype, f"bias {bias is not None}", f"arithmetic {arithmetic}", out, method

    found: tuple[_Plan, Tensor | None] = together(op, group, x.device, terms)[0]
    return found


def _sum_rows(dy: Tensor) -> Tensor:
    """The gradient of a bias: a chain of products with 1 over the rows."""
    return gemm(torch.ones(1, dy.shape[0], dtype=dy.dtype, device=dy.device), dy, arithmetic="ieee").view(-1)


def _all_rows(x: Tensor, group: Group) -> Tensor:
    return gather(x, group).flatten(0, 1)


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.options, ctx.has_bias = options, bias is not None
        return _parallel_product("row_parallel_linear", x, w.t(), bias, *options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x, w), (_, _, _, group, out, _, arithmetic) = ctx.saved_tensors, ctx.options
        dy = gradients[0].contiguous()
        dy = _all_rows(dy, group) if out == "shard_rows" else dy
        dx = gemm(dy, w, arithmetic=arithmetic) if ctx.needs_input_grad[0] else None
        dw = gemm_db(dy, x, arithmetic=arithmetic) if ctx.needs_input_grad[1] else None
        return dx, dw, _sum_rows(dy) if ctx.has_bias and ctx.needs_input_grad[2] else None, None


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> Tensor:
        extent, segments, even, group, rows, method, arithmetic = options
        op = "column_parallel_linear"

        def terms() -> tuple[Any, ...]:
            chunk = _check_shard(op, "w", w.shape[0], extent, segments, even, group)
            if rows not in ("replicate", "shard_rows"):
                fail(INVALID_VALUE, f"{op}: rows is {rows!r}, want 'replicate' or 'shard_rows'")
            y = gemm(x, w.t(), bias=bias, arithmetic=arithmetic)  # under shard_rows it only shows that x and w fit
            shape = f"{x.shape[0]} rows of {x.shape[1]}, {extent} columns in {segments} segments of {chunk}"
            return y, shape, x.dtype, f"bias {bias is not None}", f"arithmetic {arithmetic}", rows, method

        peers, y = peers_of(group, x.device), None
        added = None if bias is None else (bias.shape, bias.dtype, bias.device)
        given = op, "forward", x.shape, x.dtype, w.shape, w.dtype, w.device, added, options
        if peers is not None and peers.planned(op, given):
            with contextlib.suppress(Error, ValueError, TypeError, RuntimeError):  # what is wrong all are told below
                y = gemm(x, w.t(), bias=bias, arithmetic=arithmetic)
        if y is None:
            y = together(op, group, x.device, terms)[0]
            if peers is not None:
                peers.plan(given, True)
        ctx.options, ctx.has_bias = options, bias is not None
        if rows == "shard_rows" and dist.get_world_size(group) > 1:
            x = _all_rows(x, group)
            y = gemm(x, w.t(), bias=bias, arithmetic=arithmetic)
        ctx.save_for_backward(x, w)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x, w), arithmetic = ctx.saved_tensors, ctx.options[-1]
        dy, dx, dw = gradients[0].contiguous(), None, None

        def of_weight() -> None:
            nonlocal dw
            if ctx.needs_input_grad[1] and dw is None:
                dw = gemm_db(dy, x, arithmetic=arithmetic)

        if ctx.needs_input_grad[0]:
            dx = _parallel_product("column_parallel_linear", dy, w, None, *ctx.options, meanwhile=of_weight)
        of_weight()
        return dx, dw, _sum_rows(dy) if ctx.has_bias and ctx.needs_input_grad[2] else None, None


def row_parallel_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    segments: int = 8,
    in_features: int | None = None,
    even: bool = False,
    out: Rows = "replicate",
    method: Method = "auto",
    arithmetic: Arithmetic = "auto",
) -> Tensor:
    """``y = x w^T + bias`` where each rank holds some columns of ``x`` and of ``w``; with gradients.

    The bits are those of ``pydet.gemm(x, w.T, bias=bias, k_chunk=segment_length(K, segments))`` on one device, whatever
    the number of ranks: every rank makes the sums of its segments of K, they are exchanged in fp32 and folded in
    ascending order. The gradients of ``x`` and ``w`` need no exchange: natural chains, as of :func:`pydet.gemm`.

    Args:
        x: ``[..., k]``: this rank's columns, ``shard_bounds(K, segments, rank, W)``.
        w: ``[N, k]``: the same columns. float32, bfloat16 or float16, as ``x``.
        bias: ``[N]``, the same on every rank; added once.
        group: a process group, the default one if None.
        segments: how many segments K has: a multiple of the number of ranks. It decides bits.
        in_features: K. k times the number of ranks by default, which is right unless the last shard is shorter.
        even: K has segments of K / segments each, whether that is a multiple of 16 or not (pass it to ``shard_bounds``,
            too). It decides bits where it is not.
        out: ``"replicate"``: all of y on every rank. ``"shard_rows"``: y's rows ``[M / W, N]`` of this rank.
        method: how the sums travel (the table in :mod:`pydet.torch.distributed.exchange`); it decides no bits.
            ``"auto"``: by their size and by what the group's ranks reach. ``"push"`` wants rows that W divides.
        arithmetic: as in :func:`pydet.gemm`; it decides bits.

    Raises:
        Error: on every rank, where one has other shapes, types or options, or refuses.
    """
    world, flat = dist.get_world_size(group), matrix(x)
    extent = x.shape[-1] * world if in_features is None else in_features
    options = extent, segments, even, group, out, method, arithmetic
    y: Tensor = _RowParallel.apply(flat, w, bias, options)
    return y if out == "shard_rows" else y.view(*x.shape[:-1], w.shape[0])


def column_parallel_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    segments: int = 8,
    out_features: int | None = None,
    even: bool = False,
    rows: Rows = "replicate",
    method: Method = "auto",
    arithmetic: Arithmetic = "auto",
) -> Tensor:
    """``y = x w^T + bias`` where each rank holds some rows of ``w`` and makes those columns of y; with gradients.

    Forward needs no exchange: the bits of :func:`pydet.gemm`. The gradient of ``x`` sums over all columns of y: an
    ordered sum over ``segments`` of N, as in :func:`row_parallel_linear`, with the same bits on any number of ranks.

    Args:
        x: ``[..., K]``, the same on every rank; under ``rows="shard_rows"`` this rank's rows ``[M / W, K]``.
        w: ``[n, K]``: this rank's rows, ``shard_bounds(N, segments, rank, W)``.
        bias: ``[n]``: likewise.
        segments: how many segments N has: a multiple of the number of ranks. It decides the bits of x's gradient.
        out_features: N. n times the number of ranks by default.
        even: N has segments of N / segments each, as in :func:`row_parallel_linear`.
        rows: ``"shard_rows"``: ``x`` is gathered in forward, and its gradient is left sharded by rows.
        group, method, arithmetic: as in :func:`row_parallel_linear`.

    Raises:
        Error: as there.
    """
    world, flat = dist.get_world_size(group), matrix(x)
    extent = w.shape[0] * world if out_features is None else out_features
    y: Tensor = _ColumnParallel.apply(flat, w, bias, (extent, segments, even, group, rows, method, arithmetic))
    return y if rows == "shard_rows" else y.view(*x.shape[:-1], w.shape[0])
