"""``attention``: the library's kernels. ``attention_backward``: its products, and steps that are exactly rounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import pydet
from pydet._native import INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, Error, constants, fail
from pydet.hooks import unknown
from pydet.torch.ops import masks
from pydet.torch.ops.products import run_gemm
from pydet.torch.ops.register import DTYPES, Call, Tensor, define

_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}  # of the queries that are computed at a time; decides no bits

# ---- The softmax, for backward ---------------------------------------------------------------------------------------

_LOG2E = float.fromhex("0x1.715476p+0")  # NUMERICS.md's, as are the coefficients of its fine exp2
_EXP2 = tuple(
    float.fromhex(x)
    for x in ("0x1.470b48p-13", "0x1.5f7276p-10", "0x1.3b270ep-7", "0x1.c6ae72p-5", "0x1.ebfbe2p-3", "0x1.62e432p-1")
)


def _exp2_(x: Tensor) -> Tensor:
    """2^x in fp32, in place: each step is one exactly rounded operation on an element, so that an element's bits depend
    on its value alone. Exactly 1 at 0, and exactly 0 below -126.5.

    2^x = 2^n 2^f with n = round(x) and f = x - n, 2^f by a polynomial.
    """
    x.clamp_(-127.0, 127.0)
    n = x.round()
    x.sub_(n)
    p = x * _EXP2[0]
    for coefficient in _EXP2[1:]:
        p.add_(coefficient).mul_(x)
    p.add_(1.0)
    power = n.add_(127.0).to(torch.int32).mul_(1 << 23).view(torch.float32)  # 2^n; 0 for n = -127
    return torch.mul(p, power, out=x)


_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


def _tanh(x: Tensor) -> Tensor:
    """tanh(x) in fp32, of exactly rounded steps as `_exp2_` is: a polynomial below 0.625, from there on
    (1 - e) / (1 + e) with e = exp(-2 |x|)."""
    square = x * x
    small = square * _TANH[0]
    for coefficient in _TANH[1:]:
        small.add_(coefficient).mul_(square)
    small.mul_(x).add_(x)
    size = x.abs()
    e = _exp2_(size * (-2.0 * _LOG2E))
    large = torch.copysign((1.0 - e).div_(e + 1.0), x)
    return torch.where(size < 0.625, small, large)


def _scores_(products: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Products as scores of base 2, in place, and the tanh that is in them."""
    if softcap is None:
        return products.mul_(scale * _LOG2E), None
    tanh = _tanh(products.mul_(scale / softcap))
    return torch.mul(tanh, softcap, out=products).mul_(_LOG2E), tanh


def _weights_(scores: Tensor, allowed: Tensor | None, logs: Tensor) -> Tensor:
    """2^(score - the row's lse in base 2), in place; exactly 0 where not allowed."""
    scores.sub_(logs)
    return _exp2_(scores if allowed is None else scores.masked_fill_(~allowed, float("-inf")))


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _gemm(a: Tensor, b: Tensor, dtype: Any, arithmetic: str) -> Tensor:
    try:
        return run_gemm(a, b, None, dtype, arithmetic, None)
    except Error as problem:
        if problem.status != constants.PYDET_INVALID_STRIDE:
            raise
    return run_gemm(a.contiguous(), b.contiguous(), None, dtype, arithmetic, None)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, H, ...] as [B, G, H / G, ...]."""
    return x.unflatten(1, (groups, x.shape[1] // groups))


def _mask_of(allowed: Tensor | None, groups: int, first: int, last: int) -> Tensor | None:
    """The rows of the mask for a block of queries, to go with scores [B, G, H / G, queries, K]."""
    if allowed is None:
        return None
    rows = allowed[:, :, first:last]
    return rows[:, :, None] if rows.shape[1] == 1 else _by_group(rows, groups)


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
    """Each query a sequence of its own, of the keys from the first to the last that it may see."""
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
        sinks, members = options["sinks"], heads // groups
        for head in range(heads):
            one, of = slice(head, head + 1), slice(head // members, head // members + 1)
            own = options | {"sinks": None if sinks is None else sinks[one]}
            _run_from_first(q[:, one], k[:, of], v[:, of], allowed[:, one], out[:, one], lse[:, one], own)
        return
    # A sequence's keys are one page, that its queries share.
    rows, cache = q.transpose(1, 2).reshape(-1, heads, 1, width), [x.transpose(1, 2) for x in (k, v)]
    pages = torch.arange(batch, dtype=torch.int32, device=q.device).repeat_interleave(queries)[:, None]
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
) -> tuple[Tensor, Tensor]:
    out, lse = _fake_attention(q, k, v, allowed, scale, arithmetic, kv_chunk, sinks, softcap, causal, from_first)
    if out.numel() == 0 or k.shape[2] == 0:
        if sinks is None:
            return out.zero_(), lse.fill_(float("-inf"))
        return out.zero_(), lse.copy_(sinks.detach().float()[:, None].expand_as(lse))
    q, k, v = padded(q.detach(), k.detach(), v.detach())
    sinks = None if sinks is None else sinks.detach().contiguous()
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "arithmetic": arithmetic}
    options["kv_chunk"] = 1024 if kv_chunk is None else kv_chunk
    given = allowed
    if allowed is not None and allowed.shape[1] > 1 and allowed.stride(1) == 0:
        allowed = allowed[:, :1]
    if given is not None and allowed is not None and from_first and allowed.shape[1] == 1 and not _captured(q):
        follow = _behind_each_other(k) and _behind_each_other(v)
        plan = masks.plan_of(given, q.shape[0], causal, follow, options["kv_chunk"])
        if plan is not None:
            return _run_planned(q, k, v, allowed, plan, out, lse, options)
    if allowed is not None and from_first:
        for first, last in _blocks(q, k, q.shape[1]):
            rows = allowed[:, :, first:last]
            if causal:
                rows = rows & _rows_of(q, k, first, last)[0]
            of = slice(None), slice(None), slice(first, last)
            _run_from_first(q[of], k, v, rows, out[of], lse[of], options)
        return out, lse
    y, log = pydet.attention(q, k, v, allowed=allowed, causal=causal, return_lse=True, **options)
    return y[..., : out.shape[-1]].contiguous(), log


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With p = exp(score - lse): dv = p^T dout, ds = scale p (dout v^T - sum(dout out)), dq = ds k, dk = ds^T q; and
    for a sink, whose p is one more of a row's, dsink = -sum(p sum(dout out)). Under a softcap ds takes 1 - tanh^2 too.

    dk and dv sum over the heads of a group, one after the other, and in each over its queries in their order; dsink
    over all queries of its head, sequence after sequence.
    """
    batch, groups, single = q.shape[0], k.shape[1], torch.float32
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=single, device=x.device) for x in (k, v))
    of_sinks = torch.zeros((0,) if sinks is None else lse.shape, dtype=single, device=q.device)
    if out.numel() == 0 or k.shape[2] == 0:
        return dq, dk.to(k.dtype), dv.to(v.dtype), _sum_of_sinks(of_sinks, sinks)
    keys = k.to(single).contiguous()
    ones = torch.ones(v.shape[-1], 1, dtype=single, device=v.device)
    logs = lse.masked_fill(lse == float("-inf"), 0.0).mul_(_LOG2E)  # 0 for a row of no keys
    by_group = [_by_group(x, groups) for x in (dout, q, out, logs, dq)]
    sink = None if sinks is None else (sinks.float() * _LOG2E).view(groups, -1, 1, 1)
    for member in range(q.shape[1] // groups):
        for first, last in _blocks(q, k, groups):
            douts, queries, outs, row_logs, dqs = (x[:, :, member, first:last] for x in by_group)
            mask = _mask_of(allowed, groups, first, last)
            if mask is not None:
                mask = mask[:, :, member if mask.shape[2] > 1 else 0]
            scores, tanh = _scores_(_gemm(queries, k.mT, single, arithmetic), scale, softcap)
            if causal:
                rows = _rows_of(q, k, first, last)[0]
                mask = rows if mask is None else mask & rows
            p = _weights_(scores, mask, row_logs[..., None])
            ds = _gemm(douts, v.mT, single, arithmetic)
            wide = douts.to(single).contiguous()
            delta = _gemm(wide * outs.to(single), ones.expand(batch, groups, -1, -1), None, "ieee")
            ds.sub_(delta)
            if sink is not None:
                _by_group(of_sinks, groups)[:, :, member, first:last] = _exp2_(sink[:, member, :, 0] - row_logs).mul_(
                    delta[..., 0]
                )
            ds.mul_(p).mul_(scale)
            if tanh is not None:
                ds.mul_(1.0 - tanh.mul_(tanh))
            dqs.copy_(_gemm(ds, keys, q.dtype, "ieee"))
            pydet.gemm_db(p, wide, out=dv, accumulate=True, arithmetic="ieee")
            pydet.gemm_db(ds, queries.to(single).contiguous(), out=dk, accumulate=True, arithmetic="ieee")
    return dq, dk.to(k.dtype), dv.to(v.dtype), _sum_of_sinks(of_sinks, sinks)


def _sum_of_sinks(parts: Tensor, sinks: Tensor | None) -> Tensor:
    """The gradient of the sinks, of what each query [B, H, Q] has of it; no elements where there are none."""
    if sinks is None:
        return parts
    rows = parts.transpose(1, 2).reshape(-1, parts.shape[1])
    return pydet.gemm_db(rows.new_full((rows.shape[0], 1), -1.0), rows, out_dtype=sinks.dtype, arithmetic="ieee")[0]


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
        results = operator(*four, *given[4:])
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
    ) -> Any:
        out, lse = _below(q, k, v, allowed, scale, arithmetic, kv_chunk, sinks, softcap, causal, from_first)
        ctx.save_for_backward(q, k, v, allowed, out, lse, sinks)
        ctx.options, ctx.more = (scale, arithmetic), (softcap, causal)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Any, ...]:
        q, k, v, allowed, out, lse, sinks = ctx.saved_tensors
        *gradients, dsinks = torch.ops.pydet.attention_backward(
            dout, q, k, v, allowed, out, lse, *ctx.options, sinks, *ctx.more
        )
        return *gradients, None, None, None, None, None if sinks is None else dsinks, None, None, None


# ---- The operators ---------------------------------------------------------------------------------------------------

_MORE = "Tensor? sinks=None, float? softcap=None, bool causal=False"
_HOW = f"float scale, str arithmetic, int? kv_chunk, {_MORE}, bool from_first=False"
_below = define(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? allowed, {_HOW}) -> (Tensor, Tensor)",
    _run_attention,
    _fake_attention,
    gradient=_Attention.apply,
    vmap=_vmap_attention,
    autocast=3,
    composite=True,
)
define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? allowed, Tensor out, Tensor lse, "
    f"float scale, str arithmetic, {_MORE})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run_attention_backward,
    _fake_attention_backward,
)
