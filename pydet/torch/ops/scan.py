"""``selective_scan``, ``gated_delta`` and ``causal_conv1d``."""

from __future__ import annotations

from typing import Any

import torch

from pydet._native import INVALID_DTYPE, constants, fail
from pydet.ops.scan import _causal_conv1d, _gated_delta, _selective_scan
from pydet.shapes import text
from pydet.torch.ops.register import DTYPES, Tensor, define
from pydet.torch.ops.tracing import TRACED, operands

# ---- Shapes, for tracing ---------------------------------------------------------------------------------------------


def _want(op: str, name: str, x: Tensor | None, shape: tuple[Any, ...], dtype: torch.dtype | None = None) -> None:
    if x is None:
        return
    got = tuple(x.shape)
    if len(got) != len(shape):
        fail(constants.PYDET_INVALID_SHAPE, f"{op}: {name} is {text(got)}, want {text(shape)}")
    for have, want in zip(got, shape, strict=True):
        TRACED.require(have == want, lambda: f"{op}: {name} is {text(got)}, want {text(shape)}")
    if x.dtype not in ((dtype,) if dtype else DTYPES):
        wanted = "float32" if dtype else "float32, bfloat16 or float16"
        fail(INVALID_DTYPE, f"{op}: {name} is {str(x.dtype).removeprefix('torch.')}, want {wanted}")


def _sequences(op: str, x: Tensor, cu_seqlens: Tensor | None) -> Any:
    if cu_seqlens is None:
        return x.shape[0]
    TRACED.require(x.shape[0] == 1, lambda: f"{op}: cu_seqlens is given, want a batch of 1")
    return cu_seqlens.shape[0] - 1


def _rank(op: str, name: str, x: Tensor, ndim: int) -> None:
    if x.dim() != ndim:
        fail(constants.PYDET_INVALID_SHAPE, f"{op}: {name} is {text(tuple(x.shape))}, want {ndim} dimensions")


def _fake_selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    op = "selective_scan"
    operands(op, x=x, dt=dt, a=a, b=b, c=c, d=d, initial=initial, cu_seqlens=cu_seqlens)
    _rank(op, "x", x, 4)
    _rank(op, "b", b, 4)
    heads, width, states = x.shape[2], x.shape[3], b.shape[3]
    _want(op, "dt", dt, tuple(x.shape[:3]))
    _want(op, "b", b, (*x.shape[:2], b.shape[2], states))
    _want(op, "c", c, tuple(b.shape))
    _want(op, "a", a, (heads, states) if a.dim() == 2 else (heads,), torch.float32)
    _want(op, "d", d, (heads,), torch.float32)
    of_states = (_sequences(op, x, cu_seqlens), heads, width, states)
    _want(op, "initial", initial, of_states, torch.float32)
    return x.new_empty(x.shape), x.new_empty(of_states, dtype=torch.float32)


def _fake_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    op = "gated_delta"
    operands(op, q=q, k=k, v=v, g=g, beta=beta, initial=initial, cu_seqlens=cu_seqlens)
    _rank(op, "v", v, 4)
    _rank(op, "k", k, 4)
    heads, width, keys = v.shape[2], v.shape[3], k.shape[3]
    _want(op, "k", k, (*v.shape[:2], k.shape[2], keys))
    _want(op, "q", q, tuple(k.shape))
    _want(op, "g", g, tuple(v.shape[:3]))
    _want(op, "beta", beta, tuple(v.shape[:3]))
    of_states = (_sequences(op, v, cu_seqlens), heads, keys, width)
    _want(op, "initial", initial, of_states, torch.float32)
    return v.new_empty(v.shape), v.new_empty(of_states, dtype=torch.float32)


def _fake_causal_conv1d(
    x: Tensor, w: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    op = "causal_conv1d"
    operands(op, x=x, w=w, bias=bias, initial=initial, cu_seqlens=cu_seqlens)
    _rank(op, "x", x, 3)
    _rank(op, "w", w, 2)
    channels, taps = x.shape[2], w.shape[1]
    _want(op, "w", w, (channels, taps))
    _want(op, "bias", bias, (channels,))
    _want(op, "initial", initial, (_sequences(op, x, cu_seqlens), taps - 1, channels))
    return x.new_empty(x.shape)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _run_selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    given = {"initial": initial, "cu_seqlens": cu_seqlens, "state": True}
    made: tuple[Tensor, Tensor] = _selective_scan(x, dt, a, b, c, d, **given)
    return made


def _run_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    given = {"initial": initial, "cu_seqlens": cu_seqlens, "state": True}
    made: tuple[Tensor, Tensor] = _gated_delta(q, k, v, g, beta, **given)
    return made


def _run_causal_conv1d(
    x: Tensor, w: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    made: Tensor = _causal_conv1d(x, w, bias, initial=initial, cu_seqlens=cu_seqlens)
    return made


# ---- The operators ---------------------------------------------------------------------------------------------------

define(
    "selective_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d=None, Tensor? initial=None,"
    " Tensor? cu_seqlens=None) -> (Tensor, Tensor)",
    _run_selective_scan,
    _fake_selective_scan,
)
define(
    "gated_delta(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial=None, Tensor? cu_seqlens=None)"
    " -> (Tensor, Tensor)",
    _run_gated_delta,
    _fake_gated_delta,
)
define(
    "causal_conv1d(Tensor x, Tensor w, Tensor? bias=None, Tensor? initial=None, Tensor? cu_seqlens=None) -> Tensor",
    _run_causal_conv1d,
    _fake_causal_conv1d,
)
