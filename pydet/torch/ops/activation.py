"""``activation`` and ``gated_activation``, and what their gradients call."""

from __future__ import annotations

from typing import Any

import torch

from pydet.ops.activation import _activation, _activation_backward
from pydet.torch.ops.register import Call, Tensor, define, vmap_rows
from pydet.torch.ops.tracing import TRACED, operands

# ---- Shapes, for tracing ---------------------------------------------------------------------------------------------


def _check(op: str, **given: Tensor) -> None:
    """x first: the others are like it."""
    x, *others = operands(op, **given)
    TRACED.read(op, x, 0)
    for other in others:
        TRACED.read(op, other, 0)
        TRACED.same_type(op, x, other)
        TRACED.want(op, other, x.shape)


def _fake(x: Tensor, kind: str) -> Tensor:
    _check("activation", x=x)
    return x.new_empty(x.shape)


def _fake_gated(x: Tensor, up: Tensor, kind: str) -> Tensor:
    _check("activation", x=x, up=up)
    return x.new_empty(x.shape)


def _fake_backward(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    _check("activation_backward", x=x, dy=dy)
    return x.new_empty(x.shape)


def _fake_gated_backward(dy: Tensor, x: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    _check("activation_backward", x=x, dy=dy, up=up)
    return x.new_empty(x.shape), x.new_empty(x.shape)


# ---- Kernels: of a scalar as of a row of one element -----------------------------------------------------------------


def _run(x: Tensor, kind: str) -> Tensor:
    return _activation(x, kind=kind) if x.dim() else _activation(x[None], kind=kind)[0]


def _run_gated(x: Tensor, up: Tensor, kind: str) -> Tensor:
    if x.dim() == up.dim() == 0:
        return _activation(x[None], up=up[None], kind=kind)[0]
    return _activation(x, up=up, kind=kind)


def _run_backward(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    if x.dim() == dy.dim() == 0:
        return _run_backward(dy[None], x[None], kind)[0]
    return _activation_backward(dy, x, wants_dx=True, kind=kind)[0]


def _run_gated_backward(dy: Tensor, x: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    if x.dim() == dy.dim() == up.dim() == 0:
        dx, dup = _run_gated_backward(dy[None], x[None], up[None], kind)
        return dx[0], dup[0]
    return _activation_backward(dy, x, up=up, wants_dx=True, wants_dup=True, kind=kind)


# ---- Autograd --------------------------------------------------------------------------------------------------------


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return _activation_op(x, kind)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return torch.ops.pydet.activation_backward(dy, *ctx.saved_tensors, ctx.kind), None


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x, up)
        ctx.kind = kind
        return _gated_op(x, up, kind)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return *torch.ops.pydet.gated_activation_backward(dy, *ctx.saved_tensors, ctx.kind), None


# ---- The operators ---------------------------------------------------------------------------------------------------


def _define(signature: str, run: Call, fake: Call, function: Any = None) -> Call:
    return define(signature, run, fake, gradient=None if function is None else function.apply, vmap=vmap_rows())


_activation_op = _define("activation(Tensor x, str kind) -> Tensor", _run, _fake, _Activation)
_gated_op = _define(
    "gated_activation(Tensor x, Tensor up, str kind) -> Tensor", _run_gated, _fake_gated, _GatedActivation
)
_define("activation_backward(Tensor dy, Tensor x, str kind) -> Tensor", _run_backward, _fake_backward)
_define(
    "gated_activation_backward(Tensor dy, Tensor x, Tensor up, str kind) -> (Tensor, Tensor)",
    _run_gated_backward,
    _fake_gated_backward,
)
