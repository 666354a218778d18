"""Activations, alone or as the gate of another factor, with gradients, under the names of jax.nn."""

from __future__ import annotations

import functools
from typing import Any

import jax

from pydet._native import fail
from pydet.hooks import unknown
from pydet.jax.calls import (
    INVALID_SHAPE,
    Array,
    call_handler,
    compiled,
    kernel_name,
    operands_of,
    program,
    static,
    to_array,
)
from pydet.ops.activation import Kind
from pydet.shapes import RULES, text


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _activate(x: Array, up: Array | None, kind: int, kernel: str) -> Array:
    operands = [x] if up is None else [x, up]
    return call_handler(
        "activation", _like(x), operands, {}, {"kind": kind, "has_up": up is not None, "kernel": kernel}
    )


def _activate_forward(x: Array, up: Array | None, kind: int, kernel: str) -> tuple[Array, Any]:
    return _activate(x, up, kind, kernel), (x, up)


def _activate_backward(kind: int, kernel: str, saved: Any, dy: Array) -> tuple[Array, Array | None]:
    x, up = saved
    operands = [dy, x] if up is None else [dy, x, up]
    results = (_like(x),) if up is None else (_like(x), _like(x))
    attributes = {"kind": kind, "has_up": up is not None, "kernel": ""}
    dx, *dup = call_handler("activation_backward", results, operands, {}, attributes)
    return dx, dup[0] if dup else None


_activate.defvjp(_activate_forward, _activate_backward)
_run_activation = compiled(2, 3)(_activate)


def _activation(op: str, x: Any, up: Any, kind: str, kernel: str | None, gate: str = "x") -> Array:
    number = unknown(static(op, "kind", kind, str, "a name"), op, "kind")
    x = to_array(op, gate, x)
    if up is not None:
        up = to_array(op, "up", up)
        first, other = operands_of((gate, x), ("up", up))
        RULES.same_type(op, first, other)
        if up.shape != x.shape:
            fail(INVALID_SHAPE, f"{op}: up is {text(up.shape)}, want {text(x.shape)}")
    return _run_activation(x, up, number, kernel_name(op, kernel))


@program
def activation(x: Array, kind: Kind = "silu", *, up: Array | None = None, kernel: str | None = None) -> Array:
    """A function of each element, ``f(x)``, or as a gate ``f(x) up``: :func:`pydet.activation` with a gradient.

    An element has the same bits at every place of any array, alone and in a batch.

    Args:
        x: of any shape.
        kind: as in :func:`pydet.activation`.
        up: like ``x``, or None.
        kernel: as in :func:`gemm`.
    """
    return _activation("activation", x, up, kind, kernel)


@program
def silu(x: Array) -> Array:
    """``x / (1 + e^-x)``, as ``jax.nn.silu``: :func:`activation` of kind ``"silu"``."""
    return _activation("silu", x, None, "silu", None)


swish = silu


@program
def gelu(x: Array, approximate: bool = True) -> Array:
    """``x`` times the probability that a normal number is below it, as ``jax.nn.gelu``: :func:`activation` of kind
    ``"gelu_tanh"``, and without ``approximate`` of ``"gelu"``."""
    return _activation("gelu", x, None, _gelu_kind("gelu", approximate), None)


@program
def sigmoid(x: Array) -> Array:
    """``1 / (1 + e^-x)``, as ``jax.nn.sigmoid``: :func:`activation` of kind ``"sigmoid"``."""
    return _activation("sigmoid", x, None, "sigmoid", None)


@program
def log_sigmoid(x: Array) -> Array:
    """``-log(1 + e^-x)``, as ``jax.nn.log_sigmoid``: less the :func:`softplus` of ``-x``."""
    return -_activation("log_sigmoid", -to_array("log_sigmoid", "x", x), None, "softplus", None)


@program
def tanh(x: Array) -> Array:
    """As ``jax.nn.tanh``: :func:`activation` of kind ``"tanh"``."""
    return _activation("tanh", x, None, "tanh", None)


@program
def softplus(x: Array) -> Array:
    """``log(1 + e^x)``, as ``jax.nn.softplus``: :func:`activation` of kind ``"softplus"``."""
    return _activation("softplus", x, None, "softplus", None)


@program
def exp(x: Array) -> Array:
    """``e^x``, as ``jax.numpy.exp``: :func:`activation` of kind ``"exp"``."""
    return _activation("exp", x, None, "exp", None)


@program
def swiglu(gate: Array, up: Array) -> Array:
    """``silu(gate) up``: :func:`activation` of kind ``"silu"``."""
    return _activation("swiglu", gate, _given("swiglu", up), "silu", None, "gate")


@program
def geglu(gate: Array, up: Array, approximate: bool = True) -> Array:
    """``gelu(gate) up``: :func:`activation` of the kind that :func:`gelu` has."""
    return _activation("geglu", gate, _given("geglu", up), _gelu_kind("geglu", approximate), None, "gate")


def _given(op: str, up: Any) -> Array:
    return to_array(op, "up", up)  # which refuses None


def _gelu_kind(op: str, approximate: Any) -> Kind:
    return "gelu_tanh" if static(op, "approximate", approximate, bool, "True or False") else "gelu"
