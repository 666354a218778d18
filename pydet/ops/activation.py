"""Activations, alone or as the gate of another factor, and their gradients."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydet._native import INVALID_VALUE, fail
from pydet.hooks import methods, on_stream
from pydet.ops.types import Stream, Tensor

Kind: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "tanh", "softplus", "exp"]
Approximate: TypeAlias = Literal["none", "tanh"]

_activation, _activation_backward = methods(("activation", "activation_backward"))


def activation(
    x: Tensor,
    kind: Kind = "silu",
    *,
    up: Tensor | None = None,
    out: Tensor | None = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """A function of each element: ``y = f(x)``, or as the gate of another factor ``y = f(x) up``.

    In fp32 by formulas of exactly rounded steps (NUMERICS.md, "Activations"), so an element has the same bits on every
    backend, at every place of any tensor. It is rounded once; with ``up`` ``f(x)`` is, and the product: the bits of the
    two steps.

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16; elements of a row adjacent.
        kind: ``"silu"``: x / (1 + e^-x). ``"gelu"``: x P(a normal number is below x); ``"gelu_tanh"``: what
            approximates it by tanh; ``"quick_gelu"``: x / (1 + e^(-1.702 x)). ``"sigmoid"``, ``"tanh"``,
            ``"softplus"``: log(1 + e^x), ``"exp"``.
        up: like ``x``.
        out: like ``x``; made if None. It may be ``x`` or ``up`` itself.
        kernel, stream: as in :func:`gemm`.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    method = _activation if stream is None else on_stream(_activation, x, stream)
    return method(x, up=up, out=out, kind=kind, kernel=kernel)  # type: ignore[no-any-return]


def activation_backward(
    dy: Tensor,
    x: Tensor,
    kind: Kind = "silu",
    *,
    up: Tensor | None = None,
    out: Tensor | None = None,
    dup: Tensor | None = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gradient of :func:`activation`: ``dx = dy f'(x)``; with ``up``, ``dx = (dy up) f'(x)`` and ``dup = dy f(x)``.

    Args:
        dy, x: ``[..., N]``, of one type.
        kind, up: as in :func:`activation`.
        out, dup: like ``x``; made if None. Each may be ``dy``, ``x`` or ``up`` itself.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``dx``; with ``up``, ``(dx, dup)``.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit; a ``dup`` without ``up``.
    """
    method = _activation_backward if stream is None else on_stream(_activation_backward, dy, stream)
    both = up is not None
    dx, other = method(dy, x, up=up, dx=out, dup=dup, wants_dx=True, wants_dup=both, kind=kind, kernel=kernel)
    return (dx, other) if both else dx


def silu(x: Tensor, *, out: Tensor | None = None, stream: Stream | None = None) -> Tensor:
    """``x / (1 + e^-x)``: :func:`activation` of kind ``"silu"``."""
    return activation(x, "silu", out=out, stream=stream)


def gelu(
    x: Tensor, approximate: Approximate = "none", *, out: Tensor | None = None, stream: Stream | None = None
) -> Tensor:
    """``x`` times the probability that a normal number is below it: :func:`activation` of kind ``"gelu"``, or with
    ``approximate="tanh"`` of ``"gelu_tanh"``."""
    return activation(x, gelu_kind("gelu", approximate), out=out, stream=stream)


def sigmoid(x: Tensor, *, out: Tensor | None = None, stream: Stream | None = None) -> Tensor:
    """``1 / (1 + e^-x)``: :func:`activation` of kind ``"sigmoid"``."""
    return activation(x, "sigmoid", out=out, stream=stream)


def softplus(x: Tensor, *, out: Tensor | None = None, stream: Stream | None = None) -> Tensor:
    """``log(1 + e^x)``: :func:`activation` of kind ``"softplus"``."""
    return activation(x, "softplus", out=out, stream=stream)


def swiglu(gate: Tensor, up: Tensor, *, out: Tensor | None = None, stream: Stream | None = None) -> Tensor:
    """``silu(gate) up``: :func:`activation` of kind ``"silu"``. Both may be halves of one tensor's rows."""
    return activation(gate, "silu", up=up, out=out, stream=stream)


def geglu(
    gate: Tensor,
    up: Tensor,
    approximate: Approximate = "none",
    *,
    out: Tensor | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """``gelu(gate) up``: :func:`activation` of kind ``"gelu"`` or, with ``approximate="tanh"``, ``"gelu_tanh"``."""
    return activation(gate, gelu_kind("geglu", approximate), up=up, out=out, stream=stream)


def gelu_kind(op: str, approximate: str) -> Kind:
    """The kind of a GELU in PyTorch's words."""
    if approximate == "none":
        return "gelu"
    if approximate == "tanh":
        return "gelu_tanh"
    fail(INVALID_VALUE, f"{op}: approximate is {approximate!r}, want 'none' or 'tanh'")
