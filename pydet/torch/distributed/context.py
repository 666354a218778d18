"""Attention over sequences whose tokens are shared out over the ranks (context parallel), forward and backward.

A query's result is a function of its own row and of its sequence's keys, counted from the first (NUMERICS.md,
"Attention"): so a rank that has all keys makes its own queries, and has the bits of one device. The gradient of a key
is a chain over the queries, in blocks of 128, from the first on: so a rank that has all queries makes its own keys'.
Ranks hence give each other tokens, and no sum crosses them.

A sequence is cut into equal chunks, W of them (``contiguous``), rank r has chunk r; or 2 W (``zigzag``), rank r has
chunks r and 2 W - 1 - r: under causal the ranks then have as many pairs of a query and a key to do.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

import pydet
from pydet._native import INVALID_VALUE, UNSUPPORTED, constants, fail
from pydet.ops import Arithmetic, fold
from pydet.ops.attention import Window
from pydet.torch.distributed.context_heads import by_heads
from pydet.torch.distributed.exchange import Group, Tensor, gather, member, peer, shared, together
from pydet.torch.ops.attention import adjacent, padded

Layout: TypeAlias = Literal["contiguous", "zigzag"]
LAYOUTS = ("contiguous", "zigzag")
Method: TypeAlias = Literal["gather", "heads"]
METHODS = ("gather", "heads")
QUERIES_BLOCK = 128  # of the chains of dk and dv
_OP = "context_parallel_attention"
_backward: Any = pydet.attention_backward

# ---- Chunks ----------------------------------------------------------------------------------------------------------


def owners_of(world: int, layout: str) -> list[int]:
    """The rank that has each chunk of a sequence."""
    return list(range(world)) if layout == "contiguous" or world == 1 else [*range(world), *reversed(range(world))]


def check_layout(op: str, layout: str) -> None:
    if layout not in LAYOUTS:
        fail(INVALID_VALUE, f"{op}: layout is {layout!r}, want one of {', '.join(LAYOUTS)}")


def shard_context(x: Tensor, *, dim: int = 1, group: Group = None, layout: Layout = "contiguous") -> Tensor:
    """This rank's tokens of a whole sequence: what :func:`context_parallel_attention` takes, of any tensor.

    Args:
        x: the whole sequence, the same on every rank: tokens, places, labels, hidden states.
        dim: which dimension the tokens have; a multiple of the ranks, in ``zigzag`` of twice as many.
        group: a process group, the default one if None.
        layout: ``contiguous`` or ``zigzag``.

    Raises:
        Error: a number of tokens that the chunks do not divide.
    """
    check_layout("shard_context", layout)
    rank = member("shard_context", dist.get_rank(group))
    owners = owners_of(dist.get_world_size(group), layout)
    if x.shape[dim] % len(owners):
        got = x.shape[dim]
        fail(constants.PYDET_INVALID_SHAPE, f"shard_context: x has {got} tokens, want a multiple of {len(owners)}")
    parts = zip(x.chunk(len(owners), dim), owners, strict=True)
    return torch.cat([part for part, owner in parts if owner == rank], dim)


def gather_context(x: Tensor, *, dim: int = 1, group: Group = None, layout: Layout = "contiguous") -> Tensor:
    """The whole sequence of all ranks' tokens, without a gradient: the way back of :func:`shard_context`.

    Args:
        x: this rank's tokens, as many on every rank.
        dim, group, layout: as in :func:`shard_context`.
    """

    def terms() -> tuple[Any, ...]:
        check_layout("gather_context", layout)
        if layout == "zigzag" and x.shape[dim] % 2 and dist.get_world_size(group) > 1:
            got = x.shape[dim]
            fail(constants.PYDET_INVALID_SHAPE, f"gather_context: x has {got} tokens, want an even number in zigzag")
        return None, tuple(x.shape), x.dtype, dim, layout

    together("gather_context", group, x.device, terms)
    return whole(x.detach(), group, layout, dim)


def whole(x: Tensor, group: Group, layout: str, dim: int = 2) -> Tensor:
    """All ranks' tokens, in the order of the sequence."""
    if dist.get_world_size(group) == 1:
        return x
    everyone = gather(x.movedim(dim, 0), group)
    if layout == "zigzag":
        first, second = everyone.unflatten(1, (2, x.shape[dim] // 2)).unbind(1)
        everyone = torch.cat([first, second.flip(0)])
    return everyone.flatten(0, 1).movedim(0, dim)


# ---- Attention -------------------------------------------------------------------------------------------------------


class _How(NamedTuple):
    """What a call asks for, the same on every rank."""

    causal: bool
    window: Window | None
    layout: str
    scale: float
    softcap: float | None
    arithmetic: str
    kv_chunk: int

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "softcap": self.softcap, "arithmetic": self.arithmetic}


def _check(q: Tensor, k: Tensor, v: Tensor, how: _How, world: int, gradient: bool) -> None:
    """What the library does not see of a call on one rank's tokens."""
    check_layout(_OP, how.layout)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.device != q.device:
            fail(
                constants.PYDET_INVALID_SHAPE,
                f"{_OP}: {name} is {tuple(x.shape)} on {x.device}, want [B, heads, tokens, elements] beside q",
            )
    tokens, keys = q.shape[2], k.shape[2]
    if how.window is not None and not how.causal:
        fail(UNSUPPORTED, f"{_OP}: window is {how.window} without causal, want causal=True with it")
    if how.causal and tokens != keys:
        fail(
            constants.PYDET_INVALID_SHAPE,
            f"{_OP}: q has {tokens} tokens and k {keys} under causal, want as many of both on each rank",
        )
    cuts = len(owners_of(world, how.layout)) // world
    if tokens % cuts or keys % cuts:
        fail(
            constants.PYDET_INVALID_SHAPE,
            f"{_OP}: q has {tokens} tokens and k {keys} on a rank, want even numbers in zigzag",
        )
    chunk = tokens // cuts
    if world > 1 and how.causal and gradient and chunk % QUERIES_BLOCK:
        fail(
            constants.PYDET_INVALID_SHAPE,
            f"{_OP}: a chunk has {chunk} tokens, want a multiple of {QUERIES_BLOCK} on {world} ranks: the gradients of "
            "keys are sums over blocks of so many queries",
        )


def _near(first_query: int, first_key: int, queries: int, keys: int, left: int, device: torch.device) -> Tensor:
    """``[1, 1, Q, K]``: causal, and no key further than `left` before a query."""
    before = torch.arange(first_query, first_query + queries, device=device)[:, None]
    before = before - torch.arange(first_key, first_key + keys, device=device)
    return ((before >= 0) & (before <= left))[None, None]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: _How, group: Group, differentiable: bool
    ) -> Tensor:
        world, rank = dist.get_world_size(group), dist.get_rank(group)

        def terms() -> tuple[Any, ...]:
            _check(q, k, v, how, world, differentiable)
            _of_chunk(q[:, :, :0], k[:, :, :0], v[:, :, :0], sinks, how)  # for what the library refuses
            shapes = *(tuple(x.shape) for x in (q, k, v)), None if sinks is None else sinks.dtype
            return None, shapes, q.dtype, how, f"gradients {differentiable}"

        together(_OP, group, q.device, terms)
        keys, values = (whole(x.detach(), group, how.layout) for x in (k, v))
        owners = owners_of(world, how.layout)
        own = [c for c, owner in enumerate(owners) if owner == rank]
        each, parts = q.shape[2] // len(own), []
        for c, some in zip(own, q.detach().chunk(len(own), 2), strict=True):
            end = (c + 1) * each if how.causal else keys.shape[2]
            parts.append(_of_chunk(some, keys[:, :, :end], values[:, :, :end], sinks, how))
        out, lse = (torch.cat(x, 2) for x in zip(*parts, strict=True))
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.how, ctx.group = how, group
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        how, group, dout = ctx.how, ctx.group, gradients[0]
        of_sinks = sinks is not None and ctx.needs_input_grad[3]
        found = _gradients(dout, q, k, v, out, lse, sinks, of_sinks, how, group)
        return *found, None, None, None


def _of_chunk(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: _How) -> tuple[Tensor, Tensor]:
    width = v.shape[-1]
    sinks = None if sinks is None else sinks.detach().contiguous()
    more: dict[str, Any] = {"causal": how.causal, "window": how.window, "kv_chunk": how.kv_chunk, "sinks": sinks}
    q, k, v = (adjacent(x) for x in padded(q.detach(), k.detach(), v.detach()))
    out, lse = pydet.attention(q, k, v, return_lse=True, **more, **how.options)
    return out[..., :width].contiguous(), lse


def _gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    of_sinks: bool,
    how: _How,
    group: Group,
) -> tuple[Tensor | None, ...]:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    widths = q.shape[-1], v.shape[-1]
    q, k, v = (adjacent(x.detach()) for x in padded(q, k, v))
    dout, out = (adjacent(torch.nn.functional.pad(x, (0, v.shape[-1] - x.shape[-1]))) for x in (dout, out))
    options = how.options | {"causal": how.causal, "window": how.window}
    owners = owners_of(world, how.layout)
    own = [c for c, owner in enumerate(owners) if owner == rank]
    queries, keys = q.shape[2] // len(own), k.shape[2] // len(own)

    whole_k, whole_v = (whole(x, group, how.layout) for x in (k, v))
    rows, dq = [x.chunk(len(own), 2) for x in (dout, q, out, lse)], []
    for i, c in enumerate(own):
        d, some, o, log = (x[i] for x in rows)
        end = (c + 1) * queries if how.causal else whole_k.shape[2]
        its = d, some, whole_k[:, :, :end], whole_v[:, :, :end], o, log
        dq.append(_backward(*its, only="q", **options)[0])
    dsinks = _sinks_gradient(rows, whole_k, whole_v, sinks, how, group) if of_sinks and sinks is not None else None
    del whole_k, whole_v

    of_all = [whole(x, group, how.layout) for x in (dout, q, out, lse)]
    sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)]
    for i, c in enumerate(own):
        here = slice(i * keys, (i + 1) * keys)
        into = {name: x[:, :, here] for name, x in zip(("dk", "dv"), sums, strict=True)}
        _keys_gradients(of_all, (k[:, :, here], v[:, :, here]), into, c * keys, how)
    dk, dv = (fold([x], out_dtype=y.dtype) for x, y in zip(sums, (k, v), strict=True))
    found = torch.cat(dq, 2), dk, dv
    return *(x[..., :n].contiguous() for x, n in zip(found, (widths[0], *widths), strict=True)), dsinks


def _keys_gradients(
    of_all: list[Tensor], keys: tuple[Tensor, ...], into: dict[str, Tensor], first: int, how: _How
) -> None:
    """Of keys from place `first` on, by the queries of all ranks in `of_all` (dout, q, out, lse), ascending."""
    options: dict[str, Any] = how.options | {"only": "kv", "accumulate": True} | into
    count, queries = keys[0].shape[2], of_all[1].shape[2]
    left = how.window[0] if how.window is not None else None

    def run(begin: int, end: int, **more: Any) -> None:
        dout, q, out, lse = (x[:, :, begin:end] for x in of_all)
        _backward(dout, q, *keys, out, lse, **more, **options)

    if count == queries or not how.causal:
        run(0, queries, causal=how.causal, window=how.window)
    elif left is not None:
        end = min(first + count + left, queries)
        mask = _near(first, first, end - first, count, left, keys[0].device)
        run(first, end, allowed=mask)
    else:
        run(first, first + count, causal=True)
        if first + count < queries:
            run(first + count, queries)


def _sinks_gradient(
    rows: list[tuple[Tensor, ...]], k: Tensor, v: Tensor, sinks: Tensor, how: _How, group: Group
) -> Tensor:
    """A chain over the sequences, and the queries of each, ascending: from rank to rank, and then to all."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    total = torch.zeros(sinks.shape, dtype=torch.float32, device=sinks.device)
    walk = [(s, owner) for s in range(k.shape[0]) for owner in owners_of(world, how.layout)]
    seen = [0] * k.shape[0]
    for at, (s, owner) in enumerate(walk):
        if owner != rank:
            continue
        if at and walk[at - 1][1] != rank:
            dist.recv(total, peer(group, walk[at - 1][1]), group=group)
        dout, q, out, lse = (x[seen[s]][s : s + 1] for x in rows)
        seen[s] += 1
        its = dout, q, k[s : s + 1], v[s : s + 1], out, lse
        _backward(*its, sinks=sinks.detach().contiguous(), dsinks=total, accumulate=True, only="sinks", **how.options)
        if at + 1 < len(walk) and walk[at + 1][1] != rank:
            dist.send(total, peer(group, walk[at + 1][1]), group=group)
    if world > 1 and walk:
        dist.broadcast(total, peer(group, walk[-1][1]), group=group)
    return fold([total], out_dtype=sinks.dtype)


def _check_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    how: _How,
    world: int,
    differentiable: bool,
    at_once: int | None,
    method: str,
) -> tuple[Any, ...]:
    """What is compared of a call by heads, before tokens travel."""
    if method not in METHODS:
        fail(INVALID_VALUE, f"{_OP}: method is {method!r}, want one of {', '.join(METHODS)}")
    if at_once is not None:
        fail(UNSUPPORTED, f"{_OP}: key_heads_at_once is {at_once} with method 'heads', want None")
    _check(q, k, v, how, world, gradient=False)
    shared(k.shape[1], world, _OP, "the number of key heads, under method 'heads',")
    _of_chunk(q[:, :, :0], k[:, :, :0], v[:, :, :0], sinks, how)  # for what the library refuses
    shapes = *(tuple(x.shape) for x in (q, k, v)), None if sinks is None else sinks.dtype
    each = [x is not None and x.requires_grad and differentiable for x in (q, k, v, sinks)]
    return None, shapes, q.dtype, how, f"gradients {each}", method


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    causal: bool = False,
    layout: Layout = "contiguous",
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    arithmetic: Arithmetic = "auto",
    kv_chunk: int = 1024,
    key_heads_at_once: int | None = None,
    method: Method = "gather",
) -> Tensor:
    """:func:`pydet.torch.attention` of sequences whose tokens are shared out over the ranks, with gradients.

    Results and gradients have the bits of one device's attention of the whole sequences, for every number of ranks and
    either layout. By ``gather`` forward gathers all keys and values, backward those and all queries with their
    gradients, for the time of the call; what is kept for backward is this rank's. By ``heads`` ranks exchange tokens of
    all heads for all tokens of some, and no rank has more than 1/W of anything.

    Args:
        q: ``[B, H, Q / W, D]``: this rank's queries of each sequence; as many on every rank.
        k: ``[B, G, K / W, D]``: this rank's keys, for this rank's own tokens under `causal`: then ``K = Q``.
        v: ``[B, G, K / W, E]``.
        group: a process group, the default one if None.
        causal: a query sees no key after its own place in the sequence. For gradients a chunk is then a multiple of 128
            tokens on more than one rank, by ``gather``.
        layout: ``contiguous``: rank r has the r-th of W equal chunks. ``zigzag``: the r-th of 2 W and, behind it, the
            r-th from the end, so that under `causal` all ranks have as much to do. It decides no bit.
            :func:`shard_context` cuts either way.
        scale: of the scores; ``1 / sqrt(D)`` if None.
        window: ``(left, right)``, under `causal` alone: as in :func:`pydet.attention`.
        softcap, arithmetic, kv_chunk: as in :func:`pydet.torch.attention`.
        sinks: ``[H]``, the same on every rank; its gradient is the whole one, on every rank: add it once.
        key_heads_at_once: how many of the G heads are gathered at a time, with their queries' heads; all if None. Fewer
            take less memory for the time of the call. It decides no bit. By ``gather`` alone.
        method: ``gather``, or ``heads``, where the ranks divide G. It decides no bit.

    Returns:
        ``[B, H, Q / W, E]``, of the type of q.

    Raises:
        Error: on every rank, where one has other shapes, types or options, or refuses.
    """
    width = q.shape[-1] if q.dim() and q.shape[-1] else 1
    how = _How(causal, window, layout, 1 / math.sqrt(width) if scale is None else scale, softcap, arithmetic, kv_chunk)
    needs = any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    differentiable = torch.is_grad_enabled() and needs
    at_once = key_heads_at_once
    if method != "gather":
        world = dist.get_world_size(group)
        together(
            _OP, group, q.device, lambda: _check_heads(q, k, v, sinks, how, world, differentiable, at_once, method)
        )
        return by_heads(q, k, v, sinks, how, group, _of_chunk)
    if at_once is not None and (not isinstance(at_once, int) or at_once < 1):
        said = f"{_OP}: key_heads_at_once is {at_once!r}, want a number from 1 up, or None for all"
        together(_OP, group, q.device, lambda: fail(INVALID_VALUE, said))  # which tells the others
    heads = k.shape[1] if k.dim() == 4 else 0
    by_turns = at_once is not None and at_once < heads and q.dim() == v.dim() == 4
    by_turns = by_turns and v.shape[1] == heads and q.shape[1] % heads == 0
    if not by_turns or at_once is None or (sinks is not None and sinks.shape != q.shape[1:2]):
        y: Tensor = _Attention.apply(q, k, v, sinks, how, group, differentiable)
        return y
    members = at_once * (q.shape[1] // heads)
    some = [x.split(n, 1) for x, n in ((q, members), (k, at_once), (v, at_once))]
    of_sinks = [None] * len(some[0]) if sinks is None else sinks.split(members)
    parts = [_Attention.apply(*of, how, group, differentiable) for of in zip(*some, of_sinks, strict=True)]
    return torch.cat(parts, 1)
