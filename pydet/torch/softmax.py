"""Softmax rows as ``torch.ops.pydet.*`` and with a gradient: schema, kernel, shapes for tracing, autograd, vmap.

``softmax(x)`` and ``log_softmax(x)`` are over the last dimension, and ``log_prob(x, index)`` is one column of each row
of ``log_softmax(x)``. Their backward calls ``softmax_backward(dy, y)``, ``log_softmax_backward(dy, y)`` and
``log_prob_backward(dlog_prob, x, index)``. As with ``rmsnorm``, ``torch.vmap`` is defined over rows, and forward mode
and second derivatives are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from pydet._native import INVALID_DTYPE, constants, fail
from pydet.ops.softmax import (
    _log_prob,
    _log_prob_backward,
    _log_softmax,
    _log_softmax_backward,
    _softmax,
    _softmax_backward,
)
from pydet.shapes import text
from pydet.torch import ops

Tensor: TypeAlias = torch.Tensor

_SCHEMAS = {
    "softmax": "(Tensor x) -> Tensor",
    "softmax_backward": "(Tensor dy, Tensor y) -> Tensor",
    "log_softmax": "(Tensor x) -> Tensor",
    "log_softmax_backward": "(Tensor dy, Tensor y) -> Tensor",
    "log_prob": "(Tensor x, Tensor index) -> Tensor",
    "log_prob_backward": "(Tensor dlog_prob, Tensor x, Tensor index) -> Tensor",
}
for _name, _schema in _SCHEMAS.items():
    ops._library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))


# ---- Shapes, for tracing ---------------------------------------------------------------------------------------------


def _fake_rows(op: str) -> Callable[[Tensor], Tensor]:
    def fake(x: Tensor) -> Tensor:
        ops.TRACED.norm(op, *ops._operands(op, x=x))
        return x.new_empty(x.shape)

    return fake


def _fake_gradient(op: str) -> Callable[[Tensor, Tensor], Tensor]:
    def fake(dy: Tensor, y: Tensor) -> Tensor:
        rows, gradient = ops._operands(op, y=y, dy=dy)
        ops.TRACED.norm(op, rows, (gradient,))
        return y.new_empty(y.shape)

    return fake


def _check_columns(op: str, x: Tensor, index: Tensor, dlog_prob: Tensor | None = None) -> None:
    rows, _, gradient = ops._operands(op, x=x, index=index, dlog_prob=dlog_prob)
    ops.TRACED.norm(op, rows, (), None, gradient)
    if index.dtype not in (torch.int32, torch.int64):
        fail(INVALID_DTYPE, f"{op}: index is {str(index.dtype).removeprefix('torch.')}, want int32 or int64")
    if tuple(index.shape) != tuple(x.shape[:-1]):
        shapes = text(tuple(index.shape)), text(tuple(x.shape[:-1]))
        fail(constants.PYDET_INVALID_SHAPE, f"{op}: index is {shapes[0]}, want {shapes[1]}")


def _fake_log_prob(x: Tensor, index: Tensor) -> Tensor:
    _check_columns("log_prob", x, index)
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake_log_prob_backward(dlog_prob: Tensor, x: Tensor, index: Tensor) -> Tensor:
    _check_columns("log_prob_backward", x, index, dlog_prob)
    return x.new_empty(x.shape)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _run_log_prob(x: Tensor, index: Tensor) -> Tensor:
    return _log_prob(x, index.contiguous())


def _run_log_prob_backward(dlog_prob: Tensor, x: Tensor, index: Tensor) -> Tensor:
    return _log_prob_backward(dlog_prob.contiguous(), x, index.contiguous())


# ---- Autograd --------------------------------------------------------------------------------------------------------


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = ops._call(_softmax, torch.ops.pydet.softmax.default, x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return torch.ops.pydet.softmax_backward(dy, *ctx.saved_tensors)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = ops._call(_log_softmax, torch.ops.pydet.log_softmax.default, x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return torch.ops.pydet.log_softmax_backward(dy, *ctx.saved_tensors)


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(x, index)
        return ops._call(_run_log_prob, torch.ops.pydet.log_prob.default, x, index)

    @staticmethod
    def backward(ctx: Any, dlog_prob: Tensor) -> tuple[Tensor, None]:
        return torch.ops.pydet.log_prob_backward(dlog_prob, *ctx.saved_tensors), None


def _differentiable(op: str, run: Callable[..., Any], function: type[torch.autograd.Function]) -> Callable[..., Any]:
    overload = getattr(torch.ops.pydet, op).default

    def above(x: Tensor, *index: Tensor) -> Tensor:
        if ops._wants_gradient(x, None):
            return ops._differentiate(function, op, x, *index)
        return ops._call(run, overload, x, *index)

    return above


def softmax(x: torch.Tensor) -> torch.Tensor:
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` over the last dimension: :func:`pydet.softmax` with a gradient.

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16.

    Returns:
        Like ``x``. A row's bits depend on that row alone; columns of -inf at its end, or their absence, change no bit
        of the others.
    """
    return torch.ops.pydet.softmax(x)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """The logarithm of :func:`softmax`: :func:`pydet.log_softmax` with a gradient. Argument and result as there."""
    return torch.ops.pydet.log_softmax(x)


def log_prob(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Column ``index`` of each row of :func:`log_softmax`: :func:`pydet.log_prob` with a gradient by ``x``.

    Args:
        x: ``[..., N]``, logits in float32, bfloat16 or float16.
        index: ``[...]``, int32 or int64; a number that is no column gives NaN, and zeros in the gradient.

    Returns:
        ``[...]``, float32. No other column is written to memory.
    """
    return torch.ops.pydet.log_prob(x, index)


# ---- Registration ----------------------------------------------------------------------------------------------------

for _name, _kernel, _traced, _function in (
    ("softmax", _softmax, _fake_rows("softmax"), _Softmax),
    ("log_softmax", _log_softmax, _fake_rows("log_softmax"), _LogSoftmax),
    ("log_prob", _run_log_prob, _fake_log_prob, _LogProb),
    ("softmax_backward", _softmax_backward, _fake_gradient("softmax_backward"), None),
    ("log_softmax_backward", _log_softmax_backward, _fake_gradient("log_softmax_backward"), None),
    ("log_prob_backward", _run_log_prob_backward, _fake_log_prob_backward, None),
):
    _above = ops._refusing(_name, _kernel) if _function is None else _differentiable(_name, _kernel, _function)
    ops._library.impl(_name, ops._of_any_strides(_kernel), "CompositeExplicitAutograd")
    ops._library.impl(_name, _above, "Autograd")
    torch.library.register_fake(f"pydet::{_name}", _traced, lib=ops._library)
    torch.library.register_vmap(f"pydet::{_name}", ops._vmap_rows(_name, (), 1), lib=ops._library)
