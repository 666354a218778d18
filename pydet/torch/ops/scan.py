"""``selective_scan``, ``gated_delta`` and ``causal_conv1d``."""

from __future__ import annotations

from typing import Any

import torch

from pydet._native import INVALID_DTYPE, constants, fail
from pydet.ops.scan import (
    _causal_conv1d,
    _causal_conv1d_backward,
    _gated_delta,
    _gated_delta_backward,
    _selective_scan,
    _selective_scan_backward,
)
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


# ---- Gradients -------------------------------------------------------------------------------------------------------


def _none(x: Tensor) -> Tensor:
    """For a result that is not there."""
    return x.new_empty((0,), dtype=torch.float32)


def _given(x: Tensor, wanted: bool) -> Tensor | None:
    return x if wanted else None


def _fake_selective_scan_backward(
    dy: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    dfinal: Tensor | None,
    return_initial: bool,
) -> tuple[Tensor, ...]:
    op = "selective_scan_backward"
    operands(op, dy=dy, x=x, dt=dt, a=a, b=b, c=c, d=d, initial=initial, cu_seqlens=cu_seqlens, dfinal=dfinal)
    _, final = _fake_selective_scan(x, dt, a, b, c, d, initial, cu_seqlens)
    _want(op, "dy", dy, tuple(x.shape), x.dtype)
    _want(op, "dfinal", dfinal, tuple(final.shape), torch.float32)
    like = [y.new_empty(y.shape) for y in (x, dt, b, c)]
    da = a.new_empty((final.shape[0], *a.shape))
    dd = _none(x) if d is None else d.new_empty((final.shape[0], *d.shape))
    return like[0], like[1], da, like[2], like[3], dd, final if return_initial else _none(x)


def _fake_gated_delta_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    dfinal: Tensor | None,
    return_initial: bool,
) -> tuple[Tensor, ...]:
    op = "gated_delta_backward"
    operands(op, dout=dout, q=q, k=k, v=v, g=g, beta=beta, initial=initial, cu_seqlens=cu_seqlens, dfinal=dfinal)
    _, final = _fake_gated_delta(q, k, v, g, beta, initial, cu_seqlens)
    _want(op, "dout", dout, tuple(v.shape), v.dtype)
    _want(op, "dfinal", dfinal, tuple(final.shape), torch.float32)
    like = [y.new_empty(y.shape) for y in (q, k, v, g, beta)]
    return *like, final if return_initial else _none(v)


def _fake_causal_conv1d_backward(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    bias: bool,
    return_initial: bool,
) -> tuple[Tensor, ...]:
    op = "causal_conv1d_backward"
    operands(op, dy=dy, x=x, w=w, initial=initial, cu_seqlens=cu_seqlens)
    _fake_causal_conv1d(x, w, None, initial, cu_seqlens)
    _want(op, "dy", dy, tuple(x.shape), x.dtype)
    count, (channels, taps) = _sequences(op, x, cu_seqlens), w.shape
    dw = x.new_empty((count, channels, taps), dtype=torch.float32)
    dbias = x.new_empty((count, channels), dtype=torch.float32) if bias else _none(x)
    dinitial = x.new_empty((count, taps - 1, channels)) if return_initial else _none(x)
    return x.new_empty(x.shape), dw, dbias, dinitial


def _run_selective_scan_backward(
    dy: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    dfinal: Tensor | None,
    return_initial: bool,
) -> tuple[Tensor, ...]:
    given = {"initial": initial, "cu_seqlens": cu_seqlens, "dfinal": dfinal, "into_initial": return_initial}
    made = _selective_scan_backward(dy, x, dt, a, b, c, d, **given)
    return tuple(_none(x) if y is None else y for y in made)


def _run_gated_delta_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    dfinal: Tensor | None,
    return_initial: bool,
) -> tuple[Tensor, ...]:
    given = {"initial": initial, "cu_seqlens": cu_seqlens, "dfinal": dfinal, "into_initial": return_initial}
    made = _gated_delta_backward(dout, q, k, v, g, beta, **given)
    return tuple(_none(v) if y is None else y for y in made)


def _run_causal_conv1d_backward(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    bias: bool,
    return_initial: bool,
) -> tuple[Tensor, ...]:
    given = {"initial": initial, "cu_seqlens": cu_seqlens, "bias": bias, "into_initial": return_initial}
    made = _causal_conv1d_backward(dy, x, w, **given)
    return tuple(_none(x) if y is None else y for y in made)


def over_sequences(parts: Tensor) -> Tensor:
    """The sums of sequences, added in their order: a chain in ``ieee``."""
    count = parts.shape[0]
    if count == 1:
        return parts[0]
    row: Tensor = torch.ops.pydet.gemm(parts.new_ones((1, count)), parts.reshape(count, -1), None, None, "ieee", None)
    return row.view(parts.shape[1:])


class _SelectiveScan(torch.autograd.Function):
    """``a`` and ``d`` may have a dimension more, of sequences that all have the same: so their gradients then are."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        initial: Tensor | None,
        cu_seqlens: Tensor | None,
        apart: bool = False,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.apart = apart
        if apart:
            a, d = a[0], None if d is None else d[0]
        ctx.save_for_backward(x, dt, a, b, c, d, initial, cu_seqlens)
        made: tuple[Tensor, Tensor] = _below_selective_scan(x, dt, a, b, c, d, initial, cu_seqlens)
        return made

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        x, dt, a, b, c, d, initial, starts = ctx.saved_tensors
        dy = torch.zeros_like(x) if dy is None else dy
        first, wanted = ctx.needs_input_grad[6], (dfinal, ctx.needs_input_grad[6])
        made = torch.ops.pydet.selective_scan_backward(dy, x, dt, a, b, c, d, initial, starts, *wanted)
        dx, ddt, da, db, dc, dd, dinitial = made
        if not ctx.apart:
            da, dd = over_sequences(da), None if d is None else over_sequences(dd)
        return dx, ddt, da, db, dc, _given(dd, d is not None), _given(dinitial, first), None, None


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, initial, cu_seqlens)
        made: tuple[Tensor, Tensor] = _below_gated_delta(q, k, v, g, beta, initial, cu_seqlens)
        return made

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        q, k, v, g, beta, initial, starts = ctx.saved_tensors
        dout, first = torch.zeros_like(v) if dout is None else dout, ctx.needs_input_grad[5]
        made = torch.ops.pydet.gated_delta_backward(dout, q, k, v, g, beta, initial, starts, dfinal, first)
        *gradients, dinitial = made
        return *gradients, _given(dinitial, first), None


class _CausalConv1d(torch.autograd.Function):
    """``w`` and ``bias`` may have a dimension more, as of :class:`_SelectiveScan`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        initial: Tensor | None,
        cu_seqlens: Tensor | None,
        apart: bool = False,
    ) -> Tensor:
        ctx.apart, ctx.types = apart, (w.dtype, None if bias is None else bias.dtype)
        if apart:
            w, bias = w[0], None if bias is None else bias[0]
        ctx.save_for_backward(x, w, initial, cu_seqlens)
        made: Tensor = _below_causal_conv1d(x, w, bias, initial, cu_seqlens)
        return made

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w, initial, starts = ctx.saved_tensors
        of_w, of_bias = ctx.types
        first = ctx.needs_input_grad[3]
        made = torch.ops.pydet.causal_conv1d_backward(dy, x, w, initial, starts, of_bias is not None, first)
        dx, dw, dbias, dinitial = made
        if not ctx.apart:
            dw, dbias = over_sequences(dw), dbias if of_bias is None else over_sequences(dbias)
        dbias = None if of_bias is None else dbias.to(of_bias)
        return dx, dw.to(of_w), dbias, _given(dinitial, first), None, None


def selective_scan_apart(*operands: Any) -> tuple[Tensor, Tensor]:
    """The operator, of ``a`` and ``d`` ``[sequences, ...]``, whose gradients autograd takes from there on."""
    made: tuple[Tensor, Tensor] = _SelectiveScan.apply(*operands, True)
    return made


def causal_conv1d_apart(*operands: Any) -> Tensor:
    """Likewise of ``w`` and ``bias``."""
    made: Tensor = _CausalConv1d.apply(*operands, True)
    return made


# ---- The operators ---------------------------------------------------------------------------------------------------

_below_selective_scan = define(
    "selective_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d=None, Tensor? initial=None,"
    " Tensor? cu_seqlens=None) -> (Tensor, Tensor)",
    _run_selective_scan,
    _fake_selective_scan,
    gradient=_SelectiveScan.apply,
)
_below_gated_delta = define(
    "gated_delta(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial=None, Tensor? cu_seqlens=None)"
    " -> (Tensor, Tensor)",
    _run_gated_delta,
    _fake_gated_delta,
    gradient=_GatedDelta.apply,
)
_below_causal_conv1d = define(
    "causal_conv1d(Tensor x, Tensor w, Tensor? bias=None, Tensor? initial=None, Tensor? cu_seqlens=None) -> Tensor",
    _run_causal_conv1d,
    _fake_causal_conv1d,
    gradient=_CausalConv1d.apply,
)
define(
    "selective_scan_backward(Tensor dy, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d=None,"
    " Tensor? initial=None, Tensor? cu_seqlens=None, Tensor? dfinal=None, bool return_initial=False)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_selective_scan_backward,
    _fake_selective_scan_backward,
)
define(
    "gated_delta_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial=None,"
    " Tensor? cu_seqlens=None, Tensor? dfinal=None, bool return_initial=False)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_gated_delta_backward,
    _fake_gated_delta_backward,
)
define(
    "causal_conv1d_backward(Tensor dy, Tensor x, Tensor w, Tensor? initial=None, Tensor? cu_seqlens=None,"
    " bool bias=False, bool return_initial=False) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_causal_conv1d_backward,
    _fake_causal_conv1d_backward,
)
