"""``attention`` and ``attention_backward``: the library's kernels, and what a mask says of sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import pydet
from pydet._native import INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, Error, constants, fail
from pydet.hooks import unknown
from pydet.ops.attention import _attention
from pydet.torch.ops import masks
from pydet.torch.ops.register import DTYPES, Call, Tensor, define

_backward: Any = pydet.attention_backward
_varlen_backward: Any = pydet.attention_varlen_backward
_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}  # of the queries that are computed at a time; decides no bits

# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _blocks(q: Tensor, k: Tensor, heads: int) -> Iterator[tuple[int, int]]:
    """Queries from, to: as many as keep the scores of `heads` heads within bounds."""
    row = q.shape[0] * heads * max(k.shape[2], 1)
    block = max(_SCORES.get(q.device.type, 1 << 20) // max(row, 1), 1)
    for first in range(0, q.shape[2], block):
        yield first, min(first + block, q.shape[2])


def _rows_of(q: Tensor, k: Tensor, first: int, last: int) -> Tensor:
    """The rows of the causal mask for a block of queries: [1, 1, 1, queries, K]."""
    places = torch.arange(first, last, device=q.device) + (k.shape[2] - q.shape[2])
    return (torch.arange(k.shape[2], device=q.device) <= places[:, None])[None, None, None]


def padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With zeros up to widths that the library takes; they change no chain."""
    widths = [-(-x.shape[-1] // 8) * 8 for x in (q, v)]
    if max(widths) > 256 and widths[0] <= 576 and widths[1] <= 512:
        widths = [576, 512]
    fit = lambda x, width: x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))  # noqa: E731
    return fit(q, widths[0]), fit(k, widths[0]), fit(v, widths[1])


def _run_planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    plan: masks.Plan,
    out: Tensor,
    lse: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The rows of a mask as sequences; `allowed` is what the plan was made of."""
    (batch, heads, queries, _), width = q.shape, out.shape[-1]
    results = out.transpose(1, 2), lse.transpose(1, 2)
    for part in plan:
        how: dict[str, Any] = {**options, **part.lengths, "causal": part.causal, "return_lse": True}
        if part.kind == "dense":
            y, log = pydet.attention(q, k, v, allowed=allowed if part.masked else None, **how)
            return y[..., :width].contiguous(), log
        rows = q.transpose(1, 2).reshape(batch * queries, heads, -1)
        rows = rows if part.rows is None else rows[part.rows]
        cache = [x.transpose(1, 2) for x in (k, v)]
        if part.kind == "packed":
            y, log = pydet.attention_varlen(rows, *[x.flatten(0, 1) for x in cache], **how)
        else:
            y, log = pydet.attention_paged(rows, *cache, **how)
        for result, found in zip(results, (y[..., :width], log), strict=True):
            if part.rows is None:
                result.copy_(found.unflatten(0, (batch, queries)))
            else:
                result[part.rows // queries, part.rows % queries] = found
    return out, lse


def _captured(x: Tensor) -> bool:
    """A CUDA graph is being made: what a mask holds is known when it runs."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _behind_each_other(x: Tensor) -> bool:
    """[B, G, K, D]: the keys of a sequence lie behind those of the one before it."""
    return x.shape[0] == 1 or x.stride(0) == x.shape[2] * x.stride(2)


def _run_from_first(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, out: Tensor, lse: Tensor, options: dict[str, Any]
) -> None:
    """Each query a sequence of its own, of the keys from the first to the last that it may see. A bias among the
    options is as large as the queries and keys, or as one of them."""
    (batch, heads, queries, width), (groups, keys) = q.shape, k.shape[1:3]
    allowed = allowed.expand(batch, -1, -1, -1)
    places = torch.arange(keys, dtype=torch.int32, device=q.device)
    first_key = torch.where(allowed, places, keys).amin(-1)
    seqlens_k = torch.where(allowed, places + 1, 0).amax(-1)
    if queries == 1 and allowed.shape[1] == 1:
        lengths: dict[str, Any] = {"first_key": first_key.view(-1), "seqlens_k": seqlens_k.view(-1)}
        y, log = pydet.attention(q, k, v, allowed=allowed, return_lse=True, **lengths, **options)
        out.copy_(y[..., : out.shape[-1]]), lse.copy_(log)
        return
    if allowed.shape[1] > 1:
        sinks, bias, members = options["sinks"], options.get("bias"), heads // groups
        for head in range(heads):
            one, of = slice(head, head + 1), slice(head // members, head // members + 1)
            own = options | {"sinks": None if sinks is None else sinks[one]}
            if bias is not None and bias.shape[1] > 1:
                own["bias"] = bias[:, one]
            _run_from_first(q[:, one], k[:, of], v[:, of], allowed[:, one], out[:, one], lse[:, one], own)
        return
    # A sequence's keys are one page, that its queries share.
    rows, cache = q.transpose(1, 2).reshape(-1, heads, 1, width), [x.transpose(1, 2) for x in (k, v)]
    pages = torch.arange(batch, dtype=torch.int32, device=q.device).repeat_interleave(queries)[:, None]
    if (bias := options.get("bias")) is not None:
        of_rows = bias.expand(batch, -1, queries, keys).transpose(1, 2).flatten(0, 1)[:, :, None]
        options = options | {"bias": of_rows}
    y, log = pydet.attention_paged(
        rows,
        cache[0],
        cache[1],
        pages,
        seqlens_k.view(-1),
        causal=False,
        allowed=allowed[:, 0].flatten(0, 1)[:, None, None],
        first_key=first_key.view(-1),
        return_lse=True,
        **options,
    )
    out.copy_(y[:, :, 0, : out.shape[-1]].unflatten(0, (batch, queries)).transpose(1, 2))
    lse.copy_(log[:, :, 0].unflatten(0, (batch, queries)).transpose(1, 2))


def _run_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    scale: float,
    arithmetic: str,
    kv_chunk: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """One call, where that is all there is to do; None of another, and of what the library refuses."""
    if allowed is not None or bias is not None or not q.dim() == k.dim() == v.dim() == 4:
        return None
    width, of_v = q.shape[3], v.shape[3]
    if width % 8 or of_v % 8 or not 0 < width <= 256 or not 0 < of_v <= 256 or not q.shape[2] or not k.shape[2]:
        return None
    try:
        found: tuple[Tensor, Tensor] = _attention(
            q,
            k,
            v,
            scale=scale,
            softcap=softcap,
            causal=causal,
            sinks=sinks,
            arithmetic=arithmetic,
            kv_chunk=1024 if kv_chunk is None else kv_chunk,
            return_lse=True,
        )
    except Error:
        return None
    return found


def _run_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    scale: float,
    arithmetic: str,
    kv_chunk: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    causal: bool,
    from_first: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if (found := _run_plain(q, k, v, allowed, scale, arithmetic, kv_chunk, sinks, softcap, causal, bias)) is not None:
        return found
    out, lse = _fake_attention(q, k, v, allowed, scale, arithmetic, kv_chunk, sinks, softcap, causal, from_first, bias)
    if out.numel() == 0 or k.shape[2] == 0:
        if sinks is None:
            return out.zero_(), lse.fill_(float("-inf"))
        return out.zero_(), lse.copy_(sinks.detach().float()[:, None].expand_as(lse))
    q, k, v = padded(q.detach(), k.detach(), v.detach())
    sinks = None if sinks is None else sinks.detach().contiguous()
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "arithmetic": arithmetic}
    options["kv_chunk"] = 1024 if kv_chunk is None else kv_chunk
    if bias is not None:
        options["bias"] = bias = bias.detach()
    given = allowed
    if allowed is not None and allowed.shape[1] > 1 and allowed.stride(1) == 0:
        allowed = allowed[:, :1]
    if given is not None and allowed is not None and from_first and allowed.shape[1] == 1 and not _captured(q):
        follow = _behind_each_other(k) and _behind_each_other(v)
        plan = masks.plan_of(given, q.shape[0], causal, follow, options["kv_chunk"])
        # packs have no places among all queries and keys, by which a bias counts
        if plan is not None and (bias is None or all(part.kind == "dense" for part in plan)):
            return _run_planned(q, k, v, allowed, plan, out, lse, options)
    if allowed is not None and from_first:
        for first, last in _blocks(q, k, q.shape[1]):
            rows = allowed[:, :, first:last]
            if causal:
                rows = rows & _rows_of(q, k, first, last)[0]
            of = slice(None), slice(None), slice(first, last)
            own = options if bias is None or bias.shape[2] == 1 else options | {"bias": bias[of]}
            _run_from_first(q[of], k, v, rows, out[of], lse[of], own)
        return out, lse
    y, log = pydet.attention(q, k, v, allowed=allowed, causal=causal, return_lse=True, **options)
    return y[..., : out.shape[-1]].contiguous(), log


def adjacent(x: Tensor) -> Tensor:
    """With the elements of a head behind each other, as a gradient that was expanded has them not."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def _run_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    arithmetic: str,
    sinks: Tensor | None,
    softcap: float | None,
    causal: bool,
    from_first: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """from_first: rows of a mask that are sequences are counted as those, each from its first query and key."""
    results = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    of_sinks = torch.zeros(0, dtype=torch.float32, device=q.device) if sinks is None else torch.zeros_like(sinks)
    if out.numel() == 0 or k.shape[2] == 0:
        return *results, of_sinks  # type: ignore[return-value]
    widths = q.shape[-1], v.shape[-1]
    q, k, v = (adjacent(x) for x in padded(q, k, v))
    dout, out = (adjacent(torch.nn.functional.pad(x, (0, v.shape[-1] - x.shape[-1]))) for x in (dout, out))
    sinks = None if sinks is None else sinks.contiguous()
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "arithmetic": arithmetic}
    if bias is not None:
        options["bias"] = bias
    rows = dout, q, k, v, out, lse
    if allowed is not None and from_first:
        if _captured(q):
            fail(
                UNSUPPORTED,
                "attention_backward: a mask is not read while a CUDA graph is made of it; want causal=True, or packed "
                "sequences in attention_varlen",
            )
        plan = masks.gradient_plan_of(allowed, q.shape[0], causal, may_pack=bias is None)
        found = _planned_backward(rows, allowed, plan, causal, sinks, options)
    else:
        found = _backward(*rows, allowed=allowed, causal=causal, sinks=sinks, **options)
    dq, dk, dv, *dsinks = found
    dq, dk, dv = (x[..., :n].contiguous() for x, n in zip((dq, dk, dv), (widths[0], *widths), strict=True))
    return dq, dk, dv, dsinks[0] if dsinks else of_sinks


def _planned_backward(
    rows: tuple[Tensor, ...],
    allowed: Tensor,
    plan: masks.Plan,
    causal: bool,
    sinks: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    """rows: dout, q, k, v, out, lse. The gradient of the sinks is a sum over all of them, in their order."""
    if len(plan) == 1 and plan[0].kind == "dense" and plan[0].rows is None:
        of = {**plan[0].lengths, "causal": plan[0].causal, "allowed": allowed if plan[0].masked else None}
        found: tuple[Tensor, ...] = _backward(*rows, **of, sinks=sinks, **options)
        return found
    _, q, k, v, *_ = rows
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    packed = [part for part in plan if part.kind == "packed"]
    of_keys = torch.float32 if len(packed) > 1 else q.dtype  # one that several calls continue
    dk, dv = (torch.zeros(x.shape, dtype=of_keys, device=x.device) for x in (k, v))
    if packed:
        _packed_backward(rows, packed, dq, dk, dv, options)
    dk, dv = dk.to(k.dtype), dv.to(v.dtype)
    for part in plan:
        if part.kind == "dense" and part.rows is not None:
            its = part.rows
            mask = allowed if allowed.shape[0] == 1 else allowed[its]
            of = {**part.lengths, "causal": part.causal, "allowed": mask}
            if (bias := options.get("bias")) is not None and bias.shape[0] > 1:
                of["bias"] = bias[its]
            found = _backward(*[x[its] for x in rows], **(options | of))
            dq[its], dk[its], dv[its] = found
    if sinks is None:
        return dq, dk, dv
    more: dict[str, Any] = {"allowed": allowed, "causal": causal, "sinks": sinks, "only": "sinks"}
    return dq, dk, dv, _backward(*rows, **more, **options)[3]


def _packed_backward(
    rows: tuple[Tensor, ...],
    parts: list[masks.Part],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    options: dict[str, Any],
) -> None:
    """Into dq, dk and dv, which are 0, of rows that are sequences with keys of their own."""
    flat = [x.transpose(1, 2).flatten(0, 1) for x in rows]
    queries, several = rows[1].shape[2], len(parts) > 1
    packed_k, packed_v = (x.new_zeros(y.shape) for x, y in ((dk, flat[2]), (dv, flat[3])))
    for part in parts:
        its = slice(None) if part.rows is None else part.rows
        of = [x if i in (2, 3) else x[its] for i, x in enumerate(flat)]
        how: dict[str, Any] = {**part.lengths, "causal": part.causal, "accumulate": several}
        own = torch.zeros_like(of[1], memory_format=torch.contiguous_format)
        _varlen_backward(*of, **how, dq=own, dk=packed_k, dv=packed_v, **options)
        if part.rows is None:
            dq.copy_(own.unflatten(0, (-1, queries)).transpose(1, 2))
        else:
            dq.transpose(1, 2)[part.rows // queries, part.rows % queries] = own
    for whole, found in ((dk, packed_k), (dv, packed_v)):
        whole.copy_(found.unflatten(0, (-1, whole.shape[2])).transpose(1, 2))


# ---- The gradient of a bias -----------------------------------------------------------------------------------------


def _halved(x: Tensor) -> Tensor:
    """The sum over the last dimension, whose extent is made a power of two by zeros: halves are added until one is
    left."""
    x = torch.nn.functional.pad(x, (0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]))
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _added(total: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`total` summed over the dimensions of extent 1 in `shape`, the last first, each in ascending order."""
    for dim in range(total.dim() - 1, -1, -1):
        if shape[dim] == 1 and total.shape[dim] > 1:
            first, *rest = total.split(1, dim)
            total = first.clone()
            for x in rest:
                total += x
    return total


def _run_bias_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    bias: Tensor,
    scale: float,
    arithmetic: str,
    softcap: float | None,
    causal: bool,
) -> Tensor:
    """``dbias = p (dp - delta)``, in fp32 by steps of one rounding each, summed over what the bias is spread over:
    keys, queries, heads, then sequences, each ascending.

        s  = chain over d of q, k;   z = fl(s scale), under a softcap softcap tanh(z / softcap);   z = fl(z + bias)
        p  = exp(fl(z - lse)), the activation;  0 where a key is not allowed;   dp = chain over e of dout, v
        ds = fl(p fl(dp - delta)),   delta the sum over e of fl(dout out) by halves
    """
    (batch, heads, queries, _), (groups, keys) = q.shape, k.shape[1:3]
    result = torch.zeros(bias.shape, dtype=torch.float32, device=q.device)
    if out.numel() == 0 or keys == 0:
        return result.to(bias.dtype)
    how: dict[str, Any] = {"arithmetic": arithmetic, "out_dtype": torch.float32}
    sees = _rows_of(q, k, 0, queries)[0, 0] if causal else None
    for of in range(batch):
        one = lambda x: x[min(of, x.shape[0] - 1)]  # noqa: B023, E731 -- called in this turn
        rows = [x[of].reshape(groups, -1, x.shape[-1]).contiguous() for x in (q, dout)]
        pairs = [pydet.gemm(x, y[of].contiguous().mT, **how) for x, y in zip(rows, (k, v), strict=True)]
        scores, dp = (x.view(heads, queries, keys) for x in pairs)
        scores = scores * scale
        if softcap is not None:
            scores = pydet.activation((scores / softcap).contiguous(), "tanh") * softcap
        scores = scores + one(bias).float() - lse[of][..., None]
        hidden = ~torch.isfinite(scores) & (scores < 0)  # a bias of -inf
        hidden |= torch.isneginf(lse[of])[..., None]
        if allowed is not None:
            hidden |= ~one(allowed)
        if sees is not None:
            hidden |= ~sees
        weights = pydet.activation(scores.masked_fill(hidden, 0).contiguous(), "exp")
        delta = _halved(dout[of].float() * out[of].float())
        found = (weights * (dp - delta[..., None])).masked_fill_(hidden, 0)
        found = _added(found, tuple(bias.shape[1:]))
        if bias.shape[0] > 1:
            result[of] = found
        else:
            result[0] += found
    return result.to(bias.dtype)


# ---- Shapes and gradient ---------------------------------------------------------------------------------------------


def _fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    scale: float,
    arithmetic: str,
    kv_chunk: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    causal: bool,
    from_first: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    shapes = ", ".join(f"{name} {'x'.join(map(str, x.shape))}" for name, x in (("q", q), ("k", k), ("v", v)))
    fits = (
        q.dim() == k.dim() == v.dim() == 4
        and q.shape[0] == k.shape[0]
        and k.shape[:3] == v.shape[:3]
        and q.shape[3] == k.shape[3]
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
    )
    if not fits:
        want = "want q BxHxQxD, k BxGxKxD, v BxGxKxE, H a multiple of G"
        fail(constants.PYDET_INVALID_SHAPE, f"attention: {shapes}, {want}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            fail(INVALID_DTYPE, f"attention: {name} is {x.dtype}, want float32, bfloat16 or float16, the same of all")
    unknown(arithmetic, "attention", "arithmetic")
    if kv_chunk is not None and (kv_chunk <= 0 or kv_chunk % 128):
        fail(INVALID_VALUE, f"attention: kv_chunk is {kv_chunk}, want a positive multiple of 128")
    if sinks is not None and (tuple(sinks.shape) != (q.shape[1],) or sinks.dtype not in DTYPES):
        got = f"{sinks.dtype} {tuple(sinks.shape)}"
        fail(constants.PYDET_INVALID_SHAPE, f"attention: sinks is {got}, want one number a head, ({q.shape[1]},)")
    if softcap is not None and not 0 < softcap < float("inf"):
        fail(INVALID_VALUE, f"attention: softcap is {softcap}, want a positive number, or None")
    if allowed is not None:
        want_mask = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if allowed.dtype != torch.bool:
            fail(INVALID_DTYPE, f"attention: the mask is {allowed.dtype}, want bool, True where a key takes part")
        if allowed.dim() != 4 or any(x not in (1, y) for x, y in zip(allowed.shape[:2], want_mask[:2], strict=True)):
            fail(constants.PYDET_INVALID_SHAPE, f"attention: the mask is {tuple(allowed.shape)}, want {want_mask}")
        torch._check(
            allowed.shape[2:] == want_mask[2:],
            lambda: f"attention: the mask is {tuple(allowed.shape)}, want {want_mask}",
        )
    if bias is not None:
        extents = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if bias.dtype not in DTYPES:
            fail(INVALID_DTYPE, f"attention: bias is {bias.dtype}, want float32, bfloat16 or float16")
        if bias.dim() != 4 or any(x not in (1, y) for x, y in zip(bias.shape, extents, strict=True)):
            fail(constants.PYDET_INVALID_SHAPE, f"attention: bias is {tuple(bias.shape)}, want {extents}, or 1 for any")
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _fake_attention_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    sinks = rest[5]
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    return *gradients, q.new_empty(0, dtype=torch.float32) if sinks is None else torch.empty_like(sinks)


def _vmap_attention(operator: Any) -> Call:
    """The batched dimension becomes a part of the batch."""

    def rule(info: Any, dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        if len(dims) > 7 and dims[7] is not None:
            fail(UNSUPPORTED, "attention: vmap over the sinks is not defined; it is over q, k, v and the mask")

        def joined(x: Tensor, dim: int | None, batch: int) -> Tensor:
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.expand(-1, batch, *x.shape[2:]).flatten(0, 1)

        batch = given[0].shape[1 if dims[0] == 0 else 0]
        four = [None if x is None else joined(x, dim, batch) for x, dim in zip(given[:4], dims[:4], strict=True)]
        rest = list(given[4:])
        if len(given) > 11 and given[11] is not None:
            rest[7] = joined(given[11], dims[11], batch)
        results = operator(*four, *rest)
        return tuple(x.unflatten(0, (info.batch_size, batch)) for x in results), (0, 0)

    return rule


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        allowed: Tensor | None,
        scale: float,
        arithmetic: str,
        kv_chunk: int | None,
        sinks: Tensor | None,
        softcap: float | None,
        causal: bool,
        from_first: bool,
        bias: Tensor | None,
    ) -> Any:
        out, lse = _below(q, k, v, allowed, scale, arithmetic, kv_chunk, sinks, softcap, causal, from_first, bias)
        ctx.save_for_backward(q, k, v, allowed, out, lse, sinks, bias)
        ctx.options, ctx.more = (scale, arithmetic), (softcap, causal, from_first)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Any, ...]:
        q, k, v, allowed, out, lse, sinks, bias = ctx.saved_tensors
        of_rows, (softcap, causal, _) = (dout, q, k, v, allowed, out, lse), ctx.more
        *gradients, dsinks = torch.ops.pydet.attention_backward(*of_rows, *ctx.options, sinks, *ctx.more, bias)
        dbias = None
        if bias is not None and ctx.needs_input_grad[11]:
            dbias = torch.ops.pydet.attention_bias_backward(*of_rows, bias, *ctx.options, softcap, causal)
        return *gradients, None, None, None, None, None if sinks is None else dsinks, None, None, None, dbias


# ---- The operators ---------------------------------------------------------------------------------------------------

_MORE = "Tensor? sinks=None, float? softcap=None, bool causal=False"
_HOW = f"float scale, str arithmetic, int? kv_chunk, {_MORE}, bool from_first=False, Tensor? bias=None"
_below = define(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? allowed, {_HOW}) -> (Tensor, Tensor)",
    _run_attention,
    _fake_attention,
    gradient=_Attention.apply,
    vmap=_vmap_attention,
    autocast=3,
    composite=True,
    first=lambda q, k, v, allowed, scale, arithmetic, kv_chunk, sinks, softcap, causal, from_first, bias: _run_plain(
        q, k, v, allowed, scale, arithmetic, kv_chunk, sinks, softcap, causal, bias
    ),
)
define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? allowed, Tensor out, Tensor lse, "
    f"float scale, str arithmetic, {_MORE}, bool from_first=False, Tensor? bias=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run_attention_backward,
    _fake_attention_backward,
)
define(
    "attention_bias_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? allowed, Tensor out, Tensor lse, "
    "Tensor bias, float scale, str arithmetic, float? softcap=None, bool causal=False) -> Tensor",
    _run_bias_backward,
    lambda dout, q, k, v, allowed, out, lse, bias, scale, arithmetic, softcap, causal: torch.empty_like(
        bias, memory_format=torch.contiguous_format
    ),
)
