"""``attention`` and ``attention_backward``: pydet's products, and steps that are exactly rounded on every device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import pydet
from pydet._native import INVALID_DTYPE, INVALID_VALUE, Error, constants, fail
from pydet.torch.ops.products import run_gemm
from pydet.torch.ops.register import DTYPES, Tensor, define

_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}  # that are held at a time, in elements; decides no bits

# ---- The softmax -----------------------------------------------------------------------------------------------------

_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def _exp_(x: Tensor) -> Tensor:
    """exp(x) for x <= 0 in fp32, in place: each step is one exactly rounded operation on an element, so that an
    element's bits depend on its value alone. Exactly 1 at 0, and exactly 0 below -87.7.

    exp(x) = 2^n exp(r) with n = round(x / ln 2) and r = x - n ln 2, ln 2 in two parts, exp(r) by a polynomial.
    """
    x.clamp_(min=-88.0)
    n = (x * _LOG2E).round_()
    step = n * _LN2_HIGH
    x.sub_(step)
    torch.mul(n, _LN2_LOW, out=step)
    x.sub_(step)
    p = torch.mul(x, _EXP[0], out=step)
    for coefficient in _EXP[1:-1]:
        p.add_(coefficient).mul_(x)
    p.add_(_EXP[-1]).mul_(x).mul_(x).add_(x).add_(1.0)
    power = n.add_(127.0).to(torch.int32).mul_(1 << 23).view(torch.float32)  # 2^n; 0 for n = -127
    return torch.mul(p, power, out=x)


_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


def _tanh(x: Tensor) -> Tensor:
    """tanh(x) in fp32, of exactly rounded steps as `_exp_` is: a polynomial below 0.625, from there on
    (1 - e) / (1 + e) with e = exp(-2 |x|)."""
    square = x * x
    small = square * _TANH[0]
    for coefficient in _TANH[1:]:
        small.add_(coefficient).mul_(square)
    small.mul_(x).add_(x)
    size = x.abs()
    e = _exp_(size * -2.0)
    large = torch.copysign((1.0 - e).div_(e + 1.0), x)
    return torch.where(size < 0.625, small, large)


def _scores_(products: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Products as scores, in place, and the tanh that is in them. A factor of 1 / softcap, since a GPU divides by a
    number of Python's as a product with its reciprocal."""
    products.mul_(scale)
    if softcap is None:
        return products, None
    tanh = _tanh(products.mul_(1.0 / softcap))
    return torch.mul(tanh, softcap, out=products), tanh


def _weights_(scores: Tensor, allowed: Tensor | None, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """exp(score - the largest of its row), in place; exactly 0 where not allowed. Not divided by their sum. And that of
    the sink's score, of which each row has one."""
    if allowed is not None:
        scores.masked_fill_(~allowed, float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    if sink is not None:
        largest = torch.maximum(largest, sink)
    largest.masked_fill_(largest == float("-inf"), 0.0)  # a row of no keys
    return _exp_(scores.sub_(largest)), None if sink is None else _exp_(sink - largest)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _gemm(a: Tensor, b: Tensor, dtype: Any, arithmetic: str, k_chunk: int | None = None) -> Tensor:
    try:
        return run_gemm(a, b, None, dtype, arithmetic, k_chunk)
    except Error as problem:
        if problem.status != constants.PYDET_INVALID_STRIDE:
            raise
    return run_gemm(a.contiguous(), b.contiguous(), None, dtype, arithmetic, k_chunk)


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


def _with_ones(v: Tensor) -> Tensor:
    """v in fp32, then a column of ones, whose product with weights is their sum, and zeros up to a multiple of 4."""
    width = v.shape[-1]
    wide = torch.zeros(*v.shape[:-1], (width + 4) // 4 * 4, dtype=torch.float32, device=v.device)
    wide[..., :width] = v
    wide[..., width] = 1.0
    return wide


def _run_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    scale: float,
    arithmetic: str,
    k_chunk: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    (batch, heads, _, _), groups, out_width = q.shape, k.shape[1], v.shape[-1]
    out, total = _fake_attention(q, k, v, allowed, scale, arithmetic, k_chunk, sinks, softcap)
    if out.numel() == 0 or k.shape[2] == 0:
        return out.zero_(), total.fill_(1.0)
    values, keys = _with_ones(v), k.mT
    sink = None if sinks is None else sinks.float().view(groups, -1, 1, 1)
    for first, last in _blocks(q, k, heads):
        rows = _by_group(q[:, :, first:last], groups).flatten(2, 3)
        scores, _ = _scores_(_gemm(rows, keys, torch.float32, arithmetic, k_chunk), scale, softcap)
        shape = (batch, groups, heads // groups, last - first, k.shape[2])
        weights, of_sink = _weights_(scores.view(shape), _mask_of(allowed, groups, first, last), sink)
        sums = _gemm(weights.view(scores.shape), values, None, "ieee").view(batch, heads, last - first, -1)
        divisor = sums[..., out_width : out_width + 1]
        if of_sink is not None:
            divisor.add_(of_sink.view(divisor.shape))
        divisor.masked_fill_(divisor == 0.0, 1.0)
        total[:, :, first:last] = divisor[..., 0]
        out[:, :, first:last] = sums[..., :out_width] / divisor
    return out, total


def _run_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    out: Tensor,
    total: Tensor,
    scale: float,
    arithmetic: str,
    k_chunk: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With p = weights / total: dv = p^T dout, ds = scale p (dout v^T - sum(dout out)), dq = ds k, dk = ds^T q; and for
    a sink, whose p is one more of a row's, dsink = -sum(p sum(dout out)). Under a softcap ds takes 1 - tanh^2 too.

    dk and dv sum over the heads of a group, one after the other, and in each over its queries in their order; dsink
    over all queries of its head, sequence after sequence.
    """
    batch, groups, single = q.shape[0], k.shape[1], torch.float32
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=single, device=x.device) for x in (k, v))
    of_sinks = torch.zeros((0,) if sinks is None else total.shape, dtype=single, device=q.device)
    if out.numel() == 0 or k.shape[2] == 0:
        return dq, dk.to(k.dtype), dv.to(v.dtype), _sum_of_sinks(of_sinks, sinks)
    keys = k.to(single).contiguous()
    ones = torch.ones(v.shape[-1], 1, dtype=single, device=v.device)
    by_group = [_by_group(x, groups) for x in (dout, q, out, total, dq)]
    sink = None if sinks is None else sinks.float().view(groups, -1, 1, 1)
    for member in range(q.shape[1] // groups):
        for first, last in _blocks(q, k, groups):
            douts, queries, outs, totals, dqs = (x[:, :, member, first:last] for x in by_group)
            mask = _mask_of(allowed, groups, first, last)
            if mask is not None:
                mask = mask[:, :, member if mask.shape[2] > 1 else 0]
            scores, tanh = _scores_(_gemm(queries, k.mT, single, arithmetic, k_chunk), scale, softcap)
            p, of_sink = _weights_(scores, mask, None if sink is None else sink[:, member])
            p.div_(totals[..., None])
            ds = _gemm(douts, v.mT, single, arithmetic, k_chunk)
            wide = douts.to(single).contiguous()
            delta = _gemm(wide * outs.to(single), ones.expand(batch, groups, -1, -1), None, "ieee")
            ds.sub_(delta)
            if of_sink is not None:
                _by_group(of_sinks, groups)[:, :, member, first:last] = (of_sink[..., 0] / totals).mul_(delta[..., 0])
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
    k_chunk: int | None,
    sinks: Tensor | None,
    softcap: float | None,
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
    sinks = rest[6]
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    return *gradients, q.new_empty(0, dtype=torch.float32) if sinks is None else torch.empty_like(sinks)


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
        k_chunk: int | None,
        sinks: Tensor | None,
        softcap: float | None,
    ) -> Any:
        ctx.options = scale, arithmetic, k_chunk
        out, total = _below(q, k, v, allowed, *ctx.options, sinks, softcap)
        ctx.save_for_backward(q, k, v, allowed, out, total, sinks)
        ctx.softcap = softcap
        ctx.mark_non_differentiable(total)
        return out, total

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Any, ...]:
        q, k, v, allowed, out, total, sinks = ctx.saved_tensors
        *gradients, dsinks = torch.ops.pydet.attention_backward(
            dout, q, k, v, allowed, out, total, *ctx.options, sinks, ctx.softcap
        )
        return *gradients, None, None, None, None, None if sinks is None else dsinks, None


# ---- The operators ---------------------------------------------------------------------------------------------------

_HOW = "float scale, str arithmetic, int? k_chunk, Tensor? sinks=None, float? softcap=None"
_below = define(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? allowed, {_HOW}) -> (Tensor, Tensor)",
    _run_attention,
    _fake_attention,
    gradient=_Attention.apply,
    autocast=3,
    composite=True,
)
define(
    f"attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? allowed, Tensor out, Tensor total, {_HOW})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run_attention_backward,
    _fake_attention_backward,
)
