"""``attention_varlen`` and ``attention_paged``: packed sequences, and keys in pages, with their lengths on the device.

Packed sequences have gradients; keys in pages have none.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import pydet
from pydet._native import INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, constants, fail
from pydet.hooks import unknown
from pydet.torch.ops.attention import adjacent, padded
from pydet.torch.ops.register import DTYPES, Call, Tensor, define

_HOW = (
    "float? scale=None, bool causal={causal}, int? window_left=None, int? window_right=None, float? softcap=None, "
    'Tensor? sinks=None, {more}str arithmetic="auto", int kv_chunk=1024'
)
_NO_LSE = float("-inf")
_DENSE = torch.contiguous_format


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _written(ends: Tensor, tokens: int) -> Tensor:
    """[T]: which tokens are in a sequence, whatever the cumulative lengths hold."""
    ends = ends.clamp(0, tokens).long()
    begins = ends[1:] > ends[:-1]
    change = torch.zeros(tokens + 1, dtype=torch.int32, device=ends.device)
    change.index_add_(0, ends[:-1], begins.int()).index_add_(0, ends[1:], -begins.int())
    return change.cumsum(0)[:-1] > 0


def _whole(found: tuple[Tensor, Tensor], ends: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of no sequence have what a query without keys has."""
    out, lse = found
    absent = ~_written(ends, out.shape[0])[:, None]
    return out.masked_fill_(absent[..., None], 0.0), lse.masked_fill_(absent, _NO_LSE)


def _run_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float | None,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    arithmetic: str,
    kv_chunk: int,
) -> tuple[Tensor, Tensor]:
    width = v.shape[-1] if v.dim() == 3 else 0
    if scale is None and q.dim() == 3 and q.shape[-1] % 8:
        scale = 1.0 / math.sqrt(q.shape[-1])  # before zeros
    q, k, v = padded(q, k, v)
    how: dict[str, Any] = {"scale": scale, "causal": causal, "window": (window_left, window_right), "softcap": softcap}
    how |= {"sinks": sinks, "arithmetic": arithmetic, "kv_chunk": kv_chunk, "return_lse": True}
    out, lse = _whole(pydet.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **how), cu_seqlens_q)
    return out[..., :width].contiguous(), lse


def _run_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float | None,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    arithmetic: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens of no sequence have gradients of 0."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    widths = q.shape[-1], v.shape[-1]
    q, k, v = (adjacent(x) for x in padded(q, k, v))
    dout, out = (adjacent(torch.nn.functional.pad(x, (0, v.shape[-1] - x.shape[-1]))) for x in (dout, out))
    how: dict[str, Any] = {"scale": scale, "causal": causal, "window": (window_left, window_right), "softcap": softcap}
    how |= {"sinks": None if sinks is None else sinks.contiguous(), "arithmetic": arithmetic}
    how |= {f"d{name}": torch.zeros_like(x, memory_format=_DENSE) for name, x in (("q", q), ("k", k), ("v", v))}
    ends = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    dq, dk, dv, *dsinks = pydet.attention_varlen_backward(dout, q, k, v, out, lse, *ends, **how)
    dq, dk, dv = (x[..., :n].contiguous() for x, n in zip((dq, dk, dv), (widths[0], *widths), strict=True))
    return dq, dk, dv, dsinks[0] if dsinks else torch.zeros(0, dtype=torch.float32, device=q.device)


def _run_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor | None,
    scale: float | None,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    allowed: Tensor | None,
    bias: Tensor | None,
    first_key: Tensor | None,
    arithmetic: str,
    kv_chunk: int,
) -> tuple[Tensor, Tensor]:
    how: dict[str, Any] = {"scale": scale, "causal": causal, "window": (window_left, window_right), "softcap": softcap}
    how |= {"sinks": sinks, "allowed": allowed, "bias": bias, "first_key": first_key}
    how |= {"arithmetic": arithmetic, "kv_chunk": kv_chunk, "return_lse": True}
    found: tuple[Tensor, Tensor] = pydet.attention_paged(
        q, k_cache, v_cache, block_table, seqlens_k, cu_seqlens_q, **how
    )
    return found if cu_seqlens_q is None else _whole(found, cu_seqlens_q)


# ---- Shapes ----------------------------------------------------------------------------------------------------------


def _shapes(op: str, heads_of_k: int, causes: str, fits: bool, q: Tensor, k: Tensor, v: Tensor) -> None:
    tensors = {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            fail(INVALID_DTYPE, f"{op}: {name} is {x.dtype}, want float32, bfloat16 or float16, the same of all")
    got = ", ".join(f"{name} is {tuple(x.shape)}" for name, x in tensors.items())
    if not fits:
        fail(constants.PYDET_INVALID_SHAPE, f"{op}: {got}, want {causes}")
    heads, groups = q.shape[1], k.shape[heads_of_k]
    torch._check(
        k.shape[:-1] == v.shape[:-1] and q.shape[-1] == k.shape[-1] and groups > 0 and heads % groups == 0,
        lambda: f"{op}: {got}, want {causes}, H a multiple of G",
    )


def _integers(op: str, ndims: int, **given: Tensor | None) -> None:
    for name, x in given.items():
        if x is None:
            continue
        if x.dtype != torch.int32:
            fail(INVALID_DTYPE, f"{op}: {name} is {x.dtype}, want int32")
        if x.dim() != ndims:
            fail(constants.PYDET_INVALID_SHAPE, f"{op}: {name} has {x.dim()} dimensions, want {ndims}")


def _options(op: str, arithmetic: str, kv_chunk: int) -> None:
    unknown(arithmetic, op, "arithmetic")
    if kv_chunk <= 0 or kv_chunk % 128:
        fail(INVALID_VALUE, f"{op}: kv_chunk is {kv_chunk}, want a positive multiple of 128")


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)


def _fake_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    op, causes = "attention_varlen", "q TxHxD, k UxGxD, v UxGxE"
    _shapes(op, 1, causes, q.dim() == k.dim() == v.dim() == 3, q, k, v)
    _integers(op, 1, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    torch._check(
        cu_seqlens_q.shape == cu_seqlens_k.shape and cu_seqlens_q.shape[0] > 0,
        lambda: (
            f"{op}: cu_seqlens_q is {tuple(cu_seqlens_q.shape)}, cu_seqlens_k is {tuple(cu_seqlens_k.shape)}, want "
            "one number more than there are sequences in both"
        ),
    )
    _options(op, *options[-2:])
    return _results(q, v)


def _fake_varlen_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    sinks = rest[9]
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    return *gradients, q.new_empty(0, dtype=torch.float32) if sinks is None else torch.empty_like(sinks)


def _fake_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    op, packed = "attention_paged", cu_seqlens_q is not None
    causes = "q TxHxD, since cu_seqlens_q is given, k and v PxSxGxD" if packed else "q BxHxQxD, k and v PxSxGxD"
    fits = q.dim() == (3 if packed else 4) and k_cache.dim() == v_cache.dim() == 4
    _shapes(op, 2, causes, fits, q, k_cache, v_cache)
    _integers(op, 1, seqlens_k=seqlens_k, cu_seqlens_q=cu_seqlens_q, first_key=options[-3])
    _integers(op, 2, block_table=block_table)
    sequences = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    torch._check(
        block_table.shape[0] == sequences and seqlens_k.shape[0] == sequences,
        lambda: (
            f"{op}: block_table is {tuple(block_table.shape)}, seqlens_k is {tuple(seqlens_k.shape)}, want "
            f"{sequences} sequences in both"
        ),
    )
    _options(op, *options[-2:])
    return _results(q, v_cache)


# ---- The operators ---------------------------------------------------------------------------------------------------


def _no_vmap(operator: Any) -> Call:
    def rule(*_: Any) -> Any:
        name = operator.__name__
        fail(UNSUPPORTED, f"{name}: vmap is not defined; put the sequences of all into one call")

    return rule


def _no_gradient(name: str) -> Call:
    def refuse(*_: Any) -> Any:
        fail(
            UNSUPPORTED,
            f"{name}: an operand requires grad, and keys in pages have no gradient; use torch.no_grad() or .detach(), "
            "or attention_varlen of packed keys",
        )

    return refuse


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *how: Any
    ) -> Any:
        out, lse = _varlen_below(q, k, v, cu_seqlens_q, cu_seqlens_k, *how)
        *ctx.how, sinks, ctx.arithmetic, _ = how
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, sinks)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Any, ...]:
        *saved, sinks = ctx.saved_tensors
        gradient = torch.ops.pydet.attention_varlen_backward
        dq, dk, dv, dsinks = gradient(dout, *saved, *ctx.how, sinks, ctx.arithmetic)
        return dq, dk, dv, *[None] * 7, None if sinks is None else dsinks, None, None


_varlen_below = define(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    f"{_HOW.format(causal=False, more='')}) -> (Tensor, Tensor)",
    _run_varlen,
    _fake_varlen,
    gradient=_Varlen.apply,
    vmap=_no_vmap,
    autocast=3,
    composite=True,
)
define(
    "attention_varlen_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, float? scale=None, bool causal=False, int? window_left=None, int? window_right=None, "
    'float? softcap=None, Tensor? sinks=None, str arithmetic="auto") -> (Tensor, Tensor, Tensor, Tensor)',
    _run_varlen_backward,
    _fake_varlen_backward,
)
_MORE = "Tensor? allowed=None, Tensor? bias=None, Tensor? first_key=None, "
define(
    "attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seqlens_k, "
    f"Tensor? cu_seqlens_q=None, {_HOW.format(causal=True, more=_MORE)}) -> (Tensor, Tensor)",
    _run_paged,
    _fake_paged,
    gradient=_no_gradient("attention_paged"),
    vmap=_no_vmap,
    autocast=1,  # a cache is not converted at each call
    composite=True,
)
